"""Carries the states of ops from iteration to iteration, as JSON in the reports of the ops that keep them.

iteration 1   difficulty keeps {...}
iteration 2   wanted reads it; difficulty has it, and keeps another

A state is known once the op that keeps it has reported in the iteration before, and is part of checkpoints.
"""

from __future__ import annotations

from rlgraph.runtime.driver.iteration import Execution


def state(execution: Execution, node: str | None) -> str:
    """Return a node's state before an execution; "" where it has none yet, or no node is named."""
    if execution.previous is not None:
        return _state_behind(execution.previous, node)
    return execution.states.get(node or "", "")


def states_after(execution: Execution) -> dict[str, str]:
    """Return the state behind an execution of each node that keeps one."""
    states: dict[str, str] = {}
    nodes = {function.state for function in execution.plan.functions["train"].values()}
    for node in sorted(filter(None, nodes)):
        text = _state_behind(execution, node)
        if text:
            states[node] = text
    return states


def _state_behind(execution: Execution, node: str | None) -> str:
    """Return a node's state after an execution, or as it was before where the node did not run."""
    for step in execution.steps:
        is_of_node = step.node == node and not step.inserted
        if is_of_node and step.id in execution.rows.reports:
            return execution.rows.report(step, step.devices[0]).state
    return state(execution, node)
