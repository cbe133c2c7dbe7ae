"""Offloading and reloading: bit for bit, of memory that is given back, and refused where it makes no sense.

This file as a script runs an engine that offloads beside one that never does, on two and on four ranks.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from ranks import forked, launch
from torch.distributed.device_mesh import DeviceMesh

from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Totals
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.memory.offload import PinnedCopy

ALL = ("optimizer", "parameters")
ADAM = {"lr": 1e-2, "weight_decay": 0.1, "schedule": "linear", "total_steps": 50}
ROWS, VOCABULARY, RANKS = 6, 25, 4  # 25 rows lie unevenly on 2 and on 4 ranks; on 4 so do 30


def write_model(directory: Path, **changes: Any) -> str:
    """A random model with tied embeddings, and a tokenizer."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 30,
        "intermediate_size": 41,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    }
    Qwen2ForCausalLM(Qwen2Config(**{**shape, **changes})).save_pretrained(directory)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1").save_pretrained(directory)
    return str(directory)


def columns(rows: torch.Tensor) -> dict[str, Ragged]:
    """Those of six rows, of 4 to 9 tokens."""
    tokens = Ragged.of([[(5 * row + 3 * t) % VOCABULARY for t in range(4 + row)] for row in range(ROWS)])
    mask = Ragged.of([[t > 1 for t in range(4 + row)] for row in range(ROWS)], dtype=torch.bool)
    return {"tokens": tokens.take(rows), "loss_mask": mask.take(rows)}


def objective(batch: dict[str, Any], totals: Totals) -> tuple[torch.Tensor, dict[str, Any]]:
    return -batch["logprobs"].values.sum() / totals.tokens, {}


def update(engine: FsdpEngine) -> dict[str, float]:
    rows = torch.arange(ROWS)[engine.group.rank() :: engine.group.size()]
    return engine.update(columns(rows), objective, rows, ROWS)


def logprobs(engine: FsdpEngine) -> torch.Tensor:
    return engine.logprobs(**columns(torch.arange(ROWS))).values


def same(left: FsdpEngine, right: FsdpEngine) -> None:
    """Log-probs, parameters and optimizer state are equal, bit for bit."""
    assert logprobs(left).equal(logprobs(right))
    theirs = dict(right.weights())
    assert all(tensor.equal(theirs[name]) for name, tensor in left.weights())
    for mine, other in zip(left.parameters, right.parameters, strict=True):
        ours, theirs = left.optimizer.state[mine], right.optimizer.state[other]
        assert ours.keys() == theirs.keys()
        local = ((ours[k], theirs[k]) for k in ours)
        for a, b in (tuple(getattr(t, "_local_tensor", t) for t in pair) for pair in local):
            assert a.equal(b)


def compare(path: str, mesh: DeviceMesh, reshard: bool) -> None:
    """Train one engine that offloads at every turn, and one that never does."""
    engine, still = (FsdpEngine.of(path, optimizer=ADAM, mesh=mesh, reshard=reshard) for _ in range(2))
    for parts in ("parameters",), ALL, ("optimizer",):
        engine.offload(parts)
        assert engine.away == frozenset(parts)
        engine.reload(parts)
        assert update(engine) == update(still)
        same(engine, still)


def main(rank: int, root: Path) -> None:
    for ranks in 2, RANKS:
        mesh = DeviceMesh("cpu", list(range(ranks)))
        if rank < ranks:
            compare(str(root / "model"), mesh, reshard=ranks == RANKS)
    dist.barrier()
    (root / f"passed-{rank}").touch()


@pytest.fixture(scope="module")
def path(one_rank: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("offload"))


@pytest.fixture
def engine(path: str) -> FsdpEngine:
    return FsdpEngine.of(path, optimizer=ADAM)


