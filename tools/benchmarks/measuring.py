"""The description of a machine, and a process of its own for each contender."""

from __future__ import annotations

import multiprocessing
import os
import platform
from pathlib import Path
from typing import Any, Callable

from dsoftmax.recognition.common.cli import default_threads


def describe_machine() -> dict[str, Any]:
    """Return what figures were measured on."""
    processor = platform.processor() or platform.machine()
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    named = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": named[0] if named else processor,
        "cores": default_threads(),
        "memory_gb": round(memory / (1 << 30)),
    }


def _serve(connection, make: Callable, arguments: tuple) -> None:
    """Answer with the results of an object's methods."""
    try:
        made = make(*arguments)
        connection.send(None)
        while True:
            connection.send(getattr(made, connection.recv())())
    except (KeyboardInterrupt, EOFError):
        pass  # the parent has the say
    except Exception as error:  # to be raised where the user sees it
        connection.send(error)


class Apart:
    """An object in a process of its own, so that its memory can be measured.

    Parameters
    ----------
    make : callable
        Makes the object, in the process.
    *arguments
        Its arguments.
    """

    def __init__(self, make: Callable, *arguments):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self._receive()
        except BaseException:
            self.stop()
            raise

    def ask(self, method: str) -> Any:
        """Return what a method of the object returns; what it raises is raised."""
        self._connection.send(method)
        return self._receive()

    def _receive(self) -> Any:
        try:
            answer = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            raise ValueError(
                f"a process ended with exit code {self._process.exitcode}, if it is -9 most likely "
                "for want of memory"
            ) from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def stop(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.join()
