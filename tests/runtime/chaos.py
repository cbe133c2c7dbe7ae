"""Kill a run's processes at random moments, resume it, and hold what comes out against an undisturbed twin.

    PYTHONPATH=tests/helpers python tests/runtime/chaos.py --kills 500 --chains 2 [--streamed|--served] DIR

A chain is a run that is killed several times, and then left to end. Moments are lines that the run prints,
and a random while after them; what is killed is the driver, one of the workers, a process that ops run in,
Ray's raylet or control store, or all at once. After the chain, weights, metrics and recorded columns of every
iteration must equal the twin's to the bit: a prompt that is lost or repeated would be in other columns. A
process or shared memory that is still there LEFT_S after the end of its driver is a leak. The table says all
that by moment and process; the script ends with 1 where anything differs.

A run that streams is no twin of another: of it each prompt must have been used once, in one iteration, and no
row may be older than it promises. It learns to write ones, and what its last evaluation says is held against
runs that nobody disturbed, each with a seed of its own: the means of both may differ by no more than chance
lets them (three standard errors). One that is served (its Python has SGLang, PYTHONPATH also
runtime/engines/sglang/cpu) streams from two servers, and processes of these are killed too: the run goes on.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ran import holders, metrics, same_weights
from test_stream import check, used

from demo_files import make_demo_files

HERE = Path(__file__).parent
SETTINGS = ("schedule={iterations: 8, save_every: 2, record_every: 1}", "eval.every=4", "prompts.batch=4")
MOMENTS = {
    "start": r"starting workers",
    "load": r"loading models",
    "iterate": r"after 0 iterations|resumed after|iteration 1/|train sample 1 ",
    "checkpoint": r"saving a checkpoint",
    "evaluate": r"after 4 iterations",
    "export": r"writing the models",
}
STREAMED_MOMENTS = ("start", "load", "iterate", "iterate", "iterate", "checkpoint", "export")
PROCESSES = ("driver", "worker", "op", "raylet", "gcs_server", "all")
SERVER = "server"  # any process of one; where there are servers, killed as often as all others together
CHAIN = 4  # kills of a run
WITHIN_S = 1.0  # after a moment
NONE = "none"
SHARED = Path("/dev/shm")
LEFT_S, LIMIT_S = 20, 400


@dataclass
class Counts:
    """What came of the kills, by (moment, process), and of the chains."""

    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    resumed: Counter[tuple[str, str]] = field(default_factory=Counter)
    leaked: Counter[tuple[str, str]] = field(default_factory=Counter)
    chains: int = 0
    equal: int = 0
    learned: list[float] = field(default_factory=list)  # of each chain, what its last evaluation says
    undisturbed: list[float] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)


STREAMED_ITERATIONS, STREAMED_S = 24, 8.0  # of a run; after a moment within it
STREAMED = (
    f"schedule={{iterations: {STREAMED_ITERATIONS}, save_every: 2, buffer: {{staleness: 2}}}}",
    "models.policy.optimizer.lr=1e-3",
    "rewards.seconds=0.6",
)
SERVED = ("models.policy.serve.engine=sglang", "pools.gen.devices=2", "rewards.seconds=3")
UNDISTURBED, ERRORS = 8, 3.0  # runs; standard errors by which means may differ


def is_served(run_dir: Path) -> bool:
    return run_dir.parent.name == "served"


def is_streamed(run_dir: Path) -> bool:
    return run_dir.parent.name == "streamed" or is_served(run_dir)


def command(run_dir: Path) -> list[str]:
    go_on = ["--resume"] if (run_dir / "plan.json").exists() else []
    graph, settings = ("ones.yaml", SETTINGS)
    if is_streamed(run_dir):
        own = f"rollout_weights.note={run_dir}.jsonl", f"seed={run_dir.name.rpartition('-')[2]}"
        graph, settings = "learned.yaml", (*STREAMED, *(SERVED if is_served(run_dir) else ()), *own)
    devices = ["--devices", "3" if is_served(run_dir) else "2"]
    run = [sys.executable, "-u", "-m", "rlgraph", "run", str(HERE / graph), *settings, *devices]
    return [*run, "--run-dir", str(run_dir), *go_on]


def as_promised(run_dir: Path) -> bool:
    """Return whether a run that streamed has used each prompt once, and none that was too old."""
    try:
        check(used(str(run_dir)), staleness=2)
    except AssertionError:
        return False
    return len(used(str(run_dir))) == STREAMED_ITERATIONS


def learned(run_dir: Path) -> float:
    """Return what the last evaluation of a run says."""
    return float(metrics(str(run_dir))[-1]["eval/accuracy"])


def undisturbed(run_dir: Path, counts: Counts) -> None:
    """Let a run that streams be, and note what it learned."""
    subprocess.run(command(run_dir), check=True, stdout=subprocess.DEVNULL)
    assert as_promised(run_dir)
    counts.undisturbed.append(learned(run_dir))


def errors_apart(some: Sequence[float], others: Sequence[float]) -> float:
    """Return by how many standard errors two means differ (Welch)."""
    error = sum(statistics.variance(each) / len(each) for each in (some, others))
    return abs(statistics.mean(some) - statistics.mean(others)) / max(error, sys.float_info.min) ** 0.5


def as_twin(run_dir: Path, twin: Path) -> bool:
    """Return whether two runs have the same columns, metrics and weights, to the bit."""
    columns = [path.relative_to(twin) for path in sorted(twin.glob("recorded/*/*.parquet"))]
    same = [(run_dir / path).read_bytes() == (twin / path).read_bytes() for path in columns]
    return all(same) and metrics(str(run_dir)) == metrics(str(twin)) and same_weights(str(run_dir), str(twin))


def begun(run_dir: Path, token: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(run_dir),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"RLGRAPH_TEST_TOKEN": token},
        start_new_session=True,
    )


def targets(process: str, driver: int, token: str, chance: random.Random) -> list[int]:
    """Return the processes to kill, those of Ray by their names; one of several by chance."""
    if process == "driver":
        return [driver]
    names = holders(token)
    if process == "all":
        return [driver, *names]
    own = {"worker": r"ray::Worker", "op": r"ray::(?!Worker)", SERVER: r"sglang(::|\.launch_server)"}
    wanted = own.get(process, rf"/{process}\b")
    found = [pid for pid, name in sorted(names.items()) if re.search(wanted, name)]
    return [chance.choice(found)] if found else []


def session_of(token: str) -> str:
    """Return what the names of a run's shared memory begin with, once it has processes of Ray's."""
    for process in holders(token):
        with suppress(OSError):
            if found := re.search(r"RLGRAPH_SESSION=([\w-]+)", Path(f"/proc/{process}/environ").read_text()):
                return found[1]
    return NONE


def killed(run_dir: Path, strikes: Sequence[tuple[str, str]], counts: Counts, chance: random.Random) -> str:
    """Begin or resume a run, and kill a process of it at a moment; it may have ended before.

    Args:
        strikes: The moment and the process; after servers, which a run survives, what is killed of it next.

    Returns:
        What the names of its shared memory begin with.
    """
    token, said, session, to_come = uuid.uuid4().hex, [], NONE, [*strikes]
    with begun(run_dir, token) as run:
        assert run.stdout
        watch = threading.Timer(LIMIT_S * len(strikes), run.kill)
        watch.start()
        for line in run.stdout:
            said.append(line)
            if not re.search(MOMENTS[to_come[0][0]], line):
                continue
            moment, process = to_come.pop(0)
            long = is_streamed(run_dir) and moment == "iterate"
            time.sleep(chance.uniform(0, STREAMED_S if long else WITHIN_S))
            struck, session = targets(process, run.pid, token, chance), session_of(token)
            end(struck)
            counts.kills[moment, process] += bool(struck)
            if not to_come:
                break
        watch.cancel()
        killed_last = " then ".join(f"{process} killed at {moment}" for moment, process in strikes)
        try:
            said.append(run.communicate(timeout=LIMIT_S)[0])
        except subprocess.TimeoutExpired:
            counts.trouble.append(f"{killed_last}: nothing for {LIMIT_S} s\n{''.join(said)}")
            os.killpg(run.pid, signal.SIGKILL)
    moment, process = strikes[-1]
    if "Traceback" in "".join(said) and process != "all":
        counts.trouble.append(f"{killed_last}:\n{''.join(said)}")
    hit = strikes[: len(strikes) - len(to_come)]
    if run.returncode and all(one == SERVER and at not in ("start", "load") for at, one in hit):
        counts.trouble.append(f"{killed_last}: the run has not gone on\n{''.join(said)}")
    limit = time.monotonic() + LEFT_S
    while (left := holders(token)) and time.monotonic() < limit:
        time.sleep(0.5)
    files = [*SHARED.glob(f"{session}-*"), *Path(tempfile.gettempdir()).glob(f"{session}-*")]
    if left or (shared := files if process != "all" else []):
        counts.leaked[moment, process] += 1
        counts.trouble.append(f"{killed_last}: {left or shared} is left\n{''.join(said)}")
        end(left)
    return session


def end(processes: Iterable[int]) -> None:
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def chain(run_dir: Path, twin: Path, kills: int, counts: Counts, chance: random.Random) -> None:
    """Kill a run several times, let it end, and compare it with its twin."""
    sessions = []
    moments = STREAMED_MOMENTS if is_streamed(run_dir) else tuple(MOMENTS)
    processes = (*PROCESSES, *[SERVER] * len(PROCESSES) * is_served(run_dir))
    struck: list[tuple[str, str]] = []
    while len(struck) < kills:
        strikes = [(chance.choice(moments), chance.choice(processes))]
        while strikes[-1][1] == SERVER and strikes[-1][0] != "export" and len(struck + strikes) < kills:
            strikes.append((chance.choice(moments[2:]), chance.choice(processes)))
        sessions.append(killed(run_dir, strikes, counts, chance))
        struck += strikes
    done = subprocess.run(command(run_dir), capture_output=True, text=True, timeout=LIMIT_S)
    counts.chains += 1
    if done.returncode:
        counts.trouble.append(f"{struck}: the last resume failed\n{done.stdout}{done.stderr}")
        return
    counts.resumed.update(struck)
    if left := [path for session in sessions for path in SHARED.glob(f"{session}-*")]:
        counts.leaked.update(struck[-1:])
        counts.trouble.append(f"{struck}: {left} is left behind the last resume")
    equal = as_promised(run_dir) if is_streamed(run_dir) else as_twin(run_dir, twin)
    counts.equal += equal
    if is_streamed(run_dir):
        counts.learned.append(learned(run_dir))
    if not equal:
        counts.trouble.append(f"{struck}: {run_dir} is not as {twin}")
    else:
        shutil.rmtree(run_dir)
    print(f"{counts.kills.total()} kills, {counts.equal} of {counts.chains} chains as promised", flush=True)


def chaos(folder: Path, kills: int, seed: int, chains: int = 1, kind: str = "") -> Counts:
    """Kill as often as that, in chains, some of them at the same time; print the table."""
    folder, streamed = folder / kind, bool(kind)
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["RLGRAPH_TEST_FILES"] = str(folder / "demo_files")
    if not (folder / "demo_files").exists():
        make_demo_files(folder / "demo_files")
    counts, twin, done = Counts(), folder / "twin", []
    if not streamed and not (twin / "models").exists():
        shutil.rmtree(twin, ignore_errors=True)
        subprocess.run(command(twin), check=True, stdout=subprocess.DEVNULL)
    with ThreadPoolExecutor(chains) as pool:
        for number in range(UNDISTURBED if streamed else 0):
            done.append(pool.submit(undisturbed, folder / f"undisturbed-{number}", counts))
        for number in range(-(-kills // CHAIN)):
            run_dir, some = folder / f"chain-{number}", min(CHAIN, kills - number * CHAIN)
            chance = random.Random(f"{seed} {number}")
            done.append(pool.submit(chain, run_dir, twin, some, counts, chance))
        for one in done:
            one.result()
    if min(len(counts.learned), len(counts.undisturbed)) > 1:
        apart = errors_apart(counts.learned, counts.undisturbed)
        if apart > ERRORS:
            counts.trouble.append(f"what chains learned is {apart:.1f} standard errors from undisturbed runs")
    print(table(counts))
    return counts


def table(counts: Counts) -> str:
    """Return kills, leaks and chains as text."""
    processes = (*PROCESSES, SERVER)
    lines = [f"{'moment':<12}" + "".join(f"{process:>12}" for process in processes)]
    for moment in MOMENTS:
        cells = [(counts.kills[moment, process], counts.leaked[moment, process]) for process in processes]
        lines.append(f"{moment:<12}" + "".join(f"{kills:>9} ({leaks})" for kills, leaks in cells))
    left = f"in brackets: after how many a process or shared memory was left after {LEFT_S} s"
    lines.append(f"{counts.kills.total()} kills; {left}")
    lines.append(f"{counts.chains} chains, {counts.equal} as promised: nothing lost, nothing doubled")
    for name, values in (("undisturbed", counts.undisturbed), ("killed", counts.learned)):
        if values:
            mean = statistics.mean(values)
            said = f"{mean:.3f}, from {min(values):.3f} to {max(values):.3f}"
            lines.append(f"eval/accuracy of {len(values)} runs, {name}: {said}")
    return "\n".join([*lines, *counts.trouble])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chains", type=int, default=1, help="at the same time")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--streamed", action="store_const", const="streamed", help="a run that streams")
    kinds.add_argument("--served", action="store_const", const="served", help="and has SGLang's servers")
    options = parser.parse_args()
    kind = options.streamed or options.served or ""
    counts = chaos(options.folder, options.kills, options.seed, options.chains, kind)
    sys.exit(bool(counts.trouble or counts.leaked.total()))


if __name__ == "__main__":
    main()
