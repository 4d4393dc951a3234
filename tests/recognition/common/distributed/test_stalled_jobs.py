"""Trainings of several processes that stand still, or only seem to."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from dsoftmax.recognition import train
from dsoftmax.recognition.common.distributed import heartbeat
from dsoftmax.recognition.data.packs import write_pack
from tests import faults
from tests.recognition.common.distributed.jobs import (
    PYTHON,
    assert_same_bits,
    launched,
    run,
    states_of,
)

SECONDS = "15"  # for whatever a worker may do between two signs of life on a busy machine
SAMPLED = ("--loss", "dsoftmax_k", "--sample-rate", "0.25", "--devices", "cpu")


@pytest.fixture
def job(flags, monkeypatch, tmp_path):
    """Return the command line of a job with a fault, and the flags of its training."""

    def make(fault, *more, restarts=1):
        monkeypatch.setenv(faults.VARIABLE, fault)
        monkeypatch.setenv(faults.STEP_FILE, str(tmp_path / "step"))
        made = flags("job", *SAMPLED, "--kvstore", "dist_sync", "--verbose", "2", *more)
        command = [*PYTHON, faults.__file__, *made]
        options = ("--stall-timeout", SECONDS, "--restart", restarts)
        return launched(2, 1, command, *map(str, options)), made

    return make


def test_signs_of_life(flags, faces, jpeg, monkeypatch, capfd):
    """A run tells each thing it begins, each step, and each batch that it verifies."""
    write_pack(faces / "val.bin", [jpeg() for _ in range(40)], [True, False] * 10)
    monkeypatch.setenv(heartbeat.SWITCH, "1")
    made = flags("run", *SAMPLED, "--target", "val", "--max-steps", "3", "--verbose", "2")
    assert train.main(made) == 0
    lines = capfd.readouterr().out.splitlines()
    beats = [line[len(heartbeat.MARK) :] for line in lines if line.startswith(heartbeat.MARK)]
    told = [beat for beat, before in zip(beats, [None, *beats]) if beat != before]
    assert told == [
        "joining the others",
        "reading the dataset",
        "building the network",
        "loading its first parameters",
        "after step 1",
        "after step 2",
        "saving step 2",
        "verifying step 2",
        "after step 2",
        "after step 3",
        "saving step 3",
        "verifying step 3",
        "after step 3",
        "saving step 3",
        "saving the model of step 3",
    ]
    batches = 2 * 40 // 8  # of images and their mirror images
    assert beats.count("verifying step 2") > batches


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "who"), [("worker1", "worker 1"), ("server", "server 0")])
def test_one_is_stopped(job, flags, victim, who):
    """The restarted job ends with the bits of one that nobody disturbed."""
    command, made = job(f"{victim} 5 stop")
    code, output = run(command, 300)
    assert code == 0, output[-3000:]
    assert f"launch: restart 1 of 1: {who} is stopped; no worker got any further in" in output
    assert "worker 1 after step 5" in output
    assert heartbeat.MARK not in output
    undisturbed = flags("other", *SAMPLED, "--kvstore", "dist_sync", "--verbose", "2")
    assert run(launched(2, 1, [*PYTHON, train.__file__, *undisturbed]))[0] == 0
    assert_same_bits(made, undisturbed)


@pytest.mark.slow
def test_a_signal_while_one_is_stopped(job):
    """It goes on, and all save the same step."""
    command, made = job("worker1 5 stop", "--max-steps", "1000", "--verbose", "1000")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        step_file = Path(os.environ[faults.STEP_FILE])
        deadline = time.monotonic() + 90
        while not (step_file.exists() and step_file.read_text() == "5"):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(1)  # it has stopped by now
        process.terminate()
        output = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    assert process.returncode == 143, output[-3000:]
    assert "stopped by signal 15: saving step" in output
    assert len(states_of(made)) == 1


@pytest.mark.slow
def test_the_scheduler_refuses_connections(job):
    """All wait for the one that can't come: that is noticed before the first step."""
    command, made = job("worker1 0 refuse")
    code, output = run(command, 300)
    assert code == 0, output[-3000:]
    assert "launch: restart 1 of 1: " in output
    assert "worker 1 joining the others" in output
    assert states_of([*made, "--resume"])[0].endswith("state-00000010")


@pytest.mark.slow
def test_slow_is_not_stalled(job):
    """The whole job takes longer than the timeout, but no step does."""
    command, _ = job("worker1 0 slow", "--max-steps", "40", restarts=0)
    code, output = run(command, 300)
    assert code == 0, output[-3000:]


@pytest.mark.slow
def test_fewer_workers_go_on_from_the_last_state(job):
    """One of two workers fails twice in a row, the other ends alone what both began."""
    command, made = job("worker1 3 exception always", restarts=2)
    command.insert(command.index("--"), "--min-workers=1")
    code, output = run(command, 300)
    assert code == 0, output[-3000:]
    assert "going on with 1 of 2 workers, without worker 1, which failed twice in a row" in output
    assert "resumed from" in output.rpartition("going on with")[2]
    assert states_of([*made, "--resume"])[0].endswith("state-00000010")
