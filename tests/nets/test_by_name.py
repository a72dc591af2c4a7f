"""Networks by name and their weights: what every source takes, and what is refused in which words."""

import pickle
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import sosp
from sosp.errors import ArgumentError, CheckpointError, SospError
from sosp.nets import by_name

NET = "sosp:digits_resnet"


def small(seed: int = 0, **more: Any) -> nn.Module:
    return by_name.build_network(NET, width=0.25, seed=seed, **more)


def same(a: nn.Module, b: nn.Module) -> bool:
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine)


# --- names ----------------------------------------------------------------------------------------------


def test_fresh_weights_depend_on_the_seed_alone() -> None:
    before = torch.random.get_rng_state()
    assert same(small(3), small(3))
    assert not same(small(3), small(4))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not small().training


@pytest.mark.parametrize(
    ("name", "shape"),
    [(NET, (1, 8, 8)), ("sosp:resnet20", (3, 32, 32)), ("sosp:mobilenet_v2", (3, 224, 224))],
)
def test_every_network_has_an_example(name: str, shape: tuple[int, ...]) -> None:
    model = by_name.build_network(name, classes=7, width=0.25)
    x = by_name.make_example(name, model)
    assert x.shape == (2, *shape)
    assert by_name.make_example(name, model, (1, 2, 3)).shape == (2, 1, 2, 3)
    if shape[1] <= 32:
        assert model(x).shape == (2, 7)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet56", r"there is no model 'resnet56'. Did you mean 'sosp:resnet56'\?"),
        ("sosp:resnt56", r"sosp has no model 'resnt56'. Did you mean 'sosp:resnet56'\?"),
        ("tochvision:resnet50", r"there is no model .* Did you mean 'torchvision:resnet50'\?"),
        ("runs/nowhere", "there is no model 'runs/nowhere'. Name one as sosp:NAME"),
        ("sosp:", "sosp has no model ''"),
        ("", "there is no model ''"),
        ("nowhere.py:make", r"there is no file nowhere.py \(relative to"),
        ("no_such_module:make", "there is no module 'no_such_module' to import. For a file, give its path"),
        ("os.path:jion", r"os.path has no function 'jion'. Did you mean 'join'\?"),
        ("builtins:dict", "builtins:dict returned a dict; it must return a torch.nn.Module"),
    ],
)
def test_names_that_are_none(name: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        by_name.build_network(name)


def test_a_function_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside_it.py").write_text("from torch import nn\nclass Own(nn.Linear): pass\n")
    (tmp_path / "mine.py").write_text("from beside_it import Own\ndef make():\n    return Own(3, 2)\n")
    name = f"{tmp_path}/mine.py:make"
    model = by_name.build_network(name)
    assert type(model).__name__ == "Own"
    assert not model.training
    with pytest.raises(ArgumentError, match=r"input shape of .* is not known: give it \(input 3x32x32\)"):
        by_name.make_example(name, model)
    with pytest.raises(ArgumentError, match="classes cannot be set for"):
        by_name.build_network(name, classes=2)
    with pytest.raises(ArgumentError, match=r"has no function 'mak'. Did you mean 'make'\?"):
        by_name.build_network(f"{tmp_path}/mine.py:mak")


def test_width_is_for_our_own() -> None:
    with pytest.raises(ArgumentError, match="width is for sosp: networks"):
        by_name.build_network("torchvision:resnet18", width=0.5)


# --- packages that may not be there ---------------------------------------------------------------------


@pytest.mark.parametrize("source", ["torchvision:resnet18", "timm:resnet18", "hf:resnet"])
def test_a_missing_package_is_named(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = {"hf": "transformers"}.get(source.partition(":")[0], source.partition(":")[0])
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SospError, match=f"{package} is not installed: pip install {package}"):
        by_name.build_network(source)


def test_a_package_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist\\nmore')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    said = "torchvision is installed, but cannot be imported: RuntimeError: operator torchvision::nms does not exist. "
    with pytest.raises(SospError, match=said):
        by_name.build_network("torchvision:resnet18")


def linear(name: str = "", *, num_classes: int = 1000, **more: Any) -> nn.Module:
    model = nn.Linear(2, num_classes)
    model.given = more  # type: ignore[assignment]
    return model


def test_torchvision_is_asked_for_untrained_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    fake: Any = ModuleType("torchvision")
    fake.models = SimpleNamespace(list_models=lambda module: ["resnet18", "inception_v3"], get_model=linear)
    monkeypatch.setitem(sys.modules, "torchvision", fake)
    model: Any = by_name.build_network("torchvision:resnet18", classes=5)
    assert (model.out_features, model.given) == (5, {"weights": None})
    assert by_name.make_example("torchvision:resnet18", model).shape == (2, 3, 224, 224)
    assert by_name.make_example("torchvision:inception_v3", model).shape == (2, 3, 299, 299)
    with pytest.raises(ArgumentError, match=r"torchvision has no model 'resnet8'. Did you mean 'torchvision:resnet18'"):
        by_name.build_network("torchvision:resnet8")


def test_timm_is_asked_for_untrained_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    fake: Any = ModuleType("timm")
    fake.list_models, fake.create_model = lambda: ["convnext_atto"], linear
    monkeypatch.setitem(sys.modules, "timm", fake)
    model: Any = by_name.build_network("timm:convnext_atto.d2_in1k")
    assert (model.out_features, model.given) == (1000, {"pretrained": False})
    model.pretrained_cfg = {"input_size": (3, 160, 160)}
    assert by_name.make_example("timm:convnext_atto", model).shape == (2, 3, 160, 160)
    with pytest.raises(ArgumentError, match=r"timm has no model 'convnxt'. Did you mean 'timm:convnext_atto'"):
        by_name.build_network("timm:convnxt")


def tiny_folder(folder: Path, **more: Any) -> Any:
    """A small ResNet of transformers with its weights."""
    hub = pytest.importorskip("transformers")
    config = hub.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], num_labels=3, **more)
    model = hub.ResNetForImageClassification(config)
    model.save_pretrained(folder)
    return model


