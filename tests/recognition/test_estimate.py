"""Estimates of the memory a run takes."""

import mxnet as mx

from dsoftmax.recognition import estimate


def test_memory_grows_as_it_should():
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

    def of_device(**changes):
        return estimate.of_device(symbol, (3, 4, 4), 8, {**head, **changes})

    whole = of_device()
    assert whole.classes == 4 * 10 * 2 * 1000
    assert whole.logits == 3 * 4 * 8 * 1000
    assert whole.network == 4 * 3 * (480 + 10)
    assert of_device(devices=2).classes == whole.classes / 2
    assert of_device(chunk=100).logits == whole.logits / 10
    assert of_device(sample_rate=0.1, store="host").classes == 4 * 10 * 3 * 100
    assert estimate.of_host({**head, "store": "host"}) == whole.classes
    assert estimate.of_host(head) == 0
    shared = {**head, "store": "host", "processes": 4}
    assert estimate.of_host(shared) == whole.classes / 4
    assert estimate.of_servers(head) == whole.classes
