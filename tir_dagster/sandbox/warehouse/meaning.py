"""What session parameters change in a statement: names, types, formats of dates and times, the week. In place, before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlglot import exp

from tir_dagster.sandbox.warehouse.dialect import strftime_format
from tir_dagster.sandbox.warehouse.errors import unsupported
from tir_dagster.sandbox.warehouse.parameters import PARAMETERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tir_dagster.sandbox.warehouse.parameters import Value
    from tir_dagster.sandbox.warehouse.session import Session

_PARSED = "memory.main._tir_parsed"
_WRITTEN = "memory.main._tir_written"
_WEEK = "memory.main._tir_week"
_UNLIKELY = "2000-01-01"
# Text is read by the format, and other values stay; a value is written by the format of its type.
MACROS = f"""
CREATE MACRO {_PARSED}(x VARCHAR, format) AS strptime(x, format), (x DATE, format) AS x, (x TIME, format) AS x,
    (x TIMESTAMP, format) AS x, (x TIMESTAMPTZ, format) AS x, (x BIGINT, format) AS x;
CREATE MACRO {_WRITTEN}(x, date_format, time_format, moment_format) AS CASE typeof(x)
    WHEN 'DATE' THEN strftime(TRY_CAST(CAST(x AS VARCHAR) AS DATE), date_format)
    WHEN 'TIME' THEN strftime(DATE '{_UNLIKELY}' + TRY_CAST(CAST(x AS VARCHAR) AS TIME), time_format)
    WHEN 'TIMESTAMP' THEN strftime(TRY_CAST(CAST(x AS VARCHAR) AS TIMESTAMP), moment_format)
    ELSE CAST(x AS VARCHAR) END;
CREATE MACRO {_WEEK}(x DATE, days) AS CAST(date_trunc('week', x - days) AS DATE) + days,
    (x TIMESTAMP, days) AS date_trunc('week', x - to_days(days)) + to_days(days),
    (x TIMESTAMPTZ, days) AS date_trunc('week', x - to_days(days)) + to_days(days);
"""
_TYPE = exp.DataType.Type
_MOMENTS = (_TYPE.TIMESTAMP, _TYPE.TIMESTAMPNTZ, _TYPE.TIMESTAMPLTZ, _TYPE.TIMESTAMPTZ, _TYPE.DATETIME)
_MAPPED = {"TIMESTAMP_LTZ": _TYPE.TIMESTAMPLTZ, "TIMESTAMP_TZ": _TYPE.TIMESTAMPTZ}
_TEXTS = (_TYPE.VARCHAR, _TYPE.TEXT, _TYPE.CHAR, _TYPE.NVARCHAR, _TYPE.NCHAR)
_OF_THE_YEAR = ("WEEK", "WEEKOFYEAR", "YEAROFWEEK")
_OF_THE_WEEK = ("DAYOFWEEK", "DOW")


def apply(session: Session, tree: exp.Expr) -> None:
    """Change the statement to what it means under the session's parameters."""
    different = _different(session)
    if different.get("QUOTED_IDENTIFIERS_IGNORE_CASE"):
        for identifier in tree.find_all(exp.Identifier):
            if identifier.args.get("quoted"):
                identifier.set("this", identifier.name.upper())
    if mapped := _MAPPED.get(str(different.get("TIMESTAMP_TYPE_MAPPING"))):
        for kind in tree.find_all(exp.DataType):
            if kind.this is _TYPE.TIMESTAMP:
                kind.set("this", mapped)
    _read_by_format(tree, different)
    _write_by_format(tree, different)
    if different.keys() & {"WEEK_START", "WEEK_OF_YEAR_POLICY"}:
        _count_weeks(tree, int(session.parameter("WEEK_START")))


def _different(session: Session) -> dict[str, Value]:
    """The parameters that are not as Snowflake has them. AUTO is what there is without a format, whatever the default is."""
    return {
        name: value
        for name, value in session.context.parameters.items()
        if name in PARAMETERS and value != PARAMETERS[name].default and str(value).upper() != "AUTO"
    }


