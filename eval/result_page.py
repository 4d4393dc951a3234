"""Show results as sections of a page: scores, curves, thresholds and the hardest mistakes.

The results are those that the commands in eval/ write with ``--json``; each section shows what the
results have of it.
"""

from __future__ import annotations

import os
from typing import Any, Mapping, Sequence

import numpy as np

from dsoftmax.eval import plots
from dsoftmax.recognition.common import html
from dsoftmax.recognition.common.html import Html
from dsoftmax.recognition.data.images import ImageError, encode, fit
from dsoftmax.recognition.data.packs import Pack, PackError

MISTAKES_SHOWN = 12  # of each kind
THUMBNAIL = 84  # pixels
THUMBNAIL_QUALITY = 80  # of a JPEG

Result = Mapping[str, Any]


def write_results(
    path: str, subtitle: str, results: Sequence[Result], packs: Sequence[Pack] = ()
) -> None:
    """Write a page of results.

    Parameters
    ----------
    path : str
    subtitle : str
        What was evaluated.
    results : sequence of dict
        As written by ``--json``.
    packs : sequence of Pack
        Those of the results with ``mistakes``, for their images.
    """
    html.write_page(path, "Evaluation", subtitle, sections_of(results, packs))


def sections_of(results: Sequence[Result], packs: Sequence[Pack] = ()) -> list[Html]:
    """Return all sections that results have something for; see `write_results`."""
    made = [
        _scores(results),
        _curves(results),
        _thresholds(results),
        _ranks(results),
        _mistakes(results, {pack.name: pack for pack in packs}),
    ]
    return [section for section in made if section]


def thumbnail(image: np.ndarray) -> bytes:
    """Return a small JPEG of an image, (height, width, 3) uint8 in RGB."""
    height, width = image.shape[:2]
    small = fit(image, THUMBNAIL, max(round(THUMBNAIL * width / height), 1))
    return encode(np.ascontiguousarray(small[:, :, ::-1]), quality=THUMBNAIL_QUALITY)


def percent(share: float | None, digits: int = 2) -> str:
    """Write a share as per cent; a dash where there is none."""
    return "–" if share is None or not np.isfinite(share) else f"{100 * share:.{digits}f}%"


def _scores(results: Sequence[Result]) -> Html | None:
    """Lay out the figures that each command prints."""
    blocks = []
    verified = [result for result in results if "accuracy_flip" in result]
    if verified:
        blocks += [
            html.table(
                ["", "pairs", "accuracy", "95% interval", "TAR at FAR 0.1%", "AUC", "EER"],
                [_verification_row(result) for result in verified],
            ),
            html.note(
                "Accuracy is the share of pairs that are judged rightly, by cross-validation over "
                "ten folds, ± its deviation over the folds. TAR is the share of pairs of one "
                "person that are accepted when 1 of 1,000 pairs of two people is; EER is the rate "
                "at which both kinds of mistakes are equally frequent."
            ),
        ]
    at_far = [result for result in results if result.get("tar_at_far")]
    if at_far:
        fars = list(at_far[0]["tar_at_far"])
        rows = [
            [result["name"], *(percent(result["tar_at_far"].get(far)) for far in fars)]
            for result in at_far
        ]
        blocks += [
            html.table(["TAR at FAR", *fars], rows),
            html.note(
                "The share of pairs of one person that are accepted, at the threshold that accepts "
                "this share of the pairs of two people."
            ),
        ]
    return html.section("Scores", *blocks) if blocks else None


def _verification_row(result: Result) -> list[str]:
    interval = result.get("accuracy_interval")
    return [
        result["name"],
        f"{result['pairs']:,}",
        f"{percent(result['accuracy_flip'])} ± {percent(result['accuracy_flip_std'])}",
        " to ".join(map(percent, interval)) if interval else "–",
        percent(result["val"]["tar"]),
        "–" if result["auc"] is None else f"{result['auc']:.5f}",
        percent(result["eer"]),
    ]


def _curves(results: Sequence[Result]) -> Html | None:
    curves = {result["name"]: plots.Curve(**result["roc"]) for result in results if "roc" in result}
    histograms = {
        result["name"]: plots.Histogram(**result["scores"])
        for result in results
        if "scores" in result
    }
    blocks = []
    if curves:
        blocks.append(
            html.columns(
                html.figure(
                    plots.draw_roc(curves),
                    "ROC: the higher a curve, the more pairs of one person are accepted for the "
                    "same share of false accepts. The left end is as far as so few pairs can tell.",
                    "ROC curves",
                ),
                html.figure(
                    plots.draw_det(curves),
                    "DET: the same curve seen by its mistakes. Lower is better; a straight line "
                    "means that scores are normally distributed.",
                    "DET curves",
                ),
            )
        )
    if histograms:
        blocks.append(
            html.figure(
                plots.draw_scores(histograms),
                "The further apart the two hills, the easier the decision. Shares are logarithmic, "
                "so that the few mistakes can be seen.",
                "distributions of scores",
            )
        )
    return html.section("Curves", *blocks) if blocks else None


