"""torch-memory-saver as SGLang brings it has what ``runtime/engines/memory/saver.py`` asks of it."""

from __future__ import annotations

import inspect

from rlgraph.runtime.engines.memory.saver import memory_saver


def test_it_has_regions_by_tag_that_are_paused_and_resumed() -> None:
    saver = memory_saver("cuda")
    assert saver._impl_ctor_kwargs == {"hook_mode": "torch"}, "set before its library is loaded"
    for name in ("region", "pause", "resume"):
        inspect.signature(getattr(saver, name)).bind(tag="rlgraph.0")
