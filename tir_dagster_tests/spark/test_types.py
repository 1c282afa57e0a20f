# ruff: noqa: DTZ001 - timestamps without a zone are part of what is tested
"""Every type of Snowflake and its extreme values, all the way into an extract: equal, changed as docs/types.md says, or refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tir_dagster.changes.difference import ROW_MARK, Forced
from tir_dagster.errors import ExtractError, SourceError
from tir_dagster.hyper.compare import comparing
from tir_dagster.hyper.engine import connect
from tir_dagster.hyper.fingerprints import different_slices, extract_fingerprints, read_fingerprints, snowflake_sql
from tir_dagster.hyper.hyperfile import create_extract
from tir_dagster.hyper.replace import ExtractShape
from tir_dagster.snowflake.columns import HELD, REFUSED, Column, Kind
from tir_dagster.snowflake.names import TableName, literal
from tir_dagster.snowflake.pinned import sql_literal
from tir_dagster.snowflake.slices import SliceBy, slice_of
from tir_dagster.snowflake.versions import describe, describe_query, select
from tir_dagster.spark.arrow import arrow_schema, convert, fetch
from tir_dagster.spark.staging import StagedRows, StagingTask, result_batches, stage, write_part
from tir_dagster_tests.spark.batches import arrow_batch, arrow_moments

DOCS = Path(__file__).parents[2] / "docs" / "types.md"


@dataclass(frozen=True)
class Extreme:
    """A column's type, its values, and what an extract shows where that is something else."""

    declared: str
    values: tuple[Any, ...]
    shown: tuple[Any, ...] | None = None


def _moments(*texts: str) -> tuple[datetime, ...]:
    return tuple(datetime.fromisoformat(text).replace(tzinfo=UTC) for text in texts)


NAN, INFINITY = float("nan"), float("inf")
MOMENTS = _moments(
    "0001-01-01",
    "9999-12-31T23:59:59.999999",
    "1582-10-04T23:59:59.999999",
    "1582-10-15",
    "1969-12-31T23:59:59.999999",
    # In Berlin and in New York: before and after the hour that is not there, then the hour that is there twice.
    "2024-03-31T00:59:59.999999",
    "2024-03-31T01:00:00",
    "2024-10-27T00:30:00",
    "2024-10-27T01:30:00",
    "2024-03-10T06:59:59.999999",
    "2024-03-10T07:00:00",
    "2024-11-03T05:30:00",
    "2024-11-03T06:30:00",
)
EXTREMES = {
    "WIDEST": Extreme(
        "NUMBER(38,37)",
        (Decimal("9." + "9" * 37), Decimal("-9." + "9" * 37), Decimal("0." + "0" * 36 + "1"), Decimal("0.3")),
        (10.0, -10.0, 1e-37, 0.3),
    ),
    "BIG": Extreme("NUMBER(38,0)", (2**63 - 1, -(2**63), 0)),
    "NARROW": Extreme("NUMBER(18,0)", (10**18 - 1, 1 - 10**18)),
    "CENTS": Extreme("NUMBER(9,2)", (Decimal("9999999.99"), Decimal("-9999999.99"), Decimal("0.10"), Decimal("0.30"))),
    "TINY": Extreme(
        "NUMBER(18,18)", (Decimal("0." + "9" * 18), Decimal("-0." + "9" * 18), Decimal("0." + "0" * 17 + "1"))
    ),
    "WIDE": Extreme(
        "NUMBER(38,10)",
        (
            Decimal("9" * 28 + "." + "9" * 10),
            Decimal("-" + "9" * 28 + "." + "9" * 10),
            Decimal("0.1") + Decimal("0.2"),
            Decimal("0.0000000001"),
        ),
        (1e28, -1e28, 0.3, 1e-10),
    ),
    "RATIO": Extreme("FLOAT", (NAN, INFINITY, -INFINITY, -0.0, 0.0, 5e-324, -1.7976931348623157e308, 0.1 + 0.2)),
    "FLAG": Extreme("BOOLEAN", (True, False)),
    "NAME": Extreme("VARCHAR", ("", " ", "😀", "e\u0301", "é", "\uffff", 'it\'s \\ "x"\r\n\t\u2028', "x" * 100_000)),
    "DAY": Extreme(
        "DATE",
        (
            date(1, 1, 1),
            date(1582, 10, 4),
            date(1582, 10, 10),
            date(1582, 10, 15),
            date(1969, 12, 31),
            date(9999, 12, 31),
        ),
    ),
    "CLOCK": Extreme("TIME", ("23:59:59.999999", "00:00:00.000000", "02:30:00.000001")),
    # By the clocks of Berlin and New York two of these never were and two were twice: here they are just digits.
    "SEEN": Extreme(
        "TIMESTAMP_NTZ",
        (
            *(moment.replace(tzinfo=None) for moment in MOMENTS),
            datetime(2024, 3, 31, 2, 30),
            datetime(2024, 10, 27, 2, 30),
            datetime(2024, 3, 10, 2, 30),
            datetime(2024, 11, 3, 1, 30),
        ),
    ),
    "LOCAL": Extreme("TIMESTAMP_LTZ", MOMENTS, tuple(moment.replace(tzinfo=None) for moment in MOMENTS)),
    "MOMENT": Extreme("TIMESTAMP_TZ", MOMENTS, tuple(moment.replace(tzinfo=None) for moment in MOMENTS)),
    "EXTRA": Extreme("VARIANT", ('{"a":[1,null]}', "[]", '"text"', "null")),
}
# What the sandbox's warehouse cannot hold, or cannot be told in SQL: it comes in Parquet files.
ONLY_PARQUET = {
    "NULS": Extreme("VARCHAR", ("\0", "a\0b", "a\0")),
    "THING": Extreme("OBJECT", ('{"a":"\\u0000"}', "{}")),
    "LIST": Extreme("ARRAY", ("[1e400]", "[]")),
}


