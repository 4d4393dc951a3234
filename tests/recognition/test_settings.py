"""Flags and configurations as insightface's users write them."""

import json
import re
import sys
import textwrap

import pytest

from dsoftmax import losses
from dsoftmax.losses import presets
from dsoftmax.losses.presets import resolve
from dsoftmax.recognition.settings import parse

# insightface's sample_config.py, all keys with their values there.
SAMPLE = """
import os
from easydict import EasyDict as edict

config = edict(bn_mom=0.9, workspace=256, emb_size=512, ckpt_embedding=True, net_se=0,
               net_act="prelu", net_unit=3, net_input=1, net_blocks=[1, 4, 6, 2], net_output="E",
               net_multiplier=1.0, val_targets=["lfw", "cfp_fp", "agedb_30"], ce_loss=True,
               fc7_lr_mult=1.0, fc7_wd_mult=1.0, fc7_no_bias=False, max_steps=0,
               data_rand_mirror=True, data_cutoff=False, data_color=0, data_images_filter=0,
               count_flops=True, memonger=False, is_shuffled_rec=False, fp16=False)
network = edict(r50=edict(net_name="fresnet", num_layers=50),
                r100=edict(net_name="fresnet", num_layers=100),
                r100fc=edict(net_name="fresnet", num_layers=100, net_output="FC"),
                y1=edict(net_name="fmobilefacenet", emb_size=128, net_output="GDC"))
dataset = edict(emore=edict(dataset="emore", dataset_path="../datasets/faces_emore",
                            num_classes=85742, image_shape=(112, 112, 3),
                            val_targets=["lfw", "cfp_fp", "agedb_30"]))
loss = edict(arcface=edict(loss_name="margin_softmax", loss_s=64.0, loss_m1=1.0, loss_m2=0.5,
                           loss_m3=0.0))
default = edict(network="r100", pretrained="", pretrained_epoch=1, dataset="emore", loss="arcface",
                frequent=20, verbose=2000, kvstore="device", end_epoch=10000, lr=0.1, wd=0.0005,
                mom=0.9, per_batch_size=128, ckpt=3, lr_steps="100000,160000,220000",
                models_root="./models")


def generate_config(_network, _dataset, _loss):
    for part in (loss[_loss], network[_network], dataset[_dataset]):
        for k, v in part.items():
            config[k] = v
            if k in default:
                default[k] = v
    config.loss, config.network, config.dataset = _loss, _network, _dataset
    config.num_workers = 1
    config.fp16 = False
"""


def test_insightface_s_defaults():
    found = parse([])
    assert (found.network, found.loss, found.dataset) == ("r100", "arcface", "emore")
    assert found.data_dir == "../datasets/faces_emore"
    assert (found.num_classes, found.image_size) == (85742, (112, 112))
    assert (found.lr, found.wd, found.mom, found.per_batch_size) == (0.1, 5e-4, 0.9, 128)
    assert found.lr_steps == (100000, 160000, 220000)
    assert (found.verbose, found.frequent, found.ckpt) == (2000, 20, 3)
    assert found.val_targets == ("lfw", "cfp_fp", "agedb_30")
    assert found.embedding_size == 512
    assert found.prefix == "./models/r100-arcface-emore/model"
    assert found.loss_options == {
        "preset": "arcface",
        "scale": 64,
        "m2": 0.5,
        "detach": False,
        "normalize": True,
        "inter_filter": None,
        "subcentres": 1,
        "negatives": "all",
    }
    assert found.network_options["output"] == "E"
    assert parse(["--network", "y1"]).embedding_size == 128
    assert parse(["--network", "y1"]).network_options["output"] == "GDC"
    assert parse(["--network", "y2"]).network_options["blocks"] == [2, 8, 16, 4]


def test_parsing_twice_is_parsing_once():
    """What one run merges into the configuration must not reach the next."""
    first = parse(["--loss", "cosface", "--network", "y2"])
    parse(["--loss", "dsoftmax_k", "--network", "r50"])
    assert parse(["--loss", "cosface", "--network", "y2"]) == first


@pytest.mark.parametrize("name", losses.names())
def test_every_loss_can_be_named(name):
    found = parse(["--loss", name])
    options = dict(found.loss_options)
    head = losses.create(options.pop("preset"), num_classes=70, embedding_size=4, **options)
    assert head.num_classes == 70


