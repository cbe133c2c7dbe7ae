"""Reads the configuration and the tokenizer of a model, as the model's section of a graph says."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from rlgraph.errors import nearest
from rlgraph.nodes.support.data_file import local_path
from rlgraph.runtime.engines.tokenizer_files import file_of, is_read_by_class, tokenizer_of

ROPE, ROPE_BEFORE = "rope_parameters", "rope_scaling"  # two names of position embeddings in config.json
ORIGINAL = "original_max_position_embeddings"
OF_ROPE = ("rope_theta", "partial_rotary_factor")  # what of them stays where a graph leaves it out

# fields of windows beside ``sliding_window``: GPT-Neo's, Longformer's and BigBird's, BLT's and ModernBERT's
WINDOWS = ("window_size", "attention_window", "block_size", "local_attention_window_len", "local_attention")
UNTOLD = ("transformers_version", "_name_or_path")  # what transformers notes of itself in a configuration


class ConfigError(ValueError):
    """A field that a graph changes is not one of the model's, or can't have this value."""


class ConfigFileError(ValueError):
    """transformers reads a field of ``config.json`` as another value; the message has the remedy."""


@dataclass(frozen=True)
class ModelFiles:
    """A Hugging Face directory or name, with what a graph says of its files."""

    path: str
    changed: Mapping[str, Any] = field(default_factory=dict)  # fields of config.json that are others here
    trusted: bool = False  # whether Python files that come with the model may run

    def config(self, **options: Any) -> Any:
        """Return the model's configuration with the changed fields, and with ``options`` set on it.

        Raises:
            ConfigError: a changed field would be without effect, or transformers refuses its value.
            ConfigFileError: the model's class reads a field of ``config.json`` as another value.
        """
        config = self._configuration(options)
        fields, _ = type(config).get_config_dict(self.path)
        if fault := next(misread_fields(fields, config, {*options, *self.changed}), ""):
            raise ConfigFileError(f"config.json says {fault}")
        if not self.changed:
            return config
        try:
            changed = type(config).from_dict({**fields, **self._changed(fields)}, **options)
        except Exception as error:  # each family's check raises what it likes
            raise ConfigError(f"{config.model_type}: {' '.join(str(error).split())}") from error
        if fault := next(self._without_effect(config, changed), ""):
            raise ConfigError(f"{config.model_type}: {fault}")
        changed.name_or_path = self.path  # where transformers looks for the code of the model
        return changed

    def fields(self) -> dict[str, Any]:
        """Return the fields of ``config.json`` as they stand there."""
        path = file_of(local_path(self.path), "config.json")
        assert path is not None
        return dict(json.loads(Path(path).read_text(encoding="utf-8")))

    def unchanged(self) -> Any:
        """Return the model's configuration without the changed fields."""
        return self._configuration({})

    def _configuration(self, options: Mapping[str, Any]) -> Any:
        """Return what transformers makes of ``config.json``, with ``options`` set on it."""
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.path, **options, trust_remote_code=self.trusted)

    def tokenizer(self) -> Any:
        """Return the tokenizer that the model's files describe, whatever transformers makes of them.

        Its ``model_stop_ids`` are the end tokens of the generation config: what examples end turns with.
        """
        tokenizer = tokenizer_of(local_path(self.path), self.trusted)
        tokenizer.model_stop_ids = self._generation_stop_ids()
        return tokenizer

    def is_read_by_class(self, tokenizer: Any) -> bool:
        """Return whether programs that ask ``AutoTokenizer`` get what ``tokenizer()`` gave."""
        return is_read_by_class(local_path(self.path), self.trusted, tokenizer)

    def stop_ids(self, config: Any, tokenizer: Any) -> list[int]:
        """Return every end token that the generation config, the tokenizer or a text config names."""
        sources = [tokenizer.eos_token_id, config.eos_token_id, self._generation_stop_ids()]
        lists = [ids if isinstance(ids, list) else [ids] for ids in sources if ids is not None]
        return sorted({*chain.from_iterable(lists)})

    def _generation_stop_ids(self) -> list[int]:
        """Return the end tokens of the model's generation config; none where it has no such file."""
        from transformers import GenerationConfig
        from transformers.utils import cached_file

        if not cached_file(self.path, "generation_config.json", _raise_exceptions_for_missing_entries=False):
            return []
        ids = GenerationConfig.from_pretrained(self.path).eos_token_id
        if ids is None:
            return []
        return [*ids] if isinstance(ids, list) else [ids]

    def resolved(self) -> dict[str, Any]:
        """Return the changed fields as transformers reads them."""
        config = self.config()
        names = {ROPE if name == ROPE_BEFORE else name for name in self.changed}
        return {name: getattr(config, name) for name in sorted(names)}

    def _without_effect(self, config: Any, changed: Any) -> Iterator[str]:
        """Yield why a changed field leaves the model as it is."""
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        for name, value in self.changed.items():
            if name in (ROPE, ROPE_BEFORE):
                yield from _rope_without_effect(name, value, config, {"default", *ROPE_INIT_FUNCTIONS})
            elif not hasattr(config, name):
                if name in OF_ROPE:
                    yield f"{name} is one of {ROPE}: {{{name}: {value}}}"
                else:
                    suggestion = nearest(name, config.to_dict())
                    yield f"there is no field {name}; {suggestion}".strip(" ;")
            elif not isinstance(value, Mapping) and getattr(changed, name) != value:
                yield f"{name}: {value} has no effect beside the model's other fields"

    def _changed(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the changed fields; of position embeddings, under one name and with the model's base."""
        changed = dict(self.changed)
        rope = changed.pop(ROPE_BEFORE, None) or changed.pop(ROPE, None)
        if rope is not None:
            base_rope = fields.get(ROPE) or {}
            fields.pop(ROPE_BEFORE, None)
            kinds = {
                kind: rope_fields
                for kind, rope_fields in base_rope.items()
                if isinstance(rope_fields, Mapping)
            }
            if kinds and {*rope} <= {*kinds}:
                changed[ROPE] = kinds | {
                    kind: _based(rope_fields, kinds[kind]) for kind, rope_fields in rope.items()
                }
            else:
                changed[ROPE] = _based(rope, base_rope)
        return changed


def _rope_without_effect(
    name: str, value: Mapping[str, Any], config: Any, known: Collection[str]
) -> Iterator[str]:
    """Yield why changed position embeddings leave the model as it is; ``known`` are the types there are."""
    base_rope = getattr(config, ROPE, None) or {}
    kinds = [kind for kind, fields in base_rope.items() if isinstance(fields, Mapping)]
    if kinds and not {*value} <= {*kinds}:
        yield f"{name} has one set of fields for each kind of layer: {', '.join(kinds)}"
    for rope in [value.get(kind) for kind in kinds] if kinds else [value]:
        rope_type = (rope or {}).get("rope_type", "default")
        if rope_type not in known:
            yield f"there is no rope_type {rope_type}; there are {', '.join(sorted(known))}"


def misread_fields(stored: Mapping[str, Any], config: Any, skipped: Collection[str]) -> Iterator[str]:
    """Yield the numbers of ``config.json`` that a model's class has replaced by numbers of its own.

    A class may compute a field from others and forget the file's value (transformers 5.23: DeepSeek's
    ``head_dim``), or may look for position embeddings in ``rope_parameters`` alone and fall back to its
    default base where the file has ``rope_theta`` (Ministral 3). The model would run, with other numbers.

    Args:
        stored: the fields as they stand in the file.
        config: what transformers has made of them.
        skipped: the names of fields that need not agree, as the caller has set them.
    """
    read_fields = all_fields(config)
    if {*skipped} & {ROPE, ROPE_BEFORE}:
        skipped = {*skipped, ROPE, ROPE_BEFORE, *OF_ROPE}
    for name, value in stored.items():
        if name in skipped or (name == "sliding_window" and stored.get("use_sliding_window") is False):
            continue
        if name in (ROPE, ROPE_BEFORE):
            for key, number in _numbers(value):
                yield from _misread_rope(key, number, f"{name}.{key}", read_fields.get(ROPE))
        elif name in OF_ROPE and isinstance(value, (int, float)):
            yield from _misread_rope(name, value, name, read_fields.get(ROPE))
        elif isinstance(value, Mapping):
            if (section := getattr(config, name, None)) is not None and hasattr(section, "to_json_string"):
                yield from (f"{name}.{fault}" for fault in misread_fields(value, section, skipped))
        elif isinstance(value, (int, float)) and name in read_fields and read_fields[name] != value:
            remedy = f"set models.NAME.config.{name} to the value that is right"
            yield f"{name}: {value}, which {type(config).__name__} reads as {read_fields[name]}; {remedy}"


def _misread_rope(key: str, value: float, name: str, rope: Any) -> Iterator[str]:
    """Yield that no layer's position embeddings have a number of the file."""
    if not isinstance(rope, Mapping):
        return
    numbers = [number for field, number in _numbers(rope) if field == key]
    if value not in numbers:
        read_numbers = " and ".join(map(str, numbers)) or "nothing"
        remedy = f"set models.NAME.config.{ROPE} to what is right"
        yield f"{name}: {value}, of which the model's position embeddings have {read_numbers}; {remedy}"


def _numbers(fields: Any) -> Iterator[tuple[str, float]]:
    """Yield the names and values of the numbers of position embeddings, of each kind of layer."""
    for name, value in fields.items() if isinstance(fields, Mapping) else ():
        if isinstance(value, Mapping):
            yield from _numbers(value)
        elif isinstance(value, (int, float)):
            yield name, value


def all_fields(config: Any) -> dict[str, Any]:
    """Return the fields of a configuration as transformers would write them, defaults too."""
    return dict(json.loads(config.to_json_string(use_diff=False)))


def with_changes(
    stored: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields of a configuration as they are stored, but for those that a run has changed.

    ``before`` and ``after`` are all fields, as transformers has read them and as the run leaves them. Where
    they are of another type, as of a model that was a part of the stored one, the latter are returned.

    Example:
        >>> read, left = {"dtype": "bfloat16", "eps": 1}, {"dtype": "float32", "eps": 1}
        >>> with_changes({"rope_theta": 5.0, "torch_dtype": "bfloat16"}, read, left)
        {'rope_theta': 5.0, 'torch_dtype': 'float32'}
    """
    if stored.get("model_type") != after.get("model_type"):
        return dict(after)
    fields = dict(stored)
    for name, value in after.items():
        former, stored_value = before.get(name), fields.get(name)
        if name in UNTOLD or former == value:
            continue
        if name == "dtype" and "dtype" not in stored and "torch_dtype" in stored:
            fields["torch_dtype"] = value
        elif name == ROPE:
            fields[name] = value
            for former_name in (ROPE_BEFORE, *OF_ROPE):
                fields.pop(former_name, None)  # former names, which would say something else
        elif isinstance(stored_value, Mapping) and isinstance(former, Mapping) and isinstance(value, Mapping):
            fields[name] = with_changes(stored_value, former, value)
        else:
            fields[name] = value
    return fields


def _based(rope: Mapping[str, Any], base_rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return position embeddings with what they leave out of a model's own base."""
    return {**{key: base_rope[key] for key in OF_ROPE if key in base_rope}, **rope}


def attention_kinds(config: Any) -> list[str]:
    """Return the kind of each layer: ``full_attention``, ``sliding_attention``, ``linear_attention``, ...

    Of windows that a configuration has in fields of its own, it is not known of which layers they are, and
    whether they count tokens or columns: then every layer is ``local_attention``.
    """
    config = config.get_text_config()
    if kinds := getattr(config, "layer_types", None):
        return list(kinds)
    single = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    if any(getattr(config, name, None) for name in WINDOWS):
        single = "local_attention"
    return [single] * config.num_hidden_layers


def context_of(config: Any) -> int | None:
    """Return the tokens that fit into a row of a model, or None where its configuration does not say.

    What position embeddings of some kinds are depends on the longest row of a pass, if that is longer than
    the model was first made for: what a row scores would depend on the rows beside it. So rows end there.
    """
    most: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return min(filter(None, (most, rope_limit(config))), default=None)


def rope_limit(config: Any) -> int | None:
    """Return up to how many tokens in a row position embeddings are the same, where that has an end."""
    config = config.get_text_config()
    rope = getattr(config, ROPE, None) or {}
    kinds = [kind for kind in rope.values() if isinstance(kind, Mapping)] or [rope]  # for each kind of layer
    ends = {"dynamic": getattr(config, "max_position_embeddings", None)}
    limits = ({"longrope": kind.get(ORIGINAL), **ends}.get(str(kind.get("rope_type"))) for kind in kinds)
    return min(filter(None, limits), default=None)


def runs_own_code(model: Any) -> bool:
    """Return whether a model's class came with it, by the package in which transformers puts such."""
    return any(kind.__module__.startswith("transformers_modules") for kind in type(model).__mro__)
