"""The pipeline in one call, end to end: every kind of data, every kind of budget, and what comes out."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

import sosp
from helpers.quarters import CLASSES, EXAMPLES, Net, pictures
from helpers.unchanged import check_unchanged
from networks import case
from sosp.core.layers import Scatter
from sosp.errors import ArgumentError, DataError, DisconnectedError, LossError, StructureError

UNUSED = 8  # of the 64 examples


def batches(size: int = 10) -> Iterator[tuple[Tensor, Tensor]]:
    x, y = pictures()
    yield from zip(x.split(size), y.split(size), strict=True)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def macs(model: nn.Module) -> int:
    x = pictures()[0][:2]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    return counter.get_total_flops() // 4


def loss_of(model: nn.Module) -> float:
    x, y = pictures()
    with torch.no_grad():
        return F.cross_entropy(model.eval()(x), y).item()


def removed(mask: sosp.Mask) -> dict[str, list[int]]:
    return {name: channels.tolist() for name, channels in mask.removed.items()}


# --- data of every kind


DATA: dict[str, Any] = {
    "a loader": lambda: DataLoader(TensorDataset(*pictures()), batch_size=10),
    "a list": lambda: list(batches()),
    "a generator": batches,
    "a map": lambda: map(tuple, batches(16)),
}


@pytest.fixture(scope="module")
def wanted(trained: dict[str, Tensor]) -> sosp.Pruned:
    """From a pair of tensors."""
    net = Net().eval()
    net.load_state_dict(trained)
    return sosp.prune(net, pictures(), ratio=0.3, scoring=sosp.Scoring(examples=None))


@pytest.mark.parametrize("kind", DATA)
def test_data_of_every_kind(model: Net, wanted: sosp.Pruned, kind: str) -> None:
    found = sosp.prune(model, DATA[kind](), ratio=0.3, scoring=sosp.Scoring(examples=None))
    assert removed(found.mask) == removed(wanted.mask)
    assert found.saliency.examples == EXAMPLES
    assert all(torch.equal(a, b) for a, b in zip(found.model.parameters(), wanted.model.parameters(), strict=True))


def test_a_generator_is_read_once_and_no_further_than_needed(model: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sosp.pipeline.cut.MOST_UNUSED", 12)
    taken = []

    def data() -> Iterator[tuple[Tensor, Tensor]]:
        for batch in batches(8):
            taken.append(len(batch[0]))
            yield batch

    found = sosp.prune(model, data(), ratio=0.3, scoring=sosp.Scoring(examples=20), preset="paper")
    assert found.saliency.examples == 20
    assert found.measured.answers.agreement.inputs == 12
    assert sum(taken) == 32
    first = sosp.prune(
        model,
        [(x[:20], y[:20]) for x, y in [pictures()]],
        ratio=0.3,
        scoring=sosp.Scoring(examples=None),
        preset="paper",
    )
    assert removed(found.mask) == removed(first.mask)


def test_a_shuffled_loader_leaves_chance_as_it_was(model: Net) -> None:
    before = torch.get_rng_state()
    loader = DataLoader(TensorDataset(*pictures()), batch_size=16, shuffle=True)
    found = sosp.prune(model, loader, ratio=0.3)
    assert torch.equal(torch.get_rng_state(), before)
    assert found.saliency.examples == EXAMPLES - UNUSED


class Keyed(nn.Module):
    """Takes and gives dicts, and computes its own loss where it is given labels, as Hugging Face's do."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.net(pixels)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.parametrize("once", [False, True])
def test_dict_batches(model: Net, wanted: sosp.Pruned, once: bool) -> None:
    data = [{"pixels": x, "labels": y} for x, y in batches(16)]
    found = sosp.prune(
        Keyed(model).eval(), iter(data) if once else data, ratio=0.3, scoring=sosp.Scoring(examples=None)
    )
    assert removed(found.mask) == {f"net.{n}": c for n, c in removed(wanted.mask).items()}
    assert found.model(pixels=pictures()[0][:2])["logits"].shape == (2, CLASSES)


