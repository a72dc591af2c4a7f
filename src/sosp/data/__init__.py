"""Datasets for training and scoring: a training and a test source of batches, the same ones after every restart.

>>> data = sosp.data.load("cifar10", "datasets/")
>>> for images, labels in data.train.to("cuda").epoch(0, batch=128, seed=0): ...
>>> saliency = sosp.score(model, data.train.subset(1000, seed=0).ordered(batch=250))
"""

from typing import TYPE_CHECKING

from sosp.core.lazy_imports import make_lazy_exports

if TYPE_CHECKING:
    from sosp.data.batch_source import Dataset, Source
    from sosp.data.cifar import cifar10, cifar100
    from sosp.data.embedded_data import digits
    from sosp.data.image_files import Folder, UnreadableWarning
    from sosp.data.image_folders import folder
    from sosp.data.inspection import inspect
    from sosp.data.registry import load
    from sosp.data.resident_images import Resident
else:
    __getattr__, __dir__ = make_lazy_exports(
        __name__,
        {
            "sosp.data.registry": "load",
            "sosp.data.cifar": "cifar10 cifar100",
            "sosp.data.image_folders": "folder",
            "sosp.data.embedded_data": "digits",
            "sosp.data.inspection": "inspect",
            "sosp.data.batch_source": "Dataset Source",
            "sosp.data.resident_images": "Resident",
            "sosp.data.image_files": "Folder UnreadableWarning",
        },
    )

__all__ = [
    "load",
    "cifar10",
    "cifar100",
    "folder",
    "digits",
    "inspect",
    "Dataset",
    "Source",
    "Resident",
    "Folder",
    "UnreadableWarning",
]
