"""Reads the configuration and the tokenizer of a model, as the model's section of a graph says."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlgraph.errors import nearest
from rlgraph.nodes.support.data_file import local_path
from rlgraph.runtime.engines.tokenizer_files import file_of, is_read_by_class, tokenizer_of

ROPE = "rope_parameters"  # position embeddings in config.json
ROPE_FORMER = "rope_scaling"  # their name before transformers 5
ORIGINAL = "original_max_position_embeddings"
OF_ROPE = ("rope_theta", "partial_rotary_factor")  # fields of them that a graph may leave out

# fields of windows beside ``sliding_window``: GPT-Neo's, Longformer's and BigBird's, BLT's and ModernBERT's
WINDOWS = ("window_size", "attention_window", "block_size", "local_attention_window_len", "local_attention")
LIBRARY_FIELDS = ("transformers_version", "_name_or_path")  # which transformers adds to a configuration


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
        fault = next(misread_fields(fields, config, {*options, *self.changed}), "")
        if fault:
            raise ConfigFileError(f"config.json says {fault}")
        if not self.changed:
            return config
        try:
            changed = type(config).from_dict({**fields, **self._changed(fields)}, **options)
        except Exception as error:  # each family's check raises what it likes
            raise ConfigError(f"{config.model_type}: {' '.join(str(error).split())}") from error
        fault = next(self._without_effect(config, changed), "")
        if fault:
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
        stop_ids = set(self._generation_stop_ids())
        stop_ids.update(_id_list(tokenizer.eos_token_id))
        stop_ids.update(_id_list(config.eos_token_id))
        return sorted(stop_ids)

    def _generation_stop_ids(self) -> list[int]:
        """Return the end tokens of the model's generation config; none where it has no such file."""
        from transformers import GenerationConfig
        from transformers.utils import cached_file

        if not cached_file(self.path, "generation_config.json", _raise_exceptions_for_missing_entries=False):
            return []
        return _id_list(GenerationConfig.from_pretrained(self.path).eos_token_id)

    def resolved(self) -> dict[str, Any]:
        """Return the changed fields as transformers reads them."""
        config = self.config()
        names = {ROPE if name == ROPE_FORMER else name for name in self.changed}
        return {name: getattr(config, name) for name in sorted(names)}

    def _without_effect(self, config: Any, changed: Any) -> Iterator[str]:
        """Yield why a changed field leaves the model as it is."""
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        for name, value in self.changed.items():
            if name in (ROPE, ROPE_FORMER):
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
        rope = changed.pop(ROPE_FORMER, None) or changed.pop(ROPE, None)
        if rope is None:
            return changed
        base_rope = fields.get(ROPE) or {}
        fields.pop(ROPE_FORMER, None)
        base_kinds = _kinds_of_layers(base_rope)
        if base_kinds and {*rope} <= {*base_kinds}:
            rope_of_kinds = dict(base_kinds)
            for kind, kind_fields in rope.items():
                rope_of_kinds[kind] = _based(kind_fields, base_kinds[kind])
            changed[ROPE] = rope_of_kinds
        else:
            changed[ROPE] = _based(rope, base_rope)
        return changed


def _id_list(ids: int | list[int] | None) -> list[int]:
    """Return token ids, which configurations have alone, as a list, or not at all."""
    if ids is None:
        return []
    return list(ids) if isinstance(ids, list) else [ids]


