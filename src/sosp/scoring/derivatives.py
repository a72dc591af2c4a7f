"""Derivatives of the loss in the gates: gradient, Hessian times vector, full Hessian; and in single weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import functional_call

from sosp.core.batches import Chunk
from sosp.core.progress import track_progress
from sosp.errors import DifferentiationError
from sosp.scoring import jets
from sosp.scoring.jets import get_primal
from sosp.scoring.passes import (
    FALLBACK_ERRORS,
    Problem,
    Sums,
    Terms,
    Way,
    average_examples,
    check_double_backward,
    check_requires_grad,
    compute_derivatives,
    compute_gated_losses,
    convert_to_double,
    install_jet_gates,
    install_plain_gates,
    make_reference_tensor,
    measure_losses,
    open_gates,
    repeat_single_example,
    try_in_order,
)

LARGEST_HESSIAN = 2**14

# First order, and the Hessian times a vector -------------------------------------------------------------------------


def gradient(problem: Problem) -> Terms:
    """``dL/dg``: what the loss loses, to first order, as each structure goes."""
    step = try_in_order({"jets": _gradient_jets, "autograd": _gradient_plain})
    count, (first,) = average_examples(problem, "gradient", lambda chunk: step(problem, chunk), share=0.7)
    assert first is not None
    return Terms(count, first)


def hessian_vector(problem: Problem, direction: Tensor | None = None) -> Terms:
    """``dL/dg`` and ``H d``; d is all ones unless given, which is SOSP-H's ``theta_s . H theta_struc``."""
    d = torch.ones(len(problem.structures)) if direction is None else direction
    step = try_in_order(hessian_ways(), SECOND_ORDER_ADVICE)
    count, (first, second) = average_examples(problem, "Hessian-vector product", lambda chunk: step(problem, chunk, d))
    assert first is not None
    return Terms(count, first, second)


def full_hessian(problem: Problem) -> Terms:
    """``d²L / dg dg``, (S, S): one Hessian-vector product per structure. The gold standard, at S times the cost."""
    S = len(problem.structures)
    if S > LARGEST_HESSIAN:
        raise DifferentiationError(
            f"method='exact' needs {S} Hessian-vector products and a {S} x {S} matrix; it is meant for at most "
            f"{LARGEST_HESSIAN} structures. Use 'sosp-h' or 'sosp-i', or exclude layers."
        )
    step = try_in_order(hessian_ways(), SECOND_ORDER_ADVICE)
    units = torch.eye(S)

    def rows(chunk: Chunk) -> Sums:
        found = [step(problem, chunk, unit) for unit in track_progress(units, "full Hessian", S)]
        # Moving one gate yields that gate's own first-order term: pick each from its own product.
        return torch.stack([first[i] for i, (first, _) in enumerate(found)]), torch.stack([row for _, row in found])

    count, (first, pairs) = average_examples(problem, "examples", rows)
    assert first is not None and pairs is not None
    return Terms(count, first, pairs.sum(1), pairs)


def _gradient_jets(problem: Problem, chunk: Chunk) -> Sums:
    gates = open_gates(problem, make_reference_tensor(problem.model, chunk))
    with install_jet_gates(problem, gates):
        loss = get_primal(compute_gated_losses(problem, chunk))
        return (convert_to_double(*compute_derivatives(loss.sum(), [gates.values])),)


def _gradient_plain(problem: Problem, chunk: Chunk) -> Sums:
    gates = open_gates(problem, make_reference_tensor(problem.model, chunk))
    chunk, share = repeat_single_example(chunk)
    with install_plain_gates(problem, gates.values):
        loss = compute_gated_losses(problem, chunk).sum() * share
        return (convert_to_double(*compute_derivatives(loss, [gates.values])),)


def _hessian_jets(problem: Problem, chunk: Chunk, d: Tensor) -> Sums:
    """One pass: from the tangent of the loss, ``d L'/d d = dL/dg`` (where d moves) and ``d L'/d g = H d``."""
    gates = open_gates(problem, make_reference_tensor(problem.model, chunk), d)
    with install_jet_gates(problem, gates):
        loss = compute_gated_losses(problem, chunk)
        slope = loss.tangent if isinstance(loss, jets.Jet) else None
        assert gates.direction is not None
        if slope is not None:
            first, second = compute_derivatives(slope.sum(), [gates.direction, gates.values])
            return convert_to_double(first), convert_to_double(second)
        # Either nothing that moves reaches the loss, or its tangent was lost on the way.
        (first,) = compute_derivatives(get_primal(loss).sum(), [gates.values])
        if bool((first * gates.direction).any()):
            raise jets.UnsupportedError("a tangent was lost on its way to the loss")
    return convert_to_double(first), convert_to_double(torch.zeros_like(first))


def _hessian_forward_over_reverse(problem: Problem, chunk: Chunk, d: Tensor) -> Sums:
    like = make_reference_tensor(problem.model, chunk)
    chunk, share = repeat_single_example(chunk)

    def loss(values: Tensor) -> Tensor:
        with install_plain_gates(problem, values):
            return compute_gated_losses(problem, chunk).sum() * share

    first, second = torch.func.jvp(torch.func.grad(loss), (like.new_ones(d.shape),), (d.to(like),))  # type: ignore[misc]
    return convert_to_double(first), convert_to_double(second)


