"""Jets: values that carry their tangent through a network, and the rules for the operations they meet."""

from sosp.jets import rules
from sosp.jets.jet import RULES, Gate, Jet, Unsupported, value
from sosp.jets.norms import folded_norms
from sosp.jets.rules import gate

__all__ = ["RULES", "Gate", "Jet", "Unsupported", "folded_norms", "gate", "rules", "value"]
