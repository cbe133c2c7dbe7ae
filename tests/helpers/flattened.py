"""Calls ops with attributes as a graph has them, those of groups among the others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rlgraph.ops.signature import signature


def call_op(body: Callable[..., Any], *columns: Any, **attributes: Any) -> Any:
    return body(*columns, **signature(body.__name__, body).arguments(attributes))


def flattened(body: Callable[..., Any]) -> Callable[..., Any]:
    """Return an op that takes attributes as a graph has them."""
    return functools.partial(call_op, body)
