"""verl: which nodes its trainer would run, and values that follow from several keys."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlgraph.errors import GraphError, Problem
from rlgraph.importing.draft import Draft
from rlgraph.importing.flags import chosen_launch, launches_in
from rlgraph.importing.importer import (
    COMMON,
    Converters,
    Hand,
    Idle,
    Imported,
    KeyOutcome,
    graph_name,
    outcomes_of,
    read_alike,
    refuse_unknown,
    remark,
)
from rlgraph.importing.options import Options, read_settings
from rlgraph.importing.parallel import allowed, combined, replicates
from rlgraph.importing.shell import flags_of
from rlgraph.importing.table import KeyTable, table_of
from rlgraph.importing.verl_sft import import_verl_sft

# sections and keys of verl's configuration
ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
CRITIC = "critic"
SCORED = "actor_rollout_ref.rollout"  # where log-probs of the policy are set
TENSOR = "tensor_model_parallel_size"
EXPERT = "expert_parallel_size"
REWARD = "reward.custom_reward_function"
OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg"
FILTER = "algorithm.filter_groups"
CORRECTION = "algorithm.rollout_correction"
BYPASS = f"{CORRECTION}.bypass_mode"
DISTILLATION = "distillation.distillation_loss"
IN_REWARD = "algorithm.use_kl_in_reward"
IN_LOSS = f"{ACTOR}.use_kl_loss"
HYBRID = "actor_rollout_ref.hybrid_engine"
# any of these steps the optimizer in host memory
OFFLOADS = (
    "fsdp_config.offload_policy",
    "optim.override_optimizer_config.optimizer_offload_fraction",
    "optim.override_optimizer_config.optimizer_cpu_offload",
)
# under override_config, and no fields of config.json
NO_FIELDS = (
    "attn_implementation",
    "model_config",
    "moe_config",
    "embd_pdrop",
    "resid_pdrop",
    "summary_dropout_prob",
)
# a value of any of these says that rows have images, video or sound
MEDIA_KEYS = ("data.image_key", "data.video_key", "data.audio_key", "actor_rollout_ref.rollout.limit_images")

TRUTH = "reward_model.ground_truth"  # the column of verl's rows that has the right answer
PACKAGE = "pkg://"  # of load_module, verl/utils/import_utils.py (0.9.1)
FILE = "file://"
MOST_PER_HOST = 8  # devices of a host, as of the GPUs that servers span
TOKENS = 16384  # of a micro-batch on one device, verl's ppo_max_token_len_per_gpu
CAP = 2.0  # of importance weights, where verl's rollout_is_threshold says none
MOST_REWARDS = 4  # that advantage.gdpo reads
ONE_TEACHER = "teacher_model"  # the entry of verl's file, which counts where there is no other
# ops of advantages that read old_logprobs
ADVANTAGES_OF_LOGPROBS = ("advantage.distill", "advantage.optimal_token_baseline")
REJECTION = re.compile(r"(?P<over>token|seq_sum|seq_mean|seq_max)_(?P<kl>k[123])")
OVER = {"token": "token", "seq_sum": "sum", "seq_mean": "mean", "seq_max": "max"}


@dataclass(frozen=True)
class Teacher:
    """A model that a policy is distilled from.

    Attributes:
        name: its entry in distillation.teacher_models.
        path: its files, as the graph has them.
        row_key: the value of a column by which rows are this teacher's; None where nothing says it.
    """

    name: str
    path: str
    row_key: Any


def import_verl(
    file: Path | None,
    overrides: Sequence[str],
    folder: Path = Path(),
    release: str = "",
    config: str | None = None,
) -> Imported:
    """Return the graph, to be written to a folder, that does what verl's trainer does with these settings.

    ``release`` is one of the table's, the newest on PyPI unless it is given; ``config`` is what
    ``--config-name`` says where there is no such file.

    Raises:
        GraphError: the settings can't be read, are of no trainer, or need one that there is no graph for.
    """
    user_settings = read_settings(file, overrides)
    config_settings = table_of("verl").facts["configs"]
    config_name = config or _config_of(user_settings)
    settings = {**config_settings.get(config_name, {}), **user_settings}
    if trainer_of(settings) == "sft":
        return import_verl_sft(settings, file, folder)
    options = Options(_table(settings, release, config), settings, folder)
    draft = draft_of(options)
    outcomes = [*_remarks(options, config)]
    outcomes += outcomes_of(options, draft, CONVERTERS)
    # these change what the keys have set, and so come behind them
    outcomes += read_alike(draft, ("ref", "critic"))
    outcomes += combined(draft)
    outcomes += allowed(draft)
    draft.span_hosts(_devices_per_host(options))
    return Imported(_name_of(options, file), "verl", draft, outcomes)


def _devices_per_host(options: Options) -> int:
    per_node = options["trainer.n_gpus_per_node"]
    if not isinstance(per_node, int):
        return MOST_PER_HOST
    return min(per_node, MOST_PER_HOST)


def _name_of(options: Options, file: Path | None) -> str:
    """Return the graph's name: that of the experiment, or else of the file."""
    experiment = options["trainer.experiment_name"]
    if experiment:
        return graph_name(str(experiment))
    if file is not None:
        return graph_name(file.stem)
    return "imported"


def script_settings(file: Path, launch: int = 1) -> tuple[list[str], dict[str, str]]:
    """Return the overrides of a launch script, which is not run, and the flags beside them.

    Flags are ``config-name`` and ``config-path``; ``launch`` is which launch of the script is meant, from 1.
    What torchrun is told of the devices is among the overrides.

    Raises:
        GraphError: the script can't be read, or has no such launch of one of verl's trainers.
    """
    programs = tuple(table_of("verl").facts["launched"])
    chosen = chosen_launch(file, launches_in(file, programs), launch)
    flags: dict[str, str] = {}
    overrides: list[str] = []
    words = [*chosen.words]
    while words:
        word = words.pop(0)
        if word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
            if not has_value and words:
                value = words.pop(0)
            flags[name] = value
            continue
        is_override = "=" in word or word.startswith("~")
        if is_override:
            overrides.append(word)
    overrides += started_on(chosen.launcher)
    return overrides, flags


