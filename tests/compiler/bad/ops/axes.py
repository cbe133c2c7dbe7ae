from rlgraph.ops import FixedAxis, float32, op, samples, text


class turns(FixedAxis): ...


@op()
def without(responses: text[samples]) -> float32[samples, turns]: ...


@op()
def sized(responses: text[samples], *, turns: int = 4) -> float32[samples, turns]: ...


@op()
def first(turns: float32[samples, turns]) -> float32[samples]: ...
