"""The protocols of IJB on templates, 1:1 and 1:N, and how their figures are printed."""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np

from dsoftmax.eval import metrics, templates
from dsoftmax.recognition.common.inner_products import inner_products

FARS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
PAPER_FARS = (1e-1, 1e-2, 1e-3, 1e-4)
FPIRS = (0.01, 0.1)
RANKS = (1, 5, 10)
CMC_RANKS = 50
PROBES_PER_BLOCK = 4096


class Search(NamedTuple):
    """The results of one gallery."""

    gallery: str
    identification: metrics.Identification
    points: list[metrics.OperatingPoint]  # one for each of FPIRS


def verify_templates(
    pooled: templates.Templates, pairs: templates.Pairs, threads: int = 2
) -> tuple[np.ndarray, list[metrics.OperatingPoint]]:
    """Run 1:1: score pairs of templates.

    Parameters
    ----------
    pooled : Templates
    pairs : Pairs
    threads : int

    Returns
    -------
    scores : (pairs,) float32
    points : list of OperatingPoint
        One per rate of FARS.
    """
    if pairs.issame.all() or not pairs.issame.any():
        raise ValueError(f"{pairs.path}: it needs pairs of one person, 1, and of two people, 0")
    scores = templates.pair_scores(pooled, pairs, threads)
    return scores, metrics.at_far(scores[pairs.issame], scores[~pairs.issame], FARS)


def search(
    pooled: templates.Templates,
    gallery: tuple[np.ndarray, np.ndarray],
    probes: tuple[np.ndarray, np.ndarray],
    name: str,
) -> Search:
    """Run 1:N on one gallery, each of `gallery` and `probes` (templates, subjects).

    Probes whose subject is not in this gallery are the open set's strangers.
    """
    in_gallery = pooled.rows(gallery[0], f"gallery {name}")
    in_probes = pooled.rows(probes[0], "the probes")
    entries = pooled.features[in_gallery]
    starts = range(0, len(in_probes), PROBES_PER_BLOCK)
    blocks = [slice(start, start + PROBES_PER_BLOCK) for start in starts]
    products = inner_products((pooled.features[in_probes[block]], entries) for block in blocks)
    parts = []
    for scores, block in zip(products, blocks):
        scores[pooled.is_empty[in_probes[block]]] = templates.FAILED
        scores[:, pooled.is_empty[in_gallery]] = templates.FAILED
        parts.append(metrics.identify(scores, probes[1][block], gallery[1]))
    result = metrics.Identification(*(np.concatenate(part) for part in zip(*parts)))
    if not result.ranks.size:
        raise ValueError(f"gallery {name} holds nobody the probes show")
    points = result.at_fpir(FPIRS) if result.other_scores.size else []
    return Search(name, result, points)


def table(points_by_name: Mapping[str, Sequence[metrics.OperatingPoint]]) -> str:
    """Lay out the rates as insightface does, in per cent, one row per name."""
    head = ["Methods", *(f"{far:g}" for far in FARS)]
    rows = [
        [name, *(f"{100 * point.tar:.2f}" for point in points)]
        for name, points in points_by_name.items()
    ]
    widths = [max(map(len, column)) + 2 for column in zip(head, *rows)]
    rule = "+" + "+".join("-" * width for width in widths) + "+"
    heading, *lines = (
        "|" + "|".join(text.center(width) for text, width in zip(texts, widths)) + "|"
        for texts in (head, *rows)
    )
    return "\n".join([rule, heading, rule, *lines, rule])


def paper_row(points: Sequence[metrics.OperatingPoint]) -> str:
    """Lay out the rates as the paper's tables do, at the FARs 1e-1, 1e-2, 1e-3 and 1e-4."""
    by_far = dict(zip(FARS, points))
    return " & ".join(f"{100 * by_far[far].tar:.2f}" for far in PAPER_FARS)


def search_lines(searches: Sequence[Search]) -> list[str]:
    """Lay out the ranks and open-set rates of each gallery and of their mean."""
    lines = []
    for one in searches:
        result = one.identification
        ranks = " ".join(f"top{rank} = {result.rank_rate(rank):.5f}" for rank in RANKS)
        inside, outside = len(result.ranks), len(result.other_scores)
        lines.append(f"[{one.gallery}] {ranks} ({inside} probes in it, {outside} not)")
        for fpir, point in zip(FPIRS, one.points):
            lines.append(
                f"[{one.gallery}] TPIR@FPIR={fpir:g}: {point.tar:.5f} "
                f"(cosine above {point.threshold:.4f})"
            )
    means = mean_of_galleries(searches)
    ranks = " ".join(f"top{rank} = {means['ranks'][f'{rank}']:.5f}" for rank in RANKS)
    lines.append(f"[mean] {ranks}")
    lines += [f"[mean] TPIR@FPIR={fpir}: {rate:.5f}" for fpir, rate in means["tpir"].items()]
    return lines


def mean_of_galleries(searches: Sequence[Search]) -> dict[str, Any]:
    """Average the results of the galleries."""
    return {
        "ranks": {
            f"{rank}": float(np.mean([one.identification.rank_rate(rank) for one in searches]))
            for rank in RANKS
        },
        "tpir": {
            f"{fpir:g}": float(np.mean([one.points[place].tar for one in searches]))
            for place, fpir in enumerate(FPIRS)
            if all(one.points for one in searches)
        },
        "cmc": np.mean([one.identification.cmc(CMC_RANKS) for one in searches], axis=0).tolist(),
    }


def read_known_people(path: str, pooled: templates.Templates) -> tuple[np.ndarray, np.ndarray]:
    """Read templates and the people they show; refuse templates that have no face."""
    people = templates.read_people(path)
    pooled.rows(people[0], path)
    return people
