"""The paper's figures 2 and 3: how the loss follows the cosines, from the criteria alone.

The scale and the margins are those of the paper's experiments. SphereFace is drawn without
annealing, as the paper's equation 2 has it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Callable

import numpy as np

from dsoftmax import losses
from dsoftmax.eval.plots import line_style, make_figure, show_grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dsoftmax.losses import Criterion

SCALE = 32
LOSSES: dict[str, Callable[[], Criterion]] = {
    "Softmax": lambda: losses.Softmax(SCALE),
    "SphereFace": lambda: losses.SphereFace(SCALE, m1=4, annealing=False),
    "CosFace": lambda: losses.CosFace(SCALE, m3=0.35),
    "ArcFace": lambda: losses.ArcFace(SCALE, m2=0.5),
    "D-Softmax": lambda: losses.DSoftmax(SCALE, d=0.9),
}
SUMS = (1e2, 1e4, 1e6, 1e8)  # M, as of so many orthogonal negatives
REST = 1e4  # M_n, the sum over all negatives but one
COSINES = np.linspace(-1, 1, 401)
POSITIVES = (0.0, 0.2, 0.4, 0.6, 0.8)  # the z_y of figure 3 (a)
HIGHEST_LOSS = 40  # that is shown; SphereFace's loss of z_y = -1 is above 200
# log-sum-exps at which a loss is linear in n, and does not depend on n, whatever z_y.
MANY, NONE = 100.0, -1000.0


def evaluate(criterion: Criterion, z_y: np.ndarray, n: np.ndarray | float) -> np.ndarray:
    """Return the loss of cosines and log-sum-exps.

    Parameters
    ----------
    z_y : (B,)
    n : (B,) or float

    Returns
    -------
    (B,) float64
    """
    import mxnet as mx

    rows = np.broadcast_arrays(np.asarray(z_y, np.float32), np.asarray(n, np.float32))
    return criterion(*(mx.nd.array(row) for row in rows)).asnumpy().astype(np.float64)


def evaluate_intra(criterion: Criterion, z_y: np.ndarray, n: float) -> np.ndarray:
    """Return the loss as far as it depends on z_y: all of it, or D-Softmax's intra part."""
    if criterion.dissected:
        n = NONE  # the inter part, a function of n alone, is 0 there
    return evaluate(criterion, z_y, n)


def constant_of(criterion: Criterion, z_y: np.ndarray) -> np.ndarray:
    """Read the T of log(1 + e^n / T) off a criterion, as log T.

    The part of the loss that depends on n is n - log T for a large n. T is e^(s φ(z_y)) for
    softmax with the margin φ, and 1 for D-Softmax.

    Parameters
    ----------
    z_y : (B,)

    Returns
    -------
    (B,)
    """
    return MANY - (evaluate(criterion, z_y, MANY) - evaluate(criterion, z_y, NONE))


def inter_termination(criterion: Criterion, z_y: np.ndarray, rest: float = REST) -> np.ndarray:
    """Say at which z_n the inter-class gradient dies away: d' = log(T + M_n) / s.

    Parameters
    ----------
    z_y : (B,)
    rest : float
        M_n.

    Returns
    -------
    (B,)
    """
    return np.logaddexp(constant_of(criterion, z_y), math.log(rest)) / criterion.scale


def compute_figure2() -> dict[str, Any]:
    """Compute the loss against z_y, for several sums over the negatives.

    Returns
    -------
    dict
        ``z_y``, (401,); ``losses``, for each loss a list of curves, each with its ``M``, its
        ``loss``, (401,), and its ``termination``, the z_y at which the gradient dies away.
        D-Softmax's is the intra part.
    """
    curves = {}
    for name, make in LOSSES.items():
        criterion = make()
        curves[name] = [
            {
                "M": total,
                "loss": evaluate_intra(criterion, COSINES, math.log(total)).tolist(),
                "termination": criterion.termination_point(math.log(total)),
            }
            for total in SUMS
        ]
    return {"z_y": COSINES.tolist(), "losses": curves}


