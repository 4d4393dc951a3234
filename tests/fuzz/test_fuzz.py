"""Damaged files of every format are refused by a clear error, or read; and faults are noticed."""

import ctypes
import faulthandler
import os
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY
from tests.fuzz import campaign
from tests.fuzz.formats import Format, text

MUTANTS = os.environ.get("DSOFTMAX_MUTANTS", "1000")

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def test_every_format():
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--mutants", MUTANTS],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def crash():
    faulthandler.disable()  # which pytest has enabled: nobody needs the stack of this one
    ctypes.string_at(0)


def leave():
    os._exit(3)


def loop():
    while True:
        pass


def fill_memory():
    return bytearray(2 * campaign.MEMORY)


def raise_bare():
    raise KeyError("x")


def name_nothing():
    raise ValueError("it is damaged")


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (crash, "the process died of"),
        (leave, "the process died of exit code 3"),
        (loop, "it took more than 1 s"),
        (fill_memory, "MemoryError"),
        (raise_bare, "KeyError: 'x'"),
        (name_nothing, "the message names no file"),
        (lambda: "something else", "it was read as something else"),
    ],
)
def test_faults_are_noticed(fault, why, monkeypatch):
    def read(folder):
        with open(os.path.join(folder, "file")) as file:
            return None if file.read() == "0123456789" else fault()

    planted = Format(("file",), text("file", "0123456789"), read, is_checked=True)
    monkeypatch.setitem(campaign.FORMATS, "planted", planted)
    monkeypatch.setattr(campaign, "SECONDS", 1)
    monkeypatch.setattr(campaign, "mutate", lambda content, _: ("cut", content[1:]))
    outcome = campaign.run("planted", range(2))
    assert [failure.number for failure in outcome.failures] == [0, 1]
    assert all(failure.why.startswith(why) for failure in outcome.failures), outcome.failures


def test_clear_errors_are_refusals(monkeypatch):
    def read(folder):
        path = os.path.join(folder, "file")
        with open(path) as file:
            if file.read() != "0123456789":
                raise ValueError(f"{path}: not the digits")

    planted = Format(("file",), text("file", "0123456789"), read)
    monkeypatch.setitem(campaign.FORMATS, "planted", planted)
    monkeypatch.setattr(campaign, "mutate", lambda content, _: ("cut", content[1:]))
    assert campaign.run("planted", range(3)) == campaign.Outcome(0, 3, [])


def test_mutants_are_the_same_each_time():
    made = [
        [
            campaign.mutate(b"some bytes of a file 12", campaign.random.Random(f"7 {number}"))
            for number in range(200)
        ]
        for _ in range(2)
    ]
    assert made[0] == made[1]
    assert len({content for _, content in made[0]}) > 150
