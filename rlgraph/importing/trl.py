"""TRL: which nodes its trainers would run, and values that follow from several keys."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlgraph.errors import GraphError, Problem
from rlgraph.importing.draft import UNKNOWN, Draft
from rlgraph.importing.importer import By, Hand, Idle, Imported, KeyOutcome, graph_name, outcomes_of
from rlgraph.importing.options import Options, read_settings
from rlgraph.importing.script import TRAINERS, RewardFunction, names_of, reward_function, settings_of
from rlgraph.importing.table import table_of

PORTS = ("", "_2", "_3", "_4")  # of the rewards that reward.sum adds
OWN = ("prompt", "question", "answer", "source")  # columns that data.prompts writes itself
KWARGS = "list the columns that it reads from **kwargs in `columns` of its node, and in prompts.columns"


def import_trl(
    file: Path, overrides: Sequence[str], folder: Path = Path(), trainer: str | None = None
) -> Imported:
    """Return the graph, to be written to a folder, that does what a trainer of TRL does.

    ``file`` is a YAML file of settings, or a script, which is not run.

    Raises:
        GraphError: the settings can't be read, or don't say which trainer they are of.
    """
    scripted, given = settings_of(file) if file.suffix == ".py" else (None, read_settings(file, ()))
    given |= read_settings(None, overrides)
    given |= {"reward_funcs": names_of(given["reward_funcs"])} if given.get("reward_funcs") else {}
    kind = trainer or scripted or guessed(given)
    options = Options(table_of("trl", kind), given, folder)
    functions = [reward_function(name, file, options) for name in options["reward_funcs"] or ()]
    draft = draft_of(options, functions)
    outcomes = [*told(options, functions), *outcomes_of(options, draft, BY)]
    return Imported(graph_name(str(options["run_name"] or file.stem)), "TRL", draft, outcomes)


def guessed(given: Mapping[str, Any]) -> str:
    """Return the one trainer whose table has all keys."""
    tables = {kind: Options(table_of("trl", kind), given) for kind in TRAINERS}
    fits = [k for k, options in tables.items() if all(options.table.row(key) for key in options.values)]
    if len(fits) != 1:
        law = f"these settings are of {' or '.join(fits) or 'no one'} of TRL's trainers"
        raise GraphError([Problem("no-trainer", law, None, TRAINERS, "say which: --trainer grpo")])
    return fits[0]


def draft_of(options: Options, functions: Sequence[RewardFunction]) -> Draft:
    """Return the parent of a trainer with the nodes that its switches ask for."""
    kind = options.table.kind
    draft = Draft(kind)
    if not options.is_on("max_steps"):
        draft.remove("schedule.iterations")
    if "num_processes" in options.values:
        draft.set("pools.main.devices", options["num_processes"])
    if kind == "dpo":
        draft.set("pairs.question", "prompt")
    elif kind == "sft":
        draft.set("examples.question", "prompt")
        draft.set("examples.answer", "completion")
    else:
        _data(draft, options, functions)
        _reference(draft, options)
    if kind == "grpo":
        _loss(draft, options)
        _correction(draft, options)
    if options.is_on("sync_ref_model") and draft.has("models.ref"):
        every = max(round(options["ref_model_sync_steps"] / optimizer_steps(options)), 1)
        refresh = {"op": "update.copy", "model": "ref", "of": "policy@next", "every": every}
        draft.edit("add", refresh={**refresh, "mix": options["ref_model_mixup_alpha"]})
    return draft


def _data(draft: Draft, options: Options, functions: Sequence[RewardFunction]) -> None:
    """Read TRL's rows, and score them by the reward functions; several are added with their weights."""
    draft.set("prompts.question", "prompt")
    draft.set("prompts.answer_after", None)
    draft.set("prompts.max_prompt_tokens", options["max_prompt_length"])
    draft.set("prompts.truncate", "left" if options["max_prompt_length"] else None)
    if not functions:
        return
    wanted = [column for function in functions for column in function.columns]
    draft.set("prompts.answer", "answer" if "answer" in wanted else None)
    columns = {name: {"type": "json"} for name in wanted if name not in OWN}
    draft.set("prompts.columns", {"trl_prompt": {"from": "prompt", "type": "json"}, **columns})
    if len(functions) == 1:
        draft.edit("replace", rewards=functions[0].node())
        return
    weights = options["reward_weights"] or [1.0] * len(functions)
    ins, weighed = dict[str, str](), dict[str, float]()
    for port, function, weight in zip(PORTS, functions, weights, strict=False):
        name = function.name
        outs = {"rewards": name, "failed": f"{name}_failed"}
        draft.edit("add", **{name: {**function.node(), "out": outs}})
        ins[f"rewards{port}"], weighed[f"weight{port}"] = name, float(weight)
    draft.edit("replace", rewards={"op": "reward.sum", "in": ins, **weighed})


def _reference(draft: Draft, options: Options) -> None:
    """Put the KL where TRL has it: GRPO's into the loss, RLOO's into the reward."""
    beta, inside = options["beta"], options.table.kind == "rloo"
    if inside or not beta:
        draft.remove("update_policy.kl_coef")
    if not beta:
        draft.remove("ref_logprobs", "models.ref")
    elif inside:
        draft.edit("add", old_logprobs={"op": "logprobs", "model": "policy"})
        draft.add_kl_per_sample(beta=beta)


