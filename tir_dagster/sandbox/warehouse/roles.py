"""Roles and virtual warehouses: which there are, and which a session uses. Every role may do everything, and no warehouse computes."""

from __future__ import annotations

import fnmatch
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pyarrow as pa

from tir_dagster.sandbox.warehouse.errors import SnowflakeError, object_exists, unsupported

if TYPE_CHECKING:
    from tir_dagster.sandbox.warehouse.lake import Lake
    from tir_dagster.sandbox.warehouse.session import Session

# Snowflake's own roles, the warehouse of a new account, and that of the sample.
PRESET = {
    "ROLE": ("ACCOUNTADMIN", "ORGADMIN", "PUBLIC", "SECURITYADMIN", "SYSADMIN", "USERADMIN"),
    "WAREHOUSE": ("COMPUTE_WH", "MYWH"),
}
_NAME = r"(?P<name>\"[^\"]+\"|[\w$]+)"
_DDL = re.compile(
    rf"\s*(?P<verb>CREATE|ALTER|DROP)\s+(?P<replace>OR\s+REPLACE\s+)?(?P<kind>ROLE|WAREHOUSE)\s+"
    rf"(?P<exists>IF\s+(?:NOT\s+)?EXISTS\s+)?{_NAME}\b(?P<rest>.*)",
    re.IGNORECASE | re.DOTALL,
)
_USE = re.compile(rf"\s*USE\s+(?P<kind>ROLE|WAREHOUSE)\s+{_NAME}\s*;?\s*", re.IGNORECASE)
_SHOW = re.compile(r"\s*SHOW\s+(?P<kind>ROLE|WAREHOUSE)S(?:\s+LIKE\s+'(?P<like>[^']*)')?\s*;?\s*", re.IGNORECASE)


def run(session: Session, sql: str) -> pa.Table | None:
    """Run the statement if it is about roles or warehouses, and give its answer."""
    if (found := _SHOW.fullmatch(sql)) is not None:
        return _show(session, found["kind"].upper(), (found["like"] or "%").upper())
    if (found := _USE.fullmatch(sql)) is not None:
        _use(session, found["kind"].upper(), _stored(found["name"]))
        return _status("Statement executed successfully.")
    if (found := _DDL.fullmatch(sql)) is not None:
        session.transaction.commit()
        return _status(_define(session.lake, found))
    return None


def role_of_login(lake: Lake, wished: str | None) -> str:
    """The role that a login asks for; one that there is not is an error."""
    role = _stored(wished or "SYSADMIN")
    if role not in lake.names("ROLE"):
        raise SnowflakeError(
            390189,
            "08001",
            f"Role '{role}' specified in the connect string does not exist or not authorized. Contact your local system "
            "administrator, or attempt to login with another role, e.g. PUBLIC.",
        )
    return role


def warehouse_of_login(lake: Lake, wished: str | None) -> str | None:
    """The warehouse that a login asks for; without it where there is none of that name, as Snowflake goes on."""
    return _stored(wished) if wished and _stored(wished) in lake.names("WAREHOUSE") else None


def _use(session: Session, kind: str, name: str) -> None:
    if name not in session.lake.names(kind):
        raise SnowflakeError(
            2043, "02000", "SQL compilation error:\nObject does not exist, or operation cannot be performed."
        )
    if kind == "ROLE":
        session.context.role = name
    else:
        session.context.warehouse = name


def _define(lake: Lake, found: re.Match[str]) -> str:
    kind, verb, name = found["kind"].upper(), found["verb"].upper(), _stored(found["name"])
    is_there, noun = name in lake.names(kind), found["kind"].capitalize()
    if verb == "CREATE":
        if is_there and found["exists"]:
            return f"{name} already exists, statement succeeded."
        if is_there and not found["replace"]:
            raise object_exists(name)
        lake.add_name(kind, name)
        return f"{noun} {name} successfully created."
    if not is_there:
        if found["exists"]:
            return "Statement executed successfully."
        raise SnowflakeError(
            2003, "02000", f"SQL compilation error:\n{noun} '{name}' does not exist or not authorized."
        )
    if verb == "DROP":
        lake.drop_name(kind, name)
        return f"{name} successfully dropped."
    if re.match(r"\s*RENAME\b", found["rest"], re.IGNORECASE):
        raise unsupported(f"ALTER {kind} RENAME")
    return "Statement executed successfully."


def _show(session: Session, kind: str, like: str) -> pa.Table:
    pattern = like.replace("%", "*").replace("_", "?")
    names = [name for name in session.lake.names(kind) if fnmatch.fnmatchcase(name.upper(), pattern)]
    current = session.context.role if kind == "ROLE" else session.context.warehouse
    created = pa.array([datetime.fromtimestamp(0, UTC) for _ in names], pa.timestamp("us", tz="UTC"))
    is_current = pa.array(["Y" if name == current else "N" for name in names], pa.string())

    def same(text: str) -> pa.Array:
        return pa.array([text for _ in names], pa.string())

    if kind == "ROLE":
        return pa.table(
            {
                "created_on": created,
                "name": pa.array(names, pa.string()),
                "is_default": pa.array(["Y" if name == "SYSADMIN" else "N" for name in names], pa.string()),
                "is_current": is_current,
                "is_inherited": same("N"),
                "owner": same(""),
                "comment": same(""),
            }
        )
    return pa.table(
        {
            "name": pa.array(names, pa.string()),
            "state": same("STARTED"),
            "type": same("STANDARD"),
            "size": same("X-Small"),
            "is_default": same("N"),
            "is_current": is_current,
            "created_on": created,
            "owner": same("SYSADMIN"),
            "comment": same(""),
        }
    )


def _stored(name: str) -> str:
    return name[1:-1] if name.startswith('"') else name.upper()


def _status(message: str) -> pa.Table:
    return pa.table({"status": [message]})
