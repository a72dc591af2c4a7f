"""Compare methods on one network: the same data, the same ratios, a table of cells."""
