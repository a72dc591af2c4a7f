"""The page of a run: what it says, that it is safe, small, whole and the same every time; the figures for papers."""

import re
import struct
import time
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from reports import bottleneck_network, made_up, saliency

from sosp.app.report import theme as look
from sosp.app.report.layer_axis import find_parts, shorten_name
from sosp.app.report.page import build_run_report, render_page, save_figures
from sosp.app.report.run_facts import LayerWidths, LossCurve, LossPoint, RunFacts
from sosp.app.report.run_summary import list_networks
from sosp.app.report.section import make_large_cell, make_size_cell
from sosp.app.report.sections.expansion import average_seeds
from sosp.app.report.sections.losses import verdict
from sosp.app.report.sections.pairs import table
from sosp.app.report.sections.saliency import explain_shared_structures, threshold
from sosp.app.report.sections.streams import assign_lanes, split_streams
from sosp.studies.compare.summary import ComparisonSummary

LAYERS = [("conv1", 3, 8), ("layer1.0.conv1", 8, 8), ("layer1.0.conv2", 8, 8), ("layer2.0.conv1", 8, 16)]
EVIL = '<script>alert("1")</script>&$x^2$'
BOTTLENECKS = {
    "ratios": [0.25, 0.5, 0.75],
    "blocks": [
        {"name": "layer1", "layers": ["a", "b"], "structures": 16, "removed": [0.0, 0.1, 0.2], "p": 1e-9,
         "factor": 1.8, "verdict": "too narrow"},
        {"name": "layer2", "layers": ["c"], "structures": 16, "removed": [0.5, 0.9, 1.0], "p": 0.5,
         "factor": 1.0, "verdict": "as needed"},
    ],
    "advice": "widen layer1 x1.8",
    "before": {"params": 100, "macs": 1000},
    "after": {"params": 150, "macs": 1250},
}  # fmt: skip


def summaries() -> tuple[ComparisonSummary, ...]:
    made = []
    for k, method in enumerate(("sosp-h", "random")):
        for ratio in (0.3, 0.5):
            means = {
                "masked": 0.5,
                "recalibrated": 0.9 - k / 10 - ratio / 10,
                "params": 1000.0,
                "macs": 2e6,
                "seconds": 1,
            }
            made.append(ComparisonSummary(method, ratio, 3, means, dict.fromkeys(means, 0.01)))
    return (*made, ComparisonSummary("taylor", 0.5, 0, {}, {}, "the mask cuts the network in two."))


@pytest.fixture(scope="module")
def facts() -> RunFacts:
    """A run with everything that a report can show, although no real one has all of it."""
    found = made_up(Path("runs/mine"), LAYERS, epochs=5)
    repaired = {"layers": [{"layer": name, "before": 0.5, "after": 0.125} for name, _, _ in LAYERS]}
    results = {"prune": {**found.results["prune"], "repair": repaired}}
    return replace(found, results=results, bottlenecks=BOTTLENECKS, summaries=summaries())


@pytest.fixture(scope="module")
def html(facts: RunFacts) -> str:
    return render_page([facts])


