"""Muon over shards and replicas: the weights that torch.optim.Muon and AdamW give on one plain rank.

This file as a script is two or four ranks.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import pytest
import test_families
import torch
import torch.distributed as dist
from ranks import forked, launch
from test_fsdp import ROWS, batch_columns, close, part_of, sft_objective, write_models
from torch.distributed.device_mesh import DeviceMesh

from rlgraph.costs import limits
from rlgraph.costs.model_size import Size
from rlgraph.costs.models.config import Config
from rlgraph.costs.models.fields import Family
from rlgraph.costs.muon import exchanged, experts_on_device, matrices_on_device
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.runtime.demo import make, questions
from rlgraph.runtime.engines.decoder_layers import decoder_layers
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.fsdp.muon import ITERATIONS, body_matrices, orthogonal
from rlgraph.runtime.engines.weights.naming import views_of
from rlgraph.runtime.worker.process_groups import hybrid_mesh

pytestmark = pytest.mark.slow

RATE, DECAY, MOMENTUM = 1e-2, 0.1, 0.9
MUON = {"kind": "muon", "lr": RATE, "eps": 1e-3, "weight_decay": DECAY, "momentum": MOMENTUM}
MUON |= {"max_grad_norm": 0.0}
# tied and gathered whole; layer by layer; with three experts, of which a fourth rank has none
CASES: dict[str, dict[str, Any]] = {"qwen": {}, "llama": {"reshard": True}, "qwen3_moe": {"reshard": True}}
MESHES = {"2": (2, 2), "4": (4, 4), "2x2": (4, 2)}  # ranks, and those of them that share a copy
LOADED = [("4", "2x2"), ("2x2", "4"), ("1", "4"), ("2", "2x2")]  # the mesh that saves, and that goes on
STEPS = 2


def engine_of(root: Path, case: str, **where: Any) -> FsdpEngine:
    return FsdpEngine.of(str(root / case), optimizer=MUON, **CASES[case], **where)


def stepped(engine: FsdpEngine) -> dict[str, torch.Tensor]:
    """The weights after some steps, each on all rows."""
    rows = torch.arange(ROWS)[engine.group.rank() :: engine.group.size()]
    engine.update(part_of(batch_columns(), rows), sft_objective, rows, ROWS, epochs=STEPS)
    return {name: weight.clone() for name, weight in engine.weights()}


def scenario(root: Path, name: str, **where: Any) -> dict[str, Any]:
    """The weights of each case after some steps, where they are saved, and after as many more."""
    found: dict[str, Any] = {}
    for case in CASES:
        engine = engine_of(root, case, **where)
        first = stepped(engine)
        engine.save(str(root / f"{case}-{name}"))
        found[case] = (first, stepped(engine))
        found[f"{case} bytes"] = engine.checkpoint_bytes()
    return found


def main(rank: int, root: Path, *_: str) -> None:
    ranks = dist.get_world_size()
    whole = DeviceMesh("cpu", list(range(ranks)))
    shards = {name: shard for name, (world, shard) in MESHES.items() if world == ranks}
    meshes = {name: hybrid_mesh(whole, shard) if shard < ranks else whole for name, shard in shards.items()}
    found: dict[Any, Any] = {
        name: scenario(root, name, mesh=mesh, group=whole.get_group()) for name, mesh in meshes.items()
    }
    dist.barrier()
    for source, name in LOADED:
        if name in meshes:
            for case in CASES:
                engine = engine_of(root, case, mesh=meshes[name], group=whole.get_group())
                engine.load(str(root / f"{case}-{source}"))
                found[source, name, case] = stepped(engine)
    torch.save(found, root / f"rank-{rank}-of-{ranks}.pt")


SHAPE = {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 128, "pad_token_id": 0, "head_dim": 16}
SHAPE |= {"intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
EXPERTS |= {"moe_intermediate_size": 48, "n_group": 1, "topk_group": 1}


@pytest.mark.parametrize("kind", get_args(Family))
def test_the_matrices_that_are_priced_are_those_of_the_model(kind: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    known = AutoConfig.for_model(kind).to_dict()
    config = AutoConfig.for_model(kind, **SHAPE, **{k: v for k, v in EXPERTS.items() if k in known})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    held = Counter[tuple[int, int]]()
    shapes = body_matrices(model, decoder_layers(model), views_of(model, ()))
    for parameter, (rows, columns) in shapes.items():
        held[rows, columns] += parameter.numel() // (rows * columns)
    size = Size(Config.model_validate({k: v for k, v in config.to_dict().items() if v is not None}))
    priced = Counter(exchanged(size))
    for shape, count in experts_on_device(size, 1):
        priced[shape] += count
    assert priced == held
    assert matrices_on_device(size, 1) == sum(rows * columns * n for (rows, columns), n in held.items())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("muon")
    write_models(root)
    test_families.build(root, "qwen3_moe")
    return root


@pytest.fixture(scope="module")
def alone(root: Path, one_rank: None) -> dict[str, Any]:
    return scenario(root, "1")


@pytest.fixture(scope="module")
def ranks(root: Path, alone: dict[str, Any]) -> list[dict[Any, Any]]:
    for count in (2, 4):
        launch(__file__, root, str(count))
        (root / "store").unlink(missing_ok=True)  # in which the ranks met
    two = [torch.load(root / f"rank-{rank}-of-2.pt") for rank in range(2)]
    four = [torch.load(root / f"rank-{rank}-of-4.pt") for rank in range(4)]
    return [{**first, **second} for first, second in zip((*two, *two), four, strict=True)]


def matrices(name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    """The matrices of a parameter, as views: an expert's gate and up lie in one."""
    if tensor.dim() == 2:
        return [tensor]
    return [part for expert in tensor for part in expert.chunk(2 if "gate_up" in name else 1)]


