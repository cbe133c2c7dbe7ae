"""The turns of a conversation in what a chat template writes: which of its text is learnt.

    <|im_start|>user\\nq<|im_end|>\\n<|im_start|>assistant\\nTURN<|im_end|>\\n<|im_start|>user\\n...
    └─ begin: as a rollout has it begun ──────────────┘└─ learnt ──┘
    └─ ended: the conversation up to the turn ─────────────────────┘

Both are prefixes of the text of the whole conversation: of ``ended`` all but what a template writes at the
end of a conversation alone. Where they are not, no tokens would be those of a rollout: the row is refused.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlgraph.nodes.support.chat_template import REMEDY, TemplateError, rendered
from rlgraph.nodes.support.template_reads import for_template, options_of_template, source_of_template

TextSpan = tuple[int, int]  # from a character of a text, and up to another
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # keys under which messages have them
GENERATION = re.compile(r"\{%-?\s*generation\b")  # a template that tells itself what the assistant wrote


def is_marked(tokenizer: Any, options: Mapping[str, Any] | None) -> bool:
    """Return whether a template marks what the assistant wrote by {% generation %}."""
    return GENERATION.search(source_of_template(tokenizer, options)) is not None


def turn_span(
    tokenizer: Any,
    talk: Sequence[Mapping[str, Any]],
    place: int,
    conversation_text: str,
    begin: str,
    ended: str,
) -> TextSpan:
    """Return where a turn stands in the text of its conversation, its end token included.

    ``begin`` is the text of what is before the turn, with the turn begun; ``ended`` that up to the turn's
    end; of the last turn, with a next one begun.

    Raises:
        TemplateError: the template writes the turn otherwise once it is begun by it, or others follow.
    """
    if not conversation_text.startswith(begin):
        law = f"the chat template of {tokenizer.name_or_path} does not write turn {place + 1} of a "
        law += "conversation as it has it begun, so what is learnt can't be told"
        raise TemplateError(f"{law}; {REMEDY}, in which {{% generation %}} marks it")
    is_last = place == len(talk) - 1
    if is_last:
        turn = _last_turn(tokenizer, conversation_text[len(begin) :], ended[len(begin) :])
    else:
        turn = _earlier_turn(tokenizer, place, conversation_text[len(begin) :], ended[len(begin) :])
    turn = _up_to_end(tokenizer, turn)
    return len(begin), len(begin) + len(turn)


def refuse_unsaid(
    tokenizer: Any,
    talk: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any] | None,
    learnt: Sequence[int],
    turn_texts: Sequence[str],
) -> None:
    """Refuse a conversation of whose learnt turns the template leaves out something.

    ``turn_texts`` is the text that is learnt of each; of a template that marks it, one text for all of them.

    Raises:
        TemplateError: content, thoughts or a call of a turn are not in what is learnt of it.
    """
    if len(turn_texts) != len(learnt):
        turn_texts = ["".join(turn_texts)] * len(learnt)
    for place, text in zip(learnt, turn_texts, strict=True):
        squeezed = "".join(text.split())
        for key in ("content", *THOUGHTS):
            words = talk[place].get(key)
            if not isinstance(words, str) or "".join(words.split()) in squeezed:
                continue
            subject = "the content" if key == "content" else repr(key)
            law = f"the chat template of {tokenizer.name_or_path} does not write {subject} of turn "
            law += f"{place + 1} as it is given"
            raise TemplateError(f"{law}; {REMEDY}, or give thoughts as reasoning_content")
        _refuse_unsaid_calls(tokenizer, talk, options, place, text)


def _refuse_unsaid_calls(
    tokenizer: Any,
    talk: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any] | None,
    place: int,
    text: str,
) -> None:
    """Refuse calls that a template writes without the function's name, or of which it writes the first alone.

    Kimi K2 writes the id of a call in place of the name, gpt-oss one call per turn.
    """
    calls = talk[place].get("tool_calls", [])
    law = f"the chat template of {tokenizer.name_or_path} does not write"
    for call in calls:
        name = call["function"]["name"]
        if name not in text:
            law = f"{law} the name {name!r} of the function that turn {place + 1} calls"
            remedy = f"where it writes the id of a call, give ids as functions.{name}:0"
            raise TemplateError(f"{law}; {REMEDY}, or, {remedy}")
    if len(calls) < 2:
        return
    talk_before = [*talk[:place]]
    written = rendered(tokenizer, [*talk_before, talk[place]], options, begun=False)
    for number in range(len(calls)):
        other_calls = [call for index, call in enumerate(calls) if index != number]
        changed = [*talk_before, {**talk[place], "tool_calls": other_calls}]
        if _renders(tokenizer, changed, options) == written:
            law = f"{law} call {number + 1} of the {len(calls)} in turn {place + 1}"
            raise TemplateError(f"{law}; {REMEDY}, or give each call a turn of its own")


def _renders(
    tokenizer: Any, talk: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None
) -> str | None:
    """Return what a template writes, or nothing where it refuses the conversation."""
    try:
        return rendered(tokenizer, talk, options, begun=False)
    except TemplateError:
        return None


def _last_turn(tokenizer: Any, text_behind: str, continued: str) -> str:
    """Return the last turn of what is behind its begin; ``continued`` goes on with one more turn.

    It ends where both part: what only the end of a conversation has (an end of text) does not belong to it.
    """
    if continued.startswith(text_behind):
        return text_behind
    chunks = _control_chunks(tokenizer, text_behind)
    common = _common_length(chunks, _control_chunks(tokenizer, continued))
    if not _are_controls(tokenizer, chunks[common:]):
        return text_behind  # it is written otherwise once it is continued, and so this says nothing
    if common and not _ends_with_control(tokenizer, chunks[:common]):
        common += 1  # by <|return|>, which becomes <|end|> when others follow
    return "".join(chunks[:common])


def _earlier_turn(tokenizer: Any, place: int, text_behind: str, ended: str) -> str:
    """Return a turn that others follow; ``ended`` is the turn as the end of a conversation has it.

    Raises:
        TemplateError: they differ in more than the token of the end.
    """
    if text_behind.startswith(ended):
        return ended
    chunks = _control_chunks(tokenizer, text_behind)
    ended_chunks = _control_chunks(tokenizer, ended)
    common = _common_length(chunks, ended_chunks)
    if common and _are_controls(tokenizer, ended_chunks[common:]):
        if _ends_with_control(tokenizer, chunks[:common]):
            return "".join(chunks[:common])
        if common < len(chunks) and chunks[common] in _controls(tokenizer):
            return "".join(chunks[: common + 1])
    law = f"the chat template of {tokenizer.name_or_path} writes turn {place + 1} of a conversation "
    law += "otherwise once others follow it, so what is learnt would not be what a rollout says"
    remedy = f"learn the last turn alone by assistant_turns: last, or {REMEDY}, "
    remedy += "in which {% generation %} marks it"
    raise TemplateError(f"{law}; {remedy}")


def _common_length(chunks: Sequence[str], other_chunks: Sequence[str]) -> int:
    """Return how many chunks two texts begin with in common."""
    common = 0
    for chunk, other_chunk in zip(chunks, other_chunks, strict=False):
        if chunk != other_chunk:
            break
        common += 1
    return common


def _up_to_end(tokenizer: Any, turn: str) -> str:
    """Return a turn without what stands behind its end token."""
    end = str(tokenizer.eos_token)
    if end in turn:
        return turn[: turn.rindex(end) + len(end)]
    stripped = turn.rstrip()
    chunks = _control_chunks(tokenizer, stripped)
    if chunks and chunks[-1] in _controls(tokenizer):
        return stripped
    return turn


def _ends_with_control(tokenizer: Any, chunks: Sequence[str]) -> bool:
    """Return whether chunks end with a control token, white space aside."""
    for chunk in reversed(chunks):
        if chunk.strip():
            return chunk in _controls(tokenizer)
    return False


def _are_controls(tokenizer: Any, chunks: Sequence[str]) -> bool:
    """Return whether chunks are control tokens alone, white space aside."""
    controls = _controls(tokenizer)
    return all(chunk in controls for chunk in chunks if chunk.strip())


def _control_chunks(tokenizer: Any, text: str) -> list[str]:
    """Return a text in chunks: control tokens, and what is between them."""
    pattern = _pattern(tokenizer)
    chunks = pattern.split(text) if pattern else [text]
    return [chunk for chunk in chunks if chunk]


def _first_control(tokenizer: Any, text: str) -> str:
    """Return the control token that a text begins with, or nothing."""
    chunks = _control_chunks(tokenizer, text)
    if chunks and chunks[0] in _controls(tokenizer):
        return chunks[0]
    return ""


@functools.lru_cache(maxsize=8)
def _controls(tokenizer: Any) -> frozenset[str]:
    """Return the tokens that a template ends turns with: those that were added to a vocabulary."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    return frozenset(added | {str(token) for token in tokenizer.all_special_tokens}) - {""}


