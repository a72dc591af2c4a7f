"""Channel flow: which channels of a network share a place, which stay zero, and what cannot be followed and why."""

from sosp.flow.flow import Flow, follow, trace

__all__ = ["Flow", "follow", "trace"]