def test_options_of_losses():
    flags = ["--loss", "dsoftmax_k", "--sample-rate", "1/8", "--d", "0.7", "--scale", "16"]
    found = parse([*flags, "--correction", "logq"])
    assert found.loss_options == {
        "preset": "dsoftmax_k",
        "scale": 16,
        "d": 0.7,
        "m": 0.4,
        "sample_rate": 0.125,
        "batch_classes": None,
        "correction": "logq",
        "normalize": True,
        "inter_filter": None,
        "subcentres": 1,
        "negatives": "classes",
    }
    found = parse(["--loss", "arcface", "--m2", "0.4", "--sample-rate", "0.1"])
    assert (found.loss_options["m2"], found.loss_options["sample_rate"]) == (0.4, 0.1)
    assert found.loss_spec().sampled_share == 0.1
    with pytest.raises(ValueError, match=r"--loss cosface: .*has no option d. Legal are"):
        parse(["--loss", "cosface", "--d", "0.9"])


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--pretrained", "models/a/model,7"], "models/a/model,7"),
        (["--pretrained", "models/a/model", "--pretrained-epoch", "3"], "models/a/model,3"),
        (["--pretrained", "models/a/model"], "models/a/model"),  # the saved ones decide
        (["--pretrained", "a,b/model"], "a,b/model"),
        (["--pretrained", "a,b/model,2", "--pretrained-epoch", "3"], "a,b/model,2"),
        ([], ""),
    ],
)
def test_both_forms_of_pretrained(flags, expected):
    assert parse(flags).pretrained == expected


def test_a_folder_of_one_s_own():
    found = parse(["--dataset", "mine", "--data-dir", "/data/faces", "--network", "gluoncv:a_net"])
    assert (found.dataset, found.data_dir) == ("mine", "/data/faces")
    assert (found.num_classes, found.image_size) == (0, None)  # the data will tell
    assert found.folder == "./models/gluoncv_a_net-arcface-mine"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--network", "r51"], "there is no 'r51', did you mean"),
        (["--loss", "arcfase"], "there is no 'arcfase', did you mean arcface"),
        (["--dataset", "emor"], r"did you mean emore.*\(or give --data-dir\)"),
        (["--seed", str(1 << 40)], "--seed must be below"),
        (["--lr", "inf"], "--lr must be above 0, not inf"),
        (["--emb-size", "0"], "--emb-size must be at least 1"),
        (["--config", "nowhere.py"], "--config nowhere.py: there is no such file"),
    ],
)
def test_unknown_names(flags, message):
    with pytest.raises((ValueError, OSError), match=message):
        parse(flags)


