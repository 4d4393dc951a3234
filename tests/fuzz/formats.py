"""Every format that is read: how to write a sound sample, and how a command reads it.

A new format is one entry in `FORMATS`.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any, Callable, NamedTuple

import cv2
import mxnet as mx
import numpy as np
from scipy.io import savemat

from dsoftmax.eval import gallery, ijb, ijb_protocols, megaface_features, metrics, templates
from dsoftmax.eval.comparison import compare, read_calibration
from dsoftmax.eval.growing_array import GrowingArray
from dsoftmax.eval.megaface import claim_folder
from dsoftmax.eval.models import Model, ModelName, load_model
from dsoftmax.recognition import states
from dsoftmax.recognition.class_files import open_class_weights, open_momenta
from dsoftmax.recognition.class_states import read_class_state
from dsoftmax.recognition.common.arrays import (
    Blocks,
    load_arrays,
    save_arrays,
    write_arrays,
    write_npy,
)
from dsoftmax.recognition.data.folders import read_list
from dsoftmax.recognition.data.identities import read_label_map
from dsoftmax.recognition.data.inspection import find_bad_images
from dsoftmax.recognition.data.packs import PackError, read_pack, write_pack
from dsoftmax.recognition.data.pairs import read_pairs
from dsoftmax.recognition.data.records import Records, RecordWriter, rebuild_index
from dsoftmax.recognition.networks.files import load_parameters
from dsoftmax.recognition.settings import parse
from dsoftmax.tools.launcher.hosts import deal, read_hosts

WIDTH = 8  # of embeddings
SIZE = (16, 16)  # of images
ALGO = "fuzz"


class Format(NamedTuple):
    """A format, or a group of files that are read together.

    Attributes
    ----------
    files : tuple of str
        The names of the files to damage.
    write : callable
        ``write(folder)`` writes a sound sample.
    read : callable
        ``read(folder)`` reads it as a command does; what it returns is compared if `is_checked`.
    flags : bool
        Whether a message may name a flag instead of a file.
    is_checked : bool
        Whether checksums must find every damage: it is refused, or nothing has changed.
    """

    files: tuple[str, ...]
    write: Callable[[str], None]
    read: Callable[[str], Any]
    flags: bool = False
    is_checked: bool = False


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def text(name: str, content: str) -> Callable[[str], None]:
    """Return a function that writes a text file."""

    def write(folder: str) -> None:
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(content)

    return write


def image(number: int = 0) -> bytes:
    coarse = np.random.default_rng(number).integers(0, 256, (4, 4, 3), np.uint8)
    return cv2.imencode(".jpg", cv2.resize(coarse, SIZE))[1].tobytes()


def write_records(folder: str) -> None:
    with RecordWriter(folder, image_size=SIZE) as writer:
        for number in range(6):
            writer.add(number // 2, image(number))
        writer.names = {label: f"person {label}" for label in range(3)}


def read_records(folder: str) -> None:
    records = Records(folder)
    records.labels, records.names, records.num_classes, records.image_size  # noqa: B018
    find_bad_images(records, 1)


def write_unindexed(folder: str) -> None:
    write_records(folder)
    os.unlink(os.path.join(folder, "train.idx"))


def read_unindexed(folder: str) -> None:
    try:
        read_records(folder)
        rebuild_index(folder)
        read_records(folder)
    finally:
        if os.path.exists(index := os.path.join(folder, "train.idx")):
            os.unlink(index)


def write_bin(folder: str) -> None:
    write_pack(
        os.path.join(folder, "val.bin"),
        [image(number) for number in range(4)],
        [True, False],
        [("ann", "ann"), ("ann", "bo")],
    )


def read_bin(folder: str) -> None:
    pack = read_pack(os.path.join(folder, "val.bin"))
    for number in range(len(pack.images)):
        with contextlib.suppress(PackError):  # a broken image is counted
            pack.decode(number)


LISTS = {
    "faces.lst": "1\tann/1.jpg\t0\n0\tbo/1.jpg\t1\t1\t2\t3\t4" + "\t5.5" * 10 + "\n",
    "im2rec.lst": "0\t0.0\tann/1.jpg\n1\t1.0\tbo/1.jpg\n",
    "label.txt": "ann/1.jpg 1 2 3 4" + " 5.5" * 10 + "\nbo/1.jpg 1 2 3 4" + " 6.5" * 10 + "\n",
    "faces.csv": "path,label\nann/1.jpg,ann\nbo/1.jpg,bo\n",
}


def write_lists(folder: str) -> None:
    for name, content in LISTS.items():
        text(name, content)(folder)


def read_lists(folder: str) -> None:
    for name in LISTS:
        read_list(os.path.join(folder, name), folder)


PAIRS = {
    "pairs.txt": "1 2\nAnn 1 2\nAnn 1 Bo 2\n",
    "pairs_label.txt": "ann/1.jpg ann/2.jpg 1\nann/1.jpg bo/1.jpg 0\n",
    "pairs.csv": "first,second,same\nann/1.jpg,ann/2.jpg,1\nann/1.jpg,bo/1.jpg,0\n",
}


def write_pairs(folder: str) -> None:
    for name, content in PAIRS.items():
        text(name, content)(folder)


def read_all_pairs(folder: str) -> None:
    for name in PAIRS:
        read_pairs(os.path.join(folder, name), folder)


def write_agedb(folder: str) -> None:
    splits = np.empty((2, 1), object)
    for fold in range(2):
        pairs = np.empty((2, 2), object)
        for row, column in np.ndindex(2, 2):
            entry = (f"Ann_{row}_{column}", 30)
            pairs[row, column] = np.array(
                [entry], dtype=[("name", object), ("age", object)]
            ).reshape(1, 1)
        splits[fold, 0] = np.array([(pairs,)], dtype=[("pairs", object)]).reshape(1, 1)
    savemat(os.path.join(folder, "pairs.mat"), {"splits": splits})


def write_cfp(folder: str) -> None:
    for letter, kind in (("F", "frontal"), ("P", "profile")):
        lines = "".join(f"{n} ../Data/Images/00{n}/{kind}/01.jpg\n" for n in (1, 2))
        text(f"Protocol/Pair_list_{letter}.txt", lines)(folder)
    text("Protocol/Split/FP/01/same.txt", "1,1\n2,2\n")(folder)
    text("Protocol/Split/FP/01/diff.txt", "1,2\n2,1\n")(folder)


FACES = 6


def write_ijb(folder: str) -> None:
    names = [f"{number}.jpg" for number in range(FACES)]
    points = " ".join(f"{30 + n}.5" for n in range(10))
    content = {
        "name_5pts_score.txt": "".join(f"{name} {points} 0.9\n" for name in names),
        "face_tid_mid.txt": "".join(f"{name} {n // 2} {n}\n" for n, name in enumerate(names)),
        "template_pair_label.txt": "0 1 1\n0 2 0\n",
        "1N_gallery_G1.csv": "TEMPLATE_ID,SUBJECT_ID\n0,7\n",
        "1N_gallery_G2.csv": "TEMPLATE_ID,SUBJECT_ID\n1,8\n",
        "1N_probe_mixed.csv": "TEMPLATE_ID,SUBJECT_ID\n2,7\n",
    }
    for name, lines in content.items():
        text(f"meta/ijbc_{name}", lines)(folder)
    np.save(
        os.path.join(folder, "features.npy"),
        rng().normal(size=(FACES, 2, WIDTH)).astype(np.float32),
    )


def read_ijb(folder: str) -> None:
    results = os.path.join(folder, "results")
    flags = ["--data-dir", folder, "--features", os.path.join(folder, "features.npy")]
    args = ijb.build_parser().parse_args([*flags, "--result-dir", results])
    files = ijb._check_flags(args)
    faces = templates.read_faces(files.path("name_5pts_score.txt"))
    members = templates.read_members(files.path("face_tid_mid.txt"), faces.names)
    features = ijb.read_features(args.features, len(faces.names))
    pooled = templates.pool(features.views, faces.scores, members)
    ijb_protocols.verify_templates(pooled, templates.read_pairs(files.pairs), 1)
    probes = ijb_protocols.read_known_people(files.probes, pooled)
    for name, path in files.galleries.items():
        people = ijb_protocols.read_known_people(path, pooled)
        if np.isin(probes[1], people[1]).any():
            ijb_protocols.search(pooled, people, probes, name)


IJB_FILES = (
    "meta/ijbc_name_5pts_score.txt",
    "meta/ijbc_face_tid_mid.txt",
    "meta/ijbc_template_pair_label.txt",
    "meta/ijbc_1N_gallery_G1.csv",
    "meta/ijbc_1N_probe_mixed.csv",
)


def write_megaface(folder: str) -> None:
    text("facescrub_lst", "ann/1.jpg\nann/2.jpg\n# comment\nbo/1.jpg\n")(folder)
    text("noises.txt", "# noises\n1\t2\tbo/1.jpg\n")(folder)
    text(f"{ALGO}.json", json.dumps({"models": []}))(folder)
    images = megaface_features.ImageSet("facescrub", ["ann/1.jpg", "ann/2.jpg", "bo/1.jpg"])
    for path in images.feature_paths(folder, ALGO):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        feature = metrics.normalized(rng().normal(size=(1, WIDTH)))[0]
        megaface_features.write_feature(path, feature)


def read_megaface(folder: str) -> None:
    listed = megaface_features.read_list(os.path.join(folder, "facescrub_lst"))
    images = megaface_features.ImageSet("facescrub", listed)
    claim_folder(folder, ALGO, [], [images])
    features, numbers = megaface_features.load_features(images, folder, ALGO, 1)
    features, _ = megaface_features.split_mark(features)
    noises = megaface_features.read_noises(os.path.join(folder, "noises.txt"))
    megaface_features.is_noisy([listed[number] for number in numbers], noises)


def write_weights(folder: str) -> None:
    weights = rng().normal(size=(5, WIDTH)).astype(np.float32)
    np.save(os.path.join(folder, "classes.npy"), weights)
    np.save(os.path.join(folder, "momenta.npy"), np.stack([weights, weights]))
    mx.nd.save(os.path.join(folder, "0_centers.param"), [mx.nd.array(weights)])
    save_arrays(os.path.join(folder, "model-0001.params"), {"arg:fc7_weight": weights})


def read_weights(folder: str) -> None:
    for name in ("classes.npy", "0_centers.param", "model-0001.params"):
        for block in open_class_weights(os.path.join(folder, name), 5).blocks():
            np.array(block)
    for rows in open_momenta(os.path.join(folder, "momenta.npy"), 5):
        for block in rows.blocks():
            np.array(block)


def write_model(folder: str) -> None:
    data = mx.sym.var("data")
    body = mx.sym.Convolution((data - 127.5) * 0.0078125, num_filter=4, kernel=(3, 3), name="conv0")
    pooled = mx.sym.Pooling(
        mx.sym.Activation(body, act_type="relu"), kernel=(1, 1), global_pool=True, pool_type="avg"
    )
    symbol = mx.sym.FullyConnected(pooled, num_hidden=WIDTH, name="fc1")
    shapes = {"conv0_weight": (4, 3, 3, 3), "conv0_bias": (4,)}
    shapes.update(fc1_weight=(WIDTH, 4), fc1_bias=(WIDTH,))
    with open(os.path.join(folder, "model-symbol.json"), "w") as file:
        file.write(symbol.tojson())
    draw = rng()
    arrays = {f"arg:{name}": draw.normal(size=shape) for name, shape in shapes.items()}
    save_arrays(
        os.path.join(folder, "model-0000.params"),
        {name: array.astype(np.float32) for name, array in arrays.items()},
    )
    text("config.json", json.dumps({"image_size": SIZE}))(folder)


def read_model(folder: str) -> None:
    embed = load_model(ModelName(os.path.join(folder, "model"), 0), [mx.cpu()])
    embed.name.trained_size()
    embed(np.zeros((1, 3, *SIZE), np.uint8))


def read_pretrained(folder: str) -> None:
    network = mx.gluon.nn.Dense(WIDTH, in_units=4, prefix="fc1_")
    load_parameters(network, os.path.join(folder, "model-0000.params"), mx.cpu())


def write_state(folder: str) -> None:
    path = states.path_of(folder, 3)
    os.makedirs(path)
    weights = rng().normal(size=(5, WIDTH)).astype(np.float32)
    facts = np.frombuffer(b'{"updates": 3}', np.uint8)
    arrays = {
        "backbone.params": {"fc1_weight": weights},
        "momenta.params": {"0": weights},
        "head.states": {"facts": facts, "momentum": weights},
    }
    writer = states.StateWriter(path)
    with writer.file("classes.npy") as file:
        write_npy(file, Blocks(weights.shape, [weights]))
    for name, content in arrays.items():
        with writer.file(name) as file:
            write_arrays(file, content)
    facts = {"step": 3, "epoch": 0, "images_seen": 0, "settings": {"loss": "dsoftmax"}}
    writer.describe({**facts, "num_classes": 5, "embedding_size": WIDTH})


def read_state(folder: str) -> Any:
    path = states.find_sound_state(folder)
    state = read_class_state(path)
    parameters = [load_arrays(os.path.join(path, name)) for name in states.FILES[:2]]
    for block in open_class_weights(folder).blocks():
        np.array(block)
    return (
        state.facts,
        state.saved.facts,
        [[(key, value.asnumpy().tobytes()) for key, value in part.items()] for part in parameters],
        [
            (key, [np.array(block).tobytes() for block in rows.blocks()])
            for key, rows in state.classes.items()
        ],
    )


def write_old_state(folder: str) -> None:
    """Write a state as early versions did, without checksums."""
    write_state(folder)
    path = os.path.join(states.path_of(folder, 3), states.DESCRIPTION)
    with open(path) as file:
        facts = json.load(file)
    del facts["checksums"]
    with open(path, "w") as file:
        json.dump(facts, file)


STATE_FILES = tuple(f"state-00000003/{name}" for name in (*states.FILES, states.DESCRIPTION))

CONFIG = """
from easydict import EasyDict as edict

