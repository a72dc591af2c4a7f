"""Hold one network in training: its optimiser, moving average and sums, its step, and its tensors for checkpoints."""

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
    """A network with padded layers that computes the same function, and the mapping back to the original widths."""

    model: nn.Module  # the padded network
    small: nn.Module  # the network as it was given

    def masks(self, model: nn.Module) -> dict[str, Tensor]:
        """Return a mask for each parameter: 0 for padding, 1 for original elements."""

    def narrow(self, name: str, x: Tensor) -> Tensor:
        """Return a tensor of the padded network without its padding."""

    def widen(self, name: str, x: Tensor) -> Tensor:
        """Return a tensor of the small network with zeros as padding."""

    def remove_padding(self, model: nn.Module) -> nn.Module:
        """Return the small network with the values of a padded one."""


class Learner:
    """A copy of a network in training. All its state from step to step is in ``tensors()``."""

    def __init__(
        self,
        model: nn.Module,
        schedule: Schedule,
        speed: Speed,
        device: torch.device,
        teacher: nn.Module | None,
        companion: Companion | None = None,
        padded: PaddedNetwork | None = None,
    ) -> None:
        self.schedule, self.speed, self.device, self.padded = schedule, speed, device, padded
        self.model = speed.place(copy.deepcopy(model if padded is None else padded.model), device).train()
        self.teacher = _freeze_model(speed.place(copy.deepcopy(teacher), device)) if teacher is not None else None
        self.average = _freeze_model(copy.deepcopy(self.model)) if schedule.ema else None
        # An attention mask of minus infinities has no moving average.
        self.fixed = {n for n, x in collect_tensors(self.model).items() if not _finite(x)} if schedule.ema else set()
        self.run = torch.compile(self.model) if speed.compile else self.model
        self.named = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        masks = padded.masks(self.model) if padded is not None else {}
        self.masks = [(self.named[n], mask) for n, mask in masks.items() if n in self.named]
        self.companion = copy.deepcopy(companion)
        if self.companion is not None:
            self.extra_parameters = {f"companion/{n}": p for n, p in self.companion.begin(self.model).items()}
            self.named |= self.extra_parameters
        self.optimiser = torch.optim.SGD(
            list(self.named.values()),
            lr=torch.tensor(schedule.rate, device=device) if speed.graph else schedule.rate,
            momentum=schedule.momentum,
            weight_decay=schedule.decay,
            nesterov=schedule.nesterov,
            fused=True if speed.graph else None,
        )
        self.classes: int | None = None  # known after the first forward pass
        self.sums = torch.zeros(
            3, dtype=torch.float64, device=device
        )  # loss, correct predictions, examples of this epoch
        self.bad = torch.full((), -1, dtype=torch.int64, device=device)  # the first step whose loss was not finite
        self.count = torch.zeros((), dtype=torch.int64, device=device)  # steps done

    def set_rate(self, rate: float) -> None:
        """Set the learning rate."""
        for group in self.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def refuse(self, batch: RankBatch) -> None:
        """Raise DataError if the batch has labels without an output of the network."""
        if self.classes is not None:
            refuse_labels(batch.label_range, self.classes)

    def step(self, batch: RankBatch) -> None:
        """Train on this rank's part of a batch, without waiting for the GPU."""
        self.optimiser.zero_grad(set_to_none=True)
        with self.speed.mixed(self.device), sync_batch_norms(batch.copies == 1):
            outputs = call_model(self.run, batch.inputs)
            self.classes = count_classes(outputs, batch.labels)
            self.refuse(batch)
            own = find_own_loss(batch.inputs, outputs)
            labels = align_labels(outputs, batch.labels, own)
            loss = sum_loss(outputs, labels, self.schedule, self._run_teacher(batch.inputs), own)
            extra = self._companion_loss(batch, outputs)
        self._total_loss(loss / (batch.rows * batch.copies), extra).backward()
        if distributed.count_ranks() > 1:
            self._sum_gradients()
        self._mask_padding_gradients()
        self.optimiser.step()
        if self.companion is not None:
            with torch.no_grad():
                self.companion.after(self.model, self.optimiser.param_groups[0]["lr"])
        self._update_sums(loss.detach(), count_correct(outputs, labels), batch)

    def _mask_padding_gradients(self) -> None:
        """Set the gradients of the padding to zero, so that it is not trained."""
        given = [(p.grad, mask) for p, mask in self.masks if p.grad is not None]
        if given:
            torch._foreach_mul_([g for g, _ in given], [mask for _, mask in given])

    def _companion_loss(self, batch: RankBatch, outputs: Any) -> Tensor | None:
        if self.companion is None:
            return None
        return self.companion.loss(self.model, batch.inputs, outputs, batch.labels)

    def _total_loss(self, loss: Tensor, extra: Tensor | None) -> Tensor:
        """Return the loss that this rank minimises."""
        if self.companion is None or extra is None:
            return loss
        extra = extra / distributed.count_ranks()
        return extra if self.companion.replaces else loss + extra

    @torch.no_grad()
    def _run_teacher(self, x: Any) -> Any:
        return call_model(self.teacher, x) if self.teacher is not None and self.schedule.distill else None

    @torch.no_grad()
    def _sum_gradients(self) -> None:
        """Sum the gradients over all ranks; a rank that did not use a parameter adds zeros."""
        given = torch.tensor([p.grad is not None for p in self.named.values()], device=self.device).float()
        for p in self.named.values():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        distributed.sum_tensors(given, *[p.grad for p in self.named.values() if p.grad is not None])
        for p, used in zip(self.named.values(), given.tolist(), strict=True):
            if not used:
                p.grad = None

    @torch.no_grad()
    def _update_sums(self, loss: Tensor, right: Tensor, batch: RankBatch) -> None:
        found = torch.stack([loss.double(), right.double(), torch.full_like(right, len(batch.labels)).double()])
        found /= batch.copies
        distributed.sum_tensors(found)
        self.sums += found
        self.bad.copy_(torch.where((self.bad < 0) & ~torch.isfinite(found[0]), self.count, self.bad))
        self.count += 1
        if self.average is not None:
            self._update_average(self.schedule.ema)

    def _update_average(self, decay: float) -> None:
        mine, theirs = collect_tensors(self.model), collect_tensors(self.average)
        both = [n for n in theirs if n in mine]
        real = [n for n in both if mine[n].is_floating_point() and n not in self.fixed]
        torch._foreach_lerp_([theirs[n] for n in real], [mine[n] for n in real], 1 - decay)
        for n in set(both) - set(real):
            theirs[n].copy_(mine[n])

    def epoch_sums(self) -> tuple[float, float, float]:
        """Return the sums of loss, correct predictions and examples in this epoch, over all ranks."""
        loss, right, examples = self.sums.tolist()
        return loss, right, examples

    def reset_sums(self) -> None:
        """Set the sums of the epoch to zero."""
        self.sums.zero_()

    def is_finite(self) -> bool:
        """Return whether all trained parameters are finite."""
        return bool(torch.stack([p.isfinite().all() for p in self.named.values()]).all())

    def finished(self) -> nn.Module:
        """Return the trained network in eval mode, without gradients and padding."""
        self.optimiser.zero_grad(set_to_none=True)
        return self._remove_padding(self.model).eval()

    def averaged(self) -> nn.Module | None:
        """Return the network with the moving average of the weights; None if no average is kept."""
        if self.average is None:
            return None
        for mine, theirs in zip(self.average.parameters(), self.model.parameters(), strict=True):
            mine.requires_grad_(theirs.requires_grad)
        return self._remove_padding(self.average)

    def _remove_padding(self, model: nn.Module) -> nn.Module:
        return model if self.padded is None else self.speed.place(self.padded.remove_padding(model), self.device)

    def shapes(self) -> dict[str, list[int]]:
        """Return the shapes of the network's tensors, without padding."""
        small = self.model if self.padded is None else self.padded.small
        return {n: list(x.shape) for n, x in collect_tensors(small).items()}

    def copy_tensors(self) -> dict[str, Tensor]:
        """Return copies of ``tensors()`` for a checkpoint, on the CPU and without padding."""
        found = {n: x.detach().to("cpu", copy=True) for n, x in self.tensors().items()}
        return found if self.padded is None else {n: self.padded.narrow(_strip_kind(n), x) for n, x in found.items()}

    def load_tensors(self, stored: dict[str, Tensor]) -> None:
        """Load the tensors of a checkpoint."""
        padded = self.padded
        self.restore(stored if padded is None else {n: padded.widen(_strip_kind(n), x) for n, x in stored.items()})

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of the training by name, not copied."""
        found = {f"model/{n}": x for n, x in collect_tensors(self.model).items()}
        found |= {f"average/{n}": x for n, x in collect_tensors(self.average).items()}
        if self.companion is not None:
            found |= {n: p.detach() for n, p in self.extra_parameters.items()}
            found |= {f"companion/{n}": x for n, x in self.companion.tensors().items()}
        for name, p in self.named.items():
            momentum = self.optimiser.state[p].get("momentum_buffer")
            if momentum is not None:
                found[f"momentum/{name}"] = momentum
        return found | {"sums": self.sums, "bad": self.bad, "count": self.count}

    @torch.no_grad()
    def restore(self, kept: dict[str, Tensor]) -> None:
        """Copy earlier values of ``tensors()`` into the existing memory, which a CUDA graph may use."""
        for name, p in self.named.items():
            before = kept.get(f"momentum/{name}")
            now = self.optimiser.state[p].get("momentum_buffer")
            if now is not None and before is None:
                now.zero_()  # the same as no buffer: the first step gives momentum * 0 + gradient
            elif now is None and before is not None:
                self.optimiser.state[p]["momentum_buffer"] = torch.empty_like(p).copy_(before)
        for name, x in self.tensors().items():
            if name in kept:
                x.copy_(kept[name])


def collect_tensors(model: nn.Module | None) -> dict[str, Tensor]:
    """Return parameters and buffers, also those not in the state dict; tied tensors appear once."""
    if model is None:
        return {}
    return {n: x.detach() for n, x in [*model.named_parameters(), *model.named_buffers()]}


def _strip_kind(name: str) -> str:
    """Return the name of a network's tensor without its prefix; empty for other tensors."""
    kind, _, bare = name.partition("/")
    return bare if kind in ("model", "average", "momentum") else ""


def _finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())


def _freeze_model(model: nn.Module) -> nn.Module:
    return model.eval().requires_grad_(False)
