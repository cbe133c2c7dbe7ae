"""Finds and changes values at paths of a graph's tree, as ``rollout.n`` or ``models.policy.path``."""

from dataclasses import replace

from rlgraph.engines.registry import SERVING
from rlgraph.errors import Mark, fail, nearest
from rlgraph.syntax.former_keys import present_path
from rlgraph.syntax.source import Tree

SECTIONS = ("graph", "about", "seed", "models", "nodes", "eval", "pools", "schedule")
# mappings that a graph may leave out, and that an edit may begin
BEGUN = {"schedule", "buffer", "pools", "eval", "nodes", "report", "in", "out", "loss"}
BEGUN |= {"optimizer", "serve", "train", "lora", "config", "options", *SERVING}


def put_set(tree: Tree, path: tuple[str, ...], child: Tree, mark: Mark | None) -> Tree:
    # an attribute that is not written has a default to change; a node or a model has none
    must_exist = len(path) == 2 and path[0] in ("nodes", "models")
    return put(tree, path, child, mark, must_exist)


def changed(node: Tree | None, change: Tree) -> Tree:
    """Return a node with the changes of ``eval``; a change that has an op replaces the node."""
    if node is None or change.get("op"):
        return change
    return replace(node, value={**node.items, **change.items})


def resolve(tree: Tree, name: str, mark: Mark | None) -> tuple[str, ...]:
    """Resolve ``rollout.n`` to ``(nodes, rollout, n)``; ``models.ref`` stays as it is.

    Raises:
        GraphError: the first word is neither a section nor a node.
    """
    parts = tuple(name.split("."))
    if parts[0] in SECTIONS:
        return parts
    nodes = tree.get("nodes")
    known = [*(nodes.items if nodes else ()), *SECTIONS]
    inside = next((f"{s}.{parts[0]}" for s in ("models", "pools") if tree.find((s, parts[0]))), "")
    if parts[0] not in known:
        hint = f"did you mean `{inside}`?" if inside else nearest(parts[0], known)
        raise fail("edit-missing", f"`{parts[0]}` is neither a node nor a section", mark, known, hint)
    return ("nodes", *parts)


def put(
    tree: Tree,
    path: tuple[str, ...],
    child: Tree | None,
    mark: Mark | None,
    must_exist: bool = False,
    above: tuple[str, ...] = (),
) -> Tree:
    """Return the tree with ``child`` at ``path``; None takes it out. Mappings on the way must be there."""
    head, rest = path[0], path[1:]
    here = tree.get(head)
    begins = above == ("pools",) or head in BEGUN  # nothing would run on a pool with a wrong name
    if here is None and (must_exist or (rest and not begins)):
        law = f"there is no `{head}` in " + (f"`{'.'.join(above)}`" if above else "the graph")
        present = present_path(".".join((*above, *path)))
        remedy = f"it is called `{present}` now" if present else nearest(head, tree.items)
        raise fail("edit-missing", law, mark, tree.items, remedy)
    if not rest:
        return tree.with_item(head, child)
    here = here or Tree({}, mark or tree.mark, mark)
    if not here.is_map:
        law = f"there is no `{rest[0]}` in `{'.'.join((*above, head))}`, which is {here.plain()!r}"
        raise fail("edit-missing", law, mark)
    return tree.with_item(head, put(here, rest, child, mark, must_exist, (*above, head)))
