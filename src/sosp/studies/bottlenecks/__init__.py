"""Pruning as a microscope: the layers that lose little however much is removed are too narrow.

>>> found = sosp.bottlenecks(sosp.score(model, loader))
>>> print(found)
>>> found.advice
'widen layer3 x2, shrink layer1 x0.6'
"""

from sosp.studies.bottlenecks.blocks import Block, blocks_of
from sosp.studies.bottlenecks.find import bottlenecks
from sosp.studies.bottlenecks.record import FITTING, NARROW, VERDICTS, WIDE, Bottlenecks, Part, Size

__all__ = ["FITTING", "NARROW", "VERDICTS", "WIDE", "Block", "Bottlenecks", "Part", "Size", "blocks_of", "bottlenecks"]
