"""Frozen weights that several models of one process hold once, matched by the weights of the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rlgraph.runtime.engines.weights.naming import WeightView, WeightViews, base_name

FrozenWeights = Mapping[
    tuple[WeightView, ...], torch.Tensor
]  # parameters, by their weights of the checkpoint


def frozen_weights(model: torch.nn.Module, views: WeightViews) -> FrozenWeights:
    """Return the parameters that do not train, by the weights of the checkpoint that they hold.

    These are the same for a language model and for one with a value head, with or without an adapter.
    """
    frozen: dict[tuple[WeightView, ...], torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        parameter_views = views.get(base_name(name))
        if parameter_views and not parameter.requires_grad:
            frozen[tuple(parameter_views)] = parameter
    return frozen


def put_on(model: torch.nn.Module, views: WeightViews, weights: FrozenWeights) -> None:
    """Put a model into the memory of weights that another model holds. Tied parameters stay one.

    Args:
        model: its parameters may have no memory, and it has no adapters. Those that ``weights`` lack stay.
        views: those of ``model``.
        weights: by the weights of the checkpoint that they hold.
    """
    replacements: dict[int, torch.nn.Parameter] = {}  # by the identity of a parameter, which tied ones share
    for name, parameter in model.named_parameters():
        weight = weights.get(tuple(views[name]))
        if weight is not None:
            replacements[id(parameter)] = torch.nn.Parameter(weight, requires_grad=False)
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        if id(tensor) in replacements:
            state[name] = replacements[id(tensor)]
        elif not isinstance(tensor, torch.nn.Parameter):
            state[name] = weights[tuple(views[name])]
    model.load_state_dict(state, assign=True)
