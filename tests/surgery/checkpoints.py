"""What the tests of checkpoints share: networks, shrunk at random, and comparisons down to the last bit."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sosp
from networks import case
from sosp.core import safetensors_files as file
from sosp.surgery.checkpoint import load, save


class SqueezeExcite(nn.Module):
    """Depthwise, then a gate per channel computed from all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Conv2d(3, 6, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(6)
        self.depthwise = nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False)
        self.bn2 = nn.BatchNorm2d(6)
        self.squeeze, self.excite = nn.Conv2d(6, 2, 1), nn.Conv2d(2, 6, 1)
        self.project = nn.Conv2d(6, 4, 1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn2(self.depthwise(F.relu(self.bn1(self.expand(x))))))
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean((2, 3), keepdim=True)))))
        return self.head(self.project(x * gate).mean((2, 3)))


class Tied(nn.Module):
    """Two names for one weight, two for one layer, and buffers of every kind."""

    scale: Tensor
    table: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.b.weight = self.a.weight
        self.again = self.stem
        self.head = nn.Linear(6, 3)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 6))
        self.register_buffer("table", torch.linspace(-1, 1, 6) / 3, persistent=False)
        self.register_buffer("count", torch.tensor([3, 1]))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x)) * self.scale + self.table
        return self.head(F.relu(self.b(F.relu(self.a(x)))))


def squeeze_excite() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return SqueezeExcite().double().eval(), torch.randn(4, 3, 4, 4, dtype=torch.float64)


def tied() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Tied().eval(), torch.randn(4, 4)


def network(name: str) -> tuple[nn.Module, Tensor]:
    if name == "squeeze-excite":
        return squeeze_excite()
    if name == "tied":
        return tied()
    found = case(name)
    return found.model, found.inputs


def some(model: nn.Module, x: Tensor, seed: int = 0) -> sosp.Mask:
    """Each channel goes with probability one half; one of each layer stays. Layers that share a weight stay whole."""
    generator = torch.Generator().manual_seed(seed)
    found = sosp.find_structures(model, x, exclude=["a", "b"] if isinstance(model, Tied) else [])
    chosen = []
    for layer, ids in zip(found.layers, found.ids, strict=True):
        gone = torch.rand(layer.channels, generator=generator) < 0.5
        gone[int(torch.randint(layer.channels, (), generator=generator))] = False
        chosen.append(ids[gone])
    return sosp.Mask.from_structures(found, torch.cat(chosen))


def shrunk(model: nn.Module, x: Tensor, seed: int = 0) -> nn.Module:
    return sosp.shrink(model, some(model, x, seed), x, verify=False)


@torch.no_grad()
def other_weights(model: nn.Module) -> nn.Module:
    """The same network as its constructor would make it another time."""
    other = deepcopy(model)
    for x in [*other.parameters(), *(other.state_dict().values())]:
        x.fill_(0.25)
    return other


def bits(x: Tensor) -> tuple[Any, ...]:
    """Type, shape, strides and bytes."""
    flat = x.detach().clone(memory_format=torch.contiguous_format).view(-1)
    return x.dtype, tuple(x.shape), x.stride(), flat.view(torch.uint8).numpy().tobytes()


def state(model: nn.Module) -> dict[str, Any]:
    return {name: bits(x) for name, x in model.state_dict().items()}


def everything(model: nn.Module) -> dict[str, Any]:
    """All that loading could change in a model."""
    return {
        "state": state(model),
        "buffers": {name: bits(x) for name, x in model.named_buffers()},
        "grad": {name: p.requires_grad for name, p in model.named_parameters()},
        "modules": {name: (id(m), m.training, sorted(vars(m))) for name, m in model.named_modules()},
        "sizes": {n: {k: v for k, v in vars(m).items() if type(v) is int} for n, m in model.named_modules()},
        "hooks": {n: (len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()},
    }


def check_same(a: nn.Module, b: nn.Module, x: Tensor | None = None) -> None:
    """Bit-equal state, the same modules of the same sizes, and equal outputs in both modes."""
    assert state(a) == state(b)
    assert list(a.state_dict()) == list(b.state_dict())
    assert {n: t.tolist() for n, t in a.named_buffers()} == {n: t.tolist() for n, t in b.named_buffers()}
    assert {n: t.dtype for n, t in a.named_buffers()} == {n: t.dtype for n, t in b.named_buffers()}
    assert [(n, type(m), str(m)) for n, m in a.named_modules()] == [(n, type(m), str(m)) for n, m in b.named_modules()]
    assert everything(a)["sizes"] == everything(b)["sizes"]
    assert everything(a)["hooks"] == everything(b)["hooks"]
    if x is not None:
        for training in (False, True):
            mine, theirs = (deepcopy(m).train(training)(x.clone()) for m in (a, b))
            assert bits(mine) == bits(theirs)


def check_round_trip(path: Path, model: nn.Module, small: nn.Module, x: Tensor | None) -> nn.Module:
    """Into a network of other weights, which is left as it is; and once more from what was loaded."""
    given, before = other_weights(model), state(small)
    untouched = everything(given)
    save(path, small)
    found = load(path, given)
    assert everything(given) == untouched
    assert state(small) == before
    check_same(found, small, x)
    assert [p.requires_grad for p in found.parameters()] == [p.requires_grad for p in small.parameters()]
    again = path.with_name("again")
    save(again, found)
    assert again.read_bytes() == path.read_bytes()
    return found


def leftovers(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def document_of(path: Path) -> str:
    return file.read_safetensors(path)[0]


def reseal(path: Path, document: Any, tensors: dict[str, Tensor] | None = None) -> None:
    """The file with another description (and other tensors) and the right checksum, as a forger would write it."""
    text = document if isinstance(document, str) else json.dumps(document)
    file.write_safetensors(path, text, file.read_safetensors(path)[1] if tensors is None else tensors)
