"""Find what a graph that compiles likely does not mean: each a warning, with its place and an edit that mends
it. ``--strict`` makes errors of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import networkx as nx

from rlgraph.costs.plan_size import planned_size
from rlgraph.engines.registry import GRAMMARS
from rlgraph.errors import GraphError, Mark, Problem
from rlgraph.frontend.shipped import graphs_folder
from rlgraph.frontend.tree_paths import find
from rlgraph.ir.dependencies import reached
from rlgraph.ir.graph import Graph, Node
from rlgraph.ir.plan import ModelPlan, Plan
from rlgraph.ir.trace import read_from, refusal, sampler
from rlgraph.lowering import Lowered, plan_tree
from rlgraph.passes.lower import optimizer_steps
from rlgraph.passes.off_policy_laws import DECOUPLED, clips_around_older, measured, renamed
from rlgraph.passes.refill import aged
from rlgraph.syntax.source import Tree
from rlgraph.warnings.dead_settings import dead_settings, unread_attributes, unread_settings
from rlgraph.warnings.intervals import best_of_one, long_intervals


def find_warnings(written: Tree, lowered: Lowered) -> list[Problem]:
    """Return the warnings of a graph, also given as written, with its ``${...}`` still in place."""
    tree, train, evaluation, plan = lowered.tree, lowered.train, lowered.evaluation, lowered.plan
    problems = [*_dropped(train, evaluation, plan, tree), *_untrained(train, plan, tree), *_blind(train)]
    problems += [*_changed(train, tree), *_clipped(aged(train)), *_rising(train, plan, tree)]
    problems += [*_idle_kl(train, tree), *long_intervals(plan, tree), *best_of_one(plan, tree)]
    for graph in (train, evaluation) if evaluation else (train,):
        problems += [*_greedy(graph, tree), *_endless(graph, tree), *_too_long(graph, plan, tree)]
        problems += [*_no_room(graph, tree)]
    lost = {("nodes", node.name) for node in train.dropped}
    lost |= {("models", name) for name in _models_of(train.dropped) if name not in plan.models}
    problems += [*unread_attributes(tree, train, evaluation), *unread_settings(tree, plan)]
    problems += dead_settings(
        written, plan, lost, lambda changed: plan_tree(changed, lowered.devices, lowered.device)
    )
    return [replace(problem, grade="warning") for problem in dict.fromkeys(problems)]


def _dropped(graph: Graph, evaluation: Graph | None, plan: Plan, tree: Tree) -> Iterator[Problem]:
    """Yield the last node of each chain that leads to no update and to nothing that is reported."""
    used = {node.name for node in evaluation.nodes} if evaluation else set()
    nodes = {node.name: node for node in graph.dropped}
    writers = {column: node.name for node in nodes.values() for column in node.writes}
    needs: nx.DiGraph[str] = nx.DiGraph()
    needs.add_nodes_from(nodes)
    needs.add_edges_from((n.name, writers[c]) for n in nodes.values() for c in n.reads if c in writers)
    last = (node for node in nodes.values() if not needs.pred[node.name] and node.call)
    for node in (node for node in last if node.name not in used):
        chain = [node, *(nodes[name] for name in sorted(nx.descendants(needs, node.name) - used))]
        chain = [one for one in chain if one.call]
        models = [f"models.{name}" for name in _models_of(chain) if name not in plan.models]
        more = f", and so are {', '.join(f'`{one.name}`' for one in chain[1:])}" if chain[1:] else ""
        law = f"node `{node.name}` ({node.op.name}) leads to no update: it is left out{more}"
        remedy = f"remove: [{', '.join([*(one.name for one in chain), *models])}]"
        takers = [*_takers(graph, node)]
        if taker := next((taker for taker, port in takers if port == "rewards"), None):
            remedy += f", or let a node read it: set: {{{taker.name}.in.rewards: {node.writes[0]}}}"
        ports = [_place(tree, graph, n, n.op.declared.when.get(port, "in")) for n, port in takers]
        edits = [n.edited for n in (*chain, *(taker for taker, _ in takers))]
        mark = _users([*edits[: len(chain)], *ports, *edits], node.mark)
        yield Problem("dropped", law, mark, (), remedy)


def _takers(graph: Graph, node: Node) -> Iterator[tuple[Node, str]]:
    """Yield the nodes that could read what a dropped one writes, by the port's name or by its type."""
    kinds = {port.type for port in node.op.outputs}
    for taker in (other for other in graph.nodes if other.call):
        for port in (port for call in (taker.called, *taker.hooks.values()) for port in call.op.inputs):
            if port.name in node.writes or (port.name == "rewards" and port.type in kinds):
                yield taker, port.name


