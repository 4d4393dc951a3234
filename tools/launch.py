r"""Start a training of many processes on MXNet's parameter server, here or on several hosts.

    python tools/launch.py -n 2 -s 2 -- python -u recognition/train.py --kvstore dist_sync
    python tools/launch.py -n 8 --hosts hosts.txt --restart 3 -- \
        python -u train.py --kvstore dist_sync

The command after -- runs once as the scheduler, once per server and once per worker; DMLC_ROLE
says which one a process is. If one of them dies, all are stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import itertools
import math
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from multiprocessing.connection import wait
from typing import IO, Callable, NamedTuple, Sequence

from dsoftmax.recognition.common.cli import command, make_parser
from dsoftmax.recognition.common.parallel import map_ordered

LOCAL = ("localhost", "127.0.0.1")
REFUSED = (2, 126, 127)  # bad flags or data, a command that can't be run: it would fail again
LOST = 255  # what ssh itself leaves with
LAST_LINES = 10
PIPE_BYTES = 1 << 20  # more than a pipe holds
MOST_LOG_INS = 8  # at once on a host: sshd drops some from the eleventh on, unless told otherwise
BEGUN = b"launch: logged in"

SECONDS_BETWEEN_LOOKS = 0.1
SECONDS_TO_CONNECT = 8
SECONDS_TO_LOG_IN = 10
SECONDS_TO_COME_BACK = 300  # of a host that was lost, before a restart
SECONDS_BETWEEN_TRIES = 5
SECONDS_TO_FOLLOW = 4  # of workers, when another process has left: all part at once
SECONDS_TO_LEAVE = 10  # of servers, when the workers are done
SECONDS_TO_STOP = 5
SECONDS_TO_DIE = 2

SSH_OPTIONS = (
    *("-o", "BatchMode=yes"),
    *("-o", f"ConnectTimeout={SECONDS_TO_CONNECT}"),
    *("-o", "ServerAliveInterval=15"),  # a host that is gone is noticed
)

# Tells that it was reached, then runs "$2"... in folder "$1" as a process group of its own. Each
# line of stdin names a signal to the group. At the end of stdin, which also comes if the launcher
# or ssh is killed, the group is killed. It is one line without single quotes, for whatever login
# shells other hosts have.
WRAPPER = (
    f'echo "{BEGUN.decode()}"; cd "$1" || exit 2; shift; exec 3<&0; '
    'setsid "$@" </dev/null 3<&- & child=$!; exec 2>/dev/null; '
    'send() { kill -s "$1" -- "-$child" || kill -s "$1" "$child"; }; '  # not a group yet
    "{ while read -r name; do send $name; done; send KILL; } <&3 >/dev/null & watcher=$!; "
    'wait "$child"; status=$?; kill -s KILL -- "-$child" "$watcher"; exit "$status"'
)


class Host(NamedTuple):
    """A line of the hosts file; slots are the workers it takes at most, None for any number."""

    name: str
    slots: int | None = None


class Place(NamedTuple):
    """Who runs where: the scheduler, or the server or worker of a rank."""

    role: str
    rank: int
    host: str

    def __str__(self) -> str:
        return self.role if self.role == "scheduler" else f"{self.role} {self.rank}"


def read_hosts(path: str) -> list[Host]:
    """Read one host per line, with or without ``slots=K`` after it; ``#`` begins a comment."""
    hosts = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            name, *options = words
            slots = options[0][6:] if options and options[0].startswith("slots=") else ""
            is_number = slots.isdecimal() and int(slots) > 0
            if len(options) > 1 or (options and not is_number) or name.startswith(("-", "slots=")):
                raise ValueError(
                    f"{path}, line {number}: a line is a host and, if need be, slots=K with K of 1 "
                    f"or more, not {line.strip()!r}"
                )
            hosts.append(Host(name, int(slots) if options else None))
    if not hosts:
        raise ValueError(f"{path}: there is no host in it; a line is a host")
    return hosts


