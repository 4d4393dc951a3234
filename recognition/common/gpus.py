"""Find the GPUs of this machine, and say which of them the CUDA build of MXNet can use.

Needs neither MXNet nor CUDA, so that it can speak before they fail.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from typing import NamedTuple, Sequence

QUERY_SECONDS = 60  # the first call after a start of the machine may load the driver
# Code for x.y runs on GPUs of x.y and on later ones of x; PTX would run on later ones of any x.
OLDEST, NEWEST = (5, 0), (8, 9)
REASON = (
    "mxnet-cu112 1.9.1 holds machine code for compute capabilities 5.0, 6.0, 7.0, 8.0 and 8.6 and "
    "no PTX, so GPUs of 5.0 to 8.9 run it, and Hopper (9.0) and later can't"
)
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


class Gpu(NamedTuple):
    """A GPU as its driver describes it."""

    name: str
    capability: tuple[int, int]

    @property
    def is_supported(self) -> bool:
        """Whether ``mxnet-cu112`` holds code that this GPU runs."""
        return OLDEST <= self.capability <= NEWEST

    def __str__(self) -> str:
        major, minor = self.capability
        return f"{self.name} (compute capability {major}.{minor})"


def find_gpus() -> list[Gpu]:
    """List the GPUs of this machine, by ``nvidia-smi`` or else by the driver's library."""
    found = _ask_nvidia_smi()
    return _ask_driver() if found is None else found


def describe(gpus: Sequence[Gpu]) -> str:
    """Name GPUs in a line; equal ones once, with their number."""
    counts = {gpu: list(gpus).count(gpu) for gpu in gpus}
    return ", ".join(f"{count} x {gpu}" if count > 1 else f"{gpu}" for gpu, count in counts.items())


def check_gpus(gpus: Sequence[Gpu]) -> None:
    """Refuse a machine none of whose GPUs can run the CUDA build of MXNet.

    If some can, ``CUDA_VISIBLE_DEVICES`` may have chosen those.

    Raises
    ------
    ValueError
        With the GPUs that were found, the reason, and what works instead.
    """
    if gpus and not any(gpu.is_supported for gpu in gpus):
        raise ValueError(
            f"MXNet can't use {describe(gpus)}: {REASON}. Train on the CPU (an empty "
            "CUDA_VISIBLE_DEVICES, or --devices cpu), or on a machine with an older GPU"
        )


def driver_version() -> str:
    """Return the version of the NVIDIA driver, or "unknown"."""
    return (_query("driver_version") or "").partition("\n")[0].strip() or "unknown"


def _query(fields: str) -> str | None:
    """Return None without an answer: there is no ``nvidia-smi``, or one older than the query."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=QUERY_SECONDS
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _ask_nvidia_smi() -> list[Gpu] | None:
    answer = _query("name,compute_cap")
    if answer is None:
        return None
    rows = re.findall(r"^(.+), *(\d+)\.(\d+) *$", answer, re.MULTILINE)
    return [Gpu(name.strip(), (int(major), int(minor))) for name, major, minor in rows]


def _ask_driver() -> list[Gpu]:
    """Return nothing where there is no driver, or where it does not work."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    gpus = []
    for number in range(count.value):
        name, numbers = ctypes.create_string_buffer(256), []
        driver.cuDeviceGetName(name, len(name), number)
        for attribute in (_MAJOR, _MINOR):
            value = ctypes.c_int(0)
            driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, number)
            numbers.append(value.value)
        gpus.append(Gpu(name.value.decode(errors="replace"), (numbers[0], numbers[1])))
    return gpus
