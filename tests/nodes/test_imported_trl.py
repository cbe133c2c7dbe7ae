"""The losses of graphs that `rlgraph import trl` writes have the values and gradients of TRL's own functions.

What TRL gave for the same settings stands in tests/peers/recorded, with its version.
"""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path
from typing import Any

import pytest
import test_policy_losses_of_peers as policy
import test_preference_peers as pairs
import torch

from rlgraph.check import check_report
from rlgraph.frontend.compose import compose
from rlgraph.importing.trl import import_trl
from rlgraph.nodes import OPS
from rlgraph.nodes.advantage.group import gdpo
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.nodes.update.update import policy_objective
from rlgraph.ops import Context
from rlgraph.ops.registry import load
from rlgraph.request import PlanRequest

RECORDED = Path(__file__).parents[1] / "peers/recorded"
LOSSES = json.loads((RECORDED / "trl_grpo.json").read_text())
ROWS = json.loads((RECORDED / "trl_grpo_rows.json").read_text())
PREFERENCES = json.loads((RECORDED / "trl_preferences.json").read_text())
RLOO = json.loads((RECORDED / "trl_rloo.json").read_text())
BY_HAND = {  # the importer says what to do: TRL's mean of the entropies of some tokens
    "entropy of the top": "entropy_coef",
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def graph_of(kind: str, settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The nodes of the graph that settings become, which checks, and the keys that need a hand."""
    Path("settings.yaml").write_text(json.dumps({"max_steps": 10, **settings}))
    imported = import_trl(Path("settings.yaml"), (), trainer=kind)
    Path("out.yaml").write_text(imported.graph())
    report = check_report(PlanRequest("out.yaml"))
    assert not report["problems"], report
    hands = {o.key: o.text for o in imported.outcomes if o.kind == "hand"}
    return dict(compose("out.yaml").plain()["nodes"]), hands


def body_of(node: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The function of a node, and all its attributes."""
    op = load(OPS[node["op"]], node["op"])
    given = {name: node[name] for name in op.attributes.model_fields if name in node}
    return op.body, op.attributes(**given).model_dump()


@pytest.mark.parametrize("name", LOSSES["cases"])
def test_a_loss_of_grpo_is_trls(name: str) -> None:
    case = LOSSES["cases"][name]
    nodes, hands = graph_of("grpo", {**case["settings"], "max_completion_length": 8})
    if name in BY_HAND:
        assert BY_HAND[name] in hands
        return
    update, given = nodes["update_policy"], policy.columns(LOSSES["rows"])
    attributes = {"minibatches": 1, **update}
    mask, sampled, weights = given["loss_mask"], given.pop("sampling_logprobs"), given.pop("weights")
    given["entropy"] = given.pop("entropies")
    assert ("kl_coef" in update) == bool(case["settings"].get("beta"))
    if "kl_coef" not in update:
        del given["ref_logprobs"]
    if "token_weights" in nodes:
        body, own = body_of(nodes["token_weights"])
        ctx = Context("token_weights", 0, 0, rows=range(4), total_rows=4)
        given["token_weights"] = body(ctx, given["entropy"], mask, None, **own)
    if case["settings"].get("use_vllm"):
        given["rollout_logprobs"] = sampled
    if "rollout_weights" in nodes:
        given["rollout_weights"] = weights
    if update.get("in") == {
        "old_logprobs": "rollout_logprobs"
    }:  # of vespo, whose weights TRL has cut by then
        assert "vllm_importance_sampling_correction" in hands
        given["rollout_logprobs"] = given["old_logprobs"] = sampled_by(weights, given["old_logprobs"], mask)
    loss = dict(update["loss"])
    objective = policy_objective(
        policy.policy_loss(loss.pop("kind"), **loss),
        attributes["aggregate"],
        attributes.get("kl_coef", 0.0),
        attributes.get("kl", "k3"),
        attributes.get("entropy_coef", 0.0),
        attributes.get("norm"),
        attributes.get("kl_unbiased", False),
        attributes.get("off_policy_limit"),
        attributes.get("entropy_aggregate"),
    )
    value, gradient, _ = policy.gradient_of(objective, given)
    assert value == pytest.approx(case["loss"], rel=1e-5, abs=1e-6)
    expected = policy.flat(case["gradient"], mask)
    assert [n for row in gradient for n in row] == pytest.approx(expected, rel=1e-5, abs=1e-6)


def sampled_by(weights: Ragged, old: Ragged, mask: Ragged) -> Ragged:
    """Log-probs of a sampler that weights are of; TRL adds those of padding, which are 1 in a run."""
    rows = [[math.log(w) for w in row] for row in LOSSES["rows"]["weights"]]
    behind = [sum(row[int(sum(m)) :]) for row, m in zip(rows, LOSSES["rows"]["mask"], strict=True)]
    rows = [[row[0] + rest, *row[1:]] for row, rest in zip(rows, behind, strict=True)]
    return mask.like(old.values - policy.ragged(rows, LOSSES["rows"]["mask"]).values)


@pytest.mark.parametrize("name", RLOO["losses"])
def test_several_steps_of_rloo_clip_the_ratio_of_responses_as_in_trl(name: str) -> None:
    case = RLOO["losses"][name]
    steps = {"gradient_accumulation_steps": 1, "steps_per_generation": 4}
    nodes, hands = graph_of("rloo", {**case["settings"], **steps, "num_iterations": 2})
    assert not {*steps, "num_iterations"} & {*hands}
    update, given = nodes["update_policy"], policy.columns(RLOO["loss_rows"])
    assert (update["minibatches"], update["epochs"]) == (4, 2)
    loss = dict(update["loss"])
    objective = policy_objective(
        policy.policy_loss(loss.pop("kind"), **loss), update["aggregate"], 0.0, "k3", 0.0
    )
    value, gradient, _ = policy.gradient_of(objective, given)
    assert value == pytest.approx(case["loss"], rel=1e-5, abs=1e-6)
    expected = policy.flat(case["gradient"], given["loss_mask"])
    assert [n for row in gradient for n in row] == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_one_step_of_rloo_has_the_gradient_of_the_clipped_ratio() -> None:
    nodes, _ = graph_of("rloo", {})
    given = policy.columns(RLOO["loss_rows"])
    given["old_logprobs"] = given["logprobs"]
    gradients = []
    for kind, more, aggregate in (
        (nodes["update_policy"]["loss"]["kind"], {}, nodes["update_policy"]["aggregate"]),
        ("ppo_clip", {"level": "product"}, "seq-mean-token-mean"),
    ):
        objective = policy_objective(policy.policy_loss(kind, **more), aggregate, 0.0, "k3", 0.0)
        gradients.append(policy.gradient_of(objective, given)[1])
    assert [n for row in gradients[0] for n in row] == pytest.approx([n for row in gradients[1] for n in row])


@pytest.mark.parametrize("name", RLOO["advantages"])
def test_advantages_of_rloo_are_trls(name: str) -> None:
    case, rows = RLOO["advantages"][name], RLOO["rows"]
    nodes, hands = graph_of("rloo", {**case["settings"], "num_generations": 4})
    assert not {"normalize_advantages", "reward_clip_range"} & {*hands}
    mask = Ragged.of([[True] * 5] * 8, torch.bool)
    scores = [sum(w * s for w, s in zip(weights_of(case), pair, strict=True)) for pair in pairs_of(rows)]
    known: dict[str, Any] = {
        "rewards": torch.tensor(scores),
        "group": torch.arange(8) // 4,
        "loss_mask": mask,
        "old_logprobs": Ragged.of(rows["logprobs"], torch.float32),
        "ref_logprobs": Ragged.of(rows["ref_logprobs"], torch.float32),
    }
    for node in ("clipped", "shaped", "scored", "compared", "normal", "token_rewards", "advantages"):
        if node in nodes:
            body, own = body_of(nodes[node])
            reads = nodes[node].get("in", {})
            names = inspect.signature(body).parameters
            columns = {port: known[reads.get(port, port)] for port in names if port in known}
            ctx = {"ctx": Context(node, 0, 0)} if "ctx" in names else {}
            known[node] = body(**ctx, **columns, **own)
    expected = [a for a in case["advantages"] for _ in range(5)]
    assert known["advantages"].values.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def pairs_of(rows: dict[str, Any]) -> list[tuple[float, float]]:
    return [*zip(rows["rewards"], rows["second"], strict=True)]


def weights_of(case: dict[str, Any]) -> tuple[float, float]:
    first, second = case["settings"].get("reward_weights", [1.0, 0.0])
    return first, second


@pytest.mark.parametrize("functions", [("one",), ("one", "two"), ("one", "two", "three")])
def test_rewards_are_normalised_one_by_one_where_trl_does(functions: tuple[str, ...]) -> None:
    Path("my_rewards.py").write_text("".join(f"def {name}(completions, **more): ...\n" for name in functions))
    weights = [1.0, 0.5, 0.25][: len(functions)]
    settings = {
        "reward_funcs": [f"my_rewards.{name}" for name in functions],
        "reward_weights": weights,
        "multi_objective_aggregation": "normalize_then_sum",
        "scale_rewards": "none",
    }
    nodes, hands = graph_of("grpo", settings)
    assert "multi_objective_aggregation" not in hands
    advantages = nodes["advantages"]
    assert (advantages["op"], advantages["eps"], advantages["over"]) == ("advantage.gdpo", 1e-4, "samples")
    if len(functions) > 1:
        assert [*advantages["in"].values()] == [*functions]
        ports = ["weight", "weight_2", "weight_3"][: len(functions)]
        assert [advantages[port] for port in ports] == weights


@pytest.mark.parametrize("name", ["default", "batch", "none", "false"])
def test_advantages_are_trls(name: str) -> None:
    nodes, _ = graph_of("grpo", ROWS["cases"][name]["settings"])
    rewards, group = torch.tensor(ROWS["rows"]["rewards"]), torch.arange(8) // 4
    if nodes["advantages"].get("in"):
        body, own = body_of(nodes[nodes["advantages"]["in"]["rewards"]])
        rewards = body(rewards, group, **own)
    body, own = body_of(nodes["advantages"])
    found = body(rewards, group, Ragged.of([[True]] * 8, torch.bool), **own)
    assert found.values.tolist() == pytest.approx(ROWS["cases"][name]["advantages"], abs=1e-5)


def test_truncated_completions_are_masked_as_in_trl() -> None:
    nodes, _ = graph_of("grpo", ROWS["cases"]["mask truncated"]["settings"])
    assert nodes["update_policy"]["in"] == {"loss_mask": "whole_mask"}
    body, _ = body_of(nodes["whole_mask"])
    mask = Ragged.of([[True] * 5] * 8, torch.bool)
    masked = body(Context("whole_mask", 0, 0), torch.tensor(ROWS["rows"]["truncated"]), mask)
    assert [[*map(int, row)] for row in masked.tolist()] == ROWS["cases"]["mask truncated"]["completion_mask"]


@pytest.mark.parametrize("name", policy.MODES)
def test_weights_of_the_samplers_rows_are_trls(name: str) -> None:
    case = ROWS["cases"][name]
    nodes, _ = graph_of("grpo", case["settings"])
    body, own = body_of(nodes["rollout_weights"])
    rows = (Ragged.of(ROWS["rows"][column]) for column in ("logprobs", "sampling_logprobs"))
    weights = body(Context("rollout_weights", 0, 0), *rows, Ragged.of([[True] * 5] * 8, torch.bool), **own)
    for found, expected in zip(weights.tolist(), case["weights"], strict=True):
        assert found == pytest.approx(expected * (5 // len(expected)), rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in ("dpo", "kto", "cpo") for name in PREFERENCES[kind]]
)
def test_a_loss_of_preferences_is_trls(kind: str, name: str) -> None:
    case = PREFERENCES[kind][name]
    nodes, hands = graph_of(kind, case["settings"])
    node, ctx = nodes["preference"], Context(node="preference", seed=0, iteration=0)
    assert not {"loss_type", "alpha", "label_smoothing"} & {*hands}
    body, own = body_of({key: value for key, value in node.items() if key != "losses"})
    rows = [pairs.ragged("logprobs"), None, pairs.loss_mask()]
    if "ref_logprobs" in nodes:
        rows[1] = pairs.ragged("ref_logprobs")
    if kind == "kto":
        drift = (None, None, None)
        if "mismatched" in nodes:
            drift = (pairs.ragged("kl_logprobs"), pairs.ragged("kl_ref_logprobs"), pairs.loss_mask())
        weights = body(ctx, *rows, *drift, pairs.CHOSEN, **own)
    else:
        own["losses"] = None
        if "losses" in node:
            own["losses"] = {key: pairs.pair_loss(**dict(each)) for key, each in node["losses"].items()}
        squares = pairs.ragged("squares") if nodes["old_logprobs"]["op"] == "logprobs.squares" else None
        weights, _ = body(ctx, *rows, pairs.CHOSEN, pairs.GROUP, squares, **own)
    pairs.check(case, weights, ctx)


def test_no_case_is_left_out() -> None:
    assert {*BY_HAND} <= {*LOSSES["cases"]}
    assert not any(math.isnan(case["loss"]) for case in LOSSES["cases"].values())


def test_gdpo_over_samples_has_the_advantages_of_normalize_then_sum() -> None:
    case, rows = ROWS["cases"]["normalize_then_sum"], ROWS["rows"]
    first, second = (torch.tensor(rows[name]) for name in ("rewards", "second"))
    mask = Ragged.of([list(map(bool, row)) for row in case["completion_mask"]], torch.bool)
    weight, weight_2 = case["settings"]["reward_weights"]
    groups = torch.tensor([0] * 4 + [1] * 4)
    options = {"weight": weight, "weight_2": weight_2, "eps": 1e-4}
    given = gdpo(first, second, None, None, groups, mask, over="samples", **options)
    expected = torch.tensor(case["advantages"])
    assert torch.allclose(given.values.view(8, -1), expected[:, None].expand(8, 5), atol=1e-6)
    tokens = gdpo(first, second, None, None, groups, mask, over="tokens", **options)
    assert not torch.allclose(tokens.values.view(8, -1)[:, 0], expected, atol=1e-2)


def test_gdpo_over_samples_counts_a_sample_once_however_long() -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.5, 0.0]), torch.tensor([0, 0, 1, 1, 1, 1])
    short = Ragged.of([[True]] * 6, torch.bool)
    long = Ragged.of([[True] * n for n in (9, 1, 2, 1, 3, 1)], torch.bool)
    of_short = gdpo(rewards, None, None, None, groups, short, over="samples").values
    of_long = gdpo(rewards, None, None, None, groups, long, over="samples").values
    assert torch.equal(of_long[[0, 9, 10, 12, 13, 16]], of_short)


def test_gdpo_over_samples_of_one_sample_is_nothing() -> None:
    mask = Ragged.of([[True, True]], torch.bool)
    assert (
        gdpo(torch.ones(1), None, None, None, torch.zeros(1).long(), mask, over="samples").values.eq(0).all()
    )
