"""The sample's rows: orders of a made-up shop, the same for the same seed, as Arrow tables. Knows no server."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Iterator

MONTHS = 24
# The newest month is filled up to this day, as if it were still going on: a change finds later days for new orders.
NEWEST_MONTH_DAYS = 15
CHUNK_ROWS = 100_000
FIRST_ORDER_ID = 1_000_001
DAY = 86_400_000_000  # in microseconds, the unit of all times here

# Column name, type in Snowflake, type in Arrow.
COLUMNS: tuple[tuple[str, str, Any], ...] = (
    ("ORDER_ID", "NUMBER(38,0) NOT NULL", pa.int64()),
    ("ORDER_DATE", "DATE", pa.date32()),
    ("ORDERED_AT", "TIMESTAMP_NTZ", pa.timestamp("us")),
    ("CUSTOMER", "VARCHAR", pa.string()),
    ("REGION", "VARCHAR", pa.string()),
    ("PRODUCT", "VARCHAR", pa.string()),
    ("CATEGORY", "VARCHAR", pa.string()),
    ("QUANTITY", "NUMBER(9,0)", pa.int32()),
    ("UNIT_PRICE", "NUMBER(12,2)", pa.decimal128(12, 2)),
    ("DISCOUNT", "FLOAT", pa.float64()),
    ("RUSH", "BOOLEAN", pa.bool_()),
    ("SHIP_TIME", "TIME", pa.time64("us")),
    ("SHIPPED_AT", "TIMESTAMP_TZ", pa.timestamp("us", tz="UTC")),
    ("NOTE", "VARCHAR", pa.string()),
    ("UPDATED_AT", "TIMESTAMP_NTZ NOT NULL", pa.timestamp("us")),
)
SCHEMA = pa.schema([pa.field(name, arrow, nullable="NOT NULL" not in sql) for name, sql, arrow in COLUMNS])

# How often a column is NULL: every column but the key and UPDATED_AT.
NULL_SHARE = {
    "ORDER_DATE": 0.005,
    "ORDERED_AT": 0.01,
    "CUSTOMER": 0.01,
    "REGION": 0.02,
    "PRODUCT": 0.005,
    "CATEGORY": 0.01,
    "QUANTITY": 0.01,
    "UNIT_PRICE": 0.01,
    "DISCOUNT": 0.3,
    "RUSH": 0.1,
    "SHIP_TIME": 0.15,
    "SHIPPED_AT": 0.15,
    "NOTE": 0.7,
}

CUSTOMERS = (
    "Müller & Söhne", "Café Zoë", "Łukasiewicz S.A.", "Ångström AB", "Peña Hermanos", "Ženíšek s.r.o.", "Đorđević",
    "O'Brien Ltd", "渡辺商店", "김철수 상사", "Иванов и Дочь", "Παπαδόπουλος", "محمد وشركاه", "Smith, Jones", "Ñandú",
    "Straße 12 GmbH", "naïve Œuvres", "Þórsson ehf.", "İstanbul Ticaret", "Nguyễn Văn An", "ACME", "acme", "Béla Kft.",
)  # fmt: skip
REGIONS = ("North", "South", "East", "West", "Île-de-France", "São Paulo", "Zürich")
PRODUCTS = (
    ("Desk", "Furniture", 34_900), ("Chair", "Furniture", 12_950), ("Bücherregal", "Furniture", 8_990),
    ("Pencil", "Office", 120), ("Paper A4", "Office", 549), ('Monitor 27"', "Technology", 27_999),
    ("Keyboard", "Technology", 7_999), ("Cable 2 m", "Technology", 899), ("Thé vert", "Pantry", 675),
    ("Coffee", "Pantry", 1_249),
)  # fmt: skip
NOTES = (
    "", " ", "call before delivery", "it's a gift", 'say "hello"', "🎁 wrap it 🎀", "first line\nsecond line",
    "back\\slash", "Straße & Ñandú; 50 % off", "NULL", "tab\there", "a,b;c|d",
)  # fmt: skip


@dataclass(frozen=True, order=True)
class Month:
    """A calendar month."""

    year: int
    number: int

    def __str__(self) -> str:
        return f"{self.year:04d}-{self.number:02d}"

    def plus(self, months: int) -> Month:
        year, number = divmod(self.year * 12 + self.number - 1 + months, 12)
        return Month(year, number + 1)

    @property
    def first_day(self) -> dt.date:
        return dt.date(self.year, self.number, 1)

    @property
    def days(self) -> int:
        return (self.plus(1).first_day - self.first_day).days

    @staticmethod
    def of(day: dt.date) -> Month:
        return Month(day.year, day.month)


def parse_month(text: str | None) -> Month:
    """`YYYY-MM` as a month; None is the current one."""
    if text is None:
        return Month.of(dt.datetime.now(tz=dt.UTC).date())
    try:
        day = dt.datetime.strptime(text, "%Y-%m").replace(tzinfo=dt.UTC).date()
    except ValueError:
        raise ValueError(f"{text!r} is not a month; write it as YYYY-MM, for example 2024-07") from None
    if day.year < 1900:
        raise ValueError(f"{text!r} is too long ago; give a month from 1900 on")
    return Month.of(day)


def order_chunks(*, rows: int, seed: int, until: Month) -> Iterator[pa.Table]:
    """All orders in order of time, at most CHUNK_ROWS at once: memory does not grow with `rows`."""
    begin = microseconds(until.plus(1 - MONTHS).first_day)
    span = microseconds(until.first_day) + NEWEST_MONTH_DAYS * DAY - begin
    for number, first in enumerate(range(0, rows, CHUNK_ROWS)):
        rng = generator(seed, number)
        count = min(CHUNK_ROWS, rows - first)
        # Evenly over the months with a little chance, so that even a small table has rows in all of them.
        place = (first + np.arange(count) + rng.random(count)) / rows
        moments = begin + (place * span).astype(np.int64)
        yield orders(rng, first_id=FIRST_ORDER_ID + first, moments=moments)


def generator(*seed: int) -> np.random.Generator:
    """Random numbers that are the same on every machine; PCG64 by name, since NumPy may change its default."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(list(seed))))


