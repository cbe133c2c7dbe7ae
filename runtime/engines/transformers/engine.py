"""The embedded serve engine: Hugging Face causal language models, in-process, eager, on CPU or CUDA.

Covers: decoder models with full or sliding-window attention whose forward takes ``position_ids``. Each prompt
is prefilled once for all its samples; finished samples leave the batch at once and waiting ones take their
slots (continuous batching, as in Orca, Yu et al. 2022).

Not covered: recurrent and linear-attention layers, chunked attention, ALiBi, prefix sharing between requests,
CUDA graphs, and more than one device.

One file: the engine's calls all keep the one state of its model, cache and slots.

Shapes: prompts (rows of one prefill), rows (slots), live (running samples), vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlgraph.costs.limits import PREFILL
from rlgraph.engines.registry import EMBEDDED, SERVING
from rlgraph.ops.interfaces import Enough, Generation, Request, Sampling
from rlgraph.runtime.engines.decoder_layers import decoder_layers
from rlgraph.runtime.engines.memory.offload import chosen_parts, distinct_storages
from rlgraph.runtime.engines.memory.saver import SavedMemory
from rlgraph.runtime.engines.model_files import ModelFiles, attention_kinds, context_of
from rlgraph.runtime.engines.routing import Routing
from rlgraph.runtime.engines.transformers.continuous_batching import BatchRun, KeptSlots
from rlgraph.runtime.engines.transformers.fused import fused
from rlgraph.runtime.engines.transformers.kv_cache import Decode, SlotCache
from rlgraph.runtime.engines.transformers.load import cache_name, copy_into, empty_model, named_weights
from rlgraph.runtime.engines.transformers.stop_texts import StopTexts
from rlgraph.runtime.engines.weights.four_bit import put_layers
from rlgraph.runtime.engines.weights.frozen import put_on
from rlgraph.runtime.engines.weights.lora import serve_adapters
from rlgraph.runtime.engines.weights.naming import as_stored, views_of
from rlgraph.runtime.engines.weights.pretrained import read_weight, reads_by_rows, weights_of
from rlgraph.syntax.model_settings import Lora

if TYPE_CHECKING:
    from rlgraph.runtime.engines.contract import HostedServeEngine, LentWeights

PARTS = frozenset({"weights"})  # what may sleep


class TransformersEngine:
    """Generates with a Hugging Face model whose weights arrive by ``load_weights``.

    Example:
        engine = TransformersEngine("Qwen/Qwen2.5-0.5B-Instruct")
        engine.load_pretrained()
        engine.generate([Request(prompt=[9707], seeds=[0, 1])], Sampling(max_new_tokens=16))

    Args:
        path: a model directory or a hub name; configuration and tokenizer are read from it, weights are not.
        device: where the model lives, such as ``cpu`` or ``cuda:0``.
        dtype: of weights, keys and values, as torch names it.
        max_rows: samples that run at the same time; the rest wait for a slot.
        max_cached_tokens: positions that the slots may hold together. Fewer rows run where they are long; one
            always does.
        prefill_tokens: padded prompt tokens in one forward; a longer prompt goes alone.
        config, trust_remote_code: as ``models.NAME``.
        adapter: as ``models.NAME.train.lora``, where syncs bring the adapter alone: all other weights are
            those of ``path``, and never sleep.
        base: these weights, where a train engine in this process holds them: they are not read again.

    Raises:
        ValueError: the model has layers that this engine does not run.
    """

    overlaps = False
    notes: Sequence[str] = ()  # nothing of it differs from the plan

    def __init__(
        self,
        path: str,
        device: str = "cpu",
        dtype: str = "float32",
        *,
        max_rows: int = 1024,
        max_cached_tokens: int = SERVING[EMBEDDED].cached,
        prefill_tokens: int = PREFILL,
        config: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
        adapter: Mapping[str, Any] | None = None,
        base: LentWeights | None = None,
    ) -> None:
        self.path = path
        self.device = torch.device(device)
        self.max_rows = max_rows
        self.max_cached_tokens = max_cached_tokens
        self.prefill_tokens = prefill_tokens
        self.files = ModelFiles(path, config or {}, trust_remote_code)
        self.tokenizer = self.files.tokenizer()
        self.base = base
        self.model = empty_model(self.files, self.device, getattr(torch, dtype), has_memory=base is None)
        self.cached = cache_name(type(self.model)) or "past_key_values"
        self.views = views_of(self.model, weights_of(path))
        if base:
            put_on(self.model, self.views, base.weights)
        self.weights = named_weights(self.model)
        # an adapter's tensors by their names in peft's files; none where syncs bring all weights
        self.adapter: dict[str, Tensor] = {}
        if adapter:
            self.adapter = self._with_adapter(Lora.model_validate(adapter))
        self.fused = fused(self.model, joins=not adapter)
        text = self.model.config.get_text_config()
        self.context = context_of(text)
        self.attentions = attention_kinds(text)
        self.window: int = getattr(text, "sliding_window", None) or 0
        stops = self.files.stop_ids(text, self.tokenizer)
        self.stops = torch.tensor(stops, dtype=torch.int64, device=self.device)
        self._texts: StopTexts | None = None
        self.kept: KeptSlots | None = None  # slots of what may go on with these weights
        self.routing: Routing | None = None  # made when somebody asks for choices
        self.version = -1
        self.sleeping = frozenset[str]()
        self._memory = SavedMemory(self.device)
        self._last_places: Tensor | None = None
        self.model.get_output_embeddings().register_forward_pre_hook(self._keep_last)

    def _with_adapter(self, options: Lora) -> dict[str, Tensor]:
        """Give the model an adapter of zeros beside the weights of its files; return its tensors by name."""
        if self.base is None:
            self._load_files()
        layers = decoder_layers(self.model)
        tensors = serve_adapters(self.model, layers, options, self.device, self.model.dtype)
        if self.base:
            put_layers(self.model, self.views, self.base.layers)
        return tensors

    def sleep(self, components: Iterable[str]) -> None:
        """Free the memory of ``weights``, the only component, and of slots that were kept.

        Raises:
            RuntimeError: they sleep already, or syncs bring an adapter alone.
            ValueError: a component that there is not.
        """
        if chosen := chosen_parts(self.path, "sleep", components, PARTS, self.sleeping, "wake"):
            if self.adapter:
                law = f"{', '.join(chosen)} can't sleep: a sync brings an adapter alone (serve.lora)"
                raise RuntimeError(f"{self.path}: {law}")
            self.kept = None
            self._memory.give(distinct_storages(self.weights.values()))
            self.version = -1
            self.sleeping = PARTS

    def wake(self, components: Iterable[str]) -> None:
        """Take memory for ``weights`` again; what stands in it is undefined until ``load_weights``.

        Raises:
            RuntimeError: they are awake.
            ValueError: a component that there is not.
        """
        if chosen_parts(self.path, "wake", components, PARTS, PARTS - self.sleeping, "sleep"):
            self._memory.take()
            self.sleeping = frozenset()

    def load_weights(self, named: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take every weight by its name in the checkpoint, a tied one once, and persistent buffers; or of an
        adapter that is served all its tensors, by their names in peft's files.

        Tensors may come one at a time, on any device and in any dtype. After an error the engine has no
        usable weights, and ``version`` is -1.

        Raises:
            RuntimeError: the weights sleep.
            ValueError: an unknown name, a wrong shape, or weights that were not given.
        """
        self._need("load_weights")
        self.version = -1
        self.kept = None
        if self.adapter:
            _copy_all(named, self.adapter)
        else:
            self._load(named)
        self.version = version

    def _load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        _copy_all(named, dict(as_stored(self.weights.items(), self.views)))

    def load_pretrained(self) -> None:
        """Take the weights that lie at ``path``, as version 0; an adapter becomes zeros."""
        self._need("load_pretrained")
        self.kept = None
        if self.adapter:
            for tensor in self.adapter.values():
                tensor.zero_()
        else:
            self._load_files()
        self.version = 0

    def _load_files(self) -> None:
        """Take weights as they stand in the files, where these hold them by the model's own views.

        transformers draws some anew behind reading them: the padding row of Youtu's embeddings (5.23.0).
        """
        stored = weights_of(self.path)
        names = {name for name, _ in as_stored(self.weights.items(), self.views)}
        if names <= stored.keys() and reads_by_rows(self.model, self.views, stored, ()):
            self._load((name, read_weight(stored[name], name)) for name in sorted(names))
            return
        dtype = next(self.model.parameters()).dtype
        model = AutoModelForCausalLM.from_pretrained(
            self.path, config=self.files.config(), dtype=dtype, trust_remote_code=self.files.trusted
        )
        self._load(as_stored(named_weights(model).items(), self.views))

    def settle(self, call: str) -> None:
        """Free the memory of slots that were kept: the next call reads again what it goes on with."""
        self.kept = None

    def abort(self) -> None:
        """Do nothing: calls do not overlap, so that nobody can ask while a sample is in flight."""

    def close(self) -> None:
        """Do nothing: the engine has started no process."""

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        enough: Enough | None = None,
        stays: bool = False,
    ) -> list[list[Generation]]:
        """Continue each request's prompt once for each of its seeds; the order is that of the requests.

        Samples run token by token beside each other, so what ``enough`` aborts is the same every time. With
        ``stays`` the slots of what was cut or aborted are kept, until the next call, other weights or sleep:
        one cache of ``max_cached_tokens`` in all. A request for exactly the tokens of one needs no prefill.

        Raises:
            RuntimeError: the weights sleep, or none were given yet.
            ValueError: an empty prompt, ``max_new_tokens`` below 1, or a prompt that with ``max_new_tokens``
                exceeds the model's context; or ``routing`` is asked of a model without routers.
            FloatingPointError: the model's logits are NaN.
        """
        if sampling.routing:
            self.routing = self.routing or Routing(self.model)
        limits = [[request.limits(sampling)[1]] * len(request.seeds) for request in requests]
        stops = torch.cat([self.stops, self.stops.new_tensor(sampling.stop_token_ids)])
        return self._generate(requests, sampling, limits, stops, enough, stays)

    @torch.inference_mode()
    def _generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        limits: Sequence[Sequence[int]],
        stops: Tensor,
        enough: Enough | None = None,
        stays: bool = False,
    ) -> list[list[Generation]]:
        """Carry out ``generate`` with a limit per sample, and with these stop ids ``[stops]``."""
        self._check(requests, limits)
        if not any(limits):
            return [[] for _ in requests]
        kept_slots = self.kept if stays else None
        self.kept = None
        run = BatchRun(self, requests, sampling, limits, stops, stays, kept_slots)
        del kept_slots  # its memory is needed
        generations = run.finish(enough)
        self.kept = run.kept(generations) if stays else None
        finished = iter(generations)
        return [[next(finished) for _ in request.seeds] for request in requests]

    def _check(self, requests: Sequence[Request], limits: Sequence[Sequence[int]]) -> None:
        self._need("generate")
        if self.version < 0:
            law = "no weights yet; call load_weights or load_pretrained before generate"
            raise RuntimeError(f"{self.path}: {law}")
        for index, (request, counts) in enumerate(zip(requests, limits, strict=True)):
            prompt = len(request.prompt)
            new = max(counts, default=1)
            if not prompt or min(counts, default=1) < 1:
                law = f"{prompt} prompt tokens, {new} new tokens; each must be at least 1"
                raise ValueError(f"request {index}: {law}")
            if self.context is not None and prompt + new > self.context:
                law = f"{prompt} prompt tokens and {new} new tokens make {prompt + new}"
                raise ValueError(f"request {index}: {law}, more than the model's context of {self.context}")

    def stop_texts(self, texts: Sequence[str]) -> StopTexts | None:
        """Return what looks for these texts, made once; None where there are none."""
        if not texts:
            return None
        if self._texts is None or [*self._texts.texts] != [*texts]:
            self._texts = StopTexts(self.tokenizer, texts, self.device)
        return self._texts

    def _need(self, call: str) -> None:
        if self.sleeping:
            law = f"{call} when weights are asleep; call wake(['weights']) and load_weights first"
            raise RuntimeError(f"{self.path}: {law}")
        if self.base:
            self.base.need(call)

    def prefill(self, prompts: Sequence[Sequence[int]], cache: SlotCache) -> Tensor:
        """Return the logits ``[prompts, vocabulary]`` after each prompt, and fill the cache.

        Padding is on the right, where causal attention never looks: no mask is needed.
        """
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        width = max(map(len, prompts))
        rows = [[*prompt, *[0] * (width - len(prompt))] for prompt in prompts]
        padded = torch.tensor(rows, device=self.device)
        if self.fused:
            positions = torch.arange(width, device=self.device)[None]
            return self.fused(padded, positions, None, cache, lengths - 1)
        self._last_places = lengths - 1
        output = self.model(input_ids=padded, use_cache=True, **{self.cached: cache})
        logits: Tensor = output.logits[:, 0]
        self._last_places = None
        return logits

    def decode(self, tokens: Tensor, target: Decode, cache: SlotCache) -> Tensor:
        """Return the logits ``[live, vocabulary]`` after one more token ``[live]`` per row."""
        tokens = tokens[:, None]
        positions = target.positions[:, None]
        masks = self._masks(target)
        cache.aim(target)
        if self.fused:
            return self.fused(tokens, positions, masks, cache)
        inputs = {"input_ids": tokens, "position_ids": positions, "attention_mask": masks}
        logits: Tensor = self.model(**inputs, use_cache=True, **{self.cached: cache}).logits[:, 0]
        return logits

    def _masks(self, target: Decode) -> Any:
        """Return what to add to attention scores, ``[live, 1, 1, width]`` for each kind of attention.

        A float mask serves every layer; sdpa would turn a boolean one into it once per layer.
        """
        if target.aligned:
            return None
        columns = torch.arange(target.width, device=self.device)
        positions = target.positions[:, None]
        is_hidden = columns > positions
        masks = {}
        for kind in sorted(set(self.attentions)):
            is_hidden_of_kind = is_hidden
            if kind == "sliding_attention":
                is_hidden_of_kind = is_hidden | (columns <= positions - self.window)
            masks[kind] = self._additive(is_hidden_of_kind)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _additive(self, hidden: Tensor) -> Tensor:
        zeros = torch.zeros(hidden.shape, dtype=self.model.dtype, device=self.device)
        return zeros.masked_fill_(hidden, float("-inf"))[:, None, None]

    def _keep_last(self, head: torch.nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor] | None:
        """Keep each prompt's last hidden state alone before the head, in a prefill.

        The logits of whole prompts would take more memory than all the rest.
        """
        if self._last_places is None:
            return None
        rows = torch.arange(len(self._last_places), device=self.device)
        return (inputs[0][rows, self._last_places][:, None],)


def _copy_all(named: Iterable[tuple[str, Tensor]], targets: Mapping[str, Tensor]) -> None:
    """Copy every named tensor into its target.

    Raises:
        ValueError: an unknown name, one that came twice, a wrong shape, or targets that got nothing.
    """
    waiting = dict(targets)
    for name, tensor in named:
        if name not in waiting:
            law = "came twice" if name in targets else "is not in the model"
            raise ValueError(f"weight {name!r} {law}")
        copy_into(name, tensor, waiting.pop(name))
    if waiting:
        names = ", ".join(list(waiting)[:3]) + (", ..." if len(waiting) > 3 else "")
        raise ValueError(f"{len(waiting)} of {len(targets)} weights were not given: {names}")


if TYPE_CHECKING:  # mypy: it has every member that a worker calls
    ENGINE: type[HostedServeEngine] = TransformersEngine
