"""Weights that travel from one device to a pool: this file as a script is the three processes of it."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from rlgraph.runtime.meeting import ranks
from rlgraph.runtime.weights import Broadcast, Files, Handover, Named, buckets

SENDER, RANKS = 1, 3


def tensors() -> list[Named]:
    """Of two dtypes, one of them empty and one larger than a bucket of 64 bytes."""
    sizes = {"a": (2, 3), "b": (5,), "large": (7, 9), "none": (0, 4), "c": ()}
    made = [(name, torch.arange(torch.Size(size).numel()) / 3) for name, size in sizes.items()]
    shaped = [(name, flat.reshape(sizes[name])) for name, flat in made]
    return [*shaped[:3], ("counts", torch.arange(4)), *shaped[3:]]


def main(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    group = dist.new_group([SENDER, 0, 2], timeout=timedelta(seconds=60))
    links = (
        Broadcast(group, SENDER, "cpu", "bfloat16"),
        Files(group, SENDER, str(folder / "weights"), "bfloat16"),
    )
    for number in range(4):  # each twice: nothing of the first is left over in the second
        sent = [(name, tensor + number) for name, tensor in tensors()]
        if rank == SENDER:
            links[number % 2].send(sent, bucket_bytes=64)
        else:
            received = {name: tensor.clone() for name, tensor in links[number % 2].receive()}
            assert received.keys() == dict(sent).keys()
            for name, expected in sent:
                wanted = expected.bfloat16() if expected.is_floating_point() else expected
                assert received[name].dtype == wanted.dtype and received[name].equal(wanted), name
    dist.destroy_process_group()


def test_all_of_a_pool_get_what_one_device_sends(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [*(tmp_path / "weights").iterdir()]


def test_what_is_handed_over_in_one_process_is_the_same_and_is_given_once() -> None:
    desk, given_ = Handover(), tensors()
    desk.send(iter(given_))
    assert all(a is b and t is u for (a, t), (b, u) in zip(desk.receive(), given_, strict=True))
    assert list(desk.receive()) == []


@settings(deadline=None, max_examples=60, derandomize=True)
@given(sizes=st.lists(st.integers(0, 30), max_size=12), limit=st.integers(1, 100), data=st.data())
def test_buckets_are_bounded_in_order_and_of_one_dtype(
    sizes: list[int], limit: int, data: st.DataObject
) -> None:
    kinds = [data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64])) for _ in sizes]
    named = [(str(n), torch.zeros(size, dtype=kinds[n])) for n, size in enumerate(sizes)]
    found = list(buckets(iter(named), limit))
    assert [name for bucket in found for name, _ in bucket] == [name for name, _ in named]
    for bucket in found:
        assert len({tensor.dtype for _, tensor in bucket}) == 1
        assert len(bucket) == 1 or sum(tensor.nbytes for _, tensor in bucket) <= limit


def test_ranks_count_through_the_pools() -> None:
    assert ranks({"gen": 1, "train": 2, "judge": 1}) == {"gen": [0], "train": [1, 2], "judge": [3]}


if __name__ == "__main__":
    # one import, then a fork a rank
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=main, args=(rank, Path(sys.argv[1]))) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in processes))
