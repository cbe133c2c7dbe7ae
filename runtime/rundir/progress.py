"""Shows a run's progress: a live table on a terminal, plain lines elsewhere.

grpo       iteration 12 of 400 ━━━━╺━━━━━━━━━━━━━━━━━━━ 0:01:02, 0:33:24 left
train      update_policy 1.2 s
gen        rollout 0.4 s
last       reward 0.531  3,210 tokens/s  5.16 s
eval       accuracy 0.326 -> 0.61
"""

from __future__ import annotations

import json
import math
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlgraph.errors import visible
from rlgraph.ir.plan import Plan, Step
from rlgraph.reports.measured import METRICS, counted, metrics_so_far
from rlgraph.reports.outcome import score_changes, speed_text
from rlgraph.runtime.driver.metrics import finite
from rlgraph.variables import hidden

QUIET_S = 10  # seconds between lines if there is no terminal
LABEL_WIDTH = 16  # at most, in characters
BAR_WIDTH = 24
SAMPLE_WIDTH = 80  # characters of a prompt, and of a response
EVALUATION_LINES = 6  # scores of evaluations in the table


class Progress:
    """Shows how far a run is.

    Attributes:
        is_live: whether a table is drawn; otherwise lines are printed.
        last_line_s: when the last line of an iteration was printed.
        done: iterations that are done.
        evaluations: the metrics of each evaluation, by iteration.
        first_step: when the first step of this start began, and the iterations that were done then.
        message: what the run does beside iterations, as loading or saving.
        message_stays: whether the message stays beyond the next step.
        numbers: the newest metrics as text.
        end_reason: why the run ended before its last iteration, "" if it did not.
        best: a line that says which checkpoint is best.
        running: the current step of each pool, and when it began.

    Invariant: the thread that draws reads attributes while they change. So a collection is replaced, never
    changed in place, and a method that draws reads an attribute once.
    """

    def __init__(self, plan: Plan, total: int, folder: Path) -> None:
        self.plan = plan
        self.total = total
        self.folder = folder
        self.console = Console(highlight=False)
        self.is_live = self.console.is_terminal and not self.console.is_dumb_terminal
        self.last_line_s = 0.0
        self.done = 0
        self.evaluations: dict[int, Mapping[str, float]] = {}
        self.first_step: tuple[float, int] | None = None
        self.message = ""
        self.message_stays = False
        self.numbers = ""
        self.end_reason = ""
        self.best = ""
        self.running: dict[str, tuple[Step, float]] = {}
        longest_label = max(len(label) for label in (plan.graph, *plan.pools))
        self.label_width = min(LABEL_WIDTH, longest_label)
        # other output goes above the table; the table vanishes when the run ends, before what is printed then
        self.live = Live(console=self.console, get_renderable=self._table, transient=True)

    def __enter__(self) -> Progress:
        title = self.plan.graph
        if self.plan.about:
            title += f": {self.plan.about}"
        self._print(title)
        self._print(f"run directory {self.folder}")
        if self.is_live:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.is_live:
            self.live.stop()
            sys.stdout.flush()

    def say(self, text: str, stays: bool = False) -> None:
        """Show a message beside the iterations until the next step, or from now on if it ``stays``."""
        self.message = text
        self.message_stays = stays
        self.running = {}
        if not self.is_live:
            self._print(text)

    def note(self, text: str) -> None:
        """Print a message that stays."""
        self._print(f"note: {text}")

    def steps(self, running: Mapping[str, Step]) -> None:
        """Show the current step of each pool."""
        now = time.monotonic()
        if self.first_step is None:
            self.first_step = (now, self.done)
        steps: dict[str, tuple[Step, float]] = {}
        for pool, step in running.items():
            current, since = self.running.get(pool, (step, now))
            if current is not step:
                since = now
            steps[pool] = (step, since)
        self.running = steps
        if not self.message_stays:
            self.message = ""

    def ends(self, reason: str) -> None:
        """Note that the run ends before its last iteration."""
        self.end_reason = reason
        self.note(reason)

    def resumed(self, iteration: int) -> None:
        """Note that a run continues from a checkpoint."""
        self._print(f"resumed after iteration {iteration}")
        self.done = iteration
        self.first_step = None

    def restarting(self, number: int, most: int, reason: str) -> None:
        """Note that a worker is lost, and that the run is restarted, for which time of at most how many."""
        self._print(f"{reason}\nrestart {number} of {most} (schedule.restarts)")
        self.first_step = None
        self.running = {}

    def iteration(self, values: Mapping[str, Any], failed: tuple[int, int] = (0, 0)) -> None:
        """Note that an iteration is done; ``failed`` samples of how many have no reward."""
        self.done = int(values["step"])
        self.numbers = numbers(values, failed)
        if self.is_live:
            return
        now = time.monotonic()
        is_last = self.done == self.total
        if is_last or now - self.last_line_s > QUIET_S:
            self.last_line_s = now
            self._print(f"iteration {self.done}/{self.total}  {self.numbers}")

    def evaluation(self, iteration: int, values: Mapping[str, float]) -> None:
        """Note that an evaluation is done."""
        values = finite(values)
        self.evaluations = {**self.evaluations, iteration: values}
        text = "  ".join(f"{name} {value:.3f}" for name, value in values.items())
        self._print(f"after {iteration} iterations: {text}")

    def samples(self, phase: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Print the first and the last of some samples, shortened."""
        for number in sorted({1, len(rows)}):
            self._print(f"  {phase} sample {number} of {len(rows)}: {sample_text(rows[number - 1])}")

    def farewell(self) -> None:
        """Print what was reached, in words, where the results are, and how to look at them."""
        self._print(f"\n{self.plan.graph} is done after {self._reached()}")
        if self.end_reason:
            self._print(f"  {self.end_reason}")
        lines = metrics_so_far(self.folder)  # also of what it did before it was resumed
        for name, change in score_changes(lines).items():
            self._print(f"  {name}: {change}")
        if counted(lines):
            self._print(f"  {speed_text(lines)}")
        folder = shlex.quote(str(self.folder))
        commands = {
            f"rlgraph view {folder}": "a page with curves, samples and times, to open in a browser",
            f"rlgraph report {folder}": "where the time went",
        }
        if self.best:
            self._print(f"  {self.best}")
            commands[f"rlgraph export {folder} --checkpoint best --to DIR"] = "the best, for transformers"
        self._print("\nlook at it:")
        width = max(map(len, commands))
        for command, description in commands.items():
            self._print(f"  {command:<{width}}  {description}")
        self._print(f"\nin {self.folder}:")
        for pattern, description in RESULTS.items():
            if any(self.folder.glob(pattern)):
                self._print(f"  {pattern.removesuffix('/*'):<14} {description}")

    def _reached(self) -> str:
        """Return the iterations that were run, those of this start apart, and the time that they took."""
        text = _count(self.done, "iteration")
        if self.first_step is None:
            return text
        started_s, done_then = self.first_step
        duration = _duration(time.monotonic() - started_s)
        if done_then:
            return f"{text}, {self.done - done_then} of them since it was resumed, in {duration}"
        return f"{text} in {duration}"

    def _print(self, text: str) -> None:
        """Print text literally: brackets in names and errors are not markup, and escapes are spelled out."""
        self.console.print(visible(hidden(text)), soft_wrap=True, markup=False)

    def _evaluated(self) -> dict[str, str]:
        """Return each score of the evaluations of this start, with its first and its newest value."""
        return score_changes([values for _, values in sorted(self.evaluations.items())])

    def _table(self) -> Group:
        """Return the current table; the drawing thread calls this a few times per second."""
        lines = Table.grid(padding=(0, 1))
        lines.add_column(width=self.label_width, no_wrap=True, style="bold")
        lines.add_column(no_wrap=True, overflow="ellipsis")
        if self.message:
            lines.add_row("", Text(self.message, "italic"))
        for pool in self.plan.pools:
            lines.add_row(Text(pool), self._current_step(pool))
        if self.numbers:
            lines.add_row("last", self.numbers)
        for name, change in islice(self._evaluated().items(), EVALUATION_LINES):
            lines.add_row("eval", Text(f"{name} {change}"))
        return Group(self._head(), lines)

    def _head(self) -> Table:
        head = Table.grid(padding=(0, 1))
        head.add_column(width=self.label_width, no_wrap=True, style="bold")
        bar = ProgressBar(total=max(self.total, 1), completed=self.done, width=BAR_WIDTH)
        count = f"iteration {self.done} of {self.total}"
        head.add_row(Text(self.plan.graph), count, bar, Text(self._time(), "cyan"))
        return head

    def _current_step(self, pool: str) -> Text:
        running = self.running.get(pool)
        if running is None:
            return Text("waits", "dim")
        step, since = running
        phase = "evaluate: " if step.phase == "eval" else ""
        return Text(f"{phase}{step.node} {time.monotonic() - since:.1f} s", "cyan")

    def _time(self) -> str:
        """Return the time since the first step, and an estimate of the remaining time."""
        first_step = self.first_step
        if first_step is None:
            return ""
        started_s, done_then = first_step
        elapsed_s = time.monotonic() - started_s
        text = _duration(elapsed_s)
        done = self.done - done_then
        if done:
            remaining_s = elapsed_s / done * (self.total - self.done)
            text += f", {_duration(remaining_s)} left"
        return text


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number:,} {noun}s"


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def sample_text(row: Mapping[str, Any]) -> str:
    """Return a sample as one line: its reward, the end of its prompt, and the ends of what followed it.

    Example:
        >>> sample_text({"tokens": "1+2=3<eos>", "prompt": "1+2=", "completion": "3<eos>", "rewards": 1.0})
        'reward 1  "1+2=" -> "3<eos>"'
    """
    # without a mask it is not known which tokens the policy wrote: all of them stand where prompts do
    prompt = str(row.get("prompt", row["tokens"]))
    completion = str(row.get("completion", row.get("responses", "")))
    if len(prompt) > SAMPLE_WIDTH:
        prompt = f"...{prompt[-SAMPLE_WIDTH:]}"
    if len(completion) > SAMPLE_WIDTH:
        half = SAMPLE_WIDTH // 2
        completion = f"{completion[:half]} ... {completion[-half:]}"
    text = f"{json.dumps(prompt, ensure_ascii=False)} -> {json.dumps(completion, ensure_ascii=False)}"
    reward = row.get("rewards")
    if isinstance(reward, int | float):
        return f"reward {reward:.4g}  {text}"
    return text


RESULTS = {
    METRICS: "reward, loss, times: one line per iteration",
    "samples/*": "what the model wrote",
    "plan.txt": "what ran, step by step",
    "alarms.jsonl": "what went wrong, and what to try",
    "timeline.json": "when it ran: open it at ui.perfetto.dev",
    "tensorboard/*": "the metrics as charts: tensorboard --logdir runs",
    "profile/*": "what the workers computed: open it at ui.perfetto.dev",
    "models/*": "the trained models, for transformers",
}


def numbers(values: Mapping[str, Any], failed: tuple[int, int] = (0, 0)) -> str:
    """Return the few metrics that say how a run goes: reward or loss, speed, and seconds per iteration.

    Example:
        >>> numbers({"reward/mean": 0.25, "time/step": 0.5}, failed=(3, 16))
        'reward 0.250 (3 of 16 failed)  0.50 s'
        >>> numbers({"reward/mean": float("nan"), "time/step": 0.5}, failed=(16, 16))
        'reward - (16 of 16 failed)  0.50 s'
    """
    texts: list[str] = []
    loss = next((name for name in values if name.endswith("/loss")), None)
    if "reward/mean" in values:
        texts.append(f"reward {_reward_text(values['reward/mean'], *failed)}")
    elif loss is not None:
        _, _, name_in_node = loss.partition("/")
        texts.append(f"{name_in_node} {values[loss]:.3f}")
    if "tokens/generated" in values:
        texts.append(f"{values['tokens/generated'] / values['time/step']:,.0f} tokens/s")
    texts.append(f"{values['time/step']:.2f} s")
    return "  ".join(texts)


def _reward_text(mean: float, failed: int, samples: int) -> str:
    """Return the mean reward, a dash where no sample has one, and how many samples have none."""
    text = f"{mean:.3f}" if math.isfinite(mean) else "-"
    return f"{text} ({failed} of {samples} failed)" if failed else text
