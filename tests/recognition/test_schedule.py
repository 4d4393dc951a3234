import pytest

from dsoftmax.recognition.schedule import learning_rate


def test_steps_as_insightface():
    """A tenth from each listed step on: the step after so many have been done."""
    rate = learning_rate("step", 0.1, 0, [10, 16])
    assert [rate(step) for step in (0, 9, 10, 15, 16, 10**9)] == pytest.approx(
        [0.1, 0.1, 0.01, 0.01, 0.001, 0.001]
    )


def test_steps_count_the_warm_up():
    rate = learning_rate("step", 0.4, 0, [10, 16], warmup_steps=4)
    found = [rate(step) for step in (0, 1, 2, 3, 4, 9, 10, 16)]
    assert found == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4, 0.04, 0.004])


@pytest.mark.parametrize("mode", ["cosine", "poly"])
@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_those_that_fall_to_zero(mode, warmup):
    rate = learning_rate(mode, 0.1, 50, warmup_steps=warmup)
    found = [rate(step) for step in range(50)]
    rest = found[warmup if warmup > 1 else 0 :]
    assert rest[0] == pytest.approx(0.1)
    assert rest == sorted(rest, reverse=True)
    assert rest[-1] == pytest.approx(0, abs=1e-9)


def test_constant():
    rate = learning_rate("constant", 0.1, 0)
    assert rate(0) == rate(10**6) == pytest.approx(0.1)


def test_what_is_refused():
    with pytest.raises(ValueError, match="--lr-schedule cosine needs an end"):
        learning_rate("cosine", 0.1, 0)
    with pytest.raises(ValueError, match="--lr-schedule is one of"):
        learning_rate("sine", 0.1, 0)