def test_transformers_from_a_folder(tmp_path: Path) -> None:
    kept = tiny_folder(tmp_path)
    name = f"hf:{tmp_path}"
    model = by_name.build_network(name)
    assert same(model, kept)
    assert sosp.count(model, by_name.make_example(name, model)).params == sum(p.numel() for p in kept.parameters())
    with pytest.raises(ArgumentError, match="the weights in the folder are for 3 classes, not 5"):
        by_name.build_network(name, classes=5)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ArgumentError, match=r"in pytorch_model.bin, a pickle, which sosp does not read"):
        by_name.build_network(name)
    (tmp_path / "pytorch_model.bin").unlink()
    assert same(by_name.build_network(name, seed=1), by_name.build_network(name, seed=1))
    assert not same(by_name.build_network(name), kept)


class FakeHub(ModuleType):
    """What is used of transformers, in small."""

    def __init__(self, architectures: list[str] | None, labels: int = 3) -> None:
        super().__init__("transformers")
        config = SimpleNamespace(architectures=architectures, num_labels=labels, image_size=[8, 6], num_channels=1)
        read = SimpleNamespace(from_pretrained=lambda *_, **__: config, for_model=lambda name: config)
        self.AutoConfig: Any = read
        self.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING: Any = {}
        self.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING: Any = {SimpleNamespace: None}
        made = {"from_config": lambda c: linear(num_classes=c.num_labels, made="fresh")}
        self.AutoModelForSequenceClassification: Any = SimpleNamespace(**made)
        kept = {"from_pretrained": lambda *_, **__: linear(num_classes=labels, made="kept")}
        fresh = {"_from_config": lambda c: linear(num_classes=c.num_labels, made="own class")}
        self.TinyForImageClassification: Any = SimpleNamespace(**kept, **fresh)


def fake_hub(monkeypatch: pytest.MonkeyPatch, hub: FakeHub) -> None:
    types = SimpleNamespace(CONFIG_MAPPING_NAMES={"resnet": "ResNetConfig"})
    monkeypatch.setitem(sys.modules, "transformers", hub)
    monkeypatch.setitem(sys.modules, "transformers.models.auto.configuration_auto", types)  # type: ignore[arg-type]


def test_transformers_by_type_and_by_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub(monkeypatch, FakeHub(None))
    model: Any = by_name.build_network("hf:resnet", classes=4)
    assert (model.out_features, model.given) == (4, {"made": "fresh"})
    with pytest.raises(ArgumentError, match=r"resnt is not a folder, .* Did you mean 'resnet'\? Nothing is downloaded"):
        by_name.build_network("hf:resnt")
    with pytest.raises(ArgumentError, match=r"has no config\.json"):
        by_name.build_network(f"hf:{tmp_path}")
    fake_hub(monkeypatch, FakeHub(["TinyForImageClassification"]))
    (tmp_path / "config.json").write_text("{}")
    fresh: Any = by_name.build_network(f"hf:{tmp_path}", classes=7)
    assert (fresh.out_features, fresh.given) == (7, {"made": "own class"})
    (tmp_path / "model-00001-of-00002.safetensors").write_text("")
    kept: Any = by_name.build_network(f"hf:{tmp_path}")
    assert (kept.out_features, kept.given) == (3, {"made": "kept"})


