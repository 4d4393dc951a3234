"""Lay out faces with captions on one picture."""

from __future__ import annotations

import os
from typing import Any, NamedTuple, Sequence

import numpy as np

SIDE, LINE, GAP, BORDER = 112, 16, 8, 3  # pixels
WHITE, BLACK, GREY = "#ffffff", "#000000", "#e8e8e8"


class Tile(NamedTuple):
    """A face, or a word on a coloured ground, with lines below it."""

    face: np.ndarray | None = None  # (height, width, 3) uint8 in RGB
    lines: Sequence[str] = ()
    word: str = ""  # instead of a face
    ground: str = WHITE  # colour behind the word
    border: str = ""  # colour around it


def draw_sheet(rows: Sequence[Sequence[Tile]], title: Sequence[str] = ()) -> np.ndarray:
    """Draw rows of tiles below the lines of a title.

    Returns
    -------
    (height, width, 3) uint8
        In RGB.
    """
    from PIL import Image, ImageDraw

    font, large = _font(11), _font(14)
    captions = [max((len(tile.lines) for tile in row), default=0) * LINE for row in rows]
    columns = max(len(row) for row in rows)
    head = GAP + len(title) * (LINE + 4) if title else 0
    width = max(
        GAP + columns * (SIDE + GAP), *(2 * GAP + round(large.getlength(line)) for line in title), 0
    )
    height = head + GAP + sum(SIDE + caption + GAP for caption in captions)
    sheet = Image.new("RGB", (width, height), WHITE)
    draw = ImageDraw.Draw(sheet)
    for number, line in enumerate(title):
        draw.text((GAP, GAP + number * (LINE + 4)), line, BLACK, large)
    top = head + GAP
    for row, caption in zip(rows, captions):
        for column, tile in enumerate(row):
            left = GAP + column * (SIDE + GAP)
            if tile.border:
                corners = (left - BORDER, top - BORDER, left + SIDE + 2, top + SIDE + 2)
                draw.rectangle(corners, tile.border)
            if tile.face is not None:
                sheet.paste(_thumbnail(tile.face), (left, top))
            elif tile.word:
                draw.rectangle((left, top, left + SIDE - 1, top + SIDE - 1), tile.ground)
                middle = (left + SIDE // 2, top + SIDE // 2)
                draw.multiline_text(middle, tile.word, BLACK, large, anchor="mm", align="center")
            for number, line in enumerate(tile.lines):
                place = (left, top + SIDE + 3 + number * LINE)
                draw.text(place, _shortened(line, font), BLACK, font)
        top += SIDE + caption + GAP
    return np.asarray(sheet)


def save_sheet(sheet: np.ndarray, path: str) -> None:
    """Write a sheet as .png or .jpg; the file is complete or absent."""
    from dsoftmax.recognition.common.files import AtomicFile
    from dsoftmax.recognition.data.images import encode

    extension = os.path.splitext(path)[1].lower()
    if extension not in (".png", ".jpg", ".jpeg"):
        raise ValueError(f"--plot {path}: a picture is a .png or a .jpg")
    with AtomicFile(path) as file:
        file.write(encode(np.ascontiguousarray(sheet[:, :, ::-1]), extension))


def _font(size: int) -> Any:
    """Return a font that has most alphabets: the one that comes with matplotlib."""
    import matplotlib
    from PIL import ImageFont

    path = os.path.join(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")
    return ImageFont.truetype(path, size)


def _thumbnail(face: np.ndarray) -> Any:
    """Fit a face into a square, on grey."""
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(face))
    factor = SIDE / max(image.size)
    image = image.resize([max(round(side * factor), 1) for side in image.size])
    square = Image.new("RGB", (SIDE, SIDE), GREY)
    square.paste(image, ((SIDE - image.width) // 2, (SIDE - image.height) // 2))
    return square


def _shortened(text: str, font: Any) -> str:
    """Drop the beginning of a text that is too wide for a tile: names differ at their ends."""
    text = text.encode("utf-8", "replace").decode()  # names of files may be no text
    if font.getlength(text) <= SIDE:
        return text
    while text and font.getlength(f"…{text}") > SIDE:
        text = text[1:]
    return f"…{text}"
