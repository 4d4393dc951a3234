"""What every command shares: errors in one line, numbers people can read."""

from __future__ import annotations

import functools
import os
import sys
from typing import Callable


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


def default_threads() -> int:
    """Count the cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
