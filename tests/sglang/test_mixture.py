"""A mixture of experts on a real SGLang: what trains arrives, and log-probs agree before and after."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from families import build
from test_train_engine import TEMPERATURE, generated, objective

from rlgraph.errors import RunError
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Request, Sampling
from rlgraph.runtime.engines.fsdp.batching import micro_batches
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.routing import OWN
from rlgraph.runtime.engines.sglang.engine import SglangEngine

CPU = torch.device("cpu")
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.slow]


@pytest.fixture(scope="module")
def mixture(path: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Qwen3-MoE of four experts, with the tokenizer of the other tests."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

    folder = tmp_path_factory.mktemp("mixture")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    }
    ids = {"max_position_embeddings": 4096, "eos_token_id": 1, "bos_token_id": None}
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes, **heads, **experts, **ids))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def served(mixture: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEngine]:
    made = SglangEngine(mixture, logs=tmp_path_factory.mktemp("logs"), max_rows=4)
    yield made
    made.close()


def test_experts_arrive(served: SglangEngine, mixture: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    train = FsdpEngine.of(mixture, optimizer={"lr": 1e-2})
    seen: list[dict[str, str]] = []
    for version in range(3):
        served.load_weights(train.weights(), version)
        batch, own = generated(served)
        found = train.logprobs(batch["tokens"], batch["loss_mask"], TEMPERATURE).values
        assert (found - own).abs().max() < 1e-4
        seen.append(served.checksums()[0][0]["checksums"])
        rows = torch.arange(len(batch["tokens"].lengths))
        train.update(batch, objective, rows, len(rows))
    dist.destroy_process_group()
    for before, after in pairwise(seen):
        experts = [name for name in before if ".experts." in name]
        assert experts and all(before[name] != after[name] for name in experts)


@pytest.mark.nightly
def test_adapters_of_attention_are_served_alone(mixture: str, tmp_path: Path) -> None:
    lora = {"rank": 3, "alpha": 6.0, "targets": "all-linear"}
    engine = SglangEngine(mixture, logs=tmp_path, max_rows=4, adapter=lora)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    train = FsdpEngine.of(mixture, optimizer={"lr": 1e-2}, lora=lora)
    ref = FsdpEngine.of(mixture, frozen=True, base=train)
    try:
        for version in range(3):
            engine.load_weights(train.adapter(), version)
            batch, own = generated(engine)
            columns = batch["tokens"], batch["loss_mask"], TEMPERATURE
            assert (train.logprobs(*columns).values - own).abs().max() < 1e-4
            gap = (ref.logprobs(*columns).values - own).abs().max()
            assert gap > 1e-3 if version else gap < 1e-4
            rows = torch.arange(len(batch["tokens"].lengths))
            train.update(batch, objective, rows, len(rows))
    finally:
        dist.destroy_process_group()
        engine.close()


@pytest.mark.nightly
def test_a_bias_of_routers_that_moved_is_served(tmp_path: Path) -> None:
    path = str(build(tmp_path, "glm4_moe"))
    engine = SglangEngine(path, logs=tmp_path / "logs", max_rows=4)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    train = FsdpEngine.of(path, optimizer={"lr": 1e-6}, router_bias_update_rate=0.5)
    try:
        for version in range(3):
            engine.load_weights(train.weights(), version)
            batch, own = generated(engine)
            columns = batch["tokens"], batch["loss_mask"], TEMPERATURE
            assert (train.logprobs(*columns).values - own).abs().max() < 1e-4
            rows = torch.arange(len(batch["tokens"].lengths))
            train.update(batch, objective, rows, len(rows))
            assert (train.logprobs(*columns).values - own).abs().max() > 1e-2
    finally:
        dist.destroy_process_group()
        engine.close()


def test_names_that_the_server_would_leave_out_are_refused(served: SglangEngine, mixture: str) -> None:
    from transformers import AutoModelForCausalLM

    fused = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32).named_parameters()
    before = served.checksums()
    with pytest.raises(RunError, match=r"a sync sent model\.layers\.0\.mlp\.experts\.down_proj, "):
        served.load_weights(((name, tensor + 1) for name, tensor in fused), 9)
    assert served.version == -1
    held, now = (found[0][0]["checksums"] for found in (before, served.checksums()))
    assert {name for name in held if held[name] == now[name]} == {
        name for name in held if ".experts." in name
    }


def test_the_experts_that_it_chose_are_told_and_replayed(
    mixture: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    engine = SglangEngine(
        mixture,
        logs=tmp_path_factory.mktemp("logs"),
        max_rows=4,
        options={"enable_return_routed_experts": True},
    )
    try:
        engine.load_pretrained()
        # six rows: their prompts alone are enough tokens below, should each answer end with its first token
        requests = [Request([5, 6, 7, 8], [1, 2, 3, 4]), Request([9, 10, 11], [5, 6])]
        answers = engine.generate(requests, Sampling(12, routing=True))
        again = engine.generate(requests, Sampling(2, routing=True))
    finally:
        engine.close()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    train = FsdpEngine.of(mixture, frozen=True)
    pairs = [(r.prompt, g) for r, many in zip(requests, answers, strict=True) for g in many]
    tokens = Ragged.of([[*prompt, *g.tokens] for prompt, g in pairs])
    mask = Ragged.of([[False] * len(p) + [True] * len(g.tokens) for p, g in pairs], torch.bool)
    routing = tokens.like(torch.cat([g.routing for _, g in pairs]))
    assert routing.values.shape[1:] == (2, 2) and routing.values.dtype == torch.int16
    assert routing.values[tokens.offsets[1:] - 1].eq(OWN).all()
    scores = train.logprobs(tokens, mask, routing=routing).values
    served = torch.cat([torch.tensor([0.0] * len(p) + [*g.logprobs]) for p, g in pairs])
    assert (scores - served).abs().max() < 1e-4

    (batch,) = micro_batches({"tokens": tokens, "loss_mask": mask, "routing": routing}, train.budget, CPU)
    assert batch.routing is not None and train.routing is not None
    train.routing.replay(None)
    train.routing.note()
    with torch.no_grad():
        train.model.token_scores(batch, 1.0, "none")
    own, told = train.routing.take(), batch.routing.flatten(0, 1)
    read = told[:, 0, 0] != OWN
    # the same weights in float32: the trainer's own choice, the order aside
    assert read.sum() > 20 and own[read].sort(-1)[0].equal(told[read].to(torch.int16).sort(-1)[0])
    # a prompt that the server has in its cache is told as well
    assert all(g.routing[0, 0, 0] != OWN for many in again for g in many)
    dist.destroy_process_group()


def test_a_server_that_does_not_tell_is_named(served: SglangEngine) -> None:
    served.load_pretrained()
    with pytest.raises(RunError, match=r"does not tell the experts[^-]*--enable-return-routed-experts"):
        served.generate([Request([5, 6, 7, 8], [1])], Sampling(2, routing=True))
