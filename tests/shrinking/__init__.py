"""The table of networks to shrink: user code of every kind, tiny, and what is expected to get smaller in it."""

from shrinking import attention, convolutions, joins, mixing, movement, norms, patches, sharing, signatures, tokens
from shrinking.recipe import Case, Recipe, carry_out

RECIPES: dict[str, Recipe] = {
    **joins.RECIPES,
    **convolutions.RECIPES,
    **norms.RECIPES,
    **movement.RECIPES,
    **patches.RECIPES,
    **mixing.RECIPES,
    **attention.RECIPES,
    **tokens.RECIPES,
    **sharing.RECIPES,
    **signatures.RECIPES,
}


def names() -> list[str]:
    """The names of all cases."""
    return list(RECIPES)


def case(name: str) -> Case:
    """One case, built afresh."""
    return carry_out(name, RECIPES[name])
