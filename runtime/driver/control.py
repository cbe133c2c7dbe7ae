"""Calls of workers that are no steps of a plan: to set up, save, load, export, and look at columns."""

from __future__ import annotations

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
    """Makes these calls, and waits at most ``schedule.timeout`` seconds at a time for what they return."""

    def __init__(self, plan: Plan, cluster: WorkerCluster) -> None:
        self.plan = plan
        self.cluster = cluster
        self.moment = "before the first iteration"  # when calls are made; errors say it

    def call_all(self, method: str, *args: Any, place: bool = False, engines: bool = False) -> list[Any]:
        """Call a method on every worker.

        What is the same for all, such as the plan, is sent to the cluster once.

        Args:
            method: of ``Worker``.
            args: for each worker the same.
            place: whether its pool and device follow ``args``.
            engines: whether the method is one of ``EngineHost``.

        Raises:
            RunError: of the first that failed, or of those that took too long.
        """
        target = ("of_engines", method) if engines else (method,)
        # not of texts: a put waits for as long as the object store does not answer
        shared_args = [arg if isinstance(arg, str) else self.cluster.put(arg) for arg in args]
        calls = {}
        for worker in self.cluster.places:
            worker_args = [*shared_args, *worker] if place else shared_args
            (reference,) = self.cluster.call(worker, *target, *worker_args)
            calls[reference] = worker
        return self._results(method, calls)

    def call(self, place: Place, method: str, *args: Any) -> Any:
        """Call a method on one worker; raises as ``call_all`` does."""
        (reference,) = self.cluster.call(place, method, *args)
        (result,) = self._results(method, {reference: place})
        return result

    def holders(self) -> list[tuple[Place, str]]:
        """Return the nodes that hold rows, each with the worker on which these are."""
        functions = self.plan.functions["train"]
        holders = []
        for step in self.plan.steps:
            if not step.inserted and functions[step.node].holds:
                place = (step.pool, step.devices[0])
                holders.append((place, step.node))
        return holders

    def restore_held(self, checkpoint: Path) -> None:
        """Let nodes hold the rows of a checkpoint; raises as ``call_all`` does."""
        for place, node in self.holders():
            self.call(place, "read_held", node, str(checkpoint.resolve() / f"{node}-held.npz"))

    def rendezvous(self) -> str:
        """Return where workers can meet, ``tcp://host:port``; raises as ``call_all`` does."""
        worker = self.cluster.places[0]
        _, address, _ = self.call(worker, "place")
        port = self.call(worker, "free_port")
        return f"tcp://{host_port(address, port)}"

    def damage(self, checkpoint: Path) -> str:
        """Return which files of a checkpoint are not what was written; each worker reads some of them."""
        try:
            names = list(read_sums(checkpoint))
        except RunError as error:
            return str(error)
        workers = self.cluster.places
        shares = {worker: names[number :: len(workers)] for number, worker in enumerate(workers)}
        damaged = list[str]()
        for damaged_of_worker in self.call_all("damaged", str(checkpoint), shares, place=True):
            damaged += damaged_of_worker
        return ", ".join(sorted(damaged))

    def columns(self, place: Place, method: str, *args: Any, count: int) -> list[Any]:
        """Return references of the ``count`` columns that a method returns behind its report.

        It raises as ``call_all`` does.
        """
        report, *columns = self.cluster.call(place, method, *args, returns=1 + count)
        self._results(method, {report: place})
        return columns

    def _results(self, method: str, calls: dict[Any, Place]) -> list[Any]:
        """Wait for calls; return what they return, in their order."""
        limit = self.plan.schedule.timeout
        pending = dict(calls)
        results = {}
        while pending:
            ready, _ = self.cluster.wait([*pending], timeout=limit)
            if not ready:
                workers = ", ".join(map(place_text, pending.values()))
                law = f"`{method}` {self.moment} on {workers} took over {limit:.0f} s (schedule.timeout)"
                raise too_late(self.cluster, law)
            for reference in ready:
                results[reference] = self._result(method, pending, reference)
                del pending[reference]
        return [results[reference] for reference in calls]

    def _result(self, method: str, pending: dict[Any, Place], reference: Any) -> Any:
        try:
            (result,) = self.cluster.get([reference])
        except Exception as error:
            place, cause = culprit(self.cluster, pending, reference, error)
            law = f"`{method}` {self.moment} failed on {place_text(place)}"
            raise failure(f"{plan_text(self.plan)}\n! {method}, {self.moment}", law, cause) from error
        return result


def moment_after(iteration: int) -> str:
    """Return when a call between two iterations is made, in words."""
    return f"after iteration {iteration}" if iteration else "before the first iteration"
