"""From settings of another framework to a graph of edits, and a list of what became of each key."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from rlgraph.errors import GraphError, Problem, nearest
from rlgraph.importing.draft import UNKNOWN, Draft, is_same
from rlgraph.importing.options import Options
from rlgraph.importing.table import BELOW, TITLES, Fate, KeyRow
from rlgraph.syntax.interval import Interval
from rlgraph.syntax.yaml_text import flow


class Hand(Exception):
    """A value that the user has to see to; the message says how."""


class Idle(Exception):
    """A value that decides nothing here; the message says why."""


OPEN = (".path", ".files")  # what stays open where it is not known
UNTOLD = "taken from the defaults of {}, as ours are others"
By = Mapping[str, Callable[[Any, Options], Any]]
# converters of values that tables of all systems name
COMMON: By = {
    "path": lambda value, o: o.path(str(value)),
    "files": lambda value, o: [o.path(path) for path in (value if isinstance(value, list) else [value])],
    "natural": lambda value, _: max(int(value), 0),
}


def epochs_of(count: float) -> Interval:
    """Return a number of epochs as an interval.

    Example:
        >>> epochs_of(0.1 * 3), epochs_of(1)
        ('0.3 epochs', '1 epoch')
    """
    return Interval(Fraction(f"{count:.9g}"), "epochs")


def duration_of(seconds: float) -> Interval:
    """Return seconds as an interval, in the longest unit that divides them.

    Example:
        >>> duration_of(1800), duration_of(90), duration_of(7200)
        ('30 min', '90 s', '2 h')
    """
    units = {"days": 86_400, "h": 3600, "min": 60, "s": 1}
    unit = next((name for name, length in units.items() if seconds % length == 0), "s")
    return Interval(Fraction(f"{seconds:.9g}") / units[unit], unit)


def warmup_share(value: float, _: Options) -> float:
    """Return the share of a run's optimizer steps that warms up, as ``optimizer.warmup_steps`` takes it."""
    if not 0 <= value < 1:
        raise Hand("it is no share: set optimizer.warmup_steps, in optimizer steps")
    return float(value) if value else 0


def own_tokenizer(model: str) -> Callable[[str, Options], str]:
    """Return what judges the path of a tokenizer, which is read out of the model's folder here.

    Args:
        model: the key with the model's path.
    """

    def judged(value: str, options: Options) -> str:
        if value != options[model]:
            raise Hand("the tokenizer is that of the model's folder: put this one's files there")
        raise Idle("the tokenizer is the model's own")

    return judged


def refuse_unknown(name: str, known: Collection[str], law: str, remedy: str = "") -> None:
    """Refuse an estimator or an algorithm that there is no graph for.

    Args:
        name: what is asked for.
        known: what there are graphs for.
        law: what is wrong.
        remedy: what to do; "": the nearest of ``known`` is named.

    Raises:
        GraphError: ``name`` is not known.
    """
    if name not in known:
        remedy = remedy or nearest(name, known)
        raise GraphError([Problem("no-graph", law, None, tuple(known), remedy)])


@dataclass(frozen=True)
class KeyOutcome:
    """What became of a key; of those that were not given only what the graph had to be told."""

    key: str
    value: Any
    kind: Fate
    text: str
    given: bool = True

    def line(self) -> str:
        """Return the outcome as a line of the list; what stands behind no key has no value."""
        value = "" if self.value is UNKNOWN else f" = {flow(self.value)}"
        return f"{self.key}{value}: {self.text}"


@dataclass(frozen=True)
class Imported:
    """A graph's name and draft, and the outcomes in the table's order."""

    name: str
    source: str
    draft: Draft
    outcomes: Sequence[KeyOutcome]

    def graph(self) -> str:
        """Return the graph as a file, which begins with what needs a hand."""
        hands = [f"# - {o.line()}" for o in self.outcomes if o.kind == "hand"]
        lines = ["# What needs a hand:", *hands] if hands else []
        lines += [f"graph: {self.name}", f"about: Imported from {self.source}"]
        return "\n".join([*lines, f"extends: {self.draft.extends}", "edits:", *self.draft.lines()]) + "\n"

    def report(self) -> str:
        """Return the list of all keys, by what became of them."""
        groups: dict[str, list[str]] = {UNTOLD.format(self.source): [], **{t: [] for t in TITLES.values()}}
        for outcome in self.outcomes:
            if outcome.given or outcome.kind == "hand":
                groups[TITLES[outcome.kind]].append(f"  {outcome.line()}")
            elif outcome.kind == "taken":
                groups[UNTOLD.format(self.source)].append(f"  {outcome.line()}")
        titled = [[f"{title} ({len(lines)})", *lines] for title, lines in groups.items() if lines]
        return "\n".join(line for lines in titled for line in lines)


def outcomes_of(options: Options, draft: Draft, by: By) -> Iterator[KeyOutcome]:
    """Yield what becomes of every key that is given, and of every default; values are set in the draft."""
    judged = Judge(options, draft, by)
    seen = set[str]()
    for row in options.table.rows.values():
        if row.key.endswith(BELOW):
            keys = [key for key in options.values if options.table.row(key) is row]
            seen |= {*keys}
            if keys:
                yield judged.below(row, keys)
        elif row.key in options.values:
            seen.add(row.key)
            yield judged.outcome(row, options.spelled[row.key], options.values[row.key])
        elif row.to and (default := options[row.key] if row.follows else row.default) is not None:
            yield judged.outcome(row, row.key, default, given=False)
    for key in options.values:
        family = options.table.row(key)
        if key.endswith("_target_"):
            yield KeyOutcome(options.spelled[key], options.values[key], "default", "a class of Hydra's")
        elif key.startswith("${shell:"):
            text = "flags that the launch script has under a condition: give those that are meant"
            yield KeyOutcome(key, UNKNOWN, "hand", text)
        elif key not in seen and family is not None and family.section == "families":
            yield judged.outcome(family, options.spelled[key], options.values[key])
        elif key not in seen:
            text = f"it is no key of {options.table.name} that is known here; see what reads it"
            yield KeyOutcome(options.spelled[key], options.values[key], "hand", text)


