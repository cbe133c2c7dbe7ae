"""What holds for each family, tried on tiny random models: the table of docs/models.md (``--bless``).

A trial that returns is a yes; one that is refused says so with the family's name. Anything else fails. As a
script: two ranks that share the tokens of their rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import build, expected, family_of, objective, plain, scored
from ranks import at_night, cases_asked, forked, launch
from safetensors.torch import load_file

from model_table import REFUSED, ROWS, YES, Cell, compare
from rlgraph.costs.model_size import size_of
from rlgraph.errors import GraphError
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Request, Sampling, Totals
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.fsdp.packing import packs
from rlgraph.runtime.engines.sequence.groups import sequence_group
from rlgraph.runtime.engines.transformers.engine import TransformersEngine

ADAM: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3, "max_grad_norm": 1e9, "weight_decay": 0.1}
STEPS = 3
LABELS = at_night([(label,) for label in ROWS], ("Llama", "Qwen3", "Qwen3-MoE"))
NEAR: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
WEIGHTS: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-4}  # behind several steps
PROMPTED = Ragged.of(
    [[5, 6, 7, 8, 9, 10, 3, 4], [5, 6, 7, 8, 2, 3], [5, 6, 7, 8, 9, 9, 9, 1, 2], [1, 2, 3, 4]]
)
BESIDE = "beside"  # rows are not packed: each lies beside the others, and reads its prompt itself


def continued(rows: Ragged) -> dict[str, Ragged]:
    """Rows as columns; what follows their first four tokens, or two, is scored."""
    mask = [[t >= min(4, n // 2) for t in range(n)] for n in rows.lengths.tolist()]
    return {"tokens": rows, "loss_mask": Ragged.of(mask, torch.bool)}


def trained(path: Path, **settings: Any) -> FsdpEngine:
    """An engine after some steps; packing, where it can be, costs nothing."""
    engine = FsdpEngine.of(str(path), optimizer=ADAM, **settings)
    if engine.budget.share is not None:
        engine.budget = replace(engine.budget, share=0.0)
    engine.update(scored(), objective, torch.arange(3), 3, epochs=STEPS)
    return engine


def plainly_trained(path: Path) -> dict[str, torch.Tensor]:
    """Weights after the same steps of plain torch, row by row."""
    model = plain(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (-expected(model).sum() / scored()["loss_mask"].values.sum()).backward()
        optimizer.step()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def trains_alike(path: Path, **settings: Any) -> None:
    engine = trained(path, **settings)
    wanted = plainly_trained(path)
    found = dict(engine._full())
    torch.testing.assert_close(found, {name: wanted[name] for name in found}, **WEIGHTS)
    first = load_file(path / "model.safetensors")
    still = [name for name, tensor in engine.weights() if (tensor - first[name]).abs().max() < 1e-4]
    assert all(name.endswith("correction_bias") for name in still)  # it is no parameter


def log_probs(path: Path, _: Path) -> None:
    """In float32 those of a plain forward of each row; in bfloat16 as near to them as transformers is."""
    with torch.no_grad():
        wanted = expected(plain(path))
        rounded = expected(plain(path).bfloat16()).float()
    found = FsdpEngine.of(str(path), frozen=True).logprobs(**scored()).values
    torch.testing.assert_close(found, wanted, **NEAR)
    narrow = FsdpEngine.of(str(path), optimizer=ADAM, dtype="bfloat16").logprobs(**scored()).values
    assert (narrow - wanted).abs().mean() < 2 * (rounded - wanted).abs().mean() + 0.01


def update(path: Path, _: Path) -> None:
    trains_alike(path)


def recompute(path: Path, _: Path) -> None:
    trains_alike(path, recompute=True)


def packing(path: Path, _: Path) -> str:
    """Rows of one pass, packed or beside each other, are scored as each is alone, and train alike."""
    engine, beside = (FsdpEngine.of(str(path), optimizer=ADAM, packing=packing) for packing in (True, False))
    if engine.budget.share is not None:
        engine.budget = replace(engine.budget, share=0.0)
    columns, rows = continued(PROMPTED), torch.arange(len(PROMPTED))
    alone = [expected_of(path, row) for row in PROMPTED.tolist()]
    mask = columns["loss_mask"].values
    for one in engine, beside:
        torch.testing.assert_close(one.logprobs(**columns).values[mask], torch.cat(alone)[mask], **NEAR)
        one.update(columns, objective, rows, len(rows), epochs=STEPS)
    torch.testing.assert_close(dict(engine.weights()), dict(beside.weights()), **WEIGHTS)
    return YES if packs(engine.model) else BESIDE


def expected_of(path: Path, row: list[int]) -> torch.Tensor:
    ids = torch.tensor([row])
    with torch.no_grad():
        log_p = torch.log_softmax(plain(path)(ids).logits[0, :-1], -1)
    return torch.cat([torch.zeros(1), log_p.gather(1, ids[0, 1:, None]).squeeze(1)])


def lora(path: Path, root: Path) -> None:
    """Adapters train; merged, or by peft beside the model that they began from, they score as here."""
    from peft import PeftModel

    engine = FsdpEngine.of(
        str(path), optimizer={"lr": 1e-2}, lora={"rank": 2, "alpha": 4, "targets": "all-linear"}
    )
    engine.update(scored(), objective, torch.arange(3), 3, epochs=2)
    engine.export(str(root / "adapted"))
    wanted = engine.logprobs(**scored()).values
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by an older name
        beside = PeftModel.from_pretrained(plain(path), root / "adapted" / "adapter")
    with torch.no_grad():
        for model in plain(root / "adapted"), beside:
            torch.testing.assert_close(expected(model), wanted, **NEAR)
        assert not torch.allclose(expected(plain(path)), wanted, atol=1e-3)


def value_head(path: Path, _: Path) -> None:
    critic = FsdpEngine.of(str(path), head="value", optimizer=ADAM, seed=3)
    weights = dict(critic.weights())
    (head,) = (weights[name] for name in ("score.weight", "classifier.weight") if name in weights)
    bias = weights.get("score.bias", weights.get("classifier.bias", torch.zeros(1)))
    model = plain(path).base_model
    with torch.no_grad():
        rows = [model(torch.tensor([row])).last_hidden_state[0] for row in scored()["tokens"].tolist()]
    wanted = torch.cat([hidden @ head.T + bias for hidden in rows])
    places = scored()["loss_mask"].values.nonzero().squeeze(1)
    found = critic.values(**scored()).values
    torch.testing.assert_close(found[places], wanted[places - 1, 0], **NEAR)
    critic.update(scored(), towards_one, torch.arange(3), 3)
    assert (critic.values(**scored()).values - found).abs().max() > 1e-3


def towards_one(batch: dict[str, Any], totals: Totals) -> tuple[torch.Tensor, dict[str, Any]]:
    return (batch["new_values"].values - 1).square().sum() / totals.tokens, {}


def embedded(path: Path, _: Path) -> None:
    """The embedded engine says of its tokens what the train engine says, before and after an update."""
    engine = FsdpEngine.of(str(path), optimizer=ADAM)
    serve = TransformersEngine(str(path), max_rows=2)
    prompts = [[5, 6, 7], [3, 4] * 3, [9, 8]]
    for version in range(2):
        serve.load_weights(engine.weights(), version)
        asked = [Request(prompt, [1, 2]) for prompt in prompts]
        answers = serve.generate(asked, Sampling(8))
        both = [(prompt, one) for prompt, many in zip(prompts, answers, strict=True) for one in many]
        tokens = Ragged.of([[*prompt, *one.tokens] for prompt, one in both])
        mask = Ragged.of([[False] * len(p) + [True] * len(one.tokens) for p, one in both], torch.bool)
        own = torch.tensor([logprob for _, one in both for logprob in one.logprobs])
        found = engine.logprobs(tokens, mask).values[mask.values]
        torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-4)
        engine.update(scored(), objective, torch.arange(3), 3)


def names(path: Path, _: Path) -> None:
    """Weights have the names, shapes and numbers of the checkpoint, bit for bit."""
    engine = FsdpEngine.of(str(path), optimizer=ADAM)
    torch.testing.assert_close(dict(engine.weights()), load_file(path / "model.safetensors"), rtol=0, atol=0)


def export(path: Path, root: Path) -> None:
    engine = trained(path)
    engine.export(str(root / "exported"))
    with torch.no_grad():
        again = expected(plain(root / "exported"))
    torch.testing.assert_close(engine.logprobs(**scored()).values, again, **NEAR)
    before, after = (load_file(folder / "model.safetensors") for folder in (path, root / "exported"))
    assert {name: tensor.shape for name, tensor in before.items()} == {n: t.shape for n, t in after.items()}


def size(path: Path, _: Path) -> None:
    """The tensors from which plans predict memory and time are those of the model."""
    assert size_of(str(path)).parameters == sum(p.numel() for p in plain(path).parameters())


TRIALS: dict[str, Callable[[Path, Path], str | None]] = {
    "log-probs": log_probs,
    "update": update,
    "packing": packing,
    "recompute": recompute,
    "LoRA": lora,
    "value head": value_head,
    "embedded": embedded,
    "names": names,
    "export": export,
    "size": size,
}
SHARED = "sequence parallel"


def refusal(name: str, error: Exception) -> Cell:
    """The cell of what is refused: the message has the family's name and says what to do."""
    said = str(error).splitlines()[0]
    law = said[max(said.find(f"{family_of(name)}: "), 0) :]
    assert law.startswith(f"{family_of(name)}: ") and "; " in law, f"this refusal is no help: {error}"
    return REFUSED, law


