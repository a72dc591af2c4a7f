"""Budgets of quality, and curves, from the command line."""

import json
from pathlib import Path

import pytest
from browser import browser, find

from helpers.commands import call, lines, refusal

NET = ("sosp:digits_resnet", "--width", "0.25", "--data", "digits")
FEW = ("--examples", "50", "--repair-examples", "60")


def test_a_curve_is_a_table_a_file_and_a_page(tmp_path: Path) -> None:
    folder = tmp_path / "curve"
    words = ("tradeoff", *NET, *FEW, "--budgets", "0.8,0.5,0.001", "--out", folder)
    *_, facts = lines(*words)
    assert [point["budget"] for point in facts["points"]] == [1.0, 0.8, 0.5]
    assert facts["quality"] == "accuracy on 500 inputs of the test data"
    assert facts["refused"][0].startswith("MACs 0.001: macs=0.001 cannot be met")
    kept = json.loads((folder / "tradeoff.json").read_text())
    assert kept["points"] == facts["points"]
    page = (folder / "tradeoff.html").read_text()
    assert Path(facts["report"]) == folder / "tradeoff.html"
    assert page.count('class="dot ') == 2 * 3
    for layer, (before, after) in facts["points"][2]["widths"].items():
        assert f"{layer}</span>" in page
        assert f"{before} → {after}" in page
    (folder / "tradeoff.html").write_text("mine")
    assert "not a report" in refusal(*words[:-4], "--budgets", "0.8", "--out", folder)


def test_the_table_of_a_curve(tmp_path: Path) -> None:
    found = call("tradeoff", *NET, *FEW, "--no-repair", "--budgets", "0.6", "--out", tmp_path)
    rows = [line for line in found.stdout.splitlines() if "%" in line]
    assert "unpruned" in rows[0]
    assert "MACs 0.6" in rows[1]
    assert " ms" in rows[1]
    assert f"Report: {tmp_path}/tradeoff.html" in found.stdout


def test_budgets_that_are_none() -> None:
    assert "--budgets should be a list of numbers" in refusal("tradeoff", *NET, "--budgets", "half")
    assert "must be shares of the MACs" in refusal("tradeoff", *NET, "--budgets", "1.5")


def test_the_quality_as_a_budget(tmp_path: Path) -> None:
    *_, end, _ = lines("prune", *NET, *FEW, "--max-drop", "0.5", "--no-curve", "--out", tmp_path / "p")
    assert "for a drop of at most 0.5: 0.500: accuracy falls by" in end["search"]
    assert end["macs"] < 0.5 * end["before"]["macs"]
    assert "leave out macs" in refusal("prune", *NET, "--max-drop", "0.1", "--macs", "0.5")


@pytest.mark.slow
@pytest.mark.skipif(find() is None, reason="no Chromium here (on Debian: apt-get install chromium)")
def test_in_a_browser_pointing_at_a_network_shows_its_widths(tmp_path: Path) -> None:
    *_, facts = lines("tradeoff", *NET, *FEW, "--no-repair", "--budgets", "0.7,0.4", "--out", tmp_path)
    chromium = find()
    assert chromium is not None
    with browser(chromium) as window:
        window.open(tmp_path / "tradeoff.html", width=1280)
        for i, point in enumerate(facts["points"]):
            window.point_at(f"figure:nth-of-type(1) .dot.at-{i}")
            shown = window.evaluate(
                "[...document.querySelectorAll('.panel')].filter(x => getComputedStyle(x).visibility == 'visible')"
                ".map(x => x.innerText).join('|').replace(/\\s+/g, ' ')"
            )
            assert "|" not in shown
            for layer, (before, after) in point["widths"].items():
                assert f"{layer} {before} → {after}" in shown
            assert f"{100 * point['macs']:.2f} %" in shown
