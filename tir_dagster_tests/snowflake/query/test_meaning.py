"""What the analysis promises, checked by running it: the SQL means what the query means, and no affected key is missed.

`changed_join_keys`, `ways_to_find` and `replace` are the law of an incremental refresh in a few lines: a reference for the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import duckdb
import pytest
import sqlglot
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from tir_dagster.snowflake.names import TableName
from tir_dagster.snowflake.query import BaseSelect, View, ViewTable, analyse, base_sql, view_sql

Row = dict[str, Any]
Tables = Mapping[TableName, Sequence[Row]]
Key = tuple[Any, ...]

SALES, PRODUCTS, MAKERS = (TableName("DB", "S", name) for name in ("SALES", "PRODUCTS", "MAKERS"))
# So few values that keys meet, repeat and are missing all the time.
INT, TEXT = (0, 1, None), ("a", "b", None, "N/A")
COLUMNS = {
    SALES: {"ID": INT, "DAY": INT, "PRODUCT": INT, "OTHER": INT, "QTY": INT, "NOTE": TEXT},
    PRODUCTS: {"PRODUCT": INT, "COLOR": TEXT, "PRICE": INT, "MAKER": INT, "SINCE": INT, "NOTE": TEXT},
    MAKERS: {"MAKER": INT, "SITE": INT, "TITLE": TEXT, "NOTE": TEXT},
}
KNOWN = {table: list(columns) for table, columns in COLUMNS.items()}
LEFT = "FROM db.s.sales s LEFT JOIN db.s.products p ON p.product = s.product"
INNER = "FROM db.s.sales s JOIN db.s.products p ON p.product = s.product"
CHAIN = f"{LEFT} LEFT JOIN db.s.makers m ON m.maker = p.maker"

# The row key of each is ID: the output of that name, or for an aggregate the fact's column.
QUERIES: dict[str, str] = {
    "copy": "SELECT id, qty + 1 AS more FROM db.s.sales",
    "filtered copy": "SELECT * EXCLUDE note FROM db.s.sales WHERE COALESCE(qty, 0) > 0",
    "neither true nor false": "SELECT id, (qty > 0) IS NOT FALSE AS f FROM db.s.sales WHERE (qty > 0) IS NOT TRUE",
    "optional": f"SELECT s.id, COALESCE(color, 'N/A') AS color, qty * COALESCE(price, 0) AS total {LEFT}",
    "mandatory": f"SELECT id, color {INNER}",
    "filter on the optional side": f"SELECT id, s.qty {LEFT} WHERE p.color = 'a' OR p.price IS NULL",
    "using": "SELECT id, product, color, title FROM db.s.sales JOIN db.s.products USING (product) LEFT JOIN db.s.makers USING (maker)",
    "chain": f"SELECT s.id, m.title {CHAIN}",
    "mandatory behind optional": f"SELECT s.id, m.title {LEFT} JOIN db.s.makers m ON m.maker = p.maker",
    "optional behind mandatory": f"SELECT s.id, m.title {INNER} LEFT JOIN db.s.makers m ON m.maker = p.maker",
    "two keys": "SELECT s.id, p.color FROM db.s.sales s LEFT JOIN db.s.products p ON p.product = s.product AND s.other = p.maker",
    "condition on the joined side": f"SELECT s.id, p.color {LEFT} AND p.price > 0 AND p.note IS NOT NULL",
    "condition over both sides": f"SELECT s.id, p.color {LEFT} AND p.since <= s.day",
    "condition over a sibling": f"SELECT s.id, m.title {LEFT} LEFT JOIN db.s.makers m ON m.maker = s.other AND m.site >= p.since",
    "joined twice": f"SELECT s.id, p.color AS one, q.color AS two {LEFT} LEFT JOIN db.s.products q ON q.product = s.other",
    "joined to itself": "SELECT s.id, o.qty FROM db.s.sales s LEFT JOIN db.s.sales o ON o.id = s.other",
    "sum": f"SELECT day, COALESCE(color, 'N/A') AS color, SUM(qty * COALESCE(price, 0)) AS total, COUNT(*) AS n {LEFT} GROUP BY 1, 2",
    "count only": f"SELECT p.color, COUNT(*) AS n {INNER} GROUP BY ALL",
    "having": f"SELECT day + 1 AS next, MAX(qty) AS top {LEFT} WHERE s.note <> 'b' GROUP BY next HAVING MIN(price) > 0 OR COUNT(DISTINCT color) > 1",
    "sum over a chain": f"SELECT m.title, YEAR(DATE '2024-01-01') AS y, AVG(p.price) AS a, COUNT(s.qty) AS n {CHAIN} GROUP BY m.title",
    "distinct": f"SELECT DISTINCT p.color, s.day {LEFT}",
    "distinct copy": "SELECT DISTINCT day, 1 AS one FROM db.s.sales",
    "list": "SELECT day, LISTAGG(note, ',') WITHIN GROUP (ORDER BY note) AS notes FROM db.s.sales GROUP BY day",
}  # fmt: skip
VIEWS = {name: analyse(sql, KNOWN) for name, sql in QUERIES.items()}
EXAMPLES = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def base_of(view: View) -> BaseSelect:
    return base_sql(view, row_key=["ID"], watermark=None, version=None)


# A warehouse of three small tables


@dataclass(frozen=True)
class Warehouse:
    connection: duckdb.DuckDBPyConnection

    def load(self, tables: Tables) -> None:
        for table, rows in tables.items():
            self.connection.execute(f"DELETE FROM {table.sql}")
            if rows:
                listed = ", ".join(f"({', '.join(map(_literal, values(row, KNOWN[table])))})" for row in rows)
                self.connection.execute(f"INSERT INTO {table.sql} VALUES {listed}")

    def rows(self, snowflake_sql: str) -> list[Row]:
        result = self.connection.execute(_for_duckdb(snowflake_sql))
        names = [column[0] for column in result.description]
        return [dict(zip(names, row, strict=True)) for row in result.fetchall()]


def _literal(value: object) -> str:
    return "NULL" if value is None else repr(value)


@cache
def _for_duckdb(sql: str) -> str:
    return sqlglot.transpile(sql, read="snowflake", write="duckdb")[0]


@pytest.fixture(scope="module")
def warehouse() -> Iterator[Warehouse]:
    with duckdb.connect(config={"threads": 1}) as connection:
        connection.execute("ATTACH ':memory:' AS DB")
        connection.execute("CREATE SCHEMA DB.S")
        for table, columns in COLUMNS.items():
            listed = ", ".join(f"{name} {'INTEGER' if of is INT else 'VARCHAR'}" for name, of in columns.items())
            connection.execute(f"CREATE TABLE {table.sql} ({listed})")
        yield Warehouse(connection)


def rows_of(table: TableName) -> st.SearchStrategy[Row]:
    return st.fixed_dictionaries({name: st.sampled_from(of) for name, of in COLUMNS[table].items()})


CONTENTS = st.fixed_dictionaries(
    {
        table: st.lists(rows_of(table), max_size=4) | st.lists(rows_of(table), min_size=3, max_size=5)
        for table in COLUMNS
    }
)
NAMES = st.sampled_from(list(VIEWS))


def changes(view: View, random: Random) -> tuple[Tables, Tables]:
    """A view's tables before and after one to three changes: a row more, a row less, or one value in a row.

    Drawn evenly, not by a strategy: those prefer empty tables and equal values, where little can be missed.
    """
    before = {table: [_random_row(table, random) for _ in range(random.randint(0, 5))] for table in COLUMNS}
    after = {table: [dict(row) for row in rows] for table, rows in before.items()}
    for _ in range(random.randint(1, 3)):
        table = random.choice(view.tables).table
        rows = after[table]
        kind = random.choice(["update", "update", "insert", "delete"]) if rows else "insert"
        if kind == "insert":
            rows.append(_random_row(table, random))
        elif kind == "delete":
            rows.remove(random.choice(rows))
        else:
            column = random.choice(KNOWN[table])
            random.choice(rows)[column] = random.choice(COLUMNS[table][column])
    return before, after


def _random_row(table: TableName, random: Random) -> Row:
    return {name: random.choice(of) for name, of in COLUMNS[table].items()}


# The law


def values(row: Row, names: Sequence[str]) -> Key:
    return tuple(row[name] for name in names)


def bag(rows: Sequence[Row], names: Sequence[str]) -> Counter[Key]:
    return Counter(values(row, names) for row in rows)


def differing(before: Sequence[Row], after: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """Both images of every row that changed, as far as these columns tell."""
    old, new = bag(before, names), bag(after, names)
    return [dict(zip(names, row, strict=True)) for row in {**old, **new} if old[row] != new[row]]


def changed_join_keys(view: View, before: Tables, after: Tables) -> dict[str, set[Key]]:
    """K_D for each dimension: keys of its changed rows, and of its rows that refer to a changed row further on."""
    keys: dict[str, set[Key]] = {}
    for table in reversed(view.tables[1:]):
        key = [on.key for on in table.on]
        rows = differing(before[table.table], after[table.table], table.used) + referring(view, table, after, keys)
        keys[table.alias] = {values(row, key) for row in rows if None not in values(row, key)}
    return keys


def referring(view: View, table: ViewTable, after: Tables, changed: Mapping[str, set[Key]]) -> list[Row]:
    """The table's rows now that refer to a changed row of a table joined to it."""
    children = [child for child in view.tables[1:] if child.on[0].parent == table.alias]
    return [
        row
        for child in children
        for row in after[table.table]
        if values(row, [on.column for on in child.on]) in changed[child.alias]
    ]


