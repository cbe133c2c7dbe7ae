"""The contracts of engines: each in the registry has every member that a worker calls; a stub is refused."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, get_type_hints

import pytest

from rlgraph.engines.registry import SERVING, TRAINING, Serving, Training
from rlgraph.runtime.engines import contract
from rlgraph.runtime.engines.contract import (
    EngineContractError,
    HostedServeEngine,
    HostedTrainEngine,
    check_members,
    load_engine,
    members_of,
)
from rlgraph.runtime.worker import engine_host, joining, nan_guard, op_call

LACKING = ("load_weights", "sleep", "wake", "close", "settle")


class Stub:
    """A serve engine with what ops use, and nothing that a worker needs beside it."""

    tokenizer, overlaps, version = None, False, 0
    notes = ()

    def __init__(self, path: str, **options: Any) -> None:
        self.path = path

    def generate(self, *_: Any, **__: Any) -> list[Any]:
        return []

    def abort(self) -> None:
        pass


def engine_class(builder: str) -> Any:
    """The class that a builder returns."""
    made = resolve_name(builder)
    return made if inspect.isclass(made) else get_type_hints(made)["return"]


def assigned(kind: type) -> set[str]:
    """The attributes that an engine's class has, or assigns in its methods."""
    tree = ast.parse(inspect.getsource(kind))
    stored = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    return {node.attr for node in stored} | {*dir(kind)}


@pytest.mark.parametrize("name", SERVING)
def test_every_serve_engine_has_all_that_a_worker_calls(name: str) -> None:
    missing = {*members_of(HostedServeEngine)} - assigned(engine_class(SERVING[name].builder))
    assert not missing, f"the engine {name} lacks members of HostedServeEngine: {sorted(missing)}"


@pytest.mark.parametrize("name", TRAINING)
def test_every_train_engine_has_all_that_a_worker_calls(name: str) -> None:
    missing = {*members_of(HostedTrainEngine)} - assigned(engine_class(TRAINING[name].builder))
    assert not missing, f"the engine {name} lacks members of HostedTrainEngine: {sorted(missing)}"


@pytest.mark.parametrize("name", [*SERVING, *TRAINING])
def test_mypy_checks_the_types_of_every_engines_members(name: str) -> None:
    """By a line in the engine's own file, as no other file may name it."""
    record: Serving | Training = {**SERVING, **TRAINING}[name]
    kind = engine_class(record.builder)
    protocol = "HostedServeEngine" if name in SERVING else "HostedTrainEngine"
    line = f"ENGINE: type[{protocol}] = {kind.__name__}"
    path = Path(inspect.getfile(kind))
    assert line in path.read_text(), f"{path} has no line `{line}` by which mypy checks the engine"


def test_an_engine_that_lacks_members_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "resolve_name", lambda _: Stub)
    with pytest.raises(EngineContractError) as caught:
        load_engine(Serving("a stub", f"{__name__}:Stub", {}), "stub", "a/model")
    law, remedy = str(caught.value).split("\n")
    assert law.startswith("the engine `stub` (")
    assert all(f" {member}" in law for member in LACKING)
    assert remedy.strip() == "give it every member of rlgraph.runtime.engines.contract.HostedServeEngine"


@pytest.mark.parametrize("lacking", LACKING)
def test_each_member_counts(lacking: str) -> None:
    members = {member: None for member in members_of(HostedServeEngine) if member != lacking}
    with pytest.raises(EngineContractError, match=f"has no {lacking}, which"):
        check_members(type("Nearly", (), members)(), HostedServeEngine, "nearly", "a:Nearly")
    check_members(type("Whole", (), {**members, lacking: None})(), HostedServeEngine, "whole", "a:Whole")


def test_a_train_engine_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "resolve_name", lambda _: Stub)
    with pytest.raises(EngineContractError, match=r"has no logprobs, .*begin_save"):
        load_engine(Training("a:Stub", (), "a:unfit"), "stub", "a/model")


def calls_on_engines() -> Iterator[str]:
    """The members of engines that the worker's files use."""
    for module in (engine_host, joining, nan_guard, op_call):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Attribute):
                owner = ast.unparse(node.value)
                if owner in ("engine", "self.engine") or owner.endswith(("serve[model]", "train[model]")):
                    yield node.attr


def test_a_worker_calls_nothing_else() -> None:
    used = {*calls_on_engines()}
    assert {"load_weights", "sleep", "offload", "begin_save", "update"} <= used
    # of an op's declaration, which has an attribute ``engine`` too, nothing is read on the way
    assert not used - {*members_of(HostedServeEngine), *members_of(HostedTrainEngine)}
