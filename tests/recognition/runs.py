"""What the tests of training runs share: where a run's files are, and how to compare or stop runs.

A run is named by its flags.
"""

import csv
import os
import signal
from pathlib import Path

import mxnet as mx
import numpy as np

from dsoftmax.recognition import states
from dsoftmax.recognition.loop import Run
from dsoftmax.recognition.settings import parse

COUNTS = (9, 8, 10, 7, 9)  # images of each identity; 43 in all, 5 batches of 8 per epoch


def folder_of(flags):
    """Return the folder of a run."""
    return Path(parse(flags).folder)


def states_of(flags):
    """Return the paths of a run's states, the newest first."""
    return states.list_states(str(folder_of(flags) / "states"))


def newest(flags):
    """Return the path of a run's newest state."""
    return Path(states_of(flags)[0])


def models_of(flags):
    """Return the numbers of a run's models, as its files have them."""
    return {path.stem[-4:] for path in folder_of(flags).glob("model-*.params")}


def read_table(path):
    """Return the rows of a table, without what depends on the machine."""
    with open(path) as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row.pop("samples_per_second", None)
    return rows


def assert_same_state(one, other, atol=0.0):
    """Compare two states: bit for bit, or nearly."""
    for name in states.FILES[:2]:
        a, b = (mx.nd.load(str(path / name)) for path in (one, other))
        assert set(a) == set(b)
        for key in a:
            np.testing.assert_allclose(a[key].asnumpy(), b[key].asnumpy(), rtol=atol, atol=atol)
    a, b = (np.load(path / "classes.npy") for path in (one, other))
    np.testing.assert_allclose(a, b, rtol=atol, atol=atol)
    if not atol:
        assert (one / "head.states").read_bytes() == (other / "head.states").read_bytes()


def stop_after(steps, flags):
    """Run, and send SIGTERM when so many steps are done."""
    run = Run(parse(flags))
    step = run.train_step

    def stepping(batch):
        if run.step + 1 == steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(batch)

    run.train_step = stepping
    assert run.train() == signal.SIGTERM
