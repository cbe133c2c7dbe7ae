"""Tell which tokens a column is along, and whose vocabulary they are of: only then may ragged columns meet.

In a signature the name of a token axis is a variable. Columns that share it are along the same tokens, and
those of ``other_tokens`` may be along others. What an op writes along an axis of which it reads nothing, it
made.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import field

from rlgraph.errors import Problem
from rlgraph.frontend.vocabularies import share_tokens
from rlgraph.ir.graph import Column, Model, Node
from rlgraph.ops.declare import Port
from rlgraph.records import dataclass


@dataclass(frozen=True)
class AxisOrigin:
    """An axis of tokens: the node that made them, and the model whose tokenizer numbers them, if one does."""

    maker: str
    model: str | None


@dataclasses.dataclass
class TokenAxes:
    """The axes of columns, node by node; ``unknown``: pairs of models that a graph does not compare.

    Invariants:
        - nodes are bound writers before readers: a column along tokens is in ``columns`` before it is read;
        - ``bound_axes`` are those of the node bound last, and of no other;
        - tokens in ``joined`` are those of a merged column, and stand for the tokens of all its parts.
    """

    models: Mapping[str, Model]
    columns: dict[str, AxisOrigin] = field(default_factory=dict)
    masks: dict[AxisOrigin, str] = field(default_factory=dict)  # the first boolean column of each
    bound_axes: dict[str, AxisOrigin] = field(default_factory=dict)  # those of the node bound last, by name
    unknown: dict[tuple[str, str], str] = field(default_factory=dict)
    joined: dict[AxisOrigin, list[AxisOrigin]] = field(default_factory=dict)  # of columns that are merged

    def bind(
        self, node: Node, reads: Sequence[tuple[Port, Column]], outs: Mapping[str, str], makers: Set[str]
    ) -> Iterator[Problem]:
        """Yield what is wrong with the tokens that a node asks for, and note whose those are that it writes.

        Where they are of several, those of ``makers``, which made the node's rows, are taken for right.
        """
        self.bound_axes = {}
        columns_along: dict[str, list[Column]] = {}
        for port, column in reads:
            if port.type.axis:
                columns_along.setdefault(port.type.axis, []).append(column)
        for axis, columns in columns_along.items():
            tokens = self._tokens_of(columns, makers)
            self.bound_axes[axis] = tokens
            strangers = [column for column in columns if self.columns[column.name] != tokens]
            if strangers:
                kind = next(column.type.domain for column in columns if self.columns[column.name] == tokens)
                yield self._other_tokens(node, strangers[0], tokens, kind)
        model = node.model or node.tokenizer
        if model:
            for tokens in dict.fromkeys(self.bound_axes.values()):
                for origin in self.joined.get(tokens, [tokens]):
                    yield from self._numbered(node, model, origin)
        self._note_outputs(node, outs, model)

    def _tokens_of(self, columns: Sequence[Column], makers: Set[str]) -> AxisOrigin:
        """Return the tokens that some columns are along; of several, those of a node that made the rows."""
        origins = [self.columns[column.name] for column in columns]
        for tokens in origins:
            if tokens.maker in makers:
                return tokens
        return origins[0]

    def _note_outputs(self, node: Node, outs: Mapping[str, str], model: str | None) -> None:
        """Note which tokens the columns are along that a node writes: those that it reads, or its own."""
        if not model:
            model = next((tokens.model for tokens in self.bound_axes.values()), None)
        new = AxisOrigin(node.name, model)
        for port in node.op.outputs:
            axis = port.type.axis
            if not axis:
                continue
            column = outs[port.name]
            # rows that a node makes have tokens of their own
            is_new = bool(node.op.declared.makes) or axis not in self.bound_axes
            self.columns[column] = new if is_new else self.bound_axes[axis]
            if port.type.dtype == "boolean":
                self.masks.setdefault(self.columns[column], column)

    def join(self, name: str, columns: Sequence[Column]) -> None:
        """Note whose the tokens are of several columns in one: those of each, where they are of several."""
        if not columns[0].type.axis:
            return
        origins = [*dict.fromkeys(self.columns[column.name] for column in columns)]
        tokens = origins[0]
        if len(origins) > 1:
            makers = "` and `".join(origin.maker for origin in origins)
            tokens = AxisOrigin(makers, origins[0].model)
        self.columns[name] = tokens
        self.joined[tokens] = origins

    def is_along_bound_tokens(self, port: Port, column: Column) -> bool:
        """Return whether a column is along the tokens that the node bound last reads through such a port."""
        axis = port.type.axis
        return axis not in self.bound_axes or self.columns[column.name] == self.bound_axes[axis]

    def _other_tokens(self, node: Node, column: Column, tokens: AxisOrigin, kind: str) -> Problem:
        """Return the problem of a column that is along other tokens than what a node reads beside it."""
        origin = self.columns[column.name]
        law = f"node `{node.name}` reads `{column.name}`, which is along the tokens of `{origin.maker}`; "
        law += f"the rest that it reads is along those of `{tokens.maker}`"
        name = f"{column.name}_here"
        if column.type.dtype != "float32" or column.type.fixed:
            remedy = f"map the parameter to a column along the tokens of `{tokens.maker}`, by `in`"
        elif kind != column.type.domain:
            call = f"{{op: segment.align, on: {column.name}, in: {{values: {column.name}}}}}"
            remedy = f"bring it to the {kind}: insert: {{{name}: {call}}}"
        else:
            mask = self.masks.get(origin, "MASK")
            remedy = f"what is the same text in both is realigned: insert: {{{name}: {{op: realign, "
            remedy += f"on: {column.name}, in: {{values: {column.name}, values_mask: {mask}}}}}}}"
        return Problem("other-tokens", law, node.mark, (), remedy)

    def _numbered(self, node: Node, name: str, tokens: AxisOrigin) -> Iterator[Problem]:
        """Yield a problem where a model reads tokens of another vocabulary; note where that is not known."""
        if tokens.model is None:
            return
        model = self.models[name]
        source = self.models[tokens.model]
        shared, is_known = share_tokens(model, source)
        numbered = f"tokens that `{source.name}` ({source.path}) numbers"
        if not is_known:
            law = f"`{name}` ({model.path}) reads {numbered}: that it numbers them alike is known where both "
            law += "have a tokenizer.json (or say it: give both models one `vocabulary`, a name)"
            self.unknown[name, source.name] = law
        if shared:
            return
        law = f"node `{node.name}` ({node.op.name}) reads with `{name}` ({model.path}) {numbered} otherwise"
        remedy = f"choose a `{name}` with the tokenizer of `{source.name}`; if the tokens that occur are the "
        remedy += "same, say so: set: "
        remedy += f"{{models.{name}.vocabulary: shared, models.{source.name}.vocabulary: shared}}"
        yield Problem("other-vocabulary", law, node.mark, (), remedy)
