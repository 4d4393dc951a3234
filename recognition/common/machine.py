"""Describe the machine that something was trained or measured on."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from dsoftmax.recognition.common.cli import default_threads


def describe_machine() -> dict[str, Any]:
    """Return the processor, the cores and the memory of this machine."""
    processor = platform.processor() or platform.machine()
    described = Path("/proc/cpuinfo")
    lines = described.read_text(encoding="utf-8").splitlines() if described.exists() else []
    named = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": named[0] if named else processor,
        "cores": default_threads(),
        "memory_gb": round(memory / (1 << 30)),
    }


def describe_versions() -> dict[str, str]:
    """Return the versions of Python, the libraries that compute, and dsoftmax."""
    versions = {"python": platform.python_version(), "system": platform.platform()}
    for name in ("mxnet", "numpy", "cv2"):
        if name in sys.modules:
            versions[name] = sys.modules[name].__version__
    try:
        versions["dsoftmax"] = metadata.version("dsoftmax")
    except metadata.PackageNotFoundError:  # a folder on PYTHONPATH
        versions["dsoftmax"] = "not installed"
    return versions
