"""Load trained networks as functions from images to embeddings.

A network is named as insightface's commands name it: ``prefix,epoch`` stands for
``prefix-symbol.json`` and ``prefix-<epoch>.params``, of any MXNet since 1.0; ``p,1|3`` for two
epochs of it, ``p,1|q,2`` for two networks, and a bare ``prefix`` for all saved epochs, the newest
first. A name that ends in ``.onnx`` is an ONNX file.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
from typing import TYPE_CHECKING, Callable, NamedTuple, Sequence

import numpy as np

from dsoftmax.recognition.common.arrays import load_arrays
from dsoftmax.recognition.common.preflight import mxnet

if TYPE_CHECKING:
    import mxnet as mx

EMBEDDING = "fc1_output"  # what insightface's networks call their embedding
INPUT = "data"

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
        elif comma and prefix and epoch.strip().isdigit():
            names.append(ModelName(prefix, int(epoch)))
        elif not comma and part.isdigit() and names and not names[-1].is_onnx:
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


def load_model(name: ModelName, contexts: Sequence[mx.Context], rewrite: bool = True) -> Embed:
    """Load a network.

    Parameters
    ----------
    name : ModelName
    contexts : sequence of mx.Context
        Batches are split over them. An ONNX file runs on the first.
    rewrite : bool
        Compute the same embeddings by operators that are faster, if the network is a symbol and
        all contexts are CPUs; see `dsoftmax.eval.graphs`.
    """
    if name.is_onnx:
        return _OnnxModel(name, contexts[0])
    return _SymbolModel(name, contexts, rewrite)


class _SymbolModel:
    """A symbol file with its parameters; pixels of 0 to 255, scaled inside the graph."""

    def __init__(self, name: ModelName, contexts: Sequence[mx.Context], rewrite: bool):
        mx = mxnet()
        from dsoftmax.eval import graphs  # late, because it imports MXNet

        symbol_path, params_path = name.files()
        _check_files(name)
        self.name, self._contexts = name, list(contexts)
        try:
            symbol = mx.sym.load(symbol_path)
        except mx.MXNetError:
            raise ValueError(f"{symbol_path}: not a symbol MXNet can read") from None
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
        if rewrite and all(context.device_type == "cpu" for context in self._contexts):
            output, saved = graphs.for_cpus(output, saved)
        self._block = mx.gluon.SymbolBlock(output, mx.sym.var(INPUT, dtype="float32"))
        parameters = self._block.collect_params()
        for key in set(output.list_inputs()) - {INPUT}:
            parameters[key]._load_init(saved[key], self._contexts)
        # Memory is planned once per shape: fresh memory is slow on CPUs.
        self._block.hybridize(static_alloc=True, static_shape=True)

    def __call__(self, images: np.ndarray) -> np.ndarray:
        mx = mxnet()
        pieces = mx.gluon.utils.split_and_load(
            mx.nd.array(images, dtype=np.float32), self._contexts[: len(images)], even_split=False
        )
        try:
            embedded = [self._block(piece) for piece in pieces]
            embeddings = np.concatenate([piece.asnumpy() for piece in embedded])
        except mx.MXNetError as error:
            raise ValueError(
                f"{self.name} can't be run on images of {images.shape[2]}x{images.shape[3]}: "
                f"{_last_line(error)}"
            ) from None
        return embeddings.reshape(len(images), -1)


class _OnnxModel:
    """An ONNX file; whether it scales pixels itself is looked up in its first nodes."""

    def __init__(self, name: ModelName, context: mx.Context):
        _check_files(name)
        try:
            import onnx
            import onnxruntime
        except ImportError as error:
            raise ImportError(
                f"{name} needs the extra onnx: pip install 'dsoftmax[onnx]' ({error})"
            ) from None
        self.name = name
        kinds = {"gpu": ["CUDAExecutionProvider"]}.get(context.device_type, [])
        try:
            self._session = onnxruntime.InferenceSession(
                name.prefix, providers=[*kinds, "CPUExecutionProvider"]
            )
            nodes = onnx.load(name.prefix).graph.node[:8]
        except Exception as error:  # of onnxruntime's own many kinds
            raise ValueError(f"{name}: not an ONNX file that runs here: {error}") from None
        self._input = self._session.get_inputs()[0]
        # Exports of MXNet networks take 0 to 255 and begin with a subtraction and a product (or
        # their like); those of PyTorch ones want (x - 127.5) / 127.5 done for them.
        self._is_scaled_inside = {"Sub", "Mul"} <= {node.op_type for node in nodes}

    def __call__(self, images: np.ndarray) -> np.ndarray:
        images = images.astype(np.float32)
        if not self._is_scaled_inside:
            images = (images - 127.5) / 127.5
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
                raise ValueError(
                    f"{self.name} can't be run on images of {images.shape[2]}x{images.shape[3]}, "
                    f"its input is {self._input.shape}: {_last_line(error)}"
                ) from None
            embeddings.append(output.reshape(size, -1)[: len(batch)])
        return np.concatenate(embeddings)


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
