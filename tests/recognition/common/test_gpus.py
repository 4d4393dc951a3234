import ctypes
import os
import shutil

import mxnet as mx
import pytest

from dsoftmax.recognition.common import devices, gpus
from dsoftmax.recognition.common.gpus import Gpu


@pytest.fixture
def nvidia_smi(monkeypatch, tmp_path):
    """Return a function that puts a program of this name before all others."""

    def make(script):
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!{shutil.which('bash')}\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return make


def test_the_query(nvidia_smi):
    nvidia_smi(
        'case "$*" in\n'
        '"--query-gpu=name,compute_cap --format=csv,noheader")\n'
        'echo "NVIDIA GeForce RTX 3090, 8.6"; echo "GPU, of many words, 12.0";;\n'
        '"--query-gpu=driver_version --format=csv,noheader") echo 535.1; echo 535.1;;\n'
        "*) exit 2;; esac"
    )
    assert gpus.find_gpus() == [
        Gpu("NVIDIA GeForce RTX 3090", (8, 6)),
        Gpu("GPU, of many words", (12, 0)),
    ]
    assert gpus.driver_version() == "535.1"


class Driver:
    """As libcuda.so.1 of a machine with two GPUs."""

    GPUS = ((b"Tesla K80", 3, 7), (b"Tesla V100", 7, 0))

    def cuInit(self, flags):
        return flags

    def cuDeviceGetCount(self, count):
        count._obj.value = len(self.GPUS)
        return 0

    def cuDeviceGetName(self, name, size, number):
        name.value = self.GPUS[number][0][: size - 1]
        return 0

    def cuDeviceGetAttribute(self, value, attribute, number):
        value._obj.value = self.GPUS[number][{75: 1, 76: 2}[attribute]]
        return 0


def test_the_driver_answers_where_nvidia_smi_does_not(nvidia_smi, monkeypatch):
    nvidia_smi("echo 'Field \"compute_cap\" is not a valid field to query.'; exit 2")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    assert gpus.find_gpus() == [Gpu("Tesla K80", (3, 7)), Gpu("Tesla V100", (7, 0))]
    monkeypatch.setattr(Driver, "cuInit", lambda self, flags: 100)  # CUDA_ERROR_NO_DEVICE
    assert gpus.find_gpus() == []


def test_no_driver_at_all(nvidia_smi, monkeypatch):
    def missing(name):
        raise OSError(name)

    nvidia_smi("exit 9")
    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert gpus.find_gpus() == []
    assert gpus.driver_version() == "unknown"


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((3, 7), False), ((5, 0), True), ((7, 5), True), ((8, 9), True), ((9, 0), False)],
)
def test_which_gpus_are_supported(capability, expected):
    assert Gpu("any", capability).is_supported is expected


def test_runs_on_gpus_that_mxnet_can_not_use_are_refused(nvidia_smi, monkeypatch):
    nvidia_smi('echo "NVIDIA H100, 9.0"')
    monkeypatch.setattr(mx.context, "num_gpus", lambda: 1)
    for refused in (lambda: devices.usable_contexts("gpu"), lambda: devices.gpu_contexts("0")):
        with pytest.raises(ValueError, match=r"can't use NVIDIA H100 .*Hopper .* can't\. Train on"):
            refused()
    assert devices.usable_contexts("cpu") == [mx.cpu(0)]
    nvidia_smi('echo "NVIDIA H100, 9.0"; echo "NVIDIA A100, 8.0"')
    assert devices.usable_contexts("gpu") == [mx.gpu(0)]
