"""The lock on a run's folder."""

import errno
import fcntl
import os

import pytest

from dsoftmax.recognition import lock
from dsoftmax.recognition.lock import FolderInUseError, RunLock


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
