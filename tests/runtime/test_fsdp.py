"""The train engine against plain PyTorch, and against itself on other numbers of ranks.

One launch of two ranks (this file as a script) runs every case of ``scenario``; its results are compared with
the same cases on one rank in this process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import forked, launch
from torch.distributed.tensor import DTensor

from rlgraph.costs import limits
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Metric, Totals
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine

VOCAB, ROWS = 24, 13
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
ADAM = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5}


def write_models(root: Path) -> None:
    """Random models of two layers, with a tokenizer: ``qwen`` with tied embeddings, ``llama`` without."""
    from tokenizers import Tokenizer, models
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
        Qwen2Config,
        Qwen2ForCausalLM,
    )

    torch.manual_seed(0)
    vocabulary = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, eos_token="w1")
    built = {
        "qwen": Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True)),
        "llama": LlamaForCausalLM(LlamaConfig(**SHAPE)),
    }
    for name, model in built.items():
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)


def batch_columns() -> dict[str, Any]:
    """Rows of 2 to 13 tokens; some masks have holes, row 4 has none at all."""
    generator = torch.Generator().manual_seed(3)
    lengths = [int(n) for n in torch.randint(2, 14, (ROWS,), generator=generator)]
    tokens = Ragged.of([torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths])
    mask = [[t > n // 3 and t % 5 != 3 and row != 4 for t in range(n)] for row, n in enumerate(lengths)]
    return {
        "tokens": tokens,
        "loss_mask": Ragged.of(mask, dtype=torch.bool),
        "advantages": tokens.like(torch.randn(len(tokens.values), generator=generator)),
        "rewards": torch.randn(ROWS, generator=generator),
    }


def part_of(columns: dict[str, Any], rows: torch.Tensor) -> dict[str, Any]:
    return {name: c.take(rows) if isinstance(c, Ragged) else c[rows] for name, c in columns.items()}


def policy_objective(batch: dict[str, Any], totals: Totals) -> tuple[torch.Tensor, dict[str, Any]]:
    mask = batch["loss_mask"].values.float()
    gain = (batch["logprobs"].values * batch["advantages"].values * mask).sum()
    bonus = 0.1 * (batch["entropy"].values * mask).sum()
    rewards = batch["rewards"]
    best = Metric("max", "samples", {"most": rewards.max()})
    metrics = {"reward": (rewards.sum(), len(rewards)), "best": best}
    return -(gain + bonus) / totals.tokens, metrics


def value_objective(batch: dict[str, Any], totals: Totals) -> tuple[torch.Tensor, dict[str, Any]]:
    mask = batch["loss_mask"].values
    error = (batch["new_values"].values - batch["advantages"].values).square()[mask].sum()
    return error / totals.tokens, {"error": (error, mask.sum())}


def sft_objective(batch: dict[str, Any], totals: Totals) -> tuple[torch.Tensor, dict[str, Any]]:
    return -batch["logprobs"].values.sum() / totals.tokens, {}


def measure(engine: FsdpEngine, rows: torch.Tensor, minibatches: int, epochs: int) -> dict[str, Any]:
    """Scores before, metrics of an update, weights after: scores by row number."""
    columns = part_of(batch_columns(), rows)
    score, objective = {
        "lm": (engine.logprobs, policy_objective),
        "value": (engine.values, value_objective),
    }[engine.head]
    scores = score(columns["tokens"], columns["loss_mask"])
    metrics = engine.update(columns, objective, rows, ROWS, minibatches, epochs, entropy=engine.head == "lm")
    return {
        "scores": dict(zip(rows.tolist(), scores.tolist(), strict=True)),
        "metrics": metrics,
        "weights": dict(engine.weights()),
    }


def shares(name: str) -> torch.Tensor:
    """This rank's rows: all on one rank; on two, 9 and 4, or 13 and none."""
    order = (
        torch.arange(ROWS)
        if name == "uneven"
        else torch.randperm(ROWS, generator=torch.Generator().manual_seed(5))
    )
    first = 9 if name == "uneven" else ROWS
    if dist.get_world_size() == 1:
        return order
    return order[:first] if dist.get_rank() == 0 else order[first:]