@functools.lru_cache(maxsize=8)
def added_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids of the tokens that were added to a vocabulary, which control tokens are."""
    return frozenset(tokenizer.added_tokens_decoder)


@functools.lru_cache(maxsize=8)
def _pattern(tokenizer: Any) -> re.Pattern[str] | None:
    controls = sorted(_controls(tokenizer), key=len, reverse=True)
    if not controls:
        return None
    return re.compile(f"({'|'.join(map(re.escape, controls))})")


def is_closed(tokenizer: Any, options: Mapping[str, Any] | None, turn: str) -> bool:
    """Return whether a turn ends with a special token, or with what its template ends turns with.

    Some families do not flag the token that ends a turn as special; others end calls of tools with a token of
    the vocabulary that ends no turn.
    """
    ends = {*_special_tokens(tokenizer), *stop_tokens(tokenizer)}
    end_of_template = _end_of_template(tokenizer, source_of_template(tokenizer, options))
    if end_of_template:
        ends.add(end_of_template)
    return turn.endswith((*ends,))


@functools.lru_cache(maxsize=8)
def _special_tokens(tokenizer: Any) -> frozenset[str]:
    """Return the tokens that are flagged special, or that a tokenizer has a name for."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return frozenset(special | {*map(str, tokenizer.all_special_tokens)})


