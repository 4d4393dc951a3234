"""Load trained networks as functions from images to embeddings.

A network is named as insightface's commands name it: ``prefix,epoch`` stands for
``prefix-symbol.json`` and ``prefix-<epoch>.params``, of any MXNet since 1.0; ``p,1|3`` for two
epochs of it, ``p,1|q,2`` for two networks, and a bare ``prefix`` for all saved epochs, the newest
first. A name that ends in ``.onnx`` is an ONNX file.
"""

from __future__ import annotations

import glob
import hashlib
import importlib
import itertools
import json
import os
import re
import sys
from collections import Counter
from types import ModuleType
from typing import TYPE_CHECKING, Any, Callable, Mapping, NamedTuple, Sequence

import numpy as np

from dsoftmax.recognition.common.arrays import load_arrays
from dsoftmax.recognition.common.devices import usable_contexts
from dsoftmax.recognition.common.onnx_files import check_external_data
from dsoftmax.recognition.common.preflight import mxnet
from dsoftmax.recognition.common.symbols import load_symbol

if TYPE_CHECKING:
    import mxnet as mx

EMBEDDING = "fc1_output"  # what insightface's networks call their embedding
INPUT = "data"
CONFIG = "config.json"  # what a run writes beside its models
USUAL_SIZES = (
    (112, 112),
    (112, 96),
    (128, 128),
    (96, 96),
    (64, 64),
    (32, 32),
    (160, 160),
    (224, 224),
)
SHOWN = 10  # of the networks that an error lists
CPU_BATCH = 8  # images at a time on a CPU: what a layer writes is then in the cache of the next
ONNX_ERRORS = 3  # ONNX Runtime's number for messages of errors and worse, without warnings

Embed = Callable[[np.ndarray], np.ndarray]
"""Maps (n, 3, height, width) uint8 images, RGB, to (n, D) float32 embeddings, any n."""


class ModelName(NamedTuple):
    """A network's files, by the name a user gave."""

    prefix: str  # or the whole path of an ONNX file
    epoch: int | None = None

    def __str__(self) -> str:
        return self.prefix if self.is_onnx else f"{self.prefix},{self.epoch}"

    @property
    def is_onnx(self) -> bool:
        """Whether this is an ONNX file."""
        return self.epoch is None

    def files(self) -> list[str]:
        """Return the paths of all its files."""
        if self.is_onnx:
            return [self.prefix]
        return [f"{self.prefix}-symbol.json", f"{self.prefix}-{self.epoch:04d}.params"]

    @property
    def label(self) -> str:
        """A short name for people: the folder's if the files are called ``model``, else theirs."""
        folder, stem = os.path.split(
            os.path.splitext(self.prefix)[0] if self.is_onnx else self.prefix
        )
        return os.path.basename(folder) or stem if stem == "model" else stem

    def config(self) -> dict[str, Any]:
        """Return the settings of the run that left the files; empty if they are not there."""
        path = os.path.join(os.path.dirname(self.prefix), CONFIG)
        try:
            with open(path, encoding="utf-8") as file:
                config = json.load(file)
        except (OSError, ValueError):
            return {}
        return config if isinstance(config, dict) else {}  # it may be another program's

    def trained_size(self) -> tuple[int, int] | None:
        """Return the image size (height, width) of the run that left the files; None if unknown."""
        config = self.config()
        try:
            height, width = config.get("resolved_image_size") or config["image_size"]
            return int(height), int(width)
        except (ValueError, KeyError, TypeError, OverflowError):
            return None

    def digest(self) -> str:
        """Return a checksum of the files' content, the same wherever they lie."""
        digest = hashlib.sha256()
        for path in self.files():
            with open(path, "rb") as file:
                for block in iter(lambda: file.read(1 << 20), b""):
                    digest.update(block)
        return digest.hexdigest()


def parse_models(text: str) -> list[ModelName]:
    """Parse ``prefix,epoch``, ``p,1|3``, ``p,1|q,2``, ``prefix`` or ``file.onnx``.

    Examples
    --------
    >>> parse_models("models/r50/model,1|3")
    [ModelName(prefix='models/r50/model', epoch=1), ModelName(prefix='models/r50/model', epoch=3)]
    """
    names: list[ModelName] = []
    for part in text.split("|"):
        prefix, comma, epoch = part.rpartition(",")
        if part.endswith(".onnx"):
            names.append(ModelName(part))
        elif comma and prefix and epoch.strip().isdecimal():
            names.append(ModelName(prefix, int(epoch)))
        elif not comma and part.isdecimal() and names and not names[-1].is_onnx:
            names.append(names[-1]._replace(epoch=int(part)))
        elif not comma and part and "|" not in text:
            names += [ModelName(part, epoch) for epoch in saved_epochs(part)]
        else:
            raise ValueError(
                f"--model {text!r}: a model is prefix,epoch or prefix,epoch|epoch, a bare prefix "
                "for all its epochs, or a file.onnx"
            )
    return names


