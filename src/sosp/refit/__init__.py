"""Repair: what is left of a network after a cut, refitted to what the original computes; no labels, no training."""

from sosp.refit.refit import repair
from sosp.refit.removed_channels import RemovalHistory
from sosp.refit.repair_plan import FewInputsWarning
from sosp.refit.result import LayerRepair, Repaired

__all__ = ["repair", "Repaired", "LayerRepair", "FewInputsWarning", "RemovalHistory"]
