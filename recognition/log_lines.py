"""What a run writes to its log: its description, and the lines and numbers of its steps."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import sys
import time
from typing import Any, Iterator, NamedTuple

from dsoftmax.losses import operators
from dsoftmax.losses.head import Head
from dsoftmax.losses.triplet import TripletHead
from dsoftmax.recognition.common import products
from dsoftmax.recognition.log import NoLog, RunLog
from dsoftmax.recognition.networks.flops import format_flops
from dsoftmax.recognition.plan import Plan
from dsoftmax.recognition.teacher import Teacher

STEPS_BETWEEN_RATE_LINES = 1000
DIGITS = 6  # of losses, as insightface prints them


class Position(NamedTuple):
    """Where a run is: steps done, the epoch, and images of it that all processes have seen."""

    step: int = 0
    epoch: int = 0
    images_seen: int = 0


def describe(plan: Plan, head: Head | TripletHead) -> list[str]:
    """Return the lines that say what will be trained, as insightface's scripts print them."""
    settings = plan.settings
    gpus = sum(context.device_type == "gpu" for context in plan.contexts)
    return [
        f"gpu num: {gpus}" if gpus else "use cpu",
        f"devices {', '.join(map(str, plan.contexts))}",
        f"prefix {settings.prefix}",
        f"image_size {list(plan.pipeline.image_size)}",
        f"num_classes {plan.num_classes or plan.pipeline.num_classes}",
        f"Called with argument: {json.dumps(settings.as_json())}",
        f"Network FLOPs: {format_flops(plan.flops)}",
        f"loss {settings.loss_spec().title}: {head!r}",
        *describe_arithmetic(plan),
        f"memory of a device: about {plan.memory}",
        *(f"ver {pack.name}" for pack in plan.packs),
        *_describe_rate(plan),
        f"in the lines below: {'; '.join(_describe_figures(plan, head))}",
    ]


def _describe_rate(plan: Plan) -> list[str]:
    """Return the lines about the learning rate: of its schedule, and of nothing else."""
    s = plan.settings
    lines = [f"warmup_steps {s.warmup_steps}"] if s.warmup_steps else []
    if s.lr_schedule == "step":
        return [*lines, f"lr_steps {list(s.lr_steps)}"]
    end = "" if s.lr_schedule == "constant" else f", falling to 0 at step {plan.total_steps}"
    return [*lines, f"lr_schedule {s.lr_schedule}: {s.lr:g}{end}"]


def _describe_figures(plan: Plan, head: Head | TripletHead) -> Iterator[str]:
    """Yield what each figure of a step's line means, as far as this loss has it."""
    if isinstance(head, TripletHead):
        yield "acc is the share of triplets whose anchor is nearer to the positive"
        yield "cos_y is the mean cosine of anchor and positive"
        yield "max_cos_n is the highest of anchor and negative"
        return
    yield "acc is the share of samples nearest to their own class"
    teacher = " + teacher" if plan.settings.teacher else ""
    if head.criterion.dissected:
        yield f"lossvalue = intra + inter{teacher}"
    elif teacher:
        yield f"lossvalue = {plan.settings.loss}{teacher}"
    if teacher:
        weight = plan.settings.teacher_weight
        yield f"teacher is {weight:g} x (1 - the mean cosine with the teacher's embeddings)"
    if head.criterion.dissected and head.criterion.inter_floor(0.0) is not None:
        yield "inter_floor is inter if all negatives were orthogonal"
    yield "cos_y is the mean cosine with the own class"
    yield "max_cos_n is the highest with another class"
    if head.sampler.is_sparse:
        yield "negatives is how many classes a sample was compared with"


def describe_arithmetic(plan: Plan) -> list[str]:
    """Return a line about how steps on CPUs are computed; none for GPUs."""
    cpu = next((context for context in plan.contexts if context.device_type == "cpu"), None)
    if cpu is None:
        return []
    return [f"matrix products by {products.way(cpu)}; {operators.describe()}"]


