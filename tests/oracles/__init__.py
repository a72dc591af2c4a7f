"""Slow, dense, float64 answers to compare the library with; imports torch and the standard library only."""
