"""Datasets by name, the user's own, the digits, and what `inspect` says about a folder."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import sosp.data
from sosp.data import Dataset, Resident, digits, inspect, load
from sosp.data.inspection import NETTE
from sosp.errors import ArgumentError, DataError, SospError


def test_the_short_list_of_names() -> None:
    names = "load cifar10 cifar100 folder digits inspect Dataset Source Resident Folder UnreadableWarning"
    assert sosp.data.__all__ == names.split()
    assert all(callable(getattr(sosp.data, name)) for name in sosp.data.__all__)


# --- digits ---------------------------------------------------------------------------------------------


def test_digits_are_split_evenly_and_always_alike() -> None:
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    data = digits()
    assert (data.name, data.shape, data.classes) == ("digits", (1, 8, 8), tuple("0123456789"))
    assert data.test.labels.bincount().tolist() == [50] * 10
    assert data.train.labels.bincount().tolist() == [128, 132, 127, 133, 131, 132, 131, 129, 124, 130]
    x, _ = next(data.train.ordered(batch=2000))
    assert x.mean().abs() < 1e-5
    assert abs(x.std() - 1) < 1e-5
    again = digits()
    assert torch.equal(data.test.images, again.test.images)
    everything = torch.cat([data.train.images, data.test.images]).flatten(1)
    assert len(everything.unique(dim=0)) == 1797  # no image is in both


def test_digits_may_shift() -> None:
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    still, moved = digits(), digits(shift=1)
    assert (still.train.pad, moved.train.pad, moved.train.flip, moved.test.pad) == (0, 1, False, 0)
    a, b = (next(data.train.epoch(0, batch=1297, seed=0))[0] for data in (still, moved))
    # Of 3 x 3 places one leaves an image where it was: 144 of 1297, standard deviation 11.
    assert 88 < sum(map(torch.equal, a, b)) < 200
    with pytest.raises(ArgumentError, match="shift=-1"):
        digits(shift=-1)


def test_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SospError, match=r"pip install 'sosp\[demo\]'"):
        digits()


# --- by name --------------------------------------------------------------------------------------------


def test_known_names(tmp_path: Path) -> None:
    pytest.importorskip("PIL", reason="needs pillow")
    images(tmp_path, ["a", "b"])
    assert load("imagenet", tmp_path).name == "imagenet"
    assert load("folder", tmp_path).classes == ("a", "b")
    with pytest.raises(DataError, match="there is no CIFAR-10 in"):
        load("cifar10", tmp_path)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "cifar",
            {},
            r"there is no dataset 'cifar'. Did you mean 'cifar10'\? Choose one of: cifar10, cifar100, imagenet",
        ),
        ("what", {}, "path/to/file.py:function or package.module:function"),
        ("cifar10", {}, "'cifar10' is read from files: give their folder with folder="),
        ("digits", {"folder": "x"}, "'digits' is not read from a folder; leave out folder='x'"),
        (3, {}, "name=3 is a int"),
    ],
)
def test_bad_names(name: Any, options: dict[str, str], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        load(name, **options)


# --- the user's own -------------------------------------------------------------------------------------

OWN = """
from __future__ import annotations
import dataclasses
import torch
from sosp.data import Dataset, Resident

@dataclasses.dataclass
class Record:
    x: int

def pair(shape=(3, 4, 5), count=6):
    return torch.zeros(count, *shape), torch.arange(count)

def pairs():
    return pair(), list(pair(count=2))

def whole(folder=None):
    source = Resident.of(*pair())
    return Dataset(str(folder), source, source, ("a",), (3, 4, 5))

nothing = lambda: None
tensor = lambda: torch.zeros(2, 3)
one = lambda: pair()
three = lambda: (1, 2, 3)
arrays = lambda: ((1, 2), (3, 4))
unlike = lambda: (pair(), pair((3, 4, 4)))
flat = lambda: (pair((5,)), pair((5,)))
floats = lambda: ((pair()[0], torch.zeros(6)),) * 2
NUMBER = 3

def fails(): return 1 / 0
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_own_data.py").write_text(OWN)
    (tmp_path / "my_needy_data.py").write_text("import a_module_that_nobody_has")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "my_own_data.py"


