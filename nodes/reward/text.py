"""The answer in a response, and rewards for words: equal ones, those that both have, or a pattern."""

import re
import string
from collections import Counter
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator

from rlgraph.nodes.support.lazy import torch
from rlgraph.nodes.support.row_field import DataError
from rlgraph.ops import SPREAD, Context, float32, json, op, samples, text

PUNCTUATION = str.maketrans("", "", string.punctuation)
BOX = re.compile(r"\\boxed\s*\{")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped one, as in \{1, 2\}, is text


def compilable(pattern: str) -> str:
    """Return a pattern as it is.

    Raises:
        ValueError: it is not a regular expression.
    """
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error
    return pattern


Pattern = Annotated[str, AfterValidator(compilable)]


def alternatives(answer: list[str] | None, answers: list[Any] | None) -> list[list[str]]:
    """Return what is right for each sample: all of ``answers`` where there is such a column, else ``answer``.

    Raises:
        DataError: a value of ``answers`` is neither a text or number nor a list of such, or an empty list.
    """
    if answers is None:
        assert answer is not None, "one of both columns is bound"
        return [[reference] for reference in answer]
    right_of_samples = []
    for value in answers:
        references = value if isinstance(value, list) else [value]
        if not references or not all(map(_is_text_or_number, references)):
            law = f"answers: {str(value)[:60]!r} is not a list of texts"
            raise DataError(f"{law}; correct the rows, or name another field of the files in columns:")
        right_of_samples.append([*map(str, references)])
    return right_of_samples


def _is_text_or_number(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


@op(assumes=("answered",))
def exact(
    ctx: Context,
    responses: text[samples],
    answer: text[samples] | None,
    answers: json[samples] | None = None,
) -> float32[samples]:
    """1.0 if the response is the answer, apart from white space at both ends, else 0.0.

    With a column ``answers``, lists of right answers (``columns: {answers: json}`` of data.prompts), any of
    them counts, and ``answer`` is not read. Records ``reward/mean``.

    Example:
        rewards: {op: reward.exact}
    """
    scores = []
    for response, references in zip(responses, alternatives(answer, answers), strict=True):
        stripped = [reference.strip() for reference in references]
        scores.append(float(response.strip() in stripped))
    ctx.record("reward/", scores, kind=SPREAD)
    return torch.tensor(scores, dtype=torch.float32)


@op(assumes=("answered",))
def f1(
    ctx: Context,
    responses: text[samples],
    answer: text[samples] | None,
    answers: json[samples] | None = None,
) -> float32[samples]:
    """Token F1 of the response and the answer, 0 to 1, as SQuAD measures it (arXiv 1606.05250).

    2 c / (r + a): c is the number of words in common, counting repeated words as often as both have them, r
    and a the number of words in each. Words are separated by white space, after letters are lower-cased,
    ASCII punctuation is removed and the words a, an and the are dropped. 1 if neither has a word left, 0 if
    only one has none. With a column ``answers``, lists of right answers, it is the maximum over these.
    Records ``reward/mean``.

    Example:
        rewards: {op: reward.f1}
    """
    scores = []
    for response, references in zip(responses, alternatives(answer, answers), strict=True):
        scores.append(max(overlap(response, reference) for reference in references))
    ctx.record("reward/", scores, kind=SPREAD)
    return torch.tensor(scores, dtype=torch.float32)


@op()
def extract(ctx: Context, responses: text[samples], *, pattern: Pattern | None = None) -> text[samples]:
    r"""The answer in each response, which any reward can read in place of the response.

    The content of the last ``\boxed{...}``, or the last match of a regular expression: its first group, or
    the whole match if it has no group. It is empty if there is no match, or if the last box is not closed.
    White space at both ends is removed. The pattern is trusted, and is read like that of reward.format.
    Records ``found`` under the node's name, the fraction of responses with an answer.

    Attributes:
        pattern: a regular expression that finds the answer, such as ``<answer>(.*?)</answer>``; null: the
            last box.

    Example:
        final: {op: extract}
        rewards: {op: reward.f1, in: {responses: final}}
    """
    find_last = last_box if pattern is None else partial(last_match, re.compile(pattern, re.DOTALL))
    answers = [find_last(response).strip() for response in responses]
    ctx.record("found", [bool(answer) for answer in answers], kind="share")
    return answers


@op()
def form(ctx: Context, responses: text[samples], *, pattern: Pattern) -> float32[samples]:
    r"""1.0 if a regular expression matches the whole response, apart from white space at both ends, else 0.0.

    Python's ``re``, with ``.`` matching line breaks too. The pattern is trusted: nothing limits the time of
    one that backtracks endlessly (``(a+)+b``). The format reward of DeepSeek-R1 (arXiv 2501.12948). Records
    ``mean`` under the node's name, since it is used beside another reward.

    Attributes:
        pattern: what a response must look like, such as ``<think>.+</think>.*\\boxed\{.+\}.*``.

    Example:
        formatted: {op: reward.format, pattern: "<think>.+</think>.+"}
    """
    wanted = re.compile(pattern, re.DOTALL)
    scores = [float(wanted.fullmatch(response.strip()) is not None) for response in responses]
    ctx.record("mean", scores)
    return torch.tensor(scores, dtype=torch.float32)


def last_box(response: str) -> str:
    r"""Return what stands in the last box of a text; nothing where it is not closed.

    Example:
        >>> last_box(r"\boxed{1} or rather \boxed{\frac{1}{2}}.")
        '\\frac{1}{2}'
    """
    boxes = list(BOX.finditer(response))
    if not boxes:
        return ""
    start = boxes[-1].end()
    depth = 1
    for brace in BRACE.finditer(response, start):
        if brace[0] == "{":
            depth += 1
        elif brace[0] == "}":
            depth -= 1
        if depth == 0:
            return response[start : brace.start()]
    return ""


def last_match(pattern: re.Pattern[str], response: str) -> str:
    """Return the first group of the last match, or the match where there is no group; nothing without one.

    Example:
        >>> last_match(re.compile("Answer: (.*)"), "Answer: 4")
        '4'
    """
    matches = pattern.findall(response)
    if not matches:
        return ""
    groups = matches[-1]  # a tuple where the pattern has several
    return groups if isinstance(groups, str) else str(groups[0])


def overlap(response: str, wanted: str) -> float:
    """Return the F1 of two texts.

    Example:
        >>> overlap("The cat sat.", "a cat")
        0.6666666666666666
    """
    ours, theirs = Counter(words(response)), Counter(words(wanted))
    if not ours and not theirs:
        return 1.0
    return 2 * (ours & theirs).total() / (ours.total() + theirs.total())


def words(response: str) -> list[str]:
    """Return the words of a text that count.

    Example:
        >>> words("It's  the U.S.A., an\\nEXAMPLE")
        ['its', 'usa', 'example']
    """
    return re.sub(r"\b(a|an|the)\b", " ", response.lower().translate(PUNCTUATION)).split()
