"""TRL: which nodes its trainers would run, and values that follow from several keys."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
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
    epochs_of,
    graph_name,
    is_reference,
    outcomes_of,
    remark,
)
from rlgraph.importing.options import Options, read_settings
from rlgraph.importing.script import (
    TRAINERS,
    RewardFunction,
    ScriptSettings,
    names_of,
    reward_function,
    settings_of,
)
from rlgraph.importing.table import KeyTable, table_of
from rlgraph.syntax.interval import Interval

NORMALIZE_EACH = "normalize_then_sum"  # multi_objective_aggregation: rewards are normalised one by one
# rewards that are normalised one by one, over the samples of a prompt
NORMALIZED = {"op": "advantage.gdpo", "eps": 1e-4, "over": "samples"}
PORTS = ("", "_2", "_3", "_4")  # of the rewards that reward.sum adds
# nodes of the graphs that rewards are put into
NODES = ("prompts", "rollout", "rewards", "advantages", "old_logprobs", "ref_logprobs", "update_policy")
EVALUATED = ("grpo", "rloo")  # trainers whose graphs get an evaluation, of the mean reward
PARENTS = {"reward": "reward_model", "distillation": "distill", "cpo": "dpo"}  # graphs of other names
FROM_SAMPLER = {"old_logprobs": "rollout_logprobs"}
NO_BOUND = 1e9  # a ratio is at most exp(20)
OWN_COLUMNS = ("prompt", "question", "answer", "source")  # columns that data.prompts writes itself
KWARGS = "list the columns that it reads from **kwargs, both in `columns` of its node and in prompts.columns"


class ScriptOptions(Options):
    """Options in which an expression of a script, ``${source}``, is not given: its key needs a hand."""

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if not is_reference(value):
            return value
        row = self.table.rows.get(key)
        return None if row is None else row.default


def import_trl(
    file: Path, overrides: Sequence[str], folder: Path = Path(), trainer: str | None = None
) -> Imported:
    """Return the graph, to be written to a folder, that does what a trainer of TRL does.

    ``file`` is a YAML file of settings, or a script, which is not run.

    Raises:
        GraphError: the settings can't be read, or don't say which trainer they are of.
    """
    script = ScriptSettings("")  # of a YAML file nothing is left unread
    if file.suffix == ".py":
        script = settings_of(file, trainer)
        settings = script.values
    else:
        settings = read_settings(file, ())
    settings |= read_settings(None, overrides)
    if settings.get("reward_funcs"):
        settings["reward_funcs"] = names_of(settings["reward_funcs"])
    kind = trainer or script.kind or guessed(settings)
    options = ScriptOptions(_table(kind), settings, folder)
    functions = reward_functions(options["reward_funcs"] or (), file, options)
    draft = draft_of(options, functions)
    outcomes = []
    for source, text in script.unread:
        outcomes.append(remark(f"settings of {source}", f"these settings are not read: {text}"))
    outcomes += remarks(options, functions)
    outcomes += outcomes_of(options, draft, CONVERTERS)
    return Imported(graph_name(str(options["run_name"] or file.stem)), "TRL", draft, outcomes)


def _table(kind: str) -> KeyTable:
    """Return the table of a trainer; for a reward model, the rows of the policy are those of its model."""
    table = table_of("trl", kind)
    if kind != "reward":
        return table
    rows = dict(table.rows)
    for key, row in table.rows.items():
        if row.to:
            to = str(row.to).replace("models.policy.", "models.reward.")
            rows[key] = replace(row, entry={**row.entry, "to": to})
    return replace(table, rows=rows)


def reward_functions(names: Sequence[str], file: Path, options: Options) -> list[RewardFunction]:
    """Return the functions of some names; each has a name that no other function or node has."""
    functions: list[RewardFunction] = []
    used_names = {*NODES}
    for place, name in enumerate(names):
        function = reward_function(str(name), file, options, place)
        if function.name in used_names:
            function = replace(function, name=f"{function.name}_{place + 1}")
        used_names.add(function.name)
        functions.append(function)
    return functions


def guessed(settings: Mapping[str, Any]) -> str:
    """Return the only trainer whose table has all keys.

    Raises:
        GraphError: there is none, or there are several.
    """
    fitting = []
    for kind in TRAINERS:
        table = table_of("trl", kind)
        keys = Options(table, settings).values
        if all(table.row(key) for key in keys):
            fitting.append(kind)
    if len(fitting) != 1:
        candidates = " or ".join(fitting) or "no one"
        law = f"these settings are of {candidates} of TRL's trainers"
        raise GraphError([Problem("no-trainer", law, None, TRAINERS, "choose one, as in --trainer grpo")])
    return fitting[0]


def draft_of(options: Options, functions: Sequence[RewardFunction]) -> Draft:
    """Return the parent of a trainer with the nodes that its switches ask for."""
    kind = options.table.kind
    draft = Draft(PARENTS.get(kind, kind))
    ends_by_steps = options.is_on("max_steps")
    if not ends_by_steps and not options.is_odd("num_train_epochs"):
        draft.remove("schedule.iterations")
    if "num_processes" in options.values:
        draft.set("pools.main.devices", options["num_processes"])
    match kind:
        case "dpo":
            draft.set("pairs.question", "prompt")
            _pair_losses(draft, options)
        case "cpo":
            draft.set("pairs.question", "prompt")
            _without_reference(draft, options)
        case "reward" | "orpo":
            draft.set("pairs.question", "prompt")
        case "sft" | "kto":
            draft.set("examples.question", "prompt")
            draft.set("examples.answer", "completion")
            if options["loss_type"] == "apo_zero_unpaired":
                draft.set("preference.drift", False)
                draft.remove("mismatched", "kl_logprobs", "kl_ref_logprobs")
        case "distillation":
            _data(draft, options, ())
            draft.set("update_policy.minibatches", 1)
        case "grpo":
            _data(draft, options, functions)
            _reference(draft, options)
            _evaluation(draft, options)
            _loss(draft, options)
            _scale(draft, options)
            _entropy(draft, options)
            _correction(draft, options)
            _mask_truncated(draft, options)
        case "rloo":
            _data(draft, options, functions)
            _reference(draft, options)
            _evaluation(draft, options)
            _rloo(draft, options)
            _mask_truncated(draft, options)
    if options.is_on("sync_ref_model") and draft.has("models.ref"):
        _refresh_reference(draft, options)
    return draft


def _refresh_reference(draft: Draft, options: Options) -> None:
    """Move the reference towards the policy every so many iterations."""
    iterations = round(options["ref_model_sync_steps"] / optimizer_steps(options))
    refresh = {
        "op": "update.copy",
        "model": "ref",
        "of": "policy@next",
        "every": max(iterations, 1),
        "mix": options["ref_model_mixup_alpha"],
    }
    draft.edit("add", refresh=refresh)


def _mask_truncated(draft: Draft, options: Options) -> None:
    """Leave truncated responses out of the loss, where TRL does."""
    if options.is_on("mask_truncated_completions"):
        draft.edit("add", whole_mask={"op": "mask.complete"})
        reads = draft.value("update_policy.in") or {}
        draft.set("update_policy.in", {**reads, "loss_mask": "whole_mask"})


def _data(draft: Draft, options: Options, functions: Sequence[RewardFunction]) -> None:
    """Read TRL's rows, and score them by the reward functions."""
    longest = options["max_prompt_length"]
    draft.set("prompts.question", "prompt")
    draft.set("prompts.answer_after", None)
    draft.set("prompts.max_prompt_tokens", longest)
    draft.set("prompts.truncate", "left" if longest else None)
    if not functions:
        return
    _columns(draft, functions)
    normalizes_each = options["multi_objective_aggregation"] == NORMALIZE_EACH
    if len(functions) > 1:
        _several_rewards(draft, options, functions, normalizes_each)
        return
    draft.edit("replace", rewards=functions[0].node())
    if normalizes_each:
        draft.edit("replace", advantages={**NORMALIZED, "weight_2": 0.0})


