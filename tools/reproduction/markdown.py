"""Pieces of Markdown."""

from __future__ import annotations

from typing import Sequence


def row(cells: Sequence[str]) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(cells)} |"


def bold(text: str) -> str:
    """Return bold text."""
    return f"**{text}**"
