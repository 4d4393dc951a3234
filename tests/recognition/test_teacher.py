"""A run that stays close to a teacher: its loss, its gradient, its log, its bits."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, nd
from mxnet.test_utils import assert_almost_equal

from dsoftmax.eval.models import load_model
from dsoftmax.recognition import loop, train
from dsoftmax.recognition.settings import parse
from dsoftmax.recognition.teacher import Teacher
from tests.recognition.runs import assert_same_state, folder_of, newest, read_table, stop_after


@pytest.fixture
def teacher(symbol_model):
    """Return the name of a network with embeddings of width 8."""
    return f"{symbol_model('teacher', width=8)},0"


@pytest.fixture
def make(teacher):
    return lambda weight=3.0: Teacher(teacher, weight, 8, (32, 32), [mx.cpu(0)])


def test_the_loss(make, rng):
    embeddings, targets = rng.normal(size=(5, 8)), rng.normal(size=(5, 8))
    targets /= np.linalg.norm(targets, axis=1, keepdims=True)
    cosines = (embeddings * targets).sum(axis=1) / np.linalg.norm(embeddings, axis=1)
    made = make()
    made.begin_step()
    loss = made.loss(nd.array(embeddings), nd.array(targets))
    np.testing.assert_allclose(loss.asnumpy(), 3 * (1 - cosines), rtol=1e-5)
    second = made.loss(nd.array(targets[:2]), nd.array(targets[:2]))
    np.testing.assert_allclose(second.asnumpy(), 0, atol=1e-6)
    assert made.read_loss() == pytest.approx(3 * (1 - cosines).sum() / 7, rel=1e-5)
    assert made.mean_loss == made.read_loss()


def test_the_gradient(make, rng):
    embeddings, targets = rng.normal(size=(4, 8)), rng.normal(size=(4, 8))
    made, x = make(), nd.array(embeddings)
    x.attach_grad()
    with autograd.record():
        loss = made.loss(x, nd.array(targets))
    loss.backward()

    def total(values):
        return 3 * sum(1 - v @ t / np.sqrt(v @ v) for v, t in zip(values, targets))

    numeric = np.zeros_like(embeddings)
    for place in np.ndindex(*embeddings.shape):
        step = np.zeros_like(embeddings)
        step[place] = 1e-5
        numeric[place] = (total(embeddings + step) - total(embeddings - step)) / 2e-5
    assert_almost_equal(x.grad.asnumpy(), numeric, rtol=1e-3, atol=1e-4)


def test_a_step_has_the_gradient_of_both_losses(flags, teacher):
    """The head's alone, plus the teacher's as autograd computes it from the same embeddings."""
    gradients = {}
    for name, changes in {
        "none": {},
        "both": {"teacher": teacher, "teacher_weight": 2.5},
    }.items():
        run = loop.Run(parse(flags(name, **changes)))
        seen = []
        backward = run.trained.backbone.backward
        run.trained.backbone.backward = lambda grad, seen=seen, go=backward: (
            seen.append(grad.copy()),
            go(grad),
        )
        batch = next(run.plan.pipeline.epoch(0))
        forward = run.trained.backbone.forward
        embedded = []
        run.trained.backbone.forward = lambda *args, go=forward, kept=embedded: (
            kept.append(go(*args)) or kept[-1]
        )
        loss = run.train_step(batch)
        gradients[name] = loss, seen[0].asnumpy(), embedded[0].asnumpy(), batch.data
    loss, grad, embeddings, images = gradients["none"]
    targets = load_model(teacher)(images)
    targets /= np.linalg.norm(targets, axis=1, keepdims=True)
    length = np.linalg.norm(embeddings, axis=1, keepdims=True)
    unit = embeddings / length
    cosine = (unit * targets).sum(axis=1, keepdims=True)
    expected = grad - 2.5 * (targets - cosine * unit) / length
    np.testing.assert_allclose(gradients["both"][1], expected, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(gradients["both"][0], loss + 2.5 * (1 - cosine).mean(), rtol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [{}, {"loss": "dsoftmax_k", "sample_rate": 0.4, "store": "host"}, {"accumulate": 2}],
    ids=["plain", "sampled", "micro-batches"],
)
def test_weight_0_is_no_teacher_to_the_bit(flags, teacher, changes):
    without, with_0 = flags("without", **changes), flags("with", **changes)
    with_0 += ["--teacher", teacher, "--teacher-weight", "0"]
    assert train.main(without) == 0
    assert train.main(with_0) == 0
    assert_same_state(newest(without), newest(with_0))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss": "arcface", "accumulate": 2, "per_batch_size": 4},
        {"devices": "cpu:2", "per_batch_size": 4, "class_parallel": 1},
    ],
    ids=["plain", "micro-batches", "two devices"],
)
def test_resumed_it_ends_with_the_same_bits(flags, teacher, changes):
    both = {"teacher": teacher, "teacher_weight": 5, **changes}
    whole, part = flags("whole", **both), flags("part", **both)
    assert train.main(whole) == 0
    stop_after(7, part)
    assert train.main([*part, "--resume"]) == 0
    assert_same_state(newest(whole), newest(part))
    for name in ("metrics.csv", "verification.csv"):
        a, b = (read_table(folder_of(made) / name) for made in (whole, part))
        assert a == b


def test_micro_batches_of_a_large_batch(flags, teacher, tmp_path):
    """The parts of the loss are those of the batch as a whole, where nothing normalizes over it."""
    config = tmp_path / "no_bn.py"
    config.write_text("from dsoftmax.recognition.config import *\nnetwork.tiny.net_output = 'H'\n")
    found = []
    for name, sizes in {"one": (8, 1), "two": (4, 2)}.items():
        made = flags(
            name,
            teacher=teacher,
            per_batch_size=sizes[0],
            accumulate=sizes[1],
            freeze_backbone=None,
            config=config,
        )
        run = loop.Run(parse(made))
        run.trained.backbone._frozen = True  # no BatchNorm over parts
        run.train_step(next(run.plan.pipeline.epoch(0)))
        found.append(run._teacher.mean_loss)
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize("loss", ["dsoftmax", "arcface"])
def test_the_log_adds_up(flags, teacher, loss, capsys):
    made = flags(loss=loss, teacher=teacher, teacher_weight=4)
    assert train.main(made) == 0
    out, err = capsys.readouterr()
    assert f"teacher {teacher}, weight 4" in out
    expected = "intra + inter" if loss == "dsoftmax" else "arcface"
    assert f"lossvalue = {expected} + teacher; teacher is 4 x (1 - the mean cosine with" in out
    rows = read_table(folder_of(made) / "metrics.csv")
    assert len(rows) == 6
    for row, line in zip(rows, (line for line in err.splitlines() if "lossvalue" in line)):
        values = dict(cell.split("=") for cell in line.split("\t") if "=" in cell)
        assert float(values["teacher"]) == float(row["teacher"]) > 0
        if loss == "dsoftmax":
            parts = sum(float(values[name]) for name in ("intra", "inter", "teacher"))
            assert parts == pytest.approx(float(values["lossvalue"]), abs=1e-9)


def test_without_a_teacher_nothing_is_said(flags, capsys):
    made = flags()
    assert train.main(made) == 0
    assert "teacher=" not in capsys.readouterr().err
    assert {row["teacher"] for row in read_table(folder_of(made) / "metrics.csv")} == {"nan"}


def test_a_student_learns_from_the_teacher_alone(flags, tmp_path):
    """Class weights stand still, and the teacher's part outweighs the rest by far."""
    first = flags("teacher", seed=1, target="none")
    assert train.main(first) == 0
    config = tmp_path / "frozen_head.py"
    config.write_text(
        "from dsoftmax.recognition.config import *\nconfig.fc7_lr_mult = 0\n"
        "config.fc7_wd_mult = 0\n"
    )
    made = flags(
        "student",
        config=config,
        teacher=f"{parse(first).prefix},0",
        teacher_weight=100,
        per_batch_size=20,
        rand_mirror=0,
        lr=0.01,
        lr_steps="1000",
        max_steps=60,
        target="none",
    )
    assert train.main(made) == 0
    rows = read_table(folder_of(made) / "metrics.csv")
    distances = [float(row["teacher"]) / 100 for row in rows]
    assert distances[0] > 0.4
    assert np.mean(distances[-5:]) < 0.15


class TestRefusals:
    def refuse(self, flags, capsys, message, **changes):
        assert train.main(flags(**changes)) == 2
        assert message in capsys.readouterr().err

    def test_another_width(self, flags, symbol_model, capsys):
        message = "its embeddings have width 16, those of this run 8: give --emb-size 16"
        self.refuse(flags, capsys, message, teacher=f"{symbol_model('wide')},0")

    def test_no_file(self, flags, capsys):
        message = "--teacher nowhere/model,3: nowhere/model-symbol.json: there is no such file"
        self.refuse(flags, capsys, message, teacher="nowhere/model,3")
        self.refuse(flags, capsys, "no such file for any epoch", teacher="nowhere/model")

    def test_a_frozen_student(self, flags, teacher, capsys):
        message = "with --freeze-backbone there is nothing to teach"
        self.refuse(flags, capsys, message, teacher=teacher, freeze_backbone=True)

    def test_a_negative_weight(self, flags, teacher, capsys):
        message = "--teacher-weight must be at least 0, not -1"
        self.refuse(flags, capsys, message, teacher=teacher, teacher_weight=-1)
