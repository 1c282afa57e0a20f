"""The increment of an extract: found in package and file, purged from a value on, set again; the rest to the letter."""

from __future__ import annotations

import hashlib
import zipfile
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from tableaudocumentapi import Datasource

from tir_dagster.errors import ExtractError
from tir_dagster.hyper.increment import (
    Increment,
    IncrementKind,
    Missing,
    NoIncrement,
    Purged,
    find_increment,
    format_value,
    least_difference,
    parse_value,
    purge_from,
    set_increment_value,
)
from tir_dagster.hyper.package.package import Package, extract_hyper, read_package
from tir_dagster.sandbox.tableau.packages import build_tdsx
from tir_dagster_tests.hyper.documents import FIELDS, SNOWFLAKE, canonical, document_of, edited, with_events
from tir_dagster_tests.hyper.helpers import bag, run

# Without a zone, as extracts hold them.
at = datetime.fromisoformat
MORNING = at("2024-01-31 10:00:00.500000")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As Desktop publishes it: the key's local, stored and source names all differ; not yet refreshed."""
    path = tmp_path_factory.mktemp("plain") / "plain.tdsx"
    common: dict[str, Any] = {"columns": FIELDS, "snowflake": SNOWFLAKE, "table": "ORDERS"}
    return build_tdsx(path, caption="Orders", increment_key="ORDER_DATE", **common)


@pytest.fixture
def package(tmp_path: Path, plain: Path) -> Package:
    return read_package(edited(plain, tmp_path / "orders.tdsx", with_events))


def hyper_file(folder: Path, kind: str, *values: str, column: str = "order date", name: str = "old") -> Path:
    path = folder / f"{name}.hyper"
    rows = ", ".join(f"({number}, CAST({value} AS {kind}))" for number, value in enumerate(values))
    run(
        path,
        'CREATE SCHEMA "Extract"',
        f'CREATE TABLE "Extract"."Extract" ("ORDER_ID" BIGINT, "{column}" {kind})',
        *([f'INSERT INTO "Extract"."Extract" VALUES {rows}'] if values else []),
        create=True,
    )
    return path


@pytest.mark.parametrize(
    ("stored", "literal", "kind", "value"),
    [
        ("DATE", "#2002-02-02#", IncrementKind.DATE, date(2002, 2, 2)),
        ("TIMESTAMP", "#2002-02-02 01:02:03#", IncrementKind.DATETIME, at("2002-02-02 01:02:03")),
        ("TIMESTAMPTZ", "#2002-02-02 01:02:03.25#", IncrementKind.DATETIME, at("2002-02-02 01:02:03.250000")),
        ("TIMESTAMP", "#2002-02-02#", IncrementKind.DATETIME, at("2002-02-02 00:00:00")),
        ("BIGINT", "-17", IncrementKind.INTEGER, -17),
    ],
)
def test_the_key_its_kind_and_its_last_value_are_found(
    tmp_path: Path, package: Package, stored: str, literal: str, kind: IncrementKind, value: Any
):
    path = edited(package.path, tmp_path / "e.tdsx", lambda text: text.replace("#2002-02-02#", literal))
    increment = find_increment(read_package(path), hyper_file(tmp_path, stored))
    assert increment == Increment("[Order Date]", "order date", "ORDER_DATE", kind, value)


def test_what_was_never_extracted_is_told_apart(tmp_path: Path, plain: Path):
    increment = find_increment(read_package(plain), hyper_file(tmp_path, "DATE"))
    assert isinstance(increment, NoIncrement)
    assert (increment.why, "Run a full refresh" in increment.sentence) == (Missing.NEVER_EXTRACTED, True)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("#2002-02-02#", "%null%", Missing.NO_VALUE),
        ("incremental-updates='true'", "incremental-updates='false'", Missing.NOT_INCREMENTAL),
        ("increment-key='[Order Date]' incremental-updates='true'", "", Missing.NOT_INCREMENTAL),
        ("increment-key='[Order Date]'", "increment-key=''", Missing.NOT_INCREMENTAL),
    ],
)
def test_what_cannot_be_continued_is_told_apart(tmp_path: Path, package: Package, old: str, new: str, why: Missing):
    path = edited(package.path, tmp_path / "e.tdsx", lambda text: text.replace(old, new))
    increment = find_increment(read_package(path), hyper_file(tmp_path, "DATE"))
    assert isinstance(increment, NoIncrement)
    assert increment.why is why


