"""What a report shows beside the files of a run: its network, its images, its packs."""

from __future__ import annotations

import os
from typing import Callable, NamedTuple, Sequence

import mxnet as mx

from dsoftmax.eval.models import Embed
from dsoftmax.recognition import networks
from dsoftmax.recognition.backbone import Backbone
from dsoftmax.recognition.common.arrays import load_arrays
from dsoftmax.recognition.common.devices import usable_contexts
from dsoftmax.recognition.data.packs import Pack, read_pack
from dsoftmax.recognition.data.pipeline import Pipeline
from dsoftmax.recognition.data.records import Records
from dsoftmax.recognition.report.run_folder import RunFolder

IMAGES_AT_ONCE = 32


class Sources(NamedTuple):
    """What is at hand.

    Attributes
    ----------
    embed : callable or None
        The network of the newest state.
    pipeline : Pipeline or None
        The dataset; its batches have any size.
    packs : sequence of Pack
    images_at_once : int
        How many images the network takes.
    """

    embed: Embed | None = None
    pipeline: Pipeline | None = None
    packs: Sequence[Pack] = ()
    images_at_once: int = IMAGES_AT_ONCE


def reopen(run: RunFolder, warn: Callable[[str], None] = lambda _: None) -> Sources:
    """Open what a run has trained with, as far as it is still there.

    Parameters
    ----------
    run : RunFolder
    warn : callable
        Called with a line about each thing that is missing.
    """
    return Sources(
        _attempt(_open_network, run, warn),
        _attempt(_open_pipeline, run, warn),
        _attempt(_open_packs, run, warn) or (),
    )


def _attempt(open_one: Callable, run: RunFolder, warn: Callable[[str], None]):
    try:
        return open_one(run)
    except (ValueError, OSError, TypeError, mx.MXNetError) as error:
        warn(str(error).strip().splitlines()[-1])
        return None


def _open_network(run: RunFolder) -> Embed | None:
    if run.state is None:
        return None
    settings, contexts = run.settings, usable_contexts(None)[:1]
    size = run.config["resolved_image_size"]
    network = networks.create(
        settings.architecture,
        settings.embedding_size,
        image_size=tuple(size),
        **settings.network_options,
    )
    network.initialize(ctx=contexts)
    network(mx.nd.zeros((1, 3, *size), ctx=contexts[0], dtype="uint8"))  # makes shapes known
    network.hybridize_for(contexts[0].device_type)
    backbone = Backbone(network, contexts, {"learning_rate": 0.0})
    backbone.load_parameters(load_arrays(os.path.join(run.state, "backbone.params")))
    return backbone.embed


def _open_pipeline(run: RunFolder) -> Pipeline:
    settings = run.settings
    return Pipeline(
        Records(settings.data_dir),
        batch_size=1,
        image_size=tuple(run.config["resolved_image_size"]),
        seed=settings.seed,
        min_images=settings.images_filter,
        remap_labels=settings.images_filter > 1,
    )


def _open_packs(run: RunFolder) -> list[Pack]:
    targets = run.settings.val_targets or ()
    paths = [os.path.join(run.settings.data_dir, f"{target}.bin") for target in targets]
    return [read_pack(path) for path in paths if os.path.exists(path)]
