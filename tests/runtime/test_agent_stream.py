"""Conversations that go on from round to round: each begun once, every token of the weights that drew it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_stream_ops import lines
from torch import Tensor
from transformers import AutoModelForCausalLM

from flattened import call_op
from rlgraph.nodes.agent import live_chats
from rlgraph.nodes.agent.chat import Chat
from rlgraph.nodes.agent.parsers import ToolCall
from rlgraph.nodes.agent.rollout import Conversations, agent
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Context, Generation, Loop, Request, Sampling, Tool
from rlgraph.runtime.demo_tools import make_model
from rlgraph.runtime.engines.transformers.engine import TransformersEngine
from rlgraph.runtime.engines.transformers.load import named_weights
from rlgraph.runtime.engines.weights.naming import as_stored
from rlgraph.runtime.run import run_graph

GRAPH = str(Path(__file__).parent / "agent_streamed.yaml")
OPS = Path(__file__).parent / "agent_stream_ops.py"
ROWS, N = 12, 2
ENDS = [1, *range(8, 288, 8)]  # tokens that end a turn


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights, one in eight of whose tokens ends a turn."""
    folder = tmp_path_factory.mktemp("files") / "model"
    make_model(folder, seed=0)
    ends = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**ends, "eos_token_id": ENDS}))
    return folder