class TestOwnConfig:
    """A file such as insightface's users keep."""

    TEXT = """
        from easydict import EasyDict as edict
        config = edict(bn_mom=0.9, emb_size=256, net_output="G", net_se=1, val_targets=["lfw"],
                       fc7_wd_mult=10.0, max_steps=7, data_color=1)
        default = edict(network="big", dataset="asia", loss="angle", pretrained="",
                        pretrained_epoch=1, frequent=5, verbose=100, kvstore="device", lr=0.05,
                        wd=1e-4, mom=0.8, per_batch_size=16, ckpt=2, lr_steps="10,20",
                        models_root="./out")
        network = edict(big=edict(net_name="fresnet", num_layers=50),
                        r50=edict(net_name="fresnet", num_layers=50))
        dataset = edict(asia=edict(dataset_path="/asia", num_classes=94, image_shape=(112, 96, 3)))
        loss = edict(angle=edict(loss_name="margin_softmax", loss_s=30.0, loss_m1=1.0, loss_m2=0.3,
                                 loss_m3=0.1, per_batch_size=60))
        def generate_config(_network, _dataset, _loss):
            for part in (loss[_loss], network[_network], dataset[_dataset]):
                for k, v in part.items():
                    config[k] = v
                    if k in default:
                        default[k] = v
    """

    @pytest.fixture
    def path(self, tmp_path):
        (tmp_path / "config.py").write_text(textwrap.dedent(self.TEXT))
        return str(tmp_path / "config.py")

    def test_it_has_the_last_word(self, path):
        found = parse(["--config", path, "--network", "r50"])
        assert (found.dataset, found.data_dir, found.num_classes) == ("asia", "/asia", 94)
        assert found.image_size == (112, 96)
        assert found.loss_options == {
            "preset": "combined",
            "scale": 30,
            "m1": 1,
            "m2": 0.3,
            "m3": 0.1,
            "normalize": True,
            "inter_filter": None,
            "subcentres": 1,
            "negatives": "all",
        }
        assert found.per_batch_size == 60  # a loss may change a flag's default
        assert (found.lr, found.wd, found.mom, found.ckpt) == (0.05, 1e-4, 0.8, 2)
        assert (found.lr_steps, found.max_steps) == ((10, 20), 7)
        assert (found.fc7_wd_mult, found.color) == (10, 1)
        assert found.embedding_size == 256
        assert found.network_options["output"] == "G"
        assert parse(["--config", path, "--network", "r50", "--lr", "1"]).lr == 1

    def test_one_that_builds_on_ours(self, tmp_path):
        (tmp_path / "config.py").write_text(
            "from dsoftmax.recognition.config import *\nconfig.emb_size = 64\ndefault.lr = 0.2\n"
        )
        found = parse(["--config", str(tmp_path / "config.py"), "--loss", "cosface"])
        assert (found.embedding_size, found.lr) == (64, 0.2)
        assert (parse([]).embedding_size, parse([]).lr) == (512, 0.1)

    def test_what_its_defaults_lack_is_taken_from_ours(self, tmp_path):
        (tmp_path / "config.py").write_text(
            "from dsoftmax.recognition.config import *\n"
            "default = dict(network='y1', dataset='emore', loss='arcface', lr=1, pretrained=None)\n"
        )
        found = parse(["--config", str(tmp_path / "config.py")])
        assert (found.ckpt, found.pretrained, found.lr) == (3, None, 1.0)
        assert parse(["--config", str(tmp_path / "config.py"), "--lr", "0.5"]).lr == 0.5

    def test_our_losses_are_beside_it(self, path):
        found = parse(["--config", path, "--network", "r50", "--loss", "dsoftmax"])
        assert found.loss_spec() == resolve("dsoftmax")

    @pytest.mark.parametrize(
        ("margins", "preset"),
        [
            ((1.0, 0.0, 0.0), "nsoftmax"),
            ((1.0, 0.0, 0.35), "cosface"),
            ((1.0, 0.5, 0.0), "arcface"),
            ((1.0, 0.3, 0.2), "combined"),
            ((1.35, 0.0, 0.0), "combined"),
        ],
    )
    def test_margin_softmax_is_the_loss_with_these_margins(self, tmp_path, margins, preset):
        keys = ", ".join(f"loss_m{place}={margin}" for place, margin in enumerate(margins, 1))
        (tmp_path / "config.py").write_text(
            "from dsoftmax.recognition.config import *\n"
            f"loss.mine = edict(loss_name='margin_softmax', loss_s=48.0, {keys})\n"
        )
        flags = ["--config", str(tmp_path / "config.py"), "--loss", "mine"]
        found = parse(flags).loss_options
        assert (found["preset"], found["scale"]) == (preset, 48)
        for name, margin in zip(("m1", "m2", "m3"), margins):
            assert found.get(name, margin) == margin
        found = parse([*flags, "--m1", "1", "--m2", "0.4", "--m3", "0"]).loss_options
        assert (found["preset"], found["m2"]) == ("arcface", 0.4)

    def test_an_unknown_loss_name(self, tmp_path):
        (tmp_path / "config.py").write_text(
            "from dsoftmax.recognition.config import *\nloss.mine = edict(loss_name='arcsoftmax')\n"
        )
        with pytest.raises(ValueError, match=r"^--loss mine: there is no loss_name 'arcsoftmax'"):
            parse(["--config", str(tmp_path / "config.py"), "--loss", "mine"])

    def test_a_loss_of_your_own(self, tmp_path, monkeypatch):
        monkeypatch.setattr(presets, "PRESETS", dict(presets.PRESETS))
        (tmp_path / "config.py").write_text(
            "from dsoftmax.losses import Softmax, register\n"
            "from dsoftmax.recognition.config import *\n"
            "class Gentle(Softmax):\n"
            "    def __init__(self, scale, ease=2, **kwargs):\n"
            "        super().__init__(scale, **kwargs)\n"
            "        self.ease = ease\n"
            "register('gentle', Gentle, 'classes', scale=20)\n"
        )
        flags = ["--config", str(tmp_path / "config.py"), "--loss", "gentle"]
        for _ in range(2):
            found = parse([*flags, "--loss-option", "ease=3"])
            assert found.loss_options["preset"] == "gentle"
            assert (found.loss_options["scale"], found.loss_options["ease"]) == (20, 3)
            assert found.loss_spec().sampled_share == 1 / 64

    def test_a_network_by_another_name(self, path):
        found = parse(["--config", path])
        assert (found.network, found.architecture) == ("big", "r50")

    @pytest.mark.parametrize(
        ("name", "text"),
        [("a.py", "config = ("), ("a.txt", ""), ("b.py", "x"), ("c.py", "config = 5")],
    )
    def test_files_that_are_no_configuration(self, tmp_path, name, text):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=f"--config .*{name}: "):
            parse(["--config", str(tmp_path / name)])

    def test_what_it_lacks_is_named(self, tmp_path):
        (tmp_path / "config.py").write_text("config = {}\n")
        with pytest.raises(ValueError, match="it has no default, network, dataset, loss, generate"):
            parse(["--config", str(tmp_path / "config.py")])