def _columns(extremes: dict[str, Extreme]) -> tuple[Column, ...]:
    """A number for each row, then a column for each type."""
    named = [Column.from_snowflake(name, extreme.declared) for name, extreme in extremes.items()]
    return (Column("N", Kind.INTEGER, 38), *named)


def _rows(values: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Value by value below each other; a column that has no more is NULL, and in the last row all are."""
    return [[number, *row] for number, row in enumerate([*zip_longest(*values), (None,) * len(values)])]


def _held(extremes: dict[str, Extreme]) -> list[list[str]]:
    """What an extract of these rows holds."""
    rows = _rows([extreme.shown or extreme.values for extreme in extremes.values()])
    return [[_plain(value) for value in row] for row in rows]


def _found(path: Path, columns: Sequence[Column]) -> list[list[str]]:
    listed = ", ".join(f'CAST("{c.name}" AS TEXT)' if c.kind is Kind.TIME else f'"{c.name}"' for c in columns)
    with connect(path) as connection:
        rows = connection.execute_list_query(f'SELECT {listed} FROM "Extract"."Extract" ORDER BY "N"')
    return [[_plain(value) for value in row] for row in rows]


def _plain(value: Any) -> str:
    """One text for equal values and another for all others: NaN is NaN, -0.0 is 0.0."""
    for name in ("to_datetime", "to_date"):
        value = getattr(value, name)() if hasattr(value, name) else value
    if isinstance(value, Decimal):
        # Not normalize(), which rounds to 28 digits.
        digits = f"{value:f}"
        return digits.rstrip("0").rstrip(".") if "." in digits else digits
    if isinstance(value, float):
        # Hyper stores both zeros of a block as the one it saw first.
        return repr(value + 0.0)
    # Hyper writes no zeros at the end of a time.
    return repr(value.removesuffix(".000000") if isinstance(value, str) else value)


# Every name of every type


def _names(types: Sequence[Any]) -> Iterator[str]:
    return (name for declared in types for name in declared.names)


# As DESCRIBE writes them, with what stands behind the name.
WRITTEN = {
    "VARCHAR": "VARCHAR(16777216) COLLATE 'en-ci'",
    "TIMESTAMP_NTZ": "TIMESTAMP_NTZ(9)",
    "ARRAY": "ARRAY(NUMBER(38,0) NOT NULL)",
    "OBJECT": "OBJECT(a NUMBER(38,0))",
    "BINARY": "BINARY(8388608)",
    "DECFLOAT": "DECFLOAT(38)",
    "VECTOR": "VECTOR(FLOAT, 3)",
    "MAP": "MAP(VARCHAR(16777216), NUMBER(38,0))",
    "INTERVAL": "INTERVAL DAY(9) TO SECOND(9)",
}


# The summary of data types in Snowflake's own reference.
SNOWFLAKE = """
    NUMBER, DECIMAL, NUMERIC, INT, INTEGER, BIGINT, SMALLINT, TINYINT, BYTEINT, FLOAT, FLOAT4, FLOAT8, DOUBLE,
    DOUBLE PRECISION, REAL, DECFLOAT, VARCHAR, CHAR, CHARACTER, STRING, TEXT, BINARY, VARBINARY, BOOLEAN, DATE, DATETIME,
    TIME, TIMESTAMP, TIMESTAMP_LTZ, TIMESTAMP_NTZ, TIMESTAMP_TZ, VARIANT, OBJECT, ARRAY, MAP, FILE, GEOGRAPHY, GEOMETRY,
    UUID, VECTOR
"""


def test_the_table_has_every_type_of_snowflake_once():
    names = [*_names(HELD), *_names(REFUSED)]

    assert {" ".join(name.split()) for name in SNOWFLAKE.split(",")} - set(names) == set()
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", _names(HELD))
def test_a_type_that_an_extract_holds_has_a_form_everywhere(name: str):
    column = Column.from_snowflake("C", WRITTEN.get(name, name))

    assert all((column.spark, column.parquet, column.hyper))
    assert Column.from_snowflake("C", name.lower()) == column


@pytest.mark.parametrize("name", _names(REFUSED))
def test_any_other_type_is_refused_with_what_to_do(name: str):
    with pytest.raises(SourceError, match=r"Column my col is .*`columns:`.*Or show \w+\(.*AS \"my col\" in a `query:`"):
        Column.from_snowflake("my col", WRITTEN.get(name, name))


@pytest.mark.parametrize("declared", ["", "NUMBER(None,None)", "NUMBER(38,None)", "TOMORROW(1)", "?"])
def test_a_type_that_nobody_knows_is_refused_not_guessed(declared: str):
    with pytest.raises(SourceError, match=r'Or show CAST\("C" AS VARCHAR\)'):
        Column.from_snowflake("C", declared)


# The documentation


def _row(column: Column, *cells: str) -> str:
    return f"| {' | '.join((*cells, f'`{column.spark}`', column.parquet, f'`{column.hyper}`'))} |"


def _documented() -> list[str]:
    """Both tables of docs/types.md as the code has them."""
    lines = ["| Snowflake | also called | Spark | Parquet | Hyper |", "|---|---|---|---|---|"]
    for held in HELD:
        name, *others = held.names
        examples = ("NUMBER(38,0)", "NUMBER(9,2)", "NUMBER(18,2)", "NUMBER(38,10)") if name == "NUMBER" else (name,)
        for example in examples:
            also = ", ".join(others) if example == examples[0] else ""
            lines.append(_row(Column.from_snowflake("C", example), f"`{example}`", also))
    lines += ["| Snowflake | also called | in a query, for column C |", "|---|---|---|"]
    for refused in REFUSED:
        name, *others = refused.names
        lines.append(f"| `{name}` | {', '.join(others)} | `{refused.cast.format('C')} AS C` |")
    return lines


def test_the_documentation_shows_the_table_of_the_code():
    table_lines = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith("|")]

    assert table_lines == _documented(), "put these lines into docs/types.md:\n" + "\n".join(_documented())


# Values, from Parquet


@pytest.fixture(scope="module")
def fixture_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All extremes as Arrow writes them: the reader's types, without a warehouse before it."""
    extremes = EXTREMES | ONLY_PARQUET
    columns = _columns(extremes)
    rows = _rows([extreme.values for extreme in extremes.values()])
    path = tmp_path_factory.mktemp("fixture") / "extremes.parquet"
    pq.write_table(
        pa.Table.from_pylist(
            [dict(zip((c.name for c in columns), row, strict=True)) for row in rows], arrow_schema(columns)
        ),
        path,
    )
    return path


def test_extremes_in_parquet_are_in_the_extract_as_documented(fixture_file: Path, tmp_path: Path):
    extremes = EXTREMES | ONLY_PARQUET

    create_extract(tmp_path / "e.hyper", _columns(extremes), [fixture_file])

    assert _found(tmp_path / "e.hyper", _columns(extremes)) == _held(extremes)


def test_what_tasks_write_are_the_documented_types(fixture_file: Path, tmp_path: Path):
    extremes = EXTREMES | ONLY_PARQUET
    columns = _columns(extremes)
    table = convert(pq.read_table(fixture_file), columns)
    part = SimpleNamespace(to_arrow=lambda **_: table, rowcount=table.num_rows)

    report = write_part(StagingTask(columns, SliceBy(), str(tmp_path)), [part])

    create_extract(tmp_path / "e.hyper", columns, [tmp_path / report["file"]])
    assert _found(tmp_path / "e.hyper", columns) == _held(extremes)
    assert [_stored(tmp_path / report["file"], column) for column in columns] == [column.parquet for column in columns]


def _stored(file: Path, column: Column) -> str:
    """A column's type in a Parquet file, in the words of Column.parquet."""
    schema = pq.ParquetFile(file).schema
    stored = next(
        candidate for candidate in (schema.column(at) for at in range(len(schema))) if candidate.name == column.name
    )
    logical = stored.logical_type.type
    if logical == "TIMESTAMP":
        zone = "UTC" if "isAdjustedToUTC=true" in str(stored.logical_type) else "no zone"
        assert "timeUnit=microseconds" in str(stored.logical_type)
        return f"{stored.physical_type} Timestamp, microseconds, {zone}"
    if logical == "DECIMAL":
        return f"{stored.physical_type} Decimal({stored.precision},{stored.scale})"
    return stored.physical_type if logical == "NONE" else f"{stored.physical_type} {logical.capitalize()}"


def test_what_is_no_text_is_refused_with_its_column(tmp_path: Path):
    lone_surrogate = b"\xed\xa0\x80"
    offsets = pa.array([0, len(lone_surrogate)], pa.int32()).buffers()[1]
    broken = pa.StringArray.from_buffers(1, offsets, pa.py_buffer(lone_surrogate))
    pq.write_table(pa.table({"NAME": broken}), tmp_path / "r.parquet")

    with pytest.raises(ExtractError, match=r"Values of NAME \(string into TEXT\) do not fit .*invalid UTF-8"):
        create_extract(tmp_path / "e.hyper", [Column.from_snowflake("NAME", "VARCHAR")], [tmp_path / "r.parquet"])


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 10**30, 10**38 - 1, 1 - 10**38])
def test_an_integer_beyond_64_bits_is_refused_with_column_and_value(number: int, tmp_path: Path):
    column = Column.from_snowflake("BIG", "NUMBER(38,0)")
    values = pa.array([Decimal(7), None, Decimal(number)], pa.decimal128(38, 0))

    with pytest.raises(
        SourceError, match=f"Column BIG holds an integer beyond 64 bits, {number}, .*cast it to VARCHAR"
    ):
        fetch(arrow_batch("BIG", values, logicalType="FIXED"), [column])

    pq.write_table(pa.table({"BIG": values}), tmp_path / "r.parquet")
    with pytest.raises(ExtractError, match=r"Values of BIG \(bigint into BIGINT\) do not fit"):
        create_extract(tmp_path / "e.hyper", [column], [tmp_path / "r.parquet"])