def saved_epochs(prefix: str) -> list[int]:
    """List the saved epochs of a prefix, the newest first; raise an error if there is none."""
    epochs = []
    for path in glob.glob(f"{glob.escape(prefix)}-*.params"):
        match = re.fullmatch(r"-(\d{4,})\.params", path[len(prefix) :])
        if match:
            epochs.append(int(match.group(1)))
    if not epochs:
        raise ValueError(
            f"{prefix}-NNNN.params: there is no such file for any epoch, such as "
            f"{prefix}-0000.params"
        )
    return sorted(epochs, reverse=True)


def find_models(folder: str = "models") -> list[str]:
    """List the networks in a folder and the folders in it, each as a user would name it."""
    names = []
    for symbol in glob.glob(os.path.join(folder, "**", "*-symbol.json"), recursive=True):
        prefix = symbol[: -len("-symbol.json")]
        if glob.glob(f"{glob.escape(prefix)}-*.params"):
            names.append(f"{prefix},{saved_epochs(prefix)[0]}")
    names += glob.glob(os.path.join(folder, "**", "*.onnx"), recursive=True)
    return sorted(names)


def missing_model(
    message: str = "--model is missing: give prefix,epoch or a file.onnx",
) -> ValueError:
    """Return the error to raise where a user named no network: an example, and those there are."""
    found = find_models()
    example = found[0] if found else "models/r50-dsoftmax-emore/model,1"
    there = ""
    if found:
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        there = f"; in ./models there are {', '.join(found[:SHOWN])}{more}"
    return ValueError(f"{message}, as in --model {example}{there}")


def single_model(text: str | None, forms: str = "prefix,epoch or a file.onnx") -> ModelName:
    """Return the one network that --model names.

    Parameters
    ----------
    text : str or None
        What the user gave.
    forms : str
        What the command takes, for the error if there is nothing.
    """
    if not text:
        raise missing_model(f"--model is missing: give {forms}")
    (name, *others) = parse_models(text)
    if others:
        raise ValueError(f"--model {text}: one network at a time, as {name}")
    return name


def labels_of(names: Sequence[ModelName]) -> list[str]:
    """Return short names that tell networks apart: with the epoch, or the path, where they must.

    Examples
    --------
    >>> labels_of([ModelName("models/r50/model", 1), ModelName("models/y1/model", 1)])
    ['r50', 'y1']
    >>> labels_of([ModelName("models/r50/model", 1), ModelName("models/r50/model", 3)])
    ['r50,1', 'r50,3']
    """
    labels = [name.label for name in names]
    for longer in (lambda name: f"{name.label},{name.epoch}", str):
        counts = Counter(labels)
        labels = [
            label if counts[label] == 1 else longer(name) for label, name in zip(labels, names)
        ]
    return labels


def say_where(
    name: ModelName, contexts: Sequence[mx.Context], size: tuple[int, int] | None
) -> None:
    """Say on stderr which devices a network runs on, and the size of its images if it is known."""
    devices = ", ".join(map(str, contexts))
    images = f", images of {size[0]}x{size[1]}" if size else ""
    print(f"{name} runs on {devices}{images}", file=sys.stderr, flush=True)


class Model:
    """A network as a function from images to embeddings; see `Embed`.

    Attributes
    ----------
    name : ModelName
    image_size : (int, int) or None
        Height and width of the images it was trained on, if its files say so.
    """

    def __init__(self, name: ModelName):
        self.name, self.image_size = name, name.trained_size()

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Map (n, 3, height, width) uint8 images, RGB, to (n, D) float32 embeddings."""
        raise NotImplementedError

    def _refusal(self, images: np.ndarray, wanted: tuple[int, int] | None, why: str) -> ValueError:
        """Return the error to raise where the network can't take images of this size."""
        height, width = images.shape[2:]
        if wanted and wanted != (height, width):
            why = f"it seems to want {wanted[0]}x{wanted[1]}: --image-size {wanted[0]},{wanted[1]}"
        return ValueError(f"{self.name} can't be run on images of {height}x{width}: {why}")


