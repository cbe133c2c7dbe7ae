"""The role ``serve``: a program whose functions another process calls (``wire.py``).

Nothing here is kept from the program: it may answer what it likes, for it is not told what is right.
"""

from __future__ import annotations

import builtins
import functools
import json
import operator
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

from .harness import RECURSION, harness_names
from .main import run_main
from .wire import decode, encode


def serve(job: dict[str, Any], reader: BinaryIO, writer: BinaryIO) -> None:
    """Run a program, then answer requests about its names and objects to the end."""
    sys.setrecursionlimit(RECURSION)
    names = run_main(job["program"], "program.py", harness_names(job["program"]))
    objects = Objects()
    verbs: dict[str, Callable[..., Any]] = {
        "getattr": getattr,
        "setattr": setattr,
        "iter": iter,
        "next": next,
        "len": len,
        "bool": bool,
        "str": str,
        "repr": repr,
        "getitem": operator.getitem,
        "setitem": operator.setitem,
        "call": operator.call,
        "look": names.__getitem__,
        "solve": functools.partial(solve, names),
    }
    for line in reader:
        nonce, verb, arguments, keyword_arguments = json.loads(line)
        writer.write(
            json.dumps([nonce, *answer(verbs[verb], arguments, keyword_arguments, objects)]).encode() + b"\n"
        )
        writer.flush()


class Objects:
    """Numbers objects that go over the wire by number; they live on, so that none gets another's number."""

    def __init__(self) -> None:
        self.of: list[object] = []
        self.numbers: dict[int, int] = {}

    def sent(self, value: object) -> list[Any]:
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.of)
            self.of.append(value)
        return ["object", self.numbers[id(value)]]


def solve(names: dict[str, Any], name: str, arguments: str) -> str:
    """Call a function, or a method of ``Solution`` where there is that class, with arguments as JSON."""
    function = getattr(names["Solution"](), name) if "Solution" in names else names[name]
    return json.dumps(function(*json.loads(arguments)), default=lambda value: value.tolist())  # NumPy's


def answer(
    verb: Callable[..., Any], packed: list[Any], sent_named: dict[str, Any], objects: Objects
) -> list[Any]:
    """Return what a verb gives or raises, and which of its arguments it has changed."""
    arguments = [decode(argument, objects.of.__getitem__) for argument in packed]
    keyword_arguments = {
        name: decode(argument, objects.of.__getitem__) for name, argument in sent_named.items()
    }
    try:
        reply = ["value", encode(verb(*arguments, **keyword_arguments), objects.sent)]
    except BaseException as error:
        name = next(kind.__name__ for kind in type(error).__mro__ if hasattr(builtins, kind.__name__))
        reply = ["error", [name, [encode(argument, objects.sent) for argument in error.args]]]
    now = [encode(argument, objects.sent) for argument in (*arguments, *keyword_arguments.values())]
    requested = [*packed, *sent_named.values()]
    return [*reply, {place: new for place, new in enumerate(now) if new != requested[place]}]
