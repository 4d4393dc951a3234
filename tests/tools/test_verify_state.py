import json

import pytest

from dsoftmax.recognition import states
from dsoftmax.tools import verify_state


@pytest.fixture
def run(tmp_path, rng):
    """Write a run's folder with the states of three steps; return it."""
    for step in (5, 10, 15):
        path = tmp_path / "run" / "states" / f"state-{step:08d}"
        path.mkdir(parents=True)
        writer = states.StateWriter(str(path))
        for name in states.FILES:
            with writer.file(name) as file:
                file.write(rng.bytes(1000))
        writer.describe({"step": step, "num_classes": 5, "embedding_size": 4})
    return tmp_path / "run"


def test_sound_states(run, capsys):
    assert verify_state.main(["--state", str(run)]) == 0
    path = run / "states" / "state-00000005"
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"{path}: sound, step 5, 4,000 bytes"
    assert len(out) == 3
    for given in (run / "states", path):
        assert verify_state.main(["--state", str(given)]) == 0
        assert capsys.readouterr().out.splitlines()[0] == out[0]


def test_damaged_ones(run, capsys):
    content = bytearray((run / "states" / "state-00000010" / "classes.npy").read_bytes())
    content[3] ^= 1
    (run / "states" / "state-00000010" / "classes.npy").write_bytes(content)
    (run / "states" / "state-00000015" / "state.json").write_text('{"format": 9}')
    assert verify_state.main(["--state", str(run)]) == 1
    out = capsys.readouterr().out
    assert "state-00000005: sound" in out
    assert "state-00000010: damaged\n  classes.npy: block 1 of 1, from byte 0 on" in out
    assert "state-00000015: damaged\n  state.json: a state of format 9" in out


def test_json(run, tmp_path):
    path = run / "states" / "state-00000010"
    (path / "momenta.params").write_bytes(b"")
    assert verify_state.main(["--state", str(path), "--json", str(tmp_path / "found")]) == 1
    (found,) = json.loads((tmp_path / "found").read_text())
    assert found == {
        "path": str(path),
        "is_sound": False,
        "step": 10,
        "bytes": 4000,
        "has_checksums": True,
        "problems": [
            {
                "file": "momenta.params",
                "block": None,
                "why": "it has 0 bytes instead of 1,000",
            }
        ],
    }


def test_without_checksums(run, capsys):
    path = run / "states" / "state-00000005"
    facts = json.loads((path / "state.json").read_text())
    del facts["checksums"]
    (path / "state.json").write_text(json.dumps(facts))
    assert verify_state.main(["--state", str(path)]) == 1  # random bytes are no arrays
    assert "head.states: not a parameter file, or not a whole one" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["", "nowhere"])
def test_no_states(name, tmp_path, capsys):
    assert verify_state.main(["--state", str(tmp_path / name)]) == 2
    assert str(tmp_path / name) in capsys.readouterr().err
