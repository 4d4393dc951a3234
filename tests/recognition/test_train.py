"""Training runs, whole, interrupted, resumed, refused: through the real command."""

import csv
import json
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest

from dsoftmax.eval.models import ModelName, load_model
from dsoftmax.recognition import checkpoint, lock, loop, models, plan, states, train
from dsoftmax.recognition.common.distributed.group import Group
from dsoftmax.recognition.data.packs import write_pack
from dsoftmax.recognition.data.records import Records
from dsoftmax.recognition.settings import parse

COUNTS = (9, 8, 10, 7, 9)  # images of each identity; 43 in all, 5 batches of 8 an epoch


@pytest.fixture
def faces(dataset, jpeg, tmp_path):
    """Write a small dataset with a pack; return its folder."""
    folder, _ = dataset(COUNTS)
    write_pack(folder / "val.bin", [jpeg() for _ in range(40)], [True, False] * 10)
    return folder


@pytest.fixture
def flags(faces, tmp_path):
    """Return the flags of a run of a second."""

    def make(name="models", **changes):
        options = {
            "network": "tiny",
            "loss": "dsoftmax",
            "dataset": "few",
            "data-dir": faces,
            "target": "val",
            "emb-size": 8,
            "per-batch-size": 8,
            "lr-steps": "9",
            "max-steps": 12,
            "verbose": 4,
            "frequent": 2,
            "threads": 1,
            "devices": "cpu",
            "seed": 5,
            "models-root": tmp_path / name,
        }
        options.update({key.replace("_", "-"): value for key, value in changes.items()})
        made = []
        for key, value in options.items():
            if value is True:
                made.append(f"--{key}")
            elif value is not None:
                made += [f"--{key}", str(value)]
        return made

    return make


def folder_of(flags):
    return Path(parse(flags).folder)


def states_of(flags):
    return states.list_states(str(folder_of(flags) / "states"))


def newest(flags):
    return Path(states_of(flags)[0])


def models_of(flags):
    return {path.stem[-4:] for path in folder_of(flags).glob("model-*.params")}


def assert_same_state(one, other, atol=0.0):
    """Compare two states: bit for bit, or nearly."""
    for name in states.FILES[:2]:
        a, b = (mx.nd.load(str(path / name)) for path in (one, other))
        assert set(a) == set(b)
        for key in a:
            np.testing.assert_allclose(a[key].asnumpy(), b[key].asnumpy(), rtol=atol, atol=atol)
    a, b = (np.load(path / "classes.npy") for path in (one, other))
    np.testing.assert_allclose(a, b, rtol=atol, atol=atol)
    if not atol:
        assert (one / "head.states").read_bytes() == (other / "head.states").read_bytes()


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


class TestWholeRun:
    def test_files_and_lines(self, flags, capsys):
        made = flags()
        assert train.main(made) == 0
        out, err = capsys.readouterr()
        folder = folder_of(made)
        for line in (
            "gpu num: 0",
            "num_classes 5",
            "image_size [32, 32]",
            "ver val",
            "lr_steps [9]",
            "Network FLOPs: 4.3M",
            "call reset()",
            "lr change to 0.01",
            "testing verification..",
            "saving last 0",
        ):
            assert line in out.splitlines()
        assert f"prefix {folder}/model" in out
        assert "[val][4]XNorm: " in out
        assert "[val][12]Accuracy-Flip: " in out
        assert "[12]Accuracy-Highest: " in out
        assert "INFO:root:Epoch[0] Batch [0-2]\tSpeed: " in err
        log = (folder / "train.log").read_text()
        assert "[val][4]XNorm: " in log
        assert re.search(r"samples/sec\tacc=[01]\.\d{6}\tlossvalue=\d", log)
        config = json.loads((folder / "config.json").read_text())
        assert (config["lr"], config["resolved_num_classes"]) == (0.1, 5)
        with open(folder / "metrics.csv") as file:
            rows = list(csv.DictReader(file))
        assert [int(row["step"]) for row in rows] == [2, 4, 6, 8, 10, 12]
        assert [float(row["lr"]) for row in rows] == pytest.approx([0.1] * 4 + [0.01] * 2)
        assert all(float(row["samples_per_second"]) > 0 for row in rows)
        assert all(8 * float(row["accuracy"]) in range(9) for row in rows)
        with open(folder / "verification.csv") as file:
            assert [row["step"] for row in csv.DictReader(file)] == ["4", "8", "12"]
        assert (folder / "curves.png").stat().st_size > 10_000
        assert not list(folder.rglob("*.part"))

    def test_the_model_is_insightface_s(self, flags, rng):
        made = flags()
        assert train.main(made) == 0
        run = loop.Run(parse([*made, "--resume"]))
        images = rng.integers(0, 256, (3, 3, 32, 32), np.uint8)
        saved = load_model(ModelName(parse(made).prefix, 0), [mx.cpu()])(images)
        np.testing.assert_allclose(saved, run.trained.backbone.embed(images), atol=1e-5)
        symbol = mx.sym.load(f"{parse(made).prefix}-symbol.json")
        assert symbol.list_outputs() == ["fc1_output"]

    def test_the_loss_falls(self, flags):
        made = flags(max_steps=60, lr_steps="", scale=16, verbose=100, target="none")
        assert train.main(made) == 0
        with open(folder_of(made) / "metrics.csv") as file:
            found = [float(row["loss"]) for row in csv.DictReader(file)]
        assert np.mean(found[-10:]) < 0.9 * np.mean(found[:3])

    @pytest.mark.parametrize(
        "loss", ["softmax", "arcface", "sphereface", "dsoftmax_b", "dsoftmax_k", "hf_softmax"]
    )
    def test_other_losses(self, flags, loss):
        rate = {"dsoftmax_b": 0.5, "dsoftmax_k": 0.4, "hf_softmax": 0.8}.get(loss)
        made = flags(loss=loss, max_steps=4, verbose=100, sample_rate=rate)
        assert train.main(made) == 0
        assert (folder_of(made) / "model-0000.params").exists()

    def test_what_is_learnt_is_a_function_of_the_seed(self, flags):
        learnt = []
        for name, seed in (("a", 1), ("b", 1), ("c", 2)):
            made = flags(name, seed=seed, max_steps=3, target="none", network="tiny")
            assert train.main(made) == 0
            learnt.append(np.load(newest(made) / "classes.npy"))
        np.testing.assert_array_equal(learnt[0], learnt[1])
        assert not np.array_equal(learnt[0], learnt[2])


