"""The criteria that other papers rank filters by, each written out as its formula, filter by filter."""

from copy import deepcopy
from itertools import combinations

import torch
from torch import Tensor, nn

from . import network
from .losses import Loss, per_example
from .theta import Theta, width

Layers = dict[str, str | None]  # layer -> its own BatchNorm or None


# --- from weights alone


def filter_weights(model: nn.Module, layer: str) -> list[Tensor]:
    """The weights of each filter, flat, without its bias."""
    module = model.get_submodule(layer)
    W = module.weight.detach().double()
    if isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)):
        per_group = module.out_channels // module.groups
        rows = module.in_channels // module.groups
        return [
            W[(c // per_group) * rows : (c // per_group + 1) * rows, c % per_group].flatten()
            for c in range(module.out_channels)
        ]
    return [W[c].flatten() for c in range(width(module))]


def magnitudes(model: nn.Module, layers: Layers, p: int) -> Tensor:
    """``(sum_w |w|^p)^(1/p)`` of every filter: (S,)."""
    filters = [w for layer in layers for w in filter_weights(model, layer)]
    return torch.stack([sum(x.abs() ** p for x in w) ** (1 / p) for w in filters])


def distances(model: nn.Module, layers: Layers) -> Tensor:
    """``sum_{s'} |w_s - w_s'|`` over the filters of the same layer: (S,)."""
    found = []
    for layer in layers:
        filters = filter_weights(model, layer)
        found += [sum(((w - v) ** 2).sum().sqrt() for v in filters) for w in filters]
    return torch.stack(found)


def scales(model: nn.Module, layers: Layers) -> Tensor:
    """``|gamma_s|``: (S,)."""
    return torch.cat([model.get_submodule(norm).weight.detach().double().abs() for norm in layers.values()])


# --- from gradients


def gradient(model: nn.Module, inputs: Tensor, targets: Tensor, loss: Loss) -> dict[str, Tensor]:
    """``dL/dtheta`` of the mean loss, by parameter."""
    parameters = network.leaves(model)
    value = network.mean_loss(model, parameters, inputs, targets, loss)
    slopes = torch.autograd.grad(value, list(parameters.values()), materialize_grads=True)
    return dict(zip(parameters, slopes, strict=True))


def example_slopes(model: nn.Module, thetas: list[Theta], inputs: Tensor, targets: Tensor, loss: Loss) -> Tensor:
    """``theta_s . dl_n/dtheta``: (N, S), one example after the other."""
    T = network.matrix(model, thetas)
    rows = [gradient(model, inputs[n : n + 1], targets[n : n + 1], loss) for n in range(len(inputs))]
    return torch.stack([T @ network.flat(list(row.values())) for row in rows])


def activation_slopes(
    model: nn.Module, layers: Layers, gate: str, inputs: Tensor, targets: Tensor, loss: Loss
) -> Tensor:
    """``sum over positions of a dl_n/da`` of every feature map a, behind its norm or not: (N, S). No parameters."""
    copy = network.double(model)
    kept: list[list[Tensor]] = []
    for layer, norm in layers.items():
        seen: list[Tensor] = []
        kept.append(seen)
        place = copy.get_submodule(norm if gate == "features" and norm else layer)
        place.register_forward_hook(lambda m, args, a, seen=seen: _kept(a, seen))
    channels_last = [isinstance(copy.get_submodule(layer), nn.Linear) for layer in layers]
    rows = []
    for n in range(len(inputs)):
        for seen in kept:
            seen.clear()
        x = inputs[n : n + 1].double().repeat(2, *[1] * (inputs.ndim - 1))  # two: torch's batch norm of one
        y = targets[n : n + 1].repeat(2, *[1] * (targets.ndim - 1))
        (0.5 * per_example(copy(x), y, loss).sum()).backward()
        rows.append(
            torch.cat([_by_channel(seen, last) for seen, last in zip(kept, channels_last, strict=True)]),
        )
    return torch.stack(rows)


def _kept(a: Tensor, seen: list[Tensor]) -> Tensor:
    """A leaf-like copy whose gradient is kept; what the network does with it in place does not change it."""
    a = a * 1.0
    a.retain_grad()
    seen.append(a)
    return a * 1.0


def _by_channel(seen: list[Tensor], last: bool) -> Tensor:
    """``a da`` summed over everything but the channels, over all calls."""
    products = [(a.detach() * a.grad).movedim(-1 if last else 1, 0).flatten(1).sum(1) for a in seen]
    return sum(products)


def minibatch_squares(
    model: nn.Module, thetas: list[Theta], inputs: Tensor, targets: Tensor, loss: Loss, size: int
) -> Tensor:
    """``sum_b n_b/N (theta_s . dL_b/dtheta)^2``, L_b the mean loss of minibatch b: (S,)."""
    T = network.matrix(model, thetas)
    total = torch.zeros(len(thetas), dtype=torch.float64)
    for x, y in zip(inputs.split(size), targets.split(size), strict=True):
        g = network.flat(list(gradient(model, x, y, loss).values()))
        total += len(x) / len(inputs) * (T @ g) ** 2
    return total


def sensitivities(model: nn.Module, thetas: list[Theta], inputs: Tensor, targets: Tensor, loss: Loss) -> Tensor:
    """SNIP: ``|c_s| / sum_s' |c_s'|``, ``c_s = theta_s . dL/dtheta``."""
    g = gradient(model, inputs, targets, loss)
    c = [sum((theta[name] * g[name]).sum() for name in g).abs() for theta in thetas]
    return torch.stack(c) / sum(c)


def behind_softmax(model: nn.Module, thetas: list[Theta], inputs: Tensor, targets: Tensor) -> Tensor:
    """``1/N sum_n (1/p_n^2) dp_n dp_n^T`` between structures, p_n the probability of the label of n: (S, S).

    The Hessian of ``-log p`` without the second derivatives of p.
    """
    T = network.matrix(model, thetas)
    total = torch.zeros(len(thetas), len(thetas), dtype=torch.float64)
    for n in range(len(inputs)):
        parameters = network.leaves(model)
        p = network.outputs(model, parameters, inputs[n : n + 1]).softmax(1)[0, targets[n]]
        slopes = torch.autograd.grad(p, list(parameters.values()), materialize_grads=True)
        dp = T @ network.flat(slopes)
        total += torch.outer(dp, dp) / p.detach() ** 2 / len(inputs)
    return total


# --- from feature maps


def mean_ranks(model: nn.Module, layers: Layers, inputs: Tensor) -> Tensor:
    """The mean rank of ``relu(feature map behind its norm)``, map by map, summed over calls: (S,)."""
    found: list[list[Tensor]] = []
    copy = network.double(model)
    for layer, norm in layers.items():
        seen: list[Tensor] = []
        found.append(seen)
        copy.get_submodule(norm or layer).register_forward_hook(lambda m, args, a, seen=seen: seen.append(a.clone()))
    with torch.no_grad():
        copy(inputs.double())
    linear = [isinstance(copy.get_submodule(layer), nn.Linear) for layer in layers]
    return torch.cat([_ranks(seen, last) / len(inputs) for seen, last in zip(found, linear, strict=True)])


def _ranks(seen: list[Tensor], last: bool) -> Tensor:
    maps = [a.movedim(-1, 1) if last else a for a in seen]
    channels = maps[0].shape[1]
    ranks = [sum(_rank(a[n, c]) for a in maps for n in range(len(a))) for c in range(channels)]
    return torch.tensor(ranks, dtype=torch.float64)


def _rank(a: Tensor) -> int:
    """Singular values above ``eps max(sides)`` times the largest; a number, a row or a column is a matrix too."""
    matrix = a.clamp_min(0).reshape(a.shape[0] if a.ndim else 1, -1)
    values = torch.linalg.svdvals(matrix)
    return int((values > values.max() * max(matrix.shape) * torch.finfo(matrix.dtype).eps).sum())


# --- coupled groups, read where a channel is read


def consumer_slopes(
    model: nn.Module, consumers: list[list[str]], inputs: Tensor, targets: Tensor, loss: Loss
) -> list[Tensor]:
    """``sum over consumers and positions of a dl_n/da``, a what a layer is given: (N, channels) per list of layers."""
    copy = network.double(model)
    seen: dict[str, Tensor] = {}
    for name in {n for names in consumers for n in names}:
        copy.get_submodule(name).register_forward_pre_hook(lambda m, args, name=name: (_held(args[0], name, seen),))
    rows: list[list[Tensor]] = [[] for _ in consumers]
    for n in range(len(inputs)):
        x, y = inputs[n : n + 1].double().repeat(2, 1, 1, 1), targets[n : n + 1].repeat(2)
        (0.5 * per_example(copy(x), y, loss).sum()).backward()
        for row, names in zip(rows, consumers, strict=True):
            products = [(seen[name] * seen[name].grad).movedim(1, 0).flatten(1).sum(1) for name in names]
            row.append(sum(products).detach())
    return [torch.stack(row) for row in rows]


def _held(a: Tensor, name: str, seen: dict[str, Tensor]) -> Tensor:
    a = a * 1.0
    a.retain_grad()
    seen[name] = a
    return a


def output_elements(model: nn.Module, inputs: Tensor, layer: str) -> int:
    """Elements of one channel of a layer's output, for one example."""
    copy, found = deepcopy(model).eval(), []
    module = copy.get_submodule(layer)
    module.register_forward_hook(lambda m, args, y: found.append(y[0].numel() // width(m)))
    with torch.no_grad():
        copy(inputs[:2])
    return sum(found)


# --- choosing k of a layer


def change(first: Tensor, pairs: Tensor, chosen: tuple[int, ...]) -> float:
    """``-sum_s u_s + 1/2 sum_ss' S_ss'`` over what is chosen."""
    return float(sum(-first[s] + 0.5 * sum(pairs[s, t] for t in chosen) for s in chosen))


def best_choice(first: Tensor, pairs: Tensor, k: int) -> tuple[int, ...]:
    """The k of least change, by trying all."""
    return min(combinations(range(len(first)), k), key=lambda M: change(first, pairs, M))


def relaxed_choice(first: Tensor, pairs: Tensor, k: int, steps: int = 2000) -> Tensor:
    """The same over ``0 <= x <= 1``, ``sum x = k``, by many projected gradient steps."""
    x = torch.full_like(first, k / len(first))
    length = 1 / float(torch.linalg.matrix_norm(pairs, 2))
    for _ in range(steps):
        x = _projected(x - length * (pairs @ x - first), k)
    return x


def _projected(x: Tensor, k: int) -> Tensor:
    """The nearest point with ``0 <= x <= 1``, ``sum x = k``: ``clamp(x - m, 0, 1)`` for the m that makes the sum k.

    The sum is a polygon in m with corners at x_i and x_i - 1: find the side with k on it, and k on the side.
    """
    corners = torch.cat([x, x - 1]).sort().values
    sums = (x - corners[:, None]).clamp(0, 1).sum(1)  # falling
    i = int((sums >= k).sum()) - 1
    slope = (sums[i] - sums[i + 1]) / (corners[i + 1] - corners[i])
    return (x - corners[i] - (sums[i] - k) / slope).clamp(0, 1)
