"""slime and miles: which nodes their trainer would run, and values that follow from several flags."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlgraph.importing.draft import Draft
from rlgraph.importing.flags import read_flags
from rlgraph.importing.importer import (
    COMMON,
    Converters,
    Hand,
    Idle,
    Imported,
    KeyOutcome,
    graph_name,
    outcomes_of,
    refuse_unknown,
    remark,
)
from rlgraph.importing.options import Options
from rlgraph.importing.table import table_of

NONZERO_STD = "check_reward_nonzero_std"  # the filter of groups that slime ships


def import_slime(
    words: Sequence[str], folder: Path = Path(), launch: int = 1, name: str = "slime"
) -> Imported:
    """Return the graph, to be written to a folder, that does what slime's trainer does, or miles'.

    Args:
        words: a launch script, which is not run, or flags, or both: see ``rlgraph.importing.flags``.
        folder: where the graph is to be written.
        launch: which launch of a script is meant, from 1.
        name: slime or miles, for the report.

    Raises:
        GraphError: the script can't be read, or the estimator is none that there is a graph for.
    """
    settings = read_flags(words, tuple(table_of("slime").facts["programs"]), launch)
    kind = "sft" if settings.flags.get("loss-type") == "sft_loss" else "rl"
    options = Options(table_of("slime", kind), settings.flags, folder)
    draft = _sft(options) if kind == "sft" else _policy_gradient(options)
    if options["num-epoch"] and not options["num-rollout"]:
        draft.remove("schedule.iterations")
    if settings.program == "train_async.py" and kind == "rl":
        _ahead(draft)
    script_remarks = [*settings.outcomes(), *remarks(options)]
    if draft.value("schedule.buffer"):
        text = options.table.facts["told"]["ahead"]
        script_remarks.append(remark("train_async.py", text))
    outcomes = [*script_remarks, *outcomes_of(options, draft, CONVERTERS)]
    draft.span_hosts(options["num-gpus-per-node"])
    graph = graph_name(settings.file.stem if settings.file else name)
    return Imported(graph, name, draft, outcomes)


def _sft(options: Options) -> Draft:
    """Return the graph of slime's SFT: rows of messages, of which every turn of the assistant is learnt."""
    draft = Draft("sft")
    draft.set("examples.question", options["input-key"])
    draft.set("examples.answer", options["label-key"])
    draft.set("examples.assistant_turns", "all")
    draft.set("examples.batch", options["global-batch-size"] or options["rollout-batch-size"])
    draft.set("examples.max_tokens", None)
    draft.set("update_policy.aggregate", _aggregate(options))
    return draft


def _aggregate(options: Options) -> str:
    return "token-mean" if options.is_on("calculate-per-token-loss") else "seq-mean-token-mean"


def _policy_gradient(options: Options) -> Draft:
    estimators = options.table.facts["estimators"]
    name = str(options["advantage-estimator"])
    law = f"--advantage-estimator {name}: there is no graph for this estimator"
    refuse_unknown(name, estimators, law)
    draft = Draft(estimators[name]["extends"])
    _data(draft, options)
    _rewards(draft, options)
    _loss(draft, options, name)
    _reference(draft, options, estimators[name]["compares"] == "tokens")
    if name == "ppo":
        draft.set("advantages.whiten", options.is_on("normalize-advantages"))
    if NONZERO_STD in str(options["dynamic-sampling-filter-path"]):
        draft.sample_mixed_groups(expected=_expected_share(options))
    if options.is_on("use-tis"):
        weights = {"op": "correction.tis", "level": "token", "cap": options["tis-clip"]}
        if options["tis-clip-low"]:
            weights["floor"] = options["tis-clip-low"]
        draft.edit("add", rollout_weights=weights)
    has_own_devices = "rollout-num-gpus" in options.values and not options.is_on("colocate")
    if has_own_devices:
        size = options["rollout-num-gpus"] or options["actor-num-gpus-per-node"]
        draft.edit("add", **{"pools.rollout": {"devices": size}})
        draft.set("models.policy.serve.pool", "rollout")
    return draft


def _expected_share(options: Options) -> float | None:
    """Return the share of groups that is thought to stay: slime samples more for those that it drops."""
    generated = options["over-sampling-batch-size"]
    trained = options["rollout-batch-size"]
    if not generated or not trained:
        return None
    if generated <= trained:
        return None
    return float(trained / generated)


