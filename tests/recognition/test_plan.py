"""What is refused or told before the first step."""

import os
import shutil

import mxnet as mx
import pytest

from dsoftmax.recognition import loop, plan, train
from dsoftmax.recognition.data.packs import write_pack
from dsoftmax.recognition.settings import parse
from tests.recognition.runs import (
    COUNTS,
    folder_of,
)


def test_a_run_is_not_overwritten(flags, capsys):
    made = flags(max_steps=4)
    assert train.main(made) == 0
    assert train.main(made) == 2
    assert "go on with it by --resume" in capsys.readouterr().err


def test_nothing_to_resume(flags, capsys):
    made = flags(max_steps=2)
    assert train.main([*made, "--resume"]) == 2
    err = capsys.readouterr().err
    assert f"--resume: there is no state in {folder_of(made)}/states" in err
    assert err.count("\n") == 1
    assert not folder_of(made).exists()
    assert train.main([*made, "--resume", "auto"]) == 0
    assert "states: a new run begins" in capsys.readouterr().out
    assert train.main([*made, "--resume", "auto"]) == 0
    assert "resumed from" in capsys.readouterr().out


def test_a_run_that_was_killed_before_its_first_state(flags):
    made = flags(max_steps=2)
    loop.Run(parse(made)).release()
    assert os.listdir(folder_of(made)) == ["config.json"]
    (folder_of(made) / "states" / "state-00000002.1.part").mkdir(parents=True)
    assert train.main([*made, "--resume", "auto"]) == 0


def test_states_that_are_lost(flags, capsys):
    made = flags(max_steps=2)
    assert train.main(made) == 0
    shutil.rmtree(folder_of(made) / "states")
    for more in ([], ["--resume"], ["--resume", "auto"]):
        assert train.main([*made, *more]) == 2
        assert "holds models, but no state to go on from" in capsys.readouterr().err


def test_other_classes(flags, dataset, capsys):
    """It is refused with the flags that work."""
    assert train.main(flags(max_steps=2)) == 0
    more, _ = dataset((*COUNTS, 4, 4), "more")
    made = flags(max_steps=4, data_dir=more)
    assert train.main([*made, "--resume"]) == 2
    err = capsys.readouterr().err
    assert "has 5 classes, this run has 7" in err
    advice = err[err.index("--pretrained") :].replace("<another>", "more").split()
    assert train.main([*made, *advice]) == 0
    out = capsys.readouterr().out
    assert "parameters of tiny are from" in out
    assert "class weights begin as the mean embeddings" in out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_dir": "nowhere"}, "nowhere: there is no such folder"),
        ({"num_classes": 4}, "it has the label 4, but there are to be 4 classes"),
        (
            {"per_batch_size": 100},
            "--per-batch-size 100: a step takes 100 images, and {data}/train.rec has 43: take "
            "--per-batch-size 43 or less",
        ),
        (
            {"per_batch_size": 30, "devices": "cpu:2", "images_filter": 8},
            "--per-batch-size 30 x 2 devices: a step takes 60 images, and {data}/train.rec has 36 "
            "after --images-filter 8: take --per-batch-size 18 or less",
        ),
        ({"loss": "dsoftmax", "store": "host"}, "store='host'"),
        ({"sync_bn": True, "devices": "cpu:2"}, "--sync-bn is for GPUs"),
        ({"fp16_scale": 128}, "--fp16-scale is for GPUs"),
        ({"lr_schedule": "cosine", "max_steps": 0}, "needs an end"),
        (
            {"image_size": 16},
            "--image-size: tiny can't take images of 16,16; the next size it takes is 17,17",
        ),
        (
            {"image_size": 32, "network": "gluoncv:resnet18_v1b"},
            "the next size it takes is 33,33",
        ),
        (
            {"accumulate": 6},
            "--per-batch-size 8 x 6 micro-batches: a step takes 48 images, and {data}/train.rec "
            "has 43: take --per-batch-size 7 or less",
        ),
        ({"accumulate": 50, "devices": "cpu:2"}, "has 43: take fewer of these, or add images"),
        ({"accumulate": 2, "loss": "hf_softmax"}, "--accumulate 2: the negatives of hf_softmax"),
        ({"per_batch_size": 1}, "--per-batch-size 1: the last layer normalizes"),
    ],
)
def test_before_the_first_step(flags, faces, capsys, changes, message):
    assert train.main(flags(**changes)) == 2
    err = capsys.readouterr().err
    assert message.format(data=faces) in err
    assert err.count("\n") == 1


