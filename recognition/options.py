"""The flags of ``train.py``, and the settings of a run they make together with a configuration.

Flags are read twice, as insightface does: network, dataset and loss first, because these change the
defaults of the others.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import math
import os
from dataclasses import asdict, dataclass, field
from typing import Any, Mapping

from easydict import EasyDict

from dsoftmax import losses
from dsoftmax.losses.presets import STORES
from dsoftmax.recognition import config as shipped
from dsoftmax.recognition import networks
from dsoftmax.recognition.common.cli import default_threads, image_size, rate
from dsoftmax.recognition.estimate import sampled_share
from dsoftmax.recognition.networks.zoo import PREFIX as GLUONCV
from dsoftmax.recognition.schedule import MODES

MARGIN_SOFTMAX = "margin_softmax"
FP16_SCALE = 128.0  # where a configuration says fp16 and no flag says more
# What a configuration calls the options of a loss, where it is not loss_<option>.
LOSS_KEYS = {"loss_s": "scale"}
PARTS = ("config", "default", "network", "dataset", "loss", "generate_config")
NO_MARGIN = {"scale": 64.0, "m1": 1.0, "m2": 0.0, "m3": 0.0}
MUST, AUTO = "must", "auto"  # of --resume
MANY_CLASSES = 10_000  # from so many on, several devices share the class weights by default


@dataclass(frozen=True)
class Settings:
    """All that decides what a run does."""

    network: str
    loss: str
    dataset: str
    data_dir: str
    architecture: str  # what `networks.create` calls the network
    network_options: dict[str, Any] = field(default_factory=dict)
    embedding_size: int = 512
    loss_options: dict[str, Any] = field(default_factory=dict)
    num_classes: int = 0  # 0: as many as the data have
    image_size: tuple[int, int] | None = None  # None: as the data's
    val_targets: tuple[str, ...] = ()
    devices: str | None = None
    kvstore: str = "device"
    per_batch_size: int = 128
    class_parallel: bool | None = None
    store: str = "device"
    chunk: int | None = None
    lr: float = 0.1
    lr_schedule: str = "step"
    lr_steps: tuple[int, ...] = ()
    warmup_steps: int = 0
    wd: float = 5e-4
    mom: float = 0.9
    fc7_lr_mult: float = 1.0
    fc7_wd_mult: float = 1.0
    clip_gradient: float = 0.0
    fp16_scale: float = 0.0
    max_steps: int = 0
    end_epoch: int = 0  # 0: no end
    seed: int = 0
    mirror: bool = True
    color: int = 0
    cutoff: int = 0
    images_filter: int = 0
    threads: int = 2
    pretrained: str = ""
    freeze_backbone: bool = False
    init_classes: str = "normal"
    sync_bn: bool = False
    models_root: str = "./models"
    extra_model_name: str = ""
    resume: str = ""  # or MUST, or AUTO
    ckpt: int = 3
    keep: int = 2
    frequent: int = 20
    verbose: int = 2000
    tensorboard: bool = False

    @property
    def folder(self) -> str:
        """Where all files of the run go."""
        extra = f"-{self.extra_model_name}" if self.extra_model_name else ""
        name = f"{self.network}-{self.loss}-{self.dataset}{extra}".replace(":", "_")
        return os.path.join(self.models_root, name)

    @property
    def prefix(self) -> str:
        """What its model files begin with."""
        return os.path.join(self.folder, "model")

    def as_json(self) -> dict[str, Any]:
        """Return all settings as JSON can hold them."""
        return asdict(self)


def load_config(path: str | None) -> Any:
    """Return a user's own configuration, or ours, as nobody has changed it yet."""
    if path and not os.path.isfile(path):
        raise FileNotFoundError(f"--config {path}: there is no such file")
    importlib.reload(shipped)  # to merge a run's choices changes it, also if a user's imports it
    module = _execute(path) if path else shipped
    missing = [name for name in PARTS if not hasattr(module, name)]
    if missing:
        raise ValueError(f"--config {path}: it has no {', '.join(missing)}")
    for name in ("network", "loss"):  # ours beside the user's, who has the last word
        for key, value in getattr(shipped, name).items():
            getattr(module, name).setdefault(key, value)
    return module


