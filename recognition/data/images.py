"""Read, decode, encode, fit and align single images."""

from __future__ import annotations

import io
import os
import re
import struct
from typing import Callable, NamedTuple

import numpy as np

from dsoftmax.recognition.common.cli import some_of
from dsoftmax.recognition.common.preflight import opencv

JPEG_QUALITY = 95
FEW = 3  # files that a summary names
MOST_PIXELS = 1 << 26  # per image: a few bytes can announce more than fit into memory
OTHER_FORMATS = ("BMP", "PPM", "TIFF", "WEBP")  # Pillow's names
_JPEG_START, _JPEG_END = b"\xff\xd8", b"\xff\xd9"
_JPEG_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # markers followed by a size
_JPEG_BARE = {0x00, 0x01, *range(0xD0, 0xD9)}  # markers without a segment
_JPEG_SCAN = {0xD9, 0xDA}  # end, or beginning of the pixels: no size follows
_JPEG_BETWEEN_SCANS = {0xC4, 0xDA, 0xDB, 0xDC, 0xDD, 0xFE, *range(0xE0, 0xF0)}
_JPEG_NEXT_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]", re.DOTALL)  # pixels have the others
_PNG_START = b"\x89PNG\r\n\x1a\n"

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


FindLandmarks = Callable[[np.ndarray], np.ndarray]
"""Maps a photograph, (height, width, 3) uint8 in BGR, to the landmarks (5, 2) of its face."""


class ImageError(ValueError):
    """The bytes are no whole image."""


class NoFaceError(ImageError):
    """No face was found in a photograph."""


def load_rgb(
    source: str | os.PathLike | np.ndarray,
    size: tuple[int, int] | None = None,
    landmarks: np.ndarray | None = None,
) -> np.ndarray:
    """Load an image as networks take it: of the wanted size, in RGB.

    Parameters
    ----------
    source : path, or (n,) uint8
        An image file, or its content.
    size : (int, int), optional
        Height and width of the result; by default those of the image.
    landmarks : (5, 2), optional
        Align the face to the ArcFace template instead of fitting the image to `size`.

    Returns
    -------
    (height, width, 3) uint8
        Red, green, blue.

    Raises
    ------
    ImageError
        If the content is no whole image.
    OSError
        If the file can't be read.
    """
    encoded = source if isinstance(source, np.ndarray) else np.fromfile(source, np.uint8)
    image = decode(encoded)
    return face_of(image, size or image.shape[:2], landmarks).image[:, :, ::-1]


class Face(NamedTuple):
    """An image of the size that a network takes."""

    image: np.ndarray  # (height, width, 3) uint8
    fitted_from: tuple[int, int] | None = None  # its own size, if it had another and no landmarks
    landmarks: np.ndarray | None = None  # (5, 2), those it was aligned by


def face_of(
    image: np.ndarray,
    size: tuple[int, int],
    landmarks: np.ndarray | None = None,
    find: FindLandmarks | None = None,
) -> Face:
    """Bring an image to the size that a network takes: aligned by its landmarks, or fitted.

    Every image that is packed or embedded passes through here.

    Parameters
    ----------
    image : (rows, columns, 3) uint8
        Of an aligned face, or of anything if there are landmarks.
    size : (int, int)
        Height and width of the result.
    landmarks : (5, 2), optional
        See `align`.
    find : callable, optional
        Returns the landmarks of an image that comes without and has another size; a `FaceFinder`.
    """
    given = image.shape[:2]
    if landmarks is None and find is not None and given != tuple(size):
        landmarks = find(image)
    if landmarks is not None:
        return Face(align(image, landmarks, size), landmarks=landmarks)
    if given == tuple(size):
        return Face(image)
    return Face(fit(image, *size), fitted_from=given)


def fitted_note(name: str, given: tuple[int, int]) -> str:
    """Name an image that had another size and no landmarks, for `fitted_warning`."""
    return "{} ({}x{})".format(name, *given)


def fitted_warning(fitted: list[str], size: tuple[int, int], advice: str) -> str:
    """Warn of photographs that were cropped in the middle, because nothing says where the face is.

    Parameters
    ----------
    fitted : list of str
        What `fitted_note` returns; the first few of them are named.
    size : (int, int)
        Height and width of a face.
    advice : str
        What the user can do, as "give five landmarks each by --list".
    """
    return (
        f"Warning: {len(fitted)} images were not {size[0]}x{size[1]} and came without landmarks: "
        f"they were resized and cropped in the middle:\n{some_of(fitted, FEW)}\nA face recogniser "
        f"wants aligned faces, not whole photographs: {advice}."
    )


