"""Steps: signals, divergence, and the updates."""

import json
import os
import signal
import subprocess
import sys
import time

import mxnet as mx
import numpy as np
import pytest

from dsoftmax.losses import operators
from dsoftmax.recognition import loop, states, train
from dsoftmax.recognition.common.distributed.group import ALONE, Group
from dsoftmax.recognition.networks.layers import BatchNorm
from dsoftmax.recognition.settings import parse
from tests.recognition.runs import (
    folder_of,
    newest,
    read_table,
)
from tests.waits import counted_waits


def test_sigterm_saves_and_leaves(flags):
    """Through the real command, whose exit code tells the signal."""
    made = flags(max_steps=100_000, verbose=100_000, target="none")
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", train.__file__, *made],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    for line in process.stdout:
        if line.startswith("call reset()"):
            break
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    assert f"stopped by signal {int(signal.SIGTERM)}: saving step" in out
    step = int(newest(made).name.split("-")[1])
    assert step > 0
    assert states.read_facts(str(newest(made)))["step"] == step


@pytest.mark.parametrize(
    ("make_channel", "number", "code"),
    [(os.pipe, signal.SIGINT, 130), (os.pipe, None, 143), (os.openpty, None, 143)],
    ids=["Ctrl-C ends tee, too", "the reader leaves", "the terminal is closed"],
)
def test_what_is_printed_is_lost_and_the_state_is_not(flags, make_channel, number, code):
    made = flags(max_steps=100_000, verbose=100_000, target="none")
    reading, writing = make_channel()
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", train.__file__, *made],
        stdin=subprocess.DEVNULL,
        stdout=writing,
        stderr=writing,
        start_new_session=True,
    )
    os.close(writing)
    with open(reading, "rb") as lines:
        while b"call reset()" not in next(lines):
            pass
    if number:
        process.send_signal(number)
    assert process.wait(60) == code
    assert states.read_facts(str(newest(made)))["step"] > 0


def test_ctrl_c_saves_and_leaves(flags, monkeypatch, capsys):
    train_step = loop.Run.train_step

    def interrupted(run, batch):
        if run.step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return train_step(run, batch)

    monkeypatch.setattr(loop.Run, "train_step", interrupted)
    before = signal.getsignal(signal.SIGINT)
    made = flags(target="none")
    assert train.main(made) == 128 + signal.SIGINT
    assert "stopped by signal 2: saving step 3" in capsys.readouterr().out
    assert newest(made).name == "state-00000003"
    assert signal.getsignal(signal.SIGINT) is before


class TwoProcesses(Group):
    """The first of two processes; the second sends `others`, name by name."""

    size = 2

    def __init__(self, **others):
        self.others = others

    def gather_integers(self, name, values):
        return np.append(values, self.others[name])


def test_a_lost_terminal_stops_a_run_unless_nohup_says_no():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with loop.StopSignals(ALONE) as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.agreed == 0
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with loop.StopSignals(ALONE) as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.agreed == signal.SIGHUP
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_reaches_all_processes():
    """By a call of its own, whichever process received it."""
    quiet = loop.StopSignals(TwoProcesses(signal=[signal.SIGTERM]))
    quiet.exchange()
    assert (quiet.received, quiet.agreed) == (0, signal.SIGTERM)
    with loop.StopSignals(TwoProcesses(signal=[0])) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert (signals.received, signals.agreed) == (signal.SIGTERM, 0)  # the other can't know
        signals.exchange()
        assert signals.agreed == signal.SIGTERM


def test_a_nan_stops_the_run_before_it_is_saved(flags, capsys):
    made = flags(lr="1e30", max_steps=50, lr_steps="", verbose=1000, target="none")
    assert train.main(made) == 2
    err = capsys.readouterr().err
    assert "learning rate 1e+30, scale 32" in err
    assert "embeddings hold NaN or infinite numbers" in err
    assert "--clip-gradient" in err
    found = json.loads((folder_of(made) / "diverged.json").read_text())
    assert len(found["images"]) == 8
    assert not (folder_of(made) / "states").exists()
    assert not list(folder_of(made).glob("model-*.params"))


