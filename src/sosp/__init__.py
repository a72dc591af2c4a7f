"""Second-order structured pruning: make trained networks smaller by what removing each structure does to the loss.

structures = sosp.find_structures(model, example)          # what can be removed
saliency = sosp.score(model, data, method="sosp-h")        # what removing it does to the loss
mask = sosp.select(saliency, ratio=0.5)                    # what goes
small = sosp.masked(model, mask)                           # the network without it
"""

from sosp import errors
from sosp.criteria import METHODS, score
from sosp.mask import Mask, masked
from sosp.passes import SlowPathWarning
from sosp.records import Layer, Saliency, Structures
from sosp.selection import select
from sosp.structures import downsampling, find_structures
from sosp.surgery import shrink

__version__ = "0.1.0"

# In the order of the flow.
__all__ = [
    "find_structures", "downsampling", "Structures", "Layer",
    "score", "METHODS", "Saliency", "SlowPathWarning",
    "select", "Mask", "masked",
    "errors", "__version__",
]  # fmt: skip
