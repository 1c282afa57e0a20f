"""What the server refuses to store: documents that lie about their extract, and archives made to do harm."""

from __future__ import annotations

import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tableauhyperapi import Connection
from tableauserverclient.server.endpoint.exceptions import ServerResponseError

from tir_dagster.sandbox.tableau.packages import Column
from tir_dagster_tests.sandbox.tableau.helpers import LIVE_ONLY, Admin, Publisher, Source, rewritten

EVENT = "<refresh-event add-from-file-path='x' increment-value='{}' refresh-type='create' rows-inserted='1'/>"
BOMB = """<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>
<datasource><b>&b;</b></datasource>"""


@pytest.fixture
def package(source: Source) -> Path:
    return source.package(Column("ID", "NUMBER(38,0)"), Column("DAY", "DATE"), increment_key="DAY")


def filled(package: Path, hyper: Any, *days: str) -> Path:
    """The package with one row per day in its extract."""
    extract = package.with_suffix(".hyper")
    with zipfile.ZipFile(package) as archive:
        extract.write_bytes(archive.read("Data/Extracts/Orders.hyper"))
    with Connection(hyper, extract) as connection:
        for day in days:
            connection.execute_command(f'INSERT INTO "Extract"."Extract" VALUES (1, {day})')
    member = ("Data/Extracts/Orders.hyper", extract.read_bytes())
    return rewritten(package, package.with_name("filled.tdsx"), drop=".hyper", add=[member])


def with_event(package: Path, value: str) -> Path:
    """The package whose extract says that it was last refreshed up to this value."""

    def edit(text: str) -> str:
        head, extract = text.split("<extract ", 1)
        events = re.sub(r"(<refresh [^>]*)/>", rf"\1>{EVENT.format(value)}</refresh>", extract, count=1)
        return f"{head}<extract {events}"

    return rewritten(package, package.with_name("event.tdsx"), edit=edit)


def refused(publisher: Publisher, file: Path, why: str) -> None:
    """Publishing is refused with this sentence, and nothing is left behind."""
    with pytest.raises(ServerResponseError, match="400011") as error:
        publisher.publish(file)
    assert why in error.value.detail
    assert list(publisher.server.datasources.filter(project_name=publisher.project.name)) == []


EDITS: dict[str, tuple[Callable[[str], str], str]] = {
    "another extract": (lambda text: text.replace("Orders.hyper", "Gone.hyper"), "is not in the package"),
    "another table": (lambda text: text.replace("[Extract].[Extract]", "[Extract].[Gone]"), "has no table"),
    "a renamed column": (
        lambda text: text.replace("<remote-name>DAY<", "<remote-name>Day<"),
        "are not those the .tds describes: ['DAY', 'Day']",
    ),
    "another parent": (lambda text: text.replace("<parent-name>[Extract]<", "<parent-name>[X]<"), "are not those"),
    "not a datasource": (lambda _: "<workbook/>", "describes a workbook"),
    "broken XML": (lambda text: text[:-20], "not well-formed"),
    "an entity bomb": (lambda _: BOMB, "entity declarations are not allowed"),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_document_that_does_not_fit_its_extract_is_refused(publisher: Publisher, package: Path, name: str) -> None:
    edit, why = EDITS[name]
    refused(publisher, rewritten(package, package.with_name("edited.tdsx"), edit=edit), why)


def test_a_package_needs_exactly_one_document(publisher: Publisher, package: Path) -> None:
    without = rewritten(package, package.with_name("without.tdsx"), drop=".tds")
    refused(publisher, without, "exactly one .tds file; this one holds 0")
    twice = rewritten(package, package.with_name("twice.tdsx"), add=[("deep/down/other.tds", LIVE_ONLY)])
    refused(publisher, twice, "this one holds 2")


def test_the_document_may_lie_in_a_folder(publisher: Publisher, package: Path) -> None:
    with zipfile.ZipFile(package) as archive:
        document = archive.read("Orders.tds")
    moved = rewritten(package, package.with_name("moved.tdsx"), drop=".tds", add=[("some/folder/x.tds", document)])
    assert publisher.publish(moved).has_extracts


def test_an_extract_must_be_a_hyper_file(publisher: Publisher, package: Path) -> None:
    member = ("Data/Extracts/Orders.hyper", b"HyPe" + bytes(4096))
    broken = rewritten(package, package.with_name("broken.tdsx"), drop=".hyper", add=[member])
    refused(publisher, broken, "not a readable Hyper file")


def test_an_increment_value_lies_within_the_data(publisher: Publisher, package: Path, hyper: Any) -> None:
    package = filled(package, hyper, "DATE '2023-01-02'", "NULL")
    refused(publisher, with_event(package, "#2023-01-03#"), "is beyond the data")
    refused(publisher, with_event(package, "yesterday"), "neither a date, a datetime nor an integer")
    for number, value in enumerate(("#2023-01-02#", "#2023-01-01#", "%null%")):
        publisher.publish(with_event(package, value), f"Orders {number}")


def test_an_extract_without_rows_has_no_increment_value(publisher: Publisher, package: Path) -> None:
    refused(publisher, with_event(package, "#2023-01-01#"), "is beyond the data")
    publisher.publish(with_event(package, "%null%"))


def test_a_document_alone_cannot_have_an_extract(publisher: Publisher, package: Path) -> None:
    alone = package.with_suffix(".tds")
    with zipfile.ZipFile(package) as archive:
        alone.write_bytes(archive.read("Orders.tds"))
    refused(publisher, alone, "was not published with it")


def test_a_bare_extract_must_be_a_hyper_file(publisher: Publisher) -> None:
    file = publisher.folder / "bare.hyper"
    file.write_bytes(b"no extract at all")
    refused(publisher, file, "not a readable Hyper file")


@pytest.mark.parametrize("name", ["../escape.txt", "/etc/passwd", "a/../../b", "C:\\x", "..\\x"])
def test_member_names_that_lead_out_are_refused(publisher: Publisher, package: Path, name: str) -> None:
    refused(
        publisher, rewritten(package, package.with_name("bad.tdsx"), add=[(name, b"x")]), "leads out of the archive"
    )


def test_what_is_no_archive_or_half_of_one_is_refused(publisher: Publisher, package: Path) -> None:
    half = package.with_name("half.tdsx")
    half.write_bytes(package.read_bytes()[: package.stat().st_size // 2])
    refused(publisher, half, "not a zip archive")
    damaged = package.with_name("damaged.tdsx")
    data = bytearray(package.read_bytes())
    data[60:400] = bytes(340)
    damaged.write_bytes(data)
    refused(publisher, damaged, "damaged")


def test_an_archive_that_unpacks_to_too_much_is_refused(publisher: Publisher, package: Path, admin: Admin) -> None:
    admin.set(max_extract_mb=4)
    bomb = package.with_name("bomb.tdsx")
    shutil.copyfile(package, bomb)
    with zipfile.ZipFile(bomb, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("Data/zeros", bytes(8 * 1024 * 1024))
    refused(publisher, bomb, "too large")


def test_an_archive_with_a_member_twice_is_refused(publisher: Publisher, package: Path) -> None:
    with pytest.warns(UserWarning, match="Duplicate name"):
        twice = rewritten(package, package.with_name("twice.tdsx"), add=[("Orders.tds", LIVE_ONLY)])
    refused(publisher, twice, "twice")
