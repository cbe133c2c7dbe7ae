"""Experts that a rollout tells are those that a train engine routes to, whatever lies beside them.

This file as a script scores and trains on two ranks: with rows of their own, and sharing the tokens of all.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import forked, launch
from test_families import build, objective
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

from rlgraph.nodes.data.recorded import load as load_recorded
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.nodes.support.record_file import steps_of
from rlgraph.ops import Request, Sampling
from rlgraph.ops.column_types import ColumnType
from rlgraph.runtime.engines.fsdp.batching import micro_batches
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.routing import OWN, Routing
from rlgraph.runtime.engines.sequence.groups import sequence_group
from rlgraph.runtime.engines.transformers.engine import TransformersEngine

FAMILIES = ["qwen3_moe", "mixtral", "qwen2_moe", "olmoe", "glm4_moe", "deepseek_v3", "gpt_oss"]
EXPERTS, CPU = 3, torch.device("cpu")
ADAM = {"lr": 1e-2, "eps": 1e-3, "max_grad_norm": 1e9}
REQUESTS = [Request([5, 6, 7], [1, 2, 3]), Request([8, 9, 10, 11, 12], [4])]
Columns = dict[str, Ragged]


def generated(engine: TransformersEngine) -> tuple[Columns, torch.Tensor]:
    """What a train engine reads of samples with their routing, and the engine's own log-probs."""
    answers = engine.generate(REQUESTS, Sampling(9, routing=True))
    pairs = [(r.prompt, g) for r, many in zip(REQUESTS, answers, strict=True) for g in many]
    tokens = Ragged.of([[*prompt, *g.tokens] for prompt, g in pairs])
    mask = [[False] * len(prompt) + [True] * len(g.tokens) for prompt, g in pairs]
    columns = {
        "tokens": tokens,
        "loss_mask": Ragged.of(mask, torch.bool),
        "routing": tokens.like(torch.cat([g.routing for _, g in pairs])),
    }
    own = [[0.0] * len(prompt) + [*g.logprobs] for prompt, g in pairs]
    return columns, Ragged.of(own).values


def without(columns: Columns) -> Columns:
    return {name: column for name, column in columns.items() if name != "routing"}


def served(path: Path) -> TransformersEngine:
    engine = TransformersEngine(str(path))
    engine.load_pretrained()
    return engine


def other_server(path: Path, router: float = 0.5) -> TransformersEngine:
    """A server whose routers are a little off, so that it chooses others."""
    engine = served(path)
    torch.manual_seed(1)
    for name, weight in engine.weights.items():
        if name.endswith((".gate.weight", ".router.weight")):
            weight.add_(router * torch.randn_like(weight))
    return engine


def used(engine: FsdpEngine, columns: Columns) -> int:
    """How many tokens a pass routed to the experts that it was told, which are all that were told."""
    (batch,) = micro_batches({**columns}, replace(engine.budget, share=None), CPU)
    engine.routing = engine.routing or Routing(engine.model)
    engine.routing.note()
    with torch.no_grad():
        engine._scores(batch, 1.0, "none")
    chosen = engine.routing.take().unflatten(0, batch.inputs["input_ids"].shape)
    assert batch.routing is not None
    read = batch.routing[..., 0, 0] != OWN
    assert chosen[read].equal(batch.routing[read].to(torch.int16))
    return int(read.sum())


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_family_chose_is_told_and_replayed(one_rank: None, tmp_path: Path, family: str) -> None:
    path = build(tmp_path, family)
    columns, own = generated(served(path))
    tokens, routing = columns["tokens"], columns["routing"]
    train = FsdpEngine.of(str(path), frozen=True)
    last = torch.zeros(len(tokens.values), dtype=torch.bool).index_fill(0, tokens.offsets[1:] - 1, True)
    assert routing.values.dtype == torch.int16 and routing.values.shape[2] == 2
    assert (routing.values[last] == OWN).all() and (routing.values[~last] >= 0).all()
    assert routing.values.max() < EXPERTS
    scores = train.logprobs(**columns).values
    assert scores.equal(train.logprobs(**without(columns)).values)
    torch.testing.assert_close(scores, own, rtol=1e-4, atol=1e-5)

    # of the next expert each, all tokens are routed as they are told, and come to something else
    others = {
        **columns,
        "routing": routing.like(((routing.values + 1) % EXPERTS).where(~last[:, None, None], OWN)),
    }
    assert used(train, others) == len(tokens.values) - len(tokens)
    assert (train.logprobs(**others).values - scores).abs().max() > 0.1
    squares, plain_squares = train.squares(**others), train.squares(**without(columns))
    assert squares[0].values.equal(train.logprobs(**others).values)
    assert not squares[1].values.equal(plain_squares[1].values)
    assert train.logprobs(**without(columns)).values.equal(scores)  # nothing of it stays


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_the_gap_to_a_server_that_chose_others_is_smaller(
    one_rank: None, tmp_path: Path, family: str
) -> None:
    path = build(tmp_path, family)
    columns, sampled = generated(other_server(path, 0.3))
    train = FsdpEngine.of(str(path), frozen=True)
    mask = columns["loss_mask"].values
    apart = [
        (train.logprobs(**asked).values - sampled)[mask].abs().mean() for asked in (columns, without(columns))
    ]
    assert used(train, columns) == (columns["routing"].values[:, 0, 0] != OWN).sum()
    assert apart[0] < 0.75 * apart[1]


