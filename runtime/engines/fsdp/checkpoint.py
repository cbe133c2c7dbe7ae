"""Saves and loads parameters, optimizer and schedule; and exports a model for Hugging Face.

Each rank copies its shards to host memory and writes them from a thread, to a file of its own::

    shard-00000-of-00002.safetensors    model.NAME, exp_avg.NAME, exp_avg_sq.NAME or, of Muon's matrices,
                                        momentum_buffer.NAME: rank 0's rows of each
    shard-00001-of-00002.safetensors
    state.json                          ranks, full shapes, optimizer step counts, the schedule, the biases by
                                        which routers choose experts: by rank 0

Ranks don't wait for each other, so a checkpoint is complete once every rank has finished: then the runtime
commits the folder. Rows lie on ranks as FSDP2 has them, in equal parts but for the last; so any number of
ranks can read its rows out of what any other number wrote. Of several replicas the first writes, and ranks
are counted within it; all of them read. Where ranks have parts of layers (``tensor.py``), state.json says how
many (``tensor``) and along which dimension each tensor is divided (``divided``); a tensor that is whole on
all ranks of a group is written by the first of them. Where experts are divided (``spread``), each rank writes
its rows of that too.
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
    """Writes checkpoints in the background.

    Invariants:
        - At most one is being written (``_pending``); the thread reads host memory only, so that training
          goes on meanwhile.
        - ``_copies`` is not written to until the thread has finished with it.
    """

    def __init__(self, group: dist.ProcessGroup, writes: bool, layer_parts: LayerParts = WHOLE) -> None:
        """Start without a checkpoint.

        Args:
            group: the ranks that together have one copy of the model, or of its ``layer_parts``.
            writes: whether this copy is the one that is written.
            layer_parts: which parameters are divided over ranks, and how.
        """
        self.group = group
        self.writes = writes
        self.layer_parts = layer_parts
        # page-locked copies of tensors on a GPU, for the next save too
        self._copies: dict[str, torch.Tensor] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[dict[str, str]] | None = None

    def begin(self, directory: str, tensors: NamedTensors, state: Mapping[str, Any]) -> None:
        """Copy this rank's shards to host memory, and return while they are written.

        Raises:
            OSError, safetensors.SafetensorError: the save before could not be written.
        """
        self.finish()
        if not self.writes:
            return
        tensor_ranks = self.layer_parts.ranks.ranks
        rank = self.group.rank()
        ranks = self.group.size()
        if self.layer_parts.alike > 1:  # ranks of a tensor group are counted one after the other
            rank = rank * tensor_ranks + self.layer_parts.ranks.rank
            ranks *= tensor_ranks
        shards: dict[str, torch.Tensor] = {}
        divided: dict[str, int] = {}  # tensor -> the dimension along which it is
        for name, tensor in tensors.items():
            cut = self.layer_parts.cut(_weight(name))
            if cut:
                divided[name], _, _ = cut
            if self.layer_parts.writes(_weight(name)):
                shards[name] = local(tensor).detach()
        copies = self._copied(shards)
        state = {"ranks": ranks, "shapes": _shapes(tensors, self.layer_parts), **state}
        if divided:
            state |= {"tensor": tensor_ranks, "divided": divided, "spread": self.layer_parts.spread}
        text = json.dumps(state) if rank == 0 else ""
        self._pending = self._thread.submit(_write, Path(directory), rank, ranks, copies, text)

    def _copied(self, tensors: NamedTensors) -> dict[str, torch.Tensor]:
        """Return tensors in host memory, in buffers that the writing thread has finished with."""
        if all(tensor.is_cpu for tensor in tensors.values()):
            contiguous = torch.contiguous_format
            return {name: tensor.clone(memory_format=contiguous) for name, tensor in tensors.items()}
        earlier = self._copies
        self._copies = {name: _host_buffer(tensor, earlier.get(name)) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            self._copies[name].copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        return self._copies

    def finish(self) -> dict[str, str]:
        """Wait until this rank's files are on disk; return their digests, or raise what writing raised."""
        pending = self._pending
        self._pending = None
        return {} if pending is None else pending.result()


