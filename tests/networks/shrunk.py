"""Networks of the table, traced and shrunk once in a session: tests compare copies of them."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, cached_property

from torch import Tensor, nn

import sosp
from helpers.unchanged import check_unchanged
from networks import case
from networks.compare import mask_from, origins, some_channels
from networks.recipe import Case, Removal
from sosp.graph.plan import Plan, plan_removal


@dataclass(frozen=True)
class Shrunk:
    """A network, what is removed from it, and both ways to remove it."""

    case: Case  # nobody may change its model
    removed: Removal
    mask: sosp.Mask
    plan: Plan
    small: nn.Module
    masked: nn.Module

    def copies(self) -> tuple[nn.Module, nn.Module]:
        """The shrunk and the masked network, to be run in train mode too."""
        return deepcopy(self.small), deepcopy(self.masked)

    @cached_property
    def source(self) -> dict[str, Tensor]:
        """Where every element of the shrunk network comes from."""
        return origins(self.case, self.plan)


@cache
def original(name: str) -> Case:
    """A case that many tests share."""
    return case(name)


@cache
def structures_of(name: str) -> sosp.Structures:
    c = original(name)
    return sosp.find_structures(c.model, c.example, exclude=c.exclude)


def plan_on(name: str, removed: Mapping[str, Sequence[int]]) -> Plan:
    found = structures_of(name)
    assert found.flow is not None
    return plan_removal(found.flow, mask_from(found, removed))


def cut(name: str, removed: Mapping[str, Sequence[int]]) -> nn.Module:
    """The network without these channels, not verified."""
    c = original(name)
    return sosp.shrink(c.model, plan_on(name, removed), c.example, verify=False)


def shrink_both_ways(name: str, removed: Removal) -> Shrunk:
    """Shrink as a user would: from a mask, traced for it, and verified."""
    c, plan = original(name), plan_on(name, removed)
    with check_unchanged(c.model):
        small = sosp.shrink(c.model, plan.mask, c.example)
    return Shrunk(c, removed, plan.mask, plan, small, sosp.masked(c.model, plan.mask))


@cache
def shrunk(name: str, share: float, seed: int = 0) -> Shrunk:
    """The network without a share of its channels."""
    return shrink_both_ways(name, some_channels(original(name), share, seed))
