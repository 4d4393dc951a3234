r"""Evaluate on MegaFace: features, noise lists, and identification among a million distractors.

    python eval/megaface.py --model models/r100-arcface-emore/model,1 --algo mine \
        --facescrub-lst data/facescrub_lst --facescrub-root data/facescrub_images \
        --megaface-lst data/megaface_lst --megaface-root data/megaface_images \
        --facescrub-noises data/facescrub_noises.txt --megaface-noises data/megaface_noises.txt

These lists, folders and noise lists are also the defaults, as in insightface's run.sh.

The command takes up to three steps, depending on its flags:

1. With --model, it writes the features of all images to --output, one file per image in MegaFace's
   layout, <output>/{facescrub,megaface}/…/<image>_<algo>.bin. Existing files are kept, so that an
   interrupted run resumes. `p,1|q,2` joins the features of two networks.
2. With noise lists, it cleans the features as insightface's refined protocol does, into
   --feature-dir-out: one more dimension is 100 in noisy distractors and 0 elsewhere; noisy probes
   become the centre of their identity.
3. It computes the ranks, without the development kit: of each probe and each of its mates among all
   distractors; rank-1 with 10, 100, … of them, CMC, and the ROC of verification.
"""

from __future__ import annotations

if not __package__:
    import require_dsoftmax

import argparse
import functools
import json
import os
import sys
from itertools import groupby
from typing import Any, Callable, NamedTuple, Sequence

import numpy as np

from dsoftmax.eval import metrics, plots
from dsoftmax.eval.distractors import Ranking, rank_distractors
from dsoftmax.eval.embed import embed_batches
from dsoftmax.eval.megaface_features import (
    ImageSet,
    clean_probes,
    is_noisy,
    load_features,
    read_list,
    read_noises,
    split_mark,
    write_cleaned,
    write_feature,
)
from dsoftmax.eval.models import Embed, ModelName, load_model, parse_models, say_where
from dsoftmax.eval.result_page import write_results
from dsoftmax.recognition.common.cli import (
    add_json_flag,
    add_report_flag,
    add_threads_flag,
    command,
    make_parser,
    print_json,
    some_of,
)
from dsoftmax.recognition.common.devices import gpu_contexts
from dsoftmax.recognition.common.files import AtomicFile
from dsoftmax.recognition.data.images import load_rgb

IMAGE_SIZE = (112, 112)
SETS = ("facescrub", "megaface")
NOISES = "./data/{}_noises.txt"  # where insightface's remove_noises.py looks
SIZES = (10, 100, 1_000, 10_000, 100_000, 1_000_000)
FARS = (1e-6, 1e-5, 1e-4)
TAIL = 1e-4  # the share of impostor scores that is kept: verification is exact up to this FAR


class Ensemble:
    """One or several networks whose features are concatenated."""

    def __init__(self, models: Sequence[Embed]):
        self._models = models
        self._borders: list[int] = []

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Return the concatenated embeddings (n, D) of images."""
        parts = [model(images) for model in self._models]
        self._borders = np.cumsum([part.shape[1] for part in parts])[:-1].tolist()
        return np.concatenate(parts, axis=1)

    def features(self, views: np.ndarray) -> np.ndarray:
        """Return features (n, D) of length 1, from the embeddings (n, 2, D) of two views.

        The views, image and mirror image, are summed and scaled to length 1 per network, then the
        concatenation is scaled to length 1.
        """
        parts = np.split(views.sum(axis=1), self._borders, axis=1)
        return metrics.normalized(np.concatenate([metrics.normalized(p) for p in parts], axis=1))


def extract(
    images: ImageSet,
    make_ensemble: Callable[[], Ensemble],
    folder: str,
    algo: str,
    size: tuple[int, int],
    batch_size: int,
    threads: int,
) -> list[str]:
    """Write the features of all images that have none yet; return those that can't be read."""
    paths = images.feature_paths(folder, algo)
    missing = [number for number, path in enumerate(paths) if not os.path.exists(path)]
    if not missing:
        return []

    def load(place: int) -> np.ndarray:
        return load_rgb(os.path.join(images.root, images.images[missing[place]]), size)

    for parent in {os.path.dirname(paths[number]) for number in missing}:
        os.makedirs(parent, exist_ok=True)
    unreadable = []
    ensemble = make_ensemble()
    for batch in embed_batches(
        ensemble, load, range(len(missing)), batch_size, threads, desc=images.name
    ):
        bad = dict(batch.unreadable)
        unreadable += [f"{images.images[missing[place]]}: {why}" for place, why in bad.items()]
        if not batch.views.shape[2]:
            continue  # not one of them could be read
        features = ensemble.features(batch.views)
        for place, feature in enumerate(features, batch.start):
            if place not in bad:
                write_feature(paths[missing[place]], feature)
    return unreadable


