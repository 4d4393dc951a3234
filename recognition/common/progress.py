"""Show the progress of a long job: a bar on a terminal, some lines in a log."""

from __future__ import annotations

import sys
from typing import Iterable

from tqdm import tqdm

SECONDS_BETWEEN_LOG_LINES = 10.0


class _LogLines(tqdm):
    """tqdm's counting and estimates, printed as whole lines instead of a redrawn bar."""

    @staticmethod
    def status_printer(file):
        """Return the function that prints one state."""

        def print_status(status: str) -> None:
            if status:
                print(status, file=file, flush=True)

        return print_status

    def close(self) -> None:
        """Print the last state; the inherited method would print carriage returns."""
        if not self.disable:
            self.display()
            self.disable = True
            self._decr_instances(self)


def progress(
    items: Iterable | None = None, total: int | None = None, desc: str = "", unit: str = "items"
) -> tqdm:
    """Iterate over `items` and show how far it is, how fast, and the time left, on stderr.

    Parameters
    ----------
    items : iterable, optional
        The items of the job. Without them, call ``update(n)`` on the result.
    total : int, optional
        Number of items; by default ``len(items)``.
    desc, unit : str
        What is being done ("decoding"), to what ("images").

    Returns
    -------
    tqdm
        Iterates over the same items; a context manager.
    """
    options = {"total": total, "desc": desc, "unit": f" {unit}"}
    if sys.stderr.isatty():
        return tqdm(items, dynamic_ncols=True, smoothing=0.1, **options)
    return _LogLines(
        items,
        ncols=78,
        ascii=True,
        mininterval=SECONDS_BETWEEN_LOG_LINES,
        miniters=1,
        bar_format="{desc}: {n_fmt}/{total_fmt}{unit} [{elapsed}<{remaining}, {rate_fmt}]",
        **options,
    )