@pytest.mark.slow
def test_several_ranks_offload_bit_for_bit(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    launch(__file__, tmp_path)
    assert len(list(tmp_path.glob("passed-*"))) == RANKS


class Twins(RuleBasedStateMachine):
    """An engine that is offloaded and reloaded at will, and one that never is."""

    path: str

    @initialize()
    def start(self) -> None:
        self.engine, self.still = (FsdpEngine.of(self.path, optimizer=ADAM) for _ in range(2))
        self.away: frozenset[str] = frozenset()

    @rule(parts=st.sets(st.sampled_from(ALL)))
    def offload(self, parts: set[str]) -> None:
        self._move(self.engine.offload, parts, allowed=not parts & self.away, after=self.away | parts)

    @rule(parts=st.sets(st.sampled_from(ALL)))
    def reload(self, parts: set[str]) -> None:
        self._move(self.engine.reload, parts, allowed=parts <= self.away, after=self.away - parts)

    @rule()
    def train(self) -> None:
        self._use("update", update, self.away)

    @rule()
    def score(self) -> None:
        self._use("logprobs", lambda engine: logprobs(engine).tolist(), self.away & {"parameters"})

    @rule()
    def save_and_load(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.engine.save(folder)
            self.engine.load(folder)
        assert self.engine.away == self.away

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.reload(self.engine.away)
            same_weights = zip(self.engine.weights(), self.still.weights(), strict=True)
            assert all(mine.equal(other) for (_, mine), (_, other) in same_weights)

    def _move(self, move: Any, parts: set[str], allowed: bool, after: Any) -> None:
        if not allowed:
            with pytest.raises(RuntimeError, match="first, or leave it out"):
                move(parts)
            return
        move(parts)
        self.away = frozenset(after)
        assert self.engine.away == self.away

    def _use(self, name: str, call: Any, away: frozenset[str]) -> None:
        if not away:
            assert call(self.engine) == call(self.still)
            return
        with pytest.raises(RuntimeError, match=rf"{name} needs its .*; call reload\("):
            call(self.engine)


def test_any_order_of_calls(path: str) -> None:
    machine = type("Machine", (Twins,), {"path": path})
    limits = settings(max_examples=10, stateful_step_count=8, deadline=None, derandomize=True, database=None)
    run_state_machine_as_test(machine, settings=limits)


def test_what_needs_an_absent_part_is_refused(engine: FsdpEngine, path: str) -> None:
    critic = FsdpEngine.of(path, head="value", frozen=True)
    for one in engine, critic:
        one.offload(ALL)
    for refused in (
        lambda: logprobs(engine),
        lambda: update(engine),
        lambda: critic.values(**columns(torch.arange(ROWS))),
        lambda: engine.weights(),
    ):
        with pytest.raises(RuntimeError, match=r"needs its parameters.*reload\(\['parameters'"):
            refused()
    with pytest.raises(ValueError, match="offload knows no gradients; its parts are parameters, optimizer"):
        engine.offload(["gradients"])
    engine.reload(["parameters"])
    with pytest.raises(RuntimeError, match=r"update needs its optimizer, offloaded now"):
        update(engine)


def test_an_export_of_what_is_away_is_whole(engine: FsdpEngine, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    update(engine)
    expected = {name: tensor.clone() for name, tensor in engine.weights()}
    engine.offload(ALL)
    engine.export(str(tmp_path / "exported"))
    assert engine.away == frozenset(ALL)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert all(parameter.equal(expected[name]) for name, parameter in model.named_parameters())


class CountedCopy(PinnedCopy):
    """Host memory that counts how often it is written."""

    writes = 0

    def write(self, storages: list[torch.UntypedStorage]) -> None:
        CountedCopy.writes += 1
        super().write(storages)


def test_what_has_not_changed_is_not_copied_again(path: str) -> None:
    frozen, trained = FsdpEngine.of(path, frozen=True), FsdpEngine.of(path, optimizer=ADAM)
    for engine, writes in (frozen, 2), (trained, 6):
        CountedCopy.writes = 0
        # in chunks of 1000 bytes, of which each tensor is more or less than one
        engine.residency._new_copy = lambda: CountedCopy(pin=False, chunk=1000)
        expected = logprobs(engine)
        for turn in range(3):
            for part in ALL:
                engine.offload([part])
                engine.reload([part])
            assert logprobs(engine).equal(expected)
            if engine is trained and turn < 2:
                update(engine)
                expected = logprobs(engine)
        assert CountedCopy.writes == writes


def anonymous() -> int:
    """Bytes of this process's resident memory that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
def test_memory_is_given_back(path: str, tmp_path: Path) -> None:
    wide = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_hidden_layers": 4}
    engine = FsdpEngine.of(write_model(tmp_path / "wide", **wide), optimizer=ADAM)
    update(engine)
    parameters = 4 * sum(p.numel() for p in engine.parameters)
    assert parameters > 45e6
    for part, size in ("parameters", parameters), ("optimizer", 2 * parameters):
        before = anonymous()
        engine.offload([part])
        after = anonymous()
        assert before - after > 0.8 * size
        engine.reload([part])
        assert anonymous() - after > 0.8 * size


def test_a_full_disk_leaves_everything_where_it_was(engine: FsdpEngine) -> None:
    engine.offload(ALL)
    engine.reload(ALL)
    update(engine)
    expected = logprobs(engine)
    with open("/dev/full", "r+b", buffering=0) as full:
        engine.residency._copies["optimizer"].file = full
        with pytest.raises(OSError, match="No space left"):
            engine.offload(ALL)
    assert engine.away == frozenset()
    assert logprobs(engine).equal(expected)


if __name__ == "__main__":
    forked(main, RANKS)
