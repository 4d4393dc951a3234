"""Hosts: read their file, deal processes out over them, and check that ssh can log in."""

from __future__ import annotations

import ipaddress
import itertools
import socket
import subprocess
import tempfile
from typing import NamedTuple, Sequence

from dsoftmax.recognition.common.files import open_text
from dsoftmax.recognition.common.parallel import map_ordered

LOCAL = ("localhost", "127.0.0.1")
SECONDS_TO_CONNECT = 8
SECONDS_TO_LOG_IN = 10
SSH_OPTIONS = (
    *("-o", "BatchMode=yes"),
    *("-o", f"ConnectTimeout={SECONDS_TO_CONNECT}"),
    *("-o", "ServerAliveInterval=15"),  # a host that is gone is noticed
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
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            name, *options = words
            slots = options[0][6:] if options and options[0].startswith("slots=") else ""
            is_number = slots.isdecimal() and int(slots) > 0
            is_name = name.isprintable() and not name.startswith(("-", "slots="))
            if len(options) > 1 or (options and not is_number) or not is_name:
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
    except (OSError, UnicodeError) as error:  # the latter for what can't be a name at all
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
    silent = find_silent_hosts(names, ssh)
    if silent:
        raise ValueError("; ".join(silent.values()))


def find_silent_hosts(names: Sequence[str], ssh: Sequence[str]) -> dict[str, str]:
    """Return the hosts that ssh can't log in to, each with the reason as a sentence."""

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

    return {
        name: f"host {name} does not answer {ssh[0]}: {why}"
        for name, why in zip(names, map_ordered(complaint, names, len(names) or 1))
        if why
    }
