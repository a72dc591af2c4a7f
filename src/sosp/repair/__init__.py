"""Repair: what is left of a network after a cut, refitted to what the original computes; no labels, no training."""

from sosp.repair.absent import Absent
from sosp.repair.plan import FewInputsWarning
from sosp.repair.refit import repair
from sosp.repair.result import LayerError, Repaired

__all__ = ["repair", "Repaired", "LayerError", "FewInputsWarning", "Absent"]
