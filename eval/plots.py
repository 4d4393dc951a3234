"""Draw figures for papers, of one result or of several, as .png, .pdf or .svg.

    python eval/plots.py roc arcface.json dsoftmax.json --output roc.pdf
    python eval/plots.py scores dsoftmax.json --output scores.png
    python eval/plots.py cmc arcface.json dsoftmax.json --output cmc.pdf
    python eval/plots.py distractors arcface.json dsoftmax.json --output distractors.pdf
    python eval/plots.py classes initial.npy trained.npy --output classes.pdf
    python eval/plots.py scatter embeddings.npz --output sphere.png

The .json files are those that the other commands in eval/ write with --json. A file may hold
several results; each becomes a line with the result's name. `classes` draws the distribution of the
cosines of all pairs of class weights (K, D), the paper's figure 4. `scatter` draws embeddings of
width 3 on their sphere, figure 1, from a file that holds `embeddings` (n, 3) and `labels` (n,).
"""

from __future__ import annotations

if not __package__:
    import require_dsoftmax

import argparse
import json
import math
import os
import sys
from typing import TYPE_CHECKING, Any, Mapping, NamedTuple, Sequence

import numpy as np

from dsoftmax.eval import metrics
from dsoftmax.recognition.common.arrays import map_npy
from dsoftmax.recognition.common.cli import command, make_parser
from dsoftmax.recognition.common.files import AtomicFile

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "pdf", "svg")
# Kinds of line beside the colours, so that curves differ when printed in grey, too.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
LINES = ("-", "--", "-.", ":")
CLASS_PAIRS = 50_000_000
DET_TICKS = (*(10.0**power for power in range(-7, -1)), 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
FEWEST_ACCEPTED = 5  # impostor pairs; a rate of fewer is chance


class Curve(NamedTuple):
    """Rates at false accept rates, on a logarithmic grid."""

    far: list[float]
    tar: list[float]
    threshold: Sequence[float | None] = ()  # scores above it are accepted; None for all scores


class Histogram(NamedTuple):
    """How scores are distributed, as shares of each kind in bins of one width."""

    edges: list[float]  # (bins + 1,)
    genuine: list[float]
    impostor: list[float]
    threshold: float | None = None  # an edge, if there is one: pairs above it are accepted


def sample_roc(
    genuine: np.ndarray, impostor: np.ndarray, total: int | None = None, highest: float = 1.0
) -> Curve:
    """Take 50 points per decade of the curve, from the rate of `FEWEST_ACCEPTED` to `highest`."""
    total = len(impostor) if total is None else total
    lowest = min(FEWEST_ACCEPTED / total, highest)
    fars = np.geomspace(lowest, highest, 1 + round(50 * np.log10(highest / lowest)))
    points = metrics.at_far(genuine, impostor, fars, total)
    thresholds = [point.threshold for point in points]
    return Curve(fars.tolist(), [point.tar for point in points], thresholds)


def bin_scores(
    genuine: np.ndarray, impostor: np.ndarray, threshold: float | None = None
) -> Histogram:
    """Count cosines in bins of one width, up to a hundred or so.

    Parameters
    ----------
    genuine, impostor : (g,), (i,)
    threshold : float, optional
        Made the edge of two bins, so that each bin is right or wrong as a whole.
    """
    both = np.concatenate([genuine, impostor])
    low, high = both.min(), max(both.max(), both.min() + 1e-6)
    bins = int(np.clip(np.sqrt(len(both)), 10, 100))
    if threshold is None:
        edges = np.linspace(low, high, bins + 1)
    else:
        width = (high - low) / bins
        below, above = (
            max(math.ceil(gap / width), 1) for gap in (threshold - low, high - threshold)
        )
        edges = threshold + width * np.arange(-below, above + 1)
    shares = (
        np.histogram(scores, edges)[0] / max(len(scores), 1) for scores in (genuine, impostor)
    )
    return Histogram(edges.tolist(), *(share.tolist() for share in shares), threshold)


def make_figure(width: float, height: float) -> Figure:
    """Make an empty figure, its size in inches."""
    from matplotlib.figure import Figure  # takes half a second to import

    return Figure(figsize=(width, height), layout="constrained")


def show_grid(axes: Any) -> None:
    """Draw a light grid below the curves."""
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)


