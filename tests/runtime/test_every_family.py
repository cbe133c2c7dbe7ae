"""Every family of the installed transformers, tiny: scored, trained and sampled from as transformers itself
does, or refused by name before anything starts: the second table of docs/models.md (``--bless``).

What is compared is a plain forward of each row alone, in float32, within 1e-5.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from every_family import build, decoders
from families import objective
from transformers import __version__

from family_page import Row, compare_row, listed_rows
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Request, Sampling
from rlgraph.runtime.engines.fsdp import preflight
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.fsdp.packing import packs
from rlgraph.runtime.engines.model_files import ModelFiles
from rlgraph.runtime.engines.transformers import load
from rlgraph.runtime.engines.transformers.engine import TransformersEngine
from rlgraph.syntax.model_settings import Train

pytestmark = pytest.mark.nightly
NEAR: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
WEIGHTS: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}  # behind an optimizer's step
ADAM: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3, "max_grad_norm": 1e9, "weight_decay": 0.1}
# prompts that samples share, of lengths beyond every window, and one that has none beside it
SHARED = [5, 6, 7, 8, 9, 10, 3, 4, 11, 12]
ROWS = [[*SHARED, 13, 14], [*SHARED, 3, 3, 21, 22], [*SHARED, 30], [4, 5, 6, 1, 2], [9, 8, 7, 6, 5, 4, 3]]
PROMPT = [10, 10, 10, 2, 3]
PROMPTS = [[5, 6, 7, 8, 9, 10, 3, 4, 11, 12, 13], [5, 6, 7], [9, 8, 7, 6, 5, 4]]
KINDS = decoders()


def columns(rows: list[int]) -> dict[str, Ragged]:
    mask = [[place >= PROMPT[row] for place in range(len(ROWS[row]))] for row in rows]
    return {"tokens": Ragged.of([ROWS[row] for row in rows]), "loss_mask": Ragged.of(mask, torch.bool)}


def log_probs(model: Any, row: list[int]) -> torch.Tensor:
    """Of all tokens but the first, by a plain forward of the row alone."""
    ids = torch.tensor([row])
    log_p = torch.log_softmax(model(ids, use_cache=False).logits[0, :-1].float(), -1)
    return log_p.gather(1, ids[0, 1:, None]).squeeze(1)


def wanted(model: Any) -> list[torch.Tensor]:
    return [log_probs(model, row)[prompt - 1 :] for row, prompt in zip(ROWS, PROMPT, strict=True)]


def engine_of(path: Path, packing: bool) -> FsdpEngine:
    engine = FsdpEngine.of(str(path), optimizer=ADAM, packing=packing)
    if engine.budget.share is not None:
        engine.budget = replace(engine.budget, share=0.0)  # packed, however little that saves
    return engine


def scores(engine: FsdpEngine, rows: list[int]) -> torch.Tensor:
    batch = columns(rows)
    return engine.logprobs(**batch).values[batch["loss_mask"].values]


def trains(path: Path, model: Any) -> str:
    """Rows alone, beside each other, packed and with shared prompts; then one step of AdamW."""
    with torch.no_grad():
        expected = wanted(model)
    every = [*range(len(ROWS))]
    packed, beside = engine_of(path, True), engine_of(path, False)
    for engine in packed, beside:
        for row in every:
            torch.testing.assert_close(scores(engine, [row]), expected[row], **NEAR)
        torch.testing.assert_close(scores(engine, every), torch.cat(expected), **NEAR)
        engine.update(columns(every), objective, torch.arange(len(ROWS)), len(ROWS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)
    rows = torch.cat(wanted(model))
    (-rows.sum() / len(rows)).backward()
    optimizer.step()
    after = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for engine in packed, beside:
        found = dict(engine._full())
        torch.testing.assert_close(found, {name: after[name] for name in found}, **WEIGHTS)
    return "packed" if packs(packed.model) else "beside"


def samples(path: Path, model: Any) -> str:
    """What the embedded engine draws beside each other has the log-probs of each row alone."""
    engine = TransformersEngine(str(path))
    engine.load_pretrained()
    requests = [Request(prompt, [row, row + 9]) for row, prompt in enumerate(PROMPTS)]
    made = engine.generate(requests, Sampling(6))
    with torch.no_grad():
        for prompt, drawn in zip(PROMPTS, made, strict=True):
            for one in drawn:
                expected = log_probs(model, [*prompt, *one.tokens])[len(prompt) - 1 :]
                torch.testing.assert_close(torch.tensor(one.logprobs), expected, **NEAR)
    return "yes"


def refusal(kind: str, law: str) -> str:
    """The reason of what is refused: it has the family's name and says what to do."""
    said = " ".join(law.split())
    assert said.startswith(f"{kind}: ") and "; " in said, f"this refusal is no help: {said}"
    return said.removeprefix(f"{kind}: ")


def sees_later_tokens(model: Any) -> bool:
    """Whether a later token changes what is said of those before it."""
    with torch.no_grad():
        first, other = (
            model(torch.tensor([[*SHARED, last]]), use_cache=False).logits[0, :-2] for last in (3, 4)
        )
    return bool((first - other).abs().max() > 1e-4)


def tried(kind: str, path: Path, model: Any) -> Row:
    files = ModelFiles(str(path))
    why: list[str] = []

    def outcome(law: str, trial: Callable[[Path, Any], str]) -> str:
        if law:
            why.append(refusal(kind, law))
            return "refused"
        assert not sees_later_tokens(model), f"{kind} reads later tokens, and is not refused"
        return trial(path, deepcopy(model))

    trained = outcome(preflight.unfit(files, "lm", Train()), trains)
    embedded = outcome(load.unfit(files.config()), samples)
    return Row(kind, trained, embedded, tuple(dict.fromkeys(why)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_family_is_what_transformers_makes_of_it_or_refused(
    one_rank: None, tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of rare families are transformers' own
        try:
            path, model = build(tmp_path, kind)
        except Exception as error:
            row = Row(kind, "not built", "not built", (" ".join(str(error).split())[:80],))
        else:
            row = tried(kind, path, model)
    compare_row(row, request.config.getoption("--bless"))


def test_the_page_lists_the_families_of_this_transformers() -> None:
    version, kinds = listed_rows()
    assert version == __version__
    assert kinds == sorted(KINDS)
