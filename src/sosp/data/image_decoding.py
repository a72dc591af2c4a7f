"""From an image file to the square of bytes a network is given, cropped at random or in the middle."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from sosp.errors import SospError

if TYPE_CHECKING:
    from PIL.Image import Image

AREA = (0.08, 1.0)  # of a random crop, as a share of the image
RATIO = (3 / 4, 4 / 3)  # its width over its height, even on a logarithmic scale
TRIES = 10  # crops that do not fit into the image before its middle is taken


def import_pillow() -> ModuleType:
    """The library that decodes; asked for when the first image is."""
    try:
        from PIL import Image
    except ImportError as missing:
        raise SospError(
            "reading image files needs pillow, which is not installed: pip install 'sosp[images]'"
        ) from missing
    return Image


@dataclass(frozen=True)
class Crop:
    """The random numbers of one training image, each from 0 to below 1."""

    tries: list[list[float]]  # TRIES pairs: area, ratio
    place: list[float]  # across, down
    mirrored: bool

    def box(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Left, top, width and height: the first of the tries that fits into the image."""
        for area, ratio in self.tries:
            w, h = _extent(width * height * (AREA[0] + area * (AREA[1] - AREA[0])), ratio)
            if 0 < w <= width and 0 < h <= height:
                return int(self.place[0] * (width - w + 1)), int(self.place[1] * (height - h + 1)), w, h
        return find_middle_crop(width, height)


def _extent(area: float, position: float) -> tuple[int, int]:
    low, high = math.log(RATIO[0]), math.log(RATIO[1])
    ratio = math.exp(low + position * (high - low))
    return round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))


def find_middle_crop(width: int, height: int) -> tuple[int, int, int, int]:
    """The largest crop in the middle whose ratio is within ``RATIO``."""
    w = min(width, round(height * RATIO[1]))
    h = min(height, round(width / RATIO[0]))
    return (width - w) // 2, (height - h) // 2, w, h


def decode_training_image(path: str, size: int, crop: Crop) -> np.ndarray:
    """A random crop resized to (size, size, 3), perhaps mirrored.

    A JPEG much larger than needed is decoded at a half, a quarter or an eighth of its size, never below ``size``.
    """
    Image = import_pillow()
    with Image.open(path) as image:
        width, height = image.size
        left, top, w, h = crop.box(width, height)
        image.draft(None, (math.ceil(width * size / w), math.ceil(height * size / h)))
        x, y = image.width / width, image.height / height
        box = (left * x, top * y, min((left + w) * x, image.width), min((top + h) * y, image.height))
        cut = convert_to_rgb(image).resize((size, size), Image.Resampling.BILINEAR, box=box)
    pixels = np.asarray(cut)
    return pixels[:, ::-1] if crop.mirrored else pixels


def decode_test_image(path: str, size: int, resize: int) -> np.ndarray:
    """The shorter side resized to ``resize``, then the middle (size, size, 3): torchvision's Resize and CenterCrop."""
    Image = import_pillow()
    with Image.open(path) as image:
        short = min(image.size)
        width, height = (resize if side == short else int(resize * side / short) for side in image.size)
        resized = convert_to_rgb(image).resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return np.asarray(resized.crop((left, top, left + size, top + size)))


def convert_to_rgb(image: Image) -> Image:
    """Any mode as RGB: grey levels three times, 16 bits as 8, transparency dropped."""
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I;16"):
        return import_pillow().fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:  # Pillow warns about the direct way
        return image.convert("RGBA").convert("RGB")
    return image.convert("RGB")


def find_image_error(path: str) -> str | None:
    """Why a file cannot be an image, from its first bytes; nothing if it can."""
    try:
        with import_pillow().open(path):
            return None
    except Exception as error:  # each of Pillow's decoders raises what it likes
        return format_error(error)


def try_decoding(read: Callable[..., np.ndarray], *given: Any) -> np.ndarray | str:
    """The pixels, or why there are none."""
    try:
        return read(*given)
    except Exception as error:  # as above; a file may also vanish
        return format_error(error)


def format_error(error: Exception) -> str:
    """One short line, without the file's name, which stands beside it."""
    if type(error).__name__ == "UnidentifiedImageError":
        return "not an image"
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(text.split())[:80]
