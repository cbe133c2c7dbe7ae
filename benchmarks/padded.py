"""Estimators and losses as most training loops write them, for ``estimators.py``: on padded tensors.

Shapes: ``[rows, longest]`` is padded on the right, with a mask; ``[rows]`` is one number a sample. float32.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def whitened(column: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(unbiased variance + 1e-8) over the mask."""
    count = mask.sum()
    mean = (column * mask).sum() / count
    variance = ((column - mean).square() * mask).sum() / (count - 1)
    return (column - mean) / (variance + 1e-8).sqrt() * mask


def gae(rewards: Tensor, values: Tensor, mask: Tensor, lam: float) -> Tensor:
    """Whitened advantages, gamma 1, a step a column from the last to the first."""
    written = mask.float()
    carried, ahead, out = torch.zeros(len(mask)), torch.zeros(len(mask)), []
    for t in range(mask.shape[1] - 1, -1, -1):
        now = rewards[:, t] + ahead - values[:, t] + lam * carried
        ahead = values[:, t] * written[:, t] + (1 - written[:, t]) * ahead
        carried = now * written[:, t] + (1 - written[:, t]) * carried
        out.append(carried)
    return whitened(torch.stack(out[::-1], 1), written)


def by_group(scores: Tensor, group: Tensor) -> dict[int, Tensor]:
    """The scores of each group, collected row by row."""
    found: dict[int, list[Tensor]] = {}
    for row, number in enumerate(group.tolist()):
        found.setdefault(number, []).append(scores[row])
    return {number: torch.stack(scores) for number, scores in found.items()}


def minus(scores: Tensor, group: Tensor, baseline: dict[int, Tensor]) -> Tensor:
    """Each sample's score less its group's baseline."""
    return torch.stack([scores[row] - baseline[number] for row, number in enumerate(group.tolist())])


def centred(scores: Tensor, group: Tensor) -> Tensor:
    return minus(scores, group, {number: found.mean() for number, found in by_group(scores, group).items()})


def grpo(scores: Tensor, group: Tensor) -> Tensor:
    deviation = {number: found.std() for number, found in by_group(scores, group).items()}
    scale = torch.stack([deviation[number] for number in group.tolist()])
    return centred(scores, group) / (scale + 1e-6)


def rloo(scores: Tensor, group: Tensor) -> Tensor:
    count = {number: len(found) for number, found in by_group(scores, group).items()}
    scale = torch.tensor([count[number] / (count[number] - 1) for number in group.tolist()])
    return centred(scores, group) * scale


def opo(scores: Tensor, group: Tensor, mask: Tensor) -> Tensor:
    weights, found = by_group(mask.sum(1).float(), group), by_group(scores, group)
    return minus(scores, group, {g: (weights[g] * found[g]).sum() / weights[g].sum() for g in found})


def grpo_passk(scores: Tensor, group: Tensor) -> Tensor:
    rows, out = by_group(torch.arange(len(scores)), group), torch.zeros(len(scores))
    for number, found in by_group(scores, group).items():
        best, second = found.topk(2).values
        out[rows[number][found.argmax()]] = (best - second) / (found.std() + 1e-6)
    return out


def top(logprobs: Tensor, advantages: Tensor, mask: Tensor, share: float) -> Tensor:
    """The tokens with the largest covariance."""
    count = int(mask.sum())
    means = [(column * mask).sum() / count for column in (logprobs, advantages)]
    found = ((logprobs - means[0]) * (advantages - means[1])).masked_fill(~mask, -torch.inf)
    out = torch.zeros(mask.numel(), dtype=torch.bool)
    out[found.flatten().topk(int(share * count)).indices] = True
    return out.view(mask.shape)


def ratio(now: Tensor, old: Tensor) -> Tensor:
    return (now - old).clamp(-20, 20).exp()


def ppo_clip(now: Tensor, old: Tensor, a: Tensor, _: Tensor) -> Tensor:
    rho = ratio(now, old)
    return torch.maximum(-a * rho, -a * rho.clamp(0.8, 1.2))


def cispo(now: Tensor, old: Tensor, a: Tensor, _: Tensor) -> Tensor:
    return -ratio(now, old).clamp(0.0, 1.2).detach() * a * now


def sapo(now: Tensor, old: Tensor, a: Tensor, _: Tensor) -> Tensor:
    tau = torch.where(a > 0, 1.0, 1.05)
    return -a * torch.sigmoid(tau * (ratio(now, old) - 1)) * 4 / tau


def gspo(now: Tensor, old: Tensor, a: Tensor, mask: Tensor) -> Tensor:
    mean = ((now - old) * mask).sum(1) / mask.sum(1).clamp(min=1)
    rho = (now - now.detach() + mean.detach()[:, None]).clamp(-20, 20).exp()
    return torch.maximum(-a * rho, -a * rho.clamp(1 - 3e-4, 1 + 4e-4))


def geo_mean(now: Tensor, old: Tensor, a: Tensor, mask: Tensor) -> Tensor:
    count, sign, log_ratio = mask.sum(1).clamp(min=1), a.sign(), now - old
    clipped = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-0.4, 0.4))
    rho = ((clipped * mask).sum(1) / count).exp()
    return (-(a * mask).sum(1) / count * rho)[:, None].expand_as(a)


def dppo_tv(now: Tensor, old: Tensor, a: Tensor, _: Tensor) -> Tensor:
    gained = now.detach().exp() - old.exp()
    inside = torch.where(a > 0, gained <= 0.2, gained >= -0.2)
    return -a * ratio(now, old).clamp(max=20).detach() * now * inside


def dppo_kl(now: Tensor, old: Tensor, a: Tensor, _: Tensor) -> Tensor:
    p, q = old.exp(), now.detach().exp()
    divergence = p * (old - now.detach()) + (1 - p) * ((1 - p + 1e-8) / (1 - q + 1e-8)).log()
    inside = (divergence <= 0.05) | torch.where(a > 0, q <= p, q >= p)
    return -a * ratio(now, old).clamp(max=20).detach() * now * inside
