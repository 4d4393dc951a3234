"""Runs that are interrupted and resumed, and the states they go on from."""

import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest

from dsoftmax.recognition import checkpoint, loop, train
from dsoftmax.recognition.saving import StateSaver
from dsoftmax.recognition.settings import parse
from tests.recognition.runs import (
    assert_same_state,
    folder_of,
    newest,
    read_table,
    states_of,
    stop_after,
)


def flip(content):
    """Change a bit in the middle."""
    changed = bytearray(content)
    changed[len(changed) // 2] ^= 4
    return bytes(changed)


def rewrite_facts(state, **changes):
    """Change what is said about a state; None takes something away."""
    facts = {**json.loads((state / "state.json").read_text()), **changes}
    facts = {name: value for name, value in facts.items() if value is not None}
    (state / "state.json").write_text(json.dumps(facts))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"devices": "cpu:2", "per_batch_size": 4, "kvstore": "local"},
        {"loss": "dsoftmax_k", "sample_rate": 0.4, "store": "host"},
        {"loss": "dsoftmax_k", "sample_rate": 0.4, "store": "host", "class_dtype": "float16"},
        {"loss": "sphereface"},
        {"loss": "uniface", "loss_option": "subcentres=2"},
        {"loss": "curricularface", "sample_rate": "0:0.4,9:1"},
        {"config": "dropout.py", "lr_schedule": "cosine"},
        {"config": "dropout.py", "loss": "dsoftmax_b", "accumulate": 2, "per_batch_size": 4},
        {"loss": "triplet", "per_batch_size": 6, "loss_option": "images_per_identity=3"},
        {"loss": "atriplet", "per_batch_size": 3, "devices": "cpu:2"},
    ],
    ids=[
        *("plain", "two devices", "host store", "float16", "annealed", "learned and two centres"),
        *("running mean and schedule", "dropout", "micro-batches", "triplets"),
        "triplets on two devices",
    ],
)
def test_the_same_bits(flags, changes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("dropout.py").write_text(
        "from dsoftmax.recognition.config import *\nnetwork.tiny.net_output = 'E'\n"
    )
    whole = flags("whole", **changes)
    assert train.main(whole) == 0
    part = flags("part", **changes)
    stop_after(7, part)
    assert newest(part).name == "state-00000007"
    assert train.main([*part, "--resume"]) == 0
    assert_same_state(newest(whole), newest(part))
    for name in ("metrics.csv", "verification.csv"):
        a, b = (read_table(folder_of(made) / name) for made in (whole, part))
        assert a == b


def test_class_weights_on_another_number_of_devices(flags, tmp_path):
    """A whole trajectory, where training does not multiply the rounding of its first steps."""
    smooth = tmp_path / "smooth.py"
    smooth.write_text(
        "from dsoftmax.recognition.config import *\nnetwork.tiny.net_act = 'softrelu'\n"
    )
    calm = {"lr": 2e-4, "warmup_steps": 24, "emb_size": 128, "config": smooth}
    both = {"devices": "cpu:2", "target": "none", **calm}
    whole = flags("whole", class_parallel=0, **both)
    assert train.main(whole) == 0
    part = flags("part", class_parallel=1, **both)
    stop_after(5, part)
    other = flags("part", class_parallel=0, **both)
    assert train.main([*other, "--resume"]) == 0
    assert_same_state(newest(whole), newest(part), atol=1e-5)


def test_the_next_step_on_another_number_of_devices(flags):
    """Whatever the learning rate: the state is taken up exactly."""
    both = {"devices": "cpu:2", "target": "none", "emb_size": 128}
    whole = flags("whole", class_parallel=1, max_steps=6, **both)
    assert train.main(whole) == 0
    part = flags("part", class_parallel=1, max_steps=5, **both)
    assert train.main(part) == 0
    other = flags("part", class_parallel=0, max_steps=6, **both)
    assert train.main([*other, "--resume"]) == 0
    assert_same_state(newest(whole), newest(part), atol=1e-5)


def test_killed_at_any_moment(flags):
    """Kill -9 the real command again and again, also while it saves, and compare the end."""
    whole = flags("whole", max_steps=20, verbose=1, ckpt=0, target="none")
    assert train.main(whole) == 0
    part = flags("part", max_steps=20, verbose=1, ckpt=0, target="none")
    command = [sys.executable, "-W", "ignore", train.__file__, *part, "--resume", "auto"]
    for _ in range(2):
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        for line in process.stdout:
            if line.startswith("call reset()"):  # it trains now
                break
        while process.poll() is None and not list((folder_of(part) / "states").glob("state-*")):
            time.sleep(0.01)  # a slow machine takes a while until the first one
        time.sleep(random.uniform(0.05, 0.5))
        process.kill()
        process.communicate()
    assert train.main([*part, "--resume", "auto"]) == 0
    assert_same_state(newest(whole), newest(part))


def test_other_settings_are_told(flags, capsys):
    assert train.main(flags(max_steps=2)) == 0
    changed = flags(max_steps=3, lr=0.05, keep=4, lr_schedule="constant")
    assert train.main([*changed, "--resume"]) == 0
    out = capsys.readouterr().out
    assert "resumed with lr 0.05, was 0.1" in out
    assert "resumed with keep 4, was 2" in out
    assert "resumed with lr_schedule 'constant', was 'step'" in out  # an empty name is seen, too
    assert "resumed with wd" not in out


def test_a_damaged_last_state_is_made_anew(flags):
    made = flags(max_steps=8)
    assert train.main(made) == 0
    expected = np.load(newest(made) / "classes.npy")
    with open(newest(made) / "classes.npy", "ab") as file:
        file.truncate(100)
    assert train.main([*made, "--resume"]) == 0
    assert newest(made).name == "state-00000008"
    np.testing.assert_array_equal(np.load(newest(made) / "classes.npy"), expected)
    damaged = newest(made).parent / "state-00000008.damaged" / "classes.npy"
    assert damaged.stat().st_size == 100


@pytest.mark.parametrize("is_own_number", [False, True])
def test_what_killed_runs_left_is_removed(flags, is_own_number, capsys):
    made = flags(max_steps=4)
    process = os.getpid() if is_own_number else (1 << 31) - 1
    part = folder_of(made) / "states" / f"state-00000004.{process}.part"
    part.mkdir(parents=True)
    (part / "backbone.params").write_bytes(b"half")
    (folder_of(made) / f".model-0001.params.{process}.part").write_bytes(b"half")
    assert train.main(made) == 0
    assert os.listdir(folder_of(made) / "states") == ["state-00000004"]
    assert not list(folder_of(made).glob(".*"))
    assert f"removed {part}, which a killed run left" in capsys.readouterr().out


def test_a_state_of_another_network(flags, capsys):
    made = flags(max_steps=2)
    assert train.main(made) == 0
    folder = folder_of(made)
    other = flags(max_steps=4, network="r18", emb_size=8)
    folder.rename(folder_of(other))
    assert train.main([*other, "--resume"]) == 2
    message = r"it belongs to another network,.* such as \w+, (missing|\(.*\)) there and "
    assert re.search(message, capsys.readouterr().err)
    back = flags(max_steps=4, emb_size=9)
    folder_of(other).rename(folder_of(back))
    assert train.main([*back, "--resume"]) == 2
    message = "the state has 5 class weights of width 8, this run has 5 of width 9"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("classes.npy", lambda content: content[:100], "it has 100 bytes instead of 288"),
        ("classes.npy", flip, "block 1 of 1, from byte 0 on, is not what was written"),
        ("backbone.params", flip, "is not what was written"),
        ("state.json", lambda _: b"[]", "it does not describe a state"),
        ("state.json", lambda content: content.replace(b"8", b"9", 1), "its checksum differs"),
        ("head.states", lambda _: None, "there is no such file"),
    ],
)
def test_a_damaged_state_is_passed_over(flags, capsys, name, damage, message):
    made = flags(max_steps=8)
    assert train.main(made) == 0
    damaged = newest(made)
    content = damage((damaged / name).read_bytes())
    (damaged / name).unlink()
    if content is not None:
        (damaged / name).write_bytes(content)
    assert train.main([*flags(max_steps=10, keep=1), "--resume"]) == 0
    out = capsys.readouterr().out
    assert f"{damaged} is damaged ({name}: " in out
    assert message in out
    assert "state-00000004, step 4" in out
    names = sorted(os.listdir(damaged.parent))
    assert names == ["state-00000008.damaged", "state-00000010"]
    if content is not None:
        assert (damaged.parent / names[0] / name).read_bytes() == content