def test_a_result_of_another_type_than_described_is_told_as_such():
    column = Column.from_snowflake("N", "NUMBER(38,0)")

    for arrived in (pa.array([Decimal("1.5")], pa.decimal128(38, 1)), pa.array([{"a": 1}])):
        with pytest.raises(SourceError, match="Column N is declared as bigint but arrives as"):
            convert(pa.table({"N": arrived}), [column])


def test_nanoseconds_are_cut_towards_the_past():
    """In the connector's own batches: the sandbox's warehouse knows microseconds only."""
    seconds_and_nanos = arrow_moments((1_000, 123_456_789), (-1, 999_999_999), (253402300799, 999_999_999))
    cut = [
        datetime(1970, 1, 1, 0, 16, 40, 123456),
        datetime(1969, 12, 31, 23, 59, 59, 999999),
        datetime(9999, 12, 31, 23, 59, 59, 999999),
    ]
    for declared in ("TIMESTAMP_NTZ", "TIMESTAMP_LTZ"):
        got = fetch(
            arrow_batch("AT", seconds_and_nanos, logicalType=declared, scale="9"),
            [Column.from_snowflake("AT", declared)],
        )
        assert [moment.replace(tzinfo=None) for moment in got.column("AT").to_pylist()] == cut

    clock = arrow_batch("AT", pa.array([86_399_999_999_999, 0], pa.int64()), logicalType="TIME", scale="9")
    assert fetch(clock, [Column.from_snowflake("AT", "TIME")]).column("AT").to_pylist() == [
        "23:59:59.999999",
        "00:00:00.000000",
    ]


