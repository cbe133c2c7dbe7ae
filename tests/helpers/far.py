"""A *far* device: it computes on the CPU, says that it is another device, and refuses tensors of the CPU.

With it a machine without a GPU proves that code places its tensors right, and shows what a GPU would be asked
to do::

    with far.device() as seen:
        model.to(far.DEVICE)
        model(tokens)                       # raises: tokens are on the CPU
        model(tokens.to(far.DEVICE))        # the CPU's numbers, on the far device
    assert seen.host_bytes == 0             # nothing came back to the host
    assert not any(call.grouped for call in seen.attention)

It does these things as CUDA does:

- An operation on far tensors and CPU tensors raises, unless the CPU tensors have no dimension. Indices of a
  far tensor may lie on the CPU (``x[index]``, ``x[index] = far``); far indices of a CPU tensor may not.
- ``to``, ``cpu``, ``copy_``, ``item`` and ``tolist`` cross over; ``numpy`` raises.
- Factories take ``device=far.DEVICE``, as ``torch.tensor`` does. A generator of the CPU draws no far numbers.
- Modules move with ``to``; tied parameters stay tied. Autograd and fused optimizers work.

It does not cover storages (a far tensor's has no memory, so that nothing is offloaded, and nothing is written
to a file without ``cpu()``), collectives, sharding, streams, pinned memory, ``torch.compile``, autocast and
CUDA's own kernels: numbers are the CPU's, but for attention, which is PyTorch's composite one. The device's
type is ``lazy``, which PyTorch knows and nothing else here uses: code that asks for ``cuda`` by name takes
its other branch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("lazy", 0)
CPU = torch.device("cpu")
aten = torch.ops.aten

# What may take tensors of both devices. Of an indexed tensor see ``_check``.
CROSSING = {aten.copy_.default, aten._to_copy.default}
INDEXED = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
    aten._unsafe_index_put.default,
}
# What makes the host wait for the device, as the size of the result is a number that the device computes.
# Repeating each element has to wait too, unless it is told the size.
SIZED_BY_DEVICE = {aten.nonzero.default, aten.masked_select.default, aten._unique2.default}


@dataclass(frozen=True)
class Attention:
    """One call of ``scaled_dot_product_attention`` on far tensors."""

    dtype: torch.dtype
    grouped: bool  # with ``enable_gqa``
    masked: bool
    causal: bool
    query: torch.Size
    key: torch.Size


@dataclass
class Seen:
    """What happened on the far device."""

    attention: list[Attention] = field(default_factory=list)
    host_bytes: int = 0  # copied from it
    device_bytes: int = 0  # copied to it
    waits: list[str] = field(default_factory=list)  # operations for which the host waited


class Far(torch.Tensor):
    """A tensor that says that it is on ``DEVICE``; its numbers are in ``near``, on the CPU."""

    near: torch.Tensor

    @staticmethod
    def __new__(cls, near: torch.Tensor) -> Far:
        assert not isinstance(near, Far)
        made: Far = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            near.size(),
            strides=near.stride(),
            storage_offset=near.storage_offset(),
            dtype=near.dtype,
            layout=near.layout,
            device=DEVICE,
        )
        made.near = near
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _carried_out(func, args, kwargs or {}, None)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["near"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> Far:
        return Far(inner["near"])

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"far({self.near!r})"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if not self.dim() else repr(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("a far tensor is not pickled: a GPU's memory would travel; call .cpu() first")

    def tolist(self) -> Any:
        """Numbers, which the host waits for."""
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        """Raise, as a CUDA tensor does."""
        raise TypeError("can't convert a far tensor to numpy; call .cpu() first")


class _Device(TorchDispatchMode):
    """Factories with ``device=DEVICE`` make far tensors; all operations are written down."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _carried_out(func, args, kwargs or {}, self.seen)


class _Attention(TorchFunctionMode):
    """Writes down calls of attention, before PyTorch takes them apart."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            self._record(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _record(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        if query.device == DEVICE:
            call = Attention(
                query.dtype, enable_gqa, attn_mask is not None, is_causal, query.shape, key.shape
            )
            self.seen.attention.append(call)


@contextmanager
def device() -> Iterator[Seen]:
    """Make the far device usable, and write down what happens on it."""
    seen = Seen()
    before = torch._C._only_lift_cpu_tensors()  # so that torch.tensor(..., device=...) arrives here
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with _known_to_torch(), _Attention(seen), _Device(seen):
            yield seen
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


@contextmanager
def _known_to_torch() -> Iterator[None]:
    """Let optimizers take ``fused=True``, and what looks for the device's module find ``torch.lazy``."""
    with pytest.MonkeyPatch.context() as patch:
        fused = optimizer._get_fused_kernels_supported_devices
        patch.setattr(optimizer, "_get_fused_kernels_supported_devices", lambda: [*fused(), DEVICE.type])
        module = SimpleNamespace(is_initialized=lambda: True)
        patch.setattr(torch, DEVICE.type, module, raising=False)
        yield


def to_far(thing: Any) -> Any:
    """A tensor, ``Ragged`` or module on the far device; of a list or mapping each, and all else as it is."""
    return _on(DEVICE, thing)