def make_axes(width: float = 6.0, height: float = 4.2) -> tuple[Figure, Any]:
    """Make a figure with one panel, with a grid."""
    figure = make_figure(width, height)
    axes = figure.subplots()
    show_grid(axes)
    return figure, axes


def show_percent(axes: Any) -> None:
    """Label the vertical axis in per cent."""
    from matplotlib.ticker import PercentFormatter

    axes.yaxis.set_major_formatter(PercentFormatter(1))


def line_style(number: int) -> dict[str, Any]:
    """Return the colour and the kind of line of a figure's curve."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": LINES[number % len(LINES)],
        "linewidth": 1.8,
    }


def draw_roc(curves: Mapping[str, Curve], title: str = "") -> Figure:
    """Draw true against false accept rates, the latter logarithmic; a dot where a curve ends."""
    figure, axes = make_axes()
    for number, (name, curve) in enumerate(curves.items()):
        style = line_style(number)
        axes.step(curve.far, curve.tar, where="post", label=name, **style)
        axes.plot(curve.far[0], curve.tar[0], "o", color=style["color"], clip_on=False)
    lowest = min(min(curve.tar) for curve in curves.values())
    margin = max(0.04 * (1 - lowest), 1e-4)
    axes.set(
        xscale="log",
        xlim=(min(min(curve.far) for curve in curves.values()), None),
        ylim=(lowest - margin, 1 + margin),
        xlabel="false accept rate\n"
        f"(the dot, where a curve begins: {FEWEST_ACCEPTED} pairs of different people accepted)",
        ylabel="true accept rate",
        title=title,
    )
    show_percent(axes)
    axes.grid(which="minor", axis="x", alpha=0.12)
    axes.legend(loc="lower right")
    return figure


def draw_det(curves: Mapping[str, Curve], title: str = "") -> Figure:
    """Draw false reject against false accept rates, both as normal deviates.

    Scores that are normally distributed give straight lines on these axes. A point where nobody is
    rejected has no place on them and is left out.
    """
    from scipy import stats

    figure, axes = make_axes()
    rates: list[float] = []
    for number, (name, curve) in enumerate(curves.items()):
        points = [
            (far, 1 - tar) for far, tar in zip(curve.far, curve.tar) if far < 1 and 0 < tar < 1
        ]
        places = stats.norm.ppf(points) if points else np.empty((0, 2))
        axes.step(*places.T, where="post", label=name, **line_style(number))
        rates += [rate for point in points for rate in point]
    lowest, highest = (min(rates), max(rates)) if rates else (0.01, 0.5)
    for axis in (axes.xaxis, axes.yaxis):
        ticks = [tick for tick in DET_TICKS if lowest / 3 <= tick <= max(2 * highest, 0.1)]
        axis.set_ticks(stats.norm.ppf(ticks), [f"{100 * tick:g}%" for tick in ticks])
    axes.tick_params("x", labelrotation=45)
    axes.set(xlabel="false accept rate", ylabel="false reject rate", title=title)
    axes.legend(loc="upper right")
    return figure


def draw_scores(histograms: Mapping[str, Histogram], title: str = "") -> Figure:
    """Draw the distributions of scores, one panel per result, with the threshold if it is known.

    Pairs on the wrong side of the threshold are drawn in full colour. Shares are logarithmic, so
    that these few can be seen beside the many that are right.
    """
    figure = make_figure(7.5, 1.2 + 2.6 * len(histograms))
    panels = figure.subplots(len(histograms), sharex=True, squeeze=False)[:, 0]
    for axes, (name, histogram) in zip(panels, histograms.items()):
        edges = np.array(histogram.edges)
        is_above = edges[:-1] >= (math.inf if histogram.threshold is None else histogram.threshold)
        kinds = (
            ("different people", "accepted", histogram.impostor, is_above, COLOURS[1]),
            ("one person", "refused", histogram.genuine, ~is_above, COLOURS[0]),
        )
        for label, mistake, shares, is_wrong, colour in kinds:
            if not sum(shares):
                continue
            shares = np.array(shares)
            axes.stairs(
                shares, edges, fill=True, facecolor=colour + "55", edgecolor=colour, label=label
            )
            if histogram.threshold is not None:
                wrong = np.where(is_wrong, shares, 0)
                axes.stairs(
                    wrong,
                    edges,
                    fill=True,
                    facecolor=colour,
                    hatch="////",
                    edgecolor="white",
                    zorder=2,
                    label=f"{label}, {mistake}: {wrong.sum():.2%}",
                )
        if histogram.threshold is not None:
            label = f"threshold {histogram.threshold:.3f}, mean of the folds"
            axes.axvline(histogram.threshold, color="black", linestyle="--", label=label)
        smallest = min(share for share in histogram.genuine + histogram.impostor if share)
        axes.set(ylabel="share of the pairs (log)", title=name, yscale="log")
        axes.set_ylim(smallest / 2)
        show_percent(axes)
        show_grid(axes)
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    panels[-1].set_xlabel("cosine of a pair")
    figure.suptitle(title)
    return figure


def draw_cmc(curves: Mapping[str, Sequence[float]], title: str = "") -> Figure:
    """Draw the share of probes whose mate is among the first k, against k."""
    figure, axes = make_axes()
    for number, (name, rates) in enumerate(curves.items()):
        axes.plot(range(1, len(rates) + 1), rates, label=name, **line_style(number))
    axes.set(xscale="log", xlabel="rank", ylabel="identification rate", title=title)
    show_percent(axes)
    axes.xaxis.set_major_formatter(lambda rank, _: f"{rank:g}")
    axes.legend(loc="lower right")
    return figure


def draw_distractors(curves: Mapping[str, Mapping[int, float]], title: str = "") -> Figure:
    """Draw rank-1 rates against the number of distractors."""
    figure, axes = make_axes()
    for number, (name, rates) in enumerate(curves.items()):
        axes.plot(list(rates), list(rates.values()), marker="o", label=name, **line_style(number))
    axes.set(
        xscale="log",
        xlabel="number of distractors",
        ylabel="rank-1 identification rate",
        title=title,
    )
    show_percent(axes)
    axes.legend(loc="lower left")
    return figure


def class_cosines(weights: np.ndarray, bins: int = 400, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Count the cosines of pairs of class weights: all, or of a random part of many classes.

    Parameters
    ----------
    weights : (K, D)
    bins : int

    Returns
    -------
    edges, counts : (bins + 1,), (bins,) int
        From -1 to 1.
    """
    most = int(np.sqrt(2 * CLASS_PAIRS))
    if len(weights) > most:
        weights = weights[np.random.default_rng(seed).choice(len(weights), most, replace=False)]
    directions = metrics.normalized(np.asarray(weights, np.float32))
    edges = np.linspace(-1, 1, bins + 1)
    counts = np.zeros(bins, int)
    for start in range(0, len(directions), 512):
        block = directions[start : start + 512]
        cosines = np.clip(block @ directions[start:].T, -1, 1)
        counts += np.histogram(cosines[np.triu_indices_from(cosines, 1)], edges)[0]
    return edges, counts


