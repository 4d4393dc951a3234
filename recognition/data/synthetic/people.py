"""Who a face belongs to (`Identity`) and how its picture was taken (`Photo`), drawn at random.

A field declares how it is drawn. What comes out depends on (seed, identity, image) alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Callable

import numpy as np


def _drawn(sample: Callable[[np.random.Generator], Any]) -> Any:
    return field(metadata={"sample": sample})


def uniform(low: float, high: float) -> Any:
    """Declare a field drawn evenly between two values."""
    return _drawn(lambda rng: rng.uniform(low, high))


def normal(mean: float, deviation: float) -> Any:
    """Declare a field drawn around a mean, cut off at 2.2 deviations."""
    return _drawn(lambda rng: mean + deviation * max(-2.2, min(rng.standard_normal(), 2.2)))


def mostly_zero(chance: float, low: float, high: float) -> Any:
    """Declare a field that is 0, except by the given chance evenly between two values."""
    return _drawn(lambda rng: rng.uniform(low, high) if rng.random() < chance else 0.0)


def one_of(*options: Any) -> Any:
    """Declare a field that is one of the options, each as likely."""
    return _drawn(lambda rng: options[rng.integers(len(options))])


def any_seed() -> Any:
    """Declare a field that seeds further random details."""
    return _drawn(lambda rng: int(rng.integers(1 << 32)))


@dataclass(frozen=True)
class Identity:
    """Everything that all pictures of a person share.

    Lengths are in pixels of the 112×112 template and halves of the feature, heights are y below
    (above, if negative) the eyes, angles in radians. Tones and colours are places from 0 to 1 on
    the scales of `head_shape`; what has no other unit is an opacity or a form factor.
    """

    head_width: float = normal(42.0, 2.0)
    chin: float = normal(62.0, 2.5)  # height
    jaw_squareness: float = uniform(1.9, 3.8)
    jaw_taper: float = uniform(0.0, 0.22)
    brow_ridge: float = uniform(0.0, 3.0)
    cheekbones: float = uniform(0.0, 4.0)
    chin_relief: float = uniform(1.0, 5.0)
    socket_depth: float = uniform(2.0, 5.5)

    skin_tone: float = uniform(0.0, 1.0)
    skin_redness: float = uniform(-0.05, 0.05)
    blush: float = uniform(0.0, 0.25)
    eye_bags: float = mostly_zero(0.5, 0.1, 0.35)
    freckles: float = mostly_zero(0.25, 20.0, 90.0)  # their number
    moles: float = mostly_zero(0.45, 1.0, 4.0)  # their number
    scar: float = mostly_zero(0.08, 3.0, 8.0)

    eye_spacing: float = normal(17.6, 1.3)
    eye_width: float = normal(7.3, 0.8)
    eye_height: float = normal(3.3, 0.6)
    eye_tilt: float = normal(0.04, 0.08)  # outer corner up
    lid_crease: float = uniform(0.5, 4.0)  # above the lid
    lashes: float = uniform(0.4, 1.0)
    iris_size: float = normal(3.7, 0.3)
    iris_colour: float = uniform(0.0, 1.0)

    brow_height: float = normal(10.0, 1.4)  # above the eye
    brow_thickness: float = normal(2.2, 0.7)
    brow_length: float = normal(9.5, 1.2)
    brow_arch: float = uniform(-0.3, 3.0)
    brow_tilt: float = normal(0.03, 0.1)
    brow_strength: float = uniform(0.35, 0.95)

    nose_length: float = normal(20.5, 2.0)  # height of the tip
    nose_width: float = normal(8.4, 1.3)
    nose_relief: float = normal(11.5, 2.0)
    nose_bridge: float = normal(4.4, 0.7)
    nose_hump: float = mostly_zero(0.4, 1.0, 3.0)

    mouth_height: float = normal(40.5, 1.8)
    mouth_width: float = normal(14.6, 1.7)
    upper_lip: float = normal(3.2, 1.0)
    lower_lip: float = normal(4.4, 1.2)
    cupid_bow: float = uniform(0.0, 1.6)
    lip_redness: float = uniform(0.3, 0.9)

    ear_size: float = normal(14.0, 1.8)
    ear_flare: float = uniform(2.0, 7.0)

    hair_colour: float = uniform(0.0, 1.0)
    hair_opacity: float = one_of(1.0, 1.0, 1.0, 1.0, 0.9, 0.45, 0.0)  # to cropped and bald
    hairline: float = normal(-36.0, 3.5)  # height
    hair_peak: float = mostly_zero(0.3, 2.0, 6.0)
    hair_recession: float = mostly_zero(0.25, 4.0, 12.0)
    hair_sweep: float = mostly_zero(0.5, -12.0, 12.0)  # falling to one side
    hair_fringe: float = mostly_zero(0.15, 6.0, 16.0)
    hair_side: float = uniform(1.05, 1.5)  # angle at which it begins beside the face
    hair_end: float = one_of(-12.0, 0.0, 12.0, 90.0, 90.0)  # height at which it ends there
    hair_volume: float = uniform(1.0, 9.0)
    hair_curl: float = uniform(0.0, 1.0)
    moustache: float = mostly_zero(0.15, 0.3, 0.85)
    goatee: float = mostly_zero(0.15, 0.3, 0.85)
    beard: float = mostly_zero(0.15, 0.2, 0.75)
    marks: int = any_seed()

    @property
    def has_long_hair(self) -> bool:
        """Whether hair falls over the ears and down beside the neck."""
        return self.hair_end > 50 and self.hair_opacity > 0


@dataclass(frozen=True)
class Photo:
    """Everything that varies between pictures of a person; angles in radians."""

    yaw: float = normal(0.0, 0.24)
    pitch: float = normal(0.0, 0.12)
    roll: float = normal(0.0, 0.06)
    shift_x: float = normal(0.0, 1.4)
    shift_y: float = normal(0.0, 1.4)
    scale: float = normal(1.0, 0.04)

    smile: float = uniform(-0.25, 1.0)
    mouth_open: float = mostly_zero(0.4, 0.5, 7.0)
    lids: float = uniform(0.6, 1.1)  # relative to the identity's opening
    brow_raise: float = normal(0.0, 1.0)
    gaze: float = normal(0.0, 1.2)

    light_azimuth: float = uniform(-0.9, 0.9)
    light_elevation: float = uniform(-0.2, 1.0)
    light_strength: float = uniform(0.2, 0.7)
    light_warmth: float = normal(0.0, 0.1)
    ambient: float = uniform(0.4, 0.75)
    ambient_warmth: float = normal(0.0, 0.1)
    ambient_tint: float = normal(0.0, 0.05)  # green, or magenta
    gloss: float = uniform(0.0, 0.3)

    glasses: float = mostly_zero(0.15, 0.8, 1.6)  # thickness of the frame
    occlusion: str = one_of(*["none"] * 16, "sunglasses", "hand", "scarf", "box")

    gamma: float = uniform(0.8, 1.3)
    blur: float = mostly_zero(0.35, 0.4, 1.1)
    noise: float = uniform(0.5, 6.0)
    jpeg_quality: float = mostly_zero(0.4, 25.0, 80.0)
    marks: int = any_seed()


def _sample(kind: type, *key: int) -> Any:
    rng = np.random.default_rng(key)
    return kind(**{entry.name: entry.metadata["sample"](rng) for entry in fields(kind)})


def draw_identity(seed: int, identity: int) -> Identity:
    """Draw the parameters of a person."""
    return _sample(Identity, seed, identity, 0)


def draw_photo(seed: int, identity: int, image: int) -> Photo:
    """Draw the circumstances of one picture of a person."""
    return _sample(Photo, seed, identity, image + 1)  # 0 is the identity itself
