import mxnet as mx
import numpy as np
import pytest
from mxnet import nd

from dsoftmax import losses
from dsoftmax.losses import forest as module
from dsoftmax.losses.forest import Forest, ForestClasses
from dsoftmax.losses.samplers import BATCH_CLASSES
from dsoftmax.losses.stores.local import DeviceStore, HostStore


def store_of(weights, devices=(0,), on_host=False):
    kind = HostStore if on_host else DeviceStore
    store = kind(*weights.shape, [mx.cpu(device) for device in devices])
    store.fill(weights.astype(np.float32))
    return store


def clustered(rng, num_classes, width, batch):
    """Draw weights around centres of 30 classes each, and samples around some of the weights."""
    centres = rng.normal(size=(num_classes // 30, width))
    weights = centres[rng.integers(len(centres), size=num_classes)]
    weights = weights + rng.normal(size=weights.shape)
    samples = weights[rng.integers(num_classes, size=batch)]
    return weights, (samples + rng.normal(size=samples.shape)).astype(np.float32)


def cosines(samples, weights):
    samples, weights = (
        rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-10)
        for rows in (samples, weights)
    )
    return samples @ weights.T


def by_brute_force(similarity, each):
    return np.argsort(-similarity, axis=1, kind="stable")[:, :each]


def assert_nearest(found, similarity, each):
    """Check for the nearest, in order; what differs by rounding alone may change places."""
    best = by_brute_force(similarity, each)
    assert np.shape(found) == best.shape
    found, best = (np.take_along_axis(similarity, k, axis=1) for k in (np.array(found), best))
    np.testing.assert_allclose(found, best, atol=1e-4)


class TestForest:
    def test_finds_what_is_near(self, rng):
        weights, samples = clustered(rng, 6000, 32, 24)
        found = Forest.grow(store_of(weights), True, 50, 20, seed=1, step=0).nearest(samples, 20)
        similarity = cosines(samples, weights)
        best = by_brute_force(similarity, 20)
        recall = np.mean([np.isin(*pair).mean() for pair in zip(best, found)])
        assert recall > 0.7  # of random classes it is 20 / 6000
        of_found = np.mean([row[classes].mean() for row, classes in zip(similarity, found)])
        assert of_found > 0.97 * np.take_along_axis(similarity, best, axis=1).mean()

    @pytest.mark.parametrize("change", [{"IGNORED": 0}, {"COMPARED": 1}])
    def test_what_makes_it_find_more(self, rng, monkeypatch, change):
        """Both sides of the nearest planes, and exact comparison of more than is asked for."""
        weights, samples = clustered(rng, 6000, 32, 48)
        best = by_brute_force(cosines(samples, weights), 20)

        def recall():
            forest = Forest.grow(store_of(weights), True, 20, 20, seed=1, step=0)
            found = forest.nearest(samples, 20)
            return np.mean([np.isin(*pair).mean() for pair in zip(best, found)])

        with_it = recall()
        for name, value in change.items():
            monkeypatch.setattr(module, name, value)
        assert recall() < 0.9 * with_it

    @pytest.mark.parametrize("normalize", [True, False])
    def test_is_exact_where_one_leaf_holds_all(self, rng, normalize):
        weights = rng.normal(size=(40, 6)) * rng.uniform(0.1, 3, (40, 1))
        samples = rng.normal(size=(9, 6)).astype(np.float32)
        found = Forest.grow(store_of(weights), normalize, 1, 40, seed=1, step=0).nearest(samples, 5)
        similarity = cosines(samples, weights) if normalize else samples @ weights.T
        assert_nearest(found, similarity, 5)

    def test_ranks_by_the_weights_of_today(self, rng):
        weights = rng.normal(size=(40, 6))
        weights /= np.linalg.norm(weights, axis=1, keepdims=True)
        samples = rng.normal(size=(4, 6)).astype(np.float32)
        store = store_of(weights)
        forest = Forest.grow(store, True, 3, 40, seed=1, step=0)
        store.fill(weights[::-1].astype(np.float32))
        assert_nearest(forest.nearest(samples, 5), cosines(samples, weights[::-1]), 5)

    def test_planes_halve_the_classes(self, rng):
        weights = rng.normal(size=(1000, 8)) + 2  # all of them far from the origin
        state = Forest.grow(store_of(weights), True, 2, 10, seed=1, step=0).state
        share = np.unpackbits(state["sides"], axis=1).mean(axis=0)
        assert ((abs(share - 0.5) < 0.01) | (share == 0)).all()  # 0: twice the same class

    def test_leaves_hold_every_class_once_by_its_sides(self, rng):
        forest = Forest.grow(store_of(rng.normal(size=(300, 5))), True, 4, 10, seed=1, step=0)
        planes, sides = forest.state["planes"], np.unpackbits(forest.state["sides"], axis=1)
        depth = planes.shape[1]
        for leaf, (start, stop) in enumerate(zip(forest._starts, forest._starts[1:])):
            tree, number = divmod(leaf, 2**depth)
            code = [number >> (depth - 1 - place) & 1 for place in range(depth)]
            expected = np.flatnonzero((sides[:, planes[tree]] == code).all(axis=1))
            np.testing.assert_array_equal(forest._classes[start:stop], expected)
        assert len(forest._starts) == 4 * 2**depth + 1

    def test_blocks_change_nothing(self, rng, monkeypatch):
        weights, samples = clustered(rng, 900, 8, 10)
        expected = Forest.grow(store_of(weights), True, 5, 9, seed=1, step=0).nearest(samples, 9)
        monkeypatch.setattr(module, "PROJECTED_AT_ONCE", 101)
        monkeypatch.setattr(module, "COMPARED_AT_ONCE", 50)
        found = Forest.grow(store_of(weights), True, 5, 9, seed=1, step=0).nearest(samples, 9)
        for one, other in zip(found, expected):
            np.testing.assert_array_equal(one, other)


def draw_all(sampler, samples, labels, steps=3):
    return [sampler.draw(step, labels, nd.array(samples)).classes for step in range(steps)]


class TestForestClasses:
    @pytest.mark.parametrize("batch_classes", BATCH_CLASSES)
    @pytest.mark.parametrize("rate", [0.01, 0.1, 0.9, 1])
    def test_is_filled_to_the_rate_and_never_a_label(self, rng, rate, batch_classes):
        weights, samples = clustered(rng, 300, 8, 4)
        labels = np.array([5, 6, 5, 299])
        sampler = ForestClasses(store_of(weights), rate, batch_classes, trees=1, seed=1)
        (classes,) = draw_all(sampler, samples, labels, 1)
        wanted = round(rate * 300)
        is_counted = batch_classes == "counted"
        assert len(classes) == (max(0, wanted - 3) if is_counted else min(wanted, 297))
        assert not set(classes) & set(labels)
        assert (np.diff(classes) > 0).all()

    def test_takes_the_nearest_of_each_sample_first(self, rng):
        weights = rng.normal(size=(50, 6))
        samples = rng.normal(size=(4, 6)).astype(np.float32)
        labels = np.array([3, 1, 4, 15])
        sampler = ForestClasses(store_of(weights), 0.8, "excluded", seed=1)
        # One leaf: what is near is exact.
        sampler.load_state(Forest.grow(store_of(weights), True, 1, 50, seed=1, step=0).state)
        (classes,) = draw_all(sampler, samples, labels, 1)
        best = by_brute_force(cosines(samples, weights), 11)
        rank = {int(k): r for r, row in reversed(list(enumerate(best.T))) for k in row}
        expected = sorted(set(rank) - set(labels), key=lambda k: (rank[k], k))[:40]
        assert set(expected) <= set(classes)
        assert len(classes) == 40

    @pytest.mark.parametrize("copies", [1, 3])
    def test_devices_and_the_host_draw_the_same(self, copies):
        rng = np.random.default_rng(7)  # no class lies on a plane, where rounding decides
        weights, samples = clustered(rng, 901, 16, 8)
        weights[:] = weights[np.arange(901) // copies]  # equal weights, on different devices
        labels = rng.integers(0, 901, 8)

        def draws(devices, on_host=False):
            store = store_of(weights, devices, on_host)
            sampler = ForestClasses(store, 0.1, "counted", trees=9, rebuild_every=2, seed=1)
            return np.concatenate(draw_all(sampler, samples, labels))

        expected = draws([0])
        np.testing.assert_array_equal(draws([0, 1]), expected)
        np.testing.assert_array_equal(draws([0, 1, 2]), expected)
        np.testing.assert_array_equal(draws([1, 2], on_host=True), expected)

    def test_is_rebuilt_every_so_many_steps(self, rng):
        weights, samples = clustered(rng, 60, 4, 1)
        sampler = ForestClasses(store_of(weights), 0.2, "counted", trees=2, rebuild_every=3)
        assert sampler.stats["forest_built_at_step"] == -1
        steps = []
        for step in [0, 1, 2, 3, 4, 7, 8, 9, 1]:
            sampler.draw(step, np.array([1]), nd.array(samples))
            steps.append(sampler.stats["forest_built_at_step"])
        assert steps == [0, 0, 0, 3, 3, 7, 7, 9, 1]
        assert sampler.stats["forest_rebuild_seconds"] > 0
        assert sampler.stats["forest_query_seconds"] > 0

    def test_goes_on_from_a_state_with_the_same_forest(self, rng, tmp_path):
        weights, samples = clustered(rng, 900, 8, 8)
        labels = rng.integers(0, 900, 8)
        store = store_of(weights)
        options = {"trees": 5, "seed": 1}
        sampler = ForestClasses(store, 0.1, "excluded", **options)
        sampler.draw(0, labels, nd.array(samples))
        # As it is saved: what MXNet's files can hold, of the same types.
        path = str(tmp_path / "state")
        nd.save(path, {k: nd.array(v, dtype=v.dtype) for k, v in sampler.state.items()})
        state = {name: array.asnumpy() for name, array in nd.load(path).items()}
        for name, array in sampler.state.items():
            assert state[name].dtype == array.dtype
            np.testing.assert_array_equal(state[name], array)

        moved = (weights + rng.normal(size=weights.shape)).astype(np.float32)
        store.fill(moved)
        expected = draw_all(sampler, samples, labels)
        resumed = ForestClasses(store_of(moved, [0, 1]), 0.1, "excluded", **options)
        resumed.load_state(state)
        np.testing.assert_array_equal(draw_all(resumed, samples, labels), expected)
        assert resumed.built_at == 0
        # and it matters: a forest of the weights as they are now finds others
        resumed.load_state({})
        assert resumed.state == {}
        assert (np.array(draw_all(resumed, samples, labels)) != expected).any()

    def test_a_state_of_other_classes_is_refused(self, rng):
        weights, samples = clustered(rng, 60, 4, 2)
        sampler = ForestClasses(store_of(weights), 0.2, "counted", trees=2)
        sampler.draw(0, np.array([1, 2]), nd.array(samples))
        other = ForestClasses(store_of(weights[:50]), 0.2, "counted", trees=2)
        with pytest.raises(ValueError, match=r"60 classes of width 4, the head has 50 of 4"):
            other.load_state(sampler.state)

    @pytest.mark.parametrize("normalize", [True, False])
    @pytest.mark.parametrize("num_classes", [1, 2, 3, 5, 17])
    @pytest.mark.parametrize("kind", ["random", "zero", "equal", "half zero"])
    def test_odd_weights(self, rng, kind, num_classes, normalize):
        weights = rng.normal(size=(num_classes, 3))
        if kind == "zero":
            weights[:] = 0
        elif kind == "half zero":
            weights[::2] = 0
        elif kind == "equal":
            weights[:] = weights[0]
        samples = rng.normal(size=(2, 3))
        samples[1] = 0
        for batch_classes in BATCH_CLASSES:
            store = store_of(weights, [0, 1])
            sampler = ForestClasses(store, 1, batch_classes, 3, normalize=normalize)
            for classes in draw_all(sampler, samples, np.array([0, 0])):
                np.testing.assert_array_equal(classes, np.arange(1, num_classes))

    def test_random_numbers_are_not_those_of_the_fill(self):
        first, second = (module.generator(3, 7, stream).integers(1 << 30) for stream in (0, 1))
        assert first != second

    @pytest.mark.parametrize("options", [{"trees": 0}, {"rebuild_every": 0}])
    def test_bad_options_are_named(self, options):
        with pytest.raises(ValueError, match="trees and rebuild_every must be 1 or more"):
            losses.create("hf_softmax", 60, 4, **options)

    def test_no_correction(self):
        with pytest.raises(ValueError, match="no closed form"):
            losses.create("hf_softmax", 60, 4, correction="logq")

    def test_other_criteria_take_it_too(self, rng):
        head = losses.create("dsoftmax", 60, 4, negatives="forest", sample_rate=0.2, trees=2)
        head.initialize()
        head(nd.array(rng.normal(size=(3, 4))), np.array([0, 1, 2]))
        assert head.stats["rows_touched"] == 12 + 3
        assert head.stats["forest_query_seconds"] > 0


def test_other_samplers_have_no_state():
    for preset in ("dsoftmax", "dsoftmax_b", "dsoftmax_k"):
        sampler = losses.create(preset, 60, 4).sampler
        assert sampler.state == {}
        sampler.load_state({})


@pytest.mark.parametrize("width", [1, 4])
def test_bits_set(rng, width):
    words = rng.integers(0, 2**64, (500, width), np.uint64)
    words[0], words[1] = 0, 2**64 - 1
    expected = np.unpackbits(words.view(np.uint8), axis=1).sum(axis=1)
    np.testing.assert_array_equal(module._bits_set(words), expected)
