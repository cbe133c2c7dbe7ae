"""A real SGLang, where the interpreter that runs these tests has one (see `make sglang`)."""

from __future__ import annotations

import importlib.util

import pytest

HERE = "tests/sglang/"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("sglang") is None:
        skip = pytest.mark.skip(
            reason="no SGLang in this environment; `make sglang` makes one and runs these tests"
        )
        for item in items:
            if item.nodeid.startswith(HERE):
                item.add_marker(skip)
