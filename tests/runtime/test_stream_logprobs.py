"""Where generation streams, log-probs are those of the weights that drew each token, whenever it is used."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen2ForCausalLM

from rlgraph.nodes.support.record_file import read, step_folder
from rlgraph.runtime.export import export
from rlgraph.runtime.run import run_graph

HERE = Path(__file__).parent
STALENESS, ITERATIONS = 3, 6
GRAPH = str(HERE / "learned.yaml")
SCHEDULE = {"iterations": ITERATIONS, "save_every": 1, "keep": ITERATIONS, "record_every": 1}
COLUMNS = ("tokens", "loss_mask", "rollout_logprobs", "token_versions")


@pytest.mark.slow
@pytest.mark.usefixtures("in_demo")
def test_a_token_has_the_log_prob_of_the_version_that_drew_it_at_any_age() -> None:
    settings = [f"schedule.{key}={value}" for key, value in SCHEDULE.items()]
    settings += [f"schedule.buffer.staleness={STALENESS}", "rollout.chunk=5"]
    run_graph(GRAPH, settings, inline=True, run_dir=Path("run"))
    of_version = [scorer(version) for version in range(ITERATIONS)]
    ages, mixed, moved = set[int](), 0, list[float]()
    for now in range(ITERATIONS):
        path = step_folder(Path("run"), now + 1) / "samples.finished.parquet"
        columns = read(path, ("old_logprobs", *(f"{name}/finished" for name in COLUMNS)))
        old, *drawn = (np.split(each.values, each.offsets[1:-1]) for each in columns.values())
        for tokens, mask, measured, versions, proximal in zip(*drawn, old, strict=True):
            scored = np.stack([score(tokens) for score in of_version])
            at = np.flatnonzero(mask)
            np.testing.assert_allclose(measured[at], scored[versions[at], at], atol=1e-4)
            np.testing.assert_allclose(proximal[at], scored[now, at], atol=1e-4)
            ages |= {*(now - versions[at]).tolist()}
            mixed += len({*versions[at]}) > 1
            moved += np.abs(scored[now] - measured)[at[versions[at] < now]].tolist()
    assert ages == {*range(STALENESS + 1)} and mixed
    assert np.median(moved) > 0.01, "weights of another version would do as well"


def scorer(version: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return what gives the log-prob of each token after those before it, by the weights of a version."""
    folder = Path("demo") / f"{version}"
    if version:
        export(Path("run"), folder, checkpoint=f"step-{version:06d}")
    start = Path(os.environ["RLGRAPH_TEST_FILES"]) / "model"
    model = Qwen2ForCausalLM.from_pretrained(folder if version else start)

    def score(tokens: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            logits = model(torch.tensor(tokens.tolist())[None]).logits[0, :-1]
        chosen = logits.log_softmax(-1)[range(len(tokens) - 1), tokens[1:].tolist()]
        return np.concatenate([[0], chosen.numpy()])

    return score
