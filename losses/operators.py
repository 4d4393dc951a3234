"""The compiled operators of operators.cc: how they are built and loaded.

The first head on a CPU builds them, once per processor and version, into the user's cache, if there
is a C++ compiler. `kernels` asks `serve` and uses MXNet's operators if they are not there.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from typing import Collection, Iterator, Sequence

import mxnet as mx
import numpy as np
from mxnet import nd
from mxnet.base import _LIB, MXNetError, py_str
from mxnet.ndarray.ndarray import _new_alloc_handle

from dsoftmax.recognition.common.cli import default_threads
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

# Of MXNet's C API, in the order of operators.cc.
MXNET_FUNCTIONS = (
    "MXNDArrayGetDType",
    "MXNDArrayDetach",
    "MXNDArrayFree",
    "MXNDArrayGetData",
    "MXEnginePushSyncND",
)

OWN_ERRORS = {-2: "there is no operator", -3: "an array has a type unknown to the operator"}

logger = logging.getLogger(__name__)
_library: ctypes.CDLL | None = None
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
    target = library()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = os.path.join(folder, "operators.so")
        _run([compiler, *FLAGS, SOURCE, "-o", made])
        # In a process of its own, which a library that is none may end.
        _run([sys.executable, "-c", f"import ctypes; ctypes.CDLL({made!r}).dsoftmax_push"])
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
    global _library, _is_loaded
    if not _is_loaded and os.environ.get(SWITCH) != "0" and library().exists():
        loaded = ctypes.CDLL(str(library()))
        functions = (ctypes.cast(getattr(_LIB, name), ctypes.c_void_p) for name in MXNET_FUNCTIONS)
        loaded.dsoftmax_connect((ctypes.c_void_p * len(MXNET_FUNCTIONS))(*functions))
        _library, _is_loaded = loaded, True
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
    logger.warning("compiling operators for this processor, once: a few seconds")
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


def output(context: mx.Context, *shape: int) -> nd.NDArray:
    """Return an array for an operator to write, which has no memory until it does.

    `nd.empty` allocates at once, and a chunked step is queued far ahead: that would be 90 MB.
    """
    return nd.NDArray(_new_alloc_handle(shape, context, True))


def queue(
    name: str,
    written: Sequence[nd.NDArray],
    read: Sequence[nd.NDArray],
    numbers: Sequence[float] = (),
) -> None:
    """Queue an operator on MXNet's engine, which runs it when its arrays are ready.

    Parameters
    ----------
    name : str
        Of operators.cc, which says what it reads and writes.
    written, read : sequence of NDArray
        On the same CPU context. One that is written shares no memory with any other.
    numbers : sequence of float
    """
    of_written, of_read = _handles_and_shapes(written), _handles_and_shapes(read)
    passed = (ctypes.c_float * len(numbers))(*numbers)
    device = written[0].context.device_id
    error = _library.dsoftmax_push(
        name.encode(), device, *of_written, len(written), *of_read, len(read), passed, len(numbers)
    )
    if error in OWN_ERRORS:
        raise TypeError(f"{OWN_ERRORS[error]} {name}")
    if error:
        raise MXNetError(py_str(_LIB.MXGetLastError()))


def find_candidates(
    classes: np.ndarray,
    starts: np.ndarray,
    leaves: np.ndarray,
    sides: np.ndarray,
    own_sides: np.ndarray,
    most: int,
) -> list[np.ndarray]:
    """Find the classes in some leaves of a forest that lie on the sides of planes a sample lies on.

    Parameters
    ----------
    classes : (n,) int32
        Leaf after leaf.
    starts : (all leaves + 1,) int64
        Where each leaf starts among them.
    leaves : (B, leaves) int64
        Those of each sample.
    sides, own_sides : (K, m) and (B, m) uint64
        A bit per plane, of classes and samples.
    most : int

    Returns
    -------
    list of (up to most,) int64
        Sorted, those who agree on most sides; of equal ones the first.
    """
    samples = len(leaves)
    found, sizes = np.empty((samples, most), np.int32), np.empty(samples, np.int64)
    in_order = [np.ascontiguousarray(array) for array in (leaves, sides, own_sides)]
    leaves, sides, own_sides = in_order
    counts = (ctypes.c_int64(number) for number in (sides.shape[1], samples, most))
    _library.dsoftmax_find_candidates(
        *(ctypes.c_void_p(array.ctypes.data) for array in (classes, starts, leaves)),
        ctypes.c_int64(leaves.shape[1]),
        *(ctypes.c_void_p(array.ctypes.data) for array in (sides, own_sides)),
        *counts,
        default_threads(),
        *(ctypes.c_void_p(array.ctypes.data) for array in (found, sizes)),
    )
    return [of_sample[:size].astype(np.int64) for of_sample, size in zip(found, sizes)]


def share_cores(contexts: Collection[mx.Context]) -> list[nd.NDArray]:
    """Let CPU contexts that compute at the same time use no more threads than there are cores.

    Returns
    -------
    list of (1,)
        The number of threads of each context from now on, whatever computes there.
    """
    most = max(default_threads() // len(contexts), 1)
    threads = [output(context, 1) for context in contexts]
    for of_context in threads:
        queue("limit_threads", [of_context], [], [most])
    return threads


def _handles_and_shapes(arrays: Sequence[nd.NDArray]) -> tuple[ctypes.Array, ctypes.Array]:
    """Return the arrays for C, and their rows and columns in turns; a vector has one column."""
    sizes = []
    for array in arrays:
        rows, columns = array.shape if array.ndim == 2 else (array.size, 1)
        sizes += [rows, columns]
    handles = (ctypes.c_void_p * len(arrays))(*(array.handle for array in arrays))
    return handles, (ctypes.c_int64 * len(sizes))(*sizes)