def orders(rng: np.random.Generator, *, first_id: int, moments: np.ndarray) -> pa.Table:
    """Orders with consecutive ids, placed at these moments (microseconds since 1970)."""
    count = len(moments)
    product = rng.integers(0, len(PRODUCTS), count)
    shipped = moments + rng.integers(DAY // 24, 5 * DAY, count)
    values: dict[str, pa.Array] = {
        "ORDER_ID": pa.array(np.arange(first_id, first_id + count, dtype=np.int64)),
        "ORDER_DATE": pa.array((moments // DAY).astype(np.int32)).cast(pa.date32()),
        "ORDERED_AT": pa.array(moments).cast(pa.timestamp("us")),
        "CUSTOMER": _pick(CUSTOMERS, rng.integers(0, len(CUSTOMERS), count)),
        "REGION": _pick(REGIONS, rng.integers(0, len(REGIONS), count)),
        "PRODUCT": _pick([name for name, _, _ in PRODUCTS], product),
        "CATEGORY": _pick([category for _, category, _ in PRODUCTS], product),
        "QUANTITY": pa.array(rng.integers(1, 50, count).astype(np.int32)),
        "UNIT_PRICE": unit_prices(rng, product),
        "DISCOUNT": pa.array(rng.integers(0, 31, count) / 100),
        "RUSH": pa.array(rng.random(count) < 0.2),
        "SHIP_TIME": pa.array(shipped % DAY // 1_000_000 * 1_000_000).cast(pa.time64("us")),
        "SHIPPED_AT": pa.array(shipped).cast(pa.timestamp("us", tz="UTC")),
        "NOTE": notes(rng, count),
        "UPDATED_AT": pa.array(moments + rng.integers(0, 5 * DAY, count)).cast(pa.timestamp("us")),
    }
    arrays = [_with_nulls(rng, values[name], NULL_SHARE.get(name, 0)) for name in SCHEMA.names]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def unit_prices(rng: np.random.Generator, product: np.ndarray) -> pa.Array:
    """List prices, up to a fifth cheaper or dearer, exact to the cent."""
    cents = np.array([price for _, _, price in PRODUCTS])[product]
    cents = cents + (cents * (rng.random(len(product)) - 0.5) * 0.4).astype(np.int64)
    exact = pc.multiply(pa.array(cents).cast(pa.decimal128(19, 0)), pa.scalar(Decimal("0.01")))
    return exact.cast(pa.decimal128(12, 2))


def notes(rng: np.random.Generator, count: int) -> pa.Array:
    return _pick(NOTES, rng.integers(0, len(NOTES), count))


def _pick(choices: Any, places: np.ndarray) -> pa.Array:
    return pa.array(choices, pa.string()).take(pa.array(places))


def _with_nulls(rng: np.random.Generator, values: pa.Array, share: float) -> pa.Array:
    if not share:
        return values
    return pc.if_else(pa.array(rng.random(len(values)) < share), pa.scalar(None, values.type), values)


def microseconds(day: dt.date) -> int:
    return (day - dt.date(1970, 1, 1)).days * DAY
