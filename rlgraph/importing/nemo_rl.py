"""NeMo-RL: which nodes its trainers would run, and values that follow from several keys."""

from collections.abc import Iterator, Mapping, Sequence
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
    graph_name,
    is_reference,
    outcomes_of,
    own_tokenizer,
    read_alike,
    refuse_unknown,
    remark,
)
from rlgraph.importing.inherited import read_inherited
from rlgraph.importing.options import Options
from rlgraph.importing.parallel import combined
from rlgraph.importing.table import table_of

MEGATRON = "policy.megatron_cfg.enabled"
LONGEST = "policy.max_total_sequence_length"
CORRECTS = "loss_fn.use_importance_sampling_correction"
KIND = "loss_fn.truncated_importance_sampling_type"
BOUND = "loss_fn.truncated_importance_sampling_ratio"
KL = "loss_fn.reference_policy_kl_type"
BETA = "loss_fn.reference_policy_kl_penalty"
# trainers that generate nothing -> the nodes that read their rows
SOURCES = {"sft": "examples", "dpo": "pairs", "rm": "pairs"}
# an estimator or a trainer -> the graph that is changed; grpo for any other
PARENTS = {"gdpo": "gdpo", "ppo": "ppo", "distillation": "distill"}
SCHEDULERS = ("LinearLR", "ConstantLR", "CosineAnnealingLR")  # those of torch that have a schedule here
START_FACTOR = 1 / 3  # of LinearLR, and the factor of ConstantLR: torch's defaults
NO_LIMIT = 100_000  # steps that end no run: max_num_epochs does


def import_nemo_rl(file: Path | None, overrides: Sequence[str], folder: Path = Path()) -> Imported:
    """Return the graph, to be written to a folder, that does what NeMo-RL's trainer does with these settings.

    ``file`` is read with what its ``defaults`` name, as NeMo-RL does; without one the settings are of grpo.

    Raises:
        GraphError: the settings can't be read, or are of a trainer that there is no graph for.
    """
    settings = read_inherited(file, overrides)
    kind = trainer_of(settings)
    table = table_of("nemo_rl", kind)
    table = table.with_defaults(table.facts["defaults_of"].get(kind, {}))
    options = Options(table, settings, folder)
    draft = draft_of(options)
    outcomes = [*remarks(options), *outcomes_of(options, draft, CONVERTERS)]
    outcomes += combined(draft)
    outcomes += read_alike(draft, ("ref", "critic", "teacher"))
    draft.span_hosts(int(options["cluster.gpus_per_node"]))
    name = kind if file is None else file.stem
    return Imported(graph_name(name), "NeMo-RL", draft, outcomes)


def trainer_of(settings: Mapping[str, Any]) -> str:
    """Return whose settings they are, by the section that only this trainer has.

    Raises:
        GraphError: they are of a program that trains nothing, or of a trainer without a graph.
    """
    sections = {key.partition(".")[0] for key in settings}
    aligns_tokens = any(key.startswith(("token_aligner", "loss_fn.xtoken")) for key in settings)
    if aligns_tokens or "teachers" in sections:
        law = "these settings are for NeMo-RL's distillation between vocabularies"
        remedy = "there is no graph for it; in the graph distill the teacher has the policy's tokenizer"
        raise GraphError([Problem("no-graph", law, remedy=remedy)])
    trainers = table_of("nemo_rl").facts["trainers"]
    # settings without the section of another trainer are of grpo
    for trainer in trainers:
        if trainer in sections and trainer != "grpo":
            return str(trainer)
    is_of_grpo = sections & {"grpo", "policy", "loss_fn"} or not settings
    if not is_of_grpo:
        law = f"none of the sections {', '.join(trainers)} is in the settings"
        remedy = "give a configuration of a trainer; `rlgraph eval GRAPH` measures a policy"
        raise GraphError([Problem("no-trainer", law, remedy=remedy)])
    return "grpo"


def draft_of(options: Options) -> Draft:
    """Return the parent of a trainer with the nodes that its settings ask for."""
    imitates = options.table.kind in SOURCES
    draft = _imitation(options) if imitates else _policy_gradient(options)
    _rows(draft, options)
    _length(draft, options)
    _keep(draft, options)
    _optimizer(draft, options)
    _pools(draft, options)
    return draft


