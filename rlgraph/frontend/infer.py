"""Resolve edges by name, type every column, and insert repeats and selections between domains.

prompts ──rollout, n: 8──> samples ──filter──> samples/informative
        repeat: a row                 select: the rows
        for each sample               that stay

A rollout with n: 1 makes one row per prompt: its columns of whole samples are repeated to the samples of
another rollout of the same prompts. So those of prompts made of samples are read with the samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rlgraph.errors import GraphError, Mark, Problem, nearest
from rlgraph.frontend import domains
from rlgraph.frontend.partitions import ColumnPartitions
from rlgraph.frontend.ports import HeldRows, input_names, input_ports, output_columns, with_held
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
    inference = Inference(graph).walk()
    if inference.problems:
        raise GraphError(inference.problems)
    nodes = [inference.bound[node.name] for node in graph.nodes]
    nodes += inference.partitions.copies.values()
    notes = (*graph.notes, *inference.axes.unknown.values())
    return replace(
        graph, nodes=tuple(nodes), columns=inference.columns, domains=inference.domains, notes=notes
    )


@dataclass
class Inference:
    """The state of one walk over the nodes, writers before readers.

    Invariants:
        - a node is in ``bound`` after all nodes whose columns it reads; one with a problem never is, and
          every column that it would write is in ``broken``;
        - ``outs`` and ``ports`` have the columns that nodes hold only once the rows are known that have them;
        - ``columns`` and ``domains`` are those of ``partitions``, which adds copies to them.
    """

    graph: Graph
    problems: list[Problem] = field(default_factory=list)
    bound: dict[str, Node] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.held_rows = HeldRows.find(self.graph.nodes)
        self.graph = self._with_held_ports(self.graph)
        nodes = self.graph.nodes
        self.outs = {node.name: self._outs(node) for node in nodes}
        self.writers: dict[str, list[Node]] = {}
        self.outputs: dict[str, str] = {}  # column -> the op's name of the output that it is
        for node in nodes:
            for output, column in self.outs[node.name].items():
                self._claim(column, node, output)
        self.ports = {node.name: dict(self._ports(node)) for node in nodes}
        self.axes = TokenAxes(self.graph.models)
        self.partitions = ColumnPartitions(self.axes, self.problems)
        self.columns, self.domains = self.partitions.columns, self.partitions.domains
        # nodes that leave rows for a next round
        self.leaving = {node.name for node in nodes if node.unfinished_columns}
        self.filters = {node.name for node in nodes if node.op.declared.filters}
        # nodes whose rows others may name: filters, and what makes rows
        self.makers = self.filters | {node.name for node in nodes if node.op.declared.makes}
        for node in nodes:
            for name in {*node.rows} - self.makers:
                self.problems.append(domains.no_filter(node, name, self.filters))

    def _with_held_ports(self, graph: Graph) -> Graph:
        """Return the graph with ports for the columns that nodes hold; their types come later."""
        nodes = []
        for node in graph.nodes:
            names = self.held_rows.columns.get(node.name)
            nodes.append(node if names is None else with_held(node, names))
        return replace(graph, nodes=tuple(nodes))

    def walk(self) -> Inference:
        """Bind every node, writers before readers."""
        for node in self.in_order():
            self.bind_node(node)
        for column in {*self.graph.report.values()} & self.partitions.by_name.keys():
            self.partitions.column_met(column, None)  # it is reported of all rows
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
        return output_columns(node)

    def _claim(self, column: str, node: Node, output: str) -> None:
        writers = self.writers.setdefault(column, [])
        if node in writers:
            self.problems.append(domains.two_writers(column, node, node, output))
        writers.append(node)
        self.outputs.setdefault(column, output)

    def _ports(self, node: Node) -> Iterator[tuple[str, tuple[Port, str]]]:
        """Yield each parameter that a node reads, the op's own and its hooks', with its port and column."""
        self._check_ins(node)
        ins = node.called.ins
        for port in input_ports(node):
            if port.name in ins:
                yield port.name, (port, ins[port.name])
                continue
            column = self._measured(node, port)
            # the experts that another model chose, say, mean nothing to this one
            is_of_own_model = port.name in node.op.declared.own
            if is_of_own_model and self._is_of_other_models(node, column):
                continue
            # a required column that nothing writes is yielded, too: binding refuses it
            is_written = column in self.writers
            if is_written or not port.optional:
                yield port.name, (port, column)

    def _check_ins(self, node: Node) -> None:
        """Note the names in ``in`` that are not parameters of a node's op or of its hooks."""
        known = input_names(node)
        for name in node.called.ins:
            if name in known:
                continue
            law = f"`in` of node `{node.name}` names `{name}`, which op {node.op.name} does not read"
            parameters = ", ".join(sorted(known)) or "nothing"
            remedy = nearest(name, known) or f"it reads {parameters}"
            self.problem("unknown-input", law, node.mark, remedy)

    def _is_of_other_models(self, node: Node, column: str) -> bool:
        """Return whether a column is written, and by nodes on other models alone."""
        writers = self.writers.get(column, [node])
        return all(writer.model != node.model for writer in writers)

    def _measured(self, node: Node, port: Port) -> str:
        """Return the column of a parameter's name; what an update measures by may have another name."""
        may_be_renamed = port.name == "rollout_logprobs" and node.trains and port.optional
        if port.name in self.writers or not may_be_renamed:
            return port.name
        renamed = [column for column, output in self.outputs.items() if output == port.name]
        return renamed[0] if len(renamed) == 1 else port.name

    def in_order(self) -> Iterator[Node]:
        """Yield writers before readers, otherwise as written. Nodes on a cycle are not: it is a problem."""
        waits_for: dict[str, set[str]] = {}
        for node in self.graph.nodes:
            writers: list[Node] = []
            for column in self._columns_read(node):
                writers += self.writers.get(column, ())
            earlier = self.held_rows.predecessors(node, writers, self.graph.nodes)
            # a node on the rows of a filter may read no column that the filter writes
            makers = {*node.rows} & self.makers
            waits_for[node.name] = {*earlier} | makers

        readers = DiGraph(waits_for)
        for name, needs in waits_for.items():
            for need in needs:
                readers.add_edge(need, name)

        stuck = {*waits_for}
        for generation in readers.generations():
            stuck -= {*generation}
            yield from map(self.graph.node, generation)
        if stuck:
            self._cycle({name: sorted(waits_for[name] & stuck) for name in stuck})

    def _cycle(self, needs: Mapping[str, list[str]]) -> None:
        """Note the nodes that wait for each other; ``needs`` are those that were never ready, by name."""
        waiting = DiGraph(needs)
        for name, names in needs.items():
            for need in names:
                waiting.add_edge(name, need)
        circle = waiting.cycle([min(needs)])
        law = "nodes wait for each other: " + " <- ".join([*circle, circle[0]])
        mark = self.graph.node(circle[0]).mark
        self.problem("cycle", law, mark, "a node reads only what is written before it")

    def bind_node(self, node: Node) -> None:
        """Check what one node reads, and type what it writes."""
        if node.op.declared.holds:
            node = self._holding(node)
        domain = self._bound_domain(node)
        if domain is None:
            # readers of its columns are passed over: each mistake is reported once, where it was made
            self.broken.update(self.outs[node.name].values())
            return
        reads = self._typed_reads(node, domain)
        written_to = self._written_to(node, domain)
        streams = self.graph.schedule.stream is not None
        rows, problems = domains.reduced(self.domains, node, written_to, self.leaving, streams)
        outs = self._partitions_written(node, rows)

        # the axes come before the parameters: of an optional column along other tokens nothing is read
        requested = [(port, column) for port, column in reads.values() if not _by_chance(node, port)]
        makers = {ancestor.maker for ancestor in ancestors(self.domains, domain.name)}
        self.problems += self.axes.bind(node, requested, outs, makers)
        ins = self._ins(reads, domain, rows)

        self.problems += problems
        self._add_outputs(node, outs, domain, rows)
        if node.name in self.filters:
            self._add_filtered(node, written_to)
        self.bound[node.name] = replace(
            node,
            call=replace(node.called, ins=ins, outs=outs),
            reads=tuple(dict.fromkeys(ins.values())),
            writes=tuple(outs.values()),
            domain=written_to.name,
        )

    def _partitions_written(self, node: Node, rows: GraphDomain) -> dict[str, str]:
        """Return the op's name of each output -> its column; of a column with several writers, their part."""
        outs = {}
        for port, column in self.outs[node.name].items():
            is_alone = len(self.writers[column]) == 1
            outs[port] = column if is_alone else f"{column}/{rows.maker}"
        return outs

    def _bound_domain(self, node: Node) -> GraphDomain | None:
        """Return the domain that a node works on; None, with the problems noted, where it has none."""
        columns = self._columns_read(node)
        missing = [column for column in columns if column not in self.writers]
        for column in missing:
            self._missing(node, column)
        reads_broken_ones = not self.broken.isdisjoint(columns)
        if missing or reads_broken_ones:
            return None
        domain = self._domain(node, self.ports[node.name])
        if domain is None:
            return None
        problem = domains.without_rows(node, domain)
        if problem:
            self.problems.append(problem)
            return None
        return domain

    def _typed_reads(self, node: Node, domain: GraphDomain) -> dict[str, tuple[Port, Column]]:
        """Return the columns that rows of a node's domain have and that it reads, by their parameters."""
        reads = {}
        for name, (port, column) in self.ports[node.name].items():
            typed = self.partitions.column_of_rows(column, domain.name)
            if typed:
                reads[name] = port, typed
        return reads

    def _ins(
        self, reads: Mapping[str, tuple[Port, Column]], domain: GraphDomain, rows: GraphDomain
    ) -> dict[str, str]:
        """Return the columns that a node reads by their parameters, those of its own domain first."""
        ins = {}
        ins_of_groups = {}
        for name, (port, column) in reads.items():
            if not self.axes.is_along_bound_tokens(port, column):
                continue
            # what a reduction declares with one row per group is read so
            is_of_groups = port.type.domain == rows.kind and rows.kind != domain.kind
            if is_of_groups:
                ins_of_groups[name] = self.partitions.read_in(column.name, rows)
            else:
                ins[name] = self.partitions.read_in(column.name, domain)
        return ins | ins_of_groups

    def _add_outputs(
        self, node: Node, outs: Mapping[str, str], domain: GraphDomain, rows: GraphDomain
    ) -> None:
        """Add the columns that a node writes, with their types, unless another node writes them."""
        for port in node.op.outputs:
            name = self.outs[node.name][port.name]
            counted = domain if port.name == node.op.declared.counts else rows
            column = Column(outs[port.name], port.type.over(counted.kind), counted.name, node.name)
            clashing = self.partitions.add(name, column)
            if clashing is None:
                continue
            self.broken.add(name)
            if clashing.writer != node.name:
                writer = self.graph.node(clashing.writer)
                self.problems.append(domains.two_writers(name, writer, node, port.name))

    def _add_filtered(self, node: Node, domain: GraphDomain) -> None:
        """Add the domain of the rows that a filter keeps."""
        name = f"{domain.name}/{node.name}"
        self.partitions.rows_of[node.name] = name
        self.domains[name] = GraphDomain(name, domain.kind, node.name, domain.name, filtered=True)

    def _holding(self, node: Node) -> Node:
        """Return a node with the types of the columns that it holds, of those that its rows have."""
        names = self.held_rows.columns[node.name]
        ports = self.partitions.ports_of_holder(node, names)
        for name in names:
            del self.ports[node.name][name]
            del self.outs[node.name][name]
        if not node.rows:
            self.broken.update(names)
        for port in ports:
            self.ports[node.name][port.name] = port, port.name
            self.outs[node.name][port.name] = port.name
        return with_held(node, names, ports)

    def _missing(self, node: Node, column: str) -> None:
        """Note that nothing writes a column that a node reads, and how it could be written or left out."""
        law = f"node `{node.name}` ({node.op.name}) reads column `{column}`, which nothing writes"
        removed = self.graph.removed.get(column)
        if removed:
            law += f": node `{column}` is removed here"

        remedy = writer_of(column, self.graph.models) or nearest(column, self.writers)
        if not remedy:
            remedy = f"add a node that writes it, or map it: in: {{{column}: ...}}"
        ports = [port for port, name in self.ports[node.name].values() if name == column]
        takes_any_type = any(port.type.dtype == "anything" for port in ports)
        if takes_any_type:  # the name may stand in a text, and not be meant as a column
            remedy += domains.NAMED_REMEDY.format(column)
        setting = self._setting_without(node, ports)
        if setting:
            remedy = f"set: {{{setting}}}, with which it is not read; or {remedy}"
        self.problem("missing-column", law, removed or node.edited or node.mark, remedy)

    def _setting_without(self, node: Node, ports: Sequence[Port]) -> str:
        """Return the setting with which a node does not read some parameters; "" where it has none."""
        for port in ports:
            switch = node.op.declared.when.get(port.name)
            if switch is not None:
                is_flag = node.op.attributes.model_fields[switch].annotation is bool
                off = "false" if is_flag else "0"
                return f"{node.name}.{switch}: {off}"
        return ""

    def _domain(self, node: Node, ports: Mapping[str, tuple[Port, str]]) -> GraphDomain | None:
        """Return the domain that a node works on, the finest of its filter's and of those that it reads."""
        finest = self.partitions.domain_named(node)
        if node.rows and finest is None:
            return None
        reads = sorted(ports.values(), key=lambda read: self._precedence(node, *read))
        for port, name in reads:
            by_chance = _by_chance(node, port)
            column = self.partitions.column_met(name, finest)
            if column is None:
                if not by_chance and self.partitions.is_unread(node, name, finest):
                    return None
                # any partition shows what is wrong with the column: none has the node's rows
                column = self.partitions.by_name[name][0]
            meets, is_finer = self._meeting(column, finest)
            if by_chance and not meets:
                continue  # the node runs without it

            problem = domains.wrong_type(node, port, column, self.domains[column.domain].kind)
            if problem is None and finest and not meets:
                problem = self._unrelated(node, column, finest, ports.values())
            if problem:
                self.problems.append(problem)
                return None
            if is_finer:
                finest = self.domains[column.domain]

        if finest is None:
            finest = GraphDomain("", "", node.name)  # of a source, which reads nothing
        if node.route:
            return self.partitions.routed(node, self.graph.nodes, finest)
        return finest

    def _precedence(self, node: Node, port: Port, name: str) -> tuple[bool, bool, bool]:
        """Return the key by which what a node reads decides its domain, the most decisive first.

        A column read by chance decides nothing, nor does one of as many rows as a domain above it has.
        """
        partitions = self.partitions.by_name[name]
        has_as_many_rows = bool(domains.one_to_one_ancestors(self.domains, partitions[0]))
        return _by_chance(node, port), len(partitions) > 1, has_as_many_rows

    def _meeting(self, column: Column, finest: GraphDomain | None) -> tuple[bool, bool]:
        """Return whether a column may meet columns of a domain, and whether its rows are the finer ones."""
        if finest is None:
            return True, True
        is_below = finest.name in domains.lineage(self.domains, column.domain)
        if domains.start(self.domains, column, finest.name):
            return True, is_below and is_made_of(self.domains[column.domain].kind, finest.kind)
        return is_below, is_below

    def _unrelated(
        self, node: Node, column: Column, finest: GraphDomain, reads: Iterable[tuple[Port, str]]
    ) -> Problem:
        requested = []
        for port, name in reads:
            if not _by_chance(node, port):
                requested.append(self.partitions.by_name[name][0])
        maker = self.graph.node(self.domains[column.domain].maker)
        return domains.unrelated(self.domains, node, column, finest, requested, maker)

    def _columns_read(self, node: Node) -> list[str]:
        """Return the columns that a node reads, that by which its rows are chosen among them."""
        columns = [column for _, column in self.ports[node.name].values()]
        if node.route:
            columns.append(node.route.by)
        return columns

    def _written_to(self, node: Node, domain: GraphDomain) -> GraphDomain:
        """Return the domain of what a node writes: its own new one where the op makes one."""
        if node.op.declared.makes is None:
            return domain
        new_domain = domains.made_by(node, self.domains, domain.name or None)
        self.partitions.rows_of[node.name] = new_domain.name
        return self.domains.setdefault(new_domain.name, new_domain)


def _by_chance(node: Node, port: Port) -> bool:
    """Return whether a node reads a column only because another writes that name, not because it asked."""
    return port.optional and port.name not in node.called.ins
