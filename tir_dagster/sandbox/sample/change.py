"""One change of the sample table: new, late, changed, moved and deleted orders in one transaction, and its account."""

from __future__ import annotations

import datetime as dt
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import snowflake.connector

from tir_dagster.sandbox.home import SandboxError
from tir_dagster.sandbox.sample.rows import (
    COLUMNS,
    DAY,
    NEWEST_MONTH_DAYS,
    SCHEMA,
    Month,
    generator,
    microseconds,
    orders,
)
from tir_dagster.sandbox.sample.table import DATABASE, SCHEMA_NAME, TABLE, TABLE_NAME, load, warehouse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    Run = Callable[[str], list[tuple[Any, ...]]]
    Picked = list[tuple[int, dt.date | None]]

STAGING = f"{DATABASE}.{SCHEMA_NAME}.{TABLE_NAME}_CHANGE"
DOES_NOT_EXIST = (2003, 2043)  # Snowflake's codes for a missing table, schema or database
NO_DATE = "no date"
NO_DATE_SHARE = 0.05
LATE_SHARE = 0.5
# New orders of the newest month come on the next days, up to the last one that every month has.
NEW_DAYS = 4
LAST_NEW_DAY = 28


@dataclass(frozen=True)
class Mix:
    """How many orders of each kind a change touches."""

    inserts: int = 400
    updates: int = 300
    moves: int = 60
    deletes: int = 200


@dataclass(frozen=True)
class MonthCount:
    """What happened to one month's orders; a move counts once where it left and once where it arrived."""

    inserted: int = 0
    updated: int = 0
    moved_out: int = 0
    moved_in: int = 0
    deleted: int = 0


@dataclass(frozen=True)
class Account:
    """What one change did, by month of ORDER_DATE."""

    seed: int
    mix: Mix
    rows_before: int
    rows_after: int
    months: dict[str, MonthCount]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return {"table": TABLE, **asdict(self)}

    def as_text(self) -> str:
        head = f"{'month':<9}{'inserted':>9}{'updated':>9}{'moved out':>11}{'moved in':>10}{'deleted':>9}"
        lines = [
            f"{month:<9}{n.inserted:>9,}{n.updated:>9,}{n.moved_out:>11,}{n.moved_in:>10,}{n.deleted:>9,}"
            for month, n in self.months.items()
        ]
        mix = self.mix
        summary = (
            f"{TABLE}: {mix.inserts:,} inserted, {mix.updates:,} updated, {mix.moves:,} moved to another month,"
            f" {mix.deletes:,} deleted; {self.rows_before:,} rows before, {self.rows_after:,} now ({self.seconds:.1f} s)."
        )
        return "\n".join([head, *lines, summary])


@dataclass(frozen=True)
class _Table:
    """What the change has to know of the table as it is."""

    rows: int
    last_id: int
    last_update: dt.datetime
    last_day: dt.date
    months: tuple[Month, ...]
    no_date_share: float = NO_DATE_SHARE

    def newest(self, months: int) -> _Table:
        """As if it had only its newest months, and no order were without a date."""
        return replace(self, months=self.months[-months:], no_date_share=0.0)

    @property
    def orders(self) -> str:
        """The orders that a change may touch, as a condition."""
        return "TRUE" if self.no_date_share else f"ORDER_DATE >= '{self.months[0].first_day}'"


@dataclass(frozen=True)
class _Plan:
    """The chosen orders with their dates, and the new values."""

    updates: Picked
    moves: Picked
    deletes: Picked
    inserted: pa.Table
    updated: pa.Table
    moved: pa.Table


def change_table(environment: Mapping[str, str], *, seed: int, mix: Mix, recent: int | None = None) -> Account:
    """Apply the change that `seed` and the table's content decide, all or nothing.

    `recent` keeps it to the newest months, and to orders with a date.
    """
    begun = time.monotonic()
    with warehouse(environment, "changing the sample table") as run:
        table = _look(run) if recent is None else _look(run).newest(recent)
        run(f"USE SCHEMA {DATABASE}.{SCHEMA_NAME}")
        plan = _plan(run, table, seed, mix)
        try:
            _stage(run, plan)
            rows_after = _apply(run, plan)
        finally:
            # Left behind only if the connection is lost; the next change replaces it.
            with suppress(snowflake.connector.errors.Error):
                run(f"DROP TABLE IF EXISTS {STAGING}")
    return Account(seed, mix, table.rows, rows_after, _by_month(plan), time.monotonic() - begun)


