"""Embeddings in files: against MXNet by hand, after kills, and never mixed up."""

import csv
import os
import signal
import subprocess
import sys
import textwrap
import time

import cv2
import mxnet as mx
import numpy as np
import pytest

from dsoftmax.eval import growing_array
from dsoftmax.eval.embedding_files import Job, embed_to_file
from dsoftmax.eval.models import load_model
from dsoftmax.recognition.data.inputs import open_images
from tests.conftest import make_image

SIZE = (32, 32)


@pytest.fixture
def people(tmp_path, rng):
    """Write images of two people, one of them broken and one of another size; return the folder."""
    for number in range(11):
        path = tmp_path / "people" / ("ann" if number < 6 else "bo") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = make_image(rng, *((40, 50) if number == 7 else SIZE))
        path.write_bytes(cv2.imencode(".png", picture)[1].tobytes())
    (tmp_path / "people/ann/2.png").write_bytes(b"no image")
    return tmp_path / "people"


def job(folder, prefix, flip=True, normalize=False, size=SIZE):
    return Job(load_model(f"{prefix},0"), open_images(str(folder)), size, flip, normalize)


def by_hand(prefix, path, flip):
    """Embed one image with MXNet's own loader and executor."""
    symbol, arguments, _ = mx.model.load_checkpoint(prefix, 0)
    network = symbol.get_internals()["fc1_output"]
    picture = cv2.imread(str(path))[:, :, ::-1]
    total = 0
    for view in (picture, picture[:, ::-1])[: 1 + flip]:
        data = mx.nd.array(view.transpose(2, 0, 1)[None].astype(np.float32))
        inputs = {name: arguments[name] for name in network.list_inputs() if name != "data"}
        executor = network.bind(mx.cpu(), {"data": data, **inputs})
        total = total + executor.forward()[0].asnumpy()[0]
    return total


