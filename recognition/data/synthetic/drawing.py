"""Take a picture of a head (`HeadShape`) under the circumstances of a `Photo`.

A picture follows its rays to the turned head, reads the texture there and shades it by the way the
surface faces. So features move, hide and shade with the pose as on a solid head, for a few array
operations.
"""

from __future__ import annotations

from typing import Iterator

import numpy as np

from dsoftmax.recognition.common.preflight import opencv
from dsoftmax.recognition.data.images import (
    ARCFACE_TEMPLATE,
    decode,
    encode,
    similarity_transform,
)
from dsoftmax.recognition.data.synthetic.head_shape import (
    HEAD_DEPTH,
    HEAD_TOP,
    TEMPLATE_SIZE,
    HeadShape,
    eyes,
    look_up,
    mouth,
    mouth_corner,
)
from dsoftmax.recognition.data.synthetic.painting import (
    CIRCLE,
    Stroke,
    at_depth,
    band,
    blend,
    clamp,
    ellipse,
    fill,
)
from dsoftmax.recognition.data.synthetic.people import Photo

cv2 = opencv()

RAY_STEP = 2  # pixels between rays; shape and light vary slowly enough
TRACE_STEPS = 1.0, 0.7, 0.7, 0.7  # full steps can oscillate where the relief is steep


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
        """Return the factor of the colour, (..., 3), on surfaces that face the given way."""
        lit = np.maximum(0.15 + 0.85 * facing(self.direction, x, y, z), 0)  # as by a wide lamp
        return self.ambient + lit[..., None] * self.lamp

    def on_relief(self, depth: np.ndarray, zoom: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the factor of the colour (n, n, 3) and the gloss (n, n), from the depth (n, n)."""
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
    """Return the cosines between a direction (3,) and normals given by their components."""
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
    """Yield long hair, the neck, and the ears behind the head's outline."""
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
    """Yield ears that face the viewer (front), or those that the head partly hides."""
    for side, strokes in head.ears.items():
        if (camera.rotation[2, 0] * side > 0.05) == front:
            factor = light.on(side * 0.7, 0, 0.7)
            yield from ((points, colour * factor) for points, colour in strokes)


def accessories(
    head: HeadShape, light: Light, photo: Photo, rng: np.random.Generator
) -> Iterator[Stroke]:
    """Yield glasses and objects that hide a part of the face: a hand, a scarf or a box."""
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
    """Yield spectacles, or sunglasses if the photo has them."""
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
