"""A model folder that brings code of its own is refused, and nothing of it runs, unless the graph says so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytest
import torch

from rlgraph.errors import GraphError, RlgraphError
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Request, Sampling
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.fsdp.packing import packs
from rlgraph.runtime.engines.model_files import ModelFiles
from rlgraph.runtime.engines.transformers.engine import TransformersEngine
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
    with pytest.raises(GraphError, match=r"brings Python code of its own, which is not run unasked"):
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


OWN = """
from transformers import Qwen2Config, Qwen2ForCausalLM

class OwnConfig(Qwen2Config):
    model_type = "own"

class OwnModel(Qwen2ForCausalLM):
    config_class = OwnConfig

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **more):
        out = super().forward(input_ids, attention_mask, position_ids, **more)
        out.logits = out.logits * 0.5
        return out
"""


@pytest.fixture
def own(demo_files: Path, tmp_path: Path) -> Path:
    """The demo's model, which halves its logits by code of its own."""
    folder = tmp_path / "own"
    shutil.copytree(demo_files / "demo_files" / "model", folder)
    (folder / "own.py").write_text(OWN)
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "own", "auto_map": names}))
    return folder


@pytest.mark.usefixtures("in_demo")
def test_code_runs_where_the_graph_says_so(
    own: Path, demo_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    said = (f"models.policy.path={own}", "schedule.iterations=1")
    with pytest.raises(GraphError, match=r"brings Python code .* models\.policy\.trust_remote_code=true"):
        run_graph(ONES, said, 1, inline=True)
    asked = [f"models.{name}.trust_remote_code=true" for name in ("policy", "ref")]
    with pytest.raises(
        GraphError, match=r"`ref` and `policy` are of one path, and not alike in trust_remote_code"
    ):
        run_graph(ONES, (*said, asked[0]), 1, inline=True)
    run = run_graph(ONES, (*said, *asked), 1, inline=True)
    assert f"runs the Python files of {own}" in (run / "plan.txt").read_text()
    exported = ModelFiles(str(run / "models" / "policy"), trusted=True)
    assert (Path(exported.path) / "own.py").read_text() == OWN
    assert type(exported.config()).__name__ == "OwnConfig"


@pytest.mark.usefixtures("one_rank")
def test_code_is_what_trains_and_generates(own: Path, demo_files: Path) -> None:
    plain = FsdpEngine.of(str(demo_files / "demo_files" / "model"), frozen=True)
    engine = FsdpEngine.of(str(own), optimizer={"lr": 1e-2}, trust_remote_code=True)
    assert not packs(engine.model), "nobody knows whether it could"
    tokens = Ragged.of([[5, 6, 7, 8, 9]])
    mask = Ragged.of([[False, True, True, True, True]], torch.bool)
    halved = plain.logprobs(tokens, mask, temperature=2.0).values
    torch.testing.assert_close(engine.logprobs(tokens, mask).values, halved, rtol=1e-4, atol=1e-5)
    serve = TransformersEngine(str(own), trust_remote_code=True)
    serve.load_weights(engine.weights(), 0)
    ((made,),) = serve.generate([Request([5, 6, 7], [1])], Sampling(6))
    row = Ragged.of([[5, 6, 7, *made.tokens]])
    new = Ragged.of([[False] * 3 + [True] * len(made.tokens)], torch.bool)
    found = engine.logprobs(row, new).values[3:]
    torch.testing.assert_close(found, torch.tensor(made.logprobs), rtol=1e-4, atol=1e-4)
