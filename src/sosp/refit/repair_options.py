"""The options of ``repair``, and of rounds of pruning and repair, as one record."""

from __future__ import annotations

from dataclasses import dataclass

from sosp.core.options import AUTO_OR_WHOLE, WHOLE, define_option


@dataclass(frozen=True)
class Repair:
    """How the remaining weights are refitted to the outputs of the original."""

    examples: int | str = define_option(
        AUTO_OR_WHOLE,
        "Number of inputs for the repair.",
        "auto",
        low=2,
        flag="repair-examples",
        shown="auto: 1000, fewer for large inputs on a CPU",
    )
    sweeps: int = define_option(WHOLE, "Number of times the repair goes through the network.", 1, low=1)
    seed: int = define_option(WHOLE, "Seed of what the repair draws at random.", 0, low=0, flag="")
    rounds: int = define_option(WHOLE, "Number of rounds of scoring, pruning and repair.", 1, low=1)
