"""A plugin that tells mypy which values a column annotation stands for.

``float32[samples, tokens]`` is a class at run time, which is never instantiated: an op's body gets the values
of the column. With ``plugins = ["rlgraph.ops.mypy_plugin"]`` in its configuration, mypy knows them as

    float32[samples]            torch.Tensor       plain columns of numbers
    float32[samples, tokens]    Ragged             columns with a token axis
    text[prompts]               list[str]
    json[prompts]               list[Any]
    anything[samples]           Any                whichever the graph has there

Type checkers without this plugin read a column annotation as ``Any`` (column_types.py).
"""

from collections.abc import Callable

from mypy.nodes import Import, ImportAll, ImportFrom, MypyFile
from mypy.plugin import AnalyzeTypeContext, Plugin
from mypy.types import AnyType, Instance, Type, TypeOfAny, UnboundType, get_proper_type

from rlgraph.ops.column_types import TOKEN_AXES

COLUMN_TYPES = "rlgraph.ops.column_types"
RAGGED_MODULE = "rlgraph.nodes.support.ragged"
NUMBERS = {f"{COLUMN_TYPES}.{name}" for name in ("float32", "int64", "boolean")}


def analyze_numbers(context: AnalyzeTypeContext) -> Type:
    """Return the type of a column of numbers: ragged if one of its axes is a token axis."""
    axes_of_a_row = context.type.args[1:]
    if axes_of_a_row and _is_token_axis(context, axes_of_a_row[0]):  # a token axis stands before fixed ones
        return context.api.named_type(f"{RAGGED_MODULE}.Ragged", [])
    return context.api.named_type("torch._tensor.Tensor", [])


def analyze_text(context: AnalyzeTypeContext) -> Type:
    """Return the type of a column of texts."""
    return context.api.named_type("builtins.list", [context.api.named_type("builtins.str", [])])


def analyze_json(context: AnalyzeTypeContext) -> Type:
    """Return the type of a column of JSON values."""
    return context.api.named_type("builtins.list", [AnyType(TypeOfAny.explicit)])


def analyze_anything(context: AnalyzeTypeContext) -> Type:
    """Return the type of a column whose dtype the graph decides."""
    return AnyType(TypeOfAny.explicit)


def _is_token_axis(context: AnalyzeTypeContext, axis: Type) -> bool:
    """Return whether an axis is a token axis, by its name or by its class.

    The shipped ones are known by name, as an op may write a column that is called as its axis: in
    ``class Rollout(NamedTuple): tokens: int64[samples, tokens]`` mypy takes ``tokens`` for the field, while
    at run time the annotation is evaluated outside of the class, where it is the axis.
    """
    if isinstance(axis, UnboundType) and axis.name in TOKEN_AXES:
        return True
    instance = get_proper_type(context.api.analyze_type(axis))
    if not isinstance(instance, Instance):
        return False
    return any(parent.fullname == f"{COLUMN_TYPES}.TokenAxis" for parent in instance.type.mro)


class ColumnPlugin(Plugin):
    """Replaces column annotations by the types of their values."""

    def get_type_analyze_hook(self, fullname: str) -> Callable[[AnalyzeTypeContext], Type] | None:
        """Return the function that analyzes an annotation, if it is a column."""
        if fullname in NUMBERS:
            return analyze_numbers
        other_columns = {
            f"{COLUMN_TYPES}.text": analyze_text,
            f"{COLUMN_TYPES}.json": analyze_json,
            f"{COLUMN_TYPES}.anything": analyze_anything,
        }
        return other_columns.get(fullname)

    def get_additional_deps(self, file: MypyFile) -> list[tuple[int, str, int]]:
        """Load the modules of the values' types before each file that may use a column annotation."""
        is_shipped = file.fullname.startswith("rlgraph.nodes")
        if not is_shipped and not _imports_ops(file):
            return []
        priority_of_an_import = 10
        return [(priority_of_an_import, module, -1) for module in ("torch._tensor", RAGGED_MODULE)]


def _imports_ops(file: MypyFile) -> bool:
    """Return whether a file imports ``rlgraph.ops`` or one of its modules."""
    modules = []
    for statement in file.imports:
        if isinstance(statement, Import):
            modules += [name for name, _ in statement.ids]
        elif isinstance(statement, ImportFrom | ImportAll):
            modules.append(statement.id)
    return any(f"{module}.".startswith("rlgraph.ops.") for module in modules)


def plugin(version: str) -> type[Plugin]:
    """Return the plugin; mypy calls this by name."""
    return ColumnPlugin
