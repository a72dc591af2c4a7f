"""How far SOSP-I with a few random cotangents per example is from SOSP-I with one for each output.

    PYTHONPATH=src python benchmarks/scoring/cotangents.py --network torchvision:mobilenet_v2 --weights W.pth \
        --images imagenet/ --size 112 --examples 64

Every line scores the same examples; ``--reference 64`` compares with 64 cotangents where all outputs take too long.
Errors are norms of the difference over norms of the reference: of the saliencies, of the sums of the pairs of each
structure, and of all pairs. Overlaps are shares of the removed structures in common at two budgets of MACs. ``spread``
is what another draw of as many examples would change: how much one saliency varies between examples.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor

import sosp
from sosp.nets.by_name import build_network, load_weights

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def main() -> None:
    options = _options()
    model = build_network(options.network)
    model = load_weights(model, options.weights) if options.weights else model
    model = model.to(options.device).eval()
    x = read_images(options).to(options.device)
    structures = sosp.find_structures(model, x[:2], groups="coupled")
    halves = [score(model, part, structures, max(options.cotangents)).scores for part in (x[::2], x[1::2])]
    spread = float((halves[0] - halves[1]).norm() / (halves[0] + halves[1]).norm())
    start = time.perf_counter()
    exact = score(model, x, structures, options.reference or None)
    seconds = time.perf_counter() - start
    print(f"{options.network}, {len(x)} images of {options.size} px, {len(structures):,} structures, {exact.targets}")
    print(f"reference: {options.reference or 'all'} outputs, {seconds:.1f} s; spread {spread:.3f}", flush=True)
    titles = ["cotangents", "seconds", "saliencies", "sums of pairs", "pairs", "Spearman"]
    titles += [f"overlap at macs={share}" for share in options.macs]
    print("| " + " | ".join(titles) + " |\n" + "|---:" * len(titles) + "|")
    wanted = [sosp.select(exact, macs=share, rule="priced") for share in options.macs]
    for k in options.cotangents:
        start = time.perf_counter()
        found = score(model, x, structures, k, seed=1)
        seconds = time.perf_counter() - start
        errors = [off(found.scores, exact.scores), off(found.second, exact.second), off(found.pairs, exact.pairs)]
        masks = [sosp.select(found, macs=share, rule="priced") for share in options.macs]
        shared = [overlap(a, b) for a, b in zip(masks, wanted, strict=True)]
        cells = [*(f"{e:.3f}" for e in errors), f"{spearman(found.scores, exact.scores):.4f}"]
        print("| " + " | ".join([str(k), f"{seconds:.1f}", *cells, *(f"{s:.3f}" for s in shared)]) + " |", flush=True)


def score(
    model: torch.nn.Module, x: Tensor, structures: sosp.Structures, k: int | None, seed: int = 0
) -> sosp.Saliency:
    """Return SOSP-I on the network's own outputs, with k cotangents per example or one for each output."""
    generator = torch.Generator(x.device).manual_seed(seed)
    options = {"structures": structures, "targets": "own", "examples": None, "classes": k, "generator": generator}
    return sosp.score(model, x, method="sosp-i", **options)


def off(found: Tensor | None, wanted: Tensor | None) -> float:
    """Return the relative error in norm."""
    assert found is not None
    assert wanted is not None
    return float((found - wanted).norm() / wanted.norm())


def spearman(a: Tensor, b: Tensor) -> float:
    """Return the rank correlation."""
    ranks = torch.stack([x.argsort().argsort().double() for x in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])


def overlap(a: sosp.Mask, b: sosp.Mask) -> float:
    """Return the share of the channels that one mask removes that the other removes too."""
    pairs = [(set(x.tolist()), set(b.removed.get(name, torch.zeros(0)).tolist())) for name, x in a.removed.items()]
    return sum(len(x & y) for x, y in pairs) / max(1, sum(len(x) for x, _ in pairs))


def read_images(options: argparse.Namespace) -> Tensor:
    """Return centre crops of the images in a folder, in an order that mixes their classes; noise without a folder."""
    generator = torch.Generator().manual_seed(0)
    if options.images is None:
        return torch.randn(options.examples, 3, options.size, options.size, generator=generator)
    import numpy as np
    from PIL import Image

    files = sorted(f for f in options.images.rglob("*") if f.suffix.lower() in (".jpg", ".jpeg", ".png"))
    chosen = torch.randperm(len(files), generator=generator)[: options.examples].tolist()
    found = []
    for i in chosen:
        picture = Image.open(files[i]).convert("RGB")
        edge = min(picture.size)
        left, top = (picture.width - edge) // 2, (picture.height - edge) // 2
        picture = picture.crop((left, top, left + edge, top + edge)).resize((options.size, options.size))
        found.append(torch.from_numpy(np.asarray(picture).copy()).movedim(2, 0) / 255)
    return (torch.stack(found) - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="torchvision:mobilenet_v2")
    parser.add_argument("--weights", type=Path, help="a file of weights; random ones without it")
    parser.add_argument("--images", type=Path, help="a folder of images; noise without it")
    parser.add_argument("--size", type=int, default=112, help="pixels of an edge")
    parser.add_argument("--examples", type=int, default=64)
    parser.add_argument("--cotangents", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--reference", type=int, default=0, help="cotangents of the reference; 0 for all outputs")
    parser.add_argument("--macs", type=float, nargs="+", default=[0.5, 0.7])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


if __name__ == "__main__":
    main()
