"""From a Mask to a smaller network, and back: shrink, widen, verify, save."""
