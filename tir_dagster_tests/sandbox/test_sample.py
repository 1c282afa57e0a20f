from __future__ import annotations

import datetime as dt
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tableauhyperapi import Connection, HyperProcess, Telemetry

from tir_dagster.sandbox import sample
from tir_dagster.sandbox.home import SandboxError
from tir_dagster.sandbox.sample import change as changing
from tir_dagster.sandbox.sample import rows as generated
from tir_dagster_tests.conftest import Sandbox, running_sandbox

UNTIL = sample.Month(2024, 7)
ROWS = 3_000
CHANGE_SEED = 7
MIX = sample.Mix(inserts=120, updates=90, moves=40, deletes=60)
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


def in_newest_month(row: tuple[Any, ...]) -> bool:
    return month_of(row) == str(UNTIL)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """A sandbox that these tests may change."""
    with running_sandbox(tmp_path_factory.mktemp("sample")) as running:
        yield running


def seed(sandbox: Sandbox, *, rows: int = ROWS, seed: int = 1) -> Rows:
    sample.seed_table(sandbox.env, rows=rows, seed=seed, until=UNTIL)
    return read_table(sandbox)


@dataclass(frozen=True)
class Changed:
    """The sample before and after one change, and what was seen of it; taken once and only read by the tests."""

    before: Rows
    after: Rows
    before_again: Rows  # read as of a moment before the change
    account: sample.Account
    columns: dict[str, tuple[str, str]]
    tables: list[tuple[str]]
    full: Rows  # the datasource's extract, by ORDER_ID and ORDER_DATE, after its full refresh
    incremented: Rows  # and after Tableau's own incremental refresh, which followed the change

    @property
    def new(self) -> Rows:
        return {key: row for key, row in self.after.items() if key not in self.before}

    @property
    def moved(self) -> Rows:
        kept = self.before.keys() & self.after.keys()
        return {key: self.after[key] for key in kept if month_of(self.before[key]) != month_of(self.after[key])}


