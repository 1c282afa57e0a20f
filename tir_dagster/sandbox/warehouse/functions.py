"""User-defined functions: there are none here, so that SHOW USER FUNCTIONS is empty and CREATE FUNCTION is refused.

Also the check of the database or schema that any SHOW looks into.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pyarrow as pa
from sqlglot import exp

from tir_dagster.sandbox.warehouse.errors import SnowflakeError, syntax_error, unsupported
from tir_dagster.sandbox.warehouse.names import folded

if TYPE_CHECKING:
    from tir_dagster.sandbox.warehouse.session import Session

_COLUMNS = {
    "created_on": pa.timestamp("us", tz="UTC"),
    **dict.fromkeys(("name", "schema_name", "is_builtin", "is_aggregate", "is_ansi"), pa.string()),
    **dict.fromkeys(("min_num_arguments", "max_num_arguments"), pa.int64()),
    **dict.fromkeys(("arguments", "description", "catalog_name", "is_table_function"), pa.string()),
    **dict.fromkeys(("valid_for_clustering", "is_secure", "secrets", "external_access_integrations"), pa.string()),
    **dict.fromkeys(("is_external_function", "language", "is_memoizable", "is_data_metric"), pa.string()),
}
_SHOW = re.compile(r"SHOW\s+USER\s+FUNCTIONS\b\s*(?P<rest>.*?)\s*;?\s*", re.IGNORECASE | re.DOTALL)
_FILTERS = re.compile(r"(?:LIKE\s+'(?:[^']|'')*'\s*)?(?:IN\s+(?P<scope>.+))?", re.IGNORECASE | re.DOTALL)
_SCOPE = re.compile(r"(?:(?P<kind>ACCOUNT|DATABASE|SCHEMA)\b\s*)?(?P<name>.*)", re.IGNORECASE | re.DOTALL)


def run(session: Session, tree: exp.Expr) -> pa.Table | None:
    """The answer to SHOW USER FUNCTIONS; None for a statement that is not about functions."""
    if isinstance(tree, exp.Create) and str(tree.args.get("kind")).upper() in ("FUNCTION", "PROCEDURE"):
        raise unsupported(f"CREATE {str(tree.args['kind']).upper()}")
    if not isinstance(tree, exp.Command) or not (found := _SHOW.fullmatch(f"{tree.name} {tree.expression}")):
        return None
    filters = _FILTERS.fullmatch(found["rest"])
    if filters is None:
        raise syntax_error(f"syntax error: unexpected '{found['rest']}' in SHOW USER FUNCTIONS.")
    if filters["scope"]:
        _check_scope(session, filters["scope"])
    return pa.table({name: pa.array([], kind) for name, kind in _COLUMNS.items()})


def _check_scope(session: Session, text: str) -> None:
    scope = _SCOPE.fullmatch(text)
    assert scope is not None
    kind, name = (scope["kind"] or "SCHEMA").upper(), scope["name"].strip()
    if not name or kind == "ACCOUNT":
        if name:
            raise syntax_error(f"syntax error: unexpected '{name}' in SHOW USER FUNCTIONS.")
        return
    check_exists(session, exp.to_table(name, dialect="snowflake"), kind)


def check_exists(session: Session, scope: exp.Table, kind: str) -> None:
    """Raise unless the DATABASE or SCHEMA that a SHOW looks into is there; clients tell from this error that it is not."""
    database = folded(scope.this) if kind == "DATABASE" else folded(scope.args.get("db")) or session.database or ""
    known = database in session.lake.databases()
    if known and kind == "SCHEMA":
        known = folded(scope.this) == "INFORMATION_SCHEMA" or session.lake.has_schema(database, folded(scope.this))
    if not known:
        raise SnowflakeError(
            2043, "02000", "SQL compilation error:\nObject does not exist, or operation cannot be performed."
        )