class Gate(torch.nn.Module):
    """A router of Qwen3-MoE, written out: a softmax over the given experts or over all, in float64."""

    def __init__(self, weight: torch.nn.Parameter, normed: bool) -> None:
        super().__init__()
        self.weight, self.normed = weight, normed
        self.chosen = torch.empty(0)

    def forward(self, hidden: torch.Tensor) -> Any:
        logits = F.linear(hidden, self.weight)
        if self.normed:
            return logits, torch.softmax(logits.gather(1, self.chosen), -1), self.chosen
        return logits, torch.softmax(logits, -1).gather(1, self.chosen), self.chosen


@pytest.mark.parametrize(("normed", "recompute"), [(True, False), (True, True), (False, True)])
def test_gradients_are_those_of_a_plain_forward_with_these_experts(
    one_rank: None, tmp_path: Path, normed: bool, recompute: bool
) -> None:
    path = build(tmp_path, "qwen3_moe")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "norm_topk_prob": normed}))
    columns, _ = generated(other_server(path))
    tokens, routing = columns["tokens"], columns["routing"]
    kinds: dict[str, Any] = {"dtype": torch.float64, "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(path, **kinds)
    for layer in model.model.layers:
        layer.mlp.gate = Gate(layer.mlp.gate.weight, normed)
    loss = torch.zeros((), dtype=torch.float64)
    for row, ids in enumerate(tokens.tolist()):
        for number, layer in enumerate(model.model.layers):
            layer.mlp.gate.chosen = routing[row][:-1, number].long()
        scores = torch.log_softmax(model(torch.tensor([ids[:-1]])).logits[0], -1)
        picked = scores.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        loss = loss - picked[columns["loss_mask"][row][1:]].sum()
    (loss / columns["loss_mask"].values.sum()).backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    engine = FsdpEngine.of(str(path), optimizer=ADAM, recompute=recompute)
    engine._step = lambda sums: None  # type: ignore[method-assign]
    batch = {**columns}
    engine.update(batch, objective, torch.arange(len(tokens)), len(tokens))
    assert "routing" in batch
    found = {name: p.grad.double() for name, p in engine.model.named_parameters() if p.grad is not None}
    assert {name for name in wanted if name.endswith("gate.weight")}
    assert found.keys() >= wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5)