def stop_tokens(tokenizer: Any) -> frozenset[str]:
    """Return the control tokens that end a response of the model, as its files name them."""
    return _stop_tokens(tokenizer, tuple(getattr(tokenizer, "model_stop_ids", ())))


@functools.lru_cache(maxsize=8)
def _stop_tokens(tokenizer: Any, ids: tuple[int, ...]) -> frozenset[str]:
    named_ids = {str(tokenizer.eos_token), *map(str, tokenizer.convert_ids_to_tokens([*ids]))}
    return _controls(tokenizer) & named_ids


def with_stop(
    tokenizer: Any, options: Mapping[str, Any] | None, conversation_text: str, span: TextSpan
) -> TextSpan:
    """Return a turn with the token that the next message begins with, where a rollout stops by saying it.

    Of GLM 4.5, whose template ends no turn, this is <|user|> or <|observation|>.
    """
    start, stop = span
    if is_closed(tokenizer, options, conversation_text[start:stop]):
        return span
    stops = [token for token in stop_tokens(tokenizer) if conversation_text.startswith(token, stop)]
    return start, stop + max(map(len, stops), default=0)


def closing_id(tokenizer: Any, options: Mapping[str, Any] | None, turn: str, calls_tools: bool) -> int | None:
    """Return the id of the token that a rollout would end a turn with; None where the turn has it.

    Where the template writes none, it is the one that the next message would begin with, if the model stops
    at it, else the end of text.
    """
    if is_closed(tokenizer, options, turn):
        return None
    token = _next_message(tokenizer, source_of_template(tokenizer, options), calls_tools)
    if token not in stop_tokens(tokenizer):
        token = str(tokenizer.eos_token)
    return int(tokenizer.convert_tokens_to_ids(token))


