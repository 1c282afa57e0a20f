"""Session parameters: those that there are, what of them is honoured here, and where they are set: account, user, session."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from zoneinfo import available_timezones

import pyarrow as pa

from tir_dagster.sandbox.warehouse.dialect import strftime_format
from tir_dagster.sandbox.warehouse.errors import SnowflakeError, unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tir_dagster.sandbox.warehouse.lake import Lake
    from tir_dagster.sandbox.warehouse.session import Session

Value = str | int | bool


@dataclass(frozen=True)
class Parameter:
    """A session parameter with Snowflake's default, and the values that Snowflake takes."""

    default: Value
    # A range of numbers, or words in upper case; None where any value of the default's type is right.
    values: range | frozenset[str] | None = None
    # With other values than the default, statements would mean something that the embedded warehouse cannot do.
    only_default: bool = False
    # A date or time format, which must be one that can be carried out.
    is_format: bool = False


def _format(default: str) -> Parameter:
    return Parameter(default, is_format=True)


def _words(default: str, *others: str, only_default: bool = False) -> Parameter:
    return Parameter(default, frozenset(word.upper() for word in (default, *others)), only_default)


_SECONDS = range(604_801)
_TIMESTAMP = "YYYY-MM-DD HH24:MI:SS.FF3"
PARAMETERS: dict[str, Parameter] = {
    "AUTOCOMMIT": Parameter(True),
    "BINARY_INPUT_FORMAT": _words("HEX", "BASE64", "UTF8", "UTF-8", only_default=True),
    "BINARY_OUTPUT_FORMAT": _words("HEX", "BASE64", only_default=True),
    "DATE_INPUT_FORMAT": _format("AUTO"),
    "DATE_OUTPUT_FORMAT": _format("YYYY-MM-DD"),
    "DEFAULT_DDL_COLLATION": Parameter("", only_default=True),
    "ERROR_ON_NONDETERMINISTIC_MERGE": Parameter(True),
    "ERROR_ON_NONDETERMINISTIC_UPDATE": Parameter(False),
    "JSON_INDENT": Parameter(2, range(17), only_default=True),
    "LOCK_TIMEOUT": Parameter(43_200, range(2**31), only_default=True),
    "MULTI_STATEMENT_COUNT": Parameter(1, range(2), only_default=True),
    "QUERY_TAG": Parameter(""),
    "QUOTED_IDENTIFIERS_IGNORE_CASE": Parameter(False),
    "ROWS_PER_RESULTSET": Parameter(0, range(2**31)),
    "SEARCH_PATH": Parameter("$current, $public", only_default=True),
    "SIMULATED_DATA_SHARING_CONSUMER": Parameter("", only_default=True),
    "STATEMENT_TIMEOUT_IN_SECONDS": Parameter(172_800, _SECONDS),
    "TIMESTAMP_DAY_IS_ALWAYS_24H": Parameter(False, only_default=True),
    "TIMESTAMP_INPUT_FORMAT": _format("AUTO"),
    "TIMESTAMP_LTZ_OUTPUT_FORMAT": Parameter(f"{_TIMESTAMP} TZHTZM", only_default=True),
    "TIMESTAMP_NTZ_OUTPUT_FORMAT": _format(_TIMESTAMP),
    "TIMESTAMP_OUTPUT_FORMAT": Parameter(f"{_TIMESTAMP} TZHTZM", only_default=True),
    "TIMESTAMP_TYPE_MAPPING": _words("TIMESTAMP_NTZ", "TIMESTAMP_LTZ", "TIMESTAMP_TZ"),
    "TIMESTAMP_TZ_OUTPUT_FORMAT": Parameter(f"{_TIMESTAMP} TZHTZM", only_default=True),
    "TIMEZONE": Parameter("UTC", frozenset(zone.upper() for zone in available_timezones())),
    "TIME_INPUT_FORMAT": _format("AUTO"),
    "TIME_OUTPUT_FORMAT": _format("HH24:MI:SS"),
    "TRANSACTION_ABORT_ON_ERROR": Parameter(False),
    "TRANSACTION_DEFAULT_ISOLATION_LEVEL": _words("READ COMMITTED"),
    "TWO_DIGIT_CENTURY_START": Parameter(1970, range(1900, 2101), only_default=True),
    "WEEK_OF_YEAR_POLICY": Parameter(0, range(2)),
    "WEEK_START": Parameter(0, range(8)),
    # What follows changes no statement here: there are no such types, clients, logs or caches.
    "ABORT_DETACHED_QUERY": Parameter(False),
    "ACTIVE_PYTHON_PROFILER": Parameter(""),
    "CSV_TIMESTAMP_FORMAT": Parameter(""),
    "ENABLE_CORTEX_ANALYST": Parameter(True),
    "ENABLE_GET_DDL_USE_DATA_TYPE_ALIAS": Parameter(False),
    "ENABLE_UNLOAD_PHYSICAL_TYPE_OPTIMIZATION": Parameter(True),
    "GEOGRAPHY_OUTPUT_FORMAT": _words("GeoJSON", "WKT", "WKB", "EWKT", "EWKB"),
    "GEOMETRY_OUTPUT_FORMAT": _words("GeoJSON", "WKT", "WKB", "EWKT", "EWKB"),
    "HYBRID_TABLE_LOCK_TIMEOUT": Parameter(3600, range(2**31)),
    "LOG_EVENT_LEVEL": Parameter("OFF"),
    "LOG_LEVEL": Parameter("OFF"),
    "METRIC_LEVEL": Parameter("NONE"),
    "NOORDER_SEQUENCE_AS_DEFAULT": Parameter(True),
    "S3_STAGE_VPCE_DNS_NAME": Parameter(""),
    "STATEMENT_QUEUED_TIMEOUT_IN_SECONDS": Parameter(0, range(2**31)),
    "STRICT_JSON_OUTPUT": Parameter(False),
    "TRACE_LEVEL": Parameter("OFF"),
    "UNSUPPORTED_DDL_ACTION": _words("IGNORE", "FAIL"),
    "USE_CACHED_RESULT": Parameter(True),
}
# Settings that a server only keeps, for the client of that name.
_OF_CLIENTS = re.compile(r"(CLIENT|JDBC|ODBC|JS|PYTHON|C_API|GO)_\w+")

