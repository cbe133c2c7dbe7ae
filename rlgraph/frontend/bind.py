"""Binding: a tree and the registry become a graph, in which every name and every attribute is checked.

An evaluation is the graph once more, with the changes of ``eval``, pruned to the reported columns. All
problems are collected and raised together. Edges are not resolved here: see infer.py.
"""

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from math import lcm
from typing import Any

from rlgraph.errors import GraphError, Mark, fail, nearest, raise_problems
from rlgraph.frontend.bind_model import bind_model
from rlgraph.frontend.bind_node import bind_node, states_are_kept, with_leads
from rlgraph.frontend.bind_schedule import evaluation_times, run_length, with_buffer
from rlgraph.frontend.infer import Inference
from rlgraph.frontend.ports import columns_needed, output_columns
from rlgraph.frontend.tree_paths import SECTIONS, changed
from rlgraph.ir.graph import Graph, Model, Node
from rlgraph.laws.models import BOUND_LAWS, GROUP_SIZES
from rlgraph.laws.views import BoundView
from rlgraph.ops.declare import Port
from rlgraph.section import Section
from rlgraph.syntax.former_keys import present
from rlgraph.syntax.settings import GRAPH_NAME, Eval, Pool, Schedule
from rlgraph.syntax.source import OPEN, Tree
from rlgraph.syntax.validate import NAME, Binder, validate

OF_TRAINING = ("epochs", "stop", "best", "save_every", "record_every")  # keys of the schedule


def bind(tree: Tree, devices: int, device: str = "cpu") -> Graph:
    """Return a composed tree as a graph, edges still open.

    Args:
        tree: what ``compose`` returned.
        devices: how many devices ``auto`` stands for; 0: in each pool as many as all groups fit into.
        device: what a device is, ``cuda`` or ``cpu``: it settles data types and engines that are ``auto``.

    Raises:
        GraphError: with every problem found.
    """
    binder = Binder(removed=tree.removed)
    tree, former = present(tree)
    binder.problems += former
    _sections_known(tree, binder)

    model_sections = _section(tree, "models", binder)
    models = {}
    for name, section in model_sections.items():
        model = bind_model(name, section, device, binder)
        if model:
            models[name] = model

    node_sections = _section(tree, "nodes", binder)
    nodes = []
    for name, section in node_sections.items():
        node = bind_node(name, section, models, binder)
        if node:
            nodes.append(node)
    states_are_kept(nodes, binder)
    nodes = with_leads(nodes, node_sections, binder)

    pools = _pools(_section(tree, "pools", binder), devices, _least_devices(models), binder)
    _pools_exist(model_sections, node_sections, pools, binder)
    engines = _engine_pools(models, [*pools])
    bound = BoundView(models, nodes, model_sections, engines, pools)
    for law in BOUND_LAWS:
        binder.problems += law(bound)

    schedule = run_length(_validated(Schedule, tree, "schedule", binder), nodes, tree, binder)
    evaluation = _validated(Eval, tree, "eval", binder)
    graph = Graph(
        **_head(tree, binder),
        models=models,
        nodes=tuple(nodes),
        devices=pools,
        engines=engines,
        schedule=schedule,
        **evaluation_times(evaluation, schedule, nodes, tree, binder),
        open_values=tuple(_open_values(tree)),
        removed=tree.removed,
    )
    if binder.problems:
        # problems between nodes are reported in the same go, unless they would only follow from these
        are_ports_known = len(nodes) == len(node_sections)
        has_bad_name = any(problem.kind == "bad-name" for problem in binder.problems)
        if are_ports_known and not has_bad_name:
            binder.problems += Inference(graph).walk().problems
        raise GraphError(binder.problems)
    _next_is_written(graph, binder)
    graph = with_buffer(graph, tree, binder)
    raise_problems(binder.problems)
    return graph


def bind_evaluation(tree: Tree, devices: int, device: str = "cpu") -> Graph | None:
    """Return the graph of the ``eval`` section, or None: the nodes with their changes, and the report.

    Updates are left out, and so is a node whose columns are written by one that ``eval`` adds.

    Raises:
        GraphError: with every problem found; a change of what is not there; a report of no column.
    """
    section = tree.get("eval")
    if section is None:
        return None
    changes = section.items.get("nodes", Tree({}, section.mark)).items
    nodes = _evaluated_nodes(tree.items["nodes"], changes)
    schedule = tree.get("schedule")
    if schedule:  # an evaluation has no length, and nothing comes in it on the way
        for key in OF_TRAINING:
            schedule = schedule.with_item(key, None)
        tree = tree.with_item("schedule", schedule.with_item("iterations", Tree.of(0)))
    graph = bind(tree.with_item("nodes", nodes).with_item("eval", None), devices, device)

    remaining = _without_training(graph.nodes, changes)
    ports = {}
    for node in remaining:
        columns = output_columns(node)
        for port in node.op.outputs:
            ports[columns[port.name]] = port
    report = section.items["report"].items
    _reported_exist(report, ports)
    metrics = {name: str(column.value) for name, column in report.items()}
    if not metrics:
        return None
    return replace(graph, nodes=tuple(remaining), report=metrics)