@pytest.mark.parametrize("place", ["my_own_data", "my_own_data.py", "./my_own_data.py"])
def test_a_function_of_the_user(own: Path, place: str) -> None:
    data = load(f"{place}:pairs")
    assert (data.classes, data.shape) == (tuple("012345"), (3, 4, 5))
    assert (len(data.train), len(data.test)) == (6, 2)
    assert isinstance(data.train, Resident)
    assert (data.train.pad, data.train.flip) == (0, False)
    assert isinstance(load(f"{place}:whole"), Dataset)
    assert load(f"{own}:whole", "there").name == "there"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nothing", "my_own_data:nothing returned NoneType; it must return a sosp.data.Dataset, or a pair"),
        ("tensor", r"returned Tensor\(2, 3\); it must"),
        ("one", r"returned a tuple of \(Tensor\(6, 3, 4, 5\), Tensor\(6,\)\); it must"),
        ("three", r"returned a tuple of \(int, int, int\)"),
        ("arrays", r"returned a tuple of \(a tuple of \(int, int\)"),
        ("unlike", r"training images of shape \(3, 4, 5\) and test images of \(3, 4, 4\)"),
        ("flat", r"images have shape \(6, 5\); give \(images, channels, height, width\)"),
        ("floats", "labels are torch.float32"),
        ("wholes", "my_own_data has no function 'wholes'. Did you mean 'whole'?"),
        ("NUMBER", "has no function 'NUMBER'"),
    ],
)
def test_what_a_function_must_not_return(own: Path, function: str, message: str) -> None:
    with pytest.raises((ArgumentError, DataError), match=message):
        load(f"my_own_data:{function}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere/file.py:f", "there is no file nowhere/file.py"),
        ("no_such_package.module:f", "there is no module 'no_such_package.module' to import"),
        (":f", "'' is not the name of a module"),
        (".a:f", "'.a' is not the name of a module"),
    ],
)
def test_places_that_do_not_exist(name: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        load(name)


def test_the_users_own_errors_come_through(own: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        load("my_own_data:fails")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_nobody_has"):
        load("my_needy_data:f")


# --- inspect --------------------------------------------------------------------------------------------


def images(root: Path, classes: list[str], count: int = 1) -> None:
    from PIL import Image

    for name in classes:
        (root / name).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (4, 4)).save(root / name / f"{i}.jpg")


def found(folder: Path) -> dict[str, Any]:
    return {finding.name: finding for finding in inspect(folder)}


def test_nothing_there(tmp_path: Path) -> None:
    findings = inspect(tmp_path)
    assert [(finding.name, finding.state) for finding in findings] == [
        (name, "absent") for name in ("cifar10", "cifar100", "imagenet", "imagenette")
    ]
    text = "\n".join(map(str, findings))
    assert "download cifar-10-python.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html" in text
    assert "https://image-net.org/download" in text
    assert "https://github.com/fastai/imagenette" in text
    with pytest.raises(DataError, match="there is no folder"):
        inspect(tmp_path / "none")


def test_a_part_of_cifar_and_an_archive(tmp_path: Path) -> None:
    at = tmp_path / "cifar-10-batches-py"
    at.mkdir()
    (at / "data_batch_1").write_bytes(b"not it")
    (tmp_path / "cifar-100-python.tar.gz").touch()
    findings = found(tmp_path)
    ten, hundred = findings["cifar10"], findings["cifar100"]
    assert (ten.state, ten.path) == ("incomplete", at)
    assert ten.details[:2] == ("data_batch_2 is missing", "data_batch_3 is missing")
    assert ten.details[-1].startswith("data_batch_1 is not the official file: md5 ")
    assert (hundred.state, hundred.advice) == ("packed", f"unpack it first: tar xf {hundred.path} -C {tmp_path}")
    assert str(ten).startswith(f"cifar10: incomplete, {at}\n  data_batch_2 is missing\n")


def test_binary_files_of_the_wrong_size(tmp_path: Path) -> None:
    at = tmp_path / "cifar-100-binary"
    at.mkdir()
    for name in ("train.bin", "test.bin"):
        (at / name).write_bytes(bytes(10))
    details = found(at)["cifar100"].details
    assert details[0].startswith("train.bin has 10 bytes, the official file 153,700,000.")
    assert details[1].startswith("test.bin has 10 bytes, the official file 30,740,000.")


def test_binary_files_that_hold_something_else(tmp_path: Path) -> None:
    at = tmp_path / "cifar-100-binary"
    at.mkdir()
    for name, count in (("train.bin", 50_000), ("test.bin", 10_000)):
        with (at / name).open("wb") as file:
            file.truncate(count * 3074)  # zeros, without the disk space
    details = found(tmp_path)["cifar100"].details
    assert details[0].startswith(f"{at}: the training classes have 0 to 50000 images.")


def test_image_folders(tmp_path: Path) -> None:
    pytest.importorskip("PIL", reason="needs pillow")
    images(tmp_path / "nette" / "train", NETTE.split(), 2)
    images(tmp_path / "nette" / "val", NETTE.split())
    finding = found(tmp_path)["imagenette"]
    assert (finding.state, finding.path) == ("incomplete", tmp_path / "nette")
    assert finding.details == (
        "10 classes, 20 training and 10 test images",
        "the published imagenette has 9,469 and 3,925",
    )
    assert "https://github.com/fastai/imagenette" in finding.advice
    assert found(tmp_path / "nette")["imagenette"] == finding

    images(tmp_path / "own" / "train", ["a", "b"])
    images(tmp_path / "own" / "test", ["b"])
    own = found(tmp_path / "own")["folder"]
    assert (own.state, own.details) == ("complete", ("2 classes, 2 training and 1 test images",))
    images(tmp_path / "own" / "test", ["c"])
    (tmp_path / "own" / "train" / "d").mkdir()
    own = found(tmp_path / "own")["folder"]
    assert own.state == "incomplete"
    assert own.details[1:] == (
        "1 training folders without images, the first is d",
        "1 classes occur only among the test images, the first is c",
    )
    plain = found(tmp_path / "own" / "test")["folder"]
    assert plain.details == ("2 classes, 2 images, not divided into train/ and val/",)


def test_archives_of_images(tmp_path: Path) -> None:
    for name in ("ILSVRC2012_img_val.tar", "imagenette2.tgz"):
        (tmp_path / name).touch()
    findings = found(tmp_path)
    assert findings["imagenet"].path.name == "ILSVRC2012_img_val.tar"
    assert findings["imagenette"].path.name == "imagenette2.tgz"
    assert "tar xf" in findings["imagenette"].advice
