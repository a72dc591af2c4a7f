"""Train a small network on digits, remove half of its MACs, fine-tune, save it and load it again.

python examples/prune_digits.py          some ten seconds on one CPU core; downloads nothing
"""

import sys
import tempfile
from pathlib import Path

import torch

import sosp


def main(folder: Path) -> None:
    torch.manual_seed(0)
    data = sosp.data.digits()  # 1297 images for training, 500 for the test
    model = sosp.train(sosp.nets.digits_resnet(), data, sosp.Schedule(epochs=4, batch=64, rate=0.05)).model

    # Keep half of the MACs, and fit the remaining weights to the original. No labels are needed.
    pruned = sosp.prune(model, data, macs=0.5)
    print(pruned, pruned.mask, sep="\n")

    small = pruned.model  # not trained yet
    tuned = sosp.train(small, data, "finetune-digits").model

    sosp.save(folder / "small.safetensors", tuned, pruned.mask)
    again = sosp.load(folder / "small.safetensors", sosp.nets.digits_resnet())

    images, _ = next(data.test.ordered(batch=500))
    times = sosp.latency({"trained": model, "pruned": small, "fine-tuned": tuned}, images, runs=10)
    for name, network in {"trained": model, "pruned": small, "fine-tuned": tuned, "loaded": again}.items():
        accuracy, cost = sosp.evaluate(network, data.test), sosp.count(network, images[:2])
        time = f"{1e3 * times[name].median:5.1f} ms" if name in times else ""
        print(f"{name:<11}{accuracy.top1:7.1%}{cost.params:>9,} parameters{cost.macs:>10,} MACs  {time}")


if __name__ == "__main__":
    torch.set_num_threads(1)  # images this small gain nothing from more
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch))
