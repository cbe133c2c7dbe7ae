"""Columns that several nodes write, each for rows of its own; the nodes that are inserted between domains.

       ┌─ route: math ──> math_rewards ─┐ rewards                a reader of some rows gets the part
tokens ┤                                ├─> merge ─> rewards     that is theirs, a reader of all rows
       └─ the rest ─────> code_rewards ─┘ rewards                gets the parts merged, in their order
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from rlgraph.frontend.domains import line, start
from rlgraph.frontend.ports import written
from rlgraph.frontend.token_axes import TokenAxes
from rlgraph.ir.graph import Call, Column, GraphDomain, Node, Route, ancestors
from rlgraph.ir.steps import Kind
from rlgraph.ops.registry import load

ROUTE = "rlgraph.nodes.select.route:route"  # the op of an inserted filter
DTYPES = {str: "text", int: "int64", bool: "boolean"}


@dataclass
class ColumnParts:
    """The parts of each column, by the name that the graph has for it, and what makes copies of them."""

    axes: TokenAxes
    columns: dict[str, Column] = field(default_factory=dict)
    domains: dict[str, GraphDomain] = field(default_factory=dict)
    of: dict[str, list[Column]] = field(default_factory=dict)
    routes: dict[str, Route] = field(default_factory=dict)  # an inserted filter -> the rows that it keeps
    copies: dict[tuple[str, str], Node] = field(default_factory=dict)  # keys: (column, domain of the copy)

    def add(self, name: str, column: Column) -> Column | None:
        """Add a part of a column; return the other part that has some of the same rows, or another type."""
        self.columns[column.name] = column
        held = self.of.setdefault(name, [])
        held.append(column)
        parts = (part for part in held[:-1] if part.type != column.type or not self.apart(part, column))
        return next(parts, None)

    def apart(self, one: Column, other: Column) -> bool:
        """Return whether no row of one column's domain is one of the other's, by the routes to them."""
        first, second = (self._routes_to(column.domain) for column in (one, other))
        return any(route.misses(opposite) for route in first for opposite in second)

    def at(self, name: str, domain: str) -> Column | None:
        """Return the column that the rows of a domain have; None where they have none, or several."""
        fit = [part for part in self.of[name] if start(self.domains, part, domain)]
        if len(fit) == 1:
            return fit[0]
        whole = None if fit else self.whole(name)
        return self._merged(name, whole) if whole and whole in line(self.domains, domain) else None

    def met(self, name: str, finest: GraphDomain | None) -> Column | None:
        """Return the column that a node reads that has rows of a domain, or of one made of it, if any."""
        parts = self.of[name]
        if len(parts) == 1:
            return parts[0]
        if finest is None:
            made = parts
        elif column := self.at(name, finest.name):
            return column
        else:
            made = [part for part in parts if finest.name in line(self.domains, part.domain)]
        whole = self.whole(name)
        if len(made) == 1:
            return made[0]
        return self._merged(name, whole) if whole and made else None

    def whole(self, name: str) -> str | None:
        """Return the domain of which the rows of all parts of a column were filtered, if there is one."""
        lines = [self._filtered(part.domain) for part in self.of[name]]
        return next((above for above in lines[0] if all(above in other for other in lines)), None)

    def edge(self, column: str, domain: GraphDomain) -> str:
        """Return the column as a node of a domain reads it: itself, or a copy made domain by domain."""
        names, first = line(self.domains, domain.name), start(self.domains, self.columns[column], domain.name)
        for name in reversed(names[: names.index(str(first))]):
            if (column, name) not in self.copies:
                self._copy(self.columns[column], self.domains[name])
            column = self.copies[column, name].writes[0]
        return column

    def routed(self, node: Node, route: Route, by: Column, whole: GraphDomain) -> GraphDomain:
        """Return the domain of a route's rows, with a filter that the nodes of the same route share."""
        taken = {domain.parent: domain for domain in self.domains.values() if self._is_on(domain, route)}
        if whole.name in taken:
            return taken[whole.name]
        name, op = f"route:{node.name}", load(ROUTE)
        cuts = self.domains[by.domain].kind == whole.kind  # else whole groups stay
        declared = replace(op.declared, rows="each" if cuts else "group")
        port, attributes = (
            replace(op.inputs[0], type=by.type),
            {"column": route.by, "values": [*route.values]},
        )
        read = self.edge(by.name, whole)
        said = "the rest" if route.rest else ", ".join(map(str, route.values))
        self.columns[name] = Column(name, op.outputs[0].type.over(whole.kind), whole.name, name)
        self.routes[name] = route
        self.copies[name, whole.name] = Node(
            name=name,
            call=Call(
                replace(op, name=f"{route.by}: {said}", inputs=(port,), declared=declared),
                ROUTE,
                {**attributes, "rest": route.rest, "taken": None},
                ins={port.name: read},
                outs={"": name},
            ),
            reads=(read,),
            writes=(name,),
            domain=whole.name,
            mark=node.mark,
        )
        part = GraphDomain(f"{whole.name}/{name}", whole.kind, name, whole.name, filtered=True)
        self.domains[part.name] = part
        return part

    def _is_on(self, domain: GraphDomain, route: Route) -> bool:
        return self.routes.get(domain.maker) == route and domain.filtered

    def _filtered(self, domain: str) -> list[str]:
        """Return a domain and those above it, up to the first that no filter made."""
        above = ancestors(self.domains, domain)
        filtered = [*takewhile(lambda part: part.filtered, above)]
        return [part.name for part in above[: len(filtered) + 1]]

    def _routes_to(self, domain: str) -> list[Route]:
        makers = [made.maker for made in ancestors(self.domains, domain)]
        return [self.routes[maker] for maker in makers if maker in self.routes]

    def _copy(self, column: Column, domain: GraphDomain) -> None:
        """Insert what makes a column's copy in a domain made of its own: a repeat, or a selection."""
        name = f"{column.name}/{domain.maker}" if domain.filtered else f"{column.name}*{domain.name}"
        kind = column.type.over(domain.kind)
        self.columns[name] = Column(name, kind, domain.name, name, copy_of=column.copy_of or column.name)
        because = f"`{column.name}` has one row per prompt; its readers have {domain.times}, one per sample"
        if domain.filtered:
            because = f"its readers see only the rows that `{domain.maker}` keeps"
        self.copies[column.name, domain.name] = Node(
            name=name,
            kind=Kind.SELECT if domain.filtered else Kind.REPEAT,
            reads=(column.name,),
            writes=(name,),
            domain=domain.name,
            after=(domain.maker,) if domain.filtered else (),
            because=because,
        )

    def _merged(self, name: str, whole: str) -> Column:
        """Return all parts of a column in one, of the domain of which theirs are parts."""
        if name not in self.columns:
            parts = self.of[name]
            self._take_all(parts, whole)
            self._merge(name, self.domains[whole], parts, [part.name for part in parts])
        return self.columns[name]

    def _merge(self, name: str, domain: GraphDomain, parts: Sequence[Column], reads: Sequence[str]) -> None:
        """Insert the node that joins rows of several columns in the order of a domain."""
        self.columns[name] = Column(name, parts[0].type.over(domain.kind), domain.name, f"merge:{name}")
        self.axes.join(name, parts)
        filters = {made.maker for read in reads for made in self._below(self.columns[read].domain, domain)}
        writers = dict.fromkeys(f"`{part.writer}`" for part in parts)
        self.copies[name, domain.name] = Node(
            name=f"merge:{name}",
            kind=Kind.MERGE,
            reads=tuple(reads),
            writes=(name,),
            domain=domain.name,
            after=tuple(sorted(filters)),
            because=f"{' and '.join(writers)} each write it for rows of their own",
        )

    def _below(self, domain: str, whole: GraphDomain) -> list[GraphDomain]:
        """Return the domains from one up to another of which its rows are."""
        return [*takewhile(lambda made: made is not whole, ancestors(self.domains, domain))]

    def _take_all(self, parts: Sequence[Column], whole: str) -> None:
        """Let the filters of the parts refuse a value that none of them takes, unless one takes the rest."""
        makers = [self.domains[part.domain] for part in parts]
        routes = {made.maker: self.routes.get(made.maker) for made in makers if made.parent == whole}
        known = [route for route in routes.values() if route and not route.rest]
        if len(known) == len(parts) and len({route.by for route in known}) == 1:
            values = [value for route in known for value in route.values]
            for name in routes:
                node = self.copies[name, whole]
                call = replace(node.called, attributes={**node.called.attributes, "taken": values})
                self.copies[name, whole] = replace(node, call=call)


