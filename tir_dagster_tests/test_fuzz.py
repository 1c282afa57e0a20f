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
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from lxml import etree
from snowflake.connector.errors import Error as SnowflakeError

from tir_dagster.alerts.storage import AlertStorage
from tir_dagster.changes.hints import parse_hints
from tir_dagster.changes.plan import SourceState
from tir_dagster.errors import LoadError, TirError
from tir_dagster.hyper.engine import connect, quoted
from tir_dagster.hyper.engine import literal as hyper_literal
from tir_dagster.hyper.package.matching import find_matches
from tir_dagster.hyper.package.object_model import read_object_model
from tir_dagster.hyper.package.package import read_package
from tir_dagster.loading.formats import Shape, csv_pieces, json_pieces, parquet_groups, parquet_pieces
from tir_dagster.loading.values import LoadColumn
from tir_dagster.refresh.state.change_sets import ChangeSetStore
from tir_dagster.refresh.state.hold import Hold, HoldFile
from tir_dagster.refresh.state.lease import lease_holder
from tir_dagster.refresh.state.records import Intent
from tir_dagster.refresh.state.versions import VersionStore
from tir_dagster.sandbox.home import Identity
from tir_dagster.sandbox.people import slack
from tir_dagster.sandbox.people.servicenow import ServiceNow
from tir_dagster.sandbox.people.store import Store
from tir_dagster.sandbox.tableau.batches import BatchError, read_actions
from tir_dagster.sandbox.tableau.multipart import boundary_of, take_apart
from tir_dagster.sandbox.tableau.packages import build_tdsx
from tir_dagster.sandbox.tableau.wire import ApiError, read_json, read_request
from tir_dagster.snowflake.columns import Column
from tir_dagster.snowflake.names import TableName, quote
from tir_dagster.snowflake.names import literal as snowflake_literal
from tir_dagster.snowflake.query import analyse, explain
from tir_dagster.spec.reading import parse_declared
from tir_dagster.tableau.webhooks import BadEventError, read_event
from tir_dagster_tests.hyper.documents import FIELDS, SNOWFLAKE, document_of, edited, with_events
from tir_dagster_tests.hyper.star_document import DECLARED, HYPER_TABLES, RELATED, STAR
from tir_dagster_tests.refresh.state.staged import a_change_set
from tir_dagster_tests.spec.sample import ALERTS, GOOD

# What the stand-in answers if it fails itself.
UNEXPLAINED = 603
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


def spoilt_bytes(data: st.DataObject, content: bytes) -> bytes:
    """The content with a few bytes removed, added or replaced."""
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, max(len(changed) - 1, 0)))
        changed[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    return bytes(changed)


@fuzzed
@given(data=st.data())
def test_the_archive_of_a_package(package: Path, tmp_path: Path, data: st.DataObject):
    (tmp_path / "spoilt.tdsx").write_bytes(spoilt_bytes(data, package.read_bytes()))
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


@pytest.fixture(scope="module")
def parquet() -> bytes:
    rows = pa.table({"ID": [1, 2], "NAME": ["a", None], "DAY": [date(2026, 1, 1), None]})
    file = io.BytesIO()
    pq.write_table(rows, file)
    return file.getvalue()


@fuzzed
@given(data=st.data())
def test_a_parquet_file(parquet: bytes, data: st.DataObject):
    content = spoilt_bytes(data, parquet)
    consume(lambda: parquet_pieces(io.BytesIO(content), "a.parquet", LOADED, Shape(), groups=None))
    with suppress(TirError):
        parquet_groups(io.BytesIO(content), "a.parquet")


@pytest.mark.parametrize(
    ("there", "instead"),
    [(b"\x18\x02ID", b"\x18\x02\x80D"), (b"\x18\x06schema", b"\xff\xff\xffchema")],
    ids=["a name that is no text", "damage that Arrow calls an error of the system"],
)
def test_a_damaged_parquet_file_is_named(parquet: bytes, there: bytes, instead: bytes):
    assert there in parquet
    content = io.BytesIO(parquet.replace(there, instead))
    with pytest.raises(LoadError, match=r"^a\.parquet: not a whole Parquet file: .*Nothing was loaded"):
        list(parquet_pieces(content, "a.parquet", LOADED, Shape(), groups=None))


EVENT = '{"resource": "DATASOURCE", "event_type": "DatasourceRefreshSucceeded", "resource_luid": "a", "created_at": "2026-01-01T00:00:00.000Z"}'


@fuzzed
@given(spoilt(EVENT).map(as_bytes) | st.binary(max_size=200) | JSON.map(lambda value: as_bytes(json.dumps(value))))
def test_an_event_of_a_webhook(body: bytes):
    with suppress(BadEventError):
        read_event(body)


# What is on the disk: it may be cut, or somebody edited it

KNOWN = SourceState(definition="d", schema="s", identity="i", token="t")
STATE_FILES = {
    "change_sets/intent.json": Intent("orders", "cs", "v1", None, "f", KNOWN).to_json(),
    "change_sets/c1/manifest.json": a_change_set("c1").to_json(),
    "versions/v00000001/manifest.json": json.dumps({"version": 1, "files": {"extract.hyper": 1}, "rows": 1}),
    "hold.json": json.dumps(asdict(Hold("today", "me", "a test"))),
    "lease.json": json.dumps({"id": "a", "host": "h", "pid": 1, "purpose": "a test"}),
}


@fuzzed
@given(name=st.sampled_from(sorted(STATE_FILES)), data=st.data())
def test_the_state_of_an_extract(tmp_path: Path, name: str, data: st.DataObject):
    for other, text in STATE_FILES.items():
        (tmp_path / other).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / other).write_text(text, encoding="utf-8")
    (tmp_path / "versions/v00000001/extract.hyper").write_text("x")
    content = data.draw(spoilt(STATE_FILES[name]).map(as_bytes) | JSON.map(lambda value: as_bytes(json.dumps(value))))
    (tmp_path / name).write_bytes(content)
    change_sets = ChangeSetStore(tmp_path / "change_sets")
    for read in (
        change_sets.pending,
        change_sets.intent,
        VersionStore(tmp_path / "versions").versions,
        HoldFile(tmp_path).read,
        lambda: lease_holder(tmp_path / "lease.json"),
    ):
        with suppress(TirError):
            read()


