"""Features of columns and whole rows, counted and summed in the SQL of both systems. Every feature is a whole number.

Only exact arithmetic, so that both sides agree to the bit whatever the order of rows: whole numbers, and doubles below
2^53 that were scaled by powers of two. Sums, smallest and largest values tell people how a column differs; the sum over
a digest of each row tells that something differs, also where two values of a column changed places or changed by
opposite amounts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from tir_dagster.hyper.casts import DOUBLE_DIGITS, FileColumn
from tir_dagster.hyper.engine import quoted
from tir_dagster.snowflake.columns import HYPER_DECIMAL_DIGITS, Column, Kind

_WIDE = "NUMERIC(38,0)"
_TWO_53 = 2**53
# Below this many units of the last place a double still tells neighbours apart after a multiplication.
_SAFE_UNITS = 2**49
_DIGEST_DIGITS = 8
# Doubles by size (below 2 to the first) and the power of two that leaves a whole part below 2^53.
_BANDS = ((-41, 94), (-9, 62), (13, 40), (33, 20), (53, 0), (85, -32), (117, -64))
# Added before digits are cut off: no decimal of few digits lies so near to the cut that a rounded double could cross it.
_BESIDE_THE_CUT = "0.28867513459481287"
_LEADING_DIGITS = 6
# The sum over all rows of a digest of each one.
ROW_DIGEST = "digest"
# Under these names the digests of a row's texts, and of the row, are carried to where they are summed up.
_ROW = "tir_row"
_TEXT = "tir_text{}"
_NUMBERS = (Kind.INTEGER, Kind.DECIMAL, Kind.FLOAT)


@dataclass(frozen=True)
class Dialect:
    """The few expressions in which the two systems differ."""

    name: str

    def days(self, value: str) -> str:
        if self.name == "hyper":
            return f"(CAST({value} AS DATE) - DATE '1970-01-01')"
        return f"DATEDIFF('day', CAST('1970-01-01' AS DATE), {value})"

    def microseconds(self, value: str) -> str:
        """Microseconds since 1970, by the wall clock."""
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

    def digest(self, md5: str) -> str:
        """The first 32 bits of an md5. Hyper reads them from bytes, in two thirds of the time digits take."""
        if self.name == "hyper":
            raw = f"DECODE({md5}, 'hex')"
            return " + ".join(
                f"CAST(GET_BYTE({raw}, {place}) AS BIGINT) * {256 ** (3 - place)}"
                for place in range(_DIGEST_DIGITS // 2)
            )
        return " + ".join(
            f"POSITION(SUBSTR({md5}, {place}, 1) IN '123456789abcdef') * {16 ** (_DIGEST_DIGITS - place)}"
            for place in range(1, _DIGEST_DIGITS + 1)
        )


HYPER = Dialect("hyper")
SNOWFLAKE = Dialect("snowflake")


def features(
    columns: Sequence[Column], dialect: Dialect, *, stored: Mapping[str, FileColumn], loose: Collection[str] = ()
) -> dict[str, str]:
    """Each feature's name and its aggregate over what `digested` gives, in the same order for both dialects.

    Of `loose` columns only the values are counted: they may differ in the last digit each time the source is asked.
    """
    aggregates = {"rows": "COUNT(*)", ROW_DIGEST: _sum(dialect.digest(_ROW))}
    for place, column in enumerate(columns):
        name = _name(column, dialect, stored)
        aggregates[f"{column.name} nonnull"] = f"COUNT({name})"
        if column.name in loose:
            continue
        text = _TEXT.format(place)
        for feature, expression in _of_kind(column, name, stored[column.name], dialect, text=text).items():
            aggregates[f"{column.name} {feature}"] = expression
    return aggregates


def is_older_feature(name: str, columns: Sequence[Column]) -> bool:
    """Whether fingerprints had this feature before rows were digested, and numbers had a smallest and a largest value."""
    newer = {f"{column.name} {end}" for column in columns if column.kind in _NUMBERS for end in ("min", "max")}
    return name not in {ROW_DIGEST, *newer}


def digested(
    columns: Sequence[Column],
    dialect: Dialect,
    *,
    stored: Mapping[str, FileColumn],
    source: str,
    slice_name: str,
    where: str = "",
    loose: Collection[str] = (),
) -> str:
    """A SELECT of the column `slice_name` and all columns of `source`, with the digests that `features` sums up."""
    names = [_name(column, dialect, stored) for column in columns]
    firm = [column.kind is Kind.TEXT and column.name not in loose for column in columns]
    texts = [_TEXT.format(place) for place, is_text in enumerate(firm) if is_text]
    digests = [f"MD5({names[place]}) AS {_TEXT.format(place)}" for place, is_text in enumerate(firm) if is_text]
    carried = ", ".join([slice_name, *names])
    inner = f"SELECT {', '.join([carried, *digests])} FROM {source}{where}"
    row = " || '|' || ".join(row_texts(columns, dialect, stored=stored, loose=loose))
    digest = f"MD5({row})" if row else "MD5('')"
    return f"SELECT {', '.join([carried, *texts])}, {digest} AS {_ROW} FROM ({inner}) AS texts"


def row_texts(
    columns: Sequence[Column], dialect: Dialect, *, stored: Mapping[str, FileColumn], loose: Collection[str] = ()
) -> list[str]:
    """The values of the columns that are not loose, each as a text that both systems write in the same way; '-' for NULL."""
    return [
        f"COALESCE({_in_row(column, _name(column, dialect, stored), stored[column.name], dialect, text=_TEXT.format(place))}, '-')"
        for place, column in enumerate(columns)
        if column.name not in loose
    ]


def row_digest_sql(dialect: Dialect) -> str:
    """The digest of a row that `digested` gives, as a whole number."""
    return f"CAST({dialect.digest(_ROW)} AS {_WIDE})"


def _name(column: Column, dialect: Dialect, stored: Mapping[str, FileColumn]) -> str:
    return quoted(stored[column.name].name if dialect is HYPER else column.name)


def _of_kind(column: Column, name: str, stored: FileColumn, dialect: Dialect, *, text: str) -> dict[str, str]:
    match column.kind:
        case Kind.BOOLEAN:
            return {"true": _count(name)}
        case Kind.TEXT:
            return {"letters": _sum(f"LENGTH({name})"), "digest": _sum(dialect.digest(text))}
        case Kind.DECIMAL:
            return _decimal(column, name)
        case Kind.FLOAT:
            return _float(name)
        case Kind.JSON:
            # Two writers of the same JSON need not agree on its text.
            return {}
        case _:
            return _spread(_whole(column, name, stored, dialect))


def _in_row(column: Column, name: str, stored: FileColumn, dialect: Dialect, *, text: str) -> str:
    """The value as a text that is the same in both systems, and NULL where there is none."""
    match column.kind:
        case Kind.TEXT:
            return text
        case Kind.BOOLEAN:
            return f"CASE WHEN {name} THEN '1' WHEN NOT {name} THEN '0' END"
        case Kind.JSON:
            return f"CASE WHEN {name} IS NOT NULL THEN 'json' END"
        case Kind.DECIMAL:
            return _decimal_text(column, name)
        case Kind.FLOAT:
            return _float_text(name)
        case Kind.INTEGER:
            # An extract holds 64 bits, the source may hold more.
            return _text(name) if dialect is HYPER else _text(name, _WIDE)
        case _:
            return _text(_whole(column, name, stored, dialect))


def _whole(column: Column, name: str, stored: FileColumn, dialect: Dialect) -> str:
    """Integers, dates and times as whole numbers."""
    match column.kind:
        case Kind.DATE:
            return dialect.days(name)
        case Kind.TIME:
            # An extract may hold times as text.
            value = f"CAST(SUBSTR({name}, 1, 15) AS TIME)" if stored.type == "TEXT" and dialect is HYPER else name
            return dialect.time_of_day(value)
        case Kind.TIMESTAMP:
            return dialect.microseconds(name)
        case Kind.INSTANT:
            return dialect.microseconds(dialect.utc(name, stored))
        case _:
            return f"CAST({name} AS {_WIDE})"


def _sum(value: str) -> str:
    """A sum of whole numbers; Hyper's own sum of BIGINT overflows."""
    return f"SUM(CAST({value} AS {_WIDE}))"


