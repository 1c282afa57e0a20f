"""Random histories of extracts over queries of all kinds, through Spark, Hyper and the servers: always what the query shows."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest

from tir_dagster.changes.plan import Reason
from tir_dagster_tests.conftest import Sandbox
from tir_dagster_tests.orchestration.shown import Shown, prepare

# Of each query below; `make soak` plays a hundred.
HISTORIES = int(os.environ.get("TIR_HISTORIES", "2"))

TABLES = {
    "SALES": "ID NUMBER(38,0), DAY DATE, PRODUCT NUMBER(38,0), QTY NUMBER(12,2), NOTE VARCHAR, W TIMESTAMP_NTZ",
    "PRODUCTS": "PRODUCT NUMBER(38,0), MAKER VARCHAR, COLOR VARCHAR, NOTE VARCHAR, W TIMESTAMP_NTZ",
    "MAKERS": "MAKER VARCHAR, SITE VARCHAR, W TIMESTAMP_NTZ",
}
# So few values that keys meet, repeat and are missing all the time.
VALUES = {
    "ID": ["NULL", *map(str, range(12))],
    "DAY": ["NULL", "'2025-03-05'::DATE", "'2025-04-01'::DATE", "'9999-12-31'::DATE"],
    "PRODUCT": ["NULL", "0", "1", "2"],
    "QTY": ["NULL", "0.00", "2.50", "-1.00"],
    "NOTE": ["NULL", "''", "'a|~'", "'é'"],
    "MAKER": ["NULL", "'m'", "'M'", "'n'"],
    "COLOR": ["NULL", "'blue'", "'red'"],
    "SITE": ["NULL", "'x'", "'y'"],
}
COLUMNS = {
    "SALES": ("ID", "DAY", "PRODUCT", "QTY", "NOTE"),
    "PRODUCTS": ("PRODUCT", "MAKER", "COLOR", "NOTE"),
    "MAKERS": ("MAKER", "SITE"),
}
CHAIN = (
    "FROM {s}.SALES s LEFT JOIN {s}.PRODUCTS p ON p.PRODUCT = s.PRODUCT {JOIN} JOIN {s}.MAKERS m ON m.MAKER = p.MAKER"
)
SLICES = {"column": "DAY", "by": "month", "start": "2025-03"}
STAMPED = {"watermark": "W", "look_back": "1 second"}
MARKED = {**STAMPED, "tables": {"{s}.PRODUCTS": STAMPED, "{s}.MAKERS": STAMPED}}
FEED = {"detector": "feed", "tables": {"{s}.PRODUCTS": {"detector": "feed"}, "{s}.MAKERS": {"detector": "feed"}}}
QUERIES = {
    "optional chain": (
        "SELECT s.ID, s.DAY, s.QTY, COALESCE(p.COLOR, 'N/A') AS COLOR, m.SITE " + CHAIN.replace("{JOIN}", "LEFT"),
        {"row_key": "ID", "slices": SLICES, "changes": STAMPED},
    ),
    "mandatory at the end": (
        "SELECT s.ID, s.DAY, s.NOTE, m.SITE " + CHAIN.replace("{JOIN}", "INNER") + " WHERE COALESCE(s.QTY, 1) > 0",
        {"row_key": "ID", "changes": FEED},
    ),
    "aggregate": (
        "SELECT s.DAY, COALESCE(m.SITE, 'N/A') AS SITE, SUM(s.QTY) AS TOTAL, COUNT(*) AS N, COUNT(DISTINCT p.COLOR) AS COLORS "
        + CHAIN.replace("{JOIN}", "LEFT")
        + " GROUP BY 1, 2 HAVING COUNT(*) < 5",
        {"row_key": "ID", "slices": SLICES, "changes": MARKED, "delivery": "patch"},
    ),
    "aggregate without a row key": (
        "SELECT p.COLOR, MAX(s.QTY) AS TOP " + CHAIN.replace("{JOIN}", "LEFT") + " GROUP BY p.COLOR",
        {"delivery": "patch"},
    ),
    "slices without a row key": (
        "SELECT s.DAY, s.NOTE, p.COLOR FROM {s}.SALES s JOIN {s}.PRODUCTS p ON p.PRODUCT = s.PRODUCT",
        {"slices": SLICES, "delivery": "patch"},
    ),
    # Compared as a whole. Rows that tie here are equal in all that is shown.
    "windows": (
        (
            "SELECT ID, DAY, QTY, RANK() OVER (PARTITION BY PRODUCT ORDER BY QTY) AS PLACE, SUM(QTY) OVER (PARTITION BY DAY) AS TOTAL "
            "FROM {s}.SALES"
        ),
        {"row_key": "ID", "slices": SLICES, "changes": STAMPED},
    ),
    "first of each product": (
        (
            "WITH SALES AS (SELECT * FROM {s}.SALES WHERE NOTE IS NOT NULL) SELECT ID, DAY, PRODUCT, QTY FROM SALES "
            "QUALIFY ROW_NUMBER() OVER (PARTITION BY PRODUCT ORDER BY DAY, ID, QTY) = 1"
        ),
        {"row_key": "PRODUCT", "delivery": "patch"},
    ),
    "union with subqueries": (
        (
            "SELECT s.ID, s.DAY, (SELECT MAX(p.COLOR) FROM {s}.PRODUCTS p WHERE p.PRODUCT = s.PRODUCT) AS COLOR FROM {s}.SALES s "
            "WHERE s.PRODUCT IN (SELECT PRODUCT FROM {s}.PRODUCTS WHERE MAKER IN (SELECT MAKER FROM {s}.MAKERS)) "
            "UNION SELECT PRODUCT, NULL, NOTE FROM {s}.PRODUCTS"
        ),
        {"row_key": ["ID", "COLOR"], "slices": SLICES, "changes": FEED},
    ),
    "top": (
        "SELECT ID, DAY, QTY FROM {s}.SALES ORDER BY QTY DESC NULLS LAST, ID, DAY LIMIT 4",
        {"row_key": "ID"},
    ),
    "distinct of a full join, by slices": (
        (
            "SELECT DISTINCT s.DAY, p.COLOR, m.SITE FROM {s}.SALES s FULL JOIN {s}.PRODUCTS p ON p.PRODUCT = s.PRODUCT "
            "CROSS JOIN (SELECT DISTINCT SITE FROM {s}.MAKERS) m"
        ),
        {"slices": SLICES, "delivery": "patch"},
    ),
}
# Views in the warehouse, created again in between as dbt does it, over tables that are created anew in between.
SEEN = (
    "CREATE OR REPLACE VIEW {s}.SEEN AS SELECT s.ID, s.DAY, s.QTY, COALESCE(p.COLOR, 'N/A') AS COLOR FROM {s}.SALES s "
    "LEFT JOIN {s}.PRODUCTS p ON p.PRODUCT = s.PRODUCT"
)
SOLD = (
    "CREATE OR REPLACE VIEW {s}.SOLD (NUMBER, DAY, MAKER) CHANGE_TRACKING = TRUE AS SELECT ID, DAY, MAKER FROM {s}.SALES s "
    "JOIN {s}.PRODUCTS p ON p.PRODUCT = s.PRODUCT WHERE COALESCE(QTY, 1) > 0"
)
OVER_SOLD = "CREATE OR REPLACE VIEW {s}.OVER_SOLD CHANGE_TRACKING = TRUE AS SELECT NUMBER AS ID, DAY, MAKER FROM SOLD"
VIEWS = {"a view": (SEEN,), "a view over a view, by its feed": (SOLD, OVER_SOLD)}
QUERIES |= {
    "a view": ("SELECT ID, DAY, QTY, COLOR FROM {s}.SEEN", {"row_key": "ID", "slices": SLICES}),
    "a view over a view, by its feed": (
        "SELECT v.ID, v.DAY, m.SITE FROM {s}.OVER_SOLD v LEFT JOIN {s}.MAKERS m ON m.MAKER = v.MAKER",
        {"row_key": "ID", "changes": {"detector": "feed"}, "delivery": "patch"},
    ),
}


@pytest.fixture(scope="module")
def prepared(sandbox: Sandbox) -> Sandbox:
    return prepare(sandbox)


@pytest.fixture(params=QUERIES, scope="module")
def shown(request, prepared, spark, tmp_path_factory) -> Iterator[Shown]:
    query, settings = QUERIES[request.param]
    extract = Shown(prepared, spark, tmp_path_factory.mktemp("shown"), TABLES, query, settings)
    for table in TABLES:
        extract.sql(f"ALTER TABLE {{s}}.{table} SET CHANGE_TRACKING = TRUE")
    random = Random(request.param)
    for statement in VIEWS.get(request.param, ()):
        extract.sql(statement)
    for table, rows in (("SALES", 12), ("PRODUCTS", 3), ("MAKERS", 2)):
        for _ in range(rows):
            change(extract, random, table, "insert")
    assert extract.refresh().reason is Reason.FIRST_LOAD
    assert extract.published() == extract.expected()
    yield extract
    extract.close()


_stamps = itertools.count(1)


def change(shown: Shown, random: Random, table: str, kind: str) -> None:
    """One statement on one table; honest writers move the stamp."""
    columns = COLUMNS[table]
    value = {name: random.choice(VALUES[name]) for name in columns}
    stamp = f"DATEADD('minute', {next(_stamps)}, '2025-01-01'::TIMESTAMP_NTZ)"
    column = random.choice(columns)
    which = f"{column} IS NOT DISTINCT FROM {random.choice(VALUES[column])}"
    match kind:
        case "insert":
            listed = ", ".join([*value.values(), stamp])
            shown.sql(f"INSERT INTO {{s}}.{table} SELECT {listed}")
        case "update":
            name = random.choice(columns)
            shown.sql(f"UPDATE {{s}}.{table} SET {name} = {value[name]}, W = {stamp} WHERE {which}")
        case "delete":
            shown.sql(f"DELETE FROM {{s}}.{table} WHERE {which}")
        case "reload":
            shown.sql(f"CREATE OR REPLACE TABLE {{s}}.KEPT AS SELECT * FROM {{s}}.{table}")
            shown.sql(f"TRUNCATE TABLE {{s}}.{table}")
            shown.sql(f"INSERT INTO {{s}}.{table} SELECT * FROM {{s}}.KEPT")


def create_again(shown: Shown, random: Random, table: str) -> str:
    """One of the views, with the same text; or a table, with the same rows."""
    views = next((views for name, views in VIEWS.items() if QUERIES[name][0] == shown.query), ())
    if not views or random.random() < 0.5:
        return ""
    if random.random() < 0.7:
        shown.sql(random.choice(views))
        return "create a view again"
    shown.sql(f"CREATE OR REPLACE TABLE {{s}}.{table} CHANGE_TRACKING = TRUE AS SELECT * FROM {{s}}.{table}")
    return f"create {table} anew"


def changes(shown: Shown, random: Random) -> list[str]:
    """A few statements on any of the tables; rows come more often than they go, so that some are left."""
    steps = []
    for _ in range(random.randint(1, 4)):
        table = random.choice(["SALES", "SALES", "SALES", "PRODUCTS", "MAKERS"])
        kind = random.choice(["insert", "insert", "update", "update", "delete", "reload"])
        change(shown, random, table, kind)
        steps.append(f"{kind} {table}")
        steps.append(create_again(shown, random, table))
    return [step for step in steps if step]


def forget(shown: Shown) -> None:
    """Let the extract be of a version before its tables: Time Travel reaches back to none of then."""
    assert shown.confirmed is not None
    shown.confirmed = replace(shown.confirmed, source_version="2020-01-01T00:00:00.000000+00:00")


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_the_published_extract_is_what_the_query_shows_after_any_changes(shown, seed):
    random = Random(f"{shown.query} {seed} {os.environ.get('TIR_SEED', '')}")
    steps = changes(shown, random)
    if random.random() < 0.25:
        steps.append("the history is too short")
        forget(shown)
    if (crash := random.choice(["no", "no", "staged", "published"])) != "no":
        steps.append(f"crash after {crash}: {shown.refresh(until=crash).sentence()}")
        steps += changes(shown, random)
    plan = shown.refresh()
    steps.append(plan.sentence())
    assert shown.published() == shown.expected(), steps
    # A full refresh that did not finish is still owed.
    is_new = any(step.endswith("anew") for step in steps)
    assert plan.reason in (None, Reason.COST_THRESHOLD, *([Reason.SOURCE_REPLACED] if is_new else [])), steps
    assert shown.refresh().decision == "none", steps
