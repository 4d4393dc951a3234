"""The curves against the paper's formulas in float64, with nothing shared."""

import math

import numpy as np
import pytest

from dsoftmax.tools.reproduction import curves

S = 32


def psi(z):
    """Return SphereFace's continued cos(4 θ)."""
    theta = np.arccos(z)
    k = np.minimum(np.floor(4 * theta / np.pi), 3)
    return (-1) ** k * np.cos(4 * theta) - 2 * k


def arc(z):
    theta = np.arccos(z)
    return np.where(theta + 0.5 < np.pi, np.cos(theta + 0.5), z - 0.5 * np.sin(0.5))


MARGINS = {
    "Softmax": lambda z: z,
    "SphereFace": psi,
    "CosFace": lambda z: z - 0.35,
    "ArcFace": arc,
}
# What each margin sends the termination point to.
INVERSES = {
    "Softmax": lambda d: d,
    "SphereFace": lambda d: np.cos(np.arccos(d) / 4),
    "CosFace": lambda d: d + 0.35,
    "ArcFace": lambda d: np.cos(np.arccos(d) - 0.5),
}


@pytest.mark.parametrize("name", MARGINS)
def test_loss_against_z_y(name):
    data = curves.compute_figure2()
    z = np.array(data["z_y"])
    assert (z[0], z[-1]) == (-1, 1)
    assert [curve["M"] for curve in data["losses"][name]] == [1e2, 1e4, 1e6, 1e8]
    for curve in data["losses"][name]:
        expected = np.log1p(curve["M"] * np.exp(-S * MARGINS[name](z)))
        np.testing.assert_allclose(curve["loss"], expected, rtol=1e-4, atol=1e-4)
        d = math.log(curve["M"]) / S
        assert curve["termination"] == pytest.approx(INVERSES[name](d), abs=1e-5)


def test_intra_part_does_not_depend_on_m():
    data = curves.compute_figure2()
    first, *others = data["losses"]["D-Softmax"]
    expected = np.log1p(np.exp(S * 0.9 - S * np.array(data["z_y"])))
    np.testing.assert_allclose(first["loss"], expected, rtol=1e-4, atol=1e-4)
    for other in others:
        assert (other["loss"], other["termination"]) == (first["loss"], 0.9)


def test_loss_against_z_n():
    data = curves.compute_figure3()
    z_n = np.array(data["cosines"])
    assert [curve["z_y"] for curve in data["curves"]] == [0.0, 0.2, 0.4, 0.6, 0.8]
    for curve in data["curves"]:
        target = np.exp(S * curve["z_y"])
        expected = np.log1p((np.exp(S * z_n) + data["M_n"]) / target)
        np.testing.assert_allclose(curve["loss"], expected, rtol=1e-4, atol=1e-4)
        d = math.log(target + data["M_n"]) / S
        assert curve["termination"] == pytest.approx(d, abs=1e-5)


@pytest.mark.parametrize("name", MARGINS)
def test_end_of_the_inter_class_objective(name):
    data = curves.compute_figure3()
    z_y = np.array(data["cosines"])
    expected = np.log(np.exp(S * MARGINS[name](z_y)) + data["M_n"]) / S
    np.testing.assert_allclose(data["terminations"][name], expected, atol=1e-5)


def test_plateaus():
    """The paper: margins have wider plateaus than softmax, D-Softmax's is a flat line."""
    data = curves.compute_figure3()
    low = math.log(1 + data["M_n"]) / S
    np.testing.assert_allclose(data["terminations"]["D-Softmax"], low, atol=1e-5)
    width = {
        name: np.count_nonzero(np.array(points) < low + 0.01)
        for name, points in data["terminations"].items()
    }
    assert all(width[name] > 1.2 * width["Softmax"] for name in width if name != "Softmax")


def test_figure2():
    figure = curves.draw_figure2()
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == [
        "(a) Softmax",
        "(b) SphereFace",
        "(c) CosFace",
        "(d) ArcFace",
        "(e) D-Softmax, intra-class part",
        "",
    ]
    assert [len(axes.lines) for axes in figure.axes[:5]] == [8, 8, 8, 8, 2]  # curves and points
    names = [text.get_text() for text in figure.axes[5].get_legend().get_texts()]
    assert names == [
        *(f"$M = 10^{{{power}}}$" for power in (2, 4, 6, 8)),
        "any $M$",
        "where the gradient dies away",
    ]
    mark = figure.axes[0].lines[1]
    assert mark.get_xdata()[0] == pytest.approx(math.log(1e2) / S, abs=1e-5)
    assert mark.get_ydata()[0] == pytest.approx(math.log(2), abs=0.02)


def test_figure3():
    left, right = curves.draw_figure3().axes
    assert [text.get_text() for text in left.get_legend().get_texts()] == [
        f"$z_y = {z_y:g}$" for z_y in (0, 0.2, 0.4, 0.6, 0.8)
    ]
    assert [text.get_text() for text in right.get_legend().get_texts()] == [
        *MARGINS,
        "D-Softmax",
    ]
    assert (left.get_xlabel(), right.get_xlabel()) == ("$z_n$", "$z_y$")
