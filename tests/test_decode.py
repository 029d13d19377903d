"""image_data/decode.py: image files of every kind, against pixel values worked out by hand."""

import io
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from image_data.decode import UndecodableImage, check_image, decode_image, is_grey, stored_size

RAMP = np.array([[0, 1, 2], [50, 77, 128], [200, 254, 255]], np.uint8)  # 3x3 grey
COLOURS = np.array([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [10, 20, 30]]], np.uint8)  # 2x2 RGB


def encode(image, kind="PNG", **options):
    file = io.BytesIO()
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    image.save(file, kind, **options)
    return file.getvalue()


def png_of_16_bits(pixels, colour_type):
    """A 16-bit PNG of [height, width, samples], which Pillow cannot write in colour."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 16, colour_type, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )


def decode(data, channels, resolution=None, center_crop=False):
    resolution = resolution or min(Image.open(io.BytesIO(data)).size)
    pixels = decode_image(data, channels, resolution, center_crop)
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    assert pixels.shape[0] == channels
    return pixels


def luma(rgb):
    return np.asarray(Image.fromarray(rgb).convert("L"))


def over_white(rgb, alpha):
    alpha = alpha[..., None].astype(float)
    return np.floor((rgb * alpha + 255 * (255 - alpha)) / 255 + 0.5).astype(np.uint8)


def assert_grey(data, expected):
    """The same grey in one channel, in three, and in four with full opacity."""
    np.testing.assert_array_equal(decode(data, 1), expected[None])
    np.testing.assert_array_equal(decode(data, 3), np.stack([expected] * 3))
    np.testing.assert_array_equal(decode(data, 4), np.stack([*[expected] * 3, np.full_like(expected, 255)]))


# Grey


def test_grey():
    assert_grey(encode(RAMP), RAMP)


def test_one_bit():
    bits = np.array([[True, False], [False, False]])
    assert_grey(encode(bits), bits.astype(np.uint8) * 255)


# 129 is 0.502 of 257, 128 is 0.498: rounded, not truncated. 65,280 has high byte 255 but is 254.008.
SIXTEEN_BITS = np.array([[0, 128, 129], [257, 40000, 65279], [65280, 65534, 65535]], np.uint16)
SIXTEEN_IN_EIGHT = np.array([[0, 0, 1], [1, 156, 254], [254, 255, 255]], np.uint8)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_and_rounded(kind):
    assert_grey(encode(SIXTEEN_BITS, kind), SIXTEEN_IN_EIGHT)


def test_sixteen_bits_big_endian():
    image = Image.frombytes("I;16B", (3, 3), SIXTEEN_BITS.astype(">u2").tobytes())
    data = encode(image, "TIFF")
    assert Image.open(io.BytesIO(data)).mode == "I;16B"
    assert_grey(data, SIXTEEN_IN_EIGHT)


def test_sixteen_bits_in_32():
    assert_grey(encode(SIXTEEN_BITS.astype(np.int32), "TIFF"), SIXTEEN_IN_EIGHT)


def test_sixteen_bits_of_a_pgm():
    data = b"P5 3 3 65535\n" + SIXTEEN_BITS.astype(">u2").tobytes()
    assert Image.open(io.BytesIO(data)).mode == "I"
    assert_grey(data, SIXTEEN_IN_EIGHT)


@pytest.mark.parametrize("scale", [1, 255])
def test_floating_point_in_both_conventions(scale):
    values = np.array([[0, 0.25], [0.5, 1]], np.float32) * scale
    assert_grey(encode(values, "TIFF"), np.array([[0, 64], [128, 255]], np.uint8))


@pytest.mark.parametrize("value", [-1.0, 256.0, float("nan"), float("inf")])
def test_floating_point_of_unknown_meaning_is_refused(value):
    with pytest.raises(UndecodableImage, match="grey values outside 0..255"):
        decode(encode(np.array([[0, value]], np.float32), "TIFF"), 1)


@pytest.mark.parametrize("value", [-1, 65536])
def test_integers_of_unknown_meaning_are_refused(value):
    with pytest.raises(UndecodableImage, match="grey values outside 0..65535"):
        decode(encode(np.array([[0, value]], np.int32), "TIFF"), 1)


# Colour


def test_colour():
    data = encode(COLOURS)
    np.testing.assert_array_equal(decode(data, 3), COLOURS.transpose(2, 0, 1))
    # ITU-R 601-2: 0.299 R + 0.587 G + 0.114 B
    np.testing.assert_array_equal(decode(data, 1), [[[76, 150], [29, 18]]])
    assert (decode(data, 4)[3] == 255).all()


@pytest.mark.parametrize(("colour_type", "samples"), [(0, 1), (2, 3), (4, 2), (6, 4)])
def test_sixteen_bit_png_of_every_colour_type(colour_type, samples):
    pixels = np.random.default_rng(0).integers(0, 65536, (5, 7, samples), dtype=np.uint16)
    expected = np.floor(pixels / 257 + 0.5).astype(np.uint8)
    rgb = np.repeat(expected[..., :1], 3, axis=2) if samples < 3 else expected[..., :3]
    alpha = expected[..., -1] if samples in (2, 4) else np.full((5, 7), 255, np.uint8)

    data = png_of_16_bits(pixels, colour_type)

    np.testing.assert_array_equal(decode(data, 4), np.dstack([rgb, alpha]).transpose(2, 0, 1))
    np.testing.assert_array_equal(decode(data, 3), over_white(rgb, alpha).transpose(2, 0, 1))
    np.testing.assert_array_equal(decode(data, 1)[0], luma(over_white(rgb, alpha)))


def test_palette():
    image = Image.fromarray(np.array([[0, 1], [2, 3]], np.uint8)).convert("P")
    image.putpalette(COLOURS.tobytes())
    np.testing.assert_array_equal(decode(encode(image), 3), COLOURS.transpose(2, 0, 1))


def test_palette_with_transparency():
    image = Image.fromarray(np.array([[0, 1], [2, 3]], np.uint8)).convert("P")
    image.putpalette(COLOURS.tobytes())
    alpha = np.array([[255, 0], [128, 255]], np.uint8)
    data = encode(image, transparency=alpha.tobytes())
    np.testing.assert_array_equal(decode(data, 4), np.dstack([COLOURS, alpha]).transpose(2, 0, 1))
    np.testing.assert_array_equal(decode(data, 3), over_white(COLOURS, alpha).transpose(2, 0, 1))


def test_a_transparent_colour():
    data = encode(COLOURS, transparency=(255, 0, 0))
    np.testing.assert_array_equal(decode(data, 3)[:, 0, 0], [255, 255, 255])
    np.testing.assert_array_equal(decode(data, 3)[:, 0, 1], [0, 255, 0])


def test_colours_beneath_transparency_do_not_show():
    generator = np.random.default_rng(1)
    rgb, alpha = generator.integers(0, 256, (9, 9, 3), np.uint8), generator.integers(0, 256, (9, 9), np.uint8)
    alpha[0] = 0
    data = encode(np.dstack([rgb, alpha]))
    np.testing.assert_array_equal(decode(data, 3), over_white(rgb, alpha).transpose(2, 0, 1))
    np.testing.assert_array_equal(decode(data, 1)[0], luma(over_white(rgb, alpha)))
    np.testing.assert_array_equal(decode(data, 4), np.dstack([rgb, alpha]).transpose(2, 0, 1))
    assert (decode(data, 3)[:, 0] == 255).all()


def test_grey_with_transparency():
    alpha = np.array([[0, 128, 255]] * 3, np.uint8)
    data = encode(np.dstack([RAMP, alpha]))
    assert Image.open(io.BytesIO(data)).mode == "LA"
    rgb = np.dstack([RAMP] * 3)
    np.testing.assert_array_equal(decode(data, 1)[0], over_white(rgb, alpha)[..., 0])
    np.testing.assert_array_equal(decode(data, 4), np.dstack([rgb, alpha]).transpose(2, 0, 1))


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_cmyk(kind):
    options = {"quality": 100} if kind == "JPEG" else {}
    data = encode(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), kind, **options)  # red
    assert Image.open(io.BytesIO(data)).mode == "CMYK"
    red = decode(data, 3)[:, 8, 8].astype(int)
    assert red[0] > 250
    assert red[1:].max() < 5
    assert abs(int(decode(data, 1)[0, 8, 8]) - 76) < 3


def test_an_adobe_jpeg_is_stored_inverted_and_comes_out_right():
    data = encode(Image.new("CMYK", (16, 16), (0, 0, 0, 0)), "JPEG", quality=100)  # white
    assert b"Adobe" in data
    assert decode(data, 3).min() > 250


# Orientation. In EXIF, orientation n names the sides of the upright image where the stored first row and column lie.
STORED = {
    1: lambda upright: upright,
    2: lambda upright: upright[:, ::-1],
    3: lambda upright: upright[::-1, ::-1],
    4: lambda upright: upright[::-1],
    5: lambda upright: upright.T,
    6: lambda upright: upright.T[::-1],
    7: lambda upright: upright.T[::-1, ::-1],
    8: lambda upright: upright.T[:, ::-1],
}


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", STORED)
def test_exif_orientation(orientation, kind):
    upright = np.arange(24, dtype=np.uint8).reshape(4, 6) * 10
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encode(np.ascontiguousarray(STORED[orientation](upright)), kind, exif=exif, **options)
    np.testing.assert_array_equal(decode(data, 1, resolution=4)[0], upright)


def test_exif_orientation_of_a_jpeg():
    upright = np.zeros((32, 64), np.uint8)
    upright[:16, :16] = 255
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode(np.ascontiguousarray(STORED[6](upright)), "JPEG", exif=exif, quality=100)
    assert np.abs(decode(data, 1, resolution=32)[0].astype(int) - upright).max() < 5


def test_damaged_exif_does_not_cost_the_image():
    exif = b"Exif\0\0MM\0\x99" + bytes(20)
    data = encode(COLOURS, exif=exif)
    with pytest.raises(SyntaxError):
        Image.open(io.BytesIO(data)).getexif()
    np.testing.assert_array_equal(decode(data, 3), COLOURS.transpose(2, 0, 1))


# Size


def test_an_image_of_the_right_size_passes_bit_exact():
    pixels = np.random.default_rng(2).integers(0, 256, (32, 32, 3), np.uint8)
    for center_crop in (False, True):
        np.testing.assert_array_equal(decode(encode(pixels), 3, 32, center_crop), pixels.transpose(2, 0, 1))


@pytest.mark.parametrize(("size", "resized"), [((50, 40), (20, 16)), ((30, 70), (16, 37)), ((5, 4), (20, 16))])
def test_the_shorter_side_becomes_the_resolution(size, resized):
    pixels = np.random.default_rng(3).integers(0, 256, (size[1], size[0], 3), np.uint8)
    expected = np.asarray(Image.fromarray(pixels).resize(resized, Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(decode(encode(pixels), 3, 16), expected.transpose(2, 0, 1))
    left, top = (resized[0] - 16) // 2, (resized[1] - 16) // 2
    cropped = expected[top : top + 16, left : left + 16]
    np.testing.assert_array_equal(decode(encode(pixels), 3, 16, center_crop=True), cropped.transpose(2, 0, 1))


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_resizing_is_antialiased(interpolation):
    checkerboard = (np.indices((64, 64)).sum(0) % 2 * 255).astype(np.uint8)
    assert np.abs(decode_image(encode(checkerboard), 1, 8, False, interpolation).astype(int) - 127.5).max() < 10


def test_the_filter_can_be_that_of_the_diffusers_example():
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.functional import resize

    pixels = np.random.default_rng(4).integers(0, 256, (40, 50, 3), np.uint8)
    expected = np.asarray(resize(Image.fromarray(pixels), 16, InterpolationMode.BILINEAR))
    np.testing.assert_array_equal(decode_image(encode(pixels), 3, 16, False, "bilinear"), expected.transpose(2, 0, 1))
    assert (decode(encode(pixels), 3, 16) != expected.transpose(2, 0, 1)).any()


def test_resizing_does_not_bleed_transparent_colours():
    pixels = np.zeros((8, 8, 4), np.uint8)
    pixels[:, :4] = (10, 20, 30, 255)
    pixels[:, 4:] = (255, 255, 255, 0)
    resized = decode(encode(pixels), 4, 4)
    visible = resized[3] > 128
    assert np.abs(resized[:3, visible].astype(int).T - (10, 20, 30)).max() <= 1


# Animations


@pytest.mark.parametrize(("kind", "options"), [("GIF", {}), ("PNG", {}), ("WEBP", {"lossless": True})])
def test_the_first_frame_of_an_animation(kind, options):
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    data = encode(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert Image.open(io.BytesIO(data)).n_frames == 2
    np.testing.assert_array_equal(decode(data, 3)[:, 0, 0], [255, 0, 0])


# Refusals

NOISE = np.random.default_rng(4).integers(0, 256, (64, 64, 3), np.uint8)
UNDECODABLE = {
    "empty": b"",
    "text": b"not an image at all",
    "truncated png": encode(NOISE)[:2000],
    "truncated jpeg": encode(NOISE, "JPEG")[:2000],
    "truncated gif": encode(NOISE, "GIF")[:2000],
    "truncated 16-bit png": png_of_16_bits(NOISE.astype(np.uint16), 2)[:2000],
    "png signature": b"\x89PNG\r\n\x1a\n",
    "damaged png": encode(NOISE)[:100] + b"\xff" * 100 + encode(NOISE)[200:],
}


@pytest.mark.parametrize("name", UNDECODABLE)
def test_undecodable(name):
    with pytest.raises(UndecodableImage) as caught:
        decode_image(UNDECODABLE[name], 3, 32, True)
    reason = str(caught.value)
    assert 0 < len(reason) <= 200
    assert "\n" not in reason
    assert "0x" not in reason  # no addresses, which differ from run to run


def test_every_truncation_is_one_kind_of_error():
    for kind in ("PNG", "JPEG", "BMP", "TIFF", "WEBP", "GIF"):
        data = encode(NOISE[:16, :16], kind)
        for length in range(0, len(data) - 8, 7):
            try:
                decode_image(data[:length], 3, 16, True)
            except UndecodableImage:
                continue


def outcome(function):
    try:
        return function()
    except UndecodableImage as error:
        return str(error)


def damaged_photos():
    """JPEGs of several kinds and other files: cut off, overwritten somewhere, or with another header."""
    random, photo = np.random.default_rng(5), Image.fromarray(NOISE).resize((90, 70), Image.Resampling.BICUBIC)
    kinds = [("JPEG", {}), ("JPEG", {"progressive": True}), ("JPEG", {"subsampling": 0}), ("MPO", {"save_all": True})]
    kinds += [("JPEG", {"restart_marker_rows": 1}), ("PNG", {}), ("WEBP", {}), ("GIF", {})]
    files = [encode(photo, kind, **options) for kind, options in kinds]
    files += [encode(photo.convert("CMYK"), "JPEG"), encode(photo.convert("L"), "JPEG", progressive=True)]
    yield from files
    for data in files:
        for _ in range(10):
            yield data[: random.integers(len(data))]
            for end in (300, len(data)):
                changed, start = bytearray(data), random.integers(end)
                changed[start : start + random.integers(1, 9)] = random.bytes(1)
                yield bytes(changed)


def test_a_check_finds_what_decoding_would():
    failed, photos = 0, [*damaged_photos(), *UNDECODABLE.values(), encode(np.zeros((20000, 1), np.uint8))]
    for data in photos:
        decoded = outcome(lambda data=data: decode_image(data, 3, 32, False))
        checked = outcome(lambda data=data: check_image(data, 3, 32))
        assert checked == (decoded if isinstance(decoded, str) else stored_size(data))
        failed += isinstance(decoded, str)
    assert 50 < failed < len(photos) - 50


@pytest.mark.parametrize("limit", [63 * 64, 31 * 64])  # Pillow warns above its limit, and refuses above twice that
def test_decompression_bombs_are_refused(monkeypatch, limit):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    for function in (lambda data: decode_image(data, 3, 8, True), is_grey, stored_size):
        with pytest.raises(UndecodableImage, match="decompression bomb"):
            function(encode(NOISE))


def test_a_sliver_is_refused_before_it_fills_the_memory():
    with pytest.raises(UndecodableImage, match="too narrow to be resized: 1x20000"):
        decode(encode(np.zeros((20000, 1), np.uint8)), 3, 1024)


def test_nothing_is_warned_about():
    image = Image.fromarray(RAMP % 2).convert("P")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decode(encode(image, transparency=b"\0\xff"), 3)  # Pillow has something to say on these


def test_a_machine_without_memory_is_not_a_bad_image(monkeypatch):
    def no_memory(*_):
        raise MemoryError

    monkeypatch.setattr(Image.Image, "resize", no_memory)
    with pytest.raises(MemoryError):
        decode(encode(NOISE), 3, 32)


# Headers


@pytest.mark.parametrize(
    ("grey", "data"),
    [
        (True, encode(RAMP)),
        (True, encode(RAMP > 100)),
        (True, encode(np.dstack([RAMP, RAMP]))),
        (True, encode(RAMP, "JPEG")),
        (True, encode(SIXTEEN_BITS)),
        (True, encode(SIXTEEN_BITS.astype(np.int32), "TIFF")),
        (True, encode(RAMP.astype(np.float32), "TIFF")),
        (True, png_of_16_bits(np.dstack([SIXTEEN_BITS] * 2), 4)),
        (False, png_of_16_bits(np.dstack([SIXTEEN_BITS] * 4), 6)),
        (False, encode(COLOURS)),
        (False, encode(COLOURS, "JPEG")),
        (False, encode(np.dstack([COLOURS, COLOURS[..., 0]]))),
        (False, encode(Image.new("CMYK", (2, 2)), "JPEG")),
    ],
)
def test_is_grey(grey, data):
    assert is_grey(data) is grey


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "GIF"])
def test_is_grey_looks_at_palettes(kind):
    image = Image.fromarray(np.array([[0, 1, 2, 1]], np.uint8)).convert("P")
    image.putpalette([0, 0, 0, 120, 120, 120, 7, 7, 7])
    assert is_grey(encode(image, kind))
    image.putpalette([0, 0, 0, 120, 120, 121, 7, 7, 7])
    assert not is_grey(encode(image, kind))


def test_headers_are_enough():
    data = encode(NOISE[:, :32])[:60]
    assert not is_grey(data)
    assert stored_size(data) == (64, 32)
    assert stored_size(encode(NOISE[:32], "JPEG")[:700]) == (32, 64)


def test_headers_of_no_image():
    for function in (is_grey, stored_size):
        with pytest.raises(UndecodableImage, match="known format"):
            function(b"nothing")