def _columns(draft: Draft, functions: Sequence[RewardFunction]) -> None:
    """Read the columns of the data that reward functions take."""
    columns: dict[str, Any] = {"trl_prompt": {"from": "prompt", "type": "json"}}
    answer = None
    for function in functions:
        for column in function.columns:
            if column == "answer":
                answer = "answer"
            if column not in OWN_COLUMNS:
                columns[column] = {"type": "json"}
    draft.set("prompts.answer", answer)
    draft.set("prompts.columns", columns)


def _several_rewards(
    draft: Draft, options: Options, functions: Sequence[RewardFunction], normalizes_each: bool
) -> None:
    """Add the rewards of several functions with their weights."""
    weights = options["reward_weights"] or [1.0] * len(functions)
    reads: dict[str, str] = {}
    weight_of: dict[str, float] = {}
    for port, function, weight in zip(PORTS, functions, weights, strict=False):
        name = function.name
        outs = {"rewards": name, "failed": f"{name}_failed"}
        draft.edit("add", **{name: {**function.node(), "out": outs}})
        reads[f"rewards{port}"] = name
        weight_of[f"weight{port}"] = float(weight)
    draft.edit("replace", rewards={"op": "reward.sum", "in": reads, **weight_of})
    if normalizes_each:
        draft.edit("replace", advantages={**NORMALIZED, "in": reads, **weight_of})


