"""Warnings about what trains: work that leads to no update, and updates that learn nothing from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from rlgraph.errors import Mark, Problem, warning
from rlgraph.ir.dependencies import reached
from rlgraph.ir.digraph import DiGraph
from rlgraph.ir.graph import Graph, Model, Node
from rlgraph.ir.regions import aged
from rlgraph.ir.trace import read_from, refusal, sampler
from rlgraph.laws.off_policy import DECOUPLED, clips_around_older, measured, renamed
from rlgraph.laws.places import place_of_user, setting_place
from rlgraph.laws.streams import trained_models
from rlgraph.laws.views import RunView
from rlgraph.ops.declare import Port


def dropped_nodes(view: RunView) -> Iterator[Problem]:
    """Yield the last node of each chain that leads to no update and to nothing that is reported."""
    evaluated: set[str] = set()
    if view.evaluation:
        evaluated.update(node.name for node in view.evaluation.nodes)
    dropped = {node.name: node for node in view.train.dropped}
    needs = _needs_among(dropped)
    for node in dropped.values():
        is_last = not needs.predecessors(node.name)
        if not is_last or not node.call or node.name in evaluated:
            continue
        needed = needs.reachable([node.name]) - {node.name} - evaluated
        chain = [node]
        for name in sorted(needed):
            if dropped[name].call:
                chain.append(dropped[name])
        yield _dropped_chain(view, chain)


def _needs_among(nodes: Mapping[str, Node]) -> DiGraph[str]:
    """Return which of some nodes needs which, by the columns that they write and read."""
    writers = {}
    for node in nodes.values():
        for column in node.writes:
            writers[column] = node.name
    needs = DiGraph(nodes)
    for node in nodes.values():
        for column in node.reads:
            if column in writers:
                needs.add_edge(node.name, writers[column])
    return needs


def _dropped_chain(view: RunView, chain: list[Node]) -> Problem:
    """Return the problem of a node that leads to nothing, and of those that only it needs."""
    graph, node = view.train, chain[0]
    law = f"node `{node.name}` ({node.op.name}) leads to no update: it is left out"
    if len(chain) > 1:
        names = ", ".join(f"`{needed.name}`" for needed in chain[1:])
        law += f", and so are {names}"
    removed = [needed.name for needed in chain]
    for model in models_of(chain):
        if model not in view.plan.models:
            removed.append(f"models.{model}")
    remedy = f"remove: [{', '.join(removed)}]"
    readers = list(_possible_readers(graph, node))
    for reader, port in readers:
        if port == "rewards":
            remedy += f", or let a node read it: set: {{{reader.name}.in.rewards: {node.writes[0]}}}"
            break
    # edits of the chain come before what makes a reader leave it out, and that before the readers' edits
    marks = [needed.edited for needed in chain]
    for reader, port in readers:
        key = reader.op.declared.when.get(port, "in")
        marks.append(setting_place(view.tree, graph, reader, key))
    for reader, _ in readers:
        marks.append(reader.edited)
    return warning("dropped", law, place_of_user(marks, node.mark), remedy)


def _possible_readers(graph: Graph, node: Node) -> Iterator[tuple[Node, str]]:
    """Yield the nodes that could read what a dropped one writes, by the port's name or by its type."""
    types = {port.type for port in node.op.outputs}
    for reader in graph.nodes:
        for port in _input_ports(reader):
            is_reward = port.name == "rewards" and port.type in types
            if is_reward or port.name in node.writes:
                yield reader, port.name


def _input_ports(node: Node) -> list[Port]:
    """Return what the op of a node and those of its hooks read; nothing of an inserted node."""
    if node.call is None:
        return []
    ports = [*node.op.inputs]
    for hook in node.hooks.values():
        ports += hook.op.inputs
    return ports


def models_of(nodes: Iterable[Node]) -> list[str]:
    """Return the models that some nodes use, each once."""
    models: dict[str, None] = {}
    for node in nodes:
        for model in (node.model, node.of, node.tokenizer):
            if model:
                models[model] = None
    return [*models]


def untrained_models(view: RunView) -> Iterator[Problem]:
    """Yield models that are to be trained and are not, and value heads that nothing has trained."""
    graph = view.train
    trained = trained_models(graph)
    for name, model in graph.models.items():
        if name in trained or name not in view.plan.models:
            continue
        if model.spec.head == "value":
            base = _language_model_of(graph, model.path)
            # the files of a frozen model have a value head, unless they are those of a language model
            has_trained_head = model.spec.frozen and base is None
            reader = _first_reader(graph, name)
            if reader and not has_trained_head:
                yield _random_head(view, model, reader, base)
                continue
        if not model.spec.frozen:
            law = f"model `{name}` has an optimizer, and no node updates it"
            remedy = f"set: {{models.{name}.frozen: true}}, and remove: [models.{name}.optimizer]; "
            remedy += f"or add: {{update_{name}: {{op: ..., model: {name}}}}}"
            yield warning("untrained", law, _place_of_model(view, model), remedy)


def _first_reader(graph: Graph, model: str) -> Node | None:
    """Return the first node of the user that reads the weights of a model."""
    for node in graph.nodes:
        if node.model == model and node.call:
            return node
    return None


def _language_model_of(graph: Graph, path: str) -> str | None:
    """Return the first model with a language-model head that is read from a path."""
    for model in graph.models.values():
        if model.path == path and model.spec.head == "lm":
            return model.name
    return None


