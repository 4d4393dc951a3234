"""Load MXNet and OpenCV when they are first needed, or say in one sentence what is missing.

MXNet takes more than a second to import, so a module that a command imports before it has parsed
its flags gets the two libraries inside its functions:

    def decode(encoded):
        cv2 = opencv()

Either function raises one sentence where a user would otherwise meet a loader's traceback.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import sys
from importlib import metadata, util
from types import ModuleType
from typing import Iterable

# The libraries that mxnet-cu112 1.9.1 links, each after its dependencies, and the packages that
# contain them.
CUDA_LIBRARIES = {
    "libcuda.so.1": "the NVIDIA driver, 460.32 or newer",
    "libcudart.so.11.0": "nvidia-cuda-runtime-cu11",
    "libnvToolsExt.so.1": "nvidia-nvtx-cu11",
    "libcublasLt.so.11": "nvidia-cublas-cu11",
    "libcublas.so.11": "nvidia-cublas-cu11",
    "libcusparse.so.11": "nvidia-cusparse-cu11",
    "libcusolver.so.11": "nvidia-cusolver-cu11",
    "libcufft.so.10": "nvidia-cufft-cu11",
    "libcurand.so.10": "nvidia-curand-cu11",
    "libnvrtc.so.11.2": "nvidia-cuda-nvrtc-cu11",
    "libcudnn.so.8": "nvidia-cudnn-cu11",
    "libnccl.so.2": "nvidia-nccl-cu11",
}
SYSTEM_PACKAGES = {
    "libgomp.so.1": "libgomp1",
    "libquadmath.so.0": "libquadmath0",
    "libGL.so.1": "libgl1",
    "libgthread-2.0.so.0": "libglib2.0-0",
}
CPU_BUILD = "pip uninstall -y mxnet-cu112 && pip install mxnet==1.9.1"


def mxnet() -> ModuleType:
    """Import MXNet and return it; raise the error of `check_mxnet` where that fails."""
    check_mxnet()
    return importlib.import_module("mxnet")


def opencv() -> ModuleType:
    """Import OpenCV and return it; raise the error of `check_opencv` where that fails."""
    check_opencv()
    return importlib.import_module("cv2")


def require(libraries: Iterable[str]) -> None:
    """Import "mxnet" or "opencv" or both, so that a command without them fails before it works."""
    checks = {"mxnet": check_mxnet, "opencv": check_opencv}
    for library in libraries:
        checks[library]()


def check_mxnet() -> None:
    """Import MXNet.

    Raises
    ------
    ImportError
        With one sentence that names what is missing or in the way and the command that mends it.
    """
    if "mxnet" in sys.modules:
        return
    _check_numpy()
    builds = mxnet_builds()
    if len(builds) > 1:
        raise ImportError(
            f"{' and '.join(builds)} are both installed and overwrite each other's files: run "
            f"`pip uninstall -y {' '.join(builds)}`, then install one of them."
        )
    if util.find_spec("mxnet") is None:
        raise ImportError(
            "MXNet is not installed: run `pip install mxnet==1.9.1` (CPU) or "
            "`pip install mxnet-cu112==1.9.1` (CUDA 11.2), never both."
        )
    is_cuda = any("-cu" in build for build in builds)
    if is_cuda:
        _load_cuda_libraries()
    # In a server or scheduler of a job, importing MXNet would start MXNet's own server loop.
    role = os.environ.pop("DMLC_ROLE", None)
    try:
        importlib.import_module("mxnet")
    except OSError as error:
        raise ImportError(_explain(error, "MXNet", is_cuda)) from None
    finally:
        if role is not None:
            os.environ["DMLC_ROLE"] = role


def check_opencv() -> None:
    """Import OpenCV; raise an ImportError of one sentence where that fails."""
    try:
        importlib.import_module("cv2")
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "cv2":
            raise ImportError(
                "OpenCV is not installed: run `pip install 'opencv-python>=4.5.1,<4.12'`."
            ) from None
        raise ImportError(
            f"{_explain(error, 'OpenCV')} Or use the build without windows: `pip uninstall -y "
            "opencv-python && pip install 'opencv-python-headless<4.12'`."
        ) from None


def _check_numpy() -> None:
    try:
        version = metadata.version("numpy")
    except metadata.PackageNotFoundError:
        version = "none"
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not (1, 19) <= numbers < (1, 24):
        raise ImportError(
            f"MXNet 1.9.1 runs with numpy 1.19 to 1.23 and numpy {version} is installed: run "
            "`pip install 'numpy>=1.19,<1.24'`."
        )


def mxnet_builds() -> list[str]:
    """List the builds of MXNet that are installed; more than one overwrite each other."""
    names = {(package.metadata["Name"] or "").lower() for package in metadata.distributions()}
    return sorted(name for name in names if re.fullmatch(r"mxnet(-(cu\d+|mkl|native))*", name))


def _can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True


def _load_cuda_libraries() -> None:
    """Load the libraries of the nvidia-*-cu11 wheels, which the system's loader does not find."""
    wheels = util.find_spec("nvidia")
    folders = list(wheels.submodule_search_locations or []) if wheels else []
    for library in CUDA_LIBRARIES:
        if not _can_load(library):
            for folder in folders:
                for package in sorted(os.listdir(folder)):
                    _can_load(os.path.join(folder, package, "lib", library))


def _explain(error: Exception, module: str, is_cuda: bool = False) -> str:
    if is_cuda:
        missing = [library for library in CUDA_LIBRARIES if not _can_load(library)]
        if missing:
            brought = ", ".join(f"{name} ({CUDA_LIBRARIES[name]})" for name in missing)
            packages = sorted({CUDA_LIBRARIES[name] for name in missing} & _pip_packages())
            advice = f"run `pip install {' '.join(packages)}`, or " if packages else ""
            return (
                f"The CUDA build of MXNet can't be loaded, these libraries are missing: {brought}; "
                f"{advice}take the CPU build: `{CPU_BUILD}`."
            )
    for library, package in SYSTEM_PACKAGES.items():
        if library in str(error):
            return (
                f"{module} can't be loaded, the system library {library} is missing: on Debian and "
                f"Ubuntu run `apt install {package}`."
            )
    return f"{module} can't be loaded: {error}."


def _pip_packages() -> set[str]:
    return {package for package in CUDA_LIBRARIES.values() if package.startswith("nvidia-")}