_ALTER = re.compile(
    r"\s*ALTER\s+(?P<level>SESSION|ACCOUNT|USER\s+(?:IF\s+EXISTS\s+)?(?P<user>\"[^\"]+\"|\w+))\s+"
    r"(?P<verb>SET|UNSET)\s+(?P<items>.+?)\s*;?\s*",
    re.IGNORECASE | re.DOTALL,
)
_ITEM = re.compile(r"\s*,?\s*(\w+)\s*=\s*('(?:[^']|'')*'|[^\s,']+)")
_SHOW = re.compile(
    r"\s*SHOW\s+PARAMETERS(?:\s+LIKE\s+'(?P<like>[^']*)')?"
    r"(?:\s+(?:IN|FOR)\s+(?P<level>SESSION|ACCOUNT|USER(?:\s+(?P<user>\"[^\"]+\"|\w+))?))?\s*;?\s*",
    re.IGNORECASE,
)


def checked(name: str, value: Any) -> Value:
    """The value in the parameter's own type; a name or value that there is not, or not here, is refused."""
    name = name.upper()
    if (known := PARAMETERS.get(name)) is None:
        if _OF_CLIENTS.fullmatch(name):
            return value if isinstance(value, (bool, int)) else str(value)
        raise SnowflakeError(1006, "22023", f"SQL compilation error:\ninvalid property '{name}' for 'SESSION'")
    typed = _typed(known, value)
    if typed is None:
        raise SnowflakeError(1008, "22023", f"SQL compilation error:\ninvalid value [{value}] for parameter '{name}'")
    if known.only_default and str(typed).upper() != str(known.default).upper():
        raise unsupported(f"{name} = {value}")
    if known.is_format and str(typed).upper() != str(known.default).upper() and str(typed).upper() != "AUTO":
        strftime_format(str(typed))
    return typed


