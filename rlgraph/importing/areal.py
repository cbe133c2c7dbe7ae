"""AReaL: which nodes its trainers would run, and values that follow from several keys."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlgraph.errors import GraphError, Problem
from rlgraph.importing.draft import UNKNOWN, Draft
from rlgraph.importing.importer import (
    COMMON,
    By,
    Hand,
    Idle,
    Imported,
    KeyOutcome,
    duration_of,
    epochs_of,
    graph_name,
    outcomes_of,
    own_tokenizer,
    warmup_share,
)
from rlgraph.importing.inherited import read_inherited
from rlgraph.importing.options import Options
from rlgraph.importing.parallel import combined
from rlgraph.importing.table import table_of
from rlgraph.syntax.interval import Interval

SOURCES = {"sft": "examples", "dpo": "pairs", "rw": "pairs"}
REJECTS = "actor.rejection_sampling"
SIZE = re.compile(r"([dptce])(\d+)")
FAR = 30.0  # nats, where there is no bound
ALL = 100_000_000  # AReaL's top_k that keeps all


def import_areal(file: Path | None, overrides: Sequence[str], folder: Path = Path()) -> Imported:
    """Return the graph, to be written to a folder, that does what AReaL's trainer does with these settings.

    Raises:
        GraphError: the settings can't be read, or are of no trainer.
    """
    given = read_inherited(file, overrides)
    kind = trainer_of(given)
    options = Options(table_of("areal", kind), given, folder)
    draft = draft_of(options)
    outcomes = [*told(options), *outcomes_of(options, draft, BY), *combined(draft)]
    return Imported(graph_name(file.stem if file else kind), "AReaL", draft, outcomes)


def trainer_of(given: Mapping[str, Any]) -> str:
    """Return whose settings they are: ppo, sft, rw or dpo, by the data that they train on.

    Raises:
        GraphError: there is no actor, so that nothing is trained.
    """
    if given and not any(key.startswith("actor.") for key in given):
        law = "there is no section `actor`: these are settings of a program that trains nothing"
        remedy = "`rlgraph eval GRAPH` measures a policy, and `rlgraph chat` samples from it"
        raise GraphError([Problem("no-trainer", law, None, (), remedy)])
    kind = given.get("train_dataset.type")
    if kind in SOURCES:
        return str(kind)
    has_rollout = any(key.startswith(("rollout.", "gconfig.")) for key in given)
    if kind is None and not has_rollout and given:
        return "rw" if given.get("actor.is_critic") else "sft"
    return "ppo"


def draft_of(options: Options) -> Draft:
    """Return the parent of a trainer with the nodes that its settings ask for."""
    kind = options.table.kind
    source = SOURCES.get(kind, "prompts")
    if kind == "ppo":
        draft = _policy_gradient(options)
        longest = options["train_dataset.max_length"]
        draft.set("prompts.max_prompt_tokens", longest)
    else:
        draft = Draft(options.table.facts["graphs"][kind])
        draft.set(f"{source}.max_tokens", options["train_dataset.max_length"])
    draft.set(f"{source}.batch", options["train_dataset.batch_size"])
    draft.set(f"{source}.shuffle", bool(options["train_dataset.shuffle"]))
    steps = options["total_train_steps"]
    if steps:
        draft.set("schedule.iterations", steps)
    else:
        draft.remove("schedule.iterations")
        draft.set("schedule.epochs", options["total_train_epochs"])
    if kind == "ppo" and (every := evaluated_every(options)):
        draft.evaluate(every, {}, before=False)
    _places(draft, options)
    if options.is_on("actor.use_lora"):
        targets = options["actor.target_modules"]
        listed = "all-linear" if not targets or "all-linear" in targets else list(targets)
        size = {"rank": options["actor.lora_rank"], "alpha": float(options["actor.lora_alpha"])}
        model = "reward" if kind == "rw" else "policy"
        draft.set(f"models.{model}.train.lora", {**size, "targets": listed})
    return draft


def _policy_gradient(options: Options) -> Draft:
    has_critic = any(key.startswith("critic.") for key in options.values)
    draft = Draft("ppo" if has_critic else "reinforce_pp")
    draft.set("prompts.answer_after", None)
    draft.set("update_policy.aggregate", "token-mean")
    _loss(draft, options)
    last = _rewards(draft, options)
    beta = options["actor.kl_ctl"] if has_reference(options) else 0
    draft.set("shaped.beta", float(beta))
    draft.set("shaped.kl", options["actor.kl_estimator"])
    draft.set("shaped.in", {"rewards": last})
    if not beta:
        draft.remove("ref_logprobs", "models.ref")
        measured = "old_logprobs" if draft.has("old_logprobs") else "rollout_logprobs"
        reads = {"rewards": last, "ref_logprobs": measured}  # read, and times 0
        draft.set("shaped.in", reads)
    if not draft.has("old_logprobs"):
        draft.set("shaped.in", {**draft.value("shaped.in"), "old_logprobs": "rollout_logprobs"})
    gamma, lam = float(options["actor.discount"]), float(options["actor.gae_lambda"])
    if has_critic:
        draft.set("advantages.gamma", gamma)
        draft.set("advantages.lam", lam)
    else:
        draft.set("advantages.gamma", gamma * lam)
    draft.set("advantages.whiten", whitens(options))
    return draft


def has_reference(options: Options) -> bool:
    return any(key.startswith("ref.") for key in options.values)


def whitens(options: Options) -> bool:
    """Return whether advantages are normalised over the batch; AReaL's section has both levels by default."""
    given = any(key.startswith("actor.adv_norm.") for key in options.values)
    levels = [options.values.get(f"actor.adv_norm.{part}_level", "batch") for part in ("mean", "std")]
    return given and levels == ["batch", "batch"]


