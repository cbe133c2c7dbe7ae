"""An op is a function; its signature is the declaration.

    @op(rows="group")
    def grpo(
        rewards: float32[samples], group: int64[samples], loss_mask: boolean[samples, tokens],
        *, eps: float = 1e-6,
    ) -> float32[samples, tokens]:
        '''Group-normalised advantages ...'''

Positional parameters annotated with a column type are edges; ``TrainEngine``, ``ServeEngine``, ``Tokenizer``
and ``Context`` are filled in by the runtime; keyword-only parameters are attributes, with their defaults and
bounds; the return annotation is what the op writes: one column, a ``NamedTuple`` of columns, or nothing.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, create_model

from rlgraph.engines import Context, ServeEngine, Tokenizer, TrainEngine
from rlgraph.types import ColumnType, is_column, strip_none

Rows = Literal["each", "group", "all"]
Body = TypeVar("Body", bound=Callable[..., Any])


class Hook:
    """A function chosen by an attribute, such as a loss, with its own attributes and columns.

    In a graph it is ``{kind: ppo_clip, clip: 0.2}``, or ``{kind: my_losses.py:name}``. The columns that it
    reads become columns of the node. An attribute of type ``dict[str, Tool]`` holds several by name.
    """

    word = "hook"  # what errors and the catalog call it
    reads = True  # whether the columns of its signature become columns of the node
    writes = True  # whether what it returns is a column
    provides: tuple[str, ...] = ()  # columns that the op itself computes

    def __init__(self, body: Callable[..., Any], attributes: Mapping[str, Any], columns: Mapping[str, Any]):
        self.body, self.attributes, self.columns = body, dict(attributes), dict(columns)
        self.parameters = [
            n for n, p in inspect.signature(body).parameters.items() if p.kind is not p.KEYWORD_ONLY
        ]

    def __call__(self, batch: Mapping[str, Any]) -> Any:
        return self.body(*(batch[name] for name in self.parameters), **self.attributes)

    @classmethod
    def filled(cls, name: str, body: Callable[..., Any]) -> Collection[str]:
        """Parameters that are neither columns nor attributes: whoever calls it fills them in."""
        return ()


class Loss(Hook):
    """A policy loss: from the log-probs of now and any columns, a loss a token ``[samples, tokens]``."""

    word, provides = "loss", ("logprobs",)


class Loop(Hook):
    """An agent loop: ``async def loop(chat: Chat, ...)``; its columns have a row a prompt."""

    word, writes = "loop", False

    @classmethod
    def filled(cls, name: str, body: Callable[..., Any]) -> Collection[str]:
        """The conversation that it leads."""
        if "chat" not in inspect.signature(body).parameters or not inspect.iscoroutinefunction(body):
            raise OpError(f"op {name}: an agent loop is an async function, `async def loop(chat: Chat, ...)`")
        return ("chat",)


class Parser(Hook):
    """Finds tool calls: ``def parser(text: str) -> list[ToolCall]``."""

    word, writes = "parser", False

    @classmethod
    def filled(cls, name: str, body: Callable[..., Any]) -> Collection[str]:
        """What the policy wrote."""
        if [*inspect.signature(body).parameters] != ["text"]:
            raise OpError(f"op {name}: a parser is `def parser(text: str) -> list[ToolCall]`")
        return ("text",)


@dataclass(frozen=True)
class Declaration:
    """What ``@op`` adds to a signature."""

    rows: Rows = "each"
    makes: str | None = None
    times: str | None = None
    updates: bool = False
    head: str = "lm"
    when: Mapping[str, str] = field(default_factory=dict)
    assumes: tuple[str, ...] = ()
    filters: bool = False
    leaves: int = 0
    recorded: bool = False
    measures: Mapping[str, str] = field(default_factory=dict)
    beside: bool = False


def op(
    *,
    rows: Rows = "each",
    makes: str | None = None,
    times: str | None = None,
    updates: bool = False,
    head: str = "lm",
    when: Mapping[str, str] | None = None,
    assumes: tuple[str, ...] = (),
    filters: bool = False,
    leaves: int = 0,
    recorded: bool = False,
    measures: Mapping[str, str] | None = None,
    beside: bool = False,
) -> Callable[[Body], Body]:
    """Declare a function as an op.

    Args:
        rows: which rows one call needs to see: ``each`` (any part of them), ``group`` (all samples of a
            prompt), ``all`` (the whole batch).
        makes: the domain that the op makes: ``prompts`` or ``samples``. A source makes it from nothing.
        times: the attribute that says how many rows each input row becomes.
        updates: whether it writes the next version of its model.
        head: the head that its model must have, ``lm``, ``value`` or ``any``.
        when: optional column -> attribute; the column is read only where the attribute is not 0.
        assumes: laws that the graph around it must keep, by their names in ``rlgraph/passes/assume.py``.
        filters: whether its one boolean column says which rows stay: other nodes then read those alone
            (``rows: NODE``).
        leaves: of one that may leave rows unfinished for a next round, the columns that it leaves
            (``Context.leave``).
        recorded: whether its rows were sampled by its model at an earlier time; its attribute ``columns``
            names more of what it writes, with types.
        measures: attribute that weighs a KL -> the metric, as ``record`` takes it, that measures that KL:
            what the attribute follows where a graph makes it adaptive (``rlgraph/controller.py``).
        beside: whether it takes its time on a CPU, without a model: it then runs as a task of Ray, while the
            devices go on with the steps that do not read what it writes.
    """

    def declare(body: Body) -> Body:
        conditions, measured = dict(when or {}), dict(measures or {})
        declared = Declaration(
            rows,
            makes,
            times,
            updates,
            head,
            conditions,
            assumes,
            filters,
            leaves,
            recorded,
            measured,
            beside,
        )
        setattr(body, "__op__", declared)  # noqa: B010
        return body

    return declare


@dataclass(frozen=True)
class Port:
    """A column that an op reads or writes, under the op's own name for it."""

    name: str
    type: ColumnType
    optional: bool = False