def test_gpus_that_nobody_chose(flags, monkeypatch, capsys):
    monkeypatch.setattr(mx.context, "num_gpus", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert train.main(flags("a", devices=None, max_steps=1)) == 0
    out = capsys.readouterr().out
    assert "\ndevices cpu(0)\n" in out
    assert "warning: this run uses the CPU, although MXNet sees 2 GPUs: set" in out
    assert "CUDA_VISIBLE_DEVICES=0,1 or give --devices gpu:2" in out
    assert train.main(flags("b", devices="cpu", max_steps=1)) == 0
    assert "GPUs" not in capsys.readouterr().out


def test_one_image_is_enough_where_it_is_learnt_from(flags, tmp_path):
    """For class weights alone, and for a network that does not end in a BatchNorm."""
    plain = tmp_path / "plain.py"
    plain.write_text("from dsoftmax.recognition.config import *\nnetwork.tiny.net_output = 'H'\n")
    for name, more in (("frozen", {"freeze_backbone": True}), ("plain", {"config": plain})):
        plan.Plan(parse(flags(name, per_batch_size=1, **more)))


def test_odd_classes_are_told(flags, dataset, jpeg, tmp_path):
    def warnings_of(folder, **changes):
        notes = plan.Plan(parse(flags(data_dir=folder, target=None, **changes))).notes
        return [note.split("train.rec", 1)[1] for note in notes if note.startswith("warning: ")]

    assert warnings_of(dataset(COUNTS, "sound")[0]) == []
    assert warnings_of(dataset((9,), "one")[0]) == [": all images are of one class"]
    gaps = dataset((4, 0, 5, 0), "gaps")[0]
    assert warnings_of(gaps) == [": 1 of 3 classes have no image"]
    (gaps / "property").write_text("7,32,32\n")
    assert warnings_of(gaps) == [": 5 of 7 classes have no image"]
    assert warnings_of(gaps, num_classes=9) == [
        ": 5 of 7 classes have no image",
        " has 7 classes: the others have no image",
    ]
    assert warnings_of(gaps, num_classes=3) == [": 1 of 3 classes have no image"]
    assert warnings_of(gaps, images_filter=2) == []


def test_an_option_of_another_loss(flags, capsys):
    assert train.main(flags(loss="cosface", d=0.9)) == 2
    assert "cosface has no option d. Legal are inter_filter, m3, " in capsys.readouterr().err


def test_bad_images_are_counted(flags, faces, capsys):
    content = bytearray((faces / "train.rec").read_bytes())
    starts = [at for at in range(len(content)) if content[at : at + 3] == b"\xff\xd8\xff"]
    content[starts[3] : starts[3] + 3] = b"xxx"
    (faces / "train.rec").write_bytes(content)
    assert train.main(flags(max_steps=6, target="none")) == 0
    out = capsys.readouterr().out
    assert "1 images could not be decoded" in out
    assert "there is no" in out  # none.bin


def test_a_broken_pack(flags, faces, capsys):
    (faces / "val.bin").write_bytes(b"no pickle")
    assert train.main(flags()) == 2
    assert "val.bin: not a readable pickle" in capsys.readouterr().err


@pytest.mark.parametrize("pairs", [1, 3])
def test_a_pack_that_would_fail_later(flags, faces, jpeg, capsys, pairs):
    images = [jpeg() for _ in range(2 * pairs)]
    if pairs > 1:
        images[5] = images[5][:-200]
    write_pack(faces / "val.bin", images, [True] * pairs)
    assert train.main(flags()) == 2
    assert ("one pair is too few" if pairs == 1 else "cut off") in capsys.readouterr().err


def test_models_of_others_are_not_overwritten(flags, capsys):
    folder = folder_of(flags())
    folder.mkdir(parents=True)
    (folder / "model-0001.params").write_bytes(b"precious")
    for more in ([], ["--resume"]):
        assert train.main([*flags(), *more]) == 2
        assert "holds models" in capsys.readouterr().err
    assert (folder / "model-0001.params").read_bytes() == b"precious"


def test_what_is_refused_leaves_no_trace(flags, capsys):
    assert train.main(flags(pretrained="nothing,1")) == 2
    assert not folder_of(flags()).exists()
    made = flags(max_steps=2)
    assert train.main(made) == 0
    before = (folder_of(made) / "config.json").read_bytes()
    assert train.main([*flags(max_steps=4, emb_size=9, lr=7), "--resume"]) == 2
    assert (folder_of(made) / "config.json").read_bytes() == before


def test_an_empty_folder(flags, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert train.main(flags(data_dir=tmp_path / "empty")) == 2
    assert "empty" in capsys.readouterr().err


def test_nowhere_to_write(flags, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert train.main(flags(models_root=tmp_path / "file")) == 2
    assert "Not a directory" in capsys.readouterr().err


def test_a_run_that_cannot_fit(flags, monkeypatch, capsys):
    monkeypatch.setattr(plan, "available_bytes", lambda: 10**6)
    assert train.main(flags(num_classes=200_000)) == 2
    err = capsys.readouterr().err
    assert "the run needs about" in err
    assert "a loss with sampled classes (--loss dsoftmax_k)" in err
