"""The page in a real browser: no complaints, nothing fetched, the run's numbers, nothing wider than the window."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from browser import Browser, browser, find
from reports import bottleneck_network, made_up
from test_report import BOTTLENECKS, EVIL, LAYERS, summaries

from helpers.commands import call
from sosp.app.report.page import render_page

CHROMIUM = find()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (on Debian: apt-get install chromium)"),
]


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    assert CHROMIUM is not None
    with browser(CHROMIUM) as found:
        yield found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run, in a folder with a name of its own."""
    folder = tmp_path_factory.mktemp("runs") / "b <i>"
    words = ("--data", "digits", "--width", "0.25", "--method", "sosp-i", "--examples", "60", "--out", folder)
    assert call("prune", "sosp:digits_resnet", *words).exit_code == 0
    return folder


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, run: Path) -> dict[str, Path]:
    """The page of the real run, of a large one, and of one whose names are meant to break it."""
    folder = tmp_path_factory.mktemp("pages")
    evil = made_up(folder / EVIL.replace("/", ""), [(f"{EVIL}{i}", a, b) for i, (_, a, b) in enumerate(LAYERS)])
    evil = replace(evil, summaries=summaries(), bottlenecks=BOTTLENECKS, epochs={}, loss_curve=None)
    made = {"evil": render_page([evil]), "large": render_page([made_up(folder, bottleneck_network())])}
    for name, text in made.items():
        (folder / f"{name}.html").write_text(text)
    return {"real": run / "report.html", **{name: folder / f"{name}.html" for name in made}}


@pytest.mark.parametrize("name", ["real", "evil", "large"])
def test_no_complaints_and_nothing_fetched(window: Browser, pages: dict[str, Path], name: str) -> None:
    window.open(pages[name])
    assert window.complaints == []
    assert window.requests[0] == pages[name].resolve().as_uri()
    assert all(address.startswith("data:") for address in window.requests[1:])


def test_the_numbers_are_those_of_the_run(window: Browser, run: Path) -> None:
    window.open(run / "report.html")
    result = json.loads((run / "result.json").read_text())["prune"]
    shown = window.evaluate("[...document.querySelectorAll('.card .after data')].map(x => Number(x.value))")
    before = window.evaluate("[...document.querySelectorAll('.card .before data')].map(x => Number(x.value))")
    keys = ("top1", "params", "macs", "latency", "bytes")
    assert shown == [result[key] for key in keys]
    assert before == [result["before"][key] for key in keys]
    text = window.evaluate("document.querySelector('.cards').innerText")
    assert f"{100 * result['top1']:.2f} %" in text
    assert f"{result['params']:,}" in text


def test_a_layer_named_like_a_script_is_text(window: Browser, pages: dict[str, Path]) -> None:
    window.open(pages["evil"])
    assert window.evaluate("document.scripts.length") == 0
    titles = window.evaluate("[...document.querySelectorAll('svg title')].map(x => x.textContent)")
    assert any(title.startswith(f"{EVIL}0, weight") for title in titles)
    cells = window.evaluate("[...document.querySelectorAll('#layers th[scope=row]')].map(x => x.textContent)")
    assert cells == [f"{EVIL}{i}" for i in range(4)]


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", ["real", "evil", "large"])
def test_the_page_does_not_scroll_sideways(window: Browser, pages: dict[str, Path], name: str, width: int) -> None:
    window.open(pages[name], width=width)
    assert window.evaluate("document.documentElement.scrollWidth") <= width
    # Text in figures that shrink with the page stays readable: CSS pixels after scaling.
    smallest = window.evaluate(
        "Math.min(...[...document.querySelectorAll('svg text')].map(t => parseFloat(getComputedStyle(t).fontSize) * "
        "t.getScreenCTM().a / Math.cos(Math.atan2(t.getScreenCTM().b, t.getScreenCTM().a)) || 99))"
    )
    assert smallest >= 8.5


@pytest.mark.parametrize("name", ["real", "large"])
def test_figures_use_the_width_of_the_page(window: Browser, pages: dict[str, Path], name: str) -> None:
    window.open(pages[name])
    used = window.evaluate(
        "[...document.querySelectorAll('.plots')].map(p => Math.max(...[...p.querySelectorAll('svg')]"
        ".map(s => s.getBoundingClientRect().right - p.getBoundingClientRect().left)) / p.clientWidth)"
    )
    assert len(used) >= 6
    assert min(used) > 0.99


def test_light_and_dark(window: Browser, run: Path) -> None:
    colours = []
    for dark in (False, True):
        window.open(run / "report.html", dark=dark)
        page = window.evaluate("getComputedStyle(document.body).backgroundColor")
        colours.append((page, window.evaluate("getComputedStyle(document.querySelector('svg text')).fill")))
    assert colours[0][0] == "rgb(255, 255, 255)"
    assert all(light != dark for light, dark in zip(*colours, strict=True))


def test_nothing_is_drawn_outside_of_its_figure(window: Browser, pages: dict[str, Path]) -> None:
    """Labels are where there is room for them, also in the browser's own font."""
    for name in ("real", "large"):
        window.open(pages[name])
        outside = window.evaluate(
            "[...document.querySelectorAll('svg')].flatMap(s => { const b = s.getBoundingClientRect(); "
            "return [...s.querySelectorAll('text')].filter(t => { const r = t.getBoundingClientRect(); "
            "return r.left < b.left - 3 || r.right > b.right + 3 || r.top < b.top - 3 || r.bottom > b.bottom + 3; })"
            ".map(t => t.textContent); })"
        )
        assert outside == []