def _models_of(nodes: Iterable[Node]) -> list[str]:
    return [*dict.fromkeys(model for n in nodes for model in (n.model, n.of, n.tokenizer) if model)]


def _untrained(graph: Graph, plan: Plan, tree: Tree) -> Iterator[Problem]:
    """Yield models that are to be trained and are not, and value heads that nothing has trained."""
    bases = {m.path: m.name for m in reversed([*graph.models.values()]) if m.spec.head == "lm"}
    updated = {node.model for node in graph.nodes if node.updates}
    for name, model in graph.models.items():
        spec, path, remedy = model.spec, f"models.{name}", ""
        readers = [node.name for node in graph.nodes if node.model == name and node.call]
        if name in updated or name not in plan.models:
            continue
        if spec.head == "value" and readers and not (spec.frozen and model.path not in bases):
            law = f"what `{readers[0]}` writes is of random weights: no node updates model `{name}`, and its "
            law += "value head is new"
            remedy = f"add: {{update_{name}: {{op: update.critic, model: {name}}}}}"
            if spec.frozen:
                law += f", for its files are those of `{bases[model.path]}`, which has none"
                train = f"set: {{{path}.frozen: false, {path}.optimizer: {{lr: 1e-5}}}}"
                remedy = f"give {path}.path a model with a value head, or {train}, {remedy}"
        elif not spec.frozen:
            law = f"model `{name}` has an optimizer, and no node updates it"
            remedy = f"set: {{{path}.frozen: true}}, and remove: [{path}.optimizer]; "
            remedy += f"or add: {{update_{name}: {{op: ..., model: {name}}}}}"
        if remedy:
            marks = [place.key for _, place in tree.at(("models", name)).walk()]
            marks += [mark for gone, mark in graph.removed.items() if name in gone]
            yield Problem("untrained", law, _users(marks, model.mark), (), remedy)


def _blind(graph: Graph) -> Iterator[Problem]:
    """Yield nodes whose column is read as the rewards of samples, and depends on nothing that is sampled."""
    for reader in graph.nodes:
        node, rollout = read_from(graph, reader, "rewards"), sampler(graph, reader.domain)
        if node is None or rollout is None:
            continue
        if rollout.name in reached(graph.needs, [node.name], waits=lambda *_: False):
            continue
        law = f"node `{node.name}` ({node.op.name}) reads nothing of what `{rollout.name}` samples: it is "
        law += "the same for all samples of a prompt"
        outs = rollout.called.outs
        ports = [port.name for port in node.op.inputs if port.name in outs]
        remedy = "let it read a column of the samples, as by a parameter `responses: text[samples]`"
        if ports:
            remedy = f"set: {{{node.name}.in.{ports[0]}: {outs[ports[0]]}}}"
        yield refusal("blind", law, graph, node, [], remedy)


