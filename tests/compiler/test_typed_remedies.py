"""Every remedy of a broken graph, typed into its graph, mends its problem, or is listed with a reason.

A remedy is read as its reader would: alternatives stand behind "or", and the edits, settings and names of one
alternative are made together. Other problems of the graph may remain.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path

import pytest

from rlgraph.compiler import Compilation
from rlgraph.errors import GraphError, Problem, Source
from rlgraph.frontend.compose import as_written
from rlgraph.frontend.edits import apply
from rlgraph.request import PlanRequest
from rlgraph.syntax.source import Tree, parse

BAD = Path(__file__).parent / "bad"
NAMES = sorted(path.stem for path in BAD.glob("*.yaml"))
EDIT = re.compile(r"\b(set|add|remove|replace|insert|rename): ?(?=[\[{])")
NODE = re.compile(r"\b(?:as graph `\w+` does|a node that writes them): (?=\w+: \{)")
SETTING = re.compile(r"(?<![\w{.:])((?:models|pools|schedule|eval)\.[\w.]+=[^\s,;]+)")
LEAVE_OUT = re.compile(r"\bleave out `?([\w.]+)`?|\b[Rr]emove `([\w.]+)`")
MEANT = re.compile(r"\bdid you mean `([^`]+)`\?")
PLACEHOLDER = re.compile(r"\.\.\.|\b[A-Z]{2,}\b")

CHOICE = "it says what to choose among, and the choice is the user's"
RULE = "it states the rule, or lists what is accepted"
OUTSIDE = "it is done outside of the graph"
# alternatives that ask for no edit, setting or name -> why each can't be typed
IN_WORDS = {
    r"(.* and )?\S+ and \S+ have it": "it says which ops have the attribute",
    r"op (\S+ and op )+\S+ can write it": CHOICE,
    r"use `add`, and set `in` of its readers|use `replace`|`set`": "another word for the edit",
    r"a node reads only what is written before it|indent with spaces, not tabs": RULE,
    r"add a node that writes it|write it|map the parameter to another column by `in`": CHOICE,
    r"say whose: (rows: )?.*|all: rows: .*|give one another name by `out`": "what the user meant decides",
    r"give another node rows: .*|name a column of its own rows|of their prompts": CHOICE,
    r"a route goes by .*|boolean, with values of its own type|as rows: mixed; .*|by routes": RULE,
    r"let them go by one column, .*|rows that are joined are of one kind.*": RULE,
    r"columns that meet in a node come .*|the axes behind the rows .*|paths are relative .*": RULE,
    r"an op .*|declare a parameter of .*|says which rows it `makes`": "the user's own op changes",
    r"read a column that a rollout wrote|let the filter be one of .*|let it read columns .*": CHOICE,
    r"let `\w+` read what is of the rows .*|refill by a filter before .*": CHOICE,
    r"what a filter with `refill` reads .*|read them before the update: .*": "nodes change their order",
    r"take another name|give the node another|`losses` has .*": "the name is the user's",
    r"write the values out|change another graph with .*|remove (it|one of the two)": "the text changes",
    r"write `.*`|leave it out; values .*": "the text changes",
    r"a whole graph is a parent: .*|as \{.*\}|report numbers, .*|a metric": "it shows a form",
    r"give (at_least|iterations|one of \d).*|at_most, .*|epochs|fewer": CHOICE,
    r"the pool a multiple of .*|source": CHOICE,
    r"give the op an attribute .*|give models\.\S+ (`head: value`|and .*)": CHOICE,
    r"give models\.\S+ .* the same value|give models\.\S+\.addresses|name a model that has one": CHOICE,
    r"give it `optimizer: .*|`frozen: true` if it is only read": "a key in a section",
    r"remove `frozen: true` from .*": "a key in a section",
    r"choose another models\.\S+|generate with another model": CHOICE,
    r"take a mixture of experts|leave `routing` out": CHOICE,
    r"let the run start its servers|start them with it, .*|install what has .*": OUTSIDE,
    r"put the model's `config.json` .*|fetch it into the cache: .*": OUTSIDE,
    r"a file beside the graph is named .*|as my_function.py:name.*|package.module:name .*": "it shows a form",
    r"or your own: op: my_ops.py:name|name the field of the rows, .*|name what makes": "it shows a form",
}
# graphs with a problem that stays -> why
NOT_ALONE = {
    "bad_name": "the model is called what is refused: with another name for it, others follow",
    "section_beside_extends": "the section is moved into the list of edits",
    "interval_misspelt": "a value in quotes of two words",
}
OWN = "another problem of the graph is found only then, and has a remedy of its own"
# graphs in which a mended problem lets another one be found -> why
REVEALING = {
    "engine_on_no_pool": "the graph's other pool has nothing on it then",
    "extend_misspelt": "beside `extends` the graph's sections are edits",
    "former_staleness_and_stream": OWN,
    "fragment_missing": "the fragment that was meant has an error of its own",
    "held_without_a_ratio": OWN,
    "in_of_a_loss": OWN,
    "insert_on_nothing": "the op that was inserted does not fit what is read there",
    "nothing_runs_ahead": "samples of older weights need a correction",
    "reference_missing": "of the two references that are misspelt, each refers to the other",
    "removed_model": "what read the removed node's column is next",
    "rollout_every_two": "an update every two iterations leaves the first one empty",
    "routing_of_an_engine": OWN,
    "segments_beside_samples": "the graph has a node aligned, which aligns them a second time",
    "segments_not_read": "each node that reads whole samples has a remedy, and the graph needs all",
    "serve_openai": "a model that is only read is not updated",
    "stream_grammar": OWN,
    "stream_one_pool": "samples of older weights need a correction",
    "stream_refill_before": OWN,
    "stream_two_refilled": "the graph names a column that only streams have",
    "stream_unread": OWN,
}


@dataclass
class Change:
    """What one alternative of a remedy asks for.

    Attributes:
        edits: as in a file, in order.
        settings: ``key=value``, as on the command line.
        left_out: the names of keys that are left out where the problem is.
        meant: the name that takes the place of the one where the problem is.
    """

    edits: list[Tree] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    meant: str = ""

    def __bool__(self) -> bool:
        return bool(self.edits or self.settings or self.left_out or self.meant)


def brackets_end(text: str, start: int) -> int:
    """Return the place behind the bracket that closes the first one from a place on."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] in "[{") - (text[place] in "]}")
        if depth == 0 and text[place] in "]}":
            return place + 1
    raise AssertionError(f"brackets that nothing closes: {text}")


