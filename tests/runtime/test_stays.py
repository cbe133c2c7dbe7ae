"""Calls that go on with what the one before has not ended: slots are kept, and no prompt is read again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_embedded import CONFIGS, PROMPTS, save
from test_partial_rollout import HERE, assert_close, run

from rlgraph.ops import Generation, Request, Sampling
from rlgraph.runtime.engines.transformers.continuous_batching import BatchRun
from rlgraph.runtime.engines.transformers.engine import TransformersEngine
from rlgraph.runtime.engines.transformers.kv_cache import SlotCache

LONGEST, CHUNK = 20, 6
ONES = str(HERE / "ones_two.yaml")
REQUESTS = [Request(prompt, [10 * i, 10 * i + 1]) for i, prompt in enumerate(PROMPTS)]


class Counting(TransformersEngine):
    """Counts the prompts that it reads."""

    read = 0

    def prefill(self, prompts: Sequence[Sequence[int]], cache: object) -> torch.Tensor:
        self.read += len(prompts)
        return super().prefill(prompts, cache)


def made(path: str, **settings: int) -> Counting:
    engine = Counting(path, **settings)
    engine.load_pretrained()
    return engine


def round_of(
    engine: Counting, so_far: list[list[Generation]], chunk: int = CHUNK, stays: bool = True, **more: object
) -> None:
    """Give every sample that has not ended more tokens."""
    open_ones = [
        (i, k)
        for i, many in enumerate(so_far)
        for k, one in enumerate(many)
        if not one.is_whole and len(one.tokens) < LONGEST
    ]
    requests = []
    for i, k in open_ones:
        done = so_far[i][k].tokens
        limit = min(chunk, LONGEST - len(done))
        whole = [*REQUESTS[i].prompt, *done]
        requests.append(Request(whole, [REQUESTS[i].seeds[k]], max_new_tokens=limit, drawn=len(done)))
    answers = engine.generate(requests, Sampling(LONGEST), stays=stays, **more)
    for (i, k), (one,) in zip(open_ones, answers, strict=True):
        before = so_far[i][k]
        tokens, logprobs = [*before.tokens, *one.tokens], [*before.logprobs, *one.logprobs]
        so_far[i][k] = Generation(tokens, logprobs, one.finish)


def begun() -> list[list[Generation]]:
    return [[Generation() for _ in request.seeds] for request in REQUESTS]


def are_open(so_far: list[list[Generation]]) -> int:
    return sum(not one.is_whole and len(one.tokens) < LONGEST for many in so_far for one in many)


def assert_alike(so_far: list[list[Generation]], whole: list[list[Generation]]) -> None:
    for many, others in zip(so_far, whole, strict=True):
        for one, other in zip(many, others, strict=True):
            assert list(one.tokens) == list(other.tokens) and one.finish == other.finish
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize("config", ["qwen2-tied", "qwen2-half-window"])
@pytest.mark.parametrize("rows", [1024, 5])
def test_rounds_draw_what_one_call_does_and_read_a_prompt_once(
    tmp_path: Path, config: str, rows: int
) -> None:
    engine = made(save(tmp_path, CONFIGS[config]), max_rows=rows)
    whole = engine.generate(REQUESTS, Sampling(LONGEST))
    engine.read, so_far = 0, begun()
    while are_open(so_far):
        running = are_open(so_far)
        before = engine.read
        round_of(engine, so_far)
        # all that had slots go on in them; what finds none is read as ever
        assert engine.read - before == (running if not before else max(running - rows, 0))
    assert_alike(so_far, whole)


def test_what_is_aborted_goes_on_in_its_slot(tmp_path: Path) -> None:
    engine = made(save(tmp_path, CONFIGS["qwen2-tied"]))
    whole = engine.generate(REQUESTS, Sampling(LONGEST))
    so_far, told = begun(), list[int]()

    def enough(ended: Sequence[int]) -> bool:
        told.extend(ended)
        return len(told) >= 2

    round_of(engine, so_far, LONGEST, enough=enough)
    assert are_open(so_far) and any(one.finish == "abort" for many in so_far for one in many)
    engine.read = 0
    while are_open(so_far):
        round_of(engine, so_far)
    assert engine.read == 0
    assert_alike(so_far, whole)


def test_new_weights_sleep_and_other_calls_forget_what_was_kept(tmp_path: Path) -> None:
    engine = made(save(tmp_path, CONFIGS["qwen2-tied"]))
    tensors = {name: tensor.clone() for name, tensor in engine.weights.items()}
    other = {name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in tensors.items()}
    so_far = begun()
    round_of(engine, so_far)
    assert engine.kept
    first = [[len(one.tokens) for one in many] for many in so_far]
    engine.load_weights(other.items(), 1)
    assert not engine.kept
    engine.read, running = 0, are_open(so_far)
    round_of(engine, so_far)
    assert engine.read == running
    # log-probs are of the weights that drew each token
    for tensors_of, later in ((tensors, False), (other, True)):
        engine.load_weights(tensors_of.items(), 2)
        for request, lengths, many in zip(REQUESTS, first, so_far, strict=True):
            for cut, one in zip(lengths, many, strict=True):
                ids = torch.tensor([[*request.prompt, *one.tokens]])
                with torch.no_grad():
                    scores = torch.log_softmax(engine.model(ids).logits[0], -1)[len(request.prompt) - 1 : -1]
                own = scores[torch.arange(len(one.tokens)), torch.tensor(one.tokens)]
                part = slice(cut, None) if later else slice(0, cut)
                assert own[part].tolist() == pytest.approx(list(one.logprobs)[part], abs=1e-4)
    round_of(engine, so_far)
    assert engine.kept
    engine.generate([replace(REQUESTS[0])], Sampling(2))
    assert not engine.kept
    so_far = begun()
    round_of(engine, so_far)
    engine.sleep(["weights"])
    assert not engine.kept


POOLS = "pools={train: {devices: 1}, gen: {devices: 1}}"
STREAM = "schedule={iterations: 4, buffer: {staleness: 1, order: in_order, chunk: 3}}"


@pytest.mark.slow
@pytest.mark.usefixtures("in_demo")
def test_a_stream_draws_the_same_where_no_slot_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = (POOLS, STREAM, "update_policy.in.old_logprobs=rollout_logprobs")
    reads, prefill = list[int](), TransformersEngine.prefill

    def noted(self: TransformersEngine, prompts: Sequence[Sequence[int]], cache: SlotCache) -> torch.Tensor:
        reads.append(len(prompts))
        return prefill(self, prompts, cache)

    monkeypatch.setattr(TransformersEngine, "prefill", noted)
    kept = run(ONES, "kept", *settings)
    read = sum(reads)
    monkeypatch.setattr(BatchRun, "kept", lambda self, made: None)
    reads.clear()
    assert_close(run(ONES, "not", *settings), kept)
    assert read < sum(reads)
