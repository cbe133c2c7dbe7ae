"""Unification of domains: which columns may meet in a node, by their types and their rows."""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace

from rlgraph.errors import Problem, nearest
from rlgraph.frontend.ports import output_columns
from rlgraph.ir.domains import GraphDomain, Route, ancestors
from rlgraph.ir.graph import Column, Node
from rlgraph.ops.column_types import ColumnType, is_made_of
from rlgraph.ops.declare import Op, Port

Domains = Mapping[str, GraphDomain]

AXIS_REMEDY = "an op between them makes one of the other: "
AXIS_REMEDY += "reward.kl_penalty spreads sample rewards over tokens"
ROW_REMEDY = "an op between them makes one number per row of those of its tokens; of numbers per token "
ROW_REMEDY += "advantage.process (in groups), advantage.gae and advantage.reinforce_pp make advantages"
# by the axis that a parameter declares: rows alone, or tokens
REMEDY_OF_AXIS = {"tokens": AXIS_REMEDY, None: ROW_REMEDY}
FILTER_REMEDY = ", or let the filter be one of prompts, which `rows` of a rollout may name"
NAMED_REMEDY = "; `columns` of a source take it from files, and {{{{{0}}}}} in a text is {{{0}}}, no column"
DTYPES = {str: "text", int: "int64", bool: "boolean"}


def lineage(domains: Domains, domain: str) -> list[str]:
    """Return the names of a domain and of those that it was made of."""
    return [ancestor.name for ancestor in ancestors(domains, domain)]


def one_to_one_ancestors(domains: Domains, column: Column) -> list[str]:
    """Return the domains above a column's that have as many rows, one for each of its own, nearest first.

    Those of a rollout with ``n: 1`` are one per prompt, and prompts that are made of samples one per sample.
    Tokens are not: those of two rollouts of a prompt are not the same.
    """
    if column.type.axis:
        return []
    names = []
    for domain in ancestors(domains, column.domain):
        changes_number = domain.times != 1 or domain.filtered or domain.most
        if changes_number:
            break
        if domain.parent:
            names.append(domain.parent)
    return names


def start(domains: Domains, column: Column, domain: str) -> str | None:
    """Return the domain from which a column's rows become those of ``domain``, copy by copy, or None.

    Its own, where ``domain`` was made of that; else the nearest above it that has as many rows.
    """
    names = lineage(domains, domain)
    for candidate in (column.domain, *one_to_one_ancestors(domains, column)):
        if candidate in names:
            return candidate
    return None


def read_as(op: Op, kind: str) -> str:
    """Return what rows of a kind are to an op: segments are samples to one that looks at each by itself.

    To an op that names segments they are those, and what compares rows or sums over them compares samples.
    """
    if kind != "segments" or op.declared.rows != "each":
        return kind
    for port in (*op.inputs, *op.outputs):
        if port.type.domain == kind:
            return kind
    return "samples"


def misfit(want: ColumnType, have: ColumnType, kind: str) -> tuple[str, str]:
    """Return the kind of problem between the type that a parameter declares and a column's, and its remedy.

    Both are empty where the types fit. ``kind`` is that of the column's rows, prompts or samples.
    """
    if want.dtype not in (have.dtype, "anything"):
        return "wrong-dtype", "map the parameter to another column by `in`"
    is_finer = is_made_of(kind, want.domain)
    if is_finer and kind == "segments":
        remedy = "let it read columns of samples; segment.align brings what it writes to their segments"
        return f"{kind}-to-{want.domain}", remedy
    if is_finer:
        remedy = f"an op that reduces groups makes {want.domain} of {kind}, such as group.mean"
        return f"{kind}-to-{want.domain}", remedy
    # a parameter along other_tokens may be along the same tokens as the others
    reads_tokens_as_others = (want.axis, have.axis) == ("other_tokens", "tokens")
    if want.axis != have.axis and not reads_tokens_as_others:
        return "wrong-axis", REMEDY_OF_AXIS.get(want.axis, "")
    if not _same_axes(want.fixed, have.fixed):
        return "wrong-axis", "the axes behind the rows and tokens are the same for both"
    return "", ""


def _same_axes(wanted_axes: Sequence[str], axes: Sequence[str]) -> bool:
    """Return whether fixed axes fit: a name that is a number on the other side stands for it."""
    if len(wanted_axes) != len(axes):
        return False
    for wanted_axis, axis in zip(wanted_axes, axes, strict=True):
        name_meets_number = wanted_axis.isdigit() != axis.isdigit()
        if wanted_axis != axis and not name_meets_number:
            return False
    return True


def wrong_type(node: Node, port: Port, column: Column, kind: str) -> Problem | None:
    """Return the problem of a column of another type than a node reads; ``kind`` is that of its rows."""
    want, have = port.type, column.type
    wrong, remedy = misfit(want, have, read_as(node.op, kind))
    if not wrong:
        return None
    law = f"node `{node.name}` ({node.op.name}) reads `{port.name}` as {want}"
    law += f"; column `{column.name}`, written by `{column.writer}`, is {have}"
    drawing = f"{column.writer}\n  └─ {column.name}: {have} ─> {node.name} reads {port.name}: {want}"
    return Problem(wrong, law, node.edited or node.mark, (), remedy, drawing)


