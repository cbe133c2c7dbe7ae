"""Launch scripts of bash, read and not run: the commands in them, with their words as bash would expand them.

    NUM_GPUS=8
    PERF_ARGS=(
       --max-tokens-per-gpu 9216     # comments, arrays, += and here-documents are read
    )
    ray job submit -- python3 train.py --actor-num-gpus-per-node ${NUM_GPUS} ${PERF_ARGS[@]}

What only a running shell can know (the output of a command, a positional parameter, a variable that is set
nowhere) stays in the word as ``${shell:NAME}``; who uses such a word has to say that its value is not known.
Invariants:

- No command of the script is started, and no file is opened but scripts that it sources.
- Both branches of a condition are read. A variable that has a value already, and gets another one under a
  condition, is not known from there on; one that had none has what the branch gives it.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlgraph.errors import GraphError, Problem
from rlgraph.syntax.source import scalar

if TYPE_CHECKING:
    from tree_sitter import Node

UNKNOWN = re.compile(r"\$\{[^{}]*\}")
MOST_POWER = 64  # of a base and an exponent: larger numbers are no settings
SOURCED_DEEP = 8  # scripts that source each other are followed no deeper
INSTALL = "pip install 'rlgraph-compiler[import]'"
CONDITIONS = ("if_statement", "case_statement", "while_statement", "list")


@dataclass(frozen=True)
class LaunchedProgram:
    """A program that a script starts, and the words behind its name.

    Attributes:
        program: its name, as it was asked for.
        words: those behind the name.
        line: where the command begins, from 1.
        launcher: the words before the name, as ``torchrun --nnodes=2 -m``.
    """

    program: str
    words: tuple[str, ...]
    line: int
    launcher: tuple[str, ...] = ()


@dataclass(frozen=True)
class Command:
    """One command of a script.

    Attributes:
        words: the command's name and its arguments.
        line: where it begins, from 1.
    """

    words: tuple[str, ...]
    line: int


@dataclass
class Script:
    """The state of reading one script: variables and arrays so far, and the commands that were found.

    A variable is a list of words: of one word where it is no array.
    """

    folder: Path
    variables: dict[str, list[str]] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    conditional: int = 0  # how many conditions the statement at hand stands in
    depth: int = 0


def commands_of(file: Path) -> list[Command]:
    """Return the commands of a script, in their order, those of sourced scripts among them.

    Raises:
        GraphError: the file can't be read, is no UTF-8, or the parser's package is not installed.
    """
    script = Script(file.parent)
    _read_file(script, file)
    return script.commands


def _read_file(script: Script, file: Path) -> None:
    try:
        source = file.read_bytes()
        source.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GraphError([Problem("no-file", f"{file}: can't be read: {error}")]) from error
    _read_statements(script, _parsed(source, file))


def _parsed(source: bytes, file: Path) -> Node:
    try:
        import tree_sitter_bash
        from tree_sitter import Language, Parser
    except ImportError as error:
        law = f"{file} is a shell script, and the package that reads such is not installed ({error.name})"
        raise GraphError([Problem("no-package", law, None, (), INSTALL)]) from error
    return Parser(Language(tree_sitter_bash.language())).parse(source).root_node


def _read_statements(script: Script, node: Node) -> None:
    """Read a node of the syntax tree that holds statements, or is one."""
    if node.type in ("variable_assignment", "variable_assignments"):
        _read_assignment(script, node)
    elif node.type == "command":
        _read_command(script, node, heredoc=None)
    elif node.type == "redirected_statement":
        _read_redirected(script, node)
    elif node.type in ("test_command", "comment", "command_substitution"):
        return
    else:
        is_condition = node.type in CONDITIONS
        script.conditional += is_condition
        for child in node.named_children:
            _read_statements(script, child)
        script.conditional -= is_condition


def _read_redirected(script: Script, node: Node) -> None:
    """Read a statement with redirections; a here-document is what ``read -d '' NAME`` assigns."""
    heredoc = None
    for child in node.named_children:
        if child.type == "heredoc_redirect":
            bodies = [part for part in child.named_children if part.type == "heredoc_body"]
            heredoc = _expanded_text(script, bodies[0]) if bodies else ""
    for child in node.named_children:
        if child.type == "command":
            _read_command(script, child, heredoc)
        elif not child.type.endswith("_redirect"):
            _read_statements(script, child)


def _read_assignment(script: Script, node: Node) -> None:
    if node.type == "variable_assignments":
        for child in node.named_children:
            _read_assignment(script, child)
        return
    target = node.child_by_field_name("name")
    value = node.child_by_field_name("value")
    if target is None or target.type != "variable_name":
        return  # an element of an array by its index
    name = _text(target)
    if value is None:
        words = [""]
    elif value.type == "array":
        words = [word for item in value.named_children for word in _words_of(script, item)]
    else:
        words = [_expanded_text(script, value)]
    is_appended = any(child.type == "+=" for child in node.children)
    if is_appended and value is not None and value.type == "array":
        script.variables[name] = [*script.variables.get(name, []), *words]
    elif is_appended:
        script.variables[name] = ["".join([*script.variables.get(name, [""])[:1], *words])]
    elif script.conditional and script.variables.get(name, words) != words:
        script.variables[name] = [_unknown(name)]
    else:
        script.variables[name] = words


def _unknown(what: str) -> str:
    """Return how a word shows what only a running shell knows."""
    return f"${{shell:{_plain(what)}}}"


def _read_command(script: Script, node: Node, heredoc: str | None) -> None:
    words = [word for child in node.named_children for word in _words_of(script, child)]
    if not words:
        return
    if words[0] in ("source", ".") and len(words) > 1:
        _read_sourced(script, words[1])
    elif words[0] == "read" and heredoc is not None:
        script.variables[words[-1]] = [heredoc]
    else:
        script.commands.append(Command(tuple(words), node.start_point[0] + 1))


def _read_sourced(script: Script, path: str) -> None:
    """Read a script that is sourced; where its path begins with something unknown, look beside this one."""
    known = UNKNOWN.split(path)[-1].lstrip("/")
    places = [Path(path)] if os.path.isabs(path) else []
    places += [folder / known for folder in (script.folder, *script.folder.resolve().parents[:3])]
    found = next((place for place in places if place.is_file()), None)
    if found is None or script.depth >= SOURCED_DEEP:
        return
    script.depth += 1
    _read_file(script, found)
    script.depth -= 1


def _words_of(script: Script, node: Node) -> Iterator[str]:
    """Yield the words that a node of an argument becomes: none, one, or those of an array."""
    if node.type in ("comment", "variable_assignment", "file_redirect", "herestring_redirect"):
        return
    if node.type == "command_name":
        yield from _words_of(script, node.named_children[0]) if node.named_children else [_text(node)]
        return
    expansion = _only_expansion(node)
    if expansion is not None:
        name, is_whole = _array_of(expansion)
        if is_whole:  # an array that is set nowhere has no words, and no environment can hold one
            is_quoted = node.type == "string"
            words = script.variables.get(name, [])
            if words == [_unknown(name)]:  # flags that are not known, and no value of the flag before them
                yield f"--{_unknown(name)}"
                return
            for word in words:
                yield from [word] if is_quoted or UNKNOWN.search(word) else word.split()
            return
    text = _expanded_text(script, node)
    is_split = node.type in ("simple_expansion", "expansion") and not UNKNOWN.search(text)
    yield from text.split() if is_split else [text]


def _only_expansion(node: Node) -> Node | None:
    """Return the expansion that a word consists of, quoted or not."""
    if node.type == "expansion":
        return node
    is_quoted = node.type == "string" and node.named_child_count == 1
    inner = node.named_children[0] if is_quoted else None
    return inner if inner is not None and inner.type == "expansion" else None


def _array_of(expansion: Node) -> tuple[str, bool]:
    """Return the variable of ``${NAME[@]}``, and whether all of its elements are meant."""
    subscript = next((child for child in expansion.named_children if child.type == "subscript"), None)
    if subscript is None:
        return "", False
    name, index = subscript.named_children[:2]
    return _text(name), _text(index) in ("@", "*")


def _expanded_text(script: Script, node: Node) -> str:
    """Return a word as text, its variables filled in as far as they are known."""
    kind = node.type
    if kind in ("simple_expansion", "expansion"):
        # the parser counts a blank before ${ in a quoted text as the expansion's
        blanks = len(_text(node)) - len(_text(node).lstrip())
        return _text(node)[:blanks] + _expanded(script, node)
    if kind == "arithmetic_expansion":
        number = _computed(script, _text(node))
        return _unknown(_text(node)) if number is None else str(number)
    if kind in ("command_substitution", "process_substitution"):
        return _unknown(_text(node))
    if kind == "raw_string":
        return _text(node)[1:-1]
    if kind == "ansi_c_string":
        return _text(node)[2:-1].encode().decode("unicode_escape")
    is_compound = kind in ("string", "concatenation", "heredoc_body", "command_name")
    if not is_compound:
        return re.sub(r"\\\n", "", re.sub(r"\\(.)", r"\1", _text(node)))
    text, end = "", node.start_byte + (kind == "string")
    source = node.text or b""
    for child in node.named_children:
        text += source[end - node.start_byte : child.start_byte - node.start_byte].decode()
        text += _expanded_text(script, child) if child.type != "string_content" else _unquoted(child)
        end = child.end_byte
    rest = source[end - node.start_byte : len(source) - (kind == "string")].decode()
    text += rest
    return text.replace("\\\n", " ") if kind in ("heredoc_body", "string") else text


def _computed(script: Script, text: str) -> int | None:
    """Return the value of ``$((...))``, or None where a variable in it is not known.

    Whole numbers with + - * / % ** and brackets are computed, as bash does: a division drops the rest.
    """
    inner = text.removeprefix("$((").removeprefix("$[").removesuffix("))").removesuffix("]")
    try:
        tree = ast.parse(inner.replace("$", "").replace("{", "").replace("}", "").strip(), mode="eval")
        return _number(script, tree.body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _number(script: Script, node: ast.expr) -> int:
    """Return the value of an expression of whole numbers; a ``ValueError`` where it is none."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return int(_value_of(script, node.id) or "unknown")
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(script, node.operand)
    if not isinstance(node, ast.BinOp):
        raise ValueError
    left, right = _number(script, node.left), _number(script, node.right)
    if isinstance(node.op, ast.Pow):
        if not (0 <= right <= MOST_POWER and abs(left) <= MOST_POWER):
            raise ValueError
        return int(left**right)
    quotient = abs(left) // abs(right) if isinstance(node.op, ast.Div | ast.Mod) else 0
    if (left < 0) != (right < 0):
        quotient = -quotient  # towards 0, as in C
    if isinstance(node.op, ast.Div):
        return quotient
    if isinstance(node.op, ast.Mod):
        return left - quotient * right
    simple = {ast.Add: left + right, ast.Sub: left - right, ast.Mult: left * right}
    if type(node.op) not in simple:
        raise ValueError
    return simple[type(node.op)]