config = edict()
config.bn_mom = 0.9
config.emb_size = 256
config.net_act = "prelu"
config.net_output = "E"
config.net_blocks = [1, 4, 6, 2]
config.val_targets = ["lfw"]
config.max_steps = 0
default = edict()
default.network = "r50"
default.dataset = "mine"
default.loss = "arcface"
default.lr = 0.1
default.lr_steps = "100000,160000"
default.kvstore = "device"
default.per_batch_size = 64
default.ckpt = 2
network = edict()
network.r50 = edict(net_name="fresnet", num_layers=50)
dataset = edict()
dataset.mine = edict(dataset_path="/data/mine", num_classes=100, image_shape=(112, 112, 3))
loss = edict()
loss.arcface = edict(loss_name="margin_softmax", loss_s=64.0, loss_m1=1.0, loss_m2=0.5, loss_m3=0.0)


def generate_config(_network, _dataset, _loss):
    for part in (loss[_loss], network[_network], dataset[_dataset]):
        for k, v in part.items():
            config[k] = v
            if k in default:
                default[k] = v
    config.loss, config.network, config.dataset = _loss, _network, _dataset
"""

FLAGS = """--network
r50
--loss
dsoftmax_k
--dataset
mine
--data-dir
/data/mine
--sample-rate
0:1/64,20000:1
--lr
0.1
--lr-steps
100000,160000
--per-batch-size
64
--loss-option
d=0.9
--seed
5
--emb-size
256
--image-size
112,112
--kvstore
device
--devices
cpu
--max-steps
100
--scale
32
--pretrained
models/y1/model,0
--class-dtype
float32
--accumulate
2
"""


def read_flags(folder: str) -> None:
    with open(os.path.join(folder, "flags"), encoding="utf-8", errors="surrogateescape") as file:
        parse(file.read().split("\n")[:-1])


def write_calibration(folder: str) -> None:
    write_model(folder)
    name = ModelName(os.path.join(folder, "model"), 0)
    entry = {
        "target": "lfw",
        "model": str(name),
        "digest": name.digest(),
        "pairs": 80,
        "same": 30,
        "cosine_threshold": 0.31,
        "highest_impostor": 0.6,
        "calibration": [{"far": 0.1, "cosine": 0.3}, {"far": 0.01, "cosine": 0.5}],
        "roc": {"far": [0.0, 0.5, 1.0], "tar": [0.1, 0.9, 1.0], "threshold": [0.7, 0.2, None]},
    }
    text("results.json", json.dumps({"results": [entry]}))(folder)


def read_results(folder: str) -> None:
    name = ModelName(os.path.join(folder, "model"), 0)
    calibration = read_calibration(os.path.join(folder, "results.json"), name)
    str(calibration.threshold())
    compare(np.eye(3), calibration.threshold(), calibration)


class FakeModel(Model):
    """Embeds images by their first pixels."""

    def __call__(self, images: np.ndarray) -> np.ndarray:
        return images.reshape(len(images), -1)[:, :WIDTH].astype(np.float32) + 1


def write_gallery(folder: str) -> None:
    write_model(folder)
    embed = FakeModel(ModelName(os.path.join(folder, "model"), 0))
    for number, name in enumerate(("ann/1.jpg", "ann/2.jpg", "bo/1.jpg")):
        path = os.path.join(folder, "people", name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(image(number))
    gallery.build(
        os.path.join(folder, "gallery"), os.path.join(folder, "people"), embed, SIZE, threads=1
    )


def read_gallery(folder: str) -> None:
    opened = gallery.Gallery(os.path.join(folder, "gallery"))
    opened.check(ModelName(os.path.join(folder, "model"), 0))
    opened.search(np.eye(2, WIDTH, dtype=np.float32), 2)


GALLERY_FILES = ("gallery.json", "part-0.vectors.npy", "part-0.scales.npy", "part-0.csv")


def write_partial(folder: str) -> None:
    rows = GrowingArray(*(os.path.join(folder, name) for name in ("rows.npy", "rows.json")), 5)
    rows.open((WIDTH,))
    rows.append(np.ones((2, WIDTH)), unreadable=[(1, "why")])
    rows.close()


def read_partial(folder: str) -> None:
    paths = [os.path.join(folder, name) for name in ("rows.npy", "rows.json")]
    before = [open(path, "rb").read() for path in paths]  # noqa: SIM115
    try:
        rows = GrowingArray(*paths, 5)
        rows.open((WIDTH,))
        rows.append(np.ones((5 - rows.done, WIDTH)), unreadable=[])
        rows.close()
        assert np.load(paths[0]).shape == (5, WIDTH)
    finally:
        for path, content in zip(paths, before):
            with open(path, "wb") as file:
                file.write(content)


def at(name: str, read: Callable[..., Any], *others: Any) -> Callable[[str], Any]:
    """Return a function that reads one file of a folder."""
    return lambda folder: read(os.path.join(folder, name), *others)


FORMATS = {
    "rec": Format(("train.rec",), write_records, read_records),
    "rec without idx": Format(("train.rec",), write_unindexed, read_unindexed),
    "idx": Format(("train.idx",), write_records, read_records),
    "property": Format(("property",), write_records, read_records),
    "identities.csv": Format(("identities.csv",), write_records, read_records),
    "label map": Format(
        ("map.csv",),
        text("map.csv", "old_label,label,images\n0,1,2\n1,0,3\n"),
        at("map.csv", read_label_map),
    ),
    "lists": Format(tuple(LISTS), write_lists, read_lists),
    "bin": Format(("val.bin", "val.people.csv"), write_bin, read_bin),
    "pairs": Format(tuple(PAIRS), write_pairs, read_all_pairs),
    "pairs of AgeDB": Format(
        ("pairs.mat",),
        write_agedb,
        lambda folder: read_pairs(os.path.join(folder, "pairs.mat"), folder),
    ),
    "pairs of CFP": Format(
        ("Protocol/Pair_list_F.txt", "Protocol/Split/FP/01/same.txt"),
        write_cfp,
        lambda folder: read_pairs(os.path.join(folder, "Protocol/Split/FP"), folder),
    ),
    "ijb": Format(IJB_FILES, write_ijb, read_ijb),
    "ijb features": Format(("features.npy",), write_ijb, read_ijb),
    "megaface": Format(
        ("facescrub_lst", "noises.txt", f"{ALGO}.json"), write_megaface, read_megaface
    ),
    "megaface features": Format(
        (f"facescrub/ann/1.jpg_{ALGO}.bin",), write_megaface, read_megaface
    ),
    "class weights": Format(
        ("classes.npy", "momenta.npy", "0_centers.param", "model-0001.params"),
        write_weights,
        read_weights,
    ),
    "params": Format(("model-0000.params",), write_model, read_model),
    "pretrained params": Format(("model-0000.params",), write_model, read_pretrained),
    "symbol": Format(("model-symbol.json", "config.json"), write_model, read_model),
    "states": Format(STATE_FILES, write_state, read_state, is_checked=True),
    "states without checksums": Format(STATE_FILES, write_old_state, read_state),
    "config": Format(
        ("config.py",),
        text("config.py", CONFIG),
        lambda folder: parse(["--config", os.path.join(folder, "config.py")]),
        flags=True,
    ),
    "flags": Format(("flags",), text("flags", FLAGS), read_flags, flags=True),
    "hosts": Format(
        ("hosts",),
        text("hosts", "10.0.0.1 slots=2\nann@host2  # comment\nhost3\n"),
        lambda folder: deal(read_hosts(os.path.join(folder, "hosts")), 1, 3),
    ),
    "calibration": Format(("results.json",), write_calibration, read_results),
    "gallery": Format(
        tuple(f"gallery/{name}" for name in GALLERY_FILES), write_gallery, read_gallery
    ),
    "partial embeddings": Format(("rows.npy", "rows.json"), write_partial, read_partial),
}
