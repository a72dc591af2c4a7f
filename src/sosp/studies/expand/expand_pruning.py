"""Expand-pruning: find the bottleneck, widen it, start over; compare with the original and an evenly widened one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from torch import nn

from sosp.core import distributed
from sosp.data import Dataset
from sosp.errors import ArgumentError, CheckpointError
from sosp.nets import Width
from sosp.pipeline.train import train
from sosp.studies.bottlenecks.bottleneck_detection import bottlenecks
from sosp.studies.bottlenecks.bottleneck_record import Bottlenecks
from sosp.studies.bottlenecks.removals import RATIOS
from sosp.studies.expand.expansion_folder import claim_expansion, read_expansion_json, write_expansion_json
from sosp.studies.expand.expansion_plan import ExpansionPlan, ExpansionSetup, PruningProtocol
from sosp.studies.expand.expansion_points import ExpansionPoint
from sosp.studies.expand.matching_width import UniformFactor, match_parameters
from sosp.studies.expand.pruning_protocols import list_block_shares, run_protocols, score_network
from sosp.studies.expand.widenable_networks import NetworkFunction, WidenableNetwork, check_widths, make_widenable

LAYERS = 5  # to widen if every layer is a block, as the paper does for VGG
CHOICE = "choice.json"


@dataclass(frozen=True)
class WideningChoice:
    """The blocks to widen, those that lose least, and for comparison a constant factor for all layers."""

    blocks: tuple[str, ...]
    removed: Mapping[str, float]  # block -> share that is removed at the plan's ``probe``
    factors: Mapping[str, float]  # layer -> factor
    constant: UniformFactor  # gives as many parameters


@dataclass(frozen=True)
class Expanded:
    """The widening choice, and the points of the three protocols "vanilla", "expand" and "widen"."""

    choice: WideningChoice
    points: tuple[ExpansionPoint, ...]


def expand(
    network: nn.Module | NetworkFunction,
    data: Dataset,
    plan: ExpansionPlan | None = None,
    setup: ExpansionSetup | None = None,
    *,
    trained: nn.Module | None = None,
    base: Width = 1.0,
) -> Expanded:
    """Train, find the least pruned blocks, widen them, train the wider network from scratch, prune it, train again.

    This is expand-pruning (Sec. 3.3 of the paper). Two baselines run in the same way: "vanilla", the original network,
    and "widen", with all layers wider by the constant factor that gives as many parameters as "expand". With
    ``plan.when="init"``, blocks are found and networks pruned before any training, and then trained once (App. A.11).

    Args:
        network: A function of the width, ``lambda width: sosp.nets.resnet56(width=width)``, or a module, which
            ``sosp.widen`` widens and whose layers are initialised again.
        data: A dataset of ``sosp.data``.
        plan: Blocks to widen and sizes to prune to, a ``sosp.studies.ExpansionPlan``.
        setup: Schedule, device, folder and seed, a ``sosp.studies.ExpansionSetup``.
        trained: The trained "vanilla" network; None trains it.
        base: The width at which the function makes the "vanilla" network.

    Returns:
        An ``Expanded`` with the choice of blocks and the measured points.

    Raises:
        ArgumentError: If an argument has an invalid value, or the network has too few blocks.
        CheckpointError: If the folder holds another expansion.
    """
    plan, setup = plan or ExpansionPlan(), setup or ExpansionSetup()
    claim_expansion(plan, setup)
    example, _ = next(iter(data.train.ordered(batch=8, limit=8)))
    growth = make_widenable(network, example, base)
    check_widths(growth, plan.factor)
    vanilla = growth.make({}, setup.seed)
    started = plan.when == "trained"
    probed = vanilla if not started else _train_vanilla(vanilla, data, setup) if trained is None else trained
    choice = _read_choice(setup) or choose_widening(growth, probed, data, plan, setup)
    _keep(setup, choice)
    everything = dict.fromkeys(growth.layers, choice.constant.factor)
    wide = {"expand": growth.make(choice.factors, setup.seed), "widen": growth.make(everything, setup.seed)}
    courses = [PruningProtocol(name, name, before=int(started)) for name in ("vanilla", *wide)]
    begun = {"vanilla": probed} if started else None
    return Expanded(choice, run_protocols({"vanilla": vanilla, **wide}, courses, data, plan, setup, trained=begun))


def compare_init_pruning(
    network: nn.Module, data: Dataset, plan: ExpansionPlan | None = None, setup: ExpansionSetup | None = None
) -> tuple[ExpansionPoint, ...]:
    """Prune a network after one training cycle and, for comparison, before any training (App. A.9).

    Both are trained for two cycles in total.

    Args:
        network: The untrained network. It is not changed.
        data: A dataset of ``sosp.data``.
        plan: Sizes to prune to and the scoring, a ``sosp.studies.ExpansionPlan``.
        setup: Schedule, device, folder and seed, a ``sosp.studies.ExpansionSetup``.

    Returns:
        The points of the protocols "train-pruning" and "init-pruning".

    Raises:
        CheckpointError: If the folder holds another expansion.
    """
    courses = [
        PruningProtocol("train-pruning", "network"),
        PruningProtocol("init-pruning", "network", before=0, after=2),
    ]
    return run_protocols({"network": network}, courses, data, plan, setup)


def choose_widening(
    growth: WidenableNetwork, model: nn.Module, data: Dataset, plan: ExpansionPlan, setup: ExpansionSetup
) -> WideningChoice:
    """Choose what to widen by the saliency of a trained or untrained network."""
    _, saliency = score_network(model, data, plan, setup, plan.method)
    seen = bottlenecks(saliency, ratios=sorted({*RATIOS, plan.probe}))
    return choose_blocks(seen, growth, plan)


def choose_blocks(seen: Bottlenecks, growth: WidenableNetwork, plan: ExpansionPlan) -> WideningChoice:
    """Choose the blocks that lose least at ``plan.probe``, and the constant factor with as many parameters."""
    alone = all(len(block.layers) == 1 for block in seen.blocks)
    count = plan.blocks or (min(LAYERS, len(seen.blocks)) if alone else 1)
    if count > len(seen.blocks):
        names = ", ".join(block.name for block in seen.blocks)
        raise ArgumentError(f"blocks={count} are to be widened, but the network has {len(seen.blocks)}: {names}.")
    picked = seen.least(count, plan.probe)
    factors = seen.widths({part.name: plan.factor for part in picked})
    place = min(range(len(seen.ratios)), key=lambda i: abs(seen.ratios[i] - plan.probe))
    constant = match_parameters(
        lambda factor: growth.params(dict.fromkeys(growth.layers, factor)), growth.params(factors)
    )
    return WideningChoice(tuple(part.name for part in picked), list_block_shares(seen, place), factors, constant)


def _train_vanilla(vanilla: nn.Module, data: Dataset, setup: ExpansionSetup) -> nn.Module:
    place = None if setup.place is None else setup.place / "checkpoints" / "vanilla"
    found = train({"vanilla": vanilla}, data, setup.schedule, seed=setup.seed, folder=place, **setup.options)
    model: nn.Module = found["vanilla"].model
    return model


# --- saved choice: scoring again might round differently -----------------------------------------------------


def _read_choice(setup: ExpansionSetup) -> WideningChoice | None:
    if setup.place is None or not (setup.place / CHOICE).is_file():
        return None
    found = read_expansion_json(setup.place / CHOICE)
    try:
        return WideningChoice(
            **{**found, "blocks": tuple(found["blocks"]), "constant": UniformFactor(**found["constant"])}
        )
    except (TypeError, KeyError) as error:
        raise CheckpointError(f"{setup.place / CHOICE}: was not written by an expansion ({error}).") from error


def _keep(setup: ExpansionSetup, choice: WideningChoice) -> None:
    if setup.place is not None:
        write_expansion_json(setup.place / CHOICE, asdict(choice))
    distributed.wait_for_ranks()
