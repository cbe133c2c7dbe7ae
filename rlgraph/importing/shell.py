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
DEFAULT_OPERATORS = (":-", "-", ":=", "=")  # of ${NAME:-text}, a value for a variable that has none


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

    A variable is a list of words: of one word where it is not an array.
    """

    folder: Path
    variables: dict[str, list[str]] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    conditional: int = 0  # how many conditions the statement at hand stands in
    depth: int = 0


def commands_of(file: Path) -> list[Command]:
    """Return the commands of a script, in their order, those of sourced scripts among them.

    Raises:
        GraphError: the file can't be read, is not UTF-8, or the parser's package is not installed.
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
            body = _child_of_type(child, "heredoc_body")
            heredoc = "" if body is None else _expanded_text(script, body)
    for child in node.named_children:
        if child.type == "command":
            _read_command(script, child, heredoc)
        elif not child.type.endswith("_redirect"):
            _read_statements(script, child)


def _child_of_type(node: Node, *types: str) -> Node | None:
    for child in node.named_children:
        if child.type in types:
            return child
    return None


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
    is_array = value is not None and value.type == "array"
    if value is None:
        words = [""]
    elif is_array:
        words = [word for item in value.named_children for word in _words_of(script, item)]
    else:
        words = [_expanded_text(script, value)]
    if any(child.type == "+=" for child in node.children):
        _append(script, name, words, is_array)
    elif script.conditional and script.variables.get(name, words) != words:
        script.variables[name] = [_unknown(name)]
    else:
        script.variables[name] = words


def _append(script: Script, name: str, words: list[str], is_array: bool) -> None:
    """Append an array's words to a variable, or a text to its first word, as ``NAME+=...`` does."""
    old_words = script.variables.get(name, [])
    if is_array:
        script.variables[name] = [*old_words, *words]
    else:
        script.variables[name] = ["".join([*old_words[:1], *words])]


def _unknown(source: str) -> str:
    """Return how a word shows what only a running shell knows."""
    return f"${{shell:{_plain(source)}}}"


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
    """Read a script that is sourced, unless it is sourced too deep or is not there."""
    file = _sourced_file(script, path)
    if file is None or script.depth >= SOURCED_DEEP:
        return
    script.depth += 1
    _read_file(script, file)
    script.depth -= 1


def _sourced_file(script: Script, path: str) -> Path | None:
    """Return the file of a path; where this begins with something unknown, look beside the script."""
    known_end = UNKNOWN.split(path)[-1].lstrip("/")
    candidates = [Path(path)] if os.path.isabs(path) else []
    for folder in (script.folder, *script.folder.resolve().parents[:3]):
        candidates.append(folder / known_end)
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    return None


def _words_of(script: Script, node: Node) -> Iterator[str]:
    """Yield the words that a node of an argument becomes: none, one, or those of an array."""
    if node.type in ("comment", "variable_assignment", "file_redirect", "herestring_redirect"):
        return
    if node.type == "command_name":
        if node.named_children:
            yield from _words_of(script, node.named_children[0])
        else:
            yield _text(node)
        return
    array = _expanded_array(node)
    if array:
        yield from _words_of_array(script, array, is_quoted=node.type == "string")
        return
    text = _expanded_text(script, node)
    is_unquoted = node.type in ("simple_expansion", "expansion")
    yield from _split(text) if is_unquoted else [text]


def _words_of_array(script: Script, name: str, is_quoted: bool) -> Iterator[str]:
    """Yield the words of ``${NAME[@]}``.

    An array that is set nowhere has no words, as no environment can hold an array.
    """
    words = script.variables.get(name, [])
    if words == [_unknown(name)]:
        # these words are flags that are not known, and not a value of the flag before them
        yield f"--{_unknown(name)}"
        return
    for word in words:
        yield from [word] if is_quoted else _split(word)


def _split(text: str) -> list[str]:
    """Return the words of a text that is not quoted; what is not known is one word."""
    return [text] if UNKNOWN.search(text) else text.split()


def _expanded_array(node: Node) -> str:
    """Return the array of a word that is ``${NAME[@]}``, quoted or not; "" for any other word."""
    if node.type == "string" and node.named_child_count == 1:
        node = node.named_children[0]
    if node.type != "expansion":
        return ""
    subscript = _child_of_type(node, "subscript")
    if subscript is None:
        return ""
    name, index = subscript.named_children[:2]
    return _text(name) if _text(index) in ("@", "*") else ""


def _expanded_text(script: Script, node: Node) -> str:
    """Return a word as text, its variables filled in as far as they are known."""
    text = _text(node)
    match node.type:
        case "simple_expansion" | "expansion":
            # the parser counts a blank before ${ in a quoted text as the expansion's
            blanks = len(text) - len(text.lstrip())
            return text[:blanks] + _expanded(script, node)
        case "arithmetic_expansion":
            number = _computed(script, text)
            return _unknown(text) if number is None else str(number)
        case "command_substitution" | "process_substitution":
            return _unknown(text)
        case "raw_string":
            return text[1:-1]
        case "ansi_c_string":
            return text[2:-1].encode().decode("unicode_escape")
        case "concatenation" | "command_name":
            return _expanded_compound(script, node)
        case "string" | "heredoc_body":
            return _expanded_compound(script, node).replace("\\\n", " ")
    unescaped = re.sub(r"\\(.)", r"\1", text)
    return re.sub(r"\\\n", "", unescaped)


