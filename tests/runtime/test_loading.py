"""A sharded model read from its files, against ``from_pretrained``; what is converted, refused, warned of.

This file as a script loads every model of ``build`` on two and three ranks, and a large one on four.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import forked, launch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    LlamaConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.fsdp.load import quiet
from rlgraph.runtime.engines.model_files import ModelFiles
from rlgraph.runtime.engines.sequence.groups import row_group
from rlgraph.runtime.engines.weights import pretrained
from rlgraph.runtime.engines.weights.naming import views_of
from rlgraph.runtime.worker.process_groups import strided_mesh

RANKS = 4
SHAPE = {
    "vocab_size": 25,  # uneven on 2, 3 and 4 ranks
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": 1,
}
LARGE = {"vocab_size": 4000, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 5}
CONFIGS: dict[str, Any] = {
    "tied": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "untied": lambda: LlamaConfig(
        **SHAPE, rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}
    ),
    "in parts": lambda: LlamaConfig(**SHAPE),
    "experts": lambda: MixtralConfig(**SHAPE, num_local_experts=3),
}
IDS = torch.arange(21).reshape(3, 7)


def build(root: Path, names: Any = CONFIGS) -> None:
    """Random models, each in a folder of its own, with a tokenizer."""
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(25)}, unk_token="w0"))
    for name in names:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIGS[name]())
        with torch.no_grad():
            for parameter in model.parameters():  # norms too, so that one left out shows
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(root / name, max_shard_size="20KB" if name == "in parts" else "1GB")
        PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1").save_pretrained(root / name)


def plain(path: Path, head: str = "lm", seed: int = 0) -> Any:
    """What transformers makes of a folder."""
    torch.manual_seed(seed)
    with quiet():
        if head == "value":
            return AutoModelForTokenClassification.from_pretrained(path, num_labels=1)
        return AutoModelForCausalLM.from_pretrained(path)


def same(engine: FsdpEngine, model: Any) -> None:
    """The weights, the buffers, and what the model says, bit for bit."""
    expected = dict(model.named_parameters())
    weights = dict(engine._full())
    assert weights.keys() == expected.keys()
    assert all(tensor.equal(expected[name]) for name, tensor in weights.items())
    buffers = dict(model.named_buffers())
    assert all(buffer.equal(buffers[name]) for name, buffer in engine.model.named_buffers())
    assert [name for name, _ in engine.model.named_buffers()] == list(buffers)
    for shard in engine.shards:
        shard.unshard()  # a head of its own is gathered where its scores are computed, not by its forward
    with torch.no_grad():
        assert engine.model(input_ids=IDS).logits.equal(model(input_ids=IDS).logits)
    for shard in engine.shards:
        shard.reshard()


def peak_of_loading(path: str, **where: Any) -> float:
    """How much resident memory loading takes at its peak, as a multiple of the weights."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = memory("VmRSS")
    engine = FsdpEngine.of(path, frozen=True, **where)
    whole = sum(engine.layer_parts.times(name) * p.numel() for name, p in engine.model.named_parameters())
    return (memory("VmHWM") - before) / (4 * whole)


