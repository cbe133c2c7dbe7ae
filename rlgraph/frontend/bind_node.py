"""Binds a node: what it calls, on which model and pool, over which rows and in which iterations."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlgraph.errors import COMMAND_LINE, Mark, nearest
from rlgraph.frontend.bind_call import KEYS, applies, bind_call, joins, names
from rlgraph.ir.domains import Route
from rlgraph.ir.graph import Model, Node
from rlgraph.ir.intervals import ALWAYS, Cadence, Cadences
from rlgraph.ops.declare import Op, Role
from rlgraph.syntax.settings import Refill
from rlgraph.syntax.shipped_files import graphs_folder
from rlgraph.syntax.source import OPEN, Tree
from rlgraph.syntax.validate import Binder, validate

STEPS: tuple[Role, ...] = ("minibatches", "epochs")  # what an update shares with those that join it


def bind_node(name: str, tree: Tree, models: Mapping[str, Model], binder: Binder) -> Node | None:
    """Return a node, its edges still names of columns; None where it names no op, with the problem noted."""
    bound = bind_call(name, tree, binder)
    if bound is None:
        return None
    call, hooks = bound
    op = call.op
    model, reads_next = _node_model(name, tree, op, models, binder)
    of, of_next = _copied(name, tree, op, models.get(model or ""), models, binder)
    return Node(
        name=name,
        call=replace(call, ins=names(tree, "in", binder), outs=names(tree, "out", binder)),
        hooks=hooks,
        model=model,
        reads_next=reads_next,
        of=of,
        of_next=of_next,
        tokenizer=_tokenizer(name, tree, op, models, binder),
        **_rows(name, tree, op, binder),
        state=_state(name, tree, op, binder),
        joins=_joins(name, tree, op, binder),
        refill=_refill(name, tree, op, binder),
        pool=_node_pool(name, tree, op, binder),
        when=_cadence(name, tree, binder),
        mark=tree.key or tree.mark,
        edited=_edited(tree),
    )


def _edited(tree: Tree) -> Mark | None:
    """Return where a value in a node comes from elsewhere: the command line, else a file of the user's."""
    home = (tree.key or tree.mark).source.name
    elsewhere: dict[str, Mark] = {}  # a source -> where its first value is
    for path, child in tree.walk():
        mark = child.key or child.mark
        is_value = len(path) > 0  # the empty path is the node itself
        if is_value and mark.source.name != home:
            elsewhere.setdefault(mark.source.name, mark)
    return max(elsewhere.values(), key=_rank_of_source, default=None)


def _rank_of_source(mark: Mark) -> int:
    name = mark.source.name
    if name == COMMAND_LINE:
        return 2
    is_shipped = Path(name).parent == graphs_folder()
    return 0 if is_shipped else 1


def _rows(name: str, tree: Tree, op: Op, binder: Binder) -> dict[str, Any]:
    """Return what `rows` names, a filter or a route; inference of domains checks that there are such rows."""
    item = tree.get("rows")
    if item is None or item.value == OPEN:
        return {}
    if op.source:
        law = f"op {op.name} makes its own rows"
        binder.problem("rows-of-a-source", law, item.key, remedy="remove `rows`")
    makers = _makers(item)
    if makers:
        return {"rows": makers}
    route = _route(item)
    if route is not None:
        return {"route": route}
    law = f"`rows` of node `{name}` names a filter, what makes its rows, or a value of a column"
    remedy = "as rows: mixed; [rollout, examples], both; {by: source, is: math}; {by: source}, the rest"
    binder.problem("wrong-type", law, item.mark, remedy=remedy)
    return {}


def _makers(item: Tree) -> tuple[str, ...]:
    """Return the nodes whose rows are named, one or a list; nothing for any other form."""
    names = item.plain()
    if isinstance(names, str):
        return (names,)
    if not isinstance(names, list):
        return ()
    if not all(isinstance(name, str) for name in names):
        return ()
    return tuple(names)


def _route(item: Tree) -> Route | None:
    """Return the rows by the value of a column, ``{by: COLUMN, is: VALUES}``; None for any other form."""
    if not item.is_map:
        return None
    content = item.plain()
    column = content.get("by")
    if not isinstance(column, str) or not content.keys() <= {"by", "is"}:
        return None
    values = content.get("is", [])
    if not isinstance(values, list):
        values = [values]
    if "is" in content and not values:
        return None  # `is` that lists no value is a mistake; only without `is` does a route take the rest
    for value in values:
        can_be_compared = type(value) in (str, int, bool)  # rows go by equality, which floats rarely keep
        if not can_be_compared or value == OPEN:
            return None
    return Route(column, tuple(values))


def _state(name: str, tree: Tree, op: Op, binder: Binder) -> str | None:
    """Return the node whose state one has; that it keeps one is checked once all nodes are known."""
    if not applies("state", name, tree, op, binder):
        return name if op.declared.state == "keeps" else None
    item = tree.get("state")
    if item is None:
        law = f"op {op.name} reads the state of another node, and `{name}` does not say which"
        binder.problem("no-state", law, tree.key or tree.mark, remedy=f"{name}: {{..., state: NODE}}")
        return None
    return str(item.value)


