"""A real server without a copy of its weights, as on a GPU that trains them: the next sync brings them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import torch
from test_engine import ENDLESS, assert_agrees, generating, kill

from rlgraph.ops import Sampling
from rlgraph.runtime.engines.servers import process
from rlgraph.runtime.engines.servers.ports import ServerPort
from rlgraph.runtime.engines.sglang.client import FIRST
from rlgraph.runtime.engines.sglang.engine import SglangEngine

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.nightly]


@pytest.fixture(scope="module")
def bare(path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEngine]:
    """With a server whose first port another program takes while it starts."""
    ports: list[ServerPort] = []
    with socket.socket() as taker, pytest.MonkeyPatch.context() as patch:

        def port(host: str, device: int) -> ServerPort:
            ports.append(ServerPort(host, device))
            if len(ports) == 1:
                taker.bind((host, ports[0].number))
                taker.listen()
            return ports[-1]

        patch.setattr(process, "ServerPort", port)
        options = {"chunked_prefill_size": 512}
        logs = tmp_path_factory.mktemp("logs")
        made = SglangEngine(
            path, logs=logs, max_rows=4, devices=["1"], restarts=2, keeps=False, options=options
        )
    assert len(ports) == 2
    yield made
    made.close()


def test_another_port_is_tried_and_options_reach_it(bare: SglangEngine) -> None:
    info = bare.supervisor.client.look("server_info")
    assert info["chunked_prefill_size"] == 512 and info["port"] == bare.supervisor.server.port.number


def test_a_server_that_is_lost_in_a_sync_asks_for_another(bare: SglangEngine, model: torch.nn.Module) -> None:
    def named() -> Iterator[tuple[str, torch.Tensor]]:
        for number, pair in enumerate(model.named_parameters()):
            if number == 5:
                kill(bare)
            yield pair

    bare.load_weights(named(), 3)
    assert bare.version == -1 and not bare.supervisor.weight_copies
    bare.load_weights(model.named_parameters(), 3)
    assert bare.version == 3 and not bare.supervisor.weight_copies
    assert_agrees(bare, model)


def test_a_server_that_is_lost_in_a_rollout_is_left_out_until_the_next_sync(
    bare: SglangEngine, awake: SglangEngine, model: torch.nn.Module
) -> None:
    for engine in (bare, awake):
        engine.load_weights(model.named_parameters(), 4)
    undisturbed = awake.generate(ENDLESS, Sampling(100, 0.0))
    bare.reach([bare.supervisor.client, awake.supervisor.client])
    with generating(bare, ENDLESS, Sampling(100, 0.0)) as made:
        kill(bare)
    assert [[one.tokens for one in many] for many in made.result()] == [
        [one.tokens for one in many] for many in undisturbed
    ]
    bare.reach([bare.supervisor.client])
    while bare.supervisor.client.version() != FIRST:  # until it is up again
        threading.Event().wait(0.05)
    bare.load_weights(model.named_parameters(), 5)
    assert_agrees(bare, model)