def _loss(draft: Draft, options: Options) -> None:
    """Give the update AReaL's loss, and the log-probs that its ratio is to."""
    low, high = options["actor.eps_clip"], options["actor.eps_clip_higher"]
    loss: dict[str, Any] = {"kind": "ppo_clip", "clip": low, "clip_high": low if high is None else high}
    if options.is_on("actor.use_sapo_loss"):
        tau, negative = options["actor.sapo_tau_pos"], options["actor.sapo_tau_neg"]
        loss = {"kind": "sapo", "tau": tau, "tau_negative": negative}
    elif options["actor.c_clip"] is not None:
        loss["dual_clip"] = options["actor.c_clip"]
    if options["actor.importance_sampling_level"] == "sequence":
        loss["level"] = "sequence"
    if not low and loss["kind"] == "ppo_clip":
        loss |= {"clip": 1e-9, "clip_high": high or 1e-9}
    draft.edit("replace", **{"update_policy.loss": loss})
    decoupled = options.is_on("actor.use_decoupled_loss")
    if not decoupled and not options.is_on("actor.recompute_logprob"):
        draft.set("update_policy.in.old_logprobs", "rollout_logprobs")
        draft.remove("old_logprobs")
    given = options.below(f"{REJECTS}.*")
    if decoupled and given:
        _reject(draft, given)
    elif draft.has("old_logprobs") and options["rollout.max_head_offpolicyness"]:
        # AReaL weighs nothing by what sampled; the graph has to say so of rows that are older
        draft.edit("add", rollout_weights={"op": "correction.tis", "floor": 1.0, "cap": 1.0})


def _reject(draft: Draft, given: Mapping[str, Any]) -> None:
    """Weigh tokens by the policy over what sampled, where that is within AReaL's bounds."""
    upper, lower = given.get("upper", 5.0), given.get("lower")
    metric, is_token = given.get("metric", "ratio"), given.get("level", "token") == "token"
    if metric == "ratio" and is_token:
        if given.get("action", "mask") == "clamp":
            weights = {"op": "correction.tis", "level": "token", "floor": lower or 0.0, "cap": upper}
        else:
            weights = {"op": "correction.mis", "level": "token", "low": lower or 0.0, "high": upper}
        draft.edit("add", rollout_weights=weights)
        return
    draft.edit("add", weights={"op": "correction.tis", "level": "token", "cap": None})
    over = "token" if is_token else given.get("agg", "mean")
    if metric == "ratio":  # of a geometric mean, from lower to upper
        least = FAR if not lower else -math.log(lower)
        bounds = {"kl": "k1", "threshold": least, "least": -math.log(upper)}
    elif metric == "kl_k1":  # of the policy over what sampled, correction.reject's the other way round
        bounds = {"kl": "k1", "threshold": FAR if lower is None else max(-lower, 1e-9), "least": -upper}
    else:
        bounds = {"kl": metric.removeprefix("kl_"), "threshold": upper}
        if lower is not None:
            bounds["least"] = lower
    draft.edit("add", rollout_weights={"op": "correction.reject", "over": over, **bounds})


