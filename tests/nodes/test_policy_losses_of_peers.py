"""update.policy's objective, corrections and rewards give the numbers of TRL's and verl's own functions.

What the peers gave stands in tests/peers/recorded; tests/peers/ask_*.py asked them.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rlgraph.nodes import LOSSES
from rlgraph.nodes.advantage.gae import reinforce_pp
from rlgraph.nodes.advantage.group import gpg, grpo
from rlgraph.nodes.reward.scaling import whiten
from rlgraph.nodes.select.correction import mis, reject, tis
from rlgraph.nodes.select.mask import complete, weighed
from rlgraph.nodes.select.weight import entropy as top_entropy
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.nodes.update.update import policy_objective
from rlgraph.ops import Context, Loss, Totals
from rlgraph.ops.registry import load

RECORDED = Path(__file__).parents[1] / "peers/recorded"
TRL = json.loads((RECORDED / "trl_grpo.json").read_text())
ROWS = json.loads((RECORDED / "trl_grpo_rows.json").read_text())
VERL = json.loads((RECORDED / "policy_losses.json").read_text())
CLIP = {"clip": 0.2, "clip_high": 0.2}
NEAR = {"rel": 1e-5, "abs": 1e-7}


def ragged(rows: list[list[float]], mask: list[list[float]]) -> Ragged:
    """A column of the tokens that a padded one has within its mask, each row led by a token of a prompt."""
    lengths = [int(sum(row)) for row in mask]
    return Ragged.of([[0.0, *row[:n]] for row, n in zip(rows, lengths, strict=True)], torch.float64)


def columns(recorded: dict[str, Any]) -> dict[str, Ragged]:
    mask = recorded["mask"]
    made = {name: ragged(rows, mask) for name, rows in recorded.items() if isinstance(rows[0], list)}
    written = made["mask"].values.bool()
    made["loss_mask"] = made.pop("mask").like(written)
    if "advantages" not in made:
        per_row = torch.tensor(recorded["advantages"], dtype=torch.float64)
        made["advantages"] = made["loss_mask"].spread(per_row)
    return made


def policy_loss(kind: str, **attributes: Any) -> Loss:
    """The loss of a name with its defaults and some attributes, as a graph makes it."""
    op = load(LOSSES[kind], kind, Loss)
    whole = {**op.attributes(**attributes).model_dump()}
    return Loss(op.body, whole, {})


def gradient_of(objective: Any, given: dict[str, Ragged]) -> tuple[float, list[list[float]], Any]:
    """The loss, its gradient by row of the tokens behind the prompt, and the metrics."""
    logprobs = given["logprobs"].values.clone().requires_grad_()
    mask = given["loss_mask"]
    totals = Totals(int(mask.values.sum()), len(mask))
    loss, metrics = objective({**given, "logprobs": mask.like(logprobs)}, totals)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return (
        loss.item(),
        [row[1:].tolist() for row in map(mask.like(gradient).__getitem__, range(len(mask)))],
        metrics,
    )


def flat(rows: list[list[float]], mask: Ragged) -> list[float]:
    """The padded rows of a peer without their padding."""
    lengths = (mask.lengths - 1).tolist()
    assert all(not any(row[n:]) for row, n in zip(rows, lengths, strict=True))
    return [number for row, n in zip(rows, lengths, strict=True) for number in row[:n]]


# loss_type of TRL -> the kind of loss, and what becomes one number
KINDS: dict[str, tuple[str, str]] = {
    "dapo": ("ppo_clip", "token-mean"),
    "bnpo": ("ppo_clip", "token-mean"),
    "grpo": ("ppo_clip", "seq-mean-token-mean"),
    "dr_grpo": ("ppo_clip", "seq-mean-token-sum-norm"),
    "luspo": ("ppo_clip", "seq-mean-token-sum"),
    "cispo": ("cispo", "token-mean"),
    "sapo": ("sapo", "seq-mean-token-mean"),
    "vespo": ("vespo", "token-mean"),
}
# an entropy bonus is averaged as the loss is; TRL averages it over tokens whatever the loss
OWN_MEAN = {"grpo entropy", "dr_grpo entropy", "entropy of the top"}
CASES = [name for name in TRL["cases"] if name not in OWN_MEAN]


def objective_of(settings: dict[str, Any]) -> Any:
    """The objective of the edits that TRL's settings come to."""
    kind, aggregate = KINDS[settings.get("loss_type", "dapo")]
    level = settings.get("importance_sampling_level", "token")
    low, high = settings.get("epsilon", 0.2), settings.get("epsilon_high", settings.get("epsilon", 0.2))
    chosen: dict[str, Any] = {}
    if kind == "ppo_clip":
        chosen = {"level": level, "clip": low, "clip_high": high, "delta": settings.get("delta")}
    elif kind == "cispo":
        chosen = {"level": level, "cap": high}
    elif kind == "sapo":
        positive = settings.get("sapo_temperature_pos", 1.0)
        chosen = {"level": level, "tau": positive, "tau_negative": settings.get("sapo_temperature_neg", 1.05)}
    else:
        names = {
            "power": "k_pos",
            "decay": "lambda_pos",
            "power_negative": "k_neg",
            "decay_negative": "lambda_neg",
        }
        given = {own: settings.get(f"vespo_{theirs}") for own, theirs in names.items()}
        chosen = {own: value for own, value in given.items() if value is not None}
    norm = float(TRL["max_completion_length"]) if aggregate == "seq-mean-token-sum-norm" else None
    return policy_objective(
        policy_loss(kind, **chosen),
        aggregate,
        settings.get("beta", 0.0),
        "k3",
        settings.get("entropy_coef", 0.0),
        norm,
        settings.get("use_bias_correction_kl", True),
        settings.get("off_policy_mask_threshold"),
    )


