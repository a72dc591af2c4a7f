"""The results page: its numbers come from records and from the paper's data alone, and it is the one in docs."""

import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

import sosp
from helpers.commands import call, lines, refusal
from sosp.app.cli import reproduce_command
from sosp.app.cli.output import Screen
from sosp.errors import RunError
from sosp.studies import paper as experiments
from sosp.studies.cell_records import NETWORKS, iterate_records
from sosp.studies.cell_records import write_cell_record as keep
from sosp.studies.cells import encode_cell
from sosp.studies.experiment import list_starts
from sosp.studies.pages import check_pages, make_pages, write_pages
from sosp.studies.pages.number_format import (
    format_cell_budget,
    format_example_count,
    format_gate,
    format_published_size,
    format_size,
)
from sosp.studies.pages.result_rows import Stat, collect_rows, match_published
from sosp.studies.pages.verdicts import find_deviations, judge_claims, judge_pairs, judge_seconds
from sosp.studies.paper import Cell, CellRecord, Claim, Experiment, PrunedCell, PublishedRow, TimedCell, TrainedCell

HERE = Path(__file__).resolve().parents[2]
ORIGIN = {"commit": "c0ffee", "torch": "2.99", "hardware": "Some GPU", "begun": "today"}
START = TrainedCell("resnet56", "cifar10")
PLACE = ("resnet56", "cifar10")
SOME = Experiment(
    "some",
    "Some experiment",
    "Tab. 99",
    tuple(PrunedCell(START, m, ("ratio", 0.5), seed=s) for m in ("sosp-h", "first-order") for s in (0, 1, 2, 3)),
    (
        PublishedRow(31, *PLACE, "sosp-h", 93.15, 0.15, 84.28, 0.65, 0.5, 338e3, 55e6),
        PublishedRow(32, *PLACE, "HRank", 90.72, params=0.27e6, macs=32e6),
        PublishedRow(33, *PLACE, "baseline", 93.39),
    ),
    (Claim("second order helps", 34, "sosp-h", "first-order"),),
)
FINAL = {"sosp-h": (0.9311, 0.9327, 0.9302, 0.9312), "first-order": (0.9222, 0.9236, 0.9209)}  # one seed is missing


def record(cell: Cell, metrics: dict[str, float], **more: Any) -> CellRecord:
    start = {"sha256": "f", "accuracy": 0.9339, "params": 853018, "macs": 125_485_696}
    options = {"metrics": metrics, "start": start, "origin": ORIGIN, **more}
    return CellRecord(encode_cell(cell), cell.name, "some", **{"state": "done", **options})


