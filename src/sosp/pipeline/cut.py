"""One call of ``prune``: its options made definite, its data opened once, and the steps that it takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import floor
from typing import Any, TypeVar

import torch
from torch import nn

from sosp.core.batches import Chunk, is_source, iterate_chunks
from sosp.core.borrowed_model import check_network, find_device
from sosp.core.loss_names import AUTO, LossLike, name_loss
from sosp.core.opened_data import count_expected_examples, has_two_parts, open_data_once
from sosp.errors import ArgumentError, check_choice, check_whole_number
from sosp.graph.flow import follow_channels
from sosp.graph.plan import compute_whole_cost, plan_removal
from sosp.graph.records import Saliency, Structures
from sosp.graph.structures import Exclude, find_excluded_names, find_structures
from sosp.pipeline.pruned import Pruned
from sosp.refit import RemovalHistory, Repaired, repair
from sosp.refit.repair_options import Repair
from sosp.scoring.methods import METHODS
from sosp.scoring.score import score
from sosp.scoring.scoring_options import Scoring
from sosp.selection.select import select_and_plan
from sosp.selection.selection_options import Selection
from sosp.surgery.shrink import shrink

PRESETS = ("default", "paper")
PAPER_SCORING = Scoring(targets="labels", examples=1000, gate="weights")
PAPER_SELECTION = Selection(groups="independent", rule="saliency", round_to=1)
OWN_EXAMPLES, LABELLED_EXAMPLES = 256, 1000  # scores on own outputs repeat with a quarter of the examples
REPAIR_EXAMPLES, LEAST_REPAIR_EXAMPLES = 1000, 64
REPAIR_MACS = 4e11  # of all inputs in one pass on a CPU: repair runs the network several times per layer
LEAST_UNUSED, MOST_UNUSED = 8, 500  # inputs that are left for measuring; a tenth where there are few
MOST_PAIRED = 16384  # structures: their pairs have 1 GiB in single precision
MOST_OUTPUTS = 16  # with more, SAMPLED cotangents per example stand for all outputs
SAMPLED = 4  # saliencies of 256 examples at 1,000 outputs are then 5 % off, of the 15 % that the examples make

T = TypeVar("T", Scoring, Selection)


@dataclass(frozen=True, eq=False)
class PruningCall:
    """What one call was given, with the data opened once."""

    model: nn.Module
    data: Any
    head: Chunk  # some examples of the first batch
    method: str | None
    loss: LossLike
    keep: frozenset[str]  # layers
    scoring: Scoring
    selection: Selection
    repair: Repair | None
    paper: bool
    test: Any = None  # the test part of a dataset of sosp.data
    seed: int | None = 0  # that draws the inputs of scoring and repair; None where each draws with another one
    repair_inputs: Any = None  # those read already
    state: torch.Tensor | None = None  # of the generator at the start: every scoring draws the same examples

    @classmethod
    def open(
        cls,
        model: nn.Module,
        data: Any,
        method: str | None = None,
        loss: LossLike = AUTO,
        exclude: Exclude = (),
        scoring: Scoring | None = None,
        selection: Selection | None = None,
        repairing: bool | Repair | None = None,
        preset: str = "default",
    ) -> PruningCall:
        """Check the options, complete them by the preset, and open the data."""
        check_network(model)
        _refuse_inference(model)
        check_choice("preset", preset, PRESETS)
        if method is not None:
            check_choice("method", method, METHODS)
        paper = preset == "paper"
        scoring, selection = complete_options(scoring or Scoring(), selection or Selection(), preset)
        if isinstance(repairing, Repair):
            check_whole_number("rounds", repairing.rounds)
        test = getattr(data, "test", None)
        head, data = open_data_once(data, find_device(model), keep=True, model=model)
        if repairing is None:  # a layer is fitted to some inputs and tested on others
            repairing = not paper and has_two_parts(data, model)
        how = repairing if isinstance(repairing, Repair) else Repair() if repairing else None
        keep = frozenset(find_excluded_names(model, exclude, parameters=False))
        state = None if scoring.generator is None else scoring.generator.get_state()
        seed = _find_common_seed(scoring.generator, how)
        test = test if is_source(test) else None
        return cls(model, data, head, method, loss, keep, scoring, selection, how, paper, test, seed, state=state)

    @property
    def ways(self) -> Sequence[Any]:
        """Return the groups to try: the next where no channel, or too few, can be removed as a whole."""
        return list_ways(self.selection)

    def score(self, network: nn.Module, groups: Any) -> Saliency:
        """Find what may be removed from a network, and score it."""
        keep = self.keep & dict(network.named_modules()).keys()
        structures = find_removable(network, self.head.inputs, self.selection, groups, keep, self.scoring.gate)
        how = choose_scoring(structures, self)
        if self.state is not None and self.scoring.generator is not None:
            self.scoring.generator.set_state(self.state)
        return score(network, self.data, loss=self.loss, structures=structures, **how)

    def cut(self, saliency: Saliency, groups: Any, **budget: float | None) -> Pruned:
        """Remove what meets the budget, and repair; in rounds, all but the first score what the one before has left."""
        if self.repair is None:
            return self.remove(self.model, saliency, budget)
        network, now = self.model, saliency
        history = RemovalHistory(saliency.structures)
        for k in range(1, self.repair.rounds):
            found = self.remove(network, now, _budget_of_round(budget, k / self.repair.rounds, saliency, now))
            assert found.plan is not None
            history.record(found.plan)
            network = self.refit(found.model, saliency).model
            now = self.score(network, groups)
        found = self.remove(network, now, _budget_of_round(budget, 1.0, saliency, now))
        fixed = self.refit(found.model, saliency)
        if network is self.model:
            return replace(found, model=fixed.model, repaired=fixed)
        assert found.plan is not None
        history.record(found.plan)
        before = compute_whole_cost(saliency.structures.flow or follow_channels(self.model, self.head.inputs))
        return Pruned(fixed.model, history.mask(), saliency, before, found.cost_after, None, fixed)

    def remove(self, network: nn.Module, saliency: Saliency, budget: Mapping[str, float | None]) -> Pruned:
        """Select by the budget and shrink."""
        return select_and_shrink(network, saliency, self.head.inputs, self.selection, **budget)

    def refit(self, small: nn.Module, saliency: Saliency) -> Repaired:
        """Repair a pruned network."""
        how = self.repair
        assert how is not None
        return repair(
            small,
            self.model,
            self.data if self.repair_inputs is None else self.repair_inputs,
            examples=self.count_repair_inputs(saliency),
            loss=saliency.loss or name_loss(self.loss) or "mse",  # of a loss of their own nothing is known
            sweeps=how.sweeps,
            seed=self.repair_seed,
        )

    @property
    def repair_seed(self) -> int:
        """Return the seed that draws the inputs of the repair: that of scoring, unless it has its own."""
        return (self.repair.seed if self.repair is not None else 0) or self.seed or 0

    # Which inputs are used, and which are not ---------------------------------------------------------------------

    def count_inputs(self, most: int) -> int:
        """Return the number of inputs; of data without a length, at most ``most``, which are read for it."""
        known = count_expected_examples(self.data, None)
        some = iterate_chunks(self.data, most, None, alone=True, model=self.model) if known is None else ()
        return sum(chunk.size for chunk in some) if known is None else known

    def leave_unused(self, wanted: int) -> int:
        """Return the number of inputs to use: some are left for measuring, unless there are others or none can be."""
        given = [self.scoring.examples, *([] if self.repair is None else [self.repair.examples])]
        full = any(n is None or (not isinstance(n, str) and self.count_inputs(n + 1) <= n) for n in given)
        if self.test is not None or full:
            return wanted
        inputs = self.count_inputs(wanted + wanted // 8 + LEAST_UNUSED)  # of so many, a tenth can be left
        leave = min(MOST_UNUSED, max(LEAST_UNUSED, inputs // 10)) if inputs >= 4 * LEAST_UNUSED else 0
        return min(wanted, max(1, inputs - leave))

    def count_affordable(self, macs: int, limit: float, least: int, most: int) -> int:
        """Return a number of inputs: fewer for a network with large inputs, on a CPU."""
        affordable = int(limit / max(macs, 1)) if find_device(self.model).type == "cpu" else most
        return min(most, max(least, affordable))

    def count_repair_inputs(self, saliency: Saliency) -> int:
        """Return the number of inputs to repair with."""
        assert self.repair is not None
        if not isinstance(self.repair.examples, str):
            return self.repair.examples
        check_choice("examples", self.repair.examples, ("auto",))
        macs = count_macs(saliency)
        return self.leave_unused(self.count_affordable(macs, REPAIR_MACS, LEAST_REPAIR_EXAMPLES, REPAIR_EXAMPLES))


def select_and_shrink(
    model: nn.Module,
    saliency: Saliency,
    example: Any,
    selection: Selection,
    *,
    ratio: float | None = None,
    params: float | None = None,
    macs: float | None = None,
) -> Pruned:
    """Select by the budget and shrink. A budget is met by the network that is built."""
    mask, plan = select_and_plan(saliency, selection, ratio=ratio, params=params, macs=macs)
    if plan is None:
        plan = plan_removal(saliency.structures.flow or follow_channels(model, example), mask, selection.style)
    small = shrink(model, plan, example)
    return Pruned(small, mask, saliency, compute_whole_cost(plan.flow), plan.cost, plan)


def _complete(given: T, preset: T) -> T:
    """Return the record with the preset's value wherever its own default stands."""
    usual = type(given)()
    values = {f.name: getattr(given, f.name) for f in fields(given)}
    return replace(given, **{k: getattr(preset, k) for k, v in values.items() if v == getattr(usual, k)})


