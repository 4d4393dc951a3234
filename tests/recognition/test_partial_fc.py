"""The configuration of Partial FC: the flags it is answered with say the same."""

import shlex

import pytest

from dsoftmax.recognition import settings

# In the shape of Partial FC's default.py.
DEFAULT = """
from easydict import EasyDict
config = EasyDict(
    embedding_size=512, net_output="FC", frequent=20, verbose=2000, image_size=112, debug=0,
    batch_size=64, backbone_lr=0.1, memory_bank_lr=0.1, sample_ratio=1.0,
)
{changes}

def generate_config(loss_name, dataset, network):
    config.loss_s, config.loss_m1 = 64.0, 1.0
    config.loss_m2, config.loss_m3 = (0.5, 0.0) if loss_name == "arcface" else (0.0, 0.4)
    config.lr_steps = "100000,160000"
    config.val_targets = ["agedb_30", "cfp_fp", "lfw"]
    config.rec = "/data/" + dataset + "/train.rec"
    config.num_classes = 85742
    config.max_update = 180000
    config.num_layers = int(network[1:])
"""


@pytest.fixture
def answer(tmp_path):
    """Return what `train.py` answers to a configuration, and the settings its command makes."""

    def ask(*flags, changes=""):
        path = tmp_path / "default.py"
        path.write_text(DEFAULT.format(changes=changes))
        with pytest.raises(ValueError, match="a configuration of Partial FC") as caught:
            settings.parse(["--config", str(path), *flags])
        _, command, *notes = str(caught.value).splitlines()
        return settings.parse(shlex.split(command)[3:]), notes

    return ask


def test_its_own_choices(answer):
    run, notes = answer()
    assert (run.network, run.dataset, run.loss) == ("r100", "emore", "cosface")
    assert run.loss_options["scale"] == 64
    assert run.loss_options["m3"] == 0.4
    assert "sample_rate" not in run.loss_options
    assert (run.per_batch_size, run.lr, run.max_steps) == (64, 0.1, 180000)
    assert list(run.lr_steps) == [100000, 160000]
    assert (run.data_dir, run.num_classes) == ("/data/emore", 85742)
    assert run.val_targets == ("agedb_30", "cfp_fp", "lfw")
    assert run.class_parallel
    assert len(notes) == 1
    assert "net_output = 'FC'" in notes[0]


def test_the_flags_of_the_user(answer):
    run, _ = answer("--network", "r50", "--dataset", "glint", "--loss", "arcface")
    assert (run.network, run.data_dir, run.loss) == ("r50", "/data/glint", "arcface")
    assert run.loss_options["m2"] == 0.5


def test_sampled_classes_and_another_learning_rate(answer):
    changes = "config.sample_ratio, config.memory_bank_lr, config.debug = 0.1, 0.05, 1"
    run, notes = answer(changes=changes)
    assert run.loss_options["sample_rate"] == 0.1
    assert any("fc7_lr_mult = 0.5" in note for note in notes)
    assert any("debug" in note for note in notes)
