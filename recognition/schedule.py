"""The learning rate of each step."""

from __future__ import annotations

from typing import Callable, Sequence

MODES = ("step", "cosine", "poly", "constant")


def learning_rate(
    mode: str,
    base: float,
    total_steps: int,
    steps: Sequence[int] = (),
    factor: float = 0.1,
    warmup_steps: int = 0,
) -> Callable[[int], float]:
    """Return the learning rate as a function of the step, from 0 on, by gluoncv's schedulers.

    Parameters
    ----------
    mode : {"step", "cosine", "poly", "constant"}
        "step" multiplies the rate by `factor` at each of `steps`, as insightface does; "cosine" and
        "poly" let it fall to 0 at the end.
    base : float
        The rate after the warm-up.
    total_steps : int
        The number of steps; 0 is without end, which "cosine" and "poly" refuse.
    steps : sequence of int
    factor : float
    warmup_steps : int
        The number of steps in which the rate grows linearly from 0.
    """
    from gluoncv.utils import LRScheduler, LRSequential  # it takes seconds to import

    if mode not in MODES:
        raise ValueError(f"--lr-schedule is one of {', '.join(MODES)}, not {mode!r}")
    if mode in ("cosine", "poly") and not total_steps:
        raise ValueError(f"--lr-schedule {mode} needs an end: give --max-steps or --end-epoch")
    if warmup_steps == 1:  # it would have the full rate anyway
        warmup_steps = 0
    left = max(total_steps - warmup_steps, 2) if total_steps else 1 << 40
    rest = LRScheduler(
        mode,
        base_lr=base,
        niters=left,
        step_iter=[step - warmup_steps for step in steps],
        step_factor=factor,
    )
    if not warmup_steps:
        return rest
    rise = LRScheduler("linear", base_lr=base / warmup_steps, target_lr=base, niters=warmup_steps)
    return LRSequential([rise, rest])
