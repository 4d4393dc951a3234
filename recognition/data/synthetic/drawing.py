"""Draw a face from the parameters of who it is (`Identity`) and how it was taken (`Photo`).

A head is a surface around a vertical axis: at each height its section is an ellipse, whose half
width and half depth are read from a map that also holds nose, brows, cheeks, chin and hair as
relief. Skin, hair and features are painted flat onto a texture of that surface. A picture follows
its rays to the turned head, reads the texture there and shades it by the way the surface faces. So
features move, hide and shade with the pose as on a solid head, for a few array operations.

Head coordinates are in pixels of the ArcFace template (112×112): the origin lies inside the head
between the eyes, x grows to the right of the picture, y downwards, z towards the viewer. Colours
are BGR from 0 to 255. A *stroke* is a filled polygon: its points and its colour.
"""

from __future__ import annotations

from typing import Callable, Iterable, Iterator, Tuple

import numpy as np

from dsoftmax.recognition.common.preflight import opencv
from dsoftmax.recognition.data.images import (
    ARCFACE_TEMPLATE,
    decode,
    encode,
    similarity_transform,
)
from dsoftmax.recognition.data.synthetic.people import Identity, Photo

cv2 = opencv()

Stroke = Tuple[np.ndarray, np.ndarray]
SoftStroke = Tuple[np.ndarray, np.ndarray, float, float]  # and opacity, width of the soft edge

TEMPLATE_SIZE = 112
HEAD_TOP, HEAD_DEPTH = -64.0, 45.0

# The texture has a row per height y and a column per u = tan(angle / 2) around the vertical axis.
LARGEST_U = 1.5  # a little behind the ears: as far as any pose shows
TEXTURE_WIDTH, TEXTURE_HEIGHT, TEXTURE_TOP = 240, 144, -72
TEXTURE_DETAIL = 1.6  # colours have more texels than the relief, that many an output pixel

RAY_STEP = 2  # pixels between rays; shape and light vary slowly enough
TRACE_STEPS = 1.0, 0.7, 0.7, 0.7  # full steps can swing to and fro where the relief is steep

# Anchors of the colour scales, which parameters from 0 to 1 walk along.
SKIN_TONES = [(190, 208, 240), (150, 182, 226), (112, 150, 205), (78, 112, 170), (48, 70, 112)]
HAIR_COLOURS = [(24, 24, 28), (34, 50, 76), (50, 80, 140), (110, 165, 205), (170, 172, 176)]
IRIS_COLOURS = [(20, 36, 62), (30, 62, 104), (52, 104, 120), (90, 120, 84), (150, 130, 96)]

SUBPIXEL_BITS = 4
CIRCLE = np.exp(2j * np.pi * np.arange(16) / 16)
ACROSS = np.linspace(-1, 1, 13)  # an eye or a mouth from one corner to the other
ARC = np.sqrt(1 - ACROSS**2)


def on_scale(scale: list, position: float) -> np.ndarray:
    """Return the colour, (3,) float32, at a position from 0 to 1 along a list of anchors."""
    place = position * (len(scale) - 1)
    return np.array([np.interp(place, range(len(scale)), c) for c in zip(*scale)], np.float32)