class TestInsightfaceConfig:
    """A configuration as it is copied from insightface, with a user's changes."""

    @pytest.fixture
    def settle(self, tmp_path):
        """Return a function that parses flags with a configuration of so many more lines."""

        def settle(lines, *flags):
            (tmp_path / "config.py").write_text(f"{SAMPLE}\n{lines}\n")
            return parse(["--config", str(tmp_path / "config.py"), *flags])

        return settle

    def test_as_it_is(self, settle):
        assert settle("").notes == ()
        assert settle("").loss_spec().title == "ArcFace"

    @pytest.mark.parametrize(
        ("line", "note"),
        [
            ("config.workspace = 512", "note: config.workspace = 512 does nothing here: Gluon"),
            ("config.ce_loss = False", "the loss is always logged"),
            ("config.fc7_no_bias = True", "classes never have a bias"),
            ("config.count_flops = False", "FLOPs are always printed"),
            ("config.memonger = True", "--accumulate saves memory"),
            ("config.is_shuffled_rec = True", "the style of a .rec file is detected"),
            ("default.end_epoch = 20", "note: default.end_epoch = 20 .*; --end-epoch ends a run"),
            ("config.emb_sise = 9", "warning: config.emb_sise = 9 .*, did you mean emb_size"),
            ("default.lr_step = '5'", "warning: default.lr_step = '5' .*, did you mean lr_steps"),
            ("network.r50.net_autput = 'G'", "config.net_autput = 'G' .*, did you mean net_output"),
            ("config.xyz = 3", "warning: config.xyz = 3 does nothing$"),
        ],
    )
    def test_keys_that_do_nothing(self, settle, line, note):
        found = settle(line, "--network", "r50")
        (only,) = found.notes
        assert re.search(note, only)
        assert found == settle("", "--network", "r50")

    def test_options_of_another_loss(self, settle):
        """Those of the whole configuration may be for any loss, those of an entry are for its."""
        found = settle("config.loss_h = 9\nconfig.loss_d = 0.8", "--loss", "dsoftmax")
        assert found.loss_options["d"] == 0.8
        assert [note.split(" = ")[0] for note in found.notes] == ["warning: config.loss_h"]
        with pytest.raises(ValueError, match="--loss arcface: arcface has no option h"):
            settle("loss.arcface.loss_h = 3")

    def test_configuration_of_sub_center_arcface(self, settle):
        found = settle("config.loss_K = 3", "--loss", "arcface")
        assert found.loss_options["subcentres"] == 3
        assert found.notes == ()

    @pytest.mark.parametrize(
        ("lines", "network", "architecture"),
        [
            ("", "r50", "r50"),
            ("", "r100fc", "r100"),
            ("network.r50.num_layers = 34", "r50", "r34"),
            ("network.y1.net_name = 'fresnet'; network.y1.num_layers = 18", "y1", "r18"),
            ("network.r50 = edict(net_name='fmobilefacenet', net_output='GDC')", "r50", "y1"),
            (
                "network.mine = edict(net_name='gluoncv:resnet18_v1b')",
                "mine",
                "gluoncv:resnet18_v1b",
            ),
            ("", "tiny", "tiny"),
            ("", "d201", "d201"),
            ("network.d = edict(net_name='fdensenet', num_layers=121)", "d", "d121"),
            ("", "m05", "m1"),
            ("", "mnas025", "mnas"),
            ("", "vargfacenet", "vargfacenet"),
        ],
    )
    def test_an_entry_decides_which_network_it_is(self, settle, lines, network, architecture):
        assert settle(lines, "--network", network).architecture == architecture

    def test_one_that_changes_ours(self, tmp_path):
        (tmp_path / "config.py").write_text(
            "from dsoftmax.recognition.config import *\nnetwork.r50.num_layers = 34\n"
        )
        found = parse(["--config", str(tmp_path / "config.py"), "--network", "r50"])
        assert found.architecture == "r34"

    @pytest.mark.parametrize("name", ["fdensenet", "fresnet"])
    def test_networks_that_are_not_here(self, settle, name):
        with pytest.raises(ValueError, match=f"--network d1: .*{name!r} with num_layers 51; legal"):
            settle(f"network.d1 = edict(net_name='{name}', num_layers=51)", "--network", "d1")

    def test_widths_are_insightface_s(self, settle):
        """It has the key for some networks, and does not read it for the others."""
        for network in ("r50", "y1"):
            found = settle("config.net_multiplier = 0.5", "--network", network)
            assert "multiplier" not in found.network_options
            assert found.notes == (
                f"note: config.net_multiplier = 0.5 does nothing to {network}, as in insightface",
            )
        found = settle("config.net_multiplier = 0.5", "--network", "tiny")
        assert (found.network_options["multiplier"], found.notes) == (0.5, ())
        for network, width in {"m05": 0.5, "mnas025": 0.25, "vargfacenet": 1.25}.items():
            assert settle("", "--network", network).network_options["multiplier"] == width

    def test_other_defaults_are_insightface_s(self, settle):
        dense, small = settle("", "--network", "d201"), settle("", "--network", "mnas05")
        assert (dense.per_batch_size, dense.embedding_size) == (64, 512)
        assert dense.network_options["densenet_dropout"] == 0.0
        assert (small.per_batch_size, small.embedding_size) == (128, 256)
        assert small.network_options["output"] == "GDC"

    @pytest.mark.parametrize(
        ("kind", "expected"),
        [
            ("nccl", "device"),
            ("local_allreduce_cpu", "local"),
            ("dist_device_sync", "dist_sync"),
            ("dist_sync_device", "dist_sync"),
        ],
    )
    def test_kinds_of_kvstore(self, settle, kind, expected):
        assert settle(f"default.kvstore = '{kind}'").kvstore == expected
        assert settle("", "--kvstore", kind).kvstore == expected

    def test_a_kvstore_that_is_not_here(self, settle, capsys):
        with pytest.raises(SystemExit):
            settle("default.kvstore = 'dist_async'")
        err = capsys.readouterr().err
        assert "argument --kvstore: 'dist_async' (of the flag, or of default.kvstore in" in err

    def test_files_beside_it(self, settle, tmp_path):
        for size in (64, 96):  # the second time, it is another file
            (tmp_path / "common_settings.py").write_text(f"WIDTH = {size}\n{' ' * size}")
            found = settle("from common_settings import WIDTH\nconfig.emb_size = WIDTH")
            assert found.embedding_size == size
        assert "common_settings" not in sys.modules
        assert str(tmp_path) not in sys.path
        with pytest.raises(ValueError, match=r"--config .*config.py: .*No module named 'not_here'"):
            settle("import not_here")

    @pytest.mark.parametrize("line", ["1 / 0", "{}['x']", "raise SystemExit(3)", "assert False"])
    def test_errors_in_it_name_the_file(self, settle, line):
        with pytest.raises(ValueError, match=r"--config .*config\.py: \w+: "):
            settle(line)

    @pytest.mark.parametrize("value", ["(1, 2)", "'x'", "1e999"])
    def test_defaults_that_are_no_numbers(self, settle, value):
        with pytest.raises(ValueError, match=r"default\.ckpt = .* of --ckpt, is no int"):
            settle(f"default.ckpt = {value}")

    def test_errors_of_its_function_name_the_file(self, settle):
        with pytest.raises(ValueError, match=r"config\.py: generate_config: NameError: .*missing"):
            settle("def generate_config(_network, _dataset, _loss): missing[_loss]")

    def test_a_dataset_without_a_path(self, settle):
        with pytest.raises(ValueError, match=r"--dataset bare: .* has no dataset_path"):
            settle("dataset.bare = edict(num_classes=3)", "--dataset", "bare")


