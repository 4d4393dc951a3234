"""Install the four folders of this tree as one namespace: ``dsoftmax.losses`` and so on.

This is also the build backend that pyproject.toml names: setuptools' own, after a check of Python
that must come before setuptools is imported, since old releases of it break on a new Python.
"""

import platform
import sys

if not (3, 8) <= sys.version_info[:2] <= (3, 11):
    sys.exit(
        "error: dsoftmax runs on Python 3.8 to 3.11, as MXNet 1.9.1 does, and this is Python "
        f"{platform.python_version()}: make an environment with one of those, for instance by "
        "`python3.11 -m venv .venv`."
    )

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.build_meta import *  # noqa: F403

FOLDERS = ("losses", "recognition", "eval", "tools")

# The CPU and the CUDA build of MXNet own the same module, so exactly one of these two extras
# belongs in an environment; `dsoftmax.tools.preflight` refuses one that holds both.
MXNET = {
    "cpu": ["mxnet==1.9.1"],
    "cu112": [
        "mxnet-cu112==1.9.1",
        # The libraries that build loads, all but the driver's own libcuda.
        "nvidia-cublas-cu11>=11.4,<12",
        "nvidia-cuda-nvrtc-cu11>=11.2,<12",
        "nvidia-cuda-runtime-cu11>=11.2,<12",
        "nvidia-cudnn-cu11>=8.5,<9",
        "nvidia-cufft-cu11>=10.4,<11",
        "nvidia-curand-cu11>=10.2,<11",
        "nvidia-cusolver-cu11>=11.2,<12",
        "nvidia-cusparse-cu11>=11.4,<12",
        "nvidia-nccl-cu11>=2.14,<3",
        "nvidia-nvtx-cu11>=11.7,<12",
    ],
}
# To be compiled, see recognition/README.md: not among the extras that `all` brings.
HOROVOD = {"horovod": ["horovod==0.28.1"]}
ONNX = ["onnx>=1.12,<1.17", "onnxruntime>=1.15,<1.20"]
OPTIONAL = {
    "onnx": ONNX,
    "tensorboard": ["mxboard>=0.1,<0.2", "protobuf>=3.20.2,<4"],  # as old as mxboard
    "test": [
        "pytest>=7,<10",
        "pytest-xdist>=3.6,<4",
        "ruff>=0.17,<0.18",
        "import-linter>=2.4,<3; python_version >= '3.9'",
        *ONNX,
    ],
}

if __name__ == "__main__":
    setup(
        name="dsoftmax",
        version="0.1.0",
        description=(
            "Train face embeddings with huge numbers of identities: Dissected Softmax on MXNet"
        ),
        long_description=Path("README.md").read_text(encoding="utf-8"),
        long_description_content_type="text/markdown",
        license="Apache-2.0",
        python_requires=">=3.8,<3.12",
        packages=[
            f"dsoftmax.{package}"
            for folder in FOLDERS
            for package in find_packages(include=[folder, f"{folder}.*"])
        ],
        package_dir={f"dsoftmax.{folder}": folder for folder in FOLDERS},
        package_data={"dsoftmax.losses": ["operators.cc"]},
        install_requires=[
            "numpy>=1.19,<1.24",  # MXNet 1.9.1 uses names that numpy 1.24 removed
            "gluoncv>=0.10.5,<0.11",
            "opencv-python>=4.5.1,<4.12",
            "easydict>=1.9,<2",
            "scikit-learn>=1.0,<1.8",
            "scipy>=1.8,<1.18",  # comes with scikit-learn
            "matplotlib>=3.5,<3.11",
            "tqdm>=4.50,<5",
        ],
        entry_points={"console_scripts": ["dsoftmax = dsoftmax.tools.dispatcher:main"]},
        extras_require={
            **MXNET,
            **HOROVOD,
            **OPTIONAL,
            "all": sorted({package for extra in OPTIONAL.values() for package in extra}),
        },
    )