class Reader(HTMLParser):
    """The tags of a page, the numbers in it, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.numbers: list[float] = []
        self.titles: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag == "data":
            self.numbers.append(float(dict(attrs)["value"]))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "title":
            self.titles.append(data)

    def of(self, name: str) -> list[str]:
        return [value for key, value in self.attributes if key == name]


# --- what it says ---------------------------------------------------------------------------------------

SECTIONS = [
    *("comparison", "layers", "streams", "saliency", "losses", "pairs", "repair", "bottlenecks", "training"),
    *("next", "origin"),
]


def test_all_sections_in_order(html: str) -> None:
    assert re.findall(r'<section id="(\w+)">', html) == SECTIONS
    assert re.findall(r'<li><a href="#(\w+)">', html) == SECTIONS


@pytest.mark.parametrize(
    ("gone", "missing"),
    [
        ({"layers": ()}, {"layers"}),
        ({"widths": ()}, {"streams"}),
        ({"saliency": None}, {"saliency", "pairs"}),
        ({"saliency": saliency(LAYERS, "sosp-h")}, {"pairs"}),
        ({"loss_curve": None}, {"losses"}),
        ({"epochs": {}}, {"training"}),
        ({"bottlenecks": None}, {"bottlenecks"}),
        ({"summaries": ()}, {"comparison"}),
        ({"results": {}, "summaries": ()}, {"losses", "repair", "comparison"}),
    ],
)
def test_a_section_is_there_where_its_facts_are(facts: RunFacts, gone: dict[str, Any], missing: set[str]) -> None:
    with look.use_plot_settings():
        found = build_run_report(replace(facts, **gone), "")
    assert set(SECTIONS) - {section.key for section in found.sections} == missing


def test_the_headline_has_the_numbers_of_the_run(facts: RunFacts, html: str) -> None:
    numbers = Reader(html).numbers
    cut = facts.results["prune"]
    for key in ("top1", "params", "macs", "latency", "bytes"):
        assert cut[key] in numbers
        assert cut["before"][key] in numbers
    for words in ("75.12 %", "−1.01 points", "47.0% left", "1.60 times as fast", "4.089 G", "48 MB"):
        assert words in html


def test_a_large_loss_is_named_with_what_to_try(facts: RunFacts, html: str) -> None:
    assert 'class="warning"' not in html  # 1 point
    cut = {**facts.results["prune"], "top1": 0.5}
    cut["repair"] = {
        "layers": [{"layer": x, "before": 1.0, "after": y} for x, y in (("a", 0.1), ("b", 0.3))],
        "examples": 1000,
    }
    page = render_page([replace(facts, results={"prune": cut})])
    for words in (
        "The accuracy is 26.1 points lower than before.",
        "<li>Fine-tune: sosp finetune runs/mine</li>",
        "this network has 49% of the MACs, try --macs 0.74.",
        "<li>Repair with more inputs than 1,000.</li>",
        "error after the repair: --exclude b --exclude a</li>",
    ):
        assert words in page
    later = replace(facts, results={"finetune": {**cut, "epochs": 3}}, earlier=(("prune", cut),))
    assert "<li>Fine-tune for more epochs (--epochs).</li>" in render_page([later])
    better = replace(later, results={"finetune": {**cut, "epochs": 3, "top1": 0.74}})
    assert 'class="warning"' not in render_page([better])
    assert "Accuracy 76.13 % → 50.00 % → 74.00 %: before; pruned by sosp-i, repaired; fine-tuned." in render_page(
        [better]
    )


def test_hovering_over_a_layer_tells_its_shape_and_what_went(facts: RunFacts, html: str) -> None:
    titles = Reader(html).titles
    for layer in facts.layers:
        kept = layer.channels - layer.removed
        shape = " × ".join(map(str, layer.shape or ()))
        words = f"{layer.name}, weight {shape}: {kept} of {layer.channels} channels kept, {layer.removed} removed"
        assert sum(title.startswith(words) for title in titles) == 2  # the bar, and what is left above it


def test_every_figure_speaks(html: str) -> None:
    said = re.findall(r'<svg role="img" aria-label="([^"]+)"', html)
    assert len(said) == html.count("<svg") >= 12
    assert any(words.startswith("Bar chart of the share of channels removed from each of 4 layers") for words in said)


def test_tables_are_tables(html: str) -> None:
    reader = Reader(html)
    assert reader.of("scope").count("row") > 40
    assert {"table", "thead", "tbody", "caption", "th", "td"} <= set(reader.tags)
    assert reader.tags.count("h1") == 1


def test_the_command_to_do_it_again(facts: RunFacts, html: str) -> None:
    assert "<code>sosp prune sosp:resnet50</code>" in html
    assert "<code>sosp finetune runs/mine</code>" in html
    assert "sosp.load(&#39;runs/mine/small.safetensors&#39;, original)" in html


def test_methods_are_compared_with_their_spread(html: str) -> None:
    assert '<data value="0.87">87.00 ± 1.00 % ★</data>' in html
    assert "the mask cuts the network in two." in html


def test_narrow_places_and_what_widening_costs(html: str) -> None:
    assert "Recommended: widen layer1 x1.8. That network would have 1.50 times the parameters and 1.25 times" in html
    assert "too narrow" in html


def test_an_expansion_is_averaged_over_its_seeds(facts: RunFacts) -> None:
    point = {
        "budget": "ratio", "size": 0.5, "whole": 0.9, "params": 1000, "macs": 5000, "cut": 0.2, "refusal": "",
    }  # fmt: skip
    points = [
        {**point, "course": course, "seed": seed, "tuned": 0.5 + seed / 10}
        for course in ("vanilla", "expand")
        for seed in (0, 1)
    ]
    refused = {**point, "course": "widen", "seed": 0, "tuned": None, "refusal": "too wide."}
    choices = [{"seed": 0, "blocks": ["layer2"], "constant": {"factor": 1.0987}}]
    found = {"expand": {"choices": choices, "points": [*points, refused]}}
    html = render_page([replace(facts, results=found, summaries=(), saliency=None, epochs={}, widths=(), layers=())])
    assert "Seed 0: expand widens layer2; widen takes every layer × 1.1." in html
    assert "Best: vanilla at 0.5 with 55.00%." in html
    assert "Refused: widen: too wide." in html
    assert average_seeds(points)[0].stds["tuned"] == pytest.approx(0.1 / 2**0.5)  # of two, over n - 1


def test_unfinished(facts: RunFacts) -> None:
    found = render_page([replace(facts, results={}, summaries=(), saliency=None, epochs={}, widths=(), layers=())])
    assert "Not finished: prune." in found
    assert "<code>sosp run runs/mine</code>" in found


def test_a_repair_tells_what_it_changed_and_what_it_left(facts: RunFacts) -> None:
    layers = [{"layer": "conv1", "before": 0.5, "after": 0.125}, {"layer": "tied", "why": "it is called several times"}]
    more = {"agreement_before": 0.25, "agreement_after": 0.875, "examples": 2000, "seconds": 3.21}
    found = render_page(
        [replace(facts, results={"prune": {**facts.results["prune"], "repair": {"layers": layers, **more}}})]
    )
    assert "25.0% before the repair, 87.5% after it. The repair took 2,000 inputs and 3.2 s." in found
    assert "conv1: 0.5 before, 0.125 after" in found
    assert "tied: " not in found
    assert "it is called several times" in found


def test_several_runs(facts: RunFacts) -> None:
    some = replace(facts, saliency=None, epochs={}, loss_curve=None, summaries=(), bottlenecks=None)
    found = render_page([some, replace(some, folder=Path("runs/other"))])
    assert "<h1>2 runs</h1>" in found
    names = [["layers", "streams", "repair", "next", "origin"]] * 2
    assert [re.findall(f'<section id="run{i}-(\\w+)">', found) for i in (0, 1)] == names
    assert Counter(Reader(found).of("id")).most_common(1)[0][1] == 1


# --- safe, small, the same ------------------------------------------------------------------------------


def test_names_stay_text() -> None:
    names = [
        EVIL,
        "名前",
        "a\u202eb",
        "--><b>",
        "{{ 7 * 7 }}",
        "x" * 300,
        " ",
        "$\\frac{1}{0}$",
        "%s",
        "#0072b2",
        'style="x"',
    ]
    evil = replace(made_up(Path(f"runs/{EVIL}"), [(name, 3, 8) for name in names]), epochs={}, loss_curve=None)
    found = Reader(render_page([replace(evil, bottlenecks={**BOTTLENECKS, "advice": EVIL})]))
    assert not {"b", "script"} & set(found.tags)
    assert not any(name.startswith("on") for name, _ in found.attributes)
    for name in names:
        assert any(title.startswith(f"{name}, weight") for title in found.titles), name


def test_nothing_is_fetched(html: str) -> None:
    reader = Reader(html)
    links = [*reader.of("href"), *reader.of("src"), *reader.of("xlink:href"), *re.findall(r"url\(([^)]*)\)", html)]
    assert all(link.startswith(("#", "data:")) for link in links)
    assert "default-src 'none'" in html
    assert not {"script", "iframe", "object", "embed", "form"} & set(reader.tags)


def test_names_inside_a_page_are_unique_and_there(html: str) -> None:
    reader = Reader(html)
    ids = reader.of("id")
    assert len(set(ids)) == len(ids)
    links = [link[1:] for link in [*reader.of("href"), *reader.of("xlink:href")] if link.startswith("#")]
    assert set(links) <= set(ids)


def test_twice_the_same(facts: RunFacts, html: str) -> None:
    assert render_page([facts]) == html


def test_a_resnet50_is_small_and_quick() -> None:
    big = made_up(Path("runs/big"), bottleneck_network())
    assert (len(big.layers), sum(x.channels for x in big.layers)) == (53, 26_560)
    started = time.process_time()
    found = render_page([big])
    assert time.process_time() - started < 5
    assert len(found.encode()) < 3e6


def test_more_layers_than_names_fit() -> None:
    layers = [(f"block{i // 20}.{i % 20}.conv", 8, 8) for i in range(80)]
    found = render_page([replace(made_up(Path("runs/deep"), layers), epochs={}, loss_curve=None)])
    assert "80 layers, in the order of the network" in found
    assert len(found.encode()) < 3e6


# --- colours --------------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    """As WCAG 2 defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def themes(html: str) -> list[dict[str, str]]:
    light, dark = re.findall(r":root \{(.*?)\}", html, re.DOTALL)
    return [dict(re.findall(r"--(\w+): (#\w+)", theme)) for theme in (light, dark)]