class TestResume:
    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"devices": "cpu:2", "per_batch_size": 4, "kvstore": "local"},
            {"loss": "dsoftmax_k", "sample_rate": 0.4, "store": "host"},
            {"loss": "sphereface"},
            {"config": "dropout.py", "lr_schedule": "cosine"},
        ],
        ids=["plain", "two devices", "host store", "annealed", "dropout"],
    )
    def test_the_same_bits(self, flags, changes, tmp_path, monkeypatch):
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

    def test_class_weights_on_another_number_of_devices(self, flags, tmp_path):
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

    def test_the_next_step_on_another_number_of_devices(self, flags):
        """Whatever the learning rate: the state is taken up exactly."""
        both = {"devices": "cpu:2", "target": "none", "emb_size": 128}
        whole = flags("whole", class_parallel=1, max_steps=6, **both)
        assert train.main(whole) == 0
        part = flags("part", class_parallel=1, max_steps=5, **both)
        assert train.main(part) == 0
        other = flags("part", class_parallel=0, max_steps=6, **both)
        assert train.main([*other, "--resume"]) == 0
        assert_same_state(newest(whole), newest(part), atol=1e-5)

    def test_killed_at_any_moment(self, flags):
        """Kill -9 the real command again and again, also while it saves, and compare the end."""
        whole = flags("whole", max_steps=30, verbose=1, target="none")
        assert train.main(whole) == 0
        part = flags("part", max_steps=30, verbose=1, target="none")
        command = [sys.executable, "-W", "ignore", train.__file__, *part, "--resume", "auto"]
        for _ in range(4):
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            for line in process.stdout:
                if line.startswith("call reset()"):  # it trains now
                    break
            time.sleep(random.uniform(0.05, 0.5))
            process.kill()
            process.communicate()
        assert len(os.listdir(folder_of(part) / "states")) > 0
        assert train.main([*part, "--resume", "auto"]) == 0
        assert_same_state(newest(whole), newest(part))

    def test_a_run_is_not_overwritten(self, flags, capsys):
        made = flags(max_steps=4)
        assert train.main(made) == 0
        assert train.main(made) == 2
        assert "go on with it by --resume" in capsys.readouterr().err

    def test_other_settings_are_told(self, flags, capsys):
        assert train.main(flags(max_steps=2)) == 0
        assert train.main([*flags(max_steps=3, lr=0.05, keep=4), "--resume"]) == 0
        out = capsys.readouterr().out
        assert "resumed with lr 0.05, was 0.1" in out
        assert "resumed with keep 4, was 2" in out
        assert "resumed with wd" not in out

    def test_a_damaged_last_state_is_made_anew(self, flags):
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
    def test_what_killed_runs_left_is_removed(self, flags, is_own_number, capsys):
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

    def test_a_table_without_a_column_of_today(self, flags):
        made = flags(max_steps=4)
        assert train.main(made) == 0
        path = folder_of(made) / "metrics.csv"
        with open(path) as file:
            rows = [row[:3] + row[4:] for row in csv.reader(file)]  # no accuracy
        path.write_text("".join(",".join(row) + "\n" for row in rows))
        assert train.main([*flags(max_steps=6), "--resume"]) == 0
        found = [row["accuracy"] for row in read_table(path)]
        assert found[:2] == ["nan", "nan"]
        assert 0 <= float(found[2]) <= 1

    def test_nothing_to_resume(self, flags, capsys):
        made = flags(max_steps=2)
        assert train.main([*made, "--resume"]) == 2
        err = capsys.readouterr().err
        assert f"--resume: there is no state in {folder_of(made)}/states" in err
        assert err.count("\n") == 1
        assert not folder_of(made).exists()
        assert train.main([*made, "--resume", "auto"]) == 0
        assert "states: a new run begins" in capsys.readouterr().out
        assert train.main([*made, "--resume", "auto"]) == 0
        assert "resumed from" in capsys.readouterr().out

    def test_a_run_that_was_killed_before_its_first_state(self, flags):
        made = flags(max_steps=2)
        loop.Run(parse(made)).release()
        assert os.listdir(folder_of(made)) == ["config.json"]
        (folder_of(made) / "states" / "state-00000002.1.part").mkdir(parents=True)
        assert train.main([*made, "--resume", "auto"]) == 0

    def test_states_that_are_lost(self, flags, capsys):
        made = flags(max_steps=2)
        assert train.main(made) == 0
        shutil.rmtree(folder_of(made) / "states")
        for more in ([], ["--resume"], ["--resume", "auto"]):
            assert train.main([*made, *more]) == 2
            assert "holds models, but no state to go on from" in capsys.readouterr().err

    def test_other_classes(self, flags, dataset, capsys):
        """It is refused with the flags that work."""
        assert train.main(flags(max_steps=2)) == 0
        more, _ = dataset((*COUNTS, 4, 4), "more")
        made = flags(max_steps=4, data_dir=more)
        assert train.main([*made, "--resume"]) == 2
        err = capsys.readouterr().err
        assert "is of 5 classes, this run has 7" in err
        advice = err[err.index("--pretrained") :].replace("<another>", "more").split()
        assert train.main([*made, *advice]) == 0
        out = capsys.readouterr().out
        assert "parameters of tiny are from" in out
        assert "class weights begin as the mean embeddings" in out

    def test_a_state_of_another_network(self, flags, capsys):
        made = flags(max_steps=2)
        assert train.main(made) == 0
        folder = folder_of(made)
        other = flags(max_steps=4, network="r18", emb_size=8)
        folder.rename(folder_of(other))
        assert train.main([*other, "--resume"]) == 2
        assert "it is of another network" in capsys.readouterr().err
        back = flags(max_steps=4, emb_size=9)
        folder_of(other).rename(folder_of(back))
        assert train.main([*back, "--resume"]) == 2
        assert "the state is of 5 classes of width 8" in capsys.readouterr().err

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
    def test_a_damaged_state_is_passed_over(self, flags, capsys, name, damage, message):
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

    def test_no_sound_state_is_refused(self, flags, capsys):
        made = flags(max_steps=2)
        assert train.main(made) == 0
        (newest(made) / "state.json").write_text("[]")
        assert train.main([*made, "--resume"]) == 2
        assert "there is no sound state to go on from" in capsys.readouterr().err
        assert train.main(made) == 2
        assert "holds the states of an earlier run" in capsys.readouterr().err
        assert (newest(made) / "state.json").read_text() == "[]"

    def test_states_of_another_version_are_refused_and_stay(self, flags, capsys):
        made = flags(max_steps=6, verbose=2)
        assert train.main(made) == 0
        rewrite_facts(newest(made), format=2)
        before = {path: path.read_bytes() for path in newest(made).parent.glob("*/*")}
        assert train.main([*made, "--resume"]) == 2
        assert "a state of format 2, this version reads format 1" in capsys.readouterr().err
        assert {path: path.read_bytes() for path in newest(made).parent.glob("*/*")} == before

    def test_a_state_without_checksums(self, flags, capsys):
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
        assert "backbone.params: it is no file of MXNet's arrays" in out
        assert "state-00000004 has no checksums: only sizes were checked" in out
        assert "state-00000004, step 4" in out


