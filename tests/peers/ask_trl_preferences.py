"""TRL's losses of preferences on fixed pairs: values, and gradients of the log-probs of each token.

``DPOTrainer._compute_loss`` and ``KTOTrainer._compute_loss`` run on trainers that no model was loaded for;
their model gives log-probs from here. ``CPOTrainer.cpo_loss`` (CPO, SimPO, AlphaPO) takes log-probs of rows.
"""

from __future__ import annotations

import tempfile
import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer

warnings.simplefilter("ignore")
PEERS = ["trl"]
PAIRS, TOKENS = 4, 6
# of each row the tokens of the response, behind a prompt of one; chosen responses first, then rejected ones
LENGTHS = [5, 3, 4, 2, 3, 5, 4, 6]

DPO: dict[str, dict[str, Any]] = {
    "default": {},
    "beta": {"beta": 1.5},
    "smoothing that sigmoid does not read": {"label_smoothing": 0.2},
    "hinge": {"loss_type": "hinge", "beta": 0.5},
    "ipo": {"loss_type": "ipo"},
    "exo_pair": {"loss_type": "exo_pair", "label_smoothing": 1e-3},
    "nca_pair": {"loss_type": "nca_pair"},
    "robust": {"loss_type": "robust", "label_smoothing": 0.2},
    "bco_pair": {"loss_type": "bco_pair"},
    "sppo_hard": {"loss_type": "sppo_hard"},
    "aot": {"loss_type": "aot"},
    "aot smoothing": {"loss_type": "aot", "label_smoothing": 0.1},
    "aot_unpaired": {"loss_type": "aot_unpaired"},
    "aot_unpaired smoothing": {"loss_type": "aot_unpaired", "label_smoothing": 0.1},
    "apo_zero": {"loss_type": "apo_zero"},
    "apo_down": {"loss_type": "apo_down"},
    "discopop": {"loss_type": "discopop"},
    "discopop tau": {"loss_type": "discopop", "discopop_tau": 0.5},
    "sft": {"loss_type": "sft"},
    "sigmoid_norm": {"loss_type": "sigmoid_norm", "beta": 2.0},
    "MPO": {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    "RPO": {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
    "without weights": {"loss_type": ["ipo", "sft"]},
    "forward_kl": {"f_divergence_type": "forward_kl"},
    "js_divergence": {"f_divergence_type": "js_divergence"},
    "alpha_divergence": {"f_divergence_type": "alpha_divergence"},
    "alpha_divergence 2": {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 2.0},
    "alpha_divergence 1": {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1.0},
    "ipo of forward_kl": {"loss_type": "ipo", "f_divergence_type": "forward_kl"},
    "ld_alpha": {"ld_alpha": 0.5},
    "ld_alpha 0": {"ld_alpha": 0.0},
    "ld_alpha ipo sft": {"ld_alpha": 0.5, "loss_type": ["ipo", "sft"], "loss_weights": [1.0, 0.3]},
    "use_weighting": {"use_weighting": True},
    "use_weighting of two": {
        "use_weighting": True,
        "loss_type": [
            "sigmoid",
            "bco_pair",
        ],  # with sft it raises: weights are multiplied into an expanded tensor
        "loss_weights": [1.0, 0.5],
    },
}
KTO: dict[str, dict[str, Any]] = {
    "default": {},
    "weights": {"desirable_weight": 1.5, "undesirable_weight": 0.7, "beta": 0.4},
    "apo_zero_unpaired": {"loss_type": "apo_zero_unpaired"},
    "apo_zero_unpaired weights": {"loss_type": "apo_zero_unpaired", "undesirable_weight": 2.0},
}
CPO: dict[str, dict[str, Any]] = {
    "default": {},
    "smoothing": {"label_smoothing": 0.1},
    "hinge": {"loss_type": "hinge"},
    "ipo": {"loss_type": "ipo"},
    "simpo": {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.0},
    "simpo smoothing": {"loss_type": "simpo", "beta": 2.0, "label_smoothing": 0.1, "cpo_alpha": 0.0},
    "alphapo": {"loss_type": "simpo", "beta": 2.5, "simpo_gamma": 0.5, "alpha": 0.25, "cpo_alpha": 0.0},
    "alphapo below 0": {"loss_type": "simpo", "beta": 2.5, "alpha": -0.5, "cpo_alpha": 0.0},
    "alpha of sums": {"loss_type": "sigmoid", "alpha": 0.1},
}


def rows() -> dict[str, torch.Tensor]:
    """Return the columns, ``[rows, tokens]`` padded on the right, of both sides."""
    draws = torch.Generator().manual_seed(11)
    mask = torch.arange(TOKENS)[None] < torch.tensor(LENGTHS)[:, None]

    def column(scale: float, shift: float = 0.0) -> torch.Tensor:
        return (shift + scale * torch.randn(2 * PAIRS, TOKENS, generator=draws)) * mask

    logprobs = column(0.5, -1.0)
    return {
        "mask": mask.long(),
        "logprobs": logprobs,
        "ref_logprobs": logprobs + column(0.8),
        "squares": torch.rand(2 * PAIRS, TOKENS, generator=draws) * mask,
        "kl_logprobs": column(0.5, -1.0),
        "kl_ref_logprobs": column(0.5, -1.2),
    }


def model_of(logprobs: torch.Tensor, given: dict[str, torch.Tensor]) -> Any:
    """Return what TRL's fused head gives: 0 outside of the response."""
    nothing = torch.zeros_like(logprobs)
    log_squares = torch.where(given["mask"].bool(), given["squares"].clamp(min=1e-8).log(), 0)
    outputs = SimpleNamespace(
        log_probs=logprobs,
        log_sum_sq_probs=log_squares,
        entropy=nothing,
        mean_logits=nothing,
        is_top1=nothing.bool(),
    )
    return lambda **_: outputs


def trainer_of(kind: type, args: Any, names: tuple[str, ...]) -> Any:
    trainer = object.__new__(kind)
    trainer.args, trainer.accelerator = args, Accelerator(cpu=True)
    trainer.model = torch.nn.Module()
    trainer.model.is_gradient_checkpointing = False
    trainer._metrics = {"train": defaultdict(list)}
    trainer._total_train_tokens, trainer._tp_size, trainer.aux_loss_enabled = 0, 1, False
    for name in names:
        setattr(trainer, name, getattr(args, name))
    return trainer


def inputs_of(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return rows of a prompt's one token and the response."""
    prompt = torch.zeros(2 * PAIRS, 1, dtype=torch.long)
    mask = torch.cat([prompt, given["mask"]], dim=1)
    return {"input_ids": torch.zeros_like(mask), "attention_mask": mask, "completion_mask": mask}


def dpo(settings: dict[str, Any], given: dict[str, torch.Tensor], folder: str) -> dict[str, Any]:
    args = DPOConfig(output_dir=folder, use_cpu=True, bf16=False, report_to="none", **settings)
    names = ("beta", "label_smoothing", "f_divergence_type", "f_alpha_divergence_coef", "ld_alpha")
    trainer = trainer_of(DPOTrainer, args, (*names, "use_weighting"))
    kinds = args.loss_type
    trainer.loss_types = kinds if isinstance(kinds, list) else [kinds]
    trainer.loss_weights = args.loss_weights or [1.0] * len(trainer.loss_types)
    trainer.precompute_ref_logps = False
    trainer.ref_model = model_of(given["ref_logprobs"], given)
    logprobs = given["logprobs"].clone().requires_grad_()
    loss = trainer._compute_loss(model_of(logprobs, given), inputs_of(given), False)
    loss.backward()
    return {
        "settings": settings,
        "loss": loss.item(),
        "gradient": (logprobs.grad * given["mask"]).tolist(),
    }


def kto(settings: dict[str, Any], given: dict[str, torch.Tensor], folder: str) -> dict[str, Any]:
    args = KTOConfig(output_dir=folder, use_cpu=True, bf16=False, report_to="none", **settings)
    trainer = trainer_of(KTOTrainer, args, ("beta", "loss_type", "desirable_weight", "undesirable_weight"))
    trainer.precompute_ref_logps, trainer.calculate_KL = False, args.loss_type == "kto"
    trainer.ref_model = model_of(given["ref_logprobs"], given)
    logprobs = given["logprobs"].clone().requires_grad_()
    policy = model_of(logprobs, given)
    sums = {id(policy): given["kl_logprobs"].sum(-1), id(trainer.ref_model): given["kl_ref_logprobs"].sum(-1)}
    trainer._compute_kl_logps = lambda model, batch: sums[id(model)]
    label = torch.tensor([True] * PAIRS + [False] * PAIRS)
    loss = trainer._compute_loss(policy, {**inputs_of(given), "label": label}, False)
    loss.backward()
    return {
        "settings": settings,
        "loss": loss.item(),
        "gradient": (logprobs.grad * given["mask"]).tolist(),
    }


def cpo(settings: dict[str, Any], given: dict[str, torch.Tensor], folder: str) -> dict[str, Any]:
    args = CPOConfig(output_dir=folder, use_cpu=True, bf16=False, report_to="none", **settings)
    names = ("beta", "label_smoothing", "loss_type", "simpo_gamma", "alpha", "cpo_alpha")
    trainer = trainer_of(CPOTrainer, args, names)
    logprobs = given["logprobs"].clone().requires_grad_()
    # as CPOTrainer.concatenated_forward has it: means of ipo and simpo, and the likelihood beside
    whole = logprobs.sum(-1)
    if args.loss_type in ("ipo", "simpo"):
        whole = whole / given["mask"].sum(-1)
    losses, _, _ = trainer.cpo_loss(*whole.chunk(2))
    likelihood = -logprobs[:PAIRS].sum() / given["mask"][:PAIRS].sum()
    loss = losses.mean() + args.cpo_alpha * likelihood
    loss.backward()
    return {"settings": settings, "loss": loss.item(), "gradient": logprobs.grad.tolist()}


def numbers() -> dict[str, Any]:
    given = rows()
    with tempfile.TemporaryDirectory() as folder:
        asked = {"dpo": (dpo, DPO), "kto": (kto, KTO), "cpo": (cpo, CPO)}
        cases = {
            name: {case: ask(settings, given, folder) for case, settings in settings_of.items()}
            for name, (ask, settings_of) in asked.items()
        }
    return {"rows": {name: column.tolist() for name, column in given.items()}, **cases}