def test_no_sound_state_is_refused(flags, capsys):
    made = flags(max_steps=2)
    assert train.main(made) == 0
    (newest(made) / "state.json").write_text("[]")
    assert train.main([*made, "--resume"]) == 2
    assert "there is no sound state to go on from" in capsys.readouterr().err
    assert train.main(made) == 2
    assert "holds the states of an earlier run" in capsys.readouterr().err
    assert (newest(made) / "state.json").read_text() == "[]"


def test_states_of_another_version_are_refused_and_stay(flags, capsys):
    made = flags(max_steps=6, verbose=2)
    assert train.main(made) == 0
    rewrite_facts(newest(made), format=2)
    before = {path: path.read_bytes() for path in newest(made).parent.glob("*/*")}
    assert train.main([*made, "--resume"]) == 2
    assert "a state of format 2, this version reads format 1" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in newest(made).parent.glob("*/*")} == before


def test_a_state_without_checksums(flags, capsys):
    """Those of earlier versions have sizes alone."""
    made = flags(max_steps=8)
    assert train.main(made) == 0
    for path in states_of(made):
        rewrite_facts(Path(path), checksums=None)
    (newest(made) / "backbone.params").write_bytes(
        bytes((newest(made) / "backbone.params").stat().st_size)
    )
    assert train.main([*flags(max_steps=10), "--resume"]) == 0
    out = capsys.readouterr().out
    assert "backbone.params: not a parameter file, or not a whole one" in out
    assert "state-00000004 has no checksums: only sizes were checked" in out
    assert "state-00000004, step 4" in out


