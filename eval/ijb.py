"""Evaluate on IJB-B or IJB-C: 1:1 verification and 1:N identification of templates.

    python eval/ijb.py --data-dir IJBC --target IJBC --model models/r50-dsoftmax-emore/model,1
    python eval/ijb.py --data-dir IJBC --target IJBC --features features.npy --job mine
    python eval/ijb.py -m models/r50-dsoftmax-emore/model,1 -d data -s IJBC -B

The data are insightface's: loose_crop/*.jpg and meta/ with, for IJBC,

    ijbc_name_5pts_score.txt, ijbc_face_tid_mid.txt     faces; templates and media
    ijbc_template_pair_label.txt                        1:1
    ijbc_1N_gallery_G1.csv, …_G2.csv, ijbc_1N_probe_mixed.csv    1:N (IJBB: S1, S2)

A protocol whose files are missing is skipped. Embeddings are saved under --result-dir as they are
made, so that an interrupted run resumes where it stopped. Faces that can't be read are listed and
ignored; a template without any readable face gets the lowest score with everybody. Every probe
searches each gallery: probes of people in the gallery determine the ranks, all others the
threshold. The figures of the galleries are then averaged.

The short flags are those of insightface's ijb_evals.py, whose -d is the folder above IJBC.
"""

from __future__ import annotations

if not __package__:
    import require_dsoftmax

import argparse
import hashlib
import itertools
import os
import sys
from typing import Any, NamedTuple

import numpy as np

from dsoftmax.eval import plots, templates
from dsoftmax.eval.feature_cache import Features, cached_features
from dsoftmax.eval.ijb_protocols import (
    FARS,
    mean_of_galleries,
    paper_row,
    read_known_people,
    search,
    search_lines,
    table,
    verify_templates,
)
from dsoftmax.eval.models import (
    Model,
    load_model,
    missing_model,
    say_where,
    single_model,
)
from dsoftmax.eval.result_page import write_results
from dsoftmax.recognition.common.arrays import map_npy
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
from dsoftmax.recognition.data.images import load_rgb

GALLERIES = {"IJBB": ("S1", "S2"), "IJBC": ("G1", "G2")}
IMAGE_SIZE = (112, 112)
LARGEST = 1e15  # number of a feature, so that float32 holds the squares of sums


def embed_faces(args: argparse.Namespace, faces: templates.Faces) -> Features:
    """Return the embeddings of all faces, resuming what an earlier run has done."""
    crops = os.path.join(args.data_dir, "loose_crop")
    model = single_model(args.model)
    size = args.image_size or model.trained_size() or IMAGE_SIZE
    contexts = gpu_contexts(args.gpu)
    if not os.path.isdir(crops):
        raise FileNotFoundError(f"{crops}: there is no such folder; it holds the face images")

    def load(face: int) -> np.ndarray:
        path = os.path.join(crops, faces.names[face])
        return load_rgb(path, size, faces.landmarks[face])

    def load_network() -> Model:
        network = load_model(model, contexts)
        say_where(model, contexts, size)
        return network

    described = "\n".join(faces.names).encode() + faces.landmarks.tobytes()
    return cached_features(
        os.path.join(args.result_dir, "features"),
        args.target,
        {"model": model.digest(), "faces": hashlib.sha256(described).hexdigest()},
        len(faces.names),
        load_network,
        load,
        size,
        args.batch_size,
        args.threads,
    )


def read_features(path: str, count: int) -> Features:
    """Map features from a file: (faces, D), or (faces, 2, D) with those of mirror images."""
    views = map_npy(path)
    if views.ndim == 2:
        views = views[:, None, :]
    if views.ndim != 3 or views.dtype.kind != "f" or views.shape[1] not in (1, 2):
        raise ValueError(
            f"{path}: features are floats (faces, width), or (faces, 2, width) with the mirror "
            "images'"
        )
    if len(views) != count:
        raise ValueError(f"{path}: {len(views)} rows for {count} faces")
    for start in range(0, count, templates.ROWS_PER_BLOCK):
        block = np.abs(views[start : start + templates.ROWS_PER_BLOCK])
        is_bad = ~(block < LARGEST).all(axis=(1, 2))
        if is_bad.any():
            raise ValueError(
                f"{path}: row {start + is_bad.argmax()} holds NaN, or numbers beyond {LARGEST:g}"
            )
    return Features(views, [])


