"""Find bottlenecks: compare what a part of the network loses with its loss if all structures were alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import mean, median

from sosp.errors import ArgumentError, SospError, is_number
from sosp.graph.flow import Flow, learn_pins
from sosp.graph.plan import Cost, compute_cost, compute_whole_cost
from sosp.graph.records import Saliency, Structures
from sosp.studies.bottlenecks.blocks import Block, NamedBlocks, find_blocks
from sosp.studies.bottlenecks.bottleneck_record import FITTING, NARROW, WIDE, BottleneckPart, Bottlenecks, NetworkSize
from sosp.studies.bottlenecks.removals import RemovalCounts, RemovalSource, count_removals
from sosp.studies.bottlenecks.significance_tests import compute_tails, correct_p_values, merge_p_values
from sosp.surgery.widen import make_wide_layout

CostOf = Callable[[Mapping[str, float]], Cost]  # layer -> factor to the cost of the network with these widths


def bottlenecks(
    given: RemovalSource,
    *,
    ratios: Sequence[float] | None = None,
    again: Sequence[RemovalSource] = (),
    structures: Structures | None = None,
    blocks: NamedBlocks | None = None,
    alpha: float = 0.05,
    cost: CostOf | None = None,
) -> Bottlenecks:
    """Find the layers and blocks that are too narrow or wider than needed, and recommend widths.

    If all S structures were alike, a part of m structures would lose a hypergeometric(S, m, n) number of the n removed
    ones. A part is "too narrow" if it loses significantly fewer, and "over-wide" if it loses significantly more, at
    half of the ratios or more, at significance level ``alpha`` with Holm's correction for the number of parts. The
    recommended factor must also change the width of its narrowest layer. Otherwise the part is "as needed". The factor
    is the kept share of the part over the kept share of all structures, the median over the ratios.

    Args:
        given: A saliency, or masks of one network at one or several ratios.
        ratios: Overall shares to remove by the saliency; by default 0.1 to 0.9.
        again: Saliencies from other examples, to measure how stable the result is.
        structures: The structures of the masks, or of a saliency from a file; without them every layer is a block.
        blocks: Block -> layers or patterns; by default the stages, which the network's additions define.
        alpha: Probability of any false verdict.
        cost: A function from layer -> factor to ``Cost``, for networks whose cost must be counted differently.

    Returns:
        A ``Bottlenecks`` with a verdict and a factor for every layer and block.

    Raises:
        ArgumentError: If there is nothing to judge, or the ratios are not shares between 0 and 1.
        StructureError: If ``blocks`` names an unknown layer, or separates layers that share a width.
    """
    if not is_number(alpha) or not 0 < alpha < 1:
        raise ArgumentError(f"alpha={alpha!r} must be a number between 0 and 1.")
    structures = given.structures if isinstance(given, Saliency) else structures
    _refuse_blocks(structures)
    groups = None if structures is None else find_blocks(structures, blocks)
    found, *others = [_judge_parts(count_removals(g, ratios, structures), groups, alpha) for g in (given, *again)]
    found = replace(
        found,
        layers=_add_stability(found.layers, [o.layers for o in others]),
        blocks=_add_stability(found.blocks, [o.blocks for o in others]),
        subsamples=len(others),
    )
    return _add_sizes(found, None if structures is None else structures.flow, cost)


def _refuse_blocks(structures: Structures | None) -> None:
    if structures is not None and structures.kind == "blocks":
        raise ArgumentError("kind='blocks' has one structure per branch, and no widths. Use kind='filters'.")


def _judge_parts(removals: RemovalCounts, groups: Sequence[Block] | None, alpha: float) -> Bottlenecks:
    single = tuple(Block(name, (name,)) for name in removals.layers)
    own = set(removals.layers)
    kept = [replace(b, layers=tuple(n for n in b.layers if n in own)) for b in groups or single]
    return Bottlenecks(
        removals.method,
        removals.ratios,
        _parts(removals, single, alpha),
        _parts(removals, [b for b in kept if b.layers], alpha),
        alpha,
        0,
    )


def _parts(removals: RemovalCounts, blocks: Sequence[Block], alpha: float) -> tuple[BottleneckPart, ...]:
    sizes = dict(zip(removals.layers, removals.sizes, strict=True))
    rows = [dict(zip(removals.layers, row, strict=True)) for row in removals.gone]
    found = [_part(b, sizes, [sum(row[n] for n in b.layers) for row in rows], removals) for b in blocks]
    corrected = correct_p_values([part.p for part in found])
    return tuple(_with_verdict(part, p, alpha, sizes) for part, p in zip(found, corrected, strict=True))


def _part(block: Block, sizes: Mapping[str, int], gone: list[int], removals: RemovalCounts) -> BottleneckPart:
    """Return the losses of a block; ``verdict`` is the direction of the deviation, ``p`` not yet corrected."""
    total, members = removals.total, sum(sizes[n] for n in block.layers)
    drawn = [sum(row) for row in removals.gone]
    chances = [compute_tails(total, members, n, k) for n, k in zip(drawn, gone, strict=True)]
    low, high = merge_p_values([c[0] for c in chances]), merge_p_values([c[1] for c in chances])
    kept = [(1 - k / members) / (1 - n / total) for n, k in zip(drawn, gone, strict=True) if n < total]
    return BottleneckPart(
        block.name,
        block.layers,
        members,
        tuple(k / members for k in gone),
        min(1.0, 2 * min(low, high)),  # two-sided
        median(kept) if kept else 1.0,
        NARROW if low < high else WIDE,
    )


def _with_verdict(part: BottleneckPart, p: float, alpha: float, sizes: Mapping[str, int]) -> BottleneckPart:
    """Return the part with its verdict: as needed unless significant and worth a channel of the narrowest layer."""
    narrowest = min(sizes[n] for n in part.layers)
    wanted = narrowest * part.factor
    worth = round(wanted) > narrowest if part.verdict == NARROW else round(wanted) < narrowest
    factor = max(part.factor, 1 / narrowest)  # keep at least one channel
    return replace(part, p=p, factor=factor, verdict=part.verdict if p < alpha and worth else FITTING)


def _add_stability(
    parts: tuple[BottleneckPart, ...], others: list[tuple[BottleneckPart, ...]]
) -> tuple[BottleneckPart, ...]:
    if not others:
        return parts
    said = [{part.name: part.verdict for part in other} for other in others]
    return tuple(replace(p, stability=mean(s.get(p.name) == p.verdict for s in said)) for p in parts)


def _add_sizes(found: Bottlenecks, flow: Flow | None, cost: CostOf | None) -> Bottlenecks:
    """Return the result with the size of the network as it is, and with the recommended widths."""
    if flow is None:
        return replace(found, note="the flow of its channels is not known.")
    before = compute_whole_cost(flow)
    try:
        after = (cost or count_along_flow(flow))(found.widths(found.factors)) if found.factors else before
    except SospError as error:
        return replace(found, before=NetworkSize(before.params, before.macs), note=str(error))
    return replace(found, before=NetworkSize(before.params, before.macs), after=NetworkSize(after.params, after.macs))


def count_along_flow(flow: Flow) -> CostOf:
    """Return a function that counts exactly along the channel flow and refuses, by name, widths that the code fixes."""
    known = learn_pins(flow)
    return lambda factors: compute_cost(known, make_wide_layout(known, factors, frozenset(factors)))