def _rewards(draft: Draft, options: Options) -> str:
    """Shape, scale and normalise rewards, in AReaL's order; return the column of the last."""
    last = "rewards"
    if options.is_on("actor.overlong_reward_penalty"):
        limit = options["actor.max_new_tokens"]
        penalty = {"limit": limit, "buffer": options["actor.overlong_tokens"]}
        factor = float(options["actor.overlong_penalty_factor"])
        draft.edit(
            "add", overlong={"op": "reward.overlong", **penalty, "penalty": factor, "in": {"rewards": last}}
        )
        last = "overlong"
    most = float(options["actor.reward_clip"])
    affine = {"shift": float(options["actor.reward_bias"]), "factor": float(options["actor.reward_scaling"])}
    draft.edit(
        "add", scaled={"op": "reward.scale", **affine, "low": -most, "high": most, "in": {"rewards": last}}
    )
    last = "scaled"
    if any(key.startswith("actor.reward_norm.") for key in options.values):
        given = options.values
        levels = {
            part: given.get(f"actor.reward_norm.{part}_level", "batch") or "none" for part in ("mean", "std")
        }
        normal = {"op": "reward.whiten", **levels, "eps": float(options["actor.reward_norm.eps"] or 1e-5)}
        if options.is_on("actor.reward_norm.mean_leave1out"):
            normal["leave_one_out"] = True
        draft.edit("add", normal={**normal, "in": {"rewards": last}})
        last = "normal"
    return last


def sizes_of(backend: object) -> dict[str, int]:
    """Return the parallel sizes of a backend by their letters.

    Example:
        >>> sizes_of("megatron:d2p2t1")
        {'d': 2, 'p': 2, 't': 1}
    """
    text = str(backend or "").rpartition(":")[2]
    text = re.sub(r"^\w+\.", "", text)
    if "(" in text:  # of a mixture: attention and experts are divided by themselves
        experts = re.search(r"ffn:([a-z0-9]+)", str(backend))
        attention = re.search(r"attn:([a-z0-9]+)", str(backend))
        sizes = {letter: int(n) for letter, n in SIZE.findall(attention[1] if attention else "")}
        return sizes | {"e": int(dict(SIZE.findall(experts[1] if experts else "")).get("e", 1))}
    return {letter: int(n) for letter, n in SIZE.findall(text)}


def engines_of(options: Options) -> tuple[dict[str, int], dict[str, int]]:
    """Return the sizes of generation and of training; allocation_mode has both, of older configurations."""
    mode = options["allocation_mode"]
    if isinstance(mode, str) and "+" in mode:
        generates, _, trains = mode.partition("+")
        return sizes_of(generates), sizes_of(trains)
    return sizes_of(options["rollout.backend"]), sizes_of(options["actor.backend"] or mode)


def devices_of(sizes: Mapping[str, int]) -> int:
    return math.prod(sizes.get(letter, 1) for letter in "dptc")


def _places(draft: Draft, options: Options) -> None:
    """Give each engine its devices: generation has a pool of its own, and runs ahead."""
    generates, trains = engines_of(options)
    model = "reward" if options.table.kind == "rw" else "policy"
    for letter, ours in (("t", "tensor_parallel"), ("c", "sequence_parallel"), ("e", "expert_parallel")):
        draft.set(f"models.{model}.train.{ours}", trains.get(letter, 1))
    if options.table.kind != "ppo" or not generates or not trains:
        whole = options["cluster.n_nodes"] * options["cluster.n_gpus_per_node"]
        draft.set("pools.main.devices", devices_of(trains) if trains else whole)
        return
    draft.edit(
        "set", pools={"train": {"devices": devices_of(trains)}, "gen": {"devices": devices_of(generates)}}
    )
    draft.set("models.policy.serve.pool", "gen")
    draft.set("models.policy.train.pool", "train")
    draft.set("models.policy.serve.tensor_parallel", generates.get("t", 1))
    if ahead := options["rollout.max_head_offpolicyness"]:
        draft.set("schedule.stream", {"staleness": int(ahead), "too_old": "wait"})


