"""What every command shares: errors in one line, numbers people can read."""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import sys
from fractions import Fraction
from typing import Any, Callable

from dsoftmax.recognition.common.files import AtomicFile


def command(main: Callable) -> Callable[..., int]:
    """Turn a command's expected failures into one line on stderr and exit code 2.

    ``main(argv=None)`` parses, calls and prints. A ``ValueError`` (bad input), an ``OSError``
    (files, disks) or an ``ImportError`` (an extra that is not installed) is the user's to mend
    and needs no traceback; anything else is a defect and keeps its own.
    """

    @functools.wraps(main)
    def run(argv: list[str] | None = None) -> int:
        try:
            return main(argv) or 0
        except BrokenPipeError:  # `command | head`: the reader has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except (ValueError, OSError, ImportError) as error:
            name = main.__module__.split(".")[-1]
            if name == "__main__":
                name = os.path.splitext(os.path.basename(sys.argv[0]))[0]
            print(f"{name}: error: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("\ninterrupted; nothing half-written was left behind", file=sys.stderr)
            return 130

    return run


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``--json [FILE]``: for machines, instead of what is printed for people."""
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write everything found as JSON to a file, or print it",
    )


def print_json(found: Any, path: str) -> None:
    """Write what ``--json`` asks for to its file, or to stdout for "-"."""
    text = json.dumps(_finite(found), indent=2, allow_nan=False) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    with AtomicFile(path, "w") as file:
        file.write(text)


def _finite(found: Any) -> Any:
    """Put null in the place of NaN and infinity, which JSON does not know."""
    if isinstance(found, dict):
        return {key: _finite(value) for key, value in found.items()}
    if isinstance(found, (list, tuple)):
        return [_finite(value) for value in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found


def default_threads() -> int:
    """Count the cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def image_size(text: str) -> tuple[int, int]:
    """Parse a flag's ``112,112`` (height, width) or ``112``."""
    try:
        height, width = (int(number) for number in (text.split(",") * 2)[:2])
    except ValueError:
        height = width = 0
    if not (0 < height <= 4096 and 0 < width <= 4096 and text.count(",") < 2):
        raise argparse.ArgumentTypeError(
            f"an image size is height,width like 112,112, not {text!r}"
        )
    return height, width


def rate(text: str) -> float:
    """Parse a flag's ``1/64`` or ``0.015625``."""
    try:
        value = float(Fraction(text))
    except (ValueError, ZeroDivisionError):
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"a rate is a number in (0, 1] or 1/64, not {text!r}")
    return value


def some_of(entries: list[str], most: int = 10) -> str:
    """Lay out the first of many messages, a line each, and count the rest."""
    lines = [f"  {entry}" for entry in entries[:most]]
    if len(entries) > most:
        lines.append(f"  ... and {len(entries) - most} more")
    return "\n".join(lines)
