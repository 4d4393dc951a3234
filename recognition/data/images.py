"""Single images: decoding, encoding, fitting to a size, and the ArcFace alignment."""

from __future__ import annotations

import cv2
import numpy as np

JPEG_QUALITY = 95
_JPEG_START, _JPEG_END = b"\xff\xd8", b"\xff\xd9"

# Left eye, right eye, nose tip, left and right mouth corner, (x, y) on 112×112.
ARCFACE_TEMPLATE = np.array(
    [
        [38.2946, 51.6963],
        [73.5318, 51.5014],
        [56.0252, 71.7366],
        [41.5493, 92.3655],
        [70.7299, 92.2041],
    ]
)


class ImageError(ValueError):
    """Bytes that are no whole image."""


def decode(encoded: np.ndarray) -> np.ndarray:
    """Decode a JPEG, PNG or any format OpenCV knows.

    Parameters
    ----------
    encoded : (n,) uint8

    Returns
    -------
    (height, width, 3) uint8
        Blue, green, red: OpenCV's order.
    """
    # OpenCV fills the missing rows of a truncated JPEG with grey and calls it a success.
    if encoded[:2].tobytes() == _JPEG_START and _JPEG_END not in encoded[-64:].tobytes():
        raise ImageError("the JPEG has no end marker: it is cut off")
    image = cv2.imdecode(encoded, cv2.IMREAD_COLOR) if len(encoded) else None
    if image is None:
        raise ImageError(f"{len(encoded)} bytes are no image OpenCV can decode")
    return image


def encode(image: np.ndarray, extension: str = ".jpg", quality: int = JPEG_QUALITY) -> bytes:
    """Encode a BGR image, (height, width, 3) uint8, as JPEG or PNG."""
    options = [cv2.IMWRITE_JPEG_QUALITY, quality] if extension in (".jpg", ".jpeg") else []
    done, encoded = cv2.imencode(extension, image, options)
    if not done:
        raise ImageError(f"OpenCV can't encode {image.shape} {image.dtype} as {extension}")
    return encoded.tobytes()


def fit(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize so that the image just covers height × width, then crop its centre."""
    rows, columns = image.shape[:2]
    if (rows, columns) == (height, width):
        return image
    factor = max(height / rows, width / columns)
    rows, columns = max(round(rows * factor), height), max(round(columns * factor), width)
    interpolation = cv2.INTER_AREA if factor < 1 else cv2.INTER_CUBIC
    image = cv2.resize(image, (columns, rows), interpolation=interpolation)
    top, left = (rows - height) // 2, (columns - width) // 2
    return image[top : top + height, left : left + width]


def align(image: np.ndarray, landmarks: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Warp a face onto the ArcFace template by the least-squares similarity transform.

    Parameters
    ----------
    image : (rows, columns, 3) uint8
    landmarks : (5, 2)
        Eyes, nose tip, mouth corners as (x, y), in the template's order.
    size : (int, int)
        Height and width of the result. The template is scaled to the height, and its centre kept
        where the width is another (112×96 is the template shifted by −8, as in insightface).

    Returns
    -------
    (height, width, 3) uint8
        Black where the source has no pixel.
    """
    height, width = size
    target = ARCFACE_TEMPLATE * (height / 112) + [(width - height) / 2, 0]
    transform = similarity_transform(np.asarray(landmarks, float).reshape(5, 2), target)
    return cv2.warpAffine(image, transform, (width, height), borderValue=0)


def similarity_transform(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Find the rotation, scale and shift that bring `source` nearest to `target`.

    Parameters
    ----------
    source, target : (n, 2)

    Returns
    -------
    (2, 3) float64
        The matrix of ``cv2.warpAffine``.
    """
    # A similarity is multiplication by one complex number: least squares has a closed form.
    source, target = source @ [1, 1j], target @ [1, 1j]
    centred = source - source.mean()
    spread = np.vdot(centred, centred).real
    if spread < 1e-12:
        raise ImageError("the five landmarks are one point")
    turn = np.vdot(centred, target - target.mean()) / spread
    shift = target.mean() - turn * source.mean()
    return np.array([[turn.real, -turn.imag, shift.real], [turn.imag, turn.real, shift.imag]])
