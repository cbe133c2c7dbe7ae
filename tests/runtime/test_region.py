"""A region at run time, without workers: its rounds are reported by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlgraph.compiler import compile_graph
from rlgraph.errors import RunError
from rlgraph.ir.plan import Plan, Step
from rlgraph.runtime.driver.iteration import Entry, Execution
from rlgraph.runtime.driver.region import RunningRegion
from rlgraph.runtime.driver.row_buffer import Waiting
from rlgraph.runtime.messages.report import Report

HERE = Path(__file__).parent
SPLIT = "pools={train: {devices: 1}, gen: {devices: 1}}"
pytestmark = pytest.mark.usefixtures("in_demo")


@pytest.fixture
def refilled() -> Plan:
    return compile_graph(str(HERE / "refilled.yaml"), [SPLIT], 1)


@pytest.fixture
def streamed() -> Plan:
    return compile_graph(str(HERE / "streamed.yaml"), ["schedule.buffer={staleness: 1, chunk: 6}"], 1)


def begin(plan: Plan, position: int = 0) -> RunningRegion:
    (name,) = plan.regions
    return RunningRegion(plan, name, Waiting(), position, dict)


def iteration(plan: Plan, number: int) -> Execution:
    return Execution(plan, "train", Entry(number, dict.fromkeys(plan.models, number)), {})


def report(execution: Execution, step: Step, **fields: Any) -> None:
    """A step is called and reports, on the one device of its pool."""
    place = (step.pool, 0)
    execution.start(step)
    outputs = [f"{column}" for column in step.writes] + ["unfinished"] * step.unfinished
    execution.submitted(step, {place: outputs})
    execution.reported(step, place, Report(0.0, 0.0, **fields))


def draw(submissions: Sequence[tuple[Execution, Step]], finished: Sequence[int], tokens: int = 3) -> None:
    """A stream's source gives as many rows as it is asked for; some places among its groups finish."""
    for execution, step in submissions:
        assert execution.inputs
        if step.unfinished:
            whole = np.array(finished, np.int64)
            lengths = np.full(len(whole) * 2, tokens)
            report(execution, step, finished=whole, lengths=lengths)
        else:
            report(execution, step, lengths=np.ones(execution.inputs.known_rows or 0, np.int64))


def test_a_round_has_an_execution_and_is_none(streamed: Plan) -> None:
    """What a round has must not hide what an execution can do, such as ``places``."""
    region = begin(streamed)
    region.want(iteration(streamed, 0))
    ((execution, _), *_) = region.advance()
    (round,) = region.rounds
    assert not isinstance(round, Execution) and round.execution is execution
    assert execution.inputs and execution.inputs.homes is not None
    assert execution.places("gen") == [("gen", 0)]


def test_a_refill_hears_of_a_sync_and_goes_by_the_weights_of_its_iteration(refilled: Plan) -> None:
    region = begin(refilled)
    assert region.plan.models
    region.want(iteration(refilled, 0))
    region.note_sync(5)
    submissions = region.advance()
    assert region.ledger.weights == 0
    assert {execution.entry.iteration for execution, _ in submissions} == {0}


def test_every_round_has_the_pool_that_draws_it(refilled: Plan, streamed: Plan) -> None:
    for plan in (refilled, streamed):
        region = begin(plan)
        region.want(iteration(plan, 0))
        region.advance()
        assert [round.pool for round in region.rounds] == ["gen"]


def test_a_stream_goes_on_with_what_a_round_has_left(streamed: Plan) -> None:
    region = begin(streamed)
    region.want(iteration(streamed, 0))
    drawing = region.advance()
    assert len(region.ledger.drawing) == 16  # of two iterations
    draw(drawing, finished=[1, 3])
    behind = region.advance()
    assert {step.node for _, step in behind} == {"judged", "finished", "numbers", "drawn"}
    begun = region.rounds[1].inputs.unfinished.prompts
    assert begun.prompts.tolist() == [n for n in range(16) if n not in (1, 3)]
    assert region.position() == 0 and len(region.waiting().prompts) == 0  # a checkpoint begins round 1 again
    assert [*region.ledger.in_flight] == [*range(16)]
    assert region.ledger.drawing.keys() == {*begun.prompts.tolist()}


def test_steps_behind_the_samples_are_left_out_where_no_group_has_finished(streamed: Plan) -> None:
    region = begin(streamed)
    region.want(iteration(streamed, 0))
    draw(region.advance(), finished=[])
    (round,) = region.rounds
    again = region.advance()
    assert round.execution.done and round not in region.rounds
    assert {execution for execution, _ in again} == {region.rounds[0].execution}


def test_a_refill_begins_one_round_at_a_time_and_names_what_it_misses(refilled: Plan) -> None:
    region = begin(refilled)
    region.want(iteration(refilled, 0))
    for _ in range(region.plan.region.rounds):
        submissions = region.advance()
        assert len(region.rounds) == 1 and not region.advance()
        for execution, step in submissions:
            assert execution.inputs
            rows = execution.inputs.requested
            if step.reads:
                rows = execution.rows.count(execution.columns[step.writes[0]].domain)
            kept = np.zeros(0, np.int64) if step.run and step.run.filters else None
            report(execution, step, lengths=np.ones(rows, np.int64), selected=kept)
    with pytest.raises(
        RunError, match=r"`mixed` kept 0 of \d+ rows \(0.0%\) in \d+ rounds; 28 more are wanted"
    ):
        region.advance()
