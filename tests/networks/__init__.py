"""The one table of test networks: user code of every kind, tiny, in float64, the same numbers on every call.

Each row says what is true of a network: its prunable layers and their norms. Rows with ``classes`` are scored, and
compared with oracles; all others are shrunk, and say what is expected to get smaller. Next to the table stand networks
of the literature, whose sizes are known, and random ones.
"""

from networks import (
    attention,
    convolutions,
    joins,
    mixing,
    movement,
    norms,
    patches,
    scored,
    sharing,
    signatures,
    tokens,
)
from networks.recipe import SCORED_EXAMPLES, Case, Recipe, carry_out
from networks.scored import real_targets

TABLES = {
    module.__name__: module.RECIPES
    for module in (
        *(scored, joins, convolutions, norms, movement, patches, mixing, attention, tokens, sharing, signatures),
    )
}
RECIPES: dict[str, Recipe] = {name: recipe for table in TABLES.values() for name, recipe in table.items()}
assert len(RECIPES) == sum(map(len, TABLES.values())), "two rows have one name"


def to_shrink() -> list[str]:
    """The names of the networks that are shrunk."""
    return [name for name, recipe in RECIPES.items() if not recipe.classes]


def to_score() -> list[str]:
    """The names of the networks that are scored."""
    return [name for name, recipe in RECIPES.items() if recipe.classes]


def case(name: str) -> Case:
    """One network with an example, built afresh."""
    return carry_out(name, RECIPES[name])


__all__ = ["RECIPES", "SCORED_EXAMPLES", "Case", "case", "real_targets", "to_score", "to_shrink"]
