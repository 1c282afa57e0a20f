from __future__ import annotations

import datetime as dt
import zipfile
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from tableauhyperapi import Connection, HyperProcess, Telemetry

from tir_dagster.sandbox import sample
from tir_dagster.sandbox.home import SandboxError
from tir_dagster.sandbox.sample import rows as generated
from tir_dagster_tests.conftest import SEEDED_ROWS, Sandbox, running_sandbox

UNTIL = sample.Month(2024, 7)
NEVER_NULL = {"ORDER_ID", "UPDATED_AT"}
Rows = dict[int, tuple[Any, ...]]


def all_orders(**arguments: Any) -> pa.Table:
    return pa.concat_tables(generated.order_chunks(**{"rows": 5_000, "seed": 1, "until": UNTIL, **arguments}))


def read_table(sandbox: Sandbox) -> Rows:
    with sandbox.snowflake() as connection, connection.cursor() as cursor:
        cursor.execute(f"SELECT * FROM {sample.TABLE}")
        return {row[0]: row for row in cursor.fetchall()}


def month_of(row: tuple[Any, ...]) -> str:
    return "no date" if row[1] is None else row[1].strftime("%Y-%m")


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """A sandbox that these tests may change."""
    with running_sandbox(tmp_path_factory.mktemp("sample")) as running:
        yield running


def seed(sandbox: Sandbox, *, rows: int = 3_000, seed: int = 1) -> Rows:
    sample.seed_table(sandbox.env, rows=rows, seed=seed, until=UNTIL)
    return read_table(sandbox)


def test_the_same_arguments_give_the_same_orders():
    assert all_orders().equals(all_orders())


@pytest.mark.parametrize("other", [{"seed": 2}, {"until": UNTIL.plus(1)}])
def test_another_seed_or_month_gives_other_orders(other):
    assert not all_orders().equals(all_orders(**other))


def test_orders_come_in_chunks_of_bounded_size_with_unique_keys():
    chunks = list(generated.order_chunks(rows=250_000, seed=1, until=UNTIL))
    assert [chunk.num_rows for chunk in chunks] == [100_000, 100_000, 50_000]
    assert len(set(pa.concat_tables(chunks)["ORDER_ID"].to_pylist())) == 250_000


def test_every_column_but_the_key_and_the_update_time_has_nulls():
    orders = all_orders()
    assert {name for name in orders.column_names if orders[name].null_count == 0} == NEVER_NULL


def test_about_one_order_in_two_hundred_has_no_date():
    assert 0.003 < all_orders(rows=100_000)["ORDER_DATE"].null_count / 100_000 < 0.007


def test_the_orders_cover_24_months_up_to_the_asked_one():
    days = [day for day in all_orders()["ORDER_DATE"].to_pylist() if day]
    assert {str(sample.Month.of(day)) for day in days} == {str(UNTIL.plus(-back)) for back in range(24)}


def test_notes_hold_what_often_breaks_programs():
    notes = {note for note in all_orders()["NOTE"].to_pylist() if note is not None}
    assert "" in notes
    assert any("\n" in note for note in notes)
    assert any("'" in note for note in notes)
    assert any('"' in note for note in notes)
    assert any(ord(letter) > 0xFFFF for note in notes for letter in note), "no emoji"


@pytest.mark.parametrize("text", ["2024", "2024-13", "July", "2024-07-01", "0001-01", ""])
def test_a_month_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="month"):
        sample.parse_month(text)


def test_the_default_month_is_the_current_one():
    assert sample.parse_month(None).first_day == dt.datetime.now(tz=dt.UTC).date().replace(day=1)


def test_the_table_holds_exactly_the_generated_orders(own):
    loaded = seed(own)
    expected = all_orders(rows=3_000).to_pylist()
    assert len(loaded) == len(expected)
    for order in expected:
        assert loaded[order["ORDER_ID"]] == tuple(order.values())


def test_the_table_has_the_declared_types(own):
    seed(own)
    with own.snowflake() as connection, connection.cursor() as cursor:
        described = {row[0]: (row[1], row[3]) for row in cursor.execute(f"DESCRIBE TABLE {sample.TABLE}").fetchall()}
    assert described["ORDER_ID"] == ("NUMBER(38,0)", "N")
    assert described["UNIT_PRICE"] == ("NUMBER(12,2)", "Y")
    assert described["ORDER_DATE"] == ("DATE", "Y")
    assert described["SHIPPED_AT"] == ("TIMESTAMP_TZ(9)", "Y")
    assert described["UPDATED_AT"] == ("TIMESTAMP_NTZ(9)", "N")


def test_seeding_again_gives_the_same_table_and_another_seed_another_one(own):
    first = seed(own)
    sample.change_table(own.env, seed=1, mix=sample.Mix(inserts=5, updates=5, moves=5, deletes=5))
    assert read_table(own) != first
    assert seed(own) == first
    assert seed(own, seed=2) != first


