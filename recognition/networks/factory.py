"""Networks by name."""

from __future__ import annotations

import functools
from typing import Any

import mxnet as mx
from mxnet.gluon.block import HybridBlock

from dsoftmax.recognition.common.checks import did_you_mean, whole_number
from dsoftmax.recognition.networks import (
    densenet,
    iresnet,
    mnasnet,
    mobilefacenet,
    mobilenet,
    tiny,
    vargfacenet,
    zoo,
)
from dsoftmax.recognition.networks.embeddings import make_embedding_layers
from dsoftmax.recognition.networks.layers import BatchNorm
from dsoftmax.recognition.networks.network import Network, feature_shape

_COMMON = {
    "act": "prelu",
    "dropout": 0.4,
    "bn_momentum": 0.9,
    "image_size": (112, 112),
    "sync_devices": 1,
}
_FAMILIES = {
    iresnet.IResNet: iresnet.NETWORKS,
    mobilefacenet.MobileFaceNet: mobilefacenet.NETWORKS,
    mobilenet.MobileNet: mobilenet.NETWORKS,
    mnasnet.MNasNet: mnasnet.NETWORKS,
    densenet.DenseNet: densenet.NETWORKS,
    vargfacenet.VarGFaceNet: vargfacenet.NETWORKS,
    tiny.Tiny: tiny.NETWORKS,
}
NETWORKS: dict[str, dict[str, Any]] = {
    name: {**_COMMON, **specific}
    for table in _FAMILIES.values()
    for name, specific in table.items()
}
"""The options of each network, and their defaults."""


def names() -> list[str]:
    """List all networks except gluoncv's, which are named ``gluoncv:<name there>``."""
    return list(NETWORKS)


def create(name: str, embedding_size: int | None = None, **options) -> Network:
    """Make a network by its name.

    Parameters
    ----------
    name : str
        One of `names`, or ``gluoncv:`` and the name of a classification network of gluoncv.
    embedding_size : int, optional
        D; by default the network's usual one.
    **options
        Those of `NETWORKS`, named as insightface's configuration names them without ``net_``:
        ``se``, ``act``, ``unit``, ``input``, ``output`` (the last layers), ``multiplier``,
        ``blocks`` (of y1 and y2; the residual networks have ``units_per_stage``),
        ``densenet_dropout``; and
        ``bn_momentum``, ``dropout``, ``image_size`` (height and width; refused if too small),
        ``sync_devices`` (the number of devices whose batches are normalized together).

    Returns
    -------
    Network

    Examples
    --------
    >>> network = create("r50", embedding_size=256, se=1)
    >>> network.initialize(initializer("r50"))
    >>> network(mx.nd.zeros((1, 3, 112, 112))).shape
    (1, 256)
    """
    defaults = options_of(name)
    unknown = sorted(set(options) - set(defaults))
    if unknown:
        raise TypeError(
            f"{name} has no option {', '.join(unknown)}; legal are {', '.join(sorted(defaults))}"
        )
    chosen = {**defaults, **options}
    default_size = chosen.pop("embedding_size")
    size = default_size if embedding_size is None else embedding_size
    whole_number("embedding_size", size, 1)
    return Network(name, size, options, *_make_parts(name, size, **chosen))


def initializer(name: str) -> mx.init.Initializer:
    """Return the initializer that insightface trains a network from.

    Whichever it is, slopes of PReLU begin at 0.25 and gammas at 1.
    """
    if name in iresnet.NETWORKS or name in mobilefacenet.NETWORKS:
        return mx.init.Xavier(rnd_type="gaussian", factor_type="out", magnitude=2)
    return mx.init.Xavier(rnd_type="uniform", factor_type="in", magnitude=2)


def options_of(name: str) -> dict[str, Any]:
    """Return the options of a network and their defaults."""
    if name.startswith(zoo.PREFIX):
        return {**_COMMON, **zoo.DEFAULTS}
    if name not in NETWORKS:
        legal = [*NETWORKS, f"{zoo.PREFIX}<name of a classification network of gluoncv>"]
        raise ValueError(f"there is no network {name!r}{did_you_mean(name, legal)}")
    return NETWORKS[name]


def _make_parts(
    name: str,
    embedding_size: int,
    output: str,
    dropout: float,
    bn_momentum: float,
    image_size: tuple[int, int],
    act: str,
    sync_devices: int,
    **specific,
) -> tuple[HybridBlock, HybridBlock]:
    norm = functools.partial(BatchNorm, momentum=bn_momentum, sync_devices=sync_devices)
    if name.startswith(zoo.PREFIX):
        if sync_devices > 1:
            raise ValueError(f"{name} can't synchronize devices: its layers are gluoncv's own")
        features = zoo.ZooFeatures(name[len(zoo.PREFIX) :])
    else:
        family = next(family for family, table in _FAMILIES.items() if name in table)
        features = family(norm, act, **specific)
    shape = feature_shape(name, features, image_size)
    embedding_layers = make_embedding_layers(
        output,
        embedding_size,
        shape,
        norm,
        act,
        dropout,
        groups=features.head_groups or shape[0],
        gdc_weight=features.gdc_weight,
    )
    return features, embedding_layers
