"""From a trained network, data and a budget to a smaller network. Read ``prune.py`` first."""