@pytest.mark.parametrize("stored", ["TEXT", "DOUBLE PRECISION", "NUMERIC(12,2)", "BOOLEAN"])
def test_a_key_that_tableau_cannot_compare_is_refused(tmp_path: Path, package: Package, stored: str):
    with pytest.raises(
        ExtractError, match=r"The increment key \[Order Date\] of Orders is .*; it has to be an integer"
    ):
        find_increment(package, hyper_file(tmp_path, stored))


def test_a_key_that_is_not_stored_is_refused(tmp_path: Path, package: Package):
    with pytest.raises(ExtractError, match="is not a column of its extract"):
        find_increment(package, hyper_file(tmp_path, "DATE", column="other"))


def test_a_file_that_holds_another_table_than_the_document_says_is_refused(tmp_path: Path, package: Package):
    run(tmp_path / "o.hyper", 'CREATE TABLE "public"."Elsewhere" ("order date" DATE)', create=True)
    with pytest.raises(ExtractError, match=r"its table is Extract\.Extract, but its extract holds public\.Elsewhere"):
        find_increment(package, tmp_path / "o.hyper")


def test_a_file_that_is_no_extract_is_refused(tmp_path: Path, package: Package):
    (tmp_path / "no.hyper").write_bytes(b"no Hyper file at all" * 100)
    with pytest.raises(ExtractError, match=r"no\.hyper"):
        find_increment(package, tmp_path / "no.hyper")
    with pytest.raises(ExtractError, match="is not a Hyper file"):
        purge_from(tmp_path / "no.hyper", tmp_path / "new.hyper", column="order date", smallest=1)
    assert sorted(path.name for path in tmp_path.glob("*.hyper")) == ["no.hyper"]


@pytest.mark.parametrize(
    ("literal", "kind"),
    [
        ("17", IncrementKind.DATE),
        ("#2002-02-02#", IncrementKind.INTEGER),
        ("#2002-02-30#", IncrementKind.DATE),
        ("1.5", IncrementKind.INTEGER),
        ('"a"', IncrementKind.DATETIME),
        ("#2002-02-02 25:00:00#", IncrementKind.DATETIME),
    ],
)
def test_a_value_that_cannot_be_followed_is_refused(literal: str, kind: IncrementKind):
    with pytest.raises(ExtractError, match=f"which is no valid {kind.value}"):
        parse_value(literal, kind, "Orders")


@pytest.mark.parametrize(
    ("value", "kind", "literal"),
    [
        (date(2001, 1, 1), IncrementKind.DATE, "#2001-01-01#"),
        (date(1, 1, 1), IncrementKind.DATE, "#0001-01-01#"),
        (at("2023-01-03 00:00:00"), IncrementKind.DATETIME, "#2023-01-03 00:00:00#"),
        (MORNING, IncrementKind.DATETIME, "#2024-01-31 10:00:00.5#"),
        (at("2023-01-03 00:00:10"), IncrementKind.DATETIME, "#2023-01-03 00:00:10#"),
        (10, IncrementKind.INTEGER, "10"),
        (-3, IncrementKind.INTEGER, "-3"),
    ],
)
def test_values_are_written_as_tableau_writes_them_and_read_back(value: Any, kind: IncrementKind, literal: str):
    assert format_value(value) == literal
    assert parse_value(literal, kind, "Orders") == value


def test_a_moment_with_a_zone_is_written_by_the_clock_of_utc():
    assert format_value(datetime(2024, 1, 1, 1, tzinfo=timezone(timedelta(hours=2)))) == "#2023-12-31 23:00:00#"


