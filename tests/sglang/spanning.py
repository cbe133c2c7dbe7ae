"""One of two workers whose devices one real server spans, a process of it on each; see `test_hosts.py`.

python spanning.py RANK PORT MODEL FOLDER
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from rlgraph.ops import Request, Sampling
from rlgraph.runtime.engines.sglang import groups
from rlgraph.runtime.engines.sglang.engine import SglangEngine

ASKED = [Request(prompt=[5, 6, 7], seeds=[0])]


def main(rank: int, port: int, path: str, folder: str) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=2)
    torch.set_num_threads(1)
    options: dict[str, Any] = {"logs": Path(folder), "max_cached_tokens": 1 << 12, "max_rows": 4}
    engine = groups.sglang_engine(path, device="cpu", group=2, hosts=2, pool=dist.group.WORLD, **options)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    seen = [synced(engine, model, 1)]
    for move in (engine.sleep, engine.wake):
        move(["kv"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    seen.append(synced(engine, model, 2))
    dist.barrier()
    if engine.follower:  # this host's process is killed; the other host's ends with it, and both start anew
        server = engine.follower.server
        os.killpg(server.process.pid, signal.SIGKILL)
    else:
        first = engine.supervisor.server
        while engine.supervisor.server is first:
            signal.sigtimedwait([], 0.2)
        engine.supervisor.server.wait(300)
    dist.barrier()
    seen.append(synced(engine, model, 3))
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(seen))
    dist.barrier()
    engine.close()
    dist.destroy_process_group()


def synced(engine: SglangEngine, model: torch.nn.Module, version: int) -> dict[str, Any]:
    """What a sync of a model's weights leads to: tokens, their log-probs and versions, and checksums."""
    while engine.version != version:
        engine.load_weights(model.named_parameters(), version)
    ((made,),) = engine.generate(ASKED, Sampling(8, 0.0))
    with torch.no_grad():
        tokens = torch.tensor([ASKED[0].prompt + made.tokens])
        logits = model(tokens).logits[0, len(ASKED[0].prompt) - 1 : -1]
    own = torch.log_softmax(logits, -1).gather(1, torch.tensor(made.tokens)[:, None])[:, 0]
    greedy = logits.argmax(-1).tolist() == made.tokens
    apart = float((own - torch.tensor(made.logprobs)).abs().max())
    return {"version": [*made.versions], "greedy": greedy, "apart": apart, "sums": engine.checksums()}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
