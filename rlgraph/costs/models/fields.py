"""The fields of a Hugging Face ``config.json`` that decide shapes and context, by transformers' defaults."""

from pathlib import Path
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

from rlgraph.section import Count, Natural
from rlgraph.syntax.source import read

Family = Literal[
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "gemma2", "gemma3_text",
    "glm4", "glm4_moe", "deepseek_v3", "phi3", "olmo2", "olmo3", "gpt_oss",
]  # fmt: skip
FAMILIES = read(Path(__file__).with_name("families.yaml")).plain()
# families of models that see pictures, and those of their text, which alone is counted
TEXTS: dict[str, str] = FAMILIES["texts"]
# families whose decoder layers devices can't divide, or whose rows they can't share, and why
UNDIVIDED: dict[str, str] = FAMILIES["undivided"]
UNSHARED: dict[str, str] = FAMILIES["unshared"]


class Fields(BaseModel):
    """The fields that decide shapes, and the context; all others are passed over."""

    model_config = ConfigDict(
        extra="ignore", strict=True, frozen=True, protected_namespaces=(), defer_build=True
    )

    model_type: Family
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    vocab_size: Count
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    use_qk_norm: bool = False
    sliding_window: Count | None = None
    max_position_embeddings: Count | None = None
    layer_types: list[str] | None = None
    full_attention_interval: Count | None = None
    sliding_window_pattern: Count | None = None
    num_local_experts: Natural = 0
    num_experts: Natural = Field(0, validation_alias=AliasChoices("num_experts", "n_routed_experts"))
    num_experts_per_tok: Count = 1
    moe_intermediate_size: Count | None = None
    decoder_sparse_step: Count = 1
    mlp_only_layers: list[Natural] | None = None
    first_k_dense_replace: Natural = 0
    n_shared_experts: Natural = 0
    shared_expert_intermediate_size: Natural = 0
    q_lora_rank: Count | None = None
    kv_lora_rank: Natural = 0
    qk_nope_head_dim: Natural = 0
    qk_rope_head_dim: Natural = 0
    v_head_dim: Natural = 0
    linear_num_key_heads: Natural = 0
    linear_num_value_heads: Natural = 0
    linear_key_head_dim: Natural = 0
    linear_value_head_dim: Natural = 0
    linear_conv_kernel_dim: Natural = 0

    @model_validator(mode="before")
    @classmethod
    def _told(cls, fields: Any) -> Any:
        return {**FAMILIES["untold"].get(fields.get("model_type"), {}), **fields}
