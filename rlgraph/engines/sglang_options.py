"""SGLang's settings that ``serve.options`` may not give, since rlgraph gives them, with the reasons."""

from __future__ import annotations

# keys of `models.NAME.serve` that divide its tensor_parallel, and families of those whose sizes are known in
# which SGLang 0.5.23 splits attention by data (`attn_tp_size` in srt/models)
WITHIN = ("hosts", "expert_parallel", "attention_replicas")
REPLICATED = ("qwen3", "qwen3_moe")
FP8_BLOCK = 128  # rows and columns of a weight that share a scale

REASONS = {
    "model_path model": "it is models.NAME.path",
    "trust_remote_code": "it is models.NAME.trust_remote_code",
    "json_model_override_args": "it is models.NAME.config",
    "device": "it is that of the run's workers",
    "dtype": "it is serve.dtype, which weights are synced in",
    "max_total_tokens": "it is serve.cache_tokens, which the plan counts",
    "max_running_requests": "it is serve.max_rows, which the plan counts",
    "load_format weight_version": (
        "weights are brought to a server by syncs, by their names in the checkpoint"
    ),
    "quantization": "serve.quantization says it: SGLang would quantize weights once, as it starts",
    "speculative_accept_threshold_single speculative_accept_threshold_acc": (
        "a draft's tokens are taken as often as the model itself would draw them: else log-probs are of no "
        "policy"
    ),
    "enable_lora max_lora_rank max_loras_per_batch lora_target_modules": (
        "serve.lora says whether an adapter is served, and train.lora which"
    ),
    "enable_memory_saver enable_weights_cpu_backup": "the plan says what sleeps when",
    "tp_size tensor_parallel_size base_gpu_id gpu_id_step nnodes node_rank dist_init_addr": (
        "serve.tensor_parallel says how many devices a server spans, and serve.hosts on how many hosts"
    ),
    "dp_size data_parallel_size pp_size pipeline_parallel_size": (
        "a server is one copy of the model; a pool has one server for each tensor-parallel group"
    ),
    "ep_size ep expert_parallel_size": "serve.expert_parallel says it",
    "attn_dp_size attention_data_parallel_size enable_dp_attention": (
        "serve.attention_replicas says it, and the plan counts its memory"
    ),
    "skip_tokenizer_init is_embedding": "token ids go in and come out: the run has the tokenizer",
    "host port api_key admin_api_key ssl_keyfile ssl_certfile": (
        "each server answers on a port of its own, with a key that the run draws"
    ),
    "skip_server_warmup": "it is asked for a token as soon as it is up",
    "config": "options are written out in the graph, so that the plan holds them",
}
OWNED = {option: why for options, why in REASONS.items() for option in options.split()}
