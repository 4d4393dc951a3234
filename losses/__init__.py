"""The loss family of Dissected Softmax, as Gluon blocks.

    head = losses.create("dsoftmax_k", num_classes=757000, embedding_size=512, sample_rate=1 / 64)

A loss is a criterion on two numbers per sample: the cosine with its own class, z_y, and the
log-sum-exp of the scaled cosines with its negatives, n. Which negatives, where the class weights
live, and how much memory n may take are independent choices.
"""

from __future__ import annotations

import importlib
from typing import Any

from dsoftmax.losses.presets import PRESETS
from dsoftmax.recognition.common.preflight import check_mxnet

# The public names and the modules they live in; the presets know the criteria. A module is imported
# when its name is first used: MXNet takes a second to load, and a command's --help needs no more
# than the losses' names.
_MODULES = {
    "Criterion": "criteria",
    "Head": "head",
    "HeadTrainer": "trainer",
    "NegativeLogSumExp": "log_sum_exp",
    "create": "presets",
    "names": "presets",
    "register": "presets",
    "resolve": "presets",
    **{preset.criterion: "criteria" for preset in PRESETS.values()},
}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _MODULES[name] != "presets":  # the only one that needs no MXNet
        check_mxnet()
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
