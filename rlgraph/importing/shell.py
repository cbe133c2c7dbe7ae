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
from collections.abc import Callable, Sequence
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
DEFAULT_OPERATORS = (":-", "-", ":=", "=")  # of ${NAME:-text}, a value for a variable that has none
ALL_ELEMENTS = ("@", "*")  # indices that stand for all elements of an array


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

    Invariants:

    - A variable is a list of words: of one word where it is not an array.
    - ``conditional`` and ``depth`` are back at what they were once a statement, or a sourced script, is read.
    - ``commands`` are in the order of the script; a sourced one's stand where it is sourced.
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
        law = f"{file} is a shell script, and the package that reads these is not installed ({error.name})"
        raise GraphError([Problem("no-package", law, None, (), INSTALL)]) from error
    return Parser(Language(tree_sitter_bash.language())).parse(source).root_node


def _read_statements(script: Script, node: Node) -> None:
    """Read a node of the syntax tree that holds statements, or is one."""
    match node.type:
        case "variable_assignment":
            _read_assignment(script, node)
        case "command":
            _read_command(script, node, heredoc=None)
        case "redirected_statement":
            _read_redirected(script, node)
        case "test_command" | "comment" | "command_substitution":
            return
        case "if_statement" | "case_statement" | "while_statement" | "list":
            script.conditional += 1
            _read_children(script, node)
            script.conditional -= 1
        case _:
            _read_children(script, node)


def _read_children(script: Script, node: Node) -> None:
    for child in node.named_children:
        _read_statements(script, child)


def _read_redirected(script: Script, node: Node) -> None:
    """Read a statement with redirections; a here-document is what ``read -d '' NAME`` assigns."""
    heredoc = _heredoc(script, node)
    for child in node.named_children:
        if child.type == "command":
            _read_command(script, child, heredoc)
        elif not child.type.endswith("_redirect"):
            _read_statements(script, child)


def _heredoc(script: Script, node: Node) -> str | None:
    """Return the here-document of a statement, of several the last; None where it has none."""
    text = None
    for child in node.named_children:
        if child.type == "heredoc_redirect":
            body = _child_of_type(child, "heredoc_body")
            text = "" if body is None else _expanded_text(script, body)
    return text


def _child_of_type(node: Node, *types: str) -> Node | None:
    for child in node.named_children:
        if child.type in types:
            return child
    return None


def _read_assignment(script: Script, node: Node) -> None:
    target = node.child_by_field_name("name")
    if target is None or target.type != "variable_name":
        return  # an element of an array by its index
    name = _text(target)
    value = node.child_by_field_name("value")
    is_array = value is not None and value.type == "array"
    words = _assigned_words(script, value)
    operators = [child.type for child in node.children]
    if "+=" in operators:
        _append(script, name, words, is_array)
        return
    old_words = script.variables.get(name, words)
    if script.conditional and old_words != words:
        words = [_unknown(name)]
    script.variables[name] = words


def _assigned_words(script: Script, value: Node | None) -> list[str]:
    """Return the words that a variable is assigned: those of an array, or one text."""
    if value is None:
        return [""]
    if value.type != "array":
        return [_expanded_text(script, value)]
    return _words_of_all(script, value.named_children)


def _words_of_all(script: Script, nodes: Sequence[Node]) -> list[str]:
    words: list[str] = []
    for node in nodes:
        words += _words_of(script, node)
    return words


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
    words = _words_of_all(script, node.named_children)
    if not words:
        return
    name = words[0]
    is_sourcing = name in ("source", ".") and len(words) > 1
    if is_sourcing:
        _read_sourced(script, words[1])
    elif name == "read" and heredoc is not None:
        script.variables[words[-1]] = [heredoc]
    else:
        line = node.start_point[0] + 1
        script.commands.append(Command(tuple(words), line))


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
    candidates = []
    if os.path.isabs(path):
        candidates.append(Path(path))
    for folder in (script.folder, *script.folder.resolve().parents[:3]):
        candidates.append(folder / known_end)
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    return None


def _words_of(script: Script, node: Node) -> list[str]:
    """Return the words that a node of an argument becomes: none, one, or those of an array."""
    if node.type in ("comment", "variable_assignment", "file_redirect", "herestring_redirect"):
        return []
    if node.type == "command_name":
        if not node.named_children:
            return [_text(node)]
        return _words_of(script, node.named_children[0])
    array = _expanded_array(node)
    if array:
        return _words_of_array(script, array, is_quoted=node.type == "string")
    text = _expanded_text(script, node)
    is_unquoted = node.type in ("simple_expansion", "expansion")
    if is_unquoted:
        return _split(text)
    return [text]


def _words_of_array(script: Script, name: str, is_quoted: bool) -> list[str]:
    """Return the words of ``${NAME[@]}``.

    An array that is set nowhere has no words, as no environment can hold an array.
    """
    elements = script.variables.get(name, [])
    if elements == [_unknown(name)]:
        # these words are flags that are not known, and not a value of the flag before them
        return [f"--{_unknown(name)}"]
    if is_quoted:
        return elements
    words: list[str] = []
    for element in elements:
        words += _split(element)
    return words