def _kinds_of_layers(rope: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the position embeddings of each kind of layer; nothing where all layers have the same."""
    return {kind: fields for kind, fields in rope.items() if isinstance(fields, Mapping)}


def _rope_without_effect(
    name: str, value: Mapping[str, Any], config: Any, known: Collection[str]
) -> Iterator[str]:
    """Yield why changed position embeddings leave the model as it is; ``known`` are the types there are."""
    kinds = _kinds_of_layers(getattr(config, ROPE, None) or {})
    ropes = [value]
    if kinds:
        if not {*value} <= {*kinds}:
            yield f"{name} has one set of fields for each kind of layer: {', '.join(kinds)}"
        ropes = [value[kind] for kind in kinds if value.get(kind)]
    for rope in ropes:
        rope_type = rope.get("rope_type", "default")
        if rope_type not in known:
            yield f"there is no rope_type {rope_type}; there are {', '.join(sorted(known))}"


def misread_fields(stored: Mapping[str, Any], config: Any, skipped: Collection[str]) -> Iterator[str]:
    """Yield the numbers of ``config.json`` that a model's class has replaced by other numbers.

    A class may compute a field from others and forget the file's value (transformers 5.23: DeepSeek's
    ``head_dim``), or may look for position embeddings in ``rope_parameters`` alone and fall back to its
    default base where the file has ``rope_theta`` (Ministral 3). The model would run, with other numbers.

    Args:
        stored: the fields as they stand in the file.
        config: what transformers has made of them.
        skipped: the names of fields that need not agree, as the caller has set them.
    """
    read_fields = all_fields(config)
    may_differ = set(skipped)
    if may_differ & {ROPE, ROPE_FORMER}:
        may_differ |= {ROPE, ROPE_FORMER, *OF_ROPE}
    may_differ_here = set(may_differ)
    if stored.get("use_sliding_window") is False:
        may_differ_here.add("sliding_window")
    for name, value in stored.items():
        if name in may_differ_here:
            continue
        if name in (ROPE, ROPE_FORMER):
            for key, number in _numbers(value):
                yield from _misread_rope(key, number, f"{name}.{key}", read_fields.get(ROPE))
        elif isinstance(value, Mapping):
            section = getattr(config, name, None)
            if hasattr(section, "to_json_string"):
                for fault in misread_fields(value, section, may_differ):
                    yield f"{name}.{fault}"
        elif not isinstance(value, (int, float)):
            continue
        elif name in OF_ROPE:
            yield from _misread_rope(name, value, name, read_fields.get(ROPE))
        elif name in read_fields and read_fields[name] != value:
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
    if not isinstance(fields, Mapping):
        return
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _numbers(value)
        elif isinstance(value, (int, float)):
            yield name, value


def all_fields(config: Any) -> dict[str, Any]:
    """Return the fields of a configuration as transformers would write them, defaults too."""
    return dict(json.loads(config.to_json_string(use_diff=False)))


def with_changes(
    stored: Mapping[str, Any], loaded: Mapping[str, Any], final: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields of a configuration as they are stored, but for those that a run has changed.

    ``loaded`` and ``final`` are all fields, as transformers has read them and as the run leaves them. Where
    ``final`` is of another model type, as of a model that was a part of the stored one, it is returned whole.

    Example:
        >>> read, left = {"dtype": "bfloat16", "eps": 1}, {"dtype": "float32", "eps": 1}
        >>> with_changes({"rope_theta": 5.0, "torch_dtype": "bfloat16"}, read, left)
        {'rope_theta': 5.0, 'torch_dtype': 'float32'}
    """
    if stored.get("model_type") != final.get("model_type"):
        return dict(final)
    fields = dict(stored)
    for name, value in final.items():
        former = loaded.get(name)
        stored_value = fields.get(name)
        if name in LIBRARY_FIELDS or former == value:
            continue
        has_former_name = "dtype" not in stored and "torch_dtype" in stored
        if name == "dtype" and has_former_name:
            fields["torch_dtype"] = value
        elif name == ROPE:
            fields[name] = value
            for former_name in (ROPE_FORMER, *OF_ROPE):  # left in place, these would say something else
                fields.pop(former_name, None)
        elif isinstance(stored_value, Mapping) and isinstance(former, Mapping) and isinstance(value, Mapping):
            fields[name] = with_changes(stored_value, former, value)
        else:
            fields[name] = value
    return fields


def _based(rope: Mapping[str, Any], base_rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return position embeddings, with the model's values of the fields that they leave out."""
    based = {key: base_rope[key] for key in OF_ROPE if key in base_rope}
    return based | dict(rope)


def attention_kinds(config: Any) -> list[str]:
    """Return the kind of each layer: ``full_attention``, ``sliding_attention``, ``linear_attention``, ...

    Where a configuration has its window in another field (``WINDOWS``), it is not known of which layers that
    is, and whether it counts tokens or columns: then every layer is ``local_attention``.
    """
    config = config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return list(kinds)
    kind = "full_attention"
    if getattr(config, "sliding_window", None):
        kind = "sliding_attention"
    if any(getattr(config, name, None) for name in WINDOWS):
        kind = "local_attention"
    return [kind] * config.num_hidden_layers


def context_of(config: Any) -> int | None:
    """Return the tokens that fit into a row of a model, or None where its configuration does not say.

    What position embeddings of some kinds are depends on the longest row of a pass, if that is longer than
    the model was first made for: what a row scores would depend on the rows beside it. So rows end there.
    """
    positions: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    limits = [limit for limit in (positions, rope_limit(config)) if limit]
    return min(limits, default=None)


def rope_limit(config: Any) -> int | None:
    """Return up to how many tokens in a row position embeddings are the same, where that has an end."""
    config = config.get_text_config()
    rope = getattr(config, ROPE, None) or {}
    limits = []
    for fields in _kinds_of_layers(rope).values() or [rope]:
        limit = None
        if fields.get("rope_type") == "longrope":
            limit = fields.get(ORIGINAL)
        elif fields.get("rope_type") == "dynamic":
            limit = getattr(config, "max_position_embeddings", None)
        if limit:
            limits.append(limit)
    return min(limits, default=None)


def runs_own_code(model: Any) -> bool:
    """Return whether a model's class came with it, which transformers imports as ``transformers_modules``."""
    return any(kind.__module__.startswith("transformers_modules") for kind in type(model).__mro__)
