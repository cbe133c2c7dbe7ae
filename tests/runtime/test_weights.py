"""Weights that travel from one device to a pool: this file as a script is the three processes of it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import LIMIT, forked, launch

from rlgraph.costs import limits
from rlgraph.costs.limits import buckets
from rlgraph.errors import RunError
from rlgraph.runtime.engines.weights.delta import REST, Delta
from rlgraph.runtime.engines.weights.transfer import Named, Ranks, Transport, Weights, cast
from rlgraph.runtime.engines.weights.transports import TRANSPORTS, Disk, Handover
from rlgraph.runtime.worker.process_groups import ranks

SENDER, RANKS = 1, 3
WIDE = "mlp.gate.e_score_correction_bias"


def tensors() -> list[Named]:
    """Of two dtypes, one of them empty, one larger than a bucket of 64 bytes, and one that stays wide."""
    sizes = {"a": (2, 3), "b": (5,), "large": (7, 9), "none": (0, 4), "c": (), WIDE: (3,)}
    made = [(name, torch.arange(torch.Size(size).numel()) / 3) for name, size in sizes.items()]
    shaped = [(name, flat.reshape(sizes[name])) for name, flat in made]
    return [*shaped[:3], ("counts", torch.arange(4)), *shaped[3:]]


def main(rank: int, folder: Path) -> None:
    limits.BUCKET = 64
    group = dist.new_group([SENDER, 0, 2], timeout=timedelta(seconds=LIMIT))
    peers = Ranks(group, SENDER, "cpu")
    links = [TRANSPORTS[path](peers, str(folder / "weights")) for path in ("broadcast", "disk")]
    for number in range(4):  # each twice: nothing of the first is left over in the second
        sent = [(name, tensor + number) for name, tensor in tensors()]
        if rank == SENDER:
            links[number % 2].send(Weights(number, cast(sent, torch.bfloat16)))
        else:
            received = {name: tensor.clone() for name, tensor in links[number % 2].receive(number).tensors}
            assert received.keys() == dict(sent).keys()
            for name, expected in sent:
                rounded = expected.is_floating_point() and name != WIDE
                wanted = expected.bfloat16() if rounded else expected
                assert received[name].dtype == wanted.dtype and received[name].equal(wanted), name
    for path in ("broadcast", "disk"):  # what changed: a number of each weight, then none, then nearly all
        link, sent = (
            Delta(TRANSPORTS[path](peers, str(folder / "weights"))),
            [*cast(tensors(), torch.bfloat16)],
        )
        shares = []
        for version, changed in enumerate((0, 1, 0, 99)):
            sent = [(name, stepped(tensor, changed)) for name, tensor in sent]
            if rank == SENDER:
                link.send(Weights(version, sent))
                shares.append(link.sent_bytes / link.total_bytes)
            else:
                came = {name: tensor.clone() for name, tensor in link.receive(version).tensors}
                assert all(came[name].equal(tensor) for name, tensor in sent)
        assert rank != SENDER or shares[0] == shares[3] == 1 > shares[1] > shares[2]
    for link in links:  # of another version than was promised
        if rank == SENDER:
            link.send(Weights(7, []))
        else:
            refused(link, 8)
        dist.barrier(group)


def stepped(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """A tensor whose first numbers are others."""
    flat = tensor.flatten().clone()
    flat[:count] += 1
    return flat.view(tensor.shape)


def refused(link: Transport, version: int) -> None:
    with pytest.raises(RunError, match=f"version 7 came where version {version} was promised"):
        list(link.receive(version).tensors)
    if isinstance(link, Disk):
        link.peers.wait()  # it has not read the files, and the sender waits for that


def test_all_of_a_pool_get_what_one_device_sends(tmp_path: Path) -> None:
    launch(__file__, tmp_path)
    assert not [*(tmp_path / "weights").iterdir()]


def test_what_is_handed_over_in_one_process_is_the_same_and_is_given_once() -> None:
    handover, given_ = Handover(), tensors()
    handover.send(Weights(7, iter(given_)))
    received = handover.receive(7).tensors
    assert all(a is b and t is u for (a, t), (b, u) in zip(received, given_, strict=True))
    with pytest.raises(AssertionError, match="nothing was sent"):
        handover.receive(7)
    handover.send(Weights(7, []))
    refused(handover, 8)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(sizes=st.lists(st.integers(0, 30), max_size=12), limit=st.integers(1, 100), data=st.data())
def test_buckets_are_bounded_in_order_and_of_one_dtype(
    sizes: list[int], limit: int, data: st.DataObject
) -> None:
    kinds = [data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64])) for _ in sizes]
    named = [(str(n), torch.zeros(size, dtype=kinds[n])) for n, size in enumerate(sizes)]
    found = list(buckets(iter(named), lambda one: one[1].nbytes, lambda one: one[1].dtype, limit))
    assert [name for bucket in found for name, _ in bucket] == [name for name, _ in named]
    for bucket in found:
        assert len({tensor.dtype for _, tensor in bucket}) == 1
        assert len(bucket) == 1 or sum(tensor.nbytes for _, tensor in bucket) <= limit


@settings(deadline=None, max_examples=60, derandomize=True)
@given(data=st.data(), seed=st.integers(0, 99))
def test_changes_make_of_what_was_sent_what_is_there_now(data: st.DataObject, seed: int) -> None:
    way, made = Handover(), torch.Generator().manual_seed(seed)
    ends = Delta(way), Delta(way)
    dtypes = data.draw(st.lists(st.sampled_from([torch.float32, torch.bfloat16, torch.int64]), max_size=4))
    now = [(str(n), torch.randn(n, 7, generator=made).to(dtype)) for n, dtype in enumerate(dtypes)]
    for version in range(3):
        ends[0].send(Weights(version, now))
        came = [(name, tensor.clone()) for name, tensor in ends[1].receive(version).tensors]
        assert [name for name, _ in came] == [name for name, _ in now]
        for (_, tensor), (_, wanted) in zip(came, now, strict=True):
            assert tensor.dtype == wanted.dtype and tensor.equal(wanted)
        share = data.draw(st.sampled_from([0.0, 0.1, 1.0]))
        hit = [torch.rand(tensor.shape, generator=made) < share for _, tensor in now]
        now = [(name, torch.where(one, 3, t)) for (name, t), one in zip(now, hit, strict=True)]
        now = [(name, t.to(dtype)) for (name, t), dtype in zip(now, dtypes, strict=True)]


def test_few_changes_are_few_bytes_and_other_weights_than_thought_are_an_error() -> None:
    way = Handover()
    ends, weight = (Delta(way), Delta(way)), torch.zeros(10_000, dtype=torch.bfloat16)
    for version in range(2):
        weight[:100] = version + 1
        ends[0].send(Weights(version, [("a", weight)]))
        list(ends[1].receive(version).tensors)
    assert ends[0].metrics()["sync/sent"].value == pytest.approx(0.0304, abs=0.0001)
    weight[0] = 9
    ends[1].sent_bits["a"][7] = 9  # what it keeps is not what it was sent
    ends[0].send(Weights(2, [("a", weight)]))
    with pytest.raises(RunError, match="the changes of weight a do not make"):
        list(ends[1].receive(2).tensors)


def test_where_most_has_changed_the_next_versions_go_whole_without_a_look() -> None:
    way, weight = Handover(), torch.zeros(10_000, dtype=torch.bfloat16)
    ends, shares, kept = (Delta(way), Delta(way)), [], []
    for version in range(REST + 5):
        weight[: 9_000 if version == 2 else 100] += 1
        ends[0].send(Weights(version, [("a", weight)]))
        ((_, came),) = ends[1].receive(version).tensors
        assert came.equal(weight)
        shares.append(ends[0].metrics()["sync/sent"].value < 1)
        kept.append([bool(end.sent_bits) for end in ends])
    assert shares == [False, True, *[False] * (REST + 2), True]
    assert kept == [[True] * 2] * 3 + [[False] * 2] * REST + [[True] * 2] * 2


def test_ranks_count_through_the_pools() -> None:
    assert ranks({"gen": 1, "train": 2, "judge": 1}) == {"gen": [0], "train": [1, 2], "judge": [3]}


if __name__ == "__main__":
    forked(main, RANKS)
