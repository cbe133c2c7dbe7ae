"""The work of an iteration: rows and tokens, from a plan's attributes and a few stated assumptions."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlgraph.errors import GraphError, fail
from rlgraph.ir.actions import Collect
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
        longest = self.prompt + self.responses.of_longest(rows)
        return max(min(longest, self.bound), self.mean)

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


@dataclass(frozen=True)
class _ResponseLimits:
    """The most tokens of a response, and of a prompt with its response."""

    response: float
    total: float
    attribute: str  # that limits a response; empty: none does


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
    longest_prompt = 0.0
    for function in functions.values():
        longest_prompt = max(longest_prompt, _number(function, "prompt_limit", 0))
    if prompt_tokens:
        prompt = prompt_tokens
    elif longest_prompt:
        prompt = longest_prompt / 2
    else:
        prompt = PROMPT
    limits = _response_limits(functions, response_tokens)
    responses = Lengths.of(response_tokens or limits.response / 2, limits.response)
    shares = _kept_shares(plan, kept_rows or {})
    work = Workload(
        rows=_rows(plan, shares),
        prompt=prompt,
        longest_prompt=max(longest_prompt, 2 * prompt),
        responses=responses,
        assumed=(),
        imbalance=expert_imbalance or 1.0,
        kept=shares,
        turns=turns,
        tool_seconds=tool_seconds or 0.0,
        bound=limits.total,
    )
    prompt_origin = _origin(
        prompt_tokens, "--prompt-tokens", longest_prompt, _attribute(functions.values(), "prompt_limit")
    )
    response_origin = _response_origin(response_tokens, limits)
    assumed = [
        f"prompts of {prompt:,.0f} tokens {prompt_origin}",
        f"responses of {responses.mean:,.0f} tokens {response_origin}, {responses}",
        *_row_assumptions(plan, work),
        *_expert_assumption(plan, work.imbalance),
        *_turn_assumptions(plan, work),
    ]
    return replace(work, assumed=tuple(assumed))


def _response_limits(
    functions: Mapping[str, Function], response_tokens: float | Mapping[str, float] | None
) -> _ResponseLimits:
    """Return the limits of rollouts; or those of the sources, where responses are recorded ones."""
    rollouts = [function for function in functions.values() if "serve" in function.handles.values()]
    sources = [function for function in functions.values() if "total_limit" in function.roles]
    limited = rollouts or sources
    total = max((_number(function, "total_limit", math.inf) for function in limited), default=math.inf)
    beyond_prompt = max(total - 1, 1)  # a prompt has one token at least
    if rollouts:
        response = max(_number(rollout, "response_limit", RESPONSE) for rollout in rollouts)
        attribute = _attribute(rollouts, "response_limit" if response <= beyond_prompt else "total_limit")
        return _ResponseLimits(min(response, beyond_prompt), total, attribute)
    if total < math.inf:
        return _ResponseLimits(beyond_prompt, total, _attribute(limited, "total_limit"))
    # nothing says how long recorded responses may be: at most twice what is asked for
    lengths = response_tokens.values() if isinstance(response_tokens, Mapping) else [response_tokens or 0]
    return _ResponseLimits(max(RESPONSE, 2 * max(lengths)), total, "")


def _response_origin(response_tokens: float | Mapping[str, float] | None, limits: _ResponseLimits) -> str:
    """Return where the assumed length of responses comes from."""
    if isinstance(response_tokens, int | float) and response_tokens > limits.response:
        return f"({limits.attribute}, which --response-tokens {response_tokens:g} exceeds)"
    half_of = limits.response if limits.attribute else 0
    return _origin(response_tokens, "--response-tokens", half_of, limits.attribute)


def _row_assumptions(plan: Plan, work: Workload) -> list[str]:
    """Return the rows of each domain, and below it the shares that filters keep."""
    filtered, counts = [], []
    for name, count in work.rows.items():
        if plan.domains["train"][name].filtered:
            filtered.append(name)
        else:
            counts.append(f"{count:,.0f} {name}")
    assumptions = [f"rows: {', '.join(counts)}"]
    if filtered:
        assumptions.append(_kept_text(plan, filtered, work.kept))
    for name, region in plan.regions.items():
        if region.expected < 1:
            share = f"{name} {region.expected:.0%} (refill.expected)"
            assumptions[-1] += f", but {share}, and one round is enough"
    return assumptions


def _expert_assumption(plan: Plan, imbalance: float) -> list[str]:
    trained = [model.train for model in plan.models.values() if model.train]
    if all(train.expert_parallel == 1 for train in trained):
        return []
    share = "as many tokens as the others"
    if imbalance > 1:
        share = f"{imbalance:g} x the mean of those"
    return [f"the busiest device that divides experts has {share} (--expert-imbalance)"]


def _turn_assumptions(plan: Plan, work: Workload) -> list[str]:
    assumptions = []
    for node, function in plan.functions["train"].items():
        if "turns" not in function.roles:
            continue
        origin = "--turns"
        if not work.turns:
            origin = f"half of {function.roles['turns']}; --turns"
        tools = "tools take no time"
        if work.tool_seconds:
            tools = f"tools take {work.tool_seconds:g} s per turn"
        turns = f"{work.turns_of(function):g} turns ({origin})"
        assumptions.append(f"`{node}` has {turns}, {tools} (--tool-seconds)")
    return assumptions


def _kept_shares(plan: Plan, by_filter: Mapping[str, float]) -> dict[str, float]:
    """Return domain -> the share that its filter keeps, if that is below 1 and no ``refill`` says it."""
    filters: dict[str, str] = {}  # domain -> the filter that makes it
    for domain in plan.domains["train"].values():
        if domain.filtered and domain.maker not in plan.regions:
            filters[domain.name] = domain.maker
    names = {*filters.values()}
    for name in by_filter:
        is_known = name in names if name else bool(names)
        if not is_known:
            raise _not_a_filter(name, sorted(names), bool(plan.regions))
    shares = {}
    for domain_name, maker in filters.items():
        share = by_filter.get(maker, by_filter.get("", 1.0))
        if share < 1:
            shares[domain_name] = share
    return shares


def _not_a_filter(name: str, filters: list[str], refills: bool) -> GraphError:
    law = f"`{name}` is not a filter" if name else "there is no filter"
    law += " whose kept rows are assumed (--kept-rows)"
    remedy = "one with `refill` says it itself, as refill.expected" if refills else ""
    return fail("no-filter", law, None, filters, remedy)


def _kept_text(plan: Plan, filtered: Sequence[str], shares: Mapping[str, float]) -> str:
    """Return the shares of rows that the filters of some domains are assumed to keep."""
    makers = {name: plan.domains["train"][name].maker for name in filtered}
    phrases = [f"`{makers[name]}` keeps {share:.3g} of its rows" for name, share in shares.items()]
    if not shares:
        phrases.append("filters keep every row")
    elif len(filtered) > len(shares):
        phrases.append("other filters every row")
    text = ", ".join(phrases)
    all_refill = {*makers.values()} <= {*plan.regions}
    return text if all_refill else f"{text} (--kept-rows)"


def _attribute(functions: Iterable[Function], role: Role) -> str:
    """Return the name of the attribute that has a role, in the first op that sets it; empty if none does."""
    for function in functions:
        if role in function.roles and function.value(role):
            return function.roles[role]
    return ""


def _origin(option_value: object, option: str, limit: float, attribute: str) -> str:
    """Return where an assumed number of tokens comes from: an option, a limit of the graph, or a default."""
    if option_value:
        return f"({option})"
    if limit:
        return f"(half of {attribute}; {option})"
    return f"(assumed; {option})"


def _number(function: Function, role: Role, default: float) -> float:
    """Return the number of an attribute with a role, or the default where that is not a number, or 0."""
    value = function.value(role)
    is_number = isinstance(value, int | float)
    if not is_number or not value:
        return default
    return float(value)


def _rows(plan: Plan, shares: Mapping[str, float]) -> dict[str, float]:
    """Return domain -> rows. A source without ``batch`` is assumed to give 128; a filter keeps its share.

    A filter with ``refill`` has as many rows as it says. Its source has more, by the share that it expects
    to keep.
    """
    columns, functions, domains = plan.columns["train"], plan.functions["train"], plan.domains["train"]
    rows = _region_rows(plan)

    def count(name: str) -> float:
        if name in rows:
            return rows[name]
        domain = domains[name]
        rows_per_parent = domain.expected or domain.times
        if domain.parts:
            rows[name] = sum(map(count, domain.parts))
        elif domain.parent:
            rows[name] = count(domain.parent) * rows_per_parent * shares.get(name, 1.0)
        else:
            source = functions[domain.maker]
            default = _number(source, "capacity", BATCH)  # a replay buffer gives what it has
            rows[name] = _number(source, "rows", default) * rows_per_parent
        return rows[name]

    # a plan lists the domains of nodes before those of inserted copies
    for column in columns.values():
        if column.writer in functions:
            count(column.domain)
    for column in columns.values():
        count(column.domain)
    return rows


def _region_rows(plan: Plan) -> dict[str, float]:
    """Return domain -> rows, for the columns that a region keeps and those of its source."""
    columns = plan.columns["train"]
    rows: dict[str, float] = {}
    for step in plan.steps:
        if not isinstance(step.action, Collect):
            continue
        region = plan.regions[step.region]
        (source,) = (candidate for candidate in plan.steps if candidate.node == region.source)
        rows[columns[step.writes[0]].domain] = region.rows
        rows[columns[source.writes[0]].domain] = region.rows / region.times / region.expected
    return rows


def growth(plan: Plan, step: Step, work: Workload) -> float:
    """Return how many times the expected rows a step may read: above 1 if their number varies."""
    domains = plan.domains[step.phase]
    times = []
    for name in step.reads:
        line = ancestors(domains, plan.columns[step.phase][name].domain)
        times.append(math.prod(_growth_of(domain, work) for domain in line))
    return max(times, default=1.0)


def _growth_of(domain: GraphDomain, work: Workload) -> float:
    most = 1.0
    if domain.most:
        most = domain.most / domain.expected
    return most / work.kept.get(domain.name, 1.0)


def bytes_beside(plan: Plan, step: Step) -> int:
    """Return the bytes per token of the columns with fixed axes that a step reads, such as ``routing``."""
    total = 0
    for name in step.reads:
        column = plan.columns[step.phase][name]
        if column.type.fixed and column.type.axis:
            total += column.type.cell_bytes(column.sizes, column.stored) or 0
    return total


def row_work(tokens: Any, squares: Any, share: float) -> Any:
    """Return the work of rows, or of an array of rows, in tokens of a row so short that attention is nothing.

    A row of n tokens takes ``n (1 + share n / 2)``: token i sees i columns. See ``Size.attention_share``.

    Example:
        >>> row_work(1000, 1000**2, share=0.001)
        1500.0
    """
    return tokens + share * squares / 2
