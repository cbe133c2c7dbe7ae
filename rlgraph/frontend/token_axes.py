"""Whose tokens a column is along, and of whose vocabulary: being ragged is not enough for columns to meet.

In a signature the name of a token axis is a variable. Columns that share it are along the same tokens, and
those of ``other_tokens`` may be along others. What an op writes along an axis of which it reads nothing, it
made.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from rlgraph.errors import Problem
from rlgraph.frontend.vocabularies import share_tokens
from rlgraph.ir.graph import Column, Model, Node
from rlgraph.ops.declare import Port


@dataclass(frozen=True)
class AxisOrigin:
    """An axis of tokens: the node that made them, and the model whose tokenizer numbers them, if one does."""

    maker: str
    model: str | None


@dataclass
class TokenAxes:
    """The axes of columns, node by node; ``unknown``: pairs of models that a graph does not compare."""

    models: Mapping[str, Model]
    columns: dict[str, AxisOrigin] = field(default_factory=dict)
    masks: dict[AxisOrigin, str] = field(default_factory=dict)  # the first boolean column of each
    here: dict[str, AxisOrigin] = field(default_factory=dict)  # of the node that was bound last
    unknown: dict[tuple[str, str], str] = field(default_factory=dict)
    joined: dict[AxisOrigin, list[AxisOrigin]] = field(default_factory=dict)  # of columns that are merged

    def bind(
        self, node: Node, reads: Sequence[tuple[Port, Column]], outs: Mapping[str, str], makers: Set[str]
    ) -> Iterator[Problem]:
        """Yield what is wrong with the tokens that a node asks for, and note whose those are that it writes.

        Where they are of several, those of ``makers``, which made the node's rows, are taken for right.
        """
        self.here = read = {}
        for axis in dict.fromkeys(port.type.axis for port, _ in reads if port.type.axis):
            columns = [column for port, column in reads if port.type.axis == axis]
            along = [self.columns[column.name] for column in columns]
            read[axis] = next((tokens for tokens in along if tokens.maker in makers), along[0])
            told = [(column, tokens == read[axis]) for column, tokens in zip(columns, along, strict=True)]
            if others := [column for column, its_own in told if not its_own]:
                kind = next(column.type.domain for column, its_own in told if its_own)
                yield self._others(node, others[0], read[axis], kind)
        model = node.model or node.tokenizer
        if model:
            each = [tokens for axis in {*read.values()} for tokens in self.joined.get(axis, [axis])]
            yield from (problem for tokens in each if (problem := self._numbered(node, model, tokens)))
        made = AxisOrigin(node.name, model or next((tokens.model for tokens in read.values()), None))
        for port in node.op.outputs:
            if port.type.axis:
                # the tokens of rows that it makes are its own
                own = node.op.declared.makes or port.type.axis not in read
                self.columns[outs[port.name]] = made if own else read[port.type.axis]
                if port.type.dtype == "boolean":
                    self.masks.setdefault(self.columns[outs[port.name]], outs[port.name])

    def join(self, name: str, parts: Sequence[Column]) -> None:
        """Note whose the tokens are of several columns in one: those of each, where they are of several."""
        if parts[0].type.axis:
            along = [*dict.fromkeys(self.columns[part.name] for part in parts)]
            made = AxisOrigin("` and `".join(tokens.maker for tokens in along), along[0].model)
            self.columns[name] = along[0] if len(along) == 1 else made
            self.joined[self.columns[name]] = along

    def is_here(self, port: Port, column: Column) -> bool:
        """Return whether a column is along the tokens that the node bound last reads through such a port."""
        axis = port.type.axis
        return axis not in self.here or self.columns[column.name] == self.here[axis]

    def _others(self, node: Node, column: Column, tokens: AxisOrigin, kind: str) -> Problem:
        other = self.columns[column.name]
        law = f"node `{node.name}` reads `{column.name}`, which is along the tokens of `{other.maker}`; "
        law += f"the rest that it reads is along those of `{tokens.maker}`"
        remedy = f"map the parameter to a column along the tokens of `{tokens.maker}`, by `in`"
        if column.type.dtype == "float32" and not column.type.fixed:
            name, mask = f"{column.name}_here", self.masks.get(other, "MASK")
            op = f"{{op: segment.align, on: {column.name}, in: {{values: {column.name}}}}}"
            remedy = f"what is the same text in both is realigned: insert: {{{name}: {{op: realign, "
            remedy += f"on: {column.name}, in: {{values: {column.name}, values_mask: {mask}}}}}}}"
            if kind != column.type.domain:
                remedy = f"bring it to the {kind}: insert: {{{name}: {op}}}"
        return Problem("other-tokens", law, node.mark, (), remedy)

    def _numbered(self, node: Node, name: str, tokens: AxisOrigin) -> Problem | None:
        """Check that a model reads tokens of its own vocabulary."""
        if tokens.model is None:
            return None
        model, other = self.models[name], self.models[tokens.model]
        shared, told_by_graph = share_tokens(model, other)
        told = f"tokens that `{other.name}` ({other.path}) numbers"
        if not told_by_graph:
            law = f"`{name}` ({model.path}) reads {told}: that it numbers them alike is known where both "
            law += "have a tokenizer.json (or say it: give both models one `vocabulary`, a name)"
            self.unknown[name, other.name] = law
        if shared:
            return None
        law = f"node `{node.name}` ({node.op.name}) reads with `{name}` ({model.path}) {told} otherwise"
        remedy = f"choose a `{name}` with the tokenizer of `{other.name}`; if the tokens that occur are the "
        remedy += "same, say so: set: "
        remedy += f"{{models.{name}.vocabulary: shared, models.{other.name}.vocabulary: shared}}"
        return Problem("other-vocabulary", law, node.mark, (), remedy)
