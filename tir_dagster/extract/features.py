"""What is counted and summed of a column, by its kind, in the SQL of both systems. Every feature is a whole number.

Only exact arithmetic, so that both sides agree to the bit whatever the order of rows: whole numbers, and doubles below
2^53 that were scaled by powers of two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from tir_dagster.extract.casts import DOUBLE_DIGITS, FileColumn
from tir_dagster.extract.engine import quoted
from tir_dagster.source.columns import HYPER_DECIMAL_DIGITS, Column, Kind

_WIDE = "NUMERIC(38,0)"
_TWO_53 = 2**53
# Below this many units of the last place a double still tells neighbours apart after a multiplication.
_SAFE_UNITS = 2**49
_DIGEST_DIGITS = 8


@dataclass(frozen=True)
class Dialect:
    """The few expressions in which the two systems differ."""

    name: str

    def days(self, value: str) -> str:
        if self.name == "hyper":
            return f"(CAST({value} AS DATE) - DATE '1970-01-01')"
        return f"DATEDIFF('day', CAST('1970-01-01' AS DATE), {value})"

    def microseconds(self, value: str) -> str:
        """Since 1970, by the wall clock."""
        if self.name == "hyper":
            return f"CAST(EXTRACT(EPOCH FROM {value}) * 1000000 AS {_WIDE})"
        return f"DATEDIFF('microsecond', CAST('1970-01-01 00:00:00' AS TIMESTAMP_NTZ), {value})"

    def time_of_day(self, value: str) -> str:
        """Microseconds since midnight."""
        if self.name == "hyper":
            parts = f"EXTRACT(HOUR FROM {value}) * 3600 + EXTRACT(MINUTE FROM {value}) * 60"
            return f"CAST(({parts}) AS BIGINT) * 1000000 + EXTRACT(MICROSECONDS FROM {value})"
        return f"DATEDIFF('microsecond', CAST('00:00:00' AS TIME), {value})"

    def utc(self, value: str, stored: FileColumn) -> str:
        if self.name == "hyper":
            return f"({value} AT TIME ZONE 'UTC')" if stored.type == "TIMESTAMPTZ" else value
        return f"CAST(CONVERT_TIMEZONE('UTC', {value}) AS TIMESTAMP_NTZ)"

    def digest(self, value: str) -> str:
        """The first 32 bits of a text's md5. Hyper reads them from bytes, in two thirds of the time digits take."""
        if self.name == "hyper":
            raw = f"DECODE(MD5({value}), 'hex')"
            return " + ".join(
                f"CAST(GET_BYTE({raw}, {place}) AS BIGINT) * {256 ** (3 - place)}"
                for place in range(_DIGEST_DIGITS // 2)
            )
        return " + ".join(
            f"POSITION(SUBSTR(MD5({value}), {place}, 1) IN '123456789abcdef') * {16 ** (_DIGEST_DIGITS - place)}"
            for place in range(1, _DIGEST_DIGITS + 1)
        )


HYPER = Dialect("hyper")
SNOWFLAKE = Dialect("snowflake")


def features(
    columns: Sequence[Column], dialect: Dialect, *, stored: Mapping[str, FileColumn], digest_text: bool
) -> dict[str, str]:
    """Each feature's name and its aggregate, in the same order for both dialects."""
    found = {"rows": "COUNT(*)"}
    for column in columns:
        place = stored[column.name]
        name = quoted(place.name if dialect is HYPER else column.name)
        found[f"{column.name} nonnull"] = f"COUNT({name})"
        for feature, expression in _of_kind(column, name, place, dialect, digest_text=digest_text).items():
            found[f"{column.name} {feature}"] = expression
    return found


def _of_kind(column: Column, name: str, stored: FileColumn, dialect: Dialect, *, digest_text: bool) -> dict[str, str]:
    match column.kind:
        case Kind.INTEGER:
            return {"sum": _sum(name)}
        case Kind.DECIMAL:
            return _decimal(column, name)
        case Kind.FLOAT:
            return _float(name)
        case Kind.BOOLEAN:
            return {"true": _count(name)}
        case Kind.TEXT:
            digest = {"digest": _sum(dialect.digest(name))} if digest_text else {}
            return {"letters": _sum(f"LENGTH({name})"), **digest}
        case Kind.DATE:
            return _spread(dialect.days(name))
        case Kind.TIME:
            # An extract may hold times as text.
            value = f"CAST(SUBSTR({name}, 1, 15) AS TIME)" if stored.type == "TEXT" and dialect is HYPER else name
            return _spread(dialect.time_of_day(value))
        case Kind.TIMESTAMP:
            return _spread(dialect.microseconds(name))
        case Kind.INSTANT:
            return _spread(dialect.microseconds(dialect.utc(name, stored)))
        case Kind.JSON:
            # Two writers of the same JSON need not agree on its text.
            return {}


def _sum(value: str) -> str:
    """A sum of whole numbers; Hyper's own sum of BIGINT overflows."""
    return f"SUM(CAST({value} AS {_WIDE}))"


def _count(condition: str) -> str:
    return f"SUM(CASE WHEN {condition} THEN 1 ELSE 0 END)"


def _spread(value: str) -> dict[str, str]:
    return {"min": f"MIN({value})", "max": f"MAX({value})", "sum": _sum(value)}


def _decimal(column: Column, name: str) -> dict[str, str]:
    """Whole units of the last decimal place.

    An extract holds wide decimals as doubles. Rounded to their own decimal places they are whole units again, up to
    the size at which a double loses units; larger values are only counted.
    """
    value, factor = name, str(10**column.scale)
    if column.scale > HYPER_DECIMAL_DIGITS:
        # 10^19 is no integer of Hyper, and Snowflake's product would overflow.
        value, factor = f"CAST({name} AS DOUBLE PRECISION)", f"CAST('1e{column.scale}' AS DOUBLE PRECISION)"
    units = f"CAST(ROUND({value} * {factor}) AS {_WIDE})"
    if column.precision <= DOUBLE_DIGITS:
        return {"sum": f"SUM({units})"}
    limit = Decimal(_SAFE_UNITS).scaleb(-column.scale)
    small = f"ABS({value}) < {limit:f}"
    return {"sum": f"SUM(CASE WHEN {small} THEN {units} END)", "large": _count(f"NOT {small}")}


def _float(name: str) -> dict[str, str]:
    """Whole parts after a scaling by a power of two, chosen by size so that each stays exact below 2^53."""
    bands = " ".join(
        f"WHEN ABS({name}) < {2.0**below} THEN {2**power}" for below, power in ((-9, 62), (13, 40), (33, 20))
    )
    scale = f"CASE {bands} ELSE 1 END"
    whole = f"CAST(FLOOR({name} * CAST({scale} AS DOUBLE PRECISION)) AS {_WIDE})"
    not_a_number = f"{name} = CAST('NaN' AS DOUBLE PRECISION)"
    return {
        "sum": f"SUM(CASE WHEN ABS({name}) < {_TWO_53} THEN {whole} END)",
        "nan": _count(not_a_number),
        "large": _count(f"{name} >= {_TWO_53} AND NOT {not_a_number}"),
        "large negative": _count(f"{name} <= -{_TWO_53}"),
    }
