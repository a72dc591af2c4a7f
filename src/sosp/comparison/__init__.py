"""Compare methods on one network: the same data, the same ratios, a table of cells."""

from sosp.comparison.cells import Cell, Plan
from sosp.comparison.measure import compare
from sosp.comparison.summary import Summary, states, summaries

__all__ = ["compare", "Plan", "Cell", "Summary", "states", "summaries"]
