"""Reads the signature of a function as the declaration of an op or of a hook."""

import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rlgraph.ops.attribute_group import AttributeGroup
from rlgraph.ops.check_declaration import check_declaration
from rlgraph.ops.column_types import DOMAINS, ColumnType, is_column, strip_none
from rlgraph.ops.declare import Declaration, Hook, Op, Port, attributes_model
from rlgraph.ops.interfaces import Context, ServeEngine, Tokenizer, TrainEngine
from rlgraph.ops.op_error import OpError

HANDLES = {TrainEngine: "train", ServeEngine: "serve", Tokenizer: "tokenizer", Context: "context"}


def signature(name: str, body: Callable[..., Any], kind: type[Hook] | None = None) -> Op:
    """Read the declaration of a function, or of a class in whose constructor it stands.

    ``kind`` is the hook that it is, if it is not an op.

    Raises:
        OpError: a parameter or the result has no annotation, or one that is not a column type; or what
            ``@op`` says does not fit the signature. The error has the function.
    """
    try:
        op = _read(name, body, kind)
        check_declaration(op)
    except OpError as error:
        error.function = body
        raise
    return op


def _read(name: str, body: Callable[..., Any], kind: type[Hook] | None) -> Op:
    """Return a function's declaration, whose names are not checked yet."""
    if kind is None and isinstance(body, type):
        raise OpError(f"op {name}: it is a class; an op is a function")
    hints = type_hints(name, body)
    filled_by_caller = kind.filled(name, body) if kind else ()
    parameters = _Parameters(name)
    for parameter in inspect.signature(body).parameters.values():
        if parameter.name in filled_by_caller:
            continue
        if parameter.name not in hints:
            law = f"op {name}: parameter {parameter.name} has no annotation"
            raise OpError(f"{law}; a column has a type, as responses: text[samples]")
        parameters.add(parameter, hints[parameter.name])

    declared = getattr(body, "__op__", Declaration())
    if "return" not in hints:
        _check_silent(name, kind, parameters)
    outputs = _outputs(name, hints.get("return"), declared, kind)
    _check_outputs(name, outputs, declared)
    _check_named_outputs(name, outputs, declared, parameters)
    _check_named_inputs(name, declared, parameters)
    _check_counts(name, declared, outputs)
    op = Op(
        name=name,
        body=body,
        inputs=tuple(parameters.inputs),
        outputs=outputs,
        handles=parameters.handles,
        attributes=attributes_model(name, parameters.attributes),
        hooks=parameters.hooks,
        declared=declared,
        doc=inspect.getdoc(body) or "",
        several=frozenset(parameters.several),
        kind=kind,
        more=parameters.more,
        groups=parameters.groups,
    )
    reads_only_columns = bool(op.inputs) and op.engine is None
    if declared.beside and not reads_only_columns:
        law = f"op {name}: what runs beside the devices reads columns, and no model"
        raise OpError(law, argument="beside")
    return op


@dataclass
class _Parameters:
    """The parameters of a function, sorted by what they are."""

    op: str
    inputs: list[Port] = field(default_factory=list)
    handles: dict[str, str] = field(default_factory=dict)
    attributes: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # name -> (annotation, default)
    hooks: dict[str, type[Hook]] = field(default_factory=dict)
    several: set[str] = field(default_factory=set)  # attributes that hold several hooks by name
    groups: dict[str, type[AttributeGroup]] = field(default_factory=dict)
    more: ColumnType | None = None

    def add(self, parameter: inspect.Parameter, hint: Any) -> None:
        if parameter.kind is parameter.KEYWORD_ONLY:
            self._add_keyword(parameter, hint)
        elif hint in HANDLES:
            self.handles[parameter.name] = HANDLES[hint]
        elif not is_column(hint):
            law = f"op {self.op}: parameter {parameter.name}: {hint!r} is not a column type"
            raise OpError(f"{law}, as responses: text[samples]; attributes stand behind a * in the signature")
        elif parameter.kind is parameter.VAR_KEYWORD:
            self.more = ColumnType.of(hint)
        else:
            plain = strip_none(hint)
            self.inputs.append(Port(parameter.name, ColumnType.of(plain), optional=hint is not plain))

    def _add_keyword(self, parameter: inspect.Parameter, hint: Any) -> None:
        is_group = isinstance(hint, type) and issubclass(hint, AttributeGroup)
        if is_group:
            self.groups[parameter.name] = hint
            for name, annotation, default in hint.attributes():
                self._add_attribute(name, annotation, default)
        else:
            default = ... if parameter.default is parameter.empty else parameter.default
            self._add_attribute(parameter.name, hint, default)

    def _add_attribute(self, name: str, hint: Any, default: Any) -> None:
        if name in self.attributes:
            raise OpError(f"op {self.op}: two of its attributes are called {name}, one of them in a group")
        hook = _hook(hint)
        if hook is None:
            self.attributes[name] = (hint, default)
            return
        self.hooks[name], holds_several = hook
        settings: Any = dict[str, Any]
        if holds_several:
            self.several.add(name)
            settings = dict[str, dict[str, Any]]
        is_optional = hint is not strip_none(hint)
        self.attributes[name] = (settings | None if is_optional else settings, default)


