"""How figures look: colours that follow the page's theme, SVG for the page with words on hover, PNG for papers."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

# A colour is what it is in light mode and in PNG files. In the page it becomes the CSS variable of its name, which
# dark mode sets anew. The palette is what stands out enough on white of Okabe and Ito's, made for all kinds of
# colour vision; lines differ in their markers too.
COLOURS = {
    "ink": "#1b2127",
    "muted": "#56606b",
    "line": "#d9dfe5",
    "pale": "#8694a1",
    "blue": "#0072b2",
    "vermillion": "#d55e00",
    "green": "#009e73",
    "purple": "#cc79a7",
}
INK, MUTED, LINE, PALE, BLUE, VERMILLION, GREEN, PURPLE = COLOURS.values()
KEPT, REMOVED, BEFORE = BLUE, VERMILLION, PALE

SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: small, selectable, in the font of the page
    "svg.hashsalt": "sosp",  # the same figure is the same file
    "text.parse_math": False,  # a layer may have a dollar sign in its name
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": LINE,
    "grid.linewidth": 0.7,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}
DPI = 300  # of PNG files
SMALL = 4.5  # inches: figures up to this width share a row of the page and shrink on a phone; wider ones scroll there
PAGE = 11.25  # inches: the width of the page
READABLE = 0.8  # share of its width to which a figure may shrink on a narrow screen before it scrolls
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, eq=False)
class Plot:
    """A figure, what it says to those who cannot see it, and what its parts say under the mouse."""

    name: str  # of its file
    figure: Figure
    description: str
    tips: Mapping[str, str] = field(default_factory=dict)  # gid of an artist -> words

    @property
    def small(self) -> bool:
        return float(self.figure.get_figwidth()) <= SMALL


@contextmanager
def use_plot_settings() -> Iterator[None]:
    """Our settings, and no warnings of letters that the font of PNG files does not have; undone at the end."""
    with matplotlib.rc_context(SETTINGS), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def create_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty figure with one pair of axes; inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def set_log_scale(axes: Axes) -> None:
    """Up, with numbers that need no typesetting."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_power(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())


def format_power(value: float) -> str:
    """``0.01``, and ``10⁻⁵`` for what is far from one."""
    if value <= 0 or 1e-3 <= value < 1e4:
        return f"{value:g}"
    return "10" + str(round(math.log10(value))).translate(RAISED)


# --- files ----------------------------------------------------------------------------------------------

ROOT = re.compile(r"<svg ([^>]*)>")
SIZE = re.compile(r'(?:width|height|viewBox)="[^"]*"')
REST = re.compile(r"<metadata>.*?</metadata>|<defs>\s*<style[^>]*>.*?</style>\s*</defs>", re.DOTALL)
GROUP = re.compile(r'<g id="([^"]*)"([^>]*)>')
STYLE = re.compile(r'style="[^"]*"')
COLOUR = re.compile("|".join(COLOURS.values()))
VARIABLES = {colour: f"var(--{name})" for name, colour in COLOURS.items()}


def render_svg(plot: Plot, key: str = "", wide: bool = False) -> Markup:
    """Return the figure as part of a page: with a description, the page's colours, and tooltips.

    Names inside it differ from those in a figure with another name or ``key``. A ``wide`` figure fills the page.
    """
    if wide:
        plot.figure.set_figwidth(max(PAGE, plot.figure.get_figwidth()))
    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": key + plot.name}):
        FigureCanvasSVG(plot.figure).print_svg(file, metadata={"Date": None, "Creator": None})
    found = ROOT.search(file.getvalue())
    assert found is not None
    sizes = " ".join(SIZE.findall(found[1]))
    body = REST.sub("", file.getvalue()[found.end() :])
    body = GROUP.sub(lambda group: _group(plot.tips.get(group[1]), group[2]), body)
    body = STYLE.sub(lambda style: COLOUR.sub(lambda colour: VARIABLES[colour[0]], style[0]), body)
    least = f' style="min-width:{72 * READABLE * plot.figure.get_figwidth():.0f}pt"' if wide else ""
    return Markup(f'<svg role="img" aria-label="{escape(plot.description)}"{least} {sizes}>{body}')


def _group(words: str | None, rest: str) -> str:
    """Without its name, which other figures of the page have too; with what it says."""
    return f"<g{rest}>" if words is None else f"<g{rest}><title>{escape(words)}</title>"


def save_png(plot: Plot, path: Path) -> None:
    """For a paper: on white, at 300 dots per inch."""
    plot.figure.set_facecolor("white")
    FigureCanvasAgg(plot.figure)
    plot.figure.savefig(path, format="png", dpi=DPI, metadata={"Software": None})
