"""An op is a function; its signature is the declaration.

    @op(rows="group")
    def grpo(
        rewards: float32[samples], group: int64[samples], loss_mask: boolean[samples, tokens],
        *, eps: float = 1e-6,
    ) -> float32[samples, tokens]:
        '''Group-normalised advantages ...'''

Positional parameters annotated with a column type are edges; ``TrainEngine``, ``ServeEngine``, ``Tokenizer``
and ``Context`` are filled in by the runtime; keyword-only parameters are attributes, with their defaults and
bounds, or groups of attributes that several ops share (attribute_group.py); the return annotation is what the
op writes: one column, a ``NamedTuple`` of columns, or nothing.
"""

import inspect
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import field, replace
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, overload

from pydantic import BaseModel, ConfigDict, create_model

from rlgraph.ops.attribute_group import AttributeGroup
from rlgraph.ops.check_arguments import checked_arguments
from rlgraph.ops.column_types import ColumnType
from rlgraph.ops.docstring import Docstring, read_docstring
from rlgraph.ops.op_error import OpError
from rlgraph.records import dataclass
from rlgraph.text_value import Referring

RowScope = Literal["each", "group", "all"]
ModelHead = Literal["lm", "value", "any"]
StateUse = Literal["", "keeps", "reads"]
Stored = Literal["int8", "int16", "int32"]
# the laws of rlgraph/laws/nodes.py, which has one function for each name
Law = Literal[
    "groups",
    "tries",
    "answered",
    "sampling_logprobs",
    "on_policy",
    "behaviour_logprobs",
    "greedy_baseline",
    "reference",
    "critic_values",
    "constant_norm",
    "signed",
    "dropped",
    "one_step",
    "sequence_sum",
    "token_sum",
    "weighed_losses",
    "routed",
    "grammar",
    "one_agent",
    "replayed",
]
# what an attribute decides for others: the rows that a source gives; the most tokens of a prompt, of a
# response, of both together; at which temperature samples are drawn or scored; whether sampling is cut to a
# nucleus (below 1);
# the optimizer steps of a pass over the rows, and the passes; that a recompute stays that could be left out;
# that a serve engine tells which experts it chose; how many rows one becomes, as a rule and at most, of an op
# with ``counts``; that a sample may be several contexts, of which a model sees one at a time; of an op that
# holds rows, whether they are given in the iteration in which they come, in how many more, and how many stay;
# the most turns of a conversation
Role = Literal[
    "rows",
    "prompt_limit",
    "response_limit",
    "total_limit",
    "temperature",
    "nucleus",
    "minibatches",
    "epochs",
    "keep",
    "routing",
    "expected",
    "most",
    "contexts",
    "fresh",
    "oldest",
    "capacity",
    "turns",
]
# the plan is made for one value of these
STRUCTURE: tuple[Role, ...] = (
    *("rows", "minibatches", "epochs", "expected", "most", "contexts"),
    *("fresh", "oldest", "capacity"),
)
STRICT = ConfigDict(
    extra="forbid", strict=True, arbitrary_types_allowed=True, protected_namespaces=(), defer_build=True
)
NOT_LOADING = ("shuffle", "weights")  # attributes that say what to take of the data, not what it is
PLACE = re.compile(r"(?<!\{)\{([^\W\d]\w*)\}(?!\})")  # of a column in a text; {{name}} stands for itself
Body = TypeVar("Body", bound=Callable[..., Any])
OpArguments = ParamSpec("OpArguments")


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
        self.body = body
        self.attributes = dict(attributes)
        self.columns = dict(columns)
        self.parameters = _positional_parameters(body)

    def __call__(self, batch: Mapping[str, Any]) -> Any:
        columns = [batch[name] for name in self.parameters]
        return self.body(*columns, **self.attributes)

    @classmethod
    def filled(cls, name: str, body: Callable[..., Any]) -> Collection[str]:
        """Return the parameters that are neither columns nor attributes: whoever calls it fills them in."""
        return ()


