"""Check what ops and losses assume of the graph around them: where log-probs, rows and values come from.

An op names the laws that it needs (``@op(assumes=("groups",))``); here is what they say. Each refusal names
the edit that would make the graph legal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from math import prod

from rlgraph.engines.registry import GRAMMARS, SERVING
from rlgraph.errors import GraphError, Problem
from rlgraph.ir.graph import Call, Graph, Node
from rlgraph.ir.trace import refusal, sampler, source, when_they_came, writer
from rlgraph.passes.off_policy_laws import behaviour_logprobs, greedy_baseline, on_policy, sampling_logprobs
from rlgraph.passes.refill import aged


def assume(graph: Graph) -> Graph:
    """Check every law of the graph's nodes, and note where a filter may have cut groups.

    Raises:
        GraphError: with every law that is broken.
    """
    oldest = aged(graph)
    views = _views(oldest)  # rows of data are in one update with sampled ones by the graph's own word
    found = {
        (node.name, law, problem.remedy): problem  # of several parts of its rows that break one, the last
        for node in oldest.nodes
        if node.call
        for call in (node.call, *node.hooks.values())
        for law in call.op.declared.assumes
        for view in [view for view in views if sampler(view, node.domain)] or views
        if (problem := LAWS[law](when_they_came(view, node), node, call))
    }
    problems = [*found.values()]
    laws = (_rows_for_each, _one_context, _single_rows)
    problems += [problem for node in oldest.nodes for law in laws if (problem := law(oldest, node))]
    if problems:
        raise GraphError(dict.fromkeys(problems))
    return replace(graph, notes=graph.notes + _cut_groups(graph))


def _views(graph: Graph) -> Sequence[Graph]:
    """Return the graph as the rows of each part of what is merged see it: the nodes that wrote theirs."""
    most = max((len(node.reads) for node in graph.nodes if node.kind.facts.merges), default=1)
    if most == 1:
        return [graph]
    return [
        replace(
            graph,
            nodes=tuple(
                replace(n, reads=n.reads[at:][:1] or n.reads[-1:]) if n.kind.facts.merges else n
                for n in graph.nodes
            ),
            domains={n: replace(d, parts=d.parts[at:][:1] or d.parts[-1:]) for n, d in graph.domains.items()},
        )
        for at in range(most)
    ]


def _rows_for_each(graph: Graph, node: Node) -> Problem | None:
    """An update has rows for each of its mini-batches."""
    if not node.updates or not graph.ancestors(node.domain):
        return None
    lines, minibatches = graph.origins(node.domain), node.called.value("minibatches", 1)
    makers = [graph.node(line[-1].maker) for line in lines]
    maker, batches = makers[0], [maker.called.value("rows") for maker in makers]
    if not all(isinstance(batch, int) for batch in batches):
        return None
    pairs = zip(batches, lines, strict=True)
    rows = sum(batch * prod(domain.times for domain in line) for batch, line in pairs)
    if minibatches <= rows:
        return None
    law = f"node `{node.name}` ({node.op.name}) makes {minibatches:,} mini-batches of {rows:,} rows"
    remedy = f"set: {{{node.name}.{node.called.name_of('minibatches')}: {rows}}}, or fewer"
    return refusal("few-rows", law, graph, node, [maker.name], remedy)


def _one_context(graph: Graph, node: Node) -> Problem | None:
    """A model reads one context at a time, though a sample may be several."""
    domain = next((domain for domain in graph.ancestors(node.domain) if not domain.filtered), None)
    if not (node.call and node.op.engine == "train" and domain):
        return None
    maker = graph.node(domain.maker)
    if not (maker.call and maker.called.value("contexts", False)):
        return None
    law = f"node `{node.name}` ({node.op.name}) reads whole samples of `{maker.name}`, whose policy "
    law += "forgets: it never saw all of a sample's tokens in one context"
    remedy = "add: {segments: {op: segment.contexts}}, and let it read segment_tokens and segment_mask; or "
    remedy += f"set: {{{maker.name}.{maker.called.name_of('contexts')}: false}}"
    return refusal("several-contexts", law, graph, node, [maker.name], remedy)


def _single_rows(graph: Graph, node: Node) -> Problem | None:
    """Rows that are held are given one by one: nothing compares those of a prompt."""
    compares = node.call and (node.op.declared.rows == "group" or "groups" in node.op.declared.assumes)
    holders = [graph.node(line[-1].maker) for line in graph.origins(node.domain) if line and line[-1].held]
    if not compares or not holders:
        return None
    law = f"node `{node.name}` ({node.op.name}) compares the samples of a prompt; `{holders[0].name}` holds "
    law += "single rows, and gives some of them"
    whose = holders[0].rows[0]
    remedy = f"let it compare them when they come: set: {{{node.name}.rows: {whose}}}; what it writes is held"
    return refusal("held-groups", law, graph, node, [holders[0].name], remedy)


def _cut_groups(graph: Graph) -> tuple[str, ...]:
    """Return notes of filters of single rows that may leave a part of a group to a node that compares it."""
    notes = []
    for node in graph.nodes:
        if node.call and node.op.declared.rows == "group":
            parts = takewhile(lambda domain: domain.filtered, graph.ancestors(node.domain))
            filters = [graph.node(domain.maker) for domain in parts]
            cut = [f"`{filtering.name}`" for filtering in filters if filtering.op.declared.rows == "each"]
            if cut:
                notes.append(f"{', '.join(cut)} may cut groups: `{node.name}` compares what is left of them")
    return tuple(notes)


def _groups(graph: Graph, node: Node, call: Call) -> Problem | None:
    """A group has more than one sample."""
    line = [domain for domain in graph.ancestors(node.domain) if not domain.filtered]
    group = graph.columns[call.ins["group"]]
    of = graph.columns[group.copy_of or group.name].domain
    domain, inner = line[0], [*takewhile(lambda made: made.name != of, line)]  # made of a group's samples
    if domain.parent is None or prod(made.times for made in line[: len(inner) + 1]) > 1:
        return None
    law = f"node `{node.name}` ({node.op.name}) compares the samples of a prompt; `{domain.maker}` makes one"
    return refusal("small-groups", law, graph, node, [domain.maker], f"set: {{{domain.maker}.n: 8}}")


def _answered(graph: Graph, node: Node, call: Call) -> Problem | None:
    """Right answers are in a column: `answer`, or `answers` with several of each question."""
    if {"answer", "answers"} & call.ins.keys():
        return None
    law = f"node `{node.name}` ({node.op.name}) reads column `answer` or `answers`, and nothing writes either"
    remedy = "name the field of the rows, by `answer:` of data.prompts, or several right ones by "
    remedy += "columns: {answers: {from: FIELD, type: json}}"
    return refusal("no-answer", law, graph, node, [], remedy)


def _tries(graph: Graph, node: Node, call: Call) -> Problem | None:
    """A question has at least as many samples as tries are counted."""
    line = [domain for domain in graph.ancestors(node.domain) if not domain.filtered]
    samples = line[0].times if line[0].parent is not None else 1
    tries = call.attributes.get("k")
    if not isinstance(tries, int) or not isinstance(samples, int) or tries <= samples:
        return None
    law = f"node `{node.name}` ({node.op.name}) counts {tries} tries; `{line[0].maker}` makes {samples} "
    law += "samples of a question"
    at = "eval.nodes." if graph.report else ""
    remedy = f"set: {{{at}{line[0].maker}.n: {tries}}}, or {{{at}{node.name}.k: {samples}}}"
    return refusal("too-many-tries", law, graph, node, [line[0].maker], remedy)


def _reference(graph: Graph, node: Node, call: Call) -> Problem | None:
    """A KL term measures the distance to other weights than those that are trained."""
    column = call.ins.get("ref_logprobs")
    if column is None or (scorer := writer(graph, column)).model != _trained(graph, node):
        return None
    if scorer is sampler(graph, node.domain):
        return None  # what holds the policy near to the one that sampled, which is older or another engine
    law = f"node `{node.name}` measures the KL to a reference; "
    law += f"`{column}` is of the same weights, {source(scorer)}"
    frozen = [name for name, model in graph.models.items() if model.spec.frozen and model.spec.head == "lm"]
    remedy = f"set: {{{scorer.name}.model: {frozen[0] if frozen else 'ref'}}}"
    if not frozen:
        remedy += f", and add models.ref: {{path: '${{models.{scorer.model}.path}}', frozen: true}}"
    return refusal("same-reference", law, graph, node, [scorer.name], remedy)


def _critic_values(graph: Graph, node: Node, call: Call) -> Problem | None:
    """Values are a critic's, and a critic is trained on its own."""
    column = call.ins["values"]
    critic = writer(graph, column)
    wrong = f"node `{node.name}` ({node.op.name}) reads `values`, the estimates of a critic; "
    if critic.op.engine == "train" and critic.op.declared.head != "value":
        law = wrong + f"`{column}` is {source(critic)}, which has no value head"
        remedy = "add: {values: {op: values, model: critic}}"
        return refusal("no-critic", law, graph, node, [critic.name], remedy)
    if node.trains and critic.op.engine == "train" and critic.model != node.model:
        law = wrong + f"`{column}` is {source(critic)}, and it trains `{node.model}`"
        remedy = f"set: {{{node.name}.model: {critic.model}}}"
        return refusal("other-critic", law, graph, node, [critic.name], remedy)
    return None


