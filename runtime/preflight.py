"""Checks a run's files before anything starts: weights, tokenizers, data, context."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import ceil
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from rlgraph.engines.registry import TRAINING, serving
from rlgraph.errors import GraphError, Mark, Problem, RlgraphError, shortened
from rlgraph.ir.function import Function
from rlgraph.ir.plan import Plan
from rlgraph.laws.settings import intervals, longer_than_the_run
from rlgraph.nodes import OPS, PARSERS
from rlgraph.nodes.agent.template import unread_call
from rlgraph.nodes.agent.toolbox import check_tools
from rlgraph.nodes.data.prompts import shown
from rlgraph.nodes.support.data_file import changed as modified
from rlgraph.nodes.support.data_file import local_path, matching
from rlgraph.nodes.support.mixture import mixture_of
from rlgraph.nodes.support.sandbox import check_sandbox
from rlgraph.ops import Parser
from rlgraph.ops.registry import load
from rlgraph.ops.tools import Tool
from rlgraph.runtime.engines.findings import Findings, folder_findings
from rlgraph.runtime.engines.model_files import ConfigError, ConfigFileError, ModelFiles, context_of
from rlgraph.runtime.engines.tokenizer_files import TokenizerError
from rlgraph.syntax.source import Tree
from rlgraph.variables import with_values

NOT_LOADING = ("shuffle", "weights")  # attributes that say what to take of the data, not what it is


@dataclass(frozen=True)
class LookedAt:
    """What a run's files say.

    Attributes:
        iterations: of its epochs; None where it has none.
        rows: of each source whose rows are counted before it gives them.
        warnings: what the files likely do not mean.
    """

    iterations: int | None
    rows: Mapping[str, int]
    warnings: Sequence[Problem]


def preflight(plan: Plan, tree: Tree, strict: bool = False) -> LookedAt:
    """Look at every model folder and data file that the plan names.

    With ``strict`` warnings are problems too. The iterations are as many as take the rows of the source so
    often, the last of them more where it does not come out even. Where a filter refills, an iteration is
    taken to ask for what its first round does.

    Raises:
        GraphError: with every problem found, each at the place in the graph that named the file.
    """
    checks = Preflight(plan, tree)
    checks.open_values()
    iterations = None
    for look in (checks.sandboxes, checks.models, checks.stops, checks.data) if not checks.problems else ():
        look()
    if not checks.problems:
        iterations = checks.iterations()
        checks.intervals(iterations)
    if strict:
        checks.problems += [replace(warning, grade="error") for warning in checks.warnings]
    if checks.problems:
        raise GraphError(checks.problems)
    return LookedAt(iterations, checks.rows, checks.warnings)


class Preflight:
    """Collects problems of one plan."""

    def __init__(self, plan: Plan, tree: Tree) -> None:
        self.plan, self.tree = plan, tree
        self.problems: list[Problem] = []
        self.warnings: list[Problem] = []
        self.endless: set[str] = set()  # models whose files name no token that ends a text
        self.tokenizers: dict[str, Any] = {}
        self.context: dict[str, int | None] = {}  # model -> tokens that fit
        self.vocabulary: dict[str, int | None] = {}  # model -> its tokens
        self.rows: dict[str, int] = {}  # source -> its rows

    def problem(self, kind: str, law: str, mark: Mark, remedy: str = "") -> None:
        self.problems.append(Problem(kind, law, mark, remedy=remedy))

    def open_values(self) -> None:
        """Check that every value written ??? was given."""
        for name in self.plan.open_values:
            mark = self.tree.at(tuple(name.split("."))).mark
            self.problem("open-value", f"`{name}` is still open", mark, f"give it: {name}=...")

    def iterations(self) -> int | None:
        """Return the iterations of the plan's epochs."""
        epochs = self.plan.schedule.epochs
        if not isinstance(epochs, dict):
            return None
        ((source, times),) = epochs.items()
        if source not in self.rows:
            self._uncounted(("schedule", "epochs"), source, "give the run's length as schedule.iterations")
            return None
        return ceil(round(times * self.rows[source] / self._taken(source), 6))

    def intervals(self, iterations: int | None) -> None:
        """Check that the rows are known of sources whose epochs are counted on the way.

        An interval that is longer than the run is a warning where only the rows tell how long one of both is:
        the run, which has so many ``iterations`` where it is given in epochs, or the interval.
        """
        for path, every in intervals(self.plan).items():
            if isinstance(every, int):
                length, known = float(every), iterations
            elif every.seconds:
                continue
            elif every.source not in self.rows:
                self._uncounted(path, every.source, "give iterations, or a duration as 30 min")
                continue
            else:
                length = float(every.epochs * self.rows[every.source] / self._taken(every.source))
                known = self.plan.iterations
            if known and length > known:
                self.warnings += longer_than_the_run(self.plan, self.tree, path, f"{known:,} iterations")

    def _uncounted(self, path: tuple[str, str], source: str, remedy: str) -> None:
        law = f"`{'.'.join(path)}`: only `{source}` itself knows how many rows it gives"
        self.problem("run-length", law, self.tree.at(path).mark, remedy)

    def _taken(self, source: str) -> int:
        """Return the rows that an iteration takes of a source; where a filter refills, in its first round."""
        taken = self.plan.functions["train"][source].value("rows")
        for region in self.plan.regions.values():
            taken = region.asks(region.rows, 0, 0) if region.source == source else taken
        return self.rows[source] if taken == "all" else int(taken)

    def models(self) -> None:
        """Check that each model's folder holds a configuration, weights and, where needed, a tokenizer."""
        needed = {f.tokenizer for phase in self.plan.functions.values() for f in phase.values()}
        self._engines()
        refused: set[str] = set()  # a policy and its reference often lie at one path: say it once
        for name, model in self.plan.models.items():
            if model.path in refused:
                continue
            mark = self.tree.at(("models", name, "path")).mark
            self._reachable(f"models.{name}.path", with_values(model.path), mark)
            brings = model.serve is not None and not serving(model.serve).paths  # weights of its own
            files = ModelFiles(local_path(with_values(model.path)), model.config, model.trust_remote_code)
            reason = self._model(name, files, model.serve is not None or name in needed, not brings)
            if reason:
                refused.add(model.path)
                remedy = f"give a Hugging Face model folder: models.{name}.path=DIR"
                law = f"models.{name}.path: {model.path} {reason}"
                self.problem("no-model", law, mark, remedy + _how_to_make(model.path))

    def _reachable(self, what: str, path: str, mark: Mark) -> None:
        """Check that workers find a file or folder that is here, where they are in a folder of their own."""
        there = self.plan.schedule.runtime_env.get("working_dir")
        if there and not Path(path).is_absolute() and Path(path).exists():
            law = f"{what}: {path} is in this folder, and workers are in another"
            law += " (schedule.runtime_env.working_dir)"
            self.problem("relative-path", law, mark, f"give it as {Path(path).absolute()}")

    def sandboxes(self) -> None:
        """Check that programs of a policy can be run in a sandbox, on this host."""
        for phase, functions in self.plan.functions.items():
            for node, function in functions.items():
                for user in (function, *function.hooks.values()):
                    try:
                        check_sandbox(f"node `{node}`", user.attributes.get("allow_unsandboxed", True))
                    except RlgraphError as error:
                        self.problem("sandbox", str(error), self._mark(phase, node))

    def _engines(self) -> None:
        for name, model in self.plan.models.items():
            if model.serve is None or not serving(model.serve).preflight:
                continue
            check: Callable[[Any, str], Findings] = resolve_name(serving(model.serve).preflight)
            for finding in check(with_values(model.serve), self.plan.device):
                path = f"models.{name}.serve"
                mark = self.tree.at(("models", name, "serve", *finding.key)).mark
                law = f"{path}.{'.'.join(finding.key)}: {finding.text}"
                self.problem(finding.kind, law, mark, finding.remedy.replace("SERVE", path))

    def _model(self, name: str, files: ModelFiles, tokenizer: bool, weights: bool) -> str:
        """Return the problem with a model's path, or nothing."""
        path = files.path
        finding = next(folder_findings(path, needs_weights=weights), None)
        if finding:
            return finding.text
        try:
            config = files.config()
            if tokenizer:
                self.tokenizers[name] = files.tokenizer()
        except ConfigError as error:
            mark = self.tree.at(("models", name, "config")).mark
            remedy = f"change models.{name}.config, or leave the field out"
            self.problem("model-config", f"models.{name}.config: {error}", mark, remedy)
            return ""
        except ConfigFileError as error:
            law, _, remedy = str(error).partition("; ")
            mark = self.tree.at(("models", name, "path")).mark
            self.problem("model-config", f"{path}: {law}", mark, remedy.replace("NAME", name))
            return ""
        except TokenizerError as error:
            law, _, remedy = str(error).partition("; ")
            self.problem("tokenizer", law, self.tree.at(("models", name, "path")).mark, remedy)
            return ""
        except (OSError, ValueError) as error:
            if not files.trusted and "trust_remote_code" in str(error):
                say = f"models.{name}.trust_remote_code=true"
                return f"brings Python code of its own, which is not run unasked: read it, then say {say}"
            return f"can't be loaded, as a folder or from a hub: {str(error).splitlines()[0]}"
        self.context[name] = context_of(config)
        if name in self.tokenizers and not files.stop_ids(config.get_text_config(), self.tokenizers[name]):
            self.endless.add(name)
        self.vocabulary[name] = getattr(config.get_text_config(), "vocab_size", None)
        self._fits(name, files, config)
        return ""

    def _fits(self, name: str, files: ModelFiles, config: Any) -> None:
        """Check that the engines of a model run models of its family."""
        model = self.plan.models[name]
        found = {}
        if model.serve and (unfit := serving(model.serve).unfit):
            found["serve"] = resolve_name(unfit)(config)
        if model.serve and model.serve.lora == "adapter" and serving(model.serve).unfit_adapters:
            found["adapters"] = resolve_name(serving(model.serve).unfit_adapters)(config)
        if model.train:
            found["train"] = resolve_name(TRAINING[model.train.engine].unfit)(files, model.head, model.train)
        for law, _, remedy in (law.partition("; ") for law in found.values() if law):
            mark = self.tree.at(("models", name, "path")).mark
            self.problem("unfit-model", f"models.{name}: {law}", mark, remedy.replace("NAME", name))

    def stops(self) -> None:
        """Check that models have the tokens that end their samples, and that their samples end at all."""
        for phase, functions in self.plan.functions.items():
            for node, function in functions.items():
                self._ends(phase, node, function)
                size = self.vocabulary.get(function.model or "")
                most = max(function.attributes.get("stop_token_ids") or [0]) if function.model else 0
                if size is not None and most >= size:
                    law = f"node `{node}`: `{function.model}` has no token {most}, it has {size:,}"
                    self.problem("stop-id", law, self._mark(phase, node, "stop_token_ids"), "leave it out")

    def _ends(self, phase: str, node: str, function: Function) -> None:
        """Warn where nothing ends the responses of a node but their length."""
        attributes = function.attributes
        if function.model not in self.endless or "stop_token_ids" not in attributes:
            return
        if not attributes["stop_token_ids"] and not attributes.get("stop"):
            law = (
                f"node `{node}`: no file of `{function.model}` names an end token (a tokenizer's eos_token, "
            )
            law += "its configurations' eos_token_id): every response is as long as it may be"
            remedy = f"name one in the model's generation_config.json, or set {node}.stop_token_ids"
            mark = self._mark(phase, node, "stop_token_ids")
            self._warn("endless", law, mark, remedy)

    def data(self) -> None:
        """Check that every source's files can be read, and that their rows fit the models that read them."""
        for phase, functions in self.plan.functions.items():
            for node, function in functions.items():
                declared = load(function.target).declared
                if declared.load is not None:
                    self._source(phase, node, function, declared.load)
                elif function.target == OPS["rollout.agent"] and function.model in self.tokenizers:
                    self._agent(phase, node, function)

    def _agent(self, phase: str, node: str, function: Function) -> None:
        """Check that the files of tools are there, and that the chat template goes on behind them."""
        tokenizer, options = self.tokenizers[str(function.model)], function.attributes["template_options"]
        tools = _tools(with_values(function))
        try:
            check_tools(tools, tokenizer, options)
        except RlgraphError as error:
            self.problem("tools", f"node `{node}`: {error}", self._mark(phase, node))
        if tools:
            self._parser(phase, node, function, next(iter(tools)))

    def _parser(self, phase: str, node: str, function: Function, tool: str) -> None:
        """Warn where a parser does not read a call of a tool as the chat template writes it."""
        tokenizer, options = self.tokenizers[str(function.model)], function.attributes["template_options"]
        hook = function.hooks.get("parser")
        body = load(hook.target if hook else PARSERS["hermes"], kind=Parser).body
        parser = partial(body, **hook.attributes) if hook else body
        if written := unread_call(tokenizer, options, tool, parser):
            law = f"node `{node}`: the chat template of {tokenizer.name_or_path} writes a call as "
            law += f"{shortened(repr(written), 120)}, which the parser does not read: no tool would be called"
            shipped = {kind: load(target, kind=Parser).body for kind, target in PARSERS.items()}
            readers = [
                kind for kind, each in shipped.items() if not unread_call(tokenizer, options, tool, each)
            ]
            reader = readers[0] if readers else "FILE.py:PARSER"
            remedy = f"set {node}.parser to {{kind: {reader}}}, unless the policy was taught another format"
            mark = self._mark(phase, node, "parser")
            self.warnings.append(Problem("parser", law, mark, remedy=remedy, grade="warning"))

    def _source(self, phase: str, node: str, function: Function, load_data: Callable[..., Any]) -> None:
        """Load all that a source gives, and check that its rows fit the models that read them."""
        mark = self._mark(phase, node)
        unused = (*NOT_LOADING, function.roles.get("rows"))
        function = with_values(function)
        attributes = {name: value for name, value in function.attributes.items() if name not in unused}
        if tools := _tools(function):
            attributes["template_options"] = shown(attributes.get("template_options"), tools)
        files = attributes.get("files", ())
        listed = [*chain(*files.values())] if isinstance(files, dict) else files
        try:
            listed = [file for pattern in listed for file in matching(pattern)]
            for file in listed:
                self._reachable(f"node `{node}`", file, mark)
            if function.tokenizer is None:
                data = load_data(**attributes)
            elif function.tokenizer in self.tokenizers:
                data = load_data(self.tokenizers[function.tokenizer], **attributes)
            else:  # that it can't be loaded is a problem already
                for file in listed:
                    modified(file)
                return
            if data is None:  # its rows are not counted
                return
            self.rows |= {node: len(data)} if phase == "train" else {}
            weights = function.attributes.get("weights")
            if weights and function.value("rows") != "all":
                mixture_of(data.by_source, weights, function.schedules, function.value("rows"))
        except RlgraphError as error:
            hint = "".join(map(_how_to_make, listed))[:200]
            self.problem("data", f"node `{node}`: {error}", mark, hint.strip(" ;"))
            return
        self._left_out(phase, node, function, data)
        self._without_answers(phase, node, function, data)
        place, tokens = data.longest()
        for reader, room, total, model in self._readers(phase, function):
            context = self.context.get(model)
            if total is not None and tokens >= total:
                bound = f"{reader}.{self.plan.functions[phase][reader].roles['total_limit']}"
                law = f"the question at {place} has {tokens} tokens: {bound} {total} leaves no room for "
                law += "a response"
                limit = function.roles.get("prompt_limit", "max_tokens")
                self.problem("no-room", law, mark, f"drop the longer ones by {node}.{limit}={total - 1}")
                continue
            if total is not None:
                room = min(room, total - tokens)
            if context is not None and tokens + room > context:
                more = f"{reader}.{self.plan.functions[phase][reader].roles.get('response_limit')}"
                new = f", and with {more} {room} that is {tokens + room}" if room else ""
                law = f"the question at {place} has {tokens} tokens{new}; the context of {model} is {context}"
                limit = function.roles.get("prompt_limit", "max_tokens")
                remedies = []
                if context - room >= 1:
                    remedies.append(f"drop the longer ones by {node}.{limit}={context - room}")
                if room and context - tokens >= 1:
                    remedies.append(f"lower {more} to {context - tokens}")
                default = f"drop the longer ones by {node}.{limit}, and lower {more}"
                self.problem("context", law, mark, ", or ".join(remedies) or default)

    def _left_out(self, phase: str, node: str, function: Function, data: Any) -> None:
        """Warn where a limit, often an inherited one, leaves out or cuts rows of an evaluation's set."""
        if phase != "eval" or not data.overlong:
            return
        limit, truncate = (
            function.roles.get("prompt_limit", "max_tokens"),
            function.attributes.get("truncate"),
        )
        total = len(data) + data.overlong * (not truncate)
        law = f"node `{node}` of the evaluation: {data.overlong} of {total} rows"
        if len(data.by_source) > 1:
            law += f" ({', '.join(f'{count} of {name}' for name, count in data.overlong_of.items())})"
        law += f" have over {function.attributes[limit]} tokens ({node}.{limit}): they are "
        law += "cut, and not the set that others report" if truncate else "left out, and not measured"
        remedy = f"raise eval.nodes.{node}.{limit}; eval/overlong has the share"
        self._warn("overlong", law, self._mark(phase, node, limit), remedy)

    def _without_answers(self, phase: str, node: str, function: Function, data: Any) -> None:
        """Warn where a reward reads the answers of rows most of which have none: nothing would be right."""
        column = function.outs.get("answer")
        if column is None:
            return
        columns = self.plan.columns[phase]
        readers = [
            f"`{name}` ({_op_name(reader)})"
            for name, reader in self.plan.functions[phase].items()
            # where it reads lists of right answers, these decide
            if "answers" not in reader.ins and any(columns[c].origin == column for c in reader.ins.values())
        ]
        for source, count in data.empty("answer").items() if readers else ():
            rows = len(data.by_source[source])
            if 2 * count > rows:
                law = f"node `{node}`: {count} of {rows} rows of {source} have no answer, and "
                law += f"{' and '.join(readers)} read{'s' * (len(readers) == 1)} it"
                remedy = f"name the column that has it, as {node}.answer=answer, or take a reward without one"
                self._warn("no-answer", law, self._mark(phase, node, "answer"), remedy)

    def _warn(self, kind: str, law: str, mark: Mark, remedy: str) -> None:
        self.warnings.append(Problem(kind, law, mark, remedy=remedy, grade="warning"))

    def _readers(self, phase: str, source: Function) -> list[tuple[str, int, int | None, str]]:
        """Return nodes whose model sees this source's tokens: name, tokens that it adds and has, model."""
        written, columns = set(source.outs.values()), self.plan.columns[phase]
        readers = []
        for node, function in self.plan.functions[phase].items():
            ins = [columns[name] for name in function.ins.values()]
            reads = {column.origin for column in ins if column.domain == columns[column.origin].domain}
            if function.model and reads & written:
                limits = int(function.value("response_limit", 0)), function.value("total_limit")
                readers.append((node, *limits, function.model))
        return readers

    def _mark(self, phase: str, node: str, key: str = "files") -> Mark:
        changed = self.tree.at(("eval", "nodes", node))
        place = changed if phase == "eval" and changed.get(key) else self.tree.at(("nodes", node))
        return (place.get(key) or place).mark


def _op_name(function: Function) -> str:
    """Return an op's name as a graph has it."""
    return next((name for name, target in OPS.items() if target == function.target), function.target)


def _tools(function: Function) -> dict[str, Tool]:
    """Return the tools that a node shows or offers, by name."""
    hooks = {path.partition("."): hook for path, hook in function.hooks.items()}
    return {
        name: Tool(load(hook.target, kind=Tool).body, hook.attributes, {})
        for (attribute, _, name), hook in hooks.items()
        if attribute == "tools"
    }


def _how_to_make(path: str) -> str:
    """Return a remedy for the demo's own files, which can be made."""
    for folder, module in (("demo_files", "demo"), ("demo_tool_files", "demo_tools")):
        if folder in Path(path).parts:
            return f"; the demo's files are made by: python -m rlgraph.runtime.{module}"
    for name in ("demo_sft", "calculator_sft"):
        if Path(path).parts[:2] == ("runs", name):
            return f"; that model is made by: rlgraph run {name}"
    return ""
