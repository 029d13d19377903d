"""One image file of any kind becomes uint8 pixels of the wanted channels and size."""

import io
import os
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError

from image_data.data_options import INTERPOLATION

# What is meant to be an image by its name. Some of these Pillow cannot read; they are then named, not passed over.
IMAGE_SUFFIXES = frozenset(
    ".jpg .jpeg .jpe .jfif .png .apng .gif .bmp .dib .tif .tiff .webp .ppm .pgm .pbm .pnm .tga .jp2 .avif .heic .heif"
    .split()
)  # fmt: skip
LARGEST_FILE = 2**30  # no photo; reading it might take all memory
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PNG_BIT_DEPTH = 24  # where the header keeps it
MODES = {1: "L", 3: "RGB", 4: "RGBA"}
GREY_MODES = ("1", "L", "LA", "La", "I", "F")
PLAIN_FORMATS = {"PNG": ".png", "JPEG": ".jpg", "WEBP": ".webp"}
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SIDEWAYS = (5, 6, 7, 8)


class UndecodableImage(ValueError):
    """Raised for bytes that are no image to train on; the message is the reason, in a few words."""


@contextmanager
def errors_as_undecodable() -> Iterator[None]:
    """Turn whatever the system or Pillow raises on damaged files, a dozen types, into `UndecodableImage`."""
    with warnings.catch_warnings(), _system_errors_as_undecodable():
        # Of Pillow's many remarks on odd files only the one on decompression bombs matters, and it is a refusal.
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


@contextmanager
def _system_errors_as_undecodable() -> Iterator[None]:
    try:
        yield
    except (UndecodableImage, MemoryError):
        raise  # a machine without memory says nothing about the image
    except UnidentifiedImageError as error:
        raise UndecodableImage("not an image of a known format") from error
    except Exception as error:
        reason = (getattr(error, "strerror", None) or str(error)).strip().split("\n")[0][:200]
        raise UndecodableImage(reason or type(error).__name__) from error


def read_image_file(path: str | Path) -> bytes:
    """Return the bytes of an image file; raise `UndecodableImage` if they cannot be had."""
    with _system_errors_as_undecodable():  # filters of warnings take longer than to read a small file
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise UndecodableImage("not a regular file")  # reading a pipe would wait for ever
        if status.st_size > LARGEST_FILE:
            raise UndecodableImage(f"a file of {status.st_size / 2**30:.1f} GB is no photo")
        if status.st_size == 0:
            raise UndecodableImage("the file is empty")
        with open(path, "rb", buffering=0) as file:
            return file.read()


def decode_image(
    data: bytes, channels: int, resolution: int | None, center_crop: bool, interpolation: str = INTERPOLATION
) -> np.ndarray:
    """Return the image as uint8 [channels, height, width], its shorter side being `resolution` unless that is None.

    One channel is luma, three are RGB, four are RGBA. With `center_crop` the result is a square; without, the longer
    side is kept, for crops to be drawn from it later.
    """
    with errors_as_undecodable():
        image = _upright(_open(data), data, MODES[channels])
        if resolution is not None:
            # Antialiased, whatever the filter.
            image = image.resize(_resized(image.size, resolution), Image.Resampling[interpolation.upper()])
        if center_crop:
            side = min(image.size)
            left, top = (image.width - side) // 2, (image.height - side) // 2
            image = image.crop((left, top, left + side, top + side))
        pixels = np.asarray(image).reshape(image.height, image.width, channels)
        return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def check_image(data: bytes, channels: int, resolution: int) -> tuple[int, int]:
    """Raise if `decode_image` would; return height and width as stored.

    All of the file is read, but of a JPEG only one pixel in 64 is computed, from the same data.
    """
    with errors_as_undecodable():
        image = _open(data)
        size = image.size
        image.draft(image.mode, (1, 1))
        _upright(image, data, MODES[channels])
        _resized(_turned(size, _orientation(image)), resolution)
        return size[::-1]


def is_grey(data: bytes) -> bool:
    """Return whether the file's header says that the image has no colour."""
    with errors_as_undecodable():
        image = _open(data)
        if image.mode == "P":
            return _palette_is_grey(image)
        # Pillow widens a 16-bit PNG of grey and alpha to RGBA; what it reads from tells the two apart.
        widened = image.mode == "RGBA" and any(str(tile.args).startswith("LA") for tile in image.tile)
        return image.mode in GREY_MODES or image.mode.startswith("I;16") or widened


def stored_size(data: bytes) -> tuple[int, int]:
    """Return height and width from the file's header, before the image is turned."""
    with errors_as_undecodable():
        return _open(data).size[::-1]


def upright_size(data: bytes) -> tuple[int, int]:
    """Return height and width of the image when turned as the file says."""
    with errors_as_undecodable():
        image = _open(data)
        return _turned(image.size, _orientation(image))[::-1]


def plain_suffix(data: bytes, channels: int) -> str | None:
    """Return a suffix if every program reads the same upright 8-bit image of these channels from the file as it is."""
    with errors_as_undecodable():
        image = _open(data)
        deep = data.startswith(PNG_SIGNATURE) and data[PNG_BIT_DEPTH] == 16
        odd = deep or image.has_transparency_data or _orientation(image) != 1 or getattr(image, "is_animated", False)
        return PLAIN_FORMATS.get(image.format) if image.mode == MODES[channels] and not odd else None


