"""Seeds that can be replayed, and datasets small enough to write anew for a test."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import zlib
from pathlib import Path

import cv2
import mxnet as mx
import numpy as np
import pytest

from dsoftmax.recognition.data.records import RecordWriter

REPOSITORY = Path(__file__).resolve().parent.parent
SEED_VARIABLE = "DSOFTMAX_TEST_SEED"
# In the environment, so that all processes of a run have the same.
SESSION_SEED = int(
    os.environ.setdefault(SEED_VARIABLE, str(random.SystemRandom().randrange(1 << 31)))
)
REAL_DATA = Path(os.environ.get("DSOFTMAX_DATA", REPOSITORY.parent / "shared" / "data"))


def pytest_report_header():
    return f"replay the random numbers of this run with {SEED_VARIABLE}={SESSION_SEED}"


def pytest_runtest_makereport(item, call):
    if call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception):
        item.add_report_section(call.when, "seed", f"{SEED_VARIABLE}={SESSION_SEED}")


@pytest.fixture(autouse=True)
def seed(request) -> int:
    """Seed of this test: its own, whichever other tests run."""
    own = zlib.crc32(f"{SESSION_SEED} {request.node.nodeid}".encode())
    random.seed(own)
    mx.random.seed(own)
    np.random.seed(own)  # noqa: NPY002 (MXNet's initializers and test_utils draw from it)
    return own


@pytest.fixture
def rng(seed) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture
def largest_file():
    """Return a context in which no file can grow beyond a size, as on a disk that is full."""

    @contextlib.contextmanager
    def limit(size: int):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limit


@pytest.fixture
def real_data(request) -> Path:
    """Folder of the real datasets; the test is skipped where there is none."""
    if not REAL_DATA.is_dir():
        pytest.skip(f"no real data in {REAL_DATA}; set DSOFTMAX_DATA to their folder")
    return REAL_DATA


def make_image(rng: np.random.Generator, height: int = 32, width: int = 32) -> np.ndarray:
    """Draw a smooth random picture, so that a JPEG of it is close to it."""
    coarse = rng.integers(0, 256, (4, 4, 3), np.uint8)
    return cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)


@pytest.fixture
def jpeg(rng):
    """Return a function that makes the bytes of another JPEG each time."""

    def make(height: int = 32, width: int = 32) -> bytes:
        return cv2.imencode(".jpg", make_image(rng, height, width))[1].tobytes()

    return make


@pytest.fixture
def dataset(tmp_path, jpeg):
    """Write a dataset of given images per identity; return its folder and (label, image)s."""

    def write(counts=(3, 1, 4, 2), name="faces", size=(32, 32), **options):
        images = [(label, jpeg(*size)) for label, count in enumerate(counts) for _ in range(count)]
        with RecordWriter(tmp_path / name, image_size=size, **options) as writer:
            for label, image in images:
                writer.add(label, image)
        return tmp_path / name, images

    return write


@pytest.fixture
def symbol_model(tmp_path, rng):
    """Save a small network in insightface's form; return its prefix."""

    def write(name="model", epoch=0, width=16, scale=1.0):
        data = mx.sym.var("data")
        pixels = (data - 127.5) * 0.0078125
        body = mx.sym.Convolution(pixels, num_filter=8, kernel=(5, 5), stride=(4, 4), name="conv0")
        pooled = mx.sym.Pooling(
            mx.sym.Activation(body, act_type="tanh"),
            kernel=(1, 1),
            global_pool=True,
            pool_type="avg",
        )
        embedding = mx.sym.FullyConnected(pooled, num_hidden=width, name="fc1")
        classes = mx.sym.FullyConnected(embedding, num_hidden=5, name="fc7")
        shapes = {
            "conv0_weight": (8, 3, 5, 5),
            "conv0_bias": (8,),
            "fc1_weight": (width, 8),
            "fc1_bias": (width,),
            "fc7_weight": (5, width),
            "fc7_bias": (5,),
        }
        parameters = {
            key: mx.nd.array(rng.normal(0, scale, shape)) for key, shape in shapes.items()
        }
        prefix = str(tmp_path / name)
        mx.model.save_checkpoint(prefix, epoch, mx.sym.SoftmaxOutput(classes), parameters, {})
        return prefix

    return write


@pytest.fixture
def face_model(symbol_model):
    """Return the name of a network to evaluate: the published y1 where it is, else a small one."""
    published = REAL_DATA / "y1" / "model"
    return f"{published if published.with_name('model-0000.params').exists() else symbol_model()},0"
