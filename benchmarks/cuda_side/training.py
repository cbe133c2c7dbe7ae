"""The train engine: updates, log-probs, the head, the optimizer, and memory against its prediction."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from benchmarks.cuda_side.bench import BIG, WHOLE, Bench, Record, Records

from rlgraph.compiler import compile_graph
from rlgraph.costs import limits
from rlgraph.costs.detect import load_cluster
from rlgraph.costs.memory import Footprint
from rlgraph.costs.model_size import size_of
from rlgraph.costs.pricing import sizes_of
from rlgraph.costs.workload import workload
from rlgraph.lengths import Lengths
from rlgraph.nodes.support.ragged import Ragged, offsets_of
from rlgraph.ops import Totals
from rlgraph.runtime.engines.fsdp import scoring
from rlgraph.runtime.engines.fsdp.batching import micro_batches
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine

PROMPT, GROUP = 256, 8  # tokens of a prompt, and samples that share it
LENGTHS = ("exponential", "uniform", "one long row")
CHUNKS = (2**26, 2**27, 2**28, 2**29)


@dataclass(frozen=True)
class Rows:
    """Samples to train on: columns as the runtime gives them, on the host."""

    columns: Mapping[str, Any]

    @property
    def lengths(self) -> torch.Tensor:
        """int64 ``[samples]``."""
        found: torch.Tensor = self.columns["tokens"].lengths
        return found

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def squares(self) -> int:
        """The sum of squared lengths, which attention's work follows."""
        return int(self.lengths.square().sum())


def rows(bench: Bench, kind: str, total: int, seed: int) -> Rows:
    """About ``total`` tokens of a kind of lengths, of random ids; the lengths are the same for every seed."""
    prompt, vocabulary = bench.size(PROMPT, 16), bench.size(151936, 512)
    draw = torch.Generator().manual_seed(seed)
    parts, masks = [], []
    left = total
    for responses in _groups(kind, total - prompt, bench.size(512, 32)):
        shared = torch.randint(3, vocabulary, (prompt,), generator=draw)
        for length in responses:
            if left < prompt + length:
                return _rows(parts, masks, draw)
            left -= prompt + length
            parts.append(torch.cat([shared, torch.randint(3, vocabulary, (length,), generator=draw)]))
            masks.append(torch.arange(prompt + length) >= prompt)
    return _rows(parts, masks, draw)


def _groups(kind: str, longest: int, mean: int) -> Iterator[list[int]]:
    """Response lengths of one prompt's samples after another's; of the long row, one row."""
    draw = torch.Generator().manual_seed(7)
    while kind != "one long row":
        u = torch.rand(GROUP, generator=draw)
        lengths = -mean * u.log() if kind == "exponential" else 2 * mean * u
        yield [min(longest, 1 + int(length)) for length in lengths]
    yield [longest]


def _rows(parts: Sequence[torch.Tensor], masks: Sequence[torch.Tensor], draw: torch.Generator) -> Rows:
    tokens = Ragged(torch.cat(list(parts)), offsets_of(torch.tensor([len(part) for part in parts])))
    advantages = tokens.like(torch.randn(len(tokens.values), generator=draw))
    mask = tokens.like(torch.cat(list(masks)))
    return Rows({"tokens": tokens, "loss_mask": mask, "advantages": advantages})


def objective(batch: Mapping[str, Any], totals: Totals) -> tuple[torch.Tensor, dict[str, Any]]:
    """Policy gradient: minus the log-probs times advantages, as a mean over tokens."""
    return -(batch["logprobs"].values * batch["advantages"].values).sum() / totals.tokens, {}


def update(engine: FsdpEngine, given: Rows) -> None:
    """One optimizer step on all rows."""
    count = len(given.lengths)
    engine.update(given.columns, objective, torch.arange(count), count)


