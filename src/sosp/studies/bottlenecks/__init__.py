"""Find layers that are too narrow: they lose little, however much is removed.

>>> found = sosp.bottlenecks(sosp.score(model, loader))
>>> print(found)
>>> found.advice
'widen layer3 x2, shrink layer1 x0.6'
"""