class StepLines:
    """Writes the steps of a run to its log, and measures their speed.

    Parameters
    ----------
    plan : Plan
    head : Head or TripletHead
        Whose statistics are reported.
    log : RunLog or NoLog
    teacher : Teacher, optional
        Whose part of the loss is reported.
    """

    def __init__(
        self,
        plan: Plan,
        head: Head | TripletHead,
        log: RunLog | NoLog,
        teacher: Teacher | None = None,
    ):
        self._plan, self._head, self._log, self._teacher = plan, head, log, teacher
        self._since, self._steps = time.perf_counter(), 0
        self._began, self._steps_of_process = self._since, 0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what is done in this context out of the training time."""
        started = time.perf_counter()
        yield
        self._since += time.perf_counter() - started

    def step(self, at: Position, loss: float) -> None:
        """Report a step that is done.

        Parameters
        ----------
        at : Position
            After the step.
        loss : float
            Its mean over the batch.
        """
        self._log.step()
        self._steps += 1
        self._steps_of_process += 1
        if not self._plan.group.is_first:
            return
        self._report_rate(at)
        if at.step % self._plan.settings.frequent == 0:
            speed = self._steps * self._plan.batch_size / (time.perf_counter() - self._since)
            stats = self._head.stats
            self._since, self._steps = time.perf_counter(), 0
            row = self._row(at, loss, speed, stats)
            self._log.metrics(row)
            self._log.info(self._line(at, row, stats))

    def _report_rate(self, at: Position) -> None:
        before, now = self._plan.rate_at(at.step - 1), self._plan.rate_at(at.step)
        if at.step % STEPS_BETWEEN_RATE_LINES == 0:
            batch = at.images_seen // self._plan.batch_size
            self._log.say(f"lr-batch-epoch: {now:g} {batch} {at.epoch}")
        if self._plan.settings.lr_schedule == "step" and now < before:
            self._log.say(f"lr change to {now:g}")

    def _row(
        self, at: Position, loss: float, speed: float, stats: dict[str, float]
    ) -> dict[str, Any]:
        """Return a row of ``metrics.csv``, in which the parts add up to the loss to the last digit.

        These are intra, inter and the teacher's, as far as there are any.
        """
        loss, intra, inter, teacher = round(loss, DIGITS), math.nan, math.nan, math.nan
        if self._teacher:
            teacher = round(self._teacher.mean_loss, DIGITS)
        if self._head.criterion.dissected:  # other losses can't be split into these parts
            intra = round(stats["intra"], DIGITS)
            inter = round(loss - intra - (teacher if self._teacher else 0), DIGITS)
        return {
            "step": at.step,
            "epoch": at.epoch,
            "lr": self._plan.rate_at(at.step - 1),
            "accuracy": stats["accuracy"],
            "loss": loss,
            "intra": intra,
            "inter": inter,
            "inter_above_floor": inter - stats.get("inter_floor", math.nan),
            "teacher": teacher,
            "positive_cosine": stats["positive_cosine"],
            "negative_cosine": stats["negative_cosine"],
            # With a single class there is no negative.
            "max_negative_cosine": max(stats["max_negative_cosine"], -1.0),
            "samples_per_second": speed,
        }

    def _line(self, at: Position, row: dict[str, Any], stats: dict[str, float]) -> str:
        """Return the line of a row, as insightface's Speedometer writes it."""
        parts = ""
        if self._head.criterion.dissected:
            parts = f"intra={row['intra']:f}\tinter={row['inter']:f}\t"
            if "inter_floor" in stats:
                parts += f"inter_floor={stats['inter_floor']:f}\t"
        if self._teacher:
            parts += f"teacher={row['teacher']:f}\t"
        count = f"\tnegatives={stats['negatives']}" if self._head.sampler.is_sparse else ""
        batch = at.images_seen // self._plan.batch_size
        first = max(batch - self._plan.settings.frequent, 0)
        return (
            f"Epoch[{at.epoch}] Batch [{first}-{batch}]\tSpeed: {row['samples_per_second']:.2f} "
            f"samples/sec\tacc={row['accuracy']:f}\tlossvalue={row['loss']:f}\t{parts}"
            f"cos_y={row['positive_cosine']:.4f}\tmax_cos_n={row['max_negative_cosine']:.4f}{count}\t"
            f"{self._progress(at.step)}"
        )

    def _progress(self, step: int) -> str:
        """Return the step, the last one and the time left, or the step alone if there is no end.

        The time is that of an average step since this process began, verifications included.
        """
        total = self._plan.total_steps
        if total == sys.maxsize:
            return f"Step {step}"
        average = (time.perf_counter() - self._began) / self._steps_of_process
        left = datetime.timedelta(seconds=round((total - step) * average))
        return f"Step {step}/{total}\tETA {left}"