def ways_to_find(
    view: View, before: Tables, after: Tables, base_before: list[Row], base_after: list[Row]
) -> dict[str, Callable[[Row], bool]]:
    """Three tests of a base row for being affected; each must find all that differs."""
    base = base_of(view)
    dimensions = changed_join_keys(view, before, after)
    own = differing(before[view.fact.table], after[view.fact.table], list({"ID", *view.fact.used}))
    facts = {(row["ID"],) for row in own}
    by_law = facts | {(row["ID"],) for row in referring(view, view.fact, after, dimensions)}
    by_hash = {values(row, base.key) for row in differing(base_before, base_after, base.columns)}
    return {
        "P: changed facts, and facts that now refer to a changed dimension row": lambda row: (
            values(row, base.key) in by_law
        ),
        # Of the old rows (the ledger's) as well as of the new: a row that a filter or an inner join now hides is in the old only.
        "changed facts, and base rows that refer to a changed dimension row": lambda row: (
            values(row, base.key) in facts
            or any(values(row, names) in dimensions[alias] for alias, names in base.refers.items())
        ),
        "base rows whose hashed columns differ": lambda row: values(row, base.key) in by_hash,
    }


def purge_keys(
    view: View, is_affected: Callable[[Row], bool], base_before: list[Row], base_after: list[Row]
) -> set[Key]:
    """S: of an aggregate the groups, old and new, that the affected rows are in; else their own keys."""
    named = base_of(view).group or base_of(view).key
    return {values(row, named) for row in (*base_before, *base_after) if is_affected(row)}


