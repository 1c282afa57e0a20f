"""What a Snowflake column becomes in an extract: its Hyper type, its Arrow type and its words in a .tds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

_TYPE_NAMES = {
    "NUMBER": "FIXED",
    "DECIMAL": "FIXED",
    "NUMERIC": "FIXED",
    "INT": "FIXED",
    "INTEGER": "FIXED",
    "BIGINT": "FIXED",
    "SMALLINT": "FIXED",
    "FLOAT": "REAL",
    "DOUBLE": "REAL",
    "VARCHAR": "TEXT",
    "STRING": "TEXT",
    "CHAR": "TEXT",
    "DATETIME": "TIMESTAMP_NTZ",
    "TIMESTAMP": "TIMESTAMP_NTZ",
}
# The order of the ids Snowflake sends in a result's description.
_FAMILIES_BY_ID = (
    "FIXED",
    "REAL",
    "TEXT",
    "DATE",
    "TIMESTAMP_NTZ",
    "VARIANT",
    "TIMESTAMP_LTZ",
    "TIMESTAMP_TZ",
    "TIMESTAMP_NTZ",
    "OBJECT",
    "ARRAY",
    "BINARY",
    "TIME",
    "BOOLEAN",
)
_DECLARED = re.compile(r"\s*([A-Za-z_]+)\s*(?:\(\s*(\d+)\s*(?:,\s*(\d+)\s*)?\))?\s*")


@dataclass(frozen=True)
class SnowflakeType:
    """A column's type as Snowflake's results describe it."""

    family: str
    precision: int = 38
    scale: int = 0

    @staticmethod
    def parse(declared: str) -> SnowflakeType:
        """`NUMBER(10,2)`, `VARCHAR`, `TIMESTAMP_NTZ(9)` and their synonyms."""
        match = _DECLARED.fullmatch(declared)
        if not match:
            raise ValueError(f"not a Snowflake type: {declared!r}")
        name = match[1].upper()
        return SnowflakeType(_TYPE_NAMES.get(name, name), int(match[2] or 38), int(match[3] or 0))

    @staticmethod
    def from_description(column: Any) -> SnowflakeType:
        """The type of one entry of a cursor's description."""
        type_code = column.type_code
        family = _FAMILIES_BY_ID[type_code] if 0 <= type_code < len(_FAMILIES_BY_ID) else "TEXT"
        return SnowflakeType(family, column.precision or 38, column.scale or 0)


@dataclass(frozen=True)
class ExtractType:
    """One column type of an extract: in Hyper's SQL, in Arrow, and in the words and numbers of a .tds."""

    hyper: str
    arrow: Any
    local_type: str
    remote_type: int
    live_remote_type: int
    sql_type: str
    aggregation: str
    role: str
    measure_type: str


_TEXT = ExtractType("TEXT", pa.string(), "string", 129, 129, "SQL_VARCHAR", "Count", "dimension", "nominal")
_INTEGER = ExtractType("BIGINT", pa.int64(), "integer", 20, 131, "SQL_DECIMAL", "Sum", "measure", "quantitative")
_DOUBLE = ExtractType("DOUBLE PRECISION", pa.float64(), "real", 5, 5, "SQL_DOUBLE", "Sum", "measure", "quantitative")
_TIMESTAMP = ExtractType(
    "TIMESTAMP", pa.timestamp("us"), "datetime", 135, 7, "SQL_TYPE_TIMESTAMP", "Year", "dimension", "ordinal"
)
_BY_FAMILY = {
    "REAL": _DOUBLE,
    "TEXT": _TEXT,
    "VARIANT": _TEXT,
    "OBJECT": _TEXT,
    "ARRAY": _TEXT,
    "BOOLEAN": ExtractType("BOOL", pa.bool_(), "boolean", 11, 11, "SQL_BIT", "Count", "dimension", "nominal"),
    "DATE": ExtractType("DATE", pa.date32(), "date", 133, 7, "SQL_TYPE_DATE", "Year", "dimension", "ordinal"),
    "TIME": ExtractType("TIME", pa.time64("us"), "datetime", 134, 7, "SQL_TYPE_TIME", "Year", "dimension", "ordinal"),
    "TIMESTAMP_NTZ": _TIMESTAMP,
    "TIMESTAMP_LTZ": _TIMESTAMP,
    "TIMESTAMP_TZ": _TIMESTAMP,
}


def extract_type(source: SnowflakeType) -> ExtractType | None:
    """The extract's type for a source column; None for one that an extract leaves out (binary)."""
    if source.family != "FIXED":
        return _BY_FAMILY.get(source.family)
    if source.scale == 0:
        return _INTEGER
    # An extract file of the default version holds at most 18 digits.
    if source.precision > 18:
        return _DOUBLE
    return ExtractType(
        f"NUMERIC({source.precision},{source.scale})",
        pa.decimal128(source.precision, source.scale),
        "real",
        131,
        131,
        "SQL_DECIMAL",
        "Sum",
        "measure",
        "quantitative",
    )
