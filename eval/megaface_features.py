"""Read, write and clean MegaFace's features.

A feature file is an OpenCV matrix: four integers (rows D, columns 1, bytes 4, type 5), then D
float32. Cleaned features have one more dimension, which moves noisy distractors far away from all
others.
"""

from __future__ import annotations

import os
from typing import NamedTuple, Sequence

import numpy as np

from dsoftmax.eval import metrics
from dsoftmax.recognition.common.files import open_text
from dsoftmax.recognition.common.parallel import map_ordered
from dsoftmax.recognition.common.progress import progress

NOISE = 100.0  # in the additional dimension
JITTER = 0.001  # noisy probes of one identity must not be the same point
CENTRES_SEED = 0
FILES_PER_BLOCK = 256


def read_feature(path: str) -> np.ndarray:
    """Read one feature file, (D,) float32."""
    content = np.fromfile(path, "<i4")
    if len(content) < 5 or content[0] < 1 or tuple(content[1:4]) != (1, 4, 5):
        raise ValueError(f"{path}: not a MegaFace feature file, or not a whole one")
    if len(content) != 4 + content[0]:
        raise ValueError(
            f"{path}: {content[0]} numbers are announced, {len(content) - 4} are there"
        )
    feature = content[4:].view("<f4")
    if not np.isfinite(feature).all():
        raise ValueError(f"{path}: it holds NaN or infinite numbers")
    return feature


def write_feature(path: str, feature: np.ndarray) -> None:
    """Write one feature file."""
    # Under a temporary name, but not synced: a million syncs take hours.
    temporary = f"{path}.{os.getpid()}.part"
    with open(temporary, "wb") as file:
        file.write(np.array([len(feature), 1, 4, 5], "<i4").tobytes())
        file.write(feature.astype("<f4").tobytes())
    os.replace(temporary, path)


class ImageSet(NamedTuple):
    """FaceScrub or MegaFace: its list and where its images are."""

    name: str  # "facescrub" or "megaface"
    images: list[str]  # relative paths
    root: str = ""

    def feature_paths(self, folder: str, algo: str) -> list[str]:
        """Return the path of each image's feature file."""
        return [os.path.join(folder, self.name, f"{image}_{algo}.bin") for image in self.images]

    def people(self) -> np.ndarray:
        """Return the number of the folder each image is in: in FaceScrub a person, (n,) int."""
        return np.unique([os.path.dirname(image) for image in self.images], return_inverse=True)[1]


def read_list(path: str) -> list[str]:
    """Read relative paths, one per line; skip empty lines and comments (#)."""
    with open_text(path) as file:
        lines = [line.strip() for line in file]
    lines = [os.path.normpath(line) for line in lines if line and not line.startswith("#")]
    if any("\0" in line for line in lines):
        raise ValueError(f"{path}: it is not text, it has bytes that are 0")
    outside = [line for line in lines if os.path.isabs(line) or line.startswith("..")]
    if outside:
        raise ValueError(f"{path}: {outside[0]!r} is outside the images' folder")
    if not lines:
        raise ValueError(f"{path}: there is no image in it")
    return lines


def load_features(images: ImageSet, folder: str, algo: str, threads: int) -> tuple[np.ndarray, ...]:
    """Read all feature files that exist.

    Returns
    -------
    features : (n, D) float32
        The content of the files.
    numbers : (n,) int
        The images that they belong to.
    """
    paths = images.feature_paths(folder, algo)
    width = next((len(read_feature(path)) for path in paths if os.path.exists(path)), 0)
    if not width:
        raise FileNotFoundError(f"{paths[0]}: there is no such file, and none for any other image")

    def read_some(start: int) -> tuple[list[int], np.ndarray]:
        numbers, rows = [], np.empty((FILES_PER_BLOCK, width), np.float32)
        for number in range(start, min(start + FILES_PER_BLOCK, len(paths))):
            try:
                feature = read_feature(paths[number])
            except FileNotFoundError:
                continue
            if len(feature) != width:
                raise ValueError(
                    f"{paths[number]}: {len(feature)} numbers where other files have {width}"
                )
            rows[len(numbers)] = feature
            numbers.append(number)
        return numbers, rows[: len(numbers)]

    features = np.empty((len(paths), width), np.float32)
    existing: list[int] = []
    starts = range(0, len(paths), FILES_PER_BLOCK)
    with progress(total=len(paths), desc=f"reading {images.name}", unit="files") as bar:
        for start, (numbers, rows) in zip(starts, map_ordered(read_some, starts, threads)):
            features[len(existing) : len(existing) + len(rows)] = rows
            existing += numbers
            bar.update(min(FILES_PER_BLOCK, len(paths) - start))
    return features[: len(existing)], np.array(existing)


def read_noises(path: str) -> list[str]:
    """Read a noise list: one name per line, in the last column if there are tabs; # comments."""
    with open_text(path) as file:
        lines = [line.strip() for line in file]
    names = [line.split("\t")[-1].strip() for line in lines if line and line[0] != "#"]
    if not names:
        raise ValueError(f"{path}: there is no name in it")
    return names


def is_noisy(images: Sequence[str], noises: Sequence[str]) -> np.ndarray:
    """Return which images a noise list names, (n,) bool.

    A name is a whole path, the last three parts of one (MegaFace's) or the last one (FaceScrub's).
    """

    def parts(path: str, count: int) -> str:
        return "/".join(path.split("/")[-count:])

    named = {*noises, *(parts(name, 3) for name in noises)}
    return np.array([any(parts(image, n) in named for n in (1, 3, 99)) for image in images], bool)


def clean_probes(features: np.ndarray, people: np.ndarray, noisy: np.ndarray) -> np.ndarray:
    """Replace noisy probes by the centre of their identity, slightly moved.

    Parameters
    ----------
    features : (n, D) float32
        Of length 1.
    people : (n,) int
    noisy : (n,) bool

    Returns
    -------
    (n, D) float32
    """
    draw = np.random.default_rng(CENTRES_SEED)
    cleaned = features.copy()
    for person in np.unique(people[noisy]):
        sound = features[(people == person) & ~noisy]
        if not len(sound):
            raise ValueError(f"all {np.sum(people == person)} images of a person are called noisy")
        centre = metrics.normalized(sound.mean(axis=0, keepdims=True))
        places = np.flatnonzero((people == person) & noisy)
        jitter = draw.uniform(-JITTER, JITTER, (len(places), features.shape[1]))
        cleaned[places] = metrics.normalized(centre + jitter)
    return cleaned


def split_mark(features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Remove the additional dimension of cleaned features, where there is one.

    Returns
    -------
    features : (n, D)
    noisy : (n,) bool
        Whether the additional dimension marked a feature as noisy.
    """
    last = features[:, -1]
    if not np.isin(last, (0, NOISE)).all():
        return features, np.zeros(len(features), bool)
    return features[:, :-1], last == NOISE


def write_cleaned(
    images: ImageSet,
    numbers: np.ndarray,
    features: np.ndarray,
    noisy: np.ndarray,
    folder: str,
    algo: str,
) -> None:
    """Write cleaned features of some images, with a dimension that is 100 in noisy ones."""
    paths = images.feature_paths(folder, algo)
    for parent in {os.path.dirname(paths[number]) for number in numbers}:
        os.makedirs(parent, exist_ok=True)
    for row, number in enumerate(progress(numbers, desc=f"writing {images.name}", unit="files")):
        write_feature(paths[number], np.append(features[row], NOISE if noisy[row] else 0))
