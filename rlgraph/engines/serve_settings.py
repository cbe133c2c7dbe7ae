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
    """seconds that a sample may take; then it is ended, and asked for again. null: half of
    `schedule.timeout`, so that a second try has as long before the step is given up."""
    request_retries: Natural = 120
    """how often a sample is asked for again that took too long, or whose server was busy; then the run
    ends."""
    addresses: list[Annotated[str, Field(pattern=r"^https?://[^/\s]+/?$")]] = Field(default=[])
    """servers that run already, as http://host:30000, in place of any that the run would start. Their API
    key is taken from a variable where the workers start, such as SGLANG_API_KEY."""
    options: dict[str, str | bool | int | float] = Field(default={})
    """settings of the engine that rlgraph has no name for; those that the run decides are refused. Of sglang
    by the names of its ServerArgs, such as {attention_backend: fa3}; of openai fields of a request."""


class SglangSettings(ServerSettings):
    """Settings of SGLang, whose servers the run starts, or finds at addresses."""

    hosts: Count = option(1, "hosts that one engine spans, whole ones.")
    expert_parallel: Count = option(1, "devices of an engine that experts are dealt out to.")
    attention_replicas: Count = option(1, "copies of attention in an engine, with rows each.")
    quantization: Literal["fp8"] | None = None
    """on Hopper GPUs: fp8 serves linear layers in 8 bits, by blocks; null: in dtype."""
    restarts: Natural = 3
    """how often in a run a server that is lost is started anew and asked again. Above 0, a copy of its
    weights stays in its host's memory, but for a GPU that trains them too: there the next sync brings
    them."""
    start_timeout: Positive = option(600.0, "seconds in which a server has to be up.")


class OpenAISettings(ServerSettings):
    """Settings of an OpenAI completions endpoint, whose servers run already."""