def complete_options(scoring: Scoring, selection: Selection, preset: str) -> tuple[Scoring, Selection]:
    """Return the options with the values of a preset."""
    if preset == "paper":
        return _complete(scoring, PAPER_SCORING), _complete(selection, PAPER_SELECTION)
    return _complete(scoring, Scoring(gate="features")), selection


def list_ways(selection: Selection) -> Sequence[Any]:
    """Return the groups to try, one after the other."""
    return ("coupled", "independent") if selection.groups is None else (selection.groups,)


def find_removable(
    network: nn.Module, example: Any, selection: Selection, groups: Any, keep: Iterable[str], gate: str | None
) -> Structures:
    """Find what may be removed from a network."""
    groups = groups if selection.kind == "filters" else "independent"
    return find_structures(
        network, example, kind=selection.kind, groups=groups, exclude=sorted(keep), gate=gate or "features"
    )


def choose_scoring(structures: Structures, call: PruningCall) -> dict[str, Any]:
    """Return the options of ``score``: the method that the network's size allows, its targets and examples."""
    how, head = call.scoring, call.head
    affordable = structures.outputs > 0 and len(structures) <= MOST_PAIRED and head.divisible
    labels = how.targets == "labels" or (call.loss != AUTO and name_loss(call.loss) is None)
    method = call.method or ("sosp-i" if affordable and not labels and not call.paper else "sosp-h")
    labels = labels or choose_targets(method, how.targets, head.targets is not None) == "labels"
    examples = how.examples
    if isinstance(examples, str):
        check_choice("examples", examples, ("auto",))
        examples = call.leave_unused(LABELLED_EXAMPLES if labels else OWN_EXAMPLES)
    sampled = not labels and METHODS[method].samples and structures.outputs > MOST_OUTPUTS
    return {
        "method": method,
        "targets": "labels" if labels else "own",
        "temperature": how.temperature,
        "examples": examples,
        "classes": SAMPLED if sampled and how.samples is None else how.samples,
        "objective": how.objective,
        "generator": how.generator,
    }