def test_settings_can_not_be_changed_and_survive_json():
    found = parse(["--loss", "dsoftmax_k", "--image-size", "56"])
    with pytest.raises(AttributeError):
        found.lr = 1.0
    saved = json.loads(json.dumps(found.as_json()))
    assert saved["image_size"] == [56, 56]
    assert saved["loss_options"]["preset"] == "dsoftmax_k"
    assert {"architecture", "network_options", "fc7_wd_mult", "mirror", "store"} <= set(saved)


def test_types_of_class_weights():
    sampled = ["--loss", "dsoftmax_k"]
    assert parse(sampled).class_dtype == "float32"
    assert parse([*sampled, "--store", "host", "--class-dtype", "float16"]).class_dtype == "float16"
    for more in ([], ["--kvstore", "dist_sync"]):
        with pytest.raises(ValueError, match=r"--class-dtype bfloat16: .* which store='host' can"):
            parse([*sampled, "--class-dtype", "bfloat16", *more])
    with pytest.raises(SystemExit):
        parse(["--class-dtype", "float8"])


def test_options_of_a_loss_without_a_flag():
    options = ["--loss-option", "trees=9", "--loss-option", "correction=None"]
    found = parse(["--loss", "hf_softmax", *options])
    assert (found.loss_options["trees"], found.loss_options["correction"]) == (9, None)
    found = parse(["--loss", "dsoftmax_k", "--loss-option", "correction=logq"])
    assert found.loss_options["correction"] == "logq"
    with pytest.raises(ValueError, match=r"--loss hf_softmax: .* has no option leaves"):
        parse(["--loss", "hf_softmax", "--loss-option", "leaves=9"])
    with pytest.raises(SystemExit):
        parse(["--loss-option", "trees"])
    found = parse(["--loss", "sphereface", "--loss-option", "annealing=none"])
    assert found.loss_options["annealing"] is None
    found = parse(["--loss", "arcface", "--loss-option", "detach=true"])
    assert found.loss_options["detach"] is True