def test_text_and_marks_stand_out(html: str) -> None:
    for theme in themes(html):
        for text in ("ink", "muted", "link"):
            assert contrast(theme[text], theme["page"]) >= 4.5  # AA, text
            assert contrast(theme[text], theme["card"]) >= 4.5
        for mark in ("pale", "blue", "vermillion", "green", "purple"):
            assert contrast(theme[mark], theme["page"]) >= 3  # AA, graphical objects


def test_figures_take_the_colours_of_the_page(html: str) -> None:
    light, dark = themes(html)
    assert {name: light[name] for name in look.COLOURS} == look.COLOURS
    assert set(look.COLOURS) <= set(dark)
    body = html[html.index("<main>") :]
    assert not re.findall("|".join(look.COLOURS.values()), body)
    assert "var(--vermillion)" in body


# --- figures for papers ---------------------------------------------------------------------------------


def test_png_files(facts: RunFacts, tmp_path: Path) -> None:
    small = replace(facts, saliency=None, epochs={}, summaries=(), loss_curve=None)
    files = save_figures([small], tmp_path)
    assert sorted(f.name for f in files) == ["bottlenecks.png", "layers.png", "repair.png", "streams.png"]
    head = (tmp_path / "bottlenecks.png").read_bytes()[:24]
    width, _ = struct.unpack(">II", head[16:24])
    assert head[:4] == b"\x89PNG"
    assert width == look.SMALL * 300


