"""Runs with a triplet loss."""

import signal

import mxnet as mx
import numpy as np
import pytest

from dsoftmax.recognition import loop, train, triplets
from dsoftmax.recognition.networks.layers import BatchNorm
from dsoftmax.recognition.settings import parse
from tests.recognition.runs import COUNTS, folder_of, newest, read_table

TRIPLET = {"loss": "triplet", "per_batch_size": 6, "lr": 0.01}


@pytest.fixture
def run_of(flags):
    """Return a function that makes a run which holds no lock."""

    def make(**changes):
        run = loop.Run(parse(flags(**{**TRIPLET, **changes})))
        run.release()
        return run

    return make


def train_steps(run, steps):
    """Train some steps of the first epoch; return the losses."""
    found = []
    for batch, _ in zip(run.trained.miner.epoch(0, 0, lambda _: None), range(steps)):
        found.append(run.train_step(batch))
        run.step += 1
    return found


def test_insightface_s_command(tmp_path):
    found = parse(["--network", "mnas05", "--loss", "triplet", "--dataset", "emore"])
    assert (found.per_batch_size, found.lr, found.embedding_size) == (60, 0.05, 256)
    expected = {"alpha": 0.3, "bag_size": 7200, "images_per_identity": 5, "max_ap": 0.0}
    assert found.loss_options == {"preset": "triplet", **expected}
    assert parse(["--loss", "atriplet"]).loss_options["alpha"] == 0.35
    (tmp_path / "config.py").write_text(
        "from dsoftmax.recognition.config import *\n"
        "loss.mine = edict(loss_name='atriplet', triplet_alpha=0.2, triplet_bag_size=600,\n"
        "                  images_per_identity=4, triplet_max_ap=1.5, per_batch_size=30)\n"
    )
    options = ["--config", str(tmp_path / "config.py"), "--loss", "mine"]
    found = parse([*options, "--loss-option", "alpha=0.25"])
    expected = {"alpha": 0.25, "bag_size": 600, "images_per_identity": 4, "max_ap": 1.5}
    assert found.loss_options == {"preset": "atriplet", **expected}
    assert (found.per_batch_size, found.notes) == (30, ())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"sample_rate": "1/2"},
            "--loss triplet: triplet has no classes and no option sample_rate",
        ),
        ({"scale": 32}, "no option scale; legal are alpha"),
        ({"class_parallel": 1}, "--class-parallel: --loss triplet has no class weights"),
        ({"store": "host"}, "--store: --loss triplet has no class weights"),
        ({"chunk": 9}, "--chunk: --loss triplet has no class weights"),
        ({"init_classes": "mean"}, "--init-classes: --loss triplet has no class weights"),
        ({"freeze_backbone": True}, "--freeze-backbone: --loss triplet has no class weights"),
        ({"per_batch_size": 8}, "--per-batch-size 8: --loss triplet takes a multiple of 3"),
        ({"loss_option": "alpha=-1"}, "--loss triplet: alpha"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(flags, changes, message, capsys):
    assert train.main(flags(**{**TRIPLET, **changes})) == 2
    assert message in capsys.readouterr().err


def test_batches_are_blocks_of_triplets(run_of):
    run = run_of(devices="cpu:2", accumulate=2)
    batch = next(run.trained.miner.epoch(0, 0, lambda _: None))
    assert batch.data.shape[0] == 2 * 2 * 6
    labels = batch.label.reshape(4, 3, 2)
    assert (labels[:, 0] == labels[:, 1]).all()
    assert (labels[:, 0] != labels[:, 2]).all()
    images = batch.image.reshape(4, 3, 2).transpose(0, 2, 1).reshape(-1, 3)
    np.testing.assert_array_equal(images, run.trained.miner.triplets[:8])


def test_triplets_are_semi_hard_for_the_network(run_of):
    run = run_of(loss_option="alpha=0.2")
    batch = next(run.trained.miner.epoch(0, 0, lambda _: None))
    assert batch.image.shape == (6,)
    pipeline, embed = run.plan.pipeline, run.trained.backbone.embed
    plain = pipeline.augmentation
    pipeline.augmentation = lambda pixels, _: pixels
    images = next(pipeline.batches(batch.image, 0)).data
    pipeline.augmentation = plain
    a, p, n = embed(images).astype(np.float64).reshape(3, 2, -1)
    a, p, n = (part / np.linalg.norm(part, axis=1, keepdims=True) for part in (a, p, n))
    margin = ((a - n) ** 2).sum(axis=1) - ((a - p) ** 2).sum(axis=1)
    assert (margin > -1e-4).all()
    assert (margin < 0.2 + 1e-4).all()


@pytest.mark.parametrize("loss", ["triplet", "atriplet"])
def test_steps_lower_the_loss(run_of, loss):
    run = run_of(loss=loss, loss_option="alpha=0.5", per_batch_size=30, lr=0.05)
    batch = next(run.trained.miner.epoch(0, 0, lambda _: None))
    losses = []
    for _ in range(10):
        losses.append(run.train_step(batch))
        run.step += 1
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"devices": "cpu:2", "per_batch_size": 6},
        {"accumulate": 2, "per_batch_size": 6},
    ],
    ids=["two devices", "micro-batches"],
)
def test_parts_are_one_large_batch(run_of, tmp_path, changes):
    (tmp_path / "smooth.py").write_text(
        "from dsoftmax.recognition.config import *\nnetwork.tiny.net_act = 'softrelu'\n"
    )

    def fix_statistics(block):
        if isinstance(block, BatchNorm):
            block._options["use_global_stats"] = True

    def trained(**options):
        run = run_of(config=tmp_path / "smooth.py", rand_mirror=0, **options)
        run.plan.network.apply(fix_statistics)
        losses = train_steps(run, 3)
        parameters = run.trained.backbone.parameters()
        return losses, {key: array.asnumpy() for key, array in parameters.items()}

    large, large_parameters = trained(per_batch_size=12)
    found, parameters = trained(**changes)
    np.testing.assert_allclose(found, large, rtol=1e-4)
    for key, array in large_parameters.items():
        np.testing.assert_allclose(parameters[key], array, rtol=1e-4, atol=1e-5)


