"""Losses that add up: gradients are those of a reference in float64, and a run is one run on any devices.

Two ranks (this file as a script) compute every case of ``gradients``; so does this process.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import forked, launch

from rlgraph.nodes.loss.policy import reinforce, sft
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.nodes.update.update import policy_objective
from rlgraph.ops import Loss
from rlgraph.runtime.engines.decoder_layers import decoder_layers
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.fsdp.shards import gather_full
from rlgraph.runtime.engines.fsdp.terms import Term

pytestmark = pytest.mark.slow

CASES = range(6)
SAMPLES, EXAMPLES, VOCAB = 9, 2, 20
HOWS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
Row = dict[str, Any]  # sample, tokens, loss_mask, advantages


def drawn(case: int) -> dict[str, Any]:
    """The terms of a case: rows of samples, of none to three segments, and fewer of other data."""
    chance = random.Random(case)

    def mask(length: int) -> list[bool]:
        return [False] + [chance.random() < 0.5 for _ in range(length - 1)]

    def row(sample: int) -> Row:
        length = chance.randint(2, 12)
        ids = [chance.randrange(2, VOCAB) for _ in range(length)]
        numbers = [chance.gauss(0, 1) for _ in range(length)]
        return {"sample": sample, "tokens": ids, "loss_mask": mask(length), "advantages": numbers}

    own = [row(sample) for sample in range(SAMPLES) for _ in range(chance.randint(0, 3))]
    seen = [{**each, "loss_mask": mask(len(each["tokens"]))} for each in own]
    unseen = [{**each, "loss_mask": [False] * len(each["tokens"])} for each in own]
    others = [row(sample) for sample in range(EXAMPLES)]

    def term(rows: list[Row], total: int, loss: Any, weight: float) -> dict[str, Any]:
        told = {"how": chance.choice(HOWS), "merged": chance.random() < 0.5 and rows is not others}
        return {"rows": rows, "total": total, "loss": loss, "weight": weight, **told}

    return {
        "": term(own, SAMPLES, reinforce, 1.0),
        "seen": term(seen, SAMPLES, sft, 0.3),
        "unseen": term(unseen, SAMPLES, sft, 5.0),
        "examples": term(others, EXAMPLES, sft, 2.0),
        "again": term(others, EXAMPLES, reinforce, 0.1),
    }


def minibatches_of(case: int) -> int:
    return random.Random(case).randint(1, 4)


def objective(loss: Any, how: Any) -> Any:
    plain = policy_objective(Loss(loss, {}, {}), how, 0.0, "k3", 0.0, 7.0)

    def checked(batch: Any, totals: Any) -> Any:
        outside = ~batch["loss_mask"].values
        assert not any(batch[name].values[outside].any() for name in ("logprobs", "entropy"))
        return plain(batch, totals)

    return checked


def given(told: dict[str, Any], mine: list[int]) -> tuple[Any, ...]:
    """What a term hands to the engine of the rows with these places."""
    own = [told["rows"][place] for place in mine]
    kinds = {"tokens": torch.int64, "loss_mask": torch.bool, "advantages": torch.float32}
    columns = {name: Ragged.of([row[name] for row in own], kind) for name, kind in kinds.items()}
    numbers = torch.tensor([row["sample"] for row in own], dtype=torch.int64)
    return columns, objective(told["loss"], told["how"]), numbers, told["total"]


def gradients(path: str, case: int) -> dict[str, Any]:
    """Gradients of each mini-batch, metrics, and how often the first layer ran."""
    terms, chance, ranks = drawn(case), random.Random(-case), dist.get_world_size()
    settings = {"micro_tokens": chance.choice([12, 30, 1000]), "packing": chance.random() < 0.5}
    engine = FsdpEngine.of(path, optimizer={"lr": 1e-12}, reshard=chance.random() < 0.5, **settings)
    owners = {total: [chance.randrange(ranks) for _ in range(3 * SAMPLES)] for total in (SAMPLES, EXAMPLES)}
    found: list[dict[str, torch.Tensor]] = []
    step, forwards = engine._step, []

    def watched(sums: Any) -> None:
        own = [(n, p.grad) for n, p in engine.model.named_parameters() if p.grad is not None]
        found.append(
            {n: g.clone() for n, g in gather_full(own, engine.copy_group, layer_parts=engine.layer_parts)}
        )
        step(sums)

    engine._step = watched  # type: ignore[method-assign]
    decoder_layers(engine.model)[0].register_forward_hook(lambda *_: forwards.append(0))
    for name, told in reversed(terms.items()):
        mine = [p for p, r in enumerate(told["rows"]) if owners[told["total"]][p] == dist.get_rank()]
        how = {"merged": told["merged"], "weight": told["weight"]}
        if name:
            engine.join(name, Term(*given(told, mine), **how))
    metrics = engine.update(*given(told, mine), minibatches_of(case), **how)
    assert not engine.joined
    return {"gradients": found, "metrics": metrics, "forwards": len(forwards)}


def aggregated(told: dict[str, Any], losses: list[list[torch.Tensor]], sequences: int) -> torch.Tensor:
    """The sum of a mini-batch's losses per token, of each sequence, by its formula."""
    none = torch.zeros((), dtype=torch.float64)
    sums, counts = [sum(each, none) for each in losses], [len(each) for each in losses]
    if told["how"] == "seq-mean-token-mean":
        sums = [each / max(count, 1) for each, count in zip(sums, counts, strict=True)]
    by = {"token-mean": sum(counts), "token-sum": 1, "seq-mean-token-sum-norm": 7 * sequences}
    return sum(sums, none) / max(by.get(told["how"], sequences), 1)


