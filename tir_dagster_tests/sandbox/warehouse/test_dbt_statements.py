"""The statements that dbt-snowflake 1.10 and 1.12 send, through the connector. `make clients` runs dbt itself."""

from __future__ import annotations

import pytest
from snowflake.connector.errors import ProgrammingError

SHOWN_FUNCTIONS = [
    "created_on",
    "name",
    "schema_name",
    "is_builtin",
    "is_aggregate",
    "is_ansi",
    "min_num_arguments",
    "max_num_arguments",
    "arguments",
    "description",
    "catalog_name",
    "is_table_function",
    "valid_for_clustering",
    "is_secure",
    "secrets",
    "external_access_integrations",
    "is_external_function",
    "language",
    "is_memoizable",
    "is_data_metric",
]
FIRST_RUN = """
create table {0}.raw (id integer,customer text,amount float8,day date,changed timestamp without time zone,paid boolean)
begin
insert into {0}.raw (id, customer, amount, day, changed, paid) values ('1','anna','10.50','2026-01-03','2026-01-03 08:00:00',TRUE),('2','o\\'hara','20.00','2026-01-04','2026-01-04 09:30:00',NULL)
commit
create or replace   view {0}.staged ( "ID" COMMENT $$The order's number.$$, "CUSTOMER" COMMENT $$$$, "AMOUNT" COMMENT $$$$, "CHANGED" COMMENT $$$$ ) as ( select id, upper(customer) as customer, amount::number(12, 2) as amount, changed::timestamp_ntz as changed from {0}.raw )
comment on view {0}.staged IS $$It's what came.$$
create or replace transient table {0}.merged as ( select * from {0}.staged )
create or replace transient table {0}.replaced as ( select * from {0}.staged )
drop view if exists {0}.merged__dbt_tmp cascade
comment on table {0}.merged IS $$It's one row for each order.$$
alter table {0}.merged alter "ID" COMMENT $$The order's number.$$, "CUSTOMER" COMMENT $$$$, "AMOUNT" COMMENT $$$$ ;
"""
SECOND_RUN = """
begin
insert overwrite into {0}.raw (id, customer, amount, day, changed, paid) values ('1','anna','11.50','2026-01-03','2026-03-01 08:00:00',TRUE),('3','eve','50.00','2026-03-02','2026-03-02 12:00:00',TRUE)
commit
create or replace  temporary view {0}.merged__dbt_tmp ( "ID" COMMENT $$$$, "CUSTOMER" COMMENT $$$$, "AMOUNT" COMMENT $$$$, "CHANGED" COMMENT $$$$ ) as ( select * from {0}.staged where changed > (select max(changed) from {0}.merged) )
describe table {0}.merged__dbt_tmp
-- back compat for old kwarg name~begin
merge into {0}.merged as DBT_INTERNAL_DEST using {0}.merged__dbt_tmp as DBT_INTERNAL_SOURCE on ((DBT_INTERNAL_SOURCE.id = DBT_INTERNAL_DEST.id)) when matched then update set "ID" = DBT_INTERNAL_SOURCE."ID","CUSTOMER" = DBT_INTERNAL_SOURCE."CUSTOMER","AMOUNT" = DBT_INTERNAL_SOURCE."AMOUNT","CHANGED" = DBT_INTERNAL_SOURCE."CHANGED" when not matched then insert ("ID", "CUSTOMER", "AMOUNT", "CHANGED") values ("ID", "CUSTOMER", "AMOUNT", "CHANGED")
commit
drop view if exists {0}.merged__dbt_tmp cascade
create or replace temporary table {0}.replaced__dbt_tmp as ( select * from {0}.staged where changed > (select max(changed) from {0}.replaced) )
describe table {0}.replaced__dbt_tmp
begin
delete from {0}.replaced as DBT_INTERNAL_DEST where (id, customer) in ( select distinct id, customer from {0}.replaced__dbt_tmp as DBT_INTERNAL_SOURCE )
insert into {0}.replaced ("ID", "CUSTOMER", "AMOUNT", "CHANGED") ( select "ID", "CUSTOMER", "AMOUNT", "CHANGED" from {0}.replaced__dbt_tmp )
commit
drop table if exists {0}.replaced__dbt_tmp cascade
"""


@pytest.fixture
def schema(sql) -> str:
    return sql.value("SELECT CURRENT_DATABASE() || '.' || CURRENT_SCHEMA()")


def statements(text: str, schema: str) -> list[str]:
    """One for each line; ~ ends a line within one."""
    return [line.format(schema).replace("~", "\n") for line in text.strip().split("\n")]


