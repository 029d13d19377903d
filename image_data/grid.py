"""Images side by side, for people to look at."""

import textwrap
from collections.abc import Sequence

import torch
from PIL import Image, ImageDraw, ImageFont

SMALLEST_TILE = 48
CAPTION_HEIGHT = 22
LONGEST_LINE = 24  # characters of a row's name


def image_grid(images: torch.Tensor, columns: int, smallest_tile: int = SMALLEST_TILE) -> Image.Image:
    """Draw uint8 images [n, channels, height, width] as one picture; small ones are enlarged by a whole factor."""
    from torchvision.utils import make_grid  # two seconds to import, needed only where a grid is drawn

    factor = max(1, -(-smallest_tile // images.shape[-1]))
    images = images.repeat_interleave(factor, dim=2).repeat_interleave(factor, dim=3)
    grid = make_grid(images, nrow=columns, padding=2, pad_value=255)
    return Image.fromarray(grid.permute(1, 2, 0).numpy())


def side_by_side(pictures: dict[str, Image.Image], rows: Sequence[str] = ()) -> Image.Image:
    """Draw pictures in a row, each under its caption; `rows` are the names of the rows that all of them have."""
    gap, font = 12, ImageFont.load_default(14)
    height = max(picture.height for picture in pictures.values())
    if rows:
        pictures = {"": names_of_rows(rows, height)} | pictures
    widths = [max(picture.width, int(font.getlength(caption)) + 4) for caption, picture in pictures.items()]
    width = sum(widths) + gap * (len(pictures) - 1)
    modes = {picture.mode for picture in pictures.values()}
    row = Image.new("RGBA" if "RGBA" in modes else "RGB", (width, CAPTION_HEIGHT + height), "white")
    draw, left = ImageDraw.Draw(row), 0
    for (caption, picture), column in zip(pictures.items(), widths, strict=True):
        draw.text((left + 2, 3), caption, fill="black", font=font)
        row.paste(picture, (left, CAPTION_HEIGHT))
        left += column + gap
    return row


def beside_names(picture: Image.Image, rows: Sequence[str]) -> Image.Image:
    """Add the names of its rows, if there are any, at the left of a grid."""
    if not rows:
        return picture
    names = names_of_rows(rows, picture.height)
    both = Image.new(picture.mode, (names.width + picture.width, picture.height), "white")
    both.paste(names, (0, 0))
    both.paste(picture, (names.width, 0))
    return both


def names_of_rows(names: Sequence[str], height: int) -> Image.Image:
    """Draw the names of as many rows, each on one or more lines, in a column of this height."""
    lines = [textwrap.wrap(name, LONGEST_LINE) for name in names]
    font = ImageFont.load_default(14)
    width = max(font.getlength(line) for several in lines for line in several)
    column = Image.new("RGB", (round(width) + 8, height), "white")
    draw = ImageDraw.Draw(column)
    for number, several in enumerate(lines):
        middle = (number + 0.5) * height / len(names)
        draw.multiline_text((4, middle), "\n".join(several), fill="black", font=font, anchor="lm")
    return column
