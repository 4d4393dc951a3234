import os
import subprocess
import sys
from pathlib import Path

import mxnet as mx
import pytest

from dsoftmax.recognition.common.devices import (
    BUFFERS,
    contexts,
    gpu_contexts,
    idle_gpus,
    usable_contexts,
)


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("cpu", [mx.cpu(0)]),
        ("cpu:3", [mx.cpu(0), mx.cpu(1), mx.cpu(2)]),
        ("gpu", [mx.gpu(0)]),
        ("gpu:2", [mx.gpu(0), mx.gpu(1)]),
    ],
)
def test_flags(flag, expected):
    assert contexts(flag) == expected


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [mx.cpu(0)]),
        ("", [mx.cpu(0)]),
        (" ", [mx.cpu(0)]),
        ("-1", [mx.cpu(0)]),
        ("3", [mx.gpu(0)]),
        ("2,5,7", [mx.gpu(0), mx.gpu(1), mx.gpu(2)]),
    ],
)
def test_the_environment(visible, expected, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert contexts() == expected


@pytest.mark.parametrize("flag", ["tpu", "cpu:0", "cpu:", "gpu:-1", "cpu:2,gpu:1"])
def test_nonsense(flag):
    with pytest.raises(ValueError, match="devices are cpu, gpu, cpu:2"):
        contexts(flag)


def test_the_gpu_flag(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(mx.context, "num_gpus", lambda: 2)
    assert gpu_contexts(None) == gpu_contexts("-1") == [mx.cpu(0)]
    assert gpu_contexts("1") == [mx.gpu(1)]
    assert gpu_contexts("0,1") == [mx.gpu(0), mx.gpu(1)]
    with pytest.raises(ValueError, match="--gpu 0,2: MXNet sees 2 GPUs here; --gpu -1 takes the"):
        gpu_contexts("0,2")
    monkeypatch.setattr(mx.context, "num_gpus", lambda: 0)
    with pytest.raises(ValueError, match="--gpu 0: MXNet sees no GPU here"):
        gpu_contexts("0")
    with pytest.raises(ValueError, match="ids as 0 or 0,1"):
        gpu_contexts("zero")


def test_gpus_that_are_not_there(monkeypatch):
    monkeypatch.setattr(mx.context, "num_gpus", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert usable_contexts() == [mx.gpu(0)]
    assert usable_contexts("cpu:2") == [mx.cpu(0), mx.cpu(1)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES asks for 2 GPUs, MXNet sees 1"):
        usable_contexts()
    monkeypatch.setattr(mx.context, "num_gpus", lambda: 0)
    with pytest.raises(ValueError, match="--devices gpu asks for 1 GPU, MXNet sees none"):
        usable_contexts("gpu")


def test_gpus_that_nobody_chose(monkeypatch):
    monkeypatch.setattr(mx.context, "num_gpus", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert idle_gpus() == 2
    assert idle_gpus("cpu") == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert idle_gpus() == 0


PRODUCTS_ON_BOTH = """
import sys
import threading
from mxnet import nd
from dsoftmax.recognition.common.devices import contexts
from tests.engine import queued

arrays = [nd.ones((8, 8), ctx=context) for context in contexts("cpu:2")]
nd.waitall()
may_go_on, is_done = threading.Event(), threading.Event()
with queued(lambda: may_go_on.wait(60), written=arrays[:1]):
    made = [
        nd.FullyConnected(array, array, no_bias=True, num_hidden=8)
        for array in arrays
        for _ in range(6)
    ]
    with queued(is_done.set, read=made[-1:]):
        print(is_done.wait(float(sys.argv[1])))
        may_go_on.set()
"""


@pytest.mark.parametrize(("buffers", "seconds", "is_done"), [(None, 30, True), ("4", 2, False)])
def test_contexts_of_the_cpu_do_not_wait_for_each_other(buffers, seconds, is_done):
    """The first context is held up, the second one is not; unless the user wants few buffers."""
    environment = {name: value for name, value in os.environ.items() if name != BUFFERS}
    if buffers:
        environment[BUFFERS] = buffers
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PRODUCTS_ON_BOTH, str(seconds)],
        cwd=Path(__file__).parents[3],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{is_done}\n"
