"""The times of Table 3 and the verdict on them."""

import pytest

from dsoftmax.tools.benchmarks import loss
from dsoftmax.tools.reproduction import speed
from dsoftmax.tools.reproduction.speed import LABELS, QUICK_SIZE, Size, Speed, speed_table

SMALL = Size(600, width=8, batch_size=4, part=4)


def made_up(rng, **medians):
    load = [1 + rng.uniform() for _ in range(10)]  # of the machine, which pairs must not see
    seconds = {
        name: [median * busy * (1 + 0.01 * rng.normal()) for busy in load]
        for name, median in medians.items()
    }
    return Speed(QUICK_SIZE, seconds)


def test_times_as_fast_in_pairs(rng):
    measured = made_up(rng, nsoftmax=3.0, rand_softmax=0.05, hf_softmax=0.15, dsoftmax_k=0.05)
    ratio = measured.times_as_fast("nsoftmax")
    assert ratio.low < 60 < ratio.high
    assert ratio.high / ratio.low < 1.05
    assert ratio.pairs == 10


@pytest.mark.parametrize(
    ("rand", "verdict"), [(0.05, "**holds**"), (0.03, "**does not hold**"), (0.045, "**undecided")]
)
def test_the_verdict_follows_the_numbers(rng, rand, verdict):
    table = speed_table(
        made_up(rng, nsoftmax=3.0, rand_softmax=rand, hf_softmax=0.15, dsoftmax_k=0.05)
    )
    (line,) = [line for line in table.splitlines() if "(7)" in line]
    assert verdict in line
    (softmax,) = [line for line in table.splitlines() if line.startswith("| Softmax")]
    assert "*3.12*" in softmax


def test_measured_once_and_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "STEPS", 3)
    speed.measure(str(tmp_path), SMALL)
    measured = speed.read(str(tmp_path / speed.FILE))
    assert measured.size == SMALL
    assert set(measured.seconds) == set(LABELS)
    assert all(len(times) == 3 and min(times) > 0 for times in measured.seconds.values())

    def refuse(*_):
        raise AssertionError("it was measured again")

    monkeypatch.setattr(loss, "measure", refuse)
    speed.measure(str(tmp_path), SMALL)
    with pytest.raises(AssertionError):
        speed.measure(str(tmp_path), QUICK_SIZE)


def test_nothing_measured_yet(tmp_path):
    assert speed.read(str(tmp_path / speed.FILE)) is None
