"""The demo's files."""

import re
from pathlib import Path

import pyarrow.parquet

from rlgraph.runtime import demo_sums
from rlgraph.runtime.demo import main, make, make_tokenizer, questions


def test_questions_are_right_and_apart() -> None:
    train, test = questions(seed=0)
    assert (len(train), len(test)) == (7600, 500)
    assert not {row["question"] for row in train} & {row["question"] for row in test}
    for row in train + test:
        a, b = row["question"].removesuffix("=").split("+")
        assert int(a) + int(b) == int(row["answer"])


def test_tokenizer_is_one_token_a_character() -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer("12+34=")["input_ids"]
    assert len(ids) == 6
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "12+34="


def test_files_are_made_once_and_the_same(tmp_path: Path, capsys) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert make(tmp_path / "a")
    assert not make(tmp_path / "a")
    main([str(tmp_path / "a")])
    assert capsys.readouterr().out == ""
    main([str(tmp_path / "b")])
    assert len(capsys.readouterr().out.splitlines()) == 1
    for name in ("model/model.safetensors", "model/tokenizer.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a/model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a/model")
    assert model.num_parameters() < 1_000_000
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert pyarrow.parquet.read_table(tmp_path / "a/train.parquet").to_pylist() == questions(0)[0]


def test_sums_in_words_are_right_and_apart(tmp_path: Path) -> None:
    train, test = demo_sums.questions(seed=0)
    assert (len(train), len(test)) == (300, 100)
    added = []
    for row in (*train, *test):
        first, second = map(int, re.findall("[0-9]+", row["question"]))
        assert first + second == int(row["answer"])
        added.append((first, second))
    assert len({*added}) == len(added), "no two numbers of a test are added in training"
    assert demo_sums.make(tmp_path / "sums")
    assert not demo_sums.make(tmp_path / "sums")
    assert pyarrow.parquet.read_table(tmp_path / "sums/test.parquet").to_pylist() == test