class _Files(NamedTuple):
    """Paths of the files that describe a target."""

    folder: str
    target: str

    def path(self, rest: str) -> str:
        return os.path.join(self.folder, "meta", f"{self.target.lower()}_{rest}")

    @property
    def pairs(self) -> str:
        return self.path("template_pair_label.txt")

    @property
    def galleries(self) -> dict[str, str]:
        return {name: self.path(f"1N_gallery_{name}.csv") for name in GALLERIES[self.target]}

    @property
    def probes(self) -> str:
        return self.path("1N_probe_mixed.csv")

    def has(self, protocol: str) -> bool:
        needed = [self.pairs] if protocol == "11" else [*self.galleries.values(), self.probes]
        return all(os.path.exists(path) for path in needed)


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = make_parser("ijb", __doc__)
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", "-m", "--model_file", default="", help="prefix,epoch or file.onnx"
    )
    model.add_argument("--model-prefix", default="", help="as insightface's; with --model-epoch")
    model.add_argument("--model-epoch", type=int, default=1, help="with --model-prefix")
    model.add_argument("--features", help=".npy file of features, instead of a model")
    data = parser.add_argument_group("data")
    data.add_argument(
        *("--target", "-s", "--subset"),
        choices=sorted(GALLERIES),
        default="IJBC",
        help="the dataset",
    )
    data.add_argument(
        "--data-dir", "--image-path", help="folder of loose_crop and meta; by default ./<target>"
    )
    data.add_argument("-d", "--data_path", help="or the folder that holds <target>")
    data.add_argument(
        "--image-size",
        type=image_size,
        help="height,width; by default those of the model's training, or else 112,112",
    )
    data.add_argument(
        "--protocol", choices=("11", "1n"), help="run one; by default all whose files exist"
    )
    data.add_argument(
        *("-N", "--is_one_2_N"), dest="protocol", action="store_const", const="1n", help="1:N alone"
    )
    pooling = parser.add_argument_group("pooling of faces into templates")
    for flag, what in (
        ("flip", "F: sum the embeddings of image and mirror image"),
        ("norm", "N: keep the length of embeddings as a weight"),
        ("detector", "D: weight by the detector's score"),
    ):
        pooling.add_argument(f"--{flag}", type=int, choices=(0, 1), default=1, help=what)
    pooling.add_argument(
        "-B", "--is_bunch", action="store_true", help="1:1 with all eight settings of N, D and F"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--result-dir", help="folder of results; by default ./<target>_result")
    output.add_argument("--job", default="insightface", help="name of the results")
    add_report_flag(output)
    add_json_flag(output)
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--gpu", help="ids, as 0 or 0,1; -1 for the CPU; by default CUDA_VISIBLE_DEVICES"
    )
    machine.add_argument(
        "--batch-size", "-b", "--batch_size", type=int, default=32, help="images per batch"
    )
    add_threads_flag(machine)
    return parser


