"""Process groups on CUDA: what is on the host travels over gloo. torch's fake backend stands in for NCCL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: F401  it registers the backend

from rlgraph.compiler import compile_graph
from rlgraph.runtime.worker import process_groups
from rlgraph.runtime.worker.process_groups import Groups, meet


@pytest.fixture
def groups(tmp_path: Path, demo_files: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Groups]:
    """Those of a plan with one device, as a worker on CUDA makes them."""
    monkeypatch.setitem(
        process_groups.BACKENDS, "cuda", process_groups.BACKENDS["cuda"].replace("nccl", "fake")
    )
    files = demo_files / "demo_files"
    settings = [f"models.policy.path={files}/model", f"prompts.files=[{files}/train.parquet]"]
    plan = compile_graph("gpg", settings, 1)
    yield meet(plan, ("main", 0), f"file://{tmp_path}/meeting", "cuda", None)
    dist.destroy_process_group()


def test_objects_and_barriers_travel_over_gloo_and_tensors_of_the_device_do_not(
    groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = groups.mesh.get_group()
    backends = {device.type: group._get_backend(device).name() for device in group._device_types}
    assert backends == {"cpu": "gloo", "cuda": "fake"}
    assert groups.mesh.device_type == "cuda"
    chosen = []
    barrier = dist.ProcessGroup.barrier

    def recorded(self: dist.ProcessGroup, opts: dist.BarrierOptions) -> dist.Work:
        chosen.append(opts.device)
        return barrier(self, opts=opts)

    monkeypatch.setattr(torch._C, "_get_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(dist.ProcessGroup, "barrier", recorded)
    dist.barrier(group)  # without a warning
    assert chosen == [torch.device("cpu")]
    found = [None]
    dist.all_gather_object(found, {"rows": 3}, group=group)
    assert found == [{"rows": 3}], "the fake backend would have left it None"


def test_a_worker_may_wait_for_longer_than_a_step_may_be_silent(groups: Groups) -> None:
    group = groups.mesh.get_group()
    assert group._get_backend(torch.device("cpu")).options._timeout == process_groups.FOREVER
