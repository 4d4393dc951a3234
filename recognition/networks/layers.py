"""Layers whose parameters bear the names that insightface's symbols give them.

A layer gets its whole name, as ``stage1_unit1_bn1``: there are no scopes, so that the parameters of
a network are named alike whichever other networks a process made before.
"""

from __future__ import annotations

import itertools
from typing import Callable

import mxnet as mx
import numpy as np
from mxnet.gluon import nn
from mxnet.gluon.block import HybridBlock

ACTIVATIONS = ("prelu", "relu", "sigmoid", "softrelu", "softsign", "tanh")  # as insightface's
_sync_keys = itertools.count()


class ScalePixels(HybridBlock):
    """Map pixels of 0 to 255 to about -1 to 1, as insightface does."""

    def __init__(self):
        super().__init__(prefix="scale_pixels_")

    def hybrid_forward(self, F, data):
        """Scale `data` of any shape."""
        return (data - 127.5) * 0.0078125


class BatchNorm(HybridBlock):
    """Batch normalization over the second axis.

    Parameters
    ----------
    name : str
        Its parameters are ``<name>_gamma``, ``_beta``, ``_<averages>_mean`` and
        ``_<averages>_var``.
    momentum : float
        Share of the old value in a new moving average.
    epsilon : float
        insightface's for its ResNets; MXNet's own default is 1e-3.
    fix_gamma : bool
        Keep gamma at 1.
    averages : str
        What the names of the moving averages begin with: ``running`` in Gluon's own layers.
    sync_devices : int
        Number of devices whose batches are normalized together. In training all of them must run
        the layer, each waiting for the others. CPU contexts have one thread each and share few
        work spaces; they hang unless MXNET_CPU_WORKER_NTHREADS is 2 and MXNET_CPU_TEMP_COPY is at
        least 64 when MXNet is imported.
    """

    def __init__(
        self,
        name: str,
        momentum: float = 0.9,
        epsilon: float = 2e-5,
        fix_gamma: bool = False,
        averages: str = "moving",
        sync_devices: int = 1,
    ):
        super().__init__(prefix=f"{name}_")
        self._options = {"momentum": momentum, "eps": epsilon, "fix_gamma": fix_gamma}
        self._sync_options = {}
        if sync_devices > 1:
            # Devices meet under this key, so that layers of different networks need different ones.
            self._sync_options = {"ndev": sync_devices, "key": f"{name}_{next(_sync_keys)}"}
        self.gamma = self._add("gamma", "ones", is_learnt=not fix_gamma)
        self.beta = self._add("beta", "zeros")
        self.moving_mean = self._add(f"{averages}_mean", "zeros", is_learnt=False)
        self.moving_var = self._add(f"{averages}_var", "ones", is_learnt=False)

    def _add(self, name: str, init: str, is_learnt: bool = True) -> mx.gluon.Parameter:
        return self.params.get(
            name,
            shape=(0,),
            init=init,
            allow_deferred_init=True,
            grad_req="write" if is_learnt else "null",
        )

    def cast(self, dtype):
        """Change the type; statistics stay in float32 where the data are float16."""
        super().cast("float32" if np.dtype(dtype).name == "float16" else dtype)

    def hybrid_forward(self, F, data, gamma, beta, moving_mean, moving_var):
        """Normalize `data`, (B, C) or (B, C, H, W)."""
        operator = F.contrib.SyncBatchNorm if self._sync_options else F.BatchNorm
        return operator(
            data,
            gamma,
            beta,
            moving_mean,
            moving_var,
            name="fwd",
            **self._options,
            **self._sync_options,
        )


Norm = Callable[..., BatchNorm]
"""Makes a `BatchNorm`, given its name and the options that vary within a network."""
GLUON_NORM = {"epsilon": 1e-5, "averages": "running"}
"""The options of Gluon's own batch normalization, of which some of insightface's networks are."""


class PReLU(HybridBlock):
    """A rectifier with learnt slopes: one for each channel, ``<name>_gamma``, or one for all.

    Parameters
    ----------
    name : str
    shared_by : int
        The number of channels that share one slope, ``<name>_alpha``, as Gluon's own layer has it;
        0 gives each channel its slope.

    Attributes
    ----------
    is_composed : bool
        Use other operators that compute the same values. On CPUs, the backward pass of MXNet's
        operator takes six times as long, most of the time of a whole network. The layer must have
        run before.
    """

    def __init__(self, name: str, shared_by: int = 0):
        super().__init__(prefix=f"{name}_")
        self.is_composed = False
        self._shared_by = shared_by
        self.gamma = self.params.get(
            "alpha" if shared_by else "gamma",
            # LeakyReLU infers this shape only where not even its rank is given.
            shape=(1,) if shared_by else None,
            init=mx.init.Constant(0.25),
            allow_deferred_init=True,
        )

    def hybrid_forward(self, F, data, gamma):
        """Rectify `data`, (B, C, H, W)."""
        if not self.is_composed:
            return F.LeakyReLU(data, gamma, act_type="prelu", name="fwd")
        channels = self._shared_by or self.gamma.shape[0]
        options = {
            "kernel": (1, 1),
            "num_filter": channels,
            "num_group": channels,
            "no_bias": True,
        }
        # γ x + (1 - γ) max(x, 0). Multiplying each channel by a number is a convolution of single
        # channels. All of these operators are oneDNN's, so that data stay in its layout: `F.relu`
        # and subtraction are not.
        slopes = F.reshape(gamma, (-1, 1, 1, 1))
        if self._shared_by:
            slopes = F.broadcast_axis(slopes, axis=0, size=channels)
        positive = F.Activation(data, act_type="relu")
        scaled = F.Convolution(data, slopes, **options)
        return scaled + F.Convolution(positive, 1 - slopes, **options)


def activation(kind: str, name: str, shared_by: int = 0) -> HybridBlock:
    """Make an activation of a kind in `ACTIVATIONS`; see `PReLU` for what channels may share."""
    if kind not in ACTIVATIONS:
        raise ValueError(f"act must be one of {', '.join(ACTIVATIONS)}, not {kind!r}")
    return PReLU(name, shared_by) if kind == "prelu" else nn.Activation(kind, prefix=f"{name}_")


def convolution(
    name: str,
    channels: int,
    kernel: int | tuple[int, int],
    stride: int = 1,
    padding: int | None = None,
    groups: int = 1,
    bias: bool = False,
) -> nn.Conv2D:
    """Make a convolution, by default padded so that stride 1 keeps the size of an odd kernel."""
    return nn.Conv2D(
        channels,
        kernel,
        stride,
        kernel // 2 if padding is None else padding,
        groups=groups,
        use_bias=bias,
        prefix=f"{name}_",
    )


def multiplied(channels: int, multiplier: float) -> int:
    """Multiply a number of channels and round it down, as insightface does."""
    product = int(channels * multiplier)
    if product < 1:
        raise ValueError(f"multiplier {multiplier} leaves less than one of {channels} channels")
    return product


def sequence(*layers: HybridBlock) -> nn.HybridSequential:
    """Chain layers."""
    chain = nn.HybridSequential(prefix="")
    chain.add(*layers)
    return chain
