"""One network in training: its optimiser, its moving average, its sums; a step, and all it takes to go on later."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from sosp.batches import call
from sosp.training import ranks
from sosp.training.norms import OverAllRanks
from sosp.training.objective import correct, loss_sum
from sosp.training.schedule import Schedule
from sosp.training.speed import Speed


class Learner:
    """A copy of a network that learns. Every number it needs from step to step is in ``tensors()``."""

    def __init__(
        self, model: nn.Module, schedule: Schedule, speed: Speed, device: torch.device, teacher: nn.Module | None
    ) -> None:
        self.schedule, self.speed, self.device = schedule, speed, device
        self.model = speed.placed(copy.deepcopy(model), device).train()
        self.teacher = _still(speed.placed(copy.deepcopy(teacher), device)) if teacher is not None else None
        self.average = _still(copy.deepcopy(self.model)) if schedule.ema else None
        self.run = torch.compile(self.model) if speed.compile else self.model
        self.named = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.optimiser = torch.optim.SGD(
            list(self.named.values()),
            lr=torch.tensor(schedule.rate, device=device) if speed.graph else schedule.rate,
            momentum=schedule.momentum,
            weight_decay=schedule.decay,
            nesterov=schedule.nesterov,
            fused=True if speed.graph else None,
        )
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct ones, examples of this epoch
        self.bad = torch.full((), -1, dtype=torch.int64, device=device)  # the first step whose loss was no number
        self.count = torch.zeros((), dtype=torch.int64, device=device)  # steps made

    def set_rate(self, rate: float) -> None:
        for group in self.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def step(self, x: Any, y: Tensor, rows: int) -> None:
        """Learn from this rank's part of a batch of ``rows`` examples. Nothing waits for the GPU."""
        self.optimiser.zero_grad(set_to_none=True)
        with ExitStack() as stack:
            stack.enter_context(self.speed.mixed(self.device))
            if ranks.ranks() > 1:
                stack.enter_context(OverAllRanks())
            outputs = call(self.run, x)
            taught = self._taught(x)
            loss = loss_sum(outputs, y, self.schedule, taught)
        (loss / rows).backward()
        if ranks.ranks() > 1:
            self._add_up()
        self.optimiser.step()
        self._note(loss.detach(), correct(outputs, y), y)

    @torch.no_grad()
    def _taught(self, x: Any) -> Any:
        return call(self.teacher, x) if self.teacher is not None and self.schedule.distill else None

    @torch.no_grad()
    def _add_up(self) -> None:
        """Gradients over all ranks; a parameter that one of them did not use got nothing from its rows."""
        given = torch.tensor([p.grad is not None for p in self.named.values()], device=self.device).float()
        for p in self.named.values():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        ranks.sum_(given, *[p.grad for p in self.named.values() if p.grad is not None])
        for p, used in zip(self.named.values(), given.tolist(), strict=True):
            if not used:
                p.grad = None

    @torch.no_grad()
    def _note(self, loss: Tensor, right: Tensor, y: Tensor) -> None:
        self.sums[0] += loss.double()
        self.sums[1] += right.double() * (len(y) / max(y.numel(), 1))
        self.sums[2] += len(y)
        self.bad.copy_(torch.where((self.bad < 0) & ~torch.isfinite(loss), self.count, self.bad))
        self.count += 1
        if self.average is not None:
            self._average(self.schedule.ema)

    def _average(self, decay: float) -> None:
        mine, theirs = self.model.state_dict(), self.average.state_dict()  # type: ignore[union-attr]
        real = [n for n, x in mine.items() if x.is_floating_point()]
        torch._foreach_lerp_([theirs[n] for n in real], [mine[n] for n in real], 1 - decay)
        for n in mine.keys() - set(real):
            theirs[n].copy_(mine[n])

    def epoch_sums(self) -> tuple[float, float, float]:
        """Loss, correct ones and examples so far, over all ranks."""
        sums = self.sums.clone()
        ranks.sum_(sums)
        loss, right, examples = sums.tolist()
        return loss, right, examples

    def forget_sums(self) -> None:
        self.sums.zero_()

    def averaged(self) -> nn.Module | None:
        """The network with the moving average of the weights, to be used like the other one."""
        if self.average is not None:
            for mine, theirs in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mine.requires_grad_(theirs.requires_grad)
        return self.average

    def tensors(self) -> dict[str, Tensor]:
        """All numbers, by name; the tensors themselves."""
        found = {f"model/{n}": x for n, x in self.model.state_dict().items()}
        if self.average is not None:
            found |= {f"average/{n}": x for n, x in self.average.state_dict().items()}
        for name, p in self.named.items():
            momentum = self.optimiser.state[p].get("momentum_buffer")
            if momentum is not None:
                found[f"momentum/{name}"] = momentum
        return found | {"sums": self.sums, "bad": self.bad, "count": self.count}

    @torch.no_grad()
    def restore(self, kept: dict[str, Tensor]) -> None:
        """Take the numbers of ``tensors()`` back, into the memory that is there (a CUDA graph holds it)."""
        for name, p in self.named.items():
            before = kept.get(f"momentum/{name}")
            now = self.optimiser.state[p].get("momentum_buffer")
            if now is not None and before is None:
                now.zero_()  # as good as none: the first step gives momentum * 0 + gradient
            elif now is None and before is not None:
                self.optimiser.state[p]["momentum_buffer"] = torch.empty_like(p).copy_(before)
        for name, x in self.tensors().items():
            if name in kept:
                x.copy_(kept[name])


def _still(model: nn.Module) -> nn.Module:
    return model.eval().requires_grad_(False)
