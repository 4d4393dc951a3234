"""The embedded dataset: faces of people who never lived, as many as wanted, drawn anew anywhere.

Image `j` of identity `i` is a function of (seed, i, j) alone, so a larger dataset begins with the
smaller one. Identities of the verification pairs come from numbers of their own, which no training
set reaches; they are the same for every training set of a seed.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, fields
from typing import Any, Callable, Iterable, Iterator, Sequence

import numpy as np

from dsoftmax.recognition.common.files import AtomicFile
from dsoftmax.recognition.common.parallel import map_ordered
from dsoftmax.recognition.common.progress import progress
from dsoftmax.recognition.data.face_drawing import Head, draw
from dsoftmax.recognition.data.images import decode, encode
from dsoftmax.recognition.data.packs import write_pack
from dsoftmax.recognition.data.records import FLOAT32_EXACT, RecordWriter

FIRST_VAL_IDENTITY = 1 << 31
PAIRS_KEY = (1 << 32) - 1  # an identity's number that no identity has
FOLDS = 10
SHEET_ROWS, SHEET_COLUMNS = 10, 10

# ---- Parameters and their ranges -----------------------------------------------------------------


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
    """Declare a field that seeds the random details its owner has beside the other fields."""
    return _drawn(lambda rng: int(rng.integers(1 << 32)))


@dataclass(frozen=True)
class Identity:
    """What all pictures of a person share.

    Lengths are in pixels of the 112×112 template and halves of the feature, heights are y below
    (above, if negative) the eyes, angles in radians. Tones and colours are places from 0 to 1 on
    the scales of `face_drawing`; what has no other unit is an opacity or a form factor.
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
    """What sets one picture of a person apart from the next; angles in radians."""

    yaw: float = normal(0.0, 0.24)
    pitch: float = normal(0.0, 0.12)
    roll: float = normal(0.0, 0.06)
    shift_x: float = normal(0.0, 1.4)
    shift_y: float = normal(0.0, 1.4)
    scale: float = normal(1.0, 0.04)

    smile: float = uniform(-0.25, 1.0)
    mouth_open: float = mostly_zero(0.4, 0.5, 7.0)
    lids: float = uniform(0.6, 1.1)  # of the identity's own opening
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


# ---- Faces ---------------------------------------------------------------------------------------


def draw_identity(seed: int, identity: int) -> Identity:
    """Draw the parameters of a person."""
    return _sample(Identity, seed, identity, 0)


def draw_photo(seed: int, identity: int, image: int) -> Photo:
    """Draw the circumstances of one picture of a person."""
    return _sample(Photo, seed, identity, image + 1)  # 0 is the identity itself


def draw_face(seed: int, identity: int, image: int, size: int = 112) -> np.ndarray:
    """Draw one picture: (size, size, 3) uint8 in OpenCV's order, blue, green, red."""
    head = Head(draw_identity(seed, identity), size)
    return draw(head, draw_photo(seed, identity, image), size)


def draw_person(seed: int, identity: int, images: Sequence[int], size: int = 112) -> list[bytes]:
    """Draw some pictures of one person, as JPEGs."""
    head = Head(draw_identity(seed, identity), size)
    return [encode(draw(head, draw_photo(seed, identity, image), size)) for image in images]


# ---- The dataset ---------------------------------------------------------------------------------