def plain_steps(path: Path, steps: int) -> dict[str, torch.Tensor]:
    """The weights after steps of torch's own Muon and AdamW, in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path)
    named = dict(model.named_parameters())
    body = {name: p for name, p in named.items() if ".layers." in name and p.dim() > 1}
    views = {n: [torch.nn.Parameter(m) for m in matrices(n, p.detach())] for n, p in body.items()}
    whole = [view for parts in views.values() for view in parts]
    scale = {"adjust_lr_fn": "match_rms_adamw", "momentum": MOMENTUM}
    muon = torch.optim.Muon(whole, lr=RATE, weight_decay=DECAY, **scale)
    rest = [p for name, p in named.items() if name not in body]
    adamw = torch.optim.AdamW(rest, lr=RATE, eps=1e-3, weight_decay=DECAY)
    tokens, mask = batch_columns()["tokens"], batch_columns()["loss_mask"].padded(False)[:, 1:]
    for _ in range(steps):
        model.zero_grad()
        logits = model(tokens.padded(), attention_mask=tokens.mask().long()).logits[:, :-1]
        log_p = torch.log_softmax(logits, dim=-1)
        (-log_p.gather(2, tokens.padded()[:, 1:, None]).squeeze(2)[mask].mean()).backward()
        for name, p in body.items():
            assert p.grad is not None
            for view, gradient in zip(views[name], matrices(name, p.grad), strict=True):
                view.grad = gradient
        # it would iterate in bfloat16, which torch 2.15 names in another way than torch 2.13
        to_float = patch.object(torch.Tensor, "bfloat16", torch.Tensor.float)
        with to_float, patch.object(torch, "bfloat16", torch.float32):
            muon.step()
        adamw.step()
    return {name: p.detach() for name, p in named.items()}


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_torch(case: str, root: Path, one_rank: None) -> None:
    engine = engine_of(root, case)
    for count in (1, 2):
        stepped(engine)
        close(dict(engine._full()), plain_steps(root / case, count * STEPS), 2e-4)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_does_what_one_rank_does(
    mesh: str, case: str, alone: dict[str, Any], ranks: list[dict[Any, Any]]
) -> None:
    for rank in ranks:
        for own, first, one in zip(rank[mesh][case], ranks[0][mesh][case], alone[case], strict=True):
            assert all(tensor.equal(first[name]) for name, tensor in own.items())
            close(own, one, 2e-4)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("source", "mesh"), LOADED)
def test_a_checkpoint_goes_on_on_another_mesh(
    source: str, mesh: str, case: str, alone: dict[str, Any], ranks: list[dict[Any, Any]]
) -> None:
    undisturbed = (alone if source == "1" else ranks[0][source])[case][1]
    for rank in ranks:
        close(rank[source, mesh, case], undisturbed, 2e-4)


def test_a_checkpoint_holds_one_average_of_a_matrix(
    root: Path, alone: dict[str, Any], ranks: list[dict[Any, Any]]
) -> None:
    from safetensors import safe_open

    with safe_open(root / "llama-1" / "shard-00000-of-00001.safetensors", "pt") as file:
        averages = {name.partition(".")[0] for name in file.keys() if "q_proj" in name}  # noqa: SIM118
        size = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    assert averages == {"model", "momentum_buffer"}
    assert size == alone["llama bytes"] == sum(rank["4"]["llama bytes"] for rank in ranks)


def test_a_checkpoint_of_adamw_is_refused(root: Path, alone: dict[str, Any]) -> None:
    engine = FsdpEngine.of(str(root / "llama"), optimizer={"lr": RATE})
    with pytest.raises(ValueError, match="is a checkpoint of another model"):
        engine.load(str(root / "llama-1"))


@pytest.mark.parametrize("shape", [(3, 5, 8), (2, 8, 5), (4, 1, 6)])
def test_orthogonal_matrices_have_singular_values_near_one(shape: tuple[int, ...]) -> None:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonal(drawn))
    assert ITERATIONS == 5 and values.min() > 0.6 and values.max() < 1.3


def test_experts_are_orthogonalised_in_batches(root: Path, one_rank: None) -> None:
    whole = stepped(engine_of(root, "qwen3_moe"))
    with patch.object(limits, "BUCKET", 1):
        close(stepped(engine_of(root, "qwen3_moe")), whole, 1e-5)


def test_a_rate_that_is_set_is_that_of_all_weights(root: Path, one_rank: None) -> None:
    engine = engine_of(root, "llama")
    before = {name: weight.clone() for name, weight in engine.weights()}
    engine.set_rate(0.0)
    close(stepped(engine), before, 0.0)


def test_rows_are_learnt(root: Path, one_rank: None) -> None:
    engine = FsdpEngine.of(str(root / "llama"), optimizer={"kind": "muon", "lr": 3e-3})
    rows, columns = torch.arange(ROWS), part_of(batch_columns(), torch.arange(ROWS))
    losses = [engine.update(columns, sft_objective, rows, ROWS, epochs=10)["loss"] for _ in range(4)]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.1 * losses[0]


@pytest.mark.nightly
def test_the_task_of_the_demo_is_learnt(one_rank: None, tmp_path: Path) -> None:
    """With the rate of ``demo_sft``. A greedy answer is right where each of its tokens is the likeliest."""
    from transformers import AutoTokenizer

    make(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    train, test = (
        [tuple(tokenizer(row[part]).input_ids for part in ("question", "answer")) for row in rows]
        for rows in questions(0)
    )
    engine = FsdpEngine.of(str(tmp_path / "model"), optimizer={"lr": 1.5e-3, "kind": "muon"})
    generator = torch.Generator().manual_seed(0)
    for _ in range(140):
        rows = [train[row] for row in torch.randint(len(train), (128,), generator=generator).tolist()]
        tokens = Ragged.of([[*asked, *told, tokenizer.eos_token_id] for asked, told in rows])
        counts = [[False] * len(asked) + [True] * (len(told) + 1) for asked, told in rows]
        columns = {"tokens": tokens, "loss_mask": Ragged.of(counts, dtype=torch.bool)}
        engine.update(columns, sft_objective, torch.arange(len(rows)), len(rows))
    right = 0
    for asked, told in test:
        with torch.no_grad():
            likeliest = engine.model(torch.tensor([[*asked, *told]])).logits[0].argmax(-1)
        right += likeliest[len(asked) - 1 :].tolist() == [*told, tokenizer.eos_token_id]
    assert right / len(test) > 0.5


if __name__ == "__main__":
    forked(main, int(sys.argv[2]))
