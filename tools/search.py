"""Search faces: build a gallery of people once, then ask who is on a photograph.

    python tools/search.py build --model models/y1/model,0 --input people --output gallery
    python tools/search.py add --gallery gallery --input more
    python tools/search.py query --gallery gallery photo.jpg other.jpg --top 5 --plot sheet.png

A gallery holds the embeddings (sums with the mirror image's, of length 1) of one folder of images
per person, or of a list, which may have landmarks as that of embed. The search is exact: every
vector is compared. Each person counts with the best image. A gallery remembers its model and
refuses others. Building goes on where a killed one stopped; `add` embeds only the images that the
gallery does not have.
"""

from __future__ import annotations

if not __package__:
    import require_dsoftmax

import argparse
import sys
import time
from typing import Any

from dsoftmax.eval import gallery as galleries
from dsoftmax.eval.embed import embed_faces
from dsoftmax.eval.gallery import Addition, Gallery, draw_matches
from dsoftmax.eval.model_flags import add_model_flags, complaints, model_name, open_model, resumable
from dsoftmax.eval.sheets import save_sheet
from dsoftmax.eval.top_matches import DTYPES
from dsoftmax.recognition.common.checks import whole_number
from dsoftmax.recognition.common.cli import add_json_flag, command, cosine, make_parser, print_json
from dsoftmax.recognition.data.detection import add_detector_flags, open_finder
from dsoftmax.recognition.data.inputs import USUAL_SIZE, open_images

INPUT = "folder with one folder of images per person; or a list with labels, perhaps landmarks"


ACTIONS = {
    "build": "build a gallery",
    "add": "add images to a gallery",
    "query": "find the people on photographs",
}


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = make_parser("search", __doc__)
    actions = parser.add_subparsers(
        dest="action",
        required=True,
        metavar="|".join(ACTIONS),
        help="each has a --help of its own",
    )
    build, add, query = (
        actions.add_parser(
            name, help=text, description=text, formatter_class=parser.formatter_class
        )
        for name, text in ACTIONS.items()
    )
    build.add_argument("--input", required=True, help=INPUT)
    build.add_argument("--output", required=True, help="folder of the gallery")
    build.add_argument(
        "--dtype",
        choices=DTYPES,
        default=galleries.DTYPE,
        help="how vectors are kept; int8 takes a quarter of the memory of float32",
    )
    add.add_argument("--input", required=True, help=INPUT)
    query.add_argument("images", nargs="+", help="photographs, or a folder or list of them")
    query.add_argument("--top", type=int, default=5, help="the most people to show per photograph")
    query.add_argument("--threshold", type=cosine, help="show only people with a higher cosine")
    query.add_argument("--plot", metavar="FILE", help="draw the faces of the people found")
    for action in (add, query):
        action.add_argument("--gallery", required=True, help="folder of the gallery")
    for action in (build, add, query):
        add_detector_flags(action)
        add_model_flags(action.add_argument_group("model"))
        add_json_flag(action)
    return parser


def _report(args: argparse.Namespace, folder: str, done: Addition, size: tuple[int, int]) -> None:
    gallery = Gallery(folder)
    of_images = complaints(done.images, done.embedded)
    of_images.say(size)
    if args.json:
        results = {
            "gallery": folder,
            "added": done.added,
            "known": done.known,
            "images": len(gallery),
            "people": gallery.num_people,
            **of_images._asdict(),
        }
        print_json(results, args.json)
    if args.json != "-":
        known = f", {done.known} were there already" if done.known else ""
        print(
            f"{done.added} images were added{known}; {folder} has {len(gallery)} images of "
            f"{gallery.num_people} people, as {gallery.dtype}"
        )


def _options(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "find": open_finder(args.detector, args.face),
        "batch_size": args.batch_size,
        "threads": args.threads,
    }


def build(args: argparse.Namespace) -> None:
    """Build a gallery."""
    embed, size = open_model(args, model_name(args), USUAL_SIZE)
    with resumable():
        done = galleries.build(args.output, args.input, embed, size, args.dtype, **_options(args))
    _report(args, args.output, done, size)


def add(args: argparse.Namespace) -> None:
    """Add images to a gallery."""
    gallery, embed, size = _open_gallery(args)
    with resumable():
        done = galleries.add(gallery, args.input, embed, **_options(args))
    _report(args, args.gallery, done, size)


def query(args: argparse.Namespace) -> None:
    """Find the people on photographs."""
    whole_number("--top", args.top, 1)
    gallery, embed, size = _open_gallery(args)
    images = open_images(args.images, find=open_finder(args.detector, args.face))
    faces = embed_faces(embed, images, size, True, args.batch_size, args.threads)
    of_images = complaints(images, faces)
    of_images.say(size)
    if not faces.readable:
        raise ValueError("none of the photographs can be used")
    start = time.perf_counter()
    matches = gallery.search(faces.embeddings, args.top, args.threshold)
    seconds = time.perf_counter() - start
    if args.plot:
        save_sheet(
            draw_matches(gallery, images, faces.readable, matches, args.threshold), args.plot
        )
    names = [images.name(number) for number in faces.readable]
    if args.json:
        results = {
            "gallery": args.gallery,
            "images": len(gallery),
            "people": gallery.num_people,
            "seconds": seconds,
            "queries": [
                {"image": name, "people": [match._asdict() for match in found]}
                for name, found in zip(names, matches)
            ],
            **of_images._asdict(),
        }
        print_json(results, args.json)
    if args.json != "-":
        for name, found in zip(names, matches):
            print(name if found else f"{name}: nobody has a higher cosine than the threshold")
            for match in found:
                print(f"  {match.cosine:.4f}  {match.person}  {match.path}")
        print(
            f"searched {len(gallery)} images of {gallery.num_people} people in "
            f"{seconds / len(names):.3f} s per photograph"
        )


def _open_gallery(args: argparse.Namespace) -> tuple:
    """Open a gallery and the model that has built it, unless --model names a copy of it."""
    gallery = Gallery(args.gallery)
    args.model = args.model or gallery.model
    args.image_size = args.image_size or gallery.size
    name = model_name(args)
    gallery.check(name)
    return (gallery, *open_model(args, name, gallery.size))


@command(parser=build_parser, needs=["opencv", "mxnet"])
def main(args: argparse.Namespace) -> None:
    """Run the command."""
    {"build": build, "add": add, "query": query}[args.action](args)


if __name__ == "__main__":
    sys.exit(main())