def test_old_states_are_removed(flags):
    made = flags(verbose=2, keep=3, target="none")
    assert train.main(made) == 0
    names = sorted(os.listdir(folder_of(made) / "states"))
    assert names == ["state-00000008", "state-00000010", "state-00000012"]


def test_a_full_disk_leaves_the_last_good_state(flags, monkeypatch, capsys):
    made = flags(max_steps=8, target="none", ckpt=0)
    write, written = checkpoint.write_arrays, []

    def full(file, arrays):
        write(file, arrays)
        written.append(file)
        if len(written) >= 6:  # the last file of the second state, and when it is tried again
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_arrays", full)
    assert train.main(made) == 2
    err = capsys.readouterr().err
    assert err.splitlines()[-1].startswith(
        f"train: error: {folder_of(made)}/states/state-00000008: No space left on device: "
    )
    size = sum(path.stat().st_size for path in newest(made).iterdir())
    (needed,) = re.findall("device: ([0-9,]+) bytes are needed, [0-9,]+ bytes are free", err)
    assert abs(int(needed.replace(",", "")) - size) < 4096
    assert f"the newest whole state is {newest(made)}: make room" in err
    assert os.listdir(folder_of(made) / "states") == ["state-00000004"]
    monkeypatch.setattr(checkpoint, "write_arrays", write)
    assert train.main([*made, "--resume"]) == 0


def test_a_full_disk_before_the_first_state(flags, largest_file, capsys):
    made = flags(max_steps=4, target="none", ckpt=0)
    run = loop.Run(parse(made))
    with largest_file(20480), pytest.raises(OSError, match="no state has been saved yet") as e:
        run.train()
    state = folder_of(made) / "states" / "state-00000004"
    assert str(e.value).startswith(f"{state}: File too large: ")
    assert not state.exists()
    assert not list(folder_of(made).glob("*.params"))
    assert not list(folder_of(made).glob(".*"))


def test_nonsense_is_not_saved(flags):
    made = flags(target="none")
    run = loop.Run(parse(made))
    run._saver = StateSaver(run.plan.states, 1, print)
    parameter = next(iter(run.plan.network.collect_params().values()))
    parameter.set_data(parameter.data() * np.nan)
    with pytest.raises(loop.DivergedError, match="holds NaN"):
        run._save_state()
    parameter.set_data(mx.nd.zeros(parameter.shape))
    run.trained.head.store.shards[0].weight[2] = np.inf
    with pytest.raises(loop.DivergedError, match="class weights hold NaN"):
        run._save_state()
    assert not (folder_of(made) / "states").exists()
