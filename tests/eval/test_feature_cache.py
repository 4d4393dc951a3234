"""Embeddings on disk: made once, resumed where a run was killed, never mixed up."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from dsoftmax.eval import growing_array
from dsoftmax.eval.feature_cache import cached_features
from dsoftmax.eval.growing_array import GrowingArray
from dsoftmax.recognition.data.images import ImageError

SIZE = (8, 6)


def picture(number):
    if number == 5:
        raise ImageError("cut off")
    return np.full((*SIZE, 3), number, np.uint8)


def embed(images):
    """Return an image's number, its square and 1."""
    value = images[:, 0, 0, 0].astype(np.float32)
    return np.stack([value, value**2, np.ones_like(value)], axis=1)


def features(folder, count=23, depends_on=None, make=lambda: embed, load=picture):
    return cached_features(
        str(folder), "set", depends_on or {"model": "a"}, count, make, load, SIZE, batch_size=4
    )


def check(found, count=23):
    assert found.views.shape == (count, 2, 3)
    for number in range(count):
        expected = [0, 0, 0] if number == 5 else [number, number**2, 1]
        np.testing.assert_array_equal(found.views[number], [expected] * 2)
    assert found.unreadable == [(5, "cut off")]


def never(*_):
    raise AssertionError("nothing was to be done")


def test_once_is_enough(tmp_path):
    check(features(tmp_path))
    loaded = []

    def load(number):
        loaded.append(number)
        return picture(number)

    check(features(tmp_path, make=never, load=load))
    assert loaded == [5]  # to see whether it can be read by now


def test_what_can_be_read_later_is(tmp_path):
    check(features(tmp_path))
    check(features(tmp_path, make=never))  # still broken: no model is needed to see that
    found = features(tmp_path, load=lambda number: np.full((*SIZE, 3), number, np.uint8))
    assert found.unreadable == []
    np.testing.assert_array_equal(found.views[5], [[5, 25, 1]] * 2)
    again = features(tmp_path, make=never, load=never)
    np.testing.assert_array_equal(again.views, found.views)


def test_another_model_has_its_own(tmp_path):
    check(features(tmp_path))
    other = features(tmp_path, depends_on={"model": "b"}, make=lambda: lambda x: -embed(x))
    assert other.views[3, 0, 0] == -3
    check(features(tmp_path, make=never))


def test_an_exception_loses_nothing(tmp_path):
    loaded = []

    def load(number):
        if number == 14 and 14 not in loaded:
            loaded.append(14)
            raise KeyboardInterrupt
        loaded.append(number)
        return picture(number)

    with pytest.raises(KeyboardInterrupt):
        features(tmp_path, load=load)
    loaded[:] = [14]
    check(features(tmp_path, load=load))
    assert min(loaded) > 5


def test_killed_while_writing(tmp_path, monkeypatch):
    """Rows beyond those the state claims may be torn; they are written anew."""
    check(features(tmp_path))
    (folder,) = tmp_path.iterdir()
    state = folder / "state.json"
    state.write_text('{"done": 8, "row": [2, 3], "notes": {"unreadable": [[5, "cut off"]]}}')
    whole = (folder / "features.npy").read_bytes()
    (folder / "features.npy").write_bytes(whole[: -10 * 24 - 7])
    check(features(tmp_path, load=lambda number: picture(number) if number >= 8 else never()))


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kill -9 is not of this system")
def test_kill_9(tmp_path):
    script = textwrap.dedent(
        f"""
        import sys, time
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        from dsoftmax.eval import growing_array
        import test_feature_cache as t
        growing_array.SECONDS_BETWEEN_SAVES = 0
        def load(number):
            time.sleep(0.02)
            return t.picture(number)
        t.features({str(tmp_path)!r}, load=load)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("*/state.json")) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list(tmp_path.glob("*/state.json"))
    loaded = []

    def load(number):
        loaded.append(number)
        return picture(number)

    check(features(tmp_path, load=load))
    assert 0 not in loaded


def test_the_state_is_saved_now_and_then(tmp_path, monkeypatch):
    monkeypatch.setattr(growing_array, "SECONDS_BETWEEN_SAVES", -1)
    states = []
    monkeypatch.setattr(
        GrowingArray,
        "save",
        lambda rows, save=GrowingArray.save: (states.append(rows.done), save(rows)),
    )
    check(features(tmp_path))
    assert states == [4, 8, 12, 16, 20, 23, 23]
