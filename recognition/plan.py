"""The plan of a run, which refuses what can't work before anything is trained or written."""

from __future__ import annotations

import glob
import json
import os
import sys
import zlib

import mxnet as mx
import numpy as np

from dsoftmax.losses.head import LARGEST_ARRAY
from dsoftmax.recognition import estimate, networks
from dsoftmax.recognition.common.devices import idle_gpus, usable_contexts
from dsoftmax.recognition.common.distributed.group import ALONE, Group
from dsoftmax.recognition.common.memory import available_bytes
from dsoftmax.recognition.common.parallel import map_ordered
from dsoftmax.recognition.data.augment import Augmentation
from dsoftmax.recognition.data.packs import Pack, read_pack
from dsoftmax.recognition.data.pipeline import Pipeline, TooFewImagesError
from dsoftmax.recognition.data.records import Records
from dsoftmax.recognition.flags import AUTO, MUST
from dsoftmax.recognition.log import import_mxboard
from dsoftmax.recognition.needs import Layout, head_size, splits_classes
from dsoftmax.recognition.networks.files import to_symbol
from dsoftmax.recognition.networks.flops import count_flops
from dsoftmax.recognition.networks.layers import BatchNorm
from dsoftmax.recognition.schedule import learning_rate
from dsoftmax.recognition.settings import Settings
from dsoftmax.recognition.states import is_whole, list_states, read_facts