PROBE_ASKED = {"role": "user", "content": "a question"}
PROBE_ANSWER = {"role": "assistant", "content": "probe-answer"}
PROBE_CALL = {"id": "000000000", "type": "function", "function": {"name": "probe", "arguments": {}}}
PROBE_RESULT = {"role": "tool", "tool_call_id": "000000000", "name": "probe", "content": "a result"}


@functools.lru_cache(maxsize=16)
def _end_of_template(tokenizer: Any, source: str) -> str:
    """Return the control token that a template writes behind what the assistant says, or nothing."""
    options = options_of_template(tokenizer, source)
    try:
        text = rendered(tokenizer, [PROBE_ASKED, PROBE_ANSWER], options, begun=False)
    except TemplateError:  # it takes no such conversation: special tokens alone tell
        return ""
    text_behind = text.rpartition(PROBE_ANSWER["content"])[2].strip()
    return _first_control(tokenizer, text_behind)


@functools.lru_cache(maxsize=16)
def _next_message(tokenizer: Any, source: str, calls_tools: bool) -> str:
    """Return the control token that a message behind a turn of the assistant begins with, or nothing."""
    talk: list[dict[str, Any]] = [PROBE_ASKED, PROBE_ANSWER, PROBE_ASKED]
    if calls_tools:
        talk = [PROBE_ASKED, {**PROBE_ANSWER, "tool_calls": [PROBE_CALL]}, PROBE_RESULT]
    options = options_of_template(tokenizer, source)
    try:
        talk = for_template(tokenizer, talk, options)
        text_before = rendered(tokenizer, talk[:2], options, begun=False)
        conversation_text = rendered(tokenizer, talk, options, begun=False)
    except TemplateError:
        return ""
    if not conversation_text.startswith(text_before):
        return ""
    return _first_control(tokenizer, conversation_text[len(text_before) :])


def marked_spans(
    tokenizer: Any,
    talk: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any] | None,
    places: Sequence[int],
    all_turns: bool,
) -> tuple[str, list[TextSpan]]:
    """Return the text of a conversation and what {% generation %} marks of some of its turns.

    Raises:
        TemplateError: the template can't write it, or marks nothing of one of them.
    """
    text, spans = _marked(tokenizer, talk, options)
    if all_turns:
        return text, spans
    chosen = []
    for place in places:
        _, spans_before = _marked(tokenizer, talk[:place], options)
        _, spans_with_turn = _marked(tokenizer, talk[: place + 1], options)
        spans_of_turn = spans[len(spans_before) : len(spans_with_turn)]
        if len(spans_before) == len(spans_with_turn):
            law = f"the chat template of {tokenizer.name_or_path} marks nothing of turn {place + 1} by "
            raise TemplateError(f"{law}{{% generation %}}; {REMEDY}")
        chosen += spans_of_turn
    return text, chosen


def _marked(
    tokenizer: Any, talk: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None
) -> tuple[str, list[TextSpan]]:
    """Return a text and the characters that are marked: in order, empty ones left out."""
    from transformers.utils.chat_template_utils import render_jinja_template

    more = dict(options or {})
    source = more.pop("chat_template", None)
    try:
        template = tokenizer.get_chat_template(source, more.get("tools"))
        tools, documents = more.pop("tools", None), more.pop("documents", None)
        # transformers 5.17 annotates what it returns as a text; with this mask it is texts, and each one's
        # spans as (start, end)
        render: Callable[..., Any] = render_jinja_template
        texts, spans = render(
            conversations=[[dict(message) for message in talk]],
            tools=tools,
            documents=documents,
            chat_template=template,
            return_assistant_tokens_mask=True,
            add_generation_prompt=False,
            **{**tokenizer.special_tokens_map, **more},
        )
    except Exception:
        rendered(tokenizer, talk, options, begun=False)  # says what is wrong with it
        raise
    return str(texts[0]), [(start, end) for start, end in spans[0] if end > start]
