"""Ranks that each have a part of every layer (``train.tensor_parallel``) against one rank with whole layers.

A launch of two ranks and one of four (this file as a script) run every case.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast, get_args
from unittest.mock import patch

import pytest
import test_meshes
import test_planned_sync
import torch
import torch.distributed as dist
from ranks import at_night, cases_asked, forked, launch
from test_fsdp import ADAM, ROWS, SHAPE, VOCAB, close, hugging_face_logprobs, write_models
from test_meshes import assert_as_one, assert_goes_on, assert_once, copied, loaded, scores_of, trained
from test_sequence import measured
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlgraph.costs import limits
from rlgraph.costs.models.fields import UNDIVIDED, Family
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.fsdp.load import load_sharded
from rlgraph.runtime.engines.fsdp.options import TrainOptions
from rlgraph.runtime.engines.fsdp.ranks import ModelRanks
from rlgraph.runtime.engines.fsdp.tensor import check
from rlgraph.runtime.engines.model_files import ModelFiles
from rlgraph.runtime.engines.sequence.groups import RowGroup, row_group
from rlgraph.runtime.worker import process_groups
from rlgraph.runtime.worker.process_groups import strided_mesh

pytestmark = pytest.mark.slow

TENSOR = ["models.policy.train.tensor_parallel=2", "models.policy.train.dtype=float32"]
GEMMA = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
ON_HOST = {"optimizer_offload": True, "activation_offload": True}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3_text", GEMMA),
    "phi": ("phi", {}),
    "cohere2": ("cohere2", {"sliding_window": 8}),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "packed": ("qwen3", {"reshard": True}),
    "beside": ("qwen3", {"packing": False, "micro_tokens": 30, "recompute": True, "reshard": True}),
    "biases": ("biased", {"reshard": True, "recompute": True, "micro_tokens": 40}),
    "tied": ("qwen", {}),
    "norms behind": ("gemma3", {"reshard": True, "recompute": True}),
    "no gate": ("phi", {}),
    "side by side": ("cohere2", {"recompute": True}),
    "critic": ("biased", {"head": "value", "seed": 7}),
    "not safetensors": ("pickled", {"reshard": True}),
    "rounded": ("qwen3", {"dtype": "bfloat16", "reshard": True, "recompute": True}),
    "on the host": ("gemma3", {"reshard": True, "recompute": True, **ON_HOST}),
}
DAY = ("llama", "biases", "norms behind", "critic")
# the mesh that saves and the one that goes on
LOADED = [("2x2", "4"), ("4", "2x2"), ("1", "2x2"), ("2x2", "2x2"), ("host", "4"), ("2x2", "host")]


def write_families(root: Path) -> None:
    """Random models of two layers with four query heads and two key heads, whose biases are not zero."""
    from transformers import AutoConfig, AutoModelForCausalLM

    write_models(root)
    for name, (kind, more) in FAMILIES.items():
        config = AutoConfig.for_model(kind, **{**SHAPE, "head_dim": 8, "pad_token_id": 0, **more})
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data.add_(0.2 * torch.randn(parameter.shape))
        model.save_pretrained(root / name)
    model = AutoModelForCausalLM.from_pretrained(root / "qwen3")
    model.config.save_pretrained(root / "pickled")
    torch.save(model.state_dict(), root / "pickled" / "pytorch_model.bin")


def engine_of(root: Path, case: str, where: dict[str, Any], **options: Any) -> FsdpEngine:
    model, own = CASES[case]
    settings: dict[str, Any] = {"optimizer": ADAM, "micro_tokens": 100, **own, **where, **options}
    return FsdpEngine.of(str(root / model), **settings)


def saved(root: Path, name: str, where: dict[str, Any]) -> dict[str, Any]:
    """What is trained, saved, exported, and goes on."""
    engine = engine_of(root, "tied", where)
    return {"trained": trained(engine), **test_meshes.saved(engine, root, name)}


def synced(root: Path, whole: DeviceMesh) -> dict[str, Any]:
    """What a sync gathers on the meshes that a worker makes of a plan."""
    limits.BUCKET = test_planned_sync.SMALL
    plan, _ = test_planned_sync.planned(
        root, "rounded", f"models.policy.path={root / 'qwen'}", *TENSOR, devices=4
    )
    meshes = process_groups._meshes(plan, "main", whole)
    where = {"mesh": meshes["policy"], "group": whole.get_group(), "tensor": pairs(whole)}
    engine = FsdpEngine.of(str(root / "qwen"), optimizer={"lr": 1e-2}, **where)
    weights, nbytes, _ = test_planned_sync.received(engine.weights("bfloat16"))
    shapes = {name: (list(weight.shape), weight.dtype) for name, weight in weights.items()}
    return {"meshes": {n: m.mesh.tolist() for n, m in meshes.items()}, "shapes": shapes, "bytes": nbytes}


def pairs(whole: DeviceMesh) -> RowGroup:
    return row_group(whole.get_group(), 2, "tensor_parallel")


def main(rank: int, root: Path, ranks: str, *cases: str) -> None:
    limits.LOGITS = 5 * VOCAB  # the head on five tokens at a time
    whole = init_device_mesh("cpu", (int(ranks),))
    where = {"mesh": strided_mesh(whole, 2), "group": whole.get_group(), "tensor": pairs(whole)}
    found: dict[Any, Any] = {case: measured(engine_of(root, case, where)) for case in cases}
    if ranks == "4":
        meshes = {"2x2": where, "4": {"mesh": whole}, "host": {**where, "optimizer_offload": True}}
        found["saved"] = {name: saved(root, name, place) for name, place in meshes.items()}
        dist.barrier()
        found["loaded"] = {
            (source, name): loaded(engine_of(root, "tied", meshes[name]), root / f"saved-{source}")
            for source, name in LOADED
        }
        frozen = {"frozen": True, "optimizer": None}
        found["copied"] = [
            copied(engine_of(root, "tied", meshes[one], **frozen), engine_of(root, "tied", meshes[other]))
            for one, other in (("2x2", "4"), ("4", "2x2"))
        ]
        found["sync"] = synced(root, whole)
    torch.save(found, root / f"rank-{ranks}-{rank}.pt")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tensor")
    write_families(root)
    return root


@pytest.fixture(scope="module")
def alone(root: Path, one_rank: None) -> dict[str, Any]:
    return saved(root, "1", {})


@pytest.fixture(scope="module")
def several(
    root: Path, alone: dict[str, Any], request: pytest.FixtureRequest
) -> dict[str, list[dict[str, Any]]]:
    """Number of ranks -> what each found."""
    found = {}
    for ranks in ("2", "4"):
        (root / "store").unlink(missing_ok=True)
        launch(__file__, root, ranks, *cases_asked(request))
        found[ranks] = [torch.load(root / f"rank-{ranks}-{rank}.pt") for rank in range(int(ranks))]
    return found


@pytest.mark.parametrize("ranks", ["2", "4"])
@pytest.mark.parametrize("case", at_night([(case,) for case in CASES], DAY))
def test_ranks_that_divide_layers_do_what_one_does(
    root: Path, several: dict[str, list[dict[str, Any]]], case: str, ranks: str
) -> None:
    one, found = measured(engine_of(root, case, {})), [rank[case] for rank in several[ranks]]
    assert any(gradient.abs().max() > 1e-2 for gradient in one["gradients"].values())
    assert_as_one(found, one, case == "rounded")


def test_a_checkpoint_has_each_number_once(several: dict[str, list[dict[str, Any]]]) -> None:
    assert_once([rank["saved"] for rank in several["4"]], ["2x2"], ["4", "host"])


@pytest.mark.parametrize(("source", "mesh"), LOADED)
def test_a_checkpoint_goes_on_on_another_mesh(
    source: str, mesh: str, alone: dict[str, Any], several: dict[str, list[dict[str, Any]]]
) -> None:
    of = alone if source == "1" else several["4"][0]["saved"][source]
    for rank in several["4"]:
        assert_goes_on(rank["loaded"][source, mesh], of["trained"], of["next"])


def test_a_checkpoint_of_parts_goes_on_on_one_rank(
    root: Path, several: dict[str, list[dict[str, Any]]]
) -> None:
    found = loaded(engine_of(root, "tied", {}), root / "saved-2x2")
    of = several["4"][0]["saved"]["2x2"]
    assert_goes_on(found, of["trained"], of["next"])


def test_an_export_is_that_of_whole_layers(root: Path, several: dict[str, list[dict[str, Any]]]) -> None:
    scores = scores_of([rank["saved"]["2x2"]["next"] for rank in several["4"]])
    close([scores[row] for row in range(ROWS)], hugging_face_logprobs(root / "exported-2x2"), 1e-5)
    configs = [(root / name / "config.json").read_text() for name in ("exported-2x2", "exported-1")]
    assert configs[0] == configs[1]


def test_weights_are_copied_between_meshes(
    root: Path, alone: dict[str, Any], several: dict[str, list[dict[str, Any]]]
) -> None:
    start = dict(FsdpEngine.of(str(root / "qwen"), frozen=True).weights())
    expected = {name: torch.lerp(start[name], alone["trained"]["weights"][name], 0.25) for name in start}
    for rank in several["4"]:
        for found in rank["copied"]:
            close(found, expected, 1e-4)


@pytest.fixture
def small_buckets() -> Iterator[None]:
    with patch.object(limits, "BUCKET", test_planned_sync.SMALL):
        yield


def test_a_sync_gathers_what_is_planned(
    root: Path, several: dict[str, list[dict[str, Any]]], small_buckets: None
) -> None:
    path = f"models.policy.path={root / 'qwen'}"
    _, step = test_planned_sync.planned(root, "rounded", path, *TENSOR, devices=4)
    names = [name for name, _ in FsdpEngine.of(str(root / "qwen"), frozen=True).weights()]
    for number, rank in enumerate(several["4"]):
        assert rank["sync"]["meshes"] == {"policy": [number % 2, number % 2 + 2], "ref": [0, 1, 2, 3]}
        assert rank["sync"]["bytes"] == step.bytes
        assert list(rank["sync"]["shapes"]) == names
        assert {dtype for _, dtype in rank["sync"]["shapes"].values()} == {torch.bfloat16}
        assert rank["sync"]["shapes"]["model.layers.1.mlp.down_proj.weight"][0] == [32, 48]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "olmo2": ({}, "its plan asks for colwise_gather_output, rowwise_split_input"),
    "phi3": ({"pad_token_id": 0}, "its plan asks for colwise_gather_output"),
    "mixtral": ({"num_local_experts": 2}, "its plan asks for"),
    "stablelm": ({}, "no tensor-parallel plan"),
    "llama": ({"hidden_size": 48, "num_attention_heads": 6}, "its 6 query heads"),
    "qwen3": ({"num_key_value_heads": 2}, "its 2 key heads"),
    "qwen2": ({"num_key_value_heads": 4, "intermediate_size": 50}, "50 columns"),
    "mistral": ({"quantization_config": {"quant_method": "fp8"}}, "its weights are quantised"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_whose_layers_cannot_be_divided_is_refused_by_name(kind: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings, fault = REFUSED[kind]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SHAPE, **settings}))
    with pytest.raises(ValueError, match=rf"^{kind}: .*{fault}.* set train.tensor_parallel to 1"):
        check(model, 4)
    check(model, 1)


def test_the_compiler_refuses_the_families_that_a_worker_would() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    tried = set[str]()
    for kind in get_args(Family):
        config = AutoConfig.for_model(kind, **{**SHAPE, "num_key_value_heads": 8, "pad_token_id": 0})
        if any(hasattr(config, name) for name in ("num_local_experts", "num_experts", "n_routed_experts")):
            continue  # all mixtures are refused
        tried.add(kind)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        with pytest.raises(ValueError, match=kind) if kind in UNDIVIDED else nullcontext():
            check(model, 4)
    assert {*UNDIVIDED} < tried


def test_it_is_refused_before_weights_are_read(root: Path, one_rank: None, tmp_path: Path) -> None:
    config = json.loads((root / "qwen3" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 1}))
    mesh, two = init_device_mesh("cpu", (1,)), RowGroup(cast(Any, "a group"), 0, 2)
    ranks = ModelRanks(mesh, mesh.get_group(), tensor=two)
    with pytest.raises(ValueError, match="its 1 key heads"):
        load_sharded(ModelFiles(str(tmp_path)), TrainOptions(), ranks)  # a folder without weights


if __name__ == "__main__":
    forked(main, int(sys.argv[2]))