def read_table(path):
    with open(path) as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row.pop("samples_per_second", None)
    return rows


def stop_after(steps, flags):
    """Run, and send SIGTERM to it when so many steps are done."""
    run = loop.Run(parse(flags))
    step = run.train_step

    def stepping(batch):
        if run.step + 1 == steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(batch)

    run.train_step = stepping
    assert run.train() == signal.SIGTERM


class TestTensorBoard:
    def test_scalars_are_those_of_the_tables(self, flags):
        pytest.importorskip("mxboard")
        made = flags(tensorboard=True)
        assert train.main(made) == 0
        (path,) = (folder_of(made) / "tensorboard").iterdir()
        found = {(tag, step): value for step, tag, value in read_events(path.read_bytes())}
        expected = {}
        for row in read_table(folder_of(made) / "metrics.csv"):
            for name in set(row) - {"step", "epoch"}:
                expected[name, int(row["step"])] = float(row[name])
        for row in read_table(folder_of(made) / "verification.csv"):
            expected["accuracy/val", int(row["step"])] = float(row["accuracy"])
        assert len(expected) == 6 * 8 + 3
        for key, value in expected.items():
            assert found[key] == pytest.approx(value, rel=1e-6)
        assert {tag for tag, _ in set(found) - set(expected)} == {"samples_per_second"}

    def test_without_its_extra(self, flags, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "mxboard", None)
        made = flags(tensorboard=True)
        assert train.main(made) == 2
        err = capsys.readouterr().err
        assert "--tensorboard needs its extra: pip install 'dsoftmax[tensorboard]'" in err
        assert err.count("\n") == 1
        assert not folder_of(made).exists()