def claim_folder(
    folder: str, algo: str, models: Sequence[ModelName], sets: Sequence[ImageSet]
) -> None:
    """Record in a folder whose features it holds; refuse a folder with another model's."""
    path = os.path.join(folder, f"{algo}.json")
    description = {"models": [model.digest() for model in models]}
    if os.path.exists(path):
        try:
            with open(path, encoding="utf-8") as file:
                is_same = json.load(file) == description
        except ValueError as error:
            raise ValueError(
                f"{path}: it does not say whose features these are ({error})"
            ) from None
        if not is_same:
            raise ValueError(
                f"{folder} holds features named {algo} of another model ({path}); choose another "
                "--algo or --output"
            )
        return
    for images in sets:
        existing = next(filter(os.path.exists, images.feature_paths(folder, algo)), None)
        if existing:
            raise ValueError(
                f"{existing} exists already, and nothing says which model made it; choose another "
                "--algo or --output, or leave --model out to rank the existing features"
            )
    with AtomicFile(path, "w") as file:
        json.dump(description, file)


class Mates(NamedTuple):
    """All ordered pairs of two images of one person."""

    probes: np.ndarray  # (m,) int
    scores: np.ndarray  # (m,) float32


def find_mates(features: np.ndarray, people: np.ndarray) -> Mates:
    """Score each probe with each other image of its person, the features of length 1."""
    probes, scores = [], []
    order = np.argsort(people, kind="stable")
    for _, group in groupby(order, key=lambda row: people[row]):
        rows = np.array(list(group))
        cosines = features[rows] @ features[rows].T
        one, other = np.nonzero(~np.eye(len(rows), dtype=bool))
        probes.append(rows[one])
        scores.append(cosines[one, other])
    if not sum(map(len, scores)):
        raise ValueError("no person has two images, so that no probe has a mate")
    return Mates(np.concatenate(probes), np.concatenate(scores))


def summarize(ranking: Ranking, mates: Mates, name: str) -> dict[str, Any]:
    """Return all figures, as JSON can hold them."""
    ranks = ranking.ranks(mates.probes, mates.scores)
    identification = metrics.Identification(ranks, mates.scores, np.zeros(0))
    points = metrics.at_far(mates.scores, ranking.tail, FARS, ranking.total)
    return {
        "name": name,
        "pairs": len(ranks),
        "distractors": {
            str(size): rate
            for size, rate in ranking.rank1_rates(mates.probes, mates.scores).items()
        },
        "cmc": identification.cmc(ranking.top.shape[1]).tolist(),
        "tar_at_far": {f"{far:g}": point.tar for far, point in zip(FARS, points)},
        "thresholds": {f"{far:g}": point.threshold for far, point in zip(FARS, points)},
        "roc": plots.sample_roc(mates.scores, ranking.tail, ranking.total, TAIL)._asdict(),
    }


