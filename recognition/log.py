"""The log of a run: lines, tables and curves, in its folder and on the terminal."""

from __future__ import annotations

import csv
import gc
import math
import os
import sys
import time
from types import ModuleType
from typing import Any, Callable, NamedTuple, Sequence

from matplotlib.figure import Figure
from tqdm import tqdm

from dsoftmax.eval import plots
from dsoftmax.recognition.common.files import AtomicFile

METRICS = (
    "step",
    "epoch",
    "lr",
    "accuracy",
    "loss",
    "intra",
    "inter",
    "inter_above_floor",
    "teacher",
    "positive_cosine",
    "negative_cosine",
    "max_negative_cosine",
    "samples_per_second",
)
SECONDS_BETWEEN_DRAWINGS = 30.0
SCORES = ("step", "target", "accuracy", "deviation", "xnorm")
TIMES = ("step", "data", "network", "head", "update")  # seconds per step


class RunLog:
    """Lines to stdout and ``train.log``, numbers to csv files, curves to ``curves.png``.

    Parameters
    ----------
    folder : str
        The folder of the run.
    from_step : int
        The step a run resumes from; what the tables hold of later steps is dropped, because the
        run will write it again.
    total_steps : int
        For the progress bar; 0 is unknown.
    tensorboard : bool
        Whether to write TensorBoard's events, too.
    is_verified : bool
        Whether the verification of `from_step` was completed; if not, its scores are dropped, too.
    """

    def __init__(
        self,
        folder: str,
        from_step: int = 0,
        total_steps: int = 0,
        tensorboard: bool = False,
        is_verified: bool = True,
    ):
        self._folder = folder
        self._lines = open(  # noqa: SIM115 (as long as the run)
            os.path.join(folder, "train.log"), "a", encoding="utf-8", buffering=1
        )
        self._tables = {
            name: _Table(os.path.join(folder, f"{name}.csv"), columns, last_step)
            for name, columns, last_step in (
                ("metrics", METRICS, from_step),
                ("verification", SCORES, from_step if is_verified else from_step - 1),
                ("times", TIMES, from_step),
            )
        }
        self._drawn_at = -math.inf
        self._bar = None
        if sys.stderr.isatty():
            total = total_steps or None
            self._bar = tqdm(
                total=total, initial=from_step, desc="training", unit=" steps", dynamic_ncols=True
            )
        self._writer = None
        if tensorboard:
            events = os.path.join(folder, "tensorboard")
            self._writer = import_mxboard().SummaryWriter(logdir=events, verbose=False)

    def say(self, line: str) -> None:
        """Print a line, as insightface's scripts do, to stdout."""
        self._lines.write(line + "\n")
        self._print(line, sys.stdout)

    def info(self, line: str) -> None:
        """Print a line as insightface's logging does, to stderr."""
        self._lines.write(f"INFO:root:{line}\n")
        self._print(f"INFO:root:{line}", sys.stderr)

    def _print(self, line: str, stream) -> None:
        if self._bar is not None:
            tqdm.write(line, file=stream)
        else:
            print(line, file=stream, flush=True)

    def step(self) -> None:
        """Count a step on the progress bar."""
        if self._bar is not None:
            self._bar.update()

    def metrics(self, row: dict[str, Any]) -> None:
        """Add the numbers of a training step to ``metrics.csv``."""
        self._tables["metrics"].add(row)
        if self._bar is not None:
            self._bar.set_postfix_str(
                f"loss {row['loss']:.3f}, {row['samples_per_second']:.0f} images/s"
            )
        if self._writer:
            for name in METRICS[2:]:
                if not math.isnan(row[name]):
                    self._writer.add_scalar(name, row[name], row["step"])

    def scores(self, row: dict[str, Any]) -> None:
        """Add the result of a verification to ``verification.csv``."""
        self._tables["verification"].add(row)
        if self._writer:
            self._writer.add_scalar(f"accuracy/{row['target']}", row["accuracy"], row["step"])

    def times(self, row: dict[str, float]) -> None:
        """Add what the parts of a step take to ``times.csv``."""
        self._tables["times"].add(row)

    def draw(self, at_once: bool = False) -> None:
        """Draw the curves, unless that was done a moment ago; `at_once` draws them in any case."""
        if not at_once and time.monotonic() - self._drawn_at < SECONDS_BETWEEN_DRAWINGS:
            return
        self._drawn_at = time.monotonic()
        metrics, scores = (
            read_table(os.path.join(self._folder, f"{name}.csv"))
            for name in ("metrics", "verification")
        )
        figure = draw_curves(metrics, scores)
        if figure:
            plots.save(figure, os.path.join(self._folder, "curves.png"))
            del figure
            gc.collect()  # its 12 MB are part of a cycle, and would stay for minutes

    def close(self) -> None:
        """Close all files."""
        if self._bar is not None:
            self._bar.close()
        if self._writer:
            self._writer.close()
        for table in self._tables.values():
            table.close()
        self._lines.close()


