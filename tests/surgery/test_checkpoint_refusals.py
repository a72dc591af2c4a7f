"""What saving and loading refuse, each by name; nothing in a file is run, and the model given is never changed."""

import builtins
import importlib
import json
import marshal
import pickle
import struct
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoints import check_same, document_of, everything, leftovers, network, reseal, shrunk, some
from torch import Tensor, nn

import sosp
from sosp.core import safetensors_files as file
from sosp.errors import ArgumentError, CheckpointError
from sosp.graph.recipe import Recipe, collect_shapes
from sosp.surgery.checkpoint import inspect, load, save

Files = tuple[Path, nn.Module, nn.Module]  # a file, the original network, the saved one

# --- arguments


def test_arguments_of_other_types(tmp_path: Path) -> None:
    model, x = network("mlp")
    save(tmp_path / "x", model)
    with pytest.raises(ArgumentError, match=r"is a dict; give a torch\.nn\.Module"):
        save(tmp_path / "y", {"fc1": model})
    with pytest.raises(ArgumentError, match=r"is a type; give a torch\.nn\.Module"):
        load(tmp_path / "x", nn.Linear)
    with pytest.raises(ArgumentError, match=r"path=3 is a int; give a str or a pathlib\.Path"):
        save(3, model)
    with pytest.raises(ArgumentError, match="path=b'x' is a bytes"):
        inspect(b"x")
    with pytest.raises(ArgumentError, match=r"is a dict; give a sosp\.Mask or nothing"):
        save(tmp_path / "y", model, {"fc1": [0]})
    with pytest.raises(ArgumentError, match=r"'fc1\.weight' is on the meta device"):
        save(tmp_path / "y", deepcopy(model).to("meta"))
    with pytest.raises(ArgumentError, match=r"'fc1\.weight' is on the meta device"):
        load(tmp_path / "x", deepcopy(model).to("meta"))
    with pytest.raises(ArgumentError, match="the model is already shrunk; give the original"):
        load(tmp_path / "x", shrunk(model, x))
    with pytest.raises(sosp.errors.StructureError, match="not initialised yet"):
        save(tmp_path / "y", nn.LazyLinear(3))
    assert leftovers(tmp_path) == ["x"]


def test_tensors_that_cannot_be_saved(tmp_path: Path) -> None:
    for bad, what in [
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
        (torch.eye(3).to_sparse(), "torch.sparse_coo"),
        (torch.zeros(2).as_subclass(type("Special", (Tensor,), {})), "Special"),
    ]:
        model = nn.Module()
        model.register_buffer("bad", bad)
        with pytest.raises(CheckpointError, match=f"'bad' is a .*{what}.*; only plain tensors of float64, float32"):
            save(tmp_path / "x", model)
    model = nn.Module()
    model.register_module("sosp", nn.Module())
    model.sosp.register_buffer("index/0", torch.zeros(1))
    with pytest.raises(CheckpointError, match=r"'sosp\.index/0' is reserved by sosp"):
        save(tmp_path / "x", model)


def test_a_network_that_was_changed_after_shrinking(tmp_path: Path) -> None:
    model, x = network("mlp")
    small = shrunk(model, x)
    small.head = nn.Linear(small.head.in_features, 9).double()
    with pytest.raises(CheckpointError, match=r"'head.weight' is \(9, \d\), but shrinking made it \(4, \d\)"):
        save(tmp_path / "x", small)
    small = shrunk(model, x)
    small.extra = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"has 'extra.weight', which it did not have before it was shrunk"):
        save(tmp_path / "x", small)
    small = shrunk(model, x)
    del small.sosp_shapes
    with pytest.raises(CheckpointError, match="not the shapes from before"):
        save(tmp_path / "x", small)


