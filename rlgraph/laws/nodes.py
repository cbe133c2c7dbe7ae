"""Laws of nodes that ops name: ``@op(assumes=("groups",))`` says that ``groups`` holds around the op.

Those of rows that other weights sampled than are trained stand in off_policy.py. Each refusal names the edit
that would make the graph legal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import get_args

from rlgraph.engines.registry import GRAMMARS, SERVING
from rlgraph.errors import Problem
from rlgraph.ir.graph import Graph, Node
from rlgraph.ir.trace import refusal, sampler, source, writer
from rlgraph.laws.off_policy import behaviour_logprobs, greedy_baseline, on_policy, sampling_logprobs
from rlgraph.laws.places import section_of_nodes
from rlgraph.laws.rows import unfiltered_domains
from rlgraph.laws.views import CallView
from rlgraph.ops.declare import Law


def _groups(view: CallView) -> Iterator[Problem]:
    """A group has more than one sample."""
    graph, node = view.graph, view.node
    group = graph.columns[view.call.ins["group"]]
    grouped_by = graph.columns[group.copy_of or group.name].domain
    domains = unfiltered_domains(graph, node)
    samples = domains[0]
    if samples.parent is None:
        return
    group_size = 1
    for domain in domains:
        group_size *= domain.times
        if domain.name == grouped_by:
            break
    if group_size > 1:
        return
    law = f"node `{node.name}` ({node.op.name}) compares the samples of a prompt; `{samples.maker}` makes one"
    yield refusal("small-groups", law, graph, node, [samples.maker], f"set: {{{samples.maker}.n: 8}}")


def _answered(view: CallView) -> Iterator[Problem]:
    """Right answers are in a column: `answer`, or `answers` with several of each question."""
    node = view.node
    if {"answer", "answers"} & view.call.ins.keys():
        return
    law = f"node `{node.name}` ({node.op.name}) reads column `answer` or `answers`, and nothing writes either"
    remedy = "name the field of the rows, by `answer:` of data.prompts, or several right ones by "
    remedy += "columns: {answers: {from: FIELD, type: json}}"
    yield refusal("no-answer", law, view.graph, node, [], remedy)


def _tries(view: CallView) -> Iterator[Problem]:
    """A question has at least as many samples as there are tries to count."""
    graph, node = view.graph, view.node
    domain = unfiltered_domains(graph, node)[0]
    samples = 1 if domain.parent is None else domain.times
    tries = view.call.attributes.get("k")
    if not isinstance(tries, int) or tries <= samples:
        return
    maker = domain.maker
    law = f"node `{node.name}` ({node.op.name}) counts {tries} tries; `{maker}` makes {samples} "
    law += "samples of a question"
    section = section_of_nodes(graph)
    remedy = f"set: {{{section}{maker}.n: {tries}}}, or set: {{{section}{node.name}.k: {samples}}}"
    yield refusal("too-many-tries", law, graph, node, [maker], remedy)


def _reference(view: CallView) -> Iterator[Problem]:
    """A KL term measures the distance to weights other than the trained ones."""
    graph, node = view.graph, view.node
    column = view.call.ins.get("ref_logprobs")
    if column is None:
        return
    scorer = writer(graph, column)
    if scorer.model != _model_of_kl(graph, node):
        return
    if scorer is sampler(graph, node.domain):
        return  # what holds the policy near to the one that sampled, which is older or another engine
    law = f"node `{node.name}` measures the KL to a reference; "
    law += f"`{column}` is of the same weights, {source(scorer)}"
    remedy = f"set: {{{scorer.name}.model: ref}}, and add models.ref: "
    remedy += f"{{path: '${{models.{scorer.model}.path}}', frozen: true}}"
    for name, model in graph.models.items():
        if model.spec.frozen and model.spec.head == "lm":
            remedy = f"set: {{{scorer.name}.model: {name}}}"
            break
    yield refusal("same-reference", law, graph, node, [scorer.name], remedy)


def _model_of_kl(graph: Graph, node: Node) -> str | None:
    """Return the model that a node's KL is about: the one it updates, or the one that sampled its rows."""
    if node.trains:
        return node.model
    rollout = sampler(graph, node.domain)
    return rollout.model if rollout else None


def _critic_values(view: CallView) -> Iterator[Problem]:
    """Values come from a critic, and a critic is trained on its own values."""
    graph, node = view.graph, view.node
    column = view.call.ins["values"]
    critic = writer(graph, column)
    if critic.op.engine != "train":
        return
    law = f"node `{node.name}` ({node.op.name}) reads `values`, the estimates of a critic; "
    if critic.op.declared.head != "value":
        law += f"`{column}` is {source(critic)}, which has no value head"
        remedy = "add: {values: {op: values, model: critic}}"
        yield refusal("no-critic", law, graph, node, [critic.name], remedy)
    elif node.trains and critic.model != node.model:
        law += f"`{column}` is {source(critic)}, and it trains `{node.model}`"
        remedy = f"set: {{{node.name}.model: {critic.model}}}"
        yield refusal("other-critic", law, graph, node, [critic.name], remedy)


