"""Log-probs, entropies and values of a micro-batch's scored tokens.

Logits exist for one chunk of scored tokens at a time, in the pass without gradients and in the update: what
is kept for the backward pass is hidden states, from which a chunk's logits are computed again.

Shapes: ``[scored]`` is one entry for each token that wants a score, ``[scored, hidden]`` the last hidden
state of the token before it, ``[chunk, vocabulary]`` the logits of some of them.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, cast

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.nn.functional import linear

from rlgraph.costs import limits
from rlgraph.runtime.engines.fsdp.micro_batch import MicroBatch

Entropy = Literal["none", "detached", "differentiable"]
Scores = tuple[torch.Tensor, torch.Tensor | None]


def values(model: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
    """Return what a value head says before each scored token: float32 ``[scored]``."""
    out: torch.Tensor = model(**batch.arguments(), use_cache=False).logits
    return batch.picked(out).squeeze(1).float()


def check(model: Any) -> None:
    """Check, with weights on the meta device and before any are read, that a head can run by itself.

    Raises:
        ValueError: its ``forward`` wants more from its decoder than hidden states.
    """
    config = model.config.get_text_config()
    try:
        with torch.no_grad():
            logits_of(model, torch.empty(1, config.hidden_size, device="meta", dtype=model.dtype))
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{model.config.model_type}: the head of {type(model).__name__} can't run apart from its decoder "
            f"({error}); models of this type can't be trained"
        ) from error


def prepare(model: FSDPModule, wide: bool = False) -> None:
    """Give a sharded language model the functions of this file as methods, with its parameters gathered.

    ``wide``: logits are computed in float32 (MiniMax-M1, arXiv 2506.13585, section 3.2), from hidden states
    and weights of the type that the rest computes in. So SGLang computes them (``enable_fp32_lm_head``).
    """
    module = cast(Any, model)
    if wide:
        output = module.get_output_embeddings()
        output.forward = partial(_wide_logits, output)
    module.token_scores = partial(token_scores, module)
    module.token_squares = partial(token_squares, module)
    for method in ("token_scores", "token_squares"):
        register_fsdp_forward_method(module, method)
    for head in ends(module)[1:]:
        if isinstance(head, FSDPModule):
            # FSDP2's hooks on it would be those of every chunk: gathered again, freed, its gradients reduced
            head._forward_pre_hooks.clear()
            head._forward_hooks.clear()
            head.gathered = _call
            register_fsdp_forward_method(head, "gathered")


def ends(model: Any) -> list[Any]:
    """Return the embeddings, and the head, if any, where they share no weight; else neither."""
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None:
        return [embeddings]
    return [] if head.weight is embeddings.weight else [embeddings, head]


def _wide_logits(head: Any, hidden: torch.Tensor) -> torch.Tensor:
    bias = None if head.bias is None else head.bias.float()
    return linear(hidden.float(), head.weight.float(), bias)


def _call(function: Any, *arguments: Any) -> Any:
    return function(*arguments)


def _with_head(model: Any, function: Any, *arguments: Any) -> Any:
    """Return what a function of the model and more returns, called while the head's weights are gathered.

    A backward pass wants them once more, and then frees them.
    """
    head = model.get_output_embeddings()
    found = getattr(head, "gathered", _call)(function, model, *arguments)
    if hasattr(head, "gathered") and not torch.is_grad_enabled():
        head.reshard()
    return found


def token_scores(model: Any, batch: MicroBatch, temperature: float, entropy: Entropy) -> Scores:
    """Return each scored token's log-prob and the entropy of its distribution, in nats: ``[scored]`` each.

    A log-prob is ``log softmax(logits / temperature)[label]``, at least in float32. ``entropy`` says whether
    to compute it (else it is None), and whether gradients flow through it.
    """
    hidden, rows = _hidden(model, batch)
    return cast(Scores, _with_head(model, _scores, hidden, rows, temperature, entropy, batch.labels))


def token_squares(model: Any, batch: MicroBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each scored token's log-prob and the sum of its distribution's squared probabilities.

    They are ``[scored]`` each, without gradients.
    """
    hidden, rows = _hidden(model, batch)
    own = (hidden, rows, temperature, batch.labels)
    return cast(tuple[torch.Tensor, torch.Tensor], _with_head(model, _squares, *own))


def _scores(
    model: Any, hidden: torch.Tensor, rows: int, temperature: float, entropy: Entropy, labels: torch.Tensor
) -> Scores:
    weights = _trained_outside(model)
    return cast(Scores, _Scores.apply(model, rows, temperature, entropy, labels, hidden, *weights))