def updates(bench: Bench) -> Records:
    """Updates and log-probs of each kind of lengths, packed and beside, with layers recomputed."""
    micro = bench.size(16384, 512)
    with bench.engine(BIG, micro_tokens=micro, recompute=True) as engine:
        for kind in LENGTHS:
            for packing in (True, False):
                yield from _both(bench, engine, BIG, kind, 2 * micro, packing, "recomputed", ">= 0.38")
        engine.budget = replace(engine.budget, tokens=2 * micro)
        yield from _both(bench, engine, BIG, "one long row", 2 * micro, False, "recomputed, 32k", ">= 0.38")


def kept(bench: Bench) -> Records:
    """An update whose activations are kept rather than computed again."""
    micro = bench.size(8192, 512)
    with bench.engine(BIG, micro_tokens=micro) as engine:
        yield from _both(bench, engine, BIG, "exponential", 2 * micro, False, "kept", ">= 0.38")


def compiled(bench: Bench) -> Records:
    """An update whose layers torch.compile has made."""
    micro = bench.size(16384, 512)
    with bench.engine(BIG, micro_tokens=micro, recompute=True, compile=True) as engine:
        for packing in (True, False):
            yield from _both(bench, engine, BIG, "exponential", 2 * micro, packing, "compiled", ">= 0.43")


def whole(bench: Bench) -> Records:
    """A whole small model, where launches weigh more."""
    micro = bench.size(16384, 512)
    with bench.engine(WHOLE, micro_tokens=micro, recompute=True) as engine:
        yield from _both(bench, engine, WHOLE, "exponential", 2 * micro, True, "recomputed", ">= 0.38")


def _both(
    bench: Bench,
    engine: FsdpEngine,
    name: str,
    kind: str,
    total: int,
    packing: bool,
    how: str,
    want: str,
) -> Records:
    """The utilisation of an update and of a log-prob pass on the same rows."""
    before = engine.budget
    engine.budget = before if packing else replace(before, share=None)
    draws = iter([rows(bench, kind, total, seed) for seed in range(12)])
    label = f"{name}, {kind}, {'packed' if packing else 'beside'}, {how}"
    given = rows(bench, kind, total, 0)
    passes = len(micro_batches(given.columns, engine.budget, engine.device))
    work = {"model": name, "tokens": given.tokens, "squares": given.squares, "passes": passes}
    taken = bench.seconds(lambda: update(engine, next(draws)), repeats=3, warm=2)
    bench.found[f"update of {name}"] = given.tokens / taken
    work |= {"factor": 4 if "recomputed" in how or how == "compiled" else 3}
    yield _utilisation(bench, engine, f"update: {label}", 3, taken, {"kind": "update", **work}, want)
    taken = bench.seconds(lambda: score(engine, next(draws)), repeats=3, warm=1)
    yield _utilisation(bench, engine, f"log-probs: {label}", 1, taken, {"kind": "score", **work}, ">= 0.45")
    engine.budget = before


def score(engine: FsdpEngine, given: Rows) -> None:
    """The log-probs of all rows."""
    engine.logprobs(given.columns["tokens"], given.columns["loss_mask"])


def _utilisation(
    bench: Bench, engine: FsdpEngine, label: str, passes: int, taken: float, work: dict[str, Any], want: str
) -> Record:
    """FLOPs that the model needs, without those computed again, per second, against the device's peak."""
    size = size_of(engine.path)
    flops = passes * (2 * size.multiplied * work["tokens"] + size.attention_flops(1) * work["squares"])
    work |= {"seconds": taken, "config": size.config.model_dump(exclude_defaults=True)}
    return Record(label, flops / taken, "FLOP/s", "the device's peak", bench.peak, want, work)


def head(bench: Bench) -> Records:
    """What the head's chunks take of an update of so many tokens, forward and backward."""
    tokens, before = bench.size(16384, 256), limits.LOGITS
    if f"update of {BIG}" not in bench.found:
        raise RuntimeError("head is held against what updates found: measure them too")
    whole, model = tokens / bench.found[f"update of {BIG}"], _head_alone(bench)
    try:
        for chunk in CHUNKS:
            limits.LOGITS = chunk // bench.size(1, 2**12)
            taken = bench.seconds(lambda: _head_pass(bench, model, tokens), repeats=3, warm=1)
            label = f"head: chunks of 2^{chunk.bit_length() - 1}"
            yield Record(label, taken, "s", "an update", whole, "<= 0.05")
    finally:
        limits.LOGITS = before


