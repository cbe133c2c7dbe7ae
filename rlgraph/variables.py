"""Variables of the environment: ``${env:NAME}`` stays in what is written, and is filled in where it is used.

A plan, and so every file and page that is made of it, holds the reference; the workers' copy of it has the
values. What an error or a log would repeat of a value is written as the reference again.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    import logging

REFERENCE = re.compile(r"\$\{env:([^}]*)\}")
SHORT = 5  # characters: values of so few stand in many a word, are not secrets, and are not hidden
_hidden: dict[str, str] = {}  # text that errors and logs of this process don't repeat -> its reference


def with_values(value: Any, values: Mapping[str, str] = os.environ) -> Any:
    """Return a value, or a record of values, with those of variables in place of the references to them.

    A reference to a variable that is not there stays.

    Example:
        >>> with_values({"url": "http://judge/?key=${env:KEY}", "batch": 8}, {"KEY": "k"})
        {'url': 'http://judge/?key=k', 'batch': 8}
    """
    if not values:
        return value
    if isinstance(value, str):
        if "${" not in value:
            return value
        return REFERENCE.sub(lambda match: values.get(match[1], match[0]), value)
    if isinstance(value, Mapping):
        return {name: with_values(child, values) for name, child in value.items()}
    if isinstance(value, list | tuple):
        make = getattr(type(value), "_make", type(value))  # a named tuple is made by `_make`
        return make(with_values(child, values) for child in value)
    if hasattr(value, "model_copy"):  # a record of pydantic's
        return value.model_copy(update={name: with_values(child, values) for name, child in value})
    if is_dataclass(value) and not isinstance(value, type):
        changes = {}
        for record_field in fields(value):
            changes[record_field.name] = with_values(getattr(value, record_field.name), values)
        return replace(value, **changes)
    return value


def referred(record: object) -> dict[str, str]:
    """Return the variables that a record refers to, as far as they are there; their values are hidden."""
    names = dict.fromkeys(REFERENCE.findall(repr(record)))
    values = {name: os.environ[name] for name in names if name in os.environ}
    hide(values)
    return values


def hide(values: Mapping[str, str]) -> None:
    """Have errors and logs of this process say ``${env:NAME}`` in place of these values."""
    for name, value in values.items():
        if len(value) <= SHORT:
            continue
        # as it is, and as a URL, Python's repr and JSON write it
        for form in (value, quote(value, safe=""), repr(value)[1:-1], json.dumps(value)[1:-1]):
            _hidden[form] = f"${{env:{name}}}"
    if _hidden:
        import logging  # most graphs refer to no variable

        logging.setLogRecordFactory(_record)


def hidden(text: str) -> str:
    """Return a text with references in place of the values that are hidden."""
    for value in sorted(_hidden, key=len, reverse=True):
        text = text.replace(value, _hidden[value])
    return text


def _record(*arguments: Any, **options: Any) -> logging.LogRecord:
    """Return a log record whose message and traceback repeat no hidden value."""
    import logging

    record = logging.LogRecord(*arguments, **options)
    with suppress(TypeError, ValueError):  # a wrong format, of which the log's handler complains
        message = record.getMessage()
        safe_message = hidden(message)
        if safe_message != message:
            record.msg, record.args = safe_message, ()
    if record.exc_info:
        record.exc_text = hidden(logging.Formatter().formatException(record.exc_info))
    return record
