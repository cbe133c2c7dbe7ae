"""The far device of ``tests/helpers/far.py`` computes as the CPU does, and refuses what CUDA refuses."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import far
from far import DEVICE

REFUSED: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add": lambda x, near: x + near,
    "add a far number": lambda x, near: near + x[0],
    "add in place": lambda x, near: near.add_(x[0]),
    "far indices of a near tensor": lambda x, near: near[torch.arange(2, device=DEVICE)],
    "near values": lambda x, near: x.index_put_((torch.tensor([0, 1, 2]),), near),
    "scatter": lambda x, near: near.scatter_reduce(0, torch.arange(3, device=DEVICE), x, "amax"),
    "cat": lambda x, near: torch.cat([x, near]),
    "where": lambda x, near: torch.where(x > 1, near, x),
    "product": lambda x, near: x[None] @ near,
    "generator": lambda x, near: torch.multinomial(x, 1, generator=torch.Generator()),
    "pickle": lambda x, near: pickle.dumps(x),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cuda_refuses_raises(name: str) -> None:
    with far.device(), pytest.raises(RuntimeError, match=r"far|same device|on the CPU"):
        REFUSED[name](torch.tensor([1.0, 2.0, 3.0], device=DEVICE), torch.ones(3))


def test_numpy_raises() -> None:
    with far.device(), pytest.raises(TypeError, match="cpu"):
        torch.ones(2, device=DEVICE).numpy()


def test_what_cuda_allows_has_the_numbers_of_the_cpu() -> None:
    with far.device():
        x = torch.tensor([1.0, 2.0, 3.0], device=DEVICE)
        near = torch.tensor([2, 0])
        assert x[near].tolist() == x[near.to(DEVICE)].tolist() == [3.0, 1.0]
        x[near] = torch.tensor(5.0)
        assert (x + torch.tensor(1.0)).tolist() == [6.0, 3.0, 6.0]
        assert torch.zeros(3).copy_(x).tolist() == x.cpu().tolist() == [5.0, 2.0, 5.0]
        made = [
            torch.arange(2, device=DEVICE),
            torch.zeros_like(x),
            x.new_full((2,), 1.0),
            x[None],
            x.double(),
        ]
        assert {tensor.device for tensor in made} == {DEVICE}
        assert (x.sum().item(), float(x[1]), bool(x[0] > 1)) == (12.0, 2.0, True)
        x.cpu().zero_()
        assert x.tolist() == [5.0, 2.0, 5.0]


def test_a_module_trains_there_with_its_ties() -> None:
    def trained(device: torch.device) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 3))
        model[2].weight = model[0].weight
        model.to(device)
        assert model[2].weight is model[0].weight
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        for _ in range(2):
            model(torch.ones(2, 3, device=device)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model[0].weight.detach()

    with far.device():
        there = trained(DEVICE)
        assert there.device == DEVICE
        assert torch.equal(there.cpu(), trained(far.CPU))


def test_it_tells_attention_copies_and_waits() -> None:
    with far.device() as seen:
        x = torch.ones(1, 4, 8, 16).to(DEVICE)
        torch.nn.functional.scaled_dot_product_attention(
            x, x[:, :2], x[:, :2], is_causal=True, enable_gqa=True
        )
        (call,) = seen.attention
        assert (call.dtype, call.grouped, call.masked, call.causal) == (torch.float32, True, False, True)
        assert (seen.device_bytes, seen.host_bytes, seen.waits) == (4 * 8 * 16 * 4, 0, [])
        x.sum().item()
        x[0, 0].cpu()
        assert seen.host_bytes == 4 + 8 * 16 * 4
        assert len(seen.waits) == 2
        x[x > 0]
        x.nonzero()
        assert len(seen.waits) == 4