def memory(what: str) -> int:
    """Bytes, as the kernel counts them for this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(what)).split()[1])


def loads(path: Path, **options: Any) -> FsdpEngine:
    return FsdpEngine.of(str(path), frozen=True, **options)


def main(rank: int, root: Path) -> None:
    mesh = DeviceMesh("cpu", list(range(RANKS)))
    loads(root / "tied", mesh=mesh)  # so that all is imported
    divided = {"group": mesh.get_group(), "tensor": row_group(mesh.get_group(), 2, "tensor_parallel")}
    meshes: dict[str, dict[str, Any]] = {
        "rows": {"mesh": mesh},
        "parts": {"mesh": strided_mesh(mesh, 2)} | divided,
    }
    for name, where in meshes.items():
        (root / f"peak-{name}-{rank}").write_text(str(peak_of_loading(str(root / "large"), **where)))
    for ranks in 2, 3:
        mesh = DeviceMesh("cpu", list(range(ranks)))
        for name in CONFIGS if rank < ranks else ():
            same(loads(root / name, mesh=mesh, reshard=ranks == 3), plain(root / name))
        for name in ("tied", "untied") if rank < ranks else ():
            critic = loads(root / name, head="value", seed=5, mesh=mesh)
            same(critic, plain(root / name, "value", 5))
            critic.export(str(root / f"{name} critic {ranks}"))  # its head is one row, which one rank has
            again = loads(root / f"{name} critic {ranks}", head="value", seed=6, mesh=mesh)
            same(again, plain(root / name, "value", 5))
    dist.barrier()
    (root / f"passed-{rank}").touch()


@pytest.fixture(scope="module")
def root(one_rank: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("loading")
    build(root)
    return root


@pytest.fixture(scope="module")
def launched(root: Path) -> Path:
    AutoModelForCausalLM.from_config(Qwen2Config(**{**SHAPE, **LARGE})).save_pretrained(root / "large")
    launch(__file__, root)
    return root


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("name", CONFIGS)
def test_one_rank_loads_what_transformers_does(root: Path, name: str, head: str) -> None:
    same(loads(root / name, head=head, seed=5), plain(root / name, head, 5))


def test_several_ranks_load_what_transformers_does(launched: Path) -> None:
    assert len(list(launched.glob("passed-*"))) == RANKS


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="peaks are read from /proc")
@pytest.mark.parametrize("share", ["rows", "parts"])
def test_no_rank_holds_a_full_copy(launched: Path, share: str) -> None:
    peaks = [float((launched / f"peak-{share}-{rank}").read_text()) for rank in range(RANKS)]
    # a quarter in memory, of parts of layers half of the embeddings; of the files never more than one weight
    assert max(peaks) < 0.5, peaks


def reads_rows(path: Path) -> bool:
    """Whether ranks read their rows alone."""
    model = pretrained.shape_of(ModelFiles(str(path)), AutoModelForCausalLM, {}, torch.float32)
    files = pretrained.weights_of(str(path))
    return pretrained.reads_by_rows(model, views_of(model, files), files, ())


def changed(source: Path, target: Path, change: Any) -> Path:
    """A copy of a folder whose weights went through ``change``."""
    shutil.copytree(source, target)
    weights = load_file(target / "model.safetensors")
    change(weights)
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    return target


def test_what_transformers_converts_it_loads(root: Path, tmp_path: Path) -> None:
    assert all(reads_rows(root / name) for name in CONFIGS)

    def rename(weights: dict[str, torch.Tensor]) -> None:
        weights |= {name.removeprefix("model."): weights.pop(name) for name in list(weights)}

    def copy(weights: dict[str, torch.Tensor]) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()

    for name, change in ("renamed", rename), ("twice", copy):
        odd = changed(root / "tied", tmp_path / name, change)
        assert not reads_rows(odd)
        same(loads(odd), plain(root / "tied"))
    shutil.copytree(root / "untied", tmp_path / "pickled")
    weights = load_file(tmp_path / "pickled/model.safetensors")
    torch.save(weights, tmp_path / "pickled/pytorch_model.bin")
    (tmp_path / "pickled/model.safetensors").unlink()
    assert not reads_rows(tmp_path / "pickled")
    same(loads(tmp_path / "pickled"), plain(root / "untied"))


def test_bfloat16_is_rounded_as_transformers_does(root: Path) -> None:
    weights = dict(loads(root / "tied", dtype="bfloat16").weights())
    expected = AutoModelForCausalLM.from_pretrained(root / "tied", dtype=torch.bfloat16)
    assert all(weights[name].equal(parameter) for name, parameter in expected.named_parameters())


def test_weights_in_bfloat16_train_in_float32(root: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(root / "untied", dtype=torch.bfloat16)
    with quiet():
        model.save_pretrained(tmp_path)
    same(FsdpEngine.of(str(tmp_path), optimizer={"lr": 1e-3}), model.float())


def test_a_wrong_shape_is_refused_by_name(root: Path, tmp_path: Path) -> None:
    def cut(weights: dict[str, torch.Tensor]) -> None:
        weights["model.norm.weight"] = weights["model.norm.weight"][:31].clone()

    short = changed(root / "untied", tmp_path / "short", cut)
    with pytest.raises(ValueError, match=r"short: model.norm.weight is \[31\], the model's is \[32\]"):
        loads(short)


def test_weights_that_lack_are_refused_by_name(root: Path, tmp_path: Path) -> None:
    lacking = changed(root / "untied", tmp_path / "lacking", lambda weights: weights.pop("model.norm.weight"))
    with pytest.raises(ValueError, match=r"lacking holds no weights for model\.norm\.weight \(head: lm\)"):
        loads(lacking)
    with pytest.raises(ValueError, match=r"lacking holds no weights for model\.norm\.weight \(head: value\)"):
        loads(lacking, head="value")


@pytest.mark.parametrize("head", ["lm", "value"])
def test_weights_without_a_place_are_named(root: Path, tmp_path: Path, head: str) -> None:
    def add(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.2.extra"] = torch.ones(3)

    more = changed(root / "untied", tmp_path / "more", add)
    with pytest.warns(UserWarning, match=r"the model has no place for model\.layers\.2\.extra; left out"):
        engine = loads(more, head=head)
    same(engine, plain(root / "untied", head))


def test_an_export_keeps_the_configs(root: Path, tmp_path: Path) -> None:
    sampling = {"temperature": 0.7, "do_sample": True, "eos_token_id": [1, 3], "max_length": 50}
    shutil.copytree(root / "tied", tmp_path / "source")
    (tmp_path / "source/generation_config.json").write_text(json.dumps(sampling))
    loads(tmp_path / "source").export(str(tmp_path / "ours"))
    with quiet():
        plain(tmp_path / "source").save_pretrained(tmp_path / "theirs")
    ours, theirs = (json.loads((tmp_path / who / "config.json").read_text()) for who in ("ours", "theirs"))
    assert {**ours, "transformers_version": ""} == {**theirs, "transformers_version": ""}
    assert json.loads((tmp_path / "ours/generation_config.json").read_text()) == sampling


def test_the_first_rank_of_a_pool_exports_whatever_its_rank_of_all(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = loads(root / "tied")
    monkeypatch.setattr("transformers.distributed.mixin._get_torch_distributed_rank", lambda: 1)
    engine.export(str(tmp_path / "ours"))
    exported = load_file(tmp_path / "ours/model.safetensors")
    assert exported.keys() == load_file(root / "tied/model.safetensors").keys()
    assert (tmp_path / "ours/config.json").is_file()


def test_an_export_is_of_the_data_type_of_what_was_loaded(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "tied", tmp_path / "source")
    with quiet():
        plain(root / "tied").bfloat16().save_pretrained(tmp_path / "source")
    engine = loads(tmp_path / "source")
    assert {p.dtype for p in engine.model.parameters()} == {torch.float32}
    engine.export(str(tmp_path / "ours"))
    ours, theirs = (load_file(tmp_path / f"{name}/model.safetensors") for name in ("ours", "source"))
    assert ours.keys() == theirs.keys()
    assert all(tensor.dtype == torch.bfloat16 and tensor.equal(theirs[name]) for name, tensor in ours.items())
    assert json.loads((tmp_path / "ours/config.json").read_text())["dtype"] == "bfloat16"


if __name__ == "__main__":
    forked(main, RANKS)
