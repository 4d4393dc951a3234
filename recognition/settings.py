"""The settings of a run, which its flags and a configuration make together.

Flags are read twice, as insightface does: network, dataset and loss first, because these change the
defaults of the others.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, field, make_dataclass
from typing import TYPE_CHECKING, Any, Iterator, Mapping

from easydict import EasyDict

from dsoftmax.losses import presets
from dsoftmax.losses.presets import LossSpec
from dsoftmax.losses.stores import default_store, find_store
from dsoftmax.recognition.common.checks import did_you_mean
from dsoftmax.recognition.common.preflight import check_mxnet
from dsoftmax.recognition.configuration import load_config, merge, notes_on_keys
from dsoftmax.recognition.flags import FLAGS, build_parser, check_ranges, parse_first

if TYPE_CHECKING:
    from dsoftmax.losses.triplet import TripletSpec

MARGIN_SOFTMAX = "margin_softmax"
NO_MARGIN = {"m1": 1, "m2": 0, "m3": 0}  # where a margin_softmax of a configuration has no such key
# What a configuration calls the options of a loss, where it is not loss_<option>.
LOSS_KEYS = {"loss_s": "scale", "loss_K": "subcentres"}
SELF_CHECKED = ("d", "sample_rate")  # options of losses that take more than a number
TRIPLET_KEYS = {
    "triplet_alpha": "alpha",
    "triplet_bag_size": "bag_size",
    "triplet_max_ap": "max_ap",
    "images_per_identity": "images_per_identity",
}
# Flags about class weights, and the value of each that asks for nothing.
CLASS_FLAGS = {
    "class_parallel": None,
    "store": None,
    "class_dtype": "float32",
    "chunk": None,
    "init_classes": "normal",
    "class_weights": "",
    "freeze_backbone": False,
}
# Other keys of a configuration that are read below; `generate_config` adds the last four.
OTHER_KEYS = (
    *("emb_size", "net_name", "num_layers", "loss_name", "fc7_lr_mult", "fc7_wd_mult", "fp16"),
    "ckpt_embedding",
    *("dataset_path", "num_classes", "image_shape", "val_targets"),
    *("network", "dataset", "loss", "num_workers"),
)
# insightface's kinds of networks, and what is here; {} is the number of layers.
ARCHITECTURES = {
    "fresnet": "r{}",
    "fmobilefacenet": "y1",
    "fdensenet": "d{}",
    "fmobilenet": "m1",
    "fmnasnet": "mnas",
}
ONE_WIDTH = ("fresnet", "fmobilefacenet")  # whose net_multiplier insightface ignores
# What a configuration calls the options of a network.
NETWORK_KEYS = {
    "net_se": "se",
    "net_act": "act",
    "net_unit": "unit",
    "net_input": "input",
    "net_output": "output",
    "net_multiplier": "multiplier",
    "net_blocks": "blocks",
    "densenet_dropout": "densenet_dropout",
    "bn_mom": "bn_momentum",
}
PRETRAINED_EPOCH = 1  # insightface's default, which stands for none given
FP16_SCALE = 128.0  # where a configuration says fp16 and no flag says more
# The settings that no single flag makes.
DERIVED = {
    "architecture": str,  # what `networks.create` calls the network
    "network_options": dict,
    "loss_options": dict,  # every option of the loss, and its name under "preset"
    "fc7_lr_mult": float,  # learning rate and weight decay of class weights, times this
    "fc7_wd_mult": float,
    "ckpt_embedding": bool,  # whether models end at the embedding, without class weights
}


class _Settings:
    """Everything that decides what a run does: a field per flag with one, and those of `DERIVED`.

    0 stands for "as the data have it" in `num_classes` and for "no end" in `max_steps` and
    `end_epoch`; None for "as the data have it" in `image_size`. `notes` are lines for the log,
    about a configuration; they decide nothing.
    """

    @property
    def folder(self) -> str:
        """The folder of all files of the run."""
        extra = f"-{self.extra_model_name}" if self.extra_model_name else ""
        name = f"{self.network}-{self.loss}-{self.dataset}{extra}".replace(":", "_")
        return os.path.join(self.models_root, name)

    @property
    def prefix(self) -> str:
        """The path that its model files begin with."""
        return os.path.join(self.folder, "model")

    def loss_spec(self) -> LossSpec | TripletSpec:
        """Return the loss with all of its options."""
        from dsoftmax.losses import triplet  # late, because it imports MXNet

        options = {key: value for key, value in self.loss_options.items() if key != "preset"}
        name = self.loss_options["preset"]
        find = triplet.resolve if name in triplet.TITLES else presets.resolve
        return find(name, options)

    def as_json(self) -> dict[str, Any]:
        """Return all settings as JSON can hold them."""
        settings = asdict(self)
        del settings["notes"]
        return settings


Settings = make_dataclass(
    "Settings",
    [
        *((flag.field, Any) for flag in FLAGS if flag.field),
        *DERIVED.items(),
        ("notes", tuple, field(default=(), compare=False)),
    ],
    bases=(_Settings,),
    namespace={"__doc__": _Settings.__doc__, "__module__": __name__},
    frozen=True,
)


def parse(argv: list[str] | None = None) -> Settings:
    """Turn the flags of a command line into the settings of a run."""
    first = parse_first(argv)
    module = load_config(first.config, vars(first))
    for flag in ("network", "dataset", "loss"):
        setattr(first, flag, getattr(first, flag) or module.default[flag])
    if first.data_dir:
        module.dataset.setdefault(first.dataset, EasyDict(dataset_path=first.data_dir))
    if ":" in first.network:  # a network of another library, which `networks` finds or refuses
        module.network[first.network] = EasyDict(net_name=first.network)
    for flag in ("network", "dataset", "loss"):
        _check_name(flag, getattr(first, flag), getattr(module, flag))
    merge(module, first)
    args = build_parser(module).parse_args(argv)
    for flag in ("network", "dataset", "loss"):
        setattr(args, flag, getattr(first, flag))
    check_ranges(args)
    if args.pretrained_epoch is None and module.default["pretrained_epoch"] != PRETRAINED_EPOCH:
        args.pretrained_epoch = module.default["pretrained_epoch"]
    return _settle(args, module)


def _check_name(flag: str, name: str, legal: Mapping) -> None:
    if name not in legal:
        more = " (or give --data-dir)" if flag == "dataset" else ""
        raise ValueError(f"--{flag}: there is no {name!r}{did_you_mean(name, sorted(legal))}{more}")


def _settle(args: argparse.Namespace, module: Any) -> Settings:
    """Make the settings of flags and a configuration that are merged already."""
    check_mxnet()  # networks and losses know their options by their code, which imports it
    config = module.config
    values = {flag.field: getattr(args, flag.dest) for flag in FLAGS if flag.field}
    values.update(_data_settings(args, config))
    values.update(_network_settings(args, config))
    values.update(_loss_settings(args, config, module.loss[args.loss]))
    if args.config:
        values["notes"] = tuple(_notes_on_configuration(values, module))
    return Settings(**values)


def _notes_on_configuration(values: Mapping[str, Any], module: Any) -> Iterator[str]:
    """Yield lines about what a user's configuration sets in vain."""
    options = [option for option in values["loss_options"] if option != "preset"]
    margins = NO_MARGIN if module.config.get("loss_name") == MARGIN_SOFTMAX else ()
    read = {
        *NETWORK_KEYS,
        *OTHER_KEYS,
        *LOSS_KEYS,
        *TRIPLET_KEYS,
        *(f"loss_{option}" for option in (*options, *margins)),
        *(flag.configured.partition(".")[2] for flag in FLAGS),
        "pretrained_epoch",
    }
    yield from notes_on_keys({"config": module.config, "default": module.default}, read)
    multiplier = module.config.net_multiplier
    if multiplier != 1 and "multiplier" not in values["network_options"]:
        yield (
            f"note: config.net_multiplier = {multiplier} does nothing to {values['network']}, as "
            "in insightface"
        )


