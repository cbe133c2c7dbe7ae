"""A headless Chromium, and a run to look at."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SHOTS = ROOT / "build" / "screenshots"
MISSING = "no chromium and chromedriver here: make browser (apt-get install chromium chromium-driver)"
SIZE = (1400, 900)
AHEAD = """
graph: ahead
extends: dapo
edits:
  - add: {pools.train: {devices: 6}, pools.gen: {devices: 2}}
  - remove: [pools.main]
  - set: {schedule.buffer: {staleness: 1, by: batch}, informative.refill: true}
  - set: {update_policy.in.old_logprobs: rollout_logprobs}
"""


STREAMED = (
    "pools={train: {devices: 4}, gen: {devices: 4}}",
    "schedule.buffer={staleness: 2}",
    "update_policy.in.old_logprobs=rollout_logprobs",
    "prompts.batch=16",
)


class Browser:
    """A page in a window of a given size; what it logs and asks for is kept."""

    def __init__(self) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.options import Options
        from selenium.webdriver.chrome.service import Service

        options = Options()
        for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage"):
            options.add_argument(f"--{argument}")
        options.binary_location = str(shutil.which("chromium"))
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(str(shutil.which("chromedriver"))))
        self.look(*SIZE)

    def look(self, width: int, height: int, dark: bool = False) -> None:
        """Through a window of this size, with a preference for dark or light."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def open(self, path: Path, panel: str = "") -> None:
        """A file, from the disk."""
        self.driver.get("about:blank")
        self.driver.get(f"{path.as_uri()}#{panel}")

    def do(self, script: str, *args: Any) -> Any:
        """What a script gives back, run in the page."""
        return self.driver.execute_script(script, *args)

    def text(self, selector: str) -> str:
        """What is shown of the first element that matches."""
        found = self.do(
            "const e = document.querySelector(arguments[0]); return e.innerText ?? e.textContent", selector
        )
        return str(found)

    def count(self, selector: str) -> int:
        """How many elements match."""
        return int(self.do("return document.querySelectorAll(arguments[0]).length", selector))

    def click(self, selector: str) -> None:
        """The first element that matches, where it is."""
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.by import By

        element = self.driver.find_element(By.CSS_SELECTOR, selector)
        self.do("arguments[0].scrollIntoView({block: 'center'})", element)
        ActionChains(self.driver).move_to_element(element).click().perform()

    def type(self, keys: str) -> None:
        """Keys, to what has the focus."""
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(keys).perform()

    def settle(self) -> None:
        """Until what was asked for is drawn."""
        script = "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done))"
        self.driver.execute_async_script(script)

    def shot(self, name: str) -> None:
        """A picture, kept for people to look at."""
        SHOTS.mkdir(parents=True, exist_ok=True)
        self.settle()
        self.driver.save_screenshot(str(SHOTS / f"{name}.png"))

    def complaints(self) -> list[str]:
        """What the console said since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Addresses that were asked for since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [event for event in events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    pytest.importorskip("selenium", reason="selenium is not here: pip install -e '.[dev]'")
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip(MISSING)
    made = Browser()
    yield made
    made.driver.quit()


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run: two iterations of the demo from random weights, planned for this machine."""
    import rlgraph
    from demo_files import make_demo_files

    folder = tmp_path_factory.mktemp("run")
    make_demo_files(folder / "demo_files")
    settings = ["models.policy.path=demo_files/model", "schedule.iterations=2", "eval.every=1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        rlgraph.load("demo", *settings).run("auto", inline=True, run_dir="demo")
    return folder / "demo"


@pytest.fixture(scope="session")
def stream_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run in which generation streams."""
    import rlgraph
    from demo_files import make_demo_files

    folder = tmp_path_factory.mktemp("stream")
    make_demo_files(folder / "demo_files")
    graph = ROOT / "tests" / "runtime" / "streamed.yaml"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("RLGRAPH_TEST_FILES", str(folder / "demo_files"))
        rlgraph.load(str(graph), "schedule.iterations=4", "update.seconds=0.05").run(
            inline=True, run_dir="run"
        )
    return folder / "run"


@pytest.fixture(scope="session")
def streamed(tmp_path_factory: pytest.TempPathFactory, stream_run: Path) -> dict[str, Path]:
    """The pages of a plan and of a run that stream."""
    from rlgraph.ir.plan import Target
    from rlgraph.request import PlanRequest
    from rlgraph.view.contents import contents
    from rlgraph.view.page import page
    from rlgraph.view.subject import subject

    folder = tmp_path_factory.mktemp("streamed")
    shown = {
        "plan": subject(PlanRequest("grpo", STREAMED, target=Target("h100-8"))),
        "run": subject(PlanRequest(str(stream_run))),
    }
    for name, one in shown.items():
        (folder / f"{name}.html").write_text(page(contents(one)))
    return {name: folder / f"{name}.html" for name in shown}


@pytest.fixture(scope="session")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a plan with two pools, and a region in one of them."""
    from rlgraph.ir.plan import Target
    from rlgraph.request import PlanRequest
    from rlgraph.view.contents import contents
    from rlgraph.view.page import page
    from rlgraph.view.subject import subject

    folder = tmp_path_factory.mktemp("ahead")
    (folder / "ahead.yaml").write_text(AHEAD)
    path = folder / "ahead.html"
    path.write_text(page(contents(subject(PlanRequest(str(folder / "ahead.yaml"), target=Target("h100-8"))))))
    return path


@pytest.fixture(scope="session")
def sweep_folder(tmp_path_factory: pytest.TempPathFactory, run_dir: Path) -> Path:
    """The folder of a sweep over a setting and seeds, of whose six runs one has not begun."""
    from rlgraph.sweep.combinations import combinations
    from rlgraph.sweep.results import results
    from run_copies import copy_run

    folder = tmp_path_factory.mktemp("sweep")
    settings = ["models.policy.path=DIR", "update_policy.minibatches=[1,2]", "seed=[0,1,2]"]
    runs = combinations("demo", settings)
    for number, run in enumerate(runs[:-1]):
        minibatches = int(run.values["update_policy.minibatches"])
        seed = int(run.values["seed"])
        changed = {"seed": seed, "about": f"{minibatches} minibatches"}
        offset = 0.1 * minibatches + 0.06 * seed
        copy_run(run_dir, folder / run.name, changed, iterations=10 - number % 3, offset=offset)
    results("demo", runs, folder).save(folder)
    return folder


@pytest.fixture(scope="session")
def compared(tmp_path_factory: pytest.TempPathFactory, sweep_folder: Path) -> Path:
    """The page of two runs that differ in a setting, and of another run of each with another seed."""
    from rlgraph.request import PlanRequest
    from rlgraph.view.contents import contents
    from rlgraph.view.page import page
    from rlgraph.view.subject import subject

    names = [f"minibatches={minibatches},seed={seed}" for minibatches in (1, 2) for seed in (0, 1)]
    runs = [subject(PlanRequest(str(sweep_folder / name))) for name in names]
    path = tmp_path_factory.mktemp("compared") / "compared.html"
    path.write_text(page(contents(*runs)))
    return path
