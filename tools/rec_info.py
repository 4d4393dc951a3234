"""Describe a dataset: identities, images, bad records, gaps in the labels.

python tools/rec_info.py --input faces_emore
python tools/rec_info.py --input faces_emore --plot histogram.png --json
python tools/rec_info.py --input faces_emore --rebuild-index
"""

from __future__ import annotations

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
from dsoftmax.recognition.common.parallel import map_ordered
from dsoftmax.recognition.common.progress import progress
from dsoftmax.recognition.data.images import ImageError, decode
from dsoftmax.recognition.data.recordio import RecordError
from dsoftmax.recognition.data.records import Records, rebuild_index

IMAGES_PER_TASK = 64


def find_bad_images(records: Records, threads: int) -> dict[int, str]:
    """Decode every image.

    Returns
    -------
    dict of int to str
        The images that can't be read or decoded, or whose label differs from their identity's, and
        why.
    """
    labels = records.labels

    def check(start: int) -> dict[int, str]:
        bad = {}
        for image in range(start, min(start + IMAGES_PER_TASK, len(records))):
            try:
                label, encoded = records.read(image)
                decode(encoded)
            except (ImageError, RecordError) as error:
                bad[image] = str(error)
            else:
                if label != labels[image]:
                    bad[image] = f"label {label} among the images of identity {labels[image]}"
        return bad

    starts = range(0, len(records), IMAGES_PER_TASK)
    bad: dict[int, str] = {}
    with progress(None, total=len(records), desc="decoding", unit="images") as bar:
        for start, bad_here in zip(starts, map_ordered(check, starts, threads)):
            bad.update(bad_here)
            bar.update(min(IMAGES_PER_TASK, len(records) - start))
    return bad


def describe(records: Records, bad_images: dict[int, str] | None) -> dict[str, Any]:
    """Summarize a dataset as values for JSON; `bad_images` is None if nobody looked for them."""
    per_label = np.bincount(records.labels)
    per_identity = per_label[per_label > 0]
    counts, identities = np.unique(per_identity, return_counts=True)
    height, width = records.image_size
    return {
        "path": records.path,
        "style": records.style,
        "identities": len(per_identity),
        "images": len(records),
        "num_classes": records.num_classes,
        "property": list(records.property) if records.property else None,
        "image_size": [height, width],
        "images_per_identity": {
            "min": int(per_identity.min()),
            "median": float(np.median(per_identity)),
            "mean": round(float(per_identity.mean()), 3),
            "max": int(per_identity.max()),
            "histogram": {int(n): int(many) for n, many in zip(counts, identities)},
        },
        "label_gaps": [int(label) for label in np.flatnonzero(per_label == 0)],
        "bad_images": None
        if bad_images is None
        else [
            {
                "image": image,
                "key": int(records.keys[image]),
                "offset": int(records.offsets[image]),
                "why": why,
            }
            for image, why in sorted(bad_images.items())
        ],
    }


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
