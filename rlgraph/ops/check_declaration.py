"""Checks what ``@op`` says of a function against its signature: each name has to be what it stands for."""

import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any

from rlgraph.errors import nearest
from rlgraph.nodes import OPS
from rlgraph.ops.column_types import DOMAINS
from rlgraph.ops.declare import Op, loading_attributes
from rlgraph.ops.op_error import OpError

HOLDER_ROLES = ("capacity", "fresh", "oldest")  # of an op that holds rows


def check_declaration(op: Op) -> None:
    """Check the declaration of an op or a hook.

    Raises:
        OpError: an argument of ``@op`` names what the signature does not have, or needs what it lacks.
    """
    _check_names(op)
    _check_makes(op)
    _check_parameters(op)
    _check_together(op)


def _check_names(op: Op) -> None:
    """Check the arguments that name attributes and columns."""
    declared = op.declared
    attributes = [*op.attributes.model_fields]
    optional_inputs = [port.name for port in op.inputs if port.optional]
    optional_outputs = [port.name for port in op.outputs if port.optional]
    stored_outputs = [port.name for port in op.outputs if port.type.dtype == "int64"]
    switched = [*optional_inputs, *optional_outputs, *attributes]

    one_attribute = "an attribute: a parameter behind the * of its signature"
    _check_known(op, "times", [declared.times], attributes, one_attribute)
    _check_known(op, "leaves_with", [declared.leaves_with], attributes, one_attribute)
    _check_known(op, "measures", declared.measures, attributes, one_attribute)
    _check_known(op, "roles", declared.roles.values(), attributes, one_attribute)
    _check_known(op, "when", declared.when.values(), attributes, one_attribute)
    _check_known(op, "when", declared.when, switched, "an optional column (`TYPE | None`) or an attribute")
    _check_known(op, "own", declared.own, optional_inputs, "an optional column that it reads")
    _check_known(
        op, "stores", declared.stores, stored_outputs, "an int64 column of the NamedTuple it returns"
    )
    _check_known(op, "streams", [declared.streams], OPS, "a shipped op")


def _check_known(
    op: Op, argument: str, names: Iterable[str | None], known: Collection[str], meaning: str
) -> None:
    for name in names:
        if not name or name in known:
            continue
        law = f"op {op.name}: `{argument}` of @op names `{name}`, which is not {meaning}"
        accepted = [] if known is OPS else known
        raise OpError(law, accepted, nearest(name, known), argument)


def _check_makes(op: Op) -> None:
    """Check that the op writes rows of the domain that it makes."""
    declared = op.declared
    if declared.makes is None:
        return
    if declared.makes not in DOMAINS:
        law = f"op {op.name}: `makes` of @op names `{declared.makes}`, which has no rows"
        raise OpError(law, DOMAINS, nearest(declared.makes, DOMAINS), "makes")
    written = {port.type.domain for port in op.outputs if port.name != declared.counts}
    if written and declared.makes not in written:
        domain = ", ".join(sorted(written))
        law = f'op {op.name}: @op says that it makes "{declared.makes}", and it returns a column of {domain}'
        remedy = f'write makes="{domain}", or return columns of {declared.makes}'
        raise OpError(law, (), remedy, "makes")


def _check_parameters(op: Op) -> None:
    """Check that the function takes what an argument lets it use."""
    declared = op.declared
    handles = op.handles.values()
    context = "the Context, as ctx: Context"
    needs = (
        ("state", bool(declared.state), "context", context),
        ("holds", declared.holds, "context", context),
        ("leaves", declared.leaves > 0, "context", context),
        ("updates", declared.updates, "train", "the model that it trains, as model: TrainEngine"),
    )
    for argument, applies, handle, parameter in needs:
        if applies and handle not in handles:
            law = f"op {op.name}: `{argument}` of @op needs a parameter for {parameter}"
            raise OpError(law, argument=argument)


def _check_together(op: Op) -> None:
    """Check the arguments that are right only beside others."""
    declared = op.declared
    if declared.state == "keeps" and declared.rows != "all":
        law = f"op {op.name}: it keeps a state, and may see some of the rows"
        raise OpError(law, (), 'declare it @op(state="keeps", rows="all")', "state")
    if declared.makes is None:
        of_makers = {
            "times": bool(declared.times),
            "of_each": declared.of_each > 1,
            "counts": bool(declared.counts),
            "holds": declared.holds,
        }
        for argument, is_given in of_makers.items():
            if is_given:
                law = f"op {op.name}: `{argument}` of @op counts new rows, and `makes` does not say which"
                raise OpError(law, DOMAINS, 'as makes="samples"', argument)
    if declared.load is not None and not op.source:
        law = f"op {op.name}: `load` of @op belongs to a source, which makes rows and reads no column"
        raise OpError(law, argument="load")
    if declared.load is not None:
        _check_load(op, declared.load)
    if declared.leaves_with and not declared.leaves:
        law = f"op {op.name}: `leaves_with` of @op needs `leaves`, the number of columns that it leaves"
        raise OpError(law, argument="leaves_with")
    if declared.head != "lm" and op.engine is None:
        law = f"op {op.name}: `head` of @op is about a model, and the function takes none"
        raise OpError(law, (), "add a parameter such as model: TrainEngine, or leave out `head`", "head")
    missing_roles = [role for role in HOLDER_ROLES if role not in declared.roles]
    if declared.holds and missing_roles:
        law = f"op {op.name}: an op that holds rows needs attributes for the roles {', '.join(missing_roles)}"
        remedy = 'as roles={"capacity": "capacity", "fresh": "fresh", "oldest": "oldest"}'
        raise OpError(law, (), remedy, "holds")


def _check_load(op: Op, load: Callable[..., Any]) -> None:
    """Check that the function which reads all data of a source takes what it is called with."""
    attributes = loading_attributes(op.attributes.model_fields, op.declared.roles)
    tokenizers = ["tokenizer"] if "tokenizer" in op.handles.values() else []
    try:
        inspect.signature(load).bind(*tokenizers, **dict.fromkeys(attributes))
    except TypeError as error:
        law = f"op {op.name}: `load` of @op can't be called as it will be: {error}"
        parameters = ", ".join([*tokenizers, *attributes])
        raise OpError(law, (), f"give it the parameters ({parameters})", "load") from error
