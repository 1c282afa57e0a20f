"""Packages: read without trust, written so that only the extract and its last refresh event differ."""

from __future__ import annotations

import io
import re
import struct
import tracemalloc
import zipfile
from datetime import date
from pathlib import Path

import pytest
from tableaudocumentapi import Datasource

from tir_dagster.errors import ExtractError
from tir_dagster.hyper.hyperfile import create_extract, describe
from tir_dagster.hyper.package.package import (
    Package,
    RefreshChange,
    extract_hyper,
    greatest_increment,
    packed,
    read_package,
    refresh_change,
)
from tir_dagster.sandbox.tableau.packages import build_tdsx
from tir_dagster_tests.hyper.documents import FIELDS, SNOWFLAKE, canonical, document_of, edited, with_events
from tir_dagster_tests.hyper.helpers import columns_of, run, stage

STORED = columns_of({"ORDER_ID": "NUMBER(38,0)", "ORDER_DATE": "DATE", "NAME": "VARCHAR"})


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """As Desktop publishes it: incremental, not yet refreshed."""
    return build_tdsx(
        tmp_path / "plain.tdsx",
        caption="Orders",
        columns=FIELDS,
        snowflake=SNOWFLAKE,
        table="ORDERS",
        increment_key="ORDER_DATE",
    )


@pytest.fixture
def package(tmp_path: Path, plain: Path) -> Path:
    """Refreshed twice, with prefixes, comments, single quotes and members that nobody knows."""
    return edited(plain, tmp_path / "orders.tdsx", with_events)


@pytest.fixture
def hyper(tmp_path: Path) -> Path:
    rows = [(1, date(2024, 1, 31), "a"), (2, date(2024, 3, 1), "b"), (3, None, None)]
    staged = stage(tmp_path / "rows.parquet", STORED, rows)
    create_extract(tmp_path / "new.hyper", STORED, staged, names={"ORDER_DATE": "order date"})
    return tmp_path / "new.hyper"


def test_a_package_tells_its_two_sides(package: Path):
    package_info = read_package(package)
    assert (package_info.document, package_info.name) == ("Orders.tds", "Orders")
    assert package_info.hyper_member == "Data/Extracts/Orders.hyper"
    assert package_info.table == ("Extract", "Extract")
    assert [record.remote_name for record in package_info.columns] == ["ORDER_ID", "order date", "NAME"]
    assert package_info.hyper_names == {"ORDER_ID": "ORDER_ID", "ORDER_DATE": "order date", "NAME": "NAME"}
    assert package_info.incremental
    assert (package_info.increment_key, package_info.increment_column, package_info.increment_source) == (
        "[Order Date]",
        "order date",
        "ORDER_DATE",
    )
    assert [(event.kind, event.increment_value) for event in package_info.events] == [
        ("create", "#2001-01-01#"),
        ("increment", "#2002-02-02#"),
    ]
    assert package_info.last_increment == "#2002-02-02#"
    assert package_info.relation is not None
    assert (package_info.relation.kind, package_info.relation.table) == ("table", ("PUBLIC", "ORDERS"))
    assert package_info.connections[0].kind == "snowflake"
    assert (package_info.connections[0].server, package_info.connections[0].dbname) == (SNOWFLAKE.server, "SHOP")
    assert (package_info.connections[0].schema, package_info.connections[0].username) == ("PUBLIC", "TABLEAU")
    assert (package_info.filters, package_info.aggregated, package_info.row_limit, package_info.calculated_columns) == (
        (),
        False,
        None,
        (),
    )


def test_a_package_of_a_query_tells_its_text(tmp_path: Path):
    sql = "SELECT ORDER_ID FROM ORDERS WHERE ORDER_ID > 3 AND NAME <> 'x'"
    built = build_tdsx(
        tmp_path / "q.tdsx", caption="Q", columns=FIELDS[:1], snowflake=SNOWFLAKE, custom_sql=sql, increment_key=None
    )
    package_info = read_package(built)
    assert package_info.relation is not None
    assert (package_info.relation.kind, package_info.relation.sql) == ("text", sql)
    assert (package_info.incremental, package_info.increment_key, package_info.events, package_info.last_increment) == (
        False,
        None,
        (),
        None,
    )