def test_rows_that_share_a_prompt_take_the_choice_of_the_first(one_rank: None, tmp_path: Path) -> None:
    path = build(tmp_path, "qwen3_moe")
    columns, _ = generated(other_server(path))
    packed, beside = (FsdpEngine.of(str(path), optimizer=ADAM, packing=p) for p in (True, False))
    packed.budget = replace(packed.budget, share=0.0)  # attention is free, so that packing always pays
    batches = [micro_batches({**columns}, engine.budget, CPU) for engine in (packed, beside)]
    cells = [sum(batch.inputs["input_ids"].numel() for batch in several) for several in batches]
    assert cells[0] < cells[1]
    rows = torch.arange(len(columns["tokens"]))
    both = [engine.logprobs(**columns).values for engine in (packed, beside)]
    torch.testing.assert_close(both[0], both[1], rtol=1e-4, atol=1e-5)
    metrics = [engine.update({**columns}, objective, rows, len(rows)) for engine in (packed, beside)]
    assert metrics[0]["grad_norm"] == pytest.approx(metrics[1]["grad_norm"], rel=1e-4)

    # where the three say different things of their prompt, it is the first of the micro-batch that counts
    marked = columns["routing"].values + EXPERTS * columns["routing"].row_of[:, None, None].short()
    (batch,) = micro_batches({**columns, "routing": columns["routing"].like(marked)}, packed.budget, CPU)
    assert batch.routing is not None
    ids = batch.inputs["input_ids"][0].tolist()
    start = next(place for place in range(len(ids)) if ids[place : place + 3] == [5, 6, 7])
    order = [columns["tokens"].tolist().index(row) for row in batch.columns["tokens"].tolist()]
    (owner,) = {*(batch.routing[0, start : start + 3] // EXPERTS).flatten().tolist()}
    assert owner == next(row for row in order if row < 3)


def test_tokens_that_were_not_routed_choose_by_themselves(one_rank: None, tmp_path: Path) -> None:
    path = build(tmp_path, "qwen3_moe")
    columns, _ = generated(other_server(path))
    train = FsdpEngine.of(str(path), frozen=True)
    plain_scores = train.logprobs(**without(columns)).values
    prompts = columns["loss_mask"].values.logical_not()[:, None, None]
    none = columns["routing"].like(columns["routing"].values.where(columns["routing"].values == OWN, OWN))
    assert train.logprobs(**{**columns, "routing": none}).values.equal(plain_scores)
    responses = columns["routing"].like(columns["routing"].values.where(~prompts, OWN))
    mixed = train.logprobs(**{**columns, "routing": responses}).values
    assert not mixed.equal(plain_scores) and not mixed.equal(train.logprobs(**columns).values)


def test_a_choice_of_other_routers_is_refused(one_rank: None, tmp_path: Path) -> None:
    columns, _ = generated(served(build(tmp_path, "qwen3_moe")))
    train = FsdpEngine.of(str(tmp_path / "qwen3_moe"), frozen=True)
    fewer = {**columns, "routing": columns["routing"].like(columns["routing"].values[:, :1])}
    with pytest.raises(ValueError, match=r"`routing` says \[1, 2\] experts per token; .* \[2, 2\]"):
        train.logprobs(**fewer)
    dense = FsdpEngine.of(str(build(tmp_path, "qwen3")), frozen=True)
    with pytest.raises(ValueError, match="qwen3: Qwen3ForCausalLM has no routers whose choices"):
        dense.logprobs(**columns)
    with pytest.raises(ValueError, match="qwen3: Qwen3ForCausalLM has no routers"):
        served(tmp_path / "qwen3").generate(REQUESTS, Sampling(2, routing=True))


def measure(root: Path, shared: bool = False) -> dict[str, Any]:
    """Scores and an update of this rank's rows."""
    columns = torch.load(root / "columns.pt", weights_only=False)
    count = torch.distributed.get_world_size()
    more = {"sequence": sequence_group(torch.distributed.group.WORLD, 2)} if shared else {}
    engine = FsdpEngine.of(str(root / "qwen3_moe"), optimizer=ADAM, recompute=True, **more)
    rows = torch.arange(4)[torch.distributed.get_rank() :: count]
    own = {name: column.take(rows) for name, column in columns.items()}
    scores = engine.logprobs(**own).tolist()
    metrics = engine.update(own, objective, rows, 4)
    weights = {name: tensor.clone() for name, tensor in engine.weights()}
    return {"scores": dict(zip(rows.tolist(), scores, strict=True)), "metrics": metrics, "weights": weights}


def main(rank: int, root: Path) -> None:
    torch.save([measure(root), measure(root, shared=True)], root / f"rank-{rank}.pt")


def test_two_ranks_do_what_one_does(one_rank: None, tmp_path: Path) -> None:
    columns, _ = generated(other_server(build(tmp_path, "qwen3_moe")))
    torch.save(columns, tmp_path / "columns.pt")
    launch(__file__, tmp_path)
    one = measure(tmp_path)
    ranks = [torch.load(tmp_path / f"rank-{rank}.pt") for rank in range(2)]
    near: Any = {"rtol": 1e-4, "atol": 1e-5}
    for first, second in zip(*ranks, strict=True):
        scores = dict(sorted((first["scores"] | second["scores"]).items()))
        torch.testing.assert_close(scores, one["scores"], **near)
        torch.testing.assert_close(first["metrics"], one["metrics"], **near)
        torch.testing.assert_close(first["weights"], one["weights"], **near)


GRAPH = f"""
graph: replayed
extends: {Path(__file__).parent / "ones.yaml"}
edits:
  - remove: [eval]
  - set:
      models.policy.path: mixture
      rollout.routing: true
      models.policy.train.router_aux_loss_coef: 0.01
      old_logprobs.keep: true
      schedule: {{iterations: 1, record_every: 1}}
"""


@pytest.mark.slow
@pytest.mark.usefixtures("in_demo")
@pytest.mark.parametrize("devices", [1, 2])
def test_an_iteration_replays_and_a_record_holds_the_choice(
    demo_files: Path, devices: int, run_on_devices: Callable[..., str]
) -> None:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(demo_files / "demo_files/model")
    sizes = {"hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 3, "mlp_only_layers": [1]}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = Qwen3MoeConfig(**sizes, **heads, **mixture, **ids)
    AutoModelForCausalLM.from_config(config).save_pretrained("mixture")
    tokenizer.save_pretrained("mixture")
    Path("replayed.yaml").write_text(GRAPH)
    run_on_devices("replayed.yaml", "--devices", str(devices), "--run-dir", "kept")
    (metrics,) = map(json.loads, Path("kept/metrics.jsonl").read_text().splitlines())
    assert metrics["update_policy/rollout_gap_max"] < 1e-4 and metrics["update_policy/loss"] is not None
    assert metrics["update_policy/router_imbalance"] > 1 < metrics["update_policy/router_aux_loss"] < 4
    kinds = {"routing": "int64[samples, tokens, layers, k]", "tokens": "int64[samples, tokens]"}
    columns = load_recorded(
        steps_of(Path("kept"))[1], {n: ColumnType.parse(kind) for n, kind in kinds.items()}
    )
    tokens, routing = columns["tokens"], columns["routing"]
    assert routing.values.shape == (len(tokens.values), 2, 2) and routing.offsets.equal(tokens.offsets)
    assert routing.values[tokens.offsets[1:] - 1].eq(OWN).all()


if __name__ == "__main__":
    forked(main, ranks=2)
