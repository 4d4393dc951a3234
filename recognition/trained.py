"""What is trained: the network, the class weights and what updates them."""

from __future__ import annotations

from typing import NamedTuple

import mxnet as mx
import numpy as np

from dsoftmax.losses.head import Head
from dsoftmax.losses.trainer import HeadTrainer
from dsoftmax.losses.triplet import TripletHead
from dsoftmax.recognition.backbone import Backbone
from dsoftmax.recognition.triplets import TripletMiner


class DivergedError(ValueError):
    """The training has produced NaN or infinite numbers."""


class Trained(NamedTuple):
    """The network and the head, with what updates each."""

    backbone: Backbone
    head: Head | TripletHead
    head_trainer: HeadTrainer | TripletMiner

    @property
    def miner(self) -> TripletMiner | None:
        """What makes the epochs of a triplet loss; None for a loss with classes."""
        return self.head_trainer if isinstance(self.head_trainer, TripletMiner) else None

    def not_finite(self) -> list[str]:
        """Name the parameters that hold NaN or infinite numbers. All processes must call this."""
        names = [name for name, array in self.backbone.parameters().items() if not _finite(array)]
        if not np.isfinite(self.head.class_weights()).all():
            names.append("the class weights")
        return names

    def finite_parameters(self, step: int) -> dict[str, mx.nd.NDArray]:
        """Return the network's parameters by name, ready to be saved.

        All processes must call this. Each checks the class weights it stores itself.

        Raises
        ------
        DivergedError
            A parameter or a class weight is not finite.
        """
        parameters = self.backbone.parameters()
        for name, array in parameters.items():
            if not _finite(array):
                raise DivergedError(
                    f"step {step}: {name} holds NaN or infinite numbers; it was not saved. "
                    "Try a lower --lr or --clip-gradient, and --resume from the last state"
                )
        if not self.head.store.all_finite():
            raise diverged_classes(step)
        return parameters


def diverged_classes(step: int) -> DivergedError:
    """Return the error to raise where class weights are not finite."""
    return DivergedError(
        f"step {step}: class weights hold NaN or infinite numbers; they were not saved. Try a "
        "lower --lr, and --resume from the last state"
    )


def _finite(array: mx.nd.NDArray) -> bool:
    return bool(np.isfinite(array.asnumpy()).all())
