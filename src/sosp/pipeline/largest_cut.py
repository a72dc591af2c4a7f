"""Find the smallest network whose quality on unused inputs falls by at most so much."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from sosp.core.progress import track_progress
from sosp.errors import ArgumentError, BudgetError, DisconnectedError, is_number
from sosp.pipeline.cut import PruningCall
from sosp.pipeline.held_out import HeldOut, Metric, Quality, apply_metric
from sosp.pipeline.pruned import Pruned
from sosp.pipeline.scored_call import ScoredCall
from sosp.selection.select import check_selection

CUTS = 6  # of a bisection: the share of the MACs is found within 1/64
SEARCH_MACS, MOST_SEARCHED = 4e11, 2000  # of the inputs that decide, in one pass on a CPU; and their number


@dataclass(frozen=True)
class TriedCut:
    """One cut of the search."""

    macs: float  # share that was allowed
    left: float | None = None  # share that is left; None where the budget cannot be met
    quality: Quality | None = None

    def __str__(self) -> str:
        if self.quality is None:
            return f"{self.macs:.3f}: cannot be met"
        return f"{self.macs:.3f}: {format_drop(self.quality)}"


@dataclass(frozen=True)
class Search:
    """How the budget was found."""

    max_drop: float
    trials: tuple[TriedCut, ...]

    def __str__(self) -> str:
        cuts = "; ".join(map(str, self.trials))
        return f"searched by bisection over the share of MACs for a drop of at most {self.max_drop:g}: {cuts}"


def format_drop(quality: Quality) -> str:
    """``accuracy falls by 0.8 ± 0.4 points``."""
    if quality.name == "metric":
        return f"metric falls by {quality.drop:.4g}"
    spread = "" if quality.spread is None else f" ± {100 * quality.spread:.1f}"
    return f"{quality.name} falls by {100 * quality.drop:.1f}{spread} points"


def prune_to_budget(
    call: PruningCall,
    *,
    ratio: float | None = None,
    params: float | None = None,
    macs: float | None = None,
    max_drop: float | None = None,
    metric: Metric | None = None,
) -> Pruned:
    """Prune to a budget of structures, parameters and MACs, or of quality."""
    check_budgets(ratio=ratio, params=params, macs=macs, max_drop=max_drop)
    if max_drop is not None:
        return find_largest_cut(call, max_drop, metric)
    if metric is not None:
        raise ArgumentError("metric= is the quality that max_drop= limits. Give max_drop as well.")
    check_selection(call.selection, ratio, params, macs)
    scored = ScoredCall(call)
    return scored.finish(scored.cut(ratio=ratio, params=params, macs=macs))


def check_budgets(*, max_drop: float | None, **others: object) -> None:
    """Raise ArgumentError for a limit of the quality that is no number, or stands next to another budget."""
    if max_drop is None:
        return
    if not is_number(max_drop) or not max_drop >= 0:
        raise ArgumentError(f"max_drop={max_drop!r} must be a number, at least 0; 0.01 is one point.")
    if given := [name for name, value in others.items() if value is not None]:
        raise ArgumentError(f"max_drop searches for the budget itself: leave out {' and '.join(given)}.")


def find_largest_cut(call: PruningCall, max_drop: float, metric: Metric | None = None) -> Pruned:
    """Score once, cut and repair at six shares of the MACs, and return the smallest network that is good enough."""
    scored, judge, held = open_judge(call, metric)
    low, high, best = 0.0, 1.0, None
    trials: list[TriedCut] = []
    for _ in track_progress(range(CUTS), "cuts", CUTS):
        share = (low + high) / 2
        try:
            found = scored.cut(macs=share)
        except (BudgetError, DisconnectedError):
            trials.append(TriedCut(share))
            low = share
            continue
        trials.append(TriedCut(share, found.macs_left, judge(found.model)))
        if trials[-1].quality.drop <= max_drop + 1e-12:  # type: ignore[union-attr]
            best, high = found, min(share, found.macs_left)
        else:
            low = share
    search = Search(max_drop, tuple(trials))
    if best is None:
        raise BudgetError(_describe_failure(search))
    return scored.finish(replace(best, search=search), held)


def open_judge(
    call: PruningCall, metric: Metric | None
) -> tuple[ScoredCall, Callable[[nn.Module], Quality], HeldOut | None]:
    """Return the scores of a call, the function that judges its cuts, and the inputs that it judges them by."""
    scored = ScoredCall(call)
    scored.keep_repair_inputs()
    if metric is not None:
        return scored, lambda small: apply_metric(metric, call.model, small), None
    held = scored.hold_out(SEARCH_MACS, MOST_SEARCHED)
    return scored, lambda small: held.compare(small).best, held


def _describe_failure(search: Search) -> str:
    tried = [t for t in search.trials if t.quality is not None and t.left is not None]
    if not tried:
        return f"max_drop={search.max_drop:g} cannot be met: no budget of MACs that was tried can be met."
    least = min(tried, key=lambda t: t.quality.drop)  # type: ignore[union-attr]
    assert least.quality is not None
    return (
        f"max_drop={search.max_drop:g} cannot be met: of {len(tried)} cuts the best keeps {least.left:.1%} of the "
        f"MACs, and its {format_drop(least.quality)}. Allow a larger drop, repair with more inputs, or fine-tune after "
        "pruning to a budget (macs=0.9)."
    )
