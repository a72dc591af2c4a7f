"""AMC: an agent walks through the layers, says how much of each stays, and learns from the accuracy that is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from sosp.baselines.amc_agent import Agent, AgentTransition
from sosp.baselines.amc_budget import AmcBudget, build_budget
from sosp.baselines.amc_features import STATE_SIZE, LayerFeatures, extract_features
from sosp.baselines.arguments import prepare_structures, take_example, take_validation_set
from sosp.core.progress import track_progress
from sosp.errors import check_whole_number
from sosp.graph.mask import Mask, masked
from sosp.graph.records import Structures
from sosp.scoring.score import score
from sosp.training import evaluate

MEMORY = 100  # episodes
NOISE, FADING = 0.5, 0.95  # deviation of the actions, and its factor from episode to episode


def amc(
    model: nn.Module,
    data: Any,
    *,
    macs: float = 0.5,
    structures: Structures | None = None,
    least: float = 0.2,
    episodes: int = 400,
    warmup: int = 100,
    examples: int = 5000,
    seed: int = 0,
) -> Mask:
    """Search how much every layer keeps where at most ``macs`` of the multiply-accumulates may be left: the best mask.

    He et al., AMC: AutoML for Model Compression and Acceleration on Mobile Devices, ECCV 2018
    (github.com/mit-han-lab/amc). In an episode an agent (DDPG) goes from the first layer to the last and says, from
    11 numbers about each, which share stays: ``least`` or more, and no more than leaves room for the layers to come.
    Those filters stay that have the largest L1 norm. The reward is the accuracy, without fine-tuning, on ``examples``
    of the training data. The first ``warmup`` episodes are random, in the others the agent acts, with fading noise.

    ``macs``: a share, or a whole number above 1, by the exact count of what ``sosp.shrink`` builds.
    """
    check_whole_number("episodes", episodes)
    check_whole_number("warmup", warmup, least=0)
    example = take_example(model, data)
    found = prepare_structures("amc", model, example, structures)
    judges = take_validation_set(
        model, data, check_whole_number("examples", examples), check_whole_number("seed", seed, least=0)
    )
    norms = score(model, None, method="magnitude-l1", structures=found).scores
    budget = build_budget(found, norms, macs, least)
    walker = EpisodeRunner(budget, extract_features(model, example, budget), torch.Generator().manual_seed(seed))
    best, chosen = -1.0, budget.fewest
    for episode in track_progress(range(episodes), "amc: episodes", episodes):
        noise = None if episode < warmup else NOISE * FADING ** (episode - warmup)
        walk = walker.walk(noise)
        reward = evaluate(masked(model, Mask.from_structures(found, budget.removed(walk.kept))), judges).top1
        walker.learn(walk, reward, practise=noise is not None)
        if reward > best:
            best, chosen = reward, walk.kept
    return Mask.from_structures(found, budget.removed(chosen))


@dataclass(frozen=True)
class Episode:
    """An episode: what was seen of each layer, what the agent said, and how many structures it keeps."""

    states: tuple[Tensor, ...]
    actions: tuple[float, ...]
    kept: tuple[int, ...]


class EpisodeRunner:
    """An agent in front of a network's layers."""

    def __init__(self, budget: AmcBudget, features: LayerFeatures, generator: torch.Generator) -> None:
        self.budget, self.features = budget, features
        self.agent = Agent(STATE_SIZE, MEMORY * len(budget.layers), generator)

    def walk(self, noise: float | None) -> Episode:
        """From the first layer to the last, within the budget; without noise, at random."""
        states: list[Tensor] = []
        actions: list[float] = []
        kept: list[int] = []
        reduced, last = 0.0, 1.0
        for t, width in enumerate(self.budget.widths):
            states.append(self.features.state(t, reduced, last))
            actions.append(self.agent.explore() if noise is None else self.agent.act(states[-1], noise))
            stays, macs = self.budget.fitting(kept, round(actions[-1] * width))
            kept.append(stays)
            reduced, last = 1 - macs / self.budget.whole, stays / width
        return Episode(tuple(states), tuple(actions), tuple(kept))

    def learn(self, walk: Episode, reward: float, *, practise: bool) -> None:
        """Remember every step with the reward of the whole walk; practise as often, once the random ones are over."""
        for transition in list_transitions(walk, reward):
            self.agent.remember(transition)
            if practise:
                self.agent.learn()


def list_transitions(walk: Episode, reward: float) -> Sequence[AgentTransition]:
    """The steps of a walk; all of them get the reward at its end."""
    ends = [*pairwise(walk.states), (walk.states[-1], walk.states[-1])]
    last = [0.0] * (len(ends) - 1) + [1.0]
    return [
        AgentTransition(a, torch.tensor([action]), torch.tensor([reward]), b, torch.tensor([end]))
        for (a, b), action, end in zip(ends, walk.actions, last, strict=True)
    ]
