"""A checkpoint becomes a Hugging Face directory, whatever the rank count, and never half of one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from ranks import forked, launch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlgraph.cli.main import main
from rlgraph.errors import RunError
from rlgraph.files import sha256, write_sums
from rlgraph.reports.plan_file import load
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.export import export
from rlgraph.runtime.run import run_graph
from rlgraph.variables import with_values

ONES = str(Path(__file__).parent / "ones.yaml")
SHORT = ("schedule.save_every=1", "schedule.keep=9", "schedule.iterations=2", "eval.nodes.prompts.batch=2")


@pytest.fixture(scope="module")
def run(demo_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two iterations, each with a checkpoint."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLGRAPH_TEST_FILES", str(demo_files / "demo_files"))
        patch.chdir(tmp_path_factory.mktemp("export"))
        return run_graph(ONES, SHORT, 1, run_dir=Path("run"), inline=True).absolute()


@pytest.fixture(autouse=True)
def files(demo_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLGRAPH_TEST_FILES", str(demo_files / "demo_files"))


def logits(folder: Path) -> torch.Tensor:
    """Of a few ids, by transformers alone."""
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(torch.arange(3, 19)[None]).logits


def test_the_last_checkpoint_has_the_logits_of_the_runs_own_models(run: Path, tmp_path: Path) -> None:
    made = export(run, tmp_path / "new" / "model")
    assert logits(made).equal(logits(run / "models/policy"))
    text = "12+34="
    first, second = (AutoTokenizer.from_pretrained(path) for path in (made, run / "models/policy"))
    assert first(text)["input_ids"] == second(text)["input_ids"]
    assert sorted(path.name for path in made.iterdir()) == sorted(
        path.name for path in (run / "models/policy").iterdir()
    )
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model"]
    assert not torch.distributed.is_initialized()


def test_an_earlier_checkpoint_by_name_through_the_command_line(run: Path, tmp_path: Path) -> None:
    args = ["export", str(run), "--to", str(tmp_path / "first"), "--checkpoint", "step-000001"]
    done = CliRunner().invoke(main, args)
    assert done.exit_code == 0, done.output
    assert done.output == f"wrote {tmp_path / 'first'}\n"
    assert not logits(tmp_path / "first").equal(logits(run / "models/policy"))


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_is_exported_by_one(run: Path, tmp_path: Path) -> None:
    two = tmp_path / "two"
    shutil.copytree(run, two)
    checkpoint = two / "checkpoints/step-000002/policy"
    model = with_values(load(run / "plan.json").models["policy"].path)
    shutil.rmtree(checkpoint)
    source = run / "checkpoints/step-000002/policy"
    launch(__file__, tmp_path, model, str(source), str(checkpoint))
    assert len([*checkpoint.iterdir()]) > len([*source.iterdir()])
    sums = {f"policy/{path.name}": sha256(path) for path in checkpoint.iterdir()}
    write_sums(checkpoint.parent, {**sums, "state.json": sha256(checkpoint.parent / "state.json")})
    assert logits(export(two, tmp_path / "made")).equal(logits(run / "models/policy"))


def test_what_cannot_be_exported_is_said(run: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "plan.json").write_text((run / "plan.json").read_text())
    for arguments, said in (
        ((tmp_path, tmp_path / "to"), "holds no run"),
        ((empty, tmp_path / "to"), "has no checkpoint yet"),
        ((run, tmp_path / "full"), "is there already"),
        (
            (run, tmp_path / "to", "critic"),
            "`critic` is not a model that ones trains\n  choose with --model: policy",
        ),
        ((run, tmp_path / "to", None, "step-000009"), "it has step-000001, step-000002"),
    ):
        with pytest.raises(RunError) as error:
            export(*arguments)
        assert said in str(error.value)
    assert not (tmp_path / "to").exists()


def test_a_variable_that_is_missing_is_named(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RLGRAPH_TEST_FILES")
    with pytest.raises(RunError, match="the environment has no `RLGRAPH_TEST_FILES`"):
        export(run, tmp_path / "made")


def test_a_failure_on_the_way_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(engine: FsdpEngine, directory: str) -> None:
        Path(directory, "model.safetensors").write_text("half")
        raise OSError("the disk is full")

    monkeypatch.setattr(FsdpEngine, "export", full)
    with pytest.raises(OSError, match="full"):
        export(run, tmp_path / "made")
    assert not [*tmp_path.iterdir()]
    assert not torch.distributed.is_initialized()


def saved_again(rank: int, root: Path, model: str, source: str, checkpoint: str) -> None:
    """One of two ranks that load a checkpoint and save it as theirs."""
    engine = FsdpEngine.of(model, optimizer={"lr": 1e-3})
    engine.load(source)
    engine.save(checkpoint)


if __name__ == "__main__":
    forked(saved_again, 2)
