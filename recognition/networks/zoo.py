"""Classification networks of gluoncv without their classifiers."""

from __future__ import annotations

import difflib
from typing import Any

import mxnet as mx

from dsoftmax.recognition.networks.features import Features
from dsoftmax.recognition.networks.layers import ScalePixels

PREFIX = "gluoncv:"
DEFAULTS: dict[str, Any] = {"embedding_size": 512, "output": "E"}


class ZooFeatures(Features):
    """All layers of a gluoncv network except its classifier.

    Parameters
    ----------
    model : str
        One of gluoncv's names of classification networks, as ``resnet50_v1b``.
    """

    def __init__(self, model: str):
        from gluoncv.model_zoo import get_model, get_model_list  # takes seconds to import

        if model.lower() not in get_model_list():
            near = difflib.get_close_matches(model, get_model_list(), n=3)
            hint = f", did you mean {' or '.join(near)}?" if near else ""
            raise ValueError(f"gluoncv has no network {model!r}{hint}")
        # A new name manager names the parameters alike for every instance.
        with mx.name.NameManager():
            network = get_model(model, pretrained=False)
        # Some have no part of this name; the scores of their classes are features as well.
        super().__init__(ScalePixels(), getattr(network, "features", network))
