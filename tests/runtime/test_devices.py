"""Workers and engines on another device than the host: numbers are those of the CPU, and nothing is mixed.

The other device is that of ``tests/helpers/far.py``, on which an operation raises that CUDA would refuse.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import far
from rlgraph.compiler import compile_graph
from rlgraph.ir.domains import GraphDomain
from rlgraph.ir.function import Function
from rlgraph.ir.plan import ColumnPlan
from rlgraph.ir.steps import NONE
from rlgraph.nodes import LOSSES, OPS
from rlgraph.nodes.loss.policy import reinforce
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.nodes.update.update import policy_objective
from rlgraph.ops import Metric, Request, Sampling, Totals, registry
from rlgraph.ops.column_types import ColumnType
from rlgraph.ops.declare import Loss, Op
from rlgraph.runtime.columns.chunk import Chunk, pack, unpack
from rlgraph.runtime.columns.store import Store
from rlgraph.runtime.engines.fsdp import engine as engines
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.transformers.engine import TransformersEngine
from rlgraph.runtime.messages.report import Scope
from rlgraph.runtime.messages.tasks import STORE, ColumnRef, Task
from rlgraph.runtime.worker.worker import Worker
from share import rest_nightly

ADAM = {"lr": 1e-2, "eps": 1e-3}
LORA = {"rank": 2, "alpha": 4.0}
ROWS = 8  # two samples of each of four prompts
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
PORTS = {"chosen": [True, False] * 4, "rewards": [0.0, 1.0, 1.0, 1.0, 0.5, 0.0, 1.0, 0.0]}
GENERATED = {"max_new_tokens": 4, "n": 2}
ATTRIBUTES: dict[str, dict[str, Any]] = {  # of ops that have some without a default
    "rollout": GENERATED,
    "rollout.partial": GENERATED,
    "reward.overlong": {"limit": 6, "buffer": 4},
    "correction.reject": {"threshold": 0.9},
    "filter.threshold": {"min": 0.5},
    "fill": {"value": 1.0},
    "filter.widest": {"groups": 2},
    "segment.contexts": {"most": 4},
}
MODELS = {"values": "critic", "update.critic": "critic", "reward.model": "reward", "update.copy": "ref"}
MODELS |= {"update.reward": "critic", "reward.process": "reward"}  # the first one trains


def tokens() -> Ragged:
    """Rows of 5 to 12 tokens, two of which begin with the same four."""
    return Ragged.of(
        [[3 + (row // 2 + t) % 20 for t in range(4)] + [5 + row] * (1 + row) for row in range(ROWS)]
    )


def loss_mask() -> Ragged:
    return tokens().like(
        torch.cat([torch.arange(len(row)) >= 4 for row in map(torch.tensor, tokens().tolist())])
    )


def places() -> Ragged:
    """Each token's place in its row."""
    return tokens().like(tokens().place_of)


def forgotten() -> Ragged:
    """The first two tokens of a row are seen up to its fifth."""
    return tokens().like(torch.where(tokens().place_of < 2, 5, 0))


OF_ROWS = {"tokens": tokens, "values_tokens": tokens, "loss_mask": loss_mask, "values_mask": loss_mask}
OF_ROWS |= {"segment_mask": loss_mask, "segment_places": places, "forgotten": forgotten}


