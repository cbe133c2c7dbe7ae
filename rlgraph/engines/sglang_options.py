"""SGLang's settings that ``serve.options`` may not give, since rlgraph gives them, with the reasons."""

from __future__ import annotations

ADDRESS = "each server answers on a port of its own, with a key that the run draws"
SPAN = "serve.tensor_parallel says how many devices a server spans, and serve.hosts on how many hosts"
COPIES = "a server is one copy of the model; a pool has one server for each tensor-parallel group"
BROUGHT = "weights are brought to a server by syncs, by their names in the checkpoint"
TOKENS = "token ids go in and come out: the run has the tokenizer"
MEMORY = "the plan says what sleeps when"
ADAPTERS = "serve.lora says whether an adapter is served, and train.lora which"
EXACT = (
    "a draft's tokens are taken as often as the model itself would draw them: else log-probs are of no policy"
)

EXPERTS = "serve.expert_parallel says it"
ATTENTION = "serve.attention_replicas says it, and the plan counts its memory"

# keys of `models.NAME.serve` that divide its tensor_parallel, and families of those whose sizes are known in
# which SGLang 0.5.23 splits attention by data (`attn_tp_size` in srt/models)
WITHIN = ("hosts", "expert_parallel", "attention_replicas")
REPLICATED = ("qwen3", "qwen3_moe")
FP8_BLOCK = 128  # rows and columns of a weight that share a scale

OWNED = {
    "model_path": "it is models.NAME.path",
    "model": "it is models.NAME.path",
    "trust_remote_code": "it is models.NAME.trust_remote_code",
    "json_model_override_args": "it is models.NAME.config",
    "device": "it is that of the run's workers",
    "dtype": "it is serve.dtype, which weights are synced in",
    "max_total_tokens": "it is serve.cache_tokens, which the plan counts",
    "max_running_requests": "it is serve.max_rows, which the plan counts",
    "load_format": BROUGHT,
    "weight_version": BROUGHT,
    "quantization": "serve.quantization says it: SGLang would quantize weights once, as it starts",
    "speculative_accept_threshold_single": EXACT,
    "speculative_accept_threshold_acc": EXACT,
    "enable_lora": ADAPTERS,
    "max_lora_rank": ADAPTERS,
    "max_loras_per_batch": ADAPTERS,
    "lora_target_modules": ADAPTERS,
    "enable_memory_saver": MEMORY,
    "enable_weights_cpu_backup": MEMORY,
    "tp_size": SPAN,
    "tensor_parallel_size": SPAN,
    "base_gpu_id": SPAN,
    "gpu_id_step": SPAN,
    "nnodes": SPAN,
    "node_rank": SPAN,
    "dist_init_addr": SPAN,
    "dp_size": COPIES,
    "data_parallel_size": COPIES,
    "pp_size": COPIES,
    "pipeline_parallel_size": COPIES,
    "ep_size": EXPERTS,
    "ep": EXPERTS,
    "expert_parallel_size": EXPERTS,
    "attn_dp_size": ATTENTION,
    "attention_data_parallel_size": ATTENTION,
    "enable_dp_attention": ATTENTION,
    "skip_tokenizer_init": TOKENS,
    "is_embedding": TOKENS,
    "host": ADDRESS,
    "port": ADDRESS,
    "api_key": ADDRESS,
    "admin_api_key": ADDRESS,
    "ssl_keyfile": ADDRESS,
    "ssl_certfile": ADDRESS,
    "skip_server_warmup": "it is asked for a token as soon as it is up",
    "config": "options are written out in the graph, so that the plan holds them",
}