def _check_flags(args: argparse.Namespace) -> _Files:
    if args.data_dir and args.data_path:
        raise ValueError(
            "--data-dir and -d: one of them, the folder of loose_crop or the one above it"
        )
    args.data_dir = args.data_dir or os.path.join(args.data_path or "", args.target)
    if args.is_bunch and args.protocol == "1n":
        raise ValueError("-B compares settings of 1:1, and -N asks for 1:N alone")
    args.result_dir = args.result_dir or f"{args.target}_result"
    if args.model_prefix:
        args.model = f"{args.model_prefix},{args.model_epoch}"
    either = "give either --model prefix,epoch or --features file.npy"
    if args.model and args.features:
        raise ValueError(either)
    if not (args.model or args.features):
        raise missing_model(either)
    for name in ("batch_size", "threads"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be 1 or more")
    files = _Files(args.data_dir, args.target)
    wanted = [args.protocol] if args.protocol else ["11", "1n"]
    if not any(files.has(protocol) for protocol in wanted):
        needed = [files.pairs] if "11" in wanted else []
        needed += [files.probes] if "1n" in wanted else []
        raise FileNotFoundError(
            f"{' and '.join(needed)}: there is no such file; is --data-dir {args.data_dir} the "
            f"folder of {args.target}?"
        )
    return files


def report_unreadable(features: Features, faces: templates.Faces, args: argparse.Namespace) -> None:
    """List the faces that were ignored because they can't be read."""
    if not features.unreadable:
        return
    lines = [f"{faces.names[face]}: {why}" for face, why in features.unreadable]
    path = os.path.join(args.result_dir, f"{args.job}-unreadable.txt")
    with AtomicFile(path, "w") as file:
        file.write("\n".join(lines) + "\n")
    print(
        f"{len(lines)} of {len(faces.names)} faces can't be read and count for nothing "
        f"(all are in {path}):\n{some_of(lines, 5)}",
        file=sys.stderr,
    )


def run_verification(
    args: argparse.Namespace, files: _Files, pooled: templates.Templates, name: str
) -> tuple[list[str], dict[str, Any]]:
    """Run 1:1, save scores and curve; return lines for people and values for machines."""
    pairs = templates.read_pairs(files.pairs)
    scores, points = verify_templates(pooled, pairs, args.threads)
    genuine, impostor = scores[pairs.issame], scores[~pairs.issame]
    lines = [
        f"1:1, {len(genuine)} pairs of one person, {len(impostor)} of two, TAR (%) at FAR:",
        table({name: points}),
        f"as in the paper, FAR 1e-1, 1e-2, 1e-3, 1e-4: {paper_row(points)}",
    ]
    curve = plots.sample_roc(genuine, impostor)
    stem = os.path.join(args.result_dir, args.job)
    with AtomicFile(f"{stem}.npy") as file:
        np.save(file, scores)
    plots.save_both(plots.draw_roc({name: curve}), stem)
    return lines, {
        "tar_at_far": {f"{far:g}": point.tar for far, point in zip(FARS, points)},
        "thresholds": {f"{far:g}": point.threshold for far, point in zip(FARS, points)},
        "roc": curve._asdict(),
        "scores": plots.bin_scores(genuine, impostor)._asdict(),
    }


def run_bunch(
    args: argparse.Namespace,
    files: _Files,
    features: Features,
    faces: templates.Faces,
    members: templates.Members,
) -> tuple[list[str], list[dict[str, Any]]]:
    """Run 1:1 with all settings; return lines for people and values for machines."""
    pairs = templates.read_pairs(files.pairs)
    points_by_name, curves, results = {}, {}, []
    flips = (False, True) if features.views.shape[1] == 2 else (False,)
    for norm, detector, flip in itertools.product((False, True), (False, True), flips):
        switches = {"norm": norm, "detector": detector, "flip": flip}
        pooled = templates.pool(features.views, faces.scores, members, **switches)
        scores, points = verify_templates(pooled, pairs, args.threads)
        name = f"{args.job}-{args.target}-{_name_of(**switches)}"
        points_by_name[name] = points
        curves[name] = plots.sample_roc(scores[pairs.issame], scores[~pairs.issame])
        rates = {f"{far:g}": point.tar for far, point in zip(FARS, points)}
        results.append({"name": name, "switches": _name_of(**switches), "tar_at_far": rates})
    plots.save_both(
        plots.draw_roc(curves), os.path.join(args.result_dir, f"{args.job}-all-settings")
    )
    return ["1:1, TAR (%) at FAR:", table(points_by_name)], results


def _name_of(norm: bool, detector: bool, flip: bool) -> str:
    return f"N{int(norm)}D{int(detector)}F{int(flip)}"


def run_identification(
    args: argparse.Namespace, files: _Files, pooled: templates.Templates, name: str
) -> tuple[list[str], dict[str, Any]]:
    """Run 1:N, save the curve; return lines for people and values for machines."""
    probes = read_known_people(files.probes, pooled)
    searches = [
        search(pooled, read_known_people(path, pooled), probes, gallery)
        for gallery, path in files.galleries.items()
    ]
    means = mean_of_galleries(searches)
    figure = plots.draw_cmc({name: means["cmc"]})
    plots.save_both(figure, os.path.join(args.result_dir, f"{args.job}-cmc"))
    return ["1:N", *search_lines(searches)], means


@command(parser=build_parser)
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    files = _check_flags(args)
    faces = templates.read_faces(files.path("name_5pts_score.txt"))
    members = templates.read_members(files.path("face_tid_mid.txt"), faces.names)
    if args.features:
        features = read_features(args.features, len(faces.names))
    else:
        features = embed_faces(args, faces)
    report_unreadable(features, faces, args)
    if args.is_bunch:
        _finish(args, *run_bunch(args, files, features, faces, members))
        return
    # Features without mirror images are taken as they are.
    flip = bool(args.flip) and features.views.shape[1] == 2
    switches = {"flip": flip, "norm": bool(args.norm), "detector": bool(args.detector)}
    pooled = templates.pool(features.views, faces.scores, members, **switches)
    name = f"{args.job}-{args.target}"
    result: dict[str, Any] = {
        "name": name,
        "model": args.model or args.features,
        "faces": len(faces.names),
        "unreadable_faces": len(features.unreadable),
        "templates": len(pooled.ids),
        "empty_templates": int(pooled.is_empty.sum()),
        "switches": _name_of(**switches),
    }
    lines = [
        f"{args.target}: {result['faces']} faces, {result['templates']} templates "
        f"({result['empty_templates']} without a readable face), {result['switches']}"
    ]
    for protocol, run in (("11", run_verification), ("1n", run_identification)):
        if args.protocol in (None, protocol) and files.has(protocol):
            more, figures = run(args, files, pooled, name)
            lines += more
            result.update(figures)
    _finish(args, lines, [result])


def _finish(args: argparse.Namespace, lines: list[str], results: list[dict[str, Any]]) -> None:
    if args.report:
        write_results(args.report, f"{results[0].get('model', args.job)}; {lines[0]}", results)
    if args.json != "-":
        print("\n".join(lines))
        print(f"scores and figures are in {args.result_dir}, named {args.job}")
        if args.report:
            print(f"the page is {args.report}")
    if args.json:
        print_json({"results": results}, args.json)


if __name__ == "__main__":
    sys.exit(main())
