"""Conversion of values in files to values of columns: whole arrays at once, or one by one if some do not fit."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from decimal import Context, Decimal, InvalidOperation
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.compute as pc

from tir_dagster.snowflake.columns import Column, Kind

_BOOLEANS = {
    **dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off", "0"), False),
}
_SHOWN = 60
# Staged moments hold microseconds.
_DIGITS_OF_SECOND = 6
_EDGES = (datetime(1, 1, 1, tzinfo=UTC), datetime.max.replace(tzinfo=UTC))
_SECOND_FRACTION = re.compile(r"\.([0-9]+)")
_LONG = 18
# Decimals have up to 38 digits; Python's own context cuts after 28.
_EXACT = Context(prec=80)
_BLANKS = " \t\r\n"

# The accepted texts of each kind of value. Python and Arrow each accept more: 1_000, other scripts' digits, 0x1F; and an
# epoch of 13 digits as a moment of the year 1701. Both regex engines know these patterns.
_NUMBER = r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_NOT_FINITE = r"[+-]?(?i:nan|inf|infinity)"
_DAY = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
_HOUR, _SIXTY = r"(?:[01][0-9]|2[0-3])", r"[0-5][0-9]"
_ZONE = r"(?:[Zz]|[+-][0-9]{2}(?::?[0-9]{2})?)?"
_MOMENT = rf"{_DAY}|(?:{_DAY}|[0-9]{{8}})[Tt ]{_HOUR}(?::?{_SIXTY}(?::?{_SIXTY}(?:\.[0-9]+)?)?)?{_ZONE}"
_WRITTEN: dict[Kind, str] = {
    Kind.INTEGER: _NUMBER,
    Kind.DECIMAL: _NUMBER,
    Kind.FLOAT: f"{_NUMBER}|{_NOT_FINITE}",
    Kind.DATE: rf"{_DAY}|[0-9]{{8}}",
    Kind.TIME: rf"{_HOUR}:{_SIXTY}(?::{_SIXTY}(?:\.[0-9]+)?)?",
    Kind.TIMESTAMP: _MOMENT,
    Kind.INSTANT: _MOMENT,
}
# Only these JSON escapes can produce characters that no table stores: half of a surrogate pair, and NUL.
_SUSPECT_ESCAPE = re.compile(r"\\u(?:0000|[dD][89a-fA-F])")

# Which types of a file's columns fit a column of this kind, besides text. A text or JSON column takes all of them.
_NUMBERS = (pa.types.is_integer, pa.types.is_decimal, pa.types.is_floating)
_MOMENTS = (pa.types.is_timestamp, pa.types.is_date)
_FAMILIES: dict[Kind, tuple[Callable[[pa.DataType], bool], ...]] = {
    **dict.fromkeys((Kind.INTEGER, Kind.DECIMAL, Kind.FLOAT), _NUMBERS),
    **dict.fromkeys((Kind.TIMESTAMP, Kind.INSTANT), _MOMENTS),
    Kind.BOOLEAN: (pa.types.is_boolean,),
    Kind.DATE: (pa.types.is_date,),
    Kind.TIME: (pa.types.is_time,),
}


@dataclass(frozen=True)
class LoadColumn:
    """A column of the files: its name there, and the table's column (or a stand-in if the table has none).

    `length` is the longest text, `digits` the number of digits of a second in a moment or a time of day.
    """

    name: str
    column: Column
    length: int | None = None
    digits: int | None = None

    @property
    def arrow(self) -> pa.DataType:
        """The type in staged Parquet; values that Snowflake parses itself (times, JSON) are text."""
        table_column = self.column
        if table_column.kind is Kind.DECIMAL or (table_column.kind is Kind.INTEGER and table_column.precision > _LONG):
            return pa.decimal128(table_column.precision, table_column.scale)
        return {
            Kind.INTEGER: pa.int64(),
            Kind.FLOAT: pa.float64(),
            Kind.BOOLEAN: pa.bool_(),
            Kind.DATE: pa.date32(),
            Kind.TIMESTAMP: pa.timestamp("us"),
            Kind.INSTANT: pa.timestamp("us", "UTC"),
        }.get(table_column.kind, pa.string())

    @property
    def second_digits(self) -> int:
        """How many digits of a second a value may have: as many as the column keeps and a staged moment holds."""
        return _DIGITS_OF_SECOND if self.digits is None else min(self.digits, _DIGITS_OF_SECOND)

    def fits(self, kind: pa.DataType) -> bool:
        """Whether a file's column of this type can hold such values at all."""
        if self.takes_any_text or is_text(kind) or pa.types.is_null(kind):
            return True
        return any(is_member(kind) for is_member in _FAMILIES[self.column.kind])

    @property
    def takes_any_text(self) -> bool:
        """Whether the column takes every value as text."""
        return self.column.kind in (Kind.TEXT, Kind.JSON)


