"""Verify that two faces are one person's: LFW, CFP-FP, AgeDB-30, any .bin, or pairs of your own.

    python eval/verification.py --data-dir faces_emore --model models/r50-dsoftmax-emore/model,1
    python eval/verification.py --data-dir faces_emore --model models/…/model --target lfw
    python eval/verification.py --data-dir people --pairs own.csv --model …
    python eval/verification.py --people people --model … --calibrate 1e-2,1e-3

An image's embedding is the sum of its own and its mirror image's. Accuracy is by ten folds in the
order of the file, thresholds as insightface's. Pairs of your own need no .bin: a list (LFW's
pairs.txt, `path path 1`, or a csv) or a folder per person to draw pairs from. Several models are
several names after --model, or `prefix,1|3`, or a bare `prefix` for all its epochs.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from dataclasses import dataclass
from typing import Any, Sequence

import cv2
import numpy as np

from dsoftmax.eval import metrics, plots
from dsoftmax.eval.embed import embed_batches
from dsoftmax.recognition.common.cli import (
    add_json_flag,
    command,
    default_threads,
    image_size,
    print_json,
    some_of,
)
from dsoftmax.recognition.common.files import AtomicFile
from dsoftmax.recognition.common.preflight import check_mxnet
from dsoftmax.recognition.data.images import encode, fit
from dsoftmax.recognition.data.packs import Pack, read_pack
from dsoftmax.recognition.data.pairs import draw_pairs, make_pack, read_pairs

check_mxnet()

from dsoftmax.eval.models import Embed, ModelName, load_model, parse_models  # noqa: E402
from dsoftmax.recognition.common.devices import gpu_contexts  # noqa: E402

TARGETS = "lfw,cfp_ff,cfp_fp,agedb_30"
VAL_FAR = 1e-3
WORST_SHOWN = 20  # of each kind of mistake


@dataclass(frozen=True)
class Verification:
    """What came out for one pack.

    Attributes
    ----------
    name : str
        The pack's.
    issame : (pairs,) bool
    embeddings : (2 pairs, D) float32
        Of length 1, image and mirror image summed.
    cosines : (pairs,) float32
    xnorm : float
        The mean length of embeddings as the network gives them.
    accuracy : metrics.FoldAccuracy
        With mirror images, insightface's "Accuracy-Flip".
    plain_accuracy : metrics.FoldAccuracy
        Without them.
    val : metrics.FoldRate
        The true accept rate at the false accept rate 0.001.
    auc, eer : float
        NaN where all pairs are of one kind.
    """

    name: str
    issame: np.ndarray
    embeddings: np.ndarray
    cosines: np.ndarray
    xnorm: float
    accuracy: metrics.FoldAccuracy
    plain_accuracy: metrics.FoldAccuracy
    val: metrics.FoldRate
    auc: float
    eer: float

    @property
    def genuine(self) -> np.ndarray:
        """Cosines of the pairs of one person."""
        return self.cosines[self.issame]

    @property
    def impostor(self) -> np.ndarray:
        """Cosines of the pairs of two."""
        return self.cosines[~self.issame]

    @property
    def threshold(self) -> float:
        """The cosine above which a pair counts as one person; the mean over the folds."""
        return float(1 - self.accuracy.thresholds.mean() / 2)

    def lines(self, step: int | None = None) -> list[str]:
        """Return the lines insightface prints, and ours; with a step as in its training log."""
        head = f"[{self.name}]" if step is None else f"[{self.name}][{step}]"
        plain, flip = self.plain_accuracy, self.accuracy
        return [
            f"{head}XNorm: {self.xnorm:f}",
            f"{head}Accuracy: {plain.mean:1.5f}+-{plain.deviation:1.5f}",
            f"{head}Accuracy-Flip: {flip.mean:1.5f}+-{flip.deviation:1.5f}",
            f"{head}VAL@FAR={VAL_FAR:g}: {self.val.mean:1.5f}+-{self.val.deviation:1.5f} "
            f"(FAR {self.val.far:.5f})",
            f"{head}AUC: {self.auc:1.5f} EER: {self.eer:1.5f}",
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the figures, the curve and the histogram of scores."""
        found = {
            "target": self.name,
            "pairs": len(self.issame),
            "same": int(self.issame.sum()),
            "width": self.embeddings.shape[1],
            "xnorm": self.xnorm,
            "accuracy_flip": self.accuracy.mean,
            "accuracy_flip_std": self.accuracy.deviation,
            "accuracy": self.plain_accuracy.mean,
            "accuracy_std": self.plain_accuracy.deviation,
            "cosine_threshold": self.threshold,
            "val": {"far": VAL_FAR, "tar": self.val.mean, "std": self.val.deviation},
            "auc": self.auc,
            "eer": self.eer,
            "scores": plots.bin_scores(self.genuine, self.impostor)._asdict(),
        }
        if self.genuine.size and self.impostor.size:
            found["roc"] = plots.sample_roc(self.genuine, self.impostor)._asdict()
        return found


