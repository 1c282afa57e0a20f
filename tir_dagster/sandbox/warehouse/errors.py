"""Snowflake's error codes: what a client sees when a statement cannot run."""

from __future__ import annotations

import re
import sqlite3
from typing import TYPE_CHECKING

import duckdb
import snowflake.connector.errors
import sqlglot.errors

if TYPE_CHECKING:
    from tir_dagster.sandbox.warehouse.names import TableName


class SnowflakeError(Exception):
    """A statement's failure, with the code and SQL state that Snowflake gives it."""

    def __init__(self, code: int, state: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.state = state
        self.message = message


def missing_object(kind: str, name: object) -> SnowflakeError:
    return SnowflakeError(2003, "42S02", f"SQL compilation error:\n{kind} '{name}' does not exist or not authorized.")


def object_exists(name: object) -> SnowflakeError:
    return SnowflakeError(2002, "42710", f"SQL compilation error:\nObject '{name}' already exists.")


def wrong_type(found: str | None, wanted: str) -> SnowflakeError:
    return SnowflakeError(
        2203,
        "02000",
        f"SQL compilation error:\nObject found is of type '{found}', not specified type '{wanted}'.",
    )


def beyond_time_travel(table: TableName) -> SnowflakeError:
    return SnowflakeError(
        707,
        "02000",
        f"Time travel data is not available for table {table.name}. The requested time is either beyond the allowed "
        "time travel period or before the object creation time.",
    )


def in_the_future(table: TableName) -> SnowflakeError:
    return SnowflakeError(707, "02000", f"Future data is not yet available for table {table.name}.")


def untracked(table: TableName) -> SnowflakeError:
    return SnowflakeError(
        91930,
        "2F003",
        "SQL compilation error:\nChange tracking is not enabled or has been missing for the time range requested on "
        f"table '{table}'.",
    )


def purged_copy() -> SnowflakeError:
    return SnowflakeError(625, "57014", "A COPY with PURGE cannot be made again: its files are gone.")


def unsupported(what: str) -> SnowflakeError:
    return SnowflakeError(2, "0A000", f"Unsupported feature '{what}' (the embedded warehouse does not have it).")


TIMED_OUT = 630


def timed_out(seconds: int) -> SnowflakeError:
    return SnowflakeError(
        TIMED_OUT, "57014", f"Statement reached its statement timeout of {seconds} second(s) and was canceled."
    )


def duplicate_row() -> SnowflakeError:
    return SnowflakeError(100090, "42P18", "Duplicate row detected during DML action")


def cancelled() -> SnowflakeError:
    return SnowflakeError(604, "57014", "SQL execution canceled")


def is_conflict(error: BaseException) -> bool:
    """Whether a commit failed because another transaction changed the same table meanwhile."""
    return isinstance(error, duckdb.TransactionException) and "conflict" in str(error).lower()


def internal_error(detail: str) -> SnowflakeError:
    return SnowflakeError(603, "XX000", f"SQL execution internal error: {detail}")


def syntax_error(detail: str) -> SnowflakeError:
    return SnowflakeError(1003, "42000", f"SQL compilation error:\n{detail}")


def from_exception(error: Exception) -> SnowflakeError:
    """The error a client gets for whatever a statement raised; never one that the connector would retry."""
    if isinstance(error, SnowflakeError):
        return error
    if isinstance(error, sqlglot.errors.ParseError):
        return syntax_error(re.sub(r"\x1b\[\d+m", "", str(error)))
    if isinstance(error, snowflake.connector.errors.ProgrammingError) and not isinstance(error.__cause__, duckdb.Error):
        return SnowflakeError(error.errno or 1, error.sqlstate or "42000", error.raw_msg or str(error))
    if isinstance(error, (sqlite3.Error, OSError)):
        return internal_error(str(error))
    cause = error.__cause__ if isinstance(error.__cause__, duckdb.Error) else error
    return _from_duckdb(cause) if isinstance(cause, duckdb.Error) else unsupported(f"{type(error).__name__}: {error}")


# DuckDB's wording, and what Snowflake says of the same mistake.
_MISSING_TABLE = re.compile(r"Table with name (?P<name>\S+) does not exist")
_MISSING_SCHEMA = re.compile(
    r"No catalog \+ schema named|Schema with name (?P<name>\S+) does not exist|(?P<catalog>\S+) does not exist!"
)
_MISSING_COLUMN = re.compile(
    r'(?:Referenced column|Referenced update column|Column with name)? ?"?(?P<name>[^"\s]+)"? (?:not found in FROM|does not exist|does not have a column)'
)
_MISSING_FUNCTION = re.compile(r"Function with name (?P<name>\S+) does not exist")
_VALUE_COUNT = re.compile(r"table \S+ has (?P<wanted>\d+) columns but (?P<given>\d+) values were supplied")
_TOO_FEW = re.compile(r'table "_TIR_STORED" has (?P<given>\d+) columns available but (?P<wanted>\d+) columns specified')
_UNPARSED = re.compile(r'Could not parse string "(?P<text>.*)" according to format specifier')
_TOO_LONG = re.compile(r"String '.*' is too long and would be truncated", re.DOTALL)
_WRONG_TYPE = re.compile(r"Existing object .* is of type (?P<found>\w+), trying to \w+ type (?P<wanted>\w+)")
_EXISTS = re.compile(r'(?:Table|View|Schema) with name "?(?P<name>[^"\s]+)"? already exists')


def _from_duckdb(error: BaseException) -> SnowflakeError:
    text = str(error)
    first_line = text.split("\n", 1)[0]
    if found := _MISSING_TABLE.search(text):
        return missing_object("Object", found["name"].strip('"'))
    if found := _MISSING_FUNCTION.search(text):
        return unsupported(f"function {found['name'].upper()}")
    if found := _VALUE_COUNT.search(text) or _TOO_FEW.search(text):
        wanted, given = found["wanted"], found["given"]
        return SnowflakeError(
            2020,
            "21S01",
            f"SQL compilation error:\nInsert value list does not match column list expecting {wanted} but got {given}",
        )
    if found := _EXISTS.search(text):
        return object_exists(found["name"])
    if found := _WRONG_TYPE.search(text):
        return wrong_type(found["found"].upper(), found["wanted"].upper())
    if isinstance(error, duckdb.BinderException) and "column" in text.lower():
        found = _MISSING_COLUMN.search(text)
        return SnowflakeError(
            904, "42000", f"SQL compilation error:\ninvalid identifier '{found['name'] if found else first_line}'"
        )
    if found := _MISSING_SCHEMA.search(text):
        return SnowflakeError(
            2043, "02000", "SQL compilation error:\nObject does not exist, or operation cannot be performed."
        )
    if "Division by zero" in first_line:
        return SnowflakeError(100051, "22012", "Division by zero")
    if isinstance(error, duckdb.ConstraintException):
        return SnowflakeError(100072, "22000", f"NULL result in a non-nullable column ({first_line})")
    if is_conflict(error):
        return SnowflakeError(
            625,
            "57014",
            f"Statement was aborted because a concurrent transaction changed the same table ({first_line})",
        )
    if isinstance(error, duckdb.InterruptException):
        return cancelled()
    if found := _UNPARSED.search(first_line):
        return SnowflakeError(100096, "22007", f"Can't parse '{found['text']}' with the session's format")
    if found := _TOO_LONG.search(text):
        return SnowflakeError(100078, "22000", found[0])
    if isinstance(error, duckdb.ConversionException):
        return SnowflakeError(100038, "22018", first_line)
    if isinstance(error, duckdb.ParserException):
        return syntax_error(first_line)
    if isinstance(error, (duckdb.IOException, duckdb.OutOfMemoryException, duckdb.TransactionException)):
        return internal_error(text)
    return SnowflakeError(1, "42000", f"SQL compilation error:\n{first_line}")
