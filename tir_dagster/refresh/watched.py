"""The tables whose change starts a refresh, and a quiet moment of all of them. No Spark, no row is read."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tir_dagster.changes.plan import Known
from tir_dagster.changes.relation import read_tables
from tir_dagster.refresh.detect import Log, definition_of, quiet_moment
from tir_dagster.snowflake.connection import SnowflakeAccess
from tir_dagster.snowflake.names import TableName
from tir_dagster.snowflake.versions import SourceVersion
from tir_dagster.spec.extract import ExtractSpec


@dataclass(frozen=True)
class Watched:
    """All watched tables at a quiet moment: what a refresh that starts later shows, at least."""

    known: Known
    version: SourceVersion


def watched_tables(spec: ExtractSpec) -> tuple[TableName, ...]:
    """All tables that the extract reads, and those that are only watched, each once."""
    return tuple(dict.fromkeys([*read_tables(spec), *map(TableName.parse, spec.watch)]))


def watch_tables(
    spec: ExtractSpec, access: SnowflakeAccess, *, log: Log, sleep: Callable[[float], None] = time.sleep
) -> Watched:
    """Wait until all tables are quiet together; what changes after this is seen next time."""
    token, version = quiet_moment(spec, access, watched_tables(spec), log=log, sleep=sleep)
    return Watched(Known(definition_of(spec), "", "", token), version)
