"""Saves and loads parameters, optimizer and schedule; and exports a model for Hugging Face.

Each rank copies its shards to host memory and writes them from a thread, to a file of its own::

    shard-00000-of-00002.safetensors    model.NAME, exp_avg.NAME, exp_avg_sq.NAME or, of Muon's matrices,
                                        momentum_buffer.NAME: rank 0's rows of each
    shard-00001-of-00002.safetensors
    state.json                          ranks, full shapes, optimizer step counts, the schedule, the biases by
                                        which routers choose experts: by rank 0

Nobody waits for anybody in it, so a checkpoint is whole once every rank has finished: the runtime commits the
folder then. Rows lie on ranks as FSDP2 has them, in equal parts but for the last; so any number of ranks can
read the rows that it owns out of what any other number wrote. Of several replicas the first writes, and ranks
are counted within it; all of them read. Where ranks have parts of layers (``tensor.py``), state.json says of
how many (``tensor``) and along which dimension each tensor is divided (``divided``); what is whole on all
ranks of a group is written by the first of them. Where experts are divided (``spread``), each rank writes its
rows of that too.
"""

import json
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from shutil import copy
from typing import Any

import torch
import torch.distributed as dist

from rlgraph.files import sha256, sync
from rlgraph.nodes.support.data_file import local_path
from rlgraph.runtime.engines.fsdp.host_optimizer import exact
from rlgraph.runtime.engines.fsdp.load import quiet
from rlgraph.runtime.engines.fsdp.optimizer import MOMENTS, moments_of, set_rate
from rlgraph.runtime.engines.fsdp.shards import local
from rlgraph.runtime.engines.fsdp.tensor import WHOLE, LayerParts
from rlgraph.runtime.engines.model_files import ModelFiles, all_fields, with_changes
from rlgraph.runtime.engines.tokenizer_files import copy_files
from rlgraph.runtime.engines.weights.extents import extent, extent_of
from rlgraph.runtime.engines.weights.transfer import WIDE

NamedTensors = Mapping[str, torch.Tensor]


