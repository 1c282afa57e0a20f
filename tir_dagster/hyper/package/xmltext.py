"""XML that is read as a tree but edited as text, so that all other text stays unchanged."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from xml.parsers import expat
from xml.sax.saxutils import escape

from lxml import etree  # type: ignore[import-untyped]

_OPENING = re.compile(rb"<[^\s/>]+")
_ATTRIBUTE = re.compile(rb"\s+([^\s=/>]+)\s*=\s*(\"[^\"]*\"|'[^']*')")
_UTF_8 = {"UTF-8", "US-ASCII", "ASCII", None}


class UnreadableXmlError(ValueError):
    """Not XML, or XML with a document type, which no Tableau document has and entity bombs need."""


class XmlText:
    """A document's text, its tree, and where each element stands in the text."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        self._starts = _element_starts(text)
        parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False, huge_tree=False)
        try:
            self.root = etree.fromstring(text, parser)
        except etree.XMLSyntaxError as error:
            raise UnreadableXmlError(f"it is not well-formed XML: {error}") from error
        self._edits: list[tuple[int, int, bytes]] = []

    def set(self, element: Any, attribute: str, value: str) -> None:
        """Give an attribute, found by its bare name, another value; an element without it stays as it is."""
        encoding = self.root.getroottree().docinfo.encoding
        if (encoding or "").upper() not in _UTF_8:
            raise UnreadableXmlError(f"it is written in {encoding}; only UTF-8 can be edited")
        start = self._starts[self._place(element)]
        opening = _OPENING.match(self.text, start)
        assert opening is not None
        place = opening.end()
        while match := _ATTRIBUTE.match(self.text, place):
            if bare(match[1].decode()) == attribute:
                quote = match[2][:1].decode()
                entity = {quote: "&quot;" if quote == '"' else "&apos;"}
                self._edits.append((match.start(2) + 1, match.end(2) - 1, escape(value, entity).encode()))
                return
            place = match.end()

    def _place(self, element: Any) -> int:
        return next(place for place, candidate in enumerate(self.root.iter(etree.Element)) if candidate is element)

    def edited(self) -> bytes:
        """The text with all edits made; the later ones first, so that the earlier places still hold."""
        text = self.text
        for begin, end, value in sorted(self._edits, reverse=True):
            text = text[:begin] + value + text[end:]
        return text


def _element_starts(text: bytes) -> list[int]:
    parser = expat.ParserCreate()
    starts: list[int] = []

    def refuse(*_: object) -> None:
        raise UnreadableXmlError("it declares a document type, which no Tableau document needs")

    parser.StartDoctypeDeclHandler = refuse
    parser.EntityDeclHandler = refuse
    parser.StartElementHandler = lambda *_: starts.append(parser.CurrentByteIndex)
    try:
        parser.Parse(text, True)
    except (expat.ExpatError, ValueError, LookupError) as error:
        if isinstance(error, UnreadableXmlError):
            raise
        raise UnreadableXmlError(f"it is not well-formed XML: {error}") from error
    return starts


def bare(name: Any) -> str:
    """The name without a feature prefix (`_.fcp.Feature.true...relation` is a relation) and without a namespace."""
    return name.rsplit("}", 1)[-1].rsplit("...", 1)[-1] if isinstance(name, str) else ""


def children(parent: Any, tag: str) -> list[Any]:
    return [] if parent is None else [element for element in parent if bare(element.tag) == tag]


def valid_children(parent: Any, tag: str) -> list[Any]:
    """The same without those that only readers of older versions look at: `_.fcp.Feature.false...relation`."""
    elements = children(parent, tag)
    return [element for element in elements if ".false..." not in element.tag] or elements


def child(parent: Any, tag: str) -> Any:
    """The first direct child of that bare name, or None."""
    return next(iter(children(parent, tag)), None)


def descendants(parent: Any, tag: str) -> Iterator[Any]:
    return iter(()) if parent is None else (element for element in parent.iter() if bare(element.tag) == tag)


def attribute(element: Any, name: str) -> str | None:
    """The attribute of that bare name."""
    items = () if element is None else element.attrib.items()
    return next((str(value) for key, value in items if bare(key) == name), None)


def text_of(parent: Any, tag: str) -> str:
    """The text of the first child of that bare name."""
    element = child(parent, tag)
    return "" if element is None else (element.text or "").strip()