def _squares(
    model: Any, hidden: torch.Tensor, rows: int, temperature: float, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    chunks = zip(hidden.split(rows), labels.split(rows), strict=True)
    parts = [_chunk_squares(logits_of(model, h), y, temperature) for h, y in chunks]
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([squares for _, squares in parts])


def _hidden(model: Any, batch: MicroBatch) -> tuple[torch.Tensor, int]:
    """Return the hidden states ``[scored, hidden]``, and how many of them a chunk has."""
    hidden = batch.picked(model.base_model(**batch.arguments(), use_cache=False).last_hidden_state)
    return hidden, max(1, limits.LOGITS // model.config.get_text_config().vocab_size)


def logits_of(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Return the model's own logits ``[chunk, vocabulary]`` of hidden states ``[chunk, hidden]``.

    It is the model's ``forward`` that runs, so that what it does behind its head (soft caps, scales) is done;
    in place of its decoder stands a function that returns the hidden states.
    """
    from transformers.modeling_outputs import MoeModelOutputWithPast

    decoder = model.base_model
    decoder.forward = lambda *_, **__: MoeModelOutputWithPast(last_hidden_state=hidden[None])
    try:
        logits: torch.Tensor = type(model).forward(model, use_cache=False).logits.squeeze(0)
    finally:
        del decoder.forward
    return logits


class _Scores(torch.autograd.Function):
    """Scores chunk by chunk; the backward pass computes a chunk's logits once more, and their gradient.

    With p the softmax and H its entropy, d log p_y / dx = 1_y - p and dH / dx = -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        model: Any,
        rows: int,
        temperature: float,
        entropy: Entropy,
        labels: torch.Tensor,
        hidden: torch.Tensor,
        *weights: torch.Tensor,
    ) -> Scores:
        parts = [
            _chunk_scores(logits_of(model, h), y, temperature, entropy != "none")
            for h, y in zip(hidden.split(rows), labels.split(rows), strict=True)
        ]
        entropies = torch.cat([h for _, h in parts if h is not None]) if entropy != "none" else None
        ctx.save_for_backward(labels, hidden)
        ctx.settings = (model, rows, temperature)
        ctx.set_materialize_grads(False)
        if entropy == "detached":
            ctx.mark_non_differentiable(entropies)
        return torch.cat([logprobs for logprobs, _ in parts]), entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_logprob: torch.Tensor | None, by_entropy: torch.Tensor | None) -> Any:
        labels, hidden = ctx.saved_tensors
        if by_logprob is None:
            by_logprob = torch.zeros_like(labels, dtype=_wide(hidden))
        model, rows, temperature = ctx.settings
        by_hidden, by_weights = torch.empty_like(hidden), list[torch.Tensor]()
        for start in range(0, max(1, len(hidden)), rows):
            part = slice(start, start + rows)
            h = None if by_entropy is None else by_entropy[part]
            own = (hidden[part], labels[part], temperature, by_logprob[part], h)
            by_hidden[part], *terms = _chunk_gradients(model, *own)
            by_weights = [*map(_plus, by_weights, terms)] if by_weights else terms
        weights = _trained_outside(model)
        rounded = [total.to(w.dtype) for total, w in zip(by_weights, weights, strict=True)]
        return None, None, None, None, None, by_hidden, *rounded


def _chunk_gradients(
    model: Any,
    hidden: torch.Tensor,
    labels: torch.Tensor,
    temperature: float,
    by_logprob: torch.Tensor,
    by_entropy: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Return the gradient of a chunk's hidden states, and what it adds to those of the head's weights."""
    with torch.enable_grad():
        leaf = hidden.detach().requires_grad_()
        logits = logits_of(model, leaf)
    slope = _slope(logits.detach(), labels, temperature, by_logprob, by_entropy)
    return torch.autograd.grad(logits, [leaf, *_trained_outside(model)], slope)


def _plus(total: torch.Tensor, term: torch.Tensor) -> torch.Tensor:
    """Add to a sum over chunks, at least in float32: it is rounded to the weight's data type only once."""
    return total.to(_wide(total)).add_(term)


def _chunk_scores(logits: torch.Tensor, labels: torch.Tensor, temperature: float, entropy: bool) -> Scores:
    """Return scores of one chunk, in the memory of its logits; an entropy takes as much again."""
    x, chosen = _shifted(logits, labels, temperature)
    if not entropy:
        return chosen.sub_(x.exp_().sum(-1).log_()), None
    exponentials = x.exp()
    total = exponentials.sum(-1)
    mean = x.mul_(exponentials).sum(-1) / total
    return chosen.sub_(total.log()), total.log() - mean


def _chunk_squares(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs of one chunk, and sums of squared probabilities, in the memory of its logits."""
    x, chosen = _shifted(logits, labels, temperature)
    total = x.exp_().sum(-1)
    return chosen.sub_(total.log()), x.square_().sum(-1).div_(total.square())


def _shifted(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits at a temperature less the largest, in place where they are wide, and the labels'."""
    x = logits.to(_wide(logits))
    if temperature != 1.0:
        x.div_(temperature)
    x.sub_(x.amax(-1, keepdim=True))
    return x, x.gather(1, labels[:, None]).squeeze(1)


def _slope(
    logits: torch.Tensor,
    labels: torch.Tensor,
    temperature: float,
    by_logprob: torch.Tensor,
    by_entropy: torch.Tensor | None,
) -> torch.Tensor:
    """Return the gradient of a chunk's logits ``[chunk, vocabulary]``, from its scores' gradients."""
    x = logits.to(_wide(logits))
    x = x if temperature == 1.0 else x / temperature
    if by_entropy is None:
        p = torch.softmax(x, -1)
        del x
        p.mul_(-by_logprob[:, None])
    else:
        log_p = torch.log_softmax(x, -1)
        del x
        p = log_p.exp()
        log_p.sub_(torch.linalg.vecdot(p, log_p)[:, None])
        p.mul_(log_p.mul_(-by_entropy[:, None]).sub_(by_logprob[:, None]))
    p.scatter_add_(1, labels[:, None], by_logprob[:, None])
    return p.div_(temperature).to(logits.dtype)


def _trained_outside(model: Any) -> list[torch.nn.Parameter]:
    """Return the parameters that train outside the decoder: the head's, tied to the embeddings or not."""
    outside = [child for child in model.children() if child is not model.base_model]
    return [p for child in outside for p in child.parameters() if p.requires_grad]


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
