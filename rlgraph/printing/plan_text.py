"""The plan and the composed graph as text that can be read aloud."""

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

from rlgraph.costs.limits import ring_ranks
from rlgraph.costs.lora_size import SLOTS
from rlgraph.costs.plan_size import planned_size
from rlgraph.engines.registry import serving
from rlgraph.errors import GraphError, visible
from rlgraph.ir.intervals import words
from rlgraph.ir.mesh import Mesh
from rlgraph.ir.plan import ColumnPlan, ModelPlan, Plan, ServePlan, Step, TrainPlan
from rlgraph.ir.prediction import Peak
from rlgraph.printing.headline import headline_text
from rlgraph.printing.step_notes import notes
from rlgraph.syntax.interval import Interval
from rlgraph.syntax.settings import Schedule
from rlgraph.units import range_text, size_text

PATHS = {
    "memory": "within each process",
    "ipc": "through memory that both map",
    "broadcast": "by broadcast",
    "disk": "through files",
}


WIDTH = 101  # columns in which lists are broken


def plan_text(plan: Plan, failed: tuple[str, int] | None = None, width: int = WIDTH) -> str:
    """Return the whole plan as text, lists broken to ``width``; ``failed`` is the (phase, step) to mark."""
    return visible("\n".join(_lines(plan, failed, width)) + "\n")


def _lines(plan: Plan, failed: tuple[str, int] | None, width: int) -> Iterator[str]:
    yield f"plan of {plan.graph}: {plan.about}" if plan.about else f"plan of {plan.graph}"
    for pool, count in plan.pools.items():
        yield f"  pool {pool}: {count} device{'s' * (count != 1)}"
    for name, model in plan.models.items():
        state = "frozen" if model.frozen else "trained" if model.optimizer else "tokenizer only"
        mesh = plan.meshes.get(name)
        by = " and ".join(_engine(e, mesh, model) for e in (model.train, model.serve) if e) or "no engine"
        rate = f", lr {model.rate}" if model.rate else ""
        state += " by muon" if model.optimizer and model.optimizer.kind == "muon" else ""
        yield f"  model {name}: {state}, head {model.head}, held by {by}{rate}"
        if model.shares:
            yield f"    on the weights of {model.shares}, held once: they are the same, and frozen"
        if model.trust_remote_code:
            yield f"    runs the Python files of {model.path}"
        if model.config:
            changed = ", ".join(f"{key} {value}" for key, value in model.config.items())
            yield f"    with another config.json: {changed}"
    for engine, parts in plan.away.items():
        yield f"  between iterations {' and '.join(parts)} of {engine} are off the device"
    yield ""
    if plan.eval_steps:
        times = ["before the first iteration"] * plan.eval_before
        if isinstance(plan.eval_every, Interval):
            times.append(f"every {plan.eval_every}")
        elif plan.eval_every:
            times.append(f"after every {plan.eval_every} iterations")
        when = " and ".join(filter(None, [", ".join(times), "after the last"]))
        reported = ", ".join(f"{metric} = mean of {column}" for metric, column in plan.report.items())
        yield f"evaluate {when}, reporting {reported}{_best(plan.schedule)}"
        yield from _steps(plan, plan.eval_steps, failed, width)
        yield ""
    most = max((step.lead for step in plan.steps), default=0)
    which = _recorded(plan.schedule.record_every)
    kept = f", keeping the columns of {which} in recorded/" if which else ""
    ahead = f", generation {most} iteration{'s' * (most > 1)} ahead of training" if most else ""
    yield f"repeat {_length(plan)}{ahead}{kept}"
    yield from _steps(plan, plan.steps, failed, width)
    yield ""
    if most:
        yield from _pipelined(plan, most, width)
        yield ""
    inserted = sum(step.inserted for step in plan.steps)
    yield f"{len(plan.steps)} steps per iteration, {inserted} of them inserted (marked +)"
    yield from prediction_text(plan)
    yield from (f"note: {note}" for note in plan.notes)
    yield from (f"still open: {name} (give it as {name}=...)" for name in plan.open_values)


def _recorded(every: int | Interval) -> str:
    """Return the iterations whose columns are kept, in words; nothing where none are."""
    if isinstance(every, Interval):
        return f"iteration 1 and of the next one every {every}"
    if every > 1:
        return f"iterations 1, {1 + every}, {1 + 2 * every}, ..."
    return "every iteration" if every else ""


def _best(schedule: Schedule) -> str:
    """Return which checkpoints stay beside the last ones, as the end of a sentence."""
    if (best := schedule.best) is None:
        return ""
    side = "highest" if best.mode == "max" else "lowest"
    which = "checkpoint stays" if best.keep == 1 else f"{best.keep} checkpoints stay"
    return f"; the {which} whose eval/{best.metric.removeprefix('eval/')} is {side}"


