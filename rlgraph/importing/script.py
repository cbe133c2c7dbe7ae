"""Settings of a Python script that trains with TRL, read from its source: nothing is run.

args = GRPOConfig(num_generations=8, ...)
GRPOTrainer(model="Qwen/Qwen3-0.6B", reward_funcs=[correct], args=args, peft_config=LoraConfig(r=8))
"""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
NAMES = {"reward": "Reward", "distillation": "Distillation"} | {
    kind: kind.upper() for kind in TRAINERS if kind not in ("reward", "distillation")
}
TRAINER_OF = {f"{name}Trainer": kind for kind, name in NAMES.items()}
CONFIG_OF = {f"{name}Config": kind for kind, name in NAMES.items()}
PEFT: dict[str, Any] = {
    "use_peft": True,
    "r": 8,
    "lora_alpha": 8,
}  # of a LoraConfig, with peft's own defaults
LORA = {"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"}
# what TRL gives a reward function beside columns of the data
GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")
OF_TRL = (
    'with TRL installed it is function: trl.rewards:{name} (docs/from_trl.md, "TRL\'s own reward functions")'
)
NO_FILE = "no file is known that has it: write where it is, as function: my_rewards.py:{name}"
NO_NAME = "`{text}` is no name of a function: write one to a file, as function: my_rewards.py:NAME"
A_MODEL = "{text} is a reward model: a model with head: value, and op: reward.model (see the graph rm_ppo)"
IN_SCRIPT = "move it out of the script, which trains where it is loaded: function: my_rewards.py:{name}"


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
        return node | ({"columns": [*self.columns]} if self.columns else {})


@dataclass
class ScriptSettings:
    """The trainer of a script, its settings, and what of them is set in code that is not read.

    ``given`` has ``${source}`` for what is no literal; ``unread`` says where settings are set, and how.
    """

    kind: str
    given: dict[str, Any] = field(default_factory=dict)
    unread: list[tuple[str, str]] = field(default_factory=list)


def settings_of(file: Path, trainer: str | None = None) -> ScriptSettings:
    """Return the settings of the one trainer that a script makes, or of the one that ``trainer`` says.

    Raises:
        GraphError: the file can't be read, makes none of the trainers, or several.
    """
    reader = _Script(_parsed(file))
    made = [(call, TRAINER_OF[name]) for call, name in reader.calls if name in TRAINER_OF]
    kinds = {kind for _, kind in made}
    if trainer and kinds and trainer not in kinds:
        law = f"{file} makes {_trainers(made)}, and no {NAMES[trainer]}Trainer"
        raise GraphError([Problem("no-trainer", law, None, tuple(sorted(kinds)), "--trainer one of these")])
    if trainer:
        made = [(call, kind) for call, kind in made if kind == trainer]
    if len(made) > 1:
        law = f"{file} makes several trainers: {_trainers(made)}"
        remedy = f"say which: --trainer {made[0][1]}; each makes a graph of its own"
        if len({kind for _, kind in made}) == 1:
            remedy = "leave one of them in a copy of the script, as their settings are not one run's"
        raise GraphError([Problem("several-trainers", law, None, (), remedy)])
    if made:
        return reader.settings(*made[0])
    configs = [(call, CONFIG_OF[name]) for call, name in reader.calls if name in CONFIG_OF]
    configs = [(call, kind) for call, kind in configs if trainer in (None, kind)]
    if len(configs) == 1:
        call, kind = configs[0]
        settings = ScriptSettings(kind)
        reader.read_call(call, settings, NAMES[kind] + "Config")
        return settings
    names = tuple(f"{name}Trainer" for name in NAMES.values())
    law, remedy = f"{file} makes none of TRL's trainers", "give the script that does, or a YAML file"
    raise GraphError([Problem("no-trainer", law, None, names, remedy)])


def _trainers(made: Sequence[tuple[ast.Call, str]]) -> str:
    return ", ".join(f"{NAMES[kind]}Trainer (line {call.lineno})" for call, kind in made)


