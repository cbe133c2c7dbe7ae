"""Laws about the weights that sampled a node's rows: whose log-probs a ratio, a weight or a baseline is of.

Rows are off-policy for an update where other weights sampled them than those that it changes: an older
version (``schedule.staleness``), another model, the same before a first optimizer step, or the same in fewer
bits (``serve.quantization``). A ratio to what
sampled makes up for it, and so do importance weights:

    old_logprobs: rollout_logprobs         pi / pi_sampling, one ratio for everything
    old_logprobs, with rollout_weights     pi / pi_v, clipped, times pi_v / pi_sampling
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlgraph.errors import Problem
from rlgraph.ir.graph import Call, Graph, Node
from rlgraph.ir.trace import draw, read_from, refusal, sampler, source, writer
from rlgraph.passes.stream import FINISHED

SFT = "replace: {%s.loss: {kind: sft}}"
DECOUPLED = "{0}.loss.kind: decoupled_ppo, {0}.loss.cap: 2.0"  # of ppo_clip, whose clips stay


def sampling_logprobs(graph: Graph, node: Node, call: Call) -> Problem | None:
    """A ratio's denominator are the log-probs of the weights that sampled the rows.

    A newer version will do where ``rollout_weights`` make up for the rest.
    """
    old, rollout = read_from(graph, node, "old_logprobs"), sampler(graph, node.domain)
    if old is None or (rollout is None and old.op.source):
        return None  # elided, or not read; or recorded with the rows
    law = f"the loss {call.op.name} of node `{node.name}` divides by log-probs of the weights that sampled; "
    if rollout is None:
        law += "its rows come from data, and no weights sampled them"
        return refusal("no-sampler", law, graph, node, [old.name], SFT % node.name)
    if old is rollout:
        return _corrected_twice(graph, node, f"the loss {call.op.name} divides by `{old.name}`'s log-probs")
    if old.op.engine == "train" and old.weights == rollout.weights:
        if not (bits := _quantized(graph, rollout)) or "rollout_weights" in node.called.ins:
            return None
        law += f"`{old.writes[0]}` is {source(old)}, and the rows are sampled by {bits}"
        remedy = _corrections(graph, node, rollout)
        return refusal("quantized-ratio", law, graph, node, [rollout.name, old.name], remedy)
    law += f"`{old.writes[0]}` is {source(old)}, and the rows are sampled by {rollout.weights}"
    if brings := _of_others(graph, node, rollout, old):
        law += f": `{brings.writes[0]}` is of the rows of `{rollout.name}`, and all else is repeated to these"
        remedy = f"let `{node.name}` read what is of the rows that `{old.model}` sampled, "
        if old.domain in {made.name for made in graph.ancestors(rollout.domain)}:
            remedy += f"as a mean by group.mean of what is said of each by `{rollout.name}`, "
        remedy += f"or train what sampled these: set: {{{node.name}.model: {rollout.model}}}"
        names = [rollout.name, brings.name, old.name]
        return replace(
            refusal("other-rows", law, graph, brings, [], remedy), drawing=draw(graph, [*names, node.name])
        )
    if _newer(old, rollout, node):
        weights = read_from(graph, node, "rollout_weights")
        if weights and _brought_to(graph, weights) in ("", old.weights):
            return None
        remedy = (_weights if weights else _corrections)(graph, node, rollout)
        return refusal("stale-ratio", law, graph, node, [rollout.name, old.name], remedy)
    remedy = f"add a node that writes them: old_logprobs: {{op: logprobs, model: {rollout.model}}}"
    if old.model == rollout.model:
        remedy = f"read them before the update: {old.name}: {{model: {rollout.model}}}"
    return refusal("wrong-ratio", law, graph, node, [rollout.name, old.name], remedy)


def on_policy(graph: Graph, node: Node, call: Call) -> Problem | None:
    """A loss without a ratio trains the very weights that sampled its rows, once, or weighs the rows."""
    rollout = sampler(graph, node.domain)
    law = f"node `{node.name}`: the loss {call.op.name} corrects for no change of weights since sampling; "
    fix = f"replace: {{{node.name}.loss: {{kind: ppo_clip}}}}"
    if rollout is None:
        return refusal("off-policy", law + "its rows come from data", graph, node, [], SFT % node.name)
    bits = _quantized(graph, rollout)
    if (bits or rollout.weights != node.weights) and not _weighed(graph, node, rollout):
        law += f"its rows are sampled by {bits or rollout.weights}, and it updates {node.weights}"
        stale = rollout.model == node.model and (bool(bits) or _version(rollout) < 0)
        remedy = _weights(graph, node, rollout) if stale else fix
        return refusal("off-policy", law, graph, node, [rollout.name], remedy)
    if (steps := node.optimizer_steps) > 1:
        law += f"it makes {steps} optimizer steps on them, and all but the first are off-policy"
        lead = node.joins or node.name
        remedy = f"{fix}, or set: {{{lead}.minibatches: 1, {lead}.epochs: 1}}"
        return refusal("off-policy", law, graph, node, [rollout.name], remedy)
    return None


def behaviour_logprobs(graph: Graph, node: Node, call: Call) -> Problem | None:
    """Importance weights are a train engine's log-probs over those that the rollout itself measured."""
    old, behaviour = read_from(graph, node, "old_logprobs"), read_from(graph, node, "rollout_logprobs")
    rollout = sampler(graph, node.domain)
    if old is None or behaviour is None:
        return None  # elided, or not read
    law = f"{call.op.name} of node `{node.name}` weighs rows by the log-probs that they were sampled with; "
    if rollout is None:
        remedy = SFT % node.name if node.trains else f"remove: [{node.name}]"
        return refusal("no-sampler", law + "its rows come from data", graph, node, [], remedy)
    names = [rollout.name, old.name]
    if behaviour is not rollout:
        law += f"`{behaviour.writes[0]}` is {source(behaviour)}, and the rows are sampled by `{rollout.name}`"
        remedy = f"set: {{{node.name}.in.rollout_logprobs: {measured(rollout)}}}"
        return refusal("wrong-behaviour", law, graph, node, [behaviour.name, *names], remedy)
    if (old.weights != rollout.weights and not _newer(old, rollout, node)) or old.op.engine != "train":
        law += f"`old_logprobs` is to be what weights of `{rollout.model}` make of them since, "
        law += f"and is {source(old)}"
        remedy = f"{_recompute(graph, rollout, old)}set: {{{node.name}.in.old_logprobs: old_logprobs}}"
        return refusal("wrong-weights", law, graph, node, names, remedy)
    why = f"the loss {call.op.name} does so by itself"
    return _corrected_twice(graph, node, why) if node.trains else None


