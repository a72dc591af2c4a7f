"""One network in training: its optimiser, its moving average, its sums; a step, and all it takes to go on later."""

from __future__ import annotations

import copy
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sosp.core import distributed
from sosp.core.batches import call_model
from sosp.training.callback import Companion
from sosp.training.epoch_batches import RankBatch
from sosp.training.objective import align_labels, count_classes, count_correct, find_own_loss, refuse_labels, sum_loss
from sosp.training.schedule import Schedule
from sosp.training.speed import Speed
from sosp.training.sync_norms import sync_batch_norms


class PaddedNetwork(Protocol):
    """A network with wider layers that computes the same, and the way back; who makes one is not known here."""

    model: nn.Module  # the wide network
    small: nn.Module  # the network as it was given

    def masks(self, model: nn.Module) -> dict[str, Tensor]:
        """Return parameter -> 0 for what was added, 1 for the rest."""

    def narrow(self, name: str, x: Tensor) -> Tensor:
        """Return the part of a wide tensor that the small network has."""

    def widen(self, name: str, x: Tensor) -> Tensor:
        """Return a tensor of the small network with zeros where something was added."""

    def shrunk(self, model: nn.Module) -> nn.Module:
        """Return the small network with the numbers of a wide one."""


class Learner:
    """A copy of a network that learns. Every number it needs from step to step is in ``tensors()``."""

    def __init__(
        self,
        model: nn.Module,
        schedule: Schedule,
        speed: Speed,
        device: torch.device,
        teacher: nn.Module | None,
        companion: Companion | None = None,
        room: PaddedNetwork | None = None,
    ) -> None:
        self.schedule, self.speed, self.device, self.room = schedule, speed, device, room
        self.model = speed.placed(copy.deepcopy(model if room is None else room.model), device).train()
        self.teacher = _freeze_model(speed.placed(copy.deepcopy(teacher), device)) if teacher is not None else None
        self.average = _freeze_model(copy.deepcopy(self.model)) if schedule.ema else None
        # A mask of minus infinities has no average.
        self.fixed = {n for n, x in collect_tensors(self.model).items() if not _finite(x)} if schedule.ema else set()
        self.run = torch.compile(self.model) if speed.compile else self.model
        self.named = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        masks = room.masks(self.model) if room is not None else {}
        self.masks = [(self.named[n], mask) for n, mask in masks.items() if n in self.named]
        self.companion = copy.deepcopy(companion)
        if self.companion is not None:
            self.along = {f"companion/{n}": p for n, p in self.companion.begin(self.model).items()}
            self.named |= self.along
        self.optimiser = torch.optim.SGD(
            list(self.named.values()),
            lr=torch.tensor(schedule.rate, device=device) if speed.graph else schedule.rate,
            momentum=schedule.momentum,
            weight_decay=schedule.decay,
            nesterov=schedule.nesterov,
            fused=True if speed.graph else None,
        )
        self.classes: int | None = None  # known after the first forward pass
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct ones, examples of this epoch
        self.bad = torch.full((), -1, dtype=torch.int64, device=device)  # the first step whose loss was no number
        self.count = torch.zeros((), dtype=torch.int64, device=device)  # steps made

    def set_rate(self, rate: float) -> None:
        for group in self.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def refuse(self, batch: RankBatch) -> None:
        """Labels that the network cannot have."""
        if self.classes is not None:
            refuse_labels(batch.span, self.classes)

    def step(self, batch: RankBatch) -> None:
        """Learn from this rank's part of a batch. Nothing waits for the GPU."""
        self.optimiser.zero_grad(set_to_none=True)
        with self.speed.mixed(self.device), sync_batch_norms(batch.copies == 1):
            outputs = call_model(self.run, batch.inputs)
            self.classes = count_classes(outputs, batch.labels)
            self.refuse(batch)
            own = find_own_loss(batch.inputs, outputs)
            labels = align_labels(outputs, batch.labels, own)
            loss = sum_loss(outputs, labels, self.schedule, self._taught(batch.inputs), own)
            more = self._more(batch, outputs)
        self._total(loss / (batch.rows * batch.copies), more).backward()
        if distributed.count_ranks() > 1:
            self._add_up()
        self._keep_room_empty()
        self.optimiser.step()
        if self.companion is not None:
            with torch.no_grad():
                self.companion.after(self.model, self.optimiser.param_groups[0]["lr"])
        self._note(loss.detach(), count_correct(outputs, labels), batch)

    def _keep_room_empty(self) -> None:
        """What was added to the network is not trained."""
        given = [(p.grad, mask) for p, mask in self.masks if p.grad is not None]
        if given:
            torch._foreach_mul_([g for g, _ in given], [mask for _, mask in given])

    def _more(self, batch: RankBatch, outputs: Any) -> Tensor | None:
        if self.companion is None:
            return None
        return self.companion.loss(self.model, batch.inputs, outputs, batch.labels)

    def _total(self, loss: Tensor, more: Tensor | None) -> Tensor:
        """What this rank minimises."""
        if self.companion is None or more is None:
            return loss
        more = more / distributed.count_ranks()
        return more if self.companion.replaces else loss + more

    @torch.no_grad()
    def _taught(self, x: Any) -> Any:
        return call_model(self.teacher, x) if self.teacher is not None and self.schedule.distill else None

    @torch.no_grad()
    def _add_up(self) -> None:
        """Gradients over all ranks; a parameter that one of them did not use got nothing from its rows."""
        given = torch.tensor([p.grad is not None for p in self.named.values()], device=self.device).float()
        for p in self.named.values():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        distributed.sum_tensors(given, *[p.grad for p in self.named.values() if p.grad is not None])
        for p, used in zip(self.named.values(), given.tolist(), strict=True):
            if not used:
                p.grad = None

    @torch.no_grad()
    def _note(self, loss: Tensor, right: Tensor, batch: RankBatch) -> None:
        found = torch.stack([loss.double(), right.double(), torch.full_like(right, len(batch.labels)).double()])
        found /= batch.copies
        distributed.sum_tensors(found)
        self.sums += found
        self.bad.copy_(torch.where((self.bad < 0) & ~torch.isfinite(found[0]), self.count, self.bad))
        self.count += 1
        if self.average is not None:
            self._average(self.schedule.ema)

    def _average(self, decay: float) -> None:
        mine, theirs = collect_tensors(self.model), collect_tensors(self.average)
        both = [n for n in theirs if n in mine]
        real = [n for n in both if mine[n].is_floating_point() and n not in self.fixed]
        torch._foreach_lerp_([theirs[n] for n in real], [mine[n] for n in real], 1 - decay)
        for n in set(both) - set(real):
            theirs[n].copy_(mine[n])

    def epoch_sums(self) -> tuple[float, float, float]:
        """Loss, correct ones and examples so far, of all ranks."""
        loss, right, examples = self.sums.tolist()
        return loss, right, examples

    def forget_sums(self) -> None:
        self.sums.zero_()

    def is_finite(self) -> bool:
        """Whether what it learns is still made of numbers."""
        return bool(torch.stack([p.isfinite().all() for p in self.named.values()]).all())

    def finished(self) -> nn.Module:
        """The network, to be used; what only training needs is gone."""
        self.optimiser.zero_grad(set_to_none=True)
        return self._without_room(self.model).eval()

    def averaged(self) -> nn.Module | None:
        """The network with the moving average of the weights, to be used like the other one."""
        if self.average is None:
            return None
        for mine, theirs in zip(self.average.parameters(), self.model.parameters(), strict=True):
            mine.requires_grad_(theirs.requires_grad)
        return self._without_room(self.average)

    def _without_room(self, model: nn.Module) -> nn.Module:
        return model if self.room is None else self.speed.placed(self.room.shrunk(model), self.device)

    def shapes(self) -> dict[str, list[int]]:
        """Of the network's tensors, as it was given."""
        return {
            n: list(x.shape) for n, x in collect_tensors(self.model if self.room is None else self.room.small).items()
        }

    def stored(self) -> dict[str, Tensor]:
        """Copies of all numbers for a checkpoint, on the CPU: those of the network as it was given."""
        found = {n: x.detach().to("cpu", copy=True) for n, x in self.tensors().items()}
        return found if self.room is None else {n: self.room.narrow(_strip_kind(n), x) for n, x in found.items()}

    def take(self, stored: dict[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        room = self.room
        self.restore(stored if room is None else {n: room.widen(_strip_kind(n), x) for n, x in stored.items()})

    def tensors(self) -> dict[str, Tensor]:
        """All numbers, by name; the tensors themselves."""
        found = {f"model/{n}": x for n, x in collect_tensors(self.model).items()}
        found |= {f"average/{n}": x for n, x in collect_tensors(self.average).items()}
        if self.companion is not None:
            found |= {n: p.detach() for n, p in self.along.items()}
            found |= {f"companion/{n}": x for n, x in self.companion.tensors().items()}
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


def collect_tensors(model: nn.Module | None) -> dict[str, Tensor]:
    """Parameters and buffers, also those a state dict leaves out; what is tied together comes once."""
    if model is None:
        return {}
    return {n: x.detach() for n, x in [*model.named_parameters(), *model.named_buffers()]}


def _strip_kind(name: str) -> str:
    """The name of a network's tensor, without what it is kept for."""
    kind, _, bare = name.partition("/")
    return bare if kind in ("model", "average", "momentum") else ""


def _finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())


def _freeze_model(model: nn.Module) -> nn.Module:
    return model.eval().requires_grad_(False)