def test_a_mask_that_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    model, x = network("mlp")
    mask = some(model, x)
    for bad, match in [
        (sosp.Mask("blocks", mask.layers, mask.removed, 3, 1), r"mask\.kind should be one of"),
        (sosp.Mask("filters", (), mask.removed, 3, 1), r"mask\.removed\['fc1'\] should be channels of its 0"),
        (sosp.Mask("filters", mask.layers, {"fc1": torch.tensor([3, 1])}, 3, 1), "a sorted list of channels"),
        (sosp.Mask("filters", mask.layers, {}, float("nan"), 1), "a value that JSON cannot store"),
        (sosp.Mask("filters", mask.layers, {}, 3, 4), r"mask\.chosen should be a whole number from 0 to 3"),
    ]:
        with pytest.raises(CheckpointError, match=match):
            save(tmp_path / "x", model, bad)
    assert leftovers(tmp_path) == []


# --- files


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Files:
    model, x = network("residual")
    small, path = shrunk(model, x), tmp_path_factory.mktemp("made") / "net"
    save(path, small, some(model, x))
    return path, model, small


@pytest.fixture
def saved(made: Files, tmp_path: Path) -> Files:
    """A copy of the file, to be spoilt."""
    path = tmp_path / "net"
    path.write_bytes(made[0].read_bytes())
    return path, made[1], made[2]


def check_refused(path: Path, model: nn.Module, match: str) -> None:
    before = everything(model)
    with pytest.raises(CheckpointError, match=match) as caught:
        load(path, model)
    assert str(caught.value).startswith(f"{path}: ")
    assert everything(model) == before


def test_files_that_are_something_else(saved: Files) -> None:
    path, model, _ = saved
    other = path.with_name("other")
    check_refused(other, model, "there is no such file")
    check_refused(path.parent, model, "is not a file")
    for content in (b"", b"{}", b"hello, world, this is text", b"\0" * 100, struct.pack("<Q", 2**62) + b"{}" * 9):
        other.write_bytes(content)
        check_refused(other, model, "is not a safetensors file, so it was not written by sosp.save")
    torch.save(model.state_dict(), other)
    check_refused(other, model, r"It looks like a file of torch\.save")
    safetensors.torch.save_file(model.state_dict(), other)
    check_refused(other, model, "is a safetensors file that was not written by sosp.save")
    safetensors.torch.save_file(model.state_dict(), other, metadata={"sosp": "{}"})
    check_refused(other, model, "is a safetensors file that was not written by sosp.save")


def test_truncated_and_tampered_files(saved: Files) -> None:
    path, model, _ = saved
    raw = path.read_bytes()
    header = int.from_bytes(raw[:8], "little")
    for length, match in [
        (header, "is truncated: "),
        (8 + header, "is truncated or"),
        (len(raw) - 1, "is truncated or"),
    ]:
        path.write_bytes(raw[:length])
        check_refused(path, model, match)
    path.write_bytes(raw + b"\0")
    check_refused(path, model, "is truncated or damaged")
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    check_refused(path, model, "is damaged or was changed after it was written: its checksum does not match")
    path.write_bytes(raw.replace(b"Sequential", b"Sequentiol"))
    check_refused(path, model, "its checksum does not match")


def test_absurd_sizes_are_not_believed(saved: Files) -> None:
    path, model, _ = saved
    for header, data in [
        ({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}, b""),
        ({"a": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 16]}}, b"0" * 16),
        ({"a": {"dtype": "F32", "shape": [0, 2**64 - 1], "data_offsets": [0, 0]}}, b""),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 0]}}, b""),
        ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}}, b"0" * 16),
    ]:
        start = f'{{"format":1,"sha256":"{"0" * 64}",}}'
        text = json.dumps({"__metadata__": {"sosp": start}, **header}).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data)
        check_refused(path, model, "is truncated or damaged")


def test_newer_formats(saved: Files) -> None:
    path, model, _ = saved
    raw = path.read_bytes()
    assert raw.count(rb"{\"format\":1,") == 1
    path.write_bytes(raw.replace(rb"{\"format\":1,", rb"{\"format\":2,"))
    check_refused(path, model, r"was written by a newer sosp \(format 2; this one reads up to 1\)\. Upgrade sosp")


