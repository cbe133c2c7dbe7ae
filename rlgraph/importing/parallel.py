"""Parallel sizes of another system: which of them a model and rlgraph allow, and why others are left out."""

from collections.abc import Iterator
from pathlib import Path

from rlgraph.costs.model_size import known_models, size_of
from rlgraph.costs.models.config import Config
from rlgraph.costs.models.fields import UNSHARED
from rlgraph.engines.sglang_options import REPLICATED
from rlgraph.errors import GraphError
from rlgraph.importing.draft import UNKNOWN, Draft
from rlgraph.importing.importer import KeyOutcome

# pairs that are not combined: the second is left out, as layers that are large need the first
EXCLUSIVE = (
    ("expert_parallel", "tensor_parallel"),
    ("tensor_parallel", "sequence_parallel"),
    ("expert_parallel", "compile"),
    ("lora", "tensor_parallel"),
    ("lora", "expert_parallel"),
)
LIMITS = ("prompts.max_prompt_tokens", "rollout.max_new_tokens", "examples.max_tokens")  # of a row: their sum


def combined(draft: Draft) -> Iterator[KeyOutcome]:
    """Leave out parallel sizes that a graph can't combine; yield those that were left out, and why."""
    for model in ("policy", "reward", "critic"):
        if not draft.has(f"models.{model}"):
            continue
        section = f"models.{model}.train"
        for setting, excluded in EXCLUSIVE:
            path = f"{section}.{excluded}"
            size = draft.value(path)
            is_combined = _is_on(draft.value(f"{section}.{setting}")) and _is_on(size)
            if not is_combined:
                continue
            off = False if size is True else 1
            draft.set(path, off)
            text = f"it can't be combined with {setting} here, and is left out; "
            text += "the plan says whether layers fit"
            yield KeyOutcome(path, size, "hand", text)


def allowed(draft: Draft) -> Iterator[KeyOutcome]:
    """Leave out parallel sizes that a model of known family can't have; yield those, and why.

    Nothing is left out for a model whose family is not known: ``rlgraph plan`` checks it once it is.
    """
    for model in ("policy", "ref", "critic"):
        config = config_of(draft, model)
        if config is not None:
            section = f"models.{model}.train"
            yield from _without_shared_rows(draft, section, config.model_type)
            yield from _without_shared_experts(draft, section, config)


def _without_shared_rows(draft: Draft, section: str, family: str) -> Iterator[KeyOutcome]:
    """Leave sequence parallelism out where layers of the family read a row as one."""
    path = f"{section}.sequence_parallel"
    ranks = draft.value(path)
    if family not in UNSHARED or not _is_on(ranks):
        return
    draft.set(path, 1)
    _divide_tokens(draft, section, int(ranks))
    text = f"the model is a {family}: its {UNSHARED[family]}, so devices can't share its rows: "
    yield KeyOutcome(path, ranks, "hand", f"{text}it is left out")


def _without_shared_experts(draft: Draft, section: str, config: Config) -> Iterator[KeyOutcome]:
    """Leave expert parallelism out where the devices don't divide the model's experts."""
    path = f"{section}.expert_parallel"
    ranks = draft.value(path)
    if not _is_on(ranks) or _divides_experts(config, int(ranks)):
        return
    draft.set(path, 1)
    text = f"the model has {config.experts} experts, which can't be divided among this many devices: "
    yield KeyOutcome(path, ranks, "hand", f"{text}it is left out")


def _divides_experts(config: Config, ranks: int) -> bool:
    return config.experts > 0 and config.experts % ranks == 0


def config_of(draft: Draft, model: str) -> Config | None:
    """Return the configuration of a model; None where the draft has no such model, or it is not known."""
    if not draft.has(f"models.{model}"):
        return None
    path = draft.value(f"models.{model}.path")
    if path == "${models.policy.path}":
        path = draft.value("models.policy.path")
    if not isinstance(path, str):
        return None
    return config_at(path)


def replicates(path: str) -> bool:
    """Return whether an engine may have copies of a model's attention that share its experts."""
    config = config_at(path)
    return config is not None and config.experts > 0 and config.model_type in REPLICATED


def config_at(path: str) -> Config | None:
    """Return the configuration of the model at a path; None where it is not known.

    For a path that does not exist it is that of the hub's model with the path's file name, which it is likely
    to be: no more than a model's layout on devices is made of it.
    """
    file_name = Path(path).name
    makers = dict.fromkeys(name.partition("/")[0] for name in known_models())
    names_on_hub = [f"{maker}/{file_name}" for maker in makers]
    for name in (path, *names_on_hub):
        try:
            return size_of(name).config
        except GraphError:
            continue
    return None


def _divide_tokens(draft: Draft, section: str, sharers: int) -> None:
    """Limit the tokens of a device that shares its rows no longer to its share, or to a whole row."""
    longest = 0
    for place in LIMITS:
        limit = draft.value(place)
        if isinstance(limit, int):
            longest += limit
    for name in ("micro_tokens", "score_tokens"):
        path = f"{section}.{name}"
        tokens = draft.value(path)
        if isinstance(tokens, int) and tokens > longest:
            draft.set(path, max(tokens // sharers, longest))


def _is_on(value: object) -> bool:
    """Return whether a size is above 1, a switch is on, or a section is given."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value > 1
    return value is not UNKNOWN and bool(value)