def _constant_norm(graph: Graph, node: Node, call: Call) -> Problem | None:
    """A sum that is divided by a constant is given the constant, and no other aggregation has one."""
    how, norm = call.attributes["aggregate"], call.attributes["norm"]
    wanted = how == "seq-mean-token-sum-norm"
    if wanted == (norm is not None):
        return None
    if not wanted:
        law = f"node `{node.name}`: `norm` is read by aggregate seq-mean-token-sum-norm alone, not by {how}"
        return refusal("norm", law, graph, node, [], f"set: {{{node.name}.norm: null}}")
    law = f"node `{node.name}`: aggregate {how} divides by a constant number of tokens, `norm`"
    rollout = sampler(graph, node.domain)
    limit = rollout.called.name_of("response_limit") if rollout else ""
    value = f"'${{nodes.{rollout.name}.{limit}}}'" if rollout and limit else "1024"
    return refusal("norm", law, graph, node, [], f"set: {{{node.name}.norm: {value}}}")


def _signed(graph: Graph, node: Node, call: Call) -> Problem | None:
    """A limit on what rows of negative advantages may weigh wants a loss that reads advantages."""
    if call.attributes["off_policy_limit"] is None:
        return None
    loss = node.hooks["loss"]
    if any(port.name == "advantages" for port in loss.op.inputs):
        return None
    law = f"node `{node.name}`: off_policy_limit leaves out tokens of negative advantages, and its loss "
    law += f"{loss.op.name} reads no `advantages`"
    return refusal("no-advantages", law, graph, node, [], f"set: {{{node.name}.off_policy_limit: null}}")


