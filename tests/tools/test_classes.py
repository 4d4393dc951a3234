import json

import numpy as np
import pytest

from dsoftmax.recognition import states
from dsoftmax.recognition.common.arrays import write_arrays
from dsoftmax.tools import classes


@pytest.fixture
def run(tmp_path, rng):
    """Write a run's folder with the state of step 9, of six classes; return it."""
    path = tmp_path / "run" / "states" / "state-00000009"
    path.mkdir(parents=True)
    writer = states.StateWriter(str(path))
    facts = {"optimizer": "SGD", "num_update": 9, "criterion": {}}
    facts = np.frombuffer(json.dumps(facts).encode(), np.uint8)
    momenta = rng.normal(size=(6, 4)).astype(np.float32)
    for name in states.FILES:
        with writer.file(name) as file:
            if name == "classes.npy":
                np.save(file, rng.normal(size=(6, 4)).astype(np.float32))
            elif name == "head.states":
                write_arrays(file, {"state0": momenta, "facts": facts})
            else:
                file.write(b"network")
    settings = {"loss_options": {"preset": "arcface"}, "images_filter": 0}
    writer.describe(
        {
            "step": 9,
            "num_classes": 6,
            "embedding_size": 4,
            "epoch": 1,
            "images_seen": 8,
            "settings": settings,
        }
    )
    return tmp_path / "run"


def test_show(run, capsys):
    assert classes.main(["show", "--state", str(run), "--pairs", "2"]) == 0
    out = capsys.readouterr().out
    assert "6 classes of width 4, float32, of arcface after 9 steps by SGD" in out
    assert "lengths of momenta (state0): " in out
    assert out.count(": cosine ") == 2
    assert classes.main(["show", "--state", str(run), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["compared"] == 6
    assert len(shown["closest"]) == 10


def test_out_and_in_again(run, tmp_path, capsys):
    files = [str(tmp_path / name) for name in ("w.npy", "m.npy", "back")]
    assert (
        classes.main(["export", "--state", str(run), "--output", files[0], "--momenta", files[1]])
        == 0
    )
    assert "6 x 4 class weights in" in capsys.readouterr().out
    flags = ["--weights", files[0], "--momenta", files[1], "--output", files[2]]
    assert classes.main(["import", "--state", str(run), *flags]) == 0
    for name in states.FILES:
        old, new = (tmp_path / where / "states/state-00000009" / name for where in ("run", "back"))
        assert old.read_bytes() == new.read_bytes()


def test_changes(run, tmp_path, capsys):
    def call(action, *flags):
        output = tmp_path / action
        assert (
            classes.main([action, "--state", str(run), "--output", str(output), *flags, "--json"])
            == 0
        )
        done = json.loads(capsys.readouterr().out)
        assert done["state"] == str(output / "states" / "state-00000009")
        return done["classes"]

    assert call("drop", "--classes", "1,3-5") == 2
    assert call("merge", "--classes", "1,3-5", "--shares", "1,2,3,4") == 3
    assert call("join", "--other", str(tmp_path / "drop")) == 8


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["drop", "--classes", "9"], "there is no class 9: there are 6, from 0 on"),
        (["merge", "--classes", "2,3", "--shares", "1"], "1 shares for 2 classes"),
        (["import", "--weights", "no.npy"], "no.npy: there is no such file or folder"),
        (["add", "--dataset", "nowhere"], "nowhere: there is no such folder or .rec file"),
    ],
)
def test_refusals(run, tmp_path, capsys, flags, message):
    action, *rest = flags
    flags = [action, "--state", str(run), "--output", str(tmp_path / "out"), *rest]
    assert classes.main(flags) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["3-1", "a", "1,,2", "1-2-3"])
def test_labels_that_are_none(run, text, capsys):
    with pytest.raises(SystemExit):
        classes.main(["drop", "--state", str(run), "--output", "x", "--classes", text])
    assert f"labels are like 3,17-20, not '{text}'" in capsys.readouterr().err
