"""AReaL: which nodes its trainers would run, and values that follow from several keys."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlgraph.errors import GraphError, Problem
from rlgraph.importing.draft import Draft
from rlgraph.importing.importer import (
    COMMON,
    Converters,
    Hand,
    Idle,
    Imported,
    KeyOutcome,
    duration_of,
    epochs_of,
    graph_name,
    outcomes_of,
    own_tokenizer,
    remark,
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
BOTH_OVER_BATCH = {"mean": "batch", "std": "batch"}
LEAST_CLIP = 1e-9  # of a ratio, in place of 0
# letters of a backend, as fsdp:d2t4, and the settings of a model that trains
PARALLEL_SIZES = {"t": "tensor_parallel", "c": "sequence_parallel", "e": "expert_parallel"}
ALL = 100_000_000  # AReaL's top_k that keeps all


def import_areal(file: Path | None, overrides: Sequence[str], folder: Path = Path()) -> Imported:
    """Return the graph, to be written to a folder, that does what AReaL's trainer does with these settings.

    Raises:
        GraphError: the settings can't be read, or are of no trainer.
    """
    settings = read_inherited(file, overrides)
    kind = trainer_of(settings)
    options = Options(table_of("areal", kind), settings, folder)
    draft = draft_of(options)
    outcomes = [*remarks(options), *outcomes_of(options, draft, CONVERTERS), *combined(draft)]
    name = kind if file is None else file.stem
    return Imported(graph_name(name), "AReaL", draft, outcomes)


def trainer_of(settings: Mapping[str, Any]) -> str:
    """Return whose settings they are: ppo, sft, rw or dpo, by the data that they train on.

    Raises:
        GraphError: there is no actor, so that nothing is trained.
    """
    if not settings:
        return "ppo"
    has_actor = any(key.startswith("actor.") for key in settings)
    if not has_actor:
        law = "there is no section `actor`: these settings are for a program that does not train"
        remedy = "`rlgraph eval GRAPH` measures a policy, and `rlgraph chat` samples from it"
        raise GraphError([Problem("no-trainer", law, remedy=remedy)])
    kind = settings.get("train_dataset.type")
    if kind in SOURCES:
        return str(kind)
    has_rollout = any(key.startswith(("rollout.", "gconfig.")) for key in settings)
    if kind is not None or has_rollout:
        return "ppo"
    return "rw" if settings.get("actor.is_critic") else "sft"


def draft_of(options: Options) -> Draft:
    """Return the parent of a trainer with the nodes that its settings ask for."""
    kind = options.table.kind
    source = SOURCES.get(kind, "prompts")
    if kind == "ppo":
        draft = _policy_gradient(options)
        draft.set("prompts.max_prompt_tokens", options["train_dataset.max_length"])
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
    interval = evaluation_interval(options)
    if interval and kind == "ppo":
        draft.evaluate(interval, {}, before=False)
    _places(draft, options)
    if options.is_on("actor.use_lora"):
        draft.set(f"models.{_trained_model(options)}.train.lora", _lora(options))
    return draft


def _trained_model(options: Options) -> str:
    return "reward" if options.table.kind == "rw" else "policy"


def _lora(options: Options) -> dict[str, Any]:
    targets = options["actor.target_modules"]
    adapts_all = not targets or "all-linear" in targets
    return {
        "rank": options["actor.lora_rank"],
        "alpha": float(options["actor.lora_alpha"]),
        "targets": "all-linear" if adapts_all else list(targets),
    }


def _policy_gradient(options: Options) -> Draft:
    has_critic = has_section(options, "critic")
    draft = Draft("ppo" if has_critic else "reinforce_pp")
    draft.set("prompts.answer_after", None)
    draft.set("update_policy.aggregate", "token-mean")
    _loss(draft, options)
    rewards = _rewards(draft, options)
    _kl(draft, options, rewards)
    gamma = float(options["actor.discount"])
    lam = float(options["actor.gae_lambda"])
    if has_critic:
        draft.set("advantages.gamma", gamma)
        draft.set("advantages.lam", lam)
    else:  # without values GAE is a sum of rewards that both discount
        draft.set("advantages.gamma", gamma * lam)
    draft.set("advantages.whiten", whitens(options))
    return draft


def _kl(draft: Draft, options: Options, rewards: str) -> None:
    """Take the KL off each token's reward, where there is a reference."""
    beta = 0.0
    if has_section(options, "ref"):
        beta = float(options["actor.kl_ctl"] or 0)
    reads = {"rewards": rewards}
    has_old_logprobs = draft.has("old_logprobs")
    policy_logprobs = "old_logprobs" if has_old_logprobs else "rollout_logprobs"
    if beta == 0:
        draft.remove("ref_logprobs", "models.ref")
        reads["ref_logprobs"] = policy_logprobs  # they are read, and times 0
    if not has_old_logprobs:
        reads["old_logprobs"] = policy_logprobs
    draft.set("shaped.beta", beta)
    draft.set("shaped.kl", options["actor.kl_estimator"])
    draft.set("shaped.in", reads)