def reference(path: str, case: int) -> tuple[list[dict[str, torch.Tensor]], dict[str, float]]:
    """The same gradients in float64, row by row, and the mean loss of each term."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    count, steps = minibatches_of(case), []
    means: dict[str, list[float]] = {}
    for number in range(count):
        model.zero_grad()
        for name, told in drawn(case).items():
            own = [row for row in told["rows"] if row["sample"] * count // told["total"] == number]
            numbers = [n for n in range(told["total"]) if n * count // told["total"] == number]
            several: dict[int, list[torch.Tensor]] = {n: [] for n in numbers} if told["merged"] else {}
            for place, row in enumerate(own):
                scores = model(torch.tensor([row["tokens"]])).logits[0].log_softmax(-1)
                losses = several.setdefault(row["sample"] if told["merged"] else place, [])
                for at in (at for at, trained in enumerate(row["loss_mask"]) if trained):
                    factor = row["advantages"][at] if told["loss"] is reinforce else 1.0
                    losses.append(-factor * scores[at - 1, row["tokens"][at]])
            loss = aggregated(told, [*several.values()], len(several))
            if any(several.values()):
                (told["weight"] * loss).backward()
                means.setdefault(name, []).append(loss.item())
        own = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        steps += [own] if any(grad.any() for grad in own.values()) else []
    return steps, {name: sum(each) / len(each) for name, each in means.items()}


def main(rank: int, root: Path, path: str) -> None:
    torch.save({case: gradients(path, case) for case in CASES}, root / f"rank-{rank}.pt")


@pytest.fixture(scope="module")
def model(demo_files: Path) -> str:
    return str(demo_files / "demo_files/model")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, model: str) -> dict[int, Any]:
    root = tmp_path_factory.mktemp("terms")
    launch(__file__, root, model)
    return torch.load(root / "rank-1.pt")


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_all_terms(
    case: int, model: str, one_rank: None, two_ranks: dict[int, Any]
) -> None:
    wanted, means = reference(model, case)
    for found in (gradients(model, case), two_ranks[case]):
        assert len(found["gradients"]) == len(wanted) > 0
        for mine, theirs in zip(found["gradients"], wanted, strict=True):
            scale = torch.stack([each.norm() for each in theirs.values()]).norm()
            for name, each in theirs.items():
                error = (mine[name].double() - each).norm() / scale
                assert error < 1e-5, (name, error)
        for name, mean in means.items():
            loss = found["metrics"][f"{name}/loss".removeprefix("/")]
            assert loss == pytest.approx(mean, rel=1e-4, abs=1e-6), name
        own = {name.partition("/")[2] for name in found["metrics"] if name.startswith("examples/")}
        assert "loss" in own and not {"grad_norm", "lr", "skipped"} & own


def test_terms_on_the_same_rows_take_one_pass(model: str, one_rank: None) -> None:
    forwards = {}
    engine = FsdpEngine.of(model, optimizer={"lr": 1e-12})
    decoder_layers(engine.model)[0].register_forward_hook(lambda *_: counted.append(0))
    terms = drawn(0)
    for joining in ((), ("seen",), ("seen", "unseen"), ("examples",), ("examples", "again", "seen")):
        counted: list[int] = []
        for name in joining:
            engine.join(name, Term(*given(terms[name], [*range(len(terms[name]["rows"]))])))
        engine.update(*given(terms[""], [*range(len(terms[""]["rows"]))]))
        forwards[joining] = len(counted)
    assert forwards == {(): 1, ("seen",): 1, ("seen", "unseen"): 1, ("examples",): 2, (*joining,): 2}
    other = Term(*given(terms["seen"], [*range(len(terms["seen"]["rows"]))]), temperature=0.5)
    counted = []
    engine.join("seen", other)
    engine.update(*given(terms[""], [*range(len(terms[""]["rows"]))]))
    assert len(counted) == 2  # another temperature: other log-probs


if __name__ == "__main__":
    forked(main, 2)
