"""CIFAR files: both versions of both sets, made up and real; what is missing, damaged or hostile is refused by name."""

import hashlib
import os
import pickle
import struct
import subprocess
import sys
import tarfile
import warnings
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sosp.data import Dataset, cifar, cifar10, cifar100, inspect
from sosp.data.cifar_files import CIFAR10, CIFAR100
from sosp.data.pickles import LONGEST, parse_pickle
from sosp.errors import ArgumentError, DataError

PYTHON_10, BINARY_10 = CIFAR10.versions
PYTHON_100, BINARY_100 = CIFAR100.versions


# --- made-up files, as Python 2 wrote them --------------------------------------------------------------


def short(text: str) -> bytes:
    return b"U" + bytes([len(text)]) + text.encode()


def array(pixels: np.ndarray, dtype: str = "u1") -> bytes:
    made = b"cnumpy.core.multiarray\n_reconstruct\nq\x06cnumpy\nndarray\nq\x07K\x00\x85q\x08U\x01bq\x09\x87q\x0aR"
    shape = b"(K\x01" + b"".join(b"J" + struct.pack("<i", side) for side in pixels.shape) + b"\x86"
    kind = (
        b"cnumpy\ndtype\n" + short(dtype) + b"K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    )
    return made + shape + kind + b"\x89T" + struct.pack("<I", pixels.nbytes) + pixels.tobytes() + b"tb"


def numbers(values: list[int]) -> bytes:
    return b"](" + b"".join(b"K" + bytes([value]) for value in values) + b"e"


def python_file(pixels: np.ndarray, labels: list[int], key: str = "labels") -> bytes:
    files = b"](" + b"".join(short(f"picture_{i}.png") + b"r\x00\x01\x00\x00" for i in range(len(labels))) + b"e"
    head = b"\x80\x02}q\x01(" + short("batch_label") + short("made up") + short(key) + numbers(labels)
    coarse = short("coarse_labels") + numbers([label // 5 for label in labels]) if key == "fine_labels" else b""
    return head + coarse + short("data") + array(pixels) + short("filenames") + files + b"u."


def binary_file(pixels: np.ndarray, labels: list[int], coarse: bool = False) -> bytes:
    rows = (
        bytes([label // 5] * coarse + [label]) + image.tobytes() for image, label in zip(pixels, labels, strict=True)
    )
    return b"".join(rows)


def batch(count: int, classes: int, seed: int = 0) -> tuple[np.ndarray, list[int]]:
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (count, 3072), dtype=np.uint8), random.integers(0, classes, count).tolist()


def write(folder: Path, known: Any, version: Any, count: int = 3) -> list[tuple[np.ndarray, list[int]]]:
    """A small set in ``folder/NAME``; what was written, file by file."""
    at = folder / version.folder
    at.mkdir(parents=True, exist_ok=True)
    written = [batch(count, len(known.classes), seed) for seed in range(len(version.files))]
    for name, (pixels, labels) in zip(version.files, written, strict=True):
        if version.label_bytes:
            (at / name).write_bytes(binary_file(pixels, labels, coarse=version.label_bytes == 2))
        else:
            (at / name).write_bytes(python_file(pixels, labels, "labels" if known is CIFAR10 else "fine_labels"))
    return written


READ = {"cifar10": cifar10, "cifar100": cifar100}
VERSIONS = [(CIFAR10, PYTHON_10), (CIFAR10, BINARY_10), (CIFAR100, PYTHON_100), (CIFAR100, BINARY_100)]
EACH_VERSION = pytest.mark.parametrize(("known", "version"), VERSIONS, ids=lambda value: getattr(value, "folder", ""))


@EACH_VERSION
@pytest.mark.parametrize("inside", [True, False])
def test_small_files_are_read(tmp_path: Path, known: Any, version: Any, inside: bool) -> None:
    written = write(tmp_path, known, version)
    data = READ[known.name](
        tmp_path / version.folder if inside else tmp_path, checked=False, mean=(0,) * 3, std=(1,) * 3
    )
    assert isinstance(data, Dataset)
    assert (data.name, data.classes, data.shape) == (known.name, known.classes, (3, 32, 32))
    for source, parts in ((data.train, written[:-1]), (data.test, written[-1:])):
        x, y = next(source.ordered(batch=1000))
        assert y.tolist() == [label for _, labels in parts for label in labels]
        pixels = np.concatenate([pixels for pixels, _ in parts]).reshape(-1, 3, 32, 32)
        assert np.array_equal((x * 255).round().numpy(), pixels)
    assert (data.train.pad, data.train.flip, data.test.pad, data.test.flip) == (4, True, 0, False)


def test_the_made_up_file_is_a_pickle_and_python_3_writes_others() -> None:
    pixels, labels = batch(3, 10)
    for raw in (python_file(pixels, labels), *(pickle.dumps({"labels": labels, "data": pixels}, p) for p in (3, 4))):
        with warnings.catch_warnings(action="ignore"):  # of numpy, about its own former names
            whole = pickle.loads(raw, encoding="latin1")
        assert np.array_equal(whole["data"], pixels)
        found = parse_pickle(raw)
        assert (found["labels"], found["data"].shape, found["data"].raw) == (labels, (3, 3072), pixels.tobytes())


# --- the official ones ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the python version of CIFAR-10, unpacked if need be."""
    root = Path(os.environ.get("SOSP_TEST_DATA", os.devnull))
    if (root / PYTHON_10.folder).is_dir():
        return root / PYTHON_10.folder
    if not (root / "unpack").is_file() or not (root / "cifar10").is_dir():
        pytest.skip("CIFAR-10 is not at hand: set SOSP_TEST_DATA to the folder that holds cifar-10-batches-py")
    folder = tmp_path_factory.mktemp("cifar")
    subprocess.run([sys.executable, str(root / "unpack"), "cifar10", str(folder)], check=True, capture_output=True)
    return folder / PYTHON_10.folder


def test_the_official_cifar10(official: Path) -> None:
    data = cifar10(official)
    assert (len(data.train), len(data.test)) == (50_000, 10_000)
    assert data.test.labels[:10].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]
    assert data.train.labels[:5].tolist() == [6, 9, 9, 4, 1]
    # The mean pixel of the training set, per channel, is well known: 0.4914, 0.4822, 0.4465.
    pixels = data.train.images[:, :, 4:-4, 4:-4]
    mean = pixels.sum((0, 2, 3), dtype=torch.int64) / (255 * pixels[:, 0].numel())
    torch.testing.assert_close(mean, torch.tensor([0.4914, 0.4822, 0.4465]), atol=5e-5, rtol=0)
    assert next(data.train.epoch(0, batch=128, seed=0))[0].shape == (128, 3, 32, 32)
    assert str(inspect(official)[0]) == f"cifar10: complete, {official}\n  50,000 training and 10,000 test images"
    check_binary_version(data)


def check_binary_version(data: Dataset) -> None:
    """The same images pass the check of the binary version, in any order; one other pixel or label does not."""
    train, test = ((part.images.flatten(1).numpy(), part.labels.numpy()) for part in (data.train, data.test))
    train = data.train.images[:, :, 4:-4, 4:-4].flatten(1).flip(0).numpy(), train[1]
    cifar.check_dataset(CIFAR10, BINARY_10, Path("there"), train, test)
    pixels, labels = test[0].copy(), test[1].copy()
    pixels[9_999, 100] += 1
    labels[9_999] = (labels[9_999] + 1) % 10
    for wrong, message in (
        ((pixels, test[1]), "there: the test images are not those of CIFAR-10"),
        ((test[0], labels), "there: the test classes have 999 to 1001 images"),
    ):
        with pytest.raises(DataError, match=message):
            cifar.check_dataset(CIFAR10, BINARY_10, Path("there"), train, wrong)


def test_another_md5_is_refused(tmp_path: Path) -> None:
    write(tmp_path, CIFAR10, PYTHON_10)
    with pytest.raises(
        DataError, match=r"data_batch_1 is not the official file: md5 [0-9a-f]{32}, not c99cafc.*checked=False"
    ):
        cifar10(tmp_path)


def test_another_size_of_a_binary_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path, CIFAR100, BINARY_100)
    with pytest.raises(DataError, match=r"train.bin has 9,222 bytes, the official file 153,700,000"):
        cifar100(tmp_path)


def test_the_right_md5_is_accepted_and_classes_must_be_even(tmp_path: Path) -> None:
    write(tmp_path, CIFAR10, PYTHON_10)
    at = tmp_path / PYTHON_10.folder
    version = replace(
        PYTHON_10, md5={name: hashlib.md5((at / name).read_bytes()).hexdigest() for name in PYTHON_10.files}
    )
    images = [cifar.read_file(CIFAR10, version, at / name, checked=True) for name in version.files]
    assert [len(pixels) for pixels, _ in images] == [3] * 6
    with pytest.raises(DataError, match="the training classes have 0 to 2 images"):
        cifar.check_dataset(CIFAR10, version, at, (images[0][0], np.array([1, 1, 2])), images[1])


# --- what is not there ----------------------------------------------------------------------------------


def refusal(call: Any, *given: Any, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        call(*given, **options)
    return str(caught.value)


def test_a_missing_folder(tmp_path: Path) -> None:
    assert refusal(cifar10, tmp_path / "a" / "b") == f"there is no folder {tmp_path / 'a' / 'b'}. {tmp_path} exists."


def test_a_locked_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read anything
    assert refusal(cifar10, tmp_path) == f"{tmp_path} cannot be read by this user; change its permissions."


def test_one_file_of_a_common_name_is_no_cifar(tmp_path: Path) -> None:
    (tmp_path / "test").write_text("#!/bin/sh")
    assert f"there is no CIFAR-100 in {tmp_path}, which contains test." in refusal(cifar100, tmp_path)
    (tmp_path / PYTHON_100.folder).mkdir()
    (tmp_path / "test").rename(tmp_path / PYTHON_100.folder / "test")
    assert "contains only a part of CIFAR-100; missing: train." in refusal(cifar100, tmp_path)


def test_no_path_at_all() -> None:
    with pytest.raises(ArgumentError, match="folder=3 is a int; give a path"):
        cifar10(3)  # type: ignore[arg-type]


def test_an_empty_folder(tmp_path: Path) -> None:
    message = refusal(cifar10, tmp_path)
    assert "which is empty" in message
    assert "download cifar-10-python.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html" in message


def test_half_unpacked(tmp_path: Path) -> None:
    write(tmp_path, CIFAR10, PYTHON_10)
    for name in ("data_batch_4", "test_batch"):
        (tmp_path / PYTHON_10.folder / name).unlink()
    message = refusal(cifar10, tmp_path)
    assert "contains only a part of CIFAR-10; missing: data_batch_4, test_batch." in message
    assert "Download cifar-10-python.tar.gz" in message
    (tmp_path / PYTHON_10.archive).touch()
    assert f"Unpack again: tar xf {tmp_path / PYTHON_10.archive} -C {tmp_path}" in refusal(cifar10, tmp_path)


def test_the_complete_version_is_taken(tmp_path: Path) -> None:
    write(tmp_path, CIFAR10, PYTHON_10)
    (tmp_path / PYTHON_10.folder / "test_batch").unlink()
    write(tmp_path, CIFAR10, BINARY_10, count=4)
    assert len(cifar10(tmp_path, checked=False).test) == 4


def test_an_archive_that_is_not_unpacked(tmp_path: Path) -> None:
    archive = tmp_path / PYTHON_10.archive
    write(tmp_path / "there", CIFAR10, PYTHON_10)
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "there" / PYTHON_10.folder, PYTHON_10.folder)
    message = refusal(cifar10, tmp_path)
    command = message.split("unpack it first: ")[1]
    assert command == f"tar xf {archive} -C {tmp_path}"
    assert refusal(cifar10, archive) == f"{archive} is a file; unpack it first: {command}"
    subprocess.run(command.split(), check=True)  # the advice works
    assert len(cifar10(tmp_path, checked=False).train) == 15


def test_another_dataset(tmp_path: Path) -> None:
    write(tmp_path, CIFAR100, PYTHON_100)
    assert "looks like CIFAR-100: sosp.data.cifar100(" in refusal(cifar10, tmp_path)
    images = tmp_path / "images"
    for part in ("train", "val"):
        (images / part / "dog").mkdir(parents=True)
        (images / part / "dog" / "a.JPEG").touch()
    assert "looks like an image folder with train/ and val/: sosp.data.folder(" in refusal(cifar10, images)
    assert "looks like an image folder with a folder for each class" in refusal(cifar100, images / "train")
    assert "contains images, but no folder for each class" in refusal(cifar100, images / "train" / "dog")


# --- damaged and hostile files --------------------------------------------------------------------------


def in_place(folder: Path, raw: bytes, known: Any = CIFAR10, version: Any = PYTHON_10) -> Any:
    """Read ``raw`` as a file of a set, not checked against the official one."""
    path = folder / version.files[0]
    path.write_bytes(raw)
    return cifar.read_file(known, version, path, checked=False)


PIXELS, LABELS = batch(2, 10)
WRONG = {
    "labels too large": (python_file(PIXELS, [3, 10]), "labels that are not a list of numbers from 0 to 9"),
    "more labels": (python_file(PIXELS, [1, 2, 3]), "has 3 labels, but not the same number of images"),
    "narrow images": (python_file(PIXELS[:, :99], LABELS), "not the same number of images of 3072 bytes"),
    "no images": (python_file(PIXELS[:0], []), "0 bytes of images"),
    "another set": (python_file(PIXELS, LABELS, "fine_labels"), "has no 'labels' in it"),
    "floats": (python_file(PIXELS, LABELS).replace(b"U\x02u1", b"U\x02f8"), "an array of 'f8'"),
    "a list": (pickle.dumps([1, 2], 2), "holds a list, not a dict"),
    "text": (b"hello", "the pickle opcode b'e'|cannot be decoded|at byte 0"),
    "nothing": (b"", "cannot be decoded at byte 0"),
    "cut short": (python_file(PIXELS, LABELS)[:3000], "ends early: 6144 bytes should follow byte"),
    "protocol 0": (pickle.dumps({"labels": LABELS}, 0), "the pickle opcode"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_python_files_are_refused(tmp_path: Path, case: str) -> None:
    raw, message = WRONG[case]
    with pytest.raises(DataError, match=f"{tmp_path}/data_batch_1 .*({message})"):
        in_place(tmp_path, raw)


@pytest.mark.parametrize(
    ("raw", "message"),
    [(b"", "has 0 bytes"), (bytes(3072), "not a multiple of 3073"), (bytes([10] * 3073), "has a label 10")],
)
def test_wrong_binary_files_are_refused(tmp_path: Path, raw: bytes, message: str) -> None:
    with pytest.raises(DataError, match=f"data_batch_1.bin {message}|data_batch_1.bin .*{message}"):
        in_place(tmp_path, raw, version=BINARY_10)


class Shell:
    def __reduce__(self) -> Any:
        return os.system, ("touch hacked",)


HOSTILE = {
    "a command": (Shell(), "the name 'posix.system', which CIFAR files never contain. It was not executed"),
    "an import": (subprocess.Popen, "the name '(subprocess|commands).Popen'"),
    "an object": (Random(), "the name 'random.Random'"),
    "a function of numpy": (np.load, "the name 'numpy.load'"),
    "an array of objects": (np.array([print], dtype=object), "an array of 'O8'|_codecs.encode"),
    "a loop": ((lambda loop: loop.append(loop) or loop)([]), "holds a list"),
}


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("protocol", [2, 4])
def test_hostile_pickles_are_refused_and_not_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, protocol: int
) -> None:
    monkeypatch.chdir(tmp_path)
    value, message = HOSTILE[case]
    with pytest.raises(DataError, match=message):
        in_place(tmp_path, pickle.dumps(value, protocol))
    assert not (tmp_path / "hacked").exists()


def test_the_memory_a_pickle_may_ask_for_is_bounded(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"more than {LONGEST} opcodes"):
        parse_pickle(b"}" * (LONGEST + 1))
    for promise in (b"T\xff\xff\xff\xff", b"X\xff\xff\xff\x7f", b"B\xff\xff\xff\xff"):
        with pytest.raises(DataError, match="ends early"):
            parse_pickle(b"\x80\x02" + promise + b"abc.")
    with pytest.raises(DataError, match="a bytes in place of a short text"):
        parse_pickle(b"}(T\x00\x02\x00\x00" + bytes(512) + b"Nu.")
    assert parse_pickle(b"Nr\xff\xff\xff\xff.") is None  # a memo is a dict, not a list of four thousand million
    path = tmp_path / "data_batch_1"
    with path.open("wb") as file:
        file.truncate(cifar.LARGEST + 1)
    with pytest.raises(DataError, match=r"has 268,435,457 bytes, far more than any file of CIFAR-10"):
        cifar.read_file(CIFAR10, PYTHON_10, path, checked=False)


SMALL = python_file(*batch(2, 10))
FORMS = [SMALL, *(pickle.dumps({"labels": LABELS, "data": PIXELS}, protocol) for protocol in (2, 3, 4))]


def mutated(raw: bytes, random: Random) -> bytes:
    """A few bytes changed, cut out, doubled or moved; mostly outside the pixels."""
    data = bytearray(raw)
    for _ in range(random.randint(1, 4)):
        at, length = (
            random.choice((random.randrange(400), random.randrange(len(data)))) % len(data),
            random.randint(1, 8),
        )
        kind = random.randrange(4)
        if kind == 0:
            data[at] = random.randrange(256)
        elif kind == 1:
            del data[at : at + length]
        elif kind == 2:
            data[at:at] = data[(other := random.randrange(len(data))) : other + length]
        else:
            data[at:at] = random.choice([b"R", b"b", b"(", b"e", b"u", b"s", b"\x86", b"h\x01", b"}", b"]", b"."])
    return bytes(data)


@settings(max_examples=1500)
@given(st.integers(0, 2**32))
def test_mutated_files_give_a_data_error_or_images(seed: int) -> None:
    random = Random(seed)
    for _ in range(10):
        raw = mutated(random.choice(FORMS), random)
        try:
            pixels, labels = cifar._python(raw, 10)
        except DataError:
            continue
        assert pixels.shape == (len(labels), 3072)
        assert labels.min() >= 0
        assert labels.max() < 10


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes_give_a_data_error(raw: bytes) -> None:
    with pytest.raises(DataError):
        cifar._python(raw, 10)