def column(name: str, kind: str) -> Any:
    """Something for a column of this name and type."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    if made := OF_ROWS.get(name):
        return made()
    if name == "prompt":
        return Ragged.of([[3 + row, 9, 4] for row in range(ROWS)])
    if kind.startswith("text"):
        return [f"text {row}" for row in range(ROWS)]
    ragged = "," in kind
    count = len(tokens().values) if ragged else ROWS
    made = {
        "float32": -torch.rand(count, generator=generator),
        "boolean": torch.rand(count, generator=generator) < 0.5,
        "int64": torch.arange(count) // 2,
    }[kind.partition("[")[0]]
    if name in PORTS and not ragged:
        made = torch.tensor(PORTS[name])
    return tokens().like(made) if ragged else made


@pytest.fixture(scope="module")
def model(demo_files: Path) -> str:
    return str(demo_files / "demo_files/model")


@pytest.fixture(scope="module")
def workers(demo_files: Path, one_rank: None) -> tuple[Worker, Worker]:
    """A worker on the CPU and one on the far device, with the models of ``rm_ppo``."""
    files = demo_files / "demo_files"
    names = ("policy", "ref", "critic", "reward")
    settings = [
        *(f"models.{name}.path={files}/model" for name in names),
        f"prompts.files=[{files}/train.parquet]",
    ]
    plan = compile_graph("rm_ppo", settings, 1)
    made = []
    for device in (far.CPU, far.DEVICE):
        worker = Worker(mailbox={})
        worker.device = device.type
        with far.device():
            worker.setup(plan, "", "main", 0)
            worker.engine("sync", "policy", 0)
        made.append(worker)
    return made[0], made[1]


def run(worker: Worker, function: Function, parts: dict[str, Chunk], kinds: dict[str, str]) -> Any:
    """An op on a worker: what it records, and its columns; ``kinds`` are those that it reads and writes."""
    types = {name: ColumnType.parse(kind) for name, kind in kinds.items()}
    columns = {name: ColumnPlan(kind, kind.domain, NONE, "", name) for name, kind in types.items()}
    reduces = kinds.get("out") == "float32[prompts]" and "float32[samples]" in kinds.values()
    times = 2 if reduces else function.attributes.get("n", 1)
    domains = {
        "prompts": GraphDomain("prompts", "prompts", ""),
        "samples": GraphDomain("samples", "samples", "", "prompts", times),
        "segments": GraphDomain("segments", "segments", "", "samples", most=4),
    }
    made = {"functions": {"node": function}, "columns": columns, "domains": domains}
    plan = replace(worker.plan, **{name: {"train": value} for name, value in made.items()})
    given, worker.plan = worker.plan, plan
    versions = {**worker.engines.versions}
    if "serve" in function.handles.values():
        versions["policy"] = worker.engines.serve["policy"].version
    read = [parts[name] for name in dict.fromkeys(function.ins.values())]
    try:
        with far.device():
            out = worker.run("node", Scope("train", 0, range(ROWS), ROWS, versions=versions), *read)
    finally:
        worker.plan = given
    report, *columns = out if isinstance(out, tuple) else (out,)
    with far.device():
        return report.metrics, [part.near() for part in columns]


def types_of(ports: Iterable[Any]) -> dict[str, str]:
    """The types of ports, but for those of a mixture's routing."""
    return {port.name: str(port.type) for port in ports if not port.type.fixed}


def function_of(name: str, op: Op, loss: str = "") -> tuple[Function, dict[str, str]]:
    """How a worker calls an op with its defaults; and the types of all the columns that it reads."""
    kinds = types_of(op.inputs)
    hooks = {}
    if loss:
        declared = registry.load(LOSSES[loss], loss, Loss)
        kinds |= {name: kind for name, kind in types_of(declared.inputs).items() if name != "logprobs"}
        defaults = {key: field.default for key, field in declared.attributes.model_fields.items()}
        hooks = {"loss": Function(LOSSES[loss], defaults)}
    function = Function(
        target=OPS[name],
        attributes=ATTRIBUTES.get(name, {}),
        ins={kind: kind for kind in kinds},
        outs={name: name or "out" for name in types_of(op.outputs)},
        handles=dict(op.handles),
        model=MODELS.get(name, "policy") if op.engine else None,
        of="policy" if op.copies else None,
        hooks=hooks,
    )
    return function, kinds


def reads_numbers(op: Op) -> bool:
    """Whether the test can make its columns: no text that means something, or its tokenizer, no held rows."""
    text = any(str(port.type).startswith("text") for port in op.inputs)
    numbers = not text and "tokenizer" not in op.handles.values()
    return bool(op.inputs or op.engine) and numbers and not op.declared.holds


