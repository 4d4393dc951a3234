"""insightface's functions for verification, for scripts that were written for its ``verification``.

    from dsoftmax.eval.insightface import dumpR, evaluate, load_bin, test

Arguments and results are the same. Packs are read without executing their pickles, the accuracies
are those of `dsoftmax.eval.metrics`, and fewer images than a batch are no problem. New scripts are
better off with `dsoftmax.eval.pairs.verify`.
"""

from __future__ import annotations

import pickle
import time
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import numpy as np

from dsoftmax.eval import metrics
from dsoftmax.eval.models import Embed
from dsoftmax.eval.pairs import VAL_FAR
from dsoftmax.recognition.common.files import AtomicFile
from dsoftmax.recognition.common.preflight import mxnet
from dsoftmax.recognition.common.progress import progress
from dsoftmax.recognition.data.images import fit
from dsoftmax.recognition.data.packs import read_pack

DUMP = "temp.bin"


class Evaluation(NamedTuple):
    """What `evaluate` returns, in insightface's order."""

    tpr: np.ndarray  # (400,), true accept rates at the thresholds of the accuracy, mean of folds
    fpr: np.ndarray  # (400,), false accept rates likewise
    accuracy: np.ndarray  # (folds,)
    val: float  # the true accept rate at a false accept rate of 1e-3
    val_std: float
    far: float  # the false accept rate that was observed


def load_bin(path: str, image_size: Sequence[int]) -> tuple[list, list[bool]]:
    """Load a pack as insightface's scripts expect it.

    Parameters
    ----------
    path : str
        The ``.bin``.
    image_size : (int, int)
        Height and width; other images are resized to cover it and cropped in the middle.

    Returns
    -------
    data_list : [NDArray, NDArray]
        Images and mirror images, (2P, 3, height, width) float32 each, RGB, 0 to 255.
    issame_list : list of bool
    """
    nd = mxnet().nd
    pack = read_pack(path)
    height, width = image_size
    shape = (2 * len(pack), 3, height, width)
    data_list = [nd.empty(shape), nd.empty(shape)]
    for image in progress(range(shape[0]), desc=pack.name, unit="images"):
        pixels = fit(pack.decode(image), height, width).transpose(2, 0, 1)
        for data, view in zip(data_list, (pixels, pixels[:, :, ::-1])):
            data[image] = view
    return data_list, pack.issame.tolist()


def evaluate(
    embeddings: np.ndarray, actual_issame: Sequence[bool], nrof_folds: int = 10
) -> Evaluation:
    """Evaluate the embeddings of pairs by cross-validation.

    Parameters
    ----------
    embeddings : (2P, D)
        Of length 1: a0, b0, a1, b1, ….
    actual_issame : sequence of P bools
    nrof_folds : int

    Returns
    -------
    Evaluation
        A tuple of six.
    """
    embeddings, is_same = np.asarray(embeddings), np.asarray(actual_issame, bool)
    distances = metrics.squared_distances(embeddings)
    accuracy = metrics.fold_accuracy(distances, is_same, nrof_folds)
    tar = metrics.fold_tar(1 - distances / 2, is_same, VAL_FAR, nrof_folds)
    rates = metrics.fold_rates(distances, is_same, nrof_folds)
    return Evaluation(*rates, accuracy.accuracies, tar.mean, tar.deviation, tar.far)


