"""Cut one network with one tool and print a JSON line per step: ``one_network.py NAME sosp|torch-pruning``.

A process of its own, so that a run out of time or memory is that network's alone, and what was known by then is said.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from networks import SEED, Network, build

SHARE = 0.3  # of the filters
QKV = (("qkv",), ("query", "key", "value"), ("q_proj", "k_proj", "v_proj"), ("q_lin", "k_lin", "v_lin"))
NUMBERS = ("num_heads", "num_attention_heads", "n_heads")
SIZES = ("head_dim", "attention_head_size")
WIDTHS = ("attn_dim", "all_head_size")


def say(**fields: Any) -> None:
    """What is known now; ``at`` is the step that comes next."""
    print(json.dumps(fields), flush=True)


def parameters(model: nn.Module) -> int:
    """How many numbers its parameters hold, shared ones once."""
    return sum(p.numel() for p in model.parameters())


def call(model: nn.Module, example: Any) -> list[Tensor]:
    """All floating-point tensors the model returns."""
    outputs = model(**example) if isinstance(example, dict) else model(example)
    leaves = tree_leaves(outputs)
    leaves += [x for leaf in leaves if hasattr(leaf, "__dict__") for x in tree_leaves(vars(leaf))]
    return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]


@torch.no_grad()
def run(model: nn.Module, example: Any, mode: str) -> list[Tensor]:
    """The outputs in train or eval mode."""
    torch.manual_seed(SEED)
    return call(model.train(mode == "train"), example)


def difference(wanted: list[Tensor], found: list[Tensor]) -> float:
    """max |found - wanted| / max |wanted|, the largest over all outputs; infinite for other shapes or no number."""
    if [x.shape for x in wanted] != [x.shape for x in found]:
        return math.inf
    worst = 0.0
    for a, b in zip(wanted, found, strict=True):
        gap, size = float((a - b).abs().max()), float(a.abs().max())
        worst = max(worst, gap / size if size else gap) if math.isfinite(gap) else math.inf
    return worst


# -- sosp --------------------------------------------------------------------------------------------------------------


def ours(network: Network) -> None:
    """A random mask, a smaller network, and whether it computes what the masked one computes."""
    import sosp

    model, example = network.model, network.example
    clock = time.perf_counter()
    flow = _trace(sosp)(model, example)
    say(trace=time.perf_counter() - clock, at="find", **_pinned(flow))
    clock = time.perf_counter()
    structures = sosp.find_structures(model, example)
    mask = sosp.Mask.from_removed(model, random_channels(structures), example)
    say(find=time.perf_counter() - clock, structures=mask.structures, layers=len(mask.layers), at="shrink")
    clock = time.perf_counter()
    small = sosp.shrink(model, mask, example, verify=False)
    say(shrink=time.perf_counter() - clock, left=parameters(small) / parameters(model), at="compare")
    gone = sum(map(len, mask.removed.values())) / sum(layer.channels for layer in mask.layers)
    say(removed=gone, **lost_nothing(model, small, list(mask.removed)))
    compare(model, sosp.masked(model, mask), small, example)
    count(sosp, model, mask, example)


def _trace(sosp: Any) -> Any:
    if hasattr(sosp, "trace"):
        return sosp.trace
    from sosp.graph import trace

    return trace


def random_channels(structures: Any) -> dict[str, list[int]]:
    """Every channel of every layer goes with the same probability, independently; one per layer stays."""
    generator = torch.Generator().manual_seed(SEED)
    chosen = {}
    for layer in structures.layers:
        gone = torch.rand(layer.channels, generator=generator) < SHARE
        gone[torch.randint(layer.channels, (), generator=generator)] = False
        chosen[layer.name] = gone.nonzero().flatten().tolist()
    return {name: channels for name, channels in chosen.items() if channels}


def _pinned(flow: Any) -> dict[str, Any]:
    """How many layers have channels that cannot go, and the lines of code that hold most of them."""
    if not hasattr(flow, "pinned"):
        return {}
    held = sorted((p for p in flow.pinned if p.op != "return"), key=lambda p: -len(p.layers))
    reasons = [{"op": p.op, "where": p.where, "why": p.why, "layers": len(p.layers)} for p in held[:5]]
    return {"pinned": len({n for p in held for n in p.layers}), "reasons": reasons}


def lost_nothing(model: nn.Module, small: nn.Module, layers: list[str]) -> dict[str, Any]:
    """The layers of the mask that are as large as before."""
    known = dict(small.named_modules())
    same = [n for n in layers if n in known and parameters(known[n]) == parameters(model.get_submodule(n))]
    return {"whole": len(same), "first_whole": same[:5]}


def count(sosp: Any, model: nn.Module, mask: Any, example: Any) -> None:
    """The MACs left, and the parameters that ``sosp.count`` says are left."""
    if hasattr(sosp, "count"):
        before, after = sosp.count(model, example), sosp.count(model, example, mask)
        say(macs_left=after.macs / before.macs, counted_left=after.params / before.params, at="end")


def compare(model: nn.Module, masked: nn.Module, small: nn.Module, example: Any) -> None:
    """Equality in both modes; what the mask changes at all, and what rounding of the input alone changes."""
    say(effect=difference(run(model, example, "eval"), run(masked, example, "eval")))
    for mode in ("eval", "train"):
        wanted = run(masked, example, mode)
        say(**{f"{mode}_noise": difference(wanted, run(masked, rounded(example), mode)), "at": f"{mode} forward"})
        say(**{mode: difference(wanted, run(small, example, mode)), "at": "count"})


def rounded(example: Any) -> Any:
    """The same example, off by rounding: what this changes, the order of a sum may change."""
    if isinstance(example, dict):
        return {k: rounded(v) for k, v in example.items()}
    if not example.is_floating_point():
        return example
    noise = torch.randn(example.shape, generator=torch.Generator().manual_seed(SEED + 1), dtype=example.dtype)
    return example * (1 + torch.finfo(example.dtype).eps * noise)


# -- Torch-Pruning -----------------------------------------------------------------------------------------------------


def theirs(network: Network) -> None:
    """Cut by magnitude across all layers but the last, and run what is left."""
    import torch_pruning as tp

    model = network.model.eval()
    before = parameters(model)
    clock = time.perf_counter()
    pruner = tp.pruner.BasePruner(
        model, network.example, importance=tp.importance.MagnitudeImportance(p=2), global_pruning=True,
        pruning_ratio=SHARE, ignored_layers=last_layers(network), num_heads=heads_of(model),
        output_transform=lambda outputs: getattr(outputs, "logits", outputs),
    )  # fmt: skip
    say(at="cut")
    pruner.step()
    set_heads(model, pruner)
    say(seconds=time.perf_counter() - clock, left=parameters(model) / before, at="forward")
    outputs = run(model, network.example, "eval")
    say(runs=all(bool(x.isfinite().all()) for x in outputs), at="end")


def last_layers(network: Network) -> list[nn.Module]:
    """Every layer as wide as there are classes."""
    found = []
    for module in network.model.modules():
        width = getattr(module, "out_features", getattr(module, "out_channels", None))
        if width == network.classes and isinstance(getattr(module, "weight", None), Tensor):
            found.append(module)
    return found


def heads_of(model: nn.Module) -> dict[nn.Module, int]:
    """The heads of the attention layers it is told of, as in its examples."""
    return {m: int(n) for _, layers, n in _attention(model) for m in layers}


def set_heads(model: nn.Module, pruner: Any) -> None:
    """Its examples set the new size of a head by hand."""
    for module, layers, _ in _attention(model):
        width = layers[0].out_features // (3 if len(layers) == 1 else 1) // pruner.num_heads[layers[0]]
        for key in SIZES:
            if hasattr(module, key):
                setattr(module, key, width)
        for key in WIDTHS:
            if hasattr(module, key):
                setattr(module, key, width * pruner.num_heads[layers[0]])


def _attention(model: nn.Module) -> list[tuple[nn.Module, list[Any], int]]:
    found = []
    for module in model.modules():
        number = next((getattr(module, key) for key in NUMBERS if isinstance(getattr(module, key, None), int)), None)
        for names in QKV:
            layers = [getattr(module, n, None) for n in names]
            if number and all(isinstance(x, nn.Linear) for x in layers):
                found.append((module, layers, number))
    return found


# -- one process -------------------------------------------------------------------------------------------------------

TOOLS = {"sosp": ours, "torch-pruning": theirs}


def last_lines(error: BaseException) -> str:
    """The end of the traceback: file names without their folders."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    lines = [f"{Path(f.filename).name}:{f.lineno} {f.name}: {f.line}" for f in frames]
    cause = f" <- {type(error.__cause__).__name__}: {error.__cause__}" if error.__cause__ else ""
    return "\n".join([*lines, f"{type(error).__name__}: {error}{cause}"])[-1500:]


def main(name: str, tool: str) -> None:
    warnings.simplefilter("ignore")
    clock = time.perf_counter()
    network = build(name)
    first = next(network.model.parameters())
    size, dtype = parameters(network.model), str(first.dtype).removeprefix("torch.")
    say(parameters=size, dtype=dtype, input=network.input, build=time.perf_counter() - clock, at="graph")
    try:
        TOOLS[tool](network)
    except Exception as error:
        say(error=f"{type(error).__name__}: {error}"[:500], lines=last_lines(error))
    say(peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


if __name__ == "__main__":
    main(*sys.argv[1:])
