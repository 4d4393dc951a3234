import os

import pytest

from dsoftmax.recognition.files import AtomicFile, atomic_folder


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
