"""Bottleneck blocks against weights rotated, zeroed and rotated back by hand."""

import copy
import io
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sosp
from networks import Case, case
from oracles import kfac as oracle
from sosp.baselines.eigenbasis_costs import choose_directions, rotate_weight
from sosp.baselines.eigendamage import EigenbasisBottleneck, Eigendamaged, eigendamage, rebuild_bottlenecks
from sosp.errors import ArgumentError, CheckpointError, DataError, SospError, StructureError, SurgeryError
from sosp.scoring.kronecker_factors import KroneckerFactors

TREATED = ["mlp", "mlp-nobias", "conv-bn", "conv-nobn", "residual", "preact", "concat", "shared", "conv1d", "attention"]
SAME = {"rtol": 1e-10, "atol": 1e-10}


def damaged(c: Case, ratio: float, **options: object) -> Eigendamaged:
    settings = {"fisher": "exact", "replace": "all", **options}
    sizes = (4, 1, 3, 2)
    data = list(zip(c.inputs.split(sizes), c.targets.split(sizes), strict=True))
    return eigendamage(c.model, data, ratio=ratio, **settings)


def dense_factors(c: Case, name: str) -> tuple[Tensor, Tensor]:
    """A over channels and G, by hand."""
    calls = oracle.calls(c.model, name, c.inputs, [oracle.expected] * len(c.inputs))
    A, G = oracle.factors(calls, bias=False)
    return oracle.channels(A, c.model.get_submodule(name).weight.shape[1]), G


def as_one(block: EigenbasisBottleneck) -> Tensor:
    """The weight that the three layers are together."""
    into, out = block.into.weight.flatten(1), block.out.weight.flatten(1)
    return torch.einsum("or,rc...,ci->oi...", out, block.core.weight, into).detach()


def check_same_function(one: nn.Module, two: nn.Module, inputs: Tensor) -> None:
    for mode in (False, True):
        ours, theirs = (copy.deepcopy(m).train(mode)(inputs.clone()) for m in (one, two))
        torch.testing.assert_close(ours, theirs, **SAME)


# --- the function -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TREATED)
def test_nothing_removed_changes_nothing(name: str) -> None:
    c = case(name)
    found = damaged(c, 0.0)
    assert set(found.removed) == set(c.norms)
    assert found.kept == {}
    for layer in c.norms:
        block = found.model.get_submodule(layer)
        assert isinstance(block, EigenbasisBottleneck)
        torch.testing.assert_close(as_one(block), c.model.get_submodule(layer).weight.detach(), **SAME)
    check_same_function(found.model, c.model, c.inputs)


@pytest.mark.parametrize("name", ["conv-bn", "conv-nobn", "residual", "concat", "conv1d", "softplus"])
def test_what_goes_is_zero_in_the_rotated_weights(name: str) -> None:
    c = case(name)
    found = damaged(c, 0.4)
    zeroed = copy.deepcopy(c.model)
    for layer, gone in found.removed.items():
        weight = zeroed.get_submodule(layer).weight
        left = oracle.projected(weight, *dense_factors(c, layer), gone.rows.tolist(), gone.columns.tolist())
        weight.data.copy_(left)
    check_same_function(found.model, zeroed, c.inputs)


@pytest.mark.parametrize("name", ["conv-bn", "residual", "mlp"])
def test_the_cheapest_directions_go(name: str) -> None:
    c = case(name)
    found = damaged(c, 0.4, cap=1.0)
    costs: list[float] = []
    gone: list[bool] = []
    free: list[bool] = []  # not the last one of a side, which stays whatever it costs
    for layer in c.norms:
        _, rows, columns = oracle.rotated(c.model.get_submodule(layer).weight, *dense_factors(c, layer))
        for side, lost in ((columns, found.removed[layer].columns), (rows, found.removed[layer].rows)):
            costs += side.tolist()
            gone += [i in lost.tolist() for i in range(len(side))]
            free += [i != int(side.argmax()) for i in range(len(side))]
    assert sum(gone) == round(0.4 * len(costs))
    worst = max(c for c, g in zip(costs, gone, strict=True) if g)
    # Rounding decides among directions that cost nothing.
    assert all(g or not f or c >= worst - 1e-12 for c, g, f in zip(costs, gone, free, strict=True))


