"""The router: a request goes to its conversation's server, else to the one with the least to do.

A conversation's next turn begins with the tokens of those before, whose keys and values its server still has.
Samples of one prompt are a conversation too, which ends with the call that asks for them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable

KEPT = 1 << 16  # conversations whose server is remembered


class Router:
    """Counts what is in flight on each server, and knows which of them are up.

    Example:
        >>> router = Router(2, limit=2)
        >>> router.take("a"), router.take("b"), router.take("a"), router.take("c")
        (0, 1, 0, 1)
        >>> router.take("a") is None
        True
        >>> router.give_back(1)
        >>> router.take("a")
        1
    """

    def __init__(self, servers: int, limit: int) -> None:
        """Start with all of some servers up and idle; ``limit`` requests may be in flight on one."""
        self.limit = limit
        self.loads = [0] * servers
        self.up = {*range(servers)}
        self.paused = set[int]()
        self.homes: OrderedDict[Hashable, int] = OrderedDict()  # home of each conversation; the latest last

    def take(self, conversation: Hashable = None, slow_server: int | None = None) -> int | None:
        """Return a server for a request, which counts there until ``give_back``; None: all are full.

        A conversation whose server is full, lost or the ``slow_server`` moves to another, and stays there;
        while its server is ``paused`` it waits: it would move back at the next sync, and leave others idle.
        """
        free = [server for server in sorted(self.up - self.paused) if self.loads[server] < self.limit]
        home: int | None = self.homes.get(conversation) if conversation is not None else None
        if not free or home in self.paused:
            return None
        if home is None or home not in free or home == slow_server:
            server: int = min(free, key=lambda number: (number == slow_server, self.loads[number]))
        else:
            server = home
        self.loads[server] += 1
        if conversation is not None:
            self.homes[conversation] = server
            self.homes.move_to_end(conversation)
            if len(self.homes) > KEPT:
                self.homes.popitem(last=False)
        return server

    def give_back(self, server: int) -> None:
        """Note that a request is answered, or lost."""
        self.loads[server] -= 1

    def lose(self, server: int) -> bool:
        """Note that a server does not answer; return whether that is news."""
        news = server in self.up
        self.up.discard(server)
        return news

    def find(self, server: int) -> None:
        """Note that a server answers again."""
        self.up.add(server)

    def forget(self, conversations: Iterable[Hashable]) -> None:
        """Forget conversations that have no next turn."""
        for conversation in conversations:
            self.homes.pop(conversation, None)