def _check_silent(name: str, kind: type[Hook] | None, parameters: _Parameters) -> None:
    """Refuse a function without a return annotation, unless what it returns is no column (OpError)."""
    if kind and not kind.writes:
        return
    domains = [port.type.domain for port in parameters.inputs]
    domain = domains[0] if domains else "samples"
    column = f"float32[{domain}, tokens]" if kind else f"float32[{domain}]"
    law = f"op {name}: it declares no output: its signature has no return annotation"
    remedy = f"annotate what it returns, as -> {column}"
    if kind is None:
        remedy += "; -> None if it returns nothing"
    raise OpError(law, remedy=remedy)


def _check_outputs(name: str, outputs: tuple[Port, ...], declared: Declaration) -> None:
    domains = set()
    for port in outputs:
        if port.type.axis == "other_tokens":
            raise OpError(f"op {name}: what it writes is along `tokens`; `other_tokens` is for what it reads")
        if port.name != declared.counts:  # which has one row per input row
            domains.add(port.type.domain)
    if len(domains) > 1:
        law = f"op {name}: it writes columns of {' and of '.join(sorted(domains))}"
        raise OpError(f"{law}; an op writes rows of one")
    dtypes = [port.type.dtype for port in outputs]
    if declared.filters and dtypes != ["boolean"]:
        law = f"op {name}: a filter returns one boolean column: which rows stay"
        raise OpError(law, argument="filters")


def _check_named_outputs(
    name: str, outputs: tuple[Port, ...], declared: Declaration, parameters: _Parameters
) -> None:
    """Check the attribute by which a graph names columns that an op writes (OpError)."""
    if not declared.columns:
        return
    returns_record = all(port.name for port in outputs)
    if declared.columns not in parameters.attributes or not returns_record:
        law = f"op {name}: `{declared.columns}` names columns beside those of a NamedTuple, which it returns"
        law += f"; {declared.columns}: dict[str, str] stands behind the * of its signature"
        raise OpError(law, argument="columns")


def _check_named_inputs(name: str, declared: Declaration, parameters: _Parameters) -> None:
    """Check the attribute by which a graph names further columns that an op reads (OpError)."""
    takes_more = parameters.more is not None
    if not declared.reads:
        is_right = not takes_more
    else:
        is_right = takes_more and declared.reads[0] in parameters.attributes
    if not is_right:
        law = f"op {name}: `reads` names the attribute with the names of what `**` of its signature takes"
        law += ': @op(reads=("prompt",)), *, prompt: str, **more: anything[samples]'
        raise OpError(law, argument="reads")


def _check_counts(name: str, declared: Declaration, outputs: tuple[Port, ...]) -> None:
    """Check that an op says how many rows each one has become, and how many that are at most (OpError)."""
    if not declared.counts or declared.makes is None:
        return
    parent = DOMAINS[declared.makes].made_of if declared.makes in DOMAINS else None
    types = {port.name: port.type for port in outputs}
    is_counted = types.get(declared.counts) == f"int64[{parent}]"
    if not is_counted or "most" not in declared.roles:
        law = f"op {name}: its `counts` names a column int64[{parent}] that it writes, how many "
        law += f"{declared.makes} each of the {parent} has become, and an attribute has the role `most`"
        law += ': @op(makes="segments", counts="count", roles={"most": "most"})'
        raise OpError(law, argument="counts")


def _hook(hint: Any) -> tuple[type[Hook], bool] | None:
    """Return the hook in an attribute's annotation, and whether the attribute holds several by name."""
    annotation = strip_none(hint)
    arguments = typing.get_args(annotation)
    holds_several = typing.get_origin(annotation) is dict and arguments[0] is str
    kind = arguments[1] if holds_several else annotation
    if not isinstance(kind, type) or not issubclass(kind, Hook):
        return None
    return kind, holds_several


def type_hints(name: str, body: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of a function or a constructor; an ``OpError`` if one can't be read."""
    function = body.__init__ if isinstance(body, type) else body  # type: ignore[misc]  # of this very class
    try:
        return typing.get_type_hints(function, include_extras=True)
    except Exception as error:
        raise OpError(f"op {name}: an annotation can't be read: {error}") from error


def _outputs(name: str, hint: Any, declared: Declaration, kind: type[Hook] | None) -> tuple[Port, ...]:
    """Return the columns that a function may write, by its return annotation."""
    if kind and not kind.writes:
        return ()
    if hint in (None, type(None)):
        return ()
    if is_column(hint):
        return (Port("", ColumnType.of(hint)),)
    if not hasattr(hint, "_fields"):
        raise OpError(f"op {name}: returns {hint!r}; write a column type, a NamedTuple of them, or None")
    ports = []
    for column, annotation in typing.get_type_hints(hint, include_extras=True).items():
        plain = strip_none(annotation)
        is_optional = annotation is not plain
        if is_optional and column not in declared.when:  # it never writes it
            continue
        ports.append(Port(column, ColumnType.of(plain), is_optional))
    return tuple(ports)