def test_saliencies_and_the_way_back() -> None:
    generator = torch.Generator().manual_seed(0)
    W, a, g = (torch.randn(*s, dtype=torch.float64, generator=generator) for s in ((4, 3, 2, 2), (9, 3), (9, 4)))
    A, G = a.T @ a, g.T @ g
    part = rotate_weight(W, KroneckerFactors(A, G))
    core, rows, columns = oracle.rotated(W, A, G)
    torch.testing.assert_close(part.core.abs(), core.abs(), **SAME)  # eigenvectors have either sign
    torch.testing.assert_close(part.rows, rows, **SAME)
    torch.testing.assert_close(part.columns, columns, **SAME)
    torch.testing.assert_close(part.weight(), W, **SAME)
    # All of it is the quadratic form of the whole weight: every tap has the same A.
    whole = sum(0.5 * torch.trace(G @ W[..., i, j] @ A @ W[..., i, j].T) for i in range(2) for j in range(2))
    torch.testing.assert_close(part.rows.sum(), whole, **SAME)
    torch.testing.assert_close(part.columns.sum(), whole, **SAME)


def test_what_is_removed_is_what_the_kronecker_fisher_predicts() -> None:
    """Zeroing rows in the eigenbasis costs the sum of their saliencies: there are no cross terms there."""
    generator = torch.Generator().manual_seed(1)
    W, a, g = (torch.randn(*s, dtype=torch.float64, generator=generator) for s in ((5, 4), (9, 4), (9, 5)))
    A, G = a.T @ a, g.T @ g
    part = rotate_weight(W, KroneckerFactors(A, G))
    gone = choose_directions({"layer": part}, ratio=0.4, cap=1.0)["layer"]
    lost = W - oracle.projected(W, A, G, gone.rows.tolist(), [])
    form = 0.5 * lost.flatten() @ torch.kron(G, A) @ lost.flatten()
    torch.testing.assert_close(form, part.rows[gone.rows].sum(), **SAME)


@pytest.mark.parametrize("options", [{"stride": 2}, {"padding": 2, "padding_mode": "reflect"}, {"padding": "same"},
                                     {"dilation": 2, "padding_mode": "circular", "padding": 1}])  # fmt: skip
@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_any_convolution(kind: type[nn.Module], options: dict[str, object]) -> None:
    first = kind(3, 4, 3, **options)
    model = nn.Sequential(first, nn.ReLU(), nn.Flatten(), nn.LazyLinear(2)).double()
    x = torch.randn(6, 3, *[7] * len(first.kernel_size), dtype=torch.float64)
    model(x)
    found = eigendamage(model, (x, torch.arange(6) % 2), ratio=0.0, replace="all")
    assert type(found.model[0].core) is kind
    check_same_function(found.model, model, x)


# --- how many, and where ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 0.65])
def test_as_many_as_asked_for(ratio: float) -> None:
    c = case("residual")
    found = damaged(c, ratio, cap=1.0)
    shapes = [c.model.get_submodule(layer).weight.shape for layer in c.norms]
    lost = sum(len(r.rows) + len(r.columns) for r in found.removed.values())
    assert lost == round(ratio * sum(s[0] + s[1] for s in shapes))
    for layer, gone in found.removed.items():
        core, whole = found.model.get_submodule(layer).core.weight, c.model.get_submodule(layer).weight
        assert (len(gone.rows), len(gone.columns)) == tuple(whole.shape[i] - core.shape[i] for i in (0, 1))
        assert min(core.shape[:2]) >= 1


def test_no_layer_loses_more_than_its_cap() -> None:
    c = case("mlp")
    found = damaged(c, 0.4, cap=0.5)
    for layer, gone in found.removed.items():
        rows, columns = c.model.get_submodule(layer).weight.shape
        assert len(gone.rows) <= rows // 2
        assert len(gone.columns) <= columns // 2


