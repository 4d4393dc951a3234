"""The network that makes embeddings, on one context or data-parallel on several."""

from __future__ import annotations

from typing import Iterable

import mxnet as mx
import numpy as np
from mxnet import autograd, nd
from mxnet.gluon import Trainer
from mxnet.gluon.utils import clip_global_norm

from dsoftmax.losses.kernels import from_numpy
from dsoftmax.recognition.common.distributed.group import ALONE, Group
from dsoftmax.recognition.common.distributed.heartbeat import beat
from dsoftmax.recognition.networks import Network


class Backbone:
    """Runs a network forward and, in a second call, backward; then updates it.

    Between the two calls the head computes the gradient of the embeddings.

    Parameters
    ----------
    network : Network
        Initialized on all contexts; it must have run once, so that all shapes are known.
    contexts : list of mx.Context
        Each gets a part of the batch. The embeddings are gathered on the first.
    optimizer_params : dict
        Parameters of SGD.
    kvstore : str
        How several contexts add up their gradients.
    clip : float
        The longest legal gradient of the mean loss; longer ones are scaled down. 0 is any.
    fp16_scale : float
        Above 0 the network is float16, and gradients are multiplied by this while they pass it.
    frozen : bool
        Whether to compute embeddings as in inference and to update nothing.
    accumulates : bool
        Whether the gradients of several batches add up until the update, instead of replacing each
        other. BatchNorm takes the statistics of each batch.
    group : Group
        The processes that train one network, each with a part of the batch and the same number of
        contexts.
    """

    def __init__(
        self,
        network: Network,
        contexts: list[mx.Context],
        optimizer_params: dict,
        kvstore: str = "device",
        clip: float = 0.0,
        fp16_scale: float = 0.0,
        frozen: bool = False,
        accumulates: bool = False,
        group: Group = ALONE,
    ):
        self.network, self.contexts, self._group = network, contexts, group
        self._clip, self._scale, self._frozen = clip, fp16_scale or 1.0, frozen
        self._accumulates = accumulates
        # The BLAS in MXNet's wheels hangs if two threads multiply at once, each on several cores.
        self._one_at_a_time = sum(context.device_type == "cpu" for context in contexts) > 1
        self._outputs: list[nd.NDArray] = []
        if accumulates:
            for parameter in network.collect_params().values():
                if parameter.grad_req != "null":
                    parameter.grad_req = "add"
        self._trainer = Trainer(
            network.collect_params(),
            "sgd",
            {**optimizer_params, "multi_precision": fp16_scale > 0},
            kvstore=kvstore if len(contexts) > 1 else None,
            update_on_kvstore=False,
        )
        self._begin_trainer()

    def forward(self, images: np.ndarray, key: tuple[int, ...] = (0,)) -> nd.NDArray:
        """Return the embeddings of a batch, (B, D) float32, with memory for their gradient.

        Each process gives its part of the batch and gets the embeddings of the whole batch.

        Parameters
        ----------
        images : (b, 3, height, width) uint8
        key : tuple of int
            Seeds random layers such as Dropout, together with the number of the device, counted
            over all processes.
        """
        mode = autograd.predict_mode() if self._frozen else autograd.record()
        with mode:
            self._outputs = self._run(images, key)
        part = self._gather(output.detach() for output in self._outputs)
        self._first_sample = self._group.rank * len(part)
        gathered = self._group.gather("embeddings", part)
        gathered.attach_grad()
        return gathered

    def _run(self, images: np.ndarray, key: tuple[int, ...] | None = None) -> list[nd.NDArray]:
        outputs = []
        parts = np.array_split(images, len(self.contexts))
        for number, (part, context) in enumerate(zip(parts, self.contexts)):
            if key is not None:
                device = self._group.rank * len(self.contexts) + number
                seed = np.random.SeedSequence((*key, device)).generate_state(1)[0]
                mx.random.seed(int(seed) & 0x7FFFFFFF, ctx=context)
            if len(part):
                outputs.append(self.network(from_numpy(part, context, part.dtype)))
                if self._one_at_a_time:
                    outputs[-1].wait_to_read()
        return outputs

    def _gather(self, outputs: Iterable[nd.NDArray]) -> nd.NDArray:
        parts = [part.astype(np.float32).as_in_context(self.contexts[0]) for part in outputs]
        return nd.concat(*parts, dim=0) if len(parts) > 1 else parts[0]

    def backward(self, gradient: nd.NDArray) -> None:
        """Compute the network's gradients from that of the last batch's embeddings, (B, D)."""
        if self._frozen:
            return
        start = self._first_sample
        parts = []
        for output in self._outputs:
            part = gradient[start : start + len(output)] * self._scale
            parts.append(part.as_in_context(output.context).astype(output.dtype))
            start += len(output)
        if not self._one_at_a_time:
            autograd.backward(self._outputs, parts)
            return
        for output, part in zip(self._outputs, parts):
            output.backward(part)
            nd.waitall()

    def update(self, learning_rate: float, batch_size: int) -> None:
        """Update the parameters by the gradients divided by the size of the whole batch.

        If gradients add up, that is the size of all batches together.
        """
        if self._frozen:
            return
        self._trainer.set_learning_rate(learning_rate)
        divisor = batch_size * self._scale
        if len(self.contexts) > 1:
            self._trainer.allreduce_grads()
        if self._group.size > 1:
            self._add_up_processes()
        if self._clip:
            for context in self.contexts:
                gradients = [
                    parameter.grad(context)
                    for parameter in self._trainer._params
                    if parameter.grad_req != "null"
                ]
                clip_global_norm(gradients, self._clip * divisor, check_isfinite=False)
        self._trainer.update(divisor)
        if self._accumulates:
            self.network.collect_params().zero_grad()

    def _add_up_processes(self) -> None:
        learnt = [p for p in self._trainer._params if p.grad_req != "null"]
        sums = self._group.sum_arrays("gradients", [p.list_grad()[0] for p in learnt])
        for parameter, total in zip(learnt, sums):
            for gradient in parameter.list_grad():
                total.copyto(gradient)

    def embed(self, images: np.ndarray) -> np.ndarray:
        """Return the embeddings of images by inference, numpy (B, D), as `eval` asks of a model."""
        embeddings = self._gather(self._run(images)).asnumpy()
        beat()
        return embeddings

    def parameters(self) -> dict[str, nd.NDArray]:
        """Return all parameters by name.

        Each context has moving averages of its own: those of the first are under the plain name,
        the others under name@1 and so on, counted over all processes.
        """
        parameters = {}
        for name, parameter in self.network.collect_params().items():
            if parameter.grad_req != "null":
                parameters[name] = parameter.data(self.contexts[0])
                continue
            copies = nd.stack(*(copy.as_in_context(mx.cpu()) for copy in parameter.list_data()))
            for number, copy in enumerate(self._group.gather("moving averages", copies)):
                parameters[f"{name}@{number}" if number else name] = copy
        return parameters

    def load_parameters(self, saved: dict[str, nd.NDArray]) -> None:
        """Set all parameters to what `parameters` returned, on any number of contexts."""
        parameters = self.network.collect_params()
        names = {name.partition("@")[0] for name in saved}
        differing = [
            name
            for name in sorted(names | set(parameters))
            if name not in saved
            or name not in parameters
            or saved[name].shape != parameters[name].shape
        ]
        if differing:
            name = differing[0]
            there, here = (
                found[name].shape if name in found else "missing" for found in (saved, parameters)
            )
            raise ValueError(
                "it belongs to another network, or to images of another size. Parameters that "
                f"differ: {len(differing)}, such as {name}, {there} there and {here} here"
            )
        first = self._group.rank * len(self.contexts)
        for name, parameter in parameters.items():
            copies = [saved[key] for key in saved if key.partition("@")[0] == name]
            if len(copies) == self._group.size * len(self.contexts):
                for copy, context in zip(copies[first:], self.contexts):
                    copy.copyto(parameter.data(context))
            else:
                parameter.set_data(nd.add_n(*copies) / len(copies))

    def _begin_trainer(self) -> None:
        """Have the trainer do now what it would do before its first update.

        It copies the first context's parameters to the others, moving averages included. Done
        later, that would overwrite the moving averages of the others' first batch.
        """
        if not self._trainer._kv_initialized:
            self._trainer._init_kvstore()
        if self._trainer._params_to_init:
            self._trainer._init_params()

    def momenta(self) -> dict[str, nd.NDArray]:
        """Return the optimizer's states by parameter; there are none before the first update."""
        names = [parameter.name for parameter in self._trainer._params]
        momenta = {}
        for number, state in self._trainer._updaters[0].states.items():
            for place, array in enumerate(_arrays_of(state)):
                momenta[f"{names[number]}:{place}"] = array
        return momenta

    def load_momenta(self, saved: dict[str, nd.NDArray]) -> None:
        """Set the optimizer's states to what `momenta` returned, on all contexts."""
        if not saved:
            return
        optimizer = self._trainer._optimizer
        for updater, context in zip(self._trainer._updaters, self.contexts):
            for number, parameter in enumerate(self._trainer._params):
                if parameter.grad_req == "null":
                    continue
                state = optimizer.create_state_multi_precision(number, parameter.data(context))
                for place, array in enumerate(_arrays_of(state)):
                    key = f"{parameter.name}:{place}"
                    if key not in saved or saved[key].shape != array.shape:
                        raise ValueError(f"it has no momentum of {parameter.name}")
                    saved[key].copyto(array)
                updater.states[number] = state
                updater.states_synced[number] = True


def _arrays_of(state) -> list[nd.NDArray]:
    """Flatten the state of an optimizer: nothing, an array, or tuples of arrays."""
    if state is None:
        return []
    if isinstance(state, nd.NDArray):
        return [state]
    return [array for part in state for array in _arrays_of(part)]