def _dropped(graph: Graph, node: Node, call: Call) -> Problem | None:
    """Check that a filter drops samples without a reward where it is told to; evaluations take them as 0."""
    if call.attributes.get("on_error") != "drop" or graph.report:
        return None
    rewards, failed = (call.outs[name] for name in ("rewards", "failed"))
    if any(reader.op.declared.filters for reader in _users(graph, failed)):
        return None
    readers = [reader.name for reader in _users(graph, rewards)]
    law = f"node `{node.name}` leaves it to a filter to drop samples without a reward (on_error: drop); "
    law += f"none reads `{failed}`"
    into = f", in: {{failed: {failed}}}" * (failed != "failed")
    rows = ", ".join(f"{name}.rows: judged" for name in readers)
    remedy = f"add: {{judged: {{op: filter.judged{into}}}}}, and set: {{{rows}}}; or on_error: zero"
    return refusal("not-dropped", law, graph, node, [], remedy)


def _users(graph: Graph, column: str) -> list[Node]:
    """Return the nodes of the user that read a column, or a copy of it."""
    readers = graph.readers(column)
    copies = [copy for reader in readers if reader.inserted for copy in reader.writes]
    return [r for r in readers if r.call] + [user for copy in copies for user in _users(graph, copy)]


def _one_step(graph: Graph, node: Node, call: Call) -> Problem | None:
    """Check that a loss reads what the weights computed that its first optimizer step changes."""
    steps = node.optimizer_steps
    if steps == 1:
        return None
    law = f"node `{node.name}`: the loss {call.op.name} has the gradient of the weights before the update; "
    law += f"it makes {steps} optimizer steps, and for all but the first that is another loss's"
    lead = node.joins or node.name
    remedy = f"set: {{{lead}.minibatches: 1, {lead}.epochs: 1}}; for as many steps as before, "
    remedy += f"make the batch smaller by {steps}, and `schedule.iterations` larger"
    return refusal("one-step", law, graph, node, [], remedy)


def _sequence_sum(graph: Graph, node: Node, call: Call) -> Problem | None:
    """Check that a loss that is a sum over the tokens of a sequence is summed."""
    how, norm = (node.called.attributes.get(name) for name in ("aggregate", "norm"))
    if how == "seq-mean-token-sum":
        return None
    law = f"node `{node.name}`: the loss {call.op.name} is a sum over the tokens of each sequence; "
    law += f"aggregate {how} would weigh sequences by their lengths, or all of them by a constant"
    remedy = f"{node.name}.aggregate: seq-mean-token-sum" + (f", {node.name}.norm: null" if norm else "")
    return refusal("sequence-sum", law, graph, node, [], f"set: {{{remedy}}}")


