"""Widen what is too narrow and prune again: wider networks, the constant that matches, courses, and starting over."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sosp
from helpers.unchanged import check_unchanged
from networks import case
from sosp.data import Dataset
from sosp.errors import ArgumentError, CheckpointError, StructureError
from sosp.nets import Width
from sosp.studies.bottlenecks.bottleneck_detection import bottlenecks
from sosp.studies.expand.expand_pruning import Expanded, choose_blocks, compare_init_pruning, expand
from sosp.studies.expand.expansion_plan import ExpansionPlan, ExpansionSetup, PruningProtocol
from sosp.studies.expand.expansion_points import ExpansionPoint
from sosp.studies.expand.matching_width import match_parameters
from sosp.studies.expand.pruning_protocols import run_protocols
from sosp.studies.expand.widenable_networks import make_widenable
from sosp.training import Schedule
from sosp.training.initial_statistics import has_initial_statistics, recalibrate_untrained

ONE = Schedule(epochs=1, batch=50, rate=0.05, shape="cosine")
SMALL = torch.zeros(2, 3, 16, 16)


@pytest.fixture(scope="module")
def data() -> Dataset:
    digits = sosp.data.digits()
    return replace(digits, train=digits.train.subset(200, 0), test=digits.test.subset(100, 0))


def tiny(width: Width = 1.0) -> nn.Module:
    return sosp.nets.digits_resnet(width=width)


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {n: tuple(x.shape) for n, x in model.state_dict().items()}


def plan(**more: Any) -> ExpansionPlan:
    return ExpansionPlan(**{"ratios": (0.5,), "examples": 50, "method": "first-order", **more})


# --- wider networks -------------------------------------------------------------------------------------

# Network -> how it is made, how wide it is to begin with, and what is widened: stages, layers, everything. All of
# sosp.nets but those that differ in their depth alone, and skips of kind A.
BOTH: dict[str, tuple[Callable[[Width], nn.Module], float, dict[str, float]]] = {
    "vgg19": (lambda w: sosp.nets.vgg19(width=w), 0.25, {"features.0": 2, "features.40": 1.5}),
    "resnet20, skip B": (lambda w: sosp.nets.resnet20(width=w, skip="B"), 1.0, {"layer1": 2}),
    "resnet20, skip B, all": (lambda w: sosp.nets.resnet20(width=w, skip="B"), 1.0, {"*": 1.071}),
    "resnet32x4": (lambda w: sosp.nets.resnet32x4(width=w), 0.25, {"layer3": 1.1}),
    "plainnet20": (lambda w: sosp.nets.plainnet20(width=w), 1.0, {"layer2": 1.3}),
    "densenet40": (lambda w: sosp.nets.densenet40(width=w), 1.0, {"dense1": 2, "trans1": 1.2}),
    "resnet18": (lambda w: sosp.nets.resnet18(width=w, classes=10), 0.25, {"layer2": 1.5}),
    "resnet50": (lambda w: sosp.nets.resnet50(width=w, classes=10), 0.25, {"layer4": 1.25}),
    "mobilenet_v2": (lambda w: sosp.nets.mobilenet_v2(width=w, classes=10), 1.0, {"features.2": 2, "features.18": 1.1}),
    "digits_resnet": (tiny, 1.0, {"layer1": 2, "layer3": 1.1}),
}


@pytest.mark.parametrize("name", BOTH)
def test_widening_and_width_give_the_same_network(name: str) -> None:
    """The same names and shapes, and both count what is built."""
    make, base, width = BOTH[name]
    example = torch.zeros(2, 1, 8, 8) if name == "digits_resnet" else SMALL
    by_flow, by_width = make_widenable(make(base), example), make_widenable(make, example, base)
    assert by_flow.layers == by_width.layers
    factors = {n: _asked(n, width) for n in by_flow.layers if _asked(n, width) > 1}
    made, widened = by_width.make(factors, seed=0), by_flow.make(factors, seed=0)
    assert shapes(made) == shapes(widened)
    assert list(made.state_dict()) == list(widened.state_dict())
    assert base != 1.0 or shapes(made) == shapes(make(width))
    params = sum(p.numel() for p in made.parameters())
    assert params == by_flow.params(factors) == by_width.params(factors) > by_width.params({})
    assert by_flow.cost(factors) == by_width.cost(factors)


def _asked(layer: str, width: dict[str, float]) -> float:
    return max((f for n, f in width.items() if n in ("*", layer) or layer.startswith(f"{n}.")), default=1.0)


def test_a_width_that_is_fixed_is_refused_by_name() -> None:
    """The zeros that pad a skip of kind A are a number in the code; through ``width=`` it can be another."""
    model = sosp.nets.resnet20(width=0.25)
    example = torch.zeros(2, 3, 8, 8)
    with pytest.raises(
        StructureError, match=r"'layer3.0.conv2'.* cannot be widened.*\n.*zeros that pad other channels"
    ):
        make_widenable(model, example).cost({"layer3.0.conv2": 2.0})
    made = make_widenable(lambda width: sosp.nets.resnet20(width=width), example, 0.25)
    assert shapes(made.make(dict.fromkeys(made.layers, 2.0), 0)) == shapes(sosp.nets.resnet20(width=0.5))


def test_a_width_on_top_of_a_width() -> None:
    """A quarter as wide, and of that one layer 1.5 times: as widening the narrow network does it."""
    x = torch.zeros(2, 1, 8, 8)
    made, widened = make_widenable(tiny, x, 0.25), make_widenable(tiny(0.25), x)
    factors = {"layer2.0.conv1": 1.5, "layer3.0.conv1": 1.1}
    assert shapes(made.make({}, 0)) == shapes(tiny(0.25))
    assert shapes(made.make(factors, 0)) == shapes(widened.make(factors, 0))
    assert made.params(factors) == widened.params(factors) > made.params({})


def test_weights_depend_on_the_seed_alone() -> None:
    model = case("residual").model
    x = case("residual").inputs
    growth = make_widenable(model, x)
    with check_unchanged(model):
        first, again, other = (growth.make({"conv1": 2.0}, seed) for seed in (0, 0, 1))
    state = torch.get_rng_state()
    make_widenable(tiny, torch.zeros(2, 1, 8, 8)).make({}, 3)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(x, again.state_dict()[n]) for n, x in first.state_dict().items())
    assert not torch.equal(first.state_dict()["conv1.weight"], other.state_dict()["conv1.weight"])
    fresh = growth.make({}, 0)
    assert shapes(fresh) == shapes(model)
    assert not torch.equal(fresh.state_dict()["head.weight"], model.state_dict()["head.weight"])  # drawn anew
    assert has_initial_statistics(fresh)


@pytest.mark.parametrize("factor", [0.5, 0.0, -1.0, float("nan"), float("inf"), 65, True, "2"])
def test_factors_that_do_not_widen(factor: Any) -> None:
    with pytest.raises(ArgumentError, match="must be a number from 1 to 64"):
        ExpansionPlan(factor=factor)
    with pytest.raises(ArgumentError, match="factor for 'conv1'"):
        make_widenable(tiny, torch.zeros(2, 1, 8, 8)).make({"conv1": factor}, 0)
    with pytest.raises(ArgumentError, match=r"neither a torch\.nn\.Module nor a function"):
        make_widenable("resnet56", SMALL)  # type: ignore[arg-type]


# --- the constant that matches --------------------------------------------------------------------------


def staircase(factor: float) -> int:
    """Two layers of 3 and 7 channels."""
    a, b = round(3 * factor), round(7 * factor)
    return 5 * a + a * b + 2 * b


@pytest.mark.parametrize("target", [50, 51, 60, 77, 100, 500, 12_345])
def test_the_nearest_count_is_found(target: int) -> None:
    edges = sorted({(j + 0.5) / w for w in (3, 7) for j in range(3, 64 * w)})
    heights = {staircase(f) for f in [1.0, *((a + b) / 2 for a, b in pairwise(edges))]}
    found = match_parameters(staircase, target)
    assert found.params == staircase(found.factor)
    assert abs(found.params - target) == min(abs(h - target) for h in heights)
    assert found.target == target


def test_the_constant_is_short_to_write() -> None:
    assert match_parameters(staircase, staircase(1.5)).factor == 1.4  # or 1.5: the first that has no more digits
    assert match_parameters(staircase, staircase(2.0)).factor == 2.0
    assert match_parameters(staircase, staircase(1.0)).factor == 1.0
    assert len(str(match_parameters(staircase, 77).factor)) <= 4


@pytest.mark.parametrize("target", [49, 10**9, 50.0, True])
def test_a_target_that_no_constant_reaches(target: Any) -> None:
    with pytest.raises(ArgumentError, match=r"no constant factor gives the network .* unchanged it has 50"):
        match_parameters(staircase, target)


def test_the_constant_of_the_paper() -> None:
    """ResNet-56 with its first stage twice as wide has as many parameters as 1.07 (the paper: 1.1) times everything."""
    growth = make_widenable(lambda width: sosp.nets.resnet56(width=width), torch.zeros(2, 3, 8, 8))
    first = {n: 2.0 for n in growth.layers if n == "conv1" or n.startswith("layer1")}
    assert growth.params(first) == 983_082
    found = {factor: growth.params(dict.fromkeys(growth.layers, factor)) for factor in (1.07, 1.071, 1.08)}
    assert found[1.07] < 983_082 < found[1.071] < found[1.08]
    assert found[1.071] == 983_948  # 0.1 % above, and nearer than 1.07


# --- a network that was never trained -------------------------------------------------------------------


def test_an_untrained_network_is_scored_with_statistics_of_its_own() -> None:
    """With means of 0 and variances of 1 a deep ResNet saturates: the curvature of its loss is zero."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = sosp.nets.resnet56(width=0.25).eval()
        x, y = torch.randn(12, 3, 8, 8), torch.randint(0, 10, (12,))
    assert has_initial_statistics(model)
    with check_unchanged(model):
        fit = recalibrate_untrained(model, (x, y))
    assert not has_initial_statistics(fit)
    assert recalibrate_untrained(fit, (x, y)) is fit
    sure = {}
    for name, network in (("0/1", model), ("settled", fit)):
        with torch.no_grad():
            logits = network(x)
        sure[name] = logits.softmax(1).amax(1)  # p (1 - p) is the curvature of the loss in a logit
        assert (logits.std() > 100) == (name == "0/1")
    assert (sure["0/1"] == 1).double().mean() > 0.8
    assert (sure["settled"] == 1).sum() == 0


