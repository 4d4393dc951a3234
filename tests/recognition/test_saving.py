"""States that are written while training goes on."""

import os
import threading

import pytest

from dsoftmax.recognition import checkpoint, loop, saving
from dsoftmax.recognition.settings import parse
from tests.recognition.runs import assert_same_state, folder_of, states_of

PATIENCE = 60  # seconds until a test fails instead of hanging


@pytest.fixture
def during_write(monkeypatch):
    """Return a function that has others called with the path of a state before it is written."""

    def make(call):
        write = checkpoint.State.write

        def watched(state):
            call(state.path)
            write(state)

        monkeypatch.setattr(checkpoint.State, "write", watched)

    return make


def names_of(flags):
    return [os.path.basename(path) for path in states_of(flags)]


@pytest.mark.parametrize(
    "changes",
    [{}, {"loss": "dsoftmax_k", "sample_rate": 0.5, "store": "host"}, {"devices": "cpu:2"}],
    ids=str,
)
def test_steps_go_on_and_change_nothing_of_the_state(flags, during_write, monkeypatch, changes):
    options = {"max_steps": 8, "keep": 9, "target": "none", "ckpt": 0, **changes}
    monkeypatch.setattr(saving, "available_bytes", lambda: 0)  # no background
    expected = flags("expected", **options)
    loop.Run(parse(expected)).train()
    monkeypatch.undo()

    trained = threading.Event()
    step = loop.Run.train_step

    def watched_step(run, batch):
        loss = step(run, batch)
        if run.step == 5:  # the second one after the state of step 4
            trained.set()
        return loss

    def wait_for_steps(path):
        if path.endswith("4"):
            assert trained.wait(PATIENCE)

    monkeypatch.setattr(loop.Run, "train_step", watched_step)
    during_write(wait_for_steps)
    made = flags("made", **options)
    loop.Run(parse(made)).train()
    assert names_of(made) == names_of(expected) == ["state-00000008", "state-00000004"]
    for one, other in zip(states_of(made), states_of(expected)):
        assert_same_state(folder_of(made) / one, folder_of(expected) / other)


def test_there_is_one_copy_at_most(flags, during_write, monkeypatch):
    copy, copies, written = checkpoint.State.copy, [], []

    def watched_copy(state):
        assert len(copies) == len(written)  # no other is in memory
        copies.append(state.path)
        return copy(state)

    monkeypatch.setattr(checkpoint.State, "copy", watched_copy)
    during_write(written.append)
    made = flags(verbose=1, max_steps=6, target="none", ckpt=0)
    loop.Run(parse(made)).train()
    assert copies == written
    assert len(copies) == 6


def test_no_copy_without_memory(flags, monkeypatch):
    monkeypatch.setattr(saving, "available_bytes", lambda: 1000)
    monkeypatch.setattr(checkpoint.State, "copy", lambda _: pytest.fail("a copy was made"))
    made = flags(max_steps=8, keep=9, target="none")
    assert loop.Run(parse(made)).train() == 0
    assert names_of(made) == ["state-00000008", "state-00000004"]


@pytest.fixture
def failing(during_write):
    """Return a function that makes the writes of these steps fail."""

    def make(*steps):
        def fail(path):
            if int(path[-8:]) in steps:
                raise OSError(5, "Input/output error", path)

        during_write(fail)

    return make


def test_a_failed_write_is_a_warning(flags, failing, capsys):
    failing(4, 6, 10)
    made = flags(verbose=2, keep=9, target="none", ckpt=0)
    assert loop.Run(parse(made)).train() == 0
    assert [int(name[-8:]) for name in names_of(made)] == [12, 8, 2]
    warnings = [line for line in capsys.readouterr().out.splitlines() if "warning:" in line]
    assert len(warnings) == 3
    first, second, third = warnings
    assert "a state could not be saved: [Errno 5] Input/output error: " in first
    assert "state-00000002 to resume from; 1 more such failures are tolerated" in first
    assert "state-00000002 to resume from; no other one is tolerated" in second
    assert "state-00000008 to resume from; 1 more" in third  # the count begins again


@pytest.mark.parametrize(
    ("steps", "left"),
    [((4, 6, 8), [2]), ((2,), []), ((12,), [10, 8, 6, 4, 2])],
    ids=["three in a row", "none before", "the last one"],
)
def test_failures_that_end_a_run(flags, failing, steps, left):
    failing(*steps)
    made = flags(verbose=2, keep=9, target="none", ckpt=0)
    with pytest.raises(OSError, match="Input/output error"):
        loop.Run(parse(made)).train()
    assert [int(name[-8:]) for name in names_of(made)] == left
