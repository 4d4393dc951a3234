"""Checks of what users give, whose errors name what was found, what is legal and what is near."""

from __future__ import annotations

import difflib
import math
from typing import Iterable


def at_least(name: str, value: float, least: float, above: bool = False) -> None:
    """Refuse a number below the least legal one.

    Parameters
    ----------
    name : str
        What the user calls it.
    value : float
    least : float
    above : bool
        Whether `least` itself is illegal, too.
    """
    if not math.isfinite(value) or not (value > least if above else value >= least):
        raise ValueError(f"{name} must be {'above' if above else 'at least'} {least}, not {value}")


def whole_number(name: str, value: float, least: int) -> None:
    """Refuse what is no whole number, or one below the least legal one."""
    if value != int(value) or value < least:
        raise ValueError(f"{name} must be a whole number, {least} or more, not {value!r}")


def did_you_mean(name: str, legal: Iterable[str]) -> str:
    """Return what to say about a name that is not legal: names near to it, and all legal ones.

    Examples
    --------
    >>> did_you_mean("arcfase", ["arcface", "cosface"])
    ', did you mean arcface? Legal are arcface, cosface'
    """
    legal = list(legal)
    near = difflib.get_close_matches(name, legal, n=3)
    hint = f", did you mean {' or '.join(near)}?" if near else "."
    return f"{hint} Legal are {', '.join(legal)}"