def test_what_would_change_the_rows_of_an_extract_is_told(tmp_path: Path, package: Path):
    def edit(text: str) -> str:
        text = text.replace("<extract ", "<extract _.fcp.X.true...aggregation='true' ").replace(
            'count="-1"', 'count="100"'
        )
        return text.replace("</extract>", "<filter class='categorical' column='[NAME]'/></extract>")

    package_info = read_package(edited(package, tmp_path / "e.tdsx", edit))
    assert (package_info.filters, package_info.aggregated, package_info.row_limit) == (("[NAME]",), True, "100 records")


@pytest.mark.parametrize(
    ("formula", "told"),
    [
        ("[Username] = USERNAME()", ()),
        ("CONTAINS([Users], '|' + username ( ) + '|')", ()),
        ("ISMEMBEROF('sales') OR [Region] = 'north'", ()),
        ("[Region] = 'USERNAME()'", ("[Calculation_7]",)),
        ("[Region] = 'north' // not USERNAME()", ("[Calculation_7]",)),
        ("[USERNAME (1)] = 'ann'", ("[Calculation_7]",)),
    ],
)
def test_a_filter_by_who_is_looking_does_not_change_the_rows_of_an_extract(tmp_path, package, formula, told):
    escaped = formula.replace("'", "&apos;")
    field = (
        f"<column datatype='boolean' name='[Calculation_7]'><calculation class='tableau' formula='{escaped}'/></column>"
    )
    rule = "<filter class='categorical' column='[Calculation_7]'/>"
    filtered = edited(package, tmp_path / "f.tdsx", lambda text: text.replace("<extract ", f"{field}{rule}<extract "))
    assert read_package(filtered).filters == told


def test_calculations_stored_in_the_extract_are_told(tmp_path: Path, package: Path):
    record = "<metadata-record class='column'><remote-name>calc</remote-name><local-name>[Calculation_1]</local-name></metadata-record>"

    def edit(text: str) -> str:
        head, extract = text.split("<extract ")
        return f"{head}<extract {extract.replace('</metadata-records>', record + '</metadata-records>')}"

    assert read_package(edited(package, tmp_path / "c.tdsx", edit)).calculated_columns == ("calc",)


def test_several_tables_are_refused_for_refreshing_by_key(tmp_path: Path, package: Path):
    def edit(text: str) -> str:
        more = "<object id='B'><properties context=''><relation name='B' table='[P].[B]' type='table'/></properties>"
        more += "<properties context='extract'><relation name='B' table='[Extract].[B_1]' type='table'/></properties></object>"
        return text.replace("</objects>", f"{more}</objects>")

    package_info = read_package(edited(package, tmp_path / "two.tdsx", edit))
    assert package_info.relation is not None
    assert package_info.relation.kind == "other"
    with pytest.raises(ExtractError, match=r"stores 2 tables \(Extract\.Extract, Extract\.B_1\)"):
        _ = package_info.table


def test_a_published_hyper_file_has_an_extract_and_no_live_side(tmp_path: Path, hyper: Path):
    text = (
        "<datasource formatted-name='f' version='18.1'><connection class='federated'><named-connections>"
        "<named-connection name='hyper.1'><connection class='hyper' dbname='Data/Extracts/x.hyper' schema='Extract'/>"
        "</named-connection></named-connections><relation name='Extract' table='[Extract].[Extract]' type='table'/>"
        "</connection></datasource>"
    )
    with zipfile.ZipFile(tmp_path / "bare.tdsx", "w") as archive:
        archive.writestr("x.tds", text)
        archive.write(hyper, "Data/Extracts/x.hyper")
    package_info = read_package(tmp_path / "bare.tdsx")
    assert (package_info.hyper_member, package_info.table) == ("Data/Extracts/x.hyper", ("Extract", "Extract"))
    assert (package_info.relation, package_info.incremental, package_info.source_columns) == (None, False, ())


def test_the_hyper_file_comes_out_as_it_is(tmp_path: Path, package: Path):
    package_info = read_package(package)
    extract_hyper(package_info, tmp_path / "out" / "x.hyper")
    with zipfile.ZipFile(package) as opened:
        assert (tmp_path / "out" / "x.hyper").read_bytes() == opened.read("Data/Extracts/Orders.hyper")
    described = describe(tmp_path / "out" / "x.hyper")
    assert [column.name for column in described.columns] == [record.remote_name for record in package_info.columns]


def test_a_package_without_its_extract_can_be_read_but_not_unpacked(tmp_path: Path, package: Path):
    with zipfile.ZipFile(package) as old, zipfile.ZipFile(tmp_path / "thin.tdsx", "w") as thin:
        thin.writestr("Orders.tds", old.read("Orders.tds"))
    package_info = read_package(tmp_path / "thin.tdsx")
    assert package_info.hyper_member is None
    with pytest.raises(ExtractError, match="Download it with its extract"):
        extract_hyper(package_info, tmp_path / "x.hyper")