def test_one_example_is_enough(model: Net) -> None:
    x, y = pictures()
    found = sosp.prune(model, (x[:1], y[:1]), ratio=0.2)
    assert found.saliency.examples == 1
    assert parameters(found.model) < parameters(model)


def test_inputs_alone_are_enough(model: Net) -> None:
    x, y = pictures()
    found, labelled = sosp.prune(model, x, macs=0.6), sosp.prune(model, (x, y), macs=0.6)
    assert removed(found.mask) == removed(labelled.mask)
    assert macs(found.model) <= 0.6 * macs(model)


# --- budgets


@pytest.mark.parametrize("limit", [0.7, 0.4, 900])
def test_a_budget_of_parameters(model: Net, limit: float) -> None:
    found = sosp.prune(model, pictures(), params=limit)
    assert parameters(found.model) <= (limit if limit > 1 else limit * parameters(model))
    assert (found.cost_before.params, found.cost_after.params) == (parameters(model), parameters(found.model))


@pytest.mark.parametrize("limit", [0.7, 0.4, 30_000])
def test_a_budget_of_macs(model: Net, limit: float) -> None:
    found = sosp.prune(model, pictures(), macs=limit)
    assert macs(found.model) <= (limit if limit > 1 else limit * macs(model))
    assert (found.cost_before.macs, found.cost_after.macs) == (macs(model), macs(found.model))


