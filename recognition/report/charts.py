"""Draw the figures of a run's report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Sequence

import numpy as np

from dsoftmax.eval.plots import COLOURS, line_style, make_axes, make_figure, show_percent
from dsoftmax.recognition.report.measures import Positives, RowAges
from dsoftmax.recognition.step_times import PARTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dsoftmax.recognition.report.run_folder import RunFolder

SIZE = (6.4, 3.6)  # inches
MOST_POINTS = 400  # per curve; more are averaged, and their range is drawn
FEWEST_PER_GROUP = 5  # images, in the figure of images per class


def draw_columns(run: RunFolder, title: str, names: dict[str, str], unit: str) -> Figure | None:
    """Draw columns of ``metrics.csv``, by their names in it, against the steps.

    Long runs have more lines than a figure has room for: each point is then the mean of some.
    None if no column has two values.
    """
    figure, axes = make_axes(*SIZE)
    lines = {label: run.column(name) for name, label in names.items()}
    lines = {label: line for label, line in lines.items() if len(line[0]) > 1}
    if not lines:
        return None
    for number, (label, (steps, values)) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        parts = np.array_split(np.arange(len(steps)), min(MOST_POINTS, len(steps)))
        x = [steps[part].mean() for part in parts]
        if len(steps) > MOST_POINTS:
            low, high = zip(*((values[part].min(), values[part].max()) for part in parts))
            axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
        means = [values[part].mean() for part in parts]
        axes.plot(x, means, label=label, color=colour, linewidth=1.6)
    axes.set_title(title, loc="left", pad=24 if len(lines) > 1 else 6)
    axes.set(xlabel="step", ylabel=unit)
    axes.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")
    if len(lines) > 1:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncol=3, fontsize=9, frameon=False)
    return figure


def draw_positives(found: Positives, termination: float | None) -> Figure:
    """Draw how z_y is distributed, with the cosine at which the loss stops to pull."""
    figure, axes = make_axes(*SIZE)
    edges = np.linspace(min(found.z_y.min(), 0.0), 1.0, 51)
    counts, _ = np.histogram(np.clip(found.z_y, edges[0], 1), edges)
    axes.stairs(
        counts / len(found.z_y), edges, fill=True, facecolor=COLOURS[0] + "55", edgecolor=COLOURS[0]
    )
    mean = found.z_y.mean()
    axes.axvline(mean, color=COLOURS[0], linewidth=1.6, label=f"mean {mean:.3f}")
    if termination is not None:
        label = f"the loss lets go at {termination:.3f}"
        axes.axvline(termination, color="black", linestyle="--", label=label)
    axes.set(xlabel="z_y, cosine of an image and its class", ylabel="share of the images")
    show_percent(axes)
    axes.legend(loc="upper left", fontsize=9)
    return figure


def draw_images_per_class(found: Positives) -> Figure | None:
    """Draw z_y against the number of images of the class; None if all classes have as many."""
    sizes = found.images_per_class[found.classes]
    if sizes.min() == sizes.max():
        return None
    figure, axes = make_axes(*SIZE)
    axes.scatter(sizes, found.z_y, s=7, color=COLOURS[5], alpha=0.5, linewidth=0, rasterized=True)
    if sizes.max() > 4 * sizes.min():
        axes.set_xscale("log")
        edges = np.geomspace(sizes.min(), sizes.max() + 1, 9)
    else:
        edges = np.linspace(sizes.min(), sizes.max() + 1, 9)
    groups = [(sizes >= low) & (sizes < high) for low, high in zip(edges, edges[1:])]
    groups = [group for group in groups if group.sum() >= FEWEST_PER_GROUP]
    x = [np.median(sizes[group]) for group in groups]
    low, middle, high = (
        [np.quantile(found.z_y[group], share) for group in groups] for share in (0.25, 0.5, 0.75)
    )
    axes.fill_between(x, low, high, color=COLOURS[0], alpha=0.25, label="middle half")
    axes.plot(x, middle, marker="o", label="median", **line_style(0))
    axes.xaxis.set_major_formatter(lambda size, _: f"{size:g}")
    axes.xaxis.set_minor_formatter(lambda *_: "")
    axes.set(xlabel="images of the class", ylabel="z_y")
    axes.legend(loc="lower right", fontsize=9)
    return figure


def draw_row_ages(found: RowAges, expected_rate: float) -> Figure:
    """Draw which share of the class rows was not used for how many steps."""
    figure, axes = make_axes(*SIZE)
    known = np.sort(found.ages[found.ages >= 0])
    ages = np.arange(found.steps + 1)
    waiting = 1 - np.searchsorted(known, ages, side="left") / len(found.ages)
    axes.step(ages, waiting, where="post", label="class rows", **line_style(0))
    label = f"drawn at random, rate {expected_rate:.3g}"
    axes.plot(ages, (1 - expected_rate) ** ages, label=label, **line_style(1))
    axes.set(
        xlabel="steps since a class row was last used",
        ylabel="share of the rows",
        yscale="log",
        ylim=(waiting[waiting > 0].min() / 3, 1.5),
    )
    axes.legend(loc="lower left", fontsize=9)
    return figure


def draw_times(seconds: dict[str, float]) -> Figure:
    """Draw the parts of a step as one bar."""
    figure = make_figure(6.4, 1.5)
    axes = figure.subplots()
    total, start = max(sum(seconds[part] for part in PARTS), 1e-12), 0.0
    for number, part in enumerate(PARTS):
        width = 1000 * seconds[part]
        label = f"{part} {width:.3g} ms ({seconds[part] / total:.0%})"
        axes.barh(0, width, left=start, color=COLOURS[number], label=label)
        start += width
    axes.set(xlabel="milliseconds per measured step", yticks=[], xlim=(0, start))
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncol=2, fontsize=9, frameon=False)
    return figure


def draw_best(rows: Sequence[dict[str, Any]]) -> Figure:
    """Draw the accuracy of each target at each verification, and the best so far."""
    figure, axes = make_axes(*SIZE)
    for number, target in enumerate(dict.fromkeys(row["target"] for row in rows)):
        of_target = [row for row in rows if row["target"] == target]
        steps = [row["step"] for row in of_target]
        accuracies = [row["accuracy"] for row in of_target]
        colour = COLOURS[number % len(COLOURS)]
        axes.errorbar(
            steps,
            accuracies,
            [row["deviation"] for row in of_target],
            fmt="o",
            color=colour,
            capsize=3,
            label=target,
        )
        axes.step(steps, np.maximum.accumulate(accuracies), where="post", color=colour)
    axes.set(xlabel="step", ylabel="accuracy")
    axes.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")
    show_percent(axes)
    axes.legend(loc="lower right", fontsize=9)
    return figure
