"""Check values that users give; errors name the value, the legal range and similar names."""

from __future__ import annotations

import difflib
import math
from typing import Iterable


def at_least(name: str, value: float, least: float, above: bool = False) -> None:
    """Refuse a number below the least legal one.

    Parameters
    ----------
    name : str
        The user's name of the value.
    value : float
    least : float
    above : bool
        Whether `least` itself is refused, too.
    """
    if not math.isfinite(value) or not (value > least if above else value >= least):
        raise ValueError(f"{name} must be {'above' if above else 'at least'} {least}, not {value}")


def whole_number(name: str, value: float, least: int) -> None:
    """Refuse a number that is not whole, or below the least legal one."""
    if value != int(value) or value < least:
        raise ValueError(f"{name} must be a whole number, {least} or more, not {value!r}")


def did_you_mean(name: str, legal: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: similar names, and all legal ones.

    Examples
    --------
    >>> did_you_mean("arcfase", ["arcface", "cosface"])
    ', did you mean arcface? Legal are arcface, cosface'
    """
    legal = list(legal)
    near = difflib.get_close_matches(name, legal, n=3)
    hint = f", did you mean {' or '.join(near)}?" if near else "."
    return f"{hint} Legal are {', '.join(legal)}"
