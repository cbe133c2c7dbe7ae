"""References, cycles and Hydra's values among the settings that `rlgraph import` is given."""

from __future__ import annotations

from typing import Any

import pytest

from rlgraph.importing.options import Options, read_settings
from rlgraph.importing.table import table_of


def options(**settings: Any) -> Options:
    """Settings by keys with `__` for a dot."""
    return Options(table_of("verl"), {key.replace("__", "."): value for key, value in settings.items()})


@pytest.mark.parametrize("length", [1, 2, 3, 50])
def test_a_key_that_refers_to_itself_by_way_of_others_stays_as_it_is_written(length: int) -> None:
    cycle = {f"k{n}": f"${{k{(n + 1) % length}}}" for n in range(length)}
    text = {"text": "before ${k0} after", "outside": "${k0}", "known": "${number}", "number": 3}
    values = options(**cycle, **text).values
    assert {key: values[key] for key in cycle} == cycle
    assert (values["text"], values["outside"], values["known"]) == ("before ${k0} after", "${k0}", 3)


def test_many_references_take_no_time() -> None:
    lists = {f"k{n}": [f"${{k{m}}}" for m in range(40)] for n in range(40)}
    assert options(**lists).values == lists
    doubled = {f"k{n}": f"${{k{n + 1}}}${{k{n + 1}}}" for n in range(60)} | {"k60": "xy"}
    values = options(**doubled).values
    assert values["k58"] == "xyxyxyxy"
    assert len(values["k0"]) < 20_000
    chain = {f"k{n}": f"${{k{n + 1}}}" for n in range(3000)} | {"k3000": 7}
    assert options(**chain).values["k2950"] == 7


def test_a_reference_to_a_mapping_has_what_is_below_it() -> None:
    buffer = {"reward_model__overlong_buffer__enable": True, "reward_model__overlong_buffer__len": 64}
    alias = "${reward_model.overlong_buffer}"
    values = options(**buffer, reward_model__reward_kwargs__overlong_buffer_cfg=alias).values
    below = "reward.reward_kwargs.overlong_buffer_cfg"
    assert values == {f"{below}.enable": True, f"{below}.len": 64}
    copied = options(there__a=1, there__b="${.a}", here="${there}", here__b=5).values
    assert (copied["here.a"], copied["here.b"]) == (1, 5)


def test_a_value_is_read_as_hydra_reads_it() -> None:
    given = read_settings(
        None,
        [
            "a={x:1,y:[2,three]}",
            r"b={layers.\{*\}:{},name:'a: b'}",
            'c=["console","wandb"]',
            "d=['/a b/c.parquet', '/d.parquet']",
            "e={key: value}",
            "f={}",
            "+g=1e-6",
        ],
    )
    assert given == {
        "a.x": 1,
        "a.y": [2, "three"],
        "b.layers.{*}": {},
        "b.name": "a: b",
        "c": ["console", "wandb"],
        "d": ["/a b/c.parquet", "/d.parquet"],
        "e.key": "value",
        "f": {},
        "g": 1e-6,
    }
