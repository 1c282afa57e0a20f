"""Values of files as values of columns: whole arrays at once, and one by one where something does not fit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from decimal import Decimal, InvalidOperation
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tir_dagster.source.columns import Column, Kind

_BOOLEANS = {
    **dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off", "0"), False),
}
_SHOWN = 60
# Staged moments hold microseconds.
_FINER = re.compile(r"\.\d{6}\d*[1-9]")
_LONG = 18

# Which of a file's own types fit a column without reading each value; a text always may.
_FAMILIES: dict[Kind, Callable[[pa.DataType], bool]] = {
    Kind.INTEGER: lambda kind: pa.types.is_integer(kind) or pa.types.is_decimal(kind) or pa.types.is_floating(kind),
    Kind.DECIMAL: lambda kind: pa.types.is_integer(kind) or pa.types.is_decimal(kind) or pa.types.is_floating(kind),
    Kind.FLOAT: lambda kind: pa.types.is_integer(kind) or pa.types.is_decimal(kind) or pa.types.is_floating(kind),
    Kind.BOOLEAN: pa.types.is_boolean,
    Kind.TEXT: lambda _: False,
    Kind.DATE: pa.types.is_date,
    Kind.TIME: pa.types.is_time,
    Kind.TIMESTAMP: lambda kind: pa.types.is_timestamp(kind) or pa.types.is_date(kind),
    Kind.INSTANT: lambda kind: pa.types.is_timestamp(kind) or pa.types.is_date(kind),
    Kind.JSON: lambda _: False,
}


@dataclass(frozen=True)
class Wanted:
    """A column that files bring: its name there, and the table's column (or what stands for it).

    `length` is how long texts may be, `digits` how many digits of a second a moment has.
    """

    name: str
    column: Column
    length: int | None = None
    digits: int | None = None

    @property
    def arrow(self) -> pa.DataType:
        """The type in staged Parquet; what Snowflake parses itself (times, JSON) travels as text."""
        column = self.column
        if column.kind is Kind.DECIMAL or (column.kind is Kind.INTEGER and column.precision > _LONG):
            return pa.decimal128(column.precision, column.scale)
        return {
            Kind.INTEGER: pa.int64(),
            Kind.FLOAT: pa.float64(),
            Kind.BOOLEAN: pa.bool_(),
            Kind.DATE: pa.date32(),
            Kind.TIMESTAMP: pa.timestamp("us"),
            Kind.INSTANT: pa.timestamp("us", "UTC"),
        }.get(column.kind, pa.string())

    def fits(self, kind: pa.DataType) -> bool:
        """Whether a file's column of this type can hold such values at all."""
        return is_text(kind) or pa.types.is_null(kind) or _FAMILIES[self.column.kind](kind)


class Unfit(ValueError):  # noqa: N818 - never leaves this room
    """Why a value is none of the column's."""


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind))


def converted(values: pa.Array, wanted: Wanted) -> tuple[pa.Array, dict[int, str]]:
    """The values as the column's, and why some rows have none; such rows hold NULL."""
    try:
        return _at_once(values, wanted), {}
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, Unfit):
        return _one_by_one(values, wanted)


def _at_once(values: pa.Array, wanted: Wanted) -> pa.Array:
    kind = wanted.column.kind
    if kind in (Kind.TIME, Kind.JSON, Kind.BOOLEAN) and is_text(values.type):
        if values.null_count == len(values):
            return pa.nulls(len(values), wanted.arrow)
        raise Unfit("read each value")
    if pa.types.is_floating(values.type) and kind in (Kind.INTEGER, Kind.DECIMAL):
        raise Unfit("read each value")
    if kind is Kind.INSTANT and is_text(values.type):
        raise Unfit("read each value")
    made = pc.cast(values, wanted.arrow)
    _check_range(made, wanted)
    return made


def _check_range(values: pa.Array, wanted: Wanted) -> None:
    if wanted.length is not None and wanted.column.kind is Kind.TEXT:
        longest = pc.max(pc.utf8_length(values)).as_py()
        if longest is not None and longest > wanted.length:
            raise Unfit("too long")
    if wanted.column.kind is Kind.INTEGER and 0 < wanted.column.precision <= _LONG:
        bounds = pc.min_max(values).as_py()
        if any(value is not None and abs(value) >= 10**wanted.column.precision for value in bounds.values()):
            raise Unfit("too large")


