"""The operators of our own do what MXNet's do, and can be built or done without."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from mxnet import nd

from dsoftmax.losses import kernels, operators
from dsoftmax.losses.forest import Forest
from dsoftmax.losses.stores.local import DeviceStore, HostStore
from dsoftmax.recognition.common.memory import forget_peak, peak_bytes
from dsoftmax.tools import build_operators
from tests.engine import queued

needs_operators = pytest.mark.skipif(
    not operators.load(), reason="the operators are not built: python tools/build_operators.py"
)


def both_ways(monkeypatch, function):
    """Return what a function returns with the operators and without."""
    fast = function()
    monkeypatch.setattr(operators, "_is_loaded", False)
    monkeypatch.setenv(operators.SWITCH, "0")
    return fast, function()


def assert_same(one, other, tolerance=1e-5):
    for fast, plain in zip(one, other):
        size = max(np.abs(plain[np.abs(plain) < 1e20]).max(initial=0), 1e-3)
        np.testing.assert_allclose(fast, plain, rtol=tolerance, atol=tolerance * size)


@needs_operators
@pytest.mark.parametrize(("count", "width"), [(1, 1), (3, 5), (100, 512), (17, 33)])
def test_inverse_norm(count, width, rng, monkeypatch):
    vectors = rng.normal(size=(count, width)) * 10.0 ** rng.integers(-6, 6, (count, 1))
    vectors[0] = 0
    vectors = nd.array(vectors)
    one, other = both_ways(monkeypatch, lambda: [kernels.inverse_norm(vectors).asnumpy()])
    assert_same(one, other)
    assert one[0][0] == 0


@needs_operators
@pytest.mark.parametrize(("count", "width"), [(1, 1), (3, 5), (100, 512)])
def test_rows(count, width, rng, monkeypatch):
    gradient, vectors = (nd.array(rng.normal(size=(count, width))) for _ in range(2))
    vectors[0] = 0

    def run():
        inverse = kernels.inverse_norm(vectors)
        flat = inverse.reshape(-1)
        results = [kernels.scale_rows(vectors, factor) for factor in (inverse, flat)]
        return [
            array.asnumpy() for array in [*results, kernels.project(gradient, vectors, inverse)]
        ]

    assert_same(*both_ways(monkeypatch, run))


@needs_operators
@pytest.mark.parametrize(("count", "width"), [(1, 1), (3, 5), (900, 512)])
def test_row_products(count, width, rng):
    matrix, vectors = (rng.normal(size=(rows, width)).astype("f4") for rows in (count, 7))
    rows, places = rng.integers(0, count, 50), rng.integers(0, 7, 50)
    products = kernels.row_products(nd.array(matrix), rows, nd.array(vectors), places)
    expected = (matrix[rows].astype("f8") * vectors[places]).sum(axis=1)
    np.testing.assert_allclose(products.asnumpy(), expected, atol=1e-4)


@needs_operators
@pytest.mark.parametrize("classes", [60, 4000])
@pytest.mark.parametrize("most", [1, 40, 500])
def test_forests_choose_the_same_candidates(classes, most, rng, monkeypatch):
    weights = rng.normal(size=(classes, 8)).astype("f4")
    weights[1::2] = weights[::2]  # equals, of which the first ones are taken
    store = DeviceStore(classes, 8, [mx.cpu()])
    store.fill(weights)
    forest = Forest.grow(store, True, 20, 40, seed=1, step=0)
    samples = rng.normal(size=(9, 8)).astype("f4")
    one, other = both_ways(monkeypatch, lambda: list(forest._choose(samples, most)))
    assert [len(found) for found in one] == [len(found) for found in other]
    for found, expected in zip(one, other):
        np.testing.assert_array_equal(found, expected)


@needs_operators
@pytest.mark.parametrize("store", [DeviceStore, HostStore])
def test_forests_find_the_same_classes(store, rng, monkeypatch):
    store = store(3000, 16, [mx.cpu(0), mx.cpu(1)])
    store.fill(rng.normal(size=(3000, 16)).astype("f4"))
    forest = Forest.grow(store, True, 20, 40, seed=1, step=0)
    samples = rng.normal(size=(9, 16)).astype("f4")
    for found, expected in zip(*both_ways(monkeypatch, lambda: forest.nearest(samples, 30))):
        np.testing.assert_array_equal(found, expected)


@needs_operators
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("with_offset", [True, False])
@pytest.mark.parametrize("scale", [1, 32, 300])
@pytest.mark.parametrize("classes", [1, 2, 7, 300])
@pytest.mark.parametrize("batch", [3, 16, 37])
def test_probabilities(normalize, with_offset, scale, classes, batch, rng, monkeypatch):
    products = rng.normal(size=(batch, classes)) * scale
    inverse = nd.array(rng.uniform(0.1, 3, (classes, 1))) if normalize else None
    offset = nd.array(rng.uniform(0, 9, (1, classes))) if with_offset else None
    own = rng.integers(-1, classes, batch)
    own[:2] = [-1, classes - 1]
    share = nd.array(rng.normal(size=batch))

    def run():
        logits, out = nd.array(products), nd.empty((batch, classes))
        found = kernels.probabilities_of(
            logits, inverse, own, offset, out, kernels.Workspace(mx.cpu(0))
        )
        masked = logits.asnumpy()
        results = [array.asnumpy() for array in (*found, out)] + [masked]
        workspace = kernels.Workspace(mx.cpu(0))
        sums, transposed = kernels.product_over_batch(share, logits, out, workspace)
        if transposed is not None:
            np.testing.assert_array_equal(transposed.asnumpy(), out.asnumpy().T)
        return results + [sums.asnumpy()]

    fast, plain = both_ways(monkeypatch, run)
    if classes == 1:  # of a sample without negatives the probabilities mean nothing
        for results in (fast, plain):
            results[3][own >= 0] = 0
            del results[5]
    assert_same(fast, plain)


@needs_operators
def test_probabilities_in_double_precision(rng):
    """As NumPy computes them, for logits far apart and close together."""
    for scale in (0.01, 1, 30, 1000):
        z = rng.normal(size=(8, 1000)).astype(np.float32) * scale
        logits, out = nd.array(z), nd.empty(z.shape)
        n, total, largest = kernels.probabilities_of(
            logits, None, np.full(8, -1), None, out, kernels.Workspace(mx.cpu(0))
        )
        exact = z.astype(np.float64)
        exponentials = np.exp(exact - exact.max(axis=1, keepdims=True))
        sums = exponentials.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(out.asnumpy(), exponentials / sums, rtol=5e-6, atol=1e-37)
        np.testing.assert_allclose(
            n.asnumpy(), exact.max(axis=1) + np.log(sums[:, 0]), rtol=1e-6, atol=2e-6
        )
        np.testing.assert_allclose(total.asnumpy(), exact.sum(axis=1), rtol=1e-4, atol=scale)
        np.testing.assert_array_equal(largest.asnumpy(), z.max(axis=1))


@needs_operators
@pytest.mark.parametrize("momentum", [0.0, 0, 0.9, 1e-9])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("every_row", [True, False])
@pytest.mark.parametrize("with_along", [True, False])
def test_sgd(momentum, clip, every_row, with_along, rng, monkeypatch):
    rows = None if every_row else np.array([7, 0, 3])
    count = 9 if every_row else 3
    start, values = rng.normal(size=(9, 21)), rng.normal(size=(count, 21))
    along = nd.array(rng.normal(size=(count, 1))) if with_along else None

    def run():
        weight, state = nd.array(start), nd.ones((9, 21)) if momentum else None
        workspace = kernels.Workspace(mx.cpu(0))
        for _ in range(3):
            used = weight if rows is None else weight[rows]
            gradient = kernels.RowGradient(nd.array(values), along, used)
            sgd = kernels.Sgd(0.1, momentum, 0.01, 0.5, clip)
            sgd.update(weight, state, rows, gradient, workspace)
        return [weight.asnumpy()] + ([state.asnumpy()] if momentum else [])

    fast, plain = both_ways(monkeypatch, run)
    assert_same(fast, plain)
    if not every_row:
        np.testing.assert_array_equal(fast[0][1], start.astype(np.float32)[1])


def test_copied_rows(rng):
    workspace = kernels.Workspace(mx.cpu(0))
    arrays = [nd.zeros((9, 5)), nd.ones((9, 5))]
    expected = [array.asnumpy() for array in arrays]
    for count in (3, 2, 4):
        rows = rng.choice(9, count, replace=False)
        values = rng.normal(size=(count, 5)).astype(np.float32)
        with kernels.copied_rows(arrays, rows, workspace) as copies:
            for copied, array in zip(copies, expected):
                np.testing.assert_array_equal(copied.asnumpy(), array[rows])
                copied += nd.array(values)
                array[rows] += values
        for array, wanted in zip(arrays, expected):
            np.testing.assert_array_equal(array.asnumpy(), wanted)


@needs_operators
def test_an_operator_waits_for_its_own_arrays_alone():
    """MXNet runs operators of its library API one at a time, over all contexts."""
    may_go_on, is_done = threading.Event(), threading.Event()
    held, free = (nd.ones((3, 4), ctx=mx.cpu(number)) for number in range(2))
    nd.waitall()
    with queued(lambda: may_go_on.wait(60), written=[held]):
        first, second = kernels.inverse_norm(held), kernels.inverse_norm(free)
        with queued(is_done.set, read=[second]):
            was_done = is_done.wait(30)
            may_go_on.set()
            nd.waitall()
    assert was_done
    np.testing.assert_array_equal(first.asnumpy(), second.asnumpy())


@needs_operators
def test_arrays_may_be_dropped_while_they_are_used(rng):
    vectors = rng.normal(size=(1000, 64)).astype(np.float32)
    found = [kernels.inverse_norm(nd.array(vectors) * factor) for factor in range(1, 20)]
    for factor, inverse in enumerate(found, 1):
        lengths = np.linalg.norm(factor * vectors, axis=1)
        np.testing.assert_allclose(inverse.asnumpy()[:, 0], 1 / lengths, rtol=1e-5)


@needs_operators
def test_what_is_queued_has_no_memory_yet():
    """A chunked step is queued far ahead, and needs what it needs at a time."""

    def scale_often(times):
        vectors, factor = nd.ones((1000, 100)), nd.ones((1000,))
        nd.waitall()
        may_go_on = threading.Event()
        with queued(lambda: may_go_on.wait(60), written=[vectors]):
            for _ in range(times):
                vectors = kernels.scale_rows(vectors, factor)
            may_go_on.set()
        assert vectors.asnumpy().sum() == vectors.size

    scale_often(3)
    forget_peak()
    before = peak_bytes()
    scale_often(200)
    assert peak_bytes() - before < 20e6  # of 80e6 in all


@needs_operators
def test_what_no_operator_takes():
    out, vectors = nd.empty((3, 1)), nd.ones((3, 4))
    with pytest.raises(TypeError, match="there is no operator other"):
        operators.queue("other", [out], [vectors])
    for written, read in [(out, vectors.astype("float16")), (out.astype("int32"), vectors)]:
        with pytest.raises(TypeError, match="a type unknown to the operator inverse_norm"):
            operators.queue("inverse_norm", [written], [read])


THREADS = """
import os
import mxnet as mx
from dsoftmax.losses import operators
operators.load()
os.sched_getaffinity = lambda _: range({cores})
contexts = [mx.cpu(number) for number in range({count})]
print(*(int(threads.asscalar()) for threads in operators.share_cores(contexts)))
"""


@needs_operators
@pytest.mark.parametrize(("cores", "count", "each"), [(2, 2, 1), (8, 2, 3), (2, 1, 2), (1, 3, 1)])
def test_contexts_share_the_cores(cores, count, each):
    """Three threads were asked for; a context gets them only if there are cores for them."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", THREADS.format(cores=cores, count=count)],
        env={**os.environ, "OMP_NUM_THREADS": "3"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(each)] * count


