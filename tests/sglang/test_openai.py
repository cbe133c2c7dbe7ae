"""The serve engine ``openai`` against the completions endpoint of a real SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import pytest

from rlgraph.ops import Request, Sampling
from rlgraph.runtime.engines.openai.engine import OpenAIEngine
from rlgraph.runtime.engines.sglang.engine import SglangEngine
from rlgraph.runtime.engines.transformers.engine import TransformersEngine

pytestmark = pytest.mark.filterwarnings("default")
REQUESTS = [Request([5, 6, 7], [1]), Request([8, 9], [2, 3]), Request([11] * 9, [4])]


@pytest.fixture
def reaching(awake: SglangEngine, path: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenAIEngine]:
    """An engine of the server's endpoint, where another one brought the weights."""
    monkeypatch.setenv("OPENAI_API_KEY", awake.supervisor.client.key)
    made = OpenAIEngine(path, addresses=[awake.supervisor.client.url], max_rows=4)
    yield made
    made.close()


def test_greedy_samples_are_those_of_the_embedded_engine(reaching: OpenAIEngine, path: str) -> None:
    embedded = TransformersEngine(path)
    embedded.load_pretrained()
    sampling = Sampling(24, temperature=0.0)
    made, expected = reaching.generate(REQUESTS, sampling), embedded.generate(REQUESTS, sampling)
    for samples, others in zip(made, expected, strict=True):
        for sample, other in zip(samples, others, strict=True):
            assert (sample.tokens, sample.finish) == ([*other.tokens], other.finish)
            assert sample.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_a_token_ends_a_sample_by_its_id(reaching: OpenAIEngine, awake: SglangEngine) -> None:
    plain = awake.generate(REQUESTS, Sampling(24, temperature=0.0))
    ids = [many[0].tokens[3] for many in plain]
    made = reaching.generate(REQUESTS, Sampling(24, temperature=0.0, stop_token_ids=ids))
    for before, after in zip(chain(*plain), chain(*made), strict=True):
        kept = next(n for n, token in enumerate(before.tokens, 1) if token in ids)
        assert (after.tokens, after.finish) == ([*before.tokens[:kept]], "stop")


def test_log_probs_are_at_the_temperature_and_the_end_token_is_among_them(
    reaching: OpenAIEngine, awake: SglangEngine
) -> None:
    requests = [Request([5, 6, 7], [*range(12)])]
    ((*drawn,),) = reaching.generate(requests, Sampling(400, temperature=1.3, top_p=0.95))
    assert len({tuple(sample.tokens) for sample in drawn}) > 1
    ended = [sample for sample in drawn if sample.finish == "stop"]
    assert ended and all(sample.tokens[-1] in awake.stops for sample in ended)
    # what SGLang's own call says of the same first tokens
    ((*greedy,),) = reaching.generate([Request([5, 6, 7], [0])], Sampling(8, temperature=0.0))
    ((*own,),) = awake.generate([Request([5, 6, 7], [0])], Sampling(8, temperature=0.0))
    assert greedy[0].tokens == own[0].tokens
    assert greedy[0].logprobs == pytest.approx(own[0].logprobs, abs=1e-5)
