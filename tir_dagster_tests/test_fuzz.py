"""Readers of what others wrote: whatever it is, they give a value or one of the project's own errors, never anything else.

Good inputs are spoilt by a few edits, which reaches deeper than random bytes. `make soak` tries a hundred times as many.
"""

from __future__ import annotations

import copy
import io
import json
import os
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from lxml import etree

from tir_dagster.changes.hints import parse_hints
from tir_dagster.errors import TirError
from tir_dagster.hyper.engine import connect, quoted
from tir_dagster.hyper.engine import literal as hyper_literal
from tir_dagster.hyper.package.matching import find_matches
from tir_dagster.hyper.package.object_model import read_object_model
from tir_dagster.hyper.package.package import read_package
from tir_dagster.loading.formats import Shape, csv_pieces, json_pieces
from tir_dagster.loading.values import LoadColumn
from tir_dagster.sandbox.tableau.batches import BatchError, read_actions
from tir_dagster.sandbox.tableau.multipart import boundary_of, take_apart
from tir_dagster.sandbox.tableau.packages import build_tdsx
from tir_dagster.sandbox.tableau.wire import ApiError, read_json, read_request
from tir_dagster.snowflake.columns import Column
from tir_dagster.snowflake.names import TableName, quote
from tir_dagster.snowflake.names import literal as snowflake_literal
from tir_dagster.snowflake.query import analyse, explain
from tir_dagster.spec.reading import parse_declared
from tir_dagster_tests.hyper.documents import FIELDS, SNOWFLAKE, document_of, edited, with_events
from tir_dagster_tests.hyper.star_document import DECLARED, HYPER_TABLES, RELATED, STAR
from tir_dagster_tests.spec.sample import ALERTS, GOOD

EXAMPLES = 10_000 if "TIR_LONG" in os.environ else 100
fuzzed = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
# What breaks readers: quotes, brackets, ends of lines, NUL, a byte order mark, half a letter, huge numbers, letters beyond the first plane.
ODD = st.sampled_from(
    [
        "'",
        '"',
        "`",
        "\\",
        "\n",
        "\r\n",
        "\x00",
        "\ufeff",
        "�",
        "]",
        "[",
        "}",
        "{",
        "<",
        ">",
        "&",
        ";",
        "--",
        "/*",
        "#",
        "%",
        ":",
        ",",
        "-",
        "0",
        "9" * 40,
        "1e999",
        "NaN",
        "null",
        "true",
        "\u202e",
        "👩\u200d👩\u200d👧",
        "é",
        "́",
        " ",
        "\t",
        "(",
        ")",
        "!!python/object",
        "&a *a",
    ]
)


@st.composite
def spoilt(draw: st.DrawFn, text: str) -> str:
    """The text with a few pieces removed, repeated, swapped or replaced."""
    for _ in range(draw(st.integers(1, 6))):
        begin = draw(st.integers(0, max(len(text) - 1, 0)))
        end = min(len(text), begin + draw(st.integers(0, 40)))
        piece = draw(st.one_of(st.just(""), ODD, st.just(text[begin:end] * 2), st.text(max_size=8)))
        text = text[:begin] + piece + text[end:]
    return text


def as_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


QUERIES = (
    "SELECT s.ID, s.DAY, COALESCE(p.COLOR, 'N/A') AS COLOR FROM DB.S.SALES s LEFT JOIN DB.S.PRODUCTS p ON s.PRODUCT = p.PRODUCT",
    "SELECT DAY, SUM(QTY * 2) AS N, COUNT(*) FROM DB.S.SALES WHERE QTY > 1 GROUP BY DAY HAVING COUNT(*) > 1 ORDER BY 1 LIMIT 5",
    'WITH a AS (SELECT * FROM DB.S."Sales") SELECT ID, ROW_NUMBER() OVER (PARTITION BY DAY ORDER BY ID) AS R FROM a QUALIFY R = 1',
    "SELECT ID FROM DB.S.SALES UNION ALL SELECT ID FROM DB.S.SALES WHERE DAY >= CURRENT_DATE() - 90 AND ID IN (SELECT ID FROM DB.S.PRODUCTS)",
)
COLUMNS = {
    TableName("DB", "S", "SALES"): ["ID", "DAY", "PRODUCT", "QTY"],
    TableName("DB", "S", "PRODUCTS"): ["ID", "PRODUCT", "COLOR"],
    TableName("DB", "S", "Sales"): ["ID", "DAY"],
}


@fuzzed
@given(st.sampled_from(QUERIES).flatmap(spoilt))
def test_a_query(text: str):
    with suppress(TirError):
        view = analyse(text, COLUMNS)
        explain(view, why_full=None, why_whole=None, key=[])


