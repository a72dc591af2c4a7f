"""What commands print on a terminal of 80 columns: no word broken, no name cut short, tables that fit."""

import io
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from sosp.app.cli.output import PLAIN, Screen, wrap_text
from sosp.app.cli.terminal_tables import (
    EVENT_FORMATS,
    create_bottlenecks_table,
    create_comparison_table,
    create_expansion_table,
    create_results_table,
)

FIGURES = {"top1": 0.9393, "params": 25_557_032, "macs": 4_089_184_256, "latency": 0.80412}
RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def printed(table: Table) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=80, **PLAIN).print(table)
    return file.getvalue().splitlines()


def summary(method: str, ratio: float) -> dict[str, Any]:
    means = {"recalibrated": 0.9393, "seconds": 12.3}
    return {"method": method, "ratio": ratio, "seeds": 3, "means": means, "stds": {"recalibrated": 0.0021}}


def point(course: str) -> dict[str, Any]:
    facts = {
        "course": course,
        "budget": "params",
        "size": 0.5,
        "seed": 0,
        "whole": 0.94,
        "tuned": 0.9393,
        "refusal": "",
    }
    return {**facts, "params": 25_557_032, "macs": 4_089_184_256}


PART = {"name": "layer3.0.downsample.0", "removed": RATIOS, "factor": 1.875, "verdict": "too narrow", "stability": 0.67}
TABLES = {
    "results": create_results_table(
        {"train": FIGURES, "prune": {**FIGURES, "method": "sosp-i-diagonal", "before": FIGURES}}.items()
    ),
    "comparison": create_comparison_table(
        [summary(m, r) for m in ("sosp-h", "magnitude-l2", "sosp-i-diagonal") for r in (0.1, 0.3, 0.5, 0.7)]
    ),
    "bottlenecks": create_bottlenecks_table([PART], RATIOS, "layer"),
    "expansion": create_expansion_table(
        {
            "points": [point("vanilla"), point("expand"), point("widen")],
            "choices": [{"seed": 0, "blocks": ["layer3"], "constant": {"factor": 1.10123}}],
        }
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_fit_and_nothing_is_cut_short(name: str) -> None:
    lines = printed(TABLES[name])
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)


def test_figures_stay_on_one_line() -> None:
    assert sum("93.93±0.21" in line for line in printed(TABLES["comparison"])) == 3
    assert any("10 20 30 40 50 60 70 80 90" in line for line in printed(TABLES["bottlenecks"]))


EPOCH = {
    "stage": "finetune", "epochs": 200, "number": 100, "loss": 0.9840, "accuracy": 1.0, "test": {"top1": 1.0},
    "rate": 3.1e-5, "images_per_second": 12345.0,
}  # fmt: skip
CELL = {"method": "magnitude-l2", "ratio": 0.1, "seed": 0, "refusal": "", "masked": 0.852, "recalibrated": 0.956}


@pytest.mark.parametrize(
    ("event", "facts"),
    [("epoch", EPOCH), ("cell", {**CELL, "tuned": 0.97, "params": 1, "macs": 1}), ("point", point("vanilla"))],
)
def test_lines_of_a_run_fit(event: str, facts: dict[str, Any]) -> None:
    assert len(EVENT_FORMATS[event](facts)) <= 80


def test_long_lines_break_between_words_and_are_set_in() -> None:
    terminal = Console(file=io.StringIO(), width=30, force_terminal=True)
    text = "  from  conv1, layer1.0.conv2, layer2.0.conv2\nshort  and   spaced"
    assert wrap_text(text, terminal) == "  from  conv1, layer1.0.conv2,\n      layer2.0.conv2\nshort  and   spaced"
    assert wrap_text("x" * 50, terminal) == "x" * 50  # a path can still be copied
    assert wrap_text(text, Console(file=io.StringIO())) == text


def test_a_complaint_is_one_line_unless_it_is_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "the mask removes every channel of 'layer3.0.conv2', 'layer3.0.downsample.0', which disconnects the network."
    )
    Screen(as_json=False).warn(words)
    assert capsys.readouterr().err == f"sosp: {words}\n"
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    Screen(as_json=False).warn(words)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "sosp: the mask removes every channel of 'layer3.0.conv2',"
    assert second == "    'layer3.0.downsample.0', which disconnects the network."
