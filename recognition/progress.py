"""Progress of a long job: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
from typing import Iterable, TypeVar

from tqdm import tqdm

T = TypeVar("T")
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


def progress(
    items: Iterable[T], total: int | None = None, desc: str = "", unit: str = "items"
) -> Iterable[T]:
    """Iterate over `items` and show how far it is, how fast, and the time left, on stderr.

    Parameters
    ----------
    items : iterable
        What the job works through.
    total : int, optional
        How many there are; taken from ``len(items)`` where that exists.
    desc, unit : str
        What is being done ("decoding"), to what ("images").

    Returns
    -------
    iterable
        The same items.
    """
    options = {"total": total, "desc": desc, "unit": f" {unit}"}
    if sys.stderr.isatty():
        return tqdm(items, dynamic_ncols=True, smoothing=0.1, **options)
    # `leave=False` because closing would print the last state a second time.
    return _LogLines(
        items,
        ncols=78,
        ascii=True,
        mininterval=SECONDS_BETWEEN_LOG_LINES,
        miniters=1,
        leave=False,
        bar_format="{desc}: {n_fmt}/{total_fmt}{unit} [{elapsed}<{remaining}, {rate_fmt}]",
        **options,
    )
