"""Adapters of a mixture's experts: against peft's own, on one rank and two, merged, and counted.

This file as a script trains them on two ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build, expected, objective, plain, scored
from ranks import forked, launch

from rlgraph.costs.lora_size import adapter_sizes, adapters_on_device
from rlgraph.costs.model_size import size_of
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Totals
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.syntax.model_settings import Lora

FAMILIES = ["qwen3_moe", "mixtral", "glm4_moe", "gpt_oss", "deepseek_v3", "qwen3_next"]
TRANSPOSED, STACKED = "gpt_oss", "qwen3_moe"  # of experts' weights: [inputs, outputs], or the other way
ADAM = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1, "max_grad_norm": 1e9}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
LORA = {"rank": 8, "alpha": 12.0, "targets": ["o_proj", *EXPERTS]}
NEAR: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
CASES: dict[str, dict[str, Any]] = {
    "together": {},
    "by layer": {"reshard": True, "recompute": True},
    "bfloat16": {"reshard": True, "dtype": "bfloat16"},
}


def engine_of(path: Path, targets: list[str] | None = None, **how: Any) -> FsdpEngine:
    return FsdpEngine.of(
        str(path), optimizer=ADAM, lora={**LORA, "targets": targets or LORA["targets"]}, **how
    )


def update(engine: FsdpEngine, epochs: int = 2, **more: Ragged) -> dict[str, float]:
    rows = torch.arange(3)[engine.group.rank() :: engine.group.size()]
    columns = {name: column.take(rows) for name, column in (scored() | more).items()}
    return engine.update(columns, objective, rows, 3, epochs=epochs)


def measure(root: Path, family: str, case: str) -> dict[str, Any]:
    engine = engine_of(root / family, **CASES[case])
    found: dict[str, Any] = {"metrics": update(engine), "adapter": dict(engine.adapter())}
    found["weights"] = {name: tensor.clone() for name, tensor in engine.weights()}
    engine.save(str(root / f"{family}-{case}-{engine.group.size()}"))
    found["next"] = update(engine)
    return found


def main(rank: int, root: Path) -> None:
    both = (TRANSPOSED, STACKED)
    torch.save({(f, case): measure(root, f, case) for f in both for case in CASES}, root / f"rank-{rank}.pt")


@pytest.fixture(scope="module")
def root(one_rank: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("experts")
    for family in FAMILIES:
        build(root, family)
    launch(__file__, root)
    return root


@contextmanager
def by_peft() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by an older name
        yield


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_are_those_of_a_plain_peft_model(root: Path, tmp_path: Path, family: str) -> None:
    from peft import PeftModel

    engine = engine_of(root / family, recompute=True)
    engine.export(str(tmp_path))
    with by_peft():
        model = PeftModel.from_pretrained(plain(root / family), tmp_path / "adapter", is_trainable=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == sum(p.numel() for p in engine.parameters)
    optimizer = torch.optim.AdamW(trained, lr=1e-2, eps=1e-3, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (-expected(model).sum() / scored()["loss_mask"].values.sum()).backward()
        optimizer.step()
    update(engine, epochs=3)
    theirs = {name.replace(".default.", "."): p for name, p in model.named_parameters() if p.requires_grad}
    assert any(".experts.base_layer.lora_B" in name for name in theirs)
    torch.testing.assert_close(dict(engine.adapter()), dict(theirs), **NEAR)
    engine.export(str(tmp_path / "trained"))
    whole = plain(tmp_path / "trained")
    torch.testing.assert_close(
        dict(whole.named_parameters()), dict(model.merge_and_unload().named_parameters()), **NEAR
    )
    with torch.no_grad():
        torch.testing.assert_close(expected(whole), engine.logprobs(**scored()).values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("targets", [*([name] for name in EXPERTS), EXPERTS])
@pytest.mark.parametrize("family", [TRANSPOSED, STACKED])
def test_only_what_is_named_is_adapted(root: Path, family: str, targets: list[str]) -> None:
    engine, base = engine_of(root / family, targets), FsdpEngine.of(str(root / family), frozen=True)
    before, plain_scores = dict(base.weights()), base.logprobs(**scored()).values
    torch.testing.assert_close(engine.logprobs(**scored()).values, plain_scores, **NEAR)
    update(engine)
    names = [name.removeprefix("experts.").removesuffix("_proj") for name in targets]
    stored = {"gate_up": ("gate_proj", "up_proj", "gate_up_proj"), "down": ("down_proj",)}
    wanted = tuple(f"{last}{end}" for n in names for last in stored[n] for end in ("", ".weight"))
    moved = {name for name, tensor in engine.weights() if not tensor.equal(before[name])}
    assert moved == {name for name in before if ".experts." in name and name.endswith(wanted)}
    beside = FsdpEngine.of(str(root / family), frozen=True, base=engine)
    torch.testing.assert_close(beside.logprobs(**scored()).values, plain_scores, **NEAR)
    assert (engine.logprobs(**scored()).values - plain_scores).abs().max() > 1e-3


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", [TRANSPOSED, STACKED])
def test_two_ranks_do_what_one_does(root: Path, family: str, case: str) -> None:
    one, two = measure(root, family, case), [torch.load(root / f"rank-{r}.pt")[family, case] for r in (0, 1)]
    near = NEAR if case != "bfloat16" else {"rtol": 0.1, "atol": 0.05}
    torch.testing.assert_close(two[0], two[1], rtol=0, atol=0)
    torch.testing.assert_close(two[0], one, **near)
    for ranks, wanted in ((1, one), (2, two[0])):
        again = engine_of(root / family, **CASES[case])
        again.load(str(root / f"{family}-{case}-{ranks}"))
        torch.testing.assert_close(dict(again.adapter()), wanted["adapter"], rtol=0, atol=0)
        torch.testing.assert_close(update(again), wanted["next"], **near)


def test_rows_are_packed_and_routed_as_they_were(root: Path) -> None:
    packed, beside = (engine_of(root / STACKED, packing=packing) for packing in (True, False))
    packed.budget = replace(packed.budget, share=0.0)  # attention is free, so that packing always pays
    choices = [[[[t % 3, (t + 1) % 3]] * 2 for t in range(length)] for length in (5, 3, 9)]
    routing = Ragged.of(choices, torch.int16)
    for engine in packed, beside:
        update(engine, routing=routing)
    torch.testing.assert_close(dict(packed.adapter()), dict(beside.adapter()), **NEAR)
    free = engine_of(root / STACKED)
    update(free)
    name = "base_model.model.model.layers.1.mlp.experts.lora_B.weight"
    assert (dict(free.adapter())[name] - dict(packed.adapter())[name]).abs().max() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_counted_is_what_there_is(root: Path, family: str) -> None:
    lora, size = Lora.model_validate(LORA), size_of(str(root / family))
    engine = engine_of(root / family)
    assert adapter_sizes(size, lora) == [tensor.numel() for _, tensor in engine.adapter()]
    assert adapters_on_device(size, lora, 1) == sum(p.numel() for p in engine.parameters)


def test_a_value_head_beside_adapted_experts(root: Path) -> None:
    critic = engine_of(root / STACKED, head="value", seed=3)
    before = critic.values(**scored()).values

    def squares(batch: dict[str, Any], totals: Totals) -> tuple[torch.Tensor, dict[str, Any]]:
        return (batch["new_values"].values - 1).square().sum() / totals.tokens, {}

    losses = [critic.update(scored(), squares, torch.arange(3), 3)["loss"] for _ in range(5)]
    assert losses[-1] < 0.9 * losses[0]
    assert not critic.values(**scored()).values.equal(before)


def test_a_dense_model_has_no_experts(root: Path, tmp_path: Path) -> None:
    law = "no decoder layer has a linear experts[.]down_proj; there are down_proj,"
    with pytest.raises(ValueError, match=law):
        engine_of(build(tmp_path, "qwen3"), ["experts.down_proj"])


if __name__ == "__main__":
    forked(main, 2)