def _thresholds(results: Sequence[Result]) -> Html | None:
    rows = [
        [
            result["name"],
            f"{one['far']:g}",
            _cosine(one["cosine"]),
            " to ".join(map(_cosine, one["cosine_interval"], (-1.0, 1.0))),
            percent(one["tar"]),
            " to ".join(map(percent, one["tar_interval"])),
            "" if result["pairs"] - result["same"] >= one["pairs_needed"] else "too few pairs",
        ]
        for result in results
        for one in result.get("calibration", ())
    ]
    if not rows:
        return None
    heading = ["", "FAR", "accept above cosine", "95% interval", "TAR", "95% interval", ""]
    return html.section(
        "Thresholds",
        html.table(heading, rows),
        html.note(
            "Choose the false accept rate you can live with, and accept pairs above its cosine. "
            "“Too few pairs” marks rates that so few pairs of two people can't show."
        ),
    )


def _cosine(value: float | None, end: float = 1.0) -> str:
    """Write a cosine; `end` if it has no limit."""
    return f"{end if value is None or not np.isfinite(value) else value:.4f}"


def _ranks(results: Sequence[Result]) -> Html | None:
    blocks = []
    ranked = {result["name"]: result["cmc"] for result in results if result.get("cmc")}
    if ranked:
        drawn = plots.draw_cmc(ranked)
        caption = "The share of searches whose right answer is among the first so many."
        blocks.append(html.figure(drawn, caption, "identification rate against rank"))
    rates = {
        result["name"]: {int(size): rate for size, rate in result["distractors"].items()}
        for result in results
        if result.get("distractors")
    }
    if rates:
        drawn = plots.draw_distractors(rates)
        caption = "How often the right person comes first among more and more strangers."
        blocks.append(html.figure(drawn, caption, "rank-1 rate against distractors"))
    if not blocks:
        return None
    rows = [
        [result["name"], f"{kind}{key}", percent(rate)]
        for result in results
        for kind, entry in (("rank ", "ranks"), ("TPIR at FPIR ", "tpir"))
        for key, rate in result.get(entry, {}).items()
    ]
    listed = [html.table(["", "", "rate"], rows)] if rows else []
    return html.section("Identification", html.columns(*blocks), *listed)


def _mistakes(results: Sequence[Result], packs: Mapping[str, Pack]) -> Html | None:
    blocks: list[Html] = []
    for result in results:
        if "mistakes" not in result:
            continue
        pack = packs.get(result["target"])
        for kind, heading in (
            ("accepted", "two people taken for one, the highest cosines first"),
            ("refused", "one person taken for two, the lowest cosines first"),
        ):
            shown = result["mistakes"][kind][:MISTAKES_SHOWN]
            blocks.append(html.element("h3", f"{result['name']}: {heading}"))
            if not shown:
                blocks.append(html.note("None."))
            elif pack is None:
                numbers = ", ".join(f"{one['pair']} ({one['cosine']:+.3f})" for one in shown)
                blocks.append(html.note(f"The pack is not at hand. Pairs: {numbers}"))
            else:
                blocks.append(html.cards(_pair_card(pack, one) for one in shown))
    if not blocks:
        return None
    return html.section(
        "Hardest mistakes",
        html.note(
            "Pairs on the wrong side of the threshold. Look for wrong labels first: a pair that "
            "you would judge as the model does is one."
        ),
        *blocks,
    )


def _pair_card(pack: Pack, mistake: Mapping[str, Any]) -> Html:
    pair = mistake["pair"]
    both = (2 * pair, 2 * pair + 1)
    lines = [f"pair {pair}, cosine {mistake['cosine']:+.3f}"]
    if pack.people is not None:
        lines.append(" / ".join(dict.fromkeys(map(str, pack.people[pair]))))
    if pack.paths:
        lines += [os.path.basename(pack.paths[image]) for image in both]
    try:
        return html.card([thumbnail(pack.decode(image)) for image in both], *lines)
    except (PackError, ImageError, IndexError):
        return html.card([], *lines, "the images can't be read")