def has_section(options: Options, section: str) -> bool:
    return any(key.startswith(f"{section}.") for key in options.values)


def whitens(options: Options) -> bool:
    """Return whether advantages are normalised over the batch; AReaL's section has both levels by default."""
    if not has_section(options, "actor.adv_norm"):
        return False
    return _levels(options, "actor.adv_norm") == BOTH_OVER_BATCH


def _levels(options: Options, section: str) -> dict[str, str]:
    """Return over what a mean and a deviation are taken, by AReaL's words; "none" where they are not."""
    levels = {}
    for statistic in ("mean", "std"):
        levels[statistic] = options.values.get(f"{section}.{statistic}_level", "batch") or "none"
    return levels


def _loss(draft: Draft, options: Options) -> None:
    """Give the update AReaL's loss, and the log-probs that its ratio is to."""
    draft.edit("replace", **{"update_policy.loss": _loss_attributes(options)})
    is_decoupled = options.is_on("actor.use_decoupled_loss")
    if not is_decoupled and not options.is_on("actor.recompute_logprob"):
        draft.set("update_policy.in.old_logprobs", "rollout_logprobs")
        draft.remove("old_logprobs")
    rejection = options.nested(f"{REJECTS}.*")
    if is_decoupled and rejection:
        _reject(draft, rejection)
    elif draft.has("old_logprobs") and options["rollout.max_head_offpolicyness"]:
        # AReaL weighs nothing by what sampled; the graph has to say so of rows that are older
        draft.edit("add", rollout_weights={"op": "correction.tis", "floor": 1.0, "cap": 1.0})


def _loss_attributes(options: Options) -> dict[str, Any]:
    loss: dict[str, Any]
    if options.is_on("actor.use_sapo_loss"):
        loss = {
            "kind": "sapo",
            "tau": options["actor.sapo_tau_pos"],
            "tau_negative": options["actor.sapo_tau_neg"],
        }
    else:
        low, high = _clip_bounds(options)
        loss = {"kind": "ppo_clip", "clip": low, "clip_high": high}
        if options["actor.c_clip"] is not None:
            loss["dual_clip"] = options["actor.c_clip"]
    if options["actor.importance_sampling_level"] == "sequence":
        loss["level"] = "sequence"
    return loss


def _clip_bounds(options: Options) -> tuple[float, float]:
    """Return how far a ratio may be below and above 1; the op takes bounds above 0."""
    low = options["actor.eps_clip"]
    high = options["actor.eps_clip_higher"]
    if not low:
        return LEAST_CLIP, high or LEAST_CLIP
    if high is None:
        return low, low
    return low, high


def _reject(draft: Draft, settings: Mapping[str, Any]) -> None:
    """Weigh tokens by the policy over what sampled, where that is within AReaL's bounds."""
    upper = settings.get("upper", 5.0)
    lower = settings.get("lower")
    metric = settings.get("metric", "ratio")
    is_token = settings.get("level", "token") == "token"
    if is_token and metric == "ratio":
        _weigh_tokens(draft, settings.get("action", "mask"), lower or 0.0, upper)
        return
    draft.edit("add", weights={"op": "correction.tis", "level": "token", "cap": None})
    over = "token" if is_token else settings.get("agg", "mean")
    bounds = _rejection_bounds(metric, lower, upper)
    draft.edit("add", rollout_weights={"op": "correction.reject", "over": over, **bounds})


def _weigh_tokens(draft: Draft, action: str, low: float, high: float) -> None:
    """Weigh tokens by their ratios, those out of bounds by the bound, or by 0."""
    if action == "clamp":
        weights = {"op": "correction.tis", "level": "token", "floor": low, "cap": high}
    else:
        weights = {"op": "correction.mis", "level": "token", "low": low, "high": high}
    draft.edit("add", rollout_weights=weights)


