"""XML trees that keep what they do not understand: comments, namespaces and unknown nodes survive a round trip."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import defusedxml.common
import defusedxml.ElementTree
from lxml import etree  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class UnsafeXmlError(ValueError):
    """The text is not XML, or it declares a document type or entities, which nobody needs here."""


def parse(text: bytes) -> Any:
    """The root element; refuses document types and entity declarations before anything is expanded."""
    try:
        defusedxml.ElementTree.fromstring(text, forbid_dtd=True)
        return etree.fromstring(text, etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False))
    except defusedxml.common.DefusedXmlException as error:
        raise UnsafeXmlError("document types and entity declarations are not allowed") from error
    except (SyntaxError, ValueError, LookupError) as error:
        raise UnsafeXmlError(f"not well-formed XML: {error}") from error


def new_tree(tag: str, namespaces: Mapping[str, str] | None = None) -> Any:
    return etree.Element(tag, nsmap=dict(namespaces or {}))


def child(parent: Any, tag: str, attributes: Mapping[str, str] | None = None, **more: str) -> Any:
    """A new last child."""
    return etree.SubElement(parent, tag, {**(attributes or {}), **more})


def serialise(root: Any, *, pretty: bool = False) -> bytes:
    """The whole document, with the comments that stand before its root."""
    if pretty:
        etree.indent(root)
    text: bytes = etree.tostring(root.getroottree(), xml_declaration=True, encoding="utf-8")
    return text


def bare(name: Any) -> str:
    """The name without a feature prefix (`_.fcp.Feature.true...relation` is a relation) and without a namespace."""
    return str(name).rsplit("}", 1)[-1].rsplit("...", 1)[-1] if isinstance(name, str) else ""


def children(parent: Any, tag: str) -> Iterator[Any]:
    """The direct children of that bare name."""
    return (element for element in parent if bare(element.tag) == tag)


def first(parent: Any, tag: str) -> Any:
    """The first direct child of that bare name, or None."""
    return next(children(parent, tag), None)


def descendants(parent: Any, tag: str) -> Iterator[Any]:
    return (element for element in parent.iter() if bare(element.tag) == tag)


def attribute(element: Any, name: str) -> str | None:
    """The attribute of that bare name."""
    for key, value in element.attrib.items():
        if bare(key) == name:
            return str(value)
    return None


def text_of(element: Any, tag: str) -> str | None:
    """The text of the first child of that bare name."""
    found = first(element, tag)
    return None if found is None else (found.text or "").strip()
