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
    checked,
    option,
)
from sosp.errors import ArgumentError, nearest
from sosp.graph.layout import JOINS
from sosp.graph.records import OBJECTIVES, SCOPES
from sosp.graph.structures import GATES
from sosp.nets import Width
from sosp.scoring.score import METHODS
from sosp.selection.select import SCALES, SelectionOptions, budget_of
from sosp.studies.compare.cells import ComparisonPlan
from sosp.studies.expand.plan import WHEN, ExpansionPlan
from sosp.training import SCHEDULES, Schedule, Speed
from sosp.training.schedule import SHAPES
from sosp.training.speed import PRECISIONS


@dataclass(frozen=True)
class Model:
    """Which network."""

    name: str = option(
        TEXT,
        "sosp:resnet56, torchvision:resnet50, timm:convnext_atto, hf:FOLDER, file.py:function or module:function.",
        "",
        flag="",
    )
    weights: str | None = option(
        TEXT, "Its weights: a state dict (safetensors or torch.save), or what sosp.save wrote."
    )
    classes: int | None = option(WHOLE, "Its outputs.", low=1, shown="as many as the dataset has classes")
    width: Width | None = option(  # noqa: RUF009
        WIDTHS, "Factor for the widths of a sosp: network: 0.5, or layer1=2,conv1=1.5."
    )
    input: str | None = option(SHAPE, "Shape of one input, such as 3x32x32.", shown="the dataset's, or the network's")

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
class Data:
    """Which data."""

    name: str | None = option(
        TEXT, "cifar10, cifar100, imagenet, folder, digits, file.py:function or module:function.", flag="data"
    )
    folder: str | None = option(TEXT, "Where its files are.", flag="data-dir")


