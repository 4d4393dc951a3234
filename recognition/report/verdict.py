"""Say in plain words how a run went and what to try next, from its numbers alone."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from dsoftmax.recognition.report.run_folder import RunFolder
from dsoftmax.recognition.step_times import PARTS

GOOD, FAIR, BAD = "good", "fair", "bad"
FEWEST_ROWS = 6  # of metrics.csv, to see a trend
CLEAR = 3  # standard deviations
LEAST_CHANGE = 0.01  # of the loss, relative; less is no change
UNLEARNT_COSINE, UNLEARNT_ACCURACY = 0.1, 0.05  # below both, nothing was learnt yet
FEW_LEARNT = 0.5  # of the training images
LEARNT_BY_HEART, WEAK_VERIFICATION = 0.98, 0.9
SLOW_DATA = 0.3  # of a step
USUAL_RATE = 0.1
ENDED_RATE = 0.02  # of the highest learning rate


class Verdict(NamedTuple):
    """A judgement.

    Attributes
    ----------
    kind : {"good", "fair", "bad"}
    headline : str
    findings : list of str
        What the numbers say.
    advice : list of str
        What to try next.
    """

    kind: str
    headline: str
    findings: list[str]
    advice: list[str]


class Trend(NamedTuple):
    """How a column changes at its end: its last fifth against the fifth before."""

    before: float  # mean
    last: float
    change: float  # relative; 0 if it may be chance, or is too small to matter


def find_trend(values: np.ndarray) -> Trend | None:
    """Compare the last fifth of some values with the fifth before; None if they are too few."""
    if len(values) < FEWEST_ROWS:
        return None
    size = max(len(values) // 5, 3)
    before, last = values[-2 * size : -size], values[-size:]
    # A straight line through both: its slope, and the slope's standard deviation.
    x = np.arange(2 * size) - (2 * size - 1) / 2
    both = values[-2 * size :]
    slope = x @ both / (x @ x)
    rest = both - both.mean() - slope * x
    error = math.sqrt(rest @ rest / (2 * size - 2) / (x @ x))
    relative = slope * size / max(abs(before.mean()), 1e-9)
    is_clear = abs(slope) > CLEAR * error and abs(relative) > LEAST_CHANGE
    return Trend(float(before.mean()), float(last.mean()), float(relative) if is_clear else 0.0)


def judge(run: RunFolder, termination: float | None = None) -> Verdict:
    """Judge a run.

    Parameters
    ----------
    run : RunFolder
    termination : float, optional
        The cosine at which the loss stops to pull images towards their class.
    """
    if run.diverged is not None:
        return _diverged(run)
    if not run.metrics:
        return Verdict(
            FAIR,
            "Too early to tell: not a single line of metrics.csv was written yet.",
            [],
            ["Train on, or let --frequent write lines more often."],
        )
    kind, headline, advice = _judge_trend(run)
    findings = [*_describe_learning(run, termination), *_describe_verification(run)]
    more = [*_advise_on_cosines(run, termination), *_advise_on_verification(run)]
    return Verdict(kind, headline, findings, [*advice, *more, *_advise_on_speed(run)])


def _diverged(run: RunFolder) -> Verdict:
    diagnosis = run.diverged
    rate = diagnosis["lr"]
    names = diagnosis.get("not_finite") or []
    broken = f" Not finite by then: {', '.join(names[:3])}." if names else ""
    again = (
        f"--resume goes on from step {run.facts['step']}."
        if run.facts
        else "No state was saved before: begin again."
    )
    return Verdict(
        BAD,
        f"Diverged at step {diagnosis['step']:,}, with the learning rate {rate:g}.",
        [f"{diagnosis['error']}.{broken}"],
        [
            f"Lower the learning rate: --lr {min(run.settings.lr / 10, USUAL_RATE):g}. {again}",
            "Begin gently with --warmup-steps, limit the gradient with --clip-gradient 5, or take "
            "a smaller --scale.",
            "If it happens at the same step again: diverged.json names the images of the batch.",
        ],
    )


def _last(run: RunFolder, name: str) -> float:
    """Return the mean of the last fifth of a column; NaN if it is empty."""
    values = run.column(name)[1]
    return float(values[-max(len(values) // 5, 1) :].mean()) if len(values) else math.nan


def _judge_trend(run: RunFolder) -> tuple[str, str, list[str]]:
    """Return the kind, the headline and advice, from the course of the loss."""
    step, total = run.last_step, run.total_steps
    is_done = bool(total) and step >= total
    where = f"after {step:,} steps" if is_done or not total else f"at step {step:,} of {total:,}"
    go_on = [] if is_done else ["Go on with --resume."]
    trend = find_trend(run.column("loss")[1])
    if trend is None:
        return FAIR, f"Too early to see a trend {where}.", go_on
    numbers = (
        f"the loss is {trend.last:.4g} in the last fifth of the lines and was {trend.before:.4g} "
        "in the fifth before"
    )
    has_learnt = (
        _last(run, "positive_cosine") > UNLEARNT_COSINE
        or _last(run, "accuracy") > UNLEARNT_ACCURACY
    )
    if trend.change > 0:
        advice = f"The learning rate may be too high: try --lr {run.settings.lr / 3:.2g}."
        return BAD, f"Getting worse {where}: {numbers}.", [advice]
    if trend.change < 0:
        longer = f"Train longer: --resume --max-steps {2 * total}." if is_done else ""
        return GOOD, f"Still improving {where}: {numbers}.", [longer] if longer else go_on
    if not has_learnt:
        advice = (
            "Try another --lr (ten times lower, ten times higher) or a smaller --scale, and look "
            "at the images and labels with tools/rec_info.py."
        )
        return BAD, f"Has not begun to learn {where}: {numbers}.", [advice]
    rates = run.column("lr")[1]
    if len(rates) and rates[-1] > ENDED_RATE * rates.max() and is_done:
        advice = (
            "The learning rate is still high: lower it at the end (--lr-steps, or --lr-schedule "
            "cosine), which usually gains the last bit."
        )
        return FAIR, f"Level {where}, at a high learning rate: {numbers}.", [advice]
    if _last(run, "accuracy") < FEW_LEARNT:
        advice = "Train longer at a higher learning rate, or take a larger network."
        return FAIR, f"Level {where}, though few images are learnt: {numbers}.", [advice, *go_on]
    return GOOD, f"Converged {where}: {numbers}.", go_on


def _describe_learning(run: RunFolder, termination: float | None) -> list[str]:
    """Say how well the training images are learnt."""
    findings = []
    accuracy, cosine = _last(run, "accuracy"), _last(run, "positive_cosine")
    if math.isfinite(accuracy):
        what = (
            "training images are nearest to their own class, at a mean cosine of"
            if run.has_classes
            else "triplets have the positive nearer than the negative, at a mean cosine of"
        )
        findings.append(
            f"{accuracy:.1%} of the {what} {cosine:.3f}"
            + ("." if termination is None else f"; the loss pulls until {termination:.2f}.")
        )
    above = _last(run, "inter_above_floor")
    if math.isfinite(above):
        findings.append(
            f"The inter-class loss is {above:.3g} above that of orthogonal negatives"
            + (": classes keep apart." if above < 0.5 else ".")
        )
    return findings


def _best(run: RunFolder) -> dict[str, tuple[dict, dict]]:
    """Return the best and the last row of each target of the verification."""
    by_target: dict[str, list[dict]] = {}
    for row in run.scores:
        by_target.setdefault(row["target"], []).append(row)
    return {
        target: (max(rows, key=lambda row: row["accuracy"]), rows[-1])
        for target, rows in by_target.items()
    }


def _describe_verification(run: RunFolder) -> list[str]:
    return [
        f"{target}: {last['accuracy']:.2%} of the pairs are judged rightly; best "
        f"{best['accuracy']:.2%} at step {best['step']:,.0f}."
        for target, (best, last) in _best(run).items()
    ]


def _advise_on_cosines(run: RunFolder, termination: float | None) -> list[str]:
    cosine, accuracy = _last(run, "positive_cosine"), _last(run, "accuracy")
    if termination is None or not math.isfinite(cosine):
        return []
    gap = termination - cosine
    if gap > 0.3 and accuracy > 0.9:
        return [
            f"Images stay {gap:.2f} below the cosine that the loss asks for ({termination:.2f}), "
            "although nearly all are nearest to their class: a larger network or a lower target "
            "(--d, or a smaller margin) may fit better."
        ]
    return []


def _advise_on_verification(run: RunFolder) -> list[str]:
    found = _best(run)
    if not found:
        return [
            "There is no verification: put a .bin of people who are not trained on into the "
            "dataset's folder (tools/pairs2bin.py) and name it with --target."
        ]
    advice = []
    target, (best, last) = list(found.items())[-1]
    drop = best["accuracy"] - last["accuracy"]
    if drop > max(2 * last["deviation"] / math.sqrt(10), 0.002):
        advice.append(
            f"{target} was better by {drop:.2%} at step {best['step']:,.0f}: use that model "
            "(--ckpt 1 keeps the best), and stop earlier or lower the learning rate sooner."
        )
    weak = best["accuracy"] < WEAK_VERIFICATION
    if weak and _last(run, "accuracy") > LEARNT_BY_HEART:
        advice.append(
            f"The training images are learnt by heart, but {target} reaches only "
            f"{best['accuracy']:.1%}: more identities help most, then --color 1 and --cutoff."
        )
    return advice


def _advise_on_speed(run: RunFolder) -> list[str]:
    if not run.times:
        return []
    seconds = run.times[-1]
    share = seconds["data"] / max(sum(seconds[part] for part in PARTS), 1e-12)
    if share < SLOW_DATA:
        return []
    return [
        f"{share:.0%} of a step is spent waiting for images: give more --threads, or store smaller "
        "images (tools/bench_data.py measures the reader)."
    ]
