"""Training augmentation as insightface's: mirror, colour jitter, JPEG recompression, cut-out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import numpy as np

from dsoftmax.recognition.common.preflight import opencv
from dsoftmax.recognition.data.images import decode, encode

# Uniform numbers per image, whatever is switched on: one choice never changes the outcome of
# another, and the numbers of an image depend on its position alone.
DRAWS = 12
(
    MIRROR,
    RECOMPRESS,
    QUALITY,
    BRIGHTNESS,
    CONTRAST,
    SATURATION,
    CUT,
    CUT_ROW,
    CUT_COLUMN,
) = range(9)

JITTER = 0.125
LOWEST_QUALITY, HIGHEST_QUALITY = 2, 20
CUT_GREY = 128
LUMA = (0.114, 0.587, 0.299)  # of blue, green, red


@dataclass(frozen=True)
class Augmentation:
    """Augments training images by the following steps, in this order.

    Parameters
    ----------
    mirror : bool
        Flip left and right, with probability ½ (``data_rand_mirror``).
    color : {0, 1, 2}
        1: jitter brightness, contrast and saturation by up to ±12.5 %. 2: before that, with
        probability ½, recompress as a JPEG of quality 2 to 20 (``data_color``).
    cutoff : int
        Side in pixels of a square that is set to 128, with probability ½ (``data_cutoff``);
        0 for none. Its centre lies anywhere in the image, so a part of it may fall outside.
    """

    mirror: bool = True
    color: int = 0
    cutoff: int = 0

    def __post_init__(self):
        if self.color not in (0, 1, 2):
            raise ValueError(f"color must be 0, 1 or 2, not {self.color!r}")
        if self.cutoff < 0:
            raise ValueError(f"cutoff is a number of pixels, 0 or more, not {self.cutoff!r}")

    def __call__(self, image: np.ndarray, draws: Sequence[float]) -> np.ndarray:
        """Augment one image.

        Parameters
        ----------
        image : (height, width, 3) uint8
            In BGR. It may be changed.
        draws : sequence of DRAWS floats
            Uniform in [0, 1).

        Returns
        -------
        (height, width, 3) uint8
        """
        if self.mirror and draws[MIRROR] < 0.5:
            image = opencv().flip(image, 1)
        if self.color > 1 and draws[RECOMPRESS] < 0.5:
            image = recompress(image, draws[QUALITY])
        if self.color > 0:
            image = jitter_color(image, draws[BRIGHTNESS], draws[CONTRAST], draws[SATURATION])
        if self.cutoff and draws[CUT] < 0.5:
            image = cut_out(image, self.cutoff, draws[CUT_ROW], draws[CUT_COLUMN])
        return image


def recompress(image: np.ndarray, draw: float) -> np.ndarray:
    """Pass an image through a JPEG of low quality."""
    quality = LOWEST_QUALITY + int(draw * (HIGHEST_QUALITY - LOWEST_QUALITY + 1))
    return decode(np.frombuffer(encode(image, quality=quality), np.uint8))


def jitter_color(
    image: np.ndarray, brightness: float, contrast: float, saturation: float
) -> np.ndarray:
    """Change brightness, contrast and saturation, each by a factor of 1 ± JITTER.

    With their factors b, c, s, a colour x is scaled (b x), moved from the image's mean grey L
    (c x + (1 - c) L), and moved from its grey (s x + (1 - s) luma(x)). Saturation keeps greys
    and mean as they are, so the order of the three makes no difference, and together they are one
    affine map, b c (s x + (1 - s) luma(x)) + b (1 - c) L: one pass over the image, rounded and
    clipped once.

    Parameters
    ----------
    image : (height, width, 3) uint8
    brightness, contrast, saturation : float
        Uniform in [0, 1): ½ changes nothing.
    """
    cv2 = opencv()
    b, c, s = (1 + JITTER * (2 * draw - 1) for draw in (brightness, contrast, saturation))
    means = cv2.mean(image)
    shift = b * (1 - c) * sum(weight * mean for weight, mean in zip(LUMA, means))
    kept, (blue, green, red) = b * c * s, (b * c * (1 - s) * weight for weight in LUMA)
    matrix = [
        [kept + blue, green, red, shift],
        [blue, kept + green, red, shift],
        [blue, green, kept + red, shift],
    ]
    return cv2.transform(image, np.array(matrix))


def cut_out(image: np.ndarray, side: int, row: float, column: float) -> np.ndarray:
    """Set a square of `side` pixels to grey, in place; `row`, `column` place its centre."""
    height, width = image.shape[:2]
    top, left = int(row * height) - side // 2, int(column * width) - side // 2
    image[max(top, 0) : max(top + side, 0), max(left, 0) : max(left + side, 0)] = CUT_GREY
    return image
