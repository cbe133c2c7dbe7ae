"""Ops of ``sync_throughput.yaml``: a reward, and one that notes when servers have drawn tokens."""

import json
import time
from functools import cache, wraps
from pathlib import Path
from typing import Any

from rlgraph.ops import ServeEngine, float32, int64, op, prompt_tokens, prompts, samples, text


@op(rows="each")
def watch(model: ServeEngine, prompt: int64[prompts, prompt_tokens], *, folder: str) -> float32[prompts]:
    """From now on this worker, which generates, notes tokens and syncs in a file of its own."""
    import torch

    _watched(folder)
    return torch.zeros(len(prompt))


@op()
def length(responses: text[samples]) -> float32[samples]:
    """A share of the characters."""
    import torch

    return torch.tensor([response.count("1") / (1 + len(response)) for response in responses])


@cache
def _watched(folder: str) -> None:
    import os

    from rlgraph.runtime.engines.sglang import client
    from rlgraph.runtime.engines.sglang.engine import SglangEngine

    client.STREAMED = 1  # so that tokens are known as they are drawn
    file = Path(folder, f"{os.getpid()}.jsonl").open("a", buffering=1)  # noqa: SIM115 - until the worker ends

    def note(**what: Any) -> None:
        file.write(json.dumps(what) + "\n")

    joined, load = client.Client.joined, SglangEngine.load_weights

    @wraps(joined)
    def noted(self: client.Client, before: Any, event: dict[str, Any]) -> dict[str, Any]:
        had = len(before[0]["output_ids"]) if before else 0
        made = joined(self, before, event)
        note(at=time.time(), server=self.url, tokens=len(made["output_ids"]) - had)
        return made

    @wraps(load)
    def loaded(self: SglangEngine, named: Any, version: int) -> None:
        begun, arrived = time.time(), []

        def told() -> Any:
            yield from named
            arrived.append(time.time())

        load(self, told(), version)
        note(sync=version, begun=begun, arrived=arrived[-1], ended=time.time())

    client.Client.joined, SglangEngine.load_weights = noted, loaded