def _engine(spec: TrainPlan | ServePlan, mesh: Mesh | None, model: ModelPlan) -> str:
    """Return text such as ``fsdp (bfloat16, 8-way shard x 4 replicas, each row over 2 devices)``."""
    words: list[str] = [spec.dtype]
    if isinstance(spec, TrainPlan):
        words += [str(mesh)] * bool(mesh and max(mesh.replicate, mesh.tensor, mesh.experts) > 1)
        words += [f"head {spec.head_dtype}"] * bool(spec.head_dtype)
        words += ["computing activations again"] * bool(spec.recompute)
        words += ["activations on the host"] * spec.activation_offload
        words += ["optimizer on the host"] * spec.optimizer_offload
        loss = f"auxiliary loss of routers times {spec.router_aux_loss_coef:g}"
        words += [loss] * bool(spec.router_aux_loss_coef)
        moved = f"bias of routers moved by {spec.router_bias_update_rate:g} per step"
        words += [moved] * bool(spec.router_bias_update_rate)
        words += [_sharing(model, spec.sequence_parallel)] * (spec.sequence_parallel > 1)
    else:
        words += [f"linear layers in {spec.quantization}"] * bool(spec.quantization)
        span = f"servers of {spec.tensor_parallel} devices over {spec.hosts} hosts"
        words += [span] * (spec.hosts > 1)
        beside = f"adapter in one of {SLOTS} slots beside the weights of its files"
        if serving(spec).merges_adapters:
            beside = "adapter merged into the weights of its files"
        words += [beside] * (spec.lora == "adapter")
    return f"{spec.engine} ({', '.join(words)})"


def _sharing(model: ModelPlan, ranks: int) -> str:
    """Return text such as ``each row over 16 devices, 8 for its 8 key heads x 2 in a ring``."""
    text = f"each row over {ranks} devices"
    with suppress(GraphError):  # of a model of unknown size: the engine asks the model itself
        heads = planned_size(model).config.key_heads
        if (ring := ring_ranks(heads, ranks)) > 1:
            text += f", {ranks // ring} for its {heads} key heads x {ring} in a ring"
    return text


def _steps(plan: Plan, steps: Iterable[Step], failed: tuple[str, int] | None, width: int) -> Iterator[str]:
    begun = set[str]()
    for step in steps:
        if step.region and step.region not in begun:
            yield _repeated(plan, step.region)
            begun.add(step.region)
        mark = "!" if failed == (step.phase, step.id) else "+" if step.inserted else " "
        yield f"{mark} {step.id:>3}. {sentence(step)}"
        told = [*_details(step, plan.columns[step.phase]), *notes(plan, step)]
        for word, detail in (*told, ("takes", step_text(plan, step))):
            if detail:
                yield from _wrapped(f"         {word:<8}", detail, width)


def _repeated(plan: Plan, region: str) -> str:
    """Return the line above the steps of a region."""
    numbers = [step.id for step in plan.steps if step.region == region and not step.facts.collects]
    wanted = plan.regions[region]
    if wanted.streams:
        law = f"  all along, steps {numbers[0]} to {numbers[-1]}, on rows as they finish; at most "
        return f"{law}{wanted.begun:,} rows are begun and not used\n  {_ages(plan, wanted.keep)}"
    rounds = f"at most {wanted.rounds} round{'s' * (wanted.rounds > 1)}"
    return f"  repeat steps {numbers[0]} to {numbers[-1]} until {wanted.rows} rows stay, {rounds}"


def _ages(plan: Plan, staleness: int) -> str:
    """Return how old the weights may be that drew a token, and what becomes of rows that would be older."""
    assert plan.schedule.stream
    if plan.schedule.stream.too_old == "correct":
        return "tokens are used however old the weights are that drew them: the loss corrects for it"
    law = f"tokens are of weights at most {staleness} update{'s' * (staleness != 1)} old: "
    waits = plan.schedule.stream.too_old == "wait"
    return law + ("an iteration waits for what would be older" if waits else "what would be older is dropped")


def _length(plan: Plan) -> str:
    """Return how long a run is: ``500 times``, or ``for 3 epochs of prompts``."""
    epochs = plan.schedule.epochs
    if isinstance(epochs, dict):
        ((name, times),) = epochs.items()
        return f"for {times:g} epoch{'s' * (times != 1)} of {name}"
    return f"{plan.iterations} times"


def _pipelined(plan: Plan, most: int, width: int) -> Iterator[str]:
    """Yield what each pool does in a slot, and how the pipeline fills and drains."""
    yield "while the pipeline is full, in slot t"
    steps = [plan.steps[number - 1] for number in plan.slot]
    for pool in plan.pools:
        mine = [step for step in steps if pool in (step.pool, step.source)]
        names = [f"{step.node}(t{f'+{step.lead}' if step.lead else ''})" for step in mine]
        yield from _wrapped(f"  {pool:<14} ", ", ".join(names), width)
    slots = "slot -1 runs" if most == 1 else f"slots -{most} to -1 run"
    yield f"  prologue       {slots} what leads, for the first iterations"
    last = "slot runs" if most == 1 else f"{most} slots run"
    yield f"  epilogue       the last {last} without what would lead: before an evaluation, a checkpoint"
    yield "                 and the end, nothing is in flight"


