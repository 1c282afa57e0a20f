"""Snowflake expressions that fakesnow and sqlglot would translate to something else, written so that they do not."""

from __future__ import annotations

import re
from typing import Any

import sqlglot.errors
from fakesnow.params import pop_qmark_param
from sqlglot import exp
from sqlglot.dialects.snowflake import Snowflake
from sqlglot.tokens import TokenType

from tir_dagster.sandbox.warehouse.errors import SnowflakeError, unsupported
from tir_dagster.sandbox.warehouse.positions import name_positions

# Macros in the database that every session can see: the type of a date survives what Snowflake lets it survive.
SAME_TYPE = "memory.main._tir_same_type"
MACROS = f"""
CREATE MACRO {SAME_TYPE}(x DATE, result) AS CAST(result AS DATE), (x TIMESTAMP, result) AS result,
    (x TIMESTAMPTZ, result) AS result, (x VARCHAR, result) AS result
"""
_WHOLE_DAYS = ("DAY", "WEEK", "MONTH", "QUARTER", "YEAR")
_OPENING = (TokenType.L_PAREN, TokenType.L_BRACKET, TokenType.L_BRACE)
_CLOSING = (TokenType.R_PAREN, TokenType.R_BRACKET, TokenType.R_BRACE)
_AFTER_COLUMNS = (
    TokenType.FROM,
    TokenType.WHERE,
    TokenType.GROUP_BY,
    TokenType.ORDER_BY,
    TokenType.LIMIT,
    TokenType.UNION,
    TokenType.EXCEPT,
    TokenType.INTERSECT,
    TokenType.SEMICOLON,
)
DIVISION_BY_ZERO = "Division by zero"
# Elements of Snowflake's date and time formats, the longest first, and what strftime calls them.
_FORMAT = {
    "YYYY": "%Y",
    "YY": "%y",
    "MMMM": "%B",
    "MON": "%b",
    "MM": "%m",
    "DD": "%d",
    "DY": "%a",
    "HH24": "%H",
    "HH12": "%I",
    "AM": "%p",
    "PM": "%p",
    "MI": "%M",
    "SS": "%S",
    "FF3": "%g",
    "FF6": "%f",
    "TZHTZM": "%z",
}
_SPACED_OFFSET = re.compile(r"^(\d{4}-.*\d) ([+-]\d\d:?\d\d)$")
_ELEMENT = re.compile(rf"{'|'.join(_FORMAT)}|\"[^\"]*\"|[A-Z]|[^A-Z]", re.IGNORECASE)


_CORRECTED = (
    exp.ToChar,
    exp.Div,
    exp.Mod,
    exp.Select,
    exp.AutoIncrementColumnConstraint,
    exp.TimestampTrunc,
    exp.DateTrunc,
    exp.DateAdd,
    exp.Cast,
    exp.CurrentTimestamp,
    exp.CurrentDate,
    exp.Localtime,
    exp.Localtimestamp,
)


def corrected(tree: exp.Expr) -> exp.Expr:
    """The same statement, changed in place, in terms that translate to what Snowflake does."""
    if isinstance(tree, exp.Update):
        for assignment in tree.expressions:
            if isinstance(assignment, exp.EQ) and isinstance(assignment.this, exp.Column):
                assignment.this.set("table", None)
    for enclosed in list(tree.find_all(exp.Subquery)):
        if isinstance(enclosed.this, exp.Table) and isinstance(enclosed.parent, (exp.From, exp.Join)):
            # FROM (T) AS A, which DuckDB does not read.
            table = enclosed.this
            if enclosed.args.get("alias") is not None:
                table.set("alias", enclosed.args["alias"])
            enclosed.replace(table)
    if isinstance(tree, exp.Drop) and str(tree.args.get("kind")).upper() in ("TABLE", "VIEW"):
        # Nothing here depends on a table or view in a way that would keep it.
        tree.set("cascade", None)
    if not isinstance(tree, exp.Copy):
        name_positions(tree)
    for node in list(tree.find_all(*_CORRECTED)):
        _correct(node)
    return tree


def name_columns(tree: exp.Expr, sql: str) -> exp.Expr:
    """Give columns without a name their own text, as Snowflake does; DuckDB would show count_star() for COUNT(*)."""
    first = tree
    while isinstance(first, exp.SetOperation):
        first = first.this
    if isinstance(first, exp.Select):
        written = _written_columns(sql)
        texts = (
            written if len(written) == len(first.expressions) else [each.sql("snowflake") for each in first.expressions]
        )
        for column, text in zip(list(first.expressions), texts, strict=True):
            if not isinstance(column, (exp.Alias, exp.Column, exp.Star, exp.Dot)):
                column.replace(exp.alias_(column.copy(), text.upper(), quoted=True))
    return tree


def _written_columns(sql: str) -> list[str]:
    """The select list of the statement's first SELECT, as it was written."""
    tokens = Snowflake().tokenize(sql)
    depth, start = 0, None
    columns: list[str] = []
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        depth += (token.token_type in _OPENING) - (token.token_type in _CLOSING)
        if depth == 0 and token.token_type is TokenType.SELECT and start is None:
            start = following.start if following is not None else None
        elif depth == 0 and start is not None:
            ends = following is None or following.token_type in _AFTER_COLUMNS
            if ends or token.token_type is TokenType.COMMA:
                end = token.start if token.token_type is TokenType.COMMA else token.end + 1
                columns.append(sql[start:end].strip())
                start = following.start if following is not None else None
            if ends:
                break
    return columns


