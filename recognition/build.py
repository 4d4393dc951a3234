"""How a run begins: makes what is trained and gives it its first parameters."""

from __future__ import annotations

import mxnet as mx
import numpy as np

from dsoftmax import losses
from dsoftmax.eval.models import saved_epochs
from dsoftmax.losses.triplet import TripletHead
from dsoftmax.recognition import networks
from dsoftmax.recognition.backbone import Backbone
from dsoftmax.recognition.checkpoint import broadcast
from dsoftmax.recognition.class_files import as_rows, class_weights_in_model, open_class_weights
from dsoftmax.recognition.class_means import class_means
from dsoftmax.recognition.networks.files import load_parameters
from dsoftmax.recognition.plan import Plan
from dsoftmax.recognition.settings import PRETRAINED_EPOCH, split_epoch
from dsoftmax.recognition.teacher import Teacher
from dsoftmax.recognition.trained import Trained
from dsoftmax.recognition.triplets import TripletMiner

INITIAL_DEVIATION = 0.01  # of class weights, as insightface's fc7


def build(plan: Plan) -> Trained:
    """Make the network, the head and their trainers, with random parameters."""
    s = plan.settings
    mx.random.seed(s.seed)
    _initialize(plan)
    sgd = {"learning_rate": s.lr, "momentum": s.mom, "wd": s.wd}
    backbone = Backbone(
        plan.network,
        plan.contexts,
        sgd,
        kvstore="device" if s.kvstore == "dist_sync" else s.kvstore,
        clip=s.clip_gradient,
        fp16_scale=s.fp16_scale,
        frozen=s.freeze_backbone,
        accumulates=s.accumulate > 1,
        group=plan.group,
    )
    if not s.loss_spec().has_classes:
        return Trained(backbone, *_make_triplets(plan, backbone))
    head = _make_head(plan)
    warning = head.sampler.warn_about(plan.batch_size)
    if warning:
        plan.notes.append(f"warning: {warning}")
    head.initialize(mx.init.Normal(INITIAL_DEVIATION))
    head_trainer = head.trainer("sgd", {**sgd, "wd": s.wd * s.fc7_wd_mult})
    return Trained(backbone, head, head_trainer)


def _initialize(plan: Plan) -> None:
    network, contexts = plan.network, plan.contexts
    network.initialize(networks.initializer(plan.settings.architecture), ctx=contexts)
    if plan.settings.fp16_scale:
        network.cast("float16")
    shape = (1, 3, *plan.pipeline.image_size)
    for context in contexts:  # the first pass makes all shapes known
        network(mx.nd.zeros(shape, ctx=context, dtype="uint8"))
    mx.nd.waitall()
    network.hybridize_for(contexts[0].device_type)


def _make_head(plan: Plan) -> losses.Head:
    s = plan.settings
    loss = s.loss_spec()
    return losses.create(
        loss.name,
        num_classes=plan.num_classes,
        embedding_size=s.embedding_size,
        ctx=plan.contexts if plan.is_class_parallel else plan.contexts[:1],
        store=s.store,
        dtype=s.class_dtype,
        chunk=s.chunk,
        seed=s.seed,
        group=plan.group,
        **loss.options,
    )


def make_teacher(plan: Plan) -> Teacher | None:
    """Load the network of ``--teacher``, if there is one."""
    s = plan.settings
    if not s.teacher:
        return None
    teacher = Teacher(
        s.teacher,
        s.teacher_weight,
        s.embedding_size,
        plan.pipeline.image_size,
        plan.contexts,
        plan.group,
    )
    plan.notes.append(f"teacher {s.teacher}, weight {s.teacher_weight:g}")
    return teacher


def _make_triplets(plan: Plan, backbone: Backbone) -> tuple[TripletHead, TripletMiner]:
    s, spec = plan.settings, plan.settings.loss_spec()
    miner = TripletMiner(backbone.embed, plan.pipeline, spec, s.per_batch_size)
    if miner.bags.size < spec.options["bag_size"]:
        plan.notes.append(
            f"note: bags have {miner.bags.size} images instead of {spec.options['bag_size']}: "
            f"there are no more, with {spec.options['images_per_identity']} per identity at most"
        )
    return TripletHead(spec, s.embedding_size, s.per_batch_size), miner