def _imitation(options: Options) -> Draft:
    """Return the graph of a trainer that generates nothing: of SFT, DPO or a reward model."""
    kind = options.table.kind
    source = SOURCES[kind]
    draft = Draft(options.table.facts["graphs"][kind])
    draft.set(f"{source}.batch", options["policy.train_global_batch_size"])
    draft.set(f"{source}.max_tokens", options[LONGEST])
    if kind == "sft":
        turns = "last" if options.is_on("grpo.only_unmask_final") else "all"
        draft.set("examples.assistant_turns", turns)
    return draft


def _policy_gradient(options: Options) -> Draft:
    kind = options.table.kind
    name = kind
    if kind == "grpo":
        name = _estimator(options)
    draft = Draft(PARENTS.get(name, "grpo"))
    _prompts(draft, options)
    if kind == "distillation":
        draft.set("update_policy.minibatches", minibatches(options))
        return draft
    _loss(draft, options)
    _reference(draft, options)
    rewards = _rewards(draft, options)
    if kind == "grpo":
        _advantages(draft, options, name, rewards)
    elif rewards != "rewards":
        draft.set("shaped.in", {"rewards": rewards})
    if options.is_on("grpo.overlong_filtering"):
        reads = draft.value("update_policy.in") or {}
        draft.edit("add", whole_mask={"op": "mask.complete"})
        draft.set("update_policy.in", {**reads, "loss_mask": "whole_mask"})
    if options.is_on("grpo.use_dynamic_sampling"):
        _filter(draft, options)
    if options.is_on(CORRECTS):
        _correct(draft, options)
    return draft


def _estimator(options: Options) -> str:
    """Return the estimator of advantages.

    Raises:
        GraphError: there is no graph for it.
    """
    name = str(options["grpo.adv_estimator.name"])
    law = f"grpo.adv_estimator.name={name}: there is no graph for this estimator of NeMo-RL"
    remedy = "the graph mopd distils from several teachers" if name == "opd" else ""
    refuse_unknown(name, options.table.facts["estimators"], law, remedy)
    return name


def _prompts(draft: Draft, options: Options) -> None:
    """Bound prompts and responses, and evaluate, as NeMo-RL does."""
    longest = options[LONGEST]
    longest_prompt = options["data.max_input_seq_length"] or longest
    draft.set("prompts.answer_after", None)
    draft.set("rollout.max_new_tokens", _longest_response(options))
    draft.set("rollout.max_total_tokens", longest)
    draft.set("prompts.max_prompt_tokens", min(longest_prompt, longest - 1))
    turns = options["grpo.max_rollout_turns"] or 1
    is_distillation = options.table.kind == "distillation"
    if is_distillation or turns > 1:
        return
    if options.is_on("grpo.val_period"):
        at_start = options.is_on("grpo.val_at_start")
        draft.evaluate(options["grpo.val_period"], _sampling_of_evaluation(options), before=at_start)


def _longest_response(options: Options) -> int:
    """Return the most tokens of a response, which never exceed those of a row."""
    longest = options[LONGEST]
    most = options["policy.generation.max_new_tokens"] or longest
    return int(min(most, longest))


def _sampling_of_evaluation(options: Options) -> dict[str, Any]:
    """Return how an evaluation samples, as far as that is known here."""
    sampling = {"n": options["grpo.val_num_generations_per_prompt"]}
    for attribute in ("temperature", "top_p", "top_k"):
        value = options[f"policy.generation.val_{attribute}"]
        is_known = value is not None and not isinstance(value, str)
        if is_known:
            sampling[attribute] = value
    sampling.setdefault("temperature", options["policy.generation.temperature"])
    return sampling


