"""Shrunk networks in a file: they come back bit for bit, and a file is written whole or not at all."""

import hashlib
import json
import os
import stat
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoints import (
    bits,
    check_round_trip,
    check_same,
    document_of,
    leftovers,
    network,
    other_weights,
    reseal,
    shrunk,
    some,
    state,
)
from torch import Tensor, nn

import sosp
from networks import to_score
from sosp.core import safetensors_files as file
from sosp.core.layers import Scatter, ZeroLayer
from sosp.errors import CheckpointError
from sosp.graph.recipe import Recipe, ScatterIndex, apply_recipe, collect_shapes
from sosp.graph.records import Layer
from sosp.surgery.checkpoint import Saved, inspect, load, save
from sosp.surgery.checkpoint.model_record import DTYPES

# --- round trips


@pytest.mark.parametrize("name", [*to_score(), "squeeze-excite", "tied"])
def test_round_trip(name: str, tmp_path: Path) -> None:
    model, x = network(name)
    small = shrunk(model, x)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())
    check_round_trip(tmp_path / "small.safetensors", model, small, x)


@pytest.mark.parametrize("name", ["residual", "preact", "grouped", "attention", "squeeze-excite"])
def test_shrunk_twice_and_loaded_networks_shrink_again(name: str, tmp_path: Path) -> None:
    model, x = network(name)
    once = shrunk(model, x)
    check_round_trip(tmp_path / "once", model, once, x)
    loaded = load(tmp_path / "once", other_weights(model))
    twice, from_loaded = shrunk(once, x, seed=3), shrunk(loaded, x, seed=3)
    check_same(from_loaded, twice, x)
    check_round_trip(tmp_path / "twice", model, from_loaded, x)
    assert len(inspect(tmp_path / "twice").recipes) == 2


def test_a_branch_that_lost_every_channel(tmp_path: Path) -> None:
    model, x = network("residual")
    mask = sosp.Mask.from_removed(model, {"block1.conv2": [0, 1, 2], "block2.conv1": [1]}, x)
    small = sosp.shrink(model, mask, x, verify=False)
    assert any(isinstance(m, ZeroLayer) for m in small.modules())
    found = check_round_trip(tmp_path / "small", model, small, x)
    assert isinstance(found.get_submodule("block1.conv2"), ZeroLayer)


def test_scatters_are_rebuilt(tmp_path: Path) -> None:
    model, x = network("residual")
    small = sosp.shrink(model, sosp.Mask.from_removed(model, {"block1.conv2": [1]}, x), x, verify=False)
    assert any(isinstance(m, Scatter) for m in small.modules())
    found = check_round_trip(tmp_path / "small", model, small, x)
    assert [n for n, m in found.named_modules() if isinstance(m, Scatter)] != []


@pytest.mark.parametrize("init", ["random", "copy"])
def test_a_widened_network(init: str, tmp_path: Path) -> None:
    model, x = network("residual")
    wide = sosp.widen(model, {"block1": 2.0, "block2": 1.5}, x, init=init)
    assert sum(p.numel() for p in wide.parameters()) > sum(p.numel() for p in model.parameters())
    check_round_trip(tmp_path / "wide", model, wide, x)
    check_round_trip(tmp_path / "small", model, shrunk(wide, x), x)


@pytest.mark.parametrize("name", ["mlp", "residual", "tied"])
def test_a_network_that_was_not_shrunk(name: str, tmp_path: Path) -> None:
    model, x = network(name)
    found = check_round_trip(tmp_path / "plain", model, model, x)
    assert not hasattr(found, "sosp_recipes")
    assert inspect(tmp_path / "plain").recipes == ()


def test_a_mask_that_removes_nothing(tmp_path: Path) -> None:
    model, x = network("conv-bn")
    small = sosp.shrink(model, sosp.Mask.from_removed(model, {}, x), x, verify=False)
    check_same(check_round_trip(tmp_path / "same", model, small, x), model, x)


def test_training_goes_on(tmp_path: Path) -> None:
    model, x = network("residual")
    small = shrunk(model, x)
    save(tmp_path / "small", small)
    pair = [small, load(tmp_path / "small", model)]
    for net in pair:
        net.train()
        optimiser = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        for _ in range(3):
            optimiser.zero_grad()
            net(x.clone()).square().sum().backward()
            optimiser.step()
    check_same(pair[1], pair[0], x)


