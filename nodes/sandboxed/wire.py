"""Calls of a program's functions over a socket, from an interpreter that the program can't reach.

    request   [nonce, verb, [argument, ...], {name: argument}]            one line of JSON each
    reply     [nonce, "value" or "error", what, {place: argument that the call has changed}]

None, booleans, numbers and text are JSON's own; other plain data is [type, content] (``encode``), rebuilt as
exactly its type, so that no ``__eq__`` of the program takes part in a comparison. Nothing in a reply is run.
"""

from __future__ import annotations

import builtins
import json
import os
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO

MOST = 4 * 2**20  # bytes of a reply that are read
SEQUENCES: dict[str, Any] = {kind.__name__: kind for kind in (list, tuple, set, frozenset)}
LONG = 1024  # bits: a longer integer goes as hexadecimal digits, which Python reads without a limit


class Broken(Exception):
    """The program has ended, or what its process said is not a reply."""

    def __init__(self, malformed: bool) -> None:
        super().__init__(malformed)
        self.malformed = malformed


def encode(value: Any, encode_other: Callable[[Any], Any]) -> Any:
    """Return plain data as JSON, a subclass as the plain type that it extends, others by ``encode_other``."""
    for kind in type(value).__mro__:
        if kind in (type(None), bool, float, str):
            return value
        if kind is int:
            return value if value.bit_length() < LONG else ["int", hex(value)]
        if kind is bytes:
            return ["bytes", value.hex()]
        if kind is complex:
            return ["complex", [value.real, value.imag]]
        # methods of the plain type itself, as the subclass may have others
        if kind is dict:
            pairs = []
            for key, item in dict.items(value):
                pairs.append([encode(key, encode_other), encode(item, encode_other)])
            return ["dict", pairs]
        if SEQUENCES.get(kind.__name__) is kind:
            items = [encode(item, encode_other) for item in kind.__iter__(value)]
            return [kind.__name__, items]
    is_numpy_scalar = type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0
    if is_numpy_scalar:
        return encode(value.item(), encode_other)  # NumPy's numbers, which extend no plain type
    return encode_other(value)


def decode(message: Any, object_of: Callable[[int], Any]) -> Any:
    """Return what ``encode`` was given.

    Raises:
        Exception: any of them, where ``encode`` can't have written this.
    """
    if isinstance(message, dict):
        raise ValueError(message)
    if not isinstance(message, list):
        return message
    kind, content = message
    if kind in SEQUENCES:
        return SEQUENCES[kind]([decode(item, object_of) for item in content])
    if kind == "dict":
        return {decode(key, object_of): decode(value, object_of) for key, value in content}
    rebuild: dict[str, Callable[[Any], Any]] = {
        "int": lambda digits: int(digits, 16),
        "bytes": bytes.fromhex,
        "complex": lambda pair: complex(*pair),
        "object": object_of,
    }
    return rebuild[kind](content)


class RemoteProgram:
    """Asks the process of a program (``serve.py``, ``run.py``), and trusts no word of what comes back."""

    def __init__(
        self, reader: BinaryIO, writer: BinaryIO, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]
    ) -> None:
        """Take what turns an argument into JSON, and what turns JSON of the program into a value."""
        self.reader, self.writer = reader, writer
        self.pack, self.unpack = pack, unpack

    def ask(self, verb: str, *arguments: Any, **keywords: Any) -> Any:
        """Return what a verb gives; a list, dict or set among the arguments becomes what the call made of it.

        Raises:
            Broken: there is no reply, or what came is not one.
            Exception: the program raised; it is the built-in exception that the program's one extends.
        """
        nonce = os.urandom(8).hex()  # a reply that is written before it was asked for does not know it
        packed_arguments = [self.pack(argument) for argument in arguments]
        packed_keywords = {name: self.pack(argument) for name, argument in keywords.items()}
        request = json.dumps([nonce, verb, packed_arguments, packed_keywords])
        line = self._exchange(request.encode() + b"\n")
        if not line:
            raise Broken(malformed=False)
        try:
            replied, outcome, content, changed = json.loads(line)
            assert replied == nonce and outcome in ("value", "error")
            if outcome == "error":
                result = _error(content[0], map(self.unpack, content[1]))
            else:
                result = self.unpack(content)
            values = [*arguments, *keywords.values()]
            changes = [(values[int(place)], self.unpack(new)) for place, new in changed.items()]
        except Exception as error:
            raise Broken(malformed=True) from error
        for old, new in changes:
            _become(old, new)
        if outcome == "value":
            return result
        if isinstance(result, StopIteration) and verb != "next":
            raise RuntimeError("the program raised StopIteration")  # it would end a map, all, zip of the test
        raise result

    def _exchange(self, request: bytes) -> bytes:
        """Send a line and return the one that comes back; empty where the process has ended."""
        try:
            self.writer.write(request)
            self.writer.flush()
            return self.reader.readline(MOST)
        except OSError:
            return b""


def _error(name: str, arguments: Iterable[Any]) -> Exception:
    """Return the built-in exception of a name; an Exception where there is none such."""
    values = list(arguments)
    kind: Any = getattr(builtins, name, None)
    is_exception = isinstance(kind, type) and issubclass(kind, Exception)
    if not is_exception:
        return Exception(*values)
    try:
        error: Exception = kind(*values)
    except TypeError:  # such as UnicodeDecodeError, which wants its own five
        return Exception(*values)
    return error


def _become(old: Any, new: Any) -> None:
    """Give a list, dict or set the content of another of its type."""
    if type(old) is not type(new):
        return
    if isinstance(old, list):
        old[:] = new
    elif isinstance(old, dict | set):
        old.clear()
        old.update(new)