class Plan:
    """Opens or makes the devices, data, network, schedule and folder of a run, and checks them.

    It allocates nothing on a device and writes nothing.

    Parameters
    ----------
    settings : Settings
    group : Group
        The processes of the run.

    Attributes
    ----------
    contexts : list of mx.Context
    images_at_once : int
        The number of images that the contexts of this process take at once.
    batch_size : int
        The number of samples per step: of all contexts of all processes, and of all micro-batches.
    pipeline : Pipeline
    num_classes : int
        0 for a loss without class weights.
    is_class_parallel : bool
        Whether the class weights are split over the contexts.
    packs : list of Pack
        Those to verify on; empty in all processes but the first.
    network : Network
        Not initialized yet.
    flops : int
        Floating-point operations of the network per image.
    memory : estimate.Estimate
        What one device will hold.
    states : str
        The folder of saved states.
    total_steps : int
        `sys.maxsize` for a run without an end.
    rate_at : callable
        Returns the learning rate of a step.
    notes : list of str
        Lines for the log, which is opened later.
    """

    def __init__(self, settings: Settings, group: Group = ALONE):
        self.settings = settings
        self.group = group
        self.notes: list[str] = list(settings.notes)
        self.contexts = usable_contexts(settings.devices)
        self.images_at_once = settings.per_batch_size * len(self.contexts)
        self.batch_size = self.images_at_once * group.size * settings.accumulate
        self._check_devices()
        self._check_accumulation()
        self._check_first_classes()
        self._check_teacher()
        has_classes = settings.loss_spec().has_classes
        if group.size > 1 and not has_classes:
            raise ValueError(
                f"--loss {settings.loss}: triplets are mined by one process: give it several "
                "--devices instead of starting several processes"
            )
        self.pipeline = self._open_data()
        self.num_classes = self._count_classes() if has_classes else 0
        self._check_saved_classes()
        self.is_class_parallel = splits_classes(settings, len(self.contexts), self.num_classes)
        self._check_agreement()
        self.packs = self._open_packs() if group.is_first else []
        self.network = self._make_network()
        symbol, image_shape = to_symbol(self.network), (3, *self.pipeline.image_size)
        self.flops = count_flops(symbol, image_shape)
        self.memory = self._check_memory(symbol, image_shape)
        self.states = os.path.join(settings.folder, "states")
        if group.is_first:
            self._check_folder()
            if settings.tensorboard:
                import_mxboard()
        end = settings.max_steps or settings.end_epoch * len(self.pipeline)
        self.total_steps = end or sys.maxsize
        self.rate_at = learning_rate(
            settings.lr_schedule,
            settings.lr,
            end,
            settings.lr_steps,
            warmup_steps=settings.warmup_steps,
        )

    def _check_devices(self) -> None:
        if self.contexts[0].device_type != "cpu":
            return
        idle = idle_gpus(self.settings.devices)
        if idle:
            ids, plural = ",".join(map(str, range(idle))), "s" * (idle > 1)
            self.notes.append(
                f"warning: this run uses the CPU, although MXNet sees {idle} GPU{plural}: set "
                f"CUDA_VISIBLE_DEVICES={ids} or give --devices gpu:{idle} to train on them, or "
                "--devices cpu if the CPU is what you want"
            )
        if self.settings.sync_bn:
            raise ValueError("--sync-bn is for GPUs: contexts of a CPU take turns and never meet")
        if self.settings.fp16_scale:
            raise ValueError("--fp16-scale is for GPUs: MXNet multiplies no float16 on CPUs")

    def _check_accumulation(self) -> None:
        s = self.settings
        if s.accumulate > 1 and s.loss_spec().sampler.needs_embeddings:
            raise ValueError(
                f"--accumulate {s.accumulate}: the negatives of {s.loss} depend on all embeddings "
                "of a step, which don't exist before its last micro-batch: choose another --loss, "
                "or a larger --per-batch-size"
            )

    def _check_first_classes(self) -> None:
        s = self.settings
        if s.class_weights and s.init_classes != "normal":
            raise ValueError(
                f"--class-weights {s.class_weights} and --init-classes {s.init_classes} both say "
                "how class weights begin: give one of them"
            )

    def _check_teacher(self) -> None:
        if self.settings.teacher and self.settings.freeze_backbone:
            raise ValueError(
                f"--teacher {self.settings.teacher}: with --freeze-backbone there is nothing to "
                "teach: leave one of them out"
            )

    @property
    def class_rows(self) -> int:
        """The number of class weights: one per class, or per centre of one."""
        return self.num_classes * self.settings.loss_spec().options.get("subcentres", 1)

    def _check_saved_classes(self) -> None:
        numbers = self.class_rows * self.settings.embedding_size
        if not self.settings.ckpt_embedding and numbers > LARGEST_ARRAY:
            raise ValueError(
                f"config.ckpt_embedding = False: {self.num_classes} class weights are more than an "
                "MXNet array holds: leave it True, and take class weights from the saved states, "
                "by tools/classes.py export"
            )

    def _open_data(self) -> Pipeline:
        s = self.settings
        records = Records(s.data_dir)
        try:
            return Pipeline(
                records,
                self.images_at_once * s.accumulate,
                s.image_size,
                Augmentation(mirror=s.mirror, color=s.color, cutoff=s.cutoff),
                seed=s.seed,
                shard=(self.group.rank, self.group.size),
                min_images=s.images_filter,
                remap_labels=s.images_filter > 1,
                threads=s.threads,
            )
        except TooFewImagesError as error:
            raise ValueError(self._describe_large_batch(records.path, error.images)) from None

    def _describe_large_batch(self, path: str, images: int) -> str:
        """Say why a batch does not fit into the dataset, and which one would."""
        s = self.settings
        factors = {
            "devices": len(self.contexts),
            "processes": self.group.size,
            "micro-batches": s.accumulate,
        }
        times = "".join(f" x {count} {what}" for what, count in factors.items() if count > 1)
        fitting = images // (self.batch_size // s.per_batch_size)
        advice = f"take --per-batch-size {fitting} or less"
        if not fitting:
            advice = "take fewer of these, or add images"
        left = f" after --images-filter {s.images_filter}" if s.images_filter > 1 else ""
        return (
            f"--per-batch-size {s.per_batch_size}{times}: a step takes {self.batch_size} images, "
            f"and {path} has {images}{left}: {advice}"
        )

    def _count_classes(self) -> int:
        path, available = self.pipeline.records.path, self.pipeline.num_classes
        wanted = self.settings.num_classes or available
        images_of = np.bincount(self.pipeline.images_and_classes()[1])
        highest = len(images_of) - 1
        if highest >= wanted:
            raise ValueError(
                f"{path}: it has the label {highest}, but there are to be {wanted} classes, 0 to "
                f"{wanted - 1}: correct --num-classes or the dataset"
            )
        known = min(available, wanted)
        seen = np.count_nonzero(images_of)
        if seen == 1:
            self.notes.append(f"warning: {path}: all images are of one class")
        if seen < known:
            self.notes.append(f"warning: {path}: {known - seen} of {known} classes have no image")
        if wanted > available:
            self.notes.append(
                f"warning: num_classes is {wanted}, but {path} has {available} classes: the others "
                "have no image"
            )
        return wanted

    def _check_agreement(self) -> None:
        """Refuse processes that would not train the same model on the same data."""
        mine = json.loads(json.dumps(self.settings.as_json()))
        for name in ("data_dir", "models_root", "threads", "resume", "extra_model_name"):
            mine.pop(name)  # may differ between hosts
        _, labels = self.pipeline.images_and_classes()
        mine["images"], mine["classes"] = self.pipeline.num_images, self.num_classes
        mine["checksum of the labels"] = zlib.crc32(np.ascontiguousarray(labels, np.int64))
        mine["image_size"] = list(self.pipeline.image_size)
        mine["devices"] = len(self.contexts)
        for rank, theirs in enumerate(self.group.gather_json("plan", mine)):
            differing = [name for name in mine if mine[name] != theirs.get(name)]
            if differing:
                name = differing[0]
                raise ValueError(
                    f"the processes do not agree: {name} is {mine[name]} in process "
                    f"{self.group.rank} and {theirs.get(name)} in process {rank}"
                )

    def _open_packs(self) -> list[Pack]:
        packs = []
        for target in self.settings.val_targets:
            path = os.path.join(self.settings.data_dir, f"{target}.bin")
            if os.path.exists(path):
                packs.append(self._check_pack(read_pack(path)))
            else:
                self.notes.append(f"there is no {path} to verify on")
        return packs

    def _check_pack(self, pack: Pack) -> Pack:
        """Decode all images: a broken one must not end the run at its first verification."""
        if len(pack) < 2:
            raise ValueError(f"{pack.name}.bin: one pair is too few to verify on")
        for _ in map_ordered(pack.decode, range(2 * len(pack)), self.settings.threads):
            pass
        return pack

    def _make_network(self) -> networks.Network:
        s = self.settings
        sync_devices = len(self.contexts) if s.sync_bn else 1
        try:
            network = networks.create(
                s.architecture,
                s.embedding_size,
                image_size=self.pipeline.image_size,
                sync_devices=sync_devices,
                **s.network_options,
            )
        except networks.ImageSizeError as error:
            raise ValueError(f"--image-size: {error}") from None
        except mx.MXNetError as error:
            reason = str(error).strip().splitlines()[-1]
            raise ValueError(f"--network {s.network} can't be made: {reason}") from None
        is_single = s.per_batch_size * sync_devices == 1 and not s.freeze_backbone
        if is_single and isinstance(network.embedding_layers[-1], BatchNorm):
            raise ValueError(
                "--per-batch-size 1: the last layer normalizes over the images of a device, and a "
                "single image has no gradient then: take 2 or more, or --freeze-backbone to train "
                "class weights alone"
            )
        return network

    def _check_memory(
        self, symbol: mx.sym.Symbol, image_shape: tuple[int, int, int]
    ) -> estimate.Estimate:
        """Return the estimate for a device, if the run fits."""
        s, contexts = self.settings, self.contexts
        layout = Layout(len(contexts), self.group.size)
        head = head_size(s, self.num_classes, layout)
        stored = head.stored()
        if stored.servers:
            held = estimate.gigabytes(stored.servers)
            self.notes.append(f"the servers will hold {held} of class weights, all together")
        of_device = estimate.of_device(symbol, image_shape, s.per_batch_size, head)
        is_sampled = head.sampled_share is not None
        if contexts[0].device_type == "cpu":
            whole = estimate.of_machine(
                of_device, len(contexts), self.is_class_parallel, stored.host
            )
            estimate.check_fits(whole, available_bytes(), "this machine", is_sampled)
        else:
            free, _ = mx.context.gpu_memory_info(contexts[0].device_id)
            estimate.check_fits(of_device, free, str(contexts[0]), is_sampled)
        return of_device

    def _check_folder(self) -> None:
        """Refuse to overwrite the files of another run, or to resume where there is no state."""
        folder, resume = self.settings.folder, self.settings.resume
        states = list_states(self.states)
        if states and not resume:
            raise FileExistsError(
                f"{folder} holds the states of an earlier run: go on with it by --resume, or give "
                "this one another name by --extra-model-name"
            )
        whole = next(filter(is_whole, states), None)
        if whole:
            self._check_classes(whole)
        if states:  # loading them will tell which of them is sound
            return
        # A run saves its first state before its first model: here the states have been lost.
        if self._find_models():
            raise FileExistsError(
                f"{folder} holds models, but no state to go on from: give this run another name by "
                "--extra-model-name, or another --models-root"
            )
        if resume == MUST:
            raise FileNotFoundError(
                f"--resume: there is no state in {self.states}: correct --models-root or what "
                "names the run, or let --resume auto begin a new one"
            )
        if resume == AUTO:
            self.notes.append(f"there is no state in {self.states}: a new run begins")

    def _find_models(self) -> list[str]:
        return glob.glob(glob.escape(self.settings.prefix) + "-[0-9]*.params")

    def _check_classes(self, state: str) -> None:
        """Refuse a state with another number of classes, and say how to go on with its network."""
        before = read_facts(state)["num_classes"]
        if before == self.num_classes:
            return
        prefix = self.settings.prefix
        epochs = [int(path[len(prefix) + 1 : -len(".params")]) for path in self._find_models()]
        epoch = 0 if 0 in epochs else max(epochs, default="<epoch>")
        raise ValueError(
            f"{state} has {before} classes, this run has {self.num_classes}: tools/classes.py add, "
            "drop, merge or remap makes a state to go on from; or instead of --resume begin a new "
            f"run with its network, by --pretrained {prefix},{epoch} --init-classes mean "
            "--extra-model-name <another>"
        )
