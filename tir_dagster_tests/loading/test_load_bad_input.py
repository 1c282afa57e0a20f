"""Bad input: what is said, where rejected rows go, and that nothing is half-loaded."""

from __future__ import annotations

import gzip
import io
from datetime import date, time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import requests

from tir_dagster.errors import LoadError, SpecError
from tir_dagster.loading.staging import right_here
from tir_dagster.spec.reading import parse_declared
from tir_dagster_tests.loading.conftest import SCHEMA, Landing

COLUMNS = "ID NUMBER(6,0), NAME VARCHAR(5), DAY DATE, PRICE NUMBER(8,2)"
HEADER = "ID,NAME,DAY,PRICE\n"


def parquet(**columns) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table(columns), out)
    return out.getvalue()


@pytest.fixture(scope="module")
def shared(access, own, tmp_path_factory):
    """One table for all loads that are refused: it stays empty."""
    access.query(f"CREATE OR REPLACE TABLE {SCHEMA}.REFUSED ({COLUMNS})")
    return Landing(access, own, tmp_path_factory.mktemp("refused"), f"{SCHEMA}.REFUSED", "refused")


@pytest.fixture
def refused(shared):
    yield shared
    for file in shared.folder.iterdir():
        file.unlink()
    assert shared.rows() == [], "nothing is half-loaded"


