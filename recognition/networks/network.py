"""A network: layers that compute features of pixels, and layers that embed these."""

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
    """A network can't take images of this size."""


class Network(HybridBlock):
    """Maps pixels of 0 to 255, RGB, to embeddings.

    Attributes
    ----------
    name : str
        The name that `create` takes.
    embedding_size : int
        D.
    options : dict
        The options with which `create` makes the same network again.
    features : HybridBlock
        Maps pixels (B, 3, H, W) to features (B, C, h, w) or (B, C).
    embedding_layers : HybridBlock
        Maps features to embeddings (B, D).
    """

    def __init__(
        self,
        name: str,
        embedding_size: int,
        options: dict[str, Any],
        features: HybridBlock,
        embedding_layers: HybridBlock,
    ):
        super().__init__(prefix="")
        self._name = name  # what the property `name` of all blocks returns
        self._dtype = "float32"
        self.embedding_size = embedding_size
        self.options = options
        self.features = features
        self.embedding_layers = embedding_layers

    def cast(self, dtype):
        """Change the type of the computation; embeddings stay float32."""
        super().cast(dtype)
        self._dtype = np.dtype(dtype).name

    def hybridize_for(self, device_type: str) -> None:
        """Compile a network that has run once, for a type of device: "cpu" or "gpu"."""
        self.apply(lambda block: _choose_operators(block, device_type))
        # Memory is planned once per shape: fresh memory is slow on CPUs.
        self.hybridize(static_alloc=True, static_shape=True)

    def hybrid_forward(self, F, data):
        """Map (B, 3, H, W) images, uint8 or of any float type, to (B, D) float32."""
        pixels = F.cast(data, dtype=self._dtype)
        return F.cast(self.embedding_layers(self.features(pixels)), dtype="float32")


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
        If the images are too small; the message proposes a size that works.
    """
    symbol = features(mx.sym.var("data"))
    if not isinstance(symbol, mx.sym.Symbol):
        raise ValueError(f"{name} has several outputs, but exactly one array of features is needed")
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
    """Return the shape of the features of one image; None if the images are too small.

    MXNet refuses windows larger than the padded input. It accepts a padded convolution that yields
    a single place, although most of its weights see nothing but padding, and then training crashes
    in oneDNN on some CPUs.
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