def _data_settings(args: argparse.Namespace, config: Mapping[str, Any]) -> dict[str, Any]:
    # The numbers of a configured dataset do not hold for the data of another folder.
    configured = {} if args.data_dir else config
    shape = configured.get("image_shape")
    targets = args.target.split(",") if args.target else config.get("val_targets", ())
    if not args.data_dir and "dataset_path" not in config:
        raise ValueError(
            f"--dataset {args.dataset}: its entry in the configuration has no dataset_path: add "
            "it, or give --data-dir"
        )
    return {
        "data_dir": args.data_dir or config["dataset_path"],
        "num_classes": args.num_classes or configured.get("num_classes", 0),
        "image_size": args.image_size or (tuple(shape[:2]) if shape else None),
        "val_targets": tuple(targets),
        "mirror": bool(args.rand_mirror),
    }


def _network_settings(args: argparse.Namespace, config: Mapping[str, Any]) -> dict[str, Any]:
    from dsoftmax.recognition import networks

    architecture = _architecture(args.network, config)
    legal = set(networks.options_of(architecture))
    if config.get("net_name") in ONE_WIDTH:
        legal.discard("multiplier")
    pretrained = args.pretrained
    if pretrained and args.pretrained_epoch is not None and split_epoch(pretrained)[1] is None:
        pretrained = f"{pretrained},{args.pretrained_epoch}"
    return {
        "architecture": architecture,
        "network_options": {
            ours: config[theirs]
            for theirs, ours in NETWORK_KEYS.items()
            if theirs in config and ours in legal
        },
        "embedding_size": args.emb_size or config["emb_size"],
        "pretrained": pretrained,
        "fp16_scale": args.fp16_scale or (FP16_SCALE if config.get("fp16") else 0.0),
    }


