"""What an extract's query means: what can be refreshed by key, what only in full, and what is refused with a reason."""

from __future__ import annotations

import pytest
import sqlglot

from tir_dagster.errors import SpecError
from tir_dagster.snowflake.names import TableName
from tir_dagster.snowflake.query import (
    JoinKey,
    View,
    ViewError,
    analyse,
    base_sql,
    explain,
    pinned_text,
    same_query,
    tables_of,
    view_sql,
)
from tir_dagster.snowflake.versions import SourceVersion

SALES, PRODUCTS, MAKERS = (TableName("DB", "S", name) for name in ("SALES", "PRODUCTS", "MAKERS"))
MIXED = TableName("DB", "My Schema", 'Odd "Table"')
KNOWN = {
    SALES: ["ID", "DATE", "PRODUCT", "QTY", "DETAILS", "UPDATED_AT"],
    PRODUCTS: ["PRODUCT", "COLOR", "PRICE", "MAKER", "NOTE"],
    MAKERS: ["MAKER", "TITLE", "NOTE"],
    MIXED: ["id", "Mixed Case", "select", 'a"b', "ORDER"],
}
VERSION = SourceVersion.parse("2026-01-31T12:00:00+00:00")
PIN = "AT(TIMESTAMP => '2026-01-31T12:00:00.000000+00:00'::TIMESTAMP_TZ)"
JOINED = "FROM db.s.sales s LEFT JOIN db.s.products p ON p.product = s.product"


def analysed(sql: str) -> View:
    view = analyse(sql, KNOWN)
    assert view.kind in ("copy", "join", "aggregate"), view.why_whole or view.why_full
    return view


def outputs(sql: str) -> dict[str, str]:
    return {column.name: column.sql for column in analysed(sql).columns}


def refused(sql: str) -> ViewError:
    with pytest.raises(ViewError) as refusal:
        analyse(sql, KNOWN)
    return refusal.value


# Tables


def test_tables_are_found_wherever_they_stand_each_once():
    sql = """WITH recent AS (SELECT * FROM db.s.sales), products AS (SELECT 1 AS one)
    SELECT id FROM recent WHERE product IN (SELECT product FROM "DB".s."PRODUCTS")
    UNION ALL SELECT id FROM db."S".sales, products"""
    assert tables_of(sql) == (SALES, PRODUCTS)


def test_quoted_parts_of_a_name_keep_their_case():
    assert tables_of('SELECT 1 AS one FROM db."My Schema"."Odd ""Table""" AS t') == (MIXED,)


@pytest.mark.parametrize(
    "name", ["sales", "s.sales", "db..sales", "@stage", "IDENTIFIER('db.s.sales')", "TABLE('db.s.sales')"]
)
def test_a_table_must_be_named_in_full(name):
    with pytest.raises(ViewError, match=r"DATABASE\.SCHEMA\.TABLE"):
        tables_of(f"SELECT id FROM {name}")


def test_a_cte_hides_a_name_only_inside_its_own_query():
    with pytest.raises(ViewError, match="recent is not a full table name") as refusal:
        tables_of("SELECT id FROM (WITH recent AS (SELECT 1 AS id) SELECT id FROM recent) JOIN\n  recent")
    assert (refusal.value.line, refusal.value.column) == (2, 3)


@pytest.mark.parametrize(
    "clause", ["AT(OFFSET => -60)", "BEFORE(STATEMENT => 'x')", "CHANGES(INFORMATION => DEFAULT) AT(OFFSET => -1)"]
)
@pytest.mark.parametrize(
    "query", ["SELECT id FROM db.s.sales {} s", "SELECT 1 AS x FROM (SELECT id FROM db.s.sales {})"]
)
def test_a_version_written_by_hand_is_refused(query, clause):
    with pytest.raises(ViewError, match="each refresh sets its own"):
        tables_of(query.format(clause))


# Errors


@pytest.mark.parametrize(
    ("sql", "line", "message"),
    [
        ("-- nothing", None, "empty"),
        ("FROM db.s.sales", None, "not a SELECT"),
        ("SELECT id INTO x FROM db.s.sales", None, "not a SELECT"),
        ("SELECT seq AS x FROM TABLE(GENERATOR(ROWCOUNT => 3))", None, "reads no table"),
        ("SELECT id\nFROM db.s.other", 2, r"no table DB\.S\.OTHER"),
        ("SELECT id,\n  colour FROM db.s.sales", 2, "no column COLOUR"),
        ("SELECT x.id FROM db.s.sales s", 1, "X is no table that can be used"),
        ("SELECT sales.id FROM db.s.sales s", 1, "SALES is no table that can be used"),
        ('SELECT ID FROM db."My Schema"."Odd ""Table"""', 1, 'write "id", in double quotes'),
        ("SELECT s.id FROM db.s.sales s JOIN db.s.products p ON p.product = m.maker JOIN db.s.makers m ON 1 = 1", 1, "M is no table"),
        ("SELECT s.id FROM db.s.sales s JOIN db.s.sales s ON s.id = s.id", 1, "two tables are called S"),
        ("SELECT id, qty AS id FROM db.s.sales", 1, "two output columns are called ID"),
        ("SELECT id,\n qty + 1 FROM db.s.sales", 2, "Give it a name with AS"),
        ("SELECT id, MAX(qty) OVER () FROM db.s.sales", 1, "Give it a name with AS"),
        ('SELECT id AS "__TIR_K0" FROM db.s.sales', 1, "names that begin with __TIR_ are taken"),
        ("SELECT id, COUNT(*) AS n FROM db.s.sales GROUP BY 3", 1, "there are 2 output columns"),
        ("SELECT id, COUNT(*) AS n FROM db.s.sales GROUP BY 1, 2", 1, "N, which is an aggregate"),
        ("SELECT id, qty, COUNT(*) AS n FROM db.s.sales GROUP BY id", 1, r"SALES\.QTY is neither grouped nor aggregated"),
        ("SELECT * EXCLUDE (colour) FROM db.s.sales", 1, "names COLOUR, which no table has"),
        ("SELECT a AS b, b AS a FROM db.s.sales", 1, "no column"),
    ],
)  # fmt: skip
def test_what_cannot_be_an_extract_is_refused_with_its_place(sql, line, message):
    refusal = refused(sql)
    assert isinstance(refusal, SpecError)
    assert refusal.line == line
    with pytest.raises(ViewError, match=message):
        raise refusal


