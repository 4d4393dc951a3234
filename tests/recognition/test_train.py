"""Whole runs through the real command."""

import csv
import json
import re
import subprocess
import sys
from decimal import Decimal

import mxnet as mx
import numpy as np
import pytest

from dsoftmax.eval.models import ModelName, load_model
from dsoftmax.losses import presets
from dsoftmax.losses.head import Head
from dsoftmax.recognition import loop, train
from dsoftmax.recognition.settings import parse
from tests.recognition.runs import (
    folder_of,
    newest,
)


class TestFiles:
    @pytest.fixture
    def draws_curves(self):
        return True

    def test_files_and_lines(self, flags, capsys):
        made = flags()
        assert train.main(made) == 0
        out, err = capsys.readouterr()
        folder = folder_of(made)
        for line in (
            "use cpu",
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
        assert re.search(r"^INFO:root:Epoch\[0\] Time cost=\d+\.\d{3}$", err, re.MULTILINE)
        log = (folder / "train.log").read_text()
        assert "[val][4]XNorm: " in log
        assert re.search(r"samples/sec\tacc=[01]\.\d{6}\tlossvalue=\d", log)
        ends = re.findall(r"Batch .*\tStep (\d+)/12\tETA (\d+:\d\d:\d\d)$", log, re.MULTILINE)
        assert [int(step) for step, _ in ends] == [2, 4, 6, 8, 10, 12]
        assert ends[-1][1] == "0:00:00"
        config = json.loads((folder / "config.json").read_text())
        assert (config["lr"], config["resolved_num_classes"]) == (0.1, 5)
        assert ModelName(parse(made).prefix, 0).trained_size() == tuple(
            config["resolved_image_size"]
        )
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


def test_the_model_is_insightface_s(flags, rng):
    made = flags()
    assert train.main(made) == 0
    run = loop.Run(parse([*made, "--resume"]))
    images = rng.integers(0, 256, (3, 3, 32, 32), np.uint8)
    saved = load_model(ModelName(parse(made).prefix, 0), [mx.cpu()])(images)
    expected = run.trained.backbone.embed(images)
    size = np.abs(expected).max()
    np.testing.assert_allclose(saved / size, expected / size, atol=1e-5)
    symbol = mx.sym.load(f"{parse(made).prefix}-symbol.json")
    assert symbol.list_outputs() == ["fc1_output"]


def test_the_loss_falls(flags):
    made = flags(max_steps=60, lr_steps="", scale=16, verbose=100, target="none")
    assert train.main(made) == 0
    with open(folder_of(made) / "metrics.csv") as file:
        found = [float(row["loss"]) for row in csv.DictReader(file)]
    assert np.mean(found[-10:]) < 0.9 * np.mean(found[:3])


@pytest.mark.parametrize(
    "loss", ["softmax", "arcface", "sphereface", "dsoftmax_b", "dsoftmax_k", "hf_softmax"]
)
def test_other_losses(flags, loss):
    rate = {"dsoftmax_b": 0.5, "dsoftmax_k": 0.4, "hf_softmax": 0.8}.get(loss)
    made = flags(loss=loss, max_steps=4, verbose=100, sample_rate=rate)
    assert train.main(made) == 0
    assert (folder_of(made) / "model-0000.params").exists()


def test_what_is_learnt_is_a_function_of_the_seed(flags):
    learnt = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        made = flags(name, seed=seed, max_steps=3, target="none", network="tiny")
        assert train.main(made) == 0
        learnt.append(np.load(newest(made) / "classes.npy"))
    np.testing.assert_array_equal(learnt[0], learnt[1])
    assert not np.array_equal(learnt[0], learnt[2])


def test_help_loads_nothing_heavy():
    """It answers at once: MXNet alone takes a second."""
    script = (
        "import sys\n"
        "from dsoftmax.recognition import train\n"
        "try:\n"
        "    train.main(['--help'])\n"
        "except SystemExit as stop:\n"
        "    assert stop.code == 0\n"
        "heavy = {'mxnet', 'cv2', 'matplotlib', 'gluoncv', 'sklearn'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--loss-option" in done.stdout
    assert "examples:" in done.stdout


@pytest.mark.parametrize(
    ("loss", "criterion"),
    [("nsoftmax", "Softmax"), ("cosface", "CosFace"), ("arcface", "ArcFace")],
)
def test_a_loss_is_the_one_it_is_called(flags, capsys, loss, criterion):
    assert train.main(flags(loss=loss, max_steps=1, target="none")) == 0
    assert f"5: {criterion}(" in capsys.readouterr().out


def test_a_loss_of_your_own(flags, tmp_path, monkeypatch, capsys):
    """A configuration registers it."""
    monkeypatch.setattr(presets, "PRESETS", dict(presets.PRESETS))
    (tmp_path / "mine.py").write_text(
        "from dsoftmax.losses import CosFace, register\n"
        "from dsoftmax.recognition.config import *\n"
        "class Steep(CosFace):\n"
        "    def target(self, F, z_y):\n"
        "        return 2 * z_y - 1 - self.m3\n"
        "register('steep', Steep, m3=0.1)\n"
    )
    made = flags(loss="steep", config=tmp_path / "mine.py", m3=0.2, max_steps=2)
    assert train.main(made) == 0
    assert "Steep(scale=64, m3=0.2)" in capsys.readouterr().out
    assert folder_of(made).name == "tiny-steep-few"


def lines_of_steps(err):
    """Return the figures of each step's line, as they are printed."""
    lines = [line for line in err.splitlines() if "lossvalue=" in line]
    return [dict(re.findall(r"(\w+)=(\S+)", line)) for line in lines]


@pytest.mark.parametrize("loss", ["dsoftmax", "dsoftmax_b", "dsoftmax_k", "dsoftmax_softmax"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_printed_parts_add_up_to_the_printed_loss(flags, capsys, monkeypatch, loss, accumulate):
    seen = []
    stats = Head.stats.fget
    monkeypatch.setattr(Head, "stats", property(lambda head: seen.append(stats(head)) or seen[-1]))
    rate = 0.5 if loss[-2:] in ("_b", "_k") else None
    changes = {"per_batch_size": 4, "sample_rate": rate, "accumulate": accumulate}
    made = flags(loss=loss, max_steps=6, target="none", **changes)
    assert train.main(made) == 0
    out, err = capsys.readouterr()
    assert "lossvalue = intra + inter" in out
    printed = lines_of_steps(err)
    with open(folder_of(made) / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(printed) == len(rows) == len(seen) == 3
    for line, row, figures in zip(printed, rows, seen):
        assert Decimal(line["intra"]) + Decimal(line["inter"]) == Decimal(line["lossvalue"])
        for name, column in (("lossvalue", "loss"), ("intra", "intra"), ("inter", "inter")):
            assert float(line[name]) == float(row[column])
        assert float(line["inter"]) == pytest.approx(figures["inter"], abs=1e-4)
        assert ("inter_floor" in line) == (loss != "dsoftmax_softmax")


@pytest.mark.parametrize("loss", ["softmax", "arcface", "adaface"])
def test_what_a_loss_does_not_have_is_not_shown(flags, capsys, loss):
    made = flags(loss=loss, max_steps=4, target="none", lr_schedule="cosine", warmup_steps=2)
    assert train.main(made) == 0
    out, err = capsys.readouterr()
    assert not re.search(r"\b(intra|inter)\b", out + err)  # inter_filter is an option of every loss
    assert "lr_steps [" not in out
    assert "warmup_steps 2\nlr_schedule cosine: 0.1, falling to 0 at step 4\n" in out
    with open(folder_of(made) / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert {row["intra"] for row in rows} == {row["inter"] for row in rows} == {"nan"}


@pytest.mark.parametrize(
    ("loss", "title"),
    [("arcface", "ArcFace"), ("nsoftmax", "NormFace"), ("dsoftmax_k", "D-Softmax-K")],
)
def test_a_loss_is_called_as_in_its_paper(flags, capsys, loss, title):
    assert train.main(flags(loss=loss, max_steps=1, target="none")) == 0
    assert f"\nloss {title}: Head(8 -> 5: " in capsys.readouterr().out


def test_what_is_saved_is_named(flags, capsys):
    made = flags(max_steps=4)
    assert train.main(made) == 0
    out, err = (text.splitlines() for text in capsys.readouterr())
    lines = (folder_of(made) / "train.log").read_text().splitlines()  # in the order of both
    for line, number in (("saving 1", 1), ("saving last 0", 0)):
        path = folder_of(made) / f"model-000{number}.params"
        saved = f'INFO:root:Saved checkpoint to "{path}"'  # as MXNet says it
        assert line in out
        assert saved in err
        assert lines[lines.index(line) + 1] == saved
        assert path.exists()
    assert f"saved {newest(made)}, for --resume" in out
