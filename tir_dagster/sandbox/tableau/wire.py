"""Tableau's REST language: requests and answers in XML, and errors in the server's own form."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tir_dagster.sandbox.tableau.xmltree import UnsafeXmlError, bare, descendants, new_tree, parse

NAMESPACE = "http://tableau.com/api"
XML_HEADERS = {"content-type": "application/xml;charset=utf-8"}
# What XML 1.0 cannot carry at all, not even escaped.
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

SUMMARIES = {
    400000: "Bad Request",
    400006: "Invalid Page Number",
    400007: "Invalid Page Size",
    400011: "Bad Request",
    400031: "Bad Request",
    401000: "Unauthorized Access",
    401001: "Signin Error",
    401002: "Unauthorized Access",
    403004: "Forbidden",
    403007: "Forbidden",
    404000: "Resource Not Found",
    404002: "Resource Not Found",
    404004: "Resource Not Found",
    404005: "Resource Not Found",
    404006: "Resource Not Found",
    404011: "Resource Not Found",
    404015: "Resource Not Found",
    404950: "API endpoint not found",
    405000: "Invalid Request Method",
    409006: "Resource Conflict",
    409093: "Resource Conflict",
    413000: "Payload Too Large",
    429000: "Too Many Requests",
    500000: "Internal Server Error",
}


class ApiError(Exception):
    """A refusal: the code's first three digits are the HTTP status."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail

    @property
    def status(self) -> int:
        return self.code // 1000


@dataclass(frozen=True)
class Answer:
    """What a handler returns: a status, the children of `<tsResponse>`, and headers."""

    status: int = 200
    content: tuple[ET.Element, ...] = ()
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        return b"" if self.status == 204 else response_text(*self.content)


@dataclass(frozen=True)
class JsonAnswer:
    """What a handler of the metadata API returns: its GraphQL answers are JSON, also those with errors."""

    value: Any


def node(tag: str, attributes: dict[str, Any] | None = None, *content: ET.Element) -> ET.Element:
    """An element of an answer; None leaves an attribute out, truth values become `true` and `false`."""
    element = ET.Element(tag)
    for name, value in (attributes or {}).items():
        if value is not None:
            element.set(name, _attribute_text(value))
    element.extend(content)
    return element


def _attribute_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return _NOT_XML.sub("\ufffd", str(value))


def text_node(tag: str, text: str) -> ET.Element:
    element = ET.Element(tag)
    element.text = _NOT_XML.sub("\ufffd", text)
    return element


def response_text(*content: ET.Element) -> bytes:
    root = ET.Element("tsResponse", {"xmlns": NAMESPACE})
    root.extend(content)
    return b"<?xml version='1.0' encoding='UTF-8'?>" + ET.tostring(root, encoding="utf-8")


def error_text(code: int | str, detail: str, summary: str | None = None) -> bytes:
    """`<tsResponse><error code=…>` with its summary and detail."""
    words = summary or SUMMARIES.get(whole_number(str(code)) or 0) or "Resource Not Found"
    error = node("error", {"code": code}, text_node("summary", words), text_node("detail", detail))
    return response_text(error)


def read_request(body: bytes) -> Any:
    """The request's root element; an empty body is an empty request, with or without Tableau's namespace."""
    if not body.strip():
        return new_tree("tsRequest")
    try:
        root = parse(body)
    except UnsafeXmlError as error:
        raise ApiError(400000, f"Payload is either malformed or incomplete. {error}") from error
    if bare(root.tag) != "tsRequest":
        raise ApiError(400000, f"Payload is either malformed or incomplete. Unexpected element {bare(root.tag)!r}")
    return root


def read_json(body: bytes) -> Any:
    """The request's JSON value; nesting without end is as bad as no JSON at all."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400000, f"Payload is either malformed or incomplete. {error}") from error


def find(root: Any, *tags: str) -> Any:
    """The first element on that path of names below the root, or None."""
    for tag in tags:
        root = next((element for element in descendants(root, tag) if element is not root), None)
        if root is None:
            return None
    return root


def required(root: Any, *tags: str) -> Any:
    element = find(root, *tags)
    if element is None:
        raise ApiError(400000, f"Payload is either malformed or incomplete. Missing element {tags[-1]!r}")
    return element


def is_true(value: str | None) -> bool:
    return (value or "").strip().lower() == "true"


def whole_number(text: str) -> int | None:
    """Plain digits as a number, None for anything else.

    `isdigit` also takes ² and ٣. A number of more than 18 digits counts as the largest: nothing here goes that far,
    and SQLite cannot be asked for it.
    """
    if not re.fullmatch(r"[0-9]+", text):
        return None
    return int(text) if len(text) <= 18 else 10**18


def moment(seconds: float | None) -> str | None:
    """A time as Tableau writes it, in whole seconds."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
