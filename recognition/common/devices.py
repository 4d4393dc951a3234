"""Choose devices by flag, or by CUDA_VISIBLE_DEVICES as insightface's scripts do."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Iterable

from dsoftmax.recognition.common.gpus import check_gpus, find_gpus
from dsoftmax.recognition.common.preflight import mxnet

if TYPE_CHECKING:
    import mxnet as mx

BUFFERS = "MXNET_CPU_TEMP_COPY"  # environment: MXNet's buffers for what its operators work in
BUFFERS_PER_CONTEXT = 16


def contexts(devices: str | None = None) -> list[mx.Context]:
    """Return the contexts that a flag names.

    Parameters
    ----------
    devices : str, optional
        ``cpu``, ``gpu``, or with their number ``cpu:2``, ``gpu:8``. By default a GPU for each id
        in CUDA_VISIBLE_DEVICES; the CPU where that is unset or empty.

    Examples
    --------
    >>> contexts("cpu:2")
    [cpu(0), cpu(1)]
    """
    mx = mxnet()
    if not devices:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
        # -1 hides all GPUs, as it does to CUDA.
        ids = [part for part in visible.split(",") if part.strip() and part.strip()[0] != "-"]
        return [mx.gpu(i) for i in range(len(ids))] or [mx.cpu(0)]
    match = re.fullmatch(r"(cpu|gpu)(?::([1-9]\d*))?", devices)
    if not match:
        raise ValueError(f"devices are cpu, gpu, cpu:2, gpu:8 or the like, not {devices!r}")
    kind, count = match.groups()
    chosen = [mx.Context(kind, i) for i in range(int(count or 1))]
    let_run_together(chosen)
    return chosen


def let_run_together(contexts: Iterable[mx.Context]) -> None:
    """Keep contexts of the CPU from waiting for each other's memory.

    By default MXNet has four buffers for the operators of all of them, which take them in turns. It
    makes the buffers when an operator first asks for one: after that this has no effect.
    """
    count = len({context for context in contexts if context.device_type == "cpu"})
    if count > 1:
        os.environ.setdefault(BUFFERS, str(count * BUFFERS_PER_CONTEXT))


def usable_contexts(devices: str | None = None) -> list[mx.Context]:
    """Return the contexts that a flag names, but refuse GPUs that MXNet can't see or use."""
    chosen = contexts(devices)
    wanted = sum(context.device_type == "gpu" for context in chosen)
    there = mxnet().context.num_gpus() if wanted else 0
    if wanted > there:
        source = f"--devices {devices}" if devices else "CUDA_VISIBLE_DEVICES"
        raise ValueError(
            f"{source} asks for {wanted} GPU{'s' * (wanted > 1)}, MXNet sees {there or 'none'}: is "
            "this the CUDA build with its driver (python -m dsoftmax.tools.preflight)? An empty "
            "CUDA_VISIBLE_DEVICES takes the CPU"
        )
    if wanted:
        check_gpus(find_gpus())
    return chosen


def idle_gpus(devices: str | None = None) -> int:
    """Count the GPUs that a run on the CPU leaves idle although nothing has chosen the CPU."""
    return 0 if devices or "CUDA_VISIBLE_DEVICES" in os.environ else visible_gpus()


def visible_gpus() -> int:
    """Count the GPUs that MXNet sees."""
    mx = mxnet()
    try:
        return mx.context.num_gpus()
    except mx.MXNetError:  # a CUDA build without a driver
        return 0


def gpu_contexts(ids: str | None) -> list[mx.Context]:
    """Return the contexts of a flag ``--gpu``: ``0``, ``0,1``, or -1 for the CPU.

    Without the flag, those of CUDA_VISIBLE_DEVICES.
    """
    if ids is None:
        return usable_contexts()
    mx = mxnet()
    if ids.strip() == "-1":
        return [mx.cpu(0)]
    if not re.fullmatch(r"\d+(,\d+)*", ids):
        raise ValueError(f"--gpu takes ids as 0 or 0,1, or -1 for the CPU, not {ids!r}")
    there = mx.context.num_gpus()
    wanted = [int(gpu) for gpu in ids.split(",")]
    if max(wanted) >= there:
        raise ValueError(
            f"--gpu {ids}: MXNet sees {there or 'no'} GPU{'s' * (there > 1)} here; "
            "--gpu -1 takes the CPU"
        )
    check_gpus(find_gpus())
    return [mx.gpu(gpu) for gpu in wanted]