@fuzzed
@given(st.sampled_from([GOOD, GOOD + ALERTS]).flatmap(spoilt))
def test_a_spec_file(text: str):
    with suppress(TirError):
        parse_declared(text, "specs.yaml")


HINT = json.dumps(
    {
        "table": "DB.S.SALES",
        "type": "UPDATE_ROWS",
        "scope": {"and": [{"in": {"ID": [1, 2.5, None]}}, {"not": {"between": {"DAY": ["2024-01-01", "2024-02-01"]}}}]},
    }
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@fuzzed
@given(spoilt(HINT) | JSON | JSON.map(lambda scope: {"table": "A.B.C", "type": "ADD_ROWS", "scope": scope}))
def test_a_hint(value: Any):
    with suppress(TirError):
        parse_hints(value, "a test")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    plain = build_tdsx(
        folder / "plain.tdsx",
        caption="Orders",
        columns=FIELDS,
        snowflake=SNOWFLAKE,
        table="ORDERS",
        increment_key="ORDER_DATE",
    )
    return edited(plain, folder / "orders.tdsx", with_events)


@fuzzed
@given(data=st.data())
def test_the_document_in_a_package(package: Path, tmp_path: Path, data: st.DataObject):
    document = data.draw(spoilt(document_of(package).decode()))
    target = tmp_path / "spoilt.tdsx"
    with zipfile.ZipFile(package) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            new.writestr(name, as_bytes(document) if name.endswith(".tds") else old.read(name))
    read(target)


@fuzzed
@given(data=st.data())
def test_the_archive_of_a_package(package: Path, tmp_path: Path, data: st.DataObject):
    content = bytearray(package.read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    (tmp_path / "spoilt.tdsx").write_bytes(content)
    read(tmp_path / "spoilt.tdsx")


def read(path: Path) -> None:
    with suppress(TirError):
        package = read_package(path)
        _ = package.is_bare, package.hyper_names, package.columns, package.last_increment


@st.composite
def rearranged(draw: st.DrawFn, text: str) -> str:
    """The document with a few elements removed, repeated or copied elsewhere, and a few attributes swapped: still XML."""
    root = etree.fromstring(text.encode())
    for _ in range(draw(st.integers(1, 5))):
        element, other = (draw(st.sampled_from([root, *root.iter(etree.Element)])) for _ in range(2))
        match draw(st.sampled_from(["remove", "copy", "attribute", "text"])):
            case "remove" if element is not root:
                element.getparent().remove(element)
            case "copy":
                other.append(copy.deepcopy(element))
            case "attribute" if element.attrib and other.attrib:
                name, from_name = (draw(st.sampled_from(sorted(one.attrib))) for one in (element, other))
                element.set(name, draw(st.one_of(st.just(other.get(from_name)), st.just(""))))
            case _:
                element.text = other.text
    return etree.tostring(root, encoding="unicode")


@fuzzed
@given(spoilt(STAR) | rearranged(STAR))
def test_the_logical_tables_of_a_document(document: str):
    with suppress(TirError):
        matches = find_matches(DECLARED, read_object_model(as_bytes(document)), HYPER_TABLES, relationships=RELATED)
        if not matches.problems:
            # Then each table and column of the file is filled, once.
            assert sorted(map(str, HYPER_TABLES)) == sorted(str(match.physical) for match in matches.tables.values())
            for match in matches.tables.values():
                assert sorted(match.names.values()) == sorted(match.physical.columns)


LOADED = [
    LoadColumn(name, Column.from_snowflake(name, kind))
    for name, kind in (("ID", "NUMBER(38,0)"), ("NAME", "VARCHAR"), ("DAY", "DATE"))
]
CSV = 'ID,NAME,DAY\n1,"a ""b"", c",2024-01-01\n2,,\n"3","line\nbreak",2024-02-30\n'
LINES = '{"ID": 1, "NAME": "a", "DAY": "2024-01-01"}\n{"ID": null, "NAME": [1, {"b": 2}]}\n\n{"ID": 1e400}\n'


@fuzzed
@given(spoilt(CSV).map(as_bytes) | st.binary(max_size=200))
@example(b"\xef\xbb\xbfID,NAME\n1\n")
def test_a_csv_file(content: bytes):
    consume(lambda: csv_pieces(io.BytesIO(content), "a.csv", LOADED, Shape(), delimiter=","))


@fuzzed
@given(spoilt(LINES).map(as_bytes) | st.binary(max_size=200))
@example(b"[" * 100_000)
def test_a_file_of_json_lines(content: bytes):
    consume(lambda: json_pieces(io.BytesIO(content), "a.jsonl", LOADED, Shape()))


def consume(pieces: Callable[[], Any]) -> None:
    with suppress(TirError):
        for piece in pieces():
            _ = piece.columns, piece.lines, piece.bad


@fuzzed
@given(
    spoilt("<tsRequest><datasource name='a'><project id='b'/></datasource></tsRequest>").map(as_bytes)
    | st.binary(max_size=200)
)
def test_a_request_to_the_tableau_of_the_sandbox(body: bytes):
    for reader in (read_request, read_json):
        with suppress(ApiError):
            reader(body)


ACTIONS = json.dumps(
    {
        "actions": [
            {
                "action": "delete",
                "target-table": "Extract",
                "target-schema": "Extract",
                "source-table": "keys",
                "condition": {
                    "op": "and",
                    "args": [{"op": "eq", "target-col": "ID", "const": {"type": "integer", "v": 7}}],
                },
            }
        ]
    }
)


@fuzzed
@given(spoilt(ACTIONS) | JSON.map(lambda value: json.dumps({"actions": value})))
def test_a_batch_of_changes_for_the_tableau_of_the_sandbox(text: str):
    value = {}
    with suppress(ValueError):
        value = json.loads(text)
    actions = value.get("actions") if isinstance(value, dict) else None
    # Anything else is refused before it is read.
    if isinstance(actions, list) and all(isinstance(action, dict) for action in actions):
        with suppress(ApiError, BatchError):
            read_actions(actions)


MIXED = (
    '--b\r\nContent-Disposition: name="request_payload"\r\nContent-Type: text/xml\r\n\r\n<tsRequest/>\r\n'
    '--b\r\nContent-Disposition: name="tableau_file"; filename="f"\r\n\r\ncontent\r\n--b--'
)


@fuzzed
@given(spoilt(MIXED).map(as_bytes), spoilt("multipart/mixed; boundary=b"))
def test_a_request_of_several_parts_to_the_tableau_of_the_sandbox(tmp_path: Path, body: bytes, header: str):
    file = tmp_path / "body"
    file.write_bytes(body)
    # As servers hand headers on: each byte a letter.
    header = as_bytes(header).decode("latin-1")
    with suppress(ApiError):
        boundary_of(header)
        take_apart(file, b"b", tmp_path / "part")


# Texts that become part of statements

TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=255)


@settings(fuzzed, max_examples=EXAMPLES // 2)
@given(texts=st.lists(TEXTS, min_size=1, max_size=8))
# An escape of a control character must not take the digit behind it.
@example(texts=["\x1f0", "\x012"])
@example(texts=["'", "\\", "\\'", '"', "a.b", "\n", "-- ", "/*", "👩‍👩‍👧", "x" * 255, "'; DROP TABLE t; --"])
def test_any_text_arrives_in_hyper_as_it_is(tmp_path: Path, texts: list[str]):
    with connect(tmp_path / "q.hyper", create=True) as connection:
        (row,) = connection.execute_list_query(f"SELECT {', '.join(map(hyper_literal, texts))}")
        assert list(row) == texts
        for name in texts:
            result = connection.execute_query(f"SELECT 1 AS {quoted(name)}")
            with result:
                assert result.schema.columns[0].name.unescaped == name


@settings(fuzzed, max_examples=max(EXAMPLES // 10, 10))
@given(texts=st.lists(TEXTS, min_size=1, max_size=8))
@example(
    texts=[
        "'",
        "\\",
        "\\'",
        '"',
        "a.b",
        "\n",
        "-- ",
        "/*",
        "👩‍👩‍👧",
        "x" * 255,
        "'; DROP TABLE t; --",
        "$$",
        "%s",
        ":1",
        "?",
    ]
)
def test_any_text_arrives_in_snowflake_as_it_is(cursor: Any, texts: list[str]):
    assert list(cursor.execute(f"SELECT {', '.join(map(snowflake_literal, texts))}").fetchone()) == texts
    for name in texts:
        cursor.execute(f"SELECT 1 AS {quote(name)}")
        assert cursor.description[0].name == name


@pytest.fixture(scope="module")
def cursor(sandbox: Any):
    with sandbox.snowflake() as connection:
        yield connection.cursor()


@fuzzed
@given(st.lists(TEXTS, min_size=3, max_size=3))
def test_a_name_of_a_table_is_read_back_from_its_own_text(parts: list[str]):
    name = TableName(*parts)
    assert TableName.parse(str(name)) == name
    assert TableName.parse(name.sql) == name