@pytest.fixture(scope="module")
def changed(own: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Changed:
    folder = tmp_path_factory.mktemp("packages")
    before = seed(own)
    sample.seed_datasource(own.env, timeout=120)
    with own.snowflake() as connection, connection.cursor() as cursor, own.tableau() as server:
        (datasource,) = server.datasources.filter(name=sample.DATASOURCE)
        full = server.datasources.download(datasource.id, filepath=str(folder / "full"))
        cursor.execute(f"DESCRIBE TABLE {sample.TABLE}")
        columns = {row[0]: (row[1], row[3]) for row in cursor.fetchall()}
        pinned = cursor.execute("SELECT CURRENT_TIMESTAMP()").fetchone()[0]
        account = change(own, CHANGE_SEED)
        cursor.execute(f"SELECT * FROM {sample.TABLE} AT(TIMESTAMP => '{pinned.isoformat()}'::TIMESTAMP_TZ)")
        before_again = {row[0]: row for row in cursor.fetchall()}
        cursor.execute("SELECT TABLE_NAME FROM MYDB.INFORMATION_SCHEMA.TABLES WHERE TABLE_SCHEMA = 'MYSCHEMA'")
        tables = cursor.fetchall()
        server.jobs.wait_for_job(server.datasources.refresh(datasource, incremental=True), timeout=120)
        incremented = server.datasources.download(datasource.id, filepath=str(folder / "incremented"))
    full_rows, incremented_rows = extract_rows([full, incremented], folder)
    return Changed(
        before, read_table(own), before_again, account, columns, tables, full=full_rows, incremented=incremented_rows
    )


def change(sandbox: Sandbox, number: int) -> sample.Account:
    return sample.change_table(sandbox.env, seed=number, mix=MIX)


def extract_rows(packages: list[str], folder: Path) -> list[Rows]:
    """Keys and dates of each package's extract."""
    found = []
    with HyperProcess(Telemetry.DO_NOT_SEND_USAGE_DATA_TO_TABLEAU, parameters={"log_config": ""}) as hyper:
        for number, package in enumerate(packages):
            with zipfile.ZipFile(package) as archive:
                (member,) = [name for name in archive.namelist() if name.endswith(".hyper")]
                extract = archive.extract(member, folder / str(number))
            with Connection(hyper.endpoint, extract) as connection:
                rows = connection.execute_list_query('SELECT "ORDER_ID", "ORDER_DATE" FROM "Extract"."Extract"')
            found.append({row[0]: (row[0], None if row[1] is None else row[1].to_date()) for row in rows})
            assert len(found[-1]) == len(rows), "an order is there twice"
    return found


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


def test_the_newest_month_is_filled_up_to_its_15th_day():
    days = [day for day in all_orders()["ORDER_DATE"].to_pylist() if day]
    assert max(days) == dt.date(2024, 7, 15)
    assert {day.day for day in days if day < UNTIL.first_day} == set(range(1, 32))


def test_the_table_holds_exactly_the_generated_orders(changed):
    expected = all_orders(rows=ROWS).to_pylist()
    assert len(changed.before) == len(expected)
    for order in expected:
        assert changed.before[order["ORDER_ID"]] == tuple(order.values())


def test_the_table_has_the_declared_types(changed):
    described = changed.columns
    assert described["ORDER_ID"] == ("NUMBER(38,0)", "N")
    assert described["UNIT_PRICE"] == ("NUMBER(12,2)", "Y")
    assert described["ORDER_DATE"] == ("DATE", "Y")
    assert described["SHIPPED_AT"] == ("TIMESTAMP_TZ(9)", "Y")
    assert described["UPDATED_AT"] == ("TIMESTAMP_NTZ(9)", "N")


def test_the_same_seed_makes_the_same_table_and_the_same_change(own, changed):
    assert changed.after != changed.before
    assert seed(own) == changed.before
    change(own, CHANGE_SEED)
    assert read_table(own) == changed.after


def test_another_seed_makes_another_table_and_another_change(own, changed):
    assert seed(own, seed=2) != changed.before
    seed(own)
    change(own, CHANGE_SEED + 1)
    assert read_table(own) != changed.after


def test_the_account_of_a_change_equals_what_really_changed(changed):
    before, after, account = changed.before, changed.after, changed.account
    kept = before.keys() & after.keys()
    touched = [key for key in kept if before[key] != after[key]]
    moved = changed.moved
    actual = {
        "inserted": Counter(month_of(row) for row in changed.new.values()),
        "updated": Counter(month_of(before[key]) for key in set(touched) - set(moved)),
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


def test_a_change_reaches_old_months_and_orders_without_a_date(changed):
    months, newest = changed.account.months, str(UNTIL)
    assert sum(count.inserted for month, count in months.items() if month < newest) > 30
    assert months["no date"].inserted > 0
    assert months[newest].updated == 0
    assert months[newest].moved_in > 0


def test_new_orders_of_the_newest_month_come_after_all_others_in_it(changed):
    days = {row[1].day for row in changed.new.values() if in_newest_month(row)}
    assert days <= set(range(16, 29))
    assert len(days) > 1
    assert all(row[1].day <= 15 for row in changed.moved.values() if in_newest_month(row))


@pytest.mark.parametrize(
    ("last", "first_new", "last_new"),
    [(3, 16, 19), (15, 16, 19), (19, 20, 23), (26, 27, 28), (28, 28, 28), (31, 28, 28)],
)
def test_the_next_change_finds_later_days_up_to_the_28th(last, first_new, last_new):
    noon = dt.datetime(2024, 7, last, 12, tzinfo=dt.UTC)
    table = changing._Table(1, 1, noon, noon.date(), (UNTIL.plus(-1), UNTIL))
    orders = changing._new_orders(generated.generator(1), table, 500, noon)
    days = {day.day for day in orders["ORDER_DATE"].to_pylist() if day and sample.Month.of(day) == UNTIL}
    assert days == set(range(first_new, last_new + 1))


def test_tableaus_own_increment_appends_the_new_orders_and_misses_everything_else(changed):
    assert {key: row[:2] for key, row in changed.before.items()} == changed.full
    appended = changed.incremented.keys() - changed.full.keys()
    assert appended == {key for key, row in changed.new.items() if in_newest_month(row)}
    assert {key: changed.incremented[key] for key in changed.full} == changed.full, "deleted and moved orders stay"
    late = changed.new.keys() - appended
    assert {month_of(changed.new[key]) for key in late} > {"no date"}


def test_changed_orders_are_younger_than_anything_before(changed):
    newest = max(row[-1] for row in changed.before.values())
    touched = {key: row for key, row in changed.after.items() if changed.before.get(key) != row}
    assert len(touched) == 250
    assert all(row[-1] > newest for row in touched.values())


def test_a_change_larger_than_the_table_is_refused_and_changes_nothing(own, changed):
    before = read_table(own)
    with pytest.raises(SandboxError, match="--deletes"):
        sample.change_table(own.env, seed=1, mix=sample.Mix(0, 0, 0, deletes=len(before) + 1))
    assert read_table(own) == before


def test_a_recent_change_keeps_to_the_newest_months_and_to_orders_with_a_date(own, changed):
    account = sample.change_table(own.env, seed=2, mix=sample.Mix(30, 20, 5, 10), recent=3)
    assert set(account.months) <= {str(UNTIL.plus(-2)), str(UNTIL.plus(-1)), str(UNTIL)}
    assert sum(count.inserted for count in account.months.values()) == 30


def test_a_change_is_one_version_of_the_table(changed):
    """Readers see all of it or nothing."""
    assert changed.before_again == changed.before


def test_nothing_but_the_sample_stays_in_the_schema(changed):
    assert changed.tables == [("MYTABLE",)]


def test_the_datasource_is_published_in_its_project_with_its_credentials(own, changed):
    with own.tableau() as server:
        (item,) = server.datasources.filter(name=sample.DATASOURCE)
        assert item.project_name == sample.PROJECT
        server.datasources.populate_connections(item)
        assert [(one.connection_type, one.username) for one in item.connections] == [("snowflake", "TIR")]
