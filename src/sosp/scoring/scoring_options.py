"""The options of ``score`` as one record."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sosp.core.options import AUTO_OR_NUMBER, AUTO_OR_WHOLE, TEXT, WHOLE, define_option
from sosp.graph.records import OBJECTIVES
from sosp.graph.structures import GATES

TARGETS = ("auto", "own", "labels")


@dataclass(frozen=True)
class Scoring:
    """How structures are scored: on which examples, against what, and where their gates are."""

    targets: str = define_option(
        TEXT,
        "Score against the network's own outputs (own), which needs no labels, or against labels.",
        "auto",
        choices=TARGETS,
        shown="auto: own where the method allows it",
    )
    temperature: float | str = define_option(
        AUTO_OR_NUMBER,
        "With own outputs: what the logits are divided by.",
        "auto",
        low=1e-3,
        shown="auto: the smallest of 1, 2, 4, 8 at which enough examples count",
    )
    examples: int | str | None = define_option(
        AUTO_OR_WHOLE,
        "Number of training examples for scoring.",
        "auto",
        low=1,
        shown="auto: 256 against own outputs, 1000 against labels",
    )
    samples: int | None = define_option(
        WHOLE,
        "For sosp-i and obd: number of random cotangents per example, in place of all outputs.",
        low=1,
        shown="4 against more than 16 own outputs, else all",
    )
    objective: str | None = define_option(
        TEXT,
        "Where the saliency formula takes absolute values.",
        choices=OBJECTIVES,
        shown="individual, or the objective of the method",
    )
    gate: str | None = define_option(
        TEXT,
        "Place of the gates: after normalization (features) or before (weights).",
        choices=GATES,
        shown="features; weights with --preset paper",
    )
    generator: torch.Generator | None = None  # source of randomness: which examples are drawn, and sampled labels