def _loss(draft: Draft, options: Options) -> None:
    """Give the update NeMo-RL's loss, and the mean that it is taken by."""
    loss = _loss_attributes(options)
    draft.edit("replace", **{"update_policy.loss": loss})
    is_by_token = options.is_on("loss_fn.token_level_loss")
    draft.set("update_policy.aggregate", "token-mean" if is_by_token else "seq-mean-token-mean")
    steps = 1 if loss["kind"] == "reinforce" else minibatches(options)
    draft.set("update_policy.minibatches", steps)
    if draft.has("update_critic"):
        draft.set("update_critic.minibatches", minibatches(options))
        draft.set("update_critic.epochs", options["grpo.ppo_epochs"])


def _loss_attributes(options: Options) -> dict[str, Any]:
    if options.is_on("loss_fn.disable_ppo_ratio"):
        return {"kind": "reinforce"}
    bounds = {"clip": options["loss_fn.ratio_clip_min"], "clip_high": options["loss_fn.ratio_clip_max"]}
    if options.is_on("loss_fn.use_cispo"):
        return {"kind": "cispo", **bounds}
    loss: dict[str, Any] = {"kind": "ppo_clip", **bounds}
    if options.is_on("loss_fn.sequence_level_importance_ratios"):
        loss["level"] = "sequence"
    if options["loss_fn.ratio_clip_c"] is not None:
        loss["dual_clip"] = options["loss_fn.ratio_clip_c"]
    return loss


def _reference(draft: Draft, options: Options) -> None:
    """Put the KL where NeMo-RL has it: into the loss, into rewards, or nowhere."""
    beta = options[BETA]
    in_reward = options.is_on("loss_fn.use_kl_in_reward")
    draft.remove("update_policy.kl_coef", "update_policy.kl")
    if draft.has("shaped"):  # of ppo
        draft.set("shaped.beta", float(beta) if in_reward else 0.0)
        draft.set("shaped.kl", options[KL])
    if not beta:
        if draft.has("shaped"):
            draft.set("shaped.in.ref_logprobs", "old_logprobs")  # read, and times 0
        draft.remove("ref_logprobs", "models.ref")
        return
    draft.add_reference()
    if not in_reward:
        draft.set("update_policy.kl_coef", beta)
        draft.set("update_policy.kl", options[KL])
        if draft.value("update_policy.loss.kind") != "reinforce":
            draft.set("update_policy.kl_unbiased", True)


def _rewards(draft: Draft, options: Options) -> str:
    """Map and shape rewards, as NeMo-RL does in this order; return the column with the final rewards."""
    rewards = "rewards"
    if options.is_on("grpo.reward_scaling.enabled"):
        draft.edit("add", scaled={**_scaling(options), "in": {"rewards": rewards}})
        rewards = "scaled"
    if not options.is_on("grpo.reward_shaping.enabled"):
        return rewards
    share = options["grpo.reward_shaping.stop_properly_penalty_coef"]  # that a truncated response keeps
    if share is None:
        draft.edit("add", overlong={**overlong(options), "in": {"rewards": rewards}})
        return "overlong"
    if not share:
        draft.edit("add", ended={"op": "reward.truncated", "reward": 0, "in": {"rewards": rewards}})
        return "ended"
    return rewards


def _scaling(options: Options) -> dict[str, Any]:
    """Return what maps rewards from one interval to another, and cuts them to it."""
    ends = {"source_min": 0.0, "source_max": 1.0, "target_min": 0.0, "target_max": 1.0}
    for end in ends:
        value = options[f"grpo.reward_scaling.{end}"]
        if value is not None:
            ends[end] = float(value)
    source_length = ends["source_max"] - ends["source_min"]
    target_length = ends["target_max"] - ends["target_min"]
    factor = target_length / source_length
    return {
        "op": "reward.scale",
        "factor": factor,
        "shift": round(ends["target_min"] / factor - ends["source_min"], 9),
        "low": min(ends["target_min"], ends["target_max"]),
        "high": max(ends["target_min"], ends["target_max"]),
    }


