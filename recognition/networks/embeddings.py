"""The last layers of a network, which embed its features: insightface's ``net_output``."""

from __future__ import annotations

from mxnet.gluon import nn
from mxnet.gluon.block import HybridBlock

from dsoftmax.recognition.networks.layers import Norm, activation, convolution, sequence

GDC_KERNEL = 7  # of the feature map of an image of 112x112
MOST_POOLED_CHANNELS = 512  # insightface's GNAP widens to any more


def make_embedding_layers(
    kind: str,
    embedding_size: int,
    features: tuple[int, ...],
    norm: Norm,
    act: str,
    dropout: float,
    groups: int,
    gdc_weight: str,
) -> HybridBlock:
    """Make the layers that map features to embeddings.

    Parameters
    ----------
    kind : str
        E: BN, dropout, dense layer, BN; F: E without the last BN; G: F without dropout; H: only
        the dense layer; I and FC: E without dropout; J: dense layer, BN; GAP: the mean over the
        feature map, then J; GNAP: as GAP, with the same weight for each place; GDC: a convolution
        per group of channels over 7x7 places, or over all if there are fewer, then J; SFC: BN, two
        convolutions that halve the feature map and mix its channels, then J.
    embedding_size : int
        D.
    features : (C, h, w) or (C,)
        Shape of the features of one image.
    norm : callable
        Makes a `BatchNorm`, given its name.
    act : str
        Kind of activation in GAP, GNAP and SFC.
    dropout : float
        Rate of dropout in E and F.
    groups : int
        Groups of channels in GDC and SFC, each of which yields one channel.
    gdc_weight : str
        Name of the weight of the dense layer in GDC.

    Returns
    -------
    HybridBlock
        Maps (B, C, h, w) to (B, D).
    """

    def dense(name: str) -> HybridBlock:
        return nn.Dense(embedding_size, prefix=f"{name}_")

    def last_norm() -> HybridBlock:
        return norm("fc1", fix_gamma=True)

    def drop() -> HybridBlock:
        return nn.Dropout(dropout, prefix="dropout0_")

    def without_dropout() -> list[HybridBlock]:
        return [norm("bn1"), dense("pre_fc1"), last_norm()]

    def pooled() -> list[HybridBlock]:
        means = nn.GlobalAvgPool2D(prefix="pool1_")
        return [norm("bn1"), activation(act, "relu1"), means, dense("pre_fc1"), last_norm()]

    def evenly_pooled() -> list[HybridBlock]:
        channels, widen, narrow = features[0], [], [nn.Flatten(prefix="flatten0_")]
        if embedding_size > min(channels, MOST_POOLED_CHANNELS):
            convx = convolution("convx", embedding_size, 1)
            widen = [convx, norm("convx_bn"), activation(act, "convx_relu")]
        elif embedding_size < channels:
            narrow = [norm("bn6w", fix_gamma=True), dense("pre_fc1")]
        return [*widen, norm("bn6f", fix_gamma=True), _EvenPool(), *narrow, last_norm()]

    def convolved() -> list[HybridBlock]:
        kernel = tuple(min(places, GDC_KERNEL) for places in features[1:])
        return [
            convolution("conv_6dw7_7_conv2d", groups, kernel, padding=0, groups=groups),
            norm("conv_6dw7_7_batchnorm", epsilon=1e-3),
            _NamedDense(embedding_size, gdc_weight),
            last_norm(),
        ]

    def halved() -> list[HybridBlock]:
        return [
            norm("bn1"),
            convolution("convf", groups, 3, 2, groups=groups),
            norm("bnf"),
            activation(act, "reluf"),
            convolution("convf2", groups, 1, bias=True),
            norm("bnf2"),
            activation(act, "reluf2"),
            dense("pre_fc1"),
            last_norm(),
        ]

    kinds = {
        "E": lambda: [norm("bn1"), drop(), dense("pre_fc1"), last_norm()],
        "F": lambda: [norm("bn1"), drop(), dense("fc1")],
        "G": lambda: [norm("bn1"), dense("fc1")],
        "H": lambda: [dense("fc1")],
        "I": without_dropout,
        "J": lambda: [dense("pre_fc1"), last_norm()],
        "FC": without_dropout,
        "GAP": pooled,
        "GNAP": evenly_pooled,
        "GDC": convolved,
        "SFC": halved,
    }
    if kind == "Z":
        raise ValueError("output 'Z' yields a feature map, not an embedding: choose another")
    if kind not in kinds:
        raise ValueError(f"output must be one of {', '.join(kinds)}, not {kind!r}")
    if kind in ("GAP", "GNAP", "GDC", "SFC") and len(features) != 3:
        raise ValueError(f"output {kind!r} pools a feature map, but these features are pooled")
    return sequence(*kinds[kind]())


class _EvenPool(HybridBlock):
    """Averages a feature map after scaling each place to the mean length of all places."""

    def __init__(self):
        super().__init__(prefix="even_pool_")

    def hybrid_forward(self, F, data):
        """Map (B, C, h, w) to (B, C, 1, 1)."""
        lengths = F.sqrt(F.sum(F.square(data), axis=1, keepdims=True))
        # Of the whole batch, as in insightface, so that its networks give what they gave there.
        weights = F.broadcast_div(F.mean(lengths), lengths)
        return F.mean(F.broadcast_mul(data, weights), axis=(2, 3), keepdims=True)


class _NamedDense(HybridBlock):
    """A dense layer ``pre_fc1`` whose weight may have another name."""

    def __init__(self, units: int, weight: str):
        super().__init__(prefix="")
        self._units = units
        self.weight = self.params.get(weight, shape=(units, 0), allow_deferred_init=True)
        self.bias = self.params.get("pre_fc1_bias", shape=(units,), init="zeros")

    def hybrid_forward(self, F, data, weight, bias):
        """Map (B, C, h, w) to (B, units)."""
        return F.FullyConnected(data, weight, bias, num_hidden=self._units, name="pre_fc1")