def written_out(node: Node, nodes: Sequence[Node]) -> Route:
    """Return a node's route with its values: of the rest, those of the other routes by the same column.

    Of these, where there are any, those alone whose nodes write a column that this one writes too.
    """
    assert node.route
    route, columns = node.route, {*written(node).values()}
    if route.values:
        return route
    routes = [(other, other.route) for other in nodes if other.route and other.route.by == route.by]
    beside = [(other, taken) for other, taken in routes if columns & {*written(other).values()}]
    values = (value for _, taken in beside or routes for value in taken.values)
    return replace(route, values=tuple(dict.fromkeys(values)), rest=True)


def unroutable(node: Node, route: Route, by: Column | None) -> tuple[str, str] | None:
    """Return why the rows of a node can't go by the column that its route names, and a remedy, if so."""
    law, dtypes = (
        f"`rows` of node `{node.name}` goes by `{route.by}`",
        {DTYPES[type(v)] for v in route.values},
    )
    if not dtypes:
        law = f"`rows` of node `{node.name}` is the rest by `{route.by}`, of which no node takes a part"
        return law, f"give another node rows: {{by: {route.by}, is: VALUE}}"
    if by is None:
        return f"{law}, which its rows do not have", "name a column of its own rows, or of their prompts"
    if by.type.axis or by.type.fixed or dtypes != {by.type.dtype}:
        law += f", {by.label}; its values are of {' and of '.join(sorted(dtypes))}"
        return (
            law,
            "a route goes by a column of text, int64 or boolean, with values of its own type",
        )
    return None