class NoLog:
    """Stands in for a `RunLog` in the processes that keep no log."""

    def __getattr__(self, _: str) -> Callable[..., None]:
        return lambda *_, **__: None


class _Table:
    """A csv file that is valid at any time."""

    def __init__(self, path: str, columns: Sequence[str], last_step: int):
        kept = []
        if os.path.exists(path):
            kept = [row for row in _read_texts(path) if int(row["step"]) <= last_step]
        with AtomicFile(path, "w") as file:
            writer = csv.DictWriter(file, columns, restval="nan", lineterminator="\n")
            writer.writeheader()
            writer.writerows(kept)
        self._file = open(path, "a", encoding="utf-8", buffering=1, newline="")  # noqa: SIM115
        self._writer = csv.DictWriter(self._file, columns, lineterminator="\n")

    def add(self, row: dict[str, Any]) -> None:
        self._writer.writerow(row)

    def close(self) -> None:
        self._file.close()


def _read_texts(path: str) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    # A kill may have cut off the last line.
    return [row for row in rows if None not in row.values()]


def read_table(path: str) -> list[dict[str, Any]]:
    """Read a table that a `RunLog` has written, or is writing; no rows where there is none."""
    if not os.path.exists(path):
        return []
    return [
        {key: text if key == "target" else float(text) for key, text in row.items()}
        for row in _read_texts(path)
    ]


class _Line(NamedTuple):
    """Numbers of some steps, to be drawn as a line."""

    label: str
    points: list[tuple[float, float]]  # (step, value), all finite


def draw_curves(metrics: Sequence[dict], scores: Sequence[dict]) -> Figure | None:
    """Draw losses, cosines, accuracies and learning rate against the steps.

    A line takes two points at least, and a panel a line; None if that leaves nothing to draw.
    """

    def column(name: str, rows: Sequence[dict] = metrics, label: str = "") -> _Line:
        points = [(row["step"], row[name]) for row in rows if math.isfinite(row[name])]
        return _Line(label or name.replace("_", " "), points)

    losses = ["loss", "intra", "inter_above_floor", "teacher"]  # NaN where there is no such part
    targets = dict.fromkeys(row["target"] for row in scores)
    panels = {
        ("loss", "loss per image (nats)"): [column(name) for name in losses],
        ("cosines of images and class weights", "cosine"): [
            column(f"{kind}_cosine", label=kind.replace("_", " "))
            for kind in ("positive", "negative", "max_negative")
        ],
        ("verification", "accuracy (share of the pairs)"): [
            column("accuracy", [row for row in scores if row["target"] == target], target)
            for target in targets
        ],
        ("learning rate", "learning rate"): [column("lr", label="learning rate")],
    }
    panels = {
        heading: drawn
        for heading, lines in panels.items()
        if (drawn := [line for line in lines if len(line.points) > 1])
    }
    if not panels:
        return None
    rows, columns = (2, 2) if len(panels) == 4 else (1, len(panels))
    figure = Figure(figsize=(5 * columns, 3.25 * rows), layout="constrained")
    places = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, ((title, unit), lines) in zip(places, panels.items()):
        marker = "o" if title == "verification" else ""
        for number, line in enumerate(lines):
            colour = plots.COLOURS[number % len(plots.COLOURS)]
            axes.plot(*zip(*line.points), label=line.label, color=colour, marker=marker)
        axes.set(title=title, xlabel="step", ylabel=unit)
        axes.grid(alpha=0.3)
        if len(lines) > 1 or title == "verification":
            low, high = axes.get_ylim()
            axes.set_ylim(low, high + 0.15 * (high - low))  # room for the names
            axes.legend(fontsize=8, loc="upper left", ncol=3)
    return figure


def import_mxboard() -> ModuleType:
    """Import what ``--tensorboard`` needs, or say how to install it."""
    try:
        import mxboard
    except ImportError as error:
        raise ImportError(
            f"--tensorboard needs its extra: pip install 'dsoftmax[tensorboard]' ({error})"
        ) from None
    return mxboard