def test_half_of_the_structures_if_nothing_is_said(model: Net) -> None:
    """6 + 8 + 6 + 8 + 10 + 10 filters; two streams have one mask each."""
    for preset, structures in (("paper", 48), ("default", 32)):
        how: dict[str, Any] = {"preset": preset, "scoring": sosp.Scoring(examples=None)}
        found = sosp.prune(model, pictures(), **how)
        assert (found.mask.structures, found.mask.chosen) == (structures, structures // 2)
        assert removed(found.mask) == removed(sosp.prune(model, pictures(), ratio=0.5, **how).mask)


def test_the_steps_one_by_one_give_the_same(model: Net) -> None:
    data = pictures()
    found = sosp.prune(model, data, macs=0.6, exclude=["skip"])
    structures = sosp.find_structures(model, data[0][:8], groups="coupled", exclude=["skip"])
    saliency = sosp.score(model, data, method="sosp-i", structures=structures, targets="own", examples=56)
    mask = sosp.select(saliency, macs=0.6, options=sosp.Selection())
    small = sosp.repair(sosp.shrink(model, mask, data[0][:8]), model, data, examples=56).model
    assert removed(found.mask) == removed(mask)
    assert "skip" not in found.mask.removed
    assert all(torch.equal(small.state_dict()[n], t) for n, t in found.model.state_dict().items())


class Fixed(nn.Module):
    """Its code asks for three channels: found only when a network with fewer is tried out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 12, 3)
        self.conv2 = nn.Conv2d(12, 12, 3)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        if x.shape[1] < 3:
            raise RuntimeError("too narrow")
        return self.head(F.relu(self.conv2(2 * x)).mean((2, 3)))


def test_a_width_that_shows_only_when_tried_is_in_the_budget() -> None:
    """1480 parameters: 300 with two filters in conv1; but it turns out that all that it feeds has to stay."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Fixed().eval()
    with torch.no_grad():
        model.conv1.weight[1:] *= 1e-6  # all but the first filter would go first
        model.conv1.bias[1:] *= 1e-6
    assert all("conv1" not in pin.layers for pin in sosp.trace(model, pictures()[0]).pinned)
    found = sosp.prune(model, pictures(), params=0.25)
    assert any("conv1" in pin.layers for pin in found.plan.flow.pinned)
    assert found.model.conv2.in_channels == 12
    assert parameters(found.model) == found.cost_after.params <= 370
    assert found.model(pictures()[0]).shape == (EXAMPLES, CLASSES)


# --- what comes out


def test_the_small_network_is_what_the_mask_says(model: Net) -> None:
    x, _ = pictures()
    found = sosp.prune(model, pictures(), ratio=0.4, repair=False)
    masked = sosp.masked(model, found.mask)
    with torch.no_grad():
        assert torch.allclose(found.model(x), masked(x), atol=1e-5)
    assert type(found.model) is Net
    assert parameters(found.model) < parameters(model)


@pytest.mark.parametrize("method", ["sosp-h", "sosp-i", "first-order"])
def test_it_removes_what_is_needed_least(model: Net, method: str) -> None:
    """Filters whose feature maps are next to nothing, wherever they are."""
    weak = {"stem": [1, 4], "a1": [0, 3, 7], "b1": [2], "b2": [5, 6]}
    with torch.no_grad():
        for name, channels in weak.items():
            norm = model.get_submodule(f"{name}_bn")
            norm.weight[channels] = 1e-5
            norm.bias[channels] = 1e-5
    found = sosp.prune(model, pictures(), ratio=8 / 48, method=method, preset="paper")
    assert removed(found.mask) == weak
    assert loss_of(found.model) == pytest.approx(loss_of(model), abs=1e-3)


def test_it_can_be_fine_tuned(model: Net) -> None:
    small = sosp.prune(model, pictures(), ratio=0.5).model
    x, y = pictures()
    before = loss_of(small)
    optimiser = torch.optim.Adam(small.train().parameters(), 0.01)
    for _ in range(10):
        optimiser.zero_grad()
        F.cross_entropy(small(x), y).backward()
        optimiser.step()
    assert loss_of(small) < before


def test_coupled_streams_need_no_scatter(model: Net) -> None:
    coupled = sosp.prune(model, pictures(), macs=0.5, selection=sosp.Selection(groups="coupled"))
    free = sosp.prune(model, pictures(), macs=0.5, preset="paper")
    assert not any(isinstance(m, Scatter) for m in coupled.model.modules())
    assert any(isinstance(m, Scatter) for m in free.model.modules())
    assert macs(coupled.model) <= 0.5 * macs(model)
    assert coupled.mask.structures == 6 + 8 + 8 + 10  # two streams and the inside of two blocks
    assert removed(coupled.mask).get("stem") == removed(coupled.mask).get("a2")


def test_how_it_prints(model: Net) -> None:
    found = sosp.prune(model, pictures(), ratio=0.25, preset="paper")
    before, after = parameters(model), parameters(found.model)
    lines = str(found).splitlines()
    assert lines[0] == "sosp-h: 12 of 48 structures removed"
    assert lines[1] == (
        "scored by sosp-h on labels (cross-entropy), 64 inputs; independent filters; lowest saliency first; "
        "not repaired"
    )
    assert lines[2].split() == ["parameters", f"{before:,}", "->", f"{after:,}", f"({after / before:.1%}", "left)"]
    assert lines[3].split()[:4] == ["MACs", f"{macs(model):,}", "->", f"{macs(found.model):,}"]
    assert [line.split()[0] for line in lines[4:]] == ["file", "peak", "latency", "agreement", "next:"]
    assert lines[7].startswith("agreement not measured: scoring and repair use all 64 inputs. Give more")


def test_a_file_and_back(model: Net, tmp_path: Path) -> None:
    x, _ = pictures()
    found = sosp.prune(model, pictures(), params=0.5)
    path = tmp_path / "small.safetensors"
    found.save(path)
    again = sosp.load(path, Net().eval())
    assert {n: t.shape for n, t in again.state_dict().items()} == {
        n: t.shape for n, t in found.model.state_dict().items()
    }
    with torch.no_grad():
        assert torch.equal(again(x), found.model.eval()(x))


@pytest.mark.parametrize("groups", ["independent", "coupled"])
def test_the_model_is_left_as_it_was(model: Net, groups: str) -> None:
    model.train()
    model.a1.eval()
    x, y = pictures()
    given = x.clone()
    with check_unchanged(model):
        found = sosp.prune(model, (x, y), params=0.6, selection=sosp.Selection(groups=groups))
    assert torch.equal(x, given)
    assert found.model.training
    assert not found.model.a1.training
    assert found.model.head.weight is not model.head.weight


def test_regression(model: Net) -> None:
    x, y = pictures()
    found = sosp.prune(model, (x, F.one_hot(y, CLASSES).float()), ratio=0.3, loss="mse")
    assert found.mask.chosen == round(0.3 * 32)


# --- what select can be told


def test_a_cap_bounds_every_layer(model: Net) -> None:
    found = sosp.prune(model, pictures(), ratio=0.45, preset="paper", selection=sosp.Selection(cap=0.5))
    assert found.mask == sosp.select(found.saliency, ratio=0.45, cap=0.5)
    widths = {layer.name: layer.channels for layer in found.mask.layers}
    assert max(len(gone) / widths[name] for name, gone in found.mask.removed.items()) == 0.5
    assert (
        max(
            len(g) / widths[n]
            for n, g in sosp.prune(model, pictures(), ratio=0.45, preset="paper").mask.removed.items()
        )
        > 0.5
    )


def test_every_layer_by_itself(model: Net) -> None:
    found = sosp.prune(model, pictures(), ratio=0.5, selection=sosp.Selection(scope="layer"))
    wanted = {"stem": 3, "a1": 4, "a2": 3, "b1": 4, "b2": 5, "skip": 5}
    assert {n: len(gone) for n, gone in found.mask.removed.items()} == wanted


def test_a_cap_bounds_every_round(model: Net) -> None:
    found = sosp.prune(
        model,
        pictures(),
        ratio=0.4,
        selection=sosp.Selection(cap=0.5, groups="independent"),
        repair=sosp.Repair(rounds=2),
    )
    widths = {layer.name: layer.channels for layer in found.mask.layers}
    assert found.mask.chosen == 19
    assert all(len(gone) <= widths[name] * 3 / 4 for name, gone in found.mask.removed.items())


# --- errors pass through


@pytest.mark.parametrize(
    "network", [None, Net, "resnet18", lambda x: x], ids=["None", "a class", "a name", "a function"]
)
def test_what_is_no_network(network: Any) -> None:
    x = pictures()[0]
    mask = sosp.Mask.from_removed(Net(), {"stem": [0]}, x)
    word = r"class Net; give an instance of it, Net\(" if network is Net else r"give a torch\.nn\.Module"
    for act in (
        lambda: sosp.prune(network, pictures()),
        lambda: sosp.count(network, x),
        lambda: sosp.masked(network, mask),
        lambda: sosp.shrink(network, mask, x),
        lambda: sosp.Mask.from_removed(network, {"stem": [0]}, x),
    ):
        with pytest.raises(ArgumentError, match=word):
            act()


def test_inference_mode(model: Net, trained: dict[str, Tensor]) -> None:
    with torch.inference_mode(), pytest.raises(ArgumentError, match=r"inference_mode\(\) is on.*outside"):
        sosp.prune(model, pictures())
    with torch.inference_mode():
        made = Net().eval()
        made.load_state_dict(trained)
    with pytest.raises(ArgumentError, match=r"'stem\.weight' was made under torch\.inference_mode.*deepcopy"):
        sosp.prune(made, pictures())
    found = sosp.prune(copy.deepcopy(made), pictures(), ratio=0.3)
    assert found.mask.chosen == round(0.3 * 32)


@pytest.mark.parametrize(
    ("options", "kind", "word"),
    [
        ({"ratio": 1.5}, ArgumentError, "ratio=1.5"),
        ({"params": 0}, ArgumentError, "params=0"),
        ({"macs": "half"}, ArgumentError, "macs='half'"),
        ({"ratio": 1.0}, ArgumentError, "keeping one of every layer"),
        ({"ratio": 1.0, "preset": "paper"}, DisconnectedError, "disconnects the network"),
        ({"selection": sosp.Selection(cap=1.5)}, ArgumentError, "cap=1.5"),
        ({"selection": sosp.Selection(cap="most"), "repair": sosp.Repair(rounds=2)}, ArgumentError, "cap='most'"),
        ({"selection": sosp.Selection(scope="layers")}, ArgumentError, "scope='layers'"),
        ({"method": "sosp"}, ArgumentError, "method='sosp'"),
        ({"loss": "hinge"}, ArgumentError, "hinge"),
        ({"selection": sosp.Selection(groups="couple")}, ArgumentError, "groups='couple'"),
        ({"exclude": ["stm"]}, StructureError, "Did you mean 'stem'?"),
        ({"exclude": ["*"]}, StructureError, "no prunable structure"),
        ({"scoring": sosp.Scoring(examples=0)}, ArgumentError, "examples=0"),
        ({"params": 0.001}, ArgumentError, "params=0.001 cannot be met"),
        ({"params": 0.01, "preset": "paper"}, DisconnectedError, "disconnects the network"),
        ({"preset": "papers"}, ArgumentError, "preset='papers'"),
        ({"params": 3}, ArgumentError, "params=3 cannot be met"),  # the biases of the output are left
    ],
)
def test_bad_arguments(model: Net, options: dict[str, Any], kind: type[Exception], word: str) -> None:
    with check_unchanged(model), pytest.raises(kind) as caught:
        sosp.prune(model, pictures(), **options)
    assert word in str(caught.value)


@pytest.mark.parametrize(
    ("data", "kind", "word"),
    [
        ([], DataError, "empty"),
        (iter([]), DataError, "empty"),
        (None, DataError, "NoneType"),
        ((pictures()[0], pictures()[1][:3]), DataError, "64 examples"),
        ((pictures()[0] * float("nan"), pictures()[1]), LossError, "nan"),
    ],
)
def test_bad_data(model: Net, data: Any, kind: type[Exception], word: str) -> None:
    with check_unchanged(model), pytest.raises(kind) as caught:
        sosp.prune(model, data, ratio=0.3)
    assert word in str(caught.value)


def test_a_model_with_nothing_to_prune() -> None:
    with pytest.raises(StructureError, match="no prunable structure"):
        sosp.prune(nn.Sequential(nn.Flatten(), nn.Linear(36, CLASSES)), pictures())


def test_a_model_of_the_table() -> None:
    c = case("attention")
    found = sosp.prune(c.model, (c.inputs, c.targets), params=0.8)
    assert parameters(found.model) <= 0.8 * parameters(c.model)


@pytest.mark.parametrize("name", ["grouped", "softplus", "layernorm"])
def test_where_too_few_channels_can_go_as_a_whole_layers_are_pruned_independently(name: str) -> None:
    c = case(name)
    with pytest.raises((StructureError, ArgumentError)):
        sosp.prune(c.model, c.inputs, macs=0.7, repair=False, selection=sosp.Selection(groups="coupled"))
    found = sosp.prune(c.model, iter(c.inputs.split(4)), macs=0.7, repair=False)
    assert found.cost_after.macs <= 0.7 * found.cost_before.macs


def test_a_ranking_by_chance_reads_no_labels(model: Net) -> None:
    assert sosp.prune(model, pictures()[0], macs=0.7, method="random").mask.chosen > 0


def test_large_inputs_are_repaired_with_fewer_of_them(model: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    x = pictures()[0].repeat(2, 1, 1, 1)  # 128 inputs
    whole = sosp.count(model, x[:2]).macs
    for macs, used in ((1000 * whole, 116), (100 * whole, 100), (10 * whole, 64)):
        monkeypatch.setattr("sosp.pipeline.cut.REPAIR_MACS", macs)
        found = sosp.prune(model, x, macs=0.6).repaired
        assert found is not None
        assert found.examples == used
