"""Read mutants in child processes, so that a crash, a hang or too much memory is noticed.

The process that calls `run` must have imported all readers and run nothing of MXNet: children are
forks, which need no second for their imports.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import resource
import signal
import tempfile
import traceback
from typing import Any, NamedTuple

from tests.fuzz.formats import FORMATS, Format
from tests.fuzz.mutations import mutate

SECONDS = 10  # of CPU per mutant
SECONDS_OF_WAITING = 60  # per mutant, on a machine that may be busy
MEMORY = 1 << 30  # bytes that a mutant may add to the process
REFUSALS = (ValueError, OSError, SystemExit)  # SystemExit: argparse has named the flag


class Failure(NamedTuple):
    """A mutant that was not handled."""

    format: str
    number: int
    what: str  # the file and its mutations
    why: str

    def __str__(self) -> str:
        return f"{self.format} {self.number} ({self.what}): {self.why}"


class Outcome(NamedTuple):
    """How the mutants of one format ended."""

    read: int
    refused: int
    failures: list[Failure]


def run(name: str, numbers: range, seed: int = 0) -> Outcome:
    """Read the mutants of a format; a child that ends is replaced by another one.

    Parameters
    ----------
    name : str
        The format's.
    numbers : range
        Of the mutants. The same number and seed make the same mutant.
    seed : int
    """
    read = refused = 0
    failures: list[Failure] = []
    numbers = list(numbers)
    while numbers:
        receiver, sender = multiprocessing.Pipe(duplex=False)
        child = multiprocessing.get_context("fork").Process(
            target=_read_mutants, args=(name, numbers, seed, sender)
        )
        child.start()
        sender.close()
        now = "the sound sample"
        is_done = False
        with contextlib.suppress(EOFError):
            while receiver.poll(SECONDS_OF_WAITING):
                kind, number, what = receiver.recv()
                if kind == "done":
                    is_done = True
                    break
                if kind == "begin":
                    now = what
                    numbers.remove(number)
                elif kind == "failed":
                    failures.append(Failure(name, number, now, what))
                else:
                    read += kind == "read"
                    refused += kind == "refused"
        if not is_done:
            child.terminate()
            child.join(5)
            child.kill()
            child.join()
            failures.append(Failure(name, number_of(now), now, _cause(child.exitcode)))
            if now == "the sound sample":
                break
        child.join()
    return Outcome(read, refused, failures)


def number_of(what: str) -> int:
    """Return the number of a mutant from its description; -1 for the sound sample."""
    head, _, _ = what.partition(":")
    return int(head) if head.isdecimal() else -1


def _cause(code: int | None) -> str:
    if code == -signal.SIGPROF:
        return f"it took more than {SECONDS} s"
    if code == -signal.SIGTERM:
        return f"nothing happened for {SECONDS_OF_WAITING} s"
    name = signal.Signals(-code).name if code and code < 0 else f"exit code {code}"
    return f"the process died of {name}"


def _read_mutants(name: str, numbers: list[int], seed: int, sender: Any) -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    one = FORMATS[name]
    with tempfile.TemporaryDirectory() as folder:
        one.write(folder)
        sound = {}
        for file in one.files:
            with open(os.path.join(folder, file), "rb") as stream:
                sound[file] = stream.read()
        expected = one.read(folder)
        for number in numbers:
            draw = random.Random(f"{seed} {name} {number}")
            file = draw.choice(one.files)
            mutations, content = mutate(sound[file], draw)
            sender.send(("begin", number, f"{number}: {file}, {mutations}"))
            path = os.path.join(folder, file)
            with open(path, "wb") as stream:
                stream.write(content)
            sender.send(_read(one, folder, expected, number))
            with open(path, "wb") as stream:
                stream.write(sound[file])
    sender.send(("done", -1, ""))


def _limit_memory() -> None:
    """Let the process grow by `MEMORY`, from the size that it has now."""
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.RLIM_INFINITY))


def _read(one: Format, folder: str, expected: Any, number: int) -> tuple[str, int, str]:
    """Read a mutant; return ("read" or "refused" or "failed", its number, why)."""
    _limit_memory()
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends the process
    try:
        found = one.read(folder)
    except REFUSALS as error:
        if isinstance(error, SystemExit) or _names_a_file(str(error), one, folder):
            return "refused", number, ""
        return "failed", number, f"the message names no file: {_tail(error)}"
    except BaseException as error:
        return "failed", number, _tail(error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if one.is_checked and found != expected:
        return "failed", number, "it was read as something else without a word"
    return "read", number, ""


def _names_a_file(message: str, one: Format, folder: str) -> bool:
    names = {os.path.splitext(os.path.basename(file))[0] for file in one.files}
    names |= {folder, *(["--"] if one.flags else [])}
    return any(name in message for name in names)


def _tail(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-1:1:-1]
    places = " < ".join(f"{os.path.basename(one.filename)}:{one.lineno}" for one in frames)
    message = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {message} ({places})"
