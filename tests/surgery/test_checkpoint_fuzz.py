"""Whatever the bytes of a file: a CheckpointError, or exactly the network that was saved."""

import json
import os
import resource
import struct
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from checkpoints import bits, check_same, everything
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import sosp
from sosp.core import safetensors_files as file
from sosp.errors import CheckpointError
from sosp.graph.recipe import Recipe, ScatterIndex, apply_recipe, collect_shapes
from sosp.graph.records import Layer
from sosp.surgery.checkpoint import load, save
from sosp.surgery.checkpoint.model_record import DTYPES

Target = tuple[Path, nn.Module, nn.Module, Any]  # the file, the original network, the saved one, all of the original
SEEDS = st.integers(0, 2**32)
MEMORY = 256 * 2**20  # bytes that loading files of a few thousand may ask for on top


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A small network with scatters, groups, an empty layer, a mask and a tie, loaded under a limit on memory."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1, groups=2), nn.Conv2d(4, 2, 1)])
    model.register_buffer("table", torch.zeros(4), persistent=False)
    model[3].also = nn.Parameter(torch.zeros(2))
    model[3].bias = model[3].also
    small = deepcopy(model)
    index = torch.tensor
    recipe = Recipe(
        slices={"0.weight": {0: index([0, 2, 3])}, "0.bias": {0: index([0, 2, 3])}, "table": {0: index([1])}},
        grouped={"2.weight": (index([0, 1, 2, 3]), index([[0], [0], [1], [1]]))},
        sizes={"0": {"out_channels": 3}},
        scatters={"0": ScatterIndex(index([0, -1, 1, 2]), 1, 3)},
        passed=("1",),
    )
    apply_recipe(small, recipe)
    small.sosp_recipes, small.sosp_shapes = (recipe,), collect_shapes(model)
    mask = sosp.Mask("filters", (Layer("0", 4, 1, ("1",), 1.0, 2.0, 3.0),), {"0": index([1])}, 8, 1, {"1": index([1])})
    path = tmp_path_factory.mktemp("fuzz") / "net"
    save(path, small, mask)
    check_same(load(path, model), small)
    fsync, os.fsync = os.fsync, lambda handle: None  # thousands of files that nobody needs after a crash
    limit = resource.getrlimit(resource.RLIMIT_AS)
    if (pages := Path("/proc/self/statm")).exists():  # elsewhere without a limit
        size = int(pages.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, limit[1]))
    yield path, model, small, everything(model)
    resource.setrlimit(resource.RLIMIT_AS, limit)
    os.fsync = fsync


def fuzz(examples: int) -> Any:
    return settings(max_examples=examples, suppress_health_check=list(HealthCheck))


def attempt(target: Target, path: Path) -> nn.Module | None:
    """Load; None if that is refused, and not because memory ran out. The model given stays as it was."""
    _, model, _, before = target
    found, refusal = None, ""
    try:
        found = load(path, model)
    except CheckpointError as error:
        refusal = f"{error} {error.__cause__!r}"
    assert "alloc" not in refusal
    assert "MemoryError" not in refusal
    assert everything(model) == before
    return found


def check_bytes(target: Target, raw: bytes) -> None:
    """These bytes are refused, or hold exactly what was saved."""
    other = target[0].with_name("other")
    other.write_bytes(raw)
    found = attempt(target, other)
    if found is not None:
        check_same(found, target[2])


@fuzz(300)
@given(raw=st.binary(max_size=300))
def test_random_bytes(target: Target, raw: bytes) -> None:
    check_bytes(target, raw)
    check_bytes(target, struct.pack("<Q", len(raw)) + b"{" + raw)


def test_truncation_everywhere(target: Target) -> None:
    raw = target[0].read_bytes()
    header = 8 + int.from_bytes(raw[:8], "little")
    places = {
        *range(20),
        *range(0, header, 37),
        *range(header - 5, header + 5),
        *range(header, len(raw), 11),
        len(raw) - 1,
    }
    for length in sorted(places):
        check_bytes(target, raw[:length])
    with pytest.raises(CheckpointError):
        load(target[0].with_name("other"), target[1])


@fuzz(600)
@given(seed=SEEDS)
def test_changed_bytes(target: Target, seed: int) -> None:
    raw, random = bytearray(target[0].read_bytes()), Random(seed)
    for _ in range(random.choice([1, 1, 2, 4])):
        start = random.randrange(len(raw))
        new = random.randbytes(random.choice([1, 1, 4, 30]))
        raw[start : start + len(new) * random.choice([1, 1, 1, 0, 2])] = new  # in place, put in between, or shorter
    check_bytes(target, bytes(raw))


