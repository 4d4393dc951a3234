"""A head on parameter servers, in turns with one process: ``bench_loss --distributed``.

`bench_loss` has the launcher start it again, as the servers and workers of a job on loopback. They
answer through a Unix socket, whose bytes loopback does not count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Callable, Sequence

import numpy as np
from mxnet import nd

from dsoftmax.recognition.common.distributed import job
from dsoftmax.recognition.common.distributed.group import Group
from dsoftmax.recognition.common.distributed.parameter_server import server
from dsoftmax.recognition.common.memory import available_bytes
from dsoftmax.recognition.common.progress import progress
from dsoftmax.tools.benchmarks.measuring import Apart

if TYPE_CHECKING:
    from dsoftmax.tools.bench_loss import Bench, Contender

WORKERS = SERVERS = 2
PEERS = ("host", "device")  # stores of one process
PARTS = ("pull", "compute", "collectives", "push")
TRAFFIC = ("pulled", "pushed", "summed")
SOCKET = "DSOFTMAX_BENCH"  # environment: where the processes of a job meet who started it
INTERFACES = Path("/proc/net/dev")
SECONDS_BETWEEN_LOOKS = 0.5
BYTES_OF_INDEX = 8  # of a row
BYTES_OF_PROCESS = 1 << 29  # beside class weights and momenta
RAW_BYTES = 1 << 26
MEGABYTE = 1 << 20
REMARKS = """\
x host: of steps that are neighbours in time; pull: of the rows a step uses; collectives: sums over
the workers; push: of the gradients, until the servers have updated; compute: all the rest. To wait
for another worker is part of what it is waited in. Each worker has as many threads as one process,
and all share the cores. summed: sent and returned."""


def is_in_job() -> bool:
    """Say whether a `Job` has started this process."""
    return SOCKET in os.environ


def serve() -> None:
    """Be a server of a job, or its scheduler."""
    with _meet():
        server.serve()


def work(make: Callable[[Group], Bench]) -> None:
    """Be a worker of a job: measure what is asked for, as long as somebody asks.

    Parameters
    ----------
    make : callable
        Makes the bench of this worker, given the group.
    """
    with _meet() as talk:
        worker = Worker(make(job.join("dist_sync")))
        print(json.dumps(None), file=talk, flush=True)
        for method in talk:
            print(json.dumps(getattr(worker, method.strip())()), file=talk, flush=True)


def _meet() -> IO[str]:
    """Reach who started the job, and tell who this is."""
    with socket.socket(socket.AF_UNIX) as own:
        own.connect(os.environ[SOCKET])
        talk = own.makefile("rw")  # keeps it open
    who = {
        "role": os.environ["DMLC_ROLE"],
        "rank": int(os.environ.get("DSOFTMAX_RANK", 0)),
        "pid": os.getpid(),
    }
    print(json.dumps(who), file=talk, flush=True)
    return talk


class Worker:
    """Steps of a head whose class weights are on servers, and what they are made of.

    Parameters
    ----------
    bench : Bench
        Of this worker's share of the classes.
    """

    def __init__(self, bench: Bench):
        self._bench = bench
        self._seconds: Counter = Counter()
        self._bytes: Counter = Counter()
        self._is_apart = False
        store = bench.head.store
        row = 4 * store.shape[1] + BYTES_OF_INDEX
        self._pull = store.pull
        store.pull = self._watch(store.pull, "pull", "pulled", lambda rows: len(rows) * row)
        store.push = self._watch(store.push, "push", "pushed", lambda rows, _: len(rows) * row)
        store.group.sum_arrays = self._watch(
            store.group.sum_arrays,
            "collectives",
            "summed",
            lambda _, arrays: sum(2 * 4 * array.size for array in arrays),  # there and back
        )
        bench.wait = self._wait_for_servers

    def _watch(self, method: Callable, part: str, traffic: str, count: Callable) -> Callable:
        """Return a method that counts its bytes and, where parts are apart, takes its time."""

        def call(*arguments) -> Any:
            self._bytes[traffic] += count(*arguments)
            if not self._is_apart:
                return method(*arguments)
            nd.waitall()
            started = time.perf_counter()
            result = method(*arguments)
            nd.waitall()
            self._seconds[part] += time.perf_counter() - started
            return result

        return call

    def _wait_for_servers(self) -> None:
        """Wait until the weights are new: servers answer a push before its update is done."""
        started = time.perf_counter()
        nd.waitall()
        self._pull(np.zeros(1, np.int64)).wait_to_read()
        self._seconds["push"] += time.perf_counter() - started

    def step(self) -> dict[str, float]:
        """Train on a batch; return the ``seconds`` it took, and its bytes by `TRAFFIC`."""
        self._seconds.clear()
        self._bytes.clear()
        seconds = self._bench.step()["step"]
        return {"seconds": seconds, **{kind: self._bytes[kind] for kind in TRAFFIC}}

    def parts(self) -> dict[str, float]:
        """Train on a batch, one part after the other; return the seconds of `PARTS`."""
        self._is_apart = True
        seconds = self.step()["seconds"]
        self._is_apart = False
        self._seconds["compute"] = seconds - sum(self._seconds.values())
        return {part: self._seconds[part] for part in PARTS}


class Job:
    """A job on loopback: to be asked as an `Apart`, with an answer of each worker.

    Parameters
    ----------
    argv : sequence of str
        The flags of `bench_loss`.
    """

    def __init__(self, argv: Sequence[str]):
        self._folder = tempfile.TemporaryDirectory()
        self._errors = open(os.path.join(self._folder.name, "errors"), "w+")  # noqa: SIM115
        self._talks: list[IO[str]] = []
        self._workers: dict[int, IO[str]] = {}  # by rank
        self._servers: list[int] = []  # process ids
        path = os.path.join(self._folder.name, "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            listener.settimeout(SECONDS_BETWEEN_LOOKS)
            self._launcher = subprocess.Popen(
                [
                    *(sys.executable, "-m", "dsoftmax.tools.launch"),
                    *("-n", str(WORKERS), "-s", str(SERVERS), "--grace", "0"),
                    *("--env", f"{SOCKET}={path}", "--"),
                    *(sys.executable, "-m", "dsoftmax.tools.bench_loss", *argv),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                start_new_session=True,  # Ctrl-C is for this process, which stops the job
            )
            try:
                for _ in range(1 + SERVERS + WORKERS):
                    self._welcome(listener)
                self._answers()
            except BaseException:
                self.stop()
                raise

    def _welcome(self, listener: socket.socket) -> None:
        """Wait for another process of the job."""
        while True:
            try:
                accepted = listener.accept()[0]
                break
            except socket.timeout:
                if self._launcher.poll() is not None:
                    self._fail()
        with accepted:
            talk = accepted.makefile("rw")  # keeps it open
        self._talks.append(talk)
        who = json.loads(talk.readline())
        if who["role"] == "worker":
            self._workers[who["rank"]] = talk
        elif who["role"] == "server":
            self._servers.append(who["pid"])
        else:
            self._scheduler = who["pid"]

    def ask(self, method: str) -> list[dict[str, float]]:
        """Return what a method of `Worker` returns, which all workers call at once."""
        with contextlib.suppress(OSError):  # who is gone does not answer either
            for talk in self._workers.values():
                print(method, file=talk, flush=True)
        return self._answers()

    def _answers(self) -> list[Any]:
        lines = []
        with contextlib.suppress(OSError):
            lines = [self._workers[rank].readline() for rank in range(WORKERS)]
        if not (lines and all(lines)):
            self._fail()
        return [json.loads(line) for line in lines]

    def _fail(self) -> None:
        """Raise what the launcher has to say of a job that has ended."""
        self._launcher.wait()
        self._errors.seek(0)
        raise ValueError(f"the job on servers has ended; {self._errors.read().strip()}")

    def memory(self) -> tuple[list[int], int]:
        """Return the bytes that each server holds, and the scheduler, which has no arrays."""
        files = [Path(f"/proc/{pid}/statm") for pid in (*self._servers, self._scheduler)]
        pages = [int(file.read_text(encoding="ascii").split()[1]) for file in files]
        *servers, scheduler = (number * os.sysconf("SC_PAGE_SIZE") for number in pages)
        return servers, scheduler

    def stop(self) -> None:
        """End all processes."""
        self._launcher.terminate()
        self._launcher.wait()
        for talk in self._talks:
            with contextlib.suppress(OSError):  # if a question could not be sent
                talk.close()
        self._errors.close()
        self._folder.cleanup()


def measure(
    contender: Contender,
    make: Callable[[Contender], Bench],
    argv: Sequence[str],
    warm_ups: int,
    steps: int,
) -> dict[str, Any]:
    """Let a job on servers take turns with processes that have all class weights.

    Parameters
    ----------
    contender : Contender
        What is measured, wherever its class weights are.
    make : callable
        Makes the bench of one process.
    argv : sequence of str
        As of `Job`.
    warm_ups, steps : int
        How many do not count, and how many do.

    Returns
    -------
    dict
        The contender's fields; what `summarize` finds; ``workers`` and ``servers``;
        ``server_bytes`` that each server holds, ``server_ratio`` of their sum to class weights and
        momenta, and ``empty_bytes`` that a process without arrays holds.
    """
    peers = [dataclasses.replace(contender, store=store) for store in PEERS]
    check_memory(peers)
    total = 1 + len(peers) + warm_ups + steps
    bar = progress(total=total, desc=f"{contender.classes:,} classes", unit="turns")
    with bar, contextlib.ExitStack() as stack:
        job = Job(argv)
        stack.callback(job.stop)
        bar.update(1)
        alone = []
        for peer in peers:
            alone.append(Apart(make, peer))
            stack.callback(alone[-1].stop)
            bar.update(1)
        turns = []
        for _ in range(warm_ups + steps):
            turns.append(take_turn(job, alone))
            bar.update(1)
        server_bytes, empty_bytes = job.memory()
    return {
        **dataclasses.asdict(contender),
        "store": "server",
        "workers": WORKERS,
        "servers": SERVERS,
        **summarize(turns[warm_ups:]),
        "server_bytes": server_bytes,
        "server_ratio": sum(server_bytes) / (2 * contender.bytes_of_weights),
        "empty_bytes": empty_bytes,
    }


def check_memory(peers: Sequence[Contender]) -> None:
    """Refuse what does not fit into memory: the peers, and as much as one of them on servers."""
    need = sum(peer.bytes_needed for peer in peers) + 2 * peers[0].bytes_of_weights
    need += (WORKERS + SERVERS) * BYTES_OF_PROCESS
    if need > available_bytes():
        raise ValueError(
            f"{peers[0].name} with {peers[0].classes:,} classes, on servers and twice in one "
            f"process, needs about {need / 1e9:.1f} GB, and {available_bytes() / 1e9:.1f} GB are "
            "free: choose fewer --classes"
        )


def take_turn(job: Job, alone: Sequence[Apart]) -> dict[str, Any]:
    """Measure a step of each."""
    seconds = {store: peer.ask("step")["step"] for store, peer in zip(PEERS, alone)}
    before = loopback_bytes()
    steps = job.ask("step")
    return {
        **seconds,
        "steps": steps,
        "loopback": loopback_bytes() - before,
        "parts": job.ask("parts"),
        "raw": seconds_of_raw_bytes(),
    }


def summarize(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of what was measured.

    Returns
    -------
    dict
        ``seconds``, ``low`` and ``high`` of a step of the job, and ``ratio`` to one process with
        its weights in the host's memory; the same of ``one_process`` by its store; ``parts``:
        seconds by `PARTS` of a step in which they wait for each other; ``traffic``: a step's bytes
        by `TRAFFIC`, of each worker; ``loopback``: ``bytes`` of a step as the interface has counted
        them (NaN if it does not), their ``ratio`` to the workers', and ``raw_seconds`` that the
        workers' take on one connection.
    """
    # A step is done when all workers are; a part is what it is on average.
    host = [turn["host"] for turn in turns]
    steps = [max(worker["seconds"] for worker in turn["steps"]) for turn in turns]
    moved = [sum(worker[kind] for worker in turn["steps"] for kind in TRAFFIC) for turn in turns]
    return {
        **spread(steps, host),
        "one_process": {store: spread([turn[store] for turn in turns], host) for store in PEERS},
        "parts": {
            part: statistics.median(
                statistics.mean(worker[part] for worker in turn["parts"]) for turn in turns
            )
            for part in PARTS
        },
        "traffic": {
            kind: [
                statistics.median(turn["steps"][rank][kind] for turn in turns)
                for rank in range(WORKERS)
            ]
            for kind in TRAFFIC
        },
        "loopback": {
            "bytes": statistics.median(turn["loopback"] for turn in turns),
            "ratio": statistics.median(turn["loopback"] / own for turn, own in zip(turns, moved)),
            "raw_seconds": statistics.median(
                turn["raw"] * own / RAW_BYTES for turn, own in zip(turns, moved)
            ),
        },
    }


