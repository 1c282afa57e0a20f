"""What a value of a file means: read as it is written, or its row is rejected with the reason; never cut, never guessed."""

from __future__ import annotations

import json
import math
from datetime import UTC, date, datetime
from decimal import Decimal

import pyarrow as pa
import pytest

from tir_dagster.loading.tables import target_of
from tir_dagster.loading.values import converted
from tir_dagster_tests.loading.conftest import parquet, spec_of, staged


def read(values, declared: str) -> tuple[list, dict[int, str]]:
    """The values as those of a column, and why rows were rejected."""
    (column,) = target_of(spec_of("append"), [("V", declared)]).columns
    array = values if isinstance(values, pa.Array) else pa.array(values, pa.string())
    made, reasons = converted(array, column)
    return made.to_pylist(), reasons


NOT_PLAIN = ["1_000", "1_0", "\u0663", "\uff13", "0x1F", "1,5", "1 000", "--1", "1e", "", "\u00a01", "1e400"]
WRONG = {
    "NUMBER(6,0)": [*NOT_PLAIN, "NaN", "Infinity", "1.5"],
    "NUMBER(38,0)": [*NOT_PLAIN, "NaN", "Infinity", "1.5"],
    "NUMBER(8,2)": [*NOT_PLAIN, "NaN", "Infinity", "1.555"],
    "FLOAT": NOT_PLAIN,
}


@pytest.mark.parametrize("declared", WRONG)
def test_what_is_no_plain_number_is_rejected(declared):
    for text in WRONG[declared]:
        made, reasons = read([text, "7"], declared)
        assert (made[0], float(made[1])) == (None, 7.0), text
        assert repr(text) in reasons[0]


def test_numbers_are_read_as_they_are_written():
    assert read([" 12 ", "+5", "1e3", "-0", "00012", "1.0", "5."], "NUMBER(6,0)") == ([12, 5, 1000, 0, 12, 1, 5], {})
    assert read(["1.50", ".5", "1E+2", "1.2300"], "NUMBER(8,2)")[0] == [
        Decimal(n) for n in ("1.50", ".50", "100", "1.23")
    ]
    long = "12345678901234567890123456789012345678"
    made, reasons = read([long, f"-{long}", "x", f"{long}0"], "NUMBER(38,0)")
    assert (made, sorted(reasons)) == ([Decimal(long), Decimal(f"-{long}"), None, None], [2, 3])
    wide = "1234567890123456789012345678.0123456789"
    assert read([wide, "x"], "NUMBER(38,10)")[0] == [Decimal(wide), None]


def test_a_float_holds_infinity_only_where_the_file_says_so():
    made, reasons = read(["inf", "-Infinity", "1e308", "1e309", "-1e400"], "FLOAT")
    assert made == [math.inf, -math.inf, 1e308, None, None]
    assert reasons[3] == "V: '1e309' is too large for a FLOAT"
    assert math.isnan(read(["NaN"], "FLOAT")[0][0])
    assert read(pa.array([1.5, math.inf]), "FLOAT") == ([1.5, math.inf], {})


TIMES = ["10", "100000", "T10:00", "10:00:00,5", "10:00:00.1234567", "10:00+02:00", "10:00Z", "24:00", "9:05", "10:60"]


def test_a_time_of_another_form_is_rejected_not_cut():
    for text in [*TIMES, "10:00:60", "1\uff10:00", "noon"]:
        made, reasons = read([text, "10:00"], "TIME(9)")
        assert made == [None, "10:00:00"], text
        assert repr(text) in reasons[0]


def test_a_time_has_one_text_so_that_equal_times_are_equal_keys():
    texts = ["10:00", "10:00:00", "10:00:00.000", " 10:00:00.5 ", "10:00:00.500000000", None]
    assert read(texts, "TIME(9)") == (["10:00:00"] * 3 + ["10:00:00.500000"] * 2 + [None], {})
    in_parquet = pa.array([36_000_000_000_000, 36_000_000_000_001], pa.time64("ns"))
    made, reasons = read(in_parquet, "TIME(9)")
    assert (made, list(reasons)) == (["10:00:00", None], [1])


@pytest.mark.parametrize("declared", ["TIME(3)", "TIMESTAMP_NTZ(3)", "TIMESTAMP_TZ(3)"])
def test_moments_more_exact_than_their_column_are_rejected_not_cut(declared):
    day = "" if declared == "TIME(3)" else "2025-01-01 "
    made, reasons = read([f"{day}10:00:00.123", f"{day}10:00:00.1230", f"{day}10:00:00.1234"], declared)
    assert (made[0] is not None, made[0] == made[1], made[2]) == (True, True, None)
    assert reasons[2].endswith("has more than 3 digits of a second")
    if not day:
        return
    in_parquet = pa.array([1_000, 1_001], pa.timestamp("us"))
    assert list(read(in_parquet, declared)[1]) == [1]