def test_only_smaller_blocks_by_default() -> None:
    c = case("mlp")
    found = damaged(c, 0.5, replace="smaller")
    assert set(found.removed) | set(found.kept) == set(c.norms)
    for layer in c.norms:
        before, after = c.model.get_submodule(layer), found.model.get_submodule(layer)
        if layer in found.removed:
            assert sum(p.numel() for p in after.parameters()) < sum(p.numel() for p in before.parameters())
        else:
            assert torch.equal(after.weight, before.weight)
    untouched = damaged(c, 0.0, replace="smaller")
    assert untouched.removed == {}
    assert {*untouched.kept.values()} == {"its bottleneck would not be smaller"}


def test_layers_that_cannot_be_blocks_are_kept_and_listed() -> None:
    c = case("depthwise")
    found = damaged(c, 0.0)
    assert list(found.kept) == ["depthwise"]
    assert "6 groups" in found.kept["depthwise"]
    assert set(found.removed) == {"expand", "project"}
    check_same_function(found.model, c.model, c.inputs)


def test_excluded_layers_and_the_output_stay() -> None:
    c = case("residual")
    found = damaged(c, 0.3, exclude=["block1"])
    assert set(found.removed) == {n for n in c.norms if not n.startswith("block1")}
    assert isinstance(found.model.head, nn.Linear)


class Tied(nn.Module):
    """Two layers with one weight, and one that is called by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.one, self.head = nn.Embedding(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.two = nn.Linear(4, 4)
        self.again = self.two
        self.one.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.again(self.two(self.one(x).relu()).relu()).relu())


def test_tied_weights_stay_and_a_layer_of_two_names_is_one_block() -> None:
    x = torch.randn(8, 4)
    found = eigendamage(Tied(), (x, torch.arange(8) % 2), ratio=0.0, replace="all")
    assert found.kept == {"one": "shares its weight with another layer"}
    assert isinstance(found.model.two, EigenbasisBottleneck)
    assert found.model.two is found.model.again


# --- a plain module ---------------------------------------------------------------------------------------------------


def test_it_counts_as_what_it_is() -> None:
    c = case("conv-bn")
    found = damaged(c, 0.4)
    assert found.cost_before == sosp.count(c.model, c.inputs)
    assert found.cost_after == sosp.count(found.model, c.inputs)
    assert found.cost_after.params == sum(p.numel() for p in found.model.parameters())
    into, core, out = (getattr(found.model.conv2, k).weight for k in ("into", "core", "out"))
    macs = {layer.name: layer.macs for layer in found.cost_after.layers}
    assert macs["conv2.core"] == core.numel() * 16  # positions
    assert (macs["conv2.into"], macs["conv2.out"]) == (into.numel() * 16, out.numel() * 16)
    assert "2 bottlenecks" in repr(found)


def test_state_dicts_round_trip() -> None:
    c = case("residual")
    found = damaged(c, 0.3)
    file = io.BytesIO()
    torch.save(found.model.state_dict(), file)
    file.seek(0)
    other = damaged(c, 0.3).model
    for p in other.parameters():
        p.data.zero_()
    other.load_state_dict(torch.load(file, weights_only=True))
    check_same_function(other, found.model, c.inputs)


@pytest.mark.parametrize("name", ["residual", "mlp", "conv1d"])
def test_saved_and_rebuilt_from_the_original(name: str, tmp_path: Path) -> None:
    c = case(name)
    found = damaged(c, 0.3)
    sosp.save(tmp_path / "small.safetensors", found.model)
    fresh = case(name).model
    for p in fresh.parameters():
        p.data.normal_()
    before = {k: v.clone() for k, v in fresh.state_dict().items()}
    again = rebuild_bottlenecks(tmp_path / "small.safetensors", fresh)
    assert list(again.state_dict()) == list(found.model.state_dict())
    assert all(torch.equal(v, found.model.state_dict()[k]) for k, v in again.state_dict().items())
    assert all(torch.equal(v, before[k]) for k, v in fresh.state_dict().items())
    check_same_function(again, found.model, c.inputs)


def test_a_shrunk_network_becomes_blocks_and_comes_back(tmp_path: Path) -> None:
    c = case("residual")
    mask = sosp.select(sosp.score(c.model, (c.inputs, c.targets), method="first-order"), ratio=0.3)
    small = sosp.shrink(c.model, mask, c.inputs)
    found = eigendamage(small, (c.inputs, c.targets), ratio=0.0, replace="all")
    check_same_function(found.model, small, c.inputs)
    sosp.save(tmp_path / "small.safetensors", found.model)
    check_same_function(rebuild_bottlenecks(tmp_path / "small.safetensors", small), small, c.inputs)


def test_a_part_called_core_is_no_bottleneck(tmp_path: Path) -> None:
    def build() -> nn.Module:
        inner = nn.ModuleDict({"core": nn.Linear(4, 4)})
        return nn.Sequential(OrderedDict(part=Core(inner), head=nn.Linear(4, 2))).double()

    x = torch.randn(6, 4, dtype=torch.float64)
    found = eigendamage(build(), (x, torch.arange(6) % 2), ratio=0.0, replace="all")
    assert isinstance(found.model.part.inner["core"], EigenbasisBottleneck)
    sosp.save(tmp_path / "small.safetensors", found.model)
    check_same_function(rebuild_bottlenecks(tmp_path / "small.safetensors", build()), found.model, x)
    whole = build()
    sosp.save(tmp_path / "whole.safetensors", whole)
    check_same_function(rebuild_bottlenecks(tmp_path / "whole.safetensors", build()), whole, x)


class Core(nn.Module):
    """A layer that goes by the name of a bottleneck's."""

    def __init__(self, inner: nn.ModuleDict) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner["core"](x).relu()


