"""Build pages of HTML that need no other file: text, tables, figures and pictures in one.

Whatever is not `Html` already is text: it is escaped where it enters a page. Pages are well-formed
XML, too, so that any parser can check them.
"""

from __future__ import annotations

import base64
import html
import io
import re
from typing import TYPE_CHECKING, Any, Iterable, Sequence

from dsoftmax.recognition.common.files import AtomicFile

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VOID = ("img", "meta")  # elements that have no content
# What XML does not allow, and the halves of pairs by which Python keeps bytes that are no UTF-8.
_ILLEGAL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")

STYLE = """
body { margin: 0 auto; max-width: 1080px; padding: 1.2rem; color: #1d2733; background: #f5f6f8;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
  color-scheme: light; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: .4rem 0 0; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 0 0 .5rem; }
h3 { font-size: 1rem; margin: 1.1rem 0 .3rem; }
p, ul { margin: .45rem 0; max-width: 50rem; }
.subtitle, .note, figcaption { color: #566472; }
.note, figcaption { font-size: .9rem; }
nav { margin: .8rem 0; display: flex; flex-wrap: wrap; gap: .35rem; }
nav a { background: #fff; border: 1px solid #d9dee4; border-radius: 1rem; padding: .1rem .75rem;
  font-size: .87rem; color: #0b5c94; text-decoration: none; }
section { background: #fff; border: 1px solid #e1e5ea; border-radius: .6rem; margin: 1rem 0;
  padding: 1.1rem 1.3rem; }
section.good { border-left: .5rem solid #009e73; }
section.fair { border-left: .5rem solid #e69f00; }
section.bad { border-left: .5rem solid #d55e00; }
.headline { font-size: 1.15rem; font-weight: 600; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr));
  gap: 1rem; }
figure { margin: .7rem 0 0; min-width: 0; }
figure > img { display: block; width: 100%; max-width: 36rem; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; margin: .5rem 0; }
th, td { text-align: left; padding: .22rem .9rem .22rem 0; border-bottom: 1px solid #e8ebef;
  vertical-align: top; overflow-wrap: anywhere; }
th { color: #566472; font-weight: 600; }
th, td:first-child { overflow-wrap: normal; }
td { font-variant-numeric: tabular-nums; min-width: 3rem; }
.cards { display: flex; flex-wrap: wrap; gap: .7rem; margin: .5rem 0; }
.card { background: #f5f6f8; border-radius: .4rem; padding: .45rem; font-size: .8rem;
  max-width: 15rem; overflow-wrap: anywhere; }
.card.group { max-width: none; }
.group > .cards { margin: .2rem 0 0; gap: .8rem; }
.group .card { padding: 0; max-width: 11.5rem; }
.card .faces { display: flex; flex-wrap: wrap; gap: .3rem; margin-bottom: .25rem; }
.card img { border-radius: .25rem; height: 84px; width: auto; display: block; }
.tiles { display: flex; flex-wrap: wrap; gap: .6rem; margin: .6rem 0; }
.tile { background: #f5f6f8; border-radius: .4rem; padding: .4rem .9rem; }
.tile b { display: block; font-size: 1.2rem; font-variant-numeric: tabular-nums; }
.tile span { color: #566472; font-size: .82rem; }
summary { cursor: pointer; color: #0b5c94; font-size: .92rem; margin-top: .5rem; }
@media print { body { background: #fff; } section { break-inside: avoid; } nav { display: none; } }
"""


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def escape(text: Any) -> Html:
    """Return text as HTML shows it; `Html` stays as it is."""
    if isinstance(text, Html):
        return text
    return Html(html.escape(_ILLEGAL.sub("\ufffd", str(text))))


def element(tag: str, *content: Any, **attributes: Any) -> Html:
    """Make an element; ``kind="note"`` is its class, and attributes of None are left out.

    Examples
    --------
    >>> element("p", "a < b ", element("b", "c"), kind="note")
    '<p class="note">a &lt; b <b>c</b></p>'
    """
    named = {("class" if name == "kind" else name): value for name, value in attributes.items()}
    described = "".join(
        f' {name}="{escape(value)}"' for name, value in named.items() if value is not None
    )
    if tag in VOID:
        return Html(f"<{tag}{described}/>")
    return Html(f"<{tag}{described}>{''.join(map(escape, content))}</{tag}>")