def _head_alone(bench: Bench) -> Any:
    """The model, of which the head alone trains."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(bench.model(BIG), dtype=torch.bfloat16)
    del model.model.layers[1:]
    model.model.requires_grad_(False)
    return model.to(bench.device)


def _head_pass(bench: Bench, model: Any, tokens: int) -> None:
    """Scores of random hidden states, and their gradients."""
    vocabulary = model.config.vocab_size
    made = torch.randn(tokens, model.config.hidden_size, device=bench.device, dtype=torch.bfloat16)
    labels = torch.randint(vocabulary, (tokens,), device=bench.device)
    logprobs, _ = scoring._scores(model, made.requires_grad_(), 1.0, "detached", labels)
    logprobs.sum().backward()


def optimizer(bench: Bench) -> Records:
    """AdamW's step reads weight, gradient and two averages and writes three: 28 bytes per weight."""
    with bench.engine(BIG) as engine:
        assert engine.optimizer is not None
        for parameter in engine.parameters:
            parameter.grad = torch.randn_like(parameter)
        count = sum(parameter.numel() for parameter in engine.parameters)
        taken = bench.seconds(engine.optimizer.step, repeats=3, warm=2)
        rate = 28 * count / taken
        work = {"kind": "optimizer", "share": "memory"}
        yield Record("optimizer: AdamW", rate, "B/s", "a copy", bench.found["copy"], ">= 0.8", work)


def peaks(bench: Bench) -> Records:
    """The most memory of an update and of a log-prob pass against what the plan counts for it."""
    micro = bench.size(16384, 512)
    for recompute in (True, False):
        tokens = micro if recompute else micro // 4
        with bench.engine(BIG, micro_tokens=tokens, recompute=recompute) as engine:
            given = rows(bench, "one long row", tokens, 0)
            engine.budget = replace(engine.budget, share=None)
            for name, act in (("update", update), ("log-probs", score)):
                update(engine, given)  # so that the optimizer's averages are there
                bench.clear()
                held = _peak(bench, engine, partial(act, engine, given))
                how = "recomputed" if recompute else "kept"
                label = f"peak: {name}, {tokens} tokens, {how}"
                predicted = _predicted(engine, tokens, recompute, name == "update")
                yield Record(f"{label}, allocated", held[0], "B", "predicted", predicted, "<= 1.02")
                yield Record(f"{label}, reserved", held[1], "B", "allocated", held[0], "<= 1.1")


def _peak(bench: Bench, engine: FsdpEngine, act: Any) -> tuple[float, float]:
    """The most bytes allocated and reserved meanwhile; on a CPU those of the process."""
    if not bench.is_cuda:
        act()
        most = 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most, most
    torch.cuda.reset_peak_memory_stats()
    act()
    return float(torch.cuda.max_memory_allocated()), float(torch.cuda.max_memory_reserved())


def _predicted(engine: FsdpEngine, tokens: int, recompute: bool, trains: bool) -> float:
    """Bytes that a plan counts for a train engine: what it holds, and one row of so many tokens."""
    settings = {"micro_tokens": tokens, "recompute": recompute, "packing": False, "dtype": "bfloat16"}
    pairs = [f"models.policy.train.{name}={json.dumps(value)}" for name, value in settings.items()]
    pairs += [f"models.{name}.path={engine.path}" for name in ("policy", "ref")]
    plan = compile_graph(
        "grpo", [*pairs, "update_policy.minibatches=2"], 1
    )  # so that old log-probs are there
    work = replace(workload(plan), longest_prompt=0.0, responses=Lengths(tokens, tokens), rows={})
    footprint = Footprint(plan, load_cluster("h100-8"), work, sizes_of(plan))
    held = sum(
        size
        for item, size in footprint.items("main").items()
        if (item.model, item.engine) == ("policy", "train")
    )
    (step,) = [
        step
        for step in plan.steps
        if step.run and step.run.engine == "train" and "policy" in step.models and step.run.updates == trains
    ]
    return float(held + footprint.transient("main", step).total())
