"""Runs the combinations of a sweep, each in a process of its own, and goes on where it was stopped."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rlgraph.files import write
from rlgraph.sweep.combinations import Combination
from rlgraph.sweep.results import Results, results

DONE = "done.json"  # in the folder of a sweep: run -> the settings with which it is done


@dataclass
class Sweep:
    """A sweep in its folder.

    Attributes:
        graph: a path, or the name of a shipped graph.
        runs: its combinations.
        folder: holds a run's directory and log for each of them, ``table.csv`` and ``sweep.html``.
        options: further options of ``rlgraph run``.
        say: prints a line.
    """

    graph: str
    runs: Sequence[Combination]
    folder: Path
    options: Sequence[str]
    say: Callable[[str], None]

    def carry_out(self, jobs: int = 1) -> tuple[Results, bool]:
        """Run what is not done yet, ``jobs`` runs at a time; table and page are written after each run.

        Returns:
            What was reached, and whether all runs are done.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / DONE
        done = dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
        wanted = [run for run in self.runs if done.get(run.name) != run.overrides]
        if earlier := len(self.runs) - len(wanted):
            self.say(f"{earlier} of {len(self.runs)} runs are done already")
        found = self._told()
        with ThreadPoolExecutor(jobs) as pool:
            try:
                for run, failed, seconds in pool.map(self._run, wanted):
                    if not failed:
                        done[run.name] = run.overrides
                        write(path, json.dumps(done, indent=1) + "\n")
                    found = self._told()
                    self.say(f"{run.name}: {failed or found.said(run)} ({seconds:.0f} s)")
            except KeyboardInterrupt:
                pool.shutdown(cancel_futures=True)
                raise
        return found, all(done.get(run.name) == run.overrides for run in self.runs)

    def _told(self) -> Results:
        """Return what is reached so far, which is written as table and page."""
        found = results(self.graph, self.runs, self.folder)
        found.save(self.folder)
        return found

    def _run(self, run: Combination) -> tuple[Combination, str, float]:
        """Run a combination, or the rest of it; return what went wrong, and the seconds that it took."""
        begun, place = time.monotonic(), self.folder / run.name
        command = [sys.executable, "-m", "rlgraph", "run", self.graph, *run.overrides, *self.options]
        command += ["--run-dir", str(place), *["--resume"] * (place / "plan.json").is_file()]
        log = self.folder / f"{run.name}.log"
        with log.open("a", encoding="utf-8") as file:
            ended = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False)
        failed = f"ended with {ended.returncode}, see {log}" if ended.returncode else ""
        return run, failed, time.monotonic() - begun