def figures(final: float) -> dict[str, float]:
    shares = {"zeroed": final - 0.6, "masked": 0.21, "cut": final - 0.7, "recalibrated": final - 0.4}
    sizes = {"params": round(4e5 * final), "macs": round(6e7 * final), "macs_alternative": round(5e7 * final)}
    return {**shares, **sizes, "first": final - 0.2, "final": final, "best": final + 0.002}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Seven of eight cells, and the network they began with."""
    folder = tmp_path / "results"
    whole = {"accuracy": 0.9339, "params": 853018, "macs": 125_485_696}
    keep(folder, record(START, whole, facts={"source": "given: a.safetensors"}), NETWORKS)
    for cell in SOME.cells:
        assert isinstance(cell, PrunedCell)
        if cell.seed < len(FINAL[cell.method]):
            keep(folder, record(cell, figures(FINAL[cell.method][cell.seed])), "some")
    return folder


# --- numbers --------------------------------------------------------------------------------------------


def by_hand(values: list[float], scale: float = 100) -> str:
    found = [scale * value for value in values]
    return f"{mean(found):.2f} ± {stdev(found):.2f}"


def table_of(text: str, title: str) -> list[list[str]]:
    """The cells of the table under a heading, without its rule."""
    part = text.split(f"### {title}\n\n")[1].split("\n\n")[0]
    found = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in part.splitlines()]
    return [found[0], *found[2:]]


def test_the_tables_are_means_over_seeds_beside_the_papers_numbers(results: Path) -> None:
    text = make_pages([SOME], results).texts["some.md"]
    heads, *found = table_of(text, "resnet56-cifar10: accuracy")
    for line, (method, finals) in zip(found, FINAL.items(), strict=True):
        row = dict(zip(heads, line, strict=True))
        shown = [figures(final) for final in finals]
        assert (row["method"], row["gate"], row["seeds"]) == (method, "weights", f"{len(finals)} of 4")
        for head, name in {"θ∖M": "zeroed", "cut": "cut", "renewed": "recalibrated", "epoch 1": "first"}.items():
            assert row[head] == by_hand([one[name] for one in shown])
        assert (row["final"], row["best"]) == (by_hand(list(finals)), by_hand([one["best"] for one in shown]))
    first = dict(zip(heads, found[0], strict=True))
    assert (first["paper: accuracy"], first["paper: before"], first["line"]) == ("93.15 ± 0.15", "84.28 ± 0.65", "31")
    assert (first["lost"], first["paper: lost"]) == (by_hand([0.9339 - final for final in FINAL["sosp-h"]]), "0.24")
    second = dict(zip(heads, found[1], strict=True))
    assert (second["paper: accuracy"], second["paper: lost"]) == ("–", "–")
    heads, *found = table_of(text, "resnet56-cifar10: size")
    row = dict(zip(heads, found[0], strict=True))
    params = mean(figures(final)["params"] for final in FINAL["sosp-h"])
    assert row["parameters"] == f"{params / 1e3:.0f} k"
    assert row["removed"] == f"{100 * (1 - params / 853018):.2f} %"
    assert (row["paper: parameters"], row["paper: MACs"]) == ("338 k", "55 M")


def test_every_number_of_the_page_is_a_records_or_the_papers(results: Path) -> None:
    """All that stands there is explained by a list made here from the raw records and the definition."""
    text = make_pages([SOME], results).texts["some.md"]
    raw = [json.loads(path.read_text()) for path in results.rglob("*.json")]
    known = {"56", "10", "99", "0.5", "0", "2", "3", "4", "2.99", "0.3", "1", "200"}  # names, versions, counts, rules
    for method in FINAL:
        mine = [r["metrics"] for r in raw if r["cell"].get("method") == method]
        for name in mine[0]:
            values = [one[name] for one in mine]
            known |= {f"{100 * mean(values):.2f}", f"{100 * stdev(values):.2f}"}
            known |= {f"{mean(values) / 1e3:.0f}", f"{mean(values) / 1e6:.2f}"}
        known.add(f"{93.39 - 100 * mean(one['final'] for one in mine):.2f}")
        for name, whole in (("params", 853018), ("macs", 125_485_696)):
            known.add(f"{100 * (1 - mean(one[name] for one in mine) / whole):.2f}")
    known |= {str(r["cell"]["examples"]) for r in raw if r["cell"]["kind"] == "pruned"}
    known |= {"93.39", "853", "125.49", "31", "32", "33", "34"}
    known |= {"0.24"}  # points that the paper's network lost
    known |= {"93.15", "0.15", "84.28", "0.65", "338", "55", "90.72", "270", "32"}
    known |= {f"{100 * (a - b):.2f}" for a, b in zip(*FINAL.values(), strict=False)}  # seed by seed
    words = re.sub(r"`[^`]*`|!\[.*\)|c0ffee|^- .*: \d of \d cells$|Tab\. \d+", "", text, flags=re.MULTILINE)
    words = re.sub(r"[A-Za-z]+[0-9]+[A-Za-z0-9-]*", "", words)  # names of networks and datasets
    strange = [n for n in re.findall(r"\d+(?:\.\d+)?", words) if n not in known]
    assert strange == []


def test_commits_are_named_shortly_and_once(tmp_path: Path) -> None:
    full = "1234abcd" * 5
    told = ("1234abc", full, f"{full}-dirty", "unknown")
    cells = [PrunedCell(START, "sosp-h", ("ratio", 0.5), seed=seed) for seed in range(len(told))]
    for cell, commit in zip(cells, told, strict=True):
        keep(tmp_path, record(cell, figures(0.93), origin={**ORIGIN, "commit": commit}), "some")
    text = make_pages([replace(SOME, cells=tuple(cells))], tmp_path).texts["some.md"]
    assert "- Some GPU: torch 2.99, commit 1234abc, 1234abc-dirty, unknown\n\n`-dirty`: with changes" in text
    assert "`-dirty`" not in make_pages([replace(SOME, cells=tuple(cells[:2]))], tmp_path / "none").texts["some.md"]


def test_all_machines_of_a_training_that_was_moved_are_named(tmp_path: Path) -> None:
    cell = PrunedCell(START, "sosp-h", ("ratio", 0.5))
    parts = [{"from": 1, "hardware": "a GPU", "torch": "2.98", "commit": "def"}, {"from": 9, **ORIGIN}]
    keep(tmp_path, record(cell, figures(0.93), facts={"parts": parts}), "some")
    text = make_pages([replace(SOME, cells=(cell,))], tmp_path).texts["some.md"]
    assert "Measured on\n\n- a GPU: torch 2.98, commit def\n- Some GPU: torch 2.99, commit c0ffee\n\n## Ours" in text


def test_a_network_that_no_epoch_has_changed_is_called_untrained(tmp_path: Path) -> None:
    first = replace(START, schedule=replace(START.schedule, epochs=0))
    for start in (START, first):
        keep(
            tmp_path, record(start, {"accuracy": 0.1, "params": 10, "macs": 20}, facts={"source": "trained"}), NETWORKS
        )
    text = make_pages([replace(SOME, cells=(START, first))], tmp_path).texts["some.md"]
    sources = [line.split("|")[2].strip() for line in text.splitlines() if line.startswith("| resnet56-cifar10")]
    assert sources[:2] == ["trained", "untrained"]


def test_times_are_over_repeats_and_name_their_inputs(tmp_path: Path) -> None:
    cells = (TimedCell(*PLACE, "sosp-h"), TimedCell(*PLACE, "sosp-i", width=2.0), TimedCell(*PLACE, "sosp-i"))
    paper = PublishedRow(41, *PLACE, "sosp-h", seconds=50, seconds_std=2)
    some = Experiment("some", "t", "w", cells, (paper,), (Claim("quicker", 42, "sosp-h", "sosp-i", by="seconds"),))
    for k, cell in enumerate(cells):
        times = [0.11 * (k + 1), 0.13 * (k + 1)]
        found = {"seconds": mean(times), "score": 0.1, "select": 0.02, "structures": 2032, "outputs": 10}
        facts = {"inputs": "random numbers"}
        keep(tmp_path, record(cell, found, history={"seconds": times}, facts=facts), "some")
    text = make_pages([some], tmp_path).texts["some.md"]
    heads, first, second, third = table_of(text, "Seconds of the pruning step")
    row = dict(zip(heads, first, strict=True))
    assert (row["together"], row["inputs"]) == ("0.12 s ± 0.014", "random numbers")
    assert (row["paper: seconds"], row["line"]) == ("50 s ± 2", "41")
    assert second[0] == "resnet56x2-cifar10"
    assert second[-1] == third[-1] == "–"
    assert "resnet56-cifar10: sosp-h 0.12 s ± 0.014, sosp-i 0.36 s ± 0.042: confirmed" in text


def test_what_does_not_apply_is_left_out(tmp_path: Path) -> None:
    untrained = replace(START, schedule=replace(START.schedule, epochs=0))
    cells = (
        PrunedCell(START, "random", ("ratio", 0.5)),
        PrunedCell(START, "eigendamage", ("ratio", 0.5)),
        PrunedCell(START, "sosp-h", ("ratio", 0.5), cap=0.95),
        PrunedCell(untrained, "sosp-h", ("ratio", 0.5)),
    )
    final = PublishedRow(31, *PLACE, "sosp-h", 93.15, ratio=0.5, final=92.5, final_std=0.2, final_line=77)
    some = replace(SOME, cells=cells, published=(final,), claims=())
    for cell in cells:
        keep(tmp_path, record(cell, figures(0.9), start={"accuracy": 0.1, "params": 9, "macs": 9}), "some")
    text = make_pages([some], tmp_path).texts["some.md"]
    heads, *found = table_of(text, "resnet56-cifar10: accuracy")
    lines = [dict(zip(heads, line, strict=True)) for line in found]
    assert [line["gate"] for line in lines] == ["–", "–", "weights", "weights"]
    assert [line["examples"] for line in lines] == ["–", "1000", "1000", "1000"]
    assert [line["lost"] for line in lines] == ["-80.00", "-80.00", "-80.00", "–"]
    assert [line["paper: final"] for line in lines] == ["–", "–", "92.50 ± 0.20", "–"]
    assert [line["line"] for line in lines] == ["–", "–", "31, 77", "–"]
    heads, *found = table_of(text, "resnet56-cifar10: size")
    assert [dict(zip(heads, line, strict=True))["cap"] for line in found] == ["–", "–", "0.95", "–"]
    none = make_pages([replace(some, published=(replace(final, ratio=0.5, params=None),))], tmp_path / "none").texts[
        "some.md"
    ]
    assert "resnet56-cifar10: accuracy" in none
    assert "resnet56-cifar10: size" not in none


def test_sizes_are_printed_with_their_unit() -> None:
    assert [format_size(n) for n in (9_999, 10_000, 999_499, 1e6, 1e9)] == ["9999", "10 k", "999 k", "1.00 M", "1.00 G"]
    assert [format_published_size(n) for n in (999, 1e3, 1e6, 1.82e9)] == ["999", "1 k", "1 M", "1.82 G"]


def test_what_was_asked_for_is_a_share_or_a_number() -> None:
    def said(what: str, value: float) -> str:
        return format_cell_budget(PrunedCell(START, "sosp-h", (what, value)))

    assert [said("ratio", 0.5), said("params", 1.0)] == ["0.5 removed", "100.00 % of parameters left"]
    assert [said("params", 338e3), said("macs", 55e6)] == ["338 k parameters left", "55.00 M MACs left"]


@pytest.mark.parametrize(
    ("method", "shown"),
    [
        ("random", ("–", "–")),
        ("slimming", ("–", "–")),
        ("eigendamage", ("–", "1000")),
        ("amc", ("–", "1000")),
        ("sosp-i", ("weights", "1000")),
    ],
)
def test_a_method_has_a_gate_and_examples_where_it_needs_them(method: str, shown: tuple[str, str]) -> None:
    cell = PrunedCell(START, method, ("ratio", 0.5))
    assert (format_gate(cell), format_example_count(cell)) == shown


@pytest.mark.parametrize(("what", "values"), [("ratio", (0.3, 0.5, 0.7)), ("params", (0.7, 0.5, 0.3))])
def test_light_pruning_stands_first(what: str, values: tuple[float, ...], tmp_path: Path) -> None:
    cells = [PrunedCell(START, "sosp-h", (what, value)) for value in values]
    for cell in cells:
        keep(tmp_path, record(cell, figures(0.9)), "some")
    text = make_pages([replace(SOME, cells=tuple(cells[::-1]))], tmp_path).texts["some.md"]
    heads, *found = table_of(text, "resnet56-cifar10: accuracy")
    assert [line[heads.index("asked for")] for line in found] == [format_cell_budget(cell) for cell in cells]


def test_a_network_trained_for_slimming_is_told_from_the_plain_one(tmp_path: Path) -> None:
    starts = (START, replace(START, slimming=1e-4))
    for start in starts:
        keep(tmp_path, record(start, {"accuracy": 0.9, "params": 10, "macs": 20}), NETWORKS)
    text = make_pages([replace(SOME, cells=starts)], tmp_path).texts["some.md"]
    _, *found = table_of(text, "Networks")
    assert [line[0] for line in found] == ["resnet56-cifar10", "resnet56-cifar10, L1"]


def test_only_its_own_cells_count_as_measured(results: Path) -> None:
    network = next((results / NETWORKS).glob("*.json")).read_text()
    (results / "some").rename(results.parent / "away")
    text = make_pages([SOME], results).texts["some.md"]
    assert "Nothing is measured yet." in text
    assert "| given: a.safetensors | 93.39 |" in text
    assert "given" in network
    assert "`sosp reproduce some --data-dir DIR --weights resnet56=FILE`" in text


def test_weights_are_asked_for_where_they_were_given(tmp_path: Path) -> None:
    keep(tmp_path, record(START, {"accuracy": 0.9, "params": 1, "macs": 1}, facts={"source": "trained"}), NETWORKS)
    assert "`sosp reproduce some --data-dir DIR`" in make_pages([SOME], tmp_path).texts["some.md"]


def test_longer_than_that_is_printed_so(tmp_path: Path) -> None:
    cell, paper = TimedCell(*PLACE, "sosp-i"), PublishedRow(41, *PLACE, "sosp-i", seconds=48 * 3600)
    some = Experiment("some", "t", "w", (cell,), (paper,))
    assert "| > 172800 s | 41 |" in make_pages([some], tmp_path).texts["some.md"]


# --- findings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("points", "relation", "found"),
    [  # differences of three seeds, in points
        ((0.3, 0.5, 0.4), "better", "confirmed"),
        ((-0.3, -0.5, -0.4), "better", "contradicted"),
        ((0.3, 0.5, -0.4), "better", "within the noise"),
        ((0.1, 0.5, 0.9), "better", "within the noise"),  # all positive, but 0.5 ± 0.4
        ((0.15, 0.5, 0.5), "better", "within the noise"),  # 0.38 ± 0.20
        ((0.25, 0.5, 0.5), "better", "confirmed"),  # 0.42 ± 0.14
        ((0.3, 0.5, 0.4), "equal", "confirmed"),
        ((0.6, 0.7, 0.8), "equal", "different"),
        ((-0.6, -0.7, -0.8), "equal", "different"),
        ((0.6, 2.7, -0.8), "equal", "within the noise"),
        ((5.0, -5.0, 0.1), "equal", "within the noise"),  # the mean is small by accident
        ((0.3, 0.5), "better", "undecided"),
        ((), "equal", "undecided"),
    ],
)
def test_claims_are_judged_by_a_rule(points: tuple[float, ...], relation: str, found: str) -> None:
    pairs = [(level + gain / 100, level) for level, gain in zip((0.93, 0.5, 0.7), points, strict=False)]
    assert judge_pairs(Claim("", 1, "a", "b", relation=relation), pairs, 0.01) == found


@pytest.mark.parametrize(
    ("pairs", "relation", "found"),
    [  # exact in binary: at a bound, and beyond it
        ([(0.5 + k / 128, 0.5) for k in (1, 2, 3)], "better", "within the noise"),  # the mean is two deviations
        ([(0.5, 0.5)] * 3, "better", "within the noise"),
        ([(0.005, 0.0)] * 3, "equal", "confirmed"),  # the mean is the margin
        ([(0.005, 0.0), (0.0, 0.0), (0.0, 0.005)], "equal", "confirmed"),  # the deviation is
        ([(0.009, 0.0), (0.0, 0.0), (0.0, 0.009)], "equal", "within the noise"),
    ],
)
def test_what_is_at_a_bound_of_the_rule(pairs: list[tuple[float, float]], relation: str, found: str) -> None:
    assert judge_pairs(Claim("", 1, "a", "b", relation=relation), pairs, 0.0005) == found


@pytest.mark.parametrize(
    ("mine", "other", "found"),
    [
        (Stat(1.0, 0, 1), Stat(10.0, 0, 1), "undecided"),
        (Stat(1.0, 0.5, 5), Stat(2.0, 0.25, 5), "within the noise"),
        (Stat(0.92, 0.001, 5), Stat(0.93, 0.002, 5), "confirmed"),
        (Stat(0.93, 0.001, 5), Stat(0.92, 0.002, 5), "contradicted"),
        (Stat(0.92, 0.001, 5), Stat(0.93, 0.006, 5), "within the noise"),
        (Stat(0.93, 0.001, 5), Stat(9.2, 0, 1), "undecided"),
        (Stat(0.93, 0.001, 5), Stat(9.4, 0, 1), "confirmed"),
        (Stat(9.4, 0, 1), Stat(0.93, 0.001, 5), "contradicted"),
    ],
)
def test_times_are_judged_by_a_rule(mine: Stat, other: Stat, found: str) -> None:
    assert judge_seconds(mine, other) == found


@pytest.mark.parametrize(("guessed", "found"), [(0.1, "near guessing"), (0.01, "confirmed")])
def test_little_above_guessing_nothing_is_compared(guessed: float, found: str, tmp_path: Path) -> None:
    claim = Claim("it helps", 34, "sosp-h", "first-order")
    assert judge_pairs(claim, [(0.19, 0.11)] * 3, guessed) == found
    assert judge_pairs(claim, [(0.21, 0.11)] * 3, guessed) == "confirmed"
    assert judge_pairs(claim, [(0.19, 0.11)] * 2, guessed) == "undecided"
    data = {0.1: "cifar10", 0.01: "cifar100"}[guessed]
    cells = [replace(c, start=replace(START, data=data)) for c in SOME.cells if isinstance(c, PrunedCell)]
    for cell in cells:
        final = {"sosp-h": 0.19, "first-order": 0.11}[cell.method]
        keep(tmp_path, record(cell, {**figures(0.9), "final": final}), "some")
    few = replace(SOME, cells=tuple(cells))
    (finding,) = judge_claims(SOME, collect_rows(few, tmp_path))
    assert finding.verdict == found
    found_pages = make_pages([few], tmp_path).texts
    assert ("### Near guessing: nothing can be said" in found_pages["some.md"]) == (guessed == 0.1)
    assert "- resnet56" not in found_pages["index.md"].split("## What we could not confirm")[1]
    assert ("4 of 4" in found_pages["index.md"]) == (guessed == 0.01)


def test_twice_guessing_is_enough_and_one_lucky_run_is_not() -> None:
    claim = Claim("it helps", 34, "sosp-h", "first-order")
    assert judge_pairs(claim, [(0.2, 0.11)] * 3, 0.1) == "confirmed"
    assert judge_pairs(claim, [(0.25, 0.1), (0.15, 0.1), (0.15, 0.1)], 0.1) == "near guessing"


@pytest.mark.parametrize(
    ("data", "guessed"),
    [("digits", 0.1), ("cifar10", 0.1), ("cifar100", 0.01), ("imagenet", 0.001), ("photographs", 0.0)],
)
def test_guessing_is_one_of_the_classes_where_they_are_known(data: str, guessed: float, tmp_path: Path) -> None:
    cells = tuple(replace(c, start=replace(START, data=data)) for c in SOME.cells if isinstance(c, PrunedCell))
    few = replace(SOME, cells=cells)
    for share, found in ((1.9, "near guessing" if guessed else "within the noise"), (2.1, "confirmed")):
        for cell in cells:
            final = share * guessed if cell.method == "sosp-h" else guessed
            more = 1e-6 if not guessed and share > 2 and cell.method == "sosp-h" else 0.0
            keep(tmp_path, record(cell, {**figures(0.9), "final": final + more}), "some")
        (finding,) = judge_claims(few, collect_rows(few, tmp_path))
        assert finding.verdict == found


def test_only_seeds_that_both_sides_have_are_compared(results: Path) -> None:
    (finding,) = judge_claims(SOME, collect_rows(SOME, results))
    assert finding.differences == pytest.approx([0.89, 0.91, 0.93])
    first = SOME.cells[0]
    (results / "some" / f"{first.name}.json").unlink()
    (finding,) = judge_claims(SOME, collect_rows(SOME, results))
    assert finding.differences == pytest.approx([0.91, 0.93])
    assert finding.verdict == "undecided"


def test_a_claim_may_be_about_some_networks_and_one_budget(results: Path) -> None:
    def said(**about: Any) -> int:
        claim = replace(SOME.claims[0], **about)
        return len(list(judge_claims(replace(SOME, claims=(claim,)), collect_rows(SOME, results))))

    assert [said(places=("resnet56-cifar10",)), said(places=("vgg19-cifar10",))] == [1, 0]
    assert [said(budget=("ratio", 0.5)), said(budget=("ratio", 0.3))] == [1, 0]


def test_methods_are_compared_on_equal_terms(results: Path) -> None:
    first = [cell for cell in SOME.cells if isinstance(cell, PrunedCell) and cell.method == "sosp-h"]
    for change in ({"gate": "features"}, {"budget": ("ratio", 0.4)}, {"examples": 99}):
        others = [replace(cell, method="first-order", **change) for cell in first]  # type: ignore[arg-type]
        for cell in others:
            keep(results, record(cell, figures(0.9)), "some")
        few = replace(SOME, cells=(*first, *others))
        assert list(judge_claims(few, collect_rows(few, results))) == []
        loose = replace(few, claims=(replace(SOME.claims[0], same_terms=False),))
        assert len(list(judge_claims(loose, collect_rows(loose, results)))) == ("gate" not in change)


def test_networks_are_compared_with_themselves_only(tmp_path: Path) -> None:
    first = [cell for cell in SOME.cells if isinstance(cell, PrunedCell) and cell.method == "sosp-h"]
    others = [replace(cell, method="first-order", start=replace(START, data="cifar100")) for cell in first]
    for cell in (*first, *others):
        keep(tmp_path, record(cell, figures(0.9)), "some")
    few = replace(SOME, cells=(*first, *others))
    assert list(judge_claims(few, collect_rows(few, tmp_path))) == []


def test_the_papers_numbers_stand_beside_the_accuracy_they_are_of(results: Path) -> None:
    both = (*SOME.published, PublishedRow(35, *PLACE, "first-order", 92.98, 0.09, 82.27, 1.46, 0.5))

    def told(by: str) -> str:
        few = replace(SOME, published=both, claims=(replace(SOME.claims[0], by=by),))
        (finding,) = judge_claims(few, collect_rows(few, results))
        return finding.more[-1]

    assert told("final") == "the paper has 93.15 ± 0.15 and 92.98 ± 0.09"
    assert told("zeroed") == "the paper has 84.28 ± 0.65 and 82.27 ± 1.46"
    assert told("best").endswith("MACs")


def test_networks_that_began_otherwise_are_told_beside_a_verdict(results: Path) -> None:
    again = {"sha256": "g", "accuracy": 0.9301, "params": 853018, "macs": 125_485_696}
    for cell in SOME.cells:
        if isinstance(cell, PrunedCell) and cell.method == "first-order" and cell.seed < 3:
            keep(results, record(cell, figures(FINAL["first-order"][cell.seed]), start=again), "some")
    (finding,) = judge_claims(SOME, collect_rows(SOME, results))
    assert finding.more[-1] == "of networks that had 93.39 and 93.01"


def test_an_accuracy_is_retained_where_it_is_that_of_the_whole_network(results: Path) -> None:
    claim = Claim("it is retained", 35, "sosp-h", "baseline", relation="equal")
    (finding,) = judge_claims(replace(SOME, claims=(claim,)), collect_rows(SOME, results))
    assert (finding.verdict, finding.other.mean) == ("confirmed", pytest.approx(0.9339))
    (finding,) = judge_claims(
        replace(SOME, claims=(replace(claim, method="first-order"),)), collect_rows(SOME, results)
    )
    assert finding.verdict == "different"


def test_claims_are_judged_where_both_sides_are_measured_alike(results: Path) -> None:
    found = list(judge_claims(SOME, collect_rows(SOME, results)))
    params = [mean(figures(final)["params"] for final in finals) / 1e3 for finals in FINAL.values()]
    macs = [mean(figures(final)["macs"] for final in finals) / 1e6 for finals in FINAL.values()]
    assert [str(f) for f in found] == [
        f"resnet56-cifar10, 0.5 removed, gate weights: sosp-h {by_hand(list(FINAL['sosp-h']))}, "
        f"first-order {by_hand(list(FINAL['first-order']))} (by seed +0.89, +0.91, +0.93; "
        f"{params[0]:.0f} k and {params[1]:.0f} k parameters; {macs[0]:.2f} M and {macs[1]:.2f} M MACs): confirmed"
    ]
    both = (*SOME.published, PublishedRow(35, *PLACE, "first-order", 92.98, 0.09, ratio=0.5))
    (finding,) = judge_claims(SOME, collect_rows(replace(SOME, published=both), results))
    assert finding.more[-1] == "the paper has 93.15 ± 0.15 and 92.98 ± 0.09"
    text = make_pages([SOME], results).texts["some.md"]
    assert "### What we could confirm" in text
    assert "### What we could not confirm" not in text
    turned = replace(SOME, claims=(Claim("first order helps", 34, "first-order", "sosp-h"),))
    assert "### What we could not confirm" in make_pages([turned], results).texts["some.md"]
    index = make_pages([SOME], results).texts["index.md"]
    assert "Of the claims that are decided, all hold." in index
    part = make_pages([turned], results).texts["index.md"].split("## What we could not confirm")[1]
    assert "In the paper (line 34): first order helps. By the final accuracy:" in part
    assert "contradicted" in part
    asked = replace(SOME, claims=(Claim("it helps", None, "sosp-h", "first-order"),))
    assert "Not said in the paper: it helps. By the final accuracy:" in make_pages([asked], results).texts["some.md"]


def test_the_index_counts_verdicts_and_seeds(results: Path) -> None:
    def counted(*said: Claim) -> list[list[str]]:
        text = make_pages([replace(SOME, claims=said)], results).texts["index.md"]
        part = text.split("## What the paper claims\n\n")[1].split("\n\n")[0].splitlines()
        return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in (part[0], *part[2:])]

    heads, line = counted(*SOME.claims)
    row = dict(zip(heads, line, strict=True))
    assert (row["claim"], row["by"]) == ("second order helps (line 34)", "final")
    assert (row["found"], row["seeds in favour"]) == ("1 confirmed", "3 of 3")
    assert row["methods"] == "sosp-h; first-order"
    turned = Claim("second order helps", 34, "first-order", "sosp-h")
    heads, first, second = counted(*SOME.claims, *SOME.claims, turned)
    row = dict(zip(heads, first, strict=True))
    assert (row["found"], row["seeds in favour"]) == ("2 confirmed", "6 of 6")
    row = dict(zip(heads, second, strict=True))
    assert (row["found"], row["seeds in favour"]) == ("1 contradicted", "0 of 3")
    heads, line = counted(replace(turned, relation="equal"))
    assert "seeds in favour" not in heads


def test_a_seed_without_a_difference_is_not_in_favour(tmp_path: Path) -> None:
    for cell in SOME.cells:
        keep(tmp_path, record(cell, figures(0.9)), "some")
    assert "| 1 within the noise | 0 of 4 |" in make_pages([SOME], tmp_path).texts["index.md"]


def test_one_experiment_that_is_decided_is_enough_for_the_index(results: Path) -> None:
    other = replace(SOME, name="other", cells=())
    assert "so that no claim is decided" not in make_pages([SOME, other], results).texts["index.md"]


def test_accuracies_that_differ_from_the_papers_are_named(results: Path) -> None:
    found = list(find_deviations(collect_rows(SOME, results), "final"))
    assert len(found) == 1  # the final one is within the deviations, the one before fine-tuning is far off
    assert "before fine-tuning (θ∖M)" in found[0]
    assert "the paper has 84.28 ± 0.65 (line 31)" in found[0]
    paper = replace(SOME.published[0], accuracy=94.0, before=None)
    assert "final: " in next(find_deviations(collect_rows(replace(SOME, published=(paper,)), results), "final"))
    index = make_pages([SOME], results).texts["index.md"]
    assert "## Accuracies that differ from the paper's\n\nOn their pages" in index
    assert "points:\n\n- [some](some.md): 1\n\n## How to read it" in index
    assert f"\n- {found[0]}\n" in make_pages([SOME], results).texts["some.md"]
    near = make_pages([replace(SOME, published=(replace(SOME.published[0], before=None),))], results).texts["index.md"]
    assert "that differ" not in near


@pytest.mark.parametrize(
    ("finals", "std", "apart"),
    [  # the paper has 93
        ((0.932,), None, False),  # within the tolerance
        ((0.928,), None, False),
        ((0.934,), None, True),
        ((0.926,), None, True),
        ((0.934,), 0.5, False),  # within the paper's deviation
        ((0.934, 0.936), None, True),
        ((0.932, 0.935, 0.938), None, True),  # 93.5 ± 0.3
        ((0.932, 0.935, 0.938), 0.3, False),  # within both together
        ((0.932, 0.935, 0.938), 0.1, True),
    ],
)
def test_an_accuracy_differs_beyond_both_deviations_and_the_tolerance(
    finals: tuple[float, ...], std: float | None, apart: bool, tmp_path: Path
) -> None:
    paper = PublishedRow(31, *PLACE, "sosp-h", 93.0, std, ratio=0.5)
    few = replace(SOME, cells=SOME.cells[: len(finals)], published=(paper,))
    for cell, final in zip(few.cells, finals, strict=True):
        keep(tmp_path, record(cell, figures(final)), "some")
    found = list(find_deviations(collect_rows(few, tmp_path), "final"))
    assert len(found) == apart
    assert all((" with a single run" in line) == (len(finals) == 1) for line in found)


def test_the_papers_row_beside_a_cell() -> None:
    cell = SOME.cells[0]
    assert match_published(cell, SOME.published) == SOME.published[0]
    assert match_published(replace(cell, budget=("ratio", 0.3)), SOME.published) is None  # type: ignore[call-arg]
    assert match_published(START, SOME.published) == SOME.published[2]
    assert match_published(replace(START, width=2.0), SOME.published) is None


def test_of_the_papers_rows_the_first_of_the_budget_is_taken_or_the_only_one() -> None:
    cell, row = SOME.cells[0], SOME.published[0]
    assert match_published(cell, (row, replace(row, line=36))) == row
    only = replace(row, ratio=None)
    assert match_published(cell, (only,)) == only
    assert match_published(cell, (only, replace(only, line=36))) is None
    assert match_published(cell, (only, replace(row, line=36))) == replace(row, line=36)


def test_runs_that_began_with_different_networks_are_named(results: Path) -> None:
    assert "more than once" not in make_pages([SOME], results).texts["some.md"]
    cell = SOME.cells[0]
    keep(results, record(cell, figures(0.93), start={"sha256": "g", "accuracy": 0.93, "params": 1, "macs": 1}), "some")
    assert "more than once" in make_pages([SOME], results).texts["some.md"]
    text = make_pages([SOME], results).texts["some.md"]
    assert f"- {START.name} with 93.39: sosp-h, first-order" in text
    assert f"- {START.name} with 93.00: sosp-h" in text


# --- what is missing, refused, shorter, by hand ---------------------------------------------------------


def test_what_is_missing_or_refused_is_said(results: Path) -> None:
    text = make_pages([SOME], results).texts["some.md"]
    assert text.endswith("## Missing\n\n- resnet56-cifar10: 1 of 8 cells\n")
    last = SOME.cells[-1]
    keep(results, record(last, {}, state="refused", reason="it cuts the network in two"), "some")
    assert f"- {last.name} was refused: it cuts the network in two" in make_pages([SOME], results).texts["some.md"]
    assert "| [some](some.md) | Some experiment | 8 | 7 | 1 | 0 | 0 |" in make_pages([SOME], results).texts["index.md"]


def test_a_seed_that_was_refused_is_not_counted_as_done(results: Path) -> None:
    keep(results, record(SOME.cells[-1], {}, state="refused", reason="it cuts the network in two"), "some")
    heads, _, second = table_of(make_pages([SOME], results).texts["some.md"], "resnet56-cifar10: accuracy")
    assert second[heads.index("seeds")] == "3 of 4"


def test_where_nothing_is_missing_and_nothing_claimed_neither_is_mentioned(results: Path) -> None:
    keep(results, record(SOME.cells[-1], figures(0.92)), "some")
    text = make_pages([replace(SOME, claims=())], results).texts["some.md"]
    assert "## Missing" not in text
    assert "compared seed by seed" not in text


def test_a_short_training_of_a_network_that_was_not_trained_has_its_part(tmp_path: Path) -> None:
    untrained = replace(START, schedule=replace(START.schedule, epochs=0))
    few = replace(SOME, cells=(PrunedCell(untrained, "sosp-h", ("ratio", 0.5)),))
    keep(tmp_path, record(experiments.set_epochs(few, 30).cells[0], figures(0.9111)), "some")
    text = make_pages([few], tmp_path).texts["some.md"]
    assert "91.11" in text.split("## In 30 epochs")[1]


def test_without_records_the_page_says_so(tmp_path: Path) -> None:
    found = make_pages([SOME], tmp_path)
    assert "Nothing is measured yet." in found.texts["some.md"]
    assert found.figures == ()


def test_shorter_runs_have_a_part_of_their_own(results: Path) -> None:
    short = experiments.set_epochs(SOME, 30)
    keep(results, record(short.cells[0], figures(0.9111)), "some")
    text = make_pages([SOME], results).texts["some.md"]
    part = text.split("## In 30 epochs")[1]
    assert "91.11" in part
    assert "91.11" not in text.split("## In 30 epochs")[0]
    assert "93.15 ± 0.15" not in part  # the paper trained for longer


def test_claims_about_what_shorter_runs_end_with_stand_in_the_index(tmp_path: Path) -> None:
    """Those about the time before fine-tuning do not: it has no length."""
    before = replace(SOME.claims[0], text="it does so at once", by="cut")
    both = replace(SOME, claims=(*SOME.claims, before))
    for cell in experiments.set_epochs(both, 30).cells:
        keep(tmp_path, record(cell, figures(FINAL[cell.method][min(cell.seed, 2)])), "some")
    found = make_pages([both], tmp_path).texts
    link = "[some, in 30 epochs](some.md#in-30-epochs)"
    assert (
        f"| second order helps (line 34) | sosp-h; first-order | final | {link} | 1 confirmed | 4 of 4 |"
        in found["index.md"]
    )
    assert f"### {link}" in found["index.md"].split("## What we could confirm")[1]
    assert not any("it does so at once" in text for text in found.values())


def test_the_rule_of_the_verdicts_stands_on_a_page_once(results: Path, tmp_path: Path) -> None:
    both = [cell for cell in experiments.set_epochs(SOME, 30).cells if cell.seed == 0]
    for folder in (results, tmp_path / "short"):  # with verdicts above it, and without
        for cell in both:
            keep(folder, record(cell, figures(0.9111)), "some")
        text = make_pages([SOME], folder).texts["some.md"]
        assert "second order helps" in text.split("## In 30 epochs")[1]
        assert text.count("Two methods are compared seed by seed") == 1


def test_without_fine_tuning_the_papers_accuracy_before_it_is_shown(results: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    never, paper = replace(START.schedule, epochs=0), replace(SOME.published[0], accuracy=None, std=None)
    cells = tuple(replace(cell, tuning=never) for cell in SOME.cells)  # type: ignore[call-arg]
    claim = Claim("second order helps", 34, "sosp-h", "first-order", by="recalibrated")
    found = replace(SOME, name="never", cells=cells, compared_metric="zeroed", published=(paper,), claims=(claim,))
    more = replace(cells[0], examples=5000)  # type: ignore[call-arg]
    for cell, share in zip((*cells, more), (0.9, 0.91, 0.92, 0.91, 0.8, 0.81, 0.82, 0.81, 0.89), strict=True):
        figure = {name: value for name, value in figures(share).items() if name not in ("first", "final", "best")}
        keep(results, record(cell, figure), "never")
    found = replace(found, cells=(*cells, more))
    text = make_pages([SOME, found], results).texts["never.md"]
    heads, first, *_ = table_of(text, "resnet56-cifar10: accuracy")
    wanted = "method, gate, asked for, examples, seeds, θ∖M, paper: before, cut, renewed, line"
    assert ", ".join(heads) == wanted
    assert first[3:7] == ["1000", "4 of 4", "31.00 ± 0.82", "84.28 ± 0.65"]
    assert "Fine-tuned" not in text
    assert "In 0 epochs" not in text
    assert text.count(": confirmed") == 1  # the row with more examples has no other side
    write_pages([SOME, found], results, tmp_path / "docs")
    drawn = (tmp_path / "docs" / "never-resnet56-cifar10.svg").read_text()
    assert all(word in drawn for word in ("sosp-h (paper)", "sosp-h, 5000 examples", "the accuracy of θ∖M"))


def test_remarks_are_words_without_numbers(results: Path) -> None:
    path = results / "some" / "remarks.txt"
    path.write_text("The paper's code is not the one we ran.\n")
    assert "## Remarks\n\nThe paper's code" in make_pages([SOME], results).texts["some.md"]
    path.write_text("Its weights are from `github.com/somebody/resnet56`.\n")
    assert "somebody/resnet56" in make_pages([SOME], results).texts["some.md"]
    path.write_text("It reached 93.2 percent.\n")
    with pytest.raises(RunError, match=re.escape("has a number ('It reached 93")):
        make_pages([SOME], results)


def test_a_record_of_nobody_is_refused(results: Path) -> None:
    keep(results, record(replace(SOME.cells[0], examples=7), figures(0.9)), "some")  # type: ignore[call-arg]
    with pytest.raises(RunError, match="is a record of no cell"):
        make_pages([SOME], results)


# --- writing and checking -------------------------------------------------------------------------------


def test_a_page_that_was_tampered_with_is_found(results: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    docs = tmp_path / "docs"
    written = write_pages([SOME], results, docs)
    assert {path.name for path in written} == {"index.md", "some.md", "some-resnet56-cifar10.svg"}
    assert check_pages([SOME], results, docs) == []
    page, drawn = docs / "some.md", docs / "some-resnet56-cifar10.svg"
    right = page.read_text()
    page.write_text(right.replace("93.15 ± 0.15", "93.51 ± 0.15"))
    assert "is not what the records say" in check_pages([SOME], results, docs)[0]
    lines = right.splitlines()
    page.write_text("\n".join(lines[:5]))
    assert f"{page}: line 6 is not" in check_pages([SOME], results, docs)[0]
    page.write_text(right)
    keep(results, record(SOME.cells[0], figures(0.9399)), "some")
    assert {complaint.split(":")[0] for complaint in check_pages([SOME], results, docs)} == {
        str(docs / "index.md"),
        str(page),
        str(drawn),
    }
    (docs / "old.svg").write_text("")
    write_pages([SOME], results, docs)
    assert check_pages([SOME], results, docs) == []
    assert not (docs / "old.svg").exists()


def test_a_figure_is_the_same_each_time_and_shows_everybody(results: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_pages([SOME], results, tmp_path / "a")
    write_pages([SOME], results, tmp_path / "b")
    first, second = ((tmp_path / n / "some-resnet56-cifar10.svg").read_text() for n in "ab")
    assert first == second
    assert ">baseline<" in first  # the network that was pruned, beside the paper's
    for word in ("sosp-h", "first-order", "HRank (paper)", "sosp-h (paper)", "parameters", "MACs"):
        assert word in first


def test_what_the_paper_prints_as_a_share_is_drawn_as_that_share_of_our_network(results: Path) -> None:
    shares = (
        PublishedRow(31, *PLACE, "sosp-h", 93.15, 0.15, params_cut=60.0, macs_cut=90.0),
        PublishedRow(32, *PLACE, "HRank", 90.72, params=0.27e6),
        PublishedRow(33, *PLACE, "baseline", 93.39),
    )
    (figure,) = make_pages([replace(SOME, published=shares)], results).figures
    drawn = {name: {ln.label: tuple(p[:3] for p in ln.points) for ln in lines} for name, _, lines in figure.panels}
    parameters, macs = drawn.values()
    assert [name.partition(";")[0] for name in drawn] == ["parameters", "MACs"]
    assert parameters["sosp-h (paper)"] == (pytest.approx((0.4 * 853018, 93.15, 0.15)),)
    assert parameters["HRank (paper)"] == ((0.27e6, 90.72, 0.0),)
    assert parameters["baseline (paper)"] == ((853018, 93.39, 0.0),)
    assert macs["sosp-h (paper)"] == (pytest.approx((0.1 * 125_485_696, 93.15, 0.15)),)
    assert "HRank (paper)" not in macs
    (plain,) = make_pages([SOME], results).figures
    assert [name for name, _, _ in plain.panels] == ["parameters", "MACs"]


def test_a_sentence_about_several_pairs_stands_once(results: Path) -> None:
    twice = (*SOME.claims, Claim("second order helps", 34, "first-order", "sosp-h"))
    text = make_pages([replace(SOME, claims=twice)], results).texts["some.md"]
    part = text[text.index("### What we could") :]
    assert part.count("In the paper (line 34): second order helps. By the final accuracy:") == 2  # one is confirmed
    both = (*SOME.claims, *SOME.claims)
    text = make_pages([replace(SOME, claims=both)], results).texts["some.md"]
    assert text.count("In the paper (line 34): second order helps.") == 1
    assert text.count("sosp-h 93.13 ± 0.10, first-order 92.22 ± 0.14") == 2


def every() -> list[Experiment]:
    return [experiments.make_experiment(name) for name in experiments.EXPERIMENTS]


def test_the_records_of_this_repository_are_well_formed() -> None:
    known = {cell.name: cell for e in every() for v in (e, *lengths(e)) for cell in (*v.cells, *list_starts(v))}
    found = [record for _, record in iterate_records(HERE / "results")]  # reading refuses what is not
    assert [r.name for r in found if r.name not in known or encode_cell(known[r.name]) != r.cell] == []


def lengths(experiment: Experiment) -> list[Experiment]:
    pruned = [r.cell for _, r in iterate_records(HERE / "results") if r.cell["kind"] == "pruned"]
    found = {max(cell["tuning"]["epochs"], cell["start"]["schedule"]["epochs"]) for cell in pruned}
    return [experiments.set_epochs(experiment, epochs) for epochs in sorted(found)]


def test_the_pages_of_this_repository_are_what_its_records_say() -> None:
    assert check_pages(every(), HERE / "results", HERE / "docs" / "results") == []


# --- the command ----------------------------------------------------------------------------------------


def test_list_names_every_experiment() -> None:
    shown = call("reproduce", "--list").stdout
    assert all(name in shown for name in experiments.EXPERIMENTS)
    assert [fact["name"] for fact in lines("reproduce", "--list")] == list(experiments.EXPERIMENTS)


def test_status_counts_cells(results: Path) -> None:
    told = lines("reproduce", "--status", "--results", str(results))
    assert [fact["name"] for fact in told] == list(experiments.EXPERIMENTS)
    first = told[0]
    assert (first["cells"], first["done"], first["missing"]) == (90, 6, 84)  # ours are cells of that one
    shown = call("reproduce", "shuffle", "--status", "--results", str(results)).stdout
    assert "resnet56-cifar10-e200-sosp-h-ratio0.5-weights-e200-s0: done" in shown
    assert "ratio0.3-weights-shuffled-e200-s0: missing" in shown
    told = lines("reproduce", "shuffle", "--status", "--results", str(results), "--only", "s0$", "--seeds", "1")
    assert (told[0]["cells"], len(told)) == (4, 5)


def test_given_weights_need_no_training_and_widened_networks_need_others(tmp_path: Path) -> None:
    file = tmp_path / "given.safetensors"
    file.write_bytes(b"")
    place = ("--dry-run", "--results", str(tmp_path / "r"), "--work", str(tmp_path / "w"), "--seeds", "1")
    given = ("--weights", f"resnet56={file}", "--only", r"cifar10-e200-sosp-h-ratio0\.5")
    (told,) = lines("reproduce", "resnet56-cifar10", *place, *given)
    assert told["networks"] == []
    (told,) = lines("reproduce", "expand", *place, "--only", "^resnet56-cifar10-expand.*params340000")
    assert told["networks"] == ["resnet56-cifar10-e200-s0", "resnet56-cifar10-expand-e200-e200-s0"]


def test_a_dry_run_says_what_is_missing_and_does_nothing(tmp_path: Path) -> None:
    words = ("reproduce", "resnet56-cifar10", "--dry-run", "--seeds", "1", "--only", r"cifar10-.*ratio0\.5")
    (told,) = lines(*words, "--results", str(tmp_path / "r"), "--work", str(tmp_path / "w"))
    assert (told["missing"], len(told["cells"])) == (6, 6)
    assert (told["networks"], told["epochs"]) == (["resnet56-cifar10-e200-s0"], 7 * 200)
    shown = call(*words, "--results", str(tmp_path / "r"), "--work", str(tmp_path / "w")).stdout
    assert "6 of 6 cells missing" in shown
    assert "to train first: 1 network\nresnet56-cifar10-e200-s0\n" in shown
    assert "total: 7 trainings, 1,400 epochs" in shown
    assert list(tmp_path.iterdir()) == []


def test_the_command_runs_goes_on_and_writes_the_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    place = ("--results", str(tmp_path / "r"), "--work", str(tmp_path / "w"), "--page", str(tmp_path / "p"))
    words = ("reproduce", "runtime", "--tiny", "--only", r"x0\.25-.*sosp-h", "--device", "cpu", *place)
    told = lines(*words)
    assert [fact["event"] for fact in told] == ["plan", "cell", "result", "pages"]
    assert told[2] == {"event": "result", "experiment": "runtime-tiny"} | told[2]
    assert (told[2]["done"], told[2]["missing"]) == (1, 7)
    again = call(*words).stdout
    assert "1 done, 0 refused, 0 failed, 7 missing" in again
    assert "0.25-digits" in (tmp_path / "p" / "runtime-tiny.md").read_text()


def test_what_is_left_is_told_at_the_pace_of_cells(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network that is trained or opened first is none of the cells that are missing."""
    now = iter([0.0, 100.0, 100.0, 160.0])  # created, the network kept, the cells begun, the last one begun
    monkeypatch.setattr(reproduce_command.time, "monotonic", lambda: next(now, 160.0))
    size = {"state": "done", "accuracy": 0.9, "params": 8, "macs": 8}
    watch = reproduce_command.ExperimentWatcher(Screen(as_json=False))
    watch.event("plan", {"missing": 3})
    watch.event("network", {"cell": "whole", **size})
    watch.event("begin", {"cells": ["a", "b"], "epochs": 5})
    for name in ("a", "b"):
        watch.event("cell", {"cell": name, **size})
    watch.event("begin", {"cells": ["c"], "epochs": 5})
    shown = capsys.readouterr().out.splitlines()
    assert shown[1] == "training a, b: 5 epochs"
    assert shown[-1] == "training c: 5 epochs; about 30.0 s left for the missing cells"