def split_epoch(text: str) -> tuple[str, int | None]:
    """Split ``prefix,epoch``; None for an epoch that is left out."""
    prefix, _, epoch = text.rpartition(",")
    return (prefix, int(epoch)) if epoch.strip().isdigit() and prefix else (text, None)


def _architecture(name: str, config: Mapping[str, Any]) -> str:
    """Return our name of the network that a configuration describes.

    Its entry decides, not its name: a user's r50 may have another number of layers than ours.
    """
    from dsoftmax.recognition import networks
    from dsoftmax.recognition.networks.zoo import PREFIX as GLUONCV

    kind, layers = config.get("net_name", name), config.get("num_layers")
    known = ARCHITECTURES.get(kind, kind).format(layers)
    if known not in networks.names() and not known.startswith(GLUONCV):
        raise ValueError(
            f"--network {name}: there is no network of net_name {kind!r} with num_layers {layers}; "
            f"legal are {', '.join(networks.names())} and {GLUONCV}<name>"
        )
    return known


def _loss_settings(
    args: argparse.Namespace, config: Mapping[str, Any], entry: Mapping[str, Any]
) -> dict[str, Any]:
    from dsoftmax.losses import triplet  # late, because it imports MXNet

    given = {
        flag.dest: getattr(args, flag.dest)
        for flag in FLAGS
        if flag.is_loss_option and getattr(args, flag.dest) is not None
    }
    if given.get("correction") == "none":
        given["correction"] = None
    given.update(args.loss_option or ())
    if config.get("loss_name", args.loss) in triplet.TITLES:
        return _triplet_settings(args, config, given)
    try:
        loss = presets.resolve(*loss_of(args.loss, config, entry, given))
    except (TypeError, ValueError) as error:  # an option of another loss, no such negatives
        raise ValueError(f"--loss {args.loss}: {error}") from None
    _check_options(args.loss, loss)
    has_servers, is_sampled = args.kvstore == "dist_sync", loss.sampled_share is not None
    store = args.store or default_store(has_servers, is_sampled)
    try:
        find_store(store, args.class_dtype)
    except ValueError as error:
        raise ValueError(f"--class-dtype {args.class_dtype}: {error}") from None
    parallel = args.class_parallel
    return {
        "loss_options": {"preset": loss.name, **loss.options},
        "store": store,
        "class_parallel": None if parallel is None else bool(parallel),
        "fc7_lr_mult": config.get("fc7_lr_mult", 1.0),
        "fc7_wd_mult": config.get("fc7_wd_mult", 1.0),
        "ckpt_embedding": bool(config.get("ckpt_embedding", True)),
    }


