"""The toy of figure 1: its measures against loops, and what the losses make of it."""

import math

import numpy as np
import pytest

from dsoftmax.tools.reproduction import sphere

SEEDS = 3
QUICK = sphere.Toy(points=8, steps=5)


def angle(a, b):
    return math.degrees(math.acos(np.dot(a, b) / math.sqrt(np.dot(a, a) * np.dot(b, b))))


@pytest.fixture(scope="module")
def panels():
    return {(panel["loss"], panel["classes"]): panel for panel in sphere.compute_figure1(SEEDS)}


def test_measure(rng):
    def units(count):
        vectors = rng.normal(size=(count, 3))
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    trained = sphere.Trained(units(24), np.repeat(np.arange(4), 6), units(4))
    found = sphere.measure(trained)
    to_weight, to_mean, between = [], [], []
    for embedding, label in zip(trained.embeddings, trained.labels):
        to_weight.append(angle(embedding, trained.weights[label]))
        first = 6 * label
        to_mean.append(angle(embedding, sum(trained.embeddings[first : first + 6])))
    for i in range(4):
        between.append(
            min(angle(trained.weights[i], trained.weights[j]) for j in range(4) if j != i)
        )
    assert found == pytest.approx(
        {
            "to_weight": np.mean(to_weight),
            "to_mean": np.mean(to_mean),
            "between": np.mean(between),
        }
    )


def test_fewer_classes_are_the_first_of_more():
    few, many = (sphere.make_points(classes, 3, sphere.Toy()) for classes in (5, 10))
    assert many[0].shape == (500, 16)
    for part, whole in zip(few, many):
        np.testing.assert_array_equal(part, whole[:250])
    assert np.abs(sphere.make_points(5, 4, sphere.Toy())[0] - few[0]).max() > 0.1


@pytest.mark.parametrize("loss", sphere.LOSSES)
def test_training_is_determined_by_the_seed(loss):
    first, again, other = (sphere.train(loss, 5, seed, QUICK) for seed in (1, 1, 2))
    for one, two in zip(first, again):
        np.testing.assert_array_equal(one, two)
    assert np.abs(first.weights - other.weights).max() > 0.01
    for vectors in (first.embeddings, first.weights):
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)


def test_d_is_of_dsoftmax_alone():
    """A d of 0 asks for little: embeddings move less than with 0.9; softmax has no d."""
    toys = [QUICK._replace(d=d) for d in (0.0, 0.9)]
    dissected, entangled = (
        [sphere.train(loss, 5, 0, toy).embeddings for toy in toys]
        for loss in ("dsoftmax", "nsoftmax")
    )
    assert np.abs(dissected[0] - dissected[1]).max() > 1e-3
    np.testing.assert_array_equal(*entangled)


@pytest.mark.slow  # findings on the figure, not on the code
def test_softmax_relaxes_with_fewer_classes(panels):
    few, many = panels["nsoftmax", 5], panels["nsoftmax", 10]
    assert few["to_weight"]["mean"] > 1.2 * many["to_weight"]["mean"]
    assert few["between"]["mean"] > many["between"]["mean"]


@pytest.mark.slow  # findings on the figure, not on the code
def test_dsoftmax_keeps_classes_compact(panels):
    """Within arccos d of their weight, and a third of softmax's spread, with 5 classes and 10."""
    for classes in sphere.CLASSES:
        dissected, entangled = panels["dsoftmax", classes], panels["nsoftmax", classes]
        assert dissected["to_weight"]["mean"] < math.degrees(math.acos(0.9))
        assert dissected["to_weight"]["mean"] < entangled["to_weight"]["mean"]
        assert 3 * dissected["to_mean"]["mean"] < entangled["to_mean"]["mean"]


@pytest.mark.slow  # findings on the figure, not on the code
def test_dsoftmax_with_room_for_all_classes():
    """The paper's (c) and (d), without the tolerance of d and the crowd of a narrow sphere."""
    toy = sphere.Toy(width=5, d=1.0)
    few, many = (sphere.measure(sphere.train("dsoftmax", classes, 0, toy)) for classes in (5, 10))
    assert abs(few["to_weight"] - many["to_weight"]) < 3
    assert max(few["to_weight"], many["to_weight"]) < 6


@pytest.mark.slow
def test_spread_over_seeds(panels):
    angles = [
        sphere.measure(sphere.train("dsoftmax", 5, seed))["to_weight"] for seed in range(SEEDS)
    ]
    assert panels["dsoftmax", 5]["to_weight"] == pytest.approx(
        {"mean": sum(angles) / SEEDS, "deviation": np.std(angles, ddof=1)}
    )


def test_figure1():
    figure = sphere.draw_figure1(toy=QUICK)
    assert [axes.get_title().splitlines()[0] for axes in figure.axes] == [
        "(a) Softmax, 5 classes",
        "(b) Softmax, 10 classes",
        "(c) D-Softmax, 5 classes",
        "(d) D-Softmax, 10 classes",
    ]
    assert [len(axes.lines) for axes in figure.axes] == [5, 10, 5, 10]  # the class weights
    trained = sphere.train("nsoftmax", 5, 0, QUICK)
    end = np.array(figure.axes[0].lines[2].get_data_3d())[:, 1]
    np.testing.assert_allclose(end, trained.weights[2], rtol=1e-5)
    shown = figure.axes[0].get_title().splitlines()[1]
    assert shown.startswith(f"{sphere.measure(trained)['to_weight']:.0f}° to the class weight")