def alternatives(remedy: str) -> list[str]:
    """Return the parts of a remedy that "or" divides, outside of brackets."""
    parts, start, place = [], 0, 0
    while place < len(remedy):
        if remedy[place] in "[{":
            place = brackets_end(remedy, place)
            continue
        divider = re.compile(r"[,;:]? or (?:let [\w ]+: )?|\n").match(remedy, place)
        if divider:
            parts.append(remedy[start:place])
            start = place = divider.end()
            continue
        place += 1
    return [*parts, remedy[start:]]


def parsed(text: str) -> Tree:
    """Return an edit as a graph's file has it."""
    return parse(Source("remedy", text))


def read(text: str) -> Change:
    """Return what an alternative of a remedy asks for; nothing where it says so in words."""
    change, rest, place = Change(), "", 0
    for match in EDIT.finditer(text):
        if match.start() < place:
            continue  # inside of the edit before
        end = brackets_end(text, match.end())
        change.edits.append(parsed(f"{{{match[1]}: {text[match.end() : end]}}}"))
        rest += text[place : match.start()]
        place = end
    rest += text[place:]
    node = NODE.search(rest)
    if node:
        end = brackets_end(rest, rest.index("{", node.end()))
        change.edits.append(parsed(f"{{add: {{{rest[node.end() : end]}}}}}"))
    change.settings = [setting.rstrip(":.") for setting in SETTING.findall(rest)]
    change.left_out = [first or second for first, second in LEAVE_OUT.findall(rest)]
    meant = MEANT.search(rest)
    if meant:
        change.meant = meant[1]
    return change


def problems_of(graph: Path, change: Change | None = None) -> tuple[Problem, ...]:
    """Return the problems of a graph with a change."""
    try:
        written = as_written(str(graph), change.settings if change else ())
        for edit in change.edits if change else ():
            written = apply(written, edit)
        _ = Compilation(PlanRequest(str(graph), devices=0, edited=written)).plan
    except GraphError as error:
        return error.problems
    return ()


def path_at(tree: Tree, problem: Problem, name: str) -> str:
    """Return the dotted path of the key where a problem is, if it has this name; "" if none has."""
    for path, child in items_of(tree):
        is_there = problem.mark in (child.key, child.mark)
        if is_there and name in ("", path[-1]):
            return ".".join(path[1:] if path[0] == "nodes" else path)
    return ""