@pytest.mark.parametrize("name", CASES)
def test_a_setting_of_trl_has_trls_loss_and_gradient(name: str) -> None:
    case, given = TRL["cases"][name], columns(TRL["rows"])
    settings = case["settings"]
    mask = given["loss_mask"]
    given["entropy"] = given.pop("entropies")
    sampled, weights = given.pop("sampling_logprobs"), given.pop("weights")
    if not settings.get("beta"):
        del given["ref_logprobs"]
    if "top_entropy_quantile" in settings:
        ctx, share = (
            Context("token_weights", 0, 0, rows=range(4), total_rows=4),
            settings["top_entropy_quantile"],
        )
        given["token_weights"] = top_entropy(ctx, given["entropy"], mask, None, share=share)
    if settings.get("use_vllm"):
        given["rollout_logprobs"] = sampled
        if settings.get("vllm_importance_sampling_correction", True):
            given["rollout_weights"] = weights
    if settings.get("loss_type") == "vespo" and "rollout_weights" in given:
        # its weight is of the whole way from what sampled, which the loss then divides by; TRL adds up the
        # logarithms of padding too, whose weights are 1 but in these rows
        del given["rollout_weights"]
        way = [[math.log(w) for w in row] for row in TRL["rows"]["weights"]]
        behind = [sum(row[int(sum(m)) :]) for row, m in zip(way, TRL["rows"]["mask"], strict=True)]
        way = [[row[0] + rest, *row[1:]] for row, rest in zip(way, behind, strict=True)]
        moved = given["old_logprobs"].values - ragged(way, TRL["rows"]["mask"]).values
        given["old_logprobs"] = mask.like(moved)
    loss, gradient, _ = gradient_of(objective_of(settings), given)
    assert loss == pytest.approx(case["loss"], **NEAR)
    assert [n for row in gradient for n in row] == pytest.approx(flat(case["gradient"], mask), **NEAR)