def _random_head(view: RunView, model: Model, reader: Node, base: str | None) -> Problem:
    law = f"what `{reader.name}` writes is of random weights: no node updates model `{model.name}`, and its "
    law += "value head is new"
    remedy = f"add: {{update_{model.name}: {{op: update.critic, model: {model.name}}}}}"
    if model.spec.frozen:
        law += f", for its files are those of `{base}`, which has none"
        path = f"models.{model.name}"
        train = f"set: {{{path}.frozen: false, {path}.optimizer: {{lr: 1e-5}}}}"
        remedy = f"give {path}.path a model with a value head, or {train}, {remedy}"
    return warning("untrained", law, _place_of_model(view, model), remedy)


def _place_of_model(view: RunView, model: Model) -> Mark | None:
    section = view.tree.at(("models", model.name))
    marks = [place.key for _, place in section.walk()]
    for removed, mark in view.train.removed.items():
        if model.name in removed:
            marks.append(mark)
    return place_of_user(marks, model.mark)


def blind_rewards(view: RunView) -> Iterator[Problem]:
    """Yield nodes whose column is read as the rewards of samples, and depends on nothing that is sampled."""
    graph = view.train
    for reader in graph.nodes:
        node = read_from(graph, reader, "rewards")
        rollout = sampler(graph, reader.domain)
        if node is None or rollout is None:
            continue
        needed = reached(graph.needs, [node.name], waits=lambda *_: False)
        if rollout.name in needed:
            continue
        law = f"node `{node.name}` ({node.op.name}) reads nothing of what `{rollout.name}` samples: it is "
        law += "the same for all samples of a prompt"
        remedy = "let it read a column of the samples, as by a parameter `responses: text[samples]`"
        outs = rollout.called.outs
        for port in node.op.inputs:
            if port.name in outs:
                remedy = f"set: {{{node.name}.in.{port.name}: {outs[port.name]}}}"
                break
        yield refusal("blind", law, graph, node, [], remedy, "warning")


def idle_kl(view: RunView) -> Iterator[Problem]:
    """Yield updates whose KL term holds nothing: k1 has no gradient in the mean over a policy's own samples.

    The gradient of log p - log q over samples of p is that of log p, whose mean is 0. That of k2 is the
    gradient of KL(p, q), that of k3 the gradient of KL(q, p).
    """
    for node in view.train.nodes:
        if not node.trains:
            continue
        attributes = node.called.attributes
        has_kl = attributes.get("kl_coef") and not attributes.get("kl_unbiased")
        if not has_kl or attributes.get("kl") != "k1":
            continue
        law = f"the KL term of node `{node.name}` holds nothing: the gradient of k1 has a mean of 0 over the "
        law += "policy's own samples"
        remedy = f"set: {{{node.name}.kl: k2}}, or k3; or take the KL off the rewards, by reward.kl_penalty"
        problem = refusal("idle-kl", law, view.train, node, [], remedy, "warning")
        yield replace(problem, mark=setting_place(view.tree, view.train, node, "kl"))


def stale_clips(view: RunView) -> Iterator[Problem]:
    """Yield updates whose ratio is clipped around weights that are two or more updates older."""
    graph = aged(view.train)
    for node in graph.nodes:
        if not node.trains:
            continue
        rollout = sampler(graph, node.domain)
        scorer = read_from(graph, node, "old_logprobs")
        if rollout is None or scorer is not rollout:
            continue
        if not clips_around_older(node, rollout, by=2):
            continue
        law = f"the loss ppo_clip of node `{node.name}` clips around `{rollout.weights}`: tokens whose ratio "
        law += "the updates since have taken out of the clip are not learned from"
        remedy = _decoupled(graph, node, rollout)
        yield refusal("stale-clip", law, graph, node, [rollout.name], remedy, "warning")


def _decoupled(graph: Graph, node: Node, rollout: Node) -> str:
    """Return the edits that clip an update around the weights that it starts from."""
    column = "old_logprobs"
    scorers = [scorer for scorer in (*graph.nodes, *graph.dropped) if column in scorer.writes]
    is_of_rollout = all(sampler(graph, scorer.domain) is rollout for scorer in scorers)
    if not is_of_rollout:
        column = f"{node.name}_logprobs"  # that of the other rollout's rows stays as it is
    settings = [f"{node.name}.in.old_logprobs: {column}"]
    if measured(rollout) != "rollout_logprobs":
        settings.append(f"{node.name}.in.rollout_logprobs: {measured(rollout)}")
    settings.append(DECOUPLED.format(node.name))
    remedy = f"set: {{{', '.join(settings)}}}"
    if scorers and is_of_rollout:
        return remedy
    outs = {}
    for port in ("tokens", "loss_mask"):
        outs[port] = rollout.called.outs[port].partition("/")[0]
    return f"{remedy}, add: {{{column}: {{op: logprobs, model: {node.model}{renamed(outs)}}}}}"


def rising_rates(view: RunView) -> Iterator[Problem]:
    """Yield optimizers whose learning rate is still rising when the run, or its schedule, ends."""
    for name, model in view.plan.models.items():
        section = view.tree.find(("models", name, "optimizer"))
        steps = view.train.optimizer_steps(name)
        if not model.optimizer or not section or not steps:
            continue
        end = steps
        if model.optimizer.total_steps:
            end = min(steps, model.optimizer.total_steps)
        warmup = model.optimizer.warmup_steps
        if not isinstance(warmup, int) or warmup < end:
            continue
        subject = "run makes"
        if end < steps and section.get("total_steps"):
            subject = "schedule has"
        path = f"models.{name}.optimizer"
        law = f"`{path}.warmup_steps`: the learning rate rises over {warmup:,} optimizer steps, and the "
        law += f"{subject} {end:,}: it never comes to `lr`"
        mark = (section.get("warmup_steps") or section).key
        yield warning("rising", law, mark, f"set: {{{path}.warmup_steps: 0.1}}, a tenth of them")
