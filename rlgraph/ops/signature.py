"""Reads the signature of a function as the declaration of an op or of a hook."""

import inspect
import typing
from collections.abc import Callable
from typing import Any

from rlgraph.ops.column_types import DOMAINS, ColumnType, is_column, strip_none
from rlgraph.ops.declare import Declaration, Hook, Op, OpError, Port, attributes_model
from rlgraph.ops.interfaces import Context, ServeEngine, Tokenizer, TrainEngine

HANDLES = {TrainEngine: "train", ServeEngine: "serve", Tokenizer: "tokenizer", Context: "context"}


def signature(name: str, body: Callable[..., Any], kind: type[Hook] | None = None) -> Op:
    """Read the declaration of a function, or of a class in whose constructor it stands.

    ``kind`` is the hook that it is, if it is no op.

    Raises:
        OpError: a parameter without an annotation, a type that is none of ours, or a default on a column.
    """
    if kind is None and isinstance(body, type):
        raise OpError(f"op {name}: it is a class; an op is a function")
    hints, declared = type_hints(name, body), getattr(body, "__op__", Declaration())
    inputs, handles, fields, hooks, several, more = [], {}, {}, {}, set(), None
    filled = kind.filled(name, body) if kind else ()
    for parameter in inspect.signature(body).parameters.values():
        if parameter.name in filled:
            continue
        if parameter.name not in hints:
            law = f"op {name}: parameter {parameter.name} has no annotation"
            raise OpError(f"{law}; a column has a type, as responses: text[samples]")
        hint = hints[parameter.name]
        if parameter.kind is parameter.KEYWORD_ONLY:
            if chosen := _hook(hint):
                hooks[parameter.name], holds_several = chosen
                several |= {parameter.name} if holds_several else set()
                values = dict[str, dict[str, Any]] if holds_several else dict[str, Any]
                hint = values if hint is strip_none(hint) else values | None
            default = parameter.default
            fields[parameter.name] = (hint, ... if default is parameter.empty else default)
        elif hint in HANDLES:
            handles[parameter.name] = HANDLES[hint]
        elif is_column(hint) and parameter.kind is parameter.VAR_KEYWORD:
            more = ColumnType.of(hint)
        elif is_column(hint):
            inputs.append(Port(parameter.name, ColumnType.of(strip_none(hint)), hint is not strip_none(hint)))
        else:
            law = f"op {name}: parameter {parameter.name}: {hint!r} is no column type"
            raise OpError(f"{law}, as responses: text[samples]; attributes stand behind a * in the signature")
    written = () if kind and not kind.writes else _outputs(name, hints.get("return"))
    outputs = tuple(port for port in written if not port.optional or port.name in declared.when)
    if any(port.type.axis == "other_tokens" for port in outputs):
        raise OpError(f"op {name}: what it writes is along `tokens`; `other_tokens` is for what it reads")
    kinds = {port.type.domain for port in outputs if port.name != declared.counts}
    if len(kinds) > 1:
        law = f"op {name}: it writes columns of {' and of '.join(sorted(kinds))}"
        raise OpError(f"{law}; an op writes rows of one")
    if declared.columns and (declared.columns not in fields or not all(port.name for port in outputs)):
        law = f"op {name}: `{declared.columns}` names columns beside those of a NamedTuple, which it returns"
        raise OpError(f"{law}; {declared.columns}: dict[str, str] stands behind the * of its signature")
    if (more is None) != (not declared.reads) or not {*declared.reads[:1]} <= {*fields}:
        law = f"op {name}: `reads` names the attribute with the names of what `**` of its signature takes"
        raise OpError(f'{law}: @op(reads=("prompt",)), *, prompt: str, **more: anything[samples]')
    if declared.counts:
        _check_counts(name, declared, outputs)
    if declared.filters and [port.type.dtype for port in outputs] != ["boolean"]:
        raise OpError(f"op {name}: a filter returns one boolean column: which rows stay")
    op = Op(
        name=name,
        body=body,
        inputs=tuple(inputs),
        outputs=outputs,
        handles=handles,
        attributes=attributes_model(name, fields),
        hooks=hooks,
        declared=declared,
        doc=inspect.getdoc(body) or "",
        several=frozenset(several),
        kind=kind,
        more=more,
    )
    if declared.beside and (op.engine or not inputs):
        raise OpError(f"op {name}: what runs beside the devices reads columns, and no model")
    return op


def _check_counts(name: str, declared: Declaration, outputs: tuple[Port, ...]) -> None:
    """Check that an op says how many rows each one has become, and how many that are at most (OpError)."""
    parent = DOMAINS[declared.makes].made_of if declared.makes in DOMAINS else None
    counts = next((port.type for port in outputs if port.name == declared.counts), None)
    if counts is None or counts != f"int64[{parent}]" or "most" not in declared.roles:
        law = f"op {name}: its `counts` names a column int64[{parent}] that it writes, how many "
        law += f"{declared.makes} each of the {parent} has become, and an attribute has the role `most`"
        raise OpError(f'{law}: @op(makes="segments", counts="count", roles={{"most": "most"}})')


def _hook(hint: Any) -> tuple[type[Hook], bool] | None:
    """Return the hook in an attribute's annotation, and whether the attribute holds several by name."""
    inner = strip_none(hint)
    several = typing.get_origin(inner) is dict and typing.get_args(inner)[0] is str
    kind = typing.get_args(inner)[1] if several else inner
    return (kind, several) if isinstance(kind, type) and issubclass(kind, Hook) else None


def type_hints(name: str, body: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of a function or a constructor; an ``OpError`` if one can't be read."""
    read = body.__init__ if isinstance(body, type) else body  # type: ignore[misc]
    try:
        return typing.get_type_hints(read, include_extras=True)
    except Exception as error:
        raise OpError(f"op {name}: an annotation can't be read: {error}") from error


def _outputs(name: str, hint: Any) -> tuple[Port, ...]:
    if hint is None or hint is type(None):
        return ()
    if is_column(hint):
        return (Port("", ColumnType.of(hint)),)
    if not hasattr(hint, "_fields"):
        raise OpError(f"op {name}: returns {hint!r}; write a column type, a NamedTuple of them, or None")
    fields = typing.get_type_hints(hint, include_extras=True)
    ports = ((field, strip_none(kind), kind is not strip_none(kind)) for field, kind in fields.items())
    return tuple(Port(field, ColumnType.of(kind), optional) for field, kind, optional in ports)