def _unquoted(node: Node) -> str:
    """Return what stands between double quotes, where a backslash quotes four characters alone."""
    return re.sub(r'\\(["$`\\])', r"\1", _text(node))


def _expanded(script: Script, node: Node) -> str:
    """Return the value of ``$NAME`` or ``${NAME...}``; what is not known as ``${NAME}``."""
    names = [
        child for child in node.named_children if child.type in ("variable_name", "special_variable_name")
    ]
    subscript = next((child for child in node.named_children if child.type == "subscript"), None)
    if subscript is not None:
        name, index = (_text(child) for child in subscript.named_children[:2])
        words = script.variables.get(name)
        if words is None:
            return _unknown(name)
        if index in ("@", "*"):
            return " ".join(words)
        return words[int(index)] if index.isdigit() and int(index) < len(words) else _unknown(name)
    if not names:
        return _unknown(_text(node))
    name = _text(names[0])
    value = _value_of(script, name)
    marks = [_text(child).strip() for child in node.children if not child.is_named]
    operators = [mark for mark in marks if mark not in ("${", "$", "}", '"')]
    others = [child for child in node.named_children if child.start_byte > names[0].start_byte]
    is_default = bool(operators) and operators[0] in (":-", "-", ":=", "=")
    if is_default and not value:
        return "".join(_expanded_text(script, child) for child in others)
    if value is None or (operators and not is_default):
        return _unknown(name)
    return value