def test_a_whole_run(flags, capsys):
    made = flags(**TRIPLET, max_steps=8)
    assert train.main(made) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    bag = 5 * len(COUNTS)
    assert f"note: bags have {bag} images instead of 7200: there are no more, with 5 per" in out
    assert f"eval {bag} images.. 0" in lines
    assert any(line.startswith("found triplets ") for line in lines)
    assert "acc is the share of triplets whose anchor is nearer to the positive" in out
    assert any(line.startswith("[val][8]Accuracy-Flip: ") for line in lines)
    rows = read_table(folder_of(made) / "metrics.csv")
    assert [int(row["step"]) for row in rows] == [2, 4, 6, 8]
    assert all(np.isfinite(float(row["loss"])) for row in rows)
    assert np.load(newest(made) / "classes.npy").shape == (0, 8)


def test_a_signal_stops_the_search(flags, monkeypatch, capsys):
    made = flags(**TRIPLET, max_steps=4)
    assert train.main(made) == 0
    expected = mx.nd.load(f"{folder_of(made)}/model-0000.params")
    embed_batches, embedded = triplets.embed_batches, []

    def embed_until_a_signal(*args, **options):
        for batch in embed_batches(*args, **options):
            embedded.append(batch)
            signal.raise_signal(signal.SIGTERM)
            yield batch

    made = flags(**TRIPLET, max_steps=4, extra_model_name="stopped")
    with monkeypatch.context() as patched:
        patched.setattr(triplets, "embed_batches", embed_until_a_signal)
        assert train.main(made) != 0
    assert len(embedded) == 1
    assert "stopped by signal 15: saving step 0" in capsys.readouterr().out
    assert train.main([*made, "--resume"]) == 0
    for key, array in mx.nd.load(f"{folder_of(made)}/model-0000.params").items():
        np.testing.assert_array_equal(array.asnumpy(), expected[key].asnumpy())


def test_unreadable_images_are_in_no_triplet(run_of, monkeypatch):
    run = run_of()
    records = run.plan.pipeline.records
    read, broken = records.read, set(range(0, len(records), 3))

    def read_some(image):
        label, encoded = read(image)
        return label, encoded[:20] if image in broken else encoded

    monkeypatch.setattr(records, "read", read_some)
    batch = next(run.trained.miner.epoch(0, 0, lambda _: None))
    assert not broken & set(run.trained.miner.triplets.ravel().tolist())
    labels = batch.label.reshape(3, 2)
    assert (labels[0] == labels[1]).all()


def test_no_triplets_left(flags, capsys):
    assert train.main(flags(**TRIPLET, loss_option="alpha=1e-9")) == 2
    assert "semi-hard triplets are fewer than the 2 of a step" in capsys.readouterr().err
