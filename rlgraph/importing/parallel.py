"""Parallel sizes of another system: those that rlgraph combines, and what is said of the others."""

from collections.abc import Iterator

from rlgraph.importing.draft import UNKNOWN, Draft
from rlgraph.importing.importer import KeyOutcome

# of two that are not combined the second is left out, as the first is what layers that are large need
APART = (
    ("expert_parallel", "tensor_parallel"),
    ("tensor_parallel", "sequence_parallel"),
    ("expert_parallel", "compile"),
    ("lora", "tensor_parallel"),
    ("lora", "expert_parallel"),
)


def combined(draft: Draft) -> Iterator[KeyOutcome]:
    """Leave out parallel sizes that a graph can't have beside others; yield what was left out, and why."""
    for model in ("policy", "reward", "critic"):
        path = f"models.{model}.train"
        if not draft.has(f"models.{model}"):
            continue
        for kept, left in APART:
            size = draft.value(f"{path}.{left}")
            if _counts(draft.value(f"{path}.{kept}")) and _counts(size):
                draft.set(f"{path}.{left}", False if size is True else 1)
                text = (
                    f"it is not combined with {kept} here, and is left out; the plan says whether layers fit"
                )
                yield KeyOutcome(f"{path}.{left}", size, "hand", text)


def _counts(value: object) -> bool:
    """Return whether a size is above 1, or a switch is on, or a section is given."""
    if value is UNKNOWN or value is None or isinstance(value, bool):
        return value is True
    return value > 1 if isinstance(value, int) else bool(value)
