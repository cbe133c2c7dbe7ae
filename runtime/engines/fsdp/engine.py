"""The train engine: a Hugging Face model sharded with FSDP2 over any number of ranks.

One file: it is one class, whose methods are the contract of a train engine with units and errors; what they
do lies in the files beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import interfaces
from rlgraph.ops.interfaces import Batch, Objective, Recorder, Totals
from rlgraph.runtime.engines.balance import Balance
from rlgraph.runtime.engines.contract import LentWeights
from rlgraph.runtime.engines.fsdp import checkpoint
from rlgraph.runtime.engines.fsdp.batching import Budget, MiniBatch, micro_batches, mini_batches, placeholder
from rlgraph.runtime.engines.fsdp.host_optimizer import exact
from rlgraph.runtime.engines.fsdp.load import ShardedModel, load_sharded
from rlgraph.runtime.engines.fsdp.micro_batch import MicroBatch
from rlgraph.runtime.engines.fsdp.optimizer import moments_of
from rlgraph.runtime.engines.fsdp.options import TrainOptions
from rlgraph.runtime.engines.fsdp.packing import attention_share, has_mask, packs
from rlgraph.runtime.engines.fsdp.ranks import ModelRanks
from rlgraph.runtime.engines.fsdp.scoring import Entropy, values
from rlgraph.runtime.engines.fsdp.shards import (
    apart,
    gather_full,
    gathered,
    local,
    reduce_with_the_last,
)
from rlgraph.runtime.engines.fsdp.tensor import ExpertGroup
from rlgraph.runtime.engines.fsdp.terms import SharedPass, passes
from rlgraph.runtime.engines.fsdp.trainable import TrainableWeights
from rlgraph.runtime.engines.memory.allocator import expandable_segments
from rlgraph.runtime.engines.memory.offload import SHARED, Residency, optimizer_tensors
from rlgraph.runtime.engines.metric_sums import MetricSums, over_ranks
from rlgraph.runtime.engines.model_files import ModelFiles, rope_limit
from rlgraph.runtime.engines.routing import Routing
from rlgraph.runtime.engines.sequence.groups import ALONE, RowGroup, SequenceGroup, over_heads
from rlgraph.runtime.engines.term import Term
from rlgraph.runtime.engines.weights import lora as adapters
from rlgraph.runtime.engines.weights.four_bit import four_bit_layers, whole_parameters
from rlgraph.runtime.engines.weights.frozen import frozen_weights
from rlgraph.runtime.engines.weights.naming import WeightViews, as_stored, base_name
from rlgraph.runtime.engines.weights.transfer import WIDE, cast

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rlgraph.runtime.engines.contract import HostedTrainEngine

ROW = ""  # the row numbers, among columns that have names

# methods of an engine that return two columns -> the method of its model that computes both
WITH_SCORES = {"squares": "token_squares", "entropies": "token_entropies"}


class FsdpEngine:
    """Implements ``rlgraph.ops.TrainEngine``; every rank of the mesh calls its methods in one order.

    Results do not depend on how rows lie on ranks and in micro-batches, up to rounding: of float32 on a CPU,
    of ``dtype`` on CUDA, where kernels add up in an order that depends on shapes, and some in any order.

    Invariants:

    - All ranks hold the same version of the weights between calls, each its shards.
    - Parameters have gradients within ``update`` alone, and gathered copies within one call.
    - What is offloaded is not read: a call that needs it is refused by ``residency``.
    - ``training`` is None exactly for a frozen model.

    Example:
        engine = FsdpEngine.of("Qwen/Qwen2.5-0.5B-Instruct", optimizer={"lr": 1e-6}, micro_tokens=8192)

    Args:
        files: the model's directory or hub name.
        options: how it is loaded, trained and scored with.
        ranks: the ranks that it is on.
        base: an engine of the same files, mesh and ``dtype``, nothing of it offloaded. This one has in its
            memory the weights that both hold and neither trains: they have to be there when this one works.

    Raises:
        ValueError: weights that the directory lacks, a layer to adapt that the model lacks, tokens that ranks
            can't share, layers or experts that they can't divide, or routers that the model lacks.
    """

    def __init__(
        self, files: ModelFiles, options: TrainOptions, ranks: ModelRanks, base: FsdpEngine | None = None
    ) -> None:
        """Load, shard and, unless frozen, prepare to train. torch.distributed must be initialised."""
        self.files = files
        self.options = options
        self.ranks = ranks
        self.path = files.path
        self.head = options.head
        self.lora = options.lora
        self.device = torch.device(ranks.mesh.device_type)
        # read with every call, and by name in tests of what runs
        self.group = ranks.group
        self.copy_group = ranks.copy_group
        self.rows = ranks.same_rows

        borrowed = frozen_weights(base.model, base.views) if base else {}
        borrowed_layers = four_bit_layers(base.model, base.views) if base else {}
        sharded = load_sharded(files, options, ranks, borrowed, borrowed_layers)
        self.model: PreTrainedModel = sharded.model
        self.views: WeightViews = sharded.views
        self.shards = sharded.shards
        self.reshard = sharded.reshard
        self.layer_parts = sharded.layer_parts
        self.persistent = frozenset(self.model.state_dict())  # names, of buffers too that a checkpoint holds

        self.budget = _budget_of(sharded, options, ranks)
        self.scoring = replace(self.budget, tokens=options.score_tokens or options.micro_tokens)
        self.routing: Routing | None = None  # made when choices of experts are given
        self.balance: Balance | None = None
        if options.balances_routers:
            self.balance = Balance(
                self.model, options.router_aux_loss_coef, options.router_bias_update_rate, self.device
            )
        self.training: TrainableWeights | None = None
        if options.optimizer:
            self.training = TrainableWeights(sharded, options, options.optimizer, ranks)
        self.joined: dict[str, Term] = {}  # those of the next update, by their nodes

        # taken last: an optimizer on the host has replaced the parameters' memory
        frozen = frozen_weights(self.model, self.views)
        borrowed_parameters = {id(frozen[key]) for key in frozen.keys() & borrowed.keys()}
        for layer in borrowed_layers.values():
            borrowed_parameters |= {id(p) for p in layer.parameters()}
        self.owned = [p for p in self.model.parameters() if id(p) not in borrowed_parameters]
        components = {SHARED: self._parameter_tensors, "optimizer": self._optimizer_tensors}
        base_residency = base.residency if base else None
        self.residency: Residency = Residency(self.path, self.device, components, base_residency)
        self.saves = checkpoint.Saves(self.copy_group, ranks.is_in_first_copy, self.layer_parts)

    @classmethod
    def of(
        cls,
        path: str,
        *,
        ranks: ModelRanks | None = None,
        device: str = "cpu",
        mesh: DeviceMesh | None = None,
        group: dist.ProcessGroup | None = None,
        sequence: SequenceGroup = ALONE,
        tensor: RowGroup = ALONE,
        experts: ExpertGroup | None = None,
        config: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
        base: FsdpEngine | None = None,
        **settings: Any,
    ) -> FsdpEngine:
        """Return the engine of a directory or a hub name; ``settings`` are as ``TrainOptions.read`` has them.

        Unless ``ranks`` are given, they are made of the groups, which are as ``ModelRanks`` has them: by
        default all ranks of torch.distributed hold one copy of the model on a ``device``, ``cpu`` or
        ``cuda``, of which the caller has chosen the current one. ``config`` and ``trust_remote_code`` are as
        ``models.NAME``.

        Raises:
            ValueError: an unknown or missing option, or as ``FsdpEngine``.
        """
        options = TrainOptions.read(**settings)
        if ranks is None:
            if mesh is None:
                mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
            ranks = ModelRanks(mesh, group or mesh.get_group(), sequence, tensor, experts or ExpertGroup())
        return cls(ModelFiles(path, config or {}, trust_remote_code), options, ranks, base)

    @property
    def replicas(self) -> int:
        """Return how many copies of the model there are."""
        return self.ranks.replicas

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters that train, in the order of the model."""
        return self.training.parameters if self.training else []

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """Return the optimizer; None of a frozen model."""
        return self.training.optimizer if self.training else None

    @property
    def scheduler(self) -> torch.optim.lr_scheduler.LRScheduler | None:
        """Return the schedule of the learning rate; None of a frozen model."""
        return self.training.scheduler if self.training else None

    def _optimizer_is_apart(self) -> bool:
        """Return whether masters and averages lie on the host while weights are on a GPU."""
        return self.options.optimizer_offload and self.device.type != "cpu"

    def _parameter_tensors(self) -> list[torch.Tensor]:
        """Return what the part ``parameters`` has on the device."""
        if self._optimizer_is_apart():
            return [*self.owned]
        return [*self.owned, *(exact(self.optimizer, p) for p in self.owned)]

    def _optimizer_tensors(self) -> list[torch.Tensor]:
        """Return what the part ``optimizer`` has on the device."""
        return [] if self._optimizer_is_apart() else optimizer_tensors(self.optimizer)

    @property
    def away(self) -> frozenset[str]:
        """Return what is offloaded now, out of ``parameters`` and ``optimizer``."""
        return self.residency.offloaded

    def offload(self, components: Iterable[str]) -> None:
        """Move this rank's shards to the host: to pinned memory from CUDA, to a temporary file from the CPU.

        What has not changed since the last time is not copied again. Gradients live only inside ``update``.

        Args:
            components: out of ``parameters`` and ``optimizer``; a frozen model's optimizer is empty.

        Raises:
            RuntimeError: a part is away already.
            ValueError: a part that there is not.
        """
        self.residency.offload(components)

    def reload(self, components: Iterable[str]) -> None:
        """Bring back what ``offload`` moved, bit for bit.

        Raises:
            RuntimeError: a part is not away.
            ValueError: a part that there is not.
        """
        self.residency.reload(components)

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
        assert self.training is not None, "a frozen model does not train"
        self.residency.need(["parameters", "optimizer"], "update")
        self.residency.changed(["parameters", "optimizer"])
        main_term = Term(columns, objective, rows, total_rows, temperature, entropy, merged, weight)
        terms = {"": main_term, **self.joined}
        self.joined = {}
        sums = {node: MetricSums(shared={}) for node in terms}
        sums[""] = MetricSums()  # what the optimizer steps themselves have is of the first term
        steps = self._optimizer_steps(passes(terms, sums, self.group), minibatches)
        with expandable_segments(self.device):
            for _ in range(epochs):
                for batches in steps:
                    self._accumulate(batches, sums[""])
                    self._step(sums[""])
        metrics: dict[str, float] = {}
        for node, term_sums in sums.items():
            metrics |= term_sums.numbers(self.group, record, f"{node}/" if node else "")
        return metrics

    def _optimizer_steps(
        self, shared: Sequence[SharedPass], minibatches: int
    ) -> list[list[tuple[SharedPass, MiniBatch]]]:
        """Return the mini-batches of each optimizer step of an epoch, those with tokens. Collective."""
        steps: list[list[tuple[SharedPass, MiniBatch]]] = [[] for _ in range(minibatches)]
        for one_pass in shared:
            for step, batch in zip(steps, self._mini_batches(one_pass, minibatches), strict=True):
                if any(totals.tokens for totals in batch.totals):
                    step.append((one_pass, batch))
        return [step for step in steps if step]

    def join(self, name: str, term: Term) -> None:
        """Add a node's term to the optimizer steps of the next ``update``, which then has its metrics."""
        self.joined[name] = term

    def _mini_batches(self, shared: SharedPass, minibatches: int) -> list[MiniBatch]:
        main_term = shared.terms[0]
        pooled, _ = self.rows.pooled({**shared.columns, ROW: main_term.rows})
        rows = pooled.pop(ROW)
        self._check_lengths(pooled["tokens"])
        return mini_batches(
            pooled,
            rows,
            main_term.total_rows,
            minibatches,
            self.budget,
            self.device,
            self.group,
            self.rows.ranks,
            shared.merged,
        )

    def set_rate(self, rate: float) -> None:
        """Change the learning rate, at its peak: a warm-up goes on from there."""
        assert self.training is not None, "a frozen model has no learning rate"
        self.training.set_rate(rate)

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
        return as_stored(self._full(dtype), self.views)

    def adapter(self, dtype: str | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the adapters in full, by their names in peft's files. Collective, as ``weights``.

        Args:
            dtype: that the reader holds them in; where it is narrower, shards are cast before the gather.

        Raises:
            RuntimeError: the parameters are offloaded.
        """
        self.residency.need(["parameters"], "adapter")
        adapter = [(name, p) for name, p in self.model.named_parameters() if adapters.is_adapter(name)]
        wanted = getattr(torch, dtype or "float32")
        narrow = {name: wanted for name, p in adapter if wanted.itemsize < p.dtype.itemsize}
        full = gather_full(
            ((name, apart(p)) for name, p in adapter), self.copy_group, narrow, self.layer_parts
        )
        return ((adapters.in_files(name), tensor) for name, tensor in full)

    def lend(self) -> LentWeights:
        """Return the weights that do not train, for an engine that generates on this device.

        Each rank has to hold a whole copy of the model.
        """
        assert self.copy_group.size() == 1, "a rank that holds a shard has no whole weights to lend"
        frozen = frozen_weights(self.model, self.views)
        lent = {key: local(parameter).detach() for key, parameter in frozen.items()}
        for name, buffer in self.model.named_buffers():
            if name in self.persistent:
                lent[tuple(self.views[base_name(name)])] = buffer
        layers = four_bit_layers(self.model, self.views)
        return LentWeights(lent, layers, partial(self.residency.need, [SHARED]))

    def _full(self, dtype: str | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Return ``weights`` as the model's own parameters."""
        self.residency.need(["parameters"], "weights")
        narrow = self._narrowed(getattr(torch, dtype)) if dtype and not self.lora else {}
        parameters = (
            (n, apart(self._as_reader_holds(p, narrow.get(n)))) for n, p in whole_parameters(self.model)
        )
        buffers = ((name, apart(b)) for name, b in self.model.named_buffers() if name in self.persistent)
        full = gather_full(chain(parameters, buffers), self.copy_group, narrow, self.layer_parts)
        if not self.lora:
            return full
        return adapters.merged(full, self.lora.alpha / self.lora.rank, adapters.adapted(self.model))

    def _as_reader_holds(self, parameter: torch.nn.Parameter, dtype: torch.dtype | None) -> torch.Tensor:
        """Return a parameter on the device, for a reader of ``dtype`` or, if None, of all that it is."""
        master = exact(self.optimizer, parameter)
        if parameter.dtype in (master.dtype, dtype):
            return parameter
        return master.detach().to(self.device)

    def _exact(self) -> dict[str, torch.Tensor]:
        """Return every parameter by name, as the optimizer holds it."""
        return {name: exact(self.optimizer, p) for name, p in self.model.named_parameters()}

    def _publish(self) -> None:
        """Bring what was read or copied into masters on the host to the device."""
        if self.training:
            self.training.publish()

    def _narrowed(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Return what a reader of ``dtype`` loses nothing of where it is cast before it is gathered."""
        narrowed = {}
        for name, parameter in self._exact().items():
            stays_wide = any(view.name.endswith(WIDE) for view in self.views[name])
            if dtype.itemsize < parameter.dtype.itemsize and not stays_wide:
                narrowed[name] = dtype
        return narrowed

    def copy(self, of: interfaces.TrainEngine, mix: float = 1.0) -> None:
        """Take the weights of another engine of the same ranks: W <- (1 - mix) W + mix W_of. Collective.

        Their meshes may differ.

        Raises:
            RuntimeError: the parameters of one of them are offloaded.
            ValueError: they are those of another model.
        """
        assert isinstance(of, FsdpEngine), "the plan copies between engines of one kind"
        self.residency.need(["parameters"], "copy")
        self.residency.changed(["parameters"])
        targets = {**self._exact(), **dict(self.model.named_buffers())}
        checkpoint.blend(targets, of._full(), mix, self.layer_parts)
        self._publish()

    def checkpoint_bytes(self) -> int:
        """Return the bytes that this rank writes of a checkpoint: what trains, with its averages."""
        if not self.ranks.is_in_first_copy:
            return 0
        written = [p for name, p in self.model.named_parameters() if self.layer_parts.writes(name)]
        if self.optimizer is None:
            return sum(local(p).nbytes for p in written)
        averages = {p: len(moments_of(g)) for g in self.optimizer.param_groups for p in g["params"]}
        masters = [exact(self.optimizer, p) for p in written if p.requires_grad]
        return sum((1 + averages[p]) * local(p).nbytes for p in masters)

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
            checkpoint.load_state(directory, self.model, self.optimizer, self.scheduler, self.layer_parts)
            self._publish()

    def export(self, directory: str) -> None:
        """Write a Hugging Face directory with the tokenizer; it is whole when any rank returns.

        Its weights are of the data type of the directory that the model was read from. Adapters are merged in
        it, and lie by themselves in its folder ``adapter``, as peft reads them.
        """
        is_first_rank = self.group.rank() == 0
        dtype = self.files.config().dtype
        with self.residency.back():
            typed = cast(self.weights(), dtype) if dtype else self.weights()
            # copied one by one: what shares memory, transformers would copy once more
            weights = {name: tensor.to("cpu", copy=True) for name, tensor in typed if is_first_rank}
            adapter = {name: tensor.cpu() for name, tensor in self.adapter() if is_first_rank}
        if is_first_rank:
            checkpoint.write_pretrained(directory, self.model, weights, self.files)
        if is_first_rank and self.lora:
            task = "CAUSAL_LM" if self.head == "lm" else "TOKEN_CLS"
            adapters.write_adapter(Path(directory) / "adapter", self.model, adapter, self.path, task)
        dist.barrier(self.group)

    def _check_lengths(self, tokens: Ragged) -> None:
        """Check that no row changes the position embeddings of the others in its pass (ValueError)."""
        config = self.model.config
        limit = rope_limit(config)
        longest = max(tokens.lengths.tolist(), default=0)
        if limit and longest > limit:
            law = f"{config.model_type}: a row has {longest} tokens, and with more than {limit} "
            law += "the position embeddings of all rows in its pass are others"
            remedy = f"keep rows within {limit}, or give models.NAME.config another rope_parameters"
            raise ValueError(f"{law}; {remedy}")

    def _score(
        self,
        call: str,
        tokens: Ragged,
        loss_mask: Ragged,
        temperature: float = 1.0,
        routing: Ragged | None = None,
    ) -> list[Ragged]:
        """Return the columns ``[samples, tokens]`` that a method of this name returns."""
        self.residency.need(["parameters"], call)
        second = WITH_SCORES.get(call)
        inputs = {"tokens": tokens, "loss_mask": loss_mask}
        if routing is not None:
            inputs["routing"] = routing
        columns, own_tokens = self.rows.pooled(inputs)
        self._check_lengths(columns["tokens"])
        count = len(columns["tokens"].values)
        columns["place"] = columns["tokens"].like(torch.arange(count))
        batches = micro_batches(columns, self.scoring, self.device)
        most_batches = int(over_ranks(torch.tensor([len(batches)]), self.group).max())
        with torch.no_grad(), expandable_segments(self.device), gathered(self.shards):
            scores = [self._stacked(batch, temperature, second) for batch in batches]
            for _ in range(most_batches - len(batches)):  # collectives of the other ranks pair up with these
                self._stacked(placeholder(self.scoring, self.device), temperature, second)
        out = torch.zeros(2 if second else 1, count, device=self.device)
        if batches:
            places = [batch.columns["place"].values[batch.places] for batch in batches]
            out[:, torch.cat(places)] = torch.cat(scores, 1)
        return [tokens.like(row) for row in out[:, own_tokens]]

    def _stacked(self, batch: MicroBatch, temperature: float, second: str | None) -> torch.Tensor:
        """Return log-probs or values ``[1, scored]``; ``[2, scored]`` by a method of scoring.py that returns
        a second column."""
        if second is None:
            return self._scores(batch, temperature, "none")[0][None]
        self._replay(batch)
        scores, seconds = getattr(self.model, second)(batch, temperature)
        return torch.stack([batch.whole(scores), batch.whole(seconds)])

    def _scores(
        self, batch: MicroBatch, temperature: float, entropy: Entropy
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self._replay(batch)
        if self.head == "value":
            return batch.whole(values(self.model, batch)), None
        model: Any = self.model  # its methods are those of scoring.py
        logprobs, entropies = model.token_scores(batch, temperature, entropy)
        return batch.whole(logprobs), None if entropies is None else batch.whole(entropies)

    def _replay(self, batch: MicroBatch) -> None:
        """Have the next pass, and its backward pass, route tokens as the batch says."""
        if batch.routing is not None and self.routing is None:
            self.routing = Routing(self.model)
        if self.routing:
            self.routing.replay(None if batch.routing is None else batch.routing.to(self.device))
        if self.balance:
            self.balance.begin(batch.counted if torch.is_grad_enabled() else None)

    def _accumulate(self, batches: Sequence[tuple[SharedPass, MiniBatch]], metric_sums: MetricSums) -> None:
        """Add up the gradients of all terms' mini-batches of one step; ``metric_sums`` takes what is of no
        term."""
        work: list[tuple[SharedPass, MiniBatch, int]] = []
        for shared, minibatch in batches:
            for sums, totals in zip(shared.sums, minibatch.totals, strict=True):
                sums.steps += totals.tokens > 0
            work += [(shared, minibatch, index) for index in range(minibatch.passes)]
        tokens_read = sum(minibatch.read for _, minibatch in batches)
        with gathered(self.shards):
            for number, (shared, minibatch, index) in enumerate(work, 1):
                reduce_with_the_last(self.shards, number == len(work), whole=not self.reshard)
                if index < len(minibatch.batches):
                    batch = minibatch.batches[index]
                    loss = self._loss(shared, batch, minibatch.totals)
                    if self.balance:
                        balance_loss, metrics = self.balance.loss(batch.read, tokens_read, self.rows.group)
                        loss = loss + balance_loss
                        metric_sums.add_metrics(metrics)
                else:  # collectives of the other ranks pair up with these
                    idle = placeholder(self.budget, self.device)
                    loss = 0.0 * self._scores(idle, shared.temperature, "none")[0].sum()
                loss.backward()
        parameters = self.model.named_parameters()
        self.layer_parts.add_up({name: local(p.grad) for name, p in parameters if p.grad is not None})

    def _loss(self, shared: SharedPass, batch: MicroBatch, totals: Sequence[Totals]) -> torch.Tensor:
        """Return the weighed losses of a micro-batch's terms, added up; their metrics are noted."""
        scored = self._scored_columns(batch, shared.temperature, shared.entropy)
        total = torch.zeros((), device=self.device)
        for prefix, term, sums, counts in zip(
            shared.prefixes, shared.terms, shared.sums, totals, strict=True
        ):
            columns = shared.columns_of_term(scored, prefix)
            counts = replace(counts, lengths=columns.pop("sequence_tokens", None))
            if counts.tokens:
                loss, metrics = term.objective(columns, counts)
                total = total + term.weight * loss
                if self.rows.rank == 0:  # the others have the same
                    sums.add(loss, metrics)
        return total

    def _scored_columns(self, batch: MicroBatch, temperature: float, entropy: bool) -> dict[str, Any]:
        entropy_kind: Entropy = "differentiable" if entropy else "detached"
        scores, entropies = self._scores(batch, temperature, entropy_kind)
        if self.head == "value":
            return {**batch.columns, "new_values": batch.scatter(scores)}
        assert entropies is not None
        return {**batch.columns, "logprobs": batch.scatter(scores), "entropy": batch.scatter(entropies)}

    def _step(self, metric_sums: MetricSums) -> None:
        assert self.training is not None, "a frozen model does not train"
        step = self.training.step()
        if step.is_taken:
            metric_sums.shared["grad_norm"].append(step.gradient_norm)
            metric_sums.shared["lr"].append(step.rate)
        else:
            metric_sums.skipped += 1
        if self.balance:
            imbalance = self.balance.step(self.group, moves=step.is_taken)
            metric_sums.shared.setdefault("router_imbalance", []).append(imbalance)
        self.training.drop_gradients()


def _budget_of(sharded: ShardedModel, options: TrainOptions, ranks: ModelRanks) -> Budget:
    """Return the limits by which rows of an update are cut into micro-batches."""
    model = sharded.model
    share = None
    if options.packing and packs(model):
        share = attention_share(model, sharded.layers) / ranks.tensor.ranks
    return Budget(
        tokens=options.micro_tokens,
        share=share,
        dtype=options.compute,
        mask=has_mask(model),
        sequence=over_heads(ranks.sequence, model),
        counts=options.balances_routers,
    )


if TYPE_CHECKING:  # mypy: it has every member that a worker calls
    ENGINE: type[HostedTrainEngine] = FsdpEngine