@pytest.mark.parametrize("depth", [1_000, 5_000])
def test_a_query_that_is_nested_too_deeply_is_refused(depth):
    refusal = refused(f"SELECT {'(' * depth}qty{')' * depth} AS x FROM db.s.sales")
    assert "too deep" in str(refusal)


# Names


def test_unquoted_names_are_in_upper_case_and_quoted_ones_as_they_are():
    sql = (
        'SELECT "id", t."Mixed Case" AS "My Output", t."select", T."a""b", "ORDER" AS "group" '
        'FROM db."My Schema"."Odd ""Table""" t'
    )
    view = analysed(sql)
    assert [column.name for column in view.columns] == ["id", "My Output", "select", 'a"b', "group"]
    assert view_sql(view, VERSION) == (
        'SELECT "T"."id" AS "id", "T"."Mixed Case" AS "My Output", "T"."select" AS "select", "T"."a""b" AS "a""b", '
        f'"T"."ORDER" AS "group" FROM "DB"."My Schema"."Odd ""Table""" {PIN} AS "T"'
    )


def test_a_table_without_an_alias_is_known_by_its_name():
    sql = "SELECT id, sales.qty, s.sales.date, db.s.sales.details FROM db.s.sales"
    assert outputs(sql)["DETAILS"] == '"SALES"."DETAILS"'


def test_aliases_may_be_the_names_of_other_tables():
    view = analysed(
        "SELECT products.id, sales.color FROM db.s.sales products JOIN db.s.products sales ON sales.product = products.product"
    )
    assert [(table.alias, table.table) for table in view.tables] == [("PRODUCTS", SALES), ("SALES", PRODUCTS)]
    assert view.tables[1].on == (JoinKey("PRODUCTS", "PRODUCT", "PRODUCT"),)


def test_a_star_is_what_the_tables_have_now():
    assert list(outputs("SELECT * FROM db.s.sales")) == KNOWN[SALES]
    assert list(outputs("SELECT p.*, s.id, s.qty AS q " + JOINED)) == [*KNOWN[PRODUCTS], "ID", "Q"]
    assert list(outputs("SELECT * EXCLUDE (details, updated_at) RENAME (qty AS quantity) FROM db.s.sales")) == [
        "ID", "DATE", "PRODUCT", "QUANTITY",
    ]  # fmt: skip


def test_a_column_of_using_belongs_to_the_left_side_and_comes_once():
    view = analysed(
        "SELECT * EXCLUDE note FROM db.s.sales LEFT JOIN db.s.products USING (product) JOIN db.s.makers USING (maker)"
    )
    names = [column.name for column in view.columns]
    assert names == [*KNOWN[SALES], "COLOR", "PRICE", "MAKER", "TITLE"]
    assert view.columns[2].sql == '"SALES"."PRODUCT"'
    assert [table.on for table in view.tables[1:]] == [
        (JoinKey("SALES", "PRODUCT", "PRODUCT"),),
        (JoinKey("PRODUCTS", "MAKER", "MAKER"),),
    ]


def test_the_name_of_an_output_stands_for_its_expression_unless_a_column_has_it():
    view = analysed(
        "SELECT qty * 2 AS twice, twice + 1 AS more, UPPER(details) AS details FROM db.s.sales WHERE twice > 4 AND details = 'x'"
    )
    assert view.columns[1].sql == '("SALES"."QTY" * 2) + 1'
    assert view.where == '("SALES"."QTY" * 2) > 4 AND "SALES"."DETAILS" = \'x\''


def test_a_date_part_is_not_a_column():
    columns = outputs(
        "SELECT DATEADD(day, 1, date) AS d, DATE_TRUNC(month, date) AS m, TRUNC(date, year) AS y, EXTRACT(year FROM date) AS e FROM db.s.sales"
    )
    assert columns == {
        "D": 'DATEADD(day, 1, "SALES"."DATE")',
        "M": 'DATE_TRUNC(month, "SALES"."DATE")',
        "Y": 'TRUNC("SALES"."DATE", year)',
        "E": 'EXTRACT(year FROM "SALES"."DATE")',
    }


@pytest.mark.parametrize("call", ["LAST_DAY(s.date, month)", "TRUNC(s.date, month)", "TRUNCATE(s.date, Month)"])
def test_a_date_part_stays_as_written_where_a_column_has_its_name(call):
    table_columns = {SALES: ["ID", "DATE", "MONTH"]}
    view = analyse(f"SELECT id, {call} AS m FROM db.s.sales s", table_columns)
    assert view.columns[1].sql == call.replace("s.date", '"S"."DATE"')
    # TRUNC takes a number of digits as well: then it is the column, whose changes count.
    assert ("MONTH" in view.fact.used) == call.startswith("TRUNC")


def test_a_date_part_that_may_be_a_column_of_two_tables_is_left_to_the_warehouse():
    table_columns = {SALES: ["ID", "DATE", "MONTH"], PRODUCTS: ["ID", "MONTH"]}
    query = "SELECT s.id, TRUNC(s.date, month) AS m FROM db.s.sales s JOIN db.s.products p ON p.id = s.id"
    view = analyse(query, table_columns)
    assert view.why_whole == "MONTH may be a date part or a column of S and P."
    assert "TRUNC(s.date, month)" in view_sql(view, None)


def test_words_of_the_language_may_be_columns():
    table_columns = {SALES: ["DATE", "YEAR", "LEFT", "TYPE", "KEY", "VALUE", "DAY"]}
    view = analyse(
        "SELECT date, year, left, type, key, value, DATEADD(day, day, date) AS next FROM db.s.sales", table_columns
    )
    assert view.columns[-1].sql == 'DATEADD(day, "SALES"."DAY", "SALES"."DATE")'
    assert view.fact.used == tuple(table_columns[SALES])


# Texts and functions come out as they went in