class UnfitValueError(ValueError):
    """A value does not fit its column; the message is the reason."""


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind))


def is_storable(text: str) -> bool:
    """Whether a table can hold the text: no lone surrogates (bytes that are no UTF-8 are read as such), no NUL."""
    return "\0" not in text and (text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text))


def converted(values: pa.Array, column: LoadColumn) -> tuple[pa.Array, dict[int, str]]:
    """Return the converted values, and the reasons of rows whose value does not fit; these hold NULL."""
    if column.column.kind is Kind.TIME and pa.types.is_time(values.type):
        values = pc.cast(values, pa.string())
    try:
        result = _at_once(values, column)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        result = None
    return _one_by_one(values, column) if result is None else (result, {})


def _at_once(values: pa.Array, column: LoadColumn) -> pa.Array | None:
    """Return the converted values; None if some may not fit, or Arrow reads them otherwise than documented."""
    kind, text = column.column.kind, is_text(values.type)
    if text and kind in (Kind.TIME, Kind.JSON, Kind.BOOLEAN, Kind.INSTANT):
        return pa.nulls(len(values), column.arrow) if values.null_count == len(values) else None
    if pa.types.is_floating(values.type) and kind in (Kind.INTEGER, Kind.DECIMAL):
        return None
    if text and kind in _WRITTEN:
        written = pc.match_substring_regex(values, f"^(?:{_WRITTEN[kind]})$")
        if pc.any(pc.invert(written)).as_py():
            return None
    result = pc.cast(values, column.arrow)
    return result if _fits(result, column) else None


def _fits(values: pa.Array, column: LoadColumn) -> bool:
    """Whether the column holds all values of its Arrow type: Arrow's types hold more."""
    kind, precision = column.column.kind, column.column.precision
    if kind is Kind.TEXT:
        longest = pc.max(pc.utf8_length(values)).as_py() or 0
        has_nul = pc.any(pc.match_substring(values, "\0")).as_py()
        return not has_nul and (column.length is None or longest <= column.length)
    if kind is Kind.INTEGER and 0 < precision <= _LONG:
        return all(abs(bound or 0) < 10**precision for bound in pc.min_max(values).as_py().values())
    if kind is Kind.FLOAT:
        # Infinity may come from digits that are too large.
        return not pc.any(pc.is_inf(values)).as_py()
    if kind not in (Kind.DATE, Kind.TIMESTAMP, Kind.INSTANT):
        return True
    # The years 1 to 9999, as in Python and Snowflake, and not more exact than the column.
    is_date = kind is Kind.DATE
    lowest, highest = (pa.scalar(edge.date() if is_date else edge, column.arrow) for edge in _EDGES)
    if pc.any(pc.or_(pc.less(values, lowest), pc.greater(values, highest))).as_py():
        return False
    unit = 10 ** (_DIGITS_OF_SECOND - column.second_digits)
    if is_date or unit == 1:
        return True
    counts = pc.cast(values, pa.int64())
    return not pc.any(pc.not_equal(pc.multiply(pc.divide(counts, unit), unit), counts)).as_py()


def _one_by_one(values: pa.Array, column: LoadColumn) -> tuple[pa.Array, dict[int, str]]:
    results: list[Any] = []
    reasons: dict[int, str] = {}
    for at, scalar in enumerate(values):
        try:
            # Arrow holds moments that Python does not.
            value = scalar.as_py()
            results.append(None if value is None else _read(value, column))
        except (ValueError, InvalidOperation, OverflowError, RecursionError) as error:
            results.append(None)
            reasons[at] = _reason(scalar, column, error)
    return pa.array(results, column.arrow), reasons


def _read(value: Any, column: LoadColumn) -> Any:
    kind = column.column.kind
    if isinstance(value, bytes):
        value = _decoded(value)
    if isinstance(value, str) and kind in _WRITTEN:
        value = value.strip(_BLANKS)
        if not re.fullmatch(_WRITTEN[kind], value):
            raise UnfitValueError(f"is no {_words(column.column)}")
    return _READERS[kind](value, column)


def _reason(scalar: pa.Scalar, column: LoadColumn, error: Exception) -> str:
    try:
        text = str(scalar.as_py())
    except (ValueError, OverflowError):
        text = f"{scalar.value} as {scalar.type}"
    shown = repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")
    return f"{column.name}: {shown} {error if isinstance(error, UnfitValueError) else f'is no {_words(column.column)}'}"


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


