"""Compare training on GPUs with training on the CPU, where the tests of this tree prove it right.

Each check trains ten steps twice, by `Run` as ``train.py`` does, and compares the losses and the
class weights. A run on n GPUs is compared with one on n CPU contexts, because BatchNorm normalizes
over the images of a device.
"""

from __future__ import annotations

import itertools
import os
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import mxnet as mx
import numpy as np

from dsoftmax.recognition.common.devices import contexts
from dsoftmax.recognition.data.synthetic import make_dataset
from dsoftmax.recognition.loop import Run
from dsoftmax.recognition.settings import parse

STEPS = 10
IMAGES_PER_DEVICE = 8
PEOPLE = 16
TOLERANCE = 1e-4
FLOAT16_TOLERANCE = 1e-2  # ten times the distance of neighbouring float16 numbers
LEAST_MOVEMENT = 100  # times the tolerance: class weights that stand still agree with anything
COPIED = 1 << 20  # numbers of each copy between two devices
# Rounding is not amplified: a smooth activation, and small steps of the network. The class weights
# take larger ones, so that a wrong gradient shows.
SMOOTH = """from dsoftmax.recognition.config import *
network.tiny.net_act = 'softrelu'
config.fc7_lr_mult = 100.0
"""
COMMON = {
    "network": "tiny",
    "loss": "dsoftmax",
    "dataset": "drawn",
    "target": "none",
    "lr": 1e-3,
    "lr-schedule": "constant",
    "max-steps": STEPS,
    "per-batch-size": IMAGES_PER_DEVICE,
    "threads": 1,
    "seed": 1,
}


class Check(NamedTuple):
    """A comparison to make: its name, and a function that returns what was found."""

    name: str
    run: Callable[[], Finding]


class Finding(NamedTuple):
    """What a check has found."""

    passed: bool
    detail: str


class Trajectory(NamedTuple):
    """The losses of some steps, and the class weights before and after them, (K, D)."""

    losses: np.ndarray
    before: np.ndarray
    after: np.ndarray


class Trials:
    """Trains by flags in a folder; two runs with the same flags are one.

    Parameters
    ----------
    folder : str
        An empty one, for the dataset and the runs.
    devices : int
        The largest number of devices; the dataset is large enough for them.
    """

    def __init__(self, folder: str, devices: int):
        self._folder, self._done = folder, {}
        self._faces = os.path.join(folder, "faces")
        make_dataset(self._faces, PEOPLE, 4 * devices, val_identities=0, pairs=0, size=48)
        self._config = os.path.join(folder, "smooth.py")
        with open(self._config, "w", encoding="utf-8") as file:
            file.write(SMOOTH)

    def train(self, flags: Mapping[str, Any]) -> Trajectory:
        """Train ten steps with `COMMON` and these flags; True stands for a flag without a value."""
        key = tuple(sorted(flags.items()))
        if key not in self._done:
            self._done[key] = self._train({**COMMON, **flags}, f"run-{len(self._done)}")
        return self._done[key]

    def _train(self, flags: Mapping[str, Any], name: str) -> Trajectory:
        flags = {
            **flags,
            "data-dir": self._faces,
            "config": self._config,
            "models-root": os.path.join(self._folder, name),
        }
        made = [[f"--{key}"] + [str(value)] * (value is not True) for key, value in flags.items()]
        run = Run(parse(list(itertools.chain.from_iterable(made))))
        try:
            head = run.trained.head
            before, losses = head.class_weights(), []
            epochs = map(run.plan.pipeline.epoch, itertools.count())
            for batch in itertools.islice(itertools.chain.from_iterable(epochs), STEPS):
                losses.append(run.train_step(batch))
                run.step += 1
            return Trajectory(np.array(losses), before, head.class_weights())
        finally:
            run.release()


def compare(found: Trajectory, expected: Trajectory, tolerance: float = TOLERANCE) -> Finding:
    """Compare losses and class weights, each relative to the largest number of them."""
    losses = _difference(found.losses, expected.losses)
    weights = _difference(found.after, expected.after)
    begun = _difference(found.before, expected.before)
    moved = _difference(expected.before, expected.after)
    passed = max(losses, weights, begun) <= tolerance and moved >= LEAST_MOVEMENT * tolerance
    return Finding(
        bool(passed),
        f"losses differ by {losses:.1e}, class weights by {weights:.1e} after {STEPS} steps that "
        f"moved them by {moved:.1e} (legal: {tolerance:.0e}), by {begun:.1e} before the first",
    )


def _difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Return NaN, which is not below any tolerance, if a number is NaN."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def compare_copies(devices: Sequence[mx.Context]) -> Finding:
    """Copy numbers from each device to each other one, and compare their bits."""
    expected = np.arange(COPIED, dtype=np.float32)
    pairs = list(itertools.permutations(devices, 2))
    wrong = []
    for source, target in pairs:
        there = mx.nd.array(expected, ctx=source)
        if not np.array_equal(there.as_in_context(target).asnumpy(), expected):
            wrong.append(f"{source} to {target}")
    detail = f"{len(pairs) - len(wrong)} of {len(pairs)} copies are whole"
    return Finding(not wrong, f"{detail}; wrong: {', '.join(wrong)}" if wrong else detail)


def make_checks(folder: str, one: str, several: str | None) -> list[Check]:
    """List the checks of some devices.

    Parameters
    ----------
    folder : str
        An empty one.
    one, several : str
        The devices to check, as ``--devices`` takes them: ``gpu`` and ``gpu:4``. Without `several`
        the checks that need more than one are left out.
    """
    devices = contexts(several or one)
    count = len(devices)
    trials = Trials(folder, count)

    def check(name, tried, expected, tolerance=TOLERANCE):
        def run():
            return compare(trials.train(tried), trials.train(expected), tolerance)

        return Check(name, run)

    def on_cpu(name, tried, **changes):
        return check(name, tried, {**tried, "devices": "cpu", **changes})

    full = {"devices": one}
    sampled = {"devices": one, "loss": "dsoftmax_k", "sample-rate": 0.5}
    float16 = {"devices": one, "fp16-scale": 128}
    checks = [
        on_cpu("one device, all classes", full),
        on_cpu("one device, sampled classes", sampled),
        on_cpu("one device, class weights in host memory", {**sampled, "store": "host"}),
        check("float16 network", float16, {"devices": "cpu"}, FLOAT16_TOLERANCE),
    ]
    if several:
        split = {"devices": several, "class-parallel": 1}
        together = {"devices": several, "sync-bn": True}
        whole = {"devices": "cpu", "per-batch-size": count * IMAGES_PER_DEVICE}
        many = {"devices": f"cpu:{count}"}
        checks += [
            Check("copies between devices", lambda: compare_copies(devices)),
            on_cpu(f"{count} devices, split classes", split, **many),
            on_cpu(f"{count} devices, sampled and split", {**sampled, **split}, **many),
            on_cpu(f"{count} devices, --kvstore nccl", {**split, "kvstore": "nccl"}, **many),
            check(f"{count} devices, --sync-bn", together, whole),
        ]
    return checks


def run_check(check: Check) -> Finding:
    """Run a check; an error is a finding, too."""
    try:
        return check.run()
    except (ValueError, OSError, MemoryError, mx.MXNetError) as error:
        lines = str(error).strip().splitlines() or [""]
        # MXNet's traces come before or after this line.
        reason = next((line for line in lines if "Check failed" in line), lines[-1])
        return Finding(False, f"{type(error).__name__}: {reason.strip()}")
