"""How the tests of many processes start jobs and compare what they saved."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from mxnet import nd

from dsoftmax.recognition import states
from dsoftmax.recognition.settings import parse
from dsoftmax.tools import launch

PYTHON = [sys.executable, "-W", "ignore"]
SPLIT = ("--env", "MXNET_KVSTORE_BIGARRAY_BOUND=100")  # small arrays on all servers, as large ones


def launched(workers, servers, command, *flags):
    """Return the command line of a job."""
    numbers = ["-n", str(workers), "-s", str(servers)]
    return [*PYTHON, launch.__file__, *numbers, *flags, "--", *map(str, command)]


def run(command, timeout=120):
    """Run a job; return its exit code and what it printed."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout
    )
    return done.returncode, done.stdout


def states_of(made):
    return states.list_states(os.path.join(parse(made).folder, "states"))


def assert_same_bits(one, other):
    """Compare the newest states of two runs."""
    one, other = (Path(states_of(made)[0]) for made in (one, other))
    assert one.name == other.name
    for name in states.FILES[:2]:
        a, b = (nd.load(str(path / name)) for path in (one, other))
        assert set(a) == set(b)
        for key in a:
            np.testing.assert_array_equal(a[key].asnumpy(), b[key].asnumpy(), err_msg=key)
    for name in states.FILES[2:]:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