def _rejection_bounds(metric: str, lower: float | None, upper: float) -> dict[str, Any]:
    """Return the bounds of correction.reject, which takes what sampled over the policy."""
    bounds: dict[str, Any]
    match metric:
        case "ratio":  # of a geometric mean, from lower to upper
            threshold = -math.log(lower) if lower else FAR
            bounds = {"kl": "k1", "threshold": threshold, "least": -math.log(upper)}
        case "kl_k1":  # of the policy over what sampled, the other way round
            threshold = FAR if lower is None else max(-lower, 1e-9)
            bounds = {"kl": "k1", "threshold": threshold, "least": -upper}
        case _:
            bounds = {"kl": metric.removeprefix("kl_"), "threshold": upper}
            if lower is not None:
                bounds["least"] = lower
    return bounds


def _rewards(draft: Draft, options: Options) -> str:
    """Shape, scale and normalise rewards, in AReaL's order; return the column with the final rewards."""
    rewards = "rewards"
    if options.is_on("actor.overlong_reward_penalty"):
        overlong = {
            "op": "reward.overlong",
            "limit": options["actor.max_new_tokens"],
            "buffer": options["actor.overlong_tokens"],
            "penalty": float(options["actor.overlong_penalty_factor"]),
            "in": {"rewards": rewards},
        }
        draft.edit("add", overlong=overlong)
        rewards = "overlong"
    bound = float(options["actor.reward_clip"])
    scaled = {
        "op": "reward.scale",
        "shift": float(options["actor.reward_bias"]),
        "factor": float(options["actor.reward_scaling"]),
        "low": -bound,
        "high": bound,
        "in": {"rewards": rewards},
    }
    draft.edit("add", scaled=scaled)
    rewards = "scaled"
    section = "actor.reward_norm"
    if has_section(options, section):
        eps = float(options[f"{section}.eps"] or 1e-5)
        normal: dict[str, Any] = {"op": "reward.whiten", **_levels(options, section), "eps": eps}
        if options.is_on(f"{section}.mean_leave1out"):
            normal["leave_one_out"] = True
        draft.edit("add", normal={**normal, "in": {"rewards": rewards}})
        rewards = "normal"
    return rewards


def sizes_of(backend: object) -> dict[str, int]:
    """Return the parallel sizes of a backend by their letters.

    Example:
        >>> sizes_of("megatron:d2p2t1")
        {'d': 2, 'p': 2, 't': 1}
    """
    text = str(backend or "").rpartition(":")[2]
    if "(" not in text:
        return _sizes_in(re.sub(r"^\w+\.", "", text))
    # of a mixture of experts: attention and experts are divided separately
    sizes: dict[str, int] = {}
    expert_ranks = 1
    attention = re.search(r"attn:([a-z0-9]+)", str(backend))
    if attention:
        sizes = _sizes_in(attention[1])
    experts = re.search(r"ffn:([a-z0-9]+)", str(backend))
    if experts:
        expert_ranks = _sizes_in(experts[1]).get("e", 1)
    return {**sizes, "e": expert_ranks}


def _sizes_in(text: str) -> dict[str, int]:
    return {letter: int(size) for letter, size in SIZE.findall(text)}


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
    train = f"models.{_trained_model(options)}.train"
    for letter, setting in PARALLEL_SIZES.items():
        draft.set(f"{train}.{setting}", trains.get(letter, 1))
    has_two_pools = options.table.kind == "ppo" and generates and trains
    if not has_two_pools:
        all_devices = options["cluster.n_nodes"] * options["cluster.n_gpus_per_node"]
        draft.set("pools.main.devices", devices_of(trains) if trains else all_devices)
        return
    pools = {"train": {"devices": devices_of(trains)}, "gen": {"devices": devices_of(generates)}}
    draft.edit("set", pools=pools)
    draft.set("models.policy.serve.pool", "gen")
    draft.set("models.policy.train.pool", "train")
    draft.set("models.policy.serve.tensor_parallel", generates.get("t", 1))
    ahead = options["rollout.max_head_offpolicyness"]
    if ahead:
        draft.set("schedule.buffer", {"staleness": int(ahead), "too_old": "wait"})


