"""The flags of commands that run one network on images, and what they stand for."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Iterator, NamedTuple

from dsoftmax.eval.embed import EmbeddedFaces
from dsoftmax.eval.embedding_files import Embedded
from dsoftmax.eval.models import (
    Model,
    ModelName,
    load_model,
    say_where,
    single_model,
)
from dsoftmax.recognition.common.checks import whole_number
from dsoftmax.recognition.common.cli import add_threads_flag, image_size, some_of
from dsoftmax.recognition.common.devices import gpu_contexts
from dsoftmax.recognition.data.images import fitted_note, fitted_warning
from dsoftmax.recognition.data.inputs import Images

ADVICE = "find the faces by --detector, give five landmarks each in a list, or align them first"


def add_model_flags(parser: argparse._ActionsContainer) -> None:
    """Add --model, --image-size, --gpu, --batch-size and --threads."""
    parser.add_argument("--model", help="prefix,epoch or file.onnx")
    parser.add_argument(
        "--image-size",
        type=image_size,
        help="height,width; by default those of the model's training, or else the dataset's, or "
        "112,112",
    )
    parser.add_argument(
        "--gpu", help="ids, as 0 or 0,1; -1 for the CPU; by default CUDA_VISIBLE_DEVICES"
    )
    parser.add_argument("--batch-size", type=int, default=32, help="images per batch")
    add_threads_flag(parser)


def model_name(args: argparse.Namespace) -> ModelName:
    """Return the one network that --model names."""
    for name in ("batch_size", "threads"):
        whole_number(f"--{name.replace('_', '-')}", getattr(args, name), 1)
    return single_model(args.model)


def open_model(
    args: argparse.Namespace, name: ModelName, usual_size: tuple[int, int]
) -> tuple[Model, tuple[int, int]]:
    """Load a network, and say on stderr where it runs.

    Parameters
    ----------
    args : Namespace
    name : ModelName
    usual_size : (int, int)
        Of images, where neither the user nor the model says it.

    Returns
    -------
    embed, size : Model, (int, int)
        The network, and the height and width of its images.
    """
    contexts = gpu_contexts(args.gpu)
    embed = load_model(name, contexts)
    size = args.image_size or embed.image_size or usual_size
    say_where(name, contexts, size)
    return embed, size


@contextlib.contextmanager
def resumable() -> Iterator[None]:
    """Say on Ctrl-C that the job goes on from here, and leave."""
    try:
        yield
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on where it stopped", file=sys.stderr)
        raise SystemExit(130) from None


class Complaints(NamedTuple):
    """The images that can't be used, and those that may not show a face where it belongs."""

    unreadable: list[str]  # "path: why"
    fitted: list[str]  # "path (rows x columns)"

    def say(self, size: tuple[int, int]) -> None:
        """Print them on stderr; `size` is the network's."""
        if self.unreadable:
            print(f"{len(self.unreadable)} images can't be used:", file=sys.stderr)
            print(some_of(self.unreadable), file=sys.stderr)
        if self.fitted:
            print(fitted_warning(self.fitted, size, ADVICE), file=sys.stderr)


def complaints(images: Images, done: Embedded | EmbeddedFaces | None) -> Complaints:
    """Collect what is to be said of images that were embedded; None stands for none of them."""
    if done is None:
        return Complaints([], [])
    return Complaints(
        [f"{images.name(number)}: {why}" for number, why in done.unreadable],
        [fitted_note(images.name(number), given) for number, given in done.fitted],
    )
