"""Buffer policies: a user's function chooses which of the waiting groups come next.

A policy is a plain function in a file beside the graph: ``buffer: {order: my_buffer.py:newest}``.

    def newest(waiting: Sequence[Group], wanted: int) -> list[int]:
        return sorted(range(len(waiting)), key=lambda i: waiting[i].age)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlgraph.errors import RunError


@dataclass(frozen=True)
class Group:
    """Waiting rows of one prompt: how many, and their tokens in all, prompts included."""

    prompt: int  # its position in the data
    age: int  # iterations since it was begun; 1 is the iteration before
    rows: int
    tokens: int


Policy = Callable[[Sequence[Group], int], Sequence[int]]


def chosen(policy: Policy, name: str, waiting: Sequence[Group], wanted: int) -> list[int]:
    """Return the places in ``waiting`` of the groups that a policy takes, in the order of their use.

    The policy, which errors call ``name``, is given the groups, oldest first, and ``wanted``, the rows that
    the iteration will have.

    Raises:
        RunError: it returned something else than distinct places.

    Example:
        >>> two = [Group(7, 2, 4, 40), Group(9, 1, 4, 80)]
        >>> chosen(lambda waiting, wanted: [1, 0], "swap", two, 8)
        [1, 0]
    """
    places = [*policy(waiting, wanted)]
    has_duplicates = len({*places}) != len(places)
    is_inside = {*places} <= {*range(len(waiting))}
    if has_duplicates or not is_inside:
        law = f"the policy {name} returned {places}; {len(waiting)} groups wait"
        raise RunError(f"{law}\n  return places among them, from 0, each at most once: those that come now")
    return places