def overlong(options: Options) -> dict[str, Any]:
    """Return the penalty on long responses.

    NeMo-RL's grows by one slope from max_response_length less the buffer on, beyond max_response_length too:
    up to the longest response, which the node has for its limit.
    """
    section = "grpo.reward_shaping"
    buffer = int(options[f"{section}.overlong_buffer_length"] or 128)
    limit = int(options[f"{section}.max_response_length"] or options[LONGEST])
    penalty = options[f"{section}.overlong_buffer_penalty"]
    if penalty is None:
        penalty = 1.0
    longest = _longest_response(options)
    penalized_tokens = max(longest - (limit - buffer), 1)
    return {
        "op": "reward.overlong",
        "limit": longest,
        "buffer": min(penalized_tokens, longest),
        "penalty": float(penalty) / buffer * penalized_tokens,
    }


def _advantages(draft: Draft, options: Options, name: str, rewards: str) -> None:
    """Compare rewards as the estimator does; what is one number per sample stands on each of its tokens."""
    if name == "reinforce_plus_plus":
        _reinforce_advantages(draft, options, rewards)
    elif name != "gdpo":
        _group_advantages(draft, options, rewards)
    elif rewards != "rewards":
        draft.set("advantages.in.rewards", rewards)


def _reinforce_advantages(draft: Draft, options: Options, rewards: str) -> None:
    """Whiten rewards over the batch, after the mean of their group is taken off where NeMo-RL does so."""
    is_centred = options.values.get("grpo.adv_estimator.minus_baseline", True)
    if is_centred and not _has_kl_in_reward(options):
        draft.edit("replace", advantages={"op": "advantage.reinforce_pp_baseline", **_reads(rewards)})
        return
    if is_centred:
        normal = {"op": "reward.whiten", "mean": "group", "std": "none", "in": {"rewards": rewards}}
        draft.edit("add", normal=normal)
        rewards = "normal"
    _by_token(draft, options, rewards, whiten=True)


def _group_advantages(draft: Draft, options: Options, rewards: str) -> None:
    """Compare the rewards of a group; where advantages are cut, by nodes of their own."""
    leave_one_out = _switch(options, "use_leave_one_out_baseline")
    divides = _switch(options, "normalize_rewards")
    bounds = {}
    for end in ("low", "high"):
        bound = options[f"grpo.advantage_clip_{end}"]
        if bound is not None:
            bounds[end] = bound
    if not bounds and not leave_one_out:
        draft.edit("replace", advantages={"op": "advantage.grpo", "scale": divides, **_reads(rewards)})
        return
    if not bounds and not divides:
        draft.edit("replace", advantages={"op": "advantage.rloo", **_reads(rewards)})
        return
    normal = {
        "op": "reward.whiten",
        "mean": "group",
        "std": "group" if divides else "none",
        "leave_one_out": leave_one_out,
        "in": {"rewards": rewards},
    }
    draft.edit("add", normal=normal)
    compared = "normal"
    if bounds:
        draft.edit("add", cut={"op": "reward.scale", **bounds, "in": {"rewards": "normal"}})
        compared = "cut"
    _by_token(draft, options, compared, whiten=False)


def _has_kl_in_reward(options: Options) -> bool:
    return bool(options[BETA]) and options.is_on("loss_fn.use_kl_in_reward")


def _switch(options: Options, name: str) -> bool:
    """Return a switch of the estimator: its own, or that of grpo, which it names by default."""
    value = options.values.get(f"grpo.adv_estimator.{name}")
    if value is None:
        value = options[f"grpo.{name}"]
    return bool(value)


def _by_token(draft: Draft, options: Options, rewards: str, whiten: bool) -> None:
    """Put one number per sample on its tokens, less a KL where that is part of the reward."""
    reads = {"rewards": rewards}
    shaped: dict[str, Any] = {"op": "reward.kl_penalty", "beta": 0.0, "in": reads}
    if _has_kl_in_reward(options):
        shaped |= {"beta": options[BETA], "kl": options[KL]}
    else:
        reads["ref_logprobs"] = "old_logprobs"  # read, and times 0
    draft.edit("add", shaped=shaped)
    spread = {"op": "advantage.reinforce_pp", "gamma": 1.0, "whiten": whiten}
    draft.edit("replace", advantages={**spread, "in": {"rewards": "shaped"}})


def _reads(rewards: str) -> dict[str, Any]:
    """Return the `in` of a node that reads rewards; nothing where it reads the column of that name."""
    if rewards == "rewards":
        return {}
    return {"in": {"rewards": rewards}}


