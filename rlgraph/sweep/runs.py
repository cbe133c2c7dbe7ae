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
        done = self._read_done()
        unfinished = [run for run in self.runs if done.get(run.name) != run.overrides]
        if finished := len(self.runs) - len(unfinished):
            self.say(f"{finished} of {len(self.runs)} runs are done already")
        reached = self._save_results()
        with ThreadPoolExecutor(jobs) as pool:
            try:
                for run, failure, seconds in pool.map(self._run, unfinished):
                    if not failure:
                        done[run.name] = run.overrides
                        write(self.folder / DONE, json.dumps(done, indent=1) + "\n")
                    reached = self._save_results()
                    self.say(f"{run.name}: {failure or reached.summary(run)} ({seconds:.0f} s)")
            except KeyboardInterrupt:
                pool.shutdown(cancel_futures=True)
                raise
        return reached, all(done.get(run.name) == run.overrides for run in self.runs)

    def _read_done(self) -> dict[str, list[str]]:
        path = self.folder / DONE
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}

    def _save_results(self) -> Results:
        """Return what is reached so far, which is written as table and page."""
        reached = results(self.graph, self.runs, self.folder)
        reached.save(self.folder)
        return reached

    def _run(self, run: Combination) -> tuple[Combination, str, float]:
        """Run a combination, or the rest of it; return what went wrong, and the seconds that it took."""
        start = time.monotonic()
        run_dir = self.folder / run.name
        log = self.folder / f"{run.name}.log"
        command = [sys.executable, "-m", "rlgraph", "run", self.graph, *run.overrides, *self.options]
        command += ["--run-dir", str(run_dir)]
        if (run_dir / "plan.json").is_file():
            command.append("--resume")
        with log.open("a", encoding="utf-8") as file:
            process = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False)
        failure = f"ended with {process.returncode}, see {log}" if process.returncode else ""
        return run, failure, time.monotonic() - start
