"""A pool of two servers takes new weights in turn, once all have come: this script is its ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake
import pytest
import torch
import torch.distributed as dist
from fake import Fake
from ranks import forked, launch

from rlgraph.ops import Generation, Request, Sampling
from rlgraph.runtime.engines.metric_sums import of_ranks
from rlgraph.runtime.engines.servers import calls
from rlgraph.runtime.engines.servers.groups import in_turn
from rlgraph.runtime.engines.sglang.client import Client
from rlgraph.runtime.engines.sglang.engine import SglangEngine
from rlgraph.runtime.engines.sglang.supervisor import SglangSupervisor

MORE, LONG, SAMPLES = 5, 4000, 4


class Drawing(Fake):
    """A server that tells how many tokens it has drawn; for new weights it waits until another draws more."""

    other: Client | None = None
    before = 0  # tokens of requests that have ended

    def _server_info(self, body: dict[str, Any]) -> Any:
        return self.info | {"drawn": self.drawn()}

    def drawn(self) -> int:
        return self.before + sum(len(made["versions"]) for made in self.running.values())

    def _reply(self, made: dict[str, Any]) -> Any:
        self.before += len(made["versions"])
        return super()._reply(made)

    def _begin_weight_update(self, body: dict[str, Any]) -> Any:
        if self.other and self.running == {} and self.version != "default":
            first = drawn(self.other)
            while drawn(self.other) < first + MORE:
                threading.Event().wait(0.01)
        return super()._begin_weight_update(body)


def drawn(client: Client) -> int:
    return int(client.look("server_info")["drawn"])


def main(rank: int, folder: Path, path: str) -> None:
    from transformers import AutoModelForCausalLM

    fake.STEP, calls.STAY_SECONDS = 0.05, 0.2
    server = Drawing()
    place = {"client": server.client, "log": folder / "log", "port": SimpleNamespace(close=lambda: None)}
    place |= {"wait": lambda timeout: None, "is_alive": lambda: not server.dead, "close": server.close}
    SglangSupervisor.begin = lambda self, before=None: SimpleNamespace(**place)
    engine = SglangEngine(path, logs=folder, max_rows=2 * SAMPLES, pool=dist.group.WORLD)
    clients: list[Client] = of_ranks(server.client, dist.group.WORLD)
    engine.reach(in_turn(rank, clients))
    server.other = clients[1 - rank]
    weights = [*AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters()]

    def arriving() -> Iterator[tuple[str, torch.Tensor]]:
        """The weights, the last of which comes once every server has drawn more since the first."""
        first = [drawn(client) for client in clients]
        yield from weights[:-1]
        while any(drawn(client) < was + MORE for client, was in zip(clients, first, strict=True)):
            threading.Event().wait(0.01)
        yield weights[-1]

    engine.load_weights(weights, 0)
    requests = [Request([5 + rank, 9], range(SAMPLES))]
    engine.generate(requests, Sampling(LONG), stays=True)
    for version in (1, 2):
        engine.load_weights(arriving(), version)
        assert engine.calls.unanswered and not any(sent.aborted for sent in engine.calls.unanswered)
        dist.barrier()
    requests_again = len(server.prompts)
    made: Sequence[Sequence[Generation]] = engine.generate(requests, Sampling(LONG), stays=True)
    assert len(server.prompts) == requests_again, "what stays was asked for again"
    assert server.version == "2" and all(one.finish == "abort" for one in made[0])
    # from what they had: of both servers all are asked for once, and once more for each version
    assert sum(of_ranks(len(server.prompts), dist.group.WORLD)) == 2 * SAMPLES * 3
    assert any(len(prompt) > 2 for prompt in server.prompts)
    engine.generate([], Sampling(LONG), stays=True)
    while engine.calls.unanswered:
        threading.Event().wait(0.01)
    dist.barrier()
    engine.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_tokens_are_drawn_all_through_a_sync(path: str, tmp_path: Path) -> None:
    launch(__file__, tmp_path, path)


if __name__ == "__main__":
    forked(main, 2)