@dataclass(frozen=True)
class Judge:
    """Decides what becomes of a key."""

    options: Options
    draft: Draft
    by: By

    def below(self, row: KeyRow, keys: Sequence[str]) -> KeyOutcome:
        """Return what becomes of keys that share a row: one outcome for all of them."""
        value = self.options.below(row.key) or self.options.values[keys[0]]
        key = self.options.spelled[keys[0]] if len(keys) == 1 else row.key
        outcome = self.outcome(row, key, value)
        told = self.options.values[keys[0]] if len(keys) == 1 else f"{len(keys)} keys"
        return outcome if row.to and len(keys) > 1 else replace(outcome, value=told)

    def outcome(self, row: KeyRow, key: str, value: Any, given: bool = True) -> KeyOutcome:
        """Return what becomes of one key, and set the value that it gives."""
        try:
            kind, text = self._judged(row, value)
        except Hand as hand:
            kind, text = "hand", str(hand)
        except Idle as idle:
            kind, text = "default", str(idle)
        return KeyOutcome(key, value, kind, text, given)

    def _judged(self, row: KeyRow, value: Any) -> tuple[Fate, str]:
        condition = row.says.get("if")
        if condition and not self.options.is_on(condition):
            return "default", f"decides nothing: {condition} is off"
        if self.options.is_odd(row.key) or (is_reference(value) and (row.to or row.shape)):
            if row.to and row.to.endswith(OPEN) and self.draft.value(row.to) is not UNKNOWN:
                self.draft.set(row.to, "???")  # another model or file in its place would be a wrong one
            raise Hand("it stands for what is not known here: give its value, as KEY=VALUE")
        if row.to:
            return self._taken(row, value)
        known = "only" not in row.says or value is None or value in row.only
        if row.same and known:
            return "default", str(row.same)
        if row.none and not row.hand:
            return "none", str(row.none)
        if value in (None, "", {}, []) or ("default" in row.says and value == row.default):
            return "default", f"{self.options.table.name}'s own default"
        if row.shape and known and row.by:
            self.by[row.by](value, self.options)  # it may have something to say of the value
        return ("taken", str(row.shape)) if row.shape and known else ("hand", str(row.hand))

    def _taken(self, row: KeyRow, value: Any) -> tuple[Fate, str]:
        if value is None or value == {}:
            raise Idle("it is empty, which leaves the graph as it is")
        word = str(value).lower() if isinstance(value, bool) else str(value)
        ours = row.words.get(word) if row.words else value
        if ours is None and "default" in row.says and value == row.default:
            return "default", f"{self.options.table.name}'s own default"
        if ours is None:
            return ("none", str(row.none)) if row.none else ("hand", str(row.hand))
        try:
            ours = self.by[row.by](ours, self.options) if row.by else ours
        except (TypeError, ValueError) as error:
            raise Hand(f"it is no value that {row.to} could be made of") from error
        now = self.draft.value(row.to)
        if now is UNKNOWN:
            raise Idle(f"decides nothing: the graph has no `{row.to}`")
        is_interval = isinstance(ours, Interval)
        ours = str(ours) if is_interval else ours
        if isinstance(ours, str) and isinstance(now, int | float | list) and not is_interval:
            raise Hand(f"it is no value of {row.to}: give that one, as KEY=VALUE")
        if is_same(now, ours):
            return "default", f"as in the graph, {row.to}: {flow(ours)}"
        self.draft.edit("set", **{row.to: ours})
        return "taken", f"{row.to}: {flow(ours)}"


def is_reference(value: Any) -> bool:
    """Return whether a value, or what a list holds, stands for something that is not known here."""
    if isinstance(value, list):
        return any(is_reference(item) for item in value)
    return isinstance(value, str) and "${" in value


def graph_name(text: str) -> str:
    """Return a text as a graph's name.

    Example:
        >>> graph_name("qwen2.5 7b/grpo")
        'qwen2.5_7b_grpo'
    """
    return re.sub(r"[^\w.-]+", "_", text).strip("_.-") or "imported"


def read_alike(draft: Draft, names: Sequence[str]) -> Iterator[KeyOutcome]:
    """Read models of one path alike: those of some names have the policy's fields and its trust.

    Yields what was given otherwise.
    """
    same = ("${models.policy.path}", draft.value("models.policy.path"))
    for name in names:
        if not draft.has(f"models.{name}") or draft.value(f"models.{name}.path") not in same:
            continue
        for field in ("config", "trust_remote_code"):
            ours, theirs = draft.value(f"models.{name}.{field}"), draft.value(f"models.policy.{field}")
            if (ours or None) == (theirs or None):
                continue
            draft.set(f"models.{name}.{field}", theirs)
            if ours:
                text = "it is read as the policy is, of which it has the files"
                yield KeyOutcome(f"models.{name}.{field}", ours, "hand", text)