def _evaluated_nodes(nodes: Tree, changes: Mapping[str, Tree]) -> Tree:
    """Return the nodes of a graph with the changes of ``eval``."""
    for name, change in changes.items():
        if nodes.get(name) is None and change.get("op") is None:
            law = f"`eval` changes node `{name}`, which the graph does not have"
            remedy = nearest(name, nodes.items) or "a node that only `eval` has needs an `op`"
            raise fail("edit-missing", law, change.key, nodes.items, remedy)
        nodes = nodes.with_item(name, changed(nodes.get(name), change))
    return nodes


def _without_training(nodes: Sequence[Node], changes: Mapping[str, Tree]) -> list[Node]:
    """Return an evaluation's nodes: without updates, and without what a node that ``eval`` adds replaces.

    What needs a column that only a replaced node writes is left out, too.
    """
    new_columns: set[str] = set()
    for node in nodes:
        change = changes.get(node.name)
        if change and change.get("op"):
            new_columns.update(output_columns(node).values())

    remaining = []
    lost: set[str] = set()
    for node in nodes:
        columns = {*output_columns(node).values()}
        is_named = node.name in changes  # what `eval` says of a node, it says of one that is to run
        if is_named:
            remaining.append(node)
        elif not new_columns.isdisjoint(columns):
            lost |= columns - new_columns
        elif not node.trains:
            remaining.append(node)
    return _without_readers(remaining, lost, changes)


def _without_readers(nodes: Sequence[Node], lost: Set[str], changes: Mapping[str, Tree]) -> list[Node]:
    """Return the nodes that can do without the lost columns, and those that ``eval`` names."""
    remaining = list(nodes)
    while lost:
        able = []
        lost_with_readers: set[str] = set()
        for node in remaining:
            is_reader = not lost.isdisjoint(columns_needed(node))
            if is_reader and node.name not in changes:
                lost_with_readers.update(output_columns(node).values())
            else:
                able.append(node)
        remaining = able
        lost = lost_with_readers
    return remaining


def _next_is_written(graph: Graph, binder: Binder) -> None:
    """Check that each model whose next version a node reads is updated by some node."""
    updated = {node.model for node in graph.nodes if node.updates}
    reads = [(node, "model", node.model) for node in graph.nodes if node.reads_next]
    reads += [(node, "of", node.of) for node in graph.nodes if node.of_next]
    for node, key, model in reads:
        if model in updated:
            continue
        law = f"node `{node.name}` reads `{model}@next`; no node updates `{model}`"
        binder.problem("no-next", law, node.mark, remedy=f"write `{key}: {model}`")


def _open_values(tree: Tree) -> list[str]:
    """Return the paths of values written ???, each place once; one from ``${...}`` counts at its origin."""
    paths_of: dict[Mark, list[tuple[Any, ...]]] = {}
    for path, leaf in tree.walk():
        if leaf.value == OPEN:
            paths_of.setdefault(leaf.mark, []).append(path)
    names = []
    for mark, paths in paths_of.items():
        origin = max(paths, key=partial(_line_of_owner, tree, mark))
        names.append(".".join(map(str, origin)))
    return names


def _line_of_owner(tree: Tree, mark: Mark, path: tuple[Any, ...]) -> int:
    """Return the line on which the node or model of a path begins; 0 if that is not before the mark.

    Of several paths to one place, the one whose node begins last before it is where the value was written.
    """
    owner = tree.at(path[:2]).key
    if owner is None or owner.source != mark.source:
        return 0
    return owner.line if owner.line <= mark.line else 0


def _sections_known(tree: Tree, binder: Binder) -> None:
    known = (*SECTIONS, "extends", "use", "edits")
    for name, item in tree.items.items():
        if name not in SECTIONS:
            law = f"a graph has no section `{name}`"
            binder.problem("unknown-section", law, item.key, known, nearest(name, known))
    for name in ("graph", "nodes", "schedule"):
        if tree.get(name) is None:
            binder.problem("missing-section", f"the graph has no `{name}`", tree.mark)


def _section(tree: Tree, name: str, binder: Binder) -> dict[str, Tree]:
    section = tree.get(name)
    if section is None:
        return {}
    if not section.is_map:
        binder.problem("not-a-mapping", f"`{name}` is a mapping of names", section.mark)
        return {}
    for key, item in section.items.items():
        if not NAME.match(key):
            law = f"`{key}` is not a name: letters, digits and _, not starting with a digit"
            binder.problem("bad-name", law, item.key)
    return section.items


