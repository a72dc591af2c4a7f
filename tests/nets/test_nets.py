"""The paper's networks: their sizes, widths, first weights, checkpoints that fit, and what can be done with them."""

import hashlib
import inspect
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import sosp
from sosp import nets
from sosp.errors import ArgumentError
from sosp.nets.densenet import DenseLayer, TransitionLayer
from sosp.nets.imagenet import ImageNetResNet
from sosp.nets.mobilenet import InvertedResidual, build_conv_unit
from sosp.nets.residual import BasicBlock, Bottleneck, PadSkip, PlainBlock, build_projection

WEIGHTS = Path(os.environ.get("SOSP_TEST_WEIGHTS", os.devnull))
DATA = Path(os.environ.get("SOSP_TEST_DATA", os.devnull))  # the unpacked folder is in it, or `unpack`

IMAGENET = ("resnet18", "resnet50", "mobilenet_v2")
SKIPPING = ("resnet20", "resnet32", "resnet44", "resnet56", "resnet110", "resnet32x4", "digits_resnet")
EVERY = pytest.mark.parametrize("name", nets.NETS)

Shapes = dict[str, tuple[int, ...]]


def images(name: str, count: int = 2, edge: int | None = None) -> Tensor:
    """Random ones, as small as the network takes."""
    least = 8 if name == "digits_resnet" else 64 if name in IMAGENET else 16
    shape = (count, 1 if name == "digits_resnet" else 3, edge or least, edge or least)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def shapes(model: nn.Module) -> Shapes:
    return {n: tuple(t.shape) for n, t in model.state_dict().items()}


def empty(make: Callable[..., nn.Module], **options: Any) -> nn.Module:
    """Its shapes without its numbers."""
    with torch.device("meta"):
        return make(**options)


def shapes_of(make: Callable[..., nn.Module], **options: Any) -> Shapes:
    return shapes(empty(make, **options))


