"""Configurations of insightface's Partial FC: which flags of ``train.py`` say the same."""

from __future__ import annotations

import os
import shlex
from typing import Any, Mapping

# Its keys, and the flags that say the same.
FLAGS = {
    "embedding_size": "--emb-size",
    "batch_size": "--per-batch-size",
    "backbone_lr": "--lr",
    "lr_steps": "--lr-steps",
    "max_update": "--max-steps",
    "num_classes": "--num-classes",
    "frequent": "--frequent",
    "verbose": "--verbose",
    "loss_s": "--scale",
}
MARGINS = {"arcface": ("m2",), "cosface": ("m3",)}  # that the flags of these losses set
DEFAULTS = {"network": "r100", "dataset": "emore", "loss": "cosface"}  # of its train_memory.py


def is_partial_fc(module: Any) -> bool:
    """Say whether a configuration is Partial FC's: one dictionary, which a function completes."""
    return "sample_ratio" in getattr(module, "config", ()) and not hasattr(module, "default")


def explain(module: Any, path: str, chosen: Mapping[str, str | None]) -> str:
    """Return a sentence with the flags that train the same as a configuration of Partial FC.

    Parameters
    ----------
    module : module
        The configuration.
    path : str
        Its file.
    chosen : mapping
        ``network``, ``dataset`` and ``loss`` as the flags have them; None for a default.
    """
    names = {part: chosen[part] or default for part, default in DEFAULTS.items()}
    module.generate_config(names["loss"], names["dataset"], names["network"])
    config = module.config
    lines = [
        f"--config {path}: this is a configuration of Partial FC, which is not read here; the same "
        "run, to which you may add other flags such as --models-root, is",
        "python -u recognition/train.py " + shlex.join(_flags(config, names)),
        *_notes(config),
    ]
    return "\n".join(lines)


def _flags(config: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    flags = [text for part, name in names.items() for text in (f"--{part}", name)]
    if "rec" in config:
        flags += ["--data-dir", os.path.dirname(config["rec"])]
    for key, flag in FLAGS.items():
        if key in config:
            flags += [flag, f"{config[key]:g}" if key == "loss_s" else str(config[key])]
    for margin in MARGINS.get(names["loss"], ()):
        flags += [f"--{margin}", f"{config[f'loss_{margin}']:g}"]
    if "val_targets" in config:
        flags += ["--target", ",".join(config["val_targets"])]
    if config["sample_ratio"] < 1:
        flags += ["--sample-rate", f"{config['sample_ratio']:g}"]
    return [*flags, "--class-parallel"]


def _notes(config: Mapping[str, Any]) -> list[str]:
    """Return sentences about what has no flag."""
    notes = []
    if config.get("net_output", "E") != "E":
        notes.append(
            f"net_output = {config['net_output']!r} has no flag: --network r100fc has it, or a "
            "--config such as recognition/config.py"
        )
    rates = config["backbone_lr"], config["memory_bank_lr"]
    if rates[0] != rates[1]:
        notes.append(
            f"memory_bank_lr has no flag: config.fc7_lr_mult = {rates[1] / rates[0]:g} in a "
            "--config says it"
        )
    if config.get("debug"):
        notes.append("debug, which trains on random images, is `python tools/bench_loss.py` here")
    return notes
