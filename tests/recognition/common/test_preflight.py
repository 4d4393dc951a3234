import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from dsoftmax.recognition.common import preflight
from dsoftmax.recognition.data.images import decode
from dsoftmax.tools import preflight as command


@pytest.fixture
def without_mxnet(monkeypatch):
    """As in a process that has not imported MXNet yet."""
    monkeypatch.delitem(sys.modules, "mxnet", raising=False)
    monkeypatch.setattr(preflight, "mxnet_builds", lambda: ["mxnet"])


@pytest.fixture
def broken_module(monkeypatch, tmp_path):
    """Put a module that can't be loaded before the real one."""

    def make(name, error):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise {error}")
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.syspath_prepend(str(tmp_path))

    return make


def run_python(code, path):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(path), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def add_distribution(folder, name, version):
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_importing_losses_with_a_new_numpy_gives_one_sentence(tmp_path):
    add_distribution(tmp_path, "numpy", "1.24.0")
    result = run_python("from dsoftmax.losses import Head", tmp_path)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        "ImportError: MXNet 1.9.1 runs with numpy 1.19 to 1.23 and numpy 1.24.0 is installed: run "
        "`pip install 'numpy>=1.19,<1.24'`."
    )
    assert "site-packages/mxnet" not in result.stderr


def test_both_builds_at_once(tmp_path):
    add_distribution(tmp_path, "mxnet-cu112", "1.9.1")
    add_distribution(tmp_path, "mxnet", "1.9.1")
    result = run_python("from dsoftmax.losses import Head", tmp_path)
    assert "mxnet and mxnet-cu112 are both installed" in result.stderr


def test_this_environment_is_sound():
    result = subprocess.run(
        [sys.executable, "-m", "dsoftmax.tools.preflight"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "1.9.1" in result.stdout


def test_no_mxnet_at_all(without_mxnet, monkeypatch):
    monkeypatch.setattr(preflight.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="MXNet is not installed: run `pip install mxnet"):
        preflight.check_mxnet()


def test_cuda_build_without_its_libraries(without_mxnet, broken_module, monkeypatch):
    monkeypatch.setattr(preflight, "mxnet_builds", lambda: ["mxnet-cu112"])
    missing = ("libcudnn.so.8", "libnccl.so.2")
    monkeypatch.setattr(preflight, "_can_load", lambda library: library not in missing)
    broken_module("mxnet", "OSError('libcudnn.so.8: cannot open shared object file')")
    with pytest.raises(ImportError) as caught:
        preflight.check_mxnet()
    assert str(caught.value) == (
        "The CUDA build of MXNet can't be loaded, these libraries are missing: libcudnn.so.8 "
        "(nvidia-cudnn-cu11), libnccl.so.2 (nvidia-nccl-cu11); run `pip install nvidia-cudnn-cu11 "
        "nvidia-nccl-cu11`, or take the CPU build: `pip uninstall -y mxnet-cu112 && pip install "
        "mxnet==1.9.1`."
    )
    assert caught.value.__suppress_context__  # no traceback of MXNet's


def test_cuda_build_without_a_driver(without_mxnet, broken_module, monkeypatch):
    monkeypatch.setattr(preflight, "mxnet_builds", lambda: ["mxnet-cu112"])
    monkeypatch.setattr(preflight, "_can_load", lambda library: library != "libcuda.so.1")
    broken_module("mxnet", "OSError('libcuda.so.1: cannot open shared object file')")
    with pytest.raises(ImportError, match=r"libcuda\.so\.1 \(the NVIDIA driver, 460\.32"):
        preflight.check_mxnet()


def test_system_library_of_the_cpu_build(without_mxnet, broken_module):
    broken_module("mxnet", "OSError('libgomp.so.1: cannot open shared object file')")
    with pytest.raises(ImportError, match=r"libgomp\.so\.1 is missing: .* `apt install libgomp1`"):
        preflight.check_mxnet()


def test_opencv_without_graphics_libraries(broken_module):
    broken_module("cv2", "ImportError('libGL.so.1: cannot open shared object file')")
    with pytest.raises(ImportError, match=r"apt install libgl1.*opencv-python-headless"):
        decode(np.zeros(9, np.uint8))


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Return a function that puts GPUs into this machine, and with them a build of MXNet."""

    def make(rows, build="mxnet-cu112"):
        path = tmp_path / "nvidia-smi"
        echo = "\n".join(f'echo "{row}"' for row in rows)
        path.write_text(f"#!{shutil.which('bash')}\n{echo}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setattr(command, "mxnet_builds", lambda: [build])

    return make


def test_gpus_that_mxnet_can_not_use_are_refused_before_it_is_loaded(machine, monkeypatch, capsys):
    machine(["NVIDIA H100 80GB HBM3, 9.0"] * 8)
    monkeypatch.setattr(command, "mxnet", lambda: pytest.fail("MXNet was loaded"))
    assert command.main([]) == 1
    assert capsys.readouterr().err == (
        "error: MXNet can't use 8 x NVIDIA H100 80GB HBM3 (compute capability 9.0): mxnet-cu112 "
        "1.9.1 holds machine code for compute capabilities 5.0, 6.0, 7.0, 8.0 and 8.6 and no PTX, "
        "so GPUs of 5.0 to 8.9 run it, and Hopper (9.0) and later can't. Train on the CPU (an "
        "empty CUDA_VISIBLE_DEVICES, or --devices cpu), or on a machine with an older GPU\n"
    )


def test_the_cpu_build_runs_beside_any_gpu(machine, capsys):
    machine(["NVIDIA H100 80GB HBM3, 9.0"], "mxnet")
    assert command.main([]) == 0
    out = capsys.readouterr().out
    assert "this machine has NVIDIA H100 80GB HBM3 (compute capability 9.0)\n" in out
    assert "MXNet can't use NVIDIA H100" in out


def test_gpus_are_named(machine, capsys):
    machine(["NVIDIA A100-SXM4-40GB, 8.0", "NVIDIA A100-SXM4-40GB, 8.0", "Quadro K600, 3.0"])
    assert command.main([]) == 0  # MXNet can use two of them
    out = capsys.readouterr().out
    two, old = "2 x NVIDIA A100-SXM4-40GB (compute capability 8.0)", "Quadro K600 (compute"
    assert f"this machine has {two}, {old}" in out
    assert f"MXNet can't use {old}" in out


def test_the_gpu_check_without_a_gpu(capsys):
    if command.visible_gpus():
        pytest.skip("this machine has a GPU")
    assert command.main(["--gpu-check"]) == 2
    err = capsys.readouterr().err
    assert "error: --gpu-check needs a GPU, and MXNet sees none here" in err
    assert err.count("\n") == 1
