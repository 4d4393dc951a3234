r"""Embed images: a face becomes a row of a .npy file.

    python tools/embed.py --model models/y1/model,0 --input people --output people.npy
    python tools/embed.py --model y1.onnx --input faces_emore --flip --normalize --output emore.npy

--input is one of these:

    image files       one or more
    a folder          of images, or of one folder per person, whose name is the label
    a list            .txt, .csv, .tsv or .lst with one image per line: a path, and perhaps a label
                      and five landmarks (insightface's .lst and label.txt, or a csv with the
                      heading path,label,x1,y1,x2,y2,x3,y3,x4,y4,x5,y5)
    a dataset         its folder or its .rec
    a .bin            verification pairs

Rows are in the order of the input. The .csv beside the output names them: row, path (or the key in
a .rec, the number in a .bin), label, why an image could not be read (its row is 0), and the size of
images that were fitted without landmarks. A job that was interrupted, even by kill -9, goes on
where it stopped when the same command is given again.
"""

from __future__ import annotations

if not __package__:
    import require_dsoftmax

import argparse
import sys

from dsoftmax.eval.embedding_files import Job, csv_path, embed_to_file
from dsoftmax.eval.model_flags import add_model_flags, complaints, model_name, open_model, resumable
from dsoftmax.recognition.common.cli import add_json_flag, command, make_parser, print_json
from dsoftmax.recognition.data.detection import add_detector_flags, open_finder
from dsoftmax.recognition.data.inputs import open_images


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = make_parser("embed", __doc__)
    files = parser.add_argument_group("files")
    files.add_argument(
        "--input", nargs="+", required=True, help="images, a folder, a list, a .rec or a .bin"
    )
    files.add_argument(
        "--data-dir", help="paths in a list are relative to it; by default to the list's folder"
    )
    files.add_argument("--output", required=True, help="the .npy, (images, width) float32")
    files.add_argument(
        "--overwrite", action="store_true", help="replace an existing file, or begin a job anew"
    )
    embeddings = parser.add_argument_group("embeddings")
    embeddings.add_argument(
        "--flip", action="store_true", help="add the mirror image's, as insightface's verification"
    )
    embeddings.add_argument("--normalize", action="store_true", help="scale them to length 1")
    add_detector_flags(parser)
    add_model_flags(parser.add_argument_group("model"))
    add_json_flag(parser)
    return parser


@command(parser=build_parser, needs=["opencv", "mxnet"])
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    name = model_name(args)
    images = open_images(args.input, args.data_dir, open_finder(args.detector, args.face))
    embed, size = open_model(args, name, images.image_size)
    job = Job(embed, images, size, args.flip, args.normalize)
    with resumable():
        done = embed_to_file(job, args.output, args.batch_size, args.threads, args.overwrite)
    of_images = complaints(images, done)
    of_images.say(size)
    if args.json:
        results = {
            "output": args.output,
            "names": csv_path(args.output),
            "images": done.images,
            "width": done.width,
            "resumed_at": done.resumed_at,
            **of_images._asdict(),
        }
        print_json(results, args.json)
    if args.json != "-":
        resumed = f"; the first {done.resumed_at} were there already" if done.resumed_at else ""
        print(
            f"{done.images} embeddings of width {done.width} in {args.output}, their names in "
            f"{csv_path(args.output)}{resumed}"
        )


if __name__ == "__main__":
    sys.exit(main())
