"""Questions to Snowflake: about the session and some tables, only reading; and about a small table of the probe's own."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from tir_dagster.probe.doubts import Findings, refusal
from tir_dagster.snowflake.connection import BEYOND_TIME_TRAVEL, MISSING_OBJECT, UNTRACKED, SnowflakeAccess
from tir_dagster.snowflake.names import TableName, literal, quote
from tir_dagster.snowflake.settings import SETTINGS
from tir_dagster.snowflake.versions import SourceVersion, Span, pin, shown_objects, table_facts

_PREFIX = "TIR_PROBE_"
_OWN_NAME = re.compile(_PREFIX + "[0-9A-F]{12}")
_CLOCK_LOOKS = 5
# Parameters that change what a statement means or what a value looks like, with the values that tir_dagster expects.
_OWN_TABLE = ("noop_update", "token_on_ddl", "last_ddl_on_comment", "last_ddl_on_rows", "past_has_new_column")


def probe_snowflake(access: SnowflakeAccess, tables: Sequence[TableName], findings: Findings) -> None:
    """Ask about the session, and about the first table and the first view among these."""
    with access.kept_open():
        with findings.asking("reading the session's parameters", "snowflake.default_session"):
            others = other_parameters(access)
            findings.note("snowflake.default_session", not others, ", ".join(others))
        clock = [pin(access, margin_seconds=0).moment.microsecond % 1000 for _ in range(_CLOCK_LOOKS)]
        findings.note("snowflake.clock_microseconds", any(clock))
        nowhere = TableName(_PREFIX, _PREFIX, _PREFIX)
        _note_code(access, findings, "snowflake.missing_object", f"SELECT 1 FROM {nowhere.sql}", MISSING_OBJECT)
        views = {table: table_facts(access, table).is_view for table in tables}
        for about, is_view in ((_about_table, False), (_about_view, True)):
            for table in [table for table in tables if views[table] is is_view][:1]:
                about(access, table, findings)


def other_parameters(access: SnowflakeAccess) -> list[str]:
    """Return the session parameters that have another value than ours, as NAME=value."""
    expected = {setting.name: str(setting.value).casefold() for setting in SETTINGS}
    rows = access.query("SHOW PARAMETERS IN SESSION")
    return [
        f"{name}={value}"
        for name, value, *_ in rows
        if str(value).casefold() != expected.get(name, str(value).casefold())
    ]


def _note_code(access: SnowflakeAccess, findings: Findings, key: str, sql: str, codes: frozenset[int]) -> None:
    """Note whether Snowflake refuses the statement with one of these codes."""
    code = refusal(partial(access.query, sql))
    findings.note(key, code in {f"{number:06d}" for number in codes}, code or "not refused")


def _token(access: SnowflakeAccess, name: str) -> str:
    return str(access.query(f"SELECT SYSTEM$LAST_CHANGE_COMMIT_TIME({literal(name)}) AS T")[0][0])


def _about_table(access: SnowflakeAccess, table: TableName, findings: Findings) -> None:
    findings.tell("reading a table, its past and its future")
    later = SourceVersion(datetime.now(UTC) + timedelta(days=1))
    earlier = SourceVersion(table_facts(access, table).created - timedelta(days=1))
    for key, moment in (("snowflake.future_at", later), ("snowflake.before_creation", earlier)):
        sql = f"SELECT 1 AS ONE FROM {table.sql} {moment.sql} LIMIT 1"
        _note_code(access, findings, key, sql, BEYOND_TIME_TRAVEL)
    with findings.asking("reading its change token", "snowflake.quoted_token"):
        findings.note("snowflake.quoted_token", _token(access, table.sql) == _token(access, str(table)))
    with findings.asking("reading its collations", "snowflake.no_collation"):
        collated = access.query(
            f"SELECT COUNT(*) AS N FROM {quote(table.database)}.INFORMATION_SCHEMA.COLUMNS WHERE TABLE_SCHEMA ="
            f" {literal(table.schema)} AND TABLE_NAME = {literal(table.name)} AND COLLATION_NAME IS NOT NULL"
        )[0][0]
        findings.note("snowflake.no_collation", collated == 0, f"{collated} columns with a collation")
    if not any(row.get("change_tracking") == "ON" for row in shown_objects(access, table) if row["name"] == table.name):
        now = pin(access, margin_seconds=0)
        sql = f"SELECT 1 AS ONE FROM {Span(now, now).changes(table)} LIMIT 1"
        _note_code(access, findings, "snowflake.untracked", sql, UNTRACKED)


def _about_view(access: SnowflakeAccess, view: TableName, findings: Findings) -> None:
    findings.tell("reading the change token and the past of a view")
    code = refusal(lambda: _token(access, view.sql))
    findings.note("snowflake.view_token", not code, code)
    code = refusal(lambda: access.query(f"SELECT 1 AS ONE FROM {view.sql} {pin(access, margin_seconds=0).sql} LIMIT 1"))
    findings.note("snowflake.view_at", not code, code)


def probe_snowflake_scratch(access: SnowflakeAccess, database: str, schema: str, findings: Findings) -> None:
    """Create, change, alter and drop a small table; drop first what a killed probe left in this schema."""
    table = TableName(database, schema, f"{_PREFIX}{uuid.uuid4().hex[:12].upper()}")
    with access.kept_open():
        for row in shown_objects(access, TableName(database, schema, f"{_PREFIX}%")):
            left = TableName(database, schema, row["name"])
            if _OWN_NAME.fullmatch(left.name):
                findings.tell(f"dropping {left.name}, left by an earlier probe")
                access.query(f"DROP TABLE IF EXISTS {left.sql}")
        try:
            with findings.asking(f"creating {table.name}", *(f"snowflake.{key}" for key in _OWN_TABLE)):
                access.query(f"CREATE TABLE {table.sql} (K NUMBER(38,0), V VARCHAR)")
                access.query(f"ALTER TABLE {table.sql} SET CHANGE_TRACKING = TRUE")
                access.query(f"INSERT INTO {table.sql} VALUES (1, 'one')")
                _about_own_table(access, table, findings)
        finally:
            findings.tell(f"dropping {table.name}")
            access.query(f"DROP TABLE IF EXISTS {table.sql}")


def _about_own_table(access: SnowflakeAccess, table: TableName, findings: Findings) -> None:
    old = pin(access, margin_seconds=0)
    access.query(f"UPDATE {table.sql} SET V = V")
    span = Span(old, pin(access, margin_seconds=0))
    changes = access.query(f"SELECT COUNT(*) AS N FROM {span.changes(table)}")[0][0]
    findings.note("snowflake.noop_update", changes > 0, f"{changes} rows")
    created = table_facts(access, table).last_ddl
    access.query(f"UPDATE {table.sql} SET V = 'ONE'")
    token, changed = _token(access, table.sql), table_facts(access, table).last_ddl
    findings.note("snowflake.last_ddl_on_rows", changed != created)
    access.query(f"COMMENT ON TABLE {table.sql} IS 'made by tir probe-server'")
    findings.note("snowflake.last_ddl_on_comment", table_facts(access, table).last_ddl != changed)
    past = pin(access, margin_seconds=0)
    access.query(f"ALTER TABLE {table.sql} ADD COLUMN C NUMBER(38,0) DEFAULT 7")
    findings.note("snowflake.token_on_ddl", _token(access, table.sql) != token)
    rows: list[tuple[Any, ...]] = []
    code = refusal(lambda: rows.extend(access.query(f"SELECT C FROM {table.sql} {past.sql}")))
    findings.note("snowflake.past_has_new_column", rows == [(7,)], code or rows)