def test_what_is_left_is_told_after_every_cell_where_nothing_is_trained(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([0.0, 2.0, 5.0, 45.0])  # created, the network begun, kept, a cell done
    monkeypatch.setattr(reproduce_command.time, "monotonic", lambda: next(now))
    watch = reproduce_command.ExperimentWatcher(Screen(as_json=False))
    watch.event("plan", {"missing": 2})
    watch.event("begin", {"cells": ["whole"], "epochs": 3})
    size = {"state": "done", "cut": 0.5, "params": 8, "macs": 8}
    watch.event("network", {"cell": "whole", **size})
    for name in ("a", "b"):
        watch.event("cell", {"cell": name, **size})
    *_, first, last = capsys.readouterr().out.splitlines()
    assert first.endswith("8 MACs; about 40.0 s left for the missing cells")
    assert last.endswith("8 MACs")


def test_a_training_that_goes_on_says_from_where(capsys: pytest.CaptureFixture[str]) -> None:
    watch = reproduce_command.ExperimentWatcher(Screen(as_json=False))
    watch.event("begin", {"cells": ["a"], "epochs": 30})
    for number in (4, 5):
        watch.event("epoch", {"cell": "a", "number": number, "epochs": 30, "test": 0.5})
    assert capsys.readouterr().out.splitlines() == ["training a: 30 epochs", "resuming at epoch 4"]


def test_stopped_it_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sosp.studies.paper.run_experiment", stop)
    found = call("reproduce", "runtime", "--tiny", "--results", str(tmp_path))
    assert found.exit_code == 130
    assert "Run the same command again to resume" in found.stdout


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((), "no experiment is named. Choose one of resnet56-cifar10"),
        (("resnet-56",), "Did you mean 'resnet56-cifar10'?"),
        (("shuffle", "--only", "["), "is not a valid regular expression"),
        (("shuffle", "--seeds", "0"), "seeds=0 must be"),
        (("shuffle", "--epochs", "0"), "epochs=0 must be"),
        (("shuffle", "--weights", "vgg19=a"), "no cell starts from 'vgg19'"),
        (("shuffle", "--device", "tpu"), "device='tpu' cannot be used"),
        (("shuffle", "--tiny", "--weights", f"digits_resnet={__file__}"), "weights that can be given"),
        (("shuffle", "--data-dir", "nowhere"), "--data-dir nowhere: there is no such folder"),
        (("--status", "--only", "s0"), "of one experiment: name the experiment"),
        (("--status", "--page", "p"), "--status writes no page"),
        (("--status", "--results", __file__), "is not a folder"),
        (("--page", "p", "--results", "nowhere"), "nowhere: there are no records to write pages from"),
    ],
)
def test_refusals_are_one_line(words: tuple[str, ...], complaint: str) -> None:
    assert complaint in refusal("reproduce", *words)


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    words = ("reproduce", "runtime", "--tiny", "--results", str(tmp_path / "r"), "--work", str(tmp_path / "file"))
    assert "file: cannot be written to (File exists)" in refusal(*words, begun=True)


def test_it_is_public() -> None:
    assert sosp.experiments.make_experiment("shuffle").name == "shuffle"
