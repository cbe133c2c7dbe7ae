"""Tree + catalog -> graph: every name means something, every attribute has a value of its type.

All problems are collected and raised together. Edges are not resolved here: see passes/infer.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rlgraph import catalog
from rlgraph.course import Varying, op_courses, rate_course
from rlgraph.edits import SECTIONS
from rlgraph.errors import GraphError, Mark, nearest
from rlgraph.graph import Call, Graph, Model, Node
from rlgraph.nodekeys import KEYS, cadence, copied, with_columns
from rlgraph.nodes import HOOKS
from rlgraph.op import Hook, Op
from rlgraph.passes.infer import edge_problems
from rlgraph.passes.place import engine_pools
from rlgraph.ports import hooked
from rlgraph.sections import Eval, ModelSection, Pool, Refill, Schedule
from rlgraph.shipped import graphs_folder
from rlgraph.source import OPEN, Tree
from rlgraph.types import holds_paths
from rlgraph.validate import NODE_KEYS, Binder, validate

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*$")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*$")


def bind(tree: Tree, devices: int) -> Graph:
    """A composed tree as a graph, edges still open.

    Args:
        tree: what ``compose`` returned.
        devices: how many devices ``auto`` stands for.

    Raises:
        GraphError: with every problem found.
    """
    binder = Binder()
    _sections_known(tree, binder)
    binder.open_values += _open_values(tree)
    models = {n: m for n, t in _section(tree, "models", binder).items() if (m := _model(n, t, binder))}
    nodes = [
        node for n, t in _section(tree, "nodes", binder).items() if (node := _node(n, t, models, binder))
    ]
    pools = _pools(tree, devices, binder)
    _pools_exist(tree, pools, binder)
    graph = Graph(
        name=_word(tree, "graph", binder),
        about=_text(tree, "about", binder),
        seed=_seed(tree, binder),
        models=models,
        nodes=tuple(nodes),
        devices=pools,
        engines=engine_pools(models.values(), [*pools]),
        schedule=_schedule(tree, binder),
        open_values=tuple(binder.open_values),
    )
    _evaluation(tree, binder)
    if not binder.problems:
        _next_is_written(graph, binder)
    elif len(nodes) == len(_section(tree, "nodes", Binder())) and "bad-name" not in binder.kinds():
        # every node is known by its ports, so what is wrong between nodes can be said as well
        binder.problems += edge_problems(graph)
    if binder.problems:
        raise GraphError(dict.fromkeys(binder.problems))
    return graph


def _next_is_written(graph: Graph, binder: Binder) -> None:
    updated = {node.model for node in graph.nodes if node.updates}
    reads = [(node, "model", node.model) for node in graph.nodes if node.reads_next]
    reads += [(node, "of", node.of) for node in graph.nodes if node.of_next]
    for node, key, model in reads:
        if model not in updated:
            law = f"node `{node.name}` reads `{model}@next`; no node updates `{model}`"
            binder.problem("no-next", law, node.mark, remedy=f"write `{key}: {model}`")


def _open_values(tree: Tree) -> Iterable[str]:
    """Paths of values written ???, each place once: what ``${...}`` took over is given with its origin."""
    found: dict[Mark, list[tuple[Any, ...]]] = {}
    for path, leaf in tree.walk():
        if leaf.value == OPEN:
            found.setdefault(leaf.mark, []).append(path)
    return [".".join(map(str, max(paths, key=partial(_written, tree, at)))) for at, paths in found.items()]


def _written(tree: Tree, at: Mark, path: tuple[Any, ...]) -> int:
    """How near before a place the node or model of a path begins, as a line; it is written in the nearest."""
    begins = tree.at(path[:2]).key
    return begins.line if begins and begins.source == at.source and begins.line <= at.line else 0


def _sections_known(tree: Tree, binder: Binder) -> None:
    for name, item in tree.items.items():
        if name not in SECTIONS:
            law = f"a graph has no section `{name}`"
            known = (*SECTIONS, "extends", "edits")
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
            law = f"`{key}` is no name: letters, digits and _, not starting with a digit"
            binder.problem("bad-name", law, item.key)
    return section.items


def _word(tree: Tree, name: str, binder: Binder) -> str:
    item = tree.get(name)
    if item and not (isinstance(item.value, str) and re.fullmatch(r"[\w.-]+", item.value)):
        binder.problem("bad-name", f"`{name}` is one word: letters, digits, `_`, `-` and `.`", item.mark)
    return str(item.value) if item else ""


def _text(tree: Tree, name: str, binder: Binder) -> str:
    item = tree.get(name)
    if item and not isinstance(item.value, str):
        binder.problem("wrong-type", f"`{name}` is a text", item.mark)
    return str(item.value) if item else ""


def _seed(tree: Tree, binder: Binder) -> int:
    item = tree.get("seed")
    if item and (not isinstance(item.value, int) or isinstance(item.value, bool) or item.value < 0):
        binder.problem("wrong-type", "`seed` is a whole number, 0 or more", item.mark)
        return 0
    return int(item.value) if item else 0


def _model(name: str, tree: Tree, binder: Binder) -> Model | None:
    tree, rate = rate_course(tree, f"models.{name}", binder)
    spec = validate(ModelSection, tree, f"models.{name}", binder)
    if spec is None:
        binder.broken.add(name)
        return None
    if not spec.frozen and spec.optimizer is None:
        law = f"model `{name}` has no optimizer, so it can't be trained"
        remedy = "give it `optimizer: {lr: 1e-6}`, or `frozen: true` if it is only read"
        binder.problem("no-optimizer", law, tree.key, remedy=remedy)
    if spec.serve.engine == "transformers" and spec.serve.tensor_parallel > 1:
        law = f"model `{name}`: the engine transformers is on one device; tensor_parallel is for sglang"
        remedy = f"set: {{models.{name}.serve.engine: sglang}}, or leave out tensor_parallel"
        binder.problem("tensor-parallel", law, tree.key, remedy=remedy)
    if spec.serve.addresses and (spec.serve.engine == "transformers" or spec.serve.tensor_parallel > 1):
        what = "the engine transformers is embedded" if spec.serve.engine == "transformers" else "they have"
        what += "" if spec.serve.engine == "transformers" else " a tensor_parallel of their own"
        law = f"model `{name}`: addresses are of SGLang servers; {what}"
        remedy = f"set: {{models.{name}.serve.engine: sglang}}, and leave out tensor_parallel"
        binder.problem("addresses", law, tree.key, remedy=remedy)
    mark = tree.items["path"].mark
    path = resolved(spec.path, mark)
    if HUB_ID.match(spec.path) and not os.path.exists(path):
        path = spec.path
    return Model(name, path, spec, tree.key or tree.mark, mark, rate)


def _pools(tree: Tree, devices: int, binder: Binder) -> dict[str, int]:
    """Pool -> devices. Those that say ``auto`` share what the others leave, and have one at least."""
    found = {n: validate(Pool, t, f"pools.{n}", binder) for n, t in _section(tree, "pools", binder).items()}
    asked = {n: pool.devices if pool else "auto" for n, pool in found.items()} or {"main": "auto"}
    fixed = {name: size for name, size in asked.items() if isinstance(size, int)}
    autos = [name for name in asked if name not in fixed]
    left = devices - sum(fixed.values())
    shares = {name: left // len(autos) + (at < left % len(autos)) for at, name in enumerate(autos)}
    return {name: fixed[name] if name in fixed else max(shares[name], 1) for name in asked}


def _pools_exist(tree: Tree, pools: Mapping[str, int], binder: Binder) -> None:
    """Every pool that a node or an engine names is one of the graph's."""
    engines = [
        (f"{name}.{engine}", section)
        for name, model in _section(tree, "models", Binder()).items()
        for engine in ("train", "serve")
        if (section := model.get(engine)) and section.is_map
    ]
    nodes = [item for item in _section(tree, "nodes", Binder()).items() if item[1].is_map]
    for owner, section in (*engines, *nodes):
        item = section.get("pool")
        if item and item.value not in (None, OPEN, *pools):
            law = f"`{owner}` is to run on pool `{item.value}`, which the graph does not have"
            remedy = nearest(str(item.value), pools) or f"add it: pools.{item.value}.devices=auto"
            binder.problem("unknown-pool", law, item.mark, pools, remedy)