def remarks(options: Options) -> Iterator[KeyOutcome]:
    """Yield what the user has to look after and what no single key stands for."""
    facts = options.table.facts["told"]
    yield remark("the data", facts["data"])
    has_pipeline = any(sizes.get("p", 1) > 1 for sizes in engines_of(options))
    if has_pipeline:
        text = "there are no pipeline stages: all layers are divided among the devices of a pool"
        yield remark("pipeline parallel", text)
    if options.table.kind != "ppo":
        return
    yield remark("the reward", facts["reward"])
    if options["actor.kl_ctl"]:
        yield from _remarks_on_kl(options, facts)
    yield from _remarks_on_rejection(options.nested(f"{REJECTS}.*"), facts)
    clips = not options.is_on("actor.use_sapo_loss")
    if clips and options["actor.eps_clip"] == 0:
        text = "a clip of 0 leaves a gradient only at a ratio of 1: the graph has 1e-9"
        yield KeyOutcome("actor.eps_clip", 0, "hand", text)


def _remarks_on_kl(options: Options, facts: Mapping[str, str]) -> Iterator[KeyOutcome]:
    if not has_section(options, "ref"):
        yield remark("the KL", facts["no_reference"])
    elif options.is_on("actor.use_decoupled_loss"):
        yield remark("the KL", facts["kl_sampled"])


def _remarks_on_rejection(settings: Mapping[str, Any], facts: Mapping[str, str]) -> Iterator[KeyOutcome]:
    metric = settings.get("metric", "ratio")
    is_sequence = settings.get("level") == "sequence"
    if is_sequence and metric == "ratio":
        yield remark(REJECTS, facts["sequence"])
    takes_most = is_sequence and settings.get("agg") == "max"
    if metric == "kl_k3":
        yield remark(REJECTS, facts["k3"])
    elif takes_most and metric != "kl_k2":
        yield remark(REJECTS, facts["max"])
    if settings.get("action") == "clamp" and metric != "ratio":
        yield remark(REJECTS, facts["clamp"])


def evaluation_interval(options: Options) -> int | str:
    """Return how often AReaL evaluates, 0 where it does not: of several counts the first."""
    steps = options["evaluator.freq_steps"]
    seconds = options["evaluator.freq_secs"]
    epochs = options["evaluator.freq_epochs"]
    if steps:
        return int(steps)
    if seconds:
        return str(duration_of(seconds))
    if epochs:
        return str(epochs_of(epochs))
    return 0


def duration(kind: str) -> Callable[[float, Options], Interval]:
    """Return a converter of the seconds between two checkpoints, or two evaluations.

    AReaL's are due by each count that is given, steps, seconds or epochs; the graph has the first of them.

    Args:
        kind: ``saver`` or ``evaluator``.
    """

    def interval(value: float, options: Options) -> Interval:
        _refuse_second_count(options, f"{kind}.freq_steps")
        return duration_of(value)

    return interval


def epochs(kind: str) -> Callable[[float, Options], Interval]:
    """Return a converter of the epochs between them."""

    def interval(value: float, options: Options) -> Interval:
        _refuse_second_count(options, f"{kind}.freq_steps", f"{kind}.freq_secs")
        return epochs_of(value)

    return interval


def _refuse_second_count(options: Options, *keys: str) -> None:
    for key in keys:
        if options[key]:
            raise Hand(f"{key} is set too, but the graph has only one interval: that of {key}")


def min_lr(value: float, options: Options) -> float:
    if options["actor.optimizer.lr_scheduler_type"] == "constant":
        raise Idle("has no effect: the rate does not fall")
    return float(value)


def micro_tokens(value: int, options: Options) -> int:
    """Return the tokens of a micro-batch on all devices that share its rows, as AReaL counts them."""
    return int(value)


def same_model(value: str, options: Options) -> str:
    if value != options["actor.path"]:
        raise Hand("the reference is the initial policy; for another one, set models.ref.path")
    raise Idle("the reference is the policy as it began")


def leave_one_out(value: bool, options: Options) -> bool:
    level = options.values.get("actor.reward_norm.std_level", "batch")
    if value and level not in (None, "none"):
        raise Hand(
            "the graph also leaves the sample out of the deviation; AReaL takes the deviation over all "
            "samples, around the mean of the others"
        )
    return value


def group_size(value: int, options: Options) -> int:
    if value != options["gconfig.n_samples"]:
        raise Hand("a group is all samples of a prompt, rollout.n")
    raise Idle("a group is the samples of a prompt")


CONVERTERS: Converters = {
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
