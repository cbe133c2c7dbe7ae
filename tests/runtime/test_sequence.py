"""Ranks that share the tokens of their rows (``train.sequence_parallel``) against one rank that has them all.

A launch of two ranks and one of four (this file as a script) run every case; ``data`` ranks are those that
have rows of their own.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import at_night, cases_asked, forked, launch
from test_fsdp import ROWS, SHAPE, VOCAB
from torch.distributed.device_mesh import init_device_mesh

from rlgraph.costs import limits
from rlgraph.costs.models.fields import UNSHARED, Family
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import Metric, Totals
from rlgraph.runtime.engines.fsdp.batching import Budget, cut, micro_batches
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.fsdp.load import load_sharded
from rlgraph.runtime.engines.fsdp.options import TrainOptions
from rlgraph.runtime.engines.fsdp.ranks import ModelRanks
from rlgraph.runtime.engines.fsdp.shards import gather_full
from rlgraph.runtime.engines.model_files import ModelFiles
from rlgraph.runtime.engines.sequence.attention import check
from rlgraph.runtime.engines.sequence.groups import SequenceGroup, sequence_group
from rlgraph.runtime.worker.process_groups import hybrid_mesh

pytestmark = pytest.mark.slow

ONES = str(Path(__file__).parent / "ones.yaml")
ADAM = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "packed": ("qwen3", {}),
    "beside": ("qwen3", {"packing": False, "micro_tokens": 30}),
    "one key head": ("llama", {"reshard": True, "recompute": True, "micro_tokens": 40}),
    "windows": ("windows", {}),
    "critic": ("llama", {"head": "value", "seed": 7}),
    "adapters": ("qwen3", {"lora": {"rank": 4, "alpha": 8.0}}),
    "again": ("qwen3", {"recompute": True, "packing": False}),
    "compiled": ("qwen3", {"compile": True, "recompute": True, "packing": False}),
    "compiled ring": ("llama", {"compile": True, "reshard": True, "recompute": True, "micro_tokens": 40}),
}
# ranks -> ways to share: name, sequence_parallel; of replicas each two ranks share the shards of a copy
WAYS = {"2": [("2", 2)], "4": [("4", 4), ("2 x 2", 2), ("2 x 2, replicas", 2)]}
REPLICAS = ("packed", "one key head")  # the cases of replicas

# by two ranks alone, since they take long; and what is the same without a compiler
COMPILED = {"compiled": "again", "compiled ring": "one key head"}
BACKENDS = {"compiled ring": "eager"}  # runs layers as they were traced: to compile them takes minutes
DAY = ("packed", "one key head", "windows")


def cases_of(way: str) -> list[str]:
    """The cases of a way to share."""
    return [case for case in CASES if case not in COMPILED and ("replicas" not in way or case in REPLICAS)]


ASKED = [
    *at_night(
        ((case, way) for several in WAYS.values() for way, _ in several for case in cases_of(way)), DAY
    ),
    *at_night([(case, "2") for case in COMPILED], ()),
]


def write_models(root: Path) -> None:
    """Random models of two layers with four query heads; ``llama`` has one key head, the others two."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    window = {
        "use_sliding_window": True,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "qwen3": ("qwen3", {"tie_word_embeddings": True}),
        "llama": ("llama", {"num_key_value_heads": 1}),
        "windows": ("qwen2", window),
    }
    for name, (kind, more) in kinds.items():
        config = AutoConfig.for_model(kind, **{**SHAPE, "head_dim": 8, **more})
        AutoModelForCausalLM.from_config(config).save_pretrained(root / name)