def _head(tree: Tree, binder: Binder) -> dict[str, Any]:
    """Return the name of a graph, what it is about, and its seed."""
    name = tree.get("graph") or Tree("", tree.mark)
    is_word = isinstance(name.value, str) and re.fullmatch(GRAPH_NAME, name.value)
    if not is_word and tree.get("graph"):
        binder.problem("bad-name", "`graph` is one word: letters, digits, `_`, `-` and `.`", name.mark)
    about = tree.get("about") or Tree("", tree.mark)
    if not isinstance(about.value, str):
        binder.problem("wrong-type", "`about` is a text", about.mark)
    seed = tree.get("seed") or Tree(0, tree.mark)
    is_whole_number = seed.is_number and isinstance(seed.value, int)
    if not is_whole_number or seed.value < 0:
        binder.problem("wrong-type", "`seed` is a whole number, 0 or more", seed.mark)
    return {"name": name.value, "about": about.value, "seed": seed.value}


def _pools(sections: Mapping[str, Tree], devices: int, least: int, binder: Binder) -> dict[str, int]:
    """Return pool -> devices. Pools with ``auto`` share the devices left by the others, at least one each;
    where nobody says how many there are, they have the ``least`` each.
    """
    pools: dict[str, int] = {}
    autos = []
    for name, section in sections.items():
        pool = validate(Pool, section, f"pools.{name}", binder)
        pools[name] = 0
        if pool and isinstance(pool.devices, int):
            pools[name] = pool.devices
        else:
            autos.append(name)
    if not pools:
        pools["main"] = 0
        autos = ["main"]

    shared = least * len(autos)
    if devices:
        shared = devices - sum(pools.values())
    for place, name in enumerate(autos):
        size, remainder = divmod(shared, len(autos))
        if place < remainder:  # the first pools have one more, so that no device is left over
            size += 1
        pools[name] = max(size, 1)
    return pools


def _least_devices(models: Mapping[str, Model]) -> int:
    """Return the least devices, and at least two, that groups of every size in a graph divide."""
    sizes = [2]
    for model in models.values():
        for kind, settings in GROUP_SIZES.items():
            engine = getattr(model.spec, kind)
            sizes += [getattr(engine, setting) or 1 for setting in settings]
    return lcm(*sizes)


def _pools_exist(
    models: Mapping[str, Tree], nodes: Mapping[str, Tree], pools: Mapping[str, int], binder: Binder
) -> None:
    """Check that every pool that a node or an engine names is one of the graph's."""
    sections: dict[str, Tree | None] = {}
    for name, model in models.items():
        sections[f"{name}.train"] = model.get("train")
        sections[f"{name}.serve"] = model.get("serve")
    sections.update(nodes)
    for owner, section in sections.items():
        item = section.get("pool") if section else None
        if item is None or item.value in (None, OPEN, *pools):
            continue
        law = f"`{owner}` is to run on pool `{item.value}`, which the graph does not have"
        remedy = nearest(str(item.value), pools) or f"add it: pools.{item.value}.devices=auto"
        binder.problem("unknown-pool", law, item.mark, pools, remedy)


def _engine_pools(models: Mapping[str, Model], pools: Sequence[str]) -> dict[str, str]:
    """Return ``policy.train`` and ``policy.serve`` -> pool, for every model.

    Engines that name no pool share one to train, the first on which no engine is said to serve, and one to
    serve, the first that then is left; if none is, they are on the same.
    """
    train_pools = {name: model.spec.train.pool for name, model in models.items()}
    serve_pools = {name: model.spec.serve.pool for name, model in models.items()}
    default_train = _first_without(pools, {*serve_pools.values()}) or pools[0]
    default_serve = _first_without(pools, {default_train, *train_pools.values()}) or default_train
    engines = {}
    for name, pool in train_pools.items():
        engines[f"{name}.train"] = pool or default_train
    for name, pool in serve_pools.items():
        engines[f"{name}.serve"] = pool or default_serve
    return engines


def _first_without(pools: Sequence[str], used: Set[str | None]) -> str | None:
    """Return the first pool that is not used, if there is one."""
    for pool in pools:
        if pool not in used:
            return pool
    return None


def _validated(section: type[Section], tree: Tree, name: str, binder: Binder) -> Any:
    item = tree.get(name)
    return validate(section, item, name, binder) if item else None


def _reported_exist(report: Mapping[str, Tree], columns: Mapping[str, Port]) -> None:
    """Check that each reported column is written, and has numbers.

    Raises:
        GraphError: with every problem found.
    """
    binder = Binder()
    numeric = sorted(name for name, port in columns.items() if port.type.dtype != "text")
    for column in report.values():
        name = column.value
        if name == OPEN or name in numeric:
            continue
        port = columns.get(name) if isinstance(name, str) else None
        if port is None:
            law = f"`eval.report` names column `{name}`, which nothing writes"
            binder.problem("missing-column", law, column.mark, numeric, nearest(str(name), numeric))
        else:
            law = f"`eval.report` takes the mean of column `{name}`, which is {port.type}"
            remedy = "report numbers, such as a reward or a metric"
            binder.problem("wrong-dtype", law, column.mark, numeric, remedy)
    if binder.problems:
        raise GraphError(binder.problems)