def test_only_for_arrays_on_a_cpu(monkeypatch):
    monkeypatch.setattr(operators, "_is_loaded", True)
    assert operators.serve(mx.cpu(3))
    assert not operators.serve(mx.gpu(0))


def test_the_switch():
    code = "from dsoftmax.losses import operators; print(operators.load())"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, operators.SWITCH: "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False\n"


CREATE = """
import logging, sys
from dsoftmax import losses
from dsoftmax.losses import operators
losses.create("dsoftmax", 100, 8)
print(operators.describe())
"""


class TestBuild:
    @pytest.fixture(autouse=True)
    def cache(self, tmp_path, monkeypatch):
        """Build into a folder of this test."""
        monkeypatch.setenv(operators.CACHE, str(tmp_path / "cache"))
        monkeypatch.delenv(operators.SWITCH, raising=False)
        return tmp_path / "cache"

    @pytest.fixture
    def compiler(self, tmp_path, monkeypatch):
        """Return a function that puts a script in the place of the compiler."""

        def put(script):
            path = tmp_path / "compiler"
            path.write_text(f"#!/bin/sh\necho called >> {tmp_path}/calls\n{script}\n")
            path.chmod(0o755)
            monkeypatch.setenv("CXX", str(path))

        return put

    @staticmethod
    def calls(tmp_path):
        path = tmp_path / "calls"
        return path.read_text().count("called") if path.exists() else 0

    def test_another_source_is_another_library(self, tmp_path, monkeypatch):
        former = operators.library()
        source = tmp_path / "operators.cc"
        source.write_text("// new")
        monkeypatch.setattr(operators, "SOURCE", source)
        assert operators.library() != former

    def test_another_processor_needs_its_own(self, monkeypatch):
        former = operators.library()
        monkeypatch.setattr(operators.Path, "read_text", lambda *_, **__: "flags\t: sse2\n")
        assert operators.library() != former

    def test_no_compiler(self, monkeypatch, capsys):
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", "")
        assert build_operators.main([]) == 2
        assert "there is no C++ compiler" in capsys.readouterr().err

    def test_a_compiler_that_fails(self, compiler, cache, capsys):
        compiler("echo no such header >&2; exit 1")
        assert build_operators.main([]) == 2
        assert "no such header" in capsys.readouterr().err
        assert not list(cache.rglob("*.so"))

    def test_what_mxnet_cannot_load_is_not_kept(self, compiler, cache, capsys):
        compiler('while [ "$1" != -o ]; do shift; done; echo no library > "$2"')
        assert build_operators.main([]) == 2
        assert "failed" in capsys.readouterr().err
        assert not list(cache.rglob("*.so"))

    @pytest.mark.parametrize("script", ["echo no such header >&2; exit 1", "exit 1"])
    def test_the_first_head_goes_on_without_them(self, compiler, tmp_path, script):
        """One line says so, and the next process does not try again."""
        compiler(script)
        for lines in (2, 0):
            done = self.create()
            assert done.stderr.count("\n") == lines, done.stderr
            assert "they could not be built" in done.stdout
        assert self.calls(tmp_path) == 1

    def test_a_cache_that_cannot_be_written(self, tmp_path, monkeypatch):
        (tmp_path / "file").touch()
        monkeypatch.setenv(operators.CACHE, str(tmp_path / "file" / "cache"))
        done = self.create()
        assert "going on without compiled operators" in done.stderr
        assert "MXNet's operators" in done.stdout

    @needs_operators
    def test_heads_of_several_processes_build_them_once(self, compiler, tmp_path, monkeypatch):
        monkeypatch.delenv(operators.CACHE)
        built = operators.library()
        monkeypatch.setenv(operators.CACHE, str(tmp_path / "cache"))
        compiler(f'sleep 2; while [ "$1" != -o ]; do shift; done; cp {built} "$2"')
        command = [sys.executable, "-W", "ignore", "-c", CREATE]
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]
        outputs = [process.communicate(timeout=60)[0].decode() for process in processes]
        assert [output.split(" of ")[0] for output in outputs] == ["compiled operators"] * 3
        assert self.calls(tmp_path) == 1
        assert not list(Path(operators.__file__).parent.glob("*.so"))  # nothing in the package

    @staticmethod
    def create():
        command = [sys.executable, "-W", "ignore", "-c", CREATE]
        return subprocess.run(command, capture_output=True, text=True, check=True)