def started_on(launcher: Sequence[str]) -> list[str]:
    """Return as overrides on how many devices torchrun starts a trainer, where its flags say it.

    Example:
        >>> started_on(["torchrun", "--nnodes=2", "--nproc-per-node", "8", "-m"])
        ['trainer.nnodes=2', 'trainer.n_gpus_per_node=8']
    """
    programs = [Path(word).name for word in launcher]
    if "torchrun" not in programs:
        return []
    # `flags_of` would take -m for a value of the flag before it
    words = [word for word in launcher if word != "-m"]
    flags = {name.replace("-", "_"): value for name, value in flags_of(words).items()}
    nodes = flags.get("nnodes", 1)
    per_node = flags.get("nproc_per_node")
    is_known = isinstance(nodes, int) and isinstance(per_node, int)
    if not is_known:  # as --nnodes=1:4, or a variable of the script
        return []
    return [f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={per_node}"]


def _config_of(settings: Mapping[str, Any]) -> str:
    """Return the file of verl's that the trainer of these settings reads where the user names no other."""
    if _has_section(settings, "async_training"):
        return "fully_async_ppo_trainer"
    if "rollout.nnodes" in settings:
        return "one_step_off_ppo_trainer"
    return "ppo_trainer"


def _has_section(settings: Mapping[str, Any], section: str) -> bool:
    return any(key.startswith(f"{section}.") for key in settings)


def trainer_of(settings: Mapping[str, Any]) -> str:
    """Return whose settings they are, ppo or sft, by the keys that only one of them has.

    Raises:
        GraphError: they are of a program that evaluates or generates, and trains nothing.
    """
    for program, prefixes in table_of("verl").facts["programs"].items():
        if not _has_key_of(settings, prefixes):
            continue
        if program in ("ppo", "sft"):
            return str(program)
        keys = ", ".join(key for key in settings if key in prefixes)
        law = f"{keys}: these settings are for verl's {program}, which does not train"
        remedy = "`rlgraph eval GRAPH` measures a policy, and `rlgraph chat` samples from it"
        raise GraphError([Problem("no-trainer", law, remedy=remedy)])
    return "ppo"


def _has_key_of(settings: Mapping[str, Any], prefixes: Sequence[str]) -> bool:
    sections = tuple(f"{prefix}." for prefix in prefixes)
    return any(key in prefixes or key.startswith(sections) for key in settings)


def _table(settings: Mapping[str, Any], release: str, config: str | None) -> KeyTable:
    """Return the table with the defaults of a release, and of the engine that trains."""
    table = table_of("verl")
    releases = table.facts["releases"]
    newest = next(iter(releases))
    facts_of_release = releases[release or newest]
    engine_defaults = table.facts["engines"].get(_engine_name(settings, config, table), {})
    defaults = {**engine_defaults, **facts_of_release["defaults"]}
    losses = {**table.facts["losses"], **facts_of_release["losses"]}
    return replace(table.with_defaults(defaults), facts={**table.facts, "losses": losses})


def _engine_name(settings: Mapping[str, Any], config: str | None, table: KeyTable) -> str:
    """Return the engine that trains: as the configuration's name says it, or else its settings."""
    if config:
        named_engines = [name for name in table.facts["engines"] if name in config]
        if named_engines:
            return str(named_engines[-1])
    engine = settings.get("model_engine") or settings.get(f"{ACTOR}.strategy")
    return str(engine or "")


def _remarks(options: Options, config: str | None) -> Iterator[KeyOutcome]:
    """Yield what the user has to know and what no key stands for."""
    texts = options.table.facts["told"]
    has_function = bool(options[f"{REWARD}.path"])
    if not has_function and not _distils(options):
        text = texts["scorers"]
        if options.is_on(f"{OVERLONG}.enable"):
            text += texts["overlong"]
        yield remark("the reward", text)
    if config and config not in options.table.facts["configs"]:
        yield KeyOutcome("--config-name", config, "hand", texts["config"])
    if _generating_devices(options) and not _corrects(options):
        yield remark("the weights", texts["stale"])
    if options.is_on(IN_REWARD) and options["algorithm.adv_estimator"] == "gdpo":
        yield remark("the KL", texts["gdpo"])
    if _has_single_samples(options):
        yield KeyOutcome("rollout.n", 1, "hand", texts["alone"])
    if _has_media(options):
        yield remark("images", texts["images"])


def _corrects(options: Options) -> bool:
    """Return whether verl makes up for rows of older weights: by the loss, by weights or by rejection."""
    corrects_in_loss = options.is_on(BYPASS)
    weighs = bool(options[f"{CORRECTION}.rollout_is"])
    rejects = bool(options[f"{CORRECTION}.rollout_rs"])
    return corrects_in_loss or weighs or rejects


def _has_media(options: Options) -> bool:
    """Return whether the rows have images, video or sound, by a key that says so."""
    for key in MEDIA_KEYS:
        if options.values.get(key):
            return True
    return options.is_on("data.return_multi_modal_inputs")


def _distils(options: Options) -> bool:
    return options.is_on("distillation.enabled")


def draft_of(options: Options) -> Draft:
    """Return the parent of an estimator with the nodes that verl's switches ask for."""
    estimators = options.table.facts["estimators"]
    name = str(options["algorithm.adv_estimator"])
    law = f"algorithm.adv_estimator={name}: there is no graph for this estimator of verl"
    refuse_unknown(name, estimators, law)
    estimator = estimators[name]
    distils = _distils(options)
    # distillation has no rewards, so that nothing is filtered or penalised by them
    drops_groups = options.is_on(f"{FILTER}.enable") and not distils
    has_overlong = options.is_on(f"{OVERLONG}.enable") and not distils
    # the graph dapo has both, and no KL in the reward
    has_dapos_nodes = drops_groups and has_overlong
    is_dapo = has_dapos_nodes and name == "grpo" and not options.is_on(IN_REWARD)
    if distils:
        draft = _distillation(options)
    elif is_dapo:
        draft = _of_estimator("dapo", options, estimator)
    else:
        draft = _of_estimator(estimator["extends"], options, estimator)
    if options["trainer.total_training_steps"] is None:
        draft.remove("schedule.iterations")
    _pools(draft, options)
    _loss(draft, options)
    compares_tokens = estimator["compares"] == "tokens"
    _reference(draft, options, per_token=compares_tokens and not distils)
    _data(draft, options)
    if name == "gdpo":
        _rewards_by_key(draft, options)
    if has_overlong and not is_dapo:
        _penalize_overlong(draft, options)
    if drops_groups:
        _filter(draft, options)
    _correction(draft, options)
    _drop_unread(draft, options)
    if options.is_on("actor_rollout_ref.rollout.multi_turn.enable"):
        draft.set("rollout.op", "rollout.agent")
    return draft


def _of_estimator(parent: str, options: Options, estimator: Mapping[str, Any]) -> Draft:
    """Return a parent with the values that the table has for the estimator."""
    draft = Draft(parent)
    for path, value in estimator.get("set", {}).items():
        draft.set(path, value)
    if _has_single_samples(options):
        _take_rewards(draft, bool(estimator["alone"]["whiten"]))
    return draft


def _penalize_overlong(draft: Draft, options: Options) -> None:
    """Take a penalty off the rewards of long responses."""
    penalty = {
        "op": "reward.overlong",
        "on": "rewards",
        "limit": "${nodes.rollout.max_new_tokens}",
        "buffer": options[f"{OVERLONG}.len"],
    }
    draft.edit("insert", overlong=penalty)


def _has_single_samples(options: Options) -> bool:
    """Return whether a prompt has one sample, though the estimator compares samples.

    verl's estimators then take 0 for the mean and 1 for the deviation of the samples to compare: the reward
    itself remains, or that whitened over the batch. A few estimators don't, and ``check`` refuses one sample
    for those.
    """
    if _distils(options):
        return False
    if options["actor_rollout_ref.rollout.n"] != 1:
        return False
    name = str(options["algorithm.adv_estimator"])
    return "alone" in options.table.facts["estimators"][name]


def _take_rewards(draft: Draft, whiten: bool) -> None:
    """Let the advantage of each token be its sample's reward, or that whitened over the batch's tokens."""
    advantages = {
        "op": "advantage.reinforce_pp",
        "gamma": 1.0,
        "whiten": whiten,
        "in": {"rewards": "token_rewards"},
    }
    draft.edit("add", token_rewards={"op": "reward.kl_penalty", "beta": 0.0})
    draft.edit("replace", advantages=advantages)


def _teachers(options: Options) -> list[Teacher]:
    """Return the teachers that verl counts."""
    section = "distillation.teacher_models."
    end = ".model_path"
    teachers = []
    for key, path in options.values.items():
        is_path = key.startswith(section) and key.endswith(end)
        if path and is_path:
            name = key.removeprefix(section).removesuffix(end)
            row_key = options.values.get(f"{section}{name}.key")
            teachers.append(Teacher(name, options.path(str(path)), row_key))
    if len(teachers) > 1:
        # 0.9.1: the entry of one teacher goes where others are given
        teachers = [teacher for teacher in teachers if teacher.name != ONE_TEACHER]
    return teachers


def _distillation(options: Options) -> Draft:
    """Return the graph distill with its teacher, or a teacher for each value of a column of the rows.

    Raises:
        GraphError: the loss is not a reverse KL of sampled tokens, or nothing says which rows are a
            teacher's.
    """
    _check_distillation(options)
    draft = Draft("distill")
    teachers = _teachers(options)
    if len(teachers) == 1:
        draft.set("models.teacher.path", teachers[0].path)
    elif teachers:
        _teachers_by_row(draft, teachers, options)
    return draft


def _check_distillation(options: Options) -> None:
    """Refuse a loss of distillation other than the reverse KL of sampled tokens."""
    mode = options[f"{DISTILLATION}.loss_mode"]
    is_policy_gradient = options.is_on(f"{DISTILLATION}.use_policy_gradient")
    has_rewards = options.is_on(f"{DISTILLATION}.use_task_rewards")
    if mode == "k1" and is_policy_gradient and not has_rewards:
        return
    law = f"distillation: {DISTILLATION}.loss_mode={mode}: there is a graph for loss_mode k1, "
    law += "use_policy_gradient true and use_task_rewards false"
    remedy = "the closest graphs are distill (by sampled tokens) and distill_reward (with a reward)"
    raise GraphError([Problem("no-graph", law, remedy=remedy)])


def _teachers_by_row(draft: Draft, teachers: Sequence[Teacher], options: Options) -> None:
    """Let each teacher score the rows with its key, as the graph mopd does by source.

    Raises:
        GraphError: a teacher has no key.
    """
    for teacher in teachers:
        if teacher.row_key is None:
            law = f"distillation.teacher_models.{teacher.name} has no key, which says which rows it scores"
            remedy = f"give distillation.teacher_models.{teacher.name}.key, "
            remedy += "a value of distillation.teacher_key"
            raise GraphError([Problem("no-graph", law, remedy=remedy)])
    draft.remove("teacher_logprobs", "models.teacher")
    column = str(options["distillation.teacher_key"])
    draft.set("prompts.columns", {column: {"from": column, "type": "text", "default": ""}})
    for teacher in teachers:
        prefix = re.sub(r"\W+", "_", teacher.name)
        model = f"{prefix}_teacher"
        logprobs = f"{prefix}_logprobs"
        node = {
            "op": "logprobs",
            "model": model,
            "rows": {"by": column, "is": str(teacher.row_key)},
            "out": {logprobs: "teacher_logprobs"},
        }
        draft.edit("add", **{f"models.{model}": {"path": teacher.path, "frozen": True}})
        draft.edit("add", **{logprobs: node})


def _pools(draft: Draft, options: Options) -> None:
    """Give generation a pool of its own where verl does, and say how far it runs ahead."""
    generating = _generating_devices(options)
    if not generating:
        return
    trained = options["trainer.nnodes"] * options["trainer.n_gpus_per_node"]
    draft.edit("set", pools={"train": {"devices": trained}, "gen": {"devices": generating}})
    if not _streams(options):
        draft.set("schedule.buffer", {"staleness": 1, "by": "batch"})
        return
    # verl begins (1 + staleness_threshold) times the prompts of an iteration before its weights change, so
    # that rows are behind by the threshold, rounded up, at most
    ahead = math.ceil(float(options["async_training.staleness_threshold"]))
    draft.set("schedule.buffer", {"staleness": ahead, "too_old": "correct"})
    total = options["rollout.total_rollout_steps"]  # in prompts
    if total:
        draft.set("schedule.iterations", max(1, round(int(total) / batch_of(options))))


def _generating_devices(options: Options) -> int:
    """Return the devices of the pool that only generates; 0 where there is none."""
    if options["rollout.nnodes"]:
        return _devices_of(options, "rollout")
    is_hybrid = options[HYBRID]
    if is_hybrid or not options["actor_rollout_ref.rollout.nnodes"]:
        return 0
    return _devices_of(options, "actor_rollout_ref.rollout")


def _devices_of(options: Options, section: str) -> int:
    """Return the devices of a section that says how many nodes there are, and GPUs in each."""
    return int(options[f"{section}.nnodes"]) * int(options[f"{section}.n_gpus_per_node"])


def devices(_: Any, options: Options) -> int:
    if _generating_devices(options):
        raise Idle("taken: pools.train.devices")
    return _devices_of(options, "trainer")


def shard(value: int, options: Options) -> int | None:
    """Return the devices of one copy, of all where verl takes all: below 0, and from their number on."""
    size = int(value)
    is_part = 0 < size < _devices_of(options, "trainer")
    return size if is_part else None  # 0.9.1: create_device_mesh


def _streams(options: Options) -> bool:
    """Return whether generation and training run at the same time, as verl's fully async trainer does."""
    return _has_section(options.values, "async_training")


def _updates_per_sync(options: Options) -> int:
    return int(options["async_training.trigger_parameter_sync_step"] or 1)


def batch_of(options: Options) -> int:
    """Return the prompts of an iteration.

    verl's fully async trainer reads no batch size: it trains on ``require_batches`` mini-batches at a time,
    and sends weights after ``trigger_parameter_sync_step`` of them, which is an iteration here.
    """
    if not _streams(options):
        return int(options["data.train_batch_size"])
    prompts = int(options[f"{ACTOR}.ppo_mini_batch_size"])
    minibatches_per_update = int(options["async_training.require_batches"] or 1)
    return prompts * minibatches_per_update * _updates_per_sync(options)


def _loss(draft: Draft, options: Options) -> None:
    """Give the update verl's loss, whatever the parent's is: verl clips ratios with every estimator."""
    spec = _spec(options) or options.table.facts["losses"]["vanilla"]
    kind = _loss_of(options)
    has_ratio = kind != "reinforce"
    if has_ratio and not draft.has("old_logprobs"):
        draft.edit("add", old_logprobs={"op": "logprobs", "model": "policy"})
    node = spec.get("node")
    if node:
        restrained = {
            "op": node["op"],
            **_values_of_actor(options, node["with"]),
            "minibatches": "${nodes.update_policy.minibatches}",
        }
        draft.edit("add", restrained=restrained)
    loss = {"kind": kind, **_loss_attributes(options, spec)}
    draft.edit("replace", **{"update_policy.loss": loss})
    if not has_ratio:
        draft.set("update_policy.minibatches", 1)
    if "aggregate" in spec:
        draft.set("update_policy.aggregate", spec["aggregate"])
    elif options[f"{ACTOR}.loss_agg_mode"] == "seq-mean-token-sum-norm":
        longest = options[f"{ACTOR}.loss_scale_factor"] or options["data.max_response_length"]
        draft.set("update_policy.norm", longest)
    if has_ratio and options.is_on(BYPASS):
        draft.set("update_policy.in", {"old_logprobs": "rollout_logprobs"})


def _loss_attributes(options: Options, spec: Mapping[str, Any]) -> dict[str, Any]:
    if _distils(options):  # 0.9.1: the loss of distillation has bounds of its own, and no others
        return {
            "clip": options[f"{DISTILLATION}.clip_ratio_low"],
            "clip_high": options[f"{DISTILLATION}.clip_ratio_high"],
            "dual_clip": options.table.rows[f"{ACTOR}.clip_ratio_c"].default,
        }
    if _reinforces(options):
        return _weighed(options)
    return _values_of_actor(options, spec.get("with", {}))


def _values_of_actor(options: Options, keys: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of keys of the actor, by the names of our attributes."""
    return {attribute: _of_actor(options, key) for attribute, key in keys.items()}


def _drop_unread(draft: Draft, options: Options) -> None:
    """Leave out the scoring pass whose log-probs nothing reads: the ratio is to what sampled, or none."""
    is_read_by_loss = not options.is_on(BYPASS) and _loss_of(options) != "reinforce"
    if is_read_by_loss:
        return
    if draft.value("advantages.op") in ADVANTAGES_OF_LOGPROBS:
        return
    for reader in ("shaped", "restrained", "rollout_weights"):
        if draft.has(reader):
            return
    draft.remove("old_logprobs")


def _loss_of(options: Options) -> str:
    """Return the kind of loss that the update has."""
    if not _reinforces(options):
        spec = _spec(options) or options.table.facts["losses"]["vanilla"]
        return str(spec["kind"])
    if _weighed(options):
        return "cispo"
    return "reinforce"


def _reinforces(options: Options) -> bool:
    """Return whether the loss is REINFORCE, which verl has in bypass mode only."""
    if _distils(options):
        return False
    return options.is_on(BYPASS) and options[f"{CORRECTION}.loss_type"] == "reinforce"


def _weighed(options: Options) -> dict[str, Any]:
    """Return the attributes of cispo that weigh a policy gradient as verl's REINFORCE in bypass mode does.

    Its weights are the ratio of now to what sampled, capped, without a gradient: those of cispo without a
    lower bound.
    """
    if options[f"{CORRECTION}.rollout_is"] != "token":
        return {}
    _, cap = _bounds(options)
    return {"clip": 1.0, "cap": cap}


def _spec(options: Options) -> Mapping[str, Any]:
    """Return what the table says of the loss; nothing where it has none of the name.

    In bypass mode, and where it distils, verl takes the clipped loss whatever loss_mode says.
    """
    losses = options.table.facts["losses"]
    mode = options[f"{ACTOR}.policy_loss.loss_mode"]
    if options.is_on(BYPASS) or _distils(options):
        mode = "vanilla"
    return dict(losses.get(mode, {}))


def _of_actor(options: Options, key: str) -> Any:
    """Return a key of the actor; a bound of the ratio that is null is clip_ratio."""
    name = f"{ACTOR}.{key}"
    is_null = name in options.values and options.values[name] is None
    if is_null and key in ("clip_ratio_low", "clip_ratio_high"):
        return options[f"{ACTOR}.clip_ratio"]
    return options[name]


def _reference(draft: Draft, options: Options, per_token: bool) -> None:
    """Put the KL where verl has it: into the reward, into the loss, or nowhere."""
    reads_kl_in_reward = options["algorithm.adv_estimator"] != "gdpo"
    in_reward = options.is_on(IN_REWARD) and reads_kl_in_reward
    in_loss = options.is_on(IN_LOSS)
    if not in_loss:
        draft.remove("update_policy.kl_coef", "update_policy.kl")
    if in_reward or in_loss:
        draft.add_reference()
    else:
        draft.remove("ref_logprobs", "models.ref")
    if per_token and not in_reward:
        draft.set("shaped.beta", 0.0)
    if in_reward and not per_token:
        draft.add_kl_per_sample()
        if draft.has("token_rewards"):
            draft.set("token_rewards.in", {"rewards": "scored"})
            draft.set("advantages.in", {"rewards": "token_rewards"})


def _data(draft: Draft, options: Options) -> None:
    """Read verl's rows, score them by the user's function, and evaluate where verl does."""
    if _distils(options):
        return
    _rewards(draft, options)
    if options.is_on("trainer.test_freq"):
        draft.evaluate(options["trainer.test_freq"], {"n": 1, "temperature": 0})


def _rewards(draft: Draft, options: Options) -> None:
    """Read the right answers, and score by the user's function where there is one."""
    draft.set("prompts.answer", TRUTH)
    draft.set("prompts.answer_after", None)
    path = options[f"{REWARD}.path"]
    if not path:
        return
    columns = {
        "ground_truth": {"from": TRUTH, "type": "json"},
        "data_source": {"from": options["data.reward_fn_key"], "type": "text", "default": ""},
        "extra_info": {"type": "json", "default": {}},
    }
    draft.set("prompts.columns", columns)
    function = options[f"{REWARD}.name"]
    node: dict[str, Any] = {"op": "reward.verl", "function": f"{_module(path, options)}:{function}"}
    arguments = options.nested(f"{REWARD}.reward_kwargs.*")
    if arguments:
        node["arguments"] = arguments
    draft.edit("replace", rewards=node)
    if draft.has("greedy_rewards"):
        greedy = {
            **node,
            "in": {"responses": "greedy_responses"},
            "out": {"rewards": "greedy_rewards", "failed": "greedy_failed"},
        }
        draft.edit("replace", greedy_rewards=greedy)


def _module(path: str, options: Options) -> str:
    """Return the module that verl loads from a path, as a graph names it: a file, or with pkg:// a module."""
    if path.startswith(PACKAGE):
        return path.removeprefix(PACKAGE).replace("/", ".")
    return options.path(path.removeprefix(FILE))


def _rewards_by_key(draft: Draft, options: Options) -> None:
    """Give the graph gdpo a reward for each of the keys of what the user's function returns.

    Raises:
        GraphError: there is no function that returns them, or there are more than advantage.gdpo reads.
    """
    keys = options["algorithm.gdpo_reward_keys"] or []
    has_function = bool(options[f"{REWARD}.path"])
    if not has_function or not 1 <= len(keys) <= MOST_REWARDS:
        law = "algorithm.adv_estimator=gdpo compares rewards by algorithm.gdpo_reward_keys, "
        law += f"{len(keys)} here, of what reward.custom_reward_function returns"
        remedy = f"give both, with 1 to {MOST_REWARDS} keys"
        raise GraphError([Problem("no-graph", law, remedy=remedy)])
    weights = options["algorithm.gdpo_reward_weights"] or [1.0] * len(keys)
    draft.remove("formatted")
    # each further reward calls the function of the first one, and takes another key of what it returns
    node = {"op": draft.value("rewards.op"), "function": draft.value("rewards.function")}
    arguments = draft.value("rewards.arguments")
    if arguments is not None:
        node["arguments"] = arguments
    draft.set("rewards.key", keys[0])
    advantages: dict[str, Any] = {"op": "advantage.gdpo", "weight": float(weights[0])}
    inputs: dict[str, str] = {}
    further = zip(keys[1:], weights[1:], strict=False)
    for number, (key, weight) in enumerate(further, 2):
        rewards = f"rewards_{number}"
        outs = {"rewards": rewards, "failed": f"failed_{number}"}
        draft.edit("add", **{rewards: {**node, "key": key, "out": outs}})
        advantages[f"weight_{number}"] = float(weight)
        inputs[rewards] = rewards
    if len(keys) == 1:
        advantages["weight_2"] = 0.0
    if inputs:
        advantages["in"] = inputs
    draft.edit("replace", advantages=advantages)


def _filter(draft: Draft, options: Options) -> None:
    """Sample groups of one reward again, as dynamic sampling does."""
    generated = options["data.gen_batch_size"]
    trained = batch_of(options)
    expected_share = None
    if generated and generated > trained:
        expected_share = trained / generated
    draft.sample_mixed_groups(options[f"{FILTER}.max_num_gen_batches"], expected_share)
    judges_score = options[f"{FILTER}.metric"] in ("acc", "score")  # which is the reward before penalties
    if draft.has("overlong") and not judges_score:
        draft.set("informative.in", {"rewards": "overlong"})


def _bounds(options: Options) -> tuple[float | None, float]:
    """Return the least and the largest ratio that verl's rollout_is_threshold says.

    It is the largest, as ``2.0``, or both, as ``0.5_2.0``.
    """
    threshold = options[f"{CORRECTION}.rollout_is_threshold"]
    if threshold is None:
        return None, CAP
    low, mark, high = str(threshold).partition("_")
    if mark:
        return float(low), float(high)
    return None, float(threshold)


def _correction(draft: Draft, options: Options) -> None:
    """Weigh tokens by how far the engine that sampled is from the one that trains, and leave out some.

    In bypass mode verl's loss itself weighs or clips by the ratio to what sampled, so that nothing is added.
    """
    if options.is_on(BYPASS):
        return
    nodes = [*_weights(options), *_rejections(options)]
    if not nodes and _generating_devices(options):
        # rows are of older weights, for which verl makes up in no way here: weights of 1 say so
        nodes.append({"op": "correction.tis", "floor": 1.0, "cap": 1.0})
    # a chain: each multiplies the weights of the one before, and the update reads the last
    for number, node in enumerate(nodes, 1):
        name = f"weights_{number}"
        if number == len(nodes):
            name = "rollout_weights"
        if number > 1:
            node["in"] = {"weights": f"weights_{number - 1}"}
        draft.edit("add", **{name: node})


def _weights(options: Options) -> Iterator[dict[str, Any]]:
    """Yield the node of importance weights, if there are any."""
    level = options[f"{CORRECTION}.rollout_is"]
    low, cap = _bounds(options)
    if options.is_on(f"{ACTOR}.tis_imp_ratio_cap"):  # it asks for weights by itself
        level = "token"
        low = None
        cap = options[f"{ACTOR}.tis_imp_ratio_cap"]
    if level not in ("token", "sequence"):
        return
    if low is None:
        yield {"op": "correction.tis", "level": level, "cap": cap}
    else:
        yield {"op": "correction.mis", "level": level, "low": low, "high": cap}


def _rejections(options: Options) -> Iterator[dict[str, Any]]:
    """Yield a node of correction.reject for each mode of rollout_rs."""
    modes = _names_in(options[f"{CORRECTION}.rollout_rs"] or "")
    thresholds = str(options[f"{CORRECTION}.rollout_rs_threshold"] or "")
    bounds = [bound.strip() for bound in thresholds.split(",")]
    if len(bounds) == 1:
        bounds *= len(modes)
    distinct_modes = dict.fromkeys(modes)
    for mode, bound in zip(distinct_modes, bounds, strict=False):
        match = REJECTION.fullmatch(mode)
        if match is None or not bound:
            continue
        over = OVER[match["over"]]
        if match["kl"] == "k1":
            yield {"op": "correction.reject", **_bounds_of_k1(bound), "kl": "k1", "over": over}
        else:
            yield {"op": "correction.reject", "threshold": float(bound), "kl": match["kl"], "over": over}


def _bounds_of_k1(bound: str) -> dict[str, float]:
    """Return verl's bounds of a ratio, ``2.0`` or ``0.5_2.0``, as bounds of its logarithm."""
    low, mark, high = bound.partition("_")
    if mark:
        return {"threshold": math.log(float(high)), "least": math.log(float(low))}
    most = math.log(float(bound))
    return {"threshold": most, "least": -most}


def _names_in(text: str) -> list[str]:
    """Return the names in a text with commas between them."""
    names = [name.strip() for name in str(text).split(",")]
    return [name for name in names if name]


def corrected(value: str, options: Options) -> str:
    """Refuse importance weights that the loss of bypass mode does not take."""
    if not options.is_on(BYPASS):
        return value
    if options[f"{CORRECTION}.loss_type"] != "reinforce":
        raise Idle("has no effect: in bypass mode the clipped loss takes no weights")
    if value == "sequence":
        raise Hand(
            "no loss weights a token by the product of its sequence's current ratios: nothing is weighted"
        )
    return value


def rejected(value: str, options: Options) -> str:
    """Say how rejection differs from verl's, or which modes have no node."""
    if options.is_on(BYPASS):
        raise Hand("in bypass mode verl rejects by current log-probs at each step; here nothing is rejected")
    modes = [mode.strip() for mode in str(value).split(",")]
    unknown = [mode for mode in modes if not REJECTION.fullmatch(mode)]
    if unknown:
        raise Hand(
            f"{', '.join(unknown)}: verl 0.9.1 has token, seq_sum, seq_mean and seq_max, with k1, k2 or k3"
        )
    raise Hand(
        "taken as correction.reject; rejected tokens still count in the mean of update_policy.aggregate, "
        "while verl leaves them out, so a step is smaller by the rejected share"
    )


def batch_normalized(value: bool, options: Options) -> bool:
    """Refuse to normalise weights, where there are any."""
    if value and options[f"{CORRECTION}.rollout_is"]:
        raise Hand("weights are not normalised; your own op can divide them by their mean")
    return value


def truncate(_: Any, options: Options) -> str | None:
    """Return what becomes of rows that are too long: verl drops them where it filters."""
    if options["data.filter_overlong_prompts"]:
        return None
    side = str(options["data.truncation"])
    return "refuse" if side == "error" else side


def minibatches(value: int, options: Options) -> int:
    """Return the optimizer steps of a pass; verl's mini-batches are counted in prompts."""
    batch = batch_of(options)
    has_several_passes = options[f"{ACTOR}.ppo_epochs"] > 1
    has_several_steps = batch != value or has_several_passes
    if has_several_steps and _loss_of(options) == "reinforce":
        law = "the loss is the plain policy gradient, which does not correct for earlier steps"
        raise Hand(f"{law}: the graph takes one step per iteration; give it ppo_clip for {batch / value:g}")
    if batch % value:
        law = f"{batch} prompts don't divide into mini-batches of {value}"
        raise Hand(f"{law}: set update_policy.minibatches, {batch / value:.2f} here")
    return int(batch // value)


def critic_minibatches(value: int, options: Options) -> int:
    """Return the optimizer steps of a pass of the critic; where it follows the actor, that says it all."""
    batch = batch_of(options)
    if batch % value == 0:
        return int(batch // value)
    if value == options[f"{ACTOR}.ppo_mini_batch_size"]:
        raise Idle("it follows the actor's")
    law = f"{batch} prompts don't divide into mini-batches of {value}"
    raise Hand(f"{law}: set update_critic.minibatches")


def aggregate(value: str, options: Options) -> str:
    """Return how losses are averaged; of some losses verl has a mean that nobody sets."""
    mean = _spec(options).get("aggregate", value)
    if mean == value:
        return str(mean)
    has_other_terms = options.is_on(IN_LOSS) or options[f"{ACTOR}.entropy_coeff"]
    if has_other_terms:
        raise Hand(f"verl averages the loss by {mean}, KL and entropy by this; the graph uses {mean} for all")
    return str(mean)


def kl_in_reward(value: float, options: Options) -> Any:
    control = "algorithm.kl_ctrl"
    if options[f"{control}.type"] == "fixed":
        return value
    return {
        "adaptive": value,
        "target": options[f"{control}.target_kl"],
        "horizon": options[f"{control}.horizon"],
    }


def steps_of(model: str) -> Callable[[int, Options], int]:
    """Return a converter of iterations into optimizer steps: verl's rate moves once per update call."""

    def steps(value: int, options: Options) -> int:
        iterations = int(value)
        if iterations <= 0:
            return 0
        steps_per_pass = minibatches(options[f"{model}.ppo_mini_batch_size"], options)
        passes = int(options[f"{model}.ppo_epochs"])
        calls = 1
        if _streams(options):
            calls = _updates_per_sync(options)
        return iterations * steps_per_pass // calls * passes

    return steps


def warmup_share(model: str) -> Callable[[float, Options], float]:
    """Return a converter of the share of a run that warms up; verl reads it where no steps are given."""

    def share(value: float, options: Options) -> float:
        has_steps = options[f"{model}.optim.lr_warmup_steps"] > 0
        if not value or has_steps:
            raise Idle("has no effect: there is no warm-up, or lr_warmup_steps takes precedence")
        return float(value)

    return share


def least_rate(model: str) -> Callable[[float, Options], float]:
    """Return a converter of the lowest learning rate into a share of it; Megatron has the rate itself."""

    def share(value: float, options: Options) -> float:
        ratio = float(value) / float(options[f"{model}.optim.lr"])
        if ratio >= 1:
            raise Hand("it is not below lr, so the rate does not change: set the schedule to constant")
        return ratio

    return share


def _engine(options: Options) -> tuple[int, int]:
    """Return the devices of an engine, and the groups of them that have a copy of attention each.

    verl's engines are tensor parallel, beside as many others (data_parallel_size) as share their experts:
    0.9.1 asks that expert_parallel_size is the product. SGLang counts all of these as one engine's.
    """
    tensor = int(options[f"{SCORED}.{TENSOR}"] or 1)
    expert = int(options[f"{SCORED}.{EXPERT}"] or 1)
    copies = max(expert // tensor, 1)
    is_product = expert == tensor * copies
    if is_product and replicates(str(options["actor_rollout_ref.model.path"])):
        return expert, copies
    return tensor, 1


def engine_devices(_: Any, options: Options) -> int:
    return _engine(options)[0]


def attention_copies(value: int, options: Options) -> int:
    """Return the copies of attention in an engine; engines that share nothing are not counted."""
    copies = _engine(options)[1]
    if copies == 1 < int(value):
        raise Hand(
            "the number of engines follows from the pool; for copies of attention in one engine, for Qwen3, "
            "set models.policy.serve.sglang.attention_replicas"
        )
    return copies


def expert_parallel(value: int, options: Options) -> int:
    """Return the devices that experts are dealt out to, where they divide an engine's."""
    devices = _engine(options)[0]
    if devices % int(value):
        law = f"verl divides experts among {value} devices of tensor and data parallel engines"
        raise Hand(
            f"{law}; an engine here has {devices}: set models.policy.serve.sglang.expert_parallel, a divisor"
        )
    return int(value)


def trusted(_: Any, options: Options) -> bool:
    """Return whether code of the model's files may run; here the tokenizer and the model are one thing."""
    trusts_model = options.is_on("actor_rollout_ref.model.trust_remote_code")
    return trusts_model or options.is_on("data.trust_remote_code")


def config_of(model: str) -> Callable[[Any, Options], Mapping[str, Any]]:
    """Return a converter that collects fields of a model's config.json; Megatron nests them once more."""

    def config(_: Any, options: Options) -> Mapping[str, Any]:
        section = f"{model}.model.override_config"
        values: dict[str, Any] = {}
        for key in (f"{section}.*", f"{section}.model_config.*"):
            if key in options.table.rows:
                values |= options.nested(key)
        fields = {name: value for name, value in values.items() if name not in NO_FIELDS}
        if not fields:
            raise Idle("it contains no field of config.json")
        return fields

    return config


def lora(value: int, options: Options) -> Mapping[str, Any] | None:
    if not value:
        return None
    alpha = options["actor_rollout_ref.model.lora_alpha"]
    targets = options["actor_rollout_ref.model.target_modules"]
    return {"rank": value, "alpha": float(alpha), "targets": targets}


def micro_tokens(model: str, switch: str, rows: bool) -> Callable[[int, Options], int]:
    """Return a converter of a micro-batch's size on one device, in tokens or in rows, into tokens.

    A model without a switch counts its micro-batches as the actor does. Each row is taken to be as long as
    one may be, up to the tokens that verl takes where it counts tokens: the size decides about memory and
    speed, and rows are shorter as a rule. Devices that share a row add up.
    """
    switch_key = f"{model}.{switch}"

    def tokens(value: int, options: Options) -> int:
        counts_tokens = options.is_on(f"{ACTOR}.use_dynamic_bsz")
        if options.values.get(switch_key) is not None:
            counts_tokens = options.is_on(switch_key)
        if rows and counts_tokens:
            raise Idle(f"has no effect: {switch_key} is on")
        if not rows and not counts_tokens:
            raise Idle(f"has no effect: {switch_key} is off")
        size = int(value)
        if rows:
            longest = options["data.max_prompt_length"] + options["data.max_response_length"]
            size = int(min(size * longest, max(longest, TOKENS)))
        return size * _sharers(options, model)

    return tokens


def _sharers(options: Options, model: str) -> int:
    """Return the devices that share a row of a model: Ulysses' or those of Megatron's context parallelism."""
    keys = ["ulysses_sequence_parallel_size"]
    if _is_megatrons(options):
        keys.append("megatron.context_parallel_size")
    for key in keys:
        size = options[f"{model}.{key}"] or options[f"{ACTOR}.{key}"]
        if size and int(size) > 1:
            return int(size)
    return 1


def _is_megatrons(options: Options) -> bool:
    """Return whether Megatron trains, as far as it is said: its sizes are given where it does."""
    engine = options["model_engine"] or options[f"{ACTOR}.strategy"]
    if not engine:
        return True
    return engine in ("megatron", "mindspeed")


def megatrons(value: int, options: Options) -> int:
    """Return a parallel size of Megatron's; one is what the graph has, or what FSDP's own keys say."""
    if not _is_megatrons(options):
        raise Idle("has no effect: FSDP trains")
    if int(value) == 1:
        raise Idle("nothing is divided")
    return int(value)


def passes(value: int, options: Options) -> int:
    """Return the passes over a batch; the plain policy gradient has one."""
    if _loss_of(options) == "reinforce" and value > 1:
        raise Hand(
            "the loss is the plain policy gradient, which does not correct for earlier steps: one pass"
        )
    return value


def epochs(value: Any, options: Options) -> Any:
    if options["trainer.total_training_steps"] is not None:
        raise Idle("has no effect: total_training_steps takes precedence")
    if _streams(options) and options["rollout.total_rollout_steps"]:
        raise Idle("has no effect: rollout.total_rollout_steps takes precedence")
    return value


CONVERTERS: Converters = {
    **COMMON,
    "truncate": truncate,
    "minibatches": minibatches,
    "critic_minibatches": critic_minibatches,
    "batch": lambda _, o: batch_of(o),
    "least_rate": least_rate(ACTOR),
    "critic_least_rate": least_rate(CRITIC),
    "expert_parallel": expert_parallel,
    "engine_devices": engine_devices,
    "megatrons": megatrons,
    "attention_copies": attention_copies,
    "trusted": trusted,
    "config": config_of("actor_rollout_ref"),
    "critic_config": config_of(CRITIC),
    "offloaded": lambda _, o: any(o.is_on(f"{ACTOR}.{key}") for key in OFFLOADS),
    "corrected": corrected,
    "rejected": rejected,
    "batch_normalized": batch_normalized,
    "aggregate": aggregate,
    "kl_in_reward": kl_in_reward,
    "shard": shard,
    "steps": steps_of(ACTOR),
    "critic_steps": steps_of(CRITIC),
    "warmup_share": warmup_share(ACTOR),
    "critic_warmup_share": warmup_share(CRITIC),
    "epochs": epochs,
    "passes": passes,
    "devices": devices,
    "critic_warmup": lambda value, _: max(int(value), 1) if value else None,
    "lora": lora,
    "tokens_per_gpu": micro_tokens(ACTOR, "use_dynamic_bsz", rows=False),
    "rows_per_gpu": micro_tokens(ACTOR, "use_dynamic_bsz", rows=True),
    "scored_tokens": micro_tokens(SCORED, "log_prob_use_dynamic_bsz", rows=False),
    "scored_rows": micro_tokens(SCORED, "log_prob_use_dynamic_bsz", rows=True),
    "ref_tokens": micro_tokens(REF, "log_prob_use_dynamic_bsz", rows=False),
    "ref_rows": micro_tokens(REF, "log_prob_use_dynamic_bsz", rows=True),
    "critic_tokens": micro_tokens(CRITIC, "use_dynamic_bsz", rows=False),
    "critic_rows": micro_tokens(CRITIC, "use_dynamic_bsz", rows=True),
}
