"""Tell whether saved states are what was written, and if not, which file and which block is not.

python tools/verify_state.py --state models/r50-dsoftmax-emore
python tools/verify_state.py --state models/r50-dsoftmax-emore/states/state-00020000 --json
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any, Callable

from dsoftmax.recognition.common.cli import add_json_flag, command, print_json, some_of
from dsoftmax.recognition.common.progress import progress
from dsoftmax.recognition.states import DESCRIPTION, FILES, UnknownFormatError, check_state


def find_states(folder: str) -> list[str]:
    """Return the paths of the states in a state's, a run's or its states' folder, by name.

    Damaged states that a run has set aside, and half-written ones, are among them.
    """
    if any(os.path.exists(os.path.join(folder, name)) for name in (DESCRIPTION, *FILES)):
        return [folder]
    inner = os.path.join(folder, "states")
    if os.path.isdir(inner):
        folder = inner
    found = [
        entry.path
        for entry in os.scandir(folder)
        if entry.is_dir() and entry.name.startswith("state-")
    ]
    if not found:
        raise FileNotFoundError(
            f"{folder}: there are no states in it; give the folder of a state or of a run"
        )
    return sorted(found)


def verify(paths: list[str]) -> list[dict[str, Any]]:
    """Check states; return what was found of each, as JSON-able values."""
    read = 0

    def report(count: int) -> None:
        nonlocal read
        bar.update((read + count >> 20) - (read >> 20))
        read += count

    with progress(None, total=sum(map(_size, paths)) >> 20, desc="reading", unit="MB") as bar:
        return [_verify(path, report) for path in paths]


def _verify(path: str, report: Callable[[int], None]) -> dict[str, Any]:
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
    """Say what was found of a state."""
    if not state["is_sound"]:
        problems = [f"{problem['file']}: {problem['why']}" for problem in state["problems"]]
        return f"{state['path']}: damaged\n{some_of(problems)}"
    found = f"{state['path']}: sound, step {state['step']}, {state['bytes']:,} bytes"
    if not state["has_checksums"]:
        found += "; it has no checksums: only sizes were checked"
    return found


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        prog="verify_state",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="The exit code is 1 where a state is not sound.",
    )
    parser.add_argument(
        "--state", required=True, metavar="FOLDER", help="a state's folder, or a run's: all of them"
    )
    add_json_flag(parser)
    return parser


@command
def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    args = build_parser().parse_args(argv)
    found = verify(find_states(args.state))
    if args.json:
        print_json(found, args.json)
    else:
        for state in found:
            print(lines(state))
    return 0 if all(state["is_sound"] for state in found) else 1


if __name__ == "__main__":
    sys.exit(main())
