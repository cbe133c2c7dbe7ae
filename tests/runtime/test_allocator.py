"""Memory that tensors free stays with the process; on CUDA its segments grow while a model runs."""

import os
import subprocess
import sys

import pytest
import torch

from rlgraph.runtime.engines.memory.allocator import CHOSEN, expandable_segments, shareable

SCRIPT = """
import resource

import torch

from rlgraph.runtime.engines.memory.allocator import keep_freed_memory


def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(12 << 20)  # 48 MiB: more than glibc keeps of its own accord
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


given_back = faults()
taken = keep_freed_memory()
faults()
print(int(taken), given_back, faults())
"""


@pytest.mark.slow
def test_freed_memory_is_used_again_without_page_faults():
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env=environment
    )
    taken, before, after = map(int, done.stdout.split())
    if not taken:
        pytest.skip("not glibc")
    assert after * 10 < before


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch's allocator is told."""
    told: list[str] = []
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", told.append)
    for name in CHOSEN:
        monkeypatch.delenv(name, raising=False)
    return told


def test_segments_grow_until_a_pass_is_over_or_has_failed(said: list[str]) -> None:
    def fail() -> None:
        with expandable_segments(torch.device("cuda", 0)):
            assert said == ["expandable_segments:True"]
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert said == ["expandable_segments:True", "expandable_segments:False"]


@pytest.mark.parametrize("chosen", CHOSEN)
def test_what_a_user_has_settled_stays(chosen: str, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(chosen, "max_split_size_mb:512")
    with expandable_segments(torch.device("cuda")):
        pass
    assert said == []


def test_what_a_server_shares_lies_in_no_segment_that_grows(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with shareable(torch.device("cuda")):
        assert said == []
    monkeypatch.setenv(CHOSEN[0], "max_split_size_mb:512,expandable_segments:True")
    with shareable(torch.device("cuda")):
        assert said == ["expandable_segments:False"]
    assert said == ["expandable_segments:False", "expandable_segments:True"]
    with shareable(torch.device("cpu")):
        assert len(said) == 2


def test_a_cpu_has_no_segments(said: list[str]) -> None:
    with expandable_segments(torch.device("cpu")):
        pass
    assert said == []
