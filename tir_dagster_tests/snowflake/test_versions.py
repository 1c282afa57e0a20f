from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from tir_dagster.errors import SourceError
from tir_dagster.snowflake.columns import Kind
from tir_dagster.snowflake.names import TableName
from tir_dagster.snowflake.versions import SourceVersion, describe, pin, probe, select, table_facts

ABSENT = TableName("SRC", "PUBLIC", "ABSENT")


def test_a_version_is_utc_and_ordered_and_comes_back_from_its_text():
    early = SourceVersion(datetime(2026, 1, 31, 23, 59, 59, 5, tzinfo=UTC))
    late = SourceVersion(datetime(2026, 2, 1, 1, 0, tzinfo=timezone(timedelta(hours=1), "CET")))

    assert early < late
    assert str(early) == "2026-01-31T23:59:59.000005+00:00"
    assert late.sql == "AT(TIMESTAMP => '2026-02-01T00:00:00.000000+00:00'::TIMESTAMP_TZ)"
    assert SourceVersion.parse(str(late)) == late


@pytest.mark.parametrize("text", ["2026-01-31T23:59:59", "yesterday"])
def test_a_version_without_a_zone_or_sense_is_refused(text):
    with pytest.raises(SourceError, match=r"\+00:00"):
        SourceVersion.parse(text)


def test_tokens_move_with_their_table_only_and_come_by_one_query(access, make_table, run, warehouse):
    changed, other = make_table("ID INT", "VALUES (1)"), make_table("ID INT", "VALUES (1)")
    before = probe(access, [changed, other])
    run(f"INSERT INTO {changed.sql} VALUES (2)")
    after = probe(access, [changed, other])

    statements = [query["sql"] for query in warehouse.queries()]
    assert statements[-1].count("SYSTEM$LAST_CHANGE_COMMIT_TIME") == 2, "both tables by one query"
    assert before[changed].token != after[changed].token
    assert before[other] == after[other]
    assert before[other].seen < after[other].seen
    assert probe(access, []) == {}


def test_a_missing_table_does_not_hide_the_others(access, make_table):
    table = make_table("ID INT", "VALUES (1)")

    probes = probe(access, [table, ABSENT])

    assert probes[table].token
    assert probes[ABSENT].token is None
    assert "ABSENT" in str(probes[ABSENT].problem)


def test_a_pinned_read_sees_the_old_rows(access, make_table, run):
    table = make_table("ID INT, NAME VARCHAR", "VALUES (1, 'old'), (2, 'old')")
    version = pin(access, margin_seconds=0)
    run(f"UPDATE {table.sql} SET NAME = 'new' WHERE ID = 1")
    run(f"DELETE FROM {table.sql} WHERE ID = 2")
    columns = describe(access, table)

    assert sorted(access.query(select(table, columns, version=version))) == [(1, "old"), (2, "old")]
    assert access.query(select(table, columns, where='"ID" < 5')) == [(1, "new")]


def test_the_margin_lies_in_the_past(access):
    now, then = pin(access, margin_seconds=0), pin(access, margin_seconds=60)

    assert timedelta(seconds=50) < now.moment - then.moment < timedelta(seconds=61)


def test_columns_come_with_their_types_and_in_the_order_asked(access, make_table):
    table = make_table('ID NUMBER(38,0) NOT NULL, "Amount" NUMBER(12,2), MOMENT TIMESTAMP_TZ, DATA BINARY')

    amount, moment, key = describe(access, table, ["Amount", "moment", "ID"])

    assert [(c.name, c.kind) for c in (amount, moment, key)] == [
        ("Amount", Kind.DECIMAL),
        ("MOMENT", Kind.INSTANT),
        ("ID", Kind.INTEGER),
    ]
    assert (amount.precision, amount.scale, amount.nullable, key.nullable) == (12, 2, True, False)
    with pytest.raises(SourceError, match="DATA is BINARY"):
        describe(access, table)
    with pytest.raises(SourceError, match=r"no column NOPE.*It has ID, Amount, MOMENT, DATA"):
        describe(access, table, ["ID", "NOPE"])
    with pytest.raises(SourceError, match="ID is named twice"):
        describe(access, table, ["ID", "id"])


def test_identity_follows_the_table_not_its_rows_or_columns(access, make_table, run):
    table = make_table("ID INT", "VALUES (1)")
    first = table_facts(access, table).identity
    run(f"INSERT INTO {table.sql} VALUES (2)")
    assert table_facts(access, table).identity == first
    assert table_facts(access, table).rows == 2

    run(f"ALTER TABLE {table.sql} ADD COLUMN NAME VARCHAR")
    assert table_facts(access, table).identity == first, "columns are compared by themselves"
    run(f"CREATE OR REPLACE TABLE {table.sql} (ID INT, NAME VARCHAR)")

    assert table_facts(access, table).identity != first
    with pytest.raises(SourceError, match="ABSENT does not exist"):
        table_facts(access, ABSENT)