def test(
    data_set: tuple[list, Sequence[bool]],
    mx_model: Any,
    batch_size: int,
    nfolds: int = 10,  # noqa: PT028 (the name is insightface's, not pytest's)
    data_extra: np.ndarray | None = None,  # noqa: PT028
    label_shape: tuple[int, ...] | None = None,  # noqa: PT028
) -> tuple[float, float, float, float, float, list[np.ndarray]]:
    """Verify the pairs that `load_bin` has loaded.

    Parameters
    ----------
    data_set : (list, list)
        As of `load_bin`.
    mx_model : Module or callable
        A bound ``mx.mod.Module``, or what `dsoftmax.eval.models.load_model` returns. On CPUs, MXNet
        1.9.1 fails on modules of some networks, MobileFaceNet's among them, unless the environment
        variable MXNET_SUBGRAPH_BACKEND is NONE.
    batch_size : int
        For which the module is bound.
    nfolds : int
    data_extra : array, optional
        A second input of the module, the same for every batch.
    label_shape : tuple, optional
        Of the labels the module is bound for; by default (batch_size,).

    Returns
    -------
    0.0, 0.0, accuracy, deviation, xnorm, embeddings_list
        The accuracy with mirror images over the folds, the mean length of all embeddings, and the
        embeddings of images and of mirror images, (2P, D) each. insightface does not compute the
        first two, either.
    """
    print("testing verification..")
    started = time.perf_counter()
    embeddings_list = _embed_views(data_set[0], mx_model, batch_size, data_extra, label_shape)
    embeddings = metrics.normalized(embeddings_list[0] + embeddings_list[1])
    print(embeddings.shape)
    print("infer time", time.perf_counter() - started)
    lengths = [np.linalg.norm(views, axis=1) for views in embeddings_list]
    xnorm = float(np.mean(lengths, dtype=np.float64))
    accuracy = metrics.fold_accuracy(metrics.squared_distances(embeddings), data_set[1], nfolds)
    return 0.0, 0.0, accuracy.mean, accuracy.deviation, xnorm, embeddings_list


def dumpR(
    data_set: tuple[list, Sequence[bool]],
    mx_model: Any,
    batch_size: int,
    name: str = "",
    data_extra: np.ndarray | None = None,
    label_shape: tuple[int, ...] | None = None,
) -> None:
    """Write the embeddings and ``issame_list`` of a pack to ``temp.bin``, a pickle of both.

    Parameters
    ----------
    data_set, mx_model, batch_size, data_extra, label_shape
        As of `test`.
    name : str
        Ignored, as in insightface.
    """
    print("dump verification embedding..")
    views = _embed_views(data_set[0], mx_model, batch_size, data_extra, label_shape)
    with AtomicFile(DUMP) as file:
        content = metrics.normalized(views[0] + views[1]), list(data_set[1])
        pickle.dump(content, file, protocol=4)


def _embed_views(
    data_list: list, model: Any, batch_size: int, data_extra: Any, label_shape: Any
) -> list[np.ndarray]:
    """Return the embeddings of each view, (2P, D)."""
    if hasattr(model, "get_outputs"):
        embed = _function_of_module(model, batch_size, data_extra, label_shape)
    else:
        embed = _function_of_numpy(model)
    return [
        np.concatenate([embed(part) for part in _batches(data, batch_size)]) for data in data_list
    ]


def _batches(data: Any, batch_size: int) -> Iterator[Any]:
    """Cut an array of MXNet into copies: oneDNN can't change the layout of a view."""
    for start in range(0, len(data), batch_size):
        yield data.slice_axis(axis=0, begin=start, end=min(start + batch_size, len(data)))


def _function_of_numpy(model: Embed) -> Callable[[Any], np.ndarray]:
    """Return a function of MXNet's images that a function of numpy's computes."""
    return lambda images: model(images.astype("uint8").asnumpy())


def _function_of_module(
    module: Any, batch_size: int, data_extra: Any, label_shape: Any
) -> Callable[[Any], np.ndarray]:
    """Return a function of up to `batch_size` images that a bound module computes."""
    mx = mxnet()
    extra = () if data_extra is None else (mx.nd.array(data_extra),)
    label = mx.nd.ones(label_shape or (batch_size,))

    def embed(images) -> np.ndarray:
        count = len(images)
        if count < batch_size:  # the module takes whole batches: the last image fills this one
            last = images.slice_axis(axis=0, begin=count - 1, end=count)
            images = mx.nd.concat(images, *[last] * (batch_size - count), dim=0)
        batch = mx.io.DataBatch(data=(images, *extra), label=(label,))
        module.forward(batch, is_train=False)
        return module.get_outputs()[0].asnumpy()[:count]

    return embed
