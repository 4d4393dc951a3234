"""The paper's losses by name."""

from __future__ import annotations

import difflib
import inspect
from dataclasses import dataclass, field
from typing import Any

import mxnet as mx

from dsoftmax.losses import criteria
from dsoftmax.losses.forest import ForestClasses
from dsoftmax.losses.head import Head
from dsoftmax.losses.samplers import AllClasses, RandomClasses, RandomRows
from dsoftmax.losses.servers import ServerStore
from dsoftmax.losses.stores import ClassStore
from dsoftmax.recognition.common.distributed.group import ALONE, Group
from dsoftmax.recognition.common.distributed.parameter_server.worker import ServerGroup

# The options of each choice of negatives, and their defaults.
NEGATIVES = {
    "all": {},
    "classes": {"sample_rate": 1 / 64, "correction": None},
    "rows": {"sample_rate": 1 / 64, "mean_over_rows": False},
    "forest": {"sample_rate": 1 / 64, "correction": None, "trees": 50, "rebuild_every": 100},
}
STORES = ("device", "host", "server")
DEFAULT_SCALE = 64  # insightface's
PAPER = {"scale": 32}


@dataclass(frozen=True)
class Preset:
    """A criterion, a choice of negatives, and the options that differ from their defaults."""

    criterion: type[criteria.Criterion]
    negatives: str = "all"
    options: dict[str, Any] = field(default_factory=dict)


PRESETS = {
    "softmax": Preset(criteria.Softmax, options={"scale": 1, "normalize": False}),
    "nsoftmax": Preset(criteria.Softmax),
    "sphereface": Preset(criteria.SphereFace, options=PAPER),
    "cosface": Preset(criteria.CosFace),
    "arcface": Preset(criteria.ArcFace),
    "combined": Preset(criteria.Combined),
    "adaface": Preset(criteria.AdaFace),
    "dsoftmax": Preset(criteria.DSoftmax, options=PAPER),
    "dsoftmax_b": Preset(criteria.DSoftmax, "rows", PAPER),
    "dsoftmax_k": Preset(criteria.DSoftmax, "classes", PAPER),
    "dsoftmax_softmax": Preset(criteria.DSoftmaxSoftmax, options=PAPER),
    "dsoftmax_arcface": Preset(criteria.DSoftmaxArcFace, options=PAPER),
    "rand_softmax": Preset(criteria.Softmax, "classes", PAPER),
    "rand_arcface": Preset(criteria.ArcFace, "classes", PAPER),
    "hf_softmax": Preset(criteria.Softmax, "forest", PAPER),
}


def names() -> list[str]:
    """List every preset."""
    return list(PRESETS)