@dataclass(frozen=True)
class Training:
    """How a network is trained: a schedule by name, and what is different from it."""

    schedule: str | None = option(
        TEXT, "The schedule to start from.", choices=tuple(SCHEDULES), shown="the one for the dataset"
    )
    epochs: int | None = option(WHOLE, "Times the training data is seen.", low=0)
    batch: int | None = option(WHOLE, "Examples in a step, over all processes.", low=1)
    rate: float | None = option(NUMBER, "Learning rate at the start.", low=0)
    momentum: float | None = option(NUMBER, "Of SGD.", low=0, high=1)
    decay: float | None = option(NUMBER, "Weight decay.", low=0)
    nesterov: bool | None = option(FLAG, "Nesterov's momentum.")
    shape: str | None = option(TEXT, "Of the rate over time.", choices=SHAPES)
    milestones: tuple[float, ...] | None = option(
        NUMBERS, "For steps: a share of the epochs after which the rate falls; may be given several times."
    )
    factor: float | None = option(NUMBER, "For steps: what the rate is multiplied by then.", low=0, high=1)
    warmup: float | None = option(NUMBER, "Epochs in which the rate rises from zero.", low=0)
    smoothing: float | None = option(NUMBER, "Of the labels.", low=0, high=1)
    ema: float | None = option(NUMBER, "Decay of a moving average of the weights; 0: none.", low=0, high=1)
    distill: float | None = option(NUMBER, "Share of the loss that compares with a teacher.", low=0, high=1)
    temperature: float | None = option(NUMBER, "At which it is compared.", low=1e-6)
    teacher: str | None = option(
        TEXT, "A run, or weights for the model as it was before pruning.", shown="the network before pruning"
    )
    slimming: float | None = option(
        NUMBER, "Weight of an L1 term on the scales of batch norms, for --method slimming; 1e-4 is usual.", low=0
    )
    precision: str = option(TEXT, "Of matrix products; auto: bf16 on a GPU.", "auto", choices=PRECISIONS)
    channels_last: bool | None = option(FLAG, "Memory layout.", shown="on a GPU")
    graph: bool | None = option(FLAG, "Steps as CUDA graphs.", shown="on a GPU")
    compile: bool = option(FLAG, "Compile the network (torch.compile).", False)
    room: bool | None = option(FLAG, "Train pruned layers at widths that kernels like.", shown="on a GPU")
    save_every: float = option(NUMBER, "Seconds between checkpoints within an epoch.", 600.0, low=0)

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
class Pruning:
    """What is removed, and how it is chosen."""

    method: str = option(TEXT, "How structures are scored.", "sosp-h", choices=tuple(METHODS))
    ratio: float | None = option(NUMBER, "Share of the structures to remove.", low=0, high=1, shown="0.5")
    params: float | None = option(NUMBER, "Instead: parameters that may be left, a share or a number.", low=0)
    macs: float | None = option(NUMBER, "Instead: MACs that may be left, a share or a number.", low=0)
    cap: float | None = option(NUMBER, "Largest share to remove from one layer.", low=0, high=1)
    scope: str | None = option(
        TEXT, "Rank all structures together, or every layer by itself.", choices=SCOPES, shown="as the method does"
    )
    ratios: dict[str, float] | None = option(  # noqa: RUF009
        SHARES, "Shares to remove from layers or patterns: layer1.*=0.3,conv1=0. Others lose the ratio, or nothing."
    )
    scale: str | None = option(TEXT, "Divide what a structure costs by its size.", choices=SCALES)
    objective: str | None = option(
        TEXT, "Where the absolute values stand.", choices=OBJECTIVES, shown="individual, or the method's own"
    )
    groups: str = option(
        TEXT, "coupled: whole channels of a stream, faster to run.", "independent", choices=("independent", "coupled")
    )
    gate: str = option(TEXT, "Scale a structure after its normalisation, or before.", "features", choices=GATES)
    kind: str = option(TEXT, "What a structure is.", "filters", choices=("filters", "blocks"))
    exclude: tuple[str, ...] | None = option(TEXTS, "A layer, a container or a pattern to keep; may be repeated.")
    downsampling: bool = option(FLAG, "Also prune the skips where a ResNet changes its width.", True)
    examples: int = option(WHOLE, "Training examples to score with.", 1000, low=1)
    samples: int | None = option(WHOLE, "For sosp-i and obd: labels drawn per example, not all outputs.", low=1)
    join: str = option(TEXT, "How branches of other widths meet.", "scatter", choices=JOINS)
    round_to: int = option(WHOLE, "Keep widths at multiples of this.", 1, low=1)
    recalibrate: bool = option(FLAG, "Estimate batch norm statistics anew, on 2000 images.", False)
    repair: bool = option(FLAG, "Refit what is left to the whole network, on 5000 images, without labels.", False)
    rounds: int = option(WHOLE, "With --repair: cut, repair and score anew, so many times.", 1, low=1)
    curve: bool = option(FLAG, "Measure the loss as structures go, on 256 images, for the report.", True)

    def __post_init__(self) -> None:
        budget_of(SelectionOptions(self.ratio, self.params, self.macs, join=self.join, round_to=self.round_to))
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
class Comparing:
    """Which methods are compared, and at which ratios."""

    methods: tuple[str, ...] | None = option(
        NAMES, f"Of: {', '.join(METHODS)}.", shown="all that fit, need no training and scale"
    )
    ratios: tuple[float, ...] = option(RATIOS, "Shares of the structures to remove.", (0.1, 0.3, 0.5, 0.7))
    seeds: int = option(WHOLE, "How often, each time with other examples to score with.", 1, low=1)
    statistics: int = option(WHOLE, "Images for the batch norm statistics after a cut.", 2000, low=1)
    repair: bool = option(FLAG, "Also repair every cut network, with as many images.", False)

    def __post_init__(self) -> None:
        ComparisonPlan(self.methods or tuple(METHODS), self.ratios, self.seeds)  # which refuses what makes no sense


@dataclass(frozen=True)
class Expanding:
    """What is widened, and how far networks are pruned."""

    factor: float = option(NUMBER, "Widen what loses least by this.", 2.0, low=1, high=64, flag="widen")
    blocks: int | None = option(
        WHOLE, "How many blocks to widen.", low=1, shown="one, or five where every layer is a block"
    )
    probe: float = option(NUMBER, "Overall ratio at which blocks are compared.", 0.5, low=0, high=1)
    when: str = option(TEXT, "Compare and prune networks that are trained, or not yet.", "trained", choices=WHEN)
    ratios: tuple[float, ...] = option(RATIOS, "Shares of the structures to remove.", (0.3, 0.5, 0.7))
    sizes: tuple[float, ...] | None = option(
        RATIOS, "Instead: parameters that may be left, shares of the network's or numbers."
    )
    tuning: int | None = option(WHOLE, "Epochs after the cut.", low=1, shown="as many as before it")
    seeds: int = option(WHOLE, "How often, each time from other weights.", 1, low=1)

    def __post_init__(self) -> None:
        self.plan()

    def plan(self, **more: Any) -> ExpansionPlan:
        """What an expansion is told, which refuses what makes no sense."""
        names = ("factor", "blocks", "probe", "when", "ratios", "sizes")
        return ExpansionPlan(**{name: getattr(self, name) for name in names}, **more)