def spread(seconds: Sequence[float], host: Sequence[float]) -> dict[str, float]:
    """Return the median, the least, the most and the ratio to the host's of the same turns."""
    return {
        "seconds": statistics.median(seconds),
        "low": min(seconds),
        "high": max(seconds),
        "ratio": statistics.median(own / other for own, other in zip(seconds, host)),
    }


def loopback_bytes() -> float:
    """Return what loopback has carried up to now; NaN where the system does not tell."""
    try:
        lines = INTERFACES.read_text(encoding="ascii").splitlines()
    except OSError:
        return math.nan
    return next((int(line.split()[1]) for line in lines if line.split()[0] == "lo:"), math.nan)


def seconds_of_raw_bytes() -> float:
    """Return the seconds in which one connection of loopback carries `RAW_BYTES`."""
    content, memory = b"." * RAW_BYTES, bytearray(MEGABYTE)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        sender = socket.create_connection(listener.getsockname())
        receiver = listener.accept()[0]
    with sender, receiver:
        thread = threading.Thread(target=sender.sendall, args=(content,))
        started = time.perf_counter()
        thread.start()
        left = RAW_BYTES
        while left:
            left -= receiver.recv_into(memory)
        seconds = time.perf_counter() - started
        thread.join()
    return seconds


def tables(found: dict[str, Any]) -> str:
    """Lay out what `measure` returns."""
    return "\n\n".join((time_table(found), part_table(found), traffic_table(found), REMARKS))


