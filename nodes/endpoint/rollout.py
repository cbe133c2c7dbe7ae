"""Sampling episodes of agents from outside: each gets an address and a key, and does what it does."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import Field, PositiveFloat

from rlgraph.errors import RunError, shortened, visible
from rlgraph.nodes.agent.parsers import hermes
from rlgraph.nodes.agent.request_batching import RequestBatcher
from rlgraph.nodes.agent.toolbox import value_at
from rlgraph.nodes.endpoint.agents import (
    AgentError,
    AgentResult,
    CommandAgent,
    FunctionAgent,
    check_function,
    result_of,
)
from rlgraph.nodes.endpoint.episode import Episode, EpisodeLimits
from rlgraph.nodes.endpoint.prompts import HistoryWriter
from rlgraph.nodes.endpoint.server import EpisodeServer
from rlgraph.nodes.rollout.response_metrics import record_responses
from rlgraph.nodes.rollout.rollout import seed
from rlgraph.nodes.rollout.sampling import CUTS_WITH_TEMPERATURE, AtLeastOne, SamplingAttributes
from rlgraph.nodes.support.lazy import torch
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.nodes.support.user_call import DaemonThreads
from rlgraph.ops import Context, FileFunction, Parser, Sampling, ServeEngine, op
from rlgraph.ops.column_types import anything, boolean, float32, int64, prompts, samples, text, tokens
from rlgraph.ops.registry import load_function

log = logging.getLogger(__name__)
TRACED = 32  # episodes on a device whose times a timeline has
MODEL_NAME = "policy"  # what clients may call the model; any other name is taken for it, too
Outcome = TypeVar("Outcome")


class Episodes(NamedTuple):
    """The columns that ``rollout.harness`` writes."""

    episode_tokens: int64[samples, tokens]
    episode_mask: boolean[samples, tokens]
    episode_logprobs: float32[samples, tokens]
    episode_parents: int64[samples, tokens]
    episode_calls: int64[samples, tokens]
    episode_rewards: float32[samples]
    responses: text[samples]
    group: int64[samples]
    truncated: boolean[samples]
    failed: boolean[samples]
    turns: int64[samples]


@dataclass(frozen=True)
class Ended:
    """An episode's end: its result, or the reason of its failure."""

    result: AgentResult
    failure: str = ""


@op(
    makes="samples",
    times="n",
    rows="each",
    reads=("columns",),
    assumes=("one_agent",),
    when=CUTS_WITH_TEMPERATURE,
    stores={"episode_calls": "int16", "episode_parents": "int32"},
    roles={
        "response_limit": "max_tokens",
        "temperature": "temperature",
        "nucleus": "top_p",
        "turns": "max_turns",
    },
)
def harness(
    model: ServeEngine,
    ctx: Context,
    question: anything[prompts],
    *,
    run: FileFunction | None = None,
    command: str | None = None,
    columns: list[str] = [],  # noqa: B006 - never changed
    n: AtLeastOne = 1,
    max_tokens: Annotated[int, Field(ge=2)],
    max_turn_tokens: AtLeastOne | None = None,
    max_turns: Annotated[int, Field(ge=1, le=32767)] = 64,
    timeout: PositiveFloat = 600.0,
    parallel: AtLeastOne = 64,
    on_error: Literal["fail", "zero"] = "fail",
    sampling: SamplingAttributes,
    parser: Parser | None = None,
    template_options: dict[str, Any] | None = None,
    **more: anything[prompts],
) -> Episodes:
    """Sample ``n`` episodes of an agent per task: any function or command that talks to a model over HTTP.

    The agent is called as ``solve(task, base_url, api_key)``, sync or async, with ``task`` a dict of
    ``question`` and the other ``columns`` of the row. At ``base_url`` it finds the policy behind OpenAI's
    chat completions and responses and Anthropic's messages (for Anthropic's clients without ``/v1``). It is
    served on loopback, with a secret key per episode. A command gets the same in its environment: TASK as
    JSON, OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY.

    What the policy read and wrote is recorded as tokens, which no later request changes: a request whose
    messages mean what was recorded continues the sampled tokens, though its client may have written them in
    another form; any other begins a new row. An episode is a tree of tokens: ``episode_parents`` is the
    position of the token before each, -1 for the first, and ``episode_calls`` the number of the answer that
    wrote it, -1 where the policy read it; ``episode_mask`` is true where it wrote. ``segment.paths`` makes
    rows of it. ``episode_rewards`` is the number that the agent returned, or ``reward`` of the mapping; 0
    where it returned nothing. ``responses`` is the text of the last answer. An episode is ``truncated`` if a
    limit ended it, and ``failed`` if the agent raised an error, was late or a command's exit status was not
    0.

    Settings of sampling are the run's: requests that ask for others are counted and not followed, but for
    ``stop`` and the limit of tokens. The seed of an episode's answers depends on the run's seed, the
    iteration, the node, the row and the number of the answer. Records ``rollout/length`` (tokens that the
    policy wrote), ``rollout/prompt_length`` (tokens that it read), ``rollout/truncated``,
    ``rollout/repetitive``, ``rollout/turns``, ``tokens/generated``, ``endpoint/failed`` (the fraction of
    episodes), ``endpoint/segments/REASON`` (rows per episode that began for a reason), ``endpoint/retried``
    and ``endpoint/refused`` (requests per episode), ``endpoint/malformed_calls`` (the fraction of calls of
    tools), ``endpoint/left_out`` (settings per episode that were not followed), ``perf/generation_seconds/``,
    and the other numbers of the mapping as ``episode/NAME``.

    Attributes:
        run: the agent's function, such as my_agent.py:solve in a file next to the graph.
        command: the agent's command line, in place of a function; the last line that it prints is its result,
            where that is JSON.
        columns: more columns of the task, by name, such as [answer].
        n: episodes per task, at least 1.
        max_tokens: the most tokens of a prompt and its answer together.
        max_turn_tokens: the most tokens of one answer; null: as many as are left.
        max_turns: the most answers of an episode, 1 to 32767.
        timeout: seconds that an episode may take, above 0.
        parallel: concurrent episodes per device, at least 1.
        on_error: what happens if an agent fails: fail, the run ends; zero, its reward is 0.
        parser: how calls of tools are written in the text; by default hermes.
        template_options: further arguments of the chat template.

    Raises:
        RunError: neither or both of ``run`` and ``command`` are given, or an agent fails and ``on_error`` is
            fail.

    Example:
        rollout: {op: rollout.harness, model: policy, n: 8, run: ???, max_tokens: 4096}
    """
    agent = _agent(ctx, run, command)
    settings = sampling.settings(max_tokens)
    batcher = RequestBatcher(model, settings)
    writer = HistoryWriter(model.tokenizer, template_options)
    limits = EpisodeLimits(max_tokens, max_turn_tokens, max_turns)
    body = parser.body if parser else hermes
    episodes = []
    tasks = []
    for place, row in enumerate(ctx.rows):
        task = {"question": question[place]}
        for name, values in more.items():
            task[name] = value_at(values, place)
        for k in range(n):
            number = int(row) * n + k
            episode_seed = seed(ctx.seed, ctx.iteration, ctx.node, number)
            episodes.append(Episode(number, episode_seed, batcher, writer, body, limits))
            tasks.append(task)
    run_of_episodes = _all(agent, episodes, tasks, batcher, settings, parallel, timeout)
    ended = _in_thread(run_of_episodes)
    _check_failures(ctx, episodes, ended, n, on_error)
    _record(ctx, episodes, ended)
    return _columns(episodes, ended, n)


