"""Check what ops and losses assume of the graph around them: where log-probs, rows and values come from.

An op names the laws that it needs (``@op(assumes=("groups",))``); here is what they say. Each refusal names
the edit that would make the graph legal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rlgraph.errors import GraphError, Problem
from rlgraph.graph import Call, Graph, Node
from rlgraph.passes.trace import draw, sampler, writer


def assume(graph: Graph) -> Graph:
    """Every law of the graph's nodes checked; a note where a filter may have cut groups.

    Raises:
        GraphError: with every law that is broken.
    """
    problems = [
        problem
        for node in graph.nodes
        if node.call
        for call in (node.call, *node.hooks.values())
        for law in call.op.declared.assumes
        if (problem := LAWS[law](graph, node, call))
    ]
    if problems:
        raise GraphError(problems)
    return replace(graph, notes=graph.notes + _cut_groups(graph))


def _cut_groups(graph: Graph) -> tuple[str, ...]:
    """Filters that look at single rows may leave a part of a group to a node that compares its samples."""
    notes = []
    for node in graph.nodes:
        if node.call and node.op.declared.rows == "group":
            filters = [graph.node(made.maker) for made in graph.ancestors(node.domain) if made.filtered]
            cut = [f"`{made.name}`" for made in filters if made.op.declared.rows == "each"]
            if cut:
                notes.append(f"{', '.join(cut)} may cut groups: `{node.name}` compares what is left of them")
    return tuple(notes)


def _groups(graph: Graph, node: Node, call: Call) -> Problem | None:
    """A group has more than one sample."""
    made = [domain for domain in graph.ancestors(node.domain) if not domain.filtered]
    domain = made[0]
    if domain.parent is None or domain.times > 1:
        return None
    law = f"node `{node.name}` ({node.op.name}) compares the samples of a prompt; `{domain.maker}` makes one"
    return _problem("small-groups", law, graph, node, [domain.maker], f"set: {{{domain.maker}.n: 8}}")


def _sampling_logprobs(graph: Graph, node: Node, call: Call) -> Problem | None:
    """A ratio's denominator are the log-probs of the weights that sampled the rows."""
    column = node.call.ins.get("old_logprobs") if node.call else None
    if column is None:
        return None  # elided, or not read
    made, rollout = writer(graph, column), sampler(graph, node.domain)
    wrong = (
        f"the loss {call.op.name} of node `{node.name}` divides by log-probs of the weights that sampled; "
    )
    if rollout is None:
        if made.op.source:
            return None
        law = wrong + "its rows come from data, and no weights sampled them"
        remedy = f"replace: {{{node.name}.loss: {{kind: sft}}}}"
        return _problem("no-sampler", law, graph, node, [made.name], remedy)
    if made is rollout or (made.op.engine == "train" and made.weights == rollout.weights):
        return None
    law = wrong + f"`{column}` is {_source(made)}, and the rows are sampled by {rollout.weights}"
    remedy = f"add a node that writes them: old_logprobs: {{op: logprobs, model: {rollout.model}}}"
    if made.model == rollout.model:
        remedy = f"read them before the update: {made.name}: {{model: {rollout.model}}}"
    return _problem("wrong-ratio", law, graph, node, [rollout.name, made.name], remedy)


def _on_policy(graph: Graph, node: Node, call: Call) -> Problem | None:
    """A loss without a ratio trains the very weights that sampled its rows, once."""
    rollout = sampler(graph, node.domain)
    law = f"node `{node.name}`: the loss {call.op.name} corrects for no change of weights since sampling; "
    fix = f"replace: {{{node.name}.loss: {{kind: ppo_clip}}}}"
    if rollout is None:
        law += "its rows come from data"
        return _problem("off-policy", law, graph, node, [], f"replace: {{{node.name}.loss: {{kind: sft}}}}")
    names = [rollout.name]
    if (rollout.model, rollout.version) != (node.model, node.version):
        law += f"its rows are sampled by {rollout.weights}, and it updates {node.weights}"
        return _problem("off-policy", law, graph, node, names, fix)
    if (steps := node.optimizer_steps) > 1:
        law += f"it makes {steps} optimizer steps on them, and all but the first are off-policy"
        remedy = f"{fix}, or set: {{{node.name}.minibatches: 1, {node.name}.epochs: 1}}"
        return _problem("off-policy", law, graph, node, names, remedy)
    return None


