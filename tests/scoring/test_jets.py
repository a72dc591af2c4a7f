"""Jets: every rule against double backward through torch's own operation, and what they refuse to follow."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sosp.scoring.jets import Gate, Jet, UnsupportedError, apply_gate
from sosp.scoring.jets.fused_ops import FrozenConv, join_adjacent, plan_convolution, sum_per_channel
from sosp.scoring.jets.jet import check_forward_rule

EXACT = 1e-12
Op = Callable[[Tensor], Tensor]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


W = draw(3, 4, 3, 3, seed=3)
V = draw(5, 6, seed=4)
MEAN, VAR, GAMMA, BETA = draw(4, seed=5), draw(4, seed=6).abs() + 0.5, draw(4, seed=7), draw(4, seed=8)
Y = torch.tensor([0, 3, 1])
BLIND = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 1, 1]]).bool()  # the second query may look nowhere
ADDED = draw(3, 3, seed=10).masked_fill(~BLIND & torch.tensor([[True], [False], [True]]), -torch.inf)
with torch.random.fork_rng(devices=[]):
    torch.manual_seed(0)
    ATTENTION = torch.nn.MultiheadAttention(4, 2, batch_first=True).double().eval().requires_grad_(False)

# name -> (an operation on a tensor of this shape, the shape)
OPS: dict[str, tuple[Op, tuple[int, ...]]] = {
    "conv": (lambda x: F.conv2d(x, W, draw(3), stride=2, padding=1), (2, 4, 5, 5)),
    "conv, grouped": (lambda x: F.conv2d(x, W[:2, :2], groups=2, dilation=2), (2, 4, 6, 6)),
    "conv, same padding": (lambda x: F.conv2d(x, W, padding="same"), (2, 4, 5, 5)),
    "conv, no batch": (lambda x: F.conv2d(x, W), (4, 5, 5)),
    "conv transposed": (lambda x: F.conv_transpose2d(x, W.transpose(0, 1), draw(3), stride=2), (2, 4, 3, 3)),
    "linear": (lambda x: F.linear(x, V, draw(5)), (3, 6)),
    "batch norm": (lambda x: F.batch_norm(x, MEAN, VAR, GAMMA, BETA), (2, 4, 3, 3)),
    "batch norm, 2d": (lambda x: F.batch_norm(x, MEAN, VAR), (5, 4)),
    "batch norm twice": (lambda x: F.batch_norm(F.batch_norm(x, MEAN, VAR), MEAN, VAR, GAMMA), (2, 4, 3, 3)),
    "relu": (F.relu, (3, 4)),
    "relu in place": (lambda x: F.relu(x * 1, inplace=True), (3, 4)),
    "relu, method": (lambda x: x.relu(), (3, 4)),
    "relu6": (lambda x: F.relu6(3 * x), (3, 4)),
    "add itself": (lambda x: x + x, (3, 4)),
    "add to pending": (lambda x: F.relu(F.batch_norm(x, MEAN, VAR, GAMMA, BETA) + x * x), (2, 4, 3, 3)),
    "add two pending": (lambda x: F.batch_norm(x, MEAN, VAR) + F.batch_norm(x * x, MEAN, VAR, GAMMA), (2, 4, 3, 3)),
    "add a constant": (lambda x: x + 1.5 + draw(4), (3, 4)),
    "add scaled": (lambda x: torch.add(x, x * x, alpha=2), (3, 4)),
    "add broadcast": (lambda x: x + (x * x)[:, :1], (3, 4)),
    "subtract": (lambda x: 1 - x - x * x, (3, 4)),
    "in-place add": (lambda x: (x * 2).add_(x * x), (3, 4)),
    "in-place multiply": (lambda x: (x * 2).mul_(x), (3, 4)),
    "multiply": (lambda x: x * x * 0.5, (3, 4)),
    "divide": (lambda x: 1 / (x * x + 1), (3, 4)),
    "softmax": (lambda x: x.softmax(-1), (3, 4)),
    "log softmax": (lambda x: F.log_softmax(x, dim=1), (3, 4)),
    "cross entropy": (lambda x: F.cross_entropy(x, Y, reduction="none"), (3, 4)),
    "cross entropy, mean": (lambda x: F.cross_entropy(x, Y), (3, 4)),
    "cross entropy, smoothed": (lambda x: F.cross_entropy(x, Y, label_smoothing=0.2), (3, 4)),
    "cross entropy, soft": (lambda x: F.cross_entropy(x, draw(3, 4).softmax(1), reduction="sum"), (3, 4)),
    "cross entropy, pixels": (lambda x: F.cross_entropy(x, Y.view(3, 1, 1).expand(3, 2, 2)), (3, 4, 2, 2)),
    "layer norm": (lambda x: F.layer_norm(x, (4,), GAMMA, BETA), (3, 4)),
    "layer norm, bare": (lambda x: F.layer_norm(x, (2, 4)), (3, 2, 4)),
    "group norm": (lambda x: F.group_norm(x, 2, GAMMA, BETA), (2, 4, 3, 3)),
    "gelu": (F.gelu, (3, 4)),
    "silu": (F.silu, (3, 4)),
    "silu in place": (lambda x: F.silu(x * 1, inplace=True), (3, 4)),
    "softplus": (F.softplus, (3, 4)),
    "sigmoid": (torch.sigmoid, (3, 4)),
    "tanh": (torch.tanh, (3, 4)),
    "hardswish": (F.hardswish, (3, 4)),
    "leaky relu": (lambda x: F.leaky_relu(x, 0.1), (3, 4)),
    "elu": (F.elu, (3, 4)),
    "max pool": (lambda x: F.max_pool2d(x * x, 2), (2, 3, 4, 4)),
    "max pool, padded": (lambda x: F.max_pool2d(x, 3, stride=2, padding=1, ceil_mode=True), (2, 3, 5, 5)),
    "max pool 1d": (lambda x: F.max_pool1d(x, 2), (2, 3, 4)),
    "adaptive max pool": (lambda x: F.adaptive_max_pool2d(x, 2), (2, 3, 4, 4)),
    "average pool": (lambda x: F.avg_pool2d(x * x, 2), (2, 3, 4, 4)),
    "adaptive average pool": (lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1), (2, 3, 4, 4)),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (2, 3, 2, 2)),
    "interpolate, nearest": (lambda x: F.interpolate(x, scale_factor=2), (2, 3, 2, 2)),
    "pad": (lambda x: F.pad(x, (1, 0, 2, 1)), (2, 3, 2, 2)),
    "pad with ones": (lambda x: F.pad(x, (1, 0), value=1.0) * 2, (2, 3)),
    "pad, reflect": (lambda x: F.pad(x, (1, 1), mode="reflect"), (2, 2, 4)),
    "cat": (lambda x: torch.cat([x, x * x, draw(3, 2)], 1), (3, 4)),
    "stack": (lambda x: torch.stack([x, x * x]), (3, 4)),
    "chunk": (lambda x: (lambda a, b: a * b)(*x.chunk(2, 1)), (3, 4)),
    "split": (lambda x: torch.split(x, [1, 3], dim=1)[1] ** 2, (3, 4)),
    "iterate": (lambda x: torch.stack([row * row for row in x]), (3, 4)),
    "index": (lambda x: x[:, 1:3] * x[:, [0, 1]], (3, 4)),
    "view": (lambda x: x.view(2, -1).t() * 2, (2, 3, 2)),
    "permute": (lambda x: x.permute(2, 0, 1).contiguous().view(2, -1), (2, 3, 2)),
    "mean": (lambda x: (x * x).mean((1, 2)), (2, 3, 2)),
    "matmul": (lambda x: x @ x.transpose(-1, -2), (2, 3, 4)),
    "einsum": (lambda x: torch.einsum("nij,nkj->nik", x, x), (2, 3, 4)),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x * 2, x + 1), (2, 2, 3, 4)),
    "attention, causal": (lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), (2, 2, 3, 4)),
    "attention, masked": (
        lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=draw(3, 3) > -0.5, scale=0.3), (2, 2, 3, 4)),
    "attention, grouped queries": (
        lambda x: F.scaled_dot_product_attention(x, x[:, :2], x[:, :2], enable_gqa=True), (2, 4, 3, 2)),
    "attention, blind": (
        lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=BLIND), (2, 2, 3, 4)),
    "attention, added mask": (
        lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=ADDED), (2, 2, 3, 4)),
    "multi-head attention": (lambda x: ATTENTION(x, x, x)[0], (2, 3, 4)),
    "softmax, no dimension named": (lambda x: torch.nn.Softmax(dim=None)(x), (2, 3, 4)),
    "log softmax, no dimension named": (lambda x: torch.nn.LogSoftmax(dim=None)(x), (3, 4)),
    "hardsigmoid": (lambda x: F.hardsigmoid(3 * x), (3, 4)),
    "glu": (lambda x: F.glu(x, 1), (3, 4)),
    "mse loss": (lambda x: F.mse_loss(x, draw(3, 4), reduction="none"), (3, 4)),
    "mse loss, mean": (lambda x: F.mse_loss(x, draw(3, 4)), (3, 4)),
    "dropout in place on a view": (lambda x: F.dropout((x * 1).view(4, 3), training=False, inplace=True) * 2, (3, 4)),
    "norm": (lambda x: x / x.norm(dim=1, keepdim=True), (3, 4)),
    "power": (lambda x: (x * x).pow(1.5), (3, 4)),
    "clamp": (lambda x: x.clamp(-0.5, 0.5), (3, 4)),
    "where": (lambda x: torch.where(x > 0, x * x, x), (3, 4)),
    "masked fill": (lambda x: (x * x).masked_fill(draw(3, 4) > 0, 0.0), (3, 4)),
    "dropout, eval": (lambda x: F.dropout(x, 0.5, training=False) * x, (3, 4)),
    "prelu": (lambda x: F.prelu(x, GAMMA), (3, 4)),
    "logsumexp": (lambda x: x.logsumexp(1), (3, 4)),
}  # fmt: skip


def curvature_by_double_backward(op: Op, x: Tensor, t: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """``d/dx <w, f(x)>`` and its derivative along t, both by torch's reverse mode."""
    x = x.clone().requires_grad_()
    # Written out once more, since torch has no second derivative of its own hard sigmoid.
    op = (lambda x: (3 * x / 6 + 0.5).clamp(0, 1)) if op is OPS["hardsigmoid"][0] else op
    with sdpa_kernel([SDPBackend.MATH]):  # the only one that can be differentiated twice
        (slope,) = torch.autograd.grad((op(x) * w).sum(), x, create_graph=True)
    if not slope.requires_grad:
        return slope, torch.zeros_like(x)
    (moved,) = torch.autograd.grad((slope * t).sum(), x, allow_unused=True)
    return slope, torch.zeros_like(x) if moved is None else moved


