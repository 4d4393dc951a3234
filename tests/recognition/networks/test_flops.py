"""The operations of a network, against counts by hand and published ones."""

import mxnet as mx
import pytest

from dsoftmax.recognition import networks
from dsoftmax.recognition.networks import to_symbol
from dsoftmax.recognition.networks.flops import count_flops, format_flops


def test_by_hand():
    data = mx.sym.var("data")  # (3, 9, 7)
    x = mx.sym.Convolution(data, num_filter=8, kernel=(3, 3), stride=(2, 2), no_bias=True)
    expected = 8 * (4 * 3) * (27 + 26)
    x = mx.sym.BatchNorm(mx.sym.Activation(x, act_type="relu"))
    x = mx.sym.Convolution(x, num_filter=8, kernel=(3, 3), pad=(1, 1), num_group=8, no_bias=True)
    expected += 8 * (4 * 3) * (9 + 8)
    x = mx.sym.Convolution(x, num_filter=6, kernel=(1, 1), num_group=2)
    expected += 6 * (4 * 3) * (4 + 4)
    x = mx.sym.FullyConnected(x, num_hidden=5)
    expected += 5 * (72 + 72)
    x = mx.sym.FullyConnected(x, num_hidden=2, no_bias=True)
    expected += 2 * (5 + 4)
    assert count_flops(x, (3, 9, 7)) == expected


@pytest.mark.parametrize(
    ("name", "multiply_adds"),
    [("y1", 0.221e9), ("r50", 6.3e9), ("r100", 12.1e9)],  # as published, at 112x112
)
def test_published_networks(name, multiply_adds):
    found = count_flops(to_symbol(networks.create(name)), (3, 112, 112))
    assert found == pytest.approx(2 * multiply_adds, rel=0.01)


@pytest.mark.parametrize(
    ("count", "text"),
    [(24_169_929_728, "24.2G"), (438_725_248, "438.7M"), (59_596, "59.6K"), (960, "960.0")],
)
def test_as_insightface_writes_it(count, text):
    assert format_flops(count) == text
