"""Warnings about rollouts: samples that are all alike, drawn by another distribution, or cut off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from rlgraph.costs.plan_size import known_sizes
from rlgraph.engines.registry import GRAMMARS
from rlgraph.errors import Problem, warning
from rlgraph.ir.graph import Node
from rlgraph.ir.trace import read_from, refusal, sampler
from rlgraph.laws.places import place_of_user, section_of_nodes, setting_place
from rlgraph.laws.rows import compares_groups
from rlgraph.laws.views import PhaseView, RunView

# attributes of sampling that change the distribution which a model's weights have
CHANGES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_new_tokens", *GRAMMARS)
# those whose change rollout_logprobs don't show, so that no correction can weigh by it
CUTS = ("top_p", "top_k", "min_p")


def _greedy(view: PhaseView) -> Iterator[Problem]:
    """Yield rollouts without chance whose samples of a prompt are compared."""
    graph = view.graph
    for node in graph.nodes:
        if not node.call or not compares_groups(node):
            continue
        rollout = sampler(graph, node.domain)
        if rollout is None or rollout.called.value("temperature") != 0:
            continue
        samples = rollout.called.attributes.get(rollout.op.declared.times or "", 1)
        if not isinstance(samples, int) or samples < 2:
            continue
        law = f"node `{node.name}` ({node.op.name}) compares the {samples} samples of a prompt; "
        law += f"`{rollout.name}` takes the most likely token, so they are all the same"
        key = rollout.called.name_of("temperature")
        remedy = f"set: {{{section_of_nodes(graph)}{rollout.name}.{key}: 1.0}}"
        problem = refusal("greedy", law, graph, node, [rollout.name], remedy, "warning")
        yield replace(problem, mark=setting_place(view.tree, graph, rollout, key))


def changed_sampling(view: RunView) -> Iterator[Problem]:
    """Yield updates that take rows for draws from a model's own distribution, which sampling has changed."""
    graph = view.train
    for node in graph.nodes:
        if not node.trains or not _assumes_own_draws(node):
            continue
        rollout = sampler(graph, node.domain)
        if rollout is None:
            continue
        yield from _cut(view, node, rollout)
        is_measured = read_from(graph, node, "old_logprobs") is rollout
        if is_measured or read_from(graph, node, "rollout_weights"):
            continue
        changed = _changed_attributes(rollout, CHANGES)
        if changed:
            yield _changed(view, node, rollout, changed)


def _changed(view: RunView, node: Node, rollout: Node, changed: list[str]) -> Problem:
    """Return the problem of an update on rows that were not drawn as its model alone would draw them."""
    law = f"node `{node.name}` trains on samples of `{rollout.name}` as if its model alone had drawn "
    verb = "change" if len(changed) > 1 else "changes"
    law += f"them; {' and '.join(changed)} {verb} what is drawn"
    remedy = "add: {rollout_weights: {op: correction.tis}}, which weighs each token by how likely it "
    remedy += "was; or keep it to evaluations, in eval.nodes"
    problem = refusal("changed-sampling", law, view.train, node, [rollout.name], remedy, "warning")
    return replace(problem, mark=setting_place(view.tree, view.train, rollout, changed[0]))


def _assumes_own_draws(node: Node) -> bool:
    """Return whether a node's op or one of its hooks assumes that its model alone drew its rows."""
    assumptions = set(node.called.op.declared.assumes)
    for hook in node.hooks.values():
        assumptions.update(hook.op.declared.assumes)
    return not assumptions.isdisjoint(("sampling_logprobs", "on_policy"))


def _changed_attributes(rollout: Node, keys: tuple[str, ...]) -> list[str]:
    """Return those of some attributes of a rollout that have another value than by default."""
    fields = rollout.op.attributes.model_fields
    attributes = rollout.called.attributes
    changed = []
    for key in keys:
        if key in fields and attributes.get(key) != fields[key].default:
            changed.append(key)
    return changed


def _cut(view: RunView, node: Node, rollout: Node) -> Iterator[Problem]:
    """Yield an update on rows of which unlikely tokens were cut off."""
    cuts = _changed_attributes(rollout, CUTS)
    if not cuts:
        return
    law = f"node `{node.name}` trains on samples of `{rollout.name}` as if its model alone had drawn them; "
    verb = "leave" if len(cuts) > 1 else "leaves"
    law += f"{' and '.join(cuts)} {verb} unlikely tokens out, and "
    law += "rollout_logprobs are those before the cut, so no correction weighs by it"
    fields = rollout.op.attributes.model_fields
    settings = ", ".join(f"{rollout.name}.{key}: {fields[key].default}" for key in cuts)
    remedy = f"set: {{{settings}}}; or keep it to evaluations, in eval.nodes"
    problem = refusal("cut-sampling", law, view.train, node, [rollout.name], remedy, "warning")
    yield replace(problem, mark=setting_place(view.tree, view.train, rollout, cuts[0]))


def _endless(view: PhaseView) -> Iterator[Problem]:
    """Yield rollouts that allow an end token only behind the last token that a response may have."""
    for node in view.graph.nodes:
        if node.call is None:
            continue
        attributes = node.call.attributes
        least = attributes.get("min_new_tokens")
        if least is None:
            continue
        for key in (node.call.name_of("response_limit"), "max_turn_tokens"):
            most = attributes.get(key)
            if isinstance(most, int) and least >= most:
                yield _endless_rollout(view, node, key, most)
                break