def _positional_parameters(body: Callable[..., Any]) -> list[str]:
    """Return the parameters before the * of a signature: what stands behind it are attributes."""
    names = []
    for parameter in inspect.signature(body).parameters.values():
        if parameter.kind is not parameter.KEYWORD_ONLY:
            names.append(parameter.name)
    return names


class Loss(Hook):
    """A policy loss: from the log-probs of now and any columns, one loss per token ``[samples, tokens]``."""

    word, provides = "loss", ("logprobs",)


class PairLoss(Hook):
    """A loss of pairs: ``def loss(pairs: PairScores, *, ...)``, from scores to one number per pair."""

    word, reads, writes = "pair_loss", False, False

    @classmethod
    def filled(cls, name: str, body: Callable[..., Any]) -> Collection[str]:
        """Return the scores, which the op makes."""
        if _positional_parameters(body) != ["pairs"]:
            raise OpError(f"op {name}: a loss of pairs is `def loss(pairs: PairScores, *, ...)`")
        return ("pairs",)


class Loop(Hook):
    """An agent loop: ``async def loop(chat: Chat, ...)``; its columns have one row per prompt."""

    word, writes = "loop", False

    @classmethod
    def filled(cls, name: str, body: Callable[..., Any]) -> Collection[str]:
        """Return the conversation that it leads."""
        has_chat = "chat" in inspect.signature(body).parameters
        if not has_chat or not inspect.iscoroutinefunction(body):
            raise OpError(f"op {name}: an agent loop is an async function, `async def loop(chat: Chat, ...)`")
        return ("chat",)


class Parser(Hook):
    """Finds tool calls: ``def parser(text: str) -> list[ToolCall]``."""

    word, writes = "parser", False

    @classmethod
    def filled(cls, name: str, body: Callable[..., Any]) -> Collection[str]:
        """Return what the policy wrote."""
        if [*inspect.signature(body).parameters] != ["text"]:
            raise OpError(f"op {name}: a parser is `def parser(text: str) -> list[ToolCall]`")
        return ("text",)


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """The facts that ``@op`` adds to a function's signature, which it makes an op.

    Attributes:
        rows: which rows one call needs to see: ``each`` (any part of them), ``group`` (all samples of a
            prompt), ``all`` (the whole batch).
        makes: the domain that the op makes: ``prompts``, ``samples`` or ``segments``. A source makes it from
            nothing.
        times: the attribute that says how many rows each input row becomes.
        of_each: rows that it makes of each that ``times``, or a source's role ``rows``, counts: 2 of pairs.
        counts: where their number varies, the int64 column of what it writes, one value per input row, that
            says how many each has become; an attribute has the role ``most``.
        updates: whether it writes the next version of its model.
        head: the head that its model must have, ``lm``, ``value`` or ``any``.
        when: optional column, or an attribute -> attribute; the first is read, or written, only where the
            other is neither 0 nor false. A column that it may write and that is not named here it never does.
        own: optional columns that it reads unasked only of a node that runs on the same model.
        assumes: laws that the graph around it must keep, by their names in ``rlgraph/laws/nodes.py``.
        filters: whether its one boolean column says which rows stay: other nodes then read those alone
            (``rows: NODE``).
        leaves: of one that may leave rows unfinished for a next round, the columns that it leaves
            (``Context.leave``).
        leaves_with: the attribute without which it leaves none; by default it always may.
        streams: the op that takes its place where generation streams, and leaves rows unfinished; it has the
            same attributes, and more.
        load: of a data source, the function that reads all of its data before a run, as ``rlgraph check
            --files`` does. It is called with the tokenizer, if the op takes one, and by their names with the
            attributes that say what the data is: all but ``weights``, ``shuffle`` and that with the role
            ``rows``. It returns a ``DataSet`` (nodes/support/dataset.py), or None where rows need not be
            counted, and raises an ``RlgraphError`` where the data can't be read.
        recorded: whether its rows were sampled by its model at an earlier time.
        columns: the attribute that names more of what it writes: name -> a type, such as ``float32[prompts]``
            or ``float32`` alone, or -> a mapping in which ``type`` is one, and text where it is left out.
        reads: the attribute that names more of what it reads, as ``{rubric}`` in a text or in a list, and
            behind it the names in a text that are not columns. Its signature has ``**more: anything[...]``.
        measures: attribute that weighs a KL -> the metric, as ``record`` takes it, that measures that KL:
            what the attribute follows where a graph makes it adaptive (``rlgraph/ir/kl_controller.py``).
        beside: whether it takes its time on a CPU, without a model: it then runs as a task of Ray, while the
            devices go on with the steps that do not read what it writes.
        state: ``keeps`` where what it leaves in ``Context.state`` is there again in the next iteration, and
            after a resume; ``reads`` where it has the state of another node, which the graph names by
            ``state: NODE``, as it was before the iteration. One that keeps sees all rows.
        holds: whether the rows that it makes are some that it has seen, in this iteration or before: beside
            its own columns it reads and writes every column of the rows that `rows` names which is read of
            those that it makes (``Context.given``, ``Context.held``). It runs where none have come, too.
            ``capacity``, ``fresh`` and ``oldest`` are among its
            roles.
        stores: an int64 column that it writes -> the narrower integers that hold its values, ``int8``,
            ``int16`` or ``int32``: readers get it as it is stored, and the plan counts its bytes so.
        roles: what attributes decide for the plan and for other nodes -> the attribute, as
            ``{"rows": "batch"}`` of a source; an attribute's name alone means nothing to rlgraph.
    """

    rows: RowScope = "each"
    makes: str | None = None
    times: str | None = None
    of_each: int = 1
    counts: str | None = None
    updates: bool = False
    head: ModelHead = "lm"
    when: Mapping[str, str] = field(default_factory=dict)
    own: tuple[str, ...] = ()
    assumes: tuple[Law, ...] = ()
    filters: bool = False
    leaves: int = 0
    leaves_with: str = ""
    streams: str = ""
    load: Callable[..., Any] | None = None
    recorded: bool = False
    columns: str = ""
    reads: tuple[str, ...] = ()
    measures: Mapping[str, str] = field(default_factory=dict)
    beside: bool = False
    state: StateUse = ""
    holds: bool = False
    stores: Mapping[str, Stored] = field(default_factory=dict)
    roles: Mapping[Role, str] = field(default_factory=dict)