def states_are_kept(nodes: Sequence[Node], binder: Binder) -> None:
    """Check that each state that a node reads is kept by another."""
    keepers = [node.name for node in nodes if node.op.declared.state == "keeps"]
    for node in nodes:
        if node.state in (None, OPEN, *keepers):
            continue
        law = f"`state` of node `{node.name}` names `{node.state}`, which keeps none"
        remedy = nearest(str(node.state), keepers)
        binder.problem("no-state", law, node.edited or node.mark, keepers, remedy)


def _joins(name: str, tree: Tree, op: Op, binder: Binder) -> str:
    """Return the update that a node joins; what it is is checked once all nodes are known."""
    item = tree.get("joins")
    if not applies("joins", name, tree, op, binder) or item is None:
        return ""
    return "" if item.value == OPEN else str(item.value)


def with_leads(nodes: Sequence[Node], sections: Mapping[str, Tree], binder: Binder) -> list[Node]:
    """Return the nodes, those that join an update with its cadence and as many optimizer steps."""
    leads = {}
    for node in nodes:
        if node.updates and joins(node.op):
            leads[node.name] = node
    with_steps = []
    for node in nodes:
        if node.joins:
            node = _joined(node, leads, sections[node.name], binder)
        with_steps.append(node)
    return with_steps


def _joined(node: Node, leads: Mapping[str, Node], tree: Tree, binder: Binder) -> Node:
    lead = leads.get(node.joins)
    law = f"node `{node.name}` joins `{node.joins}`, "
    mark = tree.items["joins"].mark
    if lead is None:
        known = [name for name, update in leads.items() if update.model == node.model]
        law += "which makes no optimizer steps of its own"
        binder.problem("joins-no-update", law, mark, known, nearest(node.joins, known))
        return node
    if lead.model != node.model:
        law += f"which updates `{lead.model}`; it updates `{node.model}`"
        binder.problem("joins-other-model", law, mark, remedy=f"remove: [{node.name}.joins]")
        return node

    shared = {}
    for role in STEPS:
        attribute = node.called.name_of(role)
        if attribute:
            shared[attribute] = lead.called.value(role, 1)
    # a term may repeat the update's steps; its cadence is not its own to say, even if it is the same
    for key in (*KEYS, *shared):
        item = tree.get(key)
        if item and item.value not in (OPEN, shared.get(key)):
            problem = f"{law}and has its optimizer steps: `{key}` is that one's"
            binder.problem("joins-steps", problem, item.mark, remedy=f"remove: [{node.name}.{key}]")
    attributes = {**node.called.attributes, **shared}
    return replace(node, call=replace(node.called, attributes=attributes), when=lead.when)


def _refill(name: str, tree: Tree, op: Op, binder: Binder) -> Refill | None:
    """Return how a filter gets more rows: `true` takes the defaults."""
    item = tree.get("refill")
    if item is None or item.value in (None, OPEN, False):
        return None
    if not applies("refill", name, tree, op, binder):
        return None
    if item.value is True:
        return Refill()
    refill: Refill | None = validate(Refill, item, f"{name}.refill", binder)
    return refill


def _node_pool(name: str, tree: Tree, op: Op, binder: Binder) -> str:
    """Return the pool that a node asks for; a node on a model runs where the model's engine is."""
    item = tree.get("pool")
    if item is None or item.value in (None, OPEN):
        return ""
    if op.engine:
        law = f"node `{name}` runs where its model's {op.engine} engine is"
        model_item = tree.get("model")
        model = str(model_item.value).partition("@")[0] if model_item else "MODEL"
        placed = f"models.{model}.{op.engine}.pool={item.value}"
        remedy = f"leave out {name}.pool, and place the engine: {placed}"
        binder.problem("pool-of-engine", law, item.key, remedy=remedy)
    return str(item.value)


def _node_model(
    name: str, tree: Tree, op: Op, models: Mapping[str, Model], binder: Binder
) -> tuple[str | None, bool]:
    """Return the model that a node runs on, and whether in the version after the update."""
    if not applies("model", name, tree, op, binder):
        return None, False
    item = tree.get("model")
    if item is None or not isinstance(item.value, str):
        law = f"node `{name}` does not say which model it runs (op {op.name})"
        binder.problem("no-model", law, tree.key or tree.mark, models, "add `model: NAME`")
        return None, False
    model, _, version = item.value.partition("@")
    if item.value == OPEN or model in binder.broken:
        return None, False  # nothing is wrong with the node itself
    if model in models and version in ("", "next"):
        _model_fits(name, op, models[model], item.mark, binder)
        return model, version == "next"

    law = f"there is no model `{item.value}`"
    mark = item.mark
    remedy = nearest(model, models)
    removed = binder.removed.get(f"models.{model}")
    if removed:
        law = f"node `{name}` ({op.name}) runs on model `{model}`, which is removed here"
        mark = removed
        remedy = f"remove: [{name}] too, or set: {{{name}.model: ...}}"
    binder.problem("unknown-model", law, mark, models, remedy)
    return None, False


