"""The compiler's tests see no GPU, and an SGLang: commands then plan for the same on every machine."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(autouse=True)
def with_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlgraph.compiler.is_installed", lambda name: True)
