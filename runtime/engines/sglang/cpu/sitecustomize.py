"""Read by every Python process of an SGLang server on a CPU, before anything else.

torchvision comes as a CUDA build; the operators that it would register for shapes need a library that is not
here. SGLang imports it for image models alone. And SGLang registers memory of the host with CUDA where it
notes the experts that a mixture chose: here that memory stays as it is.
"""

import importlib.util
import sys
import types
from typing import Any

NAME = "torchvision._meta_registrations"
sys.modules.setdefault(NAME, types.ModuleType(NAME))


class HostMemory:
    """Finds SGLang's module that allocates memory of the host, once, and mends it."""

    name = "sglang.srt.mem_cache.pool_host.common"

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the module's spec, whose loader takes the registration out; None for any other module."""
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def mended(module: Any) -> None:
            load(module)
            module._cuda_host_register = lambda *_: None

        spec.loader.exec_module = mended
        return spec


sys.meta_path.insert(0, HostMemory())
