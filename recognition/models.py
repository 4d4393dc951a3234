"""The models of a run: how well each verifies, which is the best, and which files are kept."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Callable

from dsoftmax.eval.mistakes import detailed_json
from dsoftmax.eval.pairs import Verification, verify
from dsoftmax.recognition.common.arrays import Blocks
from dsoftmax.recognition.common.cli import print_json
from dsoftmax.recognition.data.packs import Pack
from dsoftmax.recognition.log import NoLog, RunLog
from dsoftmax.recognition.networks.files import Classifier, save_model
from dsoftmax.recognition.plan import Plan
from dsoftmax.recognition.trained import Trained

RESULTS_FILE = "verification.json"  # the newest verification, in detail


@dataclass
class Scores:
    """The verification results that decide which model is the best; saved with every state.

    Attributes
    ----------
    best : dict of str to float
        The best accuracy on each target.
    highest_last, highest_sum : float
        The best accuracy on the last target, and the best sum over all targets.
    verifications : int
        How many have been completed.
    awaits_verification : bool
        Whether this step is due to be verified, but not yet done.
    """

    best: dict[str, float] = field(default_factory=dict)
    highest_last: float = 0.0
    highest_sum: float = 0.0
    verifications: int = 0
    awaits_verification: bool = False

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> Scores:
        """Return the scores of a saved state; older states lack some of them."""
        return cls(**{one.name: facts[one.name] for one in fields(cls) if one.name in facts})

    def as_facts(self) -> dict[str, Any]:
        """Return what is saved with a state."""
        return asdict(self)

    def update(self, results: list[Verification]) -> bool:
        """Record new results; return whether this model is the best by insightface's rule."""
        if not results:
            return True  # nothing distinguishes the models: keep the newest
        for result in results:
            best = self.best.get(result.name, 0.0)
            self.best[result.name] = max(best, result.accuracy.mean)
        last, total = results[-1].accuracy.mean, sum(one.accuracy.mean for one in results)
        is_best = last > self.highest_last or (
            last == self.highest_last and total >= self.highest_sum
        )
        self.highest_last = max(self.highest_last, last)
        self.highest_sum = max(self.highest_sum, total)
        return is_best


class Models:
    """Verifies the model of a step and saves it if it is to be kept.

    Parameters
    ----------
    plan : Plan
    trained : Trained

    Attributes
    ----------
    scores : Scores
    """

    def __init__(self, plan: Plan, trained: Trained):
        self._plan, self._trained = plan, trained
        self.scores = Scores()

    def verify(
        self, step: int, log: RunLog | NoLog, is_stopping: Callable[[], bool]
    ) -> list[Verification | None]:
        """Verify on one target after the other, until the run is to stop.

        Returns
        -------
        list
            None in the place of a target that failed; shorter than `plan.packs` if the run is to
            stop. Processes other than the first verify nothing.
        """
        if not self._plan.packs:
            return []
        log.say("testing verification..")
        started = time.perf_counter()
        results = []
        for pack in self._plan.packs:
            if is_stopping():  # whoever sent the signal may not wait for long
                log.say("verification is put off until --resume")
                break
            results.append(self._verify_on(pack, step, log))
        log.say(f"infer time {time.perf_counter() - started:f}")
        return results

    def _keep_details(self, step: int, results: list[Verification]) -> None:
        """Write the results as `eval/verification.py --json` does, with mistakes and thresholds."""
        entries = [{"name": result.name, **detailed_json(result)} for result in results]
        path = os.path.join(self._plan.settings.folder, RESULTS_FILE)
        print_json({"step": step, "results": entries}, path)

    def _verify_on(self, pack: Pack, step: int, log: RunLog | NoLog) -> Verification | None:
        pipeline = self._plan.pipeline
        try:
            result = verify(
                self._trained.backbone.embed,
                pack,
                self._plan.images_at_once,
                size=pipeline.image_size,
                threads=self._plan.settings.threads,
            )
        except ValueError as error:
            # Moving averages of a few steps may overflow a deep network that trains well.
            log.say(f"[{pack.name}][{step}]not verified: {error}")
            return None
        log.say(str(result.embeddings.shape))
        for line in result.lines(step):
            log.say(line)
        log.scores(
            {
                "step": step,
                "target": pack.name,
                "accuracy": result.accuracy.mean,
                "deviation": result.accuracy.deviation,
                "xnorm": result.xnorm,
            }
        )
        return result

    def judge(self, step: int, results: list[Verification | None], log: RunLog | NoLog) -> None:
        """Record the results of a complete verification, and save the model if `--ckpt` says so.

        A model that failed on a target is never the best. All processes must call this; the
        results are the first one's.
        """
        scores, ckpt = self.scores, self._plan.settings.ckpt
        scores.verifications += 1
        if any(results):
            self._keep_details(step, [result for result in results if result])
        is_best = None not in results and scores.update(results)
        number = 1 if ckpt == 3 else scores.verifications
        keep = {0: False, 1: is_best, 2: True, 3: is_best}[ckpt]
        if self._plan.group.gather_json("keep", keep)[0]:
            log.say(f"saving {number}")
            self.save(number, step, log)
        if any(results):
            log.say(f"[{step}]Accuracy-Highest: {scores.highest_last:1.5f}")
        scores.awaits_verification = False

    def save(self, number: int, step: int, log: RunLog | NoLog) -> None:
        """Save the model under a number. All processes must call this; the first one writes."""
        parameters = self._trained.finite_parameters(step)
        plan, head = self._plan, self._trained.head
        has_classes = not plan.settings.ckpt_embedding
        if not plan.group.is_first:
            if has_classes:
                head.store.assist_reading()
            return
        classifier = None
        if has_classes:
            weights = Blocks(head.store.shape, head.store.blocks())
            classifier = Classifier(weights, head.criterion.scale, head.normalize)
        path = save_model(plan.network, plan.settings.prefix, number, parameters, classifier)
        log.info(f'Saved checkpoint to "{path}"')