def _wrapped(head: str, detail: str, width: int) -> Iterator[str]:
    """Yield lines broken between the items of a list, not inside ``tokens: int64[samples, tokens]``."""
    bound = re.sub(r": |(?<=\w), (?=\w+\])", lambda m: m[0].replace(" ", "\xa0"), detail)
    first, *rest = textwrap.wrap(bound, width - len(head), break_on_hyphens=False, break_long_words=False)
    yield from (line.replace("\xa0", " ") for line in (head + first, *(f"{'':17}{line}" for line in rest)))


def sentence(step: Step) -> str:
    """Return a step as a line: what it does, with which model, where, and in which iterations if not all.

    Moved copies of a column carry the name of their layout: ``tokens@balanced/4``.
    """
    devices = f"{step.devices[0]}" if len(step.devices) == 1 else f"0-{step.devices[-1]}"
    models = " of ".join(f"{name}@{version}" for name, version in step.models.items())
    said = step.facts.says.format(
        node=step.node,
        op=step.op,
        models=models,
        with_model=models and f" with {models}",
        where=f"{'the CPUs of ' * step.beside}{step.pool}[{devices}]",
        reads=", ".join(step.reads),
        row=re.sub(r".*\*|s(:.*)?$", "", ", ".join(step.writes)),  # sample, of a copy `answer*samples`
        region=step.region,
        parts=" and ".join(step.parts),
        holders=", ".join(step.models),
        source=f" on pool {step.source}" if step.source else "",
        path=PATHS[step.path] if step.path else "",
    )
    return said + (f", {words(step.when)}" if step.when else "")


def _details(step: Step, columns: Mapping[str, ColumnPlan]) -> Iterator[tuple[str, str]]:
    written = [f"{name}: {columns[name].type}" for name in step.writes]
    if version := step.models.get(step.updated):
        written.append(f"{step.updated}@{version.next}")
    yield ("because", step.because) if step.inserted else ("reads", ", ".join(step.reads))
    yield "writes", ", ".join(step.writes if step.facts.keeps_types else written)
    yield "frees", ", ".join(step.frees)


def step_text(plan: Plan, step: Step) -> str:
    """Return text such as ``1.2 s to 4 s, receives 1.73 GB per device``; empty without a prediction."""
    if step.seconds is None:
        return ""
    said = range_text(step.seconds)
    if step.bytes:
        said += f", receives {size_text(step.bytes)} per device"
    if step.facts.syncs and step.bytes:
        from rlgraph.costs.pricing import sync_buckets, sync_least

        count, dtype = sync_buckets(plan, step)
        said += f" ({size_text(sync_least(plan, step))} at least)"
        said += f" in {count} bucket{'s' * (count != 1)} of {dtype}"
    if plan.predicted and step.updates and step.engine == "train":
        from rlgraph.costs.pricing import stepped_on_host

        if gradients := stepped_on_host(plan, step):
            said += f", steps {size_text(gradients)} of gradients on its host"
    return said


def prediction_text(plan: Plan) -> Iterator[str]:
    """Yield the lines that close a plan for a cluster."""
    if plan.peak is None or plan.predicted is None:
        return
    yield from memory_text(plan.peak)
    yield ""
    predicted = plan.predicted
    yield from headline_text(plan)
    yield "assuming"
    yield from (f"  {assumed}" for assumed in predicted.assumed)
    for pool, took in predicted.pools.items() if len(plan.pools) > 1 else ():
        share = " to ".join(f"{a / b:.0%}" for a, b in zip(took, predicted.seconds, strict=True))
        yield f"  pool {pool} is busy for {range_text(took)} of it ({share})"


def memory_text(peak: Mapping[str, Peak]) -> Iterator[str]:
    """Yield the peak of each pool, its largest parts first."""
    for pool, most in peak.items():
        of_capacity = f"{size_text(most.bytes)} of {size_text(most.capacity)}"
        share = f"{most.bytes / most.capacity:.0%}"
        yield f"peak of a device of {pool}, in `{most.step}`: {of_capacity} ({share})"
        for part, size in sorted(most.parts.items(), key=lambda item: -item[1]):
            yield f"  {part:<17} {size_text(size):>9}  {size / most.bytes:>4.0%}"
        if most.host:
            kept = " and ".join(f"{part} {size_text(size)}" for part, size in most.host.items())
            yield f"  beside it, in its host's memory: {kept}"