def read_events(content):
    """Yield (step, tag, value) of an event file: length, its checksum, event, its checksum."""
    from mxboard.proto.event_pb2 import Event

    while content:
        (length,) = struct.unpack_from("<Q", content)
        event = Event.FromString(content[12 : 12 + length])
        for value in event.summary.value:
            yield event.step, value.tag, value.simple_value
        content = content[16 + length :]


class TestSignals:
    @pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
    def test_save_and_leave(self, flags, number, code):
        made = flags(max_steps=100_000, verbose=100_000, target="none")
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", train.__file__, *made],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for line in process.stdout:
            if line.startswith("call reset()"):
                break
        time.sleep(0.3)
        process.send_signal(number)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == code
        assert f"stopped by signal {int(number)}: saving step" in out
        step = int(newest(made).name.split("-")[1])
        assert step > 0
        assert states.read_facts(str(newest(made)))["step"] == step


class TestCheckpoints:
    @pytest.fixture
    def scores(self, monkeypatch):
        """Let verifications find these accuracies, one after the other."""

        def set_to(*accuracies, signal_at=None):
            found = enumerate(accuracies)

            def evaluate(embed, packs, *args, **kwargs):
                (real,) = original(embed, packs, *args, **kwargs)
                place, score = next(found)
                if isinstance(score, Exception):
                    raise score
                if place == signal_at:
                    os.kill(os.getpid(), signal.SIGTERM)
                accuracy = real.accuracy._replace(mean=score)
                return [type(real)(**{**vars(real), "accuracy": accuracy})]

            monkeypatch.setattr(models, "evaluate", evaluate)

        original = models.evaluate
        return set_to

    @pytest.fixture
    def two(self, faces):
        """Write a second pack; return the names of both."""
        (faces / "other.bin").write_bytes((faces / "val.bin").read_bytes())
        return "val,other"

    @pytest.mark.parametrize(
        ("ckpt", "expected"),
        [
            (0, {"0000"}),
            (1, {"0000", "0001", "0003", "0004"}),
            (2, {"0000", "0001", "0002", "0003", "0004", "0005"}),
            (3, {"0000", "0001"}),
        ],
    )
    def test_which_models_are_kept(self, flags, scores, ckpt, expected):
        scores(0.6, 0.5, 0.7, 0.7, 0.65)  # the fourth ties with the best
        made = flags(ckpt=ckpt, verbose=2, max_steps=10)
        assert train.main(made) == 0
        assert models_of(made) == expected
        facts = states.read_facts(str(newest(made)))
        assert facts["best"] == {"val": 0.7}
        assert facts["verifications"] == 5

    def test_the_best_may_be_the_last(self, flags, scores):
        scores(0.6, 0.9)
        made = flags(verbose=4, max_steps=6, ckpt=3)
        assert train.main(made) == 0
        one, last = (mx.nd.load(f"{parse(made).prefix}-{n:04d}.params") for n in (1, 0))
        for key in last:
            np.testing.assert_array_equal(one[key].asnumpy(), last[key].asnumpy())

    def test_without_packs_the_newest_is_kept(self, flags):
        made = flags(target="none", ckpt=3, verbose=4, max_steps=7)
        run = loop.Run(parse(made))
        run.train()
        assert (folder_of(made) / "model-0001.params").exists()

    @pytest.mark.parametrize("moment", ["before", "between"])
    def test_a_verification_that_is_interrupted_is_repeated(self, flags, two, scores, moment):
        """At step 8: all ends as in a run that was not, and nothing is judged by half of it."""
        changes = {"target": two, "ckpt": 1}
        whole, part = flags("whole", **changes), flags("part", **changes)
        scores(0.6, 0.6, 0.9, 0.7, 0.5, 0.65)
        assert train.main(whole) == 0
        if moment == "between":
            scores(0.6, 0.6, 0.9, signal_at=2)
            assert train.main(part) == 128 + signal.SIGTERM
        else:
            scores(0.6, 0.6)
            stop_after(8, part)
        facts = states.read_facts(str(newest(part)))
        assert (facts["step"], facts["awaits_verification"]) == (8, True)
        assert facts["best"] == {"val": 0.6, "other": 0.6}
        assert models_of(part) == {"0000", "0001"}
        scores(0.9, 0.7, 0.5, 0.65)
        assert train.main([*part, "--resume"]) == 0
        assert models_of(part) == models_of(whole) == {"0000", "0001", "0002"}
        assert_same_state(newest(whole), newest(part))
        one, other = (states.read_facts(str(newest(made))) for made in (whole, part))
        assert one["best"] == {"val": 0.9, "other": 0.7}
        for key in ("best", "highest_last", "highest_sum", "verifications", "awaits_verification"):
            assert one[key] == other[key]
        one, other = (read_table(folder_of(made) / "verification.csv") for made in (whole, part))
        assert one == other

    def test_a_run_that_is_stopped_at_its_last_step(self, flags):
        made = flags(max_steps=6)
        stop_after(6, made)
        assert [row["step"] for row in read_table(folder_of(made) / "verification.csv")] == ["4"]
        for _ in range(2):  # once is enough
            assert train.main([*made, "--resume"]) == 0
            rows = read_table(folder_of(made) / "verification.csv")
            assert [row["step"] for row in rows] == ["4", "6"]

    def test_a_target_that_fails_is_no_score(self, flags, two, scores):
        scores(0.6, 0.6, 0.9, ValueError("embeddings hold NaN"), 0.5, 0.7)
        made = flags(target=two, ckpt=1)
        assert train.main(made) == 0
        assert models_of(made) == {"0000", "0001", "0003"}
        facts = states.read_facts(str(newest(made)))
        assert facts["best"] == {"val": 0.6, "other": 0.7}
        assert facts["verifications"] == 3

    def test_old_states_are_removed(self, flags):
        made = flags(verbose=2, keep=3, target="none")
        assert train.main(made) == 0
        names = sorted(os.listdir(folder_of(made) / "states"))
        assert names == ["state-00000008", "state-00000010", "state-00000012"]

    def test_a_full_disk_leaves_the_last_good_state(self, flags, monkeypatch, capsys):
        made = flags(max_steps=8, target="none", ckpt=0)
        write, written = checkpoint.write_arrays, []

        def full(file, arrays):
            write(file, arrays)
            written.append(file)
            if len(written) == 6:  # the last file of the second state
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

    def test_a_full_disk_before_the_first_state(self, flags, largest_file, capsys):
        made = flags(max_steps=4, target="none")
        run = loop.Run(parse(made))
        with largest_file(20480), pytest.raises(OSError, match="no state has been saved yet") as e:
            run.train()
        state = folder_of(made) / "states" / "state-00000004"
        assert str(e.value).startswith(f"{state}: File too large: ")
        assert not state.exists()
        assert not list(folder_of(made).glob("*.params"))
        assert not list(folder_of(made).glob(".*"))


