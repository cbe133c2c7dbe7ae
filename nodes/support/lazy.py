"""Modules that are imported on first use: ops are read to compile a graph, which needs no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any


class LazyModule:
    """A module by its name; each attribute is the module's own."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self.name), attribute)


if TYPE_CHECKING:
    import asyncio as asyncio  # as itself: mypy then takes the name for one that other modules may import

    import datasets as datasets
    import numpy as numpy
    import pyarrow as pyarrow
    import torch as torch
    from pyarrow import parquet as parquet
else:
    asyncio, numpy, torch = LazyModule("asyncio"), LazyModule("numpy"), LazyModule("torch")
    datasets, pyarrow = LazyModule("datasets"), LazyModule("pyarrow")
    parquet = LazyModule("pyarrow.parquet")
