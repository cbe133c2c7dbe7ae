"""The train engine: a Hugging Face model sharded with FSDP2 over any number of ranks.

One file: it is one class, whose methods are the contract of a train engine with units and errors; what they
do lies in the files beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops.interfaces import Batch, Objective, Recorder, Totals
from rlgraph.runtime.engines.balance import Balance
from rlgraph.runtime.engines.fsdp import checkpoint
from rlgraph.runtime.engines.fsdp import lora as adapters
from rlgraph.runtime.engines.fsdp.batching import Budget, MiniBatch, micro_batches, mini_batches, placeholder
from rlgraph.runtime.engines.fsdp.host_optimizer import HostAdamW, exact
from rlgraph.runtime.engines.fsdp.load import Head, Loading, decoder_layers, load_sharded
from rlgraph.runtime.engines.fsdp.micro_batch import MicroBatch
from rlgraph.runtime.engines.fsdp.muon import body_matrices
from rlgraph.runtime.engines.fsdp.optimizer import (
    clip_gradients,
    make_optimizer,
    moments_of,
    options_of,
    set_rate,
)
from rlgraph.runtime.engines.fsdp.packing import attention_share, has_mask, packs
from rlgraph.runtime.engines.fsdp.scoring import Entropy, values
from rlgraph.runtime.engines.fsdp.shards import (
    apart,
    frozen_weights,
    gather_full,
    gathered,
    hold_in,
    local,
    reduce_with_the_last,
)
from rlgraph.runtime.engines.fsdp.tensor import ExpertGroup
from rlgraph.runtime.engines.fsdp.terms import SharedPass, Term, passes
from rlgraph.runtime.engines.memory.allocator import expandable_segments
from rlgraph.runtime.engines.memory.offload import SHARED, Residency, optimizer_tensors
from rlgraph.runtime.engines.metric_sums import MetricSums, over_ranks
from rlgraph.runtime.engines.model_files import ModelFiles, rope_limit
from rlgraph.runtime.engines.routing import Routing
from rlgraph.runtime.engines.sequence.groups import ALONE, RowGroup, SequenceGroup, over_heads
from rlgraph.runtime.engines.weights.naming import in_pieces
from rlgraph.runtime.engines.weights.transfer import WIDE, cast
from rlgraph.syntax.model_settings import Lora

ROW = ""  # the row numbers, among columns that have names

# methods of an engine that return two columns -> the method of its model that computes both
WITH_SCORES = {"squares": "token_squares", "entropies": "token_entropies"}


class FsdpEngine:
    """Implements ``rlgraph.ops.TrainEngine``; every rank of the mesh calls its methods in one order.

    Results do not depend on how rows lie on ranks and in micro-batches, up to rounding: of float32 on a CPU,
    of ``dtype`` on CUDA, where kernels add up in an order that depends on shapes, and some in any order.

    Args:
        path: a Hugging Face directory or name.
        head: ``lm`` for log-probs, ``value`` for one number per token.
        frozen: hold no gradients and no optimizer.
        optimizer: as ``models.NAME.optimizer``; needed unless frozen.
        seed: of a value head that the directory lacks.
        micro_tokens: tokens of one forward pass, padding included, on a rank or on those that share it.
        score_tokens: the same of passes that score; ``micro_tokens`` unless given.
        device: ``cpu`` or ``cuda``; the caller has chosen the current CUDA device.
        dtype: ``float32`` or ``bfloat16``, to compute in; a model that trains keeps float32 masters.
        head_dtype: ``float32``, to compute logits in; by default that is ``dtype``.
        mesh: one dimension, or two, ``replicate`` and ``shard``: copies of the model, each sharded over a row
            of ranks; by default one copy over all ranks.
        group: all ranks of the mesh; needed where it has two dimensions.
        reshard: free each decoder layer's gathered parameters after use and reduce gradients with every
            micro-batch; by default only for models of more than ``SMALL`` parameters.
        recompute: run each decoder layer again in the backward pass rather than keep its activations.
        lora: train low-rank adapters alone, as ``models.NAME.train.lora``; all else is held in ``dtype``.
        compile: compile the decoder layers (torch.compile); needs a C++ compiler on the CPU.
        packing: lay rows end to end, and read a prompt that they share once, where that is less work and
            the model's attention allows it.
        sequence: the ranks that share the tokens of their rows; by default each has rows of its own.
        tensor: the ranks that each have a part of every decoder layer, and the same rows; the mesh then has
            those that have the same part, and ``group`` is needed.
        experts: the ranks that each have some of a mixture's experts, out of those of one copy.
        optimizer_offload: keep float32 masters and AdamW's averages on the host, and step there; the device
            holds weights in ``dtype``. Not with ``lora``.
        activation_offload: keep on the host what ``recompute`` keeps of each layer, its input.
        router_aux_loss_coef, router_bias_update_rate: of a mixture of experts that is not compiled, as
            ``models.NAME.train``; by default its routers train by the objective alone.
        config, trust_remote_code: as ``models.NAME``.
        base: an engine of the same files, mesh and ``dtype``, nothing of it offloaded. This one has in its
            memory the weights that both hold and neither trains: they have to be there when this one works.

    Raises:
        ValueError: an unknown or missing optimizer option, weights that the directory lacks, a layer to
            adapt that the model lacks, tokens that ranks can't share, layers or experts that they can't
            divide, or routers that the model lacks.
    """

    def __init__(
        self,
        path: str,
        *,
        head: Head = "lm",
        frozen: bool = False,
        optimizer: Mapping[str, Any] | None = None,
        seed: int = 0,
        micro_tokens: int = 16384,
        score_tokens: int | None = None,
        device: str = "cpu",
        dtype: str = "float32",
        head_dtype: str | None = None,
        mesh: DeviceMesh | None = None,
        group: dist.ProcessGroup | None = None,
        reshard: bool | None = None,
        recompute: bool = False,
        lora: Mapping[str, Any] | None = None,
        compile: bool = False,
        packing: bool = True,
        sequence: SequenceGroup = ALONE,
        tensor: RowGroup = ALONE,
        experts: ExpertGroup | None = None,
        optimizer_offload: bool = False,
        activation_offload: bool = False,
        router_aux_loss_coef: float = 0.0,
        router_bias_update_rate: float = 0.0,
        config: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
        base: FsdpEngine | None = None,
    ) -> None:
        """Load, shard and, unless frozen, prepare to train. torch.distributed must be initialised."""
        self.path, self.head = path, head
        self.files = ModelFiles(path, config or {}, trust_remote_code)
        self.mesh = mesh or init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
        self.group = group or self.mesh.get_group()
        # the ranks that share one copy, or one part of it
        self.copy_group = self.mesh.get_group(self.mesh.ndim - 1)
        ranks_of_copy = self.copy_group.size() * tensor.ranks
        self.replicas = self.group.size() // ranks_of_copy
        self.in_first = self.group.rank() < ranks_of_copy  # this rank is of the first copy
        self.device = torch.device(device)
        self.lora = Lora.model_validate(lora) if lora else None
        compute = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
        self.rows = tensor if tensor.group else sequence  # the ranks that have the same rows in a call
        wide = head_dtype is not None and compute != torch.float32
        settings = (reshard, recompute, self.lora, compile, sequence, tensor, activation_offload, wide)
        held = frozen_weights(base.model, base.pieces) if base else {}
        settings = (*settings, experts or ExpertGroup(), held)
        how = Loading(self.files, head, seed, frozen, compute, self.mesh, *settings)
        self.model, self.shards, self.reshard, self.pieces, self.parts = load_sharded(how)
        layers = decoder_layers(self.model)
        share = attention_share(self.model, layers) / tensor.ranks if packing and packs(self.model) else None
        sequence = over_heads(sequence, self.model)
        balanced = not frozen and (router_aux_loss_coef, router_bias_update_rate) != (0, 0)
        self.budget = Budget(micro_tokens, share, compute, has_mask(self.model), sequence, balanced)
        self.scoring = replace(self.budget, tokens=score_tokens or micro_tokens)
        self.balance: Balance | None = None
        if balanced:
            self.balance = Balance(self.model, router_aux_loss_coef, router_bias_update_rate, self.device)
        self.routing: Routing | None = None  # made when choices of experts are given
        self.joined: dict[str, Term] = {}  # those of the next update, by their nodes
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.parameters = [*trained.values()]
        self.shares = self.parts.shares(trained)
        self.optimizer = self.scheduler = None
        if not frozen:
            self.options = options_of(optimizer or {})
            matrices = body_matrices(self.model, layers, self.pieces) if self.options.kind == "muon" else {}
            own = (self.parameters, self.options, matrices, self.copy_group, compute)
            self.optimizer, self.scheduler = make_optimizer(*own, on_host=optimizer_offload)
            if optimizer_offload and any(p.dtype != compute for p in self.parameters):
                hold_in(self.model, self.shards, compute)
        # beside a GPU an optimizer on the host has nothing that could leave; a CPU's memory is the host's
        on_device = not optimizer_offload or self.device.type == "cpu"
        frozen_here = frozen_weights(self.model, self.pieces)
        theirs = {id(frozen_here[key]) for key in frozen_here.keys() & held.keys()}
        own = [p for p in self.model.parameters() if id(p) not in theirs]
        parts = {
            SHARED: lambda: [*own, *(exact(self.optimizer, p) for p in own if on_device)],
            "optimizer": lambda: optimizer_tensors(self.optimizer if on_device else None),
        }
        self.residency = Residency(path, self.device, parts, base.residency if base else None)
        self.saves = checkpoint.Saves(self.copy_group, self.in_first, self.parts)
        self.persistent = frozenset(self.model.state_dict())  # names, of buffers too that a checkpoint holds

    @property
    def away(self) -> frozenset[str]:
        """Return what is offloaded now, out of ``parameters`` and ``optimizer``."""
        return self.residency.away

    def offload(self, parts: Iterable[str]) -> None:
        """Move this rank's shards to the host: to pinned memory from CUDA, to a temporary file from the CPU.

        What has not changed since the last time is not copied again. Gradients live only inside ``update``.

        Args:
            parts: out of ``parameters`` and ``optimizer``; a frozen model's optimizer is empty.

        Raises:
            RuntimeError: a part is away already.
            ValueError: a part that there is not.
        """
        self.residency.offload(parts)

    def reload(self, parts: Iterable[str]) -> None:
        """Bring back what ``offload`` moved, bit for bit.

        Raises:
            RuntimeError: a part is not away.
            ValueError: a part that there is not.
        """
        self.residency.reload(parts)

    def logprobs(
        self,
        tokens: Ragged,
        loss_mask: Ragged,
        temperature: float = 1.0,
        routing: Ragged | None = None,
    ) -> Ragged:
        """Return the log-prob of each token: float32 ``[samples, tokens]``, 0 where ``loss_mask`` is false.

        ``routing``: see ``TrainEngine``.

        Raises:
            ValueError: ``routing`` does not fit the model's routers, or it has none.
        """
        assert self.head == "lm", "a value head has no log-probs"
        return self._score("logprobs", tokens, loss_mask, temperature, routing)[0]

    def squares(
        self,
        tokens: Ragged,
        loss_mask: Ragged,
        temperature: float = 1.0,
        routing: Ragged | None = None,
    ) -> tuple[Ragged, Ragged]:
        """Return, from one pass, ``logprobs`` and each token's sum of squared probabilities."""
        assert self.head == "lm", "a value head has no probabilities"
        scores, squares = self._score("squares", tokens, loss_mask, temperature, routing)
        return scores, squares

    def entropies(
        self,
        tokens: Ragged,
        loss_mask: Ragged,
        temperature: float = 1.0,
        routing: Ragged | None = None,
    ) -> tuple[Ragged, Ragged]:
        """Return, from one pass, ``logprobs`` and the entropy of each token's distribution, in nats."""
        assert self.head == "lm", "a value head has no probabilities"
        scores, entropies = self._score("entropies", tokens, loss_mask, temperature, routing)
        return scores, entropies

    def values(self, tokens: Ragged, loss_mask: Ragged) -> Ragged:
        """Return the value before each token: float32 ``[samples, tokens]``, 0 where not in ``loss_mask``."""
        assert self.head == "value", "a language-model head has no values"
        return self._score("values", tokens, loss_mask)[0]

    def update(
        self,
        columns: Batch,
        objective: Objective,
        rows: torch.Tensor,
        total_rows: int,
        minibatches: int = 1,
        epochs: int = 1,
        temperature: float = 1.0,
        entropy: bool = False,
        merged: bool = False,
        weight: float = 1.0,
        record: Recorder | None = None,
    ) -> dict[str, float]:
        """Train; see ``TrainEngine.update``.

        Mini-batch k has those rows of each term that has joined. One without a token in a loss mask takes no
        step, nor does one whose gradient is not finite; the metric ``skipped`` counts the latter. ``loss`` is
        a mean over mini-batches with tokens, ``grad_norm`` and ``lr`` over steps taken.
        """
        assert self.optimizer is not None, "a frozen model does not train"
        self.residency.need(["parameters", "optimizer"], "update")
        self.residency.changed(["parameters", "optimizer"])
        own = Term(columns, objective, rows, total_rows, temperature, entropy, merged, weight)
        terms, self.joined = {"": own, **self.joined}, {}
        sums = {name: MetricSums(shared={}) if name else MetricSums() for name in terms}
        shared = passes(terms, sums, self.group)
        plans = [self._mini_batches(one, minibatches) for one in shared]
        steps = [[*zip(shared, parts, strict=True)] for parts in zip(*plans, strict=True)]
        steps = [[(p, m) for p, m in parts if any(t.tokens for t in m.totals)] for parts in steps]
        with expandable_segments(self.device):
            for parts in [parts for parts in steps if parts] * epochs:
                self._accumulate(parts, sums[""])
                self._step(sums[""])
        names = {name: f"{name}/" if name else "" for name in terms}
        numbers = [sums[name].numbers(self.group, record, prefix) for name, prefix in names.items()]
        return {name: number for each in numbers for name, number in each.items()}

    def join(self, name: str, term: Term) -> None:
        """Add a node's term to the optimizer steps of the next ``update``, which then has its metrics."""
        self.joined[name] = term

    def _mini_batches(self, shared: SharedPass, minibatches: int) -> list[MiniBatch]:
        first = shared.terms[0]
        pooled, _ = self.rows.pooled({**shared.columns, ROW: first.rows})
        rows = pooled.pop(ROW)
        self._check_lengths(pooled["tokens"])
        ranks = self.group, self.rows.ranks, shared.merged
        cuts = rows, first.total_rows, minibatches
        return mini_batches(pooled, *cuts, self.budget, self.device, *ranks)

    def set_rate(self, rate: float) -> None:
        """Change the learning rate, at its peak: a warm-up goes on from there."""
        set_rate(self.scheduler, rate)

    def weights(self, dtype: str | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Return every weight in full, named and shaped as in the checkpoint, tied ones once; then buffers.

        Those of a mixture's experts are views of fused parameters. Adapters are merged into their weights.
        Collective: every rank must take all of them.

        Args:
            dtype: that the reader holds weights in. Where it is narrower than a parameter's own, the shards
                are cast to it before they are gathered, but for those in ``WIDE``. Where adapters are merged
                nothing is cast here: the sum would be another one.

        Raises:
            RuntimeError: the parameters are offloaded.
        """
        return in_pieces(self._full(dtype), self.pieces)

    def adapter(self, dtype: str | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the adapters in full, by their names in peft's files. Collective, as ``weights``.

        Args:
            dtype: that the reader holds them in; where it is narrower, shards are cast before the gather.

        Raises:
            RuntimeError: the parameters are offloaded.
        """
        self.residency.need(["parameters"], "adapter")
        own = [(name, p) for name, p in self.model.named_parameters() if adapters.is_adapter(name)]
        wanted = getattr(torch, dtype or "float32")
        narrow = {name: wanted for name, p in own if wanted.itemsize < p.dtype.itemsize}
        full = gather_full(((name, apart(p)) for name, p in own), self.copy_group, narrow, self.parts)
        return ((adapters.in_files(name), tensor) for name, tensor in full)

    def _full(self, dtype: str | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Return ``weights`` as the model's own parameters."""
        self.residency.need(["parameters"], "weights")
        narrow = self._narrowed(getattr(torch, dtype)) if dtype and not self.lora else {}
        parameters = ((n, apart(self._read(p, narrow.get(n)))) for n, p in self.model.named_parameters())
        buffers = ((name, apart(b)) for name, b in self.model.named_buffers() if name in self.persistent)
        full = gather_full(chain(parameters, buffers), self.copy_group, narrow, self.parts)
        if not self.lora:
            return full
        return adapters.merged(full, self.lora.alpha / self.lora.rank, adapters.adapted(self.model))

    def _read(self, parameter: torch.nn.Parameter, dtype: torch.dtype | None) -> torch.Tensor:
        """Return a parameter on the device, for a reader of ``dtype`` or, if None, of all that it is."""
        held = exact(self.optimizer, parameter)
        return parameter if parameter.dtype in (held.dtype, dtype) else held.detach().to(self.device)

    def _exact(self) -> dict[str, torch.Tensor]:
        """Return every parameter by name, as the optimizer holds it."""
        return {name: exact(self.optimizer, p) for name, p in self.model.named_parameters()}

    def _publish(self) -> None:
        """Bring what was read or copied into masters on the host to the device."""
        if isinstance(self.optimizer, HostAdamW):
            self.optimizer.publish()

    def _narrowed(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Return what a reader of ``dtype`` loses nothing of where it is cast before it is gathered."""
        wider = (name for name, p in self._exact().items() if dtype.itemsize < p.dtype.itemsize)
        return {name: dtype for name in wider if not any(p.name.endswith(WIDE) for p in self.pieces[name])}

    def copy(self, of: FsdpEngine, mix: float = 1.0) -> None:
        """Take the weights of another engine of the same ranks: W <- (1 - mix) W + mix W_of. Collective.

        Their meshes may differ.

        Raises:
            RuntimeError: the parameters of one of them are offloaded.
            ValueError: they are those of another model.
        """
        self.residency.need(["parameters"], "copy")
        self.residency.changed(["parameters"])
        own = {**self._exact(), **dict(self.model.named_buffers())}
        checkpoint.blend(own, of._full(), mix, self.parts)
        self._publish()

    def checkpoint_bytes(self) -> int:
        """Return the bytes that this rank writes of a checkpoint: what trains, with its averages."""
        if not self.in_first:
            return 0
        own = [p for name, p in self.model.named_parameters() if self.parts.writes(name)]
        if self.optimizer is None:
            return sum(local(p).nbytes for p in own)
        averages = {p: len(moments_of(g)) for g in self.optimizer.param_groups for p in g["params"]}
        held = [exact(self.optimizer, p) for p in own if p.requires_grad]
        return sum((1 + averages[p]) * local(p).nbytes for p in held)

    def begin_save(self, directory: str) -> None:
        """Copy what trains (parameters, optimizer, schedule) to host memory, and write it in the background.

        The directory is whole when ``finish_save`` has returned on every rank; until then the engine may do
        anything but ``load``. Of a frozen model that is its parameters. What is offloaded comes back for the
        copy, and goes again; so it does for ``load`` and ``export``.

        Raises:
            OSError, safetensors.SafetensorError: the save before could not be written.
        """
        with self.residency.back():
            state = checkpoint.training_state(self.model, self.optimizer, self.scheduler)
            self.saves.begin(directory, *state)

    def finish_save(self) -> dict[str, str]:
        """Wait for what ``begin_save`` began, if anything; return the digests of this rank's files by name.

        Raises:
            OSError, safetensors.SafetensorError: it could not be written.
        """
        return self.saves.finish()

    def save(self, directory: str) -> None:
        """Save at once: any number of ranks can load it when this has returned on all."""
        self.begin_save(directory)
        self.finish_save()

    def load(self, directory: str) -> None:
        """Read what ``save`` wrote, on any number of ranks.

        Raises:
            FileNotFoundError: the checkpoint is not whole.
            OSError, safetensors.SafetensorError: the save before could not be written.
            ValueError: it is one of another model.
        """
        self.finish_save()
        with self.residency.back():
            self.residency.changed(["parameters", "optimizer"])
            checkpoint.load_state(directory, self.model, self.optimizer, self.scheduler, self.parts)
            self._publish()

    def export(self, directory: str) -> None:
        """Write a Hugging Face directory with the tokenizer; it is whole when any rank returns.

        Its weights are of the data type of the directory that the model was read from. Adapters are merged in
        it, and lie by themselves in its folder ``adapter``, as peft reads them.
        """
        first = self.group.rank() == 0
        dtype = self.files.config().dtype
        with self.residency.back():
            typed = cast(self.weights(), dtype) if dtype else self.weights()
            # copied one by one: what shares memory, transformers would copy once more
            weights = {name: tensor.to("cpu", copy=True) for name, tensor in typed if first}
            adapter = {name: tensor.cpu() for name, tensor in self.adapter() if first}
        if first:
            checkpoint.write_pretrained(directory, self.model, weights, self.files)
        if first and self.lora:
            task = "CAUSAL_LM" if self.head == "lm" else "TOKEN_CLS"
            adapters.write_adapter(Path(directory) / "adapter", self.model, adapter, self.path, task)
        dist.barrier(self.group)

    def _check_lengths(self, tokens: Ragged) -> None:
        """Check that no row changes the position embeddings of the others in its pass (ValueError)."""
        limit, longest = rope_limit(self.model.config), max(tokens.lengths.tolist(), default=0)
        if limit and longest > limit:
            law = f"{self.model.config.model_type}: a row has {longest} tokens, and with more than {limit} "
            law += "the position embeddings of all rows in its pass are others"
            remedy = f"keep rows within {limit}, or give models.NAME.config another rope_parameters"
            raise ValueError(f"{law}; {remedy}")

    def _score(
        self,
        what: str,
        tokens: Ragged,
        loss_mask: Ragged,
        temperature: float = 1.0,
        routing: Ragged | None = None,
    ) -> list[Ragged]:
        """Return the columns ``[samples, tokens]`` that a method of this name returns."""
        self.residency.need(["parameters"], what)
        beside = WITH_SCORES.get(what)
        given = {"tokens": tokens, "loss_mask": loss_mask, "routing": routing}
        present = {name: column for name, column in given.items() if column is not None}
        columns, own = self.rows.pooled(present)
        self._check_lengths(columns["tokens"])
        count = len(columns["tokens"].values)
        columns["place"] = columns["tokens"].like(torch.arange(count))
        batches = micro_batches(columns, self.scoring, self.device)
        passes = int(over_ranks(torch.tensor([len(batches)]), self.group).max())
        with torch.no_grad(), expandable_segments(self.device), gathered(self.shards):
            scores = [self._stacked(batch, temperature, beside) for batch in batches]
            for _ in range(passes - len(batches)):
                self._stacked(placeholder(self.scoring, self.device), temperature, beside)
        out = torch.zeros(2 if beside else 1, count, device=self.device)
        if batches:
            places = [batch.columns["place"].values[batch.places] for batch in batches]
            out[:, torch.cat(places)] = torch.cat(scores, 1)
        return [tokens.like(row) for row in out[:, own]]

    def _stacked(self, batch: MicroBatch, temperature: float, beside: str | None) -> torch.Tensor:
        """Return scores ``[1, scored]``, or ``[2, scored]`` with what a method of scoring.py gives beside."""
        if beside:
            self._replay(batch)
            return torch.stack([*map(batch.whole, getattr(self.model, beside)(batch, temperature))])
        return self._scores(batch, temperature, "none")[0][None]

    def _scores(
        self, batch: MicroBatch, temperature: float, entropy: Entropy
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self._replay(batch)
        if self.head == "value":
            return batch.whole(values(self.model, batch)), None
        logprobs, entropies = self.model.token_scores(batch, temperature, entropy)
        return batch.whole(logprobs), None if entropies is None else batch.whole(entropies)

    def _replay(self, batch: MicroBatch) -> None:
        """Have the next pass, and its backward pass, route tokens as the batch says."""
        if batch.routing is not None and self.routing is None:
            self.routing = Routing(self.model)
        if self.routing:
            self.routing.replay(None if batch.routing is None else batch.routing.to(self.device))
        if self.balance:
            self.balance.begin(batch.counted if torch.is_grad_enabled() else None)

    def _accumulate(self, parts: Sequence[tuple[SharedPass, MiniBatch]], metric_sums: MetricSums) -> None:
        """Add up the gradients of all terms' parts of a mini-batch; ``metric_sums`` takes what is of none."""
        work = [(*part, index) for part in parts for index in range(part[1].passes)]
        read = sum(minibatch.read for _, minibatch in parts)
        for shared, minibatch in parts:
            for sums, totals in zip(shared.sums, minibatch.totals, strict=True):
                sums.steps += totals.tokens > 0
        with gathered(self.shards):
            for number, (shared, minibatch, index) in enumerate(work, 1):
                reduce_with_the_last(self.shards, number == len(work), whole=not self.reshard)
                if index < len(minibatch.batches):
                    batch = minibatch.batches[index]
                    loss = self._loss(shared, batch, minibatch.totals)
                    if self.balance:
                        term, metrics = self.balance.loss(batch.read, read, self.rows.group)
                        loss = loss + term
                        metric_sums.add_metrics(metrics)
                else:
                    idle = placeholder(self.budget, self.device)
                    loss = 0.0 * self._scores(idle, shared.temperature, "none")[0].sum()
                loss.backward()
        named = self.model.named_parameters()
        self.parts.add_up({name: local(p.grad) for name, p in named if p.grad is not None})

    def _loss(self, shared: SharedPass, batch: MicroBatch, totals: Sequence[Totals]) -> torch.Tensor:
        """Return the weighed losses of a micro-batch's terms, added up; their metrics are noted."""
        scored = self._scored_columns(batch, shared.temperature, shared.entropy)
        total = torch.zeros((), device=self.device)
        for prefix, term, sums, counts in zip(
            shared.prefixes, shared.terms, shared.sums, totals, strict=True
        ):
            own = shared.own(scored, prefix)
            counts = replace(counts, lengths=own.pop("sequence_tokens", None))
            if counts.tokens:
                loss, metrics = term.objective(own, counts)
                total = total + term.weight * loss
                if self.rows.rank == 0:  # the others have the same
                    sums.add(loss, metrics)
        return total

    def _scored_columns(self, batch: MicroBatch, temperature: float, entropy: bool) -> dict[str, Any]:
        scores, entropies = self._scores(batch, temperature, "differentiable" if entropy else "detached")
        if self.head == "value":
            return {**batch.columns, "new_values": batch.scatter(scores)}
        assert entropies is not None
        return {**batch.columns, "logprobs": batch.scatter(scores), "entropy": batch.scatter(entropies)}

    def _step(self, metric_sums: MetricSums) -> None:
        limit = self.options.max_grad_norm
        norm = clip_gradients(self.parameters, limit, self.group, self.replicas, self.shares)
        if math.isfinite(norm):
            metric_sums.shared["grad_norm"].append(norm)
            metric_sums.shared["lr"].append(self.scheduler.get_last_lr()[0])
            self.optimizer.step()
            self.scheduler.step()
        else:
            metric_sums.skipped += 1
        if self.balance:
            most = self.balance.step(self.group, moves=math.isfinite(norm))
            metric_sums.shared.setdefault("router_imbalance", []).append(most)
        self.optimizer.zero_grad(set_to_none=True)
