"""The plan and the composed graph as text that can be read aloud."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping

from rlgraph.cadence import words
from rlgraph.graph import Graph, Node
from rlgraph.plan import ColumnPlan, Plan, Step
from rlgraph.prediction import prediction_text, step_text
from rlgraph.source import OPEN, Tree, scalar

PATHS = {
    "memory": "within each process",
    "ipc": "through memory that both map",
    "broadcast": "by broadcast",
    "disk": "through files",
}
MOVES = {"load": "to", "offload": "from", "wake": "on", "sleep": "on"}  # kind -> how its place is said


def plan_text(plan: Plan, failed: tuple[str, int] | None = None) -> str:
    """The whole plan; ``failed`` is the (phase, step) to mark."""
    return "\n".join(_lines(plan, failed)) + "\n"


def _lines(plan: Plan, failed: tuple[str, int] | None) -> Iterator[str]:
    yield f"plan of {plan.graph}: {plan.about}" if plan.about else f"plan of {plan.graph}"
    for pool, count in plan.pools.items():
        yield f"  pool {pool}: {count} device{'s' * (count != 1)}"
    for name, model in plan.models.items():
        state = "frozen" if model.frozen else "trained" if model.optimizer else "tokenizer only"
        by = " and ".join(str(e["engine"]) for e in (model.train, model.serve) if e) or "no engine"
        if model.shares:
            by = f"{model.shares}" + (" too" if plan.models[model.shares].frozen else " with its adapter off")
        rate = f", lr {model.rate}" if model.rate else ""
        yield f"  model {name}: {state}, head {model.head}, held by {by}{rate}"
    for engine, parts in plan.away.items():
        yield f"  between iterations {' and '.join(parts)} of {engine} are off the device"
    yield ""
    if plan.eval_steps:
        often = f", after every {plan.eval_every} iterations" if plan.eval_every else ""
        yield f"evaluate before the first iteration{often} and after the last, reporting " + ", ".join(
            f"{metric} = mean of {column}" for metric, column in plan.report.items()
        )
        yield from _steps(plan, plan.eval_steps, failed)
        yield ""
    most = max((step.lead for step in plan.steps), default=0)
    every = int(plan.schedule["record_every"])
    which = "every iteration" if every == 1 else f"iterations 1, {1 + every}, {1 + 2 * every}, ..."
    kept = f", keeping the columns of {which} in recorded/" if every else ""
    ahead = f", generation {most} iteration{'s' * (most > 1)} ahead of training" if most else ""
    yield f"repeat {plan.schedule['iterations']} times{ahead}{kept}"
    yield from _steps(plan, plan.steps, failed)
    yield ""
    if most:
        yield from _pipelined(plan, most)
        yield ""
    yield from _closing(plan)


def _steps(plan: Plan, steps: Iterable[Step], failed: tuple[str, int] | None) -> Iterator[str]:
    begun = set[str]()
    for step in steps:
        if step.region and step.region not in begun:
            yield _repeated(plan, step.region)
            begun.add(step.region)
        mark = "!" if failed == (step.phase, step.id) else "+" if step.inserted else " "
        yield f"{mark} {step.id:>3}. {sentence(step)}"
        told = [*_details(step, plan.columns[step.phase]), ("varies", courses_text(plan, step))]
        for word, detail in (*told, ("takes", step_text(plan, step))):
            if detail:
                first, *rest = _wrapped(detail)
                yield f"         {word:<8}{first}"
                yield from (f"{'':17}{line}" for line in rest)


def _repeated(plan: Plan, region: str) -> str:
    """The line above the steps of a region."""
    numbers = [step.id for step in plan.steps if step.region == region and step.kind != "collect"]
    wanted = plan.regions[region]
    rounds = f"at most {wanted.rounds} round{'s' * (wanted.rounds > 1)}"
    return f"  repeat steps {numbers[0]} to {numbers[-1]} until {wanted.rows} rows stay, {rounds}"


def courses_text(plan: Plan, step: Step) -> str:
    """The attributes of a step that change over the iterations, as ``kl_coef: 0.1 to 0.0 over 100 ...``."""
    function = plan.functions[step.phase].get(step.node)
    if function is None:
        return ""
    own = [f"{name}: {course}" for name, course in function.courses.items()]
    for path, hook in function.hooks.items():
        own += [f"{path}.{name}: {course}" for name, course in hook.courses.items()]
    return "; ".join(own)


def _pipelined(plan: Plan, most: int) -> Iterator[str]:
    """What each pool does in a slot, and how the pipeline fills and drains."""
    yield "while the pipeline is full, in slot t"
    steps = [plan.steps[number - 1] for number in plan.slot]
    for pool in plan.pools:
        names = [_when(step) for step in steps if pool in (step.pool, step.source)]
        first, *rest = textwrap.wrap(", ".join(names), 84, break_on_hyphens=False, break_long_words=False)
        yield f"  {pool:<14} {first}"
        yield from (f"{'':17}{line}" for line in rest)
    slots = "slot -1 runs" if most == 1 else f"slots -{most} to -1 run"
    yield f"  prologue       {slots} what leads, for the first iterations"
    last = "slot runs" if most == 1 else f"{most} slots run"
    yield f"  epilogue       the last {last} without what would lead: before an evaluation, a checkpoint"
    yield "                 and the end, nothing is in flight"


def _when(step: Step) -> str:
    return f"{step.node}(t{f'+{step.lead}' if step.lead else ''})"


def _wrapped(detail: str) -> list[str]:
    """Lines broken between the items of a list, not inside ``tokens: int64[samples, tokens]``."""
    bound = re.sub(r": |(?<=\w), (?=\w+\])", lambda m: m[0].replace(" ", "\xa0"), detail)
    lines = textwrap.wrap(bound, 84, break_on_hyphens=False, break_long_words=False)
    return [line.replace("\xa0", " ") for line in lines]


def sentence(step: Step) -> str:
    """One step as a line: what it does, with which model, where, and in which iterations if not in all.

    Moved copies of a column carry the name of their layout: ``tokens@balanced/4``.
    """
    return _does(step) + (f", {words(step.when)}" if step.when else "")


def _does(step: Step) -> str:
    where = (
        f"{step.pool}[{step.devices[0]}]" if len(step.devices) == 1 else f"{step.pool}[0-{step.devices[-1]}]"
    )
    model = " of".join(f" {name}@{version}" for name, version in step.models.items())
    if step.kind == "sync":
        source = f" on pool {step.source}" if step.source else ""
        return f"sync{model} from the train engine{source} to the serve engine on {where}, {PATHS[step.path]}"
    if step.kind in MOVES:
        parts = f"{' and '.join(step.parts)} of {', '.join(step.models)}"
        return f"{step.kind} {parts} {MOVES[step.kind]} {where}"
    if step.kind == "repeat":
        return f"repeat {step.reads[0]} for each sample on {where}"
    if step.kind == "select":
        return f"select the rows of {step.reads[0]} that stay on {where}"
    if step.kind == "collect":
        return f"collect the rows that {step.region} keeps on {where}"
    if step.kind == "repartition":
        return f"move {', '.join(step.reads)} to {where}"
    return f"run {step.node} ({step.op}){model and ' with' + model} on {where}"


def _details(step: Step, columns: Mapping[str, ColumnPlan]) -> Iterator[tuple[str, str]]:
    written = [f"{name}: {columns[name].type}" for name in step.writes]
    if step.updates:
        written.append(f"{step.updated}@{_next(step.models[step.updated])}")
    if step.inserted:
        yield "because", step.because
    else:
        yield "reads", ", ".join(step.reads)
    if step.kind == "repartition":
        yield "writes", ", ".join(step.writes)
    else:
        yield "writes", ", ".join(written)
    yield "frees", ", ".join(step.frees)


def _next(version: str) -> str:
    return f"v+{int(version.partition('+')[2] or 0) + 1}"


def _closing(plan: Plan) -> Iterator[str]:
    steps = plan.steps
    inserted = sum(step.inserted for step in steps)
    yield f"{len(steps)} steps an iteration, {inserted} of them inserted (marked +)"
    yield from prediction_text(plan)
    for note in plan.notes:
        yield f"note: {note}"
    for name in plan.open_values:
        yield f"still open: {name} (give it as {name}=...)"


def graph_text(graph: Graph) -> str:
    """A graph between two passes: one line a node, with what is known of it so far.

    As ``old_logprobs: run logprobs policy@v one, tokens loss_mask -> old_logprobs, after sync:policy``.
    """
    return "".join(f"{line}\n" for line in [*map(_node, graph.nodes), *graph.notes])


def _node(node: Node) -> str:
    version = "" if node.version is None else "@v" + (f"{node.version:+d}" if node.version else "")
    said = [f"{node.name}:", node.kind, node.op.name if node.call else ""]
    said += [f"{node.model}{version}" if node.model else "", node.layout]
    edges = " ".join([*node.reads, *(("->", *node.writes) if node.writes else ())])
    after = f"after {' '.join(node.after)}" if node.after else ""
    told = (" ".join(filter(None, said)), edges, after, words(node.when))
    return ", ".join(part for part in told if part)


def show_text(tree: Tree, origin: bool = False) -> str:
    """A composed graph as YAML; with ``origin``, each value's place as a comment."""
    return "\n".join(line.rstrip() for line in _yaml(tree, 0, origin)) + "\n"


