"""What a train engine holds in each of its parts, found on fake tensors: no weights, no devices, one process.

``FsdpEngine`` itself runs, at full size, under torch's FakeTensorMode, as rank 0 of a process group that does
nothing. Every storage is counted from its first appearance to its end, FSDP2's resizing included. A step is a
sequence of phases; since layers are alike, the peak of each phase grows by as much with each layer, so that
models of 3 and 5 layers say what all layers hold. With all of them it is the same to a few MB, and takes four
times as long.

What is replaced, because fakes have no values: reading weights from files, transformers' question whether
it is being traced (it would make masks) and whether rows are packed, and peft's moving of adapters to a
device; whether packed rows need a mask is said by the setting. Tensors are on the CPU, whose fused attention
keeps what CUDA's flash and memory-efficient kernels keep, the output and a sum for each row; in a ring, where
a chunk attends to all tokens up to its end and a CPU would make a mask, it attends without one. Not seen:
streams, the allocator's rounding and fragmentation, work space inside kernels, and what NCCL and CUDA take.
"""

from __future__ import annotations

import json
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn.functional import scaled_dot_product_attention
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from rlgraph.costs.limits import MASK, ring_ranks
from rlgraph.costs.model_size import CARDS, size_of
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Totals
from rlgraph.runtime.engines import attention, experts
from rlgraph.runtime.engines.fsdp import batching, engine, scoring
from rlgraph.runtime.engines.fsdp.batching import MiniBatch
from rlgraph.runtime.engines.fsdp.host_optimizer import HostAdamW
from rlgraph.runtime.engines.fsdp.load import quiet
from rlgraph.runtime.engines.fsdp.micro_batch import MicroBatch
from rlgraph.runtime.engines.fsdp.terms import SharedPass, Term
from rlgraph.runtime.engines.memory.activations import HostTensor
from rlgraph.runtime.engines.metric_sums import MetricSums
from rlgraph.runtime.engines.sequence.groups import SequenceGroup, row_group, sequence_group
from rlgraph.runtime.engines.weights import naming, pretrained
from rlgraph.runtime.worker.process_groups import expert_group, hybrid_mesh, strided_mesh
from rlgraph.syntax.source import read

GATHERED = "gathered weights"
HOST = "host"  # what belongs to it is not counted
CUT = (3, 5)  # layers that are run in place of all


@dataclass(frozen=True)
class Setting:
    """A step of one model.

    Args:
        model: a name that has a size card, or a folder with a ``config.json``.
        step: ``update`` or ``logprobs`` of a model that trains, ``ref`` (log-probs of a frozen one) or
        ``sync``.
        world: ranks.
        shard: of them share one copy of the model; all of them by default.
        tokens: of a micro-batch, in rows of ``row`` tokens each.
        recompute, dtype: as the train engine's.
        lora: the adapters' rank; 0 for none. They are of ``targets``.
        packed: how rows that lie end to end are told apart, by a ``mask`` or by their ends (``varlen``);
            empty: they lie beside each other.
        sequence: ranks that share the tokens of each row.
        tensor: ranks that divide each layer.
        experts: ranks that divide a mixture's experts, each of which as many tokens choose.
        optimizer_offload, activation_offload: what is on the host, whose memory is not counted.
        optimizer: ``adamw`` or ``muon``, whose step is run behind the micro-batch.
        wide: the head computes in float32.
    """

    model: str
    step: str = "update"
    world: int = 8
    shard: int | None = None
    tokens: int = 16384
    row: int = 4096
    recompute: bool = True
    dtype: str = "bfloat16"
    lora: int = 0
    targets: str | tuple[str, ...] = "all-linear"
    packed: Literal["", "mask", "varlen"] = ""
    sequence: int = 1
    tensor: int = 1
    experts: int = 1
    optimizer_offload: bool = False
    activation_offload: bool = False
    optimizer: str = "adamw"
    wide: bool = False


