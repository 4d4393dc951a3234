"""The installed command ``dsoftmax``: starts every script of this tree by its name.

A module of `recognition`, `eval` or `tools` is a command if it can be run as a script; the first
sentence of its docstring describes it.
"""

from __future__ import annotations

import ast
import re
import runpy
import sys
from pathlib import Path
from typing import NamedTuple

from dsoftmax.recognition.common.checks import did_you_mean
from dsoftmax.recognition.common.cli import DISPATCHER

FOLDERS = ("recognition", "eval", "tools")
IS_SCRIPT = re.compile(r"^if __name__ == ['\"]__main__['\"]:", re.MULTILINE)


class Command(NamedTuple):
    """A script: its module, and what it does."""

    module: str
    summary: str


def find_commands() -> dict[str, Command]:
    """Return all commands by name, folder by folder."""
    root = Path(__file__).resolve().parent.parent
    commands = {}
    for folder in FOLDERS:
        for path in sorted((root / folder).glob("*.py")):
            source = path.read_text(encoding="utf-8")
            if IS_SCRIPT.search(source):
                docstring = ast.get_docstring(ast.parse(source))
                summary = docstring.partition("\n\n")[0].replace("\n", " ")
                commands[path.stem] = Command(f"dsoftmax.{folder}.{path.stem}", summary)
    return commands


def list_commands(commands: dict[str, Command]) -> str:
    """Lay out all commands, one per line."""
    width = max(map(len, commands))
    lines = [f"  {name:{width}}  {command.summary}\n" for name, command in commands.items()]
    return (
        f"usage: {DISPATCHER} command [flags]\n\n{''.join(lines)}\n"
        f"`{DISPATCHER} command --help` explains the flags of a command."
    )


def main() -> int:
    """List the commands, or run one of them as its script would run.

    Returns
    -------
    int
        The exit code.
    """
    commands = find_commands()
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(list_commands(commands))
        return 0
    if name not in commands:
        hint = did_you_mean(name, commands)
        print(f"{DISPATCHER}: error: there is no command {name!r}{hint}", file=sys.stderr)
        return 2
    sys.argv = [f"{DISPATCHER} {name}", *arguments]
    runpy.run_module(commands[name].module, run_name="__main__")
    return 0
