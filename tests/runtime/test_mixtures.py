"""Mixtures of experts on one rank and two, of which each reads the experts that it owns.

This file as a script trains a Qwen3-MoE and a Mixtral with three experts on two ranks.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors
import torch
from families import build, expected, objective, plain, scored
from ranks import forked, launch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Request, Sampling
from rlgraph.runtime.engines.decoder_layers import decoder_layers
from rlgraph.runtime.engines.fsdp import shards
from rlgraph.runtime.engines.fsdp.batching import micro_batches
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.fsdp.load import quiet
from rlgraph.runtime.engines.fsdp.packing import attention_share
from rlgraph.runtime.engines.transformers.engine import TransformersEngine
from rlgraph.runtime.engines.weights.lora import adapted

CPU = torch.device("cpu")
FAMILIES = ["qwen3_moe", "mixtral"]
ADAM = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
LORA = {"rank": 3, "alpha": 6.0, "targets": "all-linear"}
GROUP = Ragged.of([[5, 6, 7, 8, 9, 10, 11, 12, n, n + 1, n + 2] for n in range(13, 19)])
CASES: dict[str, dict[str, Any]] = {
    "together": {},
    "by layer": {"reshard": True, "recompute": True},
    "adapters": {"lora": LORA},
}


class Reads:
    """``safe_open`` that counts the bytes of what is taken out of files."""

    taken = 0

    def __init__(self, *args: Any) -> None:
        self.file = SAFE_OPEN(*args)

    def __enter__(self) -> Reads:
        self.inner = self.file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.file.__exit__(*error)

    def keys(self) -> list[str]:
        return list(self.inner.keys())

    def get_slice(self, name: str) -> Slice:
        return Slice(self.inner.get_slice(name))

    def get_tensor(self, name: str) -> torch.Tensor:
        return counted(self.inner.get_tensor(name))


class Slice:
    """A slice of a file's weight; counted when rows are taken."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def get_shape(self) -> list[int]:
        return list(self.inner.get_shape())

    def __getitem__(self, rows: slice) -> torch.Tensor:
        return counted(self.inner[rows])


SAFE_OPEN: Any = safetensors.safe_open


def counted(tensor: torch.Tensor) -> torch.Tensor:
    Reads.taken += tensor.nbytes
    return tensor


def both(tokens: Ragged) -> dict[str, Ragged]:
    """Rows of which all but the first eight tokens count."""
    mask = [[t >= 8 for t in range(length)] for length in tokens.lengths.tolist()]
    return {"tokens": tokens, "loss_mask": Ragged.of(mask, torch.bool)}


def measure(root: Path, family: str, case: str) -> dict[str, Any]:
    """What an engine reads as it loads, its scores, an update, and the weights then."""
    Reads.taken = 0
    engine = FsdpEngine.of(str(root / family), optimizer=ADAM, **CASES[case])
    held = [p.to_local() for p in engine.model.parameters() if isinstance(p, DTensor)]
    found: dict[str, Any] = {"read": Reads.taken, "held": sum(tensor.nbytes for tensor in held)}
    found["experts"] = [
        len(p.to_local()) for n, p in engine.model.named_parameters() if ".experts." in n and held
    ]
    rows = torch.arange(len(GROUP))[engine.group.rank() :: engine.group.size()]
    found["scores"] = dict(
        zip(rows.tolist(), engine.logprobs(**both(GROUP.take(rows))).tolist(), strict=True)
    )
    found["metrics"] = engine.update(both(GROUP.take(rows)), objective, rows, len(GROUP), epochs=2)
    engine.save(str(root / f"{family}-{case}-{engine.group.size()}"))
    found["weights"] = {name: tensor.clone() for name, tensor in engine.weights()}
    return found


def main(rank: int, root: Path) -> None:
    safetensors.safe_open = Reads  # type: ignore[assignment, misc]
    found = {(family, case): measure(root, family, case) for family in FAMILIES for case in CASES}
    torch.save(found, root / f"rank-{rank}.pt")


