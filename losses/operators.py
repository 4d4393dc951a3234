"""The compiled operators of operators.cc: how they are built and loaded.

The first head on a CPU builds them, once per processor and version, into the user's cache, if there
is a C++ compiler. `kernels` asks `serve` and uses MXNet's operators if they are not there.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Iterator

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
CACHE = "DSOFTMAX_CACHE"  # environment: the folder to build them in

logger = logging.getLogger(__name__)
_is_loaded = False


def cache_folder() -> Path:
    """Return the folder in the user's cache that built operators are kept in."""
    if os.environ.get(CACHE):
        return Path(os.environ[CACHE])
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dsoftmax"


def library() -> Path:
    """Return the path of the operators for this processor, this MXNet and this source.

    They use every instruction the processor has, so each kind of processor needs its own build.
    """
    return cache_folder() / f"operators-{_fingerprint()}.so"


def _fingerprint() -> str:
    facts = [SOURCE.read_text(encoding="utf-8"), *FLAGS, mx.__version__, platform.machine()]
    try:
        processor = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        facts += re.findall(r"^(?:flags|Features)\s*:.*", processor, re.MULTILINE)[:1]
    except OSError:
        facts.append(platform.processor())
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]


def _failure() -> Path:
    """Return the file that says why the operators could not be built."""
    return library().with_suffix(".failed")


def build() -> Path:
    """Compile the operators, and load them in a process of their own for a trial.

    Raises
    ------
    ValueError
        There is no compiler, it fails, or MXNet can't load what it makes; the message says why.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if not compiler:
        raise ValueError(
            "there is no C++ compiler (g++ or c++, or what CXX names); on Debian and Ubuntu: "
            "apt-get install g++. Everything works without these operators, more slowly on CPUs"
        )
    mxnet, target = Path(mx.__file__).parent, library()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = os.path.join(folder, "operators.so")
        sources = [SOURCE, mxnet / "src" / "lib_api.cc"]
        _run([compiler, *FLAGS, "-isystem", mxnet / "include", *sources, "-o", made])
        # In a process of its own: this one may have loaded operators of another source.
        trial = (
            "from dsoftmax.recognition.common.preflight import mxnet; "
            f"mxnet().library.load({made!r}, verbose=False)"
        )
        _run([sys.executable, "-W", "ignore", "-c", trial])
        os.replace(made, target)
    with contextlib.suppress(FileNotFoundError):
        _failure().unlink()
    return target


def _run(command: list) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{' '.join(map(str, command))} failed:\n{done.stderr.strip()}")


def load() -> bool:
    """Load the operators if they are built and not switched off; return whether they are loaded."""
    global _is_loaded
    if not _is_loaded and os.environ.get(SWITCH) != "0" and library().exists():
        mx.library.load(str(library()), verbose=False)
        _is_loaded = True
    return _is_loaded


def load_or_build() -> bool:
    """Load the operators, and build them first if nobody has tried that on this machine yet.

    Processes that start together build them once. A failure is logged in one line, and not tried
    again until ``tools/build_operators.py`` is called.
    """
    if load() or os.environ.get(SWITCH) == "0":
        return _is_loaded
    try:
        with _locked():
            if not library().exists() and not _failure().exists():
                _build_once()
    except OSError as error:  # the cache can't be written to
        logger.warning("going on without compiled operators: %s", error)
    return load()


def _build_once() -> None:
    logger.warning("compiling operators for this processor, once: about ten seconds")
    try:
        build()
    except ValueError as error:
        reason = str(error)
        logger.warning("going on without compiled operators: %s", reason.splitlines()[0])
        with AtomicFile(_failure(), "w") as file:
            file.write(reason)


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """Let one process at a time build; the kernel frees the lock of one that dies."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    with open(cache_folder() / "build.lock", "w", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def describe() -> str:
    """Say which operators steps on a CPU use, and why."""
    if _is_loaded:
        return f"compiled operators of {library()}"
    if os.environ.get(SWITCH) == "0":
        reason = f"{SWITCH}=0"
    elif _failure().exists():
        reason = f"they could not be built, see {_failure()}"
    else:
        reason = "they are not built yet"
    return f"MXNet's operators, which are slower than compiled ones ({reason})"


def serve(context: mx.Context) -> bool:
    """Say whether arrays on this context can be given to the operators."""
    return _is_loaded and context.device_type == "cpu"