def _value_of(script: Script, name: str) -> str | None:
    """Return a variable's value: of the script, or else of the environment, which a shell would have."""
    words = script.variables.get(name)
    if words is not None:
        return " ".join(words) if len(words) != 1 else words[0]
    return os.environ.get(name)


def _text(node: Node) -> str:
    return (node.text or b"").decode()


def _plain(text: str) -> str:
    """Return a piece of shell as it may stand in a reference: in short, and without braces and breaks."""
    return re.sub(r"[{}$\s]+", " ", text).strip()[:30]


def launches_of(commands: Sequence[Command], programs: Sequence[str]) -> list[LaunchedProgram]:
    """Return each start of one of some programs, in their order; equal ones once.

    A program is the end of a path (``train.py``) or a module (``openrlhf.cli.train_sft``), both with ``*``
    for any text. It may stand
    behind launchers (``python3 -m``, ``torchrun``, ``deepspeed --module``, ``ray job submit ... --``).
    """
    launches: dict[tuple[str, tuple[str, ...]], LaunchedProgram] = {}
    for command in commands:
        words = [part for word in command.words for part in _split_again(word, programs)]
        for place, word in enumerate(words):
            if any(_names(word, name) for name in programs):
                program = next(name for name in programs if _names(word, name))
                behind = tuple(words[place + 1 :])
                launch = LaunchedProgram(program, behind, command.line, tuple(words[:place]))
                launches.setdefault((program, behind), launch)
                break
    return [*launches.values()]


