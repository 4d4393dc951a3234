"""Pages are well-formed, hold what they show, and show names as they are."""

import base64
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from dsoftmax.recognition.common import html
from tests.pages import read_page, texts_of

NASTY = "<b>&\"'</b><script>alert(1)</script> \x00\x1b\udce9 ✓"
SHOWN = "<b>&\"'</b><script>alert(1)</script> \ufffd\ufffd\ufffd ✓"


@pytest.mark.parametrize(
    "make",
    [
        lambda text: html.paragraph(text),
        lambda text: html.items([text]),
        lambda text: html.table([text], [[text]]),
        lambda text: html.tiles({text: text}),
        lambda text: html.details(text, text),
        lambda text: html.group(text, [html.card([b"jpeg"], text)]),
        lambda text: html.section(text, text, kind="good"),
    ],
)
def test_text_is_shown_as_it_is(make, tmp_path):
    html.write_page(str(tmp_path / "x.html"), NASTY, NASTY, [make(NASTY)])
    found = texts_of(tmp_path / "x.html")
    assert found.count(SHOWN) >= 4  # title, heading, subtitle and the block
    assert not list(read_page(tmp_path / "x.html").iter("script"))


def test_attributes_are_escaped():
    made = html.element("img", alt='">&', title=None)
    assert ElementTree.fromstring(made).attrib == {"alt": '">&'}


def test_links_to_sections(tmp_path):
    sections = [html.section("Hardest mistakes", "a"), html.section("A & B", "b", kind="bad")]
    html.write_page(str(tmp_path / "x.html"), "t", "s", sections)
    links = [
        (link.get("href"), "".join(link.itertext()))
        for link in read_page(tmp_path / "x.html").iter("a")
    ]
    assert links == [("#hardest-mistakes", "Hardest mistakes"), ("#a-b", "A & B")]


def test_a_figure_is_inside_and_the_same_each_time():
    def draw():
        figure = Figure()
        figure.subplots().plot([0, 1], [0, 1])
        return html.figure(figure, "how to read it", "a line")

    made = draw()
    assert made == draw()
    image = ElementTree.fromstring(made).find("img")
    kind, _, content = image.get("src").partition(",")
    assert kind == "data:image/svg+xml;base64"
    assert ElementTree.fromstring(base64.b64decode(content)).tag.endswith("svg")