def paragraph(*content: Any, kind: str | None = None) -> Html:
    """Make a paragraph."""
    return element("p", *content, kind=kind)


def note(*content: Any) -> Html:
    """Make a paragraph in small print."""
    return paragraph(*content, kind="note")


def items(entries: Iterable[Any]) -> Html:
    """Make a list with a bullet per entry."""
    return element("ul", *(element("li", entry) for entry in entries))


def table(heading: Sequence[Any], rows: Iterable[Sequence[Any]]) -> Html:
    """Make a table; where a window is too narrow for it, it scrolls."""
    head = element("tr", *(element("th", cell) for cell in heading))
    body = [element("tr", *(element("td", cell) for cell in row)) for row in rows]
    content = element("table", element("thead", head), element("tbody", *body))
    return element("div", content, kind="scroll")


def tiles(numbers: dict[str, Any]) -> Html:
    """Show a few numbers large, each with its name."""
    shown = (
        element("div", element("b", value), element("span", name), kind="tile")
        for name, value in numbers.items()
    )
    return element("div", *shown, kind="tiles")


def details(summary: str, *content: Any) -> Html:
    """Make a part that opens when it is clicked."""
    return element("details", element("summary", summary), *content)


def columns(*content: Any) -> Html:
    """Lay out blocks side by side where there is room."""
    return element("div", *content, kind="columns")


def section(title: str, *content: Any, kind: str | None = None) -> Html:
    """Make a section, which `page` lists at its top."""
    return element("section", element("h2", title), *content, id=_anchor(title), kind=kind)


def figure(drawing: Figure, caption: str, name: str) -> Html:
    """Embed a figure as SVG.

    Parameters
    ----------
    drawing : matplotlib.figure.Figure
    caption : str
        How to read it.
    name : str
        What it shows, for those who can't see it.
    """
    import matplotlib

    file = io.BytesIO()
    # The same figure gives the same bytes: no date, no random names.
    with matplotlib.rc_context({"svg.hashsalt": name}):
        drawing.savefig(file, format="svg", metadata={"Date": None})
    source = _data_address("image/svg+xml", file.getvalue())
    return element("figure", element("img", src=source, alt=name), element("figcaption", caption))


def card(pictures: Iterable[bytes], *lines: Any) -> Html:
    """Make a card of pictures (JPEG) side by side, with lines of text below them."""
    shown = [element("img", src=_data_address("image/jpeg", one), alt="") for one in pictures]
    return element(
        "div",
        element("div", *shown, kind="faces"),
        *(element("div", line) for line in lines),
        kind="card",
    )


def group(title: Any, made: Iterable[Html]) -> Html:
    """Make a card of several that belong together."""
    return element("div", element("b", title), cards(made), kind="card group")


def cards(made: Iterable[Html]) -> Html:
    """Lay out cards in rows."""
    return element("div", *made, kind="cards")


def page(title: str, subtitle: str, sections: Sequence[Html]) -> str:
    """Make a whole page, with links to its sections."""
    links = (
        element("a", Html(heading), href=f"#{anchor}")
        for anchor, heading in re.findall(
            r'<section id="([^"]*)"[^>]*><h2>(.*?)</h2>', "".join(sections)
        )
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", Html(STYLE)),
    )
    body = element(
        "body",
        element("h1", title),
        paragraph(subtitle, kind="subtitle"),
        element("nav", *links),
        *sections,
    )
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def write_page(path: str, title: str, subtitle: str, sections: Sequence[Html]) -> None:
    """Write a whole page to a file."""
    with AtomicFile(path, "w") as file:
        file.write(page(title, subtitle, sections))


def _anchor(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower()).strip("-")


def _data_address(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"
