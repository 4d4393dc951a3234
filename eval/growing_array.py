"""A ``.npy`` file that grows row by row and survives a kill."""

from __future__ import annotations

import json
import math
import os
import time
from typing import Any, Sequence

import numpy as np

from dsoftmax.recognition.common.files import AtomicFile, sync

SECONDS_BETWEEN_SAVES = 20.0


class GrowingArray:
    """Appends float32 rows; the state on disk never claims more rows than were written.

    Parameters
    ----------
    path : str
        Of the ``.npy`` file, which has the size of all rows once the last one is written.
    state_path : str
        Of the state, in JSON.
    count : int
        The number of all rows.

    Attributes
    ----------
    done : int
        The number of rows that are written.
    notes : dict of str to list
        What the state says of these rows, as JSON can hold it.
    """

    def __init__(self, path: str, state_path: str, count: int):
        self.path, self._state_path, self._count = path, state_path, count
        self.done, self._row = 0, ()
        self.notes: dict[str, list[Any]] = {}
        if os.path.exists(state_path) and os.path.exists(path):
            self._take_up()

    def _take_up(self) -> None:
        """Take up what an earlier process has left."""
        try:
            with open(self._state_path, encoding="utf-8") as file:
                state = json.load(file)
            if "row" not in state:  # older versions had other states
                return
            done, row, notes = int(state["done"]), tuple(state["row"]), dict(state["notes"])
            written = 4 * done * math.prod(map(int, row))
            if not 0 <= done <= self._count or os.path.getsize(self.path) < written:
                raise ValueError(f"{done} rows are not there")
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(
                f"{self._state_path}: it does not fit {self.path} ({error}): remove both to begin "
                "anew"
            ) from None
        self.done, self._row, self.notes = done, row, notes

    def forget(self) -> None:
        """Begin anew: none of the rows counts."""
        self.done, self._row, self.notes = 0, (), {}

    def open(self, row: tuple[int, ...]) -> None:
        """Get ready to append rows of this shape; rows of another shape are forgotten."""
        if row != self._row:
            self.forget()
            self._row = row
        header = {
            "descr": np.lib.format.dtype_to_descr(np.dtype(np.float32)),
            "fortran_order": False,
            "shape": (self._count, *row),
        }
        self._file = open(self.path, "r+b" if self.done else "wb")  # noqa: SIM115
        np.lib.format.write_array_header_1_0(self._file, header)
        self._file.seek(self.done * 4 * int(np.prod(row)), os.SEEK_CUR)
        self._saved_at = time.monotonic()

    def append(self, rows: np.ndarray, **notes: Sequence[Any]) -> None:
        """Write the next rows, and append what is to be said of them to `notes`."""
        rows = np.ascontiguousarray(rows.reshape(len(rows), *self._row), np.float32)
        self._file.write(rows)
        self.done += len(rows)
        for name, entries in notes.items():
            self.notes.setdefault(name, []).extend(entries)
        if time.monotonic() - self._saved_at > SECONDS_BETWEEN_SAVES:
            self.save()

    def replace(self, number: int, row: np.ndarray) -> None:
        """Write a row anew; change `notes` before."""
        rows = np.load(self.path, mmap_mode="r+")
        rows[number] = row
        rows.flush()
        self._save_state()

    def save(self) -> None:
        """Sync the rows to disk, then the state."""
        sync(self._file)
        self._save_state()
        self._saved_at = time.monotonic()

    def _save_state(self) -> None:
        with AtomicFile(self._state_path, "w") as file:
            json.dump({"done": self.done, "row": self._row, "notes": self.notes}, file)

    def close(self) -> None:
        """Save, and close the file."""
        self.save()
        self._file.close()
