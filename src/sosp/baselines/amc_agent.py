"""An agent that learns actions between 0 and 1 from rewards: deep deterministic policy gradients."""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sosp.baselines.perceptron import build_perceptron


@dataclass(frozen=True)
class AgentConfig:
    """The numbers of He et al. 2018 and their code."""

    hidden: int = 300  # twice
    actor_rate: float = 1e-4
    critic_rate: float = 1e-3
    pace: float = 0.01  # of the target networks
    batch: int = 64
    discount: float = 1.0
    blend: float = 0.5  # weight of a batch in the moving average of rewards


class AgentTransition(NamedTuple):
    """What was seen, done and got, and what was seen then; in a batch, (B, ...) each."""

    state: Tensor
    action: Tensor
    reward: Tensor
    following: Tensor
    last: Tensor  # 1 where the episode ended


class Agent:
    """An actor and a critic, their slow twins, and what they remember; all chance comes from ``generator``."""

    def __init__(self, states: int, memory: int, generator: torch.Generator, habits: AgentConfig | None = None) -> None:
        self.habits, self.generator = habits or AgentConfig(), generator
        hidden = self.habits.hidden
        self.actor = nn.Sequential(*build_perceptron((states, hidden, hidden, 1), generator), nn.Sigmoid())
        self.critic = build_perceptron((states + 1, hidden, hidden, 1), generator)
        self.slow_actor, self.slow_critic = copy.deepcopy(self.actor), copy.deepcopy(self.critic)
        self.actor_step = torch.optim.Adam(self.actor.parameters(), self.habits.actor_rate)
        self.critic_step = torch.optim.Adam(self.critic.parameters(), self.habits.critic_rate)
        self.memory: deque[AgentTransition] = deque(maxlen=memory)
        self.usual: Tensor | None = None  # reward

    def explore(self) -> float:
        """Any action."""
        return float(torch.rand((), generator=self.generator))

    @torch.no_grad()
    def act(self, state: Tensor, deviation: float) -> float:
        """What it thinks best, and noise."""
        return draw_truncated_normal(float(self.actor(state)), deviation, self.generator)

    def remember(self, transition: AgentTransition) -> None:
        self.memory.append(transition)

    def learn(self) -> None:
        """A step of both networks on what it remembers, and a small one of their twins."""
        batch = self._recall()
        target = self.targets(batch)
        self._step(self.critic_step, F.mse_loss(self._value(self.critic, batch.state, batch.action), target))
        self._step(self.actor_step, -self._value(self.critic, batch.state, self.actor(batch.state)).mean())
        update_target_network(self.slow_actor, self.actor, self.habits.pace)
        update_target_network(self.slow_critic, self.critic, self.habits.pace)

    @torch.no_grad()
    def targets(self, batch: AgentTransition) -> Tensor:
        """(B, 1) ``reward - usual reward + discount * Q'(following, actor'(following))``, no more after the last."""
        mean = batch.reward.mean()
        self.usual = mean if self.usual is None else self.usual + self.habits.blend * (mean - self.usual)
        ahead = self._value(self.slow_critic, batch.following, self.slow_actor(batch.following))
        return batch.reward - self.usual + self.habits.discount * (1 - batch.last) * ahead

    def _recall(self) -> AgentTransition:
        """A batch of memories, no two the same where there are enough."""
        size, known = self.habits.batch, len(self.memory)
        if known >= size:
            chosen = torch.randperm(known, generator=self.generator)[:size]
        else:
            chosen = torch.randint(known, (size,), generator=self.generator)
        return AgentTransition(*map(torch.stack, zip(*(self.memory[i] for i in chosen.tolist()), strict=True)))

    @staticmethod
    def _value(critic: nn.Module, states: Tensor, actions: Tensor) -> Tensor:
        return critic(torch.cat([states, actions], 1))

    @staticmethod
    def _step(optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
        optimiser.zero_grad()
        loss.backward(inputs=optimiser.param_groups[0]["params"])
        optimiser.step()


@torch.no_grad()
def update_target_network(slow: nn.Module, fast: nn.Module, pace: float) -> None:
    """``slow <- (1 - pace) slow + pace fast``."""
    for mine, theirs in zip(slow.parameters(), fast.parameters(), strict=True):
        mine.lerp_(theirs, pace)


def draw_truncated_normal(mean: float, deviation: float, generator: torch.Generator) -> float:
    """A draw from ``N(mean, deviation^2)``, given that it lies between 0 and 1."""
    ends = torch.tensor([(0 - mean) / deviation, (1 - mean) / deviation], dtype=torch.float64)
    low, high = torch.special.ndtr(ends)
    share = torch.rand((), generator=generator, dtype=torch.float64)
    drawn = mean + deviation * torch.special.ndtri(low + share * (high - low))
    return min(max(float(drawn), 0.0), 1.0)
