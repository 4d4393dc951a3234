"""The page is well-formed, self-contained, and shows what was found."""

import base64
import re
from html.parser import HTMLParser

import cv2
import numpy as np
import pytest

from dsoftmax.recognition.data.cleaning.page import SIDE, write_page
from dsoftmax.recognition.data.cleaning.suggestions import (
    DROP_IDENTITY,
    DROP_IMAGE,
    DUPLICATE,
    FEW_IMAGES,
    MERGE,
    OUTLIER,
    SAME_PERSON,
    UNREADABLE,
    Suggestion,
    find_faults,
)
from dsoftmax.recognition.data.records import Records

VOID = ("meta", "img", "polyline", "path")


class Checker(HTMLParser):
    """Collects elements, and fails where one is closed that is not open."""

    def __init__(self):
        super().__init__()
        self.open, self.elements, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture
def page(dataset, tmp_path, rng):
    """Return a function that writes a page of suggestions and parses it."""
    folder, _ = dataset(counts=(5, 5, 5), size=(150, 150))
    (folder / "identities.csv").write_text('label,name\n0,"<b>Ann & ""Bo"""\n')
    records = Records(folder)
    findings = find_faults(records, rng.normal(size=(15, 8)).astype(np.float32), -1, 1.1)

    def write(*suggestions, most=100):
        write_page(tmp_path / "report.html", records, findings, suggestions, most)
        text = (tmp_path / "report.html").read_text(encoding="utf-8")
        checker = Checker()
        checker.feed(text)
        checker.close()
        assert not checker.open
        return text, checker

    return write


def test_every_kind_of_suggestion(page):
    text, checker = page(
        Suggestion(DROP_IMAGE, OUTLIER, 0, '<b>Ann & "Bo"', 3, 0.1234, 2, "", None, 0.5678),
        Suggestion(MERGE, SAME_PERSON, 1, "", None, 0.876, 2),
        Suggestion(DROP_IMAGE, DUPLICATE, 1, "", 5, 0.987, 2, "", 11),
        Suggestion(DROP_IDENTITY, FEW_IMAGES, 2),
        Suggestion(DROP_IMAGE, UNREADABLE, 1, "", 7),
    )
    words = " ".join(checker.text)
    for expected in ("0.123", "0.568", "0.876", "0.987", '0 (<b>Ann & "Bo")', "1, image 7"):
        assert expected in words
    assert "<b>" not in text
    images = [attributes["src"] for tag, attributes in checker.elements if tag == "img"]
    assert len(images) == (1 + 4 + 4) + (4 + 4) + (1 + 1)
    for source in images:
        content = base64.b64decode(source.partition("data:image/jpeg;base64,")[2])
        assert cv2.imdecode(np.frombuffer(content, np.uint8), 1).shape == (SIDE, SIDE, 3)


def test_the_page_needs_no_network(page):
    text, checker = page(Suggestion(DROP_IMAGE, DUPLICATE, 1, "", 5, 0.987, 2, "", 11))
    assert not {"script", "link", "iframe", "a", "base"} & {tag for tag, _ in checker.elements}
    without_images = re.sub(r'src="data:[^"]*"', "", text)
    assert "src=" not in without_images
    assert not re.search(r"https?:|url\(|@import", without_images)


def test_the_page_shows_the_worst(page):
    several = [Suggestion(MERGE, SAME_PERSON, 1, "", None, 0.9 - k / 100, 2) for k in range(5)]
    text, _ = page(*several, most=2)
    assert text.count('class="case"') == 2
    assert "The worst 2 are shown" in text
    assert "0.890" in text
    assert "0.880" not in text
