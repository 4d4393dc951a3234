"""A training run: its steps, and what happens between them."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any, Iterator

import numpy as np
from mxnet import autograd

from dsoftmax.recognition.build import begin_new_run, build, make_teacher
from dsoftmax.recognition.checkpoint import resume
from dsoftmax.recognition.common.distributed.group import ALONE, Group
from dsoftmax.recognition.common.distributed.heartbeat import beat
from dsoftmax.recognition.common.files import AtomicFile, clean_partial, explain_full_disk
from dsoftmax.recognition.common.machine import describe_machine, describe_versions
from dsoftmax.recognition.common.stopping import lasting_output, stop_signals
from dsoftmax.recognition.data.pipeline import Batch
from dsoftmax.recognition.lock import RunLock
from dsoftmax.recognition.log import NoLog, RunLog
from dsoftmax.recognition.log_lines import Position, StepLines, describe_arithmetic
from dsoftmax.recognition.models import Models, Scores
from dsoftmax.recognition.plan import Plan
from dsoftmax.recognition.report import RunReport
from dsoftmax.recognition.saving import StateSaver
from dsoftmax.recognition.settings import Settings
from dsoftmax.recognition.states import name_newest_state, path_of
from dsoftmax.recognition.step_times import StepTimes
from dsoftmax.recognition.trained import DivergedError, Trained


class StopSignals:
    """Remembers SIGTERM, SIGINT and SIGHUP, so that a run can stop after a whole step.

    As a context manager it handles the signals; the former handlers return at the end.

    Parameters
    ----------
    group : Group

    Attributes
    ----------
    received : int
        The first signal that this process has received, or 0.
    agreed : int
        The signal by which all processes stop, or 0.
    """

    def __init__(self, group: Group):
        self._group = group
        self._former: dict[int, Any] = {}
        self.received = self.agreed = 0

    def __enter__(self) -> StopSignals:
        for number in stop_signals():
            self._former[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _) -> None:
        self.received = self.received or number
        if self._group.size == 1:
            self.agreed = self.received

    def exchange(self) -> None:
        """Learn which signals the other processes have received.

        All of them call this before the same step, and so stop after the same one.
        """
        if self._group.size > 1:
            received = self._group.gather_integers("signal", np.array([self.received]))
            self.agreed = int(received.max())


class Run:
    """A training run, from its settings to its last checkpoint.

    Making it refuses everything that can be refused, mostly by its `Plan`. After that, what happens
    is a function of the settings: each random draw depends on the seed and the step alone, so that
    a run that was killed and resumed ends with the same parameters as one that was not.

    Parameters
    ----------
    settings : Settings
    group : Group
        The processes that train together. Each makes a `Run` with the same settings; the first
        one keeps the log, verifies, and writes all files.

    Attributes
    ----------
    plan : Plan
    trained : Trained
    step : int
        How many steps are done.
    """

    def __init__(self, settings: Settings, group: Group = ALONE):
        self.settings, self.group = settings, group
        self._lock = RunLock(settings.folder) if group.is_first else None
        try:
            beat("reading the dataset")
            self.plan = Plan(settings, group)
            if self._lock and self._lock.warning:
                self.plan.notes.append(self._lock.warning)
            beat("building the network")
            self.trained: Trained = build(self.plan)
            self._teacher = make_teacher(self.plan)
            self._models = Models(self.plan, self.trained)
            self._signals = StopSignals(group)
            self._times = StepTimes(settings.verbose, self.plan.total_steps, group.is_first)
            self._begin()
            if group.is_first:
                self._make_folder()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Unlock the run's folder; `train` does so at its end."""
        if self._lock:
            self._lock.release()

    @property
    def _end(self) -> int:
        """The last step; 0 for a run without an end."""
        return self.plan.total_steps if self.plan.total_steps < sys.maxsize else 0

    def _begin(self) -> None:
        """Resume from the newest saved state, or begin a new run."""
        beat("loading its first parameters")
        resumed = resume(self.plan.states, self.trained, self.group)
        if not resumed:
            self.step = self.epoch = self._images_seen = 0
            begin_new_run(self.plan, self.trained)
            return
        facts = resumed.facts
        self.step, self.epoch = facts["step"], facts["epoch"]
        self._images_seen = facts["images_seen"]
        self._models.scores = Scores.from_facts(facts)
        self.plan.notes += resumed.notes
        self.plan.notes += _changes(facts["settings"], self.settings.as_json())
        self.plan.notes.append(f"resumed from {resumed.path}, step {self.step}")

    def _make_folder(self) -> None:
        folder = self.settings.folder
        os.makedirs(folder, exist_ok=True)
        for path in clean_partial(folder) + clean_partial(self.plan.states):
            self.plan.notes.append(f"removed {path}, which a killed run left half-written")
        described = {
            **self.settings.as_json(),
            "resolved_num_classes": self.plan.num_classes,
            "resolved_image_size": list(self.plan.pipeline.image_size),
            "resolved_batch_size": self.plan.batch_size,
            "resolved_total_steps": self._end,
            "machine": {
                **describe_machine(),
                "devices": ", ".join(map(str, self.plan.contexts)),
                "processes": self.group.size,
                **describe_versions(),
                "arithmetic": "; ".join(describe_arithmetic(self.plan)),
            },
        }
        path = os.path.join(folder, "config.json")
        with explain_full_disk(path), AtomicFile(path, "w") as file:
            json.dump(described, file, indent=2)

    # --- Steps

    def train(self) -> int:
        """Train to the end, or until a signal comes.

        Returns
        -------
        int
            0, or the number of the signal.
        """
        with name_newest_state(self.plan.states), explain_full_disk(self.settings.folder):
            self._log = self._open_log()
            for note in self.plan.notes:
                self._log.say(note)
            try:
                with self._signals, lasting_output(), self._make_saver() as self._saver:
                    self._train()
            except DivergedError:
                self._report.write(self.step, at_once=True)
                raise
            finally:
                self._log.close()
                self.release()
        return self._signals.agreed

    def _open_log(self) -> RunLog | NoLog:
        if not self.group.is_first:
            return NoLog()
        is_verified = not self._models.scores.awaits_verification
        settings = self.settings
        return RunLog(settings.folder, self.step, self._end, settings.tensorboard, is_verified)

    def _make_saver(self) -> StateSaver:
        return StateSaver(self.plan.states, self.settings.keep, self._log.say, self.group)

    def _train(self) -> None:
        self._lines = StepLines(self.plan, self.trained.head, self._log, self._teacher)
        self._report = RunReport(self.plan, self.trained, self._log)
        if self._models.scores.awaits_verification:
            self._checkpoint()
        while self.step < self.plan.total_steps and not self._signals.agreed:
            self._train_epoch()
        self._finish()

    def _train_epoch(self) -> None:
        started = time.perf_counter()
        self._log.say("call reset()")
        batch_size = self.plan.batch_size
        batches = self._batches(self._images_seen // batch_size)
        for batch in self._times.watch(batches):
            self._signals.exchange()
            loss = self.train_step(batch)
            self._images_seen += batch_size
            self.step += 1
            beat(f"after step {self.step}")
            self._lines.step(Position(self.step, self.epoch, self._images_seen), loss)
            self._saver.notice()
            is_last = self.step >= self.plan.total_steps
            if is_last or self.step % self.settings.verbose == 0:
                self._checkpoint()
            if is_last or self._signals.agreed:
                return
        if self._signals.agreed:
            return  # it has not begun: its triplets are incomplete
        self._log.info(f"Epoch[{self.epoch}] Time cost={time.perf_counter() - started:.3f}")
        self.epoch, self._images_seen = self.epoch + 1, 0

    def _batches(self, start: int) -> Iterator[Batch]:
        """Return the batches of the epoch from step `start` of it on."""
        if self.trained.miner:
            return self.trained.miner.epoch(self.epoch, start, self._log.say, self._is_stopping)
        return self.plan.pipeline.epoch(self.epoch, start)

    def train_step(self, batch: Batch) -> float:
        """Do one step on this process's part of a batch; return the mean loss of the whole batch.

        With ``--accumulate`` the batch goes through the network in so many micro-batches.

        Raises
        ------
        DivergedError
            The loss or an embedding is not finite. Nothing has been updated.
        """
        backbone, head, head_trainer = self.trained
        rate = self.plan.rate_at(self.step)
        self._times.begin(self.step)
        images = self._micro_batches(batch.data)
        labels = self.group.gather_integers("labels", batch.label.astype(np.int64))
        size, labels = len(labels), self._micro_batches(labels)
        if not head.sampler.needs_embeddings:
            # Before the network, so that the class rows come while it computes. MXNet fetches them
            # after the last update of them, which was queued before: they are never out of date.
            head.begin_update(labels)
            self._times.lap("head")
        try:
            mean_loss = self._compute_gradients(batch, images, labels, rate)
            backbone.update(rate, size)
            head_trainer.set_learning_rate(rate * self.settings.fc7_lr_mult)
            head_trainer.step(size)
            self._times.lap("update")
        finally:
            head.drop_update()  # what an error leaves; a whole step leaves nothing
        return mean_loss

    def _compute_gradients(
        self, batch: Batch, images: list[np.ndarray], labels: list[np.ndarray], rate: float
    ) -> float:
        """Go forward and backward with all micro-batches; return the mean loss."""
        backbone, head, _ = self.trained
        teacher = self._teacher
        if teacher:
            teacher.begin_step()
        try:
            for number, (part, part_labels) in enumerate(zip(images, labels)):
                embeddings = backbone.forward(part, self._key(number))
                targets = teacher.embed(part, embeddings.context) if teacher else None
                self._times.lap("network")
                with autograd.record():
                    loss = head(embeddings, part_labels)
                    if teacher:
                        loss = loss + teacher.loss(embeddings, targets)
                loss.backward()
                self._times.lap("head")
                backbone.backward(embeddings.grad)
                self._times.lap("network")
            mean_loss = head.read_loss()  # only now wait: the device still has to go backward
            return mean_loss + teacher.read_loss() if teacher else mean_loss
        except ValueError as error:
            raise DivergedError(self._diagnose(error, batch, rate)) from None

    def _micro_batches(self, samples: np.ndarray) -> list[np.ndarray]:
        """Split the samples of a step into micro-batches, each with a part of every device's."""
        count = self.settings.accumulate
        if count == 1:
            return [samples]
        of_device, shape = self.settings.per_batch_size, samples.shape[1:]
        parts = samples.reshape((-1, count, of_device, *shape)).swapaxes(0, 1)
        return [part.reshape((-1, *shape)) for part in parts]

    def _key(self, number: int) -> tuple[int, ...]:
        """Return the seed of the network's random layers for a micro-batch of this step."""
        key = (self.settings.seed, self.step)
        return key if self.settings.accumulate == 1 else (*key, number)

    def _diagnose(self, error: Exception, batch: Batch, rate: float) -> str:
        """Say what is not finite, and write the numbers of the batch's images to a file."""
        names = self.trained.not_finite()
        images = self.group.gather_integers("images", batch.image)
        labels = self.group.gather_integers("labels of images", batch.label.astype(np.int64))
        path = os.path.join(self.settings.folder, "diverged.json")
        diagnosis = {
            "step": self.step,
            "lr": rate,
            "error": str(error),
            "not_finite": names,
            "images": images.tolist(),
            "labels": labels.tolist(),
        }
        if self.group.is_first:
            with AtomicFile(path, "w") as file:
                json.dump(diagnosis, file)
        where = ", ".join([*names[:3], f"{len(names) - 3} more"] if len(names) > 3 else names)
        scale = self.settings.loss_options.get("scale")
        return (
            f"step {self.step}: {error}; parameters that are not finite: {where or 'none'}; "
            f"learning rate {rate:g}{f', scale {scale:g}' if scale else ''}. The images of this "
            f"batch are in {path}; nothing of it was saved. Try a lower --lr, --warmup-steps, "
            f"--clip-gradient{' or a smaller --scale' if scale else ''}, and --resume from the "
            "last state"
        )

    # --- Between steps

    def _checkpoint(self) -> None:
        """Save the state, verify it, and save its model if that is to be kept.

        The state comes first and says that it awaits its verification: a run that is stopped before
        the end of that does it when it is resumed.
        """
        with self._lines.paused():
            self._models.scores.awaits_verification = True
            self._save_state()
            self._note_times()
            beat(f"verifying step {self.step}")
            results = self._models.verify(self.step, self._log, self._is_stopping)
            is_cut = len(results) < len(self.plan.packs)
            stopped_by = self._signals.received if is_cut else 0
            stopped_by = self.group.gather_json("stopped by", stopped_by)[0]
            if stopped_by:
                self._signals.agreed = stopped_by  # now: all processes must stop at this step
            else:
                self._models.judge(self.step, results, self._log)
                self._saver.update(self.step, self._models.scores.as_facts())
            self._log.draw()
            self._report.write(self.step)
            beat(f"after step {self.step}")

    def _note_times(self) -> None:
        seconds = self._times.take()
        if seconds:
            self._log.times({"step": self.step, **seconds})

    def _is_stopping(self) -> bool:
        return bool(self._signals.received)

    def _save_state(self, at_once: bool = False) -> None:
        beat(f"saving step {self.step}")
        self.trained.finite_parameters(self.step)
        facts = {
            **self._models.scores.as_facts(),
            "epoch": self.epoch,
            "images_seen": self._images_seen,
            "settings": self.settings.as_json(),
        }
        self._saver.save(self.step, self.trained, facts, at_once)

    def _finish(self) -> None:
        if self._signals.agreed:
            self._log.say(f"stopped by signal {self._signals.agreed}: saving step {self.step}")
        self._save_state(at_once=True)
        self._log.say(f"saved {path_of(self.plan.states, self.step)}, for --resume")
        bad = sum(self.group.gather_json("bad images", len(self.plan.pipeline.bad_images)))
        if bad:
            self._log.say(f"{bad} images could not be decoded")
        beat(f"saving the model of step {self.step}")
        self._log.say("saving last 0")
        self._models.save(0, self.step, self._log)
        self._log.draw(at_once=True)
        self._report.finish(self.step)


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Say which settings differ from those that a state was saved with."""
    now = json.loads(json.dumps(now))  # as a saved state holds them
    return [
        f"resumed with {name} {now.get(name)!r}, was {before.get(name)!r}"
        for name in sorted(set(now) | set(before))
        if name != "resume" and now.get(name) != before.get(name)
    ]
