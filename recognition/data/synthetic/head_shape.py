"""The head of a person: its surface, its lasting colours, and features that move.

A head is a surface around a vertical axis: at each height its section is an ellipse, whose half
width and half depth are read from a map that also holds nose, brows, cheeks, chin and hair as
relief. Skin, hair and features are painted flat onto a texture of that surface.

Head coordinates are in pixels of the ArcFace template (112×112): the origin lies inside the head
between the eyes, x grows to the right of the picture, y downwards, z towards the viewer.
"""

from __future__ import annotations

from typing import Iterator

import numpy as np

from dsoftmax.recognition.common.preflight import opencv
from dsoftmax.recognition.data.synthetic.painting import (
    SoftStroke,
    Stroke,
    band,
    blend,
    clamp,
    ellipse,
    fill,
    fill_softly,
    on_scale,
)
from dsoftmax.recognition.data.synthetic.people import Identity, Photo

cv2 = opencv()

TEMPLATE_SIZE = 112
HEAD_TOP, HEAD_DEPTH = -64.0, 45.0

# The texture has a row per height y and a column per u = tan(angle / 2) around the vertical axis.
LARGEST_U = 1.5  # a little behind the ears: as far as any pose shows
TEXTURE_WIDTH, TEXTURE_HEIGHT, TEXTURE_TOP = 240, 144, -72
TEXTURE_DETAIL = 1.6  # texels of colour per pixel of the picture; the relief has fewer

# Anchors of the colour scales, which parameters from 0 to 1 walk along.
SKIN_TONES = [(190, 208, 240), (150, 182, 226), (112, 150, 205), (78, 112, 170), (48, 70, 112)]
HAIR_COLOURS = [(24, 24, 28), (34, 50, 76), (50, 80, 140), (110, 165, 205), (170, 172, 176)]
IRIS_COLOURS = [(20, 36, 62), (30, 62, 104), (52, 104, 120), (90, 120, 84), (150, 130, 96)]

ACROSS = np.linspace(-1, 1, 13)  # an eye or a mouth from one corner to the other
ARC = np.sqrt(1 - ACROSS**2)


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
        """Return the half width of the bare head at heights `y`."""
        i = self.identity
        above, below = clamp(y / HEAD_TOP, 0, 1), clamp(y / i.chin, 0, 1)
        jaw = (1 - i.jaw_taper * below) * np.sqrt(1 - below**i.jaw_squareness)
        return i.head_width * (1 - above**2.4) ** (1 / 2.4) * jaw + 0.3

    def half_depth(self, y: np.ndarray) -> np.ndarray:
        """Return the half depth of the bare head at heights `y`."""
        above, below = clamp(y / HEAD_TOP, 0, 1), clamp(y / self.identity.chin, 0, 1)
        return HEAD_DEPTH * (1 - above**2.4) ** (1 / 2.4) * np.sqrt(1 - below**4) + 0.3

    def hair_cover(self, angle: np.ndarray, y: np.ndarray, edge: float, inset: float) -> np.ndarray:
        """Return the cover by hair, 0 to 1, on a grid of angles (w,) and heights (h,): (h, w).

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
        """Yield freckles, moles and a scar."""
        i = self.identity
        for x, y in rng.normal((0, 14), (16, 8), (int(i.freckles), 2)):
            yield ellipse(x, y, 0.7, 0.6), self.skin * 0.75
        for x, y in rng.uniform((-28, -25), (28, 52), (int(i.moles), 2)):
            yield ellipse(x, y, 1.2, 1.1), self.skin * 0.35
        x, y, tilt = rng.uniform((-28, -28, 0), (28, 45, np.pi))
        yield ellipse(x, y, i.scar, 0.1 * i.scar, tilt), self.skin * (0.75, 0.75, 1)

    def _skin_shades(self) -> Iterator[SoftStroke]:
        """Yield redness, eye sockets, bags and nostrils."""
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
        """Yield moustache, goatee and beard."""
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
        """Yield one ear in head coordinates, unless hair hides it."""
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
    """Return the angles of a texture's columns and the heights y of its rows."""
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


def eyes(head: HeadShape, photo: Photo) -> Iterator[Stroke]:
    """Yield lids, eyeballs and brows."""
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
    """Return the mouth's half width and the height y of its corners, which a smile changes."""
    width = identity.mouth_width * (1 + 0.14 * photo.smile)
    return width, identity.mouth_height - 2.6 * photo.smile


def mouth(head: HeadShape, photo: Photo) -> Iterator[Stroke]:
    """Yield folds beside the mouth, lips, and the teeth of an open mouth."""
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
