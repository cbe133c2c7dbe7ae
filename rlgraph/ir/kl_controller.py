"""Adaptive KL controller of Ziegler et al. (arXiv 1909.08593, section 2.2): a number follows a KL.

    kl_coef: {adaptive: 0.1, target: 0.05, horizon: 10000}     0.1 in iteration 1, then as the KL says

    beta <- beta (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon)

n is how many samples the iteration measured the KL on. Too much KL makes it dearer, too little cheaper.
"""

import math

from rlgraph.errors import GraphError, fail
from rlgraph.records import dataclass
from rlgraph.syntax.source import OPEN, Tree

MAX_ERROR = 0.2  # the largest relative distance to the target that counts
EXAMPLE = "{adaptive: 0.1, target: 0.05, horizon: 10000}"
KEYS = ("adaptive", "target", "horizon")


@dataclass(frozen=True)
class Controller:
    """Begins with ``start``; ``metric`` says what its node records of the KL, ``target`` in the same units.

    ``horizon`` is in samples.

    Example:
        >>> beta = Controller("kl_ref", 0.1, target=0.05, horizon=1000)
        >>> round(beta.next(0.1, 0.055, 100), 6), round(beta.next(0.1, 1.0, 100), 6)
        (0.101, 0.102)
    """

    metric: str
    start: int | float
    target: int | float
    horizon: int | float

    def next(self, value: float, kl: float, samples: int) -> float:
        """Return the number of the next iteration, from this one's and the KL of so many samples.

        More samples than ``horizon`` count as that many. A KL that is not finite changes nothing.
        """
        if not math.isfinite(kl):
            return value
        error = min(max(kl / self.target - 1, -MAX_ERROR), MAX_ERROR)
        return value * (1 + error * min(samples / self.horizon, 1))

    @property
    def most(self) -> int | float:
        """Return the value that the plan is made for."""
        return self.start

    def __str__(self) -> str:
        return f"{self.start}, then adapts to {self.metric} {self.target} over {self.horizon} samples"


def read_controller(item: Tree, path: str, metric: str | None, remedy: str) -> Controller | None:
    """Return the controller that a graph describes; None while one of its numbers is open.

    ``item`` is a mapping with the key ``adaptive``, called ``path`` in the graph; ``metric`` measures the KL
    that the number weighs, None where its op does not say it of this attribute.

    Raises:
        GraphError: it is not a controller, or has no metric, for which ``remedy`` is what to do.
    """
    if metric is None:
        law = f"`{path}` can't be adaptive: nothing says which metric measures the KL that it weighs"
        raise fail("controller", law, item.key or item.mark, remedy=remedy)
    for name, value in item.items.items():
        if name not in KEYS:
            raise _wrong(f"`{path}` is adaptive, which takes no `{name}`", value)
    for name in KEYS:
        if name not in item.items:
            raise _wrong(f"`{path}` is adaptive and has no `{name}`", item)
    numbers = {name: item.items[name] for name in KEYS}
    if any(number.value == OPEN for number in numbers.values()):
        return None
    for name, number in numbers.items():
        is_positive = number.is_number and number.value > 0
        if not is_positive:
            raise _wrong(f"`{path}` is adaptive, and its `{name}` is a number above 0", number)
    return Controller(
        metric=metric,
        start=numbers["adaptive"].value,
        target=numbers["target"].value,
        horizon=numbers["horizon"].value,
    )


def _wrong(law: str, place: Tree) -> GraphError:
    return fail("controller", law, place.key or place.mark, remedy=f"as {EXAMPLE}")