@pytest.mark.parametrize(
    ("name", "content", "form", "said"),
    [
        ("a.csv", "ID,NAME,DAY\n1,a,2025-01-01\n", "csv", "a.csv: column PRICE is missing"),
        ("a.csv", "ID,NAME,DAY,PRICE,MORE\n1,a,,,x\n", "csv", "a.csv: column MORE is not expected"),
        ("a.csv", "ID,ID,DAY,PRICE\n1,2,,\n", "csv", "column ID is twice in the header"),
        ("a.csv", "ID,NAME,DAY,PRICE\n1,a,2025-13-01,2\n", "csv", "a.csv:2: DAY: '2025-13-01' is no date"),
        ("a.json", '{"ID": 1, "NAME": "a", "DAY": null, "COST": 1}\n', "json", "column COST is not expected"),
        ("a.parquet", b"", "parquet", "a.parquet: not a whole Parquet file"),
        ("a.parquet", b"PAR1 and no more", "parquet", "a.parquet: not a whole Parquet file"),
        (
            "a.csv.gz",
            gzip.compress((HEADER + "1,a,,\n" * 9000).encode())[:-20],
            "csv",
            "a.csv.gz: the file ends too early",
        ),
        ("a.csv.gz", b"not gzip at all", "csv", "a.csv.gz: the file ends too early or is damaged"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else str(value)[:20],
)
def test_a_file_that_cannot_become_rows_stops_the_load(refused, name, content, form, said):
    refused.write(name, content)
    with pytest.raises(LoadError) as error:
        refused.load(refused.spec(mode="append", format=form))
    assert said in str(error.value)


def test_a_column_of_another_type_is_said_by_column(refused):
    refused.write("a.parquet", parquet(ID=[1], NAME=["a"], DAY=[5], PRICE=[1.5]))
    with pytest.raises(LoadError, match="column DAY is int64, expected is date"):
        refused.load(refused.spec(mode="append", format="parquet", drift="tolerate"))


@pytest.mark.parametrize(
    ("content", "said"),
    [("NAME,DAY,PRICE\na,,\n", "column ID is missing"), ("ID;NAME\n1;a\n", "none of the expected columns was found")],
)
def test_what_cannot_be_tolerated_is_not_recommended(refused, content, said):
    refused.write("a.csv", content)
    for drift in ("stop", "tolerate"):
        with pytest.raises(LoadError) as error:
            refused.load(refused.spec(mode="merge", key="ID", drift=drift))
        assert said in str(error.value)
        assert "tolerate" not in str(error.value)


def test_the_recommendation_to_tolerate_says_what_it_costs(refused):
    refused.write("a.csv", "ID,NAME,DAY\n1,a,\n")
    with pytest.raises(LoadError, match=r"`drift: tolerate`: .* NULL, also where the table has a value"):
        refused.load(refused.spec(mode="merge", key="ID"))


def test_a_file_that_is_removed_or_changed_while_it_is_read_stops_the_load(refused):
    file = refused.write("a.csv", HEADER + "1,a,,\n")
    with pytest.raises(LoadError, match=r"a.csv changed while it was read"):
        refused.load(refused.spec(mode="append"), stager=lambda *_: meanwhile(file.write_text(HEADER)))
    with pytest.raises(LoadError, match=r"a.csv was removed while it was read"):
        refused.load(refused.spec(mode="append"), stager=lambda *_: meanwhile(file.unlink()))


def test_a_part_of_which_no_task_told_anything_stops_the_load(refused):
    refused.write("a.csv", HEADER + "1,a,,\n")
    refused.write("b.csv", HEADER + "2,a,,\n")
    with pytest.raises(LoadError, match=r"2 parts of files had to be staged, and Spark returned 1 results"):
        refused.load(refused.spec(mode="append"), stager=lambda plan, units: right_here(plan, units)[:1])


def meanwhile(_) -> list:
    """Nothing is staged; what somebody did to the file is what counts."""
    return []


def test_a_table_or_a_folder_that_is_not_there_is_said(refused):
    refused.write("a.csv", HEADER)
    with pytest.raises(LoadError, match=r"does not exist, or the role may not see it\. Create it: CREATE TABLE"):
        refused.load(_with(refused, table="MYDB.LOADING.NOWHERE"))
    with pytest.raises(LoadError, match="is not a folder"):
        refused.load(_with(refused, path="file:///nowhere/at/all"))


def _with(place, *, table: str = "", path: str = ""):
    text = (
        f"loads:\n  - {{name: refused, table: {table or place.table}, mode: append, "
        f"files: {{path: '{path or f'file://{place.folder}'}', format: csv, settle: 0 seconds}}}}\n"
    )
    return parse_declared(text, "test.yaml").loads[0]


def test_bad_rows_go_to_the_reject_table_and_the_others_are_loaded(landing):
    place = landing(COLUMNS)
    spec = place.spec(mode="merge", key="ID", reject_share=0.95, duplicates="reject")
    good = "1,good,2025-01-01,1.50\n"
    bad = [
        "x,a,2025-01-01,1",
        ",a,2025-01-01,1",
        "2,toolong,2025-01-01,1",
        "3,a,2025-02-30,1",
        "4,a,2025-01-01,1.234",
        "5000000,a,2025-01-01,1",
        "6,a",
        "7,a,,",
        "7,b,,",
    ]
    place.write("a.csv", (HEADER + good + "\n".join(bad) + "\n").encode() + b"8,\xff,,\n")
    loaded = place.load(spec)
    assert place.rows("ID, NAME, DAY") == [(1, "good", date(2025, 1, 1))]
    assert [(line, reason) for _, line, reason in place.rejects()] == [
        (3, "ID: 'x' is no whole number"),
        (4, "key column ID is NULL"),
        (5, "NAME: 'toolong' is longer than 5 characters"),
        (6, "DAY: '2025-02-30' is no date"),
        (7, "PRICE: '1.234' is no number with up to 2 digits after the point"),
        (8, "ID: '5000000' has more than 6 digits"),
        (9, "2 fields, the header has 4"),
        (10, "key ID = 7 is more than once in the file"),
        (11, "key ID = 7 is more than once in the file"),
        (12, "not text in UTF-8"),
    ]
    assert (loaded.rows, loaded.rejected, loaded.inserted) == (11, 10, 1)


def test_times_reach_the_table_as_they_are_and_others_its_rejects(landing):
    place = landing("OPENS TIME, NAME VARCHAR")
    spec = place.spec(mode="merge", key="OPENS", reject_share=0.9)
    place.write(
        "a.csv", "OPENS,NAME\n10:00,a\n10:00:00.123456,b\n10:00:00,c\n100000,d\n10:00+02:00,e\n10:00:00.1234567,f\n"
    )
    loaded = place.load(spec)
    assert place.rows() == [(time(10), "c"), (time(10, 0, 0, 123456), "b")]
    assert [line for _, line, _ in place.rejects()] == [5, 6, 7]
    assert (loaded.inserted, loaded.rejected) == (2, 3)
    place.write("b.csv", "OPENS,NAME\n10:00:00.000,c\n")
    assert place.load(spec).changed is None
    place.write("c.csv", "OPENS,NAME\n11:00,c\n")
    changed = place.load(place.spec(mode="truncate", key="OPENS")).changed
    assert [str(key) for (key,) in changed.keys] == ["10:00:00", "10:00:00.123456", "11:00:00"]


@pytest.mark.parametrize("begin", ['9,"never ends', '9,"a\nb" late'])
def test_a_quote_that_takes_other_rows_with_it_stops_the_load(landing, begin):
    place = landing(COLUMNS)
    rows = "".join(f"{number},a,,\n" for number in range(50))
    place.write("a.csv", HEADER + rows + begin + "\n" + rows)
    with pytest.raises(LoadError, match=r"a\.csv: line 52: a quote opens there .*Nothing was loaded"):
        place.load(place.spec(mode="append", reject_share=0.5))
    assert (place.rows(), place.ledger()) == ([], [])


def test_too_many_bad_rows_stop_the_load_before_the_table_is_touched(landing):
    place = landing(COLUMNS)
    place.write("a.csv", HEADER + "1,a,,\n2,a,,\nx,a,,\n")
    with pytest.raises(
        LoadError, match=r"1 of 3 rows cannot be loaded, more than reject_share = 0.3 allows: .*a.csv:4: ID"
    ):
        place.load(place.spec(mode="append", reject_share=0.3))
    assert (place.rows(), place.ledger(), place.rejects()) == ([], [], [])


def test_an_empty_file_is_loaded_with_a_warning_but_does_not_empty_a_table(landing):
    place = landing(COLUMNS)
    place.write("a.csv", HEADER + "1,a,,\n")
    spec = place.spec(mode="truncate")
    place.load(spec)
    place.write("b.csv", "")
    with pytest.raises(LoadError, match=r"would be empty\. Nothing was loaded"):
        place.load(spec)
    assert len(place.rows()) == 1
    (warning,) = place.load(place.spec(mode="append")).warnings
    assert "b.csv: it is empty (0 bytes)" in warning
    assert [entry[:2] for entry in place.ledger()] == [("a.csv", "LOADED"), ("b.csv", "LOADED")]


def test_quoted_and_mixed_case_names_warehouse_role_and_query_tag_reach_snowflake(landing, access):
    place = landing('"Order Id" NUMBER, "select" VARCHAR', table='MYDB.LOADING."My ""Table"""')
    place.write("a.json", '{"order id": 1, "SELECT": "x\'y"}\n')
    for statement in ("CREATE WAREHOUSE IF NOT EXISTS LOADING_WH", "CREATE ROLE IF NOT EXISTS LOADER"):
        place.own.query(statement)
    tagged = {"warehouse": "LOADING_WH", "role": "LOADER", "query_tag": "from files"}
    loaded = place.load(place.spec(mode="merge", format="json", key="Order Id", snowflake=tagged))
    assert place.rows() == [(1, "x'y")]
    assert (loaded.changed.columns, loaded.changed.keys) == (("Order Id",), ((1,),))
    queries = requests.get(f"http://{access.host}:{access.port}/sandbox/queries", timeout=20).json()["queries"]
    (copied,) = [one for one in queries if one["sql"].startswith("COPY INTO") and one["query_tag"] == "from files"]
    assert (copied["warehouse"], copied["role"]) == ("LOADING_WH", "LOADER")


def test_loads_into_one_table_share_their_lists():
    one = "{{name: {}, table: A.B.C, mode: append, files: {{path: 's3://b/p', format: csv}}{}}}"
    text = f"loads:\n  - {one.format('a', '')}\n  - {one.format('b', ', bookkeeping: A.LISTS')}\n"
    with pytest.raises(SpecError, match=r"tir.yaml:1: loads: a and b load A\.B\.C, each with its own list"):
        parse_declared(text, "tir.yaml")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ("mode: merge", "key: merge needs the columns that name a row"),
        ("mode: scd2, key: ID", "order_by: scd2 needs the column"),
        ("mode: append, delete_flag: OP", "delete_flag: append deletes no single rows"),
        ("mode: swap", "mode: 'swap' is not one of truncate, append, merge, scd2"),
        ("mode: append, reject_share: 2", "reject_share: give a share between 0 and 1"),
        ("mode: append, schedule: hourly", "schedule: 'hourly' is no cron expression"),
        ("mode: append, kee: ID", "kee: unknown field; did you mean `key`"),
    ],
)
def test_a_spec_that_cannot_work_is_refused_with_its_line(fields, said):
    text = f"loads:\n  - {{name: a, table: A.B.C, files: {{path: 's3://b/p', format: csv}}, {fields}}}\n"
    with pytest.raises(SpecError) as error:
        parse_declared(text, "tir.yaml")
    assert str(error.value).startswith("tir.yaml:2: loads[0].")
    assert said in str(error.value)