def _decimal(value: Any, column: LoadColumn) -> Decimal:
    exact = Decimal(repr(value) if isinstance(value, float) else str(value))
    if not exact.is_finite():
        raise UnfitValueError(f"is no {_words(column.column)}")
    scale = Decimal(1).scaleb(-column.column.scale)
    try:
        rounded = exact.quantize(scale, context=_EXACT)
    except InvalidOperation:
        raise UnfitValueError(f"has more than {column.column.precision} digits") from None
    if rounded != exact:
        raise UnfitValueError(f"is no {_words(column.column)}")
    if abs(rounded) >= Decimal(10) ** (column.column.precision - column.column.scale):
        raise UnfitValueError(f"has more than {column.column.precision} digits")
    return rounded


def _integer(value: Any, column: LoadColumn) -> Any:
    exact = _decimal(value, column)
    return exact if pa.types.is_decimal(column.arrow) else int(exact)


def _float(value: Any, _: LoadColumn) -> float:
    number = float(value)
    # Only a text for infinity may give infinity, not a number that is too large.
    if math.isinf(number) and not (isinstance(value, float) or re.fullmatch(_NOT_FINITE, str(value))):
        raise UnfitValueError("is too large for a FLOAT")
    return number


def _boolean(value: Any, _: LoadColumn) -> bool:
    truth = _BOOLEANS.get(str(value).strip().lower())
    if truth is None:
        raise UnfitValueError("is neither true nor false")
    return truth


def _text(value: Any, column: LoadColumn) -> str:
    text = str(value)
    if not is_storable(text):
        raise UnfitValueError("has a NUL character")
    if column.length is not None and len(text) > column.length:
        raise UnfitValueError(f"is longer than {column.length} characters")
    return text


def _decoded(value: bytes) -> str:
    """Decode bytes as text: some writers store texts as binary."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise UnfitValueError("is no text in UTF-8") from None


def _check_fraction(value: Any, column: LoadColumn) -> None:
    """Raise if the value has more digits of a second than the column: cutting could make two versions equal."""
    fraction = _SECOND_FRACTION.search(str(value))
    if fraction and len(fraction[1].rstrip("0")) > column.second_digits:
        raise UnfitValueError(f"has more than {column.second_digits} digits of a second")


def _moment(value: Any, column: LoadColumn) -> datetime:
    """Return the moment in UTC; a moment without a zone is in UTC already."""
    _check_fraction(value, column)
    parsed = value if isinstance(value, datetime) else datetime.fromisoformat(str(value).upper())
    moment = parsed.replace(tzinfo=UTC) if parsed.tzinfo is None else parsed.astimezone(UTC)
    return moment if column.column.kind is Kind.INSTANT else moment.replace(tzinfo=None)


def _date(value: Any, _: LoadColumn) -> date:
    return date.fromisoformat(str(value))


def _time(value: Any, column: LoadColumn) -> str:
    """Return the time of day in one standard text: equal keys must be equal texts."""
    _check_fraction(value, column)
    return time.fromisoformat(str(value)).isoformat()


def _json(value: Any, _: LoadColumn) -> str:
    text = str(value)
    for number in _parts(parsed_json(text), Digits):
        if math.isinf(float(number)):
            raise UnfitValueError(f"has the number {number[:_SHOWN]}, which is too large")
    return text


# JSON


class Digits(str):
    """A number in JSON, as it is written there."""

    __slots__ = ()


def parsed_json(text: str) -> Any:
    """Parse a JSON text, numbers as `Digits`; raise ValueError or RecursionError if no warehouse accepts it."""
    value = json.loads(
        text, parse_float=Digits, parse_int=Digits, parse_constant=_no_constant, object_pairs_hook=_object
    )
    if _SUSPECT_ESCAPE.search(text):
        for part in _parts(value, str):
            if not is_storable(part):
                raise UnfitValueError(
                    "has a NUL character" if "\0" in part else "has half a character (a lone surrogate)"
                )
    return value


def json_text(value: Any) -> str:
    """Return the JSON text of a parsed value, each number as it was written."""
    if isinstance(value, Digits):
        return str(value)
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json_text(name)}: {json_text(part)}' for name, part in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(json_text(part) for part in value)}]"
    return json.dumps(value, ensure_ascii=False)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is none of its values")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise UnfitValueError(f"has {twice!r} twice in one object")
    return fields


def _parts(value: Any, kind: type[str]) -> Iterator[str]:
    """Yield all texts of a parsed value that are of this type, including names of fields."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _parts(name, kind)
            yield from _parts(part, kind)
    elif isinstance(value, list):
        for part in value:
            yield from _parts(part, kind)
    elif isinstance(value, kind):
        yield value


_READERS: dict[Kind, Callable[[Any, LoadColumn], Any]] = {
    Kind.INTEGER: _integer,
    Kind.DECIMAL: _decimal,
    Kind.FLOAT: _float,
    Kind.BOOLEAN: _boolean,
    Kind.TEXT: _text,
    Kind.DATE: _date,
    Kind.TIME: _time,
    Kind.TIMESTAMP: _moment,
    Kind.INSTANT: _moment,
    Kind.JSON: _json,
}