def greedy_baseline(graph: Graph, node: Node, call: Call) -> Problem | None:
    """A baseline is what the weights that sampled the rows earn on the same prompts without chance."""
    base, rollout = read_from(graph, node, "greedy_rewards"), sampler(graph, node.domain)
    if base is None:
        return None
    law = f"node `{node.name}` ({node.op.name}) takes off what the weights that sampled earn without chance; "
    if rollout is None:
        ins = f"in: {{rewards: {node.called.ins.get('rewards', 'rewards')}}}"
        remedy = f"replace: {{{node.name}: {{op: advantage.reinforce_pp, {ins}}}}}"
        return refusal("no-sampler", law + "its rows come from data", graph, node, [], remedy)
    greedy = sampler(graph, base.domain)
    if greedy is None or greedy is rollout:
        what = "of the very samples" if greedy else "of data"
        law += f"`{base.writes[0]}` is {source(base)}, {what}"
        return refusal("no-greedy", law, graph, node, [rollout.name, base.name], _greedy(node, rollout, base))
    edits: dict[str, object] = {}
    if greedy.weights != rollout.weights:
        law += f"`{greedy.name}` samples with {greedy.weights}, `{rollout.name}` with {rollout.weights}; "
        edits["model"] = f"{rollout.model}{'@next' if rollout.reads_next else ''}"
    if (temperature := greedy.called.value("temperature")) != 0:
        law += f"`{greedy.name}` samples at temperature {temperature}"
        edits[greedy.called.name_of("temperature")] = 0
    remedy = f"set: {{{', '.join(f'{greedy.name}.{name}: {value}' for name, value in edits.items())}}}"
    names = [rollout.name, greedy.name, base.name]
    return refusal("no-greedy", law.rstrip("; "), graph, node, names, remedy) if edits else None


def _of_others(graph: Graph, node: Node, rollout: Node, old: Node) -> Node | None:
    """Return what brings a node the rows of another model's rollout than its log-probs are of."""
    if rollout.model in (node.model, old.model) or sampler(graph, old.domain) is rollout:
        return None
    written = (writer(graph, column) for column in node.reads)
    return next((other for other in written if sampler(graph, other.domain) is rollout), None)


def _quantized(graph: Graph, rollout: Node) -> str:
    """Return the weights that sample in words, where they have fewer bits than those that train; else ""."""
    model = graph.models.get(rollout.model or "")
    kind = model.spec.serve.quantization if model else None
    return f"{rollout.weights} in {kind} (models.{rollout.model}.serve.quantization)" if kind else ""


def _newer(old: Node, rollout: Node, node: Node) -> bool:
    """Return whether log-probs are of a version after the sampler's, and not after what the node updates."""
    last = _version(node) if node.trains else _version(old)
    same = old.op.engine == "train" and old.model == rollout.model
    same = same and (not node.trains or old.model == node.model)
    return same and _version(rollout) < _version(old) <= last


def _version(node: Node) -> int:
    assert node.version is not None, f"{node.name} reads no version"
    return node.version


def _weighed(graph: Graph, node: Node, rollout: Node) -> bool:
    """Return whether importance weights lead from what sampled a node's rows to what it updates."""
    weights = read_from(graph, node, "rollout_weights")
    if weights is None or rollout.model != node.model:
        return False
    return _brought_to(graph, weights) in ("", node.weights)