@pytest.mark.parametrize(
    "expression",
    [
        r"'it''s'", r"'it\'s'", r"'a\\b'", r"'\d+'", r"'\\d+'", r"'tab\tnew\nline'", r"'\u00e9\x41\101\0'", "'é ☃'", "''",
        "$$raw 'text' \\n$$", "'a -- b'", "'/* c */'", "'new\nline'", "'\"quoted\"'", "'; --'",
        r"""REGEXP_REPLACE('x', '(\\w+)\\s', '\\1')""", "TO_CHAR('2024-01-01', 'YYYY-MM-DD\"T\"HH24:MI:SS.FF3')",
        "TO_TIMESTAMP('1 Jan', 'DD MON')", "DIV0(1, 0)", "ZEROIFNULL(NULL)", "NVL2(1, 2, 3)", "DECODE(1, 1, 'a', 'b')",
        "IFF(TRUE, 1.50, 0)", "SPLIT_PART('a.b', '.', -1)", "'x' LIKE 'a^%' ESCAPE '^'", "TRIM('  x ', ' ')",
    ],
)  # fmt: skip
def test_texts_and_functions_come_out_as_they_went_in(expression):
    assert outputs(f"SELECT id, {expression} AS x FROM db.s.sales")["X"] == expression


@pytest.mark.parametrize(
    "expression",
    [
        "{qty} IS TRUE", "{qty} IS NOT TRUE", "{qty} is false", "{qty} IS NOT FALSE", "{qty} IS UNKNOWN", "{qty} IS NOT NULL",
        "NOT {qty} = 1 AND {qty}<>2 OR {qty} != 3", "{qty} IS DISTINCT FROM {date}", "{qty} BETWEEN 1 AND 2 IS NOT TRUE",
        "{qty} NOT IN (1,2)", "{qty} NOT LIKE 'a'", "{qty} ILIKE ANY ('a%', 'b')", "{qty} LIKE 'a^%' ESCAPE '^'",
        "{qty} RLIKE '\\d'", "{qty} NOT REGEXP 'a'", "({qty}, {date}) IN ((1, 2))", "{details}:a.b[0]::string",
        '{details}:"a b".C', "{details}['a'][{qty}]", "{details}:a[{qty}].b", "{qty}::number(10,2)", "{qty}::FLOAT",
        "{qty}::TIMESTAMP_NTZ(3)", "{qty}::real::text", "TRY_CAST({details} AS NUMBER)", "CAST({details} AS byteint)",
        "{qty}::GEOGRAPHY", ".5+{qty}", "+{qty}", "- -{qty}", "1e10 * {qty} % 3", "1.50 || {qty} || NULL", "TIMESTAMP '2024-01-01'",
        "INTERVAL '1' month + {date}", "{date} + INTERVAL '1 month, 2 days'", "case {qty} when 1 then 'a' end", "iff({qty} > 1, 2, 3)",
        "EXTRACT(day FROM {date})", "NVL2({qty}, 1, 2)", "decode({qty}, null, 2)", "LEFT({details}, 2)", "REPLACE({details}, 'a')",
        "INSERT({details}, 1, 2, 'x')", "GET({details}, 'a')", "{qty} /* why */ + -- because\n {date}", "(({qty}))",
        "TO_DATE({details},'YYYY\"T\"')", "POSITION('a' IN {details})",
    ],
)  # fmt: skip
def test_an_expression_is_sent_as_it_is_written(expression):
    names = {"qty": "Qty", "date": "s . date", "details": "s.details"}
    sent = {"qty": '"S"."QTY"', "date": '"S"."DATE"', "details": '"S"."DETAILS"'}
    view = analysed(f"""SELECT id, {expression.format(**names)} AS x, {expression.format(**names)} y FROM db.s.sales s
        JOIN db.s.products p ON p.product = s.product AND ({expression.format(**names)}) LEFT OUTER JOIN db.s.makers m
        ON m.maker=p.maker WHERE {expression.format(**names)}""")
    assert [column.sql for column in view.columns[1:]] == [expression.format(**sent)] * 2
    assert view.where == expression.format(**sent)
    assert view.tables[1].condition == f'"P"."PRODUCT" = "S"."PRODUCT" AND ({expression.format(**sent)})'
    assert view.tables[2].condition == '"M"."MAKER"="P"."MAKER"'


def test_groups_and_their_condition_are_sent_as_they_are_written():
    view = analysed(
        """SELECT qty IS NOT TRUE AS odd, NOT qty AS even, COUNT_IF(details IS TRUE) AS n FROM db.s.sales
        GROUP BY (qty IS NOT TRUE), NOT qty HAVING MAX(date) IS NOT FALSE AND n::int > 1"""
    )
    assert view.group == ("ODD", "EVEN")
    assert view.having == 'MAX("SALES"."DATE") IS NOT FALSE AND COUNT_IF("SALES"."DETAILS" IS TRUE)::int > 1'
    with pytest.raises(ViewError, match="neither grouped nor aggregated"):
        analyse("SELECT qty IS NOT TRUE AS odd, COUNT(*) AS n FROM db.s.sales GROUP BY 1 HAVING NOT qty", KNOWN)


def test_queries_that_differ_where_a_value_is_null_are_not_the_same():
    query = "SELECT id FROM db.s.sales WHERE {}"
    assert same_query(query.format("f IS NOT TRUE"), query.format("F is not true -- or unknown"))
    assert not same_query(query.format("f IS NOT TRUE"), query.format("NOT f"))
    assert not same_query(query.format("f IS TRUE"), query.format("f"))


def test_text_that_cannot_be_taken_apart_is_sent_whole():
    query = "SELECT id, qty IS NOT TRUE AS x, FROM db.s.sales"
    view = analyse(query, KNOWN)
    assert view.why_whole == "Its text cannot be taken apart with certainty."
    assert view_sql(view, None) == query.replace("db.s.sales", '"DB"."S"."SALES"')


def test_a_column_called_interval_is_seen_or_the_query_is_sent_whole():
    table_columns = {SALES: ["ID", "INTERVAL"]}
    assert analyse("SELECT id, interval * 2 AS x FROM db.s.sales", table_columns).fact.used == ("ID", "INTERVAL")
    assert analyse("SELECT id, interval + 1 AS x FROM db.s.sales", table_columns).kind == "whole"


