"""Check that MXNet and OpenCV can be loaded, and print what is installed.

    python -m dsoftmax.tools.preflight
    python tools/preflight.py --gpu-check

The exit code is 1 if one of them can't be loaded, or if MXNet can't use the GPUs of this machine.
--gpu-check trains ten steps on one GPU and on all GPUs, in every way that differs from the CPU's,
compares losses and class weights with the CPU's, and prints a report to send back. The exit code is
1 if a check fails.
"""

from __future__ import annotations

if not __package__:
    import require_dsoftmax

import argparse
import os
import platform
import sys
import tempfile
from importlib import metadata

from dsoftmax.recognition.common import gpus
from dsoftmax.recognition.common.cli import command, make_parser
from dsoftmax.recognition.common.devices import visible_gpus
from dsoftmax.recognition.common.machine import describe_machine
from dsoftmax.recognition.common.preflight import CUDA_LIBRARIES, mxnet, mxnet_builds, opencv


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = make_parser("preflight", __doc__)
    parser.add_argument(
        "--gpu-check", action="store_true", help="compare training on GPUs with the CPU"
    )
    return parser


@command(parser=build_parser)
def main(args: argparse.Namespace) -> int:
    """Run the command."""
    print(f"Python {platform.python_version()}")
    if args.gpu_check:
        # Else cuDNN may round to TF32, by 1e-3. CUDA reads this when MXNet loads it.
        os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    found, builds = gpus.find_gpus(), mxnet_builds()
    try:
        if any("-cu" in build for build in builds):
            gpus.check_gpus(found)
        cv2, mx = opencv(), mxnet()
    except (ImportError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if args.gpu_check and not visible_gpus():
        raise ValueError(
            "--gpu-check needs a GPU, and MXNet sees none here: is this the CUDA build "
            "(`pip install -e '.[cu112]'`) with a driver, and does CUDA_VISIBLE_DEVICES hide none?"
        )
    print(f"numpy {metadata.version('numpy')}, OpenCV {cv2.__version__}")
    print(f"{' '.join(builds) or 'mxnet'} {mx.__version__}, {visible_gpus()} GPUs")
    _print_gpus(found)

    from dsoftmax.losses import operators
    from dsoftmax.recognition.common import products

    operators.load()
    print(f"on CPUs: products by {products.way(mx.cpu())}; {operators.describe()}")
    return _check_training(visible_gpus()) if args.gpu_check else 0


def _print_gpus(found: list[gpus.Gpu]) -> None:
    if found:
        print(f"this machine has {gpus.describe(found)}")
    unusable = [gpu for gpu in found if not gpu.is_supported]
    if unusable:
        print(f"MXNet can't use {gpus.describe(unusable)}: {gpus.REASON}")


def _check_training(count: int) -> int:
    """Print the report of --gpu-check; return the exit code."""
    from dsoftmax.recognition.gpu_check import make_checks, run_check

    machine = describe_machine()
    print(f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gb']} GB")
    print(f"{platform.platform()}, NVIDIA driver {gpus.driver_version()}")
    print(", ".join(_cuda_packages()) or "CUDA libraries of the system")
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for check in make_checks(folder, "gpu", f"gpu:{count}" if count > 1 else None):
            print(f"{check.name} ... ", end="", flush=True)  # says where a check hangs
            finding = run_check(check)
            failed += not finding.passed
            print(f"{'passed' if finding.passed else 'FAILED'}: {finding.detail}", flush=True)
    if count == 1:
        print("several GPUs: not checked, there is one")
    print(f"{failed} checks failed" if failed else "all checks passed")
    return 1 if failed else 0


def _cuda_packages() -> list[str]:
    """Name the installed packages that bring CUDA's libraries, with their versions."""
    installed = {package.metadata["Name"]: package.version for package in metadata.distributions()}
    known = sorted(set(CUDA_LIBRARIES.values()) & set(installed))
    return [f"{name} {installed[name]}" for name in known]


if __name__ == "__main__":
    sys.exit(main())