def evaluate(
    embed: Embed,
    packs: Sequence[Pack],
    batch_size: int = 32,
    folds: int = 10,
    size: tuple[int, int] | None = None,
    threads: int = 2,
) -> list[Verification]:
    """Verify the pairs of packs.

    Parameters
    ----------
    embed : callable
        Maps (n, 3, height, width) uint8 images, RGB, to (n, D) embeddings as numpy arrays: what
        `load_model` returns, or any function.
    packs : sequence of Pack
        Of any number of pairs from two.
    batch_size : int
    folds : int
    size : (int, int), optional
        Height and width images are brought to; by default those of a pack's first image.
    threads : int
        To decode on.

    Examples
    --------
    >>> def mean_colour(images):
    ...     return images.mean(axis=(2, 3))
    >>> evaluate(mean_colour, [read_pack("lfw.bin")])[0].accuracy.mean  # doctest: +SKIP
    0.548
    """
    return [_evaluate_one(embed, pack, batch_size, folds, size, threads) for pack in packs]


def _evaluate_one(
    embed: Embed,
    pack: Pack,
    batch_size: int,
    folds: int,
    size: tuple[int, int] | None,
    threads: int,
) -> Verification:
    height, width = size or pack.decode(0).shape[:2]

    def load(image: int) -> np.ndarray:
        return fit(pack.decode(image), height, width)

    images = range(2 * len(pack))
    batches = embed_batches(embed, load, images, batch_size, threads, desc=pack.name)
    views = np.concatenate([batch.views for batch in batches])
    xnorm = float(np.linalg.norm(views, axis=2).mean())
    try:
        plain, summed = metrics.normalized(views[:, 0]), metrics.normalized(views.sum(axis=1))
    except ValueError as error:
        raise ValueError(f"{pack.name}: {error}") from None
    distances = metrics.squared_distances(summed)
    cosines = 1 - distances / 2
    has_both = 0 < pack.issame.sum() < len(pack)
    curve = metrics.roc(cosines[pack.issame], cosines[~pack.issame]) if has_both else None
    return Verification(
        pack.name,
        pack.issame,
        summed,
        cosines,
        xnorm,
        metrics.fold_accuracy(distances, pack.issame, folds),
        metrics.fold_accuracy(metrics.squared_distances(plain), pack.issame, folds),
        metrics.fold_tar(cosines, pack.issame, VAL_FAR, folds),
        curve.auc if curve else float("nan"),
        curve.eer if curve else float("nan"),
    )


def worst_mistakes(result: Verification, most: int = WORST_SHOWN) -> tuple[np.ndarray, np.ndarray]:
    """Return the pairs on the wrong side of the threshold, the worst first.

    Returns
    -------
    refused, accepted : (n,) int
        Numbers of pairs: of one person with the lowest cosines, of two with the highest.
    """
    order = np.argsort(result.cosines, kind="stable")
    wrong = (result.cosines > result.threshold) != result.issame
    refused = [pair for pair in order if wrong[pair] and result.issame[pair]]
    accepted = [pair for pair in order[::-1] if wrong[pair] and not result.issame[pair]]
    return np.array(refused[:most], int), np.array(accepted[:most], int)


