"""Rounds that end with a share of their groups: the engine aborts the others, which go on later."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file
from test_partial_rollout import PARTIAL, run

from rlgraph.ops import Request, Sampling
from rlgraph.runtime.engines.transformers.engine import TransformersEngine

ENOUGH = "rollout={op: rollout.partial, model: policy, n: %d, max_new_tokens: %d, enough: 0.1}"
pytestmark = pytest.mark.usefixtures("in_demo")


@pytest.mark.parametrize("rows", [1024, 5])
def test_the_engine_ends_what_runs_and_what_waits(demo_files: Path, rows: int) -> None:
    engine = TransformersEngine(str(demo_files / "demo_files/model"), max_rows=rows)
    engine.load_pretrained()
    requests = [Request([4 + i, 5, 6], [10 * i, 10 * i + 1]) for i in range(6)]
    told: list[int] = []

    def enough(ended: Sequence[int]) -> bool:
        told.extend(ended)
        return len(told) >= 4

    whole = engine.generate(requests, Sampling(40))
    some = engine.generate(requests, Sampling(40), enough)
    pairs = [pair for full, part in zip(whole, some, strict=True) for pair in zip(full, part, strict=True)]
    ended = [number for number, made in enumerate(some) for one in made if one.finish != "abort"]
    assert sorted(told) == ended and 4 <= len(ended) < 12
    for full, part in pairs:
        if part.finish != "abort":
            assert (part.tokens, part.finish) == (full.tokens, full.finish)
        else:
            assert part.tokens == full.tokens[: len(part.tokens)] and len(part.tokens) < len(full.tokens)
            assert len(part.logprobs) == len(part.tokens)
    assert any(not part.tokens for _, part in pairs) == (rows == 5)  # those that waited have none
    again = engine.generate(requests, Sampling(40), lambda ended: bool(ended))
    assert sum(one.finish != "abort" for made in again for one in made) >= 1


def test_samples_that_were_aborted_go_on_as_if_they_had_not_been() -> None:
    all_of_them = "mixed.refill={rounds: 40}"  # and no more are begun
    (whole,) = run(PARTIAL, "whole", all_of_them, "rollout.chunk=24", steps=1)
    (aborted,) = run(PARTIAL, "aborted", all_of_them, ENOUGH % (2, 24), steps=1)
    assert whole["mixed/rounds"] == 1 < aborted["mixed/rounds"]
    same = ("tokens/generated", "rollout/length", "rollout/truncated", "reward/mean", "rows/numbers")
    assert {name: aborted[name] for name in same} == pytest.approx({name: whole[name] for name in same})


@pytest.mark.slow
def test_a_run_that_aborts_is_resumed_bit_for_bit() -> None:
    whole = run(PARTIAL, "four", ENOUGH % (2, 24))
    assert [line["rows/used"] for line in whole] == [14] * 4
    assert all(line["mixed/unfinished"] > 0 for line in whole)
    assert max(line["versions/mixed"] for line in whole) > 0
    full = run(PARTIAL, "full", "rollout.chunk=24", steps=1)
    assert whole[0]["tokens/generated"] < full[0]["tokens/generated"]
    run(PARTIAL, "cut", ENOUGH % (2, 24), steps=1)
    assert run(PARTIAL, "cut", ENOUGH % (2, 24), resume=True) == whole
    weights = [load_file(f"{name}/models/policy/model.safetensors") for name in ("four", "cut")]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])
