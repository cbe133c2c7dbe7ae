"""Checkpoints: written in the background, read on any number of ranks, refused where they are not whole.

This file as a script trains, saves and loads on one to four ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import LIMIT, forked, launch
from torch.distributed.device_mesh import DeviceMesh

from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Totals
from rlgraph.runtime.engines.fsdp import checkpoint
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine

ADAM = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1, "schedule": "cosine", "total_steps": 20}
ROWS, VOCABULARY, RANKS = 6, 25, 4  # 25 rows lie unevenly on 2, 3 and 4 ranks; 4 on 3 leave a rank without


def write_model(directory: Path, **changes: Any) -> str:
    """A random model of one layer, with a bias of fewer rows than there are ranks."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 8, "intermediate_size": 11, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape |= {"vocab_size": VOCABULARY, "num_hidden_layers": 1, "tie_word_embeddings": True, **changes}
    Qwen2ForCausalLM(Qwen2Config(**shape)).save_pretrained(directory)
    return str(directory)


def objective(batch: dict[str, Any], totals: Totals) -> tuple[torch.Tensor, dict[str, Any]]:
    return -batch["logprobs"].values.sum() / totals.tokens, {}


def update(engine: FsdpEngine) -> dict[str, float]:
    rows = torch.arange(ROWS)[engine.group.rank() :: engine.group.size()]
    tokens = Ragged.of([[(5 * row + 3 * t) % VOCABULARY for t in range(4 + row)] for row in rows.tolist()])
    mask = tokens.like(torch.ones(len(tokens.values), dtype=torch.bool))
    return engine.update({"tokens": tokens, "loss_mask": mask}, objective, rows, ROWS, epochs=2)


def held(engine: FsdpEngine) -> dict[str, torch.Tensor]:
    """Weights and the optimizer's averages in full."""
    tensors, _ = checkpoint.training_state(engine.model, engine.optimizer, engine.scheduler)
    return dict(checkpoint_full(engine, tensors))


def checkpoint_full(engine: FsdpEngine, tensors: dict[str, torch.Tensor]) -> Iterator[Any]:
    from rlgraph.runtime.engines.fsdp.shards import gather_full

    named = ((name, tensor.detach()) for name, tensor in tensors.items())
    return ((name, tensor.clone()) for name, tensor in gather_full(named, engine.group))


def train_and_save(root: Path, mesh: DeviceMesh) -> None:
    engine = FsdpEngine.of(str(root / "model"), optimizer=ADAM, mesh=mesh)
    update(engine)
    engine.begin_save(str(root / f"saved-{mesh.size()}"))
    found = {"saved": held(engine)}
    metrics = update(engine)
    engine.finish_save()
    found["next"] = {**held(engine), "metrics": torch.tensor(list(metrics.values()))}
    if engine.group.rank() == 0:
        torch.save(found, root / f"found-{mesh.size()}.pt")


def load_and_train(root: Path, engine: FsdpEngine, source: int) -> None:
    """What one number of ranks saved goes on, on another."""
    ranks = engine.group.size()
    engine.load(str(root / f"saved-{source}"))
    expected = torch.load(root / f"found-{source}.pt")
    assert all(tensor.equal(expected["saved"][name]) for name, tensor in held(engine).items())
    if source not in (ranks, RANKS + 1 - ranks):
        return  # enough of them go on
    metrics = update(engine)
    found = {**held(engine), "metrics": torch.tensor(list(metrics.values()))}
    tolerance = 0.0 if source == ranks else 1e-4
    torch.testing.assert_close(found, expected["next"], rtol=tolerance, atol=tolerance)


def main(rank: int, root: Path) -> None:
    meshes = {ranks: DeviceMesh("cpu", list(range(ranks))) for ranks in range(1, RANKS + 1)}
    for ranks, mesh in meshes.items():
        if rank < ranks:
            train_and_save(root, mesh)
    dist.barrier()
    for ranks, mesh in meshes.items():
        if rank < ranks:
            engine = FsdpEngine.of(str(root / "model"), optimizer=ADAM, mesh=mesh)
            for source in meshes:
                load_and_train(root, engine, source)
    dist.barrier()
    (root / f"passed-{rank}").touch()