def _schedule(tree: Tree, binder: Binder) -> Schedule:
    item = tree.get("schedule")
    spec = validate(Schedule, item, "schedule", binder) if item else None
    return spec or Schedule(iterations=0)


def _evaluation(tree: Tree, binder: Binder) -> None:
    item = tree.get("eval")
    if item:
        validate(Eval, item, "eval", binder)


def _node(name: str, tree: Tree, models: Mapping[str, Model], binder: Binder) -> Node | None:
    named = tree.get("op")
    if not tree.is_map or named is None or not isinstance(named.value, str):
        law = f"node `{name}` does not say what it is"
        binder.problem(
            "no-op", law, tree.key or tree.mark, remedy=f"{name}: {{op: ...}}; see `rlgraph nodes`"
        )
        return None
    call = _function(named.value, named.mark, catalog.find_op, binder)
    if call is None:
        return None
    op, target = call
    hooks = {n: h for n, kind, item in hooked(op, tree) if (h := _hook(f"{name}.{n}", kind, item, binder))}
    attributes, courses = _attributes(name, tree, op, binder)
    op = with_columns(name, op, attributes, tree, binder)
    model, reads_next = _node_model(name, tree, op, models, binder)
    of, of_next = copied(name, tree, op, models.get(model or ""), models, binder)
    return Node(
        name=name,
        call=Call(op, target, attributes, _names(tree, "in", binder), _names(tree, "out", binder), courses),
        hooks=hooks,
        model=model,
        reads_next=reads_next,
        of=of,
        of_next=of_next,
        tokenizer=_tokenizer(name, tree, op, models, binder),
        rows=_rows(name, tree, op, binder),
        refill=_refill(name, tree, op, binder),
        pool=_node_pool(name, tree, op, binder),
        when=cadence(name, tree, op, binder),
        mark=tree.key or tree.mark,
    )


