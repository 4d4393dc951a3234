"""Save and load networks as insightface does: ``prefix-symbol.json``, ``prefix-0001.params``."""

from __future__ import annotations

import os
import re
from typing import NamedTuple, Sequence
from weakref import WeakKeyDictionary

import mxnet as mx

from dsoftmax.recognition.common.arrays import Blocks, load_arrays, save_arrays
from dsoftmax.recognition.common.files import AtomicFile, explain_full_disk
from dsoftmax.recognition.networks import densenet, mnasnet
from dsoftmax.recognition.networks.network import Network
from dsoftmax.recognition.networks.symbols import EMBEDDING, to_symbol

CLASSIFIER = "fc7"
# Two names of the weight of the last dense layer, the older one first.
RENAMED = {"fc1_weight": "pre_fc1_weight", "pre_fc1_weight": "fc1_weight"}
# Gluon counts the networks that a process makes: mnasnet1_… are the parameters of the second one.
_COUNTED = re.compile(f"^({densenet.PREFIX[:-1]}|{mnasnet.PREFIX[:-1]})[0-9]+_")


class Classifier(NamedTuple):
    """Class weights to save with a network, as insightface's graphs have them: ``fc7``.

    Attributes
    ----------
    weights : Blocks
        (K, D).
    scale : float
        Of the cosines.
    normalize : bool
        Cosines, or plain inner products.
    """

    weights: Blocks
    scale: float
    normalize: bool

    def apply(self, embedding: mx.sym.Symbol) -> mx.sym.Symbol:
        """Return a graph with two outputs, the embedding and the logits without a margin."""
        weight = mx.sym.var(f"{CLASSIFIER}_weight", shape=self.weights.shape)
        inputs = embedding
        if self.normalize:
            weight = mx.sym.L2Normalization(weight, mode="instance", name=f"{CLASSIFIER}n")
            inputs = mx.sym.L2Normalization(embedding, mode="instance", name=f"{EMBEDDING}n")
            inputs = inputs * self.scale
        logits = mx.sym.FullyConnected(
            inputs, weight, no_bias=True, num_hidden=self.weights.shape[0], name=CLASSIFIER
        )
        return mx.sym.Group([embedding, logits])


class _Graph(NamedTuple):
    """What is saved of a network's symbol, and what its file needs to know.

    Attributes
    ----------
    json : str
    auxiliary : frozenset of str
        The names of its moving averages.
    classifier : tuple or None
        The shape, the scale and the kind of its classifier.
    """

    json: str
    auxiliary: frozenset[str]
    classifier: tuple | None


_GRAPHS: WeakKeyDictionary[Network, _Graph] = WeakKeyDictionary()  # the last ones saved


class Loaded(NamedTuple):
    """Names of the parameters that `load_parameters` did and did not load.

    Attributes
    ----------
    loaded : list of str
    missing : list of str
        Parameters that kept their values, because the file has no such array or one of another
        shape; then both shapes follow the name.
    unexpected : list of str
        Arrays that the network has no parameters for.
    """

    loaded: list[str]
    missing: list[str]
    unexpected: list[str]


def save_model(
    network: Network,
    prefix: str,
    epoch: int,
    parameters: dict[str, mx.nd.NDArray] | None = None,
    classifier: Classifier | None = None,
) -> str:
    """Save the graph and the float32 parameters of a network that ran at least once.

    Moving averages, which can differ between devices, are averaged over the devices.

    Parameters
    ----------
    network : Network
    prefix : str
        Folder and beginning of the names of both files.
    epoch : int
        Part of the name of the parameter file.
    parameters : dict of str to NDArray, optional
        Parameters to save instead of the network's; copies on other devices are named ``name@1``,
        ….
    classifier : Classifier, optional
        Class weights to save, too.

    Returns
    -------
    str
        The path of the parameter file.
    """
    graph = _graph_of(network, classifier)
    arrays = {}
    for name, copies in _copies_of(network, parameters).items():
        copies = [copy.as_in_context(mx.cpu()).astype("float32") for copy in copies]
        if name in graph.auxiliary:
            arrays[f"aux:{name}"] = mx.nd.add_n(*copies) / len(copies)
        else:
            arrays[f"arg:{name}"] = copies[0]
    if classifier:
        arrays[f"arg:{CLASSIFIER}_weight"] = classifier.weights
    return save_checkpoint(prefix, epoch, graph.json, arrays)