def _model_fits(name: str, op: Op, model: Model, mark: Mark, binder: Binder) -> None:
    head = model.spec.head
    if op.declared.head not in ("any", head):
        law = f"op {op.name} needs a `{op.declared.head}` head; model `{model.name}` has `{head}`"
        remedy = f"give models.{model.name} `head: {op.declared.head}`, or name a model that has one"
        binder.problem("wrong-head", law, mark, remedy=remedy)
    takes_steps = op.declared.updates and not op.copies
    if takes_steps and model.spec.frozen:
        law = f"node `{name}` updates model `{model.name}`, which is frozen"
        binder.problem("frozen", law, mark, remedy=f"remove `frozen: true` from models.{model.name}")


def _tokenizer(name: str, tree: Tree, op: Op, models: Mapping[str, Model], binder: Binder) -> str | None:
    item = tree.get("tokenizer")
    reads_tokenizer = "tokenizer" in op.handles.values()
    if item and not reads_tokenizer:
        law = f"op {op.name} reads no tokenizer"
        binder.problem("tokenizer-unused", law, item.key, remedy="remove `tokenizer`")
    if not reads_tokenizer:
        return None
    if item and str(item.value) in models:
        return str(item.value)
    natural = _natural_tokenizers(models)
    paths = {model.path for model in natural}
    if item is None and len(paths) == 1:
        return natural[0].name
    is_open = item is not None and item.value == OPEN
    if binder.broken or is_open:
        return None  # the model that is meant may be one of the broken ones

    law = f"node `{name}` needs the tokenizer of one model"
    example = "MODEL"
    mark = tree.key
    if natural:
        example = natural[0].name
        mark = natural[-1].mark
    if item:
        law += f"; there is no `{item.value}`"
        mark = item.mark
    elif len(natural) > 1:
        law += " of several that are trained"
    binder.problem("no-tokenizer", law, mark, models, f"set: {{{name}.tokenizer: {example}}}")
    return None


def _natural_tokenizers(models: Mapping[str, Model]) -> list[Model]:
    """Return the models whose tokenizer a node most likely means: language models, of these the trained."""
    candidates = [model for model in models.values() if model.spec.head == "lm"]
    if not candidates:
        candidates = [*models.values()]
    trained = [model for model in candidates if not model.spec.frozen]
    return trained or candidates


def _cadence(name: str, tree: Tree, binder: Binder) -> Cadences:
    """Return the iterations in which a node runs."""
    numbers: dict[str, int] = {}
    for key in KEYS:
        item = tree.get(key)
        if item is None or item.value == OPEN:
            continue
        if item.is_count:
            numbers[key] = item.value
            continue
        law = f"`{name}.{key}` is a number of iterations, 1 or more; it is {item.plain()!r}"
        binder.problem("wrong-value", law, item.mark)
    every = numbers.get("every", 1)
    cadence = Cadence(numbers.get("from", every), every)
    return () if cadence == ALWAYS else (cadence,)


def _copied(
    name: str, tree: Tree, op: Op, onto: Model | None, models: Mapping[str, Model], binder: Binder
) -> tuple[str | None, bool]:
    """Return the model whose weights a node copies onto its own, and whether after the update."""
    if not applies("of", name, tree, op, binder) or onto is None:
        return None, False
    item = tree.get("of")
    if item is None:
        law = f"node `{name}` does not say whose weights"
        binder.problem("unknown-model", law, tree.key or tree.mark, models, "add `of: MODEL`")
        return None, False
    model, _, version = str(item.value).partition("@")
    if item.value == OPEN or model in binder.broken:
        return None, False
    if model not in models or version not in ("", "next"):
        law = f"there is no model `{item.plain()}`"
        remedy = nearest(model, models) or "add `of: MODEL`"
        binder.problem("unknown-model", law, item.mark, models, remedy)
        return None, False
    _copy_fits(name, models[model], onto, item.mark, tree, binder)
    return model, version == "next"


def _copy_fits(name: str, copied: Model, onto: Model, mark: Mark, tree: Tree, binder: Binder) -> None:
    if copied is onto:
        law = f"node `{name}` copies `{copied.name}` onto itself"
        binder.problem("copy-onto-itself", law, mark, remedy="name the model whose weights it is to have")
    if not onto.spec.frozen:
        law = f"node `{name}` copies onto model `{onto.name}`, which is trained"
        binder.problem("copy-onto-trained", law, tree.items["model"].mark, remedy="copy onto a frozen one")
    if copied.spec.head != onto.spec.head:
        law = f"node `{name}` copies `{copied.name}`, which has head {copied.spec.head}, onto `{onto.name}`, "
        law += f"which has {onto.spec.head}"
        binder.problem("wrong-head", law, mark, remedy=f"give models.{onto.name} `head: {copied.spec.head}`")
