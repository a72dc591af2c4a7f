"""The same rankings as Torch-Pruning's, where both compute the same thing on the same network."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sosp
from networks import case

CHAINS = ["conv-bn", "conv-nobn", "mlp", "conv1d"]


@pytest.fixture(scope="module")
def tp() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own
        return pytest.importorskip("torch_pruning", reason="Torch-Pruning is not installed: pip install torch-pruning")


def theirs(tp: Any, model: nn.Module, x: Tensor, layer: str, importance: Callable[[Any], Tensor]) -> Tensor:
    """Their scores of all channels of a layer, with what is coupled to it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = tp.DependencyGraph().build_dependency(model, example_inputs=x[:1])
        module = model.get_submodule(layer)
        linear = isinstance(module, nn.Linear)
        prune = tp.prune_linear_out_channels if linear else tp.prune_conv_out_channels
        channels = module.out_features if linear else module.out_channels
        return importance(graph.get_pruning_group(module, prune, idxs=list(range(channels))))


def ours(model: nn.Module, x: Tensor, method: str, **options: Any) -> dict[str, Tensor]:
    found = sosp.find_structures(model, x[:2], **options)
    scores = sosp.score(model, None, method=method, structures=found).scores
    return {layer.name: scores[ids] for layer, ids in zip(found.layers, found.ids, strict=True)}


def same_order(a: Tensor, b: Tensor) -> bool:
    """And no ties that would hide a difference."""
    return a.argsort().tolist() == b.argsort().tolist() and len(a.unique()) == len(a)


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("name", CHAINS)
def test_magnitude(name: str, p: int, tp: Any) -> None:
    c = case(name)
    found = ours(c.model, c.inputs, f"magnitude-l{p}")
    for layer in c.norms:
        wanted = theirs(tp, c.model, c.inputs, layer, tp.importance.MagnitudeImportance(p, "first", None))
        assert same_order(found[layer], wanted)
        assert torch.allclose(found[layer] ** p, wanted.double(), rtol=1e-5)  # they add up in single precision


@pytest.mark.parametrize("p", [1, 2])
def test_magnitude_of_coupled_channels(p: int, tp: Any) -> None:
    """The sum over the layers that make a channel; theirs can be told to leave out the layers that read it."""
    c = case("residual")
    found = ours(c.model, c.inputs, f"magnitude-l{p}", groups="coupled")["conv1"]
    rows = [c.model.get_submodule(n).weight.flatten(1).norm(p, dim=1) for n in ("conv1", "block1.conv2")]
    assert torch.allclose(found, sum(rows).detach())

    def producers(group: Any) -> Tensor:
        made = [(dep, idxs) for dep, idxs in group if dep.handler == tp.prune_conv_out_channels]
        return sum(dep.layer.weight.detach()[idxs].flatten(1).norm(p, dim=1) for dep, idxs in made)

    assert torch.allclose(found, theirs(tp, c.model, c.inputs, "conv1", producers))


@pytest.mark.parametrize("name", ["conv-bn", "conv1d", "residual"])
def test_batch_norm_scale(name: str, tp: Any) -> None:
    c = case(name)
    found = ours(c.model, c.inputs, "slimming", groups="coupled")
    for layer in c.norms:
        wanted = theirs(tp, c.model, c.inputs, layer, tp.importance.BNScaleImportance("sum", None))
        assert same_order(found[layer], wanted)
        assert torch.allclose(found[layer], wanted.double(), rtol=1e-5)


@pytest.mark.parametrize("name", CHAINS)
def test_fpgm(name: str, tp: Any) -> None:
    """Theirs takes the distances between absolute weights: with positive weights that is no difference."""
    c = case(name)
    with torch.no_grad():
        for layer in c.norms:
            c.model.get_submodule(layer).weight.abs_()
    found = ours(c.model, c.inputs, "fpgm")
    for layer in c.norms:
        wanted = theirs(tp, c.model, c.inputs, layer, tp.importance.FPGMImportance(1, "first", None))
        assert same_order(found[layer], wanted)
        assert torch.allclose(found[layer], wanted.double(), rtol=1e-5)


def test_first_order_on_one_batch(tp: Any) -> None:
    """``|sum_w w g|`` of a filter without a bias: SNIP before it is normalised."""
    c = case("conv-bn")
    found = sosp.score(c.model, (c.inputs, c.targets), method="snip", structures=None)
    nn.functional.cross_entropy(c.model(c.inputs), c.targets).backward()
    taylor = tp.importance.TaylorImportance("first", None, multivariable=True)
    wanted = theirs(tp, c.model, c.inputs, "conv1", taylor)
    first = found.scores[:4]
    assert same_order(first, wanted)
    assert torch.allclose(first / first.sum(), wanted.double() / wanted.double().sum(), rtol=1e-5)