@pytest.mark.parametrize(
    "query",
    [
        "SELECT product,\n  SUM(qty) FILTER (WHERE date = 1) AS n FROM db.s.sales GROUP BY 1",
        "SELECT *\nFROM (SELECT SUM(qty) FILTER (WHERE date = 1) AS n FROM db.s.sales)",
    ],
)
def test_a_filter_clause_is_refused_with_what_to_write_instead(query):
    refusal = refused(query)
    assert "Snowflake has no FILTER clause" in str(refusal)
    assert "IFF" in str(refusal)
    assert refusal.line == 2


def test_writing_a_view_again_changes_nothing():
    sql = f"""SELECT s.id AS id, details:a.b[0]::STRING AS path, s.qty::NUMBER(10, 2) / 3 AS q, -qty % 2 AS r, CASE WHEN NOT qty IN (1, 2)
    AND color ILIKE ANY ('r%', 'b%') OR price BETWEEN 1 AND 2 AND price IS NOT NULL THEN 'a' || color ELSE TRY_CAST(color AS DATE)::TEXT END AS c,
    DATE '2024-01-01' + INTERVAL '1 day' AS d, color IS DISTINCT FROM s.details AS e {JOINED} WHERE (qty = 1 OR qty = 2) AND NOT (qty = 3)"""
    once = view_sql(analysed(sql), None)
    assert view_sql(analysed(once), None) == once


def test_comments_and_a_semicolon_do_not_reach_the_sql():
    view = analysed("-- all\nSELECT id /* key */, -- more\n qty FROM db.s.sales -- here\n; -- end")
    assert (
        view_sql(view, None) == 'SELECT "SALES"."ID" AS "ID", "SALES"."QTY" AS "QTY" FROM "DB"."S"."SALES" AS "SALES"'
    )


# Joins


def test_joins_tell_role_key_and_chain():
    view = analysed(
        f"SELECT s.id, COALESCE(color, 'N/A') AS color, title {JOINED} INNER JOIN db.s.makers m ON (m.maker = p.maker)"
    )
    assert view.kind == "join"
    assert [(table.alias, table.role, table.on) for table in view.tables] == [
        ("S", "fact", ()),
        ("P", "left", (JoinKey("S", "PRODUCT", "PRODUCT"),)),
        ("M", "inner", (JoinKey("P", "MAKER", "MAKER"),)),
    ]


def test_used_columns_are_outputs_filters_keys_and_conditions_and_no_others():
    view = analysed(
        f"SELECT s.id {JOINED} AND p.price > 0 LEFT JOIN db.s.makers m ON m.maker = p.maker WHERE m.title <> 'x' AND s.qty > 0 ORDER BY details"
    )
    assert [table.used for table in view.tables] == [
        ("ID", "PRODUCT", "QTY"),
        ("PRODUCT", "PRICE", "MAKER"),
        ("MAKER", "TITLE"),
    ]


def test_one_table_may_be_joined_twice():
    view = analysed(
        "SELECT s.id, a.color AS a, b.color AS b FROM db.s.sales s "
        "LEFT JOIN db.s.products a ON a.product = s.product LEFT JOIN db.s.products b ON b.product = s.details AND b.price = s.qty"
    )
    assert [table.table for table in view.tables] == [SALES, PRODUCTS, PRODUCTS]
    assert view.tables[2].on == (JoinKey("S", "DETAILS", "PRODUCT"), JoinKey("S", "QTY", "PRICE"))


def test_a_further_condition_may_also_read_the_fact():
    view = analysed(f"SELECT s.id, p.color {JOINED} AND s.date >= p.note AND s.qty = 1")
    assert view.tables[1].on == (JoinKey("S", "PRODUCT", "PRODUCT"),)
    assert view.fact.used == ("ID", "DATE", "PRODUCT", "QTY")


# Groups


@pytest.mark.parametrize(
    "group", ["1, 2", "date, COALESCE(p.color, 'N/A')", "s.date, (shade)", "ALL", "shade, 1, date"]
)
def test_a_group_is_named_by_position_name_or_expression(group):
    view = analysed(
        f"SELECT date, COALESCE(color, 'N/A') AS shade, SUM(qty * price) AS total {JOINED} GROUP BY {group}"
    )
    assert view.kind == "aggregate"
    assert sorted(view.group) == ["DATE", "SHADE"]
    assert [column.aggregate for column in view.columns] == [False, False, True]
    assert view.columns[2].reads == (("S", "QTY"), ("P", "PRICE"))


def test_distinct_groups_by_all_outputs():
    view = analysed("SELECT DISTINCT color, 1 AS one FROM db.s.products")
    assert (view.kind, view.group) == ("aggregate", ("COLOR", "ONE"))
    assert (
        view_sql(view, None)
        == 'SELECT DISTINCT "PRODUCTS"."COLOR" AS "COLOR", 1 AS "ONE" FROM "DB"."S"."PRODUCTS" AS "PRODUCTS"'
    )


def test_groups_are_written_by_position_so_that_no_column_is_meant_instead():
    view = analysed("SELECT COUNT(*) AS n, COALESCE(color, '-') AS color FROM db.s.products GROUP BY 2 HAVING n > 1")
    assert view_sql(view, None) == (
        'SELECT COUNT(*) AS "N", COALESCE("PRODUCTS"."COLOR", \'-\') AS "COLOR" FROM "DB"."S"."PRODUCTS" AS "PRODUCTS" '
        "GROUP BY 2 HAVING COUNT(*) > 1"
    )


def test_an_output_may_depend_on_the_group():
    view = analysed(
        "SELECT date, YEAR(date) AS year, LISTAGG(details, ',') WITHIN GROUP (ORDER BY id) AS l FROM db.s.sales GROUP BY date"
    )
    assert view.group == ("DATE",)
    assert view.columns[2].reads == (("SALES", "DETAILS"), ("SALES", "ID"))


# What is compared as a whole


