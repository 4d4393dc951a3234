r"""Find wrong labels, split identities and copies in a dataset; write it without them if asked.

    python tools/clean.py --input faces --model models/y1/model,0
    python tools/clean.py --input faces --embeddings faces.npy --output cleaned \
        --drop-outliers --merge-identities --drop-duplicates
    python tools/clean.py --input faces --output cleaned --apply cleaning/suggestions.csv

Without --output it only looks: --report gets report.html, a page to look at, suggestions.csv, a
list to edit, and cosines.csv, how near each image is to the others of its identity. --apply carries
out such a list, without the lines you have removed. Thresholds are chosen by what the network says
of strangers and of the halves of one identity; see tools/README.md.
"""

from __future__ import annotations

if not __package__:
    import require_dsoftmax

import argparse
import collections
import os
import sys
from typing import Any

import numpy as np

from dsoftmax.recognition.common.checks import at_least
from dsoftmax.recognition.common.cli import (
    add_json_flag,
    add_threads_flag,
    command,
    cosine,
    make_parser,
    print_json,
)
from dsoftmax.recognition.data.cleaning.carrying_out import carry_out
from dsoftmax.recognition.data.cleaning.page import write_page
from dsoftmax.recognition.data.cleaning.suggestions import (
    DUPLICATE,
    FEW_IMAGES,
    OUTLIER,
    REASONS,
    SAME_PERSON,
    UNREADABLE,
    Suggestion,
    find_faults,
    find_small,
    read_suggestions,
    write_cosines,
    write_suggestions,
)
from dsoftmax.recognition.data.merging import load_embeddings
from dsoftmax.recognition.data.records import Records

PAGE, LIST, COSINES = "report.html", "suggestions.csv", "cosines.csv"
# The flags that choose what is carried out, each with the reason of its suggestions.
CHANGES = {
    "drop-outliers": OUTLIER,
    "merge-identities": SAME_PERSON,
    "drop-duplicates": DUPLICATE,
    "drop-small": FEW_IMAGES,
    "drop-unreadable": UNREADABLE,
}


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = make_parser("clean", __doc__)
    parser.add_argument("--input", required=True, help="folder of the dataset")
    add_json_flag(parser)
    add_threads_flag(parser)
    embedding = parser.add_argument_group("embeddings")
    embedding.add_argument("--model", help="network that embeds the images: prefix,epoch or .onnx")
    embedding.add_argument("--embeddings", help=".npy file with one row per image, in order")
    embedding.add_argument("--batch-size", type=int, default=32, help="images at a time")
    looking = parser.add_argument_group("what to look for")
    looking.add_argument(
        "--outlier-threshold",
        type=cosine,
        help="cosine below which an image does not belong to its identity (default: what 1 %% of "
        "strangers reach)",
    )
    looking.add_argument(
        "--same-person-threshold",
        type=cosine,
        help="cosine from which two identities are one person (default: what the halves of 95 %% "
        "of the identities reach, if no pair of strangers should)",
    )
    looking.add_argument(
        "--min-images", type=int, default=2, help="identities with fewer images are small"
    )
    report = parser.add_argument_group("report")
    report.add_argument("--report", default="cleaning", help="folder of the page and the list")
    report.add_argument("--most", type=int, default=100, help="of each kind on the page")
    output = parser.add_argument_group("cleaned dataset")
    output.add_argument("--output", help="folder of the cleaned dataset")
    output.add_argument("--overwrite", action="store_true", help="replace an existing dataset")
    output.add_argument("--apply", metavar="LIST", help="carry out a list of suggestions")
    for flag, reason in CHANGES.items():
        output.add_argument(
            f"--{flag}", action="store_true", help=f'carry out what is suggested for "{reason}"'
        )
    return parser