# the losses of an update have a test of their own; agents need a chat template, and episodes are trees
NOT_BY_CHANCE = ("update.policy", "rollout.agent", "rollout.harness", "segment.paths")
SHIPPED = {name: registry.load(target, name) for name, target in OPS.items()}
RUN = {name: op for name, op in SHIPPED.items() if reads_numbers(op) and name not in NOT_BY_CHANCE}


def compared(workers: tuple[Worker, Worker], name: str, loss: str = "") -> None:
    """Run an op on both workers."""
    op = SHIPPED[name]
    function, kinds = function_of(name, op, loss)
    parts = {key: pack(column(key, kind)) for key, kind in kinds.items()}
    written = {name or "out": kind for name, kind in types_of(op.outputs).items()}
    metrics, near = run(workers[0], function, parts, kinds | written)
    others, there = run(workers[1], function, on_device(parts), kinds | written)
    assert near or metrics or op.declared.updates, "there is something to compare"
    assert others.keys() == metrics.keys()
    for key, metric in metrics.items():
        assert others[key].value == pytest.approx(metric.value, rel=1e-3, abs=1e-4, nan_ok=True), key
    for one, other in zip(near, there, strict=True):
        if isinstance(one.values, list):
            assert one.values == other.values
        else:
            np.testing.assert_allclose(other.values, one.values, rtol=1e-3, atol=1e-4)
    if op.declared.updates:
        weights = [worker.engines.train[function.model].weights() for worker in workers]
        with far.device():
            assert_close(dict(weights[1]), dict(weights[0]))


def on_device(parts: dict[str, Chunk]) -> dict[str, Chunk]:
    """The same columns with what a train engine makes on the far device."""
    with far.device():
        return {
            name: Chunk(torch.from_numpy(part.values).to(far.DEVICE), part.offsets)
            if part.offsets is not None and part.values.dtype == np.float32 and not name.startswith("rollout")
            else part
            for name, part in parts.items()
        }


@pytest.mark.parametrize("name", RUN)
def test_an_op_has_the_numbers_of_the_cpu(workers: tuple[Worker, Worker], name: str) -> None:
    compared(workers, name)


# a ratio per token, none, one per sequence, a covariance over all tokens, and pairs
LOSSES_BY_DAY = ("ppo_clip", "sft", "gspo", "clip_cov", "preference")


@pytest.mark.parametrize("loss", rest_nightly(LOSSES, lambda loss: loss in LOSSES_BY_DAY))
def test_a_policy_update_has_the_numbers_of_the_cpu(workers: tuple[Worker, Worker], loss: str) -> None:
    compared(workers, "update.policy", loss)


def test_every_op_on_a_train_engine_was_run() -> None:
    ran = {*RUN, "update.policy"}
    assert {name for name, op in SHIPPED.items() if op.engine == "train"} <= ran
    assert {"rollout", "rollout.partial", "advantage.gae", "correction.reject"} <= ran