@pytest.mark.parametrize(
    ("sql", "why"),
    [
        ("SELECT id FROM (SELECT id FROM db.s.sales)", "subquery"),
        ("SELECT id FROM db.s.sales WHERE product IN (SELECT product FROM db.s.products)", "subquery"),
        ("SELECT id FROM db.s.sales s WHERE EXISTS (SELECT 1 FROM db.s.products p WHERE p.product = s.product)", "subquery"),
        ("SELECT s.id, l.top FROM db.s.sales s, LATERAL (SELECT MAX(p.price) AS top FROM db.s.products p WHERE p.product = s.product) l", "subquery"),
        ("WITH t AS (SELECT id FROM db.s.sales) SELECT id FROM t", "WITH clause"),
        ("WITH RECURSIVE n AS (SELECT 1 AS i UNION ALL SELECT i + 1 FROM n WHERE i < 3) SELECT s.id, n.i FROM db.s.sales s JOIN n ON n.i <= s.qty", "WITH clause"),
        ("SELECT id FROM db.s.sales UNION ALL SELECT product FROM db.s.products", "several SELECTs"),
        ("SELECT id FROM db.s.sales MINUS SELECT product FROM db.s.products", "several SELECTs"),
        ("(SELECT id FROM db.s.sales)", "several SELECTs"),
        ("SELECT id, RANK() OVER (ORDER BY qty) AS n FROM db.s.sales", "window function"),
        ("SELECT id, SUM(qty) OVER (PARTITION BY product ORDER BY date) AS n FROM db.s.sales", "window function"),
        ("SELECT id FROM db.s.sales QUALIFY RANK() OVER (PARTITION BY product ORDER BY id) = 1", "QUALIFY"),
        ("SELECT id FROM db.s.sales ORDER BY id LIMIT 3", "LIMIT"),
        ("SELECT TOP 3 id FROM db.s.sales ORDER BY id", "TOP"),
        ("SELECT id, qty FROM db.s.sales s ORDER BY 2 DESC, s.id LIMIT 3 OFFSET 2", "LIMIT"),
        ("SELECT id FROM db.s.sales UNION SELECT product FROM db.s.products ORDER BY id LIMIT 3", "several SELECTs"),
        ("SELECT s.id, f.value AS v FROM db.s.sales s, LATERAL FLATTEN(input => s.details) f", "table function"),
        ("SELECT s.id, f.value AS v FROM db.s.sales s, TABLE(FLATTEN(s.details)) f", "table function"),
        ("SELECT s.id, v.a FROM db.s.sales s JOIN (VALUES (1, 'a'), (2, 'b')) v(n, a) ON v.n = s.qty", "VALUES"),
        ("SELECT a FROM db.s.sales AS t(a, b)", "other names"),
        ("SELECT s.id FROM db.s.sales s LEFT JOIN (db.s.products p JOIN db.s.makers m ON m.maker = p.maker) ON p.product = s.product", "subquery|brackets"),
        (f"SELECT s.id {JOINED} JOIN db.s.makers m ON m.maker = p.maker AND m.title = s.details", "columns of P and S"),
        ("SELECT s.id FROM db.s.sales s JOIN db.s.products p ON UPPER(p.product) = UPPER(s.product)", "on expressions"),
        ("SELECT s.id FROM db.s.sales s, db.s.products p", "joined without a condition"),
        ("SELECT s.id FROM db.s.sales s CROSS JOIN db.s.products p", "CROSS join"),
        ("SELECT s.id FROM db.s.sales s NATURAL JOIN db.s.products p", "NATURAL join"),
        ("SELECT s.id FROM db.s.sales s RIGHT JOIN db.s.products p ON s.product = p.product", "RIGHT join"),
        ("SELECT s.id FROM db.s.sales s FULL JOIN db.s.products p ON s.product = p.product", "FULL join"),
        ("SELECT s.id FROM db.s.sales s JOIN db.s.products p ON s.qty > p.price", "without an equality"),
        ("SELECT s.id FROM db.s.sales s JOIN db.s.products p ON TRUE", "without an equality"),
        (f"SELECT s.id {JOINED} OR p.product = s.details", "without an equality"),
        ("SELECT COUNT(*) AS n FROM db.s.sales GROUP BY product", "not among its outputs"),
        ("SELECT COALESCE(color, '-') AS color, COUNT(*) AS n FROM db.s.products GROUP BY color", "write its position"),
        ("SELECT SUM(qty) AS q FROM db.s.sales", "one total"),
        ("SELECT product, GROUPING(product) AS g, COUNT(*) AS n FROM db.s.sales GROUP BY ROLLUP (product)", "ROLLUP"),
        ("SELECT product, COUNT(*) AS n FROM db.s.sales GROUP BY CUBE (product)", "ROLLUP"),
        ("SELECT product, COUNT(*) AS n FROM db.s.sales GROUP BY GROUPING SETS ((product))", "ROLLUP"),
        ("SELECT product, SUM(qty) AS qty FROM db.s.sales GROUP BY product HAVING qty > 1", "QTY in HAVING"),
        ("SELECT OBJECT_CONSTRUCT(*) AS o FROM db.s.sales", "inside an expression"),
        ("SELECT * REPLACE (qty + 1 AS qty) FROM db.s.sales", "REPLACE"),
    ],
)  # fmt: skip
def test_what_is_compared_as_a_whole_and_why(sql, why):
    view = analyse(sql, KNOWN)
    assert (view.kind, view.why_full, view.orders) == ("whole", None, ())
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(view.why_whole)
    assert {table.table for table in view.tables} == set(tables_of(sql))
    assert view_sql(view, VERSION).count(PIN) == len(tables_of(sql))


@pytest.mark.parametrize(
    ("sql", "order"),
    [
        ("SELECT id, ROW_NUMBER() OVER (ORDER BY id) AS n FROM db.s.sales", "ROW_NUMBER() OVER (ORDER BY id)"),
        ("SELECT id, LAG(qty) IGNORE NULLS OVER (ORDER BY id) AS n FROM db.s.sales", "LAG(qty) IGNORE NULLS OVER (ORDER BY id)"),
        ("SELECT id, SUM(qty) OVER (ORDER BY id ROWS 2 PRECEDING) AS n FROM db.s.sales", "SUM(qty) OVER (ORDER BY id ROWS"),
        ("SELECT id FROM db.s.sales QUALIFY ROW_NUMBER() OVER (PARTITION BY product ORDER BY date) = 1", "ROW_NUMBER() OVER (PARTITION BY product"),
        ("SELECT id, qty FROM db.s.sales ORDER BY id LIMIT 3", "ORDER BY id … LIMIT"),
        ("SELECT id, qty + 1 AS qty FROM db.s.sales ORDER BY id, qty LIMIT 3", "ORDER BY id, qty … LIMIT"),
        ("SELECT * FROM db.s.sales ORDER BY id LIMIT 3", "ORDER BY id … LIMIT"),
        ("SELECT product, LISTAGG(id, ',') WITHIN GROUP (ORDER BY qty) AS l FROM (SELECT * FROM db.s.sales) GROUP BY 1", "LISTAGG(id, ',')"),
        ("SELECT product, ROW_NUMBER() OVER (ORDER BY SUM(qty)) AS n FROM db.s.sales GROUP BY product", "ROW_NUMBER() OVER (ORDER BY SUM(qty))"),
    ],
)  # fmt: skip
def test_orders_in_which_rows_may_tie(sql, order):
    view = analyse(sql, KNOWN)
    assert view.kind == "whole", view.why_full
    (open_order,) = view.orders
    assert open_order.written.startswith(order)


