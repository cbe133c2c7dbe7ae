"""The error of a function that can't be an op, before it is known which graph names it."""

from collections.abc import Iterable


class OpError(Exception):
    """A function can't be an op: says which part of its declaration is wrong, and what to write instead.

    Attributes:
        law: what is wrong.
        accepted: what may stand there.
        remedy: how to mend it.
        argument: the argument of ``@op`` that is wrong; empty: another part of the function.
        function: the function, where it is known.
    """

    def __init__(
        self,
        law: str,
        accepted: Iterable[str] = (),
        remedy: str = "",
        argument: str = "",
        function: object = None,
    ) -> None:
        self.law = law
        self.accepted = tuple(accepted)
        self.remedy = remedy
        self.argument = argument
        self.function = function
        super().__init__(law)

    def __str__(self) -> str:
        lines = [self.law]
        if self.accepted:
            lines.append(f"  accepted: {', '.join(self.accepted)}")
        if self.remedy:
            lines.append(f"  {self.remedy}")
        return "\n".join(lines)
