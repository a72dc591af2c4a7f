"""Describe a run as sections of options, read from a TOML file, a run's config.json or command-line flags."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sosp.core.options import (
    FLAG,
    NAMES,
    NUMBER,
    NUMBERS,
    RATIOS,
    SHAPE,
    TEXT,
    TEXTS,
    WHOLE,
    WIDTHS,
    borrow_option,
    check_options,
    define_option,
)
from sosp.errors import ArgumentError, suggest_name
from sosp.nets import Width
from sosp.pipeline.cut import LABELLED_EXAMPLES, PRESETS
from sosp.pipeline.largest_cut import check_budgets
from sosp.refit.repair_options import Repair
from sosp.scoring.methods import METHODS
from sosp.scoring.scoring_options import Scoring
from sosp.selection.select import check_selection
from sosp.selection.selection_options import Selection
from sosp.studies.compare.comparison_cells import ComparisonPlan
from sosp.studies.expand.expansion_plan import WHEN, ExpansionPlan
from sosp.training import SCHEDULES, Schedule, Speed
from sosp.training.schedule import SHAPES
from sosp.training.speed import PRECISIONS


@dataclass(frozen=True)
class ModelSection:
    """The network: its name, weights, number of outputs, widths and input."""

    name: str = define_option(
        TEXT,
        "Network: sosp:resnet56, torchvision:resnet50, timm:convnext_atto, hf:FOLDER, file.py:function or "
        "module:function.",
        "",
        flag="",
    )
    weights: str | None = define_option(
        TEXT, "File of weights: a state dict (safetensors or torch.save), or a file written by sosp.save."
    )
    classes: int | None = define_option(
        WHOLE, "Number of outputs of the network.", low=1, shown="number of classes of the dataset"
    )
    width: Width | None = define_option(  # noqa: RUF009
        WIDTHS, "Factor for the layer widths of a sosp: network, such as 0.5 or layer1=2,conv1=1.5."
    )
    input: str | None = define_option(
        SHAPE,
        "Shape of one input, such as 3x32x32.",
        shown="shape of the dataset's images, or the network's usual input",
    )

    def __post_init__(self) -> None:
        for width in self.width.values() if isinstance(self.width, Mapping) else [self.width]:
            if width is not None and not width > 0:
                raise ArgumentError(f"width={self.width!r}: factors for widths must be above 0.")

    @property
    def factor(self) -> Width:
        """Return the width factor, or 1.0 if none is given."""
        return 1.0 if self.width is None else self.width

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Return ``input`` as numbers, such as ``(3, 32, 32)``."""
        return None if self.input is None else tuple(map(int, self.input.split("x")))


@dataclass(frozen=True)
class DataSection:
    """The dataset: its name and folder."""

    name: str | None = define_option(
        TEXT, "Dataset: cifar10, cifar100, imagenet, folder, digits, file.py:function or module:function.", flag="data"
    )
    folder: str | None = define_option(TEXT, "Folder that contains the dataset.", flag="data-dir")


