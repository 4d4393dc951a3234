"""CONTRIBUTING's recipes, followed to the letter."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import mxnet as mx
import naive_losses
import numpy as np
import pytest
from mxnet import autograd

from dsoftmax import losses
from dsoftmax.losses import presets, stores
from dsoftmax.recognition import train

CONTRIBUTING = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")


def block(name):
    """Return the code behind a mark of CONTRIBUTING."""
    (code,) = re.findall(
        rf"<!-- recipe: {name} -->\n```python\n(.*?)```", CONTRIBUTING, flags=re.DOTALL
    )
    return code


@pytest.fixture
def registries(monkeypatch):
    """Forget afterwards what a recipe registers."""
    for module, table in ((presets, "PRESETS"), (presets, "NEGATIVES"), (stores, "STORES")):
        monkeypatch.setattr(module, table, dict(getattr(module, table)))
    monkeypatch.setattr(presets, "STORES", stores.STORES)


def step_of(head, trainer, embeddings, labels):
    """Train a head for one step; return the losses."""
    embeddings = mx.nd.array(embeddings)
    embeddings.attach_grad()
    with autograd.record():
        loss = head(embeddings, labels)
    loss.backward()
    trainer.step(len(labels))
    return loss.asnumpy()


def train_head(preset, **options):
    """Train a head for some steps; return its losses and class weights."""
    head = losses.create(preset, 30, 8, seed=1, **options)
    head.initialize(mx.init.Normal(0.1))
    trainer = head.trainer("sgd", {"learning_rate": 0.1, "momentum": 0.9})
    draw = np.random.default_rng(1)
    values = [
        step_of(head, trainer, draw.normal(size=(6, 8)), draw.integers(0, 30, 6)) for _ in range(3)
    ]
    return np.array(values), head.class_weights()


class TestLoss:
    @pytest.fixture
    def name(self, registries, monkeypatch):
        """Follow the recipe; return the name of the new loss."""
        names = {"losses": losses}
        exec(compile(block("loss"), "CONTRIBUTING.md", "exec"), names)
        exec(compile(block("registration"), "CONTRIBUTING.md", "exec"), names)
        (line,) = re.findall(r'`("LinearMargin": entangled\(.*\))`', CONTRIBUTING)
        twin = eval(f"{{{line}}}", {"np": np, "entangled": naive_losses.entangled})
        monkeypatch.setattr(naive_losses, "TWINS", {**naive_losses.TWINS, **twin})
        return "linear_margin"

    def test_it_is_its_twin(self, name, rng):
        spec = losses.resolve(name)
        x, weights = rng.normal(size=(5, 8)), rng.normal(size=(30, 8))
        labels = rng.integers(0, 30, 5)
        negatives = [[k for k in range(30) if k != label] for label in labels]
        expected, *_ = naive_losses.compute(
            "LinearMargin", x, weights, labels, negatives, np.zeros(30), spec.options
        )
        head = losses.create(name, 30, 8)
        head.load_class_weights(weights.astype(np.float32))
        loss = head(mx.nd.array(x), labels).asnumpy()
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        row = {}
        exec(compile(block("twin"), "CONTRIBUTING.md", "exec"), row)
        z = naive_losses.cosines(x[0], weights, True)
        n = np.log(np.exp(32 * z[negatives[0]]).sum())
        assert row["linear_margin"](z[labels[0]], n, 32) == pytest.approx(loss[0], rel=1e-5)

    def test_all_choices_come_with_it(self, name):
        split = train_head(name, ctx=[mx.cpu(0), mx.cpu(1)], chunk=7)
        for one, other in zip(split, train_head(name)):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
        sampled, _ = train_head(name, sample_rate=0.4, store="host")
        assert np.isfinite(sampled).all()

    def test_a_name_is_taken_once(self, name):
        with pytest.raises(ValueError, match="there is a loss 'arcface' already"):
            losses.register("arcface", losses.CosFace)
        with pytest.raises(TypeError, match="has no option m9"):
            losses.register("other", losses.CosFace, m9=1)
        assert "other" not in losses.names()

    def test_train(self, dataset, tmp_path):
        """As a user would: a file of one's own, and train.py --loss."""
        folder, _ = dataset((8, 8, 8))
        config = tmp_path / "mine.py"
        config.write_text(
            "from dsoftmax.recognition.config import *\n"
            + "from dsoftmax.recognition.config import generate_config\n"
            + block("loss")
            + block("registration")
        )
        flags = "--loss linear_margin --loss-option m=0.2 --network tiny --dataset few"
        flags += " --emb-size 8 --per-batch-size 8 --max-steps 4 --frequent 2 --threads 1"
        folders = ["--config", config, "--data-dir", folder, "--models-root", tmp_path / "models"]
        command = [sys.executable, "-W", "ignore", train.__file__, *flags.split(), *folders]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "LinearMargin(scale=32" in done.stdout
        with open(tmp_path / "models" / "tiny-linear_margin-few" / "metrics.csv") as file:
            assert [row["step"] for row in csv.DictReader(file)] == ["2", "4"]


SAMPLER = """
import numpy as np
from dsoftmax.losses.samplers import Draw, Sampler


class EveryThird(Sampler):
    is_sparse = True

    def __init__(self, num_classes, exclude_labels):
        self.num_classes, self.exclude_labels = num_classes, exclude_labels

    @classmethod
    def make(cls, setting, *, sample_rate=1 / 3):
        return cls(setting.store.shape[0], setting.dissected)

    def draw(self, step, labels, embeddings=None):
        classes = np.setdiff1d(np.arange(step % 3, self.num_classes, 3), labels)
        return Draw(classes, not self.exclude_labels)
"""


def test_a_sampler(registries, rng, tmp_path, monkeypatch):
    (tmp_path / "every_third.py").write_text(SAMPLER)
    monkeypatch.syspath_prepend(str(tmp_path))
    presets.NEGATIVES["third"] = "every_third.EveryThird"
    assert losses.resolve("dsoftmax", negatives="third").sampled_share == 1 / 3
    labels = np.array([1, 6, 6, 28])
    head = losses.create("dsoftmax", 30, 8, negatives="third", scale=4)
    head.load_class_weights(rng.normal(size=(30, 8)).astype(np.float32))
    before = head.class_weights()
    step_of(head, head.trainer("sgd", {"learning_rate": 0.1}), rng.normal(size=(4, 8)), labels)
    changed = np.flatnonzero((head.class_weights() != before).any(axis=1))
    np.testing.assert_array_equal(changed, np.union1d(np.arange(0, 30, 3), labels))


STORE = """
from dsoftmax.losses.stores.local import DeviceStore


class CountingStore(DeviceStore):
    reads = 0

    def blocks(self, name="weight"):
        CountingStore.reads += 1
        return super().blocks(name)
"""


def test_a_store(registries, tmp_path, monkeypatch):
    (tmp_path / "counting_store.py").write_text(STORE)
    monkeypatch.syspath_prepend(str(tmp_path))
    stores.STORES["counting"] = "counting_store.CountingStore"
    ours, theirs = train_head("dsoftmax", store="counting"), train_head("dsoftmax")
    for one, other in zip(ours, theirs):
        np.testing.assert_array_equal(one, other)
    assert stores.find_store("counting").reads == 1