class TestLock:
    def test_a_second_run_is_refused(self, flags, capsys):
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

    def test_a_killed_run_holds_nothing(self, flags, capsys):
        made = flags(max_steps=100_000, verbose=100_000, target="none")
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", train.__file__, *made],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for line in process.stdout:
            if line.startswith("call reset()"):
                break
        assert train.main(flags(max_steps=2)) == 2
        assert f"is in use by process {process.pid} on" in capsys.readouterr().err
        process.kill()
        process.communicate()
        assert (folder_of(made) / lock.NAME).exists()
        assert train.main(flags(max_steps=2)) == 0

    def test_other_processes_of_a_group_lock_nothing(self, flags, monkeypatch):
        class Second(Group):
            rank, size = 1, 2

        def refuse(*_):
            raise ValueError("that is enough")

        monkeypatch.setattr(loop, "Plan", refuse)
        with pytest.raises(ValueError, match="that is enough"):
            loop.Run(parse(flags()), Second())
        assert not folder_of(flags()).exists()


class TestDivergence:
    def test_a_verification_that_fails_ends_no_run(self, flags, monkeypatch, capsys):
        """Moving averages of a few steps may overflow a deep network that trains well."""

        def overflow(*_, **__):
            raise ValueError("80 of 80 embeddings hold NaN")

        monkeypatch.setattr(models, "evaluate", overflow)
        made = flags(max_steps=4)
        assert train.main(made) == 0
        assert "[val][4]not verified: 80 of 80 embeddings hold NaN" in capsys.readouterr().out
        assert newest(made).name == "state-00000004"
        assert not (folder_of(made) / "model-0001.params").exists()  # nobody knows whether it is

    def test_a_nan_stops_the_run_before_it_is_saved(self, flags, capsys):
        made = flags(lr="1e30", max_steps=50, lr_steps="", verbose=1000, target="none")
        assert train.main(made) == 2
        err = capsys.readouterr().err
        assert "learning rate 1e+30, scale 32" in err
        assert "embeddings hold NaN or infinite numbers" in err
        assert "--clip-gradient" in err
        found = json.loads((folder_of(made) / "diverged.json").read_text())
        assert len(found["images"]) == 8
        assert not (folder_of(made) / "states").exists()
        assert not list(folder_of(made).glob("model-*.params"))

    def test_nonsense_is_not_saved(self, flags):
        made = flags(target="none")
        run = loop.Run(parse(made))
        parameter = next(iter(run.plan.network.collect_params().values()))
        parameter.set_data(parameter.data() * np.nan)
        with pytest.raises(loop.DivergedError, match="holds NaN"):
            run._save_state()
        parameter.set_data(mx.nd.zeros(parameter.shape))
        run.trained.head.store.shards[0].weight[2] = np.inf
        with pytest.raises(loop.DivergedError, match="class weights hold NaN"):
            run._save_state()
        assert not (folder_of(made) / "states").exists()