@dataclass(frozen=True)
class TrainingSection:
    """The training of a network: a named schedule, and the values that differ from it."""

    schedule: str | None = define_option(
        TEXT,
        "Training schedule whose values apply unless an option overrides them.",
        choices=tuple(SCHEDULES),
        shown="usual schedule for the dataset",
    )
    epochs: int | None = define_option(WHOLE, "Number of passes over the training data.", low=0)
    batch: int | None = define_option(WHOLE, "Number of examples per training step, over all processes.", low=1)
    rate: float | None = define_option(NUMBER, "Initial learning rate.", low=0)
    momentum: float | None = define_option(NUMBER, "SGD momentum.", low=0, high=1)
    decay: float | None = define_option(NUMBER, "Weight decay.", low=0)
    nesterov: bool | None = define_option(FLAG, "Use Nesterov momentum.")
    shape: str | None = define_option(TEXT, "Learning rate scheduler.", choices=SHAPES)
    milestones: tuple[float, ...] | None = define_option(
        NUMBERS, "With --shape steps: share of the epochs after which the learning rate drops; may be repeated."
    )
    factor: float | None = define_option(
        NUMBER, "With --shape steps: factor that multiplies the learning rate at each milestone.", low=0, high=1
    )
    warmup: float | None = define_option(NUMBER, "Number of epochs in which the learning rate rises from zero.", low=0)
    smoothing: float | None = define_option(NUMBER, "Label smoothing.", low=0, high=1)
    ema: float | None = define_option(
        NUMBER, "Decay of the moving average of the weights; 0 turns it off.", low=0, high=1
    )
    distill: float | None = define_option(
        NUMBER, "Share of the loss that is distillation from a teacher.", low=0, high=1
    )
    temperature: float | None = define_option(NUMBER, "Distillation temperature.", low=1e-6)
    teacher: str | None = define_option(
        TEXT, "Teacher for distillation: a run, or weights of the unpruned network.", shown="network before pruning"
    )
    slimming: float | None = define_option(
        NUMBER, "Weight of an L1 penalty on batch-norm scales, for --method slimming; 1e-4 is usual.", low=0
    )
    precision: str = define_option(
        TEXT, "Precision of matrix products; auto is bf16 on a GPU.", "auto", choices=PRECISIONS
    )
    channels_last: bool | None = define_option(FLAG, "Use the channels-last memory layout.", shown="on for a GPU")
    graph: bool | None = define_option(FLAG, "Run training steps as CUDA graphs.", shown="on for a GPU")
    compile: bool = define_option(FLAG, "Compile the network with torch.compile.", False)
    pad_widths: bool | None = define_option(
        FLAG, "Pad pruned layers to multiples of 8 while training (faster kernels).", shown="on for a single GPU"
    )
    save_every: float = define_option(NUMBER, "Seconds between checkpoints within an epoch.", 600.0, low=0)

    def build_schedule(self) -> Schedule:
        """Return the named schedule with the given values in place of its own.

        Raises:
            ArgumentError: No schedule is named, or a value is invalid.
        """
        if self.schedule is None:
            raise ArgumentError(f"there is no schedule for this dataset: choose one of {', '.join(SCHEDULES)}.")
        names = [f.name for f in dataclasses.fields(Schedule)]
        return replace(SCHEDULES[self.schedule], **{n: v for n in names if (v := getattr(self, n)) is not None})

    @property
    def speed(self) -> Speed:
        """Return the options that change the speed of training."""
        return Speed(self.precision, self.channels_last, self.graph, self.compile, self.pad_widths)

    def check(self) -> None:
        """Raise ArgumentError for values that no schedule accepts."""
        replace(self, schedule=self.schedule or next(iter(SCHEDULES))).build_schedule()


@dataclass(frozen=True)
class BudgetSection:
    """How much of a network may remain."""

    ratio: float | None = define_option(
        NUMBER, "Share of the structures to remove.", low=0, high=1, shown="0.5 if no budget is given"
    )
    params: float | None = define_option(NUMBER, "Budget: parameters to keep, as a share or a number.", low=0)
    macs: float | None = define_option(NUMBER, "Budget: MACs to keep, as a share or a number.", low=0)
    max_drop: float | None = define_option(
        NUMBER,
        "Prune as much as possible while the accuracy on unused inputs falls by at most this much; 0.01 is one point.",
        low=0,
    )
    method: str | None = define_option(
        TEXT,
        "Scoring method.",
        choices=tuple(METHODS),
        shown="sosp-i; sosp-h for very many structures and with --preset paper",
    )
    preset: str = define_option(
        TEXT,
        "Usual values of all options; paper: sosp-h with labels, independent filters in the order of their saliency, "
        "no repair.",
        "default",
        choices=PRESETS,
    )


@dataclass(frozen=True)
class PruningSection(Scoring, Selection, BudgetSection):
    """The pruning: budget, what may be removed, how it is scored, and repair."""

    exclude: tuple[str, ...] | None = define_option(
        TEXTS, "Layer, container or name pattern to keep unpruned; may be repeated."
    )
    downsampling: bool = define_option(
        FLAG, "Also prune the downsampling layers in the skip connections of a ResNet.", True
    )
    repair: bool | None = define_option(
        FLAG,
        "Refit the kept weights to the outputs of the unpruned network, without labels.",
        shown="on; off with --preset paper",
    )
    repair_examples: int | str = borrow_option(Repair, "examples")
    sweeps: int = borrow_option(Repair, "sweeps")
    rounds: int = borrow_option(Repair, "rounds")
    recalibrate: bool = define_option(FLAG, "Re-estimate batch-norm statistics on 2000 images after pruning.", False)
    curve: bool = define_option(FLAG, "Measure the loss on 256 images as structures are removed, for the report.", True)

    def __post_init__(self) -> None:
        check_selection(self.selection, self.ratio, self.params, self.macs)
        check_budgets(max_drop=self.max_drop, ratio=self.ratio, params=self.params, macs=self.macs, ratios=self.ratios)
        if self.samples is not None and self.method is not None and not METHODS[self.method].samples:
            those = ", ".join(repr(name) for name, m in METHODS.items() if m.samples)
            raise ArgumentError(f"samples is only for {those}, not for {self.method!r}.")
        if self.rounds > 1 and (self.repairing is False or self.ratios):
            raise ArgumentError(
                "rounds needs repair and a budget for the whole network (ratio, params or macs); it cannot be combined "
                "with ratios."
            )
        if self.rounds > 1 and self.join == "zeros":
            raise ArgumentError(
                "join='zeros' cannot be combined with several rounds, because the rounds need scatters between them. "
                "Use a single round, or groups='coupled', which needs neither."
            )

    @property
    def budget(self) -> dict[str, float]:
        """Return the given budgets; ``ratio=0.5`` if no budget and no ratios are given."""
        found = {name: getattr(self, name) for name in ("ratio", "params", "macs", "max_drop")}
        given = {name: value for name, value in found.items() if value is not None}
        return given or ({} if self.ratios else {"ratio": 0.5})

    @property
    def scoring(self) -> Scoring:
        """Return the options of ``score``."""
        return Scoring(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Scoring)})

    @property
    def selection(self) -> Selection:
        """Return the options of ``select``."""
        return Selection(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Selection)})

    @property
    def repairing(self) -> Repair | bool | None:
        """Return the options of ``repair``, or whether there is one."""
        how = Repair(examples=self.repair_examples, sweeps=self.sweeps, rounds=self.rounds)
        return self.repair if self.repair is False or (self.repair is None and how == Repair()) else how

    def settle(self, groups: str | None = "independent") -> PruningSection:
        """Return the section with definite values, which comparisons, expansions and bottlenecks take."""
        return replace(
            self,
            method=self.method or "sosp-h",
            groups=self.groups or groups,
            gate=self.gate or "features",
            examples=LABELLED_EXAMPLES if self.examples == "auto" else self.examples,
        )


