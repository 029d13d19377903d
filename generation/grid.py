"""Images side by side, for people to look at."""

import torch
from PIL import Image, ImageDraw, ImageFont

SMALLEST_TILE = 48
CAPTION_HEIGHT = 22


def image_grid(images: torch.Tensor, columns: int, smallest_tile: int = SMALLEST_TILE) -> Image.Image:
    """uint8 images [n, channels, height, width] as one picture; small ones are enlarged by a whole factor."""
    from torchvision.utils import make_grid  # two seconds to import, needed only where a grid is drawn

    factor = max(1, -(-smallest_tile // images.shape[-1]))
    images = images.repeat_interleave(factor, dim=2).repeat_interleave(factor, dim=3)
    grid = make_grid(images, nrow=columns, padding=2, pad_value=255)
    return Image.fromarray(grid.permute(1, 2, 0).numpy())


def side_by_side(pictures: dict[str, Image.Image]) -> Image.Image:
    """Pictures in a row, each under its caption."""
    gap, font = 12, ImageFont.load_default(14)
    widths = [max(picture.width, int(font.getlength(caption)) + 4) for caption, picture in pictures.items()]
    width = sum(widths) + gap * (len(pictures) - 1)
    height = CAPTION_HEIGHT + max(picture.height for picture in pictures.values())
    modes = {picture.mode for picture in pictures.values()}
    row = Image.new("RGBA" if "RGBA" in modes else "RGB", (width, height), "white")
    draw, left = ImageDraw.Draw(row), 0
    for (caption, picture), column in zip(pictures.items(), widths, strict=True):
        draw.text((left + 2, 3), caption, fill="black", font=font)
        row.paste(picture, (left, CAPTION_HEIGHT))
        left += column + gap
    return row