def outcome(name: str, trial: Callable[..., str | None], *arguments: Any) -> Cell:
    try:
        return trial(*arguments) or YES, ""
    except (ValueError, GraphError) as error:
        return refusal(name, error)


@pytest.mark.slow
@pytest.mark.parametrize("label", LABELS)
def test_the_page_says_what_holds(
    one_rank: None, tmp_path: Path, label: str, request: pytest.FixtureRequest
) -> None:
    path = build(tmp_path, ROWS[label])
    found = {column: outcome(ROWS[label], trial, path, tmp_path) for column, trial in TRIALS.items()}
    compare(label, found, request.config.getoption("--bless"))


def shared(path: Path, group: Any) -> tuple[Any, Any]:
    """Scores of the rows before, and weights after training on two ranks that share their tokens."""
    engine = FsdpEngine.of(str(path), optimizer=ADAM, sequence=group, recompute=True)
    rows = [torch.tensor([0, 1]), torch.tensor([2])][group.rank]
    columns = {name: column.take(rows) for name, column in scored().items()}
    scores = engine.logprobs(**columns).tolist()
    engine.update(columns, objective, rows, 3, epochs=STEPS)
    return dict(zip(rows.tolist(), scores, strict=True)), dict(engine._full())


def main(rank: int, root: Path, *names: str) -> None:
    warnings.simplefilter("error")
    group = sequence_group(dist.group.WORLD, 2)
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = shared(root / name, group)
        except ValueError as error:
            found[name] = str(error)
    torch.save(found, root / f"rank-{rank}.pt")