def begin_new_run(plan: Plan, trained: Trained) -> None:
    """Give a run that resumes nothing its first parameters.

    They come from ``--pretrained`` or are random; ``--class-weights`` and ``--init-classes mean``
    replace the class weights. All processes must call this, and end with the first one's network.
    """
    s, group = plan.settings, plan.group
    if s.pretrained:
        classes = _load_pretrained(plan, trained) if group.is_first else None
        if group.gather_json("has classes", classes is not None)[0]:
            trained.head.load_class_weights(classes)
    if s.class_weights:
        classes = _open_classes(plan) if group.is_first else None
        try:
            trained.head.load_class_weights(classes)
        except ValueError as error:
            raise ValueError(f"--class-weights: {s.class_weights}: {error}") from None
        plan.notes.append(f"class weights are from {s.class_weights}")
    if group.size > 1:  # the processes may have drawn different parameters
        first = broadcast(group, "parameters", trained.backbone.parameters())
        trained.backbone.load_parameters(first)
    if s.init_classes == "mean":
        weights = class_means(trained, plan.pipeline, s.per_batch_size, s.threads)
        trained.head.load_class_weights(weights)
        plan.notes.append("class weights begin as the mean embeddings of their images")


def _pretrained_file(plan: Plan) -> str:
    """Return the parameter file of ``--pretrained``, whose epoch may be left out."""
    text = plan.settings.pretrained
    prefix, epoch = split_epoch(text)
    try:
        epochs = sorted(saved_epochs(prefix))
    except ValueError as error:
        raise FileNotFoundError(f"--pretrained {text}: {error}") from None
    listed = ", ".join(map(str, epochs))
    if epoch is not None and epoch not in epochs:
        raise FileNotFoundError(
            f"--pretrained {text}: there is no {prefix}-{epoch:04d}.params; of this prefix there "
            f"are the epochs {listed}"
        )
    if epoch is None:
        epoch = epochs[0] if len(epochs) == 1 else PRETRAINED_EPOCH
        if epoch not in epochs:
            raise ValueError(
                f"--pretrained {text}: there are the epochs {listed}: choose one, as in "
                f"--pretrained {prefix},{epochs[-1]}"
            )
        plan.notes.append(f"--pretrained {text}: epoch {epoch}, of {listed}")
    return f"{prefix}-{epoch:04d}.params"


def _open_classes(plan: Plan) -> np.ndarray:
    """Return the class weights of ``--class-weights``, (K, D)."""
    s = plan.settings
    try:
        rows = open_class_weights(s.class_weights, plan.class_rows)
        if rows.shape[1] != s.embedding_size:
            raise ValueError(
                f"{s.class_weights}: it holds class weights of width {rows.shape[1]}, and the "
                f"embeddings have width {s.embedding_size} (--emb-size)"
            )
    except (ValueError, OSError) as error:
        raise ValueError(f"--class-weights: {error}") from None
    return rows.whole()


def _load_pretrained(plan: Plan, trained: Trained) -> np.ndarray | None:
    """Load the network's parameters; return class weights, (K, D), if the file has fitting ones."""
    s, notes = plan.settings, plan.notes
    path = _pretrained_file(plan)
    loaded, missing, unexpected = load_parameters(plan.network, path)
    if not loaded:
        raise ValueError(f"{path}: it holds no parameter of {s.network}")
    notes.append(f"{len(loaded)} parameters of {s.network} are from {path}")
    if missing:
        notes.append(
            f"warning: {len(missing)} parameters are not in it, such as {_some(missing)}: they "
            "begin at random"
        )
    if unexpected:
        notes.append(
            f"warning: {len(unexpected)} of its parameters are not used, such as "
            f"{_some(unexpected)}"
        )
    return _pretrained_classes(plan, path)


def _pretrained_classes(plan: Plan, path: str) -> np.ndarray | None:
    """Return the class weights of a model, (K, D), if it has fitting ones."""
    parts = class_weights_in_model(path)
    if not parts or plan.settings.class_weights or not plan.num_classes:
        return None
    rows = as_rows(path, parts)
    shape = (plan.class_rows, plan.settings.embedding_size)
    try:
        fitting = as_rows(path, parts, plan.class_rows)
    except ValueError:
        fitting = rows
    if fitting.shape == shape:
        plan.notes.append("class weights are from it, too")
        return fitting.whole()
    plan.notes.append(
        f"warning: its class weights {rows.shape} do not fit these {plan.num_classes} classes: "
        "they begin at random"
    )
    return None


def _some(names: list[str]) -> str:
    return ", ".join(sorted(names)[:3])
