"""Functions that every command uses: parsing, errors in one line, ``--json``."""

from __future__ import annotations

import argparse
import functools
import io
import json
import math
import os
import sys
from fractions import Fraction
from typing import Any, Callable, Sequence

from dsoftmax.recognition.common.files import AtomicFile
from dsoftmax.recognition.common.preflight import require

DISPATCHER = "dsoftmax"  # the installed command that starts all others, see tools/dispatcher.py

# What exceptions mean that say nothing themselves.
REASONS = {
    MemoryError: "there is not enough memory",
    EOFError: "a file ends before it should",
}


def command(
    main: Callable | None = None,
    *,
    parser: Callable[[], argparse.ArgumentParser] | None = None,
    parse: Callable[[list[str] | None], Any] | None = None,
    needs: Sequence[str] = (),
) -> Callable:
    """Turn a function into a command: parse the flags, check the libraries, run, report errors.

    A ``ValueError`` (bad input), an ``OSError`` (files, disks) or an ``ImportError`` (a library
    that is missing) is for the user to mend: it becomes one line on stderr and exit code 2. Any
    other exception is a defect and keeps its traceback.

    Parameters
    ----------
    main : callable
        ``main(args)``, which calls the library and prints; its exit code, or None for 0.
    parser : callable, optional
        Returns the parser that makes `args`.
    parse : callable, optional
        Makes `args` of the arguments, where that takes more than a parser. Without either, `main`
        gets the arguments unparsed.
    needs : sequence of {"mxnet", "opencv"}
        Libraries without which the command can't work. They are imported after the flags were
        parsed, so that ``--help`` and mistyped flags are answered at once.

    Returns
    -------
    callable
        ``main(argv=None)``, which returns the exit code.

    Examples
    --------
    >>> @command(parser=lambda: argparse.ArgumentParser(prog="greet"))
    ... def main(args):
    ...     print("hello")
    >>> main([])
    hello
    0
    """
    if main is None:
        return functools.partial(command, parser=parser, parse=parse, needs=needs)
    if parser:

        def parse(argv):
            return parser().parse_args(argv)

    @functools.wraps(main)
    def run(argv: list[str] | None = None) -> int:
        if isinstance(sys.stdout, io.TextIOWrapper):  # names of files may be no text
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            args = parse(argv) if parse else argv
            require(needs)
            return main(args) or 0
        except BrokenPipeError:  # `command | head`: the reader has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except (ValueError, OSError, ImportError, MemoryError, EOFError) as error:
            name = main.__module__.split(".")[-1]
            if name == "__main__":
                name = os.path.splitext(os.path.basename(sys.argv[0]))[0]
            print(f"{program_name(name)}: error: {_reason(error)}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("\ninterrupted; nothing half-written was left behind", file=sys.stderr)
            return 130

    return run


def _reason(error: Exception) -> str:
    """Say what is wrong; of a file, its name and the system's words, without their number."""
    if isinstance(error, OSError) and error.filename is not None and error.filename2 is None:
        return f"{error.filename}: {error.strerror}"
    return str(error) or REASONS.get(type(error), type(error).__name__)


def program_name(name: str) -> str:
    """Return what a user has typed for a command: ``dsoftmax train``, or ``train`` for a script."""
    return sys.argv[0] if sys.argv[0] == f"{DISPATCHER} {name}" else name


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of the description and appends the default to the help of a flag."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        is_switch = default is None or default is False or default in ("", [], argparse.SUPPRESS)
        if is_switch or "default" in text:
            return text
        if isinstance(default, (list, tuple)):
            default = " ".join(map(str, default))
        return f"{text} (default: {default})".lstrip()


def make_parser(name: str, description: str, **options: Any) -> argparse.ArgumentParser:
    """Make a parser whose help shows the default of each flag.

    Parameters
    ----------
    name : str
        The command's.
    description : str
        The docstring of its module, with at least one example.
    **options
        Other arguments of ``argparse.ArgumentParser``.
    """
    return argparse.ArgumentParser(
        prog=program_name(name), description=description, formatter_class=_Help, **options
    )


def add_json_flag(parser: argparse._ActionsContainer) -> None:
    """Add ``--json [FILE]``, which writes all results as JSON."""
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write all results as JSON to FILE, or print them if FILE is left out",
    )


def add_report_flag(parser: argparse._ActionsContainer) -> None:
    """Add ``--report FILE``, which writes a page to look at."""
    parser.add_argument(
        "--report", metavar="FILE.html", help="write a page with figures, which needs no other file"
    )


def add_threads_flag(parser: argparse._ActionsContainer, what: str = "decoding threads") -> None:
    """Add ``--threads``, by default the number of cores."""
    parser.add_argument("--threads", type=int, default=default_threads(), metavar="N", help=what)


def print_json(results: Any, path: str) -> None:
    """Write results to the file that ``--json`` names, or to stdout for "-"."""
    text = json.dumps(_finite(results), indent=2, allow_nan=False) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    with AtomicFile(path, "w") as file:
        file.write(text)


def _finite(results: Any) -> Any:
    """Replace NaN and infinity, which JSON does not know, by null."""
    if isinstance(results, dict):
        return {key: _finite(value) for key, value in results.items()}
    if isinstance(results, (list, tuple)):
        return [_finite(value) for value in results]
    return None if isinstance(results, float) and not math.isfinite(results) else results


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
    except (ValueError, ZeroDivisionError, OverflowError):
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"a rate is a number in (0, 1] or 1/64, not {text!r}")
    return value


def cosine(text: str) -> float:
    """Parse a flag's cosine.

    Verification prints the squared distance beside each threshold: it must not pass for a cosine.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not -1 <= value <= 1:
        raise argparse.ArgumentTypeError(
            f"a cosine is a number from -1 to 1, not {text!r}; a squared distance d is the cosine "
            "1 - d / 2"
        )
    return value


def some_of(entries: list[str], most: int = 10) -> str:
    """Lay out the first of many messages, one per line, and count the rest."""
    lines = [f"  {entry}" for entry in entries[:most]]
    if len(entries) > most:
        lines.append(f"  ... and {len(entries) - most} more")
    return "\n".join(lines)