def draw_classes(sets: Mapping[str, np.ndarray]) -> Figure:
    """Draw the distribution of the cosines between class weights (the paper's figure 4).

    Parameters
    ----------
    sets : mapping of (K, D)
    """
    figure, axes = make_axes()
    widest = 0.0
    for number, (name, weights) in enumerate(sets.items()):
        edges, counts = class_cosines(weights)
        centres, width = (edges[1:] + edges[:-1]) / 2, edges[1] - edges[0]
        share = counts / max(counts.sum(), 1)
        mean = float(share @ centres)
        sigma = float(np.sqrt(share @ (centres - mean) ** 2))
        label = f"{name} ({len(weights):,} classes): mean {mean:+.3f}, 3σ {3 * sigma:.3f}"
        axes.plot(centres, share / width, label=label, **line_style(number))
        seen = np.abs(centres[counts > 0])
        widest = max(widest, float(seen.max()) if seen.size else 0.0)
    dimensions = {weights.shape[1] for weights in sets.values()}
    for dimension in sorted(dimensions):
        # Of random directions in D dimensions cosines have a deviation of 1 / sqrt(D).
        x = np.linspace(-1, 1, 801)
        density = np.exp(-dimension * x**2 / 2) * np.sqrt(dimension / (2 * np.pi))
        axes.fill_between(x, density, color="grey", alpha=0.25, lw=0, zorder=0)
        label = f"random directions, about N(0, 1/{dimension})"
        axes.plot([], [], color="grey", alpha=0.4, lw=6, label=label)
    limit = min(1.0, max(1.15 * widest, 4 / np.sqrt(min(dimensions))))
    axes.set(
        xlim=(-limit, limit),
        ylim=(0, 1.35 * axes.get_ylim()[1]),  # room for the names
        title="How far apart are the classes?",
        xlabel="cosine between the weights of two classes, 0 if they are orthogonal",
        ylabel="density of the pairs of classes",
    )
    axes.legend(fontsize=8, loc="upper right")
    return figure


