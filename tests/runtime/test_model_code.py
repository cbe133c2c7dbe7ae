"""A model folder that brings code of its own is refused, and nothing of it runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytest
import torch

from rlgraph.errors import GraphError, RlgraphError
from rlgraph.runtime.run import run_graph

ONES = str(Path(__file__).parent / "ones.yaml")


@pytest.mark.usefixtures("in_demo")
def test_code_of_a_model_is_refused_without_a_question(
    demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked whether to run the code"))
    folder = tmp_path / "model"
    shutil.copytree(demo_files / "demo_files" / "model", folder)
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass OwnConfig: pass\n")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(GraphError, match="can't be loaded, as a folder or from a hub"):
        run_graph(ONES, (f"models.policy.path={folder}",), 1, inline=True)
    assert not (tmp_path / "ran").exists()


class Trap:
    """Unpickling it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.usefixtures("in_demo")
def test_a_pickle_that_runs_code_is_refused(demo_files: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(demo_files / "demo_files" / "model", folder)
    (folder / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Trap(tmp_path / "ran")}, folder / "pytorch_model.bin")
    with pytest.raises((RlgraphError, UnpicklingError)):
        run_graph(ONES, (f"models.policy.path={folder}",), 1, inline=True)
    assert not (tmp_path / "ran").exists()