def _brought_to(graph: Graph, weights: Node) -> str:
    """Return the weights of the model whose log-probs importance weights have above; "" of a user's op."""
    start = read_from(graph, weights, "old_logprobs")  # it may have another way to them
    return start.weights if start else ""


def _corrected_twice(graph: Graph, node: Node, why: str) -> Problem | None:
    weights = read_from(graph, node, "rollout_weights")
    if weights is None:
        return None
    law = f"node `{node.name}` corrects for the weights that sampled twice: {why}, and it reads "
    law += f"`{weights.writes[0]}`, {source(weights)}"
    return refusal("corrected-twice", law, graph, node, [weights.name], f"remove: [{weights.name}]")


def _corrections(graph: Graph, node: Node, rollout: Node) -> str:
    """Return what makes a loss with a ratio legal on rows of an older version."""
    ratio = f"set: {{{node.name}.in.old_logprobs: {measured(rollout)}}}"
    decoupled = f"replace: {{{node.name}.loss: {{kind: decoupled_ppo, cap: 2.0}}}}"
    if _clips(node):
        decoupled = f"set: {{{DECOUPLED.format(node.name)}}}"
    if measured(rollout) != "rollout_logprobs":
        decoupled += f", set: {{{node.name}.in.rollout_logprobs: {measured(rollout)}}}"
    edits = [ratio, _weights(graph, node, rollout), decoupled]
    return ", or ".join(reversed(edits) if clips_around_older(node, rollout) else edits)


def clips_around_older(node: Node, rollout: Node, by: int = 1) -> bool:
    """Return whether a ratio to what sampled a node's rows is clipped, and that is so many updates older.

    It is then clipped for what the updates since have changed: see docs/streaming.md.
    """
    stale = rollout.model == node.model and _version(node) - _version(rollout) >= by
    return stale and _clips(node)


def _clips(node: Node) -> bool:
    return any(hook.op.name == "ppo_clip" for hook in node.hooks.values())


def _weights(graph: Graph, node: Node, rollout: Node) -> str:
    """Return the edit that adds importance weights, or lets them be up to the weights of now."""
    before = read_from(graph, node, "rollout_weights")
    writer = read_from(graph, node, "old_logprobs")
    old = writer.writes[0].partition("/")[0] if writer else "old_logprobs"
    ins = {"old_logprobs": old, "rollout_logprobs": measured(rollout)}
    call = f"{{op: correction.tis{renamed(ins)}}}"
    named = [name for name in node.rows if name != FINISHED]  # what streams is given to it in any case
    several = f"[{', '.join(named)}]" if len(named) > 1 else "".join(named)
    rows = f", rows: {several}" if several else ""
    recompute = "" if _there(graph, old) else f"{old}: {{op: logprobs, model: {rollout.model}{rows}}}, "
    if before:
        return f"replace: {{{before.name}: {call}}}"
    return f"add: {{{recompute}rollout_weights: {call}}}"


def _recompute(graph: Graph, rollout: Node, old: Node) -> str:
    """Return the edit that lets the model that sampled write ``old_logprobs``, where nothing does so yet."""
    if old.name != "old_logprobs" and _there(graph, "old_logprobs"):
        return ""
    edit = f"{{old_logprobs: {{op: logprobs, model: {rollout.model}}}}}"
    return f"{'replace' if old.name == 'old_logprobs' else 'add'}: {edit}, "


def _there(graph: Graph, column: str) -> bool:
    """Return whether the user's graph writes a column, if only for nobody."""
    return column in graph.columns or any(column in node.writes for node in graph.dropped)


def renamed(ins: Mapping[str, str]) -> str:
    """Return `, in: {port: column}` of an edit, for the ports whose columns have other names; "" of none."""
    others = ", ".join(f"{port}: {column}" for port, column in ins.items() if port != column)
    return f", in: {{{others}}}" if others else ""


def measured(rollout: Node) -> str:
    """Return the column of the log-probs that a rollout measured itself, as the graph calls it."""
    return rollout.called.outs.get("rollout_logprobs", "rollout_logprobs").partition("/")[0]


def _greedy(node: Node, rollout: Node, base: Node) -> str:
    """Return the edit that adds a greedy rollout of the same prompts, and its reward."""
    drawn = rollout.called
    outs = ", ".join(f"{name}: greedy_{name}" for name in drawn.outs)
    limit, temperature = drawn.name_of("response_limit"), drawn.name_of("temperature")
    call = f"op: {drawn.op.name}, model: {rollout.model}, n: 1, {temperature}: 0, "
    call += f"{limit}: {drawn.attributes.get(limit)}"
    scores = any(port.name == "responses" for port in base.op.inputs)
    score = f"{{op: {base.op.name if scores else 'reward.math'}, in: {{responses: greedy_responses}}}}"
    add = f"add: {{greedy: {{{call}, out: {{{outs}}}}}, greedy_rewards: {score}}}"
    return f"{add}, set: {{{node.name}.in.greedy_rewards: greedy_rewards}}"
