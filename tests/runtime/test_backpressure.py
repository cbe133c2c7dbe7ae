"""What each stage of a stream waits for: a stage that is slow is named, by the report and on the page."""

from __future__ import annotations

from pathlib import Path

import pytest
from ran import metrics as untimed

from rlgraph.reports.measured import read_metrics
from rlgraph.reports.report import make_report, report_text
from rlgraph.runtime.run import run_graph
from rlgraph.view.recorded import recorded

GRAPH = str(Path(__file__).parent / "streamed.yaml")
SPENT = ("busy", "starved", "held")
pytestmark = pytest.mark.usefixtures("in_demo")


def run(*settings: str, inline: bool = False, count: int = 5) -> Path:
    """Iterations of 16 rows in 8 groups."""
    schedule = f"schedule={{iterations: {count}, buffer: {{staleness: 2, chunk: 6}}}}"
    note = f"update.note={Path('used.jsonl').resolve()}"
    return run_graph(GRAPH, (schedule, note, *settings), run_dir=Path("run"), inline=inline)


@pytest.mark.slow
@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize(
    ("slow", "stage"), [("judged.seconds=1.0", "judged on gen decides"), ("update.seconds=1.0", "the update")]
)
def test_the_slow_stage_is_named(slow: str, stage: str) -> None:
    """Whatever else takes how long, what takes a second at least is always at work or has rows."""
    report = make_report(run(slow))
    assert report.bottleneck.startswith(stage)
    assert report.bottleneck in report_text(report)
    by_name = {one.about: one for one in report.stages}
    assert [*by_name] == ["generation", "judged on gen", "buffer", "update"]
    if "update" in stage:
        assert by_name["update"].busy > 0.9 and by_name["buffer"].held > by_name["buffer"].starved
    else:
        assert by_name["update"].starved > by_name["update"].busy
        assert by_name["generation"].held > by_name["generation"].busy


def test_what_stages_did_adds_up_and_the_page_has_every_group() -> None:
    folder = run(inline=True, count=4)
    assert not [name for line in untimed("run") for name in line if "stage" in name], "they are times"
    for line in read_metrics(folder):
        spent = {s: [line[f"perf/stage/{s}/{what}"] for what in SPENT] for s in ("generation", "buffer")}
        assert min(map(min, spent.values())) >= 0
        assert sum(spent["generation"]) >= 0.99 * sum(spent["buffer"]) > 0
    told = recorded(folder)
    stream = told["stream"]
    assert [n for _, _, n in stream["updates"]] == [0, 1, 2, 3]
    assert [n for _, n in stream["syncs"]] == [0, 1, 2, 3]
    assert len({prompt for _, prompt, *_ in stream["groups"]}) == len(stream["groups"]) == 4 * 8
    uses = {start for start, *_ in stream["updates"]}
    lanes: dict[int, float] = {}
    for lane, _, weights, begun, drawn, used in sorted(stream["groups"], key=lambda group: group[3]):
        assert lanes.get(lane, -1.0) <= begun <= drawn <= used and used in uses
        assert 0 <= sorted(uses).index(used) - weights <= 2
        lanes[lane] = used
    assert len(lanes) <= 3 * 8, "no more than may be begun"
    assert told["bottleneck"] and len(told["stages"]) == 4