def time_table(found: dict[str, Any]) -> str:
    """Lay out the times of a step, in one process and of the job."""
    rows = {f"one process, store={store}": own for store, own in found["one_process"].items()}
    rows[f"{found['workers']} workers, {found['servers']} servers"] = found
    lines = [f"{found['name']:28}{'ms':>9}{'low-high':>13}{'x host':>9}"]
    for name, own in rows.items():
        between = f"{own['low'] * 1e3:.0f}-{own['high'] * 1e3:.0f}"
        lines.append(f"{name:28}{own['seconds'] * 1e3:9.1f}{between:>13}{own['ratio']:9.2f}")
    return "\n".join(lines)


def part_table(found: dict[str, Any]) -> str:
    """Lay out where the time of the job's steps goes."""
    whole = sum(found["parts"].values())
    lines = [f"{'its parts, one at a time':28}{'ms':>9}{'share':>13}"]
    for part, seconds in found["parts"].items():
        lines.append(f"{part:28}{seconds * 1e3:9.1f}{seconds / whole:13.0%}")
    return "\n".join(lines)


def traffic_table(found: dict[str, Any]) -> str:
    """Lay out what travels in a step and what the servers hold."""
    lines = [f"{'MB a step':28}" + "".join(f"{kind:>9}" for kind in TRAFFIC)]
    for rank in range(found["workers"]):
        cells = (f"{found['traffic'][kind][rank] / MEGABYTE:9.2f}" for kind in TRAFFIC)
        lines.append(f"{f'worker {rank}':28}" + "".join(cells))
    loopback = found["loopback"]
    if math.isfinite(loopback["ratio"]):
        lines.append(
            f"loopback has counted {loopback['bytes'] / MEGABYTE:.2f} MB, {loopback['ratio']:.3f} "
            "times as much."
        )
    raw = f"{loopback['raw_seconds'] * 1e3:.1f} ms"
    held = " + ".join(f"{size / MEGABYTE:,.0f}" for size in found["server_bytes"])
    return "\n".join(
        [
            *lines,
            f"One connection of loopback carries as much in {raw}.",
            f"The servers hold {held} MB, {found['server_ratio']:.2f} times weights and momenta; "
            f"without arrays one holds {found['empty_bytes'] / MEGABYTE:,.0f} MB.",
        ]
    )
