import os
import re

import pytest

from dsoftmax.recognition.common.files import (
    AtomicFile,
    FullDiskError,
    atomic_folder,
    clean_partial,
    explain_full_disk,
    open_text,
)
from dsoftmax.recognition.states import StateWriter


def test_the_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "file"
    with AtomicFile(path) as file:
        file.write(b"one")
        assert not path.exists()
    assert path.read_bytes() == b"one"
    with pytest.raises(RuntimeError), AtomicFile(path) as file:
        file.write(b"two")
        raise RuntimeError
    assert path.read_bytes() == b"one"
    assert os.listdir(path.parent) == ["file"]


def test_a_disk_that_fills_up_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"), AtomicFile(path, "w") as file:
        file.write("new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_disk_that_fails_is_named(tmp_path, monkeypatch):
    def broken(_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match=f"Input/output error: '{tmp_path}/.file"):
        with AtomicFile(tmp_path / "file") as file:
            file.write(b"one")
    with pytest.raises(OSError, match=f"Input/output error: '{tmp_path}/classes.npy'"):
        with StateWriter(str(tmp_path)).file("classes.npy") as file:
            file.write(b"one")


def test_folder(tmp_path):
    path = tmp_path / "folder"
    with pytest.raises(RuntimeError), atomic_folder(path) as folder:
        open(os.path.join(folder, "a"), "w").close()
        raise RuntimeError
    assert os.listdir(tmp_path) == []
    path.mkdir()  # an empty one may be there
    with atomic_folder(path) as folder:
        open(os.path.join(folder, "a"), "w").close()
        assert os.listdir(path) == []
    assert os.listdir(path) == ["a"]
    with pytest.raises(FileExistsError, match="not an empty folder"), atomic_folder(path):
        pass
    assert os.listdir(path) == ["a"]


def test_a_full_disk_is_explained(tmp_path):
    path = str(tmp_path / "new" / "file")
    message = (
        f"^{re.escape(path)}: No space left on device: 1,234,567 bytes are needed, [0-9,]+ bytes"
    )
    with pytest.raises(FullDiskError, match=message) as found, explain_full_disk("other"):
        with explain_full_disk(path, 1234567):
            raise OSError(28, "No space left on device")
    assert found.value.errno == 28
    with pytest.raises(FileNotFoundError), explain_full_disk(path):
        os.stat(path)


def test_what_killed_processes_left(tmp_path):
    """What somebody else writes, and what only looks similar, stays."""
    gone, alive = (1 << 31) - 1, os.getppid()
    (tmp_path / f"state-00000004.{gone}.part").mkdir()
    (tmp_path / f"state-00000004.{gone}.part" / "file").touch()
    for name in (
        f".model-0001.params.{gone}.part",
        f".config.json.{os.getpid()}.part",
        f".mine.{alive}.part",
        "notes.part",
        "12.part",
        f"x.{gone}.party",
    ):
        (tmp_path / name).touch()
    removed = clean_partial(str(tmp_path))
    assert len(removed) == 3
    assert sorted(os.listdir(tmp_path)) == sorted(
        [f".mine.{alive}.part", "12.part", "notes.part", f"x.{gone}.party"]
    )
    assert clean_partial(str(tmp_path / "nowhere")) == []


def test_text_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "pairs.txt"
    path.write_bytes(b"\xef\xbb\xbfJos\xc3\xa9 1 2\n")
    with open_text(path) as file:
        assert file.read() == "José 1 2\n"
    path.write_bytes(b"Jos\xe9 1 2\n")
    with pytest.raises(ValueError, match=r"pairs\.txt: it is not text in UTF-8, .* 0xe9"):
        with open_text(path) as file:
            file.read()
