"""Compute how many structures each layer loses when each loses a given share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import floor

from sosp.errors import ArgumentError, suggest_name
from sosp.graph.records import Structures
from sosp.selection.greedy_order import check_share, count_layer_structures, limit_removals


@dataclass(frozen=True)
class LayerQuotas:
    """The share each layer loses: its own if it has one, otherwise the common one; at least one structure stays."""

    names: tuple[str, ...]
    widths: tuple[int, ...]  # structures of each layer
    shares: Mapping[int, float]  # layer -> its own share
    most: tuple[int, ...]  # largest number of removals of each layer

    def at(self, common: float) -> list[int]:
        """Return how many structures each layer loses if the layers without their own share lose ``common``."""
        wanted = [_round_share(self.shares.get(i, common), w) for i, w in enumerate(self.widths)]
        return [min(n, most) for n, most in zip(wanted, self.most, strict=True)]

    def steps(self) -> list[float]:
        """Return the common shares, ascending, at which one more structure is removed."""
        free = [
            (w, most) for i, (w, most) in enumerate(zip(self.widths, self.most, strict=True)) if i not in self.shares
        ]
        return sorted({(j - 0.5) / w for w, most in free for j in range(1, most + 1)})


def build_quotas(structures: Structures, ratios: Mapping[str, float] | None, cap: float | None) -> LayerQuotas:
    """Return the quotas for the user's ``ratios`` and ``cap``."""
    if structures.kind == "blocks":
        raise ArgumentError(
            "scope='layer' removes a share of every layer, but a block is a whole layer. Use scope='global'."
        )
    if cap is not None:
        check_share("cap", cap)
    names, widths = tuple(layer.name for layer in structures.layers), count_layer_structures(structures)
    shares = _resolve_shares(structures, names, widths, {} if ratios is None else ratios)
    most = [min(n, max(w - 1, 0)) for n, w in zip(limit_removals(widths, cap), widths, strict=True)]
    for i, share in shares.items():
        _refuse_above(cap, share, f"ratios asks for {share} of {names[i]!r}")
    return LayerQuotas(names, tuple(widths), shares, tuple(most))


def refuse_above_cap(ratio: float, cap: float | None) -> None:
    """Raise ArgumentError if ``ratio`` is above the cap."""
    check_share("ratio", ratio)
    _refuse_above(cap, ratio, f"ratio={ratio} asks for that share of every layer")


def _refuse_above(cap: float | None, share: float, what: str) -> None:
    """Raise ArgumentError, beginning with ``what``, if ``share`` is above the cap."""
    if cap is not None and share > cap:
        raise ArgumentError(
            f"{what}, but cap={cap} limits the share removed from a layer. Lower the share, or raise the cap."
        )


def _round_share(share: float, width: int) -> int:
    """Round to a number of structures, halves up: half of five is three."""
    return floor(share * width + 0.5 + 1e-9)  # 0.29 * 50 is 14.499999999999998 and must count as 14.5


def _resolve_shares(
    structures: Structures, names: tuple[str, ...], widths: list[int], ratios: Mapping[str, float]
) -> dict[int, float]:
    """Map layers to their shares. A name overrides a pattern; patterns must not contradict each other."""
    if not isinstance(ratios, Mapping):
        raise ArgumentError(f"ratios={ratios!r} must map layers or patterns to their shares: {{'layer1.*': 0.5}}.")
    found: dict[int, tuple[str, float]] = {}
    for key, share in sorted(ratios.items(), key=lambda item: item[0] in names):
        check_share(f"ratios[{key!r}]", share)
        for i in _match_layers(structures, key, names, widths):
            other, before = found.get(i, (key, share))
            if before != share and key not in names:
                raise ArgumentError(
                    f"ratios gives {names[i]!r} {before} by {other!r} and {share} by {key!r}. Name the layer itself, "
                    "or make the patterns agree."
                )
            found[i] = key, share
    return {i: share for i, (_, share) in found.items()}


def _match_layers(structures: Structures, key: str, names: tuple[str, ...], widths: list[int]) -> list[int]:
    """Return the layers that a name or pattern matches, without those whose channels are tied to earlier layers."""
    hit = [i for i, name in enumerate(names) if name == key or fnmatchcase(name, str(key))]
    if not hit:
        raise ArgumentError(
            f"ratios names {key!r}, which matches no layer with structures.{suggest_name(str(key), names)}"
        )
    own = [i for i in hit if widths[i]]
    if not own:
        owners = {names[o] for i in hit for o in structures.owner()[structures.ids[i][structures.ids[i] >= 0]].tolist()}
        tied = f"they are tied to the channels of {', '.join(map(repr, sorted(owners)))}: give the share for that layer"
        raise ArgumentError(
            f"ratios names {key!r}, whose channels are not structures of that layer: "
            + (f"{tied}." if owners else "none of them can be removed.")
        )
    return own
