"""Replicas of a sharded model (HSDP): the same numbers on every mesh of four ranks as on one rank.

This file as a script is the four ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import test_planned_sync
import torch
import torch.distributed as dist
from ranks import forked, launch
from test_fsdp import (
    ADAM,
    ROWS,
    VOCAB,
    batch_columns,
    close,
    hugging_face_logprobs,
    part_of,
    policy_objective,
    value_objective,
    write_models,
)
from torch.distributed.device_mesh import DeviceMesh

from rlgraph.costs import limits
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.worker import process_groups
from rlgraph.runtime.worker.process_groups import hybrid_mesh

pytestmark = pytest.mark.slow

RANKS = 4
SHARD = "models.policy.train.shard=2"
MESHES = {"4": 4, "2x2": 2, "4x1": 1}  # replicas x shards -> ranks that share a copy
# 13 rows on four ranks: the last has none, which waits in every pass of the others
SHARES = (range(7), range(7, 9), range(9, 13), range(0))
# the mesh that saves and the one that goes on
LOADED = [("2x2", "2x2"), ("2x2", "4"), ("2x2", "4x1"), ("4", "2x2"), ("4x1", "2x2"), ("1", "2x2")]
CASES: dict[str, dict[str, Any]] = {
    "whole": {"path": "qwen"},  # reduced with the last micro-batch
    "layers": {"path": "llama", "reshard": True, "recompute": True},  # reduced with every one
    "critic": {"path": "llama", "head": "value", "seed": 7, "reshard": True},
    "adapted": {"path": "llama", "lora": {"rank": 3, "alpha": 6.0}, "reshard": True},
    "rounded": {"path": "llama", "dtype": "bfloat16", "reshard": True},
}
TRIED = {"4": ["whole"], "2x2": [*CASES], "4x1": ["whole", "layers"], "1": [*CASES]}


def engine_of(root: Path, case: str, where: dict[str, Any], **options: Any) -> FsdpEngine:
    """The engine of a case on a mesh. 24 tokens make several micro-batches."""
    settings: dict[str, Any] = {"optimizer": ADAM, "micro_tokens": 24, **CASES[case], **where, **options}
    if settings.pop("frozen", False):
        settings |= {"optimizer": None, "frozen": True}
    return FsdpEngine.of(str(root / settings.pop("path")), **settings)


def own_rows() -> torch.Tensor:
    if dist.get_world_size() == 1:
        return torch.arange(ROWS)
    return torch.tensor(SHARES[dist.get_rank()], dtype=torch.int64)


def trained(engine: FsdpEngine, minibatches: int = 3, epochs: int = 2) -> dict[str, Any]:
    """Scores, by row, before an update; its metrics; weights after it."""
    rows = own_rows()
    columns = part_of(batch_columns(), rows)
    policy = engine.head == "lm"
    scores = (engine.logprobs if policy else engine.values)(columns["tokens"], columns["loss_mask"])
    objective = policy_objective if policy else value_objective
    metrics = engine.update(columns, objective, rows, ROWS, minibatches, epochs, entropy=policy)
    return {
        "scores": dict(zip(rows.tolist(), scores.tolist(), strict=True)),
        "metrics": metrics,
        "weights": {name: weight.clone() for name, weight in engine.weights()},
    }


def scenario(root: Path, name: str, where: dict[str, Any]) -> dict[str, Any]:
    """The cases of a mesh; the first is saved, exported, and goes on."""
    found: dict[str, Any] = {}
    for case in TRIED[name]:
        engine = engine_of(root, case, where)
        found[case] = trained(engine)
        if case == "whole":
            found |= saved(engine, root, name)
    return found


def saved(engine: FsdpEngine, root: Path, name: str) -> dict[str, Any]:
    """What an engine writes as it is saved and exported, and how it goes on."""
    engine.begin_save(str(root / f"saved-{name}"))
    found = {"files": sorted(engine.finish_save()), "bytes": engine.checkpoint_bytes()}
    engine.export(str(root / f"exported-{name}"))
    engine.offload(["parameters", "optimizer"])
    engine.reload(["parameters", "optimizer"])
    return {**found, "next": trained(engine, minibatches=1, epochs=1)}


def loaded(engine: FsdpEngine, folder: Path) -> dict[str, Any]:
    """What goes on from the checkpoint of another mesh, and its weights before."""
    engine.load(str(folder))
    before = {name: weight.clone() for name, weight in engine.weights()}
    return {"before": before, "next": trained(engine, minibatches=1, epochs=1)}


def copied(reference: FsdpEngine, policy: FsdpEngine) -> dict[str, torch.Tensor]:
    """A reference on one mesh that has a quarter of the weights of a policy on another."""
    trained(policy)
    reference.copy(policy, 0.25)
    return dict(reference.weights())


def main(rank: int, root: Path) -> None:
    limits.LOGITS = 5 * VOCAB  # the head on five tokens at a time
    whole = DeviceMesh("cpu", list(range(RANKS)))
    group = whole.get_group()
    meshes = {name: hybrid_mesh(whole, shard) if shard < RANKS else whole for name, shard in MESHES.items()}
    where = {name: {"mesh": mesh, "group": group} for name, mesh in meshes.items()}
    found: dict[str, Any] = {name: scenario(root, name, place) for name, place in where.items()}
    dist.barrier()
    found["loaded"] = {
        (source, name): loaded(engine_of(root, "whole", where[name]), root / f"saved-{source}")
        for source, name in LOADED
    }
    found["copied"] = [
        copied(engine_of(root, "whole", where[one], frozen=True), engine_of(root, "whole", where[other]))
        for one, other in (("4", "2x2"), ("2x2", "4x1"))
    ]
    limits.BUCKET = test_planned_sync.SMALL
    plan, _ = test_planned_sync.planned(root, "rounded", SHARD, devices=RANKS)
    own = process_groups._meshes(plan, "main", whole)
    found["own"] = {name: (mesh is whole, mesh.mesh.tolist()) for name, mesh in own.items()}
    planned = FsdpEngine.of(str(root / "dense"), optimizer={"lr": 1e-2}, mesh=own["policy"], group=group)
    found["sync"] = test_planned_sync.received(planned.weights("bfloat16"))[1:]
    torch.save(found, root / f"rank-{rank}.pt")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("meshes")
    write_models(root)
    test_planned_sync.write_models(root)
    return root


@pytest.fixture(scope="module")
def alone(root: Path, one_rank: None) -> dict[str, Any]:
    return scenario(root, "1", {})


@pytest.fixture(scope="module")
def ranks(root: Path, alone: dict[str, Any]) -> list[dict[str, Any]]:
    launch(__file__, root)
    return [torch.load(root / f"rank-{rank}.pt") for rank in range(RANKS)]


def equal(found: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(found) == list(other) and all(tensor.equal(other[name]) for name, tensor in found.items())


def scores_of(found: list[dict[str, Any]]) -> dict[int, list[float]]:
    return dict(sorted((row, scores) for rank in found for row, scores in rank["scores"].items()))


def assert_as_one(ranks: list[dict[str, Any]], one: dict[str, Any], rounded: bool) -> None:
    """Assert that ranks found (``test_sequence.measured``) what one did, and do not drift apart by a bit."""
    near, later = (0.1, 0.1) if rounded else (1e-5, 1e-4)
    for kind, scores in enumerate(one["scores"]):
        together = {row: own for rank in ranks for row, own in rank["scores"][kind].items()}
        close(dict(sorted(together.items())), scores, near)
    close(ranks[0]["gradients"], one["gradients"], near)
    close(ranks[0]["metrics"], one["metrics"], later)
    close(ranks[0]["weights"], one["weights"], later)
    for rank in ranks:
        assert rank["metrics"] == ranks[0]["metrics"] and equal(rank["weights"], ranks[0]["weights"])


def assert_once(ranks: list[dict[str, Any]], sharded: list[str], others: list[str]) -> None:
    """Assert that four ranks that saved on several meshes wrote as much on each, and all of them on some."""
    names = [[f"shard-0000{rank}-of-00004.safetensors", *["state.json"] * (rank == 0)] for rank in range(4)]
    assert all([rank[mesh]["files"] for rank in ranks] == names for mesh in sharded)
    assert len({sum(rank[mesh]["bytes"] for rank in ranks) for mesh in (*sharded, *others)}) == 1


def assert_goes_on(found: dict[str, Any], trained: dict[str, Any], then: dict[str, Any]) -> None:
    """Assert that what was loaded is what was trained, and goes on as that did."""
    assert equal(found["before"], trained["weights"])
    close(found["next"]["metrics"], then["metrics"], 1e-4)
    close(found["next"]["weights"], then["weights"], 1e-4)


@pytest.mark.parametrize(
    ("mesh", "case"), [(mesh, case) for mesh in MESHES for case in (*TRIED[mesh], "next")]
)
def test_a_mesh_does_what_one_rank_does(
    mesh: str, case: str, alone: dict[str, Any], ranks: list[dict[str, Any]]
) -> None:
    one, found = alone[case], [rank[mesh][case] for rank in ranks]
    for other in found[1:]:  # the replicas have not drifted apart by a bit
        assert other["metrics"] == found[0]["metrics"] and equal(other["weights"], found[0]["weights"])
    tolerance = 2e-2 if case == "rounded" else 1e-4
    close(scores_of(found), scores_of([one]), tolerance)
    close(found[0]["metrics"], one["metrics"], tolerance)  # the gradient's norm: it is the sum of all ranks
    close(found[0]["weights"], one["weights"], tolerance)


def test_the_first_replica_writes_a_checkpoint(ranks: list[dict[str, Any]]) -> None:
    shards = [[f"shard-0000{rank}-of-00002.safetensors"] for rank in range(2)]
    assert [rank["2x2"]["files"] for rank in ranks] == [[*shards[0], "state.json"], shards[1], [], []]
    assert [rank["4x1"]["files"] != [] for rank in ranks] == [True, False, False, False]
    written = [sum(rank[mesh]["bytes"] for rank in ranks) for mesh in MESHES]
    assert written[0] == written[1] == written[2]


@pytest.mark.parametrize(("source", "mesh"), LOADED)
def test_a_checkpoint_of_a_mesh_goes_on_on_another(
    source: str, mesh: str, alone: dict[str, Any], ranks: list[dict[str, Any]]
) -> None:
    saved = alone if source == "1" else ranks[0][source]
    for rank in ranks:
        assert_goes_on(rank["loaded"][source, mesh], saved["whole"], saved["next"])


def test_a_checkpoint_of_replicas_goes_on_on_one_rank(root: Path, ranks: list[dict[str, Any]]) -> None:
    found = loaded(engine_of(root, "whole", {}), root / "saved-2x2")
    assert_goes_on(found, ranks[0]["2x2"]["whole"], ranks[0]["2x2"]["next"])


@pytest.mark.parametrize("mesh", MESHES)
def test_an_export_is_the_same_from_every_mesh(mesh: str, root: Path, ranks: list[dict[str, Any]]) -> None:
    scores = scores_of([rank[mesh]["next"] for rank in ranks])
    close([scores[row] for row in range(ROWS)], hugging_face_logprobs(root / f"exported-{mesh}"), 1e-5)


def test_weights_are_copied_between_meshes(
    root: Path, alone: dict[str, Any], ranks: list[dict[str, Any]]
) -> None:
    start = dict(FsdpEngine.of(str(root / "qwen"), frozen=True).weights())
    expected = {name: torch.lerp(start[name], alone["whole"]["weights"][name], 0.25) for name in start}
    for rank in ranks:
        for found in rank["copied"]:
            close(found, expected, 1e-4)


def test_a_worker_makes_the_meshes_of_its_plan(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["own"] == {"policy": (False, [[0, 1], [2, 3]]), "ref": (True, [0, 1, 2, 3])}


@pytest.fixture
def small_buckets() -> Iterator[None]:
    with patch.object(limits, "BUCKET", test_planned_sync.SMALL):
        yield


def test_a_sync_gathers_from_one_replica_as_planned(
    root: Path, ranks: list[dict[str, Any]], small_buckets: None
) -> None:
    plan, step = test_planned_sync.planned(root, "rounded", SHARD, devices=RANKS)
    whole = test_planned_sync.planned(root, "rounded", devices=RANKS)[1]
    for rank in ranks:
        nbytes, count = rank["sync"]
        assert nbytes == step.bytes < whole.bytes
        assert count == test_planned_sync.sync_buckets(plan, step.action)[0] > 5


if __name__ == "__main__":
    forked(main, RANKS)