class _Script:
    """The calls and assignments of a script, by name.

    A name has a value here where it is assigned once: what is assigned under conditions, or anew, is not
    known without running it.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.aliases = dict[str, str]()
        self.assigned = dict[str, list[ast.expr]]()
        self.unpacked = dict[str, ast.expr]()
        self.changed = dict[str, list[ast.stmt | ast.Call]]()
        self.straight = {id(statement) for statement in _straight(tree)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                self.aliases |= {alias.asname: alias.name for alias in node.names if alias.asname}
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    self._note(target, node.value, node)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                self._note(node.target, node.value, node)
            elif isinstance(node, ast.AugAssign):
                self.changed.setdefault(_root(node.target), []).append(node)
            elif isinstance(node, ast.Call):
                self._note_change(node)
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        calls.sort(key=lambda call: (call.lineno, call.col_offset))
        self.calls = [(call, self.name_of(call.func)) for call in calls]

    def _note(self, target: ast.expr, value: ast.expr, statement: ast.stmt) -> None:
        if isinstance(target, ast.Name):
            self.assigned.setdefault(target.id, []).append(value)
        elif isinstance(target, ast.Tuple | ast.List):
            self.unpacked |= {each.id: value for each in target.elts if isinstance(each, ast.Name)}
        elif isinstance(target, ast.Attribute | ast.Subscript):
            self.changed.setdefault(_root(target), []).append(statement)

    def _note_change(self, call: ast.Call) -> None:
        """Note a call that changes what it is of: ``setattr(args, ...)``, ``args.set_training(...)``."""
        if isinstance(call.func, ast.Name) and call.func.id in ("setattr", "vars") and call.args:
            self.changed.setdefault(_root(call.args[0]), []).append(call)
        elif isinstance(call.func, ast.Attribute) and call.func.attr.startswith(
            ("set_", "update", "__dict__")
        ):
            self.changed.setdefault(_root(call.func), []).append(call)

    def name_of(self, function: ast.expr) -> str:
        """Return the last part of a function's name, as it is imported."""
        name = ast.unparse(function).rpartition(".")[2]
        return self.aliases.get(name, name)

    def value_of(self, node: ast.expr) -> ast.expr | None:
        """Return the expression that a name stands for, or None where it is not known."""
        if not isinstance(node, ast.Name):
            return node
        values = self.assigned.get(node.id, [])
        return values[0] if len(values) == 1 and node.id not in self.unpacked else None

    def settings(self, call: ast.Call, kind: str) -> ScriptSettings:
        """Return the settings that a call of a trainer is given."""
        settings = ScriptSettings(kind)
        given: dict[str, ast.expr] = dict(zip(ARGUMENTS[kind], call.args, strict=False))
        given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        for keyword in call.keywords:
            if keyword.arg is None:
                for key, value in self._mapping(keyword.value, settings, f"{NAMES[kind]}Trainer").items():
                    given.setdefault(key, value)
        args, peft = given.pop("args", None), given.pop("peft_config", None)
        if args is not None:
            self._read_args(args, settings)
        self._read_adapter(peft, settings)
        model = given.pop("model", None)
        if model is not None:
            self._read_model(model, settings)
        settings.given |= {key: self.literal(value) for key, value in given.items()}
        settings.given = dict(flattened(settings.given))
        return settings

    def _read_args(self, args: ast.expr, settings: ScriptSettings) -> None:
        """Read what ``args`` of a trainer is: a call of its configuration, by name or on the spot."""
        source, value = ast.unparse(args), self.value_of(args)
        if isinstance(args, ast.Name) and args.id in self.unpacked:
            maker = ast.unparse(self.unpacked[args.id])
            text = f"`{maker}` reads them from the command line: give them as KEY=VALUE"
            settings.unread.append((source, text))
        elif isinstance(value, ast.Call):
            self.read_call(value, settings, source)
        elif not (isinstance(value, ast.Constant) and value.value is None):
            settings.unread.append(
                (source, "it is made in a way that is not read: give its settings as KEY=VALUE")
            )
        if isinstance(args, ast.Name):
            self._read_changes(args.id, settings)

    def read_call(self, call: ast.Call, settings: ScriptSettings, source: str) -> None:
        """Read the keywords of a configuration's call, or of a functools.partial of one."""
        name, made = self.name_of(call.func), self.value_of(call.func)
        if isinstance(made, ast.Call) and self.name_of(made.func) == "partial":
            self._read_keywords(made, settings, source)
        elif name not in CONFIG_OF and not (
            isinstance(made, ast.Name | ast.Attribute) and self.name_of(made) in CONFIG_OF
        ):
            text = f"`{ast.unparse(call.func)}` makes it, which is not read: give its settings as KEY=VALUE"
            settings.unread.append((source, text))
            return
        self._read_keywords(call, settings, source)

    def _read_keywords(self, call: ast.Call, settings: ScriptSettings, source: str) -> None:
        if call.args and self.name_of(call.func) != "partial":
            settings.given["output_dir"] = self.literal(call.args[0])
        for keyword in call.keywords:
            if keyword.arg:
                settings.given[keyword.arg] = self.literal(keyword.value)
            else:
                values = self._mapping(keyword.value, settings, source)
                settings.given |= {key: self.literal(value) for key, value in values.items()}

    def _mapping(self, node: ast.expr, settings: ScriptSettings, source: str) -> dict[str, ast.expr]:
        """Return what ``**node`` stands for, where it is a literal that nothing changes."""
        value = self.value_of(node)
        values = _items(value) if value is not None else None
        if values is None or (isinstance(node, ast.Name) and node.id in self.changed):
            text = f"`**{ast.unparse(node)}` is not read: give its settings as KEY=VALUE"
            settings.unread.append((source, text))
            return {}
        return values

    def _read_changes(self, name: str, settings: ScriptSettings) -> None:
        """Read ``args.beta = 0.04``; a change under a condition, or by a call, is not read."""
        for change in sorted(self.changed.get(name, ()), key=lambda node: node.lineno):
            source = ast.unparse(change)
            is_plain = isinstance(change, ast.Assign) and id(change) in self.straight
            target = change.targets[0] if isinstance(change, ast.Assign) else None
            if is_plain and isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                settings.given[target.attr] = self.literal(change.value)  # type: ignore[union-attr]
            else:
                text = f"line {change.lineno}, `{source.splitlines()[0]}`, is not read: give it as KEY=VALUE"
                settings.unread.append((name, text))

    def _read_adapter(self, peft: ast.expr | None, settings: ScriptSettings) -> None:
        """Read the LoraConfig that a trainer is given, or the only one where a model is wrapped by hand."""
        value = self.value_of(peft) if peft is not None else None
        configs = [call for call, name in self.calls if name == "LoraConfig"]
        if value is None and len(configs) == 1:
            value = configs[0]
        if isinstance(value, ast.Call) and self.name_of(value.func) == "LoraConfig":
            adapter = ScriptSettings(settings.kind)
            self._read_keywords(value, adapter, "LoraConfig")
            settings.given |= {LORA.get(key, key): each for key, each in (PEFT | adapter.given).items()}
            settings.unread += adapter.unread
        elif peft is not None and not (isinstance(value, ast.Constant) and value.value is None):
            text = f"`{ast.unparse(peft)}` is not read: give use_peft=true, lora_r, lora_alpha and the like"
            settings.unread.append(("peft_config", text))

    def _read_model(self, model: ast.expr, settings: ScriptSettings) -> None:
        """Read a model by its name, also where ``from_pretrained`` loads it."""
        value = self.value_of(model)
        if isinstance(value, ast.Call) and self.name_of(value.func) == "from_pretrained" and value.args:
            model = value.args[0]
            kwargs = {keyword.arg: self.literal(keyword.value) for keyword in value.keywords if keyword.arg}
            settings.given |= {f"model_init_kwargs.{key}": each for key, each in kwargs.items()}
        settings.given["model"] = self.literal(model)

    def literal(self, node: ast.expr) -> Any:
        """Return a literal's value, a list of what it holds, or the source of anything else as ``${...}``."""
        constant = self.value_of(node)
        if isinstance(constant, ast.Constant):
            node = constant
        holds_values = isinstance(constant, ast.List | ast.Tuple | ast.Dict)
        if (
            isinstance(node, ast.Name)
            and constant is not None
            and holds_values
            and node.id not in self.changed
        ):
            node = constant
        if isinstance(node, ast.List | ast.Tuple):
            return [self.literal(item) for item in node.elts]
        try:
            value = ast.literal_eval(node)
        except (ValueError, TypeError):
            value = ...
        plain = isinstance(value, str | int | float | bool | list | dict | None)
        return value if plain else f"${{{ast.unparse(node)}}}"


