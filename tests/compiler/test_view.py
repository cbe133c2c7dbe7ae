"""The page of a graph: what it holds, and that nothing in it can leave it or run but its own scripts."""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import json
import re
import threading
import tomllib
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rlgraph.cli.main import main
from rlgraph.frontend.shipped import shipped_graphs
from rlgraph.ir.plan import VERSION, Target, checksum
from rlgraph.request import PlanRequest
from rlgraph.view.contents import contents
from rlgraph.view.page import ASSETS, SCRIPTS, SWEEP_SCRIPTS, page
from rlgraph.view.serve import CONTENTS, server
from rlgraph.view.subject import subject
from rlgraph.view.timeline import footprint, memory

ROOT = Path(__file__).parents[2]
NASTY = "</script><script>pwned=1</script><img src=x onerror=pwned=1>\u2028\"'&lt;"


def data(text: str) -> dict[str, Any]:
    """What a page holds."""
    block = re.search(r'<script type="application/json" id="contents">(.*?)</script>', text, re.S)
    assert block
    found: dict[str, Any] = json.loads(block[1])
    return found


@pytest.mark.parametrize("name", shipped_graphs())
def test_a_page_holds_every_step_with_its_docs(name: str) -> None:
    new = subject(PlanRequest(name, devices=2))
    found = data(page(contents(new)))
    steps = found["phases"]["train"]["steps"]
    assert [step["node"] for step in steps] == [step.node for step in new.plan.steps]
    for step in steps:
        assert step["inserted"] == bool(step["because"])
        assert step["inserted"] or found["docs"][step["op"]]["summary"]
        assert all(found["docs"][loss]["summary"] for loss in step["losses"])


def test_the_page_of_grpo_is_small() -> None:
    text = page(contents(subject(PlanRequest("grpo", target=Target("h100-8")))))
    assert len(text.encode()) < 1_500_000


def test_values_say_where_they_were_written() -> None:
    found = contents(subject(PlanRequest("grpo", ["rollout.temperature=0.7"], devices=1)))
    rollout = next(step for step in found["phases"]["train"]["steps"] if step["node"] == "rollout")
    places = {name: place for name, _, place in rollout["attributes"]}
    assert places["temperature"] == "command line"
    assert re.fullmatch(r"grpo.yaml:\d+", places["n"])
    assert re.fullmatch(r"ppo.yaml:\d+", places["max_new_tokens"])
    assert places["top_p"] == ""


def test_memory_over_time_peaks_where_the_plan_says() -> None:
    plan = subject(PlanRequest("ppo", target=Target("h100-8"))).plan
    found = footprint(plan)
    assert found and plan.peak
    for pool, peak in plan.peak.items():
        assert max(sum(parts.values()) for parts in memory(found, pool).values()) == peak.bytes


def test_an_optimizer_on_the_host_is_not_drawn_on_the_device() -> None:
    for settings, parts in (((), ("parameters", "optimizer")), (["optimizer_offload=true"], ("parameters",))):
        given = [f"models.policy.train.{setting}" for setting in settings]
        new = subject(PlanRequest("grpo", given, target=Target("h100-8")))
        assert contents(new)["engines"]["policy.train"]["parts"] == parts


def test_of_a_saved_plan_no_file_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "ops.py").write_text(
        "from rlgraph.ops import float32, op, samples, text\n\n\n"
        "@op()\ndef short(responses: text[samples]) -> float32[samples]:\n    'Rewards brevity.'\n"
    )
    graph = tmp_path / "mine.yaml"
    graph.write_text("graph: mine\nextends: grpo\nedits: [{replace: {rewards: {op: ops.py:short}}}]\n")
    now = subject(PlanRequest(str(graph), devices=1))
    assert contents(now)["docs"]["ops.py:short"]["summary"] == "Rewards brevity."
    (tmp_path / "plan.json").write_text(now.plan.json())
    (tmp_path / "ops.py").write_text("raise SystemExit('loaded')")
    assert "ops.py:short" not in contents(subject(PlanRequest(str(tmp_path / "plan.json"))))["docs"]


def test_a_saved_plan_is_shown_where_its_graph_is_not(tmp_path: Path) -> None:
    graph = tmp_path / "mine.yaml"
    graph.write_text("graph: mine\nextends: grpo\nedits: []\n")
    saved = tmp_path / "plan.json"
    saved.write_text(subject(PlanRequest(str(graph), devices=1)).plan.json())
    graph.unlink()
    found = contents(subject(PlanRequest(str(saved))))
    assert found["graph"] == "mine"
    assert {step["place"] for step in found["phases"]["train"]["steps"]} == {""}


def test_a_diff_marks_what_was_added_removed_and_changed() -> None:
    found = contents(subject(PlanRequest("grpo", devices=1)), subject(PlanRequest("ppo", devices=1)))["diff"]
    status = found["status"]
    assert {name for name, how in status.items() if how == "removed"} >= {"values", "shaped", "update_critic"}
    assert (status["advantages"], status["rollout"]) == ("changed", "changed")
    assert "prompts" not in status and "ref_logprobs" not in status
    assert ["set", "rollout.n: 4 -> 8"] in found["edits"]


