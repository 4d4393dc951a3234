"""Estimates of the memory a run takes."""

import mxnet as mx
import pytest

from dsoftmax.losses.negatives import CACHED_CLASSES
from dsoftmax.recognition import estimate
from dsoftmax.recognition.estimate import Estimate, HeadSize

HEAD = HeadSize(num_classes=1000, embedding_size=10, batch_size=8, momentum=0.9)
STORED = 4 * 10 * 2 * 1000  # bytes of all class weights and momenta


@pytest.fixture
def of_device():
    """Return a function that estimates the memory of a small network with another head."""
    symbol = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=10, name="fc1")
    return lambda **changes: estimate.of_device(symbol, (3, 4, 4), 8, HEAD._replace(**changes))


def test_memory_grows_as_it_should(of_device):
    whole = of_device()
    gradients = 4 * 10 * 2 * 1000  # a block of classes, twice
    assert whole.classes == STORED + gradients
    assert whole.logits == 3 * 4 * 8 * 1000
    assert whole.network == 4 * 3 * (480 + 10)
    assert whole.total == sum(whole)
    assert of_device(momentum=0.0).classes == STORED / 2 + gradients
    assert of_device(devices=2).classes == (STORED + gradients) / 2
    assert of_device(chunk=100).logits == whole.logits / 10
    assert of_device(chunk=100).classes == STORED + gradients / 10
    large = {"num_classes": 1_000_000, "batch_size": 16}
    assert of_device(**large, keeps_logits=False).logits == 3 * 4 * 16 * CACHED_CLASSES
    assert of_device(**large).logits == 4 * 16 * (2 * 1_000_000 + CACHED_CLASSES)


def test_sampled_classes_are_copied(of_device):
    rows = 100 + 8  # and those of the batch
    assert of_device(sampled_share=0.1).classes == STORED + 4 * 10 * 3 * rows
    assert of_device(sampled_share=0.1, store="host").classes == 4 * 10 * 3 * rows
    assert of_device(sampled_share=0.1, devices=4).logits == 3 * 4 * 8 * (25 + 2)
    assert of_device(sampled_share=1.0).logits == 3 * 4 * 8 * 1000  # there are no more


def test_where_class_weights_are_stored():
    assert HEAD.stored() == (STORED, 0, 0)
    assert HEAD._replace(store="host").stored() == (0, STORED, 0)
    assert HEAD._replace(store="host", processes=4).stored() == (0, STORED / 4, 0)
    for dtype in ("float16", "bfloat16"):
        assert HEAD._replace(store="host", dtype=dtype).stored() == (0, STORED / 2, 0)
    assert HEAD._replace(store="server", processes=4).stored() == (0, 0, STORED)


def test_contexts_of_a_cpu_share_its_memory():
    device = Estimate(network=1, activations=10, classes=100, logits=1000)
    assert estimate.of_machine(device, 3, True, 5) == (3, 30, 305, 3000)
    assert estimate.of_machine(device, 3, False, 0) == (3, 30, 100, 3000)
