"""K-FAC, filter-wise OBD and EigenDamage by hand: patches by loops over positions, gradients one example at a time."""

import itertools
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Ends = Callable[[Tensor], list[Tensor]]  # the logits of one example (D,) -> scalars whose slopes are squared and summed


@dataclass(frozen=True)
class Call:
    """One call of a layer in one example: what it saw at each position, what it gave, and the slopes there."""

    seen: Tensor  # (T, inputs), the patches in the order of weight.flatten(1)
    given: Tensor  # (T, channels)
    slopes: list[Tensor]  # of every end: (T, channels)


def sampled(label: int) -> Ends:
    """``log p(label)``: what the Fisher has for a label drawn from the model, or for the data's own."""
    return lambda f: [f.log_softmax(0)[label]]


def expected(f: Tensor) -> list[Tensor]:
    """``sqrt(p_c) log p(c)`` with p_c held fixed: their squared slopes sum to the mean over labels drawn from p."""
    return [p.sqrt() * log for p, log in zip(f.softmax(0).detach(), f.log_softmax(0), strict=True)]


def calls(model: nn.Module, name: str, inputs: Tensor, ends: list[Ends]) -> list[list[Call]]:
    """For every example, every call of the layer."""
    model = deepcopy(model).double().eval()
    found: list[tuple[Tensor, Tensor]] = []

    def hook(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        output = output.detach() + 0 * args[0].sum() if not output.requires_grad else output
        found.append((args[0].detach().clone(), output))
        return output.clone()  # an in-place ReLU behind the layer writes there

    layer = model.get_submodule(name)
    layer.register_forward_hook(hook)
    logits = model(inputs.double().clone().requires_grad_())
    outputs = [output for _, output in found]
    examples = []
    for n, end in enumerate(ends):
        slopes = [
            torch.autograd.grad(e, outputs, retain_graph=True, materialize_grads=True, allow_unused=True)
            for e in end(logits[n])
        ]
        examples.append(
            [
                Call(patches(layer, x[n]), positions(layer, z.detach()[n]), [positions(layer, s[i][n]) for s in slopes])
                for i, (x, z) in enumerate(found)
            ]
        )
    return examples


def positions(layer: nn.Module, z: Tensor) -> Tensor:
    """(T, channels) of one example's output: channels first behind a convolution, last behind a linear layer."""
    if isinstance(layer, nn.Linear):
        return z.reshape(-1, z.shape[-1])
    return torch.stack([z[(slice(None), *t)] for t in itertools.product(*map(range, z.shape[1:]))])


def patches(layer: nn.Module, x: Tensor) -> Tensor:
    """(T, inputs) that one example's output positions are computed from; zero beyond the border. Groups: all inputs."""
    if isinstance(layer, nn.Linear):
        return x.reshape(-1, x.shape[-1])
    space = range(len(layer.kernel_size))
    length = [
        (x.shape[1 + d] + 2 * layer.padding[d] - layer.dilation[d] * (layer.kernel_size[d] - 1) - 1) // layer.stride[d]
        + 1
        for d in space
    ]
    rows = []
    for t in itertools.product(*map(range, length)):
        row = []
        for c in range(x.shape[0]):
            for tap in itertools.product(*map(range, layer.kernel_size)):
                at = [t[d] * layer.stride[d] + tap[d] * layer.dilation[d] - layer.padding[d] for d in space]
                inside = all(0 <= a < x.shape[1 + d] for d, a in enumerate(at))
                row.append(x[(c, *at)] if inside else x.new_zeros(()))
        rows.append(torch.stack(row))
    return torch.stack(rows)


def factors(examples: list[list[Call]], bias: bool) -> tuple[Tensor, Tensor]:
    """``A = E_nt[a a^T]``, with a 1 behind a for the bias, and ``G = E_n[sum_t g g^T]``."""
    A, G, count = 0.0, 0.0, 0
    for call in itertools.chain(*examples):
        for a in call.seen:
            a = torch.cat([a, a.new_ones(1)]) if bias else a
            A, count = A + torch.outer(a, a), count + 1
        for slopes in call.slopes:
            for g in slopes:
                G = G + torch.outer(g, g)
    return A / count, G / len(examples)


def channels(A: Tensor, width: int) -> Tensor:
    """The mean over the taps of the blocks on the diagonal of A, without a bias: (c_in, c_in)."""
    taps = len(A) // width
    blocks = [A[tap : width * taps : taps, tap : width * taps : taps] for tap in range(taps)]
    return sum(blocks) / taps


def rows_of(layer: nn.Module) -> Tensor:
    """(channels, inputs) the weight, and the bias behind it."""
    w = layer.weight.detach().double().flatten(1)
    return w if layer.bias is None else torch.cat([w, layer.bias.detach().double()[:, None]], 1)


def damage(layer: nn.Module, A: Tensor, G: Tensor, structure: list[int]) -> Tensor:
    """``1/2 theta^T (G (x) A) theta`` with the full Kronecker product, theta the rows of the structure."""
    theta = torch.zeros_like(rows_of(layer))
    theta[structure] = rows_of(layer)[structure]
    return 0.5 * theta.flatten() @ torch.kron(G, A) @ theta.flatten()


def diagonal_damage(model: nn.Module, name: str, inputs: Tensor, ends: list[Ends]) -> Tensor:
    """(channels,) ``1/2 sum_j theta_j^2 E_n[(d end_n / d theta_j)^2]``, from the gradient of the parameters."""
    model = deepcopy(model).double().eval()
    parameters = list(model.get_submodule(name).parameters())
    logits = model(inputs.double())
    total = torch.zeros(len(parameters[0]), dtype=torch.float64)
    for n, end in enumerate(ends):
        for e in end(logits[n]):
            slopes = torch.autograd.grad(e, parameters, retain_graph=True)
            for p, slope in zip(parameters, slopes, strict=True):
                total += (p.detach() * slope).square().reshape(len(p), -1).sum(1)
    return 0.5 * total / len(ends)


def rotated(weight: Tensor, A: Tensor, G: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``W'`` tap by tap, and what each of its rows and columns costs: ``1/2 S_G[i] W'_ij^2 S_A[j]`` entry by entry."""
    S_A, U_A = torch.linalg.eigh(A)
    S_G, U_G = torch.linalg.eigh(G)
    W = weight.detach().double().reshape(*weight.shape[:2], -1)
    core = torch.stack([U_G.T @ W[..., tap] @ U_A for tap in range(W.shape[2])], 2)
    rows, columns = torch.zeros(len(G), dtype=W.dtype), torch.zeros(len(A), dtype=W.dtype)
    for i, j, tap in itertools.product(*map(range, core.shape)):
        cost = 0.5 * S_G[i] * core[i, j, tap] ** 2 * S_A[j]
        rows[i] += cost
        columns[j] += cost
    return core.reshape(weight.shape), rows, columns


def projected(weight: Tensor, A: Tensor, G: Tensor, rows: list[int], columns: list[int]) -> Tensor:
    """The weight whose rotated rows and columns of these numbers are set to zero, rotated back."""
    U_A, U_G = torch.linalg.eigh(A)[1], torch.linalg.eigh(G)[1]
    core = rotated(weight, A, G)[0].clone()
    core[rows] = 0
    core[:, columns] = 0
    W = core.reshape(*weight.shape[:2], -1)
    back = torch.stack([U_G @ W[..., tap] @ U_A.T for tap in range(W.shape[2])], 2)
    return back.reshape(weight.shape)
