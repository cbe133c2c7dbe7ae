"""Data, URLs and chat templates that misbehave: each is one line with the place and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rlgraph.nodes.support.chat_template import TemplateError
from rlgraph.nodes.support.data_file import DataError, read_rows
from rlgraph.nodes.support.dataset import load_prompts
from rlgraph.runtime.demo_tools import make_tokenizer

GOOD = b'{"question": "1+1=", "answer": "2"}\n'
MARK = b"\xef\xbb\xbf"
SAID = {
    GOOD + b'{"question": "\xe4"}\n': r":2: is not UTF-8 \(byte 0xe4 at 15\); convert the file, as by: iconv",
    GOOD.decode().encode("utf-16"): r":1: is not UTF-8 \(byte 0xff at 1\)",
    b'{"question": "\xed\xa0\x80"}\n': r":1: is not UTF-8",
    GOOD
    + b'{"question": "\\ud83d!"}\n': r":2: holds '\\ud83d', half of a surrogate pair; give both or neither",
    GOOD + b'{"question": [{"role": "user", "content": "\\uDC00"}]}\n': r":2: holds '\\udc00', half of a",
    b"[" * 200_000: r":1: not JSON that can be read: nested too deeply",
    GOOD + MARK[:2] + GOOD: r":2: is not UTF-8",
}


@pytest.mark.parametrize("data", SAID, ids=SAID.values())
def test_a_text_that_cannot_be_read_is_named_with_its_line(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(data)
    with pytest.raises(DataError, match=f"^{file}{SAID[data]}") as caught:
        list(read_rows(str(file), ["question"]))
    assert "\n" not in str(caught.value)


def test_a_byte_order_mark_and_whole_surrogate_pairs_are_read(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(MARK + GOOD + b'{"question": "\\ud83d\\ude00 \\u00e4"}\n')
    rows = [row["question"] for _, row in read_rows(str(tmp_path / "rows.jsonl"), ["question"])]
    assert rows == ["1+1=", "😀 ä"]


def test_a_column_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    offsets, text = b"\0\0\0\0\2\0\0\0\4\0\0\0", b"ab\xff\xfe"
    column = pyarrow.Array.from_buffers(
        pyarrow.string(), 2, [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(text)]
    )
    pyarrow.parquet.write_table(pyarrow.table({"question": column}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows.parquet: can't be read as parquet: .*UTF8 .*index 1"):
        list(read_rows(str(tmp_path / "rows.parquet"), ["question"]))


ODD = [
    "http://",
    "http://[::1/a.jsonl",
    "memory://x.jsonl",
    "foo://x",
    "github://a",
    "dir://x",
    "generic://x",
]


@pytest.mark.parametrize("url", [*ODD, "reference://x", "zip://a::b", "data:,x://", "cached://x"])
def test_an_odd_url_is_an_error_with_a_remedy(url: str) -> None:
    with pytest.raises(DataError, match=r"correct|give a file of \.parquet") as caught:
        list(read_rows(url, ["question"]))
    assert str(caught.value).startswith(f"{url}: ")


HOSTILE = {
    "{{ ''.__class__.__mro__ }}": "SecurityError: ",
    "{{ cycler.__init__.__globals__ }}": "SecurityError: ",
    "{{ 1 / 0 }}": "ZeroDivisionError: ",
    "{{ range(10 ** 9) | list }}": "OverflowError: ",
    "{{ messages + 1 }}": "TypeError: ",
    "{{ raise_exception('no') }}": "TemplateError: no",
    "{% if %}": "TemplateSyntaxError: ",
    "{{ nothing.at_all }}": "UndefinedError: ",
}


@pytest.mark.parametrize("template", HOSTILE)
def test_a_chat_template_that_fails_is_named_with_the_row(tmp_path: Path, template: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(GOOD)
    tokenizer: Any = make_tokenizer()
    tokenizer.chat_template, tokenizer.name_or_path = template, "models/odd"
    law = rf"rows.jsonl:1: the chat template of models/odd can't write user: {HOSTILE[template]}"
    with pytest.raises(TemplateError, match=law) as caught:
        load_prompts(tokenizer, files=[str(tmp_path / "rows.jsonl")])
    assert "give another with template_options" in str(caught.value)