# --- what a tensor can be


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_tensors_keep_the_type_they_were_saved_with(dtype: torch.dtype, tmp_path: Path) -> None:
    for name in ("residual", "tied"):
        model, x = network(name)
        model = model.float()
        small = shrunk(model, x.float()).to(dtype)
        found = check_round_trip(tmp_path / name, model, small, x.to(dtype))
        assert {p.dtype for p in found.parameters()} == {dtype}
    assert found.table.dtype == dtype  # it is not in the state dict


def test_mixed_types_come_back_as_they_are(tmp_path: Path) -> None:
    model, x = network("attention")
    small = shrunk(model.float(), x.float())
    small.head.bfloat16()
    small.fc1.to(torch.float8_e4m3fn)
    found = check_round_trip(tmp_path / "mixed", model, small, None)
    assert found.fc1.weight.dtype == torch.float8_e4m3fn


def test_whole_numbers_cannot_require_a_gradient(tmp_path: Path) -> None:
    model, _ = network("mlp")
    whole = deepcopy(model)
    whole.fc1.weight.requires_grad_(False)
    whole.fc1.weight.data = torch.arange(35, dtype=torch.int8).view(7, 5)
    save(tmp_path / "whole", whole)
    found = load(tmp_path / "whole", model)
    check_same(found, whole)
    assert not found.fc1.weight.requires_grad
    assert model.fc1.weight.requires_grad


def test_every_type_that_is_offered(tmp_path: Path) -> None:
    for name, dtype in DTYPES.items():
        model = nn.Module()
        model.register_buffer("x", torch.zeros(3).to(dtype))
        save(tmp_path / name, model)
        assert load(tmp_path / name, model).x.dtype == dtype


def test_numbers_that_are_none(tmp_path: Path) -> None:
    model, _ = network("mlp")
    payload = torch.tensor([0x7FF8000000000001, 0x7FF0000000000002, -1, 0x7FF0000000000000, -(2**63)])  # NaNs, inf, -0
    model.fc1.weight.data[0] = payload.view(torch.float64)
    check_round_trip(tmp_path / "nan", model, model, None)


@pytest.mark.parametrize("name", ["residual", "conv-bn", "grouped"])
def test_channels_last_comes_back(name: str, tmp_path: Path) -> None:
    model, x = network(name)
    small = shrunk(model, x).to(memory_format=torch.channels_last)
    x = x.contiguous(memory_format=torch.channels_last)
    found = check_round_trip(tmp_path / "last", model, small, x)
    assert any(p.dim() == 4 and not p.is_contiguous() for p in found.parameters())
    back = deepcopy(small).to(memory_format=torch.contiguous_format)
    save(tmp_path / "first", back)
    last = other_weights(model).to(memory_format=torch.channels_last)
    check_same(load(tmp_path / "first", last), back, x)


def test_channels_last_in_three_dimensions(tmp_path: Path) -> None:
    model = nn.Conv3d(2, 3, 2)
    check_round_trip(tmp_path / "last", model, deepcopy(model).to(memory_format=torch.channels_last_3d), None)


def test_tensors_that_are_not_contiguous_keep_their_numbers(tmp_path: Path) -> None:
    model = nn.Module()
    whole = torch.arange(24.0)
    for name, view in {
        "turned": whole.view(4, 6).t(), "part": whole[3:9], "overlap": whole[5:12], "steps": whole[::2],
        "wide": whole[:1].expand(5), "all": whole, "folded": whole.view(2, 12), "none": whole[:0],
        "one": torch.ones(()).expand(1),
    }.items():  # fmt: skip
        model.register_buffer(name, view)
    save(tmp_path / "views", model)
    found = load(tmp_path / "views", model)
    assert {n: x.tolist() for n, x in found.named_buffers()} == {n: x.tolist() for n, x in model.named_buffers()}
    assert inspect(tmp_path / "views").aliases == {}