# --- the parts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["conv1", "layer1.0.conv1", "layer1.0.conv2", "layer2.0.a"], ["conv1", "layer1", "layer1", "layer2"]),
        (["e.layer.0.q", "e.layer.0.k", "e.layer.1.q"], ["e.layer.0", "e.layer.0", "e.layer.1"]),
        (["features.0", "features.3", "features.6"], ["", "", ""]),
        (["a", "b", "c", "d"], ["", "", "", ""]),
        (["only"], [""]),
    ],
)
def test_parts_of_a_network(names: list[str], wanted: list[str]) -> None:
    assert find_parts(names) == wanted


def test_short_names() -> None:
    assert shorten_name("layer1.0.conv1", "layer1") == "0.conv1"
    assert shorten_name("conv1", "conv1") == "conv1"
    assert shorten_name("a" * 40, "") == "…" + "a" * 25


def test_streams_of_a_residual_block() -> None:
    """conv1, then a block of two layers whose output is added, then one that reads the sum."""
    block = (
        LayerWidths("conv1", 0, 1, (3, 3), (8, 7)),
        LayerWidths("a", 1, 2, (8, 7), (4, 2)),
        LayerWidths("b", 2, 1, (4, 2), (8, 5)),
        LayerWidths("linear", 1, 3, (8, 7), (10, 10)),
    )
    found = [(p.stream, p.start, p.end, p.before, p.left, p.reader) for p in split_streams(block)]
    assert found == [
        (0, -1, 0, 3, 3, "conv1"),
        (1, 0, 1, 8, 7, "a"),
        (1, 1, 3, 8, 7, "linear"),
        (2, 1, 2, 4, 2, "b"),
        (3, 3, 4, 10, 10, "the output"),
    ]
    assert assign_lanes(split_streams(block)) == {0: 0, 1: 0, 2: 1, 3: 0}