def _look(run: Run) -> _Table:
    try:
        rows, last_id, last_update, first, last = run(
            f"SELECT COUNT(*), MAX(ORDER_ID), MAX(UPDATED_AT), MIN(ORDER_DATE), MAX(ORDER_DATE) FROM {TABLE}"
        )[0]
    except snowflake.connector.errors.ProgrammingError as error:
        if error.errno not in DOES_NOT_EXIST:
            raise
        raise SandboxError(f"There is no {TABLE} yet. Make it: tir sandbox seed") from error
    if first is None:
        raise SandboxError(f"{TABLE} holds no orders to change. Fill it: tir sandbox seed")
    months = [Month.of(first)]
    while months[-1] < Month.of(last):
        months.append(months[-1].plus(1))
    return _Table(rows, int(last_id), last_update, last, tuple(months))


def _plan(run: Run, table: _Table, seed: int, mix: Mix) -> _Plan:
    old = f"ORDER_DATE < '{table.months[-1].first_day}'"
    updates = _pick(run, seed, "updates", mix.updates, f"(ORDER_DATE IS NULL OR {old}) AND {table.orders}", taken=())
    moves = _pick(run, seed, "moves", mix.moves, f"{old} AND {table.orders}", taken=updates)
    deletes = _pick(run, seed, "deletes", mix.deletes, table.orders, taken=[*updates, *moves])
    rng = generator(seed, table.last_id)
    clock = _clock(table.last_update)
    return _Plan(
        updates,
        moves,
        deletes,
        inserted=_new_orders(rng, table, mix.inserts, next(clock)),
        updated=_new_orders(rng, table, mix.updates, next(clock), ids=[key for key, _ in updates]),
        moved=_moved_orders(rng, table, moves, next(clock)),
    )


def _pick(run: Run, seed: int, kind: str, count: int, where: str, *, taken: Sequence[Any]) -> Picked:
    """Orders in an order that only their keys and the seed decide; none that another part of the change has taken."""
    rows = run(
        f"SELECT ORDER_ID, ORDER_DATE FROM {TABLE} WHERE {where}"
        f" ORDER BY MD5(ORDER_ID || ':{seed}:{kind}'), ORDER_ID LIMIT {count + len(taken)}"
    )
    others = {key for key, _ in taken}
    picked = [(int(key), day) for key, day in rows if key not in others][:count]
    if len(picked) < count:
        raise SandboxError(
            f"{TABLE} has only {len(picked):,} orders for {count:,} {kind}: nothing was changed."
            f" Ask for fewer with --{kind}, or make a larger table: tir sandbox seed --rows …"
        )
    return picked


def _clock(last_update: dt.datetime) -> Iterator[dt.datetime]:
    """Times of the changes: each a second later, all after anything the table holds."""
    while True:
        last_update += dt.timedelta(seconds=1)
        yield last_update


def _new_orders(
    rng: np.random.Generator, table: _Table, count: int, updated_at: dt.datetime, ids: list[int] | None = None
) -> pa.Table:
    """Fresh values; half of them new, in the newest month, the others late, in any month, a few without a date.

    The new ones lie beyond every date so far, so that an incremental refresh by ORDER_DATE finds them, and only them.
    """
    place = rng.integers(0, len(table.months), count)
    place[rng.random(count) >= LATE_SHARE] = len(table.months) - 1
    no_date = rng.random(count) < table.no_date_share
    first = min(max(table.last_day.day, NEWEST_MONTH_DAYS) + 1, LAST_NEW_DAY)
    days = (first, min(first + NEW_DAYS - 1, LAST_NEW_DAY))
    moments = _moments(rng, table, [table.months[n] for n in place], days)
    return _orders(rng, moments, no_date, updated_at, ids, first_id=table.last_id + 1)


def _moved_orders(rng: np.random.Generator, table: _Table, moves: Picked, updated_at: dt.datetime) -> pa.Table:
    """New dates in a month other than the old one, none beyond the dates so far, a few without a date."""
    steps = rng.integers(1, max(2, len(table.months)), len(moves))
    places = {month: number for number, month in enumerate(table.months)}
    targets = [
        table.months[(places[Month.of(day)] + int(step)) % len(table.months)]
        for (_, day), step in zip(moves, steps, strict=True)
        if day is not None
    ]
    no_date = rng.random(len(moves)) < table.no_date_share
    moments = _moments(rng, table, targets, (1, NEWEST_MONTH_DAYS))
    return _orders(rng, moments, no_date, updated_at, [key for key, _ in moves], first_id=0)


