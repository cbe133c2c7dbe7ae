"""How soon a page of `rlgraph view` can be used, and how large it is: graphs of 10 to 2,000 nodes.

    python benchmarks/view_scale.py

From the start of the navigation, on a file from the disk, in headless Chromium: until the graph is drawn, and
until it has answered a search and a click on the step that was found; and the CPU time of the page's main
thread for all that, which other work on the machine does not change. It wants Chromium (`make browser`).
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from check_scale import graph

from rlgraph.request import PlanRequest
from rlgraph.view.contents import contents
from rlgraph.view.page import page
from rlgraph.view.subject import subject

TARGET = 3.0  # seconds, for 2,000 nodes
SIZE = 1_500_000  # bytes, for grpo
READY = """
const done = arguments[0];
const painted = (then) => requestAnimationFrame(() => setTimeout(() => then(performance.now())));
const drawn = performance.getEntriesByType("navigation")[0].domContentLoadedEventEnd;
page.find("advantages1");
page.graph.nodes.get(page.panels.graph.current.id).drawn.dispatchEvent(new Event("click"));
painted((now) => done([drawn, now, document.querySelector("#detail h2").innerText]));
"""


def main() -> None:
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        print("not measured: there is no chromium and chromedriver here (make browser)")
        return
    with tempfile.TemporaryDirectory() as folder:
        driver = browser()
        print(f"chromium {driver.capabilities['browserVersion']}, best of 3")
        size = len(page(contents(subject(PlanRequest("grpo", devices=8)))).encode())
        print(f"  grpo: {size / 1e6:.2f} MB  (target: under {SIZE / 1e6} MB, {size / SIZE:.2f} of it)")
        for count in (10, 100, 1_000, 2_000):
            show(driver, count, Path(folder))
        driver.quit()


def show(driver: Any, count: int, folder: Path) -> None:
    (folder / "wide.yaml").write_text(graph(count))
    new = subject(PlanRequest(str(folder / "wide.yaml"), devices=8))
    start = time.perf_counter()
    text = page(contents(new))
    made = time.perf_counter() - start
    path = folder / "wide.html"
    path.write_text(text)
    drawn, ready, busy = min((opened(driver, path) for _ in range(3)), key=lambda found: found[1])
    target = f"  (target: under {TARGET:.0f} s, {ready / TARGET:.2f} of it)" if count == 2_000 else ""
    steps = f"{count:>6} nodes, {len(new.plan.steps):>5} steps"
    took = f"drawn after {drawn:5.2f} s, in use after {ready:5.2f} s, CPU {busy:5.2f} s"
    print(f"  {steps}: {len(text) / 1e6:4.1f} MB made in {made:5.2f} s, {took}{target}")


def opened(driver: Any, path: Path) -> tuple[float, float, float]:
    """Seconds until it is drawn, until it has answered, and of CPU time."""
    driver.execute_cdp_cmd("Performance.disable", {})
    driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
    driver.get("about:blank")
    driver.get(path.as_uri())
    drawn, ready, said = driver.execute_async_script(READY)
    assert said == "advantages1", said
    metrics = driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    (busy,) = (metric["value"] for metric in metrics if metric["name"] == "TaskDuration")
    return drawn / 1e3, ready / 1e3, busy


def browser() -> Any:
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    for argument in (
        "headless=new",
        "no-sandbox",
        "disable-gpu",
        "disable-dev-shm-usage",
        "window-size=1400,900",
    ):
        options.add_argument(f"--{argument}")
    options.binary_location = str(shutil.which("chromium"))
    return webdriver.Chrome(options=options, service=Service(str(shutil.which("chromedriver"))))


if __name__ == "__main__":
    main()
