"""Train, evaluate and recalibrate networks; nothing here knows of pruning."""

from sosp.training.callback import Companion
from sosp.training.checkpoints import CheckpointWarning
from sosp.training.evaluation import Accuracy, evaluate
from sosp.training.recalibration import recalibrate
from sosp.training.results import Epoch, Moment, Trained
from sosp.training.schedule import SCHEDULES, Schedule
from sosp.training.speed import SlowTrainingWarning, Speed
from sosp.training.start import train

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