def seeded(make: Callable[..., nn.Module], seed: int = 0, **options: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make(**options)


@torch.no_grad()
def logits(model: nn.Module, x: Tensor) -> Tensor:
    return model.eval()(x)


def check_refused(words: list[str], make: Callable[[], Any]) -> None:
    with pytest.raises(ArgumentError) as caught:
        make()
    assert [w for w in words if w not in str(caught.value)] == [], str(caught.value)


# --- sizes

# A CIFAR ResNet of n blocks per stage, skip A, has parameters
#   stem 3·16·9 + 32, stages 9·16²·2n + 64n, 9·(16·32 + 32²(2n-1)) + 128n, 9·(32·64 + 64²(2n-1)) + 256n, linear 650
# = 97,216 n - 21,926 and MACs, over 32², 16² and 8² positions, 14,155,776 n - 1,916,288.
# Skip B adds 1x1 convolutions and their norms: 16·32 + 64 + 32·64 + 128 = 2,752; MACs 512·256 + 2048·64 = 262,144.
# Four times as wide, all but the first and the last layer has 16 times the weights, 4 times the norms.
# VGG-19: convolutions 20,018,880, norms 2·5504, linear 512·10 + 10.
# DenseNet-40 from 24 channels on: convolutions 648 + 108·(1080 + 2808 + 4536) + 168² + 312², norms 2·9360, linear 4570.
SIZES = {  # parameters, MACs
    "vgg19": (20_035_018, 398_136_320),
    "resnet20": (269_722, 40_551_040),
    "resnet32": (464_154, 68_862_592),
    "resnet44": (658_586, 97_174_144),
    "resnet56": (853_018, 125_485_696),
    "resnet110": (1_727_962, 252_887_680),
    "resnet32x4": (7_427_914, 1_100_679_680),
    "plainnet20": (269_722, 40_551_040),
    "densenet40": (1_059_298, 282_917_328),
    "resnet18": (11_689_512, 1_814_073_344),
    "resnet50": (25_557_032, 4_089_184_256),
    "mobilenet_v2": (3_504_872, 300_774_272),
    "digits_resnet": (77_754, 763_520),
}
OTHER_SKIP = {
    "resnet20": ("B", 272_474, 40_813_184),
    "resnet56": ("B", 855_770, 125_747_840),
    "resnet32x4": ("A", 7_386_186, 1_096_485_376),
    "digits_resnet": ("A", 75_002, 747_136),
}


def pixels(name: str) -> int:
    return 224 if name in IMAGENET else 8 if name == "digits_resnet" else 32


def size(name: str, **options: Any) -> tuple[int, int]:
    """Parameters and MACs by torch's own count, two operations per multiply-accumulate."""
    model = empty(nets.NETS[name], **options).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(images(name, 1, pixels(name)).to("meta"))
    return sum(p.numel() for p in model.parameters()), counter.get_total_flops() // 2


@EVERY
def test_parameters_and_macs(name: str) -> None:
    assert size(name) == SIZES[name]


@pytest.mark.parametrize("name", OTHER_SKIP)
def test_parameters_and_macs_with_the_other_skip(name: str) -> None:
    skip, *wanted = OTHER_SKIP[name]
    assert size(name, skip=skip) == tuple(wanted)


@pytest.mark.parametrize("name", ["resnet56", *(pytest.param(n, marks=pytest.mark.slow) for n in nets.NETS)])
def test_the_library_counts_the_same(name: str) -> None:
    found = sosp.count(empty(nets.NETS[name]), images(name, 1, pixels(name)).to("meta"))
    assert (found.params, found.macs) == SIZES[name]


@pytest.mark.parametrize(("n", "name"), [(3, "resnet20"), (5, "resnet32"), (7, "resnet44"), (9, "resnet56")])
def test_the_formula_for_the_sizes(n: int, name: str) -> None:
    assert SIZES[name] == (97_216 * n - 21_926, 14_155_776 * n - 1_916_288)


def test_densenet_without_its_batch_norms_has_the_published_number_of_parameters() -> None:
    model = empty(nets.densenet40)
    assert sum(p.numel() for p in model.parameters()) - 18_720 == 1_040_578
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert sum(2 * m.num_features for m in norms) == 18_720


@EVERY
def test_as_many_classes_as_asked_for(name: str) -> None:
    few = seeded(partial(nets.make, name), classes=7, width=0.25)
    assert logits(few, images(name)).shape == (2, 7)
    by_default = shapes_of(partial(nets.make, name), width=0.25)
    assert list(by_default.values())[-1] == (1000 if name in IMAGENET else 10,)


def test_the_table_holds_every_network_under_its_own_name() -> None:
    assert {name: make.__name__ for name, make in nets.NETS.items()} == {name: name for name in nets.NETS}
    assert set(nets.NETS) | {"NETS", "make", "Width"} == set(nets.__all__)
    for name, make in nets.NETS.items():
        arguments = inspect.signature(make).parameters
        assert all(a.kind is a.KEYWORD_ONLY for a in arguments.values())
        assert list(arguments) == ["classes", "width", *(["skip"] if name in SKIPPING else [])]


# --- names, and checkpoints that fit


def test_the_names_of_a_cifar_resnet() -> None:
    found = [n for n, t in nets.resnet20(skip="B").named_parameters() if t.dim() > 1]
    stages = [f"layer{k}.{n}.conv{i}.weight" for k in (1, 2, 3) for n in range(3) for i in (1, 2)]
    skips = [f"layer{k}.0.downsample.0.weight" for k in (2, 3)]
    assert sorted(found) == sorted(["conv1.weight", *stages, *skips, "linear.weight"])
    assert sorted(shapes_of(nets.resnet20)) == sorted(
        n for n in shapes_of(nets.resnet20, skip="B") if "downsample" not in n
    )


def test_plainnet_has_the_names_of_the_resnet_and_no_skip() -> None:
    assert shapes_of(nets.plainnet20) == shapes_of(nets.resnet20)
    plain, x = seeded(nets.plainnet20), images("plainnet20")
    with torch.no_grad():
        for bn in (plain.layer1[1].bn2, plain.layer2[0].bn2):  # with either branch dead, nothing comes through
            bn.weight.zero_()
            assert torch.equal(logits(plain, x), logits(plain, 0 * x))
            bn.weight.fill_(1.0)
    assert not torch.equal(logits(plain, x), logits(plain, 0 * x))


def cifar_weights(name: str) -> dict[str, Tensor]:
    file = WEIGHTS / f"{name}-cifar10.safetensors"
    if not file.exists():
        pytest.skip(f"no {file.name} in {WEIGHTS}: name its folder in SOSP_TEST_WEIGHTS")
    return load_file(file)


@pytest.mark.parametrize("name", ["resnet20", "resnet56"])
def test_trained_weights_fit(name: str) -> None:
    model = nets.make(name)
    state = cifar_weights(name)
    model.load_state_dict(state, strict=True)
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items() if n in state)


