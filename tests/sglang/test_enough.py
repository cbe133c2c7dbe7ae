"""Calls that end once enough of their samples have: the servers abort the others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from fake import Fake

from rlgraph.ops import Enough, Generation, Request, Sampling
from rlgraph.runtime.engines.sglang.engine import SglangEngine

pytestmark = pytest.mark.filterwarnings("default")
LONG = 2000
REQUESTS = [Request([5 + i, 6], [2 * i, 2 * i + 1], max_new_tokens=3 if i < 2 else LONG) for i in range(5)]


def four(told: list[int]) -> Enough:
    """Whether four samples have ended."""

    def enough(ended: Sequence[int]) -> bool:
        told.extend(ended)
        return len(told) >= 4

    return enough


def aborted(answers: Sequence[Sequence[Generation]]) -> list[int]:
    """The requests of the samples that were."""
    every = [(number, one) for number, many in enumerate(answers) for one in many]
    assert all(len(one.tokens) < LONG for _, one in every)
    return [number for number, one in every if one.finish == "abort"]


def test_several_servers_abort_the_rest(
    path: str, model: torch.nn.Module, tmp_path: Path, fakes: list[Fake]
) -> None:
    clients = [fake.client for fake in fakes]
    engine = SglangEngine(path, servers=clients, transport="disk", sync_folder=str(tmp_path), max_rows=4)
    engine.load_weights(model.named_parameters(), 0)
    told: list[int] = []
    assert aborted(engine.generate(REQUESTS, Sampling(LONG), four(told))) == [2, 2, 3, 3, 4, 4]
    assert sorted(told) == [0, 0, 1, 1]
    # the next call is none of what was aborted, and one that never has enough runs to its end
    answers = engine.generate([Request([9], range(6))], Sampling(4), lambda ended: False)
    assert [len(one.tokens) for one in answers[0]] == [4] * 6
    engine.close()


def test_a_real_server_aborts_the_rest(awake: SglangEngine) -> None:
    told: list[int] = []
    found = aborted(awake.generate(REQUESTS, Sampling(LONG), four(told)))
    assert 4 <= len(told) <= 10 - len(found) and {*found} <= {2, 3, 4} and found  # some may stop early
    (again,) = awake.generate([Request([9], range(2))], Sampling(4))
    assert all(one.finish != "abort" for one in again)
