r"""The answer in a response, as one LaTeX text: where it stands, and how it is written.

Math-Verify 0.9.0 reads LaTeX well and responses less so: it judges thinking, joins a correction with what it
corrects, reads ``**18**`` as a power and ``12\,345`` as a sum. So the answer is found and rewritten here, by
the named steps of ``STEPS``, and Math-Verify sees nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from rlgraph.nodes.support.thinking import outside_thinking

BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
NAMED = re.compile(r"(?<![a-zA-Z\\])([a-zA-Z])(?:_\{?\w\}?)?\s*=\s*\Z")  # of a box: x = \boxed{2}
# what may stand between two boxes, formulas or numbers of one list
SEPARATOR = re.compile(r"(?:\s|\$|\\[()\[\],;:]|\\q?quad|,|;|\\text\{\s*(?:and|or)\s*\}|\band\b|\bor\b|\*)*")
LIST_SIGN = re.compile(r",|;|and|or")
# what is searched for an end may not hold its own beginning again, or else time would grow with the square
HOPE = re.compile(
    r"final answer is:?\s*((?:(?!final answer is).)+?)\.?\s*I hope it is correct", re.DOTALL | re.IGNORECASE
)
TAG = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL | re.IGNORECASE)
HASHES = re.compile(r"^[ \t]*####[ \t]+([-+$€£¥]?\s*\d[^\n]*)$", re.MULTILINE)
PHRASE = re.compile(
    r"\banswers?\b[^\n.:=]{0,60}?(?:\bis\b|\bare\b|\bbe\b|:|=|\bequals\b|\n)\s*:?", re.IGNORECASE
)
CHOICE = re.compile(r"\s*\(?([A-H])\)?(?=[\s.,)]|$)")
NUMBER = r"[-+]?[$€£¥]?(?:\d{1,3}(?:[, ]\d{3})+(?![\d])|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?%?|[-+]?\.\d+%?"
OPERAND = rf"\({{0,9}}(?:{NUMBER})\){{0,9}}"
EXPRESSION = re.compile(
    rf"(?<![\w.\\])(?:{OPERAND})(?:\s*[-+*/^×÷:]\s*(?:{OPERAND})|\s+\d+/\d+|\({NUMBER}\))*!?"
)
FORMULA = re.compile(
    r"\$\$(.+?)\$\$|\\\[((?:(?!\\\[).)+?)\\\]|\\\(((?:(?!\\\().)+?)\\\)"
    r"|(?<![\\$])\$(?=\S)([^$\n]+?)(?<=\S)(?<!\\)\$(?!\d)|(?<![\\$])\$ ([^$\n]+?) \$"
    r"|(\\frac\s*\{[^{}]*\}\s*\{[^{}]*\})",
    re.DOTALL,
)
EMPHASIS = re.compile(r"\*\*|__|`|(?<![\w*])\*(?=[^\s*])|(?<=[^\s*])\*(?![\w*])")


def answer_in(response: str) -> str:
    r"""Return the answer in a response as LaTeX; nothing where there is none.

    Example:
        >>> answer_in(r"\boxed{1}. Wait, no: \boxed{2}"), answer_in("The answer is **18** apples.")
        ('2', '18')
    """
    text = outside_thinking(response).translate(SIGNS)
    hope = HOPE.findall(text)
    if hope:
        text = hope[-1]
    tags = [tag for tag in TAG.findall(text) if tag.strip()]
    if tags:
        text = tags[-1].strip()
    if BOX.search(text):
        return normal(_boxes(text))
    hashes = HASHES.findall(text)
    if hashes:
        return normal(_first_answer(_plain(hashes[-1])) or hashes[-1])
    plain = _plain(text)
    is_one_line = "\n" not in text
    is_word = plain.strip(".").isalpha()
    if tags and is_one_line and not is_word and not FORMULA.search(text):
        return normal(plain)
    phrases = list(PHRASE.finditer(plain))
    behind_phrase = plain[phrases[-1].end() :][:400] if phrases else ""
    choice = CHOICE.match(behind_phrase)
    if choice:
        return normal(choice[1])
    return normal(_first_answer(behind_phrase) or _last_answer(plain))


def _boxes(text: str) -> str:
    """Return the last box, or the last boxes if they are one list; nothing where the last is not closed."""
    spans = _closed_boxes(text)
    if not spans:
        return ""
    *earlier_spans, (begin, _, content) = spans
    boxes = [content]
    name = _name_of_box(text, begin)
    for start, end, content in reversed(earlier_spans):
        between = text[end:begin]
        earlier_name = _name_of_box(text, start)
        if name and earlier_name == name:
            between = NAMED.sub("", between)
        if not _joins_list(between):
            break
        boxes.insert(0, content)
        begin, name = start, earlier_name
    return ", ".join(dict.fromkeys(boxes))


def _name_of_box(text: str, start: int) -> str:
    r"""Return the letter that a box is the value of, as x of ``x = \boxed{2}``, or nothing."""
    match = NAMED.search(text[max(0, start - 20) : start])
    return match[1] if match else ""


def _joins_list(between: str) -> bool:
    """Return whether what stands between two answers makes them items of one list."""
    if not SEPARATOR.fullmatch(between):
        return False
    return LIST_SIGN.search(between) is not None


def _closed_boxes(text: str) -> list[tuple[int, int, str]] | None:
    """Return the start, the end and the content of each innermost box; None where the last is not closed."""
    spans = []
    open_braces: list[tuple[int, int]] = []  # where the box begins, or -1 for another brace, and the content
    for brace in BRACE.finditer(text):
        opens = brace[0].endswith("{") and brace[0] != r"\{"
        if opens:
            is_box = len(brace[0]) > 1
            open_braces.append((brace.start() if is_box else -1, brace.end()))
        elif brace[0] == "}" and open_braces:
            start, content_start = open_braces.pop()
            if start >= 0:
                spans.append((start, brace.end(), text[content_start : brace.start()]))
    if spans:
        last_start, _, _ = max(spans)
        is_last_open = any(start > last_start for start, _ in open_braces)
        if is_last_open:
            return None
    innermost = []
    for start, end, content in sorted(spans):
        if content.strip() and "\\boxed" not in content:
            innermost.append((start, end, content))
    return innermost


def _plain(text: str) -> str:
    """Return a text without markdown's emphasis, outside of formulas."""
    texts = []
    end = 0
    for formula in FORMULA.finditer(text):
        texts.append(EMPHASIS.sub("", text[end : formula.start()]))
        texts.append(formula[0])
        end = formula.end()
    texts.append(EMPHASIS.sub("", text[end:]))
    return "".join(texts)