def batch_columns() -> dict[str, Any]:
    """Rows of 4 to 26 tokens, three to a prompt; row 4 scores nothing."""
    generator = torch.Generator().manual_seed(3)

    def some(count: int) -> list[int]:
        return torch.randint(0, VOCAB, (count,), generator=generator).tolist()

    prompts = [some(3 + 2 * group) for group in range(-(-ROWS // 3))]
    lists = [prompts[row // 3] + some(1 + 5 * row % 16) for row in range(ROWS)]
    tokens = Ragged.of(lists)
    mask = [
        [t >= len(prompts[row // 3]) and t % 5 != 3 and row != 4 for t in range(len(tokens[row]))]
        for row in range(ROWS)
    ]
    return {
        "tokens": tokens,
        "loss_mask": Ragged.of(mask, dtype=torch.bool),
        "advantages": tokens.like(torch.randn(len(tokens.values), generator=generator)),
        "rewards": torch.randn(ROWS, generator=generator),
        "names": [f"row {row}" for row in range(ROWS)],
    }


def objective(batch: dict[str, Any], totals: Totals) -> tuple[torch.Tensor, dict[str, Any]]:
    mask, rewards = batch["loss_mask"].values, batch["rewards"]
    assert len(batch["names"]) == len(rewards)
    best = Metric("max", "samples", {"most": rewards.max()})
    metrics = {"reward": (rewards.sum(), len(rewards)), "best": best}
    if "new_values" in batch:
        error = (batch["new_values"].values - batch["advantages"].values).square()[mask].sum()
        return error / totals.tokens, metrics
    gain = (batch["logprobs"].values * batch["advantages"].values)[mask].sum()
    bonus = 0.1 * batch["entropy"].values[mask].sum()
    likely = (batch["logprobs"].sum() / 10).square().sum()  # a loss that looks across the tokens of a row
    return -(gain + bonus) / totals.tokens + likely / totals.sequences, metrics


def rows_of_rank() -> torch.Tensor:
    """Rows 0 to 8 on the first rank, 9 to 12 on the second; the others have none."""
    if dist.get_world_size() == 1:
        return torch.arange(ROWS)
    return [torch.arange(9), torch.arange(9, ROWS), *[torch.arange(0)] * 2][dist.get_rank()]


def measured(engine: FsdpEngine) -> dict[str, Any]:
    """Scores of this rank's rows, gradients of the first step, metrics and weights after six."""
    rows = rows_of_rank()
    columns = cut(batch_columns(), rows)
    given = columns["tokens"], columns["loss_mask"]
    value = engine.head == "value"
    if value:
        scores = [engine.values(*given)]
    else:
        scores = [engine.logprobs(*given), *engine.squares(*given), *engine.entropies(*given)]
    gradients: dict[str, torch.Tensor] = {}
    step = engine._step

    def watched(sums: Any) -> None:
        if not gradients:
            own = [(n, p.grad) for n, p in engine.model.named_parameters() if p.grad is not None]
            full = gather_full(own, engine.copy_group, layer_parts=engine.layer_parts)
            gradients.update((n, g.clone()) for n, g in full)
        step(sums)

    engine._step = watched  # type: ignore[method-assign]
    metrics = engine.update(columns, objective, rows, ROWS, minibatches=3, epochs=2, entropy=not value)
    assert all(len(column) == len(rows) for column in scores)
    return {
        "scores": [dict(zip(rows.tolist(), column.tolist(), strict=True)) for column in scores],
        "metrics": metrics,
        "gradients": gradients,
        "weights": dict(engine.weights()),
    }


def scenario(root: Path, case: str, sequence: int, **where: Any) -> dict[str, Any]:
    model, options = CASES[case]
    with_defaults = {"optimizer": ADAM, "micro_tokens": 100, **options, **where}
    group = sequence_group(with_defaults.get("group") or dist.group.WORLD, sequence)
    return measured(FsdpEngine.of(str(root / model), sequence=group, **with_defaults))


def main(rank: int, root: Path, ranks: str, *cases: str) -> None:
    limits.LOGITS = 5 * VOCAB  # the head on five tokens at a time
    whole = init_device_mesh("cpu", (int(ranks),))
    found = {}
    for way, share in WAYS[ranks]:
        where: dict[str, Any] = {"mesh": whole}
        if "replicas" in way:
            where = {"mesh": hybrid_mesh(whole, 2), "group": whole.get_group()}
        for case in [case for case in cases if case in COMPILED or case in cases_of(way)]:
            compiler = partial(torch.compile, backend=BACKENDS.get(case, "inductor"))
            with patch("torch.compile", compiler):
                found[way, case] = scenario(root, case, share, **where)
    torch.save(found, root / f"rank-{ranks}-{rank}.pt")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sequence")
    write_models(root)
    return root


@pytest.fixture(scope="module")
def several(root: Path, request: pytest.FixtureRequest) -> dict[Any, list[dict[str, Any]]]:
    """Way and case -> what each rank found."""
    cases = {*cases_asked(request)}
    found: dict[Any, list[dict[str, Any]]] = {}
    for ranks in WAYS:
        (root / "store").unlink(missing_ok=True)
        launch(__file__, root, ranks, *sorted({*(CASES if ranks == "2" else cases_of(ranks))} & cases))
        parts = [torch.load(root / f"rank-{ranks}-{rank}.pt") for rank in range(int(ranks))]
        found |= {key: [part[key] for part in parts] for key in parts[0]}
    return found


def close(left: Any, right: Any, tolerance: float) -> None:
    torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("case", "way"), ASKED)
def test_ranks_that_share_tokens_do_what_one_does(
    root: Path, one_rank: None, several: dict[Any, list[dict[str, Any]]], case: str, way: str
) -> None:
    one, ranks = scenario(root, COMPILED.get(case, case), 1), several[way, case]
    for kind, scores in enumerate(one["scores"]):
        together = {row: own for rank in ranks for row, own in rank["scores"][kind].items()}
        close(dict(sorted(together.items())), scores, 1e-5)
    assert any(gradient.abs().max() > 1e-2 for gradient in one["gradients"].values())
    close(ranks[0]["gradients"], one["gradients"], 1e-5)
    close(ranks[0]["metrics"], one["metrics"], 1e-4)
    close(ranks[0]["weights"], one["weights"], 1e-4)
    for rank in ranks:
        assert rank["metrics"] == ranks[0]["metrics"]


def test_what_attends_is_told_of_the_whole_width() -> None:
    inputs = {
        "input_ids": torch.arange(8)[None],
        "position_ids": torch.arange(8)[None],
        "attention_mask": object(),
    }
    part = SequenceGroup(cast(Any, "a group"), 1, 2).share(inputs, torch.tensor([0, 5, 6]))
    assert part.inputs["input_ids"].tolist() == part.inputs["position_ids"].tolist() == [[4, 5, 6, 7]]
    assert part.inputs["attention_mask"] is inputs["attention_mask"]
    assert part.cells.tolist() == [1, 2] and part.sizes == (1, 2)


def test_each_rank_has_its_part_of_the_width() -> None:
    columns = {name: batch_columns()[name] for name in ("tokens", "loss_mask")}
    shares = []
    for rank in range(3):
        budget = Budget(60, sequence=SequenceGroup(cast(Any, "a group"), rank, 3))
        shares.append(micro_batches(columns, budget, torch.device("cpu")))
    for several in zip(*shares, strict=True):
        parts = [part.inputs["input_ids"] for part in several]
        whole = torch.cat(parts, 1)
        assert {part.shape for part in parts} == {(whole.shape[0], whole.shape[1] // 3)}
        tokens = several[0].columns["tokens"].padded()
        width = min(tokens.shape[1], whole.shape[1])
        assert whole[:, :width].equal(tokens[:, :width]) and whole.numel() <= 60
        assert torch.cat([part.inputs["position_ids"][0] for part in several]).equal(
            torch.arange(whole.shape[1])
        )
        labels = torch.cat([part.labels for part in several])
        assert labels.equal(several[0].columns["tokens"].values[several[0].places])
        assert len(labels) == sum(several[0].sizes)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": ({"num_hidden_layers": 1, "state_size": 4}, "carry a state"),
    "gpt_oss": ({"head_dim": 8}, "AttentionInterface"),
    "bloom": ({"n_head": 4}, "takes no positions"),
    "qwen3_next": ({"layer_types": ["linear_attention"] * 2}, "carry a state"),
    "phi3": (
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "pad_token_id": 0,
            "original_max_position_embeddings": 8,
            "max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 6,
                "long_factor": [2.0] * 6,
            },
        },
        "how long a row is",
    ),
    "gemma3_text": ({"use_bidirectional_attention": True}, "sees later tokens"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_whose_tokens_cannot_be_shared_is_refused_by_name(kind: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"hidden_size": 48, "num_hidden_layers": 2, "vocab_size": VOCAB}
    settings, fault = REFUSED[kind]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**shape, **settings}))
    with pytest.raises(ValueError, match=rf"^{kind}: .*{fault}.* set train.sequence_parallel to 1"):
        check(model, 4)
    check(model, 1)


def test_the_compiler_refuses_the_families_that_a_worker_would() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"hidden_size": 384, "num_hidden_layers": 4, "vocab_size": VOCAB, "pad_token_id": 0}
    for kind in get_args(Family):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape))
        with pytest.raises(ValueError, match=kind) if kind in UNSHARED else nullcontext():
            check(model, 4)


def test_it_is_refused_before_weights_are_read(root: Path, one_rank: None, tmp_path: Path) -> None:
    config = json.loads((root / "qwen3" / "config.json").read_text())
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    mesh, four = init_device_mesh("cpu", (1,)), SequenceGroup(cast(Any, "a group"), 0, 4)
    ranks = ModelRanks(mesh, mesh.get_group(), sequence=four)
    with pytest.raises(ValueError, match="how long a row is"):
        load_sharded(ModelFiles(str(tmp_path)), TrainOptions(), ranks)  # a folder without weights
    with pytest.raises(ValueError, match=r"1 ranks can't be shared out in groups of 3"):
        sequence_group(cast(Any, dist.group.WORLD), 3)


if __name__ == "__main__":
    forked(main, int(sys.argv[2]))
