"""Groups of ranks that share tokens, as workers make them beside the links between pools.

This file as a script is the three workers: two that train, and one that generates.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import forked, launch

from rlgraph.compiler import compile_graph
from rlgraph.runtime.worker.process_groups import meet

TWO = str(Path(__file__).parent / "ones_two.yaml")
SHARED = [f"models.{name}.train.sequence_parallel=2" for name in ("policy", "ref")]
PLACES = [("train", 0), ("train", 1), ("gen", 0)]


def main(rank: int, root: Path) -> None:
    plan = compile_graph(TWO, ["pools.train.devices=2", *SHARED], 3)
    groups = meet(plan, PLACES[rank], "", "cpu", None)
    for name in groups.sequences:
        shared = groups.sequences[name]
        assert groups.sequences["policy"] is shared, "one group for all models that share alike"
        found = torch.tensor([rank])
        dist.all_reduce(found, group=shared.group)
        (root / f"{name}-{rank}").write_text(f"{shared.rank} of {shared.ranks}: {int(found)}")


@pytest.mark.usefixtures("in_demo")
def test_workers_with_a_link_to_another_pool_make_them_too(tmp_path: Path) -> None:
    launch(__file__, tmp_path)
    said = {path.name: path.read_text() for path in tmp_path.glob("*-*") if path.is_file()}
    expected = {f"{name}-{rank}": f"{rank} of 2: 1" for name in ("policy", "ref") for rank in (0, 1)}
    assert said == expected


if __name__ == "__main__":
    forked(main, len(PLACES))
