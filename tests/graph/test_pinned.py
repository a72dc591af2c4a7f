"""What cannot get narrower is reported: the layers, the operation, and the line in the user's code."""

import inspect
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import sosp
from networks import case, convolutions, mixing, movement, norms, tokens


def line_of(module: ModuleType, text: str) -> str:
    """``file.py:line`` of the only line that contains ``text``."""
    file = Path(str(module.__file__))
    lines = [number for number, line in enumerate(file.read_text().splitlines(), 1) if text in line]
    assert len(lines) == 1, text
    return f"{file.name}:{lines[0]}"


PINNED = [  # case -> a layer whose channels are pinned, and the line in the user's code that does it
    ("flatten-constant", "features.3", convolutions, "view(-1, 5 * 2 * 2)"),
    ("shuffle-constant", "conv1", movement, "view(b, 2, 4, h, w)"),
    ("stored-size", "conv", tokens, ".view(x.shape[0], self.hidden_dim)"),
    ("cumsum", "conv1", mixing, "x.cumsum(1)"),
    ("softmax-channels", "conv1", mixing, "F.softmax(x, dim=1)"),
    ("rmsnorm", "embed", norms, "torch.rsqrt(x.pow(2)"),
]


@pytest.mark.parametrize(("name", "layer", "file", "text"), PINNED)
def test_what_is_pinned_is_reported_with_its_line(name: str, layer: str, file: ModuleType, text: str) -> None:
    c = case(name)
    flow = sosp.trace(c.model, c.example)
    where = line_of(file, text)
    assert where in [record.where for record in flow.pinned if layer in record.layers]
    assert layer in str(flow)
    assert where in str(flow)


@pytest.mark.parametrize("name", ["mlp-plain", "resnet", "densenet", "inverted-residual", "flatten"])
def test_where_everything_can_be_followed_no_layer_is_pinned(name: str) -> None:
    c = case(name)
    flow = sosp.trace(c.model, c.example)
    assert [record for record in flow.pinned if set(record.layers) & set(c.layers)] == []


class Watched(nn.Module):
    """Beside its output it keeps what probes say of it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 12), nn.Linear(12, 5)
        self.probe = nn.Sequential(nn.Linear(12, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        z = self.body(x).relu()
        self.seen = self.probe(z)
        return self.head(z)


@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.6])
def test_what_is_computed_beside_the_output_stays(ratio: float) -> None:
    torch.manual_seed(0)
    model, x = Watched().eval(), torch.randn(30, 8)
    found = sosp.prune(model, (x, torch.arange(30) % 5), ratio=ratio, repair=False)
    masked, params = sosp.masked(model, found.mask), sum(p.numel() for p in found.model.parameters())
    torch.testing.assert_close(found.model(x), masked(x))
    torch.testing.assert_close(found.model.seen, masked.seen)
    assert (found.model.probe[0].in_features, found.model.probe[0].out_features) == (12 - found.mask.chosen, 6)
    assert sosp.count(model, x[:2], found.mask).params == found.cost_after.params == params


class Returns(nn.Module):
    """Returns in one of two places, and calls others on the way."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first, self.body = first, Watched()

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        if self.first:
            return y  # first
        if y.dim() > 1:
            y = y.relu()
        return y  # second


@pytest.mark.parametrize("first", [True, False])
def test_what_is_returned_is_reported_where_forward_returns(first: bool) -> None:
    flow = sosp.trace(Returns(first), torch.randn(4, 8))
    (record,) = (r for r in flow.pinned if r.op == "return")
    lines, start = inspect.getsourcelines(Returns)
    marked = next(i for i, line in enumerate(lines) if line.rstrip().endswith("# first" if first else "# second"))
    assert record.where == f"test_pinned.py:{start + marked}"


def test_what_is_returned_by_a_network_of_torchs_own() -> None:
    plain = sosp.trace(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2)), torch.randn(4, 8))
    assert [r.where for r in plain.pinned] == ["Sequential.forward"]
