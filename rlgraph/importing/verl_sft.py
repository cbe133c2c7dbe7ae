"""verl's SFT trainer: a graph that imitates rows of messages."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlgraph.importing.draft import Draft
from rlgraph.importing.importer import (
    COMMON,
    Converters,
    Idle,
    Imported,
    KeyOutcome,
    epochs_of,
    graph_name,
    outcomes_of,
    remark,
)
from rlgraph.importing.options import Options
from rlgraph.importing.parallel import allowed, combined
from rlgraph.importing.table import table_of
from rlgraph.syntax.interval import Interval

# any of these steps the optimizer in host memory
OFFLOADS = (
    "engine.offload_policy",
    "optim.override_optimizer_config.optimizer_offload_fraction",
    "optim.override_optimizer_config.optimizer_cpu_offload",
)
SHARERS = ("ulysses_sequence_parallel_size", "context_parallel_size")  # of FSDP, and of Megatron
ONE = 1  # trainer.n_gpus_per_node of a configuration that torchrun starts, which does not read it
EARLIER = ("model.partial_pretrain", "model.fsdp_config", "data.multiturn.enable")  # keys of fsdp_sft_trainer
OTHERS = (
    "it is for fsdp_sft_trainer, which verl 0.9.1 no longer has; the defaults are those of sft_trainer: "
    "give the configuration that the run printed, or its learning rate, betas, schedule and warm-up"
)


def import_verl_sft(settings: Mapping[str, Any], file: Path | None, folder: Path = Path()) -> Imported:
    """Return the graph, to be written to a folder, that does what verl's SFT trainer does with settings."""
    table = table_of("verl_sft")
    engine = settings.get("engine") or settings.get("engine.strategy")
    defaults = table.facts["engines"].get(str(engine), {})
    options = Options(table.with_defaults(defaults), settings, folder)
    draft = Draft("sft")
    if options["trainer.total_training_steps"] is None:
        draft.remove("schedule.iterations")
    if _has_messages(options):
        draft.set("examples.answer", None)
        draft.set("examples.assistant_turns", "all")
    outcomes = _remarks(settings)
    outcomes += outcomes_of(options, draft, CONVERTERS)
    outcomes += combined(draft)
    outcomes += allowed(draft)
    name = options["trainer.experiment_name"] or (file.stem if file else "imported")
    return Imported(graph_name(str(name)), "verl", draft, outcomes)


def _remarks(settings: Mapping[str, Any]) -> list[KeyOutcome]:
    """Return what the user has to know of settings of an earlier trainer."""
    for key in settings:
        if key.startswith(EARLIER):
            return [remark("the defaults", f"{key}: {OTHERS}")]
    return []


def _has_messages(options: Options) -> bool:
    """Return whether rows are messages: they are in 0.9.1, and in older ones without columns of texts."""
    return options["data.prompt_key"] is None and options["data.response_key"] is None


def messages(value: str, options: Options) -> str:
    if not _has_messages(options):
        raise Idle("has no effect: prompt_key and response_key are given")
    return value


def tools(value: str, options: Options) -> str:
    """Return the column with a row's tools, where the user names it: rows without it are read as they are."""
    if "data.tools_key" not in options.values:
        raise Idle("rows without this column are read too; if they have it, set examples.row_tools")
    return value


def tokens(value: int, options: Options) -> int:
    if not options.is_on("data.use_dynamic_bsz"):
        raise Idle("has no effect: data.use_dynamic_bsz is off")
    sharers = max(int(options[f"engine.{key}"]) for key in SHARERS)
    return int(value) * sharers


def shared(value: int, _: Options) -> int:
    """Return the devices that share a row in Megatron; one is what FSDP's own key says."""
    if int(value) == 1:
        raise Idle("nothing is divided")
    return int(value)


def rows(value: int, options: Options) -> int:
    if options.is_on("data.use_dynamic_bsz"):
        raise Idle("has no effect: data.use_dynamic_bsz is on")
    return int(value) * int(options["data.max_length"])


def warmup_share(value: float, options: Options) -> float:
    if not value or options["optim.lr_warmup_steps"] > 0:
        raise Idle("has no effect: there is no warm-up, or lr_warmup_steps takes precedence")
    return float(value)


def devices(_: Any, options: Options) -> int:
    each = options["trainer.n_gpus_per_node"]
    if each in (None, ONE):
        raise Idle("has no effect: all devices are used, and torchrun says how many there are")
    return int(options["trainer.nnodes"]) * int(each)


def shard(value: int, options: Options) -> int | None:
    """Return the devices of one copy, of all where verl takes all: below 0, and from their number on."""
    per_node = options["trainer.n_gpus_per_node"]
    known_devices = math.inf
    if per_node not in (None, ONE):
        known_devices = int(options["trainer.nnodes"]) * int(per_node)
    size = int(value)
    is_part = 0 < size < known_devices
    return size if is_part else None  # 0.9.1: create_device_mesh


def epochs(value: Any, options: Options) -> Any:
    if options["trainer.total_training_steps"] is not None:
        raise Idle("has no effect: total_training_steps takes precedence")
    return value


def lora(value: int, options: Options) -> Mapping[str, Any] | None:
    if not value:
        return None
    alpha = options["model.lora_alpha"]
    return {"rank": value, "alpha": float(alpha), "targets": options["model.target_modules"]}


def save_freq(value: int | str, _: Options) -> int | Interval:
    if value == "after_each_epoch":
        return epochs_of(1)
    return max(int(value), 0)


CONVERTERS: Converters = {
    **COMMON,
    "messages": messages,
    "prompt": lambda value, _: value,
    "tools": tools,
    "tokens": tokens,
    "rows": rows,
    "shard": shard,
    "shared": shared,
    "warmup_share": warmup_share,
    "least_rate": lambda value, o: float(value) / float(o["optim.lr"]),
    "offloaded": lambda _, o: any(o.is_on(key) for key in OFFLOADS),
    "devices": devices,
    "epochs": epochs,
    "lora": lora,
    "save_freq": save_freq,
}