def _candidates(text: str) -> list[tuple[int, int, str]]:
    """Return the formulas of a text, and the numbers outside of them, with their places."""
    spans = []
    for formula in FORMULA.finditer(text):
        content = next(group for group in formula.groups() if group)
        spans.append((formula.start(), formula.end(), content))
    formulas = iter([*spans, (len(text), len(text), "")])
    start, end, _ = next(formulas)
    for number in EXPRESSION.finditer(text):
        while end <= number.start() and end < len(text):
            start, end, _ = next(formulas)
        is_outside = number.end() <= start or end <= number.start()
        if is_outside:
            spans.append((number.start(), number.end(), number[0]))
    return sorted(spans)


def _first_answer(text: str) -> str:
    """Return the first formula or number, with those that follow it in a list or in an equation."""
    spans = _candidates(text)
    if not spans:
        return ""
    text_before = text[: spans[0][0]].strip("\n ")
    if re.search(r"\n\s*\n", text_before):
        return ""
    candidates = [spans[0]]
    for span in spans[1:]:
        between = text[candidates[-1][1] : span[0]]
        if re.fullmatch(r"\s*=\s*", between):
            candidates[-1] = span
        elif _joins_list(between):
            candidates.append(span)
        else:
            break
    return ", ".join(content for _, _, content in candidates)


def _last_answer(text: str) -> str:
    """Return the last formula with those before it that are one list with it, or the last number."""
    spans = _candidates(text)
    formulas = [span for span in spans if text[span[0]] in "$\\"]
    if not formulas:
        return spans[-1][2] if spans else ""
    candidates = [formulas[-1]]
    for span in reversed(formulas[:-1]):
        between = text[span[1] : candidates[0][0]]
        if not _joins_list(between):
            break
        candidates.insert(0, span)
    return ", ".join(content for _, _, content in candidates)


