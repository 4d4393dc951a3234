"""Read pages of HTML back, and refuse those that need anything but themselves."""

import re
from xml.etree import ElementTree


def read_page(path):
    """Parse a page, which must be well-formed and fetch nothing; return its root."""
    text = path.read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    names = [element.get("id") for element in root.iter() if element.get("id")]
    assert len(names) == len(set(names))
    for element in root.iter():
        assert element.tag not in ("link", "iframe", "object", "script")
        for attribute, value in element.attrib.items():
            assert not attribute.startswith("on")
            if attribute in ("src", "href"):
                assert value.startswith(("data:image/", "#")), value[:80]
            if attribute == "href":
                assert value[1:] in names
    assert not re.search(r"@import|url\(", text)
    return root


def texts_of(path):
    """Return all texts of a page, each without spaces at its ends."""
    return [text.strip() for text in read_page(path).itertext() if text.strip()]


def section(path, name):
    """Return the texts of one section, joined."""
    (found,) = [one for one in read_page(path).iter("section") if one.get("id") == name]
    return " ".join(text.strip() for text in found.itertext())


def pictures(path, name):
    """Count the pictures of one section: figures, and photographs."""
    (found,) = [one for one in read_page(path).iter("section") if one.get("id") == name]
    sources = [image.get("src") for image in found.iter("img")]
    figures = sum(source.startswith("data:image/svg+xml") for source in sources)
    return figures, len(sources) - figures
