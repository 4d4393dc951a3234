"""Find the faces in photographs and align them as networks want them: 112x112, ArcFace's template.

    python tools/align.py --detector det_10g.onnx --input photos --output faces

--input holds photographs in folders of any depth, as one folder per person. --output gets one face
per photograph, under the same name in the same folders, and beside them

    faces.csv    what was found in each photograph (box, score, landmarks), or why it has no face
    label.txt    insightface's list of landmarks: dir2rec --input photos --list faces/label.txt
    sheet.png    the faces that the detector was least sure of, to look at

The detector is a file that you have: SCRFD of insightface's packs (det_10g.onnx of buffalo_l,
det_500m.onnx of buffalo_s; it needs the extra onnx), or OpenCV's YuNet
(face_detection_yunet_2023mar.onnx or _2026may.onnx; its int8 files were not tried). Photographs are
turned as their EXIF data say. Called again, the command goes on where it was stopped, and aligns
what is new or was changed.
"""

from __future__ import annotations

if not __package__:
    import require_dsoftmax

import argparse
import dataclasses
import os
import sys

from dsoftmax.recognition.common.cli import (
    add_json_flag,
    add_threads_flag,
    command,
    image_size,
    make_parser,
    print_json,
    some_of,
)
from dsoftmax.recognition.data.detection import FaceFinder, add_detector_flags, open_detector
from dsoftmax.recognition.data.folders import EXTENSIONS
from dsoftmax.recognition.data.images import FEW, load_rgb
from dsoftmax.recognition.data.photographs import TABLE, Summary, align_photographs, read_faces

SHEET = "sheet.png"
MOST_SHOWN, COLUMNS = 80, 10  # faces on the sheet


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = make_parser("align", __doc__)
    files = parser.add_argument_group("files")
    files.add_argument("--input", required=True, help="folder of the photographs")
    files.add_argument("--output", required=True, help="folder of the faces")
    files.add_argument("--image-size", type=image_size, default="112,112", help="height,width")
    photographs = add_detector_flags(parser, required=True)
    photographs.add_argument(
        "--min-score",
        type=float,
        help="least score of a face, 0 to 1; by default 0.5 (SCRFD) or 0.7 (YuNet)",
    )
    add_threads_flag(parser, "photographs at a time")
    add_json_flag(parser)
    return parser


@command(parser=build_parser, needs=["opencv"])
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    finder = FaceFinder(open_detector(args.detector, args.min_score), args.face)
    summary = align_photographs(args.input, args.output, finder, args.image_size, args.threads)
    if summary.aligned:
        draw_least_certain(args.output)
    if args.json != "-":
        _print_summary(summary, args)
    if args.json:
        print_json(dataclasses.asdict(summary), args.json)


def draw_least_certain(folder: str) -> None:
    """Draw the faces with the lowest scores on a sheet in their folder."""
    from dsoftmax.eval.sheets import Tile, draw_sheet, save_sheet

    faces = sorted(read_faces(folder), key=lambda face: face.score)[:MOST_SHOWN]
    tiles = [
        Tile(load_rgb(os.path.join(folder, face.output)), [f"{face.score:.2f}", face.output])
        for face in faces
    ]
    rows = [tiles[start : start + COLUMNS] for start in range(0, len(tiles), COLUMNS)]
    save_sheet(draw_sheet(rows), os.path.join(folder, SHEET))


def _print_summary(summary: Summary, args: argparse.Namespace) -> None:
    before = f", {summary.done_before} of them by an earlier run" if summary.done_before else ""
    print(
        f"{summary.aligned} faces of {summary.photographs} photographs in {args.output}{before}; "
        f"{os.path.join(args.output, TABLE)} lists them"
    )
    if summary.aligned:
        print(f"the least certain are in {os.path.join(args.output, SHEET)}: look at them")
    if summary.several:
        print(f"{summary.several} photographs show several faces, the {args.face} was taken")
    for entries, what in (
        (summary.faceless, "photographs without a face:"),
        (summary.unreadable, "photographs could not be read:"),
    ):
        if entries:
            print(f"{len(entries)} {what}")
            print(some_of(entries))
    if summary.skipped:
        print(f"files skipped, as they are not {', '.join(EXTENSIONS)}: {len(summary.skipped)}")
        print(some_of(summary.skipped, FEW))
    if summary.orphans:
        print(f"{len(summary.orphans)} faces are there whose photographs are gone:")
        print(some_of(summary.orphans, FEW))


if __name__ == "__main__":
    sys.exit(main())
