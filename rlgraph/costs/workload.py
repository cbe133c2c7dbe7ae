"""The work of an iteration: rows and tokens, from a plan's attributes and a few stated assumptions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlgraph.errors import fail
from rlgraph.ir.domains import GraphDomain, ancestors
from rlgraph.ir.function import Function
from rlgraph.ir.plan import Plan, Step
from rlgraph.lengths import Lengths
from rlgraph.ops.declare import Role

BATCH, PROMPT, RESPONSE = 128, 256, 1024  # defaults: prompts, prompt tokens, new tokens


@dataclass(frozen=True)
class Workload:
    """The work of one training iteration: rows of each domain, and tokens of a row."""

    rows: Mapping[str, float]
    prompt: float
    longest_prompt: float
    responses: Lengths
    assumed: tuple[str, ...]
    imbalance: float = 1.0  # tokens of the busiest of the devices that divide experts, over their mean
    # domain -> the share that its filter keeps, below 1
    kept: Mapping[str, float] = field(default_factory=dict)
    turns: float | None = None  # of a conversation; None: half of what its rollout allows
    tool_seconds: float = 0.0  # in which each turn but the last is answered
    bound: float = math.inf  # the most tokens of a prompt and its response together

    @property
    def mean(self) -> float:
        """Return the mean tokens of a sample, prompt and response."""
        return self.prompt + self.responses.mean

    @property
    def square(self) -> float:
        """Return the mean of a sample's squared length."""
        return self.prompt**2 + 2 * self.prompt * self.responses.mean + self.responses.square

    def longest(self, rows: float) -> float:
        """Return the tokens of the longest of ``rows`` samples."""
        return max(min(self.prompt + self.responses.of_longest(rows), self.bound), self.mean)

    def limited(self, rollout: Function) -> Lengths:
        """Return the response lengths of one rollout, which may allow fewer tokens than another."""
        limit = _number(rollout, "response_limit", self.responses.longest)
        return replace(self.responses, mean=min(self.responses.mean, limit), longest=limit)

    def turns_of(self, rollout: Function) -> float:
        """Return the mean turns of a rollout's samples: 1 unless they are conversations."""
        most = _number(rollout, "turns", 1)
        return max(min(self.turns or most / 2, most), 1.0)

    def uneven(self, devices: int) -> float:
        """Return how many times its even share the busiest of the devices that divide experts has."""
        return self.imbalance if devices > 1 else 1.0

    @property
    def most(self) -> float:
        """Return the most tokens that a sample may have."""
        return min(self.longest_prompt + self.responses.longest, self.bound)


def workload(
    plan: Plan,
    prompt_tokens: float | None = None,
    response_tokens: float | Mapping[str, float] | None = None,
    expert_imbalance: float | None = None,
    kept_rows: Mapping[str, float] | None = None,
    turns: float | None = None,
    tool_seconds: float | None = None,
) -> Workload:
    """Return the work of one training iteration of a plan.

    Args:
        plan: attributes of its sources say how many rows they give, and the longest prompt; those of its
            rollouts the longest response (``rlgraph.ops.declare.Role``).
        prompt_tokens: mean tokens of a prompt; half of the longest, or 256, unless given.
        response_tokens: mean tokens of a response, or what is known of their distribution (``Lengths.of``);
            half of the longest unless given.
        expert_imbalance: see ``Workload.imbalance``; 1, experts are chosen equally often, unless given. Of
            single experts it is 1 + MaxVio (arXiv 2408.15664); a device has several.
        kept_rows: filter, or route -> the share of its rows that it keeps; ``""``: that of all others. Each
            keeps all unless given. One with ``refill`` says it itself.
        turns: mean turns of a conversation; half of the most unless given.
        tool_seconds: seconds in which a turn is answered; 0 unless given.

    Raises:
        GraphError: ``kept_rows`` names no filter, or ``response_tokens`` are no distribution.
    """
    functions = plan.functions["train"]
    rollouts = [f for f in functions.values() if "serve" in f.handles.values()]
    limit = max((_number(f, "response_limit", RESPONSE) for f in rollouts), default=RESPONSE)
    bound = max((_number(f, "total_limit", math.inf) for f in rollouts), default=math.inf)
    longest = max((_number(f, "prompt_limit", 0) for f in functions.values()), default=0)
    prompt = prompt_tokens or (longest / 2 if longest else PROMPT)
    limit = min(limit, max(bound - 1, 1))
    lengths = Lengths.of(response_tokens or limit / 2, limit)
    kept = _kept(plan, kept_rows or {})
    rows = _rows(plan, kept)
    parts = [name for name in rows if plan.domains["train"][name].filtered]
    whole = [f"{count:,.0f} {name}" for name, count in rows.items() if name not in parts]
    prompts = _origin(prompt_tokens, "--prompt-tokens", longest, _named(functions, "prompt_limit"))
    responses = _origin(response_tokens, "--response-tokens", limit, _named(functions, "response_limit"))
    assumed = [
        f"prompts of {prompt:,.0f} tokens {prompts}",
        f"responses of {lengths.mean:,.0f} tokens {responses}, {lengths}",
        f"rows: {', '.join(whole)}",
    ]
    if parts:
        assumed.append(_kept_text(plan, parts, kept))
    for name, region in plan.regions.items():
        if region.expected < 1:
            assumed[-1] += f", but {name} {region.expected:.0%} (refill.expected), and one round is enough"
    imbalance = expert_imbalance or 1.0
    if any(model.train and model.train.expert_parallel > 1 for model in plan.models.values()):
        share = f"{imbalance:g} x the mean of those" if imbalance > 1 else "as many tokens as the others"
        assumed.append(f"the busiest device that divides experts has {share} (--expert-imbalance)")
    most = max(longest, 2 * prompt)
    work = Workload(rows, prompt, most, lengths, (), imbalance, kept, turns, tool_seconds or 0.0, bound)
    for node, function in functions.items():
        if "turns" in function.roles:
            half = "" if turns else f"half of {function.roles['turns']}; "
            took = f"tools take {work.tool_seconds:g} s per turn" if tool_seconds else "tools take no time"
            count = f"{work.turns_of(function):g} turns ({half}--turns)"
            assumed.append(f"`{node}` has {count}, {took} (--tool-seconds)")
    return replace(work, assumed=tuple(assumed))


