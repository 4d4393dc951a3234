"""Run each contender in its own process."""

from __future__ import annotations

import multiprocessing
from typing import Any, Callable


def _serve(connection, make: Callable, arguments: tuple) -> None:
    """Call the methods that the parent names and send it their results."""
    try:
        instance = make(*arguments)
        connection.send(None)
        while True:
            connection.send(getattr(instance, connection.recv())())
    except (KeyboardInterrupt, EOFError):
        pass  # the parent decides what happens now
    except Exception as error:  # the parent raises it again, where the user sees it
        connection.send(error)


class Isolated:
    """An object in its own process, so that its memory can be measured.

    Parameters
    ----------
    make : callable
        Makes the object, in the new process.
    *arguments
        Arguments of `make`.

    Examples
    --------
    >>> numbers = Isolated(list)
    >>> numbers.call("copy")
    []
    >>> numbers.stop()
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

    def call(self, method: str) -> Any:
        """Call a method of the object; return its result or raise its error."""
        self._connection.send(method)
        return self._receive()

    def _receive(self) -> Any:
        try:
            answer = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            raise ValueError(
                f"a process ended with exit code {self._process.exitcode}; -9 most likely means "
                "that memory ran out"
            ) from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def stop(self) -> None:
        """End the process."""
        self._connection.close()  # its end: a process that waits for a call leaves in order
        self._process.join(timeout=5)
        self._process.terminate()
        self._process.join()
