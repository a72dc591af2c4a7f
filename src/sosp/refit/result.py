"""What a repair did: the network, and the error of every layer before and after."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class LayerRepair:
    """How far a layer is from the original network at its place, on inputs that no layer was fitted to.

    Errors are shares of the variance of what the original computes there, behind the activation that follows: 0 is the
    original, 1 knows nothing of it. Both are measured with everything in front of the layer repaired already.
    """

    layer: str
    before: float
    after: float
    ridge: float | None  # the regularisation that was chosen; None: the layer keeps its weights
    unknowns: int  # for each output
    rows: int  # equations they were fitted to
    why: str = ""  # it was not refitted


@dataclass(frozen=True, eq=False)
class Repaired:
    """A network whose layers were refitted, and what that changed."""

    model: nn.Module
    layers: tuple[LayerRepair, ...]  # in the order of the network; of the last sweep
    agreement_before: float  # with the original, on the inputs held out: share of equal answers, or of the variance
    agreement_after: float
    examples: int  # inputs, those held out among them
    seconds: float
    classes: bool = True  # answers are classes; otherwise numbers, and what agrees is a share of their variance
    note: str = ""  # where the refitted weights were worse: in what, and what is returned in their place

    @property
    def summary(self) -> str:
        """A line."""
        refitted = sum(x.ridge is not None for x in self.layers)
        return (
            f"repaired: {refitted} of {len(self.layers)} layers refitted on {self.examples:,} inputs in "
            f"{self.seconds:.1f} s; {self._outputs}{self.note and '. '}{self.note}"
        )

    @property
    def _outputs(self) -> str:
        """Of numbers the error, which has no upper end: a share that agrees would be far below zero."""
        before, after = self.agreement_before, self.agreement_after
        if self.classes:
            return f"agreement with the original {before:.1%} -> {after:.1%}"
        return f"error of the outputs {1 - before:.4f} -> {1 - after:.4f} of the original's variance"

    def __str__(self) -> str:
        """A line per layer."""
        width = max((len(x.layer) for x in self.layers), default=0)
        errors = (f"  {x.layer:<{width}}  error {x.before:8.4f} -> {x.after:8.4f}  {x.why}" for x in self.layers)
        return "\n".join([self.summary, *(line.rstrip() for line in errors)])