MOMENTS = ["1701120112345", "1700000000", "20250101", "2025-01-01x10:00", "2025-W01-1", "2025-01-01T10:00:00,1234567"]


@pytest.mark.parametrize("declared", ["TIMESTAMP_NTZ(9)", "TIMESTAMP_TZ(9)"])
def test_a_text_that_may_mean_another_moment_is_rejected(declared):
    for text in [*MOMENTS, "\uff12025-01-01", "2025-01-01 24:00", "0000-01-01", "2025-01-01T10:00+99:00"]:
        made, reasons = read([text, "2025-01-01"], declared)
        assert (made[0], made[1].isoformat()[:19]) == (None, "2025-01-01T00:00:00"), text
        assert repr(text) in reasons[0]


def test_moments_and_dates_are_read_in_their_usual_forms():
    texts = ["2025-01-01 10:00", "2025-01-01T10:00:00.000Z", "20250101T100000Z", "2025-01-01T12:00+02:00"]
    assert read(texts, "TIMESTAMP_TZ(9)") == ([datetime(2025, 1, 1, 10, tzinfo=UTC)] * 4, {})
    assert read(["2025-01-01", " 20250101"], "DATE") == ([date(2025, 1, 1)] * 2, {})
    for text in ("2025-W01-1", "0000-01-01", "2025-1-1", "01/02/2025", "\uff12025-01-01", "20251"):
        assert read([text, "2025-01-01"], "DATE")[0] == [None, date(2025, 1, 1)]


@pytest.mark.parametrize("kind", [pa.date32(), pa.timestamp("s"), pa.timestamp("us")])
def test_days_beyond_the_year_9999_are_rejected_row_by_row(kind):
    many = {pa.date32(): 10_000_000, pa.timestamp("s"): 10**12, pa.timestamp("us"): 10**18}[kind]
    made, reasons = read(pa.array([0, many], kind), "DATE" if kind == pa.date32() else "TIMESTAMP_NTZ(9)")
    assert (made[0].year, made[1], list(reasons)) == (1970, None, [1])


NOT_JSON = [
    '{"a": 1, "a": 2}',
    "NaN",
    '{"a": [Infinity]}',
    '{"a": 1e400}',
    '"\\ud800"',
    '"\\u0000"',
    "[" * 100_000,
    "x",
]


def test_json_that_no_warehouse_takes_is_rejected():
    good = '{"a": 1.50, "b": "\\ud83d\\ude00"}'
    made, reasons = read([*NOT_JSON, good], "VARIANT")
    assert made == [*[None] * len(NOT_JSON), good]
    assert len(reasons) == len(NOT_JSON)


def test_a_text_with_a_nul_is_rejected_in_every_format(tmp_path):
    named = {"csv": b"ID,NAME\n1,a\0b\n2,c\n", "json": b'{"ID": 1, "NAME": "a\\u0000b"}\n{"ID": 2, "NAME": "c"}\n'}
    named["parquet"] = parquet({"ID": [1, 2], "NAME": ["a\0b", "c"]})
    for form, content in named.items():
        ((told,), tables) = staged(tmp_path, f"a.{form}", content, form=form)
        assert ([row["C0"] for row in tables["rows"]], told.rejected) == ([2], 1), form


# Files


def rows(tables) -> list[tuple]:
    return [(row["C0"], row["C1"]) for row in tables.get("rows", [])]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("quoted.csv", '"ID","NAME"\r\n1,x\r\n'),
        ("plain.csv", "ID,NAME\n1,x\n"),
        ("blanks.csv", " ID , name\n1,x\n"),
        ("lines.json", '{"ID": 1, "NAME": "x"}\r\n'),
    ],
)
def test_a_byte_order_mark_belongs_to_no_column(tmp_path, name, content):
    ((told,), tables) = staged(tmp_path, name, b"\xef\xbb\xbf" + content.encode(), form=name.rpartition(".")[2])
    assert (rows(tables), told.drift, told.rejected) == ([(1, "x")], (), 0)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
@pytest.mark.parametrize("form", ["csv", "json"])
def test_a_file_in_another_encoding_is_named_with_what_to_do(tmp_path, form, encoding):
    text = "ID,NAME\n1,x\n" if form == "csv" else '{"ID": 1, "NAME": "x"}\n'
    ((told,), _) = staged(tmp_path, f"a.{form}", text.encode(encoding), form=form)
    assert "not text in UTF-8. Nothing was loaded; write it in UTF-8" in told.problem
    assert f"a.{form}" in told.problem


def test_a_header_that_is_no_utf_8_is_said_in_words_that_can_be_printed(tmp_path):
    ((told,), _) = staged(tmp_path, "a.csv", "ID,Größe\n1,2\n".encode("latin-1"))
    assert told.problem.encode()
    assert "a.csv: the header is not text in UTF-8" in told.problem


