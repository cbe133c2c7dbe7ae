"""The interface of a cluster that the driver uses, whether it is Ray's or this process."""

from collections.abc import Sequence
from typing import Any, Protocol

from rlgraph.ir.plan import Plan
from rlgraph.runtime.messages.tasks import Place, Task


class WorkerCluster(Protocol):
    """The workers of all pools."""

    inline: bool  # whether a call runs in this process and is done when it returns

    @property
    def places(self) -> Sequence[Place]:
        """The places of the workers: pools in the plan's order, and their devices."""

    @property
    def shares(self) -> bool:
        """Return whether workers can read each other's shared memory."""

    def call(self, place: Place, method: str, *args: Any, returns: int = 1) -> list[Any]:
        """Start a worker's method; return a reference per return value. ``args`` may hold references."""

    def call_off_device(
        self, plan: Plan, place: Place, tasks: Sequence[Task], *columns: Any, returns: int
    ) -> list[Any]:
        """Start tasks that need no engine beside a worker; return references as its ``perform``."""

    def put(self, value: Any) -> Any:
        """Return a reference to a value that several calls are given."""

    def get(self, references: Sequence[Any]) -> list[Any]:
        """Return the values of references."""

    def wait(self, references: Sequence[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        """Return those that are ready, at least one unless ``timeout`` seconds pass, and the rest."""

    def unresponsive(self) -> dict[Place, str]:
        """Return the workers whose process or host does not run, each with the reason."""

    def close(self) -> None:
        """End every process that this started."""
