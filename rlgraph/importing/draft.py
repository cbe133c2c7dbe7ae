"""A graph that is being built: a shipped parent and the edits so far, each applied as soon as it is made."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from rlgraph.engines.registry import SERVERS
from rlgraph.frontend.compose import as_written
from rlgraph.frontend.edits import apply
from rlgraph.importing.options import put_in
from rlgraph.nodes import OPS
from rlgraph.ops.registry import load
from rlgraph.syntax.model_settings import ModelSection
from rlgraph.syntax.settings import Eval, GraphFile
from rlgraph.syntax.source import Tree
from rlgraph.syntax.yaml_text import flow

# what a node takes beside its attributes, without a declared default
FREE = ("from", "every", "rows", "in", "out", "refill", "op")
SECTIONS = ("seed", "models", "nodes", "eval", "pools", "schedule")
READERS_OF_GROUPS = (
    "old_logprobs",
    "ref_logprobs",
    "values",
    "normal",
    "shaped",
    "scored",
    "token_rewards",
    "advantages",
)
UNKNOWN = object()  # stands for a value that a graph does not have; None is a value
NO_LIMIT = 1000  # rounds of a refill without a limit
# the types of defaults that a value can be compared with; other defaults are sections
PLAIN = (bool, int, float, str, list, type(None))


class Draft:
    """The parent, its edits, and the tree that they make of it.

    Invariants:

    - ``tree`` is the parent with all of ``edits`` applied, in their order: what is asked of a draft is asked
      of the graph that its file gives.
    - No two edits behind each other have the same word: a file then reads as one `set`, one `add` and so on.
    """

    def __init__(self, extends: str) -> None:
        self.extends = extends
        self.tree = as_written(extends)
        self.edits: list[tuple[str, dict[str, Any]]] = []

    def edit(self, word: str, **content: Any) -> None:
        """Apply one edit, as ``edit("add", refresh={"op": ...})``."""
        plain: Any = [*content] if word == "remove" else content
        self.tree = apply(self.tree, Tree.of({word: plain}))
        self._write_down(word, content)

    def _write_down(self, word: str, content: Mapping[str, Any]) -> None:
        """Add an edit to the last one where that has the same word, else behind it."""
        last_word = self.edits[-1][0] if self.edits else None
        if word != last_word:
            self.edits.append((word, {}))
        _, last_content = self.edits[-1]
        for name, value in content.items():
            _put(last_content, name, value)

    def set(self, path: str, value: Any) -> None:
        """Set a value, where it is not what the graph has."""
        if not is_same(self.value(path), value):
            self.edit("set", **{path: value})

    def remove(self, *paths: str) -> None:
        """Remove those of some paths that are there."""
        present = {path: None for path in paths if self.has(path)}
        if present:
            self.edit("remove", **present)

    def add_reference(self) -> None:
        """Hold the policy's own files as a frozen reference, with its log-probs, if nothing does yet."""
        if not self.has("ref_logprobs"):
            reference = {"models.ref": {"path": "${models.policy.path}", "frozen": True}}
            self.edit("add", **reference, ref_logprobs={"op": "logprobs", "model": "ref"})

    def span_hosts(self, devices_per_host: Any) -> None:
        """Set how many hosts an engine spans that has more devices than one, where both numbers are known."""
        devices = self.value("models.policy.serve.tensor_parallel")
        is_known = isinstance(devices, int) and isinstance(devices_per_host, int)
        if not is_known or devices <= devices_per_host:
            return
        hosts, remainder = divmod(devices, devices_per_host)
        if remainder == 0:
            self.set(f"models.policy.serve.{SERVERS}.hosts", hosts)

    def evaluate(self, interval: int | str, sampling: Mapping[str, Any], **settings: Any) -> None:
        """Have the reward measured on all rows of files that the user has to name.

        Args:
            interval: after how many iterations, or another interval, as ``1 epoch``.
            sampling: attributes of the rollout that are others there.
            settings: further settings of the section ``eval``.
        """
        nodes = {"prompts": {"files": "???", "batch": "all"}, "rollout": dict(sampling)}
        self.set("eval", {"every": interval, "nodes": nodes, "report": {"reward": "rewards"}, **settings})

    def keep_best(self, mode: str, keep: int = 1) -> None:
        """Keep the checkpoints with the best mean reward in evaluations; ``mode`` is ``max`` or ``min``."""
        best: dict[str, Any] = {"metric": "eval/reward", "mode": mode}
        if keep != 1:
            best["keep"] = keep
        self.set("schedule.best", best)

    def correct_within(self, low: float, high: float, level: str = "token") -> None:
        """Weigh tokens by their ratio, and leave out sequences by the geometric mean of theirs.

        That mean, of the policy to what sampled, has to be from ``low`` to ``high``; OpenRLHF and NeMo-RL
        call it seq-mask-tis.
        """
        self.edit("add", weights={"op": "correction.tis", "level": level, "cap": None})
        bounds = {"kl": "k1", "threshold": -math.log(low), "least": -math.log(high)}
        self.edit("add", rollout_weights={"op": "correction.reject", **bounds})

    def sample_mixed_groups(self, rounds: int | None = None, expected: float | None = None) -> None:
        """Sample groups of one reward again, as dynamic sampling does (DAPO, arXiv 2503.14476).

        ``rounds`` is how often at most, None for no limit; ``expected`` the share of groups that is thought
        to stay. Nodes between the rewards and the update read the groups that stay.
        """
        refill: dict[str, Any] = {"rounds": rounds or NO_LIMIT}
        if expected is not None:
            refill["expected"] = round(expected, 6)
        if self.has("informative"):
            self.set("informative.refill", refill)
            return
        self.edit("add", informative={"op": "filter.mixed", "refill": refill})
        for reader in READERS_OF_GROUPS:
            if self.has(reader):
                self.set(f"{reader}.rows", "informative")

    def add_kl_per_sample(self, **attributes: Any) -> None:
        """Take the KL of a whole response off its reward, before samples are compared."""
        self.edit("add", shaped={"op": "reward.kl_penalty", **attributes})
        self.edit("add", scored={"op": "reward.per_sample", "in": {"rewards": "shaped"}})
        self.edit("set", **{"advantages.in": {"rewards": "scored"}})

    def lines(self) -> Iterator[str]:
        """Yield the edits as a file has them."""
        for word, content in self.edits:
            if word == "remove":
                yield f"  - remove: {flow([*content])}"
                continue
            yield f"  - {word}:"
            for name, value in content.items():
                yield f"      {name}: {flow(value)}"

    def has(self, path: str) -> bool:
        return self.tree.find(_names(path)) is not None

    def value(self, path: str) -> Any:
        """Return what stands at a path, or else the default that is declared for it.

        ``UNKNOWN`` is returned where the graph has no such node or model, or it takes no such value.
        """
        names = _names(path)
        tree = self.tree.find(names)
        if tree is not None:
            return tree.plain()
        match names:
            case ("pools", *_):
                return None
            case ("eval", "nodes", _, *_):
                # an evaluation changes a node: what it does not change is as in the node itself
                if self.tree.find(names[:3]) is None:
                    return UNKNOWN
                return self.value(".".join(names[2:]))
            case ("eval", *_):
                if not self.has("eval"):
                    return UNKNOWN
                return _default_in(Eval, names[1:])
            case ("models", *_):
                if self.tree.find(names[:2]) is None:
                    return UNKNOWN
                return _default_in(ModelSection, names[2:])
            case ("nodes", node, attribute, *_):
                return self._default_of(node, attribute)
        return _default_in(GraphFile, names)

    def _default_of(self, node: str, attribute: str) -> Any:
        op = self.tree.find(("nodes", node, "op"))
        if op is None:
            return UNKNOWN
        field = load(OPS[op.value], op.value).attributes.model_fields.get(attribute)
        if field is not None:
            return None if field.is_required() else field.default
        if attribute in FREE:
            return None
        return UNKNOWN


