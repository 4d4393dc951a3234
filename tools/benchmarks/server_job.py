"""Measure a head on parameter servers, in turns with one process: ``bench_loss --distributed``.

`Job` lets the launcher start ``bench_loss`` again, as the servers and workers of a job on loopback.
They answer through a Unix socket, whose bytes loopback does not count.
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
from typing import IO, Any, Callable, Sequence

import numpy as np
from mxnet import nd

from dsoftmax.recognition.common.distributed import job
from dsoftmax.recognition.common.memory import available_bytes
from dsoftmax.recognition.common.progress import progress
from dsoftmax.tools.benchmarks.job_process import SOCKET, connect
from dsoftmax.tools.benchmarks.loss import Bench, Contender
from dsoftmax.tools.benchmarks.measuring import Isolated

WORKERS = SERVERS = 2
PEERS = ("host", "device")  # stores of one process
PARTS = ("pull", "compute", "collectives", "push")
FETCHING = ("late", "early")  # class rows: after the network has run, and before
TRAFFIC = ("pulled", "pushed", "summed")
INTERFACES = Path("/proc/net/dev")
SECONDS_BETWEEN_POLLS = 0.5
BYTES_OF_INDEX = 8  # of a class row
BYTES_OF_PROCESS = 1 << 29  # besides class weights and momenta
RAW_BYTES = 1 << 26
MEGABYTE = 1 << 20


def work(contender: Contender) -> None:
    """Run this process as a worker of a job: call the methods of `Worker` that `Job.call` names.

    Parameters
    ----------
    contender : Contender
        The head of which this worker has a part.
    """
    with connect() as stream:
        worker = Worker(Bench(contender, job.join("dist_sync")))
        print(json.dumps(None), file=stream, flush=True)
        for method in stream:
            print(json.dumps(getattr(worker, method.strip())()), file=stream, flush=True)


class Worker:
    """Measures steps, and parts of steps, of a head whose class weights are on servers.

    Parameters
    ----------
    bench : Bench
        Runs this worker's part of the head.
    """

    def __init__(self, bench: Bench):
        self._bench = bench
        self._seconds: Counter = Counter()
        self._bytes: Counter = Counter()
        self._waits_between_parts = False
        store = bench.head.store
        row = 4 * store.shape[1] + BYTES_OF_INDEX
        rows, self._pull = store.rows, store.rows.pull
        rows.pull = self._watch(rows.pull, "pull", "pulled", lambda wanted: len(wanted) * row)
        rows.push = self._watch(rows.push, "push", "pushed", lambda changed, _: len(changed) * row)
        store.group.sum_arrays = self._watch(
            store.group.sum_arrays,
            "collectives",
            "summed",
            lambda _, arrays: sum(2 * 4 * array.size for array in arrays),  # there and back
        )
        bench.wait = self._wait_for_servers

    def _watch(self, method: Callable, part: str, traffic: str, count: Callable) -> Callable:
        """Return a method that also counts its bytes and, if parts are measured, its time."""

        def call(*arguments) -> Any:
            self._bytes[traffic] += count(*arguments)
            if not self._waits_between_parts:
                return method(*arguments)
            nd.waitall()
            started = time.perf_counter()
            result = method(*arguments)
            nd.waitall()
            self._seconds[part] += time.perf_counter() - started
            return result

        return call

    def _wait_for_servers(self) -> None:
        """Wait until the weights are updated: servers answer a push before they update."""
        started = time.perf_counter()
        nd.waitall()
        self._pull(np.zeros(1, np.int64)).wait_to_read()
        self._seconds["push"] += time.perf_counter() - started

    def step(self) -> dict[str, float]:
        """Train on a batch; return its ``seconds`` and its bytes by `TRAFFIC`."""
        self._seconds.clear()
        self._bytes.clear()
        seconds = self._bench.step()["step"]
        return {"seconds": seconds, **{kind: self._bytes[kind] for kind in TRAFFIC}}

    def parts(self) -> dict[str, float]:
        """Train on a batch, waiting between parts; return the seconds of `PARTS`."""
        self._waits_between_parts = True
        seconds = self.step()["seconds"]
        self._waits_between_parts = False
        self._seconds["compute"] = seconds - sum(self._seconds.values())
        return {part: self._seconds[part] for part in PARTS}

    def step_fetching_early(self) -> float:
        """See `Bench.step_fetching_early`."""
        return self._bench.step_fetching_early()

    def step_fetching_late(self) -> float:
        """See `Bench.step_fetching_late`."""
        return self._bench.step_fetching_late()


class Job:
    """A job of workers and servers on loopback; call its workers like an `Isolated` object.

    Parameters
    ----------
    argv : sequence of str
        The flags of `bench_loss`.
    """

    def __init__(self, argv: Sequence[str]):
        self._folder = tempfile.TemporaryDirectory()
        self._errors = open(os.path.join(self._folder.name, "errors"), "w+")  # noqa: SIM115
        self._streams: list[IO[str]] = []
        self._workers: dict[int, IO[str]] = {}  # by rank
        self._servers: list[int] = []  # process ids
        path = os.path.join(self._folder.name, "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            listener.settimeout(SECONDS_BETWEEN_POLLS)
            self._launcher = subprocess.Popen(
                [
                    *(sys.executable, "-m", "dsoftmax.tools.launch"),
                    *("-n", str(WORKERS), "-s", str(SERVERS), "--grace", "0"),
                    *("--stall-timeout", "0"),  # it stands still between measurements
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
                    self._accept(listener)
                self._answers()
            except BaseException:
                self.stop()
                raise

    def _accept(self, listener: socket.socket) -> None:
        """Wait until another process of the job connects."""
        while True:
            try:
                accepted = listener.accept()[0]
                break
            except socket.timeout:
                if self._launcher.poll() is not None:
                    self._fail()
        with accepted:
            stream = accepted.makefile("rw")  # keeps it open
        self._streams.append(stream)
        process = json.loads(stream.readline())
        if process["role"] == "worker":
            self._workers[process["rank"]] = stream
        elif process["role"] == "server":
            self._servers.append(process["pid"])
        else:
            self._scheduler = process["pid"]

    def call(self, method: str) -> list[Any]:
        """Call a method of `Worker` on all workers at once; return one result per worker."""
        with contextlib.suppress(OSError):  # a process that is gone will not answer either
            for stream in self._workers.values():
                print(method, file=stream, flush=True)
        return self._answers()

    def _answers(self) -> list[Any]:
        lines = []
        with contextlib.suppress(OSError):
            lines = [self._workers[rank].readline() for rank in range(WORKERS)]
        if not (lines and all(lines)):
            self._fail()
        return [json.loads(line) for line in lines]

    def _fail(self) -> None:
        """Raise an error with the launcher's explanation of why the job ended."""
        self._launcher.wait()
        self._errors.seek(0)
        raise ValueError(f"the job on servers has ended; {self._errors.read().strip()}")

    def memory(self) -> tuple[list[int], int]:
        """Return the bytes that each server uses, and the scheduler, which has no arrays."""
        files = [Path(f"/proc/{pid}/statm") for pid in (*self._servers, self._scheduler)]
        pages = [int(file.read_text(encoding="ascii").split()[1]) for file in files]
        *servers, scheduler = (number * os.sysconf("SC_PAGE_SIZE") for number in pages)
        return servers, scheduler

    def stop(self) -> None:
        """End all processes."""
        self._launcher.terminate()
        self._launcher.wait()
        for stream in self._streams:
            with contextlib.suppress(OSError):  # if a call could not be sent
                stream.close()
        self._errors.close()
        self._folder.cleanup()


