"""A training run: how it begins, its steps, and what is done between them."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd

from dsoftmax import losses
from dsoftmax.eval.verification import Verification, evaluate
from dsoftmax.recognition import networks
from dsoftmax.recognition.backbone import Backbone
from dsoftmax.recognition.checkpoint import (
    NotFiniteError,
    Trained,
    broadcast,
    resume,
    save_state,
)
from dsoftmax.recognition.class_means import class_means
from dsoftmax.recognition.common.distributed.group import ALONE, Group
from dsoftmax.recognition.common.files import AtomicFile, clean_partial, explain_full_disk
from dsoftmax.recognition.data.packs import Pack
from dsoftmax.recognition.data.pipeline import Batch
from dsoftmax.recognition.lock import RunLock
from dsoftmax.recognition.log import NoLog, RunLog
from dsoftmax.recognition.networks.files import load_parameters, save_model
from dsoftmax.recognition.options import Settings
from dsoftmax.recognition.plan import Plan
from dsoftmax.recognition.states import name_newest_state, path_of, prune_states, update_facts

INITIAL_DEVIATION = 0.01  # of class weights, as insightface's fc7
STEPS_BETWEEN_RATE_LINES = 1000


class DivergedError(ValueError):
    """Numbers that are not numbers any more."""


class Run:
    """A training run, from its settings to its last checkpoint.

    All that can be refused is refused when it is made, most of it by its `Plan`. After that, what
    happens is a function of the settings: each random draw is one of (seed, step), so that a run
    that was killed and resumed ends as one that was not.

    Parameters
    ----------
    settings : Settings
    group : Group
        The processes that train together. Each makes a `Run` with the same settings; the first
        one keeps the log, verifies, and writes all files.
    """

    def __init__(self, settings: Settings, group: Group = ALONE):
        self.settings = settings
        self.group = group
        self._lock = RunLock(settings.folder) if group.is_first else None
        try:
            self._prepare()
        except BaseException:
            self._release()
            raise

    def _release(self) -> None:
        if self._lock:
            self._lock.release()

    def _prepare(self) -> None:
        settings, group = self.settings, self.group
        self.plan = plan = Plan(settings, group)
        self.contexts, self.pipeline = plan.contexts, plan.pipeline
        self.batch_size = plan.batch_size
        self.notes = plan.notes  # for the log, once there is one
        if self._lock and self._lock.warning:
            self.notes.append(self._lock.warning)
        self._network = plan.network
        self.trained = self._build()
        self.step = 0
        self._facts: dict[str, Any] = {
            "best": {},
            "highest_last": 0.0,
            "highest_sum": 0.0,
            "verifications": 0,
            "awaits_verification": False,  # due at this step, but not done yet
        }
        self._begin()
        if group.is_first:
            self._make_folder()
        self._signal = 0  # that came to this process
        self._stopped_by = 0  # known to all processes

    # --- What is trained

    def _build(self) -> Trained:
        s = self.settings
        mx.random.seed(s.seed)
        self._network.initialize(networks.initializer(s.architecture), ctx=self.contexts)
        if s.fp16_scale:
            self._network.cast("float16")
        sizes = (1, 3, *self.pipeline.image_size)
        for context in self.contexts:  # so that all shapes are known
            self._network(mx.nd.zeros(sizes, ctx=context, dtype="uint8"))
        mx.nd.waitall()
        self._network.hybridize_for(self.contexts[0].device_type)
        sgd = {"learning_rate": s.lr, "momentum": s.mom, "wd": s.wd}
        backbone = Backbone(
            self._network,
            self.contexts,
            sgd,
            kvstore="device" if s.kvstore == "dist_sync" else s.kvstore,
            clip=s.clip_gradient,
            fp16_scale=s.fp16_scale,
            frozen=s.freeze_backbone,
            group=self.group,
        )
        head = self._make_head()
        head.initialize(mx.init.Normal(INITIAL_DEVIATION))
        trainer = head.trainer("sgd", {**sgd, "wd": s.wd * s.fc7_wd_mult})
        return Trained(backbone, head, trainer)

    def _make_head(self) -> losses.Head:
        s = self.settings
        options = dict(s.loss_options)
        try:
            return losses.create(
                options.pop("preset"),
                num_classes=self.plan.num_classes,
                embedding_size=s.embedding_size,
                ctx=self.contexts if self.plan.is_class_parallel else self.contexts[:1],
                store=s.store,
                chunk=s.chunk,
                seed=s.seed,
                group=self.group,
                **options,
            )
        except TypeError as error:  # an option of another loss: the user's to mend
            raise ValueError(f"--loss {s.loss}: {error}") from None

    def _begin(self) -> None:
        """Take up a saved state, a pretrained model, or nothing."""
        s = self.settings
        resumed = resume(self.plan.states, self.trained, self.group)
        if resumed:
            facts = resumed.facts
            self.notes += resumed.notes
            self._note_changes(facts["settings"])
            self._facts = {key: facts.get(key, value) for key, value in self._facts.items()}
            self.step = facts["step"]
            self.epoch, self._seen = facts["epoch"], facts["images_seen"]
            self.notes.append(f"resumed from {resumed.path}, step {self.step}")
            return
        self.epoch, self._seen = 0, 0
        if s.pretrained:
            self._begin_pretrained()
        if self.group.size > 1:  # so that all train the same network, whatever they drew
            first = broadcast(self.group, "parameters", self.trained.backbone.parameters())
            self.trained.backbone.load_parameters(first)
        if s.init_classes == "mean":
            weights = class_means(self.trained, self.pipeline, s.per_batch_size, s.threads)
            self.trained.head.load_class_weights(weights)
            self.notes.append("class weights begin as the mean embeddings of their images")

    def _note_changes(self, before: dict[str, Any]) -> None:
        """Say which settings are not those the state was saved with."""
        now = json.loads(json.dumps(self.settings.as_json()))
        for name in sorted(set(now) | set(before)):
            if name != "resume" and now.get(name) != before.get(name):
                self.notes.append(f"resumed with {name} {now.get(name)}, was {before.get(name)}")

    def _begin_pretrained(self) -> None:
        """Take up a model that the first process reads."""
        classes = self._load_pretrained() if self.group.is_first else None
        if self.group.gather_json("has classes", classes is not None)[0]:
            self.trained.head.load_class_weights(classes)

    def _load_pretrained(self) -> mx.nd.NDArray | None:
        """Load the network's parameters; return class weights, where there are some that fit."""
        prefix, _, epoch = self.settings.pretrained.rpartition(",")
        path = f"{prefix}-{int(epoch):04d}.params"
        if not os.path.exists(path):
            raise FileNotFoundError(f"--pretrained {self.settings.pretrained}: there is no {path}")
        loaded, missing, unexpected = load_parameters(self._network, path)
        if not loaded:
            raise ValueError(f"{path}: not one parameter of {self.settings.network} is in it")
        self.notes.append(f"{len(loaded)} parameters of {self.settings.network} are from {path}")
        if missing:
            self.notes.append(
                f"warning: {len(missing)} parameters are not, {', '.join(sorted(missing)[:3])} "
                "among them: they begin at random"
            )
        if unexpected:
            self.notes.append(
                f"warning: {len(unexpected)} of its parameters are of no use here, "
                f"{', '.join(sorted(unexpected)[:3])} among them"
            )
        saved = mx.nd.load(path)
        classes = saved.get("arg:fc7_weight")
        if classes is not None:
            if classes.shape == self.trained.head.store.shape:
                self.notes.append("class weights are from it, too")
                return classes
            self.notes.append(
                f"warning: its class weights {classes.shape} are not of these "
                f"{self.plan.num_classes} classes: they begin at random"
            )
        return None

    def _make_folder(self) -> None:
        folder = self.settings.folder
        os.makedirs(folder, exist_ok=True)
        for path in clean_partial(folder) + clean_partial(self.plan.states):
            self.notes.append(f"removed {path}, which a killed run left half-written")
        described = {**self.settings.as_json(), "resolved_num_classes": self.plan.num_classes}
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
            return self._train()

    def _train(self) -> int:
        s = self.settings
        total = self.plan.total_steps if self.plan.total_steps < sys.maxsize else 0
        if self.group.is_first:
            awaits = self._facts["awaits_verification"]
            self.log = RunLog(s.folder, self.step, total, s.tensorboard, is_verified=not awaits)
        else:
            self.log = NoLog()
        for note in self.notes:
            self.log.say(note)
        previous = {
            number: signal.signal(number, self._remember_signal)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            self._tick, self._timed = time.perf_counter(), 0
            if self._facts["awaits_verification"]:
                self._checkpoint()
            while self.step < self.plan.total_steps and not self._stopped_by:
                self._train_epoch()
            self._finish()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            self.log.close()
            self._release()
        return self._stopped_by

    def _remember_signal(self, number: int, _) -> None:
        self._signal = number
        if self.group.size == 1:
            self._stopped_by = number

    def _train_epoch(self) -> None:
        self.log.say("call reset()")
        for batch in self.pipeline.epoch(self.epoch, self._seen // self.batch_size):
            loss = self.train_step(batch)
            self._seen += self.batch_size
            self.step += 1
            self._timed += 1
            self.log.step()
            self._report(loss)
            is_last = self.step >= self.plan.total_steps
            if is_last or self.step % self.settings.verbose == 0:
                self._checkpoint()
            if is_last or self._stopped_by:
                return
        self.epoch, self._seen = self.epoch + 1, 0

    def train_step(self, batch: Batch) -> float:
        """Do one step on this process's part of a batch; return the mean loss of all of it."""
        backbone, head, head_trainer = self.trained
        rate = self.plan.rate_at(self.step)
        labels = self._gather_labels(batch.label)
        try:
            embeddings = backbone.forward(batch.data, (self.settings.seed, self.step))
            with autograd.record():
                loss = head(embeddings, labels)
            loss.backward()
            backbone.backward(embeddings.grad)
            mean = float(loss.mean().asscalar())
            if not math.isfinite(mean):
                raise ValueError("the loss is not finite")
        except ValueError as error:
            raise DivergedError(self._diagnose(error, batch, rate)) from None
        backbone.update(rate, len(labels))
        head_trainer.set_learning_rate(rate * self.settings.fc7_lr_mult)
        head_trainer.step(len(labels))
        return mean

    def _gather_labels(self, own: np.ndarray) -> np.ndarray:
        """Return the labels of all processes, (B,), and hear whether one of them was to stop."""
        numbers = np.append(own.astype(np.int64), self._signal)
        numbers = self.group.gather_integers("labels", numbers).reshape(self.group.size, -1)
        if self.group.size > 1:
            self._stopped_by = int(numbers[:, -1].max())
        return numbers[:, :-1].reshape(-1)

    def _diagnose(self, error: Exception, batch: Batch, rate: float) -> str:
        """Say what is not finite, and leave the numbers of the batch's images in a file."""
        backbone, head, _ = self.trained
        bad = [
            name
            for name, array in backbone.parameters().items()
            if not np.isfinite(array.asnumpy()).all()
        ]
        if not np.isfinite(head.class_weights()).all():
            bad.append("the class weights")
        images = self.group.gather_integers("images", batch.image)
        labels = self.group.gather_integers("labels of images", batch.label.astype(np.int64))
        path = os.path.join(self.settings.folder, "diverged.json")
        found = {
            "step": self.step,
            "lr": rate,
            "error": str(error),
            "not_finite": bad,
            "images": images.tolist(),
            "labels": labels.tolist(),
        }
        if self.group.is_first:
            with AtomicFile(path, "w") as file:
                json.dump(found, file)
        where = ", ".join([*bad[:3], f"{len(bad) - 3} more"] if len(bad) > 3 else bad)
        return (
            f"step {self.step}: {error}; parameters that are not finite: {where or 'none'}; "
            f"learning rate {rate:g}, scale {head.criterion.scale:g}. The images of this batch are "
            f"in {path}; nothing of it was saved. Try a lower --lr, --warmup-steps, "
            "--clip-gradient or a smaller --scale, and --resume from the last state"
        )

    # --- Between steps

    def _report(self, loss: float) -> None:
        s, step = self.settings, self.step
        if not self.group.is_first:
            return
        if step % STEPS_BETWEEN_RATE_LINES == 0:
            batch = self._seen // self.batch_size
            self.log.say(f"lr-batch-epoch: {self.plan.rate_at(step):g} {batch} {self.epoch}")
        before, now = self.plan.rate_at(step - 1), self.plan.rate_at(step)
        if s.lr_schedule == "step" and now < before:
            self.log.say(f"lr change to {now:g}")
        if step % s.frequent:
            return
        seconds = time.perf_counter() - self._tick
        stats = self.trained.head.stats
        speed = self._timed * self.batch_size / seconds
        self._tick, self._timed = time.perf_counter(), 0
        row = {
            "step": step,
            "epoch": self.epoch,
            "lr": before,
            "accuracy": stats["accuracy"],
            "loss": loss,
            "intra": stats["intra"],
            "inter_above_floor": stats["inter"] - stats.get("inter_floor", math.nan),
            "positive_cosine": stats["positive_cosine"],
            "negative_cosine": stats["negative_cosine"],
            # With a single class there is no negative.
            "max_negative_cosine": max(stats["max_negative_cosine"], -1.0),
            "samples_per_second": speed,
        }
        self.log.metrics(row)
        batch = self._seen // self.batch_size
        parts = ""
        if self.trained.head.criterion.dissected:  # of the others the parts can't be told apart
            parts = f"intra={stats['intra']:.4f}\tinter={stats['inter']:.4f}\t"
            if "inter_floor" in stats:
                parts += f"inter_floor={stats['inter_floor']:.4f}\t"
        self.log.info(
            f"Epoch[{self.epoch}] Batch [{max(batch - s.frequent, 0)}-{batch}]\tSpeed: {speed:.2f} "
            f"samples/sec\tacc={row['accuracy']:f}\tlossvalue={loss:f}\t{parts}"
            f"cos_y={row['positive_cosine']:.4f}\tmax_cos_n={row['max_negative_cosine']:.4f}"
        )

    def _checkpoint(self) -> None:
        """Save the state, verify it, and save its model if that is to be kept.

        The state comes first and says that it awaits its verification: a run that is stopped before
        the end of that does it when it is resumed.
        """
        started = time.perf_counter()
        self._facts["awaits_verification"] = True
        self._save_state()
        results = self._verify()
        stopped_by = self._signal if len(results) < len(self.plan.packs) else 0
        stopped_by = self.group.gather_json("stopped by", stopped_by)[0]
        if stopped_by:
            self._stopped_by = stopped_by  # now: all processes must stop at this step
        else:
            self._judge(results)
        self.log.draw()
        self._tick += time.perf_counter() - started  # it is no time of training

    def _judge(self, results: list[Verification | None]) -> None:
        """Keep the model of this step, or not; one that failed on a target is never the best."""
        facts = self._facts
        facts["verifications"] += 1
        is_best = None not in results and self._take_note(results)
        number = 1 if self.settings.ckpt == 3 else facts["verifications"]
        keep = {0: False, 1: is_best, 2: True, 3: is_best}[self.settings.ckpt]
        if self.group.gather_json("keep", keep)[0]:
            self.log.say(f"saving {number}")
            self._save_model(number)
        if any(results):
            self.log.say(f"[{self.step}]Accuracy-Highest: {facts['highest_last']:1.5f}")
        facts["awaits_verification"] = False
        if self.group.is_first:
            update_facts(path_of(self.plan.states, self.step), facts)

    def _verify(self) -> list[Verification | None]:
        """Verify on one target after the other until a signal comes; None is one that failed."""
        if not self.plan.packs:
            return []
        self.log.say("testing verification..")
        started = time.perf_counter()
        results = []
        for pack in self.plan.packs:
            if self._signal:  # who sent it may not wait for long
                self.log.say("verification is put off until --resume")
                break
            results.append(self._verify_on(pack))
        self.log.say(f"infer time {time.perf_counter() - started:f}")
        return results

    def _verify_on(self, pack: Pack) -> Verification | None:
        try:
            (result,) = evaluate(
                self.trained.backbone.embed,
                [pack],
                self.pipeline.batch_size,
                size=self.pipeline.image_size,
                threads=self.settings.threads,
            )
        except ValueError as error:
            # Moving averages of a few steps may overflow a deep network that trains well.
            self.log.say(f"[{pack.name}][{self.step}]not verified: {error}")
            return None
        self.log.say(str(result.embeddings.shape))
        for line in result.lines(self.step):
            self.log.say(line)
        self.log.scores(
            {
                "step": self.step,
                "target": pack.name,
                "accuracy": result.accuracy.mean,
                "deviation": result.accuracy.deviation,
                "xnorm": result.xnorm,
            }
        )
        return result

    def _take_note(self, results: list[Verification]) -> bool:
        """Keep the best scores; tell whether this model is the best by insightface's rule."""
        if not results:
            return True  # nothing tells one from another: the newest is kept
        facts = self._facts
        for result in results:
            best = facts["best"].get(result.name, 0.0)
            facts["best"][result.name] = max(best, result.accuracy.mean)
        last, total = results[-1].accuracy.mean, sum(one.accuracy.mean for one in results)
        is_best = last > facts["highest_last"] or (
            last == facts["highest_last"] and total >= facts["highest_sum"]
        )
        facts["highest_last"] = max(facts["highest_last"], last)
        facts["highest_sum"] = max(facts["highest_sum"], total)
        return is_best

    def _save_model(self, number: int) -> None:
        parameters = self._sound_parameters()
        if self.group.is_first:
            save_model(self._network, self.settings.prefix, number, parameters)

    def _sound_parameters(self) -> dict[str, mx.nd.NDArray]:
        parameters = self.trained.backbone.parameters()
        for name, array in parameters.items():
            if not np.isfinite(array.asnumpy()).all():
                raise DivergedError(
                    f"step {self.step}: {name} holds NaN or infinite numbers; it was not saved. "
                    "Try a lower --lr or --clip-gradient, and --resume from the last state"
                )
        if not self.trained.head.store.all_finite():
            self._refuse_classes("class weights hold NaN or infinite numbers")
        return parameters

    def _refuse_classes(self, reason: object) -> None:
        raise DivergedError(
            f"step {self.step}: {reason}; they were not saved. Try a lower --lr, and --resume from "
            "the last state"
        ) from None

    def _save_state(self) -> None:
        self._sound_parameters()
        facts = {
            **self._facts,
            "epoch": self.epoch,
            "images_seen": self._seen,
            "settings": self.settings.as_json(),
        }
        try:
            save_state(self.plan.states, self.step, self.trained, facts, self.group)
        except NotFiniteError as error:
            self._refuse_classes(error)
        if self.group.is_first:
            prune_states(self.plan.states, self.settings.keep)

    def _finish(self) -> None:
        if self._stopped_by:
            self.log.say(f"stopped by signal {self._stopped_by}: saving step {self.step}")
        self._save_state()
        bad = sum(self.group.gather_json("bad images", len(self.pipeline.bad_images)))
        if bad:
            self.log.say(f"{bad} images could not be decoded")
        self.log.say("saving last 0")
        self._save_model(0)
        self.log.draw(at_once=True)
