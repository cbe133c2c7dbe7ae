"""prime-rl: which nodes its trainers would run, and values that follow from several keys."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
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
    outcomes_of,
    refuse_unknown,
    remark,
)
from rlgraph.importing.options import Options, flattened
from rlgraph.importing.table import KeyTable, table_of
from rlgraph.syntax.source import scalar

GROUP = 8  # samples of a prompt, where prime-rl compares none
NO_CAP = 1e9  # above the largest ratio of dppo_tv, whose logarithm is 20 at most: prime-rl's ratio has no cap
PER_NODE = 8
SOURCES = ("orchestrator.train.source", "orchestrator.eval.source", "train.source", "eval.source")
LORA = "trainer.model.lora"
ALGORITHM = "orchestrator.algo.type"
GROUP_SIZE = "orchestrator.group_size"
WITHOUT_REWARDS = ("opd", "opsd", "sft")  # algorithms that learn from another model's tokens
# an algorithm -> the text about it in the table; for any other, the text of its own name
TEXT_OF_ALGORITHM = {"hierarchical_grpo": "hierarchical", "sft": "distilled"}
WARM = ("linear", "cosine")  # schedules that have a warm-up
# settings of which each source keeps its own value
PER_SOURCE = ("env.", "name", "serve.", "curriculum.", "ratio")
# sections of trainer.model, and the settings that they turn on
SWITCHES = {"ac": "recompute", "ac_offloading": "activation_offload", "compile": "compile"}


def import_prime_rl(words: Sequence[str], folder: Path = Path(), run: str | None = None) -> Imported:
    """Return the graph, to be written to a folder, that does what prime-rl's trainer does.

    Args:
        words: files and flags as prime-rl takes them: ``@ rl.toml``, ``--orchestrator @ orch.toml``,
            ``--trainer.optim.lr 1e-6``. The @ may be left out.
        folder: where the graph is to be written.
        run: rl or sft; null: as the files say.

    Raises:
        GraphError: a file can't be read, or the algorithm is none that there is a graph for.
    """
    settings, files = read_prime_rl(words)
    kind = run or kind_of(settings)
    table = table_of("prime_rl", kind)
    settings, differing = merged_sources(settings)
    for section in ("trainer", "orchestrator"):
        if settings.get(section) == {}:
            del settings[section]
    options = Options(table, with_model(settings), folder)
    draft = _sft(options) if kind == "sft" else _policy_gradient(options)
    _adapters_and_switches(draft, options)
    if kind == "rl":
        _serving(draft, options)
    outcomes = [*remarks(options), *_differing(differing, table)]
    outcomes += outcomes_of(options, draft, CONVERTERS)
    draft.span_hosts(PER_NODE)
    name = "_".join(file.stem for file in files) or f"prime_{kind}"
    return Imported(graph_name(name), "prime-rl", draft, outcomes)


def read_prime_rl(words: Sequence[str]) -> tuple[dict[str, Any], list[Path]]:
    """Return settings by dotted keys, of TOML files and flags, of which later ones replace earlier ones.

    Raises:
        GraphError: there is no such file, or it is not TOML.
    """
    settings: dict[str, Any] = {}
    files: list[Path] = []
    unread = [*words]
    while unread:
        word = unread.pop(0)
        if word == "@":
            continue
        if not word.startswith("--"):
            file = Path(word.removeprefix("@"))
            files.append(file)
            settings |= _of_file(file, "")
            continue
        name, equals, text = word[2:].partition("=")
        next_word = unread[0] if unread else "--"
        if next_word == "@" and len(unread) > 1:  # --orchestrator @ orch.toml
            file = Path(unread[1])
            files.append(file)
            settings |= _of_file(file, _key(name))
            del unread[:2]
        elif equals:
            settings |= _flag(name, text)
        elif next_word == "@" or next_word.startswith("--"):
            settings |= _switch(name)
        else:
            settings |= _flag(name, unread.pop(0))
    return settings, files


def _switch(name: str) -> dict[str, Any]:
    """Return the setting of a flag without a value, as ``--ckpt`` or ``--no-ckpt``."""
    key = _key(name)
    if key.startswith("no_"):
        return {key.removeprefix("no_"): False}
    return {key: True}


def _key(name: str) -> str:
    return name.replace("-", "_")


def _flag(name: str, text: str) -> dict[str, Any]:
    return dict(flattened(_plain(scalar(text)), _key(name)))


def _plain(value: Any) -> Any:
    """Return a value in which "None", by which TOML and flags turn a section off, is false."""
    if isinstance(value, Mapping):
        return {str(name): _plain(child) for name, child in value.items()}
    if isinstance(value, list):
        return [_plain(child) for child in value]
    if value in (None, "None", "none", "null"):
        return False
    return value


def _of_file(file: Path, prefix: str) -> dict[str, Any]:
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        law = f"{file}: {error.strerror or error}"
        remedy = "give files as prime-rl takes them: @ rl.toml, and flags as --trainer.optim.lr 1e-6"
        raise GraphError([Problem("no-file", law, remedy=remedy)]) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        law = f"{file} is not TOML: {error}"
        remedy = "correct the file, or give the TOML file"
        raise GraphError([Problem("no-toml", law, remedy=remedy)]) from error
    settings = dict(flattened(_plain(tree)))
    section = prefix or _section_of(tree)
    if not section:
        return settings
    return {f"{section}.{key}": value for key, value in settings.items()}


def _section_of(tree: Mapping[str, Any]) -> str:
    """Return the section whose keys a file has at its top; "" for a complete rl.toml, and for an sft.toml."""
    data = tree.get("data")
    if isinstance(data, Mapping):
        return "trainer" if "fake" in data else ""
    if tree.keys() & {"trainer", "orchestrator", "inference"}:
        return ""
    for section in table_of("prime_rl").facts["parts"].values():
        if tree.keys() & set(section["has"]):
            return str(section["prefix"])
    return ""


def kind_of(settings: Mapping[str, Any]) -> str:
    """Return rl or sft: the RL trainer's files have an orchestrator or a trainer, SFT's have data.

    Raises:
        GraphError: the settings are of neither.
    """
    sections = {key.partition(".")[0] for key in settings}
    if sections & {"trainer", "orchestrator"}:
        return "rl"
    if sections & {"data", "optim", "scheduler", "val"}:
        return "sft"
    is_evaluation = bool(sections & {"online", "eval"})
    is_server = sections <= {"inference", "slurm"}
    if is_evaluation or is_server:
        law = "these settings are for an inference server or an evaluation, and train nothing"
        remedy = "give an rl.toml or an sft.toml, or say what other files are by --run rl or --run sft"
        raise GraphError([Problem("trains-nothing", law, remedy=remedy)])
    return "rl"


def merged_sources(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Return settings with those of several sources merged, and the values in which the sources differ."""
    merged: dict[str, Any] = {}
    differing: dict[str, list[Any]] = {}
    for key, value in settings.items():
        if key in SOURCES and isinstance(value, list):
            sources = [dict(flattened(source)) for source in value if isinstance(source, Mapping)]
            _merge_sources(key, sources, merged, differing)
        else:
            merged[key] = value
    return merged, differing


