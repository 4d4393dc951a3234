"""How a run is asked to stop: by a signal, or by nobody being left to read what it prints."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Any, Iterator, TextIO


def stop_signals() -> list[signal.Signals]:
    """Return the signals that ask a run to save and leave; SIGHUP only without ``nohup``."""
    is_asked_to_stay = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([] if is_asked_to_stay else [signal.SIGHUP])]


def lose(stream: TextIO) -> None:
    """Send what is printed from now on to nowhere, and this process a signal to save and leave."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
    os.kill(os.getpid(), signal.SIGTERM)


class _Lasting:
    """A stream that is `lost <lose>` instead of raising when it can't be written to."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            lose(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            lose(self._stream)


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Go on in a ``with`` block when nobody reads stdout or stderr any more, until it is saved.

    A terminal may be closed, and Ctrl-C ends the ``tee`` behind a run before the run has saved.
    """
    stdout, stderr = _Lasting(sys.stdout), _Lasting(sys.stderr)
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        yield