@pytest.mark.slow
def test_any_number_of_ranks_goes_on_on_any_other(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    launch(__file__, tmp_path)
    assert len(list(tmp_path.glob("passed-*"))) == RANKS
    assert len(list((tmp_path / "saved-3").iterdir())) == 4


@pytest.fixture(scope="module")
def path(one_rank: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.parametrize("away", [(), ("parameters", "optimizer")])
def test_training_goes_on_while_a_checkpoint_is_written(
    path: str, away: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, write = threading.Event(), checkpoint._write

    def held_up(*parts: Any) -> None:
        assert go.wait(LIMIT)
        write(*parts)

    monkeypatch.setattr(checkpoint, "_write", held_up)
    engine, again = (FsdpEngine.of(path, optimizer=ADAM) for _ in range(2))
    update(engine)
    expected = held(engine)
    engine.offload(away)
    engine.begin_save(str(tmp_path / "saved"))
    assert engine.away == frozenset(away)
    engine.reload(away)
    update(engine)
    assert not (tmp_path / "saved").exists()
    go.set()
    engine.finish_save()
    again.load(str(tmp_path / "saved"))
    assert all(tensor.equal(expected[name]) for name, tensor in held(again).items())
    assert update(again)["lr"] == again.scheduler.get_last_lr()[0] or again.scheduler.last_epoch == 4


def test_a_failed_save_is_told_by_the_next_call_and_forgotten(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    engine = FsdpEngine.of(path, optimizer=ADAM)
    for call in (
        lambda: engine.finish_save(),
        lambda: engine.begin_save(str(tmp_path / "saved")),
        lambda: engine.load(str(tmp_path / "saved")),
    ):
        engine.begin_save(str(tmp_path / "file" / "saved"))
        with pytest.raises(OSError, match="Not a directory"):
            call()
    engine.save(str(tmp_path / "saved"))
    engine.load(str(tmp_path / "saved"))


@pytest.mark.parametrize("mix", [1.0, 0.25])
def test_what_was_copied_onto_a_frozen_engine_is_saved_with_it(path: str, tmp_path: Path, mix: float) -> None:
    frozen, trained = FsdpEngine.of(path, frozen=True), FsdpEngine.of(path, optimizer=ADAM)
    before = {name: weight.clone() for name, weight in frozen.weights()}
    for parameter in trained.parameters:
        parameter.data.add_(1.0)
    frozen.copy(trained, mix)
    frozen.save(str(tmp_path / "saved"))
    again = FsdpEngine.of(path, frozen=True)
    again.load(str(tmp_path / "saved"))
    held = dict(frozen.weights())
    for name, weight in again.weights():
        assert weight.allclose(before[name] + mix, rtol=0, atol=1e-6)
        assert weight.equal(held[name])


def test_another_model_is_not_copied(path: str, tmp_path: Path) -> None:
    other = FsdpEngine.of(write_model(tmp_path / "other", intermediate_size=12), optimizer=ADAM)
    with pytest.raises(ValueError, match=r"in the model copied onto, and \[.* in the other"):
        FsdpEngine.of(path, frozen=True).copy(other)


def test_what_is_not_whole_or_another_model_is_refused(path: str, tmp_path: Path) -> None:
    engine = FsdpEngine.of(path, optimizer=ADAM)
    engine.save(str(tmp_path / "saved"))
    other = FsdpEngine.of(write_model(tmp_path / "other", intermediate_size=12), optimizer=ADAM)
    with pytest.raises(
        ValueError, match=r"checkpoint of another model: exp_avg.*is \[8, 11\] there and \[8, 12\]"
    ):
        other.load(str(tmp_path / "saved"))
    (tmp_path / "saved" / "shard-00000-of-00001.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="shard-00000-of-00001"):
        engine.load(str(tmp_path / "saved"))


if __name__ == "__main__":
    forked(main, RANKS)
