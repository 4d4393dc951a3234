"""The optional operators of operators.cc: how they are built and loaded.

`kernels` asks `serve` and does without them if they are not there.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import mxnet as mx

from dsoftmax.recognition.common.files import AtomicFile

SOURCE = Path(__file__).with_name("operators.cc")
# No -ffast-math: linked into a library, it changes the arithmetic of the whole process.
FLAGS = [
    "-shared",
    "-fPIC",
    "-fopenmp",
    "-std=gnu++11",
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
]
SWITCH = "DSOFTMAX_OPERATORS"  # environment: 0 for none

_is_loaded = False


def library() -> Path:
    """Return the path of the operators for this processor, this MXNet and this source.

    They use every instruction the processor has, so each kind of processor needs its own build.
    """
    return SOURCE.with_name(f"operators-{_fingerprint()}.so")


def _fingerprint() -> str:
    facts = [SOURCE.read_text(encoding="utf-8"), *FLAGS, mx.__version__, platform.machine()]
    try:
        processor = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        facts += re.findall(r"^(?:flags|Features)\s*:.*", processor, re.MULTILINE)[:1]
    except OSError:
        facts.append(platform.processor())
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]


def build() -> Path:
    """Compile the operators, and remove builds of earlier sources.

    Raises
    ------
    ValueError
        There is no compiler, or it fails; the message holds its output.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if not compiler:
        raise ValueError(
            "there is no C++ compiler (g++ or c++, or what CXX names); on Debian and Ubuntu: "
            "apt-get install g++. Everything works without these operators, more slowly on CPUs"
        )
    mxnet = Path(mx.__file__).parent
    target = library()
    with AtomicFile(target) as file:
        command = [compiler, *FLAGS, "-isystem", mxnet / "include", SOURCE]
        command += [mxnet / "src" / "lib_api.cc", "-o", file.name]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"{' '.join(map(str, command))} failed:\n{done.stderr.strip()}")
    for other in SOURCE.parent.glob("operators-*.so"):
        if other != target:
            other.unlink()
    return target


def load() -> bool:
    """Load the operators if they are built and not switched off; return whether they are loaded."""
    global _is_loaded
    if not _is_loaded and os.environ.get(SWITCH) != "0" and library().exists():
        mx.library.load(str(library()), verbose=False)
        _is_loaded = True
    return _is_loaded


def serve(context: mx.Context) -> bool:
    """Say whether arrays on this context can be given to the operators."""
    return _is_loaded and context.device_type == "cpu"