def test_a_square_weight_and_its_transpose_are_two_tensors(tmp_path: Path) -> None:
    """Memory, shape and type are the same; only the strides tell them apart."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    model.register_buffer("turned", model.weight.data.t())
    save(tmp_path / "square", model)
    assert inspect(tmp_path / "square").aliases == {}
    found = load(tmp_path / "square", model)
    assert found.weight.tolist() == [[1, 2], [3, 4]]
    assert found.turned.tolist() == [[1, 3], [2, 4]]


def test_a_conjugate_is_saved_by_its_numbers(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("z", torch.tensor([1 + 2j, 3 - 1j]).conj())
    save(tmp_path / "z", model)
    assert load(tmp_path / "z", model).z.tolist() == [1 - 2j, 3 + 1j]


def test_ties_hold_and_are_stored_once(tmp_path: Path) -> None:
    model, x = network("tied")
    small = shrunk(model, x)
    found = check_round_trip(tmp_path / "tied", model, small, x)
    assert found.a.weight is found.b.weight
    assert found.again is found.stem
    saved = inspect(tmp_path / "tied")
    assert saved.aliases == {"b.weight": "a.weight", "again.weight": "stem.weight", "again.bias": "stem.bias"}
    assert saved.tensors.keys().isdisjoint(saved.aliases)
    small.bfloat16()
    save(tmp_path / "half", small)
    half = load(tmp_path / "half", model)
    check_same(half, small)
    assert half.a.weight is half.b.weight


def test_parameters_that_share_memory_only(tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = nn.Module()
        model.a = nn.Parameter(torch.arange(3.0))
        model.b = nn.Parameter(model.a.data)
        return model

    saved = make()
    save(tmp_path / "one", saved.double())  # double() copies them apart
    assert inspect(tmp_path / "one").aliases == {}
    save(tmp_path / "one", make())
    assert inspect(tmp_path / "one").aliases == {"b": "a"}
    found = load(tmp_path / "one", make())
    assert found.a.data_ptr() == found.b.data_ptr()
    assert found.a.tolist() == [0, 1, 2]


def test_buffers_outside_the_state_dict_are_cut_but_keep_the_models_numbers(tmp_path: Path) -> None:
    model, x = network("tied")
    small = shrunk(model, x)
    cut = deepcopy(model)
    recipe = Recipe(slices={"table": {0: torch.tensor([4, 1, 0])}, "scale": {0: torch.tensor([4, 1, 0])}})
    apply_recipe(cut, recipe)
    cut.sosp_recipes, cut.sosp_shapes = (recipe,), collect_shapes(model)
    save(tmp_path / "cut", cut)
    found = load(tmp_path / "cut", model)
    assert torch.equal(found.table, model.table[[4, 1, 0]])
    assert torch.equal(found.scale, model.scale[[4, 1, 0]])
    assert "table" not in inspect(tmp_path / "cut").tensors
    assert small.table.shape == model.table.shape


def test_modules_with_a_state_of_their_own(tmp_path: Path) -> None:
    class Counter(nn.Linear):
        steps = torch.tensor([3])

        def get_extra_state(self) -> Tensor:
            return self.steps

        def set_extra_state(self, state: Tensor) -> None:
            self.steps = state.clone()

    model = nn.Sequential(Counter(2, 2))
    model[0].steps = torch.tensor([7])
    save(tmp_path / "steps", model)
    assert load(tmp_path / "steps", nn.Sequential(Counter(2, 2)))[0].steps.item() == 7
    model[0].get_extra_state = lambda: {"steps": 7}
    with pytest.raises(CheckpointError, match=r"'0._extra_state' in the state dict is a dict; only tensors"):
        save(tmp_path / "steps", model)


# --- modes, hooks, devices, wrappers


@pytest.mark.parametrize("training", [False, True])
def test_the_mode_is_that_of_the_model_given(training: bool, tmp_path: Path) -> None:
    model, x = network("residual")
    save(tmp_path / "small", shrunk(model, x).train(not training))
    model.train(training)
    model.bn1.train(not training)
    found = load(tmp_path / "small", model)
    expected = {name: m.training for name, m in model.named_modules()}
    assert {name: m.training for name, m in found.named_modules() if name in expected} == expected


def test_frozen_parameters_and_hooks_are_those_of_the_model_given(tmp_path: Path) -> None:
    model, x = network("conv-bn")
    save(tmp_path / "small", shrunk(model, x))
    model.conv1.requires_grad_(False)
    seen: list[int] = []
    model.conv2.register_forward_hook(lambda *_: seen.append(1))
    found = load(tmp_path / "small", model)
    found(x)
    assert seen == [1]
    assert {n for n, p in found.named_parameters() if not p.requires_grad} == {"conv1.weight"}


def test_a_compiled_network_is_saved_by_its_own_names(tmp_path: Path) -> None:
    model, x = network("mlp")
    small = shrunk(model, x)
    save(tmp_path / "a", small)
    save(tmp_path / "b", torch.compile(small, backend="eager"))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    check_same(load(tmp_path / "b", torch.compile(model, backend="eager")), small, x)


def test_a_part_that_was_shrunk_is_refused_by_name(tmp_path: Path) -> None:
    model, x = network("mlp")
    with pytest.raises(
        CheckpointError, match=r"only its part 'module' was shrunk\. .* model\.get_submodule\('module'\)"
    ):
        save(tmp_path / "x", nn.DataParallel(shrunk(model, x)))
    assert not (tmp_path / "x").exists()


def test_a_masked_network_is_refused(tmp_path: Path) -> None:
    model, x = network("residual")
    small = shrunk(model, x)
    for net in (model, small):
        with pytest.raises(CheckpointError, match="the model is masked, which a checkpoint cannot store"):
            save(tmp_path / "x", sosp.masked(net, some(net, x, seed=3)))
    weights = sosp.Mask.from_removed(model, {"head.weight": [0]}, x, kind="weights")
    with pytest.raises(CheckpointError, match="the model is masked"):
        save(tmp_path / "x", sosp.masked(model, weights))


@pytest.mark.gpu
def test_devices_are_those_of_the_model_given(tmp_path: Path) -> None:
    model, x = network("residual")
    small = shrunk(model, x)
    save(tmp_path / "cpu", small)
    save(tmp_path / "gpu", deepcopy(small).cuda())
    assert (tmp_path / "cpu").read_bytes() == (tmp_path / "gpu").read_bytes()
    found = load(tmp_path / "cpu", deepcopy(model).cuda())
    assert {t.device.type for t in [*found.parameters(), *found.buffers()]} == {"cuda"}
    check_same(found.cpu(), small, x)


# --- what the file says


def test_inspect_needs_no_model(tmp_path: Path) -> None:
    model, x = network("residual")
    mask = some(model, x)
    small = sosp.shrink(model, mask, x, verify=False)
    save(str(tmp_path / "small.bin"), small, mask)
    saved = inspect(str(tmp_path / "small.bin"))
    assert saved.mask == mask
    assert saved.mask.layers == mask.layers
    assert (saved.mask.structures, saved.mask.chosen) == (mask.structures, mask.chosen)
    assert {n: t.tolist() for n, t in saved.mask.norms.items()} == {n: t.tolist() for n, t in mask.norms.items()}
    assert (saved.sosp, saved.torch) == (sosp.__version__, torch.__version__)
    assert (saved.module, saved.qualname) == ("torch.nn.modules.container", "Sequential")
    assert saved.original == {n: tuple(t.shape) for n, t in model.state_dict().items()}
    assert {n: t.shape for n, t in saved.tensors.items()} == {n: tuple(t.shape) for n, t in small.state_dict().items()}
    assert repr(saved.recipes) == repr(small.sosp_recipes)
    assert "Sequential" in repr(saved)
    check_same(load(tmp_path / "small.bin", model), small, x)


def test_masks_of_every_kind_come_back(tmp_path: Path) -> None:
    model, x = network("preact")
    weights = sosp.Mask.from_removed(model, {"conv.weight": [0, 7]}, x, kind="weights")
    norms = sosp.Mask.from_removed(model, {"conv": [0], "dense1.conv": [1]}, x)
    assert norms.norms
    for mask in (weights, norms, None):
        save(tmp_path / "m", model, mask)
        found = inspect(tmp_path / "m").mask
        assert found == mask
        assert mask is None or repr(vars(found)) == repr(vars(mask))


def test_every_field_of_the_records_is_in_the_file(tmp_path: Path) -> None:
    """A field added to a recipe, a placing, a mask or a layer must be added to the file as well."""
    model, x = network("residual")
    save(tmp_path / "x", shrunk(model, x), some(model, x))
    document = json.loads(document_of(tmp_path / "x"))
    assert list(document["recipes"][0]) == [f.name for f in fields(Recipe)]
    assert {f.name for f in fields(sosp.Mask)} == set(document["mask"])
    assert list(document["mask"]["layers"][0]) == [f.name for f in fields(Layer)]
    assert list(document) == [f.name for f in fields(Saved)]
    placings = [p for p in document["recipes"][0]["scatters"].values() if p]
    assert list(placings[0]) == [f.name for f in fields(ScatterIndex)]


def test_a_file_from_before_modules_were_bypassed(tmp_path: Path) -> None:
    model, x = network("residual")
    small = shrunk(model, x)
    save(tmp_path / "x", small)
    document = json.loads(document_of(tmp_path / "x"))
    assert document["recipes"][0].pop("bypassed") == {}
    reseal(tmp_path / "x", document)
    assert state(load(tmp_path / "x", model)) == state(small)


def test_any_reader_of_safetensors_finds_the_weights(tmp_path: Path) -> None:
    model, x = network("residual")
    small = shrunk(model, x)
    save(tmp_path / "small.safetensors", small)
    found = safetensors.torch.load_file(tmp_path / "small.safetensors")
    assert {n: bits(t) for n, t in found.items() if not n.startswith("sosp.index/")} == state(small)


def test_the_checksum_is_what_it_says(tmp_path: Path) -> None:
    """sha256 of the text behind it, then name, type, shape and bytes of every tensor, by name: computed by hand."""
    model, x = network("conv-bn")
    save(tmp_path / "x", shrunk(model, x), some(model, x))
    raw = (tmp_path / "x").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    text = header.pop("__metadata__")["sosp"]
    start = '{"format":1,"sha256":"'
    expected = hashlib.sha256(("{" + text[len(start) + 66 :]).encode())
    types = {"F64": "torch.float64", "I64": "torch.int64"}
    for name in sorted(header):
        a, b = header[name]["data_offsets"]
        shape = tuple(header[name]["shape"])
        expected.update(f"\0{name}\0{types[header[name]['dtype']]}\0{shape}\0".encode() + raw[8 + length :][a:b])
    assert text.startswith(f'{start}{expected.hexdigest()}",')
    assert json.loads(text)["format"] == 1


# --- writing: whole or not at all


def test_an_interrupted_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = network("mlp")
    path = tmp_path / "net.st"
    save(path, model)
    before = path.read_bytes()

    def half(tensors: Any, target: Path, metadata: Any) -> None:
        Path(target).write_bytes(b"half a file")
        raise KeyboardInterrupt

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    for where, what, error in [
        (file, ("save_file", half), KeyboardInterrupt),
        (file, ("save_file", lambda *a, **k: full()), CheckpointError),
        (os, ("replace", full), CheckpointError),
        (os, ("fsync", full), CheckpointError),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(where, *what)
            with pytest.raises(error):
                save(path, shrunk(model, x))
            with pytest.raises(error):
                save(tmp_path / "new.st", model)
        assert leftovers(tmp_path) == ["net.st"]
        assert path.read_bytes() == before


def test_the_file_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append("fsync"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append("replace"), replace(a, b)))
    save(tmp_path / "x", network("mlp")[0])
    assert events == ["fsync", "replace", "fsync"]  # the last one is the folder's


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CheckpointError, match=r"x: could not be written \(OSError: \[Errno 28\] No space left"):
        save(tmp_path / "x", network("mlp")[0])


def test_permissions_are_those_of_any_new_file(tmp_path: Path) -> None:
    save(tmp_path / "x", network("mlp")[0])
    (tmp_path / "plain").write_bytes(b"")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("x", "plain")]
    assert modes[0] == modes[1]


def test_a_link_stays_a_link_and_the_suffix_is_the_users(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    link = tmp_path / "link.anything"
    link.symlink_to(tmp_path / "folder" / "real.pt")
    save(link, network("mlp")[0])
    assert link.is_symlink()
    assert leftovers(tmp_path / "folder") == ["real.pt"]
    check_same(load(link, network("mlp")[0]), network("mlp")[0])


def test_equal_networks_give_equal_files(tmp_path: Path) -> None:
    model, x = network("residual")
    small, mask = shrunk(model, x), some(model, x)
    for name in ("a", "b"):
        save(tmp_path / name, small, mask)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_what_is_loaded_does_not_depend_on_the_file_any_more(tmp_path: Path) -> None:
    model, _ = network("mlp")
    save(tmp_path / "x", model)
    found = load(tmp_path / "x", model)
    with open(tmp_path / "x", "r+b") as opened:
        opened.write(b"\0" * (tmp_path / "x").stat().st_size)
    check_same(found, model)


def test_writing_where_nothing_can_be_written(tmp_path: Path) -> None:
    model, _ = network("mlp")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"missing/x: could not be written \(FileNotFoundError"):
        save(tmp_path / "missing" / "x", model)
    with pytest.raises(CheckpointError, match=r"file/x: could not be written \(NotADirectoryError"):
        save(tmp_path / "file" / "x", model)
    with pytest.raises(CheckpointError, match="already exists and is not a file"):
        save(tmp_path, model)
    with pytest.raises(CheckpointError, match="already exists and is not a file"):
        save("/dev/null", model)
    with pytest.raises(CheckpointError, match="could not be written"):
        save("a\0b", model)
    assert leftovers(tmp_path) == ["file"]