@dataclass(frozen=True)
class ComparisonSection:
    """The comparison: methods, ratios and repetitions."""

    methods: tuple[str, ...] | None = define_option(
        NAMES,
        f"Methods to compare, from: {', '.join(METHODS)}.",
        shown="all that fit the network, need no training and are not slow",
    )
    ratios: tuple[float, ...] = define_option(RATIOS, "Shares of the structures to remove.", (0.1, 0.3, 0.5, 0.7))
    seeds: int = define_option(WHOLE, "Number of repetitions, each with different scoring examples.", 1, low=1)
    statistics: int = define_option(
        WHOLE, "Number of images to re-estimate batch-norm statistics after pruning.", 2000, low=1
    )
    repair: bool = define_option(FLAG, "Also repair each pruned network, with the same number of images.", False)

    def __post_init__(self) -> None:
        ComparisonPlan(self.methods or tuple(METHODS), self.ratios, self.seeds)  # validates the values


@dataclass(frozen=True)
class ExpansionSection:
    """The expansion: blocks to widen, and sizes to prune to."""

    factor: float = define_option(
        NUMBER, "Factor by which to widen the blocks that are pruned least.", 2.0, low=1, high=64, flag="widen"
    )
    blocks: int | None = define_option(
        WHOLE, "Number of blocks to widen.", low=1, shown="one, or five if every layer is a block"
    )
    probe: float = define_option(NUMBER, "Overall pruning ratio at which blocks are compared.", 0.5, low=0, high=1)
    when: str = define_option(
        TEXT, "Compare and prune networks after training, or right after initialization.", "trained", choices=WHEN
    )
    ratios: tuple[float, ...] = define_option(RATIOS, "Shares of the structures to remove.", (0.3, 0.5, 0.7))
    sizes: tuple[float, ...] | None = define_option(
        RATIOS, "Budgets in place of --ratios: parameters to keep, as shares or numbers."
    )
    tuning: int | None = define_option(
        WHOLE, "Number of epochs after pruning.", low=1, shown="as many as before pruning"
    )
    seeds: int = define_option(WHOLE, "Number of repetitions, each from different initial weights.", 1, low=1)

    def __post_init__(self) -> None:
        self.build_plan()

    def build_plan(self, **more: Any) -> ExpansionPlan:
        """Return the expansion plan.

        Args:
            **more: Values of the plan that come from other sections.

        Raises:
            ArgumentError: A value is invalid.
        """
        names = ("factor", "blocks", "probe", "when", "ratios", "sizes")
        return ExpansionPlan(**{name: getattr(self, name) for name in names}, **more)


@dataclass(frozen=True)
class RunSection:
    """The run itself: its name, folder, seed and device."""

    name: str | None = define_option(TEXT, "Name of the run.", shown="made from the command, model, data and seed")
    out: str | None = define_option(TEXT, "Folder of the run.", shown="runs/NAME")
    seed: int = define_option(WHOLE, "Seed of all random numbers.", 0, low=0, high=2**63 - 1)
    device: str | None = define_option(TEXT, "Device: cpu, cuda or cuda:1.", shown="cuda if available")