def test_inputs_from_the_configuration() -> None:
    seen: Any = linear()
    seen.config, seen.main_input_name = SimpleNamespace(image_size=[8, 6], num_channels=1), "pixel_values"
    assert by_name.make_example("hf:x", seen).shape == (2, 1, 8, 6)
    seen.config, seen.main_input_name = SimpleNamespace(max_position_embeddings=12), "input_ids"
    words = by_name.make_example("hf:x", seen)
    assert {name: x.shape for name, x in words.items()} == {"input_ids": (2, 12), "attention_mask": (2, 12)}


# --- weights --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", [None, "state_dict", "model"])
@pytest.mark.parametrize("prefix", ["", "module.", "module._orig_mod.", "_orig_mod.module."])
def test_state_dicts_in_every_wrapping(wrapper: str | None, prefix: str, tmp_path: Path) -> None:
    source = small(1)
    state = {prefix + name: x for name, x in source.state_dict().items()}
    torch.save({wrapper: state, "epoch": 3} if wrapper else state, tmp_path / "w.pth")
    start = small(2)
    found = by_name.load_weights(start, tmp_path / "w.pth")
    assert same(found, source)
    assert same(start, small(2))


def test_safetensors_and_what_sosp_saved(tmp_path: Path) -> None:
    source = small(1)
    save_file(source.state_dict(), tmp_path / "plain.safetensors")
    assert same(by_name.load_weights(small(2), tmp_path / "plain.safetensors"), source)
    x = by_name.make_example(NET, source)
    mask = sosp.Mask.from_removed(source, {"layer1.0.conv1": [0, 2]}, x)
    shrunk = sosp.shrink(source, mask, x)
    sosp.save(tmp_path / "small.safetensors", shrunk, mask)
    assert same(by_name.load_weights(small(2), tmp_path / "small.safetensors"), shrunk)


def test_old_files_without_counters(tmp_path: Path) -> None:
    source = small(1)
    state = {n: x for n, x in source.state_dict().items() if not n.endswith("num_batches_tracked")}
    torch.save(state, tmp_path / "w.pth")
    assert same(by_name.load_weights(small(2), tmp_path / "w.pth"), source)


def test_another_networks_weights_are_refused_in_numbers(tmp_path: Path) -> None:
    other = by_name.build_network("sosp:resnet20", width=0.25)
    save_file(other.state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError) as refusal:
        by_name.load_weights(small(), tmp_path / "w.safetensors")
    message = str(refusal.value)
    assert "not for this CifarResNet. Tensors: 10 missing (layer2.0.downsample.0.weight, " in message
    assert ", 72 unknown (layer1.1.bn1.bias, " in message
    assert ", 1 with another shape (conv1.weight is (4, 3, 3, 3), expected (4, 1, 3, 3))." in message


def test_other_classes_are_guessed(tmp_path: Path) -> None:
    torch.save(small(classes=100).state_dict(), tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match=r"trained for 100 classes\? This one has 10: give classes=100"):
        by_name.load_weights(small(), tmp_path / "w.pth")


class Harmful:
    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('executed')",))


def test_files_that_hold_no_weights(tmp_path: Path) -> None:
    (tmp_path / "text.pth").write_text("hello, these are no weights")
    (tmp_path / "harmful.pth").write_bytes(pickle.dumps({"x": Harmful()}))
    torch.save({"epoch": 3, "lr": 0.1}, tmp_path / "numbers.pth")
    save_file(small().state_dict(), tmp_path / "whole.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "whole.safetensors").read_bytes()[:-100])
    refused = {
        "nowhere.pth": "there is no such file",
        "text.pth": "cannot be read as weights",
        "harmful.pth": "cannot be read as weights",
        "numbers.pth": "holds a dict with 'epoch', 'lr', not a state dict",
        "cut.safetensors": "is truncated or damaged",
    }
    for name, message in refused.items():
        with pytest.raises(CheckpointError, match=f"{name}: {message}"):
            by_name.load_weights(small(), tmp_path / name)
    with pytest.raises(CheckpointError, match="is not a file"):
        by_name.load_weights(small(), tmp_path)


def test_the_digest_is_that_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert (
        by_name.hash_weights_file(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )
