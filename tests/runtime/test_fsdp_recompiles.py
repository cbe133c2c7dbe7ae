"""How often decoder layers are compiled: once for each kind of pass, and never given up for their number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo

from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Totals
from rlgraph.runtime.engines.fsdp import load
from rlgraph.runtime.engines.fsdp.batching import micro_batches, placeholder
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.fsdp.micro_batch import MicroBatch


class Compiler:
    """A backend of torch.compile that runs what it is given, and counts it."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    backend = Compiler()
    torch._dynamo.reset()
    monkeypatch.setattr(load.torch, "compile", partial(torch.compile, backend=backend))
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield backend
    torch._dynamo.reset()


@pytest.fixture
def path(one_rank: None, tmp_path: Path) -> str:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3Config(**shape, head_dim=4, vocab_size=30, num_hidden_layers=1)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def rows(*lengths: int, prompts: int = 0) -> dict[str, Ragged]:
    """Rows of so many tokens, or of so many behind one of some prompts of 16, which are not scored."""
    starts = [[(5 * prompt + t) % 30 for t in range(16)] for prompt in range(prompts)] or [[]]
    both = [
        (starts[k % len(starts)], [(7 * n + 3 * t) % 30 for t in range(n)]) for k, n in enumerate(lengths)
    ]
    tokens = Ragged.of([[*prompt, *own] for prompt, own in both])
    mask = [[False] * max(1, len(prompt)) + [True] * (len(own) - (not prompt)) for prompt, own in both]
    return {"tokens": tokens, "loss_mask": Ragged.of(mask, dtype=torch.bool)}


def batches(more: int) -> list[dict[str, Ragged]]:
    """Each is a micro-batch: several rows beside each other, one, and packed into several lanes and one."""
    lanes, lane = rows(*[9 - more] * 8, prompts=2), rows(3, 4, 3 + more, prompts=1)
    return [rows(9 + more, 11 + more, 6), rows(14 + more), lanes, lane]


def kind(batch: MicroBatch) -> tuple[bool, bool]:
    """Whether a pass has several lanes, and whether it has a mask."""
    return len(batch.inputs["input_ids"]) > 1, batch.mask is not None


def objective(batch: dict[str, Any], totals: Totals) -> tuple[torch.Tensor, dict[str, Any]]:
    return -batch["logprobs"].values.sum() / totals.tokens, {}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own, of what it looks at
def test_an_update_is_compiled_beside_a_reference(path: str, compiler: Compiler) -> None:
    options: dict[str, Any] = {"compile": True, "micro_tokens": 200}
    policy = FsdpEngine.of(path, optimizer={"lr": 1e-2}, **options)
    reference = FsdpEngine.of(path, frozen=True, **options)

    def iteration(more: int) -> None:
        kinds = set()
        for columns in batches(more):
            (batch,) = micro_batches(columns, policy.budget, policy.device)
            kinds.add(kind(batch))
            for engine in (policy, reference):
                engine.logprobs(**columns)
            count = len(columns["tokens"])
            policy.update(columns, objective, torch.arange(count), count)
        assert kinds == {(False, False), (False, True), (True, False), (True, True)}

    iteration(0)
    graphs = compiler.graphs
    assert 8 < graphs < load.GRAPHS / 2, "more than torch allows by default, and room for other models"
    iteration(3)
    policy._stacked(placeholder(policy.budget, policy.device), 1.0, None)
    policy._scores(placeholder(policy.budget, policy.device), 1.0, "none")[0].sum().backward()
    assert compiler.graphs == graphs, (
        "other lengths are not compiled anew, nor is a pass that only keeps pace"
    )
