"""Repair: what is left of a network after a cut, refitted to what the original computes; no labels, no training."""

from sosp.refit.plan import FewInputsWarning
from sosp.refit.refit import repair
from sosp.refit.removed_channels import Absent
from sosp.refit.result import LayerError, Repaired

__all__ = ["repair", "Repaired", "LayerError", "FewInputsWarning", "Absent"]
