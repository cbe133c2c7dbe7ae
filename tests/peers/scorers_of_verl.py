"""Functions of a user of verl's, as its managers call them, for scorers that no data source leads to."""

from __future__ import annotations

from typing import Any

from verl.utils.reward_score import gsm8k, math_verify, search_r1_like_qa_em


def math_verify_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any, **more: Any
) -> Any:
    return math_verify.compute_score(solution_str, ground_truth, **more)


def subem_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> Any:
    return search_r1_like_qa_em.compute_score_subem(solution_str, ground_truth)


def gsm8k_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any, **more: Any) -> Any:
    return gsm8k.compute_score(solution_str, ground_truth, **more)