def _token_sum(graph: Graph, node: Node, call: Call) -> Problem | None:
    """Check that tokens of all sequences count alike in a loss that is -w logprobs of each."""
    if node.called.attributes.get("aggregate") != "seq-mean-token-mean":
        return None
    return _sequence_sum(graph, node, call)


def _weighed_losses(graph: Graph, node: Node, call: Call) -> Problem | None:
    """Check that a weight is one of a loss that is there."""
    weights = call.attributes["weights"] or {}
    losses = [path.removeprefix("losses.") for path in node.hooks if path.startswith("losses.")]
    unknown = [name for name in weights if name not in losses]
    if not unknown:
        return None
    law = f"node `{node.name}`: `weights` has `{unknown[0]}`, which is none of its `losses`"
    remedy = (
        f"`losses` has {', '.join(losses) or 'none: write them by name, as losses: {dpo: {kind: sigmoid}}'}"
    )
    return refusal("unknown-weight", law, graph, node, [], remedy)


def _routed(graph: Graph, node: Node, call: Call) -> Problem | None:
    """Check that a serve engine that is asked for its choice of experts tells it."""
    serve = graph.models[str(node.model)].spec.serve
    if not call.value("routing") or SERVING[serve.engine].routing is not None:
        return None
    able = [name for name, engine in SERVING.items() if engine.routing is not None]
    law = f"node `{node.name}` writes `routing`; "
    law += f"the engine {serve.engine} does not say which experts it chose"
    remedy = f"set: {{{node.name}.routing: false}}, or models.{node.model}.serve.engine: {' or '.join(able)}"
    return refusal("no-routing", law, graph, node, [], remedy)


def _grammar(graph: Graph, node: Node, call: Call) -> Problem | None:
    """Check that the serve engine draws texts of a grammar, and that one grammar alone says when they end."""
    serve = graph.models[str(node.model)].spec.serve
    asked = [key for key in GRAMMARS if call.attributes[key] is not None]
    off = ", ".join(f"{node.name}.{key}: null" for key in asked[-1:])
    if len(asked) > 1:
        law = f"node `{node.name}` asks for texts of two grammars, regex and json_schema"
        return refusal("two-grammars", law, graph, node, [], f"set: {{{off}}}")
    if asked and call.attributes["min_new_tokens"]:
        law = f"node `{node.name}`: a text of `{asked[0]}` that is whole before it has `min_new_tokens` can "
        law += "neither end nor go on"
        remedy = f"set: {{{node.name}.min_new_tokens: 0}}, and let `{asked[0]}` say how long a text is"
        return refusal("whole-grammar", law, graph, node, [], remedy)
    if not asked or SERVING[serve.engine].grammars is not None:
        return None
    able = [name for name, engine in SERVING.items() if engine.grammars is not None]
    law = f"node `{node.name}` asks for texts of a grammar, `{asked[0]}`; "
    law += f"the engine {serve.engine} draws from the whole vocabulary"
    remedy = f"set: {{models.{node.model}.serve.engine: {' or '.join(able)}}}, or set: {{{off}}}"
    return refusal("no-grammar", law, graph, node, [], remedy)


def _replayed(graph: Graph, node: Node, call: Call) -> Problem | None:
    """Check that a train engine can replay a choice of experts: its layers are not compiled."""
    if "routing" not in call.ins or not graph.models[str(node.model)].spec.train.compile:
        return None
    law = f"node `{node.name}` replays `{call.ins['routing']}`, a choice of experts; "
    law += "layers that are compiled choose by themselves"
    remedy = f"set: {{models.{node.model}.train.compile: false}}"
    return refusal("compiled-routing", law, graph, node, [], remedy)


LAWS: dict[str, Callable[[Graph, Node, Call], Problem | None]] = {
    "groups": _groups,
    "tries": _tries,
    "answered": _answered,
    "sampling_logprobs": sampling_logprobs,
    "on_policy": on_policy,
    "behaviour_logprobs": behaviour_logprobs,
    "greedy_baseline": greedy_baseline,
    "reference": _reference,
    "critic_values": _critic_values,
    "constant_norm": _constant_norm,
    "signed": _signed,
    "dropped": _dropped,
    "one_step": _one_step,
    "sequence_sum": _sequence_sum,
    "token_sum": _token_sum,
    "weighed_losses": _weighed_losses,
    "routed": _routed,
    "grammar": _grammar,
    "replayed": _replayed,
}


def _trained(graph: Graph, node: Node) -> str | None:
    """Return the model that a node's KL is about: the one it updates, or the one that sampled its rows."""
    if node.trains:
        return node.model
    rollout = sampler(graph, node.domain)
    return rollout.model if rollout else None