def cifar_test_images(folder: Path) -> tuple[Tensor, Tensor]:
    """The 10,000 test images, normalised, and their labels."""
    file = folder / "cifar-10-batches-py" / "test_batch"
    with warnings.catch_warnings(), file.open("rb") as stream:
        warnings.simplefilter("ignore")  # numpy reads arrays that were pickled before some of its types were renamed
        batch = pickle.load(stream, encoding="latin1")
    x = torch.from_numpy(np.asarray(batch["data"])).view(-1, 3, 32, 32) / 255
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return (x - mean.view(3, 1, 1)) / std.view(3, 1, 1), torch.tensor(batch["labels"])


@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tensor, Tensor]:
    if (DATA / "cifar-10-batches-py").is_dir():
        return cifar_test_images(DATA)
    if not (DATA / "unpack").exists():
        pytest.skip(f"no CIFAR-10 in {DATA}: name the folder of cifar-10-batches-py in SOSP_TEST_DATA")
    pytest.importorskip("PIL", reason="unpacking CIFAR-10 needs pillow")
    folder = tmp_path_factory.mktemp("cifar10")
    subprocess.run([sys.executable, DATA / "unpack", "cifar10", folder], check=True, stdout=subprocess.DEVNULL)
    return cifar_test_images(folder)


def right(name: str, x: Tensor, y: Tensor) -> int:
    model = nets.make(name)
    model.load_state_dict(cifar_weights(name), strict=True)
    return sum(int((logits(model, a).argmax(1) == b).sum()) for a, b in zip(x.split(250), y.split(250), strict=True))


def test_trained_weights_classify(cifar: tuple[Tensor, Tensor]) -> None:
    """The two largest logits of any of these images differ by 0.0097 (ResNet-20) at least: rounding moves none."""
    x, y = (t[:500] for t in cifar)
    assert {name: right(name, x, y) for name in ("resnet20", "resnet56")} == {"resnet20": 455, "resnet56": 470}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "expected"), [("resnet20", 9173), ("resnet56", 9339)])
def test_trained_weights_classify_the_whole_test_set(cifar: tuple[Tensor, Tensor], name: str, expected: int) -> None:
    """One image where ResNet-56's two largest logits differ by 0.0005 may turn with the order of sums."""
    assert abs(right(name, *cifar) - expected) <= 1


# Of torchvision 0.28's networks, one line "name shape" per tensor, in order.
TORCHVISION = {
    "resnet18": "84fb10d9c6905a1cbb020b284537dc97c4f4ec55fb2a780a41152a23a2dd0e9d",
    "resnet50": "d7e4f8bb0a5363446a59c81c3887ccf66900a11651a0ae2dec96d1bb1eb6ea81",
    "mobilenet_v2": "37bbbce8932fd0c49fe8e941719a7aa7b25b60c17b428749b72562f754135844",
}


