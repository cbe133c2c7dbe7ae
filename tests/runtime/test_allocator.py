"""Memory that tensors free stays with the process."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import resource

import torch

from rlgraph.runtime.allocator import keep_freed_memory


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


def test_freed_memory_is_used_again_without_page_faults():
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env=environment
    )
    taken, before, after = map(int, done.stdout.split())
    if not taken:
        pytest.skip("not glibc")
    assert after * 10 < before