def test_a_network_without_batch_norms_stays_what_it_is() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    assert recalibrate_untrained(model, (torch.zeros(4, 4), torch.zeros(4, dtype=torch.int64))) is model


# --- what is chosen -------------------------------------------------------------------------------------


def plain(width: Width = 1.0) -> nn.Module:
    """Six layers without a skip."""
    net = nn.Sequential(
        *(nn.Sequential(nn.Linear(64 if not i else 8, 8), nn.ReLU()) for i in range(6)), nn.Linear(8, 10)
    )
    return nn.Sequential(nn.Flatten(), net)


def test_five_layers_where_every_layer_is_a_block_and_one_stage_of_a_resnet() -> None:
    x, y = torch.randn(8, 1, 8, 8), torch.randint(0, 10, (8,))
    for model, count in ((plain(), 5), (tiny(0.25).eval(), 1)):
        seen = bottlenecks(sosp.score(model, (x, y), method="first-order"), ratios=[0.3, 0.5])
        growth = make_widenable(model, x)
        found = choose_blocks(seen, growth, ExpansionPlan())
        assert len(found.blocks) == count
        others = [share for block, share in found.removed.items() if block not in found.blocks]
        assert max(found.removed[b] for b in found.blocks) <= min(others)
        assert found.constant.target == growth.params(found.factors)
        assert set(found.factors.values()) == {2.0}
    assert len(choose_blocks(seen, growth, ExpansionPlan(blocks=2)).blocks) == 2
    with pytest.raises(ArgumentError, match="blocks=40 are to be widened, but the network has 3: layer1, layer2"):
        choose_blocks(seen, growth, ExpansionPlan(blocks=40))