def _filter(draft: Draft, options: Options) -> None:
    """Sample groups of one reward again, by the reward before it is shaped."""
    refill: dict[str, Any] = {"rounds": options["grpo.dynamic_sampling_max_gen_batches"]}
    if options["grpo.batch_multiplier"] > 1:
        refill["expected"] = round(1 / options["grpo.batch_multiplier"], 6)
    added = {"op": "filter.mixed", "refill": refill, "in": {"rewards": "rewards"}}
    draft.edit("add", informative=added)
    for node in ("old_logprobs", "ref_logprobs", "values", "normal", "cut", "shaped", "advantages"):
        if draft.has(node):
            draft.set(f"{node}.rows", "informative")


def _correct(draft: Draft, options: Options) -> None:
    """Weigh tokens, or sequences, by how far the engine that sampled is from the one that trains."""
    level = "sequence" if options.is_on("loss_fn.sequence_level_importance_ratios") else "token"
    low = options[f"{BOUND}_min"]
    high = options[BOUND]
    weights: dict[str, Any]
    match options[KIND]:
        case "seq-mask-tis":
            draft.correct_within(low, high, level)
            return
        case "icepop":
            weights = {"op": "correction.mis", "level": level, "low": low or 0.0, "high": high}
        case "tis":
            weights = {"op": "correction.tis", "level": level, "cap": high}
            if low:
                weights["floor"] = low
        case _:
            weights = {"op": "correction.tis", "level": level, "cap": None}
    draft.edit("add", rollout_weights=weights)


def _rows(draft: Draft, options: Options) -> None:
    """Name the files and columns of the rows, where they are of a file."""
    source = SOURCES.get(options.table.kind, "prompts")
    path = str(options["data.train.data_path"] or "")
    if path and not is_reference(path):
        draft.set(f"{source}.files", [options.path(path)])
    columns = {"question": options["data.train.input_key"]}
    if source != "pairs":
        columns["answer"] = options["data.train.output_key"]
    for attribute, column in columns.items():
        if column:
            draft.set(f"{source}.{attribute}", column)
    template_options = options.nested("policy.tokenizer.chat_template_kwargs.*")
    if template_options:
        known = {name: value for name, value in template_options.items() if "${" not in str(value)}
        draft.set(f"{source}.template_options", known)


def _ends_by_steps(options: Options) -> bool:
    """Return whether the number of steps ends a run, and not that of epochs."""
    steps = options["grpo.max_num_steps"]
    return isinstance(steps, int) and 0 < steps < NO_LIMIT


def _length(draft: Draft, options: Options) -> None:
    """End the run after steps, or after epochs where steps are given that end none."""
    if _ends_by_steps(options):
        draft.set("schedule.iterations", options["grpo.max_num_steps"])
        return
    epochs = options["grpo.max_num_epochs"]
    if isinstance(epochs, int | float) and epochs > 0:
        draft.remove("schedule.iterations")
        draft.set("schedule.epochs", epochs)


def _optimizer(draft: Draft, options: Options) -> None:
    """Set the warm-up and the adapters, which stand in several keys of a backend."""
    model = "models.reward" if options.table.kind == "rm" else "models.policy"
    is_megatron = options.is_on(MEGATRON)
    section = "policy.megatron_cfg.peft" if is_megatron else "policy.dtensor_cfg.lora_cfg"
    if options.is_on(f"{section}.enabled"):
        adapters = options.nested(f"{section}.*")
        draft.set(f"{model}.train.lora", _lora(adapters, is_megatron))
    if is_megatron:  # the table has the keys of its schedule
        return
    for name, value in schedule_of(options).items():
        draft.set(f"{model}.optimizer.{name}", value)


def _lora(adapters: Mapping[str, Any], is_megatron: bool) -> dict[str, Any]:
    """Return the adapters of a model; NeMo-RL's DTensor backend has them on all layers by default."""
    targets = adapters.get("target_modules") or "all-linear"
    if adapters.get("match_all_linear", not is_megatron):
        targets = "all-linear"
    return {
        "rank": adapters.get("dim", 8),
        "alpha": float(adapters.get("alpha", 32)),
        "targets": targets,
    }