def table(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
def test_against_mxnet_by_hand(people, symbol_model, tmp_path, flip, normalize):
    prefix, output = symbol_model(), str(tmp_path / "new" / "x.npy")
    done = embed_to_file(job(people, prefix, flip, normalize), output, batch_size=4)
    assert done[1:5] == (11, 16, 0, [(2, "8 bytes are no image in a known format: JPEG, PNG, "
                                      "BMP, PPM, TIFF, WEBP")])  # fmt: skip
    assert done.fitted == [(7, (40, 50))]
    found = np.load(output)
    assert found.dtype == np.float32
    rows = table(tmp_path / "new" / "x.csv")
    assert [row["row"] for row in rows] == [str(number) for number in range(11)]
    for number, row in enumerate(rows):
        person = "ann" if number < 6 else "bo"
        assert (row["name"], row["label"]) == (f"{people}/{person}/{number}.png", person)
        assert row["fitted_from"] == ("40x50" if number == 7 else "")
        assert bool(row["unreadable"]) == (number == 2)
        if number == 2:
            assert not found[number].any()
        elif number != 7:
            expected = by_hand(prefix, row["name"], flip)
            if normalize:
                expected = expected / np.linalg.norm(expected)
            np.testing.assert_allclose(found[number], expected, atol=2e-5)
    assert sorted(os.listdir(tmp_path / "new")) == ["x.csv", "x.npy"]


def test_two_devices_and_other_batches_give_the_same(people, symbol_model, tmp_path):
    prefix = symbol_model()
    one, two = job(people, prefix), job(people, prefix)
    two = two._replace(embed=load_model(f"{prefix},0", [mx.cpu(0), mx.cpu(1)]))
    embed_to_file(one, str(tmp_path / "one.npy"), batch_size=4)
    embed_to_file(two, str(tmp_path / "two.npy"), batch_size=5, threads=3)
    one, two = np.load(tmp_path / "one.npy"), np.load(tmp_path / "two.npy")
    np.testing.assert_allclose(one, two, atol=1e-5)


class Stopped(Exception):
    pass


def stop_after(job, images):
    """Let the job's model fail once it has embedded this many images, mirror images aside."""
    embed, seen = job.embed, []

    class Stopping:
        name = embed.name

        def __call__(self, batch):
            seen.append(len(batch))
            if sum(seen) > images:
                raise Stopped
            return embed(batch)

    return job._replace(embed=Stopping())


def test_it_goes_on_where_it_stopped(people, symbol_model, tmp_path):
    prefix, output = symbol_model(), str(tmp_path / "x.npy")
    embed_to_file(job(people, prefix), str(tmp_path / "whole.npy"), batch_size=2)
    with pytest.raises(Stopped):  # one image tells the width; two views of the others
        embed_to_file(stop_after(job(people, prefix), 1 + 2 * 7), output, batch_size=2)
    assert not os.path.exists(output)
    done = embed_to_file(job(people, prefix), output, batch_size=2)
    assert 0 < done.resumed_at < 11
    assert len(done.unreadable) == len(done.fitted) == 1
    for kind in ("npy", "csv"):
        assert (tmp_path / f"x.{kind}").read_bytes() == (tmp_path / f"whole.{kind}").read_bytes()
    assert not list(tmp_path.glob("*.partial*"))


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kill -9 is not of this system")
def test_kill_9(people, symbol_model, tmp_path):
    prefix, output = symbol_model(), str(tmp_path / "x.npy")
    script = textwrap.dedent(
        f"""
        import time
        from dsoftmax.eval import growing_array
        from dsoftmax.eval.embedding_files import Job, embed_to_file
        from dsoftmax.eval.models import load_model
        from dsoftmax.recognition.data.inputs import open_images
        growing_array.SECONDS_BETWEEN_SAVES = 0
        images = open_images({str(people)!r})
        load = images.load
        def slow(number, size):
            time.sleep(0.3 * (number > 5))
            return load(number, size)
        images.load = slow
        job = Job(load_model("{prefix},0"), images, {SIZE}, True, False)
        embed_to_file(job, {output!r}, batch_size=2, threads=1)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    state, deadline = f"{output}.partial.json", time.monotonic() + 100
    while not os.path.exists(state) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert os.path.exists(state)
    assert not os.path.exists(output)
    done = embed_to_file(job(people, prefix), output, batch_size=2)
    assert done.resumed_at > 0
    embed_to_file(job(people, prefix), str(tmp_path / "whole.npy"), batch_size=2)
    for kind in ("npy", "csv"):
        assert (tmp_path / f"x.{kind}").read_bytes() == (tmp_path / f"whole.{kind}").read_bytes()


@pytest.mark.parametrize(
    ("change", "what"),
    [("model", "the model"), ("images", "the images"), ("size", "the image size"),
     ("flip", "--flip"), ("normalize", "--normalize")],
)  # fmt: skip
def test_another_job_is_refused(people, symbol_model, tmp_path, change, what, monkeypatch):
    monkeypatch.setattr(growing_array, "SECONDS_BETWEEN_SAVES", -1)
    prefix, output = symbol_model(), str(tmp_path / "x.npy")
    with pytest.raises(Stopped):
        embed_to_file(stop_after(job(people, prefix), 5), output, batch_size=2)
    options = {"flip": False} if change == "flip" else {}
    options = {"normalize": True} if change == "normalize" else options
    options = {"size": (20, 20)} if change == "size" else options
    if change == "model":
        prefix = symbol_model("other")
    if change == "images":
        (people / "ann" / "0.png").unlink()
    changed = job(people, prefix, **options)
    with pytest.raises(ValueError, match=rf"x.npy.partial is of another job: {what}\. --overwrite"):
        embed_to_file(changed, output)
    assert embed_to_file(changed, output, overwrite=True).resumed_at == 0


def test_existing_files_stay(people, symbol_model, tmp_path):
    prefix = symbol_model()
    (tmp_path / "x.npy").write_bytes(b"mine")
    with pytest.raises(FileExistsError, match=r"x.npy exists; .*--overwrite"):
        embed_to_file(job(people, prefix), str(tmp_path / "x.npy"))
    assert (tmp_path / "x.npy").read_bytes() == b"mine"
    with pytest.raises(ValueError, match=r"ends in .npy"):
        embed_to_file(job(people, prefix), str(tmp_path / "x.bin"))
    embed_to_file(job(people, prefix), str(tmp_path / "x.npy"), overwrite=True)
    assert np.load(tmp_path / "x.npy").shape == (11, 16)


def test_when_nothing_can_be_read(symbol_model, tmp_path):
    (tmp_path / "in").mkdir()
    for number in range(3):
        (tmp_path / "in" / f"{number}.png").write_bytes(b"no image")
    done = embed_to_file(job(tmp_path / "in", symbol_model()), str(tmp_path / "x.npy"))
    assert len(done.unreadable) == 3
    assert not np.load(tmp_path / "x.npy").any()
