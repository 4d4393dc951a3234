"""Lay out what a run needs, as text and as values for JSON."""

from __future__ import annotations

from typing import Any

from dsoftmax.recognition.networks.flops import format_flops
from dsoftmax.tools.planning.layouts import Calibration, DescribedRun, Planned, advise, command_of


def describe(
    run: DescribedRun, planned: Planned, others: list[Planned], calibration: Calibration | None
) -> str:
    """Return all tables, advice and the command, as lines of text."""
    settings, layout, needs = run.settings, run.layout, planned.needs
    kind = "CPU context" if layout.on_cpu else "GPU"
    lines = [
        f"{planned.num_classes:,} identities x {settings.embedding_size}, {settings.loss}, "
        f"{settings.network} ({needs.parameters / 1e6:.1f}M parameters, "
        f"{format_flops(needs.flops)} FLOPs), {needs.head.batch_size} images per step on "
        f"{layout.processes} host{'s' * (layout.processes > 1)} with {layout.devices} {kind}"
        f"{'s' * (layout.devices > 1)}",
        "",
        f"each device      {needs.device}",
        f"each host        {_size(planned.host)}"
        + (
            f", of which a server has {_size(needs.servers // layout.processes)}"
            if needs.servers
            else ""
        ),
        f"class rows       {needs.traffic.rows:,} per step and host, "
        f"{_size(needs.traffic.fetched)} fetched and {_size(needs.traffic.returned)} returned",
        f"between hosts    {_size(_between_hosts(planned))} per step, each way",
        f"a step takes     {_seconds(planned.seconds)} ({_basis(run, calibration)})",
        "",
        *_table(others),
        "",
        *(f"note: {line}" for line in advise(run, planned, others)),
        f"start it with: {command_of(run)}",
    ]
    return "\n".join(lines)


def _between_hosts(planned: Planned) -> int:
    return planned.needs.traffic.between_hosts(planned.needs.servers > 0)


def _basis(run: DescribedRun, calibration: Calibration | None) -> str:
    """Say what the expected time follows from, or why there is none."""
    if not run.layout.on_cpu:
        return "only CPUs are measured"
    if calibration is None:
        return "--no-calibration"
    speed = calibration.speed
    return (
        f"here: {speed.products / 1e9:.0f} GFLOP/s, {speed.copies / 1e9:.1f} GB/s, "
        f"{calibration.image_seconds * 1e3:.1f} ms per image"
    )


def _table(others: list[Planned]) -> list[str]:
    lines = [
        f"{'identities':>11} {'store':>14} {'device':>9} {'host':>9} {'rows':>11} "
        f"{'fetched':>9} {'network':>9} {'step':>8}"
    ]
    for one in others:
        store = one.store if one.dtype == "float32" else f"{one.store} {one.dtype}"
        lines.append(
            f"{one.num_classes:>11,} {store:>14} {_size(one.needs.device.total):>9} "
            f"{_size(one.host):>9} {one.needs.traffic.rows:>11,} "
            f"{_size(one.needs.traffic.fetched):>9} {_size(_between_hosts(one)):>9} "
            f"{_seconds(one.seconds):>8} {one.problem}".rstrip()
        )
    return lines


def _size(count: int) -> str:
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count / 1e3:.0f} kB" if count else "0"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def as_json(
    run: DescribedRun, planned: Planned, others: list[Planned], calibration: Calibration | None
) -> dict[str, Any]:
    """Return everything as values for JSON."""
    return {
        "hosts": run.layout.processes,
        "devices": run.layout.devices,
        "run": _values(planned),
        "sizes": [_values(one) for one in others],
        "calibration": None
        if calibration is None
        else {**calibration.speed._asdict(), "image_seconds": calibration.image_seconds},
        "advice": advise(run, planned, others),
        "command": command_of(run),
    }


def _values(planned: Planned) -> dict[str, Any]:
    needs = planned.needs
    return {
        "num_classes": planned.num_classes,
        "store": planned.store,
        "dtype": planned.dtype,
        "device_bytes": {**needs.device._asdict(), "total": needs.device.total},
        "host_bytes": planned.host,
        "server_bytes": needs.servers,
        "per_step": {
            **needs.traffic._asdict(),
            "between_hosts": _between_hosts(planned),
        },
        "step_seconds": planned.seconds,
        "problem": planned.problem,
    }
