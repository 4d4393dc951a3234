"""The examples in the docstrings run."""

import doctest
import importlib

import pytest

MODULES = [
    "dsoftmax.recognition.files",
    "dsoftmax.recognition.data.records",
    "dsoftmax.recognition.data.pipeline",
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of(name, tmp_path, dataset, jpeg):
    folder, _ = dataset(size=(112, 112))
    names = {"tmp": str(tmp_path), "folder": str(folder), "jpeg": jpeg()}
    module = importlib.import_module(name)
    results = doctest.testmod(module, extraglobs=names, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.attempted > 0
    assert results.failed == 0
