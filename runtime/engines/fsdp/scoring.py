"""Log-probs, entropies and values of a micro-batch's scored tokens.

Logits exist for one chunk of scored tokens at a time, in the pass without gradients and in the update. Of
more than that hidden states alone are kept for the backward pass, which computes logits again; of less, the
exponentials are, which take no more memory than the backward pass would.

Shapes: ``[scored]`` is one entry for each token that wants a score, ``[scored, hidden]`` the last hidden
state of the token before it, ``[chunk, vocabulary]`` the logits of some of them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, cast

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.nn.functional import linear
from transformers.modeling_outputs import BaseModelOutput

from rlgraph.costs import limits
from rlgraph.runtime.engines.causal import sees_later_tokens
from rlgraph.runtime.engines.fsdp.micro_batch import MicroBatch

Entropy = Literal["none", "detached", "differentiable"]
# (logits, labels, temperature) -> log-probs, and what else is told of each token's distribution
ChunkScores = Callable[[torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
Scores = tuple[torch.Tensor, torch.Tensor | None]
# of a chunk: exponentials of its logits, their sums, hidden states; logits in autograd's graph, their type
Kept = tuple[torch.Tensor, torch.Tensor, torch.Tensor, GradientEdge, torch.dtype]


def values(model: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
    """Return what a value head says before each scored token: float32 ``[scored]``."""
    out: torch.Tensor = model(**batch.arguments(), use_cache=False).logits
    return batch.picked(out).squeeze(1).float()


def check(model: Any) -> None:
    """Check, with weights on the meta device and before any are read, that a head can run by itself.

    Raises:
        ValueError: its ``forward`` wants more from its decoder than hidden states, or its attention sees
            later tokens, so that it gives no log-probs of the next one.
    """
    if sees_later_tokens(model):
        law = f"{model.config.model_type}: its attention sees later tokens, as an encoder's does"
        raise ValueError(f"{law}; models of this type can't be trained; take another for models.NAME.path")
    if not _decoders(model):
        law = f"{model.config.model_type}: transformers' {type(model).__name__} has no decoder by itself"
        raise ValueError(f"{law}; models of this type can't be trained; take another for models.NAME.path")
    config = model.config.get_text_config()
    try:
        with torch.no_grad():
            logits_of(model, torch.empty(1, config.hidden_size, device="meta", dtype=model.dtype))
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        law = (
            f"transformers' {type(model).__name__} computes logits from more than its decoder's last hidden "
        )
        law += f"states, which are all that scores are computed from here ({' '.join(str(error).split())})"
        remedy = "models of this type can't be trained; take another for models.NAME.path"
        raise ValueError(f"{model.config.model_type}: {law}; {remedy}") from error


def prepare(model: torch.nn.Module, wide: bool = False) -> None:
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
    module.token_entropies = partial(token_entropies, module)
    for method in ("token_scores", "token_squares", "token_entropies"):
        register_fsdp_forward_method(module, method)
    for head in ends(module)[1:]:
        if isinstance(head, FSDPModule):
            _gather_once(head)


def _gather_once(head: Any) -> None:
    """Give a sharded head a method ``gathered``, within which its weights are there for all chunks."""
    # FSDP2's hooks on it would be those of every chunk: gathered again, freed, its gradients reduced
    head._forward_pre_hooks.clear()
    head._forward_hooks.clear()
    head.gathered = _call
    register_fsdp_forward_method(head, "gathered")


def ends(model: Any) -> list[Any]:
    """Return the embeddings, and the head, if any, where they share no weight; else neither."""
    embeddings = model.get_input_embeddings()
    head = model.get_output_embeddings()
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
    result = getattr(head, "gathered", _call)(function, model, *arguments)
    if hasattr(head, "gathered") and not torch.is_grad_enabled():
        head.reshard()
    return result


def token_scores(model: Any, batch: MicroBatch, temperature: float, entropy: Entropy) -> Scores:
    """Return each scored token's log-prob and the entropy of its distribution, in nats: ``[scored]`` each.

    A log-prob is ``log softmax(logits / temperature)[label]``, at least in float32. ``entropy`` says whether
    to compute it (else it is None), and whether gradients flow through it.
    """
    own = (_hidden(model, batch), temperature, entropy, batch.labels)
    return cast(Scores, _with_head(model, _scores, *own))


def token_squares(model: Any, batch: MicroBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each scored token's log-prob and the sum of its distribution's squared probabilities.

    They are ``[scored]`` each, without gradients.
    """
    own = (_hidden(model, batch), temperature, batch.labels, _chunk_squares)
    return cast(tuple[torch.Tensor, torch.Tensor], _with_head(model, _by_chunks, *own))


