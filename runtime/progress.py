"""What a person sees while a run goes on: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from rlgraph.plan import Plan, Step

QUIET_S = 10  # seconds between lines where there is no terminal


class Progress:
    """Iterations done, the newest reward, tokens a second, and the step that runs now."""

    def __init__(self, plan: Plan, total: int, folder: Path) -> None:
        self.plan, self.total, self.folder = plan, total, folder
        self.console = Console(highlight=False)
        self.bar = Bar(
            TextColumn("[bold]{task.fields[graph]}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TextColumn("[cyan]{task.fields[now]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
        )
        self.task = self.bar.add_task("run", total=total, graph=plan.graph, numbers="", now="")
        self.spoke, self.done, self.evaluations = 0.0, 0, dict[int, Mapping[str, float]]()

    def __enter__(self) -> Progress:
        self.console.print(
            f"{self.plan.graph}: {self.plan.about}" if self.plan.about else self.plan.graph, soft_wrap=True
        )
        self.console.print(f"run directory {self.folder}", soft_wrap=True)
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def say(self, text: str) -> None:
        """Something that happens beside the iterations."""
        if self.console.is_terminal:
            self.bar.update(self.task, now=text)
        else:
            self.console.print(text, soft_wrap=True)

    def step(self, step: Step) -> None:
        """The step that the run waits for now."""
        self.bar.update(self.task, now=("evaluate: " if step.phase == "eval" else "") + step.node)

    def resumed(self, iteration: int) -> None:
        """A run goes on from a checkpoint."""
        self.console.print(f"resumed after iteration {iteration}", soft_wrap=True)
        self.done = iteration
        self.bar.update(self.task, completed=iteration)

    def restarting(self, number: int, of: int, why: str) -> None:
        """A worker is lost, and the run begins anew."""
        self.console.print(f"{why}\nrestart {number} of {of} (schedule.restarts)", soft_wrap=True)

    def iteration(self, values: Mapping[str, Any]) -> None:
        """An iteration is done."""
        self.done = int(values["step"])
        text = numbers(values)
        self.bar.update(self.task, completed=self.done, numbers=text)
        if not self.console.is_terminal and (
            time.monotonic() - self.spoke > QUIET_S or self.done == self.total
        ):
            self.spoke = time.monotonic()
            self.console.print(f"iteration {self.done}/{self.total}  {text}", soft_wrap=True)

    def evaluation(self, iteration: int, values: Mapping[str, float]) -> None:
        """An evaluation is done."""
        self.evaluations[iteration] = values
        found = "  ".join(f"{name} {value:.3f}" for name, value in values.items())
        self.console.print(f"after {iteration} iterations: {found}", soft_wrap=True)

    def farewell(self) -> None:
        """Where the results are, and what to look at."""
        self.console.print(f"\n{self.plan.graph} is done after {self.done} iterations", soft_wrap=True)
        if self.evaluations:
            first, last = self.evaluations[min(self.evaluations)], self.evaluations[max(self.evaluations)]
            for name in last:
                self.console.print(f"  {name}: {first[name]:.3f} -> {last[name]:.3f}", soft_wrap=True)
        for file, what in LOOK.items():
            if any(self.folder.glob(file)):
                self.console.print(f"  {self.folder / file.rstrip('/*')!s:<36} {what}", soft_wrap=True)
        self.console.print(f"  rlgraph report {self.folder!s:<21} where the time went", soft_wrap=True)


LOOK = {
    "metrics.jsonl": "reward, loss, times: one line an iteration",
    "samples/*": "what the model wrote",
    "plan.txt": "what ran, step by step",
    "timeline.json": "when it ran: open it at ui.perfetto.dev",
    "tensorboard/*": "the metrics as charts: tensorboard --logdir runs",
    "profile/*": "what the workers computed: open it at ui.perfetto.dev",
    "models/*": "the trained models, for transformers",
}


def numbers(values: Mapping[str, Any]) -> str:
    """The few metrics that tell how a run goes."""
    parts = []
    if "reward/mean" in values:
        parts.append(f"reward {values['reward/mean']:.3f}")
    else:
        parts += [
            f"{name.partition('/')[2]} {value:.3f}"
            for name, value in values.items()
            if name.endswith("/loss")
        ][:1]
    if "tokens/generated" in values:
        parts.append(f"{values['tokens/generated'] / values['time/step']:,.0f} tokens/s")
    return "  ".join([*parts, f"{values['time/step']:.2f} s"])
