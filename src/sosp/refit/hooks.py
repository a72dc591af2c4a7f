"""Watch a forward pass: the network's own ops, and its modules as they are entered and left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sosp.core.layers import find_layer_type, is_norm
from sosp.graph.op_labels import DENSE
from sosp.graph.ops import find_op_name
from sosp.refit.layer_matrix import LayerUse, find_layer_use

SUMS = frozenset({"add", "__add__", "__iadd__", "__radd__"})


def is_layer_or_norm(module: nn.Module) -> bool:
    """A layer or a norm of single channels."""
    return find_layer_type(module) is not None or is_norm(module)


class ForwardWatcher(TorchFunctionMode):
    """Told of every op outside of layers and norms, whose own ops are none of the network's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.inside: list[str] = [""]
        self.layers_running = 0  # so many layers and norms are at work
        self.used: LayerUse | None = None  # how the layer at work used its weight

    def op(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call it."""
        return func(*args, **kwargs)

    def enter(self, name: str, module: nn.Module, args: Any) -> None:
        """A module begins."""

    def leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        """It is done, and its channels are in their places."""

    def watches(self, module: nn.Module) -> bool:
        """Wants to know of it."""
        return True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.layers_running:
            return self.op(func, args, kwargs or {})
        if (name := find_op_name(func)) in DENSE:
            self.used = self.used or find_layer_use(self.model.get_submodule(self.inside[-1]), name, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Watch while the model runs."""
        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                if self.watches(module):
                    stack.callback(
                        module.register_forward_pre_hook(self._make_pre_hook(name, is_layer_or_norm(module))).remove
                    )
                    stack.callback(module.register_forward_hook(self._make_hook(name, is_layer_or_norm(module))).remove)
            stack.enter_context(self)
            yield

    def _make_pre_hook(self, name: str, is_layer: bool) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            self.enter(name, module, args)
            self.inside.append(name)
            if is_layer:
                self.layers_running += 1
                self.used = None

        return hook

    def _make_hook(self, name: str, is_layer: bool) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.leave(name, module, args, output)
            self.inside.pop()
            self.layers_running -= is_layer

        return hook


class PassCompleteError(BaseException):
    """All that was wanted of a pass is there. (No Exception: the user's code may catch those.)"""


OutputCallback = Callable[[LayerUse | None, Tensor], None]  # of how a layer used its weight, and what came out


class OutputListener(ForwardWatcher):
    """Look at the outputs of some modules and at some sums, by name and by number; end the pass when all are seen."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.wanted: dict[str | int, Sequence[OutputCallback]] = {}
        self.sums = 0  # so far

    def watches(self, module: nn.Module) -> bool:
        return is_layer_or_norm(module)

    def listen(self, wanted: Mapping[str | int, Sequence[OutputCallback]], run: Callable[[nn.Module], Any]) -> None:
        """Run the network as far as needed."""
        self.wanted, self.sums = dict(wanted), 0
        self.inside, self.layers_running = [""], 0  # a pass that ended early never left some modules
        with suppress(PassCompleteError):
            run(self.model)

    def op(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if find_op_name(func) in SUMS and isinstance(result, Tensor):
            self.take(self.sums, None, result)
            self.sums += 1
        return result

    def leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if name in self.wanted:
            self.take(name, self.used, output)

    def take(self, key: str | int, used: LayerUse | None, output: Tensor) -> None:
        """What is wanted of it is taken at once: it may be written into."""
        with torch._C.DisableTorchFunction():
            for callback in self.wanted.pop(key, ()):
                callback(used, output)
        if not self.wanted:
            raise PassCompleteError


def listen_to_outputs(
    model: nn.Module, wanted: Mapping[str | int, Sequence[OutputCallback]], run: Callable[[nn.Module], Any]
) -> None:
    """One pass."""
    listener = OutputListener(model)
    with listener.hooked():
        listener.listen(wanted, run)