@pytest.fixture
def in_folder(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder to run in; the graph finds the model."""
    monkeypatch.setenv("RLGRAPH_TEST_FILES", str(model.parent))
    monkeypatch.chdir(tmp_path)


# rounds of the op


class InPieces:
    """An engine whose calls overlap and can be aborted, in front of one that draws a token at a time."""

    overlaps = True

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine, self.tokenizer = engine, engine.tokenizer
        self.lock, self.aborts, self.drawing = threading.Lock(), False, threading.Condition()
        self.calls, self.aborted = 0, 0

    @property
    def version(self) -> int:
        return self.engine.version

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Generation]]:
        (request,), made = requests, Generation((), (), "length")
        with self.drawing:
            self.calls += 1
        while not made.is_whole and len(made.tokens) < (request.max_new_tokens or 0):
            if self.aborts:
                made, self.aborted = replace(made, finish="abort"), self.aborted + 1
                break
            step = replace(request, prompt=[*request.prompt, *made.tokens], max_new_tokens=1)
            with self.lock:
                ((new,),) = self.engine.generate([step], sampling)
            versions = [*made.versions, self.version]
            made = Generation(
                [*made.tokens, *new.tokens], [*made.logprobs, *new.logprobs], new.finish, versions
            )
        with self.drawing:
            self.calls -= 1
            self.drawing.notify_all()
        return [[made]]

    def abort(self) -> None:
        with self.drawing:
            self.aborts = True
            self.drawing.wait_for(lambda: not self.calls)
            self.aborts = False


@dataclass
class Rounds:
    """What the driver does for one node on one worker: rounds, and between them new weights."""

    engine: Any
    loop: Callable[..., Any]
    tools: dict[str, Any] = field(default_factory=dict)
    session: dict[str, Any] = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)  # prompts that have not ended
    begun: list[Any] = field(default_factory=list)
    out: list[Conversations] = field(default_factory=list)
    is_due: Callable[[], bool] | None = None  # None: rounds may not depend on time

    def go(self, new: Sequence[int] = (), **attributes: Any) -> list[int]:
        """Make a round with new prompts; return those that ended."""
        rows = [*self.rows, *new]
        context = Context("rollout", 0, 3, rows=rows, session=self.session, resumes=True, begun=self.begun)
        if self.is_due:
            context.is_due, context.yields = self.is_due, True
        prompt = Ragged.of([[3, 20 + row, 1, 4] for row in rows], torch.int64)
        tools = {name: Tool(tool, {}, {}) for name, tool in self.tools.items()}
        given = {"n": N, "max_new_tokens": 60, "chunk": 5, "tools": tools, **attributes}
        self.out.append(call_op(agent, self.engine, context, prompt, loop=Loop(self.loop, {}, {}), **given))
        ended = [rows[place] for place in context.whole]
        self.rows, self.begun = [row for row in rows if row not in ended], [*context.left]
        assert self.out[-1].group.tolist() == [row for row in ended for _ in range(N)]
        return ended

    def close(self) -> None:
        for one in self.session.values():
            one.close()


@pytest.fixture
def engine(model: Path) -> TransformersEngine:
    made = TransformersEngine(str(model))
    made.load_pretrained()
    return made


@pytest.fixture
def rounds() -> Iterator[Callable[..., Rounds]]:
    """Makes rounds, whose sessions end with the test."""
    every: list[Rounds] = []

    def make(*args: Any, **given: Any) -> Rounds:
        every.append(Rounds(*args, **given))
        return every[-1]

    yield make
    for one in every:
        one.close()


@pytest.fixture
def weights(model: Path) -> Callable[[int], Any]:
    """Makes a model with the weights of a version, of which each is another."""

    def make(version: int) -> Any:
        made = AutoModelForCausalLM.from_pretrained(model)
        torch.manual_seed(version)
        for weight in made.parameters():
            weight.data += 0.02 * version * torch.randn_like(weight)
        return made

    return make


async def turns(chat: Chat) -> None:
    """One turn to five, in which the policy is told to go on."""
    for turn in range(1 + chat.number % 5):
        if turn:
            chat.say("user", "again")
        await chat.turn()


def logprobs(model: Any, row: Tensor) -> Tensor:
    with torch.no_grad():
        logits = model(row[None]).logits[0]
    return torch.cat([torch.zeros(1), logits.log_softmax(-1)[:-1].gather(1, row[1:, None])[:, 0]])


@pytest.mark.parametrize("overlaps", [False, True])
def test_each_token_is_of_the_weights_that_its_version_says(
    engine: TransformersEngine, weights: Callable[[int], Any], rounds: Callable[..., Rounds], overlaps: bool
) -> None:
    every = rounds(InPieces(engine) if overlaps else engine, turns)
    ended, version, known = every.go(range(6)), 0, {0: weights(0)}
    while every.rows:
        every.session["live"].settle()
        version += 1
        known[version] = weights(version)
        engine.load_weights(as_stored(named_weights(known[version]).items(), engine.views), version)
        ended += every.go()
    assert sorted(ended) == [*range(6)]
    spans = Counter[int]()
    for out in every.out:
        for row, ids in enumerate(out.tokens.tolist()):
            mine, mask = out.token_versions[row], out.loss_mask[row]
            assert ((mine >= 0) == mask).all()
            drawn = mine[mask]
            assert (drawn.diff() >= 0).all(), "weights never grow older"
            spans[len(drawn.unique())] += 1
            for number in drawn.unique().tolist():
                own = logprobs(known[number], torch.tensor(ids))[mine == number]
                assert torch.allclose(own, out.rollout_logprobs[row][mine == number], atol=1e-4)
    if overlaps:  # how much a round draws is up to time there
        assert not every.engine.calls
    else:
        assert max(spans) > 2, "no conversation has gone on through two syncs"


def test_new_weights_cut_what_is_in_flight_and_nothing_else_does(
    engine: TransformersEngine, weights: Callable[[int], Any], rounds: Callable[..., Rounds]
) -> None:
    """A turn is held at its third token until weights are to change: it goes on with them."""
    drawn, settles = threading.Event(), threading.Event()

    class Held(InPieces):
        """Draws no fourth token before it is to be still."""

        def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Generation]]:
            (request,) = requests
            if request.drawn:
                return super().generate(requests, sampling)
            ((three,),) = super().generate([replace(request, max_new_tokens=3)], sampling)
            drawn.set()
            assert settles.wait(60)
            return [[replace(three, finish="abort")]]

        def abort(self) -> None:
            settles.set()

    async def one(chat: Chat) -> None:
        await chat.turn()

    every = rounds(Held(engine), one)
    engine.stops = torch.tensor([287])
    assert every.go([0], max_new_tokens=9) == [] and drawn.is_set() and not settles.is_set()
    every.session["live"].settle()
    engine.load_weights(as_stored(named_weights(weights(1)).items(), engine.views), 1)
    assert every.go(max_new_tokens=9) == [0]
    assert [version.tolist()[-9:] for version in every.out[-1].token_versions] == [[0] * 3 + [1] * 6] * N


def test_what_is_not_asked_for_any_more_is_cancelled_and_what_is_not_known_begins_anew(
    engine: TransformersEngine, rounds: Callable[..., Rounds]
) -> None:
    begun, freed = Counter[int](), Counter[int]()

    class Held:
        """A tool that holds something."""

        def execute(self) -> str:
            return "x"

        def release(self) -> None:
            freed["x"] += 1

    async def long(chat: Chat) -> None:
        begun[chat.number] += 1
        for _ in range(9 if chat.number < 4 else 1):
            await chat.turn()
            await chat.use([ToolCall("held")])

    every, limits = rounds(engine, long, {"held": Held}), {"max_new_tokens": 400, "max_turns": 10}
    while not begun[6] or 3 in every.rows:  # prompt 3 is of one turn, 0 and 1 of nine
        every.go([] if begun else [0, 1, 3], **limits)
    assert {0, 1} == {*every.rows} and freed["x"] == 2
    kept = every.begun[0]
    every.rows, every.begun = [1], [kept[N:]]  # 0 is given up
    every.go(**limits)
    assert freed["x"] == 4 and begun[0] == begun[1] == 1
    again = replace(every, session={}, rows=[1], begun=[kept[N:]], out=[])  # as on another worker
    while again.rows:
        again.go(**limits)
    again.close()
    assert begun[2] == begun[3] == 2 and again.out[-1].turns.tolist() == [9, 9]


def test_an_error_ends_the_round_and_frees_the_tools_of_others(
    engine: TransformersEngine, rounds: Callable[..., Rounds]
) -> None:
    freed: list[str] = []

    class Held:
        """A tool that holds something."""

        def execute(self) -> str:
            return "x"

        def release(self) -> None:
            freed.append("x")

    async def breaks(chat: Chat) -> None:
        for _ in range(5):
            await chat.turn()
            await chat.use([ToolCall("held")])
            if chat.number == 1 and chat.turns == 2:
                raise RuntimeError("the loop is wrong")

    every = rounds(engine, breaks, {"held": Held})
    assert every.go([0, 1]) == []
    with pytest.raises(RuntimeError, match="the loop is wrong") as raised:
        [every.go() for _ in range(99)]
    assert raised.value.__notes__ == ["it was in sample 1, which is of prompt 0, in turn 2"]
    assert len(freed) == 4


@pytest.mark.parametrize("overlaps", [False, True])
def test_tools_go_on_between_rounds(
    engine: TransformersEngine, rounds: Callable[..., Rounds], overlaps: bool
) -> None:
    """A tool that is slow holds up no round, and is not late for that."""
    waits = threading.Event()

    async def slow() -> str:
        while not waits.is_set():
            await asyncio.sleep(0.01)
        return "done"

    async def uses(chat: Chat) -> None:
        await chat.turn()
        if chat.number == 0:
            assert await chat.use([ToolCall("slow")]) == ["done"]

    every = rounds(InPieces(engine) if overlaps else engine, uses, {"slow": slow})
    every.is_due = None if overlaps else lambda: False
    ended = every.go([0, 1])
    while 1 not in ended:
        ended += every.go()
    assert 0 not in ended
    waits.set()
    while 0 not in ended:
        ended += every.go()
    assert sorted(ended) == [0, 1]


def test_a_round_ends_at_its_next_token_where_it_is_due(
    engine: TransformersEngine, rounds: Callable[..., Rounds]
) -> None:
    looks, lengths = iter([False, False, True]), list[int]()

    async def one(chat: Chat) -> None:
        await chat.turn()

    generate = engine.generate

    def noted(*args: Any, **given: Any) -> list[list[Generation]]:
        made = generate(*args, **given)
        lengths.extend(len(sample.tokens) for many in made for sample in many)
        return made

    engine.generate, engine.stops = noted, torch.tensor([287])  # type: ignore[method-assign]
    every = rounds(engine, one, is_due=lambda: next(looks, False))
    given = {"chunk": 8, "max_new_tokens": 12}
    assert every.go([0], **given) == [] and lengths == [4] * N, "two tokens come before the first look"
    assert every.go(**given) == [0] and lengths == [4] * N + [8] * N, "something was drawn again"


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_round_in_which_all_wait_for_tools_ends_where_it_is_due(
    engine: TransformersEngine,
    rounds: Callable[..., Rounds],
    monkeypatch: pytest.MonkeyPatch,
    overlaps: bool,
) -> None:
    monkeypatch.setattr(live_chats, "MOMENT", 1e9)
    called, waits = threading.Event(), threading.Event()

    async def slow() -> str:
        called.set()
        while not waits.is_set():
            await asyncio.sleep(0.01)
        return "done"

    async def uses(chat: Chat) -> None:
        await chat.turn()
        assert await chat.use([ToolCall("slow")]) == ["done"]
        await chat.turn()

    every = rounds(InPieces(engine) if overlaps else engine, uses, {"slow": slow}, is_due=called.is_set)
    while not called.is_set():
        assert every.go([] if every.rows else [0]) == []
    assert every.go() == [], "nothing but the tool goes on"
    waits.set()
    every.is_due = lambda: False
    while every.rows:
        every.go()
    assert every.out[-1].turns.tolist() == [2] * N


# runs


def run(run_dir: str, *settings: str, graph: str = GRAPH, **given: Any) -> list[dict[str, Any]]:
    """Run, and return what each iteration has used; of one that ran twice, the last."""
    own = [f"update.note={Path(f'{run_dir}.used').resolve()}"]
    own += [f"walked.tools.visit.note={Path(f'{run_dir}.visits').resolve()}"]
    run_graph(graph, (*own, *settings), run_dir=Path(run_dir), **{"inline": True, **given})
    return [*{line["iteration"]: line for line in lines(f"{run_dir}.used")}.values()]


def check(iterations: list[dict[str, Any]], staleness: int = 2) -> None:
    """Hold what was used to what a stream promises."""
    assert [one["iteration"] for one in iterations] == [*range(len(iterations))]
    assert {len(one["groups"]) for one in iterations} == {ROWS}
    groups = Counter(chain.from_iterable(one["groups"] for one in iterations))
    assert {*groups.values()} == {N}, "a prompt came twice, or in part"
    for one in iterations:
        for versions in one["versions"]:
            assert versions == sorted(versions)
            assert one["iteration"] - staleness <= versions[0] and versions[-1] <= one["iteration"]


def begun(run_dir: str) -> Counter[int]:
    """Return how often conversations of each prompt have begun; all must have ended."""
    visits = lines(f"{run_dir}.visits")
    begins = Counter(line["begins"] for line in visits if "begins" in line)
    assert begins == Counter(line["ends"] for line in visits if "ends" in line), "a tool was not released"
    return begins


@pytest.mark.usefixtures("in_folder")
def test_every_conversation_is_begun_once_and_used_once() -> None:
    iterations = run("a")
    check(iterations)
    assert {*begun("a").values()} == {N}
    long = [
        row
        for one in iterations
        for row, turns in zip(one["versions"], one["turns"], strict=True)
        if turns == 8
    ]
    assert max(len({*versions}) for versions in long) > 1, "new weights have not reached one that goes on"
    assert not [one for one in threading.enumerate() if "run_forever" in one.name]


@pytest.mark.usefixtures("in_folder")
def test_a_slow_tool_holds_up_no_other_conversation() -> None:
    """The first prompt's tools answer once an iteration has used others."""
    used = Path("a.used").resolve()
    iterations = run("a", f"walked.tools.visit.waits_for='{used}'")
    check(iterations)
    assert 0 not in iterations[0]["groups"] and {*begun("a").values()} == {N}
    assert not [line for line in lines("a.visits") if "late" in line]


@pytest.mark.slow
@pytest.mark.usefixtures("in_folder")
def test_in_order_a_run_repeats_however_long_tools_take() -> None:
    runs = [
        run(name, "schedule.buffer.order=in_order", f"walked.tools.visit.seconds={seconds}", steps=3)
        for name, seconds in (("a", 0.0), ("b", 0.01))
    ]
    assert runs[0] == runs[1]
    assert [group for one in runs[0] for group in one["groups"][::N]] == [*range(3 * ROWS // N)]


@pytest.mark.usefixtures("in_folder")
def test_a_run_that_stops_begins_anew_what_was_under_way_and_uses_each_prompt_once() -> None:
    run("a", "schedule.save_every=2", steps=2)
    state = json.loads(Path("a/checkpoints/step-000002/state.json").read_text())
    under_way = {*state["waiting"]["finished"]["prompts"]["prompts"]}
    assert under_way
    iterations = run("a", "schedule.save_every=2", resume=True)
    check(iterations)
    twice = {prompt for prompt, times in begun("a").items() if times > N}
    assert under_way & {*chain.from_iterable(one["groups"] for one in iterations[2:])} and twice >= under_way


@pytest.mark.slow
@pytest.mark.usefixtures("in_folder", "workers")
def test_workers_go_on_with_what_they_have_begun() -> None:
    iterations = run("a", "pools.gen.devices=2", inline=False)
    check(iterations)
    assert {*begun("a").values()} == {N}
    workers = {line["worker"] for line in lines("a.visits") if "worker" in line}
    assert len(workers) == 2


@pytest.mark.usefixtures("in_folder")
@pytest.mark.parametrize("chunk", ["null", "6"])
def test_a_filter_refills_with_conversations_where_nothing_streams(chunk: str) -> None:
    text = f"graph: refilled\nextends: {GRAPH}\nedits:\n"
    text += f"  - set: {{schedule.buffer: null, walked.chunk: {chunk}}}\n"
    text += f"  - add: {{some: {{op: '{OPS}:some', refill: {{rounds: 60}}}}}}\n"
    text += f"  - set: {{update: {{op: '{OPS}:used', model: policy, rows: some}}}}\n"
    Path("refilled.yaml").write_text(text)
    iterations = run("a", graph="refilled.yaml", steps=2)
    assert {len(one["groups"]) for one in iterations} == {ROWS}
    assert all(group % 3 != 1 for one in iterations for group in one["groups"])
    assert max(begun("a").values()) == N
