"""How many structures every layer loses, where each loses its share."""

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
    """What the layers lose: their own share where they have one, the common one otherwise; one structure stays."""

    names: tuple[str, ...]
    widths: tuple[int, ...]  # structures of each layer
    shares: Mapping[int, float]  # layer -> its own share
    most: tuple[int, ...]  # that may go

    def at(self, common: float) -> list[int]:
        """How many go, layer by layer, where the layers without a share of their own lose ``common``."""
        wanted = [_round_share(self.shares.get(i, common), w) for i, w in enumerate(self.widths)]
        return [min(n, most) for n, most in zip(wanted, self.most, strict=True)]

    def steps(self) -> list[float]:
        """The common shares, rising, at which one more structure goes somewhere."""
        free = [
            (w, most) for i, (w, most) in enumerate(zip(self.widths, self.most, strict=True)) if i not in self.shares
        ]
        return sorted({(j - 0.5) / w for w, most in free for j in range(1, most + 1)})


def build_quotas(structures: Structures, ratios: Mapping[str, float] | None, cap: float | None) -> LayerQuotas:
    """From what the user gave."""
    if structures.kind == "blocks":
        raise ArgumentError(
            "scope='layer' takes a share of every layer, and a block is all of one. Use scope='global'."
        )
    if cap is not None:
        check_share("cap", cap)
    names, widths = tuple(layer.name for layer in structures.layers), count_layer_structures(structures)
    shares = _shares(structures, names, widths, {} if ratios is None else ratios)
    most = [min(n, max(w - 1, 0)) for n, w in zip(limit_removals(widths, cap), widths, strict=True)]
    for i, share in shares.items():
        _refuse_above(cap, share, f"ratios asks for {share} of {names[i]!r}")
    return LayerQuotas(names, tuple(widths), shares, tuple(most))


def refuse_above_cap(ratio: float, cap: float | None) -> None:
    """A share that the cap does not let through."""
    check_share("ratio", ratio)
    _refuse_above(cap, ratio, f"ratio={ratio} asks for that share of every layer")


def _refuse_above(cap: float | None, share: float, what: str) -> None:
    if cap is not None and share > cap:
        raise ArgumentError(f"{what}, but cap={cap} lets a layer lose no more than that. Lower it, or lift the cap.")


def _round_share(share: float, width: int) -> int:
    """Rounded, halves up: half of five is three. (0.29 * 50 is 14.499999999999998 and must count as 14.5.)"""
    return floor(share * width + 0.5 + 1e-9)


def _shares(
    structures: Structures, names: tuple[str, ...], widths: list[int], ratios: Mapping[str, float]
) -> dict[int, float]:
    """Layer -> share. A name goes before a pattern; patterns must not contradict each other."""
    if not isinstance(ratios, Mapping):
        raise ArgumentError(f"ratios={ratios!r} must give layers or patterns their shares: {{'layer1.*': 0.5}}.")
    found: dict[int, tuple[str, float]] = {}
    for key, share in sorted(ratios.items(), key=lambda item: item[0] in names):
        check_share(f"ratios[{key!r}]", share)
        for i in _matching(structures, key, names, widths):
            other, before = found.get(i, (key, share))
            if before != share and key not in names:
                raise ArgumentError(
                    f"ratios gives {names[i]!r} {before} by {other!r} and {share} by {key!r}. Name the layer itself, "
                    "or make the patterns agree."
                )
            found[i] = key, share
    return {i: share for i, (_, share) in found.items()}


def _matching(structures: Structures, key: str, names: tuple[str, ...], widths: list[int]) -> list[int]:
    """The layers that a name or pattern stands for; those whose channels are tied to earlier ones have no own."""
    hit = [i for i, name in enumerate(names) if name == key or fnmatchcase(name, str(key))]
    if not hit:
        raise ArgumentError(
            f"ratios names {key!r}, which matches no layer with structures.{suggest_name(str(key), names)}"
        )
    own = [i for i in hit if widths[i]]
    if not own:
        owners = {names[o] for i in hit for o in structures.owner()[structures.ids[i][structures.ids[i] >= 0]].tolist()}
        tied = f"they are tied to those of {', '.join(map(repr, sorted(owners)))}: give the share of that"
        raise ArgumentError(
            f"ratios names {key!r}, whose channels are no structures of their own: "
            + (f"{tied}." if owners else "none of them can be removed.")
        )
    return own
