"""Which layers are too narrow: the chances, the blocks of any network, the rule, its cost, and the kept saliency."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sosp
from networks import case
from oracles import chance as oracle
from sosp.errors import ArgumentError, CheckpointError, StructureError
from sosp.graph.records import Layer, Saliency, Structures
from sosp.selection.saved_saliency import read_saliency, save_saliency
from sosp.studies.bottlenecks.blocks import find_blocks
from sosp.studies.bottlenecks.bottleneck_detection import bottlenecks
from sosp.studies.bottlenecks.bottleneck_record import FITTING, NARROW, WIDE, BottleneckPart, Bottlenecks
from sosp.studies.bottlenecks.significance_tests import compute_tails, correct_p_values, merge_p_values

IMAGES = torch.zeros(2, 3, 32, 32)


def layers_of(*widths: int) -> Structures:
    """Layers a, b, c, ... of so many structures, of a network that does not exist."""
    names = "abcdefgh"[: len(widths)]
    layers = tuple(Layer(n, w, 1, (), 3.0, 9.0, 9.0) for n, w in zip(names, widths, strict=True))
    ids = tuple(torch.arange(sum(widths)).split(list(widths)))
    return Structures("filters", "features", layers, ids, {})


def saliency_of(structures: Structures, values: Tensor, scope: str = "global") -> Saliency:
    return Saliency(structures, "random", None, values=values, scope=scope)


def by_name(parts: Sequence[BottleneckPart]) -> dict[str, BottleneckPart]:
    return {part.name: part for part in parts}


def digits_network() -> tuple[nn.Module, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return sosp.nets.digits_resnet().eval(), torch.randn(16, 1, 8, 8), torch.randint(0, 10, (16,))


# --- chances --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("total", [1, 2, 5, 9])
def test_tails_are_those_of_all_draws(total: int) -> None:
    for members in range(total + 1):
        for drawn in range(total + 1):
            for seen in range(max(0, drawn - total + members), min(members, drawn) + 1):
                wanted = oracle.tails_by_drawing(total, members, drawn, seen)
                assert wanted == oracle.tails(total, members, drawn, seen)
                assert compute_tails(total, members, drawn, seen) == pytest.approx(
                    [float(x) for x in wanted], abs=1e-12
                )


@pytest.mark.parametrize("sizes", [(2032, 16, 1016, 0), (2032, 1152, 203, 150), (5504, 512, 2752, 200)])
def test_tails_of_real_networks(sizes: tuple[int, int, int, int]) -> None:
    # lgamma of 5505 is 4e4: its rounding, 4e4 * 2e-16, is an error of 1e-10 of each chance at most.
    wanted = [float(x) for x in oracle.tails(*sizes)]
    assert compute_tails(*sizes) == pytest.approx(wanted, rel=1e-9)


def test_p_values_of_one_hypothesis_are_merged() -> None:
    assert merge_p_values([0.03]) == 0.03
    assert merge_p_values([0.5, 0.01]) == pytest.approx(0.02)  # two of which only one: Bonferroni
    assert merge_p_values([0.9, 0.02, 0.8, 0.01, 0.03]) == pytest.approx(0.03 * 5 / 3)
    assert merge_p_values([0.9] * 5) == 1.0


@pytest.mark.parametrize("p", [[0.01, 0.04, 0.03, 0.005], [0.5, 0.2], [0.02], [0.0, 0.0, 1.0, 0.3, 0.011]])
def test_holm_is_its_closure(p: list[float]) -> None:
    assert correct_p_values(p) == pytest.approx(oracle.holm_by_closure(p))


def test_alike_structures_rarely_make_a_verdict() -> None:
    """Over 100 rankings that know nothing, any verdict at all comes in no more than alpha of them."""
    structures = layers_of(16, 16, 32, 64, 8, 40)
    generator = torch.Generator().manual_seed(0)
    drawn = [saliency_of(structures, torch.rand(176, generator=generator)) for _ in range(100)]
    found = [bottlenecks(saliency, ratios=(0.2, 0.5, 0.7)) for saliency in drawn]
    false = sum(any(part.verdict != FITTING for part in f.layers) for f in found)
    assert false <= 0.05 * 100


# --- the rule -------------------------------------------------------------------------------------------


def test_a_layer_that_goes_last_is_too_narrow_and_one_that_goes_first_is_over_wide() -> None:
    values = torch.rand(96, generator=torch.Generator().manual_seed(0))
    values[:16] += 2  # a goes last
    values[32:64] -= 2  # c goes first
    found = bottlenecks(saliency_of(layers_of(16, 16, 32, 32), values))
    assert [part.verdict for part in found.layers] == [NARROW, FITTING, WIDE, FITTING]
    a, _, c, _ = found.layers
    assert a.removed[:8] == (0.0,) * 8  # 16 of 96 are left at 5/6
    assert c.removed[4] == 1.0
    # Half of the 96 gone (the median of nine ratios): a keeps 16 / 16 where half is kept.
    assert a.factor == pytest.approx(2.0)
    assert c.factor == pytest.approx(1 / 32)  # nothing is kept, and one channel stays
    assert found.advice == "widen a x2, shrink c x0.031"
    assert max(a.p, c.p) < 0.05 < found.layers[1].p


def test_a_deviation_that_is_worth_no_channel_is_no_verdict() -> None:
    """2000 structures of four-channel layers deviate surely, but by less than a channel."""
    structures = layers_of(4, 2000, 2000)
    values = torch.rand(4004, generator=torch.Generator().manual_seed(1))
    blocks = {"left": ["a", "b"], "right": ["c"]}
    for shift, verdict in ((0.03, FITTING), (0.5, NARROW)):
        moved = values.clone()
        moved[:2004] += shift
        found = by_name(bottlenecks(saliency_of(structures, moved), blocks=blocks).blocks)
        assert found["left"].p < 0.01
        assert found["left"].verdict == verdict


def test_masks_say_what_their_saliency_says() -> None:
    model, x, y = digits_network()
    saliency = sosp.score(model, (x, y), method="sosp-i")
    ratios = (0.2, 0.5, 0.7)
    masks = [sosp.select(saliency, ratio=r) for r in ratios]
    found, by_masks = bottlenecks(saliency, ratios=ratios), bottlenecks(masks, structures=saliency.structures)
    assert found.blocks == by_masks.blocks
    assert found.layers == by_masks.layers
    for part in found.layers:
        for mask, share in zip(masks, part.removed, strict=True):
            assert share == len(mask.removed.get(part.name, ())) / part.structures
    alone = bottlenecks(masks[1])
    assert alone.ratios == (0.5,)
    assert [part.removed[0] for part in alone.blocks] == [part.removed[1] for part in found.layers]


def test_coupled_structures_count_once() -> None:
    model, x, y = digits_network()
    structures = sosp.find_structures(model, x, groups="coupled")
    saliency = sosp.score(model, (x, y), method="first-order", structures=structures)
    found = bottlenecks(saliency, ratios=[0.5])
    assert sum(part.structures for part in found.layers) == len(structures) == sum(p.structures for p in found.blocks)
    mask = sosp.select(saliency, ratio=0.5)
    assert bottlenecks(mask, structures=structures).layers == found.layers


def test_stability_is_the_share_of_subsamples_that_agree() -> None:
    structures = layers_of(16, 16, 32, 32)
    plain = torch.rand(96, generator=torch.Generator().manual_seed(0))
    narrow = plain.clone()
    narrow[:16] += 2
    again = [saliency_of(structures, v) for v in (narrow, plain, narrow, narrow)]
    found = bottlenecks(saliency_of(structures, narrow), again=again)
    assert found.layers[0].stability == 0.75
    assert found.layers[2].stability == 1.0
    assert found.subsamples == 4
    assert bottlenecks(saliency_of(structures, narrow)).layers[0].stability is None


def test_the_blocks_that_lose_least() -> None:
    shares = {"a": (0.1, 0.6), "b": (0.2, 0.4)}
    parts = tuple(BottleneckPart(n, (n,), 8, lost, 1.0, 1.0, FITTING) for n, lost in shares.items())
    found = Bottlenecks("random", (0.15, 0.5), parts, parts, 0.05, 0)
    assert [b.name for b in found.least(1, 0.1)] == ["a"]
    assert [b.name for b in found.least(2, 0.5)] == ["b", "a"]


def test_words_and_json() -> None:
    values = torch.rand(48, generator=torch.Generator().manual_seed(0))
    values[:16] += 2
    found = bottlenecks(saliency_of(layers_of(16, 32), values))
    assert "too narrow" in str(found)
    assert str(found).splitlines()[-1] == found.advice
    again = json.loads(json.dumps(found.as_dict()))
    assert again["factors"] == found.factors == {"a": found.layers[0].factor, "b": pytest.approx(0.5, abs=0.2)}
    assert found.widths({"a": 2.0}) == {"a": 2.0}
    quiet = bottlenecks(saliency_of(layers_of(16, 32), torch.rand(48, generator=torch.Generator().manual_seed(1))))
    assert quiet.advice == "keep the widths as they are"


# --- blocks ---------------------------------------------------------------------------------------------

STAGES = {
    "resnet20": {"layer1": 7, "layer2": 6, "layer3": 6},  # skips that pad with zeros
    "digits_resnet": {"layer1": 3, "layer2": 3, "layer3": 3},  # skips that are convolutions
    "resnet18": {"layer1": 5, "layer2": 5, "layer3": 5, "layer4": 5},
}


@pytest.mark.parametrize("name", STAGES)
def test_the_blocks_of_a_resnet_are_its_stages(name: str) -> None:
    model = sosp.nets.make(name)
    example = torch.zeros(2, 1, 8, 8) if name == "digits_resnet" else IMAGES
    assert {b.name: len(b.layers) for b in find_blocks(sosp.find_structures(model, example))} == STAGES[name]


def test_the_blocks_of_a_mobilenet_are_its_stages_of_several_blocks() -> None:
    """What is expanded inside a block, and filtered channel by channel, belongs to the stage it leads to."""
    found = find_blocks(sosp.find_structures(sosp.nets.mobilenet_v2(classes=10, width=0.25), IMAGES))
    assert [len(b.layers) for b in found] == [9, 9, 12, 9, 9, 2, 1, 1]
    assert found[0].name == "features.0.0 to features.3.conv.2"


@pytest.mark.parametrize("name", ["vgg19", "plainnet20"])
def test_without_adds_every_layer_is_a_block(name: str) -> None:
    structures = sosp.find_structures(sosp.nets.make(name), IMAGES)
    assert [b.layers for b in find_blocks(structures)] == [(layer.name,) for layer in structures.layers]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("depthwise", [("expand", "depthwise"), ("project",)]),  # a depthwise layer is as wide as what it reads
        (
            "residual",
            [("conv1", "block1.conv1", "block1.conv2"), ("block2.conv1", "block2.conv2", "block2.downsample.0")],
        ),
        ("concat", [("left",), ("right",), ("mix",)]),
    ],
)
def test_blocks_of_small_networks(name: str, wanted: list[tuple[str, ...]]) -> None:
    c = case(name)
    found = [b.layers for b in find_blocks(sosp.find_structures(c.model, c.inputs))]
    assert sorted(map(sorted, found)) == sorted(map(sorted, wanted))


class OneStream(nn.Module):
    """As in a transformer: everything is added to one stream."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.up1, self.down1 = nn.Linear(6, 9), nn.Linear(9, 6)
        self.up2, self.down2 = nn.Linear(6, 9), nn.Linear(9, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.down1(torch.relu(self.up1(x)))
        x = x + self.down2(torch.relu(self.up2(x)))
        return self.head(x)


def test_where_one_stream_holds_everything_streams_are_blocks() -> None:
    found = find_blocks(sosp.find_structures(OneStream(), torch.zeros(2, 4)))
    assert {b.name: b.layers for b in found} == {
        "stem to down2": ("stem", "down1", "down2"),
        "up1": ("up1",),
        "up2": ("up2",),
    }


def test_blocks_by_name() -> None:
    structures = sosp.find_structures(sosp.nets.digits_resnet(), torch.zeros(2, 1, 8, 8))
    named = {"early": ["conv1", "layer1", "layer2"], "late": ["layer3.*"]}
    found = find_blocks(structures, named)
    assert [(b.name, len(b.layers)) for b in found] == [("early", 6), ("late", 3)]
    with pytest.raises(StructureError, match=r"separates 'conv1' \(stem\) and 'layer1.0.conv2' \(rest\).*one width"):
        find_blocks(structures, {"stem": ["conv1"], "rest": ["layer1"]})
    with pytest.raises(StructureError, match=r"names 'layer4', which is not a layer of this network\. Did you mean"):
        find_blocks(structures, {"a": ["layer4"]})
    with pytest.raises(ArgumentError, match="into 'a' and into 'b'"):
        find_blocks(structures, {"a": ["layer1"], "b": ["layer1.0.conv1"]})
    assert [b.layers for b in find_blocks(layers_of(3, 4))] == [("a",), ("b",)]  # nothing is known of its flow


# --- what it costs --------------------------------------------------------------------------------------


def test_the_recommended_network_costs_what_it_costs() -> None:
    """Counted along the flow, as much as the network that is built with these widths."""
    model, x, y = digits_network()
    found = bottlenecks(sosp.score(model, (x, y)))
    assert any(f > 1 for f in found.factors.values())
    assert any(f < 1 for f in found.factors.values())
    built = sosp.nets.digits_resnet(width=found.widths(found.factors))
    assert found.after is not None
    assert found.before is not None
    assert found.after.params == sum(p.numel() for p in built.parameters())
    assert found.after.macs == sosp.count(built, x).macs
    assert found.before.params == 77_754


def test_widths_that_are_fixed_have_no_cost_but_a_reason() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = sosp.nets.resnet20(width=0.25).eval()
        x, y = torch.randn(8, 3, 8, 8), torch.randint(0, 10, (8,))
    saliency = sosp.score(model, (x, y), method="first-order")
    narrow = torch.zeros(len(saliency.structures))
    narrow[torch.isin(saliency.structures.owner(), torch.arange(13, 19))] = 1  # layer3 goes last
    found = bottlenecks(saliency_of(saliency.structures, narrow + saliency.scores / 1e6))
    assert "layer3" in found.factors
    assert found.after is None
    assert "'layer3.0.conv2'" in found.note
    assert "zeros that pad other channels" in found.note
    given = bottlenecks(saliency_of(saliency.structures, narrow), cost=lambda widths: sosp.count(model, x))
    assert given.after == given.before


# --- bad input ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ratios": [0.5, 1.0]}, "ratio=1.0 must be a share between 0 and 1"),
        ({"ratios": []}, "must be different shares"),
        ({"ratios": [0.5, 0.5]}, "must be different shares"),
        ({"alpha": 1.5}, "alpha=1.5 must be a number between 0 and 1"),
        ({"alpha": True}, "alpha=True"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        bottlenecks(saliency_of(layers_of(4, 4), torch.rand(8)), **options)


def test_what_says_nothing_about_widths() -> None:
    model, x, y = digits_network()
    with pytest.raises(ArgumentError, match="'fpgm' ranks every layer by itself"):
        bottlenecks(sosp.score(model, (x, y), method="fpgm"))
    blocks = sosp.find_structures(model, x, kind="blocks")
    with pytest.raises(ArgumentError, match="one structure per branch"):
        bottlenecks(sosp.score(model, (x, y), method="first-order", structures=blocks))
    mask = sosp.select(sosp.score(model, (x, y), method="random"), ratio=0.5)
    with pytest.raises(ArgumentError, match="masks have their own ratios"):
        bottlenecks(mask, ratios=[0.5])
    with pytest.raises(ArgumentError, match="give a saliency"):
        bottlenecks([])
    with pytest.raises(ArgumentError, match="not those that the masks were chosen from"):
        bottlenecks(mask, structures=layers_of(4, 4))
    other = case("mlp")
    few = sosp.select(sosp.score(other.model, (other.inputs, other.targets), method="random"), ratio=0.5)
    with pytest.raises(ArgumentError, match="masks are of different layers"):
        bottlenecks([mask, few])


# --- the saliency in a file -----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["sosp-h", "sosp-i", "random"])
def test_a_saliency_comes_back(method: str, tmp_path: Path) -> None:
    model, x, y = digits_network()
    saliency = sosp.score(model, (x, y), method=method)
    mask = sosp.select(saliency, ratio=0.5)
    save_saliency(tmp_path / "s", saliency, mask)
    found = read_saliency(tmp_path / "s")
    assert (found.method, found.scope, found.examples) == (method, "global", saliency.examples)
    assert list(found.layers) == [layer.name for layer in saliency.structures.layers]
    assert torch.equal(found.index, saliency.structures.owner())
    assert torch.equal(found.rank < 168, found.removed)  # the mask took the first half
    assert int(found.removed.sum()) == mask.chosen
    assert torch.equal(found.scores, saliency.scores.double())
    assert (found.first is None) == (method == "random")
    assert (found.pairs_by_layer is None) == (method != "sosp-i")
    assert bottlenecks(found, structures=saliency.structures) == bottlenecks(saliency)
    assert (tmp_path / "s").stat().st_size < 20_000  # of pairs alone there are 336 x 336


def test_pairs_are_kept_layer_by_layer(tmp_path: Path) -> None:
    c = case("mlp")
    saliency = sosp.score(c.model, (c.inputs, c.targets), method="exact")
    save_saliency(tmp_path / "s", saliency, sosp.select(saliency, ratio=0.5))
    table, pairs = read_saliency(tmp_path / "s").pairs_by_layer, saliency.pairs
    assert table is not None
    assert pairs is not None
    owner = saliency.structures.owner().tolist()
    for i in range(len(table)):
        for j in range(len(table)):
            wanted = sum(
                abs(float(pairs[s, t]))
                for s in range(len(owner))
                for t in range(len(owner))
                if (owner[s], owner[t]) == (i, j)
            )
            assert float(table[i, j]) == pytest.approx(wanted)


def test_groups_of_channels_are_one_structure_in_the_file(tmp_path: Path) -> None:
    model, x, y = digits_network()
    structures = sosp.find_structures(model, x, groups="coupled")
    saliency = sosp.score(model, (x, y), method="first-order", structures=structures)
    mask = sosp.select(saliency, ratio=0.4)
    save_saliency(tmp_path / "s", saliency, mask)
    assert int(read_saliency(tmp_path / "s").removed.sum()) == mask.chosen


def test_other_files_are_refused(tmp_path: Path) -> None:
    model, x, y = digits_network()
    sosp.save(tmp_path / "model", model)
    with pytest.raises(CheckpointError, match="model: was written by sosp but contains no saliency"):
        read_saliency(tmp_path / "model")
    with pytest.raises(CheckpointError, match="there is no such file"):
        read_saliency(tmp_path / "nothing")
    save_saliency(tmp_path / "s", *_scored(model, x, y))
    whole = (tmp_path / "s").read_bytes()
    (tmp_path / "s").write_bytes(whole[:-8])
    with pytest.raises(CheckpointError, match="damaged"):
        read_saliency(tmp_path / "s")


def _scored(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Saliency, sosp.Mask]:
    saliency = sosp.score(model, (x, y), method="first-order")
    return saliency, sosp.select(saliency, ratio=0.5)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("rank", lambda x: x * 0, "'rank' is not a permutation of 336"),
        ("index", lambda x: x + 9, "'index' names layers that are not among its 9"),
        ("scores", lambda x: x[:-1], "'scores' has 335 entries"),
        ("scores", lambda x: x.float(), "'scores' should be torch.float64"),
        ("removed", None, "'removed' is missing or not expected"),
        ("more", lambda x: torch.zeros(3), "'more' is missing or not expected"),
        ("pairs_by_layer", lambda x: torch.zeros(2, 2, dtype=torch.float64), r"is \(2, 2\) for 9 layers"),
    ],
)
def test_what_a_file_claims_is_checked(name: str, change: Any, words: str, tmp_path: Path) -> None:
    from sosp.core import safetensors_files

    model, x, y = digits_network()
    save_saliency(tmp_path / "s", *_scored(model, x, y))
    document, tensors = safetensors_files.read_safetensors(tmp_path / "s")
    given = tensors.pop(name, torch.zeros(0))
    if change is not None:
        tensors[name] = change(given).contiguous()
    safetensors_files.write_safetensors(tmp_path / "s", document, tensors)
    with pytest.raises(CheckpointError, match=words):
        read_saliency(tmp_path / "s")