SECTIONS: dict[str, type] = {
    "model": ModelSection,
    "data": DataSection,
    "train": TrainingSection,
    "prune": PruningSection,
    "finetune": TrainingSection,
    "compare": ComparisonSection,
    "expand": ExpansionSection,
    "run": RunSection,
}
STAGES = ("train", "prune", "finetune")


@dataclass(frozen=True)
class Config:
    """All sections of a run; a stage runs if its section is given."""

    model: ModelSection
    data: DataSection
    train: TrainingSection | None = None
    prune: PruningSection | None = None
    finetune: TrainingSection | None = None
    compare: ComparisonSection | None = None  # replaces the stages; [prune] and [finetune] hold its options
    expand: ExpansionSection | None = None  # replaces the stages; [prune] and [train] hold its options
    run: RunSection = dataclasses.field(default_factory=RunSection)

    @property
    def stages(self) -> tuple[str, ...]:
        """Return the stages of the run in order."""
        if self.compare is not None:
            return ("compare",)
        if self.expand is not None:
            return ("expand",)
        return tuple(stage for stage in STAGES if getattr(self, stage) is not None)

    def as_dict(self) -> dict[str, Any]:
        """Return section -> key -> value as in a TOML file, without values that are None."""
        sections = {name: getattr(self, name) for name in SECTIONS}
        return {
            name: {f.name: _plain(v) for f in dataclasses.fields(s) if (v := getattr(s, f.name)) is not None}
            for name, s in sections.items()
            if s is not None
        }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


# --- reading --------------------------------------------------------------------------------------------

Label = Callable[[str, str], str]  # (section, key) -> its name in messages


def format_key(section: str, key: str) -> str:
    """Return the name of a key in a config file: ``[prune] ratio``."""
    return f"[{section}] {key}"


def format_flag(section: str, key: str) -> str:
    """Return the name of a key on the command line: ``--ratio``."""
    flag = SECTIONS[section].__dataclass_fields__[key].metadata["option"].flag  # type: ignore[attr-defined]
    return f"--{(flag or key).replace('_', '-')}"


def build_config(sections: Mapping[str, Any], label: Label = format_key) -> Config:
    """Return the config with these sections.

    Args:
        sections: Section -> key -> value.
        label: Name of a key in messages, given its section and key.

    Raises:
        ArgumentError: A section or key is not known, a value is invalid, or the network has no name.
    """
    for name, section in sections.items():
        if name not in SECTIONS:
            raise ArgumentError(
                f"[{name}] is not known.{suggest_name(name, SECTIONS)} Known sections: {', '.join(SECTIONS)}."
            )
        if not isinstance(section, Mapping):
            raise ArgumentError(f"{name} = {section!r} is not a section: write [{name}] and its keys below it.")
    made = {name: _section(name, section, label) for name, section in sections.items()}
    if "model" not in made or not made["model"].name:
        raise ArgumentError(f"{label('model', 'name')} is missing: name a network.")
    return Config(**{"data": DataSection(), **made})


def _section(name: str, given: Mapping[str, Any], label: Label) -> Any:
    kind = SECTIONS[name]
    values = check_options(kind, given, lambda key: label(name, key))
    try:
        found = kind(**values)
        if isinstance(found, TrainingSection):
            found.check()
    except ArgumentError as error:
        raise ArgumentError(f"[{name}] {error}" if label is format_key else str(error)) from None
    return found


def override_run_section(config: Config, given: Mapping[str, Any]) -> Config:
    """Return the config with the [run] values given on the command line."""
    return replace(
        config, run=replace(config.run, **check_options(RunSection, given, lambda key: format_flag("run", key)))
    )


def read_config(path: str | Path) -> Config:
    """Return the config in a TOML file.

    Raises:
        ArgumentError: There is no such file, it is not TOML, or it is not a valid config.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ArgumentError(f"{file}: {'is a folder' if file.is_dir() else 'there is no such file'}.")
    try:
        sections = tomllib.loads(file.read_text(encoding="utf-8"))
        return build_config(sections)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{file}: is not valid TOML ({error}).") from error
    except ArgumentError as error:
        raise ArgumentError(f"{file}: {error}") from None


def find_first_difference(mine: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Return ``[prune] ratio was 0.5 and is 0.6`` for two results of ``as_dict``; None if they are equal."""
    for section in SECTIONS:
        now, then = mine.get(section), other.get(section)
        if now == then:
            continue
        if now is None or then is None:
            return f"[{section}] is {'missing here' if now is None else 'new'}"
        for key in [*then, *now]:
            if now.get(key) != then.get(key):
                return f"[{section}] {key} was {_format_value(then.get(key))} and is {_format_value(now.get(key))}"
    return None


def _format_value(value: Any) -> str:
    return "not given" if value is None else json.dumps(value)
