"""What one call of ``prune`` returns, in numbers and words."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from sosp.graph.mask import Mask
from sosp.graph.plan import Cost, Plan
from sosp.graph.records import Saliency
from sosp.pipeline.measurement import Measured, format_change
from sosp.refit import Repaired
from sosp.surgery.checkpoint import save

if TYPE_CHECKING:
    from sosp.pipeline.largest_cut import Search

LOW_AGREEMENT = 0.9
ALL = 0.995  # a share that is called all of it


class PruningWarning(UserWarning):
    """A pruned network is no smaller or no faster than the original, or repair has made it worse."""


@dataclass(frozen=True, eq=False)
class Pruned:
    """A smaller network, and how it came about."""

    model: nn.Module
    mask: Mask
    saliency: Saliency
    cost_before: Cost
    cost_after: Cost
    plan: Plan | None = None  # how the mask was removed; None after several rounds, each of which had its own
    repaired: Repaired | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)  # that scoring took, and all of it
    settings: str = ""  # method, targets, examples, groups, order, repair
    measured: Measured | None = None
    search: Search | None = None  # how the budget was found that ``max_drop`` allows

    def __str__(self) -> str:
        before, after = self.cost_before, self.cost_after
        lines = [
            f"{self.saliency.method}: {self.mask.chosen:,} of {self.mask.structures:,} structures removed",
            self.settings,
            format_change("parameters", f"{before.params:,}", f"{after.params:,}", self.params_left),
            format_change("MACs", f"{before.macs:,}", f"{after.macs:,}", self.macs_left),
            *([] if self.measured is None else self.measured.list_lines()),
            *([] if self.repaired is None else [self.repaired.summary]),
            *([] if self.search is None else [str(self.search)]),
            *([] if self.measured is None else [f"next: {self.next_step}"]),
        ]
        return "\n".join(filter(None, lines))

    @property
    def params_left(self) -> float:
        return self.cost_after.params / max(self.cost_before.params, 1)

    @property
    def macs_left(self) -> float:
        return self.cost_after.macs / max(self.cost_before.macs, 1)

    @property
    def next_step(self) -> str:
        """Return what to do with the network."""
        answers = None if self.measured is None else self.measured.answers
        tune = "fine-tune with sosp.train(pruned.model, data, schedule)"
        if answers is not None and answers.agreement.after < LOW_AGREEMENT:
            return f"{tune}, or remove less: a larger budget than macs={self.macs_left:.2f}"
        return f'pruned.save("small.safetensors"); to gain accuracy, {tune}'

    def save(self, path: str | Path) -> None:
        """One safetensors file with the network, the mask and how to rebuild it: ``sosp.load(path, model)``."""
        save(path, self.model, self.mask)


def warn_of_little_gain(found: Pruned) -> None:
    """Warn, with the reason, if structures were removed in vain, or the pruned network is slower or repaired badly."""
    if reasons := list_shortcomings(found):
        warnings.warn(" ".join(reasons), PruningWarning, stacklevel=2)


def list_shortcomings(found: Pruned) -> list[str]:
    """Return a few sentences about each way in which the pruned network is no better than the original."""
    reasons, timed = [], found.measured.latency if found.measured is not None else None
    scattered = any(name.rpartition(".")[2] == "scatter" for name, _ in found.model.named_modules())
    if found.mask.chosen and min(found.params_left, found.macs_left) > ALL:
        reasons.append(
            f"{found.mask.chosen:,} structures were removed, but {found.params_left:.1%} of the parameters and "
            f"{found.macs_left:.1%} of the MACs are left: "
            + ("their places are filled with zeros where branches meet. " if scattered else "")
            + "Channels that an operation mixes (LayerNorm, an add with kept channels) stay in place; "
            "sosp.trace(model, example) lists them. Set a budget (macs=0.5), use "
            "selection=sosp.Selection(groups='coupled'), or exclude fewer layers."
        )
    if found.mask.chosen and timed is not None and found.measured is not None and found.measured.slower:
        why = "widths are no multiples of what the hardware processes at once"
        if scattered:
            why = "outputs of independent filters are copied back into place before branches meet"
        elif timed[0].median < 1e-3:
            why = "in a network this small, calling each operation takes longer than computing it"
        reasons.append(
            f"the pruned network is slower: {1e3 * timed[1].median:.3g} ms, original {1e3 * timed[0].median:.3g} ms. "
            f"The likely reason: {why}. Use whole channels where the network has any, with widths that suit the "
            "hardware: selection=sosp.Selection(groups='coupled', round_to=8) (32 on a GPU). Small networks gain more "
            "from larger batches."
        )
    if found.repaired is not None and found.repaired.agreement_after < found.repaired.agreement_before:
        reasons.append(
            f"repair changed the agreement with the original from {found.repaired.agreement_before:.1%} to "
            f"{found.repaired.agreement_after:.1%} on the inputs it was tested on. Give more inputs, or repair=False."
        )
    return reasons