def _kept(plan: Plan, shares: Mapping[str, float]) -> dict[str, float]:
    """Return domain -> the share that its filter keeps, where that is below 1 and no ``refill`` says it."""
    filtered = (domain for domain in plan.domains["train"].values() if domain.filtered)
    own = {domain.name: domain.maker for domain in filtered if domain.maker not in plan.regions}
    for name in shares:
        if name not in own.values() and (name or not own):
            law = f"`{name}` is no filter" if name else "there is no filter"
            remedy = "one with `refill` says it itself, as refill.expected" if plan.regions else ""
            law += " whose kept rows are assumed (--kept-rows)"
            raise fail("no-filter", law, None, sorted(set(own.values())), remedy)
    said = {name: shares.get(maker, shares.get("", 1.0)) for name, maker in own.items()}
    return {name: share for name, share in said.items() if share < 1}


def _kept_text(plan: Plan, parts: Sequence[str], kept: Mapping[str, float]) -> str:
    """Return what the filters that make these domains are taken to keep."""
    makers = {name: plan.domains["train"][name].maker for name in parts}
    shares = [f"`{makers[name]}` keeps {share:.3g} of its rows" for name, share in kept.items()]
    rest = ["other filters every row" if kept else "filters keep every row"] * (len(parts) > len(kept))
    may = " (--kept-rows)" if {*makers.values()} - {*plan.regions} else ""
    return ", ".join([*shares, *rest]) + may


def _named(functions: Mapping[str, Function], role: Role) -> str:
    """Return the attribute that has a role, as the first op calls it that has one."""
    return next((f.roles[role] for f in functions.values() if role in f.roles), "max_new_tokens")


def _origin(given: object, option: str, limit: float, attribute: str) -> str:
    if given:
        return f"({option})"
    return f"(half of {attribute}; {option})" if limit else f"(assumed; {option})"


def _number(function: Function, role: Role, default: float) -> float:
    value = function.value(role)
    return float(value) if isinstance(value, int | float) and value else default


def _rows(plan: Plan, kept: Mapping[str, float]) -> dict[str, float]:
    """Return domain -> rows. A source without ``batch`` is taken to give 128; a filter keeps what is said.

    One with ``refill`` has the rows that it says, of as many more as are expected to go.
    """
    columns, functions, domains = plan.columns["train"], plan.functions["train"], plan.domains["train"]
    rows: dict[str, float] = {}
    for end in (step for step in plan.steps if step.facts.collects):
        region = plan.regions[end.region]
        rows[columns[end.writes[0]].domain] = region.rows
        (source,) = (step for step in plan.steps if step.node == region.source)
        rows[columns[source.writes[0]].domain] = region.rows / region.times / region.expected

    def count(name: str) -> float:
        if name not in rows:
            own = domains[name]
            of_each = own.expected or own.times
            if own.parts:
                rows[name] = sum(map(count, own.parts))
            elif own.parent:
                rows[name] = count(own.parent) * of_each * kept.get(name, 1.0)
            else:
                most = _number(functions[own.maker], "capacity", BATCH)  # of what holds rows
                rows[name] = _number(functions[own.maker], "rows", most) * of_each
        return rows[name]

    written = [column.domain for column in columns.values() if column.writer in functions]
    for name in dict.fromkeys((*written, *(column.domain for column in columns.values()))):
        count(name)
    return rows


def growth(plan: Plan, step: Step, work: Workload) -> float:
    """Return how many times the expected rows a step may read at most: above 1 where their number varies."""
    read = (ancestors(plan.domains[step.phase], plan.columns[step.phase][name].domain) for name in step.reads)

    def times(domain: GraphDomain) -> float:
        return (domain.most / domain.expected if domain.most else 1.0) / work.kept.get(domain.name, 1.0)

    return max((math.prod(map(times, line)) for line in read), default=1.0)


def bytes_beside(plan: Plan, step: Step) -> int:
    """Return the bytes per token of the columns with fixed axes that a step reads, such as ``routing``."""
    read = (plan.columns[step.phase][name] for name in step.reads)
    cells = (c.type.cell_bytes(c.sizes, c.stored) for c in read if c.type.fixed and c.type.axis)
    return sum(filter(None, cells))


def row_work(tokens: Any, squares: Any, share: float) -> Any:
    """Return the work of rows, or of an array of rows, in tokens of a row so short that attention is nothing.

    A row of n tokens takes ``n (1 + share n / 2)``: token i sees i columns. See ``Size.attention_share``.

    Example:
        >>> row_work(1000, 1000**2, share=0.001)
        1500.0
    """
    return tokens + share * squares / 2
