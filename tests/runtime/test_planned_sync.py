"""What the plan says of a weight sync is what runs: this file as a script is the two ranks that train."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import forked, launch

from rlgraph.compiler import compile_graph
from rlgraph.costs import limits
from rlgraph.costs.pricing import sync_buckets
from rlgraph.errors import RunError
from rlgraph.ir.plan import Plan, Step, Target
from rlgraph.passes.lower import in_one_process
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.weights import transfer, transports
from rlgraph.runtime.engines.weights.transfer import Named, Ranks, Weights, cast
from rlgraph.runtime.engines.weights.transports import TRANSPORTS, syncs

SHAPE = {
    "hidden_size": 18, "intermediate_size": 26, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 8, "vocab_size": 37, "num_hidden_layers": 3,
}  # fmt: skip
MIXED = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 10, "mlp_only_layers": [0]}
LORA = {"rank": 3, "alpha": 6.0, "targets": "all-linear"}
SMALL = 2048  # bytes of a bucket: the models fill several
# model, serve.dtype, adapter
CASES = {
    "rounded": ("dense", "bfloat16", None),
    "as it is": ("dense", "float32", None),
    "mixture": ("mixture", "bfloat16", None),
    "adapted": ("dense", "bfloat16", LORA),
}


def write_models(root: Path) -> None:
    """A tied dense model and a mixture of experts, whose rows no number of ranks divides."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True)).save_pretrained(root / "dense")
    mixed = Qwen3MoeConfig(**SHAPE, **MIXED, tie_word_embeddings=False)
    Qwen3MoeForCausalLM(mixed).save_pretrained(root / "mixture")


def planned(root: Path, case: str, *settings: str, devices: int | None = 2) -> tuple[Plan, Step]:
    """The plan of a case for two devices of a cluster, and its sync."""
    model, dtype, lora = CASES[case]
    chosen = [f"models.policy.path={root / model}", f"models.policy.serve.dtype={dtype}"]
    chosen += ["models.policy.serve.engine=transformers", "models.policy.train.dtype=float32"]
    chosen += ["models.policy.train.lora={rank: 3, alpha: 6.0}"] if lora else []
    plan = compile_graph("grpo", [*chosen, *settings], devices, target=Target("h100-8"))
    (step,) = (step for step in plan.steps if step.kind == "sync")
    return plan, step


def received(weights: Iterable[tuple[str, torch.Tensor]]) -> tuple[dict[str, torch.Tensor], int, int]:
    """The weights that are gathered, the bytes that come from other ranks, and in how many collectives."""
    sizes: list[int] = []
    gather = dist.all_gather

    def counted(parts: list[torch.Tensor], own: torch.Tensor, group: Any) -> None:
        sizes.append(sum(part.nbytes for part in parts) - own.nbytes)
        gather(parts, own, group=group)

    with patch.object(dist, "all_gather", counted):
        found = {name: tensor.clone() for name, tensor in weights}
    return found, sum(sizes), len(sizes)


def over(
    path: str, weights: Iterable[Named], dtype: str, group: dist.ProcessGroup, root: Path, rank: int
) -> tuple[int, int]:
    """The bytes that rank 1 receives from rank 0 by a path, and in how many broadcasts or files."""
    sizes: list[int] = []
    plain, read = dist.broadcast, transports.load_file

    def counted(flat: torch.Tensor, *where: Any) -> None:
        if flat.dtype == torch.uint8:
            sizes.append(flat.nbytes)
        plain(flat, *where)

    def counted_file(file: Path) -> dict[str, torch.Tensor]:
        tensors = read(file)
        sizes.append(sum(tensor.nbytes for tensor in tensors.values()))
        return tensors

    link = TRANSPORTS[path](Ranks(group, 0, "cpu"), str(root / "files"))
    with (
        patch.object(transfer.dist, "broadcast", counted),
        patch.object(transports, "load_file", counted_file),
    ):
        if rank == 0:
            link.send(Weights(3, cast(list(weights), getattr(torch, dtype))))
        else:
            gathered = dict(weights)
            found = {name: tensor.clone() for name, tensor in link.receive(3).tensors}
            assert all(tensor.equal(found[name]) for name, tensor in gathered.items())
    return sum(sizes), len(sizes)


def main(rank: int, root: Path) -> None:
    limits.BUCKET = SMALL
    found = {}
    for case, (model, dtype, lora) in CASES.items():
        engine = FsdpEngine.of(str(root / model), optimizer={"lr": 1e-2}, lora=lora)
        with torch.no_grad():
            for number, parameter in enumerate(engine.parameters):
                parameter.add_(0.01 * number / 3)  # an adapter that begins as nothing would add nothing
        found[case] = received(engine.weights(dtype)), received(engine.weights())
        if lora:
            found["alone"] = received(engine.adapter(dtype)), received(engine.adapter())
    torch.save(found, root / f"rank-{rank}.pt")
    sent = {}
    group = dist.new_group([0, 1])
    for path in ("broadcast", "disk"):
        for case, (model, dtype, _) in CASES.items():
            weights = FsdpEngine.of(str(root / model), frozen=True).weights(dtype)
            sent[path, case] = over(path, weights, dtype, group, root, rank)
        engine = FsdpEngine.of(str(root / "dense"), optimizer={"lr": 1e-2}, lora=LORA)
        sent[path, "alone"] = over(path, engine.adapter("bfloat16"), "bfloat16", group, root, rank)
    torch.save(sent, root / f"sent-{rank}.pt")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sync")
    write_models(root)
    launch(__file__, root)
    return root


