"""Checks a run's files before anything starts: weights, tokenizers, data, context."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from rlgraph.engines.registry import TRAINING, serving
from rlgraph.errors import GraphError, Mark, Problem, RlgraphError, shortened
from rlgraph.ir.function import Function
from rlgraph.ir.plan import Plan
from rlgraph.laws.places import place_of_user
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
from rlgraph.ops.declare import loading_attributes
from rlgraph.ops.registry import load
from rlgraph.ops.tools import Tool
from rlgraph.runtime.engines.findings import Findings, folder_findings
from rlgraph.runtime.engines.model_files import ConfigError, ConfigFileError, ModelFiles
from rlgraph.runtime.engines.model_inspection import inspect_model
from rlgraph.runtime.engines.tokenizer_files import TokenizerError
from rlgraph.syntax.source import Tree
from rlgraph.variables import with_values

# an attribute in the remedy of an error of data, and the value that it is to have, if one is named
ATTRIBUTE = re.compile(r"\b(\w+):(?: (\{[^}]*\}|\[[^\]]*\]|\w+(?=[,; ]|$)))?(?=[,; ]|$)")


@dataclass(frozen=True)
class Inspection:
    """The findings about a run's files.

    Attributes:
        iterations: how many the run's epochs are; None where it is not given in epochs.
        rows: of each source whose rows are counted before it gives them.
        warnings: what is likely a mistake, though the run could go on.
        unchecked: a sentence about each source whose data could not be looked at.
    """

    iterations: int | None
    rows: Mapping[str, int]
    warnings: Sequence[Problem]
    unchecked: Sequence[str]


def preflight(plan: Plan, tree: Tree, strict: bool = False) -> Inspection:
    """Check every model folder and data file that the plan names.

    With ``strict`` warnings are problems too. A run in epochs has as many iterations as it takes to draw the
    rows of its source so often; the last one may draw more. Where a filter refills, an iteration is taken to
    draw what its first round does.

    Raises:
        GraphError: with every problem found, each at the place in the graph that named the file.
    """
    checks = Preflight(plan, tree)
    iterations = None
    checks.open_values()
    if not checks.problems:
        checks.sandboxes()
        checks.models()
        checks.stops()
        checks.data()
    if not checks.problems:
        iterations = checks.iterations()
        checks.intervals(iterations)
    if strict:
        checks.problems += [replace(warning, grade="error") for warning in checks.warnings]
    if checks.problems:
        raise GraphError(checks.problems)
    return Inspection(iterations, checks.rows, checks.warnings, checks.unchecked)


@dataclass(frozen=True)
class TokenReader:
    """A node whose model sees the tokens of a source: how many it adds, and how many rows may have.

    Limits are named as the attributes that set them, for errors.
    """

    model: str
    response: int  # tokens that it adds, at most
    response_limit: str
    total: int | None  # tokens of a row with its response, at most
    total_limit: str


class Preflight:
    """Collects the problems and warnings of one plan.

    Invariant: ``tokenizers``, ``context`` and ``vocabulary`` have the models that ``models`` could load, and
    ``rows`` the sources that ``data`` could. Later checks skip the others, whose problems are known.
    """

    def __init__(self, plan: Plan, tree: Tree) -> None:
        self.plan = plan
        self.tree = tree
        self.problems: list[Problem] = []
        self.warnings: list[Problem] = []
        self.unchecked: list[str] = []
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
        return ceil(round(times * self.rows[source] / self._rows_per_iteration(source), 6))

    def intervals(self, iterations: int | None) -> None:
        """Check that the rows are known of sources whose epochs are counted on the way.

        An interval longer than the run is a warning where only the rows say how long one of them is: the run,
        which has so many ``iterations`` where it is given in epochs, or the interval.
        """
        for path, every in intervals(self.plan).items():
            if isinstance(every, int):
                interval = float(every)
                run = iterations
            elif every.seconds:
                continue
            elif every.source not in self.rows:
                self._uncounted(path, every.source, "give iterations, or a duration as 30 min")
                continue
            else:
                rows_per_interval = every.epochs * self.rows[every.source]
                interval = float(rows_per_interval / self._rows_per_iteration(every.source))
                run = self.plan.iterations
            if run and interval > run:
                self.warnings += longer_than_the_run(self.plan, self.tree, path, f"{run:,} iterations")

    def _uncounted(self, path: tuple[str, str], source: str, remedy: str) -> None:
        law = f"`{'.'.join(path)}`: only `{source}` itself knows how many rows it gives"
        self.problem("run-length", law, self.tree.at(path).mark, remedy)

    def _rows_per_iteration(self, source: str) -> int:
        """Return the rows that an iteration takes of a source; where a filter refills, in its first round."""
        rows = self.plan.functions["train"][source].value("rows")
        for region in self.plan.regions.values():
            if region.source == source:
                rows = region.rows_to_request(region.rows, 0, 0)
        return self.rows[source] if rows == "all" else int(rows)

    def models(self) -> None:
        """Check that each model's folder holds a configuration, weights and, where needed, a tokenizer."""
        self._engines()
        tokenized = set()  # models whose tokenizers nodes use
        for functions in self.plan.functions.values():
            tokenized |= {function.tokenizer for function in functions.values()}
        unusable: set[str] = set()  # a policy and its reference often lie at one path: say it once
        for name, model in self.plan.models.items():
            if model.path in unusable:
                continue
            mark = self.tree.at(("models", name, "path")).mark
            self._reachable(f"models.{name}.path", with_values(model.path), mark)
            is_served = model.serve is not None
            has_remote_weights = model.serve is not None and not serving(model.serve).paths
            files = ModelFiles(local_path(with_values(model.path)), model.config, model.trust_remote_code)
            reason = self._model(
                name, files, tokenizer=is_served or name in tokenized, weights=not has_remote_weights
            )
            if reason:
                unusable.add(model.path)
                remedy = f"give a Hugging Face model folder: models.{name}.path=DIR"
                law = f"models.{name}.path: {model.path} {reason}"
                self.problem("no-model", law, mark, remedy + _how_to_make(model.path))

    def _reachable(self, subject: str, path: str, mark: Mark) -> None:
        """Check that workers that run in another folder find a file or folder by its path."""
        working_dir = self.plan.schedule.runtime_env.get("working_dir")
        is_relative = not Path(path).is_absolute()
        if working_dir and is_relative and Path(path).exists():
            law = f"{subject}: {path} is in this folder, and workers are in another"
            law += " (schedule.runtime_env.working_dir)"
            self.problem("relative-path", law, mark, f"give it as {Path(path).absolute()}")

    def sandboxes(self) -> None:
        """Check that programs of a policy can be run in a sandbox, on this host."""
        for phase, node, function in self._functions():
            for user in (function, *function.hooks.values()):
                try:
                    check_sandbox(f"node `{node}`", user.attributes.get("allow_unsandboxed", True))
                except RlgraphError as error:
                    self.problem("sandbox", str(error), self._mark(phase, node))

    def _functions(self) -> Iterator[tuple[str, str, Function]]:
        """Yield the nodes of every phase: phase, name, function."""
        for phase, functions in self.plan.functions.items():
            for node, function in functions.items():
                yield phase, node, function

    def _engines(self) -> None:
        """Let each serve engine check its settings."""
        for name, model in self.plan.models.items():
            if model.serve is None or not serving(model.serve).preflight:
                continue
            check: Callable[[Any, str], Findings] = resolve_name(serving(model.serve).preflight)
            for finding in check(with_values(model.serve), self.plan.device):
                setting, *rest = finding.key
                place = ".".join((model.serve.setting_name(name, setting), *rest))
                mark = self.tree.at(tuple(place.split("."))).mark
                remedy = finding.remedy.replace("SERVE", f"models.{name}.serve")
                self.problem(finding.kind, f"{place}: {finding.text}", mark, remedy)

    def _model(self, name: str, files: ModelFiles, tokenizer: bool, weights: bool) -> str:
        """Return the problem with a model's path, or nothing."""
        path = files.path
        finding = next(folder_findings(path, needs_weights=weights), None)
        if finding:
            return finding.text
        try:
            inspected = inspect_model(files, needs_tokenizer=tokenizer)
            if inspected.tokenizer_error:
                raise inspected.tokenizer_error
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
                setting = f"models.{name}.trust_remote_code=true"
                return f"brings Python code of its own, which is not run unasked: read it, then say {setting}"
            return f"can't be loaded, as a folder or from a hub: {str(error).splitlines()[0]}"
        self.context[name] = inspected.context
        self.vocabulary[name] = inspected.vocabulary
        if inspected.tokenizer is not None:
            self.tokenizers[name] = inspected.tokenizer
            if not inspected.stop_ids:
                self.endless.add(name)
        self._fits(name, files, inspected.config)
        return ""

    def _fits(self, name: str, files: ModelFiles, config: Any) -> None:
        """Check that the engines of a model run models of its family."""
        model = self.plan.models[name]
        findings = []  # of each engine: a law and its remedy, or nothing
        if model.serve:
            record = serving(model.serve)
            if record.unfit:
                findings.append(resolve_name(record.unfit)(config))
            if model.serve.lora == "adapter" and record.unfit_adapters:
                findings.append(resolve_name(record.unfit_adapters)(config))
        if model.train:
            unfit = resolve_name(TRAINING[model.train.engine].unfit)
            findings.append(unfit(files, model.head, model.train))
        mark = self.tree.at(("models", name, "path")).mark
        for finding in findings:
            if finding:
                law, _, remedy = finding.partition("; ")
                self.problem("unfit-model", f"models.{name}: {law}", mark, remedy.replace("NAME", name))

    def stops(self) -> None:
        """Check that models have the tokens that end their samples, and that their samples end at all."""
        for phase, node, function in self._functions():
            if function.model is None:
                continue
            self._ends(phase, node, function)
            size = self.vocabulary.get(function.model)
            largest_id = max(function.attributes.get("stop_token_ids") or [0])
            if size is not None and largest_id >= size:
                law = f"node `{node}`: `{function.model}` has no token {largest_id}, it has {size:,}"
                self.problem("stop-id", law, self._mark(phase, node, "stop_token_ids"), "leave it out")

    def _ends(self, phase: str, node: str, function: Function) -> None:
        """Warn where nothing ends the responses of a node but their length."""
        attributes = function.attributes
        generates = "stop_token_ids" in attributes
        if function.model not in self.endless or not generates:
            return
        if attributes["stop_token_ids"] or attributes.get("stop"):
            return
        law = f"node `{node}`: no file of `{function.model}` names an end token (a tokenizer's eos_token, "
        law += "its configurations' eos_token_id): every response is as long as it may be"
        remedy = f"name one in the model's generation_config.json, or set {node}.stop_token_ids"
        self._warn("endless", law, self._mark(phase, node, "stop_token_ids"), remedy)

    def data(self) -> None:
        """Check that every source's files can be read, and that their rows fit the models that read them."""
        for phase, node, function in self._functions():
            op = load(function.target)
            if op.declared.load is not None:
                self._source(phase, node, function, op.declared.load)
            elif op.source:
                law = f"node `{node}`: its data were not looked at, as {_op_name(function)} has no load="
                remedy = "add @op(..., load=FUNCTION), where FUNCTION takes the op's attributes and reads all"
                self.unchecked.append(f"{law}; {remedy}")
            elif function.target == OPS["rollout.agent"] and function.model in self.tokenizers:
                self._agent(phase, node, function)

    def _agent(self, phase: str, node: str, function: Function) -> None:
        """Check that the files of tools are there, and that the chat template goes on behind them."""
        tokenizer = self.tokenizers[str(function.model)]
        options = function.attributes["template_options"]
        tools = _tools(with_values(function))
        try:
            check_tools(tools, tokenizer, options)
        except RlgraphError as error:
            self.problem("tools", f"node `{node}`: {error}", self._mark(phase, node))
        if tools:
            self._parser(phase, node, function, next(iter(tools)))

    def _parser(self, phase: str, node: str, function: Function, tool: str) -> None:
        """Warn where a parser does not read a call of a tool as the chat template writes it."""
        tokenizer = self.tokenizers[str(function.model)]
        options = function.attributes["template_options"]
        hook = function.hooks.get("parser")
        if hook:
            parser: Callable[..., Any] = partial(load(hook.target, kind=Parser).body, **hook.attributes)
        else:
            parser = load(PARSERS["hermes"], kind=Parser).body
        unread = unread_call(tokenizer, options, tool, parser)
        if not unread:
            return
        law = f"node `{node}`: the chat template of {tokenizer.name_or_path} writes a call as "
        law += f"{shortened(repr(unread), 120)}, which the parser does not read: no tool would be called"
        suggestion = "FILE.py:PARSER"
        for kind, target in PARSERS.items():
            if not unread_call(tokenizer, options, tool, load(target, kind=Parser).body):
                suggestion = kind
                break
        remedy = f"set {node}.parser to {{kind: {suggestion}}}, unless the policy was taught another format"
        self._warn("parser", law, self._mark(phase, node, "parser"), remedy)

    def _source(self, phase: str, node: str, function: Function, load_data: Callable[..., Any]) -> None:
        """Load the data of a source, and check that its rows fit the models that read them."""
        mark = self._mark(phase, node)
        function = with_values(function)
        files = _file_patterns(function)
        try:
            files = [file for pattern in files for file in matching(pattern)]
            for file in files:
                self._reachable(f"node `{node}`", file, mark)
            data = self._loaded(function, load_data, files)
            if data is None:
                return
            if phase == "train":
                self.rows[node] = len(data)
            weights = function.attributes.get("weights")
            if weights and function.value("rows") != "all":
                mixture_of(data.by_source, weights, function.schedules, function.value("rows"))
        except RlgraphError as error:
            missing = [file for file in files if not Path(file).exists()]
            hint = "".join(map(_how_to_make, missing))[:200]
            place = place_of_user(self._attribute_marks(phase, node), mark)
            law, _, remedy = str(error).rpartition("; ")
            if not law:
                law, remedy = remedy, ""
            remedy = self._with_paths(remedy, phase, node, function)
            remedies = [text for text in (remedy, hint.strip(" ;")) if text]
            self.problem("data", f"node `{node}`: {law}", place or mark, "; ".join(remedies))
            return
        self._left_out(phase, node, function, data)
        self._without_answers(phase, node, function, data)
        for reader in self._readers(phase, function):
            self._check_context(node, function, reader, data, mark)

    def _with_paths(self, remedy: str, phase: str, node: str, function: Function) -> str:
        """Return the remedy of an error of data with the attributes of its node as they are typed.

        ``set template: plain`` becomes ``set prompts.template=plain``. An evaluation takes what it does not
        change from training, so the path begins with ``eval`` only for what it changes.
        """
        changed = self.tree.find(("eval", "nodes", node)) if phase == "eval" else None

        def typed(match: re.Match[str]) -> str:
            name, value = match[1], match[2]
            if name not in function.attributes:
                return match[0]
            path = f"{node}.{name}"
            if changed and changed.get(name):
                path = f"eval.nodes.{path}"
            return f"{path}={value}" if value else path

        return ATTRIBUTE.sub(typed, remedy)

    def _attribute_marks(self, phase: str, node: str) -> Iterator[Mark | None]:
        """Yield the places of a node's attributes, those of the command line before those of files."""
        sections = (("eval", "nodes"), ("nodes",)) if phase == "eval" else (("nodes",),)
        marks: list[Mark | None] = []
        for section in sections:
            tree = self.tree.find((*section, node))
            marks += [child.mark for child in tree.items.values()] if tree else []
        yield from sorted(marks, key=lambda mark: mark is None or mark.source.name != "command line")

    def _loaded(self, function: Function, load_data: Callable[..., Any], files: Sequence[str]) -> Any:
        """Return all that a source gives; None where its rows are not counted, or it lacks its tokenizer."""
        names = loading_attributes(function.attributes, function.roles)
        attributes = {name: function.attributes[name] for name in names}
        tools = _tools(function)
        if tools:
            attributes["template_options"] = shown(attributes.get("template_options"), tools)
        if function.tokenizer is None:
            return load_data(**attributes)
        if function.tokenizer in self.tokenizers:
            return load_data(self.tokenizers[function.tokenizer], **attributes)
        for file in files:  # a tokenizer that can't be loaded is a problem already
            modified(file)
        return None

    def _check_context(
        self, node: str, function: Function, reader: TokenReader, data: Any, mark: Mark
    ) -> None:
        """Check that the longest row of a source, and what a reader adds to it, fit the reader's model."""
        place, tokens = data.longest()
        prompt_limit = f"{node}.{function.roles.get('prompt_limit', 'max_tokens')}"
        if reader.total is not None and tokens >= reader.total:
            law = f"the question at {place} has {tokens} tokens: {reader.total_limit} {reader.total} leaves "
            law += "no room for a response"
            self.problem("no-room", law, mark, f"drop the longer ones by {prompt_limit}={reader.total - 1}")
            return
        response = reader.response
        if reader.total is not None:
            response = min(response, reader.total - tokens)
        context = self.context.get(reader.model)
        if context is None or tokens + response <= context:
            return
        law = f"the question at {place} has {tokens} tokens"
        if response:
            law += f", and with {reader.response_limit} {response} that is {tokens + response}"
        law += f"; the context of {reader.model} is {context}"
        remedies = []
        if context - response >= 1:
            remedies.append(f"drop the longer ones by {prompt_limit}={context - response}")
        if response and context - tokens >= 1:
            remedies.append(f"lower {reader.response_limit} to {context - tokens}")
        default = f"drop the longer ones by {prompt_limit}, and lower {reader.response_limit}"
        self.problem("context", law, mark, ", or ".join(remedies) or default)

    def _left_out(self, phase: str, node: str, function: Function, data: Any) -> None:
        """Warn where a limit, often an inherited one, leaves out or cuts rows of an evaluation's set."""
        if phase != "eval" or not data.overlong:
            return
        limit = function.roles.get("prompt_limit", "max_tokens")
        truncates = function.attributes.get("truncate")
        total = len(data)
        if not truncates:
            total += data.overlong
        law = f"node `{node}` of the evaluation: {data.overlong} of {total} rows"
        if len(data.by_source) > 1:
            counts = ", ".join(f"{count} of {name}" for name, count in data.overlong_of.items())
            law += f" ({counts})"
        law += f" have over {function.attributes[limit]} tokens ({node}.{limit}): they are "
        if truncates:
            law += "cut, and not the set that others report"
        else:
            law += "left out, and not measured"
        remedy = f"raise eval.nodes.{node}.{limit}; eval/overlong has the share"
        self._warn("overlong", law, self._mark(phase, node, limit), remedy)

    def _without_answers(self, phase: str, node: str, function: Function, data: Any) -> None:
        """Warn where a reward reads the answers of rows most of which have none: nothing would be right."""
        column = function.outs.get("answer")
        if column is None:
            return
        columns = self.plan.columns[phase]
        readers = []
        for name, reader in self.plan.functions[phase].items():
            reads_answer = any(columns[read].origin == column for read in reader.ins.values())
            # where it reads lists of right answers, these decide
            if reads_answer and "answers" not in reader.ins:
                readers.append(f"`{name}` ({_op_name(reader)})")
        if not readers:
            return
        verb = "reads" if len(readers) == 1 else "read"
        for source, count in data.empty("answer").items():
            rows = len(data.by_source[source])
            if 2 * count > rows:
                law = f"node `{node}`: {count} of {rows} rows of {source} have no answer, and "
                law += f"{' and '.join(readers)} {verb} it"
                remedy = f"name the column that has it, as {node}.answer=answer, or take a reward without one"
                self._warn("no-answer", law, self._mark(phase, node, "answer"), remedy)

    def _warn(self, kind: str, law: str, mark: Mark, remedy: str) -> None:
        self.warnings.append(Problem(kind, law, mark, remedy=remedy, grade="warning"))

    def _readers(self, phase: str, source: Function) -> list[TokenReader]:
        """Return the nodes whose model sees the tokens of a source."""
        written = set(source.outs.values())
        columns = self.plan.columns[phase]
        readers = []
        for node, function in self.plan.functions[phase].items():
            if function.model is None:
                continue
            origins = set()
            for name in function.ins.values():
                column = columns[name]
                has_row_per_source_row = column.domain == columns[column.origin].domain
                if has_row_per_source_row:
                    origins.add(column.origin)
            if origins & written:
                readers.append(
                    TokenReader(
                        model=function.model,
                        response=int(function.value("response_limit", 0)),
                        response_limit=f"{node}.{function.roles.get('response_limit')}",
                        total=function.value("total_limit"),
                        total_limit=f"{node}.{function.roles.get('total_limit')}",
                    )
                )
        return readers

    def _mark(self, phase: str, node: str, key: str = "files") -> Mark:
        """Return where the graph says a setting of a node, or the node where it leaves the setting out."""
        place = self.tree.at(("nodes", node))
        in_evaluation = self.tree.at(("eval", "nodes", node))
        if phase == "eval" and in_evaluation.get(key):
            place = in_evaluation
        return (place.get(key) or place).mark


