"""The examples in the docstrings run."""

import doctest
import importlib

import mxnet as mx
import pytest

from dsoftmax import losses
from dsoftmax.losses import presets

MODULES = [
    *sorted({losses.resolve(name).criterion.__module__ for name in losses.names()}),
    "dsoftmax.losses.log_sum_exp",
    "dsoftmax.losses.presets",
    "dsoftmax.recognition.common.checks",
    "dsoftmax.recognition.common.cli",
    "dsoftmax.recognition.common.files",
    "dsoftmax.recognition.common.inner_products",
    "dsoftmax.recognition.common.rows",
    "dsoftmax.recognition.data.records",
    "dsoftmax.recognition.data.pipeline",
    "dsoftmax.recognition.networks.factory",
    "dsoftmax.eval.models",
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of(name, tmp_path, dataset, jpeg, monkeypatch):
    monkeypatch.setattr(presets, "PRESETS", dict(presets.PRESETS))  # an example registers a loss
    folder, _ = dataset(size=(112, 112))
    names = {"tmp": str(tmp_path), "folder": str(folder), "jpeg": jpeg(), "mx": mx}
    names.update({name: mx.nd.random.uniform(shape=(4,)) for name in ("z_y", "n", "quality")})
    names.update(
        embedding=mx.nd.ones((4, 3)), weight=mx.nd.ones((5, 3)), target_row=mx.nd.arange(4)
    )
    module = importlib.import_module(name)
    results = doctest.testmod(module, extraglobs=names, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.attempted > 0
    assert results.failed == 0