@pytest.mark.parametrize(
    ("stored", "values", "smallest", "largest", "gone"),
    [
        ("DATE", ("'2024-01-30'", "'2024-01-31'", "'2024-02-01'", "NULL"), date(2024, 1, 31), date(2024, 1, 30), 2),
        ("DATE", ("'2024-01-30'", "'2024-01-31'"), at("2024-01-31 12:00:00"), date(2024, 1, 30), 1),
        ("TIMESTAMP", ("'2024-01-31 10:00:00.4'", "'2024-01-31 10:00:00.5'", "NULL"), MORNING, MORNING.replace(microsecond=400_000), 1),
        ("TIMESTAMP", ("'2024-01-30 23:59:59'", "'2024-01-31'"), date(2024, 1, 31), at("2024-01-30 23:59:59"), 1),
        ("TIMESTAMPTZ", ("'2024-01-31 09:00:00+00'", "'2024-01-31 12:00:00+02'"), at("2024-01-31 10:00:00"), at("2024-01-31 09:00:00"), 1),
        ("TIMESTAMPTZ", ("'2024-01-31 09:00:00+00'", "'2024-01-31 10:00:00+00'"), datetime(2024, 1, 31, 10, tzinfo=UTC), at("2024-01-31 09:00:00"), 1),
        ("BIGINT", ("-5", "7", "8", "9", "NULL"), 8, 7, 2),
        ("SMALLINT", ("1", "2"), 3, 2, 0),
    ],
)  # fmt: skip
def test_everything_from_a_value_on_is_purged_and_the_greatest_that_remains_is_told(
    tmp_path: Path, stored: str, values: tuple[str, ...], smallest: Any, largest: Any, gone: int
):
    base = hyper_file(tmp_path, stored, *values)
    before = bag(base)
    done = purge_from(base, tmp_path / "new.hyper", column="order date", smallest=smallest)
    nulls = values.count("NULL")
    assert done == Purged(len(values), gone, len(values) - gone, largest, nulls)
    assert bag(base) == before, "the base is not touched"
    left = bag(tmp_path / "new.hyper", columns='"order date"')
    assert left.total() == done.after
    assert left[None,] == nulls, "rows without a value stay"


@pytest.mark.parametrize("values", [("'2024-01-30'", "'2024-01-31'"), ("'2024-01-30'", "NULL"), ()])
def test_nothing_to_go_on_from_is_told(tmp_path: Path, values: tuple[str, ...]):
    base = hyper_file(tmp_path, "DATE", *values)
    assert purge_from(base, tmp_path / "n.hyper", column="order date", smallest=date(2024, 1, 1)).largest is None


@pytest.mark.parametrize(
    ("stored", "smallest"),
    [
        ("DATE", 5),
        ("BIGINT", date(2024, 1, 1)),
        ("TIMESTAMP", 5),
        ("BIGINT", True),
        ("TEXT", 5),
        ("DATE", datetime(2024, 1, 1, tzinfo=UTC)),
    ],
)
def test_a_purge_from_a_value_of_another_type_is_refused_and_leaves_nothing(tmp_path: Path, stored: str, smallest: Any):
    base = hyper_file(tmp_path, stored, "NULL")
    with pytest.raises(ExtractError, match=r"cannot be purged"):
        purge_from(base, tmp_path / "new.hyper", column="order date", smallest=smallest)
    assert [path.name for path in tmp_path.glob("*.hyper")] == ["old.hyper"]


def test_a_purge_by_a_column_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(ExtractError, match="it has no such column"):
        purge_from(hyper_file(tmp_path, "DATE"), tmp_path / "n.hyper", column="DAY", smallest=date(2024, 1, 1))