def test_only_the_last_event_and_the_time_of_update_differ_after_a_republish(
    tmp_path: Path, package: Path, hyper: Path
):
    source = read_package(package)
    change = refresh_change(source, hyper, rows=3)
    written = packed(source, "w.tdsx", hyper=hyper, refresh=change).write(tmp_path / "new.tdsx")
    old, new = document_of(package).decode(), document_of(written).decode()
    expected = old.replace('increment-value="#2002-02-02#"', 'increment-value="#2024-03-01#"')
    expected = re.sub(r"(#2024-03-01#.*?)rows-inserted='1'", r"\1rows-inserted='3'", expected)
    stamp = re.search(r'update-time="([^"]*)"', new)
    assert stamp is not None
    assert new == re.sub(r'update-time="[^"]*"', stamp[0], expected)
    assert re.fullmatch(r"\d\d/\d\d/\d{4} \d\d:\d\d:\d\d [AP]M", stamp[1])

    package_info = read_package(written)
    assert [event.increment_value for event in package_info.events] == ["#2001-01-01#", "#2024-03-01#"]
    assert canonical(new, skip=("increment-value", "rows-inserted", "update-time")) == canonical(
        old, skip=("increment-value", "rows-inserted", "update-time")
    )


def check_invariants(path: Path, folder: Path) -> None:
    """What a published package has to keep, whatever was done to it."""
    package_info = read_package(path)
    assert package_info.hyper_member is not None
    file = extract_hyper(package_info, folder / "check.hyper")
    described = describe(file)
    assert (described.schema, described.name) == package_info.table
    assert [record.remote_name for record in package_info.columns] == [column.name for column in described.columns]
    if package_info.events:
        assert package_info.last_increment == greatest_increment(package_info, file)


@pytest.mark.parametrize("which", ["plain", "package"])
def test_a_written_package_holds_together_and_opens_in_the_document_api(
    tmp_path: Path, hyper: Path, which: str, request: pytest.FixtureRequest
):
    source = read_package(request.getfixturevalue(which))
    written = packed(source, "w.tdsx", hyper=hyper, refresh=refresh_change(source, hyper)).write(tmp_path / "w.tdsx")
    check_invariants(written, tmp_path)
    opened = Datasource.from_file(str(written))
    assert [connection.server for connection in opened.connections] == [SNOWFLAKE.server]
    assert "[NAME]" in opened.fields


def test_without_events_the_refresh_information_stays_as_it_is(tmp_path: Path, plain: Path, hyper: Path):
    source = read_package(plain)
    written = packed(source, "w.tdsx", hyper=hyper, refresh=RefreshChange("#2024-03-01#", rows=3)).write(
        tmp_path / "w.tdsx"
    )
    assert document_of(written) == document_of(plain)


def test_every_other_member_keeps_content_order_and_date(tmp_path: Path, package: Path, hyper: Path):
    written = packed(read_package(package), "w.tdsx", hyper=hyper).write(tmp_path / "w.tdsx")
    with zipfile.ZipFile(package) as old, zipfile.ZipFile(written) as new:
        assert new.testzip() is None
        assert [(member.filename, member.date_time) for member in old.infolist()] == [
            (member.filename, member.date_time) for member in new.infolist()
        ]
        for name in old.namelist():
            assert new.read(name) == (hyper.read_bytes() if name.endswith(".hyper") else old.read(name))


class OneWay(io.RawIOBase):
    """A file that cannot be rewound, as a socket: the sizes of what is zipped into it follow their bytes."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    def writable(self) -> bool:
        return True

    def write(self, block) -> int:
        return self._file.write(block)

    def close(self) -> None:
        self._file.close()
        super().close()


def compressed(path: Path, name: str) -> bytes:
    """A member's bytes as they stand in the file."""
    with zipfile.ZipFile(path) as opened:
        info = opened.getinfo(name)
    content = path.read_bytes()
    lengths = struct.unpack_from("<HH", content, info.header_offset + 26)
    start = info.header_offset + 30 + sum(lengths)
    return content[start : start + info.compress_size]


MEMBERS = {
    "notes/ä light.csv": (zipfile.ZIP_DEFLATED, 1),
    "notes/heavy.csv": (zipfile.ZIP_DEFLATED, 9),
    "notes/bare.csv": (zipfile.ZIP_STORED, None),
    "notes/other.csv": (zipfile.ZIP_BZIP2, 1),
}