def test_groups_do_not_tie_in_an_order_by_all_that_they_are_grouped_by():
    sql = "SELECT product, ROW_NUMBER() OVER (ORDER BY product) AS n FROM db.s.sales GROUP BY product"
    assert analyse(sql, KNOWN).orders == ()
    listed = "SELECT product, LISTAGG(DISTINCT id, ',') WITHIN GROUP (ORDER BY id) AS l FROM (SELECT * FROM db.s.sales) GROUP BY 1"
    assert analyse(listed, KNOWN).orders == ()


@pytest.mark.parametrize(
    ("sql", "probe"),
    [
        ("SELECT id FROM db.s.sales s WHERE qty > 1 QUALIFY ROW_NUMBER() OVER (PARTITION BY s.product ORDER BY date DESC NULLS LAST, id) = 1",
         ('SELECT COUNT(*) AS TIR_N FROM (SELECT (s.product) AS TIR_0, (date) AS TIR_1, (id) AS TIR_2 FROM "DB"."S"."SALES" {PIN} s WHERE qty > 1) '
         "AS TIR_ROWS GROUP BY TIR_0, TIR_1, TIR_2 HAVING COUNT(*) > 1 LIMIT 1")),
        ("WITH a AS (SELECT * FROM db.s.sales), b AS (SELECT id, NTILE(4) OVER (ORDER BY IFF(qty > 0, ')', '-- x')) AS n FROM a /* all */), c AS (SELECT 1 AS x) SELECT id FROM b",
         ('WITH a AS (SELECT * FROM "DB"."S"."SALES" {PIN}) SELECT COUNT(*) AS TIR_N FROM (SELECT (IFF(qty > 0, \')\', \'-- x\')) AS TIR_0 FROM a) '
         "AS TIR_ROWS GROUP BY TIR_0 HAVING COUNT(*) > 1 LIMIT 1")),
        (("SELECT id FROM (SELECT id, ROW_NUMBER() OVER (ORDER BY p.price) AS n FROM db.s.sales s JOIN db.s.products p ON p.product = s.product AND s.qty IS DISTINCT FROM 1) WHERE n = 1 "
         "UNION ALL SELECT 1"),
         ('SELECT COUNT(*) AS TIR_N FROM (SELECT (p.price) AS TIR_0 FROM "DB"."S"."SALES" {PIN} s JOIN "DB"."S"."PRODUCTS" {PIN} p ON p.product = s.product '
         "AND s.qty IS DISTINCT FROM 1) AS TIR_ROWS GROUP BY TIR_0 HAVING COUNT(*) > 1 LIMIT 1")),
        # What is around these is referred to, or recurs: they cannot be asked by themselves.
        ("SELECT id FROM db.s.sales s WHERE 1 = (SELECT MAX(n) FROM (SELECT ROW_NUMBER() OVER (ORDER BY price) AS n FROM db.s.products p WHERE p.product = s.product))", ""),
        ("SELECT s.id, l.n FROM db.s.sales s, LATERAL (SELECT ROW_NUMBER() OVER (ORDER BY price) AS n FROM db.s.products p WHERE p.product = s.product) l", ""),
        ("WITH RECURSIVE r AS (SELECT id, 1 AS n FROM db.s.sales UNION ALL SELECT id, ROW_NUMBER() OVER (ORDER BY id) AS n FROM r WHERE n < 3) SELECT id, n FROM r", ""),
    ],
)  # fmt: skip
def test_the_warehouse_is_asked_for_ties_in_the_words_of_the_query(sql, probe):
    (order,) = analyse(sql, KNOWN).orders
    assert pinned_text(order.probe, VERSION) == probe.replace("{PIN}", PIN)


def test_names_of_ctes_hide_tables_only_where_they_can_be_seen():
    later = refused("WITH a AS (SELECT * FROM b), b AS (SELECT * FROM db.s.sales) SELECT id FROM a")
    assert "b is not a full table name" in str(later)
    itself = refused("WITH sales AS (SELECT * FROM sales) SELECT id FROM sales JOIN db.s.products p ON TRUE")
    assert "sales is not a full table name" in str(itself)
    outside = refused("SELECT id FROM (WITH t AS (SELECT * FROM db.s.sales) SELECT id FROM t) JOIN t ON TRUE")
    assert "t is not a full table name" in str(outside)


# What is loaded in full