@dataclass(frozen=True)
class Op:
    """A function's declaration, read once."""

    name: str
    body: Callable[..., Any]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    handles: Mapping[str, str]  # parameter -> train, serve, tokenizer or context
    attributes: type[BaseModel]
    hooks: Mapping[str, type[Hook]]
    declared: Declaration
    doc: str
    several: frozenset[str] = frozenset()  # attributes that hold several hooks by name
    kind: type[Hook] | None = None  # where it is no op but what an attribute names

    def hook(self, path: str) -> type[Hook]:
        """The kind of a node's hook: ``loss``, or ``tools.calculator`` where there are several."""
        return self.hooks[path.partition(".")[0]]

    @property
    def engine(self) -> str | None:
        """``train`` or ``serve`` where the op runs on a model, else None."""
        return next((kind for kind in self.handles.values() if kind in ("train", "serve")), None)

    @property
    def copies(self) -> bool:
        """Whether it takes a second model, ``of``, whose weights it copies onto its own."""
        return self.handles.get("of") == "train"

    @property
    def source(self) -> bool:
        """Whether it makes rows from nothing."""
        return self.declared.makes is not None and not self.inputs


class OpError(Exception):
    """A function that can't be an op: says which part of its signature, and what to write instead."""


HANDLES = {TrainEngine: "train", ServeEngine: "serve", Tokenizer: "tokenizer", Context: "context"}


def signature(name: str, body: Callable[..., Any], kind: type[Hook] | None = None) -> Op:
    """Read a function's declaration.

    Args:
        name: by which a graph calls it.
        body: the function, or a class in whose constructor the declaration stands.
        kind: the hook that it is, if it is no op.

    Raises:
        OpError: a parameter without an annotation, a type that is none of ours, or a default on a column.
    """
    if kind is None and isinstance(body, type):
        raise OpError(f"op {name}: it is a class; an op is a function")
    hints, declared = _hints(name, body), getattr(body, "__op__", Declaration())
    inputs, handles, fields, hooks, several = [], {}, {}, {}, set()
    filled = kind.filled(name, body) if kind else ()
    for parameter in inspect.signature(body).parameters.values():
        if parameter.name in filled:
            continue
        if parameter.name not in hints:
            raise OpError(f"op {name}: parameter {parameter.name} has no annotation")
        hint = hints[parameter.name]
        if parameter.kind is parameter.KEYWORD_ONLY:
            if chosen := _hook(hint):
                hooks[parameter.name], holds_several = chosen
                several |= {parameter.name} if holds_several else set()
                given = dict[str, dict[str, Any]] if holds_several else dict[str, Any]
                hint = given if hint is strip_none(hint) else given | None
            fields[parameter.name] = (
                hint,
                ... if parameter.default is parameter.empty else parameter.default,
            )
        elif hint in HANDLES:
            handles[parameter.name] = HANDLES[hint]
        elif is_column(hint):
            inputs.append(Port(parameter.name, ColumnType.of(strip_none(hint)), hint is not strip_none(hint)))
        else:
            raise OpError(
                f"op {name}: parameter {parameter.name}: {hint!r} is no column type; "
                "put attributes behind a * in the signature"
            )
    outputs = () if kind and not kind.writes else _outputs(name, hints.get("return"))
    if declared.filters and [port.type.dtype for port in outputs] != ["boolean"]:
        raise OpError(f"op {name}: a filter returns one boolean column: which rows stay")
    found = Op(
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
    )
    if declared.beside and (found.engine or not inputs):
        raise OpError(f"op {name}: what runs beside the devices reads columns, and no model")
    return found


def attributes_model(name: str, fields: Mapping[str, tuple[Any, Any]]) -> type[BaseModel]:
    """A strict record of attributes: name -> (type, default)."""
    config = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True, protected_namespaces=())
    model: type[BaseModel] = create_model(name, __config__=config, **dict(fields))  # type: ignore[call-overload]
    return model


def _hook(hint: Any) -> tuple[type[Hook], bool] | None:
    """The hook in an attribute's annotation, and whether the attribute holds several by name."""
    inner = strip_none(hint)
    several = typing.get_origin(inner) is dict and typing.get_args(inner)[0] is str
    kind = typing.get_args(inner)[1] if several else inner
    return (kind, several) if isinstance(kind, type) and issubclass(kind, Hook) else None


def _hints(name: str, body: Callable[..., Any]) -> dict[str, Any]:
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
    fields = (
        getattr(hint, "__annotations__", None) if isinstance(hint, type) and issubclass(hint, tuple) else None
    )
    if fields is None:
        raise OpError(f"op {name}: returns {hint!r}; write a column type, a NamedTuple of them, or None")
    return tuple(
        Port(n, ColumnType.of(h)) for n, h in typing.get_type_hints(hint, include_extras=True).items()
    )
