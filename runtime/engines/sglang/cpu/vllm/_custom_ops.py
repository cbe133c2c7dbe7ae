"""The one kernel that SGLang takes from vLLM on a plain CPU, in torch."""

import torch


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    """Rotate queries and keys in place (Su et al., arXiv 2104.09864), halves paired as in GPT-NeoX.

    Args:
        positions: int64 ``[tokens]``.
        query: ``[tokens, heads * head_size]``.
        key: ``[tokens, key heads * head_size]``.
        head_size: width of a head.
        cos_sin_cache: ``[positions, rotated]``, cosines in the first half, sines in the second.
        is_neox: whether the first half of a head is paired with the second; else neighbours are.
    """
    if not is_neox:
        raise NotImplementedError("neighbours as pairs (GPT-J) are not covered")
    cosines, sines = cos_sin_cache[positions.flatten()].to(query.dtype)[:, None].chunk(2, dim=-1)
    for states in (query, key):
        heads = states.view(len(cosines), -1, head_size)
        left, right = heads[..., : 2 * cosines.shape[-1]].chunk(2, dim=-1)
        turned = torch.cat((left * cosines - right * sines, right * cosines + left * sines), dim=-1)
        heads[..., : turned.shape[-1]] = turned