def draw_scatter(embeddings: np.ndarray, labels: np.ndarray, title: str = "") -> Figure:
    """Draw embeddings on the sphere, one colour per class (the paper's figure 1).

    Parameters
    ----------
    embeddings : (n, 3)
    labels : (n,) int
    """
    figure = make_figure(5, 5)
    axes = figure.add_subplot(projection="3d")
    scatter(axes, embeddings, labels)
    axes.set_title(title)
    if len(np.unique(labels)) <= 10:
        axes.legend(title="class", fontsize=8, loc="center left", bbox_to_anchor=(0.98, 0.5))
    return figure


def scatter(
    axes: Any, embeddings: np.ndarray, labels: np.ndarray, rays: np.ndarray | None = None
) -> None:
    """Draw embeddings on the sphere into axes of three dimensions.

    Parameters
    ----------
    axes : mpl_toolkits.mplot3d.axes3d.Axes3D
    embeddings : (n, 3)
    labels : (n,) int
    rays : (classes, 3), optional
        Directions to draw from the centre, one per class; by default the mean of its embeddings.
    """
    if embeddings.ndim != 2 or embeddings.shape[1] != 3:
        raise ValueError(
            f"embeddings {embeddings.shape} are not of width 3: this figure needs a network "
            "trained with --emb-size 3"
        )
    points = metrics.normalized(np.asarray(embeddings, np.float64))
    turn, height = np.mgrid[0 : 2 * np.pi : 37j, 0 : np.pi : 19j]
    sphere = (np.cos(turn) * np.sin(height), np.sin(turn) * np.sin(height), np.cos(height))
    axes.plot_wireframe(*sphere, color="grey", alpha=0.15, linewidth=0.5)
    colours = [*COLOURS, "#999999", "#882255", "#44aa99"]
    for number, label in enumerate(np.unique(labels)):
        of_class = points[labels == label]
        colour = colours[number % len(colours)]
        axes.scatter(*of_class.T, s=6, color=colour, label=str(label), depthshade=True)
        ray = of_class.mean(axis=0) if rays is None else np.asarray(rays[number], np.float64)
        axes.plot(*zip((0, 0, 0), ray / np.linalg.norm(ray)), color=colour, linewidth=1.5)
    axes.set_box_aspect((1, 1, 1), zoom=1.3)  # there are no labels to leave room for
    axes.set(xlim=(-1, 1), ylim=(-1, 1), zlim=(-1, 1))
    axes.set_axis_off()


def save(figure: Figure, path: str) -> None:
    """Write a figure in the format its name ends in."""
    extension = os.path.splitext(path)[1][1:].lower()
    if extension not in FORMATS:
        raise ValueError(f"a figure's name must end in .png, .pdf or .svg, not {path!r}")
    with AtomicFile(path) as file:
        figure.savefig(file, format=extension, dpi=200)