def to_near(thing: Any) -> Any:
    """The reverse of ``to_far``."""
    return _on(CPU, thing)


def _on(device: torch.device, thing: Any) -> Any:
    if isinstance(thing, list | tuple):
        return type(thing)(_on(device, each) for each in thing)
    if isinstance(thing, dict):
        return {name: _on(device, value) for name, value in thing.items()}
    return thing.to(device) if hasattr(thing, "to") else thing


def _carried_out(func: Any, args: Any, kwargs: Any, seen: Seen | None) -> Any:
    """An operation's result, computed on the CPU: far if it is a far one."""
    leaves = tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    where = kwargs.get("device")
    to = torch.device(where) if where is not None else None
    any_far = any(isinstance(tensor, Far) for tensor in tensors)
    if not any_far and (to is None or to.type != DEVICE.type):
        return func(*args, **kwargs)
    _check(func, args, kwargs, tensors)
    far = {id(tensor.near): tensor for tensor in tensors if isinstance(tensor, Far)}
    near_args, near_kwargs = tree_map(_near, (args, kwargs))
    if (
        func is aten.histc.default and not args[0].is_floating_point()
    ):  # which CUDA counts and the CPU doesn't
        result = func(near_args[0].double(), *near_args[1:], **near_kwargs).to(args[0].dtype)
    else:
        result = func(*near_args, **near_kwargs)
    if seen is not None:
        _write_down(seen, func, args, kwargs, to)
    if func is aten._local_scalar_dense.default:
        return result
    if to is not None and to.type == "cpu":
        return _apart(result, tensors)
    if func is aten.copy_.default and not isinstance(args[0], Far):
        return args[0]

    def out(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in far:
            return far[id(value)]
        with torch.inference_mode(False):  # a view of what is no inference tensor isn't one either
            return Far(value)

    return tree_map(out, result)


def _near(value: Any) -> Any:
    if isinstance(value, Far):
        return value.near
    return CPU if isinstance(value, torch.device) else value


def _apart(result: torch.Tensor, tensors: list[torch.Tensor]) -> torch.Tensor:
    """A copy on the host: what it is a copy of shares no memory with it."""
    shared = any(isinstance(t, Far) and t.near.data_ptr() == result.data_ptr() for t in tensors)
    return result.clone() if shared and result.numel() else result


def _check(func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> None:
    """Refuse what CUDA would refuse.

    Raises:
        RuntimeError: tensors of both devices, or a generator of the CPU.
    """
    generator = kwargs.get("generator")
    if isinstance(generator, torch.Generator):
        raise RuntimeError(f"{func}: a generator of the CPU draws no far numbers")
    if func in CROSSING:
        return
    if func in INDEXED and isinstance(args[0], Far):
        tensors = [args[0], *(value for value in args[2:] if isinstance(value, torch.Tensor))]
    near = [tensor for tensor in tensors if not isinstance(tensor, Far)]
    if func in INDEXED and near and not isinstance(args[0], Far):
        raise RuntimeError(f"{func}: indices should be on the CPU, as the indexed tensor is; they are far")
    written = args[0] if str(func).split(".")[1].endswith("_") and args else None
    wrong = [tensor for tensor in near if tensor.dim() or tensor is written]
    if wrong and len(near) < len(tensors):
        where = ", ".join(f"{'far' if isinstance(t, Far) else 'cpu'}{list(t.shape)}" for t in tensors)
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, found {where}")


def _write_down(seen: Seen, func: Any, args: Any, kwargs: Any, to: torch.device | None) -> None:
    """Bytes that cross over, and operations that the host waits for."""
    if func is aten._local_scalar_dense.default:
        seen.host_bytes += args[0].element_size()
        seen.waits.append(str(func))
    elif func is aten.copy_.default and isinstance(args[0], Far) != isinstance(args[1], Far):
        _crossed(seen, func, args[1], to_host=isinstance(args[1], Far))
    elif func is aten._to_copy.default and to is not None:
        if isinstance(args[0], Far) != (to.type == DEVICE.type):
            _crossed(seen, func, args[0], to_host=isinstance(args[0], Far))
    elif func in SIZED_BY_DEVICE or _sized_by_mask(func, args) or _repeats(func, args, kwargs):
        seen.waits.append(str(func))


def _crossed(seen: Seen, func: Any, tensor: torch.Tensor, to_host: bool) -> None:
    size = tensor.numel() * tensor.element_size()
    if to_host:
        seen.host_bytes += size
        seen.waits.append(str(func))
    else:
        seen.device_bytes += size


def _sized_by_mask(func: Any, args: Any) -> bool:
    """Whether a far tensor is indexed by a far mask."""
    indices = args[1] if func in INDEXED else ()
    return any(isinstance(i, Far) and i.dtype in (torch.bool, torch.uint8) for i in indices)


def _repeats(func: Any, args: Any, kwargs: Any) -> bool:
    sizeless = kwargs.get("output_size") is None
    return func is aten.repeat_interleave.Tensor and sizeless