@pytest.mark.parametrize("name", IMAGENET)
def test_state_dicts_are_torchvisions(name: str) -> None:
    lines = "\n".join(f"{n} {shape}" for n, shape in shapes_of(nets.NETS[name]).items())
    assert hashlib.sha256(lines.encode()).hexdigest() == TORCHVISION[name]


@pytest.mark.parametrize("name", IMAGENET)
def test_weights_and_outputs_are_torchvisions(name: str) -> None:
    models = pytest.importorskip("torchvision").models
    ours, theirs = seeded(nets.NETS[name]), seeded(getattr(models, name))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(torch.equal(t, theirs.state_dict()[n]) for n, t in ours.state_dict().items())
    other = seeded(getattr(models, name), seed=1)
    ours.load_state_dict(other.state_dict(), strict=True)
    x = images(name)
    assert torch.equal(logits(ours, x), logits(other, x))


# --- first weights

FAN = {  # inputs or outputs of a convolution decide how large its weights start
    **dict.fromkeys(nets.NETS, 1),
    **dict.fromkeys([*IMAGENET, "densenet40"], 0),
}


@EVERY
def test_first_weights_are_drawn_as_in_the_original(name: str) -> None:
    model = seeded(nets.NETS[name])
    convs = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    large = [m.weight.detach() for m in convs if m.weight.numel() > 2000]
    assert len(large) > len(convs) / 3
    for weight in large:
        wanted = (2 / (weight.shape[FAN[name]] * weight[0, 0].numel())) ** 0.5
        # The standard deviation of n normal numbers is known to 1 / sqrt(2 n) of itself: 5 of those.
        assert weight.std().item() == pytest.approx(wanted, rel=5 / (2 * weight.numel()) ** 0.5)
    assert all(m.bias is None for m in convs)
    check_norms(name, model)
    check_linear(name, model)


def check_norms(name: str, model: nn.Module) -> None:
    scale = 0.5 if name == "densenet40" else 1.0
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert all((m.weight == scale).all() and (m.bias == 0).all() for m in norms)


def check_linear(name: str, model: nn.Module) -> None:
    (linear,) = (m for m in model.modules() if isinstance(m, nn.Linear))
    as_torch_does = (1 / (3 * linear.in_features)) ** 0.5  # uniform within 1 / sqrt(inputs)
    spread = {"mobilenet_v2": 0.01, **dict.fromkeys(["resnet18", "resnet50", "densenet40"], as_torch_does)}
    wanted = spread.get(name, (2 / linear.in_features) ** 0.5)
    assert linear.weight.std().item() == pytest.approx(wanted, rel=5 / (2 * linear.weight.numel()) ** 0.5)
    assert bool((linear.bias == 0).all()) == (name in ("vgg19", "mobilenet_v2"))