class TestBeginning:
    def train_one(self, flags):
        made = flags("first", max_steps=6)
        assert train.main(made) == 0
        return parse(made).prefix

    @pytest.mark.parametrize("form", ["{},0", "{}"])
    def test_pretrained(self, flags, form, capsys):
        prefix = self.train_one(flags)
        made = flags("second", pretrained=form.format(prefix), pretrained_epoch=0)
        run = loop.Run(parse(made))
        saved = mx.nd.load(f"{prefix}-0000.params")
        for name, array in run.trained.backbone.parameters().items():
            kind = "aux" if "moving" in name else "arg"
            np.testing.assert_array_equal(array.asnumpy(), saved[f"{kind}:{name}"].asnumpy())
        assert any("parameters of tiny are from" in note for note in run.plan.notes)

    def test_class_weights_that_fit_are_taken(self, flags, rng):
        prefix = self.train_one(flags)
        saved = mx.nd.load(f"{prefix}-0000.params")
        for epoch, classes in ((5, 5), (6, 7)):
            weights = mx.nd.array(rng.normal(size=(classes, 8)))
            mx.nd.save(f"{prefix}-{epoch:04d}.params", {**saved, "arg:fc7_weight": weights})
            run = loop.Run(parse(flags(f"run{epoch}", pretrained=f"{prefix},{epoch}")))
            if classes == 5:
                np.testing.assert_array_equal(run.trained.head.class_weights(), weights.asnumpy())
            else:
                assert "its class weights (7, 8) do not fit these 5 classes" in run.plan.notes[-1]

    def test_a_network_that_does_not_fit(self, flags, capsys):
        prefix = self.train_one(flags)
        saved = mx.nd.load(f"{prefix}-0000.params")
        saved = {f"arg:x{key[4:]}": value for key, value in saved.items()}
        mx.nd.save(f"{prefix}-0009.params", saved)
        assert train.main(flags("other", pretrained=f"{prefix},9")) == 2
        assert "it holds no parameter of tiny" in capsys.readouterr().err
        assert train.main(flags("other", pretrained=f"{prefix},77", resume=True)) == 2
        assert "there is no" in capsys.readouterr().err

    def test_a_frozen_backbone(self, flags):
        prefix = self.train_one(flags)
        made = flags("frozen", pretrained=f"{prefix},0", freeze_backbone=True)
        assert train.main(made) == 0
        saved = mx.nd.load(f"{prefix}-0000.params")
        for name, array in mx.nd.load(f"{parse(made).prefix}-0000.params").items():
            np.testing.assert_array_equal(array.asnumpy(), saved[name].asnumpy())
        first, last = (np.load(Path(path) / "classes.npy") for path in states_of(made)[::-1])
        assert np.abs(first - last).max() > 1e-3

    def test_classes_begin_as_means(self, flags, faces):
        run = loop.Run(parse(flags(init_classes="mean")))
        records = Records(faces)
        sums = np.zeros((5, 8))
        for image in range(len(records)):
            label, _ = records.read(image)
            pixels = decode_rgb(records, image)
            both = run.trained.backbone.embed(np.stack([pixels, pixels[:, :, ::-1]])).sum(axis=0)
            sums[label] += both / np.linalg.norm(both)
        weights = run.trained.head.class_weights()
        cosines = (sums * weights).sum(axis=1)
        cosines /= np.linalg.norm(sums, axis=1) * np.linalg.norm(weights, axis=1)
        np.testing.assert_allclose(cosines, 1, atol=1e-4)