def items_of(tree: Tree, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Tree]]:
    """Yield all items below a mapping, each with its path."""
    for name, child in tree.items.items():
        yield (*path, name), child
        yield from items_of(child, (*path, name))


def renamed(folder: Path, problem: Problem, meant: str) -> None:
    """Write the name that is meant where a problem is, in place of the one that its law quotes."""
    mark = problem.mark
    assert mark is not None
    file = folder / Path(mark.source.name).name
    if not file.exists():
        file = folder / mark.source.name
    lines = file.read_text(encoding="utf-8").splitlines()
    line = lines[mark.line - 1]
    head, tail = line[: mark.column - 1], line[mark.column - 1 :]
    names = [first or second for first, second in re.findall(r"`([^`]+)`|'([^']+)'", problem.law)]
    at_mark = re.match(r"[^\s,:{}\[\]]+", tail)
    if at_mark:
        names.append(at_mark[0])
    names = [name for name in names if name in tail]
    wrong = max(names, key=lambda name: SequenceMatcher(None, name, meant).ratio() + len(name) / 1000)
    lines[mark.line - 1] = head + tail.replace(wrong, meant, 1)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def typed(graph: Path, problem: Problem, change: Change) -> tuple[Problem, ...]:
    """Return the problems of a copy of a graph in which a change was made for one of its problems."""
    if "place set:" in problem.remedy:  # "in its place": what stood there goes
        moved = re.split(r" ha(?:s|ve) become | is a setting ", problem.law)[0]
        change.left_out += re.findall(r"`([^`]+)`", moved)
    if change.meant:
        renamed(graph.parent, problem, change.meant)
    for name in change.left_out:
        path = name
        if "." not in name:
            path = path_at(as_written(str(graph)), problem, name)
            assert path, f"no key {name} is where the problem is; the remedy has to give its path"
        change.edits.insert(0, parsed(f"{{remove: [{path}]}}"))
    return problems_of(graph, change)


def fate(name: str, number: int, change: Change, folder: Path) -> tuple[bool, list[str]]:
    """Return whether a change mends a problem of a graph, and the problems that come with it."""
    graph = folder / f"{name}.yaml"
    before = problems_of(graph)
    problem = before[number]
    after = typed(graph, problem, change)
    kinds_before, kinds_after = (Counter(one.kind for one in found) for found in (before, after))
    laws_before, laws_after = ({one.law for one in found} for found in (before, after))
    is_gone = kinds_after[problem.kind] < kinds_before[problem.kind] and problem.law not in laws_after
    return is_gone, sorted(laws_after - laws_before)


def remedies_of(name: str) -> Iterator[tuple[int, str]]:
    """Yield the alternatives of each remedy of a graph, with the number of its problem."""
    for number, problem in enumerate(problems_of(Path(f"{name}.yaml"))):
        for text in alternatives(problem.remedy):
            if text:
                yield number, text


def reason_not_to_type(text: str) -> str:
    """Return why an alternative can't be typed as it stands; "" if it can."""
    if PLACEHOLDER.search(text):
        return "its reader fills in a name or a value"
    for pattern, why in IN_WORDS.items():
        if re.fullmatch(pattern, text):
            return why
    return ""


@pytest.mark.parametrize("name", NAMES)
def test_every_remedy_mends_its_problem_as_it_is_typed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(BAD)
    for place, (number, text) in enumerate(remedies_of(name)):
        reason = reason_not_to_type(text)
        change = read(text)
        if reason or name in NOT_ALONE:
            continue
        assert change, f"{name}: an edit, a setting, a name or a reason is wanted for: {text}"
        folder = tmp_path / str(place)
        shutil.copytree(BAD, folder)
        monkeypatch.chdir(folder)
        is_gone, revealed = fate(name, number, change, Path())
        monkeypatch.chdir(BAD)
        assert is_gone, f"{name}: the problem stays with: {text}"
        assert not revealed or name in REVEALING, f"{name}: {text}\nreveals: {revealed}"


def test_nothing_is_excused_that_no_remedy_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(BAD)
    texts = [text for name in NAMES for _, text in remedies_of(name)]
    for pattern in IN_WORDS:
        assert any(re.fullmatch(pattern, text) for text in texts), pattern
    assert {*NOT_ALONE, *REVEALING} <= {*NAMES}
    assert sum(bool(read(text)) for text in texts) > 150
