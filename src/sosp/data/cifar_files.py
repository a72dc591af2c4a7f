"""The official files of CIFAR-10 and CIFAR-100: their names, md5s and sizes, and where to get them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ADDRESS = "https://www.cs.toronto.edu/~kriz/cifar.html"
PIXELS = 3 * 32 * 32

FINE = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale
willow_tree wolf woman worm
"""


@dataclass(frozen=True)
class CifarVersion:
    """One of the two forms in which a set is published."""

    folder: str
    archive: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    md5: dict[str, str]  # of the files; none is published for the binary version, whose sizes are exact instead
    label_bytes: int = 0  # before each image of the binary version; the label is the last of them

    @property
    def files(self) -> tuple[str, ...]:
        return self.train + self.test

    def present(self, at: Path) -> list[str]:
        return [name for name in self.files if (at / name).is_file()]


@dataclass(frozen=True)
class Cifar:
    """A set: what it is called, its classes, and how many images of each there are."""

    name: str
    title: str
    classes: tuple[str, ...]
    train: int  # images over all files
    test: int
    versions: tuple[CifarVersion, ...]
    # md5 of the int64 sums over all images, position by position: the same in any order of the images. Taken from the
    # python version, which holds the same images as the binary one; not known for CIFAR-100.
    sums: tuple[str, str] | None = None


CIFAR10 = Cifar(
    name="cifar10",
    title="CIFAR-10",
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    train=50_000,
    test=10_000,
    sums=("c622d04c7d7275cec18f6f30ef518a61", "a7fd9d086d92be180e55014d0c303d9f"),
    versions=(
        CifarVersion(
            folder="cifar-10-batches-py",
            archive="cifar-10-python.tar.gz",
            train=tuple(f"data_batch_{i}" for i in range(1, 6)),
            test=("test_batch",),
            md5={
                "data_batch_1": "c99cafc152244af753f735de768cd75f",
                "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
                "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
                "data_batch_4": "634d18415352ddfa80567beed471001a",
                "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
                "test_batch": "40351d587109b95175f43aff81a1287e",
            },
        ),
        CifarVersion(
            folder="cifar-10-batches-bin",
            archive="cifar-10-binary.tar.gz",
            train=tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
            test=("test_batch.bin",),
            md5={},
            label_bytes=1,
        ),
    ),
)

CIFAR100 = Cifar(
    name="cifar100",
    title="CIFAR-100",
    classes=tuple(FINE.split()),
    train=50_000,
    test=10_000,
    versions=(
        CifarVersion(
            folder="cifar-100-python",
            archive="cifar-100-python.tar.gz",
            train=("train",),
            test=("test",),
            md5={"train": "16019d7e3df5f24257cddd939b257f8d", "test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
        ),
        CifarVersion(
            folder="cifar-100-binary",
            archive="cifar-100-binary.tar.gz",
            train=("train.bin",),
            test=("test.bin",),
            md5={},
            label_bytes=2,
        ),
    ),
)

CIFAR_SETS = (CIFAR10, CIFAR100)


def find_version_folder(version: CifarVersion, root: Path) -> Path | None:
    """Where files of this version lie: in ``root`` or in the folder of their archive below it.

    One file alone counts only in a folder of the right name: many folders have a file ``test``.
    """
    places = [at for at in (root / version.folder, root) if len(version.present(at)) > (at.name != version.folder)]
    return max(places, key=lambda at: len(version.present(at)), default=None)
