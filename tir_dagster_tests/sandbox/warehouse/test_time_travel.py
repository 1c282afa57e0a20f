"""AT and CHANGES against a plain Python model, over random histories, through the real connector."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from snowflake.connector.errors import ProgrammingError

# `make soak` plays more of them.
HISTORIES = 200 if "TIR_HISTORIES" in os.environ else 40
KEYS = st.one_of(st.none(), st.integers(0, 3))
VALUES = st.one_of(st.none(), st.sampled_from(["a", "b"]))
_histories = itertools.count(1)


@dataclass(frozen=True)
class Row:
    """A row with its identity: `u` is written once and never updated."""

    u: int
    k: int | None
    v: str | None


@dataclass
class Model:
    """A table whose rows keep their identity through updates and lose it through delete and insert."""

    next_id: int
    rows: dict[int, Row] = field(default_factory=dict)

    def insert(self, pairs):
        """Gives the new rows."""
        new = [Row(u, k, v) for u, (k, v) in enumerate(pairs, start=self.next_id)]
        self.next_id += len(new)
        self.rows |= {row.u: row for row in new}
        return new

    def update(self, k, new):
        self.rows = {u: replace(row, **new) if row.k == k and k is not None else row for u, row in self.rows.items()}

    def delete(self, k):
        self.rows = {u: row for u, row in self.rows.items() if row.k != k or k is None}

    def overwrite(self, pairs):
        self.rows = {}
        return self.insert(pairs)


def lit(value):
    return "NULL" if value is None else f"'{value}'" if isinstance(value, str) else str(value)


def apply(sql, table, model, step):
    """One operation on the table and on the model."""
    kind, *args = step
    if kind in ("insert", "overwrite"):
        new = model.insert(args[0]) if kind == "insert" else model.overwrite(args[0])
        rows = ", ".join(f"({row.u}, {lit(row.k)}, {lit(row.v)})" for row in new)
        if rows:
            sql(f"INSERT {'OVERWRITE ' if kind == 'overwrite' else ''}INTO {table} VALUES {rows}")
        elif kind == "overwrite":
            sql(f"INSERT OVERWRITE INTO {table} SELECT * FROM {table} WHERE 1 = 0")
    elif kind == "many":
        # More rows than stay in the catalog: these become a Parquet file.
        many(sql, table, model, args[0])
    elif kind == "fail":
        with pytest.raises(ProgrammingError):
            sql(f"INSERT INTO {table} SELECT 0, 'x'::INT, 'x' FROM {table} UNION ALL SELECT 0, 'x'::INT, 'x'")
    elif kind == "update_value":
        model.update(args[0], {"v": args[1]})
        sql(f"UPDATE {table} SET V = {lit(args[1])} WHERE K = {lit(args[0])}")
    elif kind == "update_key":
        model.update(args[0], {"k": args[1]})
        sql(f"UPDATE {table} SET K = {lit(args[1])} WHERE K = {lit(args[0])}")
    elif kind == "delete":
        model.delete(args[0])
        sql(f"DELETE FROM {table} WHERE K = {lit(args[0])}")
    elif kind == "truncate":
        model.overwrite([])
        sql(f"TRUNCATE TABLE {table}")
    elif kind == "merge":
        merge(sql, table, model, args[0])


def many(sql, table, model, pair):
    first = model.next_id
    model.insert([pair] * 60)
    sql(f"INSERT INTO {table} SELECT RANGE, {lit(pair[0])}, {lit(pair[1])} FROM RANGE({first}, {first + 60})")


def merge(sql, table, model, source):
    """Source rows (key, value, delete flag): matched rows are deleted or updated, others inserted."""
    inserts = []
    for k, (v, gone) in source.items():
        if not any(row.k == k for row in model.rows.values()):
            inserts.append((k, v))
        elif gone:
            model.delete(k)
        else:
            model.update(k, {"v": v})
    numbers = {row.k: row.u for row in model.insert(inserts)}
    rows = " UNION ALL ".join(
        f"SELECT {k} AS K, {lit(v)} AS V, {gone} AS GONE, {numbers.get(k, -1)} AS U" for k, (v, gone) in source.items()
    )
    sql(
        f"MERGE INTO {table} t USING ({rows}) s ON t.K = s.K WHEN MATCHED AND s.GONE THEN DELETE "
        "WHEN MATCHED THEN UPDATE SET t.V = s.V WHEN NOT MATCHED THEN INSERT (U, K, V) VALUES (s.U, s.K, s.V)"
    )


PAIRS = st.lists(st.tuples(KEYS, VALUES), max_size=4)
CHANGE = st.one_of(
    st.tuples(st.just("insert"), PAIRS),
    st.tuples(st.just("update_value"), KEYS, VALUES),
    st.tuples(st.just("update_key"), KEYS, KEYS),
    st.tuples(st.just("delete"), KEYS),
    st.tuples(
        st.just("merge"), st.dictionaries(st.integers(0, 4), st.tuples(VALUES, st.booleans()), min_size=1, max_size=3)
    ),
    st.tuples(st.just("truncate")),
    st.tuples(st.just("many"), st.tuples(KEYS, VALUES)),
    st.tuples(st.just("overwrite"), PAIRS),
)
FAILURE = st.tuples(st.just("fail"))
STEP = st.one_of(
    CHANGE,
    CHANGE,
    st.tuples(st.just("transaction"), st.lists(st.one_of(CHANGE, FAILURE), min_size=1, max_size=3), st.booleans()),
)


@pytest.fixture(scope="module")
def history_table(sql):
    """One table for all histories, emptied before each: its own history grows and must not disturb."""
    sql("CREATE TABLE HISTORY (U INT, K INT, V VARCHAR) CHANGE_TRACKING = TRUE")
    return "HISTORY"


def this_moment():
    """Warehouse and test run on one machine, by one clock: no need to ask."""
    return f"'{datetime.now(UTC).isoformat()}'::TIMESTAMP_TZ"


def run(sql, table, steps, first_id):
    """Play the history; gives the model's rows after every commit, with the warehouse's time of it."""
    model = Model(first_id)
    moments = [(this_moment(), {})]
    for step in steps:
        if step[0] == "transaction":
            before = dict(model.rows)
            sql("BEGIN")
            for change in step[1]:
                apply(sql, table, model, change)
            sql("COMMIT" if step[2] else "ROLLBACK")
            model.rows = model.rows if step[2] else before
        else:
            apply(sql, table, model, step)
        moments.append((this_moment(), dict(model.rows)))
    return moments


def expected_changes(old, new):
    changes = Counter()
    for u in old.keys() | new.keys():
        if old.get(u) == new.get(u):
            continue
        both = u in old and u in new
        changes.update(
            [
                (row.u, row.k, row.v, action, both)
                for row, action in ((old.get(u), "DELETE"), (new.get(u), "INSERT"))
                if row
            ]
        )
    return changes


@settings(
    max_examples=HISTORIES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(steps=st.lists(STEP, min_size=1, max_size=4), data=st.data())
def test_at_and_changes_equal_the_model(sql, history_table, steps, data):
    table = history_table
    sql(f"TRUNCATE TABLE {table}")
    moments = run(sql, table, steps, first_id=next(_histories) * 1000)
    row_ids: dict[int, str] = {}

    for moment, rows in moments[-2:]:
        seen = sql(f"SELECT U, K, V FROM {table} AT(TIMESTAMP => {moment})")
        assert Counter(seen) == Counter((row.u, row.k, row.v) for row in rows.values())

    pairs = [(0, len(moments) - 1), tuple(sorted(data.draw(st.tuples(*[st.integers(0, len(moments) - 1)] * 2))))]
    for first, last in pairs:
        (since, old), (until, new) = moments[first], moments[last]
        seen = sql(
            "SELECT U, K, V, METADATA$ACTION, METADATA$ISUPDATE, METADATA$ROW_ID "
            f"FROM {table} CHANGES(INFORMATION => DEFAULT) AT(TIMESTAMP => {since}) END(TIMESTAMP => {until})"
        )
        assert Counter(row[:5] for row in seen) == expected_changes(old, new)
        for u, *_, row_id in seen:
            assert row_ids.setdefault(u, row_id) == row_id, "a row's id changed"
    assert len(set(row_ids.values())) == len(row_ids), "two rows share an id"


def refusal(sql, statement):
    with pytest.raises(ProgrammingError) as caught:
        sql(statement)
    return caught.value.errno, caught.value.sqlstate


def test_a_time_before_the_table_existed_is_refused_with_snowflakes_code(sql):
    early = sql.now()
    sql("CREATE TABLE BORN_LATE (A INT) CHANGE_TRACKING = TRUE")
    assert refusal(sql, f"SELECT * FROM BORN_LATE AT(TIMESTAMP => {early})") == (707, "02000")


def test_a_time_beyond_the_retention_is_refused_and_within_it_is_not(sql):
    sql("CREATE TABLE KEPT (A INT) CHANGE_TRACKING = TRUE DATA_RETENTION_TIME_IN_DAYS = 1")
    assert refusal(sql, "SELECT * FROM KEPT AT(OFFSET => -2*24*3600)") == (707, "02000")
    assert sql("SELECT * FROM KEPT AT(OFFSET => 0)") == []


def test_zero_retention_keeps_no_past(sql):
    sql("CREATE TABLE NOT_KEPT (A INT)")
    past = sql.now()
    sql("INSERT INTO NOT_KEPT VALUES (1)")
    sql("ALTER TABLE NOT_KEPT SET DATA_RETENTION_TIME_IN_DAYS = 0")
    assert refusal(sql, f"SELECT * FROM NOT_KEPT AT(TIMESTAMP => {past})") == (707, "02000")


def test_the_future_is_refused(sql):
    sql("CREATE TABLE NO_FUTURE (A INT)")
    assert refusal(sql, "SELECT * FROM NO_FUTURE AT(OFFSET => 3600)") == (707, "02000")


def test_changes_need_change_tracking_since_the_start_of_the_interval(sql):
    sql("CREATE TABLE UNTRACKED (A INT)")
    before = sql.now()
    assert refusal(sql, f"SELECT * FROM UNTRACKED CHANGES(INFORMATION => DEFAULT) AT(TIMESTAMP => {before})") == (
        91930,
        "2F003",
    )
    sql("ALTER TABLE UNTRACKED SET CHANGE_TRACKING = TRUE")
    assert refusal(sql, f"SELECT * FROM UNTRACKED CHANGES(INFORMATION => DEFAULT) AT(TIMESTAMP => {before})") == (
        91930,
        "2F003",
    )
    since = sql.now()
    sql("INSERT INTO UNTRACKED VALUES (1)")
    assert sql(f"SELECT A FROM UNTRACKED CHANGES(INFORMATION => DEFAULT) AT(TIMESTAMP => {since})") == [(1,)]


def test_a_recreated_table_has_no_past_under_its_name(sql):
    sql("CREATE TABLE RECREATED (A INT) CHANGE_TRACKING = TRUE")
    sql("INSERT INTO RECREATED VALUES (1)")
    past = sql.now()
    sql("CREATE OR REPLACE TABLE RECREATED (A INT) CHANGE_TRACKING = TRUE")
    assert refusal(sql, f"SELECT * FROM RECREATED AT(TIMESTAMP => {past})") == (707, "02000")
    assert refusal(sql, f"SELECT * FROM RECREATED CHANGES(INFORMATION => DEFAULT) AT(TIMESTAMP => {past})") == (
        707,
        "02000",
    )


def test_an_unknown_table_is_refused_in_every_kind_of_read(sql):
    for read in ("NOPE", "NOPE AT(OFFSET => 0)", "NOPE CHANGES(INFORMATION => DEFAULT) AT(OFFSET => 0)"):
        assert refusal(sql, f"SELECT * FROM {read}") == (2003, "42S02")
    assert refusal(sql, "SELECT SYSTEM$LAST_CHANGE_COMMIT_TIME('NOPE')") == (2003, "42S02")


def test_the_past_is_shown_under_todays_columns(sql):
    sql("CREATE TABLE EVOLVED (A INT, B VARCHAR) CHANGE_TRACKING = TRUE")
    sql("INSERT INTO EVOLVED VALUES (1, 'x')")
    past = sql.now()
    sql("ALTER TABLE EVOLVED RENAME COLUMN B TO C")
    sql("ALTER TABLE EVOLVED ADD COLUMN D INT")
    assert sql(f"SELECT A, C, D FROM EVOLVED AT(TIMESTAMP => {past})") == [(1, "x", None)]


def test_append_only_changes_show_inserts_even_of_rows_deleted_since(sql):
    sql("CREATE TABLE APPENDED (A INT) CHANGE_TRACKING = TRUE")
    since = sql.now()
    sql("INSERT INTO APPENDED VALUES (1), (2)")
    sql("DELETE FROM APPENDED WHERE A = 1")
    seen = sql(f"SELECT A, METADATA$ACTION FROM APPENDED CHANGES(INFORMATION => APPEND_ONLY) AT(TIMESTAMP => {since})")
    assert sorted(seen) == [(1, "INSERT"), (2, "INSERT")]


def test_the_end_of_a_long_transaction_counts_not_its_start(connect):
    writer, reader = connect(), connect()
    writer("CREATE TABLE SLOW (A INT)")
    writer("BEGIN")
    writer("INSERT INTO SLOW VALUES (1)")
    while_open = reader.now()
    writer("COMMIT")
    assert reader(f"SELECT * FROM SLOW AT(TIMESTAMP => {while_open})") == []
    assert reader(f"SELECT * FROM SLOW AT(TIMESTAMP => {reader.now()})") == [(1,)]


def test_the_change_token_moves_with_every_commit_that_changes_rows_and_only_then(connect):
    one, other = connect(), connect()
    token = lambda: one.value("SELECT SYSTEM$LAST_CHANGE_COMMIT_TIME('TOKENS')")  # noqa: E731
    one("CREATE TABLE TOKENS (A INT)")
    one("CREATE TABLE TOKENS_OTHER (A INT)")
    seen = [token()]
    for statement in (
        "INSERT INTO TOKENS VALUES (1), (2)",
        "UPDATE TOKENS SET A = 3 WHERE A = 1",
        "MERGE INTO TOKENS USING (SELECT 9 AS A) s ON TOKENS.A = s.A WHEN NOT MATCHED THEN INSERT (A) VALUES (s.A)",
        "DELETE FROM TOKENS WHERE A = 2",
        "TRUNCATE TABLE TOKENS",
    ):
        one(statement)
        seen.append(token())
    assert seen == sorted(set(seen))
    one("INSERT INTO TOKENS_OTHER VALUES (1)")
    one("SELECT * FROM TOKENS")
    other("BEGIN")
    other("INSERT INTO TOKENS VALUES (1)")
    assert token() == seen[-1], "another table's change, a read and an open transaction leave the token alone"
    other("ROLLBACK")
    assert token() == seen[-1]


def test_information_schema_knows_when_a_table_changed_and_how_many_rows_it_has(sql):
    before = sql.value("SELECT CURRENT_TIMESTAMP()")
    sql("CREATE TABLE COUNTED (A INT)")
    sql("INSERT INTO COUNTED SELECT 1 FROM (VALUES (1), (2), (3))")
    sql("DELETE FROM COUNTED WHERE A = 7")
    sql("UPDATE COUNTED SET A = 2")
    after = sql.value("SELECT CURRENT_TIMESTAMP()")
    query = "SELECT ROW_COUNT, CREATED, LAST_ALTERED FROM INFORMATION_SCHEMA.TABLES WHERE TABLE_NAME = 'COUNTED'"
    ((rows, created, altered),) = sql(query)
    assert rows == 3
    assert before <= created < altered <= after


def test_a_past_version_joins_with_the_present_one(sql):
    sql("CREATE TABLE JOINED (A INT, V VARCHAR)")
    sql("INSERT INTO JOINED VALUES (1, 'old'), (2, 'same')")
    past = sql.now()
    sql("UPDATE JOINED SET V = 'new' WHERE A = 1")
    seen = sql(f"SELECT JOINED.V, p.V FROM JOINED JOIN JOINED AT(TIMESTAMP => {past}) p ON p.A = JOINED.A ORDER BY p.A")
    assert seen == [("new", "old"), ("same", "same")]


@pytest.fixture(scope="module")
def past(sql):
    """Two tables that have changed since a moment, and copies of what they were then."""
    sql("CREATE TABLE PAST_S (ID INT, PRODUCT INT, QTY INT, TAGS VARIANT)")
    sql("CREATE TABLE PAST_P (PRODUCT INT, COLOR VARCHAR)")
    sql(
        "INSERT INTO PAST_S SELECT column1, column2, column3, PARSE_JSON(column4) FROM VALUES "
        "(1, 1, 5, '[1, 2]'), (2, 1, NULL, '[]'), (3, 2, 7, '[3]'), (3, 2, 7, '[3]')"
    )
    sql("INSERT INTO PAST_P VALUES (1, 'blue'), (2, 'red'), (NULL, 'none')")
    for name in ("S", "P"):
        sql(f"CREATE TABLE THEN_{name} AS SELECT * FROM PAST_{name}")
    moment = sql.now()
    sql("UPDATE PAST_S SET QTY = 100 - COALESCE(QTY, 0), PRODUCT = 2")
    sql("INSERT INTO PAST_S SELECT 9, 9, 9, PARSE_JSON('[9]')")
    sql("UPDATE PAST_P SET COLOR = COLOR || '!'")
    sql("DELETE FROM PAST_P WHERE PRODUCT = 2")
    return moment


@pytest.mark.parametrize(
    "query",
    [
        "WITH s AS (SELECT * FROM {S}), t AS (SELECT PRODUCT, SUM(QTY) AS Q FROM s GROUP BY PRODUCT) SELECT s.ID, t.Q FROM s JOIN t ON t.PRODUCT = s.PRODUCT",
        "WITH PAST_S AS (SELECT ID FROM {S} WHERE QTY > 5) SELECT ID FROM PAST_S",
        "SELECT ID FROM {S} x WHERE PRODUCT IN (SELECT PRODUCT FROM {P} WHERE COLOR = 'red')",
        "SELECT ID FROM {S} AS x WHERE EXISTS (SELECT 1 FROM {P} p WHERE p.PRODUCT = x.PRODUCT)",
        "SELECT ID, (SELECT MAX(COLOR) FROM {P} p WHERE p.PRODUCT = s.PRODUCT) AS C FROM {S} s",
        "SELECT ID, QTY FROM {S} UNION SELECT PRODUCT, NULL FROM {P}",
        "SELECT ID FROM {S} UNION ALL (SELECT PRODUCT FROM {P} ORDER BY PRODUCT LIMIT 1)",
        "SELECT ID FROM {S} MINUS SELECT PRODUCT FROM {P}",
        "SELECT ID, QTY, RANK() OVER (PARTITION BY PRODUCT ORDER BY QTY) AS N FROM {S}",
        "SELECT ID, QTY FROM {S} QUALIFY ROW_NUMBER() OVER (PARTITION BY PRODUCT ORDER BY QTY NULLS FIRST, ID) = 1",
        "SELECT ID, QTY FROM {S} ORDER BY QTY DESC, ID LIMIT 2",
        "SELECT TOP 2 ID, QTY FROM {S} ORDER BY QTY, ID",
        "SELECT DISTINCT QTY FROM (SELECT * FROM {S} WHERE ID > 1)",
        "SELECT x.ID, y.COLOR FROM (SELECT * FROM {S}) x FULL JOIN (SELECT * FROM {P}) y ON x.PRODUCT = y.PRODUCT",
        "SELECT s.ID, p.COLOR FROM {S} s CROSS JOIN {P} p",
        "SELECT s.ID, f.VALUE::INT AS V FROM {S} s, LATERAL FLATTEN(input => s.TAGS) f",
        "SELECT s.ID, l.C FROM {S} s, LATERAL (SELECT MAX(COLOR) AS C FROM {P} p WHERE p.PRODUCT = s.PRODUCT) l",
        "SELECT s.ID, s.QTY, v.N FROM {S} s JOIN (VALUES (1, 'one'), (3, 'three')) AS v(ID, N) ON v.ID = s.ID",
        "WITH RECURSIVE r AS (SELECT 1 AS N UNION ALL SELECT N + 1 FROM r WHERE N < 3) SELECT s.ID, r.N FROM {S} s JOIN r ON r.N <= s.PRODUCT",
        "SELECT PRODUCT, GROUPING(PRODUCT) AS G, SUM(QTY) AS Q FROM {S} GROUP BY ROLLUP (PRODUCT)",
        "SELECT ID FROM (WITH i AS (SELECT ID FROM {S}) SELECT ID FROM i) AS o",
    ],
)  # fmt: skip
def test_past_versions_may_stand_anywhere_in_a_query(sql, past, query):
    def rows(statement):
        return Counter(map(tuple, sql(f"SELECT * FROM ({statement}) AS r")))

    at = f"AT(TIMESTAMP => {past})"
    pinned = query.replace("{S}", f"PAST_S {at}").replace("{P}", f"PAST_P {at}")
    then = query.replace("{S}", "THEN_S").replace("{P}", "THEN_P")
    assert rows(pinned) == rows(then)
    assert rows(pinned) != rows(query.replace("{S}", "PAST_S").replace("{P}", "PAST_P"))


def test_swapped_tables_take_their_history_along(sql):
    sql("CREATE TABLE SWAP_A (A INT)")
    sql("CREATE TABLE SWAP_B (A INT)")
    sql("INSERT INTO SWAP_A VALUES (1)")
    sql("INSERT INTO SWAP_B VALUES (2)")
    sql("ALTER TABLE SWAP_A SWAP WITH SWAP_B")
    assert sql("SELECT A FROM SWAP_A") == [(2,)]
    assert sql("SELECT A FROM SWAP_B") == [(1,)]


def test_changes_since_the_tables_own_creation_are_known(sql):
    sql("CREATE TABLE FROM_BIRTH (A INT) CHANGE_TRACKING = TRUE")
    born = sql.value("SELECT SYSTEM$LAST_CHANGE_COMMIT_TIME('FROM_BIRTH')")
    sql("INSERT INTO FROM_BIRTH VALUES (1)")
    born = f"TO_TIMESTAMP_TZ('{datetime.fromtimestamp(0, UTC) + timedelta(microseconds=int(born) // 1000)}')"
    assert sql(f"SELECT A FROM FROM_BIRTH CHANGES(INFORMATION => DEFAULT) AT(TIMESTAMP => {born})") == [(1,)]


def test_inside_a_transaction_the_past_is_what_all_have_committed(connect):
    one, other = connect(), connect()
    one("CREATE TABLE SEEN (A INT) CHANGE_TRACKING = TRUE")
    since = one.now()
    one("BEGIN")
    one("INSERT INTO SEEN VALUES (1)")
    other("INSERT INTO SEEN VALUES (2)")
    assert one("SELECT A FROM SEEN AT(OFFSET => 0)") == [(2,)]
    assert one(f"SELECT A FROM SEEN CHANGES(INFORMATION => DEFAULT) AT(TIMESTAMP => {since})") == [(2,)]
    assert one(f"SELECT A FROM SEEN AT(TIMESTAMP => {since})") == []
    assert one("SELECT A FROM SEEN") == [(1,)]
    one("COMMIT")
    assert one("SELECT A FROM SEEN AT(OFFSET => 0) ORDER BY A") == [(1,), (2,)]


def test_a_renamed_table_keeps_its_past(sql):
    sql("CREATE TABLE NAMED_ONCE (A INT) CHANGE_TRACKING = TRUE")
    sql("INSERT INTO NAMED_ONCE VALUES (1)")
    past = sql.now()
    sql("INSERT INTO NAMED_ONCE VALUES (2)")
    later = sql.now()
    sql("ALTER TABLE NAMED_ONCE RENAME TO NAMED_TWICE")
    sql("INSERT INTO NAMED_TWICE VALUES (3)")
    assert sql(f"SELECT A FROM NAMED_TWICE AT(TIMESTAMP => {past})") == [(1,)]
    changes = f"SELECT A FROM NAMED_TWICE CHANGES(INFORMATION => DEFAULT) AT(TIMESTAMP => {past})"
    assert sorted(sql(changes)) == [(2,), (3,)]
    assert sql(f"{changes} END(TIMESTAMP => {later})") == [(2,)]


def test_a_bound_time_may_be_cast(sandbox, connect):
    one = connect(paramstyle="qmark")
    one("CREATE TABLE BOUND (A INT)")
    one("INSERT INTO BOUND VALUES (1)")
    past = one.value("SELECT CURRENT_TIMESTAMP()").isoformat()
    one("INSERT INTO BOUND VALUES (2)")
    assert one("SELECT A FROM BOUND AT(TIMESTAMP => ?::TIMESTAMP_TZ)", (past,)) == [(1,)]
    assert one("SELECT '?::' || ?::VARCHAR", ("x",)) == [("?::x",)]


@pytest.mark.parametrize(
    "source",
    [
        "VIEWED AT(OFFSET => 0)",
        "VIEWED CHANGES(INFORMATION => DEFAULT) AT(OFFSET => 0)",
        "INFORMATION_SCHEMA.TABLES",
    ],
)
def test_a_view_of_what_cannot_be_kept_is_refused(sql, source):
    sql("CREATE TABLE IF NOT EXISTS VIEWED (A INT) CHANGE_TRACKING = TRUE")
    assert refusal(sql, f"CREATE VIEW OVER_THE_PAST AS SELECT * FROM {source}") == (2, "0A000")


def test_old_rows_show_an_added_columns_default_in_every_kind_of_read(sql):
    sql("CREATE TABLE WIDENED (A INT) CHANGE_TRACKING = TRUE")
    since = sql.now()
    sql("INSERT INTO WIDENED VALUES (1)")
    past = sql.now()
    sql("ALTER TABLE WIDENED ADD COLUMN B INT DEFAULT 5")
    changes = f"SELECT A, B FROM WIDENED CHANGES(INFORMATION => DEFAULT) AT(TIMESTAMP => {since})"
    reads = ("SELECT A, B FROM WIDENED", f"SELECT A, B FROM WIDENED AT(TIMESTAMP => {past})", changes)
    assert [sql(read) for read in (*reads, f"{changes} END(TIMESTAMP => {past})")] == [[(1, 5)]] * 4


def ddl(sql, name):
    return sql(
        "SELECT TABLE_TYPE, ROW_COUNT, RETENTION_TIME, CREATED, LAST_ALTERED, LAST_DDL FROM INFORMATION_SCHEMA.TABLES "
        f"WHERE TABLE_SCHEMA = CURRENT_SCHEMA() AND TABLE_NAME = '{name}'"
    )[0]


@pytest.mark.parametrize(
    "statement",
    [
        "ALTER TABLE {t} RENAME COLUMN A TO B",
        "ALTER TABLE {t} ADD COLUMN C INT",
        "ALTER TABLE {t} SET DATA_RETENTION_TIME_IN_DAYS = 0",
        "ALTER TABLE {t} SET COMMENT = 'told'",
        "COMMENT ON TABLE {t} IS 'told'",
        "ALTER TABLE {t} UNSET COMMENT",
        "ALTER TABLE {t} ALTER COLUMN A COMMENT 'told'",
    ],
)
def test_last_ddl_moves_with_ddl_of_every_kind_and_with_nothing_else(sql, statement):
    table = f"DEFINED_{next(_histories)}"
    sql(f"CREATE TABLE {table} (A INT)")
    *_, created, _, defined = ddl(sql, table)
    sql(f"INSERT INTO {table} VALUES (1)")
    *_, altered, unmoved = ddl(sql, table)
    assert (created, unmoved) == (defined, defined)
    assert altered > defined
    sql(statement.format(t=table))
    *_, still, _, moved = ddl(sql, table)
    assert still == created
    assert moved > altered


def test_a_view_shows_the_past_of_its_tables_and_only_its_token_moves_with_them(sql):
    sql("CREATE TABLE BEHIND (A INT, B INT)")
    sql("INSERT INTO BEHIND VALUES (1, 10)")
    sql("CREATE VIEW BETWEEN_THEM AS SELECT A, B AS C FROM BEHIND WHERE A > 0")
    qualified = f"TESTS.{sql.value('SELECT CURRENT_SCHEMA()')}.BEHIND"
    sql(f"CREATE VIEW IN_FRONT AS SELECT v.A, v.C, t.B FROM BETWEEN_THEM v JOIN {qualified} t ON t.A = v.A")
    token, before, then = (
        "SELECT SYSTEM$LAST_CHANGE_COMMIT_TIME('IN_FRONT')",
        ddl(sql, "IN_FRONT"),
        sql.now(),
    )
    first = sql.value(token)
    sql("UPDATE BEHIND SET B = 20")

    assert sql.value(token) > first
    assert ddl(sql, "IN_FRONT") == before, "what happens to its tables does not alter a view"
    assert before[:3] == ("VIEW", None, None)
    assert sql(f"SELECT * FROM IN_FRONT AT(TIMESTAMP => {then})") == [(1, 10, 10)]
    assert sql("SELECT * FROM IN_FRONT") == [(1, 20, 20)]
    sql("ALTER TABLE BEHIND SET DATA_RETENTION_TIME_IN_DAYS = 0")
    assert refusal(sql, f"SELECT * FROM IN_FRONT AT(TIMESTAMP => {then})") == (707, "02000")