@pytest.fixture(scope="module")
def two_ranks(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Path, list[Any]]:
    root, names = tmp_path_factory.mktemp("families"), {ROWS[one] for one in cases_asked(request, "label")}
    for name in names:
        build(root, name)
    launch(__file__, root, *names)
    return root, [torch.load(root / f"rank-{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("label", LABELS)
def test_the_page_says_where_ranks_share_tokens(
    two_ranks: tuple[Path, list[Any]], label: str, request: pytest.FixtureRequest
) -> None:
    root, ranks = two_ranks
    first, second = (rank[ROWS[label]] for rank in ranks)

    def alike() -> None:
        if isinstance(first, str):
            raise ValueError(first)
        with torch.no_grad():
            wanted = scored()["tokens"].like(expected(plain(root / ROWS[label]))).tolist()
        found = dict(sorted((first[0] | second[0]).items()))
        torch.testing.assert_close(found, dict(enumerate(wanted)), **NEAR)
        weights = plainly_trained(root / ROWS[label])
        torch.testing.assert_close(first[1], {name: weights[name] for name in first[1]}, **WEIGHTS)
        torch.testing.assert_close(first[1], second[1], rtol=0, atol=0)

    compare(label, {SHARED: outcome(ROWS[label], alike)}, request.config.getoption("--bless"))


if __name__ == "__main__":
    forked(main, 2)