def test_the_account_of_a_change_equals_what_really_changed(own):
    before = seed(own)
    account = sample.change_table(own.env, seed=7, mix=sample.Mix(inserts=120, updates=90, moves=40, deletes=60))
    after = read_table(own)

    kept = before.keys() & after.keys()
    changed = [key for key in kept if before[key] != after[key]]
    moved = [key for key in changed if month_of(before[key]) != month_of(after[key])]
    actual = {
        "inserted": Counter(month_of(after[key]) for key in after.keys() - before.keys()),
        "updated": Counter(month_of(before[key]) for key in set(changed) - set(moved)),
        "moved_out": Counter(month_of(before[key]) for key in moved),
        "moved_in": Counter(month_of(after[key]) for key in moved),
        "deleted": Counter(month_of(before[key]) for key in before.keys() - after.keys()),
    }
    for name, by_month in actual.items():
        told = Counter({month: getattr(count, name) for month, count in account.months.items()})
        assert +told == by_month, name
    assert (account.rows_before, account.rows_after) == (len(before), len(after))
    assert {name: by_month.total() for name, by_month in actual.items()} == {
        "inserted": 120, "updated": 90, "moved_out": 40, "moved_in": 40, "deleted": 60,
    }  # fmt: skip


def test_a_change_reaches_old_months_and_orders_without_a_date(own):
    seed(own)
    account = sample.change_table(own.env, seed=1, mix=sample.Mix())
    newest = str(UNTIL)
    assert sum(count.inserted for month, count in account.months.items() if month < newest) > 50
    assert account.months["no date"].inserted > 0
    assert account.months[newest].updated == 0


def test_changed_orders_are_younger_than_anything_before(own):
    before = seed(own)
    sample.change_table(own.env, seed=3, mix=sample.Mix(inserts=20, updates=20, moves=20, deletes=20))
    newest = max(row[-1] for row in before.values())
    touched = {key: row for key, row in read_table(own).items() if before.get(key) != row}
    assert len(touched) == 60
    assert all(row[-1] > newest for row in touched.values())


def test_the_same_seed_on_the_same_table_makes_the_same_change_and_another_seed_another(own):
    results = []
    for number in (1, 1, 2):
        seed(own)
        sample.change_table(own.env, seed=number, mix=sample.Mix(inserts=30, updates=30, moves=10, deletes=10))
        results.append(read_table(own))
    assert results[0] == results[1]
    assert results[0] != results[2]


def test_a_change_larger_than_the_table_is_refused_and_changes_nothing(own):
    before = seed(own)
    with pytest.raises(SandboxError, match="--deletes"):
        sample.change_table(own.env, seed=1, mix=sample.Mix(deletes=3_001))
    assert read_table(own) == before


def test_a_change_is_one_version_of_the_table(own):
    """Readers see all of it or nothing."""
    before = seed(own)
    with own.snowflake() as connection, connection.cursor() as cursor:
        pinned = cursor.execute("SELECT CURRENT_TIMESTAMP()").fetchone()[0]
        sample.change_table(own.env, seed=1, mix=sample.Mix())
        at = f"AT(TIMESTAMP => '{pinned.isoformat()}'::TIMESTAMP_TZ)"
        old = {row[0]: row for row in cursor.execute(f"SELECT * FROM {sample.TABLE} {at}").fetchall()}
    assert old == before


def test_nothing_but_the_sample_stays_in_the_schema(own):
    seed(own)
    sample.change_table(own.env, seed=1, mix=sample.Mix())
    with own.snowflake() as connection, connection.cursor() as cursor:
        cursor.execute("SELECT TABLE_NAME FROM MYDB.INFORMATION_SCHEMA.TABLES WHERE TABLE_SCHEMA = 'MYSCHEMA'")
        assert cursor.fetchall() == [("MYTABLE",)]


def test_the_datasource_is_published_with_the_rows_of_the_table(seeded, tmp_path):
    with seeded.tableau() as server:
        (item,) = server.datasources.filter(name=sample.DATASOURCE)
        assert item.project_name == sample.PROJECT
        server.datasources.populate_connections(item)
        assert [(one.connection_type, one.username) for one in item.connections] == [("snowflake", "TIR")]
        package = server.datasources.download(item.id, filepath=str(tmp_path / "package"))
    assert extract_rows(package, tmp_path) == SEEDED_ROWS


def extract_rows(package: str, folder: Any) -> int:
    with zipfile.ZipFile(package) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".hyper")]
        extract = archive.extract(member, folder)
    with (
        HyperProcess(Telemetry.DO_NOT_SEND_USAGE_DATA_TO_TABLEAU, parameters={"log_config": ""}) as hyper,
        Connection(hyper.endpoint, extract) as connection,
    ):
        return connection.execute_scalar_query('SELECT COUNT(*) FROM "Extract"."Extract"')
