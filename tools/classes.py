r"""Show and change the classes of a trained model: add, drop, merge, renumber, join.

    python tools/classes.py show --state models/y1-dsoftmax-mine
    python tools/classes.py export --state models/y1-dsoftmax-mine --output classes.npy
    python tools/classes.py add --state models/y1-dsoftmax-mine --dataset mine \
        --output models/y1-dsoftmax-mine-grown
    python tools/classes.py drop --state models/y1-dsoftmax-mine --classes 3,17-20 \
        --output models/y1-dsoftmax-mine-fewer
    python tools/classes.py remap --state models/y1-dsoftmax-emore --dataset joint \
        --set faces_emore --output models/y1-dsoftmax-joint

Each change reads the newest state of a run (or the state you name), leaves it alone, and writes a
state to the folder of another run: `train.py --resume` goes on from there. Network, step, class
weights and their momenta are kept to the bit. --output is the folder that `train.py` makes of
--network, --loss, --dataset and --extra-model-name.
"""

from __future__ import annotations

if not __package__:
    import require_dsoftmax

import argparse
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from dsoftmax.recognition.common.cli import (
    add_json_flag,
    add_threads_flag,
    command,
    make_parser,
    print_json,
)

if TYPE_CHECKING:
    from dsoftmax.recognition.growing import Written

ACTIONS = {
    "show": "say how many classes there are, how long their weights are, and which are close",
    "export": "write class weights to a .npy file, (classes, width)",
    "import": "put class weights of a file into a state",
    "add": "add the new people of a dataset, by the mean embeddings of their images",
    "drop": "leave classes out and number the others without gaps",
    "merge": "make several classes one, by the mean of their weights and momenta",
    "remap": "number classes as another dataset does, and add its new people",
    "join": "put the classes of another head after those of a state",
}


def label_list(text: str) -> np.ndarray:
    """Parse labels like ``3,17-20``."""
    try:
        ends = [tuple(map(int, part.split("-"))) for part in text.split(",")]
        if any(len(pair) > 2 or pair[0] > pair[-1] for pair in ends):
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"labels are like 3,17-20, not {text!r}") from None
    return np.concatenate([np.arange(pair[0], pair[-1] + 1) for pair in ends])


def share_list(text: str) -> np.ndarray:
    """Parse shares like ``12,3``."""
    try:
        return np.array([float(part) for part in text.split(",")])
    except ValueError:
        raise argparse.ArgumentTypeError(f"shares are numbers like 12,3, not {text!r}") from None


def lines(shown: dict[str, Any]) -> list[str]:
    """Lay out the description of the classes."""
    kept = "" if shown["kept_as"] == "float32" else f", in memory {shown['kept_as']}"
    loss = shown["loss"]["preset"]
    described = [
        f"{shown['path']}: {shown['classes']} classes of width {shown['width']}, "
        f"{shown['dtype']}{kept}, of {loss} after {shown['step']} steps by {shown['optimizer']}",
        f"lengths of class weights: {_spread(shown['lengths'])}",
    ]
    for name, summary in shown["momenta"].items():
        described.append(f"lengths of momenta ({name}): {_spread(summary)}")
    if not shown["momenta"]:
        described.append("no momenta")
    if shown["criterion"]:
        numbers = ", ".join(f"{name} {value:g}" for name, value in shown["criterion"].items())
        described.append(f"state of the loss: {numbers}")
    if shown["has_forest"]:
        described.append("a forest, which is grown anew whenever classes change")
    among = ""
    if shown["compared"] < shown["classes"]:
        among = f" among {shown['compared']} classes drawn at random (--all-pairs: all)"
    described.append(f"closest pairs{among}:")
    for pair in shown["closest"]:
        described.append(f"  {pair['one']} and {pair['other']}: cosine {pair['cosine']:.4f}")
    return described


def _spread(summary: dict[str, float]) -> str:
    zeros = f", {summary['zeros']} are zero" if summary["zeros"] else ""
    return "{min:.4g} to {max:.4g}, median {median:.4g}, mean {mean:.4g}".format(**summary) + zeros