@pytest.mark.parametrize("wrong", ["mlp", "conv-nobn"])
def test_a_file_of_another_network_is_refused(wrong: str, tmp_path: Path) -> None:
    sosp.save(tmp_path / "small.safetensors", damaged(case("conv-bn"), 0.3).model)
    with pytest.raises(CheckpointError, match=r"small\.safetensors"):
        rebuild_bottlenecks(tmp_path / "small.safetensors", case(wrong).model)


def test_it_exports() -> None:
    c = case("conv-bn")
    small = damaged(c, 0.4).model.float().eval()
    x = c.inputs.float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(small, (x,))
    torch.testing.assert_close(program.module()(x), small(x), rtol=1e-4, atol=1e-5)


def test_it_runs_in_onnx(tmp_path: Path) -> None:
    ort = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    c = case("conv-bn")
    small = damaged(c, 0.4).model.float().eval()
    x = c.inputs.float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(small, (x,), tmp_path / "small.onnx", dynamo=True, verbose=False)
    session = ort.InferenceSession(tmp_path / "small.onnx")
    (ours,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(ours), small(x).detach(), rtol=1e-3, atol=1e-4)


def test_it_trains() -> None:
    c = case("conv-bn")
    small = damaged(c, 0.3).model.train()
    assert all(p.requires_grad for p in small.parameters())
    losses: list[float] = []
    optimizer = torch.optim.SGD(small.parameters(), lr=0.05)
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.cross_entropy(small(c.inputs), c.targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert all(p.grad is not None for p in small.parameters())


def test_it_runs_where_torch_would_run_past_modules() -> None:
    """Encoder layers in eval mode, without gradients, take their layers' weights to one fused kernel."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = nn.Sequential(nn.Linear(8, 16), encoder, nn.Flatten(), nn.Linear(96, 5)).double().eval()
    x = torch.randn(40, 6, 8, dtype=torch.float64)
    small = eigendamage(model, (x, torch.arange(40) % 5), ratio=0.8).model.eval()
    assert any(isinstance(m, EigenbasisBottleneck) for m in small[1].modules())
    wanted = small(x).detach()
    with torch.no_grad():
        torch.testing.assert_close(small(x), wanted, **SAME)


def test_it_is_pruned_further() -> None:
    c = case("conv-bn")
    small = damaged(c, 0.2).model
    pruned = sosp.prune(small, (c.inputs, c.targets), ratio=0.2, repair=False)
    assert pruned.cost_after.params < pruned.cost_before.params


def test_precision_mode_wishes_and_hooks_stay() -> None:
    c = case("conv-bn")
    model = c.model.float().train()
    model.conv1.requires_grad_(False)
    seen: list[tuple[int, ...]] = []
    model.conv2.register_forward_hook(lambda m, args, output: seen.append(tuple(output.shape)))
    found = eigendamage(model, (c.inputs.float(), c.targets), ratio=0.3, replace="all")
    assert {p.dtype for p in found.model.parameters()} == {torch.float32}
    assert all(m.training for m in found.model.modules())
    assert not any(p.requires_grad for p in found.model.conv1.parameters())
    assert all(p.requires_grad for p in found.model.conv2.parameters())
    seen.clear()
    found.model(c.inputs.float())
    assert seen == [(10, 5, 4, 4)]


def test_the_given_model_and_the_random_numbers_are_left_alone() -> None:
    c = case("residual")
    c.model.train()
    before = {k: v.clone() for k, v in c.model.state_dict().items()}
    numbers = torch.get_rng_state()
    found = damaged(c, 0.5)
    assert c.model.training
    assert all(torch.equal(v, before[k]) for k, v in c.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), numbers)
    assert not {p.data_ptr() for p in c.model.parameters()} & {p.data_ptr() for p in found.model.parameters()}


def test_sampled_labels_follow_the_generator() -> None:
    c = case("mlp")

    def core(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return damaged(c, 0.0, fisher="sampled", generator=generator).model.fc1.core.weight

    one = core(0)
    assert torch.equal(one, core(0))
    assert not torch.equal(one, core(1))


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"ratio": -0.1}, ArgumentError, r"ratio=-0\.1 must be a number from 0 to 1"),
        ({"ratio": 1.5}, ArgumentError, r"ratio=1\.5"),
        ({"ratio": True}, ArgumentError, "ratio=True"),
        ({"ratio": "half"}, ArgumentError, "ratio='half'"),
        ({"ratio": float("nan")}, ArgumentError, "ratio=nan"),
        ({"ratio": 1.0}, ArgumentError, r"ratio=1\.0 asks for 25 of 25 directions, but only 21 can be removed"),
        ({"ratio": 0.9, "cap": 0.5}, ArgumentError, r"cap=0\.5"),
        ({"ratio": 0.5, "cap": 2}, ArgumentError, "cap=2"),
        ({"ratio": 0.5, "replace": "none"}, ArgumentError, "smaller, all"),
        ({"ratio": 0.5, "fisher": "true"}, ArgumentError, "sampled, exact, empirical"),
        ({"ratio": 0.5, "loss": "huber"}, ArgumentError, "cross_entropy"),
        ({"ratio": 0.5, "exclude": ["nothing"]}, StructureError, "'nothing'"),
        ({"ratio": 0.5, "examples": 0}, SospError, "examples=0"),
    ],
)
def test_bad_arguments(options: dict[str, object], error: type[Exception], words: str) -> None:
    c = case("mlp")
    with pytest.raises(error, match=words):
        eigendamage(c.model, (c.inputs, c.targets), **options)


def test_empty_data() -> None:
    with pytest.raises(DataError, match="empty"):
        eigendamage(case("mlp").model, [], ratio=0.5)


def grouped() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(4 * 4, 2))


class Reader(nn.Module):
    """Its code reads a layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.one(x) * self.one.weight.norm())


@pytest.mark.parametrize(
    ("build", "x", "error", "words"),
    [
        (grouped, torch.randn(4, 4, 4, 4), StructureError, "'0' has 2 groups"),
        (Reader, torch.randn(4, 4), SurgeryError, "'weight'.*exclude="),
    ],
)
def test_networks_that_are_refused(
    build: Callable[[], nn.Module], x: Tensor, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        eigendamage(build(), (x, torch.arange(4) % 2), ratio=0.3, replace="all")
