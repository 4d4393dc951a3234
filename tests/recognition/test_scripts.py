"""The scripts of the paper's tables say what train.py understands."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsoftmax import losses
from dsoftmax.recognition.settings import parse

REPOSITORY = Path(__file__).resolve().parents[2]
ROWS = {"table1": 9, "table2": 9, "table3": 4}


@pytest.fixture
def run(tmp_path):
    """Run a script with a stand-in for Python that notes its arguments."""
    stand_in = tmp_path / "python"
    stand_in.write_text(f'#!{sys.executable}\nimport sys\nprint("\\x1f".join(sys.argv[1:]))\n')
    stand_in.chmod(0o755)

    def run(name, *rows, gpus="0,1,2,3"):
        environment = {**os.environ, "PYTHON": str(stand_in), "CUDA_VISIBLE_DEVICES": gpus}
        result = subprocess.run(
            ["bash", str(REPOSITORY / "recognition" / f"{name}.sh"), *rows],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        commands = [line.split("\x1f") for line in result.stdout.splitlines()]
        assert all(command[:2] == ["-u", "recognition/train.py"] for command in commands)
        return result, [parse(command[2:]) for command in commands]

    return run


@pytest.mark.parametrize("name", ROWS)
def test_every_row_is_a_legal_run(run, name):
    result, settings = run(name)
    assert result.returncode == 0
    assert len(settings) == ROWS[name]
    assert len({one.folder for one in settings}) == len(settings)
    for one in settings:
        assert (one.architecture, one.per_batch_size, one.resume) == ("r50", 64, "auto")
        assert one.max_steps > max(one.lr_steps) > 0
        options = dict(one.loss_options)
        assert options["scale"] == 32
        losses.create(options.pop("preset"), 512, 4, store=one.store, chunk=one.chunk, **options)


def test_values_of_the_paper(run):
    _, rows = run("table1")
    assert [row.loss_options.get("d") for row in rows] == [
        *(None, None, None),
        *(0.5, 0.7, 0.9, 1.0, 0.9, 0.9),
    ]
    _, rows = run("table2")
    rates = [row.loss_options["sample_rate"] for row in rows]
    assert rates == [1, 1 / 4, 1 / 16, 1 / 64, 1 / 256] + [1 / 64] * 4


def test_one_row_and_other_numbers_of_gpus(run):
    _, (one,) = run("table1", "arcface", gpus="5")
    assert (one.loss, one.per_batch_size) == ("arcface", 256)
    _, (one,) = run("table3", "dsoftmax_k", gpus="")
    assert (one.store, one.per_batch_size) == ("host", 256)


def test_unknown_rows(run):
    result, settings = run("table1", "arcfase")
    assert result.returncode == 2
    assert not settings
    assert "there is no experiment arcfase; legal are softmax sphereface" in result.stderr