def assert_close(found: Any, wanted: Any) -> None:
    """Tensors, ``Ragged``, or mappings of tensors and numbers, of which ``found`` may be far."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert_close(found[name], value)
    elif isinstance(wanted, Ragged):
        assert_close(found.values, wanted.values)
    else:
        torch.testing.assert_close(far.to_near(found), wanted, **CLOSE)


@pytest.mark.usefixtures("one_rank")
def test_a_column_that_is_read_where_it_was_made_stays_on_its_device(model: str) -> None:
    with far.device() as seen:
        engine = FsdpEngine.of(model, optimizer=ADAM, device=str(far.DEVICE))
        columns = {"tokens": tokens(), "loss_mask": loss_mask()}
        scores = engine.logprobs(**columns)
        kept, store = Task("run", (), outputs=(ColumnRef("old_logprobs"),)), Store("")
        before = seen.host_bytes, seen.device_bytes
        assert not store.put(kept, [pack(scores)])
        (part,) = store.arguments(Task("run", (), (ColumnRef("old_logprobs"),)), ())
        old = unpack(part)
        assert (seen.host_bytes, seen.device_bytes) == before
        assert old.values.device == far.DEVICE

        def moved(old_logprobs: Ragged) -> int:
            start = seen.device_bytes
            given = columns | {"old_logprobs": old_logprobs}
            engine.update(given, objective, torch.arange(ROWS), ROWS)
            return seen.device_bytes - start

        nearby = old.to(far.CPU)
        assert moved(nearby) - moved(old) == 4 * len(old.values)
        (sent,) = store.put(Task("run", (), outputs=(ColumnRef("", STORE),)), [part])
        assert sent.values.tolist() == nearby.values.tolist()  # another worker gets it from the host


def objective(batch: dict[str, Any], totals: Totals) -> tuple[torch.Tensor, dict[str, Any]]:
    mask = batch["loss_mask"].values
    if "new_values" in batch:
        error = (batch["new_values"].values - 1).square()[mask].sum()
        return error / totals.tokens, {"error": (error, mask.sum())}
    weights = batch["tokens"].values.float() / 24
    bonus = 0.1 * batch["entropy"].values[mask].sum()
    gain = (batch["logprobs"].values * weights).sum()
    most = Metric("max", "tokens", {"most": batch["entropy"].values.max()})
    return -(gain + bonus) / totals.tokens, {"most": most}


ENGINES: dict[str, dict[str, Any]] = {
    "lm": {},
    "packed": {"micro_tokens": 1000},
    "micro-batches": {"micro_tokens": 16, "packing": False},
    "recompute": {"recompute": True, "packing": False},
    "lora": {"lora": LORA},
    "lora recomputed": {"lora": {**LORA, "targets": "all-linear"}, "recompute": True},
    "value": {"head": "value", "seed": 3},
    "frozen": {"frozen": True, "optimizer": None},
    "frozen value": {"frozen": True, "optimizer": None, "head": "value", "seed": 3},
}


def lived(engine: FsdpEngine, path: Path) -> dict[str, Any]:
    """Scores, metrics and weights of an engine that trains, saves, loads and exports."""
    columns = {"tokens": tokens(), "loss_mask": loss_mask()}
    trains = engine.optimizer is not None
    found: dict[str, Any] = {}

    def scored(when: str) -> None:
        if engine.head == "value":
            found[f"values {when}"] = engine.values(**columns)
            return
        found[f"logprobs {when}"] = engine.logprobs(**columns, temperature=0.7)
        if engine.lora:
            beside = FsdpEngine.of(engine.path, frozen=True, base=engine, device=str(engine.device))
            found[f"unadapted {when}"] = beside.logprobs(**columns, temperature=0.7)
        found[f"logprobs too {when}"], found[f"squares {when}"] = engine.squares(**columns)

    scored("before")
    if trains:
        entropy = engine.head == "lm"
        rows = torch.arange(ROWS)
        found["metrics"] = engine.update(columns, objective, rows, ROWS, 2, epochs=2, entropy=entropy)
        scored("after")
    found["weights"] = {name: tensor.cpu() for name, tensor in engine.weights()}
    engine.save(str(path / "saved"))
    if trains:
        engine.update(columns, objective, torch.arange(ROWS), ROWS)
    engine.load(str(path / "saved"))
    assert_close({name: tensor.cpu() for name, tensor in engine.weights()}, found["weights"])
    if trains:
        engine.export(str(path / "exported"))
        assert_close(
            load_file(path / "exported/model.safetensors"),
            {name: found["weights"][name] for name in load_file(path / "exported/model.safetensors")},
        )
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", rest_nightly(ENGINES, lambda name: name not in ("packed", "lora", "frozen")))
def test_a_train_engine_has_the_numbers_of_the_cpu(name: str, model: str, tmp_path: Path) -> None:
    found = []
    for device in (far.DEVICE, far.CPU):
        with far.device():
            options = {"optimizer": ADAM, "micro_tokens": 64, "device": str(device), **ENGINES[name]}
            engine = FsdpEngine.of(model, **options)
            assert {p.device for p in engine.model.parameters()} == {device}
            found.append(lived(engine, tmp_path / device.type))
    assert_close(*found)


@pytest.mark.usefixtures("one_rank")
def test_a_mixture_of_experts_has_the_numbers_of_the_cpu(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "vocab_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "num_hidden_layers": 2}
    config = Qwen3MoeConfig(**sizes, **heads, num_experts=4, num_experts_per_tok=2, initializer_range=0.2)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "model")
    columns, found = {"tokens": tokens(), "loss_mask": loss_mask()}, []
    for device in (far.DEVICE, far.CPU):
        with far.device():
            engine = FsdpEngine.of(
                str(tmp_path / "model"), optimizer=ADAM, device=str(device), micro_tokens=64
            )
            scores = engine.logprobs(**columns)
            metrics = engine.update(columns, objective, torch.arange(ROWS), ROWS, 2, entropy=True)
            weights = {name: tensor.cpu() for name, tensor in engine.weights()}
        found.append({"scores": scores, "metrics": metrics, "weights": weights})
    assert_close(*found)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("packing", [False, True])
def test_the_host_does_not_wait_for_each_micro_batch(model: str, packing: bool) -> None:
    columns = {"tokens": tokens(), "loss_mask": loss_mask()}
    scores = column("old_logprobs", "float32[samples, tokens]")
    given = {**columns, **dict.fromkeys(("rollout_logprobs", "ref_logprobs", "advantages"), scores)}
    minimised = policy_objective(Loss(reinforce, {}, {}), "token-mean", 0.1, "k3", 0.1)

    def waits(micro_tokens: int) -> list[int]:
        options = {"device": str(far.DEVICE), "micro_tokens": micro_tokens, "packing": packing}
        with far.device() as seen:
            engine, ends = FsdpEngine.of(model, optimizer=ADAM, **options), [len(seen.waits)]
            for call in (
                lambda: engine.logprobs(**columns),
                lambda: engine.squares(**columns),
                lambda: engine.update(given, minimised, torch.arange(ROWS), ROWS, minibatches=2),
            ):
                call()
                # transformers looks at the positions of each pass, before any of its layers
                ends.append(len([wait for wait in seen.waits if packing or "scalar" not in wait]))
        return [end - start for start, end in pairwise(ends)]

    assert waits(30) == waits(10000)


@pytest.mark.usefixtures("one_rank")
def test_memory_that_a_server_may_share_is_taken_outside_of_passes(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = []

    @contextmanager
    def entered(device: torch.device) -> Iterator[None]:
        inside.append(device)
        yield
        inside.pop()

    monkeypatch.setattr(engines, "expandable_segments", entered)
    engine = FsdpEngine.of(model, optimizer=ADAM)
    passes = []

    def watched(batch: dict[str, Any], totals: Totals) -> tuple[torch.Tensor, dict[str, Any]]:
        passes.append([*inside])
        return objective(batch, totals)

    columns = {"tokens": tokens(), "loss_mask": loss_mask()}
    engine.update(columns, watched, torch.arange(ROWS), ROWS)
    engine.model.base_model.register_forward_pre_hook(lambda *_: passes.append([*inside]))
    engine.logprobs(**columns)
    assert passes and all(found == [far.CPU] for found in passes)
    assert [inside for _ in engine.weights() if inside] == []


@pytest.mark.usefixtures("one_rank")
def test_checkpoints_take_the_same_host_memory_again(model: str, tmp_path: Path) -> None:
    columns = {"tokens": tokens(), "loss_mask": loss_mask()}
    with far.device():
        engine = FsdpEngine.of(model, optimizer=ADAM, device=str(far.DEVICE))
        places, weights = [], []
        for name in ("first", "second"):
            engine.update(columns, objective, torch.arange(ROWS), ROWS)
            weights.append({name: tensor.cpu() for name, tensor in engine.weights()})
            engine.begin_save(str(tmp_path / name))
            places.append({name: copy.data_ptr() for name, copy in engine.saves._copies.items()})
        engine.update(columns, objective, torch.arange(ROWS), ROWS)
        engine.finish_save()
        assert places[0] == places[1] and len(places[0]) == 3 * len(weights[0])
        for name, saved in zip(("first", "second"), weights, strict=True):
            engine.load(str(tmp_path / name))
            assert all(torch.equal(tensor.cpu(), saved[name]) for name, tensor in engine.weights())


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("mix", [1.0, 0.5])
def test_weights_are_copied_on_the_device(model: str, mix: float) -> None:
    found = []
    for device in (far.DEVICE, far.CPU):
        with far.device() as seen:
            trained, frozen = (
                FsdpEngine.of(model, optimizer=ADAM, frozen=frozen, device=str(device))
                for frozen in (False, True)
            )
            trained.update(
                {"tokens": tokens(), "loss_mask": loss_mask()}, objective, torch.arange(ROWS), ROWS
            )
            before = seen.host_bytes
            frozen.copy(trained, mix)
            assert seen.host_bytes == before
            found.append({name: tensor.cpu() for name, tensor in frozen.weights()})
    assert_close(*found)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("dtype", "grouped"), [("float32", {False}), ("bfloat16", {False, True})])
def test_float32_attention_has_no_grouped_heads(model: str, dtype: str, grouped: set[bool]) -> None:
    """No fused kernel of CUDA takes them; in bfloat16 flash attention does, where there is no mask."""
    columns = {"tokens": tokens(), "loss_mask": loss_mask()}
    with far.device() as seen:
        for packing in (False, True):
            engine = FsdpEngine.of(
                model,
                frozen=True,
                device=str(far.DEVICE),
                dtype=dtype,
                packing=packing,
                micro_tokens=1000,
            )
            engine.logprobs(**columns)
        serving = TransformersEngine(model, str(far.DEVICE), dtype)
        serving.load_weights(engine.weights(), 1)
        serving.generate([Request([3, 4, 5], [0])], SAMPLINGS["greedy"])
    assert {call.dtype for call in seen.attention} == {getattr(torch, dtype)}
    assert {call.masked for call in seen.attention} == {False, True}
    assert {call.grouped for call in seen.attention} == grouped
    wide = [call for call in seen.attention if not call.grouped]
    assert all(call.query[1] == call.key[1] for call in wide)
    assert all(call.causal for call in seen.attention if not call.masked and call.query[2] > 1)


SAMPLINGS = {
    "greedy": Sampling(12, temperature=0),
    "plain": Sampling(12, temperature=1.3),
    "top_p": Sampling(12, top_p=0.7),
    "top_k": Sampling(12, top_k=5),
    "both": Sampling(12, temperature=0.8, top_p=0.9, top_k=7),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", rest_nightly(SAMPLINGS, lambda name: name in ("greedy", "both")))
def test_the_embedded_engine_draws_the_tokens_of_the_cpu(model: str, name: str) -> None:
    requests = [Request([3 + k] * (1 + k), [10 * k, 10 * k + 1]) for k in range(4)]
    found = []
    for device in (far.DEVICE, far.CPU):
        with far.device():
            source = FsdpEngine.of(model, frozen=True, device=str(device))
            engine = TransformersEngine(model, device=str(device), max_rows=5)
            engine.load_weights(source.weights(), 1)
            rows = engine.generate(requests, SAMPLINGS[name])
            found.append([list(generation.tokens) for row in rows for generation in row])
    assert found[0] == found[1]
    assert len({tuple(row) for row in found[0]}) > 3