def _agent(ctx: Context, run: str | None, command: str | None) -> FunctionAgent | CommandAgent:
    """Return the agent that the graph names.

    Raises:
        RunError: it names none, or two.
    """
    if (run is None) == (command is None):
        law = f"`{ctx.node}` needs an agent: `run`, a function, or `command`, a command line"
        raise RunError(f"{law}\n  set one of them: {{{ctx.node}.run: my_agent.py:solve}}")
    if command is not None:
        return CommandAgent(command)
    function = load_function(str(run))
    check_function(function, str(run))
    return FunctionAgent(function)


def _in_thread(work: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Run a coroutine on an event loop of another thread: in a main one a server takes its signals."""
    threads = DaemonThreads(1)
    try:
        outcome: Outcome = threads.submit(asyncio.run, work).result()
        return outcome
    finally:
        threads.shutdown(wait=False)


async def _all(
    agent: FunctionAgent | CommandAgent,
    episodes: Sequence[Episode],
    tasks: Sequence[Mapping[str, Any]],
    batcher: RequestBatcher,
    sampling: Sampling,
    parallel: int,
    timeout: float,
) -> list[Ended]:
    """Hold episodes to their ends, so many at a time; return how each has ended."""
    server = EpisodeServer(MODEL_NAME, sampling)
    server.start()
    gate = asyncio.Semaphore(parallel)

    async def lead(episode: Episode, task: Mapping[str, Any]) -> Ended:
        async with gate:
            batcher.going_on.add(episode.number)
            batcher.changed.set()
            server.open(episode)
            try:
                return await _episode(agent, episode, task, server.base_url, timeout)
            finally:
                server.close_episode(episode)
                batcher.leave(episode.number)

    async def drawing() -> None:
        while True:  # episodes that wait for their turn have not begun
            await batcher.as_they_come()
            batcher.changed.clear()
            await batcher.changed.wait()

    engine = asyncio.ensure_future(drawing())
    work = [asyncio.ensure_future(lead(episode, task)) for episode, task in zip(episodes, tasks, strict=True)]
    try:
        all_work: asyncio.Future[Any] = asyncio.gather(*work)
        waited: list[asyncio.Future[Any]] = [engine, all_work]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if engine.done():
            engine.result()  # raises what ended it
        ended: list[Ended] = await all_work
        return ended
    finally:
        for task in (engine, *work):
            task.cancel()
        await asyncio.gather(engine, *work, return_exceptions=True)
        await server.close()
        batcher.close()


async def _episode(
    agent: FunctionAgent | CommandAgent,
    episode: Episode,
    task: Mapping[str, Any],
    base_url: str,
    timeout: float,
) -> Ended:
    try:
        result = result_of(await agent.run(task, base_url, episode.key, timeout))
        ended = Ended(result)
    except TimeoutError:
        ended = Ended(AgentResult(), f"it took over {timeout:g} s (timeout)")
    except AgentError as error:
        ended = Ended(AgentResult(), str(error))
    if episode.error is not None:
        raise episode.error
    return ended


def _check_failures(
    ctx: Context, episodes: Sequence[Episode], ended: Sequence[Ended], n: int, on_error: str
) -> None:
    """Say which agents have failed.

    Raises:
        RunError: one has, and that is to end the run. One that a limit ended is truncated, and no failure.
    """
    failures = []
    for episode, end in zip(episodes, ended, strict=True):
        if end.failure and not episode.truncated:
            failures.append((episode, end.failure))
    if not failures:
        return
    episode, failure = failures[0]
    law = f"`{ctx.node}`: {len(failures)} of {len(episodes)} agents failed; the first, of sample "
    law += f"{episode.number} (prompt {episode.number // n}, after {episode.turns} turns): "
    law += visible(shortened(failure, 600))
    if on_error == "fail":
        raise RunError(f"{law}\n  mend the agent, or set: {{{ctx.node}.on_error: zero}}")
    log.warning(law)


def _columns(episodes: Sequence[Episode], ended: Sequence[Ended], n: int) -> Episodes:
    recordings = [episode.recording for episode in episodes]
    masks = []
    for recording in recordings:
        masks.append([call >= 0 for call in recording.calls])
    failed = []
    for episode, end in zip(episodes, ended, strict=True):
        failed.append(bool(end.failure) and not episode.truncated)
    return Episodes(
        episode_tokens=Ragged.of([recording.tokens for recording in recordings], torch.int64),
        episode_mask=Ragged.of(masks, torch.bool),
        episode_logprobs=Ragged.of([recording.logprobs for recording in recordings], torch.float32),
        episode_parents=Ragged.of([recording.parents for recording in recordings], torch.int32),
        episode_calls=Ragged.of([recording.calls for recording in recordings], torch.int16),
        episode_rewards=torch.tensor([end.result.reward or 0.0 for end in ended], dtype=torch.float32),
        responses=[episode.response for episode in episodes],
        group=torch.tensor([episode.number // n for episode in episodes], dtype=torch.int64),
        truncated=torch.tensor([episode.truncated for episode in episodes], dtype=torch.bool),
        failed=torch.tensor(failed, dtype=torch.bool),
        turns=torch.tensor([episode.turns for episode in episodes], dtype=torch.int64),
    )


def _record(ctx: Context, episodes: Sequence[Episode], ended: Sequence[Ended]) -> None:
    lengths = []
    for episode in episodes:
        lengths.append(sum(call >= 0 for call in episode.recording.calls))
    read = []
    for episode, length in zip(episodes, lengths, strict=True):
        read.append(len(episode.recording.tokens) - length)
    record_responses(
        ctx,
        lengths=lengths,
        prompt_lengths=read,
        truncated=[episode.truncated for episode in episodes],
        responses=[episode.response for episode in episodes],
    )
    turns = [episode.turns for episode in episodes]
    ctx.record("rollout/turns", turns)
    ctx.record("rollout/turns_", turns, kind=("min", "max"))
    ctx.record("tokens/generated", lengths, kind="sum", over="tokens")
    ctx.record("endpoint/failed", [bool(end.failure) for end in ended], kind="share")
    reasons: Counter[str] = Counter()
    for episode in episodes:
        reasons.update(episode.recording.reasons)
    for reason in reasons:
        counts = [episode.recording.reasons[reason] for episode in episodes]
        ctx.record(f"endpoint/segments/{reason}", counts)
    for name in ("retried", "refused", "left_out"):
        ctx.record(f"endpoint/{name}", [episode.counts[name] for episode in episodes])
    malformed = sum(episode.counts["malformed_calls"] for episode in episodes)
    calls = sum(episode.counts["calls"] for episode in episodes)
    ctx.record("endpoint/malformed_calls", malformed, calls, kind="share", over="calls")
    seconds = [episode.seconds_of("generation") for episode in episodes]
    ctx.record("perf/generation_seconds/", seconds, kind=("mean", "max"))
    numbers: dict[str, list[float]] = {}
    for end in ended:
        for name, value in end.result.metrics.items():
            numbers.setdefault(name, []).append(value)
    for name, values in numbers.items():
        ctx.record(f"episode/{name}", values)
    spans = []
    for episode in episodes[:TRACED]:
        spans += [(f"episode {episode.number}", *span) for span in episode.spans]
    ctx.spans = spans