def test_every_byte_of_the_header_changed(target: Target) -> None:
    raw = target[0].read_bytes()
    for place in range(0, 8 + int.from_bytes(raw[:8], "little"), 3):
        check_bytes(target, raw[:place] + bytes([raw[place] ^ (1 << place % 7)]) + raw[place + 1 :])
    check_same(load(target[0], target[1]), target[2])


NASTY = [
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63 - 1, 2**63, 10**40, -(10**40), 0.5, -0.0, 1e308, float("nan"),
    float("inf"), "", "0", "x", "1", "2.weight", "0.bias", "__class__", "forward", "_modules", "in_channels", "\ud800",
    "\0", "x" * 5000, [], [0], [1, 1], [[0]], {}, {"0": 0}, {"": None}, {"0": {"0": 0}}, {"2": {"groups": 0}},
]  # fmt: skip


def places(document: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON document."""
    keys = list(document) if isinstance(document, dict) else range(len(document)) if isinstance(document, list) else ()
    return [place for key in keys for place in [(document, key), *places(document[key])]]


def twist(document: Any, random: Random) -> None:
    """Change one thing: a value, a key, a list's length, or the place of a value."""
    inner, key = random.choice(places(document))
    what = random.choice(["value", "value", "value", "drop", "other", "rename", "nest", "add"])
    nasty = deepcopy(random.choice(NASTY))
    if what == "value":
        inner[key] = nasty
    elif what == "drop":
        del inner[key]
    elif what == "other":
        source, place = random.choice(places(document))
        inner[key] = deepcopy(source[place])
    elif what == "nest":
        for _ in range(random.choice([1, 3, 50])):
            inner[key] = [inner[key]]
    elif isinstance(inner, dict):
        value = inner.pop(key) if what == "rename" else nasty
        inner[str(random.choice([*NASTY, *inner]))] = value
    else:
        inner.append(nasty)


def check_forged(target: Target, document: Any, tensors: dict[str, Tensor]) -> None:
    """With the right checksum: refused, or a model with the tensors of the file."""
    other = target[0].with_name("other")
    file.write_safetensors(other, json.dumps(document), tensors)
    found = attempt(target, other)
    if found is not None:
        mine = {name: bits(x.contiguous()) for name, x in found.state_dict().items()}
        theirs = {name: bits(x) for name, x in tensors.items() if not name.startswith("sosp.index/")}
        assert {name: x for name, x in mine.items() if name in theirs} == theirs
        assert set(mine.values()) == set(theirs.values())


@pytest.mark.slow
@fuzz(900)
@given(seed=SEEDS)
def test_forged_descriptions(target: Target, seed: int) -> None:
    text, tensors = file.read_safetensors(target[0])
    document, random = json.loads(text), Random(seed)
    for _ in range(random.choice([1, 1, 1, 2, 5])):
        twist(document, random)
    check_forged(target, document, tensors)


@fuzz(400)
@given(seed=SEEDS)
def test_forged_tensors(target: Target, seed: int) -> None:
    text, tensors = file.read_safetensors(target[0])
    document, random = json.loads(text), Random(seed)
    name, other = random.choice(sorted(tensors)), random.choice(sorted(tensors))
    tensors[name] = random.choice(FORGERIES)(tensors[name], random)
    if random.random() < 0.2:
        tensors[name] = tensors[other].clone()
    if random.random() < 0.5 and name in document["tensors"]:
        kind = str(tensors[name].dtype).removeprefix("torch.")
        document["tensors"][name].update(shape=list(tensors[name].shape), dtype=kind)
    if random.random() < 0.1:
        del tensors[name]
    check_forged(target, document, tensors)


def other_values(x: Tensor, random: Random) -> Tensor:
    values = [random.choice([-(2**63), -2, -1, 0, 1, 2, 3, 4, 5, 2**31, 2**62]) for _ in range(x.numel())]
    return torch.tensor(values).view(x.shape).to(x.dtype)


def other_shape(x: Tensor, random: Random) -> Tensor:
    return x.reshape(random.choice([(-1,), (1, -1), (-1, 1), (1, 1, -1)]))


def no_elements(x: Tensor, random: Random) -> Tensor:
    return x.new_empty(random.choice([(0,), (0, 2**62), (0, 2**31, 2**30), (5, 0)]))


def other_type(x: Tensor, random: Random) -> Tensor:
    return x.to(random.choice(list(DTYPES.values())))


def long(x: Tensor, random: Random) -> Tensor:
    """A short file that asks for much: so many rows of a weight, and as many columns, would take gigabytes."""
    return x.new_zeros(50_000)


FORGERIES = [other_values, other_values, other_values, other_shape, no_elements, other_type, long]
