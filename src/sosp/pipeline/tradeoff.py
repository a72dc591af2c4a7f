"""Cut one network to several budgets, so that a budget can be chosen by looking: ``tradeoff``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from sosp.core.loss_names import AUTO, LossLike
from sosp.core.optional_packages import import_package
from sosp.core.progress import track_progress
from sosp.errors import ArgumentError, BudgetError, DisconnectedError, is_number
from sosp.graph.latency import Latency
from sosp.graph.plan import plan_removal
from sosp.graph.structures import Exclude
from sosp.pipeline.cut import PruningCall
from sosp.pipeline.held_out import Metric, Quality
from sosp.pipeline.largest_cut import format_drop, open_judge
from sosp.pipeline.measurement import describe_device, measure_in_turns
from sosp.pipeline.pruned import Pruned
from sosp.pipeline.scored_call import ScoredCall
from sosp.refit.repair_options import Repair
from sosp.scoring.scoring_options import Scoring
from sosp.selection.selection_options import Selection

BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
HEADER = f"{'budget':<10}{'MACs left':>10}{'parameters':>12}{'latency':>12}  quality"


@dataclass(frozen=True)
class TradeoffPoint:
    """A network pruned to one budget, in numbers; shares are of the unpruned network."""

    budget: float  # share of the MACs that was allowed; 1 for the unpruned network
    macs: float  # share of the MACs left
    params: float  # share of the parameters left
    quality: float  # accuracy, or agreement with the unpruned network, from 0 to 1; or the user's own metric
    milliseconds: float | None = None  # of one call, where it was measured
    widths: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # layer -> channels before and after


@dataclass(frozen=True, eq=False)
class Tradeoff:
    """One network pruned to several budgets; take one with ``at(macs=0.6)`` or ``best(max_drop=0.01)``."""

    points: tuple[TradeoffPoint, ...]  # the unpruned network first, then as the budgets fall
    pruned: Mapping[float, Pruned]  # budget -> the network
    qualities: Mapping[float, Quality]
    refused: Mapping[float, str]  # budget -> why it cannot be met
    scored: ScoredCall = field(repr=False)

    @property
    def quality(self) -> str:
        """Return what the quality is, and on which inputs."""
        some = next(iter(self.qualities.values()))
        return some.name if some.inputs is None else f"{some.name} on {some.inputs:,} inputs {some.where}"

    @property
    def settings(self) -> str:
        """Return how the networks were pruned, and where they were timed."""
        some = next(iter(self.pruned.values()))
        timed = some.measured.latency if some.measured is not None else None
        where = f" Timed on {describe_device(timed[0].device)}." if timed is not None else ""
        return f"{some.settings[:1].upper()}{some.settings[1:]}.{where}"

    def at(self, macs: float) -> Pruned:
        """Return the network with a budget of MACs: kept, or cut and repaired by the same scores.

        Args:
            macs: Largest number of multiply-accumulates: a share up to 1, or a whole number.

        Raises:
            BudgetError: The budget cannot be met.
        """
        kept = self.pruned.get(macs)
        return self.scored.finish(self.scored.cut(macs=macs) if kept is None else kept)

    def best(self, max_drop: float = 0.01) -> Pruned:
        """Return the smallest network of the curve whose quality falls by at most ``max_drop``.

        Raises:
            BudgetError: There is none.
        """
        good = [budget for budget, quality in self.qualities.items() if quality.drop <= max_drop + 1e-12]
        if not good:
            budget, quality = min(self.qualities.items(), key=lambda item: item[1].drop)
            raise BudgetError(
                f"no network of the curve keeps the quality within max_drop={max_drop:g}: at macs={budget:g} "
                f"{format_drop(quality)}. Allow a larger drop, or add larger budgets."
            )
        return self.at(min(good, key=lambda budget: self.pruned[budget].macs_left))

    def __str__(self) -> str:
        rows = [format_point(point, self.qualities.get(point.budget)) for point in self.points]
        refused = [f"macs {budget:g}: {why}" for budget, why in self.refused.items()]
        return "\n".join([f"quality: {self.quality}", HEADER, *rows, *refused, self.settings])

    def plot(self, path: str | Path) -> Path:
        """Draw quality against MACs and latency into a file; its ending decides about the format (.svg, .png, .pdf).

        Raises:
            SospError: matplotlib is not installed.
        """
        figures = import_package("matplotlib.figure")
        costs = {"macs": "MACs left", "milliseconds": "latency in milliseconds"}
        known = [cost for cost in costs if all(getattr(p, cost) is not None for p in self.points)]
        figure = figures.Figure(figsize=(4.5 * len(known), 3.4), layout="constrained")
        for axes, cost in zip(figure.subplots(1, len(known), squeeze=False)[0], known, strict=True):
            axes.plot([getattr(p, cost) for p in self.points], [p.quality for p in self.points], "-o")
            axes.set(xlabel=costs[cost], ylabel=next(iter(self.qualities.values())).name)
        figure.savefig(path)
        return Path(path)


def format_point(point: TradeoffPoint, quality: Quality | None) -> str:
    name = "unpruned" if point.budget >= 1 else f"macs {point.budget:g}"
    time = "" if point.milliseconds is None else f"{point.milliseconds:.3g} ms"
    return f"{name:<10}{point.macs:>10.1%}{point.params:>12.1%}{time:>12}  {format_quality(point, quality)}"


def format_quality(point: TradeoffPoint, quality: Quality | None) -> str:
    """Return the quality of a point, and the standard error of its difference to the original."""
    if quality is not None and quality.inputs is None:
        return f"{point.quality:.4g}"
    spread = "" if quality is None or quality.spread is None else f" ± {100 * quality.spread:.1f}"
    return f"{point.quality:.1%}{spread}"


def tradeoff(
    model: nn.Module,
    data: Any,
    *,
    budgets: Sequence[float] = BUDGETS,
    metric: Metric | None = None,
    method: str | None = None,
    loss: LossLike = AUTO,
    exclude: Exclude = (),
    scoring: Scoring | None = None,
    selection: Selection | None = None,
    repair: bool | Repair | None = None,
    preset: str = "default",
) -> Tradeoff:
    """Return quality, MACs and milliseconds of a network at several budgets, to choose one by looking.

    The network is scored once. At each budget it is cut and repaired as ``sosp.prune`` does, and compared with the
    original on inputs that neither scoring nor repair has used. All networks are timed in turns.

    Args:
        model: The trained network. It is not changed.
        data: As for ``sosp.prune``.
        budgets: Shares of the multiply-accumulates to keep.
        metric: The quality, a function of a network; higher is better. By default the accuracy where the data has
            labels of classes, else the agreement with the original.
        method: As for ``sosp.prune``, and so are the following.
        loss: What the outputs are.
        exclude: Layers to keep.
        scoring: How structures are scored.
        selection: What may be removed and what goes first.
        repair: Whether, or how, the remaining weights are refitted.
        preset: ``"paper"`` for the settings of the paper.

    Returns:
        The curve: ``print(curve)``, ``curve.plot("curve.svg")``, ``curve.at(macs=0.6)``, ``curve.best(max_drop=0.01)``.

    Raises:
        ArgumentError: An argument has an invalid value.
        BudgetError: None of the budgets can be met.
        StructureError: The network has nothing that can be removed.
        DataError: The data is empty or cannot be read as examples, or all of it is used.
    """
    return trace_curve(
        PruningCall.open(model, data, method, loss, exclude, scoring, selection, repair, preset), budgets, metric
    )


def trace_curve(call: PruningCall, budgets: Sequence[float] = BUDGETS, metric: Metric | None = None) -> Tradeoff:
    """Score once, cut and repair at each budget, and measure all networks."""
    shares = sorted(set(check_shares(budgets)), reverse=True)
    scored, judge, held = open_judge(call, metric)
    pruned: dict[float, Pruned] = {}
    refused: dict[float, str] = {}
    for share in track_progress(shares, "budgets", len(shares)):
        try:
            pruned[share] = scored.cut(macs=share)
        except (BudgetError, DisconnectedError) as error:
            refused[share] = str(error)
    if not pruned:
        raise BudgetError(f"none of the budgets can be met. {refused[shares[0]]}")
    answers = {} if held is None else {share: held.compare(found.model) for share, found in pruned.items()}
    qualities = {share: answers[share].best if answers else judge(found.model) for share, found in pruned.items()}
    times = time_all(scored, pruned)
    for share, found in pruned.items():
        timed = None if times is None else (times["1"], times[str(share)])
        measured = scored.measure(found, held, timed=timed, answers=answers.get(share))
        pruned[share] = replace(found, measured=measured, seconds=scored.seconds)
    points = [describe_point(call, share, pruned[share], qualities[share], times) for share in pruned]
    whole = describe_unpruned(points[0], next(iter(qualities.values())), times)
    return Tradeoff((whole, *points), pruned, qualities, refused, scored)


def check_shares(budgets: Sequence[float]) -> list[float]:
    """Return the budgets; raise ArgumentError unless they are shares."""
    found: list[Any] = list(budgets) if isinstance(budgets, (tuple, list)) else []
    if not found or not all(is_number(x) and 0 < x < 1 for x in found):
        raise ArgumentError(
            f"budgets={budgets!r} must be shares of the MACs between 0 and 1, such as (0.75, 0.5, 0.25)."
        )
    return [float(x) for x in found]


def time_all(scored: ScoredCall, pruned: Mapping[float, Pruned]) -> dict[str, Latency] | None:
    """Return the latency of the original ("1") and of every pruned network, in turns; None if one does not run."""
    models = {"1": scored.call.model, **{str(share): found.model for share, found in pruned.items()}}
    try:
        return measure_in_turns(models, scored.timed_example)
    except Exception:  # the curve is worth more than its times
        return None


def describe_point(
    call: PruningCall, share: float, found: Pruned, quality: Quality, times: Mapping[str, Latency] | None
) -> TradeoffPoint:
    time = None if times is None else 1e3 * times[str(share)].median
    widths = list_widths(found, call.selection)
    return TradeoffPoint(share, found.macs_left, found.params_left, quality.after, time, widths)


def describe_unpruned(other: TradeoffPoint, quality: Quality, times: Mapping[str, Latency] | None) -> TradeoffPoint:
    widths = {layer: (before, before) for layer, (before, _) in other.widths.items()}
    return TradeoffPoint(1.0, 1.0, 1.0, quality.before, None if times is None else 1e3 * times["1"].median, widths)


def list_widths(found: Pruned, selection: Selection) -> dict[str, tuple[int, int]]:
    """Return layer -> channels before and after; nothing where the channel flow is not known."""
    flow = found.saliency.structures.flow
    if flow is None:
        return {}
    layout = (found.plan or plan_removal(flow, found.mask, selection.style)).layout
    return {
        d.module or d.weight: (len(d.out), 0 if d.weight in layout.emptied else int(layout.counts[d.out].sum()))
        for d in flow.graph.dense.values()
    }