def _constant_norm(view: CallView) -> Iterator[Problem]:
    """Only the aggregation that divides a sum by a constant has the constant, and it needs it."""
    graph, node = view.graph, view.node
    aggregate, norm = view.call.attributes["aggregate"], view.call.attributes["norm"]
    divides = aggregate == "seq-mean-token-sum-norm"
    if divides and norm is None:
        law = f"node `{node.name}`: aggregate {aggregate} divides by a constant number of tokens, `norm`"
        remedy = f"set: {{{node.name}.norm: {_longest_response(graph, node)}}}"
        yield refusal("norm", law, graph, node, [], remedy)
    elif norm is not None and not divides:
        law = f"node `{node.name}`: `norm` is read by aggregate seq-mean-token-sum-norm alone, "
        law += f"not by {aggregate}"
        yield refusal("norm", law, graph, node, [], f"set: {{{node.name}.norm: null}}")


def _longest_response(graph: Graph, node: Node) -> str:
    """Return the tokens that a sample may have, as the setting of the rollout that says so, or a number."""
    rollout = sampler(graph, node.domain)
    if rollout is None:
        return "1024"
    limit = rollout.called.name_of("response_limit")
    if not limit:
        return "1024"
    return f"'${{nodes.{rollout.name}.{limit}}}'"


def _signed(view: CallView) -> Iterator[Problem]:
    """A limit on the weight of rows with negative advantages needs a loss that reads advantages."""
    node = view.node
    loss = node.hooks["loss"]
    if view.call.attributes["off_policy_limit"] is None:
        return
    if any(port.name == "advantages" for port in loss.op.inputs):
        return
    law = f"node `{node.name}`: off_policy_limit leaves out tokens of negative advantages, and its loss "
    law += f"{loss.op.name} reads no `advantages`"
    remedy = f"set: {{{node.name}.off_policy_limit: null}}"
    yield refusal("no-advantages", law, view.graph, node, [], remedy)


def _dropped(view: CallView) -> Iterator[Problem]:
    """Check that a filter drops samples without a reward if it should; evaluations count them as 0."""
    graph, node = view.graph, view.node
    if view.call.attributes.get("on_error") != "drop" or graph.report:
        return
    rewards, failed = view.call.outs["rewards"], view.call.outs["failed"]
    if any(reader.op.declared.filters for reader in _user_readers(graph, failed)):
        return
    law = f"node `{node.name}` leaves it to a filter to drop samples without a reward (on_error: drop); "
    law += f"none reads `{failed}`"
    ports = "" if failed == "failed" else f", in: {{failed: {failed}}}"
    rows = ", ".join(f"{reader.name}.rows: judged" for reader in _user_readers(graph, rewards))
    remedy = f"add: {{judged: {{op: filter.judged{ports}}}}}, and set: {{{rows}}}; or on_error: zero"
    yield refusal("not-dropped", law, graph, node, [], remedy)


def _user_readers(graph: Graph, column: str) -> list[Node]:
    """Return the nodes of the user that read a column, or a copy of it."""
    readers = graph.readers(column)
    users = [reader for reader in readers if reader.call]
    for reader in readers:
        if reader.inserted:
            for copy in reader.writes:
                users += _user_readers(graph, copy)
    return users


def _one_step(view: CallView) -> Iterator[Problem]:
    """Check that a loss reads columns computed with the weights that its first optimizer step changes."""
    node = view.node
    steps = node.optimizer_steps
    if steps == 1:
        return
    law = f"node `{node.name}`: the loss {view.call.op.name} has the gradient of the weights before the "
    law += f"update; it makes {steps} optimizer steps, and for all but the first that is another loss's"
    update = node.joins or node.name
    remedy = f"set: {{{update}.minibatches: 1, {update}.epochs: 1}}; for as many steps as before, "
    remedy += f"make the batch smaller by {steps}, and `schedule.iterations` larger"
    yield refusal("one-step", law, view.graph, node, [], remedy)


def _sequence_sum(view: CallView) -> Iterator[Problem]:
    """Check that a loss that is a sum over the tokens of a sequence is summed."""
    node = view.node
    aggregate = node.called.attributes.get("aggregate")
    if aggregate == "seq-mean-token-sum":
        return
    law = f"node `{node.name}`: the loss {view.call.op.name} is a sum over the tokens of each sequence; "
    law += f"aggregate {aggregate} would weigh sequences by their lengths, or all of them by a constant"
    settings = f"{node.name}.aggregate: seq-mean-token-sum"
    if node.called.attributes.get("norm"):
        settings += f", {node.name}.norm: null"
    yield refusal("sequence-sum", law, view.graph, node, [], f"set: {{{settings}}}")


