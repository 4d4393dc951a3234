"""Verify that two faces show one person: LFW, CFP-FP, AgeDB-30, any .bin, or your own pairs.

    python eval/verification.py --data-dir faces_emore --model models/r50-dsoftmax-emore/model,1
    python eval/verification.py --data-dir faces_emore --model models/…/model --target lfw
    python eval/verification.py --data-dir people --pairs own.csv --model …
    python eval/verification.py --people people --model … --calibrate 1e-2,1e-3

The embedding of an image is the sum of its embedding and its mirror image's. The accuracy comes
from a cross-validation over ten folds in the order of the file, with insightface's thresholds.
Your own pairs need no .bin: give a list (LFW's pairs.txt, `path path 1`, or a csv), or one folder
per person to draw pairs from; --detector finds and aligns the faces in photographs. To compare
models, give several names after --model, or `prefix,1|3`, or a bare `prefix` for all its epochs.
"""

from __future__ import annotations

if not __package__:
    import require_dsoftmax

import argparse
import os
import re
import sys
from typing import Any, Sequence

import numpy as np

from dsoftmax.eval import metrics, plots
from dsoftmax.eval.mistakes import contact_sheet, detailed_json
from dsoftmax.eval.models import (
    ModelName,
    labels_of,
    load_model,
    missing_model,
    parse_models,
    say_where,
)
from dsoftmax.eval.pairs import Verification, evaluate, verify
from dsoftmax.eval.result_page import write_results
from dsoftmax.recognition.common.cli import (
    add_json_flag,
    add_report_flag,
    add_threads_flag,
    command,
    image_size,
    make_parser,
    print_json,
    some_of,
)
from dsoftmax.recognition.common.devices import gpu_contexts
from dsoftmax.recognition.common.files import AtomicFile
from dsoftmax.recognition.data.detection import add_detector_flags, open_finder
from dsoftmax.recognition.data.images import encode, fitted_warning
from dsoftmax.recognition.data.packs import Pack, read_pack
from dsoftmax.recognition.data.pairs import describe_people, draw_pairs, make_pack, read_pairs

__all__ = ["Verification", "evaluate", "main", "verify"]

TARGETS = "lfw,cfp_ff,cfp_fp,agedb_30"


def calibration_table(result: Verification, calibrations: Sequence[metrics.Calibration]) -> str:
    """Lay out thresholds at false accept rates with their 95 % intervals."""
    low, high = result.accuracy_interval()
    lines = [
        f"[{result.name}] thresholds from {len(result.impostor)} pairs of different people, "
        f"{len(result.genuine)} of the same; intervals of 95 %, {_kind_of_intervals(result)}",
        f"accuracy {result.is_right.mean():.4f} with the cosine above {result.threshold:.4f}, "
        f"interval {low:.4f}..{high:.4f}",
        f"{'FAR':>8} {'cosine above':>13} {'interval':>18} {'distance below':>15} {'TAR':>8} "
        f"{'interval':>16}",
    ]
    for one in calibrations:
        lines.append(
            f"{one.far:>8g} {one.point.threshold:>13.4f} "
            f"{f'{one.threshold.low:.4f}..{one.threshold.high:.4f}':>18} "
            f"{2 - 2 * one.point.threshold:>15.4f} {one.point.tar:>8.4f} "
            f"{f'{one.tar.low:.4f}..{one.tar.high:.4f}':>16}"
        )
        if len(result.impostor) < one.pairs_needed:
            lines.append(
                f"{'':8} the rate {one.far:g} takes {one.pairs_needed:,} such pairs at least: "
                "this threshold accepts none of those there are"
            )
    return "\n".join(lines)


def _kind_of_intervals(result: Verification) -> str:
    if result.people is None:
        return "as if pairs were independent"
    return f"by drawing the {len(np.unique(result.people))} people anew"


def find_packs(folder: str, targets: str | None) -> list[Pack]:
    """Read the packs a user named; by default insightface's, or all if none of those exists."""
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"--data-dir {folder!r}: there is no such folder")
    there = sorted(name[:-4] for name in os.listdir(folder) if name.endswith(".bin"))
    usual = [name for name in TARGETS.split(",") if name in there]
    wanted = targets.split(",") if targets else usual or there
    missing = [name for name in wanted if name not in there]
    if missing or not wanted:
        raise FileNotFoundError(
            f"{os.path.join(folder, (missing or ['*'])[0])}.bin: there is no such file; "
            + (f"there are {', '.join(there)}" if there else "there is no .bin at all")
        )
    return [read_pack(os.path.join(folder, f"{name}.bin")) for name in wanted]