def schedule_of(options: Options) -> dict[str, Any]:
    """Return torch's schedulers of the settings as a warm-up and a schedule.

    ``scheduler`` refuses those that are others, or rise from a share of the rate that is not near 0.
    """
    warmup = 0
    schedule: dict[str, Any] = {}
    for place, (name, settings) in enumerate(_schedulers(options)):
        end = settings.get("end_factor", 1)
        is_warmup = place == 0 and end == 1
        falls_to_zero = not settings.get("eta_min")
        if name == "LinearLR" and is_warmup:
            warmup = int(settings.get("total_iters", 5))
            schedule["warmup_steps"] = warmup
        elif name == "LinearLR" and not end:
            schedule["schedule"] = "linear"
            schedule["total_steps"] = warmup + int(settings["total_iters"])
        elif name == "CosineAnnealingLR" and falls_to_zero:
            schedule["schedule"] = "cosine"
            schedule["total_steps"] = warmup + int(settings["T_max"])
    return schedule


def _schedulers(options: Options) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the names and settings of the schedulers, whether they are one or a list."""
    items = options.values.get("policy.scheduler")
    if not isinstance(items, list):
        items = [options.nested("policy.scheduler.*")]
    schedulers = []
    for item in items:
        if isinstance(item, Mapping) and "name" in item:
            name = str(item["name"]).rpartition(".")[2]
            schedulers.append((name, item.get("kwargs") or {}))
    return schedulers


def scheduler(value: Any, options: Options) -> Any:
    """Say where the schedulers differ from the graph's."""
    if options.is_on(MEGATRON):
        raise Idle(f"has no effect: {MEGATRON} is on")
    for name, settings in _schedulers(options):
        _check_scheduler(name, settings)
    return value


def _check_scheduler(name: str, settings: Mapping[str, Any]) -> None:
    if settings.get("eta_min") or name not in SCHEDULERS:
        raise Hand(f"{name}: set models.policy.optimizer.schedule, min_lr_ratio and warmup_steps")
    if name == "LinearLR" and settings.get("end_factor", 1) == 1:
        _check_warmup(settings.get("start_factor", START_FACTOR))
    if name == "ConstantLR" and settings.get("factor", START_FACTOR) != 1:
        raise Hand("ConstantLR with a factor: let models.policy.optimizer.lr change in steps")


def _check_warmup(start: float) -> None:
    """Refuse a warm-up that begins at more than a thousandth of the rate."""
    if start > 1e-3:
        law = f"the rate rises from 0 over warmup_steps; in NeMo-RL it rises from {start:g} of lr"
        raise Hand(f"{law}: let lr change over iterations to begin elsewhere (docs/language_in_depth.md)")


def _pools(draft: Draft, options: Options) -> None:
    """Place training and generation on one pool, or on two where NeMo-RL has them apart."""
    per_node = int(options["cluster.gpus_per_node"])
    nodes = int(options["cluster.num_nodes"])
    devices = per_node * nodes
    generating = _generating(options, per_node, nodes)
    has_own_devices = 0 < generating < devices
    if not has_own_devices:
        draft.set("pools.main.devices", devices)
        return
    pools = {"train": {"devices": devices - generating}, "gen": {"devices": generating}}
    draft.edit("set", pools=pools)
    draft.set("models.policy.serve.pool", "gen")
    draft.set("models.policy.train.pool", "train")
    if not options.is_on("grpo.async_grpo.enabled"):
        return
    age = int(options["grpo.async_grpo.max_trajectory_age_steps"])
    if options.is_on("grpo.async_grpo.in_flight_weight_updates"):
        draft.set("schedule.buffer", {"staleness": age, "too_old": "wait"})
    elif age:
        draft.set("schedule.buffer", {"staleness": age, "by": "batch"})


