"""One process of a job: start it, pass its output on, signal it, explain how it ended."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from typing import IO, NamedTuple, Sequence

from dsoftmax.recognition.common.distributed import heartbeat
from dsoftmax.recognition.common.stopping import lose
from dsoftmax.tools.launcher.hosts import LOCAL, Place

LOST = 255  # ssh's exit code for a lost host
LAST_LINES = 10
PIPE_BYTES = 1 << 20  # more than a pipe holds
BEGUN = b"launch: logged in"
HEARTBEAT = heartbeat.MARK.encode()
STATE = b"launch: state: "
# What it means for a process that others wait for if Linux says that it is...
STATES = {
    "stopped": "is stopped",
    "tracing stop": "is stopped by a debugger",
    "disk sleep": "waits for a disk",
}

# Announces itself, then runs "$2"... in folder "$1" as a new process group. Each line of stdin is a
# signal for the group, or asks for the state of the process. At the end of stdin, which also comes
# if the launcher or ssh is killed, it kills the group. It is one line without single quotes, so
# that any login shell accepts it.
WRAPPER = (
    f'echo "{BEGUN.decode()}"; cd "$1" || exit 2; shift; exec 3<&0; '
    'setsid "$@" </dev/null 3<&- & child=$!; exec 2>/dev/null; '
    'send() { kill -s "$1" -- "-$child" || kill -s "$1" "$child"; }; '  # not a group yet
    f'tell() {{ echo "{STATE.decode()}$(grep State: "/proc/$child/status")"; }}; '
    "{ while read -r name; do case $name in STATE) tell;; *) send $name;; esac; done; "
    "send KILL; } <&3 & watcher=$!; "
    'wait "$child"; status=$?; kill -s KILL -- "-$child" "$watcher"; exit "$status"'
)


class Lines:
    """Joins the pieces that a pipe delivers into lines; keeps the last text of redrawn lines."""

    def __init__(self):
        self._rest = b""

    def add(self, data: bytes) -> list[bytes]:
        """Add a piece and return the lines that are complete now."""
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = _last_piece(rest)
        return [_last_piece(line).rstrip(b"\r") for line in lines]

    def end(self) -> list[bytes]:
        """Return the rest, after the last complete line."""
        return self.add(b"\n") if self._rest else []


def _last_piece(line: bytes) -> bytes:
    """Cut off text that a carriage return has overwritten; one at the end has not done so yet."""
    return line[line.rstrip(b"\r").rfind(b"\r") + 1 :]


def _write(line: bytes) -> None:
    """Print a line; if nobody reads any more, let the job save and leave."""
    try:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
    except OSError:
        lose(sys.stdout)


class Failure(NamedTuple):
    """Why a job did not end well.

    Attributes
    ----------
    place : Place or None
        The process that failed, if it is known.
    how : str
        Which one it was, and what happened.
    code : int
        An exit code, never 0.
    complaints : sequence of str
        Its last lines on stderr.
    """

    place: Place | None
    how: str
    code: int
    complaints: Sequence[str] = ()


class Process:
    """One process of the job, run by the wrapper, here or by ssh on another host.

    Parameters
    ----------
    place : Place
    words : sequence of str
        The command.
    environment : dict of str to str
        Variables to add to its environment.
    ssh : sequence of str
        How to reach another host.
    """

    def __init__(
        self, place: Place, words: Sequence[str], environment: dict[str, str], ssh: Sequence[str]
    ):
        self.place = place
        self.has_begun = False
        self.code: int | None = None
        self.ended_at = math.inf
        self.activity = ""  # as it was last heard of
        self.heard_at = -math.inf
        self.state: str | None = None  # as Linux calls it; None until it answers `ask_for_state`
        self.complaints: deque[str] = deque(maxlen=LAST_LINES)
        pairs = [f"{name}={value}" for name, value in environment.items()]
        words = ["sh", "-c", WRAPPER, "launch", os.getcwd(), "env", *pairs, *words]
        if place.host not in LOCAL:
            words = [*ssh, place.host, " ".join(map(shlex.quote, words))]
        self._popen = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self._lines = {self._popen.stdout: Lines(), self._popen.stderr: Lines()}
        for pipe in self._lines:
            os.set_blocking(pipe.fileno(), False)

    @property
    def pipes(self) -> list[IO[bytes]]:
        """The pipes that it has not closed."""
        return [pipe for pipe in self._lines if not pipe.closed]

    def pass_on(self, pipe: IO[bytes]) -> None:
        """Print the lines that a pipe holds, each after the name of the process."""
        data = pipe.read(PIPE_BYTES)
        if data:
            self._print(pipe, self._lines[pipe].add(data))
        elif data is not None:  # None: nothing yet; empty: the end
            self._close(pipe)

    def _print(self, pipe: IO[bytes], lines: Sequence[bytes]) -> None:
        for line in lines:
            if line == BEGUN and not self.has_begun:
                self.has_begun = True
                continue
            if line.startswith(STATE):
                self.state = line.decode(errors="replace").partition("(")[2].rstrip(")")
                continue
            line, mark, activity = line.partition(HEARTBEAT)
            if mark:
                self.activity, self.heard_at = activity.decode(errors="replace"), time.monotonic()
                if not line:
                    continue
            _write(f"[{self.place}] ".encode() + line + b"\n")
            if pipe is self._popen.stderr:
                self.complaints.append(line.decode(errors="replace"))

    def _close(self, pipe: IO[bytes]) -> None:
        self._print(pipe, self._lines[pipe].end())
        pipe.close()

    def has_ended(self) -> bool:
        """Say whether the process has ended; if so, print its last lines."""
        if self.code is None and self._popen.poll() is not None:
            self.code, self.ended_at = self._popen.returncode, time.monotonic()
            self._popen.stdin.close()
            for pipe in self.pipes:
                self.pass_on(pipe)
            for pipe in self.pipes:  # a process that left the group may still hold them open
                self._close(pipe)
        return self.code is not None

    def terminate(self) -> None:
        """Send SIGTERM to its process group, also if it is stopped."""
        self.wake()
        self._tell(b"TERM\n")

    def wake(self) -> None:
        """Send SIGCONT to its process group."""
        self._tell(b"CONT\n")

    def ask_for_state(self) -> None:
        """Have `state` told, by a process that is not concerned."""
        self._tell(b"STATE\n")

    def _tell(self, line: bytes) -> None:
        if self.code is None:
            with contextlib.suppress(OSError):  # it is just leaving
                self._popen.stdin.write(line)

    def kill(self) -> None:
        """Send SIGKILL to its process group."""
        self._popen.stdin.close()

    def abandon(self) -> None:
        """Kill the local ssh of a process whose host is gone."""
        self._popen.kill()
        self._popen.wait()
        self.has_ended()

    @property
    def name(self) -> str:
        """Its role and rank, and its host if that is another one."""
        return f"{self.place}{self._where}"

    @property
    def _where(self) -> str:
        return "" if self.place.host in LOCAL else f" on {self.place.host}"

    def what_is_wrong(self) -> str | None:
        """Say why it gets no further, as far as its state tells."""
        if self.state is None:
            return "does not answer"
        return STATES.get(self.state)

    def failure(self) -> Failure:
        """Say which process it was and how it ended."""
        code = 128 - self.code if self.code < 0 else self.code or 1  # as a shell counts
        try:
            how = f"was killed by {signal.Signals(code - 128).name}"
        except ValueError:
            how = f"left with exit code {self.code}"
            if self.code == 0:
                others = "other " if self.place.role == "worker" else ""
                how += f" before the {others}workers did"
            elif self.code == LOST and self._where:
                how += ", as ssh does if the host is lost"
        return Failure(self.place, f"{self.name} {how}", code, self.complaints)
