"""Laws about the weights that sampled a node's rows: whose log-probs a ratio, a weight or a baseline is of.

Rows are off-policy for an update where other weights sampled them than those that it changes: an older
version (``schedule.buffer``), another model, the same before a first optimizer step, or the same in fewer
bits (``quantization`` of its serve engine). A ratio to what sampled makes up for it, and so do importance
weights:

    old_logprobs: rollout_logprobs         pi / pi_sampling, one ratio for everything
    old_logprobs, with rollout_weights     pi / pi_v, clipped, times pi_v / pi_sampling
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from rlgraph.errors import Problem
from rlgraph.ir.graph import Graph, Node
from rlgraph.ir.regions import FINISHED
from rlgraph.ir.trace import draw, read_from, refusal, sampler, source, writer
from rlgraph.laws.views import CallView

DECOUPLED = "{0}.loss.kind: decoupled_ppo, {0}.loss.cap: 2.0"  # of ppo_clip, whose clips stay


def sampling_logprobs(view: CallView) -> Iterator[Problem]:
    """The denominator of a ratio is the log-probs of the weights that sampled the rows.

    A newer version will do where ``rollout_weights`` make up for the rest.
    """
    graph, node = view.graph, view.node
    scorer = read_from(graph, node, "old_logprobs")
    rollout = sampler(graph, node.domain)
    if scorer is None:
        return  # elided, or not read
    if rollout is None and scorer.op.source:
        return  # recorded with the rows
    law = f"the loss {view.call.op.name} of node `{node.name}` divides by log-probs of the weights that "
    law += "sampled; "
    if rollout is None:
        law += "its rows come from data, and no weights sampled them"
        yield refusal("no-sampler", law, graph, node, [scorer.name], _train_by_sft(node))
    elif scorer is rollout:
        reason = f"the loss {view.call.op.name} divides by `{scorer.name}`'s log-probs"
        yield from _corrected_twice(graph, node, reason)
    elif scorer.op.engine == "train" and scorer.weights == rollout.weights:
        yield from _quantized_ratio(view, scorer, rollout, law)
    else:
        yield from _wrong_ratio(view, scorer, rollout, law)


def _quantized_ratio(view: CallView, scorer: Node, rollout: Node, law: str) -> Iterator[Problem]:
    """Yield a ratio to log-probs of the right weights, which sampled in fewer bits."""
    graph, node = view.graph, view.node
    quantized = _quantized(graph, rollout)
    if quantized and "rollout_weights" not in node.called.ins:
        law += f"`{scorer.writes[0]}` is {source(scorer)}, and the rows are sampled by {quantized}"
        remedy = _corrections(graph, node, rollout)
        yield refusal("quantized-ratio", law, graph, node, [rollout.name, scorer.name], remedy)


def _wrong_ratio(view: CallView, scorer: Node, rollout: Node, law: str) -> Iterator[Problem]:
    """Yield a ratio to log-probs of other weights than those that sampled."""
    graph, node = view.graph, view.node
    law += f"`{scorer.writes[0]}` is {source(scorer)}, and the rows are sampled by {rollout.weights}"
    stranger = _writer_of_other_rows(graph, node, rollout, scorer)
    if stranger:
        yield _other_rows(view, scorer, rollout, stranger, law)
        return
    if _is_newer(scorer, rollout, node):
        weights = read_from(graph, node, "rollout_weights")
        if weights is None:
            remedy = _corrections(graph, node, rollout)
        elif _lead_to(graph, weights, scorer.weights):
            return
        else:
            remedy = _importance_weights(graph, node, rollout)
        yield refusal("stale-ratio", law, graph, node, [rollout.name, scorer.name], remedy)
        return
    if scorer.model == rollout.model:
        remedy = f"read them before the update: {scorer.name}: {{model: {rollout.model}}}"
    else:
        remedy = f"let the model score that sampled: set: {{{scorer.name}.model: {rollout.model}}}"
    yield refusal("wrong-ratio", law, graph, node, [rollout.name, scorer.name], remedy)


def _other_rows(view: CallView, scorer: Node, rollout: Node, stranger: Node, law: str) -> Problem:
    """Return the problem of a node that reads rows of two rollouts, whose log-probs are of one of them."""
    graph, node = view.graph, view.node
    law += f": `{stranger.writes[0]}` is of the rows of `{rollout.name}`, and all else is repeated to these"
    remedy = f"let `{node.name}` read what is of the rows that `{scorer.model}` sampled, "
    domains_behind = {domain.name for domain in graph.ancestors(rollout.domain)}
    if scorer.domain in domains_behind:
        remedy += f"as a mean by group.mean of what is said of each by `{rollout.name}`, "
    remedy += f"or train what sampled these: set: {{{node.name}.model: {rollout.model}, "
    remedy += f"{scorer.name}.model: {rollout.model}}}"
    problem = refusal("other-rows", law, graph, stranger, [], remedy)
    drawn = [rollout.name, stranger.name, scorer.name, node.name]
    return replace(problem, drawing=draw(graph, drawn))


def on_policy(view: CallView) -> Iterator[Problem]:
    """A loss without a ratio trains exactly the weights that sampled its rows, once, or weights the rows."""
    graph, node = view.graph, view.node
    rollout = sampler(graph, node.domain)
    law = f"node `{node.name}`: the loss {view.call.op.name} corrects for no change of weights since "
    law += "sampling; "
    if rollout is None:
        law += "its rows come from data"
        yield refusal("off-policy", law, graph, node, [], _train_by_sft(node))
        return
    clip = f"replace: {{{node.name}.loss: {{kind: ppo_clip}}}}"
    quantized = _quantized(graph, rollout)
    is_same = rollout.weights == node.weights and not quantized
    if not is_same and not _weighed(graph, node, rollout):
        law += f"its rows are sampled by {quantized or rollout.weights}, and it updates {node.weights}"
        remedy = clip
        if rollout.model == node.model:
            # importance weights lead from an older version, or from fewer bits, to the weights of now
            is_stale = quantized or _version(rollout) < 0
            if is_stale:
                remedy = _importance_weights(graph, node, rollout)
        yield refusal("off-policy", law, graph, node, [rollout.name], remedy)
    elif node.optimizer_steps > 1:
        law += f"it makes {node.optimizer_steps} optimizer steps on them, "
        law += "and all but the first are off-policy"
        update = node.joins or node.name
        remedy = f"{clip}, or set: {{{update}.minibatches: 1, {update}.epochs: 1}}"
        yield refusal("off-policy", law, graph, node, [rollout.name], remedy)


def behaviour_logprobs(view: CallView) -> Iterator[Problem]:
    """Importance weights divide a train engine's probabilities by those that the rollout measured."""
    graph, node = view.graph, view.node
    scorer = read_from(graph, node, "old_logprobs")
    behaviour = read_from(graph, node, "rollout_logprobs")
    if scorer is None or behaviour is None:
        return  # elided, or not read
    rollout = sampler(graph, node.domain)
    loss = view.call.op.name
    law = f"{loss} of node `{node.name}` weighs rows by the log-probs that they were sampled with; "
    if rollout is None:
        law += "its rows come from data"
        remedy = _train_by_sft(node) if node.trains else f"remove: [{node.name}]"
        yield refusal("no-sampler", law, graph, node, [], remedy)
    elif behaviour is not rollout:
        law += f"`{behaviour.writes[0]}` is {source(behaviour)}, and the rows are sampled by `{rollout.name}`"
        remedy = f"set: {{{node.name}.in.rollout_logprobs: {measured(rollout)}}}"
        names = [behaviour.name, rollout.name, scorer.name]
        yield refusal("wrong-behaviour", law, graph, node, names, remedy)
    elif scorer.op.engine != "train" or not _is_same_or_newer(scorer, rollout, node):
        law += f"`old_logprobs` is to be what weights of `{rollout.model}` make of them since, "
        law += f"and is {source(scorer)}"
        remedy = f"{_recompute(graph, rollout, scorer)}set: {{{node.name}.in.old_logprobs: old_logprobs}}"
        yield refusal("wrong-weights", law, graph, node, [rollout.name, scorer.name], remedy)
    elif node.trains:
        yield from _corrected_twice(graph, node, f"the loss {loss} does so by itself")


