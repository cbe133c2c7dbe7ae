"""Exports a checkpoint's model as a Hugging Face directory, in one process, without Ray."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name

import torch.distributed as dist

from rlgraph.engines.registry import TRAINING
from rlgraph.errors import RunError
from rlgraph.files import ASIDE, replace
from rlgraph.ir.plan import ModelPlan, Plan
from rlgraph.nodes.support.data_file import local_path
from rlgraph.reports.plan_file import load
from rlgraph.runtime.rundir.going_back import whole_checkpoint
from rlgraph.runtime.rundir.rundir import RunDir
from rlgraph.variables import REFERENCE, referred, with_values


def export(run_dir: Path, to: Path, model: str | None = None, checkpoint: str | None = None) -> Path:
    """Write a trained model as transformers loads it, with its tokenizer; return the directory.

    It is written aside and renamed, so that there is never half of one. The checkpoint may be of any number
    of ranks. The model that training started from must still be where the run found it: its configuration
    and tokenizer are taken from there.

    Args:
        run_dir: of the run, which may go on meanwhile.
        to: the directory to make.
        model: its name in the graph; needed where the run trains several.
        checkpoint: its name, such as ``step-000100``, or ``best``; the last one unless given.

    Raises:
        RunError: there is no run, no such checkpoint or model, or ``to`` is there already.
        GraphError: the plan in the run directory can't be read.
    """
    folder = RunDir(run_dir)
    if not (run_dir / "plan.json").is_file():
        raise RunError(f"{run_dir} holds no run (no plan.json)\n  name a run directory, as runs/demo")
    is_empty_folder = to.is_dir() and not any(to.iterdir())
    if to.exists() and not is_empty_folder:
        raise RunError(f"{to} is there already\n  name a directory that is not, or remove it")
    plan = load(run_dir / "plan.json")
    saved = whole_checkpoint(folder, checkpoint, "--checkpoint")
    name = trained_model(plan, model)
    to.absolute().parent.mkdir(parents=True, exist_ok=True)
    aside = to.absolute().with_name(f".{to.name}{ASIDE}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        with _single_rank():
            _write(plan.models[name], saved / name, aside)
        replace(to, aside)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return to


def _write(model: ModelPlan, checkpoint: Path, to: Path) -> None:
    """Load a model with the weights of a checkpoint, and write it as transformers loads it."""
    path = local_path(with_values(model.path, referred(model)))
    for name in REFERENCE.findall(path):
        law = f"the environment has no `{name}`, and the model that training started from is at {path}"
        raise RunError(f"{law}\n  export {name}=... before the command")
    if not Path(path).exists() and path.count("/") != 1:
        law = f"{path}, the model that training started from, is not there"
        raise RunError(f"{law}\n  run this where the run was started: paths are relative to that")
    assert model.train
    record = TRAINING[model.train.engine]
    build_engine = resolve_name(record.builder)
    optimizer = model.optimizer.model_dump() if model.optimizer else None
    engine = build_engine(
        path,
        head=model.head,
        optimizer=optimizer,
        config=model.config,
        trust_remote_code=model.trust_remote_code,
        **model.train.model_dump(include={*record.options}),
    )
    engine.load(str(checkpoint))
    engine.export(str(to))


def trained_model(plan: Plan, name: str | None) -> str:
    """Return the model to export: the one that is trained, or the named one of several."""
    trained = [key for key, model in plan.models.items() if model.train and model.optimizer]
    if name is None and len(trained) == 1:
        return trained[0]
    if name in trained:
        return name
    law = f"{plan.graph} trains several models"
    if name:
        law = f"`{name}` is not a model that {plan.graph} trains"
    raise RunError(f"{law}\n  choose with --model: {', '.join(trained)}")


@contextmanager
def _single_rank() -> Iterator[None]:
    """Open a process group of this process alone, for the length of a block."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
