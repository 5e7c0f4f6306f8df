"""A sheet of small pictures, each with its most probable classes below it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torchvision.transforms.v2.functional import to_pil_image

from polynl.predict.drawing import FONT
from polynl.predict.guesses import Guess

SIDE, MARGIN, LINE, LINES = 190, 10, 19, 3
INK, PAPER, BAR = "#222222", "#FFFFFF", "#9CCBEB"


@dataclass(frozen=True)
class Tile:
    """A picture with its classes."""

    title: str
    picture: Image.Image
    guesses: Sequence[Guess]

    @classmethod
    def of(cls, title: str, image: Tensor, guesses: Sequence[Guess]) -> Tile:
        """A tile of a uint8 image (3, h, w)."""
        picture = to_pil_image(image)
        scale = SIDE / max(picture.size)
        width, height = (max(1, round(side * scale)) for side in picture.size)
        return cls(title, picture.resize((width, height)), guesses[:LINES])


def contact_sheet(tiles: Sequence[Tile]) -> Image.Image:
    """All tiles in a grid that is about as wide as high."""
    columns = math.ceil(math.sqrt(len(tiles)))
    width, height = SIDE + MARGIN, SIDE + (LINES + 1) * LINE + MARGIN
    rows = math.ceil(len(tiles) / columns)
    sheet = Image.new("RGB", (columns * width + MARGIN, rows * height + MARGIN), PAPER)
    pen, font = ImageDraw.Draw(sheet), ImageFont.truetype(str(FONT), 12)
    for number, tile in enumerate(tiles):
        row, column = divmod(number, columns)
        _draw(sheet, pen, font, tile, column * width + MARGIN, row * height + MARGIN)
    return sheet


def _draw(
    sheet: Image.Image,
    pen: ImageDraw.ImageDraw,
    font: ImageFont.FreeTypeFont,
    tile: Tile,
    left: int,
    top: int,
) -> None:
    """The title, the picture, and a bar with each class: as long as it is probable."""
    pen.text((left, top), _fitted(tile.title, font, SIDE), INK, font)
    picture = tile.picture
    place = left + (SIDE - picture.width) // 2, top + LINE + (SIDE - picture.height) // 2
    sheet.paste(picture, place)
    for number, guess in enumerate(tile.guesses):
        line = top + LINE + SIDE + number * LINE + 2
        pen.rectangle((left, line, left + round((SIDE - 1) * guess.probability), line + LINE - 3), BAR)
        percent = f"{100 * guess.probability:.0f}%"
        room = SIDE - 8 - round(font.getlength(percent))
        pen.text((left + 3, line + 1), _fitted(guess.name, font, room - 6), INK, font)
        pen.text((left + room + 5, line + 1), percent, INK, font)


def _fitted(text: str, font: ImageFont.FreeTypeFont, room: float) -> str:
    """The text, cut off where it is too long; undrawable bytes of file names become question marks."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    if font.getlength(text) <= room:
        return text
    while text and font.getlength(f"{text}…") > room:
        text = text[:-1]
    return f"{text}…"
