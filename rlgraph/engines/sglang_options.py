"""SGLang's own settings that ``options`` may not give, since rlgraph gives them, with the reasons."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import yaml

# keys of its section that divide `serve.tensor_parallel`, and families of those whose sizes are known in
# which SGLang 0.5.23 splits attention by data (`attn_tp_size` in srt/models)
WITHIN = ("hosts", "expert_parallel", "attention_replicas")
REPLICATED = ("qwen3", "qwen3_moe")
FP8_BLOCK = 128  # rows and columns of a weight that share a scale


@cache
def owned() -> Mapping[str, str]:
    """Return the settings that options may not give, each with the reason."""
    text = Path(__file__).with_name("sglang_owned.yaml").read_text("utf-8")
    options_by_reason: dict[str, list[str]] = yaml.safe_load(text)
    reasons: dict[str, str] = {}
    for reason, options in options_by_reason.items():
        reasons |= dict.fromkeys(options, reason)
    return reasons