def _yaml(tree: Tree, depth: int, origin: bool) -> Iterator[str]:
    pad = "  " * depth
    for name, child in tree.items.items():
        name = _word(name)
        if child.is_map and child.items:
            yield f"{pad}{name}:"
            yield from _yaml(child, depth + 1, origin)
        else:
            line = f"{pad}{name}: {flow(child)}"
            yield f"{line:<60}  # {place(child)}" if origin else line


def place(tree: Tree) -> str:
    """Where a value came from: ``file:line``, or the command line."""
    source = tree.mark.source.name
    return source if source == "command line" else f"{source.rpartition('/')[2]}:{tree.mark.line}"


def flow(tree: Tree) -> str:
    """A value in YAML's flow style, on one line, reading back as the same value."""
    value = tree.value
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_word(name)}: {flow(child)}" for name, child in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(flow(child) for child in value) + "]"
    if isinstance(value, str):
        return _word(value)
    return "null" if value is None else json.dumps(value)


def _word(value: str) -> str:
    """A text as it is where YAML reads it back so, else in double quotes."""
    if _is_plain(value):
        return value
    short = {"\n": "\\n", "\t": "\\t", '"': '\\"', "\\": "\\\\"}
    escaped = (short.get(c) or (c if c.isprintable() else f"\\U{ord(c):08x}") for c in value)
    return '"' + "".join(escaped) + '"'


def _is_plain(value: str) -> bool:
    plain = re.fullmatch(r"[A-Za-z_./][\w./@-]*( [\w./@-]+)*", value)
    return value == OPEN or bool(plain and scalar(value) == value)
