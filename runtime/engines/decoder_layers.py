"""Finds the decoder layers of a transformers model."""

import torch


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the repeated blocks: those that transformers would not split, else the longest ModuleList."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return blocks or list(max(lists, key=len, default=[]))