# --- the whole procedure --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(
    data: Dataset, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Expanded, list[str], list[ExpansionPoint]]:
    """An expansion, its folder, the epochs and the points that were told of."""
    epochs: list[str] = []
    told: list[ExpansionPoint] = []
    folder = tmp_path_factory.mktemp("expansion")
    setup = ExpansionSetup(ONE, folder=folder, on_epoch=lambda n, e: epochs.append(n), on_point=told.append)
    return folder, expand(tiny, data, plan(), setup, base=0.25), epochs, told


def test_expand_pruning(whole: tuple[Path, Expanded, list[str], list[ExpansionPoint]], data: Dataset) -> None:
    folder, found, epochs, told = whole
    assert [p.name for p in found.points] == ["vanilla-ratio0.5", "expand-ratio0.5", "widen-ratio0.5"]
    assert epochs == ["vanilla", "expand", "widen", *(p.name for p in found.points)]
    vanilla, wide, even = found.points
    assert vanilla.whole_params == sum(p.numel() for p in tiny(0.25).parameters())
    assert wide.whole_params == found.choice.constant.target
    assert even.whole_params == found.choice.constant.params
    assert all(abs(p.removed - p.structures / 2) <= 1 for p in found.points)
    assert all(None not in (p.whole, p.cut, p.tuned, p.best) for p in found.points)
    assert set(wide.blocks) == {"layer1", "layer2", "layer3"}
    assert [p.tuned is None for p in told] == [True] * 3 + [False] * 3
    saved = sosp.load(folder / "networks" / "vanilla-ratio0.5.safetensors", tiny(0.25))
    assert sosp.evaluate(saved, data.test).top1 == vanilla.tuned