def _expanded_compound(script: Script, node: Node) -> str:
    """Return the text of a node with others inside, and of what stands between these."""
    source = node.text or b""
    quotes = 1 if node.type == "string" else 0
    text = ""
    end = quotes
    for child in node.named_children:
        start = child.start_byte - node.start_byte
        text += source[end:start].decode()
        if child.type == "string_content":
            text += _unquoted(child)
        else:
            text += _expanded_text(script, child)
        end = child.end_byte - node.start_byte
    return text + source[end : len(source) - quotes].decode()


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
    """Return the value of an expression of whole numbers; raise ``ValueError`` where it is not one."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return int(_value_of(script, node.id) or "unknown")
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(script, node.operand)
    if not isinstance(node, ast.BinOp):
        raise ValueError
    a = _number(script, node.left)
    b = _number(script, node.right)
    match node.op:
        case ast.Add():
            return a + b
        case ast.Sub():
            return a - b
        case ast.Mult():
            return a * b
        case ast.Div():
            return _quotient(a, b)
        case ast.Mod():
            return a - _quotient(a, b) * b
        case ast.Pow() if 0 <= b <= MOST_POWER and abs(a) <= MOST_POWER:
            return int(a**b)
    raise ValueError


def _quotient(a: int, b: int) -> int:
    """Return a quotient rounded towards 0, as in C and in bash."""
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def _unquoted(node: Node) -> str:
    """Return what stands between double quotes, where a backslash quotes four characters alone."""
    return re.sub(r'\\(["$`\\])', r"\1", _text(node))


def _expanded(script: Script, node: Node) -> str:
    """Return the value of ``$NAME`` or ``${NAME...}``; what is not known as ``${NAME}``."""
    subscript = _child_of_type(node, "subscript")
    if subscript is not None:
        return _element(script, subscript)
    variable = _child_of_type(node, "variable_name", "special_variable_name")
    if variable is None:
        return _unknown(_text(node))
    name = _text(variable)
    value = _value_of(script, name)
    operator = _operator(node)
    if operator in DEFAULT_OPERATORS and not value:
        defaults = [child for child in node.named_children if child.start_byte > variable.start_byte]
        return "".join(_expanded_text(script, child) for child in defaults)
    is_computed = operator != "" and operator not in DEFAULT_OPERATORS
    if value is None or is_computed:
        return _unknown(name)
    return value


def _operator(node: Node) -> str:
    """Return the operator behind the name in ``${NAME...}``, as ``:-``; "" where there is none."""
    for child in node.children:
        mark = _text(child).strip()
        if not child.is_named and mark not in ("${", "$", "}", '"'):
            return mark
    return ""


def _element(script: Script, subscript: Node) -> str:
    """Return ``${NAME[INDEX]}``, or all elements where the index says so."""
    name, index = (_text(child) for child in subscript.named_children[:2])
    words = script.variables.get(name)
    if words is None:
        return _unknown(name)
    if index in ("@", "*"):
        return " ".join(words)
    is_known = index.isdigit() and int(index) < len(words)
    return words[int(index)] if is_known else _unknown(name)


def _value_of(script: Script, name: str) -> str | None:
    """Return a variable's value: of the script, or else of the environment, which a shell would have."""
    words = script.variables.get(name)
    return os.environ.get(name) if words is None else " ".join(words)


def _text(node: Node) -> str:
    return (node.text or b"").decode()


def _plain(text: str) -> str:
    """Return a piece of shell as it may stand in a reference: in short, and without braces and breaks."""
    return re.sub(r"[{}$\s]+", " ", text).strip()[:30]


def launches_of(commands: Sequence[Command], programs: Sequence[str]) -> list[LaunchedProgram]:
    """Return each start of one of some programs, in their order; equal ones once.

    A program is the end of a path (``train.py``) or a module (``openrlhf.cli.train_sft``), both with ``*``
    for any text. It may stand behind launchers (``python3 -m``, ``torchrun``, ``deepspeed --module``,
    ``ray job submit ... --``).
    """
    launches: dict[tuple[str, tuple[str, ...]], LaunchedProgram] = {}
    for command in commands:
        launch = _launch(command, programs)
        if launch is not None:
            launches.setdefault((launch.program, launch.words), launch)
    return [*launches.values()]


def _launch(command: Command, programs: Sequence[str]) -> LaunchedProgram | None:
    words: list[str] = []
    for word in command.words:
        words += _split_again(word, programs)
    for place, word in enumerate(words):
        for program in programs:
            if _names(word, program):
                arguments = tuple(words[place + 1 :])
                return LaunchedProgram(program, arguments, command.line, tuple(words[:place]))
    return None


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
    texts_by_flag: dict[str, list[str]] = {}
    flag = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            flag, has_value, value = word[2:].partition("=")
            texts_by_flag[flag] = [value] if has_value else []
        elif flag:
            texts_by_flag[flag].append(word)
    return {flag: _flag_value(texts) for flag, texts in texts_by_flag.items()}


def _flag_value(texts: Sequence[str]) -> Any:
    values = [_value(text) for text in texts]
    if not values:
        return True
    return values[0] if len(values) == 1 else values


def _value(text: str) -> Any:
    """Return what a word stands for; a text that is neither JSON nor a scalar of YAML stays as it is."""
    if text[:1] in ("{", "["):
        try:
            return json.loads(text)
        except ValueError:
            return text
    return scalar(text)
