"""Lay out a run's report, section by section."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dsoftmax.eval import plots
from dsoftmax.eval.result_page import sections_of
from dsoftmax.recognition.common import html
from dsoftmax.recognition.common.html import Html
from dsoftmax.recognition.report import charts, measures
from dsoftmax.recognition.report.class_images import ClassImages
from dsoftmax.recognition.report.run_folder import RunFolder
from dsoftmax.recognition.report.sources import Sources
from dsoftmax.recognition.report.verdict import judge
from dsoftmax.recognition.settings import parse

PAIRS_SHOWN = 12  # of the closest classes
CLASSES_DRAWN = 3000  # in the distribution of cosines
# Settings that name a run or its place; they are no choices to compare.
NAMES = ("network", "loss", "dataset", "data_dir", "models_root", "extra_model_name", "resume")


def termination_of(run: RunFolder) -> float | None:
    """Return the z_y at which the loss lets go, if all negatives were orthogonal."""
    if not run.has_classes:
        return None
    try:
        spec = run.settings.loss_spec()
    except ValueError:  # a loss that the run's own configuration has registered
        return None
    criterion = spec.make_criterion()
    if not spec.options["normalize"] or not hasattr(criterion, "termination_point"):
        return None  # inner products have no end
    negatives = (spec.sampled_share or 1.0) * run.num_classes
    return criterion.termination_point(math.log(max(negatives - 1, 1)))


def verdict(run: RunFolder, sources: Sources) -> Html:
    """Say how the run went and what to try next."""
    found = judge(run, termination_of(run))
    blocks = [html.paragraph(found.headline, kind="headline"), _tiles(run)]
    if found.findings:
        blocks.append(html.items(found.findings))
    if found.advice:
        blocks += [html.element("h3", "What to try next"), html.items(found.advice)]
    blocks.append(html.note("By rules of thumb, from the numbers on this page."))
    return html.section("Verdict", *blocks, kind=found.kind)


def _tiles(run: RunFolder) -> Html:
    total = f" of {run.total_steps:,}" if run.total_steps else ""
    last_step = run.diverged["step"] if run.diverged else run.last_step
    shown: dict[str, Any] = {"steps": f"{last_step:,}{total}"}
    if run.metrics:
        last = run.metrics[-1]
        shown["last loss"] = f"{last['loss']:.4g}"
        with_what = "the own class" if run.has_classes else "the positive"
        shown[f"last cosine with {with_what}"] = f"{last['positive_cosine']:.3f}"
        shown["images per second"] = f"{np.median(run.column('samples_per_second')[1]):,.0f}"
    for target in dict.fromkeys(row["target"] for row in run.scores):
        best = max(row["accuracy"] for row in run.scores if row["target"] == target)
        shown[f"best accuracy on {target}"] = f"{best:.2%}"
    if run.has_classes:
        shown["classes"] = f"{run.num_classes:,}"
    return html.tiles(shown)


def settings(run: RunFolder, sources: Sources) -> Html:
    """List what differs from the defaults, the machine, and everything else."""
    s = run.settings
    every = s.as_json()
    names = {name: every[name] for name in NAMES[:4]}
    try:
        usual = parse([f"--{name.replace('_', '-')}={every[name]}" for name in NAMES[:4]]).as_json()
    except (ValueError, SystemExit):  # names that only the run's own configuration knows
        usual = {}
    usual = _flat(usual)
    changed = [
        [name, _plain(value), _plain(usual[name])]
        for name, value in _flat(every).items()
        if name not in NAMES and name in usual and _plain(value) != _plain(usual[name])
    ]
    blocks = [
        html.table(["", ""], [[name, _plain(value)] for name, value in names.items()]),
        html.element("h3", "Differs from the defaults"),
        html.table(["setting", "this run", "default"], changed)
        if changed
        else html.note("Nothing." if usual else "The defaults of this configuration are unknown."),
        html.details(
            "All settings",
            html.table(["setting", "value"], [[k, _plain(v)] for k, v in _flat(every).items()]),
        ),
    ]
    machine = run.config.get("machine")
    if machine:
        blocks += [
            html.element("h3", "Machine"),
            html.table(["", ""], [[name, _plain(value)] for name, value in machine.items()]),
        ]
    return html.section("Settings", *blocks)


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """Return settings with the options of network and loss beside the others."""
    flat = {}
    for name, value in values.items():
        flat.update(
            {f"{name}: {key}": one for key, one in value.items()}
            if isinstance(value, dict)
            else {name: value}
        )
    return flat


def _plain(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_plain, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


_CLASS_FIGURES = (
    (
        "Cosines of images with classes",
        {
            "positive_cosine": "own class",
            "negative_cosine": "other classes, mean",
            "max_negative_cosine": "other classes, highest",
        },
        "cosine",
        "An image should be near its own class and near nobody else's: the first line rises, the "
        "second stays at 0.",
    ),
    (
        "Training accuracy",
        {"accuracy": "nearest to the own class"},
        "share of the training images",
        "The share of a batch that is nearer to its own class than to any negative it was compared "
        "with.",
    ),
)
_TRIPLET_FIGURES = (
    (
        "Cosines of anchors",
        {
            "positive_cosine": "positive",
            "negative_cosine": "negative, mean",
            "max_negative_cosine": "negative, highest",
        },
        "cosine",
        "With the other two images of their triplets. Negatives are picked anew in each bag, just "
        "beyond the positive: what has been learnt shows in the verification, not here.",
    ),
    (
        "Training accuracy",
        {"accuracy": "positive nearer than negative"},
        "share of the triplets",
        "The share of a batch's triplets whose anchor is nearer to its positive than to its "
        "negative.",
    ),
)


def training(run: RunFolder, sources: Sources) -> Html:
    """Show loss, cosines and rates over time."""
    is_dissected = len(run.column("intra")[0]) > 0
    parts = {"intra": "intra (own class)", "inter": "inter (other classes)"}
    figures = [
        (
            "Loss",
            {"loss": "loss", **(parts if is_dissected else {})},
            "loss per image (nats)" if run.has_classes else "loss per triplet",
            "Lower is better. "
            + (
                "The loss is intra, which pulls an image to its class, plus inter, which pushes it "
                "from others."
                if is_dissected
                else "This loss can't be split into a part for the own class and one for others."
                if run.has_classes
                else "0 for a triplet whose negative is further away by the margin."
            ),
        ),
        (
            "Inter minus its floor",
            {"inter_above_floor": "inter minus its floor"},
            "nats above orthogonal negatives",
            "What is left of the inter-class loss beyond the value it has if all other classes are "
            "orthogonal. 0 or less: other classes are as far away as they need to be.",
        ),
        *(_CLASS_FIGURES if run.has_classes else _TRIPLET_FIGURES),
        (
            "Learning rate",
            {"lr": "learning rate"},
            "learning rate",
            "The schedule. Where it steps down, the loss usually does, too.",
        ),
        (
            "Speed",
            {"samples_per_second": "images per second"},
            "images per second",
            "Dips are other programs on the machine, or images that came too late.",
        ),
    ]
    drawn = []
    for title, names, unit, caption in figures:
        figure = charts.draw_columns(run, title, names, unit)
        if figure:
            drawn.append(html.figure(figure, caption, title))
    if not drawn:
        return html.section("Training", html.note("There are not two lines in metrics.csv yet."))
    return html.section("Training", html.columns(*drawn))


def positives(run: RunFolder, sources: Sources) -> Html | None:
    """Show how close training images are to their classes, if the loss has any."""
    if not run.has_classes:
        return None
    title = "Images and their classes"
    if sources.embed is None or sources.pipeline is None or run.state is None:
        return html.section(title, html.note(_why_missing(run, sources)))
    found = measures.sample_positives(run, sources)
    end = termination_of(run)
    caption = (
        f"{len(found.z_y):,} of {sources.pipeline.num_images:,} training images at random, not "
        "mirrored, with the network as it verifies. "
    )
    if end is not None:
        share = np.mean(found.z_y >= end)
        caption += (
            f"{share:.0%} have reached {end:.3f}, where the loss stops to pull an image to its "
            "class"
        )
        is_dissected = run.settings.loss_spec().criterion.dissected
        caption += "." if is_dissected else ", if all negatives were orthogonal."
    blocks = [html.figure(charts.draw_positives(found, end), caption, "distribution of z_y")]
    by_size = charts.draw_images_per_class(found)
    if by_size:
        blocks.append(
            html.figure(
                by_size,
                "Each dot is an image. Classes with few images have weights that follow each of "
                "them; very large ones may hold several people.",
                "z_y against the images of a class",
            )
        )
    every = [] if by_size else [html.note("All classes of the sample have as many images.")]
    worst = np.argsort(found.z_y)[:PAIRS_SHOWN]
    images = ClassImages(sources.pipeline)
    return html.section(title, html.columns(*blocks), *every, _far_classes(found, worst, images))


def _far_classes(found: measures.Positives, worst: np.ndarray, images: ClassImages) -> Html:
    """Name the classes of the images that are farthest from theirs."""
    rows = [
        [
            f"{found.z_y[place]:+.3f}",
            images.name(int(found.classes[place])),
            f"{found.images_per_class[found.classes[place]]:,}",
        ]
        for place in worst
    ]
    listed = html.table(["z_y", "class", "images of the class"], rows)
    return html.details("The farthest images of the sample: look here for wrong labels", listed)


def _why_missing(run: RunFolder, sources: Sources) -> str:
    if run.state is None:
        return "No state was saved yet."
    if sources.pipeline is None:
        return f"The dataset {run.settings.data_dir} is not at hand."
    return (
        "The network of the newest state is not at hand here; tools/report.py shows it, if it can "
        "be loaded."
    )


def classes(run: RunFolder, sources: Sources) -> Html | None:
    """Show how far apart class weights are, and the closest pairs, if the loss has classes."""
    if not run.has_classes:
        return None
    title = "Classes"
    if run.state is None:
        return html.section(title, html.note(_why_missing(run, sources)))
    weights = run.class_weights()
    total, width = weights.shape
    if total < 2:
        return html.section(title, html.note("There is a single class."))
    rng = np.random.default_rng(0)
    drawn = np.sort(rng.choice(total, min(CLASSES_DRAWN, total), replace=False))
    found = measures.closest_pairs(weights, PAIRS_SHOWN)
    images = ClassImages(sources.pipeline)
    extreme = math.sqrt(2 * math.log(max(found.compared * found.among / 2, 2)) / width)
    searched = (
        f"all {total:,} classes were compared with each other"
        if found.is_exact
        else f"{found.compared:,} random classes of {total:,} were compared with {found.among:,}"
    )
    return html.section(
        title,
        html.figure(
            plots.draw_classes({f"step {run.facts['step']:,}": np.array(weights[drawn])}),
            f"Cosines between the weights of {len(drawn):,} classes"
            + ("" if len(drawn) == total else f", at random of {total:,}")
            + f". In {width} dimensions random directions are N(0, 1/{width}), the grey hill: "
            "classes that are learnt should be no closer than that.",
            "distribution of the cosines between class weights",
        ),
        html.element("h3", "The closest pairs"),
        html.note(
            f"Here {searched}. Among as many random directions the highest cosine is about "
            f"{extreme:.2f}. Pairs far above it may be one person under two labels."
        ),
        html.cards(_pair_card(pair, images) for pair in found.pairs),
    )


def _pair_card(pair: measures.ClosePair, images: ClassImages) -> Html:
    both = (html.card(images.pictures(one), images.name(one)) for one in (pair.one, pair.other))
    return html.group(f"cosine {pair.cosine:+.3f}", both)


def row_ages(run: RunFolder, sources: Sources) -> Html | None:
    """Show how long class rows wait for an update, if a step updates only some."""
    share = run.settings.loss_spec().sampled_share
    if share is None:
        return None
    title = "Age of class rows"
    if sources.pipeline is None or run.state is None:
        return html.section(title, html.note(_why_missing(run, sources)))
    try:
        found = measures.row_ages(run, sources)
    except ValueError as error:
        return html.section(title, html.note(f"Not known: {error}."))
    known = found.ages[found.ages >= 0]
    never = len(found.ages) - len(known)
    used = np.mean(found.ages == 0)
    words = f"The median row was last used {np.median(known):,.0f} steps ago"
    if never:
        when = "since the run began" if found.is_whole_run else f"in the last {found.steps:,} steps"
        words += f"; {never:,} of {len(found.ages):,} were not used {when}"
    return html.section(
        title,
        html.figure(
            charts.draw_row_ages(found, float(used)),
            f"A step updates {used:.2%} of the class rows: those of its images and those drawn as "
            f"negatives. {words}. The dashed line is what chance makes of this rate; the draws of "
            f"{found.steps:,} steps were repeated, as they follow from the seed and the step.",
            "share of the class rows that wait, against steps",
        ),
    )


def verification(run: RunFolder, sources: Sources) -> list[Html]:
    """Show scores over time, and the newest verification in detail."""
    if not run.scores:
        if sources.packs:
            names = ", ".join(pack.name for pack in sources.packs)
            words = f"None yet: {names} come every {run.settings.verbose:,} steps (--verbose)."
        else:
            targets = ", ".join(run.settings.val_targets or ()) or "nothing"
            words = (
                "There was none: no .bin of --target was found in the dataset's folder. Looked "
                f"for: {targets}."
            )
        return [html.section("Verification", html.note(words))]
    made = [
        html.section(
            "Verification",
            html.figure(
                charts.draw_best(run.scores),
                "Dots are verifications on people who are not trained on, with the deviation over "
                "the folds; the line is the best so far.",
                "accuracy over time",
            ),
            html.note(f"The sections below are of step {run.results_step:,}.")
            if run.results
            else html.note("No verification was kept in detail."),
        )
    ]
    return made + sections_of(run.results, sources.packs)


def times(run: RunFolder, sources: Sources) -> Html | None:
    """Show what the parts of a step take."""
    if not run.times:
        return None
    newest = run.times[-1]
    return html.section(
        "Time of a step",
        html.figure(
            charts.draw_times(newest),
            f"Before step {newest['step']:,.0f} a few steps waited after each part, to measure it; "
            "other steps overlap their parts and are faster. Data: waiting for decoded images. "
            "Network: forward and backward. Head: the loss and its gradient to the embeddings. "
            + (
                "Update: the gradient to the class weights, and both updates."
                if run.has_classes
                else "Update: that of the network."
            ),
            "time of the parts of a step",
        ),
    )
