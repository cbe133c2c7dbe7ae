"""Parallel sizes of another system: those that a model and rlgraph allow, and what is said of the others."""

from collections.abc import Iterator
from pathlib import Path

from rlgraph.costs.model_size import known_models, size_of
from rlgraph.costs.models.config import Config
from rlgraph.costs.models.fields import UNSHARED
from rlgraph.engines.sglang_options import REPLICATED
from rlgraph.errors import GraphError
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
LIMITS = ("prompts.max_prompt_tokens", "rollout.max_new_tokens", "examples.max_tokens")  # of a row, together


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


def allowed(draft: Draft) -> Iterator[KeyOutcome]:
    """Leave out parallel sizes that a model of known family can't have; yield what was left out, and why.

    Of a model whose family is not known nothing is left out: ``rlgraph plan`` says it once it is.
    """
    for model in ("policy", "ref", "critic"):
        config = config_of(draft, model)
        if config is None:
            continue
        path, family = f"models.{model}.train", config.model_type
        sharers, holders = (
            draft.value(f"{path}.{name}") for name in ("sequence_parallel", "expert_parallel")
        )
        if _counts(sharers) and family in UNSHARED:
            draft.set(f"{path}.sequence_parallel", 1)
            _divide_tokens(draft, path, int(sharers))
            text = f"the model is a {family}: its {UNSHARED[family]}, so that devices can't share its rows: "
            yield KeyOutcome(f"{path}.sequence_parallel", sharers, "hand", f"{text}it is left out")
        if _counts(holders) and (not config.experts or config.experts % int(holders)):
            draft.set(f"{path}.expert_parallel", 1)
            text = f"the model has {config.experts} experts, which so many devices can't share out: "
            text += "it is left out"
            yield KeyOutcome(f"{path}.expert_parallel", holders, "hand", text)


def config_of(draft: Draft, model: str) -> Config | None:
    """Return the configuration of a model; None where the draft has no such model, or it is not known."""
    path = draft.value(f"models.{model}.path")
    if path == "${models.policy.path}":
        path = draft.value("models.policy.path")
    return config_at(path) if draft.has(f"models.{model}") and isinstance(path, str) else None


def replicates(path: str) -> bool:
    """Return whether an engine may have copies of a model's attention that share its experts."""
    config = config_at(path)
    return config is not None and config.experts > 0 and config.model_type in REPLICATED


def config_at(path: str) -> Config | None:
    """Return the configuration of the model at a path; None where it is not known.

    Of a path that is not here it is that of the hub's model with the path's last name, which it is likely to
    be: no more than a model's layout on devices is made of it.
    """
    last = Path(path).name
    makers = dict.fromkeys(name.partition("/")[0] for name in known_models())
    for name in (path, *(f"{maker}/{last}" for maker in makers)):
        try:
            return size_of(name).config
        except GraphError:
            continue
    return None


def _divide_tokens(draft: Draft, path: str, sharers: int) -> None:
    """Give a device that shares its rows no longer its share of the tokens, and a whole row at least."""
    limits = [draft.value(place) for place in LIMITS]
    longest = sum(limit for limit in limits if isinstance(limit, int))
    for name in ("micro_tokens", "score_tokens"):
        tokens = draft.value(f"{path}.{name}")
        if isinstance(tokens, int) and tokens > longest:
            draft.set(f"{path}.{name}", max(tokens // sharers, longest))


def _counts(value: object) -> bool:
    """Return whether a size is above 1, or a switch is on, or a section is given."""
    if value is UNKNOWN or value is None or isinstance(value, bool):
        return value is True
    return value > 1 if isinstance(value, int) else bool(value)