def measure(contender: Contender, argv: Sequence[str], warm_ups: int, steps: int) -> dict[str, Any]:
    """Measure a job on servers in turns with single processes that have all class weights.

    Parameters
    ----------
    contender : Contender
        The head to measure, whatever its store is.
    argv : sequence of str
        See `Job`.
    warm_ups, steps : int
        Numbers of steps that do not count, and that do.

    Returns
    -------
    dict
        The contender's fields; the results of `summarize`; ``workers`` and ``servers``;
        ``server_bytes``, the memory of each server, ``server_ratio``, of their sum to class weights
        and momenta, and ``empty_bytes``, the memory of a process without arrays.
    """
    peers = [dataclasses.replace(contender, store=store) for store in PEERS]
    check_memory(peers)
    total = 1 + len(peers) + warm_ups + steps
    bar = progress(total=total, desc=f"{contender.classes:,} classes", unit="turns")
    with bar, contextlib.ExitStack() as stack:
        servers = Job(argv)
        stack.callback(servers.stop)
        bar.update(1)
        alone = []
        for peer in peers:
            alone.append(Isolated(Bench, peer))
            stack.callback(alone[-1].stop)
            bar.update(1)
        turns = []
        for _ in range(warm_ups + steps):
            turns.append(take_turn(servers, alone))
            bar.update(1)
        server_bytes, empty_bytes = servers.memory()
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
    """Refuse contenders that do not fit into memory, together with a copy on servers."""
    need = sum(peer.bytes_needed for peer in peers) + 2 * peers[0].bytes_of_weights
    need += (WORKERS + SERVERS) * BYTES_OF_PROCESS
    if need > available_bytes():
        raise ValueError(
            f"{peers[0].name} with {peers[0].classes:,} classes, on servers and twice in one "
            f"process, needs about {need / 1e9:.1f} GB, and {available_bytes() / 1e9:.1f} GB are "
            "free: choose fewer --classes"
        )


