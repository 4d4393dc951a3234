"""Class weights as 2-byte numbers: how they are rounded, kept, trained and saved."""

import copy
import json
import pickle
import subprocess
import sys

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, nd

from dsoftmax import losses
from dsoftmax.losses import half_rows, kernels, operators
from dsoftmax.losses.half_rows import BFloat16, Float16, random_numbers, row_keys
from dsoftmax.losses.stores.local import LocalStore

FORMATS = [Float16, BFloat16]
DTYPES = ["float16", "bfloat16"]
DROPPED = {Float16: 13, BFloat16: 16}  # bits of a float32
needs_operators = pytest.mark.skipif(
    not operators.load(), reason="the operators are not built: python tools/build_operators.py"
)


@pytest.fixture(params=[True, False], ids=["operators", "numpy"])
def with_operators(request, monkeypatch):
    """Run a test both ways."""
    if request.param and not operators.load():
        pytest.skip("the operators are not built")
    monkeypatch.setattr(operators, "_is_loaded", request.param)
    monkeypatch.setenv(operators.SWITCH, str(int(request.param)))


def all_halves(half):
    """Return every finite number of a format, by size, and the halves they are made of."""
    bits = np.arange(1 << 16).astype(np.uint16)
    values = half.decode(bits)
    bits = bits[np.isfinite(values)]
    return bits, values[np.isfinite(values)]


def some_values(rng, half, shape):
    """Return numbers over the whole range of float16, as a format holds them."""
    values = rng.normal(size=shape) * 10.0 ** rng.integers(-9, 4, shape)
    return half.encode(values.astype(np.float32))