class TestSteps:
    """The order of a step, and where it waits."""

    SAMPLED = {"loss": "dsoftmax_k", "sample_rate": 0.4}  # noqa: RUF012

    @pytest.mark.parametrize("with_operators", [True, False])
    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"loss": "adaface", "clip_gradient": 0.1},
            {"loss": "dsoftmax_b", "sample_rate": 0.5, "chunk": 2},
            SAMPLED,
            {**SAMPLED, "store": "host"},
            {**SAMPLED, "store": "host", "accumulate": 2, "per_batch_size": 4},
            {"freeze_backbone": True},
        ],
        ids=str,
    )
    def test_wait_once(self, flags, changes, with_operators, monkeypatch):
        """A GPU would idle wherever else Python waits for it."""
        if not with_operators:
            monkeypatch.setattr(operators, "_is_loaded", False)
            monkeypatch.setenv(operators.SWITCH, "0")
        run = loop.Run(parse(flags(**changes)))
        found = []
        for batch in run.plan.pipeline.epoch(0):
            with counted_waits() as waits:
                run.train_step(batch)
            run.step += 1
            found.append(waits)
        for waits in found[1:]:  # the first step makes momenta
            assert sum(waits.values()) == 1, waits

    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_class_rows_are_fetched_before_the_network_runs(self, flags, accumulate):
        size = 8 // accumulate
        run = loop.Run(parse(flags(**self.SAMPLED, accumulate=accumulate, per_batch_size=size)))
        calls = []
        backbone, (shard,) = run.trained.backbone, run.trained.head.store.shards
        gather, forward = shard.gather, backbone.forward
        shard.gather = lambda *arguments: (calls.append("rows"), gather(*arguments))
        backbone.forward = lambda *arguments: (calls.append("network"), forward(*arguments))[1]
        run.train_step(next(run.plan.pipeline.epoch(0)))
        assert calls == ["rows"] + ["network"] * accumulate

    def test_a_forest_is_not_announced(self, flags):
        run = loop.Run(parse(flags(loss="hf_softmax", sample_rate=0.5)))
        run.trained.head.begin_update = pytest.fail
        assert run.train_step(next(run.plan.pipeline.epoch(0))) > 0

    @pytest.mark.parametrize("changes", [{}, {"accumulate": 2, "per_batch_size": 4}], ids=str)
    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    @pytest.mark.parametrize("place", ["forward", "backward", "update"])
    def test_an_error_leaves_no_half_begun_update(self, flags, changes, error, place):
        run = loop.Run(parse(flags(**self.SAMPLED, **changes)))
        batch = next(run.plan.pipeline.epoch(0))
        before = run.trained.head.class_weights()
        method = getattr(run.trained.backbone, place)

        def fail(*_):
            setattr(run.trained.backbone, place, method)
            raise error

        setattr(run.trained.backbone, place, fail)
        with pytest.raises(error):
            run.train_step(batch)
        np.testing.assert_array_equal(run.trained.head.class_weights(), before)
        assert run.train_step(batch) > 0

    @pytest.mark.parametrize("changes", [{}, {"accumulate": 2, "per_batch_size": 4}], ids=str)
    def test_nothing_is_updated_by_a_loss_that_is_not_finite(self, flags, changes):
        run = loop.Run(parse(flags(**self.SAMPLED, **changes)))
        backbone, head, _ = run.trained
        before = {key: array.asnumpy() for key, array in backbone.parameters().items()}
        weights = head.class_weights()
        head.store.shards[0].weight[:] = np.nan
        with pytest.raises(loop.DivergedError, match="the loss is not finite for 8 of 8 samples"):
            run.train_step(next(run.plan.pipeline.epoch(0)))
        for key, array in backbone.parameters().items():
            if "running" not in key and "moving" not in key:
                np.testing.assert_array_equal(array.asnumpy(), before[key])
        head.load_class_weights(weights)
        run.train_step(next(run.plan.pipeline.epoch(0)))


def test_weight_decay_is_of_everything(flags):
    """With no gradient a step multiplies each parameter by 1 - lr wd."""
    run = loop.Run(parse(flags(wd=0.5, mom=0.0)))
    parameters = run.plan.network.collect_params().values()
    embeddings = run.trained.backbone.forward(next(run.plan.pipeline.epoch(0)).data)
    run.trained.backbone.backward(mx.nd.zeros_like(embeddings))
    mx.nd.waitall()  # moving averages are written on the way backward
    before = {one.name: one.data().asnumpy() for one in parameters}
    run.trained.backbone.update(0.1, 8)
    for one in parameters:
        factor = 1 if one.grad_req == "null" else 0.95
        np.testing.assert_allclose(one.data().asnumpy(), before[one.name] * factor, rtol=1e-5)


def test_multipliers_of_class_weights(flags, tmp_path):
    (tmp_path / "config.py").write_text(
        "from dsoftmax.recognition.config import *\n"
        "config.fc7_lr_mult = 0.0\nconfig.fc7_wd_mult = 3.0\n"
    )
    made = flags(config=tmp_path / "config.py", max_steps=3, target="none")
    run = loop.Run(parse(made))
    before = run.trained.head.class_weights()
    assert run.trained.head_trainer.optimizer.wd == pytest.approx(3 * 5e-4)
    run.train()
    np.testing.assert_array_equal(run.trained.head.class_weights(), before)


