"""Check that saved states are undamaged; if not, name the damaged files and blocks.

    python tools/verify_state.py --state models/r50-dsoftmax-emore
    python tools/verify_state.py --state models/r50-dsoftmax-emore/states/state-00020000 --json

The exit code is 1 if a state is damaged.
"""

from __future__ import annotations

if not __package__:
    import require_dsoftmax

import argparse
import os
import sys
from typing import Any, Callable

from dsoftmax.recognition.common.cli import (
    add_json_flag,
    command,
    make_parser,
    print_json,
    some_of,
)
from dsoftmax.recognition.common.progress import progress
from dsoftmax.recognition.states import DESCRIPTION, FILES, UnknownFormatError, check_state


def find_states(folder: str) -> list[str]:
    """Return the paths of all states in the folder of a state, a run or a run's states, by name.

    They include damaged states that a run has set aside, and half-written ones.
    """
    if any(os.path.exists(os.path.join(folder, name)) for name in (DESCRIPTION, *FILES)):
        return [folder]
    inner = os.path.join(folder, "states")
    if os.path.isdir(inner):
        folder = inner
    paths = [
        entry.path
        for entry in os.scandir(folder)
        if entry.is_dir() and entry.name.startswith("state-")
    ]
    if not paths:
        raise FileNotFoundError(
            f"{folder}: there are no states in it; give the folder of a state or of a run"
        )
    return sorted(paths)


def check_states(paths: list[str]) -> list[dict[str, Any]]:
    """Check states; return one result per state, as values for JSON."""
    read = 0

    def report(count: int) -> None:
        nonlocal read
        bar.update((read + count >> 20) - (read >> 20))
        read += count

    with progress(None, total=sum(map(_size, paths)) >> 20, desc="reading", unit="MB") as bar:
        return [_check(path, report) for path in paths]


def _check(path: str, report: Callable[[int], None]) -> dict[str, Any]:
    try:
        check = check_state(path, report)
    except UnknownFormatError as error:
        problem = {"file": DESCRIPTION, "block": None, "why": str(error).partition(": ")[2]}
        return {"path": path, "is_sound": False, "problems": [problem]}
    return {
        "path": path,
        "is_sound": check.is_sound,
        "step": check.step,
        "bytes": check.size,
        "has_checksums": check.has_checksums,
        "problems": [problem._asdict() for problem in check.problems],
    }


def _size(path: str) -> int:
    names = (os.path.join(path, name) for name in FILES)
    return sum(os.path.getsize(name) for name in names if os.path.exists(name))


def lines(state: dict[str, Any]) -> str:
    """Lay out the result of one state."""
    if not state["is_sound"]:
        problems = [f"{problem['file']}: {problem['why']}" for problem in state["problems"]]
        return f"{state['path']}: damaged\n{some_of(problems)}"
    line = f"{state['path']}: sound, step {state['step']}, {state['bytes']:,} bytes"
    if not state["has_checksums"]:
        line += "; it has no checksums: only sizes were checked"
    return line


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = make_parser("verify_state", __doc__)
    parser.add_argument(
        "--state",
        required=True,
        metavar="FOLDER",
        help="folder of a state, or of a run: all states",
    )
    add_json_flag(parser)
    return parser


@command(parser=build_parser)
def main(args: argparse.Namespace) -> int:
    """Run the command."""
    results = check_states(find_states(args.state))
    if args.json:
        print_json(results, args.json)
    else:
        for state in results:
            print(lines(state))
    return 0 if all(state["is_sound"] for state in results) else 1


if __name__ == "__main__":
    sys.exit(main())