def _text(whole: str, fitting: str = "BIGINT") -> str:
    """A whole number as text; Hyper writes 64 bits in a fraction of the time that 128 take."""
    return f"CAST(CAST({whole} AS {fitting}) AS VARCHAR)"


def _count(condition: str) -> str:
    return f"SUM(CASE WHEN {condition} THEN 1 ELSE 0 END)"


def _spread(value: str) -> dict[str, str]:
    return {"min": f"MIN({value})", "max": f"MAX({value})", "sum": _sum(value)}


def _decimal(column: Column, name: str) -> dict[str, str]:
    """Whole units of the last decimal place.

    An extract holds wide decimals as doubles. Rounded to their own decimal places they are whole units again, up to
    the size at which a double loses units; larger values are only counted.
    """
    units, small = _units(column, name)
    spread = {"sum": f"SUM({units})", "min": f"MIN({units})", "max": f"MAX({units})"}
    return spread if small is None else {**spread, "large": _count(f"NOT {small}")}


def _units(column: Column, name: str) -> tuple[str, str | None]:
    """The whole units, and the condition under which a double holds them all; None where it always does."""
    value, factor = name, str(10**column.scale)
    if column.scale > HYPER_DECIMAL_DIGITS:
        # 10^19 is no integer of Hyper, and Snowflake's product would overflow.
        value, factor = _double(name), _ten(column.scale)
    small = None if column.precision <= DOUBLE_DIGITS else f"ABS({value}) < {_limit(column):f}"
    # Chosen before it is multiplied: an engine may compute all branches, and a product too large would be an error.
    bounded = value if small is None else f"CASE WHEN {small} THEN {value} END"
    return f"CAST(ROUND({bounded} * {factor}) AS {_WIDE})", small