def loading_attributes(names: Iterable[str], roles: Mapping[Role, str]) -> list[str]:
    """Return the attributes of a data source that its function ``load`` gets by name.

    Example:
        >>> loading_attributes(["files", "batch", "shuffle"], {"rows": "batch"})
        ['files']
    """
    unused = (*NOT_LOADING, roles.get("rows"))
    return [name for name in names if name not in unused]


class OpDecorator(Protocol[OpArguments]):
    """``@op``, ``@op()`` and ``@op(rows="group")``: declares a function, and returns it as it is."""

    @overload
    def __call__(self, body: Body, /) -> Body: ...
    @overload
    def __call__(self, *args: OpArguments.args, **kwargs: OpArguments.kwargs) -> Callable[[Body], Body]: ...


def _decorator(record: Callable[OpArguments, Declaration]) -> OpDecorator[OpArguments]:
    """Return the decorator that takes the arguments of a declaration, and checks them at the function."""

    def op(*functions: Any, **arguments: Any) -> Any:
        if not functions:
            return lambda body: _declared(body, arguments)
        is_bare = len(functions) == 1 and callable(functions[0]) and not arguments
        if not is_bare:
            law = f"@op takes its arguments by name, and {functions[0]!r} has none"
            raise OpError(law, remedy='as @op(rows="group")')
        return _declared(functions[0], arguments)

    op.__doc__ = record.__doc__
    op.__signature__ = inspect.signature(record)  # type: ignore[attr-defined]  # for help() and editors
    return op


