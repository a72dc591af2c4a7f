"""Run protocols: train, prune to every size, train again; networks train side by side and resume from a folder."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sosp.core import distributed
from sosp.core.borrowed_model import find_device
from sosp.data import Dataset
from sosp.errors import ArgumentError, DisconnectedError
from sosp.graph.mask import Mask
from sosp.graph.plan import Cost, count
from sosp.graph.records import Saliency
from sosp.pipeline.cut import select_and_shrink
from sosp.pipeline.train import train
from sosp.selection.select import select
from sosp.selection.selection_options import Selection
from sosp.studies.bottlenecks.bottleneck_detection import bottlenecks
from sosp.studies.bottlenecks.bottleneck_record import Bottlenecks
from sosp.studies.expand.expansion_folder import claim_expansion
from sosp.studies.expand.expansion_plan import ExpansionPlan, ExpansionSetup, PruningProtocol
from sosp.studies.expand.expansion_points import ExpansionPoint, ExpansionStore
from sosp.studies.pruning_task import PruningTask, prepare_task
from sosp.surgery.checkpoint import inspect, save
from sosp.surgery.shrink import shrink
from sosp.training import Trained, evaluate
from sosp.training.initial_statistics import recalibrate_untrained

GROUP_SIZE = 8  # networks that are trained side by side
SEED_STEP = 1000  # between the seeds of two cycles, so that they shuffle differently

Networks = Mapping[str, nn.Module]


@dataclass(frozen=True, eq=False)
class ProtocolInputs:
    """The inputs that all steps of a set of protocols share."""

    networks: Networks  # untrained
    data: Dataset
    plan: ExpansionPlan
    setup: ExpansionSetup
    points: ExpansionStore


def run_protocols(
    networks: Networks,
    courses: Sequence[PruningProtocol],
    data: Dataset,
    plan: ExpansionPlan | None = None,
    setup: ExpansionSetup | None = None,
    *,
    trained: Networks | None = None,
) -> tuple[ExpansionPoint, ...]:
    """Train, prune and train again by every protocol at every size; protocols share the training of a network.

    Args:
        networks: Name -> untrained network. Sizes that are shares of parameters refer to the first one.
        protocols: The protocols, a ``sosp.studies.PruningProtocol`` each.
        data: A dataset of ``sosp.data``.
        plan: Sizes to prune to and the scoring, a ``sosp.studies.ExpansionPlan``.
        setup: Schedule, device, folder and seed, a ``sosp.studies.ExpansionSetup``. With a folder, results are saved
            and a killed call resumes.
        trained: Name -> network after its first training cycle, for networks that need not be trained.

    Returns:
        A point for every protocol and size.

    Raises:
        ArgumentError: If two protocols have the same name, or one begins with an unknown network.
        CheckpointError: If the folder holds another expansion.
    """
    plan, setup = plan or ExpansionPlan(), setup or ExpansionSetup()
    _check(networks, courses)
    claim_expansion(plan, setup)
    scene = ProtocolInputs(networks, data, plan, setup, ExpansionStore(setup.place))
    distributed.wait_for_ranks()  # all ranks have read the file before one of them writes
    budgets = plan.budgets(sum(p.numel() for p in next(iter(networks.values())).parameters()))
    blanks = {c.name: [ExpansionPoint(c.name, *budget, setup.seed) for budget in budgets] for c in courses}
    left = [c for c in courses if not all(_is_done(scene, c, blank) for blank in blanks[c.name])]
    # Networks that were trained side by side share checkpoints, so all are made again if one is not done.
    left = [c for c in courses if c.after in {other.after for other in left}]
    ready = _train_before_pruning(scene, left, trained or {})
    small = {c.name: _load_or_prune(scene, c, ready[c.network, c.before], blanks[c.name]) for c in left}
    for after in sorted({c.after for c in left}):
        _tune(scene, after, {n: m for c in left if c.after == after for n, m in small[c.name].items()})
    return tuple(scene.points.known[blank.name] for c in courses for blank in blanks[c.name])


def _is_done(scene: ProtocolInputs, course: PruningProtocol, blank: ExpansionPoint) -> bool:
    known = scene.points.known.get(blank.name)
    return known is not None and bool(known.refusal or known.tuned is not None or not course.after)


def _check(networks: Networks, courses: Sequence[PruningProtocol]) -> None:
    names = [course.name for course in courses]
    if not courses or len(set(names)) < len(names):
        raise ArgumentError(f"protocols need different names, and there must be at least one; got {names}.")
    for course in courses:
        if course.network not in networks:
            raise ArgumentError(
                f"protocol {course.name!r} begins with {course.network!r}, which is not among networks."
            )


# --- before pruning -------------------------------------------------------------------------------------


def _train_before_pruning(
    scene: ProtocolInputs, courses: Sequence[PruningProtocol], trained: Networks
) -> dict[tuple[str, int], nn.Module]:
    """Return (network, cycles) -> the network after this number of training cycles."""
    found = {(name, 0): model for name, model in scene.networks.items()}
    found |= {(name, 1): model for name, model in trained.items()}
    for cycle in range(max((c.before for c in courses), default=0)):
        names = [n for n in scene.networks if any(c.network == n and c.before > cycle for c in courses)]
        names = [n for n in names if (n, cycle + 1) not in found]
        made = train_cycle(scene, {n: found[n, cycle] for n in names}, cycle, "before")
        found |= {(name, cycle + 1): one.model for name, one in made.items()}
    return found


def train_cycle(scene: ProtocolInputs, models: Networks, cycle: int, what: str) -> dict[str, Trained]:
    """Train every network for one cycle, several at a time."""
    setup = scene.setup
    found: dict[str, Trained] = {}
    for names in _chunks(list(models)):
        place = None if setup.place is None else setup.place / "checkpoints" / f"{what}-{cycle}-{names[0]}"
        tuning = setup.tuning if what != "before" and setup.tuning is not None else setup.schedule
        part = {name: models[name] for name in names}
        found |= train(part, scene.data, tuning, seed=setup.seed + SEED_STEP * cycle, folder=place, **setup.options)
    return found


def _chunks(names: list[str]) -> Iterable[list[str]]:
    return [names[i : i + GROUP_SIZE] for i in range(0, len(names), GROUP_SIZE)]


# --- pruning --------------------------------------------------------------------------------------------


def score_network(
    model: nn.Module, data: Dataset, plan: ExpansionPlan, setup: ExpansionSetup, method: str
) -> tuple[PruningTask, Saliency]:
    """Return the task on its device and the saliency; an untrained network gets batch-norm statistics first."""
    model = model if setup.device is None else copy.deepcopy(model).to(setup.device)
    work = prepare_task(recalibrate_untrained(model, data.train, setup.seed), data, plan.scoring(method), setup.device)
    return work, work.saliency(method, setup.seed)[0]


def _load_or_prune(
    scene: ProtocolInputs, course: PruningProtocol, model: nn.Module, blanks: Sequence[ExpansionPoint]
) -> dict[str, nn.Module]:
    """Return point -> pruned network before further training; a known point is made again from its mask."""
    points = scene.points.known
    wanted = [blank for blank in blanks if blank.name not in points]
    known = [blank for blank in blanks if blank not in wanted and not points[blank.name].refusal]
    found = _prune_sizes(scene, course, model, wanted) if wanted else {}
    example, _ = next(iter(scene.data.train.ordered(batch=8, limit=8)))
    for blank in known:
        mask = inspect(_file(scene, blank)).mask
        assert mask is not None
        found[blank.name] = shrink(model, mask, example.to(find_device(model)))
    return {blank.name: found[blank.name] for blank in blanks if blank.name in found}


def _prune_sizes(
    scene: ProtocolInputs, course: PruningProtocol, model: nn.Module, blanks: Sequence[ExpansionPoint]
) -> dict[str, nn.Module]:
    """Score once, prune to every size, and save the results before further training."""
    fresh, method = course.before == 0, course.method or scene.plan.method
    work, saliency = score_network(model, scene.data, scene.plan, scene.setup, method)
    model = copy.deepcopy(model).to(work.device).eval()
    whole = count(model, work.example)
    accuracy = None if fresh else evaluate(model, work.data.test).top1
    found = {}
    for blank in blanks:
        blank = replace(blank, whole_params=whole.params, whole_macs=whole.macs, whole=accuracy)
        try:
            small, mask, cost = _prune_once(scene, course, model, saliency, work, blank)
        except (DisconnectedError, ArgumentError) as error:  # an impossible size
            _keep(scene, replace(blank, refusal=str(error)))
            continue
        tested = None if fresh else evaluate(small, work.data.test).top1
        _save(scene, blank, small, mask)
        _keep(scene, replace(_fill_point(blank, mask, saliency, cost), cut=tested))
        found[blank.name] = small
    return found


def _prune_once(
    scene: ProtocolInputs,
    course: PruningProtocol,
    model: nn.Module,
    saliency: Saliency,
    work: PruningTask,
    point: ExpansionPoint,
) -> tuple[nn.Module, Mask, Cost]:
    how = Selection(cap=scene.plan.cap, rule="saliency", round_to=1)
    budget: dict[str, Any] = {point.budget: point.size}
    if not course.shuffled:
        made = select_and_shrink(model, saliency, work.example, how, **budget)
        return made.model, made.mask, made.cost_after
    generator = torch.Generator().manual_seed(scene.setup.seed)
    mask = select(saliency, options=how, **budget).shuffled(generator, saliency.structures)
    small = shrink(model, mask, work.example)
    return small, mask, count(small, work.example)


def _fill_point(point: ExpansionPoint, mask: Mask, saliency: Saliency, cost: Cost) -> ExpansionPoint:
    seen = bottlenecks(mask, structures=saliency.structures)
    return replace(
        point,
        structures=mask.structures,
        removed=mask.chosen,
        params=cost.params,
        macs=cost.macs,
        blocks=list_block_shares(seen),
        layers={part.name: part.removed[0] for part in seen.layers},
    )


def list_block_shares(seen: Bottlenecks, place: int = 0) -> dict[str, float]:
    """Return block -> share of its structures that is removed."""
    return {part.name: part.removed[place] for part in seen.blocks}


# --- after pruning --------------------------------------------------------------------------------------


def _tune(scene: ProtocolInputs, cycles: int, small: dict[str, nn.Module]) -> None:
    """Train the pruned networks for ``cycles`` cycles and save the results."""
    last: dict[str, Trained] = {}
    for cycle in range(cycles):
        last = train_cycle(scene, small, cycle + 1, f"after{cycles}")
        small = {name: one.model for name, one in last.items()}
    for name, one in last.items():
        point = scene.points.known[name]
        tested = [e.test.top1 for e in one.history if e.test is not None] or [
            point.cut or 0.0
        ]  # a schedule of 0 epochs
        _save(scene, point, one.model, None)
        _keep(scene, replace(point, tuned=tested[-1], best=max(tested)))


def _file(scene: ProtocolInputs, point: ExpansionPoint) -> Path:
    assert scene.setup.place is not None
    return scene.setup.place / "networks" / f"{point.name}.safetensors"


def _save(scene: ProtocolInputs, point: ExpansionPoint, model: nn.Module, mask: Mask | None) -> None:
    """Save the network with the mask that it was pruned by."""
    if scene.setup.place is None or not distributed.is_main():
        return
    file = _file(scene, point)
    file.parent.mkdir(exist_ok=True)
    save(file, model, inspect(file).mask if mask is None else mask)


def _keep(scene: ProtocolInputs, point: ExpansionPoint) -> None:
    scene.points.keep(point)
    if scene.setup.on_point is not None:
        scene.setup.on_point(point)
