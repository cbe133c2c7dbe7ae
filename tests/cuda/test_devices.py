"""What a worker does for each op of a train engine: columns are on the host, the model is on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from rows import ROWS, batch

from rlgraph.compiler import compile_graph
from rlgraph.ir.plan import Plan
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.runtime.columns.chunk import Chunk, pack
from rlgraph.runtime.messages.report import Scope
from rlgraph.runtime.worker.worker import Worker

pytestmark = pytest.mark.usefixtures("one_rank")

NODES = ("ref_logprobs", "old_logprobs", "values", "rewards", "update_critic", "update_policy")
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture
def plan(model: str) -> Plan:
    """PPO from a reward model: four models, of which two train, and a loss as a hook."""
    paths = [f"models.{name}.path={model}" for name in ("policy", "critic", "reward")]
    dtypes = [f"models.{name}.train.dtype=float32" for name in ("policy", "critic", "reward", "ref")]
    serve = ["models.policy.serve.engine=transformers", "models.policy.serve.dtype=float32"]
    return compile_graph("rm_ppo", [*paths, *dtypes, *serve, "prompts.files=[none.jsonl]"], devices=1)


def worker_on(device: torch.device, plan: Plan) -> Worker:
    """A worker with all engines of a plan on a device."""
    made = Worker(mailbox={})
    made.device = device.type
    made.setup(plan, "", "main", 0)
    made.engine("sync", "policy", 0)
    return made


def column(name: str, kind: str) -> Any:
    """Something that an op can read under this name."""
    given = batch()
    if name in given:
        return given[name]
    draw = torch.Generator().manual_seed(sum(map(ord, name)))
    count = len(given["tokens"].values) if "," in kind else ROWS
    made = -torch.rand(count, generator=draw)
    return given["tokens"].like(made) if "," in kind else made


def run(worker: Worker, node: str) -> tuple[dict[str, Any], list[Chunk]]:
    """A node on a worker: its metrics, and the columns that it writes."""
    function, columns = worker.plan.functions["train"][node], worker.plan.columns["train"]
    kinds = {name: columns[name].type for name in dict.fromkeys(function.ins.values())}
    parts = [pack(column(name, kind)) for name, kind in kinds.items()]
    versions = {**worker.engines.versions}
    out = worker.run(node, Scope("train", 0, np.arange(ROWS), ROWS, versions=versions), *parts)
    report, *written = out if isinstance(out, tuple) else (out,)
    return {name: metric.value for name, metric in report.metrics.items()}, written


def test_every_op_of_a_train_engine_runs_on_the_device(device: torch.device, plan: Plan) -> None:
    there, here = worker_on(device, plan), worker_on(torch.device("cpu"), plan)
    for node in NODES:
        (metrics, columns), (wanted, expected) = run(there, node), run(here, node)
        assert metrics.keys() == wanted.keys(), node
        for name in wanted:
            assert metrics[name] == pytest.approx(wanted[name], rel=1e-3, abs=1e-5, nan_ok=True), (node, name)
        for got, want in zip(columns, expected, strict=True):
            np.testing.assert_allclose(got.near().values, want.values, **CLOSE, err_msg=node)
    for name in ("policy", "critic"):
        for (_, got), (_, want) in zip(
            there.engines.train[name].weights(), here.engines.train[name].weights(), strict=True
        ):
            assert got.device.type == device.type
            torch.testing.assert_close(got.cpu(), want, **CLOSE)


def test_it_generates_on_the_device(device: torch.device, plan: Plan) -> None:
    from rlgraph.ops import Request, Sampling

    worker = worker_on(device, plan)
    (many,) = worker.engines.serve["policy"].generate([Request([5, 6, 7], [0, 1])], Sampling(4))
    assert [len(one.logprobs) for one in many] == [len(one.tokens) for one in many]
    assert {p.device.type for p in worker.engines.serve["policy"].model.parameters()} == {device.type}


def test_ragged_columns_go_to_the_device_and_back(device: torch.device) -> None:
    there = batch()["tokens"].to(device)
    assert (there.values.device.type, there.offsets.device.type) == (device.type, device.type)
    assert isinstance(there, Ragged) and there.to("cpu").tolist() == batch()["tokens"].tolist()