def lines_of(result: dict[str, Any]) -> list[str]:
    """Lay out the figures for people."""
    lines = [
        f"{result['name']}: {result['probes']} probes of {result['people']} people, "
        f"{result['pairs']} pairs of mates; {max(map(int, result['distractors']))} distractors",
    ]
    for kind in ("noisy", "missing"):
        probes, distractors = result[f"{kind}_probes"], result[f"{kind}_distractors"]
        if probes or distractors:
            lines.append(f"{kind}: {probes} probes, {distractors} distractors")
    lines += [f"Rank1@{size}: {100 * rate:.2f}" for size, rate in result["distractors"].items()]
    ranks = [rank for rank in (1, 5, 10, 50, 100) if rank <= len(result["cmc"])]
    lines.append(
        "CMC " + ", ".join(f"rank-{rank} {100 * result['cmc'][rank - 1]:.2f}" for rank in ranks)
    )
    lines += [f"TAR@FAR={far}: {100 * tar:.2f}" for far, tar in result["tar_at_far"].items()]
    return lines


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = make_parser("megaface", __doc__)
    parser.add_argument(
        "--model", help="prefix,epoch; p,1|q,2 joins two; without it, --output is read"
    )
    parser.add_argument("--algo", default="insightface", help="name in the feature files' names")
    data = parser.add_argument_group("data")
    for name in SETS:
        data.add_argument(
            f"--{name}-lst", default=f"./data/{name}_lst", help=f"list of {name}'s images"
        )
        data.add_argument(f"--{name}-root", default=f"./data/{name}_images", help="their folder")
        data.add_argument(
            f"--{name}-noises",
            help=f"list of the noisy ones (default: {NOISES.format(name)} if it exists); '' for "
            "none",
        )
    data.add_argument(
        "--image-size",
        "--image_size",
        help="3,height,width or height,width; by default those of the model's training, or else "
        "112,112",
    )
    ranking = parser.add_argument_group("ranking")
    ranking.add_argument(
        "--sizes",
        "-s",
        default=",".join(map(str, SIZES)),
        help="numbers of distractors, beside all",
    )
    ranking.add_argument("--max-rank", type=int, default=100, help="largest rank of the CMC")
    ranking.add_argument("--seed", type=int, default=0, help="of the choice of fewer distractors")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output", "--feature-dir-input", default="./feature_out", help="folder of the features"
    )
    output.add_argument(
        "--feature-dir-out", help="cleaned features for the development kit; not written by default"
    )
    output.add_argument("--result-dir", default="./megaface_result", help="folder of the figures")
    add_report_flag(output)
    add_json_flag(output)
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--gpu", help="ids, as 0 or 0,1; -1 for the CPU; by default CUDA_VISIBLE_DEVICES"
    )
    machine.add_argument(
        "--batch-size", "--batch_size", type=int, default=8, help="images per batch"
    )
    add_threads_flag(machine)
    return parser