@command(parser=build_parser)
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    _check(args)
    records = Records(args.input)
    if args.apply:
        changes, results = read_suggestions(args.apply, records.labels), {}
    else:
        changes, results = _look(records, args)
    if args.output:
        done = carry_out(records, args.input, changes, args.output, args.overwrite)
        results["output"] = {"path": args.output, **done}
        if args.json != "-":
            print(
                f"{done['images']} images of {done['identities']} identities in {args.output}; "
                f"{len(records) - done['images']} images left out"
            )
    if args.json:
        print_json(results, args.json)


def _chosen(args: argparse.Namespace) -> list[str]:
    return [reason for flag, reason in CHANGES.items() if getattr(args, flag.replace("-", "_"))]


def _check(args: argparse.Namespace) -> None:
    """Refuse flags that do not fit together, before anything is computed."""
    for name in ("batch_size", "threads", "min_images", "most"):
        at_least(f"--{name.replace('_', '-')}", getattr(args, name), 0, above=name != "most")
    flags = ", ".join(f"--{flag}" for flag in CHANGES)
    if args.apply and not args.output:
        raise ValueError("--apply needs --output, the folder of the cleaned dataset")
    if args.apply and (_chosen(args) or args.model or args.embeddings):
        raise ValueError(
            f"--apply carries out a list as it is: leave out --model, --embeddings, {flags}"
        )
    if args.output and not (args.apply or _chosen(args)):
        raise ValueError(f"--output: say what to carry out, by --apply or some of {flags}")
    if _chosen(args) and not args.output:
        raise ValueError("the cleaned dataset needs a folder: give --output")
    if args.output and os.path.realpath(args.output) == os.path.realpath(args.input):
        raise ValueError("--output is the folder of --input: choose another one")
    if not args.apply and bool(args.model) == bool(args.embeddings):
        raise ValueError("give either --model or --embeddings (or --apply, to carry out a list)")


def _look(records: Records, args: argparse.Namespace) -> tuple[list[Suggestion], dict[str, Any]]:
    """Write the report; return the suggestions to carry out, and results for JSON."""
    findings = find_faults(
        records,
        _embeddings(records, args),
        args.outlier_threshold,
        args.same_person_threshold,
        args.threads,
    )
    chosen = _chosen(args) or REASONS
    changes = [change for change in findings.suggestions if change.reason in chosen]
    small = find_small(findings.members, records.names, changes, args.min_images)
    everything = findings.suggestions + small
    if FEW_IMAGES in chosen:
        changes += small
    os.makedirs(args.report, exist_ok=True)
    page, table, cosines = (os.path.join(args.report, name) for name in (PAGE, LIST, COSINES))
    write_suggestions(table, everything)
    write_cosines(cosines, findings)
    write_page(page, records, findings, everything, args.most)
    counts = collections.Counter(suggestion.reason for suggestion in everything)
    results = {
        "input": args.input,
        "images": len(records),
        "identities": len(findings.members),
        "thresholds": findings.thresholds._asdict(),
        "suggestions": {reason: counts[reason] for reason in REASONS},
        "page": page,
        "list": table,
        "cosines": cosines,
    }
    if findings.warning:
        print(f"warning: {findings.warning}", file=sys.stderr)
    if args.json != "-":
        _print(results)
    return changes, results


def _embeddings(records: Records, args: argparse.Namespace) -> np.ndarray:
    if args.embeddings:
        return load_embeddings(args.embeddings, len(records))
    from dsoftmax.eval.dataset_embeddings import embed_dataset

    folder = os.path.join(args.report, "embeddings")
    return embed_dataset(records, args.model, folder, args.batch_size, args.threads)


def _print(results: dict[str, Any]) -> None:
    thresholds = results["thresholds"]
    print(
        f"{results['images']} images of {results['identities']} identities; an outlier has a "
        f"cosine below {thresholds['outlier']:.3f}, one person from "
        f"{thresholds['same_person']:.3f}"
    )
    for reason, count in results["suggestions"].items():
        print(f"{reason:<12} {count}")
    print(f"look at {results['page']}, edit {results['list']}")


if __name__ == "__main__":
    sys.exit(main())