class Inspected(NamedTuple):
    """The properties of an image file."""

    width: int  # upright, like the height
    height: int
    mode: str  # as it is stored
    kind: str  # JPEG, PNG, ...
    grey: np.ndarray  # uint8 [side, side]: all of it, in small


def inspect_image(data: bytes, side: int, resolution: int | None = None) -> Inspected:
    """Read all of an image, as `decode_image` does, but of a JPEG compute only as many pixels as are looked at.

    It must be possible to bring it to the resolution, if there is one.
    """
    with errors_as_undecodable():
        image = _open(data)
        size, mode, kind = image.size, image.mode, image.format
        image.draft("L", (2 * side, 2 * side))
        grey = _upright(image, data, "L").resize((side, side), Image.Resampling.BICUBIC)
        upright = _turned(size, _orientation(image))
        if resolution is not None:
            _resized(upright, resolution)
        return Inspected(*upright, mode, kind, np.asarray(grey))


def _open(data: bytes) -> ImageFile.ImageFile:
    """Open an image of any kind but PostScript, which is a program: Pillow would have Ghostscript run it."""
    image = Image.open(io.BytesIO(data))
    if image.format == "EPS":
        raise UndecodableImage("PostScript, which is not run")
    return image


def _upright(image: Image.Image, data: bytes, mode: str) -> Image.Image:
    """Load an opened image in this mode, turned as the file says."""
    image.load()
    turn = UPRIGHT.get(_orientation(image))
    image = _in_mode(_in_eight_bits(image, data), mode)
    return image if turn is None else image.transpose(turn)


def _orientation(image: Image.Image) -> int:
    if image.format == "TIFF":  # Pillow itself turns these, and swaps their size as it opens them
        return 1
    # Not ImageOps.exif_transpose: it also rewrites the metadata, and fails when that is damaged but the pixels are not.
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:
        return 1


def _turned(size: tuple[int, int], orientation: int) -> tuple[int, int]:
    return size[::-1] if orientation in SIDEWAYS else size


def _in_eight_bits(image: Image.Image, data: bytes) -> Image.Image:
    """Return the image in mode L, RGB or RGBA, whatever it is stored as."""
    if data.startswith(PNG_SIGNATURE) and data[PNG_BIT_DEPTH] == 16:
        return _sixteen_bit_png(data)
    if image.mode.startswith("I"):  # Pillow's 32-bit mode holds what was stored in 16 bits
        return _grey(np.asarray(image) / 65535, "0..65535")
    if image.mode == "F":
        # Two conventions are in use, 0..1 and Pillow's own 0..255; the brightest pixel tells which.
        values = np.asarray(image)
        return _grey(values if values.max() <= 1 else values / 255, "0..255")
    if image.has_transparency_data:
        return image.convert("RGBA")
    return _in_mode(image, "L" if image.mode in ("1", "L") else "RGB")


def _sixteen_bit_png(data: bytes) -> Image.Image:
    # Pillow drops the low byte of 16-bit colours instead of rounding, torchvision keeps it. Imported here, being slow.
    import torch
    from torchvision.io import decode_png

    stored = decode_png(torch.frombuffer(bytearray(data), dtype=torch.uint8)).numpy()
    pixels = np.rint(stored.astype(np.float64) * (255 / 65535)).astype(np.uint8)
    pixels = pixels[[0, 0, 0, 1]] if len(pixels) == 2 else pixels  # grey and alpha
    return Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))


def _grey(values: np.ndarray, accepted: str) -> Image.Image:
    """Return values in [0, 1] as an image of mode L; raise for others, of which nobody knows what they stand for."""
    if not (values.min() >= 0 and values.max() <= 1):
        raise UndecodableImage(f"grey values outside {accepted}")
    return Image.fromarray(np.rint(values.astype(np.float64) * 255).astype(np.uint8))


def _in_mode(image: Image.Image, mode: str) -> Image.Image:
    if image.mode == "RGBA" and mode != "RGBA":
        # Over white: the colours beneath transparent pixels were never meant to be seen.
        white = Image.new("RGB", image.size, "white")
        white.paste(image, mask=image)
        image = white
    return image if image.mode == mode else image.convert(mode)


def _resized(size: tuple[int, int], resolution: int) -> tuple[int, int]:
    """Return the size that an image gets; raise if it is no size for one."""
    scale = resolution / min(size)
    width, height = (max(resolution, round(side * scale)) for side in size)
    if Image.MAX_IMAGE_PIXELS and width * height > Image.MAX_IMAGE_PIXELS:
        raise UndecodableImage(f"too narrow to be resized: {size[0]}x{size[1]}")
    return width, height


def _palette_is_grey(image: ImageFile.ImageFile) -> bool:
    layout, palette = image.palette.getdata()
    values = np.frombuffer(palette, np.uint8)
    # Colours are interleaved, in any order and perhaps with a fourth byte, or ("RGB;L") one plane after the other.
    colours = values.reshape(3, -1).T if layout.endswith(";L") else values.reshape(-1, len(layout))[:, :3]
    return bool((colours == colours[:, :1]).all())
