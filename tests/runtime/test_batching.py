"""Mini-batches and micro-batches: what is cut, what is padded, what is read."""

from __future__ import annotations

import pytest
import torch

from rlgraph.nodes.support.ragged import Ragged
from rlgraph.runtime.engines.fsdp.batching import (
    Budget,
    columns_read,
    cut,
    micro_batch_rows,
    micro_batches,
    minibatch_rows,
    placeholder,
    scored,
)

CPU = torch.device("cpu")
TOKENS = Ragged.of([[5, 6, 7, 8, 9], [1, 2, 3], [4]])
MASK = Ragged.of([[0, 0, 1, 1, 0], [1, 0, 1], [1]], dtype=torch.bool)


@pytest.mark.parametrize("budget", [1, 7, 20, 1000])
def test_micro_batches_hold_every_row_once_within_the_budget(budget: int) -> None:
    lengths = torch.randint(1, 12, (40,), generator=torch.Generator().manual_seed(0))
    batches = micro_batch_rows(lengths, budget)
    assert torch.cat(batches).sort().values.equal(torch.arange(40))
    assert all(len(rows) * int(lengths[rows].max()) <= budget or len(rows) == 1 for rows in batches)


def test_a_batch_is_cut_into_no_more_micro_batches_than_needed() -> None:
    assert len(micro_batch_rows(torch.full((256,), 10), 2560)) == 1
    assert len(micro_batch_rows(torch.full((257,), 10), 2560)) == 2
    assert micro_batch_rows(torch.empty(0, dtype=torch.int64), 10) == []


def test_minibatches_follow_row_numbers_whoever_holds_them() -> None:
    rows = torch.tensor([9, 0, 5, 3])
    assert [rows[part].tolist() for part in minibatch_rows(rows, 10, 3)] == [[0, 3], [5], [9]]
    assert [len(part) for part in minibatch_rows(rows[:0], 10, 3)] == [0, 0, 0]


def test_the_first_token_is_never_scored() -> None:
    assert scored(MASK).tolist() == [[False, False, True, True, False], [False, False, True], [False]]
    empty_row = Ragged.of([[], [1, 1]], dtype=torch.bool)
    assert scored(empty_row).tolist() == [[], [False, True]]


def test_a_pass_reads_only_up_to_the_last_scored_token() -> None:
    assert columns_read(scored(MASK)).tolist() == [3, 2, 1]


def test_a_micro_batch_scores_the_masked_tokens_and_puts_them_back() -> None:
    (batch,) = micro_batches({"tokens": TOKENS, "loss_mask": MASK}, Budget(100), CPU)
    assert batch.inputs["input_ids"].tolist() == [[5, 6, 7], [1, 2, 3], [4, 0, 0]]
    assert batch.cells.tolist() == [1, 2, 4]
    assert batch.picked(batch.inputs["input_ids"]).tolist() == [6, 7, 2]
    assert batch.labels.tolist() == [7, 8, 3]
    scattered = batch.scatter(torch.tensor([0.1, 0.2, 0.3]))
    assert scattered.values.tolist() == pytest.approx([0, 0, 0.1, 0.2, 0, 0, 0, 0.3, 0])


def test_columns_of_every_kind_are_cut_to_the_rows() -> None:
    columns = {
        "tokens": TOKENS,
        "loss_mask": MASK,
        "rewards": torch.tensor([1.0, 2.0, 3.0]),
        "answer": ["a", "b", "c"],
    }
    batches = micro_batches(columns, Budget(2), CPU, subset=torch.tensor([2, 1]))
    assert [b.columns["answer"] for b in batches] == [["b"], ["c"]]
    assert [b.columns["rewards"].tolist() for b in batches] == [[2.0], [3.0]]
    assert [b.columns["tokens"].tolist() for b in batches] == [[[1, 2, 3]], [[4]]]
    assert cut({"tokens": TOKENS}, torch.tensor([2]))["tokens"].tolist() == [[4]]


def test_rows_without_tokens_pass() -> None:
    columns = {"tokens": Ragged.of([[], []]), "loss_mask": Ragged.of([[], []], dtype=torch.bool)}
    (batch,) = micro_batches(columns, Budget(100), CPU)
    assert batch.inputs["input_ids"].shape == (2, 1)
    assert not len(batch.cells)


def test_the_placeholder_scores_one_token() -> None:
    assert placeholder(Budget(1), CPU).cells.tolist() == [1, 3]