def greedy_baseline(view: CallView) -> Iterator[Problem]:
    """A baseline is the greedy reward, on the same prompts, of the weights that sampled the rows."""
    graph, node = view.graph, view.node
    base = read_from(graph, node, "greedy_rewards")
    if base is None:
        return
    rollout = sampler(graph, node.domain)
    law = f"node `{node.name}` ({node.op.name}) takes off what the weights that sampled earn without chance; "
    if rollout is None:
        law += "its rows come from data"
        ports = f"in: {{rewards: {node.called.ins.get('rewards', 'rewards')}}}"
        remedy = f"replace: {{{node.name}: {{op: advantage.reinforce_pp, {ports}}}}}"
        yield refusal("no-sampler", law, graph, node, [], remedy)
        return
    greedy = sampler(graph, base.domain)
    if greedy is None or greedy is rollout:
        origin = "of the very samples" if greedy else "of data"
        law += f"`{base.writes[0]}` is {source(base)}, {origin}"
        remedy = _greedy_rollout(node, rollout, base)
        yield refusal("no-greedy", law, graph, node, [rollout.name, base.name], remedy)
        return
    reasons = []
    settings = []
    if greedy.weights != rollout.weights:
        sampled_with = f"`{rollout.name}` with {rollout.weights}"
        reasons.append(f"`{greedy.name}` samples with {greedy.weights}, {sampled_with}")
        model = f"{rollout.model}@next" if rollout.reads_next else rollout.model
        settings.append(f"{greedy.name}.model: {model}")
    temperature = greedy.called.value("temperature")
    if temperature != 0:
        reasons.append(f"`{greedy.name}` samples at temperature {temperature}")
        settings.append(f"{greedy.name}.{greedy.called.name_of('temperature')}: 0")
    if reasons:
        law += "; ".join(reasons)
        names = [rollout.name, greedy.name, base.name]
        yield refusal("no-greedy", law, graph, node, names, f"set: {{{', '.join(settings)}}}")


