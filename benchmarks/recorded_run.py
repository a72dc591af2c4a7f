"""Print a digest of every step of one end-to-end run: a refactoring must leave all of them as they are.

    python benchmarks/recorded_run.py > before.txt      # at the old commit
    python benchmarks/recorded_run.py | diff before.txt -

Digits: train, prune, repair and fine-tune, with three methods, each independent and coupled. Then the scores of all
methods on the networks of the test cases. Digests depend on the machine and on the version of torch.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sosp

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
METHODS = ("sosp-h", "sosp-i", "magnitude-l1")


def main() -> None:
    """Print a line per step."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name, value in chain(digits_steps(), case_scores()):
        print(f"{name:<48} {digest_of(value)}", flush=True)


def digits_steps() -> Iterator[tuple[str, Any]]:
    """Yield what each step of the pipeline gives on the digits."""
    data = sosp.data.digits()
    inputs, targets = all_examples(data.test)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = sosp.nets.digits_resnet()
    trained = sosp.train(network, data, one_epoch("digits"), seed=0).model.eval()
    yield "digits/train", trained.state_dict()
    with tempfile.TemporaryDirectory() as folder:
        for method in METHODS:
            for groups in ("independent", "coupled"):
                for repair in (False, True):
                    name = f"digits/{method}/{groups}{'/repaired' if repair else ''}"
                    pruned = sosp.prune(
                        trained,
                        (inputs, targets),
                        macs=0.5,
                        method=method,
                        repair=repair,
                        selection=sosp.Selection(groups=groups),
                    )
                    file = Path(folder) / f"{name.replace('/', '-')}.safetensors"
                    pruned.save(file)
                    loaded = sosp.load(file, trained)
                    yield f"{name}/file", file.read_bytes()
                    yield f"{name}/mask", pruned.mask.removed
                    yield f"{name}/cost", (pruned.cost_before, pruned.cost_after)
                    yield f"{name}/logits", (outputs_of(pruned.model, inputs), outputs_of(loaded, inputs))
        tuned = sosp.train(pruned.model, data, one_epoch("finetune-digits"), seed=0).model
        yield "digits/finetune", tuned.state_dict()
    yield "digits/trace", str(sosp.trace(trained, inputs[:8]))


def one_epoch(name: str) -> sosp.Schedule:
    """Return a schedule of this name, of one epoch."""
    return replace(sosp.SCHEDULES[name], epochs=1, milestones=())


def all_examples(source: Any) -> tuple[Tensor, Tensor]:
    """Return the examples of a source of batches."""
    batches = [(x, y) for x, y in source.ordered(batch=128)]
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


@torch.no_grad()
def outputs_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return the outputs of a network in eval mode."""
    return model.eval()(inputs)


def case_scores() -> Iterator[tuple[str, Any]]:
    """Yield the saliencies of every method on every network of the test cases, or the error it raises."""
    from networks import case as build_case
    from networks import to_score

    for case in map(build_case, to_score()):
        for method in sosp.METHODS:
            try:
                found = sosp.score(case.model, (case.inputs, case.targets), method=method)
                value: Any = (found.first, found.second, found.pairs, found.values)
            except sosp.errors.SospError as error:
                value = type(error).__name__  # the words of a message may change
            yield f"cases/{case.name}/{method}", value


def digest_of(value: Any) -> str:
    """Return a short digest of tensors, bytes, mappings and records."""
    digest = hashlib.sha256()
    for part in flat_parts(value):
        digest.update(part)
    return digest.hexdigest()[:16]


def flat_parts(value: Any) -> Iterator[bytes]:
    """Yield the bytes of everything in a value."""
    if isinstance(value, Tensor):
        yield repr((value.dtype, tuple(value.shape))).encode()
        yield value.detach().cpu().contiguous().numpy().tobytes()
    elif isinstance(value, dict):
        for key, part in value.items():
            yield repr(key).encode()
            yield from flat_parts(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from flat_parts(part)
    else:
        yield value if isinstance(value, bytes) else repr(value).encode()


if __name__ == "__main__":
    main()