def choose_targets(method: str, targets: str, labelled: bool) -> str:
    """Return what to score against: own outputs where the method allows it; SOSP-H gains nothing from them."""
    if targets != "auto":
        return targets
    return "own" if METHODS[method].own and not (method == "sosp-h" and labelled) else "labels"


def count_macs(saliency: Saliency) -> int:
    """Return the MACs of the original for one input; 0 where they are not known."""
    flow = saliency.structures.flow
    return 0 if flow is None else compute_whole_cost(flow).macs


def _find_common_seed(generator: torch.Generator | None, how: Repair | None) -> int | None:
    """Return the seed by which scoring and repair both draw; None if each draws by its own."""
    seed = 0 if generator is None else generator.initial_seed()
    if generator is not None:
        unused = generator.device.type == "cpu" and torch.equal(
            generator.get_state(), torch.Generator().manual_seed(seed).get_state()
        )
        seed = seed if unused else -1
    return None if seed < 0 or (how is not None and how.seed not in (0, seed)) else seed


def _budget_of_round(
    budget: Mapping[str, float | None], share: float, first: Saliency, now: Saliency
) -> dict[str, float | None]:
    """Return the budget of a round after which a ``share`` of them is done: every round takes as large a share."""
    if share == 1 and first is now:
        return dict(budget)
    found: dict[str, float | None] = {}
    for name in ("params", "macs"):
        limit = budget.get(name)
        if limit is not None and first.structures.flow is not None:
            whole = getattr(compute_whole_cost(first.structures.flow), name)
            wanted = limit / whole if limit > 1 else limit
            found[name] = max(2, floor(whole * wanted**share * (1 + 1e-12)))
    ratio = budget.get("ratio")
    if ratio is not None or not found:
        left = len(first.structures) * (1 - (0.5 if ratio is None else ratio)) ** share
        found["ratio"] = max(0.0, 1 - left / len(now.structures))
    return found


def _refuse_inference(model: nn.Module) -> None:
    """Scores are derivatives, and nothing can be differentiated that inference mode has made."""
    if torch.is_inference_mode_enabled():
        raise ArgumentError(
            "torch.inference_mode() is on, and scoring differentiates the network: call it outside of it."
        )
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if x.is_inference():
            raise ArgumentError(
                f"{name!r} was made under torch.inference_mode(), and scoring differentiates the network. Make the "
                "model outside of it, or give a copy: copy.deepcopy(model)."
            )