def deal(hosts: Sequence[Host], servers: int, workers: int) -> list[Place]:
    """Deal the processes out over the hosts in turn, the workers as the slots allow."""
    turns = [
        host.name
        for turn in range(workers)
        for host in hosts
        if host.slots is None or turn < host.slots
    ]
    if len(turns) < workers:
        raise ValueError(
            f"the hosts have slots for {len(turns)} workers, not for {workers}: give them more "
            "slots, or fewer --workers"
        )
    names = itertools.cycle(host.name for host in hosts)
    return [
        Place("scheduler", 0, hosts[0].name),
        *(Place("server", rank, host) for rank, host in zip(range(servers), names)),
        *(Place("worker", rank, host) for rank, host in zip(range(workers), turns)),
    ]


def root_address(hosts: Sequence[Host]) -> str:
    """Find the address of the first host, where the scheduler is."""
    first = hosts[0].name
    try:
        address = socket.gethostbyname(first.rpartition("@")[2])
    except OSError as error:
        raise ValueError(f"host {first} has no address: {error}") from None
    others = {host.name for host in hosts} - {first, *LOCAL}
    if others and ipaddress.ip_address(address).is_loopback:
        raise ValueError(
            f"the first host, {first}, is {address} to itself alone: it runs the scheduler and "
            "must be an address that the other hosts reach"
        )
    return address