BAD_FIELDS = {
    "no JSON": ("", "{nonsense", "not valid JSON"),
    "not a number": ("", '{"a":NaN}', "not valid JSON"),
    "too deep": ("", '{"a":' + "[" * 200_000, "not valid JSON"),
    "too long a number": ("", '{"a":' + "1" * 10_000 + "}", "not valid JSON"),
    "another object": ("", '{"a":1}', "an object with the keys sosp, torch, module"),
    "version": ("sosp", 3, "sosp should be a string, not 3"),
    "tensors": ("tensors", [], r"tensors should be an object, not \[\]"),
    "dtype": ("tensors/conv1.weight/dtype", "load", r"tensors\['conv1.weight'\].dtype should be one of"),
    "unhashable": ("tensors/conv1.weight/dtype", [1], "should be one of"),
    "other dtype": ("tensors/conv1.weight/dtype", "float32", "says that 'conv1.weight' is float32 .* holds float64"),
    "layout": ("tensors/bn1.weight/layout", "channels_last", "a layout for 1 dimensions"),
    "shape": ("tensors/conv1.weight/shape", [1, True], r"shape\[1\] should be a whole number"),
    "negative": ("tensors/conv1.weight/shape", [-1], r"shape\[0\] should be a whole number from 0"),
    "no tensor": ("tensors/new", {"dtype": "bool", "shape": [], "layout": "strided"}, "file holds nothing"),
    "alias": ("aliases", {"head.weight": "head.bias"}, "'head.weight' is 'head.bias' under another name"),
    "alias of none": ("aliases", {"x": "y"}, "which it is not"),
    "alias unknown": ("aliases", {"x": "head.bias"}, "has 'x', which it did not have before"),
    "original": ("original/head.bias", [4], r"'head.bias' is \(3,\), but shrinking made it \(4,\)"),
    "transient": ("transient", {"x": "os.system"}, "should be one of"),
    "recipes": ("recipes", {}, "recipes should be a list"),
    "recipe": ("recipes/0", {}, r"recipes\[0\] should be an object with the keys slices"),
    "axis": ("recipes/0/slices/conv1.weight", {"8": 0}, "an axis from 0 to 7, not '8'"),
    "index": ("recipes/0/slices/conv1.weight/0", 10**6, "the number of an index tensor in the file"),
    "index sign": ("recipes/0/slices/conv1.weight/0", -1, "should be a whole number from 0"),
    "grouped": ("recipes/0/grouped", {"conv1.weight": [0]}, "two index tensors"),
    "columns": ("recipes/0/grouped", {"conv1.weight": [0, 0]}, "columns for"),
    "size": ("recipes/0/sizes", {"conv1": {"groups": 1.0}}, r"sizes\['conv1'\]\['groups'\] should be a whole number"),
    "given": ("recipes/0/scatters/block1.bn2/given", 0, "an index of numbers from -1 to below"),
    "scatter": ("recipes/0/scatters/block1.bn2", 7, "an object with the keys index, axis, given"),
    "emptied": ("recipes/0/emptied", [["a"]], r"emptied\[0\] should be a string"),
    "bypass": ("recipes/0/bypassed", {"block1": {"source": 0.5, "steps": [], "zero": True}}, "source should be a"),
    "mask": ("mask", False, "an object with the keys kind"),
    "layer": ("mask/layers/0/macs", 3, "a finite decimal number"),
    "infinite": ("mask/layers/0/macs", "1e999", "a finite decimal number"),
    "depthwise": ("mask/layers/0/depthwise", 0, "true or false"),
}  # fmt: skip


def with_value(document: Any, place: str, value: Any) -> Any:
    *path, key = place.split("/")
    inner = document
    for part in path:
        inner = inner[int(part) if isinstance(inner, list) else part]
    inner[int(key) if isinstance(inner, list) else key] = value
    return document


@pytest.mark.parametrize("what", BAD_FIELDS)
def test_wrong_descriptions(what: str, saved: Files) -> None:
    path, model, _ = saved
    place, value, match = BAD_FIELDS[what]
    document = value if not place else with_value(json.loads(document_of(path)), place, value)
    if value == "1e999":
        document = json.dumps(document).replace('"1e999"', "1e999")
    reseal(path, document)
    check_refused(path, model, match)
    with pytest.raises(CheckpointError, match=match):
        inspect(path)


