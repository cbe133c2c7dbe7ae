"""Ranks that each have some experts of a mixture (``train.expert_parallel``) against one rank with all.

A launch of two ranks and one of four (this file as a script) run every case.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import test_meshes
import test_planned_sync
import torch
import torch.distributed as dist
from families import FAMILIES, SHAPE, VOCABULARY, build, plain
from ranks import at_night, cases_asked, forked, launch
from test_fsdp import ADAM, ROWS, close, hugging_face_logprobs
from test_meshes import assert_as_one, assert_goes_on, assert_once, copied, loaded, scores_of, trained
from test_sequence import batch_columns, cut, measured, rows_of_rank
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlgraph.costs import limits
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.runtime.engines.experts import check
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.sequence.groups import sequence_group
from rlgraph.runtime.worker.process_groups import expert_group, hybrid_mesh

pytestmark = pytest.mark.slow

ON_HOST = {"optimizer_offload": True, "activation_offload": True}
BY_LAYER = {"reshard": True, "recompute": True, "micro_tokens": 40}
MIXTURES = {  # family -> how many of its experts, of which a token chooses two
    "qwen3_moe": {"num_experts": 8},
    "mixtral": {"num_local_experts": 4},
    "glm4_moe": {"n_routed_experts": 4},  # shared experts, a dense layer before
    "gpt_oss": {"num_local_experts": 4},  # biases, transposed weights
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "whole": ("qwen3_moe", {}),
    "by layer": ("qwen3_moe", BY_LAYER),
    "few experts": ("mixtral", {"reshard": True}),
    "shared experts": ("glm4_moe", BY_LAYER),
    "biases": ("gpt_oss", {"reshard": True, "packing": False}),
    "critic": ("qwen3_moe", {"head": "value", "seed": 7, "reshard": True}),
    "rounded": ("qwen3_moe", {"dtype": "bfloat16", **BY_LAYER}),
    "on the host": ("mixtral", {**BY_LAYER, **ON_HOST}),
    "not safetensors": ("pickled", BY_LAYER),
    "muon": ("qwen3_moe", {**BY_LAYER, "optimizer": {"lr": 1e-2, "kind": "muon", "max_grad_norm": 0.5}}),
}
# ranks -> meshes: devices of a copy, ranks that divide experts, ranks that share tokens
MESHES: dict[str, dict[str, tuple[int, int, int]]] = {
    "2": {"2": (2, 2, 1)},
    "4": {"2 of 4": (4, 2, 1), "4": (4, 4, 1), "2 copies": (2, 2, 1), "shared tokens": (4, 2, 2)},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "llama": ({}, "it has no experts in the form"),
    "qwen3_moe": ({"num_experts": 6}, "its 6 experts can't be shared out"),
    "mixtral": (
        {"num_local_experts": 4, "quantization_config": {"quant_method": "fp8"}},
        "its weights are quantised",
    ),
}
TRIED = {
    "2": ["whole", "few experts", "critic", "rounded", "not safetensors"],
    "2 of 4": ["by layer", "shared experts", "biases", "on the host", "muon"],
    "4": ["by layer", "biases"],
}
SYNCED = "models.policy.path={root}/qwen3_moe models.policy.train.expert_parallel=2"
DAY = ("whole", "by layer", "shared experts", "critic")
BRIEF = ["whole", "by layer"]
# the mesh that saves and the one that goes on
LOADED = [("2 of 4", "plain"), ("plain", "2 of 4"), ("4", "2 of 4"), ("2 of 4", "2 copies"), ("1", "4")]


def engine_of(root: Path, case: str, where: dict[str, Any], **options: Any) -> FsdpEngine:
    model, own = CASES[case]
    settings: dict[str, Any] = {"optimizer": ADAM, "micro_tokens": 100, **own, **where, **options}
    return FsdpEngine.of(str(root / model), **settings)


def saved(root: Path, name: str, where: dict[str, Any]) -> dict[str, Any]:
    """What is trained, saved, exported, and goes on."""
    engine = engine_of(root, "by layer", where)
    return {"trained": trained(engine), **test_meshes.saved(engine, root, name)}


def replayed(root: Path, where: dict[str, Any]) -> dict[str, Any]:
    """Scores of this rank's rows, whose tokens go to experts that are given, and then to the router's own."""
    engine, rows = engine_of(root, "by layer", where), rows_of_rank()
    columns = cut(batch_columns(), rows)
    tokens, generator = columns["tokens"], torch.Generator().manual_seed(int(rows.sum()) if len(rows) else 0)
    given = torch.rand(2 * len(tokens.values), 8, generator=generator).topk(2).indices
    choice = Ragged(given.view(-1, 2, 2).to(torch.int16), tokens.offsets)
    both = [engine.logprobs(tokens, columns["loss_mask"], routing=routing) for routing in (choice, None)]
    return {"rows": rows, "routing": choice.values, "scores": [column.tolist() for column in both]}


def synced(root: Path, whole: DeviceMesh) -> dict[str, Any]:
    """What a sync gathers on the mesh of a plan."""
    with patch.object(limits, "BUCKET", test_planned_sync.SMALL):
        plan, step = test_planned_sync.planned(root, "rounded", *SYNCED.format(root=root).split(), devices=4)
        mesh = plan.meshes["policy"]
        engine = engine_of(root, "whole", place(whole, mesh.shard, mesh.experts, 1))
        weights, nbytes, _ = test_planned_sync.received(engine.weights("bfloat16"))
    return {"names": [*weights], "bytes": nbytes, "planned": step.bytes, "mesh": str(mesh)}


def place(whole: DeviceMesh, shard: int, experts: int, sequence: int) -> dict[str, Any]:
    group = whole.get_group()
    mesh = whole if shard == whole.size() else hybrid_mesh(whole, shard)
    shared = {"sequence": sequence_group(group, sequence), "experts": expert_group(whole, shard, experts)}
    return {"mesh": mesh, "group": group, **shared}


def main(rank: int, root: Path, ranks: str, *cases: str) -> None:
    limits.LOGITS = 5 * VOCABULARY  # the head on five tokens at a time
    whole = init_device_mesh("cpu", (int(ranks),))
    places = {name: place(whole, *mesh) for name, mesh in MESHES[ranks].items()}
    found: dict[Any, Any] = {
        (name, case): measured(engine_of(root, case, where))
        for name, where in places.items()
        for case in TRIED.get(name, BRIEF)
        if case in cases
    }
    if ranks == "4":
        places["plain"] = {"mesh": whole}
        names = sorted({source for source, _ in LOADED} - {"1"})
        found["saved"] = {name: saved(root, name, places[name]) for name in names}
        dist.barrier()
        found["loaded"] = {
            (source, name): loaded(engine_of(root, "by layer", places[name]), root / f"saved-{source}")
            for source, name in LOADED
        }
        frozen = {"frozen": True, "optimizer": None}
        found["copied"] = [
            copied(engine_of(root, "whole", places[one], **frozen), engine_of(root, "whole", places[other]))
            for one, other in (("2 of 4", "plain"), ("plain", "2 of 4"))
        ]
        found["synced"] = synced(root, whole)
        found["replayed"] = replayed(root, places["2 of 4"])
    torch.save(found, root / f"rank-{ranks}-{rank}.pt")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("experts")
    for family, experts in MIXTURES.items():
        with patch.dict(FAMILIES, {family: {**FAMILIES[family], **experts}}):
            build(root, family)
    model = plain(root / "mixtral")
    model.config.save_pretrained(root / "pickled")
    torch.save(model.state_dict(), root / "pickled" / "pytorch_model.bin")
    return root


@pytest.fixture(scope="module")
def alone(root: Path, one_rank: None) -> dict[str, Any]:
    return saved(root, "1", {})


@pytest.fixture(scope="module")
def several(
    root: Path, alone: dict[str, Any], request: pytest.FixtureRequest
) -> dict[str, list[dict[Any, Any]]]:
    """Number of ranks -> what each found."""
    found = {}
    for ranks in MESHES:
        (root / "store").unlink(missing_ok=True)
        launch(__file__, root, ranks, *cases_asked(request))
        found[ranks] = [torch.load(root / f"rank-{ranks}-{rank}.pt") for rank in range(int(ranks))]
    return found


@pytest.fixture(scope="module")
def one(root: Path, one_rank: None, request: pytest.FixtureRequest) -> dict[str, Any]:
    return {case: measured(engine_of(root, case, {})) for case in cases_asked(request)}


@pytest.mark.parametrize(
    ("ranks", "mesh", "case"),
    at_night(
        [
            (ranks, mesh, case)
            for ranks in MESHES
            for mesh in MESHES[ranks]
            for case in TRIED.get(mesh, BRIEF)
        ],
        DAY,
    ),
)
def test_ranks_that_divide_experts_do_what_one_does(
    one: dict[str, Any], several: dict[str, list[dict[Any, Any]]], ranks: str, mesh: str, case: str
) -> None:
    found, alone = [rank[mesh, case] for rank in several[ranks]], one[case]
    experts = [name for name in alone["gradients"] if ".experts." in name]
    assert experts and all(alone["gradients"][name].abs().max() > 1e-4 for name in experts)
    assert_as_one(found, alone, case == "rounded")


def test_a_checkpoint_has_each_number_once(several: dict[str, list[dict[Any, Any]]]) -> None:
    assert_once([rank["saved"] for rank in several["4"]], ["2 of 4", "4"], ["plain"])


@pytest.mark.parametrize(("source", "mesh"), LOADED)
def test_a_checkpoint_goes_on_on_another_mesh(
    source: str, mesh: str, alone: dict[str, Any], several: dict[str, list[dict[Any, Any]]]
) -> None:
    of = alone if source == "1" else several["4"][0]["saved"][source]
    for rank in several["4"]:
        assert_goes_on(rank["loaded"][source, mesh], of["trained"], of["next"])


def test_a_checkpoint_of_some_experts_goes_on_on_one_rank(
    root: Path, several: dict[str, list[dict[Any, Any]]]
) -> None:
    found = loaded(engine_of(root, "by layer", {}), root / "saved-2 of 4")
    of = several["4"][0]["saved"]["2 of 4"]
    assert_goes_on(found, of["trained"], of["next"])


def test_an_export_is_that_of_all_experts(root: Path, several: dict[str, list[dict[Any, Any]]]) -> None:
    scores = scores_of([rank["saved"]["2 of 4"]["next"] for rank in several["4"]])
    close([scores[row] for row in range(ROWS)], hugging_face_logprobs(root / "exported-2 of 4"), 1e-5)


def test_weights_are_copied_between_meshes(root: Path, several: dict[str, list[dict[Any, Any]]]) -> None:
    first, second = several["4"][0]["copied"]
    close(first, second, 1e-5)


def test_a_sync_gathers_what_is_planned(
    root: Path, one_rank: None, several: dict[str, list[dict[Any, Any]]]
) -> None:
    names = [name for name, _ in engine_of(root, "whole", {}).weights()]
    for rank in several["4"]:
        assert rank["synced"]["mesh"] == "4-way shard, 2-way experts"
        assert rank["synced"]["bytes"] == rank["synced"]["planned"]
        assert rank["synced"]["names"] == names


def test_tokens_go_to_the_experts_that_are_given(
    root: Path, one_rank: None, several: dict[str, list[dict[Any, Any]]]
) -> None:
    engine, apart = engine_of(root, "by layer", {}), 0.0
    for rank in (rank["replayed"] for rank in several["4"] if len(rank["replayed"]["rows"])):
        columns = cut(batch_columns(), rank["rows"])
        choice = Ragged(rank["routing"], columns["tokens"].offsets)
        for routing, found in zip((choice, None), rank["scores"], strict=True):
            alone = engine.logprobs(columns["tokens"], columns["loss_mask"], routing=routing)
            close(found, alone.tolist(), 1e-5)
        apart += sum(
            abs(a - b) for rows in zip(*rank["scores"], strict=True) for a, b in zip(*rows, strict=True)
        )
    assert apart > 1  # the choice matters


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_whose_experts_cannot_be_divided_is_refused_by_name(kind: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings, fault = REFUSED[kind]
    with torch.device("meta"):
        config = AutoConfig.for_model(kind, **{**SHAPE, **FAMILIES[kind], **settings})
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=rf"^{kind}: .*{fault}.* set train.expert_parallel to 1"):
        check(model, 4)
    check(model, 1)


if __name__ == "__main__":
    forked(main, int(sys.argv[2]))