@pytest.mark.parametrize(
    ("sql", "why"),
    [
        ("SELECT TOP 3 id FROM db.s.sales", "without ORDER BY takes any rows"),
        ("SELECT id FROM db.s.sales LIMIT 3 OFFSET 2", "without ORDER BY takes any rows"),
        ("(SELECT id FROM db.s.sales ORDER BY id) LIMIT 3", "without ORDER BY takes any rows"),
        ("SELECT id FROM (SELECT id FROM db.s.sales LIMIT 3)", "without ORDER BY takes any rows"),
        ("SELECT id, FIRST_VALUE(qty) OVER (PARTITION BY product) AS f FROM db.s.sales", "has no ORDER BY"),
        ("SELECT id FROM db.s.sales SAMPLE (10)", "SAMPLE"),
        ("SELECT s.id, f.seq FROM db.s.sales s, LATERAL FLATTEN(input => s.details) f", "SEQ"),
        ("SELECT s.id, f.* FROM db.s.sales s, LATERAL FLATTEN(input => s.details) f", "SEQ"),
        ("SELECT s.id, g.n FROM db.s.sales s, TABLE(my_rows(s.qty)) g", "(?i)my_rows"),
        ("SELECT s.id, SEQ4() AS n FROM db.s.sales s, TABLE(GENERATOR(ROWCOUNT => 3)) g", "SEQ4|GENERATOR"),
        ("SELECT id, db.s.numbers.NEXTVAL AS n FROM (SELECT * FROM db.s.sales)", "another number each time"),
        ("SELECT s.id FROM db.s.sales s ASOF JOIN db.s.products p MATCH_CONDITION (s.qty >= p.price) ON p.product = s.product", "ASOF"),
        ("SELECT product, ANY_VALUE(qty) AS q FROM db.s.sales GROUP BY product", "ANY_VALUE"),
        ("SELECT product, APPROX_COUNT_DISTINCT(qty) AS q FROM db.s.sales GROUP BY product", "APPROX_COUNT_DISTINCT"),
        ("SELECT product, LISTAGG(id, ',') AS q FROM db.s.sales GROUP BY product", "LISTAGG without WITHIN GROUP"),
        ("SELECT product, ARRAY_AGG(id) AS q FROM db.s.sales GROUP BY product", "ARRAY_AGG without WITHIN GROUP"),
        ("SELECT id, my_function(qty) AS q FROM db.s.sales", "MY_FUNCTION"),
        ("SELECT id, db.s.my_function(qty) AS q FROM db.s.sales", "my_function"),
        ('SELECT id, "upper"(qty) AS q FROM db.s.sales', "the function is not known"),
        ("SELECT id, FILTER(details, x -> x > 1) AS q FROM db.s.sales", "FILTER"),
        ("SELECT id, $1 AS a FROM db.s.sales", "by its position"),
        ("SELECT id, $mine AS a FROM db.s.sales", "variable"),
        ("SELECT id FROM db.s.sales FOR UPDATE", "locks rows"),
        ("SELECT id FROM db.s.sales START WITH id = 1 CONNECT BY PRIOR id = qty", "CONNECT"),
        ("SELECT * FROM db.s.sales PIVOT(SUM(qty) FOR product IN ('a', 'b'))", "PIVOT"),
        ("SELECT id FROM (SELECT id FROM db.s.sales WHERE date >= CURRENT_DATE - 90)", "CURRENT_DATE is another value"),
        ("SELECT id, RANK() OVER (ORDER BY RANDOM()) AS r FROM db.s.sales", "RANDOM gives other values"),
    ],
)  # fmt: skip
def test_what_is_loaded_in_full_and_why(sql, why):
    view = analyse(sql, KNOWN)
    assert (view.kind, view.why_whole) == ("opaque", None)
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(view.why_full)
    assert {table.table for table in view.tables} == set(tables_of(sql))
    assert view_sql(view, VERSION).count(PIN) == len(tables_of(sql))


@pytest.mark.parametrize(
    "expression",
    ["CURRENT_DATE", "CURRENT_DATE()", "current_timestamp(3)", "LOCALTIMESTAMP", "GETDATE()", "SYSDATE()", "RANDOM()", "UUID_STRING()",
     "SEQ4()", "UNIFORM(1, 2, RANDOM())", "CURRENT_USER", "CURRENT_ROLE()", "CURRENT_SESSION()"],
)  # fmt: skip
def test_the_clock_chance_and_the_user_make_a_view_restless(expression):
    assert analyse(f"SELECT id, {expression} AS x FROM db.s.sales", KNOWN).restless
    hidden = analyse(f"SELECT id FROM (SELECT id FROM db.s.sales WHERE details > {expression})", KNOWN)
    assert (hidden.kind, hidden.restless) == ("opaque", True)
    assert "though no table changed" in "\n".join(explain(hidden))
    assert not analyse("SELECT id FROM db.s.sales LIMIT 1", KNOWN).restless


def test_a_query_that_is_not_taken_apart_keeps_its_words_and_every_table_in_it_is_pinned():
    sql = r"""-- é: the latest
WITH sales AS (SELECT * FROM db.s.sales WHERE details <> '\d;' /* db.s.sales */), x AS (SELECT id FROM sales)
SELECT x.id, (SELECT MAX(price) FROM DB.S.PRODUCTS p) AS "Top", db.s.makers.title FROM x JOIN db.s.makers ON TRUE LIMIT 3 ; -- end"""
    view = analyse(sql, KNOWN)
    assert [column.name for column in view.columns] == ["ID", "Top", "TITLE"]
    assert (
        view_sql(view, VERSION)
        == rf"""-- é: the latest
WITH sales AS (SELECT * FROM "DB"."S"."SALES" {PIN} WHERE details <> '\d;' /* db.s.sales */), x AS (SELECT id FROM sales)
SELECT x.id, (SELECT MAX(price) FROM "DB"."S"."PRODUCTS" {PIN} p) AS "Top", db.s.makers.title FROM x JOIN "DB"."S"."MAKERS" {PIN} ON TRUE LIMIT 3"""
    )
    with pytest.raises(ViewError, match="without ORDER BY"):
        base_sql(view, row_key=["ID"], watermark=None, version=None)


@pytest.mark.parametrize(
    ("sql", "names"),
    [
        ("SELECT * FROM db.s.makers LIMIT 1", ["MAKER", "TITLE", "NOTE"]),
        ("SELECT m.*, s.id FROM db.s.makers m JOIN db.s.sales s ON TRUE LIMIT 1", ["MAKER", "TITLE", "NOTE", "ID"]),
        ("SELECT * FROM (SELECT id FROM db.s.sales)", []),
        ("WITH m AS (SELECT * FROM db.s.makers) SELECT * FROM m", []),
        ("SELECT (SELECT MAX(id) FROM db.s.sales) AS top", []),
        ("(SELECT id AS a FROM db.s.sales) UNION SELECT product FROM db.s.products", ["A"]),
    ],
)
def test_a_query_that_is_not_taken_apart_tells_its_outputs_if_it_can(sql, names):
    assert [column.name for column in analyse(sql, KNOWN).columns] == names


# The SQL


