"""Turns the settings of another framework into a graph of edits, and reports what became of each key."""

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
    """A value that the user has to convert by hand; the message says how."""


class Idle(Exception):
    """A value that has no effect here; the message says why."""


OPEN = (".path", ".files")  # endings of fields that become `???` if their value is not known
FROM_DEFAULTS = "taken from the defaults of {}, because ours differ"
# converters of values, by the names that tables have for them
Converters = Mapping[str, Callable[[Any, Options], Any]]


def _path(value: Any, options: Options) -> str:
    return options.path(str(value))


def _files(value: Any, options: Options) -> list[str]:
    paths = value if isinstance(value, list) else [value]
    return [options.path(path) for path in paths]


def _natural(value: Any, options: Options) -> int:
    return max(int(value), 0)


COMMON: Converters = {"path": _path, "files": _files, "natural": _natural}  # converters for all frameworks


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
    count = Fraction(f"{seconds:.9g}")
    for unit, length in {"days": 86_400, "h": 3600, "min": 60}.items():
        if seconds % length == 0:
            return Interval(count / length, unit)
    return Interval(count, "s")


def warmup_share(value: float, _: Options) -> float:
    """Return the share of a run's optimizer steps that warms up, as ``optimizer.warmup_steps`` takes it."""
    if value == 0:
        return 0
    if not 0 < value < 1:
        raise Hand("it is not a share: set optimizer.warmup_steps, in optimizer steps")
    return float(value)


def own_tokenizer(model: str) -> Callable[[str, Options], str]:
    """Return a converter that checks the path of a tokenizer, which rlgraph reads from the model's folder.

    Args:
        model: the key with the model's path.
    """

    def check_path(value: str, options: Options) -> str:
        if value != options[model]:
            raise Hand("the tokenizer comes from the model's folder: put the files of this one there")
        raise Idle("the tokenizer is the model's own")

    return check_path


def refuse_unknown(name: str, known: Collection[str], law: str, remedy: str = "") -> None:
    """Refuse an estimator or an algorithm for which there is no graph.

    Args:
        name: the one that is asked for.
        known: those for which there are graphs.
        law: what is wrong.
        remedy: what to do; "" to name the nearest of ``known``.

    Raises:
        GraphError: ``name`` is not known.
    """
    if name in known:
        return
    remedy = remedy or nearest(name, known)
    raise GraphError([Problem("no-graph", law, None, tuple(known), remedy)])


@dataclass(frozen=True)
class KeyOutcome:
    """The outcome for a key: taken, equal to the default, without equivalent, or by hand.

    Attributes:
        key: the key as the user spelled it.
        value: its value; ``UNKNOWN`` if the line stands for no key.
        kind: what became of it.
        text: the explanation.
        is_given: whether the user gave it; otherwise it is a default that the graph needs as a setting.
    """

    key: str
    value: Any
    kind: Fate
    text: str
    is_given: bool = True

    def line(self) -> str:
        """Return the outcome as a line of the report."""
        if self.value is UNKNOWN:
            return f"{self.key}: {self.text}"
        return f"{self.key} = {flow(self.value)}: {self.text}"


def remark(about: str, text: str) -> KeyOutcome:
    """Return an outcome about something that needs a hand and has no key."""
    return KeyOutcome(about, UNKNOWN, "hand", text)


@dataclass(frozen=True)
class Imported:
    """A graph's name and draft, and the outcomes in the table's order."""

    name: str
    source: str
    draft: Draft
    outcomes: Sequence[KeyOutcome]

    def graph(self) -> str:
        """Return the graph as a file, which begins with the list of what needs a hand."""
        lines: list[str] = []
        by_hand = [outcome for outcome in self.outcomes if outcome.kind == "hand"]
        if by_hand:
            lines.append("# What is left to do by hand:")
            lines += [f"# - {outcome.line()}" for outcome in by_hand]
        lines += [
            f"graph: {self.name}",
            f"about: Imported from {self.source}",
            f"extends: {self.draft.extends}",
            "edits:",
            *self.draft.lines(),
        ]
        return "\n".join(lines) + "\n"

    def report(self) -> str:
        """Return the list of all keys, grouped by what became of them."""
        from_defaults = FROM_DEFAULTS.format(self.source)
        groups: dict[str, list[str]] = {title: [] for title in (from_defaults, *TITLES.values())}
        for outcome in self.outcomes:
            line = f"  {outcome.line()}"
            if outcome.is_given or outcome.kind == "hand":
                title = TITLES[outcome.kind]
                groups[title].append(line)
            elif outcome.kind == "taken":
                groups[from_defaults].append(line)
            # any other default is as in the graph, or says nothing
        lines: list[str] = []
        for title, group in groups.items():
            if group:
                lines.append(f"{title} ({len(group)})")
                lines += group
        return "\n".join(lines)


