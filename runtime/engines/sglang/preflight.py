"""A serve section that asks more of SGLang than it has is refused before a run."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from rlgraph.ir.plan import ServePlan
from rlgraph.runtime.engines.faults import SectionFault
from rlgraph.runtime.engines.sglang.options import wrong


def problems(serve: ServePlan, device: str) -> Iterator[SectionFault]:
    """Yield what is wrong: a dtype without kernels, SGLang not installed, settings that it does not take."""
    embedded = "SERVE.engine=transformers"
    own = not serve.addresses and "attention_backend" not in serve.options
    if device == "cuda" and serve.dtype == "float32" and own:
        law = "SGLang's attention kernels on CUDA take no float32"
        yield SectionFault("wrong-dtype", ("dtype",), law, f"SERVE.dtype=bfloat16, or {embedded}")
    if find_spec("sglang") is None:
        remedy = "pip install 'rlgraph-compiler[sglang]' (on a machine without a GPU: make sglang)"
        law = "SGLang is not installed beside this rlgraph"
        yield SectionFault("no-engine", ("engine",), law, f"{remedy}, or {embedded}")
        return
    for option, law in wrong(serve.options).items() if serve.options else ():
        yield SectionFault("serve-option", ("options", option), law)
