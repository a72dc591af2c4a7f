"""Borrow the user's model: eval mode and frozen parameters inside, everything as it was outside."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from sosp.errors import DifferentiationError


@contextmanager
def borrowed(model: nn.Module) -> Iterator[None]:
    """Evaluate ``model`` with its parameters frozen; undo every trace of it, also after an exception.

    Examples are scored one by one, so a normalisation must not mix them: the model runs in eval mode (running
    statistics) whatever mode it is in, and a batch norm that keeps no running statistics is refused.
    """
    refuse_batch_statistics(model)
    modules = list(model.modules())
    modes = [(m, m.training) for m in modules]
    frozen = [(p, p.requires_grad) for p in model.parameters()]
    buffers = [(m, key, b, b._version) for m in modules for key, b in m._buffers.items() if b is not None]
    copies = flat_copies([b for _, _, b, _ in buffers])
    rng = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    with ExitStack() as stack:
        # Flash and memory-efficient attention have neither forward-mode nor double-backward rules.
        stack.enter_context(sdpa_kernel([SDPBackend.MATH]))
        stack.enter_context(torch.enable_grad())
        try:
            for m, _ in modes:
                m.training = False
            for p, _ in frozen:
                p.requires_grad_(False)
            yield
        finally:
            for m, mode in modes:
                m.training = mode
            for p, wanted in frozen:
                p.requires_grad_(wanted)
            for (m, key, buffer, version), copy in zip(buffers, copies, strict=True):
                if buffer._version != version:
                    with torch.no_grad():
                        buffer.copy_(copy)
                m._buffers[key] = buffer
            torch.set_rng_state(rng)
            if cuda is not None:
                torch.cuda.set_rng_state_all(cuda)


def flat_copies(tensors: list[Tensor]) -> list[Tensor]:
    """A copy of each, made with one operation per type and device: there may be hundreds of tiny ones."""
    copies: list[Tensor] = list(tensors)
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, x in enumerate(tensors):
        kinds.setdefault((x.dtype, x.device), []).append(i)
    for members in kinds.values():
        flat = torch.cat([tensors[i].detach().reshape(-1) for i in members])
        parts = flat.split([tensors[i].numel() for i in members])
        for i, part in zip(members, parts, strict=True):
            copies[i] = part.view(tensors[i].shape)
    return copies


def refuse_batch_statistics(model: nn.Module) -> None:
    for name, m in model.named_modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is None:
            raise DifferentiationError(
                f"{name!r} is a batch norm without running statistics (track_running_stats=False): the loss of one "
                "example then depends on the others in its batch, so it has no saliency of its own. Give it running "
                "statistics (track_running_stats=True and a pass over data in train mode), or use a GroupNorm."
            )
