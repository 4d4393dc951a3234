"""Run whole training steps of a network, and of the same network in ``mx.mod.Module``."""

from __future__ import annotations

import statistics
import time
from typing import Callable

import mxnet as mx
import numpy as np
from mxnet import autograd, nd

from dsoftmax import losses
from dsoftmax.recognition import networks
from dsoftmax.recognition.backbone import Backbone
from dsoftmax.recognition.common.devices import usable_contexts

SCALE = 64.0
CLASSES = "fc7_weight"  # insightface's name of the class weights
SGD = {"learning_rate": 0.01, "momentum": 0.9, "wd": 5e-4}


class OurStep:
    """A training step as `train.py` runs it.

    Parameters
    ----------
    network : Network
    images : (B, 3, height, width) uint8
    labels : (B,) int32
    classes : int
        K.
    """

    def __init__(
        self, network: networks.Network, images: np.ndarray, labels: np.ndarray, classes: int
    ):
        context = usable_contexts()[:1]
        network.initialize(networks.initializer(network.name), ctx=context)
        network(nd.array(images[:1], ctx=context[0], dtype="uint8"))
        network.hybridize_for(context[0].device_type)
        self._network, self._images, self._labels = network, images, labels
        self._backbone = Backbone(network, context, SGD)
        self._head = losses.create(
            "nsoftmax", classes, network.embedding_size, ctx=context, scale=SCALE
        )
        self._head.initialize()
        self._trainer = self._head.trainer("sgd", SGD)

    def __call__(self) -> None:
        """Run the step to its end."""
        embeddings = self._backbone.forward(self._images)
        with autograd.record():
            loss = self._head(embeddings, self._labels)
        loss.backward()
        self._backbone.backward(embeddings.grad)
        self._backbone.update(SGD["learning_rate"], len(self._labels))
        self._trainer.step(len(self._labels))
        nd.waitall()

    def weights(self) -> dict[str, np.ndarray]:
        """Return copies of the network's parameters, and of the class weights as `CLASSES`."""
        parameters = self._network.collect_params()
        arrays = {name: parameter.data().asnumpy() for name, parameter in parameters.items()}
        return {**arrays, CLASSES: self._head.class_weights()}


class ModuleStep:
    """A step of the same network and loss as insightface's scripts run it.

    Parameters
    ----------
    network, images, labels, classes
        See `OurStep`.
    """

    def __init__(
        self, network: networks.Network, images: np.ndarray, labels: np.ndarray, classes: int
    ):
        context = usable_contexts()[0]
        embedding = networks.to_symbol(network)
        weight = mx.sym.var(CLASSES, shape=(classes, network.embedding_size))
        logits = mx.sym.FullyConnected(
            SCALE * mx.sym.L2Normalization(embedding, mode="instance"),
            mx.sym.L2Normalization(weight, mode="instance"),
            num_hidden=classes,
            no_bias=True,
            name="fc7",
        )
        output = mx.sym.SoftmaxOutput(logits, mx.sym.var("softmax_label"), normalization="valid")
        self._module = mx.mod.Module(output, context=context, logger=_Silent())
        self._module.bind([("data", images.shape)], [("softmax_label", labels.shape)])
        self._module.init_params(networks.initializer(network.name))
        self._module.init_optimizer(
            kvstore=None, optimizer="sgd", optimizer_params=tuple(SGD.items())
        )
        self._batch = mx.io.DataBatch([nd.array(images)], [nd.array(labels)])

    def __call__(self) -> None:
        """Run the step to its end."""
        self._module.forward(self._batch, is_train=True)
        self._module.backward()
        self._module.update()
        nd.waitall()

    def weights(self) -> dict[str, np.ndarray]:
        """Return copies of the network's parameters, and of the class weights as `CLASSES`."""
        return {name: array.asnumpy() for name, array in self._module.get_params()[0].items()}


class _Silent:
    """Replaces the logger: Module warns about inputs that it mistakes for labels."""

    def __getattr__(self, _: str) -> Callable[..., None]:
        return lambda *_: None


def measure(steps: dict[str, Callable[[], None]], warm_ups: int, count: int) -> dict[str, float]:
    """Run steps in turns; return the median seconds of each, without the warm-ups."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(warm_ups + count):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if turn >= warm_ups:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in times.items()}