def gather_packs(args: argparse.Namespace, models: Sequence[ModelName]) -> list[Pack]:
    """Return the packs that the flags ask for, made in memory if they are not .bin files."""
    if not (args.pairs or args.people):
        return find_packs(args.data_dir, args.target)
    if args.people:
        name, pairs = args.people, draw_pairs(args.people, args.most, args.seed)
    else:
        name, pairs = args.pairs, read_pairs(args.pairs, args.data_dir)
    name = os.path.splitext(os.path.basename(os.path.normpath(name)))[0]
    trained = filter(None, (model.trained_size() for model in models))
    size = args.image_size or max(trained, default=(112, 112))
    find = open_finder(args.detector, args.face)
    made = make_pack(name, pairs, size, args.threads, find)
    notes = [describe_people(made.pairs)]
    if made.left_out:
        notes.append(f"{len(made.left_out)} pairs were left out, an image of theirs can't be used:")
        notes.append(some_of(made.left_out))
    if made.fitted:
        advice = "find the faces by --detector, or align them first"
        notes.append(fitted_warning(made.fitted, size, advice))
    print(*filter(None, notes), sep="\n", end="\n" if any(notes) else "", file=sys.stderr)
    return [made.pack]


def false_accept_rates(text: str) -> list[float]:
    """Parse a flag's ``1e-2,1e-3``."""
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = [0.0]
    if not all(0 < rate <= 1 for rate in rates):
        raise argparse.ArgumentTypeError(f"rates in (0, 1] like 1e-2,1e-3, not {text!r}")
    return rates


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = make_parser("verification", __doc__)
    parser.add_argument(
        "--model",
        nargs="+",
        help="prefix,epoch; prefix,1|3; prefix; file.onnx; or several of them",
    )
    parser.add_argument("--max", default="", help="a,b: of all epochs those, newest first")
    pairs = parser.add_argument_group("pairs")
    pairs.add_argument("--data-dir", default="", help="folder of .bin files, or of --pairs")
    pairs.add_argument(
        "--target",
        help=f"names of .bin files, separated by commas; by default those of {TARGETS} that exist, "
        "or all files",
    )
    pairs.add_argument("--pairs", help="list of pairs of image files in --data-dir")
    pairs.add_argument("--people", help="folder with one folder per person, to draw pairs from")
    pairs.add_argument("--most", type=int, default=6000, help="number of pairs to draw")
    pairs.add_argument("--seed", type=int, default=0, help="of the random choice")
    pairs.add_argument(
        "--image-size",
        type=image_size,
        help="height,width; by default those of the model's training, or else the pack's",
    )
    pairs.add_argument("--nfolds", type=int, default=10, help="folds of the cross-validation")
    add_detector_flags(parser)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--mode",
        type=int,
        choices=(0, 1, 2),
        default=0,
        help="0: results; 1: also a picture of the worst mistakes; 2: also the embeddings (.npz)",
    )
    output.add_argument("--output", default="badcases", help="folder for the files of --mode")
    output.add_argument(
        "--calibrate",
        type=false_accept_rates,
        metavar="FAR,FAR",
        help="print thresholds at these false accept rates",
    )
    output.add_argument("--plots", metavar="FOLDER", help="draw roc and scores, .png and .pdf")
    add_report_flag(output)
    add_json_flag(output)
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--gpu", help="ids, as 0 or 0,1; -1 for the CPU; by default CUDA_VISIBLE_DEVICES"
    )
    machine.add_argument("--batch-size", type=int, default=32, help="images per batch")
    add_threads_flag(machine)
    return parser