def _loss(draft: Draft, options: Options) -> None:
    losses, kind = options.table.facts["losses"], options["loss_type"]
    spec = losses.get(kind, losses["dapo"])
    low, high = options["epsilon"], options["epsilon_high"] or options["epsilon"]
    values = {"epsilon": low, "epsilon_high": high}
    loss = {"kind": spec["kind"], **{n: values.get(k, options[k]) for n, k in spec["with"].items()}}
    mean = spec["aggregate"]
    if options["importance_sampling_level"] == "sequence":
        loss, mean = {"kind": "gspo", "clip": low, "clip_high": high}, "seq-mean-token-mean"
    elif kind == "cispo" and high > 1:
        loss = {"kind": "cispo", "clip": 1.0, "clip_high": high - 1}
    elif options["delta"] and loss["kind"] == "ppo_clip":
        loss["dual_clip"] = options["delta"]
    draft.edit("replace", **{"update_policy.loss": loss})
    draft.set("update_policy.aggregate", mean)
    if mean == "seq-mean-token-sum-norm":
        draft.set("update_policy.norm", options["max_completion_length"])
    if options["scale_rewards"] in ("group", True):
        draft.set("advantages.eps", 1e-4)


def _correction(draft: Draft, options: Options) -> None:
    """Weigh rows that vLLM sampled by how far the policy is from it; another engine is as far."""
    if not (options.is_on("use_vllm") and options.is_on("vllm_importance_sampling_correction")):
        return
    level, _, how = str(options["vllm_importance_sampling_mode"]).partition("_")
    low, high = (options[f"vllm_importance_sampling_clip_{end}"] for end in ("min", "max"))
    bounds = {"low": low or 0.0, "high": high} if how == "mask" else {"cap": high}
    op = "correction.mis" if how == "mask" else "correction.tis"
    draft.edit("add", rollout_weights={"op": op, "level": level, **bounds})


def told(options: Options, functions: Sequence[RewardFunction]) -> Iterator[KeyOutcome]:
    """Yield what the user has to see to that stands behind no key that is given."""
    kind, facts = options.table.kind, options.table.facts
    holds = {
        "no function": not functions,
        "an answer": any("answer" in function.columns for function in functions),
        "more functions": len(functions) > len(PORTS),
        "adapters": options.is_on("use_peft") and options["lora_target_modules"] is None,
        "one process": "num_processes" not in options.values,
    }
    for row in facts["told"]:
        if kind in row.get("of", [kind]) and holds.get(row.get("where"), True):
            yield KeyOutcome(row["about"], UNKNOWN, "hand", row["text"])
    for function in functions:
        if text := function.remedy or KWARGS * function.takes_more:
            yield KeyOutcome(f"the reward {function.name}", UNKNOWN, "hand", text)


def lora(value: bool, options: Options) -> Mapping[str, Any] | None:
    targets = options["lora_target_modules"] or ["q_proj", "v_proj"]
    adapter = {"rank": options["lora_r"], "alpha": float(options["lora_alpha"]), "targets": targets}
    return adapter if value else None


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
    rows, n = generated(options), options["num_generations"]
    if rows % n:
        raise Hand(f"{rows} responses are no whole number of groups of {n}: set prompts.batch")
    return int(rows // n)


def minibatches(_: Any, options: Options) -> int:
    """Return the optimizer steps of a pass over what was generated."""
    rows, step = generated(options), step_rows(options)
    if rows % step:
        raise Hand(f"{rows} responses are no whole number of steps of {step}: set update_policy.minibatches")
    return passes(rows // step, options)


def passes(steps: int, options: Options) -> int:
    """Return passes or steps, of which RLOO's loss without a ratio makes one per iteration."""
    if options.table.kind == "rloo" and steps > 1:
        law = (
            "RLOO makes several optimizer steps of what it generates, and clips the ratio of whole responses"
        )
        raise Hand(f"{law}; the graph makes one: divide prompts.batch, or see the graph gspo")
    return int(steps)


def optimizer_steps(options: Options) -> int:
    """Return the optimizer steps of an iteration, rounded down where they are no whole number."""
    if options.table.kind not in ("grpo", "rloo"):
        return 1
    return max(generated(options) // step_rows(options), 1) * int(options["num_iterations"])


def epochs(value: float, options: Options) -> float:
    if options.is_on("max_steps"):
        raise Idle("decides nothing: max_steps counts")
    return int(value) if float(value).is_integer() else value


def iterations(value: int, options: Options) -> int:
    if value <= 0:
        raise Idle("decides nothing: num_train_epochs counts")
    return math.ceil(value / optimizer_steps(options))


def steps(value: float, options: Options) -> int:
    """Return a number of optimizer steps as iterations."""
    if value < 1:
        raise Hand("it is a share of the run: set schedule.save_every, in iterations")
    return max(round(value / optimizer_steps(options)), 1)


BY: By = {
    "path": lambda value, o: o.path(value),
    "natural": lambda value, _: max(int(value), 0),
    "betas": lambda _, o: [o["adam_beta1"], o["adam_beta2"]],
    "lora": lora,
    "prompts": prompts,
    "rows": lambda _, o: step_rows(o),
    "minibatches": minibatches,
    "passes": passes,
    "epochs": epochs,
    "iterations": iterations,
    "steps": steps,
    "warmup": lambda value, _: float(value) if 0 < value < 1 else int(value),
}