# Values, from the warehouse


@pytest.fixture(scope="module")
def table(run) -> TableName:
    """The extremes that the sandbox's warehouse holds."""
    columns = _columns(EXTREMES)
    declared = ", ".join(f"{name} {extreme.declared}" for name, extreme in EXTREMES.items())
    run(f"CREATE OR REPLACE TABLE SRC.PUBLIC.EXTREMES (N NUMBER(38,0), {declared})")
    rows = _rows([extreme.values for extreme in EXTREMES.values()])
    literals = (", ".join(_told(column, value) for column, value in zip(columns, row, strict=True)) for row in rows)
    run(f"INSERT INTO SRC.PUBLIC.EXTREMES SELECT {' UNION ALL SELECT '.join(literals)}")
    return TableName("SRC", "PUBLIC", "EXTREMES")


def _told(column: Column, value: Any) -> str:
    if column.kind is Kind.JSON and value is not None:
        return f"PARSE_JSON({literal(value)})"
    return sql_literal(column, value)


@pytest.fixture(scope="module")
def staged_rows(spark, access, table: TableName, tmp_path_factory: pytest.TempPathFactory) -> StagedRows:
    columns = describe(access, table)
    assert columns == _columns(EXTREMES)
    folder = tmp_path_factory.mktemp("warehouse") / "staged"
    return stage(lambda: spark, access, select(table, columns), columns, folder, small_rows=0)


