"""Columns that several nodes write, each for rows of its own; the nodes that are inserted between domains.

       ┌─ route: math ──> math_rewards ─┐ rewards                a reader of some rows gets the partition
tokens ┤                                ├─> merge ─> rewards     that is theirs, a reader of all rows
       └─ the rest ─────> code_rewards ─┘ rewards                gets the partitions merged, in order

What each of these nodes writes is a partition of the column ``rewards``, and a column of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product

from rlgraph.errors import Problem
from rlgraph.frontend.domains import lineage, one_to_one_ancestors, start, unroutable, written_out
from rlgraph.frontend.token_axes import TokenAxes
from rlgraph.ir.actions import Kind
from rlgraph.ir.domains import GraphDomain, Route, ancestors, origins
from rlgraph.ir.graph import Call, Column, Node
from rlgraph.ops.declare import Port
from rlgraph.ops.registry import load

ROUTE = "rlgraph.nodes.select.route:route"  # the op of an inserted filter


@dataclass
class ColumnPartitions:
    """The partitions of each column, by the name that the graph has for it, and what makes copies of them.

    Invariants:
        - every column in ``by_name`` is in ``columns``, and its domain in ``domains``;
        - no two partitions of a column have a row in common, and all have one type, or a problem is noted;
        - ``copies`` has one node per (column, domain): a copy is made once, whoever reads it.
    """

    axes: TokenAxes
    problems: list[Problem]
    columns: dict[str, Column] = field(default_factory=dict)
    domains: dict[str, GraphDomain] = field(default_factory=dict)
    by_name: dict[str, list[Column]] = field(default_factory=dict)  # the partitions of each column
    rows_of: dict[str, str] = field(default_factory=dict)  # a filter or maker -> the domain of its rows
    routes: dict[str, Route] = field(default_factory=dict)  # an inserted filter -> the rows that it keeps
    copies: dict[tuple[str, str], Node] = field(default_factory=dict)  # keys: (column, domain of the copy)

    def add(self, name: str, column: Column) -> Column | None:
        """Add a partition of a column; return a partition that has some of the same rows, or another type."""
        self.columns[column.name] = column
        partitions = self.by_name.setdefault(name, [])
        earlier = list(partitions)
        partitions.append(column)
        for partition in earlier:
            if not self.are_disjoint(partition.domain, column.domain):
                return partition
        for partition in earlier:
            if not self._same_type(partition, column):
                return partition
        return None

    def _same_type(self, column: Column, other: Column) -> bool:
        """Return whether two partitions have one type; of held rows, whatever they have one row per."""
        if column.type == other.type:
            return True
        are_held = self.domains[column.domain].held or self.domains[other.domain].held
        if not are_held:
            return False
        return column.type.over("") == other.type.over("")

    def are_disjoint(self, domain: str, other: str, fresh: bool = False) -> bool:
        """Return whether no row of one domain is one of the other's: by their routes or their makers.

        Rows that are held are others than those that come; if ``fresh``, where they may not be the same.
        """
        lines = origins(self.domains, domain, fresh)
        other_lines = origins(self.domains, other, fresh)
        return all(
            self._lines_are_disjoint(line, other_line) for line, other_line in product(lines, other_lines)
        )

    def _lines_are_disjoint(self, line: Sequence[GraphDomain], other: Sequence[GraphDomain]) -> bool:
        pairs_of_routes = product(self._routes_of(line), self._routes_of(other))
        if any(route.misses(opposite) for route, opposite in pairs_of_routes):
            return True
        rows = _unfiltered(line)
        other_rows = _unfiltered(other)
        are_held = bool(rows.held or other_rows.held)
        if rows.kind != other_rows.kind and not are_held:
            return False
        return rows not in other and other_rows not in line

    def _routes_of(self, line: Sequence[GraphDomain]) -> list[Route]:
        return [self.routes[domain.maker] for domain in line if domain.maker in self.routes]

    def column_of_rows(self, name: str, domain: str) -> Column | None:
        """Return the column that the rows of a domain have; None where they have none, or several."""
        fitting = [column for column in self.by_name[name] if start(self.domains, column, domain)]
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            return None
        merged_domain = self.merged_domain(name)
        if merged_domain and merged_domain in lineage(self.domains, domain):
            return self._merged(name, merged_domain)
        union = self._union(domain)
        if union is None:
            return None
        return self._joined(name, union)

    def column_met(self, name: str, finest: GraphDomain | None) -> Column | None:
        """Return the column that a node reads that has rows of a domain, or of one made of it, if any."""
        partitions = self.by_name[name]
        is_union = finest is not None and self._union(finest.name) is not None
        if len(partitions) == 1 and not is_union:
            return partitions[0]
        if finest is not None:
            column = self.column_of_rows(name, finest.name)
            if column:
                return column
            partitions = self._made_of(partitions, finest)
        if len(partitions) == 1:
            return partitions[0]
        merged_domain = self.merged_domain(name)
        if merged_domain is None or not partitions:
            return None
        return self._merged(name, merged_domain)

    def _made_of(self, partitions: Sequence[Column], domain: GraphDomain) -> list[Column]:
        """Return the partitions whose rows were made of those of a domain."""
        finer = []
        for partition in partitions:
            if domain.name in lineage(self.domains, partition.domain):
                finer.append(partition)
        return finer

    def merged_domain(self, name: str) -> str | None:
        """Return the domain that the rows of all partitions of a column were filtered from, if any."""
        lines = [self._filtered_from(partition.domain) for partition in self.by_name[name]]
        common = set(lines[0]).intersection(*lines[1:])
        for domain in lines[0]:
            if domain in common:
                return domain
        return None

    def domain_named(self, node: Node) -> GraphDomain | None:
        """Return the domain that `rows` of a node names: that of one maker or filter, or a union."""
        names = [name for name in dict.fromkeys(node.rows) if name in self.rows_of]
        if not names:
            return None
        example = self.domains[self.rows_of[names[0]]]
        if len(names) == 1:
            return example
        for maker, other_maker in combinations(names, 2):
            problem = self._no_union(node, maker, other_maker)
            if problem:
                self.problems.append(problem)
                return None
        name = f"{example.kind}:{'+'.join(names)}"
        domains = tuple(self.rows_of[name] for name in names)
        union = GraphDomain(name, example.kind, example.maker, parts=domains)
        return self.domains.setdefault(name, union)

    def _no_union(self, node: Node, maker: str, other_maker: str) -> Problem | None:
        """Return the problem of joining the rows of two makers, if there is one."""
        kinds = {self.domains[self.rows_of[name]].kind for name in node.rows if name in self.rows_of}
        if len(kinds) > 1:
            reason = f"which are {' and '.join(sorted(kinds))}"
        elif not self.are_disjoint(self.rows_of[maker], self.rows_of[other_maker], fresh=True):
            reason = "which share some"
        else:
            return None
        law = f"`rows` of node `{node.name}` joins those of `{maker}` and of `{other_maker}`, {reason}"
        remedy = "rows that are joined are of one kind, and made by different nodes or by routes"
        holders = [name for name in (maker, other_maker) if self.domains[self.rows_of[name]].held]
        if holders:
            remedy = f"let `{holders[0]}` give rows only after the iteration in which they come: "
            remedy += f"set: {{{holders[0]}.fresh: false}}"
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
            if name not in self.by_name:
                continue
            column = self.column_of_rows(name, domain.name)
            if column:
                ports.append(Port(name, column.type.over(domain.kind)))
        return ports

    def is_unread(self, node: Node, name: str, finest: GraphDomain | None) -> bool:
        """Return whether rows of several nodes leave a node without a column, and note why."""
        union = self._union(finest.name) if finest else None
        if union:
            self.problems.append(self._missing_in_union(node, name, union))
            return True
        partitions = self.by_name[name]
        if len(partitions) == 1 or self.merged_domain(name):
            return False
        writers = [partition.writer for partition in partitions]
        quoted = " and ".join(f"`{writer}`" for writer in writers)
        law = f"node `{node.name}` reads `{name}`, which {quoted} write, each for rows of its own"
        remedy = f"say whose: rows: {writers[0]}, or all: rows: [{', '.join(writers)}]"
        remedy += "; or give one another name by `out`"
        self.problems.append(Problem("several-rows", law, node.mark, (), remedy))
        return True

    def _missing_in_union(self, node: Node, name: str, union: GraphDomain) -> Problem:
        """Return the problem of a column that some rows of a union lack, or have in another type."""
        makers = union.name.partition(":")[2].split("+")
        rows = makers[0]
        for maker, domain in zip(makers, union.parts, strict=True):
            if self.column_of_rows(name, domain) is None:
                rows = maker
                break
        law = f"node `{node.name}` reads `{name}` of the rows of {' and of '.join(makers)}, "
        law += f"and for those of `{rows}` nothing writes it, or in another type"
        remedy = f"write it, or say what it is there: add: {{{rows}_{name}: {{op: fill, rows: {rows}, "
        remedy += f"value: 1, out: {{{rows}_{name}: {name}}}}}}}"
        return Problem("part-without", law, node.mark, (), remedy)

    def read_in(self, column: str, domain: GraphDomain) -> str:
        """Return the column as a node of a domain reads it: itself, or a copy made domain by domain."""
        names = lineage(self.domains, domain.name)
        origin = start(self.domains, self.columns[column], domain.name)
        domains_below = names[: names.index(str(origin))]
        if not domains_below and origin != self.columns[column].domain:
            domains_below = [domain.name]  # it has as many rows as its domain, which was made of this one
        for name in reversed(domains_below):
            if (column, name) not in self.copies:
                self._copy(self.columns[column], self.domains[name])
            column = self.copies[column, name].writes[0]
        return column

    def routed(self, node: Node, nodes: Sequence[Node], domain: GraphDomain) -> GraphDomain | None:
        """Return the domain of the rows of a node's route, of those that it could read, if it is right."""
        route = written_out(node, nodes)
        column = None
        if domain.kind:
            column = self.column_of_rows(route.by, domain.name)
        problem = unroutable(node, route, column)
        if problem:
            law, remedy = problem
            self.problems.append(Problem("no-route", law, node.mark, (), remedy))
            return None
        assert column, "rows go by a column that they have"
        return self._on_route(node, route, column, domain)

    def _on_route(self, node: Node, route: Route, by: Column, domain: GraphDomain) -> GraphDomain:
        """Return the domain of a route's rows, with a filter that the nodes of the same route share."""
        for maker, known_route in self.routes.items():
            if known_route == route and (maker, domain.name) in self.copies:
                return self.domains[f"{domain.name}/{maker}"]
        name = f"route:{node.name}"
        column_read = self.read_in(by.name, domain)
        self.columns[name] = Column(name, load(ROUTE).outputs[0].type.over(domain.kind), domain.name, name)
        self.routes[name] = route
        self.copies[name, domain.name] = Node(
            name=name,
            call=self._call_of_route(name, route, by, column_read, domain),
            reads=(column_read,),
            writes=(name,),
            domain=domain.name,
            mark=node.mark,
        )
        rows = GraphDomain(f"{domain.name}/{name}", domain.kind, name, domain.name, filtered=True)
        self.domains[rows.name] = rows
        return rows

    def _call_of_route(
        self, name: str, route: Route, by: Column, column_read: str, domain: GraphDomain
    ) -> Call:
        """Return the call of a route's filter, on a column of the type that its ``by`` column has."""
        op = load(ROUTE)
        has_value_per_row = self.domains[by.domain].kind == domain.kind
        # a value of the prompt keeps its samples together; one of each sample may cut groups
        declared = replace(op.declared, rows="each" if has_value_per_row else "group")
        port = replace(op.inputs[0], type=by.type)
        values = "the rest" if route.rest else ", ".join(map(str, route.values))
        op = replace(op, name=f"{route.by}: {values}", inputs=(port,), declared=declared)
        attributes = {"column": route.by, "values": [*route.values], "rest": route.rest, "taken": None}
        return Call(op, ROUTE, attributes, ins={port.name: column_read}, outs={"": name})

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
        for ancestor in ancestors(self.domains, domain):
            if ancestor.parts:
                return ancestor
        return None

    def _joined(self, name: str, union: GraphDomain) -> Column | None:
        """Return a column of all rows of a union; None where some of them have none of its type."""
        columns = []
        for domain in union.parts:
            column = self.column_of_rows(name, domain)
            if column is None:
                return None
            columns.append(column)
        types = {column.type.over("") for column in columns}
        if len(types) > 1:
            return None
        joined = f"{name}/{union.name.partition(':')[2]}"
        if joined not in self.columns:
            reads = []
            for column, domain in zip(columns, union.parts, strict=True):
                reads.append(self.read_in(column.name, self.domains[domain]))
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
        if domain.name in one_to_one_ancestors(self.domains, column):
            return f"`{column.name}` is of rows made of {domain.name}, one for each"
        parent = self.domains[domain.parent or ""].kind.removesuffix("s")
        row = domain.kind.removesuffix("s")
        times = "any number" if domain.most else domain.times
        return f"`{column.name}` has one row per {parent}; its readers have {times}, one per {row}"

    def _merged(self, name: str, domain: str) -> Column:
        """Return all partitions of a column in one, of the domain that theirs were filtered from."""
        if name not in self.columns:
            partitions = self.by_name[name]
            self._close_routes(partitions, domain)
            reads = [partition.name for partition in partitions]
            self._merge(name, self.domains[domain], partitions, reads)
        return self.columns[name]

    def _merge(self, name: str, domain: GraphDomain, columns: Sequence[Column], reads: Sequence[str]) -> None:
        """Insert the node that joins rows of several columns in the order of a domain."""
        self.columns[name] = Column(name, columns[0].type.over(domain.kind), domain.name, f"merge:{name}")
        self.axes.join(name, columns)
        filters: set[str] = set()
        for column in reads:
            for ancestor in ancestors(self.domains, self.columns[column].domain):
                if ancestor is domain:
                    break
                filters.add(ancestor.maker)
        writers = dict.fromkeys(f"`{column.writer}`" for column in columns)
        self.copies[name, domain.name] = Node(
            name=f"merge:{name}",
            kind=Kind.MERGE,
            reads=tuple(reads),
            writes=(name,),
            domain=domain.name,
            after=tuple(sorted(filters)),
            because=f"{' and '.join(writers)} each write it for rows of their own",
        )

    def _close_routes(self, partitions: Sequence[Column], domain: str) -> None:
        """Let the filters of all partitions refuse a value that none of them takes.

        Where one takes the rest, there is no such value.
        """
        filters = []
        routes = []
        for partition in partitions:
            rows = self.domains[partition.domain]
            if rows.parent != domain or rows.maker in filters:
                continue
            filters.append(rows.maker)
            route = self.routes.get(rows.maker)
            if route and not route.rest:
                routes.append(route)
        columns = {route.by for route in routes}
        are_all_by_values = len(routes) == len(partitions)
        if not are_all_by_values or len(columns) != 1:
            return
        values: list[str | int | bool] = []
        for route in routes:
            values += route.values
        for name in filters:
            node = self.copies[name, domain]
            attributes = {**node.called.attributes, "taken": values}
            self.copies[name, domain] = replace(node, call=replace(node.called, attributes=attributes))


def _unfiltered(line: Sequence[GraphDomain]) -> GraphDomain:
    """Return the rows that the filters of a line of domains chose from, as their maker gave them."""
    return next(domain for domain in line if not domain.filtered)
