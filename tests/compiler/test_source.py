"""Strict YAML: scalars of YAML 1.2, marks, and every way to write what is no graph."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlgraph.errors import GraphError, Source
from rlgraph.syntax.source import MAX_BYTES, parse, read


def plain(text: str) -> object:
    return parse(Source("a.yaml", text)).plain()


def kinds(text: str) -> list[str]:
    with pytest.raises(GraphError) as caught:
        parse(Source("a.yaml", text))
    return [problem.kind for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1E+3", 1000.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("-3", -3),
        ("0o17", "0o17"),
        ("0x1f", "0x1f"),
        ("1_000", "1_000"),
        ("12:30:45", "12:30:45"),
        ("2024-01-01", "2024-01-01"),
        ("on", "on"),
        ("yes", "yes"),
        ("No", "No"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        ("", None),
        ("'1e-6'", "1e-6"),
        ('"true"', "true"),
        ('""', ""),
        ("???", "???"),
        ("a b", "a b"),
    ],
)
def test_scalars(text: str, value: object) -> None:
    found = plain(f"x: {text}")
    assert found == {"x": value}
    assert type(found["x"]) is type(value)  # type: ignore[index]


def test_block_texts_stay_texts() -> None:
    assert plain("x: |\n  12\n") == {"x": "12\n"}


def test_open_values_in_flow_mappings() -> None:
    assert plain("{a: ???, b: [???, 1], '???': x}") == {"a": "???", "b": ["???", 1], "???": "x"}


def test_numbers_that_are_too_large() -> None:
    assert kinds("a: .inf\nb: 1e999\nc: [-.inf]") == ["not-finite"] * 3
    assert plain("a: " + "9" * 300) == {"a": int("9" * 300)}
    assert kinds("a: " + "9" * 5000) == ["not-finite"]


def test_duplicate_keys_are_all_found() -> None:
    assert kinds("a: 1\nb: {c: 1, c: 2}\na: 2\na: 3") == ["duplicate-key"] * 3


def test_marks_count_from_one() -> None:
    tree = parse(Source("a.yaml", "a:\n  b: [1, two]\n"))
    value = tree.items["a"].items["b"].value[1]
    assert (value.value, value.mark.line, value.mark.column) == ("two", 2, 10)
    key = tree.items["a"].items["b"].key
    assert key and (key.line, key.column) == (2, 3)


def test_marks_after_wide_characters() -> None:
    tree = parse(Source("a.yaml", "{é: ü, 日本: 語, x: 1}"))
    assert tree.items["x"].mark.column == len("{é: ü, 日本: 語, x: ") + 1


def test_the_start_is_passed_over_and_keeps_its_columns() -> None:
    source = Source("command line", "rollout.n=[1, 2]")
    tree = parse(source, len("rollout.n="))
    assert tree.plain() == [1, 2]
    assert tree.mark.source is source and tree.value[1].mark.column == 15


def test_anchors_and_aliases() -> None:
    assert plain("a: &x {b: 1}\nc: *x\nd: [*x]") == {"a": {"b": 1}, "c": {"b": 1}, "d": [{"b": 1}]}


@pytest.mark.parametrize("text", ["a: &x [1, *x]", "a: &x {b: *x}", "a: &x {b: [{c: *x}]}"])
def test_an_alias_that_contains_itself(text: str) -> None:
    assert kinds(text) == ["self-alias"]


def test_aliases_that_multiply() -> None:
    lines = ["l0: &l0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert kinds("\n".join(lines)) == ["too-large"]


@pytest.mark.parametrize("text", ["[" + "1," * 700_000 + "]", "[" + "{a: 1}," * 200_000 + "]"])
def test_more_than_can_be_composed_is_refused_before(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("yaml.compose", lambda *_, **__: pytest.fail("it was composed"))
    assert kinds(f"x: {text}") == ["too-large"]


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)  # of zeros, which take no room
    with pytest.raises(GraphError, match=r"large.yaml: has 33,554,433 bytes; a graph has 33,554,432 at most"):
        read(path)


@pytest.mark.parametrize("depth", [101, 1000, 100_000])
def test_deep_nesting(depth: int) -> None:
    assert kinds("x: " + "[" * depth + "]" * depth) == ["too-deep"]


def test_deep_blocks() -> None:
    assert kinds("\n".join(" " * depth + "a:" for depth in range(1000))) == ["too-deep"]


def test_nesting_within_the_limit() -> None:
    assert plain("x: " + "[" * 99 + "]" * 99)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", "empty"),
        ("# only a comment\n", "empty"),
        ("---\n", None),
        ("a: 1\n---\nb: 2\n", "not-yaml"),
        ("a: [1", "not-yaml"),
        ("a:\n\tb: 1", "not-yaml"),
        ("a: *nowhere", "not-yaml"),
        ("a: \x01", "not-yaml"),
        ("a: @b", "not-yaml"),
        ("? [a]\n: 1", "bad-key"),
        ("{a: 1}: 2", "bad-key"),
        ("<<: {a: 1}", "merge-key"),
        ("a: !word b", "tag"),
        ("a: !!binary aGVsbG8=", "tag"),
        ("a: !!python/object:os.system {}", "tag"),
        ("!x {a: 1}", "tag"),
    ],
)
def test_what_is_no_graph(text: str, kind: str | None) -> None:
    if kind:
        assert kinds(text) == [kind]
    else:
        assert plain(text) is None


def test_tabs_are_explained() -> None:
    with pytest.raises(GraphError, match="indent with spaces, not tabs"):
        plain("a:\n\tb: 1")


def test_a_control_character_is_pointed_at() -> None:
    with pytest.raises(GraphError, match=r"a\.yaml:2:5: "):
        plain("a: 1\nb: x\x01y")


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"graph: \xff\xfe\n", "not-text"),
        (b"", "empty"),
        (b"- a\n", "not-a-mapping"),
        (b"7", "not-a-mapping"),
    ],
)
def test_files_that_hold_no_graph(tmp_path: Path, content: bytes, kind: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(content)
    with pytest.raises(GraphError) as caught:
        read(path)
    assert [problem.kind for problem in caught.value.problems] == [kind]


def test_byte_order_marks_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xef\xbb\xbfgraph: a\r\nnodes: {}\r\n")
    tree = read(path)
    assert tree.plain() == {"graph": "a", "nodes": {}}
    assert tree.items["nodes"].mark.line == 2


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="can't be read: No such file"):
        read(tmp_path / "nowhere.yaml")