def with_members(package: Path, target: Path, *, streamed: bool) -> Path:
    """The package with a text four times, compressed in four ways, among strange attributes."""
    text = b"".join(b"%d;%d\n" % (number, number * number) for number in range(20_000))
    with OneWay(target) if streamed else target.open("wb") as file, zipfile.ZipFile(file, "w") as new:
        new.comment = b"made by hand"
        for name, (kind, level) in MEMBERS.items():
            info = zipfile.ZipInfo(name, (2001, 2, 3, 4, 5, 6))
            info.extra, info.comment, info.external_attr = b"\xfe\xca\x02\x00hi", b"a comment", 0o600 << 16
            new.writestr(info, text, kind, level)
        with zipfile.ZipFile(package) as old:
            for name in old.namelist():
                new.writestr(name, old.read(name))
    return target


@pytest.mark.parametrize("streamed", [False, True])
def test_other_members_are_copied_without_being_compressed_again(
    tmp_path: Path, plain: Path, hyper: Path, *, streamed: bool
):
    source = with_members(plain, tmp_path / "many.tdsx", streamed=streamed)
    written = packed(read_package(source), "w.tdsx", hyper=hyper).write(tmp_path / "w.tdsx")
    attributes = ("date_time", "compress_type", "CRC", "extra", "comment", "external_attr")
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(written) as new:
        assert new.testzip() is None
        assert (old.namelist(), old.comment) == (new.namelist(), new.comment)
        for name in MEMBERS:
            before, after = old.getinfo(name), new.getinfo(name)
            assert [getattr(before, attribute) for attribute in attributes] == [
                getattr(after, attribute) for attribute in attributes
            ]
    assert [compressed(source, name) for name in MEMBERS] == [compressed(written, name) for name in MEMBERS]


def test_a_damaged_member_is_found_before_the_package_is_written(tmp_path: Path, plain: Path, hyper: Path):
    path = with_members(plain, tmp_path / "many.tdsx", streamed=False)
    content = bytearray(path.read_bytes())
    content[content.index(b"10000;100000000")] ^= 1
    path.write_bytes(content)
    with pytest.raises(ExtractError, match=r"has a member 'notes/bare\.csv' that cannot be read"):
        packed(read_package(path), "w.tdsx", hyper=hyper).write(tmp_path / "w.tdsx")
    assert not (tmp_path / "w.tdsx").exists()


def test_a_member_that_declares_more_bytes_than_the_package_has_is_refused(tmp_path: Path, plain: Path):
    path = with_members(plain, tmp_path / "many.tdsx", streamed=False)
    content = bytearray(path.read_bytes())
    # The sizes of the last of the entries at the end, which are what zipfile believes.
    struct.pack_into("<LL", content, content.rindex(b"PK\x01\x02") + 20, 1 << 30, 1 << 30)
    path.write_bytes(content)
    with pytest.raises(ExtractError, match="declares more bytes than it has"):
        read_package(path)


def test_size_and_checksum_of_every_member_stand_before_it(tmp_path: Path, package: Path, hyper: Path):
    """A reader that unpacks a stream cannot tell where a stored member ends whose sizes follow it."""
    source = with_members(package, tmp_path / "many.tdsx", streamed=True)
    archive = packed(read_package(source), "w.tdsx", hyper=hyper)
    content = archive.write(tmp_path / "w.tdsx").read_bytes()
    assert len(content) == archive.size
    with zipfile.ZipFile(tmp_path / "w.tdsx") as opened:
        for info in opened.infolist():
            flags, _, _, _, checksum, *sizes = struct.unpack_from("<HHHHLLL", content, info.header_offset + 6)
            assert (flags & 0x8, checksum, *sizes) == (0, info.CRC, info.compress_size, info.file_size), info.filename


