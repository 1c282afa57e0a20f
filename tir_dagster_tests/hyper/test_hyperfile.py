# ruff: noqa: DTZ001 - timestamps without a zone are part of what is tested
"""New extract files: made from staged rows, described, rebuilt; always whole or not there."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import pytest

from tir_dagster import files
from tir_dagster.errors import ExtractError
from tir_dagster.hyper.engine import connect
from tir_dagster.hyper.hyperfile import create_extract, create_like, describe, needs_rebuild, rebuild
from tir_dagster_tests.hyper.helpers import bag, columns_of, run, stage

COLUMNS = columns_of({"ID": "NUMBER(38,0)", "NAME": "VARCHAR"})


def test_a_full_refresh_makes_a_file_of_exactly_the_staged_rows(tmp_path: Path):
    declared = {
        "ID": "NUMBER(38,0)",
        "PRICE": "NUMBER(12,2)",
        "WIDE": "NUMBER(38,4)",
        "RATIO": "FLOAT",
        "PAID": "BOOLEAN",
        'NA"ME': "VARCHAR",
        "DAY": "DATE",
        "AT": "TIME",
        "SEEN": "TIMESTAMP_NTZ",
        "MOMENT": "TIMESTAMP_TZ",
        "EXTRA": "VARIANT",
    }
    columns = columns_of(declared)
    row = (
        1,
        Decimal("9.99"),
        Decimal("1.5"),
        0.5,
        True,
        "é",
        date(2024, 1, 31),
        "10:11:12",
        datetime(2024, 1, 31, 1, 2, 3, 4),
        datetime(2024, 1, 31, 23, 0, tzinfo=UTC),
        "{}",
    )
    nothing = (None,) * len(columns)
    target = tmp_path / "new" / "sales.hyper"
    table = create_extract(target, columns, stage(tmp_path / "r.parquet", columns, [row, nothing, nothing]))
    assert (table.schema, table.name, table.rows, table.file_version) == ("Extract", "Extract", 3, 2)
    assert [(column.name, column.type) for column in table.columns] == [
        (column.name, column.hyper) for column in columns
    ]
    assert bag(target)[nothing] == 2
    row_found = next(
        iter(bag(target, columns='"ID", "PRICE", "WIDE", "NA""ME", CAST("MOMENT" AS TEXT), CAST("AT" AS TEXT)'))
    )
    assert row_found == (1, Decimal("9.99"), 1.5, "é", "2024-01-31 23:00:00", "10:11:12")
    assert [path.name for path in target.parent.iterdir()] == ["sales.hyper"]


def test_no_staged_files_make_an_empty_extract(tmp_path: Path):
    assert create_extract(tmp_path / "e.hyper", COLUMNS, []).rows == 0


def test_a_full_refresh_replaces_the_old_file_in_one_step_or_leaves_it(tmp_path: Path):
    target = tmp_path / "e.hyper"
    create_extract(target, COLUMNS, stage(tmp_path / "1.parquet", COLUMNS, [(1, "a")]))
    create_extract(target, COLUMNS, stage(tmp_path / "2.parquet", COLUMNS, [(2, "b"), (3, "c")]))
    assert sorted(bag(target)) == [(2, "b"), (3, "c")]
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(ExtractError, match=r"bad\.parquet cannot be read"):
        create_extract(target, COLUMNS, [tmp_path / "bad.parquet"])
    assert sorted(bag(target)) == [(2, "b"), (3, "c")]


def test_columns_can_have_other_names_in_the_extract(tmp_path: Path):
    staged = stage(tmp_path / "r.parquet", COLUMNS, [(1, "a")])
    table = create_extract(tmp_path / "e.hyper", COLUMNS, staged, names={"NAME": "Customer Name"})
    assert [column.name for column in table.columns] == ["ID", "Customer Name"]


def test_a_staged_file_without_a_column_is_refused_by_name(tmp_path: Path):
    with pytest.raises(ExtractError, match="has no column NAME"):
        create_extract(tmp_path / "e.hyper", COLUMNS, stage(tmp_path / "r.parquet", COLUMNS[:1], [(1,)]))
    assert not (tmp_path / "e.hyper").exists()


def test_a_value_that_does_not_fit_names_its_column_and_leaves_nothing_behind(tmp_path: Path):
    columns = columns_of({"ID": "NUMBER(38,0)", "AT": "TIME"})
    with pytest.raises(ExtractError, match=r"Values of AT \(string into TIME\) do not fit"):
        create_extract(tmp_path / "e.hyper", columns, stage(tmp_path / "r.parquet", columns, [(1, "later")]))
    assert [path.name for path in tmp_path.iterdir()] == ["r.parquet"]


def test_describe_refuses_what_is_no_single_table_extract(tmp_path: Path):
    with pytest.raises(ExtractError, match="There is no extract at"):
        describe(tmp_path / "none.hyper")
    (tmp_path / "text.hyper").write_text("not hyper " * 100)
    with pytest.raises(ExtractError, match="not a Hyper file"):
        describe(tmp_path / "text.hyper")
    two = tmp_path / "two.hyper"
    run(
        two, 'CREATE SCHEMA "Extract"', 'CREATE TABLE "Extract"."Orders" (a INT)', "CREATE TABLE b (a INT)", create=True
    )
    with pytest.raises(ExtractError, match=r'holds 2 tables .*"Extract"."Orders"'):
        describe(two)
    run(tmp_path / "zero.hyper", 'CREATE SCHEMA "Extract"', create=True)
    with pytest.raises(ExtractError, match="holds 0 tables"):
        describe(tmp_path / "zero.hyper")


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path):
    with pytest.raises(ExtractError, match=rf"{tmp_path} needs [\d,]+ MB of free disk space and has [\d,]+ MB"):
        files.need_space(tmp_path, 1 << 60)


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_a_rebuild_gives_space_back_and_changes_nothing_else(tmp_path: Path, version: int):
    base = tmp_path / "base.hyper"
    wide = "NUMERIC(38,2)" if version > 2 else "NUMERIC(18,2)"
    run(
        base,
        'CREATE SCHEMA "Extract"',
        f'CREATE TABLE "Extract"."Extract" ("I d" BIGINT NOT NULL, n TEXT COLLATE "en_US_CI", w {wide}, t TIMESTAMPTZ)',
        'INSERT INTO "Extract"."Extract" SELECT i, md5(CAST(i AS TEXT)), i, NULL FROM generate_series(1, 60000) AS g(i)',
        create=True,
        file_version=version,
    )
    run(base, 'DELETE FROM "Extract"."Extract" WHERE "I d" > 1000')
    before = describe(base)
    (after,) = rebuild(base, tmp_path / "new.hyper")
    assert (after.columns, after.rows, after.file_version) == (before.columns, 1000, version)
    assert bag(tmp_path / "new.hyper") == bag(base)
    assert after.bytes < before.bytes / 4


def test_a_full_refresh_can_keep_the_table_and_the_types_of_another_extract(tmp_path: Path):
    template = tmp_path / "theirs.hyper"
    run(
        template,
        'CREATE SCHEMA "Extract"',
        'CREATE TABLE "Extract"."Orders_1" ("ID" INTEGER NOT NULL, "Customer Name" TEXT COLLATE "en_US_CI")',
        'INSERT INTO "Extract"."Orders_1" VALUES (7, \'gone\')',
        create=True,
        file_version=3,
    )
    rows = stage(tmp_path / "r.parquet", COLUMNS, [(1, "a")])
    table = create_like(tmp_path / "new.hyper", template, COLUMNS, rows, names={"NAME": "Customer Name"})
    template_table = describe(template)
    assert (table.schema, table.name, table.columns, table.file_version) == (
        template_table.schema,
        template_table.name,
        template_table.columns,
        3,
    )
    assert bag(tmp_path / "new.hyper", table=table.sql) == {(1, "a"): 1}
    with pytest.raises(ExtractError, match="has no column NAME, which the source has"):
        create_like(tmp_path / "new.hyper", template, COLUMNS, rows)


def test_an_extract_can_be_rebuilt_in_its_own_place(tmp_path: Path):
    create_extract(tmp_path / "e.hyper", COLUMNS, stage(tmp_path / "r.parquet", COLUMNS, [(1, "a")]))
    assert [table.rows for table in rebuild(tmp_path / "e.hyper", tmp_path / "e.hyper")] == [1]
    assert bag(tmp_path / "e.hyper") == {(1, "a"): 1}


def test_a_rebuild_keeps_a_table_outside_the_extract_schema(tmp_path: Path):
    run(tmp_path / "b.hyper", "CREATE TABLE sales (a INT)", "INSERT INTO sales VALUES (1)", create=True)
    (after,) = rebuild(tmp_path / "b.hyper", tmp_path / "n.hyper")
    assert (after.schema, after.name, after.rows) == ("public", "sales", 1)


def test_a_rebuild_is_due_when_the_file_outgrew_its_rows(tmp_path: Path):
    path = tmp_path / "x.hyper"
    path.write_bytes(b"\0" * (40 << 20))
    assert needs_rebuild(path, rows=1_000_000, bytes_per_row=20)
    assert not needs_rebuild(path, rows=1_000_000, bytes_per_row=30)
    assert not needs_rebuild(path, rows=1_000_000, bytes_per_row=20, limit=3)
    path.write_bytes(b"\0" * (1 << 20))
    assert not needs_rebuild(path, rows=1, bytes_per_row=20), "small files are mostly Hyper's own pages"


def test_an_open_extract_in_another_process_is_told_as_such(tmp_path: Path):
    create_extract(tmp_path / "e.hyper", COLUMNS, [])
    from tir_dagster.hyper.engine import hyper_engine

    with connect(tmp_path / "e.hyper"), hyper_engine(), pytest.raises(ExtractError, match="another process"):
        describe(tmp_path / "e.hyper")
