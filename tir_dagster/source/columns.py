"""Column types across Snowflake, Spark, Parquet and Hyper: the one table that knows them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from tir_dagster.errors import SourceError

# Hyper's default file version holds decimals up to this precision; wider ones become floats, as in Tableau itself.
HYPER_DECIMAL_DIGITS = 18


class Kind(Enum):
    """What a column holds, whatever the system calls it."""

    INTEGER = "integer"
    DECIMAL = "decimal"
    FLOAT = "float"
    BOOLEAN = "boolean"
    TEXT = "text"
    DATE = "date"
    TIME = "time"
    TIMESTAMP = "timestamp"  # without a zone
    INSTANT = "instant"  # with a zone: a moment, shown in UTC
    JSON = "json"


_KINDS = {
    "NUMBER": Kind.INTEGER,
    "FLOAT": Kind.FLOAT,
    "REAL": Kind.FLOAT,
    "DOUBLE": Kind.FLOAT,
    "BOOLEAN": Kind.BOOLEAN,
    "VARCHAR": Kind.TEXT,
    "TEXT": Kind.TEXT,
    "STRING": Kind.TEXT,
    "CHAR": Kind.TEXT,
    "DATE": Kind.DATE,
    "TIME": Kind.TIME,
    "TIMESTAMP_NTZ": Kind.TIMESTAMP,
    "TIMESTAMP_LTZ": Kind.INSTANT,
    "TIMESTAMP_TZ": Kind.INSTANT,
    "VARIANT": Kind.JSON,
    "OBJECT": Kind.JSON,
    "ARRAY": Kind.JSON,
}

# Spark has no time of day that Parquet and Hyper share, and no JSON: both travel as text.
_SPARK = {
    Kind.INTEGER: "bigint",
    Kind.FLOAT: "double",
    Kind.BOOLEAN: "boolean",
    Kind.TEXT: "string",
    Kind.DATE: "date",
    Kind.TIME: "string",
    Kind.TIMESTAMP: "timestamp_ntz",
    Kind.INSTANT: "timestamp",
    Kind.JSON: "string",
}

_HYPER = {
    Kind.INTEGER: "BIGINT",
    Kind.FLOAT: "DOUBLE PRECISION",
    Kind.BOOLEAN: "BOOLEAN",
    Kind.TEXT: "TEXT",
    Kind.DATE: "DATE",
    Kind.TIME: "TIME",
    Kind.TIMESTAMP: "TIMESTAMP",
    Kind.INSTANT: "TIMESTAMP",
    Kind.JSON: "TEXT",
}

_DECLARED = re.compile(r"^([A-Z_]+)(?:\((\d+)(?:,\s*(\d+))?\))?")


@dataclass(frozen=True)
class Column:
    """A column of a Snowflake table, by its name there and its type as DESCRIBE gives it."""

    name: str
    kind: Kind
    precision: int = 0
    scale: int = 0
    nullable: bool = True

    @staticmethod
    def from_snowflake(name: str, declared: str, *, nullable: bool = True) -> Column:
        """The column for a declared type such as NUMBER(12,2); a type no extract can hold is an error."""
        found = _DECLARED.match(declared.upper())
        kind = _KINDS.get(found[1]) if found else None
        if found is None or kind is None:
            raise SourceError(
                f"Column {name} is {declared}, which a Tableau extract cannot hold. "
                "Leave it out: name the columns you want under `columns:` in the extract's spec."
            )
        precision, scale = int(found[2] or 38), int(found[3] or 0)
        if kind is Kind.INTEGER and scale:
            kind = Kind.DECIMAL
        numeric = kind in (Kind.INTEGER, Kind.DECIMAL)
        return Column(name, kind, precision if numeric else 0, scale if numeric else 0, nullable)

    @property
    def spark(self) -> str:
        """Spark's type, as a DDL string; also what staged Parquet files hold."""
        return f"decimal({self.precision},{self.scale})" if self.kind is Kind.DECIMAL else _SPARK[self.kind]

    @property
    def hyper(self) -> str:
        """Hyper's type in an extract that we create; an existing extract keeps its own."""
        if self.kind is Kind.DECIMAL:
            fits = self.precision <= HYPER_DECIMAL_DIGITS
            return f"NUMERIC({self.precision},{self.scale})" if fits else "DOUBLE PRECISION"
        return _HYPER[self.kind]
