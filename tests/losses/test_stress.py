"""Numbers far from usual ones: the loss and all gradients stay finite, or an error says why not."""

import json
import os
import subprocess
import sys

import pytest

from dsoftmax.losses import operators

SCRIPT = """
import json, sys
import mxnet as mx
import numpy as np
from mxnet import autograd, nd
from dsoftmax import losses
from dsoftmax.losses import operators

assert operators.load() == bool(int(sys.argv[1]))
PRESETS = (
    "dsoftmax dsoftmax_k arcface sphereface hf_softmax adaface curricularface mv_softmax circle "
    "uniface sphereface2 magface"
).split()
WIDTH = 6
rng = np.random.default_rng(0)


def make(preset, classes=20, width=WIDTH, **options):
    spec = losses.resolve(preset)
    if spec.negatives != "all":
        options["sample_rate"] = 1.0 if classes < 1000 else 1e-3
    if spec.negatives == "forest":
        options["trees"] = 1
    head = losses.create(preset, classes, width, **options)
    head.initialize(mx.init.Normal(0.1))
    return head


def train(head, x, labels, steps=3, rate=0.1, follow=False):
    x = nd.array(x)
    x.attach_grad()
    trainer = head.trainer("sgd", {"learning_rate": rate, "momentum": 0.9})
    found = []
    for _ in range(steps):
        with autograd.record():
            loss = head(x, labels)
        loss.backward()
        trainer.step(len(labels))
        found += [loss.asnumpy(), x.grad.asnumpy()]
        if follow:
            x[:] = x - rate * x.grad
    found.append(head.class_weights())
    return "finite" if all(np.isfinite(array).all() for array in found) else "not finite"


def scaled(preset, scale):
    return train(make(preset, scale=scale), rng.normal(size=(5, WIDTH)), np.arange(5))


def in_one_point(preset):
    x = np.tile(rng.normal(size=(1, WIDTH)), (5, 1))
    return train(make(preset), x, np.arange(5))


def all_zero(preset):
    return train(make(preset), np.zeros((5, WIDTH)), np.arange(5))


def on_its_class(preset):
    head = make(preset)
    return train(head, head.class_weights()[:5], np.arange(5))


def opposite_its_class(preset):
    head = make(preset)
    return train(head, -head.class_weights()[:5], np.arange(5))


def one_class(preset):
    return train(make(preset, 1), rng.normal(size=(5, WIDTH)), np.zeros(5, int))


def million_classes(preset):
    labels = rng.choice(10**6, 5, replace=False)
    return train(make(preset, 10**6, 2), rng.normal(size=(5, 2)), labels, steps=1)


def nan_in_an_embedding(preset):
    x = rng.normal(size=(5, WIDTH))
    x[2, 3] = np.nan
    return train(make(preset), x, np.arange(5))


def nan_in_a_class_weight(preset):
    head = make(preset)
    weights = head.class_weights()
    weights[2, 3] = np.nan
    head.load_class_weights(weights)
    return train(head, rng.normal(size=(5, WIDTH)), np.arange(5))


def huge_rate(preset):
    return train(make(preset), rng.normal(size=(5, WIDTH)), np.arange(5), 20, 1e12, True)


SCENES = {
    "scale 256": lambda preset: scaled(preset, 256),
    "scale 1e4": lambda preset: scaled(preset, 1e4),
    "embeddings in one point": in_one_point,
    "embeddings of length 0": all_zero,
    "embeddings on their classes": on_its_class,
    "embeddings opposite their classes": opposite_its_class,
    "one class": one_class,
    "a million classes": million_classes,
    "NaN in an embedding": nan_in_an_embedding,
    "NaN in a class weight": nan_in_a_class_weight,
    "learning rate 1e12": huge_rate,
}
found = {}
for scene, run in SCENES.items():
    for preset in PRESETS:
        try:
            found[f"{preset}, {scene}"] = run(preset)
        except ValueError as error:
            found[f"{preset}, {scene}"] = f"ValueError: {error}"
print(json.dumps(found))
"""
# What may be refused, and the words that name the cause.
CAUSES = {
    "NaN in an embedding": "1 of 5 embeddings hold NaN",
    "NaN in a class weight": "class weight 2 holds NaN",
    "learning rate 1e12": "embeddings hold NaN",
}


@pytest.fixture(scope="module", params=["0", "1"], ids=["without operators", "with operators"])
def outcomes(request):
    """What became of each preset in each scene."""
    if request.param == "1" and not operators.load():
        pytest.skip("the operators are not built here")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, request.param],
        env={**os.environ, operators.SWITCH: request.param},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_finite_or_the_cause(outcomes):
    wrong = {}
    for case, outcome in outcomes.items():
        cause = CAUSES.get(case.partition(", ")[2], "nothing")
        is_expected = outcome.startswith("ValueError") and cause in outcome
        if not is_expected and (outcome != "finite" or "NaN" in case):
            wrong[case] = outcome
    assert not wrong, json.dumps(wrong, indent=1)