def _reference(draft: Draft, options: Options) -> None:
    """Put the KL where TRL has it: GRPO's into the loss, RLOO's into the reward."""
    beta = options["beta"]
    is_in_reward = options.table.kind == "rloo"
    if is_in_reward or not beta:
        draft.remove("update_policy.kl_coef")
    if not beta:
        draft.remove("ref_logprobs", "models.ref")
    elif is_in_reward:
        draft.edit("add", old_logprobs={"op": "logprobs", "model": "policy"})
        draft.add_kl_per_sample(beta=beta)


def _rloo(draft: Draft, options: Options) -> None:
    """Clip rewards, scale advantages over the batch, and clip the ratio of responses, where RLOO does."""
    rewards = "rewards"
    bounds = options["reward_clip_range"]
    if bounds:
        low, high = map(float, bounds)
        draft.edit("insert", clipped={"op": "reward.scale", "on": "rewards", "low": low, "high": high})
        rewards = "clipped"
    if options.is_on("normalize_advantages"):
        reads = draft.value("advantages.in") or {"rewards": rewards}
        _normalize_advantages(draft, reads)
    if _minibatches(options) * int(options["num_iterations"]) <= 1:
        return  # the ratio of the only step is 1
    if not draft.has("old_logprobs"):
        draft.edit("add", old_logprobs={"op": "logprobs", "model": "policy"})
    low, high = _clip_bounds(options)
    loss = {"kind": "ppo_clip", "level": "product", "clip": low, "clip_high": high}
    draft.edit("replace", **{"update_policy.loss": loss})
    draft.set("update_policy.aggregate", "seq-mean-token-mean")


def _normalize_advantages(draft: Draft, reads: Mapping[str, str]) -> None:
    """Compare rewards within their group, leaving a sample out of its own mean, then over the batch."""
    compared = {"op": "reward.whiten", "mean": "group", "std": "none", "leave_one_out": True, "in": reads}
    normal = {"op": "reward.whiten", "mean": "batch", "std": "batch", "eps": 1e-4}
    draft.edit("add", compared=compared)
    draft.edit("add", normal={**normal, "in": {"rewards": "compared"}})
    draft.edit("add", token_rewards={"op": "reward.kl_penalty", "beta": 0.0, "in": {"rewards": "normal"}})
    spread = {"op": "advantage.reinforce_pp", "gamma": 1.0, "whiten": False}
    draft.edit("replace", advantages={**spread, "in": {"rewards": "token_rewards"}})


