"""Session settings that decide what our statements mean: the same in every session, whatever an account or a user has as default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Setting:
    """One session parameter, the value that our sessions have, and what another value would do."""

    name: str
    value: str | int | bool
    reason: str


_READ = "Another format refuses our dates and times in ISO form, or takes a day for a month."
_WRITTEN = "Another format changes what `TO_VARCHAR` of a date or time shows in a query."

# Snowflake's own defaults, but for TIMEZONE (America/Los_Angeles there).
SETTINGS = (
    Setting("DATE_INPUT_FORMAT", "AUTO", _READ),
    Setting("TIME_INPUT_FORMAT", "AUTO", _READ),
    Setting("TIMESTAMP_INPUT_FORMAT", "AUTO", _READ),
    Setting("TWO_DIGIT_CENTURY_START", 1970, "Another start moves years of two digits in a query to another century."),
    Setting("BINARY_INPUT_FORMAT", "HEX", "Another format reads text as other bytes in a query."),
    Setting("DATE_OUTPUT_FORMAT", "YYYY-MM-DD", _WRITTEN),
    Setting("TIME_OUTPUT_FORMAT", "HH24:MI:SS", _WRITTEN),
    Setting("TIMESTAMP_OUTPUT_FORMAT", "YYYY-MM-DD HH24:MI:SS.FF3 TZHTZM", _WRITTEN),
    Setting("TIMESTAMP_NTZ_OUTPUT_FORMAT", "YYYY-MM-DD HH24:MI:SS.FF3", _WRITTEN),
    Setting("TIMESTAMP_LTZ_OUTPUT_FORMAT", "YYYY-MM-DD HH24:MI:SS.FF3 TZHTZM", _WRITTEN),
    Setting("TIMESTAMP_TZ_OUTPUT_FORMAT", "YYYY-MM-DD HH24:MI:SS.FF3 TZHTZM", _WRITTEN),
    Setting("BINARY_OUTPUT_FORMAT", "HEX", "Another format changes the text of `BINARY` values in a query."),
    Setting("GEOGRAPHY_OUTPUT_FORMAT", "GeoJSON", "Another format changes the text of places in a query."),
    Setting("GEOMETRY_OUTPUT_FORMAT", "GeoJSON", "Another format changes the text of shapes in a query."),
    Setting(
        "JSON_INDENT", 2, "Another indent changes the text of every `VARIANT`, `OBJECT` and `ARRAY` in an extract."
    ),
    Setting("STRICT_JSON_OUTPUT", False, "Strict output changes the text of JSON that holds `undefined` or NaN."),
    Setting(
        "TIMEZONE", "UTC", "Another zone moves moments to other days and hours when they become dates or local times."
    ),
    Setting(
        "TIMESTAMP_TYPE_MAPPING",
        "TIMESTAMP_NTZ",
        "Another mapping gives `TIMESTAMP` in a query a zone, so other values.",
    ),
    Setting("TIMESTAMP_DAY_IS_ALWAYS_24H", False, "TRUE adds 24 hours for a day, also where clocks are set."),
    Setting("WEEK_START", 0, "Another start moves rows of a query that groups by week."),
    Setting("WEEK_OF_YEAR_POLICY", 0, "Another policy changes the number of a week and its year in a query."),
    Setting(
        "QUOTED_IDENTIFIERS_IGNORE_CASE",
        False,
        'TRUE reads "id" as ID: columns in small letters are missed or mixed up.',
    ),
    Setting(
        "SEARCH_PATH", "$current, $public", "Another path finds other tables and functions by the same short name."
    ),
    Setting(
        "ROWS_PER_RESULTSET", 0, "A limit cuts every result without an error: rows would be missing in the extract."
    ),
    Setting("MULTI_STATEMENT_COUNT", 1, "One request is one statement."),
    Setting("AUTOCOMMIT", True, "FALSE loses what a load records outside of its transaction."),
    Setting("TRANSACTION_ABORT_ON_ERROR", False, "TRUE ends a load's transaction under the statements that follow."),
    Setting("ERROR_ON_NONDETERMINISTIC_MERGE", True, "FALSE merges any one of several rows of a key."),
    Setting(
        "ERROR_ON_NONDETERMINISTIC_UPDATE", False, "Loads update by MERGE only: Snowflake's default, for one meaning."
    ),
)

# How values are written, where a query turns them into text: a session without one of these gives no wrong rows.
OPTIONAL = frozenset(
    setting.name
    for setting in SETTINGS
    if setting.name.endswith("_OUTPUT_FORMAT") or setting.name == "STRICT_JSON_OUTPUT"
)

# Where a query counts in weeks, whoever writes it may choose; everything else has one right value.
_BY_CHOICE = frozenset({"WEEK_START", "WEEK_OF_YEAR_POLICY"})
_DECIDED = frozenset(setting.name for setting in SETTINGS) - _BY_CHOICE


def own_choices(parameters: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The session parameters of a connection that stay as a user gives them: the week, and all that change no statement's meaning."""
    chosen = {str(name).upper(): value for name, value in parameters.items()}
    return tuple(sorted((name, value) for name, value in chosen.items() if name not in _DECIDED | {"QUERY_TAG"}))


def session_parameters(query_tag: str, choices: tuple[tuple[str, Any], ...] = ()) -> dict[str, Any]:
    """What the login sends, so that it costs no statement."""
    return {**{setting.name: setting.value for setting in SETTINGS}, **dict(choices), "QUERY_TAG": query_tag}
