"""Load or train the networks that cells begin with; each has a record and a file."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from sosp.graph.plan import count
from sosp.nets import by_name
from sosp.nets.by_name import hash_weights_file
from sosp.studies import training_groups, widened_networks
from sosp.studies.cell_records import NETWORKS, CellRecord, find_cell_record, write_cell_record
from sosp.studies.cells import Cell, TrainedCell, encode_cell
from sosp.studies.experiment import collect_starts
from sosp.studies.training_groups import SharedTraining, TrainingGroup
from sosp.studies.workspace import Workspace
from sosp.surgery.checkpoint import save
from sosp.training import Epoch, evaluate
from sosp.training.watcher import Watcher


def is_available(bench: Workspace, start: TrainedCell) -> bool:
    """Return True if there is a file of weights and a record of these very weights."""
    record = find_cell_record(bench.setting.results, NETWORKS, start)
    known = bench.find_given_file(start) or bench.network_file(start)
    return known.is_file() and record is not None and record.facts.get("sha256") == hash_weights_file(known)


def is_missing(bench: Workspace, start: TrainedCell) -> bool:
    """Return True if the network is neither given by the user nor available."""
    return bench.find_given_file(start) is None and not is_available(bench, start)


def list_untrained(bench: Workspace, cells: Iterable[Cell]) -> list[TrainedCell]:
    """Return the untrained networks that cells need, including those that others are widened from."""
    found: dict[TrainedCell, None] = {}
    for start in collect_starts(cells):
        chain = [start]
        while (growth := chain[0].grown) is not None:
            chain.insert(0, growth.of)
        found |= dict.fromkeys(s for s in chain if is_missing(bench, s))
    return list(found)


def open_network(bench: Workspace, start: TrainedCell) -> nn.Module:
    """Return the network with its weights, in eval mode on the device."""
    file = bench.find_given_file(start) or bench.network_file(start)
    return by_name.load_weights(widened_networks.initialise_network(bench, start), file).to(bench.device).eval()


def describe_start(bench: Workspace, start: TrainedCell) -> dict[str, object]:
    """Return what a record states about the network that its cell began with."""
    record = find_cell_record(bench.setting.results, NETWORKS, start)
    assert record is not None
    known = {"name": start.name, "accuracy": record.metrics["accuracy"], "params": record.metrics["params"]}
    return {**known, "macs": record.metrics["macs"], "sha256": record.facts["sha256"]}


def prepare_networks(bench: Workspace, starts: Collection[TrainedCell], most: int, watch: Watcher) -> None:
    """Prepare the networks that are not available: measure given ones, train the others side by side."""
    grown = [start.grown for start in starts if start.grown is not None and not is_available(bench, start)]
    if grown:
        prepare_networks(bench, dict.fromkeys(g.of for g in grown), most, watch)
        for growth in grown:
            widened_networks.save_widening(bench, growth, open_network(bench, growth.of))
    missing = [start for start in starts if not is_available(bench, start)]
    for start in missing:
        if (file := bench.find_given_file(start)) is not None:
            watch.event("given", {"cell": start.name, "file": str(file)})
            _keep(bench, start, open_network(bench, start), (), {"source": f"given: {file.name}"}, watch)
    ours = {s.name: s for s in starts if bench.find_given_file(s) is None}
    known = {name: SharedTraining(s.data, s.schedule, slimming=s.slimming) for name, s in ours.items()}
    wanted = {s.name: known[s.name] for s in missing if s.name in known}
    for group in training_groups.form_groups(wanted, known, bench.setting.work / NETWORKS, bench.group_size(most)):
        _train(bench, group, {name: ours[name] for name in group.names}, watch)


def _train(bench: Workspace, group: TrainingGroup, starts: dict[str, TrainedCell], watch: Watcher) -> None:
    place = bench.setting.work / NETWORKS
    if epochs := group.training.schedule.epochs:
        watch.event("begin", {"cells": list(starts), "epochs": epochs})
    fresh = {name: widened_networks.initialise_network(bench, start) for name, start in starts.items()}
    done = training_groups.train_group(bench, group, fresh, {n: s.seed for n, s in starts.items()}, place, watch)
    parts = training_groups.describe_parts(group, place, bench.setting.origin)
    for name, (model, history) in done.items():
        source = "trained" if history else "untrained"
        _keep(bench, starts[name], reset_memory_format(model), history, {"source": source, **parts}, watch)
    training_groups.delete_checkpoints(group, place)


def reset_memory_format(model: nn.Module) -> nn.Module:
    """Return the network in eval mode and torch's default memory format, which training may have changed."""
    return model.to(memory_format=torch.contiguous_format).eval()  # type: ignore[call-overload]


def _keep(
    bench: Workspace,
    start: TrainedCell,
    model: nn.Module,
    history: tuple[Epoch, ...],
    facts: dict[str, Any],
    watch: Watcher,
) -> None:
    """Write the record of a network, and its file unless the user gave one."""
    file = bench.find_given_file(start)
    if file is None:
        file = bench.network_file(start)
        file.parent.mkdir(parents=True, exist_ok=True)
        save(file, model)
    cost = count(model, bench.example(start.data))
    tested = [e.test.top1 for e in history if e.test is not None]
    metrics = {"accuracy": evaluate(model, bench.data(start.data).test).top1, "params": cost.params, "macs": cost.macs}
    record = CellRecord(
        encode_cell(start),
        start.name,
        NETWORKS,
        "done",
        metrics={**metrics, **({"best": max(tested)} if tested else {})},
        history={"test": tested, "loss": [e.loss for e in history]} if history else {},
        seconds={"train": sum(e.seconds for e in history)},
        facts={**facts, **widened_networks.describe_widening(bench, start), "sha256": hash_weights_file(file)},
        origin=bench.setting.origin,
    )
    write_cell_record(bench.setting.results, record, NETWORKS)
    watch.event("network", {"cell": start.name, "state": "done", **record.metrics})