def decode_rgb(records, image):
    import cv2

    encoded = records.read(image)[1]
    return cv2.imdecode(encoded, cv2.IMREAD_COLOR)[:, :, ::-1].transpose(2, 0, 1)


class TestOptimizer:
    def test_weight_decay_is_of_everything(self, flags):
        """With no gradient a step multiplies each parameter by 1 - lr wd."""
        run = loop.Run(parse(flags(wd=0.5, mom=0.0)))
        parameters = run.plan.network.collect_params().values()
        embeddings = run.trained.backbone.forward(next(run.plan.pipeline.epoch(0)).data)
        run.trained.backbone.backward(mx.nd.zeros_like(embeddings))
        mx.nd.waitall()  # moving averages are written on the way backward
        before = {one.name: one.data().asnumpy() for one in parameters}
        run.trained.backbone.update(0.1, 8)
        for one in parameters:
            factor = 1 if one.grad_req == "null" else 0.95
            np.testing.assert_allclose(one.data().asnumpy(), before[one.name] * factor, rtol=1e-5)

    def test_multipliers_of_class_weights(self, flags, tmp_path):
        (tmp_path / "config.py").write_text(
            "from dsoftmax.recognition.config import *\n"
            "config.fc7_lr_mult = 0.0\nconfig.fc7_wd_mult = 3.0\n"
        )
        made = flags(config=tmp_path / "config.py", max_steps=3, target="none")
        run = loop.Run(parse(made))
        before = run.trained.head.class_weights()
        assert run.trained.head_trainer.optimizer.wd == pytest.approx(3 * 5e-4)
        run.train()
        np.testing.assert_array_equal(run.trained.head.class_weights(), before)

    @pytest.mark.parametrize("devices", ["cpu", "cpu:2"])
    def test_clipping(self, flags, devices):
        longest = 1e-3
        made = flags(clip_gradient=longest, wd=0.0, mom=0.0, devices=devices, target="none")
        run = loop.Run(parse(made))
        before = run.trained.backbone.parameters()
        before = {key: array.asnumpy() for key, array in before.items() if "moving" not in key}
        run.train_step(next(run.plan.pipeline.epoch(0)))
        after = run.trained.backbone.parameters()
        moved = sum(np.square(after[key].asnumpy() - old).sum() for key, old in before.items())
        assert np.sqrt(moved) == pytest.approx(0.1 * longest, rel=1e-2)


