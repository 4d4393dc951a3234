"""Compare faces: the cosine of two, and whether they show one person.

    python tools/compare.py ann.jpg bo.jpg --model models/y1/model,0
    python tools/compare.py ann.jpg bo.jpg --model models/y1/model,0 --calibration results.json
    python tools/compare.py *.jpg --model models/y1/model,0 --threshold 0.35 --plot pairs.png

Embeddings are sums with the mirror image's, as in verification. A verdict needs a threshold: your
own, or that of a calibration, which eval/verification.py --calibrate 1e-2,1e-3 --json results.json
writes for this very model. With a calibration the command also says how many pairs of different
people are as alike. More than two images give the matrix of all pairs.
"""

from __future__ import annotations

if not __package__:
    import require_dsoftmax

import argparse
import sys

from dsoftmax.eval.comparison import (
    Threshold,
    compare,
    draw_comparison,
    matrix_lines,
    rate_line,
    read_calibration,
)
from dsoftmax.eval.embed import embed_faces
from dsoftmax.eval.model_flags import add_model_flags, complaints, model_name, open_model
from dsoftmax.eval.sheets import save_sheet
from dsoftmax.recognition.common.cli import add_json_flag, command, cosine, make_parser, print_json
from dsoftmax.recognition.data.detection import add_detector_flags, open_finder
from dsoftmax.recognition.data.inputs import open_images


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = make_parser("compare", __doc__)
    parser.add_argument(
        "images", nargs="+", help="two or more image files, or a folder or list of them"
    )
    decision = parser.add_argument_group("decision")
    decision.add_argument("--threshold", type=cosine, help="cosine above which it is one person")
    decision.add_argument("--calibration", metavar="FILE", help="results.json of this model")
    decision.add_argument(
        "--far",
        type=float,
        help="take the calibration's threshold for this false accept rate; by default for the "
        "lowest that its pairs can show",
    )
    add_detector_flags(parser)
    add_model_flags(parser.add_argument_group("model"))
    output = parser.add_argument_group("output")
    output.add_argument("--plot", metavar="FILE", help="draw the faces as the network saw them")
    add_json_flag(output)
    return parser


@command(parser=build_parser, needs=["opencv", "mxnet"])
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    if args.far is not None and not args.calibration:
        raise ValueError("--far needs a --calibration")
    if args.far is not None and args.threshold is not None:
        raise ValueError("--far and --threshold: one of them")
    name = model_name(args)
    calibration = read_calibration(args.calibration, name) if args.calibration else None
    threshold = None
    if args.threshold is not None:
        threshold = Threshold(args.threshold)
    elif calibration:
        threshold = calibration.threshold(args.far)
    images = open_images(args.images, find=open_finder(args.detector, args.face))
    if len(images) < 2:
        raise ValueError("comparing takes two images or more")
    names = [images.name(number) for number in range(len(images))]
    embed, size = open_model(args, name, images.image_size)
    faces = embed_faces(embed, images, size, True, args.batch_size, args.threads, desc=None)
    of_images = complaints(images, faces)
    if of_images.unreadable:
        raise ValueError(of_images.unreadable[0])
    of_images.say(size)
    pairs = compare(faces.embeddings, threshold, calibration)
    lines = matrix_lines(names, pairs)
    if len(pairs) == 1:
        lines = [f"cosine {pairs[0].cosine:.4f}{': ' if threshold else ''}{pairs[0].verdict}"]
        if calibration:
            lines.append(rate_line(pairs[0], calibration))
    if threshold:
        lines.append(str(threshold))
    else:
        lines.append("no verdict without a --threshold or a --calibration")
    if args.plot:
        title = lines if len(pairs) == 1 else lines[-1:]
        seen = [images.load(number, size).image for number in range(len(images))]
        drawn = draw_comparison(seen, names, pairs, title)
        save_sheet(drawn, args.plot)
    if args.json:
        results = {
            "model": str(name),
            "images": names,
            "fitted": of_images.fitted,
            "threshold": threshold._asdict() if threshold else None,
            "calibration": calibration.target if calibration else None,
            "pairs": [{**pair._asdict(), "verdict": pair.verdict} for pair in pairs],
        }
        print_json(results, args.json)
    if args.json != "-":
        print("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