def find_port(address: str, port: int | None) -> int:
    """Find a free port of this machine, or make sure that a given one is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port or 0))
        except OSError as error:
            raise ValueError(
                f"port {port} of {address} can't be had ({error.strerror}): give another --port, "
                "or none and a free one is taken"
            ) from None
        return probe.getsockname()[1]


def check_hosts(names: Sequence[str], ssh: Sequence[str]) -> None:
    """Refuse hosts that ssh can't log in to, before anything is started."""

    def complaint(name: str) -> str | None:
        with tempfile.TemporaryFile() as said:  # a pipe may be held open by ssh's ControlPersist
            try:
                code = subprocess.run(
                    [*ssh, name, "true"],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=said,
                    timeout=SECONDS_TO_LOG_IN,
                    start_new_session=True,  # Ctrl-C is for the launcher
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                return f"nothing came in {SECONDS_TO_LOG_IN} s"
            said.seek(0)
            lines = said.read().decode(errors="replace").split("\n")
        if code == 0:
            return None
        return next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {code}")

    silent = [
        f"host {name} does not answer {ssh[0]}: {why}"
        for name, why in zip(names, map_ordered(complaint, names, len(names)))
        if why
    ]
    if silent:
        raise ValueError("; ".join(silent))


def wait_for_hosts(names: Sequence[str], ssh: Sequence[str], signals: Signals) -> None:
    """Wait until hosts that were there before are back; refuse them if that takes too long."""
    until = time.monotonic() + SECONDS_TO_COME_BACK
    is_told = False
    while not signals.first:
        try:
            check_hosts(names, ssh)
            break
        except ValueError as error:
            if time.monotonic() > until:
                raise
            if not is_told:
                say(f"waiting up to {SECONDS_TO_COME_BACK:g} s: {error}")
            is_told = True
        pause = time.monotonic() + SECONDS_BETWEEN_TRIES
        while time.monotonic() < pause and not signals.first:
            time.sleep(SECONDS_BETWEEN_LOOKS)


class Lines:
    """The lines that a pipe brings in pieces; of one that was overwritten, the last."""

    def __init__(self):
        self._rest = b""

    def add(self, data: bytes) -> list[bytes]:
        """Take what came and return the lines that are whole now."""
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = _last_piece(rest)
        return [_last_piece(line).rstrip(b"\r") for line in lines]

    def end(self) -> list[bytes]:
        """Return what came after the end of the last line."""
        return self.add(b"\n") if self._rest else []


def _last_piece(line: bytes) -> bytes:
    """Cut off what a carriage return let overwrite; one at the end has not done so yet."""
    return line[line.rstrip(b"\r").rfind(b"\r") + 1 :]


def _write(line: bytes) -> None:
    """Print a line; where nobody reads any more (`| head`) the job is to save and leave."""
    try:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        os.kill(os.getpid(), signal.SIGTERM)


class Process:
    """One process of the job, under the wrapper: here or, by ssh, on another host.

    Parameters
    ----------
    place : Place
    words : sequence of str
        The command.
    environment : dict of str to str
        What it gets beside the environment it finds.
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
        """What it writes to and has not closed."""
        return [pipe for pipe in self._lines if not pipe.closed]

    def pass_on(self, pipe: IO[bytes]) -> None:
        """Print the lines that a pipe holds, each behind the name of the process."""
        data = pipe.read(PIPE_BYTES)
        if data:
            self._print(pipe, self._lines[pipe].add(data))
        elif data is not None:  # None is nothing for now, empty is the end
            self._close(pipe)

    def _print(self, pipe: IO[bytes], lines: Sequence[bytes]) -> None:
        for line in lines:
            if line == BEGUN and not self.has_begun:
                self.has_begun = True
                continue
            _write(f"[{self.place}] ".encode() + line + b"\n")
            if pipe is self._popen.stderr:
                self.complaints.append(line.decode(errors="replace"))

    def _close(self, pipe: IO[bytes]) -> None:
        self._print(pipe, self._lines[pipe].end())
        pipe.close()

    def has_ended(self) -> bool:
        """Look whether it is gone; if so, print the last of it."""
        if self.code is None and self._popen.poll() is not None:
            self.code, self.ended_at = self._popen.returncode, time.monotonic()
            self._popen.stdin.close()
            for pipe in self.pipes:
                self.pass_on(pipe)
            for pipe in self.pipes:  # something that left its process group may write to them
                self._close(pipe)
        return self.code is not None

    def terminate(self) -> None:
        """Send SIGTERM to its process group."""
        if self.code is None:
            with contextlib.suppress(OSError):  # it is just leaving
                self._popen.stdin.write(b"TERM\n")

    def kill(self) -> None:
        """Send SIGKILL to its process group."""
        self._popen.stdin.close()

    def abandon(self) -> None:
        """Kill what runs here of a process that can't be killed: ssh, if its host is gone."""
        self._popen.kill()
        self._popen.wait()
        self.has_ended()

    @property
    def exit_code(self) -> int:
        """What a shell would say: 128 and the number of a signal; never 0."""
        return 128 - self.code if self.code < 0 else self.code or 1

    def how_it_ended(self) -> str:
        """Tell who it was and what became of it."""
        where = "" if self.place.host in LOCAL else f" on {self.place.host}"
        try:
            how = f"was killed by {signal.Signals(self.exit_code - 128).name}"
        except ValueError:
            how = f"left with exit code {self.code}"
            if self.code == 0:
                others = "other " if self.place.role == "worker" else ""
                how += f" before the {others}workers did"
            elif self.code == LOST and where:
                how += ", as ssh does if the host is lost"
        return f"{self.place}{where} {how}"


class Signals:
    """Remembers, in a ``with`` block, the first SIGTERM or SIGINT."""

    def __init__(self):
        self.first: signal.Signals | None = None

    def __enter__(self) -> Signals:
        self._before = {
            number: signal.signal(number, self._remember)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _) -> None:
        self.first = self.first or signal.Signals(number)


class Job:
    """All processes of one start.

    Parameters
    ----------
    places : sequence of Place
    words : sequence of str
        The command, the same for all.
    environment : dict of str to str
        What is the same for all.
    ssh : sequence of str
        How to reach other hosts.
    signals : Signals
        Those to the launcher.
    grace : float
        Seconds the workers have to save and leave after one.
    """

    def __init__(
        self,
        places: Sequence[Place],
        words: Sequence[str],
        environment: dict[str, str],
        ssh: Sequence[str],
        signals: Signals,
        grace: float,
    ):
        self._places, self._words, self._environment, self._ssh = places, words, environment, ssh
        self._signals, self._grace = signals, grace
        self._workers: list[Process] = []
        self._others: list[Process] = []

    @property
    def _processes(self) -> list[Process]:
        return self._others + self._workers

    def run(self) -> Process | None:
        """Start all, and return when none is left.

        Returns
        -------
        Process or None
            The one that failed; None if the workers are done, or a signal came.
        """
        try:
            for place in self._places:
                if not self._may_start(place.host):
                    break
                self._start(place)
            return self._watch()
        finally:
            self._stop()

    def _may_start(self, host: str) -> bool:
        """Wait for those who log in to a host just now; say whether all is well."""
        while True:
            ended = [process for process in self._processes if process.has_ended()]
            if self._signals.first or any(process.code for process in ended):
                return False
            coming = [
                process
                for process in self._processes
                if process.place.host == host and not process.has_begun and process not in ended
            ]
            if host in LOCAL or len(coming) < MOST_LOG_INS:
                return True
            self._look()

    def _start(self, place: Place) -> None:
        is_worker = place.role == "worker"
        environment = {**self._environment, "DMLC_ROLE": place.role}
        if is_worker:
            environment["DSOFTMAX_RANK"] = str(place.rank)
        process = Process(place, self._words, environment, self._ssh)
        (self._workers if is_worker else self._others).append(process)

    def _watch(self) -> Process | None:
        while not self._signals.first:
            self._look()
            ended = [process for process in self._processes if process.has_ended()]
            for process in ended:
                if process.code:
                    return process
            if all(worker in ended for worker in self._workers):
                self._wait(self._others, SECONDS_TO_LEAVE)
                return None
            for process in ended:
                if time.monotonic() - process.ended_at > SECONDS_TO_FOLLOW:
                    return process
        say(f"{self._signals.first.name}: the workers have {self._grace:g} s to save and leave")
        for worker in self._workers:
            worker.terminate()
        self._wait(self._workers, self._grace)
        return None

    def _stop(self) -> None:
        """Ask all that still run to leave, then kill them."""
        for process in self._processes:
            process.terminate()
        self._wait(self._processes, SECONDS_TO_STOP)
        for process in self._processes:
            process.kill()
        self._wait(self._processes, SECONDS_TO_DIE)
        for process in self._processes:
            process.abandon()

    def _wait(self, processes: Sequence[Process], seconds: float) -> None:
        """Wait for the end of some, but no longer than that."""
        until = time.monotonic() + seconds
        while not all(process.has_ended() for process in processes):
            if time.monotonic() > until:
                return
            self._look()

    def _look(self) -> None:
        """Print what the processes have written; wait a moment for it."""
        writers = {pipe: process for process in self._processes for pipe in process.pipes}
        for pipe in wait(writers, SECONDS_BETWEEN_LOOKS):
            writers[pipe].pass_on(pipe)


def say(line: str) -> None:
    """Print a line of the launcher's own."""
    print(f"launch: {line}", file=sys.stderr, flush=True)


def launch(args: argparse.Namespace, words: Sequence[str], signals: Signals) -> int:
    """Run a job, and again after a failure if that is wanted.

    Parameters
    ----------
    args : argparse.Namespace
        The flags.
    words : sequence of str
        The command.
    signals : Signals
        Those to the launcher.

    Returns
    -------
    int
        0, the exit code of the process that failed, or 128 and the number of a signal.
    """
    hosts = read_hosts(args.hosts) if args.hosts else [Host("localhost")]
    address = root_address(hosts)
    servers = args.servers or args.workers
    places = deal(hosts, servers, args.workers)
    elsewhere = list(dict.fromkeys(place.host for place in places if place.host not in LOCAL))
    own = dict(args.env)
    is_used = any(place.host in LOCAL for place in places)
    if is_used and not shutil.which(words[0], path=own.get("PATH")):
        raise ValueError(f"{words[0]}: there is no such command here")
    ssh = [*shlex.split(args.ssh), *SSH_OPTIONS]
    interface = args.interface or ("" if elsewhere else "lo")
    if interface:
        own = {"DMLC_INTERFACE": interface, **own}
    if elsewhere:
        check_hosts(elsewhere, ssh)
    restarts = 0
    while True:
        if hosts[0].name in LOCAL:
            port = find_port(address, args.port)
        else:  # one that is free here is likely to be free there
            port = args.port or find_port("", None)
        environment = {
            "PYTHONUNBUFFERED": "1",
            **own,
            "DMLC_PS_ROOT_URI": address,
            "DMLC_PS_ROOT_PORT": str(port),
            "DMLC_NUM_SERVER": str(servers),
            "DMLC_NUM_WORKER": str(args.workers),
        }
        failed = Job(places, words, environment, ssh, signals, args.grace).run()
        if signals.first:
            return 128 + signals.first
        if failed is None:
            return 0
        how = failed.how_it_ended()
        if restarts == args.restart or failed.code in REFUSED:
            lines = "".join(f"\n  {line}" for line in failed.complaints)
            say(f"error: {how}{'; its last lines on stderr:' if lines else ''}{lines}")
            return failed.exit_code
        restarts += 1
        say(f"restart {restarts} of {args.restart}: {how}")
        if elsewhere:
            wait_for_hosts(elsewhere, ssh, signals)
        if "--resume" not in words:
            words = [*words, "--resume", "auto"]  # it may have failed before its first state


def whole(least: int, most: float = math.inf) -> Callable[[str], int]:
    """Make a parser of whole numbers in a range."""

    def parse(text: str) -> int:
        if text.isdecimal() and least <= int(text) <= most:
            return int(text)
        limits = f"of {least} or more" if most == math.inf else f"from {least} to {most}"
        raise argparse.ArgumentTypeError(f"a whole number {limits} is needed, not {text!r}")

    return parse


def pair(text: str) -> tuple[str, str]:
    """Parse a flag's ``NAME=VALUE``."""
    name, sign, value = text.partition("=")
    if not sign or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"NAME=VALUE is needed, not {text!r}")
    return name, value


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = make_parser("launch", __doc__, usage="launch [flags] -- command")
    job = parser.add_argument_group("job")
    job.add_argument(
        "-n", "--workers", type=whole(1), required=True, help="number of processes that train"
    )
    job.add_argument(
        "-s",
        "--servers",
        type=whole(1),
        help="number of processes that hold the parameters; by default as many as workers",
    )
    job.add_argument(
        "--restart",
        type=whole(0),
        default=0,
        metavar="N",
        help="after a failure, start again with --resume auto, up to N times",
    )
    job.add_argument(
        "--grace",
        type=whole(0),
        default=60,
        metavar="SECONDS",
        help="time to save and leave after SIGTERM or Ctrl-C",
    )
    network = parser.add_argument_group("network")
    network.add_argument(
        "--hosts",
        metavar="FILE",
        help="one host per line, slots=K after it for at most K workers; without it all run here",
    )
    network.add_argument(
        "--ssh", default="ssh", metavar="COMMAND", help="how to reach them, as 'ssh -p 2222'"
    )
    network.add_argument(
        "--port", type=whole(1, 65535), help="the scheduler's; by default a free one"
    )
    network.add_argument(
        "--interface", metavar="NAME", help="the network interface; by default lo if all run here"
    )
    network.add_argument(
        "--env",
        type=pair,
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="environment variables for all processes; other hosts get no others",
    )
    return parser


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the flags before ``--``; ``args.command`` is what follows."""
    argv = sys.argv[1:] if argv is None else argv
    end = argv.index("--") if "--" in argv else len(argv)
    parser = build_parser()
    args = parser.parse_args(argv[:end])
    args.command = argv[end + 1 :]
    if not args.command:
        parser.error("the command to run is missing: it follows --")
    return args


@command(parse=parse)
def main(args: argparse.Namespace) -> int:
    """Run the command."""
    with Signals() as signals:
        return launch(args, args.command, signals)


if __name__ == "__main__":
    sys.exit(main())
