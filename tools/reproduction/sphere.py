"""The paper's figure 1 on a toy: how compact are classes, if there are five or ten of them.

The paper trains a network of width 3 on the 5 and the 10 people of MS-Celeb-1M with the most
images. Here a class is a Gaussian cloud of points around a random centre, and a network with one
hidden layer maps the points to a sphere. The clouds, the network and the optimizer are free
choices, all in `Toy`; the loss is a head of `losses.create` with the scale of the paper's
experiments. Both losses share everything else, and five classes are the first five of the ten.

Mean angle of an embedding and its class weight, in degrees, over five seeds:

==========================  ===========  ===========
loss, width                 5 classes    10 classes
==========================  ===========  ===========
Softmax, 3                  39.0 ± 12.5  24.3 ± 7.4
D-Softmax, 3                7.3 ± 1.3    17.6 ± 1.6
D-Softmax with d = 1, 3     1.8 ± 0.3    8.0 ± 0.6
Softmax, 5                  50.6 ± 4.9   39.9 ± 6.2
D-Softmax, 5                6.5 ± 0.5    9.6 ± 6.8
D-Softmax with d = 1, 5     2.9 ± 0.4    1.9 ± 0.6
==========================  ===========  ===========

The paper's claim holds for softmax: with fewer classes it lets embeddings end farther from their
class weights. In width 3 their spread around the mean of the class is the same, though: 10 degrees
with five classes and with ten. D-Softmax keeps embeddings nearer in each case, with a spread of 2
degrees and 3 in width 3, but their angle to the weight is not the same. There are two reasons:

- d = 0.9 ends the intra-class part at 26 degrees; within these, the inter-class part alone moves an
  embedding.
- In width 3 no more than six directions are pairwise at least 90 degrees apart. With ten classes
  the inter-class part never comes to rest, and pushes an embedding away from the nearest classes
  rather than towards its weight.

With d = 1 in width 5, where ten classes have room, neither applies, and the angles are almost the
same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dsoftmax.eval import metrics
from dsoftmax.eval.plots import make_figure, scatter

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCALE = 32
LOSSES = {"nsoftmax": "Softmax", "dsoftmax": "D-Softmax"}
CLASSES = (5, 10)


class Toy(NamedTuple):
    """What is free in the toy."""

    width: int = 3  # of the embeddings
    d: float = 0.9  # of D-Softmax
    features: int = 16  # of a point
    points: int = 50  # of a class
    noise: float = 0.5  # deviation of a class; that of the centres is 1
    hidden: int = 32
    steps: int = 300  # of all points at once
    learning_rate: float = 0.01  # of Adam


class Trained(NamedTuple):
    """What a training run leaves."""

    embeddings: np.ndarray  # (n, width), of length 1
    labels: np.ndarray  # (n,) int
    weights: np.ndarray  # (classes, width), of length 1


def make_points(classes: int, seed: int, toy: Toy) -> tuple[np.ndarray, np.ndarray]:
    """Draw points and their labels, (n, features) and (n,); fewer classes are the first of more."""
    clouds = []
    for label in range(classes):
        rng = np.random.default_rng((seed, label))
        centre = rng.normal(size=toy.features)
        clouds.append(centre + toy.noise * rng.normal(size=(toy.points, toy.features)))
    return np.concatenate(clouds), np.repeat(np.arange(classes), toy.points)


def train(loss: str, classes: int, seed: int = 0, toy: Toy | None = None) -> Trained:
    """Train a network and a head on all points.

    Parameters
    ----------
    loss : {"nsoftmax", "dsoftmax"}
    classes : int
    seed : int
        Of the points and of the first weights. It seeds MXNet's generator.
    toy : Toy, optional
    """
    import mxnet as mx
    from mxnet import autograd, gluon

    from dsoftmax import losses

    toy = toy or Toy()
    features, labels = make_points(classes, seed, toy)
    mx.random.seed(seed)
    network = gluon.nn.HybridSequential()
    network.add(
        gluon.nn.Dense(toy.hidden, activation="relu", in_units=toy.features),
        gluon.nn.Dense(toy.width, in_units=toy.hidden),
    )
    network.initialize(mx.init.Xavier())
    network.hybridize()
    options = {"d": toy.d} if loss == "dsoftmax" else {}
    head = losses.create(loss, classes, toy.width, scale=SCALE, seed=seed, **options)
    head.initialize(mx.init.Normal(1))  # as large as embeddings, so that Adam turns both alike
    optimizer = "adam", {"learning_rate": toy.learning_rate}
    trainers = head.trainer(*optimizer), gluon.Trainer(network.collect_params(), *optimizer)
    inputs, targets = mx.nd.array(features), mx.nd.array(labels, dtype="int32")
    for _ in range(toy.steps):
        with autograd.record():
            values = head(network(inputs), targets)
        values.backward()
        for trainer in trainers:
            trainer.step(len(labels))
    embeddings = metrics.normalized(network(inputs).asnumpy())
    return Trained(embeddings, labels, metrics.normalized(head.class_weights()))


def measure(trained: Trained) -> dict[str, float]:
    """Measure how compact classes are, and how far apart, all in degrees.

    Returns
    -------
    dict
        ``to_weight``, the mean angle of an embedding and its class weight; ``to_mean``, that of an
        embedding and the mean direction of its class; ``between``, the mean angle of a class weight
        and its nearest neighbour.
    """
    embeddings, labels, weights = trained
    means = np.stack([embeddings[labels == label].mean(axis=0) for label in range(len(weights))])
    means = metrics.normalized(means)
    cosines = weights @ weights.T
    np.fill_diagonal(cosines, -1)
    return {
        "to_weight": _mean_angle((embeddings * weights[labels]).sum(axis=1)),
        "to_mean": _mean_angle((embeddings * means[labels]).sum(axis=1)),
        "between": _mean_angle(cosines.max(axis=1)),
    }


def _mean_angle(cosines: np.ndarray) -> float:
    return float(np.degrees(np.arccos(np.clip(cosines, -1, 1))).mean())


def compute_figure1(seeds: int = 5, toy: Toy | None = None) -> list[dict[str, Any]]:
    """Train each loss on each number of classes with several seeds.

    Returns
    -------
    list of dict
        One per panel: ``loss``, ``classes``, and the figures of `measure`, each as the ``mean`` and
        the standard ``deviation`` over seeds.
    """
    panels = []
    for loss in LOSSES:
        for classes in CLASSES:
            runs = [measure(train(loss, classes, seed, toy)) for seed in range(seeds)]
            panel: dict[str, Any] = {"loss": loss, "classes": classes}
            for name in runs[0]:
                values = [run[name] for run in runs]
                deviation = float(np.std(values, ddof=1)) if seeds > 1 else 0.0
                panel[name] = {"mean": float(np.mean(values)), "deviation": deviation}
            panels.append(panel)
    return panels


def draw_figure1(seed: int = 0, toy: Toy | None = None) -> Figure:
    """Draw embeddings and class weights on the sphere, for each loss with 5 and 10 classes.

    The titles give this seed's angles; `compute_figure1` says how they vary.
    """
    figure = make_figure(9, 8.8)
    panels = [(loss, classes) for loss in LOSSES for classes in CLASSES]
    for number, (loss, classes) in enumerate(panels):
        trained = train(loss, classes, seed, toy)
        angles = measure(trained)
        axes = figure.add_subplot(2, 2, number + 1, projection="3d")
        scatter(axes, trained.embeddings, trained.labels, rays=trained.weights)
        axes.set_title(
            f"({'abcd'[number]}) {LOSSES[loss]}, {classes} classes\n"
            f"{angles['to_weight']:.0f}° to the class weight, "
            f"{angles['to_mean']:.1f}° to the class mean",
            fontsize=12,
        )
    figure.supxlabel("points: embeddings; lines: class weights", fontsize=11)
    return figure
