"""The goals of searches: each is a sort key, and the candidate with the smallest key is best."""

from __future__ import annotations

from rlgraph.search.candidate import Candidate


def fit(candidate: Candidate) -> tuple[bool, float, int, int]:
    """Sort what fits first, the fastest first; else what lacks the least memory.

    Of equals, the one with the fewest moves of engines is best, then the one with the largest micro-batches.
    """
    micro = candidate.layout.micro if candidate.layout else 0
    if candidate.fits:
        return False, candidate.seconds, candidate.moves, -micro
    return True, candidate.lacks, candidate.moves, -micro


def faster(candidate: Candidate) -> float:
    """Sort by the seconds of an iteration."""
    return candidate.seconds


def cheaper(candidate: Candidate) -> tuple[int, float]:
    """Sort by devices, and those on as many devices by the seconds of an iteration."""
    return candidate.devices, candidate.seconds