class TestRounding:
    def test_float16_is_numpys(self):
        bits, values = all_halves(Float16)
        np.testing.assert_array_equal(values, bits.view(np.float16).astype(np.float32))

    def test_bfloat16_is_the_upper_half_of_a_float32(self):
        for value, bits in ((1.0, 0x3F80), (-2.0, 0xC000), (3.140625, 0x4049), (2.0**-130, 0x0008)):
            np.testing.assert_array_equal(BFloat16.encode(np.array([value], np.float32)), bits)
            np.testing.assert_array_equal(BFloat16.decode(np.array([bits], np.uint16)), value)

    @pytest.mark.parametrize("half", FORMATS)
    def test_numbers_of_the_format_stay(self, half):
        bits, values = all_halves(half)
        np.testing.assert_array_equal(half.encode(values), bits)
        for random in (0, 1, 0x80000000, 0xFFFFFFFF):
            rounded = half.round(values, np.full(len(values), random, np.uint32))
            np.testing.assert_array_equal(rounded, bits)

    @pytest.mark.parametrize("half", FORMATS)
    def test_nearest(self, half, rng):
        """As a search among all numbers of the format finds it."""
        values = (rng.normal(size=2000) * 10.0 ** rng.integers(-8, 4, 2000)).astype(np.float32)
        numbers = np.unique(all_halves(half)[1]).astype(np.float64)
        place = np.searchsorted(numbers, values)
        low, high = numbers[place - 1], numbers[place]
        best = np.where(values - low <= high - values, low, high)
        found = half.decode(half.encode(values))
        is_tie = values - low == high - values
        np.testing.assert_array_equal(found[~is_tie], best[~is_tie])

    @pytest.mark.parametrize("half", FORMATS)
    def test_either_neighbour(self, half, rng):
        values = (rng.normal(size=5000) * 10.0 ** rng.integers(-11, 4, 5000)).astype(np.float32)
        numbers = np.unique(all_halves(half)[1])
        place = np.searchsorted(numbers, values)
        random = rng.integers(0, 1 << 32, 5000, np.uint32)
        rounded = half.decode(half.round(values, random))
        is_low, is_high = rounded == numbers[place - 1], rounded == numbers[place]
        assert (is_low | is_high).all()
        assert 0.4 < is_low[values > 1e-4].mean() < 0.6

    @pytest.mark.parametrize("half", FORMATS)
    def test_the_mean_is_exact(self, half, rng):
        """Over all random numbers that differ in the bits that count."""
        count = 1 << DROPPED[half]
        for value in np.float32([1.2345678, -0.0123456, 3000.1234, 6.2e-5]):
            rounded = half.round(np.full(count, value), np.arange(count, dtype=np.uint32))
            assert half.decode(rounded).astype(np.float64).mean() == value

    @pytest.mark.parametrize("value", [5e-5, -3.3e-6, 1e-7, -1.7e-8, 4e-10])
    def test_the_mean_of_small_float16_numbers(self, value):
        """Of hashed random numbers, where all of their bits count."""
        count, step = 400_000, 2.0**-24
        random = random_numbers(row_keys(3, 5, np.arange(count // 100))[0], 100).reshape(-1)
        rounded = Float16.decode(Float16.round(np.full(count, value, np.float32), random))
        share = abs(value) / step % 1
        noise = step * np.sqrt(share * (1 - share) / count)
        assert rounded.astype(np.float64).mean() == pytest.approx(value, abs=5 * noise)

    @pytest.mark.parametrize("half", FORMATS)
    def test_what_is_not_finite_stays_so(self, half):
        values = np.float32([np.inf, -np.inf, np.nan])
        for random in (0, 0xFFFFFFFF):
            rounded = half.decode(half.round(values, np.full(3, random, np.uint32)))
            np.testing.assert_array_equal(rounded, values)
        np.testing.assert_array_equal(half.decode(half.encode(values)), values)

    def test_too_large_for_float16_is_infinite(self):
        rounded = Float16.round(np.float32([70000, -1e30]), np.zeros(2, np.uint32))
        np.testing.assert_array_equal(Float16.decode(rounded), [np.inf, -np.inf])


class TestRandomNumbers:
    def test_each_argument_counts(self):
        classes = np.arange(1000)
        keys = row_keys(1, 2, classes)
        assert len(np.unique(keys)) > 1990
        for other in (
            row_keys(2, 2, classes),
            row_keys(1, 3, classes),
            row_keys(1, 2, classes + 1),
        ):
            assert (keys != other).mean() > 0.99
        np.testing.assert_array_equal(row_keys(1, 2, classes[::-1])[:, ::-1], keys)
        row_keys((1 << 70) + 1, 1 << 40, classes)

    def test_uniform_and_independent(self):
        """Bits are fair; neighbours in columns, classes, steps and arrays are not correlated."""
        rows, width = 2000, 64
        keys = row_keys(0, 0, np.arange(rows))
        numbers = random_numbers(keys[0], width)
        later = random_numbers(row_keys(0, 1, np.arange(rows))[0], width)
        noise = 1 / np.sqrt(numbers.size)
        for bit in range(32):
            share = (numbers >> np.uint32(bit) & np.uint32(1)).mean()
            assert share == pytest.approx(0.5, abs=2.5 * noise)
        # Rounding looks at the low bits, and for small numbers at the high ones.
        for part in (lambda x: x & np.uint32(0x1FFF), lambda x: x >> np.uint32(16)):
            one = part(numbers).astype(np.float64)
            others = (part(later), part(random_numbers(keys[1], width)))
            others += (np.roll(one, 1, axis=0), np.roll(one, 1, axis=1))
            for other in others:
                found = np.corrcoef(one.reshape(-1), other.reshape(-1).astype(np.float64))
                assert abs(found[0, 1]) < 5 * noise


def updated(half, momentum=0.9, clip=None, parts=None, order=None, with_along=True):
    """Return the bits of weights and momenta after some updates, (2, 40, 33)."""
    random = np.random.default_rng(8)
    weight, state = (half_rows.make_rows(40, 33, mx.cpu(0)) for _ in range(2))
    for array in (weight, state):
        half_rows.memory_of(array)[:] = some_values(random, half, (40, 33))
    sgd = kernels.Sgd(0.1, momentum, 0.01, 1 / 3, clip)
    for step in range(4):
        rows = random.permutation(40)[:25]
        values = random.normal(size=(25, 33)) * 10.0 ** random.integers(-6, 3, (25, 33))
        along = random.normal(size=(25, 1))
        for part in parts or [np.arange(25)]:
            part = part if order is None else part[::order]
            gradient = kernels.RowGradient(
                nd.array(values[part]),
                nd.array(along[part]) if with_along else None,
                half_rows.take_half_rows(weight, rows[part], half),
            )
            keys = row_keys(11, step, rows[part])
            used = state if momentum else None
            half_rows.update_half_rows(sgd, half, weight, used, rows[part], keys, gradient)
    return np.stack([half_rows.memory_of(array) for array in (weight, state)])


class TestRows:
    @needs_operators
    @pytest.mark.parametrize("half", FORMATS)
    def test_taken_with_operators_or_without(self, half, monkeypatch):
        """Every 2-byte number becomes the same float32."""
        matrix = half_rows.make_rows(256, 256, mx.cpu(0))
        half_rows.memory_of(matrix)[:] = np.arange(1 << 16).reshape(256, 256)
        rows = np.arange(256)[::-1].copy()
        fast = half_rows.take_half_rows(matrix, rows, half).asnumpy()
        monkeypatch.setattr(operators, "_is_loaded", False)
        monkeypatch.setenv(operators.SWITCH, "0")
        plain = half_rows.take_half_rows(matrix, rows, half).asnumpy()
        np.testing.assert_array_equal(fast, plain)
        finite = np.isfinite(plain)
        np.testing.assert_array_equal(fast.view(np.uint32)[finite], plain.view(np.uint32)[finite])
        out = nd.empty((256, 256))
        half_rows.take_half_rows(matrix, rows, half, out)
        np.testing.assert_array_equal(out.asnumpy(), plain)

    @needs_operators
    @pytest.mark.parametrize("half", FORMATS)
    @pytest.mark.parametrize(
        "options", [{}, {"momentum": 0.0}, {"clip": 0.05}, {"with_along": False}], ids=str
    )
    def test_updated_with_operators_or_without(self, half, options, monkeypatch):
        fast = updated(half, **options)
        monkeypatch.setattr(operators, "_is_loaded", False)
        monkeypatch.setenv(operators.SWITCH, "0")
        np.testing.assert_array_equal(fast, updated(half, **options))

    @pytest.mark.parametrize("half", FORMATS)
    def test_as_the_formula_says(self, half, with_operators):
        """In double precision, and then one of the two neighbours."""
        weight, state = (half_rows.make_rows(3, 50, mx.cpu(0)) for _ in range(2))
        random = np.random.default_rng(0)
        for array in (weight, state):
            values = random.normal(size=(3, 50)).astype(np.float32)
            half_rows.memory_of(array)[:] = half.encode(values)
        w, s = (half.decode(half_rows.memory_of(a)).astype(np.float64) for a in (weight, state))
        g = random.normal(size=(2, 50)).astype(np.float32)
        rows = np.array([2, 0])
        gradient = kernels.RowGradient(nd.array(g))
        sgd = kernels.Sgd(0.1, 0.9, 0.01, 0.5, None)
        keys = row_keys(1, 1, rows)
        half_rows.update_half_rows(sgd, half, weight, state, rows, keys, gradient)
        s[rows] = 0.9 * s[rows] - 0.1 * (0.5 * g + 0.01 * w[rows])
        w[rows] += s[rows]
        distance = 2.0 ** (DROPPED[half] - 23)
        for array, exact in ((weight, w), (state, s)):
            found = half.decode(half_rows.memory_of(array))
            np.testing.assert_allclose(found, exact, rtol=1.01 * distance, atol=1e-6)
            np.testing.assert_array_equal(found[1], exact[1])
            assert (found[rows] != half.decode(half.encode(exact[rows].astype("f")))).any()

    @pytest.mark.parametrize("half", FORMATS)
    def test_order_and_parts_do_not_matter(self, half, with_operators):
        whole = updated(half)
        np.testing.assert_array_equal(updated(half, order=-1), whole)
        for count in (2, 3, 25):
            parts = np.array_split(np.arange(25), count)
            np.testing.assert_array_equal(updated(half, parts=parts), whole)


def make_head(dtype="float16", devices=1, classes=60, width=12, **options):
    options = {"sample_rate": 0.4, "seed": 5, "ctx": [mx.cpu(i) for i in range(devices)], **options}
    head = losses.create("dsoftmax_k", classes, width, store="host", dtype=dtype, **options)
    head.initialize(mx.init.Normal(0.1))
    return head


def train(head, trainer, steps, first=0, lr=0.1):
    """Train on random batches; return the losses."""
    values = []
    for step in range(first, first + steps):
        random = np.random.default_rng(step)
        x = nd.array(random.normal(size=(16, head.embedding_size)))
        with autograd.record():
            loss = head(x, random.integers(0, head.num_classes, 16))
        loss.backward()
        trainer.step(16)
        values.append(loss.asnumpy())
    return np.array(values)


SGD = {"learning_rate": 0.1, "momentum": 0.9, "wd": 5e-4}


@pytest.mark.parametrize("dtype", DTYPES)
class TestHead:
    def test_initial_weights_are_those_of_float32_rounded(self, dtype):
        half = dict(zip(DTYPES, FORMATS))[dtype]
        expected = half.decode(half.encode(make_head("float32").class_weights()))
        for devices in (1, 2, 3):
            found = make_head(dtype, devices).class_weights()
            assert found.dtype == np.float32
            np.testing.assert_array_equal(found, expected)

    @pytest.mark.parametrize("momentum", [0.9, 0.0])
    def test_the_same_gradients_on_any_split_give_the_same_bits(self, dtype, momentum, monkeypatch):
        def bits(devices, largest=None):
            if largest:
                monkeypatch.setattr(LocalStore, "largest_shard", largest)
            head = make_head(dtype, devices)
            trainer = head.trainer("sgd", {**SGD, "momentum": momentum})
            random = np.random.default_rng(2)
            for _ in range(5):
                classes = np.sort(random.choice(60, 30, replace=False))
                values = random.normal(size=(30, 12))
                gradients = []
                for number, shard in enumerate(head.store.shards):
                    owned = shard.owned(classes)
                    gradient = kernels.RowGradient(nd.array(values[owned], ctx=shard.device))
                    gradients.append((number, classes[owned] - shard.start, gradient))
                trainer._update_all(gradients)
                trainer._updates += 1
            names = trainer._state_names()
            return [head.class_weights(), *map(head.store.read, names)], len(head.store.shards)

        expected, _ = bits(1)
        assert len(expected) == (2 if momentum else 1)
        for devices, largest in ((2, None), (3, None), (1, 12 * 7)):
            found, shards = bits(devices, largest)
            assert shards == (9 if largest else devices)
            for one, other in zip(found, expected):
                np.testing.assert_array_equal(one, other)

    @pytest.mark.parametrize("options", [{"devices": 2}, {"devices": 3}, {"chunk": 5}], ids=str)
    def test_training_on_any_split(self, dtype, options):
        """Sums differ in the last digit of float32, which may turn a number to its neighbour."""
        one, other = make_head(dtype), make_head(dtype, **options)
        found = [train(head, head.trainer("sgd", SGD), 3) for head in (one, other)]
        np.testing.assert_allclose(*found, rtol=1e-3)
        weights = [head.class_weights() for head in (one, other)]
        assert (weights[0] == weights[1]).mean() > 0.97
        np.testing.assert_allclose(*weights, rtol=0.02, atol=1e-3)

    def test_rows_travel_to_other_devices(self, dtype):
        here = make_head(dtype)
        there = make_head(dtype, ctx=[mx.cpu(3)])
        for head in (here, there):
            train(head, head.trainer("sgd", SGD), 3)
        assert (here.class_weights() == there.class_weights()).mean() > 0.97

    def test_rows_not_in_use_are_not_touched(self, dtype):
        head = make_head(dtype, classes=200, sample_rate=0.1)
        trainer = head.trainer("sgd", {**SGD, "learning_rate": 0.5, "wd": 0.1})
        before, labels = head.class_weights(), np.array([3, 3, 150, 199])
        x = nd.random.normal(shape=(4, 12))
        in_use = np.union1d(head.sampler.draw(0, labels, x).classes, labels)
        with autograd.record():
            loss = head(x, labels)
        loss.backward()
        trainer.step(4)
        moved = np.flatnonzero((head.class_weights() != before).any(axis=1))
        np.testing.assert_array_equal(moved, in_use)

    @pytest.mark.parametrize("devices", [1, 2])
    def test_a_resumed_run_has_the_same_bits(self, dtype, devices, tmp_path):
        head = make_head(dtype, devices)
        trainer = head.trainer("sgd", SGD)
        train(head, trainer, 4)
        trainer.save_states(tmp_path / "states")
        weights = head.class_weights()
        expected = train(head, trainer, 4, first=4)

        again = make_head(dtype, devices, seed=5)
        again_trainer = again.trainer("sgd", SGD)
        again.load_class_weights(weights)
        again_trainer.load_states(tmp_path / "states")
        np.testing.assert_array_equal(again.class_weights(), weights)
        np.testing.assert_array_equal(train(again, again_trainer, 4, first=4), expected)
        np.testing.assert_array_equal(again.class_weights(), head.class_weights())
        for name in trainer._state_names():
            np.testing.assert_array_equal(again.store.read(name), head.store.read(name))

    def test_states_do_not_depend_on_the_type(self, dtype, tmp_path):
        head = make_head(dtype)
        trainer = head.trainer("sgd", SGD)
        train(head, trainer, 3)
        trainer.save_states(tmp_path / "states")
        floats = make_head("float32")
        other = floats.trainer("sgd", SGD)
        other.load_states(tmp_path / "states")
        (name,) = trainer._state_names()
        other._state_names()
        np.testing.assert_array_equal(floats.store.read(name), head.store.read(name))

    @pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
    def test_copies(self, dtype, clone):
        head = make_head(dtype, 2)
        copied = clone(head)
        np.testing.assert_array_equal(copied.class_weights(), head.class_weights())
        train(copied, copied.trainer("sgd", SGD), 1)
        assert (copied.class_weights() != head.class_weights()).any()
        assert repr(copied) == repr(head)

    def test_a_forest(self, dtype):
        head = losses.create(
            "hf_softmax", 60, 12, store="host", dtype=dtype, sample_rate=0.4, trees=3, seed=1
        )
        head.initialize(mx.init.Normal(0.1))
        values = train(head, head.trainer("sgd", SGD), 5)
        assert np.isfinite(values).all()

    def test_description(self, dtype):
        assert repr(make_head(dtype)).endswith(f"on cpu(0), as {dtype})")
        head = make_head(dtype, ctx=[mx.cpu(1), mx.cpu(2)])
        assert f"on cpu(1) from cpu(0), cpu(2) from cpu(0), as {dtype})" in repr(head)

    def test_not_finite(self, dtype):
        head = make_head(dtype)
        assert head.store.all_finite()
        half_rows.memory_of(head.store.shards[0].weight)[59, 11] = 0x7F90  # NaN in both formats
        assert not head.store.all_finite()

    def test_other_optimizers_are_refused(self, dtype):
        with pytest.raises(ValueError, match=f"{dtype} class weights can only be .* sgd, not adam"):
            make_head(dtype).trainer("adam")

    def test_training_reaches_the_loss_of_float32(self, dtype, monkeypatch):
        """Also where no update is as large as half the distance of two numbers."""
        monkeypatch.setattr(operators, "_is_loaded", False)
        monkeypatch.setenv(operators.SWITCH, "0")
        random = np.random.default_rng(4)
        centres = random.normal(size=(40, 16))
        first = random.normal(size=(40, 16)).astype(np.float32)

        lr = 0.002 if dtype == "float16" else 0.016

        def last_loss(dtype):
            head = make_head(dtype, classes=40, width=16, sample_rate=0.5)
            head.load_class_weights(first)
            trainer = head.trainer("sgd", {"learning_rate": lr})
            values = []
            for step in range(200):
                draw = np.random.default_rng(step)
                labels = draw.integers(0, 40, 64)
                x = nd.array(centres[labels] + 0.1 * draw.normal(size=(64, 16)))
                with autograd.record():
                    loss = head(x, labels)
                loss.backward()
                trainer.step(64)
                values.append(loss.mean().asscalar())
            return np.mean(values[:5]), np.mean(values[-20:])

        start, expected = last_loss("float32")
        _, stochastic = last_loss(dtype)
        half = dict(zip(DTYPES, FORMATS))[dtype]
        either, middle = half.round, np.uint32(1 << DROPPED[half] - 1)
        monkeypatch.setattr(half, "round", staticmethod(lambda values, _: either(values, middle)))
        _, nearest = last_loss(dtype)
        gain = start - expected
        assert gain > 0.2
        assert abs(stochastic - expected) < 0.05 * gain
        assert nearest - expected > 0.3 * gain


def test_numbers_too_large_for_float16():
    head = make_head()
    with pytest.raises(ValueError, match="float16 holds numbers up to 65504, not 70000"):
        head.load_class_weights(np.full((60, 12), 70000.0))


MEMORY = """
import json, os, sys
import mxnet as mx
import numpy as np
from mxnet import autograd, nd
from dsoftmax import losses

def used():
    nd.waitall()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def step(head):
    trainer = head.trainer("sgd", {"learning_rate": 0.1, "momentum": 0.9})
    with autograd.record():
        loss = head(nd.ones((4, 256)), np.arange(4))
    loss.backward()
    trainer.step(4)
    return trainer

options = {"sample_rate": 0.001, "store": "host", "dtype": sys.argv[1]}
small = losses.create("dsoftmax_k", 5000, 256, **options)
small.initialize(mx.init.Normal(0.01))
step(small)
before = used()
head = losses.create("dsoftmax_k", 200000, 256, **options)
head.load_class_weights(np.broadcast_to(np.float32(0.1), (200000, 256)))
trainer = step(head)
print(json.dumps((used() - before) / (200000 * 256)))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("dtype", "size"), [("float16", 4), ("bfloat16", 4), ("float32", 8)])
def test_bytes_per_number(dtype, size):
    """Of a weight and its momentum."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEMORY, dtype],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == pytest.approx(size, abs=0.7)
