"""Tables of what `server_job` measures."""

from __future__ import annotations

import math
from typing import Any

from dsoftmax.tools.benchmarks.loss import NETWORK_SECONDS

MEGABYTE = 1 << 20
REMARKS = """\
x host: of steps that are neighbours in time; pull: of the rows a step uses; collectives: sums over
the workers; push: of the gradients, until the servers have updated; compute: all the rest. To wait
for another worker is part of what it is waited in. Each worker has as many threads as one process,
and all share the cores. summed: sent and returned. The network of a step is a pause, in which no
core is busy, as on a GPU; late: class rows are fetched after it, early: before it."""


def tables(result: dict[str, Any]) -> str:
    """Lay out the result of `server_job.measure`."""
    makers = (time_table, part_table, fetching_table, traffic_table)
    return "\n\n".join((*(make(result) for make in makers), REMARKS))


def _name_of_job(result: dict[str, Any]) -> str:
    return f"{result['workers']} workers, {result['servers']} servers"


def time_table(result: dict[str, Any]) -> str:
    """Lay out the times of a step, in one process and of the job."""
    rows = {f"one process, store={store}": times for store, times in result["one_process"].items()}
    rows[_name_of_job(result)] = result
    lines = [f"{result['name']:28}{'ms':>9}{'low-high':>13}{'x host':>9}"]
    for name, times in rows.items():
        between = f"{times['low'] * 1e3:.0f}-{times['high'] * 1e3:.0f}"
        lines.append(f"{name:28}{times['seconds'] * 1e3:9.1f}{between:>13}{times['ratio']:9.2f}")
    return "\n".join(lines)


def part_table(result: dict[str, Any]) -> str:
    """Lay out where the time of the job's steps goes."""
    whole = sum(result["parts"].values())
    lines = [f"{'its parts, one at a time':28}{'ms':>9}{'share':>13}"]
    for part, seconds in result["parts"].items():
        lines.append(f"{part:28}{seconds * 1e3:9.1f}{seconds / whole:13.0%}")
    return "\n".join(lines)


def fetching_table(result: dict[str, Any]) -> str:
    """Lay out what it hides to fetch class rows while a network runs."""
    names = {"host": "one process, store=host", "server": _name_of_job(result)}
    title = f"ms, network of {NETWORK_SECONDS * 1e3:.0f}"
    lines = [f"{title:28}{'late':>9}{'early':>13}{'hidden':>9}"]
    for store, times in result["fetching"].items():
        late, early, hidden = (times[name] * 1e3 for name in ("late", "early", "hidden"))
        lines.append(f"{names[store]:28}{late:9.1f}{early:13.1f}{hidden:9.1f}")
    return "\n".join(lines)


def traffic_table(result: dict[str, Any]) -> str:
    """Lay out the bytes that travel per step and the memory of the servers."""
    lines = [f"{'MB a step':28}" + "".join(f"{kind:>9}" for kind in result["traffic"])]
    for rank in range(result["workers"]):
        cells = (f"{result['traffic'][kind][rank] / MEGABYTE:9.2f}" for kind in result["traffic"])
        lines.append(f"{f'worker {rank}':28}" + "".join(cells))
    loopback = result["loopback"]
    if math.isfinite(loopback["ratio"]):
        lines.append(
            f"loopback has counted {loopback['bytes'] / MEGABYTE:.2f} MB, {loopback['ratio']:.3f} "
            "times as much."
        )
    raw = f"{loopback['raw_seconds'] * 1e3:.1f} ms"
    held = " + ".join(f"{size / MEGABYTE:,.0f}" for size in result["server_bytes"])
    return "\n".join(
        [
            *lines,
            f"One connection of loopback carries as much in {raw}.",
            f"The servers hold {held} MB, {result['server_ratio']:.2f} times weights and momenta; "
            f"without arrays one holds {result['empty_bytes'] / MEGABYTE:,.0f} MB.",
        ]
    )
