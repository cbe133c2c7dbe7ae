"""The load of a mixture's experts: its auxiliary loss against a plain one in float64, and biases that move.

This file as a script runs two ranks: with rows of their own, with experts divided, and sharing tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, build
from ranks import at_night, forked, launch
from safetensors.torch import load_file
from test_sequence import cut
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

import far
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Request, Sampling, Totals
from rlgraph.runtime.engines.balance import BIAS
from rlgraph.runtime.engines.fsdp.batching import micro_batches
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.fsdp.load import quiet
from rlgraph.runtime.engines.fsdp.shards import gather_full
from rlgraph.runtime.engines.routing import routers_of
from rlgraph.runtime.engines.sequence.groups import sequence_group
from rlgraph.runtime.engines.transformers.engine import TransformersEngine
from rlgraph.runtime.worker.process_groups import expert_group

CPU, COEF, RATE = torch.device("cpu"), 0.3, 0.125
BIASED = ["glm4_moe", "deepseek_v3"]
MIXTURES = [*BIASED, "qwen3_moe", "mixtral", "qwen2_moe", "olmoe", "gpt_oss", "qwen3_next"]
DAY = ("qwen3_moe", "glm4_moe")
ADAM = {"lr": 1e-2, "eps": 1e-3, "max_grad_norm": 1e9}
PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13]]
TOKENS = Ragged.of(
    [[*PROMPTS[row // 4], *((7 * row + 3 * t) % 29 for t in range(1 + 2 * (row % 4)))] for row in range(8)]
)
HOW: dict[str, dict[str, Any]] = {
    "packed": {},
    "again": {"recompute": True},
    "by layer, on the host": {"recompute": True, "reshard": True, "activation_offload": True},
    "beside": {"packing": False},
    "critic": {"head": "value", "seed": 7},
    "cut": {"micro_tokens": 24, "packing": False, "recompute": True},
}
# two ranks -> which of their rows are in one pass, and how they share them
WAYS = {
    "rows": [[0, 2, 4], [1, 3, 5, 6, 7]],
    "experts": [[0, 2, 4], [1, 3, 5, 6, 7]],
    "tokens": [[*range(8)]],
}
Groups = Sequence[Sequence[int]]


def columns_of(rows: Iterable[int] = range(8)) -> dict[str, Any]:
    lengths = [len(PROMPTS[row // 4]) for row in range(8)]
    mask = [[t >= lengths[row] for t in range(len(TOKENS[row]))] for row in range(8)]
    both = {"tokens": TOKENS, "loss_mask": Ragged.of(mask, torch.bool)}
    return cut(both, torch.tensor([*rows], dtype=torch.int64))


def nothing(batch: dict[str, Any], totals: Totals) -> tuple[torch.Tensor, dict[str, Any]]:
    """A loss without a gradient: what trains is the balance alone."""
    scores = batch["logprobs" if "logprobs" in batch else "new_values"]
    return 0.0 * scores.sum().sum(), {}


def likelihood(batch: dict[str, Any], totals: Totals) -> tuple[torch.Tensor, dict[str, Any]]:
    return -batch["logprobs"].values.sum() / totals.tokens, {}


def spoilt(batch: dict[str, Any], totals: Totals) -> tuple[torch.Tensor, dict[str, Any]]:
    return torch.nan * batch["logprobs"].values.sum(), {}


def plain_model(path: Path) -> Any:
    """A model in float64, whose routers note their logits and choices."""
    with quiet():
        kinds: dict[str, Any] = {"dtype": torch.float64, "experts_implementation": "eager"}
        model = AutoModelForCausalLM.from_pretrained(path, **kinds).eval()

    def note(router: Any, _: Any, routed: Any) -> None:
        router.seen.append((routed[0], routed[2]))

    for router in routers_of(model):
        router.seen = []
        router.register_forward_hook(note)
    return model


def loads(router: Any) -> torch.Tensor:
    chosen = torch.cat([chosen for _, chosen in router.seen])
    return chosen.flatten().bincount(minlength=router.num_experts)


def plain_loss(router: Any) -> torch.Tensor:
    """The auxiliary loss of a layer, over what its router has seen."""
    logits = torch.cat([logits for logits, _ in router.seen])
    if not hasattr(router, BIAS):
        return load_balancing_loss_func((logits,), router.num_experts, router.top_k)
    probabilities = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    return router.num_experts * (loads(router) / len(logits) * probabilities.mean(0)).sum()


def reference(path: Path, groups: Groups) -> dict[str, Any]:
    """The mean loss of passes of these rows, weighed by their tokens; its gradients, and all loads."""
    model, total = plain_model(path), sum(len(TOKENS[row]) - 1 for group in groups for row in group)
    routers, loss = routers_of(model), torch.zeros((), dtype=torch.float64)
    load = torch.zeros(len(routers), routers[0].num_experts, dtype=torch.int64)
    for group in groups:
        for router in routers:
            router.seen.clear()
        for row in group:
            model(torch.tensor([TOKENS[row].tolist()[:-1]]))
        weight = sum(len(TOKENS[row]) - 1 for row in group) / total
        loss = loss + weight * torch.stack([plain_loss(router).double() for router in routers]).mean()
        load += torch.stack([loads(router) for router in routers])
    loss.backward()
    gradients = {n: COEF * p.grad for n, p in model.named_parameters() if p.grad is not None}
    imbalance = float((load.double() / load.double().mean(1, keepdim=True)).max())
    biases = {
        name: bias + RATE * (row.double().mean() - row).sign()
        for (name, bias), row in zip(biases_of(model).items(), load, strict=False)
    }
    return {"loss": loss.item(), "gradients": gradients, "imbalance": imbalance, "biases": biases}


def biases_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: bias.clone() for name, bias in model.named_buffers() if name.endswith(BIAS)}


def balanced(path: Path, **options: Any) -> FsdpEngine:
    own: dict[str, Any] = {"optimizer": ADAM, "router_aux_loss_coef": COEF, **options}
    return FsdpEngine.of(str(path), **own)


def gradients_of(engine: FsdpEngine) -> dict[str, torch.Tensor]:
    """Whole gradients, as they are kept aside by ``watched``."""
    own = [(name, p.grad) for name, p in engine.model.named_parameters() if p.grad is not None]
    return {n: g.clone() for n, g in gather_full(own, engine.copy_group, layer_parts=engine.layer_parts)}


def measured(engine: FsdpEngine, rows: Sequence[int], **more: Any) -> dict[str, Any]:
    """Gradients, metrics and biases of a step whose loss is the balance alone."""
    found: dict[str, Any] = {}
    step = engine._step

    def watched(sums: Any) -> None:
        found["gradients"] = gradients_of(engine)
        step(sums)

    engine._step = watched  # type: ignore[method-assign]
    found["metrics"] = engine.update({**columns_of(rows), **more}, nothing, torch.tensor([*rows]), 8)
    return {**found, "biases": biases_of(engine.model)}


def agrees(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["metrics"]["router_aux_loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    assert found["metrics"]["router_imbalance"] == pytest.approx(wanted["imbalance"])
    assert any(g.abs().max() > 1e-4 for n, g in wanted["gradients"].items() if "experts" not in n)
    for name, gradient in wanted["gradients"].items():
        torch.testing.assert_close(found["gradients"][name].double(), gradient.double(), rtol=1e-3, atol=2e-6)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("balance")
    for family in ("qwen3_moe", *BIASED):
        key = "num_experts" if family == "qwen3_moe" else "n_routed_experts"
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(FAMILIES, family, {**FAMILIES[family], key: 4})
            build(root, family)
    return root


@pytest.mark.parametrize(
    ("family", "how"),
    at_night(
        [*((f, "again") for f in MIXTURES), *(("qwen3_moe", how) for how in HOW if how != "again")], DAY
    ),
)
def test_gradients_are_those_of_a_plain_loss(one_rank: None, root: Path, family: str, how: str) -> None:
    path = root / family if (root / family).exists() else build(root, family)
    engine = balanced(path, **HOW[how])
    batches = micro_batches(columns_of(), engine.budget, CPU)
    groups = [[TOKENS.tolist().index(row) for row in batch.columns["tokens"].tolist()] for batch in batches]
    assert (len(groups) > 1) == (how == "cut")
    agrees(measured(engine, range(8)), reference(path, groups))


def test_a_prompt_that_rows_share_counts_for_each(one_rank: None, root: Path) -> None:
    engine = balanced(root / "qwen3_moe")
    engine.budget = replace(engine.budget, share=0.0)  # attention is free, so that packing always pays
    (batch,) = micro_batches(columns_of(), engine.budget, CPU)
    assert batch.counted is not None and batch.counted.max() == 4
    assert batch.read == batch.counted.sum() == len(TOKENS.values) - len(TOKENS)
    assert batch.inputs["input_ids"].numel() < batch.read
    agrees(measured(engine, range(8)), reference(root / "qwen3_moe", [range(8)]))


def test_recorded_choices_are_the_load(one_rank: None, root: Path) -> None:
    given = torch.tensor([0, 1]).expand(len(TOKENS.values), 2, 2).to(torch.int16)
    found = measured(balanced(root / "qwen3_moe"), range(8), routing=TOKENS.like(given))
    assert found["metrics"]["router_imbalance"] == 2.0  # two of four experts have all


def test_it_is_added_to_the_objective(one_rank: None, root: Path) -> None:
    rows = torch.arange(8)

    def gradients(objective: Any, coef: float) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        engine = balanced(root / "qwen3_moe", router_aux_loss_coef=coef)
        engine._step = lambda sums: None  # type: ignore[method-assign]
        metrics = engine.update(columns_of(), objective, rows, 8)
        return gradients_of(engine), metrics

    (both, told), (alone, without) = gradients(likelihood, COEF), gradients(likelihood, 0.0)
    balance, _ = gradients(nothing, COEF)
    torch.testing.assert_close(both, {n: g + balance[n] for n, g in alone.items()}, rtol=1e-4, atol=1e-6)
    assert told["router_aux_loss"] > 0 and "router_aux_loss" not in without


@pytest.mark.parametrize("family", BIASED)
def test_a_bias_moves_towards_the_mean_load(one_rank: None, root: Path, tmp_path: Path, family: str) -> None:
    path, wanted = root / family, reference(root / family, [range(8)])["biases"]
    options: dict[str, Any] = {"router_aux_loss_coef": 0.0, "router_bias_update_rate": RATE}
    engine = balanced(path, micro_tokens=24, **options)
    before = biases_of(engine.model)
    metrics = engine.update(columns_of(), spoilt, torch.arange(8), 8)
    assert metrics["skipped"] == 1 and not torch.equal(*map(stacked, (before, wanted)))
    torch.testing.assert_close(biases_of(engine.model), before, rtol=0, atol=0)

    found = measured(engine, range(8))
    torch.testing.assert_close(found["biases"], wanted, rtol=0, atol=1e-6, check_dtype=False)

    engine.save(str(tmp_path / "saved"))
    resumed, frozen = balanced(path, **options), FsdpEngine.of(str(path), frozen=True)
    resumed.load(str(tmp_path / "saved"))
    frozen.copy(engine)
    frozen.save(str(tmp_path / "copied"))
    again = FsdpEngine.of(str(path), frozen=True)
    again.load(str(tmp_path / "copied"))
    served = TransformersEngine(str(path))
    served.load_pretrained()
    served.load_weights(engine.weights("bfloat16"), 1)
    engine.export(str(tmp_path / "exported"))
    exported = load_file(tmp_path / "exported/model.safetensors")
    for held in (biases_of(resumed.model), biases_of(again.model), served.weights, exported):
        for name, bias in found["biases"].items():
            assert held[name].dtype == torch.float32 and held[name].equal(bias)
    ((made,),) = served.generate([Request([5, 6, 7], [1])], Sampling(6, routing=True))
    assert made.routing.shape[1] == len(wanted)


def stacked(biases: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.stack([bias.double() for bias in biases.values()])


def test_another_device_has_the_numbers_of_the_cpu(one_rank: None, root: Path) -> None:
    found = []
    for device in (far.DEVICE, far.CPU):
        with far.device():
            engine = balanced(root / "glm4_moe", device=str(device), router_bias_update_rate=RATE)
            metrics = engine.update(columns_of(), nothing, torch.arange(8), 8)
            biases = {name: bias.cpu() for name, bias in biases_of(engine.model).items()}
        found.append({"metrics": metrics, "biases": biases})
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", DAY)
def test_in_bfloat16_the_loss_is_near(one_rank: None, root: Path, family: str) -> None:
    engine, wanted = balanced(root / family, dtype="bfloat16"), reference(root / family, [range(8)])
    metrics = engine.update(columns_of(), nothing, torch.arange(8), 8)
    assert metrics["router_aux_loss"] == pytest.approx(wanted["loss"], rel=0.02)


@pytest.mark.parametrize("option", ["router_aux_loss_coef", "router_bias_update_rate"])
def test_load_becomes_even(one_rank: None, root: Path, option: str) -> None:
    amount = {"router_aux_loss_coef": 1.0, "router_bias_update_rate": 0.02}[option]
    engine = balanced(root / "glm4_moe", **{"router_aux_loss_coef": 0.0, option: amount})
    metrics = [engine.update(columns_of(), nothing, torch.arange(8), 8) for _ in range(25)]
    first, last = (metrics[place]["router_imbalance"] for place in (0, -1))
    assert first > 1.3 and last - 1 < 0.5 * (first - 1)


def test_adapters_train_by_it_and_routers_stay(one_rank: None, root: Path) -> None:
    engine = balanced(root / "qwen3_moe", lora={"rank": 4, "alpha": 8.0})
    gradients = measured(engine, range(8))["gradients"]
    assert {name.split(".")[-3] for name in gradients} == {"lora_A", "lora_B"}
    assert any(gradient.abs().max() > 1e-4 for gradient in gradients.values())


def test_what_has_no_routers_or_no_bias_is_refused(one_rank: None, root: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^llama: LlamaForCausalLM has no routers whose load"):
        balanced(build(tmp_path, "llama"))
    with pytest.raises(ValueError, match=r"^qwen3_moe: its routers have no bias .*router_bias_update_rate$"):
        balanced(root / "qwen3_moe", router_bias_update_rate=RATE)
    assert balanced(tmp_path / "llama", frozen=True).balance is None


def main(rank: int, root: Path) -> None:
    mesh, found = init_device_mesh("cpu", (2,)), {}
    ways: dict[str, dict[str, Any]] = {
        "rows": {"reshard": True},
        "experts": {"experts": expert_group(mesh, 2, 2), "reshard": True, "group": mesh.get_group()},
        "tokens": {"sequence": sequence_group(mesh.get_group(), 2)},
    }
    for family in ("qwen3_moe", *BIASED):
        rate = RATE if family in BIASED else 0.0
        for way, where in ways.items():
            engine = balanced(root / family, recompute=True, mesh=mesh, router_bias_update_rate=rate, **where)
            found[family, way] = measured(engine, WAYS["rows"][rank])
            if way == "experts":
                engine.save(str(root / f"saved-{family}"))
    engine = balanced(root / "glm4_moe", mesh=mesh, router_bias_update_rate=RATE)
    rows = range(8) if rank == 0 else ()
    found["idle"] = engine.update(columns_of(rows), nothing, torch.tensor([*rows], dtype=torch.int64), 8)
    torch.save(found, root / f"rank-{rank}.pt")


@pytest.fixture(scope="module")
def ranks(root: Path) -> list[Any]:
    launch(__file__, root)
    return [torch.load(root / f"rank-{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["qwen3_moe", *BIASED])
def test_two_ranks_balance_what_they_read_together(
    root: Path, ranks: list[Any], family: str, way: str
) -> None:
    wanted = reference(root / family, WAYS[way])
    for rank in ranks:
        agrees(rank[family, way], wanted)
        assert rank[family, way]["metrics"] == ranks[0][family, way]["metrics"]
        torch.testing.assert_close(
            rank[family, way]["biases"], wanted["biases"], rtol=0, atol=1e-6, check_dtype=False
        )


def test_a_checkpoint_of_two_ranks_has_the_biases(one_rank: None, root: Path, ranks: list[Any]) -> None:
    engine = balanced(root / "glm4_moe", router_bias_update_rate=RATE)
    engine.load(str(root / "saved-glm4_moe"))
    torch.testing.assert_close(
        biases_of(engine.model), ranks[0]["glm4_moe", "experts"]["biases"], rtol=0, atol=0
    )


def test_a_rank_without_rows_counts_for_nothing(root: Path, ranks: list[Any]) -> None:
    wanted = reference(root / "glm4_moe", [range(8)])
    for rank in ranks:
        assert rank["idle"]["router_aux_loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert rank["idle"]["router_imbalance"] == pytest.approx(wanted["imbalance"])


if __name__ == "__main__":
    forked(main, 2)