def _file_patterns(function: Function) -> list[str]:
    """Return the files that a source names, by path or pattern."""
    files = function.attributes.get("files", ())
    if isinstance(files, dict):
        return [pattern for patterns in files.values() for pattern in patterns]
    return list(files)


def _op_name(function: Function) -> str:
    """Return an op's name as a graph has it."""
    return next((name for name, target in OPS.items() if target == function.target), function.target)


def _tools(function: Function) -> dict[str, Tool]:
    """Return the tools that a node shows or offers, by name."""
    tools = {}
    for path, hook in function.hooks.items():
        attribute, _, name = path.partition(".")
        if attribute == "tools":
            tools[name] = Tool(load(hook.target, kind=Tool).body, hook.attributes, {})
    return tools


def _how_to_make(path: str) -> str:
    """Return a remedy for the demo's own files, which can be made."""
    if Path(path).parts[:2] == ("demo_files", "smollm"):
        return "; the demo's files are made by: rlgraph demo smollm --no-run"
    for folder, module in (("demo_files", "demo"), ("demo_tool_files", "demo_tools")):
        if folder in Path(path).parts:
            return f"; the demo's files are made by: python -m rlgraph.runtime.{module}"
    for name in ("demo_sft", "calculator_sft"):
        if Path(path).parts[:2] == ("runs", name):
            return f"; that model is made by: rlgraph run {name}"
    return ""
