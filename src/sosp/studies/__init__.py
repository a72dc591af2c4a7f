"""Many prunings: compare methods, find and widen bottlenecks, redo the paper's experiments."""