def told(options: Options) -> Iterator[KeyOutcome]:
    """Yield what the user has to see to that stands behind no key, or behind several."""
    facts = options.table.facts["told"]
    yield KeyOutcome("the data", UNKNOWN, "hand", facts["data"])
    generates, trains = engines_of(options)
    if any(sizes.get("p", 1) > 1 for sizes in (generates, trains)):
        text = "layers are not dealt out to stages: the devices of a pool hold all of them, divided"
        yield KeyOutcome("pipeline parallel", UNKNOWN, "hand", text)
    if options.table.kind != "ppo":
        return
    yield KeyOutcome("the reward", UNKNOWN, "hand", facts["reward"])
    if options["actor.kl_ctl"] and not has_reference(options):
        yield KeyOutcome("the KL", UNKNOWN, "hand", facts["no_reference"])
    elif options["actor.kl_ctl"] and options.is_on("actor.use_decoupled_loss"):
        yield KeyOutcome("the KL", UNKNOWN, "hand", facts["kl_sampled"])
    given = options.below(f"{REJECTS}.*")
    metric = given.get("metric", "ratio")
    if given.get("level") == "sequence" and metric == "ratio":
        yield KeyOutcome(REJECTS, UNKNOWN, "hand", facts["sequence"])
    if metric == "kl_k3":
        yield KeyOutcome(REJECTS, UNKNOWN, "hand", facts["k3"])
    elif given.get("level") == "sequence" and given.get("agg") == "max" and metric != "kl_k2":
        yield KeyOutcome(REJECTS, UNKNOWN, "hand", facts["max"])
    if given.get("action") == "clamp" and metric != "ratio":
        yield KeyOutcome(REJECTS, UNKNOWN, "hand", facts["clamp"])
    if options["actor.eps_clip"] == 0 and not options.is_on("actor.use_sapo_loss"):
        text = "a clip of 0 leaves no gradient but at a ratio of 1: the graph has 1e-9"
        yield KeyOutcome("actor.eps_clip", 0, "hand", text)


def evaluated_every(options: Options) -> int | str:
    """Return how often AReaL evaluates, 0 where it does not: of several counts the first."""
    steps, seconds, epochs = (options[f"evaluator.freq_{unit}"] for unit in ("steps", "secs", "epochs"))
    if steps:
        return int(steps)
    if seconds:
        return str(duration_of(seconds))
    return str(epochs_of(epochs)) if epochs else 0


def duration(kind: str) -> Callable[[float, Options], Interval]:
    """Return what reads how many seconds lie between two checkpoints, or two evaluations.

    AReaL's are due by each count that is given, steps, seconds or epochs; the graph has the first of them.

    Args:
        kind: ``saver`` or ``evaluator``.
    """

    def read(value: float, options: Options) -> Interval:
        _only_one(options, f"{kind}.freq_steps")
        return duration_of(value)

    return read


def epochs(kind: str) -> Callable[[float, Options], Interval]:
    """Return what reads how many epochs lie between them, as ``duration`` does seconds."""

    def read(value: float, options: Options) -> Interval:
        _only_one(options, f"{kind}.freq_steps", f"{kind}.freq_secs")
        return epochs_of(value)

    return read


def _only_one(options: Options, *others: str) -> None:
    if other := next((key for key in others if options[key]), None):
        raise Hand(f"{other} counts too, and the graph has one interval: that of {other}")


def min_lr(value: float, options: Options) -> float:
    if options["actor.optimizer.lr_scheduler_type"] == "constant":
        raise Idle("decides nothing: the rate does not fall")
    return float(value)


def micro_tokens(value: int, options: Options) -> int:
    """Return the tokens of a micro-batch on all devices that share its rows, as AReaL counts them."""
    return int(value)


def same_model(value: str, options: Options) -> str:
    if value != options["actor.path"]:
        raise Hand("the reference is the policy as it began; another is models.ref.path")
    raise Idle("the reference is the policy as it began")


def leave_one_out(value: bool, options: Options) -> bool:
    level = options.values.get("actor.reward_norm.std_level", "batch")
    if value and level not in (None, "none"):
        raise Hand(
            "the graph leaves a sample out of the deviation too; AReaL takes that over all, around the others"
        )
    return value


def group_size(value: int, options: Options) -> int:
    if value != options["gconfig.n_samples"]:
        raise Hand("a group is the samples of a prompt, rollout.n")
    raise Idle("a group is the samples of a prompt")


BY: By = {
    **COMMON,
    "betas": lambda _, o: [float(o[f"actor.optimizer.beta{n}"]) for n in (1, 2)],
    "share": warmup_share,
    "min_lr": min_lr,
    "micro_tokens": micro_tokens,
    "top_k": lambda value, _: 0 if value >= ALL else int(value),
    "compiled": lambda value, _: bool(value),
    "own_tokenizer": own_tokenizer("actor.path"),
    "same_model": same_model,
    "leave_one_out": leave_one_out,
    "group_size": group_size,
    "saved_seconds": duration("saver"),
    "saved_epochs": epochs("saver"),
    "evaluated_seconds": duration("evaluator"),
    "evaluated_epochs": epochs("evaluator"),
}