def contact_sheet(pack: Pack, result: Verification, columns: int = 5) -> np.ndarray:
    """Lay the worst mistakes out, each a pair of images with its number and cosine.

    Returns
    -------
    (rows, columns, 3) uint8
        Blue, green, red.
    """
    side, caption, gap = 112, 18, 6

    def blank(height: int, width: int) -> np.ndarray:
        return np.full((height, width, 3), 255, np.uint8)

    def write(image: np.ndarray, text: str, x: int, y: int, scale: float = 0.4) -> None:
        cv2.putText(image, text, (x, y), cv2.FONT_HERSHEY_SIMPLEX, scale, 0, 1, cv2.LINE_AA)

    def tile(pair: int) -> np.ndarray:
        image = blank(side + caption + gap, 2 * side + 2 * gap)
        for place in (0, 1):
            face = fit(pack.decode(2 * pair + place)[:, :, ::-1], side, side)
            image[:side, place * side : (place + 1) * side] = face
        write(image, f"pair {pair}: {result.cosines[pair]:+.3f}", 2, side + caption - 5)
        return image

    mistakes = worst_mistakes(result)
    columns = max(min(columns, max(map(len, mistakes))), 3)  # three are as wide as a heading
    width = columns * tile(0).shape[1]
    sections = []
    for pairs, kind in zip(mistakes, ("taken for two people", "taken for one person")):
        heading = blank(30, width)
        count = "the worst" if len(pairs) else "none"
        write(
            heading, f"{result.name}: {count} {kind}, threshold {result.threshold:+.3f}", 4, 20, 0.5
        )
        sections.append(heading)
        for start in range(0, len(pairs), columns):
            row = np.hstack([tile(pair) for pair in pairs[start : start + columns]])
            sections.append(np.hstack([row, blank(len(row), width - row.shape[1])]))
    return np.vstack(sections)


def calibration_table(result: Verification, found: Sequence[metrics.Calibration]) -> str:
    """Lay out thresholds at false accept rates with their 95 % intervals."""
    lines = [
        f"[{result.name}] thresholds from {len(result.impostor)} pairs of different people, "
        f"{len(result.genuine)} of the same; intervals of 95 %",
        f"{'FAR':>8} {'cosine above':>13} {'interval':>18} {'distance below':>15} {'TAR':>8} "
        f"{'interval':>16}",
    ]
    for one in found:
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


def find_packs(folder: str, targets: str | None) -> list[Pack]:
    """Read the packs a user named, or of insightface's those that are there, or all."""
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


