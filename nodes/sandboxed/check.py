"""The role ``check``: asserts in an interpreter of their own, where a program's names are stand-ins for it.

A stand-in is fetched before the test begins: plain data (a constant of the program) by its value, anything
else as a ``StandIn``, which sends what is done with it to the program's process (``wire.py``).
"""

from __future__ import annotations

import builtins
import json
import os
import symtable
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, BinaryIO

from .harness import undefined
from .main import run_main
from .wire import Broken, RemoteProgram, decode, encode

MODULE = type(builtins)
SIZES: dict[int, dict[str, int]] = {}  # what stand-ins' lengths and iterations came to since the last call


def check(job: dict[str, Any], _reader: BinaryIO, writer: BinaryIO) -> None:
    """Run a test; say whether it came to its end, what is wrong with it, and with a reply of the program.

    A test that comes to its end has used the program: it called it, asked for a part of it or read one of its
    constants. Otherwise it would pass any program.
    """

    def end(passed: bool, malformed: bool = False, fault: str = "") -> None:
        writer.write(json.dumps({"passed": passed, "malformed": malformed, "fault": fault}).encode() + b"\n")
        writer.flush()
        os._exit(0)

    try:
        compile(job["test"], "test.py", "exec")
    except (SyntaxError, ValueError) as error:  # no program passes it
        end(False, fault=f"the test is neither Python nor JSON of inputs and outputs: {error}")
    try:
        ask, used = asking(job["peer"], end)
        names = stand_ins(job["test"], ask)
        used.clear()
        constants = {}
        for name in [*names]:
            if not isinstance(names[name], StandIn | MODULE):
                constants[name] = names.pop(name)
        run_main(job["test"], "test.py", names | {"__builtins__": Constants(constants, used)})
    except SystemExit as error:  # of unittest.main, for one; a program can't send it
        if error.code:
            end(False)
    except BaseException:
        end(False)
    if not used:
        end(False, fault="the test comes to its end and asks the program nothing")
    end(True)


class Constants(dict[str, Any]):
    """Python's built-ins with a program's constants in their place, of which it notes the use."""

    def __init__(self, constants: dict[str, Any], used: set[str]) -> None:
        super().__init__((name, value) for name, value in vars(builtins).items() if name not in constants)
        self.constants, self.used = constants, used

    def __missing__(self, name: str) -> Any:
        value = self.constants[name]
        self.used.add(name)
        return value


def asking(peer: int, end: Callable[..., None]) -> tuple[Callable[..., Any], set[str]]:
    """Return what asks the program at a socket, and what it was asked for.

    A program that does not answer fails the test at once, as does what it can't be sent.
    """
    known: dict[int, StandIn] = {}
    used: set[str] = set()

    def ask(verb: str, *arguments: Any, **named: Any) -> Any:
        used.add(verb)
        if verb in ("call", "setattr", "setitem"):
            SIZES.clear()
        try:
            return program.ask(verb, *arguments, **named)
        except Broken as broken:
            return end(False, broken.malformed)  # and not the test's `except`
        except UnsentError as error:
            return end(False, fault=str(error))

    def object_of(number: int) -> StandIn:
        assert type(number) is int
        return known.setdefault(number, StandIn(ask, number))

    program = RemoteProgram(
        open(peer, "rb"),  # noqa: SIM115
        open(os.dup(peer), "wb"),  # noqa: SIM115
        lambda value: encode(value, sent),
        lambda message: decode(message, object_of),
    )
    return ask, used


class UnsentError(Exception):
    """A program can't be sent what a test passes it."""


def sent(value: Any) -> Any:
    """Return what is neither plain data nor a stand-in as a list, where it is an iterable of Python's own.

    Raises:
        UnsentError: it is none.
    """
    kind = type(value)
    if kind is StandIn:
        return ["object", value._StandIn__number]
    is_of_python = kind.__module__ in ("builtins", "collections") and kind not in (bytearray, memoryview)
    if is_of_python and hasattr(kind, "__iter__"):  # a range, a generator, a view of a dict, a deque
        return encode([*value], sent)
    law = "a program takes plain data and its own objects"
    raise UnsentError(f"{law}, and the test passes a {kind.__name__}")


def _sends(verb: str) -> Any:
    return lambda self, *arguments, **named: self._StandIn__ask(verb, self, *arguments, **named)


class StandIn:
    # An object of the program; it is equal to itself alone, and takes part in no sum or order. Its length is
    # as many items as it is seen to have. A comment: its docstring is the program's.

    __slots__ = ("__ask", "__number")
    __doc__ = property(lambda self: self.__ask("getattr", self, "__doc__"))

    def __init__(self, ask: Callable[..., Any], number: int) -> None:
        object.__setattr__(self, "_StandIn__ask", ask)
        object.__setattr__(self, "_StandIn__number", number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__name__":  # by which NumPy would take an address of memory
            raise AttributeError(name)
        return self.__ask("getattr", self, name)

    def __len__(self) -> int:
        return self.__hold("len", self.__ask("len", self))

    def __iter__(self) -> Iterator[Any]:
        iterator = self.__ask("iter", self)
        count = 0
        with suppress(StopIteration):
            while True:
                item = self.__ask("next", iterator)
                count += 1
                yield item
        self.__hold("iter", count)

    def __contains__(self, item: Any) -> bool:
        return item in [*self]  # all of it: what has no end holds nothing

    def __reversed__(self) -> Iterator[Any]:
        items = [*self]
        return iter(items[::-1])

    def __hold(self, verb: str, size: int) -> int:
        sizes = SIZES.setdefault(self.__number, {})
        sizes[verb] = size
        assert len({*sizes.values()}) == 1, "the program's object has not as many items as its length says"
        return size

    def __reduce_ex__(self, _: Any) -> Any:
        raise TypeError("an object of the program can't be copied")

    __call__, __setattr__ = _sends("call"), _sends("setattr")
    __getitem__, __setitem__ = _sends("getitem"), _sends("setitem")
    __next__, __bool__ = _sends("next"), _sends("bool")
    __str__, __repr__ = _sends("str"), _sends("repr")


def stand_ins(source: str, ask: Callable[..., Any]) -> dict[str, Any]:
    """Return the program's value of each name that a test uses and does not define.

    Built-ins stay the interpreter's, but for a test that uses no other such name: where it uses one function
    among them, types such as range aside, or a single type, it tests the program's one of that name. Of
    several it can't be told which is tested, and to take all would let a program replace ``abs`` or ``all``.
    A module of the standard library that the test forgot to import is Python's.
    """
    ask("len", "")  # answered once the program has run to its end
    used = set(undefined(symtable.symtable(source, "test.py", "exec")))
    not_built_in = {name for name in used if not hasattr(builtins, name)}
    built_in_functions = set()
    for name in used - not_built_in:
        if not isinstance(getattr(builtins, name), type | str):
            built_in_functions.add(name)
    tested = not_built_in or built_in_functions or used
    if not not_built_in and len(tested) != 1:
        return {}
    values = {}
    for name in tested:
        if name in sys.stdlib_module_names and f"{name}." in source:
            values[name] = __import__(name)
            continue
        try:
            values[name] = ask("look", name)
        except KeyError:  # the test will find that out
            continue
    return values