def _triplet_settings(
    args: argparse.Namespace, config: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings of a loss without classes, which refuses all flags about these."""
    from dsoftmax.losses import triplet

    for flag, nothing in CLASS_FLAGS.items():
        if getattr(args, flag) != nothing:
            raise ValueError(
                f"--{flag.replace('_', '-')}: --loss {args.loss} has no class weights: leave it out"
            )
    if args.per_batch_size % triplet.IMAGES:
        raise ValueError(
            f"--per-batch-size {args.per_batch_size}: --loss {args.loss} takes a multiple of "
            f"{triplet.IMAGES}: anchors, positives and negatives"
        )
    configured = {ours: config[key] for key, ours in TRIPLET_KEYS.items() if key in config}
    try:
        spec = triplet.resolve(config.get("loss_name", args.loss), {**configured, **given})
    except (TypeError, ValueError) as error:
        raise ValueError(f"--loss {args.loss}: {error}") from None
    return {
        "loss_options": {"preset": spec.name, **spec.options},
        "store": "device",
        "class_parallel": False,
        "fc7_lr_mult": 1.0,
        "fc7_wd_mult": 1.0,
        "ckpt_embedding": True,
    }


def _check_options(name: str, loss: LossSpec) -> None:
    """Refuse options of a loss that are no numbers, or out of range."""
    from dsoftmax.losses.samplers import SampleRate

    for option, default in presets.resolve(loss.name, negatives=loss.negatives).options.items():
        value = loss.options[option]
        if option in SELF_CHECKED or not isinstance(default, (int, float)):
            continue
        if not isinstance(value, (int, float)):
            raise ValueError(f"--loss {name}: {option} is a number like {default}, not {value!r}")
    try:
        loss.make_criterion()
        SampleRate(loss.options.get("sample_rate", 1.0))
    except ValueError as error:
        raise ValueError(f"--loss {name}: {error}") from None


def loss_of(
    name: str, config: Mapping[str, Any], entry: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Return the preset that ``--loss`` means under a configuration, and its options.

    Parameters
    ----------
    name : str
        As of ``--loss``.
    config : mapping
        With `entry` merged into it: ``loss_name`` and ``loss_<option>``. Options that are not of
        the entry may be meant for another loss: those that this one does not have are left out.
    entry : mapping
        The entry of this name of `loss`.
    given : mapping
        Options that flags set: they replace the configured ones.

    Returns
    -------
    preset : str
        For insightface's margin_softmax the loss that has these margins and no others.
    options : dict
    """
    preset = config.get("loss_name", name)
    if preset not in (MARGIN_SOFTMAX, *presets.names()):
        raise ValueError(
            f"there is no loss_name {preset!r}; legal are {MARGIN_SOFTMAX}, "
            f"{', '.join(presets.names())}, triplet, atriplet"
        )
    legal = presets.resolve("combined" if preset == MARGIN_SOFTMAX else preset).options
    options = {}
    for key, value in config.items():
        option = LOSS_KEYS.get(key, key[len("loss_") :])
        if key.startswith("loss_") and key != "loss_name" and (key in entry or option in legal):
            options[option] = value
    options.update(given)
    if preset == MARGIN_SOFTMAX:
        options = {**NO_MARGIN, **options}
        preset, unused = _preset_of_margins(*(options[name] for name in NO_MARGIN))
        return preset, {key: value for key, value in options.items() if key not in unused}
    return preset, options


def _preset_of_margins(m1: float, m2: float, m3: float) -> tuple[str, tuple[str, ...]]:
    """Return the simplest preset of cos(m1 θ + m2) - m3, and the margins it does not have."""
    if m1 == 1 and m2 == 0 and m3 == 0:
        return "nsoftmax", ("m1", "m2", "m3")
    if m1 == 1 and m2 == 0:
        return "cosface", ("m1", "m2")
    if m1 == 1 and m3 == 0:
        return "arcface", ("m1", "m3")
    return "combined", ()
