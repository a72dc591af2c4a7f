"""The documentation: every block of code runs, nothing is left out of it, and the site builds without a warning."""

import json
import os
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import sosp
from helpers import pages
from helpers.pages import NOTE, ROOT, RUN, SHOWN, Block, blocks
from sosp.app.cli import COMMANDS

PAGES = pages.pages(["README.md", "CONTRIBUTING.md", "docs/**/*.md"])
BLOCKS = [block for page in PAGES for block in blocks(page)]
RUNNING = [b for b in BLOCKS if b.language in RUN and "file" not in b.notes]
LEFT_OUT = [b for b in RUNNING if b.skipped]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NOTEBOOK = ROOT / "examples" / "story.ipynb"
REFERENCE = "".join((ROOT / page).read_text() for page in PAGES if page.startswith("docs/reference/"))


# --- blocks ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({b.page for b in RUNNING if not b.skipped}))
def test_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = torch.random.get_rng_state()
    assert pages.run_page(page) == len([b for b in RUNNING if b.page == page and not b.skipped])
    torch.random.set_rng_state(before)


@pytest.mark.parametrize("block", LEFT_OUT, ids=lambda b: b.place)
def test_what_is_left_out_says_why(block: Block) -> None:
    """So that it shows among the skipped tests. What is named in it must be there all the same."""
    named = re.findall(r"\b(?:benchmarks|examples)/\S+\.(?:py|ipynb)", block.code)
    assert [name for name in named if not (ROOT / name).is_file()] == []
    pytest.skip(f"{block.skipped}")


def test_every_block_has_a_language_that_is_run_or_shown() -> None:
    assert [b.place for b in BLOCKS if b.language not in (*RUN, *SHOWN)] == []


def test_every_comment_is_one_that_is_understood() -> None:
    prose = {page: re.sub(r"^( *)```.*?^\1```$", "", (ROOT / page).read_text(), flags=re.M | re.S) for page in PAGES}
    comments = [(page, line) for page, text in prose.items() for line in text.splitlines() if "<!--" in line]
    assert [f"{page}: {line}" for page, line in comments if not NOTE.match(line)] == []
    assert [b.place for b in BLOCKS for name in pages.listed(b.notes.get("given", "")) if name not in pages.GIVEN] == []


def test_a_block_that_fails_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    good, bad = "```python\nx = 1\n```\n", "```python\nassert x == 2, 'line'\n```\n"
    (tmp_path / "a.md").write_text(good + "\n" + bad)
    with pytest.raises(AssertionError) as error:
        pages.run_page("a.md")
    assert error.traceback[-1].lineno == 5  # counted from 0: the sixth line of the page
    (tmp_path / "b.md").write_text("```sh\nsosp no-such-command\n```\n")
    with pytest.raises(AssertionError, match="no-such-command"):
        pages.run_page("b.md")
    (tmp_path / "c.md").write_text("```sh\nrm -rf something\n```\n")
    with pytest.raises(AssertionError, match="nobody knows how to run 'rm'"):
        pages.run_page("c.md")


def test_what_a_page_adds_to_a_table_is_gone_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    before = list(sosp.METHODS)
    (tmp_path / "a.md").write_text("<!-- given: sosp -->\n```python\nsosp.METHODS['mine'] = 1\nmissing\n```\n")
    with pytest.raises(NameError):
        pages.run_page("a.md")
    assert list(sosp.METHODS) == before


def test_notes_belong_to_the_block_below_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    (tmp_path / "a.md").write_text("<!-- not run: why -->\n```sh\na\n```\n\n    ```sh\n    b \\\n      c\n    ```\n")
    first, second = blocks("a.md")
    assert (first.skipped, first.line, first.code) == ("why", 3, "a")
    assert (second.skipped, second.line, second.code) == (None, 7, "b \\\n  c")


# --- pages ----------------------------------------------------------------------------------------------


def test_the_menu_holds_every_page_and_nothing_else() -> None:
    """But pages of results, which a command writes: their first one leads to the others."""
    menu = re.findall(r"^ +- .+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    inside = [page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")]
    assert [page for page in inside if page not in menu and not page.startswith("results/")] == []
    assert [page for page in menu if page not in inside] == []
    assert len(menu) == len(set(menu))


