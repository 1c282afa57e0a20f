"""The tables whose change starts a refresh by the server, and one token for all of them. No Spark, no row is read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tir_dagster.changes.detect import QUIET_TRIES, Log, definition_of, quiet_moment
from tir_dagster.changes.plan import Known
from tir_dagster.errors import GuardError, SourceError
from tir_dagster.source.connection import SnowflakeAccess
from tir_dagster.source.names import TableName
from tir_dagster.source.versions import Probe, SourceVersion, probe
from tir_dagster.spec import ExtractSpec


@dataclass(frozen=True)
class Watched:
    """All watched tables at a quiet moment: what a refresh that starts later shows, at least."""

    known: Known
    version: SourceVersion


def watched_tables(spec: ExtractSpec) -> tuple[TableName, ...]:
    """The source and the further tables, each once."""
    return tuple(dict.fromkeys(TableName.parse(name) for name in (spec.source, *spec.watch)))


def combined_token(found: Iterable[tuple[TableName, Probe]]) -> str:
    """One token that changes when any of the tables does; SourceError for a table that gives none."""
    return ",".join(_token(table, probed) for table, probed in found)


def _token(table: TableName, found: Probe) -> str:
    if found.token is None:
        raise SourceError(found.problem or f"{table} gives no change token.")
    return found.token


def watch_tables(
    spec: ExtractSpec, access: SnowflakeAccess, *, log: Log, sleep: Callable[[float], None] = time.sleep
) -> Watched:
    """Wait until all tables are quiet together; what changes after this is seen next time."""
    tables = watched_tables(spec)
    for _ in range(QUIET_TRIES):
        moments = [quiet_moment(spec, access, table, log, sleep) for table in tables]
        token = ",".join(one for one, _ in moments)
        # While one was waited for, another may have begun to change.
        if len(tables) == 1 or token == combined_token(probe(access, tables).items()):
            return Watched(Known(definition_of(spec), "", "", token), min(version for _, version in moments))
    raise GuardError(
        f"{spec.name}: its tables keep changing: they were never quiet together. Nothing was touched. "
        "Refresh when their loads are done, or lower thresholds.quiet_period in the spec."
    )