def test_names_that_only_look_right_are_shown_as_they_are(tmp_path):
    ((told,), _) = staged(tmp_path, "a.csv", "ID,NA\u200bME\n1,x\n".encode())
    assert told.drift == ("column NAME is missing", "column 'NA\\u200bME' is not expected")


BAD_LINES = {
    b'{"ID": 2, "NAME": "\\ud800"}': "has half a character",
    b'{"ID": 2, "NAME": {"a": ["\\udfff"]}}': "has half a character",
    b'{"\\ud800": 2}': "has half a character",
    b'{"ID": 2, "NAME": "\xff"}': "not text in UTF-8",
    b'{"ID": 2, "ID": 3}': "has 'ID' twice in one object",
    b'{"ID": NaN}': "not JSON: NaN",
    b'{"ID": 1e400}': "ID: '1e400' ",
    b'{"ID": 1_0}': "not JSON",
    b'{"ID": "1_0"}': "ID: '1_0' is no whole number",
    b'{"ID": "\xd9\xa3"}': "ID: '٣' is no whole number",
    b'{"ID": 2.5}': "ID: '2.5' is no whole number",
    b'{"ID": ' + b"9" * 5000 + b"}": "has more than 38 digits",
    b"[" * 100_000: "not JSON",
    b"7": "not a JSON object",
}


def test_a_bad_line_of_json_is_rejected_and_the_others_are_loaded(tmp_path):
    content = b'{"ID": 1, "NAME": "\\ud83d\\ude00"}\n' + b"\n".join(BAD_LINES) + b'\n{"id": 3, "Name": "y"}\n'
    ((told,), tables) = staged(tmp_path, "a.json", content, form="json")
    assert (told.problem, rows(tables)) == ("", [(1, "😀"), (3, "y")])
    for row, (line, reason) in zip(tables["rejected"], BAD_LINES.items(), strict=True):
        assert reason in row["REASON"], line[:50]
        assert json.dumps(row["ROW_TEXT"])


def test_values_of_json_keep_what_the_file_says_of_them(tmp_path):
    values = ['{"a": 12345678901234567.89, "b": 1.50}', '"5"', '"abc"', "5.0", "true", "null"]
    content = "".join(f'{{"T": {value}, "V": {value}}}\n' for value in values)
    ((told,), tables) = staged(tmp_path, "a.json", content.encode(), form="json", columns="T VARCHAR, V VARIANT")
    assert told.rejected == 0
    assert rows(tables) == [
        (values[0], values[0]),
        ("5", '"5"'),
        ("abc", '"abc"'),
        ("5.0", "5.0"),
        ("true", "true"),
        (None, None),
    ]


def test_a_row_of_another_length_may_hold_bytes_that_no_table_stores(tmp_path):
    ((told,), tables) = staged(tmp_path, "a.csv", b"ID,NAME\n1,x\n2,\xff,\0,3\n")
    assert (rows(tables), told.rejected, tables["rejected"][0]["REASON"]) == ([(1, "x")], 1, "not text in UTF-8")


def test_broken_texts_in_parquet_spoil_their_row_only(tmp_path):
    texts = pa.array([b"1", b"\xff", b"3"], pa.binary())
    broken = pa.StringArray.from_buffers(3, *texts.buffers()[1:])
    for columns in ({"ID": broken, "NAME": ["x", "y", "z"]}, {"ID": [1, 2, 3], "NAME": broken}):
        ((told,), tables) = staged(tmp_path, "a.parquet", parquet(columns), form="parquet")
        assert ([row["C0"] for row in tables["rows"]], told.rejected) == ([1, 3], 1)


def test_a_parquet_file_with_a_name_twice_is_named(tmp_path):
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["ID", "ID"])
    ((told,), _) = staged(tmp_path, "a.parquet", parquet(table), form="parquet")
    assert "a.parquet: column ID is twice in the file" in told.problem


def test_structures_in_parquet_become_json_without_loss(tmp_path):
    value = {"price": Decimal("12345678901234567.89"), "at": datetime(2025, 1, 1, tzinfo=UTC), "more": [1, None]}
    content = parquet({"ID": [1, 2], "V": [value, {**value, "price": None}]})
    (_, tables) = staged(tmp_path, "a.parquet", content, form="parquet", columns="ID NUMBER, V VARIANT")
    assert [json.loads(row["C1"], parse_float=Decimal)["price"] for row in tables["rows"]] == [value["price"], None]


def test_a_file_that_breaks_a_reader_in_an_unforeseen_way_is_still_named(tmp_path, monkeypatch):
    monkeypatch.setattr("tir_dagster.loading.staging.converted", lambda *_: {}["no rule"])
    ((told,), _) = staged(tmp_path, "a.csv", b"ID,NAME\n1,x\n")
    assert "a.csv: the file cannot be read: KeyError" in told.problem