def _merge_sources(
    key: str, sources: Sequence[Mapping[str, Any]], merged: dict[str, Any], differing: dict[str, list[Any]]
) -> None:
    """Add to ``merged`` the values that sources share or may differ in, and to ``differing`` all others."""
    for name in dict.fromkeys(chain.from_iterable(sources)):
        values = [source[name] for source in sources if name in source]
        agree = values.count(values[0]) == len(sources)
        if agree:
            merged[f"{key}.{name}"] = values[0]
        elif name.startswith(PER_SOURCE):
            merged[f"{key}.{name}"] = values
        else:
            differing[f"{key}.{name}"] = values
    is_training = key.endswith("train.source")
    if is_training and len(sources) > 1:
        names = [source.get("name", f"number {number}") for number, source in enumerate(sources, 1)]
        differing[key] = names


def with_model(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the model that is served where none is given for the trainer."""
    has_trained = "model.name" in settings or "trainer.model.name" in settings
    if has_trained:
        return dict(settings)
    for key in ("orchestrator.model.name", "inference.vllm.model"):
        if key in settings:
            return {**settings, "trainer.model.name": settings[key]}
    return dict(settings)


def _differing(differing: Mapping[str, Sequence[Any]], table: KeyTable) -> Iterator[KeyOutcome]:
    texts = table.facts["told"]
    for key, values in differing.items():
        text = texts["several"] if key in SOURCES else texts["differ"]
        values_text = ", ".join(str(value) for value in values)
        yield remark(key, text.format(values=values_text))


def has(options: Options, section: str) -> bool:
    """Return whether a section is there: a key of it, or an empty table, and not off."""
    if options.values.get(section) is False:
        return False
    if section in options.values:
        return True
    return any(key.startswith(f"{section}.") for key in options.values)


def is_evaluated(options: Options) -> bool:
    """Return whether a reward is measured on the way: distillation has none here."""
    has_rewards = options[ALGORITHM] not in WITHOUT_REWARDS
    return has_rewards and has(options, "orchestrator.eval")


def _sft(options: Options) -> Draft:
    """Return the graph of SFT on conversations, of which every turn of the assistant is learnt."""
    draft = Draft("sft")
    draft.set("examples.question", "messages")
    draft.set("examples.answer", None)
    draft.set("examples.assistant_turns", "all")
    return draft


def _policy_gradient(options: Options) -> Draft:
    graphs = options.table.facts["algorithms"]
    name = str(options[ALGORITHM])
    law = f"orchestrator.algo.type {name}: there is no graph for this algorithm of prime-rl"
    refuse_unknown(name, graphs, law)
    draft = Draft(graphs[name])
    _data(draft, options)
    _loss(draft, options, name)
    match name:
        case "opd":
            draft.set("advantages.in.old_logprobs", "rollout_logprobs")
            draft.set("models.teacher.path", options["orchestrator.algo.teacher.name"] or "???")
        case "opsd":  # the teacher is the policy itself, which sees a demonstration
            draft.set("advantages.in.old_logprobs", "rollout_logprobs")
            draft.set("refresh.mix", 1.0)
        case "sft":
            _imitate(draft, options)
        case "echo":
            _advantages(draft, options, name)
            _observations(draft, options)
        case _:
            _advantages(draft, options, name)
    _pools(draft, options)
    return draft


def samples(options: Options) -> tuple[int, int]:
    """Return the samples of an iteration and those of a prompt: prime-rl's batch counts samples."""
    group = int(options[GROUP_SIZE] or 1)
    is_compared = options[ALGORITHM] not in (*WITHOUT_REWARDS, "rae")
    if group == 1 and is_compared:
        group = GROUP
    return int(options["orchestrator.batch_size"]), group


def _data(draft: Draft, options: Options) -> None:
    """Set the size of a batch, the longest response, and the evaluation."""
    total, group = samples(options)
    draft.set("rollout.n", group)
    if not options["orchestrator.token_batch_size"]:
        draft.set("prompts.batch", max(total // group, 1))
    longest = int(options["trainer.model.seq_len"])
    longest_served = options["inference.vllm.max_model_len"]
    if longest_served:
        longest = min(longest, int(longest_served))
    most = options["orchestrator.train.sampling.max_completion_tokens"] or longest
    draft.set("rollout.max_total_tokens", longest)
    draft.set("rollout.max_new_tokens", min(int(most), longest - 1))
    draft.set("prompts.max_prompt_tokens", longest - 1)
    if is_evaluated(options):
        draft.evaluate(options["orchestrator.eval.interval"], {"n": 1, "temperature": 1.0})


def _loss(draft: Draft, options: Options, name: str) -> None:
    """Give the update prime-rl's loss: DPPO by total variation, and the KL to what sampled (see ``remarks``).

    Per token -A rho [in the trust region] + kl_tau log(rho)^2, rho = p / p_sampled, over the count of all
    trained tokens of a batch. dppo_tv has the gradient of its first term, k2 is half the second.
    """
    low = options["trainer.loss.dppo_mask_low"]
    high = options["trainer.loss.dppo_mask_high"]
    tau = options["trainer.loss.kl_tau"]
    if name in ("opd", "opsd"):  # fixed there
        low, high, tau = 0.2, 1.0, 1e-3
    elif options["trainer.loss.type"] == "ipo":
        low = high = options["trainer.loss.ipo_threshold"]
    loss = {"kind": "dppo_tv", "limit": _limit(low), "limit_high": _limit(high), "cap": NO_CAP}
    draft.remove("update_policy.kl_coef", "update_policy.kl", "update_policy.norm")
    draft.edit("replace", **{"update_policy.loss": loss})
    draft.set("update_policy.aggregate", "token-mean")
    draft.set("update_policy.minibatches", 1)
    draft.set("update_policy.in.old_logprobs", "rollout_logprobs")
    if tau:
        draft.set("update_policy.in.ref_logprobs", "rollout_logprobs")
        draft.set("update_policy.kl", "k2")
        draft.set("update_policy.kl_coef", 2 * float(tau))
    draft.remove("ref_logprobs", "models.ref", "old_logprobs")


def _limit(value: Any) -> float:
    """Return a mask's threshold as a limit, which is above 0: probabilities differ by 1 at most."""
    return min(float(value), 1.0) or 1e-9


def _advantages(draft: Draft, options: Options, name: str) -> None:
    """Compare rewards as the algorithm does, and leave out what has no advantage."""
    compares = name != "rae"
    divides_by_mean = name == "max_rl"
    if not compares:
        draft.edit("replace", advantages={"op": "advantage.running"})
    elif not divides_by_mean:
        draft.set("advantages.scale", False)
    tau = float(options["trainer.loss.adv_tau"])
    has_factor = tau not in (0.0, 1.0)
    if has_factor and not divides_by_mean:
        draft.edit("add", scaled={"op": "reward.scale", "factor": tau})
        draft.set("advantages.in.rewards", "scaled")
    if compares and options["orchestrator.train.filter_zero_advantages"]:
        draft.edit("add", informative={"op": "filter.mixed"})
        draft.set("advantages.rows", "informative")
        draft.set("update_policy.rows", "informative")


def _observations(draft: Draft, options: Options) -> None:
    """Learn to predict what was answered, beside the policy's loss."""
    draft.set("predict.aggregate", "token-mean")
    draft.set("predict.weight", _weight_of_observations(options))
    if draft.has("informative"):
        draft.set("observed.rows", "informative")
        draft.set("predict.rows", "informative")


def _weight_of_observations(options: Options) -> float:
    """Return the weight of the first role that has one."""
    for key, value in options.values.items():
        is_weight = key.startswith("orchestrator.algo.roles.") and key.endswith(".alpha")
        if is_weight:
            return float(value)
    return 0.1


def _imitate(draft: Draft, options: Options) -> None:
    """Learn every token that a frozen model generates."""
    draft.remove("advantages", "rewards", "prompts.answer_after", "update_policy.kl", "update_policy.kl_coef")
    draft.remove("update_policy.in")
    path = options["orchestrator.algo.sampling.source.name"] or "???"
    draft.edit("add", **{"models.teacher": {"path": path, "frozen": True}})
    draft.set("rollout.model", "teacher")
    draft.set("prompts.answer", None)
    draft.edit("replace", **{"update_policy.loss": {"kind": "sft"}})


def _pools(draft: Draft, options: Options) -> None:
    """Give generation its own devices, as prime-rl does, and let it stream."""
    train, generate = devices(options)
    draft.set("pools.main.devices", train)
    draft.edit("add", **{"pools.rollout": {"devices": generate}})
    sampler = "policy"
    if draft.has("rollout.model"):
        sampler = draft.value("rollout.model")
    draft.set(f"models.{sampler}.serve.pool", "rollout")
    if sampler != "policy":  # what a frozen model generates is never too old
        return
    buffer: dict[str, Any] = {"too_old": "drop"}
    most_samples = "orchestrator.concurrency.max_inflight"
    if options.values.get(most_samples):
        _, group = samples(options)
        buffer["in_flight"] = max(int(options[most_samples]) // group, 1)
    draft.set("schedule.buffer", buffer)


def _adapters_and_switches(draft: Draft, options: Options) -> None:
    """Set the adapters, and what sections of the model turn on, such as recomputation."""
    train = "models.policy.train"
    if options.table.kind == "sft":
        trained, _ = devices(options)
        draft.set("pools.main.devices", trained)
    if has(options, LORA):
        draft.set(f"{train}.lora", _lora(options))
    for section, setting in SWITCHES.items():
        key = f"trainer.model.{section}"
        is_refused = section == "compile" and _replaces_layers(options)
        if has(options, key) and not is_refused:
            draft.set(f"{train}.{setting}", True)
        elif options.values.get(key) is False:
            draft.set(f"{train}.{setting}", False)


def _serving(draft: Draft, options: Options) -> None:
    """Deal experts out to the devices of an engine, where prime-rl does."""
    size = int(options["inference.vllm.tensor_parallel_size"] or 1)
    if size > 1 and options.is_on("inference.vllm.enable_expert_parallel"):
        draft.set("models.policy.serve.sglang.expert_parallel", size)


def _lora(options: Options) -> dict[str, Any]:
    targets = options[f"{LORA}.target_modules"]
    if targets == options.table.rows[f"{LORA}.target_modules"].default:
        targets = "all-linear"
    return {"rank": options[f"{LORA}.rank"], "alpha": float(options[f"{LORA}.alpha"]), "targets": targets}


def _replaces_layers(options: Options) -> bool:
    """Return whether experts are divided or their choice is replayed: such layers are not compiled."""
    divides_experts = options["trainer.model.ep"] not in ("auto", 1)
    return divides_experts or options.is_on("trainer.enable_router_replay")


def devices(options: Options) -> tuple[int, int]:
    """Return the GPUs that train and those that generate."""
    if options["deployment.type"] != "multi_node":
        trained = int(options["deployment.num_train_gpus"])
        generating = options.values.get("deployment.num_infer_gpus") or _devices_of_server(options)
        return trained, int(generating)
    per_node = int(options["deployment.gpus_per_node"])
    training_nodes = int(options["deployment.num_train_nodes"] or 1)
    generating_nodes = options["deployment.num_infer_nodes"]
    if generating_nodes is None:
        generating_nodes = _nodes_of_inference(options)
    replicas = int(options["deployment.num_infer_replicas"])
    return training_nodes * per_node, max(int(generating_nodes), 1) * replicas * per_node


def _devices_of_server(options: Options) -> int:
    """Return the devices of one inference server, where no number of GPUs is given."""
    tensor = int(options["inference.vllm.tensor_parallel_size"] or 1)
    data = int(options["inference.vllm.data_parallel_size"] or 1)
    return tensor * data


def _nodes_of_inference(options: Options) -> int:
    """Return the nodes of a replica, as inference.deployment says them."""

    def count(name: str, otherwise: int = 1) -> int:
        return int(options.values.get(f"inference.deployment.{name}", otherwise))

    match options.values.get("inference.deployment.type"):
        case "multi_node":
            return count("num_nodes", 2)
        case "disaggregated":
            prefill = count("prefill_nodes_per_replica") * count("num_prefill_replicas")
            decode = count("decode_nodes_per_replica") * count("num_decode_replicas")
            return prefill + decode
    return 1


def remarks(options: Options) -> Iterator[KeyOutcome]:
    """Yield what the user has to look after and what no single key stands for."""
    facts = options.table.facts["told"]
    if options.table.kind == "rl":
        yield from _remarks_on_rl(options, facts)
    elif options["data.type"] == "sft":
        yield remark("the batch", facts["packs"])
    else:
        yield remark("the data", facts["fake"])


def _remarks_on_rl(options: Options, facts: Mapping[str, str]) -> Iterator[KeyOutcome]:
    if has(options, "trainer.data.fake"):
        yield remark("the data", facts["fake"])
    tasks = options.values.get("orchestrator.train.source.env.taskset.id") or "none is named"
    names = ", ".join(map(str, tasks)) if isinstance(tasks, list) else str(tasks)
    yield remark("the environment", facts["environment"].format(names=names))
    _, group = samples(options)
    if group > 1 and int(options[GROUP_SIZE] or 1) == 1:
        yield KeyOutcome(GROUP_SIZE, 1, "hand", facts["group"].format(n=GROUP))
    if not options["trainer.max_steps"]:
        yield remark("max_steps", facts["no_end"])
    name = str(options[ALGORITHM])
    drops_zeros = name in ("grpo", "echo", "max_rl")
    if drops_zeros and options["orchestrator.train.filter_zero_advantages"]:
        yield remark("samples without advantage", facts["not_zero"])
    if is_evaluated(options) and options["orchestrator.eval.sampling.temperature"] is None:
        yield remark("the evaluation", facts["sampled"])
    text = facts.get(TEXT_OF_ALGORITHM.get(name, name))
    if text:
        yield remark("the algorithm", text)


def limit(value: float, _: Options) -> float:
    if not value:
        raise Hand("it is 0, which drops every token that moved at all: the graph has 1e-9")
    return value


def adv_tau(value: float, options: Options) -> float:
    if not value:
        raise Hand("it is 0, which leaves only the KL: the graph has 1")
    if options[ALGORITHM] == "max_rl":
        raise Hand("max_rl divides by the mean, so a factor on rewards has no effect: scale lr and kl_coef")
    return value


def served(value: str, options: Options) -> str:
    if value != options["trainer.model.name"]:
        raise Hand(
            "prime-rl's engine reads other files than its trainer; here it has the trained weights: for "
            "fp8, set models.policy.serve.sglang.quantization"
        )
    return value


def betas(_: float, options: Options) -> list[float]:
    second = options["trainer.optim.betas2"]
    is_given = "trainer.optim.betas2" in options.values
    if options["trainer.optim.type"] == "muon" and not is_given:
        second = 0.95  # MuonConfig's own
    return [options["trainer.optim.betas1"], second]


def momentum(value: float, options: Options) -> float:
    if options["trainer.optim.type"] != "muon":
        raise Idle("has no effect: it is for muon")
    return value


def warmup(value: int, options: Options) -> int:
    if options["trainer.scheduler.type"] not in WARM:
        raise Idle("has no effect: the rate is constant from the first step")
    return value


def decay(value: int, options: Options) -> dict[str, Any]:
    """Return the course of a rate that falls in the last steps, one of which is an iteration.

    prime-rl's first step of the fall has the whole rate still, its last one min_lr, or 1e-8 of the rate.
    """
    if options["trainer.scheduler.type"] != "linear" or not value:
        raise Idle("has no effect: the rate does not fall")
    steps = options["trainer.max_steps"]
    lr = float(options["trainer.optim.lr"])
    has_course = steps and lr and value >= 2
    if not has_course:
        raise Hand(
            "for a decay in the last steps, let models.policy.optimizer.lr change over iterations; it ends "
            "at max_steps"
        )
    low = float(options["trainer.scheduler.min_lr"]) or lr * 1e-8
    return {"linear": [lr, low], "over": value - 1, "from": steps - value + 1}


def min_lr(value: float, options: Options) -> float:
    if not value or options["trainer.scheduler.type"] != "cosine":
        raise Idle("has no effect: the rate falls to 0, or does not fall, or follows decay_steps")
    return round(value / float(options["trainer.optim.lr"]), 9)


def max_norm(value: Any, options: Options) -> float:
    """Return the norm that gradients are cut to: 0, for none, where prime-rl turns it off itself."""
    uses_deepep = options["trainer.model.ep_comm_backend"] == "deepep"
    is_turned_off = uses_deepep or options.is_on("trainer.model.full_offload")
    if is_turned_off or not value:
        return 0.0
    return float(value)


def offload(value: Any, options: Options) -> bool:
    stays_on_device = has(options, LORA) or options["trainer.optim.type"] == "muon"
    if value and stays_on_device:
        raise Idle("has no effect: the averages are small, or those of muon, which stay on the device")
    return bool(value)


def expert_parallel(value: Any, options: Options) -> int:
    if value == "auto":
        raise Idle("has no effect: for a mixture of experts, set models.policy.train.expert_parallel")
    if value != 1 and has(options, LORA):
        raise Hand("experts with adapters are not divided among devices: the graph has expert_parallel 1")
    return int(value)


def off_policy(value: int, options: Options) -> int:
    if options[ALGORITHM] == "sft":
        raise Idle("has no effect: a frozen model generates")
    return value


def above_zero(value: float, _: Options) -> float:
    if not value:
        raise Hand("it is 0, so nothing is trained: give a rate above 0, or leave the update out")
    return value


def routing(_: bool, options: Options) -> bool:
    raise Hand(
        "generation streams here, and the choice of experts is not kept for a sample that is continued "
        "later; with schedule.buffer: {staleness: 1, by: batch}, set rollout.routing: true"
    )


def shard(value: int, options: Options) -> int:
    if value == 1:
        raise Idle("has no effect: parameters are divided among all devices")
    return max(devices(options)[0] // int(value), 1)


def dataset(value: str, options: Options) -> list[str]:
    """Return the files of a set: a path that there is, else what the hub's rows were written to."""
    if not Path(value).exists():
        text = "write the hub's rows to a file, and name it in examples.files: "
        raise Hand(f"{text}datasets.load_dataset({value!r})")
    return [options.path(value)]


def demonstration(value: str, options: Options) -> str:
    if options[ALGORITHM] != "opsd":
        raise Idle("has no effect: it is for opsd")
    return value


CONVERTERS: Converters = {
    **COMMON,
    "limit": limit,
    "adv_tau": adv_tau,
    "served": served,
    "betas": betas,
    "momentum": momentum,
    "warmup": warmup,
    "decay": decay,
    "min_lr": min_lr,
    "max_norm": max_norm,
    "offload": offload,
    "expert_parallel": expert_parallel,
    "shard": shard,
    "routing": routing,
    "off_policy": off_policy,
    "above_zero": above_zero,
    "island": lambda value, o: int(value) * int(o["deployment.gpus_per_node"]),
    "dataset": dataset,
    "demonstration": demonstration,
}
