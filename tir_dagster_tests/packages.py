"""What every published package must satisfy, looked at with other eyes than the product's: zipfile, ElementTree, Hyper."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
import zipfile
from decimal import Decimal
from pathlib import Path
from typing import Any

from tableaudocumentapi import Datasource
from tableauhyperapi import Connection, Date, HyperProcess, TableName, Telemetry, Timestamp

EXTRACT = TableName("Extract", "Extract")


def plain(value: Any) -> str | None:
    """A value as one text with its type, whether Hyper or Snowflake gave it."""
    if isinstance(value, Timestamp):
        value = value.to_datetime()
    if isinstance(value, Date):
        value = value.to_date()
    if hasattr(value, "tzinfo") and value.tzinfo is not None:
        value = value.replace(tzinfo=None)
    if isinstance(value, Decimal):
        value = value.normalize()  # 1.3 and 1.30 are one number
    return None if value is None else f"{type(value).__name__} {value}"


def document_of(package: Path) -> ET.Element:
    with zipfile.ZipFile(package) as archive:
        (name,) = [member for member in archive.namelist() if member.endswith(".tds")]
        return ET.fromstring(archive.read(name))


def check_package(package: Path, folder: Path, *, before: ET.Element) -> list[list[Any]]:
    """All invariants; gives the extract's rows, in the order of its columns by name."""
    document = document_of(package)
    assert untouched(document) == untouched(before), "something else than the refresh information changed"
    assert Datasource.from_file(str(package)).connections, "tableaudocumentapi opens it"
    (connection,) = [node for node in document.iter("connection") if node.get("class") == "hyper"]
    with zipfile.ZipFile(package) as archive:
        hyper = Path(archive.extract(connection.attrib["dbname"], folder))
    with (
        HyperProcess(Telemetry.DO_NOT_SEND_USAGE_DATA_TO_TABLEAU, parameters={"log_config": ""}) as process,
        Connection(process.endpoint, str(hyper)) as opened,
    ):
        names = [column.name.unescaped for column in opened.catalog.get_table_definition(EXTRACT).columns]
        records = [record.findtext("remote-name") for record in connection.iter("metadata-record")]
        assert sorted(filter(None, records)) == sorted(names), "metadata records and Hyper columns differ"
        _check_increment(connection, opened)
        listed = ", ".join(f'"{name}"' for name in sorted(names))
        return opened.execute_list_query(f"SELECT {listed} FROM {EXTRACT}")


def rows_of(package: Path, folder: Path, *, without: str = "") -> list[list[Any]]:
    """The extract's rows, in the order of its columns by name, of any package with one Hyper file."""
    with zipfile.ZipFile(package) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".hyper")]
        hyper = Path(archive.extract(member, folder))
    with (
        HyperProcess(Telemetry.DO_NOT_SEND_USAGE_DATA_TO_TABLEAU, parameters={"log_config": ""}) as process,
        Connection(process.endpoint, str(hyper)) as opened,
    ):
        names = [column.name.unescaped for column in opened.catalog.get_table_definition(EXTRACT).columns]
        listed = ", ".join(f'"{name}"' for name in sorted(names) if name != without)
        return opened.execute_list_query(f"SELECT {listed} FROM {EXTRACT}")


def untouched(document: ET.Element) -> str:
    """The document without what a refresh writes, in canonical form."""
    copy = ET.fromstring(ET.tostring(document))
    for parent in list(copy.iter()):
        for child in [one for one in parent if one.tag.endswith("refresh-event")]:
            parent.remove(child)
        if parent.get("class") == "hyper":
            parent.attrib.pop("update-time", None)
    return ET.canonicalize(ET.tostring(copy, encoding="unicode"), strip_text=True)


def _check_increment(connection: ET.Element, opened: Connection) -> None:
    """Tableau would go on after the increment value: nothing that remains may be beyond it, nor it beyond them."""
    for refresh in (node for node in connection.iter() if node.tag.endswith("refresh") and node.get("increment-key")):
        key = refresh.attrib["increment-key"].strip("[]")
        *_, event = [node for node in refresh if node.tag.endswith("refresh-event")]
        value = re.sub("^#(.+)#$", r"\1", event.attrib["increment-value"])
        largest = opened.execute_scalar_query(f'SELECT CAST(MAX("{key}") AS TEXT) FROM {EXTRACT}')
        # Zeros behind a fraction are written by one side and not by the other.
        same = [re.sub(r"(\.\d*?)0+$", r"\1", text).removesuffix(".") for text in (value, largest or "%null%")]
        assert same[0] == same[1], "the increment value is not the largest that remains"
