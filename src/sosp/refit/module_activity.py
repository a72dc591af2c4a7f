"""When a module was at work in a pass, and whether it left traces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class ModuleInterval:
    """When a module was at work."""

    end: int  # so many layers had been called when it was done
    sums: int  # additions inside


@dataclass(frozen=True, eq=False)
class AttributeSnapshot:
    """The attributes of a module, and how many things each holds."""

    values: dict[str, Any]
    sizes: dict[str, int]

    @classmethod
    def by(cls, module: nn.Module) -> AttributeSnapshot:
        own = dict(module.__dict__)
        return cls(own, {key: len(value) for key, value in own.items() if isinstance(value, (list, dict))})

    def is_unchanged(self, now: AttributeSnapshot) -> bool:
        same = all(value is now.values.get(key) for key, value in self.values.items())
        return same and len(self.values) == len(now.values) and self.sizes == now.sizes


def count_writes(args: Any) -> list[int]:
    """How often each tensor was written into."""
    return [x._version for x in tree_leaves(args) if isinstance(x, Tensor)]