def _greedy(graph: Graph, tree: Tree) -> Iterator[Problem]:
    """Yield rollouts without chance whose samples of a prompt are compared."""
    for node in (node for node in graph.nodes if node.call):
        rollout = sampler(graph, node.domain)
        if rollout is None or not (node.op.declared.rows == "group" or "groups" in node.op.declared.assumes):
            continue
        call, times = rollout.called, rollout.called.attributes.get(rollout.op.declared.times or "", 1)
        if call.value("temperature") == 0 and isinstance(times, int) and times > 1:
            law = f"node `{node.name}` ({node.op.name}) compares the {times} samples of a prompt; "
            law += f"`{rollout.name}` takes the most likely token, so they are all the same"
            name, at = call.name_of("temperature"), "eval.nodes." * bool(graph.report)
            remedy = f"set: {{{at}{rollout.name}.{name}: 1.0}}"
            found = refusal("greedy", law, graph, node, [rollout.name], remedy)
            yield replace(found, mark=_place(tree, graph, rollout, name))


# attributes of sampling that change the distribution which a model's weights have
CHANGES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_new_tokens", *GRAMMARS)
# those whose change rollout_logprobs don't show, so that no correction can weigh by it
CUTS = ("top_p", "top_k", "min_p")


def _changed(graph: Graph, tree: Tree) -> Iterator[Problem]:
    """Yield updates that take rows for draws from a model's own distribution, which sampling has changed."""
    for node in graph.nodes:
        rollout = sampler(graph, node.domain) if node.trains else None
        laws = {law for call in (node.call, *node.hooks.values()) if call for law in call.op.declared.assumes}
        if rollout is None or not laws & {"sampling_logprobs", "on_policy"}:
            continue
        yield from _cut(graph, tree, node, rollout)
        if read_from(graph, node, "rollout_weights") or read_from(graph, node, "old_logprobs") is rollout:
            continue
        own = {key: field.default for key, field in rollout.op.attributes.model_fields.items()}
        given = rollout.called.attributes
        changed = [key for key in CHANGES if key in own and given.get(key) != own[key]]
        if changed:
            law = f"node `{node.name}` trains on samples of `{rollout.name}` as if its model alone had drawn "
            law += (
                f"them; {' and '.join(changed)} {'change' if len(changed) > 1 else 'changes'} what is drawn"
            )
            remedy = "add: {rollout_weights: {op: correction.tis}}, which weighs each token by how likely it "
            remedy += "was; or keep it to evaluations, in eval.nodes"
            found = refusal("changed-sampling", law, graph, node, [rollout.name], remedy)
            yield replace(found, mark=_place(tree, graph, rollout, changed[0]))


def _cut(graph: Graph, tree: Tree, node: Node, rollout: Node) -> Iterator[Problem]:
    """Yield an update on rows of which unlikely tokens were cut off."""
    own = {key: field.default for key, field in rollout.op.attributes.model_fields.items()}
    cuts = [key for key in CUTS if key in own and rollout.called.attributes.get(key) != own[key]]
    if not cuts:
        return
    law = f"node `{node.name}` trains on samples of `{rollout.name}` as if its model alone had drawn them; "
    law += f"{' and '.join(cuts)} {'leave' if len(cuts) > 1 else 'leaves'} unlikely tokens out, and "
    law += "rollout_logprobs are those before the cut, so no correction weighs by it"
    whole = ", ".join(f"{rollout.name}.{key}: {own[key]}" for key in cuts)
    remedy = f"set: {{{whole}}}; or keep it to evaluations, in eval.nodes"
    found = refusal("cut-sampling", law, graph, node, [rollout.name], remedy)
    yield replace(found, mark=_place(tree, graph, rollout, cuts[0]))


def _idle_kl(graph: Graph, tree: Tree) -> Iterator[Problem]:
    """Yield updates whose KL term holds nothing: k1 has no gradient in the mean over a policy's own samples.

    The gradient of log p - log q over samples of p is that of log p, whose mean is 0. That of k2 is the
    gradient of KL(p, q), that of k3 the gradient of KL(q, p).
    """
    for node in (node for node in graph.nodes if node.trains and node.call):
        given = node.called.attributes
        if given.get("kl") != "k1" or not given.get("kl_coef") or given.get("kl_unbiased"):
            continue
        law = f"the KL term of node `{node.name}` holds nothing: the gradient of k1 has a mean of 0 over the "
        law += "policy's own samples"
        remedy = f"set: {{{node.name}.kl: k2}}, or k3; or take the KL off the rewards, by reward.kl_penalty"
        found = refusal("idle-kl", law, graph, node, [], remedy)
        yield replace(found, mark=_place(tree, graph, node, "kl"))


