"""Groups of ranks that share tokens or divide layers, as workers make them beside the links between pools.

This file as a script is the three workers: two that train, and one that generates.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import forked, launch

from rlgraph.compiler import compile_graph
from rlgraph.runtime.engines.sequence.groups import RowGroup
from rlgraph.runtime.worker.process_groups import meet

TWO = str(Path(__file__).parent / "ones_two.yaml")
SHARED = [f"models.{name}.train.sequence_parallel=2" for name in ("policy", "ref")]
DIVIDED = [f"models.{name}.train.tensor_parallel=2" for name in ("policy", "ref")]
PLACES = [("train", 0), ("train", 1), ("gen", 0)]


def main(rank: int, root: Path, way: str) -> None:
    plan = compile_graph(TWO, ["pools.train.devices=2", *(SHARED if way == "sequence" else DIVIDED)], 3)
    made = meet(plan, PLACES[rank], "", "cpu", None)
    groups: dict[str, RowGroup] = {name: ranks.sequence for name, ranks in made.ranks.items()}
    others: dict[str, RowGroup] = {name: ranks.tensor for name, ranks in made.ranks.items()}
    if way == "tensor":
        groups, others = others, groups
        assert [ranks.mesh.mesh.tolist() for ranks in made.ranks.values()] == [[rank]] * len(groups)
    assert not any(group.group for group in others.values())
    for name, shared in groups.items():
        assert groups["policy"] is shared, "one group for all models that share alike"
        found = torch.tensor([rank])
        dist.all_reduce(found, group=shared.group)
        (root / f"{name}-{rank}").write_text(f"{shared.rank} of {shared.ranks}: {int(found)}")


@pytest.mark.usefixtures("in_demo")
@pytest.mark.parametrize("way", ["sequence", "tensor"])
def test_workers_with_a_link_to_another_pool_make_them_too(tmp_path: Path, way: str) -> None:
    launch(__file__, tmp_path, way)
    said = {path.name: path.read_text() for path in tmp_path.glob("*-*") if path.is_file()}
    expected = {f"{name}-{rank}": f"{rank} of 2: 1" for name in ("policy", "ref") for rank in (0, 1)}
    assert said == expected


if __name__ == "__main__":
    forked(main, len(PLACES))