def _writer_of_other_rows(graph: Graph, node: Node, rollout: Node, scorer: Node) -> Node | None:
    """Return what brings a node the rows of another model's rollout than its log-probs are of."""
    if rollout.model in (node.model, scorer.model) or sampler(graph, scorer.domain) is rollout:
        return None
    for column in node.reads:
        column_writer = writer(graph, column)
        if sampler(graph, column_writer.domain) is rollout:
            return column_writer
    return None


def _quantized(graph: Graph, rollout: Node) -> str:
    """Return the weights that sample in words, where they have fewer bits than those that train; else ""."""
    model = graph.models.get(rollout.model or "")
    if model is None or not model.serve.quantization:
        return ""
    path = model.serve.setting_name(model.name, "quantization")
    return f"{rollout.weights} in {model.serve.quantization} ({path})"


def _is_same_or_newer(scorer: Node, rollout: Node, node: Node) -> bool:
    return scorer.weights == rollout.weights or _is_newer(scorer, rollout, node)


def _is_newer(scorer: Node, rollout: Node, node: Node) -> bool:
    """Return whether log-probs are of a version after the sampler's, and not after what the node updates."""
    if scorer.op.engine != "train" or scorer.model != rollout.model:
        return False
    if node.trains and scorer.model != node.model:
        return False
    newest = _version(node) if node.trains else _version(scorer)
    return _version(rollout) < _version(scorer) <= newest


def _version(node: Node) -> int:
    assert node.version is not None, f"{node.name} reads no version"
    return node.version


def _weighed(graph: Graph, node: Node, rollout: Node) -> bool:
    """Return whether importance weights lead from what sampled a node's rows to what it updates."""
    weights = read_from(graph, node, "rollout_weights")
    if weights is None or rollout.model != node.model:
        return False
    return _lead_to(graph, weights, node.weights)


def _lead_to(graph: Graph, importance_weights: Node, weights: str) -> bool:
    """Return whether importance weights lead to these weights of a model. A user's op is taken to do so."""
    scorer = read_from(graph, importance_weights, "old_logprobs")  # a user's op may have another way to them
    return scorer is None or scorer.weights == weights


def _corrected_twice(graph: Graph, node: Node, reason: str) -> Iterator[Problem]:
    weights = read_from(graph, node, "rollout_weights")
    if weights is None:
        return
    law = f"node `{node.name}` corrects for the weights that sampled twice: {reason}, and it reads "
    law += f"`{weights.writes[0]}`, {source(weights)}"
    yield refusal("corrected-twice", law, graph, node, [weights.name], f"remove: [{weights.name}]")


def _train_by_sft(node: Node) -> str:
    return f"replace: {{{node.name}.loss: {{kind: sft}}}}"