def _generating(options: Options, per_node: int, nodes: int) -> int:
    """Return the devices that only generate; 0 where all do both."""
    if options.table.kind in SOURCES:
        return 0
    if options.is_on("policy.generation.colocated.enabled"):
        return 0
    resources = options.nested("policy.generation.colocated.resources.*")
    devices = resources.get("gpus_per_node")
    generating_nodes = resources.get("num_nodes")
    if nodes > 1 and generating_nodes:
        return int(generating_nodes) * int(devices or per_node)
    return int(devices or 0)


def remarks(options: Options) -> Iterator[KeyOutcome]:
    """Yield what the user has to look after and what no single key stands for."""
    facts = options.table.facts["told"]
    kind = options.table.kind
    yield remark("the data", facts["data"])
    if has_media(options):
        yield remark("images", facts["images"])
    if _ends_by_steps(options) and "grpo.max_num_epochs" in options.values:
        steps = options["grpo.max_num_steps"]
        epochs = options["grpo.max_num_epochs"]
        limit = f"schedule.iterations: {steps}, and not epochs: {epochs}"
        yield remark("the length", facts["limits"].format(kept=limit))
    if kind in SOURCES:
        yield remark("the rows", facts["length"])
    elif kind == "distillation":
        yield remark("the loss", facts["distillation"].format(kl_type=options["loss_fn.kl_type"]))
    else:
        yield from _remarks_on_rewards(options, facts)


def _remarks_on_rewards(options: Options, facts: Mapping[str, str]) -> Iterator[KeyOutcome]:
    """Yield what concerns trainers that generate, and learn from rewards."""
    yield remark("the reward", facts["reward"])
    if options["grpo.adv_estimator.name"] == "gdpo":
        yield remark("the rewards", facts["gdpo"])
    yield from _remarks_on_kl(options, facts)
    if options.is_on("loss_fn.disable_ppo_ratio") and minibatches(options) > 1:
        yield remark("the loss", facts["reinforce"].format(minibatches=minibatches(options)))
    if options.is_on("grpo.use_dynamic_sampling") and _switch(options, "use_leave_one_out_baseline"):
        yield remark("dynamic sampling", facts["std"])
    is_by_token = options.is_on("loss_fn.token_level_loss")
    if options.is_on("grpo.overlong_filtering") and not is_by_token:
        yield remark("overlong filtering", facts["filtered"])
    samples = _samples(options)
    step = options["policy.train_global_batch_size"]
    if samples % step:
        text = f"{samples} samples are not a whole number of steps of {step}: set update_policy.minibatches"
        yield KeyOutcome("policy.train_global_batch_size", step, "hand", text)


def _remarks_on_kl(options: Options, facts: Mapping[str, str]) -> Iterator[KeyOutcome]:
    if _has_kl_in_reward(options) and options.table.kind == "grpo":
        yield remark("the KL", facts["kl_per_token"])
        return
    if not options[BETA]:
        return
    if options.is_on("loss_fn.disable_ppo_ratio"):
        yield remark("the KL", facts["unread"])
    elif minibatches(options) > 1:
        yield remark("the KL", facts["unbiased"].format(minibatches=minibatches(options)))
    if options.is_on("loss_fn.use_on_policy_kl_approximation"):
        yield remark("the KL", facts["approximation"])


def has_media(options: Options) -> bool:
    """Return whether rows have images, video or sound: by a switch, an environment or a processor."""
    if options.is_on("policy.is_vlm"):
        return True
    processor = str(options.values.get("data.default.processor", ""))
    if "vlm" in processor:
        return True
    return any("env.vlm." in key or "limit_mm_per_prompt" in key for key in options.values)


def _samples(options: Options) -> int:
    return int(options["grpo.num_prompts_per_step"]) * int(options["grpo.num_generations_per_prompt"])


