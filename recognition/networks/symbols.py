"""Turn networks into symbols whose nodes bear the names that insightface gives them."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import mxnet as mx

from dsoftmax.recognition.networks.factory import create
from dsoftmax.recognition.networks.network import Network

INPUT, EMBEDDING = "data", "fc1"
_LAYER = "_fwd"  # what Gluon appends to the name of a layer, to name its operator
# How MXNet's symbols name operators without a name; others by their own names in lower case.
_HINTS = {"elemwise_add": "_plus", "_minus_scalar": "_minusscalar", "_mul_scalar": "_mulscalar"}


def to_symbol(network: Network) -> mx.sym.Symbol:
    """Return a network's graph from the input ``data`` to the output ``fc1_output``, in float32.

    Its nodes are named as in insightface's symbols (``conv_1_relu``, ``stage1_unit1_conv1``,
    ``_mulscalar0``), because insightface's tools and many converters look for these names.
    """
    options = {key: value for key, value in network.options.items() if key != "sync_devices"}
    # A new network: the given one may compute in another type, or wait for other devices.
    twin = create(network.name, network.embedding_size, **options)
    with mx.name.NameManager():  # so that the same network has the same file
        embeddings = twin.embedding_layers(twin.features(mx.sym.var(INPUT)))
    graph = json.loads(embeddings.tojson())
    counts: Counter[str] = Counter()
    for node in graph["nodes"]:
        if node["op"] != "null":
            node["name"] = _name_of(node, counts)
    return mx.sym.load_json(json.dumps(graph))


def _name_of(node: dict[str, Any], counts: Counter[str]) -> str:
    """Return a node's name without what Gluon added; `counts` counts the nodes that had none."""
    name, hint = node["name"], _HINTS.get(node["op"], node["op"].lower())
    if name.endswith(_LAYER):
        return name[: -len(_LAYER)]
    if not re.fullmatch(rf".*{hint}\d+", name):
        return name  # chosen by the layer
    counts[hint] += 1
    return f"{hint}{counts[hint] - 1}"