def test_an_expansion_that_is_done_trains_nothing(
    whole: tuple[Path, Expanded, list[str], list[ExpansionPoint]], data: Dataset
) -> None:
    folder, found, _, _ = whole
    epochs: list[str] = []
    setup = ExpansionSetup(ONE, folder=folder, on_epoch=lambda n, e: epochs.append(n))
    assert expand(tiny, data, plan(), setup, base=0.25) == found
    assert not epochs
    with pytest.raises(CheckpointError, match=r"a different expansion: factor was 2.0 and is 3.0"):
        expand(tiny, data, plan(factor=3.0), setup, base=0.25)
    with pytest.raises(CheckpointError, match=r"a different expansion: schedule.epochs was 1 and is 2"):
        expand(tiny, data, plan(), replace(setup, schedule=replace(ONE, epochs=2)), base=0.25)


def test_an_interrupted_expansion_ends_as_if_it_had_not_been(
    whole: tuple[Path, Expanded, list[str], list[ExpansionPoint]], data: Dataset, tmp_path: Path
) -> None:
    for enough in (3, 6):  # in the middle of the cuts, after two of three were fine-tuned
        left = iter(range(enough))

        def stop(*_: object, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise InterruptedError

        with pytest.raises(InterruptedError):
            expand(tiny, data, plan(), ExpansionSetup(ONE, folder=tmp_path, on_epoch=stop, on_point=stop), base=0.25)
    with open(tmp_path / "points.jsonl", "a") as file:
        file.write('{"course": "vani')  # of a process that was killed
    epochs: list[str] = []
    setup = ExpansionSetup(ONE, folder=tmp_path, on_epoch=lambda n, e: epochs.append(n))
    assert expand(tiny, data, plan(), setup, base=0.25) == whole[1]
    assert not epochs  # all three were trained side by side, and the checkpoint has them


def test_expanding_any_module_at_initialisation(data: Dataset) -> None:
    """App. A.11: chosen and pruned before any training, then trained once; sizes are of the vanilla network."""
    model = tiny(0.25)
    epochs: list[str] = []
    setup = ExpansionSetup(ONE, on_epoch=lambda n, e: epochs.append(n))
    with check_unchanged(model):
        found = expand(model, data, plan(when="init", sizes=(0.5, 1500)), setup)
    assert [p.size for p in found.points[:2]] == [round(0.5 * found.points[0].whole_params), 1500]
    assert all(p.params <= p.size for p in found.points)
    assert epochs == [p.name for p in found.points]
    assert all(p.whole is None and p.cut is None and p.tuned is not None for p in found.points)


def test_a_network_that_is_trained_already_is_not_trained_again(data: Dataset) -> None:
    trained = sosp.train(tiny(0.25), data, ONE).model
    epochs: list[str] = []
    setup = ExpansionSetup(ONE, on_epoch=lambda n, e: epochs.append(n))
    courses = [PruningProtocol("a", "net", after=0)]
    (found,) = run_protocols({"net": tiny(0.25)}, courses, data, plan(), setup, trained={"net": trained})
    assert not epochs
    assert found.whole == sosp.evaluate(trained, data.test).top1


def test_fixed_widths_are_refused_before_any_training(data: Dataset) -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 4, 3)
            self.head = nn.Linear(36 * 4, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.conv(x))
            return self.head(x.reshape(len(x), 4, 36).flatten(1))

    epochs: list[str] = []
    with pytest.raises(StructureError, match=r"'conv' cannot be widened: the width is fixed"):
        expand(Fixed(), data, plan(), ExpansionSetup(ONE, on_epoch=lambda n, e: epochs.append(n)))
    assert not epochs