FORGED_RECIPES = {
    "no such layer": (
        {"sizes": {"conv9": {"groups": 1}}},
        r"has no layer 'conv9', which a recipe changes\. Did you mean",
    ),
    "no such tensor": ({"slices": {"conv1.nothing": {"0": 0}}}, "does not have 'conv1.nothing', which a recipe cuts"),
    "a method": ({"sizes": {"conv1": {"forward": 1}}}, "sets 'forward' of 'conv1', which is not a size"),
    "a class": ({"sizes": {"conv1": {"__class__": 1}}}, "sets '__class__' of 'conv1', which is not a size"),
    "a flag": ({"sizes": {"conv1": {"training": 1}}}, "sets 'training' of 'conv1', which is not a size"),
    "inner life": ({"sizes": {"conv1": {"_parameters": 1}}}, "sets '_parameters' of 'conv1'"),
    "a new name": ({"sizes": {"conv1": {"anything": 1}}}, "sets 'anything' of 'conv1'"),
    "no channels": ({"emptied": ["relu"]}, "takes all channels of 'relu', which is not a layer"),
    "no such part": (
        {"bypassed": {"block1": {"source": 0, "steps": ["conv9"], "zero": False}}},
        "no layer 'block1.conv9'",
    ),
    "all of it": ({"bypassed": {"": {"source": 0, "steps": [], "zero": False}}}, "the model has no layer ''"),
    "emptied twice": ({"emptied": ["conv1", "conv1"]}, "does not fit the model"),
    "inside what is gone": ({"passed": ["block1", "block1.bn1"]}, "does not fit the model"),
    "no scatter there": ({"scatters": {"conv1": None}}, "does not fit the model"),
    "passed": (
        {"passed": ["bn1"]},
        r"the model has no place for 'bn1\.bias', 'bn1\.num_batches_tracked', .* and 2 more",
    ),
}


@pytest.mark.parametrize("what", FORGED_RECIPES)
def test_recipes_that_do_not_fit_the_model(what: str, saved: Files) -> None:
    path, model, _ = saved
    fields, match = FORGED_RECIPES[what]
    document = json.loads(document_of(path))
    document["recipes"].append({**{k: type(v)() for k, v in document["recipes"][0].items()}, **fields})
    reseal(path, document)
    check_refused(path, model, match)


def test_indices_outside_the_original(saved: Files) -> None:
    path, model, _ = saved
    document, tensors = file.read_safetensors(path)
    place = json.loads(document)["recipes"][0]["slices"]["conv1.weight"]["0"]
    for value, match in [(-1, "an index of numbers from 0"), (3, "elements of '.*' along axis 0 that its shape")]:
        index = {f"sosp.index/{place}": torch.full_like(tensors[f"sosp.index/{place}"], value)}
        reseal(path, document, tensors | index)
        check_refused(path, model, match)


def test_extra_and_missing_tensors(saved: Files) -> None:
    path, model, _ = saved
    document, tensors = file.read_safetensors(path)
    reseal(path, document, tensors | {"extra": torch.zeros(2)})
    check_refused(path, model, r"says that 'extra' is nothing, but the file holds float32 \(2,\)")
    reseal(path, document, tensors | {"sosp.index/77": torch.zeros(2)})
    check_refused(path, model, r"says that 'sosp.index/77' is nothing")
    reseal(path, document, {name: x for name, x in tensors.items() if name != "head.bias"})
    check_refused(path, model, r"says that 'head.bias' is float64 \(3,\), but the file holds nothing")
    forged = json.loads(document)
    del forged["tensors"]["head.bias"]
    reseal(path, forged, {name: x for name, x in tensors.items() if name != "head.bias"})
    check_refused(path, model, r"it holds no 'head.bias', which the model needs")