@pytest.fixture(scope="module")
def root(one_rank: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mixtures")
    for family in FAMILIES:
        build(root, family)
    launch(__file__, root)
    return root


@pytest.fixture(scope="module")
def ranks(root: Path) -> list[Any]:
    return [torch.load(root / f"rank-{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_reads_its_experts_alone(ranks: list[Any], family: str) -> None:
    first, second = (rank[family, "by layer"] for rank in ranks)
    assert (set(first["experts"]), set(second["experts"])) == ({2}, {1})
    assert first["read"] == first["held"] and second["read"] == second["held"]
    assert first["held"] + second["held"] == sum(t.nbytes for t in first["weights"].values())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_do_what_one_does(root: Path, ranks: list[Any], family: str, case: str) -> None:
    one, (first, second) = measure(root, family, case), [rank[family, case] for rank in ranks]
    near: Any = {"rtol": 1e-4, "atol": 1e-5}
    scores = dict(sorted((first["scores"] | second["scores"]).items()))
    torch.testing.assert_close(scores, one["scores"], **near)
    torch.testing.assert_close(first["metrics"], one["metrics"], **near)
    torch.testing.assert_close(first["weights"], one["weights"], **near)
    torch.testing.assert_close(second["weights"], first["weights"], rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_is_one_step_of_plain_adamw(root: Path, family: str) -> None:
    engine = FsdpEngine.of(str(root / family), optimizer={**ADAM, "max_grad_norm": 1e9}, recompute=True)
    engine.update(scored(), objective, torch.arange(3), 3)
    model = plain(root / family)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)
    (-expected(model).sum() / scored()["loss_mask"].values.sum()).backward()
    optimizer.step()
    after = {name: p.detach() for name, p in model.named_parameters()}
    torch.testing.assert_close(dict(engine._full()), after, rtol=1e-4, atol=1e-5)
    moved = [name for name, tensor in after.items() if (tensor - before[name]).abs().max() > 1e-3]
    assert {name for name in after if ".experts." in name or ".gate." in name} <= {*moved}


def test_attention_is_weighed_against_the_experts_of_a_token(root: Path) -> None:
    model = plain(root / "mixtral")
    attention, router, expert = 2 * 32 * 32 + 2 * 16 * 32, 3 * 32, 3 * 32 * 64  # of a layer
    weights = attention + router + 2 * 32 + 2 * expert  # two norms, two of three experts
    assert attention_share(model, decoder_layers(model)) == pytest.approx(2 * 32 / weights)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_score_as_they_do_alone(root: Path, family: str) -> None:
    packed, beside = (FsdpEngine.of(str(root / family), optimizer=ADAM, packing=p) for p in (True, False))
    packed.budget = replace(packed.budget, share=0.0)  # attention is free, so that packing always pays
    columns, rows = both(GROUP), torch.arange(len(GROUP))
    sizes = [
        sum(batch.inputs["input_ids"].numel() for batch in micro_batches(columns, engine.budget, CPU))
        for engine in (packed, beside)
    ]
    assert sizes[0] < sizes[1]
    alone = [beside.logprobs(**both(GROUP.take(row[None]))).values for row in rows]
    for engine in packed, beside:
        found = engine.logprobs(**columns).values
        torch.testing.assert_close(found, torch.cat(alone), rtol=1e-4, atol=1e-5)
        engine.update(columns, objective, rows, len(rows))
    torch.testing.assert_close(dict(packed.weights()), dict(beside.weights()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ranks_before", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_comes_back(root: Path, ranks: list[Any], family: str, ranks_before: int) -> None:
    if ranks_before == 1:
        measure(root, family, "together")
    engine = FsdpEngine.of(str(root / family), optimizer=ADAM)
    engine.load(str(root / f"{family}-together-{ranks_before}"))
    expected = ranks[0][family, "together"]["weights"]
    torch.testing.assert_close(dict(engine.weights()), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mix", [1.0, 0.25])
def test_a_copy_takes_experts_too(root: Path, mix: float) -> None:
    engine = FsdpEngine.of(str(root / "mixtral"), optimizer=ADAM)
    frozen = FsdpEngine.of(str(root / "mixtral"), frozen=True)
    before = dict(frozen.weights())
    engine.update(scored(), objective, torch.arange(3), 3)
    frozen.copy(engine, mix)
    wanted = {name: torch.lerp(before[name], tensor, mix) for name, tensor in engine.weights()}
    torch.testing.assert_close(dict(frozen.weights()), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_attention_are_merged_on_the_way_out(root: Path, tmp_path: Path, family: str) -> None:
    from peft import PeftModel

    engine = FsdpEngine.of(str(root / family), optimizer=ADAM, lora=LORA)
    assert {name.rpartition(".")[2] for name in adapted(engine.model)} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    }
    engine.update(scored(), objective, torch.arange(3), 3)
    assert dict(engine.weights()).keys() == load_file(root / family / "model.safetensors").keys()
    engine.export(str(tmp_path))
    wanted = engine.logprobs(**scored()).values
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by an older name
        beside = PeftModel.from_pretrained(plain(root / family), tmp_path / "adapter")
    for model in plain(tmp_path), beside:
        with torch.no_grad():
            torch.testing.assert_close(expected(model), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", [*FAMILIES, "deepseek_v3"])
def test_the_embedded_engine_takes_what_is_trained(root: Path, tmp_path: Path, family: str) -> None:
    path = str(root / family if family in FAMILIES else build(tmp_path, family))
    engine, serve = FsdpEngine.of(path, optimizer=ADAM), TransformersEngine(path)
    serve.load_pretrained()
    for version in range(2):
        ((made,),) = serve.generate([Request([5, 6, 7], [1])], Sampling(8))
        tokens = Ragged.of([[5, 6, 7, *made.tokens]])
        mask = Ragged.of([[False] * 3 + [True] * len(made.tokens)], torch.bool)
        own = torch.tensor(made.logprobs)
        torch.testing.assert_close(engine.logprobs(tokens, mask).values[3:], own, rtol=1e-4, atol=1e-4)
        engine.update(scored(), objective, torch.arange(3), 3)
        serve.load_weights(engine.weights(), version + 1)


def test_values_of_a_mixture(root: Path) -> None:
    critic = FsdpEngine.of(str(root / "qwen3_moe"), head="value", optimizer=ADAM, seed=3)
    head = dict(critic.weights())["score.weight"]
    model = plain(root / "qwen3_moe").model
    with torch.no_grad():
        wanted = torch.cat(
            [model(torch.tensor([r])).last_hidden_state[0] @ head.T for r in scored()["tokens"].tolist()]
        )
    found = critic.values(**scored()).values
    places = scored()["loss_mask"].values.nonzero().squeeze(1)
    torch.testing.assert_close(found[places], wanted[places - 1, 0], rtol=1e-4, atol=1e-5)


def test_router_logits_that_a_config_asks_for_change_nothing(root: Path, tmp_path: Path) -> None:
    model = plain(root / "mixtral")
    model.config.output_router_logits = True
    with quiet():
        model.save_pretrained(tmp_path)
    asked, without = (FsdpEngine.of(str(path), frozen=True) for path in (tmp_path, root / "mixtral"))
    assert asked.logprobs(**scored()).values.equal(without.logprobs(**scored()).values)


def test_a_checkpoint_with_fused_experts_keeps_its_names(root: Path, tmp_path: Path) -> None:
    with quiet():
        plain(root / "qwen3_moe").save_pretrained(tmp_path, save_original_format=False)
    engine = FsdpEngine.of(str(tmp_path), frozen=True)
    stored = load_file(tmp_path / "model.safetensors")
    assert "model.layers.0.mlp.experts.gate_up_proj" in stored
    torch.testing.assert_close(dict(engine.weights()), stored, rtol=0, atol=0)


def test_an_expert_that_lacks_is_refused(root: Path, tmp_path: Path) -> None:
    weights = load_file(root / "mixtral/model.safetensors")
    config = (root / "mixtral/config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    del weights["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    law = r"holds no weights for model\.layers\.1\.block_sparse_moe\.experts\.2\.w3\.weight"
    with pytest.raises(ValueError, match=law):
        FsdpEngine.of(str(tmp_path), frozen=True)


def test_a_buffer_that_is_held_wide_stays_so(root: Path, tmp_path: Path) -> None:
    path = build(tmp_path, "deepseek_v3")
    engine = FsdpEngine.of(str(path), frozen=True, dtype="bfloat16")
    held = {name: buffer for name, buffer in engine.model.named_buffers() if "correction_bias" in name}
    assert held and all(buffer.dtype == torch.float32 for buffer in held.values())


def test_an_export_in_bfloat16_keeps_a_routers_correction(root: Path, tmp_path: Path) -> None:
    path = build(tmp_path, "deepseek_v3")
    stored = load_file(path / "model.safetensors")
    narrow = {n: t if n.endswith("correction_bias") else t.bfloat16() for n, t in stored.items()}
    save_file(narrow, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    FsdpEngine.of(str(path), optimizer={"lr": 1e-3}).export(str(tmp_path / "ours"))
    ours = load_file(tmp_path / "ours/model.safetensors")
    assert {n: t.dtype for n, t in ours.items()} == {n: t.dtype for n, t in narrow.items()}
    assert {t.dtype for t in ours.values()} == {torch.float32, torch.bfloat16}
    assert json.loads((tmp_path / "ours/config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("family", ["hrm_text", "bert"])
def test_a_family_that_can_not_be_trained_is_refused_by_name(root: Path, tmp_path: Path, family: str) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"^{family}: .*models of this type can't be trained"):
        FsdpEngine.of(str(tmp_path), frozen=True)


def test_an_expert_per_rank_is_gathered_without_gaps(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of the checkpoint are cut out of what is gathered by its numbers' places."""
    whole = {name: torch.randn(4, 2, size) for name, size in (("up", 3), ("down", 5))}
    mesh, group = DeviceMesh("cpu", [0]), SimpleNamespace(size=lambda: 4)
    placed = {"run_check": False, "placements": [Shard(0)]}
    first = [
        (name, DTensor.from_local(t[:1], mesh, shape=t.shape, stride=t.stride(), **placed))
        for name, t in whole.items()
    ]

    def gather(parts: list[torch.Tensor], *_: Any, **__: Any) -> None:
        for rank, part in enumerate(parts):
            part.copy_(torch.cat([tensor[rank].flatten() for tensor in whole.values()]))

    monkeypatch.setattr(torch.distributed, "all_gather", gather)
    found = dict(shards.gather_full(first, group))  # type: ignore[arg-type]
    assert all(found[name].is_contiguous() and found[name].equal(t) for name, t in whole.items())


if __name__ == "__main__":
    forked(main, 2)
