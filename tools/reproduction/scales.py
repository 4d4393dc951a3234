"""The datasets and settings of a reproduction, from ten minutes to hours on two cores."""

from __future__ import annotations

import argparse
import os
import tempfile
import zlib
from dataclasses import dataclass, replace
from typing import Any, Callable

from dsoftmax.recognition.data.synthetic import make_dataset
from dsoftmax.tools.reproduction.grid import PAPERS_WAY, Cell, Setting, cell_names
from dsoftmax.tools.reproduction.people import split

FOUNDATION_STEPS = 20000


@dataclass(frozen=True)
class Faces:
    """Synthetic faces that are drawn once, and cut into people to train on and to test on."""

    name: str
    identities: int
    images: int
    size: int
    held_out: int  # people to choose settings with, and as many to test on
    seed: int = 77

    def prepare(self, cache: str, threads: int) -> None:
        """Draw the dataset if it is not there."""
        prepare(self.name, cache, self.held_out, lambda folder: self._draw(folder, threads))

    def _draw(self, folder: str, threads: int) -> str:
        make_dataset(
            folder,
            identities=self.identities + 2 * self.held_out,
            images=self.images,
            val_identities=0,
            pairs=0,
            seed=self.seed,
            size=self.size,
            threads=threads,
        )
        return folder


def prepare(name: str, cache: str, held_out: int, source: Callable[[str], str]) -> None:
    """Cut a dataset into the parts of a study, if that was not done before.

    Parameters
    ----------
    name : str
    cache : str
    held_out : int
    source : callable
        Returns the folder of the dataset, given a folder where it may be made.
    """
    folder = os.path.join(cache, "datasets", name)
    if os.path.exists(folder):
        return
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    with tempfile.TemporaryDirectory(dir=os.path.dirname(folder), prefix=".making-") as scratch:
        split(source(os.path.join(scratch, "whole")), os.path.join(scratch, "parts"), held_out)
        os.rename(os.path.join(scratch, "parts"), folder)


def setting_of(
    name: str, title: str, data: str, scale: float, part: int, seeds: int, **flags: Any
) -> Setting:
    """Return a setting whose trials begin with a network trained by Rand-Softmax, or from nothing.

    Parameters
    ----------
    name, title, data, scale, part, seeds
        As for `Setting`.
    **flags
        Of ``train.py``, with underscores; ``foundation_steps`` are those of the network that all
        trials of a seed begin with, 0 for random weights.
    """
    steps = flags.pop("foundation_steps")
    common = {
        "network": "tiny",
        "lr": 0.1,
        "lr-schedule": "cosine",
        **{flag.replace("_", "-"): value for flag, value in flags.items()},
    }
    options = {"scale": scale, "sample_rate": 1 / part, **PAPERS_WAY}
    loss = Cell("foundation", "", "rand_softmax", options)
    foundation = (loss, {"max-steps": steps}) if steps else None
    return Setting(name, title, data, scale, part, seeds, common, foundation)


# What is trained again with another scale, and for longer and from random weights.
RESCALED = ("softmax", "rand-softmax", "d-0.3", "d-0.9", "k-0.3", "k-0.9")
FROM_NOTHING = ("softmax", "rand-softmax", "d-0.3", "d-0.9", "k-0.3", "k-0.9")


def small_settings(seeds: int) -> list[Setting]:
    """Return the settings of the committed tables: the main one, and two that check it."""
    main = setting_of(
        "faces",
        "20,000 synthetic identities, s = 16",
        data=SMALL_FACES.name,
        scale=16,
        part=64,
        seeds=seeds,
        per_batch_size=62,
        max_steps=3000,
        foundation_steps=FOUNDATION_STEPS,
    )
    scaled = replace(main, name="faces-s32", title="The same with s = 32", scale=32, only=RESCALED)
    long = replace(
        main,
        name="faces-from-nothing",
        title=f"{FOUNDATION_STEPS:,} steps from random weights, s = 16",
        flags={**main.flags, "max-steps": FOUNDATION_STEPS},
        foundation=None,
        only=FROM_NOTHING,
    )
    return [main, scaled, long]


SMALL_FACES = Faces("faces", identities=20000, images=8, size=40, held_out=1000)
QUICK_FACES = Faces("faces-quick", identities=1280, images=5, size=32, held_out=120)


def own_setting(args: argparse.Namespace) -> Setting:
    """Return the setting of a user's own dataset; `args` are those of ``tools/reproduce.py``."""
    legal = cell_names(args.part)
    unknown = [row for row in args.only if row not in legal]
    if unknown:
        raise ValueError(f"--only: there is no row {unknown[0]!r}, only {', '.join(legal)}")
    path = os.path.abspath(args.data_dir)
    name = os.path.basename(path)
    setting = setting_of(
        name,
        f"{name}, s = {args.logit_scale:g}",
        # Another folder of this name, or another number of people, must not find this one's parts.
        data=f"{name}-{args.held_out}-{zlib.crc32(path.encode()):08x}",
        scale=args.logit_scale,
        part=args.part,
        seeds=args.seeds or 5,
        per_batch_size=args.batch_size,
        max_steps=args.steps,
        foundation_steps=args.foundation_steps,
        rand_mirror=args.rand_mirror,
    )
    return replace(setting, only=tuple(args.only))


def quick_setting(seeds: int) -> Setting:
    """Return a setting that shows how everything works in minutes, and decides nothing."""
    return setting_of(
        "quick",
        "1,280 synthetic identities, a few steps: a demonstration that decides nothing",
        data=QUICK_FACES.name,
        scale=16,
        part=16,
        seeds=seeds,
        per_batch_size=16,
        max_steps=100,
        foundation_steps=400,
    )
