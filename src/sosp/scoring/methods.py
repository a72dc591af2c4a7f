"""List the scoring methods: the function, the paper, and what it needs of the network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from sosp.graph.records import Structures
from sosp.scoring.criteria import ccp, fisher, fpgm, hrank, magnitude, obd, obs, slimming, snip, sosp, taylor
from sosp.scoring.passes import Options, Problem, Terms, Values

SOSP = (
    "Nonnenmacher et al., SOSP: Efficiently Capturing Global Correlations by Second-Order Structured Pruning, ICLR 2022"
)
MOLCHANOV = "Molchanov et al., Importance Estimation for Neural Network Pruning, CVPR 2019"
LIU_2021 = "Liu et al., Group Fisher Pruning for Practical Network Compression, ICML 2021"
LI = "Han et al., NeurIPS 2015; Li et al., Pruning Filters for Efficient ConvNets, ICLR 2017"
WANG = "Wang et al., EigenDamage: Structured Pruning in the Kronecker-Factored Eigenbasis, ICML 2019"
ALL = ("filters", "blocks", "weights")
FILTERS = ("filters",)


@dataclass(frozen=True)
class Method:
    """Scoring method, as its paper defines it."""

    run: Callable[[Problem, Options], Terms | Values | Tensor]
    about: str  # one line
    source: str  # who to cite
    kinds: tuple[str, ...] = ("filters", "blocks")  # kinds of structures it takes
    needs: tuple[str, ...] = ()  # keys of NEEDS
    scope: str = "global"  # how its paper ranks: "global", all structures together, or "layer", each layer separately
    objective: str = "individual"  # what ``select`` minimises by default
    data: bool = True  # False: it reads only the weights
    samples: bool = False  # it can sample labels: accepts classes=
    labels: bool = True  # False: it does not read labels, so the data may have none
    own: bool = False  # it can take the network's own outputs as targets, which have no slope: accepts targets="own"


@dataclass(frozen=True)
class Need:
    """Requirement that a network or its structures must meet."""

    what: str
    advice: str  # {names}: list of the layers concerned; {method}: name of the method
    lacking: Callable[[nn.Module, Structures], list[str] | None]  # layers that do not meet it; None if it is met


def _without_scale(model: nn.Module, structures: Structures) -> list[str] | None:
    """Return the layers that have no norm of their own, or one without a scale."""
    lacking = [
        layer.name
        for layer in structures.layers
        if not layer.norms or any(getattr(model.get_submodule(n), "weight", None) is None for n in layer.norms)
    ]
    return lacking or None


def _without_shared_gate(model: nn.Module, structures: Structures) -> list[str] | None:
    """Return the layers that share a channel with another layer but not the gate of that channel."""
    if structures.flow is None:
        return [layer.name for layer in structures.layers]
    groups, _ = structures.flow.coupled()
    gates: dict[int, int] = {}
    split: dict[str, None] = {}
    for layer, ids in zip(structures.layers, structures.ids, strict=True):
        cuts = structures.flow.graph.calls.get(layer.name)
        if cuts and len(cuts[0].out) == layer.channels:
            for group, gate in zip(groups[cuts[0].out].tolist(), ids.tolist(), strict=True):
                if gates.setdefault(group, gate) != gate:
                    split[layer.name] = None
    return list(split) or None


NEEDS: dict[str, Need] = {
    "norms": Need(
        "a batch norm with a scale after every layer, used by that layer only",
        "Exclude those layers with exclude=[{names}]",
        _without_scale,
    ),
    "coupled": Need(
        "channels that are coupled across layers to be one structure",
        "Find the structures with sosp.find_structures(model, example, groups='coupled')",
        _without_shared_gate,
    ),
    "training": Need(
        "to be learned while the network trains",
        "Train with it first: sosp.learned.{method}(model, data, ...)",
        lambda model, structures: [],
    ),
    "rotation": Need(
        "its own basis, in which it removes directions instead of structures",
        "Build the smaller network with sosp.eigendamage(model, data, ratio=...)",
        lambda model, structures: [],
    ),
}


def refuse_scoring(problem: Problem, options: Options) -> Tensor:
    """Stand for methods that train, search or rotate: their need "training" or "rotation" refuses before this runs."""
    raise AssertionError("a method that ranks no structures was asked to score")


METHODS: dict[str, Method] = {
    "sosp-h": Method(
        sosp.sosp_h, "first order, and the exact Hessian times the sum of all structures", SOSP, ALL, own=True
    ),
    "sosp-i": Method(
        sosp.sosp_i, "first order, and Gauss-Newton terms of all pairs of structures", SOSP, samples=True, own=True
    ),
    "sosp-i-diagonal": Method(sosp.sosp_i_diagonal, "sosp-i without correlations", SOSP, samples=True, own=True),
    "first-order": Method(sosp.first_order, "gradient of the loss in each structure", SOSP, ALL),
    "exact": Method(sosp.exact, "first order, and all pairs with the exact Hessian", SOSP, own=True),
    "random": Method(sosp.random, "one uniform random number per structure", SOSP, ALL, labels=False),
    "magnitude-l1": Method(magnitude.l1, "sum of a filter's absolute weights", LI, ALL, scope="layer", data=False),
    "magnitude-l2": Method(magnitude.l2, "Euclidean norm of a filter", LI, ALL, scope="layer", data=False),
    "slimming": Method(
        slimming.slimming,
        "scale of a channel's batch norm",
        "Liu et al., Learning Efficient Convolutional Networks through Network Slimming, ICCV 2017",
        needs=("norms",),
        data=False,
    ),
    "taylor": Method(taylor.taylor, "squared gradient in a filter's weights, mean over minibatches", MOLCHANOV),
    "taylor-bn": Method(
        taylor.taylor_bn, "squared gradient in the batch norm, mean over minibatches", MOLCHANOV, needs=("norms",)
    ),
    "fisher": Method(
        fisher.fisher,
        "squared gradient in each structure, mean over examples",
        "Theis et al., Faster gaze prediction with dense networks and Fisher pruning, 2018",
    ),
    "group-fisher": Method(
        fisher.group_fisher, "fisher of coupled channels, divided by their memory", LIU_2021, FILTERS, ("coupled",)
    ),
    "group-fisher-macs": Method(
        fisher.group_fisher_macs, "fisher of coupled channels, divided by their MACs", LIU_2021, FILTERS, ("coupled",)
    ),
    "obd": Method(
        obd.obd,
        "Fisher information of a filter's weights with their correlations, from Kronecker factors",
        WANG,
        samples=True,
        labels=False,
    ),
    "obd-diagonal": Method(
        obd.obd_diagonal, "Fisher information of a filter's weights, diagonal", WANG, samples=True, labels=False
    ),
    "eigendamage": Method(
        refuse_scoring,
        "directions of a layer's Kronecker factors (sosp.eigendamage)",
        WANG,
        FILTERS,
        ("rotation",),
    ),
    "sosp-obs": Method(
        obs.sosp_obs,
        "Gauss-Newton pairs, after the remaining structures have compensated for a removal",
        "Hassibi and Stork, Second order derivatives for network pruning: Optimal Brain Surgeon, NeurIPS 1992; "
        "with the pairs of SOSP-I",
        samples=True,
        labels=False,
        own=True,
    ),
    "fpgm": Method(
        fpgm.fpgm,
        "distance to the other filters of the layer",
        "He et al., Filter Pruning via Geometric Median, CVPR 2019",
        FILTERS,
        scope="layer",
        data=False,
    ),
    "hrank": Method(
        hrank.hrank,
        "mean rank of the feature maps",
        "Lin et al., HRank: Filter Pruning using High-Rank Feature Map, CVPR 2020",
        FILTERS,
        scope="layer",
        labels=False,
    ),
    "ccp": Method(
        ccp.ccp,
        "first order and pairs within a layer, as one quadratic programme",
        "Peng et al., Collaborative Channel Pruning for Deep Networks, ICML 2019",
        FILTERS,
        scope="layer",
        objective="signed",
    ),
    "snip": Method(
        snip.snip,
        "absolute gradient in a structure's weights, meant for untrained networks",
        "Lee et al., ICLR 2019; van Amersfoort et al., Single Shot Structured Pruning Before Training, 2020",
        ALL,
    ),
    "variational": Method(
        refuse_scoring,
        "mean of a channel's scale, a learned Gaussian (sosp.learned.variational)",
        "Zhao et al., Variational Convolutional Neural Network Pruning, CVPR 2019",
        needs=("training",),
    ),
    "gal": Method(
        refuse_scoring,
        "soft mask, learned against a discriminator (sosp.learned.gal)",
        "Lin et al., Towards Optimal Structured CNN Pruning via Generative Adversarial Learning, CVPR 2019",
        needs=("training",),
    ),
    "amc": Method(
        refuse_scoring,
        "norm of a filter, with a searched share per layer (sosp.learned.amc)",
        "He et al., AMC: AutoML for Model Compression and Acceleration on Mobile Devices, ECCV 2018",
        FILTERS,
        needs=("training",),
        scope="layer",
    ),
}