def clamp(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """Do what ``np.clip`` does, in a fraction of its time on small arrays."""
    return np.minimum(np.maximum(values, low), high)


def blend(above: np.ndarray, below: np.ndarray, cover: np.ndarray) -> np.ndarray:
    """Lay one picture (h, w, 3) over another where `cover`, (h, w) float32, is 1: uint8."""
    cover = cv2.merge([cover] * 3)
    above = cv2.multiply(above, cover, dtype=cv2.CV_32F)
    below = cv2.multiply(below, 1 - cover, dtype=cv2.CV_32F)
    return cv2.add(above, below, dtype=cv2.CV_8U)


# ---- Polygons ------------------------------------------------------------------------------------


def ellipse(x: float, y: float, width: float, height: float, tilt: float = 0.0) -> np.ndarray:
    """Outline an ellipse of the given half axes: (16, 2)."""
    outline = (width * CIRCLE.real + 1j * height * CIRCLE.imag) * np.exp(1j * tilt)
    return outline.view(float).reshape(-1, 2) + (x, y)


def band(x: np.ndarray, top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    """Outline what lies between two curves over the same n values of x: (2 n, 2)."""
    outline = np.empty((2 * len(x), 2))
    outline[: len(x), 0], outline[len(x) :, 0] = x, x[::-1]
    outline[: len(x), 1], outline[len(x) :, 1] = top, bottom[::-1]
    return outline


def at_depth(points: np.ndarray, z: float) -> np.ndarray:
    """Put points (n, 2) at one depth: (n, 3)."""
    return np.column_stack([points, np.full(len(points), z)])


def fill(
    canvas: np.ndarray, strokes: Iterable[Stroke], place: Callable[[np.ndarray], np.ndarray]
) -> None:
    """Fill polygons one over the other, with smooth edges.

    Parameters
    ----------
    canvas : (height, width, 3) uint8
        Drawn upon.
    strokes : iterable of (points, colour)
    place : function
        Takes points to pixels (n, 2). Called once for all strokes: many small arrays would cost
        more than one large one.
    """
    strokes = list(strokes)
    if not strokes:
        return
    outlines, colours = zip(*strokes)
    pixels = _subpixels(place(np.concatenate(outlines)))
    end = 0
    for outline, colour in zip(outlines, np.minimum(colours, 255.0).tolist()):
        start, end = end, end + len(outline)
        cv2.fillPoly(canvas, [pixels[start:end]], colour, cv2.LINE_AA, SUBPIXEL_BITS)


def fill_softly(
    canvas: np.ndarray, pixels: np.ndarray, colour: np.ndarray, opacity: float, softness: float
) -> None:
    """Blend one polygon into a canvas, its edge blurred by `softness` pixels to either side."""
    margin = round(softness)
    low = np.maximum(pixels.min(axis=0).astype(int) - margin - 1, 0)
    high = pixels.max(axis=0).astype(int) + margin + 2
    part = canvas[low[1] : high[1], low[0] : high[0]]
    mask = np.zeros(part.shape[:2], np.uint8)
    cv2.fillPoly(mask, [_subpixels(pixels - low)], 255, cv2.LINE_AA, SUBPIXEL_BITS)
    weight = cv2.blur(mask, (2 * margin + 1,) * 2)[..., None] * np.float32(opacity / 255)
    part[:] = part + (colour - part) * weight


def _subpixels(pixels: np.ndarray) -> np.ndarray:
    return np.rint(pixels * (1 << SUBPIXEL_BITS)).astype(np.int32)


# ---- The head: shape and lasting colours ---------------------------------------------------------


class HeadShape:
    """Surface and lasting texture of one person, shared by all pictures of the person.

    Parameters
    ----------
    identity : Identity
    size : int
        Height and width of the pictures to come; sets the detail of the texture.

    Attributes
    ----------
    relief : (TEXTURE_HEIGHT, TEXTURE_WIDTH, 2) float32
        Half width and half depth of the head.
    albedo : (rows, columns, 3) uint8
        Colours of skin and hair.
    """

    def __init__(self, identity: Identity, size: int):
        self.identity = identity
        self.detail = TEXTURE_DETAIL * size / TEMPLATE_SIZE
        self.skin = on_scale(SKIN_TONES, identity.skin_tone)
        self.skin[2] *= 1 + identity.skin_redness
        fairness = 1 - 0.6 * identity.skin_tone  # fair hair and eyes are rare with dark skin
        self.hair = on_scale(HAIR_COLOURS, fairness * identity.hair_colour)
        self.iris = on_scale(IRIS_COLOURS, fairness * identity.iris_colour)
        rng = np.random.default_rng(identity.marks)
        self._locks = rng.normal(0, 1.2, (1, 48)).astype(np.float32)
        self.ears = {side: list(self._ear(side)) for side in (-1, 1)}
        self.relief = self._make_relief()
        self.albedo = self._make_albedo(rng)

    def half_width(self, y: np.ndarray) -> np.ndarray:
        """Half width of the bare head at heights `y`."""
        i = self.identity
        above, below = clamp(y / HEAD_TOP, 0, 1), clamp(y / i.chin, 0, 1)
        jaw = (1 - i.jaw_taper * below) * np.sqrt(1 - below**i.jaw_squareness)
        return i.head_width * (1 - above**2.4) ** (1 / 2.4) * jaw + 0.3

    def half_depth(self, y: np.ndarray) -> np.ndarray:
        """Half depth of the bare head at heights `y`."""
        above, below = clamp(y / HEAD_TOP, 0, 1), clamp(y / self.identity.chin, 0, 1)
        return HEAD_DEPTH * (1 - above**2.4) ** (1 / 2.4) * np.sqrt(1 - below**4) + 0.3

    def hair_cover(self, angle: np.ndarray, y: np.ndarray, edge: float, inset: float) -> np.ndarray:
        """How much hair covers the head, 0 to 1, on a grid of angles (w,) and heights (h,).

        It sets in over `edge` template pixels, `inset` template pixels behind the hairline.
        """
        i, aside = self.identity, np.abs(angle)
        line = i.hairline + i.hair_peak * np.exp(-((angle / 0.15) ** 2))
        line -= i.hair_recession * np.exp(-(((aside - 0.65) / 0.25) ** 2))
        line += i.hair_sweep * np.sin(1.6 * angle) + i.hair_fringe * np.exp(-((aside / 0.8) ** 4))
        line += cv2.resize(self._locks, (len(angle), 1), interpolation=cv2.INTER_CUBIC)[0]
        line = np.minimum(line, -11) - inset  # not over the eyes
        beside = clamp((aside - i.hair_side - inset / 40) * (12 / edge), 0, 1)
        line += (i.hair_end - line) * beside * beside * (3 - 2 * beside)
        return clamp((line - y[:, None]) / edge + 0.5, 0, 1) * i.hair_opacity

    def _make_relief(self) -> np.ndarray:
        i = self.identity
        angle, y = _texture_axes(TEXTURE_WIDTH, TEXTURE_HEIGHT)
        width, depth = self.half_width(y)[:, None], self.half_depth(y)[:, None]
        x = np.abs(width * np.sin(angle))  # both sides alike
        hair = i.hair_volume * self.hair_cover(angle, y, 8.0, 4.0)
        hair = cv2.blur(hair, (61, 11))  # steep walls would defeat the tracing
        relief = cv2.merge([width + hair, depth + hair])
        bumps = [  # x, y, spread in x, spread in y, height
            (i.eye_spacing, 0.0, 8.5, 5.0, -i.socket_depth),
            (i.eye_spacing, 0.0, 6.0, 3.5, 1.8),
            (i.eye_spacing * 0.8, -i.brow_height, 10.0, 3.5, i.brow_ridge),
            (24.0, 15.0, 8.0, 8.0, i.cheekbones),
            (i.nose_width * 0.75, i.nose_length + 1.2, 2.4, 2.8, i.nose_relief * 0.4),
            (0.0, i.mouth_height, i.mouth_width * 0.8, 7.0, 3.0),
            (0.0, i.mouth_height + i.lower_lip + 3.0, 9.0, 2.5, -2.0),
            (0.0, i.chin - 8.0, 9.0, 6.0, i.chin_relief),
        ]
        for px, py, sx, sy, height in bumps:
            rows = slice(*np.searchsorted(y, (py - 3 * sy, py + 3 * sy)))
            fade = height * np.exp(-(((y[rows, None] - py) / sy) ** 2))
            relief[rows, :, 1] += fade * np.exp(-(((x[rows] - px) / sx) ** 2))
        rows = slice(*np.searchsorted(y, (-5, i.nose_length + 9)))
        along = clamp((y[rows, None] + 5) / (i.nose_length + 5), 0, 1)  # 1 from the tip downwards
        ridge = i.nose_relief * along + i.nose_hump * np.exp(-(((along - 0.45) / 0.2) ** 2))
        ridge *= np.exp(-((np.maximum(y[rows, None] - i.nose_length, 0) / 2.8) ** 2))
        spread = i.nose_bridge + (0.62 * i.nose_width - i.nose_bridge) * along**2
        relief[rows, :, 1] += ridge * np.exp(-((x[rows] / spread) ** 2))
        return relief

    def _make_albedo(self, rng: np.random.Generator) -> np.ndarray:
        width, height = round(TEXTURE_WIDTH * self.detail), round(TEXTURE_HEIGHT * self.detail)
        blotches = rng.normal(1, 0.03, (18, 30, 1)) * self.skin
        canvas = cv2.resize(clamp(blotches, 0, 255).astype(np.uint8), (width, height))
        fill(canvas, self._skin_marks(rng), self.to_texture)
        for outline, colour, opacity, softness in [*self._skin_shades(), *self._beard()]:
            if opacity > 0:
                pixels = self.to_texture(outline)
                fill_softly(canvas, pixels, colour, opacity, softness * self.detail)
        strands = round(6 + 30 * self.identity.hair_curl), 110, 1
        strands = clamp(rng.normal(0.85, 0.15, strands) * self.hair, 0, 255).astype(np.uint8)
        strands = cv2.resize(strands, (width, height), interpolation=cv2.INTER_CUBIC)
        cover = self.hair_cover(*_texture_axes(width, height), 2.5, 0.0)
        return blend(strands, canvas, cover)

    def _skin_marks(self, rng: np.random.Generator) -> Iterator[Stroke]:
        """Freckles, moles and a scar."""
        i = self.identity
        for x, y in rng.normal((0, 14), (16, 8), (int(i.freckles), 2)):
            yield ellipse(x, y, 0.7, 0.6), self.skin * 0.75
        for x, y in rng.uniform((-28, -25), (28, 52), (int(i.moles), 2)):
            yield ellipse(x, y, 1.2, 1.1), self.skin * 0.35
        x, y, tilt = rng.uniform((-28, -28, 0), (28, 45, np.pi))
        yield ellipse(x, y, i.scar, 0.1 * i.scar, tilt), self.skin * (0.75, 0.75, 1)

    def _skin_shades(self) -> Iterator[SoftStroke]:
        """Redness, sockets, bags and nostrils."""
        i = self.identity
        red, dark = self.skin * (0.72, 0.72, 1.02), self.skin * 0.45
        yield ellipse(0, i.nose_length, 6, 5), red, i.blush, 5.0
        for side in (-1, 1):
            eye, nose = side * i.eye_spacing, side * i.nose_width
            yield ellipse(side * 22, 20, 9, 7), red, i.blush, 6.0
            yield ellipse(eye, -1, i.eye_width + 1, i.eye_height + 2), dark, 0.25, 3.0
            yield ellipse(eye, 6, i.eye_width, 2), dark, i.eye_bags, 2.5
            nostril = ellipse(nose * 0.45, i.nose_length + 2.6, nose * 0.24, 1.2, -0.25 * side)
            yield nostril, self.skin * 0.3, 0.8, 0.7

    def _beard(self) -> Iterator[SoftStroke]:
        """Moustache, goatee and beard."""
        i = self.identity
        hair = 0.9 * self.hair + 0.1 * self.skin
        x = np.array([-1.1, -0.5, 0, 0.5, 1.1]) * i.mouth_width
        top, bottom = i.mouth_height + np.array([(3, -7, -8, -7, 3), (6, -1, -2, -1, 6)])
        yield band(x, top, bottom), hair, i.moustache, 2.0
        chin = ellipse(0, i.mouth_height + 13, i.mouth_width * 0.8, 9)
        yield chin, hair, i.goatee, 3.0
        jaw = band(60 * ACROSS, i.mouth_height + 4 - 44 * ACROSS**4, np.full(len(ACROSS), 75.0))
        yield jaw, hair, i.beard, 4.0

    def _ear(self, side: int) -> Iterator[Stroke]:
        """One ear in head space, unless hair hides it."""
        i = self.identity
        if i.has_long_hair:
            return
        for grow, shade in ((1.0, 0.95), (0.6, 0.75)):
            z, y = ellipse(-2, 6, 7 * grow, i.ear_size * grow, 0.2).T
            x = self.half_width(6.0) + (3 - z) / 10 * i.ear_flare + 0.3
            yield np.column_stack([side * x, y, z - 4]), self.skin * shade

    def unroll(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find the u on the texture, and the cosine of the angle, of points seen from the front."""
        sine = clamp(points[:, 0] / self.half_width(points[:, 1]), -1, 1)
        cosine = np.sqrt(1 - sine * sine)
        return sine / (1 + cosine), cosine

    def to_texture(self, points: np.ndarray) -> np.ndarray:
        """Take points (n, 2) seen from the front to pixels (n, 2) of the colours."""
        u, _ = self.unroll(points)
        column = (u / LARGEST_U + 1) * (TEXTURE_WIDTH / 2)
        return np.stack([column, points[:, 1] - TEXTURE_TOP], axis=1) * self.detail - 0.5

    def lift(self, points: np.ndarray) -> np.ndarray:
        """Put points (n, 2) seen from the front onto the surface: (n, 3)."""
        points = np.asarray(points, np.float32)
        u, cosine = self.unroll(points)
        shape = look_up(self.relief, u.astype(np.float32), points[:, 1])
        return np.column_stack([points, shape[:, 0, 1] * cosine])


def _texture_axes(width: int, height: int) -> tuple[np.ndarray, np.ndarray]:
    """Angles of a texture's columns and heights y of its rows."""
    u = LARGEST_U * ((2 * np.arange(width, dtype=np.float32) + 1) / width - 1)
    y = (np.arange(height, dtype=np.float32) + 0.5) * (TEXTURE_HEIGHT / height) + TEXTURE_TOP
    return 2 * np.arctan(u), y


def look_up(texture: np.ndarray, u: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Read a texture (rows, columns, channels) at float32 positions on the head."""
    rows, columns = texture.shape[:2]
    column = u * np.float32(columns / 2 / LARGEST_U) + np.float32(columns / 2 - 0.5)
    scale = rows / TEXTURE_HEIGHT
    row = y * np.float32(scale) - np.float32(TEXTURE_TOP * scale + 0.5)
    return cv2.remap(texture, column, row, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)


# ---- Features that move with the expression ------------------------------------------------------


def eyes(head: HeadShape, photo: Photo) -> Iterator[Stroke]:
    """Lids, eyeballs and brows."""
    i, t = head.identity, ACROSS
    x = i.eye_spacing + t * i.eye_width
    slope = -i.eye_tilt * i.eye_width * t
    upper = slope - i.eye_height * photo.lids * ARC
    lower = slope + 0.7 * i.eye_height * ARC
    crease = upper - i.lid_crease
    along = t * i.brow_length
    brow = -i.brow_arch * (1 - (t - 0.3) ** 2) - i.brow_tilt * along
    brow -= i.brow_height + photo.brow_raise
    thick = i.brow_thickness * (0.9 - 0.6 * np.maximum(t, 0) ** 2) * (1 - t**8)
    brow_colour = head.skin + (0.6 * head.hair - head.skin) * i.brow_strength
    under = [
        (band(x, crease - 0.7, crease), head.skin * 0.72),
        (band(x, upper, lower), (222, 226, 230)),
    ]
    over = [
        (band(x, upper - 1.2 * i.lashes, upper + 0.4), head.skin * 0.2),
        (band(x, lower - 0.1, lower + 0.5), head.skin * 0.5),
        (band(i.eye_spacing + along, brow - thick, brow + 0.7 * thick), brow_colour),
    ]
    rim = ellipse(0, 0, i.iris_size, i.iris_size)
    iris = np.concatenate([rim, 0.82 * rim, 0.45 * rim])
    iris_colours = head.iris * 0.5, head.iris, (14, 14, 14)
    for side in (-1, 1):
        middle = i.eye_spacing + side * photo.gaze
        discs = iris + (middle, -0.4)
        discs[:, 1] = clamp(discs[:, 1], *(np.interp(discs[:, 0], x, y) for y in (upper, lower)))
        glint = ellipse(middle - side, -0.8, 0.8, 0.8), (240, 240, 240)
        for outline, colour in [*under, *zip(np.split(discs, 3), iris_colours), glint, *over]:
            yield outline * (side, 1), colour


def mouth_corner(identity: Identity, photo: Photo) -> tuple[float, float]:
    """Half width of the mouth and height y of its corners, which a smile draws apart and up."""
    width = identity.mouth_width * (1 + 0.14 * photo.smile)
    return width, identity.mouth_height - 2.6 * photo.smile


def mouth(head: HeadShape, photo: Photo) -> Iterator[Stroke]:
    """Folds beside the mouth, lips and what an open mouth shows."""
    i, t = head.identity, ACROSS
    grin = max(photo.smile, 0)
    down = (t + 1) / 2
    fold = i.nose_width + 3 + down**1.5 * (i.mouth_width - i.nose_width)
    fold_y = i.nose_length + 2 + down * (i.mouth_height - i.nose_length - 6)
    for side in (-1, 1):
        outline = band(fold_y, side * fold, side * (fold + 1.2 * ARC))[:, ::-1]
        yield outline, head.skin * (0.95 - 0.12 * grin)
    width, corner = mouth_corner(i, photo)
    x, line = t * width, i.mouth_height + (corner - i.mouth_height) * t * t
    thin = ARC * (1 - 0.25 * grin)
    top = line - i.upper_lip * thin * (1 - 0.35 * i.cupid_bow * np.exp(-((t / 0.2) ** 2)))
    opening = line + photo.mouth_open * (1 - t * t)
    bottom = opening + i.lower_lip * thin
    lips = head.skin * (1 - i.lip_redness * np.array([0.5, 0.55, 0.12]))
    yield band(x, top, line + 0.3), lips * 0.85
    yield band(x, opening - 0.3, bottom), lips
    gleam = band(x * 0.5, opening + 0.35 * (bottom - opening), (opening + bottom) / 2)
    yield gleam, lips * 1.12
    yield band(x, line - 0.4, opening + 0.5), (24, 20, 48)
    if photo.mouth_open > 1.5:
        yield band(x * 0.85, line, np.minimum(line + 2.5, opening)), (205, 220, 225)


# ---- The picture ---------------------------------------------------------------------------------


class Camera:
    """Where points of the turned head fall in the picture, aligned as a face aligner would do it.

    The five landmarks of the turned head are fitted to the ArcFace template by a similarity; then
    the photo's small misalignment is added.
    """

    def __init__(self, head: HeadShape, photo: Photo, size: int):
        cy, sy, cp, sp = (f(a) for a in (photo.yaw, photo.pitch) for f in (np.cos, np.sin))
        turn = np.array([(cy, 0, sy), (0, 1, 0), (-sy, 0, cy)])
        self.rotation = np.array([(1, 0, 0), (0, cp, -sp), (0, sp, cp)]) @ turn
        i = head.identity
        x, y = mouth_corner(i, photo)
        spots = [(-i.eye_spacing, 0), (i.eye_spacing, 0), (0, i.nose_length), (-x, y), (x, y)]
        landmarks = (head.lift(spots) @ self.rotation.T)[:, :2]
        # In complex numbers, x + iy, a similarity is a factor and a shift.
        factor, _, shift = (1, 1j) @ similarity_transform(landmarks, ARCFACE_TEMPLATE)
        slip = photo.scale * np.exp(1j * photo.roll)
        centre = ARCFACE_TEMPLATE.mean(axis=0) @ (1, 1j)
        shift = slip * (shift - centre) + centre + complex(photo.shift_x, photo.shift_y)
        self.factor = factor * slip * (size / TEMPLATE_SIZE)
        self.shift = shift * (size / TEMPLATE_SIZE)
        self.zoom = abs(self.factor)  # picture pixels in a template pixel

    def project(self, points: np.ndarray) -> np.ndarray:
        """Take points of the head (n, 3) to picture pixels (n, 2)."""
        flat = (points @ self.rotation.T)[:, :2] @ (1, 1j)
        return (self.factor * flat + self.shift).view(float).reshape(-1, 2)

    def rays(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Lay rays `RAY_STEP` pixels apart: their starts (3, n, n) and direction (3,), float32."""
        place = np.arange(0, size, RAY_STEP) + (RAY_STEP - 1) / 2
        across, down = (
            (self.rotation[:2].T @ (flat.real, flat.imag)).astype(np.float32)
            for flat in ((place - self.shift) / self.factor, 1j * place / self.factor)
        )
        return across[:, None, :] + down[:, :, None], self.rotation[2].astype(np.float32)


def trace(head: HeadShape, camera: Camera, size: int) -> tuple[np.ndarray, ...]:
    """Follow the rays of a picture to the head.

    Returns
    -------
    u, y : (n, n) float32
        The place hit, on the texture.
    depth : (n, n) float32
        Its distance towards the viewer.
    margin : (n, n) float32
        How far inside the head's outline the ray lies, in pixels from -3 (outside) to 3.
    """
    (x0, y0, z0), (dx, dy, dz) = camera.rays(size)
    width, depth = np.float32(head.identity.head_width), np.float32(HEAD_DEPTH)
    for step in TRACE_STEPS:  # which section a ray hits depends on where it hits
        x1, dx1, z1, dz1 = x0 / width, dx / width, z0 / depth, dz / depth
        a = dx1 * dx1 + dz1 * dz1
        b = x1 * dx1 + z1 * dz1
        inside = b * b - a * (x1 * x1 + z1 * z1 - 1)
        reach = (np.sqrt(np.maximum(inside, 0)) - b) / a
        y = y0 + reach * dy
        u = (x1 + reach * dx1) / (1 + np.maximum(z1 + reach * dz1, np.float32(-0.6)))
        shape = look_up(head.relief, u, y)
        width = width + (shape[..., 0] - width) * np.float32(step)
        depth = depth + (shape[..., 1] - depth) * np.float32(step)
    margin = inside / (a * a * width) * np.float32(camera.zoom / 2)
    return u, y, reach, clamp(margin, np.float32(-3), np.float32(3))


class Light:
    """Ambient light and one lamp of different colours."""

    def __init__(self, photo: Photo):
        level, up = np.cos(photo.light_elevation), np.sin(photo.light_elevation)
        azimuth = photo.light_azimuth
        self.direction = np.array([np.sin(azimuth) * level, -up, np.cos(azimuth) * level])
        warm, green = np.array([(-1, 0, 1), (-0.5, 1, -0.5)], np.float32)
        self.lamp = photo.light_strength * (1 + photo.light_warmth * warm)
        tint = photo.ambient_warmth * warm + photo.ambient_tint * green
        self.ambient = photo.ambient * (1 + tint)
        self.gloss = 255 * photo.gloss * photo.light_strength

    def on(self, x: float, y: float, z: float) -> np.ndarray:
        """Light as a factor of the colour, (..., 3), on surfaces that face the given way."""
        lit = np.maximum(0.15 + 0.85 * facing(self.direction, x, y, z), 0)  # as by a wide lamp
        return self.ambient + lit[..., None] * self.lamp

    def on_relief(self, depth: np.ndarray, zoom: float) -> tuple[np.ndarray, np.ndarray]:
        """Light on a surface by its depth (n, n): factor of its colour (n, n, 3), gloss (n, n)."""
        x = cv2.Sobel(depth, cv2.CV_32F, 1, 0, scale=-zoom / 8)
        y = cv2.Sobel(depth, cv2.CV_32F, 0, 1, scale=-zoom / 8)
        z = 1 / np.sqrt(x * x + y * y + 1)
        x *= z
        y *= z
        window = 2 * round(3.5 * zoom) + 1
        hollow = cv2.blur(depth, (window, window)) - depth  # which less ambient light reaches
        openness = 1 - np.maximum(hollow * np.float32(0.06), np.float32(-0.1))
        halfway = self.direction + (0, 0, 1)
        gloss = np.maximum(facing(halfway / np.linalg.norm(halfway), x, y, z), 0)
        for _ in range(4):  # to the 16th power
            gloss *= gloss
        return self.on(x, y, z) * openness[..., None], gloss * np.float32(self.gloss)


def facing(direction: np.ndarray, x: float, y: float, z: float) -> np.ndarray:
    """Cosine between a direction (3,) and normals given by their components."""
    dx, dy, dz = direction.astype(np.float32)
    return x * dx + y * dy + z * dz


def draw(head: HeadShape, photo: Photo, size: int) -> np.ndarray:
    """Take one picture of a head.

    Returns
    -------
    (size, size, 3) uint8
        Blue, green, red.
    """
    rng = np.random.default_rng(photo.marks)
    camera, light = Camera(head, photo, size), Light(photo)
    texture = head.albedo.copy()
    fill(texture, [*eyes(head, photo), *mouth(head, photo)], head.to_texture)
    picture = background(rng, size)
    fill(picture, behind(head, camera, light), camera.project)

    u, y, depth, margin = trace(head, camera, size)
    light_factor, gloss = light.on_relief(depth, camera.zoom / RAY_STEP)
    u, y, margin, gloss = cv2.split(enlarge(cv2.merge([u, y, margin, gloss]), size))
    colour = look_up(texture, u, y)
    face = cv2.multiply(colour, enlarge(light_factor, size), dtype=cv2.CV_32F)
    face = cv2.add(face, cv2.merge([gloss] * 3))
    picture = blend(face, picture, clamp(margin + np.float32(0.5), 0, 1))

    fill(picture, ears(head, camera, light, front=True), camera.project)
    fill(picture, accessories(head, light, photo, rng), camera.project)
    return develop(picture, photo, rng)


def enlarge(rays: np.ndarray, size: int) -> np.ndarray:
    """Interpolate a value per ray (n, n, channels) to one per pixel (size, size, channels)."""
    covered = RAY_STEP * len(rays)
    return cv2.resize(rays, (covered, covered))[:size, :size]


def background(rng: np.random.Generator, size: int) -> np.ndarray:
    """Paint blurred surroundings: (size, size, 3) uint8."""
    cells = int(rng.integers(2, 7))
    tone = rng.uniform(70, 160) + rng.normal(0, 12, 3)
    coarse = tone + rng.normal(0, 25, (cells, cells, 1)) + rng.normal(0, 8, (cells, cells, 3))
    coarse = clamp(coarse, 0, 255).astype(np.uint8)
    smooth = cv2.resize(coarse, (24, 24), interpolation=cv2.INTER_CUBIC)
    return cv2.resize(smooth, (size, size))


def behind(head: HeadShape, camera: Camera, light: Light) -> Iterator[Stroke]:
    """Long hair, neck and the ears behind the head's outline."""
    i = head.identity
    if i.has_long_hair:
        y = np.linspace(HEAD_TOP - i.hair_volume, 100, 12)
        arc = np.sqrt(clamp(1 - (np.minimum(y, 0) / (HEAD_TOP - 8)) ** 2, 0.05, 1))
        half = (i.head_width + i.hair_volume + 1) * arc
        yield at_depth(band(y, half, -half)[:, ::-1], -12.0), head.hair * 0.8 * light.on(0, 0, 1)
    neck = np.array([(-27, 30), (27, 30), (31, 110), (-31, 110)])
    yield at_depth(neck, -14.0), head.skin * 0.6 * light.on(0, 0.3, 0.9)
    yield from ears(head, camera, light, front=False)


def ears(head: HeadShape, camera: Camera, light: Light, front: bool) -> Iterator[Stroke]:
    """Ears that are turned to the viewer (front), or else those the head partly hides."""
    for side, strokes in head.ears.items():
        if (camera.rotation[2, 0] * side > 0.05) == front:
            factor = light.on(side * 0.7, 0, 0.7)
            yield from ((points, colour * factor) for points, colour in strokes)


def accessories(
    head: HeadShape, light: Light, photo: Photo, rng: np.random.Generator
) -> Iterator[Stroke]:
    """Glasses, and what hides a part of the face: sunglasses, a hand, a scarf or a box."""
    lit = light.on(0, 0, 1)
    colour = rng.uniform(10, 220, 3) * lit
    across, down = rng.uniform(-1, 1, 2)
    if photo.glasses or photo.occlusion == "sunglasses":
        yield from glasses(head, photo, rng.uniform(10, 90) * lit, rng)
    if photo.occlusion == "hand":
        skin = head.skin * light.on(across, 0, 0.8)
        for finger in range(4):
            x, y = across * 30 + finger * 8.2 - 12, 62 + 12 * down + abs(finger - 1.4) * 3
            for width, shade in ((4.6, 0.65), (3.6, 0.95)):
                yield at_depth(ellipse(x, y, width, 34, 0.2 * across), 50.0), skin * shade
    elif photo.occlusion == "scarf":
        x = np.linspace(-70, 70, 15)
        y = 44 + 8 * down - (x / 18) ** 2 + 3 * np.cos(x / 20)
        yield at_depth(band(x, y, np.full(15, 120.0)), 40.0), colour
    elif photo.occlusion == "box":
        corners = rng.uniform(6, 20, 2) * [(-1, -1), (1, -1), (1, 1), (-1, 1)]
        yield at_depth(corners + (40 * across, 40 * down + 10), 40.0), colour


def glasses(
    head: HeadShape, photo: Photo, colour: np.ndarray, rng: np.random.Generator
) -> Iterator[Stroke]:
    """Spectacles, or sunglasses if the photo says so."""
    thick = photo.glasses or 1.2
    wide, high, squareness = rng.uniform((9, 6.5, 2), (13, 10, 5))
    front = head.lift([(0, 2)])[0, 2] + 1
    ring = np.append(CIRCLE, CIRCLE[0]).view(float).reshape(-1, 2)
    ring /= (np.abs(ring) ** squareness).sum(axis=1, keepdims=True) ** (1 / squareness)
    outer, inner = ring * (wide + thick, high + thick), ring * (wide, high)
    outline = outer if photo.occlusion == "sunglasses" else np.concatenate([outer, inner[::-1]])
    for side in (-1, 1):
        points = outline + (side * (wide + 3.5), 1.0)
        yield np.column_stack([points, front - 0.006 * points[:, 0] ** 2]), colour
    yield at_depth(np.array([(-4, -0.5), (4, -0.5), (4, 0.8), (-4, 0.8)]), front), colour


def develop(picture: np.ndarray, photo: Photo, rng: np.random.Generator) -> np.ndarray:
    """Give a picture its tone curve, blur, noise and the traces of an earlier JPEG coding."""
    size = len(picture)
    curve = 255 * (np.arange(256) / 255) ** photo.gamma
    picture = cv2.LUT(picture, np.rint(curve).astype(np.uint8))
    if photo.blur:
        picture = cv2.GaussianBlur(picture, (0, 0), photo.blur * size / TEMPLATE_SIZE)
    noise = rng.standard_normal((size, size), np.float32) * np.float32(photo.noise)
    picture = cv2.add(picture, cv2.merge([noise] * 3), dtype=cv2.CV_8U)
    if photo.jpeg_quality:
        picture = decode(np.frombuffer(encode(picture, ".jpg", int(photo.jpeg_quality)), np.uint8))
    return picture
