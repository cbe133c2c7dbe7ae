"""A tokenizer of bytes with control tokens and a chat template: (control tokens, eos, template)."""

from __future__ import annotations

from typing import Any

CHATML = (
    ["<|im_start|>", "<|im_end|>", "<think>", "</think>"],
    "<|im_end|>",
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
)


def tokenizer_of(form: tuple[list[str], str, str], unflagged: tuple[str, ...] = ()) -> Any:
    """A tokenizer of bytes with a family's control tokens, of which some are not flagged special."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    controls, eos, template = form
    first = [*dict.fromkeys(["<pad>", eos, *controls])]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate([*first, *alphabet])}, merges=[]))
    special = [token for token in first if token not in unflagged]
    inner.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    inner.add_tokens([AddedToken(token, normalized=False, special=False) for token in unflagged])
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=eos, pad_token="<pad>", chat_template=template, name_or_path="bytes"
    )