def _split(text: str) -> list[str]:
    """Return the words of a text that is not quoted; what is not known is one word."""
    if UNKNOWN.search(text):
        return [text]
    return text.split()


def _expanded_array(node: Node) -> str:
    """Return the array of a word that is ``${NAME[@]}``, quoted or not; "" for any other word."""
    is_quoted_node = node.type == "string" and node.named_child_count == 1
    if is_quoted_node:
        node = node.named_children[0]
    if node.type != "expansion":
        return ""
    subscript = _child_of_type(node, "subscript")
    if subscript is None:
        return ""
    name, index = subscript.named_children[:2]
    if _text(index) not in ALL_ELEMENTS:
        return ""
    return _text(name)


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
    # bash takes a variable with and without $ here; without, Python's grammar is bash's
    expression = re.sub(r"[${}]", "", inner).strip()
    try:
        tree = ast.parse(expression, mode="eval")
        return _number(script, tree.body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _number(script: Script, node: ast.expr) -> int:
    """Return the value of an expression of whole numbers; raise ``ValueError`` where it is not one."""
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number
        case ast.Name():
            return int(_value_of(script, node.id) or "unknown")
        case ast.UnaryOp(op=ast.USub()):
            return -_number(script, node.operand)
        case ast.BinOp():
            operate = OPERATIONS.get(type(node.op))
            if operate is not None:
                return operate(_number(script, node.left), _number(script, node.right))
    raise ValueError


def _quotient(a: int, b: int) -> int:
    """Return a quotient rounded towards 0, as in C and in bash."""
    quotient = abs(a) // abs(b)
    is_negative = (a < 0) != (b < 0)
    return -quotient if is_negative else quotient


def _remainder(a: int, b: int) -> int:
    """Return what a quotient that is rounded towards 0 leaves."""
    return a - _quotient(a, b) * b


def _power(a: int, b: int) -> int:
    if b < 0 or max(abs(a), b) > MOST_POWER:
        raise ValueError
    return int(a**b)


def _unquoted(node: Node) -> str:
    """Return what stands between double quotes, where a backslash quotes four characters alone."""
    return re.sub(r'\\(["$`\\])', r"\1", _text(node))


# what bash computes in $((...)), by Python's names of the operators
OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: _quotient,
    ast.Mod: _remainder,
    ast.Pow: _power,
}


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
        return _default_text(script, node, variable)
    if operator in ("", *DEFAULT_OPERATORS) and value is not None:
        return value
    return _unknown(name)  # it has no value, or is computed, as by ${NAME##*/}


def _default_text(script: Script, node: Node, variable: Node) -> str:
    """Return the text in ``${NAME:-text}``: all that stands behind the variable."""
    text = ""
    for child in node.named_children:
        if child.start_byte > variable.start_byte:
            text += _expanded_text(script, child)
    return text


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
    if index in ALL_ELEMENTS:
        return " ".join(words)
    is_known = index.isdigit() and int(index) < len(words)
    if not is_known:
        return _unknown(name)
    return words[int(index)]


def _value_of(script: Script, name: str) -> str | None:
    """Return a variable's value: of the script, or else of the environment, which a shell would have."""
    words = script.variables.get(name)
    if words is None:
        return os.environ.get(name)
    return " ".join(words)


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
    if " " not in word:
        return [word]
    for program in programs:
        if program in word:
            return word.split()
    return [word]


def _names(word: str, program: str) -> bool:
    if fnmatchcase(word, program):
        return True
    # a file may be named with its folders, a module may not
    return program.endswith(".py") and fnmatchcase(word, f"*/{program}")


def flags_of(words: Sequence[str]) -> dict[str, Any]:
    """Return the flags of argparse as settings: ``--a.b 1`` as ``{"a.b": 1}``.

    A flag that nothing follows is true, one that several words follow has a list of them. Words are read as
    in a graph: ``1e-6`` is a number, ``{"a": 1}`` a mapping.

    Example:
        >>> flags_of(["--lr", "1e-6", "--packing", "--clip", "0.2", "0.28", "--n=-1"])
        {'lr': 1e-06, 'packing': True, 'clip': [0.2, 0.28], 'n': -1}
    """
    texts_by_flag: dict[str, list[str]] = {}
    texts: list[str] = []  # of the flag at hand; words before the first flag are of none
    for word in words:
        is_flag = word.startswith("--") and len(word) > 2
        if not is_flag:
            texts.append(word)
            continue
        flag, has_value, value = word[2:].partition("=")
        texts = [value] if has_value else []
        texts_by_flag[flag] = texts
    return {flag: _flag_value(texts) for flag, texts in texts_by_flag.items()}


def _flag_value(texts: Sequence[str]) -> Any:
    if not texts:
        return True
    if len(texts) == 1:
        return _value(texts[0])
    return [_value(text) for text in texts]


def _value(text: str) -> Any:
    """Return what a word stands for; a text that is neither JSON nor a scalar of YAML stays as it is."""
    if text[:1] in ("{", "["):
        try:
            return json.loads(text)
        except ValueError:
            return text
    return scalar(text)
