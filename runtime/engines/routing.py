"""The experts that a mixture's routers choose: noted while a model generates, and given back while it trains.

A router of transformers ranks all experts and takes the first ``k`` by one ``torch.topk``; what comes behind
(softmax, scales, sums) it computes for those. Here its own forward runs, and only the answer of that ``topk``
is replaced where a choice is given: the scores of the given experts, which gradients flow through. So gates
are the router's own, over experts that the serving engine chose: routing replay (R3, arXiv 2510.11370).

Shapes: ``[tokens, layers, k]``, layers that have a router, in the order of the model.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode

OWN = -1  # in place of an expert: the router chooses by itself


class Routing:
    """The routers of a transformers model.

    Attributes:
        given: integers ``[tokens, layers, k]`` by which forward passes route their tokens, and backward
            passes what they compute again; ``OWN`` where a router chooses by itself. None: it does for all.
        noted: where it is a list, each router appends what its pass chose, ``[tokens, k]``.

    Raises:
        ValueError: the model has no routers, or of another form.
    """

    def __init__(self, model: Any) -> None:
        self.given: torch.Tensor | None = None
        self.noted: list[torch.Tensor] | None = None
        routers = routers_of(model)
        if not routers:
            law = f"{model.config.model_type}: {type(model).__name__} has no routers whose choices can be "
            raise ValueError(f"{law}told or replayed; leave `routing` out of the graph")
        self.shape = len(routers), routers[0].top_k
        for layer, router in enumerate(routers):
            router.forward = partial(self._route, layer, router.num_experts, router.forward)

    def replay(self, given: torch.Tensor | None) -> None:
        """Route by a choice ``[..., layers, k]`` from now on, in the order of the model's tokens.

        Raises:
            ValueError: it is of other layers, or of another number of experts per token.
        """
        if given is not None and given.shape[-2:] != self.shape:
            law = f"`routing` says {list(given.shape[-2:])} experts per token; the model's routers choose"
            raise ValueError(f"{law} {list(self.shape)} (layers, k)")
        self.given = None if given is None else given.flatten(0, -3)

    def note(self) -> None:
        """Note what the next forward pass chooses."""
        self.noted = []

    def take(self) -> torch.Tensor:
        """Return what a forward pass chose since ``note``: int16 ``[tokens, layers, k]``, on the host."""
        assert self.noted is not None
        noted = self.noted
        self.noted = None
        return torch.stack(noted, 1).to(torch.int16).cpu()

    def _route(self, layer: int, experts: int, forward: Any, hidden: torch.Tensor) -> Any:
        """Run a router's own forward, whose choice is given or noted."""
        if self.given is None and self.noted is None:
            return forward(hidden)
        choice_given = None if self.given is None else self.given[:, layer]
        with _Choice(experts, self.shape[1], choice_given) as choice:
            routed = forward(hidden)
        assert choice.chosen is not None, "the router chose by something else than torch.topk"
        if self.noted is not None:
            self.noted.append(choice.chosen)
        return routed


class _Choice(TorchFunctionMode):
    """Answers the ``torch.topk`` by which a router chooses ``k`` of all experts."""

    def __init__(self, experts: int, k: int, given: torch.Tensor | None) -> None:
        super().__init__()
        self.experts = experts
        self.k = k
        self.given = given
        self.chosen: torch.Tensor | None = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = function(*args, **(kwargs or {}))
        if getattr(function, "__name__", "") != "topk":
            return answer
        scores: torch.Tensor = args[0]
        if scores.shape != (len(scores), self.experts):
            return answer
        values, self.chosen = cast(tuple[torch.Tensor, torch.Tensor], answer)
        assert values.shape[1] == self.k
        if self.given is None:
            return answer
        self.chosen = torch.where(self.given == OWN, self.chosen, self.given.long())
        return scores.gather(1, self.chosen), self.chosen


def routers_of(model: torch.nn.Module) -> list[Any]:
    """Return the modules that are routers in the form that transformers gives all families."""
    routers = []
    for module in model.modules():
        is_named_so = type(module).__name__.lower().endswith("topkrouter")
        if is_named_so and hasattr(module, "num_experts") and hasattr(module, "top_k"):
            routers.append(module)
    return routers
