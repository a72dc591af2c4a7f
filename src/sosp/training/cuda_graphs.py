"""Run a step of one or several networks as one CUDA graph, without launch overhead and with networks in parallel."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from sosp.errors import SospError
from sosp.training.epoch_batches import RankBatch
from sosp.training.learner import Learner
from sosp.training.out_of_memory import is_out_of_memory
from sosp.training.speed import SlowTrainingWarning

WARMUP = 3  # steps before a graph is captured: cuDNN chooses its kernels, the optimiser allocates its buffers


def step_learners(learners: Sequence[Learner], batches: Sequence[RankBatch]) -> None:
    """Run one step of every network, one after another."""
    for learner, batch in zip(learners, batches, strict=True):
        learner.step(batch)


class CudaGraphSteps:
    """The training steps of several networks, captured once per batch shape and then replayed."""

    def __init__(self, learners: Sequence[Learner]) -> None:
        self.learners = learners
        self.graphs: dict[Any, tuple[torch.cuda.CUDAGraph, list[RankBatch]]] = {}
        self.broken = False

    def step(self, batches: Sequence[RankBatch]) -> None:
        """Run one step of every network, by its CUDA graph if the step can be captured."""
        key = tuple(tuple(x.shape) for x in tree_leaves(list(batches)) if isinstance(x, Tensor))
        if not self.broken and key not in self.graphs:
            self._try_capture(key, batches)
        if self.broken:
            step_learners(self.learners, batches)
            return
        graph, buffers = self.graphs[key]
        for buffer, batch in _distinct(buffers, batches):
            for a, b in zip(tree_leaves(buffer), tree_leaves(batch), strict=True):
                if isinstance(a, Tensor):
                    a.copy_(b, non_blocking=True)
        graph.replay()

    def _try_capture(self, key: Any, batches: Sequence[RankBatch]) -> None:
        try:
            self.graphs[key] = self._capture(batches)
        except RuntimeError as error:
            if is_out_of_memory(error) or isinstance(error, SospError):
                raise
            self.broken = True
            warnings.warn(
                "a step of this network cannot be captured as a CUDA graph, so training continues op by op, slower: "
                f"{str(error).splitlines()[0][:200]}",
                SlowTrainingWarning,
                stacklevel=2,
            )

    def _capture(self, batches: Sequence[RankBatch]) -> tuple[torch.cuda.CUDAGraph, list[RankBatch]]:
        buffers = _clone_batches(batches)
        kept = [{n: x.clone() for n, x in learner.tensors().items()} for learner in self.learners]
        random = torch.cuda.get_rng_state()
        try:
            self._warm_up(buffers)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._step_in_parallel(buffers)
        finally:
            for learner, tensors in zip(self.learners, kept, strict=True):
                learner.restore(tensors)
            torch.cuda.set_rng_state(random)
        return graph, buffers

    def _warm_up(self, buffers: Sequence[RankBatch]) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARMUP):
                step_learners(self.learners, buffers)
        torch.cuda.current_stream().wait_stream(side)
        for learner in self.learners:
            learner.optimiser.zero_grad(set_to_none=True)

    def _step_in_parallel(self, buffers: Sequence[RankBatch]) -> None:
        """Step each network on its own stream: a small network does not fill a GPU."""
        main = torch.cuda.current_stream()
        streams = [torch.cuda.Stream() for _ in self.learners] if len(self.learners) > 1 else [main]
        for stream, learner, batch in zip(streams, self.learners, buffers, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                step_learners([learner], [batch])
        for stream in streams:
            main.wait_stream(stream)


def _clone_batches(batches: Sequence[RankBatch]) -> list[RankBatch]:
    """Return copies of the batches as buffers of a graph; networks that share a batch share its buffer."""
    made: dict[int, RankBatch] = {}
    return [made.setdefault(id(b), tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, b)) for b in batches]


def _distinct(buffers: Sequence[RankBatch], batches: Sequence[RankBatch]) -> list[tuple[RankBatch, RankBatch]]:
    return list({id(p): (p, b) for p, b in zip(buffers, batches, strict=True)}.values())
