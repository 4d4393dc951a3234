"""A network: features of pixels, and a head that makes embeddings of them."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
from mxnet.gluon.block import HybridBlock

from dsoftmax.recognition.networks.layers import PReLU


class Network(HybridBlock):
    """Maps pixels of 0 to 255, RGB, to embeddings.

    Attributes
    ----------
    name : str
        As `create` knows it.
    embedding_size : int
        D.
    options : dict
        With which `create` makes the same network again.
    """

    def __init__(
        self,
        name: str,
        embedding_size: int,
        options: dict[str, Any],
        features: HybridBlock,
        head: HybridBlock,
    ):
        super().__init__(prefix="")
        self._name = name  # what the property `name` of all blocks returns
        self._dtype = "float32"
        self.embedding_size = embedding_size
        self.options = options
        self.features = features
        self.head = head

    def cast(self, dtype):
        """Change the type that is computed in; embeddings stay float32."""
        super().cast(dtype)
        self._dtype = np.dtype(dtype).name

    def hybridize_for(self, device_type: str) -> None:
        """Compile a network that ran once, for a type of devices: "cpu" or "gpu"."""
        self.apply(lambda block: _choose_operators(block, device_type))
        # Memory is planned once for a shape: fresh memory is slow on CPUs.
        self.hybridize(static_alloc=True, static_shape=True)

    def hybrid_forward(self, F, data):
        """Map (B, 3, H, W) images, uint8 or of any float type, to (B, D) float32."""
        pixels = F.cast(data, dtype=self._dtype)
        return F.cast(self.head(self.features(pixels)), dtype="float32")


def _choose_operators(block: HybridBlock, device_type: str) -> None:
    if isinstance(block, PReLU):
        block.is_composed = device_type == "cpu"


def feature_shape(features: HybridBlock, image_size: tuple[int, int]) -> tuple[int, ...]:
    """Infer the shape of the features of one image, (C, h, w) or (C,)."""
    _, shapes, _ = features(mx.sym.var("data")).infer_shape(data=(1, 3, *image_size))
    return shapes[0][1:]
