"""Packages with a refresh history, and their documents."""

from __future__ import annotations

import io
import re
import zipfile
from pathlib import Path

from lxml import etree

from tir_dagster.sandbox.tableau.packages import Column, SnowflakeConnection

SNOWFLAKE = SnowflakeConnection("acme.snowflakecomputing.com", "SHOP", "PUBLIC", "WH", "READER", "TABLEAU")
FIELDS = (
    Column("ORDER_ID", "NUMBER(38,0)"),
    Column("ORDER_DATE", "DATE", local_name="Order Date", extract_name="order date"),
    Column("NAME", "VARCHAR"),
)
EVENTS = """<refresh increment-key='[Order Date]' incremental-updates='true' _.fcp.Later.true...lookback='3'>
        <refresh-event add-from-file-path='orders &amp; more' increment-value='#2001-01-01#' refresh-type='create' rows-inserted='1' timestamp-start='2020-12-27 22:46:33.357' />
        <!-- kept -->
        <_.fcp.Later.true...refresh-event increment-value="#2002-02-02#" add-from-file-path='x' _.fcp.Later.true...note='a > b' refresh-type='increment' rows-inserted='1' timestamp-start='2020-12-28 22:46:33.357'/>
      </refresh>"""


def with_events(text: str) -> str:
    head, extract = text.split("<extract ")
    extract = re.sub(r"<refresh [^>]*/>", EVENTS, extract, count=1)
    return f"{head}<unknown-node future='ja'>é</unknown-node><extract {extract}"


def edited(source: Path, target: Path, edit) -> Path:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, edit(content.decode()).encode() if name.endswith(".tds") else content)
        if "Image/logo.png" not in old.namelist():
            new.writestr("Image/logo.png", b"\x89PNG" * 50)
            new.writestr("Data/Extracts/", b"")
    return target


def document_of(path: Path) -> bytes:
    with zipfile.ZipFile(path) as opened:
        return opened.read(next(name for name in opened.namelist() if name.endswith(".tds")))


def canonical(text: str, *, skip: tuple[str, ...]) -> bytes:
    root = etree.fromstring(text.encode())
    for element in root.iter(etree.Element):
        for name in skip:
            element.attrib.pop(name, None)
    out = io.BytesIO()
    root.getroottree().write_c14n(out, with_comments=True)
    return out.getvalue()
