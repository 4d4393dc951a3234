"""Inner products by each way a CPU has, against numpy in float64."""

import gc
import threading
import time

import numpy as np
import pytest

from dsoftmax.recognition.common import inner_products as module
from dsoftmax.recognition.common import products
from dsoftmax.recognition.common.inner_products import inner_products


@pytest.fixture(params=["dot", "onednn"])
def way(request, monkeypatch):
    monkeypatch.setattr(products, "_cpu_way", lambda: request.param)
    return request.param


@pytest.mark.parametrize(
    ("count", "most", "width"), [(1, 1, 1), (3, 7, 5), (17, 64, 512), (130, 33, 96), (257, 100, 31)]
)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_pairs_of_all_sizes(way, rng, count, most, width, dtype):
    sizes = [(count, most), (most, count), (count, most - 1), (count, 1), (0, most), (most, most)]
    pairs = [tuple(rng.normal(size=(size, width)).astype(dtype) for size in both) for both in sizes]
    number = 0
    for number, found in enumerate(inner_products(pairs), 1):
        a, b = (matrix.astype(np.float64) for matrix in pairs[number - 1])
        assert found.dtype == np.float32
        assert found.shape == (len(a), len(b))
        assert (np.abs(found - a @ b.T) <= 1e-6 * (np.abs(a) @ np.abs(b).T)).all()
    assert number == len(pairs)


def test_parts_of_arrays(way, rng):
    table = rng.normal(size=(20, 12)).astype(np.float32)
    vectors, others = table[::2, 2:9], table[::-3, 2:9]
    expected = np.array(
        [[sum(a * b for a, b in zip(one, two)) for two in others] for one in vectors]
    )
    (found,) = inner_products([(vectors, others)])
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_whole_numbers_are_exact(way, rng):
    vectors, others = (rng.integers(-9, 10, (size, 64)).astype(np.float32) for size in (31, 45))
    (found,) = inner_products([(vectors, others)])
    np.testing.assert_array_equal(found, vectors @ others.T)


@pytest.mark.parametrize("count", [1, 31])
def test_bytes_are_exact(way, rng, count):
    vectors = rng.integers(-9, 10, (count, 64)).astype(np.float32)
    others = rng.integers(-128, 128, (45, 64)).astype(np.int8)
    for part in (others, others[::2], others[:0]):
        (found,) = inner_products([(vectors, part)])
        np.testing.assert_array_equal(found, vectors @ part.T.astype(np.float32))


def test_no_pairs(way):
    assert not list(inner_products([]))


def test_one_pair_ahead(way):
    asked = []

    def pairs():
        for number in range(4):
            asked.append(number)
            yield np.full((2, 3), number), np.ones((2, 3))

    for number, found in enumerate(inner_products(pairs())):
        assert asked == list(range(min(number + 2, 4)))
        found += 1  # the next one must not be in this memory
        time.sleep(0.01)  # for the thread to finish
        np.testing.assert_array_equal(found, 3 * number + 1)


def test_an_error_comes_in_the_place_of_its_products(way):
    results = inner_products([(np.ones((2, 3)), np.ones((2, 3))), (np.ones((2, 3)), "wrong")])
    assert next(results).sum() == 12
    with pytest.raises(AttributeError):
        next(results)


def test_the_result_outlives_the_products(way, rng):
    vectors, others = rng.normal(size=(300, 8)), rng.normal(size=(400, 8))
    (found,) = inner_products([(vectors, others)])
    gc.collect()
    list(inner_products([(vectors, -others)]))  # would be written into memory that was freed
    np.testing.assert_allclose(found, vectors @ others.T, atol=1e-4)


def test_all_calls_share_a_thread(way, rng, monkeypatch):
    """MXNet keeps 5 MB for every thread that has used it, for good."""
    threads = []
    for kind in (module._ByNumpy, module._ByMXNet):
        monkeypatch.setattr(
            kind, "multiply", lambda *_: threads.append(threading.current_thread()) or 0
        )
    vectors = rng.normal(size=(4, 8)).astype(np.float32)
    for _ in range(3):
        list(inner_products([(vectors, vectors)] * 2))
    next(inner_products([(vectors, vectors)] * 3))  # is left early
    assert len(set(threads)) == 1
    assert threading.current_thread() not in threads