class TestRefused:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"data_dir": "nowhere"}, "nowhere: there is no such folder"),
            ({"num_classes": 4}, "it has the label 4, but there are to be 4 classes"),
            ({"per_batch_size": 100}, "43 images are fewer than one batch of 100"),
            ({"loss": "dsoftmax", "store": "host"}, "store='host'"),
            ({"sync_bn": True, "devices": "cpu:2"}, "--sync-bn is for GPUs"),
            ({"fp16_scale": 128}, "--fp16-scale is for GPUs"),
            ({"lr_schedule": "cosine", "max_steps": 0}, "needs an end"),
            (
                {"image_size": 16},
                "--image-size: tiny can't take images of 16,16; the next size it takes is 17,17",
            ),
            (
                {"image_size": 32, "network": "gluoncv:resnet18_v1b"},
                "the next size it takes is 33,33",
            ),
            ({"per_batch_size": 1}, "--per-batch-size 1: the last layer normalizes"),
        ],
    )
    def test_before_the_first_step(self, flags, capsys, changes, message):
        assert train.main(flags(**changes)) == 2
        err = capsys.readouterr().err
        assert message in err
        assert err.count("\n") == 1

    def test_one_image_is_enough_where_it_is_learnt_from(self, flags, tmp_path):
        """For class weights alone, and for a network that does not end in a BatchNorm."""
        plain = tmp_path / "plain.py"
        plain.write_text(
            "from dsoftmax.recognition.config import *\nnetwork.tiny.net_output = 'H'\n"
        )
        for name, more in (("frozen", {"freeze_backbone": True}), ("plain", {"config": plain})):
            plan.Plan(parse(flags(name, per_batch_size=1, **more)))

    def test_odd_classes_are_told(self, flags, dataset, jpeg, tmp_path):
        def warnings_of(folder, **changes):
            notes = plan.Plan(parse(flags(data_dir=folder, target=None, **changes))).notes
            return [note.split("train.rec", 1)[1] for note in notes if note.startswith("warning: ")]

        assert warnings_of(dataset(COUNTS, "sound")[0]) == []
        assert warnings_of(dataset((9,), "one")[0]) == [": all images are of one class"]
        gaps = dataset((4, 0, 5, 0), "gaps")[0]
        assert warnings_of(gaps) == [": 1 of 3 classes have no image"]
        (gaps / "property").write_text("7,32,32\n")
        assert warnings_of(gaps) == [": 5 of 7 classes have no image"]
        assert warnings_of(gaps, num_classes=9) == [
            ": 5 of 7 classes have no image",
            " has 7 classes: the others have no image",
        ]
        assert warnings_of(gaps, num_classes=3) == [": 1 of 3 classes have no image"]
        assert warnings_of(gaps, images_filter=2) == []

    def test_an_option_of_another_loss(self, flags, capsys):
        assert train.main(flags(loss="cosface", d=0.9)) == 2
        assert "has no option d; legal are" in capsys.readouterr().err

    def test_bad_images_are_counted(self, flags, faces, capsys):
        content = bytearray((faces / "train.rec").read_bytes())
        starts = [at for at in range(len(content)) if content[at : at + 3] == b"\xff\xd8\xff"]
        content[starts[3] : starts[3] + 3] = b"xxx"
        (faces / "train.rec").write_bytes(content)
        assert train.main(flags(max_steps=6, target="none")) == 0
        out = capsys.readouterr().out
        assert "1 images could not be decoded" in out
        assert "there is no" in out  # none.bin

    def test_a_broken_pack(self, flags, faces, capsys):
        (faces / "val.bin").write_bytes(b"no pickle")
        assert train.main(flags()) == 2
        assert "val.bin: not a readable pickle" in capsys.readouterr().err

    @pytest.mark.parametrize("pairs", [1, 3])
    def test_a_pack_that_would_fail_later(self, flags, faces, jpeg, capsys, pairs):
        images = [jpeg() for _ in range(2 * pairs)]
        if pairs > 1:
            images[5] = images[5][:-200]
        write_pack(faces / "val.bin", images, [True] * pairs)
        assert train.main(flags()) == 2
        assert ("one pair is too few" if pairs == 1 else "cut off") in capsys.readouterr().err

    def test_models_of_others_are_not_overwritten(self, flags, capsys):
        folder = folder_of(flags())
        folder.mkdir(parents=True)
        (folder / "model-0001.params").write_bytes(b"precious")
        for more in ([], ["--resume"]):
            assert train.main([*flags(), *more]) == 2
            assert "holds models" in capsys.readouterr().err
        assert (folder / "model-0001.params").read_bytes() == b"precious"

    def test_what_is_refused_leaves_no_trace(self, flags, capsys):
        assert train.main(flags(pretrained="nothing,1")) == 2
        assert not folder_of(flags()).exists()
        made = flags(max_steps=2)
        assert train.main(made) == 0
        before = (folder_of(made) / "config.json").read_bytes()
        assert train.main([*flags(max_steps=4, emb_size=9, lr=7), "--resume"]) == 2
        assert (folder_of(made) / "config.json").read_bytes() == before

    def test_an_empty_folder(self, flags, tmp_path, capsys):
        (tmp_path / "empty").mkdir()
        assert train.main(flags(data_dir=tmp_path / "empty")) == 2
        assert "empty" in capsys.readouterr().err

    def test_nowhere_to_write(self, flags, tmp_path, capsys):
        (tmp_path / "file").write_text("")
        assert train.main(flags(models_root=tmp_path / "file")) == 2
        assert "Not a directory" in capsys.readouterr().err

    def test_a_run_that_cannot_fit(self, flags, monkeypatch, capsys):
        monkeypatch.setattr(plan, "available_bytes", lambda: 10**6)
        assert train.main(flags(num_classes=200_000)) == 2
        err = capsys.readouterr().err
        assert "the run needs about" in err
        assert "a loss with sampled classes (--loss dsoftmax_k)" in err


def test_memory_grows_as_it_should(flags):
    symbol = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=10, name="fc1")
    head = {
        "num_classes": 1000,
        "embedding_size": 10,
        "batch_size": 8,
        "devices": 1,
        "processes": 1,
        "store": "device",
        "chunk": None,
        "sample_rate": None,
        "momentum": 0.9,
    }

    def estimate(**changes):
        return estimate.of_device(symbol, (3, 4, 4), 8, {**head, **changes})

    whole = estimate()
    assert whole.classes == 4 * 10 * 2 * 1000
    assert whole.logits == 3 * 4 * 8 * 1000
    assert whole.network == 4 * 3 * (480 + 10)
    assert estimate(devices=2).classes == whole.classes / 2
    assert estimate(chunk=100).logits == whole.logits / 10
    assert estimate(sample_rate=0.1, store="host").classes == 4 * 10 * 3 * 100
    assert estimate.of_host({**head, "store": "host"}) == whole.classes
    assert estimate.of_host(head) == 0
    shared = {**head, "store": "host", "processes": 4}
    assert estimate.of_host(shared) == whole.classes / 4
    assert estimate.of_servers(head) == whole.classes
