"""The README and pages are right: their screens are what is printed, and their links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlgraph.cli.main import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SCREEN = re.compile(r"```\n\$ rlgraph ((?:[^\n]*\\\n)*[^\n]*)\n(.*?)\n```", re.DOTALL)
SHOWING = [ROOT / "README.md", ROOT / "docs" / "planning.md", ROOT / "docs" / "cost_model.md"]
SCREENS = [
    (command.replace("\\\n", " "), screen)
    for page in SHOWING
    for command, screen in SCREEN.findall(page.read_text(encoding="utf-8"))
    if "--autoplace" not in command  # a search takes long
]


@pytest.mark.parametrize(("command", "screen"), SCREENS, ids=[command for command, _ in SCREENS])
def test_a_screen_is_what_the_command_prints(command: str, screen: str) -> None:
    result = CliRunner().invoke(main, shlex.split(command))
    printed = (result.stdout + result.stderr).rstrip()
    for piece in f"\n{screen}\n".split("\n...\n"):  # three dots stand for lines left out
        assert piece.strip("\n") in printed


def test_there_are_screens() -> None:
    assert len(SCREENS) >= 5


def test_the_first_screen_has_what_a_stranger_decides_by() -> None:
    """What it is, the edit that makes GRPO, its plan, two commands, why, and what has not run; few links."""
    first_screen, _, rest = README.partition("\n## ")
    assert "is a compiler for" in first_screen
    assert "replace: {advantages: {op: advantage.grpo}}" in first_screen
    assert "docs/pictures/grpo.svg" in first_screen
    assert len(commands(first_screen).strip().splitlines()) == 2
    reasons = first_screen.partition("instead of verl or TRL:")[2].partition("\n\n**")[0]
    assert reasons.count("\n- ") == 4
    assert "has never run on a GPU" in first_screen
    assert rest.startswith("Start\n")
    assert len(re.findall(r"[^!]\[[^]]*\]\(", README)) < 20


def test_the_graphs_shown_are_the_shipped_ones() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    shipped = [path.read_text(encoding="utf-8") for path in (ROOT / "graphs").glob("*.yaml")]
    without_about = [
        "".join(line for line in text.splitlines(True) if not line.startswith("about:")) for text in shipped
    ]
    for block in blocks:
        assert any(block.strip() in text for text in without_about), block


def commands(text: str) -> str:
    """What a page's blocks have that is typed into a shell, without comments."""
    blocks = re.findall(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)
    typed = [block for language, block in blocks if not language and re.search(COMMAND, block)]
    return re.sub(r"(^|\s)#.*", "", "".join(typed), flags=re.MULTILINE)


COMMAND = re.compile(r"^(?:\$ )?(?:rlgraph|pip|python\S*|make|ray|docker|kubectl) .*", re.MULTILINE)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_commands_are_quoted_for_every_shell(page: Path) -> None:
    """Outside quotes zsh, and bash where a file matches, take brackets and stars for patterns of files."""
    bare = re.sub(r"'[^']*'|\"[^\"]*\"", "", commands(page.read_text(encoding="utf-8")))
    assert not [line for line in COMMAND.findall(bare) if re.search(r"[][*?{}()]", line)]


@pytest.mark.parametrize("command", main.commands)
def test_the_readme_lists_every_command(command: str) -> None:
    table = README.partition("| command |")[2].partition("\n\n")[0]
    assert f"`{command}`" in table, f"add `rlgraph {command}` to the table of commands in README.md"


def test_the_readme_has_commands_with_lists() -> None:
    assert "'prompts.files=[train.jsonl]'" in commands(README)


BESIDE_THE_SITE = ["README.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/README.md"]


@pytest.mark.parametrize("name", BESIDE_THE_SITE)
def test_links_lead_somewhere(name: str) -> None:
    """Links and anchors of pages in docs/ are checked when the site is built (test_site.py)."""
    page = ROOT / name
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert target.startswith("http") or (page.parent / target).exists(), target


NAMED_PAGE = re.compile(r"docs/([\w/-]+\.md)(?:#([\w-]+)|, \\*\"([^\"\\]+))?")


def test_pages_that_errors_and_tables_name_have_the_sections_that_they_name() -> None:
    """As ``docs/gpu.md#driver`` and ``docs/data.md, "A curriculum"``."""
    missing = set()
    for folder in ("rlgraph", "nodes", "runtime", "graphs"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix not in (".py", ".yaml"):
                continue
            source = path.read_text(encoding="utf-8")
            for page, anchor, title in NAMED_PAGE.findall(source.replace("\\'", "'")):
                target = ROOT / "docs" / page
                text = target.read_text(encoding="utf-8") if target.is_file() else ""
                titles = re.findall(r"^#+ (.*)", text, re.MULTILINE)
                anchors = [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in titles]
                if not text or (anchor and anchor not in anchors) or (title and title not in titles):
                    missing.add((path.name, page, anchor or title))
    assert missing == set()
