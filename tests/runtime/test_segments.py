"""Segments: gradients are those of a plain reference, and runs on one and two devices are one run.

Two ranks (this file as a script) compute every case of ``gradients``; so does this process.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import forked, launch

from rlgraph.compiler import compile_graph
from rlgraph.costs.workload import workload
from rlgraph.nodes.loss.policy import reinforce
from rlgraph.nodes.score.segment import align, contexts
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.nodes.update.update import policy_objective
from rlgraph.ops import Context, Loss
from rlgraph.printing.column_text import lineage_text
from rlgraph.runtime.columns import layouts
from rlgraph.runtime.demo_tools import make_model
from rlgraph.runtime.engines.fsdp.batching import Budget, mini_batches
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine

HERE = Path(__file__).parent
SAMPLES, VOCAB, CASES = 9, 11, range(12)
HOWS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
Segment = tuple[list[int], list[bool], list[float]]  # tokens, loss mask, advantages


def drawn(case: int) -> list[list[Segment]]:
    """Samples of none to three segments, some of them without a token to train."""
    chance = random.Random(case)

    def segment() -> Segment:
        length = chance.randint(2, 9)
        trained = [False] + [chance.random() < 0.6 for _ in range(length - 1)]
        numbers = [chance.gauss(0, 1) for _ in range(length)]
        return [chance.randrange(2, VOCAB) for _ in range(length)], trained, numbers

    return [[segment() for _ in range(chance.randint(0, 3))] for _ in range(SAMPLES)]


def table() -> torch.Tensor:
    """A policy: the logits of a token behind each other one, float64 ``[VOCAB, VOCAB]``."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(VOCAB, VOCAB, dtype=torch.float64, generator=generator).requires_grad_()


def columns_of(segments: list[Segment]) -> dict[str, Ragged]:
    kinds = (("tokens", torch.int64), ("loss_mask", torch.bool), ("advantages", torch.float64))
    return {name: Ragged.of([s[i] for s in segments], kind) for i, (name, kind) in enumerate(kinds)}


def objective(how: Any) -> Any:
    return policy_objective(Loss(reinforce, {}, {}), how, 0.0, "k3", 0.0, 7.0)


def gradients(case: int, ranks: int) -> dict[str, list[torch.Tensor]]:
    """The gradient of each mini-batch, cut into ranks and micro-batches by chance."""
    samples, chance = drawn(case), random.Random(-case)
    minibatches, tokens = chance.randint(1, 4), chance.choice([9, 16, 40, 1000])
    numbered = [(number, segment) for number, several in enumerate(samples) for segment in several]
    owners = [chance.randrange(ranks) for _ in numbered]
    chance.shuffle(numbered)
    own = [pair for pair, owner in zip(numbered, owners, strict=True) if owner == dist.get_rank()]
    columns = columns_of([segment for _, segment in own])
    rows = torch.tensor([number for number, _ in own], dtype=torch.int64)
    budget = Budget(tokens, share=chance.choice([None, 0.01]))
    found = {}
    for over in ("samples", "segments"):
        batch = (columns, rows, SAMPLES, minibatches, budget, torch.device("cpu"), dist.group.WORLD)
        plan = mini_batches(*batch, merged={"": over == "samples"})
        for how in HOWS:
            found[f"{how} {over}"] = [gradient_of(minibatch, how) for minibatch in plan]
    return found


def gradient_of(minibatch: Any, how: str) -> torch.Tensor:
    weights = table()
    total = 0 * weights.sum()
    for batch in minibatch.batches:
        ids = batch.columns["tokens"]
        before = ids.values.roll(1)
        scores = weights.log_softmax(1)[before, ids.values]
        given = {**batch.columns, "logprobs": ids.like(scores)}
        totals = replace(minibatch.totals[0], lengths=given.pop("sequence_tokens", None))
        total = total + objective(how)(given, totals)[0]
    total.backward()
    dist.all_reduce(weights.grad)
    return weights.grad