def _one_by_one(values: pa.Array, wanted: Wanted) -> tuple[pa.Array, dict[int, str]]:
    read = _READERS[wanted.column.kind]
    made: list[Any] = []
    reasons: dict[int, str] = {}
    for at, value in enumerate(values.to_pylist()):
        try:
            made.append(None if value is None else read(value, wanted))
        except (Unfit, ValueError, InvalidOperation, OverflowError) as error:
            made.append(None)
            reasons[at] = _reason(value, wanted, error)
    return pa.array(made, wanted.arrow), reasons


def _reason(value: Any, wanted: Wanted, error: Exception) -> str:
    text = str(value)
    shown = repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")
    return f"{wanted.name}: {shown} {error if isinstance(error, Unfit) else f'is no {_words(wanted.column)}'}"


def _words(column: Column) -> str:
    return {
        Kind.INTEGER: "whole number",
        Kind.DECIMAL: f"number with up to {column.scale} digits after the point",
        Kind.FLOAT: "number",
        Kind.BOOLEAN: "true or false",
        Kind.TIME: "time of day",
        Kind.TIMESTAMP: "timestamp",
        Kind.INSTANT: "timestamp",
        Kind.JSON: "JSON",
    }.get(column.kind, column.kind.value)


def _decimal(value: Any, wanted: Wanted) -> Decimal:
    exact = Decimal(repr(value) if isinstance(value, float) else str(value).strip())
    if not exact.is_finite():
        raise Unfit(f"is no {_words(wanted.column)}")
    scale = Decimal(1).scaleb(-wanted.column.scale)
    try:
        rounded = exact.quantize(scale)
    except InvalidOperation:
        raise Unfit(f"has more than {wanted.column.precision} digits") from None
    if rounded != exact:
        raise Unfit(f"is no {_words(wanted.column)}")
    if abs(rounded) >= Decimal(10) ** (wanted.column.precision - wanted.column.scale):
        raise Unfit(f"has more than {wanted.column.precision} digits")
    return rounded


def _integer(value: Any, wanted: Wanted) -> Any:
    exact = _decimal(value, wanted)
    return exact if pa.types.is_decimal(wanted.arrow) else int(exact)


def _boolean(value: Any, _: Wanted) -> bool:
    found = _BOOLEANS.get(str(value).strip().lower())
    if found is None:
        raise Unfit("is neither true nor false")
    return found


def _text(value: Any, wanted: Wanted) -> str:
    text = _decoded(value) if isinstance(value, bytes) else str(value)
    if wanted.length is not None and len(text) > wanted.length:
        raise Unfit(f"is longer than {wanted.length} characters")
    return text


def _decoded(value: bytes) -> str:
    """Some writers call texts binary."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise Unfit("is no text in UTF-8") from None


def _moment(value: Any, wanted: Wanted) -> datetime:
    """A moment without a zone is one in UTC; one with a zone is shown in UTC."""
    # Not cut, as a number is not: two versions of a row could become one.
    if _FINER.search(str(value)):
        raise Unfit("has more than 6 digits of a second")
    found = value if isinstance(value, datetime) else datetime.fromisoformat(str(value).strip())
    moment = found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    return moment if wanted.column.kind is Kind.INSTANT else moment.replace(tzinfo=None)


def _date(value: Any, _: Wanted) -> date:
    return date.fromisoformat(str(value).strip())


def _time(value: Any, _: Wanted) -> str:
    text = str(value).strip()
    time.fromisoformat(text)
    return text


def _json(value: Any, _: Wanted) -> str:
    text = _decoded(value) if isinstance(value, bytes) else str(value)
    json.loads(text)
    return text


_READERS: dict[Kind, Callable[[Any, Wanted], Any]] = {
    Kind.INTEGER: _integer,
    Kind.DECIMAL: _decimal,
    Kind.FLOAT: lambda value, _: float(value),
    Kind.BOOLEAN: _boolean,
    Kind.TEXT: _text,
    Kind.DATE: _date,
    Kind.TIME: _time,
    Kind.TIMESTAMP: _moment,
    Kind.INSTANT: _moment,
    Kind.JSON: _json,
}
