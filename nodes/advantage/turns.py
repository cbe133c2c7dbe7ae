"""Advantages by turn: a turn of a conversation is one action, and what answers it leads to the next state.

    prompt ─> turn 1 ─> answer ─> turn 2 ─> answer ─> turn 3
    state 1             state 2             state 3

Sums run in float64, so that the order of rows doesn't show in float32.
"""

from typing import Annotated, Any

from pydantic import Field, PositiveFloat

from rlgraph.nodes.advantage.group import EPS, deviation
from rlgraph.nodes.support.lazy import torch
from rlgraph.nodes.support.ragged import Ragged
from rlgraph.ops import boolean, float32, int64, op, samples, tokens
from rlgraph.ops import turns as turns_axis

Factor = Annotated[float, Field(ge=0, le=1)]


@op(rows="group", assumes=("groups",), when=EPS)
def turns(
    rewards: float32[samples],
    turn_rewards: float32[samples, turns_axis] | None,
    group: int64[samples],
    tokens: int64[samples, tokens],
    turn: int64[samples, tokens],
    loss_mask: boolean[samples, tokens],
    *,
    gamma: Factor = 1.0,
    lam: Factor = 0.95,
    scale: bool = True,
    eps: PositiveFloat = 1e-6,
) -> float32[samples, tokens]:
    """Credit per turn without a critic, whose values are means over the group (GAGPO, arXiv 2605.13217).

    A_t = sum_k (gamma lam)^k delta_{t+k}, delta_t = r_t + gamma V(s_{t+1}) - V(s_t), over the turns t of a
    sample; V is 0 after the last. r_t is ``turn_rewards`` at t (0 without that column), plus the sample's
    reward at the last turn. The state s_t is the last answer that the policy got; before turn 1, it is the
    prompt. V(s_t) is the mean of sum_k gamma^k r_{t+k} over the samples of the group that are in this state
    at their turn t or, if no other sample is, over all that have a turn t. All A of a group are divided by
    the root of the sum of A^2 / (turns - 1), plus eps; not without ``scale``. A turn's tokens in
    ``loss_mask`` share its A; it is 0 elsewhere. The paper's ratio per action belongs in a loss, and is left
    out here.

    A ``ValueError`` names a sample that has more turns than ``turn_rewards``.

    Attributes:
        gamma: discount per turn, 0 to 1.
        lam: weight of longer returns: 0 uses only the value of the next state, 1 only the rewards earned in
            the end.
        scale: whether to divide by the group's deviation.
        eps: added to the deviation, in units of the reward, above 0.

    Example:
        advantages: {op: advantage.turns}
    """
    written = torch.where(loss_mask.values, turn.values, 0).long()
    last_turn = written.new_zeros(len(turn)).scatter_reduce(0, turn.row_of, written, "amax")  # [samples]
    if not last_turn.any():
        return loss_mask.like(torch.zeros(len(written)))
    exists = torch.arange(int(last_turn.max())) < last_turn[:, None]  # [samples, turns]
    earned = _rewards_of_turns(rewards, turn_rewards, last_turn, exists)
    returns = _summed(earned, gamma)
    states, ways = _states(group, tokens, turn, loss_mask, exists)
    alone = torch.bincount(states[exists])[states] == 1
    values = torch.where(alone, _means(returns, ways, exists), _means(returns, states, exists))
    ahead = torch.nn.functional.pad(values, (0, 1))[:, 1:]
    advantages = _summed((earned + gamma * ahead - values) * exists, gamma * lam)
    if scale:
        _, members = torch.unique(group, return_inverse=True)
        of_turn = members[:, None].expand_as(exists)[exists]
        count = torch.bincount(of_turn, minlength=int(members.max()) + 1)
        sigma = deviation(advantages[exists], of_turn, count, alone=1.0)
        advantages = advantages / (sigma[members] + eps)[:, None]
    spread = advantages[turn.row_of, (written - 1).clamp(min=0)]
    return loss_mask.like(torch.where(loss_mask.values, spread, 0).float())


def _rewards_of_turns(rewards: Any, turn_rewards: Any, last_turn: Any, exists: Any) -> Any:
    """Return the reward of each turn, float64 ``[samples, turns]``, 0 where a sample has none."""
    earned = torch.zeros(exists.shape, dtype=torch.float64)
    if turn_rewards is not None:
        if turn_rewards.shape[1] < exists.shape[1]:
            law = f"a sample has {exists.shape[1]} turns, and `turn_rewards` {turn_rewards.shape[1]}"
            raise ValueError(f"{law}; give its node as many `turns` as the rollout's `max_turns`")
        earned += turn_rewards[:, : exists.shape[1]]
    has_turns = last_turn > 0
    earned[has_turns, last_turn[has_turns] - 1] += rewards[has_turns].double()
    return earned * exists


def _summed(numbers: Any, factor: float) -> Any:
    """Return sum_k factor^k x_{t+k} of each row ``[samples, turns]``."""
    sums = numbers.clone()
    for t in reversed(range(sums.shape[1] - 1)):
        sums[:, t] += factor * sums[:, t + 1]
    return sums


def _states(group: Any, tokens: Ragged, turn: Ragged, loss_mask: Ragged, exists: Any) -> tuple[Any, Any]:
    """Return numbers of the states before turns, and of their groups and turns: ``[samples, turns]``."""
    numbers: dict[Any, int] = {}
    states = torch.zeros(exists.shape, dtype=torch.int64)
    groups_and_turns = torch.zeros(exists.shape, dtype=torch.int64)
    for row, t in exists.nonzero().tolist():
        observed = tokens[row][(turn[row] == t) & ~loss_mask[row]]
        group_and_turn = (int(group[row]), t)
        state = (*group_and_turn, tuple(observed.tolist()))
        groups_and_turns[row, t] = numbers.setdefault(group_and_turn, len(numbers))
        states[row, t] = numbers.setdefault(state, len(numbers))
    return states, groups_and_turns


def _means(returns: Any, keys: Any, exists: Any) -> Any:
    """Return the mean of the returns that share a key, for each turn ``[samples, turns]``."""
    count = torch.bincount(keys[exists], minlength=int(keys.max()) + 1)
    sums = torch.zeros(len(count), dtype=torch.float64).index_add(0, keys[exists], returns[exists])
    return (sums / count.clamp(min=1))[keys] * exists
