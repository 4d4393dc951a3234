import subprocess
import sys

import numpy as np
import pytest

from dsoftmax.recognition.common import preflight
from dsoftmax.recognition.data.images import decode


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