def _data(draft: Draft, options: Options) -> None:
    """Read slime's rows, and evaluate where it does."""
    draft.set("prompts.answer", options["label-key"])
    draft.set("prompts.answer_after", None)
    draft.set("prompts.template", "chat" if options["apply-chat-template"] else "plain")
    longest_row = options["rollout-max-context-len"]
    longest_response = options["rollout-max-response-len"] or longest_row
    if longest_response:
        draft.set("rollout.max_new_tokens", longest_response)
    if longest_row:
        draft.set("rollout.max_total_tokens", longest_row)
    if not options["rollout-max-prompt-len"]:
        longest_prompt = longest_row - 1 if longest_row else None
        draft.set("prompts.max_prompt_tokens", longest_prompt)
    if options.is_on("eval-interval"):
        draft.evaluate(options["eval-interval"], {"n": 1, "temperature": options["rollout-temperature"]})


def _rewards(draft: Draft, options: Options) -> None:
    """Score by the op that stands in for slime's grader, if there is one."""
    grader = _grader(options)
    if grader and not options["custom-rm-path"]:
        draft.edit("replace", rewards=grader)


def _grader(options: Options) -> dict[str, Any] | None:
    name = str(options["rm-type"] or "").removeprefix("boxed_")
    grader: dict[str, Any] | None = options.table.facts["graders"].get(name)
    return grader


def _loss(draft: Draft, options: Options, estimator: str) -> None:
    """Give the update slime's loss: it clips ratios with every estimator, by tokens or by sequences."""
    low = options["eps-clip"]
    high = options["eps-clip-high"]
    if high is None:
        high = low
    loss: dict[str, Any] = {"kind": "ppo_clip", "clip": low, "clip_high": high}
    if estimator in ("gspo", "cispo"):
        loss["kind"] = estimator
    elif options["eps-clip-c"] is not None:
        loss["dual_clip"] = options["eps-clip-c"]
    draft.edit("replace", **{"update_policy.loss": loss})
    draft.set("update_policy.aggregate", _aggregate(options))
    draft.set("update_policy.minibatches", minibatches(options))
    if draft.has("update_critic"):
        draft.set("update_critic.minibatches", minibatches(options))
        draft.set("update_critic.aggregate", _aggregate(options))
    if options.is_on("use-opsm"):
        draft.set("update_policy.off_policy_limit", options["opsm-delta"])
    if options.is_on("use-rollout-logprobs"):
        draft.set("update_policy.in.old_logprobs", "rollout_logprobs")
        draft.remove("old_logprobs")


def _reference(draft: Draft, options: Options, per_token: bool) -> None:
    """Put the KL where slime has it: into each token's reward, into the loss, or nowhere."""
    estimator = options["kl-loss-type"]
    if estimator == "low_var_kl":
        estimator = "k3"
    in_loss = options.is_on("use-kl-loss")
    draft.remove("update_policy.kl_coef", "update_policy.kl")
    if per_token:
        draft.set("shaped.beta", float(options["kl-coef"]))
        draft.set("shaped.kl", estimator)
    if in_loss:
        _kl_in_loss(draft, options, estimator)
    elif not per_token:
        draft.remove("ref_logprobs", "models.ref")
    if options["ref-update-interval"] and draft.has("models.ref"):
        refresh = {
            "op": "update.copy",
            "model": "ref",
            "of": "policy@next",
            "every": options["ref-update-interval"],
        }
        draft.edit("add", refresh=refresh)


def _kl_in_loss(draft: Draft, options: Options, estimator: str) -> None:
    draft.add_reference()
    if options["kl-loss-coef"]:
        draft.set("update_policy.kl", estimator)
        draft.set("update_policy.kl_coef", options["kl-loss-coef"])
    else:  # slime measures the KL, and adds nothing to the loss
        draft.set("update_policy.in.watched_logprobs", "ref_logprobs")
    if options.is_on("use-unbiased-kl"):
        draft.set("update_policy.kl_unbiased", True)


def _ahead(draft: Draft) -> None:
    """Generate an iteration ahead, as train_async does: the ratio is to what sampled (see ``remarks``)."""
    draft.set("schedule.buffer", {"staleness": 1, "by": "batch"})
    draft.set("update_policy.in.old_logprobs", "rollout_logprobs")
    draft.remove("old_logprobs", "rollout_weights")


def remarks(options: Options) -> Iterator[KeyOutcome]:
    """Yield what the user has to look after and what no single flag stands for."""
    facts = options.table.facts["told"]
    yield remark("the model", facts["model"])
    if options.table.kind == "sft":
        return
    yield remark("the reward", _remark_on_reward(options, facts))
    sets = options["eval-prompt-data"]
    if isinstance(sets, list) and len(sets) > 2:
        yield remark("the evaluation", facts["eval_sets"])


