"""Measure the memory of this process and of this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def resident_bytes() -> int:
    """Return the memory that this process uses."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def peak_bytes() -> int:
    """Return the most memory that this process has used since `forget_peak`."""
    return _kilobytes("/proc/self/status", "VmHWM")


def forget_peak() -> None:
    """Reset `peak_bytes` to the present use."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def available_bytes() -> int:
    """Return the memory that is free for use; unlimited if the system does not report it."""
    if not os.path.exists("/proc/meminfo"):
        return sys.maxsize
    return _kilobytes("/proc/meminfo", "MemAvailable")


def _kilobytes(path: str, field: str) -> int:
    lines = Path(path).read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024