def _check_flags(args: argparse.Namespace) -> None:
    for name in ("batch_size", "threads", "max_rank"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be 1 or more")
    for name in ("sizes", "image_size"):
        if getattr(args, name) is None:
            continue
        try:
            numbers = [int(part) for part in getattr(args, name).split(",")]
        except ValueError:
            numbers = [0]
        if min(numbers) < 1:
            raise ValueError(
                f"--{name.replace('_', '-')} is a list of numbers, not {getattr(args, name)!r}"
            )
        setattr(args, name, numbers)
    if args.image_size:
        if len(args.image_size) not in (2, 3):
            raise ValueError("--image-size is 3,height,width or height,width")
        args.image_size = tuple(args.image_size[-2:])
    for name in SETS:
        if getattr(args, f"{name}_noises") is None:
            usual = NOISES.format(name)
            setattr(args, f"{name}_noises", usual if os.path.exists(usual) else "")
    if args.feature_dir_out and not (args.facescrub_noises or args.megaface_noises):
        raise ValueError("--feature-dir-out needs noise lists to clean features by")


def _size_of_training(models: Sequence[ModelName]) -> tuple[int, int]:
    """Return the image size of all networks; those that don't say take insightface's."""
    sizes = {model.trained_size() or IMAGE_SIZE for model in models}
    if len(sizes) > 1:
        found = " and ".join(f"{height}x{width}" for height, width in sorted(sizes))
        raise ValueError(
            f"--model: the networks were trained on images of {found}; join networks of one size, "
            "or give an --image-size that all of them take"
        )
    return sizes.pop()


def _run_extraction(args: argparse.Namespace, sets: Sequence[ImageSet]) -> None:
    models = parse_models(args.model)
    contexts = gpu_contexts(args.gpu)
    for images in sets:
        if not os.path.isdir(images.root):
            raise FileNotFoundError(f"--{images.name}-root {images.root}: there is no such folder")
    size = args.image_size or _size_of_training(models)
    claim_folder(args.output, args.algo, models, sets)
    loaded: list[Ensemble] = []

    def make_ensemble() -> Ensemble:
        if not loaded:
            loaded.append(Ensemble([load_model(model, contexts) for model in models]))
            for model in models:
                say_where(model, contexts, size)
        return loaded[0]

    for images in sets:
        unreadable = extract(
            images,
            make_ensemble,
            args.output,
            args.algo,
            size,
            args.batch_size,
            args.threads,
        )
        if unreadable:
            print(
                f"{len(unreadable)} images of {images.name} can't be read and are left out:\n"
                f"{some_of(unreadable, 5)}",
                file=sys.stderr,
            )


def _load_and_clean(
    args: argparse.Namespace, images: ImageSet
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return features of length 1, the numbers of their images, and which are noisy."""
    features, numbers = load_features(images, args.output, args.algo, args.threads)
    features, noisy = split_mark(features)
    path = getattr(args, f"{images.name}_noises")
    if path:
        noises = read_noises(path)
        noisy = is_noisy([images.images[number] for number in numbers], noises)
        if noisy.sum() < len(noises):
            print(
                f"{path}: {noisy.sum()} images bear one of its {len(noises)} names", file=sys.stderr
            )
    elif not noisy.any():
        print(
            f"{images.name}: no noise list, so nothing is cleaned; published figures are usually "
            f"cleaned ones, by --{images.name}-noises {NOISES.format(images.name)}",
            file=sys.stderr,
        )
    for start in range(0, len(features), 65536):  # in place, a part at a time: there is much of it
        block = slice(start, start + 65536)
        features[block] = metrics.normalized(features[block])
    return features, numbers, noisy


@command(parser=build_parser)
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    _check_flags(args)
    facescrub, megaface = (
        ImageSet(name, read_list(getattr(args, f"{name}_lst")), getattr(args, f"{name}_root"))
        for name in SETS
    )
    if args.model:
        _run_extraction(args, (facescrub, megaface))
    probes, probe_numbers, noisy_probes = _load_and_clean(args, facescrub)
    distractors, numbers, noisy = _load_and_clean(args, megaface)
    people = facescrub.people()[probe_numbers]
    if noisy_probes.any():
        probes = clean_probes(probes, people, noisy_probes)
    if args.feature_dir_out:
        nobody = np.zeros(len(probes), bool)
        write = functools.partial(write_cleaned, folder=args.feature_dir_out, algo=args.algo)
        write(facescrub, probe_numbers, probes, nobody)
        write(megaface, numbers, distractors, noisy)
    mates = find_mates(probes, people)
    ranking = rank_distractors(
        probes, distractors, args.sizes, args.max_rank, TAIL, args.seed, np.flatnonzero(~noisy)
    )
    result = {
        **summarize(ranking, mates, args.algo),
        "probes": len(probes),
        "people": len(np.unique(people)),
        "noisy_probes": int(noisy_probes.sum()),
        "noisy_distractors": int(noisy.sum()),
        "missing_probes": len(facescrub.images) - len(probe_numbers),
        "missing_distractors": len(megaface.images) - len(numbers),
    }
    plots.save_all([result], args.result_dir, f"{args.algo}-")
    if args.report:
        write_results(args.report, lines_of(result)[0], [result])
    if args.json != "-":
        print("\n".join(lines_of(result)))
        print(f"figures are in {args.result_dir}")
        if args.report:
            print(f"the page is {args.report}")
    if args.json:
        print_json({"results": [result]}, args.json)


if __name__ == "__main__":
    sys.exit(main())