def _clipped(graph: Graph) -> Iterator[Problem]:
    """Yield updates whose ratio is clipped around weights that are two or more updates older."""
    for node in (node for node in graph.nodes if node.trains):
        rollout, old = sampler(graph, node.domain), read_from(graph, node, "old_logprobs")
        if rollout is None or old is not rollout or not clips_around_older(node, rollout, by=2):
            continue
        law = f"the loss ppo_clip of node `{node.name}` clips around `{rollout.weights}`: tokens whose ratio "
        law += "the updates since have taken out of the clip are not learned from"
        yield refusal("stale-clip", law, graph, node, [rollout.name], _decoupled(graph, node, rollout))


def _decoupled(graph: Graph, node: Node, rollout: Node) -> str:
    """Return the edits that clip an update around the weights that it starts from."""
    writers = [other for other in (*graph.nodes, *graph.dropped) if "old_logprobs" in other.writes]
    there = bool(writers) and all(sampler(graph, writer.domain) is rollout for writer in writers)
    old = f"{node.name}_logprobs" if writers and not there else "old_logprobs"
    ins, drew = [f"{node.name}.in.old_logprobs: {old}"], measured(rollout)
    ins += [f"{node.name}.in.rollout_logprobs: {drew}"] if drew != "rollout_logprobs" else []
    remedy = f"set: {{{', '.join([*ins, DECOUPLED.format(node.name)])}}}"
    if there:
        return remedy
    outs = {port: rollout.called.outs[port].partition("/")[0] for port in ("tokens", "loss_mask")}
    return f"{remedy}, add: {{{old}: {{op: logprobs, model: {node.model}{renamed(outs)}}}}}"


def _endless(graph: Graph, tree: Tree) -> Iterator[Problem]:
    """Yield rollouts that allow an end token only behind the last token that a response may have."""
    for node in (node for node in graph.nodes if node.call and "min_new_tokens" in node.called.attributes):
        given = node.called.attributes
        limits = {key: given.get(key) for key in (node.called.name_of("response_limit"), "max_turn_tokens")}
        for key, most in limits.items():
            if isinstance(most, int) and given["min_new_tokens"] >= most:
                law = f"`{node.name}.min_new_tokens` ({given['min_new_tokens']:,}) leaves no room for an end "
                law += f"token within `{key}` ({most:,}): no response ends by itself"
                own = [find(tree, ("eval", "nodes", node.name, one)) for one in ("min_new_tokens", key)]
                at = "eval.nodes." if graph.report and any(own) else ""
                remedy = f"set: {{{at}{node.name}.min_new_tokens: 0}}, or raise {key}"
                yield Problem("endless", law, _place(tree, graph, node, "min_new_tokens"), (), remedy)
                break


def _rising(graph: Graph, plan: Plan, tree: Tree) -> Iterator[Problem]:
    """Yield optimizers whose learning rate is still rising when the run, or its schedule, ends."""
    for name, model in plan.models.items():
        place, steps = find(tree, ("models", name, "optimizer")), optimizer_steps(graph, name)
        if not model.optimizer or not place or not steps:
            continue
        warm, own = model.optimizer.warmup_steps, place.get("total_steps")
        end = min(steps, model.optimizer.total_steps or steps)
        if isinstance(warm, int) and warm >= end:
            path, what = f"models.{name}.optimizer", "schedule has" if own and end < steps else "run makes"
            law = f"`{path}.warmup_steps`: the learning rate rises over {warm:,} optimizer steps, and the "
            law += f"{what} {end:,}: it never comes to `lr`"
            mark = (place.get("warmup_steps") or place).key
            yield Problem("rising", law, mark, (), f"set: {{{path}.warmup_steps: 0.1}}, a tenth of them")


