"""SOSP-H, SOSP-I and what they reduce to, from derivatives in gate space."""

from __future__ import annotations

import torch
from torch import Tensor

from sosp.core.borrowed_model import find_device
from sosp.scoring.derivatives import compute_weight_terms, full_hessian, gradient, hessian_vector
from sosp.scoring.gauss_newton import gauss_newton
from sosp.scoring.passes import Options, Problem, Terms


def sosp_h(problem: Problem, options: Options) -> Terms:
    """Eq. 6: ``theta_s . g`` and ``theta_s . (H theta_struc)``, the exact Hessian times the sum of all structures."""
    if problem.structures.kind == "weights":
        return compute_weight_terms(problem, second_order=True)
    return hessian_vector(problem)


def sosp_i(problem: Problem, options: Options) -> Terms:
    """Eq. 7: every pair ``theta_s . H theta_s'`` with the Gauss-Newton Hessian."""
    return gauss_newton(problem, classes=options.classes, generator=options.generator)


def sosp_i_diagonal(problem: Problem, options: Options) -> Terms:
    """App. A.2: SOSP-I without correlations between structures; never forms the pairs."""
    return gauss_newton(problem, diagonal=True, classes=options.classes, generator=options.generator)


def first_order(problem: Problem, options: Options) -> Terms:
    """Either SOSP with H := 0."""
    if problem.structures.kind == "weights":
        return compute_weight_terms(problem, second_order=False)
    return gradient(problem)


def exact(problem: Problem, options: Options) -> Terms:
    """Every pair with the exact Hessian: what SOSP-H sums and SOSP-I approximates."""
    return full_hessian(problem)


def random(problem: Problem, options: Options) -> Tensor:
    """App. A.10: a ranking that knows nothing (one uniform number per structure)."""
    generator = options.generator or torch.Generator().manual_seed(0)
    values = torch.rand(len(problem.structures), generator=generator, device=generator.device)
    return values.to(find_device(problem.model))