def test_only_the_last_events_value_differs_in_the_written_package(tmp_path: Path, package: Package):
    base = extract_hyper(package, tmp_path / "base.hyper")
    written = set_increment_value(package, "w.tdsx", hyper=base, value=date(1999, 12, 31)).write(tmp_path / "w.tdsx")
    old, new = document_of(package.path).decode(), document_of(written).decode()
    assert new == old.replace("#2002-02-02#", "#1999-12-31#")
    assert canonical(new, skip=("increment-value",)) == canonical(old, skip=("increment-value",))
    assert [event.increment_value for event in read_package(written).events] == ["#2001-01-01#", "#1999-12-31#"]
    assert digests(written) == {**digests(package.path), "Orders.tds": digests(written)["Orders.tds"]}
    with zipfile.ZipFile(written) as opened:
        assert opened.getinfo("Data/Extracts/Orders.hyper").compress_type == zipfile.ZIP_STORED
    assert [connection.server for connection in Datasource.from_file(str(written)).connections] == [SNOWFLAKE.server]


def digests(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as opened:
        return {name: hashlib.sha256(opened.read(name)).hexdigest() for name in opened.namelist()}


def test_without_an_earlier_refresh_no_value_can_be_set(tmp_path: Path, plain: Path):
    package = read_package(plain)
    base = extract_hyper(package, tmp_path / "base.hyper")
    with pytest.raises(ExtractError, match="has no record of an earlier refresh"):
        set_increment_value(package, "w.tdsx", hyper=base, value=1)


def test_a_last_event_without_a_value_is_refused(tmp_path: Path, package: Package):
    path = edited(package.path, tmp_path / "e.tdsx", lambda text: text.replace('increment-value="#2002-02-02#"', ""))
    without = read_package(path)
    base = extract_hyper(without, tmp_path / "base.hyper")
    with pytest.raises(ExtractError, match="has no record of an earlier refresh"):
        set_increment_value(without, "w.tdsx", hyper=base, value=date(2024, 1, 1))


@pytest.mark.parametrize(
    ("kind", "local_values", "server_values", "least"),
    [
        ("DATE", ["'2024-01-01'", "'2024-01-02'"], ["'2024-01-01'", "'2024-01-02'"], None),
        ("DATE", ["'2024-01-01'", "'2024-01-03'"], ["'2024-01-01'", "'2024-01-02'"], "#2024-01-02#"),
        ("DATE", ["'2024-01-01'"], [], "#2024-01-01#"),
        ("TIMESTAMP", ["'2024-01-01 10:00:00.25'"], ["'2024-01-01 10:00:00.250001'"], "#2024-01-01 10:00:00.25#"),
        ("TIMESTAMPTZ", ["'2024-01-01 10:00:00+02:00'"], [], "#2024-01-01 08:00:00#"),
        ("BIGINT", ["10", "-9"], ["10", "-10"], "-10"),
        ("BIGINT", ["1", "NULL"], ["1", "NULL"], None),
        ("BIGINT", ["1", "NULL"], ["1"], "%null%"),
    ],
)
def test_the_smallest_value_at_which_two_extracts_differ_is_found(
    tmp_path: Path, kind: str, local_values: list[str], server_values: list[str], least: str | None
):
    local, server = (
        hyper_file(tmp_path, kind, *local_values, name="local"),
        hyper_file(tmp_path, kind, *server_values, name="server"),
    )
    assert least_difference(local, server, column="order date") == least
    assert least_difference(server, local, column="order date") == least


def test_rows_are_compared_as_bags_and_texts_letter_by_letter(tmp_path: Path):
    for name, rows in {
        "one": "(1, 'a'), (2, 'b'), (2, 'b')",
        "other": "(1, 'A'), (2, 'b')",
        "twice": "(1, 'a'), (2, 'b')",
    }.items():
        run(
            tmp_path / f"{name}.hyper",
            'CREATE SCHEMA "Extract"',
            'CREATE TABLE "Extract"."Extract" ("I" BIGINT, "V" TEXT COLLATE "en_US_CI")',
            f'INSERT INTO "Extract"."Extract" VALUES {rows}',
            create=True,
        )
    assert least_difference(tmp_path / "one.hyper", tmp_path / "twice.hyper", column="I") == "2"
    assert least_difference(tmp_path / "one.hyper", tmp_path / "other.hyper", column="I") == "1"
