"""Texts of a grammar, from a real SGLang on the CPU: regular expressions and JSON schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_engine import generating
from transformers import AutoModelForCausalLM

from rlgraph.engines.registry import SERVERS, SERVING
from rlgraph.errors import RunError
from rlgraph.ops import Generation, Request, Sampling
from rlgraph.runtime.demo_tools import make_model
from rlgraph.runtime.engines.sglang.engine import SglangEngine

REQUEST = Request([3, 20, 21, 1, 4], range(6))
SCHEMA = {
    "type": "object",
    "properties": {
        "answer": {"type": "integer", "minimum": 10, "maximum": 99},
        "sure": {"enum": ["yes", "no"]},
    },
    "required": ["answer", "sure"],
    "additionalProperties": False,
}
LONG = Sampling(250)
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEngine]:
    """A server as plans start it where a node asks for a grammar, with a model of random weights."""
    folder = tmp_path_factory.mktemp("grammar")
    make_model(folder / "model", seed=0)
    options = SERVING[SERVERS].grammars
    made = SglangEngine(str(folder / "model"), logs=folder / "logs", max_rows=8, options=options)
    made.load_pretrained()
    yield made
    made.close()


def drawn(engine: SglangEngine, sampling: Sampling) -> list[tuple[str, Generation]]:
    """Six samples, each with its text."""
    (many,) = engine.generate([REQUEST], sampling)
    return [(engine.tokenizer.decode(list(one.tokens), skip_special_tokens=True), one) for one in many]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_response_is_an_instance_of_its_schema(engine: SglangEngine, temperature: float) -> None:
    found = drawn(engine, replace(LONG, temperature=temperature, json_schema=SCHEMA))
    for text, one in found:
        made = json.loads(text)
        assert [*made] == ["answer", "sure"] and 10 <= made["answer"] <= 99 and made["sure"] in ("yes", "no")
        assert one.finish == "stop" and one.tokens[-1] in engine.stops
        assert len(one.logprobs) == len(one.tokens) and max(one.logprobs) <= 0 > min(one.logprobs)
    assert len({text for text, _ in found}) == (1 if temperature == 0 else 6)


def test_an_empty_schema_is_any_json(engine: SglangEngine) -> None:
    found = drawn(engine, replace(LONG, json_schema={}))
    whole = [text for text, one in found if one.is_whole]
    assert whole
    for text in whole:
        json.loads(text)


def test_a_token_may_end_a_text_of_a_grammar_before_its_end(engine: SglangEngine) -> None:
    (end,) = engine.tokenizer("m", add_special_tokens=False).input_ids
    found = drawn(engine, replace(LONG, regex="[k-n]{40}", stop_token_ids=[end]))
    for text, one in found:
        assert re.fullmatch("[k-n]{1,40}", text) and one.finish == "stop"
        assert end not in one.tokens[:-1]
    assert any(one.tokens[-1] == end for _, one in found)


def test_new_weights_find_a_grammar_in_flight_that_is_not_compiled_yet(engine: SglangEngine) -> None:
    """Its text is then drawn anew: behind its tokens a grammar would begin once more."""
    model = AutoModelForCausalLM.from_pretrained(engine.path, dtype=torch.float32)
    sampling = replace(LONG, regex="(0[1-9]{2}){60}7")
    with generating(engine, [REQUEST], sampling) as made:
        engine.load_weights(model.named_parameters(), 3)
    for one in made.result()[0]:
        text = engine.tokenizer.decode(list(one.tokens), skip_special_tokens=True)
        assert re.fullmatch(sampling.regex, text) and {*one.versions} in ({0}, {3})
    assert any({*one.versions} == {3} for one in made.result()[0])


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ({"regex": "[1-"}, "Unclosed '\\['"),
        ({"json_schema": {"type": "nonsense"}}, "Unsupported type .*nonsense"),
        ({"json_schema": {"not": {"type": "string"}}}, "keyword\\(s\\) not would be ignored"),
    ],
)
def test_what_is_no_grammar_is_refused_with_its_fault(
    engine: SglangEngine, grammar: dict[str, Any], said: str
) -> None:
    with pytest.raises(RunError, match=said):
        drawn(engine, replace(LONG, **grammar))