def _execute(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("dsoftmax_run_config", path)
    if spec is None:
        raise ValueError(f"--config {path}: it is no Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (SyntaxError, NameError, TypeError, AttributeError) as error:
        raise ValueError(f"--config {path}: {error}") from None
    return module


def parse(argv: list[str] | None = None) -> Settings:
    """Turn flags into the settings of a run."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _add_choices(first, shipped)
    chosen, _ = first.parse_known_args(argv)
    module = load_config(chosen.config)
    for flag in ("network", "dataset", "loss"):
        setattr(chosen, flag, getattr(chosen, flag) or module.default[flag])
    dataset = chosen.dataset
    if chosen.data_dir and dataset not in module.dataset:
        module.dataset[dataset] = EasyDict(dataset_path=chosen.data_dir)
    if chosen.network.startswith(GLUONCV):
        module.network[chosen.network] = EasyDict(net_name=chosen.network)
    for flag, table in (
        ("network", module.network),
        ("dataset", module.dataset),
        ("loss", module.loss),
    ):
        _check_name(flag, getattr(chosen, flag), table)
    module.generate_config(chosen.network, dataset, chosen.loss)
    parser = build_parser(module)
    args = parser.parse_args(argv)
    for flag in ("network", "dataset", "loss"):
        setattr(args, flag, getattr(chosen, flag))
    return _settings(args, module.config)


def _check_name(flag: str, name: str, legal: Mapping) -> None:
    if name not in legal:
        near = difflib.get_close_matches(name, legal, n=3)
        hint = f", did you mean {' or '.join(near)}?" if near else "."
        more = " (or give --data-dir)" if flag == "dataset" else ""
        raise ValueError(
            f"--{flag}: there is no {name!r}{hint} Legal are {', '.join(sorted(legal))}{more}"
        )


def _add_choices(parser: argparse.ArgumentParser, module: Any) -> None:
    default = module.default
    parser.add_argument("--config", help="a configuration of your own, as insightface's config.py")
    parser.add_argument(
        "--network",
        help=f"{', '.join(module.network)} or gluoncv:<name>; {default.network}",
    )
    parser.add_argument(
        "--dataset",
        help=f"{', '.join(module.dataset)}, or any name with --data-dir; {default.dataset}",
    )
    parser.add_argument("--loss", help=f"{', '.join(module.loss)}; {default.loss}")
    parser.add_argument("--data-dir", help="the dataset's folder; as configured")


def build_parser(module: Any = shipped) -> argparse.ArgumentParser:
    """Describe the command line, with the defaults of a configuration."""
    config, default = module.config, module.default
    parser = argparse.ArgumentParser(
        prog="train",
        allow_abbrev=False,  # `--d` is a flag, and would stand for --data-dir
        description="Train a face embedding: insightface's flags, its datasets, our losses.",
    )
    _add_choices(parser, module)

    def add(flag: str, value: Any, text: str, kind: Any = None, **more: Any) -> None:
        kind = kind or type(value)
        parser.add_argument(flag, type=kind, default=value, help=f"{text}; %(default)s", **more)

    add("--models-root", default.models_root, "where runs go")
    add("--extra-model-name", "", "appended to the run's name")
    add("--per-batch-size", default.per_batch_size, "images a device and step")
    add("--lr", default.lr, "learning rate")
    add("--lr-schedule", "step", "how it changes", choices=MODES)
    add("--lr-steps", str(default.lr_steps), "steps from which on it is a tenth", _steps)
    add("--warmup-steps", 0, "steps in which it grows from 0")
    add("--wd", default.wd, "weight decay, of all parameters")
    add("--mom", default.mom, "momentum")
    add("--clip-gradient", 0.0, "longest gradient of the network; 0 is any")
    add("--max-steps", int(config.get("max_steps", 0)), "steps to train; 0 is by --end-epoch")
    add("--end-epoch", 0, "epochs to train; 0 is without end")
    add("--seed", 0, "of everything that is drawn")
    add("--frequent", default.frequent, "steps between lines of the log")
    add("--verbose", default.verbose, "steps between verifications and saved states")
    add(
        "--ckpt", default.ckpt, "models kept: 0 the last, 1 and 3 the best, 2 all", choices=range(4)
    )
    add("--keep", 2, "training states kept")
    add("--pretrained", default.pretrained, "prefix[,epoch] of a model to begin with")
    add("--pretrained-epoch", default.pretrained_epoch, "its epoch, if not in --pretrained")
    add("--init-classes", "normal", "first class weights", choices=("normal", "mean"))
    add(
        "--kvstore",
        default.kvstore,
        "how devices share gradients; dist_sync: many processes on parameter servers",
        choices=("device", "local", "dist_sync"),
    )
    add("--fp16-scale", 0.0, "> 0: a float16 network, its loss scaled by this; for GPUs")
    parser.add_argument(
        "--store",
        choices=STORES,
        help="where class weights are; device, but server for sampled classes with dist_sync",
    )
    add("--rand-mirror", int(config.get("data_rand_mirror", 1)), "mirror at random", choices=(0, 1))
    add("--color", int(config.get("data_color", 0)), "jitter of colours: 0, 1 or 2")
    add("--cutoff", int(config.get("data_cutoff", 0)), "side of a square left blank at random")
    add("--images-filter", int(config.get("data_images_filter", 0)), "fewest images of an identity")
    add("--threads", default_threads(), "to decode images on")
    parser.add_argument(
        "--resume",
        nargs="?",
        choices=(MUST, AUTO),
        const=MUST,
        default="",
        help="go on from the newest saved state; auto: or begin a new run where none was saved yet",
    )
    parser.add_argument("--freeze-backbone", action="store_true", help="train class weights alone")
    parser.add_argument("--sync-bn", action="store_true", help="BatchNorm over all devices")
    parser.add_argument("--tensorboard", action="store_true", help="needs the extra tensorboard")
    parser.add_argument("--devices", help="cpu, cpu:2, gpu:8; by default CUDA_VISIBLE_DEVICES")
    parser.add_argument(
        "--class-parallel",
        type=int,
        choices=(0, 1),
        nargs="?",
        const=1,
        help="split class weights over the devices; by default if they are many",
    )
    parser.add_argument("--chunk", type=int, help="classes at a time, to save memory")
    parser.add_argument("--num-classes", type=int, help="by default of `property` or the data")
    parser.add_argument("--image-size", type=image_size, help="height,width; the data's own")
    parser.add_argument("--emb-size", type=int, help="width of the embedding")
    parser.add_argument("--target", help="names of .bin files to verify on, with commas")
    for flag, kind in (
        ("scale", float),
        ("d", float),
        ("m1", float),
        ("m2", float),
        ("m3", float),
        ("sample-rate", rate),
    ):
        parser.add_argument(f"--{flag}", type=kind, help="of the loss")
    parser.add_argument(
        "--correction", choices=("none", "logq"), help="of the loss with sampled classes"
    )
    # train_parall's, which say what CUDA_VISIBLE_DEVICES and --class-parallel say here
    parser.add_argument("--worker-id", type=int, default=0, help=argparse.SUPPRESS)
    return parser


def _steps(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"steps are numbers like 100000,160000, not {text!r}"
        ) from None


def loss_of(name: str, entry: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the preset and its options that an entry of `loss` in a configuration means."""
    known = entry.get("loss_name", name)
    options = {
        LOSS_KEYS.get(key, key[len("loss_") :]): value
        for key, value in entry.items()
        if key.startswith("loss_") and key != "loss_name"
    }
    if known == MARGIN_SOFTMAX:
        return "combined", {**NO_MARGIN, **options}
    if known not in losses.names():
        raise ValueError(
            f"--loss {name}: its loss_name {known!r} is none of {MARGIN_SOFTMAX}, "
            f"{', '.join(losses.names())}"
        )
    return known, options


def _architecture(name: str, config: Mapping[str, Any]) -> str:
    """Return our name of a network that a configuration may call by one of its own."""
    if name in networks.names() or name.startswith(GLUONCV):
        return name
    kind = config.get("net_name")
    found = {"fresnet": f"r{config.get('num_layers')}", "fmobilefacenet": "y1"}.get(kind, kind)
    if found not in networks.names():
        raise ValueError(
            f"--network {name}: its net_name {kind!r} with num_layers {config.get('num_layers')} "
            f"is no network here; legal are {', '.join(networks.names())}"
        )
    return found


NETWORK_KEYS = {
    "net_se": "se",
    "net_act": "act",
    "net_unit": "unit",
    "net_input": "input",
    "net_output": "output",
    "net_multiplier": "multiplier",
    "net_blocks": "blocks",
    "bn_mom": "bn_momentum",
}


# The least each flag may be; "more" than it where the last is True.
LEAST = (
    ("per_batch_size", 1, False),
    ("verbose", 1, False),
    ("frequent", 1, False),
    ("keep", 1, False),
    ("threads", 1, False),
    ("max_steps", 0, False),
    ("end_epoch", 0, False),
    ("warmup_steps", 0, False),
    ("seed", 0, False),
    ("wd", 0, False),
    ("mom", 0, False),
    ("clip_gradient", 0, False),
    ("fp16_scale", 0, False),
    ("emb_size", 1, False),
    ("num_classes", 1, False),
    ("chunk", 1, False),
    ("color", 0, False),
    ("cutoff", 0, False),
    ("images_filter", 0, False),
    ("lr", 0, True),
)


def _check_numbers(args: argparse.Namespace) -> None:
    if args.seed >= 1 << 32:
        raise ValueError(f"--seed must be below {1 << 32}, not {args.seed}")
    for name, least, is_open in LEAST:
        value = getattr(args, name)
        if value is None:
            continue
        if not math.isfinite(value) or not (value > least if is_open else value >= least):
            raise ValueError(
                f"--{name.replace('_', '-')} must be {'above' if is_open else 'at least'} {least}, "
                f"not {value}"
            )


def _settings(args: argparse.Namespace, config: Mapping[str, Any]) -> Settings:
    _check_numbers(args)
    preset, loss_options = loss_of(args.loss, config)
    flags = ("scale", "d", "m1", "m2", "m3", "sample_rate")
    loss_options.update({k: getattr(args, k) for k in flags if getattr(args, k) is not None})
    if args.correction:
        loss_options["correction"] = None if args.correction == "none" else args.correction
    architecture = _architecture(args.network, config)
    legal = networks.options_of(architecture)
    network_options = {
        ours: config[theirs]
        for theirs, ours in NETWORK_KEYS.items()
        if theirs in config and ours in legal
    }
    pretrained = args.pretrained
    if pretrained and not pretrained.rpartition(",")[2].strip().isdigit():
        pretrained = f"{pretrained},{args.pretrained_epoch}"
    targets = args.target.split(",") if args.target else config.get("val_targets", ())
    shape = config.get("image_shape")
    parallel = args.class_parallel
    store = args.store
    if store is None:
        is_sampled = sampled_share(preset, loss_options) is not None
        store = "server" if args.kvstore == "dist_sync" and is_sampled else "device"
    return Settings(
        network=args.network,
        loss=args.loss,
        dataset=args.dataset,
        data_dir=args.data_dir or config["dataset_path"],
        architecture=architecture,
        network_options=network_options,
        embedding_size=args.emb_size or config["emb_size"],
        loss_options={"preset": preset, **loss_options},
        num_classes=args.num_classes or (0 if args.data_dir else config.get("num_classes", 0)),
        image_size=args.image_size or (tuple(shape[:2]) if shape and not args.data_dir else None),
        val_targets=tuple(targets),
        devices=args.devices,
        kvstore=args.kvstore,
        per_batch_size=args.per_batch_size,
        class_parallel=None if parallel is None else bool(parallel),
        store=store,
        chunk=args.chunk,
        lr=args.lr,
        lr_schedule=args.lr_schedule,
        lr_steps=args.lr_steps,
        warmup_steps=args.warmup_steps,
        wd=args.wd,
        mom=args.mom,
        fc7_lr_mult=config.get("fc7_lr_mult", 1.0),
        fc7_wd_mult=config.get("fc7_wd_mult", 1.0),
        clip_gradient=args.clip_gradient,
        fp16_scale=args.fp16_scale or (FP16_SCALE if config.get("fp16") else 0.0),
        max_steps=args.max_steps,
        end_epoch=args.end_epoch,
        seed=args.seed,
        mirror=bool(args.rand_mirror),
        color=args.color,
        cutoff=args.cutoff,
        images_filter=args.images_filter,
        threads=args.threads,
        pretrained=pretrained,
        freeze_backbone=args.freeze_backbone,
        init_classes=args.init_classes,
        sync_bn=args.sync_bn,
        models_root=args.models_root,
        extra_model_name=args.extra_model_name,
        resume=args.resume,
        ckpt=args.ckpt,
        keep=args.keep,
        frequent=args.frequent,
        verbose=args.verbose,
        tensorboard=args.tensorboard,
    )
