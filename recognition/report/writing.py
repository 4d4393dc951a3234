"""Write a run's report: from its folder, or while it trains."""

from __future__ import annotations

import math
import os
import time
from typing import TYPE_CHECKING, Callable

from dsoftmax.recognition.common import html
from dsoftmax.recognition.common.distributed.heartbeat import beat
from dsoftmax.recognition.common.html import Html
from dsoftmax.recognition.report import sections
from dsoftmax.recognition.report.run_folder import RunFolder
from dsoftmax.recognition.report.sources import Sources

if TYPE_CHECKING:
    from dsoftmax.recognition.log import NoLog, RunLog
    from dsoftmax.recognition.plan import Plan
    from dsoftmax.recognition.trained import Trained

NAME = "report.html"
SECTIONS = (
    sections.verdict,
    sections.training,
    sections.positives,
    sections.classes,
    sections.row_ages,
    sections.verification,
    sections.times,
    sections.settings,
)
REST_PER_WRITING = 20  # a report is written again after so many times the time it took


def write_report(
    run: RunFolder, sources: Sources, path: str = "", warn: Callable[[str], None] = lambda _: None
) -> str:
    """Write the report of a run; return its path.

    Parameters
    ----------
    run : RunFolder
    sources : Sources
    path : str
        By default ``report.html`` in the run's folder.
    warn : callable
        Called with a line about each section that can't be made; the page says so, too.
    """
    path = path or os.path.join(run.path, NAME)
    made: list[Html] = []
    for make in SECTIONS:
        beat()
        try:
            section = make(run, sources)
        except Exception as error:  # a page with a gap is better than none
            title = make.__name__.replace("_", " ").capitalize()
            warn(f"{title} is left out of {path}: {error}")
            section = html.section(title, html.note(f"This can't be shown: {error}"))
        made += section if isinstance(section, list) else [section] if section else []
    html.write_page(path, run.name, _subtitle(run), made)
    return path


def _subtitle(run: RunFolder) -> str:
    settings = run.settings
    written = time.strftime("%Y-%m-%d %H:%M")
    classes = f"{run.num_classes:,} classes, " if run.has_classes else ""
    return (
        f"{settings.network}, {settings.loss}, {settings.dataset}: {classes}"
        f"embeddings of width {settings.embedding_size}. Written {written}."
    )


class RunReport:
    """Writes the report of a run that trains; a failure is a line in its log, and no more.

    Parameters
    ----------
    plan : Plan
    trained : Trained
    log : RunLog or NoLog
    """

    def __init__(self, plan: Plan, trained: Trained, log: RunLog | NoLog):
        self._plan, self._trained, self._log = plan, trained, log
        self._next_at = -math.inf
        self._written_step: int | None = None

    def write(self, step: int, at_once: bool = False) -> None:
        """Write the report after a step, unless that was done a moment ago and not `at_once`.

        The network is used only if the newest state is that of this step.
        """
        started = time.monotonic()
        if not self._plan.group.is_first or (started < self._next_at and not at_once):
            return
        try:
            run = RunFolder(self._plan.settings.folder)
            is_saved = run.facts.get("step") == step and run.diverged is None
            sources = Sources(
                self._trained.backbone.embed if is_saved else None,
                self._plan.pipeline,
                self._plan.packs,
                self._plan.images_at_once,
            )
            write_report(run, sources, warn=self._log.say)
        except Exception as error:  # whatever it is, training matters more
            reason = " ".join(str(error).split()) or type(error).__name__
            self._log.say(f"{NAME} was not written: {reason}")
            return
        now = time.monotonic()
        self._next_at = now + REST_PER_WRITING * (now - started)
        self._written_step = step
        if at_once:
            self._say_where()

    def finish(self, step: int) -> None:
        """Write the report of the last step, unless its verification has done so."""
        if self._written_step == step:
            self._say_where()
        else:
            self.write(step, at_once=True)

    def _say_where(self) -> None:
        path = os.path.join(self._plan.settings.folder, NAME)
        self._log.say(f"saved {path}, to look at in a browser")