def test_the_cut() -> None:
    found = saliency(LAYERS)
    middle = threshold(found)
    assert middle is not None
    assert float(found.scores[found.removed].max()) < middle < float(found.scores[~found.removed].min())
    assert threshold(replace(found, removed=torch.arange(len(found.index)) % 2 == 0)) is None
    assert threshold(replace(found, removed=torch.ones_like(found.removed))) is None


def test_how_far_the_prediction_is_good() -> None:
    def course(*second: float | None, sign: int = 1) -> LossCurve:
        points = [LossPoint(10 * k, 1.0 + sign * k, 0.5, 0.0, value) for k, value in enumerate((0.0, *second))]
        return LossCurve(100, tuple(points))

    assert "up to 20 removed structures (20%)" in verdict(course(0.6, 3.9, 1.4), {"structures": 100})
    assert "from the first point on" in verdict(course(0.4, 2.0), {"structures": 100})
    assert "up to 20 removed structures (20%)" in verdict(course(-0.6, -3.9, -1.4, sign=-1), {"structures": 100})
    assert "from the first point on" in verdict(course(0.9, sign=-1), {"structures": 100})
    assert "first-order prediction" in verdict(course(None, None), {"structures": 100})


def test_latencies_are_those_measured_side_by_side() -> None:
    def figures(latency: float) -> dict[str, float]:
        return {"top1": 0.5, "latency": latency}

    cut = {**figures(3.0), "method": "sosp-h", "before": figures(4.0)}
    found = list_networks({"train": figures(9.0), "prune": cut, "finetune": figures(8.0)}.items())
    names = [("trained", 4.0), ("pruned by sosp-h", 3.0), ("fine-tuned", 3.0)]
    assert [(name, row["latency"]) for name, row in found] == names
    assert [name for name, _ in list_networks([("prune", cut)])] == ["before", "pruned by sosp-h"]


@pytest.mark.parametrize(
    ("number", "words"), [(999, "999 bytes"), (1000, "1 kB"), (430_123, "430 kB"), (1.08e6, "1.08 MB"), (2e9, "2 GB")]
)
def test_sizes(number: float, words: str) -> None:
    assert (make_size_cell(number).text, make_size_cell(number).value) == (words, number)  # type: ignore[union-attr]


def test_large_numbers_and_powers() -> None:
    assert [make_large_cell(n).text for n in (12_345, 40_551_000, 4.1e9)] == ["12,345", "40.55 M", "4.1 G"]  # type: ignore[union-attr]
    assert [look.format_power(n) for n in (0.01, 1, 1000, 1e-5, 1e4, 0)] == ["0.01", "1", "1000", "10⁻⁵", "10⁴", "0"]


def test_layers_without_structures_of_their_own_are_left_out() -> None:
    """Of coupled channels, those of a stream stand at its first layer."""
    whole = saliency([("conv1", 3, 4), ("conv2", 4, 4), ("conv3", 4, 4)])
    assert whole.without_empty_layers().layers == whole.layers
    assert torch.equal(whole.without_empty_layers().index, whole.index)
    some = replace(whole, index=torch.tensor([0] * 4 + [2] * 8)).without_empty_layers()
    assert some.layers == ("conv1", "conv3")
    assert some.index.tolist() == [0] * 4 + [1] * 8
    assert some.pairs_by_layer is not None
    assert whole.pairs_by_layer is not None
    assert torch.equal(some.pairs_by_layer, whole.pairs_by_layer[[0, 2]][:, [0, 2]])
    assert explain_shared_structures(whole, some).endswith("shown at the first of them.")
    assert explain_shared_structures(whole, whole.without_empty_layers()) == ""


def test_a_pair_of_layers_is_counted_in_both_halves_of_the_table() -> None:
    """All numbers add up to 10, and those off the diagonal stand there twice: 2 + 2, 1 + 1 and 0.5 + 0.5."""
    Q = torch.tensor([[1.0, 2.0, 0.5], [2.0, 2.0, 1.0], [0.5, 1.0, 0.0]])
    rows = table(saliency([("a", 3, 4), ("b", 4, 4), ("c", 4, 4)]), Q.numpy()).rows
    assert [(first, second, share.text) for first, second, _, share in rows] == [
        ("a", "b", "40.00 %"), ("b", "c", "20.00 %"), ("a", "c", "10.00 %"),
    ]  # fmt: skip