def _reference(graph: Graph, node: Node, call: Call) -> Problem | None:
    """A KL term measures the distance to other weights than those that are trained."""
    column = call.ins.get("ref_logprobs")
    if column is None or (made := writer(graph, column)).model != _trained(graph, node):
        return None
    law = f"node `{node.name}` measures the KL to a reference; "
    law += f"`{column}` is of the same weights, {_source(made)}"
    frozen = [name for name, model in graph.models.items() if model.spec.frozen and model.spec.head == "lm"]
    remedy = f"set: {{{made.name}.model: {frozen[0] if frozen else 'ref'}}}"
    if not frozen:
        remedy += f", and add models.ref: {{path: '${{models.{made.model}.path}}', frozen: true}}"
    return _problem("same-reference", law, graph, node, [made.name], remedy)


def _critic_values(graph: Graph, node: Node, call: Call) -> Problem | None:
    """Values are a critic's, and a critic is trained on its own."""
    column = call.ins["values"]
    made = writer(graph, column)
    wrong = f"node `{node.name}` ({node.op.name}) reads `values`, the estimates of a critic; "
    if made.op.engine == "train" and made.op.declared.head != "value":
        law = wrong + f"`{column}` is {_source(made)}, which has no value head"
        remedy = "add: {values: {op: values, model: critic}}"
        return _problem("no-critic", law, graph, node, [made.name], remedy)
    if node.updates and made.op.engine == "train" and made.model != node.model:
        law = wrong + f"`{column}` is {_source(made)}, and it trains `{node.model}`"
        remedy = f"set: {{{node.name}.model: {made.model}}}"
        return _problem("other-critic", law, graph, node, [made.name], remedy)
    return None


def _constant_norm(graph: Graph, node: Node, call: Call) -> Problem | None:
    """A sum that is divided by a constant is given the constant, and no other aggregation has one."""
    how, norm = call.attributes["aggregate"], call.attributes["norm"]
    wanted = how == "seq-mean-token-sum-norm"
    if wanted == (norm is not None):
        return None
    if not wanted:
        law = f"node `{node.name}`: `norm` is read by aggregate seq-mean-token-sum-norm alone, not by {how}"
        return _problem("norm", law, graph, node, [], f"set: {{{node.name}.norm: null}}")
    law = f"node `{node.name}`: aggregate {how} divides by a constant number of tokens, `norm`"
    rollout = sampler(graph, node.domain)
    value = f"'${{nodes.{rollout.name}.max_new_tokens}}'" if rollout else "1024"
    return _problem("norm", law, graph, node, [], f"set: {{{node.name}.norm: {value}}}")


LAWS: dict[str, Callable[[Graph, Node, Call], Problem | None]] = {
    "groups": _groups,
    "sampling_logprobs": _sampling_logprobs,
    "on_policy": _on_policy,
    "reference": _reference,
    "critic_values": _critic_values,
    "constant_norm": _constant_norm,
}


def _trained(graph: Graph, node: Node) -> str | None:
    """The model that a node's KL is about: the one it updates, or the one that sampled its rows."""
    if node.updates:
        return node.model
    rollout = sampler(graph, node.domain)
    return rollout.model if rollout else None


def _source(node: Node) -> str:
    return f"written by `{node.name}` ({node.op.name}" + (f", {node.weights})" if node.model else ")")


def _problem(kind: str, law: str, graph: Graph, node: Node, before: list[str], remedy: str) -> Problem:
    return Problem(kind, law, node.mark, (), remedy, draw(graph, [*before, node.name]))