def _corrections(graph: Graph, node: Node, rollout: Node) -> str:
    """Return what makes a loss with a ratio legal on rows of an older version."""
    column = measured(rollout)
    ratio = f"set: {{{node.name}.in.old_logprobs: {column}}}"
    decoupled = f"replace: {{{node.name}.loss: {{kind: decoupled_ppo, cap: 2.0}}}}"
    if _clips(node):
        decoupled = f"set: {{{DECOUPLED.format(node.name)}}}"
    if column != "rollout_logprobs":
        decoupled += f", set: {{{node.name}.in.rollout_logprobs: {column}}}"
    edits = [ratio, _importance_weights(graph, node, rollout), decoupled]
    if clips_around_older(node, rollout):
        edits.reverse()
    return ", or ".join(edits)


def clips_around_older(node: Node, rollout: Node, by: int = 1) -> bool:
    """Return whether a ratio to what sampled a node's rows is clipped, and that is so many updates older.

    It is then clipped for what the updates since have changed: see docs/streaming.md.
    """
    if rollout.model != node.model or not _clips(node):
        return False
    return _version(node) - _version(rollout) >= by


def _clips(node: Node) -> bool:
    return any(hook.op.name == "ppo_clip" for hook in node.hooks.values())


def _importance_weights(graph: Graph, node: Node, rollout: Node) -> str:
    """Return the edit that adds importance weights, or lets them be up to the weights of now."""
    weights = read_from(graph, node, "rollout_weights")
    scorer = read_from(graph, node, "old_logprobs")
    column = scorer.writes[0].partition("/")[0] if scorer else "old_logprobs"
    ins = {"old_logprobs": column, "rollout_logprobs": measured(rollout)}
    call = f"{{op: correction.tis{renamed(ins)}}}"
    if weights:
        return f"replace: {{{weights.name}: {call}}}"
    if _is_written(graph, column):
        return f"add: {{rollout_weights: {call}}}"
    return f"add: {{{column}: {_logprobs_of_rows(node, rollout)}, rollout_weights: {call}}}"


def _logprobs_of_rows(node: Node, rollout: Node) -> str:
    """Return the call that scores the rows that a node reads with the model that sampled them."""
    rows = [name for name in node.rows if name != FINISHED]  # what streams is given to it in any case
    if not rows:
        return f"{{op: logprobs, model: {rollout.model}}}"
    names = f"[{', '.join(rows)}]" if len(rows) > 1 else rows[0]
    return f"{{op: logprobs, model: {rollout.model}, rows: {names}}}"


def _recompute(graph: Graph, rollout: Node, scorer: Node) -> str:
    """Return the edit that lets the model that sampled write ``old_logprobs``, where nothing does so yet."""
    call = f"{{old_logprobs: {{op: logprobs, model: {rollout.model}}}}}"
    if scorer.name == "old_logprobs":
        return f"replace: {call}, "
    if _is_written(graph, "old_logprobs"):
        return ""
    return f"add: {call}, "


def _is_written(graph: Graph, column: str) -> bool:
    """Return whether the user's graph writes a column, if only for nobody."""
    return column in graph.columns or any(column in node.writes for node in graph.dropped)


def renamed(ins: Mapping[str, str]) -> str:
    """Return `, in: {port: column}` of an edit, for the ports whose columns have other names; "" of none."""
    ports = [f"{port}: {column}" for port, column in ins.items() if port != column]
    if not ports:
        return ""
    return f", in: {{{', '.join(ports)}}}"


def measured(rollout: Node) -> str:
    """Return the column of the log-probs that a rollout measured itself, as the graph calls it."""
    return rollout.called.outs.get("rollout_logprobs", "rollout_logprobs").partition("/")[0]


def _greedy_rollout(node: Node, rollout: Node, base: Node) -> str:
    """Return the edit that adds a greedy rollout of the same prompts, and its reward."""
    call = rollout.called
    outs = ", ".join(f"{name}: greedy_{name}" for name in call.outs)
    limit = call.name_of("response_limit")
    sampling = f"op: {call.op.name}, model: {rollout.model}, n: 1, {call.name_of('temperature')}: 0, "
    sampling += f"{limit}: {call.attributes.get(limit)}"
    scores_responses = any(port.name == "responses" for port in base.op.inputs)
    reward = base.op.name if scores_responses else "reward.math"
    score = f"{{op: {reward}, in: {{responses: greedy_responses}}}}"
    add = f"add: {{greedy: {{{sampling}, out: {{{outs}}}}}, greedy_rewards: {score}}}"
    return f"{add}, set: {{{node.name}.in.greedy_rewards: greedy_rewards}}"
