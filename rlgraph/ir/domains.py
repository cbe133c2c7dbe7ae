"""Domains: what columns have one row per, and how the rows of one come from those of another."""

from __future__ import annotations

from collections.abc import Mapping

from rlgraph.records import dataclass


@dataclass(frozen=True)
class Route:
    """The rows whose value of the column ``by`` is one of ``values``, or those whose value is none of them.

    Example:
        >>> math, rest = Route("source", ("math",)), Route("source", ("math", "code"), rest=True)
        >>> math.misses(rest), math.misses(Route("source", ("math", "web"))), rest.misses(rest)
        (True, False, False)
    """

    by: str
    values: tuple[str | int | bool, ...] = ()
    rest: bool = False

    def misses(self, other: Route) -> bool:
        """Return whether no row is on both routes, whatever its value."""
        if self.by != other.by or (self.rest and other.rest):
            return False
        values, other_values = {*self.values}, {*other.values}
        if self.rest:
            return other_values <= values
        if other.rest:
            return values <= other_values
        return values.isdisjoint(other_values)


@dataclass(frozen=True)
class GraphDomain:
    """A set of rows: ``times`` per row of the parent, some of the parent's, or those that a source makes.

    Where each row of the parent has become as many as it has, that is ``expected`` as a rule, and ``most``.
    """

    name: str
    kind: str  # prompts, samples or segments
    maker: str  # the node that makes it
    parent: str | None = None
    times: int = 1
    filtered: bool = False  # some of the parent's rows, not several for each
    parts: tuple[str, ...] = ()  # of a union, which has no parent: the domains whose rows it has
    expected: float = 0.0
    most: int = 0  # 0: there are ``times``
    held: str = ""  # the domain some of whose rows, of this and earlier iterations, they are
    ages: tuple[int, int] = (0, 0)  # of such rows, in iterations: the least and the most


def is_part(domains: Mapping[str, GraphDomain], domain: str, ancestor: str) -> bool:
    """Return whether a domain is another, or the rows of it that filters kept."""
    while domain != ancestor:
        rows = domains[domain]
        if not rows.filtered or rows.parent is None:
            return False
        domain = rows.parent
    return True


def origins(
    domains: Mapping[str, GraphDomain], domain: str | None, fresh: bool = False
) -> list[list[GraphDomain]]:
    """Return a domain's ancestors; of a union, or what was made of one, those by way of each part.

    If ``fresh``, those of held rows go on with the rows that come, where they may be of this iteration.
    """
    line = ancestors(domains, domain)
    if not line:
        return [line]
    source = line[-1]
    sources = source.parts
    may_be_of_this_iteration = bool(source.held) and source.ages[0] == 0
    if fresh and may_be_of_this_iteration:
        sources = (source.held,)
    lines = []
    for name in sources:
        for above in origins(domains, name, fresh):
            lines.append([*line, *above])
    return lines or [line]


def ancestors(domains: Mapping[str, GraphDomain], domain: str | None) -> list[GraphDomain]:
    """Return a domain and those that it was made of, up to its source."""
    line = []
    while domain:
        line.append(domains[domain])
        domain = line[-1].parent
    return line