def _endless_rollout(view: PhaseView, node: Node, key: str, most: int) -> Problem:
    least = node.called.attributes["min_new_tokens"]
    law = f"`{node.name}.min_new_tokens` ({least:,}) leaves no room for an end "
    law += f"token within `{key}` ({most:,}): no response ends by itself"
    changes = [view.tree.find(("eval", "nodes", node.name, name)) for name in ("min_new_tokens", key)]
    section = section_of_nodes(view.graph) if any(changes) else ""
    remedy = f"set: {{{section}{node.name}.min_new_tokens: 0}}, or raise {key}"
    return warning("endless", law, setting_place(view.tree, view.graph, node, "min_new_tokens"), remedy)


def _too_long(view: PhaseView) -> Iterator[Problem]:
    """Yield rollouts that may write more tokens than fit into a model that reads them."""
    graph = view.graph
    for name, (context, model) in _shortest_contexts(view).items():
        rollout = graph.node(name)
        source = graph.node(graph.ancestors(rollout.domain)[-1].maker)
        response = rollout.called.value("response_limit")
        prompt = source.called.value("prompt_limit") or 0
        if not isinstance(response, int) or not isinstance(prompt, int):
            continue
        most = response + prompt
        total = rollout.called.value("total_limit")
        if isinstance(total, int):
            most = min(most, total)
        if most > context:
            yield _too_long_for(view, rollout, source, context, model)


def _shortest_contexts(view: PhaseView) -> dict[str, tuple[int, str]]:
    """Return the tokens that fit into a row of each model that reads a rollout: the fewest, and whose.

    Models whose configuration is not known are left out.
    """
    sizes = known_sizes(view.plan)
    shortest: dict[str, tuple[int, str]] = {}
    for node in view.graph.nodes:
        rollout = sampler(view.graph, node.domain)
        model = node.model or ""
        size = sizes.get(model)
        if rollout and size and size.config.max_position_embeddings:
            context = (size.config.max_position_embeddings, model)
            shortest[rollout.name] = min(shortest.get(rollout.name, context), context)
    return shortest


def _too_long_for(view: PhaseView, rollout: Node, source: Node, context: int, model: str) -> Problem:
    response_key = rollout.called.name_of("response_limit")
    prompt_key = source.called.name_of("prompt_limit")
    response: int = rollout.called.value("response_limit")
    prompt: int = source.called.value("prompt_limit") or 0
    limits = {f"{rollout.name}.{response_key}": response}
    fitting = {f"{rollout.name}.{response_key}": min(response, max(context - prompt, context // 2))}
    if prompt:
        prompt_path = f"{source.name}.{prompt_key}"
        limits[prompt_path] = prompt
        fitting[prompt_path] = min(prompt, context - fitting[f"{rollout.name}.{response_key}"])
    law = " and ".join(f"`{path}` ({tokens:,})" for path, tokens in limits.items())
    law += f" are more tokens than the context of `{model}` has, {context:,}"
    section = section_of_nodes(view.graph)
    changes = [f"{section}{path}: {new}" for path, new in fitting.items() if new != limits[path]]
    places = [
        setting_place(view.tree, view.graph, rollout, response_key),
        setting_place(view.tree, view.graph, source, prompt_key),
    ]
    return warning("context", law, place_of_user(places, places[0]), f"set: {{{', '.join(changes)}}}")


def _no_room(view: PhaseView) -> Iterator[Problem]:
    """Yield sources whose longest prompts fill all that prompt and response of a rollout have together."""
    graph = view.graph
    for rollout in graph.nodes:
        if rollout.call is None:
            continue
        total = rollout.call.value("total_limit")
        if not isinstance(total, int):
            continue
        source = graph.node(graph.ancestors(rollout.domain)[-1].maker)
        prompt = source.called.value("prompt_limit")
        if isinstance(prompt, int) and prompt >= total:
            yield _prompts_fill(view, rollout, source, prompt, total)


def _prompts_fill(view: PhaseView, rollout: Node, source: Node, prompt: int, total: int) -> Problem:
    total_key = rollout.called.name_of("total_limit")
    prompt_key = source.called.name_of("prompt_limit")
    law = f"`{source.name}.{prompt_key}` ({prompt:,}) keeps prompts that leave no room for a response in "
    law += f"`{rollout.name}.{total_key}` ({total:,})"
    response = rollout.called.value("response_limit")
    fitting = total // 2
    if isinstance(response, int):
        fitting = max(fitting, total - response)
    places = [
        setting_place(view.tree, view.graph, source, prompt_key),
        setting_place(view.tree, view.graph, rollout, total_key),
    ]
    remedy = f"set: {{{section_of_nodes(view.graph)}{source.name}.{prompt_key}: {fitting}}}"
    return warning("no-room", law, place_of_user(places, places[0]), remedy)


PHASE_WARNINGS: tuple[Callable[[PhaseView], Iterator[Problem]], ...] = (
    _greedy,
    _endless,
    _too_long,
    _no_room,
)
