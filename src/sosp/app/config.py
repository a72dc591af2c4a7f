"""A run as data: sections of options, from a TOML file, a run's config.json or flags; what is unknown is refused."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sosp.app.options import (
    FLAG,
    NAMES,
    NUMBER,
    NUMBERS,
    RATIOS,
    SHAPE,
    SHARES,
    TEXT,
    TEXTS,
    WHOLE,
    WIDTHS,
    check_options,
    define_option,
)
from sosp.errors import ArgumentError, suggest_name
from sosp.graph.layout import JOINS
from sosp.graph.records import OBJECTIVES, SCOPES
from sosp.graph.structures import GATES
from sosp.nets import Width
from sosp.scoring.score import METHODS
from sosp.selection.select import SCALES, SelectionOptions, parse_budget
from sosp.studies.compare.comparison_cells import ComparisonPlan
from sosp.studies.expand.expansion_plan import WHEN, ExpansionPlan
from sosp.training import SCHEDULES, Schedule, Speed
from sosp.training.schedule import SHAPES
from sosp.training.speed import PRECISIONS


@dataclass(frozen=True)
class ModelSection:
    """Which network."""

    name: str = define_option(
        TEXT,
        "sosp:resnet56, torchvision:resnet50, timm:convnext_atto, hf:FOLDER, file.py:function or module:function.",
        "",
        flag="",
    )
    weights: str | None = define_option(
        TEXT, "Its weights: a state dict (safetensors or torch.save), or what sosp.save wrote."
    )
    classes: int | None = define_option(WHOLE, "Its outputs.", low=1, shown="as many as the dataset has classes")
    width: Width | None = define_option(  # noqa: RUF009
        WIDTHS, "Factor for the widths of a sosp: network: 0.5, or layer1=2,conv1=1.5."
    )
    input: str | None = define_option(
        SHAPE, "Shape of one input, such as 3x32x32.", shown="the dataset's, or the network's"
    )

    def __post_init__(self) -> None:
        for width in self.width.values() if isinstance(self.width, Mapping) else [self.width]:
            if width is not None and not width > 0:
                raise ArgumentError(f"width={self.width!r}: factors for widths must be above 0.")

    @property
    def factor(self) -> Width:
        """For the widths, also where none is given."""
        return 1.0 if self.width is None else self.width

    @property
    def shape(self) -> tuple[int, ...] | None:
        return None if self.input is None else tuple(map(int, self.input.split("x")))


@dataclass(frozen=True)
class DataSection:
    """Which data."""

    name: str | None = define_option(
        TEXT, "cifar10, cifar100, imagenet, folder, digits, file.py:function or module:function.", flag="data"
    )
    folder: str | None = define_option(TEXT, "Where its files are.", flag="data-dir")


@dataclass(frozen=True)
class TrainingSection:
    """How a network is trained: a schedule by name, and what is different from it."""

    schedule: str | None = define_option(
        TEXT, "The schedule to start from.", choices=tuple(SCHEDULES), shown="the one for the dataset"
    )
    epochs: int | None = define_option(WHOLE, "Times the training data is seen.", low=0)
    batch: int | None = define_option(WHOLE, "Examples in a step, over all processes.", low=1)
    rate: float | None = define_option(NUMBER, "Learning rate at the start.", low=0)
    momentum: float | None = define_option(NUMBER, "Of SGD.", low=0, high=1)
    decay: float | None = define_option(NUMBER, "Weight decay.", low=0)
    nesterov: bool | None = define_option(FLAG, "Nesterov's momentum.")
    shape: str | None = define_option(TEXT, "Of the rate over time.", choices=SHAPES)
    milestones: tuple[float, ...] | None = define_option(
        NUMBERS, "For steps: a share of the epochs after which the rate falls; may be given several times."
    )
    factor: float | None = define_option(NUMBER, "For steps: what the rate is multiplied by then.", low=0, high=1)
    warmup: float | None = define_option(NUMBER, "Epochs in which the rate rises from zero.", low=0)
    smoothing: float | None = define_option(NUMBER, "Of the labels.", low=0, high=1)
    ema: float | None = define_option(NUMBER, "Decay of a moving average of the weights; 0: none.", low=0, high=1)
    distill: float | None = define_option(NUMBER, "Share of the loss that compares with a teacher.", low=0, high=1)
    temperature: float | None = define_option(NUMBER, "At which it is compared.", low=1e-6)
    teacher: str | None = define_option(
        TEXT, "A run, or weights for the model as it was before pruning.", shown="the network before pruning"
    )
    slimming: float | None = define_option(
        NUMBER, "Weight of an L1 term on the scales of batch norms, for --method slimming; 1e-4 is usual.", low=0
    )
    precision: str = define_option(TEXT, "Of matrix products; auto: bf16 on a GPU.", "auto", choices=PRECISIONS)
    channels_last: bool | None = define_option(FLAG, "Memory layout.", shown="on a GPU")
    graph: bool | None = define_option(FLAG, "Steps as CUDA graphs.", shown="on a GPU")
    compile: bool = define_option(FLAG, "Compile the network (torch.compile).", False)
    room: bool | None = define_option(FLAG, "Train pruned layers at widths that kernels like.", shown="on a GPU")
    save_every: float = define_option(NUMBER, "Seconds between checkpoints within an epoch.", 600.0, low=0)

    def plan(self) -> Schedule:
        """The schedule."""
        if self.schedule is None:
            raise ArgumentError(f"there is no schedule for this dataset: choose one of {', '.join(SCHEDULES)}.")
        names = [f.name for f in dataclasses.fields(Schedule)]
        return replace(SCHEDULES[self.schedule], **{n: v for n in names if (v := getattr(self, n)) is not None})

    @property
    def speed(self) -> Speed:
        return Speed(self.precision, self.channels_last, self.graph, self.compile, self.room)

    def check(self) -> None:
        """Refuse what only the schedule would refuse, whichever it is."""
        replace(self, schedule=self.schedule or next(iter(SCHEDULES))).plan()


@dataclass(frozen=True)
class PruningSection:
    """What is removed, and how it is chosen."""

    method: str = define_option(TEXT, "How structures are scored.", "sosp-h", choices=tuple(METHODS))
    ratio: float | None = define_option(NUMBER, "Share of the structures to remove.", low=0, high=1, shown="0.5")
    params: float | None = define_option(NUMBER, "Instead: parameters that may be left, a share or a number.", low=0)
    macs: float | None = define_option(NUMBER, "Instead: MACs that may be left, a share or a number.", low=0)
    cap: float | None = define_option(NUMBER, "Largest share to remove from one layer.", low=0, high=1)
    scope: str | None = define_option(
        TEXT, "Rank all structures together, or every layer by itself.", choices=SCOPES, shown="as the method does"
    )
    ratios: dict[str, float] | None = define_option(  # noqa: RUF009
        SHARES, "Shares to remove from layers or patterns: layer1.*=0.3,conv1=0. Others lose the ratio, or nothing."
    )
    scale: str | None = define_option(TEXT, "Divide what a structure costs by its size.", choices=SCALES)
    objective: str | None = define_option(
        TEXT, "Where the absolute values stand.", choices=OBJECTIVES, shown="individual, or the method's own"
    )
    groups: str = define_option(
        TEXT, "coupled: whole channels of a stream, faster to run.", "independent", choices=("independent", "coupled")
    )
    gate: str = define_option(TEXT, "Scale a structure after its normalisation, or before.", "features", choices=GATES)
    kind: str = define_option(TEXT, "What a structure is.", "filters", choices=("filters", "blocks"))
    exclude: tuple[str, ...] | None = define_option(
        TEXTS, "A layer, a container or a pattern to keep; may be repeated."
    )
    downsampling: bool = define_option(FLAG, "Also prune the skips where a ResNet changes its width.", True)
    examples: int = define_option(WHOLE, "Training examples to score with.", 1000, low=1)
    samples: int | None = define_option(WHOLE, "For sosp-i and obd: labels drawn per example, not all outputs.", low=1)
    join: str = define_option(TEXT, "How branches of other widths meet.", "scatter", choices=JOINS)
    round_to: int = define_option(WHOLE, "Keep widths at multiples of this.", 1, low=1)
    recalibrate: bool = define_option(FLAG, "Estimate batch norm statistics anew, on 2000 images.", False)
    repair: bool = define_option(
        FLAG, "Refit what is left to the whole network, on 5000 images, without labels.", False
    )
    rounds: int = define_option(WHOLE, "With --repair: cut, repair and score anew, so many times.", 1, low=1)
    curve: bool = define_option(FLAG, "Measure the loss as structures go, on 256 images, for the report.", True)

    def __post_init__(self) -> None:
        parse_budget(SelectionOptions(self.ratio, self.params, self.macs, join=self.join, round_to=self.round_to))
        if self.ratios and (self.params is not None or self.macs is not None):
            raise ArgumentError(
                "ratios says what every layer loses, params and macs how much is left: give one of them."
            )
        if self.samples is not None and not METHODS[self.method].samples:
            those = ", ".join(repr(name) for name, m in METHODS.items() if m.samples)
            raise ArgumentError(f"samples is for {those}, not for {self.method!r}.")
        if self.rounds > 1 and (not self.repair or self.ratios):
            raise ArgumentError(
                "rounds is for repair, and for a budget of the whole network: not without, nor for ratios."
            )
        if self.rounds > 1 and self.join == "zeros":
            raise ArgumentError(
                "rounds leaves scatters from one round to the next, and join='zeros' has none. Use a single round, "
                "or groups='coupled', which needs neither."
            )

    @property
    def budget(self) -> dict[str, float]:
        """How much goes or may be left."""
        found = {name: getattr(self, name) for name in ("ratio", "params", "macs")}
        given = {name: value for name, value in found.items() if value is not None}
        return given or ({} if self.ratios else {"ratio": 0.5})

    @property
    def choice(self) -> dict[str, Any]:
        """What ``select`` is told."""
        names = ("cap", "scale", "scope", "ratios", "round_to", "join")
        return {**self.budget, **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True)
class ComparisonSection:
    """Which methods are compared, and at which ratios."""

    methods: tuple[str, ...] | None = define_option(
        NAMES, f"Of: {', '.join(METHODS)}.", shown="all that fit, need no training and scale"
    )
    ratios: tuple[float, ...] = define_option(RATIOS, "Shares of the structures to remove.", (0.1, 0.3, 0.5, 0.7))
    seeds: int = define_option(WHOLE, "How often, each time with other examples to score with.", 1, low=1)
    statistics: int = define_option(WHOLE, "Images for the batch norm statistics after a cut.", 2000, low=1)
    repair: bool = define_option(FLAG, "Also repair every cut network, with as many images.", False)

    def __post_init__(self) -> None:
        ComparisonPlan(self.methods or tuple(METHODS), self.ratios, self.seeds)  # which refuses what makes no sense


@dataclass(frozen=True)
class ExpansionSection:
    """What is widened, and how far networks are pruned."""

    factor: float = define_option(NUMBER, "Widen what loses least by this.", 2.0, low=1, high=64, flag="widen")
    blocks: int | None = define_option(
        WHOLE, "How many blocks to widen.", low=1, shown="one, or five where every layer is a block"
    )
    probe: float = define_option(NUMBER, "Overall ratio at which blocks are compared.", 0.5, low=0, high=1)
    when: str = define_option(TEXT, "Compare and prune networks that are trained, or not yet.", "trained", choices=WHEN)
    ratios: tuple[float, ...] = define_option(RATIOS, "Shares of the structures to remove.", (0.3, 0.5, 0.7))
    sizes: tuple[float, ...] | None = define_option(
        RATIOS, "Instead: parameters that may be left, shares of the network's or numbers."
    )
    tuning: int | None = define_option(WHOLE, "Epochs after the cut.", low=1, shown="as many as before it")
    seeds: int = define_option(WHOLE, "How often, each time from other weights.", 1, low=1)

    def __post_init__(self) -> None:
        self.plan()

    def plan(self, **more: Any) -> ExpansionPlan:
        """What an expansion is told, which refuses what makes no sense."""
        names = ("factor", "blocks", "probe", "when", "ratios", "sizes")
        return ExpansionPlan(**{name: getattr(self, name) for name in names}, **more)


@dataclass(frozen=True)
class RunSection:
    """Where and how it runs."""

    name: str | None = define_option(TEXT, "Of the run.", shown="from the command, the model, the data and the seed")
    out: str | None = define_option(TEXT, "Its folder.", shown="runs/NAME")
    seed: int = define_option(WHOLE, "Of everything random.", 0, low=0, high=2**63 - 1)
    device: str | None = define_option(TEXT, "cpu, cuda or cuda:1.", shown="cuda where there is one")


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
    """Everything a run needs; the stages are those whose section is there."""

    model: ModelSection
    data: DataSection
    train: TrainingSection | None = None
    prune: PruningSection | None = None
    finetune: TrainingSection | None = None
    compare: ComparisonSection | None = (
        None  # in place of the stages, with the sections [prune] and [finetune] as its options
    )
    expand: ExpansionSection | None = None  # in place of the stages, with [prune] and [train] as its options
    run: RunSection = dataclasses.field(default_factory=RunSection)

    @property
    def stages(self) -> tuple[str, ...]:
        if self.compare is not None:
            return ("compare",)
        if self.expand is not None:
            return ("expand",)
        return tuple(stage for stage in STAGES if getattr(self, stage) is not None)

    def as_dict(self) -> dict[str, Any]:
        """Section -> key -> value, as a TOML file would say it; what is left at nothing is left out."""
        sections = {name: getattr(self, name) for name in SECTIONS}
        return {
            name: {f.name: _plain(v) for f in dataclasses.fields(s) if (v := getattr(s, f.name)) is not None}
            for name, s in sections.items()
            if s is not None
        }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


# --- reading --------------------------------------------------------------------------------------------

Label = Callable[[str, str], str]  # (section, key) -> what the user calls it


def format_key(section: str, key: str) -> str:
    return f"[{section}] {key}"


def format_flag(section: str, key: str) -> str:
    flag = SECTIONS[section].__dataclass_fields__[key].metadata["option"].flag  # type: ignore[attr-defined]
    return f"--{(flag or key).replace('_', '-')}"


def build_config(sections: Mapping[str, Any], label: Label = format_key) -> Config:
    """The config that these sections say; ``label`` names a key as the user wrote it."""
    for name, section in sections.items():
        if name not in SECTIONS:
            raise ArgumentError(
                f"[{name}] is not known.{suggest_name(name, SECTIONS)} Known are: {', '.join(SECTIONS)}."
            )
        if not isinstance(section, Mapping):
            raise ArgumentError(f"{name} = {section!r} is no section; write [{name}] and its keys below.")
    made = {name: _section(name, section, label) for name, section in sections.items()}
    if "model" not in made or not made["model"].name:
        raise ArgumentError(f"{label('model', 'name')} is missing: which network?")
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
    """The same with other values in [run], from the command line."""
    return replace(
        config, run=replace(config.run, **check_options(RunSection, given, lambda key: format_flag("run", key)))
    )


def read_config(path: str | Path) -> Config:
    """From a TOML file."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise ArgumentError(f"{file}: {'is a folder' if file.is_dir() else 'there is no such file'}.")
    try:
        sections = tomllib.loads(file.read_text(encoding="utf-8"))
        return build_config(sections)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{file}: is not TOML ({error}).") from error
    except ArgumentError as error:
        raise ArgumentError(f"{file}: {error}") from None


def find_first_difference(mine: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """``[prune] ratio was 0.5 and is 0.6``, for two results of ``as_dict``; None where they say the same."""
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
