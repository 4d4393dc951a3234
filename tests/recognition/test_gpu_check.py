"""The check of GPUs, with contexts of the CPU in their place."""

import os
import subprocess
import sys

import mxnet as mx
import numpy as np
import pytest

from dsoftmax.recognition import gpu_check, plan
from dsoftmax.recognition.common.devices import contexts
from dsoftmax.recognition.gpu_check import Check, Finding, Trajectory, Trials
from dsoftmax.tools import preflight

GPUS_ONLY = ("float16 network", "2 devices, --sync-bn")  # a plan refuses these on CPUs


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    """Let cpu(1) and cpu(2) stand in for two GPUs."""

    def stand_ins(devices):
        return [
            mx.cpu(context.device_id + 1) if context.device_type == "gpu" else context
            for context in contexts(devices)
        ]

    monkeypatch.setattr(plan, "usable_contexts", stand_ins)
    monkeypatch.setattr(gpu_check, "contexts", stand_ins)
    monkeypatch.setattr(preflight, "visible_gpus", lambda: 2)


def test_the_report(capsys):
    assert preflight.main(["--gpu-check"]) == 1
    lines = capsys.readouterr().out.splitlines()
    found = dict(line.split(" ... ") for line in lines if " ... " in line)
    assert len(found) == 9
    failed = [name for name, result in found.items() if not result.startswith("passed: ")]
    assert failed == list(GPUS_ONLY)
    assert found[GPUS_ONLY[1]].startswith("FAILED: ValueError: --sync-bn is for GPUs")
    assert found["copies between devices"] == "passed: 2 of 2 copies are whole"
    assert lines[-1] == "2 checks failed"
    assert any("NVIDIA driver" in line for line in lines)


def test_a_difference_is_found(tmp_path):
    trials = Trials(str(tmp_path), 2)
    expected = trials.train({"devices": "cpu:2"})
    assert len(expected.losses) == gpu_check.STEPS
    rounded = trials.train({"devices": "gpu:2", "class-parallel": 1})
    assert not np.array_equal(rounded.after, expected.after)
    assert gpu_check.compare(rounded, expected).passed
    for changes in ({"lr": 1.001e-3}, {"seed": 2}, {"devices": "gpu"}):
        found = trials.train({"devices": "gpu:2", **changes})
        assert not gpu_check.compare(found, expected).passed, changes


SYNCHRONIZED = """
import sys
from dsoftmax.recognition import backbone, gpu_check, plan

class Parallel(backbone.Backbone):  # as on GPUs: no context waits for another
    def _run(self, *args):
        self._one_at_a_time = False
        return super()._run(*args)

plan.Plan._check_devices = lambda self: None
sys.modules["dsoftmax.recognition.build"].Backbone = Parallel
trials = gpu_check.Trials(sys.argv[1], 2)
whole = trials.train({"devices": "cpu", "per-batch-size": 16})
together = trials.train({"devices": "cpu:2", "sync-bn": True})
apart = trials.train({"devices": "cpu:2"})
assert gpu_check.compare(together, whole).passed, gpu_check.compare(together, whole)
assert not gpu_check.compare(apart, whole).passed
"""


@pytest.mark.slow
def test_what_sync_bn_is_compared_with(tmp_path):
    """Contexts of the CPU may meet in a layer if MXNet is told so before it is imported."""
    settings = {"MXNET_CPU_WORKER_NTHREADS": "2", "MXNET_CPU_TEMP_COPY": "64"}
    settings.update(OMP_NUM_THREADS="1", DSOFTMAX_OPERATORS="0")
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SYNCHRONIZED, str(tmp_path)],
        env={**os.environ, **settings},
        check=True,
        timeout=300,
    )


def trajectory(losses=(2.0, 1.0), before=1.0, after=3.0):
    return Trajectory(np.array(losses), np.full((4, 8), before), np.full((4, 8), after))


@pytest.mark.parametrize(
    ("found", "expected", "passed"),
    [
        (trajectory(), trajectory(), True),
        (trajectory(losses=(2.0, 1.0001)), trajectory(), True),
        (trajectory(losses=(2.0, 1.001)), trajectory(), False),
        (trajectory(losses=(2.0, np.nan)), trajectory(), False),
        (trajectory(after=3.001), trajectory(), False),
        (trajectory(after=np.nan), trajectory(after=np.nan), False),
        (trajectory(before=1.001), trajectory(), False),
        (trajectory(after=1.0), trajectory(after=1.0), False),  # nothing was trained
    ],
)
def test_comparisons(found, expected, passed):
    assert gpu_check.compare(found, expected).passed is passed


def test_a_copy_that_is_damaged(monkeypatch):
    whole = mx.nd.NDArray.as_in_context

    def damaged(array, context):
        copy = whole(array, context)
        return copy + 1 if context == mx.cpu(2) else copy

    monkeypatch.setattr(mx.nd.NDArray, "as_in_context", damaged)
    assert gpu_check.compare_copies([mx.cpu(1), mx.cpu(2), mx.cpu(3)]) == Finding(
        False, "4 of 6 copies are whole; wrong: cpu(1) to cpu(2), cpu(3) to cpu(2)"
    )


def test_an_error_is_a_finding():
    def fail():
        raise mx.MXNetError("Traceback\n  CUDA: Check failed: e == cudaSuccess: no image\nStack")

    found = gpu_check.run_check(Check("any", fail))
    assert found == Finding(False, "MXNetError: CUDA: Check failed: e == cudaSuccess: no image")