def _typed(known: Parameter, value: Any) -> Value | None:
    text = str(value)
    if isinstance(known.default, bool):
        return {"TRUE": True, "FALSE": False}.get(text.upper())
    if isinstance(known.default, int):
        in_range = isinstance(known.values, range) and text.isdigit() and int(text) in known.values
        return int(text) if in_range else None
    return text if not isinstance(known.values, frozenset) or text.upper() in known.values else None


def login_parameters(lake: Lake, user: str, wished: Mapping[str, Any]) -> tuple[dict[str, Value], dict[str, Value]]:
    """What a new session has: defaults of the account, then of the user; and these with the client's own wishes."""
    defaults = lake.parameters("") | lake.parameters(user)
    return defaults, defaults | {str(name).upper(): checked(name, value) for name, value in wished.items()}


def run(session: Session, sql: str) -> pa.Table | None:
    """Run the statement if it sets or shows parameters, and give its answer."""
    if (shown := _SHOW.fullmatch(sql)) is not None:
        return _show(session, shown)
    if (altered := _ALTER.fullmatch(sql)) is None:
        return None
    user = altered["user"] and _user(session, altered["user"])
    for name, value in _items(altered["verb"].upper(), altered["items"]).items():
        typed = None if value is None else checked(name, value)
        if value is None and name not in PARAMETERS and not _OF_CLIENTS.fullmatch(name):
            checked(name, "")
        if altered["level"].upper() == "SESSION":
            session.set_parameter(name, typed)
        else:
            session.lake.set_parameter(user or "", name, typed)
    return pa.table({"status": ["Statement executed successfully."]})


def _items(verb: str, text: str) -> dict[str, str | None]:
    if verb == "UNSET":
        return {name.strip().upper(): None for name in re.split(r"[\s,]+", text) if name.strip()}
    if _ITEM.sub("", text).strip():
        raise SnowflakeError(1003, "42000", f"SQL compilation error:\nsyntax error: parameters in {text!r}.")
    return {
        name.upper(): value[1:-1].replace("''", "'") if value.startswith("'") else value
        for name, value in _ITEM.findall(text)
    }


def _user(session: Session, name: str) -> str:
    user = name.strip('"') if name.startswith('"') else name.upper()
    if user != session.context.user and session.lake.public_key(user) is None:
        raise SnowflakeError(2003, "02000", f"SQL compilation error:\nUser '{user}' does not exist or not authorized.")
    return user


def _show(session: Session, shown: re.Match[str]) -> pa.Table:
    account, user = session.lake.parameters(""), session.lake.parameters(session.context.user)
    level = (shown["level"] or "SESSION").split()[0].upper()
    if level == "USER" and shown["user"]:
        user = session.lake.parameters(_user(session, shown["user"]))
    values = {"ACCOUNT": account, "USER": account | user, "SESSION": session.context.parameters}[level]
    pattern = (shown["like"] or "%").upper().replace("%", "*").replace("_", "?")
    names = sorted(name for name in PARAMETERS if fnmatch.fnmatchcase(name, pattern))
    rows = [(name, values.get(name, PARAMETERS[name].default)) for name in names]

    def set_at(name: str, value: Value) -> str:
        if level == "SESSION" and value != (account | user).get(name, PARAMETERS[name].default):
            return "SESSION"
        return "USER" if level != "ACCOUNT" and name in user else "ACCOUNT" if name in account else ""

    return pa.table(
        {
            "key": pa.array(names, pa.string()),
            "value": pa.array([_text(value) for _, value in rows], pa.string()),
            "default": pa.array([_text(PARAMETERS[name].default) for name in names], pa.string()),
            "level": pa.array([set_at(name, value) for name, value in rows], pa.string()),
            "description": pa.array(["" for _ in names], pa.string()),
            "type": pa.array([_kind(PARAMETERS[name].default) for name in names], pa.string()),
        }
    )


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _kind(value: Value) -> str:
    return "BOOLEAN" if isinstance(value, bool) else "NUMBER" if isinstance(value, int) else "STRING"