def replace(view: View, old: list[Row], new: list[Row], keys: set[Key]) -> Counter[Key]:
    """E' = { r in E : key(r) not in S } + { r in V_new : key(r) in S }."""
    named, names = base_of(view).group or base_of(view).key, [column.name for column in view.columns]
    kept = [row for row in old if values(row, named) not in keys]
    return bag(kept + [row for row in new if values(row, named) in keys], names)


@pytest.mark.parametrize("name", VIEWS)
def test_the_queries_here_are_analysed(name):
    assert not VIEWS[name].text, VIEWS[name].why_whole or VIEWS[name].why_full


@EXAMPLES
@given(name=NAMES, tables=CONTENTS)
def test_the_views_sql_means_what_the_query_means(warehouse, name, tables):
    view = VIEWS[name]
    warehouse.load(tables)
    names = [column.name for column in view.columns]
    query = [dict(zip(names, row.values(), strict=True)) for row in warehouse.rows(QUERIES[name])]
    read = warehouse.rows(view_sql(view, None))
    assert bag(read, names) == bag(query, names)

    base = base_of(view)
    rows = warehouse.rows(base.sql)
    if view.kind != "aggregate":
        assert bag(rows, base.columns) == bag(query, names)
    elif not view.having:
        assert {values(row, view.group) for row in rows} == {values(row, view.group) for row in query}
    else:
        assert {values(row, view.group) for row in rows} >= {values(row, view.group) for row in query}


@EXAMPLES
@given(name=NAMES, seed=st.integers(0, 2**32))
def test_replacing_the_affected_keys_makes_the_old_rows_the_new_ones(warehouse, name, seed):
    view, base = VIEWS[name], base_of(VIEWS[name])
    before, after = changes(view, Random(seed))
    note(f"{before} became {after}")
    warehouse.load(before)
    old, base_before = warehouse.rows(view_sql(view, None)), warehouse.rows(base.sql)
    warehouse.load(after)
    new, base_after = warehouse.rows(view_sql(view, None)), warehouse.rows(base.sql)

    for way, is_affected in ways_to_find(view, before, after, base_before, base_after).items():
        keys = purge_keys(view, is_affected, base_before, base_after)
        assert replace(view, old, new, keys) == bag(new, [column.name for column in view.columns]), way


@EXAMPLES
@given(name=NAMES, seed=st.integers(0, 2**32))
def test_a_column_that_is_not_used_changes_nothing(warehouse, name, seed):
    view, random = VIEWS[name], Random(seed)
    tables, _ = changes(view, random)
    warehouse.load(tables)
    old = warehouse.rows(view_sql(view, None))
    for table, rows in tables.items():
        used = {column for read in view.tables if read.table == table for column in read.used}
        for row in rows:
            row.update({name: random.choice(of) for name, of in COLUMNS[table].items() if name not in used})
    warehouse.load(tables)
    names = [column.name for column in view.columns]
    assert bag(warehouse.rows(view_sql(view, None)), names) == bag(old, names)
