"""The command as a user runs it, on a handful of people and steps."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsoftmax.recognition.data.synthetic import make_dataset
from dsoftmax.tools import reproduce
from dsoftmax.tools.reproduction import scales, speed
from dsoftmax.tools.reproduction.runner import Runner


@pytest.fixture(scope="module")
def people(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("data") / "people")
    make_dataset(folder, identities=80, images=3, val_identities=0, pairs=0, size=32)
    return folder


def arguments(people, output, *others):
    flags = {
        "data-dir": people,
        "held-out": 10,
        "output": output,
        "part": 4,
        "batch-size": 4,
        "steps": 3,
        "foundation-steps": 4,
        "seeds": 1,
        "workers": 2,
    }
    return [*others, *(f"--{name}={value}" for name, value in flags.items())]


def test_a_table_from_a_dataset_and_nothing_is_run_twice(people, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(speed, "PAPERS_SIZE", speed.Size(600, width=8, batch_size=4, part=4))
    output = str(tmp_path / "out")
    flags = arguments(people, output, "table3", "claims")
    flags += ["--only", "softmax", "rand-softmax", "hf-softmax", "k-0.3", "k-0.9"]
    assert reproduce.main(flags) == 0
    assert "results.md" in capsys.readouterr().out
    page = (tmp_path / "out" / "results.md").read_text()
    for label in ("Softmax", "Rand-Softmax", "HF-Softmax", "D-Softmax-K"):
        assert f"| {label} |" in page
    assert "undecided at this scale" in page
    trials = sorted(os.listdir(os.path.join(output, "trials")))
    assert len(trials) == 1 + 2 + 3  # the foundation, two values of d, three others

    def refuse(*_):
        raise AssertionError("a trial was run again")

    monkeypatch.setattr(Runner, "_start", refuse)
    assert reproduce.main(flags) == 0
    assert (tmp_path / "out" / "results.md").read_text() == page
    # The numbers serve as well as the trials' folders do, on another machine for example.
    shutil.rmtree(os.path.join(output, "trials"))
    assert reproduce.main(flags) == 0
    assert (tmp_path / "out" / "results.md").read_text() == page
    # Those of trials with other flags don't.
    with pytest.raises(AssertionError, match="run again"):
        reproduce.main([*flags, "--steps=4"])


def test_no_time_left(people, tmp_path):
    output = str(tmp_path / "out")
    assert reproduce.main([*arguments(people, output, "table3"), "--time-budget=0"]) == 0
    assert not os.path.exists(os.path.join(output, "trials"))


def test_a_trial_that_fails_is_named_with_its_log(people, tmp_path, capsys):
    output = str(tmp_path / "out")
    bad = [*arguments(people, output, "table3"), "--batch-size=100000"]
    assert reproduce.main(bad) == 2
    error = capsys.readouterr().err
    assert "a trial of rand_softmax failed: see" in error
    log = error.rsplit("see ", 1)[1].split(";")[0].strip()
    assert "batch" in Path(log).read_text()


def test_flags_of_a_dataset_that_is_not_given(capsys):
    assert reproduce.main(["table1", "--steps", "7"]) == 2
    assert "--steps needs --data-dir" in capsys.readouterr().err


def test_only_some_rows(tmp_path, capsys):
    flags = ["table1", f"--data-dir={tmp_path}", "--only"]
    setting = scales.own_setting(reproduce.parse([*flags, "softmax", "d-0.9", "k+batch"]))
    assert setting.only == ("softmax", "d-0.9", "k+batch")
    assert reproduce.main([*flags, "sofmax"]) == 2
    assert "there is no row 'sofmax', only d-0.1, d-0.3" in capsys.readouterr().err


def test_no_other_dataset_finds_the_parts_of_this_one(tmp_path):
    def data_of(folder, held_out):
        flags = ["table1", f"--data-dir={tmp_path}/{folder}/faces", f"--held-out={held_out}"]
        return scales.own_setting(reproduce.parse(flags)).data

    assert len({data_of("a", 10), data_of("b", 10), data_of("a", 20)}) == 3
    assert data_of("a", 10) == data_of("a", 10)


def test_full_scale_prints_commands(capsys):
    assert reproduce.main(["table1", "--scale", "full"]) == 0
    printed = capsys.readouterr().out
    assert "bash recognition/table1.sh" in printed
    assert "table2" not in printed


@pytest.mark.parametrize(
    "by", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM]
)
def test_interrupted_trials_stop_and_go_on(people, tmp_path, by):
    """Ctrl-C or SIGTERM leaves no process behind, and a state to go on from."""
    output = tmp_path / "out"
    command = [sys.executable, "-m", "dsoftmax.tools.reproduce"]
    flags = arguments(people, str(output), "table3")
    with subprocess.Popen(
        [*command, *flags, "--foundation-steps=100000"],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        logs = output / "trials"
        deadline = time.monotonic() + 60
        while not any("Epoch[" in log.read_text() for log in logs.glob("*/log.txt")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        process.send_signal(by)
        assert process.wait(60) == 130
        assert "interrupted" in process.stderr.read()
    (folder,) = logs.iterdir()
    assert "stopped by signal 15" in (folder / "log.txt").read_text()
    assert list(folder.glob("run/*/states/*"))
    for command_line in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            assert folder.name.encode() not in command_line.read_bytes()