# --- courses --------------------------------------------------------------------------------------------


def test_pruning_before_and_after_training_train_as_long(data: Dataset) -> None:
    epochs: list[str] = []
    model = tiny(0.25)
    with check_unchanged(model):
        late, early = compare_init_pruning(
            model, data, plan(), ExpansionSetup(ONE, on_epoch=lambda n, e: epochs.append(n))
        )
    assert (late.course, early.course) == ("train-pruning", "init-pruning")
    assert sorted(epochs) == ["init-pruning-ratio0.5"] * 2 + ["network", "train-pruning-ratio0.5"]
    assert (early.whole, early.cut) == (None, None)
    assert late.whole is not None
    assert late.structures == early.structures
    assert late.removed == early.removed


def test_shuffled_masks_keep_the_architecture_and_random_ones_do_not(data: Dataset) -> None:
    courses = [
        PruningProtocol("plain", "net", before=0, after=0),
        PruningProtocol("shuffled", "net", before=0, after=0, shuffled=True),
        PruningProtocol("random", "net", before=0, after=0, method="random"),
    ]
    plain, shuffled, other = run_protocols({"net": tiny()}, courses, data, plan(), ExpansionSetup(ONE))
    assert plain.layers == shuffled.layers
    assert (plain.structures, plain.removed) == (shuffled.structures, shuffled.removed)
    assert other.layers != plain.layers
    assert plain.tuned is None


def test_a_size_that_cannot_be_had_is_a_point_with_a_reason(data: Dataset, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2), nn.ReLU(), nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 10))
    courses = [PruningProtocol("init", "net", before=0)]
    for _ in range(2):  # also from the folder
        (found,) = run_protocols(
            {"net": model}, courses, data, plan(ratios=(0.8,)), ExpansionSetup(ONE, folder=tmp_path)
        )
        assert "disconnects the network" in found.refusal
        assert found.tuned is None


@pytest.mark.parametrize(
    ("courses", "words"),
    [
        ([], "need different names"),
        ([PruningProtocol("a", "net"), PruningProtocol("a", "net")], "need different names"),
        ([PruningProtocol("a", "other")], "'other', which is not among networks"),
    ],
)
def test_bad_courses(courses: list[PruningProtocol], words: str, data: Dataset) -> None:
    with pytest.raises(ArgumentError, match=words):
        run_protocols({"net": tiny(0.25)}, courses, data, plan(), ExpansionSetup(ONE))


def test_sizes_up_to_one_are_shares_of_the_parameters() -> None:
    found = ExpansionPlan(sizes=(0.5, 1.0, 1, 2, 400)).budgets(1000)
    assert found == tuple(("params", params) for params in (500, 1000, 1000, 2, 400))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ratios": (0.5, 1.2)}, "ratio=1.2"),
        ({"probe": 0.0}, "ratio=0.0"),
        ({"sizes": (0.5, 1.5)}, "size=1.5"),
        ({"sizes": (0,)}, "size=0"),
        ({"blocks": 0}, "blocks=0"),
        ({"when": "later"}, "when='later'"),
        ({"method": "sosp-g"}, "sosp-h"),
    ],
)
def test_bad_plans(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        ExpansionPlan(**options)
    with pytest.raises(ArgumentError, match="before"):
        PruningProtocol("a", "net", before=-1)


def test_a_folder_that_was_changed_is_refused(data: Dataset, tmp_path: Path) -> None:
    setup = ExpansionSetup(ONE, folder=tmp_path)
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"plan\.json: was not written by an expansion"):
        expand(tiny, data, plan(when="init"), setup, base=0.25)
    (tmp_path / "plan.json").unlink()
    (tmp_path / "choice.json").write_text(json.dumps({"blocks": ["layer1"]}))
    with pytest.raises(CheckpointError, match=r"choice\.json: was not written by an expansion"):
        expand(tiny, data, plan(when="init"), setup, base=0.25)