def _split_again(word: str, programs: Sequence[str]) -> list[str]:
    """Return the words of a command that another is given as one text, as ``bash -c "python train.py"``."""
    is_command = " " in word and any(name in word for name in programs)
    return word.split() if is_command else [word]


def _names(word: str, program: str) -> bool:
    return fnmatchcase(word, program) or (program.endswith(".py") and fnmatchcase(word, f"*/{program}"))


def flags_of(words: Sequence[str]) -> dict[str, Any]:
    """Return the flags of argparse as settings: ``--a.b 1`` as ``{"a.b": 1}``.

    A flag that nothing follows is true, one that several words follow has a list of them. Words are read as
    in a graph: ``1e-6`` is a number, ``{"a": 1}`` a mapping.

    Example:
        >>> flags_of(["--lr", "1e-6", "--packing", "--clip", "0.2", "0.28", "--n=-1"])
        {'lr': 1e-06, 'packing': True, 'clip': [0.2, 0.28], 'n': -1}
    """
    given: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, has_value, value = word[2:].partition("=")
            given[name] = [value] if has_value else []
        elif name:
            given[name].append(word)
    settings: dict[str, Any] = {}
    for name, texts in given.items():
        values = [_value(text) for text in texts]
        settings[name] = values[0] if len(values) == 1 else values or True
    return settings


def _value(text: str) -> Any:
    """Return what a word stands for; a text that is no JSON and no scalar of YAML stays what it is."""
    if text[:1] in ("{", "["):
        try:
            return json.loads(text)
        except ValueError:
            return text
    return scalar(text)
