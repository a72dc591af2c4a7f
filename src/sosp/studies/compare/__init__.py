"""Compare methods on one network: the same data, the same ratios, a table of cells."""

from sosp.studies.compare.cells import Cell, Plan
from sosp.studies.compare.measure import compare
from sosp.studies.compare.summary import Summary, states, summaries

__all__ = ["compare", "Plan", "Cell", "Summary", "states", "summaries"]
