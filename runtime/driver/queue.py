"""The queue of steps that wait for their calls to be known."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rlgraph.ir.plan import Step
from rlgraph.runtime.driver.iteration import Execution
from rlgraph.runtime.driver.needs import Need, needs_of


@dataclass
class QueuedStep:
    """A step that waits, and the events that it still needs."""

    execution: Execution
    step: Step
    needs: set[Need]

    def is_ready(self) -> bool:
        """Return whether every event that it needs has happened."""
        self.needs = {
            (execution, event) for execution, event in self.needs if event not in execution.happened
        }
        return not self.needs


class StepQueue:
    """Steps of all executions in flight, in the order in which each pool gets them.

    Invariants:
        - A pool gets its steps in this order: a step that waits holds up all later steps of its pool.
        - It holds up no other pool; ``Execution.holds`` says which pools are those of a step.
        - A step leaves the queue once, when it is ready.
    """

    def __init__(self) -> None:
        self.steps: list[QueuedStep] = []

    def append(self, submissions: Iterable[tuple[Execution, Step]]) -> None:
        """Add steps behind all others."""
        self.steps += _queued(submissions)

    def insert_before(self, collect: Step, submissions: Iterable[tuple[Execution, Step]]) -> None:
        """Add steps before the collect that waits for their rows, and behind the weights that these need."""
        index = 0
        for position, queued in enumerate(self.steps):
            if (queued.step.phase, queued.step.id) == (collect.phase, collect.id):
                index = position
                break
        self.steps[index:index] = _queued(submissions)

    def ready(self, call_started: Callable[[], None]) -> Iterator[tuple[Execution, Step]]:
        """Yield the steps whose calls are known, and take them out of the queue.

        The receiver starts each before it asks for the next. ``call_started`` makes the calls of steps that
        were started: a step may read what one of them makes.
        """
        held_pools = set[str]()
        waiting = list[QueuedStep]()
        remaining = deque(self.steps)
        while remaining:
            queued = remaining.popleft()
            pools = queued.execution.holds(queued.step)
            if pools & held_pools or not self._is_ready(queued, call_started):
                held_pools |= pools
                waiting.append(queued)
            else:
                yield queued.execution, queued.step
        self.steps = waiting

    def _is_ready(self, queued: QueuedStep, call_started: Callable[[], None]) -> bool:
        if queued.is_ready():
            return True
        call_started()
        return queued.is_ready()


def _queued(submissions: Iterable[tuple[Execution, Step]]) -> list[QueuedStep]:
    return [QueuedStep(execution, step, needs_of(execution, step)) for execution, step in submissions]
