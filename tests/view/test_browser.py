"""The page in a browser: panels, clicks, keys and search, from a phone to a wall, in light and dark."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from rlgraph.ir.plan import Target
from rlgraph.request import PlanRequest
from rlgraph.view.contents import contents
from rlgraph.view.page import page
from rlgraph.view.serve import server
from rlgraph.view.subject import subject
from share import families

TARGET = Target("h100-8")


@pytest.fixture(scope="module")
def grpo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "grpo.html"
    path.write_text(
        page(
            contents(subject(PlanRequest("grpo", target=TARGET)), subject(PlanRequest("ppo", target=TARGET)))
        )
    )
    return path


@pytest.fixture
def quiet(browser: Any) -> Any:
    """The browser, which must not complain, nor ask for anything but the file."""
    browser.complaints()
    browser.requests()
    yield browser
    assert browser.complaints() == []
    assert not [url for url in browser.requests() if not url.startswith(("file:", "data:", "about:"))]


@pytest.mark.parametrize("name", families())
def test_every_panel_of_every_shipped_graph(quiet: Any, name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.html"
    new = subject(PlanRequest(name, devices=2))
    path.write_text(page(contents(new)))
    quiet.open(path)
    steps = len(new.plan.steps)
    assert quiet.count("#panel-graph .node") == steps
    quiet.click(".bar-of-tools [title^='show what']")
    assert quiet.count("#panel-graph .node") == sum(not step.inserted for step in new.plan.steps)
    quiet.click("#tab-plan")
    quiet.settle()
    assert quiet.count("#panel-plan .bar") >= steps
    assert quiet.count("#panel-plan tr[data-row]") == steps + len(new.plan.eval_steps)


def test_a_step_says_all_of_itself(quiet: Any, grpo: Path) -> None:
    quiet.open(grpo, "graph")
    quiet.click("#panel-graph .node[data-id='4']")
    said = quiet.text("#detail")
    for words in ("max_new_tokens", "ppo.yaml:", "loss_mask", "policy@v", "Sample", "2.34 s to 7.06 s"):
        assert words in said, words
    quiet.click("#detail .close")
    assert quiet.do("return document.getElementById('detail').hidden")


def test_a_column_lights_up_its_life(quiet: Any, grpo: Path) -> None:
    quiet.open(grpo, "graph")
    quiet.do("page.graph.lightColumn('advantages')")
    lit = quiet.do(
        "return [...document.querySelectorAll('#panel-graph .node.on .title')].map((t) => t.textContent)"
    )
    assert sorted(lit) == ["advantages", "repartition rollout_logprobs, advantages", "update_policy"]
    quiet.click("#panel-graph [data-column=rewards]")
    said = quiet.text("#detail")
    assert "float32[samples]" in said and "4 bytes per row" in said and "READ BY" in said.upper()


def test_a_model_shows_who_reads_it(quiet: Any, grpo: Path) -> None:
    quiet.open(grpo, "graph")
    quiet.click("#panel-graph [data-model=ref] .title")
    assert "Qwen/Qwen2.5-0.5B-Instruct" in quiet.text("#detail")
    assert quiet.count("#panel-graph .node.on") == 1


TITLES = "return [...document.querySelectorAll('#panel-graph .node .title')].map((t) => t.textContent)"


def test_what_leads_to_a_step_alone_folds_into_it(quiet: Any, grpo: Path) -> None:
    quiet.open(grpo, "graph")
    before = quiet.do(TITLES)
    quiet.do("page.find('advantages'); document.activeElement.blur()")
    quiet.type("f")
    folded = quiet.do(TITLES)
    assert set(before) - set(folded) == {"repartition answer", "repeat answer@even", "rewards"}
    assert quiet.text("#panel-graph .node.folded .op") == "4 steps, folded"
    assert "rewards reward.math" in quiet.text("#detail")
    quiet.do("page.find('rewards')")  # a step within is found by its box
    assert quiet.do("return document.querySelector('.node.picked .title').textContent") == "advantages"
    quiet.do("page.graph.lightColumn('answer')")
    assert quiet.count("#panel-graph .node.folded.on") == 1
    quiet.type("i")  # without what was inserted it is smaller
    assert quiet.text("#panel-graph .node.folded .op") == "2 steps, folded"
    quiet.type("i")
    quiet.do("document.querySelector('.node.folded').dispatchEvent(new Event('dblclick'))")
    assert quiet.do(TITLES) == before


@pytest.mark.parametrize(("which", "panel"), [("plan", "predicted-groups"), ("run", "groups")])
def test_groups_of_a_stream_have_the_colour_of_their_weights(
    quiet: Any, streamed: dict[str, Path], which: str, panel: str
) -> None:
    quiet.open(streamed[which], panel)
    quiet.settle()
    assert quiet.do("return document.querySelector('.panel:not([hidden])').id") == f"panel-{which}"
    chart = f"#panel-{which} [data-chart=stream]"
    fills = """return [...document.querySelectorAll(`${arguments[0]} .bar:not(.faint)`)]
      .map((bar) => [bar, getComputedStyle(bar.querySelector('rect')).fill])
      .map(([bar, fill]) => [bar.querySelector('title').textContent, fill])"""
    coloured: dict[str, set[str]] = {}
    for title, fill in quiet.do(fills, chart):
        if title.startswith("prompt "):
            coloured.setdefault(title.partition("weights ")[2].partition(":")[0], set()).add(fill)
    assert len(coloured) > 1 and all(len(fill) == 1 for fill in coloured.values())
    assert len(set.union(*coloured.values())) == len(coloured), "no two versions that follow look alike"
    assert quiet.count(f"{chart} .mark.sync") > 0 and quiet.count(f"{chart} .mark.used") > 0
    assert quiet.count(f"{chart} .bar.faint") > 0, "what waits is pale"
    legend = quiet.text(f"#panel-{which} h2[id={panel}] ~ .legend")
    assert all(f"begun with weights {version}" in legend for version in coloured)
    if which == "run":
        table = quiet.text("#panel-run h2#stages ~ .scroll")
        assert "held back" in table and "judged on gen" in table
    quiet.shot(f"stream-{which}")


def test_what_can_t_be_folded_says_so(quiet: Any, grpo: Path) -> None:
    quiet.open(grpo, "graph")
    quiet.do("document.activeElement.blur()")
    quiet.type("f")
    assert "Pick a step first" in quiet.text("#panel-graph .note")
    quiet.do("page.find('prompts')")
    quiet.do("document.activeElement.blur()")
    quiet.type("f")
    assert quiet.text("#panel-graph .note") == "Nothing leads to prompts alone."
    assert quiet.count(".node.folded") == 0


def test_pools_and_regions_fold(quiet: Any, ahead: Path) -> None:
    quiet.open(ahead, "graph")
    assert quiet.count("#panel-graph .group") == 3 and quiet.count("#panel-graph .group.region") == 1
    quiet.shot("ahead-graph")
    quiet.type("r")
    assert "until informative" in quiet.do(TITLES) and "rollout" not in quiet.do(TITLES)
    assert quiet.count("#panel-graph .group") == 2
    quiet.shot("ahead-regions")
    quiet.type("r")
    quiet.type("p")
    assert sorted(quiet.do(TITLES)) == ["pool gen", "pool train"]
    quiet.shot("ahead-pools")
    quiet.type("p")
    quiet.do("document.querySelector('[data-group=\"pool train\"]').dispatchEvent(new Event('click'))")
    assert "pool train" in quiet.do(TITLES) and "rollout" in quiet.do(TITLES)


def test_search_finds_steps_and_columns(quiet: Any, grpo: Path) -> None:
    quiet.open(grpo, "graph")
    quiet.type("/")
    quiet.type("advantage.gr")
    assert "advantage.grpo" in quiet.text("#detail")
    quiet.do("page.clear(); page.find('logprobs')")
    assert quiet.count("#panel-graph .node.on") > 3
    quiet.do("page.find('old_logprobs')")
    assert quiet.text("#detail h2") == "old_logprobs"


def test_enter_goes_from_one_found_step_to_the_next(quiet: Any, grpo: Path) -> None:
    quiet.open(grpo, "plan")
    quiet.type("/")
    quiet.type("logprobs")
    assert "steps found; Enter goes" in quiet.do("return page.panels.graph.said.textContent")
    seen = []
    for _ in range(2):
        quiet.type("\ue007")  # Enter
        seen.append(quiet.text("#detail h2"))
    quiet.do("page.next(-1)")  # as Shift and Enter do
    seen.append(quiet.text("#detail h2"))
    assert seen[0] == seen[2] != seen[1]
    assert quiet.text("#panel-plan tr.picked td:nth-child(2)").startswith(seen[2])
    top = "return document.querySelector('#panel-plan tr.picked').getBoundingClientRect().top"
    assert 0 < quiet.do(top) < 900


def test_keys_do_what_the_mouse_does(quiet: Any, grpo: Path) -> None:
    quiet.open(grpo, "graph")
    quiet.do("document.activeElement.blur()")
    quiet.type("\ue015")  # down
    assert quiet.text("#detail h2") == "prompts"
    quiet.type("i")
    assert quiet.count("#panel-graph .node.inserted") == 0
    quiet.type("t")
    assert "int64[prompts, prompt_tokens]" in quiet.do("return page.graph.svg.textContent")
    quiet.type("2")
    assert not quiet.do("return document.getElementById('panel-plan').hidden")
    quiet.type("d")
    assert quiet.do("return document.documentElement.dataset.theme") == "dark"
    quiet.type("?")
    assert quiet.do("return document.getElementById('help').open")
    quiet.type("\ue00c")  # escape
    assert quiet.do("return document.getElementById('detail').hidden")


def test_the_plan_shows_lanes_memory_and_engines(quiet: Any, grpo: Path) -> None:
    quiet.open(grpo, "plan")
    quiet.settle()
    shown = quiet.do("return document.querySelector('#panel-plan svg').textContent")
    for words in ("device 0", "devices 1-7", "80 GB of a device", "activations", "policy.serve weights"):
        assert words in shown, words
    before = quiet.count("#panel-plan .flow")
    quiet.click("#panel-plan .bar.work-generate")
    assert quiet.count("#panel-plan .flow") > before == 0
    quiet.click("#panel-plan .choice button:last-child")
    assert quiet.count("#panel-plan .bar.work-update[data-step]") == 3 * 2  # iterations, lanes


def test_the_diff_shows_both_graphs(quiet: Any, grpo: Path) -> None:
    quiet.open(grpo, "diff")
    assert "rollout.n: 4 -> 8" in quiet.text(".edits")
    assert quiet.count("#panel-diff .node.removed") >= 3
    assert quiet.count("#panel-diff .node.changed") >= 2
    quiet.click("#panel-diff .node.removed")
    assert quiet.do("return !document.getElementById('detail').hidden")


def test_a_run_shows_what_happened(quiet: Any, run_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    path.write_text(page(contents(subject(PlanRequest(str(run_dir))))))
    quiet.open(path)
    quiet.settle()
    assert not quiet.do("return document.getElementById('panel-run').hidden")
    assert quiet.count("#panel-run canvas") == 6
    quiet.click("#panel-run [title='show every metric']")
    assert quiet.count("#panel-run canvas") > 15
    shown = quiet.text("#panel-run")
    for words in ("reward/mean", "eval/accuracy", "2 of 2", "update_policy", "auto-cpu-"):
        assert words in shown, words
    assert quiet.count("#panel-run .bar.work-update") == 2  # measured and predicted
    assert quiet.count("#panel-run .sample") > 10 and quiet.count("#panel-run .turn.policy") > 10
    quiet.do("page.panels.run.samples.next()")  # the mask: of a model without a reward, advantages are 0
    assert quiet.count("#panel-run .tokens [style*=background]") > 10
    assert "torch" in quiet.do("return document.querySelector('#environment').textContent")
    assert quiet.do("return document.querySelectorAll('table.beside tbody tr').length") > 5
    quiet.open(path, "samples")
    assert quiet.do("return document.querySelector('#panel-run').scrollTop") > 300
    for name, size, dark in (("run-light", (1400, 1700), False), ("run-dark-narrow", (390, 1800), True)):
        quiet.look(*size, dark=dark)
        quiet.open(path)
        quiet.shot(name)
    quiet.look(1400, 900)


def test_lanes_of_a_run_say_what_ran_beside_a_device(quiet: Any, run_dir: Path, tmp_path: Path) -> None:
    made = contents(subject(PlanRequest(str(run_dir))))
    bar, lane = made["run"]["bars"][-1], made["timeline"]["lanes"][0]
    bar["device"] = "0 beside"
    made["timeline"]["lanes"].append({**lane, "beside": True})
    path = tmp_path / "run.html"
    path.write_text(page(made))
    quiet.open(path)
    quiet.settle()
    labels = "return [...document.querySelectorAll('#panel-run .label title')].map((t) => t.textContent)"
    assert quiet.do(labels) == ["main[0]", "main[0] beside"] * 2


@pytest.mark.parametrize("size", [(390, 800), (1400, 900), (3840, 2160)])
def test_it_fits_from_a_phone_to_a_wall(quiet: Any, grpo: Path, size: tuple[int, int]) -> None:
    for dark in (False, True):
        quiet.look(*size, dark=dark)
        for panel in ("graph", "plan", "diff"):
            quiet.open(grpo, panel)
            quiet.shot(f"grpo-{panel}-{size[0]}-{'dark' if dark else 'light'}")
            wide = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert quiet.do(wide) <= 0
    quiet.look(1400, 900)


def test_arrows_show_what_goes_from_step_to_step(quiet: Any, ahead: Path) -> None:
    quiet.open(ahead, "plan")
    quiet.settle()
    assert quiet.count("#panel-plan .flow") == 0
    quiet.do("document.activeElement.blur()")
    quiet.type("a")
    said = quiet.do("return [...document.querySelectorAll('#panel-plan .flow')].map((f) => f.textContent)")
    assert any("tokens" in text for text in said) and any("policy@" in text for text in said)
    quiet.shot("ahead-plan")
    lead = "page.find('rollout'); return document.getElementById('detail').innerText"
    assert "runs ahead" in quiet.do(lead)


def test_a_page_follows_a_run(quiet: Any, run_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    shutil.copytree(run_dir, folder, ignore=shutil.ignore_patterns("checkpoints", "models"))
    with server(lambda: contents(subject(PlanRequest(str(folder)))), 0, follow=True) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        try:
            address = f"http://127.0.0.1:{serving.server_port}/"
            quiet.driver.get(f"{address}#run")
            assert "2 of 2" in quiet.text("#panel-run dl")
            quiet.do("page.panels.run.samples.file = 'step-000000-eval'; page.panels.run.charts.all = true")
            with (folder / "metrics.jsonl").open("a") as file:
                file.write('{"step": 3, "reward/mean": 1.0, "time/step": 1.0}\n')
            quiet.driver.execute_async_script("update(given.follow).then(arguments[0])")
            assert "3 of 2" in quiet.text("#panel-run dl")
            assert quiet.text("#head [role=status]").startswith("as of ")
            # what someone looks at stays
            assert quiet.do("return page.panels.run.samples.shown()") == "step-000000-eval"
            assert quiet.do("return document.querySelector('#panel-run [aria-label=samples]').value") == (
                "step-000000-eval"
            )
            assert quiet.count("#panel-run canvas") > 15
            assert not quiet.do("return document.getElementById('panel-run').hidden")
            asked = {url for url in quiet.requests() if not url.startswith(("data:", "about:"))}
            assert asked <= {f"{address}#run", address, f"{address}contents.json"}
        finally:
            quiet.driver.get("about:blank")
            serving.shutdown()
            thread.join()
