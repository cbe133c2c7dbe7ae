"""What the train engine computes on a device, against the CPU in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from rows import batch, engine, step, weights

pytestmark = pytest.mark.usefixtures("one_rank")

EXACT = {"rtol": 1e-4, "atol": 1e-4}
ROUNDED = 2e-2  # nats that bfloat16 may differ by in the mean
CASES: dict[str, tuple[bool, dict[str, Any]]] = {  # whether rows are packed, and options
    "beside": (False, {}),
    "packed": (True, {}),
    "recomputed": (False, {"recompute": True}),
    "packed, small micro-batches": (True, {"micro_tokens": 48}),
    "on the host": (False, {"optimizer_offload": True, "activation_offload": True, "recompute": True}),
    "adapter": (False, {"lora": {"rank": 2, "alpha": 4.0}}),
}
SHARDED = {"sharded": {"reshard": True}, "compiled": {"compile": True}}  # not what the far device does


def made(path: str, device: torch.device | str, packed: bool, **options: Any) -> Any:
    """An engine that packs rows in any case, or never."""
    found = engine(path, device, packing=packed, **options)
    if packed:  # whatever it costs
        found.budget = replace(found.budget, share=1e-9)
    return found


@pytest.mark.parametrize("case", CASES)
def test_float32_is_that_of_the_cpu(case: str, device: torch.device, model: str) -> None:
    compare(model, device, *CASES[case])


@pytest.mark.parametrize("case", SHARDED)
def test_float32_sharded_and_compiled_is_that_of_the_cpu(case: str, gpu: torch.device, model: str) -> None:
    compare(model, gpu, False, SHARDED[case])


def compare(model: str, device: torch.device, packed: bool, options: dict[str, Any]) -> None:
    """Scores before, and metrics and weights after two steps; on the CPU rows are beside each other."""
    adapter = {name: value for name, value in options.items() if name == "lora"}
    there, here = made(model, device, packed, **options), made(model, "cpu", False, **adapter)
    given = batch()["tokens"], batch()["loss_mask"]
    for one, other in zip(there.squares(*given), here.squares(*given), strict=True):
        torch.testing.assert_close(one.values.cpu(), other.values, **EXACT)
    torch.testing.assert_close(there.logprobs(*given).values.cpu(), here.logprobs(*given).values, **EXACT)
    metrics, wanted = step(there, 2), step(here, 2)
    assert metrics == pytest.approx(wanted, rel=1e-3, abs=1e-5)
    after, expected = weights(there), weights(here)
    assert after.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            after[name], tensor, **EXACT, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_values_are_those_of_the_cpu(device: torch.device, model: str) -> None:
    given = batch()["tokens"], batch()["loss_mask"]
    there, here = (engine(model, where, head="value", seed=7).values(*given) for where in (device, "cpu"))
    torch.testing.assert_close(there.values.cpu(), here.values, **EXACT)


@pytest.mark.parametrize("packed", [False, True], ids=["beside", "packed"])
def test_bfloat16_is_near_float32(packed: bool, device: torch.device, model: str) -> None:
    given = batch()["tokens"], batch()["loss_mask"]
    there = made(model, device, packed, dtype="bfloat16", frozen=True, optimizer=None)
    gap = (there.logprobs(*given).values.cpu() - made(model, "cpu", False).logprobs(*given).values).abs()
    assert 0 < float(gap.mean()) < ROUNDED


@pytest.mark.parametrize(
    "options", [{}, {"recompute": True}, {"compile": True}], ids=["plain", "recompute", "compile"]
)
def test_bfloat16_trains_float32_masters(options: dict[str, Any], gpu: torch.device, model: str) -> None:
    there, here = made(model, gpu, False, dtype="bfloat16", **options), made(model, "cpu", False)
    assert {p.dtype for p in there.parameters} == {torch.float32}
    metrics, wanted = step(there, 2), step(here, 2)
    assert metrics["loss"] == pytest.approx(wanted["loss"], abs=ROUNDED)
    assert metrics["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=0.1)


def test_bfloat16_steps_on_the_host_are_those_beside_the_weights(gpu: torch.device, model: str) -> None:
    on_host = {"optimizer_offload": True, "activation_offload": True}
    host, device = (
        made(model, gpu, False, dtype="bfloat16", recompute=True, **options) for options in (on_host, {})
    )
    assert {p.dtype for p in host.parameters} == {torch.bfloat16}
    metrics, wanted = step(host, 2), step(device, 2)
    assert metrics == pytest.approx(wanted, rel=1e-2, abs=1e-4)
    expected = weights(device)
    for name, tensor in weights(host).items():
        assert tensor.dtype == torch.float32, name
        torch.testing.assert_close(tensor, expected[name], rtol=1e-2, atol=1e-3)