def _straight(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements that run whenever their file or function does: under no condition and no loop."""
    bodies: list[list[ast.stmt]] = [tree.body]
    while bodies:
        for statement in bodies.pop():
            yield statement
            is_main = isinstance(statement, ast.If) and ast.unparse(statement.test).startswith("__name__")
            if is_main or isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.With):
                bodies.append(statement.body)  # type: ignore[attr-defined]


def _root(node: ast.expr) -> str:
    """Return the name at the left of ``a.b[c].d``."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _items(node: ast.expr) -> dict[str, ast.expr] | None:
    """Return the items of ``{...}`` or ``dict(...)`` with names for keys, or None."""
    if isinstance(node, ast.Dict):
        keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
        if all(isinstance(key, str) for key in keys):
            return dict(zip(map(str, keys), node.values, strict=True))
    if not isinstance(node, ast.Call) or ast.unparse(node.func) != "dict" or node.args:
        return None
    if not all(keyword.arg for keyword in node.keywords):
        return None
    return {str(keyword.arg): keyword.value for keyword in node.keywords}


def names_of(functions: Any) -> list[str]:
    """Return the names of one function or several, as a script or a YAML file has them."""
    listed = functions if isinstance(functions, list) else [functions]
    return [str(name).removeprefix("${").removesuffix("}") for name in listed]


def reward_function(text: str, file: Path, options: Options, place: int = 0) -> RewardFunction:
    """Return the function of a name: one of the script, one that it imports, or a dotted path.

    What is no name, as a call or a model, is called by its place among the functions.
    """
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", text):
        remedy = A_MODEL if re.fullmatch(r"[\w.-]+/[\w./-]+", text) else NO_NAME
        return RewardFunction(f"reward_{place + 1}", remedy=remedy.format(text=text))
    module, _, name = text.rpartition(".")
    folder = Path() if module else file.parent
    if file.suffix == ".py" and not module:
        module = _imported(_parsed(file), name) or file.stem
    if module.partition(".")[0] == "trl" or not module:
        return RewardFunction(name, remedy=OF_TRL.format(name=name))
    path = folder / f"{module.replace('.', '/')}.py"
    for node in _parsed(path).body if path.is_file() else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            columns = tuple(name for name in names if name not in GIVEN)
            more = node.args.kwarg is not None and not columns
            if path == file:
                return RewardFunction(name, "???", columns, more, IN_SCRIPT.format(name=name))
            return RewardFunction(name, f"{options.path(str(path))}:{name}", columns, more)
    return RewardFunction(name, remedy=NO_FILE.format(name=name))


def _imported(tree: ast.Module, name: str) -> str:
    """Return the module that a name is imported from, if it is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and name in [alias.asname or alias.name for alias in node.names]:
            return node.module or ""
    return ""


def _parsed(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_text(encoding="utf-8"), str(file))
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise GraphError([Problem("no-file", f"{file}: can't be read: {error}")]) from error
