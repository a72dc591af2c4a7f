"""Widen narrow layers and prune again: expand- and widen-pruning, and pruning before or after training.

>>> found = sosp.expand(lambda width: sosp.nets.resnet56(width=width), data)
>>> found.choice.blocks, found.choice.constant.factor
"""