def _check_flags(args: argparse.Namespace) -> None:
    for name in ("batch_size", "threads"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be 1 or more")
    if args.nfolds < 2:
        raise ValueError("--nfolds must be 2 or more")
    if args.pairs and args.people:
        raise ValueError("--pairs and --people: one of them")
    if args.detector and not (args.pairs or args.people):
        raise ValueError("--detector is for photographs: give --pairs or --people, too")
    if not args.model:
        raise missing_model()


def select_models(names: Sequence[str], newest: str) -> list:
    """Parse all names; ``a,b`` of `newest` selects some of the epochs of a bare prefix."""
    models = []
    for text in names:
        parsed = parse_models(text)
        if newest and len(parsed) > 1 and "|" not in text:
            parts = newest.split(",")
            if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
                raise ValueError(
                    f"--max is a,b: from which epoch on to before which, not {newest!r}"
                )
            parsed = parsed[int(parts[0]) : int(parts[1])]
        models += parsed
    if not models:
        raise ValueError(f"--max {newest}: no epoch is left")
    return models


def results_table(entries: Sequence[dict[str, Any]]) -> str:
    """Lay out the accuracies of several models on several targets, one line per model."""
    targets = list(dict.fromkeys(entry["target"] for entry in entries))
    rows: dict[str, dict[str, str]] = {}
    for entry in entries:
        value = f"{entry['accuracy_flip']:1.5f}+-{entry['accuracy_flip_std']:1.5f}"
        rows.setdefault(entry["model"], {})[entry["target"]] = value
    width = max(len(name) for name in rows)
    lines = [" " * width + "".join(f"  {target:>16}" for target in targets)]
    for name, values in rows.items():
        lines.append(f"{name:{width}}" + "".join(f"  {values[target]:>16}" for target in targets))
    return "\n".join(lines)


class _Results:
    """Prints, draws and collects the results, model by model."""

    def __init__(
        self, args: argparse.Namespace, models: Sequence[ModelName], packs: Sequence[Pack]
    ):
        self._args, self._is_one_model = args, len(models) == 1
        self._packs = packs
        self._labels = dict(zip(models, labels_of(models)))
        self._is_one_target = len(packs) == 1
        self._best: dict[str, float] = {}
        self._entries: list[dict[str, Any]] = []
        self._shown: list[dict[str, Any]] = []  # the same, with more for --report

    def say(self, text: str) -> None:
        if self._args.json != "-":
            print(text, flush=True)

    def add(self, name: ModelName, pack: Pack, result: Verification) -> None:
        if not self._is_one_model:
            self.say(f"model {name}")
        self.say("\n".join(result.lines()))
        self._best[pack.name] = max(self._best.get(pack.name, 0.0), result.accuracy.mean)
        label = self._labels[name]
        title = label if self._is_one_target else f"{label} on {pack.name}"
        entry = {"name": title, "model": str(name), "digest": name.digest(), **result.as_json()}
        if self._args.calibrate:
            thresholds = result.calibrate(self._args.calibrate)
            self.say(calibration_table(result, thresholds))
            entry.update(result.thresholds_json(thresholds))
        self._entries.append(entry)
        if self._args.report:
            self._shown.append({**detailed_json(result), **entry})
        stem = os.path.join(self._args.output, pack.name)
        if not self._is_one_model:
            stem += "-" + re.sub(r"[^\w.-]+", "_", str(name)).strip("_.")
        if self._args.mode == 1:
            with AtomicFile(f"{stem}.png") as file:
                file.write(encode(contact_sheet(pack, result), ".png"))
            self.say(f"[{pack.name}] the worst mistakes are in {stem}.png")
        if self._args.mode == 2:
            with AtomicFile(f"{stem}.npz") as file:
                np.savez(file, embeddings=result.embeddings, issame=result.issame)
            self.say(f"[{pack.name}] the embeddings are in {stem}.npz")

    def finish(self) -> None:
        for name, accuracy in self._best.items():
            self.say(f"Max of [{name}] is {accuracy:1.5f}")
        if not self._is_one_model:
            self.say(results_table(self._entries))
        if self._args.plots:
            plots.save_all(self._entries, self._args.plots)
            self.say(f"figures are in {self._args.plots}")
        if self._args.report:
            models = ", ".join(dict.fromkeys(entry["model"] for entry in self._entries))
            write_results(self._args.report, models, self._shown, self._packs)
            self.say(f"the page is {self._args.report}")
        if self._args.json:
            print_json({"results": self._entries}, self._args.json)


@command(parser=build_parser, needs=["opencv", "mxnet"])
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    _check_flags(args)
    contexts = gpu_contexts(args.gpu)
    models = select_models(args.model, args.max)
    packs = gather_packs(args, models)
    results = _Results(args, models, packs)
    for name in models:
        embed = load_model(name, contexts)
        size = args.image_size or embed.image_size
        say_where(name, contexts, size)
        for pack in packs:
            result = verify(embed, pack, args.batch_size, args.nfolds, size, args.threads)
            results.add(name, pack, result)
    results.finish()


if __name__ == "__main__":
    sys.exit(main())
