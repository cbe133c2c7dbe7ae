"""Resolve edges by name, type every column, and insert repeats and selections between domains.

prompts ──rollout, n: 8──> samples ──filter──> samples/informative
        repeat: a row                 select: the rows
        for each sample               that stay

A rollout with n: 1 makes one row per prompt: its columns of whole samples are repeated to the samples of
another rollout of the same prompts. So those of prompts made of samples are read with the samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from rlgraph.errors import GraphError, Mark, Problem, nearest
from rlgraph.frontend import domains
from rlgraph.frontend.parts import ColumnParts
from rlgraph.frontend.ports import HeldRows, declared, wanted, with_held, written
from rlgraph.frontend.shipped import writer_of
from rlgraph.frontend.token_axes import TokenAxes
from rlgraph.ir.digraph import DiGraph
from rlgraph.ir.domains import GraphDomain, ancestors
from rlgraph.ir.graph import Column, Graph, Node
from rlgraph.ops.column_types import is_made_of
from rlgraph.ops.declare import Port


def infer(graph: Graph) -> Graph:
    """Return the graph with the edges, columns and domains of every node.

    Raises:
        GraphError: two writers of a column, a column that nothing writes, a cycle, or a column of another
            dtype, domain or token axis than its reader declares.
    """
    work = Inference(graph).walk()
    if work.problems:
        raise GraphError(work.problems)
    nodes = (*(work.done[node.name] for node in graph.nodes), *work.parts.copies.values())
    notes = (*graph.notes, *work.axes.unknown.values())
    return replace(graph, nodes=nodes, columns=work.columns, domains=work.domains, notes=notes)


@dataclass
class Inference:
    """The state of one walk over the nodes, writers before readers."""

    graph: Graph
    problems: list[Problem] = field(default_factory=list)
    done: dict[str, Node] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)  # columns whose writer has a problem of its own

    def __post_init__(self) -> None:
        self.held = HeldRows.of(self.graph.nodes)
        if held := self.held.columns:
            nodes = (with_held(n, held[n.name]) if n.name in held else n for n in self.graph.nodes)
            self.graph = replace(self.graph, nodes=(*nodes,))
        self.outs = {node.name: self._outs(node) for node in self.graph.nodes}
        self.writers: dict[str, list[Node]] = {}
        self.outputs: dict[str, str] = {}  # column -> the op's name of the output that it is
        for node in self.graph.nodes:
            for output, column in self.outs[node.name].items():
                self._claim(column, node, output)
        self.ports = {node.name: dict(self._ports(node)) for node in self.graph.nodes}
        self.axes = TokenAxes(self.graph.models)
        self.parts = ColumnParts(self.axes, self.problems)
        self.columns, self.domains = self.parts.columns, self.parts.domains
        self.leaving = {node.name for node in self.graph.nodes if node.leaves}
        self.filters = {node.name for node in self.graph.nodes if node.op.declared.filters}
        self.makers = self.filters | {node.name for node in self.graph.nodes if node.op.declared.makes}
        for node in self.graph.nodes:
            others = {*node.rows} - self.makers
            self.problems += (domains.no_filter(node, name, self.filters) for name in others)

    def walk(self) -> Inference:
        """Bind every node, writers before readers."""
        for node in self.in_order():
            self.bind_node(node)
        for column in {*self.graph.report.values()} & self.parts.of.keys():
            self.parts.met(column, None)  # it is reported of all rows
        return self

    def problem(self, kind: str, law: str, mark: Mark | None, remedy: str = "", drawing: str = "") -> None:
        self.problems.append(Problem(kind, law, mark, (), remedy, drawing))

    def _outs(self, node: Node) -> dict[str, str]:
        """Return the op's name of each output -> the column that it becomes."""
        names = {port.name or node.name for port in node.op.outputs}
        for name in node.called.outs:
            if name not in names:
                law = f"`out` of node `{node.name}` names `{name}`, which op {node.op.name} does not write"
                self.problem("unknown-output", law, node.mark, nearest(name, names))
        return written(node)

    def _claim(self, column: str, node: Node, output: str) -> None:
        writers = self.writers.setdefault(column, [])
        if node in writers:
            self.problems.append(domains.two_writers(column, node, node, output))
        writers.append(node)
        self.outputs.setdefault(column, output)

    def _ports(self, node: Node) -> Iterator[tuple[str, tuple[Port, str]]]:
        """Yield each parameter that a node reads, the op's own and its hooks', with its port and column."""
        ins, known = node.called.ins, declared(node)
        for name in ins:
            if name not in known:
                law = f"`in` of node `{node.name}` names `{name}`, which op {node.op.name} does not read"
                remedy = nearest(name, known) or f"it reads {', '.join(sorted(known)) or 'nothing'}"
                self.problem("unknown-input", law, node.mark, remedy)
        for port in wanted(node):
            column = ins.get(port.name) or self._measured(node, port)
            other = all(writer.model != node.model for writer in self.writers.get(column, [node]))
            if other and port.name in node.op.declared.own and port.name not in ins:
                continue
            if column in self.writers or not port.optional or port.name in ins:
                yield port.name, (port, column)

    def _measured(self, node: Node, port: Port) -> str:
        """Return the column of a parameter's name; what an update measures by may have a name of its own."""
        if port.name in self.writers or port.name != "rollout_logprobs" or not node.trains:
            return port.name
        renamed = [column for column, output in self.outputs.items() if output == port.name]
        return renamed[0] if port.optional and len(renamed) == 1 else port.name

    def in_order(self) -> Iterator[Node]:
        """Yield writers before readers, otherwise as written. Of a circle none: it is a problem."""
        waits = {}
        for n in self.graph.nodes:
            writers = [writer for column in self._read(n) for writer in self.writers.get(column, ())]
            waits[n.name] = self.held.before(n, writers, self.graph.nodes) | {*n.rows} & self.makers
        readers = DiGraph(waits, ((need, name) for name, needs in waits.items() for need in needs))
        stuck = {*waits}
        for generation in readers.generations():
            stuck -= {*generation}
            yield from map(self.graph.node, generation)
        if stuck:
            self._cycle({name: sorted(waits[name] & stuck) for name in stuck})

    def _cycle(self, needs: Mapping[str, list[str]]) -> None:
        edges = ((name, need) for name, names in needs.items() for need in names)
        circle = DiGraph(needs, edges).cycle([min(needs)])
        law = "nodes wait for each other: " + " <- ".join([*circle, circle[0]])
        mark = self.graph.node(circle[0]).mark
        self.problem("cycle", law, mark, "a node reads only what is written before it")

    def bind_node(self, node: Node) -> None:
        """Check what one node reads, and type what it writes."""
        node = self._holding(node) if node.op.declared.holds else node
        ports, read = self.ports[node.name], self._read(node)
        missing = [column for column in read if column not in self.writers]
        for column in missing:
            self._missing(node, column)
        domain = None if missing or self.broken & {*read} else self._domain(node, ports)
        if domain and (problem := domains.without_rows(node, domain)):
            self.problems.append(problem)
        if domain is None or problem:
            self.broken.update(self.outs[node.name].values())
            return
        parts = {name: self.parts.at(column, domain.name) for name, (_, column) in ports.items()}
        reads = {name: (ports[name][0], part) for name, part in parts.items() if part}
        written_to = self._written_to(node, domain)
        streams = self.graph.schedule.stream is not None
        rows, wrong = domains.reduced(self.domains, node, written_to, self.leaving, streams)
        outs = {port: self._part(column, rows) for port, column in self.outs[node.name].items()}
        asked = [read for read in reads.values() if not _by_chance(node, read[0])]
        makers = {made.maker for made in ancestors(self.domains, domain.name)}
        self.problems += self.axes.bind(node, asked, outs, makers)
        ins = {
            # what a reduction declares with one row per group is read so
            name: self.parts.edge(
                column.name, rows if port.type.domain == rows.kind != domain.kind else domain
            )
            for name, (port, column) in reads.items()
            if self.axes.is_here(port, column)
        }
        ins = dict(sorted(ins.items(), key=lambda read: self.columns[read[1]].domain != domain.name))
        self.problems += wrong
        for port in node.op.outputs:
            column, name = outs[port.name], self.outs[node.name][port.name]
            of = domain if port.name == node.op.declared.counts else rows
            if same := self.parts.add(name, Column(column, port.type.over(of.kind), of.name, node.name)):
                self.broken.add(name)
            if same and same.writer != node.name:
                self.problems.append(domains.two_writers(name, self.graph.node(same.writer), node, port.name))
        if node.name in self.filters:
            self.parts.kept[node.name] = part = f"{written_to.name}/{node.name}"
            self.domains[part] = GraphDomain(part, written_to.kind, node.name, written_to.name, filtered=True)
        self.done[node.name] = replace(
            node,
            call=replace(node.called, ins=ins, outs=outs),
            reads=tuple(dict.fromkeys(ins.values())),
            writes=tuple(outs.values()),
            domain=written_to.name,
        )

    def _holding(self, node: Node) -> Node:
        """Return a node with the types of the columns that it holds, of those that its rows have."""
        names, held = self.held.columns[node.name], self.parts.held(node, self.held.columns[node.name])
        for name in names:
            del self.ports[node.name][name], self.outs[node.name][name]
        self.broken.update(names if not node.rows else ())
        self.ports[node.name] |= {port.name: (port, port.name) for port in held}
        self.outs[node.name] |= {port.name: port.name for port in held}
        return with_held(node, names, held)

    def _missing(self, node: Node, column: str) -> None:
        law = f"node `{node.name}` ({node.op.name}) reads column `{column}`, which nothing writes"
        remedy = writer_of(column) or nearest(column, self.writers)
        remedy = remedy or f"add a node that writes it, or map it: in: {{{column}: ...}}"
        if taken := self.graph.removed.get(column):
            law += f": node `{column}` is removed here"
        ports = [port for port, read in self.ports[node.name].values() if read == column]
        remedy += domains.NAMED_REMEDY.format(column) * any(port.type.dtype == "anything" for port in ports)
        if attribute := next(filter(None, [node.op.declared.when.get(port.name) for port in ports]), None):
            is_switch = node.op.attributes.model_fields[attribute].annotation is bool
            off = "false" if is_switch else "0"
            remedy = f"set: {{{node.name}.{attribute}: {off}}}, with which it is not read; or {remedy}"
        self.problem("missing-column", law, taken or node.edited or node.mark, remedy)

    def _domain(self, node: Node, ports: Mapping[str, tuple[Port, str]]) -> GraphDomain | None:
        """Return the domain that a node works on, the finest of its filter's and of those that it reads."""
        finest = self.parts.named(node)
        if node.rows and finest is None:
            return None

        def last(read: tuple[Port, str]) -> tuple[bool, bool, bool]:
            # a column read by chance decides nothing, nor does one of as many rows as a domain above it has
            parts = self.parts.of[read[1]]
            return _by_chance(node, read[0]), len(parts) > 1, bool(domains.as_many(self.domains, parts[0]))

        for port, name in sorted(ports.values(), key=last):
            column = self.parts.met(name, finest)
            if column is None and not _by_chance(node, port) and self.parts.is_unread(node, name, finest):
                return None
            column = column or self.parts.of[name][0]
            finer = finest is None or finest.name in domains.line(self.domains, column.domain)
            meets = finer
            if finest and domains.start(self.domains, column, finest.name):
                meets, finer = True, finer and is_made_of(self.domains[column.domain].kind, finest.kind)
            if not meets and _by_chance(node, port):
                continue
            if wrong := domains.wrong_type(node, port, column, self.domains[column.domain].kind):
                self.problems.append(wrong)
                return None
            if finest and not meets:
                reads = [(port, self.parts.of[name][0]) for port, name in ports.values()]
                asked = [column for port, column in reads if not _by_chance(node, port)]
                maker = self.graph.node(self.domains[column.domain].maker)
                self.problems.append(domains.unrelated(self.domains, node, column, finest, asked, maker))
                return None
            finest = self.domains[column.domain] if finer else finest
        finest = finest or GraphDomain("", "", node.name)
        return self.parts.routed(node, self.graph.nodes, finest) if node.route else finest

    def _read(self, node: Node) -> list[str]:
        """Return the columns that a node reads, that by which its rows are chosen among them."""
        columns = [column for _, column in self.ports[node.name].values()]
        return [*columns, node.route.by] if node.route else columns

    def _part(self, column: str, rows: GraphDomain) -> str:
        """Return the name of what a node writes: the column's, if it is alone, or that of its part."""
        return column if len(self.writers[column]) == 1 else f"{column}/{rows.maker}"

    def _written_to(self, node: Node, domain: GraphDomain) -> GraphDomain:
        """Return the domain of what a node writes: its own new one where the op makes one."""
        if node.op.declared.makes is None:
            return domain
        made = domains.made_by(node, self.domains, domain.name or None)
        self.parts.kept[node.name] = made.name
        return self.domains.setdefault(made.name, made)


def _by_chance(node: Node, port: Port) -> bool:
    """Return whether a node reads a column only because another writes that name, not because it asked."""
    return port.optional and port.name not in node.called.ins
