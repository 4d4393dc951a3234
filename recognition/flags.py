"""The flags of ``train.py``: one table, which makes the parser, the checks and the settings.

A new flag is one entry in `FLAGS`: it appears in ``--help``, its range is checked, and `Settings`
has a field of its name. Nothing here imports MXNet, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import ast
import shutil
import textwrap
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Callable, Sequence

from dsoftmax.losses import presets
from dsoftmax.losses.stores import DTYPES, STORES
from dsoftmax.recognition import config as shipped
from dsoftmax.recognition.common.checks import at_least
from dsoftmax.recognition.common.cli import default_threads, image_size, program_name, rate
from dsoftmax.recognition.schedule import MODES

# The headings of --help, and what it says about some of them.
GROUPS = {
    "data": "",
    "network": "",
    "loss": "An option that is not given has the default of the loss.",
    "class weights": "",
    "schedule": "",
    "devices": "",
    "distributed": "Many processes: tools/launch.py or horovodrun starts them.",
    "saving": "",
    "log": "",
}
WIDTH, HELP_COLUMN = 100, 26  # of --help
NO_SETTING = ""  # for flags that other settings are made of
MUST, AUTO = "must", "auto"  # of --resume
NUMBERS = (int, float)
# MXNet's kinds of stores, and those that do the same here.
KVSTORES = {
    "device": "device",
    "local": "local",
    "dist_sync": "dist_sync",
    "nccl": "device",
    "local_allreduce_device": "device",
    "local_allreduce_cpu": "local",
    "local_update_cpu": "local",
    "dist_device_sync": "dist_sync",
    "dist_sync_device": "dist_sync",
}
CONSTANTS = {"none": None, "true": True, "false": False}  # values of --loss-option
EXAMPLES = """examples:
  python -u recognition/train.py --network r50 --loss dsoftmax --dataset emore
  python -u recognition/train.py --network y1 --loss dsoftmax_k --sample-rate 1/8 --dataset mine \\
      --data-dir ../datasets/mine --target lfw --max-steps 20000 --resume auto