SIGNS = {
    **{0xFF01 + n: chr(0x21 + n) for n in range(94)},  # full width
    **dict.fromkeys(map(ord, "\u2212\u2010\u2011\u2012\u2013\ufe63"), "-"),
    **dict.fromkeys(map(ord, "\u00a0\u2009\u202f\u2007\u3000\u2002\u2003"), " "),
    **dict.fromkeys(map(ord, "\u200b\u200c\u200d\ufeff\u2060"), ""),
}
WRITTEN = {
    "×": r"\times ", "÷": "/", "·": r"\cdot ", "⋅": r"\cdot ", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ",
    "≥": r"\ge ", "≠": r"\neq ", "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "≈": r"\approx ",
    "°": r"^\circ ", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    "⁄": "/", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "−": "-",
}  # fmt: skip
CONJUNCTION = re.compile(r"\b(?:and|or)\b")
UNIT = re.compile(r"(?<=[\d}\s)])\s*\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}(?:\s*\^\s*(?:\{?\d\}?))?")


RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
BASES = "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split()  # noqa: SIM905


def _symbols(text: str) -> str:
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", lambda m: f"^{{{m[0].translate(RAISED)}}}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉]+", lambda m: f"_{{{m[0].translate(LOWERED)}}}", text)
    text = re.sub(r"√\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"√\s*(\w+)", r"\\sqrt{\1}", text)
    return "".join(WRITTEN.get(sign, sign) for sign in text)


def _looks(text: str) -> str:
    text = re.sub(r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])\s*\.?", "", text)
    text = re.sub(r"\\(?:displaystyle|textstyle|limits)(?![a-zA-Z])", "", text)
    text = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", text).replace("{,}", ",")
    text = re.sub(r"\\!", "", text)
    return re.sub(r"(?:\\[,;: ]|~|\\q?quad(?![a-zA-Z])|\s)+", " ", text)


def _upright(text: str) -> str:
    r"""``\mathrm{i}`` and ``\mathrm{e}`` are the letters, not units."""
    return re.sub(r"\\(?:mathrm|text|mathit|operatorname)\s*\{([ied])\}", r"\1", text)


def _choices(text: str) -> str:
    r"""``\text{A and B}`` lists the letters of choices."""

    def listed(match: re.Match[str]) -> str:
        return ", ".join(re.findall(r"\b[A-Z]\b", match[1]))

    return re.sub(r"\\text\s*\{\s*([A-Z](?:\s*,\s*[A-Z])*\s*,?\s*(?:and|or)\s+[A-Z])\s*\}", listed, text)


def _units(text: str) -> str:
    """Words behind a number are its unit, and "and" or "or" among them part a list."""

    def without_unit(match: re.Match[str]) -> str:
        return ", " if CONJUNCTION.search(match[1]) else ""

    text = re.sub(r"\\text\s*\{\s*(?:and|or)\s*\}", ", ", text)
    text = UNIT.sub(without_unit, text).strip()
    text = re.sub(r"\^\{?\\circ\}?", "", text)
    text = re.sub(r"\\?[$€£¥]\s*(?=[-\d.])|(?<=\d)\s*(?:\\\$|[€£¥$])", "", text)
    if CONJUNCTION.search(text):
        return text
    return re.sub(r"(?<=\d)\s+[a-zA-Z]{2,}(?:\s+[a-zA-Z]{2,})*\s*$", "", text)


def _fractions(text: str) -> str:
    r"""``\frac12``, ``\frac\pi4``, and mixed numbers: ``3 1/2`` and ``3\frac{1}{2}`` are 7/2."""
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*(\\[a-zA-Z]+)\s*(\d)", r"\\frac{\1}{\2}", text)

    def mixed(match: re.Match[str]) -> str:
        integer, above, denominator = int(match[1]), int(match[2]), int(match[3])
        if not 0 < above < denominator:
            return match[0]
        return rf"\frac{{{integer * denominator + above}}}{{{denominator}}}"

    text = re.sub(r"(?<![\d.])(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}", mixed, text)
    return re.sub(r"(?<![\d.])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])", mixed, text)


