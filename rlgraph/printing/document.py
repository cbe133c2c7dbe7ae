"""A plan as one document, which texts, terminals, pages, traces and pictures render.

    plan of grpo: ...                      TITLE
      pool main: 2 devices                 FACT
    evaluate after the last, ...           EVALUATION, then its steps
    repeat 500 times                       TRAINING, then its steps
        1. run prompts (data.prompts) ...  STEP
             writes  prompt: ...           DETAIL
    13 steps per iteration, ...            COUNT
    peak of a device of main, ...          PREDICTION

Nobody who renders a plan reads printed text back: a line says of what kind it is, and which step it is about.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from rlgraph.ir.plan import Plan
from rlgraph.printing.headline import headline, predicted_on
from rlgraph.printing.model_text import model_text
from rlgraph.printing.prediction_text import prediction_text
from rlgraph.printing.schedule_text import (
    evaluation_heading,
    generation_lead,
    pipeline_ends,
    region_heading,
    slot_steps,
    training_heading,
)
from rlgraph.printing.step_text import StepEntry
from rlgraph.units import plural


class LineKind(StrEnum):
    """The subject of a line, by which renderers style it."""

    TITLE = "title"
    FACT = "fact"  # about a pool, a model, or an engine that is off its device
    BLANK = "blank"
    EVALUATION = "evaluation"  # the heading of the steps of evaluation
    TRAINING = "training"  # the heading of the steps of training
    REGION = "region"  # about the steps below it, which repeat or stream
    STEP = "step"
    DETAIL = "detail"  # about the step above it
    PIPELINE = "pipeline"
    COUNT = "count"
    PREDICTION = "prediction"
    NOTE = "note"
    OPEN = "open"  # a value that the graph leaves open


@dataclass(frozen=True)
class DocumentLine:
    """One line, not yet broken to a width.

    ``label`` introduces a list: the word of a detail, or the pool of a pipeline. ``entry`` is the step that
    the line is about, for steps and their details.
    """

    kind: LineKind
    text: str
    label: str = ""
    entry: StepEntry | None = None


@dataclass(frozen=True)
class PlanDocument:
    """The document of a plan.

    Its parts are worked out when they are first asked for: a picture needs no prices of syncs.
    """

    plan: Plan

    @cached_property
    def steps(self) -> Mapping[str, tuple[StepEntry, ...]]:
        """Return phase -> what is said about each of its steps."""
        return {
            phase: tuple(StepEntry(self.plan, step) for step in steps)
            for phase, steps in self.plan.phases.items()
        }

    @cached_property
    def lines(self) -> tuple[DocumentLine, ...]:
        """Return all lines from top to bottom."""
        return (
            *_introduction(self.plan),
            *self._evaluation(),
            *self._training(),
            *_pipeline(self.plan),
            *self._closing(),
        )

    @cached_property
    def prediction(self) -> tuple[str, ...]:
        """Return the lines about memory and time on a cluster; none for a plan that has no cluster."""
        return tuple(prediction_text(self.plan))

    @cached_property
    def headline(self) -> Mapping[str, str]:
        """Return what a figure is about -> the figure; empty for a plan that has no cluster."""
        return headline(self.plan)

    @property
    def predicted_on(self) -> str:
        """Return the cluster of the figures in ``headline``, and whether a run has calibrated them."""
        return predicted_on(self.plan)

    def _evaluation(self) -> Iterator[DocumentLine]:
        if not self.plan.eval_steps:
            return
        yield DocumentLine(LineKind.EVALUATION, evaluation_heading(self.plan))
        yield from self._step_lines("eval")
        yield DocumentLine(LineKind.BLANK, "")

    def _training(self) -> Iterator[DocumentLine]:
        yield DocumentLine(LineKind.TRAINING, training_heading(self.plan))
        yield from self._step_lines("train")
        yield DocumentLine(LineKind.BLANK, "")

    def _step_lines(self, phase: str) -> Iterator[DocumentLine]:
        introduced = set[str]()  # regions whose heading stands above
        for entry in self.steps[phase]:
            region = entry.step.region
            if region and region not in introduced:
                introduced.add(region)
                for text in region_heading(self.plan, region):
                    yield DocumentLine(LineKind.REGION, text)
            yield DocumentLine(LineKind.STEP, entry.sentence, entry=entry)
            for detail in entry.details:
                yield DocumentLine(LineKind.DETAIL, detail.text, detail.word, entry)

    def _closing(self) -> Iterator[DocumentLine]:
        steps = self.plan.steps
        inserted = sum(step.inserted for step in steps)
        count = f"{len(steps)} steps per iteration, {inserted} of them inserted (marked +)"
        yield DocumentLine(LineKind.COUNT, count)
        for text in self.prediction:
            yield DocumentLine(LineKind.PREDICTION, text)
        for note in self.plan.notes:
            yield DocumentLine(LineKind.NOTE, f"note: {note}")
        for name in self.plan.open_values:
            yield DocumentLine(LineKind.OPEN, f"still open: {name} (give it as {name}=...)")


def _introduction(plan: Plan) -> Iterator[DocumentLine]:
    title = f"plan of {plan.graph}"
    if plan.about:
        title += f": {plan.about}"
    yield DocumentLine(LineKind.TITLE, title)
    for pool, count in plan.pools.items():
        yield DocumentLine(LineKind.FACT, f"  pool {pool}: {count} {plural('device', count)}")
    for name in plan.models:
        for text in model_text(plan, name):
            yield DocumentLine(LineKind.FACT, text)
    for engine, parts in plan.away.items():
        text = f"  between iterations {' and '.join(parts)} of {engine} are off the device"
        yield DocumentLine(LineKind.FACT, text)
    yield DocumentLine(LineKind.BLANK, "")


def _pipeline(plan: Plan) -> Iterator[DocumentLine]:
    """Yield what each pool does in a slot, and how the pipeline fills and drains; nothing without one."""
    lead = generation_lead(plan)
    if not lead:
        return
    yield DocumentLine(LineKind.PIPELINE, "while the pipeline is full, in slot t")
    for pool in plan.pools:
        yield DocumentLine(LineKind.PIPELINE, slot_steps(plan, pool), label=pool)
    for text in pipeline_ends(lead):
        yield DocumentLine(LineKind.PIPELINE, text)
    yield DocumentLine(LineKind.BLANK, "")