def reference(case: int) -> dict[str, list[torch.Tensor]]:
    """The same by the formulas of docs/language_in_depth.md, sample by sample, on the whole batch."""
    samples, minibatches = drawn(case), random.Random(-case).randint(1, 4)
    found: dict[str, list[torch.Tensor]] = {}
    for over in ("samples", "segments"):
        for how in HOWS:
            found[f"{how} {over}"] = []
            for number in range(minibatches):
                own = [s for r, s in enumerate(samples) if r * minibatches // SAMPLES == number]
                sequences = (
                    own if over == "samples" else [[segment] for several in own for segment in several]
                )
                found[f"{how} {over}"].append(plain(sequences, how))
    return found


def plain(sequences: list[list[Segment]], how: str) -> torch.Tensor:
    weights = table()
    sums, counts = [0 * weights.sum()], [0]
    for several in sequences:
        sums.append(0 * weights.sum())
        counts.append(0)
        for ids, mask, advantages in several:
            for place in (place for place, trained in enumerate(mask) if trained):
                scores = weights[ids[place - 1]].log_softmax(0)
                sums[-1] = sums[-1] - advantages[place] * scores[ids[place]]
                counts[-1] += 1
    if how == "seq-mean-token-mean":
        sums = [each / max(count, 1) for each, count in zip(sums, counts, strict=True)]
    by = {"token-mean": sum(counts), "token-sum": 1, "seq-mean-token-sum-norm": 7 * len(sequences)}
    (torch.stack(sums).sum() / max(by.get(how, len(sequences)), 1)).backward()
    return weights.grad


def main(rank: int, root: Path) -> None:
    torch.save({case: gradients(case, 2) for case in CASES}, root / f"rank-{rank}.pt")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    root = tmp_path_factory.mktemp("segments")
    launch(__file__, root)
    return torch.load(root / "rank-1.pt")


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_formulas(case: int, one_rank: None, two_ranks: dict[int, Any]) -> None:
    wanted = reference(case)
    for found in (gradients(case, 1), two_ranks[case]):
        for name, each in wanted.items():
            for mine, theirs in zip(found[name], each, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.parametrize("micro_tokens", [16, 4096])
def test_the_engine_counts_a_sample_once(demo_files: Path, one_rank: None, micro_tokens: int) -> None:
    from transformers import AutoModelForCausalLM

    path, samples = str(demo_files / "demo_files/model"), drawn(0)
    numbered = [(number, segment) for number, several in enumerate(samples) for segment in several]
    columns = columns_of([segment for _, segment in numbered])
    columns["advantages"] = columns["advantages"].like(columns["advantages"].values.float())
    rows = torch.tensor([number for number, _ in numbered])
    engine = FsdpEngine.of(path, optimizer={"lr": 1e-3}, micro_tokens=micro_tokens)
    metrics = engine.update(columns, objective("seq-mean-token-mean"), rows, SAMPLES, merged=True)
    model = AutoModelForCausalLM.from_pretrained(path).double()
    loss = torch.zeros((), dtype=torch.float64)
    for several in samples:
        count = sum(sum(mask) for _, mask, _ in several)
        for ids, mask, advantages in several:
            scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            for place in (place for place, trained in enumerate(mask) if trained):
                loss = loss - advantages[place] * scores[place - 1, ids[place]] / count / SAMPLES
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_a_segment_is_what_the_policy_saw() -> None:
    #       Q   Q   A   A   |   B   B   |   C
    tokens = Ragged.of([[10, 11, 20, 21, 30, 40, 41, 50, 60], [1, 2], [5, 6]])
    mask = Ragged.of([[0, 0, 1, 1, 0, 1, 1, 0, 1], [0, 0], [0, 1]], torch.bool)
    mask = mask.like(mask.values.bool())
    forgotten = Ragged.of([[0, 0, 4, 0, 0, 7, 0, 0, 0], [0, 0], [0, 0]])
    ctx = Context("segments", 0, 0, over="segments")
    made = contexts(ctx, tokens, mask, forgotten, most=4)
    measured = {name: (metric.value, metric.over) for name, metric in ctx.metrics.items()}
    assert measured == {
        "rollout/segments": (4 / 3, "samples"),
        "rollout/segments_min": (0, "samples"),
        "rollout/segments_max": (3, "samples"),
    }
    assert made.segment_tokens.tolist() == [
        [10, 11, 20, 21],
        [10, 11, 21, 30, 40, 41],
        [10, 11, 21, 30, 41, 50, 60],
        [5, 6],
    ]
    trained = [[0, 0, 1, 1], [0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0, 1], [0, 1]]
    assert made.segment_mask.tolist() == [[bool(each) for each in row] for row in trained]
    assert made.segment_count.tolist() == [3, 0, 1]
    values = tokens.like(tokens.values.float())
    repeated = values.take(torch.tensor([0, 0, 0, 2]))
    there = align(repeated, made.segment_places, made.segment_mask)
    assert there.tolist()[1] == [0, 0, 0, 0, 40, 41] and there.tolist()[3] == [0, 6]


def test_a_balanced_layout_keeps_a_sample_in_one_mini_batch() -> None:
    number = np.arange(10).repeat([0, 3, 1, 0, 2, 6, 1, 0, 0, 4])
    work = np.arange(len(number)) + 5
    held = layouts.balanced(work, 3, 4, number, 10)
    assert sorted(np.concatenate(held).tolist()) == [*range(len(number))]
    for rows in held:  # in the order of their mini-batches
        assert (np.diff(number[rows] * 4 // 10) >= 0).all()


GRAPH = f"""\
graph: segmented
models:
  policy: {{path: model, optimizer: {{lr: 1e-3, warmup_steps: 100}}}}
nodes:
  prompts: {{op: data.prompts, files: [data.jsonl], batch: 5}}
  rollout:
    op: rollout.agent
    model: policy
    n: 4
    max_new_tokens: 60
    forgets: true
    loop: {{kind: "{HERE / "segment_ops.py"}:forgetful"}}
  advantages: {{op: advantage.grpo, in: {{rewards: trained}}}}
  segments: {{op: segment.contexts, most: 3}}
  trained: {{op: "{HERE / "segment_ops.py"}:trained"}}
  aligned: {{op: segment.align, in: {{values: advantages}}}}
  sampled: {{op: segment.align, in: {{values: rollout_logprobs}}}}
  old_logprobs: {{op: logprobs, model: policy, in: {{tokens: segment_tokens, loss_mask: segment_mask}}}}
  short: {{op: "{HERE / "segment_ops.py"}:short"}}
  update:
    op: update.policy
    model: policy
    minibatches: 2
    aggregate: seq-mean-token-mean
    loss: {{kind: ppo_clip}}
    in: {{tokens: segment_tokens, loss_mask: segment_mask, advantages: aligned, rollout_logprobs: sampled}}
schedule: {{iterations: 2}}
eval: {{every: 2, nodes: {{prompts: {{files: [data.jsonl], batch: 3}}}}, report: {{trained: trained}}}}
"""


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the graph, data, and a model that ends its turns."""
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "model", seed=0)
    ends = json.loads(Path("model/generation_config.json").read_text())
    ends["eos_token_id"] = [1, *range(8, 288, 8)]
    Path("model/generation_config.json").write_text(json.dumps(ends))
    rows = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
    Path("data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("segmented.yaml").write_text(GRAPH)


@pytest.mark.slow
@pytest.mark.usefixtures("in_folder")
@pytest.mark.parametrize("more", [(), ("update.rows=short",)])
def test_a_run_on_two_devices_is_that_on_one(
    run_on_devices: Callable[..., str], more: tuple[str, ...]
) -> None:
    runs, evaluated = [], []
    for devices in ("1", "2"):
        run_on_devices("segmented.yaml", *more, "--devices", devices, "--run-dir", devices)
        lines = [json.loads(line) for line in Path(devices, "metrics.jsonl").read_text().splitlines()]
        runs.append([line for line in lines if line["step"]])
        evaluated.append([line["eval/trained"] for line in lines if "eval/trained" in line])
    for one, two in zip(*runs, strict=True):
        # what the engine scores in a segment is what it sampled behind the tokens that it saw
        assert one["update/rollout_gap_max"] < 1e-5
        assert 0 < one["trained/none"] < 1 and one["update/grad_norm"] > 0
        assert 0 < one["rollout/forgot"] <= one["rollout/forgot_max"]
        assert one["rollout/segments"] == pytest.approx(one["trained/segments"])
        assert two["rollout/segments_max"] == one["rollout/segments_max"] <= 3
        for name in ("trained/segments", "trained/none", "update/loss", "update/grad_norm"):
            assert two[name] == pytest.approx(one[name], rel=2e-3, abs=1e-6), name
    # two optimizer steps an iteration, whatever the segments: the warm-up is that of steps 1, 2, and 3, 4
    rates = [line["update/lr"] for line in runs[1]]
    assert rates[1] - rates[0] == pytest.approx(2 * 1e-5)
    assert len(evaluated[0]) == 2 and evaluated[1] == pytest.approx(evaluated[0])


@pytest.mark.usefixtures("in_folder")
def test_more_segments_than_planned_end_the_run(run_on_devices: Callable[..., str]) -> None:
    said = run_on_devices("segmented.yaml", "segments.most=1", "--devices", "1", expect=1)
    assert "`segments` (rlgraph.nodes.score.segment:contexts) made 3 rows of row" in said
    assert "set: {segments.most: 3}, or more" in said


@pytest.mark.usefixtures("in_folder")
def test_rows_are_planned_as_expected_and_at_most() -> None:
    plan = compile_graph("segmented.yaml", ["segments.expected=1.5"], 1)
    assert workload(plan).rows["segments"] == 30
    assert "segments, 1.5 rows for each of samples expected, 3 at most" in lineage_text(
        plan, "segment_tokens"
    )


if __name__ == "__main__":
    forked(main, 2)
