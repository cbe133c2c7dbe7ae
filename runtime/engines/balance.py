"""Load balance of a mixture's experts in training: an auxiliary loss, and the bias by which routers choose.

The loss of a layer with E experts is that of Switch Transformer (arXiv 2101.03961, section 2.2), as
transformers computes it::

    E sum over e of f_e P_e      f_e: how often a token chose expert e, P_e: its mean probability

It is k, the experts per token, where all are chosen alike. Layers are averaged. Probabilities are a softmax
of logits; of routers with a bias, which choose by sigmoids, sigmoids over their sum (DeepSeek V3, arXiv
2412.19437, section 2.1.2). f_e is of one forward pass, with all ranks that share its tokens; gradients flow
through P_e alone.

The bias of such a router moves after each optimizer step by a constant, up for experts with less than the
mean of the step's tokens, and down for those with more, without a gradient (arXiv 2408.15664).

A token counts once for every row that it is in, also where rows share the prompt that a pass reads.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import logsigmoid

from rlgraph.runtime.engines.routing import routers_of

BIAS = "e_score_correction_bias"


class Balance:
    """The load of each expert in an optimizer step, and what it changes.

    Args:
        model: a transformers model.
        coef: of the auxiliary loss; 0: none.
        rate: by which a bias moves; 0: none does.

    Raises:
        ValueError: the model has no routers, or no bias that could move.
    """

    def __init__(self, model: Any, coef: float, rate: float, device: torch.device) -> None:
        self.coef = coef
        self.rate = rate
        self.routers = routers_of(model)
        name = model.config.model_type
        if not self.routers:
            law = f"{name}: {type(model).__name__} has no routers whose load could be balanced"
            raise ValueError(f"{law}; leave out train.router_aux_loss_coef and train.router_bias_update_rate")
        all_have_bias = all(hasattr(router, BIAS) for router in self.routers)
        if rate and not all_have_bias:
            law = f"{name}: its routers have no bias ({BIAS}) that could move"
            raise ValueError(f"{law}; leave out train.router_bias_update_rate")
        size = len(self.routers), self.routers[0].num_experts
        self.load = torch.zeros(size, dtype=torch.int64, device=device)  # of this rank, in this step
        self.counted: torch.Tensor | None = None
        self.noted: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        for router in self.routers:
            router.forward = partial(self._route, router, router.forward)

    def begin(self, counted: torch.Tensor | None) -> None:
        """Balance the next pass and its backward pass, whose cells count so often; None: leave it alone."""
        self.counted = None if counted is None else counted.flatten()
        self.noted = None if counted is None else []

    def loss(
        self, tokens_read: int, total: int, group: dist.ProcessGroup | None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return what a pass over ``tokens_read`` adds to the loss of a step of ``total``, and its metrics.

        The sum over passes and ranks is the mean of the passes' losses, each weighed by its tokens. Where
        ranks of a ``group`` share those, each returns the term of its own.
        """
        assert self.noted is not None and self.counted is not None
        chosen, sums = map(torch.stack, zip(*self.noted, strict=True))  # [layers, experts]
        self.noted = None  # what runs again in the backward pass has been noted
        self.load += chosen
        if group:
            dist.all_reduce(chosen, group=group)
        term = (chosen * sums).sum(1).mean() * (
            chosen.shape[1] / max(1, tokens_read)
        )  # the loss, times own tokens
        return term * (self.coef / max(1, total)), {"router_aux_loss": (term, self.counted.sum())}

    @torch.no_grad()
    def step(self, group: dist.ProcessGroup, moves: bool) -> float:
        """End an optimizer step, and return the largest load of an expert over the mean of its layer.

        ``moves``: the step was taken, and biases move with it. Collective.
        """
        load = self.load
        self.load = torch.zeros_like(self.load)
        if group.size() > 1:
            dist.all_reduce(load, group=group)
        total = load.sum(1, keepdim=True)
        experts = load.shape[1]
        for router, less in zip(self.routers, (total - experts * load).sign(), strict=True):
            if self.rate and moves:
                router.get_buffer(BIAS).add_(less, alpha=self.rate)
        return float((experts * load / total.clamp(min=1)).max())

    def _route(self, router: Any, forward: Any, hidden: torch.Tensor) -> Any:
        """Run a router's own forward; note how often experts were chosen, and sums of their probabilities."""
        logits, _, chosen = routed = forward(hidden)
        if self.counted is None:
            return routed
        scores = logsigmoid(logits.float()) if hasattr(router, BIAS) else logits
        with torch.set_grad_enabled(self.coef > 0):  # as in what runs again: it has to keep the same
            sums = scores.softmax(-1, dtype=torch.float32).T.mv(self.counted.float())
        if self.noted is not None:
            times = self.counted[:, None].expand_as(chosen).flatten()
            counts = self.load.new_zeros(self.load.shape[1]).scatter_add_(0, chosen.flatten(), times)
            self.noted.append((counts, sums))
        return routed
