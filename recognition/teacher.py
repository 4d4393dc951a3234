"""A trained network that a run stays close to: distillation, and fine-tuning that does not forget.

The cosine distance between the embeddings that the network and its teacher make of the same image,
1 - cos, times a weight, is added to the loss of each sample.
"""

from __future__ import annotations

import mxnet as mx
import numpy as np
from mxnet import nd

from dsoftmax.eval.models import load_model
from dsoftmax.losses.kernels import SMALLEST_NORM, from_numpy, row_sum
from dsoftmax.recognition.common.distributed.group import ALONE, Group
from dsoftmax.recognition.common.vectors import normalized


class Teacher:
    """Embeds the images of a step by inference, and measures how far the embeddings are from it.

    Parameters
    ----------
    name : str
        ``prefix,epoch`` or ``file.onnx``.
    weight : float
        What its part of the loss is multiplied by.
    embedding_size : int
        The width of the embeddings, which must be the teacher's: where they differ there is no
        cosine.
    image_size : (int, int)
        Height and width of the images.
    contexts : list of mx.Context
        Those of the run. Contexts of a CPU take turns, as they do in the network: the first one
        embeds the part of each, so that the bits don't depend on how many processes share a batch.
    group : Group
        The processes of the run, each with a part of the batch.

    Attributes
    ----------
    weight : float
    mean_loss : float
        Its part of the mean loss of the last step.
    """

    def __init__(
        self,
        name: str,
        weight: float,
        embedding_size: int,
        image_size: tuple[int, int],
        contexts: list[mx.Context],
        group: Group = ALONE,
    ):
        self.weight, self.mean_loss, self._group = weight, 0.0, group
        is_cpu = contexts[0].device_type == "cpu"
        self._turns = len(contexts) if is_cpu else 1
        try:
            self._embed = load_model(name, contexts[:1] if is_cpu else contexts)
            width = self._embed(np.zeros((1, 3, *image_size), np.uint8)).shape[1]
        except (ValueError, OSError) as error:
            raise ValueError(f"--teacher {name}: {error}") from None
        if width != embedding_size:
            raise ValueError(
                f"--teacher {name}: its embeddings have width {width}, those of this run "
                f"{embedding_size}: give --emb-size {width}, or a network or teacher of the same "
                "width"
            )
        self._losses: list[nd.NDArray] = []  # of the micro-batches of this step

    def begin_step(self) -> None:
        """Forget the losses of the last step."""
        self._losses = []

    def embed(self, images: np.ndarray, context: mx.Context) -> nd.NDArray:
        """Return the teacher's embeddings of a whole batch, (B, D) of length 1.

        Parameters
        ----------
        images : (b, 3, height, width) uint8
            This process's part of the batch.
        context : mx.Context
            Where they are to be.
        """
        embedded = [self._embed(part) for part in np.array_split(images, self._turns)]
        targets = from_numpy(normalized(np.concatenate(embedded)), context, "float32")
        return self._group.gather("teacher's embeddings", targets)

    def loss(self, embeddings: nd.NDArray, targets: nd.NDArray) -> nd.NDArray:
        """Return the teacher's part of each sample's loss, (B,); to be called under ``record``.

        Parameters
        ----------
        embeddings : (B, D)
        targets : (B, D)
            What `embed` returned for the same images.
        """
        length = nd.sqrt(nd.maximum(row_sum(nd.square(embeddings)), SMALLEST_NORM**2))
        cosine = row_sum(embeddings * targets) / length
        loss = self.weight * (1 - cosine.reshape(-1))
        self._losses.append(loss.detach())
        return loss

    def read_loss(self) -> float:
        """Return the mean of the teacher's part over all micro-batches of the step."""
        losses = np.concatenate([part.asnumpy() for part in self._losses])
        self.mean_loss = float(losses.mean(dtype=np.float64))
        return self.mean_loss
