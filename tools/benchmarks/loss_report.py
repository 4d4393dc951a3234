"""Tables and the plot of what `loss` measures, beside the paper's figures."""

from __future__ import annotations

from typing import Any

from dsoftmax.eval import plots
from dsoftmax.losses.presets import resolve

# Seconds per step in the paper's Table 3: of the loss layer, and of the whole model.
PAPER = {
    "nsoftmax": (3.12, 3.96),
    "rand_softmax": (0.20, 1.04),
    "hf_softmax": (2.04, 2.88),
    "dsoftmax_k": (0.21, 1.05),
}
PAPER_FOREST_SECONDS = 1.83
MEGABYTE = 1 << 20


def tables(results: list[dict[str, Any]]) -> str:
    """Lay out the results of `loss.measure`."""
    return "\n\n".join((paper_table(results), cost_table(results), "\n".join(remarks(results))))


def paper_table(results: list[dict[str, Any]]) -> str:
    """Lay out the times like the paper's Table 3, beside the paper's figures."""
    full = next((r for r in results if resolve(r["loss"]).negatives == "all"), None)
    head = f"{'Loss':24}{'Loss Avg. Time (s)':>20}{'x full':>9}"
    lines = [
        f"{'':24}{'here':>20}{'':9}  |{'the paper':>12}",
        f"{head}  |{'Loss (s)':>12}{'x full':>9}{'Total (s)':>11}",
    ]
    for result in results:
        seconds = result["seconds"]
        speedup = f"{full['seconds'] / seconds:.1f}" if full else ""
        line = f"{result['name']:24}{seconds:20.3f}{speedup:>9}  |"
        if result["loss"] in PAPER:
            loss, total = PAPER[result["loss"]]
            line += f"{loss:12.2f}{PAPER['nsoftmax'][0] / loss:9.1f}{total:11.2f}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def cost_table(results: list[dict[str, Any]]) -> str:
    """Lay out where the time and the memory go."""
    columns = (
        *("ms", "low-high", "floor", "x floor", "sampler", "forest"),
        *("peak MB", "above MB", "read MB", "written MB", "of copy"),
    )
    widths = (9, 15, 9, 9, 9, 9, 9, 10, 9, 12, 9)
    lines = [f"{'':24}" + "".join(f"{title:>{w}}" for title, w in zip(columns, widths))]
    for result in results:
        share = result["sampler"] / result["seconds"]
        is_forest = resolve(result["loss"]).negatives == "forest"
        cells = (
            f"{result['seconds'] * 1e3:.1f}",
            f"{result['low'] * 1e3:.0f}-{result['high'] * 1e3:.0f}",
            f"{result['floor'] * 1e3:.1f}",
            f"{result['ratio']:.2f}",
            "" if is_forest else f"{share:.1%}",
            f"{share:.1%}" if is_forest else "",
            f"{result['peak_bytes'] / MEGABYTE:.0f}",
            f"{result['working_bytes'] / MEGABYTE:.0f}",
            f"{result['bytes_read'] / MEGABYTE:.0f}",
            f"{result['bytes_written'] / MEGABYTE:.0f}",
            f"{_share_of_copy(result):.0%}",
        )
        lines.append(
            f"{result['name']:24}" + "".join(f"{cell:>{w}}" for cell, w in zip(cells, widths))
        )
    return "\n".join(lines)


def _share_of_copy(result: dict[str, Any]) -> float:
    """Return the bandwidth of a step's weights and momenta, as a share of a plain copy's."""
    moved = result["bytes_read"] + result["bytes_written"]
    return moved / result["seconds"] / result["copy_bandwidth"]


def remarks(results: list[dict[str, Any]]) -> list[str]:
    """Explain the columns."""
    floors = (f"{way} {seconds * 1e3:.1f} ms" for way, seconds in results[0]["floors"].items())
    bandwidth = results[0]["copy_bandwidth"] / 1e9
    lines = [
        "floor: the three matrix products alone, by the fastest way MXNet has here",
        f"({results[0]['name']}: {', '.join(floors)}); sampler, forest: their share of the step;",
        "above: the peak above weights and momenta; read, written: weights and momenta, once each;",
        f"of copy: as a share of what a plain copy moves ({bandwidth:.0f} GB/s).",
    ]
    for result in results:
        if resolve(result["loss"]).negatives == "forest":
            share = result["sampler"] / result["seconds"]
            paper = PAPER_FOREST_SECONDS / PAPER["hf_softmax"][0]
            lines.append(
                f"{result['name']}: the forest is {share:.0%} of a step, {result['rebuild']:.3f} s "
                f"of it for rebuilding it now and then; the paper's was {paper:.0%}."
            )
    groups = {result["together_with"] for result in results}
    if len(groups) > 1:
        lines.append(
            "Memory was too small for all at once; together ran " + "; ".join(groups) + "."
        )
    return lines


def draw(results: list[dict[str, Any]], path: str) -> None:
    """Plot the time of a step against the number of classes."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    figure = plots.make_figure(7, 4.5)
    axes = figure.subplots()
    markers = "osD^vP*X"
    names = list(dict.fromkeys(result["name"] for result in results))
    for number, name in enumerate(names):
        of_name = [result for result in results if result["name"] == name]
        classes = [result["classes"] for result in of_name]
        seconds = [result["seconds"] for result in of_name]
        low = [result["seconds"] - result["low"] for result in of_name]
        high = [result["high"] - result["seconds"] for result in of_name]
        line = axes.errorbar(
            classes, seconds, (low, high), marker=markers[number % 8], capsize=3, label=name
        )
        axes.plot(
            classes,
            [result["floor"] for result in of_name],
            linestyle=":",
            color=line.lines[0].get_color(),
        )
    axes.plot([], [], ":", color="grey", label="its matrix products alone")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="classes",
        ylabel="seconds per step",
        title=f"Batches of {results[0]['batch_size']}, width {results[0]['width']}, "
        f"{round(results[0]['sample_rate'] * results[0]['classes']):,} sampled classes",
    )
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda x, _: f"{x / 1e6:g}M" if x >= 1e6 else f"{x / 1e3:g}K")
    )
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # the axis may span one power of ten
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.grid(which="both", alpha=0.25)
    axes.legend()
    plots.save(figure, path)