def take_turn(servers: Job, alone: Sequence[Isolated]) -> dict[str, Any]:
    """Measure one step of each single process and of the job."""
    seconds = {store: peer.call("step")["step"] for store, peer in zip(PEERS, alone)}
    host = alone[PEERS.index("host")]
    before = loopback_bytes()
    steps = servers.call("step")
    return {
        **seconds,
        "steps": steps,
        "loopback": loopback_bytes() - before,
        "parts": servers.call("parts"),
        "raw": seconds_of_raw_bytes(),
        "fetching": {
            "server": {when: max(servers.call(f"step_fetching_{when}")) for when in FETCHING},
            "host": {when: host.call(f"step_fetching_{when}") for when in FETCHING},
        },
    }


def summarize(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of all turns.

    Returns
    -------
    dict
        ``seconds``, ``low`` and ``high`` of a step of the job, and ``ratio`` to one process with
        its weights in the host's memory; the same for ``one_process``, by store; ``parts``: seconds
        by `PARTS` of a step that waits between them; ``traffic``: bytes per step by `TRAFFIC`, one
        number per worker; ``loopback``: ``bytes`` per step that the interface counted (NaN if it
        does not), their ``ratio`` to the workers' count, and ``raw_seconds`` that one connection
        takes for the workers' bytes; ``fetching``: by store, the seconds of a step with a network
        by `FETCHING`, and those that are ``hidden``, of steps that are neighbours in time.
    """
    # A step lasts until all workers are done; the time of a part is the workers' average.
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
            "ratio": statistics.median(
                turn["loopback"] / count for turn, count in zip(turns, moved)
            ),
            "raw_seconds": statistics.median(
                turn["raw"] * count / RAW_BYTES for turn, count in zip(turns, moved)
            ),
        },
        "fetching": {
            store: {
                **{
                    when: statistics.median(turn["fetching"][store][when] for turn in turns)
                    for when in FETCHING
                },
                "hidden": statistics.median(
                    turn["fetching"][store]["late"] - turn["fetching"][store]["early"]
                    for turn in turns
                ),
            }
            for store in ("host", "server")
        },
    }


def spread(seconds: Sequence[float], host: Sequence[float]) -> dict[str, float]:
    """Return median, least and most, and the ratio to the host's seconds of the same turns."""
    return {
        "seconds": statistics.median(seconds),
        "low": min(seconds),
        "high": max(seconds),
        "ratio": statistics.median(one / other for one, other in zip(seconds, host)),
    }


def loopback_bytes() -> float:
    """Return the bytes that loopback has carried so far; NaN if the system does not count them."""
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