def is_same(a: Any, b: Any) -> bool:
    """Return whether two values are the same in a graph, where true is not 1.

    Example:
        >>> is_same(1, 1.0), is_same(1, True)
        (True, False)
    """
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)


def _put(edit: dict[str, Any], name: str, value: Any) -> None:
    """Add to an edit: under a name that it has already, such as ``eval``, inside of that one's value."""
    for section, content in edit.items():
        if name.startswith(f"{section}.") and isinstance(content, dict):
            put_in(content, name.removeprefix(f"{section}."), value)
            return
    edit[name] = value


def _names(path: str) -> tuple[str, ...]:
    """Return the names of a path from the top of a graph; a path that begins with no section is a node's."""
    names = tuple(path.split("."))
    if names[0] in SECTIONS:
        return names
    return ("nodes", *names)


def _default_in(section: Any, names: tuple[str, ...]) -> Any:
    """Return the default of a field of a section, in sections that it may have."""
    field = section.model_fields.get(names[0])
    if field is None:
        return UNKNOWN
    if len(names) > 1:
        inner = _section_type(field.annotation)
        return None if inner is None else _default_in(inner, names[1:])
    if field.is_required():
        return None
    default = field.get_default()
    if isinstance(default, PLAIN):
        return default
    return None


def _section_type(annotation: Any) -> Any:
    """Return the section of an annotation, as of ``Train | None``; None where it has none."""
    alternatives = getattr(annotation, "__args__", (annotation,))
    for alternative in alternatives:
        if hasattr(alternative, "model_fields"):
            return alternative
    return None