def _repeating(text: str) -> str:
    r"""``0.1\overline{6}`` is 1/6: the digits up to the end of a period less those before it, over nines."""

    def fraction(match: re.Match[str]) -> str:
        integer, not_repeating, period = match[1], match[2], match[3]
        numerator = int(integer + not_repeating + period) - int(integer + not_repeating)
        denominator = (10 ** len(period) - 1) * 10 ** len(not_repeating)
        return rf"\frac{{{numerator}}}{{{denominator}}}"

    return re.sub(
        r"(?<![\d.])(\d{1,30})\.(\d{0,30})\\(?:overline|bar|dot)\s*\{?(\d{1,30})\}?", fraction, text
    )


def _bases(text: str) -> str:
    r"""``101_{\text{two}}`` is ``101_{2}``."""

    def numeral(match: re.Match[str]) -> str:
        word = match[1].lower()
        return f"_{{{BASES.index(word) + 2}}}" if word in BASES else match[0]

    return re.sub(r"_\s*\{?\s*\\(?:text|mathrm)\s*\{\s*([a-zA-Z]+)\s*\}\s*\}?", numeral, text)


def _thousands(text: str) -> str:
    """Blanks between groups of three digits go, and commas where all of the text is one such number."""
    text = re.sub(r"(?<![\d.])\d{1,3}(?: \d{3})+(?!\d)", lambda m: m[0].replace(" ", ""), text)
    if re.fullmatch(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?\s*\\?%?", text):
        return text.replace(",", "")
    if re.fullmatch(r"[-+]?\d{1,3}(?:\.\d{3}){2,}(?:,\d+)?", text):
        return text.replace(".", "").replace(",", ".")
    return text


def _powers(text: str) -> str:
    r"""``1.5e6``, ``1.5\times10^6`` and ``10^{-5}`` are numbers and no sums."""
    text = re.sub(r"(\d)[eE]([-+]?\d{1,3})(?![\d.])", r"\1\\times 10^{\2}", text)

    def number(match: re.Match[str]) -> str:
        exponent = int(match[2] or match[3])
        is_plain_ten = abs(exponent) < 2 and not match[1]
        if is_plain_ten or abs(exponent) > 300:
            return match[0]
        digits = (match[1] or "1").replace(",", "")
        integer, _, fraction = digits.partition(".")
        if exponent < 0:
            integer = integer.rjust(1 - exponent, "0")
            return f"{integer[:exponent]}.{integer[exponent:]}{fraction}"
        fraction = fraction.ljust(exponent, "0")
        integer += fraction[:exponent]
        fraction = fraction[exponent:]
        return f"{integer}.{fraction}" if fraction else integer

    mantissa = r"(?<![\d.^_{])(?:(\d+(?:\.\d+)?)\s*(?:\\times|\\cdot|\*|x)\s*)?"
    power = r"10\s*\^\s*(?:\{\s*([-+]?\d+)\s*\}|([-+]?\d))(?![\d.])"
    return re.sub(mantissa + power, number, text)


def _approximate(text: str) -> str:
    r"""Of ``24\pi\approx 75.4`` the left side counts, of ``x\approx 5`` and ``\approx 12`` the right one."""
    value, sign, right = text.partition(r"\approx")
    if not sign:
        return text
    return right if re.fullmatch(r"\s*[a-zA-Z]?\s*", value) else value


def _member(text: str) -> str:
    r"""``x \in S`` is S, and ``x = \pm 2`` is ``\pm 2``."""
    return re.sub(r"^\s*[a-zA-Z]\s*(?:\\in(?![a-zA-Z])|=(?=\s*\\pm))", "", text)


def _ends(text: str) -> str:
    text = re.sub(r"(?<=\d)\.\s*$", "", text.strip())
    return re.sub(r"(?<!\\)%", r"\\%", text).strip().strip(",;").strip()


STEPS: tuple[Callable[[str], str], ...] = (
    _symbols, _looks, _upright, _choices, _bases, _units, _ends, _repeating, _fractions, _thousands, _powers,
    _approximate, _member, str.strip,
)  # fmt: skip


def normal(answer: str) -> str:
    r"""Return an answer as Math-Verify reads it right.

    Example:
        >>> normal(r"12\,345"), normal("3 1/2"), normal(r"1.5\times10^6"), normal(r"5\text{ cm}^2")
        ('12345', '\\frac{7}{2}', '1500000', '5')
    """
    answer = answer.translate(SIGNS)
    for step in STEPS:
        answer = step(answer)
    return answer
