"""A tensor-parallel group is on one host, or on as many whole hosts as the graph says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlgraph.compiler import compile_graph
from rlgraph.costs.hardware import FOLDER
from rlgraph.costs.model_size import size_of
from rlgraph.errors import GraphError
from rlgraph.ir.plan import Plan, Target
from rlgraph.planning.device_groups import together
from rlgraph.printing.plan_text import plan_text

GRAPH = """graph: apart
extends: ppo
edits:
  - add: {POOLS}
  - remove: [pools.main]
  - set: {models.policy.train.pool: a, models.ref.train.pool: a, models.critic.train.pool: b}
  - set: {models.policy.serve.pool: gen, models.policy.serve.engine: sglang}
  - set: {models.policy.serve.tensor_parallel: SIZE}
"""


def planned(folder: Path, pools: dict[str, int], size: int, target: Target | None, *settings: str) -> Plan:
    """The plan of a graph whose servers span ``size`` devices of pool ``gen``."""
    added = ", ".join(f"pools.{name}: {{devices: {count}}}" for name, count in pools.items())
    path = folder / "apart.yaml"
    path.write_text(GRAPH.replace("POOLS", added).replace("SIZE", str(size)))
    return compile_graph(str(path), settings, devices=sum(pools.values()), target=target)


def h100(folder: Path, hosts: int, **rates: str) -> Target:
    """So many hosts of eight H100, with some rates of their own."""
    path = folder / f"{hosts}.yaml"
    text = (FOLDER / "h100-8.yaml").read_text().replace("hosts: 1", f"hosts: {hosts}")
    text += "margin: 0\n"
    for name, rate in rates.items():
        text = re.sub(f"^{name}: [^ ]*", f"{name}: {rate}", text, flags=re.MULTILINE)
    path.write_text(text)
    return Target(str(path))


@pytest.fixture
def two_hosts(tmp_path: Path) -> Target:
    """Two hosts of eight H100."""
    return h100(tmp_path, 2)


@pytest.mark.parametrize(
    ("pools", "size"),
    [
        ({"a": 6, "b": 6, "gen": 4}, 4),
        ({"gen": 8, "a": 4, "b": 4}, 8),
        ({"a": 1, "b": 1, "gen": 4}, 4),  # not at a multiple of 4, and still on one host
    ],
)
def test_groups_inside_hosts_are_planned(
    tmp_path: Path, two_hosts: Target, pools: dict[str, int], size: int
) -> None:
    plan = planned(tmp_path, pools, size, two_hosts)
    assert together(plan) == {**dict.fromkeys(pools, 1), "gen": size}
    assert not any("assumed to have" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("pools", "size", "first"),
    [({"a": 6, "gen": 4, "b": 6}, 4, 6), ({"gen": 12, "a": 2, "b": 2}, 3, 6)],
)
def test_a_group_over_two_hosts_is_named(
    tmp_path: Path, two_hosts: Target, pools: dict[str, int], size: int, first: int
) -> None:
    with pytest.raises(GraphError) as caught:
        planned(tmp_path, pools, size, two_hosts)
    said = str(caught.value)
    assert f"devices {first} to {first + size - 1}, a group of `policy`" in said
    assert "over hosts 0 and 1 of h100-8, which have 8 devices each" in said
    assert ("divides 8" in said) == (size == 3)


OVER = {"gen": 16, "a": 4, "b": 4}


def test_a_server_over_two_hosts_takes_whole_ones_and_sums_over_the_network(tmp_path: Path) -> None:
    hosts = "models.policy.serve.sglang.hosts=2"
    plan = planned(tmp_path, OVER, 16, h100(tmp_path, 3), hosts)
    assert together(plan)["gen"] == 8
    assert "sglang (bfloat16, servers of 16 devices over 2 hosts)" in plan_text(plan)
    slow, fast = (
        planned(tmp_path, OVER, 16, h100(tmp_path, 3, inter_link=rate), hosts) for rate in ("1e9", "900e9")
    )
    seconds = [next(s.seconds[0] for s in one.steps if s.generates) for one in (slow, plan, fast)]
    assert seconds == sorted(seconds, reverse=True) and len({*seconds}) == 3
    # servers of one host know nothing of the network
    inside = [planned(tmp_path, OVER, 8, h100(tmp_path, 3, inter_link=rate)) for rate in ("1e9", "900e9")]
    first, second = (next(s.seconds for s in one.steps if s.generates) for one in inside)
    assert first == second


@pytest.mark.parametrize(
    ("pools", "size", "settings", "law", "remedy"),
    [
        (OVER, 16, (), "devices 0 to 15, a group of `policy`", "models.policy.serve.sglang.hosts=2"),
        (
            {"a": 4, "gen": 16, "b": 4},
            16,
            ("sglang.hosts=2",),
            "reach over hosts 0 and 1",
            "put pools before it",
        ),
        (
            OVER,
            8,
            ("sglang.hosts=2",),
            "has 4 devices of each host",
            "models.policy.serve.tensor_parallel=16",
        ),
        (
            OVER,
            16,
            ("sglang.hosts=3",),
            "can't be shared out by models.policy.serve.sglang.hosts: 3",
            "a multiple of",
        ),
        (
            OVER,
            16,
            ("sglang.hosts=2", "sglang.addresses=[http://one:1]"),
            "with a hosts of their own",
            "leave out models.policy.serve.sglang.hosts",
        ),
        (
            OVER,
            1,
            ("sglang.hosts=2", "engine=transformers"),
            "takes no `models.policy.serve.sglang.hosts`",
            "sglang",
        ),
    ],
)
def test_what_hosts_cant_hold_is_refused(
    tmp_path: Path, pools: dict[str, int], size: int, settings: tuple[str, ...], law: str, remedy: str
) -> None:
    given = [f"models.policy.serve.{setting}" for setting in settings]
    with pytest.raises(GraphError) as caught:
        planned(tmp_path, pools, size, h100(tmp_path, 3), *given)
    assert law in str(caught.value) and remedy in str(caught.value)


def test_without_a_cluster_hosts_are_assumed_to_hold_whole_groups(tmp_path: Path) -> None:
    plan = planned(tmp_path, {"a": 6, "b": 6, "gen": 4}, 4, None)
    assert "hosts are assumed to have a multiple of 4 devices, for the servers of `policy`" in plan.notes
    with pytest.raises(GraphError, match=r"begin at device 6(.|\n)*multiple of 4(.|\n)*--cluster"):
        planned(tmp_path, {"a": 6, "gen": 4, "b": 6}, 4, None)


def test_without_a_cluster_hosts_are_assumed_to_be_whole_parts(tmp_path: Path) -> None:
    plan = planned(tmp_path, OVER, 16, None, "models.policy.serve.sglang.hosts=2")
    assert "hosts are assumed to have a multiple of 8 devices, for the servers of `policy`" in plan.notes
    assert together(plan)["gen"] == 8


def test_engines_of_one_device_need_no_host_of_their_own(tmp_path: Path) -> None:
    plan = planned(tmp_path, {"a": 1, "gen": 3, "b": 1}, 1, None)
    assert together(plan) == {"a": 1, "gen": 1, "b": 1}
    assert not any("assumed to have" in note for note in plan.notes)


MIXTURE = "Qwen/Qwen3-30B-A3B"


def parts_of(folder: Path, model: str, *settings: str, extra: tuple[str, ...] = ()) -> Plan:
    """The plan of a graph whose servers span the eight devices of a host of their own."""
    given = [f"models.policy.serve.{setting}" for setting in settings]
    paths = [f"models.{name}.path={model}" for name in ("policy", "ref")]
    offload = "models.policy.train.optimizer_offload=true"
    return planned(folder, {"gen": 8, "a": 8, "b": 8}, 8, h100(folder, 3), *paths, offload, *given, *extra)


def test_copies_of_attention_hold_their_own_tokens_and_weights(tmp_path: Path) -> None:
    cache = "cache_tokens=400000"
    plain, spread, copied = (
        parts_of(tmp_path, MIXTURE, cache, *settings)
        for settings in ((), ("sglang.expert_parallel=8",), ("sglang.attention_replicas=4",))
    )
    size, parts = size_of(MIXTURE), [plan.peak["gen"].parts for plan in (plain, spread, copied)]
    config = size.config
    # four heads of keys over eight devices: two hold the same; in a copy each of two devices has two heads
    whole = 400_000 * size.kv_bytes(2)
    assert [part["kv cache"] for part in parts] == [whole // 4, whole // 4, whole // 4 // 2]
    attention = sum(
        rows * numbers
        for layer in range(config.num_hidden_layers)
        for rows, numbers in config.tensors(layer)[:4]
    )
    added = 2 * 3 * (attention + size.embedding) // 8
    assert parts[0]["serve weights"] == parts[1]["serve weights"] == parts[2]["serve weights"] - added
    notes = [
        [note for note in plan.notes if "time is planned without" in note] for plan in (plain, spread, copied)
    ]
    assert [len(each) for each in notes] == [0, 1, 1] and "expert_parallel" in notes[1][0]
    times = [next(s.seconds for s in plan.steps if s.generates) for plan in (plain, spread)]
    assert times[0] == times[1]


def test_a_cache_holds_the_longest_sample_in_every_copy_of_attention(tmp_path: Path) -> None:
    alone, copied = (
        parts_of(tmp_path, MIXTURE, "max_rows=1", f"sglang.attention_replicas={n}").models["policy"].serve
        for n in (1, 4)
    )
    assert copied.cache_tokens >= 4 * 1536 > alone.cache_tokens
    with pytest.raises(
        GraphError, match=r"hold no sample of 1,536(.|\n)*in each of 4 copies(.|\n)*least 6,144"
    ):
        parts_of(tmp_path, MIXTURE, "cache_tokens=6000", "sglang.attention_replicas=4")


@pytest.mark.parametrize(
    ("model", "setting", "law"),
    [
        ("Qwen/Qwen3-8B", "sglang.expert_parallel=4", "is not a mixture of experts"),
        (
            MIXTURE,
            "sglang.expert_parallel=3",
            "can't be shared out by models.policy.serve.sglang.expert_parallel: 3",
        ),
        ("Qwen/Qwen2.5-7B", "sglang.attention_replicas=2", "no copies of attention for `policy`, a qwen2"),
        (MIXTURE, "sglang.options={ep_size: 8}", "serve.sglang.expert_parallel says it"),
        (MIXTURE, "sglang.options={attn_dp_size: 8}", "serve.sglang.attention_replicas says it"),
    ],
)
def test_experts_and_copies_of_attention_that_cant_be_are_refused(
    tmp_path: Path, model: str, setting: str, law: str
) -> None:
    with pytest.raises(GraphError) as caught:
        parts_of(tmp_path, model, setting)
    assert law in str(caught.value)


@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", MIXTURE])
def test_weights_in_8_bits_are_planned_and_noted(tmp_path: Path, model: str) -> None:
    tis = "nodes.update_policy.in.old_logprobs=rollout_logprobs"
    whole = ("sglang.expert_parallel=8",) if model == MIXTURE else ()
    plain, small = (
        parts_of(tmp_path, model, *whole, *settings, extra=(tis,))
        for settings in ((), ("sglang.quantization=fp8",))
    )
    assert "sglang (bfloat16, linear layers in fp8)" in plan_text(small)
    size = size_of(model)
    linear = sum(size.layers)
    saved = linear * 2 - linear * (1 + 4 / 128**2)
    held = [plan.peak["gen"].parts["serve weights"] for plan in (plain, small)]
    assert held[0] - held[1] == pytest.approx(saved / 8, abs=1)
    assert any(
        "time is planned without `models.policy.serve.sglang.quantization`" in note for note in small.notes
    )


@pytest.mark.parametrize(
    ("model", "settings", "law"),
    [
        ("Qwen/Qwen2.5-0.5B", ("tensor_parallel=2",), "the columns of queries of `policy`, 448 on each"),
        (MIXTURE, (), "the columns of an expert of `policy`, 96 on each"),
        (
            "Qwen/Qwen3-8B",
            ("sglang.addresses=[http://one:1]", "tensor_parallel=1"),
            "with a quantization of their own",
        ),
        (
            "Qwen/Qwen3-8B",
            ("engine=transformers", "tensor_parallel=1"),
            "takes no `models.policy.serve.sglang.quantiz",
        ),
    ],
)
def test_8_bits_that_cant_be_are_refused(
    tmp_path: Path, model: str, settings: tuple[str, ...], law: str
) -> None:
    tis = "nodes.update_policy.in.old_logprobs=rollout_logprobs"
    with pytest.raises(GraphError) as caught:
        parts_of(tmp_path, model, *settings, "sglang.quantization=fp8", extra=(tis,))
    assert law in str(caught.value)


def test_8_bits_take_gpus_and_known_sizes() -> None:
    settings = ["engine=sglang", "sglang.quantization=fp8"]
    given = [f"models.policy.serve.{setting}" for setting in settings]
    tis = "nodes.update_policy.in.old_logprobs=rollout_logprobs"
    with pytest.raises(GraphError, match="that takes Hopper GPUs"):
        compile_graph("grpo", ["models.policy.path=Qwen/Qwen3-8B", tis, *given])
    with pytest.raises(GraphError, match="the sizes of its layers are not known"):
        compile_graph("grpo", ["models.policy.path=some/model", tis, *given])