def without_rows(node: Node, domain: GraphDomain) -> Problem | None:
    """Return the problem of a node whose op declares finer rows than the node has: samples, not prompts."""
    declared = node.op.declared
    if declared.makes is not None or node.op.copies:
        return None
    law = f"node `{node.name}` ({node.op.name})"
    if not domain.kind:
        remedy = "an op reads a column, or says which rows it `makes`"
        return Problem("no-rows", f"{law} has no rows", node.mark, (), remedy)
    finer = [port for port in node.op.inputs if is_made_of(port.type.domain, domain.kind)]
    if not finer:
        return None
    port = finer[0]
    row = domain.kind.removesuffix("s")
    law += f" reads `{port.name}` as {port.type}; all that it reads has one row per {row}"
    remedy = "read a column that a rollout wrote"
    if declared.filters:
        remedy += FILTER_REMEDY
    return Problem(f"{domain.kind}-to-{port.type.domain}", law, node.mark, (), remedy)


def made_by(node: Node, domains: Domains, parent: str | None) -> GraphDomain:
    """Return the domain that a node makes: so many rows per row of the parent, or as many as it says."""
    call = node.called
    declared = node.op.declared
    kind = str(declared.makes)
    name = f"{kind}:{node.name}" if kind in domains else kind
    times = declared.of_each
    if declared.times:
        times *= call.attributes[declared.times]
    domain = GraphDomain(name, kind, node.name, parent, times)

    if declared.holds:
        is_fresh = call.value("fresh", False)
        youngest = 0 if is_fresh else 1
        oldest = call.value("oldest", 0)
        # no row of this iteration stands above one that came in an earlier one
        return replace(domain, parent=None, held=parent or "", ages=(youngest, oldest))
    if not declared.counts:
        return domain

    most = call.value("most")
    if not isinstance(most, int):
        most = 1  # it is missing, or open
    expected = min(float(call.value("expected", most)), most)
    return replace(domain, most=most, expected=expected)


def reduced(
    domains: Domains, node: Node, domain: GraphDomain, leaving: Set[str], streams: bool
) -> tuple[GraphDomain, list[Problem]]:
    """Return the domain of what a node writes of its rows: theirs, or above it, with one row per group.

    And what is wrong with it: the op may not see whole groups, a filter may have dropped one, or one of the
    nodes ``leaving`` rows for a next round, which they do where generation ``streams``.
    """
    outputs = node.op.outputs
    kind = outputs[0].type.domain if outputs else domain.kind
    reduces = is_made_of(read_as(node.op, domain.kind), kind)
    if node.op.declared.makes or not reduces:
        return domain, []
    line = ancestors(domains, domain.name)
    domain_of_groups = next(ancestor for ancestor in line if ancestor.kind == kind)
    law = f"node `{node.name}` ({node.op.name}) returns one row for each of {kind}"
    problems = []
    for reason, remedy in _parts_of_groups(node, line, kind, leaving, streams):
        problems.append(Problem("part-of-group", f"{law}, {reason}", node.mark, (), remedy))
    return domain_of_groups, problems


def _parts_of_groups(
    node: Node, line: Sequence[GraphDomain], kind: str, leaving: Set[str], streams: bool
) -> Iterator[tuple[str, str]]:
    """Yield why a node that reduces groups of rows may see only a part of one, or nothing, with a remedy.

    ``line`` are the domains of the rows, from the finest on; ``kind`` is that of the groups.
    """
    if node.op.declared.rows != "group":
        yield "and may see a part of it", 'an op that reduces groups is declared so: @op(rows="group")'
    finer = [ancestor for ancestor in line if is_made_of(ancestor.kind, kind)]
    filtered = [ancestor for ancestor in finer if ancestor.filtered]
    may_have_no_rows = any(ancestor.most for ancestor in finer)
    kinds_read = [port.type.domain for port in node.op.inputs]
    if filtered:
        rows = filtered[0]
        reason = f"and reads the {rows.kind} that `{rows.maker}` keeps: of some there may be none"
        remedy = f"reduce before the filter: leave out `rows: {rows.maker}`; "
        remedy += "the column can be read behind it"
        yield reason, remedy
    elif may_have_no_rows and kind not in kinds_read:
        reason = f"and reads nothing of {kind}: of some there may be no {line[0].kind}"
        yield reason, f"declare a parameter of {kind}, such as count: int64[{kind}]"
    leavers = [ancestor.maker for ancestor in line if ancestor.maker in leaving]
    if leavers:
        leaver = leavers[0]
        remedy = f"replace: {{{leaver}: {{op: rollout, ...}}}}, which leaves none"
        if streams:
            remedy = "set: {schedule.buffer: null}, which leaves none"
        yield f"some of which `{leaver}` leaves for later iterations", remedy