def compute_figure3() -> dict[str, Any]:
    """Compute softmax's loss against the cosine with one negative, and where its gradient ends.

    Returns
    -------
    dict
        ``M_n``; ``cosines``, (401,); ``curves`` of softmax, each with its ``z_y``, its ``loss``,
        (401,) over z_n, and its ``termination`` d'; ``terminations``, for each loss d' over z_y,
        (401,).
    """
    softmax = LOSSES["Softmax"]()
    n = np.logaddexp(SCALE * COSINES, math.log(REST))
    curves = [
        {
            "z_y": z_y,
            "loss": evaluate(softmax, np.full(len(n), z_y), n).tolist(),
            "termination": float(inter_termination(softmax, np.array([z_y]))[0]),
        }
        for z_y in POSITIVES
    ]
    terminations = {
        name: inter_termination(make(), COSINES).tolist() for name, make in LOSSES.items()
    }
    return {
        "M_n": REST,
        "cosines": COSINES.tolist(),
        "curves": curves,
        "terminations": terminations,
    }


def draw_figure2() -> Figure:
    """Draw the loss against z_y: one panel per loss, one curve per M."""
    data = compute_figure2()
    figure = make_figure(10.5, 6.2)
    panels = figure.subplots(2, 3, sharex=True, sharey=True).flat
    for letter, axes, (name, curves) in zip("abcde", panels, data["losses"].items()):
        show_grid(axes)
        is_dissected = name == "D-Softmax"
        for number, curve in enumerate(curves[:1] if is_dissected else curves):
            label = f"$M = 10^{{{math.log10(curve['M']):.0f}}}$"
            style = line_style(len(SUMS) if is_dissected else number)
            label = "any $M$" if is_dissected else label
            axes.plot(data["z_y"], curve["loss"], label=label, **style)
            _mark(axes, curve["termination"], data["z_y"], curve["loss"], style["color"])
        title = f"({letter}) {name}{', intra-class part' if is_dissected else ''}"
        axes.set(xlim=(-1, 1), ylim=(0, HIGHEST_LOSS), title=title)
        axes.tick_params(labelbottom=True)
        axes.set_xlabel("$z_y$")
    figure.axes[0].set_ylabel("loss")
    figure.axes[3].set_ylabel("loss")
    # The sixth panel has the names.
    last = figure.axes[5]
    last.set_axis_off()
    handles = [
        handle
        for axes in (figure.axes[0], figure.axes[4])
        for handle in axes.get_legend_handles_labels()[0]
    ]
    (point,) = last.plot([], [], "o", color="grey", label="where the gradient dies away")
    last.legend(handles=[*handles, point], loc="center", fontsize=12)
    return figure


def draw_figure3() -> Figure:
    """Draw softmax's loss against z_n, and where each loss stops to push negatives away."""
    data = compute_figure3()
    figure = make_figure(10.5, 4.4)
    left, right = figure.subplots(1, 2)
    for number, curve in enumerate(data["curves"]):
        style = line_style(number)
        left.plot(data["cosines"], curve["loss"], label=f"$z_y = {curve['z_y']:g}$", **style)
        _mark(left, curve["termination"], data["cosines"], curve["loss"], style["color"])
    left.set(xlabel="$z_n$", ylabel="loss", title="(a) Softmax", xlim=(-1, 1), ylim=(0, None))
    for number, (name, points) in enumerate(data["terminations"].items()):
        right.plot(data["cosines"], points, label=name, **line_style(number))
    right.set(
        xlabel="$z_y$",
        ylabel="termination point $d'$ of $z_n$",
        title="(b) the end of the inter-class objective",
        xlim=(-1, 1),
        ylim=(0, 1.02),
    )
    for axes in (left, right):
        show_grid(axes)
        axes.legend(loc="upper left", fontsize=11)
    return figure


def _mark(axes: Any, where: float, cosines: list, values: list, colour: str) -> None:
    """Mark the point of a curve at a cosine."""
    axes.plot(where, np.interp(where, cosines, values), "o", color=colour, clip_on=False, zorder=3)