def create(
    name: str,
    num_classes: int,
    embedding_size: int = 512,
    ctx: mx.Context | list[mx.Context] | None = None,
    store: str = "device",
    chunk: int | None = None,
    seed: int = 0,
    negatives: str | None = None,
    group: Group = ALONE,
    **options,
) -> Head:
    """Make a head by its name.

    Parameters
    ----------
    name : str
        One of `names`.
    num_classes, embedding_size : int
        K and D.
    ctx : mx.Context or list of them
        Where the class weights are computed with: one device, or several that share them.
    store : {"device", "host", "server"}
        Where they are stored. In the host's memory or on parameter servers only with sampled
        classes, of which the step's rows are then copied to the devices.
    chunk : int, optional
        Classes at a time when n is computed: less memory, one more matrix product.
    seed : int
        Of the initialization and of all that is drawn.
    negatives : {"all", "classes", "rows", "forest"}, optional
        Another choice of negatives than the preset's. A `sample_rate` for a preset of all classes
        is one of classes.
    group : Group
        The processes that share the classes, each with as many devices; by default this one.
    **options
        ``scale``; of the criterion, as ``d`` or ``m1, m2, m3``; of the negatives: ``sample_rate``;
        for classes ``correction`` (None or "logq"); for rows ``mean_over_rows``; for a forest
        ``trees`` and ``rebuild_every``. ``normalize=False`` takes inner products for cosines.

    Returns
    -------
    Head

    Examples
    --------
    >>> head = create("dsoftmax_k", num_classes=1000, embedding_size=64, sample_rate=1 / 64)
    >>> head.initialize(mx.init.Normal(0.01))
    """
    preset = _find(name)
    if negatives is None:
        sampled = preset.negatives == "all" and "sample_rate" in options
        negatives = "classes" if sampled else preset.negatives
    elif negatives not in NEGATIVES:
        raise ValueError(f"negatives must be one of {', '.join(NEGATIVES)}, not {negatives!r}")
    own = _criterion_options(preset.criterion)
    legal = {**own, **NEGATIVES[negatives], "normalize": True, **preset.options}
    unknown = sorted(set(options) - set(legal))
    if unknown:
        raise TypeError(
            f"{name} with negatives={negatives!r} has no option {', '.join(unknown)}; legal are "
            f"{', '.join(sorted(legal))} and ctx, store, chunk, seed, negatives"
        )
    chosen = {**legal, **options}
    _check_shared(num_classes, embedding_size, chunk, seed, store, negatives, group)
    contexts = [ctx] if isinstance(ctx, mx.Context) else list(ctx or [mx.current_context()])
    criterion = preset.criterion(**{key: chosen[key] for key in own})
    if store == "server":
        weights = ServerStore(num_classes, embedding_size, contexts, group)
    else:
        weights = ClassStore(num_classes, embedding_size, contexts, store == "host", group)
    return Head(
        criterion,
        _make_sampler(negatives, chosen, weights, criterion.dissected, seed),
        weights,
        normalize=chosen["normalize"],
        chunk=chunk,
        mean_over_rows=chosen.get("mean_over_rows", False),
        seed=seed,
    )


def _find(name: str) -> Preset:
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=3)
        hint = f", did you mean {' or '.join(near)}?" if near else "."
        raise ValueError(f"there is no loss {name!r}{hint} Legal are {', '.join(PRESETS)}")
    return PRESETS[name]


def _criterion_options(criterion: type[criteria.Criterion]) -> dict[str, Any]:
    """Return the parameters of a criterion and their defaults."""
    parameters = inspect.signature(criterion).parameters.values()
    return {
        parameter.name: DEFAULT_SCALE if parameter.name == "scale" else parameter.default
        for parameter in parameters
        if parameter.kind is not parameter.VAR_KEYWORD
        and parameter.name not in ("weight", "batch_axis")
    }


def _make_sampler(
    negatives: str, options: dict[str, Any], store: ClassStore, dissected: bool, seed: int
) -> AllClasses:
    if negatives == "all":
        return AllClasses()
    num_classes, rate = store.shape[0], options["sample_rate"]
    if negatives == "rows":
        return RandomRows(rate, seed)
    if negatives == "classes":
        return RandomClasses(num_classes, rate, dissected, options["correction"], seed)
    if options["correction"] is not None:
        raise ValueError(
            "correction: a forest has no closed form for a class's chance to be found; leave it out"
        )
    return ForestClasses(
        store,
        rate,
        dissected,
        options["trees"],
        options["rebuild_every"],
        options["normalize"],
        seed,
    )


def _check_shared(num_classes, embedding_size, chunk, seed, store, negatives, group) -> None:
    for key, value, least in (
        ("num_classes", num_classes, 1),
        ("embedding_size", embedding_size, 1),
        ("seed", seed, 0),
        ("chunk", 1 if chunk is None else chunk, 1),
    ):
        if value != int(value) or value < least:
            raise ValueError(f"{key} must be a whole number, {least} or more, not {value!r}")
    if store not in STORES:
        raise ValueError(f"store must be one of {', '.join(STORES)}, not {store!r}")
    if store != "device" and negatives not in ("classes", "forest"):
        raise ValueError(
            f"store={store!r} copies the step's rows to the devices, and here a step uses all "
            "rows: choose a loss with sampled classes (negatives='classes' or 'forest')"
        )
    if store == "server" and not isinstance(group, ServerGroup):
        raise ValueError("store='server' needs a group of MXNet's parameter server (dist_sync)")