def minibatches(options: Options) -> int:
    """Return the optimizer steps of an iteration: NeMo-RL's global batches are counted in samples."""
    return max(_samples(options) // int(options["policy.train_global_batch_size"]), 1)


def dtensor(value: Any, options: Options) -> Any:
    if options.is_on(MEGATRON):
        raise Idle(f"has no effect: {MEGATRON} is on")
    return value


def value_dtensor(value: Any, options: Options) -> Any:
    if options.is_on("value.megatron_cfg.enabled"):
        raise Idle("has no effect: value.megatron_cfg.enabled is on")
    return value


def recompute(value: bool, options: Options) -> bool:
    return bool(dtensor(value, options))


def min_lr(value: float, options: Options) -> float:
    if options["policy.megatron_cfg.scheduler.lr_decay_style"] == "constant":
        raise Idle("has no effect: the rate does not fall")
    return min(round(value / float(options["policy.megatron_cfg.optimizer.lr"]), 9), 0.999999)


def betas(_: float, options: Options) -> list[float]:
    return [float(options[f"policy.megatron_cfg.optimizer.adam_beta{n}"]) for n in (1, 2)]


def decay_iters(value: int, options: Options) -> int:
    if options["policy.megatron_cfg.scheduler.lr_decay_style"] == "constant":
        raise Idle("has no effect: the rate does not fall")
    return int(value)


def is_kept_by_reward(options: Options) -> bool:
    """Return whether the checkpoints that stay are those of the highest mean reward, or the lowest."""
    return _metric(options) == "val:accuracy" and options.is_on("checkpointing.enabled")


def _metric(options: Options) -> str | None:
    """Return the metric by which checkpoints stay; None where the latest ones do."""
    key = "checkpointing.metric_name"
    is_null = key in options.values and options.values[key] is None
    if is_null:
        return None
    return str(options[key])


def _keep(draft: Draft, options: Options) -> None:
    """Keep the best checkpoints and the last one, as NeMo-RL does, or the last ones."""
    most = options["checkpointing.keep_top_k"]
    if is_kept_by_reward(options) and draft.has("eval"):
        mode = "max" if options["checkpointing.higher_is_better"] else "min"
        draft.set("schedule.keep", 1)
        draft.keep_best(mode, most)
    elif _metric(options) is None and most:
        draft.set("schedule.keep", most)


def metric_name(value: str, options: Options) -> str:
    is_measured = is_kept_by_reward(options) and options.is_on("grpo.val_period")
    if not is_measured:
        law = f"evaluations don't measure {value}: only the last schedule.keep checkpoints are kept"
        raise Hand(f"{law}: schedule.best takes eval/NAME for a NAME in eval.report (docs/running.md)")
    return value


def must_save_by(value: str, _: Options) -> str:
    """Say which option of the command line does it; ``value`` is days, hours, minutes and seconds."""
    time = ""
    for count, unit in zip(str(value).split(":"), "dhms", strict=True):
        if int(count):
            time += f"{int(count)}{unit}"
    raise Hand(f"rlgraph run --time-limit {time} saves and ends the run in time (docs/running.md)")


def save_period(value: int, options: Options) -> int:
    if not options.is_on("checkpointing.enabled"):
        return 0
    return max(int(value), 0)


def shuffle(value: bool, options: Options) -> bool:
    source = SOURCES.get(options.table.kind)
    if source is None:
        return value
    if value:
        raise Idle(f"set {source}.shuffle where this is false")
    raise Hand(f"set {source}.shuffle: false")


def balance(value: float, options: Options) -> float:
    has_experts = options["policy.megatron_cfg.expert_model_parallel_size"] > 1
    is_balanced = has_experts and not options.is_on("policy.megatron_cfg.peft.enabled")
    if value and not is_balanced:
        raise Hand("of a mixture of experts: models.policy.train.router_aux_loss_coef")
    return value


def served(value: int, _: Options) -> int:
    return int(value)


def start(value: int, _: Options) -> int | None:
    """Return the first iteration that trains the policy, counted from 1."""
    return int(value) + 1 if value else None


CONVERTERS: Converters = {
    **COMMON,
    "dtensor": dtensor,
    "value_dtensor": value_dtensor,
    "recompute": recompute,
    "min_lr": min_lr,
    "betas": betas,
    "warmup_iters": lambda value, _: int(value),
    "decay_iters": decay_iters,
    "save_period": save_period,
    "metric_name": metric_name,
    "must_save_by": must_save_by,
    "shuffle": shuffle,
    "own_tokenizer": own_tokenizer("policy.model_name"),
    "scheduler": scheduler,
    "served": served,
    "balance": balance,
    "start": start,
}
