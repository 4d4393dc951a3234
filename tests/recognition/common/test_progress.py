import sys
import time

from dsoftmax.recognition.common import progress as module
from dsoftmax.recognition.common.progress import progress


def test_a_log_gets_whole_lines(capsys, monkeypatch):
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LOG_LINES", 0.0)
    assert list(progress(range(3), desc="reading", unit="files")) == [0, 1, 2]
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("reading: 0/3 files [")
    assert lines[-1].startswith("reading: 3/3 files [")
    assert "files/s" in lines[-1]
    assert "\r" not in "".join(lines)


def test_a_log_is_not_flooded(capsys):
    for _ in progress(range(2000), desc="reading", unit="files"):
        pass
    assert len(capsys.readouterr().err.splitlines()) == 2  # the first and the last state


def test_a_terminal_gets_a_bar(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress(total=10, desc="reading", unit="files") as bar:
        bar.update(10)
        time.sleep(0.01)
    assert "\rreading" in capsys.readouterr().err
