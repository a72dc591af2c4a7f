"""Carry courses out: train, cut to every size, train again; networks side by side, resumed from their folder."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from sosp.core import distributed
from sosp.core.borrow import home
from sosp.data import Dataset
from sosp.errors import ArgumentError, DisconnectedError
from sosp.graph.cost import Cost
from sosp.graph.mask import Mask
from sosp.graph.plan import count
from sosp.graph.records import Saliency
from sosp.pipeline import cut, train
from sosp.selection.select import select
from sosp.studies.bottlenecks.find import bottlenecks
from sosp.studies.bottlenecks.record import Bottlenecks
from sosp.studies.expand.folder import claim
from sosp.studies.expand.plan import Course, ExpansionPlan, Setup
from sosp.studies.expand.points import Point, Points
from sosp.studies.workload import Work, prepared
from sosp.surgery.checkpoint import inspect, save
from sosp.surgery.shrink import shrink
from sosp.training import Trained, evaluate
from sosp.training.initial_statistics import settled

TOGETHER = 8  # networks that are trained side by side
AFRESH = 1000  # between the seeds of two cycles, so that the second one shuffles otherwise

Networks = Mapping[str, nn.Module]


@dataclass(frozen=True, eq=False)
class Scene:
    """What all steps of a set of courses share."""

    networks: Networks  # as they are initialised
    data: Dataset
    plan: ExpansionPlan
    setup: Setup
    points: Points


def run_courses(
    networks: Networks,
    courses: Sequence[Course],
    data: Dataset,
    plan: ExpansionPlan | None = None,
    setup: Setup | None = None,
    *,
    trained: Networks | None = None,
) -> tuple[Point, ...]:
    """A point for every course and size: courses that begin with one network share its training.

    ``networks``: as they are initialised. ``trained``: those that went through their first cycle already. Sizes that
    are shares of parameters are shares of the first network's. With a folder, all that is done is kept there.
    """
    plan, setup = plan or ExpansionPlan(), setup or Setup()
    _check(networks, courses)
    claim(plan, setup)
    scene = Scene(networks, data, plan, setup, Points(setup.place))
    distributed.wait()  # all have read what is there before one of them writes
    budgets = plan.budgets(sum(p.numel() for p in next(iter(networks.values())).parameters()))
    blanks = {c.name: [Point(c.name, *budget, setup.seed) for budget in budgets] for c in courses}
    left = [c for c in courses if not all(_is_done(scene, c, blank) for blank in blanks[c.name])]
    # Networks that were trained side by side go on side by side, so all of them are made again if one is not done.
    left = [c for c in courses if c.after in {other.after for other in left}]
    ready = _ready(scene, left, trained or {})
    small = {c.name: _cuts(scene, c, ready[c.network, c.before], blanks[c.name]) for c in left}
    for after in sorted({c.after for c in left}):
        _tune(scene, after, {n: m for c in left if c.after == after for n, m in small[c.name].items()})
    return tuple(scene.points.known[blank.name] for c in courses for blank in blanks[c.name])


def _is_done(scene: Scene, course: Course, blank: Point) -> bool:
    known = scene.points.known.get(blank.name)
    return known is not None and bool(known.refusal or known.tuned is not None or not course.after)


def _check(networks: Networks, courses: Sequence[Course]) -> None:
    names = [course.name for course in courses]
    if not courses or len(set(names)) < len(names):
        raise ArgumentError(f"courses are told apart by their names, and these are {names}.")
    for course in courses:
        if course.network not in networks:
            raise ArgumentError(f"course {course.name!r} begins with {course.network!r}, which is not among networks.")


# --- before the cut -------------------------------------------------------------------------------------


def _ready(scene: Scene, courses: Sequence[Course], trained: Networks) -> dict[tuple[str, int], nn.Module]:
    """(network, cycles) -> the network after so many cycles."""
    found = {(name, 0): model for name, model in scene.networks.items()}
    found |= {(name, 1): model for name, model in trained.items()}
    for cycle in range(max((c.before for c in courses), default=0)):
        names = [n for n in scene.networks if any(c.network == n and c.before > cycle for c in courses)]
        names = [n for n in names if (n, cycle + 1) not in found]
        made = side_by_side(scene, {n: found[n, cycle] for n in names}, cycle, "before")
        found |= {(name, cycle + 1): one.model for name, one in made.items()}
    return found


def side_by_side(scene: Scene, models: Networks, cycle: int, what: str) -> dict[str, Trained]:
    """One cycle for every network, several at a time."""
    setup = scene.setup
    found: dict[str, Trained] = {}
    for names in _chunks(list(models)):
        place = None if setup.place is None else setup.place / "checkpoints" / f"{what}-{cycle}-{names[0]}"
        tuning = setup.tuning if what != "before" and setup.tuning is not None else setup.schedule
        part = {name: models[name] for name in names}
        found |= train(part, scene.data, tuning, seed=setup.seed + AFRESH * cycle, folder=place, **setup.options)
    return found


def _chunks(names: list[str]) -> Iterable[list[str]]:
    return [names[i : i + TOGETHER] for i in range(0, len(names), TOGETHER)]


# --- the cut --------------------------------------------------------------------------------------------


def scored(model: nn.Module, data: Dataset, plan: ExpansionPlan, setup: Setup, method: str) -> tuple[Work, Saliency]:
    """The network on its device, and its saliency; one that was never trained is settled first."""
    model = model if setup.device is None else copy.deepcopy(model).to(setup.device)
    work = prepared(settled(model, data.train, setup.seed), data, plan.scoring(method), setup.device)
    return work, work.saliency(method, setup.seed)[0]


def _cuts(scene: Scene, course: Course, model: nn.Module, blanks: Sequence[Point]) -> dict[str, nn.Module]:
    """Point -> the smaller network, not trained yet; one that is known is made again from its mask."""
    points = scene.points.known
    wanted = [blank for blank in blanks if blank.name not in points]
    known = [blank for blank in blanks if blank not in wanted and not points[blank.name].refusal]
    found = _cut(scene, course, model, wanted) if wanted else {}
    example, _ = next(iter(scene.data.train.ordered(batch=8, limit=8)))
    for blank in known:
        mask = inspect(_file(scene, blank)).mask
        assert mask is not None
        found[blank.name] = shrink(model, mask, example.to(home(model)))
    return {blank.name: found[blank.name] for blank in blanks if blank.name in found}


def _cut(scene: Scene, course: Course, model: nn.Module, blanks: Sequence[Point]) -> dict[str, nn.Module]:
    """Score once, cut to every size; the figures before any more training are kept."""
    fresh, method = course.before == 0, course.method or scene.plan.method
    work, saliency = scored(model, scene.data, scene.plan, scene.setup, method)
    model = copy.deepcopy(model).to(work.device).eval()
    whole = count(model, work.example)
    accuracy = None if fresh else evaluate(model, work.data.test).top1
    found = {}
    for blank in blanks:
        blank = replace(blank, whole_params=whole.params, whole_macs=whole.macs, whole=accuracy)
        try:
            small, mask, cost = _removed(scene, course, model, saliency, work, blank)
        except (DisconnectedError, ArgumentError) as error:  # a size that cannot be had
            _keep(scene, replace(blank, refusal=str(error)))
            continue
        tested = None if fresh else evaluate(small, work.data.test).top1
        _save(scene, blank, small, mask)
        _keep(scene, replace(_measured(blank, mask, saliency, cost), cut=tested))
        found[blank.name] = small
    return found


def _removed(
    scene: Scene, course: Course, model: nn.Module, saliency: Saliency, work: Work, point: Point
) -> tuple[nn.Module, Mask, Cost]:
    choice = {point.budget: point.size, "cap": scene.plan.cap}
    if not course.shuffled:
        made = cut(model, saliency, work.example, choice)
        return made.model, made.mask, made.cost_after
    generator = torch.Generator().manual_seed(scene.setup.seed)
    mask = select(saliency, **choice).shuffled(generator, saliency.structures)  # type: ignore[arg-type]
    small = shrink(model, mask, work.example)
    return small, mask, count(small, work.example)


def _measured(point: Point, mask: Mask, saliency: Saliency, cost: Cost) -> Point:
    seen = bottlenecks(mask, structures=saliency.structures)
    return replace(
        point,
        structures=mask.structures,
        removed=mask.chosen,
        params=cost.params,
        macs=cost.macs,
        blocks=shares(seen),
        layers={part.name: part.removed[0] for part in seen.layers},
    )


def shares(seen: Bottlenecks, place: int = 0) -> dict[str, float]:
    """Block -> the share it loses."""
    return {part.name: part.removed[place] for part in seen.blocks}


# --- after it -------------------------------------------------------------------------------------------


def _tune(scene: Scene, cycles: int, small: dict[str, nn.Module]) -> None:
    """So many cycles for networks that have none behind them yet; what they come to is kept."""
    last: dict[str, Trained] = {}
    for cycle in range(cycles):
        last = side_by_side(scene, small, cycle + 1, f"after{cycles}")
        small = {name: one.model for name, one in last.items()}
    for name, one in last.items():
        point = scene.points.known[name]
        tested = [e.test.top1 for e in one.history if e.test is not None] or [point.cut or 0.0]  # of no epochs
        _save(scene, point, one.model, None)
        _keep(scene, replace(point, tuned=tested[-1], best=max(tested)))


def _file(scene: Scene, point: Point) -> Path:
    assert scene.setup.place is not None
    return scene.setup.place / "networks" / f"{point.name}.safetensors"


def _save(scene: Scene, point: Point, model: nn.Module, mask: Mask | None) -> None:
    """The network with its mask, which stays the one it was cut by."""
    if scene.setup.place is None or not distributed.is_main():
        return
    file = _file(scene, point)
    file.parent.mkdir(exist_ok=True)
    save(file, model, inspect(file).mask if mask is None else mask)


def _keep(scene: Scene, point: Point) -> None:
    scene.points.keep(point)
    if scene.setup.on_point is not None:
        scene.setup.on_point(point)
