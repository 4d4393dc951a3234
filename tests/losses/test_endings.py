"""A script that uses a head ends by itself, with the right code, wherever it stops."""

import signal
import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys
import mxnet as mx
from mxnet import autograd
from dsoftmax import losses

signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
preset, contexts, end = sys.argv[1], int(sys.argv[2]), sys.argv[3]
head = losses.create(preset, 20000, 512, ctx=[mx.cpu(i) for i in range(contexts)])
head.initialize()
trainer = head.trainer("sgd", {"learning_rate": 0.1, "momentum": 0.9})
x = mx.nd.random.normal(shape=(256, 512))
x.attach_grad()
for _ in range(2):
    with autograd.record():
        loss = head(x, list(range(256)))
    if end == "forward":
        continue
    loss.backward()
    if end == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    if end == "exception":
        raise ValueError("in between")
    if end != "backward":
        trainer.step(256)
"""
CODES = {"forward": 0, "backward": 0, "step": 0, "exception": 1, "interrupt": -signal.SIGINT}
SECONDS = 60  # a few are needed; without end is what is looked for


@pytest.mark.parametrize("end", CODES)
@pytest.mark.parametrize(
    ("preset", "contexts"),
    [
        ("dsoftmax", 2),
        ("dsoftmax_k", 1),
        *(
            pytest.param(preset, contexts, marks=pytest.mark.slow)
            for preset, contexts in [
                ("dsoftmax", 1),
                ("dsoftmax_k", 2),
                ("arcface", 1),
                ("arcface", 2),
                ("nsoftmax", 1),
                ("hf_softmax", 2),
            ]
        ),
    ],
)
def test_scripts_end(preset, contexts, end):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, preset, str(contexts), end],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == CODES[end], done.stderr
    assert ("in between" in done.stderr) == (end == "exception")
