"""The figures of a results page: which there are, what they hold, and that nothing in them hides or misleads."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sosp.studies.cell_records import NETWORKS
from sosp.studies.cell_records import write_cell_record as keep
from sosp.studies.cells import WideningSpec, encode_cell
from sosp.studies.pages.drawing import draw_figure, make_canvas
from sosp.studies.pages.figures import LOOKS, Figure, FigurePoint, Line, make_figures
from sosp.studies.pages.result_rows import collect_rows
from sosp.studies.paper import Cell, CellRecord, Experiment, PrunedCell, PublishedRow, TimedCell, TrainedCell

ORIGIN = {"commit": "c0ffee", "torch": "2.99", "hardware": "Some GPU", "begun": "today"}
PLACE = ("resnet56", "cifar10")
START = TrainedCell(*PLACE)
WHOLE = {"accuracy": 0.9339, "params": 850_000, "macs": 125_000_000}
PAPER = PublishedRow(31, *PLACE, "sosp-h", 93.15, 0.15, params=338e3, macs=55e6)


def pruned(method: str = "sosp-h", ratio: float = 0.5, **more: Any) -> PrunedCell:
    return PrunedCell(START, method, ("ratio", ratio), **more)


def metrics(cell: Cell) -> dict[str, float]:
    if isinstance(cell, TrainedCell):
        return WHOLE
    if isinstance(cell, TimedCell):
        return {"seconds": 0.5, "score": 0.4, "select": 0.1, "structures": round(2032 * cell.width), "outputs": 10}
    left = 1 - cell.budget[1]
    sizes = {"params": round(850_000 * left), "macs": round(125e6 * left), "macs_alternative": 1}
    shares = dict.fromkeys(("zeroed", "masked", "cut", "recalibrated"), 0.3)
    return {**sizes, **shares, "first": 0.8, "final": 0.93 + 0.001 * cell.seed, "best": 0.94}


def found(folder: Path, *cells: Cell, suffix: str = "", **more: Any) -> list[Figure]:
    """The figures of an experiment of which all these cells are measured."""
    for cell in (START, *cells):
        start = {} if isinstance(cell, TrainedCell) else {"sha256": "f", **WHOLE}
        state: dict[str, Any] = {"state": "done", "origin": ORIGIN, "start": start, "facts": {"source": "trained"}}
        history = {"seconds": [0.4, 0.6]} if isinstance(cell, TimedCell) else {}
        made = CellRecord(encode_cell(cell), cell.name, "some", metrics=metrics(cell), history=history, **state)
        keep(folder, made, NETWORKS if isinstance(cell, TrainedCell) else "some")
    experiment = Experiment("some", "Some title", "Tab. 99", cells, **more)
    return make_figures(experiment, collect_rows(experiment, folder), suffix)


def lines(figure: Figure, panel: int = 0) -> dict[str, Line]:
    return {line.label: line for line in figure.panels[panel][2]}


# --- which there are ------------------------------------------------------------------------------------


def test_a_method_alone_is_not_drawn(tmp_path: Path) -> None:
    alone = (pruned(), pruned(ratio=0.3), pruned(gate="features"), pruned(examples=5000))
    assert found(tmp_path, *alone) == []
    assert len(found(tmp_path, *alone, pruned("random"))) == 1
    assert len(found(tmp_path, pruned(), pruned(shuffled=True))) == 1


@pytest.mark.parametrize(
    ("paper", "drawn"),
    [
        (PAPER, True),
        (replace(PAPER, method="HRank"), True),
        (replace(PAPER, params=None, macs=None, params_cut=60.0), True),
        (replace(PAPER, params=None, macs=None, ratio=0.5), False),  # nobody knows where on the axis
        (replace(PAPER, method="baseline"), False),
        (replace(PAPER, data="cifar100"), False),
        (replace(PAPER, accuracy=None), False),
    ],
)
def test_beside_the_papers_points_one_method_is_enough(tmp_path: Path, paper: PublishedRow, drawn: bool) -> None:
    assert len(found(tmp_path, pruned(), published=(paper,))) == drawn


def test_seconds_of_one_method_are_not_drawn(tmp_path: Path) -> None:
    alone = tuple(TimedCell(*PLACE, "sosp-h", width=width) for width in (1.0, 2.0))
    assert found(tmp_path, *alone) == []
    (figure,) = found(tmp_path, *alone, TimedCell(*PLACE, "sosp-i"))
    assert figure.title == "Some title – resnet56, wider and wider"
    assert {line.points[0].runs for line in lines(figure).values()} == {2}  # repeats


# --- what they hold -------------------------------------------------------------------------------------


def test_titles_name_the_experiment_the_network_and_the_length(tmp_path: Path) -> None:
    cells = (pruned(), pruned("random"))
    (plain,), (short,) = found(tmp_path, *cells), found(tmp_path, *cells, suffix="-e20")
    assert plain.title == "Some title – resnet56-cifar10, the final accuracy"
    assert short.title == f"{plain.title}, 20 epochs"
    assert (plain.name, short.name) == ("some-resnet56-cifar10", "some-resnet56-cifar10-e20")


def test_points_count_their_runs(tmp_path: Path) -> None:
    (figure,) = found(tmp_path, *(pruned(seed=seed) for seed in range(3)), pruned(ratio=0.3), published=(PAPER,))
    shown = lines(figure)
    assert shown["sosp-h"].points == (
        pytest.approx((425_000, 93.1, 0.1, 3)),
        pytest.approx((595_000, 93.0, 0.0, 1)),
    )
    assert shown["baseline"].points == (pytest.approx((850_000, 93.39, 0.0, 1)),)
    assert shown["sosp-h (paper)"].points == ((338e3, 93.15, 0.15, 0),)


def test_a_single_gate_is_not_named_and_its_points_stand_by_size(tmp_path: Path) -> None:
    (figure,) = found(tmp_path, *(pruned(ratio=ratio) for ratio in (0.3, 0.7, 0.5)), published=(PAPER,))
    assert [up for _, up, _ in figure.panels] == ["accuracy in percent"] * 2
    assert [p.x for p in lines(figure)["sosp-h"].points] == [255_000, 425_000, 595_000]


def test_a_second_table_of_the_paper_is_a_series_of_its_own(tmp_path: Path) -> None:
    later = replace(PAPER, accuracy=93.27, std=0.06, table="App. A.14")
    (figure,) = found(tmp_path, pruned(), published=(PAPER, later))
    first, second = lines(figure)["sosp-h (paper)"], lines(figure)["sosp-h (paper, App. A.14)"]
    assert [p.y for p in first.points + second.points] == [93.15, 93.27]
    assert first.method == second.method == "sosp-h"
    assert LOOKS[first.look][0] != LOOKS[second.look][0]


def test_gates_measured_at_several_budgets_have_panels_of_their_own(tmp_path: Path) -> None:
    both = tuple(pruned(ratio=ratio, gate=gate) for ratio in (0.3, 0.5) for gate in ("weights", "features"))
    (apart,) = found(tmp_path, *both, published=(PAPER,))
    assert [(x, y.partition(":")[0]) for x, y, _ in apart.panels] == [
        (x, f"gate {gate}") for gate in ("weights", "features") for x in ("parameters", "MACs")
    ]
    everywhere = {"baseline", "sosp-h (paper)"}
    assert set(lines(apart)) == {"sosp-h"} | everywhere
    assert set(lines(apart, 2)) == {"sosp-h, features"} | everywhere
    (together,) = found(tmp_path, *both[:2], both[2], published=(PAPER,))
    assert len(together.panels) == 2
    assert {"sosp-h", "sosp-h, features"} < set(lines(together))


def test_colour_is_the_method_and_the_look_its_terms(tmp_path: Path) -> None:
    gently = replace(START.schedule, rate=0.001)
    terms: tuple[dict[str, Any], ...] = ({}, {"gate": "features"}, {"examples": 9}, {"gate": "features", "examples": 9})
    cells = (*(pruned(**one) for one in terms), pruned(tuning=gently))
    (figure,) = found(tmp_path, *cells, published=(PAPER,))
    shown = [line for line in lines(figure).values() if not line.whole]
    assert {line.method for line in shown} == {"sosp-h"}
    assert [(line.label, *LOOKS[line.look]) for line in shown] == [
        ("sosp-h", "o", "-"),
        ("sosp-h, features", "^", "--"),
        ("sosp-h, 9 examples", "P", "none"),
        ("sosp-h, features, 9 examples", "X", "none"),
        ("sosp-h, rate 0.001", "P", "none"),
        ("sosp-h (paper)", "s", "none"),
    ]


def test_networks_that_were_grown_look_different(tmp_path: Path) -> None:
    grown = [replace(START, grown=WideningSpec(how, START)) for how in ("expand", "widen")]
    (figure,) = found(tmp_path, *grown, pruned(), pruned("random"))
    whole = [line for line in lines(figure).values() if line.whole]
    assert [line.label for line in whole] == ["baseline", "baseline, expand", "baseline, widen"]
    assert len({LOOKS[line.look][0] for line in whole}) == 3


# --- drawn ----------------------------------------------------------------------------------------------


def line(label: str, *points: tuple[float, ...], look: str = "weights", method: str = "") -> Line:
    """Of three runs each, with a deviation, where nothing else is said."""
    made = tuple(FigurePoint(*point, *(0.1, 3)[len(point) - 2 :]) for point in points)
    return Line(label, method or label.partition(" (")[0], look, made)


def drawing(*panels: tuple[Line, ...], up: str = "accuracy in percent") -> Any:
    pytest.importorskip("matplotlib")
    made = make_canvas(Figure("some", "Some title", tuple((f"x{k % 2}", up, lines) for k, lines in enumerate(panels))))
    made.draw_without_rendering()
    return made


def marks(axes: Any, y: float) -> list[Any]:
    """The markers at a height."""
    return [m for m in axes.lines if m.get_marker() != "none" and list(m.get_ydata()) == [y]]


def words(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def legend(axes: Any) -> dict[str, Any]:
    shown = axes.get_legend()
    return {handle.get_label(): handle for handle in shown.legend_handles}


def caption(made: Any) -> str:
    return str(made.get_supxlabel())


HUGE = line("baseline", (2e7, 93.56, 0.0, 1))
THEIRS = line("baseline (paper)", (2e7, 94.18, 0.0, 0), look="paper")
SMALL = (line("sosp-h", (4.4e5, 92.9)), line("sosp-i", (5.6e5, 92.5)))


def test_a_whole_network_that_is_far_larger_is_a_line_across() -> None:
    near = (line("sosp-h", (8e6, 92.9)), line("sosp-i", (9e7, 92.5)), line("baseline", (4e8, 93.56, 0.0, 1)))
    made = drawing((*SMALL, HUGE, THEIRS), near)
    for axes, most in zip(made.axes, (5.6e5, 9e7), strict=True):  # the second for the sake of the first
        assert axes.get_xscale() == "linear"
        assert axes.get_xlim()[1] < 1.5 * most
        assert marks(axes, 93.56) == []
        assert [m.get_linestyle() for m in axes.lines if list(m.get_ydata()) == [93.56, 93.56]] == ["-"]
    first = made.axes[0]
    assert [m.get_linestyle() for m in first.lines if list(m.get_ydata()) == [94.18, 94.18]] == ["--"]
    assert words(first) == ["baseline (paper), 20.0 M: 94.18", "baseline, 20.0 M: 93.56"]
    handles = legend(made.axes[1])
    assert (handles["baseline"].get_linestyle(), handles["baseline"].get_marker()) == ("-", "None")
    assert handles["baseline (paper)"].get_linestyle() == "--"


def test_a_whole_network_of_about_the_size_is_a_point() -> None:
    (axes,) = drawing((*SMALL, line("baseline", (5.5e6, 93.56)))).axes
    assert len(marks(axes, 93.56)) == 1
    assert axes.get_xscale() == "log"  # more than ten times the least
    assert words(axes) == []
    (axes,) = drawing((*SMALL, line("baseline", (4e6, 93.56)))).axes
    assert axes.get_xscale() == "linear"


MANY = tuple(line(f"method {k}", (4e5 + 2e4 * k, 92 + 0.2 * k)) for k in range(10))


def test_what_lies_far_below_all_others_is_told_at_the_edge() -> None:
    low = line("slimming (paper)", (4.5e5, 85.01, 0.0, 0), look="paper")
    away = line("slimming (paper)", (1e4, 85.01, 0.0, 0), look="paper")
    made = drawing((*MANY, low), (*MANY, away))
    first, second = made.axes
    assert all(91 < axes.get_ylim()[0] < 92 for axes in made.axes)
    assert words(first) == ["↓ slimming (paper): 85.01"]
    assert words(second) == ["↓ slimming (paper), 10.0 k: 85.01"]
    assert second.get_xlim()[0] > 3e5
    assert "slimming (paper)" not in legend(second)


def test_few_points_or_near_ones_all_have_their_place() -> None:
    for others, low in ((MANY[:5], 85.01), (MANY, 90.3)):
        (axes,) = drawing((*others, line("slimming", (4.5e5, low)))).axes
        assert axes.get_ylim()[0] < low
        assert len(marks(axes, low)) == 1
        assert words(axes) == []


def test_bars_stand_where_there_is_a_deviation_only() -> None:
    made = drawing((line("sosp-h", (1, 90.0, 0.2, 3), (2, 91.0, 0.0, 1)), line("random", (1, 80.0, 0.0, 1))))
    assert len(made.axes[0].containers) == 1
    assert "bars: standard deviations" in caption(made)
    made = drawing((line("sosp-h", (1, 90.0, 0.0, 1)), line("HRank (paper)", (2, 89.0, 0.0, 0), look="paper")))
    assert made.axes[0].containers == []
    assert "bars" not in caption(made)


def test_single_runs_are_hollow_and_the_papers_pale() -> None:
    from_paper = line("sosp-h (paper)", (1.5, 92.0, 0.1, 0), look="paper")
    made = drawing((line("sosp-h", (1, 90.0, 0.2, 3), (2, 91.0, 0.0, 1)), from_paper))
    (axes,) = made.axes
    (mean,), (single,), (paper,) = (marks(axes, y) for y in (90.0, 91.0, 92.0))
    assert single.get_markerfacecolor() == "white"
    assert mean.get_markerfacecolor() == mean.get_color() == single.get_color() == paper.get_color()
    assert all(own < pale < 1 for own, pale in zip(paper.get_color(), paper.get_markerfacecolor(), strict=True))
    assert caption(made).split("; ")[:2] == ["hollow: a single run", "pale: the paper's"]
    several = drawing((line("sosp-h", (1, 90.0)), line("random", (2, 80.0))))
    assert caption(several) == "bars: standard deviations"


def test_the_legend_shows_what_is_drawn_as_it_is_drawn() -> None:
    only_here = line("HRank (paper)", (1.5, 89.0, 0.0, 0), look="paper")
    curve, lone = line("sosp-h", (1, 90.0), (2, 91.0)), line("random", (1, 80.0, 0.0, 1))
    gate = line("sosp-h, features", (1, 88.0), (2, 89.5), look="features", method="sosp-h")
    made = drawing((curve, lone, only_here), (curve, lone), (gate,), (gate,))
    first, second = legend(made.axes[1]), legend(made.axes[3])
    assert made.axes[0].get_legend() is made.axes[2].get_legend() is None
    assert list(first) == ["sosp-h", "random", "HRank (paper)"]  # also what only the panel before has
    assert list(second) == ["sosp-h, features"]
    assert [handle.get_linestyle() for handle in first.values()] == ["-", "None", "None"]
    assert [handle.get_marker() for handle in first.values()] == ["o", "o", "s"]
    assert (second["sosp-h, features"].get_linestyle(), second["sosp-h, features"].get_marker()) == ("--", "^")
    assert second["sosp-h, features"].get_color() == first["sosp-h"].get_color()
    assert (first["sosp-h"].get_markerfacecolor(), first["random"].get_markerfacecolor()) == (
        first["sosp-h"].get_color(),
        "white",
    )


def test_curves_are_lines_and_other_terms_are_not() -> None:
    points = (1, 90.0), (2, 91.0)
    for look, (_, style) in LOOKS.items():
        (axes,) = drawing((line("sosp-h", *points, look=look), line("random", (1, 80.0)))).axes
        (joined,) = (m for m in axes.lines if list(m.get_ydata()) == [90.0, 91.0])
        assert joined.get_linestyle() == {"none": "None"}.get(style, style)


def test_what_nothing_was_removed_from_is_dark() -> None:
    colors = pytest.importorskip("matplotlib.colors")
    names = ("baseline, expand", "baseline", "baseline, widen", "sosp-h", "sosp-h, widen", "obd")
    (axes,) = drawing(tuple(line(name, (k, 90.0 + k), method=name) for k, name in enumerate(names, 1))).axes
    shown = {name: colors.to_rgb(handle.get_color()) for name, handle in legend(axes).items()}
    assert len(set(shown.values())) == len(names)
    assert shown["baseline"] == (0, 0, 0)
    for name, colour in shown.items():
        grey = len(set(colour)) == 1
        assert grey == name.startswith("baseline")
        assert max(colour) < 0.5 or not grey


def test_colours_stay_and_are_not_used_twice() -> None:
    others = [line(f"m{k}", (k, 90.0 + k)) for k in range(8)]
    few, many = (legend(drawing((*others[:count], line("sosp-i", (1, 99.0)))).axes[0]) for count in (1, len(others)))
    assert few["sosp-i"].get_color() == many["sosp-i"].get_color()
    colours = [handle.get_color() for handle in many.values()]
    assert len(set(colours)) == len(colours)
    assert all(len(set(colour)) > 1 for colour in colours)  # grey is for baselines


def test_what_would_hide_one_another_stands_side_by_side() -> None:
    ends = line("random", (0, 80.0), (1000, 95.0))
    close = {90.0: 505.0, 90.01: 500.0, 90.02: 503.0}  # less than a marker apart
    nearly = tuple(line(f"m{y}", (x, y)) for y, x in close.items())
    made = drawing((ends, *nearly, line("far", (700, 90.03)), line("paper's", (500, 90.04), look="paper")))
    (axes,) = made.axes
    at = {y: marks(axes, y)[0].get_xdata()[0] for y in (*close, 80.0, 95.0, 90.03, 90.04)}
    moved = sorted(at[y] for y in close)
    assert [at[y] for y in sorted(close, key=close.__getitem__)] == moved  # in the order of their sizes
    assert [b - a for a, b in pairwise(moved)] == pytest.approx([18, 18])  # 0.018 of the span
    assert sum(moved) / 3 == pytest.approx(sum(close.values()) / 3)
    assert [at[y] for y in (80.0, 95.0, 90.03, 90.04)] == [0, 1000, 700, 500]
    bars = [bar.lines[2][0].get_segments()[0][0][0] for bar in axes.containers]
    assert sorted(bars) == sorted(at.values())
    away = max(abs(at[y] - x) for y, x in close.items())
    assert f"side by side, by up to {away / 10:.1f}% of the axis" in caption(made)
    assert "side by side" not in caption(drawing((ends, nearly[0])))


@pytest.mark.parametrize("xs", [(500, 501, 520, 538, 600), (480, 500, 501, 600)])
def test_what_is_moved_does_not_hide_what_stood_beside(xs: tuple[int, ...]) -> None:
    ends = line("random", (0, 80.0), (1000, 95.0))
    (axes,) = drawing((ends, *(line(f"m{k}", (x, 90 + k / 100)) for k, x in enumerate(xs)))).axes
    at = [marks(axes, 90 + k / 100)[0].get_xdata()[0] for k in range(len(xs))]
    assert all(b - a > 17.5 for a, b in pairwise(at))
    assert at[-1] == 600


def test_what_is_moved_does_not_pass_what_stands_above_it() -> None:
    """The smaller of two networks stays on the left, however different their accuracies are."""
    ends = line("random", (0, 80.0), (1000, 95.0))
    xs = {90.0: 500, 90.01: 503, 93.0: 505}
    (axes,) = drawing((ends, *(line(f"m{y}", (x, y)) for y, x in xs.items()))).axes
    at = [marks(axes, y)[0].get_xdata()[0] for y in xs]
    assert at == sorted(at)
    assert sum(at) / 3 == pytest.approx(sum(xs.values()) / 3)


def test_how_far_markers_are_moved_is_told_also_to_the_left() -> None:
    ends = line("random", (0, 80.0), (1000, 95.0))
    made = drawing((ends, *(line(f"m{x}", (x, 90 + x / 1e4)) for x in (500, 501, 509))))
    assert "by up to 1.5% of the axis" in caption(made)  # 500 stands at 485.3, 509 at 521.3


def test_on_a_logarithmic_axis_markers_are_moved_by_a_factor() -> None:
    ends = line("random", (10, 80.0), (1000, 95.0))
    (axes,) = drawing((ends, line("a", (100, 90.0)), line("b", (101, 90.01)))).axes
    first, second = (marks(axes, y)[0].get_xdata()[0] for y in (90.0, 90.01))
    assert first * second == pytest.approx(100 * 101)
    assert second / first == pytest.approx(100**0.018)


def test_seconds_are_drawn_where_they_were_measured() -> None:
    widths = (2032, 4064, 8128, 16256, 32512, 65024)
    slow = line("sosp-i", *((x, x / 2000, 0.01, 5) for x in widths))
    quick = line("sosp-h", *((x, x / 2000 + 0.001, 0.0, 5) for x in widths))
    made = drawing((slow, quick), up="seconds")
    (axes,) = made.axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert list(axes.get_xticks()) == list(widths)
    assert [m.get_xdata()[0] for x in widths for m in marks(axes, x / 2000)] == list(widths)
    assert [m.get_xdata()[0] for x in widths for m in marks(axes, x / 2000 + 0.001)] == list(widths)
    assert caption(made) == "bars: standard deviations"
    quick = line("obd", (4e5, 0.01))
    assert words(drawing((*MANY, quick), up="seconds").axes[0]) == []  # their axis reaches everything


def test_panels_have_one_scale_of_y() -> None:
    made = drawing((line("sosp-h", (1, 90.0)), line("random", (2, 80.0))), (line("sosp-h", (1, 90.0)),))
    first, second = made.axes
    assert first.get_ylim() == second.get_ylim()
    assert made.get_suptitle() == "Some title"
    assert (first.get_xlabel(), second.get_xlabel(), first.get_ylabel()) == ("x0", "x1", "accuracy in percent")


def test_the_same_bytes_and_the_digest_of_all_that_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one = Figure("some", "Some title", (("x", "accuracy in percent", (*SMALL, HUGE, THEIRS)),))
    (tmp_path / "again").mkdir()
    first, second = draw_figure(one, tmp_path).read_bytes(), draw_figure(one, tmp_path / "again").read_bytes()
    assert first == second
    assert one.digest.encode() in first
    assert b"dc:date" not in first
    single = replace(SMALL[0], points=(SMALL[0].points[0]._replace(runs=1),))
    other_look = replace(SMALL[0], look="features")
    for changed in (single, other_look, replace(SMALL[0], method="obd")):
        assert replace(one, panels=((*one.panels[0][:2], (changed, *SMALL[1:])),)).digest != one.digest