@pytest.fixture
def small_buckets() -> Iterator[None]:
    with patch.object(limits, "BUCKET", SMALL):
        yield


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_gather_receives_the_bytes_of_the_plan(
    root: Path, case: str, rank: int, small_buckets: None
) -> None:
    (_, nbytes, count), _ = torch.load(root / f"rank-{rank}.pt")[case]
    plan, step = planned(root, case)
    assert step.action.path == "memory" and nbytes == step.bytes
    if not CASES[case][2]:  # adapters are gathered beside their weights, in buckets of another type
        assert (count, CASES[case][1]) == sync_buckets(plan, step.action) and count > 5


@pytest.mark.parametrize("case", CASES)
def test_casting_before_a_gather_changes_no_bit(root: Path, case: str) -> None:
    (cast, less, _), (whole, more, _) = torch.load(root / "rank-0.pt")[case]
    dtype = getattr(torch, CASES[case][1])
    assert cast.keys() == whole.keys()
    assert all(tensor.to(dtype).equal(whole[name].to(dtype)) for name, tensor in cast.items())
    halved = dtype == torch.bfloat16 and not CASES[case][2]
    assert {tensor.dtype for tensor in cast.values()} == {dtype if halved else torch.float32}
    assert more == (2 if halved else 1) * less


POOLS = ("pools={train: {devices: 2}, gen: {devices: 1}}", "models.policy.serve.pool=gen")


@pytest.mark.parametrize("case", ["rounded", "as it is", "mixture"])
@pytest.mark.parametrize("path", ["broadcast", "disk"])
def test_another_pool_receives_the_bytes_of_the_plan(
    root: Path, path: str, case: str, small_buckets: None
) -> None:
    folder = (f"models.policy.serve.sync_folder={root}",) if path == "disk" else ()
    plan, step = planned(root, case, *POOLS, *folder, devices=None)
    received, count = torch.load(root / "sent-1.pt")[path, case]
    assert step.action.path == path and received == step.bytes
    assert (count, CASES[case][1]) == sync_buckets(plan, step.action) and count > 5


ALONE = {
    engine: (f"models.policy.serve.engine={engine}", "models.policy.serve.lora=adapter")
    for engine in ("sglang", "transformers")
}


@pytest.mark.parametrize(("engine", "way"), [("sglang", "ipc"), ("transformers", "memory")])
def test_of_an_adapter_alone_little_is_gathered(
    root: Path, engine: str, way: str, small_buckets: None
) -> None:
    (cast, nbytes, count), (whole, more, _) = torch.load(root / "rank-1.pt")["alone"]
    plan, step = planned(root, "adapted", *ALONE[engine])
    assert step.action.path == way and nbytes == step.bytes and more == 2 * nbytes
    assert (count, "bfloat16") == sync_buckets(plan, step.action) and count > 1
    assert all(tensor.equal(whole[name].bfloat16()) for name, tensor in cast.items())
    ends = {(name.split(".")[0], *name.split(".")[-3:]) for name in cast}
    assert ("base_model", "q_proj", "lora_A", "weight") in ends and {end[-1] for end in ends} == {"weight"}
    merged = torch.load(root / "rank-1.pt")["adapted"][0][1]
    assert nbytes < merged / 2  # of a model as small as this


@pytest.mark.parametrize("engine", ALONE)
@pytest.mark.parametrize("path", ["broadcast", "disk"])
def test_of_an_adapter_alone_another_pool_receives_little(
    root: Path, path: str, engine: str, small_buckets: None
) -> None:
    folder = (f"models.policy.serve.sync_folder={root}",) if path == "disk" else ()
    plan, step = planned(root, "adapted", *POOLS, *ALONE[engine], *folder, devices=None)
    received, count = torch.load(root / "sent-1.pt")[path, "alone"]
    assert step.action.path == path and received == step.bytes
    assert (count, "bfloat16") == sync_buckets(plan, step.action)


@pytest.mark.parametrize(
    ("settings", "path", "law"),
    [
        ((), "ipc", "the engine transformers takes memory or broadcast or disk"),
        ((), "broadcast", "its two engines are in one process"),
        (POOLS, "memory", "its two engines are not in one process"),
        (POOLS, "disk", "models.policy.serve.sync_folder names no folder"),
        (POOLS, "pigeon", "the engine transformers takes"),
    ],
)
def test_a_path_that_can_not_be_carried_out_is_refused(
    root: Path, settings: tuple[str, ...], path: str, law: str
) -> None:
    plan, step = planned(root, "rounded", *settings, devices=None if settings else 2)
    assert syncs(plan, one_process=False)["policy"].action == step.action
    wrong = replace(step, action=replace(step.action, path=path))
    steps = tuple(wrong if one is step else one for one in plan.steps)
    with pytest.raises(RunError, match=rf"sends the weights of policy by `{path}`, but {law}[^\n]*\n  make"):
        syncs(replace(plan, steps=steps), one_process=False)


def test_pools_of_one_process_hand_weights_over(root: Path) -> None:
    plan, _ = planned(root, "rounded", *POOLS, devices=None)
    with pytest.raises(RunError, match="its two engines are in one process"):
        syncs(plan, one_process=True)
    assert syncs(in_one_process(plan), one_process=True)["policy"].action.path == "memory"


if __name__ == "__main__":
    forked(main, 2)