def _rows(name: str, tree: Tree, op: Op, binder: Binder) -> str | None:
    """The filter that `rows` names; that there is one by this name is checked where domains are inferred."""
    item = tree.get("rows")
    if item is None or item.value == OPEN:
        return None
    if not isinstance(item.value, str):
        binder.problem("wrong-type", f"`rows` of node `{name}` names a filter", item.mark)
        return None
    if op.source:
        binder.problem(
            "rows-of-a-source", f"op {op.name} makes its own rows", item.key, remedy="remove `rows`"
        )
    return item.value


def _refill(name: str, tree: Tree, op: Op, binder: Binder) -> Refill | None:
    """How a filter gets more rows: `true` is by the defaults."""
    item = tree.get("refill")
    if item is None or item.value in (None, OPEN, False):
        return None
    if not op.declared.filters:
        law = f"`refill` of node `{name}`: op {op.name} is no filter"
        binder.problem("refill-of-no-filter", law, item.key, remedy="remove `refill`")
        return None
    if item.value is True:
        return Refill()
    found: Refill | None = validate(Refill, item, f"{name}.refill", binder)
    if found is None or found.policy in (None, OPEN):
        return found
    return found.model_copy(update={"policy": _policy(found.policy, item.items["policy"].mark, binder)})


def _policy(name: str, mark: Mark, binder: Binder) -> str | None:
    try:
        return catalog.find_function(name, "policy", mark)
    except GraphError as error:
        binder.problems += error.problems
        return None


def _node_pool(name: str, tree: Tree, op: Op, binder: Binder) -> str:
    """The pool that a node asks for; one on a model runs where the model's engine is."""
    item = tree.get("pool")
    if item is None or item.value in (None, OPEN):
        return ""
    if op.engine:
        law = f"node `{name}` runs where its model's {op.engine} engine is"
        model = str(tree.items["model"].value) if tree.get("model") else "MODEL"
        remedy = f"place the engine: models.{model.partition('@')[0]}.{op.engine}.pool={item.value}"
        binder.problem("pool-of-engine", law, item.key, remedy=remedy)
    return str(item.value)


def _function(
    name: str, mark: Mark, find: Callable[[str, Mark], tuple[Op, str]], binder: Binder
) -> tuple[Op, str] | None:
    try:
        return find(name, mark)
    except GraphError as error:
        binder.problems += error.problems
        return None


def _attributes(name: str, tree: Tree, op: Op, binder: Binder) -> tuple[dict[str, Any], dict[str, Varying]]:
    """Every attribute's value, and the courses of those that change over the iterations."""
    rest = replace(tree, value={n: t for n, t in tree.items.items() if n not in NODE_KEYS})
    keys: tuple[str, ...]
    keys = ("model", "in", "out", "rows") if op.engine else ("in", "out", "rows", "pool")
    keys += ("model",) if op.declared.recorded else ()
    keys += KEYS if not op.outputs else ()
    keys += ("of",) if op.copies else ()
    keys += ("refill",) if op.declared.filters else ()
    rest, courses = op_courses(op, rest, name, binder, f"op {op.name}")
    values = validate(op.attributes, rest, name, binder, f"op {op.name}", keys)
    if values is None:
        return {
            n: None if spec.is_required() else spec.get_default()
            for n, spec in op.attributes.model_fields.items()
        }, {}
    found = {n: getattr(values, n) for n in op.attributes.model_fields if n not in op.hooks}
    return found | _paths(op, rest), courses


def _paths(op: Op, tree: Tree) -> dict[str, Any]:
    """The attributes given as paths, relative to the file that they stand in."""
    fields = op.attributes.model_fields.items()
    named = [attribute for attribute, spec in fields if holds_paths(spec.annotation, *spec.metadata)]
    return {name: _resolved_tree(given) for name in named if (given := tree.get(name))}


