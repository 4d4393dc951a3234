"""Find images that were stored twice, perhaps encoded anew, by a hash of their pixels."""

from __future__ import annotations

import numpy as np

from dsoftmax.recognition.common.parallel import map_ordered
from dsoftmax.recognition.common.preflight import opencv
from dsoftmax.recognition.common.progress import progress
from dsoftmax.recognition.data.images import ImageError, decode
from dsoftmax.recognition.data.recordio import RecordError
from dsoftmax.recognition.data.records import Records

SIDE = 16  # a hash has SIDE * SIDE bits
HASH_BYTES = SIDE * SIDE // 8
BAND_BYTES = 3  # of two hashes that differ in fewer bits than there are bands, one band is equal
MOST_BITS = 16  # in which the hashes of copies differ
MOST_COMPARED = 512  # with one image, within one band
IMAGES_PER_TASK = 64

_ONES = np.array([bin(byte).count("1") for byte in range(256)], np.uint8)


def dhash(image: np.ndarray) -> np.ndarray:
    """Hash an image: whether each spot is brighter than the one to its right.

    Parameters
    ----------
    image : (height, width, 3) uint8

    Returns
    -------
    (HASH_BYTES,) uint8
    """
    cv2 = opencv()
    grey = cv2.cvtColor(image, cv2.COLOR_BGR2GRAY)
    small = cv2.resize(grey, (SIDE + 1, SIDE), interpolation=cv2.INTER_AREA)
    return np.packbits(small[:, :-1] > small[:, 1:])


def hash_images(records: Records, threads: int) -> tuple[np.ndarray, dict[int, str]]:
    """Hash all images of a dataset.

    Returns
    -------
    hashes : (n, HASH_BYTES) uint8
        0 for an image that can't be read.
    unreadable : dict of int to str
        Those images, and why.
    """
    hashes = np.zeros((len(records), HASH_BYTES), np.uint8)

    def hash_some(start: int) -> dict[int, str]:
        unreadable = {}
        for image in range(start, min(start + IMAGES_PER_TASK, len(records))):
            try:
                hashes[image] = dhash(decode(records.read(image)[1]))
            except (ImageError, RecordError) as error:
                unreadable[image] = str(error)
        return unreadable

    starts = range(0, len(records), IMAGES_PER_TASK)
    unreadable: dict[int, str] = {}
    with progress(total=len(records), desc="hashing", unit="images") as bar:
        for start, here in zip(starts, map_ordered(hash_some, starts, threads)):
            unreadable.update(here)
            bar.update(min(IMAGES_PER_TASK, len(records) - start))
    return hashes, unreadable


def near_hashes(hashes: np.ndarray, most_bits: int = MOST_BITS) -> np.ndarray:
    """Find pairs of hashes that differ in few bits, without comparing all pairs.

    Only hashes with an equal band are compared: all pairs that differ in fewer bits than there are
    bands have one, and most of those that differ in a few more. Of more than `MOST_COMPARED` hashes
    with an equal band, only neighbours in the order of the whole hash are compared.

    Parameters
    ----------
    hashes : (n, bytes) uint8
    most_bits : int

    Returns
    -------
    (m, 2) int64
        The smaller number first, sorted.
    """
    found = [np.empty((0, 2), np.int64)]
    by_hash = np.lexsort(hashes.T)
    for start in range(0, hashes.shape[1], BAND_BYTES):
        in_band = hashes[:, start : start + BAND_BYTES].astype(np.uint32)
        band = in_band @ (1 << 8 * np.arange(in_band.shape[1], dtype=np.uint32))
        order = by_hash[np.argsort(band[by_hash], kind="stable")]
        band = band[order]
        places = np.arange(len(order))
        for distance in range(1, MOST_COMPARED):
            places = places[places < len(order) - distance]
            places = places[band[places] == band[places + distance]]
            if not len(places):
                break
            one, other = order[places], order[places + distance]
            near = _ONES[hashes[one] ^ hashes[other]].sum(axis=1, dtype=np.int64) <= most_bits
            found.append(np.sort(np.stack([one[near], other[near]], axis=1), axis=1))
    return np.unique(np.concatenate(found), axis=0)