def _declared(body: Body, arguments: Mapping[str, Any]) -> Body:
    """Declare a function as an op.

    Raises:
        OpError: an argument is not one of ``Declaration``, or has a value that it does not take.
    """
    try:
        declaration = Declaration(**checked_arguments(Declaration, arguments))
    except OpError as error:
        error.function = body
        raise
    setattr(body, "__op__", declaration)  # noqa: B010
    return body


op = _decorator(Declaration)


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
    kind: type[Hook] | None = None  # None for an op; else the kind of hook that an attribute names
    more: ColumnType | None = None  # of the columns that it reads beside its inputs: ``Declaration.reads``
    groups: Mapping[str, type[AttributeGroup]] = field(default_factory=dict)  # parameter -> some attributes

    def hook(self, path: str) -> type[Hook]:
        """Return the kind of a node's hook: ``loss``, or ``tools.calculator`` where there are several."""
        return self.hooks[path.partition(".")[0]]

    def written(self, attributes: Mapping[str, Any]) -> tuple[Port, ...]:
        """Return the outputs that it writes with these attributes."""
        written = []
        for port in self.outputs:
            switch = self.declared.when.get(port.name, "")
            if not port.optional or attributes.get(switch):
                written.append(port)
        return tuple(written)

    def further(self, attributes: Mapping[str, Any]) -> tuple[Port, ...]:
        """Return the columns that it reads beside its inputs: those that an attribute names."""
        if self.more is None:
            return ()
        attribute, *not_columns = self.declared.reads
        value = attributes.get(attribute) or ()
        names = PLACE.findall(value) if isinstance(value, str) else value
        inputs = [port.name for port in self.inputs]
        further = []
        for name in dict.fromkeys(names):
            if name not in inputs and name not in not_columns:
                further.append(Port(name, self.more))
        return tuple(further)

    def arguments(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """Return attributes as the body takes them: those of a group as one argument."""
        arguments = dict(attributes)
        for parameter, group in self.groups.items():
            arguments[parameter] = group.pop_from(arguments)
        return arguments

    def docstring(self) -> Docstring:
        """Return its docstring with what groups say of their attributes, where it does not say it itself."""
        docstring = read_docstring(self.doc)
        descriptions = dict(docstring.attributes)
        for group in self.groups.values():
            descriptions = {**group.descriptions(), **descriptions}
        in_order = {}
        for name in self.attributes.model_fields:
            if name in descriptions:
                in_order[name] = descriptions.pop(name)
        return replace(docstring, attributes=in_order | descriptions)

    def typed(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """Return attributes of JSON in the types that the op declares, such as a tuple for a list.

        Their bounds were checked when they were planned, by what references to the environment stand for.
        """
        fields: dict[str, Any] = {}
        for name in attributes:
            fields[name] = (self.attributes.model_fields[name].annotation, ...)
        model = create_model(self.name, __config__=STRICT, **fields)
        return dict(model.model_validate_json(json.dumps(attributes)))

    @property
    def engine(self) -> Literal["train", "serve"] | None:
        """Return ``train`` or ``serve`` where the op runs on a model, else None."""
        for kind in self.handles.values():
            if kind == "train":
                return "train"
            if kind == "serve":
                return "serve"
        return None

    @property
    def structural(self) -> set[str]:
        """Return the attributes that decide the plan, and so are one number in all iterations."""
        roles = self.declared.roles
        attributes = {roles[role] for role in STRUCTURE if role in roles}
        if self.declared.times:
            attributes.add(self.declared.times)
        return attributes

    @property
    def copies(self) -> bool:
        """Return whether it takes a second model, ``of``, whose weights it copies onto its own."""
        return self.handles.get("of") == "train"

    @property
    def source(self) -> bool:
        """Return whether it makes rows from nothing."""
        return self.declared.makes is not None and not self.inputs


class Attributes(Referring):
    """The attributes of an op or a hook."""

    model_config = STRICT


def attributes_model(name: str, fields: Mapping[str, tuple[Any, Any]]) -> type[BaseModel]:
    """Return a strict record of attributes: name -> (type, default)."""
    model: type[BaseModel] = create_model(name, __base__=Attributes, **dict(fields))  # type: ignore[call-overload]
    return model
