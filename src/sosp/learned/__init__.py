"""Methods that learn what to remove, in a training or a search, instead of scoring a network as it is."""

from sosp.learned.amc import amc
from sosp.learned.gal import gal
from sosp.learned.result import Learned
from sosp.learned.slimming import Slimming
from sosp.learned.variational import variational

__all__ = ["Slimming", "variational", "gal", "amc", "Learned"]