@pytest.fixture(scope="module")
def extract(staged_rows: StagedRows) -> Path:
    path = staged_rows.files[0].parent.parent / "e.hyper"
    create_extract(path, _columns(EXTREMES), staged_rows.files)
    return path


def test_extremes_come_from_the_warehouse_as_documented(extract: Path):
    assert _found(extract, _columns(EXTREMES)) == _held(EXTREMES)


def test_equal_extremes_are_no_difference_wherever_they_come_from(extract: Path, fixture_file: Path, tmp_path: Path):
    """A false difference would move the row in every refresh: NaN, -0.0, the end of time, an empty text."""
    columns = _columns(EXTREMES)
    table = pq.read_table(fixture_file, columns=[column.name for column in columns])
    marked = table.append_column(ROW_MARK.name, pa.array([1] * table.num_rows, pa.int64()))
    pq.write_table(marked, tmp_path / "marked.parquet")

    with comparing(extract, ExtractShape(columns, ("N",), SliceBy())) as comparison:
        comparison.add([tmp_path / "marked.parquet"], everything=True)
        assert comparison.decide(Forced(), tmp_path / "change").keys == 0


@pytest.mark.parametrize(
    "slicing", [SliceBy(), SliceBy("DAY", "week"), SliceBy("SEEN", "month"), SliceBy("LOCAL", "day")], ids=str
)
def test_extremes_have_the_fingerprints_of_their_source(run, table: TableName, extract: Path, slicing: SliceBy):
    columns = _columns(EXTREMES)
    source = read_fingerprints(run(snowflake_sql(columns, table.sql, slicing)), columns)

    assert different_slices(extract_fingerprints(extract, columns, slicing), source) == {}


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/New_York"])
def test_moments_fall_on_the_days_of_their_zone(run, table: TableName, extract: Path, zone: str):
    slicing, columns = SliceBy("MOMENT", "day", zone), _columns(EXTREMES)
    days = set()
    for moment in MOMENTS:
        # In one of the zones the first or the last moment is on a day outside the years 1 to 9999, which no slice is.
        with suppress(OverflowError):
            days.add(slice_of(slicing, moment))

    source = read_fingerprints(run(snowflake_sql(columns, table.sql, slicing, only=days)), columns)
    extract_prints = extract_fingerprints(extract, columns, slicing, only=days)

    assert set(extract_prints) == days
    assert different_slices(extract_prints, source) == {}


def test_bytes_come_as_text_by_a_query(access, make_table):
    bytes_ = make_table("RAW BINARY", "SELECT TO_BINARY('00FF', 'HEX')", "SELECT NULL")
    query = f"SELECT HEX_ENCODE(RAW) AS RAW FROM {bytes_.sql} ORDER BY 1"

    with pytest.raises(SourceError, match=r'Column RAW is BINARY.* show HEX_ENCODE\("RAW"\) AS "RAW" in a `query:`'):
        describe_query(access, f"SELECT RAW FROM {bytes_.sql}")
    columns = describe_query(access, query)
    (batch,) = result_batches(access, query)
    assert fetch(batch, columns).column("RAW").to_pylist() == ["00FF", None]