def test_no_text_can_end_the_block_that_it_stands_in() -> None:
    text = page({**contents(subject(PlanRequest("grpo", devices=1))), "graph": NASTY, "about": NASTY})
    assert data(text)["about"] == NASTY
    assert text.count("<script") == text.count("</script>") == 4
    assert "<img" not in text
    assert "\u2028" not in text.partition("</head>")[2]


def test_only_the_page_s_own_scripts_may_run_and_nothing_may_connect() -> None:
    text = page(contents(subject(PlanRequest("grpo", devices=1))))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="(.*?)"', text)
    assert policy and policy[1].startswith("default-src 'none'; ") and "connect-src" not in policy[1]
    scripts = re.findall(r"<script>(.*?)</script>", text, re.S)
    for script in scripts:
        summed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{summed}'" in policy[1]
    rules = policy[1].split("; ")
    assert len(scripts) == 3 and "script-src" in rules[1] and "unsafe" not in rules[1]


def test_scripts_never_parse_markup() -> None:
    for name in {*SCRIPTS, *SWEEP_SCRIPTS}:
        text = (ASSETS / name).read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|DOMParser", text)


def test_every_asset_is_packaged() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = config["package-data"]["rlgraph.view"]
    for path in ASSETS.rglob("*"):
        name = str(path.relative_to(ASSETS.parent))
        assert path.is_dir() or any(fnmatch.fnmatch(name, pattern) for pattern in patterns), name


def test_view_writes_one_file(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    args = ["view", "grpo", "--cluster", "h100-8", "--against", "ppo", "-o", str(out)]
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 0 and result.stdout == f"{out}: open it in a browser\n"
    assert data(out.read_text())["memory"]["capacity"] == 80e9
    out = tmp_path / "timeline.json"
    result = CliRunner().invoke(main, ["view", "grpo", "--format", "trace", "-o", str(out)])
    assert result.exit_code == 0 and json.loads(out.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--follow"], "--follow is for --serve"),
        (["--serve", "-o", "x.html"], "leave out -o"),
        (["--devices", "2", "--cluster", "h100-8"], "leave out --devices"),
    ],
)
def test_view_refuses_what_does_not_go_together(args: list[str], said: str) -> None:
    result = CliRunner().invoke(main, ["view", "grpo", *args])
    assert result.exit_code == 2 and said in result.stderr


def test_a_saved_plan_goes_with_no_settings(tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    saved.write_text(subject(PlanRequest("grpo", devices=1)).plan.json())
    result = CliRunner().invoke(main, ["view", str(saved), "rollout.n=2"])
    assert result.exit_code == 1 and "is a saved plan" in result.stderr


def test_a_server_makes_the_page_anew_and_answers_this_machine_alone() -> None:
    made: list[int] = []

    def make() -> dict[str, Any]:
        made.append(1)
        return contents(subject(PlanRequest("grpo", devices=1)))

    def get(path: str, **headers: str) -> str:
        request = urllib.request.Request(f"http://127.0.0.1:{serving.server_port}{path}", headers=headers)
        with opener.open(request, timeout=30) as answer:
            return str(answer.read().decode())

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with server(make, 0, follow=True) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        try:
            first = get("/")
            assert "connect-src 'self'" in first and data(first)["follow"] == CONTENTS
            assert json.loads(get(CONTENTS))["graph"] == "grpo"
            with opener.open(f"http://127.0.0.1:{serving.server_port}/", timeout=30) as answer:
                assert answer.headers["X-Frame-Options"] == "DENY"
                assert answer.headers["Content-Security-Policy"] == "frame-ancestors 'none'"
            assert len(made) == 3
            with pytest.raises(urllib.error.HTTPError, match="403"):
                get("/", Host="elsewhere.example")
            with pytest.raises(urllib.error.HTTPError, match="404"):
                get("/etc/passwd")
        finally:
            serving.shutdown()
            thread.join()


def test_a_server_answers_while_its_files_are_written(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "samples").mkdir(parents=True)
    (run / "plan.json").write_text(subject(PlanRequest("grpo", devices=1)).plan.json())
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "lo')
    (run / "samples" / "step-000001.jsonl").write_text('{"responses": "a"}\n{"respo')
    shown = contents(subject(PlanRequest(str(run))))["run"]
    assert shown["metrics"] == {"step": [1], "loss": [0.5]}
    assert shown["samples"]["files"]["step-000001"]["of"] == 1
    (run / "environment.json").write_text('{"pack')
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with server(lambda: contents(subject(PlanRequest(str(run)))), 0, follow=True) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        try:
            with pytest.raises(urllib.error.HTTPError, match="503") as caught:
                opener.open(f"http://127.0.0.1:{serving.server_port}/", timeout=30)
            assert "it can't be shown now" in caught.value.read().decode()
        finally:
            serving.shutdown()
            thread.join()


@pytest.mark.parametrize("name", ["../escaped", "/tmp/escaped", "..", "a/b", "-o", "a\n"])
def test_a_plan_from_elsewhere_writes_where_it_is_told_alone(name: str, tmp_path: Path) -> None:
    fields = subject(PlanRequest("grpo", devices=1)).plan.fields
    fields = {"version": VERSION, **fields, "graph": name}
    (tmp_path / "plan.json").write_text(json.dumps({**fields, "checksum": checksum(fields)}))
    result = CliRunner().invoke(main, ["view", str(tmp_path / "plan.json")])
    assert result.exit_code == 1 and "`graph` is not a name" in result.stderr