def _hessian_double_backward(problem: Problem, chunk: Chunk, d: Tensor) -> Sums:
    gates = open_gates(problem, make_reference_tensor(problem.model, chunk))
    chunk, share = repeat_single_example(chunk)
    with install_plain_gates(problem, gates.values):
        loss = compute_gated_losses(problem, chunk).sum() * share
        (first,) = compute_derivatives(loss, [gates.values], create_graph=True)
        check_double_backward(first)
        moved = (first * d.to(first)).sum()
        second = compute_derivatives(moved, [gates.values])[0] if moved.requires_grad else torch.zeros_like(first)
    return convert_to_double(first.detach()), convert_to_double(second)


def require_agreement(way: Way, judge: Way) -> Way:
    """A way that must agree with another one on its first few examples, where that other one works.

    Forward mode loses its tangents without a word in TorchScript functions; reverse mode does not.
    """
    seen: list[bool] = []

    def run(problem: Problem, chunk: Chunk, *direction: Tensor) -> Sums:
        if not seen:
            few = chunk.rows(0, min(2, chunk.size))
            try:
                wanted = judge(problem, few, *direction)[1]
            except FALLBACK_ERRORS:
                wanted = None
            if wanted is not None:
                found = way(problem, few, *direction)[1]
                if (found - wanted).norm() > 1e-3 * wanted.norm() + 1e-30:
                    raise jets.UnsupportedError("forward and reverse mode disagree")
            seen.append(True)
        return way(problem, chunk, *direction)

    return run


def hessian_ways() -> dict[str, Way]:
    """Every way to ``H d``, fast first."""
    jets.load_forward_rules()
    return {
        "jets": _hessian_jets,
        "forward over reverse": require_agreement(_hessian_forward_over_reverse, _hessian_double_backward),
        "double backward": _hessian_double_backward,
    }


SECOND_ORDER_ADVICE = "An operation lacks second derivatives; 'first-order' and 'sosp-i' need only first ones."


# Single weights: a gate of its own on every parameter -----------------------------------------------------------------


def compute_weight_terms(problem: Problem, second_order: bool) -> Terms:
    """``theta_i dL/dtheta_i`` and ``theta_i (H theta)_i`` for every single weight i."""
    ways = {
        "forward over reverse": require_agreement(_weights_forward_over_reverse, _weights_double_backward),
        "double backward": _weights_double_backward,
    }
    if second_order:
        jets.load_forward_rules()
    step = try_in_order(ways, SECOND_ORDER_ADVICE) if second_order else try_in_order({"autograd": _weights_gradient})
    count, (first, *second) = average_examples(problem, "weights", lambda chunk: step(problem, chunk), share=4)
    assert first is not None
    return Terms(count, first, second[0] if second else None)


def _named_weights(problem: Problem) -> dict[str, Tensor]:
    return {layer.name: problem.model.get_parameter(layer.name).detach() for layer in problem.structures.layers}


def _loss_at(problem: Problem, chunk: Chunk) -> Callable[[dict[str, Tensor]], Tensor]:
    """The summed loss as a function of the weights."""

    def loss(weights: dict[str, Tensor]) -> Tensor:
        outputs = chunk.run(lambda *args, **named: functional_call(problem.model, weights, args, named))
        losses = measure_losses(problem, outputs, chunk)
        check_requires_grad(losses)
        return losses.sum()

    return loss


def _times_theta(theta: dict[str, Tensor], slope: list[Tensor]) -> Tensor:
    return convert_to_double(torch.cat([(t * s).flatten() for t, s in zip(theta.values(), slope, strict=True)]))


def _weights_gradient(problem: Problem, chunk: Chunk) -> Sums:
    theta = _named_weights(problem)
    at = {name: w.clone().requires_grad_() for name, w in theta.items()}
    return (_times_theta(theta, compute_derivatives(_loss_at(problem, chunk)(at), list(at.values()))),)


def _weights_forward_over_reverse(problem: Problem, chunk: Chunk) -> Sums:
    theta = _named_weights(problem)
    slope = torch.func.grad(_loss_at(problem, chunk))
    first, second = torch.func.jvp(slope, (theta,), (theta,))  # type: ignore[misc]
    return _times_theta(theta, list(first.values())), _times_theta(theta, list(second.values()))


def _weights_double_backward(problem: Problem, chunk: Chunk) -> Sums:
    theta = _named_weights(problem)
    at = {name: w.clone().requires_grad_() for name, w in theta.items()}
    first = compute_derivatives(_loss_at(problem, chunk)(at), list(at.values()), create_graph=True)
    for slope in first:
        check_double_backward(slope)
    moved = torch.stack([(f * w).sum() for f, w in zip(first, theta.values(), strict=True)]).sum()
    second = (
        compute_derivatives(moved, list(at.values())) if moved.requires_grad else [torch.zeros_like(f) for f in first]
    )
    return _times_theta(theta, [f.detach() for f in first]), _times_theta(theta, second)