def choose_pairs(seed: int, identities: int, images: int, pairs: int) -> np.ndarray:
    """Choose distinct verification pairs, of one person and of two in turn.

    Returns
    -------
    (pairs, 2, 2) int64
        Each pair's two (identity, image); the identities are numbered from 0.
    """
    rng = np.random.default_rng((seed, PAIRS_KEY))
    of_identity = images * (images - 1) // 2
    person, number = np.divmod(
        rng.choice(identities * of_identity, pairs // 2, replace=False), of_identity
    )
    same = np.stack([(person, image) for image in _unordered(number)])
    two_images = images * images
    number, rest = np.divmod(
        rng.choice(identities * (identities - 1) // 2 * two_images, pairs // 2, replace=False),
        two_images,
    )
    different = np.stack(list(zip(_unordered(number), np.divmod(rest, images))))
    return np.stack([same, different]).transpose(3, 0, 1, 2).reshape(pairs, 2, 2)


def _unordered(number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Count through the pairs a < b: (0, 1), (0, 2), (1, 2), (0, 3) and so on."""
    b = ((1 + np.sqrt(1 + 8 * number)) / 2).astype(np.int64)
    return number - b * (b - 1) // 2, b


def contact_sheet(rows: Sequence[Sequence[bytes]]) -> np.ndarray:
    """Lay out encoded images of one size, a row each person."""
    return np.vstack(
        [np.hstack([decode(np.frombuffer(image, np.uint8)) for image in row]) for row in rows]
    )


def make_dataset(
    output: str,
    identities: int = 1000,
    images: int = 20,
    val_identities: int = 200,
    pairs: int = 1200,
    seed: int = 1,
    size: int = 112,
    threads: int = 1,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Draw a training set, ``val.bin`` of people who are not in it, and a contact sheet.

    Parameters
    ----------
    output : str
        Folder for ``train.rec``, ``train.idx``, ``property``, ``val.bin`` and ``sheet.png``.
    identities, images : int
        People in training and pictures of each.
    val_identities, pairs : int
        People in the verification pairs, and how many pairs: half of them of one person, so in
        each tenth of the file. Without pairs (0) there is no ``val.bin``.
    seed : int
    size : int
        Height and width of the pictures.
    threads : int
        Processes that draw, if more than one; drawing holds the interpreter's lock. A script that
        asks for several needs the usual ``if __name__ == "__main__"``.
    overwrite : bool
        Replace a dataset that is there.

    Returns
    -------
    dict
        Counts by name (``identities``, ``images``, ``val_identities``, ``pairs``), ``drawn``
        (images in all) and ``seconds``.
    """
    _check_arguments(identities, images, val_identities, pairs, seed, size, threads)
    start = time.perf_counter()
    chosen = choose_pairs(seed, val_identities, images, pairs)
    in_val = _images_of_people(chosen)
    people = itertools.chain(
        ((identity, range(images)) for identity in range(identities)),
        ((FIRST_VAL_IDENTITY + identity, wanted) for identity, wanted in in_val.items()),
    )
    drawn = identities * images + sum(map(len, in_val.values()))
    rows: list[list[bytes]] = []
    val_faces: dict[tuple[int, int], bytes] = {}
    with RecordWriter(output, (size, size), overwrite) as writer:
        with progress(total=drawn, desc="drawing", unit="images") as bar:
            for identity, wanted, faces in _draw_people(people, seed, size, threads):
                bar.update(len(faces))
                if identity >= FIRST_VAL_IDENTITY:
                    keys = ((identity - FIRST_VAL_IDENTITY, image) for image in wanted)
                    val_faces.update(zip(keys, faces))
                    continue
                for face in faces:
                    writer.add(identity, face)
                if len(rows) < SHEET_ROWS:
                    rows.append(faces[:SHEET_COLUMNS])
        # These come first, so that where train.rec is, all files are.
        if pairs:
            encoded = [val_faces[tuple(face)] for face in chosen.reshape(-1, 2).tolist()]
            write_pack(os.path.join(output, "val.bin"), encoded, chosen[:, 0, 0] == chosen[:, 1, 0])
        with AtomicFile(os.path.join(output, "sheet.png")) as sheet:
            sheet.write(encode(contact_sheet(rows), ".png"))
    return {
        "identities": identities,
        "images": identities * images,
        "val_identities": len(in_val),
        "pairs": pairs,
        "drawn": drawn,
        "seconds": time.perf_counter() - start,
    }


def _images_of_people(chosen: np.ndarray) -> dict[int, list[int]]:
    """List which images of which identities the pairs use, in order."""
    people: dict[int, list[int]] = {}
    for identity, image in np.unique(chosen.reshape(-1, 2), axis=0).tolist():
        people.setdefault(identity, []).append(image)
    return people


def _draw_people(
    people: Iterable[tuple[int, Sequence[int]]], seed: int, size: int, threads: int
) -> Iterator[tuple[int, Sequence[int], list[bytes]]]:
    """Yield each person's number, image numbers and images, in order."""
    if threads == 1:
        for identity, wanted in people:
            yield identity, wanted, draw_person(seed, identity, wanted, size)
        return
    context = multiprocessing.get_context("spawn")  # OpenCV's own threads do not outlive a fork
    with ProcessPoolExecutor(threads, context, _leave_interrupts_to_parent) as pool:

        def wait_for(person):
            identity, wanted = person
            return identity, wanted, pool.submit(draw_person, seed, *person, size).result()

        yield from map_ordered(wait_for, people, 2 * threads)  # so that no worker has to wait


def _leave_interrupts_to_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _check_arguments(
    identities: int,
    images: int,
    val_identities: int,
    pairs: int,
    seed: int,
    size: int,
    threads: int,
) -> None:
    ranges = {
        "identities": (identities, 1, FLOAT32_EXACT),
        "images": (images, 2 if pairs else 1, 10_000),
        "val-identities": (val_identities, 2 if pairs else 0, 100_000),
        "pairs": (pairs, 0, 10_000_000),
        "seed": (seed, 0, (1 << 32) - 1),
        "size": (size, 32, 1024),
        "threads": (threads, 1, 1024),
    }
    for name, (value, low, high) in ranges.items():
        if not low <= value <= high:
            raise ValueError(f"--{name} must be from {low} to {high}, not {value}")
    if pairs % (2 * FOLDS):
        raise ValueError(
            f"--pairs must be a multiple of {2 * FOLDS}, not {pairs}: each of the {FOLDS} folds "
            "takes as many pairs of one person as of two"
        )
    available = val_identities * (images * (images - 1) // 2)
    if pairs // 2 > available:
        raise ValueError(
            f"--pairs {pairs} needs {pairs // 2} different pairs of one person, but "
            f"--val-identities {val_identities} with --images {images} have {available}"
        )
