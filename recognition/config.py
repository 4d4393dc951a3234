"""Settings in insightface's shape: `config`, `default`, `network`, `dataset`, `loss`.

``train.py --config`` takes a file with these names and `generate_config` instead, such as
insightface's users have. `generate_config` merges one loss, one network and one dataset into
`config`, the dataset last; a key that `default` has, too, changes the default of its flag.
"""

from __future__ import annotations

import os

from easydict import EasyDict as edict

from dsoftmax.losses import presets

config = edict()
config.bn_mom = 0.9
config.emb_size = 512
config.ckpt_embedding = True
config.net_se = 0
config.net_act = "prelu"
config.net_unit = 3
config.net_input = 1
config.net_blocks = [1, 4, 6, 2]
config.net_output = "E"
config.net_multiplier = 1.0
config.val_targets = ["lfw", "cfp_fp", "agedb_30"]
config.fc7_lr_mult = 1.0
config.fc7_wd_mult = 1.0
config.max_steps = 0
config.data_rand_mirror = True
config.data_cutoff = 0
config.data_color = 0
config.data_images_filter = 0
config.fp16 = False

default = edict()
default.network = "r100"
default.dataset = "emore"
default.loss = "arcface"
default.pretrained = ""
default.pretrained_epoch = 1
default.frequent = 20
default.verbose = 2000
default.kvstore = "device"
default.lr = 0.1
default.wd = 0.0005
default.mom = 0.9
default.per_batch_size = 128
default.ckpt = 3
default.lr_steps = "100000,160000,220000"
default.models_root = "./models"

network = edict()
for depth in (18, 34, 49, 50, 74, 90, 98, 99, 100, 101, 124, 134, 136, 140, 152, 160, 200, 269):
    network[f"r{depth}"] = edict(net_name="fresnet", num_layers=depth)
network.r100fc = edict(net_name="fresnet", num_layers=100, net_output="FC")
network.r50v1 = edict(net_name="fresnet", num_layers=50, net_unit=1)
network.y1 = edict(net_name="fmobilefacenet", emb_size=128, net_output="GDC")
network.y2 = edict(
    net_name="fmobilefacenet", emb_size=256, net_output="GDC", net_blocks=[2, 8, 16, 4]
)
for depth in (121, 161, 169, 201):
    network[f"d{depth}"] = edict(
        net_name="fdensenet", num_layers=depth, per_batch_size=64, densenet_dropout=0.0
    )
for name, multiplier in {"m1": 1.0, "m05": 0.5}.items():
    network[name] = edict(
        net_name="fmobilenet", emb_size=256, net_output="GDC", net_multiplier=multiplier
    )
for name, multiplier in {"mnas": 1.0, "mnas05": 0.5, "mnas025": 0.25}.items():
    network[name] = edict(
        net_name="fmnasnet", emb_size=256, net_output="GDC", net_multiplier=multiplier
    )
network.vargfacenet = edict(
    net_name="vargfacenet", emb_size=512, net_output="J", net_multiplier=1.25
)
network.tiny = edict(net_name="tiny", emb_size=128, net_output="J", net_act="relu")

dataset = edict()
dataset.emore = edict(
    dataset_path="../datasets/faces_emore", num_classes=85742, image_shape=(112, 112, 3)
)
dataset.retina = edict(
    dataset_path="../datasets/ms1m-retinaface-t1", num_classes=93431, image_shape=(112, 112, 3)
)

# The presets of dsoftmax.losses, with their own options; loss_<option> in an entry changes one.
# In the configuration of a user, an entry may also be insightface's loss_name="margin_softmax".
loss = edict({name: edict(loss_name=name) for name in presets.names()})
# Triplets compare images with each other, and have no class weights.
for name, alpha in {"triplet": 0.3, "atriplet": 0.35}.items():
    loss[name] = edict(
        loss_name=name,
        images_per_identity=5,
        triplet_alpha=alpha,
        triplet_bag_size=7200,
        triplet_max_ap=0.0,
        per_batch_size=60,
        lr=0.05,
    )


def generate_config(_network: str, _dataset: str, _loss: str) -> None:
    """Merge a network, a dataset and a loss into `config`, updating what `default` has, too."""
    for part in (loss[_loss], network[_network], dataset[_dataset]):
        for key, value in part.items():
            config[key] = value
            if key in default:
                default[key] = value
    config.loss, config.network, config.dataset = _loss, _network, _dataset
    config.num_workers = int(os.environ.get("DMLC_NUM_WORKER", 1))
