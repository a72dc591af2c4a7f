"""Channel flow: which channels of a network share a place, which stay zero, and what cannot be followed and why."""

from sosp.graph.flow import Flow, follow_channels, trace

__all__ = ["Flow", "follow_channels", "trace"]