def _hook(path: str, hook: type[Hook], tree: Tree, binder: Binder) -> Call | None:
    kind = tree.get("kind")
    if not tree.is_map or (kind and kind.value == OPEN):
        return None
    if kind is None or not isinstance(kind.value, str):
        binder.problem(
            "no-kind",
            f"`{path}` does not say its `kind`",
            tree.key or tree.mark,
            remedy=f"as {{kind: {next(iter(HOOKS[hook.word]))}}}",
        )
        return None
    found = _function(kind.value, kind.mark, partial(catalog.find_hook, hook), binder)
    if found is None:
        return None
    op, target = found
    rest = replace(tree, value={n: t for n, t in tree.items.items() if n != "kind"})
    rest, courses = op_courses(op, rest, path, binder, f"{hook.word} {op.name}")
    values = validate(op.attributes, rest, path, binder, f"{hook.word} {op.name}")
    if values is None:
        return Call(op, target, {})
    attributes = {n: getattr(values, n) for n in op.attributes.model_fields} | _paths(op, rest)
    return Call(op, target, attributes, courses=courses)


def _names(tree: Tree, key: str, binder: Binder) -> dict[str, str]:
    item = tree.get(key)
    if item is None:
        return {}
    if not item.is_map or not all(isinstance(child.value, str) for child in item.items.values()):
        binder.problem(
            "wrong-type", f"`{key}` maps the op's names to columns, as {{rewards: shaped}}", item.mark
        )
        return {}
    for child in item.items.values():
        if not NAME.match(child.value):
            law = f"`{child.value}` is no name: letters, digits and _, not starting with a digit"
            binder.problem("bad-name", law, child.mark)
    return {name: child.value for name, child in item.items.items()}


def _node_model(
    name: str, tree: Tree, op: Op, models: Mapping[str, Model], binder: Binder
) -> tuple[str | None, bool]:
    item = tree.get("model")
    if op.engine is None and not op.declared.recorded:
        if item:
            binder.problem("model-unused", f"op {op.name} reads no model", item.key, remedy="remove `model`")
        return None, False
    if item is None or not isinstance(item.value, str):
        law = f"node `{name}` does not say which model it runs (op {op.name})"
        binder.problem("no-model", law, tree.key or tree.mark, models, "add `model: NAME`")
        return None, False
    model, _, at = item.value.partition("@")
    if item.value == OPEN or model in binder.broken:
        return None, False
    if model not in models or at not in ("", "next"):
        law = f"there is no model `{item.value}`"
        binder.problem("unknown-model", law, item.mark, models, nearest(model, models))
        return None, False
    _model_fits(name, op, models[model], item.mark, binder)
    return model, at == "next"


def _model_fits(name: str, op: Op, model: Model, mark: Mark, binder: Binder) -> None:
    if op.declared.head not in ("any", model.spec.head):
        law = f"op {op.name} needs a `{op.declared.head}` head; model `{model.name}` has `{model.spec.head}`"
        remedy = f"give models.{model.name} `head: {op.declared.head}`, or name a model that has one"
        binder.problem("wrong-head", law, mark, remedy=remedy)
    if op.declared.updates and model.spec.frozen and not op.copies:
        law = f"node `{name}` updates model `{model.name}`, which is frozen"
        binder.problem("frozen", law, mark, remedy=f"remove `frozen: true` from models.{model.name}")


def _tokenizer(name: str, tree: Tree, op: Op, models: Mapping[str, Model], binder: Binder) -> str | None:
    item = tree.get("tokenizer")
    if "tokenizer" not in op.handles.values():
        if item:
            law = f"op {op.name} reads no tokenizer"
            binder.problem("tokenizer-unused", law, item.key, remedy="remove `tokenizer`")
        return None
    if item and str(item.value) in models:
        return str(item.value)
    readers = [m for m in models.values() if m.spec.head == "lm"]
    natural = [m.name for m in readers if not m.spec.frozen] or [m.name for m in readers]
    if item is None and len(natural) == 1:
        return natural[0]
    if binder.broken or (item and item.value == OPEN):
        return None
    law = f"node `{name}` needs the tokenizer of one model" + (
        f"; there is no `{item.value}`" if item else ""
    )
    binder.problem("no-tokenizer", law, item.mark if item else tree.key, models, "add `tokenizer: MODEL`")
    return None


def _resolved_tree(tree: Tree) -> Any:
    if isinstance(tree.value, list):
        return [_resolved_tree(child) for child in tree.value]
    if tree.is_map:
        return {name: _resolved_tree(child) for name, child in tree.items.items()}
    return resolved(tree.value, tree.mark) if isinstance(tree.value, str) else tree.plain()


def resolved(path: str, mark: Mark) -> str:
    """A path as written at a place in a graph: relative to that file.

    In a shipped graph and on the command line it is relative to the working directory. A URL and an absolute
    path stay as they are.
    """
    if path == OPEN or "://" in path or Path(path).is_absolute():
        return path
    origin = Path(mark.source.name)
    shipped = origin.parent == graphs_folder() or mark.source.name == "command line"
    return str(Path(path) if shipped else origin.parent / path)
