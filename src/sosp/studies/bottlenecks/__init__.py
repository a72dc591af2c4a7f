"""Pruning as a microscope: the layers that lose little however much is removed are too narrow.

>>> found = sosp.bottlenecks(sosp.score(model, loader))
>>> print(found)
>>> found.advice
'widen layer3 x2, shrink layer1 x0.6'
"""
