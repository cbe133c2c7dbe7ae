"""Ports of servers: a device of a host has a range of its own, and a port stays claimed with its server.

A server binds its port half a minute after it was chosen. A claim on it is an abstract Unix socket, which
ends with its process. A program that knows nothing of claims may still take the port: then another one is
tried (`supervisor.py`).
"""

from __future__ import annotations

import os
import random
import socket
import weakref
from itertools import chain

from rlgraph.errors import RunError

# above SGLang's own choices and Ray's, below those that the kernel gives to anyone
PORTS = range(30000, 32768)
OWN = 64  # ports of a device's range


class ServerPort:
    """A port of an interface that is free now, claimed among the workers of this host.

    ``close`` lets others have it, and so does the end of this object or of its process.
    """

    def __init__(self, host: str, device: int = 0) -> None:
        """Claim a port of an interface, or with host ``""`` of all, in a device's range unless that is full.

        Raises:
            RunError: none is free.
        """
        for number in _candidates(device):
            if claim := _claimed(host, number):
                self.number = number
                self.close = weakref.finalize(self, os.close, claim.detach())
                return
        law = f"no port from {PORTS[0]} to {PORTS[-1]} is free on {host or 'this host'}"
        raise RunError(f"{law}\n  end what holds them")


def _candidates(device: int) -> chain[int]:
    """Yield a device's own ports, then all, both in random order: other programs may look for ports too."""
    choice = random.SystemRandom()
    start = device * OWN % (len(PORTS) - OWN + 1)
    return chain(choice.sample(PORTS[start : start + OWN], OWN), choice.sample(PORTS, len(PORTS)))


def _claimed(host: str, number: int) -> socket.socket | None:
    """Return the claim on a port; None where another worker has one, or something holds it."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0rlgraph-port-{number}")
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            # reuses ports as the server does: an ended one may linger
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, number))
    except OSError:
        claim.close()
        return None
    return claim
