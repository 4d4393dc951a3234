"""The exact search against a sort of all cosines in float64."""

import numpy as np
import pytest

from dsoftmax.eval import top_matches as module
from dsoftmax.eval.top_matches import Block, compress, top_matches
from dsoftmax.recognition.common.vectors import normalized


def vectors(rng, count, width=24):
    return normalized(rng.normal(size=(count, width)).astype(np.float32))


def restored(block):
    """Return the vectors that a block stands for, in float64."""
    values = block.vectors.astype(float)
    return values if block.scales is None else values * block.scales[:, None].astype(float)


def brute_force(queries, everything, k, groups):
    """Return the places of the k best, one per group, by a sort of each query's cosines."""
    places = []
    for query in queries.astype(float):
        cosines = everything @ query
        best = []
        for place in np.argsort(-cosines, kind="stable"):
            if groups[place] not in [groups[other] for other in best]:
                best.append(place)
        places.append(best[:k])
    return np.array(places)


@pytest.mark.parametrize("dtype", module.DTYPES)
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("queries", [1, 9])
def test_against_brute_force(rng, monkeypatch, dtype, grouped, queries):
    monkeypatch.setattr(module, "ROWS_PER_BLOCK", 37)
    monkeypatch.setattr(module, "QUERIES_PER_PASS", 4)
    parts = [compress(vectors(rng, count), dtype) for count in (150, 1, 60)]
    assert all(part.vectors.dtype == dtype for part in parts)
    groups = rng.integers(0, 20, 211) if grouped else np.arange(211)
    probes = vectors(rng, queries)
    found = top_matches(probes, parts, 6, groups if grouped else None)
    everything = np.concatenate([restored(part) for part in parts])
    expected = brute_force(probes, everything, 6, groups)
    np.testing.assert_array_equal(found.places, expected)
    cosines = np.einsum("qd,qkd->qk", probes.astype(float), everything[expected])
    np.testing.assert_allclose(found.cosines, cosines, atol=1e-5)


@pytest.mark.parametrize(("dtype", "error"), [("float32", 0), ("float16", 3e-4), ("int8", 0.01)])
def test_how_exact_the_kept_vectors_are(rng, dtype, error):
    own = vectors(rng, 500, 512)
    block = compress(own, dtype)
    assert np.abs(restored(block) @ own[:9].T - own @ own[:9].T).max() <= error + 1e-6
    np.testing.assert_allclose(np.linalg.norm(restored(block), axis=1), 1, atol=1e-3)


def test_fewer_than_wanted(rng):
    found = top_matches(vectors(rng, 2), [compress(vectors(rng, 3), "int8")], 5)
    assert (found.places[:, 3:] == -1).all()
    assert (found.cosines[:, 3:] == -np.inf).all()
    assert sorted(found.places[0, :3]) == [0, 1, 2]
    grouped = top_matches(vectors(rng, 1), [Block(vectors(rng, 3))], 5, np.zeros(3, int))
    assert np.count_nonzero(grouped.places >= 0) == 1


def test_of_equals_the_first(monkeypatch):
    monkeypatch.setattr(module, "ROWS_PER_BLOCK", 4)
    one = np.eye(1, 8, dtype=np.float32)  # its products are exact, whatever the size of a block
    found = top_matches(one, [Block(np.repeat(one, 11, axis=0))], 3)
    np.testing.assert_array_equal(found.places, [[0, 1, 2]])


def test_a_vector_of_zeros_is_like_nothing():
    block = compress(np.zeros((2, 8), np.float32), "int8")
    assert not restored(block).any()
