"""Jobs of several processes on Horovod, an extra that must be compiled: else all is skipped."""

import json
import shutil
import subprocess
import sys

import pytest

from dsoftmax.recognition import train
from tests.recognition.common.distributed import job_of_heads
from tests.recognition.common.distributed.jobs import (
    PYTHON,
    assert_same_bits,
)

pytest.importorskip("horovod.mxnet", reason="Horovod is not installed")
pytestmark = pytest.mark.slow


def horovodrun(ranks, command, folder):
    """Run a job; return its exit code and what it printed."""
    script = folder / "job.sh"  # horovodrun takes --network for a flag of its own
    script.write_text(" ".join(["exec", *(f"'{word}'" for word in map(str, command))]))
    launcher = shutil.which("horovodrun", path=str(sys.exec_prefix) + "/bin")
    done = subprocess.run(
        [launcher, "--gloo", "-np", str(ranks), "-H", f"localhost:{ranks}", "bash", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Run all heads in one job of two ranks."""
    folder = tmp_path_factory.mktemp("heads")
    code, output = horovodrun(2, [*PYTHON, job_of_heads.__file__, folder, "device"], folder)
    assert code == 0, output[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    "case", [name for name, (_, store, _) in job_of_heads.CASES.items() if store != "server"]
)
def test_heads_as_one_process_with_two_devices(found, case):
    for one in found:
        assert one[case] == dict.fromkeys(one[case], 0.0)


def test_what_is_exchanged(found):
    for one in found:
        exchanged = one["exchanged"]
        assert exchanged["sum"] == [[3.0] * 3] * 2
        assert exchanged["repeated"] == [[10.0 * turn, 10.0 * turn + 1] for turn in range(30)]
        assert exchanged["integers"] == [(1 << 40) - 1, -1, (1 << 40) + 2, -1]
        assert exchanged["json"] == [{"rank": 0, "text": ""}, {"rank": 1, "text": "é"}]
        assert exchanged["broadcast"]["b"] == ["float64", [[0.1]]]


@pytest.mark.parametrize("loss", ["dsoftmax", "dsoftmax_k"])
def test_training_and_a_resume_on_another_number_of_ranks(flags, tmp_path, loss):
    options = ["--loss", loss] + (["--sample-rate", "0.25"] if loss == "dsoftmax_k" else [])
    alone = ("--devices", "cpu:2", "--class-parallel", "1")
    whole = flags("whole", *options, *alone)
    assert train.main(whole) == 0
    two = flags("part", *options, "--devices", "cpu", "--max-steps", "5")
    code, output = horovodrun(2, [*PYTHON, train.__file__, *two], tmp_path)
    assert code == 0, output[-3000:]
    part = flags("part", *options, *alone, "--max-steps", "8", "--resume")
    assert train.main(part) == 0
    two = flags("part", *options, "--devices", "cpu", "--resume")
    code, output = horovodrun(2, [*PYTHON, train.__file__, *two], tmp_path)
    assert code == 0, output[-3000:]
    assert_same_bits(whole, two)


def test_a_rank_that_fails_ends_the_job(flags, tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        "import sys\n"
        "from dsoftmax.recognition import loop, train\n"
        "from dsoftmax.recognition.common.distributed import job\n"
        "step = loop.Run.train_step\n"
        "def failing(run, batch):\n"
        "    if run.step == 3 and run.group.rank == 1:\n"
        "        raise RuntimeError('a cosmic ray')\n"
        "    return step(run, batch)\n"
        "loop.Run.train_step = failing\n"
        "job.leave(train.main(sys.argv[1:]))\n"
    )
    made = flags("job", "--devices", "cpu", "--loss", "nsoftmax")
    code, output = horovodrun(2, [*PYTHON, script, *made], tmp_path)
    assert code != 0
    assert "RuntimeError: a cosmic ray" in output


def test_a_rank_that_is_refused_ends_the_job(flags, tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        "import os, sys\n"
        "from dsoftmax.recognition import train\n"
        "from dsoftmax.recognition.common.distributed import job\n"
        "if os.environ['HOROVOD_RANK'] == '1':\n"
        "    sys.argv += ['--data-dir', 'nowhere']\n"
        "job.run(train.main)\n"
    )
    made = flags("job", "--devices", "cpu", "--loss", "nsoftmax")
    code, output = horovodrun(2, [*PYTHON, script, *made], tmp_path)
    assert code != 0
    assert "error: nowhere: there is no such folder" in output
