"""Several ranks of a test, each in a process of its own, and the process group that ranks meet in.

Processes are forked from one that has done the imports, once for all tests of a session.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

LIMIT = 400  # seconds that only what hangs takes, also where machines are slow and shared
IMPORTS = [
    "rlgraph.runtime.run",
    "rlgraph.runtime.worker.worker",
    "rlgraph.runtime.cluster.cluster",
    "transformers.models.qwen2.modeling_qwen2",
    "rlgraph.runtime.engines.fsdp.engine",
    "rlgraph.runtime.engines.transformers.engine",
    "peft",
    "pyarrow.parquet",
    "tensorboardX",
]


def imported() -> ForkServerContext:
    """What starts processes that have done the imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTS)
    return context


@contextmanager
def process_group(folder: Path, rank: int = 0, ranks: int = 1) -> Iterator[None]:
    """A group over gloo of the ranks that name the same folder: of this process alone, unless given."""
    store, limit = dist.FileStore(str(folder / "store"), ranks), timedelta(seconds=LIMIT)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, store=store, timeout=limit)
    yield
    dist.destroy_process_group()


def cases_asked(request: pytest.FixtureRequest, name: str = "case") -> list[str]:
    """The values of a parameter in the tests of a file that are to run."""
    own = (getattr(item, "callspec", None) for item in request.session.items if item.path == request.path)
    return sorted({spec.params[name] for spec in own if spec and name in spec.params})


def at_night(cases: Iterable[tuple[str, ...]], day: Collection[str]) -> list[Any]:
    """Parameters of tests, of which those without a case of the day are left to the night."""
    marks = {True: [], False: [pytest.mark.nightly]}
    return [pytest.param(*case, marks=marks[bool({*case} & {*day})]) for case in cases]


def launch(script: str, root: Path, *more: str) -> None:
    """Run a file of tests as a script that forks ranks, each of them on one thread."""
    process = imported().Process(target=_run, args=([script, str(root), *more], dict(os.environ)))
    process.start()
    try:
        process.join(LIMIT)
    finally:
        process.kill()
        process.join()
    assert process.exitcode == 0, f"{script} failed as a script, or took {LIMIT} seconds"


def _run(arguments: list[str], environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


def forked(main: Callable[..., None], ranks: int) -> NoReturn:
    """Run ``main(rank, root, *more)`` on every rank in a process group, and exit with the worst exit code.

    The root and more are the script's arguments. The imports are done: it is a fork per rank, from a
    script that has started nothing yet.
    """
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_in_group, args=(main, rank, ranks)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in processes))


def _in_group(main: Callable[..., None], rank: int, ranks: int) -> None:
    root, more = Path(sys.argv[1]), sys.argv[2:]
    with process_group(root, rank, ranks):
        main(rank, root, *more)
        dist.barrier()
    os._exit(0)  # torch's threads now and then abort a process that is torn down