def _clip_bounds(options: Options) -> tuple[float, float]:
    low = options["epsilon"]
    high = options["epsilon_high"]
    if high is None:
        high = low
    return low, high


def _loss(draft: Draft, options: Options) -> None:
    """Give the graph the loss of ``loss_type``, its mean, and the level of its ratio."""
    losses = options.table.facts["losses"]
    spec = losses.get(options["loss_type"], losses["dapo"])
    low, high = _clip_bounds(options)
    bounds = {"epsilon": low, "epsilon_high": high}
    loss: dict[str, Any] = {"kind": spec["kind"]}
    for attribute, key in spec["with"].items():
        value = bounds.get(key, options[key])
        if value is not None:
            loss[attribute] = value
    if options["importance_sampling_level"] == "sequence" and spec["kind"] != "vespo":
        loss["level"] = "sequence"
    draft.edit("replace", **{"update_policy.loss": loss})
    draft.set("update_policy.aggregate", spec["aggregate"])
    if spec["aggregate"] == "seq-mean-token-sum-norm":
        draft.set("update_policy.norm", options["max_completion_length"])


def _scale(draft: Draft, options: Options) -> None:
    """Scale rewards by their group, by the batch, or not; TRL adds 1e-4 to a deviation."""
    scale = options["scale_rewards"]
    if draft.value("advantages.op") == "advantage.gdpo":
        return  # rewards are normalised one by one, by their group, whatever this says
    if scale in ("group", True):
        draft.set("advantages.eps", 1e-4)
        return
    draft.set("advantages.scale", False)
    if scale == "batch":
        draft.edit("add", normal={"op": "reward.whiten", "mean": "group", "std": "batch", "eps": 1e-4})
        draft.edit("set", **{"advantages.in": {"rewards": "normal"}})


def _entropy(draft: Draft, options: Options) -> None:
    """Count only the tokens of highest entropy; or add a bonus for entropy, a mean over tokens in TRL."""
    share = options["top_entropy_quantile"]
    if share < 1:
        _weigh_by_entropy(draft, options, share)
        return
    if options["entropy_coef"]:
        draft.set("update_policy.entropy_coef", options["entropy_coef"])
        if draft.value("update_policy.aggregate") != "token-mean":
            draft.set("update_policy.entropy_aggregate", "token-mean")


def _weigh_by_entropy(draft: Draft, options: Options, share: float) -> None:
    entropies = {"op": "logprobs.entropy", "model": "policy", "out": {"logprobs": "old_logprobs"}}
    word = "replace" if draft.has("old_logprobs") else "add"
    draft.edit(word, old_logprobs=entropies)
    weights = {"op": "weight.entropy", "share": share, "minibatches": _minibatches(options)}
    draft.edit("add", token_weights=weights)


