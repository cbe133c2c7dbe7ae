"""A graph in the making: a shipped parent and the edits so far, each applied as soon as it is made."""

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

# Without a declared default are what a node or a section takes beside its attributes
FREE = ("from", "every", "rows", "in", "out", "refill", "op")
UNKNOWN = object()
NO_LIMIT = 1000  # rounds of a refill that is to have no limit


class Draft:
    """The parent, its edits, and the tree that they make of it."""

    def __init__(self, extends: str) -> None:
        self.extends, self.tree = extends, as_written(extends)
        self.edits: list[tuple[str, dict[str, Any]]] = []

    def edit(self, word: str, **content: Any) -> None:
        """Apply one edit, as ``edit("add", refresh={"op": ...})``."""
        plain: Any = [*content] if word == "remove" else content
        self.tree = apply(self.tree, Tree.of({word: plain}))
        if not self.edits or self.edits[-1][0] != word:
            self.edits.append((word, {}))
        for name, value in content.items():
            _put(self.edits[-1][1], name, value)

    def set(self, path: str, value: Any) -> None:
        """Set a value, where it is not what the graph has."""
        if not is_same(self.value(path), value):
            self.edit("set", **{path: value})

    def remove(self, *paths: str) -> None:
        """Remove what is there of some paths."""
        if there := {path: None for path in paths if self.has(path)}:
            self.edit("remove", **there)

    def add_reference(self) -> None:
        """Hold the policy's own files as a frozen reference, with its log-probs, if nothing does yet."""
        if not self.has("ref_logprobs"):
            reference = {"models.ref": {"path": "${models.policy.path}", "frozen": True}}
            self.edit("add", **reference, ref_logprobs={"op": "logprobs", "model": "ref"})

    def span_hosts(self, devices_per_host: Any) -> None:
        """Say how many hosts an engine spans that has more devices than one, where both are known numbers."""
        spanned = self.value("models.policy.serve.tensor_parallel")
        if not isinstance(spanned, int) or not isinstance(devices_per_host, int):
            return
        if spanned > devices_per_host and spanned % devices_per_host == 0:
            self.set(f"models.policy.serve.{SERVERS}.hosts", spanned // devices_per_host)

    def evaluate(self, every: int | str, sampling: Mapping[str, Any], **more: Any) -> None:
        """Have the reward measured on all rows of files that the user has to name.

        Args:
            every: after how many iterations, or another interval, as ``1 epoch``.
            sampling: attributes of the rollout that are others there.
            more: of the section ``eval``.
        """
        nodes = {"prompts": {"files": "???", "batch": "all"}, "rollout": dict(sampling)}
        self.set("eval", {"every": every, "nodes": nodes, "report": {"reward": "rewards"}, **more})

    def keep_best(self, mode: str, keep: int = 1) -> None:
        """Keep the checkpoints with the best mean reward in evaluations; ``mode`` is ``max`` or ``min``."""
        best = {"metric": "eval/reward", "mode": mode}
        self.set("schedule.best", best if keep == 1 else {**best, "keep": keep})

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
        readers = ("old_logprobs", "ref_logprobs", "values", "normal", "shaped", "scored", "token_rewards")
        for node in (*readers, "advantages"):
            if self.has(node):
                self.set(f"{node}.rows", "informative")

    def add_kl_per_sample(self, **attributes: Any) -> None:
        """Take the KL of a whole response off its reward, before samples are compared."""
        self.edit("add", shaped={"op": "reward.kl_penalty", **attributes})
        self.edit("add", scored={"op": "reward.per_sample", "in": {"rewards": "shaped"}})
        self.edit("set", **{"advantages.in": {"rewards": "scored"}})

    def lines(self) -> Iterator[str]:
        """Yield the edits as a file has them."""
        for word, content in self.edits:
            yield f"  - {word}:" + f" {flow([*content])}" * (word == "remove")
            if word != "remove":
                yield from (f"      {name}: {flow(value)}" for name, value in content.items())

    def has(self, path: str) -> bool:
        return self.tree.find(_parts(path)) is not None

    def value(self, path: str) -> Any:
        """Return what stands at a path, or else the default that is declared for it.

        ``UNKNOWN`` is returned where the graph has no such node or model, or it takes no such value.
        """
        parts = _parts(path)
        if (there := self.tree.find(parts)) is not None:
            return there.plain()
        if parts[0] == "eval" and parts[1:2] == ("nodes",):
            node = self.tree.find(parts[:3])
            return self.value(".".join(parts[2:])) if node else UNKNOWN
        if parts[0] == "eval":
            return _of_section(Eval, parts[1:]) if self.tree.find(parts[:1]) else UNKNOWN
        if parts[0] == "nodes":
            return self._of_node(parts)
        if parts[0] == "models":
            return _of_section(ModelSection, parts[2:]) if self.tree.find(parts[:2]) else UNKNOWN
        return _of_section(GraphFile, parts) if parts[0] != "pools" else None

    def _of_node(self, parts: tuple[str, ...]) -> Any:
        if (op := self.tree.find((*parts[:2], "op"))) is None:
            return UNKNOWN
        field = load(OPS[op.value], op.value).attributes.model_fields.get(parts[2])
        if field is None:
            return None if parts[2] in FREE else UNKNOWN
        return None if field.is_required() else field.default


def is_same(one: Any, other: Any) -> bool:
    """Return whether two values are the same in a graph, where true is no 1.

    Example:
        >>> is_same(1, 1.0), is_same(1, True)
        (True, False)
    """
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _put(edit: dict[str, Any], name: str, value: Any) -> None:
    """Add to an edit: below a name that it has already, such as ``eval``, inside of that one's value."""
    above = next((key for key in edit if name.startswith(f"{key}.") and isinstance(edit[key], dict)), None)
    if above is None:
        edit[name] = value
        return
    put_in(edit[above], name.removeprefix(f"{above}."), value)


def _parts(path: str) -> tuple[str, ...]:
    parts = tuple(path.split("."))
    sections = ("seed", "models", "nodes", "eval", "pools", "schedule")
    return parts if parts[0] in sections else ("nodes", *parts)


def _of_section(section: Any, parts: tuple[str, ...]) -> Any:
    """Return the default of a field of a section, in sections that it may have."""
    field = section.model_fields.get(parts[0])
    if field is None:
        return UNKNOWN
    if len(parts) > 1:
        kinds = getattr(field.annotation, "__args__", (field.annotation,))
        inner = [kind for kind in kinds if hasattr(kind, "model_fields")]
        return _of_section(inner[0], parts[1:]) if inner else None
    default = None if field.is_required() else field.get_default()
    return default if isinstance(default, bool | int | float | str | list | None) else None