def test_weights_come_from_torchs_generator() -> None:
    first, again, other = (seeded(nets.digits_resnet, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert not torch.equal(first["layer2.0.conv1.weight"], other["layer2.0.conv1.weight"])


# --- widths

# One mapping asks something of all layers, of a stage or block, and of single ones.
WIDER = {
    "vgg19": {"*": 1.1, "features.0": 1.3, "features.40": 2},
    "resnet20": {"*": 1.1, "layer2": 2, "layer3.1.conv1": 1.7},
    "resnet32": {"layer1": 2, "layer3.0.downsample.0": 1.3},
    "resnet44": {"layer?.0": 1.5, "conv1": 2},
    "resnet56": {"layer1": 2.0},
    "resnet110": {"*": 1.1, "layer3.17": 1.3},
    "resnet32x4": {"layer2": 1.01, "layer2.3.conv2": 1.1},
    "plainnet20": {"*": 1.1, "layer2": 2, "layer3.1.conv2": 1.7},
    "densenet40": {"*": 1.1, "dense2": 1.5, "dense1.3.conv1": 2, "trans1": 1.3},
    "resnet18": {"*": 1.1, "layer1": 2, "layer3.0.conv1": 1.5, "layer2.0.downsample": 1.2},
    "resnet50": {"*": 1.1, "layer1": 2, "conv1": 1.3, "layer3.0.conv2": 1.5},
    "mobilenet_v2": {"*": 1.1, "features.3": 2, "features.0": 1.3, "features.18": 1.4, "features.8.conv.1.0": 1.5},
    "digits_resnet": {"layer2": 2, "conv1": 1.3},
}
SHALLOWER = partial(ImageNetResNet, Bottleneck, (2, 1, 1, 1), classes=10)  # stands for ResNet-50
DEEPER = ("resnet32", "resnet44", "resnet56", "resnet110", "resnet50")  # a few numbers apart from others here
ALONE: list[dict[str, float]] = [{"*": 1.5}, {"layer1": 2}, {"conv1": 1.7}, {"layer3.0.downsample": 1.2}]


@pytest.mark.parametrize(
    ("name", "factors"),
    [
        *(
            pytest.param(name, m, id=name, marks=[pytest.mark.slow] if name in DEEPER else [])
            for name, m in WIDER.items()
        ),
        *(("digits_resnet", m) for m in ALONE),
    ],
)
def test_built_as_wide_as_widened(name: str, factors: dict[str, float]) -> None:
    """Skips of zeros have no channels that could grow: `widen` leaves the layers beside them as they are."""
    check_as_wide(partial(nets.NETS[name], **({"skip": "B"} if name in SKIPPING else {})), factors, images(name))


def check_as_wide(make: Callable[..., nn.Module], factors: dict[str, float], x: Tensor) -> None:
    widened = sosp.widen(empty(make, width=1.0).eval(), factors, x.to("meta"))
    assert shapes_of(make, width=factors) == shapes(widened)


def test_bottlenecks_built_as_wide_as_widened() -> None:
    check_as_wide(SHALLOWER, WIDER["resnet50"], images("resnet50"))


@pytest.mark.parametrize("factors", [{"layer2.1.conv1": 1.7}, {"layer?.*.conv1": 2, "layer3.0.conv1": 2.5}])
def test_built_as_wide_as_widened_beside_skips_of_zeros(factors: dict[str, float]) -> None:
    check_as_wide(nets.resnet20, factors, images("resnet20"))


@pytest.mark.parametrize("width", [2.0, 0.3, {"layer1": 2}, {"layer2": 2.5}, {"layer3": 0.5, "layer2.0.conv1": 3}])
def test_either_skip_gives_the_same_widths(width: nets.Width) -> None:
    with_layers = shapes_of(nets.resnet20, width=width, skip="B")
    assert shapes_of(nets.resnet20, width=width) == {n: s for n, s in with_layers.items() if "downsample" not in n}


def widths(model: nn.Module) -> dict[str, int]:
    return {n: m.out_channels for n, m in model.named_modules() if isinstance(m, nn.Conv2d)}


@EVERY
def test_one_factor_multiplies_every_width(name: str) -> None:
    factor = 0.3
    once, times, named = (empty(nets.NETS[name], width=w) for w in (1.0, factor, {"*": factor}))
    assert widths(times) == {n: max(1, round(w * factor)) for n, w in widths(once).items()}
    assert shapes(named) == shapes(times)
    (before, after) = (next(m for m in net.modules() if isinstance(m, nn.Conv2d)) for net in (once, times))
    assert before.in_channels == after.in_channels


@EVERY
def test_a_channel_is_enough(name: str) -> None:
    model = seeded(partial(nets.make, name), width=0.0002)
    assert set(widths(model).values()) == {1}
    assert logits(model, images(name)).isfinite().all()
    model.train()(images(name, 4)).square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []


def test_widths_by_name() -> None:
    model = nets.resnet20(width={"layer1": 0.5, "layer2.1": 2, "layer2.2.conv2": 1.5, "layer3.0.conv1": 0.25})
    found = widths(model)
    assert {found[n] for n in ("conv1", "layer1.0.conv1", "layer1.2.conv2")} == {8}  # one stream, and inside
    assert {found[f"layer2.{n}.conv2"] for n in range(3)} == {64}  # the largest asked of any
    assert [found[f"layer2.{n}.conv1"] for n in range(3)] == [32, 64, 32]
    assert [found[f"layer3.{n}.conv1"] for n in range(3)] == [16, 64, 64]
    assert logits(model, images("resnet20")).shape == (2, 10)


def test_names_that_overlap_ask_for_the_largest() -> None:
    found = widths(nets.resnet20(width={"*": 0.5, "layer2": 2, "layer2.0": 3, "layer2.0.conv1": 1}))
    assert [found[n] for n in ("conv1", "layer2.0.conv1", "layer2.1.conv1", "layer2.1.conv2")] == [8, 96, 64, 96]


def test_a_dense_layer_grows_by_itself() -> None:
    """Twice 12 channels from one layer: what follows reads 12 more, until a transition."""
    plain, wide = (shapes_of(nets.densenet40, width=w) for w in (1.0, {"dense1.3": 2}))
    more = {
        n: (wide[n][0] - plain[n][0], (wide[n][1:2] or [0])[0] - (plain[n][1:2] or [0])[0])
        for n in plain
        if "conv" in n
    }
    assert more["dense1.3.conv1.weight"] == (12, 0)
    assert {more[f"dense1.{n}.conv1.weight"] for n in range(4, 12)} == {(0, 12)}
    assert more["trans1.conv1.weight"] == (0, 12)
    assert {more[f"dense{k}.{n}.conv1.weight"] for k in (2, 3) for n in range(12)} == {(0, 0)}


@pytest.mark.parametrize("width", [{}, 1, 1.0, {"layer1": 1}])
def test_widths_that_change_nothing(width: nets.Width) -> None:
    assert shapes_of(nets.resnet20, width=width) == shapes_of(nets.resnet20)


# --- the skip that pads

SOURCES = {  # channels in, channels out: which of the input's each of them is
    (2, 4): [None, 0, 1, None],
    (4, 8): [None, None, 0, 1, 2, 3, None, None],
    (2, 5): [None, 0, 1, None, None],
    (3, 6): [None, 0, 1, 2, None, None],
    (3, 4): [0, 1, 2, None],
    (3, 3): [0, 1, 2],
    (4, 2): [1, 2],
    (5, 2): [1, 2],
    (4, 3): [0, 1, 2],
    (6, 3): [1, 2, 3],
    (1, 2): [0, None],
}


@pytest.mark.parametrize(("into", "out"), SOURCES)
def test_a_padded_skip(into: int, out: int) -> None:
    x = torch.randn(2, into, 5, 4)
    wanted = torch.zeros(2, out, 3, 2)
    for channel, source in enumerate(SOURCES[into, out]):
        if source is not None:
            wanted[:, channel] = x[:, source, ::2, ::2]
    assert torch.equal(PadSkip(into, out, 2)(x), wanted)


@pytest.mark.parametrize(("narrow", "wide"), [(2, 4), (2, 5), (3, 6), (3, 4), (1, 8), (4, 4)])
def test_narrowing_undoes_widening(narrow: int, wide: int) -> None:
    x = torch.randn(2, narrow, 4, 4)
    assert torch.equal(PadSkip(wide, narrow, 1)(PadSkip(narrow, wide, 1)(x)), x)


@pytest.mark.parametrize("planes", [16, 32, 64, 128])
def test_a_skip_to_twice_the_width_is_the_originals(planes: int) -> None:
    x = torch.randn(2, planes // 2, 4, 4)
    original = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, planes // 4, planes // 4))
    assert torch.equal(PadSkip(planes // 2, planes, 2)(x), original)


# --- what is refused


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("resnet57", ["name='resnet57'", "Did you mean 'resnet56'?", "densenet40"]),
        ("mobilenetv2", ["Did you mean 'mobilenet_v2'?"]),
        ("alexnet", ["name='alexnet'", "Choose one of: vgg19,"]),
        (None, ["name=None"]),
    ],
)
def test_an_unknown_network(name: Any, words: list[str]) -> None:
    check_refused(words, lambda: nets.make(name))


@pytest.mark.parametrize(
    ("width", "words"),
    [
        ({"layer4": 2}, ["'layer4'", "neither a layer", "Did you mean 'layer"]),
        ({"layer1.0.conv3": 2}, ["'layer1.0.conv3'", "Did you mean 'layer1.0.conv"]),
        ({"bn1": 2}, ["'bn1'", "neither a layer"]),
        ({"": 2}, ["''", "neither a layer"]),
        ({"conv": 2}, ["'conv'", "Did you mean 'conv1'?"]),  # a prefix of names, not of letters
        ({"layer2.0.downsample": 2}, ["'layer2.0.downsample'", "neither a layer"]),  # skip A has none
        ({"linear": 2}, ["'linear'", "classes="]),
        ({"lin*": 2}, ["'lin*'", "classes="]),
        ({3: 2.0}, ["3", "neither a layer"]),
        ([("layer1", 2)], ["width=[", "mapping"]),
        *(
            (f, [f"width={f!r}", "above 0, at most 64"])
            for f in (0, -1, 65, float("nan"), float("inf"), "2", True, None)
        ),
        *(({"conv1": f}, [f"width['conv1']={f!r}"]) for f in (0, -1.0, 65, float("nan"), "2", True, None, [2])),
    ],
)
def test_a_width_that_is_none(width: Any, words: list[str]) -> None:
    check_refused(words, lambda: nets.resnet20(width=width))


@EVERY
def test_other_arguments_that_are_none(name: str) -> None:
    for classes in (0, -1, 2.5, True, "10"):
        check_refused([f"classes={classes!r}", "whole number"], partial(nets.NETS[name], classes=classes))
    head = list(shapes_of(nets.NETS[name]))[-1].removesuffix(".bias")
    check_refused([repr(head), "classes="], partial(nets.make, name, width={head: 2}))


def test_an_unknown_skip() -> None:
    check_refused(["skip='C'", "A, B"], lambda: nets.resnet56(skip="C"))


# --- what can be done with them


def a_share(model: nn.Module, x: Tensor) -> sosp.Mask:
    """30 % of the channels of every layer, chosen by chance."""
    chance = torch.Generator().manual_seed(0)
    removed = {n: torch.randperm(w, generator=chance)[: int(0.3 * w)].tolist() for n, w in widths(model).items()}
    return sosp.Mask.from_removed(model, removed, x)


def mobile() -> nn.Module:
    """Stands for MobileNetV2: a stem, a block that does not widen it, two that do, the second beside a skip."""
    blocks = [
        InvertedResidual(8, 8, 5, 1, expands=False, adds=False),
        InvertedResidual(5, 30, 8, 2, expands=True, adds=False),
        InvertedResidual(8, 48, 8, 1, expands=True, adds=True),
    ]
    return nn.Sequential(build_conv_unit(3, 8, 3, 2), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


def dense() -> nn.Module:
    """Stands for DenseNet-40."""
    layers = [
        nn.Conv2d(3, 8, 3, padding=1),
        DenseLayer(8, 4),
        DenseLayer(12, 4),
        TransitionLayer(16, 16),
        DenseLayer(16, 4),
    ]
    return nn.Sequential(*layers, nn.BatchNorm2d(20), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(20, 10))


SHRUNK = {
    "vgg19": partial(nets.vgg19, width=0.25),
    "resnet20": nets.resnet20,
    "plainnet20": nets.plainnet20,
    "densenet40, shallower": dense,
    "resnet18": partial(nets.resnet18, width=0.25),
    "resnet50, shallower": partial(SHALLOWER, width=0.25),
    "mobilenet_v2, shallower": mobile,
    "digits_resnet": nets.digits_resnet,
    "digits_resnet, padded and narrower behind": partial(nets.digits_resnet, skip="A", width={"layer2": 0.4}),
}
FULL_SIZE = {f"{name}, full size": make for name, make in nets.NETS.items()}


@pytest.mark.parametrize("name", [*SHRUNK, *(pytest.param(name, marks=pytest.mark.slow) for name in FULL_SIZE)])
def test_made_smaller(name: str) -> None:
    """`shrink` compares what it gives with the masked network in both modes, and refuses if they differ."""
    x = images(name.partition(",")[0], 4)
    model = seeded((SHRUNK | FULL_SIZE)[name])
    mask = a_share(model, x)
    small = sosp.shrink(model, mask, x)
    ours, theirs = logits(small, x), logits(sosp.masked(model, mask), x)
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()  # float32 over some fifty layers
    assert sum(p.numel() for p in small.parameters()) < 0.75 * sum(p.numel() for p in model.parameters())


def test_copied() -> None:
    model, x = seeded(nets.digits_resnet), images("digits_resnet")
    twin = deepcopy(model)
    assert torch.equal(logits(twin, x), logits(model, x))
    with torch.no_grad():
        next(twin.parameters()).zero_()
    assert not torch.equal(logits(twin, x), logits(model, x))


PARTS = {
    "basic, padded": lambda: BasicBlock(4, (3, 8), 2, PadSkip(4, 8, 2)),
    "basic, narrower": lambda: BasicBlock(4, (3, 2), 2, PadSkip(4, 2, 2)),
    "plain": partial(PlainBlock, 4, (3, 8), 2, None),
    "bottleneck": lambda: Bottleneck(4, (2, 3, 8), 2, build_projection(4, 8, 2)),
    "inverted": partial(InvertedResidual, 4, 8, 4, 1, expands=True, adds=True),
    "dense": lambda: nn.Sequential(DenseLayer(4, 3), TransitionLayer(7, 5)),
}


@pytest.mark.parametrize("name", PARTS)
def test_exported_compiled_and_laid_out_otherwise(name: str) -> None:
    model, x = seeded(PARTS[name]), images("vgg19", 4, 8)[:, [0, 1, 2, 0]]
    y = logits(model, x)
    torch._dynamo.reset()
    with torch.no_grad():
        found = [
            torch.export.export(model, (x,)).module()(x),
            torch.compile(model, backend="eager", fullgraph=True)(x),
            deepcopy(model).to(memory_format=torch.channels_last)(x.to(memory_format=torch.channels_last)),
        ]
    for z in found:
        torch.testing.assert_close(z, y, rtol=1e-4, atol=1e-5)


def test_digits_are_learnt_in_seconds() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    pixels, labels = (torch.from_numpy(a) for a in datasets.load_digits(return_X_y=True))
    x = (pixels.float().view(-1, 1, 8, 8) - 4.9) / 6.0  # their mean and standard deviation
    chance = torch.Generator().manual_seed(0)
    train, test = torch.randperm(len(labels), generator=chance).split([1347, 450])
    model = seeded(nets.digits_resnet).train()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 4 * 43)
    for _ in range(4):
        for rows in train[torch.randperm(1347, generator=chance)].split(32):
            optimiser.zero_grad()
            F.cross_entropy(model(x[rows]), labels[rows]).backward()
            optimiser.step()
            cosine.step()
    right_ones = (logits(model, x[test]).argmax(1) == labels[test]).sum().item()
    assert right_ones / 450 > 0.97


@pytest.mark.gpu
@EVERY
def test_captured_in_a_graph(name: str) -> None:
    model = seeded(nets.NETS[name]).cuda().eval().to(memory_format=torch.channels_last)
    x = images(name, 4).cuda().contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model(x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        x.copy_(x.flip(0))
        graph.replay()
        torch.testing.assert_close(y, model(x), rtol=1e-3, atol=1e-3)
