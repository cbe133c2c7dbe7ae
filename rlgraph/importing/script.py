"""Settings of a Python script that trains with TRL, read from its source: nothing is run.

args = GRPOConfig(num_generations=8, ...)
GRPOTrainer(model="Qwen/Qwen3-0.6B", reward_funcs=[correct], args=args, peft_config=LoraConfig(r=8))
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from rlgraph.errors import GraphError, Problem
from rlgraph.importing.options import Options, flattened

# the trainers, and their first arguments, which a script may give by their places (TRL 1.16.0)
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "grpo": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"),
    "rloo": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"),
    "dpo": ("model", "ref_model", "args", "data_collator", "train_dataset", "eval_dataset"),
    "sft": ("model", "args", "data_collator", "train_dataset", "eval_dataset"),
    "kto": ("model", "ref_model", "args", "data_collator", "train_dataset", "eval_dataset"),
    "reward": ("model", "args", "data_collator", "train_dataset", "eval_dataset"),
    "distillation": ("model", "teacher_model", "args", "train_dataset", "eval_dataset"),
    "cpo": ("model", "args", "data_collator", "train_dataset", "eval_dataset"),
    "orpo": ("model", "args", "data_collator", "train_dataset", "eval_dataset"),
}
TRAINERS = tuple(ARGUMENTS)
CLASS_NAMES = {
    "grpo": "GRPO",
    "rloo": "RLOO",
    "dpo": "DPO",
    "sft": "SFT",
    "kto": "KTO",
    "reward": "Reward",
    "distillation": "Distillation",
    "cpo": "CPO",
    "orpo": "ORPO",
}
TRAINER_OF = {f"{name}Trainer": kind for kind, name in CLASS_NAMES.items()}
CONFIG_OF = {f"{name}Config": kind for kind, name in CLASS_NAMES.items()}
# peft's own defaults of a LoraConfig
PEFT: dict[str, Any] = {"use_peft": True, "r": 8, "lora_alpha": 8}
LORA = {"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"}
# the arguments that TRL passes to a reward function beside columns of the data
PASSED_BY_TRL = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")
OF_TRL = (
    'with TRL installed it is function: trl.rewards:{name} (docs/from_trl.md, "TRL\'s own reward functions")'
)
NO_FILE = "the file that defines it is not known: name it, as in function: my_rewards.py:{name}"
NO_NAME = "`{text}` is not the name of a function: write one in a file, as in function: my_rewards.py:NAME"
A_MODEL = "{text} is a reward model: use a model with head: value and reward.model (see the graph rm_ppo)"
IN_SCRIPT = "move it out of the script, since loading the script would train: function: my_rewards.py:{name}"
# names of methods by which an object's settings are changed begin so
CHANGING_METHODS = ("set_", "update", "__dict__")
UNCONDITIONAL = (ast.FunctionDef, ast.AsyncFunctionDef, ast.With)  # what is in them runs whenever they do
DOTTED_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
MODEL_NAME = re.compile(r"[\w.-]+/[\w./-]+")


@dataclass(frozen=True)
class RewardFunction:
    """A function by its name, as a graph names it, and the columns in its signature.

    ``takes_more`` says that it has ``**kwargs`` and no columns, ``remedy`` what to do where no file has it.
    """

    name: str
    target: str = "???"
    columns: tuple[str, ...] = ()
    takes_more: bool = False
    remedy: str = ""

    def node(self) -> dict[str, Any]:
        """Return the node that scores by it."""
        node = {"op": "reward.trl", "function": self.target, "in": {"question": "trl_prompt"}}
        if self.columns:
            node["columns"] = [*self.columns]
        return node


@dataclass
class ScriptSettings:
    """The trainer of a script, its settings, and those settings that are set in code which is not read.

    ``values`` has ``${source}`` for an expression that is not a literal; ``unread`` says where settings are
    set, and how.
    """

    kind: str
    values: dict[str, Any] = field(default_factory=dict)
    unread: list[tuple[str, str]] = field(default_factory=list)


def settings_of(file: Path, trainer: str | None = None) -> ScriptSettings:
    """Return the settings of the only trainer that a script makes, or of the one that ``trainer`` names.

    Raises:
        GraphError: the file can't be read, makes none of the trainers, or several.
    """
    reader = _Script(_parsed(file))
    calls = reader.calls_of(TRAINER_OF)
    kinds = {kind for _, kind in calls}
    makes_another = bool(kinds) and trainer not in kinds
    if trainer and makes_another:
        law = f"{file} makes {_trainers(calls)}, but no {CLASS_NAMES[trainer]}Trainer"
        raise GraphError([Problem("no-trainer", law, None, tuple(sorted(kinds)), "--trainer one of these")])
    calls = _of_kind(calls, trainer)
    if len(calls) > 1:
        raise GraphError([_several_trainers(file, calls)])
    if calls:
        call, kind = calls[0]
        return reader.settings(call, kind)
    # A script may pass its configuration to a trainer of its own: its settings are read all the same.
    configs = _of_kind(reader.calls_of(CONFIG_OF), trainer)
    if len(configs) == 1:
        call, kind = configs[0]
        settings = ScriptSettings(kind)
        reader.read_call(call, settings, f"{CLASS_NAMES[kind]}Config")
        return settings
    names = tuple(f"{name}Trainer" for name in CLASS_NAMES.values())
    law = f"{file} makes none of TRL's trainers"
    raise GraphError([Problem("no-trainer", law, None, names, "give one that does, or a YAML file")])


def _of_kind(calls: Sequence[tuple[ast.Call, str]], trainer: str | None) -> list[tuple[ast.Call, str]]:
    """Return the calls of one kind of trainer; all of them where none is named."""
    if trainer is None:
        return [*calls]
    return [(call, kind) for call, kind in calls if kind == trainer]


def _several_trainers(file: Path, calls: Sequence[tuple[ast.Call, str]]) -> Problem:
    law = f"{file} makes several trainers: {_trainers(calls)}"
    kinds = [kind for _, kind in calls]
    if len(set(kinds)) == 1:
        remedy = "keep one of them in a copy of the script: they would be different runs"
    else:
        remedy = f"choose one, as in --trainer {kinds[0]}; each makes its own graph"
    return Problem("several-trainers", law, remedy=remedy)


def _trainers(calls: Sequence[tuple[ast.Call, str]]) -> str:
    return ", ".join(f"{CLASS_NAMES[kind]}Trainer (line {call.lineno})" for call, kind in calls)


class _Script:
    """The calls and assignments of a script, by name.

    Invariants:

    - A name has a value here only where it is assigned once: what is assigned under conditions, or anew, is
      not known without running the script.
    - A mapping or list that a later statement changes counts as not known.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.aliases: dict[str, str] = {}
        self.assigned: dict[str, list[ast.expr]] = {}
        self.unpacked: dict[str, ast.expr] = {}
        self.changed: dict[str, list[ast.stmt | ast.Call]] = {}
        self.unconditional = {id(statement) for statement in _unconditional(tree)}
        calls: list[ast.Call] = []
        for node in ast.walk(tree):
            self._note(node)
            if isinstance(node, ast.Call):
                calls.append(node)
        # ast.walk goes by depth, and a script is read by its lines; aliases are all known by now
        calls.sort(key=lambda call: (call.lineno, call.col_offset))
        self.calls = [(call, self.name_of(call.func)) for call in calls]

    def _note(self, node: ast.AST) -> None:
        """Note what a node of the syntax tree says of a name."""
        match node:
            case ast.ImportFrom():
                self._note_import(node)
            case ast.Assign():
                for target in node.targets:
                    self._note_assignment(target, node.value, node)
            case ast.AnnAssign(value=ast.expr() as value):
                self._note_assignment(node.target, value, node)
            case ast.AugAssign():
                self._note_change(node.target, node)
            case ast.Call():
                self._note_call(node)

    def _note_import(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            if alias.asname:
                self.aliases[alias.asname] = alias.name

    def _note_assignment(self, target: ast.expr, value: ast.expr, statement: ast.stmt) -> None:
        match target:
            case ast.Name():
                self.assigned.setdefault(target.id, []).append(value)
            case ast.Tuple() | ast.List():
                for item in target.elts:
                    if isinstance(item, ast.Name):
                        self.unpacked[item.id] = value
            case ast.Attribute() | ast.Subscript():
                self._note_change(target, statement)

    def _note_change(self, target: ast.expr, change: ast.stmt | ast.Call) -> None:
        self.changed.setdefault(_root(target), []).append(change)

    def _note_call(self, call: ast.Call) -> None:
        """Note a call that changes an object: ``setattr(args, ...)``, ``args.set_training(...)``."""
        function = call.func
        match function:
            case ast.Name(id="setattr" | "vars"):
                if call.args:
                    self._note_change(call.args[0], call)
            case ast.Attribute():
                if function.attr.startswith(CHANGING_METHODS):
                    self._note_change(function, call)

    def calls_of(self, kinds: Mapping[str, str]) -> list[tuple[ast.Call, str]]:
        """Return the calls of some classes, each with the kind of trainer that its class belongs to."""
        return [(call, kinds[name]) for call, name in self.calls if name in kinds]

    def name_of(self, function: ast.expr) -> str:
        """Return the last part of a function's name, as it is imported."""
        name = ast.unparse(function).rpartition(".")[2]
        return self.aliases.get(name, name)

    def is_call_of(self, node: ast.expr | None, name: str) -> TypeGuard[ast.Call]:
        return isinstance(node, ast.Call) and self.name_of(node.func) == name

    def value_of(self, node: ast.expr) -> ast.expr | None:
        """Return the expression that a name stands for, or None where it is not known."""
        if not isinstance(node, ast.Name):
            return node
        if node.id in self.unpacked:
            return None
        values = self.assigned.get(node.id, [])
        if len(values) != 1:
            return None
        return values[0]

    def settings(self, call: ast.Call, kind: str) -> ScriptSettings:
        """Return the settings that a call of a trainer is given."""
        settings = ScriptSettings(kind)
        arguments = self._arguments(call, settings)
        args = arguments.pop("args", None)
        adapter = arguments.pop("peft_config", None)
        model = arguments.pop("model", None)
        if args is not None:
            self._read_args(args, settings)
        self._read_adapter(adapter, settings)
        if model is not None:
            self._read_model(model, settings)
        for key, value in arguments.items():
            settings.values[key] = self.literal(value)
        settings.values = dict(flattened(settings.values))
        return settings

    def _arguments(self, call: ast.Call, settings: ScriptSettings) -> dict[str, ast.expr]:
        """Return the arguments of a trainer by their names; those of ``**mapping`` count least."""
        arguments: dict[str, ast.expr] = dict(zip(ARGUMENTS[settings.kind], call.args, strict=False))
        mappings = []
        for keyword in call.keywords:
            if keyword.arg is None:
                mappings.append(keyword.value)
            else:
                arguments[keyword.arg] = keyword.value
        for mapping in mappings:
            items = self._mapping(mapping, settings, f"{CLASS_NAMES[settings.kind]}Trainer")
            arguments = items | arguments
        return arguments

    def _read_args(self, args: ast.expr, settings: ScriptSettings) -> None:
        """Read the ``args`` of a trainer: a call of its configuration, by name or on the spot."""
        source = ast.unparse(args)
        value = self.value_of(args)
        maker = self.unpacked.get(args.id) if isinstance(args, ast.Name) else None
        if maker is not None:
            text = f"`{ast.unparse(maker)}` reads them from the command line: give them as KEY=VALUE"
            settings.unread.append((source, text))
        elif isinstance(value, ast.Call):
            self.read_call(value, settings, source)
        elif not _is_none(value):
            text = "it is made in a way that can't be read: give its settings as KEY=VALUE"
            settings.unread.append((source, text))
        if isinstance(args, ast.Name):
            self._read_changes(args.id, settings)

    def read_call(self, call: ast.Call, settings: ScriptSettings, source: str) -> None:
        """Read the keywords of a configuration's call, or of a functools.partial of one."""
        function = self.value_of(call.func)
        if self.is_call_of(function, "partial"):
            self._read_keywords(function, settings, source)
            self._read_keywords(call, settings, source)
            return
        if self._is_config(call.func) or self._is_config(function):
            self._read_keywords(call, settings, source)
            return
        text = f"`{ast.unparse(call.func)}` makes it, which can't be read: give its settings as KEY=VALUE"
        settings.unread.append((source, text))

    def _is_config(self, function: ast.expr | None) -> bool:
        return isinstance(function, ast.Name | ast.Attribute) and self.name_of(function) in CONFIG_OF

    def _read_keywords(self, call: ast.Call, settings: ScriptSettings, source: str) -> None:
        is_partial = self.name_of(call.func) == "partial"
        if call.args and not is_partial:
            settings.values["output_dir"] = self.literal(call.args[0])
        for keyword in call.keywords:
            if keyword.arg is not None:
                settings.values[keyword.arg] = self.literal(keyword.value)
                continue
            for key, value in self._mapping(keyword.value, settings, source).items():
                settings.values[key] = self.literal(value)

    def _mapping(self, node: ast.expr, settings: ScriptSettings, source: str) -> dict[str, ast.expr]:
        """Return the items that ``**node`` stands for, where it is a literal that nothing changes."""
        items = _items(self.value_of(node))
        if items is None or self._is_changed(node):
            text = f"`**{ast.unparse(node)}` can't be read: give its settings as KEY=VALUE"
            settings.unread.append((source, text))
            return {}
        return items

    def _is_changed(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id in self.changed

    def _read_changes(self, name: str, settings: ScriptSettings) -> None:
        """Read ``args.beta = 0.04``; a change under a condition, or by a call, is not read."""
        changes = sorted(self.changed.get(name, ()), key=lambda node: node.lineno)
        for change in changes:
            if id(change) in self.unconditional:
                match change:
                    case ast.Assign(targets=[ast.Attribute(value=ast.Name(), attr=attribute), *_]):
                        settings.values[attribute] = self.literal(change.value)
                        continue
            code = ast.unparse(change).splitlines()[0]
            text = f"line {change.lineno}, `{code}`, can't be read: give it as KEY=VALUE"
            settings.unread.append((name, text))

    def _read_adapter(self, peft: ast.expr | None, settings: ScriptSettings) -> None:
        """Read the LoraConfig that a trainer is given, or the only one where a model is wrapped by hand."""
        config = self._adapter_config(peft, settings.kind)
        if self.is_call_of(config, "LoraConfig"):
            adapter = ScriptSettings(settings.kind)
            self._read_keywords(config, adapter, "LoraConfig")
            values = PEFT | adapter.values
            for key, value in values.items():
                settings.values[LORA.get(key, key)] = value
            settings.unread += adapter.unread
            return
        if peft is not None and not _is_none(config):
            text = f"`{ast.unparse(peft)}` can't be read: give use_peft=true, lora_r, lora_alpha and the like"
            settings.unread.append(("peft_config", text))

    def _adapter_config(self, peft: ast.expr | None, kind: str) -> ast.expr | None:
        """Return the expression of an adapter's configuration, or None where it is not known."""
        if peft is not None:
            value = self.value_of(peft)
            if value is not None:
                return value
        configs = self.calls_of({"LoraConfig": kind})
        if len(configs) != 1:
            return None
        call, _ = configs[0]
        return call

    def _read_model(self, model: ast.expr, settings: ScriptSettings) -> None:
        """Read a model by its name, also where ``from_pretrained`` loads it."""
        value = self.value_of(model)
        if self.is_call_of(value, "from_pretrained") and value.args:
            model = value.args[0]
            for keyword in value.keywords:
                if keyword.arg:
                    settings.values[f"model_init_kwargs.{keyword.arg}"] = self.literal(keyword.value)
        settings.values["model"] = self.literal(model)

    def literal(self, node: ast.expr) -> Any:
        """Return a literal's value, a list's values, or the source of anything else as ``${...}``."""
        value = self.value_of(node)
        is_constant = isinstance(value, ast.Constant)
        is_collection = isinstance(value, ast.List | ast.Tuple | ast.Dict) and not self._is_changed(node)
        if value is not None and (is_constant or is_collection):
            node = value
        if isinstance(node, ast.List | ast.Tuple):
            return [self.literal(item) for item in node.elts]
        source = f"${{{ast.unparse(node)}}}"
        try:
            literal = ast.literal_eval(node)
        except (ValueError, TypeError):
            return source
        if isinstance(literal, str | int | float | bool | list | dict | None):
            return literal
        return source  # bytes, a set or a complex number, which no setting is


def _is_none(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _unconditional(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements that run whenever their file or function does: under no condition and no loop."""
    unread = [*tree.body]
    while unread:
        statement = unread.pop()
        yield statement
        if isinstance(statement, UNCONDITIONAL) or _is_main(statement):
            unread += statement.body


def _is_main(statement: ast.stmt) -> TypeGuard[ast.If]:
    return isinstance(statement, ast.If) and ast.unparse(statement.test).startswith("__name__")


def _root(node: ast.expr) -> str:
    """Return the name at the left of ``a.b[c].d``."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _items(node: ast.expr | None) -> dict[str, ast.expr] | None:
    """Return the items of ``{...}`` or ``dict(...)``; None where a key is not a name, or it is neither."""
    match node:
        case ast.Dict():
            names = [_text_of(key) for key in node.keys]
            values = node.values
        case ast.Call(func=ast.Name(id="dict"), args=[]):
            names = [keyword.arg for keyword in node.keywords]
            values = [keyword.value for keyword in node.keywords]
        case _:
            return None
    items: dict[str, ast.expr] = {}
    for name, value in zip(names, values, strict=True):
        if name is None:  # also of ``**others``
            return None
        items[name] = value
    return items


def _text_of(node: ast.expr | None) -> str | None:
    match node:
        case ast.Constant(value=str() as text):
            return text
    return None


def names_of(functions: Any) -> list[str]:
    """Return the names of one function or several, as a script or a YAML file has them."""
    if not isinstance(functions, list):
        functions = [functions]
    return [str(name).removeprefix("${").removesuffix("}") for name in functions]


def reward_function(text: str, file: Path, options: Options, place: int = 0) -> RewardFunction:
    """Return the function of a name: one of the script, one that it imports, or a dotted path.

    An expression that is not a name, as a call or a model, is called by its place among the functions.
    """
    if MODEL_NAME.fullmatch(text):
        return RewardFunction(f"reward_{place + 1}", remedy=A_MODEL.format(text=text))
    if not DOTTED_NAME.fullmatch(text):
        return RewardFunction(f"reward_{place + 1}", remedy=NO_NAME.format(text=text))
    module, _, name = text.rpartition(".")
    folder = Path()  # a dotted path is relative to the working directory, an import to the script
    if not module:
        folder = file.parent
        if file.suffix == ".py":
            module = _imported(_parsed(file), name) or file.stem
    top_package = module.partition(".")[0]
    if top_package in ("", "trl"):
        return RewardFunction(name, remedy=OF_TRL.format(name=name))
    path = folder / f"{module.replace('.', '/')}.py"
    definition = _definition(path, name)
    if definition is None:
        return RewardFunction(name, remedy=NO_FILE.format(name=name))
    columns = _columns_read(definition)
    has_kwargs = definition.args.kwarg is not None
    takes_more = has_kwargs and not columns
    if path == file:
        return RewardFunction(name, "???", columns, takes_more, IN_SCRIPT.format(name=name))
    return RewardFunction(name, f"{options.path(str(path))}:{name}", columns, takes_more)


def _columns_read(definition: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, ...]:
    """Return the parameters of a reward function that are columns of the data."""
    arguments = definition.args
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return tuple(parameter.arg for parameter in parameters if parameter.arg not in PASSED_BY_TRL)


def _definition(path: Path, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Return the function of a name at the top level of a file; None where there is no file or function."""
    if not path.is_file():
        return None
    for node in _parsed(path).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return node
    return None


def _imported(tree: ast.Module, name: str) -> str:
    """Return the module that a name is imported from, or ""."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        names = [alias.asname or alias.name for alias in node.names]
        if name in names:
            return node.module or ""
    return ""


def _parsed(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_text(encoding="utf-8"), str(file))
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise GraphError([Problem("no-file", f"{file}: can't be read: {error}")]) from error
