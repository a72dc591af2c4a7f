"""Measure the first call, `sosp.prune(model, inputs, macs=...)` with no other option and no labels.

python benchmarks/first_call.py --net sosp:resnet56 --weights FILE --data DIR [--macs 0.5 0.3] [--device cuda]
python benchmarks/first_call.py --net timm:convnext_atto --macs 0.5 --threads 1 --runtime eager onnxruntime
python benchmarks/first_call.py --net torchvision:resnet50 --device cuda --batch 8 128 --runtime graph graph-nhwc-bf16

DIR is the folder of CIFAR-10. Without it the inputs are noise, and the weights random unless they are given: then only
the time and what is left are of interest. Prints accuracy on all test images, the MACs and parameters left, the seconds
of the call, and for every batch and runtime the time left: both networks in turn, medians.
"""

from __future__ import annotations

import argparse
import copy
import io
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from statistics import median

import torch
from torch import Tensor, nn

import sosp
from sosp.core.batches import call_model
from sosp.nets import by_name

SECONDS = 2.0  # about as long is one time left measured, with at least LEAST runs
LEAST = 7
NOISE = 128  # inputs without data


def main() -> None:
    """Prune once for each budget and print a line."""
    asked = _parse_arguments()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = False  # "graph" is single precision
    if asked.threads:
        torch.set_num_threads(asked.threads)
    device = torch.device(asked.device)
    data = sosp.data.load("cifar10", asked.data) if asked.data else None
    model = by_name.build_network(asked.net, classes=10 if data else None)
    if asked.weights:
        model = by_name.load_weights(model, asked.weights)
    model.to(device).eval()
    if data is None:
        inputs = torch.randn(NOISE, *by_name.make_example(asked.net, model).shape[1:], device=device)
    else:
        images = data.train.subset(asked.inputs, seed=asked.seed).to(device)
        inputs = torch.cat([x for x, _ in images.ordered(batch=500)])
    print(f"{asked.net}: {_describe_accuracy(model, data)}{len(inputs)} inputs, {asked.device}", flush=True)
    for macs in asked.macs:
        started = time.perf_counter()
        pruned = sosp.prune(model, inputs, macs=macs)
        seconds = time.perf_counter() - started
        before, after = pruned.cost_before, pruned.cost_after
        print(
            f"macs={macs}: {_describe_accuracy(pruned.model, data)}{after.macs / before.macs:.3f} of the MACs, "
            f"{after.params / before.params:.3f} of the parameters, {seconds:.1f} s "
            f"({pruned.repaired.seconds if pruned.repaired else 0:.1f} s of them repair)",
            flush=True,
        )
        for runtime in asked.runtime:
            left = [measure_time_left(runtime, model, pruned.model, inputs[:b]) for b in asked.batch]
            print(f"  {runtime}: " + ", ".join(f"{t:.2f} (batch {b})" for t, b in zip(left, asked.batch, strict=True)))


def _describe_accuracy(model: nn.Module, data: sosp.data.Dataset | None) -> str:
    return "" if data is None else f"{100 * sosp.evaluate(model, data.test).top1:.2f} %, "


# Time left ------------------------------------------------------------------------------------------------------------


def measure_time_left(runtime: str, model: nn.Module, small: nn.Module, inputs: Tensor) -> float:
    """Return the time of the pruned network as a share of the original's."""
    model, small = copy.deepcopy(model), copy.deepcopy(small)
    if "bf16" in runtime:
        model, small, inputs = (x.to(torch.bfloat16) for x in (model, small, inputs))
    if "nhwc" in runtime:
        model, small, inputs = (x.to(memory_format=torch.channels_last) for x in (model, small, inputs))
    with torch.inference_mode():
        calls = {"original": RUNTIMES[runtime](model, inputs), "pruned": RUNTIMES[runtime](small, inputs)}
        times = time_in_turns(calls, inputs.device)
    return times["pruned"] / times["original"]


def time_in_turns(calls: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Return the median time of each call; they take turns, so that a disturbance affects all alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for runs in _count_runs():
        for name, call in calls.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            started = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if runs >= 2:
                times[name].append(time.perf_counter() - started)
    return {name: median(found) for name, found in times.items()}


def _count_runs() -> Iterator[int]:
    started, runs = time.perf_counter(), 0
    while runs < LEAST + 2 or time.perf_counter() - started < SECONDS:
        yield runs
        runs += 1


def run_eager(model: nn.Module, inputs: Tensor) -> Callable[[], object]:
    """Return a call of the model."""
    return lambda: call_model(model, inputs)


def run_graph(model: nn.Module, inputs: Tensor) -> Callable[[], object]:
    """Return a call of one CUDA graph: no time is lost in launching kernels."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(inputs)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(inputs)
    return graph.replay


def run_onnxruntime(model: nn.Module, inputs: Tensor) -> Callable[[], object]:
    """Return a call of onnxruntime on as many threads as torch has."""
    import onnxruntime

    file = io.BytesIO()
    torch.onnx.export(model, (inputs,), file, dynamo=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(file.getvalue(), options, providers=["CPUExecutionProvider"])
    given = {session.get_inputs()[0].name: inputs.numpy()}
    return lambda: session.run(None, given)


RUNTIMES = {
    "eager": run_eager,
    "onnxruntime": run_onnxruntime,
    "graph": run_graph,
    "graph-nhwc-bf16": run_graph,
}


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", default="sosp:resnet56", help="sosp:NAME, torchvision:NAME or timm:NAME.")
    parser.add_argument("--weights", help="Weights of the network, a safetensors file.")
    parser.add_argument("--data", help="Folder of CIFAR-10.")
    parser.add_argument("--macs", type=float, nargs="+", default=[0.5, 0.3], help="Shares of the MACs to keep.")
    parser.add_argument("--inputs", type=int, default=1000, help="Number of training images to give, without labels.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the choice of images.")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32], help="Numbers of inputs to time.")
    parser.add_argument("--runtime", nargs="+", default=["eager"], choices=[*RUNTIMES], help="What runs the networks.")
    parser.add_argument("--threads", type=int, help="Number of CPU threads.")
    parser.add_argument("--device", default="cpu", help="cpu or cuda.")
    return parser.parse_args()


if __name__ == "__main__":
    main()