def load_model(
    name: ModelName | str, contexts: Sequence[mx.Context] | None = None, rewrite: bool = True
) -> Model:
    """Load a network.

    Parameters
    ----------
    name : ModelName, or str
        ``prefix,epoch`` or ``file.onnx``.
    contexts : sequence of mx.Context, optional
        Batches are split over them. An ONNX file runs on the first. By default those of
        CUDA_VISIBLE_DEVICES, or the CPU.
    rewrite : bool
        Compute the same embeddings by operators that are faster, if the network is a symbol and
        all contexts are CPUs; see `dsoftmax.eval.graphs`.

    Examples
    --------
    >>> embed = load_model("models/y1/model,0")  # doctest: +SKIP
    >>> embed(np.zeros((5, 3, 112, 112), np.uint8)).shape  # doctest: +SKIP
    (5, 128)
    """
    if isinstance(name, str):
        (name, *others) = parse_models(name)
        if others:
            raise ValueError(f"{name.prefix}: one network at a time, as prefix,epoch or file.onnx")
    contexts = usable_contexts() if contexts is None else contexts
    if name.is_onnx:
        return _OnnxModel(name, contexts[0])
    return _SymbolModel(name, contexts, rewrite)


def load_network(name: ModelName) -> tuple[mx.sym.Symbol, dict[str, mx.nd.NDArray]]:
    """Load the graph of a network up to its embedding, and all parameters that its file holds.

    Raises
    ------
    ValueError
        If there is no embedding, no input ``data``, or not all of the graph's parameters.
    """
    symbol_path, params_path = name.files()
    _check_files(name)
    symbol = load_symbol(symbol_path)
    saved = {key.split(":", 1)[-1]: array for key, array in load_arrays(params_path).items()}
    output = _embedding_of(symbol, symbol_path)
    needed = set(output.list_inputs()) - {INPUT}
    if len(needed) == len(output.list_inputs()):
        raise ValueError(f"{symbol_path}: it has no input {INPUT!r}")
    missing = sorted(needed - set(saved))
    if missing:
        raise ValueError(
            f"{params_path}: {len(missing)} parameters of {os.path.basename(symbol_path)} are "
            f"not in it, {', '.join(missing[:3])} among them; is it another network's?"
        )
    return output, saved


def find_size(
    graph: mx.sym.Symbol, shapes: Mapping[str, tuple], first: tuple[int, int] | None = None
) -> tuple[int, int] | None:
    """Find a usual image size, (height, width), that a graph takes with parameters of these shapes.

    Parameters
    ----------
    graph : mx.sym.Symbol
    shapes : dict of str to tuple
    first : (height, width), optional
        The size to try first.
    """
    squares = ((side, side) for side in range(16, 257, 8))
    sizes = itertools.chain([first] if first else [], USUAL_SIZES, squares)
    return next((size for size in sizes if _fits(graph, shapes, size)), None)


class _SymbolModel(Model):
    """A symbol file with its parameters; pixels of 0 to 255, scaled inside the graph."""

    def __init__(self, name: ModelName, contexts: Sequence[mx.Context], rewrite: bool):
        mx = mxnet()
        from dsoftmax.eval import graphs  # late, because it imports MXNet

        super().__init__(name)
        self._contexts = list(contexts)
        is_cpu = all(context.device_type == "cpu" for context in self._contexts)
        self._at_once = CPU_BATCH * len(self._contexts) if is_cpu else None
        output, saved = load_network(name)
        needed = set(output.list_inputs()) - {INPUT}
        self._graph, self._shapes = output, {key: saved[key].shape for key in needed}
        if rewrite and is_cpu:
            output, saved = graphs.for_cpus(output, saved)
        self._block = mx.gluon.SymbolBlock(output, mx.sym.var(INPUT, dtype="float32"))
        parameters = self._block.collect_params()
        for key in set(output.list_inputs()) - {INPUT}:
            parameters[key]._load_init(saved[key], self._contexts, cast_dtype=True)
        # Memory is planned once per shape: fresh memory is slow on CPUs.
        self._block.hybridize(static_alloc=True, static_shape=True)

    def __call__(self, images: np.ndarray) -> np.ndarray:
        at_once = self._at_once or len(images)
        try:
            parts = [
                self._embed(images[start : start + at_once])
                for start in range(0, len(images), at_once)
            ]
        except mxnet().MXNetError as error:
            raise self._refusal(images, self._wanted_size(), _last_line(error)) from None
        return np.concatenate(parts)

    def _embed(self, images: np.ndarray) -> np.ndarray:
        mx = mxnet()
        pieces = mx.gluon.utils.split_and_load(
            mx.nd.array(images, dtype=np.float32), self._contexts[: len(images)], even_split=False
        )
        embedded = [self._block(piece) for piece in pieces]
        embeddings = np.concatenate([piece.asnumpy() for piece in embedded])
        return embeddings.reshape(len(images), -1)

    def _wanted_size(self) -> tuple[int, int] | None:
        return find_size(self._graph, self._shapes, self.image_size)


