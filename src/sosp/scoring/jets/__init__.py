"""Jets: values that carry their tangent through a network, and the rules for the operations they meet."""

from sosp.scoring.jets import rules
from sosp.scoring.jets.jet import RULES, Gate, Jet, UnsupportedError, fold_batch_norms, get_primal, load_forward_rules
from sosp.scoring.jets.rules import apply_gate

__all__ = [
    "RULES",
    "Gate",
    "Jet",
    "UnsupportedError",
    "apply_gate",
    "fold_batch_norms",
    "get_primal",
    "load_forward_rules",
    "rules",
]
