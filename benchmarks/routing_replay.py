"""How far apart do training and serving engine get over a mixture's experts, with and without replay?

A random mixture of experts (Qwen3-MoE, 4 layers of 32 experts, 4 a token) generates in bfloat16, as serving
engines do, or with weights a little off. A float32 train engine scores the same tokens by its own choice of
experts, and by the server's (``rollout.routing``, R3, arXiv 2510.11370). The gap is |log p_train - log
p_serve| over sampled tokens, in nats. Both passes run in one process, on the same weights and tokens.

    python benchmarks/routing_replay.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig

from rlgraph.nodes.rollout.rollout import assemble
from rlgraph.ops import Request, Sampling
from rlgraph.runtime.engines.fsdp.batching import micro_batches
from rlgraph.runtime.engines.fsdp.engine import FsdpEngine
from rlgraph.runtime.engines.routing import OWN
from rlgraph.runtime.engines.transformers.engine import TransformersEngine

VOCABULARY, LAYERS, EXPERTS, CHOSEN = 512, 4, 32, 4
PROMPTS, SAMPLES, PROMPT, NEW = 16, 4, 16, 96
NOISE = 0.01  # of a weight's standard deviation
TARGET = 0.5  # of the gap to a server in bfloat16


def mixture(root: Path) -> str:
    """Write a random mixture; logits are as sharp as a trained model's."""
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        norm_topk_prob=True,
        initializer_range=0.1,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(root)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(root)
    return str(root)


def server(path: str, kind: str) -> TransformersEngine:
    engine = TransformersEngine(path, dtype="bfloat16" if kind == "bfloat16" else "float32")
    engine.load_pretrained()
    if kind == "noise":
        for weight in engine.weights.values():
            weight.add_(NOISE * weight.std() * torch.randn_like(weight) if weight.numel() > 1 else 0.0)
    return engine


def compare(train: FsdpEngine, path: str, kind: str) -> float:
    """Print the gaps to one server, and return their ratio."""
    torch.manual_seed(1)
    prompts = torch.randint(0, VOCABULARY, (PROMPTS, PROMPT)).tolist()
    requests = [Request(ids, range(n * SAMPLES, (n + 1) * SAMPLES)) for n, ids in enumerate(prompts)]
    engine = server(path, kind)
    answers = engine.generate(requests, Sampling(NEW, routing=True))
    pairs = [(ids, g) for ids, several in zip(prompts, answers, strict=True) for g in several]
    rows = assemble(engine.tokenizer, pairs, [0] * len(pairs))
    columns = {"tokens": rows.tokens, "loss_mask": rows.loss_mask}
    told: Any = rows.routing
    own = train.logprobs(**columns).values  # type: ignore[arg-type]
    replayed = train.logprobs(**columns, routing=told).values  # type: ignore[arg-type]
    mask, sampled = rows.loss_mask.values, rows.rollout_logprobs.values
    gaps = [(scores - sampled)[mask].abs() for scores in (own, replayed)]
    others = differing(train, {**columns, "routing": told})
    ratio = float(gaps[1].mean() / gaps[0].mean())
    print(f"server: {kind}, {int(mask.sum())} sampled tokens")
    print(f"  tokens whose own experts are others, of each layer: {', '.join(f'{o:.1%}' for o in others)}")
    for name, gap in zip(("own choice", "replayed"), gaps, strict=True):
        print(
            f"  {name:<10} |gap| mean {gap.mean():.2e}, 99 % {gap.quantile(0.99):.2e}, most {gap.max():.2e}"
        )
    print(f"  ratio of means, replayed to own choice: {ratio:.3f}")
    return ratio


def differing(train: FsdpEngine, columns: dict[str, Any]) -> list[float]:
    """Return the share of tokens, in each layer, that the trainer would route to other experts."""
    count, different = 0, torch.zeros(LAYERS)
    assert train.routing is not None
    for batch in micro_batches(columns, train.budget, torch.device("cpu")):
        assert batch.routing is not None
        train.routing.replay(None)
        train.routing.note()
        with torch.no_grad():
            train.model.token_scores(batch, 1.0, "none")
        told = batch.routing.flatten(0, 1).long()
        chosen = train.routing.take().long()
        read = told[:, 0, 0] != OWN
        count += int(read.sum())
        different += (told[read].sort(-1)[0] != chosen[read].sort(-1)[0]).any(-1).sum(0)
    return [float(share) for share in different / count]


def main() -> int:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as root:
        path = mixture(Path(root))
        train = FsdpEngine.of(path, frozen=True)
        ratios = [compare(train, path, kind) for kind in ("float32", "bfloat16", "noise")]
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    return int(ratios[1] > TARGET or max(ratios) > 1)


if __name__ == "__main__":
    sys.exit(main())
