"""The train engine: a Hugging Face model sharded with FSDP2 over any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlgraph.engines import Batch, Objective, Totals
from rlgraph.nodes.ragged import Ragged
from rlgraph.runtime.fsdp import checkpoint
from rlgraph.runtime.fsdp.batching import MicroBatch, MiniBatch, micro_batches, minibatch_rows, placeholder
from rlgraph.runtime.fsdp.gather import gather_full
from rlgraph.runtime.fsdp.load import Head, load_sharded
from rlgraph.runtime.fsdp.optimizer import OptimizerOptions, clip_gradients, make_optimizer
from rlgraph.runtime.fsdp.residency import Residency, optimizer_tensors
from rlgraph.runtime.fsdp.scoring import Entropy, forward, token_scores
from rlgraph.runtime.fsdp.tally import Tally

SMALL = 2**26  # parameters: gathered whole they take 256 MiB in float32, and their gradients as much


class FsdpEngine:
    """Implements ``rlgraph.engines.TrainEngine``; every rank of the mesh calls the same methods in order.

    Results do not depend on how rows lie on ranks and in micro-batches, up to float32 rounding.
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
        device: str = "cpu",
        dtype: str = "float32",
        mesh: DeviceMesh | None = None,
        reshard: bool | None = None,
        recompute: bool = False,
    ) -> None:
        """Load, shard and, unless frozen, prepare to train. torch.distributed must be initialised.

        Args:
            path: a Hugging Face directory or name.
            head: ``lm`` for log-probs, ``value`` for one number a token.
            frozen: hold no gradients and no optimizer.
            optimizer: see ``OptimizerOptions``; needed unless frozen.
            seed: of a value head that the directory lacks.
            micro_tokens: tokens of one forward pass on a rank, padding included.
            device: ``cpu`` or ``cuda``; the caller has chosen the current CUDA device.
            dtype: ``float32`` or ``bfloat16``, to compute in; a model that trains keeps float32 masters.
            mesh: one dimension; by default all ranks.
            reshard: free each decoder layer's gathered parameters after use and reduce gradients with every
                micro-batch; by default only for models of more than ``SMALL`` parameters.
            recompute: run each decoder layer again in the backward pass rather than keep its activations.

        Raises:
            ValueError: an unknown or missing optimizer option, or weights that the directory lacks.
        """
        self.path, self.head, self.micro_tokens = path, head, micro_tokens
        self.mesh = mesh or init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
        self.group = self.mesh.get_group()
        self.device = torch.device(device)
        compute = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
        self.model, self.shards, self.reshard = load_sharded(
            path,
            head=head,
            seed=seed,
            frozen=frozen,
            compute=compute,
            mesh=self.mesh,
            reshard=reshard,
            small=SMALL,
            recompute=recompute,
        )
        self.projection = self.model.get_output_embeddings()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = self.scheduler = None
        if not frozen:
            self.options = OptimizerOptions.of(optimizer or {})
            self.optimizer, self.scheduler = make_optimizer(self.parameters, self.options)
        parts = {"parameters": self.model.parameters, "optimizer": lambda: optimizer_tensors(self.optimizer)}
        self.residency = Residency(path, self.device, parts)

    @property
    def away(self) -> frozenset[str]:
        """What is offloaded now, out of ``parameters`` and ``optimizer``."""
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

    def logprobs(self, tokens: Ragged, loss_mask: Ragged, temperature: float = 1.0) -> Ragged:
        """Log-prob of each token: float32 ``[samples, tokens]``, 0 where ``loss_mask`` is false."""
        assert self.head == "lm", "a value head has no log-probs"
        self.residency.need(["parameters"], "logprobs")
        return self._score(tokens, loss_mask, temperature)

    def values(self, tokens: Ragged, loss_mask: Ragged) -> Ragged:
        """The value before each token: float32 ``[samples, tokens]``, 0 where ``loss_mask`` is false."""
        assert self.head == "value", "a language-model head has no values"
        self.residency.need(["parameters"], "values")
        return self._score(tokens, loss_mask, 1.0)

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
    ) -> dict[str, float]:
        """Train; see ``TrainEngine.update``.

        A mini-batch without a token in its loss mask takes no step, nor does one whose gradient is not
        finite; the metric ``skipped`` counts the latter. ``loss`` is a mean over mini-batches with tokens,
        ``grad_norm`` and ``lr`` over steps taken.
        """
        assert self.optimizer is not None, "a frozen model does not train"
        self.residency.need(["parameters", "optimizer"], "update")
        self.residency.changed(["parameters", "optimizer"])
        tally = Tally()
        plan = [m for m in self._minibatches(columns, rows, total_rows, minibatches) if m.totals.tokens]
        for minibatch in plan * epochs:
            self._accumulate(minibatch, objective, temperature, entropy, tally)
            self._step(tally)
        return tally.means(self.group)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter in full, under its Hugging Face name, tied ones once; then persistent buffers.

        Collective: every rank must take all of them.

        Raises:
            RuntimeError: the parameters are offloaded.
        """
        self.residency.need(["parameters"], "weights")
        parameters = [(name, p.detach()) for name, p in self.model.named_parameters()]
        persistent = self.model.state_dict().keys()
        buffers = [(name, b) for name, b in self.model.named_buffers() if name in persistent]
        return gather_full([*parameters, *buffers], self.group)

    def save(self, directory: str) -> None:
        """Write parameters, optimizer and schedule, sharded; any number of ranks can load them.

        What is offloaded comes back for it, and goes again; so it does for ``load`` and ``export``.
        """
        with self.residency.back():
            checkpoint.save_state(directory, self.model, self.optimizer, self.scheduler, self.group)

    def load(self, directory: str) -> None:
        """Read what ``save`` wrote."""
        with self.residency.back():
            self.residency.changed(["parameters", "optimizer"])
            checkpoint.load_state(directory, self.model, self.optimizer, self.scheduler, self.group)

    def export(self, directory: str) -> None:
        """Write a Hugging Face directory with the tokenizer; it is whole when any rank returns."""
        first = self.group.rank() == 0
        with self.residency.back():
            weights = {name: tensor.cpu() for name, tensor in self.weights() if first}
        if first:
            checkpoint.write_pretrained(directory, self.model, weights, self.path)
        dist.barrier(self.group)

    def _score(self, tokens: Ragged, loss_mask: Ragged, temperature: float) -> Ragged:
        place = tokens.like(torch.arange(len(tokens.values)))
        columns = {"tokens": tokens, "loss_mask": loss_mask, "place": place}
        batches = micro_batches(columns, self.micro_tokens, self.device)
        passes = int(self._over_ranks(torch.tensor([len(batches)])).max())
        out = torch.zeros(len(tokens.values))
        with torch.no_grad(), self._gathered():
            for batch in batches:
                scores, _ = self._scores(batch, temperature, "none")
                out[batch.columns["place"].values[batch.places].cpu()] = scores.cpu()
            for _ in range(passes - len(batches)):
                self._scores(placeholder(self.device), temperature, "none")
        return tokens.like(out)

    def _scores(
        self, batch: MicroBatch, temperature: float, entropy: Entropy
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits = forward(self.model, batch, self.projection)
        if self.head == "value":
            return logits.squeeze(1).float(), None
        return token_scores(logits, batch.labels, temperature, entropy)

    def _minibatches(
        self, columns: Batch, rows: torch.Tensor, total_rows: int, minibatches: int
    ) -> list[MiniBatch]:
        mine = minibatch_rows(rows, total_rows, minibatches)
        batches = [micro_batches(columns, self.micro_tokens, self.device, subset) for subset in mine]
        tokens = columns["loss_mask"].sum()
        counts = [[int(tokens[s].sum()), len(s), len(b)] for s, b in zip(mine, batches, strict=True)]
        ranks = self._over_ranks(torch.tensor(counts))  # [ranks, minibatches, 3]
        sums, most = ranks.sum(0).tolist(), ranks[:, :, 2].amax(0).tolist()
        return [
            MiniBatch(b, Totals(tokens=n, sequences=k), passes)
            for b, (n, k, _), passes in zip(batches, sums, most, strict=True)
        ]

    def _accumulate(
        self, minibatch: MiniBatch, objective: Objective, temperature: float, entropy: bool, tally: Tally
    ) -> None:
        with self._gathered():
            for index in range(minibatch.passes):
                self._sync_gradients(last=index == minibatch.passes - 1)
                if index < len(minibatch.batches):
                    batch = self._scored_columns(minibatch.batches[index], temperature, entropy)
                    loss, metrics = objective(batch, minibatch.totals)
                    tally.add(loss, metrics)
                else:
                    loss = 0.0 * self._scores(placeholder(self.device), temperature, "none")[0].sum()
                loss.backward()

    def _scored_columns(self, batch: MicroBatch, temperature: float, entropy: bool) -> dict[str, Any]:
        scores, entropies = self._scores(batch, temperature, "differentiable" if entropy else "detached")
        if self.head == "value":
            return {**batch.columns, "new_values": batch.scatter(scores)}
        assert entropies is not None
        return {**batch.columns, "logprobs": batch.scatter(scores), "entropy": batch.scatter(entropies)}

    def _step(self, tally: Tally) -> None:
        norm = clip_gradients(self.parameters, self.options.max_grad_norm, self.group)
        tally.steps += 1
        if math.isfinite(norm):
            tally.shared["grad_norm"].append(norm)
            tally.shared["lr"].append(self.scheduler.get_last_lr()[0])
            self.optimizer.step()
            self.scheduler.step()
        else:
            tally.skipped += 1
        self.optimizer.zero_grad(set_to_none=True)

    def _sync_gradients(self, last: bool) -> None:
        """Of a model that is gathered whole, reduce gradients once a mini-batch; else with every micro-batch,
        so that a rank never holds more full gradients than one layer's.
        """
        for shard in self.shards if not self.reshard else []:
            shard.set_requires_gradient_sync(last, recurse=False)
            shard.set_reshard_after_backward(last, recurse=False)
            shard.set_is_last_backward(last)

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        """Forward passes that may share gathered parameters; what is still gathered is freed after them.

        Else the module would hold its full parameters, which an optimizer step on the shards does not reach.
        """
        try:
            yield
        finally:
            for shard in self.shards:
                shard.reshard()

    def _over_ranks(self, counts: torch.Tensor) -> torch.Tensor:
        """Every rank's counts: ``[ranks, ...]``."""
        if self.group.size() == 1:
            return counts[None]
        own = counts.to(self.device)
        ranks = [torch.empty_like(own) for _ in range(self.group.size())]
        dist.all_gather(ranks, own, group=self.group)
        return torch.stack(ranks).cpu()