def _too_long(graph: Graph, plan: Plan, tree: Tree) -> Iterator[Problem]:
    """Yield rollouts that may write more tokens than fit into a model that reads them."""
    least: dict[str, tuple[int, str]] = {}  # rollout -> the shortest context, and whose it is
    contexts = {name: _context(model) for name, model in plan.models.items()}
    for node in graph.nodes:
        rollout, model = sampler(graph, node.domain), node.model or ""
        if rollout and (context := contexts.get(model)):
            least[rollout.name] = min(least.get(rollout.name, (context, model)), (context, model))
    for name, (context, model) in least.items():
        rollout, at = graph.node(name), "eval.nodes." * bool(graph.report)
        source = graph.node(graph.ancestors(rollout.domain)[-1].maker)
        most, longest = rollout.called.value("response_limit"), source.called.value("prompt_limit") or 0
        bound = rollout.called.value("total_limit")
        if not (isinstance(most, int) and isinstance(longest, int)) or most + longest <= context:
            continue
        if isinstance(bound, int) and bound <= context:
            continue
        response, prompt = rollout.called.name_of("response_limit"), source.called.name_of("prompt_limit")
        limits = {f"{rollout.name}.{response}": most}
        limits |= {f"{source.name}.{prompt}": longest} if longest else {}
        fit = min(most, max(context - longest, context // 2))
        edits = zip(limits.items(), (fit, min(longest, context - fit)), strict=False)
        edit = ", ".join(f"{at}{limit}: {new}" for (limit, old), new in edits if new != old)
        law = " and ".join(f"`{limit}` ({tokens:,})" for limit, tokens in limits.items())
        law += f" are more tokens than the context of `{model}` has, {context:,}"
        places = [_place(tree, graph, rollout, response), _place(tree, graph, source, prompt)]
        mark = _users(places, places[0])
        yield Problem("context", law, mark, (), f"set: {{{edit}}}")


def _no_room(graph: Graph, tree: Tree) -> Iterator[Problem]:
    """Yield sources whose longest prompts fill all that prompt and response of a rollout have together."""
    for rollout in (node for node in graph.nodes if node.call):
        bound = rollout.called.value("total_limit")
        if not isinstance(bound, int):
            continue
        source = graph.node(graph.ancestors(rollout.domain)[-1].maker)
        longest = source.called.value("prompt_limit")
        if not isinstance(longest, int) or longest < bound:
            continue
        total, prompt = rollout.called.name_of("total_limit"), source.called.name_of("prompt_limit")
        law = f"`{source.name}.{prompt}` ({longest:,}) keeps prompts that leave no room for a response in "
        law += f"`{rollout.name}.{total}` ({bound:,})"
        most = rollout.called.value("response_limit")
        fit = max(bound - most, bound // 2) if isinstance(most, int) else bound // 2
        places = [_place(tree, graph, source, prompt), _place(tree, graph, rollout, total)]
        edit = f"{'eval.nodes.' if graph.report else ''}{source.name}.{prompt}: {fit}"
        yield Problem("no-room", law, _users(places, places[0]), (), f"set: {{{edit}}}")


def _context(model: ModelPlan) -> int | None:
    """Return the tokens that fit into a row of a model; None where its configuration is not known."""
    try:
        return planned_size(model).config.max_position_embeddings
    except GraphError:
        return None


def _place(tree: Tree, graph: Graph, node: Node, key: str) -> Mark | None:
    """Return where a key of a node is written, for an evaluation or for both; else where the node is."""
    sections = (("eval", "nodes"), ("nodes",)) if graph.report else (("nodes",),)
    paths = [(*section, node.name, key) for section in sections]
    return next((place.key for path in paths if (place := find(tree, path))), node.mark)


def _users(marks: Iterable[Mark | None], default: Mark | None) -> Mark | None:
    """Return the first place that is not in a shipped graph."""
    shipped = graphs_folder()
    return next((m for m in marks if m and Path(m.source.name).parent != shipped), default)
