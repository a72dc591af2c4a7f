"""Methods that learn what to remove, in a training or a search, instead of scoring a network as it is."""

from sosp.baselines.amc_search import amc
from sosp.baselines.gal_training import gal
from sosp.baselines.learned import Learned
from sosp.baselines.slimming import Slimming
from sosp.baselines.variational_training import variational

__all__ = ["Slimming", "variational", "gal", "amc", "Learned"]
