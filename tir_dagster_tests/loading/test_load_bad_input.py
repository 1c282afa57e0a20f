"""Bad input: what is said, where rejected rows go, and that nothing is half-loaded."""

from __future__ import annotations

import io
from datetime import date, time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import requests

from tir_dagster.errors import LoadError
from tir_dagster.loading.staging import right_here
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
