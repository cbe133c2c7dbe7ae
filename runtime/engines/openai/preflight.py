"""A serve section that asks more of a completions endpoint than it has is refused before a run."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from rlgraph.ir.plan import ServePlan
from rlgraph.runtime.engines.faults import SectionFault
from rlgraph.runtime.engines.openai.completions import OWNED


def problems(serve: ServePlan, device: str) -> Iterator[SectionFault]:
    """Yield what is wrong: aiohttp not installed, fields of a request that the run decides."""
    if find_spec("aiohttp") is None:
        law = "aiohttp, by which servers are spoken to, is not installed"
        yield SectionFault("no-engine", ("engine",), law, "pip install 'rlgraph-compiler[openai]'")
    for option in serve.options.keys() & OWNED:
        law = "it is the run's to give, by the graph's nodes"
        yield SectionFault("serve-option", ("options", option), law, f"leave out {option}")
