"""insightface's own graphs: the names of their parameters, and what they compute."""

import re
import zlib

import mxnet as mx
import numpy as np
import pytest

from dsoftmax.eval.models import ModelName, load_model
from dsoftmax.recognition import networks

pytestmark = pytest.mark.realdata
OURS = {"r18-SFC": ("r18", {"output": "SFC"})}
NAMES = ("d169", "d201", "m1", "m05", "mnas", "mnas05", "mnas025", "vargfacenet", "r18-SFC")
SHAPE = (2, 3, 112, 112)


def value_of(name, shape):
    """Return the fixed value of a parameter, by which the outputs were computed."""
    draw = np.random.RandomState(zlib.crc32(name.encode()))
    if name.endswith("gamma"):
        value = draw.uniform(0.5, 1, shape)
    elif name.endswith("var"):
        value = draw.uniform(1, 2, shape)
    elif name.endswith(("beta", "mean", "bias")):
        value = draw.normal(0, 0.1, shape)
    else:
        value = draw.normal(0, np.sqrt(1 / np.prod(shape[1:])), shape)
    return mx.nd.array(value.astype(np.float32))


@pytest.mark.parametrize("name", NAMES)
def test_graphs_of_insightface(name, real_data, tmp_path):
    symbol = mx.sym.load(str(real_data / "networks" / f"{name}-symbol.json"))
    arguments, _, auxiliary = symbol.infer_shape(data=SHAPE)
    parameters = dict(zip(symbol.list_arguments(), arguments))
    del parameters["data"]
    states = dict(zip(symbol.list_auxiliary_states(), auxiliary))
    arrays = {key: value_of(key, shape) for key, shape in {**parameters, **states}.items()}
    ours, options = OURS.get(name, (name, {}))
    network = networks.create(ours, **options)
    found = networks.load_parameters(network, arrays, mx.cpu())
    assert (found.missing, found.unexpected) == ([], [])

    own = networks.to_symbol(network)
    # Gluon counts the networks of a process; these graphs are of one process.
    as_first = [re.sub(r"^(mnasnet|densenet)\d_", r"\g<1>0_", key) for key in parameters]
    assert own.list_arguments() == ["data", *as_first]
    assert len(own.list_auxiliary_states()) == len(states)

    pixels = np.random.RandomState(0).randint(0, 256, SHAPE)
    expected = np.load(real_data / "networks" / "outputs.npz")[name]
    embeddings = network(mx.nd.array(pixels)).asnumpy()
    np.testing.assert_allclose(embeddings, expected, rtol=1e-4, atol=1e-5)

    prefix = str(tmp_path / "model")
    networks.save_model(network, prefix, 0)
    embed = load_model(ModelName(prefix, 0), [mx.cpu()])
    np.testing.assert_allclose(embed(pixels.astype(np.uint8)), expected, rtol=1e-3, atol=1e-4)
