"""A page that shows what is wrong with a dataset: one file, with all of its images inside."""

from __future__ import annotations

import base64
import collections
import html
import string
from typing import Iterable, NamedTuple, Sequence

import numpy as np

from dsoftmax.recognition.common.files import AtomicFile
from dsoftmax.recognition.data.cleaning.suggestions import (
    DUPLICATE,
    FEW_IMAGES,
    OUTLIER,
    SAME_PERSON,
    UNREADABLE,
    Findings,
    Suggestion,
)
from dsoftmax.recognition.data.images import ImageError, announced_size, decode, encode, fit
from dsoftmax.recognition.data.recordio import RecordError
from dsoftmax.recognition.data.records import Records

SIDE = 112  # of a thumbnail; larger images are made smaller
TYPICAL = 4  # images that stand for an identity
BINS = 80  # of the histogram
NAMES_LISTED = 200

_PAGE = string.Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>$title</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 76em; padding: 0 1em;
       color: #222; background: #fff; }
h1 { font-size: 1.5em; } h2 { margin-top: 2em; border-bottom: 1px solid #ccc; }
table { border-collapse: collapse; } td, th { padding: .25em .8em; text-align: left; }
th { border-bottom: 1px solid #888; } td.number { text-align: right; }
.case { display: flex; flex-wrap: wrap; gap: 1.2em; align-items: flex-end; padding: .7em 0;
        border-bottom: 1px solid #eee; }
figure { margin: 0; } figcaption { font-size: 13px; max-width: 30em; }
img { height: 84px; margin-right: 2px; border-radius: 3px; }
.suspect img { outline: 3px solid #c33; outline-offset: -3px; }
.cosine { font-size: 1.3em; width: 4.5em; text-align: right; align-self: center; }
.note { color: #666; }
</style>
</head>
<body>
<h1>$title</h1>
$content
</body>
</html>
""")


class Kind(NamedTuple):
    """How the page presents the suggestions of one reason."""

    reason: str
    heading: str
    explanation: str


KINDS = (
    Kind(
        OUTLIER,
        "Images that do not belong to their identity",
        "The cosine is that of the image with the centre of the identity's other images. Last: the "
        "identity that the image is nearest to.",
    ),
    Kind(
        SAME_PERSON,
        "Identities that are one person",
        "The cosine is that of their centres. The left one would become a part of the right one.",
    ),
    Kind(
        DUPLICATE,
        "Copies",
        "Pixels and embeddings are nearly equal. The left copy would be dropped. Copies under two "
        "names come first.",
    ),
)


class Thumbnails:
    """Images of a dataset as parts of a page."""

    def __init__(self, records: Records, findings: Findings):
        self._records, self._findings = records, findings
        labels = findings.members.labels.tolist()
        self._identity_of_label = {label: number for number, label in enumerate(labels)}

    def image(self, image: int) -> str:
        """Return an image as an HTML element."""
        try:
            content = self._records.read(image)[1]
            size = announced_size(content.tobytes())
            if size is None or max(size) > SIDE:
                content = np.frombuffer(encode(fit(decode(content), SIDE, SIDE)), np.uint8)
        except (ImageError, RecordError) as error:
            return f'<span class="note">image {image}: {html.escape(str(error))}</span>'
        content = content.tobytes()
        kind = "png" if content.startswith(b"\x89PNG") else "jpeg"
        data = base64.b64encode(content).decode("ascii")
        return f'<img alt="image {image}" src="data:image/{kind};base64,{data}">'

    def identity(self, label: int, without: int | None = None) -> str:
        """Return typical images of an identity, those nearest to its centre."""
        images = self._findings.members.images(self._identity_of_label[label])
        images = images[images != without]
        order = np.argsort(-self._findings.centres.cosines[images], kind="stable")
        return "".join(map(self.image, images[order[:TYPICAL]].tolist()))

    def count(self, label: int) -> int:
        """Return how many images an identity has."""
        return int(self._findings.members.counts[self._identity_of_label[label]])


def write_page(
    path: str, records: Records, findings: Findings, suggestions: Sequence[Suggestion], most: int
) -> None:
    """Write the page.

    Parameters
    ----------
    path : str
    records : Records
    findings : Findings
    suggestions : sequence of Suggestion
        Of all reasons, the worst first.
    most : int
        How many of each reason to show.
    """
    thumbnails = Thumbnails(records, findings)
    by_reason: dict[str, list[Suggestion]] = collections.defaultdict(list)
    for suggestion in suggestions:
        by_reason[suggestion.reason].append(suggestion)
    content = [_summary(records, findings, by_reason), _histogram(findings)]
    for kind in KINDS:
        found = by_reason[kind.reason]
        content.append(f"<h2>{html.escape(kind.heading)}: {len(found)}</h2>")
        content.append(f"<p>{html.escape(kind.explanation)}{_shown(len(found), most)}</p>")
        content += [_case(suggestion, thumbnails) for suggestion in found[:most]]
    content.append(_names("Identities with few images", by_reason[FEW_IMAGES]))
    content.append(_names("Images that can't be read", by_reason[UNREADABLE]))
    page = _PAGE.substitute(
        title=html.escape(f"What to clean in {records.path}"), content="\n".join(content)
    )
    with AtomicFile(path) as file:
        file.write(page.encode("utf-8", "replace"))


def _shown(count: int, most: int) -> str:
    return f" The worst {most} are shown; the list has all." if count > most else ""


def _summary(records: Records, findings: Findings, by_reason: dict[str, list[Suggestion]]) -> str:
    thresholds = findings.thresholds
    rows = [
        ("images", f"{len(records):,}"),
        ("identities", f"{len(findings.members):,}"),
        *((reason, f"{len(found):,}") for reason, found in by_reason.items()),
        ("an outlier has a cosine below", f"{thresholds.outlier:.3f}"),
        ("one person has a cosine from", f"{thresholds.same_person:.3f}"),
    ]
    cells = "\n".join(
        f'<tr><td>{html.escape(name)}</td><td class="number">{value}</td></tr>'
        for name, value in rows
    )
    warning = f"<p><b>Warning:</b> {html.escape(findings.warning)}</p>" if findings.warning else ""
    return f"{warning}<table>\n{cells}\n</table>"


def _histogram(findings: Findings) -> str:
    """Draw the cosines of images with their own identity and with strangers."""
    has_others = findings.members.counts[findings.members.identity_of_image] > 1
    curves = {
        "with their own identity": (findings.centres.cosines[has_others], "#2a7"),
        "with other identities": (findings.samples.strangers, "#c33"),
    }
    width, height, low = 760, 180, -0.4
    edges = np.linspace(low, 1, BINS + 1)

    def across(cosine: float) -> float:
        return (cosine - low) / (1 - low) * width

    shapes = []
    for number, (name, (cosines, colour)) in enumerate(curves.items()):
        if not len(cosines):
            continue
        share = np.histogram(np.clip(cosines, low, 1), edges)[0] / len(cosines)
        points = " ".join(
            f"{across(edge):.1f},{height - value / share.max() * (height - 20):.1f}"
            for edge, value in zip((edges[:-1] + edges[1:]) / 2, share)
        )
        shapes.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
        shapes.append(f'<text x="8" y="{16 + 16 * number}" fill="{colour}">images {name}</text>')
    threshold = across(findings.thresholds.outlier)
    shapes.append(f'<path d="M{threshold:.1f} 0V{height}" stroke="#222" stroke-dasharray="4"/>')
    for tick in (-0.4, -0.2, 0, 0.2, 0.4, 0.6, 0.8, 1):
        shapes.append(f'<text x="{across(tick):.0f}" y="{height + 16}">{tick:g}</text>')
    return (
        "<figure>"
        f'<svg width="{width + 20}" height="{height + 24}" font-size="12">{"".join(shapes)}</svg>'
        "<figcaption>Cosines, and the threshold of outliers</figcaption></figure>"
    )


def _figure(images: str, caption: str, is_suspect: bool = False) -> str:
    kind = ' class="suspect"' if is_suspect else ""
    return f"<figure{kind}>{images}<figcaption>{html.escape(caption)}</figcaption></figure>"


def _case(suggestion: Suggestion, thumbnails: Thumbnails) -> str:
    label, other = suggestion.label, suggestion.other_label
    mine = f"identity {_titled(label, suggestion.name)}"
    theirs = f"identity {_titled(other, suggestion.other_name)}"
    if suggestion.reason == OUTLIER:
        parts = [
            _figure(thumbnails.image(suggestion.image), f"image {suggestion.image}", True),
            _figure(thumbnails.identity(label, without=suggestion.image), mine),
        ]
        if other != label:
            nearest = f"nearest: {theirs}, cosine {suggestion.other_cosine:.3f}"
            parts.append(_figure(thumbnails.identity(other), nearest))
    elif suggestion.reason == SAME_PERSON:
        parts = [
            _figure(thumbnails.identity(one), f"{title}, {thumbnails.count(one)} images")
            for one, title in ((label, mine), (other, theirs))
        ]
    else:
        parts = [
            _figure(thumbnails.image(image), f"image {image} of {title}", is_suspect)
            for image, title, is_suspect in (
                (suggestion.image, mine, True),
                (suggestion.other_image, theirs, False),
            )
        ]
    cosine = f'<span class="cosine">{suggestion.cosine:.3f}</span>'
    return f'<div class="case">{cosine}{"".join(parts)}</div>'


def _titled(label: int, name: str) -> str:
    return f"{label} ({name})" if name else str(label)


def _names(heading: str, found: Iterable[Suggestion]) -> str:
    found = list(found)
    listed = [
        _titled(one.label, one.name) + ("" if one.image is None else f", image {one.image}")
        for one in found[:NAMES_LISTED]
    ]
    more = f"; and {len(found) - NAMES_LISTED} more" if len(found) > NAMES_LISTED else ""
    text = html.escape("; ".join(listed)) + more or "none"
    return f"<h2>{html.escape(heading)}: {len(found)}</h2>\n<p>{text}</p>"
