"""The attributes that all rollouts share: how many responses, how long, and how their tokens are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat

from rlgraph.errors import RunError
from rlgraph.ops import Context, Sampling
from rlgraph.ops.attribute_group import AttributeGroup
from rlgraph.ops.declare import Role
from rlgraph.records import dataclass

SAMPLING_ROLES: dict[Role, str] = {
    "response_limit": "max_new_tokens",
    "total_limit": "max_total_tokens",
    "temperature": "temperature",
    "nucleus": "top_p",
}
# these cuts decide nothing at temperature 0: any of them leaves the most likely token
CUTS_WITH_TEMPERATURE = {"top_p": "temperature", "top_k": "temperature", "min_p": "temperature"}
AtLeastOne = Annotated[int, Field(ge=1)]
StopText = Annotated[str, Field(min_length=1)]
StopId = Annotated[int, Field(ge=0)]
Repetition = Annotated[float, Field(gt=0, le=2)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


@dataclass(frozen=True, kw_only=True)
class ResponseLimits(AttributeGroup):
    """The number of responses that each prompt gets, and the limits of their lengths.

    Attributes:
        n: responses per prompt, at least 1.
        max_new_tokens: the most tokens of a response; a response that reaches it is ``truncated``.
        max_total_tokens: the most tokens of a prompt and its response together; null: no such limit. A
            response then gets at most the tokens that its prompt leaves, and never more than max_new_tokens.
    """

    n: Annotated[int, Field(ge=1)] = 1
    max_new_tokens: Annotated[int, Field(ge=1)]
    max_total_tokens: Annotated[int, Field(ge=2)] | None = None

    def of_prompts(self, ctx: Context, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Return the most tokens that the response to each prompt may have.

        Raises:
            RunError: a prompt is as long as ``max_total_tokens`` and leaves no token for a response.
        """
        total = self.max_total_tokens
        if total is None:
            return [self.max_new_tokens] * len(prompts)
        for row, ids in enumerate(prompts):
            if len(ids) >= total:
                law = f"`{ctx.node}`: prompt {ctx.number(row)} of the batch has {len(ids):,} tokens: within "
                law += f"max_total_tokens ({total:,}) there is no room for a response"
                remedy = f"let data.prompts drop such questions, by max_prompt_tokens: {total - 1}, "
                raise RunError(f"{law}\n  {remedy}or raise it")
        return [min(self.max_new_tokens, total - len(ids)) for ids in prompts]


@dataclass(frozen=True, kw_only=True)
class SamplingAttributes(AttributeGroup):
    """Settings by which the tokens of a response are drawn, and what ends it.

    Attributes:
        temperature: the number by which the logits are divided; 0 takes the most likely token.
        top_p: keep the smallest set of most likely tokens whose total probability reaches this; 1 keeps all.
        top_k: how many of the most likely tokens are kept; 0 keeps all.
        min_p: tokens less likely than this share of the most likely one are dropped; 0 keeps all.
        stop: texts that end a response; the text is part of the response, up to the end of the token that
            completes it.
        stop_token_ids: ids of tokens that end a response; the token is part of the response.
        repetition_penalty: by how much tokens that are already in the response become less likely; 1: not at
            all.
        presence_penalty: subtracted from the logits of such tokens.
        frequency_penalty: subtracted from them for each occurrence.
        min_new_tokens: the fewest tokens of a response before its end token.
    """

    temperature: NonNegativeFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    stop: list[StopText] = field(default_factory=list)
    stop_token_ids: list[StopId] = field(default_factory=list)
    repetition_penalty: Repetition = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    min_new_tokens: Annotated[int, Field(ge=0)] = 0

    def settings(
        self, max_new_tokens: int, grammar: Grammar | None = None, routing: bool = False
    ) -> Sampling:
        """Return what an engine is asked for, where one call draws at most ``max_new_tokens`` per sample."""
        return Sampling(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            min_new_tokens=self.min_new_tokens,
            regex=grammar.regex if grammar else None,
            json_schema=grammar.json_schema if grammar else None,
            routing=routing,
        )


@dataclass(frozen=True, kw_only=True)
class Grammar(AttributeGroup):
    """The form that a response has to have.

    Attributes:
        regex: a regular expression that every response matches (sglang only).
        json_schema: a JSON schema that every response conforms to (sglang only).
    """

    regex: str | None = None
    json_schema: dict[str, Any] | None = None
