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
from rlgraph.ir.domains import GraphDomain, Route, ancestors, origins
from rlgraph.ir.graph import Call, Column, Node
from rlgraph.ir.steps import Kind
from rlgraph.ops.declare import Port
from rlgraph.ops.registry import load

ROUTE = "rlgraph.nodes.select.route:route"  # the op of an inserted filter


@dataclass
class ColumnParts:
    """The parts of each column, by the name that the graph has for it, and what makes copies of them."""

    axes: TokenAxes
    problems: list[Problem]
    columns: dict[str, Column] = field(default_factory=dict)
    domains: dict[str, GraphDomain] = field(default_factory=dict)
    of: dict[str, list[Column]] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)  # a filter or maker -> the domain of its rows
    routes: dict[str, Route] = field(default_factory=dict)  # an inserted filter -> the rows that it keeps
    copies: dict[tuple[str, str], Node] = field(default_factory=dict)  # keys: (column, domain of the copy)

    def add(self, name: str, column: Column) -> Column | None:
        """Add a part of a column; return the other part that has some of the same rows, or another type."""
        self.columns[column.name] = column
        held = self.of.setdefault(name, [])
        held.append(column)
        other = (part for part in held[:-1] if not self.apart(part.domain, column.domain))
        return next(other, None) or next((part for part in held[:-1] if not self._alike(part, column)), None)

    def _alike(self, one: Column, other: Column) -> bool:
        """Return whether two parts of a column have one type, but for what they have one row per if held."""
        held = self.domains[one.domain].held or self.domains[other.domain].held
        return one.type == other.type or (bool(held) and one.type.over("") == other.type.over(""))

    def apart(self, one: str, other: str, fresh: bool = False) -> bool:
        """Return whether no row of one domain is one of the other's: by their routes or their makers.

        Rows that are held are others than those that come; if ``fresh``, where they may not be the same.
        """
        lines = product(*(origins(self.domains, name, fresh) for name in (one, other)))
        return all(self._apart(first, second) for first, second in lines)

    def _apart(self, first: Sequence[GraphDomain], second: Sequence[GraphDomain]) -> bool:
        routes = [[self.routes[d.maker] for d in line if d.maker in self.routes] for line in (first, second)]
        if any(route.misses(opposite) for route, opposite in product(*routes)):
            return True
        made = [next(domain for domain in line if not domain.filtered) for line in (first, second)]
        alike = made[0].kind == made[1].kind or any(domain.held for domain in made)
        return alike and made[0] not in second and made[1] not in first

    def at(self, name: str, domain: str) -> Column | None:
        """Return the column that the rows of a domain have; None where they have none, or several."""
        fit = [part for part in self.of[name] if start(self.domains, part, domain)]
        if len(fit) == 1:
            return fit[0]
        whole, union = None if fit else self.whole(name), self._union(domain)
        if whole and whole in line(self.domains, domain):
            return self._merged(name, whole)
        return self._joined(name, union) if union and not fit else None

    def met(self, name: str, finest: GraphDomain | None) -> Column | None:
        """Return the column that a node reads that has rows of a domain, or of one made of it, if any."""
        parts = self.of[name]
        if len(parts) == 1 and not (finest and self._union(finest.name)):
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

    def named(self, node: Node) -> GraphDomain | None:
        """Return the domain that `rows` of a node names: that of one maker or filter, or a union."""
        parts = {name: self.kept[name] for name in dict.fromkeys(node.rows) if name in self.kept}
        if len(parts) < 2:
            return next((self.domains[part] for part in parts.values()), None)
        kinds = {self.domains[part].kind for part in parts.values()}
        for first, second in combinations(parts, 2):
            if len(kinds) > 1 or not self.apart(parts[first], parts[second], fresh=True):
                law = f"`rows` of node `{node.name}` joins those of `{first}` and of `{second}`, "
                law += f"which are {' and '.join(sorted(kinds))}" if len(kinds) > 1 else "which share some"
                remedy = "rows that are joined are of one kind, and made by different nodes or by routes"
                if held := next((n for n in (first, second) if self.domains[parts[n]].held), ""):
                    remedy = f"let `{held}` give rows only after the iteration in which they come: "
                    remedy += f"set: {{{held}.fresh: false}}"
                self.problems.append(Problem("no-union", law, node.edited or node.mark, (), remedy))
                return None
        (kind,), name = kinds, "+".join(parts)
        maker = self.domains[next(iter(parts.values()))].maker
        made = GraphDomain(f"{kind}:{name}", kind, maker, parts=(*parts.values(),))
        return self.domains.setdefault(made.name, made)

    def held(self, node: Node, names: Sequence[str]) -> list[Port]:
        """Return ports for those of some columns that the rows have which a node is to hold."""
        domain = self.named(node)
        if domain is None and not node.rows:
            law = f"node `{node.name}` ({node.op.name}) holds rows, and does not say whose"
            remedy = f"name what makes or keeps them: {node.name}: {{..., rows: ROLLOUT}}"
            self.problems.append(Problem("no-rows", law, node.mark, (), remedy))
        parts = {n: self.at(n, domain.name) for n in names if n in self.of} if domain else {}
        return [Port(name, part.type.over(domain.kind)) for name, part in parts.items() if part and domain]

    def is_unread(self, node: Node, name: str, finest: GraphDomain | None) -> bool:
        """Return whether rows of several nodes leave a node without a column, and note why."""
        writers = " and ".join(f"`{part.writer}`" for part in self.of[name])
        if finest and (union := self._union(finest.name)):
            makers = union.name.partition(":")[2].split("+")
            pairs = zip(makers, union.parts, strict=True)
            rows = next((maker for maker, part in pairs if self.at(name, part) is None), makers[0])
            law = f"node `{node.name}` reads `{name}` of the rows of {' and of '.join(makers)}, "
            law += f"and for those of `{rows}` nothing writes it, or in another type"
            remedy = f"write it, or say what it is there: add: {{{rows}_{name}: {{op: fill, rows: {rows}, "
            remedy += f"value: 1, out: {{{rows}_{name}: {name}}}}}}}"
            self.problems.append(Problem("part-without", law, node.mark, (), remedy))
            return True
        if len(self.of[name]) == 1 or self.whole(name):
            return False
        law = f"node `{node.name}` reads `{name}`, which {writers} write, each for rows of its own"
        every = ", ".join(part.writer for part in self.of[name])
        remedy = f"say whose: rows: {self.of[name][0].writer}, or all: rows: [{every}]"
        remedy += "; or give one another name by `out`"
        self.problems.append(Problem("several-rows", law, node.mark, (), remedy))
        return True

    def edge(self, column: str, domain: GraphDomain) -> str:
        """Return the column as a node of a domain reads it: itself, or a copy made domain by domain."""
        names, first = line(self.domains, domain.name), start(self.domains, self.columns[column], domain.name)
        below = names[: names.index(str(first))]
        if not below and first != self.columns[column].domain:
            below = [domain.name]  # it has as many rows as its domain, which was made of this one
        for name in reversed(below):
            if (column, name) not in self.copies:
                self._copy(self.columns[column], self.domains[name])
            column = self.copies[column, name].writes[0]
        return column

    def routed(self, node: Node, nodes: Sequence[Node], whole: GraphDomain) -> GraphDomain | None:
        """Return the domain of the rows of a node's route, of those that it could read, if it is right."""
        route = written_out(node, nodes)
        by = self.at(route.by, whole.name) if whole.kind else None
        if wrong := unroutable(node, route, by):
            self.problems.append(Problem("no-route", wrong[0], node.mark, (), wrong[1]))
        return None if wrong or by is None else self._on(node, route, by, whole)

    def _on(self, node: Node, route: Route, by: Column, whole: GraphDomain) -> GraphDomain:
        """Return the domain of a route's rows, with a filter that the nodes of the same route share."""
        filtered = [domain for domain in self.domains.values() if domain.filtered]
        taken = {part.parent: part for part in filtered if self.routes.get(part.maker) == route}
        if whole.name in taken:
            return taken[whole.name]
        name, op = f"route:{node.name}", load(ROUTE)
        cuts = self.domains[by.domain].kind == whole.kind  # else whole groups stay
        declared = replace(op.declared, rows="each" if cuts else "group")
        port = replace(op.inputs[0], type=by.type)
        attributes = {"column": route.by, "values": [*route.values], "rest": route.rest, "taken": None}
        read = self.edge(by.name, whole)
        said = "the rest" if route.rest else ", ".join(map(str, route.values))
        self.columns[name] = Column(name, op.outputs[0].type.over(whole.kind), whole.name, name)
        self.routes[name] = route
        self.copies[name, whole.name] = Node(
            name=name,
            call=Call(
                replace(op, name=f"{route.by}: {said}", inputs=(port,), declared=declared),
                ROUTE,
                attributes,
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

    def _filtered(self, domain: str) -> list[str]:
        """Return a domain and those above it, up to the first that no filter made."""
        above = ancestors(self.domains, domain)
        filtered = [*takewhile(lambda part: part.filtered, above)]
        return [part.name for part in above[: len(filtered) + 1]]

    def _union(self, domain: str) -> GraphDomain | None:
        """Return the union that a domain is, or was made of."""
        return next((above for above in ancestors(self.domains, domain) if above.parts), None)

    def _joined(self, name: str, union: GraphDomain) -> Column | None:
        """Return a column of all rows of a union; None where those of a part have none of its type."""
        held = [column for part in union.parts if (column := self.at(name, part))]
        if len(held) < len(union.parts) or len({column.type.over("") for column in held}) > 1:
            return None
        joined = f"{name}/{union.name.partition(':')[2]}"
        if joined not in self.columns:
            pairs = zip(held, union.parts, strict=True)
            reads = [self.edge(column.name, self.domains[part]) for column, part in pairs]
            self._merge(joined, union, held, reads)
        return self.columns[joined]

    def _copy(self, column: Column, domain: GraphDomain) -> None:
        """Insert what makes a column's copy in a domain made of its own: a repeat, or a selection."""
        name = f"{column.name}/{domain.maker}" if domain.filtered else f"{column.name}*{domain.name}"
        kind = column.type.over(domain.kind)
        self.columns[name] = Column(name, kind, domain.name, name, copy_of=column.copy_of or column.name)
        because = f"its readers see only the rows that `{domain.maker}` keeps"
        if not domain.filtered:
            rises = domain.name in as_many(self.domains, column)
            above, one = (self.domains[d].kind.removesuffix("s") for d in (domain.parent or "", domain.name))
            times = "any number" if domain.most else domain.times
            because = f"`{column.name}` has one row per {above}; its readers have {times}, one per {one}"
            if rises:
                because = f"`{column.name}` is of rows made of {domain.name}, one for each"
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