def test_claimed_widths_allocate_nothing(saved: Files) -> None:
    path, model, _ = saved
    document = json.loads(document_of(path))
    name = next(n for n, p in document["recipes"][0]["scatters"].items() if p)
    document["recipes"][0]["scatters"][name]["given"] = 2**50
    reseal(path, document)
    check_refused(path, model, f"gives '{name}' {2**50} channels, more than anything in the model")


def test_buffers_outside_the_file_do_not_grow_without_bound(tmp_path: Path) -> None:
    model, _ = network("tied")
    wide = Recipe(slices={"table": {0: torch.zeros(6 * 65, dtype=torch.long)}})
    model.sosp_recipes, model.sosp_shapes = (wide,), collect_shapes(model)
    save(tmp_path / "wide", model)
    check_refused(tmp_path / "wide", network("tied")[0], "makes 'table' more than 64 times larger")


# --- models


class Net(nn.Sequential):
    """A class of its own."""


class Sub(Net):
    """A subclass of it."""


def test_classes_are_compared_by_name(tmp_path: Path) -> None:
    def layers() -> list[nn.Module]:
        return [nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)]

    save(tmp_path / "net", Net(*layers()))
    check_refused(
        tmp_path / "net", nn.Sequential(*layers()),
        r"holds a test_checkpoint_refusals\.Net, but the model is a torch\.nn\.modules\.container\.Sequential",
    )  # fmt: skip
    moved = type("Net", (nn.Sequential,), {"__module__": "elsewhere", "__qualname__": "Net"})
    for kind in (Net, Sub, moved):
        assert type(load(tmp_path / "net", kind(*layers()))) is kind


def test_models_of_other_layers_and_shapes(saved: Files) -> None:
    path, model, _ = saved
    fewer = deepcopy(model)
    del fewer.head
    check_refused(path, fewer, r"the model does not have 'head\.bias', 'head\.weight' of the network that was saved")
    more = deepcopy(model)
    more.tail = nn.BatchNorm1d(3)
    check_refused(
        path, more, r"the model has 'tail\.bias', 'tail\.num_batches_tracked', .* and 2 more, which the network"
    )
    other = deepcopy(model)
    other.conv1 = nn.Conv2d(2, 5, 3, bias=False)
    check_refused(path, other, r"other shapes .*: 'conv1\.weight' is \(5, 2, 3, 3\), not \(3, 2, 3, 3\)")
    check_refused(path, nn.Sequential(), r"does not have .* and \d+ more of the network")


def test_ties_must_be_those_of_the_file(tmp_path: Path) -> None:
    model, x = network("tied")
    save(tmp_path / "tied", shrunk(model, x))
    loose = deepcopy(model)
    loose.b.weight = nn.Parameter(model.a.weight.detach().clone())
    check_refused(
        tmp_path / "tied", loose, r"'b\.weight' and 'a\.weight' are one tensor in the file and two in the model"
    )
    save(tmp_path / "loose", loose)
    check_refused(
        tmp_path / "loose", model, r"'a\.weight' and 'b\.weight' are two tensors in the file and one in the model"
    )


# --- nothing in a file is run


def test_loading_never_unpickles_imports_or_evaluates(saved: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model, small = saved
    load(path, model)  # torch imports parts of itself when they are first used

    class Never(BaseException):
        """Nobody catches it."""

    def never(*args: Any, **kwargs: Any) -> Any:
        raise Never(f"called with {args!r:.100}")

    imported = builtins.__import__

    def known(name: str, *args: Any, **kwargs: Any) -> Any:  # torch and safetensors import inside functions
        return imported(name, *args, **kwargs) if name in sys.modules else never(name)

    with monkeypatch.context() as patch:
        for where, names in {
            pickle: ["load", "loads", "Unpickler"], torch: ["load"], torch.serialization: ["load"],
            importlib: ["import_module"], marshal: ["load", "loads"], builtins: ["eval", "exec"],
        }.items():  # fmt: skip
            for name in names:
                patch.setattr(where, name, never)
        patch.setattr(builtins, "__import__", known)
        found, said = load(path, model), inspect(path)
    check_same(found, small)
    assert said.qualname == "Sequential"