def test_every_public_name_is_in_the_reference() -> None:
    assert [name for name in sosp.__all__ if f"sosp.{name}" not in REFERENCE and name != "__version__"] == []


def test_every_command_is_in_the_reference() -> None:
    assert [name for name in COMMANDS if f"`sosp {name}" not in REFERENCE] == []


def test_every_method_has_a_section() -> None:
    text = (ROOT / "docs/reference/methods.md").read_text()
    headings = {name for line in re.findall(r"^## (.+)$", text, re.MULTILINE) for name in line.split(", ")}
    assert [name for name in sosp.METHODS if name not in headings] == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "benchmarks/README.md"])
def test_links_between_files_lead_somewhere(page: str) -> None:
    """Those of the site are checked by its builder."""
    links = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", (ROOT / page).read_text())
    links += re.findall(r'src="(?!https?://)([^"]+)"', (ROOT / page).read_text())
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


def test_figures_in_the_readme_stand_on_the_pages_they_name() -> None:
    """And every such page names the command that makes them."""
    rows = re.findall(r"^\| (.+) \| \[.+\]\((docs/.+\.md)\) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert 3 < len(rows) <= 8
    for claim, page in rows:
        text = (ROOT / page).read_text()
        figures = re.findall(r"\d[\d,]*(?:\.\d+)?", re.sub(r"ResNet-\d+|H200|torch \S+", "", claim))
        assert figures
        assert [f for f in figures if not re.search(rf"(?<![\d.]){re.escape(f)}(?![\d]|\.\d)", text)] == [], claim
        assert re.search(r"^(?:```sh$|Command: `sosp |Made with `benchmarks/)", text, re.MULTILINE), page


def test_the_readme_fits_on_two_screens() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 700
    cells = [cell for line in text.splitlines() if line.startswith("|") for cell in line.split("|")]
    assert [cell for cell in cells if len(cell.split()) > 20] == []


def test_tables_of_the_repair_are_those_of_its_record() -> None:
    command = [sys.executable, "benchmarks/refit/repair.py", "--show", "--out", "benchmarks/results/repair-cuda.jsonl"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True).stdout
    tables = found.strip().split("\n\n")
    assert len(tables) == 3
    assert [table for table in tables if table not in (ROOT / "docs/how/repair.md").read_text()] == []


@pytest.mark.slow
def test_the_site_builds(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install 'sosp[docs]'")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed: pip install 'sosp[docs]'")
    # Not --quiet: that also keeps --strict from counting warnings.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    found = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, found.stderr
    assert "WARNING" not in found.stdout + found.stderr
    built = sorted(tmp_path.rglob("*.html"))
    assert len(built) > 25
    for page in built:
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"?(https?:[^\s\">]+)", page.read_text())
        loaded += re.findall(r"<link[^>]* href=\"?(https?:[^\s\">]+)", page.read_text())
        assert loaded == [], page  # it opens without a network


# --- examples -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.name)
def test_example(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script)])
    with pages.same_tables(sosp.METHODS):
        runpy.run_path(str(script), run_name="__main__")
    assert "trained" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []  # it leaves nothing behind
    assert len(script.read_text().splitlines()) < 70


def test_three_examples() -> None:
    assert len(EXAMPLES) == 3


@pytest.mark.slow
def test_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of matplotlib's own parts
        matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install matplotlib")
        matplotlib.use("Agg")
        from matplotlib import pyplot
    monkeypatch.chdir(tmp_path)
    drawn: list[int] = []
    monkeypatch.setattr(pyplot, "show", lambda: drawn.extend(pyplot.get_fignums()) or pyplot.close("all"))
    names: dict[str, object] = {"__name__": "story"}
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    with matplotlib.rc_context():
        for cell in cells:
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}#{cell['id']}", "exec"), names)
    assert len(drawn) == 5


def test_the_notebook_is_small_and_names_no_machine() -> None:
    text = NOTEBOOK.read_text()
    assert len(text) < 300_000
    assert [o for c in json.loads(text)["cells"] for o in c.get("outputs", []) if o["output_type"] == "error"] == []
    assert re.findall(r"(?:/home|/root|/tmp|/Users)/", text) == []
