"""A whole run that keeps its optimizer on the host for some of its iterations."""

from __future__ import annotations

from pathlib import Path

import pytest
from ran import same_weights
from test_faults import ONE, inline

ON_HOST = "models.policy.train.optimizer_offload=true"


@pytest.mark.slow
@pytest.mark.usefixtures("in_demo")
def test_it_goes_on_with_it_and_without_to_the_same_weights() -> None:
    def run(iterations: int, run_dir: str, *settings: str, resume: bool = False) -> None:
        length = f"schedule={{iterations: {iterations}, save_every: 1}}"
        inline(ONE, length, *settings, run_dir=run_dir, resume=resume)

    run(3, "plain")
    run(1, "host", ON_HOST)
    assert "fsdp (float32, optimizer on the host)" in Path("host/plan.txt").read_text()
    run(2, "host", "models.policy.train.optimizer_offload=false", resume=True)
    run(3, "host", ON_HOST, resume=True)
    assert same_weights("host", "plain")
