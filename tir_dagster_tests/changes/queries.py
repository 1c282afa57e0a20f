"""Queries over the small warehouse, by what is special about each."""

from __future__ import annotations

from tir_dagster_tests.changes.following import Shown

LEFT = "FROM db.s.sales s LEFT JOIN db.s.products p ON p.product = s.product"
INNER = "FROM db.s.sales s JOIN db.s.products p ON p.product = s.product"
CHAIN = f"{LEFT} LEFT JOIN db.s.makers m ON m.maker = p.maker"
DETAIL = "SELECT s.id, s.day, s.qty * COALESCE(p.price, 0) AS amount, COALESCE(p.color, 'N/A') AS color"
BY_COLOR = (
    """SELECT s.day, COALESCE(p.color, 'N/A') AS color, SUM(s.qty * COALESCE(p.price, 0)) AS amount, COUNT(*) AS n"""
)
BY_DAY_AND_COLOR = "GROUP BY s.day, COALESCE(p.color, 'N/A')"
QUERIES: dict[str, Shown] = {
    "copy": Shown("SELECT id, day, qty + 1 AS more, note FROM db.s.sales"),
    "filtered copy": Shown("SELECT id, day, qty FROM db.s.sales WHERE COALESCE(note, 'b') <> 'a'"),
    "copy without slices": Shown("SELECT id, day, qty FROM db.s.sales", sliced=False),
    "copy without a row key": Shown("SELECT id, day, qty FROM db.s.sales", row_key=()),
    "copy with a key of two": Shown("SELECT id, other, day, qty FROM db.s.sales", row_key=("ID", "OTHER")),
    "left": Shown(f"{DETAIL} {LEFT}"),
    "inner": Shown(f"{DETAIL} {INNER}"),
    "filter on the optional side": Shown(f"SELECT id, day, s.qty {LEFT} WHERE p.color = 'a' OR p.price IS NULL"),
    "chain": Shown(f"SELECT s.id, s.day, p.color, m.title {CHAIN}"),
    "mandatory behind optional": Shown(f"SELECT s.id, s.day, m.title {LEFT} JOIN db.s.makers m ON m.maker = p.maker"),
    "two join keys": Shown(
        "SELECT s.id, s.day, p.color FROM db.s.sales s LEFT JOIN db.s.products p ON p.product = s.product AND p.maker = s.other"
    ),
    "condition over both sides": Shown(f"SELECT s.id, s.day, p.color {LEFT} AND p.since <= s.qty", sliced=False),
    "joined twice": Shown(
        f"SELECT s.id, s.day, p.color AS one, q.color AS two {LEFT} JOIN db.s.products q ON q.product = s.other"
    ),
    "sums with defaults": Shown(f"{BY_COLOR} {LEFT} {BY_DAY_AND_COLOR}"),
    "sums of the mandatory": Shown(f"{BY_COLOR} {INNER} {BY_DAY_AND_COLOR}"),
    "sums without a row key": Shown(f"{BY_COLOR} {LEFT} {BY_DAY_AND_COLOR}", row_key=()),
    "having": Shown(
        f"SELECT s.qty, MAX(p.price) AS top, COUNT(*) AS n {LEFT} WHERE s.note <> 'b' OR s.note IS NULL GROUP BY s.qty "
        "HAVING MIN(p.price) > 0 OR COUNT(DISTINCT p.color) > 1",
        sliced=False,
    ),
    "sums over a chain": Shown(f"SELECT m.title, SUM(s.qty) AS qty, COUNT(*) AS n {CHAIN} GROUP BY m.title", sliced=False),
    "distinct": Shown(f"SELECT DISTINCT p.color, s.day {LEFT}"),
}  # fmt: skip
# Those that are compared as a whole. Where rows tie here they are equal in all that is shown: DuckDB may take any of them.
WHOLE: dict[str, Shown] = {
    "window": Shown(
        "SELECT id, day, qty, RANK() OVER (PARTITION BY product ORDER BY qty) AS place, SUM(qty) OVER (PARTITION BY product) AS total "
        "FROM db.s.sales"
    ),
    "window without a row key": Shown("SELECT day, note, COUNT(*) OVER (PARTITION BY note) AS n FROM db.s.sales", row_key=()),
    "window over a join": Shown(f"SELECT s.id, s.day, SUM(p.price) OVER (PARTITION BY p.maker) AS total {LEFT}"),
    "numbers that may tie": Shown(
        "SELECT id, day, qty, ROW_NUMBER() OVER (PARTITION BY id ORDER BY day, qty) AS place FROM db.s.sales"
    ),
    "qualify": Shown("SELECT id, day, qty FROM db.s.sales QUALIFY ROW_NUMBER() OVER (PARTITION BY id ORDER BY day, qty) = 1"),
    "qualify in a CTE": Shown(
        "WITH chosen AS (SELECT * FROM db.s.sales WHERE other = 1), first AS (SELECT id, day, qty, note, ROW_NUMBER() OVER (PARTITION BY "
        "product ORDER BY id, day, qty, note) AS place FROM chosen) SELECT id, day, qty FROM first WHERE place = 1",
        sliced=False,
    ),
    "in": Shown("SELECT id, day, qty FROM db.s.sales WHERE product IN (SELECT product FROM db.s.products WHERE color = 'a')"),
    "correlated": Shown(
        "SELECT s.id, s.day, (SELECT MAX(p.price) FROM db.s.products p WHERE p.product = s.product) AS price FROM db.s.sales s "
        "WHERE NOT EXISTS (SELECT 1 FROM db.s.makers m WHERE m.maker = s.other)"
    ),
    "ctes": Shown(
        "WITH sales AS (SELECT * FROM db.s.sales WHERE COALESCE(qty, 1) > 0), days AS (SELECT day, COUNT(*) AS n FROM sales GROUP BY day) "
        "SELECT s.id, s.day, d.n FROM sales s LEFT JOIN days d ON d.day = s.day",
    ),
    "union": Shown(
        "SELECT id, day, note FROM db.s.sales UNION SELECT product, CAST(NULL AS DATE), note FROM db.s.products", row_key=("NOTE",)
    ),
    "union all": Shown("SELECT id, day FROM db.s.sales UNION ALL SELECT maker, day FROM db.s.sales, db.s.makers"),
    "minus": Shown("SELECT id, note FROM db.s.sales MINUS SELECT product, note FROM db.s.products", sliced=False),
    "top": Shown("SELECT id, day, qty FROM db.s.sales s ORDER BY qty DESC, s.id, 2 LIMIT 3"),
    "top of groups": Shown(
        "SELECT * FROM (SELECT product AS id, COUNT(*) AS n FROM db.s.sales GROUP BY product) AS g QUALIFY RANK() OVER (ORDER BY n) = 1",
        sliced=False,
    ),
    "distinct of a subquery": Shown(
        "SELECT DISTINCT id, day FROM (SELECT id, day, qty FROM db.s.sales WHERE qty > (SELECT MIN(price) FROM db.s.products))"
    ),
    "full join": Shown(
        "SELECT COALESCE(s.id, p.product) AS id, s.day, p.color FROM db.s.sales s FULL JOIN db.s.products p ON p.product = s.product"
    ),
    "totals by slices": Shown("SELECT day, SUM(qty) AS qty, COUNT(*) AS n FROM db.s.sales GROUP BY ROLLUP (day, note)", row_key=()),
}  # fmt: skip
QUERIES |= WHOLE