def scenario(root: Path, micro_tokens: int = 16384) -> dict[str, Any]:
    """Every case, on however many ranks there are."""
    policy = FsdpEngine.of(str(root / "qwen"), optimizer=ADAM, micro_tokens=micro_tokens)
    found = {"policy": measure(policy, shares("uneven"), minibatches=3, epochs=2)}
    policy.save(str(root / f"saved-{dist.get_world_size()}"))
    policy.export(str(root / f"exported-{dist.get_world_size()}"))
    found["next"] = measure(policy, shares("uneven"), minibatches=1, epochs=1)
    layers = FsdpEngine.of(str(root / "llama"), optimizer=ADAM, micro_tokens=micro_tokens, reshard=True)
    found["layers"] = measure(layers, shares("empty"), minibatches=1, epochs=2)
    again = {"optimizer": ADAM, "micro_tokens": micro_tokens, "recompute": True}
    tied = FsdpEngine.of(str(root / "qwen"), **again)
    found["policy again"] = measure(tied, shares("uneven"), minibatches=3, epochs=2)
    layers = FsdpEngine.of(str(root / "llama"), reshard=True, **again)
    found["layers again"] = measure(layers, shares("empty"), minibatches=1, epochs=2)
    critic = FsdpEngine.of(
        str(root / "llama"), head="value", optimizer=ADAM, seed=7, micro_tokens=micro_tokens
    )
    found["critic"] = measure(critic, shares("uneven"), minibatches=3, epochs=1)
    return found


def main(rank: int, root: Path) -> None:
    limits.LOGITS = 5 * VOCAB  # the head on five tokens at a time
    torch.save(scenario(root, micro_tokens=24), root / f"rank-{rank}.pt")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fsdp")
    write_models(root)
    return root


@pytest.fixture(scope="module")
def alone(root: Path, one_rank: None, two_ranks: list[dict[str, Any]]) -> dict[str, Any]:
    return scenario(root)


@pytest.fixture(scope="module")
def two_ranks(root: Path) -> list[dict[str, Any]]:
    launch(__file__, root)
    return [torch.load(root / f"rank-{rank}.pt") for rank in range(2)]


