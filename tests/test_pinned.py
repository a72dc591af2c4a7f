"""What cannot get narrower is reported: the layers, the operation, and the line in the user's code."""

from pathlib import Path
from types import ModuleType

import pytest

import sosp
from shrinking import case, convolutions, mixing, movement, norms, tokens


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


@pytest.mark.parametrize("name", ["mlp", "resnet", "densenet", "inverted-residual", "flatten"])
def test_where_everything_can_be_followed_no_layer_is_pinned(name: str) -> None:
    c = case(name)
    flow = sosp.trace(c.model, c.example)
    assert [record for record in flow.pinned if set(record.layers) & set(c.layers)] == []
