"""A serve section that asks more of a completions endpoint than it has is refused before a run."""

from __future__ import annotations

from importlib.util import find_spec

from rlgraph.ir.plan import ServePlan
from rlgraph.runtime.engines.findings import Findings, wrong
from rlgraph.runtime.engines.openai.completions import OWNED


def problems(serve: ServePlan, device: str) -> Findings:
    """Yield what is wrong: aiohttp not installed, fields of a request that the run decides."""
    if find_spec("aiohttp") is None:
        law = "aiohttp, by which servers are spoken to, is not installed"
        yield wrong(law, "pip install 'rlgraph-compiler[openai]'", "no-engine", ("engine",))
    for option in serve.options.keys() & OWNED:
        law = "it is the run's to give, by the graph's nodes"
        yield wrong(law, f"leave out {option}", "serve-option", ("options", option))