def bind_identifiers(tree: exp.Expr, params: Any) -> None:
    """Put the names in IDENTIFIER('…') and the bound ones of IDENTIFIER(?) into the statement, in place."""
    for call in list(tree.find_all(exp.DynamicIdentifier)):
        if isinstance(call.this, exp.Placeholder) and isinstance(params, list):
            call.set("this", exp.Literal.string(str(pop_qmark_param(params, tree, call.this))))
        if isinstance(call.this, exp.Literal) and isinstance(call.parent, exp.Table):
            named = exp.to_table(call.this.name, dialect="snowflake")
            for part in ("catalog", "db", "this"):
                call.parent.set(part, named.args.get(part))


def name_stages(copy: exp.Copy) -> None:
    """A stage in quotes, as the connector's write_pandas sends it, is the same stage without them."""
    for table in copy.find_all(exp.Table):
        if isinstance(table.this, exp.Literal) and table.this.name.startswith("@"):
            table.set("this", exp.Var(this=table.this.name))


def duckdb_text(transformed: exp.Expr) -> str:
    """The statement for DuckDB; what has no equal there is refused, where sqlglot would leave it out with a warning."""
    try:
        return str(transformed.sql(dialect="duckdb", unsupported_level=sqlglot.ErrorLevel.RAISE))
    except sqlglot.errors.UnsupportedError as error:
        raise unsupported(str(error)) from error


def _now(node: exp.Expr) -> exp.Expr:
    """The time as a call: DuckDB would take CURRENT_DATE for the column of the result that is called so."""
    now = exp.Anonymous(this="now", expressions=[])
    if isinstance(node, exp.CurrentDate):
        return exp.cast(now, "DATE")
    # A cast from a moment without a zone: DuckDB has none from one with a zone.
    return exp.cast(exp.cast(now, "DATETIME"), "TIME") if isinstance(node, exp.Localtime) else now


def _correct(node: Any) -> None:
    if isinstance(node, (exp.CurrentTimestamp, exp.CurrentDate, exp.Localtime, exp.Localtimestamp)):
        if (
            node.this is None
            and not node.args.get("sysdate")
            and node.parent
            and not node.find_ancestor(exp.ColumnDef, exp.HistoricalData)
        ):
            node.replace(_now(node))
        return
    if isinstance(node, exp.ToChar) and node.args.get("format") is not None:
        node.replace(_formatted(node))
    elif isinstance(node, (exp.Div, exp.Mod)):
        _refuse_zero(node)
    elif isinstance(node, (exp.TimestampTrunc, exp.DateTrunc, exp.DateAdd)):
        _keep_dates(node)
    elif isinstance(node, exp.Cast) and isinstance(node.this, exp.Literal) and node.to.is_type("timestamptz"):
        # DuckDB takes an offset after a space for the name of a zone.
        node.this.set("this", _SPACED_OFFSET.sub(r"\1\2", node.this.name))
    elif isinstance(node, exp.Cast) and isinstance(node.this, exp.Literal) and node.to.is_type("binary", "varbinary"):
        # A text is read as hexadecimal digits; DuckDB would take its bytes.
        if not re.fullmatch(r"([0-9a-fA-F]{2})*", node.this.name):
            raise SnowflakeError(
                100115, "22000", f"The following string is not a legal hex-encoded value: '{node.this.name}'"
            )
        node.replace(exp.Unhex(this=node.this.copy()))
    elif isinstance(node, exp.AutoIncrementColumnConstraint):
        raise unsupported("AUTOINCREMENT")
    elif isinstance(node, exp.Select) and _reads_dual(node):
        node.set("from_", None)


def _formatted(node: exp.ToChar) -> exp.Expr:
    wanted = node.args["format"]
    if not isinstance(wanted, exp.Literal) or not wanted.is_string:
        raise unsupported("TO_VARCHAR with a format that is not a literal")
    return exp.TimeToStr(this=node.this.copy(), format=exp.Literal.string(strftime_format(wanted.name)))


def strftime_format(text: str) -> str:
    """Snowflake's date and time format as strftime writes it; formats of numbers are refused."""
    parts: list[str] = []
    for found in _ELEMENT.finditer(text):
        element = found[0]
        if element.upper() in _FORMAT:
            parts.append(_FORMAT[element.upper()])
        elif element.startswith('"') and len(element) > 1:
            parts.append(element[1:-1].replace("%", "%%"))
        # T stands for itself between date and time.
        elif element.isalnum() and element.upper() != "T":
            raise unsupported(f"TO_VARCHAR with format {text!r}")
        else:
            parts.append(element.replace("%", "%%"))
    return "".join(parts)


def _keep_dates(node: Any) -> None:
    """Of a date Snowflake makes a date again, DuckDB a timestamp."""
    unit = node.args.get("unit")
    if isinstance(node.this, exp.Column) and unit is not None and unit.name.upper() in _WHOLE_DAYS:
        same = exp.Anonymous(this=SAME_TYPE, expressions=[node.this.copy(), node.copy()])
        node.replace(same)


def _refuse_zero(node: exp.Div | exp.Mod) -> None:
    """DuckDB divides by zero without complaint, and gives infinity or NULL."""
    divisor = node.expression
    plain = divisor.unnest()
    if isinstance(plain, exp.Literal) and not plain.is_string and float(plain.name) != 0:
        return
    divisor = divisor.copy()
    checked = exp.Case().when(
        exp.EQ(this=exp.paren(divisor), expression=exp.Literal.number(0)),
        exp.Anonymous(this="error", expressions=[exp.Literal.string(DIVISION_BY_ZERO)]),
    )
    node.set("expression", exp.paren(checked.else_(divisor.copy())))


def _reads_dual(node: exp.Select) -> bool:
    source = node.args.get("from_")
    table = source.this if source is not None else None
    return isinstance(table, exp.Table) and table.name.upper() == "DUAL" and not table.db