def _token_sum(view: CallView) -> Iterator[Problem]:
    """Check that tokens of all sequences count equally in a loss of -w logprobs per token."""
    if view.node.called.attributes.get("aggregate") == "seq-mean-token-mean":
        yield from _sequence_sum(view)


def _weighed_losses(view: CallView) -> Iterator[Problem]:
    """Check that each weight belongs to an existing loss."""
    node = view.node
    losses = [path.removeprefix("losses.") for path in node.hooks if path.startswith("losses.")]
    weights = view.call.attributes["weights"] or {}
    for name in weights:
        if name in losses:
            continue
        law = f"node `{node.name}`: `weights` has `{name}`, which is not one of its `losses`"
        names = ", ".join(losses) or "none: write them by name, as losses: {dpo: {kind: sigmoid}}"
        yield refusal("unknown-weight", law, view.graph, node, [], f"`losses` has {names}")
        return


def _routed(view: CallView) -> Iterator[Problem]:
    """Check that a serve engine can report its choice of experts if asked for it."""
    node = view.node
    engine = view.graph.models[str(node.model)].spec.serve.engine
    if not view.call.value("routing") or SERVING[engine].routing is not None:
        return
    law = f"node `{node.name}` writes `routing`; the engine {engine} does not say which experts it chose"
    remedy = f"set: {{{node.name}.routing: false}}"
    for able, record in SERVING.items():
        if record.routing is not None:
            remedy += f", or set: {{models.{node.model}.serve.engine: {able}}}"
    yield refusal("no-routing", law, view.graph, node, [], remedy)


def _grammar(view: CallView) -> Iterator[Problem]:
    """Check that the serve engine supports grammars, and that only one grammar decides when texts end."""
    graph, node = view.graph, view.node
    grammars = [key for key in GRAMMARS if view.call.attributes[key] is not None]
    if not grammars:
        return
    grammar = grammars[0]
    without_grammar = f"set: {{{node.name}.{grammars[-1]}: null}}"
    engine = graph.models[str(node.model)].spec.serve.engine
    if len(grammars) > 1:
        law = f"node `{node.name}` asks for texts of two grammars, regex and json_schema"
        yield refusal("two-grammars", law, graph, node, [], without_grammar)
    elif view.call.attributes["min_new_tokens"]:
        law = f"node `{node.name}`: a text of `{grammar}` that is whole before it has `min_new_tokens` can "
        law += "neither end nor go on"
        remedy = f"set: {{{node.name}.min_new_tokens: 0}}, and let `{grammar}` say how long a text is"
        yield refusal("whole-grammar", law, graph, node, [], remedy)
    elif SERVING[engine].grammars is None:
        law = f"node `{node.name}` asks for texts of a grammar, `{grammar}`; "
        law += f"the engine {engine} draws from the whole vocabulary"
        remedy = ""
        for able, record in SERVING.items():
            if record.grammars is not None:
                remedy += f"set: {{models.{node.model}.serve.engine: {able}}}, or "
        remedy += without_grammar
        yield refusal("no-grammar", law, graph, node, [], remedy)


def _one_agent(view: CallView) -> Iterator[Problem]:
    """Check that an episode has one agent: a function, or a command line."""
    node = view.node
    agents = [key for key in ("run", "command") if view.call.attributes[key] is not None]
    if len(agents) == 1:
        return
    if agents:
        law = f"node `{node.name}` names two agents, run and command"
        remedy = f"set: {{{node.name}.command: null}}"
    else:
        law = f"node `{node.name}` names no agent"
        remedy = f"set: {{{node.name}.command: python my_agent.py}}"
    yield refusal("one-agent", law, view.graph, node, [], remedy)


def _replayed(view: CallView) -> Iterator[Problem]:
    """Check that a train engine can replay a choice of experts: its layers are not compiled."""
    node = view.node
    routing = view.call.ins.get("routing")
    if routing is None or not view.graph.models[str(node.model)].spec.train.compile:
        return
    law = f"node `{node.name}` replays `{routing}`, a choice of experts; "
    law += "layers that are compiled choose by themselves"
    remedy = f"set: {{models.{node.model}.train.compile: false}}"
    yield refusal("compiled-routing", law, view.graph, node, [], remedy)


# the names that ops give these laws
CALL_LAWS: Mapping[Law, Callable[[CallView], Iterator[Problem]]] = {
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
    "one_agent": _one_agent,
    "replayed": _replayed,
}
assert {*CALL_LAWS} == {*get_args(Law)}, "`Law` of rlgraph/ops/declare.py lists these names for @op"
