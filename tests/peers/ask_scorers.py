"""What verl's and TRL's own scorers give the rows of tests/helpers/scorer_cases.py.

verl's are called by its own reward managers, which ``load_reward_manager`` makes as for its reward loop, or
by the older batch manager; TRL's by a ``GRPOTrainer`` with a tiny model. A number is a score, a text is the
error that was raised, None is a sample that TRL leaves out.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import logging
import os
import pkgutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import numpy
import torch
import trl.rewards
import verl.utils.reward_score
from ask_trl_grpo_rows import model_in
from datasets import Dataset
from omegaconf import OmegaConf
from trl import GRPOConfig, GRPOTrainer
from verl import DataProto
from verl.trainer.ppo.reward import get_custom_reward_fn, load_reward_manager
from verl.workers.reward_manager import get_reward_manager_cls

from byte_tokenizer import tokenizer_of
from sandbox_server import sandbox_server
from scorer_cases import SANDBOX, TRL, VERL, Row, Scorer

FOLDER = Path(__file__).parent
warnings.simplefilter("ignore")
PEERS = ["verl", "trl", "math-verify", "mathruler", "pylatexenc"]
logging.disable(logging.CRITICAL)


def data_of(row: Row, tokenizer: Any) -> DataProto:
    """Return a sample as verl's agent loop gives it to a reward manager."""
    ids = tokenizer.encode(row["response"])
    assert tokenizer.decode(ids, skip_special_tokens=True) == row["response"]
    prompt, response = torch.tensor([[5]]), torch.tensor([[*ids, 0]])
    mask = torch.tensor([[1, *[1] * len(ids), 0]])
    more = {
        "data_source": row["data_source"],
        "reward_model": {"ground_truth": row["ground_truth"]},
        "extra_info": copy.deepcopy(row["extra_info"]),
    }
    columns = {name: numpy.array([None], dtype=object) for name in more}
    for name, value in more.items():
        columns[name][0] = value
    return DataProto.from_dict({"prompts": prompt, "responses": response, "attention_mask": mask}, columns)


def manager_of(peer: dict[str, Any], url: str, tokenizer: Any) -> Any:
    """Return verl's reward manager, as its own configuration asks for it."""
    path = peer.get("path")
    if path and not path.startswith("pkg://"):
        path = str(FOLDER / path)
    function = {"path": path, "name": peer.get("name"), "reward_kwargs": peer.get("reward_kwargs", {})}
    reward = {
        "custom_reward_function": function,
        "reward_manager": {"source": "register", "name": peer.get("manager", "naive")},
        "sandbox_fusion": {"url": url if peer.get("sandbox") == SANDBOX else None},
        "num_workers": 1,
    }
    config = OmegaConf.create({"reward": reward, "trainer": {"experiment_name": peer.get("experiment", "")}})
    if "legacy" in peer:
        scorer = get_custom_reward_fn(config)
        return get_reward_manager_cls(peer["legacy"])(tokenizer, 0, compute_score=scorer)
    return load_reward_manager(config, tokenizer)


def quietly(call: Callable[[], Any]) -> Any:
    """Return what a call gives, or the name of its error."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return call()
    except Exception as error:
        return type(error).__name__


def of_verl(scorer: Scorer, url: str, tokenizer: Any) -> list[Any]:
    manager = manager_of(scorer.peer, url, tokenizer)
    if "legacy" in scorer.peer:
        rows = [row for row in scorer.rows if row["response"]]  # it writes a reward to the last token

        def batch() -> dict[tuple[str, str], float]:
            longest = max(len(tokenizer.encode(row["response"])) for row in rows)
            given = [padded(data_of(row, tokenizer), longest) for row in rows]
            rewards = manager(DataProto.concat(given))
            return rewards.sum(-1).tolist()

        scores = iter(quietly(batch))
        return [next(scores) if row["response"] else "no token" for row in scorer.rows]

    def one(row: Row) -> float:
        done = manager.loop.run_until_complete(manager.run_single(data_of(row, tokenizer)))
        return float(done["reward_score"])

    return [quietly(partial(one, row)) for row in scorer.rows]


def padded(data: DataProto, width: int) -> DataProto:
    """Return a sample whose response and mask are as wide as the longest of a batch."""
    missing = width + 1 - data.batch["responses"].shape[1]
    more = {
        name: torch.nn.functional.pad(data.batch[name], (0, missing))
        for name in ("responses", "attention_mask")
    }
    return DataProto.from_dict({"prompts": data.batch["prompts"], **more}, data.non_tensor_batch)


def of_trl(scorer: Scorer, folder: str, tokenizer: Any) -> list[Any]:
    """Return the rewards of a function that a trainer calculates, None for NaN."""
    function = getattr(trl.rewards, scorer.name.partition(",")[0])
    if "factory" in scorer.peer:
        function = function(**scorer.peer["factory"])
    if "arguments" in scorer.peer:
        function = partial(function, **scorer.peer["arguments"])
    args = GRPOConfig(f"{folder}/out", use_cpu=True, bf16=False, report_to="none")
    data = Dataset.from_list([{"prompt": "w3 w4"}])
    trainer = GRPOTrainer(folder, function, args, train_dataset=data, processing_class=tokenizer)
    prompts = [[{"role": "user", "content": "How much?"}] for _ in scorer.rows]
    completions = [[{"role": "assistant", "content": row["response"]}] for row in scorer.rows]
    inputs = [{"prompt": p, "solution": row["solution"]} for p, row in zip(prompts, scorer.rows, strict=True)]
    ids = [row["completion_ids"] for row in scorer.rows]
    rewards = trainer._calculate_rewards(inputs, prompts, completions, ids)[:, 0]
    return [None if reward != reward else reward for reward in rewards.tolist()]


def shipped() -> dict[str, list[str]]:
    """Return the functions that score of each peer, as ``module:function``."""
    found = set[str]()
    for module in pkgutil.walk_packages(verl.utils.reward_score.__path__, "verl.utils.reward_score."):
        loaded = importlib.import_module(module.name)
        names = [name for name in vars(loaded) if name.startswith("compute_score")]
        found |= {f"{module.name}:{name}" for name in names if vars(loaded)[name].__module__ == module.name}
    named = {f"verl.utils.reward_score:{name}" for name in verl.utils.reward_score.__all__}
    of_trl = [name for name in trl.rewards.__all__ if callable(getattr(trl.rewards, name))]  # and no modules
    return {"verl": sorted(found | named), "trl": sorted(f"trl.rewards:{name}" for name in of_trl)}


def numbers() -> dict[str, Any]:
    byte_level = tokenizer_of(([], "<end>", ""))
    with sandbox_server() as url:
        scores = {f"verl {scorer.name}": of_verl(scorer, url, byte_level) for scorer in VERL}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = model_in(folder)
        scores |= {f"trl {scorer.name}": of_trl(scorer, folder, tokenizer) for scorer in TRL}
    return {"shipped": shipped(), "scores": scores}