def test_schedules_words_and_negatives():
    found = parse(["--loss", "arcface", "--sample-rate", "0:1/8,300:1"])
    assert found.loss_options["sample_rate"] == [(0, 0.125), (300, 1.0)]
    assert found.loss_spec().make_criterion().m2 == 0.5
    assert parse(["--loss", "dsoftmax", "--d", "learned"]).loss_options["d"] == "learned"
    found = parse(["--loss", "arcface", "--loss-option", "negatives=batch"])
    assert (found.loss_spec().negatives, found.loss_spec().sampled_share) == ("batch", 0)
    for wrong in ("0:1/8,x:1", "0:2", "1/8,5:1"):
        with pytest.raises(SystemExit):
            parse(["--loss", "arcface", "--sample-rate", wrong])
    with pytest.raises(ValueError, match="--loss arcface: the steps of sample_rate must begin"):
        parse(["--loss", "arcface", "--sample-rate", "5:1/8"])


@pytest.mark.parametrize(
    ("loss", "option", "message"),
    [
        ("arcface", "detatch=1", "arcface has no option detatch, did you mean detach"),
        ("arcface", "x=1", "no option x. Legal are detach, inter_filter, m2, .*"),
        ("hf_softmax", "tree=9", "no option tree, did you mean trees"),
        ("hf_softmax", "trees=many", "trees is a number like 50, not 'many'"),
        ("arcface", "m2=half", "m2 is a number like 0.5, not 'half'"),
        ("arcface", "scale=-1", "scale must be a positive number, not -1"),
        ("dsoftmax", "d=half", "d must be a number like 0.9, or 'learned', not 'half'"),
        ("dsoftmax_arcface", "d=learned", "d can't be learned by DSoftmaxArcFace, .*"),
        ("arcface", "negatives=few", "negatives must be one of all, .*"),
        ("sphereface2", "t=4", "t must be 1, 2 or 3, not 4"),
        ("dsoftmax_b", "sample_rate=half", "sample_rate must lie in .*, not 'half'"),
    ],
)
def test_options_of_a_loss_that_can_not_be(loss, option, message):
    with pytest.raises(ValueError, match=f"^--loss {loss}: .*{message}$|{message}[?]"):
        parse(["--loss", loss, "--loss-option", option])
