"""The page of a trade-off curve: its numbers, and in a browser what pointing at a network shows."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from browser import MIDDLE, Browser, browser, find

from sosp.app.report import write_tradeoff_page
from sosp.errors import ArgumentError, RunError
from sosp.pipeline.tradeoff import TradeoffPoint

POINTS = [
    TradeoffPoint(1.0, 1.0, 1.0, 1.0, 15.0, {"conv1": (16, 16), "layer1.0.conv2": (64, 64)}),
    TradeoffPoint(0.75, 0.74, 0.66, 0.995, 12.5, {"conv1": (16, 12), "layer1.0.conv2": (64, 48)}),
    TradeoffPoint(0.5, 0.496, 0.41, 0.96, 9.0, {"conv1": (16, 9), "layer1.0.conv2": (64, 25)}),
    TradeoffPoint(0.25, 0.248, 0.2, 0.81, None, {"conv1": (16, 4), "layer1.0.conv2": (64, 0)}),
]
CHROMIUM = find()
in_browser = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (on Debian: apt-get install chromium)"),
]


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return write_tradeoff_page(tmp_path / "curve.html", POINTS, title="resnet <20>", words=["Repaired & measured."])


def test_the_page_has_every_number_and_needs_nothing_else(page: Path) -> None:
    html = page.read_text()
    numbers = [float(x) for x in re.findall(r'<data value="([^"]+)">', html[html.index('id="points"') :])]
    assert numbers == [x for p in POINTS for x in (p.quality, p.macs, p.params, p.milliseconds) if x is not None]
    assert "<h1>resnet &lt;20&gt;</h1>" in html
    assert "Repaired &amp; measured." in html
    assert not re.findall(r"<script|https?://(?!www\.w3\.org)|url\((?!#)", html)
    assert "default-src 'none'" in html
    assert html.count("<svg") == 2
    assert html.count('class="dot ') == 4 + 3  # one network was not measured
    assert 'id="point-1" checked' in html  # the smallest that loses at most one point


def test_without_latencies_one_figure_is_as_wide_as_the_page(tmp_path: Path) -> None:
    html = write_tradeoff_page(tmp_path / "a.html", [replace(p, milliseconds=None) for p in POINTS]).read_text()
    assert html.count("<svg") == 1
    assert 'width="810pt"' in html


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="at least one point"):
        write_tradeoff_page(tmp_path / "a.html", [])
    (tmp_path / "b.html").write_text("mine")
    with pytest.raises(RunError, match="not a report"):
        write_tradeoff_page(tmp_path / "b.html", POINTS)


# --- in a browser ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    assert CHROMIUM is not None
    with browser(CHROMIUM) as found:
        yield found


def shown(window: Browser) -> str:
    """The text of the panels that can be seen."""
    return window.evaluate(
        "[...document.querySelectorAll('.panel')].filter(x => getComputedStyle(x).visibility == 'visible')"
        ".map(x => x.innerText).join('|').replace(/\\s+/g, ' ')"
    )


def describes(text: str, point: TradeoffPoint) -> bool:
    """The text is about this network alone: its numbers, and the width of each layer."""
    widths = [f"{layer} {before} → {after}" for layer, (before, after) in point.widths.items()]
    return all(words in text for words in (f"{100 * point.quality:.2f} %", *widths)) and "|" not in text


@pytest.mark.parametrize("width", [1280, 390])
class TestBrowser:
    pytestmark = in_browser

    def test_pointing_at_a_network_shows_its_widths(self, window: Browser, page: Path, width: int) -> None:
        window.open(page, width=width)
        for figure, count in ((1, 4), (2, 3)):
            for i, point in enumerate(POINTS[:count]):
                window.point_at(f"figure:nth-of-type({figure}) .dot.at-{i}")
                assert describes(shown(window), point)
        window.point_at("h1")
        assert describes(shown(window), POINTS[1])  # the selected one again

    def test_a_tap_and_the_arrow_keys_select(self, window: Browser, page: Path, width: int) -> None:
        window.open(page, width=width)
        window.point_at("h1")
        window.ask("Emulation.setTouchEmulationEnabled", enabled=True)
        window.point_at(".dot.at-2", touch=True)
        window.ask("Emulation.setTouchEmulationEnabled", enabled=False)
        assert window.evaluate("document.querySelector('input:checked').id") == "point-2"
        assert describes(shown(window), POINTS[2])
        window.point_at("h1")
        window.evaluate("document.querySelector('input:checked').focus()")
        window.press("ArrowRight", 39)
        assert describes(shown(window), POINTS[3])

    def test_the_rings_are_where_the_networks_are_drawn(self, window: Browser, page: Path, width: int) -> None:
        window.open(page, width=width)
        drawn = window.evaluate(f"[...document.querySelectorAll('svg g[clip-path] > use')].map({MIDDLE})")
        rings = window.evaluate(f"[...document.querySelectorAll('.dot')].map({MIDDLE})")
        assert len(drawn) == len(rings) == 7
        # A marker is 6 points wide and drawn at 1.2 pixels per point here: within half of it.
        assert all(min(abs(x - a) + abs(y - b) for a, b in drawn) < 3 for x, y in rings)

    def test_it_fits_and_asks_for_nothing(self, window: Browser, page: Path, width: int) -> None:
        window.open(page, width=width)
        assert window.evaluate("document.documentElement.scrollWidth") <= width
        assert window.complaints == []
        assert all(address.startswith(("file:", "data:")) for address in window.requests)