def gather_packs(args: argparse.Namespace) -> list[Pack]:
    """Return the packs the flags ask for, made in memory where they are not .bin files."""
    if not (args.pairs or args.people):
        return find_packs(args.data_dir, args.target)
    if args.people:
        name, pairs = args.people, draw_pairs(args.people, args.most, args.seed)
    else:
        name, pairs = args.pairs, read_pairs(args.pairs, args.data_dir)
    name = os.path.splitext(os.path.basename(os.path.normpath(name)))[0]
    pack, left_out = make_pack(name, pairs, args.image_size or (112, 112), args.threads)
    if left_out:
        print(f"{len(left_out)} pairs were left out, their images can't be read:", file=sys.stderr)
        print(some_of(left_out), file=sys.stderr)
    return [pack]


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
    parser = argparse.ArgumentParser(
        prog="verification",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data-dir", default="", help="folder of .bin files, or of --pairs")
    parser.add_argument(
        "--model",
        nargs="+",
        default=["../model/softmax,50"],
        help="prefix,epoch; prefix,1|3; prefix; file.onnx; or several of them; %(default)s",
    )
    parser.add_argument(
        "--target", help=f"names of .bin files; by default of {TARGETS} those there are, or all"
    )
    parser.add_argument("--pairs", help="a list of pairs of image files in --data-dir")
    parser.add_argument("--people", help="a folder per person, to draw pairs from")
    parser.add_argument("--most", type=int, default=6000, help="pairs to draw; %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the drawing; %(default)s")
    parser.add_argument("--gpu", help="ids, as 0 or 0,1; -1 for the CPU; CUDA_VISIBLE_DEVICES")
    parser.add_argument("--batch-size", type=int, default=32, help="%(default)s")
    parser.add_argument("--max", default="", help="a,b: of all epochs those, newest first")
    parser.add_argument(
        "--mode",
        type=int,
        choices=(0, 1, 2),
        default=0,
        help="0 results; 1 also the worst mistakes as pictures, 2 also the embeddings (.npz)",
    )
    parser.add_argument("--nfolds", type=int, default=10, help="%(default)s")
    parser.add_argument("--image-size", type=image_size, help="height,width; the pack's own")
    parser.add_argument(
        "--calibrate",
        type=false_accept_rates,
        metavar="FAR,FAR",
        help="print thresholds at these false accept rates",
    )
    parser.add_argument(
        "--output", default="badcases", help="folder of what modes 1 and 2 write; %(default)s"
    )
    parser.add_argument("--plots", metavar="FOLDER", help="draw roc and scores, .png and .pdf")
    parser.add_argument("--threads", type=int, default=default_threads(), help="%(default)s")
    add_json_flag(parser)
    return parser


def _check_flags(args: argparse.Namespace) -> None:
    for name in ("batch_size", "threads"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be 1 or more")
    if args.nfolds < 2:
        raise ValueError("--nfolds must be 2 or more")
    if args.pairs and args.people:
        raise ValueError("--pairs and --people: one of them")


def select_models(names: Sequence[str], newest: str) -> list:
    """Parse all names; ``a,b`` of `newest` takes a part of what bare prefixes found."""
    models = []
    for text in names:
        found = parse_models(text)
        if newest and len(found) > 1 and "|" not in text:
            parts = newest.split(",")
            if len(parts) != 2 or not all(part.strip().isdigit() for part in parts):
                raise ValueError(
                    f"--max is a,b: from which epoch on to before which, not {newest!r}"
                )
            found = found[int(parts[0]) : int(parts[1])]
        models += found
    if not models:
        raise ValueError(f"--max {newest}: no epoch is left")
    return models


def results_table(entries: Sequence[dict[str, Any]]) -> str:
    """Lay out the accuracies of several models on several targets, a line a model."""
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


class _Report:
    """Prints, draws and keeps what is found, model by model."""

    def __init__(self, args: argparse.Namespace, is_one_model: bool):
        self._args, self._is_one_model = args, is_one_model
        self._best: dict[str, float] = {}
        self._entries: list[dict[str, Any]] = []

    def say(self, text: str) -> None:
        if self._args.json != "-":
            print(text, flush=True)

    def add(self, name: ModelName, pack: Pack, result: Verification) -> None:
        if not self._is_one_model:
            self.say(f"model {name}")
        self.say("\n".join(result.lines()))
        self._best[pack.name] = max(self._best.get(pack.name, 0.0), result.accuracy.mean)
        title = pack.name if self._is_one_model else f"{name} on {pack.name}"
        entry = {"name": title, "model": str(name), **result.as_json()}
        if self._args.calibrate:
            found = metrics.calibrate(result.genuine, result.impostor, self._args.calibrate)
            self.say(calibration_table(result, found))
            entry["calibration"] = [_calibration_json(one) for one in found]
        self._entries.append(entry)
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
        if self._args.json:
            print_json({"results": self._entries}, self._args.json)


def _calibration_json(found: metrics.Calibration) -> dict[str, Any]:
    return {
        "far": found.far,
        "cosine": found.point.threshold,
        "cosine_interval": list(found.threshold),
        "observed_far": found.point.far,
        "tar": found.point.tar,
        "tar_interval": list(found.tar),
        "pairs_needed": found.pairs_needed,
    }


@command
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    args = build_parser().parse_args(argv)
    _check_flags(args)
    contexts = gpu_contexts(args.gpu)
    models = select_models(args.model, args.max)
    packs = gather_packs(args)
    report = _Report(args, is_one_model=len(models) == 1)
    for name in models:
        embed = load_model(name, contexts)
        for pack in packs:
            (result,) = evaluate(
                embed, [pack], args.batch_size, args.nfolds, args.image_size, args.threads
            )
            report.add(name, pack, result)
    report.finish()


if __name__ == "__main__":
    sys.exit(main())
