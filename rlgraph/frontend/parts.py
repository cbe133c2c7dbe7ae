"""Columns that several nodes write, each for rows of its own; the nodes that are inserted between domains.

       ┌─ route: math ──> math_rewards ─┐ rewards                a reader of some rows gets the part
tokens ┤                                ├─> merge ─> rewards     that is theirs, a reader of all rows
       └─ the rest ─────> code_rewards ─┘ rewards                gets the parts merged, in their order
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product, takewhile

from rlgraph.errors import Problem
from rlgraph.frontend.domains import as_many, line, start, unroutable, written_out
from rlgraph.frontend.token_axes import TokenAxes
from rlgraph.ir.actions import Kind
from rlgraph.ir.domains import GraphDomain, Route, ancestors, origins
from rlgraph.ir.graph import Call, Column, Node
from rlgraph.ops.declare import Port
from rlgraph.ops.registry import load

ROUTE = "rlgraph.nodes.select.route:route"  # the op of an inserted filter


@dataclass
class ColumnParts:
    """The parts of each column, by the name that the graph has for it, and what makes copies of them.

    Invariants:
        - every column in ``parts`` is in ``columns``, and its domain in ``domains``;
        - no two parts of a column have a row in common, and all have one type, or a problem is noted;
        - ``copies`` has one node per (column, domain): a copy is made once, whoever reads it.
    """

    axes: TokenAxes
    problems: list[Problem]
    columns: dict[str, Column] = field(default_factory=dict)
    domains: dict[str, GraphDomain] = field(default_factory=dict)
    parts: dict[str, list[Column]] = field(default_factory=dict)  # a column's name -> what nodes write of it
    rows_of: dict[str, str] = field(default_factory=dict)  # a filter or maker -> the domain of its rows
    routes: dict[str, Route] = field(default_factory=dict)  # an inserted filter -> the rows that it keeps
    copies: dict[tuple[str, str], Node] = field(default_factory=dict)  # keys: (column, domain of the copy)

    def add(self, name: str, column: Column) -> Column | None:
        """Add a part of a column; return a part that has some of the same rows, or another type."""
        self.columns[column.name] = column
        parts = self.parts.setdefault(name, [])
        earlier = list(parts)
        parts.append(column)
        for part in earlier:
            if not self.are_disjoint(part.domain, column.domain):
                return part
        for part in earlier:
            if not self._same_type(part, column):
                return part
        return None

    def _same_type(self, column: Column, other: Column) -> bool:
        """Return whether two parts have one type; of held rows, whatever they have one row per."""
        if column.type == other.type:
            return True
        is_held = self.domains[column.domain].held or self.domains[other.domain].held
        return bool(is_held) and column.type.over("") == other.type.over("")

    def are_disjoint(self, domain: str, other: str, fresh: bool = False) -> bool:
        """Return whether no row of one domain is one of the other's: by their routes or their makers.

        Rows that are held are others than those that come; if ``fresh``, where they may not be the same.
        """
        lines = origins(self.domains, domain, fresh)
        other_lines = origins(self.domains, other, fresh)
        return all(self._lines_are_disjoint(*pair) for pair in product(lines, other_lines))

    def _lines_are_disjoint(self, line: Sequence[GraphDomain], other: Sequence[GraphDomain]) -> bool:
        for route, opposite in product(self._routes_of(line), self._routes_of(other)):
            if route.misses(opposite):
                return True
        rows = next(domain for domain in line if not domain.filtered)
        other_rows = next(domain for domain in other if not domain.filtered)
        comparable = rows.kind == other_rows.kind or bool(rows.held or other_rows.held)
        return comparable and rows not in other and other_rows not in line

    def _routes_of(self, line: Sequence[GraphDomain]) -> list[Route]:
        return [self.routes[domain.maker] for domain in line if domain.maker in self.routes]

    def column_of_rows(self, name: str, domain: str) -> Column | None:
        """Return the column that the rows of a domain have; None where they have none, or several."""
        fitting = [part for part in self.parts[name] if start(self.domains, part, domain)]
        if len(fitting) == 1:
            return fitting[0]
        merged_domain = None if fitting else self.merged_domain(name)
        if merged_domain and merged_domain in line(self.domains, domain):
            return self._merged(name, merged_domain)
        union = self._union(domain)
        return self._joined(name, union) if union and not fitting else None

    def column_met(self, name: str, finest: GraphDomain | None) -> Column | None:
        """Return the column that a node reads that has rows of a domain, or of one made of it, if any."""
        parts = self.parts[name]
        if len(parts) == 1 and not (finest and self._union(finest.name)):
            return parts[0]
        if finest is not None:
            column = self.column_of_rows(name, finest.name)
            if column:
                return column
            parts = [part for part in parts if finest.name in line(self.domains, part.domain)]
        if len(parts) == 1:
            return parts[0]
        merged_domain = self.merged_domain(name)
        return self._merged(name, merged_domain) if merged_domain and parts else None

    def merged_domain(self, name: str) -> str | None:
        """Return the domain of which the rows of all parts of a column were filtered, if there is one."""
        lines = [self._filtered_from(part.domain) for part in self.parts[name]]
        for domain in lines[0]:
            if all(domain in other for other in lines):
                return domain
        return None

    def domain_named(self, node: Node) -> GraphDomain | None:
        """Return the domain that `rows` of a node names: that of one maker or filter, or a union."""
        parts = {name: self.rows_of[name] for name in dict.fromkeys(node.rows) if name in self.rows_of}
        if not parts:
            return None
        names = list(parts)
        if len(parts) == 1:
            return self.domains[parts[names[0]]]
        for first, second in combinations(names, 2):
            problem = self._no_union(node, first, second)
            if problem:
                self.problems.append(problem)
                return None
        model = self.domains[parts[names[0]]]
        name = f"{model.kind}:{'+'.join(names)}"
        union = GraphDomain(name, model.kind, model.maker, parts=tuple(parts.values()))
        return self.domains.setdefault(name, union)

    def _no_union(self, node: Node, first: str, second: str) -> Problem | None:
        """Return the problem of two rows that a node joins and that can't be, if there is one."""
        kinds = {self.domains[self.rows_of[name]].kind for name in node.rows if name in self.rows_of}
        if len(kinds) > 1:
            reason = f"which are {' and '.join(sorted(kinds))}"
        elif not self.are_disjoint(self.rows_of[first], self.rows_of[second], fresh=True):
            reason = "which share some"
        else:
            return None
        law = f"`rows` of node `{node.name}` joins those of `{first}` and of `{second}`, {reason}"
        remedy = "rows that are joined are of one kind, and made by different nodes or by routes"
        for name in (first, second):
            if self.domains[self.rows_of[name]].held:
                remedy = f"let `{name}` give rows only after the iteration in which they come: "
                remedy += f"set: {{{name}.fresh: false}}"
                break
        return Problem("no-union", law, node.edited or node.mark, (), remedy)

    def ports_of_holder(self, node: Node, names: Sequence[str]) -> list[Port]:
        """Return ports for those of some columns that the rows have which a node is to hold."""
        domain = self.domain_named(node)
        if domain is None:
            if not node.rows:
                law = f"node `{node.name}` ({node.op.name}) holds rows, and does not say whose"
                remedy = f"name what makes or keeps them: {node.name}: {{..., rows: ROLLOUT}}"
                self.problems.append(Problem("no-rows", law, node.mark, (), remedy))
            return []
        ports = []
        for name in names:
            column = self.column_of_rows(name, domain.name) if name in self.parts else None
            if column:
                ports.append(Port(name, column.type.over(domain.kind)))
        return ports

    def is_unread(self, node: Node, name: str, finest: GraphDomain | None) -> bool:
        """Return whether rows of several nodes leave a node without a column, and note why."""
        union = self._union(finest.name) if finest else None
        if union:
            self.problems.append(self._missing_in_union(node, name, union))
            return True
        parts = self.parts[name]
        if len(parts) == 1 or self.merged_domain(name):
            return False
        writers = " and ".join(f"`{part.writer}`" for part in parts)
        law = f"node `{node.name}` reads `{name}`, which {writers} write, each for rows of its own"
        every_writer = ", ".join(part.writer for part in parts)
        remedy = f"say whose: rows: {parts[0].writer}, or all: rows: [{every_writer}]"
        remedy += "; or give one another name by `out`"
        self.problems.append(Problem("several-rows", law, node.mark, (), remedy))
        return True

    def _missing_in_union(self, node: Node, name: str, union: GraphDomain) -> Problem:
        """Return the problem of a column that a part of a union lacks, or has in another type."""
        makers = union.name.partition(":")[2].split("+")
        rows = makers[0]
        for maker, part in zip(makers, union.parts, strict=True):
            if self.column_of_rows(name, part) is None:
                rows = maker
                break
        law = f"node `{node.name}` reads `{name}` of the rows of {' and of '.join(makers)}, "
        law += f"and for those of `{rows}` nothing writes it, or in another type"
        remedy = f"write it, or say what it is there: add: {{{rows}_{name}: {{op: fill, rows: {rows}, "
        remedy += f"value: 1, out: {{{rows}_{name}: {name}}}}}}}"
        return Problem("part-without", law, node.mark, (), remedy)

    def read_in(self, column: str, domain: GraphDomain) -> str:
        """Return the column as a node of a domain reads it: itself, or a copy made domain by domain."""
        names = line(self.domains, domain.name)
        origin = start(self.domains, self.columns[column], domain.name)
        below = names[: names.index(str(origin))]
        if not below and origin != self.columns[column].domain:
            below = [domain.name]  # it has as many rows as its domain, which was made of this one
        for name in reversed(below):
            if (column, name) not in self.copies:
                self._copy(self.columns[column], self.domains[name])
            column = self.copies[column, name].writes[0]
        return column

    def routed(self, node: Node, nodes: Sequence[Node], domain: GraphDomain) -> GraphDomain | None:
        """Return the domain of the rows of a node's route, of those that it could read, if it is right."""
        route = written_out(node, nodes)
        by = self.column_of_rows(route.by, domain.name) if domain.kind else None
        problem = unroutable(node, route, by)
        if problem:
            law, remedy = problem
            self.problems.append(Problem("no-route", law, node.mark, (), remedy))
            return None
        return self._on_route(node, route, by, domain) if by else None

    def _on_route(self, node: Node, route: Route, by: Column, domain: GraphDomain) -> GraphDomain:
        """Return the domain of a route's rows, with a filter that the nodes of the same route share."""
        for part in self.domains.values():
            is_same = part.filtered and part.parent == domain.name
            if is_same and self.routes.get(part.maker) == route:
                return part
        name = f"route:{node.name}"
        op = load(ROUTE)
        cuts_groups = self.domains[by.domain].kind == domain.kind
        declared = replace(op.declared, rows="each" if cuts_groups else "group")
        port = replace(op.inputs[0], type=by.type)
        values = "the rest" if route.rest else ", ".join(map(str, route.values))
        attributes = {"column": route.by, "values": [*route.values], "rest": route.rest, "taken": None}
        read = self.read_in(by.name, domain)
        call = Call(
            replace(op, name=f"{route.by}: {values}", inputs=(port,), declared=declared),
            ROUTE,
            attributes,
            ins={port.name: read},
            outs={"": name},
        )
        self.columns[name] = Column(name, op.outputs[0].type.over(domain.kind), domain.name, name)
        self.routes[name] = route
        self.copies[name, domain.name] = Node(
            name=name, call=call, reads=(read,), writes=(name,), domain=domain.name, mark=node.mark
        )
        part = GraphDomain(f"{domain.name}/{name}", domain.kind, name, domain.name, filtered=True)
        self.domains[part.name] = part
        return part

    def _filtered_from(self, domain: str) -> list[str]:
        """Return a domain and those above it, up to the first that no filter made."""
        names = []
        for ancestor in ancestors(self.domains, domain):
            names.append(ancestor.name)
            if not ancestor.filtered:
                break
        return names

    def _union(self, domain: str) -> GraphDomain | None:
        """Return the union that a domain is, or was made of."""
        return next((above for above in ancestors(self.domains, domain) if above.parts), None)

    def _joined(self, name: str, union: GraphDomain) -> Column | None:
        """Return a column of all rows of a union; None where those of a part have none of its type."""
        columns = []
        for part in union.parts:
            column = self.column_of_rows(name, part)
            if column is None:
                return None
            columns.append(column)
        if len({column.type.over("") for column in columns}) > 1:
            return None
        joined = f"{name}/{union.name.partition(':')[2]}"
        if joined not in self.columns:
            pairs = zip(columns, union.parts, strict=True)
            reads = [self.read_in(column.name, self.domains[part]) for column, part in pairs]
            self._merge(joined, union, columns, reads)
        return self.columns[joined]

    def _copy(self, column: Column, domain: GraphDomain) -> None:
        """Insert what makes a column's copy in a domain made of its own: a repeat, or a selection."""
        if domain.filtered:
            name = f"{column.name}/{domain.maker}"
            copy = Node(
                name=name,
                kind=Kind.SELECT,
                after=(domain.maker,),
                because=f"its readers see only the rows that `{domain.maker}` keeps",
            )
        else:
            name = f"{column.name}*{domain.name}"
            copy = Node(name=name, kind=Kind.REPEAT, because=self._why_repeated(column, domain))
        self.columns[name] = Column(
            name, column.type.over(domain.kind), domain.name, name, copy_of=column.copy_of or column.name
        )
        copy = replace(copy, reads=(column.name,), writes=(name,), domain=domain.name)
        self.copies[column.name, domain.name] = copy

    def _why_repeated(self, column: Column, domain: GraphDomain) -> str:
        if domain.name in as_many(self.domains, column):
            return f"`{column.name}` is of rows made of {domain.name}, one for each"
        parent = self.domains[domain.parent or ""].kind.removesuffix("s")
        row = domain.kind.removesuffix("s")
        times = "any number" if domain.most else domain.times
        return f"`{column.name}` has one row per {parent}; its readers have {times}, one per {row}"

    def _merged(self, name: str, domain: str) -> Column:
        """Return all parts of a column in one, of the domain of which theirs are parts."""
        if name not in self.columns:
            parts = self.parts[name]
            self._close_routes(parts, domain)
            self._merge(name, self.domains[domain], parts, [part.name for part in parts])
        return self.columns[name]

    def _merge(self, name: str, domain: GraphDomain, parts: Sequence[Column], reads: Sequence[str]) -> None:
        """Insert the node that joins rows of several columns in the order of a domain."""
        self.columns[name] = Column(name, parts[0].type.over(domain.kind), domain.name, f"merge:{name}")
        self.axes.join(name, parts)
        filters: set[str] = set()
        for read in reads:
            line_of_part = ancestors(self.domains, self.columns[read].domain)
            below = takewhile(lambda ancestor: ancestor is not domain, line_of_part)
            filters |= {ancestor.maker for ancestor in below}
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

    def _close_routes(self, parts: Sequence[Column], domain: str) -> None:
        """Let the filters of the parts refuse a value that none of them takes, unless one takes the rest."""
        filters = {}  # by the order of the parts; None: a part that no route made
        for part in parts:
            rows = self.domains[part.domain]
            if rows.parent == domain:
                filters[rows.maker] = self.routes.get(rows.maker)
        routes = [route for route in filters.values() if route and not route.rest]
        if len(routes) != len(parts) or len({route.by for route in routes}) != 1:
            return
        values = [value for route in routes for value in route.values]
        for name in filters:
            node = self.copies[name, domain]
            attributes = {**node.called.attributes, "taken": values}
            self.copies[name, domain] = replace(node, call=replace(node.called, attributes=attributes))