def training_state(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return a checkpoint's content: this rank's tensors by name, and the state common to all ranks.

    A frozen model has neither optimizer nor schedule: its checkpoint has the parameters alone.
    """
    tensors: dict[str, torch.Tensor] = {}
    state: dict[str, Any] = {}
    biases = {name: bias.tolist() for name, bias in model.named_buffers() if name.endswith(WIDE)}
    if optimizer is None or scheduler is None:
        for name, parameter in model.named_parameters():
            tensors[f"model.{name}"] = parameter.detach()
    else:
        _create_moments(optimizer)
        states: dict[str, Mapping[str, torch.Tensor]] = {}  # the optimizer's, by parameter
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                trained = exact(optimizer, parameter)
                tensors[f"model.{name}"] = trained
                states[name] = optimizer.state[trained]
        steps: dict[str, float] = {}
        for name, optimizer_state in states.items():
            if "step" in optimizer_state:
                steps[name] = float(optimizer_state["step"])
        for key in MOMENTS:
            for name, optimizer_state in states.items():
                if key in optimizer_state:
                    tensors[f"{key}.{name}"] = optimizer_state[key]
        state = {"steps": steps, "schedule": scheduler.state_dict()}
    if biases:
        state["biases"] = biases
    return tensors, state


@torch.no_grad()
def load_state(
    directory: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None,
    layer_parts: LayerParts = WHOLE,
) -> None:
    """Read what ``Saves`` wrote of a model of the same shape, on any mesh.

    This process has ``layer_parts`` of the model. The schedule goes on at the optimizer step at which it was,
    with the learning rate that the graph has now.

    Raises:
        FileNotFoundError: the checkpoint is not complete.
        ValueError: it is one of another model.
    """
    tensors, _ = training_state(model, optimizer, scheduler)
    state = json.loads((Path(directory) / "state.json").read_text(encoding="utf-8"))
    shapes = _shapes(tensors, layer_parts)
    saved_shapes = state["shapes"]
    for name in sorted({**shapes, **saved_shapes}):
        shape = shapes.get(name)
        saved_shape = saved_shapes.get(name)
        if shape != saved_shape:
            law = f"{directory} is a checkpoint of another model"
            raise ValueError(f"{law}: {name} is {saved_shape} there and {shape} here")
    _fill_tensors(Path(directory), state, tensors, layer_parts)
    for name, bias in state.get("biases", {}).items():
        model.get_buffer(name).copy_(torch.tensor(bias))
    if optimizer is None or scheduler is None:
        return
    for name, parameter in model.named_parameters():
        if name in state["steps"]:
            trained = exact(optimizer, parameter)
            optimizer.state[trained]["step"].fill_(state["steps"][name])
    peaks = scheduler.base_lrs  # those of the graph as it is now, which may be others than were saved
    scheduler.load_state_dict({**state["schedule"], "base_lrs": peaks})
    set_rate(scheduler, float(peaks[0]))


@torch.no_grad()
def blend(
    targets: NamedTensors,
    weights: Iterable[tuple[str, torch.Tensor]],
    mix: float,
    layer_parts: LayerParts = WHOLE,
) -> None:
    """Set W <- (1 - mix) W + mix W' for what this rank has of the ``targets``, from full weights.

    Raises:
        ValueError: the weights are those of another model.
    """
    for name, full in weights:
        full_shape = list(full.shape)
        if name not in targets:
            raise ValueError(f"{name} is missing in the model copied onto, and {full_shape} in the other")
        shape = layer_parts.shape(name, targets[name])
        if shape != full_shape:
            raise ValueError(f"{name} is {shape} in the model copied onto, and {full_shape} in the other")
        target = local(targets[name])
        source = full[extent(targets[name], layer_parts.cut(name))]
        if mix < 1:
            source = torch.lerp(target.float(), source.to(target.device, torch.float32), mix)
        target.copy_(source)


def write_pretrained(directory: str, model: Any, weights: dict[str, torch.Tensor], files: ModelFiles) -> None:
    """Write a Hugging Face directory from full weights under its names, and the source's other files.

    Tokenizer, chat templates and generation settings are the source's, byte for byte; its configuration has
    the fields that the run changed, and the others as they stand there: transformers would write them in the
    form of its own version, which older readers ignore (such as ``rope_theta``, within ``rope_parameters``
    since 5.0). Where a model comes with Python code, the Python files of its directory are copied too.
    """
    source = local_path(files.path)
    dtypes = set()
    for name, tensor in weights.items():  # before they are saved: save_pretrained takes them out of the dict
        if tensor.is_floating_point() and not name.endswith(WIDE):
            dtypes.add(tensor.dtype)
    with quiet():
        _save_weights(directory, model, weights)
        written = all_fields(model.config)
        if len(dtypes) == 1:  # transformers writes down that of the model's parameters
            written["dtype"] = str(dtypes.pop()).removeprefix("torch.")
        fields = with_changes(files.fields(), all_fields(files.unchanged()), written)
        text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
        Path(directory, "config.json").write_text(text, encoding="utf-8")
        copy_files(source, Path(directory))
        if files.trusted:
            for code in Path(source).glob("*.py"):
                copy(code, directory)


def _save_weights(directory: str, model: Any, weights: dict[str, torch.Tensor]) -> None:
    """Have transformers write weights and a configuration, whatever it thinks of this rank and the model."""
    from transformers import GenerationConfig

    generation_config = getattr(model, "generation_config", None)
    # transformers would write nothing where this is not the first of all ranks, but the first of its pool
    model.should_save_on_this_rank = lambda _: True
    # and nothing where it finds fault with generation settings, which are copied from the source's file
    model.generation_config = GenerationConfig()
    try:
        model.save_pretrained(directory, state_dict=weights, save_original_format=False)
    finally:
        del model.should_save_on_this_rank
        model.generation_config = generation_config


def _host_buffer(tensor: torch.Tensor, earlier: torch.Tensor | None) -> torch.Tensor:
    """Return host memory for a tensor of a device: that of the save before, where it fits."""
    if earlier is not None:
        fits = earlier.shape == tensor.shape and earlier.dtype == tensor.dtype
        if fits:
            return earlier
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _write(
    directory: Path, rank: int, ranks: int, tensors: dict[str, torch.Tensor], state: str
) -> dict[str, str]:
    """Write a rank's files, down to the disk; return their digests by name."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    shard = directory / _shard(rank, ranks)
    save_file(tensors, shard)
    written = [shard]
    if state:
        state_file = directory / "state.json"
        state_file.write_text(state, encoding="utf-8")
        written.append(state_file)
    for path in (*written, directory):
        sync(path)
    return {path.name: sha256(path) for path in written}


def _fill_tensors(
    directory: Path, state: Mapping[str, Any], tensors: NamedTensors, layer_parts: LayerParts
) -> None:
    """Fill what this rank has of each tensor from the shards that hold it."""
    from safetensors import safe_open

    ranks = state["ranks"]
    for rank in range(ranks):
        with safe_open(directory / _shard(rank, ranks), "pt") as file:
            for name, tensor in tensors.items():
                written = _written_extent(state, name, rank)
                if written is None:
                    continue
                overlap = _overlap(written, extent(tensor, layer_parts.cut(_weight(name))))
                if overlap:
                    in_file, in_tensor = overlap
                    local(tensor)[in_tensor].copy_(file.get_slice(name)[in_file])


Slices = tuple[slice, ...]


def _written_extent(state: Mapping[str, Any], name: str, rank: int) -> Slices | None:
    """Return where the rows that a rank wrote lie in a tensor; None where it did not write it."""
    ranks = state["ranks"]
    tensor_ranks = state.get("tensor", 1)
    shape = state["shapes"][name]
    shard, tensor_rank = divmod(rank, tensor_ranks)
    shards = ranks // tensor_ranks
    divided = state.get("divided", {})
    if name in divided:
        return extent_of(shape, (divided[name], tensor_rank, tensor_ranks), (shard, shards))
    if state.get("spread", False):  # each rank has rows of what is whole
        return extent_of(shape, None, (rank, ranks))
    if tensor_rank == 0:  # the first of a tensor group writes what is whole on all of them
        return extent_of(shape, None, (shard, shards))
    return None


def _overlap(left: Slices, right: Slices) -> tuple[Slices, Slices] | None:
    """Return where two extents of a tensor overlap, counted within each; None where they do not.

    Example:
        >>> _overlap((slice(0, 4),), (slice(2, 6),))
        ((slice(2, 4, None),), (slice(0, 2, None),))
    """
    in_left = []
    in_right = []
    for a, b in zip(left, right, strict=True):
        start = max(a.start, b.start)
        stop = min(a.stop, b.stop)
        if start >= stop:
            return None
        in_left.append(slice(start - a.start, stop - a.start))
        in_right.append(slice(start - b.start, stop - b.start))
    return tuple(in_left), tuple(in_right)


def _shapes(tensors: NamedTensors, layer_parts: LayerParts) -> dict[str, list[int]]:
    """Return the shapes of full tensors, of which this process has ``layer_parts``."""
    return {name: layer_parts.shape(_weight(name), tensor) for name, tensor in tensors.items()}


def _weight(name: str) -> str:
    """Return the parameter's name in a tensor's: ``NAME`` of ``model.NAME``, or of one of ``MOMENTS``."""
    return name.partition(".")[2]


def _shard(rank: int, ranks: int) -> str:
    return f"shard-{rank:05}-of-{ranks:05}.safetensors"


def _create_moments(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer that never stepped its zero moments: torch would take a step to make them."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if optimizer.state[parameter]:
                continue
            state = {key: torch.zeros_like(parameter) for key in moments_of(group)}
            if "betas" in group:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            optimizer.state[parameter] = state