@fuzzed
@given(
    name=st.sampled_from(["worked", "full", "given_up", "told", "open/a", "pending/a", "daily/a", "inbox/a"]),
    value=JSON.map(json.dumps) | st.text(max_size=40),
)
def test_the_state_of_alerts(tmp_path: Path, name: str, value: str):
    file = tmp_path / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(as_bytes(value))
    storage = AlertStorage(tmp_path)
    storage.load()
    storage.left_reports(["orders"])
    file.unlink()


# The Slack and ServiceNow of the sandbox

MESSAGE = '{"channel": "#a", "text": "b", "blocks": [{"type": "section", "text": {"type": "mrkdwn", "text": "c"}, "fields": [{"text": "d"}]}]}'
BODIES = st.binary(max_size=200) | JSON.map(lambda value: as_bytes(json.dumps(value)))


@fuzzed
@given(body=spoilt(MESSAGE).map(as_bytes) | BODIES, kind=st.sampled_from(["application/json", "form"]))
def test_a_message_to_the_slack_of_the_sandbox(people: Store, body: bytes, kind: str):
    headers = {"authorization": "Bearer t", "content-type": kind}
    assert "ok" in slack.answer(people, "chat.postMessage", headers, body, "t")


@fuzzed
@given(
    method=st.sampled_from(["GET", "POST", "PATCH", "PUT"]),
    rest=st.sampled_from(["", "x"]),
    query=st.fixed_dictionaries({"sysparm_query": st.text(max_size=20), "sysparm_limit": st.text(max_size=4)}),
    signed=st.sampled_from(["Bearer t", "Basic é", "Basic YQ=="]),
    body=BODIES,
)
def test_a_request_to_the_servicenow_of_the_sandbox(people: Store, method, rest, query, signed, body):
    servicenow = ServiceNow(people, Identity(), {"t"})
    for status, answer in (servicenow.incidents(method, rest, query, signed, body), servicenow.token(body)):
        assert 200 <= status < 500
        json.dumps(answer)


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("people"))


# The warehouse of the sandbox, over its protocol

STATEMENTS = (
    *QUERIES,
    "CREATE OR REPLACE TABLE FUZZED.PUBLIC.T (ID NUMBER(38,0) NOT NULL, V VARIANT, AT TIMESTAMP_NTZ(9)) COMMENT = 'c'",
    "MERGE INTO FUZZED.PUBLIC.T t USING (SELECT 1 AS ID) s ON t.ID = s.ID WHEN MATCHED THEN DELETE WHEN NOT MATCHED THEN INSERT (ID) VALUES (s.ID)",
    "SELECT * FROM FUZZED.PUBLIC.T AT(TIMESTAMP => '2026-01-01 00:00:00'::TIMESTAMP_LTZ) BEFORE(STATEMENT => 'x')",
    "COPY INTO FUZZED.PUBLIC.T FROM (SELECT $1:ID FROM @S/a) FILE_FORMAT = (TYPE = PARQUET) PURGE = TRUE",
    "ALTER SESSION SET TIMEZONE = 'UTC'",
    "SHOW TABLES LIKE 'T%' IN SCHEMA FUZZED.PUBLIC LIMIT 3",
)


@settings(fuzzed, max_examples=EXAMPLES // 2)
@given(st.sampled_from(STATEMENTS).flatmap(spoilt))
def test_a_statement_to_the_warehouse_of_the_sandbox(cursor: Any, text: str):
    error: SnowflakeError | None = None
    try:
        cursor.execute(text)
    except SnowflakeError as refused:
        error = refused
    assert error is None or error.errno != UNEXPLAINED, f"the stand-in itself failed: {error}"


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
