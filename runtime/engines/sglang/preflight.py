"""A serve section that asks more of SGLang than it has is refused before a run."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from rlgraph.ir.plan import ServePlan
from rlgraph.runtime.engines.findings import Findings, wrong
from rlgraph.runtime.engines.model_files import attention_kinds, context_of
from rlgraph.runtime.engines.sglang.options import wrong as wrong_options

# families whose sliding windows SGLang 0.5.23 has too (srt/models); in others every layer sees all tokens
WINDOWED = frozenset(
    {"gemma2", "gemma3", "gemma3_text", "gemma3n_text", "gemma4", "gemma4_text", "gpt_oss", "cohere2"}
    | {"olmo3", "exaone4", "ministral3", "phimoe"}
)

# families in which each linear layer of transformers is one of SGLang's
ADAPTED = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")


def problems(serve: ServePlan, device: str) -> Findings:
    """Yield what is wrong: a dtype without kernels, SGLang not installed, settings that it does not take."""
    embedded = "SERVE.engine=transformers"
    chooses_kernels = not serve.addresses and "attention_backend" not in serve.options
    is_float32_on_a_gpu = device == "cuda" and serve.dtype == "float32"
    if is_float32_on_a_gpu and chooses_kernels:
        law = "SGLang's attention kernels on CUDA take no float32"
        yield wrong(law, f"SERVE.dtype=bfloat16, or {embedded}", "wrong-dtype", ("dtype",))
    if find_spec("sglang") is None:
        remedy = "pip install 'rlgraph-compiler[sglang]' (on a machine without a GPU: make sglang)"
        law = "SGLang is not installed beside this rlgraph"
        yield wrong(law, f"{remedy}, or {embedded}", "no-engine", ("engine",))
        return
    if serve.options:
        for option, law in wrong_options(serve.options).items():
            yield wrong(law, kind="serve-option", key=("options", option))


def unfit(config: Any) -> str:
    """Return why SGLang would score a model of a configuration unlike transformers, or nothing."""
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    if not window or text.model_type in WINDOWED or "sliding_attention" not in attention_kinds(config):
        return ""
    context = context_of(config)
    if context and context <= window:
        return ""
    law = f"{config.model_type}: SGLang sees all tokens where this model has windows of {window}"
    remedy = "let training see them too by models.NAME.config={sliding_window: null}, or keep rows within by "
    return f"{law}; {remedy}{{max_position_embeddings: {window}}}"


def unfit_adapters(config: Any) -> str:
    """Return why SGLang can't serve adapters of a model of a configuration, or nothing."""
    family = config.get_text_config().model_type
    if family in ADAPTED:
        return ""
    return f"{family}: adapters are served of {', '.join(ADAPTED)}; set models.NAME.serve.lora=merged"
