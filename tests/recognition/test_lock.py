"""The lock on a run's folder."""

import errno
import fcntl
import os
import socket
import subprocess
import sys

import pytest

from dsoftmax.recognition import lock, loop, train
from dsoftmax.recognition.common.distributed.group import Group
from dsoftmax.recognition.lock import FolderInUseError, RunLock
from dsoftmax.recognition.settings import parse
from tests.recognition.runs import folder_of


def test_one_at_a_time(tmp_path):
    first = RunLock(tmp_path)
    with pytest.raises(FolderInUseError, match=f"is in use by process {os.getpid()} on"):
        RunLock(tmp_path)
    first.release()
    RunLock(tmp_path).release()
    assert os.listdir(tmp_path) == []


def test_a_file_that_was_left_locks_nobody_out(tmp_path):
    (tmp_path / lock.NAME).write_text("process 1 on a host since long ago, longer than others are")
    held = RunLock(tmp_path)
    assert (tmp_path / lock.NAME).read_text().startswith(f"process {os.getpid()} on ")
    assert "others" not in (tmp_path / lock.NAME).read_text()
    held.release()


def test_folders_that_were_made_are_removed_if_nothing_came_into_them(tmp_path):
    (tmp_path / "there").mkdir()
    RunLock(tmp_path / "there" / "models" / "run").release()
    assert os.listdir(tmp_path) == ["there"]
    assert os.listdir(tmp_path / "there") == []
    held = RunLock(tmp_path / "models" / "run")
    (tmp_path / "models" / "run" / "train.log").write_text("")
    held.release()
    held.release()
    assert os.listdir(tmp_path / "models" / "run") == ["train.log"]


def test_a_lock_that_is_dropped_is_free(tmp_path):
    RunLock(tmp_path)
    RunLock(tmp_path).release()


def test_the_file_is_removed_while_another_opens_it(tmp_path, monkeypatch):
    """Who locks a file that is in the folder no more would lock nobody out."""
    first = RunLock(tmp_path / "run")
    flock = fcntl.flock

    def late(handle, flags):
        monkeypatch.setattr(fcntl, "flock", flock)
        first.release()
        flock(handle, flags)

    monkeypatch.setattr(fcntl, "flock", late)
    second = RunLock(tmp_path / "run")
    with pytest.raises(FolderInUseError):
        RunLock(tmp_path / "run")
    second.release()


def test_where_there_are_no_locks(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    one, other = RunLock(tmp_path), RunLock(tmp_path)
    assert one.warning.endswith(
        "can't be locked (No locks available): nothing keeps a second run out of it"
    )
    one.release()
    other.release()
    monkeypatch.setattr(lock, "UNSUPPORTED", ())
    with pytest.raises(OSError, match="No locks available"):
        RunLock(tmp_path)


def test_a_second_run_is_refused(flags, capsys):
    made = flags(max_steps=2)
    first = loop.Run(parse(made))
    (folder_of(made) / "states" / "state-00000001.77.part").mkdir(parents=True)
    before = sorted(folder_of(made).rglob("*"))
    for more in ([], ["--resume"], ["--resume", "auto"]):
        assert train.main([*made, *more]) == 2
        err = capsys.readouterr().err
        assert f"is in use by process {os.getpid()} on {socket.gethostname()} since 20" in err
        assert "--extra-model-name" in err
        assert err.count("\n") == 1
    assert sorted(folder_of(made).rglob("*")) == before
    assert first.train() == 0
    assert not (folder_of(made) / lock.NAME).exists()
    assert train.main([*flags(max_steps=4), "--resume"]) == 0


def test_a_killed_run_holds_nothing(flags, capsys):
    made = flags(max_steps=2)
    hold = (
        "import sys, time\n"
        "from dsoftmax.recognition.lock import RunLock\n"
        "held = RunLock(sys.argv[1])\n"
        "print('locked', flush=True)\n"
        "time.sleep(100)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", hold, folder_of(made)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "locked\n"
    assert train.main(made) == 2
    assert f"is in use by process {process.pid} on" in capsys.readouterr().err
    process.kill()
    process.communicate()
    assert (folder_of(made) / lock.NAME).exists()
    assert train.main(made) == 0


def test_other_processes_of_a_group_lock_nothing(flags, monkeypatch):
    class Second(Group):
        rank, size = 1, 2

    def refuse(*_):
        raise ValueError("that is enough")

    monkeypatch.setattr(loop, "Plan", refuse)
    with pytest.raises(ValueError, match="that is enough"):
        loop.Run(parse(flags()), Second())
    assert not folder_of(flags()).exists()