def save_both(figure: Figure, stem: str) -> None:
    """Write a figure to look at (.png) and one to print (.pdf)."""
    for extension in ("png", "pdf"):
        save(figure, f"{stem}.{extension}")


def _draw_rank1(rates: Mapping[str, Mapping[str, float]], title: str) -> Figure:
    return draw_distractors(
        {
            name: {int(size): rate for size, rate in by_size.items()}
            for name, by_size in rates.items()
        },
        title,
    )


def _draw_curves(curves: Mapping[str, Mapping], title: str) -> Figure:
    return draw_roc({name: Curve(**curve) for name, curve in curves.items()}, title)


def _draw_histograms(histograms: Mapping[str, Mapping], title: str) -> Figure:
    return draw_scores({name: Histogram(**shares) for name, shares in histograms.items()}, title)


# The entries of a command's result that can be drawn, and the functions that draw them.
OF_RESULTS = {
    "roc": _draw_curves,
    "scores": _draw_histograms,
    "cmc": draw_cmc,
    "distractors": _draw_rank1,
}


def save_all(results: Sequence[Mapping[str, Any]], folder: str, prefix: str = "") -> None:
    """Draw every kind of entry (roc, scores, …) that results hold, all results on one figure."""
    for kind, draw in OF_RESULTS.items():
        entries = {result["name"]: result[kind] for result in results if kind in result}
        if entries:
            figure = draw(entries, _common_target(results))
            save_both(figure, os.path.join(folder, f"{prefix}{kind}"))


def _common_target(results: Sequence[Mapping[str, Any]]) -> str:
    """Return what all results were measured on, as a figure's title; empty if they differ."""
    targets = {result.get("target", "") for result in results}
    return targets.pop() if len(targets) == 1 else ""


def _read_results(paths: Sequence[str], kind: str) -> tuple[dict[str, Any], str]:
    """Collect one kind of entry from all results in .json files, by name, and their title."""
    entries: dict[str, Any] = {}
    drawn: list[Mapping[str, Any]] = []
    for path in paths:
        try:
            with open(path, encoding="utf-8") as file:
                results = json.load(file)["results"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{path}: not a file that a command of eval wrote with --json"
            ) from None
        stem = os.path.splitext(os.path.basename(path))[0]
        for result in results:
            if kind in result:
                name = result["name"] if len(paths) == 1 else f"{stem}: {result['name']}"
                entries[name] = result[kind]
                drawn.append(result)
    if not entries:
        raise ValueError(f"{', '.join(paths)}: there is no {kind} in any result")
    return entries, _common_target(drawn)


def _read_arrays(paths: Sequence[str]) -> dict[str, np.ndarray]:
    arrays = {}
    for path in paths:
        array = map_npy(path)
        if array.ndim != 2:
            raise ValueError(f"{path}: class weights are one array (classes, width)")
        arrays[os.path.splitext(os.path.basename(path))[0]] = array
    return arrays


def _read_labelled(path: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return file["embeddings"], file["labels"]
    except (ValueError, KeyError, TypeError, AttributeError, EOFError):
        raise ValueError(f"{path}: it must be a .npz of `embeddings` and `labels`") from None


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = make_parser("plots", __doc__)
    parser.add_argument("kind", choices=[*OF_RESULTS, "classes", "scatter"], help="what to draw")
    parser.add_argument("files", nargs="+", help="results (.json) or arrays (.npy, .npz)")
    parser.add_argument("--output", required=True, help="the figure: .png, .pdf or .svg")
    return parser


@command(parser=build_parser)
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    if args.kind == "classes":
        figure = draw_classes(_read_arrays(args.files))
    elif args.kind == "scatter":
        if len(args.files) > 1:
            raise ValueError("scatter draws one file at a time")
        figure = draw_scatter(*_read_labelled(args.files[0]))
    else:
        figure = OF_RESULTS[args.kind](*_read_results(args.files, args.kind))
    save(figure, args.output)
    print(args.output)


if __name__ == "__main__":
    sys.exit(main())