"""


@dataclass(frozen=True)
class Flag:
    """A flag, and the setting it makes.

    Attributes
    ----------
    name : str
        Without the leading dashes.
    group : str
        One of `GROUPS`, the headings of ``--help``; "" for none.
    help : str
        ``{network}``, ``{dataset}`` and ``{loss}`` stand for the names a configuration has.
    kind : callable
        Turns the text into a value. `bool` makes a switch without a value.
    default : Any
    configured : str
        Where a configuration holds the default: ``default.lr`` or ``config.max_steps``.
    least : float, optional
        The least legal number.
    above : bool
        Whether `least` itself is illegal, too.
    below : float, optional
        The first number that is too large.
    choices : sequence, optional
        All legal values.
    const : Any
        The value of the flag given without one; None where it must have one.
    repeatable : bool
        Whether the flag may be given several times and makes a list.
    setting : str, optional
        The field of `Settings`, if it has another name than the flag; or `NO_SETTING`.
    is_loss_option : bool
        Whether it sets the option of this name of the loss.
    metavar : str
        What ``--help`` calls the value.
    """

    name: str
    group: str
    help: str
    kind: Callable[[str], Any] = str
    default: Any = None
    configured: str = ""
    least: float | None = None
    above: bool = False
    below: float | None = None
    choices: Sequence | None = None
    const: Any = None
    repeatable: bool = False
    setting: str | None = None
    is_loss_option: bool = False
    metavar: str = ""

    @property
    def dest(self) -> str:
        """The attribute of the parsed arguments."""
        return self.name.replace("-", "_")

    @property
    def field(self) -> str:
        """The field of `Settings`; empty if there is none."""
        if self.is_loss_option:
            return NO_SETTING
        return self.dest if self.setting is None else self.setting

    def default_in(self, module: Any) -> Any:
        """Return the default under a configuration."""
        if not self.configured:
            return self.default
        table, _, key = self.configured.partition(".")
        value = getattr(module, table).get(key, self.default)
        if value is None:
            return None
        # argparse parses defaults that are text by itself.
        if self.kind not in NUMBERS:
            return str(value)
        try:
            return self.kind(value)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(
                f"--config: {self.configured} = {value!r}, the default of --{self.name}, is no "
                f"{self.kind.__name__}"
            ) from None

    def add_to(self, parser: argparse._ActionsContainer, module: Any) -> None:
        """Add the flag to a parser, with the default of a configuration."""
        default = self.default_in(module)
        names = {name: ", ".join(getattr(module, name)) for name in ("network", "dataset", "loss")}
        text = self.help.format(**names)
        options: dict[str, Any] = {"help": text, "default": default}
        if self.kind is bool:
            parser.add_argument(f"--{self.name}", action="store_true", **options)
            return
        if self.is_loss_option:
            options["help"] += f" (default: {_defaults_of_losses(self.dest)})"
        elif default not in (None, ""):
            options["help"] += " (default: %(default)s)"
        if self.const is not None:
            options.update(nargs="?", const=self.const)
        if self.repeatable:
            options["action"] = "append"
        if self.choices is None:
            options["metavar"] = self.metavar or METAVARS.get(self.kind, "NAME")
        parser.add_argument(f"--{self.name}", type=self.kind, choices=self.choices, **options)

    def check(self, value: Any) -> None:
        """Refuse a number out of range."""
        if value is None:
            return
        if self.least is not None:
            at_least(f"--{self.name}", value, self.least, self.above)
        if self.below is not None and value >= self.below:
            raise ValueError(f"--{self.name} must be below {self.below}, not {value}")


def _steps(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"steps are numbers like 100000,160000, not {text!r}"
        ) from None


def _number_or_learned(text: str) -> float | str:
    try:
        return text if text == "learned" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"it is a number like 0.9, or learned, not {text!r}"
        ) from None


def _rates(text: str) -> float | list[tuple[int, float]]:
    """Parse a rate, or a schedule like ``0:1/64,20000:1``."""
    if ":" not in text:
        return rate(text)
    schedule = []
    for part in text.split(","):
        step, _, value = part.partition(":")
        if not step.strip().isdigit():
            raise argparse.ArgumentTypeError(
                f"a schedule is STEP:RATE,STEP:RATE like 0:1/64,20000:1, not {text!r}"
            )
        schedule.append((int(step), rate(value)))
    return schedule


def _loss_option(text: str) -> tuple[str, Any]:
    name, is_pair, value = text.partition("=")
    if not is_pair or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"an option is name=value like m2=0.4, not {text!r}")
    if value.lower() in CONSTANTS:
        return name, CONSTANTS[value.lower()]
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _kvstore(text: str) -> str:
    if text not in KVSTORES:
        raise argparse.ArgumentTypeError(
            f"{text!r} (of the flag, or of default.kvstore in --config) is not one of "
            f"{', '.join(KVSTORES)}"
        )
    return KVSTORES[text]


METAVARS = {
    int: "N",
    float: "X",
    image_size: "H,W",
    _number_or_learned: "X",
    _rates: "RATE",
    _steps: "N,N",
    _loss_option: "NAME=VALUE",
}


def _defaults_of_losses(option: str) -> str:
    """Say which losses have an option, and its default with each."""
    losses_with: dict[str, list[str]] = {}
    for name in presets.names():
        options = presets.default_options(name)
        if option in options:
            losses_with.setdefault(_format(options[option]), []).append(name)
    phrases = {value: f"{value} with {', '.join(names)}" for value, names in losses_with.items()}
    if sum(map(len, losses_with.values())) == len(presets.names()):
        usual = max(losses_with, key=lambda value: len(losses_with[value]))
        del phrases[usual]
        phrases[usual] = f"{usual} with any {'other ' * bool(phrases)}loss"
    return "; ".join(phrases.values())


def _format(default: Any) -> str:
    # 1/64 and the like are exact; 0.9 is not.
    if isinstance(default, float) and default < 0.1 and Fraction(default).numerator == 1:
        return str(Fraction(default))
    return str(default).replace("None", "none")


FLAGS = (
    Flag(
        "config",
        "",
        "your own configuration, like insightface's config.py; it is a program, and is run",
        setting=NO_SETTING,
        metavar="PATH",
    ),
    # --- data
    Flag(
        "dataset",
        "data",
        "{dataset}, or any name with --data-dir",
        configured="default.dataset",
    ),
    Flag("data-dir", "data", "folder of the dataset (default: as configured)", metavar="PATH"),
    Flag(
        "num-classes",
        "data",
        "number of classes (default: as `property` or the data say)",
        int,
        least=1,
    ),
    Flag("image-size", "data", "height,width (default: as the data)", image_size),
    Flag(
        "target",
        "data",
        ".bin files to verify on, without .bin, separated by commas (default: as configured)",
        setting="val_targets",
        metavar="NAMES",
    ),
    Flag(
        "rand-mirror",
        "data",
        "mirror images at random",
        int,
        1,
        "config.data_rand_mirror",
        choices=(0, 1),
        setting="mirror",
    ),
    Flag("color", "data", "jitter of colours: 0, 1 or 2", int, 0, "config.data_color", least=0),
    Flag(
        "cutoff",
        "data",
        "side of a square that is blanked at random",
        int,
        0,
        "config.data_cutoff",
        least=0,
    ),
    Flag(
        "images-filter",
        "data",
        "fewest images per identity; identities with fewer are left out",
        int,
        0,
        "config.data_images_filter",
        least=0,
    ),
    Flag("threads", "data", "threads that decode images", int, default_threads(), least=1),
    # --- network
    Flag("network", "network", "{network} or gluoncv:<name>", configured="default.network"),
    Flag(
        "emb-size",
        "network",
        "width of the embedding (default: as configured)",
        int,
        least=1,
        setting="embedding_size",
    ),
    Flag(
        "pretrained",
        "network",
        "model to begin with: prefix,1 is prefix-0001.params",
        configured="default.pretrained",
        metavar="PREFIX",
    ),
    Flag(
        "pretrained-epoch",
        "network",
        "its epoch, if --pretrained has none (default: 1, or the only one that was saved)",
        int,
        least=0,
        setting=NO_SETTING,
    ),
    Flag(
        "teacher",
        "network",
        "model whose embeddings the network stays close to: prefix,epoch",
        default="",
        metavar="PREFIX",
    ),
    Flag(
        "teacher-weight",
        "network",
        "with --teacher: factor of the cosine distance in the loss",
        float,
        100.0,
        least=0,
    ),
    Flag("freeze-backbone", "network", "train class weights alone", bool, False),
    Flag("sync-bn", "network", "normalize over the batches of all devices; for GPUs", bool, False),
    Flag(
        "fp16-scale",
        "network",
        "above 0: a float16 network, its loss scaled by this; for GPUs",
        float,
        0.0,
        least=0,
    ),
    # --- loss
    Flag("loss", "loss", "{loss}", configured="default.loss"),
    Flag("scale", "loss", "scale of the cosines", float, is_loss_option=True),
    Flag(
        "d",
        "loss",
        "the cosine at which D-Softmax stops pulling a sample to its class, or learned",
        _number_or_learned,
        is_loss_option=True,
    ),
    Flag("m1", "loss", "factor of the angle", float, is_loss_option=True),
    Flag("m2", "loss", "margin on the angle, in radians", float, is_loss_option=True),
    Flag("m3", "loss", "margin on the cosine", float, is_loss_option=True),
    Flag(
        "sample-rate",
        "loss",
        "share of the classes, or of the batch with dsoftmax_b, that a step samples, such as "
        "1/64; any loss takes it; 0:1/64,20000:1 changes it at step 20,000",
        _rates,
        is_loss_option=True,
    ),
    Flag(
        "correction",
        "loss",
        "correction for sampled classes",
        choices=("none", "logq"),
        is_loss_option=True,
    ),
    Flag(
        "loss-option",
        "loss",
        "any other option of the loss, listed at the end; repeatable",
        _loss_option,
        repeatable=True,
        setting=NO_SETTING,
    ),
    # --- class weights
    Flag(
        "init-classes",
        "class weights",
        "first class weights: random, or the mean embeddings of their images",
        default="normal",
        choices=("normal", "mean"),
    ),
    Flag(
        "class-weights",
        "class weights",
        "first class weights from a file or a run: .npy, .params with fc7_weight, a run's folder, "
        "Partial FC's folder",
        default="",
        metavar="PATH",
    ),
    Flag(
        "class-parallel",
        "class weights",
        "split class weights over the devices (default: if they are many)",
        int,
        choices=(0, 1),
        const=1,
    ),
    Flag(
        "store",
        "class weights",
        "where class weights are kept (default: device, but server for sampled classes with "
        "dist_sync)",
        choices=tuple(STORES),
    ),
    Flag(
        "class-dtype",
        "class weights",
        "what class weights and momenta are kept as; float16 and bfloat16 need --store host",
        default="float32",
        choices=DTYPES,
    ),
    Flag(
        "chunk", "class weights", "classes at a time, to save memory (default: all)", int, least=1
    ),
    # --- schedule
    Flag(
        "per-batch-size",
        "schedule",
        "images per device and step, or per micro-batch with --accumulate",
        int,
        configured="default.per_batch_size",
        least=1,
    ),
    Flag(
        "accumulate",
        "schedule",
        "micro-batches per step, each of --per-batch-size: a step is then so many times as large",
        int,
        1,
        least=1,
    ),
    Flag("lr", "schedule", "learning rate", float, None, "default.lr", least=0, above=True),
    Flag("lr-schedule", "schedule", "how it changes", default="step", choices=MODES),
    Flag(
        "lr-steps",
        "schedule",
        "with --lr-schedule step: the steps at which it falls to a tenth",
        _steps,
        configured="default.lr_steps",
    ),
    Flag("warmup-steps", "schedule", "steps in which it grows from 0", int, 0, least=0),
    Flag("wd", "schedule", "weight decay, of all parameters", float, None, "default.wd", least=0),
    Flag("mom", "schedule", "momentum", float, None, "default.mom", least=0),
    Flag(
        "clip-gradient",
        "schedule",
        "longest gradient of the network; 0 is any",
        float,
        0.0,
        least=0,
    ),
    Flag(
        "max-steps",
        "schedule",
        "steps to train; 0 leaves it to --end-epoch",
        int,
        0,
        "config.max_steps",
        least=0,
    ),
    Flag("end-epoch", "schedule", "epochs to train; 0 is without end", int, 0, least=0),
    Flag("seed", "schedule", "seed of everything that is drawn", int, 0, least=0, below=1 << 32),
    # --- devices
    Flag(
        "devices",
        "devices",
        "cpu, cpu:2, gpu:8 (default: a GPU for each id in CUDA_VISIBLE_DEVICES; the CPU if that is "
        "unset or empty)",
    ),
    # --- distributed
    Flag(
        "kvstore",
        "distributed",
        "how devices share gradients; dist_sync: many processes on parameter servers",
        _kvstore,
        configured="default.kvstore",
        choices=("device", "local", "dist_sync"),
    ),
    # --- saving
    Flag(
        "models-root",
        "saving",
        "folder of all runs",
        configured="default.models_root",
        metavar="PATH",
    ),
    Flag("extra-model-name", "saving", "appended to the run's name", default=""),
    Flag(
        "resume",
        "saving",
        "go on from the newest saved state; auto: or begin a new run where none was saved yet",
        default="",
        choices=(MUST, AUTO),
        const=MUST,
    ),
    Flag(
        "ckpt",
        "saving",
        "models kept: 0 the last, 1 and 3 the best, 2 all",
        int,
        configured="default.ckpt",
        choices=range(4),
    ),
    Flag("keep", "saving", "training states kept", int, 2, least=1),
    # --- log
    Flag(
        "frequent",
        "log",
        "steps between lines of the log",
        int,
        configured="default.frequent",
        least=1,
    ),
    Flag(
        "verbose",
        "log",
        "steps between verifications and saved states",
        int,
        configured="default.verbose",
        least=1,
    ),
    Flag("tensorboard", "log", "also write TensorBoard's events; needs its extra", bool, False),
)
# These are parsed first: they choose a configuration, which has the defaults of all others.
FIRST = ("config", "network", "dataset", "loss", "data-dir")


def build_parser(module: Any = shipped) -> argparse.ArgumentParser:
    """Return the parser of the command line, with the defaults of a configuration."""
    parser = argparse.ArgumentParser(
        prog=program_name("train"),
        usage="%(prog)s [flags]",
        allow_abbrev=False,  # `--d` is a flag, and would also abbreviate --data-dir
        description="Train a face embedding: insightface's flags, its datasets, our losses.",
        epilog=f"{_describe_other_options()}\n{EXAMPLES}",
        formatter_class=_format_help,
    )
    groups = {"": parser}
    for name, text in GROUPS.items():
        groups[name] = parser.add_argument_group(name, text or None)
    for flag in FLAGS:
        flag.add_to(groups[flag.group], module)
    # train_parall's, which say what CUDA_VISIBLE_DEVICES and --class-parallel say here
    parser.add_argument("--worker-id", type=int, default=0, help=argparse.SUPPRESS)
    return parser


def _format_help(prog: str) -> argparse.HelpFormatter:
    width = min(shutil.get_terminal_size().columns, WIDTH)
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=HELP_COLUMN, width=width)


def _describe_other_options() -> str:
    """List the options of all losses that have no flag, for the end of ``--help``."""
    of_losses = [presets.default_options(name) for name in presets.names()]
    options = dict.fromkeys(option for options in of_losses for option in options)
    for flag in FLAGS:
        if flag.is_loss_option:
            options.pop(flag.dest, None)
    lines = ["options of losses without a flag, for --loss-option (see losses/README.md):"]
    for option in options:
        lines += textwrap.wrap(
            _defaults_of_losses(option),
            min(shutil.get_terminal_size().columns, WIDTH),
            initial_indent=f"  {option:<{HELP_COLUMN - 4}}  ",
            subsequent_indent=" " * HELP_COLUMN,
        )
    return "\n".join([*lines, ""])


def parse_first(argv: list[str] | None) -> argparse.Namespace:
    """Parse the flags that choose a configuration and its parts; None where one is not given."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in FIRST:
        parser.add_argument(f"--{name}")
    return parser.parse_known_args(argv)[0]


def check_ranges(args: argparse.Namespace) -> None:
    """Refuse numbers out of their flags' ranges."""
    for flag in FLAGS:
        flag.check(getattr(args, flag.dest))
