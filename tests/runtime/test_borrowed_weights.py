"""Engines on one set of frozen weights: what they hold, and that no number is another one than apart.

This file as a script trains such engines, and others that are apart, on two ranks or on four: on these in one
copy and in two.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import forked, launch
from safetensors.torch import load_file, save_file
from test_lora import objective
from test_offload import ALL, ROWS, columns, write_model
from torch.distributed.device_mesh import DeviceMesh

from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.memory.offload import distinct_storages
from rlgraph.runtime.worker.process_groups import hybrid_mesh

ADAM = {"lr": 1e-2}
CASES: dict[str, dict[str, Any]] = {
    "whole": {},
    "layers": {"reshard": True, "recompute": True},
    "bfloat16": {"dtype": "bfloat16", "reshard": True},
}
MODELS: dict[str, dict[str, Any]] = {  # the first holds the weights
    "policy": {"optimizer": ADAM, "lora": {"rank": 3, "alpha": 6.0}},
    "other": {"optimizer": ADAM, "lora": {"rank": 2, "alpha": 9.0, "targets": ["q_proj"]}, "seed": 5},
    "critic": {"optimizer": ADAM, "lora": {"rank": 2, "alpha": 4.0}, "head": "value", "seed": 7},
    "ref": {"frozen": True},
}


def engines(path: str, shared: bool, **options: Any) -> dict[str, FsdpEngine]:
    made: dict[str, FsdpEngine] = {}
    for name, own in MODELS.items():
        settings = {**options, **own, "base": made.get("policy") if shared else None}
        if name == "ref":
            settings.pop("recompute", None)
        made[name] = FsdpEngine.of(path, **settings)
    return made


def scores(engine: FsdpEngine) -> torch.Tensor:
    score = engine.values if engine.head == "value" else engine.logprobs
    return score(**columns(torch.arange(ROWS))).values


def train(engine: FsdpEngine) -> dict[str, float]:
    rows = torch.arange(ROWS)[engine.group.rank() :: engine.group.size()]
    return engine.update(columns(rows), objective, rows, ROWS, minibatches=2)


def turn(made: dict[str, FsdpEngine]) -> dict[str, Any]:
    """What all of them score, then train, one after the other, then hold."""
    found: dict[str, Any] = {f"{name} scores": scores(engine) for name, engine in made.items()}
    for name, engine in made.items():
        if engine.optimizer:
            found[name] = train(engine)
    return found | {f"{name} weights": dict(engine.weights()) for name, engine in made.items()}


def addresses(engine: FsdpEngine) -> set[int]:
    """Where that lies which an engine gathers: FSDP2's flat shards, padded, or plain parameters."""
    flat = [*engine.model.parameters()] if not engine.shards else []
    for shard in engine.shards:
        state = shard._get_fsdp_state()
        several = getattr(state, "_fsdp_param_groups", None)
        for group in filter(None, [state._fsdp_param_group] if several is None else several):
            flat += [one._sharded_param_data for one in group.fsdp_params]
    return {tensor.untyped_storage().data_ptr() for tensor in flat}


def held(*made: FsdpEngine, frozen: bool = False) -> int:
    """The bytes of all parameters on this rank, or of those that do not train."""
    tensors = [p for engine in made for p in engine.model.parameters() if not (frozen and p.requires_grad)]
    return sum(storage.nbytes() for storage in distinct_storages(tensors))


def equal(left: Any, right: Any) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=0)


def compare(path: str, folder: Path, **options: Any) -> None:
    """Train on one set of weights and apart, moving off the device, saving and loading."""
    shared, apart = (engines(path, one, **options) for one in (True, False))
    policy = shared["policy"]
    borrowed = sum(held(engine, frozen=True) for name, engine in apart.items() if name != "policy")
    assert held(*apart.values()) - held(*shared.values()) == borrowed > 0.6 * held(*apart.values())
    equal(turn(shared), turn(apart))
    for name, engine in shared.items():
        if engine is not policy:
            assert len(addresses(engine) - addresses(policy)) == len(engine.parameters), name

    for engine in shared.values():
        engine.offload(ALL)
    assert held(*shared.values()) == 0
    shared["critic"].reload(ALL)
    with pytest.raises(RuntimeError, match="values needs its parameters, offloaded now"):
        scores(shared["critic"])
    with pytest.raises(RuntimeError, match="update needs its parameters, offloaded now"):
        train(shared["critic"])
    shared["critic"].export(str(folder / "exported"))  # for which weights come back, and go again
    assert policy.away == {*ALL} and not shared["critic"].away
    for name in ("other", "ref", "policy"):
        shared[name].reload(ALL)
    equal(turn(shared), turn(apart))

    names = [name for name in MODELS if name != "ref"]
    for name in names:
        shared[name].save(str(folder / name))
    after = turn(shared)
    for made in engines(path, True, **options), engines(path, False, **options):
        for name in names:
            made[name].load(str(folder / name))
        equal(turn(made), after)


def main(rank: int, root: Path, ranks: str) -> None:
    whole = DeviceMesh("cpu", list(range(int(ranks))))
    path, group = str(root / "model"), whole.get_group()
    compare(path, root / "whole", mesh=whole, **CASES["bfloat16"])
    if int(ranks) > 2:
        mixed = hybrid_mesh(whole, 2)
        compare(path, root / "mixed", mesh=mixed, group=group, **CASES["layers"])
        other = engines(path, True, mesh=mixed, group=group)
        for name, engine in engines(path, False, mesh=whole).items():
            if engine.optimizer:  # what one mesh saved, on another
                for one in engine, other[name]:
                    one.load(str(root / "whole" / name))
                equal(dict(other[name].weights()), dict(engine.weights()))
    dist.barrier()
    (root / f"passed-{rank}").touch()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("case", "tied"),
    [("whole", True), ("layers", False), pytest.param("bfloat16", True, marks=pytest.mark.nightly)],
)
def test_engines_on_one_set_of_weights_do_what_others_do_apart(case: str, tied: bool, tmp_path: Path) -> None:
    compare(write_model(tmp_path / "model", tie_word_embeddings=tied), tmp_path, **CASES[case])


@pytest.mark.usefixtures("one_rank")
def test_so_they_do_where_files_are_not_read_by_rows(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    from transformers import Qwen2ForCausalLM

    Qwen2ForCausalLM.from_pretrained(path).half().save_pretrained(path)
    weights = Path(path, "model.safetensors")
    state = {name.removeprefix("model."): tensor for name, tensor in load_file(weights).items()}
    save_file(state, weights, metadata={"format": "pt"})
    compare(path, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_so_they_do_on_several_ranks(tmp_path: Path, ranks: int) -> None:
    write_model(tmp_path / "model")
    launch(__file__, tmp_path, str(ranks))
    assert len([*tmp_path.glob("passed-*")]) == ranks


if __name__ == "__main__":
    forked(main, int(sys.argv[2]))
