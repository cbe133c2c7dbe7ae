"""Shows a run's progress: a live table on a terminal, plain lines elsewhere.

grpo       iteration 12 of 400 ━━━━╺━━━━━━━━━━━━━━━━━━━ 0:01:02, 0:33:24 left
train      update_policy 1.2 s
gen        rollout 0.4 s
last       reward 0.531  3,210 tokens/s  5.16 s
eval       accuracy 0.326 -> 0.610
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlgraph.errors import visible
from rlgraph.ir.plan import Plan, Step
from rlgraph.runtime.driver.metrics import finite
from rlgraph.variables import hidden

QUIET_S = 10  # seconds between lines where there is no terminal
LABEL, BAR = 16, 24  # most characters before a line, and of the bar
SHOWN = 80  # characters of a prompt, and of a response
EVALUATED = 6  # metrics of evaluations that the table shows


class Progress:
    """Iterations done, each pool's current step, the newest numbers and evaluations, and the time left."""

    def __init__(self, plan: Plan, total: int, folder: Path) -> None:
        self.plan, self.total, self.folder = plan, total, folder
        self.console = Console(highlight=False)
        self.shows = self.console.is_terminal and not self.console.is_dumb_terminal
        self.spoke, self.done, self.evaluations = 0.0, 0, dict[int, Mapping[str, float]]()
        self.began: tuple[float, int] | None = None  # time of the first step, and the iterations done then
        self.doing, self.stays, self.numbers = "", False, ""
        self.ended = ""  # what made the run end before its last iteration
        self.best = ""  # which checkpoint is best
        self.running: dict[str, tuple[Step, float]] = {}  # pool -> its step and when that began
        self.label = min(LABEL, max(map(len, (plan.graph, *plan.pools))))
        # what others print meanwhile goes above the table; it is gone when the run ends, for what comes then
        self.live = Live(console=self.console, get_renderable=self._table, transient=True)

    def __enter__(self) -> Progress:
        self._print(f"{self.plan.graph}: {self.plan.about}" if self.plan.about else self.plan.graph)
        self._print(f"run directory {self.folder}")
        if self.shows:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.shows:
            self.live.stop()
            sys.stdout.flush()

    def say(self, text: str, stays: bool = False) -> None:
        """Show a message beside the iterations, until the next step or from now on."""
        self.doing, self.stays, self.running = text, stays, {}
        if not self.shows:
            self._print(text)

    def note(self, text: str) -> None:
        """Print a message that stays."""
        self._print(f"note: {text}")

    def steps(self, running: Mapping[str, Step]) -> None:
        """Show the step that each pool is at now."""
        now = time.monotonic()
        self.began = self.began or (now, self.done)
        before = self.running
        # assigned at once: another thread draws it
        self.running = {
            pool: before[pool] if pool in before and before[pool][0] is step else (step, now)
            for pool, step in running.items()
        }
        self.doing = self.doing if self.stays else ""

    def ends(self, why: str) -> None:
        """Note that the run ends before its last iteration."""
        self.ended = why
        self.note(why)

    def resumed(self, iteration: int) -> None:
        """Note that a run goes on from a checkpoint."""
        self._print(f"resumed after iteration {iteration}")
        self.done, self.began = iteration, None

    def restarting(self, number: int, of: int, why: str) -> None:
        """Note that a worker is lost, and that the run begins anew."""
        self._print(f"{why}\nrestart {number} of {of} (schedule.restarts)")
        self.began, self.running = None, {}

    def iteration(self, values: Mapping[str, Any]) -> None:
        """Note that an iteration is done."""
        self.done, self.numbers = int(values["step"]), numbers(values)
        due = time.monotonic() - self.spoke > QUIET_S or self.done == self.total
        if due and not self.shows:
            self.spoke = time.monotonic()
            self._print(f"iteration {self.done}/{self.total}  {self.numbers}")

    def evaluation(self, iteration: int, values: Mapping[str, float]) -> None:
        """Note that an evaluation is done."""
        values = finite(values)
        self.evaluations = {**self.evaluations, iteration: values}
        text = "  ".join(f"{name} {value:.3f}" for name, value in values.items())
        self._print(f"after {iteration} iterations: {text}")

    def samples(self, phase: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Print the first and the last of some samples, in short."""
        for number in sorted({1, len(rows)}):
            self._print(f"  {phase} sample {number} of {len(rows)}: {sample_text(rows[number - 1])}")

    def farewell(self) -> None:
        """Print where the results are, and how to look at them."""
        self._print(f"\n{self.plan.graph} is done after {self.done} iterations")
        if self.ended:
            self._print(f"  {self.ended}")
        for name, change in self._evaluated():
            self._print(f"  {name}: {change}")
        if self.best:
            self._print(f"  {self.best}")
            self._print(f"  rlgraph export {self.folder} --checkpoint best --to DIR")
        for file, what in LOOK.items():
            if any(self.folder.glob(file)):
                self._print(f"  {self.folder / file.rstrip('/*')!s:<36} {what}")
        self._print(f"  rlgraph report {self.folder!s:<21} where the time went")

    def _print(self, text: str) -> None:
        """Print text as it is: brackets in names and errors are no markup, and escapes are spelled out."""
        self.console.print(visible(hidden(text)), soft_wrap=True, markup=False)

    def _evaluated(self) -> list[tuple[str, str]]:
        """Return the first and the current value of each metric of the evaluations."""
        if not (every := self.evaluations):
            return []
        first, last = every[min(every)], every[max(every)]
        before = {name: f"{first[name]:.3f} -> " if len(every) > 1 and name in first else "" for name in last}
        return [(name, f"{before[name]}{last[name]:.3f}") for name in last]

    def _table(self) -> Group:
        """Return the table as it is now; the thread that draws it asks for one a few times per second."""
        lines = Table.grid(padding=(0, 1))
        lines.add_column(width=self.label, no_wrap=True, style="bold")
        lines.add_column(no_wrap=True, overflow="ellipsis")
        if self.doing:
            lines.add_row("", Text(self.doing, "italic"))
        for pool in self.plan.pools:
            lines.add_row(Text(pool), self._at(pool))
        if self.numbers:
            lines.add_row("last", self.numbers)
        for name, change in self._evaluated()[:EVALUATED]:
            lines.add_row("eval", Text(f"{name.removeprefix('eval/')} {change}"))
        return Group(self._head(), lines)

    def _head(self) -> Table:
        head = Table.grid(padding=(0, 1))
        head.add_column(width=self.label, no_wrap=True, style="bold")
        bar = ProgressBar(total=max(self.total, 1), completed=self.done, width=BAR)
        count, clock = f"iteration {self.done} of {self.total}", Text(self._clock(), "cyan")
        head.add_row(Text(self.plan.graph), count, bar, clock)
        return head

    def _at(self, pool: str) -> Text:
        if pool not in (running := self.running):
            return Text("waits", "dim")
        step, since = running[pool]
        part = "evaluate: " if step.phase == "eval" else ""
        return Text(f"{part}{step.node} {time.monotonic() - since:.1f} s", "cyan")

    def _clock(self) -> str:
        """Return the time since the first step, and an estimate of the time left."""
        if (began := self.began) is None:
            return ""
        passed, done = time.monotonic() - began[0], self.done - began[1]
        left = f", {_clock(passed / done * (self.total - self.done))} left" if done else ""
        return _clock(passed) + left


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def sample_text(row: Mapping[str, Any]) -> str:
    """Return a sample as one line: its reward, the end of its prompt, and the ends of its response.

    Example:
        >>> sample_text({"tokens": "1+2=3", "responses": "3", "rewards": 1.0})
        'reward 1  "1+2=" -> "3"'
    """
    response = str(row.get("responses", ""))
    before, is_there, after = row["tokens"].rpartition(response or "\0")  # its special tokens may be left out
    prompt = before if is_there else after
    prompt = prompt if len(prompt) <= SHOWN else f"...{prompt[-SHOWN:]}"
    half = SHOWN // 2
    response = response if len(response) <= SHOWN else f"{response[:half]} ... {response[-half:]}"
    reward = row.get("rewards")
    told = f"reward {reward:.4g}  " if isinstance(reward, int | float) else ""
    return f"{told}{json.dumps(prompt, ensure_ascii=False)} -> {json.dumps(response, ensure_ascii=False)}"


LOOK = {
    "metrics.jsonl": "reward, loss, times: one line per iteration",
    "samples/*": "what the model wrote",
    "plan.txt": "what ran, step by step",
    "alarms.jsonl": "what went wrong, and what to try",
    "timeline.json": "when it ran: open it at ui.perfetto.dev",
    "tensorboard/*": "the metrics as charts: tensorboard --logdir runs",
    "profile/*": "what the workers computed: open it at ui.perfetto.dev",
    "models/*": "the trained models, for transformers",
}


def numbers(values: Mapping[str, Any]) -> str:
    """Return the few metrics that tell how a run goes."""
    parts = []
    losses = [name for name in values if name.endswith("/loss")][:1]
    if "reward/mean" in values:
        parts.append(f"reward {values['reward/mean']:.3f}")
    else:
        parts += [f"{name.partition('/')[2]} {values[name]:.3f}" for name in losses]
    if "tokens/generated" in values:
        parts.append(f"{values['tokens/generated'] / values['time/step']:,.0f} tokens/s")
    return "  ".join([*parts, f"{values['time/step']:.2f} s"])
