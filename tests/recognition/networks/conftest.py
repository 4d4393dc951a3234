"""Small networks and images."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest

from dsoftmax.recognition import networks


@pytest.fixture
def images(rng):
    """Return a function that draws (n, 3, height, width) uint8 images."""

    def draw(count: int = 4, height: int = 32, width: int | None = None) -> np.ndarray:
        return rng.integers(0, 256, (count, 3, height, width or height), np.uint8)

    return draw


@pytest.fixture
def initialized(rng):
    """Return a function that makes a network whose moving averages are not the initial ones."""

    def make(name: str, **options):
        network = networks.create(name, **options)
        network.initialize(networks.initializer(name))
        size = options.get("image_size", (32, 32))
        network(mx.nd.zeros((1, 3, *size)))
        for key, parameter in network.collect_params().items():
            if key.endswith(("mean", "var", "beta", "bias")):
                parameter.set_data(mx.nd.array(rng.uniform(0.5, 1, parameter.shape)))
        return network

    return make
