"""How much work an iteration is: rows and tokens, from a plan's attributes and a few stated assumptions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlgraph.plan import Function, Plan

BATCH, PROMPT, RESPONSE = 128, 256, 1024  # where no attribute says: prompts, prompt tokens, new tokens
POINTS = 64  # of the grid on which a rollout's shrinking batch is summed


@dataclass(frozen=True)
class Lengths:
    """How long responses are: exponential with this mean, cut at ``longest``.

    Of all distributions with a given mean and a bound it is the one of most entropy: it assumes nothing else.
    """

    mean: float
    longest: float

    @property
    def rate(self) -> float:
        """What gives the cut distribution its mean: (1 - exp(-r M)) / r = mean; 0 where all reach M."""
        low, high = 0.0, 64.0 / self.mean
        if self.mean >= self.longest:
            return 0.0
        for _ in range(80):
            middle = (low + high) / 2
            too_long = -math.expm1(-middle * self.longest) / middle > self.mean
            low, high = (middle, high) if too_long else (low, middle)
        return low

    @property
    def square(self) -> float:
        """Mean of the squared length."""
        rate, end = self.rate, self.longest
        if rate == 0:
            return end**2
        return 2 * (1 / rate**2 - math.exp(-rate * end) * (end / rate + 1 / rate**2))

    def of_longest(self, rows: float) -> float:
        """Tokens of the longest of ``rows`` responses: what one of them in ``rows`` exceeds."""
        rate = self.rate
        return self.longest if rate == 0 else max(self.mean, min(self.longest, math.log(max(rows, 1)) / rate))

    def alive(self, rows: float) -> Iterator[tuple[float, float, float]]:
        """The shrinking batch: (tokens generated so far, rows that still run, decode steps they make so)."""
        end, rate = self.of_longest(rows), self.rate
        for index in range(POINTS):
            middle = (index + 0.5) * end / POINTS
            yield middle, max(1.0, rows * math.exp(-rate * middle)), end / POINTS


@dataclass(frozen=True)
class Workload:
    """Rows of each domain, and tokens of a row, of one training iteration."""

    rows: Mapping[str, float]
    prompt: float
    longest_prompt: float
    responses: Lengths
    assumed: tuple[str, ...]

    @property
    def mean(self) -> float:
        """Tokens of a sample, prompt and response."""
        return self.prompt + self.responses.mean

    @property
    def square(self) -> float:
        """Mean of a sample's squared length."""
        return self.prompt**2 + 2 * self.prompt * self.responses.mean + self.responses.square

    def longest(self, rows: float) -> float:
        """Tokens of the longest of ``rows`` samples."""
        return max(self.prompt + self.responses.of_longest(rows), self.mean)

    def limited(self, rollout: Function) -> Lengths:
        """The responses of one rollout, which may allow fewer tokens than another."""
        limit = _number(rollout, "max_new_tokens", self.responses.longest)
        return Lengths(min(self.responses.mean, limit), limit)

    @property
    def most(self) -> float:
        """Tokens that a sample may have."""
        return self.longest_prompt + self.responses.longest


def workload(
    plan: Plan, prompt_tokens: float | None = None, response_tokens: float | None = None
) -> Workload:
    """What one training iteration of a plan works on.

    Args:
        plan: its sources say ``batch`` and ``max_prompt_tokens``, its rollouts ``max_new_tokens``.
        prompt_tokens: mean tokens of a prompt; half of ``max_prompt_tokens``, or 256, unless given.
        response_tokens: mean tokens of a response; half of ``max_new_tokens`` unless given.
    """
    functions = plan.functions["train"]
    rollouts = [f for f in functions.values() if "serve" in f.handles.values()]
    limit = max((_number(f, "max_new_tokens", RESPONSE) for f in rollouts), default=RESPONSE)
    stated = [_number(f, "max_prompt_tokens", 0) for f in functions.values()]
    longest = max([n for n in stated if n], default=0)
    prompt = prompt_tokens or (longest / 2 if longest else PROMPT)
    mean = min(response_tokens or limit / 2, limit)
    rows = _rows(plan)
    assumed = [
        f"prompts of {prompt:,.0f} tokens "
        + _origin(prompt_tokens, "--prompt-tokens", longest, "max_prompt_tokens"),
        f"responses of {mean:,.0f} tokens "
        + _origin(response_tokens, "--response-tokens", limit, "max_new_tokens")
        + f", lengths exponential up to {limit:,.0f}",
        "rows: " + ", ".join(f"{count:,.0f} {name}" for name, count in rows.items() if "/" not in name),
    ]
    if any("/" in name for name in rows):
        assumed.append("filters keep every row")
    for name, region in plan.regions.items():
        if region.expected < 1:
            assumed[-1] += f", but {name} {region.expected:.0%} (refill.expected), and one round is enough"
    return Workload(rows, prompt, max(longest, 2 * prompt), Lengths(mean, limit), tuple(assumed))


def _origin(given: float | None, option: str, limit: float, attribute: str) -> str:
    if given:
        return f"({option})"
    return f"(half of {attribute}; {option})" if limit else f"(assumed; {option})"


def _number(function: Function, name: str, default: float) -> float:
    value: Any = function.attributes.get(name)
    return float(value) if isinstance(value, int | float) and value else default


def _rows(plan: Plan) -> dict[str, float]:
    """Domain -> rows. A source that does not say its ``batch`` is taken to give 128; a filter keeps all.

    One with ``refill`` has the rows that it says, of as many more as are expected to go.
    """
    columns = plan.columns["train"]
    functions = plan.functions["train"]
    made = {c.domain: c for c in columns.values() if c.writer in functions} | {
        c.domain: c for c in columns.values() if c.parent
    }
    rows: dict[str, float] = {}
    for end in (step for step in plan.steps if step.kind == "collect"):
        region = plan.regions[end.region]
        rows[columns[end.writes[0]].domain] = region.rows
        (source,) = (step for step in plan.steps if step.node == region.source)
        rows[columns[source.writes[0]].domain] = region.rows / region.times / region.expected

    def count(domain: str) -> float:
        if domain not in rows:
            column = made[domain]
            known = column.parent is None
            source = functions.get(column.writer)
            own = _number(source, "batch", BATCH) if source else float(BATCH)
            rows[domain] = own if known else count(str(column.parent)) * column.times
        return rows[domain]

    for domain in made:
        count(domain)
    return rows
