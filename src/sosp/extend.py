"""Extend sosp by criteria, layer types and derivative rules: each is one entry in a table.

sosp.extend.METHODS["mine"] = sosp.extend.Method(function, "what it measures", "who published it")
sosp.extend.LAYERS[MyLinear] = sosp.extend.LayerType(axis=-1, channels=lambda layer: layer.out_features)
sosp.extend.RULES[my_op] = rule        # (op, args, kwargs) -> the result for values that carry a tangent (``Jet``)
"""

from sosp.core.batches import Chunk
from sosp.core.layers import LAYERS, LayerType
from sosp.scoring.criteria.filters import average_channels, flatten_filters, sum_channels
from sosp.scoring.derivatives import full_hessian, gradient, hessian_vector
from sosp.scoring.example_gradients import feature_means, gradient_products, minibatch_gradients, squared_gradients
from sosp.scoring.gauss_newton import gauss_newton
from sosp.scoring.jets import RULES, Jet
from sosp.scoring.methods import METHODS, Method
from sosp.scoring.passes import Options, Problem, Terms, Values

__all__ = [
    # A criterion: (problem, options) -> Terms, Values or a tensor (S,)
    "METHODS", "Method", "Problem", "Chunk", "Options", "Terms", "Values",
    # from the weights alone
    "flatten_filters", "sum_channels", "average_channels",
    # from derivatives of the mean loss
    "gradient", "hessian_vector", "full_hessian", "gauss_newton",
    # from every example or minibatch by itself
    "squared_gradients", "gradient_products", "minibatch_gradients", "feature_means",
    # A layer type, and a rule for an op
    "LAYERS", "LayerType", "RULES", "Jet",
]  # fmt: skip
