"""Errors of workers that the driver tells apart: what was lost may be tried again."""

from __future__ import annotations

from rlgraph.errors import RunError


class AwayError(RunError):
    """A worker's memory can't be read: that worker is gone."""


class ServerLostError(RunError):
    """A server does not answer any more."""
