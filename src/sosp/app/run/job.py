"""From a config to what it names: network, data, example, device; all that can be refused is refused here."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sosp.app.config import Config, DataSection, PruningSection, TrainingSection
from sosp.app.run.run_folder import find_last_network, is_run
from sosp.baselines.slimming_training import find_norm_scales
from sosp.core.batches import call_model
from sosp.core.outputs import find_logits
from sosp.core.user_errors import convert_user_errors
from sosp.data import Dataset
from sosp.data import load as load_data
from sosp.errors import ArgumentError, CheckpointError, DataError, DisconnectedError, StructureError
from sosp.graph.mask import Mask
from sosp.graph.records import Saliency, Structures
from sosp.graph.structures import downsampling, find_excluded_names
from sosp.nets import by_name
from sosp.pipeline.cut import PruningCall, complete_options, find_removable, list_ways
from sosp.scoring.methods import METHODS
from sosp.scoring.score import check_structures
from sosp.selection.select import select_and_plan
from sosp.surgery.checkpoint import inspect
from sosp.training.user_data import move_to_device

ROWS = 8  # of the example
FLEXIBLE = ("sosp", "torchvision", "timm")  # sources whose networks get as many outputs as the data has classes
# Dataset -> the schedules it is trained and fine-tuned with, unless one is named.
USUAL = {
    "digits": ("digits", "finetune-digits"),
    "cifar10": ("cifar", "cifar"),
    "cifar100": ("cifar", "cifar"),
    "imagenet": ("imagenet", "imagenet"),
    "folder": ("imagenet", "imagenet"),
}

# Stage -> what it takes from [prune].
TAKEN = {
    "compare": ("examples", "gate", "groups", "exclude", "downsampling"),
    "expand": ("method", "examples", "gate", "groups", "exclude", "downsampling", "cap"),
}


@dataclass(frozen=True, eq=False)
class RunJob:
    """What a config names, ready to work with."""

    config: Config  # with the classes and the input filled in that the data has
    original: nn.Module  # the network as its name makes it, which files of sosp.save are read into
    start: nn.Module  # the same with its weights, perhaps already shrunk; on the device
    data: Dataset | None
    example: Any  # on the device
    device: torch.device

    @property
    def dataset(self) -> Dataset:
        if self.data is None:
            raise ArgumentError("this needs data: name a dataset (--data, or name in [data]).")
        return self.data

    def load_network(self, path: str | Path) -> nn.Module:
        """The network in a file, on the device."""
        return by_name.load_weights(self.original, path).to(self.device)


def prepare_job(config: Config) -> RunJob:
    """Load the data and the network, and see that they fit; the slow things that can fail come last."""
    config = fill_schedules(resolve_paths(config))
    check_stages(config)
    device = choose_device(config.run.device)
    by_name.parse_network_name(config.model.name)
    data = _load_dataset(config.data)
    config = _fill_model_section(config, data)
    model = config.model
    original = by_name.build_network(model.name, classes=model.classes, width=model.factor, seed=config.run.seed)
    start = original if model.weights is None else by_name.load_weights(original, model.weights)
    start, example = start.to(device), move_to_device(_example(config, original, data), device)
    if data is not None:
        check_outputs(start, example, data, model.name)
    job = RunJob(config, original, start, data, example, device)
    check_job(job)
    return job


def _load_dataset(chosen: DataSection) -> Dataset | None:
    if chosen.name is None:
        if chosen.folder is not None:
            raise ArgumentError(
                "a data folder is given without the name of the dataset: name the dataset (--data, or name in [data])."
            )
        return None
    given = "without arguments (--data-dir would be one)" if chosen.folder is None else "with the folder alone"
    with convert_user_errors(chosen.name, given) if ":" in chosen.name else nullcontext():
        return load_data(chosen.name, chosen.folder)


def resolve_paths(config: Config) -> Config:
    """The same with paths that hold from any folder."""
    model, data = config.model, config.data
    training = {
        stage: replace(section, teacher=_absolute(section.teacher))
        for stage in ("train", "finetune")
        if (section := getattr(config, stage)) is not None
    }
    return replace(
        config,
        model=replace(model, name=_absolute_name(model.name), weights=_absolute(model.weights)),
        data=replace(data, name=data.name and _absolute_name(data.name), folder=_absolute(data.folder)),
        **training,
    )


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).expanduser().resolve())


def _absolute_name(name: str) -> str:
    """Of ``path/to/file.py:function`` and ``hf:path/to/folder``; other names are no paths."""
    before, colon, after = name.rpartition(":")
    if before.endswith(".py"):
        return f"{_absolute(before)}{colon}{after}"
    return f"hf:{_absolute(after)}" if before == "hf" and Path(after).expanduser().is_dir() else name


def choose_device(name: str | None) -> torch.device:
    """The device of that name; a GPU where there is one, if nothing is said."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(name)
        torch.empty(1, device=found).cpu()
    except (RuntimeError, AssertionError) as error:
        raise ArgumentError(f"device={name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return found


def _fill_model_section(config: Config, data: Dataset | None) -> Config:
    """What the data decides about the network, so that the config alone can make it again."""
    if data is None:
        return config
    model = config.model
    if model.shape not in (None, data.shape):
        raise ArgumentError(f"input is {model.input}, but the images of {data.name} are {_format_shape(data.shape)}.")
    fixed = model.classes is not None or by_name.parse_network_name(model.name)[0] not in FLEXIBLE
    classes = model.classes if fixed else len(data.classes)
    return replace(config, model=replace(model, classes=classes, input=_format_shape(data.shape)))


def _example(config: Config, original: nn.Module, data: Dataset | None) -> Any:
    if data is None:
        return by_name.make_example(config.model.name, original, config.model.shape)
    images, _ = next(iter(data.train.ordered(batch=ROWS, limit=ROWS)))
    return images


def _format_shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


@torch.no_grad()
def check_outputs(model: nn.Module, example: Any, data: Dataset, name: str) -> None:
    """The network takes the images and has an output for every class."""
    try:
        logits = find_logits(call_model(model.eval(), example))
    except RuntimeError as error:
        reason = str(error).splitlines()[0][:200]
        raise DataError(
            f"{name} does not take the {_format_shape(data.shape)} images of {data.name}: {reason}"
        ) from error
    if logits.shape[1] != len(data.classes):
        raise DataError(
            f"{name} has {logits.shape[1]} outputs, but {data.name} has {len(data.classes)} classes. Use a network "
            "for these classes. Some networks take the number of classes as an option (classes)."
        )


# --- what the stages need besides -----------------------------------------------------------------------


def fill_schedules(config: Config) -> Config:
    """The same with the name of the schedule that is usual for the dataset, where none is named."""
    usual: tuple[str | None, ...] = USUAL.get(config.data.name or "", (None, None))
    if config.model.name == "sosp:densenet40":
        usual = tuple("densenet" if name == "cifar" else name for name in usual)
    named = {
        stage: replace(section, schedule=section.schedule or name)
        for stage, name in zip(("train", "finetune"), usual, strict=True)
        if (section := getattr(config, stage)) is not None
    }
    return replace(config, **named)


def check_stages(config: Config) -> None:
    """Refuse what a stage lacks."""
    if config.stages and config.data.name is None:
        raise ArgumentError("this needs data: name a dataset (--data, or name in [data]).")
    if config.compare is not None and (config.train or (config.finetune and config.finetune.distill)):
        raise ArgumentError("a comparison cannot use distillation or a section [train]: leave them out.")
    for stage, taken in TAKEN.items():
        if getattr(config, stage) is not None and config.prune is not None:
            _refuse_unread(config.prune, stage, taken)
    for stage in ("train", "finetune"):
        section: TrainingSection | None = getattr(config, stage)
        if section is not None and section.schedule is not None:
            distill, teacher = section.build_schedule().distill, section.teacher
            if teacher is not None and not distill:
                raise ArgumentError(
                    "a teacher is given, but distill is 0: set distill to the teacher's share of the loss."
                )
            if distill and teacher is None and (stage == "train" or config.prune is None):
                raise ArgumentError(f"distill={distill} needs a teacher: name a run, or a file of weights.")


def _refuse_unread(section: PruningSection, stage: str, taken: Sequence[str]) -> None:
    """What is said in [prune] and would be passed over."""
    others = [f.name for f in fields(PruningSection) if f.name not in taken]
    names = [name for name in others if getattr(section, name) != getattr(PruningSection(), name)]
    if names:
        raise ArgumentError(f"[{stage}] uses only {', '.join(taken)} from [prune]: leave out {', '.join(names)}.")


def check_job(job: RunJob) -> None:
    """Refuse now what would be refused when a stage begins, perhaps hours later."""
    config = job.config
    if config.prune is not None:
        find_excluded_names(job.start, config.prune.exclude or (), parameters=False)
        if config.train is not None:
            structures = find_job_structures(job, job.start)
            check_structures(job.start, structures, config.prune.method or "sosp-h")
            _refuse_choice(structures, config.prune)
    for section in (config.train, config.finetune):
        if section is not None:
            section.build_schedule()
            section.speed.on(job.device)
            if section.slimming is not None:
                find_norm_scales(job.start)
                if config.compare is not None:
                    raise ArgumentError("slimming is for training and fine-tuning a network, not for a comparison.")


def _refuse_choice(structures: Structures, section: PruningSection) -> None:
    """A budget, a cap or shares that no scores could meet."""
    if section.max_drop is not None:
        return
    anything = torch.arange(float(len(structures)))
    method = section.method or "sosp-h"
    saliency = Saliency(structures, method, None, values=anything, scope=METHODS[method].scope)
    with suppress(DisconnectedError):  # that depends on the scores
        select_and_plan(saliency, section.selection, **section.budget)


def list_kept_layers(section: PruningSection, model: nn.Module) -> list[str]:
    """What the section [prune] excludes."""
    return [*(section.exclude or ()), *(() if section.downsampling else downsampling(model))]


def open_pruning(job: RunJob, model: nn.Module) -> PruningCall:
    """The call of ``sosp.prune`` that the section [prune] describes."""
    section = job.config.prune
    assert section is not None
    return PruningCall.open(
        model,
        job.dataset,
        method=section.method,
        exclude=list_kept_layers(section, model),
        scoring=replace(section.scoring, generator=torch.Generator().manual_seed(job.config.run.seed)),
        selection=section.selection,
        repairing=section.repairing,
        preset=section.preset,
    )


def find_job_structures(job: RunJob, model: nn.Module) -> Structures:
    """What may be removed, by the section [prune]."""
    section = job.config.prune
    assert section is not None
    scoring, selection = complete_options(section.scoring, section.selection, section.preset)
    keep = find_excluded_names(model, list_kept_layers(section, model), parameters=False)
    ways = list_ways(selection)
    for groups in ways:
        with suppress(StructureError) if groups is not ways[-1] else nullcontext():
            return find_removable(model, job.example, selection, groups, keep, scoring.gate)
    raise AssertionError


def load_teacher(job: RunJob, stage: str, before: nn.Module | None) -> nn.Module | None:
    """The network that a stage compares with: the named one, or the one before pruning."""
    section: TrainingSection = getattr(job.config, stage)
    if not section.build_schedule().distill:
        return None
    return before if section.teacher is None else job.load_network(resolve_network_file(section.teacher))


def resolve_network_file(path: str) -> str:
    """Of a run, the network it made; a file is that file."""
    return str(find_last_network(path)[1]) if is_run(path) else path


def read_mask(path: str | Path | None) -> Mask | None:
    """The mask in a file of sosp.save; None where there is no file, or it is another's."""
    if path is None:
        return None
    try:
        return inspect(path).mask
    except CheckpointError:
        return None