def readers(session: Session) -> dict[str, Callable[[exp.Expr], exp.Expr]]:
    """How text is read that is stored in a column of these types of DuckDB, where the session has a format for it."""
    formats = _input_formats(_different(session))
    kinds = {"DATE": _TYPE.DATE, "TIME": _TYPE.TIME, "TIMESTAMP": _TYPE.TIMESTAMP}
    kinds |= {"TIMESTAMP WITH TIME ZONE": _TYPE.TIMESTAMPTZ}

    def reader(kind: Any) -> Callable[[exp.Expr], exp.Expr]:
        text = exp.Literal.string(formats[kind])
        return lambda value: _call(_PARSED, value.copy(), text.copy())

    return {name: reader(kind) for name, kind in kinds.items() if kind in formats}


def _input_formats(different: dict[str, Value]) -> dict[Any, str]:
    return {
        kind: strftime_format(str(different[name]))
        for name, kinds in (
            ("DATE_INPUT_FORMAT", (_TYPE.DATE,)),
            ("TIME_INPUT_FORMAT", (_TYPE.TIME,)),
            ("TIMESTAMP_INPUT_FORMAT", _MOMENTS),
        )
        if name in different
        for kind in kinds
    }


def _read_by_format(tree: exp.Expr, different: dict[str, Value]) -> None:
    formats = _input_formats(different)
    for cast in list(tree.find_all(exp.Cast)) if formats else []:
        if cast.to.this in formats and not isinstance(cast.this, exp.JSONExtract):
            if isinstance(cast, exp.TryCast):
                raise unsupported("TRY_CAST under an input format of the session")
            cast.set("this", _call(_PARSED, cast.this.copy(), exp.Literal.string(formats[cast.to.this])))


def _write_by_format(tree: exp.Expr, different: dict[str, Value]) -> None:
    names = ("DATE_OUTPUT_FORMAT", "TIME_OUTPUT_FORMAT", "TIMESTAMP_NTZ_OUTPUT_FORMAT")
    if not different.keys() & set(names):
        return
    formats = [strftime_format(str(different.get(name, PARAMETERS[name].default))) for name in names]
    for node in list(tree.find_all(exp.Cast, exp.ToChar)):
        casts = isinstance(node, exp.Cast) and node.to.this in _TEXTS
        writes = isinstance(node, exp.ToChar) and node.args.get("format") is None
        if (casts or writes) and not isinstance(node.this, (exp.JSONExtract, exp.Literal, exp.Placeholder)):
            node.replace(_call(_WRITTEN, node.this.copy(), *map(exp.Literal.string, formats)))


def _count_weeks(tree: exp.Expr, start: int) -> None:
    for node in list(
        tree.find_all(
            exp.TimestampTrunc, exp.DateTrunc, exp.DayOfWeek, exp.Week, exp.Extract, exp.DateDiff, exp.LastDay
        )
    ):
        unit = (node.this if isinstance(node, exp.Extract) else node.args.get("unit") or exp.Var(this="")).name.upper()
        if isinstance(node, exp.Week) or (isinstance(node, exp.Extract) and unit in _OF_THE_YEAR):
            raise unsupported("the number of a week under WEEK_START or WEEK_OF_YEAR_POLICY")
        if isinstance(node, (exp.DateDiff, exp.LastDay)) and unit == "WEEK" and start > 1:
            raise unsupported(f"{node.sql_name()} by week under WEEK_START = {start}")
        if isinstance(node, exp.DayOfWeek) or (isinstance(node, exp.Extract) and unit in _OF_THE_WEEK):
            if start:
                day = exp.DayOfWeekIso(this=(node.expression if isinstance(node, exp.Extract) else node.this).copy())
                moved = exp.Mod(this=exp.paren(day + (7 - start)), expression=exp.Literal.number(7))
                node.replace(exp.paren(moved + 1))
        elif unit == "WEEK" and start > 1:
            node.replace(_call(_WEEK, node.this.copy(), exp.Literal.number(start - 1)))


def _call(name: str, *arguments: exp.Expr) -> exp.Anonymous:
    return exp.Anonymous(this=name, expressions=list(arguments))
