"""Table 3: the time that a training step of the loss layer takes, and the claim about it."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dsoftmax.recognition.common.files import AtomicFile
from dsoftmax.tools.reproduction.claims import Difference, judge, judge_all, paired_difference
from dsoftmax.tools.reproduction.markdown import bold, row

FILE = "speed.json"
# Seconds of the loss layer in the paper's Table 3.
PAPER = {"nsoftmax": 3.12, "rand_softmax": 0.20, "hf_softmax": 2.04, "dsoftmax_k": 0.21}
LABELS = {
    "nsoftmax": "Softmax",
    "rand_softmax": "Rand-Softmax",
    "hf_softmax": "HF-Softmax",
    "dsoftmax_k": "D-Softmax-K",
}
CLAIM = "**(7)** D-Softmax-K is as fast as Rand-Softmax, and far faster than Softmax and HF-Softmax"


class Faster(NamedTuple):
    """A statement: D-Softmax-K is at least so many times as fast as another loss."""

    than: str
    times: float


STATEMENTS = (Faster("rand_softmax", 0.9), Faster("nsoftmax", 5), Faster("hf_softmax", 2))


@dataclass(frozen=True)
class Size:
    """Of the head whose steps are measured."""

    classes: int
    width: int = 512
    batch_size: int = 256
    part: int = 64  # the sampling rate is 1 / part


PAPERS_SIZE = Size(757_000)
QUICK_SIZE = Size(20_000, width=128, batch_size=62, part=16)
WARM_UPS, STEPS = 3, 10


@dataclass(frozen=True)
class Speed:
    """What was measured: the losses took turns, so that their steps are pairs.

    Attributes
    ----------
    size : Size
    seconds : dict of str to list of float
        Of each step of each loss.
    """

    size: Size
    seconds: dict[str, list[float]]

    def times_as_fast(self, than: str) -> Difference:
        """Return how many times as fast as another loss D-Softmax-K is, with its interval."""
        logarithms = (np.log(self.seconds[loss]) for loss in (than, "dsoftmax_k"))
        difference = paired_difference(*logarithms)
        return Difference(*map(math.exp, difference[:3]), difference.pairs)


def measure(folder: str, size: Size) -> None:
    """Measure the steps of all losses, if that was not done before, and keep the times."""
    path = os.path.join(folder, FILE)
    known = read(path)
    if known is not None and known.size == size:
        return
    from dsoftmax.tools.benchmarks import loss

    contenders = [
        loss.Contender(
            name, size.classes, size.width, size.batch_size, 1 / size.part, name=LABELS[name]
        )
        for name in LABELS
    ]
    results = loss.measure(contenders, WARM_UPS, STEPS)
    seconds = {result["loss"]: result["step_seconds"] for result in results}
    with AtomicFile(path, "w") as file:
        json.dump({"size": vars(size), "seconds": seconds}, file, indent=2)


def read(path: str) -> Speed | None:
    """Return what `measure` has kept; None if it was not called yet."""
    try:
        with open(path, encoding="utf-8") as file:
            kept = json.load(file)
    except FileNotFoundError:
        return None
    return Speed(Size(**kept["size"]), kept["seconds"])


def speed_table(speed: Speed) -> str:
    """Lay out the median times beside the paper's, and the verdict on the claim about them."""
    medians = {loss: float(np.median(speed.seconds[loss])) for loss in LABELS}
    size = speed.size
    lines = [
        f"A step of the loss layer: {size.classes:,} classes, D = {size.width}, batches of "
        f"{size.batch_size}, 1/{size.part} of the classes sampled; one thread.\n",
        row(["loss", "seconds", "times as fast as Softmax", "*the paper*", "*times as fast*"]),
        row(["---"] * 5),
    ]
    for loss, seconds in medians.items():
        speedups = [f"{of['nsoftmax'] / of[loss]:.1f}" for of in (medians, PAPER)]
        lines.append(
            row(
                [
                    LABELS[loss],
                    f"{seconds:.3g}",
                    speedups[0],
                    f"*{PAPER[loss]:.2f}*",
                    f"*{speedups[1]}*",
                ]
            )
        )
    return "\n".join([*lines, "", *_verdict_lines(speed)])


def _verdict_lines(speed: Speed) -> list[str]:
    rows, verdicts = [], []
    for statement in STATEMENTS:
        ratio = speed.times_as_fast(statement.than)
        logarithms = Difference(*map(math.log, ratio[:3]), ratio.pairs)
        verdicts.append(judge(logarithms, -math.log(statement.times)))
        compared = (
            f"D-Softmax-K is at least {statement.times:g} times as fast as {LABELS[statement.than]}"
        )
        interval = f"{ratio.mean:.2f} [{ratio.low:.2f}, {ratio.high:.2f}] times"
        rows.append(row(["", compared, interval, str(ratio.pairs), verdicts[-1]]))
    return [
        row(["claim", "compared", "ratio [95 % interval]", "steps", "verdict"]),
        row(["---"] * 5),
        row([CLAIM, "", "", "", bold(judge_all(verdicts))]),
        *rows,
    ]
