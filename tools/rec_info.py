"""Describe a dataset: identities and their names, images, bad records, gaps in the labels.

python tools/rec_info.py --input faces_emore
python tools/rec_info.py --input faces_emore --plot histogram.png --json
python tools/rec_info.py --input faces_emore --rebuild-index
"""

from __future__ import annotations

if not __package__:
    import require_dsoftmax

import argparse
import sys
from typing import Any

import numpy as np

from dsoftmax.eval import plots
from dsoftmax.recognition.common.cli import (
    add_json_flag,
    add_threads_flag,
    command,
    make_parser,
    print_json,
    some_of,
)
from dsoftmax.recognition.data.inspection import describe, find_bad_images
from dsoftmax.recognition.data.records import Records, rebuild_index


def one_line(info: dict[str, Any]) -> str:
    """Put a description into one line."""
    spread = info["images_per_identity"]
    bad = info["bad_images"]
    return (
        f"{info['path']}: {info['identities']} identities, {info['images']} images, "
        f"{spread['min']} to {spread['max']} an identity (median {spread['median']:g}, mean "
        f"{spread['mean']:.2f}), {'?' if bad is None else len(bad)} bad, "
        f"{len(info['label_gaps'])} label gaps, {info['image_size'][0]}x{info['image_size'][1]}, "
        f"{info['style']}"
    )


def name_lines(records: Records) -> list[str]:
    """Say whom the labels stand for, and how many images each has."""
    per_label = np.bincount(records.labels, minlength=max(records.names) + 1)
    return [
        f"{label}: {name} ({per_label[label]})" for label, name in sorted(records.names.items())
    ]


def plot_histogram(info: dict[str, Any], path: str) -> None:
    """Draw how many identities have how many images."""
    from matplotlib.ticker import ScalarFormatter

    counts = np.array(list(info["images_per_identity"]["histogram"].items()))
    most = counts[:, 0].max()
    is_long = most > 40  # a tail of large identities is only visible on logarithmic axes
    bins = (
        np.unique(np.geomspace(1, most + 1, 40).astype(int)) if is_long else np.arange(1, most + 2)
    )
    figure = plots.make_figure(7, 4)
    axes = figure.subplots()
    axes.hist(counts[:, 0], bins - 0.5, weights=counts[:, 1], color="#4477aa", edgecolor="white")
    axes.set(
        xlabel="images of an identity",
        ylabel="identities",
        title=f"{info['identities']:,} identities, {info['images']:,} images",
    )
    if is_long:
        axes.set(xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(ScalarFormatter())
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    plots.save(figure, path)


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = make_parser("rec_info", __doc__)
    parser.add_argument("--input", required=True, help="the dataset's folder or .rec file")
    add_json_flag(parser)
    parser.add_argument("--plot", metavar="FILE", help="draw the images per identity (.png, .pdf)")
    parser.add_argument(
        "--no-decode",
        action="store_true",
        help="read the labels only: fast, but does not find broken images",
    )
    parser.add_argument(
        "--rebuild-index",
        action="store_true",
        help="first write a new .idx, by reading the whole .rec",
    )
    add_threads_flag(parser)
    return parser


@command(parser=build_parser)
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    if args.rebuild_index:
        rebuild_index(args.input)
    records = Records(args.input)
    bad = None if args.no_decode else find_bad_images(records, args.threads)
    info = describe(records, bad)
    if args.plot:
        plot_histogram(info, args.plot)
    if args.json:
        print_json(info, args.json)
        return
    print(one_line(info))
    if info["names"]:
        print("Names:")
        print(some_of(name_lines(records)))
    if bad:
        print("Bad images:")
        print(
            some_of(
                [
                    f"{entry['image']} (key {entry['key']}): {entry['why']}"
                    for entry in info["bad_images"]
                ]
            )
        )
    if info["label_gaps"]:
        gaps = info["label_gaps"]
        print(
            f"Labels without an image: {', '.join(map(str, gaps[:10]))}"
            f"{', ...' if len(gaps) > 10 else ''}"
        )
    if records.property and records.property.num_classes != max(records.labels) + 1:
        print(
            f"The property file says {records.property.num_classes} classes, the labels end at "
            f"{max(records.labels)}."
        )


if __name__ == "__main__":
    sys.exit(main())
