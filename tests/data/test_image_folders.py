"""Image folders: which files and labels, crops against torch's own resizing, threads, ranks, damaged files."""

import math
import os
import sys
import threading
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sosp.data import UnreadableWarning, folder
from sosp.data.image_decoding import Crop, decode_test_image, decode_training_image, find_middle_crop
from sosp.errors import ArgumentError, DataError, SospError

PIL = pytest.importorskip("PIL", reason="needs pillow")
from PIL import Image  # noqa: E402

PLAIN = {"mean": (0, 0, 0), "std": (1, 1, 1)}


def smooth(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture without sharp edges."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def tone(label: int, number: int) -> tuple[int, int, int]:
    return 20 * label, 10 * number, 100


def fill(root: Path, counts: dict[str, int], suffix: str = ".png") -> Path:
    """Folders of small pictures of one colour each, which says the class and the number within it."""
    for label, (name, count) in enumerate(counts.items()):
        (root / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (12, 9), tone(label, number)).save(root / name / f"{number:02}{suffix}")
    return root


@pytest.fixture
def divided(tmp_path: Path) -> Path:
    fill(tmp_path / "train", {"ant": 5, "bee": 4, "cat": 6})
    fill(tmp_path / "val", {"ant": 2, "bee": 3, "cat": 2})
    return tmp_path


def colours(batches: Iterator[tuple[Tensor, Tensor]]) -> list[tuple[int, int, int]]:
    """Of each image, the class and the number that its colour says, and its label."""
    found = []
    for x, y in batches:
        for image, label in zip((x * 255).round().int(), y.tolist(), strict=True):
            assert (image == image[:, :1, :1]).all()
            found.append((int(image[0, 0, 0]) // 20, int(image[1, 0, 0]) // 10, label))
    return found


# --- which files ----------------------------------------------------------------------------------------


def test_labels_are_ranks_of_folder_names(divided: Path) -> None:
    data = folder(divided, size=8, **PLAIN)
    assert (data.name, data.classes, data.shape) == ("folder", ("ant", "bee", "cat"), (3, 8, 8))
    assert (len(data.train), len(data.test)) == (15, 7)
    assert colours(data.test.ordered(batch=3)) == [(c, i, c) for c, n in enumerate((2, 3, 2)) for i in range(n)]
    assert sorted(colours(data.train.epoch(0, batch=4, seed=0))) == [
        (c, i, c) for c, n in enumerate((5, 4, 6)) for i in range(n)
    ]


def test_any_suffix_hidden_files_and_folders_within(tmp_path: Path) -> None:
    at = fill(tmp_path, {"a": 1, "b": 1})
    for name in ("x.JPEG", "y.Jpg", "z.webp", "u.BMP", "v.tif"):
        smooth(9, 9).save(at / "a" / name)
    for name in (".hidden.png", "._z.png", "notes.txt"):
        (at / "a" / name).write_text("no image")
    for hidden in (at / ".cache", at / "a" / ".trash"):
        hidden.mkdir()
        smooth(9, 9).save(hidden / "t.png")
    (at / "b" / "deeper").mkdir()
    smooth(9, 9).save(at / "b" / "deeper" / "w.png")
    data = folder(at, size=8)
    assert data.classes == ("a", "b")
    assert [Path(file).name for file in data.test.files] == [
        "00.png",
        "u.BMP",
        "v.tif",
        "x.JPEG",
        "y.Jpg",
        "z.webp",
        "00.png",
        "w.png",
    ]
    assert data.test.labels.tolist() == [0] * 6 + [1] * 2


def test_a_folder_of_classes_is_for_evaluation(tmp_path: Path) -> None:
    data = folder(fill(tmp_path, {"a": 2, "b": 1}), size=8)
    assert data.train.files == data.test.files
    assert len(data.test) == 3


def test_test_stands_in_for_val_and_may_lack_classes(tmp_path: Path) -> None:
    fill(tmp_path / "train", {"a": 1, "b": 1, "c": 1})
    fill(tmp_path / "test", {"c": 1})
    assert folder(tmp_path, size=8).test.labels.tolist() == [2]


# --- crops ----------------------------------------------------------------------------------------------


def resized(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """torch's own antialiased bilinear resizing, in float32."""
    x = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].float()
    return F.interpolate(x, (height, width), mode="bilinear", antialias=True)[0].permute(1, 2, 0).numpy()


@pytest.mark.parametrize(("width", "height"), [(40, 30), (30, 41), (32, 32), (200, 61), (17, 300), (9, 8)])
@pytest.mark.parametrize("size", [14, 28])
def test_evaluation_resizes_the_short_side_and_cuts_the_middle(
    tmp_path: Path, width: int, height: int, size: int
) -> None:
    path = str(tmp_path / "a.png")
    smooth(width, height).save(path)
    short, resize = min(width, height), size * 256 // 224
    w, h = (resize if side == short else int(resize * side / short) for side in (width, height))
    top, left = round((h - size) / 2), round((w - size) / 2)
    whole = resized(np.asarray(smooth(width, height)), h, w)
    # Pillow rounds to whole levels after each of two passes.
    assert np.abs(decode_test_image(path, size, resize) - whole[top : top + size, left : left + size]).max() <= 1.01


def random_crops(count: int) -> Iterator[Crop]:
    random = torch.Generator().manual_seed(0)
    for i in range(count):
        tries = torch.rand(10, 2, generator=random).tolist()
        yield Crop(tries, torch.rand(2, generator=random).tolist(), bool(i % 2))


@pytest.mark.parametrize("suffix", [".png", ".jpg"])
def test_training_cuts_a_box_and_mirrors(tmp_path: Path, suffix: str) -> None:
    path = str(tmp_path / f"a{suffix}")
    smooth(160, 120).save(path)
    pixels = np.asarray(Image.open(path))
    for crop in random_crops(20):
        left, top, w, h = crop.box(160, 120)
        wanted = resized(pixels[top : top + h, left : left + w], 16, 16)
        found = (
            decode_training_image(path, 16, crop)[:, ::-1] if crop.mirrored else decode_training_image(path, 16, crop)
        )
        # The resizing of a box looks a little beyond its edge, and a JPEG is decoded at a smaller size: on a picture
        # that changes by at most 255 within 30 pixels, both shift a value by a few levels.
        assert np.abs(found - wanted).mean() < 2
        assert np.abs(found - wanted).max() < 16


def test_a_large_jpeg_is_decoded_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "a.jpg")
    smooth(1600, 800).save(path)
    sizes: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "sosp.data.image_decoding.convert_to_rgb", lambda image: sizes.append(image.size) or image.convert("RGB")
    )
    decode_training_image(path, 100, Crop([[1.0, 0.5]], [0.0, 0.0], False))
    decode_training_image(path, 100, Crop([[0.0, 0.5]], [0.0, 0.0], False))
    decode_test_image(path, 100, 114)
    # Of the middle 1067 x 800 an eighth is enough for 100; of a box of 320 x 320 a third, so a half is taken.
    assert sizes == [(200, 100), (800, 400), (1600, 800)]


def test_boxes_have_the_area_and_ratio_asked_for() -> None:
    boxes = [crop.box(400, 400) for crop in random_crops(4000)]
    areas = np.array([w * h / 400**2 for _, _, w, h in boxes])
    ratios = np.log([w / h for _, _, w, h in boxes])
    assert 0.079 < areas.min() < 0.1
    assert areas.max() > 0.9
    assert abs(ratios).max() < math.log(4 / 3) + 0.02
    assert abs(ratios.mean()) < 0.02  # its standard deviation is log(4/3) / sqrt(3) / sqrt(4000), that is 0.003
    assert all(0 <= left <= 400 - w and 0 <= top <= 400 - h for left, top, w, h in boxes)
    assert min(left for left, _, _, _ in boxes) == min(top for _, top, _, _ in boxes) == 0
    assert any(left == 400 - w for left, _, w, _ in boxes)


@pytest.mark.parametrize(
    ("width", "height", "box"),
    [(100, 100, (0, 0, 100, 100)), (400, 90, (140, 0, 120, 90)), (90, 400, (0, 140, 90, 120)), (1, 50, (0, 24, 1, 1))],
)
def test_the_middle_when_no_crop_fits(width: int, height: int, box: tuple[int, ...]) -> None:
    assert find_middle_crop(width, height) == box
    if width != height:
        assert Crop([[1.0, 1.0 * (width < height)]] * 10, [0.0, 0.0], False).box(width, height) == box


MODES = {
    "L": (77, (77, 77, 77)),
    "LA": ((77, 10), (77, 77, 77)),
    "RGBA": ((10, 20, 30, 0), (10, 20, 30)),
    "1": (1, (255, 255, 255)),
    "P": (5, None),
    "I;16": (77 * 256, (77, 77, 77)),
    "CMYK": ((0, 0, 0, 0), (255, 255, 255)),
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_becomes_rgb(tmp_path: Path, mode: str) -> None:
    value, wanted = MODES[mode]
    image = Image.new(mode, (20, 20), value)
    if mode == "P":
        image.putpalette([9, 9, 9] * 5 + [40, 50, 60])
        image.info["transparency"], wanted = bytes([255] * 5 + [0]), (40, 50, 60)
    path = str(tmp_path / ("a.tif" if mode == "CMYK" else "a.png"))
    image.save(path)
    for pixels in (decode_test_image(path, 8, 9), decode_training_image(path, 8, next(random_crops(1)))):
        assert pixels.shape == (8, 8, 3)
        assert (pixels == np.array(wanted)).all()


def test_inputs_are_normalised_as_imagenet_is_by_default(tmp_path: Path) -> None:
    x, _ = next(folder(fill(tmp_path, {"a": 1}), size=8).test.ordered(batch=1))
    wanted = (torch.tensor(tone(0, 0)).float() / 255 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor(
        [0.229, 0.224, 0.225]
    )
    assert torch.equal(x[0], wanted.view(3, 1, 1).expand(3, 8, 8))
    assert x.is_contiguous()


# --- epochs ---------------------------------------------------------------------------------------------


@pytest.fixture
def varied(tmp_path: Path) -> Path:
    for i in range(23):
        (tmp_path / f"c{i % 4}").mkdir(exist_ok=True)
        smooth(20 + i, 40 - i, seed=i).save(tmp_path / f"c{i % 4}" / f"{i}.png")
    return tmp_path


def same(a: list[tuple[Tensor, Tensor]], b: list[tuple[Tensor, Tensor]]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(p, q) for x, y in zip(a, b, strict=True) for p, q in zip(x, y, strict=True)
    )


def test_an_epoch_depends_on_seed_and_number_alone(varied: Path) -> None:
    source = folder(varied, size=8, workers=1).train
    whole = list(source.epoch(2, batch=5, seed=1))
    assert [len(y) for _, y in whole] == [5, 5, 5, 5, 3]
    assert source.steps(5) == 5
    assert same(whole, list(folder(varied, size=8, workers=3).train.epoch(2, batch=5, seed=1)))
    for start in range(6):
        assert same(whole[start:], list(source.epoch(2, batch=5, seed=1, start=start)))
    assert same(whole[:4], list(source.epoch(2, batch=5, seed=1, drop_last=True)))
    assert not same(whole, list(source.epoch(3, batch=5, seed=1)))
    assert not same(whole, list(source.epoch(2, batch=5, seed=0)))


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_every_batch(varied: Path, ranks: int) -> None:
    source = folder(varied, size=8).train
    for part in (
        lambda **share: source.epoch(0, batch=5, seed=0, **share),
        lambda **share: source.ordered(batch=5, limit=17, **share),
    ):
        parts = [list(part(rank=rank, ranks=ranks)) for rank in range(ranks)]
        for k, (x, y) in enumerate(part()):
            assert all(same([parts[rank][k]], [(x[rank::ranks], y[rank::ranks])]) for rank in range(ranks))


def test_subsets(varied: Path) -> None:
    source = folder(varied, size=8).train
    some = source.subset(6, seed=0)
    assert some.files == source.subset(6, seed=0).files != source.subset(6, seed=1).files
    label = dict(zip(source.files, source.labels.tolist(), strict=True))
    assert [label[file] for file in some.files] == some.labels.tolist()
    assert len(list(some.ordered(batch=4))) == 2


def test_no_thread_is_left_when_the_caller_stops(varied: Path) -> None:
    batches = folder(varied, size=8).train.epoch(0, batch=2, seed=0)
    next(batches)
    assert any(thread.name.startswith("sosp-decode") for thread in threading.enumerate())
    batches.close()  # type: ignore[attr-defined]
    assert not any(thread.name.startswith("sosp-decode") for thread in threading.enumerate())


@pytest.mark.gpu
def test_batches_on_a_gpu_are_the_same_bits(varied: Path) -> None:
    source = folder(varied, size=8).train
    here = list(source.epoch(0, batch=5, seed=0))
    assert same(here, [(x.cpu(), y.cpu()) for x, y in source.to("cuda").epoch(0, batch=5, seed=0)])
    there = list(source.epoch(0, batch=5, seed=0, device="cuda"))
    assert all(x.is_cuda and y.is_cuda for x, y in there)
    assert same(here, [(x.cpu(), y.cpu()) for x, y in there])


# --- files that cannot be read --------------------------------------------------------------------------


def test_files_that_are_no_images_are_named_and_left_out(divided: Path) -> None:
    (divided / "train" / "ant" / "02.png").write_text("not a picture")
    (divided / "val" / "bee" / "00.png").write_bytes(b"")
    with pytest.warns(UnreadableWarning) as caught:
        data = folder(divided, size=8, **PLAIN)
    message = str(caught[0].message)
    assert message.startswith("2 of 22 images cannot be read and are left out: ")
    assert f"{divided}/train/ant/02.png (not an image), {divided}/val/bee/00.png (not an image)." in message
    assert (len(data.train), len(data.test)) == (14, 6)
    assert (0, 2, 0) not in colours(data.train.ordered(batch=8))


def test_a_warning_names_at_most_ten(tmp_path: Path) -> None:
    for i in range(13):
        (fill(tmp_path, {"a": 1}) if not i else tmp_path).joinpath("a", f"bad{i:02}.jpg").touch()
    with pytest.warns(UnreadableWarning, match=r"13 of 14 .*bad09.jpg \(not an image\) and 3 more\."):
        folder(tmp_path, size=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(folder(tmp_path, size=8, checked=False).train) == 14


def cut(path: Path) -> None:
    """Noise, so that the file is long, and only its first part."""
    Image.effect_noise((60, 60), 80).save(path)
    path.write_bytes(path.read_bytes()[:300])


def test_the_next_of_the_batch_stands_in_for_a_damaged_file(divided: Path) -> None:
    for name in ("val/ant/01.png", "val/cat/01.png"):
        cut(divided / name)
    source = folder(divided, size=8, **PLAIN).test
    good = [(0, 0, 0), (1, 0, 1), (1, 0, 1), (1, 1, 1), (1, 2, 1), (2, 0, 2)]
    with pytest.warns(UnreadableWarning) as caught:
        found = [colours(source.ordered(batch=batch, limit=limit)) for batch, limit in ((3, 6), (7, 7))]
    assert found == [good, [*good, (0, 0, 0)]]  # row 1 is followed by row 2, the last row by the first
    assert len(caught) == 2  # each is named once
    assert str(caught[0].message).startswith(
        "1 of 7 images cannot be read and are replaced by other images of the batch: "
    )
    assert "val/ant/01.png" in str(caught[0].message)
    # Row 6 is alone in its batch of three.
    with pytest.raises(DataError, match=r"none of the 1 images of batch 2 can be read; .*val/cat/01.png"):
        list(source.ordered(batch=3))


def test_ranks_agree_on_who_stands_in(divided: Path) -> None:
    for name in ("00", "02"):
        cut(divided / "train" / "cat" / f"{name}.png")
    source = folder(divided, size=8).train
    with pytest.warns(UnreadableWarning):
        whole = list(source.epoch(0, batch=6, seed=0))
    parts = [list(source.epoch(0, batch=6, seed=0, rank=rank, ranks=3)) for rank in range(3)]
    for k, (x, y) in enumerate(whole):
        assert all(same([parts[rank][k]], [(x[rank::3], y[rank::3])]) for rank in range(3))


# --- refusals -------------------------------------------------------------------------------------------


def refusal(path: object, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        folder(path, **options)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_missing_or_empty_folder(tmp_path: Path) -> None:
    assert "there is no folder" in refusal(tmp_path / "none")
    assert f"{tmp_path} is empty. Expected one folder per class" in refusal(tmp_path)


def test_images_without_class_folders(tmp_path: Path) -> None:
    smooth(9, 9).save(tmp_path / "a.png")
    assert f"{tmp_path} contains images, but no folder for each class. Expected" in refusal(tmp_path)


def test_val_without_class_folders(divided: Path) -> None:
    for file in list((divided / "val").rglob("*.png")):
        file.rename(divided / "val" / f"{file.parent.name}{file.name}")
    for at in list((divided / "val").iterdir()):
        if at.is_dir():
            at.rmdir()
    assert f"{divided}/val contains images, but no folder for each class" in refusal(divided)


def test_empty_class_folders(divided: Path) -> None:
    (divided / "train" / "dog").mkdir()
    assert f"1 of 4 class folders in {divided}/train contain no images: dog." in refusal(divided)


def test_no_images(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "notes.txt").touch()
    assert f"there is no image in {tmp_path}, which contains a." in refusal(tmp_path)


def test_only_unreadable_images(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.jpg").touch()
    with pytest.warns(UnreadableWarning):
        assert f"none of the images in {tmp_path} can be read" in refusal(tmp_path)


def test_classes_that_only_val_has(divided: Path) -> None:
    fill(divided / "val", {"cats": 1})
    message = refusal(divided)
    assert f"{divided}/val has classes that {divided}/train does not have: cats. Did you mean 'cat'?" in message


def test_half_of_it(divided: Path) -> None:
    for name, other in (("train", "val"), ("val", "train")):
        half = divided / f"only-{name}"
        half.mkdir()
        (half / name).symlink_to(divided / name)
        assert f"{half} has {name}/ but no {other}/. Unpack that too, or give {half / name}" in refusal(half)


def test_the_folder_above(divided: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    above = tmp_path_factory.mktemp("above")
    (above / "set").symlink_to(divided)
    assert refusal(above) == f"{above} is one folder too high: give {above / 'set'}."
    (above / "set").unlink()
    (above / "set").symlink_to(divided / "train")
    assert refusal(above) == f"{above} is one folder too high: give {above / 'set'}."


def test_archives_inside(divided: Path) -> None:
    for name in ("n01.tar", "n02.tar"):
        (divided / "more" / "train").mkdir(parents=True, exist_ok=True)
        (divided / "more" / "val").mkdir(exist_ok=True)
        (divided / "more" / "train" / name).touch()
    assert "more/train contains n01.tar; unpack each archive into a folder with the same name." in refusal(
        divided / "more"
    )


def test_a_cifar_folder(tmp_path: Path) -> None:
    at = tmp_path / "cifar-10-batches-py"
    at.mkdir()
    for i in range(1, 6):
        (at / f"data_batch_{i}").touch()
    assert "looks like CIFAR-10: sosp.data.cifar10(" in refusal(at)
    assert "looks like CIFAR-10: sosp.data.cifar10(" in refusal(tmp_path)


@pytest.mark.parametrize(
    "options", [{"size": 0}, {"workers": 0}, {"mean": (0.5,), "std": (0.5,)}, {"std": (0, 1, 1)}, {"size": 2.5}]
)
def test_bad_options(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(options))):
        folder(fill(tmp_path, {"a": 1}), **options)


def test_bad_arguments_of_an_epoch(tmp_path: Path) -> None:
    source = folder(fill(tmp_path, {"a": 4}), size=8).train
    for given in ({"batch": 0}, {"batch": 2, "start": 3}, {"batch": 2, "rank": 2, "ranks": 2}):
        with pytest.raises(ArgumentError):
            source.epoch(0, **{"seed": 0, **given})
    with pytest.raises(ArgumentError, match="limit=0"):
        source.ordered(batch=2, limit=0)


def test_without_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(SospError, match=r"pip install 'sosp\[images\]'"):
        folder(fill(tmp_path, {}), size=8)


# --- real images ----------------------------------------------------------------------------------------


def sample(name: str, folder: Path) -> Path:
    root = Path(os.environ.get("SOSP_TEST_DATA", os.devnull))
    if not (root / name).is_file():
        pytest.skip(f"{name} is not at hand: set SOSP_TEST_DATA to the folder that holds it")
    with zipfile.ZipFile(root / name) as pack:
        pack.extractall(folder)
    return folder


def test_imagenette(tmp_path: Path) -> None:
    data = folder(sample("imagenette-sample.zip", tmp_path))
    assert (len(data.train), len(data.test), len(data.classes)) == (1000, 1000, 10)
    assert data.test.labels.bincount().tolist() == [100] * 10
    x, y = next(data.train.epoch(0, batch=32, seed=0))
    assert x.shape == (32, 3, 224, 224)
    assert len(y.unique()) > 5
    # Normalised by the statistics of ImageNet: mean 0 and standard deviation 1, roughly.
    assert x.mean().abs() < 0.5
    assert 0.8 < x.std() < 1.5


def test_imagenet_one_of_each_class(tmp_path: Path) -> None:
    data = folder(sample("imagenet-sample.zip", tmp_path))
    assert (len(data.test), len(data.classes), data.classes[0]) == (1000, 1000, "n01440764")
    assert data.test.labels.tolist() == list(range(1000))
    x, y = next(data.test.ordered(batch=16, limit=16))
    assert x.shape == (16, 3, 224, 224)
    assert y.tolist() == list(range(16))