@dataclass(frozen=True)
class Place:
    """Where and how it runs."""

    name: str | None = option(TEXT, "Of the run.", shown="from the command, the model, the data and the seed")
    out: str | None = option(TEXT, "Its folder.", shown="runs/NAME")
    seed: int = option(WHOLE, "Of everything random.", 0, low=0, high=2**63 - 1)
    device: str | None = option(TEXT, "cpu, cuda or cuda:1.", shown="cuda where there is one")


SECTIONS: dict[str, type] = {
    "model": Model,
    "data": Data,
    "train": Training,
    "prune": Pruning,
    "finetune": Training,
    "compare": Comparing,
    "expand": Expanding,
    "run": Place,
}
STAGES = ("train", "prune", "finetune")


@dataclass(frozen=True)
class Config:
    """Everything a run needs; the stages are those whose section is there."""

    model: Model
    data: Data
    train: Training | None = None
    prune: Pruning | None = None
    finetune: Training | None = None
    compare: Comparing | None = None  # in place of the stages, with the sections [prune] and [finetune] as its options
    expand: Expanding | None = None  # in place of the stages, with [prune] and [train] as its options
    run: Place = dataclasses.field(default_factory=Place)

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


def in_file(section: str, key: str) -> str:
    return f"[{section}] {key}"


def as_flag(section: str, key: str) -> str:
    flag = SECTIONS[section].__dataclass_fields__[key].metadata["option"].flag  # type: ignore[attr-defined]
    return f"--{(flag or key).replace('_', '-')}"


def build(sections: Mapping[str, Any], label: Label = in_file) -> Config:
    """The config that these sections say; ``label`` names a key as the user wrote it."""
    for name, section in sections.items():
        if name not in SECTIONS:
            raise ArgumentError(f"[{name}] is not known.{nearest(name, SECTIONS)} Known are: {', '.join(SECTIONS)}.")
        if not isinstance(section, Mapping):
            raise ArgumentError(f"{name} = {section!r} is no section; write [{name}] and its keys below.")
    made = {name: _section(name, section, label) for name, section in sections.items()}
    if "model" not in made or not made["model"].name:
        raise ArgumentError(f"{label('model', 'name')} is missing: which network?")
    return Config(**{"data": Data(), **made})


def _section(name: str, given: Mapping[str, Any], label: Label) -> Any:
    kind = SECTIONS[name]
    values = checked(kind, given, lambda key: label(name, key))
    try:
        found = kind(**values)
        if isinstance(found, Training):
            found.check()
    except ArgumentError as error:
        raise ArgumentError(f"[{name}] {error}" if label is in_file else str(error)) from None
    return found


def placed(config: Config, given: Mapping[str, Any]) -> Config:
    """The same with other values in [run], from the command line."""
    return replace(config, run=replace(config.run, **checked(Place, given, lambda key: as_flag("run", key))))


def read(path: str | Path) -> Config:
    """From a TOML file."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise ArgumentError(f"{file}: {'is a folder' if file.is_dir() else 'there is no such file'}.")
    try:
        sections = tomllib.loads(file.read_text(encoding="utf-8"))
        return build(sections)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{file}: is not TOML ({error}).") from error
    except ArgumentError as error:
        raise ArgumentError(f"{file}: {error}") from None


def first_difference(mine: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """``[prune] ratio was 0.5 and is 0.6``, for two results of ``as_dict``; None where they say the same."""
    for section in SECTIONS:
        now, then = mine.get(section), other.get(section)
        if now == then:
            continue
        if now is None or then is None:
            return f"[{section}] is {'missing here' if now is None else 'new'}"
        for key in [*then, *now]:
            if now.get(key) != then.get(key):
                return f"[{section}] {key} was {_said(then.get(key))} and is {_said(now.get(key))}"
    return None


def _said(value: Any) -> str:
    return "not given" if value is None else json.dumps(value)
