"""What a run left behind, read into one record: the only place that knows its files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sosp.app.report.run_history import Step, find_parent, read_earlier_steps
from sosp.app.run.run_folder import CELLS, DETAILS, METRICS, SALIENCY, RunFolder, RunRecord, is_run, read_record
from sosp.core.text_files import read_json
from sosp.errors import RunError
from sosp.selection.saved_saliency import SavedSaliency, read_saliency
from sosp.studies.compare.comparison_cells import ComparisonStore
from sosp.studies.compare.summary import ComparisonSummary, summarise_cells
from sosp.surgery.checkpoint import inspect
from sosp.training import Epoch


@dataclass(frozen=True)
class ReportLayer:
    """A layer that could lose channels."""

    name: str
    channels: int
    removed: int
    shape: tuple[int, ...] | None  # of its weight
    left: tuple[int, ...] | None  # of what is left of it

    @property
    def ratio(self) -> float:
        return self.removed / self.channels


@dataclass(frozen=True)
class LayerWidths:
    """A layer of the network, whether it could lose channels or not: where they come from and go to."""

    name: str
    reads: int  # the number of a stream, 0 the input
    writes: int
    into: tuple[int, int]  # channels before, and left
    out: tuple[int, int]


@dataclass(frozen=True)
class LossPoint:
    """The network with so many structures gone."""

    removed: int
    loss: float | None
    top1: float | None
    first: float | None = None  # the change of the loss, predicted
    second: float | None = None


@dataclass(frozen=True)
class LossCurve:
    """The loss as structures go."""

    examples: int
    points: tuple[LossPoint, ...]


@dataclass(frozen=True, eq=False)
class RunFacts:
    """A run, as far as it is done."""

    folder: Path
    record: RunRecord
    results: Mapping[str, Any]  # stage -> its figures
    epochs: Mapping[str, tuple[Epoch, ...]]  # stage -> those that are done
    layers: tuple[ReportLayer, ...]
    widths: tuple[LayerWidths, ...]
    loss_curve: LossCurve | None
    bottlenecks: Mapping[str, Any] | None  # as ``sosp.bottlenecks`` writes them
    saliency: SavedSaliency | None
    summaries: tuple[ComparisonSummary, ...]  # of a comparison
    earlier: tuple[Step, ...] = ()  # the stages of the runs that this one starts from
    parent: Path | None = None  # the folder of the last of them

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def steps(self) -> list[Step]:
        """Return every stage from the first network to the last, with its figures."""
        return [*self.earlier, *self.results.items()]


def read_run(folder: str | Path) -> RunFacts:
    """All that is known of the run in a folder, finished or not."""
    path = Path(folder)
    if not is_run(path):
        raise RunError(f"{folder}: is not the folder of a run (it has no config.json).")
    run, record = RunFolder(path, writes=False), read_record(path)
    widths, curve, narrow = _details(path / DETAILS)
    parent = find_parent(path, record)
    return RunFacts(
        folder=path,
        record=record,
        results=run.results,
        epochs=_epochs(path / METRICS),
        layers=_layers(run, record.config.stages),
        widths=widths,
        loss_curve=curve,
        bottlenecks=narrow,
        saliency=read_saliency(path / SALIENCY) if (path / SALIENCY).is_file() else None,
        summaries=tuple(summarise_cells(tuple(ComparisonStore(path).known.values())))
        if (path / CELLS).is_file()
        else (),
        earlier=tuple(read_earlier_steps(path, record)),
        parent=None if parent is None else parent[0],
    )


def _details(path: Path) -> tuple[tuple[LayerWidths, ...], LossCurve | None, Mapping[str, Any] | None]:
    if not path.is_file():
        return (), None, None
    found = read_json(path)
    try:
        widths = tuple(LayerWidths(**{**x, "into": tuple(x["into"]), "out": tuple(x["out"])}) for x in found["layers"])
        losses = found["losses"]
        points = None if losses is None else tuple(LossPoint(**point) for point in losses["points"])
        return widths, None if points is None else LossCurve(losses["examples"], points), found.get("bottlenecks")
    except (KeyError, TypeError) as error:
        raise RunError(f"{path}: is not a file written by a run of sosp ({error}).") from error


def _epochs(path: Path) -> dict[str, tuple[Epoch, ...]]:
    """Of an epoch that was done again after a stop, the last one counts."""
    found: dict[str, dict[int, Epoch]] = {}
    for event in _lines(path):
        if event.get("event") == "epoch":
            stage = event["stage"]
            epoch = Epoch.read({k: v for k, v in event.items() if k not in ("event", "stage", "epochs")})
            found.setdefault(stage, {})[epoch.number] = epoch
    return {stage: tuple(epochs[n] for n in sorted(epochs)) for stage, epochs in found.items()}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The events in a file, without a last line that was cut short."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def _layers(run: RunFolder, stages: tuple[str, ...]) -> tuple[ReportLayer, ...]:
    """From the mask that the network carries; none where nothing was pruned yet."""
    files = [run.file(stage) for stage in stages if stage in ("prune", "finetune")]
    for file in files:
        if file.is_file() and (saved := inspect(file)).mask is not None:
            return tuple(_layer(saved, layer) for layer in saved.mask.layers)
    return ()


def _layer(saved: Any, layer: Any) -> ReportLayer:
    weight = f"{layer.name}.weight"
    shape, left = saved.original.get(weight), saved.tensors.get(weight)
    if shape is None or layer.channels not in shape or len(saved.recipes) > 1:
        shape = None  # of a network that was shrunk before, which the mask knows nothing of
    return ReportLayer(
        layer.name,
        layer.channels,
        len(saved.mask.removed.get(layer.name, ())),
        shape,
        None if left is None else left.shape,
    )
