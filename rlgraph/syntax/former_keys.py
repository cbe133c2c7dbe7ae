"""Keys that graphs had once, and what stands for them now.

A graph that still has one is refused with the edit that takes its place. A plan or a run that was saved with
one is read as if it had been written today (see rlgraph/reports/former_plans.py).

    schedule.staleness: 1                          schedule.buffer: {staleness: 1, by: batch}
    schedule.stream: {staleness: 2, chunk: 32}     schedule.buffer: {staleness: 2, chunk: 32}
    FILTER.refill: {keep: 2, policy: my.py:name}   schedule.buffer: {staleness: 2, order: my.py:name}
    NODE: {op: replay, max_age: 4}                 NODE: {op: replay, staleness: 4}
    serve: {engine: sglang, restarts: 0}           serve: {engine: sglang, sglang: {restarts: 0}}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from rlgraph.engines.registry import SERVERS, SERVING, has_own_setting
from rlgraph.errors import Problem
from rlgraph.syntax.model_settings import ServeSettings, SharedServe
from rlgraph.syntax.source import Tree
from rlgraph.syntax.yaml_text import flow

OF_SCHEDULE = {"staleness": "schedule.buffer.staleness", "stream": "schedule.buffer"}
OF_REFILL = {"keep": "staleness", "policy": "order"}  # -> the key of `schedule.buffer`
# settings of one engine: they stood in `serve` itself before engines had sections
OF_SERVE = ServeSettings.model_fields.keys() - SharedServe.model_fields.keys()


def present_path(path: str) -> str:
    """Return the path that a former one has today; "" where it is not a former one.

    Example:
        >>> present_path("schedule.staleness"), present_path("schedule.stream.chunk")
        ('schedule.buffer.staleness', 'schedule.buffer.chunk')
    """
    section, _, path_in_section = path.partition(".")
    key, dot, further = path_in_section.partition(".")
    if section != "schedule" or key not in OF_SCHEDULE:
        return ""
    return f"{OF_SCHEDULE[key]}{dot}{further}"


def present(tree: Tree) -> tuple[Tree, list[Problem]]:
    """Return a graph without former keys, and a problem for each thing that it says by one.

    Example:
        >>> graph, problems = present(Tree.of({"schedule": {"iterations": 5, "staleness": 1}}))
        >>> graph.plain()
        {'schedule': {'iterations': 5, 'buffer': {'staleness': 1, 'by': 'batch'}}}
        >>> [problem.remedy for problem in problems]
        ['in its place set: {schedule.buffer: {staleness: 1, by: batch}}']
    """
    tree, buffer_problems = _with_buffer(tree)
    tree, replay_problems = _with_staleness_of_replay(tree)
    tree, serve_problems = _with_engine_sections(tree)
    return tree, [*buffer_problems, *replay_problems, *serve_problems]


def present_graph(graph: Mapping[str, Any]) -> dict[str, Any]:
    """Return a composed graph, as plain values, without former keys."""
    tree, problems = present(Tree.of(graph))
    return dict(tree.plain()) if problems else dict(graph)


def engine_of_setting(engine: Any, key: str) -> str:
    """Return the engine whose section has a setting: the one that is named, or else the run's servers."""
    if engine in SERVING and has_own_setting(engine, key):
        return str(engine)
    return SERVERS


def _with_buffer(tree: Tree) -> tuple[Tree, list[Problem]]:
    """Return a graph whose schedule alone says how old rows may be, with the problem if it did not."""
    former = dict(_former_places(tree))
    if not former:
        return tree, []
    buffer = _buffer(tree, former)
    names = " and ".join(f"`{name}`" for name in former)
    has_become, place = "has become", "its place"
    if len(former) > 1:
        has_become, place = "have become", "their place"
    law = f"{names} {has_become} `schedule.buffer`, the one section that says how old rows may be"
    remedy = f"in {place} set: {{schedule.buffer: {flow(buffer)}}}"
    buffer_mark = buffer.key or buffer.mark
    problem = Problem("former-key", law, buffer_mark, (), remedy)
    return _without_former_keys(tree, buffer), [problem]


def _former_places(tree: Tree) -> Iterator[tuple[str, Tree]]:
    """Yield the path and the value of each key whose place ``schedule.buffer`` has taken."""
    for key in OF_SCHEDULE:
        item = tree.find(("schedule", key))
        if item:
            yield f"schedule.{key}", item
    for name, node in _nodes(tree).items():
        for key in OF_REFILL:
            item = node.find(("refill", key))
            if item:
                yield f"{name}.refill.{key}", item


