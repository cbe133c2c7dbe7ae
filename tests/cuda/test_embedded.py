"""The embedded serve engine on a device, against the CPU."""

from __future__ import annotations

import pytest
import torch

from rlgraph.ops import Generation, Request, Sampling
from rlgraph.runtime.engines.transformers.engine import TransformersEngine

REQUESTS = [Request([5, 6, 7, 8, 9], [1, 2, 3]), Request([10, 11], [4]), Request([12] * 20, [5, 6])]
SAMPLINGS = {
    "greedy": Sampling(12, 0.0),
    "seeds": Sampling(12),
    "cut": Sampling(12, 0.8, top_p=0.9, top_k=9),
}


def made(path: str, device: torch.device | str, dtype: str = "float32") -> TransformersEngine:
    found = TransformersEngine(path, torch.device(device).type, dtype, max_rows=4)
    found.load_pretrained()
    return found


def flat(answers: list[list[Generation]]) -> list[Generation]:
    return [one for many in answers for one in many]


@pytest.mark.parametrize("how", SAMPLINGS)
def test_float32_draws_what_the_cpu_draws(how: str, device: torch.device, model: str) -> None:
    there, here = (flat(made(model, where).generate(REQUESTS, SAMPLINGS[how])) for where in (device, "cpu"))
    assert [list(one.tokens) for one in there] == [list(one.tokens) for one in here]
    assert [one.finish for one in there] == [one.finish for one in here]
    for one, other in zip(there, here, strict=True):
        assert list(one.logprobs) == pytest.approx(list(other.logprobs), rel=1e-3, abs=1e-4)


def test_bfloat16_generates(device: torch.device, model: str) -> None:
    answers = flat(made(model, device, "bfloat16").generate(REQUESTS, Sampling(12)))
    assert len(answers) == 6 and all(one.tokens and max(one.logprobs) <= 0 for one in answers)


def test_weights_come_from_the_device(device: torch.device, model: str) -> None:
    engine, other = made(model, device), made(model, "cpu")
    with torch.no_grad():
        for weight in engine.model.parameters():
            weight.zero_()
    before = flat(engine.generate(REQUESTS, Sampling(4, 0.0)))
    engine.load_weights([(name, p.to(device)) for name, p in other.model.named_parameters()], 3)
    after = flat(engine.generate(REQUESTS, Sampling(4, 0.0)))
    wanted = flat(other.generate(REQUESTS, Sampling(4, 0.0)))
    assert [list(one.tokens) for one in after] == [list(one.tokens) for one in wanted]
    assert [list(one.tokens) for one in before] != [list(one.tokens) for one in wanted]
    assert engine.version == 3


def test_sleep_gives_the_memory_back(memory: torch.device, model: str) -> None:
    engine = made(model, memory)
    wanted = flat(engine.generate(REQUESTS, Sampling(4, 0.0)))
    kept = [(name, p.clone()) for name, p in engine.model.named_parameters()]
    held = sum(p.nbytes for _, p in kept)
    before = torch.cuda.memory_allocated() if memory.type == "cuda" else 0
    engine.sleep(["weights"])
    assert sum(p.untyped_storage().nbytes() for p in engine.model.parameters()) == 0
    if memory.type == "cuda":
        assert before - torch.cuda.memory_allocated() >= 0.95 * held
    engine.wake(["weights"])
    engine.load_weights(kept, 1)
    again = flat(engine.generate(REQUESTS, Sampling(4, 0.0)))
    assert [list(one.tokens) for one in again] == [list(one.tokens) for one in wanted]


def test_rounds_that_keep_slots_draw_what_one_call_does(device: torch.device, model: str) -> None:
    engine = made(model, device)
    whole = flat(engine.generate(REQUESTS, Sampling(12)))
    prompts = [request.prompt for request in REQUESTS for _ in request.seeds]
    seeds = [seed for request in REQUESTS for seed in request.seeds]
    drawn = [Generation() for _ in seeds]
    while here := [i for i, one in enumerate(drawn) if not one.is_whole and len(one.tokens) < 12]:
        requests = [Request([*prompts[i], *drawn[i].tokens], [seeds[i]], max_new_tokens=3) for i in here]
        for i, one in zip(here, flat(engine.generate(requests, Sampling(12), stays=True)), strict=True):
            drawn[i] = drawn[i].followed(one)
        assert engine.kept
    assert [list(one.tokens) for one in drawn] == [list(one.tokens) for one in whole]
