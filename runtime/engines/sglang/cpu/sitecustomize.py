"""Read by every Python process of an SGLang server on a CPU, before anything else.

torchvision comes as a CUDA build; the operators that it would register for shapes need a library that is not
here. SGLang imports it for image models alone. And SGLang registers memory of the host with CUDA where it
notes the experts that a mixture chose, and pins it where layers have adapters: here it stays as it is.
"""

import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

NAME = "torchvision._meta_registrations"
sys.modules.setdefault(NAME, types.ModuleType(NAME))


class Mended:
    """Finds a module of SGLang, once, and mends it when it is loaded."""

    def __init__(self, name: str, mend: Callable[[Any], None]) -> None:
        self.name, self.mend = name, mend

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the module's spec, whose loader mends it; None for any other module."""
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def mended(module: Any) -> None:
            load(module)
            self.mend(module)

        spec.loader.exec_module = mended
        return spec


def unregistered(module: Any) -> None:
    """Leave memory of the host out of CUDA's register."""
    module._cuda_host_register = lambda *_: None


def unpinned(module: Any) -> None:
    """Leave what layers with adapters note on the host in plain memory: pinning it needs a GPU."""
    torch = module.torch

    class Torch(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            made = getattr(torch, name)
            if name not in ("tensor", "zeros", "empty"):
                return made
            return lambda *sizes, pin_memory=False, **options: made(*sizes, **options)

    torch.Tensor.pin_memory = lambda tensor, *_: tensor
    module.torch = Torch("torch")


sys.meta_path[:0] = [
    Mended("sglang.srt.mem_cache.pool_host.common", unregistered),
    Mended("sglang.srt.lora.layers", unpinned),
    Mended("sglang.srt.lora.backend.torch_backend", unpinned),
]