def _nodes(tree: Tree) -> dict[str, Tree]:
    nodes = tree.get("nodes")
    return nodes.items if nodes else {}


def _buffer(tree: Tree, former: Mapping[str, Tree]) -> Tree:
    """Return the buffer that says what former keys say; one without a value: rows never wait.

    Where several decided, a stream had precedence over generation that ran ahead. (A filter could keep rows
    beside the latter. No buffer says both: see docs/decisions/2026-11-28-one-buffer.md.)
    """
    place = next(iter(former.values()))
    stream = former.get("schedule.stream")
    ahead = former.get("schedule.staleness")
    items: dict[str, Tree] = {}
    if ahead and ahead.value:
        items["staleness"] = ahead
    if stream and stream.is_map:
        for key, item in stream.items.items():
            if item.value is not None:
                items[key] = item
        return Tree(items, place.mark, place.key)
    if ahead and ahead.value:
        items["by"] = Tree("batch", ahead.mark)
    else:
        items = _surplus(tree, former)
    return Tree(items or None, place.mark, place.key)


def _surplus(tree: Tree, former: Mapping[str, Tree]) -> dict[str, Tree]:
    """Return the settings of a buffer of what a filter kept and did not need; nothing where it kept none."""
    items = {}
    for path, item in former.items():
        key = path.rpartition(".")[2]
        if key in OF_REFILL and item.value:
            items[OF_REFILL[key]] = item
    if not items:
        return {}
    mark = next(iter(items.values())).mark
    items.setdefault("staleness", Tree(0, mark))
    pools = tree.get("pools")
    if pools and len(pools.items) > 1:  # generation may have one of its own, and would stream
        items["by"] = Tree("surplus", mark)
    return items


def _without_former_keys(tree: Tree, buffer: Tree) -> Tree:
    """Return a graph with a buffer in place of all former keys."""
    schedule = tree.get("schedule") or Tree({}, tree.mark)
    for key in OF_SCHEDULE:
        schedule = schedule.with_item(key, None)
    schedule = schedule.with_item("buffer", buffer if buffer.is_map else None)
    tree = tree.with_item("schedule", schedule)
    for name, node in _nodes(tree).items():
        refill = node.get("refill")
        if refill is None or OF_REFILL.keys().isdisjoint(refill.items):
            continue
        for key in OF_REFILL:
            refill = refill.with_item(key, None)
        if not refill.items:
            refill = replace(refill, value=True)  # all of the defaults
        tree = _with_node(tree, name, node.with_item("refill", refill))
    return tree


def _with_node(tree: Tree, name: str, node: Tree) -> Tree:
    return tree.with_item("nodes", tree.items["nodes"].with_item(name, node))


def _with_staleness_of_replay(tree: Tree) -> tuple[Tree, list[Problem]]:
    """Return a graph whose replays bound the age of rows by ``staleness``, with the problems of others."""
    problems = []
    for name, node in _nodes(tree).items():
        op, age = node.get("op"), node.get("max_age")
        if age is None or op is None or op.value != "replay":
            continue
        law = f"`{name}.max_age` has become `{name}.staleness`, the one word for how old rows may be"
        remedy = f"in its place set: {{{name}.staleness: {flow(age)}}}"
        problems.append(Problem("former-key", law, age.key or age.mark, (), remedy))
        node = node.with_item("max_age", None).with_item("staleness", age)
        tree = _with_node(tree, name, node)
    return tree, problems


def _with_engine_sections(tree: Tree) -> tuple[Tree, list[Problem]]:
    """Return a graph with each engine's settings in its section, and a problem for each that was not."""
    problems = []
    models = tree.get("models")
    if models is None:
        return tree, []
    for name, model in models.items.items():
        serve = model.get("serve")
        if serve is None or OF_SERVE.isdisjoint(serve.items):
            continue
        engine = serve.get("engine")
        for key, setting in serve.items.items():
            if key not in OF_SERVE:
                continue
            section_name = engine_of_setting(engine.value if engine else None, key)
            law = f"`models.{name}.serve.{key}` is a setting of {section_name} alone, "
            law += "and stands in its section"
            edit = flow({f"models.{name}.serve.{section_name}.{key}": setting.written()})
            remedy = f"in its place set: {edit}"
            problems.append(Problem("former-key", law, setting.key or setting.mark, (), remedy))
            section = serve.get(section_name) or Tree({}, setting.mark, setting.key)
            serve = serve.with_item(key, None).with_item(section_name, section.with_item(key, setting))
        models = models.with_item(name, model.with_item("serve", serve))
    if problems:
        tree = tree.with_item("models", models)
    return tree, problems