def no_filter(node: Node, rows: str, filters: Set[str]) -> Problem:
    """Return the problem of a node whose `rows` names nothing that makes or keeps rows."""
    law = f"`rows` of node `{node.name}` names `{rows}`, which is not a filter"
    remedy = f"add one: {rows}: {{op: filter.mixed}}"
    if filters:
        remedy = nearest(rows, filters) or f"the filters are {', '.join(sorted(filters))}"
    return Problem("no-filter", law, node.mark, (), remedy)


def two_writers(column: str, writer: Node, node: Node, output: str) -> Problem:
    """Return the problem of a column that two nodes write for the same rows, ``node`` as its ``output``."""
    law = f"column `{column}` has two writers: `{writer.name}` ({writer.mark}) and `{node.name}`"
    remedy = "give one of them another name: "
    remedy += f"{node.name}: {{..., out: {{{output or node.name}: other_{column}}}}}"
    could_divide_rows = writer is not node and not node.op.source  # a source takes no `rows`
    if writer.route and node.route:
        law += ", and they may have rows in common"
        remedy = "let them go by one column, share no value of `is`, and one at most be without: the rest"
    elif could_divide_rows:
        remedy += f"; or give each its own rows: {writer.name}: {{..., rows: {{by: COLUMN, is: VALUE}}}}, "
        remedy += f"{node.name}: {{..., rows: {{by: COLUMN}}}}, the rest"
    return Problem("two-writers", law, node.mark, (), remedy)


def unrelated(
    domains: Domains, node: Node, column: Column, finest: GraphDomain, reads: Sequence[Column], maker: Node
) -> Problem:
    """Return the problem of a column whose rows, made by ``maker``, are unrelated to a node's others.

    Of ``reads``, all that the node reads, the others are of the domain ``finest``.
    """
    law = f"node `{node.name}` reads columns of unrelated domains: "
    law += f"`{column.name}` is {column.label}, others are of {finest.name}"
    remedy = "columns that meet in a node come from the same rollout or source"
    # n: 1 of the maker would do, where the columns' rows then were one to one
    with_one_row_each = {**domains, column.domain: replace(domains[column.domain], times=1)}
    times = maker.op.declared.times
    if times and start(with_one_row_each, column, finest.name):
        remedy = "of two rollouts of the same prompts, one makes one row per prompt: "
        remedy += f"set: {{{maker.name}.{times}: 1}}"
    is_of_unfiltered_rows = finest.parent in lineage(domains, column.domain)
    if finest.filtered and is_of_unfiltered_rows:
        remedy = f"`{finest.maker}` keeps {finest.kind}: let `{maker.name}` go on from those, "
        remedy += f"set: {{{maker.name}.rows: {finest.maker}}}"
    drawing = _drawing(domains, reads, node.name)
    return Problem("unrelated-domains", law, node.edited or node.mark, (), remedy, drawing)


def _drawing(domains: Domains, columns: Sequence[Column], node: str) -> str:
    """Draw the columns that meet in a node, each with the node that makes its rows."""
    rows = [f"{domains[column.domain].maker} ─ {column.name} ─┐" for column in dict.fromkeys(columns)]
    width = max(map(len, rows))
    lines = [row.rjust(width) for row in rows]
    return "\n".join([*lines, " " * (width - 1) + f"└─> {node}"])


def written_out(node: Node, nodes: Sequence[Node]) -> Route:
    """Return a node's route with its values: of the rest, those of the other routes by the same column.

    Of these, where there are any, those alone whose nodes write a column that this one writes too.
    """
    assert node.route
    route = node.route
    if route.values:
        return route
    columns = {*output_columns(node).values()}
    routes = []
    routes_of_same_column = []
    for candidate in nodes:
        if candidate.route is None or candidate.route.by != route.by:
            continue
        routes.append(candidate.route)
        shares_column = not columns.isdisjoint(output_columns(candidate).values())
        if shares_column:
            routes_of_same_column.append(candidate.route)

    values: dict[str | int | bool, None] = {}  # each once, in the order of the nodes
    for opposite in routes_of_same_column or routes:
        values.update(dict.fromkeys(opposite.values))
    return replace(route, values=tuple(values), rest=True)


def unroutable(node: Node, route: Route, by: Column | None) -> tuple[str, str] | None:
    """Return why the rows of a node can't go by the column that its route names, and a remedy, if so."""
    law = f"`rows` of node `{node.name}` goes by `{route.by}`"
    dtypes = {DTYPES[type(value)] for value in route.values}
    if not dtypes:
        law = f"`rows` of node `{node.name}` is the rest by `{route.by}`, of which no node takes a part"
        return law, f"give another node rows: {{by: {route.by}, is: VALUE}}"
    if by is None:
        return f"{law}, which its rows do not have", "name a column of its own rows, or of their prompts"
    has_one_value_per_row = not by.type.axis and not by.type.fixed
    if has_one_value_per_row and dtypes == {by.type.dtype}:
        return None
    law += f", {by.label}; its values are of {' and of '.join(sorted(dtypes))}"
    return law, "a route goes by a column of text, int64 or boolean, with values of its own type"
