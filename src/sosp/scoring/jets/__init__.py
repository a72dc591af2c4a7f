"""Jets: values that carry their tangent through a network, and the rules for the operations they meet."""

from sosp.scoring.jets import rules
from sosp.scoring.jets.jet import RULES, Gate, Jet, Unsupported, value
from sosp.scoring.jets.norms import folded_norms
from sosp.scoring.jets.rules import gate

__all__ = ["RULES", "Gate", "Jet", "Unsupported", "folded_norms", "gate", "rules", "value"]
