"""Settings of one serve engine each: what stands under the engine's name in ``models.NAME.serve``.

An engine's record in ``registry.py`` names its section. Settings that a plan has for any engine, such as
``max_rows`` and ``tensor_parallel``, are in the section ``serve`` itself.
"""

from typing import Annotated, Literal

from pydantic import Field

from rlgraph.section import Count, Natural, Positive, Section, option


class ServerSettings(Section):
    """The settings that all engines share which send requests to servers."""

    request_timeout: Positive | None = None
    """seconds that a sample may take; after that it is ended and requested again. null: half of
    `schedule.timeout`, which leaves as much time for a second try before the step fails."""
    request_retries: Natural = 120
    """how often a sample is requested again after a timeout or from a busy server; after that the run
    ends."""
    addresses: list[Annotated[str, Field(pattern=r"^https?://[^/\s]+/?$")]] = Field(default=[])
    """servers that already run, as in http://host:30000; the run then starts none. Their API key is read from
    an environment variable of the workers, such as SGLANG_API_KEY."""
    options: dict[str, str | bool | int | float] = Field(default={})
    """settings of the engine for which rlgraph has no name: fields of ServerArgs for sglang, as in
    {attention_backend: fa3}, and fields of a request for openai. Settings that the run itself decides are
    refused."""


class SglangSettings(ServerSettings):
    """Settings of SGLang, whose servers the run starts or reaches at `addresses`."""

    hosts: Count = option(1, "whole hosts that one engine spans.")
    expert_parallel: Count = option(1, "devices of an engine among which experts are divided.")
    attention_replicas: Count = option(1, "copies of attention in an engine, each with rows of its own.")
    quantization: Literal["fp8"] | None = None
    """on Hopper GPUs: fp8 serves linear layers in 8 bits, by blocks; null: serve them in dtype."""
    restarts: Natural = 3
    """how often in a run a lost server is restarted and its requests are sent again. Above 0, a copy of its
    weights stays in its host's memory, except on a GPU that also trains them: there the next weight sync
    restores them."""
    start_timeout: Positive = option(600.0, "seconds within which a server must be up.")


class OpenAISettings(ServerSettings):
    """Settings of an OpenAI completions endpoint, whose servers already run."""
