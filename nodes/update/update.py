"""Ops that write a model's weights: two build an objective and hand it to a train engine, one copies."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from rlgraph.nodes.loss import policy as losses
from rlgraph.nodes.loss.policy import Aggregation, KlKind, PolicyAggregation
from rlgraph.nodes.loss.ratio import RatioLevel, masked_mean, ratio, sequence_ratio
from rlgraph.nodes.loss.sequence import gspo
from rlgraph.nodes.support.lazy import torch
from rlgraph.nodes.support.ragged import Ragged, same
from rlgraph.ops import Batch, Context, Loss, Metric, Objective, Totals, TrainEngine, op
from rlgraph.ops.column_types import boolean, float32, int64, k, layers, samples, tokens
from rlgraph.ops.declare import Role

Metrics = dict[str, Metric | tuple[Any, Any]]  # scalars on the micro-batch's device
NO_ADVANTAGE = 1e-6  # what is less is rounding
WEIGHTS = ("rollout_weights", "token_weights")  # columns that a token's loss is multiplied by
SPREAD = ("advantage", "ratio", "return", "value", "rollout_gap")  # of which there are _std, _min and _max
PASSES: dict[Role, str] = {"minibatches": "minibatches", "epochs": "epochs"}


@op(
    updates=True,
    when={"ref_logprobs": "kl_coef", "kl": "kl_coef", "kl_unbiased": "kl_coef"},
    own=("routing",),
    assumes=("reference", "constant_norm", "replayed", "signed"),
    measures={"kl_coef": "kl_ref"},
    roles={**PASSES, "temperature": "temperature"},
)
def policy(
    model: TrainEngine,
    ctx: Context,
    tokens: int64[samples, tokens],
    loss_mask: boolean[samples, tokens],
    ref_logprobs: float32[samples, tokens] | None,
    rollout_logprobs: float32[samples, tokens] | None,
    rollout_weights: float32[samples, tokens] | None,
    token_weights: float32[samples, tokens] | None,
    watched_logprobs: float32[samples, tokens] | None,
    routing: int64[samples, tokens, layers, k] | None,
    *,
    loss: Loss,
    minibatches: Annotated[int, Field(ge=1)] = 1,
    epochs: Annotated[int, Field(ge=1)] = 1,
    temperature: PositiveFloat | None = None,
    aggregate: PolicyAggregation = "token-mean",
    norm: PositiveFloat | None = None,
    kl_coef: NonNegativeFloat = 0.0,
    kl: KlKind = "k3",
    kl_unbiased: bool = False,
    off_policy_limit: PositiveFloat | None = None,
    entropy_coef: float = 0.0,
    entropy_aggregate: PolicyAggregation | None = None,
    weight: NonNegativeFloat = 1.0,
    over: Literal["samples", "segments"] = "samples",
) -> None:
    """Train a policy on a loss per token; writes the next version of its model.

    L = agg(w loss) + kl_coef agg(KL(policy, ref)) - entropy_coef agg(entropy), agg over the loss mask of a
    whole mini-batch, on all ranks (PPO, arXiv 1707.06347; the KL term: GRPO, arXiv 2402.03300). Reads the
    columns that the loss names, and ``ref_logprobs`` where ``kl_coef`` is not 0. w is ``rollout_weights``,
    written by a correction, or 1, times ``token_weights``, written by ops such as weight.entropy, or 1: a
    token of weight 0 adds nothing but is still counted by agg. With ``routing`` from its own rollout, a
    mixture of experts routes each token to the experts that were used to generate it; routers weight these
    experts and learn from that (R3, arXiv 2510.11370). ``in: {watched_logprobs: COLUMN}`` adds nothing to L
    and measures KL(policy, column).

    Records ``loss``, ``grad_norm``, ``lr``, ``entropy``, and where they exist ``kl_ref``, ``kl_old`` (k3,
    nats per token), ``kl_watched`` (likewise), ``ratio``, ``clip_fraction`` (tokens whose ratio is outside
    the clip), ``advantage`` and ``no_advantage`` (tokens whose advantage is 0, which have no gradient).
    Between ``rollout_logprobs`` and ``old_logprobs`` (or current log-probs, if the loss reads no
    ``old_logprobs``) it records ``rollout_gap``, |p_rollout - p_old| per token, and ``rollout_kl``,
    KL(rollout, old) by k3. ``advantage``, ``ratio`` and ``rollout_gap`` also have ``_std``, ``_min`` and
    ``_max``.

    Attributes:
        loss: the loss and its own attributes, e.g. {kind: ppo_clip, clip: 0.2}.
        minibatches: optimizer steps in one pass over the batch, at least 1.
        epochs: passes over the batch, at least 1.
        temperature: the number by which the logits are divided, above 0; null: that of the rollout.
        aggregate: how the losses of tokens become one number: token-mean, token-sum, seq-mean-token-sum,
            seq-mean-token-mean or seq-mean-token-sum-norm.
        norm: the number of tokens by which seq-mean-token-sum-norm divides a sequence's sum, above 0, such as
            the rollout's max_new_tokens; null with any other aggregation.
        kl_coef: weight of the KL to the reference, at least 0; 0: none. It may be adaptive; it then follows
            ``kl_ref``.
        kl: the estimator of the KL: k1, k2, k3 or abs.
        kl_unbiased: whether to multiply each token's estimate by the ratio of the current policy to
            ``old_logprobs``, at the level of the loss: with k3 its gradient is then that of the KL itself
            (DeepSeek-V3.2, arXiv 2512.02556, eq. 7), while the bare estimate has the gradient of another KL.
        off_policy_limit: in a sequence whose mean of log p_sampled - log p is above this, in nats per token,
            tokens with A < 0 add nothing (DeepSeek-V3.2, eq. 9); log p is the current log-prob, log p_sampled
            is ``rollout_logprobs``, or else ``old_logprobs``. null: no limit. Records ``off_policy``, the
            share of such tokens.
        entropy_coef: weight of the entropy bonus, in loss per nat; 0: none.
        entropy_aggregate: how the entropies of tokens become one number, with the same choices as
            ``aggregate``; null: as ``aggregate``.
        weight: the weight of L, at least 0, relative to the losses of nodes that join this one or that it
            ``joins``; the metric ``loss`` does not include it.
        over: what seq-mean-... averages over if rows are segments: samples, each of which counts once, or
            segments.

    Example:
        update_policy: {op: update.policy, model: policy, minibatches: 4, loss: {kind: ppo_clip, clip: 0.2}}
    """
    if rollout_logprobs is not None and same(rollout_logprobs, loss.columns.get("old_logprobs")):
        rollout_logprobs = None  # there is nothing to compare: the ratio is to the sampling policy
    extra = {
        "ref_logprobs": ref_logprobs,
        "rollout_logprobs": rollout_logprobs,
        "rollout_weights": rollout_weights,
        "token_weights": token_weights,
        "watched_logprobs": watched_logprobs,
        "routing": routing,
    }
    present = {name: column for name, column in extra.items() if column is not None}
    columns = {"tokens": tokens, "loss_mask": loss_mask, **present, **loss.columns}
    objective = policy_objective(
        loss, aggregate, kl_coef, kl, entropy_coef, norm, kl_unbiased, off_policy_limit, entropy_aggregate
    )
    rows, total_rows = rows_of(ctx)
    model.update(
        columns,
        objective,
        rows,
        total_rows,
        minibatches=minibatches,
        epochs=epochs,
        temperature=1.0 if temperature is None else temperature,
        entropy=entropy_coef != 0,
        merged=bool(ctx.total_samples) and over == "samples",
        weight=weight,
        record=ctx.add,
    )


@op(updates=True, head="value", assumes=("critic_values",), roles=PASSES)
def critic(
    model: TrainEngine,
    ctx: Context,
    tokens: int64[samples, tokens],
    loss_mask: boolean[samples, tokens],
    values: float32[samples, tokens],
    returns: float32[samples, tokens],
    *,
    clip: PositiveFloat = 0.2,
    minibatches: Annotated[int, Field(ge=1)] = 1,
    epochs: Annotated[int, Field(ge=1)] = 1,
    aggregate: Aggregation = "token-mean",
    weight: NonNegativeFloat = 1.0,
) -> None:
    """Train a critic on returns; writes the next version of its model.

    L = 1/2 agg(max((v - R)^2, (clamp(v, V - clip, V + clip) - R)^2)), v the current value, V the value before
    the update (PPO with a clipped value loss, arXiv 1707.06347 and 2005.12729). Records ``loss``,
    ``grad_norm``, ``lr``, ``value`` and ``return`` (per token: means, and ``_std``, ``_min``, ``_max``),
    ``clip_fraction`` (tokens where the clamped term is the larger) and ``explained_variance``, 1 - Var(R - V)
    / Var(R) over tokens: 1 for a critic that predicts returns perfectly, 0 for one that gives every token the
    same value.

    Attributes:
        clip: how far a value may move in one iteration, in units of the reward, above 0.
        minibatches: optimizer steps in one pass over the batch, at least 1.
        epochs: passes over the batch, at least 1.
        aggregate: how the losses of tokens become one number, as in update.policy.
        weight: the weight of L relative to other losses, as in update.policy.

    Example:
        update_critic: {op: update.critic, model: critic, minibatches: 4}
    """
    columns = {"tokens": tokens, "loss_mask": loss_mask, "values": values, "returns": returns}
    rows, total_rows = rows_of(ctx)
    model.update(
        columns,
        critic_objective(clip, aggregate),
        rows,
        total_rows,
        minibatches=minibatches,
        epochs=epochs,
        merged=bool(ctx.total_samples),
        weight=weight,
        record=ctx.add,
    )


@op(updates=True, head="any")
def copy(model: TrainEngine, of: TrainEngine, *, mix: Annotated[float, Field(gt=0, le=1)] = 1.0) -> None:
    """Copy a model's weights to a frozen model of the same shape; writes that model's next version.

    W_ref <- (1 - mix) W_ref + mix W_policy, for every weight, in the data type of the frozen model; adapters
    of the policy are merged into the copied weights. With a reference that is renewed like this, the KL term
    does not hold the policy at its starting point (TR-DPO, arXiv 2404.09656: hard with ``mix: 1``, soft
    below). From then on checkpoints include the reference. ``of: policy@next`` copies the weights after the
    iteration's update.

    Attributes:
        mix: the share of the copied weights in the new weights, above 0 and at most 1.

    Example:
        refresh: {op: update.copy, model: ref, of: policy, every: 50}
    """
    model.copy(of, mix)


def policy_objective(
    loss: Loss,
    aggregation: PolicyAggregation,
    kl_coef: float,
    kl: KlKind,
    entropy_coef: float,
    norm: float | None = None,
    kl_unbiased: bool = False,
    off_policy_limit: float | None = None,
    entropy_how: PolicyAggregation | None = None,
) -> Objective:
    """Return the objective of ``update.policy`` for a train engine: (batch, totals) -> (loss, metrics)."""

    def objective(batch: Batch, totals: Totals) -> tuple[torch.Tensor, Metrics]:
        loss_mask, logprobs = batch["loss_mask"], batch["logprobs"]
        if "old_logprobs" in loss.parameters and "old_logprobs" not in batch:
            # the compiler leaves the column out where this forward computes it
            batch = {**batch, "old_logprobs": logprobs.like(logprobs.values.detach())}
        weighed = loss(batch)
        for name in WEIGHTS:
            if name in batch:
                weighed = weighed.like(weighed.values * batch[name].values)
        measured = _policy_measures(loss, batch)
        if off_policy_limit is not None:
            is_off_policy = _off_policy(batch, off_policy_limit)
            measured["off_policy"] = is_off_policy
            weighed = weighed.like(torch.where(is_off_policy, 0, weighed.values))
        total = losses.aggregate(weighed, loss_mask, totals, aggregation, norm)
        if "ref_logprobs" in batch:
            divergence = logprobs.like(losses.kl(logprobs.values, batch["ref_logprobs"].values, kl))
            if kl_unbiased:
                divergence = logprobs.like(divergence.values * _kl_ratio(loss, batch))
            measured["kl_ref"] = divergence.values
            total = total + kl_coef * losses.aggregate(divergence, loss_mask, totals, aggregation, norm)
        if entropy_coef:
            mean = losses.aggregate(batch["entropy"], loss_mask, totals, entropy_how or aggregation, norm)
            total = total - entropy_coef * mean
        return total, _metrics(measured | _rollout_gap(batch), loss_mask)

    return objective


def critic_objective(clip: float, aggregation: Aggregation) -> Objective:
    """Return the objective of ``update.critic`` for a train engine: (batch, totals) -> (loss, metrics)."""

    def objective(batch: Batch, totals: Totals) -> tuple[torch.Tensor, Metrics]:
        now = batch["new_values"].values
        old_values = batch["values"].values
        target = batch["returns"].values
        free = (now - target).square()
        clamped = (torch.clamp(now, old_values - clip, old_values + clip) - target).square()
        error = batch["returns"].like(torch.maximum(free, clamped) / 2)
        measured = {"value": now, "return": target, "clip_fraction": clamped > free}
        total = losses.aggregate(error, batch["loss_mask"], totals, aggregation)
        metrics = _metrics(measured, batch["loss_mask"])
        return total, metrics | {"explained_variance": _explained(batch)}

    return objective


def _policy_measures(loss: Loss, batch: Batch) -> dict[str, torch.Tensor]:
    """Return metrics per token, ``[all tokens]``: how far the policy has moved, and its entropy."""
    measured = {}
    logprobs = batch["logprobs"]
    if "entropy" in batch:
        measured["entropy"] = batch["entropy"].values
    if "advantages" in batch:
        measured["advantage"] = batch["advantages"].values
        measured["no_advantage"] = batch["advantages"].values.abs() < NO_ADVANTAGE
    if "old_logprobs" in batch:
        now = logprobs.values.detach()
        old = batch["old_logprobs"].values
        if loss.body is losses.decoupled_ppo_approx:
            old = losses.proximal(now, old, loss.attributes["staleness"])
        measured["kl_old"] = losses.kl(old, now, "k3")
        level = _level(loss)
        if level == "token":
            rho = ratio(now, old)
        else:
            rho = sequence_ratio(now, logprobs.like(old), batch["loss_mask"], level)
        measured["ratio"] = rho
        clip = loss.attributes.get("clip")
        if clip:
            most = 1 + (loss.attributes.get("clip_high") or clip)
            if loss.body is losses.cispo and loss.attributes.get("cap"):
                most = loss.attributes["cap"]
            measured["clip_fraction"] = (rho < 1 - clip) | (rho > most)
    if "watched_logprobs" in batch:
        measured["kl_watched"] = losses.kl(logprobs.values.detach(), batch["watched_logprobs"].values, "k3")
    return measured


def _level(loss: Loss) -> RatioLevel:
    """Return what the ratio of a loss is of: a token, or a sequence, as a geometric mean or a product."""
    if loss.body is gspo:
        return "sequence"
    level: RatioLevel = loss.attributes.get("level", "token")
    return level


def _kl_ratio(loss: Loss, batch: Batch) -> torch.Tensor:
    """Return what an unbiased KL weighs each token by, with its gradient, ``[all tokens]``.

    Without ``old_logprobs`` the policy has not moved since: the ratio is 1, and has a gradient.
    """
    logprobs = batch["logprobs"]
    old = batch.get("old_logprobs", logprobs.like(logprobs.values.detach()))
    level = _level(loss)
    if level == "token":
        return ratio(logprobs.values, old.values)
    return sequence_ratio(logprobs.values, old, batch["loss_mask"], level)


def _off_policy(batch: Batch, limit: float) -> torch.Tensor:
    """Return where A < 0 in sequences that the policy has gone too far away from, ``[all tokens]``."""
    logprobs: Ragged = batch["logprobs"]
    advantages: Ragged = batch["advantages"]
    sampled: Ragged = batch.get("rollout_logprobs", batch.get("old_logprobs", logprobs))
    difference = logprobs.like(sampled.values.detach() - logprobs.values.detach())
    drift = masked_mean(difference, batch["loss_mask"])
    return (logprobs.spread(drift).values > limit) & (advantages.values < 0)


def _metrics(measured: dict[str, torch.Tensor], loss_mask: Ragged) -> Metrics:
    """Return metrics over the loss mask of each measure, on its device, without waiting for it."""
    mask = loss_mask.values
    count = mask.sum()
    metrics = Metrics()
    for name, values in measured.items():
        values = values.detach()
        masked = torch.where(mask, values.double(), 0)
        mean = {"count": count, "total": masked.sum()}
        metrics[name] = Metric("mean", "tokens", mean)
        if name in SPREAD:
            least = torch.where(mask, values, math.inf)
            most = torch.where(mask, values, -math.inf)
            metrics[f"{name}_std"] = Metric("std", "tokens", mean | {"squares": masked.square().sum()})
            metrics[f"{name}_min"] = Metric("min", "tokens", {"least": least.amin()})
            metrics[f"{name}_max"] = Metric("max", "tokens", {"most": most.amax()})
    return metrics


def _rollout_gap(batch: Batch) -> dict[str, torch.Tensor]:
    """Return how far the sampling engine is from the training one, per token ``[all tokens]``."""
    if "rollout_logprobs" not in batch:
        return {}
    rollout = batch["rollout_logprobs"].values.double()
    train = batch.get("old_logprobs", batch["logprobs"]).values.detach().double()
    gap = (rollout.exp() - train.exp()).abs()
    return {"rollout_gap": gap, "rollout_kl": losses.kl(rollout, train, "k3")}


def _explained(batch: Batch) -> Metric:
    """Return 1 - Var(R - V) / Var(R) over the loss mask, of the values before the update."""
    target, mask = batch["returns"].values, batch["loss_mask"]
    error = _moments(target - batch["values"].values, mask)
    of_error = {"error_total": error["total"], "error_squares": error["squares"]}
    return Metric("explained", "tokens", _moments(target, mask) | of_error)


def _moments(values: torch.Tensor, loss_mask: Ragged) -> dict[str, torch.Tensor]:
    """Return count, sum and sum of squares over the loss mask, on its device, without waiting for it."""
    masked = torch.where(loss_mask.values, values.detach().double(), 0)
    return {"count": loss_mask.values.sum(), "total": masked.sum(), "squares": masked.square().sum()}


def rows_of(ctx: Context) -> tuple[torch.Tensor, int]:
    """Return the numbers that mini-batches go by, of how many: of segments, those of their samples."""
    numbers = ctx.samples if ctx.total_samples else ctx.rows
    return torch.tensor(list(numbers), dtype=torch.int64), ctx.total_samples or ctx.total_rows
