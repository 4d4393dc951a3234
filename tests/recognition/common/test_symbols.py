"""Graphs from files: networks are loaded, anything else is refused before MXNet sees it."""

import json

import mxnet as mx
import pytest

from dsoftmax.recognition import networks
from dsoftmax.recognition.common.symbols import OPERATORS, load_symbol


@pytest.fixture
def write(tmp_path):
    def write(content):
        path = tmp_path / "model-symbol.json"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


def test_every_operator_is_one_of_mxnet():
    assert set(mx.operator.get_all_registered_operators()) >= OPERATORS


@pytest.mark.parametrize(
    "name", ["tiny", "r18", "y1", "gluoncv:resnet18_v1b", "gluoncv:mobilenet1.0"]
)
def test_networks(write, name):
    graph = networks.to_symbol(networks.create(name)).tojson()
    assert load_symbol(write(graph)).tojson() == graph


@pytest.mark.realdata
def test_published_networks(real_data):
    paths = [*real_data.glob("networks/*-symbol.json"), real_data / "y1" / "model-symbol.json"]
    assert len(paths) > 5
    for path in paths:
        assert load_symbol(str(path)).list_outputs()


@pytest.mark.parametrize(
    ("operator", "attributes"),
    [
        ("_Native", {"info": "0x4141414141414141"}),
        ("_NDArray", {"info": "0x4141414141414141"}),
        ("Custom", {"op_type": "anything"}),
        ("_foreach", {}),
        ("_CachedOp", {}),
        ("no such operator", {}),
    ],
)
def test_operators_that_no_network_needs(write, operator, attributes):
    graph = json.loads(mx.sym.identity(mx.sym.var("data"), name="fc1").tojson())
    graph["nodes"][1].update(op=operator, attrs=attributes)
    with pytest.raises(
        ValueError, match=f"refused: the node 'fc1' is of the operator '{operator}'"
    ):
        load_symbol(write(json.dumps(graph)))


def test_graphs_in_graphs(write):
    graph = json.loads(mx.sym.identity(mx.sym.var("data")).tojson())
    graph["nodes"][1]["subgraphs"] = [json.loads(json.dumps(graph))]
    with pytest.raises(ValueError, match="refused: a node holds a graph of its own"):
        load_symbol(write(json.dumps(graph)))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"nodes": 3}',
        b'{"nodes": [3]}',
        b'{"nodes": [{"op": "null"}]}',
        b'{"nodes": [{"op": [], "name": "a"}]}',
        b'{"nodes": [{"op": "null", "name": "a"}]}',
        b'{"nodes": [{"op": "identity", "name": "a", "inputs": [[7, 0, 0]]}], "heads": [[0, 0]]}',
        b"[" * 100000,
    ],
)
def test_files_that_are_no_graphs(write, content):
    with pytest.raises(ValueError, match=r"model-symbol\.json: not a symbol MXNet can read"):
        load_symbol(write(content))