def through_jets(op: Op, x: Tensor, t: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    x, t = x.clone().requires_grad_(), t.clone().requires_grad_()
    out = op(Jet(x * 1, t * 1))
    assert isinstance(out, Jet)
    assert out.tangent is not None
    found = torch.autograd.grad((out.tangent * w).sum(), (t, x), allow_unused=True)
    return tuple(torch.zeros_like(x) if f is None else f for f in found)  # type: ignore[return-value]


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.parametrize("name", list(OPS))
def test_the_rule_of_an_operation_is_its_second_derivative(name: str) -> None:
    op, shape = OPS[name]
    x, t = draw(*shape, seed=1), draw(*shape, seed=2)
    w = draw(*op(x).shape, seed=9)
    try:
        slope, moved = through_jets(op, x, t, w)
    except UnsupportedError:
        pytest.fail(f"{name}: jets refuse it")
    wanted_slope, wanted_moved = curvature_by_double_backward(op, x, t, w)
    assert torch.allclose(slope, wanted_slope, rtol=EXACT, atol=EXACT)
    assert torch.allclose(moved, wanted_moved, rtol=EXACT, atol=EXACT)


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.parametrize("name", list(OPS))
def test_a_jet_without_tangent_has_the_value_and_the_gradient(name: str) -> None:
    op, shape = OPS[name]
    x = draw(*shape, seed=1).requires_grad_()
    out = op(Jet(x * 1))
    assert isinstance(out, Jet)
    w = draw(*out.shape, seed=9)
    wanted = op(x)
    assert torch.allclose(out.primal, wanted, rtol=EXACT, atol=EXACT)
    got, want = (torch.autograd.grad((o * w).sum(), x)[0] for o in (out.primal, wanted))
    # Torch's own gradient of the hard sigmoid holds 1/6 in single precision.
    tolerance = 1e-7 if name == "hardsigmoid" else EXACT
    assert torch.allclose(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("affine", ["none", "before the gate", "after the gate"])
@pytest.mark.parametrize("each", [False, True])
def test_the_epilogue_equals_its_formula(
    layout: torch.memory_format, relu: bool, residual: bool, affine: str, each: bool
) -> None:
    """Normalisation, gate, add and ReLU in any combination, against autograd through the written-out formula."""
    c, dc, r, dr = (draw(3, 4, 5, 5, seed=s).contiguous(memory_format=layout).requires_grad_() for s in range(4))
    g = torch.ones(3, 4, dtype=torch.float64) if each else torch.ones(4, dtype=torch.float64)
    g.requires_grad_()
    d = draw(4, seed=11).requires_grad_()
    norm = lambda x: F.batch_norm(x, MEAN, VAR, GAMMA, BETA)  # noqa: E731
    scale = (GAMMA / (VAR + 1e-5).sqrt()).view(4, 1, 1)

    def written_out() -> tuple[Tensor, Tensor]:
        G, D = g.view(-1, 4, 1, 1), d.view(4, 1, 1)
        if affine == "none":
            y, dy = c * G, dc * G + c * D
        elif affine == "before the gate":
            y, dy = norm(c) * G, dc * scale * G + norm(c) * D
        else:
            y, dy = norm(c * G), scale * (dc * G + c * D)
        y, dy = (y + r, dy + dr) if residual else (y, dy)
        return (y.relu(), dy * (y > 0)) if relu else (y, dy)

    def with_jets() -> tuple[Tensor, Tensor]:
        by = Gate(g, d, 1)
        x = Jet(c * 1, dc * 1)
        x = (
            apply_gate(x, by)
            if affine == "none"
            else apply_gate(norm(x), by)
            if affine.startswith("before")
            else norm(apply_gate(x, by))
        )
        x = x + Jet(r * 1, dr * 1) if residual else x
        x = F.relu(x) if relu else x
        assert x.tangent is not None
        return x.primal, x.tangent

    leaves = [c, dc, g, d, *((r, dr) if residual else ())]
    wA, wB = draw(3, 4, 5, 5, seed=20), draw(3, 4, 5, 5, seed=21)
    results = [f() for f in (with_jets, written_out)]
    for got, want in zip(*results, strict=True):
        assert torch.allclose(got, want, rtol=EXACT, atol=EXACT)
    grads = [torch.autograd.grad((a * wA).sum() + (b * wB).sum(), leaves) for a, b in results]
    for got, want in zip(*grads, strict=True):
        assert torch.allclose(got, want, rtol=1e-11, atol=1e-11)


def test_a_rule_of_torch_that_cannot_be_differentiated_backward_is_not_trusted() -> None:
    x = Jet(draw(3, 4).requires_grad_(), draw(3, 4, seed=1).requires_grad_())
    with pytest.raises(UnsupportedError, match="layer_norm"):
        check_forward_rule(F.layer_norm, (x, (4,)), {})
    check_forward_rule(torch.tanh, (x,), {})
    assert isinstance(torch.tanh(x), Jet)


def test_what_would_go_silently_wrong_is_refused() -> None:
    def jet() -> Jet:
        return Jet(draw(3, 4).requires_grad_() * 1, draw(3, 4, seed=1))

    x = jet()
    with pytest.raises(UnsupportedError, match="view"):
        x.view(4, 3).mul_(2)
    flat = x.view(-1)
    with pytest.raises(UnsupportedError, match="view"):
        x.mul_(2)
    assert flat.shape == (12,)
    image = Jet((draw(2, 4, 3, 3).requires_grad_() * 1).contiguous(memory_format=torch.channels_last))
    with pytest.raises(UnsupportedError, match="view"):
        image.reshape(2, -1).mul_(2)  # a copy, as it happens
    with pytest.raises(UnsupportedError, match="autograd"):
        jet().data.clamp_(0, 1)
    with pytest.raises(UnsupportedError, match="ignored labels"):
        F.cross_entropy(jet(), Y, label_smoothing=0.1, ignore_index=3)
    with pytest.raises(UnsupportedError, match="part of a tensor"):
        x[:, 0] = 0
    with pytest.raises(UnsupportedError, match="not a jet"):
        torch.zeros(3, 4, dtype=torch.float64).add_(jet())
    with torch.no_grad(), pytest.raises(UnsupportedError, match="no_grad"):
        jet() * 2
    with pytest.raises(UnsupportedError, match="train mode"):
        F.dropout(jet(), 0.5, training=True)
    with pytest.raises(UnsupportedError, match="train mode"):
        F.batch_norm(jet(), MEAN, VAR, training=True)


def test_an_in_place_operation_changes_the_name_but_not_what_was_taken_from_it() -> None:
    x = Jet(draw(2, 4, 3, 3).requires_grad_() * 1, draw(2, 4, 3, 3, seed=1))
    before = x.primal.clone()
    pending = F.batch_norm(x * 1, MEAN, VAR)
    total = pending + x  # takes x along as it is now
    x.relu_()
    assert torch.equal(x.primal, before.relu())
    assert torch.allclose(total.primal, F.batch_norm(before, MEAN, VAR) + before)


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize(
    ("shape", "axis"), [((3, 4), 1), ((3, 5, 4), 2), ((3, 4, 5), 1), ((3, 4, 2, 5), 1), ((3, 2, 4, 5), 2)]
)
def test_channel_sums(shape: tuple[int, ...], axis: int, each: bool) -> None:
    x = draw(*shape)
    others = [i for i in range(len(shape)) if i != axis and not (each and i == 0)]
    assert torch.allclose(sum_per_channel(x, axis, each), x.sum(others) if others else x)
    if x.dim() == 4 and axis == 1:
        assert torch.allclose(sum_per_channel(x.contiguous(memory_format=torch.channels_last), 1, each), x.sum(others))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_value_and_tangent_share_a_convolution_where_they_lie_side_by_side(layout: torch.memory_format) -> None:
    both = draw(6, 4, 5, 5).contiguous(memory_format=layout)
    p, t = both[:3], both[3:]
    joined = join_adjacent(p, t)
    assert joined is not None
    assert torch.equal(joined, both)
    assert join_adjacent(t, p) is None  # the wrong way round
    assert join_adjacent(p, t.clone()) is None  # elsewhere
    assert join_adjacent(both[:2], both[3:5]) is None  # a gap between them
    assert join_adjacent(p[:, 1:], t[:, 1:]) is None  # holes
    plan = plan_convolution(W, (), {"padding": 1, "stride": 2})
    assert plan is not None
    results = []
    for tangent in (t, t.clone()):
        leaves = [x.detach().requires_grad_() for x in (p, tangent)]
        out = FrozenConv.apply(*leaves, W, draw(3), plan)
        grads = torch.autograd.grad([o.sum() if i else (o * o).sum() for i, o in enumerate(out)], leaves)
        results.append([*out, *grads])
    assert all(torch.allclose(a, b, rtol=EXACT, atol=EXACT) for a, b in zip(*results, strict=True))
    assert torch.allclose(results[0][0], F.conv2d(p, W, draw(3), 2, 1), rtol=EXACT, atol=EXACT)
    assert torch.allclose(results[0][1], F.conv2d(t, W, None, 2, 1), rtol=EXACT, atol=EXACT)


def test_a_view_may_be_written_into_once_nobody_else_can_see_it() -> None:
    x = draw(3, 4).requires_grad_()
    view = Jet(x * 1, x * 2).view(4, 3)  # the jet it was taken from is gone
    view.mul_(view)
    assert torch.equal(view.primal, (x * x).view(4, 3))
    first, second = (Jet(x * 1, x * 2) * 1).chunk(2, 1)  # pieces of one that is gone see each other
    with pytest.raises(UnsupportedError, match="view"):
        first.mul_(2)
    assert second.shape == (3, 2)