@pytest.mark.parametrize("how", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize(
    ("name", "kind", "attributes"),
    [
        ("vanilla", "ppo_clip", {"clip": 0.1, "clip_high": 0.28, "dual_clip": 1.5}),
        ("gspo", "gspo", {"clip": 0.05, "clip_high": 0.1}),
        ("gspo", "ppo_clip", {"level": "sequence", "clip": 0.05, "clip_high": 0.1}),
        ("cispo", "cispo", {"clip": 1.0, "clip_high": 0.2}),
        ("cispo", "cispo", {"clip": 1.0, "cap": 1.2}),
        ("dro", "dro", {"beta": 0.3}),
    ],
)
def test_a_loss_of_verl_has_verls_value_and_gradient(
    name: str, kind: str, attributes: dict[str, Any], how: str
) -> None:
    given = columns(VERL["rows"])
    objective = policy_objective(policy_loss(kind, **attributes), how, 0.0, "k3", 0.0)
    loss, gradient, _ = gradient_of(objective, given)
    expected = VERL["losses"][name][how]
    assert loss == pytest.approx(expected["loss"], **NEAR)
    assert [n for row in gradient for n in row] == pytest.approx(
        flat(expected["gradient"], given["loss_mask"]), **NEAR
    )


@pytest.mark.parametrize(
    ("name", "how"), [("sapo", "seq-mean-token-mean"), ("geo_mean", "seq-mean-token-mean")]
)
def test_losses_that_verl_always_averages_by_sequence(name: str, how: str) -> None:
    given = columns(VERL["rows"])
    clips = {"log_clip": 0.2, "log_clip_high": 0.3} if name == "geo_mean" else {}
    loss, gradient, _ = gradient_of(policy_objective(policy_loss(name, **clips), how, 0.0, "k3", 0.0), given)
    assert loss == pytest.approx(VERL["losses"][name][how]["loss"], **NEAR)
    expected = flat(VERL["losses"][name][how]["gradient"], given["loss_mask"])
    assert [n for row in gradient for n in row] == pytest.approx(expected, **NEAR)


@pytest.mark.parametrize("name", VERL["rejections"])
def test_what_verl_rejects_is_rejected(name: str) -> None:
    given, asked = columns(VERL["rows"]), VERL["rejections"][name]
    over, _, kl = name.removeprefix("seq_").partition("_")
    bounds = {"threshold": asked["threshold"]}
    if kl == "k1":
        # verl's bounds are of the ratio of rollout to old, k1's own direction
        low, high = map(float, asked["threshold"].split("_"))
        bounds = {"threshold": math.log(high), "least": math.log(low)}
    ctx = Context("rollout_weights", 0, 0)
    sides = given["old_logprobs"], given["rollout_logprobs"], given["loss_mask"]
    weights = reject(ctx, *sides, None, kl=kl, over=over, **bounds)
    rejected = weighed(weights, given["loss_mask"])
    assert [*map(float, _behind(rejected))] == flat(asked["mask"], given["loss_mask"])
    assert 0 < sum(_behind(rejected)) < given["loss_mask"].values.sum() - 0, "some are, and some are not"


@pytest.mark.parametrize("asked", VERL["weights"], ids=lambda asked: f"{asked['level']} {asked['threshold']}")
def test_weights_are_verls(asked: dict[str, Any]) -> None:
    given = columns(VERL["rows"])
    sides = given["old_logprobs"], given["rollout_logprobs"], given["loss_mask"]
    ctx, bound = Context("rollout_weights", 0, 0), asked["threshold"]
    if isinstance(bound, str):
        low, high = map(float, bound.split("_"))
        weights = mis(ctx, *sides, level=asked["level"], low=low, high=high)
    else:
        weights = tis(ctx, *sides, level=asked["level"], cap=bound)
    assert _behind(weights) == pytest.approx(flat(asked["weights"], given["loss_mask"]), rel=1e-5)


def test_gpg_is_verls_where_it_counts_rewards() -> None:
    asked = VERL["gpg"]
    rewards = torch.tensor(asked["rewards"])
    group = torch.tensor([ord(name) for name in asked["groups"]])
    mask = Ragged.of([[True]] * len(rewards), torch.bool)
    found = gpg(rewards, group, mask, f_norm=asked["f_norm"], counted="reward")
    assert found.values.tolist() == pytest.approx(asked["advantages"], rel=1e-6)
    plain = gpg(rewards, group, mask, f_norm=asked["f_norm"])
    assert plain.values.tolist() != pytest.approx(asked["advantages"], rel=1e-2), "the two count others"


SIZES = [len(ROWS["rows"]["logprobs"][0])] * len(ROWS["rows"]["rewards"])
SCALES = {"default": "group", "batch": "batch", "none": "none", "false": "none"}


@pytest.mark.parametrize("name", SCALES)
def test_advantages_are_those_of_a_scale_of_trl(name: str) -> None:
    rewards, group = torch.tensor(ROWS["rows"]["rewards"]), torch.arange(8) // 4
    whole = Ragged.of([[True]] * 8, torch.bool)
    scaled = whiten(rewards, group, mean="group", std=SCALES[name], eps=1e-4)
    expected = ROWS["cases"][name]["advantages"]
    assert scaled.tolist() == pytest.approx(expected, abs=1e-5)
    returns = reinforce_pp(whole.like(scaled), whole, whiten=False)  # on a single token, and so to go
    assert returns.values.tolist() == pytest.approx(expected, abs=1e-5)
    if name != "batch":
        by_group = grpo(rewards, group, whole, scale=name == "default", eps=1e-4)
        assert by_group.values.tolist() == pytest.approx(expected, abs=1e-5)


def test_what_a_limit_cut_off_is_masked_as_trl_masks_it() -> None:
    truncated = torch.tensor(ROWS["rows"]["truncated"])
    mask = Ragged.of([[False, *[True] * size] for size in SIZES], torch.bool)
    masked = complete(Context("whole", 0, 0), truncated, mask)
    expected = [number for row in ROWS["cases"]["mask truncated"]["completion_mask"] for number in row]
    assert [*map(int, _behind(masked))] == expected


MODES = [name for name, case in ROWS["cases"].items() if "weights" in case and "mask truncated" not in name]


@pytest.mark.parametrize("name", MODES)
def test_weights_of_a_mode_are_trls(name: str) -> None:
    case = ROWS["cases"][name]
    settings = case["settings"]
    mode = settings.get("vllm_importance_sampling_mode", "sequence_mask")
    level, _, how = mode.partition("_")
    low = settings.get("vllm_importance_sampling_clip_min")
    high = settings.get("vllm_importance_sampling_clip_max", 3.0)
    ones = [[1.0] * size for size in SIZES]
    old, rollout = (ragged(ROWS["rows"][column], ones) for column in ("logprobs", "sampling_logprobs"))
    mask = Ragged.of([[False, *[True] * size] for size in SIZES], torch.bool)
    ctx = Context("rollout_weights", 0, 0)
    if how == "truncate":
        weights = tis(ctx, old, rollout, mask, level=level, floor=low or 0.0, cap=high)
    else:
        bound = math.inf if high is None else high
        weights = mis(ctx, old, rollout, mask, level=level, low=low or 0.0, high=bound)
    expected = case["weights"]
    if level == "sequence":
        expected = [row * size for row, size in zip(expected, SIZES, strict=True)]
    assert _behind(weights) == pytest.approx([n for row in expected for n in row], rel=1e-5)


def _behind(column: Ragged) -> list[float]:
    """The numbers behind each row's prompt, of one token."""
    return [number for row in column.tolist() for number in row[1:]]
