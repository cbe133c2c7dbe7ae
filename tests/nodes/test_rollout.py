"""What a rollout makes of generations, and the seeds that it gives them."""

import torch

from rlgraph.nodes.rollout.rollout import assemble, seed
from rlgraph.ops import Generation
from rlgraph.runtime.demo import make_tokenizer


def test_seeds_depend_on_each_part_and_fit_63_bits() -> None:
    seeds = {seed(r, i, n, k) for r in range(3) for i in range(3) for n in ("a", "b") for k in range(50)}
    assert len(seeds) == 3 * 3 * 2 * 50
    assert all(0 <= s < 2**63 for s in seeds)
    assert max(seeds) > 2**61


def test_parts_of_a_seed_do_not_run_together() -> None:
    assert seed(1, 11, "a", 1) != seed(11, 1, "a", 1)


def test_a_seed_is_the_same_in_any_process() -> None:
    assert seed(0, 0, "rollout", 0) == 6073350381390868723


def test_columns_of_a_rollout() -> None:
    stop, cut, empty = (
        Generation([7, 2], [-0.5, -1.0], "stop"),
        Generation([8], [-2.0], "length"),
        Generation([], [], "stop"),
    )
    out = assemble(make_tokenizer(), [([5, 6], stop), ([5, 6], cut), ([9], empty)], [0, 0, 1])
    assert out.responses == ["4", "5", ""]
    assert out.tokens.tolist() == [[5, 6, 7, 2], [5, 6, 8], [9]]
    assert out.loss_mask.tolist() == [[False, False, True, True], [False, False, True], [False]]
    assert out.rollout_logprobs.tolist() == [[0, 0, -0.5, -1], [0, 0, -2], [0]]
    assert out.group.tolist() == [0, 0, 1]
    assert out.truncated.tolist() == [False, True, False]
    assert [c.values.dtype for c in out[:3]] == [torch.int64, torch.bool, torch.float32]


def test_columns_of_no_samples() -> None:
    out = assemble(make_tokenizer(), [], [])
    *columns, routing = out
    assert [len(column) for column in columns] == [0] * 6 and routing is None
    assert out.tokens.values.dtype == torch.int64