def _minibatches(options: Options) -> int:
    """Return the optimizer steps of a pass over what is generated, at least 1."""
    return max(generated(options) // step_rows(options), 1)


def _pair_losses(draft: Draft, options: Options) -> None:
    """Give DPO the losses of ``loss_type`` with their weights; without them it has its own."""
    table = options.table.facts["pair_losses"]
    kinds = _pair_kinds(options["loss_type"])
    if any(kind not in table for kind in kinds):
        return  # `pair_loss` says so
    coefficients = options["loss_weights"] or [1.0] * len(kinds)
    losses: dict[str, dict[str, Any]] = {}
    weights: dict[str, float] = {}
    for kind, coefficient in zip(kinds, coefficients, strict=False):
        losses[kind] = _pair_loss(table[kind], options)
        weights[kind] = float(coefficient)
    if options["rpo_alpha"] is not None:
        losses["sft"] = {"kind": "likelihood"}
        weights["sft"] = float(options["rpo_alpha"])
    is_weighed = any(weight != 1 for weight in weights.values())
    if is_weighed or losses != {"sigmoid": {"kind": "sigmoid"}}:
        draft.set("preference.losses", losses)
    if is_weighed:
        draft.set("preference.weights", weights)
    if options.is_on("reference_free"):
        draft.set("preference.reference", False)
        draft.remove("ref_logprobs", "models.ref")
    if options.is_on("use_weighting"):
        squares = {"op": "logprobs.squares", "model": "policy", "out": {"logprobs": "old_logprobs"}}
        draft.edit("replace", old_logprobs=squares)


def _pair_loss(spec: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """Return a loss of pairs; the table has a key of TRL's for an attribute, or its value."""
    loss = {"kind": spec["kind"]}
    for attribute, key in spec.get("with", {}).items():
        loss[attribute] = options[key] if isinstance(key, str) else key
    return loss


def _pair_kinds(loss_type: Any) -> list[str]:
    kinds = loss_type if isinstance(loss_type, list) else [loss_type]
    return [str(kind) for kind in kinds]


def _without_reference(draft: Draft, options: Options) -> None:
    """Make DPO the loss of CPO, SimPO or AlphaPO: log-probs in the place of log ratios, and a likelihood."""
    draft.remove("ref_logprobs", "models.ref")
    draft.set("preference.reference", False)
    kind = options["loss_type"]
    alpha = options["alpha"]
    has_divergence = kind not in ("simpo", "ipo") and alpha
    if has_divergence:
        draft.set("preference.divergence", "alpha")
        draft.set("preference.alpha", 1 - alpha)
    losses = {str(kind): _loss_of_cpo(options)}
    if options["cpo_alpha"]:
        losses["likelihood"] = {"kind": "likelihood"}
        draft.set("preference.weights", {"likelihood": float(options["cpo_alpha"])})
    draft.set("preference.losses", losses)


def _loss_of_cpo(options: Options) -> dict[str, Any]:
    kind = options["loss_type"]
    if kind in ("hinge", "ipo"):
        return {"kind": kind}
    loss: dict[str, Any] = {"kind": "sigmoid"}
    if options["label_smoothing"]:
        loss["smoothing"] = options["label_smoothing"]
    if kind != "simpo":
        return loss
    loss["margin"] = options["simpo_gamma"]
    alpha = options["alpha"]
    if alpha:
        loss["kind"] = "alphapo"
        loss["alpha"] = alpha
    else:
        loss["mean"] = True
    return loss


def _correction(draft: Draft, options: Options) -> None:
    """Weigh rows that vLLM sampled by how far the policy is from it; another engine is as far."""
    if not _corrects_vllm(options):
        return
    if options["loss_type"] == "vespo":  # it weighs the whole way from what sampled
        reads = draft.value("update_policy.in") or {}
        draft.set("update_policy.in", {**reads, **FROM_SAMPLER})
        return
    level, _, bounding = str(options["vllm_importance_sampling_mode"]).partition("_")
    low = options["vllm_importance_sampling_clip_min"] or 0.0
    high = options["vllm_importance_sampling_clip_max"]
    if bounding == "mask":
        if high is None:
            high = NO_BOUND
        weights = {"op": "correction.mis", "level": level, "low": low, "high": high}
    else:
        weights = {"op": "correction.tis", "level": level, "floor": low, "cap": high}
    draft.edit("add", rollout_weights=weights)


def _corrects_vllm(options: Options) -> bool:
    return options.is_on("use_vllm") and options.is_on("vllm_importance_sampling_correction")


def remarks(options: Options, functions: Sequence[RewardFunction]) -> Iterator[KeyOutcome]:
    """Yield what the user has to look after and what no given key stands for."""
    kind = options.table.kind
    is_vespo = kind == "grpo" and options["loss_type"] == "vespo"
    conditions = {
        "no function": not functions,
        "an answer": any("answer" in function.columns for function in functions),
        "more functions": len(functions) > len(PORTS),
        "adapters": options.is_on("use_peft") and options["lora_target_modules"] is None,
        "one process": "num_processes" not in options.values,
        "vespo of vLLM": is_vespo and _corrects_vllm(options),
    }
    for row in options.table.facts["told"]:
        is_of_trainer = kind in row.get("of", [kind])
        if is_of_trainer and conditions.get(row.get("where"), True):
            yield remark(row["about"], row["text"])
    for function in functions:
        if function.remedy:
            yield remark(f"the reward {function.name}", function.remedy)
        elif function.takes_more:
            yield remark(f"the reward {function.name}", KWARGS)


def lora(value: bool, options: Options) -> Mapping[str, Any] | None:
    if not value:
        return None
    targets = options["lora_target_modules"] or ["q_proj", "v_proj"]
    return {"rank": options["lora_r"], "alpha": float(options["lora_alpha"]), "targets": targets}


def step_rows(options: Options) -> int:
    """Return the rows of an optimizer step, on all devices."""
    return _rows(options, options["gradient_accumulation_steps"])


def _rows(options: Options, batches: int) -> int:
    return int(options["per_device_train_batch_size"]) * int(options["num_processes"]) * int(batches)


def generated(options: Options) -> int:
    """Return the responses that are generated at a time."""
    steps = options["steps_per_generation"] or options["gradient_accumulation_steps"]
    return int(options["generation_batch_size"] or _rows(options, steps))


def prompts(_: Any, options: Options) -> int:
    rows = generated(options)
    n = options["num_generations"]
    if rows % n:
        raise Hand(f"{rows} responses don't divide into groups of {n}: set prompts.batch")
    return int(rows // n)


def minibatches(_: Any, options: Options) -> int:
    """Return the optimizer steps of a pass over what was generated."""
    rows = generated(options)
    step = step_rows(options)
    if rows % step:
        raise Hand(
            f"{rows} responses are not a whole number of steps of {step}: set update_policy.minibatches"
        )
    return rows // step


def optimizer_steps(options: Options) -> int:
    """Return the optimizer steps of an iteration, rounded down where they are not a whole number."""
    if options.table.kind not in ("grpo", "rloo"):
        return 1
    return max(generated(options) // step_rows(options), 1) * int(options["num_iterations"])


def epochs(value: float, options: Options) -> float:
    if options.is_on("max_steps"):
        raise Idle("has no effect: max_steps takes precedence")
    if float(value).is_integer():
        return int(value)
    return value


def iterations(value: int, options: Options) -> int:
    if value <= 0:
        raise Idle("has no effect: num_train_epochs applies")
    return math.ceil(value / optimizer_steps(options))


def interval(steps: float, options: Options) -> int | Interval:
    """Return optimizer steps as iterations; a share of the run's, below 1, as epochs where it has those."""
    is_share = steps < 1
    if is_share and not options.is_on("max_steps"):
        return epochs_of(steps * options["num_train_epochs"])
    if is_share:
        steps = math.ceil(steps * options["max_steps"])
    return max(round(steps / optimizer_steps(options)), 1)


def save_steps(value: float, options: Options) -> int | Interval:
    if options["save_strategy"] != "steps":
        raise Idle(f"has no effect: save_strategy is {options['save_strategy']}")
    if value <= 0:
        raise Hand("it is not a number of steps: set schedule.save_every")
    return interval(value, options)


def save_strategy(value: str, options: Options) -> int | Interval:
    """Return when checkpoints come by a strategy; the best come with their evaluations."""
    match value:
        case "steps":
            raise Idle("as save_steps")
        case "best":
            if options.table.kind not in EVALUATED:
                raise Hand(str(options.table.rows["load_best_model_at_end"].hand))
            best(True, options)
            return 0
        case "epoch":
            return epochs_of(1)
        case "no":
            return 0
    raise Hand("it is not steps, epoch, best or no: set schedule.save_every")


def _evaluation(draft: Draft, options: Options) -> None:
    """Have the mean reward measured as often as TRL does, and the best checkpoint kept where TRL keeps it."""
    match options["eval_strategy"]:
        case "steps":
            due = interval(options["eval_steps"], options)
        case "epoch":
            due = epochs_of(1)
        case _:
            return
    sampling = {}
    if options["num_generations_eval"] != options["num_generations"]:
        sampling["n"] = options["num_generations_eval"]
    due_text = str(due) if isinstance(due, Interval) else due
    draft.evaluate(due_text, sampling, before=options.is_on("eval_on_start"))
    keeps_best = options.is_on("load_best_model_at_end") or options["save_strategy"] == "best"
    if keeps_best and _metric(options) == "reward":
        mode = "max" if _is_greater(options) else "min"
        draft.keep_best(mode)


def _metric(options: Options) -> str:
    """Return the metric that says which model is best, without the prefix that transformers adds itself."""
    return str(options["metric_for_best_model"] or "loss").removeprefix("eval_")


def _is_greater(options: Options) -> bool:
    greater = options["greater_is_better"]
    if greater is not None:
        return bool(greater)
    return not _metric(options).endswith("loss")


def best(value: bool, options: Options) -> bool:
    """Say where the best checkpoint is of an evaluation or a metric that the graph does not have."""
    if options["eval_strategy"] not in ("steps", "epoch"):
        raise Hand(
            "the best is chosen by evaluations, and eval_strategy is no: set eval.every and schedule.best"
        )
    if _metric(options) != "reward":
        law = f"{_metric(options)} is not measured: the graph's evaluations report only the mean reward"
        raise Hand(f"{law}: schedule.best: {{metric: eval/reward, mode: max}}")
    return value


def best_metric(value: str, options: Options) -> str:
    keeps_best = options.is_on("load_best_model_at_end") or options["save_strategy"] == "best"
    if not keeps_best:
        raise Idle("has no effect: load_best_model_at_end is off, and save_strategy is not best")
    best(True, options)
    return value


def loss_type(value: str, options: Options) -> str:
    """Say what is averaged otherwise: TRL's bnpo over each micro-batch, here over the mini-batch."""
    if value == "bnpo":
        raise Idle("taken as dapo: a mean over the tokens of the mini-batch (TRL: of each micro-batch)")
    return value


def entropy(value: float, options: Options) -> float:
    """Refuse a bonus for entropy where TRL averages it over other tokens than the graph."""
    if value and options["top_entropy_quantile"] < 1:
        raise Hand(
            "left out: with top_entropy_quantile TRL averages the entropy of only those tokens, while "
            "update_policy.entropy_coef averages that of all tokens"
        )
    return value


def aggregation(value: str, options: Options) -> str:
    """Say which rewards are left out where each is normalised by itself."""
    functions = options["reward_funcs"] or ()
    if value == NORMALIZE_EACH and len(functions) > len(PORTS):
        raise Hand(f"advantage.gdpo normalises {len(PORTS)} rewards: the others are left out")
    return value


def pair_loss(value: Any, options: Options) -> Any:
    """Refuse a loss of pairs that has none here."""
    table = options.table.facts["pair_losses"]
    unknown = [kind for kind in _pair_kinds(value) if kind not in table]
    if unknown:
        law = f"{', '.join(unknown)} is not a pair loss of rlgraph (`rlgraph nodes` lists them)"
        raise Hand(f"{law}: preference.losses")
    return value


def power(value: float, options: Options) -> float:
    """Refuse the power of mean probabilities for which there is no loss."""
    if value and options["loss_type"] == "ipo":
        raise Hand("rlgraph has no ipo of a power of mean probabilities: write one, as my_losses.py:NAME")
    return value


CONVERTERS: Converters = {
    **COMMON,
    "loss_type": loss_type,
    "aggregation": aggregation,
    "entropy": entropy,
    "pair_loss": pair_loss,
    "power": power,
    "betas": lambda _, o: [o["adam_beta1"], o["adam_beta2"]],
    "lora": lora,
    "prompts": prompts,
    "rows": lambda _, o: step_rows(o),
    "minibatches": minibatches,
    "epochs": epochs,
    "iterations": iterations,
    "save_steps": save_steps,
    "save_strategy": save_strategy,
    "best": best,
    "best_metric": best_metric,
    "warmup": lambda value, _: float(value) if 0 < value < 1 else int(value),
}