def test_a_run_and_an_incremental_run(sql, schema):
    for statement in statements(FIRST_RUN, schema):
        sql(statement)
    columns = "SELECT COLUMN_NAME, COMMENT FROM INFORMATION_SCHEMA.COLUMNS WHERE TABLE_SCHEMA = CURRENT_SCHEMA()"
    assert sql(f"{columns} AND TABLE_NAME = 'MERGED' AND COMMENT > ''") == [("ID", "The order's number.")]
    comments = "SELECT TABLE_NAME, COMMENT FROM INFORMATION_SCHEMA.TABLES WHERE TABLE_SCHEMA = CURRENT_SCHEMA() AND COMMENT > '' ORDER BY 1"
    assert sql(comments) == [("MERGED", "It's one row for each order."), ("STAGED", "It's what came.")]
    for statement in statements(SECOND_RUN, schema):
        sql(statement)
    for table in ("MERGED", "REPLACED"):
        rows = [
            (id_, customer, float(amount))
            for id_, customer, amount in sql(f"SELECT ID, CUSTOMER, AMOUNT FROM {table} ORDER BY ID")
        ]
        assert rows == [(1, "ANNA", 11.5), (2, "O'HARA", 20.0), (3, "EVE", 50.0)], table


def test_there_are_no_functions_of_users(sql, schema):
    for scope in (
        f"in {schema}",
        "",
        "in account",
        f"in schema {schema}",
        "in database TESTS",
        "like '%x%' in TESTS.PUBLIC",
    ):
        with sql.connection.cursor() as cursor:
            cursor.execute(f"show user functions {scope}")
            assert [column.name for column in cursor.description] == SHOWN_FUNCTIONS
            assert cursor.fetchall() == []


@pytest.mark.parametrize(
    ("statement", "code"),
    [
        # By this code dbt knows that a schema is not there yet.
        ("show user functions in TESTS.NO_SUCH_SCHEMA", 2043),
        ("show objects in TESTS.NO_SUCH_SCHEMA limit 10000", 2043),
        ("show terse schemas in database NO_SUCH_DATABASE limit 10000", 2043),
        ("show user functions of TESTS", 1003),
        ("show user functions in account TESTS", 1003),
        ("create function F(A int) returns int as 'A + 1'", 2),
        ("alter table NO_SUCH_TABLE alter A comment 'x', B comment 'y'", 2003),
        ("alter table KEPT alter A comment 'x', NO_SUCH_COLUMN comment 'y'", 904),
        ("alter table KEPT alter NO_SUCH_COLUMN comment 'x'", 904),
        ("drop view if exists KEPT cascade", 2203),
        ("drop table if exists KEPT_VIEW cascade", 2203),
        ("drop table KEPT_TEMPORARY_VIEW", 2203),
        ("create temporary view KEPT_TEMPORARY_VIEW as select 2 as A", 2002),
        ("create or replace temporary view BAD as select NO_SUCH_COLUMN from KEPT", 904),
        (
            "merge into KEPT as D using (select 5 as A) as S on D.A = S.A when not matched then insert (A) values (D.A2)",
            904,
        ),
    ],
)
def test_wrong_use_is_refused(sql, statement, code):
    sql("CREATE TABLE IF NOT EXISTS KEPT AS SELECT 1 AS A")
    sql("CREATE OR REPLACE VIEW KEPT_VIEW AS SELECT 1 AS A")
    sql("CREATE OR REPLACE TEMPORARY VIEW KEPT_TEMPORARY_VIEW AS SELECT 1 AS A")
    with pytest.raises(ProgrammingError) as caught:
        sql(statement)
    assert caught.value.errno == code
    assert [sql(f"SELECT A FROM {name}") for name in ("KEPT", "KEPT_VIEW", "KEPT_TEMPORARY_VIEW")] == [[(1,)]] * 3


def test_what_is_not_matched_is_inserted_from_the_source(sql):
    sql("CREATE OR REPLACE TABLE UNMATCHED AS SELECT 1 AS A, 10 AS B")
    merge = "MERGE INTO UNMATCHED USING (SELECT 2 AS A, 20 AS B UNION ALL SELECT 3, 30) AS S ON UNMATCHED.A = S.A"
    sql(f"{merge} WHEN NOT MATCHED AND B > 20 THEN INSERT (A, B) VALUES (A, B + (SELECT MAX(B) FROM UNMATCHED))")
    assert sql("SELECT A, B FROM UNMATCHED ORDER BY A") == [(1, 10), (3, 40)]


def test_comments_of_tables_may_hold_quotes(sql):
    sql("CREATE TABLE SPOKEN_OF (A INT) CHANGE_TRACKING = TRUE COMMENT = 'It''s'")
    sql("CREATE TABLE SPOKEN_OF_TOO COMMENT = $$It's too$$ AS SELECT 1 AS A")
    sql("CREATE SECURE VIEW SPOKEN_OF_NOWHERE AS SELECT 1 AS A")
    told = "SELECT TABLE_NAME, COMMENT FROM INFORMATION_SCHEMA.TABLES WHERE STARTSWITH(TABLE_NAME, 'SPOKEN') ORDER BY 1"
    assert sql(told) == [("SPOKEN_OF", "It's"), ("SPOKEN_OF_NOWHERE", None), ("SPOKEN_OF_TOO", "It's too")]
