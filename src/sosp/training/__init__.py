"""Train, evaluate and recalibrate networks, without knowledge of pruning."""

from typing import TYPE_CHECKING

from sosp.core.lazy_imports import make_lazy_exports

if TYPE_CHECKING:
    from sosp.training.callback import Companion
    from sosp.training.checkpoints import CheckpointWarning
    from sosp.training.entry_point import train
    from sosp.training.evaluation import Accuracy, evaluate
    from sosp.training.recalibration import recalibrate
    from sosp.training.results import Epoch, Moment, Trained
    from sosp.training.schedule import SCHEDULES, Schedule
    from sosp.training.speed import SlowTrainingWarning, Speed
else:
    __getattr__, __dir__ = make_lazy_exports(
        __name__,
        {
            "sosp.training.entry_point": "train",
            "sosp.training.results": "Trained Epoch Moment",
            "sosp.training.schedule": "Schedule SCHEDULES",
            "sosp.training.speed": "Speed SlowTrainingWarning",
            "sosp.training.callback": "Companion",
            "sosp.training.evaluation": "evaluate Accuracy",
            "sosp.training.recalibration": "recalibrate",
            "sosp.training.checkpoints": "CheckpointWarning",
        },
    )

__all__ = [
    "train",
    "Trained",
    "Epoch",
    "Moment",
    "Schedule",
    "SCHEDULES",
    "Speed",
    "Companion",
    "evaluate",
    "Accuracy",
    "recalibrate",
    "CheckpointWarning",
    "SlowTrainingWarning",
]