class Saves:
    """Writes checkpoints in the background, one at a time."""

    def __init__(self, group: dist.ProcessGroup, writes: bool, parts: LayerParts = WHOLE) -> None:
        """``group`` holds one copy of the model, or of its ``parts``; ``writes``: it is the one written."""
        self.group, self.writes, self.parts = group, writes, parts
        # page-locked copies of tensors on a GPU, for the next save too
        self._copies: dict[str, torch.Tensor] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[dict[str, str]] | None = None

    def begin(self, directory: str, tensors: NamedTensors, state: Mapping[str, Any]) -> None:
        """Copy this rank's part to host memory, and return while it is written.

        Raises:
            OSError, safetensors.SafetensorError: the save before could not be written.
        """
        self.finish()
        if not self.writes:
            return
        tensor_rank, tensor_ranks = self.parts.ranks.rank, self.parts.ranks.ranks
        rank, ranks = self.group.rank(), self.group.size()
        if self.parts.alike > 1:
            rank, ranks = rank * tensor_ranks + tensor_rank, ranks * tensor_ranks
        cuts = {name: cut for name in tensors if (cut := self.parts.cut(_weight(name)))}
        written = [name for name in tensors if self.parts.writes(_weight(name))]
        copies = self._copied({name: local(tensors[name]).detach() for name in written})
        divided = {name: dimension for name, (dimension, *_) in cuts.items()}
        state = {"ranks": ranks, "shapes": _shapes(tensors, self.parts), **state}
        state |= {"tensor": tensor_ranks, "divided": divided, "spread": self.parts.spread} if divided else {}
        text = json.dumps(state) if rank == 0 else ""
        self._pending = self._thread.submit(_write, Path(directory), rank, ranks, copies, text)

    def _copied(self, tensors: NamedTensors) -> dict[str, torch.Tensor]:
        """Return tensors in host memory, in buffers that the writing thread has finished with."""
        if all(tensor.is_cpu for tensor in tensors.values()):
            return {n: tensor.clone(memory_format=torch.contiguous_format) for n, tensor in tensors.items()}
        self._copies = {name: _room(tensor, self._copies.get(name)) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            self._copies[name].copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        return self._copies

    def finish(self) -> dict[str, str]:
        """Wait until this rank's part is on disk; return its files' digests, or raise what writing raised."""
        pending, self._pending = self._pending, None
        return {} if pending is None else pending.result()


def training_state(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return a checkpoint's content: this rank's tensors by name, and the state common to all ranks.

    Of a frozen model, which has neither optimizer nor schedule, that is its parameters.
    """
    moved = {name: bias.tolist() for name, bias in model.named_buffers() if name.endswith(WIDE)}
    biases = {"biases": moved} if moved else {}
    if optimizer is None or scheduler is None:
        return {f"model.{name}": p.detach() for name, p in model.named_parameters()}, biases
    trained = {name: exact(optimizer, p) for name, p in model.named_parameters() if p.requires_grad}
    _start(optimizer)
    states = {name: optimizer.state[p] for name, p in trained.items()}
    moments = {f"{key}.{n}": state[key] for key in MOMENTS for n, state in states.items() if key in state}
    steps = {name: float(state["step"]) for name, state in states.items() if "step" in state}
    state = {"steps": steps, "schedule": scheduler.state_dict(), **biases}
    return {**{f"model.{name}": p for name, p in trained.items()}, **moments}, state


@torch.no_grad()
def load_state(
    directory: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None,
    parts: LayerParts = WHOLE,
) -> None:
    """Read what ``Saves`` wrote of a model of the same shape, on any mesh; ``parts`` of it are here.

    The schedule goes on at the optimizer step at which it was, with the learning rate that it has here.

    Raises:
        FileNotFoundError: the checkpoint is not whole.
        ValueError: it is one of another model.
    """
    tensors, _ = training_state(model, optimizer, scheduler)
    state = json.loads((Path(directory) / "state.json").read_text(encoding="utf-8"))
    shapes = _shapes(tensors, parts)
    if wrong := sorted(n for n in {**shapes, **state["shapes"]} if shapes.get(n) != state["shapes"].get(n)):
        saved_shape, own_shape = (by_name.get(wrong[0]) for by_name in (state["shapes"], shapes))
        law = f"{directory} is a checkpoint of another model"
        raise ValueError(f"{law}: {wrong[0]} is {saved_shape} there and {own_shape} here")
    _fill_tensors(Path(directory), state, tensors, parts)
    for name, bias in state.get("biases", {}).items():
        model.get_buffer(name).copy_(torch.tensor(bias))
    if optimizer is None or scheduler is None:
        return
    for name, p in model.named_parameters():
        if name in state["steps"]:
            optimizer.state[exact(optimizer, p)]["step"].fill_(state["steps"][name])
    peaks = scheduler.base_lrs  # those of the graph as it is now, which may be others than were saved
    scheduler.load_state_dict({**state["schedule"], "base_lrs": peaks})
    set_rate(scheduler, float(peaks[0]))


@torch.no_grad()
def blend(
    targets: NamedTensors, weights: Iterable[tuple[str, torch.Tensor]], mix: float, parts: LayerParts = WHOLE
) -> None:
    """Set W <- (1 - mix) W + mix W' for what this rank has of the ``targets``, from full weights.

    Raises:
        ValueError: they are those of another model.
    """
    for name, full in weights:
        shape = parts.shape(name, targets[name]) if name in targets else None
        if shape != [*full.shape]:
            has = f"is {shape}" if shape else "is missing"
            raise ValueError(f"{name} {has} in the model copied onto, and {[*full.shape]} in the other")
        target, source = local(targets[name]), full[extent(targets[name], parts.cut(name))]
        if mix < 1:
            source = torch.lerp(target.float(), source.to(target.device, torch.float32), mix)
        target.copy_(source)


def write_pretrained(directory: str, model: Any, weights: dict[str, torch.Tensor], files: ModelFiles) -> None:
    """Write a Hugging Face directory from full weights as it names them, beside the source's other files.

    Tokenizer, chat templates and generation settings are the source's, byte for byte; its configuration has
    the fields that the run changed, and the others as they stand there: transformers would write them in the
    form of its own version, which older readers pass over (such as ``rope_theta``, within ``rope_parameters``
    since 5.0). Of a model that runs code of its own, the Python files of its directory come with it.
    """
    from transformers import GenerationConfig

    kinds = {t.dtype for n, t in weights.items() if t.is_floating_point() and not n.endswith(WIDE)}
    source = local_path(files.path)
    with quiet():
        # transformers would write nothing where this is not the first of all ranks, but the first of its pool
        model.should_save_on_this_rank = lambda _: True
        # and nothing where it finds fault with generation settings, which come from the source's own file
        settings, model.generation_config = getattr(model, "generation_config", None), GenerationConfig()
        try:
            model.save_pretrained(directory, state_dict=weights, save_original_format=False)
        finally:
            del model.should_save_on_this_rank
            model.generation_config = settings
        written = all_fields(model.config)
        if len(kinds) == 1:  # transformers writes down that of the model's own parameters
            written["dtype"] = str(kinds.pop()).removeprefix("torch.")
        fields = with_changes(files.fields(), all_fields(files.unchanged()), written)
        text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
        Path(directory, "config.json").write_text(text, encoding="utf-8")
        copy_files(source, Path(directory))
        for code in Path(source).glob("*.py") if files.trusted else ():
            copy(code, directory)


def _room(tensor: torch.Tensor, earlier: torch.Tensor | None) -> torch.Tensor:
    """Return host memory for a tensor of a device: that of the save before, where it fits."""
    if earlier is not None and earlier.shape == tensor.shape and earlier.dtype == tensor.dtype:
        return earlier
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _write(
    directory: Path, rank: int, ranks: int, tensors: dict[str, torch.Tensor], state: str
) -> dict[str, str]:
    """Write a rank's part, down to the disk; return the digests of its files by name."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    written = [directory / _shard(rank, ranks)]
    save_file(tensors, written[0])
    if state:
        written.append(directory / "state.json")
        written[1].write_text(state, encoding="utf-8")
    for path in (*written, directory):
        sync(path)
    return {path.name: sha256(path) for path in written}


def _fill_tensors(
    directory: Path, state: Mapping[str, Any], tensors: NamedTensors, parts: LayerParts
) -> None:
    """Fill what this rank has of each tensor from the shards that hold it."""
    from safetensors import safe_open

    ranks, tensor_ranks, divided = state["ranks"], state.get("tensor", 1), state.get("divided", {})
    spread = state.get("spread", False)
    for rank in range(ranks):
        shard, tensor_rank = divmod(rank, tensor_ranks)
        with safe_open(directory / _shard(rank, ranks), "pt") as file:
            for name, tensor in tensors.items():
                cut, lies = (
                    (divided[name], tensor_rank, tensor_ranks) if name in divided else None,
                    (rank, ranks),
                )
                if cut or not spread:
                    lies = shard, ranks // tensor_ranks
                if tensor_rank and not cut and not spread:
                    continue
                written = extent_of(state["shapes"][name], cut, lies)
                if both := _shared(written, extent(tensor, parts.cut(_weight(name)))):
                    in_file, in_tensor = both
                    local(tensor)[in_tensor].copy_(file.get_slice(name)[in_file])


Slices = tuple[slice, ...]


def _shared(left: Slices, right: Slices) -> tuple[Slices, Slices] | None:
    """Return where two extents of a tensor overlap, counted within each; None where they do not.

    Example:
        >>> _shared((slice(0, 4),), (slice(2, 6),))
        ((slice(2, 4, None),), (slice(0, 2, None),))
    """
    spans = [(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(left, right, strict=True)]
    if any(low >= high for low, high in spans):
        return None

    def within(extent: Slices) -> Slices:
        return tuple(slice(x - a.start, y - a.start) for a, (x, y) in zip(extent, spans, strict=True))

    return within(left), within(right)


def _shapes(tensors: NamedTensors, parts: LayerParts) -> dict[str, list[int]]:
    """Return the shapes of whole tensors, of which ``parts`` are here."""
    return {name: parts.shape(_weight(name), tensor) for name, tensor in tensors.items()}


def _weight(name: str) -> str:
    """Return the parameter's name in a tensor's: ``model.NAME`` or one of ``MOMENTS``."""
    return name.partition(".")[2]


def _shard(rank: int, ranks: int) -> str:
    return f"shard-{rank:05}-of-{ranks:05}.safetensors"


def _start(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer that never stepped its zero moments: torch would take a step to make them."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                state = {key: torch.zeros_like(parameter) for key in moments_of(group)}
                if "betas" in group:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                optimizer.state[parameter] = state
