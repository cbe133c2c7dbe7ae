"""Which server takes a request; no server is needed for that."""

from __future__ import annotations

import doctest

from hypothesis import given
from hypothesis import strategies as st

from rlgraph.runtime.engines.servers import router as module
from rlgraph.runtime.engines.servers.groups import in_turn
from rlgraph.runtime.engines.servers.router import Router
from rlgraph.runtime.engines.sglang.client import Client

ASKS = st.lists(st.one_of(st.none(), st.sampled_from("abcdef")), max_size=60)


def test_its_example() -> None:
    assert doctest.testmod(module).failed == 0


def test_the_one_with_the_least_to_do() -> None:
    router = Router(3, limit=9)
    assert [router.take() for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    router.give_back(1)
    router.give_back(1)
    assert [router.take() for _ in range(3)] == [1, 1, 0]


def test_those_who_count_their_own_alone_begin_apart() -> None:
    servers = [Client(f"http://{name}:30000") for name in ("one", "two", "three")]
    assert [in_turn(index, servers)[0] for index in range(4)] == [*servers, servers[0]]
    assert all({*in_turn(index, servers)} == {*servers} for index in range(4))


def test_a_conversation_stays() -> None:
    router = Router(2, limit=9)
    assert [router.take("a"), router.take("b")] == [0, 1]
    assert [router.take("b") for _ in range(4)] == [1, 1, 1, 1]
    assert router.take() == 0


def test_one_whose_server_is_full_moves() -> None:
    router = Router(2, limit=2)
    assert [router.take("a") for _ in range(5)] == [0, 0, 1, 1, None]
    for server in (0, 0, 1):
        router.give_back(server)
    assert router.take("a") == 1  # where the last of its turns was


def test_one_whose_server_is_lost_moves_and_stays_there() -> None:
    router = Router(2, limit=9)
    assert router.take("a") == 0
    assert router.lose(0) and not router.lose(0)
    assert [router.take("a"), router.take()] == [1, 1]
    router.find(0)
    assert [router.take("a"), router.take()] == [1, 0]


@given(ASKS, st.integers(1, 4), st.integers(1, 5), st.data())
def test_whatever_comes(asks: list[str | None], servers: int, limit: int, data: st.DataObject) -> None:
    router, flying = Router(servers, limit), list[int]()
    for ask in asks:
        action = data.draw(st.sampled_from(["take", "take", "answer", "lose", "find"]))
        some = data.draw(st.integers(0, servers - 1))
        if action == "take":
            taken = router.take(ask)
            free = [server for server in router.up if flying.count(server) < limit]
            assert (taken is None) == (not free)
            if taken is not None:
                assert taken in free
                flying.append(taken)
        elif action == "answer" and flying:
            router.give_back(flying.pop())
        elif action == "lose":
            router.lose(some)
        elif action == "find":
            router.find(some)
        assert router.loads == [flying.count(server) for server in range(servers)]
