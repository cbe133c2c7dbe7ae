"""Calls of workers beside the steps: to set up, save, load, export, and look at columns."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

from rlgraph.errors import RunError
from rlgraph.files import read_sums
from rlgraph.ir.plan import Plan
from rlgraph.printing.plan_text import plan_text
from rlgraph.runtime.cluster.failures import culprit, failure, too_late
from rlgraph.runtime.cluster.interface import WorkerCluster
from rlgraph.runtime.messages.address import host_port
from rlgraph.runtime.messages.tasks import Place, place_text


class ControlCalls:
    """Makes them, and waits for what they return, for at most ``schedule.timeout`` seconds at a time."""

    def __init__(self, plan: Plan, cluster: WorkerCluster) -> None:
        self.plan, self.cluster = plan, cluster
        self.when = "before the first iteration"  # errors say it

    def all(self, method: str, *args: Any, place: bool = False, engines: bool = False) -> list[Any]:
        """Call a method on every worker, with its pool and device after ``args`` if ``place``.

        It is one of ``EngineHost`` if ``engines``. What is the same for all, such as the plan, is sent to the
        cluster once.

        Raises:
            RunError: of the first that failed, or of those that took too long.
        """
        # a put waits for as long as the object store does not answer
        shared, calls = [arg if isinstance(arg, str) else self.cluster.put(arg) for arg in args], {}
        called = ("of_engines", method) if engines else (method,)
        for at in self.cluster.places:
            calls[self.cluster.call(at, *called, *shared, *(at if place else ()))[0]] = at
        return self._results(method, calls)

    def one(self, place: Place, method: str, *args: Any) -> Any:
        """Call a method on one worker; raises as ``all`` does."""
        (result,) = self._results(method, {self.cluster.call(place, method, *args)[0]: place})
        return result

    def holders(self) -> list[tuple[Place, str]]:
        """Return the nodes that hold rows, each with the worker on which these are."""
        functions = self.plan.functions["train"]
        steps = [step for step in self.plan.steps if not step.inserted and functions[step.node].holds]
        return [((step.pool, step.devices[0]), step.node) for step in steps]

    def restore_held(self, checkpoint: Path) -> None:
        """Let nodes hold the rows of a checkpoint; raises as ``all`` does."""
        for place, node in self.holders():
            self.one(place, "read_held", node, str(checkpoint.resolve() / f"{node}-held.npz"))

    def meeting(self) -> str:
        """Return where workers can meet, ``tcp://host:port``; raises as ``all`` does."""
        first = self.cluster.places[0]
        (_, address, _), port = (self.one(first, name) for name in ("place", "free_port"))
        return f"tcp://{host_port(address, port)}"

    def damage(self, checkpoint: Path) -> str:
        """Return which files of a checkpoint are not what was written; each worker reads some of them."""
        try:
            names = [*read_sums(checkpoint)]
        except RunError as error:
            return str(error)
        places = self.cluster.places
        shares = {place: names[number :: len(places)] for number, place in enumerate(places)}
        return ", ".join(sorted(chain(*self.all("damaged", str(checkpoint), shares, place=True))))

    def columns(self, place: Place, method: str, *args: Any, count: int) -> list[Any]:
        """Return references of the ``count`` columns that a method gives behind its report; as ``all``."""
        report, *columns = self.cluster.call(place, method, *args, returns=1 + count)
        self._results(method, {report: place})
        return columns

    def _results(self, method: str, called: dict[Any, Place]) -> list[Any]:
        pending, results, limit = dict(called), {}, self.plan.schedule.timeout
        while pending:
            ready, _ = self.cluster.wait([*pending], timeout=limit)
            if not ready:
                late = ", ".join(map(place_text, pending.values()))
                law = f"`{method}` {self.when} on {late} took over {limit:.0f} s (schedule.timeout)"
                raise too_late(self.cluster, law)
            for reference in ready:
                results[reference] = self._result(method, pending, reference)
                del pending[reference]
        return [results[reference] for reference in called]

    def _result(self, method: str, pending: dict[Any, Place], reference: Any) -> Any:
        try:
            (result,) = self.cluster.get([reference])
        except Exception as error:
            place, first = culprit(self.cluster, pending, reference, error)
            law = f"`{method}` {self.when} failed on {place_text(place)}"
            raise failure(f"{plan_text(self.plan)}\n! {method}, {self.when}", law, first) from error
        return result


def after(iteration: int) -> str:
    """Return when a call between two iterations is made, in words."""
    return f"after iteration {iteration}" if iteration else "before the first iteration"