def test_a_member_that_is_too_large_for_the_small_form_has_its_sizes_in_the_large_one(
    tmp_path: Path, plain: Path, hyper: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of four gigabytes and more; here of anything, so that none need be written."""
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 1000)
    written = packed(read_package(plain), "w.tdsx", hyper=hyper).write(tmp_path / "w.tdsx")
    content = written.read_bytes()
    with zipfile.ZipFile(written) as opened:
        info = next(info for info in opened.infolist() if info.filename.endswith(".hyper"))
        assert opened.testzip() is None
    assert struct.unpack_from("<LL", content, info.header_offset + 18) == (0xFFFFFFFF, 0xFFFFFFFF)
    assert struct.pack("<QQ", info.file_size, info.file_size) in content[info.header_offset :][:200]


def test_a_package_can_be_written_over_itself(package: Path, hyper: Path):
    packed(read_package(package), "w.tdsx", hyper=hyper).write(package)
    assert read_package(package).hyper_member is not None


def test_memory_does_not_grow_with_the_extract(tmp_path: Path, package: Path):
    large = tmp_path / "large.hyper"
    with large.open("wb") as file:
        file.truncate(200 << 20)
    source = read_package(package)
    tracemalloc.start()
    written = packed(source, "w.tdsx", hyper=large).write(tmp_path / "w.tdsx")
    extract_hyper(read_package(written), tmp_path / "back.hyper")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "back.hyper").stat().st_size == 200 << 20
    assert peak < 16 << 20


@pytest.mark.parametrize(
    ("stored", "value", "literal"),
    [
        ("BIGINT", "17", "17"),
        ("INTEGER", "-3", "-3"),
        ("DATE", "'2024-01-31'", "#2024-01-31#"),
        ("TIMESTAMP", "'2024-01-31 10:00:00'", "#2024-01-31 10:00:00#"),
        ("TIMESTAMP", "'2024-01-31 10:00:00.5'", "#2024-01-31 10:00:00.5#"),
        ("TIMESTAMPTZ", "'2024-01-31 10:00:00+00'", "#2024-01-31 10:00:00#"),
        ("DATE", "NULL", "%null%"),
    ],
)
def test_increment_values_are_written_as_tableau_writes_them(
    tmp_path: Path, package: Path, stored: str, value: str, literal: str
):
    file = one_column(tmp_path, stored, value)
    assert greatest_increment(read_package(package), file) == literal


def one_column(folder: Path, stored: str, value: str) -> Path:
    path = folder / "one.hyper"
    run(
        path,
        'CREATE SCHEMA "Extract"',
        f'CREATE TABLE "Extract"."Extract" ("order date" {stored})',
        f'INSERT INTO "Extract"."Extract" VALUES (CAST({value} AS {stored})), (NULL)',
        create=True,
    )
    return path


@pytest.mark.parametrize("stored", ["TEXT", "DOUBLE PRECISION"])
def test_an_increment_key_that_tableau_cannot_compare_is_refused(tmp_path: Path, package: Path, stored: str):
    with pytest.raises(ExtractError, match=rf"\[Order Date\] of .* is {stored}"):
        greatest_increment(read_package(package), one_column(tmp_path, stored, "'1'"))


def make(path: Path, members: list[tuple[str, bytes]]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return path


BOMB = b"""<?xml version='1.0'?><!DOCTYPE d [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;">]><datasource version='18.1'>&b;</datasource>"""
LIVE = b"<datasource version='18.1'><connection class='federated'/></datasource>"


@pytest.mark.parametrize("members", [[("a.tds", BOMB.decode().encode("utf-16"))], [("a.tds", LIVE), ("..\\x", b"")]])
def test_a_hostile_package_is_refused_however_it_is_written(tmp_path: Path, members: list):
    with pytest.raises(ExtractError, match=r"document type|well-formed|leads out of it"):
        read_package(make(tmp_path / "bad.tdsx", members))


def test_a_damaged_package_is_refused(tmp_path: Path, package: Path):
    content = bytearray(package.read_bytes())
    place = content.index(b"Orders.tds") + 200
    content[place : place + 40] = b"\xff" * 40
    (tmp_path / "damaged.tdsx").write_bytes(content)
    with pytest.raises(ExtractError, match="cannot be read"):
        read_package(tmp_path / "damaged.tdsx")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_package_with_a_name_twice_is_refused(tmp_path: Path):
    with pytest.raises(ExtractError, match="two members named"):
        read_package(make(tmp_path / "twice.tdsx", [("a.tds", LIVE), ("x", b"1"), ("x", b"2")]))


def test_a_refused_write_leaves_the_target_alone(tmp_path: Path, package: Path, hyper: Path):
    source = read_package(package)
    target = tmp_path / "t.tdsx"
    target.write_text("old")
    package.write_text("gone")
    with pytest.raises(ExtractError, match="is not a zip"):
        packed(source, "w.tdsx", hyper=hyper).write(target)
    assert target.read_text() == "old"


def test_a_package_is_a_plain_value(package: Path):
    assert isinstance(read_package(package), Package)
    assert read_package(package) == read_package(package)