def _moments(rng: np.random.Generator, table: _Table, months: list[Month], newest: tuple[int, int]) -> np.ndarray:
    """A moment in each of these months; in the table's newest one from the first to the last of two days."""
    days = [newest if month == table.months[-1] else (1, month.days) for month in months]
    begin = [microseconds(month.first_day) + (first - 1) * DAY for month, (first, _) in zip(months, days, strict=True)]
    length = np.array([last - first + 1 for first, last in days], dtype=np.int64) * DAY
    moments: np.ndarray = np.array(begin, dtype=np.int64) + (rng.random(len(months)) * length).astype(np.int64)
    return moments


def _orders(
    rng: np.random.Generator,
    moments: np.ndarray,
    no_date: np.ndarray,
    updated_at: dt.datetime,
    ids: list[int] | None,
    *,
    first_id: int,
) -> pa.Table:
    made = orders(rng, first_id=first_id, moments=moments)
    # The dates as planned: a NULL by chance would turn a move into something else.
    dates = pa.array((moments // DAY).astype(np.int32), mask=no_date).cast(pa.date32())
    replaced = {"ORDER_DATE": dates, "UPDATED_AT": pa.array([updated_at] * len(moments), pa.timestamp("us"))}
    if ids is not None:
        replaced["ORDER_ID"] = pa.array(ids, pa.int64())
    return pa.Table.from_arrays([replaced.get(name, made[name]) for name in SCHEMA.names], schema=SCHEMA)


def _stage(run: Run, plan: _Plan) -> None:
    """The change beside the table, before the transaction: Snowflake would commit it at any CREATE."""
    body = ", ".join(f"{name} {declared.removesuffix(' NOT NULL')}" for name, declared, _ in COLUMNS)
    run(f"CREATE OR REPLACE TABLE {STAGING} (ACTION VARCHAR, {body})")
    deleted = pa.table({"ORDER_ID": pa.array([key for key, _ in plan.deletes], pa.int64())})
    parts = {"insert": plan.inserted, "update": plan.updated, "move": plan.moved, "delete": deleted}
    chunks = [
        part.append_column("ACTION", pa.array([action] * part.num_rows))
        for action, part in parts.items()
        if part.num_rows
    ]
    load(run, STAGING, chunks)


def _apply(run: Run, plan: _Plan) -> int:
    """The whole change in one transaction; returns the table's rows afterwards."""
    names = ", ".join(SCHEMA.names)
    statements = {
        f"DELETE FROM {TABLE} WHERE ORDER_ID IN (SELECT ORDER_ID FROM {STAGING} WHERE ACTION = 'delete')": plan.deletes,
        _update("update", "QUANTITY", "UNIT_PRICE", "NOTE", "UPDATED_AT"): plan.updates,
        _update("move", "ORDER_DATE", "ORDERED_AT", "UPDATED_AT"): plan.moves,
        f"INSERT INTO {TABLE} ({names}) SELECT {names} FROM {STAGING} WHERE ACTION = 'insert'": plan.inserted,
    }
    try:
        run("BEGIN")
        for statement, orders_meant in statements.items():
            _require_all(len(orders_meant), int(run(statement)[0][0]))
        rows = int(run(f"SELECT COUNT(*) FROM {TABLE}")[0][0])
        run("COMMIT")
    except BaseException:
        with suppress(snowflake.connector.errors.Error):
            run("ROLLBACK")
        raise
    return rows


def _require_all(meant: int, done: int) -> None:
    if done != meant:
        raise SandboxError(
            f"{TABLE} was changed by someone else meanwhile ({done:,} of {meant:,} orders found):"
            " nothing was changed. Run tir sandbox change again."
        )


def _update(action: str, *columns: str) -> str:
    values = ", ".join(f"{column} = c.{column}" for column in columns)
    return f"UPDATE {TABLE} t SET {values} FROM {STAGING} c WHERE t.ORDER_ID = c.ORDER_ID AND c.ACTION = '{action}'"


def _by_month(plan: _Plan) -> dict[str, MonthCount]:
    counts = {
        "inserted": Counter(map(_month, plan.inserted["ORDER_DATE"].to_pylist())),
        "updated": Counter(_month(day) for _, day in plan.updates),
        "moved_out": Counter(_month(day) for _, day in plan.moves),
        "moved_in": Counter(map(_month, plan.moved["ORDER_DATE"].to_pylist())),
        "deleted": Counter(_month(day) for _, day in plan.deletes),
    }
    months = sorted(set().union(*counts.values()))  # digits sort before "no date"
    return {month: MonthCount(**{name: count[month] for name, count in counts.items()}) for month in months}


def _month(day: dt.date | None) -> str:
    return NO_DATE if day is None else str(Month.of(day))
