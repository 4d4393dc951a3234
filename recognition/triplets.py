"""Triplets for a triplet loss: mined from bags of images, and made into batches."""

from __future__ import annotations

from typing import Any, Callable, Iterator

import numpy as np

from dsoftmax.eval import metrics
from dsoftmax.eval.embed import embed_batches
from dsoftmax.losses.triplet import IMAGES, TripletSpec, pick_triplets
from dsoftmax.recognition.common.arrays import load_arrays
from dsoftmax.recognition.data.bags import Bags
from dsoftmax.recognition.data.images import load_rgb
from dsoftmax.recognition.data.pipeline import Batch, Pipeline

STATE = "triplets"
LEAST_BATCHES = 2  # of an epoch, if its bags have enough triplets


class NoTripletsError(ValueError):
    """There are too few semi-hard triplets for a batch."""


class StoppedError(Exception):
    """The run is to stop, and its triplets are not complete."""


class TripletMiner:
    """Makes the epochs of a run with a triplet loss.

    An epoch begins with a bag of images, which the network as it is embeds, and consists of the
    semi-hard triplets among them. Bags are functions of the seed and their number; the triplets,
    which depend on the network of that moment, are saved with every state. So this stands where the
    trainer of class weights does.

    Parameters
    ----------
    embed : callable
        Maps (n, 3, height, width) uint8 images to (n, D) by inference.
    pipeline : Pipeline
        Loads and augments images; its `batch_size` is that of a step.
    spec : TripletSpec
    block : int
        Images that a device takes at once: the anchors of a third as many triplets, their
        positives, their negatives.

    Attributes
    ----------
    bags : Bags
    triplets : (T, 3) int64
        Those of the current epoch, by the images' numbers in the records.
    """

    def __init__(
        self,
        embed: Callable[[np.ndarray], np.ndarray],
        pipeline: Pipeline,
        spec: TripletSpec,
        block: int,
    ):
        self._embed, self._pipeline, self._block = embed, pipeline, block
        self._alpha, self._max_ap = spec.options["alpha"], spec.options["max_ap"]
        self._images, self._classes = pipeline.images_and_classes()
        wanted = spec.options["images_per_identity"], spec.options["bag_size"]
        self.bags = Bags(self._classes, *wanted, pipeline.seed)
        self._bags_done = 0
        self.triplets = np.empty((0, IMAGES), np.int64)

    def epoch(
        self,
        epoch: int,
        start: int,
        say: Callable[[str], Any],
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> Iterator[Batch]:
        """Yield the batches of an epoch from step `start` on.

        Parameters
        ----------
        epoch, start : int
            Triplets are mined if `start` is 0; a resumed epoch goes on with those of its state.
        say : callable
            Takes lines for the log.
        is_stopping : callable
            Whether the run is to stop now. There are no batches then: a bag may take minutes, for
            which whoever sent the signal may not wait.
        """
        if not start:
            try:
                self.triplets = self._mine(say, is_stopping)
            except StoppedError:
                return
        triplets = self.triplets[: len(self.triplets) // self._per_step * self._per_step]
        blocks = triplets.reshape(-1, self._block // IMAGES, IMAGES)
        yield from self._pipeline.batches(blocks.swapaxes(1, 2).ravel(), epoch, start)

    @property
    def _per_step(self) -> int:
        return self._pipeline.batch_size // IMAGES

    def _mine(self, say: Callable[[str], Any], is_stopping: Callable[[], bool]) -> np.ndarray:
        """Mine bag after bag until there are enough triplets; at most a pass, or two bags."""
        found = np.empty((0, IMAGES), np.int64)
        first = self._bags_done
        for number in range(first, first + max(self.bags.per_pass, 2)):
            say(f"eval {self.bags.size} images.. {number % self.bags.per_pass * self.bags.size}")
            triplets = self._mine_bag(number, is_stopping)
            say(f"found triplets {len(triplets)}")
            found = np.concatenate([found, triplets])
            if len(found) >= LEAST_BATCHES * self._per_step:
                break
        if len(found) < self._per_step:
            raise NoTripletsError(
                f"{self._pipeline.records.path}: {len(found)} semi-hard triplets are fewer than "
                f"the {self._per_step} of a step: the network tells these identities apart by "
                "alpha, or has collapsed. Take a smaller --per-batch-size, or another alpha by "
                "--loss-option"
            )
        self._bags_done = number + 1  # only now: a run that is stopped before mines them again
        return found

    def _mine_bag(self, number: int, is_stopping: Callable[[], bool]) -> np.ndarray:
        places = self.bags.draw(number)
        images, records = self._images[places], self._pipeline.records

        def load(place: int) -> np.ndarray:
            _, encoded = records.read(int(images[place]))
            return load_rgb(encoded, self._pipeline.image_size)

        embeddings, is_readable = [], np.ones(len(images), bool)
        for batch in embed_batches(
            self._embed,
            load,
            range(len(images)),
            self._block,
            self._pipeline.threads,
            desc="mining triplets",
            flip=False,
        ):
            if is_stopping():
                raise StoppedError
            is_readable[[place for place, _ in batch.unreadable]] = False
            if batch.views.shape[2]:
                of_batch = slice(batch.start, batch.start + len(batch.views))
                embeddings.append(batch.views[is_readable[of_batch], 0])
        if not embeddings:
            return np.empty((0, IMAGES), np.int64)
        kept = places[is_readable]
        triplets = pick_triplets(
            metrics.normalized(np.concatenate(embeddings)),
            self._classes[kept],
            self._alpha,
            self._max_ap,
            self.bags.generator(number, stream=3),
        )
        return self._images[kept][triplets]

    # --- What a state keeps, and what a trainer of class weights would do

    def states(self) -> dict[str, np.ndarray]:
        """Return the number of bags done, followed by the triplets of the current epoch."""
        return {STATE: np.concatenate([[self._bags_done], self.triplets.ravel()]).astype(np.int64)}

    def load_states(self, path: str) -> None:
        """Load what `states` returned, from a file."""
        saved = load_arrays(path)
        if STATE not in saved:
            raise ValueError(f"{path}: it belongs to a run with another kind of loss")
        bags_done, *triplets = saved[STATE].asnumpy().tolist()
        self._bags_done = bags_done
        self.triplets = np.array(triplets, np.int64).reshape(-1, IMAGES)

    def assist_reading(self) -> None:
        """Do nothing."""

    def set_learning_rate(self, rate: float) -> None:
        """Do nothing: there are no class weights."""

    def step(self, batch_size: int) -> None:
        """Do nothing: there are no class weights."""