@dataclass
class Live(TorchDispatchMode):
    """Counts the bytes of live tensors by part, and remembers the largest total of each phase.

    A storage belongs to the part in whose ``within`` it was made. In a backward pass what has the shape of a
    weight is its gradient.
    """

    parts: Counter[str] = field(default_factory=Counter)
    peaks: dict[str, Counter[str]] = field(default_factory=dict)  # of each phase
    phase: str = "before"
    part: str = "activations"
    shapes: frozenset[tuple[int, ...]] = frozenset()  # of weights, while a backward pass runs
    held: dict[int, tuple[int, str]] = field(default_factory=dict)  # storage -> bytes, part
    total: int = 0
    received: Counter[str] = field(default_factory=Counter)  # bytes by collective

    def __post_init__(self) -> None:
        super().__init__()

    def __hash__(self) -> int:
        return id(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, with the local tensors
        if func is torch.ops.aten.embedding_dense_backward.default:
            self.phase = "embeddings"
        out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self.received[func._opname] += _received(func._opname, args)
        if func.namespace not in ("aten", "torch_attn"):
            return out  # FSDP2's own write into what was made for them
        for tensor in tree_leaves(out):
            if isinstance(tensor, FakeTensor) and tensor.fake_device.type != "meta":
                gradient = tuple(tensor.shape) in self.shapes
                self.count(tensor, GATHERED if gradient else self.part, anew=False)
        return out

    def count(self, tensor: torch.Tensor, part: str, anew: bool = True) -> None:
        """Count a tensor's storage to a part; ``anew``: also one that belongs to another part."""
        if part == HOST:
            return
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        key = storage._cdata
        if key not in self.held:
            self.held[key] = (0, part)
            weakref.finalize(storage, self._set, key, 0, "", True)
        self._set(key, storage.nbytes(), part if anew else self.held[key][1])

    def resized(self, storage: Any) -> None:
        key = storage._cdata
        if key in self.held:
            self._set(key, storage.nbytes(), self.held[key][1])

    def _set(self, key: int, size: int, part: str, gone: bool = False) -> None:
        before, owner = self.held[key]
        self.held[key] = (size, part)
        if gone:
            del self.held[key]
        self.parts[owner] -= before
        self.parts[part or owner] += size
        self.total += size - before
        if self.total > self.peaks.get(self.phase, Counter()).total():
            self.peaks[self.phase] = +self.parts

    def within(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose new tensors belong to a part."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.part, outer = part, self.part
            try:
                return function(*args, **kwargs)
            finally:
                self.part = outer

        return counted


def _received(collective: str, args: Any) -> int:
    """The bytes that a rank receives in a collective; of a sum by a ring, all but a part twice."""
    first, second = args[0], args[1]
    if collective == "_allgather_base_":
        return first.nbytes - second.nbytes
    if collective == "_reduce_scatter_base_":
        return second.nbytes - first.nbytes
    if collective == "allgather_":
        return sum(part.nbytes for part in first[0]) - second[0].nbytes
    if collective == "alltoall_base_":
        ranks = dist.ProcessGroup.unbox(args[2]).size()
        if args[3]:  # only with those that it has something from, or for
            ranks = max(sum(map(bool, parts)) for parts in args[3:5])
        return int(first.nbytes) * (ranks - 1) // ranks  # as much from each
    ranks = dist.ProcessGroup.unbox(second).size()
    return 2 * (ranks - 1) * sum(tensor.nbytes for tensor in first) // ranks


def stepped(setting: Setting) -> Counter[str]:
    """The bytes of each part at the peak of an optimizer step by Muon, with gradients and averages."""
    layers = size_of(setting.model).config.num_hidden_layers
    few, more = (_peaks(setting, count)["optimizer step"] for count in CUT)
    return _further(few, more, layers)


def collected(setting: Setting, whole: bool = False) -> Counter[str]:
    """The bytes that a rank receives in each kind of collective of a step of one micro-batch."""
    layers = size_of(setting.model).config.num_hidden_layers
    if whole:
        return _run(setting, layers)[1]
    few, more = (_run(setting, count)[1] for count in CUT)
    return _further(few, more, layers)


def measured(setting: Setting, whole: bool = False) -> Counter[str]:
    """The bytes of each part at the peak of a step; of an update with a micro-batch behind another.

    Args:
        setting: what to run.
        whole: with all layers, rather than with a few.
    """
    layers = size_of(setting.model).config.num_hidden_layers
    if whole or layers <= max(CUT):
        return max(_peaks(setting, layers).values(), key=Counter.total)
    few, more = (_peaks(setting, count) for count in CUT)
    phases = [_further(few[phase], more[phase], layers) for phase in few]
    return max(phases, key=Counter.total)


def _further(few: Counter[str], more: Counter[str], layers: int) -> Counter[str]:
    """What there is with so many layers, from what there is with those of ``CUT``."""
    beyond = (layers - CUT[1]) / (CUT[1] - CUT[0])
    return Counter({part: round(more[part] + beyond * (more[part] - few[part])) for part in few | more})


def _peaks(setting: Setting, layers: int) -> dict[str, Counter[str]]:
    """The parts at the peak of each phase, of a model with so many layers."""
    peaks, _ = _run(setting, layers)
    return {phase: parts for phase, parts in peaks.items() if phase not in ("before", "after")}


@lru_cache(maxsize=len(CUT))  # for a peak and for bytes
def _run(setting: Setting, layers: int) -> tuple[dict[str, Counter[str]], Counter[str]]:
    """The peaks of each phase, and the bytes received, in a step of a model with so many layers."""
    live = Live()
    with ExitStack() as stack:
        path = stack.enter_context(_folder(setting.model, layers))
        where = stack.enter_context(_world(setting))
        for context in _replaced(live):
            stack.enter_context(context)
        masked = setting.packed != "varlen"
        stack.enter_context(patch.object(attention, "needs_mask", lambda *_: masked))
        sequence = sequence_group(dist.group.WORLD, setting.sequence)
        key_heads = size_of(setting.model).config.key_heads
        batch = _batch(setting, replace(sequence, ring=ring_ranks(key_heads, setting.sequence)))
        fakes = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(live)
        made = _engine(setting, path, where, sequence, live)
        live.phase = "forward"
        if setting.step == "sync":
            live.within("staging", _sync)(made)
        elif setting.step == "update":
            _update(made, _faked(batch, fakes), live)
            if setting.optimizer == "muon":
                live.phase = "optimizer step"
                live.within(GATHERED, made.optimizer.step)()
        else:
            _score(made, _faked(batch, fakes))
        live.phase = "after"
    return live.peaks, live.received


def _engine(
    setting: Setting, path: str, where: dict[str, Any], sequence: SequenceGroup, live: Live
) -> engine.FsdpEngine:
    """The engine with its weights, AdamW's averages where it trains, and gradients for an update."""
    frozen = setting.step == "ref"
    with quiet():
        made = engine.FsdpEngine.of(
            path,
            frozen=frozen,
            optimizer=None if frozen else {"lr": 1e-5, "kind": setting.optimizer},
            dtype=setting.dtype,
            head_dtype="float32" if setting.wide else None,
            recompute=setting.recompute,
            lora={"rank": setting.lora, "alpha": 1.0, "targets": _targets(setting)} if setting.lora else None,
            packing=bool(setting.packed),
            sequence=sequence,
            optimizer_offload=setting.optimizer_offload,
            activation_offload=setting.activation_offload,
            group=dist.group.WORLD,
            **where,
        )
    for parameter in made.model.parameters():
        live.count(parameter, "weights")
    if made.optimizer:
        for parameter in made.parameters:
            parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
            live.count(parameter.grad, "gradients")
        live.within("optimizer", made.optimizer.step)()
        if setting.step != "update" or _twice(made):
            made.optimizer.zero_grad(set_to_none=True)
    return made


def _targets(setting: Setting) -> str | list[str]:
    return setting.targets if isinstance(setting.targets, str) else [*setting.targets]


def _twice(made: engine.FsdpEngine) -> bool:
    """Whether a micro-batch runs before the last; else what it leaves is there from the start."""
    return not made.reshard or made.replicas > 1


def _sync(made: engine.FsdpEngine) -> None:
    for _name, _tensor in made.weights("bfloat16"):
        pass


def _score(made: engine.FsdpEngine, batch: MicroBatch) -> None:
    with torch.no_grad(), engine.gathered(made.shards):
        made._stacked(batch, 1.0, None)


def _update(made: engine.FsdpEngine, batch: MicroBatch, live: Live) -> None:
    weights = frozenset(tuple(p.shape) for p in made.model.parameters() if p.dim() > 1)
    backward = torch.Tensor.backward

    def watched(loss: torch.Tensor) -> None:
        live.shapes, live.phase = weights, "head"
        backward(loss)
        live.shapes, live.phase = frozenset(), "forward"

    passes = 2 if _twice(made) else 1
    minibatch = MiniBatch([batch] * passes, (Totals(tokens=1, sequences=1),), passes)
    term = Term({}, lambda batch, _: (batch["logprobs"].values.sum(), {}), torch.arange(0), 0)
    with patch.object(torch.Tensor, "backward", watched):
        made._accumulate([(SharedPass((term,), (MetricSums(),)), minibatch)], MetricSums())


def _batch(setting: Setting, sequence: SequenceGroup) -> MicroBatch:
    """One micro-batch of real tensors; rows are alike, and share no prompt."""
    rows = max(1, setting.tokens // setting.row)
    tokens = Ragged.of([[row, *[0] * (setting.row - 1)] for row in range(rows)])
    wanted = Ragged.of([[False] + [True] * (setting.row - 1)] * rows, dtype=torch.bool)
    columns, device = {"tokens": tokens, "loss_mask": wanted}, torch.device("cpu")
    masked, share = setting.packed != "varlen", 0.0 if setting.packed else None
    budget = batching.Budget(setting.tokens, share, getattr(torch, setting.dtype), masked, sequence)
    if not setting.packed:
        return batching.micro_batches(columns, budget, device)[0]
    units = batching.alike(tokens, batching.scored(wanted))
    width = max(setting.row, min(8 * setting.row, setting.tokens, MASK // setting.tokens))
    lanes = batching.lanes_of(units, width if masked else setting.tokens)
    return batching._packed_batch(columns, lanes, budget, device)


def _faked(batch: MicroBatch, fakes: FakeTensorMode) -> MicroBatch:
    def fake(value: Any) -> Any:
        if isinstance(value, Ragged):
            return Ragged(fake(value.values), fake(value.offsets))
        return fakes.from_tensor(value) if isinstance(value, torch.Tensor) else value

    mask: Any = batch.mask
    if mask:
        cells, *given = mask.func.__self__, *mask.args
        mask = partial(replace(cells, unit=fake(cells.unit), member=fake(cells.member)).mask, *given)
    columns, inputs = tree_map(fake, [batch.columns, batch.inputs])
    places = [fake(tensor) for tensor in (batch.cells, batch.labels, batch.places)]
    turns = tuple(fake(turn) for turn in batch.turns)
    return MicroBatch(columns, inputs, mask, *places, turns, batch.sequence, batch.sizes)


def _replaced(live: Live) -> Iterator[Any]:
    """The replacements that the module speaks of, and the places whose tensors belong to a part."""
    yield patch.object(pretrained, "weights_of", _weights_of)
    yield patch.object(pretrained, "_copy_views", lambda *_: None)
    yield patch.object(pretrained, "_copy_columns", lambda *_: None)
    yield patch.object(experts, "_counted", _even)
    yield patch("transformers.masking_utils.is_tracing", lambda _tensor=None: False)
    yield patch("transformers.masking_utils.find_packed_sequence_indices", lambda position_ids: None)
    yield patch.object(attention, "_to_the_end", _to_all)
    yield patch.object(torch.nn.Module, "to", lambda module, *_, **__: module)
    yield patch.object(FSDPParamGroup, "unshard", live.within(GATHERED, FSDPParamGroup.unshard))
    yield patch.object(
        FSDPParamGroup, "wait_for_unshard", live.within(GATHERED, FSDPParamGroup.wait_for_unshard)
    )
    yield patch.object(HostTensor, "__init__", live.within(HOST, HostTensor.__init__))
    for name in ("__init__", "step"):
        yield patch.object(HostAdamW, name, live.within(HOST, getattr(HostAdamW, name)))
    yield patch.object(MicroBatch, "picked", live.within("logits", MicroBatch.picked))
    forward, backward = (
        live.within("logits", getattr(scoring._Scores, name)) for name in ("forward", "backward")
    )

    def through(*args: Any) -> Any:
        out = backward(*args)
        live.phase = "layers"
        return out

    yield patch.object(scoring._Scores, "forward", staticmethod(forward))
    yield patch.object(scoring._Scores, "backward", staticmethod(through))
    resize, reduce = torch.UntypedStorage.resize_, live.within(GATHERED, FSDPParamGroup.post_backward)

    def resized(storage: Any, size: int) -> Any:
        out = resize(storage, size)
        live.resized(storage)
        return out

    def reduced(group: Any, *args: Any) -> None:
        reduce(group, *args)
        for parameter in group.fsdp_params:
            if parameter.sharded_param.grad is not None:
                live.count(parameter.sharded_param.grad, "gradients")
        if group._partial_reduce_output is not None:
            live.count(group._partial_reduce_output, "gradients")

    yield patch.object(torch.UntypedStorage, "resize_", resized)
    yield patch.object(FSDPParamGroup, "post_backward", reduced)


def _to_all(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Attention of as many bytes as that of the last tokens of rows."""
    out = scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


def _even(flat: torch.Tensor, own: int, group: Any) -> tuple[torch.Tensor, list[int], list[int]]:
    """As many tokens to each rank, and from it."""
    each = [len(flat) // group.size()] * group.size()
    return flat.new_empty(group.size() * own), each, each


def _weights_of(path: str) -> dict[str, pretrained.StoredWeight]:
    """What the files of a checkpoint would hold."""
    from transformers import AutoModelForCausalLM

    from rlgraph.runtime.engines.model_files import ModelFiles

    model = pretrained.shape_of(ModelFiles(path), AutoModelForCausalLM, {}, torch.float32)
    stored = [view for views in naming.views_of(model, []).values() for view in views]
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    return {p.name: pretrained.StoredWeight("", list(p.shape)) for p in stored if p.name not in tied}


@contextmanager
def _folder(model: str, layers: int) -> Iterator[str]:
    """A folder with the configuration of a model, with so many layers."""
    from transformers import AutoConfig

    file = Path(model) / "config.json"
    fields = json.loads(file.read_text()) if file.is_file() else dict(read(CARDS).items[model].plain())
    fields = {**fields, "num_hidden_layers": layers}
    with tempfile.TemporaryDirectory() as folder:
        AutoConfig.for_model(fields.pop("model_type"), **fields).save_pretrained(folder)
        yield folder


@contextmanager
def _world(setting: Setting) -> Iterator[dict[str, Any]]:
    """A mesh of as many ranks, of which this process is the first, and those that divide layers with it;
    collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=setting.world)
    try:
        whole = init_device_mesh("cpu", (setting.world,))
        mesh = hybrid_mesh(whole, setting.shard) if setting.shard else whole
        mesh = strided_mesh(whole, setting.tensor) if setting.tensor > 1 else mesh
        yield {
            "mesh": mesh,
            "tensor": row_group(whole.get_group(), setting.tensor, "tensor_parallel"),
            "experts": expert_group(whole, setting.shard or setting.world, setting.experts),
        }
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # it would return this mesh for another of as many ranks