def _limit(column: Column) -> Decimal:
    return Decimal(_SAFE_UNITS).scaleb(-column.scale)


def _decimal_text(column: Column, name: str) -> str:
    """The units; or the leading digits of what a double does not hold to the last one, and its power of ten."""
    units, small = _units(column, name)
    if small is None:
        return _text(units)
    value = _double(name)
    powers = range(_limit(column).adjusted(), column.precision - column.scale + 1)
    size = " ".join(f"WHEN ABS({value}) < {_ten(power + 1)} THEN '{power}'" for power in powers)
    scale = " ".join(
        f"WHEN ABS({value}) < {_ten(power + 1)} THEN {_ten(_LEADING_DIGITS - 1 - power)}" for power in powers
    )
    leading = _text(f"FLOOR({value} * CASE {scale} END + {_double(_BESIDE_THE_CUT)})")
    return f"CASE WHEN {small} THEN {_text(units)} ELSE CASE {size} END || ' ' || {leading} END"


def _ten(power: int) -> str:
    return f"CAST('1e{power}' AS DOUBLE PRECISION)"


def _double(value: str) -> str:
    return f"CAST({value} AS DOUBLE PRECISION)"


def _float(name: str) -> dict[str, str]:
    """Whole parts after a scaling by a power of two, chosen by size so that each stays exact below 2^53."""
    bands = " ".join(
        f"WHEN ABS({name}) < {2.0**below} THEN {2**power}" for below, power in ((-9, 62), (13, 40), (33, 20))
    )
    scale = f"CASE {bands} ELSE 1 END"
    whole = f"CAST(FLOOR({name} * CAST({scale} AS DOUBLE PRECISION)) AS {_WIDE})"
    floor = f"CAST(FLOOR(CASE WHEN ABS({name}) < {_TWO_53} THEN {name} END) AS {_WIDE})"
    return {
        "sum": f"SUM(CASE WHEN ABS({name}) < {_TWO_53} THEN {whole} END)",
        "min": f"MIN({floor})",
        "max": f"MAX({floor})",
        "nan": _count(_is_nan(name)),
        "large": _count(f"{name} >= {_TWO_53} AND NOT {_is_nan(name)}"),
        "large negative": _count(f"{name} <= -{_TWO_53}"),
    }


def _is_nan(name: str) -> str:
    return f"{name} = CAST('NaN' AS DOUBLE PRECISION)"


def _float_text(name: str) -> str:
    """All digits of what is neither nearer to zero than 2^-94 nor beyond 2^117; of zero, one without a sign."""
    size = " ".join(f"WHEN ABS({name}) < {_two(below)} THEN '{power}'" for below, power in _BANDS)
    special = f"WHEN {_is_nan(name)} THEN 'nan' WHEN {name} > 0 THEN 'large' WHEN {name} < 0 THEN '-large'"
    scale = " ".join(f"WHEN ABS({name}) < {_two(below)} THEN {_two(power)}" for below, power in _BANDS)
    bounded = f"CASE WHEN ABS({name}) < {_two(_BANDS[-1][0])} THEN {name} ELSE 0 END"
    return f"CASE {size} {special} END || ' ' || {_text(f'FLOOR({bounded} * CASE {scale} ELSE 0 END)')}"


def _two(power: int) -> str:
    """A power of two as text: a driver or a parser may read a long literal as a decimal."""
    return f"CAST('{2.0**power!r}' AS DOUBLE PRECISION)"
