"""A sample as an OpenAI-compatible completions endpoint is asked for it, and as it answers.

Token ids go in as ``prompt``. That they come out too is an extension, which servers have in two forms:

vLLM, SGLang    `return_token_ids`; ids in `choices[0].token_ids`. vLLM before 0.10.2 knows only
                `return_tokens_as_token_ids`; ids in `logprobs.tokens`, as `token_id:42`
TensorRT-LLM    `detokenize: false`; ids in `choices[0].token_ids`. Fields that it lacks are refused

Sources: vllm-project/vllm#22587, sgl-project/sglang#30917, openai_protocol.py in NVIDIA/TensorRT-LLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlgraph.errors import RunError
from rlgraph.ops.interfaces import Generation, Request, Sampling
from rlgraph.runtime.engines.servers.endpoint import Endpoint
from rlgraph.runtime.engines.servers.sample_request import SampleRequest
from rlgraph.runtime.messages.errors import ServerLostError

PREFIX = "token_id:"
# what a server is asked for token ids by, and a top_k that is off; the first form that it answers is taken
FORMS: tuple[dict[str, Any], ...] = (
    {"return_token_ids": True, "return_tokens_as_token_ids": True, "top_k": -1},
    {"detokenize": False, "include_stop_str_in_output": True, "top_k": 0},
)
# fields that come from the graph, or that change what a sample is
OWNED = {"prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids"}
OWNED |= {"logprobs", "n", "stream", "echo", "best_of"}.union(*FORMS)
MATCHED = ("stop_reason", "matched_stop")  # where vLLM, and SGLang, name a stop text that ended a sample


class Completions(Endpoint):
    """An endpoint of frozen weights: version 0, as long as it answers."""

    title = "OpenAI-compatible server"
    variable = "OPENAI_API_KEY"
    generates = "v1/completions"
    busy = (429, 502, 503, 504)

    def version(self) -> str | None:
        """Return the version of its weights, which never change; None where it does not answer."""
        return None if self.look("v1/models") is None else "0"


def model_of(server: Endpoint, path: str) -> str:
    """Return the name of the model that a server has: the only one, or the one that is called like ``path``.

    Raises:
        ServerLostError: the server does not answer.
        RunError: it has several models, none of that name, or asks for another key.
    """
    models = server.look("v1/models")
    if not isinstance(models, dict) or not models.get("data"):
        law = f"no OpenAI-compatible server answers at {server.url}/v1/models"
        raise ServerLostError(f"{law}\n  start it, or mend serve.openai.addresses")
    names = [str(model["id"]) for model in models["data"]]
    if path not in names and len(names) > 1:
        law = f"the server at {server.url} has several models: {', '.join(names)}"
        raise RunError(f"{law}\n  choose one: serve.openai.options={{model: {names[0]}}}")
    return path if path in names else names[0]


def body(
    request: Request, seed: int, *, sampling: Sampling, stops: Sequence[int], asked: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the call for one sample. ``asked`` are the form, the model and the graph's own fields.

    What a server takes from the model's generation_config.json otherwise is said too: ``repetition_penalty``,
    for which vLLM counts the tokens of the prompt as well.
    """
    least, most = request.limits(sampling)
    changes = {name: getattr(sampling, name) for name in ("presence_penalty", "frequency_penalty")}
    changes["min_tokens"] = least
    return {
        "repetition_penalty": sampling.repetition_penalty,
        **asked,
        **{name: value for name, value in changes.items() if value},  # TensorRT-LLM refuses unknown fields
        "prompt": list(request.prompt),
        "max_tokens": most,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or asked["top_k"],
        "min_p": sampling.min_p,
        "stop": list(sampling.stop),
        "seed": seed & 0x7FFFFFFF,
        "stop_token_ids": [*stops, *sampling.stop_token_ids],
        "logprobs": 1,
    }


def generation(sample_request: SampleRequest, chunks: Sequence[dict[str, Any]]) -> Generation:
    """Return the sample of an answer; where there is none, as it was aborted or goes on, one without tokens.

    Raises:
        RunError: the answer has no token ids, or not a log-prob for each, or goes on behind an end token.
    """
    if not chunks:
        return Generation()
    (reply,) = chunks
    choice = (reply.get("choices") or [{}])[0]
    versions = choice.get("logprobs") or {}
    logprobs = versions.get("token_logprobs") or []
    tokens = choice.get("token_ids")
    if tokens is None:
        words = versions.get("tokens") or []
        tokens = [int(word.removeprefix(PREFIX)) for word in words if word.startswith(PREFIX)]
    is_complete = len(tokens) == len(logprobs) and None not in logprobs
    if not tokens or not is_complete:
        law = f"a completions endpoint answered with {len(tokens)} token ids and {len(logprobs)} log-probs"
        raise RunError(f"{law}; as many of both are needed, at least one\n  {REMEDY}")
    ends = {*sample_request.body["stop_token_ids"]}.intersection(tokens[:-1])
    if ends:
        law = f"a completions endpoint went on behind token {min(ends)}, which ends a sample (stop_token_ids)"
        raise RunError(f"{law}\n  {REMEDY}")
    finish = choice["finish_reason"] or "abort"
    if any(isinstance(choice.get(name), str) for name in MATCHED):
        finish = "text"
    return Generation(tokens, logprobs, finish, [0] * len(tokens))


REMEDY = "use a server that does so: vLLM (0.10.2 or newer), SGLang (0.5.23) or TensorRT-LLM"