def change(growing: ModuleType, args: argparse.Namespace) -> Written:
    """Write a state with other classes."""
    common = {"folder": args.state, "output": args.output}
    if args.action == "import":
        return growing.replace(
            **common, weights=args.weights, momenta=args.momenta, num_classes=args.num_classes
        )
    if args.action == "drop":
        return growing.drop(**common, classes=args.classes)
    if args.action == "merge":
        return growing.merge(**common, classes=args.classes, shares=args.shares)
    if args.action == "join":
        return growing.join_heads(**common, other=args.other)
    common.update(dataset=args.dataset, model=args.model, threads=args.threads)
    if args.action == "add":
        return growing.add(**common)
    return growing.remap(
        **common, label_map=args.map, of_set=args.set, old_dataset=args.old_dataset
    )


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = make_parser("classes", __doc__)
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="ACTION", help="each has a --help of its own"
    )
    parsers = {
        name: actions.add_parser(name, help=text, description=text)
        for name, text in ACTIONS.items()
    }
    for name, one in parsers.items():
        one.add_argument(
            "--state",
            required=True,
            metavar="FOLDER",
            help="folder of a run, whose newest state is taken, or of a state",
        )
        if name not in ("show", "export"):
            one.add_argument(
                "--output",
                required=True,
                metavar="FOLDER",
                help="folder of the run that will go on from the new state",
            )
        add_json_flag(one)
    _add_show_flags(parsers["show"])
    _add_file_flags(parsers["export"], parsers["import"])
    for name in ("add", "remap"):
        _add_dataset_flags(parsers[name])
    _add_label_flags(parsers["drop"], parsers["merge"], parsers["remap"])
    parsers["join"].add_argument(
        "--other", required=True, metavar="FOLDER", help="run or state with the other head"
    )
    return parser


def _add_show_flags(show: argparse.ArgumentParser) -> None:
    show.add_argument("--pairs", type=int, default=10, metavar="N", help="closest pairs to list")
    show.add_argument(
        "--all-pairs",
        action="store_true",
        help="compare all classes, even if there are more than 20,000",
    )


def _add_file_flags(export: argparse.ArgumentParser, load: argparse.ArgumentParser) -> None:
    export.add_argument("--output", required=True, metavar="FILE", help="the .npy file")
    export.add_argument(
        "--momenta",
        metavar="FILE",
        help="a second .npy file, (states of the optimizer, classes, width)",
    )
    load.add_argument(
        "--weights",
        required=True,
        metavar="FILE",
        help=".npy, .params with fc7_weight or fc7_<i>_weight, a run's folder, or the folder of "
        "Partial FC's <rank>_centers.param",
    )
    load.add_argument(
        "--momenta",
        metavar="FILE",
        help="momenta, as export writes them, or Partial FC's folder (default: 0)",
    )
    load.add_argument(
        "--num-classes",
        type=int,
        metavar="N",
        help="classes that exist, if the last device was filled up with others",
    )


def _add_dataset_flags(one: argparse.ArgumentParser) -> None:
    one.add_argument("--dataset", required=True, metavar="FOLDER", help="the dataset to go on with")
    one.add_argument(
        "--model",
        metavar="PREFIX,EPOCH",
        help="network that embeds new people (default: the state's own)",
    )
    add_threads_flag(one)


def _add_label_flags(
    drop: argparse.ArgumentParser, merge: argparse.ArgumentParser, remap: argparse.ArgumentParser
) -> None:
    for one in (drop, merge):
        one.add_argument(
            "--classes", required=True, type=label_list, metavar="LABELS", help="like 3,17-20"
        )
    merge.add_argument(
        "--shares",
        type=share_list,
        metavar="N,N",
        help="how much each counts, such as its images (default: all alike)",
    )
    remap.add_argument(
        "--map",
        metavar="FILE",
        help="csv with the columns old_label and label (default: the dataset's identities.csv, of "
        "rec_merge)",
    )
    remap.add_argument(
        "--set", metavar="NAME", help="the old dataset, as the column `dataset` calls it"
    )
    remap.add_argument(
        "--old-dataset",
        metavar="FOLDER",
        help="match people by the names in the identities.csv of both datasets instead",
    )


@command(parser=build_parser, needs=("mxnet",))
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    from dsoftmax.recognition import growing

    if args.action == "show":
        results = growing.show(args.state, args.pairs, args.all_pairs)
        text = "\n".join(lines(results))
    elif args.action == "export":
        classes, width = growing.export(args.state, args.output, args.momenta)
        results = {"output": args.output, "classes": classes, "width": width}
        text = f"{classes} x {width} class weights in {args.output}"
    else:
        written = change(growing, args)
        classes, width = written.shape
        results = {"state": written.path, "classes": classes, "width": width}
        text = f"{classes} classes of width {width} in {written.path}"
    if args.json:
        print_json(results, args.json)
    else:
        print(text)


if __name__ == "__main__":
    sys.exit(main())
