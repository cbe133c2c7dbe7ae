"""A user's policies for groups that wait."""

from collections.abc import Sequence

from rlgraph.ops.buffer_policy import Group


def one_young(waiting: Sequence[Group], wanted: int) -> list[int]:
    """The last of the youngest groups, alone."""
    youngest = min(group.age for group in waiting)
    assert all(group.rows == 4 and group.tokens > 24 for group in waiting) and wanted == 28
    assert [group.age for group in waiting] == sorted((group.age for group in waiting), reverse=True)
    return [max(i for i, group in enumerate(waiting) if group.age == youngest)]


def twice(waiting: Sequence[Group], wanted: int) -> list[int]:
    """The first group two times, which there is once."""
    return [0, 0]