def _remark_on_reward(options: Options, facts: Mapping[str, str]) -> str:
    rm_type = options["rm-type"]
    grader = _grader(options)
    if options["custom-rm-path"]:
        return facts["custom_rm"].format()
    if options["rm-url"] or rm_type == "remote_rm":
        return facts["remote"].format()
    if grader:
        return facts["same_grader"].format(rm_type=rm_type, op=grader["op"])
    if rm_type:
        return facts["no_grader"].format(rm_type=rm_type)
    return facts["none"]


def minibatches(options: Options) -> int:
    """Return the optimizer steps of an iteration: slime's global batches are counted in samples."""
    if options["num-steps-per-rollout"]:
        return int(options["num-steps-per-rollout"])
    batch = options["rollout-batch-size"]
    step = options["global-batch-size"]
    if not isinstance(batch, int) or not isinstance(step, int):  # as a variable of the script
        return 1
    samples = batch * int(options["n-samples-per-prompt"])
    return max(samples // step, 1)


def files(value: Any, options: Options) -> list[str]:
    """Return the files of prompt-data; a selection of rows, as data.jsonl@[0:100], can't be kept."""
    if "@" in str(value):
        raise Hand("it takes some rows of a file: write these to a separate file")
    return [options.path(str(value))]


def eval_files(value: Any, options: Options) -> Any:
    """Return the sets of an evaluation by their names: slime has names and files in turn."""
    if not isinstance(value, list) or len(value) % 2:
        raise Hand("it is not an alternating list of names and files: set eval.nodes.prompts.files")
    files_by_name = {}
    for name, path in zip(value[::2], value[1::2], strict=True):
        files_by_name[str(name)] = [options.path(str(path))]
    return files_by_name


def min_lr(value: float, options: Options) -> float:
    if not value or options["lr-decay-style"] == "constant":
        raise Idle("has no effect: the rate falls to 0, or does not fall")
    return round(value / float(options["lr"]), 9)


def lora(value: int, options: Options) -> Mapping[str, Any] | None:
    if not value:
        return None
    targets = options["target-modules"] or "all-linear"
    if targets != "all-linear":
        targets = str(targets).split(",")
    return {"rank": value, "alpha": float(options["lora-alpha"]), "targets": targets}


def devices(_: int, options: Options) -> int:
    if options.is_odd("actor-num-nodes") or options.is_odd("actor-num-gpus-per-node"):
        raise Hand("the number of nodes or GPUs is not known: set pools.main.devices")
    return int(options["actor-num-nodes"]) * int(options["actor-num-gpus-per-node"])


def experts(value: int, options: Options) -> int:
    if value > 1 and options.is_on("lora-rank"):
        raise Hand("experts with adapters are not divided among devices: the graph has expert_parallel 1")
    return value


def offload(value: bool, options: Options) -> bool:
    if options.is_on("lora-rank"):
        raise Idle("has no effect: the optimizer is small, since only adapters train")
    return value


def epochs(value: int, options: Options) -> int:
    if options["num-rollout"]:
        raise Idle("has no effect: num-rollout takes precedence")
    return value


def critic_only(value: int, _: Options) -> int | None:
    """Return the first iteration that trains the policy, counted from 1."""
    return int(value) + 1 if value else None


def above_zero(value: float, _: Options) -> float:
    if not value:
        raise Idle("has no effect: it is 0")
    return value


def share(value: float, _: Options) -> float:
    if not 0 < value < 1:
        raise Hand("it is not a share: set models.policy.optimizer.warmup_steps, in optimizer steps")
    return float(value)


def mapping(value: Any, _: Options) -> Any:
    if not isinstance(value, dict):
        raise Hand("it is not a JSON mapping: set prompts.template_options")
    return value


CONVERTERS: Converters = {
    **COMMON,
    "files": files,
    "eval_files": eval_files,
    "listed": lambda value, _: value if isinstance(value, list) else [value],
    "devices": devices,
    "experts": experts,
    "offload": offload,
    "micro_tokens": lambda value, o: int(value) * int(o["context-parallel-size"]),
    "betas": lambda _, o: [o["adam-beta1"], o["adam-beta2"]],
    "min_lr": min_lr,
    "lora": lora,
    "epochs": epochs,
    "critic_only": critic_only,
    "above_zero": above_zero,
    "share": share,
    "mapping": mapping,
}
