"""Arrays (n, D) that may be larger than memory: rows of files, in any order, some at a time."""

from __future__ import annotations

import mmap
from typing import Iterable, Iterator, Sequence

import numpy as np

ROWS_AT_ONCE = 1 << 12


class Rows:
    """The rows of one or several arrays, one array after the other, as float32.

    Memory holds the rows that were asked for, and nothing else of parts that are views of files.

    Parameters
    ----------
    parts : sequence of (some, D) arrays
        In memory or mapped, as by ``np.load(mmap_mode="r")`` or `map_arrays`.
    order : (n,) int64, optional
        Which of all those rows these are, and in which order; by default all.

    Attributes
    ----------
    shape : (int, int)

    Examples
    --------
    >>> rows = Rows([np.eye(2), np.zeros((1, 2))], order=np.array([2, 0]))
    >>> rows.take([0, 1])
    array([[0., 0.],
           [1., 0.]], dtype=float32)
    """

    def __init__(self, parts: Sequence[np.ndarray], order: np.ndarray | None = None):
        self._parts = list(parts)
        widths = {part.shape[1] for part in self._parts}
        if len(widths) != 1:
            raise ValueError(f"rows of different widths can't be joined: {sorted(widths)}")
        self._borders = np.cumsum([0, *map(len, self._parts)])
        self._order = order
        count = self._borders[-1] if order is None else len(order)
        self.shape = (int(count), widths.pop())

    def __len__(self) -> int:
        return self.shape[0]

    def take(self, index: np.ndarray | Sequence[int]) -> np.ndarray:
        """Read some rows, (m, D) float32."""
        index = np.asarray(index, np.int64)
        if self._order is not None:
            index = self._order[index]
        taken = np.empty((len(index), self.shape[1]), np.float32)
        part_of = np.searchsorted(self._borders, index, side="right") - 1
        for number in np.unique(part_of):
            chosen = part_of == number
            taken[chosen] = _read(self._parts[number], index[chosen] - self._borders[number])
        return taken

    def blocks(self, size: int = ROWS_AT_ONCE) -> Iterator[np.ndarray]:
        """Yield all rows, (some, D) float32 per block, from the first on."""
        for start in range(0, len(self), size):
            yield self.take(np.arange(start, min(start + size, len(self))))

    def whole(self) -> np.ndarray:
        """Return all rows, (n, D) float32: a view of the file if they are one already."""
        if self._order is None and len(self._parts) == 1 and self._parts[0].dtype == np.float32:
            return self._parts[0]
        return self.take(np.arange(len(self)))

    def ordered(self, order: np.ndarray) -> Rows:
        """Return some of these rows, in another order."""
        return Rows(self._parts, order if self._order is None else self._order[order])

    def followed_by(self, other: Rows) -> Rows:
        """Return these rows and those of another one after them."""
        parts = [*self._parts, *other._parts]
        if self._order is None and other._order is None:
            return Rows(parts)
        first, second = (
            np.arange(len(rows)) if rows._order is None else rows._order for rows in (self, other)
        )
        return Rows(parts, np.concatenate([first, second + self._borders[-1]]))


def finite_blocks(blocks: Iterable[np.ndarray], what: str) -> Iterator[np.ndarray]:
    """Yield blocks of rows, (some, D) each; refuse NaN and infinite numbers and say in which row.

    Parameters
    ----------
    blocks : iterable of (some, D) arrays
    what : str
        What a row is, such as "class weight".
    """
    start = 0
    for block in blocks:
        is_finite = np.isfinite(block).all(axis=1)
        if not is_finite.all():
            raise ValueError(f"{what} {start + is_finite.argmin()} holds NaN or infinite numbers")
        start += len(block)
        yield block


def _read(array: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return some rows of an array; those of a view of a file are read, not mapped.

    The system maps many pages around each row that is looked at, and counts them as memory in use.
    """
    is_whole_view = isinstance(array, np.memmap) and isinstance(array.base, mmap.mmap)
    if not (is_whole_view and array.flags.c_contiguous and len(index)):
        return array[index]  # a part of a view does not know where it begins
    taken = np.empty((len(index), array.shape[1]), array.dtype)
    starts = np.flatnonzero(np.diff(index, prepend=-2) != 1)  # of runs of neighbours
    with open(array.filename, "rb", buffering=0) as file:
        for start, stop in zip(starts, [*starts[1:], len(index)]):
            file.seek(array.offset + int(index[start]) * taken[0].nbytes)
            if file.readinto(taken[start:stop]) != taken[start:stop].nbytes:
                raise ValueError(f"{array.filename}: the file has become shorter")
    return taken
