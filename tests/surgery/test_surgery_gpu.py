"""Surgery where the network is on a GPU: everything new is there too, and it computes the same."""

import pytest
import torch
from torch import nn

import sosp
from networks import case, to_score

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

EXACT = 1e-9  # float64: sums of fewer terms, in another order


def some(model: nn.Module, inputs: torch.Tensor) -> sosp.Mask:
    """A third of every layer."""
    found = sosp.find_structures(model, inputs)
    removed = {layer.name: list(range(0, layer.channels - 1, 3)) for layer in found.layers}
    return sosp.Mask.from_removed(model, removed, inputs)


@pytest.mark.parametrize("name", to_score())
def test_shrunk_on_the_gpu_computes_what_masked_computes(name: str) -> None:
    c = case(name)
    model, inputs = c.model.cuda(), c.inputs.cuda()
    mask = some(model, inputs)
    small, masked = sosp.shrink(model, mask, inputs), sosp.masked(model, mask)
    assert all(x.is_cuda for x in [*small.parameters(), *small.buffers()])
    for training in (False, True):
        mine, theirs = small.train(training)(inputs), masked.train(training)(inputs)
        assert torch.allclose(mine, theirs, rtol=EXACT, atol=EXACT * theirs.abs().max().item())


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:TensorFloat32 tensor cores:UserWarning")
def test_a_compiled_shrunk_network_computes_the_same() -> None:
    c = case("residual")
    model, inputs = c.model.float().cuda(), c.inputs.float().cuda()
    small = sosp.shrink(model, some(model, inputs), inputs).eval()
    with torch.no_grad():
        assert torch.allclose(torch.compile(small)(inputs), small(inputs), rtol=1e-4, atol=1e-5)


def test_latency_reads_the_clock_of_the_gpu() -> None:
    c = case("residual")
    found = sosp.latency(c.model.cuda(), c.inputs.cuda(), runs=5)
    assert found.device.startswith("cuda")
    assert 0 < found.low <= found.median <= found.high
