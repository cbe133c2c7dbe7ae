"""Finds and changes values at paths of a graph's tree, as ``rollout.n`` or ``models.policy.path``."""

from dataclasses import replace

from rlgraph.engines.registry import SERVING
from rlgraph.errors import GraphError, Mark, fail, nearest
from rlgraph.syntax.former_keys import present_path
from rlgraph.syntax.source import Tree

SECTIONS = ("graph", "about", "seed", "models", "nodes", "eval", "pools", "schedule")
# mappings that a graph may leave out, and that an edit may begin
MAY_BE_ABSENT = {"schedule", "buffer", "pools", "eval", "nodes", "report", "in", "out", "loss"}
MAY_BE_ABSENT |= {"optimizer", "serve", "train", "lora", "config", "options", *SERVING}


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
    path = tuple(name.split("."))
    head = path[0]
    if head in SECTIONS:
        return path
    section_of_nodes = tree.get("nodes")
    nodes = section_of_nodes.items if section_of_nodes else {}
    if head in nodes:
        return ("nodes", *path)
    known = [*nodes, *SECTIONS]
    remedy = nearest(head, known)
    for section in ("models", "pools"):
        if tree.find((section, head)):
            remedy = f"did you mean `{section}.{head}`?"
            break
    raise fail("edit-missing", f"`{head}` is neither a node nor a section", mark, known, remedy)


def put(
    tree: Tree,
    path: tuple[str, ...],
    child: Tree | None,
    mark: Mark | None,
    must_exist: bool = False,
    above: tuple[str, ...] = (),
) -> Tree:
    """Return the tree with ``child`` at ``path``; None takes it out. Mappings on the way must be there."""
    head, further = path[0], path[1:]
    inner = tree.get(head)
    if inner is None:
        # nothing would run on a pool with a wrong name, so an edit may begin any pool
        may_begin = above == ("pools",) or head in MAY_BE_ABSENT
        lacks_section = bool(further) and not may_begin
        if must_exist or lacks_section:
            raise _missing(tree, path, above, mark)
    if not further:
        return tree.with_item(head, child)
    if inner is None:
        inner = Tree({}, mark or tree.mark, mark)
    if not inner.is_map:
        law = f"there is no `{further[0]}` in `{'.'.join((*above, head))}`, which is {inner.plain()!r}"
        raise fail("edit-missing", law, mark)
    return tree.with_item(head, put(inner, further, child, mark, must_exist, (*above, head)))


def _missing(tree: Tree, path: tuple[str, ...], above: tuple[str, ...], mark: Mark | None) -> GraphError:
    """Return the error of a path that leads through something which is not there."""
    head = path[0]
    section = f"`{'.'.join(above)}`" if above else "the graph"
    remedy = nearest(head, tree.items)
    present = present_path(".".join((*above, *path)))
    if present:
        remedy = f"it is called `{present}` now"
    return fail("edit-missing", f"there is no `{head}` in {section}", mark, tree.items, remedy)
