"""Which models a run keeps, and what a verification that fails or is interrupted means."""

import os
import signal

import mxnet as mx
import numpy as np
import pytest

from dsoftmax.eval.models import load_model
from dsoftmax.recognition import loop, models, states, train
from dsoftmax.recognition.settings import parse
from tests.recognition.runs import (
    assert_same_state,
    folder_of,
    models_of,
    newest,
    read_table,
    stop_after,
)


@pytest.fixture
def scores(monkeypatch):
    """Let verifications find these accuracies, one after the other."""

    def set_to(*accuracies, signal_at=None):
        found = enumerate(accuracies)

        def verify(*args, **kwargs):
            real = original(*args, **kwargs)
            place, score = next(found)
            if isinstance(score, Exception):
                raise score
            if place == signal_at:
                os.kill(os.getpid(), signal.SIGTERM)
            accuracy = real.accuracy._replace(mean=score)
            return type(real)(**{**vars(real), "accuracy": accuracy})

        monkeypatch.setattr(models, "verify", verify)

    original = models.verify
    return set_to


@pytest.fixture
def two(faces):
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
def test_which_models_are_kept(flags, scores, ckpt, expected):
    scores(0.6, 0.5, 0.7, 0.7, 0.65)  # the fourth ties with the best
    made = flags(ckpt=ckpt, verbose=2, max_steps=10)
    assert train.main(made) == 0
    assert models_of(made) == expected
    facts = states.read_facts(str(newest(made)))
    assert facts["best"] == {"val": 0.7}
    assert facts["verifications"] == 5


def test_the_best_may_be_the_last(flags, scores):
    scores(0.6, 0.9)
    made = flags(verbose=4, max_steps=6, ckpt=3)
    assert train.main(made) == 0
    one, last = (mx.nd.load(f"{parse(made).prefix}-{n:04d}.params") for n in (1, 0))
    for key in last:
        np.testing.assert_array_equal(one[key].asnumpy(), last[key].asnumpy())


def test_without_packs_the_newest_is_kept(flags):
    made = flags(target="none", ckpt=3, verbose=4, max_steps=7)
    run = loop.Run(parse(made))
    run.train()
    assert (folder_of(made) / "model-0001.params").exists()


@pytest.mark.parametrize("moment", ["before", "between"])
def test_a_verification_that_is_interrupted_is_repeated(flags, two, scores, moment):
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


def test_a_run_that_is_stopped_at_its_last_step(flags):
    made = flags(max_steps=6)
    stop_after(6, made)
    assert [row["step"] for row in read_table(folder_of(made) / "verification.csv")] == ["4"]
    for _ in range(2):  # once is enough
        assert train.main([*made, "--resume"]) == 0
        rows = read_table(folder_of(made) / "verification.csv")
        assert [row["step"] for row in rows] == ["4", "6"]


def test_a_target_that_fails_is_no_score(flags, two, scores):
    scores(0.6, 0.6, 0.9, ValueError("embeddings hold NaN"), 0.5, 0.7)
    made = flags(target=two, ckpt=1)
    assert train.main(made) == 0
    assert models_of(made) == {"0000", "0001", "0003"}
    facts = states.read_facts(str(newest(made)))
    assert facts["best"] == {"val": 0.6, "other": 0.7}
    assert facts["verifications"] == 3


def test_a_verification_that_fails_ends_no_run(flags, monkeypatch, capsys):
    """Moving averages of a few steps may overflow a deep network that trains well."""

    def overflow(*_, **__):
        raise ValueError("80 of 80 embeddings hold NaN")

    monkeypatch.setattr(models, "verify", overflow)
    made = flags(max_steps=4)
    assert train.main(made) == 0
    assert "[val][4]not verified: 80 of 80 embeddings hold NaN" in capsys.readouterr().out
    assert newest(made).name == "state-00000004"
    assert not (folder_of(made) / "model-0001.params").exists()  # nobody knows whether it is


class TestClassWeightsInModels:
    """``ckpt_embedding = False``, as insightface's configuration has it."""

    @pytest.fixture
    def config(self, tmp_path):
        path = tmp_path / "uncut.py"
        path.write_text(
            "from dsoftmax.recognition.config import *\nconfig.ckpt_embedding = False\n"
        )
        return path

    @pytest.mark.parametrize("loss", ["arcface", "softmax"])
    def test_the_graph_computes_embedding_and_logits(self, flags, config, loss, rng):
        made = flags(config=config, loss=loss, devices="cpu:2", per_batch_size=4, class_parallel=1)
        assert train.main(made) == 0
        symbol, arguments, auxiliary = mx.model.load_checkpoint(parse(made).prefix, 0)
        assert symbol.list_outputs() == ["fc1_output", "fc7_output"]
        weights = np.load(newest(made) / "classes.npy")
        np.testing.assert_array_equal(arguments["fc7_weight"].asnumpy(), weights)
        images = rng.integers(0, 256, (3, 3, 32, 32))
        module = mx.mod.Module(symbol, label_names=None)
        module.bind([("data", images.shape)], for_training=False)
        module.set_params(arguments, auxiliary)
        module.forward(mx.io.DataBatch([mx.nd.array(images)]), is_train=False)
        embeddings, logits = (output.asnumpy() for output in module.get_outputs())
        expected = embeddings @ weights.T
        if loss == "arcface":
            lengths = np.outer(*(np.linalg.norm(a, axis=1) for a in (embeddings, weights)))
            expected = 64 * expected / lengths
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
        assert load_model(f"{parse(made).prefix},0")(images).shape == (3, 8)

    def test_another_run_begins_with_them(self, flags, config):
        made = flags("first", config=config)
        assert train.main(made) == 0
        second = flags("second", pretrained=f"{parse(made).prefix},0", loss="arcface")
        weights = loop.Run(parse(second)).trained.head.class_weights()
        np.testing.assert_array_equal(weights, np.load(newest(made) / "classes.npy"))

    def test_the_default_is_the_embedding_alone(self, flags):
        made = flags()
        assert train.main(made) == 0
        assert not any("fc7" in key for key in mx.nd.load(f"{parse(made).prefix}-0000.params"))