def hugging_face_logprobs(path: Path, temperature: float = 1.0) -> list[list[float]]:
    """Row by row, without padding, from the whole logits."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path)
    columns, rows = batch_columns(), []
    for tokens, mask in zip(columns["tokens"].tolist(), columns["loss_mask"].tolist(), strict=True):
        with torch.no_grad():
            log_p = torch.log_softmax(model(torch.tensor([tokens])).logits[0] / temperature, dim=-1)
        scored = [log_p[t - 1, tokens[t]].item() if mask[t] else 0.0 for t in range(1, len(tokens))]
        rows.append([0.0, *scored])
    return rows


def close(left: Any, right: Any, tolerance: float) -> None:
    torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("micro_tokens", [1, 30, 16384])
def test_logprobs_are_those_of_the_plain_model(
    root: Path, one_rank: None, micro_tokens: int, temperature: float
) -> None:
    engine = FsdpEngine.of(str(root / "qwen"), frozen=True, micro_tokens=micro_tokens)
    columns = batch_columns()
    found = engine.logprobs(columns["tokens"], columns["loss_mask"], temperature).tolist()
    close(found, hugging_face_logprobs(root / "qwen", temperature), 1e-5)


def test_an_update_is_one_step_of_plain_adamw(root: Path, one_rank: None) -> None:
    from transformers import AutoModelForCausalLM

    engine = FsdpEngine.of(str(root / "llama"), optimizer=ADAM, micro_tokens=30)
    columns = batch_columns()
    metrics = engine.update(columns, sft_objective, torch.arange(ROWS), ROWS)
    model = AutoModelForCausalLM.from_pretrained(root / "llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)
    ids, mask = columns["tokens"].padded(), columns["loss_mask"].padded(False)[:, 1:]
    log_p = torch.log_softmax(
        model(ids, attention_mask=columns["tokens"].mask().long()).logits[:, :-1], dim=-1
    )
    loss = -log_p.gather(2, ids[:, 1:, None]).squeeze(2)[mask].mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    assert norm > 0.5, "the case should clip"
    optimizer.step()
    close([metrics["loss"], metrics["grad_norm"], metrics["lr"]], [loss.item(), norm.item(), 1e-2], 1e-5)
    close(dict(engine.weights()), {name: p.detach() for name, p in model.named_parameters()}, 1e-5)


@pytest.mark.parametrize("case", ["policy", "next", "layers", "critic"])
def test_two_ranks_do_what_one_does(
    case: str, alone: dict[str, Any], two_ranks: list[dict[str, Any]]
) -> None:
    one, (first, second) = alone[case], [rank[case] for rank in two_ranks]
    assert first["metrics"] == second["metrics"]
    assert all(first["weights"][name].equal(tensor) for name, tensor in second["weights"].items())
    close(
        dict(sorted((first["scores"] | second["scores"]).items())), dict(sorted(one["scores"].items())), 1e-4
    )
    close(first["metrics"], one["metrics"], 1e-4)
    close(first["weights"], one["weights"], 1e-4)
    assert list(first["weights"]) == list(one["weights"])


@pytest.mark.parametrize("case", ["policy", "layers"])
def test_recomputed_activations_change_nothing(
    case: str, alone: dict[str, Any], two_ranks: list[dict[str, Any]]
) -> None:
    for found in alone, *two_ranks:
        kept, again = found[case], found[f"{case} again"]
        assert kept["metrics"] == again["metrics"]
        assert all(again["weights"][name].equal(tensor) for name, tensor in kept["weights"].items())


def saved_bytes(engine: FsdpEngine, ids: torch.Tensor) -> int:
    """What a forward pass keeps for the backward pass beside gathered parameters."""
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        gathered = [p for p in engine.model.parameters() if not isinstance(p, DTensor)]
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in {p.untyped_storage().data_ptr() for p in gathered}:
            saved[memory.data_ptr()] = memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        engine.model(input_ids=ids, use_cache=False).logits.sum().backward()
    return sum(saved.values())


@pytest.mark.parametrize("reshard", [False, True])
def test_recomputing_keeps_only_the_input_of_a_layer(one_rank: None, tmp_path: Path, reshard: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 96, "num_attention_heads": 4}
    ids = torch.arange(60).reshape(3, 20) % VOCAB
    kept: dict[bool, list[int]] = {False: [], True: []}
    for layers in 1, 3:
        LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=layers)).save_pretrained(tmp_path)
        for recompute, counts in kept.items():
            engine = FsdpEngine.of(str(tmp_path), optimizer=ADAM, reshard=reshard, recompute=recompute)
            counts.append(saved_bytes(engine, ids))
    two_layers_input = 2 * 4 * 32 * ids.numel()
    assert kept[True][1] - kept[True][0] == two_layers_input
    assert kept[False][1] - kept[False][0] > 15 * two_layers_input


def test_the_cases_train(alone: dict[str, Any]) -> None:
    before, after = alone["policy"]["weights"], alone["next"]["weights"]
    assert all((before[name] - after[name]).abs().max() > 1e-4 for name in before)
    assert alone["policy"]["metrics"]["skipped"] == 0
    assert alone["critic"]["metrics"]["error"] > 0


@pytest.mark.parametrize("minibatches", [1, 3])
def test_neither_row_order_nor_micro_batches_show(root: Path, one_rank: None, minibatches: int) -> None:
    orders = [torch.arange(ROWS), torch.randperm(ROWS, generator=torch.Generator().manual_seed(9))]
    found = []
    for order, micro_tokens, reshard in zip(orders, (16384, 17), (False, True), strict=True):
        engine = FsdpEngine.of(str(root / "qwen"), optimizer=ADAM, micro_tokens=micro_tokens, reshard=reshard)
        found.append(measure(engine, order, minibatches, epochs=1))
    close(found[0]["metrics"], found[1]["metrics"], 1e-4)
    close(found[0]["weights"], found[1]["weights"], 1e-4)


def test_a_checkpoint_of_two_ranks_continues_on_one(
    root: Path, one_rank: None, two_ranks: list[dict[str, Any]]
) -> None:
    engine = FsdpEngine.of(str(root / "qwen"), optimizer=ADAM)
    engine.load(str(root / "saved-2"))
    close(dict(engine.weights()), two_ranks[0]["policy"]["weights"], 0.0)
    found = measure(engine, torch.arange(ROWS), minibatches=1, epochs=1)
    scores = two_ranks[0]["next"]["scores"] | two_ranks[1]["next"]["scores"]
    close(found["scores"], dict(sorted(scores.items())), 1e-5)
    close(found["metrics"], two_ranks[0]["next"]["metrics"], 1e-5)
    close(found["weights"], two_ranks[0]["next"]["weights"], 1e-5)


def test_a_checkpoint_continues_bit_for_bit(root: Path, alone: dict[str, Any]) -> None:
    engine = FsdpEngine.of(str(root / "qwen"), optimizer=ADAM)
    engine.load(str(root / "saved-1"))
    found = measure(engine, torch.arange(ROWS), minibatches=1, epochs=1)
    assert found["metrics"] == alone["next"]["metrics"]
    assert all(tensor.equal(alone["next"]["weights"][name]) for name, tensor in found["weights"].items())


def test_a_checkpoint_before_the_first_step_changes_nothing(
    root: Path, one_rank: None, tmp_path: Path
) -> None:
    options = {**ADAM, "schedule": "linear", "warmup_steps": 2, "total_steps": 9}
    engines = [FsdpEngine.of(str(root / "qwen"), optimizer=options) for _ in range(3)]
    engines[0].save(str(tmp_path / "saved"))
    engines[1].load(str(tmp_path / "saved"))
    found = [measure(engine, torch.arange(ROWS), minibatches=3, epochs=1) for engine in engines]
    assert found[0]["metrics"] == found[1]["metrics"] == found[2]["metrics"]
    assert found[0]["metrics"]["lr"] == pytest.approx((0 + 1e-2 / 2 + 1e-2) / 3)
    close(found[0]["weights"], found[2]["weights"], 0.0)
    close(found[1]["weights"], found[2]["weights"], 0.0)


def test_an_export_of_two_ranks_loads_in_transformers(root: Path, two_ranks: list[dict[str, Any]]) -> None:
    from transformers import AutoConfig, AutoTokenizer

    scores = two_ranks[0]["next"]["scores"] | two_ranks[1]["next"]["scores"]
    close([scores[row] for row in range(ROWS)], hugging_face_logprobs(root / "exported-2"), 1e-5)
    assert AutoConfig.from_pretrained(root / "exported-2").architectures == ["Qwen2ForCausalLM"]
    assert AutoTokenizer.from_pretrained(root / "exported-2").convert_ids_to_tokens([3, 5]) == ["w3", "w5"]


def test_a_value_head_survives_export(root: Path, one_rank: None, tmp_path: Path) -> None:
    columns = batch_columns()
    engine = FsdpEngine.of(str(root / "llama"), head="value", frozen=True, seed=7)
    engine.export(str(tmp_path / "critic"))
    again = FsdpEngine.of(str(tmp_path / "critic"), head="value", frozen=True, seed=8)
    fresh = FsdpEngine.of(str(root / "llama"), head="value", frozen=True, seed=8)
    values, same, other = (e.values(columns["tokens"], columns["loss_mask"]) for e in (engine, again, fresh))
    close(values.values, same.values, 1e-6)
    assert (values.values != other.values).any()
    assert (values.values[~columns["loss_mask"].values] == 0).all()


def test_training_lowers_the_loss(root: Path, one_rank: None) -> None:
    engine = FsdpEngine.of(str(root / "qwen"), optimizer={"lr": 1e-2})
    update = [engine.update(batch_columns(), sft_objective, torch.arange(ROWS), ROWS) for _ in range(6)]
    losses = [metrics["loss"] for metrics in update]
    assert losses[-1] < 0.5 * losses[0]


def test_a_minibatch_without_tokens_takes_no_step(root: Path, one_rank: None) -> None:
    engine = FsdpEngine.of(str(root / "qwen"), optimizer=ADAM)
    columns, seen = batch_columns(), []

    def objective(batch: dict[str, Any], totals: Totals) -> tuple[torch.Tensor, dict[str, Any]]:
        seen.append(totals)
        return sft_objective(batch, totals)

    rows = torch.tensor([4, 0, 1])
    engine.update(part_of(columns, rows), objective, torch.arange(3), 3, minibatches=3)
    lengths = columns["loss_mask"].sum()
    assert seen == [Totals(tokens=int(lengths[0]), sequences=1), Totals(tokens=int(lengths[1]), sequences=1)]
    assert engine.scheduler.last_epoch == 2


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_skipped(root: Path, one_rank: None, factor: float) -> None:
    engine = FsdpEngine.of(str(root / "qwen"), optimizer=ADAM)
    before = {name: tensor.clone() for name, tensor in engine.weights()}

    def objective(batch: dict[str, Any], totals: Totals) -> tuple[torch.Tensor, dict[str, Any]]:
        return batch["logprobs"].values.sum() * factor, {}

    metrics = engine.update(batch_columns(), objective, torch.arange(ROWS), ROWS, minibatches=2)
    assert metrics["skipped"] == 2
    close(dict(engine.weights()), before, 0.0)


def test_bfloat16_computes_near_float32_and_keeps_its_masters(root: Path, one_rank: None) -> None:
    columns = batch_columns()
    engines = [FsdpEngine.of(str(root / "qwen"), optimizer=ADAM, dtype=d) for d in ("float32", "bfloat16")]
    exact, rounded = (e.logprobs(columns["tokens"], columns["loss_mask"]).values for e in engines)
    assert 0 < (exact - rounded).abs().max() < 0.1
    engines[1].update(columns, sft_objective, torch.arange(ROWS), ROWS)
    assert {tensor.dtype for _, tensor in engines[1].weights()} == {torch.float32}


def test_weights_carry_hugging_face_names_with_tied_ones_once(root: Path, one_rank: None) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(root / "qwen")
    expected = {name: p for name, p in model.state_dict().items() if name != "lm_head.weight"}
    close(dict(FsdpEngine.of(str(root / "qwen"), frozen=True).weights()), expected, 0.0)


def test_loading_is_quiet(root: Path, one_rank: None, capfd: pytest.CaptureFixture[str]) -> None:
    FsdpEngine.of(str(root / "llama"), head="value", frozen=True).export(str(root / "quiet"))
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == ""


def test_missing_weights_are_refused(root: Path, one_rank: None, tmp_path: Path) -> None:
    FsdpEngine.of(str(root / "llama"), head="value", frozen=True).export(str(tmp_path / "critic"))
    with pytest.raises(ValueError, match=r"holds no weights for lm_head\.weight"):
        FsdpEngine.of(str(tmp_path / "critic"), frozen=True)


if __name__ == "__main__":
    forked(main, 2)


def test_passes_that_score_have_a_size_of_their_own(
    root: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    stacked = FsdpEngine._stacked

    def counted(engine: FsdpEngine, batch: Any, *args: Any) -> torch.Tensor:
        sizes.append(batch.inputs["input_ids"].numel())
        return stacked(engine, batch, *args)

    monkeypatch.setattr(FsdpEngine, "_stacked", counted)
    columns, scores = batch_columns(), []
    for score_tokens in (None, 30):
        sizes.clear()
        engine = FsdpEngine.of(str(root / "qwen"), optimizer=ADAM, score_tokens=score_tokens)
        scores.append(engine.logprobs(columns["tokens"], columns["loss_mask"]).values)
        assert (len(sizes) == 1) == (score_tokens is None)
        assert engine.budget.tokens == 16384
    torch.testing.assert_close(*scores)