class _OnnxModel(Model):
    """An ONNX file; how it wants its pixels, its metadata or its first nodes say."""

    def __init__(self, name: ModelName, context: mx.Context):
        super().__init__(name)
        _check_files(name)
        onnx, onnxruntime = import_onnx(str(name), "onnx", "onnxruntime")
        options = onnxruntime.SessionOptions()
        # A file may declare an output of another batch size: that is a warning for each batch.
        options.log_severity_level = ONNX_ERRORS
        kinds = {"CPUExecutionProvider"}
        if context.device_type == "gpu":
            kinds.add("CUDAExecutionProvider")
        try:
            model = onnx.load(name.prefix, load_external_data=False)
            check_external_data(model, name.prefix)
            self._session = onnxruntime.InferenceSession(
                name.prefix,
                options,
                providers=[one for one in onnxruntime.get_available_providers() if one in kinds],
            )
        except Exception as error:  # of onnxruntime's own many kinds
            raise ValueError(f"{name}: not an ONNX file that runs here: {error}") from None
        self._input = self._session.get_inputs()[0]
        size = tuple(self._input.shape[2:])
        self._fixed_size = size if all(isinstance(side, int) for side in size) else None
        self.image_size = self._fixed_size or self.image_size
        # Without a word on it: exports of MXNet networks take 0 to 255 and begin with a subtraction
        # and a product; those of PyTorch ones want (x - 127.5) / 127.5 done for them.
        is_scaled_inside = {"Sub", "Mul"} <= {node.op_type for node in model.graph.node[:8]}
        usual = (0.0, 1.0) if is_scaled_inside else (127.5, 127.5)
        metadata = self._session.get_modelmeta().custom_metadata_map
        self._mean = float(metadata.get("input_mean", usual[0]))
        self._std = float(metadata.get("input_std", usual[1]))

    def __call__(self, images: np.ndarray) -> np.ndarray:
        images = (images.astype(np.float32) - self._mean) / self._std
        fixed = self._input.shape[0]
        size = fixed if isinstance(fixed, int) and fixed > 0 else len(images)
        embeddings = []
        for start in range(0, len(images), size):
            batch = images[start : start + size]
            padding = np.zeros((size - len(batch), *batch.shape[1:]), np.float32)
            try:
                output = self._session.run(
                    None, {self._input.name: np.concatenate([batch, padding])}
                )[0]
            except Exception as error:
                raise self._refusal(images, self._fixed_size, _last_line(error)) from None
            embeddings.append(output.reshape(size, -1)[: len(batch)])
        return np.concatenate(embeddings)


def import_onnx(what: str, *modules: str) -> list[ModuleType]:
    """Import modules of the extra ``onnx``; say that `what` needs it where that fails."""
    try:
        return [importlib.import_module(module) for module in modules]
    except ImportError as error:
        raise ImportError(
            f"{what} needs the extra onnx: pip install 'dsoftmax[onnx]' ({error})"
        ) from None


def _fits(graph: mx.sym.Symbol, shapes: Mapping[str, tuple], size: tuple[int, int]) -> bool:
    """Tell whether a graph takes images of this size with parameters of these shapes."""
    try:
        graph.infer_shape_partial(**{INPUT: (1, 3, *size)}, **shapes)
    except mxnet().MXNetError:
        return False
    return True


def _check_files(name: ModelName) -> None:
    for path in name.files():
        if not os.path.exists(path):
            there = ""
            if path.endswith(".params"):
                epochs = ", ".join(map(str, saved_epochs(name.prefix)))
                there = f"; of this prefix there are the epochs {epochs}"
            raise FileNotFoundError(f"{path}: there is no such file{there}")


def _embedding_of(symbol: mx.sym.Symbol, path: str) -> mx.sym.Symbol:
    internals = symbol.get_internals()
    if EMBEDDING in internals.list_outputs():
        return internals[EMBEDDING]
    if len(symbol.list_outputs()) == 1 and "label" not in "".join(symbol.list_arguments()):
        return symbol  # a network exported without a classifier, its embedding under another name
    raise ValueError(f"{path}: it has no output named {EMBEDDING}, nor is it an embedding alone")


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1].strip()
