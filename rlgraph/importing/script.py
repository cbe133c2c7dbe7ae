"""Settings of a Python script that trains with TRL, read from its source: nothing is run.

args = GRPOConfig(num_generations=8, ...)
GRPOTrainer(model="Qwen/Qwen3-0.6B", reward_funcs=[correct], args=args, peft_config=LoraConfig(r=8))
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlgraph.errors import GraphError, Problem
from rlgraph.importing.options import Options, flattened

TRAINERS = ("grpo", "rloo", "dpo", "sft")
TRAINER = re.compile("(GRPO|RLOO|DPO|SFT)(?:Config|Trainer)")
PEFT: dict[str, Any] = {
    "use_peft": True,
    "r": 8,
    "lora_alpha": 8,
}  # of a LoraConfig, with peft's own defaults
LORA = {"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"}
PLAIN = ("args", "peft_config")  # arguments of a trainer that other calls make
# what TRL gives a reward function beside columns of the data
GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")
OF_TRL = "write trl_rewards.py with `from trl.rewards import {name}`, and function: trl_rewards.py:{name}"
NO_FILE = "no file is known that has it: write where it is, as function: my_rewards.py:{name}"
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


def settings_of(file: Path) -> tuple[str, dict[str, Any]]:
    """Return the trainer that a script makes and its settings; what is no literal is given as ``${source}``.

    Raises:
        GraphError: the file can't be read, or makes none of the trainers.
    """
    tree, kind, given = _parsed(file), "", dict[str, Any]()
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    constants = {ast.unparse(target): node.value for node in assigned for target in node.targets}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset)):
        name = ast.unparse(call.func).rpartition(".")[2]
        values: dict[str, Any] = {k.arg: _value(k.value, constants) for k in call.keywords if k.arg}
        if name == "LoraConfig":
            given |= {LORA.get(key, key): value for key, value in (PEFT | values).items()}
        elif trainer := TRAINER.fullmatch(name):
            kind = kind or trainer[1].lower()
            given |= {key: value for key, value in values.items() if key not in PLAIN}
    if not kind:
        names = tuple(f"{kind.upper()}Trainer" for kind in TRAINERS)
        law, remedy = f"{file} makes none of TRL's trainers", "give the script that does, or a YAML file"
        raise GraphError([Problem("no-trainer", law, None, names, remedy)])
    return kind, dict(flattened(given))


def names_of(functions: Any) -> list[str]:
    """Return the names of one function or several, as a script or a YAML file has them."""
    listed = functions if isinstance(functions, list) else [functions]
    return [str(name).removeprefix("${").removesuffix("}") for name in listed]


def reward_function(text: str, file: Path, options: Options) -> RewardFunction:
    """Return the function of a name: one of the script, one that it imports, or a dotted path."""
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


def _value(node: ast.expr, constants: dict[str, ast.expr]) -> Any:
    """Return a literal's value, a list of what it holds, or the source of anything else as ``${...}``."""
    if isinstance(constant := constants.get(ast.unparse(node)), ast.Constant):
        node = constant
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item, constants) for item in node.elts]
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        value = ...
    plain = isinstance(value, str | int | float | bool | list | dict | None)
    return value if plain else f"${{{ast.unparse(node)}}}"
