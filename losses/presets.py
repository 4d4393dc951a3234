"""The losses by name: a criterion, a choice of negatives and their options.

This is the only place that knows the options of a loss and their defaults; flags, configurations,
memory estimates and benchmarks ask `resolve`.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dsoftmax.losses import signatures
from dsoftmax.losses.stores import STORES, find_store
from dsoftmax.recognition.common.checks import did_you_mean, whole_number
from dsoftmax.recognition.common.preflight import check_mxnet

if TYPE_CHECKING:
    import mxnet as mx

    from dsoftmax.losses.criteria import Criterion
    from dsoftmax.losses.head import Head
    from dsoftmax.losses.samplers import Sampler
    from dsoftmax.losses.stores.base import ClassStore
    from dsoftmax.recognition.common.distributed.group import Group

CRITERIA = "dsoftmax.losses.criteria."
# The choices of negatives. The keyword arguments of a sampler's `make` are its options.
NEGATIVES = {
    "all": "dsoftmax.losses.samplers.AllClasses",
    "classes": "dsoftmax.losses.samplers.RandomClasses",
    "rows": "dsoftmax.losses.samplers.RandomRows",
    "forest": "dsoftmax.losses.forest.ForestClasses",
    "batch": "dsoftmax.losses.samplers.BatchClasses",
    "mixed": "dsoftmax.losses.forest.MixedClasses",
}
DEFAULT_SCALE = 64  # insightface's
PAPER = {"scale": 32}
GLUON = ("weight", "batch_axis")  # parameters of Gluon's losses, which a head does not pass on
# Options of the head, whatever its criterion and its negatives.
OF_HEAD = {"normalize": True, "inter_filter": None}
OF_EVERY_LOSS = {**OF_HEAD, "subcentres": 1}


@dataclass(frozen=True)
class Preset:
    """A criterion, a choice of negatives, and the options that differ from their defaults.

    Parameters
    ----------
    criterion : str or type of Criterion
        The class, or its name in `criteria`.
    negatives : str
        A key of `NEGATIVES`.
    options : dict
    title : str, optional
        What papers call the loss, if not as the class.
    """

    criterion: str | type[Criterion]
    negatives: str = "all"
    options: dict[str, Any] = field(default_factory=dict)
    title: str = ""


PRESETS = {
    "softmax": Preset("Softmax", options={"scale": 1, "normalize": False}),
    "nsoftmax": Preset("Softmax", title="NormFace"),
    "sphereface": Preset("SphereFace", options=PAPER),
    "sphereface_r": Preset("SphereFaceR", options={"scale": 30}, title="SphereFace-R"),
    "cosface": Preset("CosFace"),
    "arcface": Preset("ArcFace"),
    "combined": Preset("Combined", title="Combined Margin"),
    "adaface": Preset("AdaFace"),
    "magface": Preset("MagFace"),
    "mv_softmax": Preset("MVSoftmax", options={"scale": 32}, title="MV-Softmax"),
    "curricularface": Preset("CurricularFace"),
    "circle": Preset("Circle", options={"scale": 256}, title="Circle loss"),
    "uniface": Preset("UniFace"),
    "sphereface2": Preset("SphereFace2", options={"scale": 40}),
    "dsoftmax": Preset("DSoftmax", options=PAPER, title="D-Softmax"),
    "dsoftmax_b": Preset("DSoftmax", "rows", PAPER, "D-Softmax-B"),
    "dsoftmax_k": Preset("DSoftmax", "classes", PAPER, "D-Softmax-K"),
    "dsoftmax_softmax": Preset(
        "DSoftmaxSoftmax", options=PAPER, title="D-Softmax intra, Softmax inter"
    ),
    "dsoftmax_arcface": Preset(
        "DSoftmaxArcFace", options=PAPER, title="D-Softmax intra, ArcFace inter"
    ),
    "rand_softmax": Preset("Softmax", "classes", PAPER, "Rand-Softmax"),
    "rand_arcface": Preset("ArcFace", "classes", PAPER, "Rand-ArcFace"),
    "hf_softmax": Preset("Softmax", "forest", PAPER, "HF-Softmax"),
}


def names() -> list[str]:
    """List every preset."""
    return list(PRESETS)


def register(name: str, criterion: type[Criterion], negatives: str = "all", **options: Any) -> None:
    """Add a loss of your own, for `create` and for ``train.py --loss``.

    Call it from the file that ``train.py --config`` names, or before `create`.

    Parameters
    ----------
    name : str
        A new one.
    criterion : type of Criterion
        The parameters of its constructor are the options of the loss.
    negatives : {"all", "classes", "rows", "forest", "batch", "mixed"}
    **options
        Defaults that differ from the constructor's.

    Examples
    --------
    >>> from dsoftmax.losses import ArcFace
    >>> register("gentle_arcface", ArcFace, m2=0.2)
    """
    known = PRESETS.get(name)
    # A configuration may be loaded twice, and then registers its classes again.
    is_again = known is not None and _same_name(_class_of(known.criterion), criterion)
    if known is not None and not is_again:
        raise ValueError(f"there is a loss {name!r} already: choose another name")
    preset = Preset(criterion, negatives, options)
    _resolve(name, preset, {}, None)  # refuses options it does not have
    PRESETS[name] = preset


def _class_of(criterion: str | type[Criterion]) -> type[Criterion]:
    return _import(CRITERIA + criterion) if isinstance(criterion, str) else criterion


def _same_name(one: type, other: type) -> bool:
    return (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)


@dataclass(frozen=True)
class LossSpec:
    """A loss with all of its options.

    Attributes
    ----------
    name : str
        The preset's.
    title : str
        What papers call it.
    criterion : type of Criterion
    negatives : str
        A key of `NEGATIVES`.
    sampler : type of Sampler
    options : dict
        Every option of criterion and sampler, and of every loss, with its value; `negatives`, too.
    """

    name: str
    title: str
    criterion: type[Criterion]
    negatives: str
    sampler: type[Sampler]
    options: dict[str, Any]
    has_classes = True  # unlike a triplet loss

    @property
    def sampled_share(self) -> float | None:
        """The largest share of the classes whose weights a step uses; None for all of them.

        Those of the batch itself are not counted.
        """
        if not self.sampler.is_sparse:
            return None
        from dsoftmax.losses.samplers import SampleRate

        rate = self.options.get("sample_rate")  # there is none for the classes of the batch alone
        return 0.0 if rate is None else max(SampleRate(rate).rates)

    def make_criterion(self) -> Criterion:
        """Make the criterion."""
        options = _criterion_options(self.criterion)
        return self.criterion(**{name: self.options[name] for name in options})

    def make_sampler(self, store: ClassStore, seed: int) -> Sampler:
        """Make the sampler for the classes of a store."""
        from dsoftmax.losses.samplers import SamplerSetting

        setting = SamplerSetting(store, self.criterion.dissected, self.options["normalize"], seed)
        options = _sampler_options(self.sampler)
        return self.sampler.make(setting, **{name: self.options[name] for name in options})


def resolve(
    name: str, options: dict[str, Any] | None = None, negatives: str | None = None
) -> LossSpec:
    """Find a loss by its name, and the value of each of its options.

    Parameters
    ----------
    name : str
        One of `names`.
    options : dict
        What differs from the preset's values.
    negatives : {"all", "classes", "rows", "forest", "batch", "mixed"}, optional
        Another choice of negatives than the preset's; also as an option. A ``sample_rate`` for a
        preset of all classes samples classes.

    Raises
    ------
    ValueError
        There is no such loss.
    TypeError
        It has no such option; the message names the legal ones.

    Examples
    --------
    >>> resolve("dsoftmax_k").sampled_share
    0.015625
    >>> resolve("cosface", {"m3": 0.4}).options["m3"]
    0.4
    """
    if name not in PRESETS:
        raise ValueError(f"there is no loss {name!r}{did_you_mean(name, PRESETS)}")
    return _resolve(name, PRESETS[name], options or {}, negatives)


def _resolve(name: str, preset: Preset, options: dict[str, Any], negatives: str | None) -> LossSpec:
    options = dict(options)
    negatives = options.pop("negatives", negatives)
    if negatives is None:
        is_sampled = preset.negatives == "all" and "sample_rate" in options
        negatives = "classes" if is_sampled else preset.negatives
    if negatives not in NEGATIVES:
        raise ValueError(f"negatives must be one of {', '.join(NEGATIVES)}, not {negatives!r}")
    check_mxnet()
    criterion = _class_of(preset.criterion)
    sampler = _import(NEGATIVES[negatives])
    defaults = {**_criterion_options(criterion), **_sampler_options(sampler), **OF_EVERY_LOSS}
    chosen = {**preset.options, **options}
    unknown = sorted(set(chosen) - set(defaults))
    if unknown:
        legal = {*defaults, "sample_rate"} if preset.negatives == "all" else defaults
        what = name if negatives == preset.negatives else f"{name} with negatives={negatives!r}"
        raise TypeError(
            f"{what} has no option {', '.join(unknown)}{did_you_mean(unknown[0], sorted(legal))}"
        )
    title = preset.title or criterion.__name__
    values = {**defaults, **chosen, "negatives": negatives}
    return LossSpec(name, title, criterion, negatives, sampler, values)


def default_options(name: str) -> dict[str, Any]:
    """Return all options of a loss and their defaults, as `resolve` does, without MXNet.

    Examples
    --------
    >>> default_options("cosface")
    {'scale': 64, 'm3': 0.35, 'normalize': True, 'inter_filter': None, 'subcentres': 1,
     'negatives': 'all'}
    """
    preset = PRESETS[name]
    if isinstance(preset.criterion, str):
        options = signatures.parameters(CRITERIA + preset.criterion, "__init__")
        options["scale"] = DEFAULT_SCALE
    else:
        options = _criterion_options(preset.criterion)
    options.update(signatures.parameters(NEGATIVES[preset.negatives], "make"))
    for other in (*GLUON, "self", "cls", "setting"):
        options.pop(other, None)
    return {**options, **OF_EVERY_LOSS, "negatives": preset.negatives, **preset.options}


def _import(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _criterion_options(criterion: type[Criterion]) -> dict[str, Any]:
    """Return the parameters of a criterion and their defaults."""
    parameters = inspect.signature(criterion).parameters.values()
    return {
        parameter.name: DEFAULT_SCALE if parameter.name == "scale" else parameter.default
        for parameter in parameters
        if parameter.kind is not parameter.VAR_KEYWORD and parameter.name not in GLUON
    }


def _sampler_options(sampler: type[Sampler]) -> dict[str, Any]:
    """Return the options of a sampler and their defaults."""
    parameters = inspect.signature(sampler.make).parameters.values()
    return {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.kind is parameter.KEYWORD_ONLY
    }


def create(
    name: str,
    num_classes: int,
    embedding_size: int = 512,
    ctx: mx.Context | list[mx.Context] | None = None,
    store: str = "device",
    chunk: int | None = None,
    seed: int = 0,
    negatives: str | None = None,
    group: Group | None = None,
    dtype: str = "float32",
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
        The devices that compute with the class weights: one, or several that share them.
    store : {"device", "host", "server"}
        Where the class weights live. In the host's memory or on parameter servers only with sampled
        classes: each step copies the class rows it uses to the devices.
    chunk : int, optional
        Classes per product when n is computed: less memory, one more matrix product.
    seed : int
        Of the initialization and of everything that is drawn.
    negatives : {"all", "classes", "rows", "forest", "batch", "mixed"}, optional
        Another choice of negatives than the preset's. A `sample_rate` for a preset of all classes
        samples classes.
    group : Group, optional
        The processes that share the classes, each with the same number of devices; by default this
        process alone.
    dtype : {"float32", "float16", "bfloat16"}
        What class weights and momenta are kept as. The 2-byte types take half the memory and need
        ``store="host"`` and ``sgd``. Products and updates are float32 in any case; an update is
        rounded at random, as a function of (seed, step, class), so that its mean is exact.
    **options
        ``scale``; of the criterion, such as ``d`` or ``m1, m2, m3``; of the negatives:
        ``sample_rate``, a number or a list of (step, rate); for classes ``batch_classes``
        ("excluded", "counted" or "added") and ``correction`` (None or "logq"); for rows
        ``mean_over_rows``; for a forest ``batch_classes``, ``trees`` and ``rebuild_every``; for
        mixed negatives these and ``nearest``. ``normalize=False`` takes inner products
        instead of cosines; ``inter_filter`` leaves out negatives above this cosine;
        ``subcentres=j`` gives each class j centres, of which the nearest counts.

    Returns
    -------
    Head

    Examples
    --------
    >>> head = create("dsoftmax_k", num_classes=1000, embedding_size=64, sample_rate=1 / 64)
    >>> head.initialize(mx.init.Normal(0.01))
    """
    try:
        spec = resolve(name, options, negatives)
    except TypeError as error:
        raise TypeError(f"{error}, and ctx, store, dtype, chunk, seed, negatives") from None
    whole_number("num_classes", num_classes, 1)
    whole_number("embedding_size", embedding_size, 1)
    whole_number("seed", seed, 0)
    whole_number("subcentres", spec.options["subcentres"], 1)
    if chunk is not None:
        whole_number("chunk", chunk, 1)
    if store not in STORES:
        raise ValueError(f"store must be one of {', '.join(STORES)}, not {store!r}")
    kind = find_store(store, dtype)
    if kind.needs_sampled_classes and spec.sampled_share is None:
        raise ValueError(
            f"store={store!r} copies the class rows of a step to the devices, and here a step uses "
            "all of them: choose a loss with sampled classes (negatives='classes' or 'forest')"
        )

    import mxnet as mx

    from dsoftmax.losses import operators
    from dsoftmax.losses.head import Head
    from dsoftmax.recognition.common.devices import let_run_together
    from dsoftmax.recognition.common.distributed.group import ALONE

    contexts = [ctx] if isinstance(ctx, mx.Context) else list(ctx or [mx.current_context()])
    let_run_together(contexts)
    if any(context.device_type == "cpu" for context in contexts):
        operators.load_or_build()
    group = ALONE if group is None else group
    weights = kind(num_classes, embedding_size, contexts, group, spec.options["subcentres"])
    return Head(
        spec.make_criterion(),
        spec.make_sampler(weights, seed),
        weights,
        chunk=chunk,
        seed=seed,
        **{name: spec.options[name] for name in OF_HEAD},
    )