def test_every_table_is_pinned():
    view = analysed(f"SELECT s.id, p.color {JOINED} WHERE p.color = 'red'")
    assert view_sql(view, VERSION) == (
        f'SELECT "S"."ID" AS "ID", "P"."COLOR" AS "COLOR" FROM "DB"."S"."SALES" {PIN} AS "S" '
        f'LEFT JOIN "DB"."S"."PRODUCTS" {PIN} AS "P" ON "P"."PRODUCT" = "S"."PRODUCT" WHERE "P"."COLOR" = \'red\''
    )
    sqlglot.parse_one(view_sql(view, VERSION), dialect="snowflake")


def test_the_base_of_a_join_shows_its_columns_and_hides_mark_and_references():
    view = analysed(f"SELECT s.id, p.color, m.title {JOINED} LEFT JOIN db.s.makers m ON m.maker = p.maker")
    base = base_sql(view, row_key=["id"], watermark="updated_at", version=VERSION)
    assert (base.key, base.group, base.columns, base.mark) == (("ID",), (), ("ID", "COLOR", "TITLE"), "__TIR_MARK")
    assert base.refers == {"P": ("__TIR_R0_0",)}, "M is referred to by P, not by the fact"
    assert base.sql.startswith(
        'SELECT "S"."ID" AS "ID", "P"."COLOR" AS "COLOR", "M"."TITLE" AS "TITLE", "S"."UPDATED_AT" AS "__TIR_MARK", '
        f'"S"."PRODUCT" AS "__TIR_R0_0" FROM "DB"."S"."SALES" {PIN} AS "S" LEFT JOIN'
    )


def test_the_base_of_an_aggregate_shows_key_group_and_all_that_aggregates_read():
    view = analysed(
        f"SELECT date, COALESCE(color, '-') AS shade, SUM(qty * price) AS total, COUNT(*) AS n {JOINED} WHERE qty > 0 "
        "GROUP BY 1, 2 HAVING MAX(p.note) > 'a' AND SUM(qty) > 1"
    )
    base = base_sql(view, row_key=["id", "Updated_At"], watermark=None, version=None)
    assert base.sql == (
        'SELECT "S"."ID" AS "__TIR_K0", "S"."UPDATED_AT" AS "__TIR_K1", "S"."DATE" AS "DATE", '
        'COALESCE("P"."COLOR", \'-\') AS "SHADE", "S"."QTY" AS "__TIR_V0", "P"."PRICE" AS "__TIR_V1", "P"."NOTE" AS "__TIR_V2", '
        '"S"."PRODUCT" AS "__TIR_R0_0" FROM "DB"."S"."SALES" AS "S" '
        'LEFT JOIN "DB"."S"."PRODUCTS" AS "P" ON "P"."PRODUCT" = "S"."PRODUCT" WHERE "S"."QTY" > 0'
    )
    assert (base.key, base.group, base.mark) == (("__TIR_K0", "__TIR_K1"), ("DATE", "SHADE"), None)
    assert base.columns == ("__TIR_K0", "__TIR_K1", "DATE", "SHADE", "__TIR_V0", "__TIR_V1", "__TIR_V2")


@pytest.mark.parametrize(
    ("sql", "key", "watermark", "message"),
    [
        (f"SELECT s.id, p.color {JOINED}", "sku", None, "row_key names SKU, which is no output column"),
        (f"SELECT s.id, s.id || p.color AS k {JOINED}", "k", None, "which depends on P"),
        (
            f"SELECT s.id, p.color {JOINED}",
            "id",
            "note",
            r"changes\.watermark names note, which DB\.S\.SALES does not have",
        ),
        (
            f"SELECT p.color, COUNT(*) AS n {JOINED} GROUP BY 1",
            "color",
            None,
            r"row_key names color, which DB\.S\.SALES",
        ),
    ],
)
def test_a_key_or_watermark_that_cannot_work_is_refused(sql, key, watermark, message):
    with pytest.raises(ViewError, match=message):
        base_sql(analysed(sql), row_key=[key], watermark=watermark, version=None)


def test_a_view_is_explained_in_words():
    view = analysed(f"SELECT date, title, COUNT(*) AS n {JOINED} JOIN db.s.makers m ON m.maker = p.maker GROUP BY ALL")
    lines = explain(view)
    assert lines[:9] == [
        "An aggregate over DB.S.SALES joined to 2 more.",
        "fact S: DB.S.SALES",
        "  used: DATE, PRODUCT; not used: ID, QTY, DETAILS, UPDATED_AT",
        "optional P: DB.S.PRODUCTS, joined on S.PRODUCT = P.PRODUCT",
        "  used: PRODUCT, MAKER; not used: COLOR, PRICE, NOTE",
        "mandatory M: DB.S.MAKERS, joined on P.MAKER = M.MAKER",
        "  used: MAKER, TITLE; not used: NOTE",
        "chain: S → P → M",
        "group: DATE, TITLE",
    ]
    assert any("found through P.MAKER = M.MAKER, then S.PRODUCT = P.PRODUCT" in line for line in lines)
    full = explain(analyse("SELECT id FROM db.s.sales LIMIT 3", KNOWN))
    assert full[0].startswith("Loaded in full at each change. LIMIT")


def test_a_query_that_is_compared_as_a_whole_is_explained_with_its_orders():
    sql = "SELECT id, qty FROM db.s.sales QUALIFY ROW_NUMBER() OVER (PARTITION BY product ORDER BY date) = 1 ORDER BY id LIMIT 3"
    assert explain(analyse(sql, KNOWN), key=["ID"]) == [
        "Compared as a whole: it is not taken apart into joins and groups. LIMIT or TOP keeps a row for what other rows are.",
        (
            "Any change of DB.S.SALES: the warehouse evaluates the query at both versions, and the keys (ID) whose rows differ "
            "are replaced; without history every row is read and compared with the extract."
        ),
        "Rows may tie in ORDER BY id … LIMIT: every row is read, once, and compared with the extract. Order by more columns to avoid that.",
        (
            "Rows may tie in ROW_NUMBER() OVER (PARTITION BY product ORDER BY date): the warehouse is asked whether any do; then "
            "every row is read, once, and compared with the extract."
        ),
        "Loaded in full: the first time, and when the query or its columns change.",
    ]
    unfit = explain(analysed("SELECT id FROM db.s.sales"), why_whole="It groups by X.")
    assert "(slices)" in unfit[1]