def token_entropies(model: Any, batch: MicroBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each scored token's log-prob and the entropy of its distribution: ``[scored]`` each, in nats.

    They are without gradients, and the log-probs are those of ``token_scores`` to the bit.
    """
    own = (_hidden(model, batch), temperature, batch.labels, _chunk_entropies)
    return cast(tuple[torch.Tensor, torch.Tensor], _with_head(model, _by_chunks, *own))


def _scores(
    model: Any, hidden: torch.Tensor, temperature: float, entropy: Entropy, labels: torch.Tensor
) -> Scores:
    rows, fits = _rows(model, hidden)
    at_once = fits and torch.is_grad_enabled()
    trained = _trained_outside(model)
    scores = _Scores.apply(  # type: ignore[no-untyped-call]  # torch gives it no types
        model, rows, temperature, entropy, at_once, labels, hidden, *trained
    )
    return cast(Scores, scores)


def _by_chunks(
    model: Any, hidden: torch.Tensor, temperature: float, labels: torch.Tensor, scored: ChunkScores
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both columns that a function makes of logits, chunk by chunk of rows."""
    rows, _ = _rows(model, hidden)
    chunks = zip(hidden.split(rows), labels.split(rows), strict=True)
    chunk_scores = [scored(logits_of(model, h), y, temperature) for h, y in chunks]
    return torch.cat([logprobs for logprobs, _ in chunk_scores]), torch.cat(
        [seconds for _, seconds in chunk_scores]
    )


def _hidden(model: Any, batch: MicroBatch) -> torch.Tensor:
    return batch.picked(model.base_model(**batch.arguments(), use_cache=False).last_hidden_state)


def _rows(model: Any, hidden: torch.Tensor) -> tuple[int, bool]:
    return limits.head_rows(len(hidden), model.config.get_text_config().vocab_size, hidden.itemsize)


def logits_of(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Return the model's own logits ``[chunk, vocabulary]`` of hidden states ``[chunk, hidden]``.

    It is the model's ``forward`` that runs, so that what it does behind its head (soft caps, scales) is done;
    in place of its decoder stands a function that returns the hidden states.
    """
    decoders = _decoders(model)
    states = DecoderStates(last_hidden_state=hidden[None])
    for decoder in decoders:
        decoder.forward = lambda *_, **__: states
    # nobody reads the ids but for their shape, as Gemma 4's forward does
    ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
    try:
        logits: torch.Tensor = type(model).forward(model, input_ids=ids, use_cache=False).logits.squeeze(0)
    finally:
        for decoder in decoders:
            del decoder.forward
    return logits


class DecoderStates(BaseModelOutput):
    """The hidden states that a decoder returns; every other attribute that is read is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _decoders(model: Any) -> list[Any]:
    """Return the modules in whose place hidden states may come: a model's base, and a decoder within that."""
    if model.base_model is model:
        return []
    within = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    inner = [module for module in model.base_model.modules() if module is within]
    return list(dict.fromkeys([model.base_model, *inner]))


class _Scores(torch.autograd.Function):
    """Scores chunk by chunk; the backward pass computes a chunk's logits once more, unless told to ``keep``.

    With p the softmax and H its entropy, d log p_y / dx = 1_y - p and dH / dx = -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        model: Any,
        rows: int,
        temperature: float,
        entropy: Entropy,
        keep: bool,
        labels: torch.Tensor,
        hidden: torch.Tensor,
        *weights: torch.Tensor,
    ) -> Scores:
        ctx.kept = list[Kept]()
        logprobs = list[torch.Tensor]()
        chunk_entropies = list[torch.Tensor]()
        kept_for_backward = ctx.kept if keep else None
        for h, y in zip(hidden.split(rows), labels.split(rows), strict=True):
            chunk_logprobs, chunk_entropy = _chunk_scores(
                model, h, y, temperature, entropy != "none", kept_for_backward
            )
            logprobs.append(chunk_logprobs)
            if chunk_entropy is not None:
                chunk_entropies.append(chunk_entropy)
        entropies = None
        if entropy != "none":
            entropies = torch.cat(chunk_entropies)
        ctx.save_for_backward(labels, hidden)
        ctx.settings = (model, rows, temperature)
        ctx.set_materialize_grads(False)
        if entropy == "detached":
            ctx.mark_non_differentiable(entropies)
        return torch.cat(logprobs), entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_logprob: torch.Tensor | None, by_entropy: torch.Tensor | None) -> Any:
        labels, hidden = ctx.saved_tensors
        if by_logprob is None:
            by_logprob = torch.zeros_like(labels, dtype=_wide(hidden))
        model, rows, temperature = ctx.settings
        by_hidden = torch.empty_like(hidden)
        by_weights = list[torch.Tensor]()
        for start in range(0, max(1, len(hidden)), rows):
            chunk = slice(start, start + rows)
            if not ctx.kept:
                _chunk_scores(model, hidden[chunk], labels[chunk], temperature, False, ctx.kept)
            h = None if by_entropy is None else by_entropy[chunk]
            own = (ctx.kept, labels[chunk], temperature, by_logprob[chunk], h)
            by_hidden[chunk], *terms = _chunk_gradients(model, *own)
            by_weights = [*map(_plus, by_weights, terms)] if by_weights else terms
        weights = _trained_outside(model)
        rounded = [total.to(w.dtype) for total, w in zip(by_weights, weights, strict=True)]
        return None, None, None, None, None, None, by_hidden, *rounded


def _chunk_gradients(
    model: Any,
    saved_chunks: list[Kept],
    labels: torch.Tensor,
    temperature: float,
    by_logprob: torch.Tensor,
    by_entropy: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Return the gradient of a chunk's hidden states, and what it adds to those of the head's weights.

    What was saved of it, the first entry, is dropped: the logits' gradient ``[chunk, vocabulary]`` takes its
    memory.
    """
    p, total, hidden, logits, dtype = saved_chunks.pop(0)
    if by_entropy is None:
        p.mul_((by_logprob / -total)[:, None])
    else:
        p.div_(total[:, None])
        surprise = torch.xlogy(p, p)
        surprise.addcmul_(p, -surprise.sum(-1, keepdim=True)).mul_(-by_entropy[:, None])
        p.mul_(-by_logprob[:, None]).add_(surprise)
        del surprise
    p.scatter_add_(1, labels[:, None], by_logprob[:, None])
    slope = (p if temperature == 1.0 else p.div_(temperature)).to(dtype)
    del p
    return torch.autograd.grad(logits, [hidden, *_trained_outside(model)], slope)


def _plus(total: torch.Tensor, term: torch.Tensor) -> torch.Tensor:
    """Add to a sum over chunks, at least in float32: it is rounded to the weight's data type only once."""
    return total.to(_wide(total)).add_(term)


def _chunk_scores(
    model: Any,
    hidden: torch.Tensor,
    labels: torch.Tensor,
    temperature: float,
    entropy: bool,
    saved_chunks: Any,
) -> Scores:
    """Return scores of one chunk, in the memory of its logits; an entropy takes as much again.

    What a gradient needs is added to ``saved_chunks``, unless that is None.
    """
    with torch.set_grad_enabled(saved_chunks is not None):
        leaf = hidden.detach().requires_grad_()
        logits = logits_of(model, leaf)
    narrow = logits.dtype
    place = get_gradient_edge(logits) if saved_chunks is not None else None
    x, chosen = _shifted(logits.detach(), labels, temperature)
    del logits
    exponentials = x.exp() if entropy else x.exp_()
    total = exponentials.sum(-1)
    log_total = total.log()
    entropies = log_total - x.mul_(exponentials).sum(-1).div_(total) if entropy else None
    if saved_chunks is not None:
        saved_chunks.append((exponentials, total, leaf, place, narrow))
    return chosen.sub_(log_total), entropies


def _chunk_squares(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs of one chunk, and sums of squared probabilities, in the memory of its logits."""
    x, chosen = _shifted(logits, labels, temperature)
    total = x.exp_().sum(-1)
    return chosen.sub_(total.log()), x.square_().sum(-1).div_(total.square())


def _chunk_entropies(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs of one chunk, and entropies, in the memory of its logits and an eighth more."""
    x, chosen = _shifted(logits, labels, temperature)
    totals = list[torch.Tensor]()
    means = list[torch.Tensor]()
    for slice_of_logits in x.split(max(1, len(x) // 8)):
        exponentials = slice_of_logits.exp()
        total = exponentials.sum(-1)
        totals.append(total)
        means.append(slice_of_logits.mul_(exponentials).sum(-1).div_(total))
    log_total = torch.cat(totals).log()
    return chosen.sub_(log_total), log_total - torch.cat(means)


def _shifted(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits at a temperature less the largest, in place where they are wide, and the labels'."""
    x = logits.to(_wide(logits))
    if temperature != 1.0:
        x.div_(temperature)
    x.sub_(x.amax(-1, keepdim=True))
    return x, x.gather(1, labels[:, None]).squeeze(1)


def _trained_outside(model: Any) -> list[torch.nn.Parameter]:
    """Return the parameters that train outside the decoder: the head's, tied to the embeddings or not."""
    outside = [child for child in model.children() if child is not model.base_model]
    return [p for child in outside for p in child.parameters() if p.requires_grad]


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
