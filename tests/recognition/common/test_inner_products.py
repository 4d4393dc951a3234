"""Inner products by each way a CPU has, against numpy in float64."""

import gc

import numpy as np
import pytest

from dsoftmax.recognition.common import products
from dsoftmax.recognition.common.inner_products import InnerProducts


@pytest.fixture(params=["dot", "onednn"])
def way(request, monkeypatch):
    monkeypatch.setattr(products, "_cpu_way", lambda: request.param)
    return request.param


@pytest.mark.parametrize(
    ("count", "most", "width"), [(1, 1, 1), (3, 7, 5), (17, 64, 512), (130, 33, 96), (257, 100, 31)]
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_blocks_of_all_sizes(way, rng, count, most, width, dtype):
    vectors = rng.normal(size=(count, width)).astype(dtype)
    multiply = InnerProducts(vectors, most)
    for size in (most, most, max(most - 1, 1), 1, 0, most):
        others = rng.normal(size=(size, width)).astype(dtype)
        found = multiply(others)
        assert found.dtype == np.float32
        exact = vectors.astype(np.float64) @ others.T.astype(np.float64)
        limit = np.abs(vectors).astype(np.float64) @ np.abs(others).T
        assert found.shape == exact.shape
        assert (np.abs(found - exact) <= 1e-6 * limit).all()


def test_parts_of_arrays(way, rng):
    table = rng.normal(size=(20, 12)).astype(np.float32)
    vectors, others = table[::2, 2:9], table[::-3, 2:9]
    expected = np.array(
        [[sum(a * b for a, b in zip(one, two)) for two in others] for one in vectors]
    )
    found = InnerProducts(vectors, 50)(others)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_whole_numbers_are_exact(way, rng):
    vectors, others = (rng.integers(-9, 10, (size, 64)).astype(np.float32) for size in (31, 45))
    np.testing.assert_array_equal(InnerProducts(vectors, 45)(others), vectors @ others.T)


def test_the_result_outlives_the_products(way, rng):
    vectors, others = rng.normal(size=(300, 8)), rng.normal(size=(400, 8))
    found = InnerProducts(vectors, 400)(others)
    gc.collect()
    InnerProducts(vectors, 400)(-others)  # would be written into memory that was freed
    np.testing.assert_allclose(found, vectors @ others.T, atol=1e-4)