@pytest.mark.parametrize("devices", ["cpu", "cpu:2"])
def test_clipping(flags, devices):
    longest = 1e-3
    made = flags(clip_gradient=longest, wd=0.0, mom=0.0, devices=devices, target="none")
    run = loop.Run(parse(made))
    before = run.trained.backbone.parameters()
    before = {key: array.asnumpy() for key, array in before.items() if "moving" not in key}
    run.train_step(next(run.plan.pipeline.epoch(0)))
    after = run.trained.backbone.parameters()
    moved = sum(np.square(after[key].asnumpy() - old).sum() for key, old in before.items())
    assert np.sqrt(moved) == pytest.approx(0.1 * longest, rel=1e-2)


class TestMicroBatches:
    """``--accumulate`` against a batch that is so many times as large."""

    # Rounding is not amplified.
    CALM = {"lr": 0.01, "max_steps": 3, "target": "none"}  # noqa: RUF012

    @pytest.fixture
    def trained(self, flags, tmp_path):
        """Return a function that trains 3 steps; it returns losses and all parameters."""
        smooth = tmp_path / "smooth.py"
        smooth.write_text(
            "from dsoftmax.recognition.config import *\nnetwork.tiny.net_act = 'softrelu'\n"
        )

        def train_steps(has_statistics=False, **changes):
            run = loop.Run(parse(flags(config=smooth, **self.CALM, **changes)))
            run.release()
            if not has_statistics:
                run.plan.network.apply(self._fix_statistics)
            found = []
            for batch in run.plan.pipeline.epoch(0):
                found.append(run.train_step(batch))
                run.step += 1
            assert len(found) == 2  # 43 images
            parameters = run.trained.backbone.parameters()
            arrays = {key: array.asnumpy() for key, array in parameters.items()}
            return found, {**arrays, "classes": run.trained.head.class_weights()}

        return train_steps

    @staticmethod
    def _fix_statistics(block):
        if isinstance(block, BatchNorm):
            block._options["use_global_stats"] = True

    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"clip_gradient": 0.01},
            {"loss": "dsoftmax_k", "sample_rate": 0.4, "store": "host"},
            {"loss": "rand_arcface", "sample_rate": 0.8, "chunk": 2},
            {"loss": "dsoftmax_b", "sample_rate": 0.1},
        ],
        ids=str,
    )
    def test_are_one_large_batch(self, trained, changes):
        large, large_parameters = trained(per_batch_size=16, **changes)
        found, parameters = trained(per_batch_size=4, accumulate=4, **changes)
        np.testing.assert_allclose(found, large, rtol=1e-5)
        for key, array in large_parameters.items():
            np.testing.assert_allclose(parameters[key], array, rtol=1e-5, atol=1e-5)

    def test_on_several_devices(self, trained):
        large, large_parameters = trained(per_batch_size=16)
        changes = {"devices": "cpu:2", "class_parallel": 1}
        found, parameters = trained(per_batch_size=2, accumulate=4, **changes)
        np.testing.assert_allclose(found, large, rtol=1e-5)
        for key, array in large_parameters.items():
            np.testing.assert_allclose(parameters[key], array, rtol=1e-5, atol=1e-5)

    def test_a_frozen_backbone(self, trained):
        changes = {"freeze_backbone": True, "has_statistics": True}
        _, large = trained(per_batch_size=16, **changes)
        _, found = trained(per_batch_size=8, accumulate=2, **changes)
        for key, array in large.items():
            np.testing.assert_allclose(found[key], array, rtol=1e-5, atol=1e-5)

    def test_statistics_are_those_of_a_micro_batch(self, trained):
        large, _ = trained(per_batch_size=16, has_statistics=True)
        found, _ = trained(per_batch_size=8, accumulate=2, has_statistics=True)
        assert not np.allclose(found, large, rtol=1e-4)

    def test_draw_random_numbers_of_their_own(self, flags):
        run = loop.Run(parse(flags(accumulate=2, per_batch_size=4)))
        seen = []
        forward = run.trained.backbone.forward

        def watch(images, key):
            seen.append((key, images.copy()))
            return forward(images, key)

        run.trained.backbone.forward = watch
        batch = next(run.plan.pipeline.epoch(0))
        run.train_step(batch)
        assert [key for key, _ in seen] == [(5, 0, 0), (5, 0, 1)]
        np.testing.assert_array_equal(np.concatenate([part for _, part in seen]), batch.data)

    def test_steps_are_updates(self, flags, capsys):
        """Of the schedule, the log, the checkpoints and the epoch."""
        made = flags(accumulate=2, per_batch_size=4, end_epoch=2, max_steps=0, verbose=5)
        assert train.main(made) == 0
        out = capsys.readouterr().out
        assert newest(made).name == "state-00000010"  # 43 images, 5 steps of 8 per epoch
        assert "lr change to 0.01" in out
        assert "Epoch[1] Batch [1-3]" in (folder_of(made) / "train.log").read_text()
        rows = read_table(folder_of(made) / "metrics.csv")
        assert [int(row["step"]) for row in rows] == [2, 4, 6, 8, 10]
        facts = states.read_facts(str(newest(made)))
        assert (facts["epoch"], facts["images_seen"]) == (1, 40)
