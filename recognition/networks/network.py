"""A network: features of pixels, and a head that makes embeddings of them."""

from __future__ import annotations

import ast
import json
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.gluon.block import HybridBlock

from dsoftmax.recognition.networks.layers import PReLU

LARGEST_PROPOSED = 512  # side of images


class ImageSizeError(ValueError):
    """A network can't take images of a size."""


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


def feature_shape(name: str, features: HybridBlock, image_size: tuple[int, int]) -> tuple[int, ...]:
    """Infer the shape of the features of one image, (C, h, w) or (C,).

    Parameters
    ----------
    name : str
        The network's, for errors.
    features : HybridBlock
    image_size : (height, width)

    Raises
    ------
    ImageSizeError
        With a size that can be taken.
    """
    symbol = features(mx.sym.var("data"))
    if not isinstance(symbol, mx.sym.Symbol):
        raise ValueError(f"{name} has several outputs, where one array of features is needed")
    shape = _infer_features(symbol, image_size)
    if shape is not None:
        return shape
    height, width = image_size
    raise ImageSizeError(
        f"{name} can't take images of {height},{width}; {_propose_size(symbol, min(image_size))}"
    )


def _propose_size(symbol: mx.sym.Symbol, side: int) -> str:
    for larger in range(side, LARGEST_PROPOSED + 1):
        if _infer_features(symbol, (larger, larger)) is not None:
            return f"the next size it takes is {larger},{larger}"
    for smaller in range(1, side):
        if _infer_features(symbol, (smaller, smaller)) is not None:
            return f"the smallest it takes is {smaller},{smaller}"
    return f"nor any up to {LARGEST_PROPOSED},{LARGEST_PROPOSED}"


def _infer_features(symbol: mx.sym.Symbol, image_size: tuple[int, int]) -> tuple[int, ...] | None:
    """Return the shape of the features of one image; None for images that can't be taken.

    MXNet refuses windows that are larger than what they slide over, padding included. A padded
    convolution that yields a single place passes there, though most of its weights see nothing but
    padding, and training ends in a crash of oneDNN on some CPUs.
    """
    internals = symbol.get_internals()
    try:
        # Unlike `infer_shape` this prints nothing before it raises.
        _, shapes, _ = internals.infer_shape_partial(data=(1, 3, *image_size))
    except mx.MXNetError:
        return None
    shape_of = dict(zip(internals.list_outputs(), shapes))
    for node in json.loads(symbol.tojson())["nodes"]:
        if node["op"] == "Convolution":
            padding = ast.literal_eval(node["attrs"].get("pad", "(0, 0)"))
            places = shape_of[f"{node['name']}_output"][2:]
            if any(pad and length == 1 for pad, length in zip(padding, places)):
                return None
    return shapes[-1][1:]