def _graph_of(network: Network, classifier: Classifier | None) -> _Graph:
    """Return the graph to save, made once as long as it is the same.

    MXNet keeps memory of every graph that it reads or writes as JSON, for good: more than the text
    itself.
    """
    described = classifier and (classifier.weights.shape, *classifier[1:])
    graph = _GRAPHS.get(network)
    if graph is None or graph.classifier != described:
        symbol = to_symbol(network)
        auxiliary = frozenset(symbol.list_auxiliary_states())
        if classifier:
            symbol = classifier.apply(symbol)
        graph = _GRAPHS[network] = _Graph(symbol.tojson(), auxiliary, described)
    return graph


def save_checkpoint(prefix: str, epoch: int, graph: str, arrays: dict[str, mx.nd.NDArray]) -> str:
    """Save a graph and its parameters; return the path of the parameter file.

    Parameters
    ----------
    prefix, epoch
        See `save_model`.
    graph : str
        A symbol as JSON.
    arrays : dict of str to NDArray
        Names begin with ``arg:`` or ``aux:``.
    """
    path = f"{prefix}-symbol.json"
    with explain_full_disk(path, len(graph)), AtomicFile(path, "w") as file:
        file.write(graph)
    path = f"{prefix}-{epoch:04d}.params"
    save_arrays(path, arrays)
    return path


def _copies_of(
    network: Network, parameters: dict[str, mx.nd.NDArray] | None
) -> dict[str, list[mx.nd.NDArray]]:
    if parameters is None:
        return {name: parameter.list_data() for name, parameter in network.collect_params().items()}
    copies: dict[str, list[mx.nd.NDArray]] = {}
    for name, array in parameters.items():
        copies.setdefault(name.partition("@")[0], []).append(array)
    return copies


def load_parameters(
    network: Network,
    source: str | os.PathLike | dict[str, mx.nd.NDArray],
    ctx: mx.Context | Sequence[mx.Context] | None = None,
) -> Loaded:
    """Load parameters by name; ignore those of a classifier (``fc7``).

    Parameters
    ----------
    network : Network
    source : path or dict of NDArray
        Names may begin with ``arg:`` and ``aux:``.
    ctx : mx.Context or sequence of them, optional
        Where to load a network that is not initialized yet.

    Returns
    -------
    Loaded
    """
    arrays = source if isinstance(source, dict) else load_arrays(source)
    arrays = {_COUNTED.sub(r"\g<1>0_", key.split(":", 1)[-1]): one for key, one in arrays.items()}
    arrays = {key: array for key, array in arrays.items() if not key.startswith(CLASSIFIER)}
    result = Loaded([], [], [])
    for name, parameter in network.collect_params().items():
        saved_name = name if name in arrays else RENAMED.get(name)
        array = arrays.pop(saved_name, None)
        if array is None:
            result.missing.append(name)
        elif not _fits(array.shape, parameter.shape):
            result.missing.append(f"{name} {parameter.shape}, in the file {array.shape}")
        else:
            parameter.shape = array.shape  # which may not be known before a first run
            parameter._load_init(array, ctx, cast_dtype=True)
            result.loaded.append(name)
    result.unexpected.extend(arrays)
    return result


def _fits(shape: tuple[int, ...], expected: tuple[int, ...] | None) -> bool:
    """Say whether a shape is as expected, where 0 stands for any length, None for any shape."""
    return expected is None or (
        len(shape) == len(expected)
        and all(length in (0, actual) for length, actual in zip(expected, shape))
    )