def decode(encoded: np.ndarray) -> np.ndarray:
    """Decode a JPEG, a PNG or one of `OTHER_FORMATS`, whose headers hold the size.

    Parameters
    ----------
    encoded : (n,) uint8

    Returns
    -------
    (height, width, 3) uint8
        Blue, green, red: OpenCV's order.

    Raises
    ------
    ImageError
        If it is no whole image, or has more than `MOST_PIXELS`; these are never allocated.
    """
    cv2 = opencv()
    # OpenCV fills the missing rows of a truncated JPEG with grey and calls it a success.
    content = encoded.tobytes()
    if content.startswith(_JPEG_START) and not _jpeg_is_whole(content):
        raise ImageError("the JPEG has no end marker: it is cut off")
    size = announced_size(content)
    if size is None:
        formats = ", ".join(("JPEG", "PNG", *OTHER_FORMATS))
        raise ImageError(f"{len(encoded)} bytes are no image in a known format: {formats}")
    height, width = size
    if height * width > MOST_PIXELS:
        raise ImageError(
            f"it announces {height}x{width} pixels in {len(encoded)} bytes; at most {MOST_PIXELS} "
            "are decoded"
        )
    try:
        image = cv2.imdecode(encoded, cv2.IMREAD_COLOR)
    except cv2.error as error:
        raise ImageError(f"OpenCV can't decode it: {str(error).strip()}") from None
    if image is None:
        raise ImageError(f"{len(encoded)} bytes are no image OpenCV can decode")
    return image


def announced_size(content: bytes) -> tuple[int, int] | None:
    """Read height and width from the header of an encoded image; None if it has none."""
    if content.startswith(_JPEG_START):
        return _jpeg_size(content)
    if content.startswith(_PNG_START):
        return struct.unpack_from(">II", content, 16)[::-1] if len(content) >= 24 else None
    from PIL import Image  # rarely needed

    try:
        with Image.open(io.BytesIO(content), formats=OTHER_FORMATS) as image:
            return image.height, image.width
    except Image.DecompressionBombError as error:
        raise ImageError(str(error)) from None
    except Exception:  # a damaged header can raise nearly anything
        return None


def _jpeg_size(content: bytes) -> tuple[int, int] | None:
    """Walk over the segments to that of the frame, as libjpeg does."""
    place = content.find(b"\xff", len(_JPEG_START))
    while 0 <= place <= len(content) - 9:
        marker = content[place + 1]
        if marker in _JPEG_FRAMES:
            return struct.unpack_from(">HH", content, place + 5)
        if marker in _JPEG_SCAN:
            return None
        if marker == 0xFF:  # one of several that fill a gap
            place += 1
        elif marker in _JPEG_BARE:
            place += 2
        else:
            place += 2 + (content[place + 2] << 8 | content[place + 3])
        place = content.find(b"\xff", place)
    return None


def _jpeg_is_whole(content: bytes) -> bool:
    """Look for the end marker behind the pixels; phones append films, depth maps and the like."""
    if content.endswith(_JPEG_END):  # nearly always
        return True
    place, has_pixels = len(_JPEG_START), False
    while True:
        found = _JPEG_NEXT_MARKER.search(content, place)
        if found is None:
            return False
        marker = content[found.end() - 1]
        if marker == 0xD9:
            return has_pixels
        if has_pixels and marker not in _JPEG_BETWEEN_SCANS:
            return False
        has_pixels |= marker == 0xDA
        place = found.end()
        if marker not in _JPEG_BARE:
            place += int.from_bytes(content[place : place + 2], "big")


def encode(image: np.ndarray, extension: str = ".jpg", quality: int = JPEG_QUALITY) -> bytes:
    """Encode a BGR image, (height, width, 3) uint8, as JPEG or PNG."""
    cv2 = opencv()
    options = [cv2.IMWRITE_JPEG_QUALITY, quality] if extension in (".jpg", ".jpeg") else []
    done, encoded = cv2.imencode(extension, image, options)
    if not done:
        raise ImageError(f"OpenCV can't encode {image.shape} {image.dtype} as {extension}")
    return encoded.tobytes()


def fit(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize an image so that it just covers height × width, then crop its centre."""
    given = image.shape[:2]
    if given == (height, width):
        return image
    factor = max(height / given[0], width / given[1])
    rows, columns = max(round(given[0] * factor), height), max(round(given[1] * factor), width)
    if rows * columns > MOST_PIXELS:
        raise ImageError(
            f"{given[0]}x{given[1]} pixels are too narrow an image to be fitted to {height}x{width}"
        )
    cv2 = opencv()
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
    cv2 = opencv()
    height, width = size
    target = ARCFACE_TEMPLATE * (height / 112) + [(width - height) / 2, 0]
    landmarks = np.asarray(landmarks, float).reshape(5, 2)
    transform = similarity_transform(landmarks, target)
    factor = int(1 / np.linalg.norm(transform[:, 0]))
    if factor > 1:  # a warp would take a few pixels of a large face and skip those between
        given = np.array(image.shape[1::-1])
        reduced = np.maximum(given // factor, 1)
        image = cv2.resize(image, tuple(map(int, reduced)), interpolation=cv2.INTER_AREA)
        landmarks = (landmarks + 0.5) * (reduced / given) - 0.5  # pixels have their middle at .5
        transform = similarity_transform(landmarks, target)
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
