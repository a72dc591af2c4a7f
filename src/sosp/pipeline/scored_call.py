"""One call of ``prune`` with its scores: cut to any budget, measure the result on inputs that nothing else has used."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from sosp.core.batches import is_source, iterate_chunks, resize_chunks, take_examples
from sosp.core.data_forms import is_dataset
from sosp.core.loss_names import name_loss
from sosp.core.opened_data import CachedLoader
from sosp.errors import BudgetError, DataError, StructureError
from sosp.graph.records import Saliency
from sosp.pipeline import cut
from sosp.pipeline.cut import PruningCall, choose_scoring, count_macs
from sosp.pipeline.held_out import BATCH, HeldOut
from sosp.pipeline.measurement import Measured, measure_pruning
from sosp.pipeline.pruned import Pruned, warn_of_little_gain
from sosp.pipeline.settings_text import describe_settings
from sosp.scoring.methods import METHODS

MEASURED_MACS, LEAST_MEASURED = 1e11, 32  # of the unused inputs in one pass on a CPU, and how many there are at least
TIMED_MACS = 2e10  # of the inputs of one timed pass on a CPU


class ScoredCall:
    """The saliencies of a call, each computed once."""

    def __init__(self, call: PruningCall) -> None:
        self.call = call
        self.started, self.scoring = time.perf_counter(), 0.0  # seconds
        self.ways = list(call.ways)
        self.known: dict[int, Saliency] = {}  # by the identity of the groups, which may be a list
        self.held: dict[int, HeldOut] = {}  # by the largest number of inputs

    # Cut --------------------------------------------------------------------------------------------------------------

    def cut(self, **budget: float | None) -> Pruned:
        """Remove and repair; by other groups where no channel, or too few, can be removed as a whole."""
        ways = tuple(self.ways)
        for groups in ways:
            try:
                found = self.call.cut(self.find_saliency(groups), groups, **budget)
                return replace(found, settings=describe_settings(self.call, found, groups))
            except (StructureError, BudgetError):
                if groups is ways[-1]:
                    raise
        raise AssertionError

    @property
    def first(self) -> Saliency:
        """Return the saliency of the first groups that there are."""
        for groups in self.ways[:-1]:
            try:
                return self.find_saliency(groups)
            except StructureError:
                pass
        return self.find_saliency(self.ways[-1])

    def find_saliency(self, groups: Any) -> Saliency:
        """Return the saliency of these groups."""
        if id(groups) not in self.known:
            started = time.perf_counter()
            try:
                self.known[id(groups)] = self.call.score(self.call.model, groups)
            except StructureError:  # not tried again at the next budget
                self.ways = [other for other in self.ways if other is not groups] or self.ways
                raise
            self.scoring += time.perf_counter() - started
        return self.known[id(groups)]

    def keep_repair_inputs(self) -> None:
        """For several repairs, read the inputs once where they may come from files."""
        call = self.call
        if call.repair is None or not (is_source(call.data) or is_dataset(call.data)):
            return
        count, generator = call.count_repair_inputs(self.first), torch.Generator().manual_seed(call.repair_seed)
        chunks = iterate_chunks(call.data, count, generator, alone=True, model=call.model)
        batches = [c.inputs if c.keyed else (c.inputs, torch.zeros(c.size)) for c in chunks]
        self.call = replace(call, repair_inputs=CachedLoader(batches))

    # Measure ----------------------------------------------------------------------------------------------------------

    def finish(self, found: Pruned, held: HeldOut | None = None) -> Pruned:
        """Measure a pruned network, and warn if it is no better than the original."""
        if found.measured is None:
            found = replace(found, measured=self.measure(found, held))
        warn_of_little_gain(found)
        return found if found.seconds else replace(found, seconds=self.seconds)

    @property
    def seconds(self) -> Mapping[str, float]:
        """Return the seconds of scoring, and of everything so far."""
        return {"scoring": self.scoring, "all": time.perf_counter() - self.started}

    def measure(self, found: Pruned, held: HeldOut | None = None, **timed: Any) -> Measured:
        """Measure a pruned network next to the original."""
        model, example = self.call.model, self.timed_example
        hold_out = self.hold_out if held is None else lambda: held
        return measure_pruning(model, found.model, example, found.mask, hold_out, **timed)

    @property
    def timed_example(self) -> Any:
        """Return the inputs of a timed call: the first rows of the data, at most eight."""
        head = self.call.head
        return take_examples(head.inputs, self.call.count_affordable(count_macs(self.first), TIMED_MACS, 1, head.size))

    def hold_out(self, limit: float = MEASURED_MACS, most: int | None = None) -> HeldOut:
        """Return inputs that are used neither for scoring nor for repair: of the test data, or those not drawn.

        Raises:
            DataError: All inputs are used, or it is not known which.
        """
        call = self.call
        most = cut.MOST_UNUSED if most is None else most
        if most in self.held:
            return self.held[most]
        count = call.count_affordable(count_macs(self.first), limit, LEAST_MEASURED, most)
        data, skip, where = call.test, 0, "of the test data"
        if data is None:
            data, skip, where = call.data, self._count_used(), "used for neither scoring nor repair"
        generator = torch.Generator().manual_seed(call.seed or 0)
        chunks = iterate_chunks(data, count, generator, alone=True, model=call.model, skip=skip)
        held = tuple(resize_chunks(chunks, BATCH))
        if not held:
            raise DataError(
                f"scoring and repair use all {call.count_inputs(skip):,} inputs. Give more, or set fewer examples"
            )
        self.held[most] = HeldOut(call.model, held, self.first.loss or name_loss(call.loss), where)
        return self.held[most]

    def _count_used(self) -> int:
        """Return how many of the inputs drawn first are used."""
        call, saliency = self.call, self.first
        if call.seed is None and not isinstance(call.data, CachedLoader):
            raise DataError("scoring and repair draw their inputs with different seeds. Give both the same seed")
        scoring = choose_scoring(saliency.structures, call)["examples"] if METHODS[saliency.method].data else 0
        used = [scoring, *([] if call.repair is None else [call.count_repair_inputs(saliency)])]
        if None in used:
            raise DataError("scoring or repair uses all inputs (examples=None). Give a number of examples")
        return max(used)