def outcomes_of(options: Options, draft: Draft, converters: Converters) -> Iterator[KeyOutcome]:
    """Yield what becomes of every key that is given, and of every default; set their values in the draft."""
    judge = Judge(options, draft, converters)
    judged: set[str] = set()
    for row in options.table.rows.values():
        if row.key.endswith(BELOW):
            keys = [key for key in options.values if options.table.row(key) is row]
            judged.update(keys)
            if keys:
                yield judge.shared_outcome(row, keys)
        elif row.key in options.values:
            judged.add(row.key)
            yield judge.outcome(row, options.spelled[row.key], options.values[row.key])
        else:
            default = _default_that_counts(row, options)
            if default is not None:
                yield judge.outcome(row, row.key, default, is_given=False)
    for key in options.values:
        outcome = _outcome_without_row(judge, key, key in judged)
        if outcome is not None:
            yield outcome


def _default_that_counts(row: KeyRow, options: Options) -> Any:
    """Return the default of a key that becomes a value of the graph; None for any other key."""
    if not row.to:
        return None
    if row.follows:
        return options[row.key]
    return row.default


def _outcome_without_row(judge: "Judge", key: str, is_judged: bool) -> KeyOutcome | None:
    """Return what becomes of a key that has no row of its own; None where it is judged already."""
    options = judge.options
    value = options.values[key]
    spelled = options.spelled[key]
    row = options.table.row(key)
    if key.endswith("_target_"):
        return KeyOutcome(spelled, value, "default", "a class of Hydra")
    if key.startswith("${shell:"):
        return remark(key, "flags that the launch script sets under a condition: give the ones that you mean")
    if is_judged:
        return None
    if row is not None and row.section == "families":
        return judge.outcome(row, spelled, value)
    text = f"it is not a known key of {options.table.name}; find out what reads it"
    return KeyOutcome(spelled, value, "hand", text)


@dataclass(frozen=True)
class Judge:
    """Decides what becomes of a key, and sets its value in the draft.

    Keys are judged in the order of the table: a converter may ask the draft for what earlier keys have set.
    """

    options: Options
    draft: Draft
    converters: Converters

    def shared_outcome(self, row: KeyRow, keys: Sequence[str]) -> KeyOutcome:
        """Return what becomes of keys that share a row: one outcome for all of them."""
        key_value = self.options.values[keys[0]]
        value = self.options.nested(row.key) or key_value
        if len(keys) == 1:
            outcome = self.outcome(row, self.options.spelled[keys[0]], value)
            return replace(outcome, value=key_value)
        outcome = self.outcome(row, row.key, value)
        if row.to:
            return outcome
        return replace(outcome, value=f"{len(keys)} keys")

    def outcome(self, row: KeyRow, key: str, value: Any, is_given: bool = True) -> KeyOutcome:
        """Return what becomes of one key, and set the value that follows from it."""
        kind: Fate
        try:
            kind, text = self._fate(row, value)
        except Hand as hand:
            kind = "hand"
            text = str(hand)
        except Idle as idle:
            kind = "default"
            text = str(idle)
        return KeyOutcome(key, value, kind, text, is_given)

    def _fate(self, row: KeyRow, value: Any) -> tuple[Fate, str]:
        """Return what becomes of a value by the words of its row; what the table says first counts."""
        condition = row.entry.get("if")
        if condition and not self.options.is_on(condition):
            return "default", f"has no effect: {condition} is off"
        self._refuse_references(row, value)
        if row.to:
            return self._set(row, value)
        is_covered = self._is_covered(row, value)
        if row.same and is_covered:
            return "default", str(row.same)
        if row.none and not row.hand:
            return "none", str(row.none)
        is_empty = value in (None, "", {}, [])
        if is_empty or _is_default(row, value):
            return "default", f"{self.options.table.name}'s own default"
        if row.shape and is_covered:
            self._convert(row, value)  # it may refuse the value
            return "taken", str(row.shape)
        return "hand", str(row.hand)

    @staticmethod
    def _is_covered(row: KeyRow, value: Any) -> bool:
        """Return whether a row's ``same`` or ``shape`` is for a value; with ``only`` it is for a few."""
        return "only" not in row.entry or value is None or value in row.only

    def _refuse_references(self, row: KeyRow, value: Any) -> None:
        """Refuse a value that stands for something which only the run knows."""
        decides_something = bool(row.to or row.shape)
        is_unknown = is_reference(value) and decides_something
        if not is_unknown and not self.options.is_odd(row.key):
            return
        names_a_file = bool(row.to) and row.to.endswith(OPEN)
        if names_a_file and self.draft.value(row.to) is not UNKNOWN:
            self.draft.set(row.to, "???")  # the parent's model or file would be a wrong one
        raise Hand("it refers to something unknown here: give its value as KEY=VALUE")

    def _convert(self, row: KeyRow, value: Any) -> Any:
        if not row.by:
            return value
        return self.converters[row.by](value, self.options)

    def _set(self, row: KeyRow, value: Any) -> tuple[Fate, str]:
        """Set the field of the graph that a row names to the value that a key of the framework has."""
        if value is None or value == {}:
            raise Idle("it is empty, so the graph is unchanged")
        our_value = _translated(row, value)
        if our_value is None:
            return self._fate_without_word(row, value)
        try:
            new_value = self._convert(row, our_value)
        except (TypeError, ValueError) as error:
            raise Hand(f"{row.to} can't be set from this value") from error
        graph_value = self.draft.value(row.to)
        if graph_value is UNKNOWN:
            raise Idle(f"has no effect: the graph has no `{row.to}`")
        if isinstance(new_value, Interval):
            new_value = str(new_value)
        elif isinstance(new_value, str) and isinstance(graph_value, int | float | list):
            raise Hand(f"it is not a valid value of {row.to}: give one as KEY=VALUE")
        if is_same(graph_value, new_value):
            return "default", f"as in the graph, {row.to}: {flow(new_value)}"
        self.draft.edit("set", **{row.to: new_value})
        return "taken", f"{row.to}: {flow(new_value)}"

    def _fate_without_word(self, row: KeyRow, value: Any) -> tuple[Fate, str]:
        """Return what becomes of a framework's word for which the table has none of ours."""
        if _is_default(row, value):
            return "default", f"{self.options.table.name}'s own default"
        if row.none:
            return "none", str(row.none)
        return "hand", str(row.hand)


def _is_default(row: KeyRow, value: Any) -> bool:
    return "default" in row.entry and value == row.default


def _translated(row: KeyRow, value: Any) -> Any:
    """Return our word for a framework's word; None where there is none."""
    if not row.words:
        return value
    word = str(value)
    if isinstance(value, bool):
        word = word.lower()  # as YAML has it
    return row.words.get(word)


def is_reference(value: Any) -> bool:
    """Return whether a value, or an item of a list, stands for something that is not known here."""
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
    """Give models with the policy's files its `config` and `trust_remote_code`; yield what they replaced."""
    policy_paths = ("${models.policy.path}", draft.value("models.policy.path"))
    for name in names:
        has_policys_files = draft.value(f"models.{name}.path") in policy_paths
        if not draft.has(f"models.{name}") or not has_policys_files:
            continue
        for field in ("config", "trust_remote_code"):
            path = f"models.{name}.{field}"
            value = draft.value(path) or None
            policy_value = draft.value(f"models.policy.{field}")
            if value == (policy_value or None):
                continue
            draft.set(path, policy_value)
            if value is not None:
                text = "it is read like the policy, whose files it has"
                yield KeyOutcome(path, value, "hand", text)
